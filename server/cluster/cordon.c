/* Draining a node: its record in the store says so, the node itself does it. */
#include <stdlib.h>
#include <string.h>

#include "cluster_private.h"

struct cordon_change {
    struct cordon_change *next;
    struct ep_cluster *cluster;
    char *name;
    bool cordon;
    uint64_t stored_ns; /* 0: not yet */
    ep_cluster_cordon_fn done; /* NULL: told */
    void *user;
};

static void unlink_change(struct cordon_change *change)
{
    struct cordon_change **at = &change->cluster->cordons;

    while (*at != change)
        at = &(*at)->next;
    *at = change->next;
}

static void end(struct cordon_change *change, const struct ep_error *error)
{
    ep_cluster_cordon_fn done = change->done;
    void *user = change->user;

    unlink_change(change);
    free(change->name);
    free(change);
    done(error, user);
}

/* Is it as was asked?  A node that is there has to say so itself. */
static bool is_done(const struct cordon_change *change)
{
    const struct entry *e = table_find(change->cluster, change->name);
    const Ep__V1__NodeInfo *info = e ? ep_cluster_info(change->cluster, &e->node) : NULL;

    if (!e)
        return !change->cordon;
    if (e->node.cordoned != change->cordon)
        return false;
    if (!e->node.alive)
        return true;
    return info && (info->state == EP__V1__NODE_STATE__NODE_STATE_STOPPING ||
                    (info->state == EP__V1__NODE_STATE__NODE_STATE_CORDONED) == change->cordon);
}

static bool is_late(const struct cordon_change *change)
{
    return ep_clock_ns() > change->stored_ns + APPLY_MS * EP_NS_PER_MS;
}

/* One at a time: done may change the list. */
static bool end_one(struct ep_cluster *c)
{
    struct ep_error error = EP_ERROR_INIT;
    struct cordon_change *change = c->cordons;

    while (change && !(change->stored_ns && (is_done(change) || is_late(change))))
        change = change->next;
    if (!change)
        return false;
    if (!is_done(change))
        ep_error_set(&error, EP_DEADLINE_EXCEEDED, "the store has it, but node %s has not said within %d ms that it %s",
                     change->name, APPLY_MS, change->cordon ? "is drained" : "takes work again");
    end(change, &error);
    return true;
}

void cordon_look(struct ep_cluster *c)
{
    while (end_one(c))
        ;
}

static void on_stored(const struct ep_error *error, uint64_t revision, void *user)
{
    struct cordon_change *change = user;
    struct ep_cluster *c = change->cluster;

    (void)revision;
    change->stored_ns = ep_clock_ns();
    if (error->status || c->state == MEMBER_LEFT)
        end(change, error);
    else
        cordon_look(c);
    cluster_release(c);
}

/* What the store is to have; for free(). */
static char *value_of(const char *reason, bool workers_stay, size_t *size)
{
    const size_t n = strlen(reason);
    char *value = cluster_allocate(n + 1 + sizeof CORDON_STAY);

    memcpy(value, reason, n);
    memcpy(value + n + 1, CORDON_STAY, sizeof CORDON_STAY - 1);
    *size = workers_stay ? n + sizeof CORDON_STAY : n;
    return value;
}

void ep_cluster_cordon(struct ep_cluster *c, const char *name, const char *reason, bool workers_stay,
                       ep_cluster_cordon_fn done, void *user)
{
    struct cordon_change *change = cluster_allocate(sizeof *change);
    struct ep_store_write writes[] = { { .expected = EP_STORE_ANY }, ep_cluster_mark() };
    char key[KEY_MAX], *value = reason ? value_of(reason, workers_stay, &writes[0].size) : NULL;

    *change = (struct cordon_change){ .next = c->cordons,
                                      .cluster = c,
                                      .name = cluster_copy(name),
                                      .cordon = reason != NULL,
                                      .done = done,
                                      .user = user };
    c->cordons = change;
    table_key(key, name, CORDON_SUFFIX);
    writes[0].key = key;
    writes[0].value = value;
    cluster_hold(c);
    ep_store_commit(c->options.store, writes, 2, on_stored, change);
    free(value);
}

/* What is stored is answered, whatever the node says; the rest is answered by the store. */
void cordon_close(struct ep_cluster *c)
{
    struct cordon_change *change = c->cordons, *next;
    struct ep_error none = EP_ERROR_INIT;

    for (; change; change = next) {
        next = change->next;
        if (change->stored_ns)
            end(change, &none);
    }
}
