/* The table of options, and the sources that are read through it: defaults, environment, flags. */
#include "options_private.h"

#include <argp.h>
#include <ctype.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/un.h>
#include <unistd.h>

#include "ep_store_url.h"

#define ENVIRONMENT_PREFIX "EP_SERVER_"
#define SIDE_SOCKET_SUFFIX ".attach" /* as in main.c; counts for the length of the path */

#define KIB (1ull << 10)
#define MIB (1ull << 20)
#define TIB (1ull << 40)
#define HOUR_MS 3600000ull

static const char *const backends[] = { "auto", "host", "cuda", NULL };          /* ep_options_backend */
static const char *const mps_modes[] = { "auto", "require", "off", NULL };       /* ep_options_mps */
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
    { "mps", "node", EP_TYPE_ENUM, 0, FIELD(mps), .fallback = "auto", .words = mps_modes,
      .doc = "The MPS server of the GPUs: auto says in the log whether there is one, require starts only with "
             "it, off only without. Without one, each op that the server runs for a worker switches the GPU "
             "between two processes; workers that run their own ops do not need it" },
    { "sms-per-rank", "node", EP_TYPE_UINT, 0, FIELD(sms_per_rank), .fallback = "0", .max = 1024,
      .doc = "The most multiprocessors of a GPU that ops of one rank may fill when the server runs them; 0: an equal "
             "part of the GPU for each rank that its group has there. They are held while a worker is attached: "
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
             "etcd://HOST:PORT,HOST:PORT/PREFIX, with all of its members; a prefix is one server's alone, and by "
             "default ep-server" },
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
             SIDE_SOCKET_SUFFIX ", stands beside it and passes file descriptors" },
    { "socket-mode", "workers", EP_TYPE_MODE, 0, FIELD(socket_mode), .fallback = "0666",
      .doc = "File mode of both sockets; whoever can connect must still pass allow-uid or allow-gid" },
    { "allow-uid", "workers", EP_TYPE_UIDS, 0, FIELD(allow_uid), .fallback = "",
      .doc = "Users that may use the sockets, by name or number; with neither this nor allow-gid: the "
             "server's own user and root" },
    { "allow-gid", "workers", EP_TYPE_GIDS, 0, FIELD(allow_gid), .fallback = "",
      .doc = "Groups whose processes may use the sockets (the process's effective group)" },
    { "attach-token-file", "workers", EP_TYPE_PATH, 0, FIELD(attach_token_file), .fallback = "",
      .doc = "File with a secret that workers must show; none by default" },

    { "listen", "admin", EP_TYPE_ADDRESS, 0, FIELD(listen), .fallback = "",
      .doc = "HOST:PORT for administration over TCP; none by default, port 0 picks one" },
    { "tls-ca", "admin", EP_TYPE_PATH, 0, FIELD(tls_ca), .fallback = "",
      .doc = "PEM file of the authority whose certificates clients must present" },
    { "tls-cert", "admin", EP_TYPE_PATH, 0, FIELD(tls_cert), .fallback = "",
      .doc = "PEM file of the server's certificate; read again when it changes" },
    { "tls-key", "admin", EP_TYPE_PATH, 0, FIELD(tls_key), .fallback = "",
      .doc = "PEM file of its private key" },
    { "insecure", "admin", EP_TYPE_BOOL, 0, FIELD(insecure), .fallback = "false",
      .doc = "Allow administration from other machines by clients that show no certificate" },

    { "max-message-bytes", "limits", EP_TYPE_BYTES, 0, FIELD(max_message_bytes), .fallback = "4MiB",
      .min = 64 * KIB, .max = 256 * MIB, .doc = "Largest message of a call, either way" },
    { "max-connections", "limits", EP_TYPE_UINT, 0, FIELD(max_connections), .fallback = "1024", .min = 1,
      .max = 65536, .doc = "Connections on each unix socket" },
    /* Room for inputs and outputs of many large ops: 128 tokens at 8 ranks of 32 experts fill half a GiB.  And little
     * enough for what a worker leaves when it dies to be given back in seconds: half of one for each GiB. */
    { "max-region-bytes", "limits", EP_TYPE_BYTES, 0, FIELD(max_region_bytes), .fallback = "16GiB", .min = 0,
      .max = 1024 * TIB,
      .doc = "GPU memory of a worker's own that the server maps for its ops, when it runs them (ep_register()); 0: "
             "none. It stays the worker's, and is kept for the moment that the server needs after a worker's end" },

    { "metrics", "service", EP_TYPE_ADDRESS, 0, FIELD(metrics), .fallback = "",
      .doc = "HOST:PORT for /metrics, /healthz and /readyz over HTTP; none by default, port 0 picks one" },
    { "log-level", "service", EP_TYPE_ENUM, EP_OPTION_RELOAD, FIELD(log_level), .fallback = "info",
      .words = levels, .doc = "Least important messages to write" },
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

