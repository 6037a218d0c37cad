#include "options.h"

#include <argp.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ep_client.h"
#include "ep_secret.h"
#include "report.h"

/* ---- what --help says ---------------------------------------------------------------------------- */

enum {
    KEY_SERVER = 0x100,
    KEY_GROUP,
    KEY_TOKEN_FILE,
    KEY_SPAWN,
    KEY_BACKEND,
    KEY_EXECUTOR,
    KEY_MEMORY,
    KEY_RANKS,
    KEY_EXPERTS,
    KEY_HIDDEN,
    KEY_TOP_K,
    KEY_ALIGNMENT,
    KEY_TOKENS,
    KEY_MODES,
    KEY_LAYOUTS,
    KEY_PASSES,
    KEY_DTYPES,
    KEY_SCALES,
    KEY_HT_SMS,
    KEY_ROUTING,
    KEY_ITERS,
    KEY_GRAPH,
    KEY_REPLAYS,
    KEY_WARMUP,
    KEY_SEED,
    KEY_VERIFY,
    KEY_NO_VERIFY,
    KEY_ZERO_RANK,
    KEY_DROP,
    KEY_BIAS,
    KEY_OUTPUT,
    KEY_RECORD,
    KEY_TIMEOUT,
    KEY_KILL,
    KEY_SOAK,
    KEY_SOAK_OPS,
    KEY_SOAK_KILL,
    KEY_FOLLOW,
    KEY_KEEP_GOING,
    KEY_REFERENCE
};

