#include "forecast.h"

#include <stdbool.h>
#include <string.h>

/* The kernels may be further than `ended` says, by one op and what is written of the next. */
#define IN_DOUBT 2u

static const struct ep_forecast_op *op_of(const struct ep_forecast_log *log, uint64_t number)
{
    return &log->op[(number - 1) % EP_FORECAST_OPS];
}

static uint64_t oldest_of(const struct ep_forecast_log *log)
{
    const uint64_t kept = EP_FORECAST_OPS - IN_DOUBT;

    return log->ended > kept ? log->ended - kept + 1 : 1;
}

static bool same(const struct ep_forecast_op *a, const struct ep_forecast_op *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* Can whoever expects the one execute the other?  A kernel for HT cannot. */
static bool fits(const struct ep_forecast_op *a, const struct ep_forecast_op *b)
{
    return same(a, b) || (a->op.mode != EP_MODE_HT && ep_forecast_alike(&a->op, &b->op));
}

static bool fits_after(const struct ep_forecast_log *log, uint32_t period)
{
    const uint64_t oldest = oldest_of(log);

    if (log->ended < oldest + 2ull * period - 1)
        return false;
    for (uint64_t n = oldest + period; n <= log->ended; n++)
        if (!fits(op_of(log, n), op_of(log, n - period)))
            return false;
    return true;
}

/* How many of the last ops are the very ones of a period before. */
static uint64_t repeated(const struct ep_forecast_log *log, uint32_t period)
{
    const uint64_t first = oldest_of(log) + period;
    uint64_t n = log->ended;

    while (n >= first && same(op_of(log, n), op_of(log, n - period)))
        n--;
    return log->ended - n;
}

uint32_t ep_forecast_period(const struct ep_forecast_log *log)
{
    uint64_t longest = 0;
    uint32_t best = 0;

    for (uint32_t period = 1; period <= EP_FORECAST_PERIOD; period++) {
        uint64_t length;

        if (!fits_after(log, period))
            continue;
        length = repeated(log, period);
        if (best == 0 || length > longest) {
            best = period;
            longest = length;
        }
    }
    return best;
}

const struct ep_forecast_op *ep_forecast_of(const struct ep_forecast_log *log, uint32_t period, uint64_t entry)
{
    if (period == 0)
        return NULL;
    return op_of(log, log->ended - (period - 1 - (entry - log->entry - 1) % period));
}
