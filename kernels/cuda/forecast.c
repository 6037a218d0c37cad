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

static bool repeats_after(const struct ep_forecast_log *log, uint32_t period)
{
    const uint64_t oldest = oldest_of(log);

    if (log->ended < oldest + 2ull * period - 1)
        return false;
    for (uint64_t n = oldest + period; n <= log->ended; n++)
        if (memcmp(op_of(log, n), op_of(log, n - period), sizeof(struct ep_forecast_op)) != 0)
            return false;
    return true;
}

uint32_t ep_forecast_period(const struct ep_forecast_log *log)
{
    for (uint32_t period = 1; period <= EP_FORECAST_PERIOD; period++)
        if (repeats_after(log, period))
            return period;
    return 0;
}

const struct ep_forecast_op *ep_forecast_of(const struct ep_forecast_log *log, uint32_t period, uint64_t entry)
{
    if (period == 0)
        return NULL;
    return op_of(log, log->ended - (period - 1 - (entry - log->entry - 1) % period));
}
