/*
 * Random ops for as long as one likes.
 *
 * What every op is like follows from the seed and its number, so all ranks know it of all ranks: layout,
 * number of tokens (each rank its own), choices (none, wrong and repeated ones among them), whether the
 * routing is a cached one, whether the op comes in halves, whether its combine follows before anybody has looked, after
 * that, after the next dispatch or never.  Between chapters of some hundred ops ranks leave and return.
 *
 * Ops come in stretches: random ones first, and then such as repeat themselves after a few, with other data each time.
 * So an executor server expects ops (kernels/cuda/forecast.h), many of which come.  Others come instead of the rest:
 * when numbers of tokens begin to differ by one in the middle, when members change, and in the next stretch.
 *
 * Tokens are small integers and weights smaller ones, so that every sum is exact in bf16, and a result is
 * compared bit for bit with token times sum of the weights that reached somebody (rank-major: times the
 * number of ranks, as their rows go back as they came).  Counts are compared every time, rows of
 * dispatches now and then.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_hash.h"
#include "ep_clock.h"
#include "ll_tests.h"

enum {
    HIDDEN = 1024,
    MOST_TOKENS = 64,
    TOP_K = 4,
    HANDLES = 8,
    CHAPTER = 200,  /* ops between two changes of membership */
    STRETCH = 150,  /* of one to four of a worker: what its last 64 say is for those that come 64 later */
    MOST_RANDOM = 40, /* of a stretch */
    MOST_PERIOD = HANDLES / 2,
    LOOK_EVERY = 8, /* at a dispatch's rows */
    VALUES = 16,    /* tokens consist of -8 .. 7 */
    PLACES = 2,     /* a delayed combine's buffers stay while the next op uses others */
    POISON = 0xa5
};
static const struct kind { /* the first ones are for a soak of LL alone */
    ep_mode mode;
    ep_layout layout;
} kinds[] = {
    { EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR }, { EP_MODE_LL, EP_LAYOUT_RANK_MAJOR }, { EP_MODE_LL, EP_LAYOUT_PACKED },
    { EP_MODE_HT, EP_LAYOUT_PACKED },       { EP_MODE_HT, EP_LAYOUT_FLAT },
};
enum { LL_KINDS = 3, ALL_KINDS = sizeof kinds / sizeof *kinds };

struct place { /* of the arena; inputs lie side by side and are written at once */
    uint64_t x, topk, weights, inputs_bytes;
    struct ep_span out, counts, offsets, sources, result;
};

struct soak {
    struct world *world;
    uint64_t seed, first, end; /* ops of this chapter */
    uint32_t kinds;
    uint64_t members;
    struct place place[PLACES];
};

/* One rank's memory for it. */
struct worker {
    const struct soak *soak;
    struct world_rank *rank;
    char *inputs, *rows;
    uint16_t *result;
    struct ep_source *sources;
};

/* ---- what op i is like --------------------------------------------------------------- */

struct step {
    uint64_t number, routes; /* the op whose routing it has */
    uint64_t like;           /* and the one whose numbers of tokens, */
    bool wavers;             /* or one more or less at some ranks */
    ep_mode mode;
    ep_layout layout;
    bool cached, skipped, delayed, prompt, halves;
    uint32_t handle, period;
};

/* Ops that repeat themselves after `period`, with numbers of tokens that do not from `wavers` on; or random ones: 0. */
struct run {
    uint64_t first, end, wavers;
    uint32_t period;
};

static uint64_t draw(const struct soak *soak, uint64_t op, uint32_t what, uint32_t a, uint32_t b)
{
    return bench_hash(soak->seed + op * 0x9e3779b97f4a7c15ull, (enum bench_stream)what, a, b, 0);
}

enum { DRAW_STEP = 200, DRAW_TOKENS, DRAW_CHOICE, DRAW_ROW, DRAW_MEMBERS, DRAW_STRETCH };

static struct run run_of(const struct soak *soak, uint64_t i)
{
    const uint64_t stretch = i / STRETCH, first = stretch * STRETCH, end = first + STRETCH;
    const uint64_t d = draw(soak, stretch, DRAW_STRETCH, 0, 0), repeats = first + 1 + d % MOST_RANDOM;

