/*
 * The top command: rates, which are differences of two samples of the server's counters.
 *
 * One row is one kind of op of one rank.  A rank that came, left or moved to another epoch between
 * the samples counts from zero: its counters do.
 */
#include "admin.h"

#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>

#include "ep_clock.h"
#include "output.h"
#include "terminal.h"

enum { MIN_INTERVAL_MS = 100, LOOK_MS = 50, RETRY_MS = 1000 };

enum sort { SORT_OPS, SORT_TOKENS, SORT_BYTES, SORT_BUSY, SORT_WAIT, SORT_NAME, N_SORTS };

const char *const ep_top_sorts[] = { "ops", "tokens", "bytes", "busy", "wait", "name", NULL };

struct row {
    const Ep__V1__RankStats *rank;
    const char *op;
    double ops, tokens, bytes, busy, wait; /* per second; busy and wait are shares of the time */
    double mean_us;
    uint64_t errors, timeouts; /* since the sample before */
    int late;                  /* the rank waited for the most; -1: none */
};

struct top {
    struct ep_admin *admin;
    const char *group; /* NULL: all */
    int64_t interval_ms;
    uint32_t iterations; /* 0: no end */
    enum sort sort;
    bool on_screen, quit;
    Ep__V1__Stats *previous, *latest; /* of which the table is made */
    struct row *rows;
    size_t n_rows;
    char trouble[EP_ERROR_TEXT_MAX]; /* why there is nothing new; "": none */
};

/* ---- rates ----------------------------------------------------------------------------- */

static const Ep__V1__RankStats *find_rank(const Ep__V1__Stats *stats, const Ep__V1__RankStats *like)
{
    for (size_t i = 0; i < stats->n_ranks; i++) {
        const Ep__V1__RankStats *rank = stats->ranks[i];

        if (rank->rank == like->rank && rank->epoch == like->epoch && strcmp(rank->group, like->group) == 0)
            return rank;
    }
    return NULL;
}

static const Ep__V1__OpStats *find_op(const Ep__V1__RankStats *rank, const char *op)
{
    static const Ep__V1__OpStats none = EP__V1__OP_STATS__INIT;

    for (size_t i = 0; rank && i < rank->n_ops; i++)
        if (strcmp(rank->ops[i]->op, op) == 0)
            return rank->ops[i];
    return &none;
}

/* A counter that went back belongs to a new life of the rank. */
static uint64_t delta(uint64_t now, uint64_t before)
{
    return now >= before ? now - before : now;
}

static uint64_t wait_for(const Ep__V1__RankStats *rank, uint32_t peer)
{
    for (size_t i = 0; rank && i < rank->n_peers; i++)
        if (rank->peers[i]->rank == peer)
            return rank->peers[i]->wait_us;
    return 0;
}

static int latest_peer(const Ep__V1__RankStats *now, const Ep__V1__RankStats *before)
{
    uint64_t most = 0;
    int late = -1;

    for (size_t i = 0; i < now->n_peers; i++) {
        uint64_t waited = delta(now->peers[i]->wait_us, wait_for(before, now->peers[i]->rank));

        if (waited > most) {
            most = waited;
            late = (int)now->peers[i]->rank;
        }
    }
    return late;
}

static struct row make_row(const Ep__V1__RankStats *rank, const Ep__V1__RankStats *before, const char *op,
                           double seconds)
{
    const Ep__V1__OpStats *now = find_op(rank, op), *then = find_op(before, op);
    uint64_t count = delta(now->count, then->count), busy_us = delta(now->busy_us, then->busy_us);

    return (struct row){
        .rank = rank,
        .op = op,
        .ops = (double)count / seconds,
        .tokens = (double)delta(now->tokens, then->tokens) / seconds,
        .bytes = (double)delta(now->wire_bytes, then->wire_bytes) / seconds,
        .busy = (double)busy_us / 1e6 / seconds,
        .wait = (double)delta(now->wait_us, then->wait_us) / 1e6 / seconds,
        .mean_us = count ? (double)busy_us / (double)count : 0,
        .errors = delta(now->errors, then->errors),
        .timeouts = delta(now->timeouts, then->timeouts),
        .late = latest_peer(rank, before),
    };
}

