#include "command.h"

#include "admin.h"
#include "ep/v1/common.pb-c.h"

static const char *const outputs[] = { "table", "json", "yaml", NULL };
static const char *const directs[] = { "same-uid", "any", "none", NULL }; /* ep.v1.Direct */
static const char *const shells[] = { "bash", "zsh", NULL };

const struct ep_exit_code ep_exit_codes[] = {
    { 0, "ok" },
    { 1, "the server said no, or something went wrong here" },
    { 2, "usage: a flag, an argument or a specification is wrong" },
    { 3, "the group or node does not exist" },
    { 4, "no server answers there, or not in time" },
    { 5, "not allowed: certificate, user or group" },
    { 6, "degraded: doctor found something failing, or a group misses ranks" },
    { 0, NULL },
};

/* ---- flags ----------------------------------------------------------------------- */

const struct ep_flag ep_global_flags[] = {
    { "server", 's', EP_FLAG_TEXT, "ADDRESS",
      .help = "unix:PATH or HOST:PORT; default $EP_SERVER, else $XDG_RUNTIME_DIR/ep-server/ep.sock if it is "
              "there, "
              "else unix:/run/ep-server/ep.sock" },
    { "output", 'o', EP_FLAG_CHOICE, "FORMAT", .help = "table (default), json or yaml", .choices = outputs },
    { "timeout", 't', EP_FLAG_DURATION, "TIME", .help = "how long to wait for an answer (default 5s; 0: for ever)" },
    { "tls-ca", 0, EP_FLAG_FILE, "FILE",
      .help = "roots that the server's certificate is checked against ($EP_TLS_CA)" },
    { "tls-cert", 0, EP_FLAG_FILE, "FILE", .help = "own certificate ($EP_TLS_CERT)" },
    { "tls-key", 0, EP_FLAG_FILE, "FILE", .help = "its key ($EP_TLS_KEY)" },
    { "tls-name", 0, EP_FLAG_TEXT, "NAME",
      .help = "name in the server's certificate, if not HOST ($EP_TLS_NAME)" },
    { "quiet", 'q', EP_FLAG_BOOL, NULL, .help = "no confirmations, no progress; lists give names only" },
    { "help", 'h', EP_FLAG_BOOL, NULL, .help = "this text" },
    { "version", 0, EP_FLAG_BOOL, NULL, .help = "the version of ep-admin" },
    { .name = NULL },
};

static const struct ep_flag spec_flags[] = {
    { "ranks", 0, EP_FLAG_U32, "N", .help = "how many ranks", .field = "ranks" },
    { "experts", 0, EP_FLAG_U32, "E", .help = "how many experts", .field = "experts" },
    { "hidden", 0, EP_FLAG_U32, "H", .help = "elements of a token", .field = "hidden" },
    { "top-k", 0, EP_FLAG_U32, "K", .help = "experts that a token goes to, 1 to 16", .field = "top_k" },
    { "modes", 0, EP_FLAG_ENUMS, "LIST",
      .help = "ll, ht or both (default: both on CPUs, ll on GPUs)",
      .field = "modes",
      .type = &ep__v1__mode__descriptor },
    { "dtypes", 0, EP_FLAG_ENUMS, "LIST",
      .help = "element types of tokens: bf16, fp16, fp32, fp8_e4m3 (default bf16,fp8_e4m3)",
      .field = "dtypes", .type = &ep__v1__dtype__descriptor },
    { "ll-max-tokens", 0, EP_FLAG_U32, "N", .help = "tokens of a rank in one LL op (default 128)",
      .field = "ll_max_tokens" },
    { "ht-max-tokens", 0, EP_FLAG_U32, "N", .help = "tokens of a rank in one HT op (default 4096)",
      .field = "ht_max_tokens" },
    { "ll-banks", 0, EP_FLAG_U32, "N", .help = "LL ops that may overlap, 2 to 4 (default 2)",
      .field = "ll_banks" },
    { "arena", 0, EP_FLAG_SIZE, "SIZE",
      .help = "memory for inputs and outputs in each rank's window, as in 64MiB", .field = "arena_bytes" },
    { "timeout-ms", 0, EP_FLAG_U32, "N", .help = "bound of every wait for a peer, in ms (default 10000)",
      .field = "timeout_ms" },
    { "backend", 0, EP_FLAG_ENUM, "NAME", .help = "host or cuda (default: what the node has)",
      .field = "backend", .type = &ep__v1__backend__descriptor },
    { "direct", 0, EP_FLAG_CHOICE, "WHO",
      .help = "workers that may run their own ops on GPUs, for which they map the windows of their peers: "
              "same-uid (those of the server's user, default), any or none; for the others the server runs them",
      .field = "direct", .choices = directs, .type = &ep__v1__direct__descriptor },
    { "attach-token-file", 0, EP_FLAG_FILE, "FILE",
      .help = "a secret that workers must give to attach: the first line of FILE, 1 to 256 bytes (default: none); those "
              "that are attached stay",
      .field = "attach_token" },
    { "no-attach-token", 0, EP_FLAG_BOOL, NULL, .help = "workers need none any more", .field = "attach_token" },
    { "placement", 0, EP_FLAG_FILE, "pack|spread|contiguous|by-load|FILE",
      .help = "which nodes the ranks are on (pack: as few as there is room on, default; spread: evenly over all), or "
              "which rank holds which expert (contiguous, default; by-load: hot experts on several, so that ranks have "
              "about the same to do)",
      .field = "placement" },
    { "loads", 0, EP_FLAG_FILE, "FILE",
      .help = "by-load: rows of each expert, as JSON or lines of expert,count; default: what the group's servers have "
              "counted" },
    { "redundant", 0, EP_FLAG_U32, "N", .help = "by-load: homes beyond one for each expert (default 0)" },
    { "label", 'l', EP_FLAG_LABEL, "K=V", .help = "a label; may be repeated", .field = "labels" },
    { "file", 'f', EP_FLAG_FILE, "FILE",
      .help = "a specification in YAML or JSON, - for standard input; flags win over it" },
    { .name = NULL },
};

