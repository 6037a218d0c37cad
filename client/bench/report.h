/* report: the result, and nothing else, on stdout. */
#ifndef REPORT_H
#define REPORT_H

#include "figures.h"
#include "sweep.h"

/* figures NULL: not asked for. */
ep_status report(const struct sweep *sweep, const struct figures *figures, struct ep_error *error);

/* The numbers' meanings, for --help and below the table. */
extern const char report_definitions[];

ep_status report_table(const struct sweep *sweep, const struct figures *figures, struct ep_error *error);
ep_status report_json(const struct sweep *sweep, const struct figures *figures, struct ep_error *error);

#endif
