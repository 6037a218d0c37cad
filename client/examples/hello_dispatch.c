/*
 * hello_dispatch: one process joins every rank of a group, a thread each.  Every rank sends a few
 * tokens to two experts each, the "experts" multiply by a small number, the results come back and
 * are checked.  Prints what went where.
 *
 * Ops read and write memory of ep_alloc(), which may be a GPU's: what the program itself makes or looks at
 * is in arrays of its own, and ep_write() and ep_read() copy.
 *
 *     hello_dispatch [GROUP [ADDRESS]]        defaults: "hello", the server that ep_client_open() takes for NULL
 */
#ifndef _GNU_SOURCE /* POSIX too where the compiler is asked for C11 alone (-std=c11) */
#define _GNU_SOURCE
#endif

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_client.h"

enum { TOKENS = 3, MAX_K = 2 };

struct worker {
    ep_client *client;
    const char *group;
    int32_t number;
    pthread_t thread;
    FILE *story; /* what happened at this rank, into text */
    char *text;
    size_t text_bytes;
    int failed;
};

/* An array that ops use, and the program's copy of it. */
struct array {
    void *window, *own;
    size_t bytes;
};

struct buffers {
    struct array tokens, rows, result; /* bf16 */
    struct array choices, counts, offsets, weights, sources;
};

/* ---- bf16: the upper half of an fp32 ------------------------------------------------------- */

static uint16_t to_bf16(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- the model: whom a token goes to and what an expert does ------------------------------- */

static float token_value(uint32_t rank, uint32_t token)
{
    return (float)(1 + rank * TOKENS + token);
}

static uint32_t choice(uint32_t rank, uint32_t token, uint32_t j, const ep_group_info *group)
{
    return (rank * 3 + token * 5 + j * (group->experts / 2 + 1)) % group->experts;
}

static float expert_factor(uint32_t expert)
{
    return (float)(1 + expert % 4);
}

/* ---- one rank ------------------------------------------------------------------------------ */

static int fail(struct worker *w, const char *what)
{
    fprintf(w->story, "  %s: %s\n", what, ep_error_message());
    return -1;
}

static uint32_t top_k(const ep_group_info *group)
{
    return group->top_k < MAX_K ? group->top_k : MAX_K;
}

static int allocate(ep_rank *rank, struct array *array, size_t bytes)
{
    *array = (struct array){ .window = ep_alloc(rank, bytes), .own = calloc(1, bytes), .bytes = bytes };
    return array->window && array->own ? 0 : -1;
}

static int allocate_all(struct worker *w, ep_rank *rank, const ep_group_info *g, struct buffers *b)
{
    const size_t row = g->hidden * sizeof(uint16_t), k = top_k(g), most = (size_t)g->ranks * TOKENS * k;

    if (allocate(rank, &b->tokens, TOKENS * row) < 0 || allocate(rank, &b->result, TOKENS * row) < 0
        || allocate(rank, &b->rows, most * row) < 0
        || allocate(rank, &b->choices, TOKENS * k * sizeof(int32_t)) < 0
        || allocate(rank, &b->weights, TOKENS * k * sizeof(float)) < 0
        || allocate(rank, &b->counts, g->max_local_experts * sizeof(int32_t)) < 0
        || allocate(rank, &b->offsets, (g->max_local_experts + 1) * sizeof(int32_t)) < 0
        || allocate(rank, &b->sources, most * sizeof(ep_source_row)) < 0)
        return fail(w, "ep_alloc");
    return 0;
}

/* What is in the window goes with the rank. */
static void free_all(struct buffers *b)
{
    void *own[] = { b->tokens.own, b->result.own,  b->rows.own,    b->choices.own,
                    b->counts.own, b->weights.own, b->offsets.own, b->sources.own };

    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        free(own[i]);
}

static int to_window(struct worker *w, ep_rank *rank, const struct array *array)
{
    return ep_write(rank, array->window, array->own, array->bytes, NULL) == EP_OK ? 0 : fail(w, "ep_write");
}

static int from_window(struct worker *w, ep_rank *rank, const struct array *array)
{
    return ep_read(rank, array->own, array->window, array->bytes, NULL) == EP_OK ? 0 : fail(w, "ep_read");
}

static int make_inputs(struct worker *w, ep_rank *rank, const ep_rank_info *info, struct buffers *b)
{
    const ep_group_info *g = &info->group;
    const uint32_t k = top_k(g);
    uint16_t *tokens = b->tokens.own;
    int32_t *choices = b->choices.own;
    float *weights = b->weights.own;

    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t i = 0; i < g->hidden; i++)
            tokens[t * g->hidden + i] = to_bf16(token_value(info->rank, t));
        for (uint32_t j = 0; j < k; j++) {
            choices[t * k + j] = (int32_t)choice(info->rank, t, j, g);
            weights[t * k + j] = 1.0f / (float)k;
        }
    }
    if (to_window(w, rank, &b->tokens) < 0 || to_window(w, rank, &b->choices) < 0)
        return -1;
    return to_window(w, rank, &b->weights);
}

