/* Between the files of this folder. */
#ifndef EP_METRICS_PRIVATE_H
#define EP_METRICS_PRIVATE_H

#include "ep_metrics.h"

/* A listening, non-blocking socket on "HOST:PORT"; *port gets the bound port. */
ep_status ep_metrics_listen(const char *address, int *socket, int *port, struct ep_error *error);

#endif
