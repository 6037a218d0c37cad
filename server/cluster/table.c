/* The nodes, as the store has them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster_private.h"
#include "ep_log.h"
#include "ep_message.h"

/* ---- entries ----------------------------------------------------------------------------- */

/* The place of the name, or where it would be. */
static size_t place_of(const struct ep_cluster *c, const char *name)
{
    size_t low = 0, high = c->n_entries;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (strcmp(c->entries[middle]->node.name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct entry *table_find(const struct ep_cluster *c, const char *name)
{
    size_t at = place_of(c, name);

    return at < c->n_entries && !strcmp(c->entries[at]->node.name, name) ? c->entries[at] : NULL;
}

struct entry *table_self(const struct ep_cluster *c)
{
    return table_find(c, ep_node_name(c->options.node));
}

static struct entry *add_entry(struct ep_cluster *c, const char *name)
{
    size_t at = place_of(c, name);
    struct entry **entries = realloc(c->entries, (c->n_entries + 1) * sizeof *entries);
    struct entry *e = cluster_allocate(sizeof *e);

    if (!entries)
        abort();
    c->entries = entries;
    memmove(entries + at + 1, entries + at, (c->n_entries - at) * sizeof *entries);
    entries[at] = e;
    c->n_entries++;
    e->node.name = cluster_copy(name);
    e->node.address = "";
    e->node.reason = cluster_copy("");
    return e;
}

static void free_info(struct entry *e)
{
    if (e->info)
        ep__v1__node_info__free_unpacked(e->info, NULL);
    e->info = NULL;
}

static void free_record(Ep__V1__NodeRecord *record)
{
    if (record)
        ep__v1__node_record__free_unpacked(record, NULL);
}

static void free_entry(struct entry *e)
{
    call_close_channel(e);
    free_info(e);
    free_record(e->record);
    free_record(e->news);
    free((char *)(uintptr_t)e->node.name);
    free((char *)(uintptr_t)e->node.reason);
    free(e);
}

static void drop_entries(struct ep_cluster *c)
{
    size_t kept = 0;

    for (size_t i = 0; i < c->n_entries; i++)
        if (c->entries[i]->node.alive || c->entries[i]->cordon)
            c->entries[kept++] = c->entries[i];
        else
            free_entry(c->entries[i]);
    c->n_entries = kept;
}

void table_free(struct ep_cluster *c)
{
    for (size_t i = 0; i < c->n_entries; i++)
        free_entry(c->entries[i]);
    free(c->entries);
}

/* ---- one record -------------------------------------------------------------------------- */

void table_key(char key[KEY_MAX], const char *name, const char *suffix)
{
    snprintf(key, KEY_MAX, NODES_PREFIX "%s%s", name, suffix);
}

/* The name out of NODES_PREFIX NAME suffix. */
static bool parse_key(const char *key, const char *suffix, char *name, size_t size)
{
    const char *from = key + strlen(NODES_PREFIX), *end = strrchr(from, '/');

    if (!end || end == from || strcmp(end, suffix) || (size_t)(end - from) >= size)
        return false;
    snprintf(name, size, "%.*s", (int)(end - from), from);
    return true;
}

static void take_server(struct entry *e, const struct ep_record *record)
{
    Ep__V1__NodeRecord *news =
        record->value ? ep_message_unpack(&ep__v1__node_record__descriptor, record->size, record->value) : NULL;

    e->seen = record->value != NULL;
    e->server = news ? record->revision : 0;
    if (record->value && !news)
        EP_WARN(CLUSTER_MODULE, "a stored node cannot be read", EP_S("key", record->key));
    if (!news)
        return;
    free_record(e->news);
    e->news = news;
}

static void take_cordon(struct entry *e, const struct ep_record *record)
{
    char *reason = cluster_allocate(record->size + 1); /* zeroed: what comes behind its NUL ends too */

    if (record->size)
        memcpy(reason, record->value, record->size);
    free((char *)(uintptr_t)e->node.reason);
    e->node.reason = reason;
    e->node.cordoned = record->value != NULL;
    e->node.workers_stay = record->size > strlen(reason) && !strcmp(reason + strlen(reason) + 1, CORDON_STAY);
    e->cordon = record->value ? record->revision : 0;
    e->seen_cordon = record->value != NULL;
    e->changed = true;
}

typedef void (*take_fn)(struct entry *e, const struct ep_record *record);

/* NULL: a record of something else.  name has KEY_MAX bytes. */
static take_fn kind_of(const struct ep_record *record, char *name)
{
    if (parse_key(record->key, SERVER_SUFFIX, name, KEY_MAX))
        return take_server;
    return parse_key(record->key, CORDON_SUFFIX, name, KEY_MAX) ? take_cordon : NULL;
}

static void take_record(struct ep_cluster *c, const struct ep_record *record)
{
    char name[KEY_MAX];
    const take_fn take = kind_of(record, name);
    struct entry *e = take ? table_find(c, name) : NULL;

    if (take && (e || record->value))
        take(e ? e : add_entry(c, name), record);
}

/* What is not among the records of a whole is gone. */
static void forget_unseen(struct entry *e)
{
    static const struct ep_record gone = { .key = "" };

    if (!e->seen)
        e->server = 0;
    if (!e->seen_cordon && e->cordon)
        take_cordon(e, &gone);
}

/* ---- what has changed ----------------------------------------------------------------------- */

static bool is_self(const struct ep_cluster *c, const struct entry *e)
{
    return !strcmp(e->node.name, ep_node_name(c->options.node));
}

static void obey(struct ep_cluster *c, const struct entry *e)
{
    ep_node_cordon(c->options.node, e->node.cordoned, e->node.reason);
    ep_cluster_refresh(c);
}

/* Once up, this node stays: its record may be lost for a moment, it is not. */
static bool is_there(const struct ep_cluster *c, const struct entry *e)
{
    return e->server || (e->node.alive && (is_self(c, e) || grace_awaits(c, e)));
}

static void go_down(struct ep_cluster *c, struct entry *e)
{
    EP_INFO(CLUSTER_MODULE, "node gone", EP_S("node", e->node.name), EP_S("address", e->node.address));
    e->node.alive = false;
    call_close_channel(e);
    cluster_tell(c, EP_CLUSTER_NODE_DOWN, &e->node);
}

static void take_news(struct entry *e)
{
    if (e->record && strcmp(e->node.address, e->news->address))
        call_close_channel(e);
    free_info(e);
    free_record(e->record);
    e->record = e->news;
    e->node.boot = e->news->boot_us;
    e->node.address = e->news->address;
    e->news = NULL;
    e->changed = true;
}

static void come_up(struct ep_cluster *c, struct entry *e)
{
    EP_INFO(CLUSTER_MODULE, "node there", EP_S("node", e->node.name), EP_S("address", e->node.address));
    e->node.alive = true;
    e->changed = false;
    cluster_tell(c, EP_CLUSTER_NODE_UP, &e->node);
}

/* Tells what the records of a node have come to. */
static void settle(struct ep_cluster *c, struct entry *e)
{
    bool there = is_there(c, e);
    bool restarted = e->node.alive && e->news && e->news->boot_us != e->node.boot;

    if (e->changed && is_self(c, e))
        obey(c, e);
    if (e->node.alive && (!there || restarted))
        go_down(c, e);
    if (e->news)
        take_news(e);
    if (there && !e->node.alive)
        come_up(c, e);
    else if (e->changed)
        cluster_tell(c, EP_CLUSTER_NODE_CHANGED, &e->node);
    e->changed = false;
    if (e->server)
        e->silent = false;
    else if (there && !is_self(c, e))
        grace_ask(c, e);
}

void table_settle(struct ep_cluster *c)
{
    for (size_t i = 0; i < c->n_entries; i++)
        settle(c, c->entries[i]);
    drop_entries(c);
}

/* What has no news is as it was: in a large cluster most of it. */
static void settle_news(struct ep_cluster *c, const struct ep_store_changes *changes)
{
    bool gone = false;

    for (size_t i = 0; i < changes->n; i++) {
        char name[KEY_MAX];
        struct entry *e = kind_of(&changes->records[i], name) ? table_find(c, name) : NULL;

        if (!e)
            continue;
        settle(c, e);
        gone |= !e->node.alive;
    }
    if (gone)
        drop_entries(c);
}

static bool has_mark(const struct ep_store_changes *changes)
{
    for (size_t i = 0; i < changes->n; i++)
        if (!strcmp(changes->records[i].key, MARK_KEY))
            return true;
    return false;
}

static void on_changes(const struct ep_store_changes *changes, void *user)
{
    struct ep_cluster *c = user;

    for (size_t i = 0; changes->whole && i < c->n_entries; i++)
        c->entries[i]->seen = c->entries[i]->seen_cordon = false;
    for (size_t i = 0; i < changes->n; i++)
        take_record(c, &changes->records[i]);
    for (size_t i = 0; changes->whole && i < c->n_entries; i++)
        forget_unseen(c->entries[i]);
    c->whole = c->whole || changes->whole;
    if (changes->revision < c->view)
        member_set_back(c);
    c->view = changes->revision;
    if (changes->whole)
        table_settle(c);
    else
        settle_news(c, changes);
    member_look(c);
    cordon_look(c);
    cluster_check_ready(c);
    if (has_mark(changes))
        cluster_tell(c, EP_CLUSTER_MARK, NULL);
}

/* ---- life ------------------------------------------------------------------------------------ */

void table_open(struct ep_cluster *c)
{
    c->watch = ep_watch_open(c->options.store, NODES_PREFIX, EP_STORE_BEGIN, on_changes, c);
}

void table_close(struct ep_cluster *c)
{
    if (c->watch)
        ep_watch_close(c->watch);
    c->watch = NULL;
}

/* ---- reading --------------------------------------------------------------------------------- */

size_t ep_cluster_count(const struct ep_cluster *c)
{
    return c->n_entries;
}

const struct ep_cluster_node *ep_cluster_at(const struct ep_cluster *c, size_t index)
{
    return index < c->n_entries ? &c->entries[index]->node : NULL;
}

const struct ep_cluster_node *ep_cluster_find(const struct ep_cluster *c, const char *name)
{
    const struct entry *e = table_find(c, name);

    return e ? &e->node : NULL;
}

const Ep__V1__NodeInfo *ep_cluster_info(const struct ep_cluster *c, const struct ep_cluster_node *node)
{
    struct entry *e = table_find(c, node->name);

    if (e && e->record && !e->info)
        e->info = ep_message_unpack(&ep__v1__node_info__descriptor, e->record->info.len, e->record->info.data);
    return e ? e->info : NULL;
}

struct ep_store_write ep_cluster_mark(void)
{
    return (struct ep_store_write){ .key = MARK_KEY, .value = "", .expected = EP_STORE_ANY };
}

bool ep_cluster_knows(const struct ep_cluster *c, uint64_t revision)
{
    return c->view >= revision;
}

const char *ep_cluster_self(const struct ep_cluster *c)
{
    return ep_node_name(c->options.node);
}
