#include "attach_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ep_log.h"

/* ---- life ---------------------------------------------------------------------- */

static void link_newest(struct connection *connection)
{
    struct ep_attach *attach = connection->attach;

    connection->older = attach->newest;
    if (attach->newest)
        attach->newest->newer = connection;
    else
        attach->oldest = connection;
    attach->newest = connection;
    attach->n_connections++;
}

static void unlink_connection(struct connection *connection)
{
    struct ep_attach *attach = connection->attach;

    if (connection->older)
        connection->older->newer = connection->newer;
    else
        attach->oldest = connection->newer;
    if (connection->newer)
        connection->newer->older = connection->older;
    else
        attach->newest = connection->older;
    attach->n_connections--;
}

static void let_go(struct connection *connection)
{
    struct ep_attach *attach = connection->attach;

    if (--connection->handles == 0) {
        free(connection->queue);
        free(connection);
    }
    attach_handle_closed(attach);
}

static void on_handle_closed(uv_handle_t *handle)
{
    let_go(handle->data);
}

void connection_close(struct connection *connection)
{
    if (connection->state == CONNECTION_CLOSED)
        return;
    connection->state = CONNECTION_CLOSED;
    connection->claim = NULL;
    unlink_connection(connection);
    uv_close((uv_handle_t *)&connection->poll, on_handle_closed);
    uv_close((uv_handle_t *)&connection->deadline, on_handle_closed);
    close(connection->fd); /* uv_close has taken it out of the poll set */
    connection->fd = -1;
}

bool connection_drop_silent(struct ep_attach *attach)
{
    for (struct connection *c = attach->oldest; c; c = c->newer)
        if (c->state == CONNECTION_SILENT) {
            attach->counters.silent++;
            connection_close(c);
            return true;
        }
    return false;
}

/* ---- refusals ------------------------------------------------------------------- */

static void send_refusal(int fd, const struct ep_error *error)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, EP_ATTACH_REFUSED);
    frame.status = error->status;
    snprintf(frame.text, sizeof frame.text, "%.*s", (int)sizeof frame.text - 1, error->text);
    (void)ep_attach_send(fd, &frame, -1, NULL); /* it is closed next in any case */
}

static void refuse(struct connection *connection, const struct ep_error *error)
{
    connection->attach->counters.refused++;
    EP_INFO("attach", "hello refused", EP_I("pid", connection->pid), EP_U("uid", connection->uid),
            EP_S("why", error->text));
    send_refusal(connection->fd, error);
    connection_close(connection);
}

/* Not a frame, or one that has no place here: whoever sends it is not our library. */
static void bad_frame(struct connection *connection, const struct ep_error *error)
{
    struct claim *claim = connection->claim;

    connection->attach->counters.bad_frames++;
    EP_WARN("attach", "bad frame, connection closed", EP_I("pid", connection->pid),
            EP_U("uid", connection->uid), EP_S("why", error->text));
    send_refusal(connection->fd, error);
    connection_close(connection);
    if (claim)
        claim_disconnected(claim, "its worker sent a bad frame");
}

/* ---- events out ------------------------------------------------------------------ */

static void on_ready(uv_poll_t *poll, int status, int events);

static void watch(struct connection *connection)
{
    bool waiting = connection->queued > 0 || connection->lost > 0 ||
                   connection->memory < connection->memories;

    uv_poll_start(&connection->poll, UV_READABLE | (waiting ? UV_WRITABLE : 0), on_ready);
}

/* The last place is kept for DETACHED, which no worker may miss: its ops would never end. */
static bool enqueue(struct connection *connection, const struct ep_attach_frame *event)
{
    uint32_t room = event->event == EP_ATTACH_DETACHED ? EVENT_QUEUE : EVENT_QUEUE - 1;

    if (!connection->queue)
        connection->queue = calloc(EVENT_QUEUE, sizeof *connection->queue);
    if (!connection->queue || connection->queued >= room)
        return false;
    connection->queue[(connection->first + connection->queued++) % EVENT_QUEUE] = *event;
    return true;
}

/* After the events that had room, the number of those that had none. */
static bool send_lost(struct connection *connection)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, EP_ATTACH_EVENT);
    frame.event = EP_ATTACH_EVENTS_LOST;
    frame.value = connection->lost;
    if (ep_attach_send(connection->fd, &frame, -1, NULL) != EP_OK)
        return false;
    connection->lost = 0;
    return true;
}

