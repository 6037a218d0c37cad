/* The table of options: what each is, where a value of it comes from, and how one is set. */
#include "options_private.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define KIB (1ull << 10)
#define MIB (1ull << 20)
#define TIB (1ull << 40)
#define HOUR_MS 3600000ull

static const char *const backends[] = { "auto", "host", "cuda", NULL };          /* ep_options_backend */
static const char *const mps_modes[] = { "auto", "require", "off", NULL };       /* ep_options_mps */
static const char *const doorbells[] = { "wait", "poll", NULL };                 /* ep_options_doorbell */
static const char *const levels[] = { "debug", "info", "warn", "error", "off", NULL }; /* ep_log_level */
static const char *const formats[] = { "logfmt", "json", NULL };                 /* ep_log_format */

/* ---- defaults that depend on who we are ---------------------------------------- */

static char *join(const char *directory, const char *rest)
{
    char *path = NULL;

    if (asprintf(&path, "%s%s", directory, rest) < 0)
        return NULL;
    return path;
}

static bool is_set(const char *text)
{
    return text && *text;
}

static char *default_socket(void)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");

    if (geteuid() == 0)
        return strdup("/run/ep-server/ep.sock");
    return is_set(runtime) ? join(runtime, "/ep-server/ep.sock") : strdup("");
}

static char *default_state_dir(void)
{
    const char *state = getenv("XDG_STATE_HOME");
    const char *home = getenv("HOME");

    if (geteuid() == 0)
        return strdup("/var/lib/ep-server");
    if (is_set(state))
        return join(state, "/ep-server");
    return is_set(home) ? join(home, "/.local/state/ep-server") : strdup("");
}

static char *default_name(void)
{
    char name[256] = "";

    if (gethostname(name, sizeof name - 1) != 0)
        return strdup("localhost");
    return strdup(name);
}

/* ---- the table ------------------------------------------------------------------ */

#define FIELD(f) offsetof(struct ep_options, f)

