/* What all parts of a worker say: that they get on, and what failed. */
#include "worker_private.h"

void worker_get_on(struct worker *worker)
{
    __atomic_fetch_add(&worker->result->progress, 1, __ATOMIC_RELAXED);
}

ep_status worker_failure(struct ep_error *error, ep_status status, const char *what)
{
    return ep_error_set(error, status, "%s: %s: %s", what, ep_status_name(status), ep_error_message());
}
