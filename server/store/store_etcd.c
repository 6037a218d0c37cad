/*
 * The etcd store: what store.c asks for, on etcd.
 *
 * Threads: the store's own for records, one for each watch, one for each session.  They share the endpoints and the
 * user's token (etcd_client.c).
 */
#include "etcd_client.h"

#define PROBE_MS    3000
#define FAREWELL_MS 1000 /* a marker that is not taken away ends by itself */

static ep_status list(void *self, const char *prefix, uint64_t deadline, struct ep_record_list *out,
                      struct ep_error *error)
{
    return etcd_list(self, prefix, deadline, NULL, out, NULL, error);
}

static ep_status commit(void *self, const struct ep_store_write *writes, size_t n, uint64_t deadline,
                        uint64_t *revision, struct ep_error *error)
{
    struct etcd *etcd = self;
    ep_status status = etcd_commit(etcd, writes, n, deadline, revision, error);

    etcd->refuses = status && status != EP_FAILED_PRECONDITION && status != EP_INVALID_ARGUMENT;
    return status;
}

static void watch(void *self, struct ep_watch *watch)
{
    etcd_begin_watch(self, watch);
}

static void unwatch(void *self, struct ep_watch *watch)
{
    (void)self;
    etcd_end_watch(watch);
}

static ep_status begin_session(void *self, struct ep_session *session, uint64_t deadline,
                               struct ep_error *error)
{
    return etcd_begin_session(self, session, deadline, error);
}

static void end_session(void *self, struct ep_session *session, uint64_t deadline)
{
    etcd_end_session(self, session, deadline);
}

/* A full etcd is read as ever: after a write that failed, only a write shows that they are taken again. */
static ep_status probe(void *self, uint64_t deadline, struct ep_error *error)
{
    struct etcd *etcd = self;
    uint64_t revision;

    if (etcd->refuses)
        return commit(self, NULL, 0, deadline, &revision, error);
    return etcd_ask_revision(etcd, deadline, NULL, NULL, error);
}

static void close_store(void *self)
{
    struct etcd *etcd = self;

    if (etcd->marker.born && !atomic_load(&etcd->away))
        (void)etcd_revoke(etcd, etcd->marker.lease, ep_clock_ns() + FAREWELL_MS * EP_NS_PER_MS, NULL);
    etcd_close(etcd);
}

ep_status ep_store_open_etcd(uv_loop_t *loop, const struct ep_store_etcd *options, struct ep_store **out,
                             struct ep_error *error)
{
    static const struct store_backend backend = {
        .shared = true,
        .list = list,
        .commit = commit,
        .watch = watch,
        .unwatch = unwatch,
        .begin_session = begin_session,
        .end_session = end_session,
        .probe = probe,
        .probe_ms = PROBE_MS,
        .close = close_store,
    };
    struct etcd *etcd;
    ep_status status = etcd_open(options, &etcd, error);

    return status ? status : store_open(loop, &backend, etcd, options->answer_within_ms, out, error);
}
