/* Nodes that are lost: from a net's thread to the loop's. */
#include <stdlib.h>

#include "team_private.h"

struct lost_node {
    const char *why; /* atomic; a literal, NULL: it is not lost */
    bool told;       /* loop's thread */
};

/* Freed on the loop's thread, which alone can close the handle. */
struct lost_nodes {
    uv_async_t async;
    struct ep_team_span span; /* nodes, on_lost, user */
    uint32_t closing;         /* atomic: the team is gone */
    struct lost_node node[];
};

static void on_closed(uv_handle_t *handle)
{
    free(handle->data);
}

static void tell_lost(uv_async_t *async)
{
    struct lost_nodes *lost = async->data;

    for (uint32_t n = 0; n < lost->span.nodes; n++) {
        const char *why = __atomic_load_n(&lost->node[n].why, __ATOMIC_ACQUIRE); /* partner: lost_nodes_tell */

        if (__atomic_load_n(&lost->closing, __ATOMIC_ACQUIRE)) { /* partner: lost_nodes_close */
            uv_close((uv_handle_t *)async, on_closed);
            return;
        }
        if (!why || lost->node[n].told)
            continue;
        lost->node[n].told = true;
        if (lost->span.on_lost)
            lost->span.on_lost(n, why, lost->span.user);
    }
}

void lost_nodes_tell(uint32_t node, const char *why, void *user)
{
    struct lost_nodes *lost = user;

    __atomic_store_n(&lost->node[node].why, why, __ATOMIC_RELEASE); /* partner: tell_lost */
    uv_async_send(&lost->async);
}

ep_status lost_nodes_open(uv_loop_t *loop, const struct ep_team_span *span, struct lost_nodes **out,
                          struct ep_error *error)
{
    struct lost_nodes *lost = calloc(1, sizeof *lost + span->nodes * sizeof *lost->node);
    int rc;

    if (!lost)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a team of %u nodes", span->nodes);
    lost->span = *span;
    rc = uv_async_init(loop, &lost->async, tell_lost);
    if (rc) {
        free(lost);
        return ep_error_set(error, EP_INTERNAL, "uv_async_init: %s", uv_strerror(rc));
    }
    lost->async.data = lost;
    *out = lost;
    return EP_OK;
}

void lost_nodes_close(struct lost_nodes *lost)
{
    __atomic_store_n(&lost->closing, 1, __ATOMIC_RELEASE); /* partner: tell_lost */
    uv_async_send(&lost->async);
}
