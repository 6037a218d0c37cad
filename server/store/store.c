/*
 * What all stores share: a queue of requests, one thread that works them off in order, and an async handle that
 * brings the answers, and what the store tells by itself, back to the loop.
 */
#include "store_private.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"

#define CATCH_UP_MS      100
#define ANSWER_WITHIN_MS 4500 /* less than the five seconds that ep-admin waits: it shall hear the cause */

enum message_kind {
    MESSAGE_LIST,
    MESSAGE_COMMIT,
    MESSAGE_WATCH,
    MESSAGE_UNWATCH,
    MESSAGE_SESSION,
    MESSAGE_END_SESSION,
    MESSAGE_STOP,
    /* not asked for: */
    MESSAGE_HEALTH,
    MESSAGE_CATCH_UP,
    MESSAGE_CHANGES,
    MESSAGE_LOST
};

/* Filled by the loop's thread, answered by the store's, ended and freed by the loop's. */
struct message {
    struct message *next;
    enum message_kind kind;
    uint64_t deadline;
    char *prefix;
    struct ep_store_write *writes; /* keys and values are copies */
    size_t n;
    struct ep_watch *watch;
    struct ep_session *session;
    union {
        ep_store_list_fn list;
        ep_store_write_fn write;
    } done;
    void *user;
    /* the answer */
    struct ep_error error;
    struct ep_record_list list;
    uint64_t revision;
    bool whole;
};

struct queue {
    struct message *head, **tail;
};

struct ep_store {
    const struct store_backend *backend;
    void *self; /* the backend's; the store's thread */
    bool behind; /* backend->catch_up has more to do; the store's thread */
    uint64_t answer_within_ns;
    uv_async_t answered;
    uv_thread_t thread;
    pthread_mutex_t mutex; /* both queues */
    pthread_cond_t asked_some;
    struct queue asked, answers;
    /* the loop's thread */
    struct ep_error health;
    size_t watches, sessions; /* open */
    bool closing;
    void (*on_closed)(void *user);
    void *user;
};

/* ---- memory -------------------------------------------------------------------------- */

void *store_allocate(size_t n, size_t size)
{
    void *memory = calloc(n ? n : 1, size ? size : 1);

    if (!memory)
        abort(); /* a few bytes of bookkeeping: nothing sensible can go on without them */
    return memory;
}

static void *copy(const void *bytes, size_t size)
{
    void *memory = store_allocate(size, 1);

    if (size)
        memcpy(memory, bytes, size);
    return memory;
}

char *store_copy_text(const char *text)
{
    return copy(text, strlen(text) + 1);
}

static bool make_room(struct ep_record_list *list)
{
    size_t room = list->room ? 2 * list->room : 16;
    struct ep_record *records =
        list->n < list->room ? list->records : realloc(list->records, room * sizeof *records);

    if (!records)
        return false;
    if (list->n == list->room)
        list->room = room;
    list->records = records;
    return true;
}

bool ep_record_list_add(struct ep_record_list *list, const char *key, const void *value, size_t size,
                        uint64_t revision)
{
    const size_t n = strlen(key) + 1, value_bytes = value ? size : 0;
    char *copy = make_room(list) ? malloc(n + value_bytes + 1) : NULL; /* the key, then the value: there are many of them */

    if (!copy)
        return false;
    memcpy(copy, key, n);
    if (value_bytes)
        memcpy(copy + n, value, value_bytes);
    list->records[list->n++] =
        (struct ep_record){ .key = copy, .value = value ? copy + n : NULL, .size = size, .revision = revision };
    return true;
}

void ep_record_list_clear(struct ep_record_list *list)
{
    for (size_t i = 0; i < list->n; i++)
        free((void *)(uintptr_t)list->records[i].key); /* with the value */
    free(list->records);
    *list = (struct ep_record_list){ 0 };
}

/* ---- words that all stores use ----------------------------------------------------------- */

ep_status store_say_mismatch(const struct ep_store_write *write, uint64_t revision, struct ep_error *error)
{
    if (!revision)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "%s is not in the store, revision %" PRIu64 " was expected", write->key,
                            write->expected);
    if (write->expected == EP_STORE_ABSENT)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "%s is in the store already, at revision %" PRIu64,
                            write->key, revision);
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "%s is at revision %" PRIu64 ", revision %" PRIu64 " was expected", write->key,
                        revision, write->expected);
}