static void flush_events(struct connection *connection)
{
    while (connection->queued > 0) {
        if (ep_attach_send(connection->fd, &connection->queue[connection->first], -1, NULL) != EP_OK)
            return; /* full, or closed: then reading will say so */
        connection->first = (connection->first + 1) % EVENT_QUEUE;
        connection->queued--;
    }
    if (connection->lost == 0 || send_lost(connection))
        watch(connection);
}

/* False: it is gone, as the worker has not read so many before. */
static bool send_or_queue(struct connection *connection, const struct ep_attach_frame *frame)
{
    bool idle = connection->queued == 0 && connection->lost == 0 && connection->memory == connection->memories;

    if (idle && ep_attach_send(connection->fd, frame, -1, NULL) == EP_OK)
        return true;
    return enqueue(connection, frame);
}

void connection_event(struct connection *connection, const struct ep_attach_frame *event)
{
    if (!send_or_queue(connection, event))
        connection->lost++;
    watch(connection);
}

static void on_late(uv_timer_t *timer)
{
    struct connection *connection = timer->data;
    struct claim *claim = connection->claim;

    EP_WARN("attach", "a worker does not read what it must not miss, cut off", EP_I("pid", connection->pid));
    connection_close(connection);
    claim_disconnected(claim, "its worker was late: it did not read what its server told it");
}

/* Whoever tells is in the middle of something, so the end is put off. */
void connection_tell(struct connection *connection, const struct ep_attach_frame *frame)
{
    if (!send_or_queue(connection, frame))
        uv_timer_start(&connection->deadline, on_late, 0, 0);
    watch(connection);
}

/* ---- memory out: WELCOME and MEMORY ------------------------------------------------ */

static void describe_memory(const struct ep_membership_info *info, const struct ep_membership_memory *memory,
                            struct ep_attach_frame *frame)
{
    bool own = memory->kind == EP_MEMORY_OWN_WINDOW;

    ep_attach_frame_init(frame, own ? EP_ATTACH_WELCOME : EP_ATTACH_MEMORY);
    frame->rank = memory->rank;
    frame->epoch = info->epoch;
    frame->value = memory->bytes;
    frame->offset = own ? info->position : 0;
    frame->ht = own ? info->ht : 0;
    frame->count = own                                ? info->memories - 1
                   : memory->kind == EP_MEMORY_STATE ? EP_ATTACH_MEMORY_STATE
                                                     : EP_ATTACH_MEMORY_WINDOW;
}

/* Each descriptor is made when there is room for it, and lives in the socket only. */
static ep_status send_memory(struct connection *connection, const struct ep_membership_info *info,
                             struct ep_error *error)
{
    struct ep_membership_memory memory;
    struct ep_attach_frame frame;
    ep_status status =
        ep_membership_memory(connection->claim->membership, connection->memory, &memory, error);

    if (status)
        return status;
    describe_memory(info, &memory, &frame);
    status = ep_attach_send(connection->fd, &frame, memory.fd, error);
    close(memory.fd);
    return status;
}

/* As many as the socket takes; the others follow when the worker has read some. */
static ep_status send_memories(struct connection *connection, struct ep_error *error)
{
    struct ep_membership_info info;
    ep_status status = EP_OK;

    ep_membership_info(connection->claim->membership, &info);
    while (connection->memory < connection->memories && !(status = send_memory(connection, &info, error)))
        connection->memory++;
    watch(connection);
    return status == EP_UNAVAILABLE ? EP_OK : status;
}

static void on_reset(struct connection *connection);

/* Without all of it the worker can do nothing.  One that has closed its end may have said BYE before that. */
static void give_up(struct connection *connection, const struct ep_error *error)
{
    struct claim *claim = connection->claim;

    EP_INFO("attach", "a worker cannot be given its memory", EP_I("pid", connection->pid),
            EP_S("why", error->text));
    if (error->status == EP_SERVER_LOST) {
        on_reset(connection);
        return;
    }
    if (connection->memory == 0) /* it still waits for its WELCOME */
        send_refusal(connection->fd, error);
    connection_close(connection);
    claim_disconnected(claim, "its worker could not be given its memory");
}

/* ---- requests: REGISTER and UNREGISTER --------------------------------------------- */

/* Who does not read its answers waits for them in vain, and for a bounded time. */
static void answer(struct connection *connection, uint32_t number, const struct ep_error *error)
{
    struct ep_attach_frame frame;

    ep_attach_frame_init(&frame, EP_ATTACH_ANSWER);
    frame.count = number;
    if (error) {
        frame.status = error->status;
        snprintf(frame.text, sizeof frame.text, "%.*s", (int)sizeof frame.text - 1, error->text);
    }
    (void)send_or_queue(connection, &frame);
    watch(connection);
}