static const struct argp_option flags[] = {
    { NULL, 0, NULL, 0, "Where:", 1 },
    { "server", KEY_SERVER, "unix:PATH", 0,
      "socket of ep-server (default: $EP_SERVER, else the user's own server, else unix:/run/ep-server/ep.sock).  Several "
      "times: those of the nodes on this machine that have the group's ranks; the first one is asked about the group", 1 },
    { "group", KEY_GROUP, "NAME", 0,
      "a group that is there; its sizes are taken.  Without it a group is made for the run and deleted "
      "afterwards",
      1 },
    { "token-file", KEY_TOKEN_FILE, "FILE", 0,
      "its attach token, where it wants one: the first line of FILE (default: $EP_ATTACH_TOKEN_FILE); the server's "
      "own, where it wants one, is in $EP_CLIENT_TOKEN_FILE", 1 },
    { "spawn", KEY_SPAWN, NULL, 0,
      "start an ep-server for this run, on sockets in a temporary directory, and stop it", 1 },
    { "backend", KEY_BACKEND, "NAME", 0,
      "auto, host or cuda: of the server with --spawn, else what it must have (default auto)", 1 },
    { "executor", KEY_EXECUTOR, "NAME", 0,
      "auto, server or direct: who runs the ops, the server or the worker itself; or mixed: the server those of odd "
      "ranks (default auto)", 1 },
    { "memory", KEY_MEMORY, "NAME", 0,
      "arena or own: inputs and outputs are in the rank's window, or in GPU memory of the worker's own, registered; "
      "own is for GPUs (default arena)", 1 },
    { NULL, 0, NULL, 0, "Sizes:", 2 },
    { "ranks", KEY_RANKS, "R", 0, "worker processes, 1 to 64 (default 2)", 2 },
    { "experts", KEY_EXPERTS, "E", 0, "experts in all (default 64)", 2 },
    { "hidden", KEY_HIDDEN, "H", 0, "elements of a token (default 2048)", 2 },
    { "top-k", KEY_TOP_K, "K", 0, "experts of a token, 1 to 16 (default 8)", 2 },
    { "alignment", KEY_ALIGNMENT, "ROWS", 0, "of the blocks of the packed layout, a power of two (default 1)",
      2 },
    { NULL, 0, NULL, 0, "Sweep (every combination that exists):", 3 },
    { "tokens", KEY_TOKENS, "LIST", 0, "tokens of a rank (default 1,32,128, as far as the group takes them)",
      3 },
    { "modes", KEY_MODES, "LIST", 0, "of ll, ht (default: both, or what the group has)", 3 },
    { "layouts", KEY_LAYOUTS, "LIST", 0, "of expert-major, rank-major, packed, flat (default: all)", 3 },
    { "passes", KEY_PASSES, "LIST", 0,
      "of forward, backward (ht; gradients with the routing of a forward pass, those of the weights too): what is "
      "timed (default forward)", 3 },
    { "dtypes", KEY_DTYPES, "LIST", 0,
      "of bf16, fp16, fp32, fp8 (bf16 quantised on the way), fp16-to-fp8, fp32-to-fp8, fp8-given (default "
      "bf16)",
      3 },
    { "scales", KEY_SCALES, "LIST", 0, "of fp32, ue8m0: what rows in fp8 are scaled with (default fp32)", 3 },
    { "ht-sms", KEY_HT_SMS, "LIST", 0,
      "cuda: multiprocessors that HT ops fill, 0 to 1024, 0: all that the rank may have (default 0); ranks join anew for "
      "each, LL is there once", 3 },
    { "routing", KEY_ROUTING, "NAME", 0,
      "uniform, zipf:S, hot:E, deepseek-v3, text:FILE or trace:FILE (default uniform); see below", 3 },
    { "drop", KEY_DROP, "P", 0, "share of the choices that become -1, 0 to 1 (default 0)", 3 },
    { "bias", KEY_BIAS, NULL, 0, "combines of forward passes add a bias to each token", 3 },
    { "zero-rank", KEY_ZERO_RANK, "RANK", 0, "this rank sends no tokens", 3 },
    { "seed", KEY_SEED, "S", 0, "of everything random (default 1)", 3 },
    { "record", KEY_RECORD, "FILE", 0, "write the routing as a trace", 3 },
    { NULL, 0, NULL, 0, "Run:", 4 },
    { "iters", KEY_ITERS, "N", 0, "timed iterations, 1 to 100000 (default 200)", 4 },
    { "graph", KEY_GRAPH, "N", 0,
      "cuda: also time a CUDA graph of N pairs of dispatch and combine, 1 to 256, over at least --iters pairs",
      4 },
    { "replays", KEY_REPLAYS, "N", 0,
      "cuda: then launch that graph N times with other inputs each time, and compare with the same ops without a "
      "graph", 4 },
    { "warmup", KEY_WARMUP, "N", 0, "iterations before them (default 20)", 4 },
    { "verify", KEY_VERIFY, NULL, 0, "check every output of every rank against the reference (default)", 4 },
    { "no-verify", KEY_NO_VERIFY, NULL, 0, "do not", 4 },
    { "timeout-ms", KEY_TIMEOUT, "MS", 0,
      "bound of a wait for a rank, in the group that is made (default 10000)", 4 },
    { "keep-going", KEY_KEEP_GOING, NULL, 0, "go on after a case that failed", 4 },
    { "kill", KEY_KILL, "RANK@CASE", 0,
      "kill -9 this rank's worker in the middle of that case (both from 0); the others must finish, a new "
      "worker attaches, and the case is run again",
      4 },
    { "soak", KEY_SOAK, "SECONDS", 0,
      "instead of the sweep: random ops of its modes, layouts and formats (default: all) for so long, several at a "
      "time, all results checked; an interrupt ends it sooner, with its report", 4 },
    { "soak-ops", KEY_SOAK_OPS, "N", 0,
      "end the soak after N ops of each rank; the same seed gives the same ops", 4 },
    { "soak-kill", KEY_SOAK_KILL, "SECONDS", 0,
      "in a soak, kill -9 a random worker about so often; the others go on, and a new one takes its rank", 4 },
    { "follow", KEY_FOLLOW, NULL, 0,
      "in a soak, go over to the group's next epochs with whatever an operator changes: sizes, modes, placement, number of "
      "ranks; workers for new ranks are started.  Tells how many turns there were, and how long results paused", 4 },
    { "reference", KEY_REFERENCE, NULL, 0,
      "also measure what this machine gives: memcpy, futex, RPC, attaching, one token's round trip", 4 },
    { "output", KEY_OUTPUT, "FORMAT", 0, "table, json or csv (default table)", 4 },
    { 0 }
};