static double sort_key(const struct row *row, enum sort sort)
{
    switch (sort) {
    case SORT_OPS: return row->ops;
    case SORT_TOKENS: return row->tokens;
    case SORT_BYTES: return row->bytes;
    case SORT_BUSY: return row->busy;
    case SORT_WAIT: return row->wait;
    default: return 0;
    }
}

/* The largest first; equal ones by name, so that rows keep their place. */
static int compare_rows(const void *a, const void *b, void *sort)
{
    const struct row *x = a, *y = b;
    double left = sort_key(x, *(enum sort *)sort), right = sort_key(y, *(enum sort *)sort);
    int by_group = strcmp(x->rank->group, y->rank->group);

    if (left < right || left > right)
        return left > right ? -1 : 1;
    if (by_group)
        return by_group;
    if (x->rank->rank != y->rank->rank)
        return x->rank->rank < y->rank->rank ? -1 : 1;
    return strcmp(x->op, y->op);
}

static double seconds_between(const struct top *top)
{
    uint64_t us = delta(top->latest->time_us, top->previous->time_us);

    return us ? (double)us / 1e6 : (double)top->interval_ms / 1e3;
}

static void compute_rows(struct top *top)
{
    size_t most = 0;

    free(top->rows);
    top->n_rows = 0;
    for (size_t i = 0; i < top->latest->n_ranks; i++)
        most += top->latest->ranks[i]->n_ops + 1;
    top->rows = calloc(most + 1, sizeof *top->rows);
    for (size_t i = 0; top->rows && i < top->latest->n_ranks; i++) {
        const Ep__V1__RankStats *rank = top->latest->ranks[i], *before = find_rank(top->previous, rank);

        size_t first = top->n_rows;

        for (size_t j = 0; j < rank->n_ops; j++)
            if (ep_stats_used(rank->ops[j]))
                top->rows[top->n_rows++] = make_row(rank, before, rank->ops[j]->op, seconds_between(top));
        if (top->n_rows == first)
            top->rows[top->n_rows++] = make_row(rank, before, "", seconds_between(top));
    }
    if (top->rows)
        qsort_r(top->rows, top->n_rows, sizeof *top->rows, compare_rows, &top->sort);
}

/* ---- pictures ---------------------------------------------------------------------------- */

static struct ep_text percent(double share)
{
    struct ep_text text;

    snprintf(text.s, sizeof text.s, "%.0f%%", share * 100);
    return text;
}

static struct ep_text per_second(double bytes)
{
    struct ep_text text;

    snprintf(text.s, sizeof text.s, "%.24sB/s", ep_text_count(bytes).s);
    return text;
}

static struct ep_table *make_table(const struct top *top)
{
    static const struct ep_column columns[] = {
        { "GROUP", 0 },
        { "RANK", EP_COLUMN_RIGHT },
        { "STATE", EP_COLUMN_STATE },
        { "OP", 0 },
        { "OPS/S", EP_COLUMN_RIGHT },
        { "TOKENS/S", EP_COLUMN_RIGHT },
        { "WIRE", EP_COLUMN_RIGHT },
        { "US/OP", EP_COLUMN_RIGHT },
        { "BUSY", EP_COLUMN_RIGHT },
        { "WAIT", EP_COLUMN_RIGHT },
        { "ERRORS", EP_COLUMN_RIGHT },
        { "TIMEOUTS", EP_COLUMN_RIGHT },
        { "LATE", EP_COLUMN_RIGHT },
    };
    struct ep_table *table = ep_table_create(columns, sizeof columns / sizeof *columns);

    for (size_t i = 0; i < top->n_rows; i++) {
        const struct row *row = &top->rows[i];

        ep_table_add(table,
                     (const char *[]){ row->rank->group, ep_text_u64(row->rank->rank).s,
                                       ep_text_enum(&ep__v1__rank_state__descriptor, (int)row->rank->state),
                                       row->op, ep_text_count(row->ops).s, ep_text_count(row->tokens).s,
                                       per_second(row->bytes).s, ep_text_count(row->mean_us).s,
                                       percent(row->busy).s, percent(row->wait).s, ep_text_u64(row->errors).s,
                                       ep_text_u64(row->timeouts).s,
                                       row->late >= 0 ? ep_text_u64((uint64_t)row->late).s : "" });
    }
    return table;
}