const struct ep_option ep_options_table[] = {
    { "config", "node", EP_TYPE_PATH, EP_OPTION_NO_FILE, FIELD(config), .fallback = "",
      .doc = "YAML file to read; none by default" },
    { "name", "node", EP_TYPE_STRING, 0, FIELD(name), .computed = default_name,
      .doc = "Name of this node in groups, logs and metrics; by default the host name" },
    { "backend", "node", EP_TYPE_ENUM, 0, FIELD(backend), .fallback = "auto", .words = backends,
      .doc = "Where ranks run: on GPUs (those that CUDA_VISIBLE_DEVICES shows this process) or on the host's CPUs; "
             "auto takes the GPUs if there are any" },
    { "gpus", "node", EP_TYPE_STRING, 0, FIELD(gpus), .fallback = "",
      .doc = "Which of the GPUs that this process sees are this server's, as \"0,1\"; by default all. Servers that share a "
             "machine should see each other's GPUs: what they put to each other goes over NVLink only then" },
    { "mps", "node", EP_TYPE_ENUM, 0, FIELD(mps), .fallback = "auto", .words = mps_modes,
      .doc = "The MPS server of the GPUs: auto says in the log whether there is one, require starts only with "
             "it, off only without. Without one, each op that the server runs for a worker switches the GPU "
             "between two processes; workers that run their own ops do not need it" },
    { "doorbell", "node", EP_TYPE_ENUM, 0, FIELD(doorbell), .fallback = "wait", .words = doorbells,
      .doc = "With MPS, what waits for a worker to ask for its next low-latency op where the server runs them: wait, the "
             "GPU's front end; poll, a warp that looks, which makes an op 4 to 5 us faster on an H200. While a worker asks "
             "for such ops, and 30 ms longer, no block has all the shared memory (more than 226 KB of 227) or all the "
             "registers of the multiprocessor that the warp is on" },
    { "sms-per-rank", "node", EP_TYPE_UINT, 0, FIELD(sms_per_rank), .fallback = "0", .max = 1024,
      .doc = "The most multiprocessors of a GPU that ops of one rank may fill; 0: an equal part of the GPU for each "
             "rank that its group has there. Where the server runs a worker's ops, they are held while it is attached: "
             "groups that share GPUs need less than all" },
    { "host-ranks", "node", EP_TYPE_UINT, 0, FIELD(host_ranks), .fallback = "8", .min = 1, .max = 1024,
      .doc = "Devices that the host backend offers, each good for one rank of each group; a rank that "
             "is not in use costs nothing. On GPUs it has no meaning" },
    { "memory", "node", EP_TYPE_BYTES, 0, FIELD(memory), .fallback = "0", .min = 0, .max = 1024 * TIB,
      .doc = "Memory for the windows of all groups, on GPUs of each; 0: half of what is free at start" },
    { "state-dir", "node", EP_TYPE_PATH, 0, FIELD(state_dir), .computed = default_state_dir,
      .doc = "Directory of what must survive a restart (groups, drain state), unless store says where; made if it is "
             "not there" },
    { "store", "node", EP_TYPE_STRING, 0, FIELD(store), .fallback = "",
      .doc = "etcd (3.4 or later) that keeps what must survive a restart, instead of a file in state-dir: "
             "etcd://HOST:PORT,HOST:PORT/PREFIX, with all of its members; servers with the same prefix, by default "
             "ep-server, are one cluster" },
    { "lost-after", "node", EP_TYPE_DURATION, 0, FIELD(lost_after), .fallback = "2s", .min = 2000, .max = HOUR_MS,
      .doc = "How long the store may hear nothing of this server until the cluster does without its ranks, and, if it "
             "leads, another leads; and, half a second more, how long another server that has ranks of its groups may "
             "acknowledge nothing of what this one sends until their ranks do without each other. No shorter than "
             "etcd's shortest lease; longer where machines stand still for seconds and go on" },
    { "store-ca", "node", EP_TYPE_PATH, 0, FIELD(store_ca), .fallback = "",
      .doc = "PEM file of the authority of etcd's certificates; with it, or with store-cert, connections are TLS" },
    { "store-cert", "node", EP_TYPE_PATH, 0, FIELD(store_cert), .fallback = "",
      .doc = "PEM file of the certificate to show to etcd; read again when it changes" },
    { "store-key", "node", EP_TYPE_PATH, 0, FIELD(store_key), .fallback = "",
      .doc = "PEM file of its private key" },
    { "store-user", "node", EP_TYPE_STRING, 0, FIELD(store_user), .fallback = "",
      .doc = "User to log in to etcd as; none by default" },
    { "store-password-file", "node", EP_TYPE_PATH, 0, FIELD(store_password_file), .fallback = "",
      .doc = "File whose first line is the user's password; read at each login" },

    { "socket", "workers", EP_TYPE_PATH, 0, FIELD(socket), .computed = default_socket,
      .doc = "Unix socket for workers and local administration; a second one, with the suffix "
             EP_OPTION_SIDE_SOCKET ", stands beside it and passes file descriptors" },
    { "socket-mode", "workers", EP_TYPE_MODE, 0, FIELD(socket_mode), .fallback = "0666",
      .doc = "File mode of both sockets; whoever can connect must still pass allow-uid or allow-gid" },
    { "allow-uid", "workers", EP_TYPE_UIDS, 0, FIELD(allow_uid), .fallback = "",
      .doc = "Users that may use the sockets, to attach and to look, by name or number; with neither this nor "
             "allow-gid: the server's own user and root. Who may change things: admin-uid" },
    { "allow-gid", "workers", EP_TYPE_GIDS, 0, FIELD(allow_gid), .fallback = "",
      .doc = "Groups whose processes may use the sockets (the process's effective group)" },
    { "attach-token-file", "workers", EP_TYPE_PATH, 0, FIELD(attach_token_file), .fallback = "",
      .doc = "File with a secret that workers must show; none by default" },

    { "listen", "admin", EP_TYPE_ADDRESS, 0, FIELD(listen), .fallback = "",
      .doc = "HOST:PORT for administration over TCP; none by default, port 0 picks one" },
    { "advertise", "admin", EP_TYPE_ADDRESS, 0, FIELD(advertise), .fallback = "",
      .doc = "HOST:PORT at which the other servers of a cluster, and operators, reach what listen says; by default that "
             "itself, port 0 stands for the one that was bound. With TLS the certificate must be good for HOST" },
    { "admin-uid", "admin", EP_TYPE_UIDS, 0, FIELD(admin_uid), .fallback = "",
      .doc = "Users that may change things through the socket, by name or number; with neither this nor admin-gid: the "
             "server's own user and root. They may use the sockets; whom only allow-uid or allow-gid names may attach "
             "and look" },
    { "admin-gid", "admin", EP_TYPE_GIDS, 0, FIELD(admin_gid), .fallback = "",
      .doc = "Groups whose processes may (the process's effective group)" },
    { "tls-ca", "admin", EP_TYPE_PATH, 0, FIELD(tls_ca), .fallback = "",
      .doc = "PEM file of the authority whose certificates clients, and other servers of a cluster, must present" },
    { "tls-cert", "admin", EP_TYPE_PATH, 0, FIELD(tls_cert), .fallback = "",
      .doc = "PEM file of the server's certificate, which it also shows to other servers; read again when it "
             "changes" },
    { "tls-key", "admin", EP_TYPE_PATH, 0, FIELD(tls_key), .fallback = "",
      .doc = "PEM file of its private key" },
    { "peer-ou", "admin", EP_TYPE_STRING, 0, FIELD(peer_ou), .fallback = "",
      .doc = "Unit (OU) that the subject of every server's certificate has; what servers ask of each other is refused to "
             "all other certificates then. By default it is open to whoever may change things" },
    { "insecure", "admin", EP_TYPE_BOOL, 0, FIELD(insecure), .fallback = "false",
      .doc = "Allow administration by clients that show no certificate, also from other machines; without it they may "
             "look, and only from this one" },

    { "max-message-bytes", "limits", EP_TYPE_BYTES, 0, FIELD(max_message_bytes), .fallback = "4MiB",
      .min = 64 * KIB, .max = 256 * MIB, .doc = "Largest message of a call, either way" },
    { "max-connections", "limits", EP_TYPE_UINT, 0, FIELD(max_connections), .fallback = "1024", .min = 1,
      .max = 65536, .doc = "Connections on each socket" },
    { "max-watches", "limits", EP_TYPE_UINT, 0, FIELD(max_watches), .fallback = "1024", .min = 1, .max = 65536,
      .doc = "Watches of groups, stats and health on each socket, and claims that wait for a rank" },
    /* Room for inputs and outputs of many large ops: 128 tokens at 8 ranks of 32 experts fill half a GiB.  And little
     * enough for what a worker leaves when it dies to be given back in seconds: half of one for each GiB. */
    { "max-region-bytes", "limits", EP_TYPE_BYTES, 0, FIELD(max_region_bytes), .fallback = "16GiB", .min = 0,
      .max = 1024 * TIB,
      .doc = "GPU memory of a worker's own that the server maps for its ops, when it runs them (ep_register()); 0: "
             "none. It stays the worker's, and is kept for the moment that the server needs after a worker's end" },

    { "metrics", "service", EP_TYPE_ADDRESS, 0, FIELD(metrics), .fallback = "",
      .doc = "HOST:PORT for /metrics, /healthz and /readyz over HTTP; none by default, port 0 picks one" },
    { "log-level", "service", EP_TYPE_ENUM, EP_OPTION_RELOAD, FIELD(log_level), .fallback = "info",
      .words = levels, .doc = "Least important messages to write; audit lines are written whatever it says" },
    { "log-format", "service", EP_TYPE_ENUM, EP_OPTION_RELOAD, FIELD(log_format), .fallback = "logfmt",
      .words = formats, .doc = "Form of the log's lines" },
    { "drain-grace", "service", EP_TYPE_DURATION, EP_OPTION_RELOAD, FIELD(drain_grace), .fallback = "30s",
      .min = 0, .max = 24 * HOUR_MS, .doc = "How long a stopping server waits for its workers to leave" },
    { "port-file", "service", EP_TYPE_PATH, 0, FIELD(port_file), .fallback = "",
      .doc = "File that gets the bound ports and sockets as KEY=VALUE lines once the server is ready" },
    { "pid-file", "service", EP_TYPE_PATH, 0, FIELD(pid_file), .fallback = "",
      .doc = "File that holds the process id, locked, while the server runs" },
};
const size_t ep_options_count = sizeof ep_options_table / sizeof *ep_options_table;
_Static_assert(sizeof ep_options_table / sizeof *ep_options_table <= EP_OPTIONS_MAX, "origins is too small");