static const char doc[] =
    "Runs dispatch and combine through ep-server with one worker process per rank, verifies every "
    "result and measures.\v"
    "Routing:\n"
    "  uniform      k different experts, all alike\n"
    "  zipf:S       the i-th expert (from 1) with odds 1/i^S\n"
    "  hot:E        expert E and k - 1 others\n"
    "  deepseek-v3  group-limited top-k: 8 groups, the 4 best stay; sigmoid scores with a bias, weights\n"
    "               normalised times 2.5.  E not divisible by 8: as many groups as the largest\n"
    "               divisor of E below 8, half of them stay (rounded up), and more when those have\n"
    "               fewer than k experts\n"
    "  text:FILE    the words of a text, one per token; the k hashes of a word are its k experts\n"
    "  trace:FILE   as recorded with --record.  Text: the line 'ep-trace 1 ranks R experts E top_k K',\n"
    "               then a line 'RANK TOKEN ID:WEIGHT ...' for each token (K choices, ID -1: none);\n"
    "               tokens of a rank count from 0; lines with # are remarks\n\n";

/* ---- values ---------------------------------------------------------- */

struct parse {
    struct bench_config *config;
    struct ep_error *error;
    uint32_t tokens[64], n_tokens;
    uint32_t ht_sms[64], n_ht_sms;
    uint32_t modes, layouts, passes, dtypes, scales; /* bits */
    bool bad;
};

static ep_status number(const char *flag, const char *text, uint64_t low, uint64_t high, uint64_t *value,
                        struct ep_error *error)
{
    char *end;

    errno = 0;
    *value = strtoull(text, &end, 10); /* it would take blanks and a sign */
    if (*text < '0' || *text > '9' || *end || errno || *value < low || *value > high)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--%s %s: must be a number from %llu to %llu", flag,
                            text, (unsigned long long)low, (unsigned long long)high);
    return EP_OK;
}

static ep_status number32(const char *flag, const char *text, uint64_t low, uint64_t high, uint32_t *out,
                          struct ep_error *error)
{
    uint64_t value;
    ep_status status = number(flag, text, low, high, &value, error);

    if (status == EP_OK)
        *out = (uint32_t)value;
    return status;
}

static ep_status share(const char *text, double *out, struct ep_error *error)
{
    char *end;

    *out = strtod(text, &end);
    if (end == text || *end || !(*out >= 0 && *out <= 1))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--drop %s: must be a number from 0 to 1", text);
    return EP_OK;
}

static ep_status string(const char *flag, const char *text, char *out, size_t size, struct ep_error *error)
{
    size_t length = strlen(text);

    if (length == 0 || length >= size)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--%s '%s': must have 1 to %zu bytes", flag, text,
                            size - 1);
    memcpy(out, text, length + 1);
    return EP_OK;
}

static ep_status server(const char *text, struct bench_config *config, struct ep_error *error)
{
    if (config->servers == BENCH_MAX_SERVERS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--server %s: at most %d are possible", text, BENCH_MAX_SERVERS);
    if (strncmp(text, "unix:", 5) != 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--server %s: must be unix:PATH", text);
    if (!text[5])
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--server unix:: a path is missing: must be unix:PATH");
    return string("server", text, config->server[config->servers++], sizeof *config->server, error);
}

/* The workers' ep_join() reads it, each time. */
static ep_status token_file(const char *text, struct ep_error *error)
{
    char token[EP_ATTACH_TOKEN_MAX + 1];
    ep_status status = ep_secret_read(text, token, sizeof token, error);

    explicit_bzero(token, sizeof token);
    if (status == EP_OK && setenv("EP_ATTACH_TOKEN_FILE", text, 1) != 0)
        status = ep_error_errno(error, EP_NO_MEMORY, "setenv");
    return status == EP_OK ? EP_OK : ep_error_prefix(error, "--token-file");
}

static ep_status kill_at(const char *text, struct bench_config *config, struct ep_error *error)
{
    const char *at = strchr(text, '@');
    char rank[16] = "";
    uint32_t numbers[2];

    if (at && (size_t)(at - text) < sizeof rank)
        memcpy(rank, text, (size_t)(at - text));
    if (!at || number32("kill", rank, 0, BENCH_MAX_RANKS - 1, &numbers[0], error) != EP_OK ||
        number32("kill", at + 1, 0, BENCH_MAX_CASES - 1, &numbers[1], error) != EP_OK)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--kill %s: must be RANK@CASE, numbers from 0 to %d and %d", text,
                            BENCH_MAX_RANKS - 1, BENCH_MAX_CASES - 1);
    config->kill_rank = (int32_t)numbers[0];
    config->kill_case = (int32_t)numbers[1];
    return EP_OK;
}

/* Calls item for each part between commas. */
static ep_status each(const char *flag, const char *text, struct parse *parse,
                      ep_status (*item)(struct parse *parse, const char *text))
{
    char *copy = strdup(text), *rest = copy, *part;
    ep_status status = EP_OK;

    if (!copy)
        return ep_error_set(parse->error, EP_NO_MEMORY, "no memory for --%s", flag);
    while (status == EP_OK && (part = strsep(&rest, ",")) != NULL)
        status = item(parse, part);
    free(copy);
    return status;
}

static ep_status tokens_item(struct parse *parse, const char *text)
{
    if (parse->n_tokens == sizeof parse->tokens / sizeof *parse->tokens)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--tokens: at most %u numbers",
                            parse->n_tokens);
    return number32("tokens", text, 0, 1 << 20, &parse->tokens[parse->n_tokens++], parse->error);
}

