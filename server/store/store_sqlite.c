/* The sqlite store: one process, so that its watches see its own writes and its sessions live as long as it. */
#include "store_private.h"

#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "sqlite_db.h"

/* What a watch that asks for older changes can still get; past that it gets the whole. */
#define HISTORY_RECORDS 1024
#define HISTORY_BYTES   (4u << 20)

/* The store's thread owns all of it. */
struct sqlite_store {
    struct ep_sqlite_db *db;
    struct ep_watch *watches;
    int64_t sessions; /* the newest one's number */
    struct ep_record_list history;
    size_t history_bytes;
    uint64_t forgotten; /* changes after this revision are all in history */
    uint64_t revision;  /* of the last commit */
    bool behind;        /* a watch waits for its whole, and the log says so */
};

/* ---- history --------------------------------------------------------------------------- */

static void forget_all(struct sqlite_store *store, uint64_t revision)
{
    ep_record_list_clear(&store->history);
    store->history_bytes = 0;
    store->forgotten = revision;
}

static bool below(const char *key, const char *prefix)
{
    return strncmp(key, prefix, strlen(prefix)) == 0;
}

/* Adds what of `from` is below the prefix and newer than since. */
static bool select_changes(struct ep_record_list *to, const struct ep_record_list *from, const char *prefix,
                           uint64_t since)
{
    for (size_t i = 0; i < from->n; i++) {
        const struct ep_record *r = &from->records[i];

        if (r->revision > since && below(r->key, prefix) &&
            !ep_record_list_add(to, r->key, r->value, r->size, r->revision))
            return false;
    }
    return true;
}

/* When it is full all of it goes: watches that are open have had it, and a later one gets the whole. */
static void remember(struct sqlite_store *store, const struct ep_record_list *changes)
{
    size_t bytes = 0;

    for (size_t i = 0; i < changes->n; i++)
        bytes += changes->records[i].size;
    store->history_bytes += bytes;
    if (store->history.n + changes->n > HISTORY_RECORDS || store->history_bytes > HISTORY_BYTES ||
        !select_changes(&store->history, changes, "", 0))
        forget_all(store, store->revision);
}

/* ---- watches --------------------------------------------------------------------------- */

/* No memory: what follows would have a gap, so the watch is told the whole, as soon as that can be had. */
static void tell_whole(struct sqlite_store *store, struct ep_watch *watch)
{
    struct ep_record_list list = { 0 };
    struct ep_error error = EP_ERROR_INIT;

    if (ep_sqlite_db_list(store->db, watch->prefix, &list, &error)) {
        if (!store->behind)
            EP_ERROR("store", "a watch waits for its records", EP_S("error", error.text));
        watch->needs_whole = store->behind = true;
        return;
    }
    watch->needs_whole = false;
    watch->since = store->revision;
    store_tell_changes(watch, true, &list, store->revision);
}

static void catch_up(struct sqlite_store *store, struct ep_watch *watch)
{
    struct ep_record_list list = { 0 };

    if (watch->needs_whole || watch->since < store->forgotten || watch->since > store->revision) {
        tell_whole(store, watch);
    } else if (!select_changes(&list, &store->history, watch->prefix, watch->since)) {
        ep_record_list_clear(&list);
        tell_whole(store, watch);
    } else {
        watch->since = store->revision;
        if (list.n)
            store_tell_changes(watch, false, &list, store->revision);
    }
}

static bool catch_up_all(void *self)
{
    struct sqlite_store *store = self;
    bool behind = false;

    for (struct ep_watch *watch = store->watches; watch && store->behind; watch = watch->next) {
        if (watch->needs_whole)
            tell_whole(store, watch);
        behind |= watch->needs_whole;
    }
    store->behind = behind;
    return behind;
}

static void note_commit(struct sqlite_store *store, struct ep_record_list *changes, uint64_t revision)
{
    store->revision = revision;
    remember(store, changes);
    ep_record_list_clear(changes);
    for (struct ep_watch *watch = store->watches; watch; watch = watch->next)
        catch_up(store, watch);
}

static void watch(void *self, struct ep_watch *watch)
{
    struct sqlite_store *store = self;

    watch->next = store->watches;
    store->watches = watch;
    catch_up(store, watch);
}

static void unwatch(void *self, struct ep_watch *watch)
{
    struct sqlite_store *store = self;
    struct ep_watch **at = &store->watches;

    while (*at != watch)
        at = &(*at)->next;
    *at = watch->next;
}

/* ---- sessions: numbers, whose records sqlite_db keeps for this process only -------------- */

static ep_status begin_session(void *self, struct ep_session *session, uint64_t deadline,
                               struct ep_error *error)
{
    struct sqlite_store *store = self;

    (void)deadline;
    (void)error;
    session->lease = ++store->sessions;
    atomic_store(&session->valid_until, UINT64_MAX);
    return EP_OK;
}

static void end_session(void *self, struct ep_session *session, uint64_t deadline)
{
    struct sqlite_store *store = self;
    struct ep_record_list changes = { 0 };
    struct ep_error error = EP_ERROR_INIT;
    uint64_t revision = store->revision;

    (void)deadline;
    atomic_store(&session->valid_until, 0);
    if (ep_sqlite_db_end_session(store->db, session->lease, &changes, &revision, &error))
        EP_ERROR("store", "a session's records stay until the process ends", EP_S("error", error.text));
    else if (changes.n)
        note_commit(store, &changes, revision);
}

/* ---- records --------------------------------------------------------------------------- */

static ep_status list(void *self, const char *prefix, uint64_t deadline, struct ep_record_list *out,
                      struct ep_error *error)
{
    (void)deadline;
    return ep_sqlite_db_list(((struct sqlite_store *)self)->db, prefix, out, error);
}

static ep_status commit(void *self, const struct ep_store_write *writes, size_t n, uint64_t deadline,
                        uint64_t *revision, struct ep_error *error)
{
    struct sqlite_store *store = self;
    struct ep_record_list changes = { 0 };
    ep_status status = ep_sqlite_db_commit(store->db, writes, n, &changes, revision, error);

    (void)deadline;
    if (!status)
        note_commit(store, &changes, *revision);
    return status;
}

/* ---- opening and closing ----------------------------------------------------------------- */

static void close_sqlite(void *self)
{
    struct sqlite_store *store = self;

    ep_sqlite_db_close(store->db);
    ep_record_list_clear(&store->history);
    free(store);
}

ep_status ep_store_open_sqlite(uv_loop_t *loop, const char *path, struct ep_store **out,
                               struct ep_error *error)
{
    static const struct store_backend backend = {
        .list = list,
        .commit = commit,
        .watch = watch,
        .unwatch = unwatch,
        .begin_session = begin_session,
        .end_session = end_session,
        .catch_up = catch_up_all,
        .close = close_sqlite,
    };
    struct ep_sqlite_db *db;
    struct sqlite_store *store;
    ep_status status = ep_sqlite_db_open(path, &db, error);

    if (status)
        return status;
    store = store_allocate(1, sizeof *store);
    store->db = db;
    store->revision = store->forgotten = ep_sqlite_db_revision(db);
    return store_open(loop, &backend, store, 0, out, error);
}
