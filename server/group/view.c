/*
 * The watch of all groups' records.  A record that is there is the decision: here it is carried out, on every server
 * alike, whether it leads or not.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "ep_message.h"
#include "group_private.h"

/* PREFIX NAME "/" rest. */
struct key {
    char group[64];
    const char *rest; /* "spec", "status", "members/NODE", "history/NN" */
};

static bool parse(const char *text, struct key *key)
{
    const char *from = text + strlen(RECORDS_PREFIX), *slash = strchr(from, '/');

    if (!slash || (size_t)(slash - from) >= sizeof key->group)
        return false;
    snprintf(key->group, sizeof key->group, "%.*s", (int)(slash - from), from);
    key->rest = slash + 1;
    return ep_group_name_check(key->group, NULL) == EP_OK;
}

/* ---- specs ----------------------------------------------------------------------------- */

static const char unreadable[] = "its stored spec cannot be read: update every field, or delete it";

/* What cannot be read changes nothing of what runs; with nothing there it is a spec with nothing in it. */
static void take_spec(struct group *group, const struct ep_record *record)
{
    Ep__V1__Group *message = ep_message_unpack(&ep__v1__group__descriptor, record->size, record->value);

    group->revision = record->revision;
    if (message && message->spec) {
        if (group->asked)
            ep__v1__group_spec__free_unpacked(group->asked, NULL);
        group->asked = message->spec;
        message->spec = NULL;
    } else {
        EP_ERROR("group", "a stored spec cannot be read", EP_S("key", record->key));
    }
    if (message)
        ep__v1__group__free_unpacked(message, NULL);
    if (group->asked)
        return;
    group->asked = group_allocate(1, sizeof *group->asked);
    ep__v1__group_spec__init(group->asked);
}

/* Another group has the name now; this one still has to let go of its workers. */
static void replace(struct group *group)
{
    group->gone = group->replaced = true;
    if (group->phase != EP_PHASE(DRAINING))
        group_remove(group);
}

static void read_spec(struct ep_groups *groups, const char *name, const struct ep_record *record)
{
    struct group *group = group_find(groups, name);

    if (!record->value && group && group->visible)
        group->gone = true;
    if (!record->value)
        return;
    if (group && group->gone) {
        replace(group);
        group = NULL;
    }
    if (!group)
        group = group_new(groups, name);
    group->visible = true;
    group->seen = true;
    group->gone = false;
    take_spec(group, record);
}

/* ---- statuses: epochs -------------------------------------------------------------------- */

static void swap_settled(struct epoch *epoch, struct epoch *fresh)
{
    const struct ep_settled old = epoch->settled;

    /* Sizes and placement are the same; the team points into them, so they stay. */
    epoch->settled.spec = fresh->settled.spec;
    epoch->settled.notes = fresh->settled.notes;
    epoch->settled.n_notes = fresh->settled.n_notes;
    fresh->settled.spec = old.spec;
    fresh->settled.notes = old.notes;
    fresh->settled.n_notes = old.n_notes;
}