static ep_status ht_sms_item(struct parse *parse, const char *text)
{
    if (parse->n_ht_sms == sizeof parse->ht_sms / sizeof *parse->ht_sms)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--ht-sms: at most %u numbers", parse->n_ht_sms);
    return number32("ht-sms", text, 0, 1024, &parse->ht_sms[parse->n_ht_sms++], parse->error);
}

static ep_status modes_item(struct parse *parse, const char *text)
{
    for (ep_mode mode = EP_MODE_LL; mode <= EP_MODE_HT; mode++)
        if (strcmp(text, bench_mode_name(mode)) == 0) {
            parse->modes |= 1u << mode;
            return EP_OK;
        }
    return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--modes: '%s' must be ll or ht", text);
}

static ep_status layouts_item(struct parse *parse, const char *text)
{
    for (ep_layout layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_FLAT; layout++)
        if (strcmp(text, bench_layout_name(layout)) == 0) {
            parse->layouts |= 1u << layout;
            return EP_OK;
        }
    return ep_error_set(parse->error, EP_INVALID_ARGUMENT,
                        "--layouts: '%s' must be expert-major, rank-major, packed or flat", text);
}

static ep_status passes_item(struct parse *parse, const char *text)
{
    for (enum bench_pass pass = BENCH_FORWARD; pass <= BENCH_BACKWARD; pass++)
        if (strcmp(text, bench_pass_name(pass)) == 0) {
            parse->passes |= 1u << pass;
            return EP_OK;
        }
    return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--passes: '%s' must be forward or backward", text);
}

static ep_status dtypes_item(struct parse *parse, const char *text)
{
    for (int dtype = 0; dtype < BENCH_DTYPES; dtype++)
        if (strcmp(text, bench_dtypes[dtype].name) == 0) {
            parse->dtypes |= 1u << dtype;
            return EP_OK;
        }
    return ep_error_set(parse->error, EP_INVALID_ARGUMENT,
                        "--dtypes: '%s' must be bf16, fp16, fp32, fp8, fp16-to-fp8, fp32-to-fp8 or fp8-given",
                        text);
}

static ep_status scales_item(struct parse *parse, const char *text)
{
    for (ep_scale_format scales = EP_SCALE_FP32; scales <= EP_SCALE_UE8M0; scales++)
        if (strcmp(text, bench_scales_name(scales)) == 0) {
            parse->scales |= 1u << scales;
            return EP_OK;
        }
    return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--scales: '%s' must be fp32 or ue8m0", text);
}

static ep_status routing(const char *text, struct bench_config *config, struct ep_error *error)
{
    ep_status status = string("routing", text, config->routing_text, sizeof config->routing_text, error);

    if (status == EP_OK && (status = routing_parse(text, &config->routing, error)) != EP_OK)
        ep_error_prefix(error, "--routing");
    return status;
}

static ep_status output(const char *text, enum bench_output *out, struct ep_error *error)
{
    static const char *const names[] = {
        [BENCH_TABLE] = "table", [BENCH_JSON] = "json", [BENCH_CSV] = "csv"
    };

    for (int i = 0; i <= BENCH_CSV; i++)
        if (strcmp(text, names[i]) == 0) {
            *out = (enum bench_output)i;
            return EP_OK;
        }
    return ep_error_set(error, EP_INVALID_ARGUMENT, "--output %s: must be table, json or csv", text);
}

