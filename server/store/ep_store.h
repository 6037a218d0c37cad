/*
 * ep_store: small records that survive the process, with compare-and-swap, watches, sessions and elections.
 *
 * One interface for every store: sqlite on a single node (store_sqlite.c), etcd for a cluster (store_etcd.c).
 * Calls return at once; the work is done elsewhere and the callback runs on the loop's thread, in
 * the order of the calls.  What a callback reports as done is durable.  Every call is answered: on etcd
 * within a time (answer_within_ms), with an error when nobody there could be reached.
 *
 * Keys are paths ("groups/moe/spec"); those that begin with '.' are the store's own.  Every write gets a
 * revision, greater than all before it.
 */
#ifndef EP_STORE_H
#define EP_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#include "ep_error.h"

struct ep_store;
struct ep_session;

struct ep_record {
    const char *key;
    const void *value; /* in a watch, NULL: it was deleted */
    size_t size;
    uint64_t revision; /* of the last write to this key */
};

#define EP_STORE_ANY    UINT64_MAX /* write whatever is there */
#define EP_STORE_ABSENT 0ull       /* write only if the key is not there */

/* What one commit takes: etcd's own limit is 128 operations. */
#define EP_STORE_MAX_WRITES 100

/* records: n of them, valid during the call. */
typedef void (*ep_store_list_fn)(const struct ep_error *error, const struct ep_record *records, size_t n,
                                 void *user);
/* revision of the write; EP_FAILED_PRECONDITION: `expected` did not match, or a session is over. */
typedef void (*ep_store_write_fn)(const struct ep_error *error, uint64_t revision, void *user);

/* One step of a transaction: value NULL deletes.  A key stands in one step only. */
struct ep_store_write {
    const char *key;
    const void *value;
    size_t size;
    uint64_t expected;          /* revision the key must have, EP_STORE_ANY or EP_STORE_ABSENT */
    struct ep_session *session; /* the record goes when this ends; NULL: it stays */
    bool check_only;            /* nothing is written: the others need this revision */
};

/* ---- opening ------------------------------------------------------------------------- */

/* path: a file; made with mode 0600 if it is not there.  A file that is no store of ours, or of a
 * newer schema, is an error that says so. */
ep_status ep_store_open_sqlite(uv_loop_t *loop, const char *path, struct ep_store **out,
                               struct ep_error *error);

/* Strings are copied; NULL or "": not set. */
struct ep_store_etcd {
    const char *url; /* "etcd://HOST:PORT,HOST:PORT/PREFIX" (ep_store_url.h) */
    const char *ca;  /* PEM; any of the three set: TLS */
    const char *cert, *key;
    const char *user;
    const char *password_file; /* read at every login: a changed password needs no restart */
    uint32_t answer_within_ms; /* when nobody there can be reached; 0: 4500 */
};

/* Opens no connection: whether etcd answers is seen at the first call. */
ep_status ep_store_open_etcd(uv_loop_t *loop, const struct ep_store_etcd *options, struct ep_store **out,
                             struct ep_error *error);

/* Finishes what was asked, then calls on_closed.  Watches, sessions and elections are closed before. */
void ep_store_close(struct ep_store *store, void (*on_closed)(void *user), void *user);

/* ---- records ------------------------------------------------------------------------- */

void ep_store_list(struct ep_store *store, const char *prefix, ep_store_list_fn done, void *user);

/* All or nothing, and once: a write whose answer was lost is never done twice.  Keys and values are copied. */
void ep_store_commit(struct ep_store *store, const struct ep_store_write *writes, size_t n,
                     ep_store_write_fn done, void *user);

/* Last known health: EP_OK, or why writes are refused at present (disk full, etcd out of reach ...). */
ep_status ep_store_health(const struct ep_store *store, struct ep_error *error);

/* May servers of other nodes have it open as well? */
bool ep_store_shared(const struct ep_store *store);

/* ---- watching ------------------------------------------------------------------------ */

/*
 * What has changed below a prefix, in the order of the revisions, what one commit wrote never apart.
 * `whole` says that records are all that is there, and that what is not among them is gone: so begins
 * a watch from EP_STORE_BEGIN, and so it goes on when the store no longer has the changes in between.
 */
struct ep_store_changes {
    bool whole;
    const struct ep_record *records;
    size_t n;
    uint64_t revision; /* all until here is known now: `since` of a later watch */
};

typedef void (*ep_store_watch_fn)(const struct ep_store_changes *changes, void *user);

#define EP_STORE_BEGIN 0ull /* first what is there, then what changes */

/* Changes after revision `since`, each once, over breaks of the connection and restarts of the store. */
struct ep_watch *ep_watch_open(struct ep_store *store, const char *prefix, uint64_t since,
                               ep_store_watch_fn fn, void *user);
void ep_watch_close(struct ep_watch *watch); /* fn is not called again */

/* ---- sessions ------------------------------------------------------------------------ */

/*
 * A session says "this process is there": the store gives it a lease, kept alive from here.  On etcd it is over
 * when no renewal has got through for ttl_ms (rounded up to seconds, 2 at least), and this side knows before
 * anybody else can take its place, also after it was stopped for a while, or its machine was suspended.  On sqlite it
 * ends with the process.
 *
 * fn is told EP_OK once the session has begun, or why it could not; and once why it is lost.  After an error the
 * session does nothing more: close it and open another.
 */
typedef void (*ep_session_fn)(const struct ep_error *error, void *user);

struct ep_session *ep_session_open(struct ep_store *store, uint64_t ttl_ms, ep_session_fn fn, void *user);
void ep_session_close(struct ep_session *session);       /* its records go; fn is not called again */
bool ep_session_alive(const struct ep_session *session); /* right now, by the clock; any thread */

/* ---- elections ----------------------------------------------------------------------- */

struct ep_election;

/* leading has changed, or who leads.  A session that is lost is told by the session, and ends the lead at once. */
typedef void (*ep_election_fn)(struct ep_election *election, bool leading, void *user);

/*
 * Runs for the record `key`, with a text that tells others who leads, as long as the session lives.  One holds it
 * at a time; when it goes, the others run again.  The session outlives the election.
 */
struct ep_election *ep_election_open(struct ep_store *store, struct ep_session *session, const char *key,
                                     const char *name, ep_election_fn fn, void *user);
/* Gives the lead back; fn is not called again. */
void ep_election_close(struct ep_election *election);

bool ep_election_leads(const struct ep_election *election);         /* right now, by the clock */
const char *ep_election_leader(const struct ep_election *election); /* its name; NULL: nobody known */
/* The last term that this side knows of: revision of the record of whoever won; 0: none yet. */
uint64_t ep_election_term(const struct ep_election *election);

/*
 * For the commits of a leader: holds only while the lead that this side has won is still its own, by the store's
 * own order.  A former leader that does not know yet writes nothing.
 */
struct ep_store_write ep_election_guard(const struct ep_election *election);

#endif
