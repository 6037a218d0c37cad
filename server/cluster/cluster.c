/* Opening and closing, readiness, events. */
#include "cluster_private.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"

/* ---- memory ------------------------------------------------------------------------------ */

void *cluster_allocate(size_t size)
{
    void *memory = calloc(1, size);

    if (!memory)
        abort(); /* a few bytes of bookkeeping: nothing sensible can go on without them */
    return memory;
}

char *cluster_copy(const char *text)
{
    char *copy = strdup(text ? text : "");

    if (!copy)
        abort();
    return copy;
}

static void free_cluster(struct ep_cluster *c)
{
    table_free(c);
    free(c->written);
    free((char *)(uintptr_t)c->tls.ca);
    free((char *)(uintptr_t)c->tls.cert);
    free((char *)(uintptr_t)c->tls.key);
    while (c->watches) {
        struct ep_cluster_watch *watch = c->watches;

        c->watches = watch->next;
        free(watch);
    }
    free(c);
}

void cluster_hold(struct ep_cluster *c)
{
    c->references++;
}

void cluster_release(struct ep_cluster *c)
{
    void (*on_closed)(void *user) = c->on_closed;
    void *user = c->closed_user;

    if (--c->references)
        return;
    free_cluster(c);
    if (on_closed)
        on_closed(user);
}

/* ---- events ------------------------------------------------------------------------------ */

static void drop_closed_watches(struct ep_cluster *c)
{
    struct ep_cluster_watch **at = &c->watches;

    while (*at) {
        struct ep_cluster_watch *watch = *at;

        if (watch->fn) {
            at = &watch->next;
            continue;
        }
        *at = watch->next;
        free(watch);
    }
}

void cluster_tell(struct ep_cluster *c, enum ep_cluster_event event, const struct ep_cluster_node *node)
{
    c->telling++;
    for (struct ep_cluster_watch *watch = c->watches; watch; watch = watch->next)
        if (watch->fn)
            watch->fn(event, node, watch->user);
    if (--c->telling == 0)
        drop_closed_watches(c);
}

struct ep_cluster_watch *ep_cluster_watch(struct ep_cluster *c, ep_cluster_fn fn, void *user)
{
    struct ep_cluster_watch *watch = cluster_allocate(sizeof *watch);

    *watch = (struct ep_cluster_watch){ .next = c->watches, .cluster = c, .fn = fn, .user = user };
    c->watches = watch;
    return watch;
}

void ep_cluster_unwatch(struct ep_cluster_watch *watch)
{
    struct ep_cluster *c = watch->cluster;

    watch->fn = NULL;
    if (!c->telling)
        drop_closed_watches(c);
}

/* ---- readiness --------------------------------------------------------------------------- */

static void tell_ready(struct ep_cluster *c, const struct ep_error *error)
{
    if (c->told_ready || c->closing)
        return;
    c->told_ready = true;
    if (c->options.on_ready)
        c->options.on_ready(error, c->options.user);
}

void cluster_fail(struct ep_cluster *c, const struct ep_error *error)
{
    tell_ready(c, error);
}

/* Registered, and the table has it. */
static bool is_there(const struct ep_cluster *c)
{
    return c->whole && c->state == MEMBER_IN && c->view >= c->registered;
}

void cluster_check_ready(struct ep_cluster *c)
{
    static const struct ep_error none = EP_ERROR_INIT;

    if (!c->told_ready && is_there(c) && ep_cluster_leader(c))
        tell_ready(c, &none);
}

static void check_start(struct ep_cluster *c)
{
    const uint64_t limit_ms = START_MS + 2 * c->options.ttl_ms;
    struct ep_error error;

    if (c->told_ready || !c->joined_ns || ep_clock_ns() < c->joined_ns + limit_ms * EP_NS_PER_MS)
        return;
    if (is_there(c))
        ep_error_set(&error, EP_UNAVAILABLE, "no server leads the cluster after %" PRIu64 " s", limit_ms / 1000);
    else
        ep_error_set(&error, EP_UNAVAILABLE, "the store has not taken this server up within %" PRIu64 " s%s%s",
                     limit_ms / 1000, c->late.status ? ": " : "", c->late.text);
    cluster_fail(c, &error);
}

static void on_tick(uv_timer_t *tick)
{
    struct ep_cluster *c = tick->data;

    member_tick(c);
    grace_tick(c);
    cordon_look(c);
    check_start(c);
}

/* ---- opening and closing ----------------------------------------------------------------- */

static char *copy_or_null(const char *text)
{
    return text ? cluster_copy(text) : NULL;
}

static void init_timer(struct ep_cluster *c, uv_timer_t *timer)
{
    uv_timer_init(c->options.loop, timer); /* cannot fail */
    timer->data = c;
    cluster_hold(c);
}

static void on_timer_closed(uv_handle_t *timer)
{
    cluster_release(timer->data);
}

ep_status ep_cluster_open(const struct ep_cluster_options *options, struct ep_cluster **out, struct ep_error *error)
{
    struct ep_cluster *c = calloc(1, sizeof *c);

    if (!c)
        return ep_error_set(error, EP_NO_MEMORY, "cluster: out of memory");
    c->options = *options;
    c->references = 1;
    if (options->tls)
        c->tls = (struct ep_rpc_tls){ .ca = copy_or_null(options->tls->ca),
                                      .cert = copy_or_null(options->tls->cert),
                                      .key = copy_or_null(options->tls->key) };
    init_timer(c, &c->tick);
    init_timer(c, &c->failing);
    uv_timer_start(&c->tick, on_tick, TICK_MS, TICK_MS);
    table_open(c);
    *out = c;
    return EP_OK;
}

void ep_cluster_leave(struct ep_cluster *c, void (*on_left)(void *user), void *user)
{
    c->on_left = on_left;
    c->left_user = user;
    member_leave(c);
    for (size_t i = 0; i < c->n_entries; i++)
        call_close_channel(c->entries[i]);
    cordon_close(c);
    call_check_left(c);
}

void ep_cluster_close(struct ep_cluster *c, void (*on_closed)(void *user), void *user)
{
    assert(!c->calls);
    c->closing = true;
    c->on_closed = on_closed;
    c->closed_user = user;
    member_leave(c);
    table_close(c);
    uv_close((uv_handle_t *)&c->tick, on_timer_closed);
    uv_close((uv_handle_t *)&c->failing, on_timer_closed);
    cluster_release(c);
}
