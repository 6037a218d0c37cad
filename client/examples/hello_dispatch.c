/*
 * hello_dispatch: one process joins every rank of a group, a thread each.  Every rank sends a few
 * tokens to two experts each, the "experts" multiply by a small number, the results come back and
 * are checked.  Prints what went where.
 *
 *     hello_dispatch [GROUP [ADDRESS]]        defaults: "hello", $EP_SERVER or the system's socket
 */
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

/* Memory of one rank's ops; all of it lies in the rank's window. */
struct buffers {
    uint16_t *tokens, *rows, *result; /* bf16 */
    size_t rows_bytes;
    int32_t *choices, *counts, *offsets;
    float *weights;
    ep_source_row *sources;
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

static int allocate(struct worker *w, ep_rank *rank, const ep_group_info *g, struct buffers *b)
{
    const size_t row = g->hidden * sizeof(uint16_t), k = top_k(g), most = (size_t)g->ranks * TOKENS * k;

    b->rows_bytes = most * row;
    b->tokens = ep_alloc(rank, TOKENS * row);
    b->result = ep_alloc(rank, TOKENS * row);
    b->rows = ep_alloc(rank, b->rows_bytes);
    b->choices = ep_alloc(rank, TOKENS * k * sizeof *b->choices);
    b->weights = ep_alloc(rank, TOKENS * k * sizeof *b->weights);
    b->counts = ep_alloc(rank, g->max_local_experts * sizeof *b->counts);
    b->offsets = ep_alloc(rank, (g->max_local_experts + 1) * sizeof *b->offsets);
    b->sources = ep_alloc(rank, most * sizeof *b->sources);
    return b->tokens && b->result && b->rows && b->choices && b->weights && b->counts && b->offsets
                   && b->sources
               ? 0
               : fail(w, "ep_alloc");
}

static void make_inputs(const ep_rank_info *info, struct buffers *b)
{
    const ep_group_info *g = &info->group;
    const uint32_t k = top_k(g);

    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t i = 0; i < g->hidden; i++)
            b->tokens[t * g->hidden + i] = to_bf16(token_value(info->rank, t));
        for (uint32_t j = 0; j < k; j++) {
            b->choices[t * k + j] = (int32_t)choice(info->rank, t, j, g);
            b->weights[t * k + j] = 1.0f / (float)k;
        }
    }
}

/* Every row that came to local expert l, multiplied; the rows of l are offsets[l] and the next counts[l]. */
static void run_experts(struct worker *w, const ep_rank_info *info, const struct buffers *b)
{
    const uint32_t hidden = info->group.hidden;

    for (uint32_t l = 0; l < info->local_experts; l++) {
        const uint32_t expert = info->local_to_expert[l];

        for (int32_t i = 0; i < b->counts[l]; i++) {
            const size_t row = (size_t)(b->offsets[l] + i);

            fprintf(w->story, "  expert %u got token %u of rank %u (value %g)\n", expert,
                    b->sources[row].token, b->sources[row].rank, (double)from_bf16(b->rows[row * hidden]));
            for (uint32_t h = 0; h < hidden; h++) {
                uint16_t *x = &b->rows[row * hidden + h];

                *x = to_bf16(from_bf16(*x) * expert_factor(expert));
            }
        }
    }
}

static int check(struct worker *w, const ep_rank_info *info, const struct buffers *b)
{
    const ep_group_info *g = &info->group;
    const uint32_t k = top_k(g);
    int wrong = 0;

    for (uint32_t t = 0; t < TOKENS; t++) {
        float want = 0;

        for (uint32_t j = 0; j < k; j++)
            want += token_value(info->rank, t) * expert_factor(choice(info->rank, t, j, g)) / (float)k;
        for (uint32_t i = 0; i < g->hidden; i++)
            wrong += fabsf(from_bf16(b->result[t * g->hidden + i]) - want) > want / 64;
        fprintf(w->story, "  token %u came back as %g, expected %g\n", t,
                (double)from_bf16(b->result[t * g->hidden]), (double)want);
    }
    return wrong ? -1 : 0;
}

static int round_trip(struct worker *w, ep_rank *rank, const ep_rank_info *info, const struct buffers *b)
{
    const ep_group_info *g = &info->group;
    ep_handle *handle;
    int rc = 0;

    if (ep_handle_create(rank, &handle) != EP_OK)
        return fail(w, "ep_handle_create");

    /* Packed: the rows of each expert, one after the other; low latency and high throughput have it. */
    ep_dispatch_args dispatch = {
        .size = sizeof dispatch,
        .mode = g->ll_max_tokens ? EP_MODE_LL : EP_MODE_HT,
        .layout = EP_LAYOUT_PACKED,
        .input_dtype = EP_BF16,
        .num_tokens = TOKENS,
        .top_k = top_k(g),
        .tokens = b->tokens,
        .topk_idx = b->choices,
        .topk_weights = b->weights,
        .out = b->rows,
        .out_bytes = b->rows_bytes,
        .counts = b->counts,
        .offsets = b->offsets,
        .sources = b->sources,
    };
    ep_combine_args combine = {
        .size = sizeof combine,
        .dtype = EP_BF16,
        .rows = b->rows,
        .rows_bytes = b->rows_bytes,
        .out = b->result,
    };

    if (ep_dispatch(handle, &dispatch, NULL) != EP_OK || ep_sync(rank, -1) != EP_OK) {
        rc = fail(w, "dispatch");
    } else {
        run_experts(w, info, b);
        if (ep_combine(handle, &combine, NULL) != EP_OK || ep_sync(rank, -1) != EP_OK)
            rc = fail(w, "combine");
    }
    ep_handle_destroy(handle);
    return rc;
}

static int work(struct worker *w, ep_rank *rank)
{
    ep_rank_info info = { .size = sizeof info, .group.size = sizeof info.group };
    struct buffers b;

    if (ep_rank_describe(rank, &info) != EP_OK)
        return fail(w, "ep_rank_describe");
    if (allocate(w, rank, &info.group, &b) < 0)
        return -1;
    make_inputs(&info, &b);
    if (round_trip(w, rank, &info, &b) < 0)
        return -1;
    return check(w, &info, &b);
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

int main(int argc, char **argv)
{
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