static const struct ep_flag change_flags[] = {
    { "dry-run", 'n', EP_FLAG_BOOL, NULL, .help = "answer as 'group plan' does, change nothing" },
    { "wait", 'w', EP_FLAG_DURATION, "TIME", .help = "wait until the group is ready, at most so long" },
    { .name = NULL },
};

static const struct ep_flag update_flags[] = {
    { "revision", 0, EP_FLAG_U64, "N", .help = "refuse when the group's revision is another one" },
    { .name = NULL },
};

static const struct ep_flag delete_flags[] = {
    { "force", 0, EP_FLAG_BOOL, NULL, .help = "also with workers attached: they are detached" },
    { .name = NULL },
};

static const struct ep_flag watch_flags[] = {
    { "until", 'u', EP_FLAG_ENUM, "PHASE",
      .help = "end as soon as the group is in this phase; --timeout bounds it",
      .type = &ep__v1__phase__descriptor },
    { .name = NULL },
};

static const struct ep_flag drain_flags[] = {
    { "reason", 0, EP_FLAG_TEXT, "TEXT", .help = "why; workers and operators see it" },
    { "move", 0, EP_FLAG_BOOL, NULL,
      .help = "place the node's ranks on other nodes first, and wait until the workers of their groups have gone over; "
              "without --wait, 10m at most" },
    { "wait", 'w', EP_FLAG_DURATION, "TIME", .help = "wait until no worker is attached, at most so long" },
    { .name = NULL },
};

static const struct ep_flag stats_flags[] = {
    { "peers", 'p', EP_FLAG_BOOL, NULL, .help = "also who waited for whom" },
    { "experts", 'e', EP_FLAG_BOOL, NULL,
      .help = "rows of each expert instead, of a group's ranks on all nodes; on GPUs by a sample" },
    { .name = NULL },
};

static const struct ep_flag top_flags[] = {
    { "interval", 'i', EP_FLAG_DURATION, "TIME", .help = "between two looks (default 1s, at least 100ms)" },
    { "sort", 0, EP_FLAG_CHOICE, "COLUMN", .help = "ops (default), tokens, bytes, busy, wait or name",
      .choices = ep_top_sorts },
    { "once", '1', EP_FLAG_BOOL, NULL, .help = "one table, after one interval" },
    { "iterations", 0, EP_FLAG_U32, "N", .help = "so many tables, then end" },
    { .name = NULL },
};

static const struct ep_flag doctor_flags[] = {
    { "host-only", 0, EP_FLAG_BOOL, NULL, .help = "look at this machine only, ask no server" },
    { .name = NULL },
};

static const struct ep_flag version_flags[] = {
    { "client", 0, EP_FLAG_BOOL, NULL, .help = "of ep-admin only, ask no server" },
    { .name = NULL },
};

