/*
 * The sqlite store: a queue of requests, one thread that works them off in order, and an async handle
 * that brings the answers back to the loop, in the same order.
 */
#include "ep_store.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "sqlite_db.h"

enum request_kind { REQUEST_LIST, REQUEST_COMMIT, REQUEST_STOP };

/* Filled by the loop's thread, answered by the store's, ended and freed by the loop's. */
struct request {
    struct request *next;
    enum request_kind kind;
    char *prefix;
    struct ep_store_write *writes; /* keys and values are copies */
    size_t n;
    union {
        ep_store_list_fn list;
        ep_store_write_fn write;
    } done;
    void *user;
    /* the answer */
    struct ep_error error;
    struct ep_record_list list;
    uint64_t revision;
};

struct queue {
    struct request *head, **tail;
};

struct ep_store {
    struct ep_sqlite_db *db; /* the store's thread */
    uv_async_t answered;
    uv_thread_t thread;
    pthread_mutex_t mutex; /* both queues */
    pthread_cond_t asked_some;
    struct queue asked, answers;
    /* the loop's thread */
    struct ep_error health;
    void (*on_closed)(void *user);
    void *user;
};

static void queue_init(struct queue *queue)
{
    queue->head = NULL;
    queue->tail = &queue->head;
}

static void queue_push(struct queue *queue, struct request *request)
{
    request->next = NULL;
    *queue->tail = request;
    queue->tail = &request->next;
}

static struct request *queue_pop(struct queue *queue)
{
    struct request *request = queue->head;

    if (request && !(queue->head = request->next))
        queue->tail = &queue->head;
    return request;
}

static void request_free(struct request *request)
{
    for (size_t i = 0; i < request->n; i++) {
        free((void *)(uintptr_t)request->writes[i].key);
        free((void *)(uintptr_t)request->writes[i].value);
    }
    ep_record_list_clear(&request->list);
    free(request->writes);
    free(request->prefix);
    free(request);
}

/* ---- the store's thread -------------------------------------------------------- */

static void work(struct ep_store *store, struct request *request)
{
    if (request->kind == REQUEST_LIST)
        (void)ep_sqlite_db_list(store->db, request->prefix, &request->list, &request->error);
    else if (request->kind == REQUEST_COMMIT && !request->error.status)
        (void)ep_sqlite_db_commit(store->db, request->writes, request->n, &request->revision,
                                  &request->error);
}

static void thread_main(void *arg)
{
    struct ep_store *store = arg;
    bool stop = false;

    while (!stop) {
        struct request *request;

        pthread_mutex_lock(&store->mutex);
        while (!(request = queue_pop(&store->asked)))
            pthread_cond_wait(&store->asked_some, &store->mutex);
        pthread_mutex_unlock(&store->mutex);
        stop = request->kind == REQUEST_STOP;
        work(store, request);
        pthread_mutex_lock(&store->mutex);
        queue_push(&store->answers, request);
        pthread_mutex_unlock(&store->mutex);
        uv_async_send(&store->answered);
    }
}

/* ---- the loop's thread --------------------------------------------------------- */

/* A revision that did not match says nothing about the disk; everything else does. */
static void note_health(struct ep_store *store, const struct ep_error *error)
{
    if (error->status == EP_FAILED_PRECONDITION)
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

static void answer(struct ep_store *store, struct request *request)
{
    switch (request->kind) {
    case REQUEST_LIST:
        request->done.list(&request->error, request->list.records, request->list.n, request->user);
        break;
    case REQUEST_COMMIT:
        note_health(store, &request->error);
        if (request->done.write)
            request->done.write(&request->error, request->revision, request->user);
        break;
    case REQUEST_STOP:
        uv_thread_join(&store->thread);
        ep_sqlite_db_close(store->db);
        uv_close((uv_handle_t *)&store->answered, closed);
        break;
    }
    request_free(request);
}

static void on_answered(uv_async_t *async)
{
    struct ep_store *store = async->data;

    for (;;) {
        struct request *request;

        pthread_mutex_lock(&store->mutex);
        request = queue_pop(&store->answers);
        pthread_mutex_unlock(&store->mutex);
        if (!request)
            return;
        answer(store, request);
    }
}

static void ask(struct ep_store *store, struct request *request)
{
    pthread_mutex_lock(&store->mutex);
    queue_push(&store->asked, request);
    pthread_cond_signal(&store->asked_some);
    pthread_mutex_unlock(&store->mutex);
}

static void *allocate(size_t n, size_t size)
{
    void *memory = calloc(n ? n : 1, size);

    if (!memory)
        abort(); /* a few bytes of bookkeeping: nothing sensible can go on without them */
    return memory;
}

static void *copy(const void *bytes, size_t size)
{
    void *memory = allocate(size ? size : 1, 1);

    if (size)
        memcpy(memory, bytes, size);
    return memory;
}

static struct request *request_new(enum request_kind kind, void *user)
{
    struct request *request = allocate(1, sizeof *request);

    request->kind = kind;
    request->user = user;
    return request;
}

void ep_store_list(struct ep_store *store, const char *prefix, ep_store_list_fn done, void *user)
{
    struct request *request = request_new(REQUEST_LIST, user);

    request->prefix = copy(prefix, strlen(prefix) + 1);
    request->done.list = done;
    ask(store, request);
}

void ep_store_commit(struct ep_store *store, const struct ep_store_write *writes, size_t n,
                     ep_store_write_fn done, void *user)
{
    struct request *request = request_new(REQUEST_COMMIT, user);

    request->writes = allocate(n, sizeof *writes);
    request->n = n;
    for (size_t i = 0; i < n; i++) {
        request->writes[i] = writes[i];
        request->writes[i].key = copy(writes[i].key, strlen(writes[i].key) + 1);
        request->writes[i].value = writes[i].value ? copy(writes[i].value, writes[i].size) : NULL;
    }
    request->done.write = done;
    ask(store, request);
}

ep_status ep_store_health(const struct ep_store *store, struct ep_error *error)
{
    if (error && store->health.status)
        *error = store->health;
    return store->health.status;
}

static ep_status start(uv_loop_t *loop, struct ep_store *store, struct ep_error *error)
{
    int rc = uv_async_init(loop, &store->answered, on_answered);

    if (rc)
        return ep_error_set(error, EP_INTERNAL, "store: cannot make its handle: %s", uv_strerror(rc));
    store->answered.data = store;
    rc = uv_thread_create(&store->thread, thread_main, store);
    if (rc) {
        uv_close((uv_handle_t *)&store->answered, closed);
        return ep_error_set(error, EP_INTERNAL, "store: cannot start its thread: %s", uv_strerror(rc));
    }
    return EP_OK;
}

ep_status ep_store_open_sqlite(uv_loop_t *loop, const char *path, struct ep_store **out,
                               struct ep_error *error)
{
    struct ep_sqlite_db *db;
    struct ep_store *store;
    ep_status status = ep_sqlite_db_open(path, &db, error);

    if (status)
        return status;
    store = allocate(1, sizeof *store);
    store->db = db;
    queue_init(&store->asked);
    queue_init(&store->answers);
    pthread_mutex_init(&store->mutex, NULL);
    pthread_cond_init(&store->asked_some, NULL);
    status = start(loop, store, error);
    if (status) {
        ep_sqlite_db_close(db);
        return status; /* the closing handle frees the store, where there is one */
    }
    *out = store;
    return EP_OK;
}

void ep_store_close(struct ep_store *store, void (*on_closed)(void *user), void *user)
{
    store->on_closed = on_closed;
    store->user = user;
    ask(store, request_new(REQUEST_STOP, NULL));
}
