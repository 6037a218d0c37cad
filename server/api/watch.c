/*
 * WatchGroups: what is there, then SYNCED, then every change.
 *
 * A stream keeps no messages, only the names of groups that changed since they were last sent, each
 * once: a slow reader sees the latest state and costs no more than a name for each group.
 */
#include <stdlib.h>
#include <string.h>

#include "api_private.h"
#include "ep_log.h"

struct change {
    struct change *next;
    Ep__V1__GroupEvent__Type type;
    char name[]; /* "" with SYNCED */
};

struct api_watch {
    struct api_watch *next;
    struct ep_api *api;
    struct ep_rpc_call *call; /* NULL: it ended while the watch waited to begin */
    bool waits;               /* to begin */
    struct ep_group_watch *source;
    struct change *first;
    struct ep_error behind; /* why what was there when it began may be old */
    char name[]; /* "": all */
};

/* ---- what waits to be sent ------------------------------------------------------------ */

/* A group that was never announced and is gone again needs no event; one that was deleted and made
 * again shows as changed.  So the newest type wins, but for PRESENT, which stays until sent. */
static bool merge(struct change *change, Ep__V1__GroupEvent__Type type)
{
    if (change->type != EP__V1__GROUP_EVENT__TYPE__TYPE_PRESENT
        || type == EP__V1__GROUP_EVENT__TYPE__TYPE_DELETED)
        change->type = type;
    return true;
}

static bool remember(struct api_watch *watch, Ep__V1__GroupEvent__Type type, const char *name)
{
    struct change **end = &watch->first, *change;
    size_t n = strlen(name) + 1;

    for (; *end; end = &(*end)->next)
        if (type != EP__V1__GROUP_EVENT__TYPE__TYPE_SYNCED && !strcmp((*end)->name, name))
            return merge(*end, type);
    change = calloc(1, sizeof *change + n);
    if (!change)
        return false;
    change->type = type;
    memcpy(change->name, name, n);
    *end = change;
    return true;
}

static void pop(struct api_watch *watch)
{
    struct change *change = watch->first;

    watch->first = change->next;
    free(change);
}

/* The event as of now; false when the runtime takes no write at present. */
static bool send_change(struct api_watch *watch, const struct change *change)
{
    Ep__V1__GroupEvent event = EP__V1__GROUP_EVENT__INIT;
    Ep__V1__Group gone = EP__V1__GROUP__INIT;
    const Ep__V1__Group *group = *change->name
        ? ep_groups_get(watch->api->options.groups, change->name, NULL) : NULL;

    event.type = change->type;
    if (event.type == EP__V1__GROUP_EVENT__TYPE__TYPE_SYNCED)
        event.behind = watch->behind.text;
    gone.name = (char *)(uintptr_t)change->name;
    if (*change->name && (!group || event.type == EP__V1__GROUP_EVENT__TYPE__TYPE_DELETED)) {
        event.type = EP__V1__GROUP_EVENT__TYPE__TYPE_DELETED;
        event.group = &gone;
    } else {
        event.group = (Ep__V1__Group *)(uintptr_t)group;
    }
    return ep_rpc_write(watch->call, &event.base);
}

static void pump(struct api_watch *watch)
{
    while (watch->first && send_change(watch, watch->first))
        pop(watch);
}

/* ---- the stream ------------------------------------------------------------------------ */

static void on_change(Ep__V1__GroupEvent__Type type, const Ep__V1__Group *group, void *user)
{
    struct api_watch *watch = user;

    if (*watch->name && strcmp(watch->name, group->name) != 0)
        return;
    if (!remember(watch, type, group->name))
        EP_ERROR(API_MODULE, "a watch misses a change: out of memory", EP_S("group", group->name));
    pump(watch);
}

static bool remember_present(struct api_watch *watch)
{
    struct ep_groups *groups = watch->api->options.groups;

    for (size_t i = 0; i < ep_groups_count(groups); i++) {
        const char *name = ep_groups_at(groups, i)->name;

        if ((!*watch->name || !strcmp(watch->name, name))
            && !remember(watch, EP__V1__GROUP_EVENT__TYPE__TYPE_PRESENT, name))
            return false;
    }
    return remember(watch, EP__V1__GROUP_EVENT__TYPE__TYPE_SYNCED, "");
}

static void destroy(struct api_watch *watch)
{
    if (watch->source)
        ep_groups_unwatch(watch->source);
    while (watch->first)
        pop(watch);
    free(watch);
}

static bool begin(struct api_watch *watch)
{
    if (remember_present(watch))
        watch->source = ep_groups_watch(watch->api->options.groups, on_change, watch);
    return watch->source != NULL;
}

/* What is here is as new as a watch may begin with, or *behind says why it is not. */
static void on_time(const struct ep_error *behind, void *user)
{
    static const struct ep_error no_memory = { EP_NO_MEMORY, "out of memory" };
    struct api_watch *watch = user;

    watch->waits = false;
    if (!watch->call) { /* with the call the API may have gone */
        destroy(watch);
        return;
    }
    watch->behind = *behind;
    if (begin(watch))
        pump(watch);
    else
        ep_rpc_fail(watch->call, &no_memory);
}

static struct api_watch *create(struct ep_api *api, struct ep_rpc_call *call, const char *name)
{
    size_t n = strlen(name) + 1;
    struct api_watch *watch = calloc(1, sizeof *watch + n);

    if (!watch)
        return NULL;
    watch->api = api;
    watch->call = call;
    watch->waits = true;
    memcpy(watch->name, name, n);
    watch->next = api->watches;
    api->watches = watch;
    return watch;
}

void api_watch_groups(struct ep_rpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ep__V1__WatchGroupsRequest *request = (const Ep__V1__WatchGroupsRequest *)message;
    struct ep_error error = { EP_NO_MEMORY, "out of memory" };
    struct ep_api *api = user;
    struct api_watch *watch;

    api->requests++;
    if (api->ending) {
        ep_error_set(&error, EP_UNAVAILABLE, "the server is stopping");
        ep_rpc_fail(call, &error);
        return;
    }
    if (*request->name && ep_group_name_check(request->name, &error)) {
        ep_rpc_fail(call, &error);
        return;
    }
    watch = create(api, call, request->name);
    if (!watch) {
        ep_rpc_fail(call, &error);
        return;
    }
    ep_rpc_call_set_user(call, watch);
    ep_groups_before_read(api->options.groups, api_read_ms(call), on_time, watch);
}

void api_watch_writable(struct ep_rpc_call *call, void *user)
{
    struct api_watch *watch = ep_rpc_call_user(call);

    (void)user;
    if (watch)
        pump(watch);
}

void api_watch_closed(struct ep_rpc_call *call, void *user)
{
    struct api_watch *watch = ep_rpc_call_user(call), **at;

    (void)user;
    if (!watch)
        return;
    for (at = &watch->api->watches; *at != watch; at = &(*at)->next)
        ;
    *at = watch->next;
    watch->call = NULL;
    if (!watch->waits)
        destroy(watch);
}

void api_watches_end(struct ep_api *api)
{
    for (struct api_watch *watch = api->watches; watch; watch = watch->next)
        ep_rpc_finish(watch->call);
}
