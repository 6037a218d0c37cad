/*
 * forecast: which op a worker rings for next, from those before.
 *
 * A kernel is launched before its op is known.  But decoding rings for the same few ops over and over, in the same
 * order, above all when it replays a graph.  Who finds that the last ops repeat themselves expects them to go on so.
 *
 * Each step has another batch, though, or its ops have other memory or handles.  So it is enough that ops of LL are alike, of
 * the same form: a kernel can execute all ops of a form, the very op that it was told of only sooner.  The last ops say best
 * which one that will be.
 *
 * What is launched is an entry, counted from 1.  An entry whose op does not come leaves the one that does to the next
 * entry, so there may be more entries than ops.
 */
#ifndef EP_FORECAST_H
#define EP_FORECAST_H

#include <stdbool.h>

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

/* Are they of the same form? */
EP_HD static inline bool ep_forecast_alike(const struct ep_op *a, const struct ep_op *b)
{
    return a->mode == b->mode && a->kind == b->kind && a->input_dtype == b->input_dtype
           && a->wire_dtype == b->wire_dtype;
}

/* After how many ops the last ones repeat themselves, twice at least; 0: they do not.  The very ops, or of LL ops the forms:
 * then with the period after which the very ops have come again for longest. */
uint32_t ep_forecast_period(const struct ep_forecast_log *log);

/* The op that an entry behind log->entry is expected to find, or one like it, if they repeat themselves after `period` and each
 * entry before it finds one; NULL when `period` is 0. */
const struct ep_forecast_op *ep_forecast_of(const struct ep_forecast_log *log, uint32_t period, uint64_t entry);

#endif