static size_t place_of(const struct ep_option *option)
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
    snprintf(text, size, ENVIRONMENT_PREFIX "%s", option->name);
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
        options->origins[place_of(option)] = source->origin;
    else
        status = mismatch_text(option, text, why, source, error);
    free(why);
    return status;
}

static ep_status set_defaults(struct ep_options *options, struct ep_error *error)
{
    static const struct ep_option_source source = { { EP_ORIGIN_DEFAULT, 0 }, NULL };

    for (size_t i = 0; i < ep_options_count; i++) {
        const struct ep_option *option = &ep_options_table[i];
        char *text = option->computed ? option->computed() : strdup(option->fallback);
        ep_status status = text ? ep_option_set(options, option, text, false, &source, error)
                                : ep_error_set(error, EP_NO_MEMORY, "out of memory");

        free(text);
        if (status != EP_OK)
            return status;
    }
    return EP_OK;
}

/* ---- environment ------------------------------------------------------------------ */

/*
 * Kubernetes puts variables for every service into every container; a service named ep-server or
 * ep-server-metrics makes EP_SERVER_SERVICE_HOST, EP_SERVER_METRICS_PORT_9090_TCP ...  Not ours.
 */
static bool is_service_link(const char *name, size_t length)
{
    char copy[256];
    const char *port;

    if (length >= sizeof copy)
        return false;
    memcpy(copy, name, length);
    copy[length] = '\0';
    port = strstr(copy, "_PORT");
    return strstr(copy, "_SERVICE_HOST") || strstr(copy, "_SERVICE_PORT") ||
           (port && (!port[5] || (port[5] == '_' && isdigit((unsigned char)port[6]))));
}

static const struct ep_option *find_variable(const char *name, size_t length)
{
    char wanted[64];

    for (size_t i = 0; i < ep_options_count; i++) {
        ep_option_environment_name(&ep_options_table[i], wanted, sizeof wanted);
        if (strlen(wanted) == length && strncmp(wanted, name, length) == 0)
            return &ep_options_table[i];
    }
    return NULL;
}

static ep_status unknown_variable(const char *name, size_t length, struct ep_error *error)
{
    const size_t prefix = strlen(ENVIRONMENT_PREFIX);
    const char *closest = ep_option_closest(name + prefix, length - prefix);
    char wanted[64] = "";

    if (closest)
        ep_option_environment_name(ep_option_find(closest, strlen(closest)), wanted, sizeof wanted);
    return ep_error_set(error, EP_INVALID_ARGUMENT, "environment variable %.*s: there is no such option%s%s%s",
                        (int)least(length, 100), name, closest ? "; did you mean " : "", wanted,
                        closest ? "?" : "");
}

static ep_status read_variable(struct ep_options *options, const char *entry, struct ep_error *error)
{
    static const struct ep_option_source source = { { EP_ORIGIN_ENVIRONMENT, 0 }, NULL };
    const char *equals = strchr(entry, '=');
    const struct ep_option *option;
    size_t length;

    if (strncmp(entry, ENVIRONMENT_PREFIX, strlen(ENVIRONMENT_PREFIX)) != 0 || !equals)
        return EP_OK;
    length = (size_t)(equals - entry);
    option = find_variable(entry, length);
    if (option)
        return ep_option_set(options, option, equals + 1, false, &source, error);
    return is_service_link(entry, length) ? EP_OK : unknown_variable(entry, length, error);
}

