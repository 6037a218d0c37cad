/*
 * forecast: which op a worker rings for next, from those before.
 *
 * A kernel is launched before its op is known.  But decoding rings for the same few ops over and over, in the same
 * order, above all when it replays a graph.  Who finds that the last ops repeat themselves expects them to go on so.
 *
 * What is launched is an entry, counted from 1.  An entry whose op does not come leaves the one that does to the next
 * entry, so there may be more entries than ops.
 */
#ifndef EP_FORECAST_H
#define EP_FORECAST_H

#include "window.h"

#define EP_FORECAST_OPS 64u    /* that are remembered */
#define EP_FORECAST_PERIOD 24u /* ops after which they repeat themselves, at most */

struct ep_forecast_op {
    struct ep_op op;
    uint32_t place; /* of the mailbox's ops */
    uint32_t reserved[3];
};

/* As the kernels leave it, and as it is copied while they go on: then the oldest op may be a newer one already. */
struct ep_forecast_log {
    uint64_t ended; /* ops that are over; op n, counted from 1, is in [(n - 1) % EP_FORECAST_OPS] */
    uint64_t entry; /* that executed the last of them */
    struct ep_forecast_op op[EP_FORECAST_OPS];
};

/* After how many ops the last ones repeat themselves, twice at least; 0: they do not. */
uint32_t ep_forecast_period(const struct ep_forecast_log *log);

/* The op that an entry behind log->entry is expected to find, if they repeat themselves after `period` and each entry
 * before it finds one; NULL when `period` is 0. */
const struct ep_forecast_op *ep_forecast_of(const struct ep_forecast_log *log, uint32_t period, uint64_t entry);

#endif
