/*
 * What the store keeps of a group:
 *
 *   groups/NAME/spec          ep.v1.Group {name, spec}: what the operator asked for.  Its revision is the group's, for
 *                             compare-and-swap.
 *   groups/NAME/status        ep.v1.GroupStatus {epoch, runs {node, devices}, absent, settled {spec, notes}, created_us,
 *                             updated_us}: what was agreed on.
 *   groups/NAME/history/NN    ep.v1.GroupChange: one of the last 64 changes, NN its number's remainder (history.c).
 *   groups/NAME/members/NODE  ep.v1.GroupStatus {created_us, epoch, phase, reason, ranks}: what a node reports of its part,
 *                             created_us saying of which group of the name.  It goes with the node's session.
 *   groups/.mark              nothing; written before a change is judged, so that the watch comes to that revision, and with
 *                             each change: a view that has come to its revision has all of them, deletions too.
 *
 * The leader writes the first two, in one commit that only a leader can make; everybody reads them (view.c).
 */
#include <stdio.h>
#include <stdlib.h>

#include "group_private.h"

_Static_assert(4 + HISTORY_KEPT <= EP_STORE_MAX_WRITES, "a deletion is one commit");
_Static_assert(HISTORY_KEPT <= 64, "ep_groups.history_slots has a bit for each");

#define MARK_KEY RECORDS_PREFIX ".mark" /* no group has a name that begins so */

struct keys {
    char spec[RECORDS_KEY_MAX], status[RECORDS_KEY_MAX];
};

static struct keys keys_of(const char *name)
{
    struct keys keys;

    snprintf(keys.spec, sizeof keys.spec, RECORDS_PREFIX "%s/spec", name);
    snprintf(keys.status, sizeof keys.status, RECORDS_PREFIX "%s/status", name);
    return keys;
}

static void *pack_spec(const struct group *group, const Ep__V1__GroupSpec *asked, size_t *size)
{
    Ep__V1__Group record = EP__V1__GROUP__INIT;

    record.name = group->name;
    record.spec = (Ep__V1__GroupSpec *)(uintptr_t)asked; /* only packed */
    return ep_message_pack(&record.base, size);
}

struct pending {
    struct ep_groups *groups;
    records_done_fn done;
    void *user;
};

static void on_written(const struct ep_error *error, uint64_t revision, void *user)
{
    struct pending pending = *(struct pending *)user;

    free(user);
    pending.groups->commits--;
    pending.done(error, revision, pending.user);
    group_later(pending.groups);
}

static void commit(struct ep_groups *groups, const struct ep_store_write *writes, size_t n, records_done_fn done,
                   void *user)
{
    struct pending *pending = group_allocate(1, sizeof *pending);

    *pending = (struct pending){ .groups = groups, .done = done, .user = user };
    groups->commits++;
    ep_store_commit(groups->store, writes, n, on_written, pending);
}

static struct ep_store_write mark(void)
{
    return (struct ep_store_write){ .key = MARK_KEY, .value = "", .expected = EP_STORE_ANY };
}

/* Only by a leader; writes has room for two more. */
static void commit_as_leader(struct ep_groups *groups, struct ep_store_write *writes, size_t n, records_done_fn done,
                             void *user)
{
    writes[n++] = mark();
    writes[n++] = ep_cluster_guard(groups->cluster);
    commit(groups, writes, n, done, user);
}

/* ---- history ----------------------------------------------------------------------------------- */

struct slot {
    char key[RECORDS_KEY_MAX];
};

static struct slot slot_of(const struct group *group, uint32_t number)
{
    struct slot slot;

    snprintf(slot.key, sizeof slot.key, RECORDS_PREFIX "%s/history/%02u", group->name, number);
    return slot;
}

/* The value is the caller's to free. */
static struct ep_store_write write_entry(struct group *group, const Ep__V1__GroupChange *entry, struct slot *slot,
                                         void **packed)
{
    const uint32_t number = (uint32_t)(entry->number % HISTORY_KEPT);
    struct ep_store_write write = { .expected = EP_STORE_ANY };

    *slot = slot_of(group, number);
    *packed = ep_message_pack(&entry->base, &write.size);
    group->history_slots |= 1ull << number;
    write.key = slot->key;
    write.value = *packed;
    return write;
}

void records_history(struct group *group, const Ep__V1__GroupChange *entry, records_done_fn done, void *user)
{
    struct keys keys = keys_of(group->name);
    struct slot slot;
    void *packed;
    struct ep_store_write writes[] = {
        write_entry(group, entry, &slot, &packed),
        { .key = keys.spec, .expected = group->revision, .check_only = true },
        { 0 },
        { 0 },
    };

    commit_as_leader(group->groups, writes, 2, done, user);
    free(packed);
}

/* ---- changes ------------------------------------------------------------------------------------ */