ep_status store_say_session_over(struct ep_error *error)
{
    return ep_error_set(error, EP_FAILED_PRECONDITION, "the session that the record should go with is over");
}

/* ---- queues ------------------------------------------------------------------------------ */

static void queue_init(struct queue *queue)
{
    queue->head = NULL;
    queue->tail = &queue->head;
}

static void queue_push(struct queue *queue, struct message *message)
{
    message->next = NULL;
    *queue->tail = message;
    queue->tail = &message->next;
}

static struct message *queue_pop(struct queue *queue)
{
    struct message *message = queue->head;

    if (message && !(queue->head = message->next))
        queue->tail = &queue->head;
    return message;
}

static struct message *message_new(const struct ep_store *store, enum message_kind kind, void *user)
{
    struct message *message = store_allocate(1, sizeof *message);

    message->kind = kind;
    message->user = user;
    message->deadline = ep_clock_ns() + store->answer_within_ns;
    return message;
}

static void message_free(struct message *message)
{
    for (size_t i = 0; i < message->n; i++) {
        free((void *)(uintptr_t)message->writes[i].key);
        free((void *)(uintptr_t)message->writes[i].value);
    }
    ep_record_list_clear(&message->list);
    free(message->writes);
    free(message->prefix);
    free(message);
}

static void ask(struct ep_store *store, struct message *message)
{
    pthread_mutex_lock(&store->mutex);
    queue_push(&store->asked, message);
    pthread_cond_signal(&store->asked_some);
    pthread_mutex_unlock(&store->mutex);
}

static void tell(struct ep_store *store, struct message *message)
{
    pthread_mutex_lock(&store->mutex);
    queue_push(&store->answers, message);
    pthread_mutex_unlock(&store->mutex);
    uv_async_send(&store->answered);
}

/* ---- the store's thread ------------------------------------------------------------------ */

static bool session_over(const struct message *message)
{
    for (size_t i = 0; i < message->n; i++)
        if (message->writes[i].session && !ep_session_alive(message->writes[i].session))
            return true;
    return false;
}

static void work_commit(struct ep_store *store, struct message *m)
{
    if (m->n > EP_STORE_MAX_WRITES)
        ep_error_set(&m->error, EP_INVALID_ARGUMENT, "%zu writes in one commit: the store takes %d", m->n,
                     EP_STORE_MAX_WRITES);
    else if (session_over(m))
        (void)store_say_session_over(&m->error);
    else
        (void)store->backend->commit(store->self, m->writes, m->n, m->deadline, &m->revision, &m->error);
}

static void work(struct ep_store *store, struct message *m)
{
    const struct store_backend *backend = store->backend;

    switch (m->kind) {
    case MESSAGE_LIST: (void)backend->list(store->self, m->prefix, m->deadline, &m->list, &m->error); break;
    case MESSAGE_COMMIT: work_commit(store, m); break;
    case MESSAGE_WATCH: backend->watch(store->self, m->watch); break;
    case MESSAGE_UNWATCH: backend->unwatch(store->self, m->watch); break;
    case MESSAGE_SESSION:
        (void)backend->begin_session(store->self, m->session, m->deadline, &m->error);
        break;
    case MESSAGE_END_SESSION: backend->end_session(store->self, m->session, m->deadline); break;
    case MESSAGE_STOP: backend->close(store->self); break;
    case MESSAGE_HEALTH: (void)backend->probe(store->self, m->deadline, &m->error); break;
    case MESSAGE_CATCH_UP: break; /* as after each */
    case MESSAGE_CHANGES:
    case MESSAGE_LOST: break; /* never asked */
    }
}

/* How long to wait for a request; 0: for ever. */
static uint64_t patience_ms(const struct ep_store *store)
{
    if (store->behind)
        return CATCH_UP_MS;
    return store->backend->probe ? store->backend->probe_ms : 0;
}

/* The next request; what else is to be done when there is none for a while. */
static struct message *next_request(struct ep_store *store)
{
    const uint64_t ms = patience_ms(store);
    const struct timespec until = ep_clock_timespec(ep_clock_ns() + ms * EP_NS_PER_MS);
    struct message *message;
    int rc = 0;

    pthread_mutex_lock(&store->mutex);
    while (!(message = queue_pop(&store->asked)) && rc == 0)
        rc = ms ? pthread_cond_timedwait(&store->asked_some, &store->mutex, &until)
                : pthread_cond_wait(&store->asked_some, &store->mutex);
    pthread_mutex_unlock(&store->mutex);
    return message ? message : message_new(store, store->behind ? MESSAGE_CATCH_UP : MESSAGE_HEALTH, NULL);
}

