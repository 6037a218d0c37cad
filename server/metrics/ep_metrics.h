/*
 * ep_metrics: /metrics (Prometheus text), /healthz and /readyz over HTTP, on the loop's thread.
 */
#ifndef EP_METRICS_H
#define EP_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include <uv.h>

#include "ep_error.h"

struct ep_metrics;

struct ep_metrics_source {
    /* Everything on /metrics; write text format 0.0.4 with the helpers below. */
    void (*render)(FILE *out, void *user);
    /* /readyz: false gives 503 and *why. */
    bool (*ready)(const char **why, void *user);
    void *user;
};

/* address: "HOST:PORT"; *port gets the bound port. */
ep_status ep_metrics_open(uv_loop_t *loop, const char *address, const struct ep_metrics_source *source,
                          struct ep_metrics **out, int *port, struct ep_error *error);
void ep_metrics_close(struct ep_metrics *metrics);

/* Text format: one # HELP / # TYPE pair per family, label values escaped. */
struct ep_metrics_label { const char *name, *value; };
void ep_metrics_family(FILE *out, const char *name, const char *type, const char *help);
void ep_metrics_sample(FILE *out, const char *name, const struct ep_metrics_label *labels, size_t n,
                       double value);

#endif