/* What the watch has told since a change was judged is not to be lost by it. */
static uint64_t expected_spec(const struct group *group)
{
    return group->change ? group->change->spec_revision : group->revision;
}

static uint64_t expected_status(const struct group *group)
{
    return group->change ? group->change->status_revision : group->status_revision;
}

/* With the entry of the change that is under way; writes has room for three more. */
static void commit_change(struct group *group, struct ep_store_write *writes, size_t n, records_done_fn done,
                          void *user)
{
    void *packed = NULL;
    struct slot slot;

    if (group->change)
        writes[n++] = write_entry(group, group->change->entry, &slot, &packed);
    commit_as_leader(group->groups, writes, n, done, user);
    free(packed);
}

void records_save(struct group *group, const Ep__V1__GroupSpec *asked, const Ep__V1__GroupStatus *status,
                  records_done_fn done, void *user)
{
    struct keys keys = keys_of(group->name);
    struct ep_store_write writes[] = {
        { .key = keys.spec, .expected = expected_spec(group) },
        { .key = keys.status, .expected = expected_status(group) },
        { 0 },
        { 0 },
        { 0 },
    };
    void *spec = pack_spec(group, asked, &writes[0].size), *packed = ep_message_pack(&status->base, &writes[1].size);

    writes[0].value = spec;
    writes[1].value = packed;
    commit_change(group, writes, 2, done, user);
    free(spec);
    free(packed);
}

void records_renew(struct group *group, const Ep__V1__GroupStatus *status, records_done_fn done, void *user)
{
    struct keys keys = keys_of(group->name);
    struct ep_store_write writes[] = {
        { .key = keys.spec, .expected = expected_spec(group), .check_only = true },
        { .key = keys.status, .expected = expected_status(group) },
        { 0 },
        { 0 },
        { 0 },
    };
    void *packed = ep_message_pack(&status->base, &writes[1].size);

    writes[1].value = packed;
    commit_change(group, writes, 2, done, user);
    free(packed);
}

void records_delete(struct group *group, records_done_fn done, void *user)
{
    struct keys keys = keys_of(group->name);
    struct slot slots[HISTORY_KEPT];
    struct ep_store_write writes[4 + HISTORY_KEPT] = {
        { .key = keys.spec, .expected = expected_spec(group) },
        { .key = keys.status, .expected = EP_STORE_ANY },
    };
    size_t n = 2;

    for (uint32_t i = 0; i < HISTORY_KEPT; i++) {
        slots[i] = slot_of(group, i);
        if (group->history_slots >> i & 1)
            writes[n++] = (struct ep_store_write){ .key = slots[i].key, .expected = EP_STORE_ANY };
    }
    commit_as_leader(group->groups, writes, n, done, user);
}

/* ---- marks ------------------------------------------------------------------------------------- */

void records_mark(struct ep_groups *groups, records_done_fn done, void *user)
{
    const struct ep_store_write writes[] = { mark(), ep_cluster_mark() };

    commit(groups, writes, 2, done, user);
}

struct reading {
    struct ep_groups *groups;
    struct records_marks marks;
    records_marks_fn done;
    void *user;
};

static void end_reading(struct reading *reading, const struct ep_error *error)
{
    reading->groups->commits--;
    reading->done(error, &reading->marks, reading->user);
    group_later(reading->groups);
    free(reading);
}

static uint64_t revision_of(const struct ep_record *records, size_t n)
{
    return n ? records[0].revision : 0; /* not written yet */
}

static void on_mark_of_nodes(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    struct reading *reading = user;

    reading->marks.nodes = revision_of(records, n);
    end_reading(reading, error);
}

static void on_mark_of_groups(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    struct reading *reading = user;

    reading->marks.groups = revision_of(records, n);
    if (error->status)
        end_reading(reading, error);
    else
        ep_store_list(reading->groups->store, ep_cluster_mark().key, on_mark_of_nodes, reading);
}

void records_read_marks(struct ep_groups *groups, records_marks_fn done, void *user)
{
    struct reading *reading = group_allocate(1, sizeof *reading);

    *reading = (struct reading){ .groups = groups, .done = done, .user = user };
    groups->commits++;
    ep_store_list(groups->store, MARK_KEY, on_mark_of_groups, reading);
}

/* ---- reports ----------------------------------------------------------------------------------- */

void records_report(struct group *group, const Ep__V1__GroupStatus *status, uint64_t expected,
                    struct ep_session *session, records_done_fn done, void *user)
{
    char key[RECORDS_KEY_MAX];
    struct ep_store_write write = { .key = key, .expected = expected };
    void *packed = status ? ep_message_pack(&status->base, &write.size) : NULL;

    snprintf(key, sizeof key, RECORDS_PREFIX "%s/members/%s", group->name, nodes_self(group->groups));
    write.value = packed;
    write.session = status ? session : NULL;
    commit(group->groups, &write, 1, done, user);
    free(packed);
}
