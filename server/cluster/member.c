/*
 * This node's own part: a session, the record that goes with it, and the election.
 *
 *   OUT -> APART -> BEGINS -> CLAIMS -> IN       a session, then the record of the node's name
 *   CLAIMS -> WAITS -> CLAIMS                    another's record is there, until it goes
 *   BEGINS, CLAIMS, WAITS, IN -> APART           the session is lost, or the store does not answer: again
 *   any -> LEFT
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster_private.h"
#include "ep_log.h"
#include "ep_message.h"

/* ---- the record -------------------------------------------------------------------------- */

/* What others shall know; malloc'ed.  Whether the store answers here is nothing that it could tell. */
static uint8_t *pack_info(struct ep_cluster *c, size_t *size)
{
    Ep__V1__NodeRecord record = EP__V1__NODE_RECORD__INIT;
    Ep__V1__NodeInfo info;
    uint8_t *bytes;

    ep_node_info(c->options.node, &info);
    if (c->options.describe)
        c->options.describe(&info, c->options.user);
    info.store_error[0] = '\0';
    record.boot_us = info.started_us;
    record.address = info.admin_address;
    record.info.data = ep_message_pack(&info.base, &record.info.len);
    bytes = ep_message_pack(&record.base, size);
    free(record.info.data);
    ep_node_info_clear(&info);
    return bytes;
}

static void write_info(struct ep_cluster *c, uint64_t expected, ep_store_write_fn done, uint8_t *bytes, size_t size)
{
    char key[KEY_MAX];
    struct ep_store_write write = {
        .key = key, .value = bytes, .size = size, .expected = expected, .session = c->session
    };

    table_key(key, ep_node_name(c->options.node), SERVER_SUFFIX);
    free(c->written);
    c->written = bytes;
    c->n_written = size;
    cluster_hold(c);
    ep_store_commit(c->options.store, &write, 1, done, c);
}

/* ---- apart ------------------------------------------------------------------------------- */

static void end_session(struct ep_cluster *c)
{
    if (c->election)
        ep_election_close(c->election);
    if (c->session)
        ep_session_close(c->session);
    c->election = NULL;
    c->session = NULL;
}

/* A store that cannot be reached may come; one that refuses this server, or does not understand it, stays as it is. */
static bool may_pass(const struct ep_error *error)
{
    const bool is_away = error->status == EP_UNAVAILABLE || error->status == EP_DEADLINE_EXCEEDED;

    return (is_away && !ep_rpc_hints_at_tls(error)) || error->status == EP_FAILED_PRECONDITION; /* the session ended */
}

/* Said once: it is tried again at every tick. */
static void wait_for_store(struct ep_cluster *c, const struct ep_error *error)
{
    if (!c->late.status && !c->told_ready)
        EP_WARN(CLUSTER_MODULE, "waiting for the store to take this server up", EP_S("error", error->text));
    c->late = *error;
}

static void fall_apart(struct ep_cluster *c, const struct ep_error *error)
{
    bool was_in = c->state == MEMBER_IN;

    end_session(c);
    c->state = MEMBER_APART;
    if (!was_in && may_pass(error))
        wait_for_store(c, error);
    else if (!was_in)
        cluster_fail(c, error);
    if (!was_in)
        return;
    EP_WARN(CLUSTER_MODULE, "not registered any more, trying again", EP_S("error", error->text));
    grace_begin(c);
    cluster_tell(c, EP_CLUSTER_SESSION, NULL);
    cluster_tell(c, EP_CLUSTER_LEADER, NULL);
}

/* ---- in ------------------------------------------------------------------------------------- */

static void on_election(struct ep_election *election, bool leading, void *user)
{
    struct ep_cluster *c = user;
    const char *leader = ep_election_leader(election);

    EP_INFO(CLUSTER_MODULE, leader ? "leader" : "no leader", EP_S("leader", leader ? leader : ""),
            EP_S("this_server", leading ? "leads" : "follows"));
    cluster_tell(c, EP_CLUSTER_LEADER, NULL);
    cluster_check_ready(c);
}

