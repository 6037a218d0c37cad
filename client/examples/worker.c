/*
 * worker: one rank per process.  Dispatches and combines in a loop, prints a line per second, and
 * does what a real worker must: goes on when a peer is lost, moves to a new epoch (with --follow at the same step as
 * all others, without leaving; where these went without it, it joins again), leaves when the server drains or the group has
 * no place for it any more, comes back when the server returns.  See usage() for how to start four of them.
 */
#ifndef _GNU_SOURCE /* POSIX too where the compiler is asked for C11 alone (-std=c11) */
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ep_client.h"

#define RETRY_MS 200
#define MAX_FAILURES 10 /* steps in a row */
#define TOKEN_BYTES 300 /* more than a token may have, so that one that is too long is not cut */

struct options {
    const char *address, *group, *token_file;
    int rank;
    bool ll, ht, once, follow;
    uint32_t tokens;
    unsigned pause_ms, seconds;
};

/* What one mode needs: a handle, its memory and its arguments. */
struct lane {
    bool used; /* asked for, and the group has the mode */
    ep_handle *handle;
    ep_dispatch_args dispatch;
    ep_combine_args combine;
    uint16_t *result; /* own copy of combine.out */
    uint64_t steps, wrong, dropped, step_ns;
    uint64_t longest_ns; /* of an op, also of one that failed */
};

struct worker {
    const struct options *options;
    ep_rank *rank;
    ep_rank_info info;
    struct lane ll, ht;
    uint64_t failures;
    unsigned in_a_row;
    uint32_t absent; /* in the last step */
    uint64_t awake_ns, pause_ns; /* since when no op has ended but for its own rest; the longest such time */
    bool leave;      /* asked to */
    bool rejoin;     /* and to come back in the new epoch */
    bool left_behind; /* the same, but there may be no place for it */
    bool half_way;   /* the others have done LL of this step already */
};

static volatile sig_atomic_t stop;
static ep_rank *volatile interruptible; /* for the signal handler */

static void on_signal(int number)
{
    (void)number;
    stop = 1;
    if (interruptible)
        ep_rank_interrupt(interruptible);
}

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void say(const struct worker *w, const char *text)
{
    printf("rank %u epoch %llu: %s\n", w->info.rank, (unsigned long long)w->info.group.epoch, text);
    fflush(stdout);
}

/* ---- memory -------------------------------------------------------------------------------- */

/*
 * Weights that add up to 1 and experts that change nothing: every token comes back as it was.  Its elements are all the
 * same, one of 128 numbers that bf16 has exactly, by its rank and its number.
 */
static uint16_t element_of(const struct worker *w, uint32_t token)
{
    return (uint16_t)(0x3f80u + (w->info.rank * 37u + token * 11u) % 128u); /* 1 to 2, in steps of 1/128 */
}

/* Made here and copied: the rank's memory may be a GPU's. */
static bool fill_inputs(const struct worker *w, uint32_t tokens, void *x, void *choices, void *weights)
{
    const ep_group_info *g = &w->info.group;
    const size_t elements = (size_t)tokens * g->hidden, n = (size_t)tokens * g->top_k;
    uint16_t *own_x = malloc(elements * sizeof *own_x);
    int32_t *own_choices = malloc(n * sizeof *own_choices);
    float *own_weights = malloc(n * sizeof *own_weights);
    bool ok = (own_x && own_choices && own_weights) || tokens == 0;

    for (size_t i = 0; ok && i < elements; i++)
        own_x[i] = element_of(w, (uint32_t)(i / g->hidden));
    for (uint32_t i = 0; ok && i < n; i++) {
        own_choices[i] = (int32_t)((i * 7u + w->info.rank) % g->experts);
        own_weights[i] = 1.0f / (float)g->top_k;
    }
    ok = ok && ep_write(w->rank, x, own_x, elements * sizeof *own_x, NULL) == EP_OK
         && ep_write(w->rank, choices, own_choices, n * sizeof *own_choices, NULL) == EP_OK
         && ep_write(w->rank, weights, own_weights, n * sizeof *own_weights, NULL) == EP_OK;
    free(own_x);
    free(own_choices);
    free(own_weights);
    return ok;
}