    if (i < repeats)
        return (struct run){ first, repeats, repeats, 0 };
    return (struct run){ repeats, end, (d >> 16) % 2 ? (repeats + end) / 2 : end, 1 + (uint32_t)(d >> 32) % MOST_PERIOD };
}

/* The op whose kind is drawn for i. */
static uint64_t like(const struct soak *soak, uint64_t i)
{
    const struct run run = run_of(soak, i);

    return run.period ? run.first + (i - run.first) % run.period : i;
}

/* Handles of random ops are taken again sooner or later, and those of others with their places of the arena. */
static uint32_t handle_of(const struct soak *soak, uint64_t i)
{
    const uint32_t period = run_of(soak, i).period;

    return (uint32_t)(i % (period ? PLACES * period : HANDLES));
}

/* One of four is never combined, one of four later, and one of four before its rows are looked at. */
static bool skipped(const struct soak *soak, uint64_t i)
{
    return draw(soak, like(soak, i), DRAW_STEP, 0, 0) % 4 == 0;
}

static bool delayed(const struct soak *soak, uint64_t i)
{
    return draw(soak, like(soak, i), DRAW_STEP, 0, 0) % 4 == 1 && i + 1 < soak->end && i + 1 < run_of(soak, i).end;
}

static bool prompt(const struct soak *soak, uint64_t i)
{
    return draw(soak, like(soak, i), DRAW_STEP, 0, 0) % 4 == 2;
}

static bool wants_cached(const struct soak *soak, uint64_t i)
{
    return draw(soak, like(soak, i), DRAW_STEP, 1, 0) % 8 == 0;
}

/* The handle of a cached op is that of the op before, whose combine must not be waiting. */
static bool cached(const struct soak *soak, uint64_t i)
{
    return i > soak->first && i > run_of(soak, i).first && wants_cached(soak, i) && !wants_cached(soak, i - 1)
           && !delayed(soak, i - 1);
}

static struct step step_of(const struct soak *soak, uint64_t i)
{
    const uint64_t routes = cached(soak, i) ? i - 1 : i;
    const struct kind *kind = &kinds[draw(soak, like(soak, routes), DRAW_STEP, 2, 0) % soak->kinds];
    const struct run run = run_of(soak, i);

    return (struct step){ .number = i,
                          .routes = routes,
                          .like = like(soak, routes),
                          .wavers = routes >= run.wavers,
                          .mode = kind->mode,
                          .layout = kind->layout,
                          .cached = routes != i,
                          .skipped = skipped(soak, i),
                          .delayed = delayed(soak, i),
                          .prompt = prompt(soak, i),
                          .halves = kind->mode == EP_MODE_LL && draw(soak, like(soak, i), DRAW_STEP, 3, 0) % 4 == 0,
                          .handle = handle_of(soak, routes),
                          .period = run.period };
}

static uint32_t tokens_of(const struct soak *soak, const struct step *step, uint32_t rank)
{
    const uint64_t d = draw(soak, step->like, DRAW_TOKENS, rank, 0);
    const uint32_t tokens = d % 8 == 0 ? 0 : (uint32_t)(d >> 8) % (MOST_TOKENS + 1);

    if (!step->wavers || draw(soak, step->routes, DRAW_TOKENS, rank, 1) % 4 > 0)
        return tokens;
    return tokens < MOST_TOKENS ? tokens + 1 : tokens - 1;
}

struct choice {
    int32_t expert;
    float weight;
};

static struct choice choice_of(const struct soak *soak, const struct step *step, uint32_t rank,
                               uint32_t token, uint32_t k)
{
    const uint64_t d = draw(soak, step->routes, DRAW_CHOICE, rank, token * TOP_K + k);
    const uint32_t experts = soak->world->placement.experts;
    struct choice c = { .expert = (int32_t)((d >> 16) % experts), .weight = (float)(1 + d % 3) };

    if ((d >> 8) % 16 == 0)
        c.expert = -1;
    else if ((d >> 8) % 16 == 1)
        c.expert = (int32_t)experts + 3;
    else if ((d >> 8) % 16 == 2 && k > 0)
        c.expert = choice_of(soak, step, rank, token, 0).expert;
    return c;
}