/* Every row that came to local expert l, multiplied; the rows of l are offsets[l] and the next counts[l]. */
static void multiply_rows(struct worker *w, const ep_rank_info *info, const struct buffers *b)
{
    const uint32_t hidden = info->group.hidden;
    const int32_t *counts = b->counts.own, *offsets = b->offsets.own;
    const ep_source_row *sources = b->sources.own;
    uint16_t *rows = b->rows.own;

    for (uint32_t l = 0; l < info->local_experts; l++) {
        const uint32_t expert = info->local_to_expert[l];

        for (int32_t i = 0; i < counts[l]; i++) {
            const size_t row = (size_t)(offsets[l] + i);

            fprintf(w->story, "  expert %u got token %u of rank %u (value %g)\n", expert, sources[row].token,
                    sources[row].rank, (double)from_bf16(rows[row * hidden]));
            for (uint32_t h = 0; h < hidden; h++)
                rows[row * hidden + h] = to_bf16(from_bf16(rows[row * hidden + h]) * expert_factor(expert));
        }
    }
}

/* Experts of a real program are kernels that work on the window's memory. */
static int run_experts(struct worker *w, ep_rank *rank, const ep_rank_info *info, const struct buffers *b)
{
    if (from_window(w, rank, &b->counts) < 0 || from_window(w, rank, &b->offsets) < 0
        || from_window(w, rank, &b->sources) < 0 || from_window(w, rank, &b->rows) < 0)
        return -1;
    multiply_rows(w, info, b);
    return to_window(w, rank, &b->rows);
}

static int check(struct worker *w, const ep_rank_info *info, const struct buffers *b)
{
    const ep_group_info *g = &info->group;
    const uint16_t *result = b->result.own;
    const uint32_t k = top_k(g);
    int wrong = 0;

    for (uint32_t t = 0; t < TOKENS; t++) {
        float want = 0;

        for (uint32_t j = 0; j < k; j++)
            want += token_value(info->rank, t) * expert_factor(choice(info->rank, t, j, g)) / (float)k;
        for (uint32_t i = 0; i < g->hidden; i++)
            wrong += fabsf(from_bf16(result[t * g->hidden + i]) - want) > want / 64;
        fprintf(w->story, "  token %u came back as %g, expected %g\n", t,
                (double)from_bf16(result[t * g->hidden]), (double)want);
    }
    return wrong ? -1 : 0;
}

static int run_ops(struct worker *w, ep_rank *rank, const ep_rank_info *info, const struct buffers *b,
                   ep_handle *handle)
{
    const ep_group_info *g = &info->group;

    /* Packed: the rows of each expert, one after the other; low latency and high throughput have it. */
    const ep_dispatch_args dispatch = {
        .size = sizeof dispatch,
        .mode = g->ll_max_tokens ? EP_MODE_LL : EP_MODE_HT,
        .layout = EP_LAYOUT_PACKED,
        .input_dtype = EP_BF16,
        .num_tokens = TOKENS,
        .top_k = top_k(g),
        .tokens = b->tokens.window,
        .topk_idx = b->choices.window,
        .topk_weights = b->weights.window,
        .out = b->rows.window,
        .out_bytes = b->rows.bytes,
        .counts = b->counts.window,
        .offsets = b->offsets.window,
        .sources = b->sources.window,
    };
    const ep_combine_args combine = {
        .size = sizeof combine,
        .dtype = EP_BF16,
        .rows = b->rows.window,
        .rows_bytes = b->rows.bytes,
        .out = b->result.window,
    };

    if (ep_dispatch(handle, &dispatch, NULL) != EP_OK || ep_sync(rank, -1) != EP_OK)
        return fail(w, "dispatch");
    if (run_experts(w, rank, info, b) < 0)
        return -1;
    if (ep_combine(handle, &combine, NULL) != EP_OK || ep_sync(rank, -1) != EP_OK)
        return fail(w, "combine");
    return from_window(w, rank, &b->result);
}

