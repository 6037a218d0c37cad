/*
 * Elections, for both stores: the record of the key is written only where there is none, and goes with the
 * session of whoever wrote it.  Its revision is the term: commits of the leader ask for it.
 *
 * Who leads is read off the record, not off the answer to a campaign, which may be lost: the record would live on
 * with its session and let nobody else lead.  So its value is the name and, behind a NUL, the number of the session,
 * which no other session that lives has: what a server of old with the same name has left is another's.
 *
 * Two sides never lead by one record: it is of one campaign, which found none there, and only the side whose session
 * that campaign named takes it for its own, however it comes to know of it.  Nor by two: when the later one was
 * written the earlier one was gone, and no commit that asks for the earlier one's revision is done any more.
 */
#include "ep_store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store_private.h"

#define RETRY_MS 500 /* after a campaign that the store did not take */

/* The loop's thread owns it. */
struct ep_election {
    struct ep_store *store;
    struct ep_session *session;
    char *key, *name;
    char *value; /* of its record; NULL: it has not run yet */
    size_t n_value;
    ep_election_fn fn;
    void *user;
    struct ep_watch *watch;
    uv_timer_t retry;
    char *leader;  /* NULL: nobody */
    uint64_t held; /* revision of the record, 0: there is none */
    bool own;      /* and this side wrote it */
    uint64_t seen; /* what the watch has told is true of this revision */
    uint64_t won;  /* revision of the record by which this side leads, 0: it does not */
    uint64_t term; /* the latest of all that were held */
    bool campaigning, closed, told_leading;
    unsigned references; /* the handle, a commit under way */
};

static void settle(struct ep_election *e);

static void release(struct ep_election *e)
{
    if (--e->references)
        return;
    free(e->key);
    free(e->name);
    free(e->value);
    free(e->leader);
    free(e);
}

static bool is_own(const struct ep_election *e, const void *value, size_t size)
{
    return value && e->value && size == e->n_value && memcmp(value, e->value, size) == 0;
}

/* value NULL: nobody.  What is behind its name ends the text. */
static void set_leader(struct ep_election *e, const void *value, size_t size, uint64_t revision)
{
    free(e->leader);
    e->leader = NULL;
    if (value) {
        e->leader = store_allocate(size + 1, 1);
        memcpy(e->leader, value, size);
    }
    e->held = value ? revision : 0;
    e->own = is_own(e, value, size);
    if (e->held > e->term)
        e->term = e->held;
}

/* ---- running ----------------------------------------------------------------------------- */

static void resign(struct ep_election *e)
{
    const struct ep_store_write write = { .key = e->key, .expected = e->won };

    if (e->won)
        ep_store_commit(e->store, &write, 1, NULL, NULL);
    e->won = 0;
}

static void notify(struct ep_election *e, bool news)
{
    bool leading = e->won != 0;

    news = news || leading != e->told_leading;
    e->told_leading = leading;
    if (news)
        e->fn(e, leading, e->user);
}

static void on_retry(uv_timer_t *timer)
{
    struct ep_election *e = timer->data;

    settle(e);
    notify(e, false);
}

/* The watch may have told what came after before this answer is here. */
static void on_won(struct ep_election *e, uint64_t revision)
{
    bool news = e->seen < revision;

    e->won = revision;
    if (news)
        set_leader(e, e->value, e->n_value, revision);
    settle(e);
    notify(e, news);
}

static void on_campaigned(const struct ep_error *error, uint64_t revision, void *user)
{
    struct ep_election *e = user;

    e->campaigning = false;
    if (e->closed) {
        e->won = error->status ? 0 : revision; /* whatever it may have written goes with the session */
        if (!store_is_closing(e->store))       /* else that one's end takes the record */
            resign(e);
    } else if (error->status) {
        uv_timer_start(&e->retry, on_retry, RETRY_MS, 0); /* by then whoever holds it may be told */
    } else {
        on_won(e, revision);
    }
    release(e);
}

/* The session has begun: its number is there. */
static void set_value(struct ep_election *e)
{
    int n;

    if (e->value)
        return;
    n = asprintf(&e->value, "%s%c%016" PRIx64, e->name, '\0', (uint64_t)e->session->lease);
    if (n < 0)
        abort();
    e->n_value = (size_t)n;
}

static void campaign(struct ep_election *e)
{
    struct ep_store_write write = { .key = e->key, .expected = EP_STORE_ABSENT, .session = e->session };

    set_value(e);
    write.value = e->value;
    write.size = e->n_value;
    e->campaigning = true;
    e->references++;
    ep_store_commit(e->store, &write, 1, on_campaigned, e);
}

/*
 * Acts on what is known; called when that has changed.  While a campaign is under way this side leads by no record:
 * so no lead goes over into the next without having been told as lost.
 */
static void settle(struct ep_election *e)
{
    e->won = e->own && !e->campaigning ? e->held : 0;
    if (!e->held && !e->campaigning && ep_session_alive(e->session))
        campaign(e);
}

/* The store was set back to an old copy: what came after that is not true any more, nor will it be told again. */
static bool is_set_back(const struct ep_election *e, const struct ep_store_changes *changes)
{
    return changes->whole && changes->revision < e->seen;
}

static void learn(struct ep_election *e, const struct ep_store_changes *changes)
{
    if (is_set_back(e, changes))
        e->seen = e->won = e->term = 0;
    if (changes->revision < e->seen || changes->revision < e->won)
        return; /* from before this side won */
    e->seen = changes->revision;
    if (changes->whole)
        set_leader(e, NULL, 0, 0);
    for (size_t i = 0; i < changes->n; i++) {
        const struct ep_record *r = &changes->records[i];

        if (strcmp(r->key, e->key) == 0 && r->revision >= e->won)
            set_leader(e, r->value, r->size, r->revision);
    }
}

static void on_changes(const struct ep_store_changes *changes, void *user)
{
    struct ep_election *e = user;
    uint64_t held = e->held;

    learn(e, changes);
    settle(e);
    notify(e, e->held != held);
}

/* ---- the interface ----------------------------------------------------------------------- */

struct ep_election *ep_election_open(struct ep_store *store, struct ep_session *session, const char *key,
                                     const char *name, ep_election_fn fn, void *user)
{
    struct ep_election *e = store_allocate(1, sizeof *e);

    *e = (struct ep_election){ .store = store,
                               .session = session,
                               .key = store_copy_text(key),
                               .name = store_copy_text(name),
                               .fn = fn,
                               .user = user,
                               .references = 1 };
    uv_timer_init(store_loop(store), &e->retry);
    e->retry.data = e;
    e->watch = ep_watch_open(store, key, EP_STORE_BEGIN, on_changes, e);
    return e;
}

static void on_timer_closed(uv_handle_t *handle)
{
    release(handle->data);
}

void ep_election_close(struct ep_election *e)
{
    e->closed = true;
    ep_watch_close(e->watch);
    resign(e);
    uv_close((uv_handle_t *)&e->retry, on_timer_closed);
}

bool ep_election_leads(const struct ep_election *e)
{
    return e->won && ep_session_alive(e->session);
}

const char *ep_election_leader(const struct ep_election *e)
{
    return e->leader;
}

uint64_t ep_election_term(const struct ep_election *e)
{
    return e->term > e->won ? e->term : e->won;
}

struct ep_store_write ep_election_guard(const struct ep_election *e)
{
    return (struct ep_store_write){
        .key = e->key,
        .expected = e->won ? e->won : INT64_MAX, /* no record has that one */
        .session = e->session,
        .check_only = true,
    };
}
