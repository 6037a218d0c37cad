/* Between store.c, which asks and answers, and the stores behind it. */
#ifndef EP_STORE_PRIVATE_H
#define EP_STORE_PRIVATE_H

#include <stdatomic.h>

#include "ep_clock.h"
#include "ep_store.h"

struct ep_record_list { /* owns keys and values */
    struct ep_record *records;
    size_t n, room;
};

/* Copies key and value.  False: no memory, and nothing has changed. */
bool ep_record_list_add(struct ep_record_list *list, const char *key, const void *value, size_t size,
                        uint64_t revision);
void ep_record_list_clear(struct ep_record_list *list);

/*
 * A store, as its own thread sees it: each call blocks, one at a time, and gives up by `deadline` (ep_clock_ns).
 * `self` is what was given to store_open().
 */
struct store_backend {
    bool shared; /* servers of other nodes may have it open as well */
    ep_status (*list)(void *self, const char *prefix, uint64_t deadline, struct ep_record_list *out,
                      struct ep_error *error);
    ep_status (*commit)(void *self, const struct ep_store_write *writes, size_t n, uint64_t deadline,
                        uint64_t *revision, struct ep_error *error);
    /* From here on store_tell_changes() may be called for it, until unwatch returns. */
    void (*watch)(void *self, struct ep_watch *watch);
    void (*unwatch)(void *self, struct ep_watch *watch);
    ep_status (*begin_session)(void *self, struct ep_session *session, uint64_t deadline,
                               struct ep_error *error);
    void (*end_session)(void *self, struct ep_session *session,
                        uint64_t deadline); /* also of one that is lost */
    /* Called when there was nothing else to do for probe_ms: would a write be taken?  NULL: not asked. */
    ep_status (*probe)(void *self, uint64_t deadline, struct ep_error *error);
    uint64_t probe_ms;
    /* Called after each request: tells watches what could not be told before.  True: it still cannot, and is called again
     * soon.  NULL: the store sees to that itself. */
    bool (*catch_up)(void *self);
    void (*close)(void *self);
};

struct ep_watch {
    /* the loop's */
    struct ep_store *store;
    ep_store_watch_fn fn;
    void *user;
    bool closed;
    /* the backend's */
    char *prefix;
    uint64_t since;
    bool needs_whole;
    void *state;
    struct ep_watch *next;
};

struct ep_session {
    /* the loop's */
    struct ep_store *store;
    ep_session_fn fn;
    void *user;
    bool closed, told_lost;
    /* the backend's */
    uint64_t ttl_ms;
    int64_t lease;
    void *state;
    _Atomic uint64_t valid_until; /* ep_clock_boot_ns; 0: not begun, or over.  The backend writes it */
};

/* Deadlines are answer_within_ms from the call on, also while it waits behind others. */
ep_status store_open(uv_loop_t *loop, const struct store_backend *backend, void *self,
                     uint32_t answer_within_ms, struct ep_store **out, struct ep_error *error);

uv_loop_t *store_loop(const struct ep_store *store);
bool store_is_closing(const struct ep_store *store);

/* Any thread.  list is taken over. */
void store_tell_changes(struct ep_watch *watch, bool whole, struct ep_record_list *list, uint64_t revision);
void store_tell_lost(struct ep_session *session, const struct ep_error *error);

/* "KEY is at revision N ..." ; revision 0: it is not there. */
ep_status store_say_mismatch(const struct ep_store_write *write, uint64_t revision, struct ep_error *error);
ep_status store_say_session_over(struct ep_error *error);

void *store_allocate(size_t n, size_t size); /* zeroed; ends the process when there is none */
char *store_copy_text(const char *text);

#endif