/* Where a choice goes; false: to nobody who is there. */
static bool home_of(const struct soak *soak, int32_t expert, uint32_t *rank, uint32_t *local)
{
    const struct ep_placement *p = &soak->world->placement;

    if (expert < 0 || (uint32_t)expert >= p->experts)
        return false;
    *rank = p->rank[p->first[expert]];
    *local = p->local[p->first[expert]];
    return soak->members >> *rank & 1;
}

/* Element h of a token is value_at(row_seed, h) - 8. */
static uint64_t row_seed(const struct soak *soak, const struct step *step, uint32_t rank, uint32_t token)
{
    return draw(soak, step->number, DRAW_ROW, rank, token) | 1;
}

static uint32_t value_at(uint64_t seed, uint32_t h)
{
    return (uint32_t)(seed * (2ull * h + 1) >> 60);
}

/* Exact for whole numbers up to 256. */
static uint16_t bf16_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static void fill_row(uint64_t seed, float factor, uint16_t *row)
{
    uint16_t codes[VALUES];

    for (uint32_t v = 0; v < VALUES; v++) /* no -0: a sum that begins with 0 has none */
        codes[v] = bf16_of(((float)v - 8) * factor + 0.0f);
    for (uint32_t h = 0; h < HIDDEN; h++)
        row[h] = codes[value_at(seed, h)];
}

/* Rows of a rank once, and its counts are by source. */
static bool counts_ranks(const struct step *step)
{
    return step->layout == EP_LAYOUT_RANK_MAJOR || step->layout == EP_LAYOUT_FLAT;
}

/* What the token's result is a multiple of it by. */
static float factor_of(const struct soak *soak, const struct step *step, uint32_t rank, uint32_t token)
{
    uint64_t ranks = 0;
    uint32_t home, local;
    float sum = 0;

    for (uint32_t k = 0; k < TOP_K; k++) {
        const struct choice c = choice_of(soak, step, rank, token, k);

        if (!home_of(soak, c.expert, &home, &local))
            continue;
        sum += c.weight;
        ranks |= world_bit(home);
    }
    return counts_ranks(step) ? (float)__builtin_popcountll(ranks) : sum;
}

/* ---- ops ----------------------------------------------------------------------------- */

static const struct place *place_of(const struct worker *w, const struct step *step)
{
    return &w->soak->place[step->number % PLACES];
}

static ep_status write_inputs(struct worker *w, const struct step *step, struct ep_error *error)
{
    const struct place *p = place_of(w, step);
    const uint32_t tokens = tokens_of(w->soak, step, w->rank->rank);
    int32_t *topk = (int32_t *)(void *)(w->inputs + (p->topk - p->x));
    float *weights = (float *)(void *)(w->inputs + (p->weights - p->x));

    for (uint32_t t = 0; t < tokens; t++) {
        fill_row(row_seed(w->soak, step, w->rank->rank, t), 1,
                 (uint16_t *)(void *)w->inputs + (size_t)t * HIDDEN);
        for (uint32_t k = 0; k < TOP_K; k++) {
            const struct choice c = choice_of(w->soak, step, w->rank->rank, t, k);

            topk[t * TOP_K + k] = c.expert;
            weights[t * TOP_K + k] = c.weight;
        }
    }
    return world_put(w->rank, p->x, w->inputs, p->inputs_bytes, error);
}

static struct ep_op bare_op(const struct worker *w, const struct step *step, enum ep_op_kind kind)
{
    return (struct ep_op){ .kind = kind,
                           .mode = step->mode,
                           .layout = step->layout,
                           .flags = step->halves && kind != EP_OP_COMPLETE ? EP_OP_SEND_ONLY : 0,
                           .input_dtype = EP_BF16,
                           .wire_dtype = EP_BF16,
                           .tokens = tokens_of(w->soak, step, w->rank->rank),
                           .top_k = TOP_K,
                           .index_bytes = 4,
                           .alignment = 8,
                           .handle = step->handle,
                           .generation = 1 };
}

