#include "net.h"

#include <stdlib.h>

#include "cuda_private.h"
#include "ht.h"
#include "ll.h"
#include "wire.h"

/* A rank of a group, or one that is served, and its end of the wire. */
struct wired {
    struct ep_cuda_rank *rank;
    struct ep_cuda_serve *serve;
    struct ep_device_state *state;
    struct wire *wire;
};

/* Ranks whose ops the worker launches, see direct_net.h. */
ep_status ep_cuda_net_rank_open(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out,
                                struct ep_error *error);
void ep_cuda_net_rank_close(struct ep_cuda_rank *rank);
ep_status ep_cuda_net_rank_run(struct ep_cuda_rank *rank, const struct ep_op *op, void *stream, struct ep_error *error);

const struct ep_cuda_kernels ep_cuda_net_kernels = {
    .prepare = ep_ll_net_prepare,
    .one = ep_ll_net_one,
    .expect = ep_ll_net_expect,
    .ht_prepare = ep_ht_net_prepare,
    .ht_one = ep_ht_net_one,
    .ht_expect = ep_ht_net_expect,
};

/* ---- the wire --------------------------------------------------------------------------------------- */

/* Nobody else writes where the net is into the state, and who begins anew writes all of that. */
static void connect(const struct wired *w)
{
    __atomic_store_n(&w->state->net, (uint64_t)(uintptr_t)wire_net(w->wire), __ATOMIC_RELAXED);
}

static void close_wired(struct wired *w)
{
    wire_close(w->wire);
    free(w);
}

static ep_status open_wired(const struct ep_cuda_rank_options *o, struct wired **out, struct ep_error *error)
{
    struct wired *w = calloc(1, sizeof *w);

    if (!w)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a rank");
    w->state = o->state;
    if (wire_open((uint8_t *const *)(void *const *)o->windows, o->rank, o->map, &w->wire, error) != EP_OK) {
        free(w);
        return error->status;
    }
    connect(w);
    *out = w;
    return EP_OK;
}

/* ---- executor direct ---------------------------------------------------------------------------------- */

static ep_status rank_open(const struct ep_cuda_rank_options *options, struct ep_cuda_rank **out, struct ep_error *error)
{
    struct ep_cuda_rank_options wired = *options;
    struct wired *w = NULL;

    wired.net = true;
    if (open_wired(options, &w, error) != EP_OK)
        return error->status;
    if (ep_cuda_net_rank_open(&wired, &w->rank, error) != EP_OK) {
        close_wired(w);
        return error->status;
    }
    *out = (struct ep_cuda_rank *)(void *)w;
    return EP_OK;
}

static void rank_close(struct ep_cuda_rank *rank)
{
    struct wired *w = (struct wired *)(void *)rank;

    if (!w)
        return;
    ep_cuda_net_rank_close(w->rank);
    close_wired(w);
}

static ep_status rank_run(struct ep_cuda_rank *rank, const struct ep_op *op, void *stream, struct ep_error *error)
{
    struct wired *w = (struct wired *)(void *)rank;

    connect(w);
    return ep_cuda_net_rank_run(w->rank, op, stream, error);
}

/* ---- executor server ------------------------------------------------------------------------------------ */

static ep_status serve_open(const struct ep_cuda_rank_options *options, struct ep_cuda_serve **out,
                            struct ep_error *error)
{
    struct ep_cuda_rank_options wired = *options;
    struct wired *w = NULL;

    wired.net = true;
    if (open_wired(options, &w, error) != EP_OK)
        return error->status;
    if (ep_cuda_serve_open(&wired, &w->serve, error) != EP_OK) {
        close_wired(w);
        return error->status;
    }
    *out = (struct ep_cuda_serve *)(void *)w;
    return EP_OK;
}

static struct ep_cuda_serve *of(struct ep_cuda_serve *serve)
{
    return ((struct wired *)(void *)serve)->serve;
}

static ep_status serve_post(struct ep_cuda_serve *serve, uint32_t ops, struct ep_error *error)
{
    return ep_cuda_serve_post(of(serve), ops, error);
}

static ep_status serve_wait(struct ep_cuda_serve *serve, struct ep_error *error)
{
    return ep_cuda_serve_wait(of(serve), error);
}

static ep_status serve_region(struct ep_cuda_serve *serve, uint32_t number, const struct ep_region *region,
                              struct ep_error *error)
{
    return ep_cuda_serve_region(of(serve), number, region, error);
}

static ep_status serve_forget(struct ep_cuda_serve *serve, uint32_t number, uint64_t *entry, struct ep_error *error)
{
    return ep_cuda_serve_forget(of(serve), number, entry, error);
}

static ep_status serve_forgotten(struct ep_cuda_serve *serve, uint64_t entry, struct ep_error *error)
{
    return ep_cuda_serve_forgotten(of(serve), entry, error);
}

static ep_status serve_end(struct ep_cuda_serve *serve, uint32_t timeout_ms, struct ep_error *error)
{
    return ep_cuda_serve_end(of(serve), timeout_ms, error);
}

static void serve_close(struct ep_cuda_serve *serve)
{
    if (!serve)
        return;
    ep_cuda_serve_close(of(serve));
    close_wired((struct wired *)(void *)serve);
}

/* ---- the table ------------------------------------------------------------------------------------------- */

void net_offer(struct ep_cuda_api *api)
{
    if (!getenv("EP_CUDA_WIRE_NODES"))
        return;
    api->rank_open = rank_open;
    api->rank_close = rank_close;
    api->rank_run = rank_run;
    api->serve_open = serve_open;
    api->serve_post = serve_post;
    api->serve_wait = serve_wait;
    api->serve_region = serve_region;
    api->serve_forget = serve_forget;
    api->serve_forgotten = serve_forgotten;
    api->serve_end = serve_end;
    api->serve_close = serve_close;
}