static void thread_main(void *arg)
{
    struct ep_store *store = arg;
    bool stop = false;

    while (!stop) {
        struct message *message = next_request(store);

        stop = message->kind == MESSAGE_STOP;
        work(store, message);
        store->behind = !stop && store->backend->catch_up && store->backend->catch_up(store->self);
        tell(store, message);
    }
}

/* ---- what a store tells by itself: any thread ------------------------------------------- */

void store_tell_changes(struct ep_watch *watch, bool whole, struct ep_record_list *list, uint64_t revision)
{
    struct message *message = message_new(watch->store, MESSAGE_CHANGES, NULL);

    message->watch = watch;
    message->whole = whole;
    message->list = *list;
    message->revision = revision;
    *list = (struct ep_record_list){ 0 };
    tell(watch->store, message);
}

void store_tell_lost(struct ep_session *session, const struct ep_error *error)
{
    struct message *message = message_new(session->store, MESSAGE_LOST, NULL);

    message->session = session;
    message->error = *error;
    tell(session->store, message);
}

/* ---- the loop's thread --------------------------------------------------------------------- */

/* What was wrong with the request itself says nothing about the store; everything else does. */
static void note_health(struct ep_store *store, const struct ep_error *error)
{
    if (error->status == EP_FAILED_PRECONDITION || error->status == EP_INVALID_ARGUMENT)
        return;
    if (error->status && !store->health.status)
        EP_ERROR("store", "store refuses writes", EP_S("error", error->text));
    else if (!error->status && store->health.status)
        EP_INFO("store", "store accepts writes again");
    store->health = *error;
}

static void closed(uv_handle_t *handle)
{
    struct ep_store *store = handle->data;
    void (*on_closed)(void *user) = store->on_closed;
    void *user = store->user;

    pthread_cond_destroy(&store->asked_some);
    pthread_mutex_destroy(&store->mutex);
    free(store);
    if (on_closed)
        on_closed(user);
}

static void answer_changes(const struct message *m)
{
    const struct ep_store_changes changes = {
        .whole = m->whole, .records = m->list.records, .n = m->list.n, .revision = m->revision
    };

    if (!m->watch->closed)
        m->watch->fn(&changes, m->watch->user);
}

static void answer_session(const struct message *m)
{
    struct ep_session *session = m->session;

    if (session->closed || session->told_lost)
        return;
    session->told_lost = m->error.status != EP_OK;
    session->fn(&m->error, session->user);
}

static void free_watch(struct ep_watch *watch)
{
    free(watch->prefix);
    free(watch);
}

static void answer(struct ep_store *store, struct message *m)
{
    switch (m->kind) {
    case MESSAGE_LIST: m->done.list(&m->error, m->list.records, m->list.n, m->user); break;
    case MESSAGE_COMMIT:
        note_health(store, &m->error);
        if (m->done.write)
            m->done.write(&m->error, m->revision, m->user);
        break;
    case MESSAGE_HEALTH: note_health(store, &m->error); break;
    case MESSAGE_CATCH_UP:
    case MESSAGE_WATCH: break;
    case MESSAGE_CHANGES: answer_changes(m); break;
    case MESSAGE_UNWATCH: free_watch(m->watch); break;
    case MESSAGE_SESSION:
    case MESSAGE_LOST: answer_session(m); break;
    case MESSAGE_END_SESSION: free(m->session); break;
    case MESSAGE_STOP:
        uv_thread_join(&store->thread);
        uv_close((uv_handle_t *)&store->answered, closed);
        break;
    }
    message_free(m);
}

static void on_answered(uv_async_t *async)
{
    struct ep_store *store = async->data;

    for (;;) {
        struct message *message;

        pthread_mutex_lock(&store->mutex);
        message = queue_pop(&store->answers);
        pthread_mutex_unlock(&store->mutex);
        if (!message)
            return;
        answer(store, message);
    }
}

/* ---- asking ------------------------------------------------------------------------------ */

void ep_store_list(struct ep_store *store, const char *prefix, ep_store_list_fn done, void *user)
{
    struct message *message = message_new(store, MESSAGE_LIST, user);

    message->prefix = store_copy_text(prefix);
    message->done.list = done;
    ask(store, message);
}