static ep_status read_environment(struct ep_options *options, char **environment, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (; environment && *environment && status == EP_OK; environment++)
        status = read_variable(options, *environment, error);
    return status;
}

/* ---- flags ------------------------------------------------------------------------ */

enum { KEY_CHECK = 0x100, KEY_PRINT, KEY_OPTION };

struct flags {
    struct ep_options *options;
    struct ep_error *error;
    bool only_config; /* the first pass: which file? */
};

/* Flags that do something instead of setting something. */
static const char *const plain_flags[] = { "check", "print-config", "help", "usage", "version" };

static bool is_plain_flag(const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof plain_flags / sizeof *plain_flags; i++)
        if (strlen(plain_flags[i]) == length && strncmp(plain_flags[i], name, length) == 0)
            return true;
    return false;
}

static ep_status unknown_flag(const char *name, size_t length, struct ep_error *error)
{
    const char *closest = ep_option_closest(name, length);

    return ep_error_set(error, EP_INVALID_ARGUMENT,
                        "flag --%.*s: there is no such option%s%s%s; --help lists them",
                        (int)least(length, 100), name, closest ? "; did you mean --" : "",
                        closest ? closest : "", closest ? "?" : "");
}

/*
 * What argp would complain about in its own words is found here first.  Abbreviations are not
 * accepted: a script that uses one would break with the next option.
 */
static ep_status check_flags(int argc, char **argv, struct ep_error *error)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i] + 2;
        size_t length = strncmp(argv[i], "--", 2) == 0 ? strcspn(name, "=") : 0;
        const struct ep_option *option = length ? ep_option_find(name, length) : NULL;

        if (strcmp(argv[i], "-?") == 0 || strcmp(argv[i], "-V") == 0)
            continue;
        if (length == 0)
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "argument \"%.100s\" is unexpected: options are --NAME=VALUE", argv[i]);
        if (!option && !is_plain_flag(name, length))
            return unknown_flag(name, length, error);
        if (!option && name[length] == '=')
            return ep_error_set(error, EP_INVALID_ARGUMENT, "flag --%.*s takes no value", (int)length, name);
        if (!option || name[length] == '=' || option->type == EP_TYPE_BOOL)
            continue;
        if (++i >= argc)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "flag --%s has no value", option->name);
    }
    return EP_OK;
}

static error_t set_flag(struct flags *flags, const struct ep_option *option, const char *text)
{
    static const struct ep_option_source source = { { EP_ORIGIN_FLAG, 0 }, NULL };
    bool append = flags->options->origins[place_of(option)].kind == EP_ORIGIN_FLAG;

    if (flags->only_config && option->offset != FIELD(config))
        return 0;
    if (ep_option_set(flags->options, option, text ? text : "true", append, &source, flags->error) != EP_OK)
        return EINVAL;
    return 0;
}

static error_t on_flag(int key, char *text, struct argp_state *state)
{
    struct flags *flags = state->input;

    switch (key) {
    case KEY_CHECK:
        flags->options->action = EP_ACTION_CHECK;
        return 0;
    case KEY_PRINT:
        flags->options->action = EP_ACTION_PRINT;
        return 0;
    default:
        if (key < KEY_OPTION || key >= KEY_OPTION + (int)ep_options_count)
            return ARGP_ERR_UNKNOWN;
        return set_flag(flags, &ep_options_table[key - KEY_OPTION], text);
    }
}

static const char *placeholder(enum ep_option_type type)
{
    static const char *const names[] = {
        [EP_TYPE_STRING] = "TEXT", [EP_TYPE_PATH] = "PATH", [EP_TYPE_ADDRESS] = "HOST:PORT",
        [EP_TYPE_UINT] = "N", [EP_TYPE_BYTES] = "BYTES", [EP_TYPE_DURATION] = "TIME",
        [EP_TYPE_BOOL] = "BOOL", [EP_TYPE_ENUM] = "WORD", [EP_TYPE_MODE] = "MODE",
        [EP_TYPE_UIDS] = "USER,...", [EP_TYPE_GIDS] = "GROUP,...",
    };

    return names[type];
}