static void head_line(const struct top *top, char *out, size_t size)
{
    unsigned attached = 0;
    double ops = 0, bytes = 0;

    for (size_t i = 0; i < top->latest->n_ranks; i++)
        attached += top->latest->ranks[i]->state == EP__V1__RANK_STATE__RANK_STATE_ATTACHED;
    for (size_t i = 0; i < top->n_rows; i++) {
        ops += top->rows[i].ops;
        bytes += top->rows[i].bytes;
    }
    snprintf(out, size, "%s  %s  ranks attached %u of %zu  ops/s %s  wire %sB/s  by %s", top->latest->node,
             ep_text_clock(top->latest->time_us).s, attached, top->latest->n_ranks, ep_text_count(ops).s,
             ep_text_count(bytes).s, ep_top_sorts[top->sort]);
}

static void draw(const struct top *top)
{
    size_t rows, columns;
    char head[512] = "", *table = NULL, *screen = NULL;

    ep_terminal_size(&rows, &columns);
    if (top->latest) {
        head_line(top, head, sizeof head);
        table = ep_table_text(make_table(top), columns);
    }
    if (asprintf(&screen, "%.*s\n%.*s\n%s", (int)columns, *head ? head : top->admin->server, (int)columns,
                 *top->trouble ? top->trouble : "q: end  s: order", table ? table : "") >= 0)
        ep_terminal_draw(screen);
    free(screen);
    free(table);
}

static json_t *row_to_json(const struct row *row)
{
    return json_pack(
        "{s:s, s:I, s:I, s:s, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:o}", "group", row->rank->group,
        "epoch", (json_int_t)row->rank->epoch, "rank", (json_int_t)row->rank->rank, "state",
        ep_text_enum(&ep__v1__rank_state__descriptor, (int)row->rank->state), "op", row->op, "ops_per_s",
        row->ops, "tokens_per_s", row->tokens, "wire_bytes_per_s", row->bytes, "us_per_op", row->mean_us,
        "busy", row->busy, "wait", row->wait, "errors", (json_int_t)row->errors, "timeouts",
        (json_int_t)row->timeouts, "late_rank", row->late >= 0 ? json_integer(row->late) : json_null());
}

static void print_item(const struct top *top)
{
    json_t *rows = json_array();

    for (size_t i = 0; i < top->n_rows; i++)
        json_array_append_new(rows, row_to_json(&top->rows[i]));
    ep_output_item(top->admin, json_pack("{s:s, s:I, s:f, s:o}", "node", top->latest->node, "time_us",
                                         (json_int_t)top->latest->time_us, "seconds", seconds_between(top),
                                         "rows", rows));
}

static void print_plain(const struct top *top)
{
    char head[512], clean[512];

    head_line(top, head, sizeof head);
    ep_text_clean(head, clean, sizeof clean);
    puts(clean);
    ep_table_print(make_table(top), stdout);
    fflush(stdout);
}

static void show(const struct top *top)
{
    if (top->on_screen)
        draw(top);
    else if (top->admin->format != EP_FORMAT_TABLE)
        print_item(top);
    else
        print_plain(top);
}

/* ---- the loop ------------------------------------------------------------------------------ */

static void take_sample(struct top *top, Ep__V1__Stats *stats)
{
    ep_admin_free(top->previous);
    top->previous = top->latest;
    top->latest = stats;
    top->trouble[0] = '\0';
    if (top->previous)
        compute_rows(top);
}

/* False: the user wants to end. */
static bool handle_keys(struct top *top)
{
    int key;

    while (top->on_screen && (key = ep_terminal_key(0)) != 0) {
        top->quit |= key == 'q' || key == 'Q';
        if (key == 's' || key == 'S') {
            top->sort = (top->sort + 1) % N_SORTS;
            if (top->previous)
                compute_rows(top);
            draw(top);
        }
    }
    top->quit |= ep_terminal_ended() || ep_output_over();
    return !top->quit;
}

static ep_status open_stream(struct top *top, struct ep_rpc_stream **stream, struct ep_error *error)
{
    Ep__V1__WatchStatsRequest request = EP__V1__WATCH_STATS_REQUEST__INIT;

    if (top->group)
        request.group = (char *)(uintptr_t)top->group;
    request.interval_ms = (uint32_t)top->interval_ms;
    return ep_admin_stream(top->admin, "WatchStats", &request.base, -1, stream, error);
}

