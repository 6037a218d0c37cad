#include "soak_plan.h"

#include <stdio.h>

#include "bench_hash.h"

enum { MOST_NAP_US = 10000 };

/* What is drawn for a step. */
enum { DRAW_MODE, DRAW_FORMAT, DRAW_CACHED, DRAW_SKIPPED, DRAW_HALVES, DRAW_DELAY, DRAW_DROP, DRAW_PLACE };

uint64_t soak_seed(const struct bench_config *config, uint64_t number)
{
    return bench_hash(config->seed, STREAM_SOAK, (uint32_t)number, (uint32_t)(number >> 32), 0) | 1;
}

static uint32_t draw(const struct bench_config *config, uint64_t number, uint32_t what, uint32_t n)
{
    return bench_below(bench_hash(soak_seed(config, number), STREAM_SOAK_STEP, what, 0, 0), n);
}

/* ---- which case ------------------------------------------------------------------- */

static bool same_mode(const struct bench_case *a, const struct bench_case *b)
{
    return a->mode == b->mode;
}

/* What must be the same at all ranks. */
static bool same_format(const struct bench_case *a, const struct bench_case *b)
{
    return a->mode == b->mode && a->dtype == b->dtype && a->scales == b->scales;
}

/* A random one of the cases that are like `of`. */
static const struct bench_case *pick(const struct bench_config *config, const struct bench_case *of,
                                     bool (*like)(const struct bench_case *, const struct bench_case *),
                                     uint64_t hash)
{
    uint32_t n = 0, chosen;

    for (uint32_t i = 0; i < config->n_cases; i++)
        n += like(&config->cases[i], of);
    chosen = bench_below(hash, n);
    for (uint32_t i = 0;; i++)
        if (like(&config->cases[i], of) && chosen-- == 0)
            return &config->cases[i];
}

static uint32_t most_tokens(const struct bench_config *config, ep_mode mode)
{
    uint32_t most = 0;

    for (uint32_t i = 0; i < config->n_cases; i++)
        if (config->cases[i].mode == mode && config->cases[i].tokens > most)
            most = config->cases[i].tokens;
    return most;
}

/* One of eight has none. */
static uint32_t tokens_of(const struct bench_config *config, const struct soak_step *step, ep_mode mode,
                          uint32_t rank)
{
    uint64_t hash = bench_hash(soak_seed(config, step->routes), STREAM_SOAK_TOKENS, rank, 0, 0);

    if (hash % 8 == 0 || (int32_t)rank == config->zero_rank)
        return 0;
    return bench_below(hash, most_tokens(config, mode) + 1);
}

static const struct bench_case *format_of(const struct bench_config *config, const struct soak_step *step)
{
    const struct bench_case *of = &config->cases[draw(config, step->routes, DRAW_MODE, config->n_cases)];

    return pick(config, of, same_mode,
                bench_hash(soak_seed(config, step->number), STREAM_SOAK_STEP, DRAW_FORMAT, 0, 0));
}

void soak_case_of(const struct bench_config *config, const struct soak_step *step, uint32_t rank,
                  struct bench_case *of)
{
    uint64_t hash = bench_hash(soak_seed(config, step->number), STREAM_SOAK_LAYOUT, rank, 0, 0);

    *of = *pick(config, format_of(config, step), same_format, hash);
    of->tokens = tokens_of(config, step, of->mode, rank);
}

double soak_drop(const struct bench_config *config, uint64_t number)
{
    static const double shares[] = { 0, 0, 0.1, 0.6 };

    return config->drop > 0 ? config->drop : shares[draw(config, number, DRAW_DROP, 4)];
}

/* One of eight does. */
uint32_t soak_nap_us(const struct bench_config *config, uint64_t number, uint32_t rank)
{
    uint64_t hash = bench_hash(soak_seed(config, number), STREAM_SOAK_NAP, rank, 0, 0);

    return hash % 8 == 0 ? bench_below(hash, MOST_NAP_US) : 0;
}

/* ---- how it goes ------------------------------------------------------------------ */

static bool wants_cached(const struct bench_config *config, uint64_t number)
{
    return number % SOAK_CHAPTER != 0 && draw(config, number, DRAW_CACHED, 6) == 0;
}

/* At most SOAK_LANES - 1 steps in all: then the lane is another's. */
static void delay(const struct bench_config *config, struct soak_step *step)
{
    uint32_t drawn = draw(config, step->number, DRAW_DELAY, 8);

    step->combine_after = drawn < 4 ? 0 : drawn % 3;
    step->result_after = step->combine_after + drawn % 2;
}

/* The step before is over when this one begins. */
static bool leaves_its_routing(const struct bench_config *config, uint64_t number)
{
    struct soak_step step = { .number = number };

    delay(config, &step);
    return step.result_after == 0;
}

static bool is_cached(const struct bench_config *config, uint64_t number)
{
    return wants_cached(config, number) && !wants_cached(config, number - 1) &&
           leaves_its_routing(config, number - 1);
}

void soak_step_of(const struct bench_config *config, uint64_t number, struct soak_step *step)
{
    *step = (struct soak_step){ .number = number,
                                .cached = is_cached(config, number),
                                .in_place = draw(config, number, DRAW_PLACE, 2) == 0,
                                .skipped = draw(config, number, DRAW_SKIPPED, 4) == 0 };
    step->routes = step->cached ? number - 1 : number;
    step->lane = (uint32_t)(step->routes % SOAK_LANES);
    step->halves = format_of(config, step)->mode == EP_MODE_LL && draw(config, number, DRAW_HALVES, 3) == 0;
    delay(config, step);
    if (step->cached && step->result_after == SOAK_LANES - 1) /* it came to its lane a step later */
        step->result_after--;
}

void soak_step_text(const struct bench_config *config, const struct soak_step *step, uint32_t rank, char *text,
                    size_t size)
{
    struct bench_case of;
    char name[80];

    soak_case_of(config, step, rank, &of);
    bench_case_text(&of, name, sizeof name);
    snprintf(text, size, "op %llu of rank %u (%s%s%s%s; again: --seed=%llu --soak-ops=%llu and the same sizes)",
             (unsigned long long)step->number, rank, name, step->cached ? ", cached" : "",
             step->halves ? ", in halves" : "", step->combine_after ? ", combined later" : "",
             (unsigned long long)config->seed,
             (unsigned long long)(step->number - step->number % SOAK_CHAPTER + SOAK_CHAPTER));
}
