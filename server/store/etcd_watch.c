/*
 * Watches: a thread and a stream for each.
 *
 * `since` is the revision until which all has been told.  A stream begins right after it, at whichever endpoint, so
 * that a break loses and repeats nothing.  Where etcd no longer has those changes, the whole is read and told.
 *
 * etcd sends each commit to each watch by itself, which takes it and those who read it far longer than what is in it: in a
 * large cluster, where all watch what each writes, that is most of their work.  So a watch that hears a lot lets go of its
 * place, and asks for what came since a moment later: that comes in one piece.  A quiet one hears everything at once.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "etcd_client.h"

#define QUIET_MS       4000 /* without a word from etcd it is asked for one, and given as long again to say it */
#define FIRST_PAUSE_MS 50
#define LAST_PAUSE_MS  2000
#define LIST_WITHIN_MS 5000

/*
 * So many changes in that time are a lot: what comes after them comes later by the pause, and by the 100 ms between two looks
 * of etcd at those who lag behind.  Workers that go over to a new epoch may wait for one of them, so a small cluster must
 * not come so far, even one that changes all the time: a change of a group is one to three records of each node.
 */
#define BURST     128
#define BURST_MS  1000
#define GATHER_MS 50
#define LULL      8    /* fewer came in one piece: it is over */
#define PLACES    1000 /* on one stream: etcd 3.4 keeps until its end what it had not sent of those given up */

struct watcher {
    struct etcd_task task;
    struct ep_watch *watch;
    char *from, *end; /* the range */
    uint64_t seen;    /* the newest revision of etcd that it has told: of a quiet range far beyond watch->since */
    uint64_t pause_ms;
    bool failing; /* told in the log */
    enum {
        PLACE_ASKED,
        PLACE_THERE,
        PLACE_GIVEN_UP
    } place;         /* etcd tells changes; it was asked to; it was asked to stop that */
    int64_t id;      /* etcd's number of the place on this stream */
    uint32_t places; /* that it had on this stream */
    uint32_t burst;  /* changes since then */
    uint64_t burst_ns;
    bool gathers; /* the next ones come in one piece */
};

/* ---- the whole ----------------------------------------------------------------------- */

static ep_status tell_whole(struct watcher *w, struct ep_error *error)
{
    struct ep_record_list list = { 0 };
    uint64_t revision = 0;
    ep_status status =
        etcd_list(w->task.etcd, w->watch->prefix, ep_clock_ns() + LIST_WITHIN_MS * EP_NS_PER_MS,
                  &w->task.stop, &list, &revision, error);

    if (status)
        return status;
    w->watch->since = w->seen = revision;
    w->watch->needs_whole = false;
    store_tell_changes(w->watch, true, &list, revision);
    return EP_OK;
}

/* ---- one place on the stream --------------------------------------------------------- */

/* request points to create. */
static void ask_for_changes(const struct watcher *w, Etcdserverpb__WatchCreateRequest *create,
                            Etcdserverpb__WatchRequest *request)
{
    etcdserverpb__watch_create_request__init(create);
    etcdserverpb__watch_request__init(request);
    create->key = etcd_bytes(w->from);
    create->range_end = etcd_bytes(w->end);
    create->start_revision = (int64_t)w->watch->since + 1;
    create->progress_notify = true;
    request->request_union_case = ETCDSERVERPB__WATCH_REQUEST__REQUEST_UNION_CREATE_REQUEST;
    request->create_request = create;
}

/* Its place is given up: a moment later it has another. */
static ep_status gather(struct watcher *w, struct ep_error *error)
{
    Etcdserverpb__WatchCreateRequest create;
    Etcdserverpb__WatchRequest request;

    etcd_task_sleep(&w->task, GATHER_MS);
    w->place = PLACE_ASKED;
    w->places++;
    w->burst = 0;
    w->burst_ns = ep_clock_ns();
    w->gathers = true;
    ask_for_changes(w, &create, &request);
    return ep_rpc_stream_send(w->task.stream, &request.base, error);
}

/* ---- one message --------------------------------------------------------------------- */

/* What of them is new and ours.  A delete is of the revision at which it happened. */
static bool add_events(struct watcher *w, const Etcdserverpb__WatchResponse *r, struct ep_record_list *list,
                       uint64_t *newest)
{
    char key[1024];

    for (size_t i = 0; i < r->n_events; i++) {
        const Mvccpb__KeyValue *kv = r->events[i]->kv;
        bool gone = r->events[i]->type == MVCCPB__EVENT__EVENT_TYPE__DELETE;
        const void *value = gone ? NULL : kv && kv->value.data ? kv->value.data : (const uint8_t *)"";

        if (!kv || (uint64_t)kv->mod_revision <= w->watch->since)
            continue;
        *newest = (uint64_t)kv->mod_revision;
        if (etcd_key_of(w->task.etcd, &kv->key, key, sizeof key) &&
            !ep_record_list_add(list, key, value, gone ? 0 : kv->value.len, (uint64_t)kv->mod_revision))
            return false;
    }
    return true;
}