/* And its second half, when it has one. */
static ep_status run_op(struct worker *w, const struct step *step, const struct ep_op *op,
                        struct ep_error *error)
{
    const struct ep_op complete = bare_op(w, step, EP_OP_COMPLETE);
    ep_status status = world_run(w->rank, op, error);

    return status == EP_OK && step->halves ? world_run(w->rank, &complete, error) : status;
}

static ep_status dispatch(struct worker *w, const struct step *step, struct ep_error *error)
{
    const struct place *p = place_of(w, step);
    struct ep_op op = bare_op(w, step, EP_OP_DISPATCH);
    const uint64_t choices = (uint64_t)op.tokens * TOP_K;
    ep_status status;

    op.x = (struct ep_span){ p->x, (uint64_t)op.tokens * HIDDEN * sizeof(uint16_t) };
    op.counts = p->counts;
    op.sources = p->sources;
    if (step->layout != EP_LAYOUT_RANK_MAJOR)
        op.out = p->out;
    if (step->layout == EP_LAYOUT_PACKED)
        op.offsets = p->offsets;
    if (step->cached) {
        op.flags |= EP_OP_CACHED;
    } else {
        op.topk_idx = (struct ep_span){ p->topk, choices * sizeof(int32_t) };
        op.topk_weights = (struct ep_span){ p->weights, choices * sizeof(float) };
    }
    status = write_inputs(w, step, error);
    if (status == EP_OK)
        status = world_fill(w->rank, p->out.offset, POISON,
                            p->result.offset + p->result.bytes - p->out.offset, error);
    return status == EP_OK ? run_op(w, step, &op, error) : status;
}

static ep_status combine(struct worker *w, const struct step *step, struct ep_error *error)
{
    const struct place *p = place_of(w, step);
    struct ep_op op = bare_op(w, step, EP_OP_COMBINE);

    if (step->layout != EP_LAYOUT_RANK_MAJOR)
        op.x = p->out;
    op.out = (struct ep_span){ p->result.offset, (uint64_t)op.tokens * HIDDEN * sizeof(uint16_t) };
    return run_op(w, step, &op, error);
}

/* ---- judging ------------------------------------------------------------------------- */

static ep_status check_record(struct worker *w, const struct step *step, uint32_t part,
                              struct ep_device_record *record, struct ep_error *error)
{
    const char *what = part == EP_DEVICE_DISPATCH ? "dispatch" : "combine";
    ep_status status = world_record(w->rank, step->handle, part, record, error);

    if (status != EP_OK)
        return status;
    if (record->status != EP_OK)
        return ep_error_set(error, EP_VERIFY_FAILED, "%s ended with %s (late rank %u, phase %u)", what,
                            ep_status_name((ep_status)record->status), record->late_rank, record->wait_phase);
    if (record->arrived[0] != w->soak->members)
        return ep_error_set(error, EP_VERIFY_FAILED, "%s: arrived is %#llx, must be %#llx", what,
                            (unsigned long long)record->arrived[0], (unsigned long long)w->soak->members);
    return EP_OK;
}

/* What this rank receives: rows by local expert, or by source. */
static void expect_counts(const struct worker *w, const struct step *step, int32_t *counts)
{
    const struct soak *soak = w->soak;
    uint32_t home, local;

    for (uint32_t s = 0; s < soak->world->ranks; s++) {
        for (uint32_t t = 0; soak->members >> s & 1 && t < tokens_of(soak, step, s); t++) {
            uint64_t experts = 0; /* that this token has named already: one row each */

            for (uint32_t k = 0; k < TOP_K; k++)
                if (home_of(soak, choice_of(soak, step, s, t, k).expert, &home, &local) &&
                    home == w->rank->rank)
                    experts |= 1ull << local;
            if (counts_ranks(step))
                counts[s] += experts != 0;
            for (uint32_t l = 0; !counts_ranks(step) && experts >> l; l++)
                counts[l] += (int32_t)(experts >> l & 1);
        }
    }
}

static ep_status check_counts(struct worker *w, const struct step *step, int32_t *expected,
                              struct ep_error *error)
{
    const struct ep_limits *l = &w->soak->world->map.limits;
    const uint32_t n = counts_ranks(step) ? l->ranks : l->local_experts;
    int32_t counts[64];
    ep_status status =
        world_get(w->rank, place_of(w, step)->counts.offset, counts, n * sizeof *counts, error);