static void set_timeout(struct group *group, uint32_t timeout_ms)
{
    if (group->epoch->team)
        ep_team_set_timeout(group->epoch->team, timeout_ms);
    for (struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        if (epoch->team)
            ep_team_set_timeout(epoch->team, timeout_ms);
}

static void change_live(struct group *group, struct epoch *fresh)
{
    swap_settled(group->epoch, fresh);
    set_timeout(group, group->epoch->settled.spec->timeout_ms);
    epoch_free(fresh);
    status_changed(group);
}

/* Workers of the epoch before stay there until they leave. */
static void retire(struct group *group)
{
    struct epoch *old = group->epoch;

    group->epoch = NULL;
    if (!old)
        return;
    old->next = group->older;
    group->older = old;
    epoch_tell(old, NULL, false, EP_GROUP_EPOCH, 0, group->epoch_number, "a newer epoch is there");
}

static void put_into_service(struct group *group, struct epoch *fresh)
{
    retire(group);
    group->epoch = fresh;
    follow_anew(group);
    if (group->prepared && group->prepared->number <= fresh->number) /* else this server hears late */
        part_drop(group, "another epoch was agreed on");
    report_apply(group);
    if (epoch_whole(fresh) || group->phase != EP_PHASE(PENDING))
        group_formed(group);
    else
        group_phase(group, EP_PHASE_FORM, NULL);
    group_assess(group);
    report_changed(group);
    status_changed(group);
    group_later(group->groups);
    EP_INFO("group", "epoch in service", EP_S("group", group->name), EP_U("epoch", fresh->number),
            EP_B("served", epoch_whole(fresh)));
}

/* The part that was prepared for it; else as the record has it.  NULL: that is of no use. */
static struct epoch *epoch_of(struct group *group, const Ep__V1__GroupStatus *status)
{
    struct ep_error error = EP_ERROR_INIT;
    struct epoch *epoch = part_take(group, status);

    if (!epoch && epoch_new(group, status, &epoch, &error))
        EP_WARN("group", "a stored epoch is of no use", EP_S("group", group->name), EP_S("error", error.text));
    return epoch;
}

static void take_status(struct group *group, const Ep__V1__GroupStatus *status)
{
    struct epoch *fresh;

    group->created_us = status->created_us;
    group->updated_us = status->updated_us;
    if (status->epoch > group->tried)
        group->tried = status->epoch;
    group->epoch_number = status->epoch;
    if (status->turn)
        follow_decided(group, status->turn);
    fresh = epoch_of(group, status);
    if (!fresh)
        return;
    if (group->epoch && group->epoch->number == fresh->number)
        change_live(group, fresh);
    else
        put_into_service(group, fresh);
}

static void read_status(struct ep_groups *groups, const char *name, const struct ep_record *record)
{
    struct group *group = group_find(groups, name);
    const Ep__V1__GroupStatus *status;
    struct arena arena = { 0 };

    if (!group || !group->visible || group->gone || !record->value)
        return;
    group->status_revision = record->revision;
    status = arena_unpack(&arena, &ep__v1__group_status__descriptor, record->size, record->value);
    if (status)
        take_status(group, status);
    else
        EP_WARN("group", "a stored status is of no use", EP_S("key", record->key));
    arena_clear(&arena);
}

static void read_history(struct ep_groups *groups, const struct key *key, const struct ep_record *record)
{
    static const char history[] = "history/";
    struct group *group = group_find(groups, key->group);

    if (group && !strncmp(key->rest, history, sizeof history - 1))
        history_read(group, (uint32_t)strtoul(key->rest + sizeof history - 1, NULL, 10), record);
}

/* ---- all of it ---------------------------------------------------------------------------- */

static void read_report(struct ep_groups *groups, const struct key *key, const struct ep_record *record)
{
    static const char members[] = "members/";
    struct group *group = group_find(groups, key->group);

    if (group && !strncmp(key->rest, members, sizeof members - 1))
        report_read(group, key->rest + sizeof members - 1, record);
}

/* Was a group deleted and made again, and nobody told the one without the other? */
static void look_for_another(struct ep_groups *groups, const char *name, const struct ep_record *record)
{
    struct group *group = group_find(groups, name);
    Ep__V1__GroupStatus *status = ep_message_unpack(&ep__v1__group_status__descriptor, record->size, record->value);

    if (group && group->epoch && status && status->created_us != group->created_us)
        replace(group);
    if (status)
        ep__v1__group_status__free_unpacked(status, NULL);
}

/* What is not among all that is there, is gone. */
static void begin_whole(struct ep_groups *groups)
{
    for (size_t i = 0; i < groups->n; i++) {
        groups->list[i]->seen = false;
        report_forget(groups->list[i]);
        history_forget(groups->list[i]);
    }
}

static void end_whole(struct ep_groups *groups)
{
    for (size_t i = 0; i < groups->n; i++)
        if (groups->list[i]->visible && !groups->list[i]->seen)
            groups->list[i]->gone = true;
}

/* A group whose first record tells nothing that could be served. */
static void settle_phase(struct group *group)
{
    if (group->phase != EP_PHASE(PENDING) || group->epoch)
        return;
    group_phase(group, EP_PHASE_FORM, NULL);
    if (!group->asked->ranks)
        group_phase(group, EP_PHASE_FORM_FAILED, unreadable);
}

static void act(struct group *group)
{
    if (!group->visible || group->replaced)
        return;
    if (group->gone && group->phase != EP_PHASE(DRAINING))
        group_remove(group);
    else if (!group->gone)
        settle_phase(group);
    agree_look(group);
}

/* Specs before what was made of them, and that before what nodes report of it. */
static void on_changes(const struct ep_store_changes *changes, void *user)
{
    struct ep_groups *groups = user;
    struct key key;

    if (groups->closing)
        return;
    if (changes->whole)
        begin_whole(groups);
    for (size_t i = 0; changes->whole && i < changes->n; i++)
        if (parse(changes->records[i].key, &key) && !strcmp(key.rest, "status"))
            look_for_another(groups, key.group, &changes->records[i]);
    for (size_t i = 0; i < changes->n; i++)
        if (parse(changes->records[i].key, &key) && !strcmp(key.rest, "spec"))
            read_spec(groups, key.group, &changes->records[i]);
    for (size_t i = 0; i < changes->n; i++)
        if (parse(changes->records[i].key, &key) && !strcmp(key.rest, "status"))
            read_status(groups, key.group, &changes->records[i]);
    for (size_t i = 0; i < changes->n; i++)
        if (parse(changes->records[i].key, &key)) {
            read_report(groups, &key, &changes->records[i]);
            read_history(groups, &key, &changes->records[i]);
        }
    if (changes->whole)
        end_whole(groups);
    if (changes->whole && groups->loaded)
        report_all(groups); /* of a store that was set back, it has what this node said then, or nothing */
    groups->loaded = true;
    groups->view = changes->revision;
    group_each(groups, act);
    group_later(groups);
}

/* ---- opening ------------------------------------------------------------------------------------ */

void view_open(struct ep_groups *groups)
{
    groups->watch = ep_watch_open(groups->store, RECORDS_PREFIX, EP_STORE_BEGIN, on_changes, groups);
}

void view_close(struct ep_groups *groups)
{
    if (groups->watch)
        ep_watch_close(groups->watch);
    groups->watch = NULL;
}