static ep_status take_events(struct watcher *w, const Etcdserverpb__WatchResponse *r, struct ep_error *error)
{
    struct ep_record_list list = { 0 };
    uint64_t newest = w->watch->since;

    if (!add_events(w, r, &list, &newest)) {
        ep_record_list_clear(&list);
        return ep_error_set(error, EP_NO_MEMORY, "out of memory"); /* begins again after since */
    }
    /* A note that there was nothing until its revision.  Those that were asked for (-1) may overtake events. */
    if (!r->n_events && !r->created && r->watch_id >= 0 && r->header &&
        (uint64_t)r->header->revision > newest)
        newest = (uint64_t)r->header->revision;
    w->watch->since = newest;
    w->burst += (uint32_t)list.n;
    if (list.n)
        store_tell_changes(w->watch, false, &list, newest);
    ep_record_list_clear(&list);
    return EP_OK;
}

/* A member that lags behind is no reason; a cluster that was set back to an old copy is. */
static ep_status check_revision(struct watcher *w, const Etcdserverpb__WatchResponse *r,
                                struct ep_error *error)
{
    const uint64_t was = w->seen > w->watch->since ? w->seen : w->watch->since;
    uint64_t revision;
    ep_status status;

    if (!r->header || (uint64_t)r->header->revision >= was)
        return EP_OK;
    status = etcd_ask_revision(w->task.etcd, ep_clock_ns() + LIST_WITHIN_MS * EP_NS_PER_MS, &w->task.stop,
                               &revision, error);
    if (status || revision >= was)
        return status;
    w->watch->needs_whole = true;
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "etcd is at revision %" PRIu64 ", and was at %" PRIu64 ": it was set back", revision, was);
}

/* Not that etcd ends it for a reason of its own. */
static bool is_farewell(const struct watcher *w, const Etcdserverpb__WatchResponse *r)
{
    return r->canceled && !r->created && w->place == PLACE_GIVEN_UP && r->watch_id == w->id &&
           !r->compact_revision && !*r->cancel_reason;
}

static ep_status take(struct watcher *w, const Etcdserverpb__WatchResponse *r, struct ep_error *error)
{
    ep_status status;

    if (is_farewell(w, r))
        return gather(w, error);
    if (r->canceled && r->compact_revision) {
        w->watch->needs_whole = true;
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "what came after revision %" PRIu64 " is compacted", w->watch->since);
    }
    if (r->canceled)
        return ep_error_set(error, EP_PERMISSION_DENIED, "etcd ends the watch: %.200s", r->cancel_reason);
    w->pause_ms = 0;
    if (w->failing)
        EP_INFO("store", "watch goes on", EP_S("prefix", w->watch->prefix));
    w->failing = false;
    if (r->created) {
        w->id = r->watch_id;
        w->place = PLACE_THERE;
    }
    status = r->created ? check_revision(w, r, error) : take_events(w, r, error);
    if (!status && r->header && (uint64_t)r->header->revision > w->seen)
        w->seen = (uint64_t)r->header->revision;
    return status;
}

/* ---- the stream ---------------------------------------------------------------------- */

static ep_status ask_for_a_word(struct watcher *w, struct ep_error *error)
{
    Etcdserverpb__WatchProgressRequest progress = ETCDSERVERPB__WATCH_PROGRESS_REQUEST__INIT;
    Etcdserverpb__WatchRequest request = ETCDSERVERPB__WATCH_REQUEST__INIT;

    request.request_union_case = ETCDSERVERPB__WATCH_REQUEST__REQUEST_UNION_PROGRESS_REQUEST;
    request.progress_request = &progress;
    return ep_rpc_stream_send(w->task.stream, &request.base, error);
}

/*
 * The next message.  A member that is stopped keeps its connections: only a question shows it.  That something was asked of
 * etcd already is question enough; and before its first word the stream is not open, and another would wait for that.
 */
