/*
 * What the store keeps of a group:
 *
 *   groups/NAME/spec    ep.v1.Group {name, spec}: what the operator asked for.  Its revision is the
 *                       group's, for compare-and-swap.
 *   groups/NAME/status  ep.v1.GroupStatus {epoch, created_us, updated_us}
 *
 * A start forms every group anew, under a higher epoch than any before, and stores that number.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "group_private.h"

#define PREFIX  "groups/"
#define KEY_MAX 96

struct keys {
    char spec[KEY_MAX], status[KEY_MAX];
};

static struct keys keys_of(const char *name)
{
    struct keys keys;

    snprintf(keys.spec, sizeof keys.spec, PREFIX "%s/spec", name);
    snprintf(keys.status, sizeof keys.status, PREFIX "%s/status", name);
    return keys;
}

static void *pack_spec(const struct group *group, const Ep__V1__GroupSpec *asked, size_t *size)
{
    Ep__V1__Group record = EP__V1__GROUP__INIT;

    record.name = group->name;
    record.spec = (Ep__V1__GroupSpec *)(uintptr_t)asked; /* only packed */
    return ep_message_pack(&record.base, size);
}

static void *pack_status(const struct group *group, uint64_t epoch, uint64_t updated_us, size_t *size)
{
    Ep__V1__GroupStatus record = EP__V1__GROUP_STATUS__INIT;

    record.epoch = epoch;
    record.created_us = group->created_us;
    record.updated_us = updated_us;
    return ep_message_pack(&record.base, size);
}

/* ---- writing ------------------------------------------------------------------- */

struct pending {
    struct group *group;
    bool deletes;
    records_done_fn done;
    void *user;
};

static void on_written(const struct ep_error *error, uint64_t revision, void *user)
{
    struct pending pending = *(struct pending *)user;
    struct ep_groups *groups = pending.group->groups;

    free(user);
    groups->commits--;
    if (!error->status && !pending.deletes)
        pending.group->revision = pending.group->status_revision = revision;
    pending.done(error, pending.group, pending.user);
    group_later(groups);
}

static void commit(struct group *group, const struct ep_store_write *writes, size_t n, bool deletes,
                   records_done_fn done, void *user)
{
    struct pending *pending = group_allocate(1, sizeof *pending);

    *pending = (struct pending){ .group = group, .deletes = deletes, .done = done, .user = user };
    group->groups->commits++;
    ep_store_commit(group->groups->store, writes, n, on_written, pending);
}

void records_save(struct group *group, const Ep__V1__GroupSpec *asked, uint64_t epoch, uint64_t updated_us,
                  records_done_fn done, void *user)
{
    struct keys keys = keys_of(group->name);
    struct ep_store_write writes[] = {
        { .key = keys.spec, .expected = group->revision },
        { .key = keys.status, .expected = group->status_revision },
    };
    void *spec = pack_spec(group, asked, &writes[0].size);
    void *status = pack_status(group, epoch, updated_us, &writes[1].size);

    writes[0].value = spec;
    writes[1].value = status;
    commit(group, writes, 2, false, done, user);
    free(spec);
    free(status);
}

void records_delete(struct group *group, records_done_fn done, void *user)
{
    struct keys keys = keys_of(group->name);
    struct ep_store_write writes[] = {
        { .key = keys.spec, .expected = group->revision },
        { .key = keys.status, .expected = EP_STORE_ANY },
    };

    commit(group, writes, 2, true, done, user);
}

/* ---- loading ------------------------------------------------------------------- */

/* The group's name out of PREFIX NAME "/" what; false: some other key. */
static bool parse_key(const char *key, const char *what, char *name, size_t size)
{
    const char *from = key + strlen(PREFIX), *slash = strchr(from, '/');

    if (!slash || strcmp(slash + 1, what) || (size_t)(slash - from) >= size)
        return false;
    snprintf(name, size, "%.*s", (int)(slash - from), from);
    return ep_group_name_check(name, NULL) == EP_OK;
}

static void load_spec(struct ep_groups *groups, const struct ep_record *record, const char *name)
{
    struct group *group = group_new(groups, name);
    Ep__V1__Group *message = ep__v1__group__unpack(NULL, record->size, record->value);

    group->visible = true;
    group->revision = record->revision;
    if (message && message->spec) {
        group->asked = message->spec;
        message->spec = NULL;
    } else {
        EP_ERROR("group", "a stored spec cannot be read", EP_S("key", record->key));
    }
    if (message)
        ep__v1__group__free_unpacked(message, NULL);
}

