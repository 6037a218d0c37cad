/*
 * run: a sweep with everything around it: the group is made or looked up, the routing is checked and
 * recorded, and what was made is removed again.
 */
#ifndef RUN_H
#define RUN_H

#include "sweep.h"

/* sweep->config is filled in: sizes of an existing group, defaults, the group's name. */
ep_status run_sweep(struct sweep *sweep, struct ep_error *error);

#endif
