/*
 * figures: --reference.  What this machine gives, beside the bounds that the project set itself.
 */
#ifndef FIGURES_H
#define FIGURES_H

#include "sweep.h"

struct figure {
    const char *name, *unit;
    double value;
    double bound;  /* 0: none */
    bool at_least; /* the bound is a lower one */
    const char *meaning;
};

enum { MAX_FIGURES = 12 };

struct figures {
    uint32_t n;
    struct figure figure[MAX_FIGURES];
};

bool figure_holds(const struct figure *figure);

/* config gives server, seed, iterations and time-outs.  Runs a group of its own with 2 ranks. */
ep_status figures_run(const struct bench_config *config, struct figures *figures, struct ep_error *error);

#endif