void ep_store_commit(struct ep_store *store, const struct ep_store_write *writes, size_t n,
                     ep_store_write_fn done, void *user)
{
    struct message *message = message_new(store, MESSAGE_COMMIT, user);

    message->writes = store_allocate(n, sizeof *writes);
    message->n = n;
    for (size_t i = 0; i < n; i++) {
        message->writes[i] = writes[i];
        message->writes[i].key = store_copy_text(writes[i].key);
        message->writes[i].value = writes[i].value ? copy(writes[i].value, writes[i].size) : NULL;
    }
    message->done.write = done;
    ask(store, message);
}

bool ep_store_shared(const struct ep_store *store)
{
    return store->backend->shared;
}

ep_status ep_store_health(const struct ep_store *store, struct ep_error *error)
{
    if (error && store->health.status)
        *error = store->health;
    return store->health.status;
}

struct ep_watch *ep_watch_open(struct ep_store *store, const char *prefix, uint64_t since,
                               ep_store_watch_fn fn, void *user)
{
    struct ep_watch *watch = store_allocate(1, sizeof *watch);
    struct message *message = message_new(store, MESSAGE_WATCH, NULL);

    *watch = (struct ep_watch){ .store = store,
                                .fn = fn,
                                .user = user,
                                .prefix = store_copy_text(prefix),
                                .since = since,
                                .needs_whole = since == EP_STORE_BEGIN };
    store->watches++;
    message->watch = watch;
    ask(store, message);
    return watch;
}

/* Freed when its end comes back: by then whatever was told for it has passed. */
void ep_watch_close(struct ep_watch *watch)
{
    struct message *message = message_new(watch->store, MESSAGE_UNWATCH, NULL);

    watch->closed = true;
    watch->store->watches--;
    message->watch = watch;
    ask(watch->store, message);
}

struct ep_session *ep_session_open(struct ep_store *store, uint64_t ttl_ms, ep_session_fn fn, void *user)
{
    struct ep_session *session = store_allocate(1, sizeof *session);
    struct message *message = message_new(store, MESSAGE_SESSION, NULL);

    session->store = store;
    session->fn = fn;
    session->user = user;
    session->ttl_ms = ttl_ms;
    store->sessions++;
    message->session = session;
    ask(store, message);
    return session;
}

void ep_session_close(struct ep_session *session)
{
    struct message *message = message_new(session->store, MESSAGE_END_SESSION, NULL);

    session->closed = true;
    session->store->sessions--;
    message->session = session;
    ask(session->store, message);
}

bool ep_session_alive(const struct ep_session *session)
{
    return ep_clock_boot_ns() < atomic_load(&session->valid_until);
}

/* ---- opening and closing ----------------------------------------------------------------- */

static ep_status start(uv_loop_t *loop, struct ep_store *store, struct ep_error *error)
{
    int rc = uv_async_init(loop, &store->answered, on_answered);

    if (rc) {
        free(store);
        return ep_error_set(error, EP_INTERNAL, "store: cannot make its handle: %s", uv_strerror(rc));
    }
    store->answered.data = store;
    rc = uv_thread_create(&store->thread, thread_main, store);
    if (rc) {
        uv_close((uv_handle_t *)&store->answered, closed); /* frees the store */
        return ep_error_set(error, EP_INTERNAL, "store: cannot start its thread: %s", uv_strerror(rc));
    }
    return EP_OK;
}

ep_status store_open(uv_loop_t *loop, const struct store_backend *backend, void *self,
                     uint32_t answer_within_ms, struct ep_store **out, struct ep_error *error)
{
    struct ep_store *store = store_allocate(1, sizeof *store);
    ep_status status;

    store->backend = backend;
    store->self = self;
    store->answer_within_ns = (answer_within_ms ? answer_within_ms : ANSWER_WITHIN_MS) * EP_NS_PER_MS;
    queue_init(&store->asked);
    queue_init(&store->answers);
    pthread_mutex_init(&store->mutex, NULL);
    ep_clock_condition(&store->asked_some);
    status = start(loop, store, error);
    if (status)
        backend->close(self);
    else
        *out = store;
    return status;
}

uv_loop_t *store_loop(const struct ep_store *store)
{
    return store->answered.loop;
}

bool store_is_closing(const struct ep_store *store)
{
    return store->closing;
}

void ep_store_close(struct ep_store *store, void (*on_closed)(void *user), void *user)
{
    assert(!store->watches && !store->sessions);
    store->closing = true;
    store->on_closed = on_closed;
    store->user = user;
    ask(store, message_new(store, MESSAGE_STOP, NULL));
}
