/* What ops say of how they ended. */
#include "host_private.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

ep_status ep_host_fail(struct ep_host_call *call, ep_status status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(call->result->text, sizeof call->result->text, format, args);
    va_end(args);
    call->result->status = (int32_t)status;
    return status;
}

ep_status ep_host_late(struct ep_host_call *call, uint32_t late_rank, enum ep_wait_phase phase)
{
    struct ep_op_result *result = call->result;

    result->status = (int32_t)EP_TIMEOUT;
    result->late_rank = late_rank;
    result->wait_phase = phase;
    ep_op_late_text(result->text, sizeof result->text, late_rank, call->op->mode, result->number,
                    __atomic_load_n(&call->team->timeout_ms, __ATOMIC_RELAXED), phase);
    return EP_TIMEOUT;
}

ep_status ep_host_detached(struct ep_host_call *call)
{
    return ep_host_fail(call, EP_DETACHED, "rank %u has left the group", call->rank);
}

void ep_host_set_arrived(struct ep_host_call *call, const uint64_t *arrived)
{
    uint32_t n = 0;

    memcpy(call->result->arrived, arrived, sizeof call->result->arrived);
    for (uint32_t w = 0; w < EP_MASK_WORDS; w++)
        n += (uint32_t)__builtin_popcountll(arrived[w]);
    call->result->absent = call->team->map.limits.ranks - n;
}
