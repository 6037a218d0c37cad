/* NCCL's log: what NCCL_DEBUG=WARN and NCCL_DEBUG=INFO show. */
#include "gin.h"

#include <stdarg.h>
#include <stdio.h>

enum { LINE = 512 };

/* NCCL's own function, the same for all communicators of a process; atomic. */
static nccl_logger logger;

void ep_gin_report_to(nccl_logger to)
{
    __atomic_store_n(&logger, to, __ATOMIC_RELEASE); /* partner: report */
}

static void report(nccl_log_level level, const char *format, va_list args)
{
    const nccl_logger log = __atomic_load_n(&logger, __ATOMIC_ACQUIRE); /* partner: ep_gin_report_to */
    char line[LINE];

    if (!log)
        return;
    vsnprintf(line, sizeof line, format, args);
    log(level, NCCL_LOG_INIT | NCCL_LOG_NET, "kernels/gin", 0, EP_GIN_NAME ": %s", line);
}

void ep_gin_warn(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    report(NCCL_LOG_WARN, format, args);
    va_end(args);
}

void ep_gin_info(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    report(NCCL_LOG_INFO, format, args);
    va_end(args);
}

static nccl_result result_of(ep_status status)
{
    switch (status) {
    case EP_OK: return NCCL_SUCCESS;
    case EP_INVALID_ARGUMENT: return NCCL_INVALID_ARGUMENT;
    case EP_FAILED_PRECONDITION:
    case EP_UNIMPLEMENTED: return NCCL_INVALID_USAGE;
    case EP_DEADLINE_EXCEEDED: return NCCL_REMOTE_ERROR;
    case EP_INTERNAL: return NCCL_INTERNAL_ERROR;
    default: return NCCL_SYSTEM_ERROR;
    }
}

nccl_result ep_gin_failed(const char *call, const struct ep_error *error)
{
    ep_gin_warn("%s: %s", call, error->text);
    return result_of(error->status);
}