static void be_in(struct ep_cluster *c, uint64_t revision)
{
    c->state = MEMBER_IN;
    c->registered = revision;
    c->told_clash = false;
    c->late = (struct ep_error)EP_ERROR_INIT;
    grace_limit(c);
    c->election = ep_election_open(c->options.store, c->session, LEADER_KEY, ep_node_name(c->options.node),
                                   on_election, c);
    EP_INFO(CLUSTER_MODULE, "registered", EP_S("node", ep_node_name(c->options.node)));
    cluster_tell(c, EP_CLUSTER_SESSION, NULL);
    cluster_check_ready(c);
}

/* ---- the name ------------------------------------------------------------------------------- */

/* The record of this server, not of another one or of what it was before a restart? */
static bool is_own(const struct ep_cluster *c, const struct entry *e)
{
    return e && e->server && e->node.boot == ep_node_boot(c->options.node);
}

static void say_clash(const struct ep_cluster *c, struct ep_error *error)
{
    const struct entry *e = table_self(c);
    const Ep__V1__NodeInfo *info = e ? ep_cluster_info(c, &e->node) : NULL;

    ep_error_set(error, EP_ALREADY_EXISTS,
                 "name is \"%s\": another server of this store has that name: it is at %s, pid %" PRId64
                 " there, on %s; give one of them another name",
                 ep_node_name(c->options.node), info && *info->admin_address ? info->admin_address : "?",
                 info ? info->pid : 0, info ? info->kernel : "?");
}

/* A server that died leaves its record for as long as its lease lasts; one that lives keeps it. */
static bool has_waited(const struct ep_cluster *c)
{
    return ep_clock_ns() >= c->waits_since + 2 * ep_cluster_lost_ms(c) * EP_NS_PER_MS;
}

/*
 * The store has just said that the name is taken.  One that was in before ends as well as one that begins: its node's
 * place is the other's now, and as it is not registered it would take no server for gone any more (grace_begin()).
 */
static void check_clash(struct ep_cluster *c)
{
    const struct entry *e = table_self(c);
    struct ep_error error;

    if (c->told_clash || !has_waited(c) || !e || !e->server || is_own(c, e))
        return;
    c->told_clash = true;
    say_clash(c, &error);
    if (!c->told_ready)
        cluster_fail(c, &error);
    else if (c->options.on_replaced)
        c->options.on_replaced(&error, c->options.user);
}

static void wait_for_name(struct ep_cluster *c)
{
    c->state = MEMBER_WAITS;
    if (!c->waits_since) {
        c->waits_since = ep_clock_ns();
        EP_INFO(CLUSTER_MODULE, "waiting for the name: a server of old has it, or another one",
                EP_S("node", ep_node_name(c->options.node)));
    }
    check_clash(c);
}

static void on_claimed(const struct ep_error *error, uint64_t revision, void *user)
{
    struct ep_cluster *c = user;

    if (c->state == MEMBER_CLAIMS) {
        if (!error->status)
            be_in(c, revision);
        else if (error->status == EP_FAILED_PRECONDITION && ep_session_alive(c->session))
            wait_for_name(c);
        else
            fall_apart(c, error);
    }
    cluster_release(c);
}

/* Its own record, of a session that was lost, is taken over. */
static uint64_t revision_to_claim(const struct ep_cluster *c)
{
    const struct entry *e = table_self(c);

    return is_own(c, e) ? e->server : EP_STORE_ABSENT;
}

static void claim(struct ep_cluster *c)
{
    size_t size;
    uint8_t *bytes = pack_info(c, &size);

    c->state = MEMBER_CLAIMS;
    c->claimed = revision_to_claim(c);
    write_info(c, c->claimed, on_claimed, bytes, size);
}

/* ---- the session ---------------------------------------------------------------------------- */

static void on_session(const struct ep_error *error, void *user)
{
    struct ep_cluster *c = user;

    if (error->status)
        fall_apart(c, error);
    else
        claim(c);
}

static void begin(struct ep_cluster *c)
{
    c->state = MEMBER_BEGINS;
    c->waits_since = 0;
    c->session = ep_session_open(c->options.store, c->options.ttl_ms, on_session, c);
}

/* ---- renewal -------------------------------------------------------------------------------- */

static void on_renewed(const struct ep_error *error, uint64_t revision, void *user)
{
    struct ep_cluster *c = user;

    c->writing = false;
    if (error->status)
        c->n_written = 0; /* again, at the next tick */
    else if (c->state == MEMBER_IN)
        c->registered = revision;
    cluster_release(c);
}