static int round_trip(struct worker *w, ep_rank *rank, const ep_rank_info *info, const struct buffers *b)
{
    ep_handle *handle;
    int rc;

    if (ep_handle_create(rank, &handle) != EP_OK)
        return fail(w, "ep_handle_create");
    rc = run_ops(w, rank, info, b, handle);
    ep_handle_destroy(handle);
    return rc;
}

static int work(struct worker *w, ep_rank *rank)
{
    ep_rank_info info = { .size = sizeof info, .group.size = sizeof info.group };
    struct buffers b = { 0 };
    int rc;

    if (ep_rank_describe(rank, &info) != EP_OK)
        return fail(w, "ep_rank_describe");
    rc = allocate_all(w, rank, &info.group, &b);
    if (rc == 0)
        rc = make_inputs(w, rank, &info, &b);
    if (rc == 0)
        rc = round_trip(w, rank, &info, &b);
    if (rc == 0)
        rc = check(w, &info, &b);
    free_all(&b);
    return rc;
}

static void *run_rank(void *arg)
{
    struct worker *w = arg;
    ep_join_options options = { .size = sizeof options, .group = w->group, .rank = w->number };
    ep_rank *rank;

    w->failed = 1;
    if (ep_join(w->client, &options, &rank) != EP_OK) {
        fail(w, "ep_join");
        return NULL;
    }
    w->failed = work(w, rank) < 0;
    ep_leave(rank);
    return NULL;
}

/* ---- all ranks ----------------------------------------------------------------------------- */

static int run_all(ep_client *client, const char *group, uint32_t ranks)
{
    struct worker *workers = calloc(ranks, sizeof *workers);
    int failed = 0;

    if (!workers) {
        fprintf(stderr, "hello_dispatch: no memory for %u ranks\n", ranks);
        exit(1);
    }
    for (uint32_t i = 0; i < ranks; i++) {
        struct worker *w = &workers[i];

        *w = (struct worker){ .client = client, .group = group, .number = (int32_t)i };
        w->story = open_memstream(&w->text, &w->text_bytes);
        if (!w->story || pthread_create(&w->thread, NULL, run_rank, w) != 0) {
            fprintf(stderr, "hello_dispatch: no thread for rank %u\n", i);
            exit(1);
        }
    }
    for (uint32_t i = 0; i < ranks; i++) {
        struct worker *w = &workers[i];

        pthread_join(w->thread, NULL);
        fclose(w->story);
        printf("rank %u: %s\n%s", i, w->failed ? "FAILED" : "ok", w->text);
        failed += w->failed;
        free(w->text);
    }
    free(workers);
    return failed;
}

static int usage(FILE *out)
{
    fputs("Usage: hello_dispatch [GROUP [ADDRESS]]\n"
          "Join every rank of GROUP (default: hello), send tokens to two experts each, and check what comes back.\n"
          "ADDRESS is unix:PATH (default: $EP_SERVER, else the user's own server, else unix:/run/ep-server/ep.sock).\n", out);
    return out == stdout && fflush(out) == 0 ? 0 : ep_status_exit_code(out == stdout ? EP_IO : EP_INVALID_ARGUMENT);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--help") == 0)
        return usage(stdout);
    if (argc > 3 || (argc > 1 && *argv[1] == '-'))
        return usage(stderr);

    const char *group = argc > 1 ? argv[1] : "hello", *address = argc > 2 ? argv[2] : NULL;
    ep_group_info info = { .size = sizeof info };
    ep_client *client;
    ep_status status = ep_client_open(address, NULL, &client);

    if (status != EP_OK) {
        fprintf(stderr, "hello_dispatch: %s\n", ep_error_message());
        return ep_status_exit_code(status);
    }
    status = ep_group_describe(client, group, &info);
    if (status != EP_OK) {
        fprintf(stderr, "hello_dispatch: %s\n", ep_error_message());
        ep_client_close(client);
        return ep_status_exit_code(status);
    }
    printf("group %s, epoch %llu: %u ranks, %u experts, hidden %u\n", group, (unsigned long long)info.epoch,
           info.ranks, info.experts, info.hidden);

    int failed = run_all(client, group, info.ranks);

    ep_client_close(client);
    if (failed)
        printf("%d ranks failed\n", failed);
    else
        printf("all results are right\n");
    return failed ? 1 : 0;
}
