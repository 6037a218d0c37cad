/* grpc.health.v1: states by service name, and the watches on them. */
#include <stdlib.h>
#include <string.h>

#include "grpc/health/v1/health.pb-c.h"
#include "rpc_private.h"

typedef Grpc__Health__V1__HealthCheckRequest check_request;
typedef Grpc__Health__V1__HealthCheckResponse check_response;
typedef Grpc__Health__V1__HealthCheckResponse__ServingStatus serving_status;
#define STATUS(name) GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__##name

struct entry {
    struct entry *next;
    bool serving;
    char name[];
};

struct watch {
    struct watch *prev, *next;
    struct rpc_health *health;
    struct ep_rpc_call *call;
    int last; /* what the client was told, -1: nothing yet */
    char service[];
};

struct rpc_health {
    struct entry *entries;
    struct watch *watches;
    bool draining;
};

static struct entry *find(const struct rpc_health *health, const char *name)
{
    for (struct entry *e = health->entries; e; e = e->next)
        if (strcmp(e->name, name) == 0)
            return e;
    return NULL;
}

static serving_status status_of(const struct rpc_health *health, const char *name)
{
    const struct entry *e = find(health, name);

    if (!e)
        return STATUS(SERVICE_UNKNOWN);
    return e->serving && !health->draining ? STATUS(SERVING) : STATUS(NOT_SERVING);
}

static void on_check(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const check_request *request = (const check_request *)message;
    check_response response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    response.status = status_of(user, request->service);
    if (response.status == STATUS(SERVICE_UNKNOWN)) {
        struct ep_error error;

        ep_error_set(&error, EP_NOT_FOUND, "no service \"%s\" is known here", request->service);
        ep_rpc_fail(call, &error);
        return;
    }
    ep_rpc_reply(call, &response.base);
}

/*
 * Tells what is true now.  A write still in flight is waited for, and only the latest state
 * follows.  The last state leaves with the status: what is sent before the GOAWAY arrives, since
 * the server hangs up only when the client has acknowledged that.
 */
static void tell(struct watch *w)
{
    check_response response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    bool news;

    response.status = status_of(w->health, w->service);
    news = w->last != (int)response.status;
    if (rpc_call_is_writing(w->call))
        return;
    w->last = (int)response.status;
    if (w->health->draining && news)
        ep_rpc_reply(w->call, &response.base);
    else if (w->health->draining)
        ep_rpc_finish(w->call);
    else if (news)
        ep_rpc_write(w->call, &response.base);
}

static void on_watch(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const check_request *request = (const check_request *)message;
    struct rpc_health *health = user;
    size_t n = strlen(request->service) + 1;
    struct watch *w = calloc(1, sizeof *w + n);

    if (!w) {
        struct ep_error error;

        ep_error_set(&error, EP_NO_MEMORY, "no memory for the watch");
        ep_rpc_fail(call, &error);
        return;
    }
    memcpy(w->service, request->service, n);
    w->health = health;
    w->call = call;
    w->last = -1;
    w->next = health->watches;
    if (w->next)
        w->next->prev = w;
    health->watches = w;
    ep_rpc_call_set_user(call, w);
    tell(w);
}

static void on_watch_writable(struct ep_rpc_call *call, void *user)
{
    (void)user;
    tell(ep_rpc_call_user(call));
}

static void on_watch_closed(struct ep_rpc_call *call, void *user)
{
    struct rpc_health *health = user;
    struct watch *w = ep_rpc_call_user(call);

    if (!w)
        return;
    *(w->prev ? &w->prev->next : &health->watches) = w->next;
    if (w->next)
        w->next->prev = w->prev;
    free(w);
}

static void tell_all(struct rpc_health *health)
{
    for (struct watch *w = health->watches; w; w = w->next)
        tell(w);
}

ep_status ep_rpc_server_add_health(struct ep_rpc_server *server, struct ep_error *error)
{
    static const struct ep_rpc_handler handlers[] = {
        { .method = "Check", .for_viewers = true, .on_request = on_check },
        { .method = "Watch", .for_viewers = true, .on_request = on_watch, .on_writable = on_watch_writable,
          .on_closed = on_watch_closed },
    };

    if (server->health)
        return ep_error_set(error, EP_ALREADY_EXISTS, "the server has a health service already");
    server->health = calloc(1, sizeof *server->health);
    if (!server->health)
        return ep_error_set(error, EP_NO_MEMORY, "health service: out of memory");
    ep_rpc_server_set_health(server, "", false);
    return ep_rpc_server_add_service(server, &grpc__health__v1__health__descriptor, handlers,
                                     sizeof handlers / sizeof *handlers, server->health, error);
}

void ep_rpc_server_set_health(struct ep_rpc_server *server, const char *service, bool serving)
{
    struct rpc_health *health = server->health;
    struct entry *e;

    if (!health)
        return;
    e = find(health, service);
    if (!e) {
        size_t n = strlen(service) + 1;

        e = calloc(1, sizeof *e + n);
        if (!e) {
            EP_ERROR("rpc", "health state lost: out of memory", EP_S("service", service));
            return;
        }
        memcpy(e->name, service, n);
        e->next = health->entries;
        health->entries = e;
    }
    e->serving = serving;
    tell_all(health);
}

void rpc_health_drain(struct ep_rpc_server *server)
{
    if (!server->health)
        return;
    server->health->draining = true;
    tell_all(server->health);
}

void rpc_health_free(struct ep_rpc_server *server)
{
    while (server->health && server->health->entries) {
        struct entry *e = server->health->entries;

        server->health->entries = e->next;
        free(e);
    }
    free(server->health);
    server->health = NULL;
}