size_t ep_option_place(const struct ep_option *option)
{
    return (size_t)(option - ep_options_table);
}

/* ---- names ---------------------------------------------------------------------- */

const struct ep_option *ep_option_find(const char *name, size_t length)
{
    for (size_t i = 0; i < ep_options_count; i++)
        if (strncmp(ep_options_table[i].name, name, length) == 0 && !ep_options_table[i].name[length])
            return &ep_options_table[i];
    return NULL;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Levenshtein; upper and lower case, '-' and '_' count as equal. */
static size_t distance(const char *a, size_t na, const char *b, size_t nb)
{
    size_t row[64];

    if (na >= 64 || nb >= 64)
        return SIZE_MAX;
    for (size_t j = 0; j <= nb; j++)
        row[j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t diagonal = row[0];

        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            char left = a[i - 1] == '_' ? '-' : (char)tolower((unsigned char)a[i - 1]);
            size_t change = diagonal + (left != b[j - 1]);

            diagonal = row[j];
            row[j] = least(least(row[j], row[j - 1]) + 1, change);
        }
    }
    return row[nb];
}

const char *ep_option_closest(const char *name, size_t length)
{
    const char *closest = NULL;
    size_t best = length / 3 + 2; /* further away is no typo */

    for (size_t i = 0; i < ep_options_count; i++) {
        const char *candidate = ep_options_table[i].name;
        size_t d = distance(name, length, candidate, strlen(candidate));

        if (d >= best)
            continue;
        best = d;
        closest = candidate;
    }
    return closest;
}