/* ---- commands -------------------------------------------------------------------- */

static const char spec_details[] =
    "A specification file has the fields of ep.v1.GroupSpec, or is what 'group get --output yaml' prints. "
    "Names of enum values may be short (ll, bf16); bytes may have a unit (arena_bytes: 64MiB). "
    "A placement is 'pack' or 'spread' (nodes), 'contiguous' or 'by-load' (experts), the ep.v1.Placement message, a list of "
    "{expert, rank}, or one list of experts per rank: [[0, 1], [2, 3]]. In the message, 'ranks' is a list of "
    "{rank, node} or {rank, node, device}.";

const struct ep_noun ep_nouns[] = {
    { "group", "expert groups: what they are, who is attached, how they change" },
    { "node", "nodes: what they have and whether they take workers" },
    { "stats", "counters of ops, per rank" },
    { "top", "what the ranks are doing now" },
    { "doctor", "what this machine and its server have, and what is wrong" },
    { "completion", "completion for a shell" },
    { "version", "versions of ep-admin and of the server" },
    { NULL, NULL },
};

/* clang-format off: one command, one paragraph */
const struct ep_command ep_commands[] = {
    { .noun = "group",
      .verb = "create",
      .summary = "make an expert group",
      .run = ep_group_create,
      .argument = { EP_ARGUMENT_GROUP, "NAME", .optional = true },
      .flags = { spec_flags, change_flags },
      .details = spec_details,
      .example = "ep-admin group create moe --ranks 8 --experts 256 --hidden 7168 --top-k 8 --wait 30s" },
    { .noun = "group",
      .verb = "get",
      .summary = "show one group",
      .run = ep_group_get,
      .argument = { EP_ARGUMENT_GROUP, .name = "NAME" },
      .example = "ep-admin group get moe --output yaml" },
    { .noun = "group", .verb = "list", .summary = "list the groups", .run = ep_group_list },
    { .noun = "group",
      .verb = "update",
      .summary = "change what the flags name, and only that",
      .run = ep_group_update,
      .argument = { EP_ARGUMENT_GROUP, "NAME", .optional = true },
      .flags = { update_flags, spec_flags, change_flags },
      .details =
          "timeout-ms, direct, labels and the attach token change at once. Anything else makes a new epoch: new workers join it, "
          "attached ones go over to it together where all of them follow (ep_join_options.follow), else they stay where they "
          "are until they leave. --label adds or replaces one label, "
          "--label K- takes it away. Of a placement, what is not named stays: nodes or experts.",
      .example = "ep-admin group update moe --timeout-ms 2000 --revision 7" },
    { .noun = "group",
      .verb = "plan",
      .summary = "show what an update, or a creation, would do",
      .run = ep_group_plan,
      .argument = { EP_ARGUMENT_GROUP, "NAME", .optional = true },
      .flags = { update_flags, spec_flags },
      .details = "Ranks with their nodes, devices and experts, memory of each device before, while both epochs stand, "
                 "and after, what moves, and what was settled. Without flags, what is there. Nothing is changed.",
      .example = "ep-admin group plan moe --placement by-load --redundant 32" },
    { .noun = "group",
      .verb = "history",
      .summary = "show the last 64 changes of a group",
      .run = ep_group_history,
      .argument = { EP_ARGUMENT_GROUP, .name = "NAME" },
      .details = "Made, refused and failed ones: who asked, at which server, what changed, and how long the nodes took "
                 "to prepare, to connect, to commit and to put it into service. It goes with the group.",
      .example = "ep-admin group history moe" },
    { .noun = "group",
      .verb = "delete",
      .summary = "delete a group",
      .run = ep_group_delete,
      .argument = { EP_ARGUMENT_GROUP, .name = "NAME" },
      .flags = { delete_flags },
      .example = "ep-admin group delete moe --force" },
    { .noun = "group",
      .verb = "watch",
      .summary = "the present state, then every change",
      .run = ep_group_watch,
      .argument = { EP_ARGUMENT_GROUP, "NAME", .optional = true },
      .flags = { watch_flags },
      .details = "With --output json one line per event. Ends with --until, --timeout, or Ctrl-C.",
      .example = "ep-admin group watch moe --until ready --timeout 60s" },

    { .noun = "node",
      .verb = "list",
      .summary = "list the nodes of the cluster",
      .run = ep_node_list,
      .details = "Any server knows all nodes, and which leads. A node whose server is gone is listed, as LOST, while "
                 "it is drained." },
    { .noun = "node",
      .verb = "get",
      .summary = "show one node; without NAME the one that answers",
      .run = ep_node_get,
      .details = "Of another node the server that answers also says whether it reaches it.",
      .argument = { EP_ARGUMENT_NODE, "NAME", .optional = true } },
    { .noun = "node",
      .verb = "drain",
      .summary = "take no new workers and ask the attached to leave",
      .run = ep_node_drain,
      .argument = { EP_ARGUMENT_NODE, .name = "NAME" },
      .flags = { drain_flags },
      .details = "Any node of the cluster, also one whose server is not there at present. It holds over restarts, "
                 "until uncordon. Ranks stay placed there: which groups have some is told. With --move they are placed "
                 "on other nodes first, one group after the other, as the group's placement has it (pack, spread, by-load; "
                 "one that names a node for each rank needs a new file from you), before anybody is asked to leave. "
                 "What a group waits for is told: a worker at a rank's new place, or a store that answers. If that does not "
                 "come in time, the node takes no new workers and keeps those that it has; the same again goes on.",
      .example = "ep-admin node drain gpu-17 --move --reason 'new driver' --wait 10m" },
    { .noun = "node",
      .verb = "uncordon",
      .summary = "take workers again",
      .run = ep_node_uncordon,
      .argument = { EP_ARGUMENT_NODE, .name = "NAME" } },

    { .noun = "stats",
      .summary = "counters of ops, per rank",
      .run = ep_stats_show,
      .argument = { EP_ARGUMENT_GROUP, "GROUP", .optional = true },
      .flags = { stats_flags },
      .example = "ep-admin stats moe --peers" },
    { .noun = "top",
      .summary = "what the ranks are doing now",
      .run = ep_top_run,
      .argument = { EP_ARGUMENT_GROUP, "GROUP", .optional = true },
      .flags = { top_flags },
      .details =
          "Rates are differences of counters between two looks. On a terminal the table is redrawn in "
          "place; q or Ctrl-C ends it, s changes the order. LATE is the rank that was waited for the most.",
      .example = "ep-admin top moe --sort wait" },
    { .noun = "doctor",
      .summary = "what this machine and its server have, and what is wrong",
      .run = ep_doctor_run,
      .flags = { doctor_flags },
      .details = "Each finding is ok, warn or fail, and says what to do about it. The exit code is 6 when "
                 "something fails." },
    { .noun = "completion",
      .summary = "print a completion script",
      .run = ep_completion_script,
      .argument = { EP_ARGUMENT_CHOICE, "SHELL", .choices = shells },
      .example = "source <(ep-admin completion bash)" },
    { .noun = "version",
      .summary = "versions of ep-admin and of the server",
      .run = ep_version_show,
      .flags = { version_flags } },
    { .noun = NULL },
};
/* clang-format on */