    memset(expected, 0, n * sizeof *expected);
    expect_counts(w, step, expected);
    for (uint32_t i = 0; status == EP_OK && i < n; i++)
        if (counts[i] != expected[i])
            return ep_error_set(error, EP_VERIFY_FAILED, "counts[%u] is %d, must be %d", i, counts[i],
                                expected[i]);
    return status;
}

/* Rows [first, first + n) of out: each as its source sent it. */
static ep_status check_block(struct worker *w, const struct step *step, uint64_t offset, uint64_t first,
                             uint32_t n, struct ep_error *error)
{
    const uint64_t row = HIDDEN * sizeof(uint16_t);
    const struct place *p = place_of(w, step);
    uint16_t expected[HIDDEN];
    ep_status status = world_get(w->rank, offset, w->rows, n * row, error);

    if (status == EP_OK)
        status = world_get(w->rank, p->sources.offset + first * sizeof *w->sources, w->sources,
                           n * sizeof *w->sources, error);
    for (uint32_t i = 0; status == EP_OK && i < n; i++) {
        const struct ep_source *s = &w->sources[i];

        if (s->rank >= w->soak->world->ranks || s->token >= tokens_of(w->soak, step, s->rank))
            return ep_error_set(error, EP_VERIFY_FAILED,
                                "row %llu is of token %u of rank %u, which does not exist",
                                (unsigned long long)(first + i), s->token, s->rank);
        fill_row(row_seed(w->soak, step, s->rank, s->token), 1, expected);
        if (memcmp(expected, w->rows + i * row, row) != 0)
            return ep_error_set(error, EP_VERIFY_FAILED, "row %llu is not token %u of rank %u",
                                (unsigned long long)(first + i), s->token, s->rank);
    }
    return status;
}

static ep_status check_rows(struct worker *w, const struct step *step, const struct ep_device_record *record,
                            const int32_t *counts, struct ep_error *error)
{
    const struct ep_layout_map *map = &w->soak->world->map;
    const uint64_t row = HIDDEN * sizeof(uint16_t), slots = (uint64_t)MOST_TOKENS * map->limits.ranks;
    const bool by_rank = step->layout == EP_LAYOUT_RANK_MAJOR;
    const uint32_t n = counts_ranks(step) ? map->limits.ranks : map->limits.local_experts;
    const uint32_t alignment = step->layout == EP_LAYOUT_FLAT ? 1 : 8;
    const bool follow = step->layout == EP_LAYOUT_PACKED || step->layout == EP_LAYOUT_FLAT;
    const uint64_t rows =
        by_rank ? map->ll + record->number % map->limits.ll_banks * map->bank_bytes + map->bank.rows
                : place_of(w, step)->out.offset;
    uint64_t next = 0, first;
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < n; i++) {
        first = follow ? next : i * (by_rank ? (uint64_t)MOST_TOKENS : slots);
        status = check_block(w, step, rows + first * row, first, (uint32_t)counts[i], error);
        next += ((uint32_t)counts[i] + alignment - 1) / alignment * alignment;
    }
    return status;
}

static ep_status check_dispatch(struct worker *w, const struct step *step, struct ep_error *error)
{
    struct ep_device_record record;
    int32_t counts[64];
    ep_status status = world_wait(w->rank, error);

    if (status == EP_OK)
        status = check_record(w, step, EP_DEVICE_DISPATCH, &record, error);
    if (status == EP_OK)
        status = check_counts(w, step, counts, error);
    if (status == EP_OK && step->number % LOOK_EVERY == 0)
        status = check_rows(w, step, &record, counts, error);
    return status;
}

