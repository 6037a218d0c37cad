/*
 * Nodes whose records may come back.
 *
 * A server that was away cannot tell whether the store was away for all: then the others' records go with their old
 * sessions, and come again with new ones.  So for some time a node whose record goes is asked itself, again and again: one
 * that answers is given that time, one that does not is gone.
 */
#include <stdlib.h>
#include <string.h>

#include "cluster_private.h"

void grace_begin(struct ep_cluster *c)
{
    c->grace_end = UINT64_MAX;
}

void grace_limit(struct ep_cluster *c)
{
    if (c->grace_end)
        c->grace_end = ep_clock_ns() + 2 * ep_cluster_lost_ms(c) * EP_NS_PER_MS;
}

bool grace_awaits(const struct ep_cluster *c, const struct entry *e)
{
    return !e->silent && ep_clock_ns() < c->grace_end;
}

/* ---- asking ------------------------------------------------------------------------------- */

struct question {
    struct ep_cluster *cluster;
    uint64_t boot;
    char node[]; /* by name: the entry may be another by now, or none */
};

static bool is_from(const Ep__V1__PingReply *pong, uint64_t boot)
{
    return pong && pong->boot_us == boot;
}

static void on_answer(const struct ep_error *error, const ProtobufCMessage *reply, void *user)
{
    struct question *question = user;
    struct ep_cluster *c = question->cluster;
    struct entry *e = table_find(c, question->node);

    (void)error; /* whatever it is, there was no answer */
    if (e) {
        e->asked = false;
        e->silent = !e->server && e->node.boot == question->boot &&
                    !is_from((const Ep__V1__PingReply *)reply, question->boot);
    }
    if (e && e->silent)
        table_settle(c);
    free(question);
}

/* What has no address cannot be asked, and is given all the time. */
void grace_ask(struct ep_cluster *c, struct entry *e)
{
    Ep__V1__PingRequest request = EP__V1__PING_REQUEST__INIT;
    const size_t n = strlen(e->node.name) + 1;
    struct question *question;

    if (c->state != MEMBER_IN || e->asked || !*e->node.address)
        return;
    question = cluster_allocate(sizeof *question + n);
    *question = (struct question){ .cluster = c, .boot = e->node.boot };
    memcpy(question->node, e->node.name, n);
    e->asked = true;
    request.node = question->node;
    ep_cluster_call_anew(c, question->node, &ep__v1__node__descriptor, "Ping", &request.base, AWAITED_MS, on_answer,
                         question);
}

/* Asks once more; at the end of the time, what has not come back is gone. */
void grace_tick(struct ep_cluster *c)
{
    if (!c->grace_end)
        return;
    if (ep_clock_ns() >= c->grace_end)
        c->grace_end = 0;
    table_settle(c);
}
