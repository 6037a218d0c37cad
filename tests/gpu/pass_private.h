/* What the files of a pass share. */
#ifndef PASS_PRIVATE_H
#define PASS_PRIVATE_H

#include "pass.h"

/* The homes of a redundant placement; homes[3 * experts].  Returns how many. */
uint32_t shape_homes(const struct shape *shape, uint32_t ranks, struct ep_ref_home *homes);

/* Buffers of a pass that begin at `start`; returns where they end. */
uint64_t shape_buffers(const struct ep_limits *limits, const struct shape *shape, uint64_t start,
                       struct pass_buffers *buffers);

/* Tokens of a rank, at most, in the shape's mode. */
uint32_t shape_most_tokens(const struct ep_limits *limits, const struct shape *shape);

void pass_forget_plan(struct pass *pass);

#endif