void ep_option_environment_name(const struct ep_option *option, char *text, size_t size)
{
    snprintf(text, size, EP_OPTION_ENVIRONMENT "%s", option->name);
    for (char *p = text; *p; p++)
        *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
}

void ep_option_source_text(const struct ep_option *option, const struct ep_option_source *source,
                           char *text, size_t size)
{
    char name[64];

    switch (source->origin.kind) {
    case EP_ORIGIN_DEFAULT:
        snprintf(text, size, "default");
        break;
    case EP_ORIGIN_FILE:
        snprintf(text, size, "%s:%d", source->file, source->origin.line);
        break;
    case EP_ORIGIN_ENVIRONMENT:
        ep_option_environment_name(option, name, sizeof name);
        snprintf(text, size, "environment %s", name);
        break;
    case EP_ORIGIN_FLAG:
        snprintf(text, size, "flag --%s", option->name);
        break;
    }
}

/* ---- setting a value -------------------------------------------------------------- */

ep_status ep_option_mismatch(const struct ep_option *option, const char *what,
                             const struct ep_option_source *source, struct ep_error *error)
{
    char from[256], expected[160];

    ep_option_source_text(option, source, from, sizeof from);
    ep_option_expects(option, expected, sizeof expected);
    return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is %s (%s): must be %s", option->name, what, from,
                        expected);
}

/* The value as it was given, short enough to leave room for the rest of the sentence. */
static ep_status mismatch_text(const struct ep_option *option, const char *text, const char *why,
                               const struct ep_option_source *source, struct ep_error *error)
{
    char what[200], value[64];
    size_t n = 0;

    for (const char *p = text; *p && n < sizeof value - 4; p++)
        value[n++] = (unsigned char)*p < 0x20 || *p == 0x7f ? '?' : *p;
    strcpy(value + n, text[n] ? "..." : "");
    snprintf(what, sizeof what, "\"%s\"%s%s", value, why ? ", and " : "", why ? why : "");
    return ep_option_mismatch(option, what, source, error);
}

ep_status ep_option_set(struct ep_options *options, const struct ep_option *option, const char *text,
                        bool append, const struct ep_option_source *source, struct ep_error *error)
{
    char *why = NULL;
    ep_status status = EP_OK;

    if (ep_option_parse(option, text, append, ep_option_field(options, option), &why))
        options->origins[ep_option_place(option)] = source->origin;
    else
        status = mismatch_text(option, text, why, source, error);
    free(why);
    return status;
}