/* "Doc (one of a, b; default b; reloadable)" */
static char *help_text(const struct ep_option *option)
{
    char *computed = option->computed ? option->computed() : NULL;
    const char *fallback = computed ? computed : option->fallback;
    char *text = NULL, expected[160] = "";
    size_t size;
    FILE *out = open_memstream(&text, &size);

    if (out) {
        if (option->type == EP_TYPE_ENUM || option->type == EP_TYPE_UINT)
            ep_option_expects(option, expected, sizeof expected);
        fprintf(out, "%s", option->doc);
        if (is_set(expected) || is_set(fallback))
            fprintf(out, " (%s%s%s%s%s)", expected, *expected && is_set(fallback) ? "; " : "",
                    is_set(fallback) ? "default " : "", fallback,
                    option->flags & EP_OPTION_RELOAD ? "; reloadable" : "");
        fclose(out);
    }
    free(computed);
    return text;
}

static void describe_flags(struct argp_option *list, char **texts)
{
    const char *section = "";
    int group = 0;
    size_t n = 0;

    for (size_t i = 0; i < ep_options_count; i++) {
        const struct ep_option *option = &ep_options_table[i];

        if (strcmp(section, option->section) != 0) {
            static const char *const titles[] = { "Node", "Workers", "Administration", "Limits", "Service" };

            list[n++] = (struct argp_option){ .doc = titles[group], .group = group + 1 };
            section = option->section;
            group++;
        }
        texts[i] = help_text(option);
        list[n++] = (struct argp_option){ .name = option->name, .key = KEY_OPTION + (int)i,
                                          .arg = placeholder(option->type), .doc = texts[i],
                                          .flags = option->type == EP_TYPE_BOOL ? OPTION_ARG_OPTIONAL : 0,
                                          .group = group };
    }
    list[n++] = (struct argp_option){ .doc = "Instead of running", .group = group + 1 };
    list[n++] = (struct argp_option){ .name = "check", .key = KEY_CHECK, .group = group + 1,
                                      .doc = "Check the configuration and exit" };
    list[n] = (struct argp_option){ .name = "print-config", .key = KEY_PRINT, .group = group + 1,
                                    .doc = "Print the configuration and where each value comes from" };
}

static ep_status read_flags(struct flags *flags, int argc, char **argv)
{
    static const char doc[] =
        "Expert routing for Mixture-of-Experts models as a service of this node.\v"
        "Every option can also be given in the environment (--host-ranks as EP_SERVER_HOST_RANKS) and in "
        "the YAML file that --config names; a flag wins over the environment, the environment over the "
        "file.  SIGHUP reads the file again; SIGTERM drains and stops, a second one stops at once.";
    struct argp_option list[EP_OPTIONS_MAX * 2] = { 0 };
    char *texts[EP_OPTIONS_MAX] = { NULL };
    struct argp argp = { .options = list, .parser = on_flag, .doc = doc };
    error_t failed;

    describe_flags(list, texts);
    failed = argp_parse(&argp, argc, argv, 0, NULL, flags);
    for (size_t i = 0; i < ep_options_count; i++)
        free(texts[i]);
    if (!failed)
        return EP_OK;
    if (flags->error && flags->error->status != EP_OK)
        return flags->error->status;
    return ep_error_set(flags->error, EP_INVALID_ARGUMENT, "the flags make no sense; --help lists them");
}

/* ---- all sources --------------------------------------------------------------------- */

/* --config, else EP_SERVER_CONFIG: needed before the other sources can be put on top of the file. */
static ep_status find_file(struct ep_options *options, int argc, char **argv, char **environment,
                           struct ep_error *error)
{
    static const char variable[] = ENVIRONMENT_PREFIX "CONFIG=";
    struct flags flags = { .options = options, .error = error, .only_config = true };
    ep_status status = EP_OK;

    for (; environment && *environment && status == EP_OK; environment++)
        if (strncmp(*environment, variable, sizeof variable - 1) == 0)
            status = read_variable(options, *environment, error);
    return status == EP_OK ? read_flags(&flags, argc, argv) : status;
}