static ep_status check_combine(struct worker *w, const struct step *step, struct ep_error *error)
{
    const uint32_t tokens = tokens_of(w->soak, step, w->rank->rank);
    struct ep_device_record record;
    uint16_t expected[HIDDEN];
    ep_status status = world_wait(w->rank, error);

    if (status == EP_OK)
        status = check_record(w, step, EP_DEVICE_COMBINE, &record, error);
    if (status == EP_OK)
        status =
            world_get(w->rank, place_of(w, step)->result.offset, w->result, tokens * sizeof expected, error);
    for (uint32_t t = 0; status == EP_OK && t < tokens; t++) {
        fill_row(row_seed(w->soak, step, w->rank->rank, t), factor_of(w->soak, step, w->rank->rank, t),
                 expected);
        if (memcmp(expected, w->result + (size_t)t * HIDDEN, sizeof expected) != 0)
            return ep_error_set(error, EP_VERIFY_FAILED, "the result of token %u is wrong", t);
    }
    return status;
}

/* ---- one after the other ------------------------------------------------------------- */

static ep_status combine_and_check(struct worker *w, const struct step *step, struct ep_error *error)
{
    ep_status status = combine(w, step, error);

    return status == EP_OK ? check_combine(w, step, error) : status;
}

static ep_status run_step(struct worker *w, const struct step *step, const struct step *before,
                          struct ep_error *error)
{
    ep_status status = dispatch(w, step, error);

    if (status == EP_OK && before->delayed)
        status = combine_and_check(w, before, error);
    if (status == EP_OK && step->prompt)
        status = combine(w, step, error);
    if (status == EP_OK)
        status = check_dispatch(w, step, error);
    if (status == EP_OK && step->prompt)
        status = check_combine(w, step, error);
    else if (status == EP_OK && !step->skipped && !step->delayed)
        status = combine_and_check(w, step, error);
    return status;
}

static ep_status run_steps(struct worker *w, struct ep_error *error)
{
    struct step before = { 0 };
    ep_status status = EP_OK;

    for (uint64_t i = w->soak->first; status == EP_OK && i < w->soak->end; i++) {
        const struct step step = step_of(w->soak, i);

        status = run_step(w, &step, &before, error);
        if (status != EP_OK)
            ep_error_prefix(error, "op %llu (%s%s%s%s%s, of period %u, before it %s)", (unsigned long long)i,
                            step.mode == EP_MODE_HT ? "HT " : "",
                            bench_layout_name(step.layout), step.cached ? ", cached" : "",
                            step.halves ? ", halves" : "", step.prompt ? ", prompt" : "", step.period,
                            before.delayed ? "a delayed one" : "none");
        before = step;
    }
    return status;
}

static ep_status run_chapter(struct world_rank *rank, void *arg, struct ep_error *error)
{
    const struct soak *soak = arg;
    const size_t slots = (size_t)MOST_TOKENS * soak->world->ranks;
    struct worker w = { .soak = soak,
                        .rank = rank,
                        .inputs = calloc(1, soak->place[0].inputs_bytes),
                        .rows = malloc(slots * HIDDEN * sizeof(uint16_t)),
                        .result = malloc((size_t)MOST_TOKENS * HIDDEN * sizeof(uint16_t)),
                        .sources = malloc(slots * sizeof(struct ep_source)) };
    ep_status status = w.inputs && w.rows && w.result && w.sources
                           ? run_steps(&w, error)
                           : ep_error_set(error, EP_NO_MEMORY, "no memory for a soak");

    free(w.inputs);
    free(w.rows);
    free(w.result);
    free(w.sources);
    return status;
}

/* ---- membership ---------------------------------------------------------------------- */

/* Half of the chapters have everybody; in the others each rank but one at random may be away. */
static uint64_t members_of(const struct soak *soak, uint64_t chapter)
{
    const uint32_t ranks = soak->world->ranks;
    const uint64_t all = world_all(soak->world);
    const uint64_t d = draw(soak, chapter, DRAW_MEMBERS, 0, 0);
    uint64_t members = all;

    if (d % 2 == 0)
        return all;
    for (uint32_t r = 0; r < ranks; r++)
        if (r != (d >> 8) % ranks && draw(soak, chapter, DRAW_MEMBERS, 1, r) % 3 == 0)
            members &= ~world_bit(r);
    return members;
}

static ep_status change_members(struct soak *soak, uint64_t members, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t r = 0; status == EP_OK && r < soak->world->ranks; r++) {
        const bool was = soak->members >> r & 1, is = members >> r & 1;

        if (was && !is)
            status = world_leave(soak->world, r, error);
        else if (!was && is)
            status = world_join(soak->world, r, error);
    }
    soak->members = members;
    return status;
}