static ep_status next_message(struct watcher *w, Etcdserverpb__WatchResponse **out, struct ep_error *error)
{
    ep_status status = ep_rpc_stream_read(w->task.stream, QUIET_MS, (ProtobufCMessage **)out, error);

    if (status == EP_DEADLINE_EXCEEDED && w->place == PLACE_THERE && !ep_rpc_stream_ended(w->task.stream) &&
        !(status = ask_for_a_word(w, error)))
        status = ep_rpc_stream_read(w->task.stream, QUIET_MS, (ProtobufCMessage **)out, error);
    if (!status && !*out)
        status = ep_error_set(error, EP_UNAVAILABLE, "etcd hung up");
    return status;
}

static ep_status open_stream(struct watcher *w, struct ep_error *error)
{
    Etcdserverpb__WatchCreateRequest create;
    Etcdserverpb__WatchRequest request;

    w->place = PLACE_ASKED;
    w->places = 1;
    w->burst = 0;
    w->gathers = false;
    ask_for_changes(w, &create, &request);
    return etcd_task_stream(&w->task, &etcdserverpb__watch__descriptor, "Watch", &request.base, -1, error);
}

/* ---- many changes ---------------------------------------------------------------------- */

static bool hears_a_lot(struct watcher *w)
{
    const uint64_t now = ep_clock_ns();
    const uint32_t many = w->gathers ? LULL : BURST;

    if (!w->burst)
        return false;
    w->gathers = false;
    if (w->burst >= many)
        return true;
    if (now - w->burst_ns > BURST_MS * EP_NS_PER_MS) {
        w->burst_ns = now;
        w->burst = 0;
    }
    return false;
}

/* What was on its way comes before etcd's answer. */
static ep_status give_place_up(struct watcher *w, struct ep_error *error)
{
    Etcdserverpb__WatchCancelRequest cancel = ETCDSERVERPB__WATCH_CANCEL_REQUEST__INIT;
    Etcdserverpb__WatchRequest request = ETCDSERVERPB__WATCH_REQUEST__INIT;

    w->place = PLACE_GIVEN_UP;
    cancel.watch_id = w->id;
    request.request_union_case = ETCDSERVERPB__WATCH_REQUEST__REQUEST_UNION_CANCEL_REQUEST;
    request.cancel_request = &cancel;
    return ep_rpc_stream_send(w->task.stream, &request.base, error);
}

/* Until something ends it; that is in *error. */
static void follow(struct watcher *w, struct ep_error *error)
{
    ep_status status = open_stream(w, error);

    while (!status && !atomic_load(&w->task.stop) && w->places <= PLACES) {
        Etcdserverpb__WatchResponse *r;

        status = next_message(w, &r, error);
        if (status)
            break;
        status = take(w, r, error);
        etcd_free(r);
        if (!status && w->place == PLACE_THERE && hears_a_lot(w))
            status = give_place_up(w, error);
    }
    /* More at once than a message may hold: read it in pages. */
    if (status == EP_RESOURCE_EXHAUSTED)
        w->watch->needs_whole = true;
    etcd_task_end_stream(&w->task, !status || w->watch->needs_whole ? NULL : error);
}

/* None after the first break, then more each time. */
static uint64_t longer(uint64_t pause_ms)
{
    if (!pause_ms)
        return FIRST_PAUSE_MS;
    return pause_ms * 2 > LAST_PAUSE_MS ? LAST_PAUSE_MS : pause_ms * 2;
}

static void run(void *arg)
{
    struct watcher *w = arg;

    while (!atomic_load(&w->task.stop)) {
        struct ep_error error = EP_ERROR_INIT;

        if (!w->watch->needs_whole || !tell_whole(w, &error))
            follow(w, &error);
        if (atomic_load(&w->task.stop))
            return;
        if (!error.status)
            continue; /* a stream that was used up */
        if (!w->failing)
            EP_WARN("store", "watch interrupted", EP_S("prefix", w->watch->prefix),
                    EP_S("error", error.text));
        w->failing = true;
        etcd_task_sleep(&w->task, w->pause_ms);
        w->pause_ms = longer(w->pause_ms);
    }
}

/* ---- begin and end ------------------------------------------------------------------- */

void etcd_begin_watch(struct etcd *etcd, struct ep_watch *watch)
{
    struct watcher *w = store_allocate(1, sizeof *w);

    w->watch = watch;
    w->from = etcd_key(etcd, watch->prefix);
    w->end = etcd_range_end(w->from);
    watch->state = w;
    etcd_task_start(&w->task, etcd, run, w);
}

void etcd_end_watch(struct ep_watch *watch)
{
    struct watcher *w = watch->state;

    etcd_task_stop(&w->task);
    free(w->from);
    free(w->end);
    free(w);
}
