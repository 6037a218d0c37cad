/*
 * Leases, and sessions on them: a thread for each that renews it, at every endpoint in turn, until it is over.
 *
 * A renewal counts from the moment it was sent.  etcd counts from when it got it, which is later: so this side takes
 * a lease for over before etcd gives it away, also after it has not run for a while, or the machine was suspended.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "ep_log.h"
#include "etcd_client.h"

#define PAUSE_MS 100 /* between endpoints */

uint64_t etcd_random(void)
{
    uint64_t value;

    while (getrandom(&value, sizeof value, 0) != sizeof value)
        ;
    return value;
}

/* ---- leases -------------------------------------------------------------------------- */

static int64_t seconds(uint64_t ms)
{
    return ms < 2000 ? 2 : (int64_t)((ms + 999) / 1000);
}

ep_status etcd_grant(struct etcd *etcd, uint64_t ttl_ms, uint64_t deadline, int64_t *lease,
                     uint64_t *granted_ms, struct ep_error *error)
{
    Etcdserverpb__LeaseGrantRequest request = ETCDSERVERPB__LEASE_GRANT_REQUEST__INIT;
    struct etcd_call call = { .service = &etcdserverpb__lease__descriptor,
                              .method = "LeaseGrant",
                              .what = "get a lease",
                              .request = &request.base,
                              .deadline = deadline };
    struct ep_error local = EP_ERROR_INIT;
    Etcdserverpb__LeaseGrantResponse *reply;

    request.ttl = seconds(ttl_ms);
    request.id = (int64_t)(etcd_random() >> 1) | 1; /* greater than 0 */
    *lease = request.id;
    *granted_ms = (uint64_t)request.ttl * 1000;
    if (etcd_call(etcd, &call, (ProtobufCMessage **)&reply, &local)) {
        if (call.tries > 1 && strstr(local.text, "lease already exists"))
            return EP_OK; /* the first try's answer was lost */
        return ep_error_set(error, local.status, "%s", local.text);
    }
    if (reply->ttl > 0)
        *granted_ms = (uint64_t)reply->ttl * 1000;
    etcd_free(reply);
    return EP_OK;
}

ep_status etcd_revoke(struct etcd *etcd, int64_t lease, uint64_t deadline, struct ep_error *error)
{
    Etcdserverpb__LeaseRevokeRequest request = ETCDSERVERPB__LEASE_REVOKE_REQUEST__INIT;
    struct etcd_call call = { .service = &etcdserverpb__lease__descriptor,
                              .method = "LeaseRevoke",
                              .what = "end a lease",
                              .request = &request.base,
                              .deadline = deadline };
    ProtobufCMessage *reply;
    ep_status status;

    request.id = lease;
    status = etcd_call(etcd, &call, &reply, error);
    if (!status)
        etcd_free(reply);
    return status;
}

/* ---- sessions ------------------------------------------------------------------------ */

struct keeper {
    struct etcd_task task;
    struct ep_session *session;
    uint64_t ttl_ms;
    struct ep_error last; /* why renewals fail */
};

/* How long until the lease is over, ms. */
static int64_t left_ms(const struct keeper *k)
{
    uint64_t now = ep_clock_boot_ns(), end = atomic_load(&k->session->valid_until);

    return now < end ? (int64_t)((end - now) / EP_NS_PER_MS) : 0;
}

static bool is_over(const struct keeper *k)
{
    return ep_clock_boot_ns() >= atomic_load(&k->session->valid_until);
}

static ep_status read_renewal(struct keeper *k, uint64_t sent, struct ep_error *error)
{
    Etcdserverpb__LeaseKeepAliveResponse *reply;
    ep_status status = ep_rpc_stream_read(k->task.stream, -1, (ProtobufCMessage **)&reply, error);

    if (status)
        return status;
    if (!reply)
        return ep_error_set(error, EP_UNAVAILABLE, "etcd hung up");
    if (reply->ttl <= 0)
        status = ep_error_set(error, EP_NOT_FOUND, "etcd has ended it");
    else
        atomic_store(&k->session->valid_until, sent + (uint64_t)reply->ttl * EP_NS_PER_S);
    etcd_free(reply);
    return status;
}

/* A stream for one renewal: its deadline is the renewal's. */
static ep_status renew(struct keeper *k, struct ep_error *error)
{
    Etcdserverpb__LeaseKeepAliveRequest request = ETCDSERVERPB__LEASE_KEEP_ALIVE_REQUEST__INIT;
    int64_t share = (int64_t)k->ttl_ms / 3, left = left_ms(k), timeout_ms = share < left ? share : left;
    uint64_t sent = ep_clock_boot_ns();
    ep_status status;

    request.id = k->session->lease;
    status = etcd_task_stream(&k->task, &etcdserverpb__lease__descriptor, "LeaseKeepAlive", &request.base,
                              timeout_ms > 0 ? timeout_ms : 1, error);
    if (!status)
        status = read_renewal(k, sent, error);
    etcd_task_end_stream(&k->task, status && status != EP_NOT_FOUND ? error : NULL);
    return status;
}

static void lose(struct keeper *k, const struct ep_error *why)
{
    struct ep_error error = EP_ERROR_INIT;

    atomic_store(&k->session->valid_until, 0);
    ep_error_set(&error, EP_UNAVAILABLE, "store %s: the session is lost: %s", k->task.etcd->name,
                 why->status ? why->text : "it was not renewed in time");
    EP_WARN("store", "session lost", EP_S("error", error.text));
    store_tell_lost(k->session, &error);
}

static void keep(void *arg)
{
    struct keeper *k = arg;

    while (!atomic_load(&k->task.stop)) {
        struct ep_error error = EP_ERROR_INIT;
        ep_status status = is_over(k) ? EP_DEADLINE_EXCEEDED : renew(k, &error); /* once over it stays so */

        if (atomic_load(&k->task.stop))
            return;
        if (error.status)
            k->last = error;
        if (status == EP_NOT_FOUND || is_over(k)) {
            lose(k, &k->last);
            return;
        }
        if (!status)
            k->last = (struct ep_error)EP_ERROR_INIT;
        etcd_task_sleep(&k->task, status ? PAUSE_MS : k->ttl_ms / 3);
    }
}

ep_status etcd_begin_session(struct etcd *etcd, struct ep_session *session, uint64_t deadline,
                             struct ep_error *error)
{
    uint64_t asked = ep_clock_boot_ns(), granted_ms;
    struct keeper *k;
    ep_status status = etcd_grant(etcd, session->ttl_ms, deadline, &session->lease, &granted_ms, error);

    if (status)
        return status;
    atomic_store(&session->valid_until, asked + granted_ms * EP_NS_PER_MS);
    k = store_allocate(1, sizeof *k);
    k->session = session;
    k->ttl_ms = granted_ms;
    session->state = k;
    etcd_task_start(&k->task, etcd, keep, k);
    return EP_OK;
}

void etcd_end_session(struct etcd *etcd, struct ep_session *session, uint64_t deadline)
{
    struct keeper *k = session->state;
    struct ep_error error = EP_ERROR_INIT;
    bool alive = ep_session_alive(session);

    if (!k)
        return; /* it never began */
    etcd_task_stop(&k->task);
    free(k);
    atomic_store(&session->valid_until, 0);
    if (alive && etcd_revoke(etcd, session->lease, deadline, &error) && error.status != EP_NOT_FOUND)
        EP_WARN("store", "a session ends by its lease only", EP_S("error", error.text));
}
