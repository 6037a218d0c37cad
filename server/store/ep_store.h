/*
 * ep_store: small records that survive the process, with compare-and-swap and watches.
 *
 * One interface for every store: sqlite on a single node (store_sqlite.c), etcd for a cluster.
 * Calls return at once; the work is done elsewhere and the callback runs on the loop's thread, in
 * the order of the calls.  What a callback reports as done is durable.
 *
 * Keys are paths ("groups/moe/spec").  Every write gets a revision, greater than all before it.
 */
#ifndef EP_STORE_H
#define EP_STORE_H

#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#include "ep_error.h"

struct ep_store;

struct ep_record {
    const char *key;
    const void *value;
    size_t size;
    uint64_t revision; /* of the last write to this key */
};

#define EP_STORE_ANY    UINT64_MAX /* write whatever is there */
#define EP_STORE_ABSENT 0ull       /* write only if the key is not there */

/* records: n of them, valid during the call. */
typedef void (*ep_store_list_fn)(const struct ep_error *error, const struct ep_record *records, size_t n,
                                 void *user);
/* revision of the write; EP_FAILED_PRECONDITION: `expected` did not match. */
typedef void (*ep_store_write_fn)(const struct ep_error *error, uint64_t revision, void *user);

/* One step of a transaction: value NULL deletes. */
struct ep_store_write {
    const char *key;
    const void *value;
    size_t size;
    uint64_t expected; /* revision the key must have, EP_STORE_ANY or EP_STORE_ABSENT */
};

/* path: a file; made with mode 0600 if it is not there.  A file that is no store of ours, or of a
 * newer schema, is an error that says so. */
ep_status ep_store_open_sqlite(uv_loop_t *loop, const char *path, struct ep_store **out,
                               struct ep_error *error);

/* Finishes what was asked, then calls on_closed. */
void ep_store_close(struct ep_store *store, void (*on_closed)(void *user), void *user);

void ep_store_list(struct ep_store *store, const char *prefix, ep_store_list_fn done, void *user);

/* All or nothing.  Keys and values are copied. */
void ep_store_commit(struct ep_store *store, const struct ep_store_write *writes, size_t n,
                     ep_store_write_fn done, void *user);

/* Last known health: EP_OK, or why writes are refused at present (disk full, read-only ...). */
ep_status ep_store_health(const struct ep_store *store, struct ep_error *error);

#endif