/* The worker may have gone meanwhile. */
static void on_done(const struct ep_error *error, void *user)
{
    struct connection *connection = user;

    connection->asking = false;
    if (connection->state == CONNECTION_ATTACHED)
        answer(connection, connection->asked, error);
    let_go(connection);
}

/* One after the other: a worker that does not wait gets an answer too, and no work done. */
static bool begin_request(struct connection *connection, uint32_t number)
{
    struct ep_error error = EP_ERROR_INIT;

    if (connection->asking) {
        (void)ep_error_set(&error, EP_UNAVAILABLE, "the last request is not answered yet: ask again then");
        answer(connection, number, &error);
        return false;
    }
    connection->asking = true;
    connection->asked = number;
    connection->handles++;
    attach_handle_opened(connection->attach);
    return true;
}

static void answer_no_room(struct connection *connection, uint32_t number)
{
    struct ep_error error = EP_ERROR_INIT;

    (void)ep_error_set(&error, EP_RESOURCE_EXHAUSTED, "the server may open no more descriptors, and has none for the region");
    answer(connection, number, &error);
}

/* Takes fd. */
static void on_register(struct connection *connection, const struct ep_attach_frame *frame, int fd)
{
    const struct ep_executor_region region = { .number = frame->region, .fd = fd, .offset = frame->offset,
                                               .bytes = frame->value };

    if (fd == EP_ATTACH_FD_LOST)
        answer_no_room(connection, frame->count);
    else if (begin_request(connection, frame->count))
        ep_membership_register(connection->claim->membership, &region, on_done, connection);
    else if (fd >= 0)
        close(fd);
}

static void on_unregister(struct connection *connection, const struct ep_attach_frame *frame)
{
    if (begin_request(connection, frame->count))
        ep_membership_unregister(connection->claim->membership, frame->region, on_done, connection);
}

/* ---- frames in ------------------------------------------------------------------- */

static void welcome(struct connection *connection)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_membership_info info;

    ep_membership_info(connection->claim->membership, &info);
    connection->state = CONNECTION_ATTACHED;
    connection->memories = info.memories;
    if (send_memories(connection, &error) != EP_OK) {
        give_up(connection, &error);
        return;
    }
    connection->attach->counters.attaches++;
    claim_welcomed(connection->claim, connection);
}

void connection_joined(struct connection *connection, const struct ep_error *error)
{
    if (error->status)
        refuse(connection, error);
    else
        welcome(connection);
}

static void on_hello(struct connection *connection, const struct ep_attach_frame *hello)
{
    struct ep_error error = EP_ERROR_INIT;
    struct claim *claim = claim_find(connection->attach, hello->ticket, connection->pid, connection->uid, &error);

    if (!claim) {
        refuse(connection, &error);
        return;
    }
    connection->state = CONNECTION_JOINING;
    connection->claim = claim;
    uv_timer_stop(&connection->deadline);
    claim_attach(claim, connection);
}

static void on_bye(struct connection *connection, const struct ep_attach_frame *bye)
{
    struct claim *claim = connection->claim;

    connection_close(connection);
    claim_bye(claim, bye->epoch);
}

static void on_promise(struct connection *connection, const struct ep_attach_frame *promise)
{
    ep_membership_promise(connection->claim->membership, promise->count, promise->status == EP_OK, promise->value,
                          promise->offset);
}

static void on_misplaced(struct connection *connection, const struct ep_attach_frame *frame)
{
    struct ep_error error = EP_ERROR_INIT;

    ep_error_set(&error, EP_PROTOCOL, "frame type is %u: %s", frame->type,
                 connection->state == CONNECTION_SILENT ? "HELLO comes first"
                                                        : "only REGISTER, UNREGISTER, PROMISE and BYE may follow HELLO");
    bad_frame(connection, &error);
}

/* fd: what came with it is REGISTER's alone. */
static void on_frame(struct connection *connection, const struct ep_attach_frame *frame, int fd)
{
    const bool attached = connection->state == CONNECTION_ATTACHED;
    const bool greeted = attached || connection->state == CONNECTION_JOINING;

    if (attached && frame->type == EP_ATTACH_REGISTER) {
        on_register(connection, frame, fd);
        return;
    }
    if (fd >= 0)
        close(fd);
    if (connection->state == CONNECTION_SILENT && frame->type == EP_ATTACH_HELLO)
        on_hello(connection, frame);
    else if (attached && frame->type == EP_ATTACH_UNREGISTER)
        on_unregister(connection, frame);
    else if (greeted && frame->type == EP_ATTACH_BYE)
        on_bye(connection, frame);
    else if (attached && frame->type == EP_ATTACH_PROMISE)
        on_promise(connection, frame);
    else
        on_misplaced(connection, frame);
}