/* ---- looking things up ----------------------------------------------------------- */

const struct ep_noun *ep_noun_find(const char *name)
{
    for (const struct ep_noun *noun = ep_nouns; noun->name; noun++)
        if (strcmp(noun->name, name) == 0)
            return noun;
    return NULL;
}

const struct ep_command *ep_command_find(const char *noun, const char *verb)
{
    for (const struct ep_command *command = ep_commands; command->noun; command++) {
        bool same_verb = command->verb && verb ? strcmp(command->verb, verb) == 0 : command->verb == verb;

        if (same_verb && strcmp(command->noun, noun) == 0)
            return command;
    }
    return NULL;
}

struct ep_text ep_command_name(const struct ep_command *command)
{
    struct ep_text text;

    snprintf(text.s, sizeof text.s, "%s%s%s", command->noun, command->verb ? " " : "",
             command->verb ? command->verb : "");
    return text;
}

static size_t append(const struct ep_flag *flags, const struct ep_flag **out, size_t n)
{
    for (; flags && flags->name && n < EP_MAX_FLAGS; flags++)
        out[n++] = flags;
    return n;
}

size_t ep_command_flags(const struct ep_command *command, const struct ep_flag *out[EP_MAX_FLAGS])
{
    size_t n = 0;

    for (size_t i = 0; command && i < sizeof command->flags / sizeof *command->flags; i++)
        n = append(command->flags[i], out, n);
    return append(ep_global_flags, out, n);
}