static void load_status(struct ep_groups *groups, const struct ep_record *record, const char *name)
{
    struct group *group = group_find(groups, name);
    Ep__V1__GroupStatus *message = ep__v1__group_status__unpack(NULL, record->size, record->value);

    if (group && message) {
        group->status_revision = record->revision;
        group->epoch_number = message->epoch;
        group->created_us = message->created_us;
        group->updated_us = message->updated_us;
    } else {
        EP_WARN("group", "a stored status is of no use", EP_S("key", record->key));
    }
    if (message)
        ep__v1__group_status__free_unpacked(message, NULL);
}

static ep_status form_loaded(struct group *group, struct ep_error *error)
{
    struct ep_spec_bounds bounds = group_bounds(group->groups);
    struct ep_settled settled;
    ep_status status;

    if (!group->asked) {
        group->asked = group_allocate(1, sizeof *group->asked);
        ep__v1__group_spec__init(group->asked);
        return ep_error_set(error, EP_INTERNAL,
                            "its stored spec cannot be read: update every field, or delete it");
    }
    status = ep_spec_settle(group->asked, &bounds, &settled, error);
    if (status)
        return status;
    status = ep_spec_fit(group->asked, &settled, &bounds, error);
    if (status) {
        ep_settled_clear(&settled);
        return status;
    }
    return epoch_form(group, group->epoch_number, &settled, &group->epoch, error);
}

static void form_again(struct group *group)
{
    struct ep_error error = EP_ERROR_INIT;

    group->epoch_number++;
    group_phase(group, EP_PHASE_FORM, NULL);
    if (form_loaded(group, &error) == EP_OK) {
        group_phase(group, EP_PHASE_FORMED, NULL);
        return;
    }
    EP_ERROR("group", "a stored group cannot be formed", EP_S("group", group->name),
             EP_S("error", error.text));
    group_phase(group, EP_PHASE_FORM_FAILED, error.text);
}

static void be_ready(struct ep_groups *groups, const struct ep_error *error)
{
    groups->ready = !error->status;
    if (groups->on_ready)
        groups->on_ready(error, groups->ready_user);
    group_later(groups);
}

/* Some groups' epochs, in one commit: no more than that takes. */
struct batch {
    struct ep_groups *groups;
    size_t first, n;
    struct ep_store_write writes[EP_STORE_MAX_WRITES];
    struct keys keys[EP_STORE_MAX_WRITES];
};

static void store_epochs(struct ep_groups *groups, size_t first);

/* No group has changed meanwhile: changes are refused until all is ready. */
static void on_epochs_stored(const struct ep_error *error, uint64_t revision, void *user)
{
    static const struct ep_error none = EP_ERROR_INIT;
    struct batch *batch = user;
    struct ep_groups *groups = batch->groups;
    size_t first = batch->first, end = first + batch->n;

    free(batch);
    groups->commits--;
    for (size_t i = first; i < end && !error->status; i++)
        groups->list[i]->status_revision = revision;
    if (error->status)
        EP_WARN("group", "epochs of this start are not stored", EP_S("error", error->text));
    if (end < groups->n && !groups->closing)
        store_epochs(groups, end);
    else
        be_ready(groups, &none);
}

static void store_epochs(struct ep_groups *groups, size_t first)
{
    size_t left = groups->n - first;
    struct batch *batch = group_allocate(1, sizeof *batch);

    batch->groups = groups;
    batch->first = first;
    batch->n = left < EP_STORE_MAX_WRITES ? left : EP_STORE_MAX_WRITES;
    for (size_t i = 0; i < batch->n; i++) {
        struct group *group = groups->list[first + i];
        struct ep_store_write *write = &batch->writes[i];

        batch->keys[i] = keys_of(group->name);
        write->key = batch->keys[i].status;
        write->expected = EP_STORE_ANY;
        write->value = pack_status(group, group->epoch_number, group->updated_us, &write->size);
    }
    groups->commits++;
    ep_store_commit(groups->store, batch->writes, batch->n, on_epochs_stored, batch);
    for (size_t i = 0; i < batch->n; i++)
        free((void *)(uintptr_t)batch->writes[i].value); /* it is copied */
}

static void on_listed(const struct ep_error *error, const struct ep_record *records, size_t n, void *user)
{
    struct ep_groups *groups = user;
    char name[KEY_MAX];

    groups->commits--;
    if (groups->closing || error->status) {
        be_ready(groups, error);
        return;
    }
    for (size_t i = 0; i < n; i++)
        if (parse_key(records[i].key, "spec", name, sizeof name))
            load_spec(groups, &records[i], name);
    for (size_t i = 0; i < n; i++)
        if (parse_key(records[i].key, "status", name, sizeof name))
            load_status(groups, &records[i], name);
    for (size_t i = 0; i < groups->n; i++)
        form_again(groups->list[i]);
    if (groups->n)
        store_epochs(groups, 0);
    else
        be_ready(groups, error);
}

void records_load(struct ep_groups *groups)
{
    groups->commits++;
    ep_store_list(groups->store, PREFIX, on_listed, groups);
}