static ep_status backend(const char *text, enum bench_backend *out, struct ep_error *error)
{
    for (int i = BENCH_BACKEND_AUTO; i <= BENCH_BACKEND_CUDA; i++)
        if (strcmp(text, bench_backends[i]) == 0) {
            *out = (enum bench_backend)i;
            return EP_OK;
        }
    return ep_error_set(error, EP_INVALID_ARGUMENT, "--backend %s: must be auto, host or cuda", text);
}

static ep_status executor(const char *text, uint32_t *out, struct ep_error *error)
{
    for (uint32_t i = EP_EXECUTOR_AUTO; i <= BENCH_EXECUTOR_MIXED; i++)
        if (strcmp(text, bench_executor_name(i)) == 0) {
            *out = i;
            return EP_OK;
        }
    return ep_error_set(error, EP_INVALID_ARGUMENT, "--executor %s: must be auto, server, direct or mixed", text);
}

static ep_status memory(const char *text, bool *own, struct ep_error *error)
{
    *own = strcmp(text, "own") == 0;
    if (*own || strcmp(text, "arena") == 0)
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "--memory %s: must be arena or own", text);
}

static ep_status alignment(const char *text, uint32_t *out, struct ep_error *error)
{
    ep_status status = number32("alignment", text, 1, 1 << 20, out, error);

    if (status == EP_OK && (*out & (*out - 1)) != 0)
        status = ep_error_set(error, EP_INVALID_ARGUMENT, "--alignment %s: must be a power of two", text);
    return status;
}

/* ---- flags ---------------------------------------------------------- */

static ep_status take_flag(struct parse *parse, int key, const char *text)
{
    struct bench_config *config = parse->config;
    struct ep_error *error = parse->error;
    uint32_t rank = 0;
    ep_status status = EP_OK;

    switch (key) {
    case KEY_SERVER: return server(text, config, error);
    case KEY_GROUP: return string("group", text, config->group, sizeof config->group, error);
    case KEY_TOKEN_FILE: return token_file(text, error);
    case KEY_SPAWN: config->spawn = true; return EP_OK;
    case KEY_BACKEND: return backend(text, &config->backend, error);
    case KEY_EXECUTOR: return executor(text, &config->executor, error);
    case KEY_MEMORY: return memory(text, &config->own_memory, error);
    case KEY_RANKS: return number32("ranks", text, 1, BENCH_MAX_RANKS, &config->ranks, error);
    case KEY_EXPERTS: return number32("experts", text, 1, 65536, &config->experts, error);
    case KEY_HIDDEN: return number32("hidden", text, 1, 1 << 20, &config->hidden, error);
    case KEY_TOP_K: return number32("top-k", text, 1, EP_MAX_TOP_K, &config->top_k, error);
    case KEY_ALIGNMENT: return alignment(text, &config->alignment, error);
    case KEY_TOKENS: return each("tokens", text, parse, tokens_item);
    case KEY_MODES: return each("modes", text, parse, modes_item);
    case KEY_LAYOUTS: return each("layouts", text, parse, layouts_item);
    case KEY_PASSES: return each("passes", text, parse, passes_item);
    case KEY_DTYPES: return each("dtypes", text, parse, dtypes_item);
    case KEY_SCALES: return each("scales", text, parse, scales_item);
    case KEY_HT_SMS: return each("ht-sms", text, parse, ht_sms_item);
    case KEY_ROUTING: return routing(text, config, error);
    case KEY_ITERS: return number32("iters", text, 1, BENCH_MAX_ITERS, &config->iters, error);
    case KEY_GRAPH: return number32("graph", text, 1, 256, &config->graph, error);
    case KEY_REPLAYS: return number32("replays", text, 1, BENCH_MAX_ITERS, &config->replays, error);
    case KEY_WARMUP: return number32("warmup", text, 0, BENCH_MAX_ITERS, &config->warmup, error);
    case KEY_SEED: return number("seed", text, 0, INT64_MAX, &config->seed, error);
    case KEY_VERIFY: config->verify = true; return EP_OK;
    case KEY_NO_VERIFY: config->verify = false; return EP_OK;
    case KEY_ZERO_RANK:
        status = number32("zero-rank", text, 0, BENCH_MAX_RANKS - 1, &rank, error);
        config->zero_rank = (int32_t)rank;
        return status;
    case KEY_BIAS: config->bias = true; return EP_OK;
    case KEY_DROP: return share(text, &config->drop, error);
    case KEY_OUTPUT: return output(text, &config->output, error);
    case KEY_RECORD: return string("record", text, config->record, sizeof config->record, error);
    case KEY_TIMEOUT: return number32("timeout-ms", text, 1, 3600000, &config->timeout_ms, error);
    case KEY_KILL: return kill_at(text, config, error);
    case KEY_SOAK: return number32("soak", text, 1, 7 * 86400, &config->soak_s, error);
    case KEY_SOAK_OPS: return number("soak-ops", text, 1, INT64_MAX, &config->soak_ops, error);
    case KEY_SOAK_KILL: return number32("soak-kill", text, 1, 86400, &config->soak_kill_s, error);
    case KEY_FOLLOW: config->follow = true; return EP_OK;
    case KEY_KEEP_GOING: config->keep_going = true; return EP_OK;
    case KEY_REFERENCE: config->reference = true; return EP_OK;
    default: return EP_UNIMPLEMENTED;
    }
}

