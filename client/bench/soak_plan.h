/*
 * soak_plan: what every op of a soak is like, by seed and number alone.
 *
 * A step is a dispatch and, mostly, its combine; modes, layouts and formats are those of the cases that a sweep with
 * the same flags would have.  All ranks take the same steps in the same order; tokens and layouts are each rank's own.
 * A step has a lane (a handle and memory) for itself from its dispatch until its result was looked at: that may be
 * some steps later, so ops of several handles are under way.
 *
 * Steps come in chapters that need nothing of each other: whoever joins begins with one.
 */
#ifndef SOAK_PLAN_H
#define SOAK_PLAN_H

#include "bench.h"

enum {
    SOAK_CHAPTER = 32,
    SOAK_LANES = 4
};

struct soak_step {
    uint64_t number;
    uint64_t routes; /* the step whose routing it has: its own, or (cached) the one before, which is over by then */
    bool cached, halves, in_place;
    bool skipped;           /* its combine */
    uint32_t lane;
    uint32_t combine_after; /* that many steps later, after their dispatches */
    uint32_t result_after;  /* so is the result looked at; not before the combine */
};

void soak_step_of(const struct bench_config *config, uint64_t number, struct soak_step *step);

/* The step at one rank. */
void soak_case_of(const struct bench_config *config, const struct soak_step *step, uint32_t rank,
                  struct bench_case *of);

/* How long this rank dawdles before it looks at what came, us: the others may be ahead of it then. */
uint32_t soak_nap_us(const struct bench_config *config, uint64_t number, uint32_t rank);

/* Of everything random in that step. */
uint64_t soak_seed(const struct bench_config *config, uint64_t number);
double soak_drop(const struct bench_config *config, uint64_t number);

/* For people, who may want to run the same ops again: up to the end of its chapter. */
void soak_step_text(const struct bench_config *config, const struct soak_step *step, uint32_t rank, char *text,
                    size_t size);

#endif