/* ---- the whole ----------------------------------------------------------------------- */

static uint64_t take(uint64_t *end, uint64_t bytes)
{
    const uint64_t at = *end;

    *end += (bytes + 255) / 256 * 256;
    return at;
}

static struct ep_span take_span(uint64_t *end, uint64_t bytes)
{
    return (struct ep_span){ take(end, bytes), bytes };
}

/* From `out` to `result` in a row: what is poisoned. */
static uint64_t lay_place(const struct ep_limits *l, uint64_t start, struct place *p)
{
    const uint64_t row = HIDDEN * sizeof(uint16_t), slots = (uint64_t)MOST_TOKENS * l->ranks;
    const uint64_t rows = slots * l->local_experts;
    uint64_t end = start;

    p->x = take(&end, MOST_TOKENS * row);
    p->topk = take(&end, MOST_TOKENS * TOP_K * sizeof(int32_t));
    p->weights = take(&end, MOST_TOKENS * TOP_K * sizeof(float));
    p->inputs_bytes = end - start;
    p->out = take_span(&end, rows * row);
    p->counts = take_span(&end, 64 * sizeof(int32_t));
    p->offsets = take_span(&end, 65 * sizeof(int32_t));
    p->sources = take_span(&end, rows * sizeof(struct ep_source));
    p->result = take_span(&end, MOST_TOKENS * row);
    return end;
}

static ep_status open_soak(const struct ll_setting *setting, bool ht, struct soak *soak, struct ep_error *error)
{
    struct world_options options = { .gpus = setting->gpus, .served = setting->served, .pcie = setting->pcie,
                                     .timeout_ms = setting->timeout_ms };
    struct ep_limits *l = &options.limits;
    ep_status status;

    *l = (struct ep_limits){ .ranks = setting->ranks,
                             .experts = 5 * setting->ranks + 3,
                             .top_k = TOP_K,
                             .hidden = HIDDEN,
                             .modes = 1u << EP_MODE_LL | (ht ? 1u << EP_MODE_HT : 0u),
                             .dtypes = 1u << EP_BF16,
                             .ll_max_tokens = MOST_TOKENS,
                             .ht_max_tokens = ht ? MOST_TOKENS : 0,
                             .ll_banks = 2 };
    status = ep_placement_contiguous(l->ranks, l->experts, &options.placement, error);
    if (status != EP_OK)
        return status;
    l->local_experts = options.placement.max_local;
    l->arena_bytes = PLACES * lay_place(l, 0, &soak->place[0]);
    status = world_open(setting->api, &options, &soak->world, error);
    if (status != EP_OK)
        return status;
    soak->members = world_all(soak->world);
    for (uint64_t p = 0, at = soak->world->map.arena; p < PLACES; p++)
        at = lay_place(&soak->world->map.limits, at, &soak->place[p]);
    return EP_OK;
}

ep_status ll_soak(const struct ll_setting *setting, uint64_t pairs, bool ht, struct ep_error *error)
{
    struct soak soak = { .seed = setting->seed, .kinds = ht ? ALL_KINDS : LL_KINDS };
    const uint64_t start = ep_clock_ns();
    uint64_t chapters = 0, partial = 0;
    ep_status status = open_soak(setting, ht, &soak, error);

    while (status == EP_OK && soak.end < pairs) {
        soak.first = soak.end;
        soak.end = soak.first + CHAPTER < pairs ? soak.first + CHAPTER : pairs;
        status = change_members(&soak, members_of(&soak, chapters), error);
        if (status == EP_OK)
            status = world_each(soak.world, soak.members, run_chapter, &soak, error);
        partial += soak.members != world_all(soak.world);
        chapters++;
    }
    printf("     %llu ops a rank, %llu chapters, %llu of them with ranks absent, %.1f s\n",
           (unsigned long long)soak.end, (unsigned long long)chapters, (unsigned long long)partial,
           (double)(ep_clock_ns() - start) / 1e9);
    world_close(soak.world);
    return status;
}