static uint32_t min(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Low latency gets fixed blocks per expert, high throughput exactly the rows that come. */
static uint64_t rows_of(const ep_group_info *g, ep_mode mode, uint32_t tokens)
{
    if (mode == EP_MODE_LL)
        return (uint64_t)g->max_local_experts * g->ranks * g->ll_max_tokens;
    return (uint64_t)g->ranks * tokens * min(g->top_k, g->max_local_experts);
}

static bool make_lane(struct worker *w, struct lane *lane, ep_mode mode)
{
    const ep_group_info *g = &w->info.group;
    const uint32_t most = mode == EP_MODE_LL ? g->ll_max_tokens : g->ht_max_tokens;
    const uint32_t tokens = min(w->options->tokens, most);
    const size_t row = g->hidden * sizeof(uint16_t);
    const uint64_t rows = rows_of(g, mode, tokens);
    void *x = ep_alloc(w->rank, tokens * row), *out = ep_alloc(w->rank, rows * row);
    void *result = ep_alloc(w->rank, tokens * row);
    int32_t *choices = ep_alloc(w->rank, (size_t)tokens * g->top_k * sizeof *choices);
    int32_t *counts = ep_alloc(w->rank, (g->max_local_experts + 1) * sizeof *counts);
    int32_t *offsets = ep_alloc(w->rank, (g->max_local_experts + 1) * sizeof *offsets);
    float *weights = ep_alloc(w->rank, (size_t)tokens * g->top_k * sizeof *weights);

    lane->result = malloc(tokens * row + 1);
    if (!x || !out || !choices || !counts || !offsets || !weights || !result || !lane->result
        || ep_handle_create(w->rank, &lane->handle) != EP_OK || !fill_inputs(w, tokens, x, choices, weights))
        return false;
    lane->dispatch = (ep_dispatch_args){
        .size = sizeof lane->dispatch,
        .mode = mode,
        .layout = mode == EP_MODE_LL ? EP_LAYOUT_EXPERT_MAJOR : EP_LAYOUT_PACKED,
        .input_dtype = EP_BF16,
        .num_tokens = tokens,
        .tokens = x,
        .topk_idx = choices,
        .topk_weights = weights,
        .out = out,
        .out_bytes = rows * row,
        .counts = counts,
        .offsets = mode == EP_MODE_HT ? offsets : NULL,
    };
    lane->combine = (ep_combine_args){
        .size = sizeof lane->combine,
        .dtype = EP_BF16,
        .rows = out,
        .rows_bytes = rows * row,
        .out = result,
    };
    return true;
}

static void free_lanes(struct worker *w)
{
    free(w->ll.result);
    free(w->ht.result);
    w->ll = w->ht = (struct lane){ 0 };
}

/* What the rank has become, and what its steps need there. */
static ep_status settle_in(struct worker *w)
{
    const ep_group_info *g = &w->info.group;
    ep_status status;

    w->info = (ep_rank_info){ .size = sizeof w->info, .group.size = sizeof w->info.group };
    status = ep_rank_describe(w->rank, &w->info);
    if (status != EP_OK)
        return status;
    w->ll.used = w->options->ll && g->ll_max_tokens > 0;
    w->ht.used = w->options->ht && g->ht_max_tokens > 0;
    if (!w->ll.used && !w->ht.used)
        fprintf(stderr, "worker: the group has no mode of those to use\n");
    if ((w->ll.used && !make_lane(w, &w->ll, EP_MODE_LL)) || (w->ht.used && !make_lane(w, &w->ht, EP_MODE_HT)))
        return EP_RESOURCE_EXHAUSTED;
    w->half_way = w->ll.used && w->ht.used && w->info.ll_begun > w->info.ht_begun;
    return w->ll.used || w->ht.used ? EP_OK : EP_FAILED_PRECONDITION;
}

/* ---- steps --------------------------------------------------------------------------------- */

static float from_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

static void check(struct worker *w, struct lane *lane)
{
    ep_op_info d = { .size = sizeof d }, c = { .size = sizeof c };
    const uint32_t hidden = w->info.group.hidden;
    const size_t n = (size_t)lane->dispatch.num_tokens * hidden;

    if (ep_dispatch_info(lane->handle, &d) != EP_OK || ep_combine_info(lane->handle, &c) != EP_OK)
        return;
    w->absent = d.absent;
    lane->dropped += d.dropped;
    if (d.absent || c.absent || d.dropped)
        return; /* their part is missing, and that is right */
    if (ep_read(w->rank, lane->result, lane->combine.out, n * sizeof *lane->result, NULL) != EP_OK)
        return; /* the next step says why */
    for (size_t i = 0; i < n; i++)
        lane->wrong += fabsf(from_bf16(lane->result[i]) - from_bf16(element_of(w, (uint32_t)(i / hidden)))) > 1.0f / 64;
}

static ep_status wait_for(struct lane *lane, uint64_t since_ns)
{
    const ep_status status = ep_handle_wait(lane->handle, -1);
    const uint64_t took_ns = now_ns() - since_ns;

    if (took_ns > lane->longest_ns)
        lane->longest_ns = took_ns;
    return status;
}

static void op_ended(struct worker *w)
{
    const uint64_t now = now_ns();

    if (now - w->awake_ns > w->pause_ns)
        w->pause_ns = now - w->awake_ns;
    w->awake_ns = now;
}

static ep_status step(struct worker *w, struct lane *lane)
{
    const uint64_t start = now_ns();
    uint64_t middle;
    ep_status status = ep_dispatch(lane->handle, &lane->dispatch, NULL);

    if (status == EP_OK)
        status = wait_for(lane, start);
    op_ended(w);
    /* Here the experts would work on lane->dispatch.out. */
    middle = now_ns();
    if (status == EP_OK)
        status = ep_combine(lane->handle, &lane->combine, NULL);
    if (status == EP_OK)
        status = wait_for(lane, middle);
    op_ended(w);
    if (status != EP_OK)
        return status;
    lane->steps++;
    lane->step_ns += now_ns() - start;
    check(w, lane);
    return EP_OK;
}

/* ---- events -------------------------------------------------------------------------------- */

static void handle_event(struct worker *w, const ep_event *event)
{
    char text[400];

    switch (event->type) {
    case EP_EVENT_RANK_LOST:
        snprintf(text, sizeof text, "rank %u lost: %s", event->rank, event->text);
        break;
    case EP_EVENT_RANK_JOINED:
        snprintf(text, sizeof text, "rank %u joined", event->rank);
        break;
    case EP_EVENT_EPOCH:
        snprintf(text, sizeof text, "%s epoch %llu", w->options->follow ? "attaching to" : "moving to",
                 (unsigned long long)event->epoch);
        w->leave = w->rejoin = w->leave || !w->options->follow;
        break;
    case EP_EVENT_DRAINING:
        snprintf(text, sizeof text, "leaving, the server drains: %s", event->text);
        w->leave = true;
        break;
    case EP_EVENT_DETACHED: /* the next step fails for it */
        snprintf(text, sizeof text, "detached: %s", event->text);
        break;
    case EP_EVENT_EVENTS_LOST:
        snprintf(text, sizeof text, "%llu events lost", (unsigned long long)event->value);
        break;
    default:
        return; /* a lost server is seen by the step */
    }
    say(w, text);
}

static void handle_events(struct worker *w)
{
    ep_event event = { .size = sizeof event };

    while (ep_event_next(w->rank, 0, &event) == EP_OK)
        handle_event(w, &event);
}

/* ---- report -------------------------------------------------------------------------------- */

static int describe(const char *name, struct lane *lane, char *text, size_t room)
{
    int n = snprintf(text, room, "  %s %llu steps, %.1f us each, an op at most %.1f us, %llu dropped, %llu wrong", name,
                     (unsigned long long)lane->steps,
                     lane->steps ? (double)lane->step_ns / (double)lane->steps / 1000.0 : 0.0,
                     (double)lane->longest_ns / 1000.0, (unsigned long long)lane->dropped,
                     (unsigned long long)lane->wrong);

    lane->steps = lane->step_ns = lane->longest_ns = lane->dropped = lane->wrong = 0;
    return n;
}

static void report(struct worker *w)
{
    char text[400];
    int n = snprintf(text, sizeof text, "absent %u, failures %llu", w->absent, (unsigned long long)w->failures);

    if (w->ll.used)
        n += describe("LL", &w->ll, text + n, sizeof text - (size_t)n);
    if (w->ht.used)
        n += describe("HT", &w->ht, text + n, sizeof text - (size_t)n);
    snprintf(text + n, sizeof text - (size_t)n, "; longest pause %.1f us", (double)w->pause_ns / 1000.0);
    say(w, text);
    w->pause_ns = 0;
}

/* ---- the loop ------------------------------------------------------------------------------ */

/* Others are of this step alone: a late rank. */
static bool is_the_end(ep_status status)
{
    return status == EP_SERVER_LOST || status == EP_DEVICE_LOST || status == EP_DETACHED || status == EP_CANCELLED;
}

/* Between two steps nothing is under way: all that the old rank had is done with. */
static ep_status go_over(struct worker *w, ep_rank *next)
{
    char text[64];

    report(w);
    interruptible = NULL;
    ep_leave(w->rank);
    free_lanes(w);
    w->rank = next;
    interruptible = next;
    ep_status status = settle_in(w);

    snprintf(text, sizeof text, "gone over, %u ranks", w->info.group.ranks);
    say(w, text);
    return status;
}

/* The boundary between steps: the same for all ranks. */
static ep_status next_epoch(struct worker *w)
{
    ep_rank *next = NULL;
    ep_status status = w->options->follow ? ep_advance(w->rank, &next) : EP_OK;

    if (status == EP_OK && next)
        return go_over(w, next);
    if (status != EP_DETACHED)
        return status;
    say(w, ep_error_message());
    if (ep_sync(w->rank, 0) != EP_OK) /* the rank itself is lost */
        return status;
    w->leave = w->left_behind = true; /* the others have gone over */
    return EP_OK;
}

static ep_status steps(struct worker *w)
{
    ep_status status;

    status = w->half_way ? EP_OK : next_epoch(w);
    if (w->ll.used && !w->half_way && status == EP_OK && !w->leave)
        status = step(w, &w->ll);
    w->half_way = false;
    if (w->ht.used && status == EP_OK && !w->leave)
        status = step(w, &w->ht);
    if (status == EP_OK || status == EP_CANCELLED) {
        w->in_a_row = 0;
        return EP_OK;
    }
    say(w, ep_error_message());
    w->failures++;
    return is_the_end(status) || ++w->in_a_row >= MAX_FAILURES ? status : EP_OK;
}

static ep_status loop(struct worker *w, uint64_t end_ns)
{
    uint64_t next_report = now_ns() + 1000000000u;
    ep_status status = EP_OK;

    w->awake_ns = now_ns();
    while (status == EP_OK && !stop && !w->leave && now_ns() < end_ns) {
        status = steps(w);
        handle_events(w);
        if (now_ns() >= next_report) {
            report(w);
            next_report += 1000000000u;
        }
        if (w->options->pause_ms)
            usleep(w->options->pause_ms * 1000);
        w->awake_ns += w->options->pause_ms * 1000000ull;
    }
    report(w);
    return status;
}

/* The first line of the file, which may have been changed since the last time. */
static bool read_token(const char *path, char token[static TOKEN_BYTES])
{
    FILE *file = fopen(path, "re");
    const bool there = file && fgets(token, TOKEN_BYTES, file);

    if (!there)
        fprintf(stderr, "worker: --token-file: cannot read a token from %s: %s\n", path,
                !file || ferror(file) ? strerror(errno) : "it is empty");
    if (file)
        fclose(file);
    if (there)
        token[strcspn(token, "\r\n")] = '\0';
    return there;
}

/* token NULL: the library looks for one. */
static ep_status join(ep_client *client, struct worker *w, const char *token)
{
    ep_join_options join = { .size = sizeof join, .group = w->options->group, .rank = w->options->rank,
                             .follow = w->options->follow, .token = token };
    ep_status status = ep_join(client, &join, &w->rank);

    if (status != EP_OK)
        return status;
    status = settle_in(w);
    if (status != EP_OK) {
        ep_leave(w->rank);
        free_lanes(w);
    }
    return status;
}

/* There is none of that number, it is on another node, this one is drained, or somebody else has it. */
static bool has_no_place(ep_status status)
{
    return status == EP_INVALID_ARGUMENT || status == EP_FAILED_PRECONDITION || status == EP_ALREADY_EXISTS;
}

static ep_status could_not_join(ep_status status, bool left_behind)
{
    const bool ends = left_behind && has_no_place(status);

    fprintf(stderr, "worker: %s%s\n", ends ? "it ends, as there is no place for it any more: " : "", ep_error_message());
    return ends ? EP_OK : status;
}

/* One stay in the group.  *again: come back; *left_behind, before: the others went without it. */
static ep_status stay(ep_client *client, const struct options *options, uint64_t end_ns, bool *again, bool *left_behind)
{
    struct worker w = { .options = options };
    char token[TOKEN_BYTES];
    ep_status status;

    *again = false;
    if (options->token_file && !read_token(options->token_file, token))
        return EP_INVALID_ARGUMENT;
    status = join(client, &w, options->token_file ? token : NULL);
    if (status != EP_OK)
        return could_not_join(status, *left_behind);
    say(&w, "attached");
    interruptible = w.rank;
    status = loop(&w, end_ns);
    interruptible = NULL;
    ep_leave(w.rank);
    free_lanes(&w);
    say(&w, "left");
    *again = w.rejoin || w.left_behind;
    *left_behind = w.left_behind;
    return status;
}

static ep_status session(const struct options *options, uint64_t end_ns)
{
    ep_client *client;
    bool again = true, left_behind = false;
    ep_status status = ep_client_open(options->address, NULL, &client);

    if (status != EP_OK) {
        fprintf(stderr, "worker: %s\n", ep_error_message());
        return status;
    }
    while (again && !stop) {
        if (left_behind)
            usleep(RETRY_MS * 1000); /* what it had attached to already is still being given back */
        status = stay(client, options, end_ns, &again, &left_behind);
    }
    ep_client_close(client);
    return status;
}

/* ---- command line -------------------------------------------------------------------------- */

static void usage(FILE *out)
{
    fputs("Usage: worker [OPTION]...\n"
          "Join an expert group as one rank; dispatch and combine until told to stop.\n"
          "\n"
          "  --group=NAME      the group (default: hello)\n"
          "  --rank=N          the rank to take (default: any free one)\n"
          "  --server=ADDRESS  unix:PATH (default: $EP_SERVER, else the user's own server, else unix:/run/ep-server/ep.sock)\n"
          "  --token-file=FILE the group's attach token, where it wants one (default: $EP_ATTACH_TOKEN_FILE);\n"
          "                    the server's own, where it wants one, is in $EP_CLIENT_TOKEN_FILE\n"
          "  --mode=ll|ht|both what to do in a step (default: ll)\n"
          "  --tokens=N        tokens per step (default: 8, at most what the group allows)\n"
          "  --pause-ms=N      rest after every step (default: 0)\n"
          "  --seconds=N       leave after that time (default: never)\n"
          "  --follow          go over to the group's new epochs between steps, without leaving, or join again where the\n"
          "                    others had to go without it; modes that the group has not are left out\n"
          "  --once            exit when the server is lost; without it the worker waits for it\n"
          "\n"
          "Start four of them, one per rank of a group of four:\n"
          "\n"
          "  ep-server --backend=host --host-ranks=4 &      # without --backend: on GPUs, if there are any\n"
          "  ep-admin group create hello --ranks=4 --experts=16 --hidden=512 --top-k=2\n"
          "  for r in 0 1 2 3; do worker --rank=$r & done\n"
          "\n"
          "Each prints a line per second: absent ranks, failed steps, steps done, their time, the longest pause.\n"
          "Kill one with SIGKILL: the others go on, and a new one may take its rank.\n"
          "SIGTERM or SIGINT: leave cleanly.\n",
          out);
}

static bool set_mode(struct options *o, const char *mode)
{
    o->ll = strcmp(mode, "ll") == 0 || strcmp(mode, "both") == 0;
    o->ht = strcmp(mode, "ht") == 0 || strcmp(mode, "both") == 0;
    if (!o->ll && !o->ht)
        fprintf(stderr, "worker: --mode is \"%s\": must be ll, ht or both\n", mode);
    return o->ll || o->ht;
}

static bool set_number(const char *name, const char *text, unsigned long most, unsigned *number)
{
    char *end;
    const unsigned long n = strtoul(text, &end, 10);

    if (*text < '0' || *text > '9' || *end != '\0' || n > most) {
        fprintf(stderr, "worker: --%s is \"%s\": must be a whole number from 0 to %lu\n", name, text, most);
        return false;
    }
    *number = (unsigned)n;
    return true;
}

static bool set_option(struct options *o, int option, const char *value)
{
    unsigned rank;

    switch (option) {
    case 'g': o->group = value; return true;
    case 's': o->address = value; return true;
    case 'o': o->once = true; return true;
    case 'f': o->follow = true; return true;
    case 'a': o->token_file = value; return true;
    case 'm': return set_mode(o, value);
    case 't': return set_number("tokens", value, 1u << 20, &o->tokens);
    case 'p': return set_number("pause-ms", value, 60000, &o->pause_ms);
    case 'n': return set_number("seconds", value, 1u << 30, &o->seconds);
    case 'r':
        if (!set_number("rank", value, EP_MAX_RANKS - 1, &rank))
            return false;
        o->rank = (int)rank;
        return true;
    default: return false;
    }
}

static void parse(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {
        { "group", required_argument, NULL, 'g' },    { "rank", required_argument, NULL, 'r' },
        { "server", required_argument, NULL, 's' },   { "mode", required_argument, NULL, 'm' },
        { "tokens", required_argument, NULL, 't' },   { "pause-ms", required_argument, NULL, 'p' },
        { "seconds", required_argument, NULL, 'n' },  { "once", no_argument, NULL, 'o' },
        { "follow", no_argument, NULL, 'f' },         { "token-file", required_argument, NULL, 'a' },
        { "help", no_argument, NULL, 'h' },
        { 0 },
    };
    int option;

    while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
        if (option == 'h') {
            usage(stdout);
            exit(0);
        }
        if (!set_option(o, option, optarg)) {
            fputs("Try worker --help.\n", stderr);
            exit(2);
        }
    }
    if (optind < argc) {
        fprintf(stderr, "worker: unexpected argument \"%s\"\nTry worker --help.\n", argv[optind]);
        exit(2);
    }
}

static void check_output(void)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return;
    if (errno == 0) /* an earlier write failed, and why is lost: the next one mostly fails likewise */
        (void)!write(STDOUT_FILENO, "\n", 1);
    fprintf(stderr, "worker: cannot write to standard output: %s\n", strerror(errno ? errno : EIO));
    _exit(ep_status_exit_code(EP_IO));
}

int main(int argc, char **argv)
{
    struct options options = { .group = "hello", .rank = EP_ANY_RANK, .ll = true, .tokens = 8 };
    struct sigaction action = { .sa_handler = on_signal };
    ep_status status;

    (void)atexit(check_output);
    parse(argc, argv, &options);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);

    const uint64_t end_ns = options.seconds ? now_ns() + options.seconds * 1000000000ull : UINT64_MAX;

    for (;;) {
        status = session(&options, end_ns);
        /* The server is restarted, or our old place is still being given back. */
        bool retry = status == EP_SERVER_LOST || status == EP_UNAVAILABLE;

        if (!retry || options.once || stop || now_ns() >= end_ns)
            break;
        usleep(RETRY_MS * 1000);
    }
    return stop ? 0 : ep_status_exit_code(status);
}