/*
 * The next sample, EP_OK with *stats NULL when the user ends it.  The server has the interval and
 * --timeout to send it.
 */
static ep_status next_sample(struct top *top, struct ep_rpc_stream *stream, Ep__V1__Stats **stats,
                             struct ep_error *error)
{
    int64_t patience_ms = top->admin->timeout_ms < 0 ? INT32_MAX : top->interval_ms + top->admin->timeout_ms;
    uint64_t deadline = ep_clock_ns() + (uint64_t)patience_ms * EP_NS_PER_MS;

    *stats = NULL;
    while (handle_keys(top)) {
        ProtobufCMessage *reply;
        ep_status status = ep_admin_stream_read(top->admin, stream, LOOK_MS, &reply, error);

        if (status == EP_DEADLINE_EXCEEDED && ep_clock_ns() < deadline)
            continue;
        if (status == EP_DEADLINE_EXCEEDED)
            return ep_error_set(error, status, "no answer from %s within %" PRId64 " ms", top->admin->server,
                                patience_ms);
        if (status == EP_OK && !reply)
            return ep_error_set(error, EP_UNAVAILABLE, "%s ended the stream: it is stopping",
                                top->admin->server);
        *stats = (Ep__V1__Stats *)reply;
        return status;
    }
    return EP_OK;
}

/* Samples of one stream until the end (*over) or an error. */
static ep_status run_stream(struct top *top, struct ep_rpc_stream *stream, bool *over, struct ep_error *error)
{
    uint32_t shown = 0;

    while (!*over) {
        Ep__V1__Stats *stats;
        ep_status status = next_sample(top, stream, &stats, error);

        if (status != EP_OK)
            return status;
        *over = stats == NULL;
        if (*over)
            break;
        take_sample(top, stats);
        if (!top->previous)
            continue;
        show(top);
        *over = top->iterations && ++shown == top->iterations;
    }
    return EP_OK;
}

static ep_status run_once(struct top *top, bool *over, struct ep_error *error)
{
    struct ep_rpc_stream *stream;
    ep_status status = open_stream(top, &stream, error);

    if (status != EP_OK)
        return status;
    status = run_stream(top, stream, over, error);
    ep_rpc_stream_cancel(stream);
    ep_rpc_stream_close(stream);
    return status;
}

/* On a screen a lost server is shown and tried again, for who looks wants to see it come back. */
static bool try_again(struct top *top, ep_status status, const struct ep_error *error)
{
    if (!top->on_screen || !top->latest || (status != EP_UNAVAILABLE && status != EP_DEADLINE_EXCEEDED))
        return false;
    ep_text_clean(error->text, top->trouble, sizeof top->trouble);
    draw(top);
    for (int waited = 0; waited < RETRY_MS && handle_keys(top); waited += LOOK_MS)
        poll(NULL, 0, LOOK_MS);
    return true;
}

static ep_status run(struct top *top, struct ep_error *error)
{
    bool over = false;
    ep_status status;

    do {
        status = run_once(top, &over, error);
        if (status != EP_OK && !try_again(top, status, error))
            break;
    } while (!over && !top->quit);
    return over || top->quit ? EP_OK : status;
}

int ep_top_run(struct ep_admin *admin, const struct ep_invocation *invocation)
{
    struct top top = { .admin = admin, .group = invocation->argument };
    const char *sort = ep_invocation_text(invocation, "sort");
    struct ep_error error;
    ep_status status;

    top.interval_ms = ep_invocation_ms(invocation, "interval", 1000);
    if (top.interval_ms < MIN_INTERVAL_MS)
        top.interval_ms = MIN_INTERVAL_MS;
    top.iterations = (uint32_t)ep_invocation_u64(invocation, "iterations", 0);
    if (ep_invocation_given(invocation, "once"))
        top.iterations = 1;
    while (sort && strcmp(ep_top_sorts[top.sort], sort) != 0)
        top.sort++;
    if (top.iterations == 0 && admin->format == EP_FORMAT_TABLE)
        top.on_screen = ep_terminal_open();
    status = run(&top, &error);
    ep_terminal_close();
    ep_admin_free(top.previous);
    ep_admin_free(top.latest);
    free(top.rows);
    return status == EP_OK ? 0 : ep_admin_fail(admin, &error);
}