static error_t on_flag(int key, char *text, struct argp_state *state)
{
    struct parse *parse = state->input;
    ep_status status;

    if (key == ARGP_KEY_ARG) {
        ep_error_set(parse->error, EP_INVALID_ARGUMENT, "'%s': ep-bench takes flags only", text);
        return EINVAL;
    }
    if (key < KEY_SERVER || key > KEY_REFERENCE)
        return ARGP_ERR_UNKNOWN;
    status = take_flag(parse, key, text);
    return status == EP_OK ? 0 : EINVAL;
}

/* ---- the cases ---------------------------------------------------------- */

/* What has no scales is one case, whatever --scales says. */
static void add_scales(const struct parse *parse, struct bench_case of)
{
    struct bench_config *config = parse->config;
    uint32_t scales = bench_scaled(&of) ? parse->scales : 1u << EP_SCALE_FP32;

    for (of.scales = EP_SCALE_FP32; of.scales <= EP_SCALE_UE8M0; of.scales++)
        if (scales & 1u << of.scales && config->n_cases < BENCH_MAX_CASES)
            config->cases[config->n_cases++] = of;
}

static void add_passes(const struct parse *parse, struct bench_case of)
{
    for (of.pass = BENCH_FORWARD; of.pass <= BENCH_BACKWARD; of.pass++)
        if (parse->passes & 1u << of.pass && bench_pass_exists(of.mode, of.pass))
            add_scales(parse, of);
}

static void add_layouts(const struct parse *parse, struct bench_case of)
{
    for (of.layout = EP_LAYOUT_EXPERT_MAJOR; of.layout <= EP_LAYOUT_FLAT; of.layout++)
        for (int dtype = 0; dtype < BENCH_DTYPES; dtype++)
            for (uint32_t t = 0; t < parse->n_tokens; t++)
                if (parse->layouts & 1u << of.layout && parse->dtypes & 1u << dtype &&
                    bench_layout_exists(of.mode, of.layout)) {
                    of.dtype = (enum bench_dtype)dtype;
                    of.tokens = parse->tokens[t];
                    add_passes(parse, of);
                }
}

/* Cases for which ranks join alike stand together. */
static void cross(const struct parse *parse)
{
    if (parse->modes & 1u << EP_MODE_LL)
        add_layouts(parse, (struct bench_case){ .mode = EP_MODE_LL, .ht_sms = parse->ht_sms[0] });
    for (uint32_t i = 0; parse->modes & 1u << EP_MODE_HT && i < parse->n_ht_sms; i++)
        add_layouts(parse, (struct bench_case){ .mode = EP_MODE_HT, .ht_sms = parse->ht_sms[i] });
}

static bool any_scaled(const struct parse *parse)
{
    for (int dtype = 0; dtype < BENCH_DTYPES; dtype++)
        if (parse->dtypes & 1u << dtype && bench_dtypes[dtype].wire == EP_FP8_E4M3)
            return true;
    return false;
}