static void renew(struct ep_cluster *c)
{
    size_t size;
    uint8_t *bytes;

    if (c->state != MEMBER_IN || c->writing)
        return;
    bytes = pack_info(c, &size);
    if (size == c->n_written && !memcmp(bytes, c->written, size)) {
        free(bytes);
        return;
    }
    c->writing = true;
    write_info(c, c->registered, on_renewed, bytes, size);
}

void ep_cluster_refresh(struct ep_cluster *c)
{
    renew(c);
}

/* ---- what the others call ------------------------------------------------------------------- */

/* While the name is another's: is it free now, or will it never be?  The store has to say, as the table may be old. */
static void look_for_name(struct ep_cluster *c)
{
    const struct entry *e = table_self(c);

    if (!e || !e->server || revision_to_claim(c) != c->claimed || (has_waited(c) && !c->told_clash))
        claim(c);
}

/* While it is this one's: somebody may have deleted it, or a renewal be there whose answer was lost. */
static void look_for_record(struct ep_cluster *c)
{
    static const struct ep_error gone = { EP_NOT_FOUND, "its record in the store was deleted or replaced" };
    const struct entry *e = table_self(c);

    if (c->view < c->registered)
        return;
    if (is_own(c, e))
        c->registered = e->server;
    else
        fall_apart(c, &gone);
}

/* An old record of its own is written anew at the next tick, and that there is none is seen at once. */
void member_set_back(struct ep_cluster *c)
{
    c->registered = 0;
    c->n_written = 0;
}

void member_look(struct ep_cluster *c)
{
    if (c->state == MEMBER_WAITS)
        look_for_name(c);
    else if (c->state == MEMBER_IN)
        look_for_record(c);
}

void member_tick(struct ep_cluster *c)
{
    switch (c->state) {
    case MEMBER_APART: begin(c); break;
    case MEMBER_WAITS: look_for_name(c); break;
    case MEMBER_IN: renew(c); break;
    case MEMBER_OUT:
    case MEMBER_BEGINS:
    case MEMBER_CLAIMS:
    case MEMBER_LEFT: break;
    }
}

void ep_cluster_join(struct ep_cluster *c)
{
    if (c->state != MEMBER_OUT)
        return;
    c->joined_ns = ep_clock_ns();
    begin(c);
}

void member_leave(struct ep_cluster *c)
{
    end_session(c);
    c->state = MEMBER_LEFT;
}

/* ---- lead and session ----------------------------------------------------------------------- */

uint64_t ep_cluster_lost_ms(const struct ep_cluster *c)
{
    return c->options.ttl_ms + ELECTION_MS;
}

bool ep_cluster_leads(const struct ep_cluster *c)
{
    return c->election && ep_election_leads(c->election);
}

const char *ep_cluster_leader(const struct ep_cluster *c)
{
    return c->election ? ep_election_leader(c->election) : NULL;
}

uint64_t ep_cluster_term(const struct ep_cluster *c)
{
    return c->election ? ep_election_term(c->election) : 0;
}

struct term_asked {
    struct ep_cluster *cluster;
    ep_cluster_term_fn done;
    void *user;
};

static void on_term(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    struct term_asked asked = *(struct term_asked *)user;
    uint64_t term = 0;

    free(user);
    for (size_t i = 0; i < n; i++)
        if (!strcmp(records[i].key, LEADER_KEY))
            term = records[i].revision;
    asked.done(error, term, asked.user);
    cluster_release(asked.cluster);
}

void ep_cluster_ask_term(struct ep_cluster *c, ep_cluster_term_fn done, void *user)
{
    struct term_asked *asked = cluster_allocate(sizeof *asked);

    *asked = (struct term_asked){ .cluster = c, .done = done, .user = user };
    cluster_hold(c);
    ep_store_list(c->options.store, LEADER_KEY, on_term, asked);
}

struct ep_store_write ep_cluster_guard(const struct ep_cluster *c)
{
    struct ep_store_write guard = { .expected = INT64_MAX, .check_only = true }; /* no record has that revision */

    if (c->election)
        guard = ep_election_guard(c->election);
    guard.key = LEADER_KEY;
    return guard;
}

struct ep_session *ep_cluster_session(const struct ep_cluster *c)
{
    return c->state == MEMBER_IN && ep_session_alive(c->session) ? c->session : NULL;
}