static ep_status read_sources(struct ep_options *options, int argc, char **argv, char **environment,
                              struct ep_error *error)
{
    struct flags flags = { .options = options, .error = error };
    ep_status status = check_flags(argc, argv, error);

    if (status == EP_OK)
        status = set_defaults(options, error);
    if (status == EP_OK)
        status = find_file(options, argc, argv, environment, error);
    if (status == EP_OK && *options->config)
        status = ep_options_read_file(options, options->config, error);
    if (status == EP_OK)
        status = read_environment(options, environment, error);
    return status == EP_OK ? read_flags(&flags, argc, argv) : status;
}

ep_status ep_options_load(int argc, char **argv, char **environment, struct ep_options **out,
                          struct ep_error *error)
{
    struct ep_options *options = calloc(1, sizeof *options);
    struct ep_error local = EP_ERROR_INIT; /* the flags' parser reads it back */
    ep_status status;

    if (!options)
        return ep_error_set(error, EP_NO_MEMORY, "out of memory");
    status = read_sources(options, argc, argv, environment, &local);
    if (status != EP_OK) {
        ep_options_free(options);
        if (error)
            *error = local;
        return status;
    }
    *out = options;
    return EP_OK;
}

void ep_options_free(struct ep_options *options)
{
    if (!options)
        return;
    for (size_t i = 0; i < ep_options_count; i++)
        ep_option_clear(&ep_options_table[i], ep_option_field(options, &ep_options_table[i]));
    free(options);
}

/* ---- what makes sense together ----------------------------------------------------------- */

static ep_status check_readable(const char *name, const char *path, struct ep_error *error)
{
    int fd;

    if (!*path)
        return EP_OK;
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return ep_error_errno(error, EP_INVALID_ARGUMENT, "%s: cannot read %s", name, path);
    close(fd);
    return EP_OK;
}

static ep_status check_paths(const struct ep_options *o, struct ep_error *error)
{
    const size_t room = sizeof ((struct sockaddr_un *)NULL)->sun_path - sizeof SIDE_SOCKET_SUFFIX;

    if (!*o->socket)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "socket is not set, and XDG_RUNTIME_DIR is not either: give --socket=PATH");
    if (strlen(o->socket) > room)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "socket is %zu bytes long: a path of a unix socket may have %zu here, the suffix "
                            SIDE_SOCKET_SUFFIX " of the second one counted", strlen(o->socket), room);
    if (!*o->state_dir)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "state-dir is not set, and HOME is not either: "
                            "give --state-dir=PATH");
    if (!*o->name)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "name is empty: give --name=TEXT");
    return check_readable("attach-token-file", o->attach_token_file, error);
}

static bool is_loopback(const char *address)
{
    size_t length = (size_t)(strrchr(address, ':') - address);

    return strncmp(address, "127.", 4) == 0 || (length == 5 && strncmp(address, "[::1]", 5) == 0) ||
           (length == 9 && strncmp(address, "localhost", 9) == 0);
}

static ep_status check_tls_files(const struct ep_options *o, struct ep_error *error)
{
    ep_status status = EP_OK;

    if (!*o->tls_cert != !*o->tls_key)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is set without %s: both are needed",
                            *o->tls_cert ? "tls-cert" : "tls-key", *o->tls_cert ? "tls-key" : "tls-cert");
    if (*o->tls_ca && !*o->tls_cert)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "tls-ca is set without tls-cert and tls-key: all three are needed");
    status = check_readable("tls-ca", o->tls_ca, error);
    if (status == EP_OK)
        status = check_readable("tls-cert", o->tls_cert, error);
    if (status == EP_OK)
        status = check_readable("tls-key", o->tls_key, error);
    return status;
}

static ep_status check_admin(const struct ep_options *o, struct ep_error *error)
{
    ep_status status = check_tls_files(o, error);

    if (status != EP_OK || !*o->listen)
        return status;
    if (!o->insecure && !is_loopback(o->listen) && !*o->tls_ca)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "listen is %s, which other machines reach, and %s: anyone there could administer "
                            "this node; set tls-ca, tls-cert and tls-key, or insecure if that is wanted",
                            o->listen, *o->tls_cert ? "tls-ca is not set" : "there is no TLS");
    return EP_OK;
}