/* A soak has forward passes of whatever there is, and kills of its own. */
static ep_status finish_soak(struct parse *parse)
{
    const struct bench_config *config = parse->config;
    const bool soak = config->soak_s || config->soak_ops;

    if (config->soak_kill_s && !soak)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--soak-kill: in which soak? add --soak");
    if (config->follow && !soak)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--follow: only a soak does; add --soak");
    if (!soak)
        return EP_OK;
    if (config->kill_rank >= 0)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--kill: a soak has no cases; use --soak-kill");
    if (parse->passes & 1u << BENCH_BACKWARD)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--passes: a soak has forward ones only");
    if (!config->verify)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--no-verify: a soak is there to verify");
    if (parse->n_ht_sms > 1)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--ht-sms: the ranks of a soak join once, with one number");
    if (parse->dtypes == 0 && !config->group[0]) {
        parse->dtypes = (1u << BENCH_DTYPES) - 1;
        parse->scales = 1u << EP_SCALE_FP32 | 1u << EP_SCALE_UE8M0;
    }
    return EP_OK;
}

static ep_status finish(struct parse *parse)
{
    static const uint32_t tokens[] = { 1, 32, 128 };
    struct bench_config *config = parse->config;

    if (finish_soak(parse) != EP_OK)
        return parse->error->status;
    config->modes_given = parse->modes != 0;
    config->tokens_given = parse->n_tokens != 0;
    if (parse->n_tokens == 0) {
        memcpy(parse->tokens, tokens, sizeof tokens);
        parse->n_tokens = sizeof tokens / sizeof *tokens;
    }
    config->ht_sms_given = parse->n_ht_sms != 0;
    if (!config->ht_sms_given)
        parse->n_ht_sms = 1; /* all */
    config->ht_sms = parse->ht_sms[0];
    if (parse->modes == 0)
        parse->modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT;
    if (parse->layouts == 0)
        parse->layouts = ~0u;
    if (parse->passes == 0)
        parse->passes = 1u << BENCH_FORWARD;
    if (parse->dtypes == 0)
        parse->dtypes = 1u << BENCH_BF16;
    if (parse->scales != 0 && !any_scaled(parse))
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT,
                            "--scales: none of the dtypes has scales; add fp8 to --dtypes");
    if (parse->scales == 0)
        parse->scales = 1u << EP_SCALE_FP32;
    cross(parse);
    if (config->n_cases == 0)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT,
                            "--layouts, --passes: none exists in these modes (flat, backward: ht; packed, forward: "
                            "both; others: ll)");
    if (config->n_cases == BENCH_MAX_CASES)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--tokens, --ht-sms: there would be more than %d cases",
                            BENCH_MAX_CASES - 1);
    if (config->replays && !config->graph)
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--replays: of which graph? add --graph");
    if (config->spawn && (config->servers || config->group[0]))
        return ep_error_set(parse->error, EP_INVALID_ARGUMENT, "--spawn: makes --%s of its own",
                            config->servers ? "server" : "group");
    return EP_OK;
}

static void set_defaults(struct bench_config *config)
{
    memset(config, 0, sizeof *config);
    config->alignment = 1;
    config->iters = 200;
    config->warmup = 20;
    config->seed = 1;
    config->verify = true;
    config->zero_rank = config->kill_rank = config->kill_case = -1;
    config->timeout_ms = 10000;
    memcpy(config->routing_text, "uniform", sizeof "uniform");
}

static void print_version(FILE *out, struct argp_state *state)
{
    (void)state;
    fprintf(out, "ep-bench %s\n", ep_version());
}

static char *filter(int key, const char *text, void *input)
{
    char *all = NULL;

    (void)input;
    if (key != ARGP_KEY_HELP_POST_DOC)
        return (char *)(uintptr_t)text;
    if (asprintf(&all, "%s%s", text ? text : "", report_definitions) < 0)
        return NULL;
    return all;
}

ep_status options_parse(int argc, char **argv, struct bench_config *config, struct ep_error *error)
{
    static const struct argp argp = {
        .options = flags, .parser = on_flag, .doc = doc, .help_filter = filter
    };
    struct parse parse = { .config = config, .error = error };

    set_defaults(config);
    argp_program_version_hook = print_version;
    argp_err_exit_status = ep_status_exit_code(EP_INVALID_ARGUMENT);
    if (argp_parse(&argp, argc, argv, 0, NULL, &parse) != 0)
        return error->status != EP_OK ? error->status
                                      : ep_error_set(error, EP_INVALID_ARGUMENT, "unknown flag; see --help");
    return finish(&parse);
}