static void on_lost(struct connection *connection)
{
    struct claim *claim = connection->claim;

    if (connection->state == CONNECTION_SILENT)
        connection->attach->counters.silent++;
    connection_close(connection);
    if (claim)
        claim_disconnected(claim, "its worker's connection closed without a goodbye");
}

static void on_readable(struct connection *connection)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_attach_frame frame;
    int fd;
    ep_status status = ep_attach_receive(connection->fd, &frame, &fd, &error);

    if (status == EP_OK) /* else there is no descriptor */
        on_frame(connection, &frame, fd);
    else if (status == EP_PROTOCOL)
        bad_frame(connection, &error);
    else if (status != EP_UNAVAILABLE)
        on_lost(connection);
}

/* Memory first: events are about peers whose windows the worker has. */
static void flush(struct connection *connection)
{
    struct ep_error error = EP_ERROR_INIT;

    if (connection->memory == connection->memories)
        flush_events(connection);
    else if (send_memories(connection, &error) != EP_OK)
        give_up(connection, &error);
}

/*
 * The worker closed with something of ours unread: the socket is in error, and what it said before, BYE
 * as a rule, is still there to be read.
 */
static void on_reset(struct connection *connection)
{
    on_readable(connection);
    if (connection->state != CONNECTION_CLOSED)
        on_lost(connection);
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
    struct connection *connection = poll->data;

    if (status < 0) {
        on_reset(connection);
        return;
    }
    if (events & UV_WRITABLE)
        flush(connection);
    if (events & UV_READABLE && connection->state != CONNECTION_CLOSED)
        on_readable(connection);
}

/* Timers go before sockets: after a standstill of this process the HELLO may be there, unread. */
static void on_deadline(uv_timer_t *timer)
{
    struct connection *connection = timer->data;

    on_readable(connection);
    if (connection->state != CONNECTION_SILENT)
        return;
    connection->attach->counters.silent++;
    connection_close(connection);
}

/* ---- accept ---------------------------------------------------------------------- */

/* A newcomer pushes out who has been silent the longest; real workers speak at once. */
static bool make_room(struct ep_attach *attach)
{
    return attach->n_connections < attach->max_connections || connection_drop_silent(attach);
}

static ep_status admit(struct ep_attach *attach, int fd, struct ucred *peer, struct ep_error *error)
{
    socklen_t size = sizeof *peer;

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, peer, &size) < 0)
        return ep_error_errno(error, EP_IO, "credentials of the worker");
    if (attach->is_allowed && !attach->is_allowed(peer->uid, peer->gid, attach->user))
        return ep_error_set(error, EP_PERMISSION_DENIED, "uid %u, gid %u may not attach to this server",
                            peer->uid, peer->gid);
    if (!make_room(attach))
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED, "the server has %u connections: no more are let in",
                            attach->n_connections);
    return EP_OK;
}

static ep_status open_handles(struct connection *connection, struct ep_error *error)
{
    struct ep_attach *attach = connection->attach;
    int rc = uv_poll_init(attach->loop, &connection->poll, connection->fd);

    if (rc < 0)
        return ep_error_set(error, EP_IO, "poll a connection: %s", uv_strerror(rc));
    uv_timer_init(attach->loop, &connection->deadline);
    connection->handles = 2;
    attach_handle_opened(attach);
    attach_handle_opened(attach);
    connection->poll.data = connection->deadline.data = connection;
    return EP_OK;
}

void connection_accept(struct ep_attach *attach, int fd)
{
    struct ep_error error = EP_ERROR_INIT;
    struct connection *connection = NULL;
    struct ucred peer;

    if (admit(attach, fd, &peer, &error) != EP_OK)
        goto refused;
    connection = calloc(1, sizeof *connection);
    if (!connection) {
        ep_error_set(&error, EP_NO_MEMORY, "no memory for a connection");
        goto refused;
    }
    connection->attach = attach;
    connection->fd = fd;
    connection->pid = peer.pid;
    connection->uid = peer.uid;
    if (open_handles(connection, &error) != EP_OK)
        goto refused;
    link_newest(connection);
    uv_timer_start(&connection->deadline, on_deadline, attach->hello_timeout_ms, 0);
    watch(connection);
    return;

refused:
    attach->counters.refused++;
    send_refusal(fd, &error);
    free(connection);
    close(fd);
}