/* What belongs to etcd is of no use, and most likely a mistake, where the store is a file. */
static ep_status check_no_store(const struct ep_options *o, struct ep_error *error)
{
    const struct { const char *name, *value; } parts[] = {
        { "store-ca", o->store_ca },     { "store-cert", o->store_cert },
        { "store-key", o->store_key },   { "store-user", o->store_user },
        { "store-password-file", o->store_password_file },
    };

    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (*parts[i].value)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is set without store: give --store=etcd://HOST:PORT",
                                parts[i].name);
    return EP_OK;
}

static ep_status check_store(const struct ep_options *o, struct ep_error *error)
{
    struct ep_store_url url;
    ep_status status;

    if (!*o->store)
        return check_no_store(o, error);
    if ((status = ep_store_url_parse(o->store, &url, error)))
        return status;
    ep_store_url_fini(&url);
    if (!*o->store_cert != !*o->store_key)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is set without %s: both are needed",
                            *o->store_cert ? "store-cert" : "store-key", *o->store_cert ? "store-key" : "store-cert");
    if (!*o->store_user != !*o->store_password_file)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is set without %s: both are needed",
                            *o->store_user ? "store-user" : "store-password-file",
                            *o->store_user ? "store-password-file" : "store-user");
    if ((status = check_readable("store-ca", o->store_ca, error)) ||
        (status = check_readable("store-cert", o->store_cert, error)) ||
        (status = check_readable("store-key", o->store_key, error)))
        return status;
    return check_readable("store-password-file", o->store_password_file, error);
}

static ep_status check_mps(const struct ep_options *o, struct ep_error *error)
{
    if (o->backend == EP_OPTIONS_HOST && o->mps == EP_OPTIONS_MPS_REQUIRE)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "mps is require with backend host, which has no use for it: set backend to cuda or auto");
    return EP_OK;
}

ep_status ep_options_check(const struct ep_options *options, struct ep_error *error)
{
    ep_status status = check_mps(options, error);

    if (status == EP_OK)
        status = check_paths(options, error);
    if (status == EP_OK)
        status = check_admin(options, error);
    if (status == EP_OK)
        status = check_store(options, error);
    return status;
}

/* ---- printing ---------------------------------------------------------------------------- */

void ep_options_print(const struct ep_options *options, FILE *out)
{
    const char *section = "";

    fputs("# ep-server configuration: flag > environment > file > default\n", out);
    for (size_t i = 0; i < ep_options_count; i++) {
        const struct ep_option *option = &ep_options_table[i];
        struct ep_option_source source = { options->origins[i], options->config };
        char *value, from[512];

        if (option->flags & EP_OPTION_NO_FILE)
            continue;
        if (strcmp(section, option->section) != 0)
            fprintf(out, "%s:\n", option->section);
        section = option->section;
        value = ep_option_format(option, ep_option_field(options, option));
        ep_option_source_text(option, &source, from, sizeof from);
        fprintf(out, "  %s: %-*s # %s\n", option->name, (int)(28 - strlen(option->name)), value ? value : "",
                from);
        free(value);
    }
}

/* ---- reloading ---------------------------------------------------------------------------- */

void ep_options_reload(struct ep_options *options, struct ep_options *from,
                       void (*changed)(const char *name, const char *text, bool applied, void *user),
                       void *user)
{
    for (size_t i = 0; i < ep_options_count; i++) {
        const struct ep_option *option = &ep_options_table[i];
        bool apply = option->flags & EP_OPTION_RELOAD;
        void *field = ep_option_field(options, option);
        char *old = ep_option_format(option, field);
        char *new = ep_option_format(option, ep_option_field(from, option));

        if (old && new && strcmp(old, new) != 0) {
            if (apply)
                ep_option_move(option, field, ep_option_field(from, option));
            changed(option->name, new, apply, user);
        }
        free(old);
        free(new);
    }
}
