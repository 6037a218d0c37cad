/* ep_loads: loads of experts, for a placement by load. */
#ifndef EP_LOADS_H
#define EP_LOADS_H

#include <jansson.h>

#include "admin.h"

/*
 * If the spec's placement is by load and has no loads: those of --loads FILE, else what the group's servers have
 * counted.  --loads and --redundant without such a placement are an error.
 */
ep_status ep_loads_apply(struct ep_admin *admin, const struct ep_invocation *invocation, const char *name, json_t *spec,
                         struct ep_error *error);

/* The sums over all ranks, [*n] for free(); NULL: none were counted. */
uint64_t *ep_loads_sum(const Ep__V1__Stats *stats, size_t *n);

/* Of a file's text: JSON or YAML, a list of counts or of {expert, count}; or lines of "expert,count". */
ep_status ep_loads_parse(const char *text, size_t size, const char *file, json_t **out, struct ep_error *error);

#endif
