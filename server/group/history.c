/*
 * The last changes of a group: who asked for what, what became of it, how long each phase took.
 *
 * A ring of records below the group's (records.c).  One that forms or updates the group is written in the commit of the
 * change, as "committed", and again when it is over; one that was refused or has failed is written afterwards, if the
 * store takes it.  They go with the group.
 */
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ep_message.h"
#include "group_private.h"

#define TEXT_MAX 200u

static void set(char **field, const char *text)
{
    if (*field != protobuf_c_empty_string)
        free(*field);
    *field = group_copy(text);
}

/* ---- fields as text -------------------------------------------------------------------------- */

struct text {
    char s[TEXT_MAX];
    size_t used;
};

__attribute__((format(printf, 2, 3))) static void add(struct text *text, const char *format, ...)
{
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(text->s + text->used, sizeof text->s - text->used, format, args);
    va_end(args);
    text->used += n < 0 ? 0 : (size_t)n;
    if (text->used >= sizeof text->s)
        text->used = sizeof text->s - 1;
}

/* "MODE_LL" as "ll": what stands before the name's first `words` underscores is its type's. */
static void add_enum(struct text *text, const ProtobufCEnumDescriptor *type, int value, int words)
{
    const ProtobufCEnumValue *found = protobuf_c_enum_descriptor_get_value(type, value);
    const char *name = found ? found->name : "?";

    while (words-- > 0 && strchr(name, '_'))
        name = strchr(name, '_') + 1;
    for (; *name; name++)
        add(text, "%c", tolower((unsigned char)*name));
}

static void add_placement(struct text *text, const Ep__V1__Placement *placement)
{
    if (placement->strategy)
        add_enum(text, &ep__v1__placement_strategy__descriptor, (int)placement->strategy, 2);
    if (placement->n_homes)
        add(text, ", %zu homes", placement->n_homes);
    if (placement->redundant)
        add(text, ", %u redundant", placement->redundant);
    if (placement->nodes && text->used)
        add(text, "; ");
    if (placement->nodes)
        add_enum(text, &ep__v1__node_strategy__descriptor, (int)placement->nodes, 2);
    for (size_t i = 0; i < placement->n_ranks; i++)
        add(text, " %u:%s", placement->ranks[i]->rank, placement->ranks[i]->node);
}

static void add_message(struct text *text, const ProtobufCMessage *message)
{
    const Ep__V1__GroupSpec__LabelsEntry *label = (const Ep__V1__GroupSpec__LabelsEntry *)message;

    if (message && message->descriptor == &ep__v1__placement__descriptor)
        add_placement(text, (const Ep__V1__Placement *)message);
    else if (message && message->descriptor == &ep__v1__group_spec__labels_entry__descriptor)
        add(text, "%s=%s", label->key, label->value);
    else if (message && message->descriptor == &ep__v1__attach_token__descriptor)
        add(text, "set");
}

static void add_value(struct text *text, const ProtobufCFieldDescriptor *field, const void *at)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_UINT32:
        if (*(const uint32_t *)at)
            add(text, "%u", *(const uint32_t *)at);
        break;
    case PROTOBUF_C_TYPE_UINT64:
        if (*(const uint64_t *)at)
            add(text, "%llu", (unsigned long long)*(const uint64_t *)at);
        break;
    case PROTOBUF_C_TYPE_ENUM:
        if (*(const int *)at)
            add_enum(text, field->descriptor, *(const int *)at, 1);
        break;
    case PROTOBUF_C_TYPE_MESSAGE: add_message(text, *(ProtobufCMessage *const *)at); break;
    default: add(text, "?"); /* the schema of a spec has no others */
    }
}

static struct text text_of(const Ep__V1__GroupSpec *spec, const ProtobufCFieldDescriptor *field)
{
    const uint8_t *base = (const uint8_t *)spec, *at = base + field->offset;
    const size_t step = field->type == PROTOBUF_C_TYPE_MESSAGE ? sizeof(void *) : sizeof(int);
    struct text text = { "", 0 };
    size_t n;

    if (field->label != PROTOBUF_C_LABEL_REPEATED) {
        add_value(&text, field, at);
        return text;
    }
    memcpy(&n, base + field->quantifier_offset, sizeof n);
    memcpy(&at, at, sizeof at);
    for (size_t i = 0; i < n; i++) {
        add(&text, "%s", i ? "," : "");
        add_value(&text, field, at + i * step);
    }
    return text;
}

/* ---- what changed -------------------------------------------------------------------------------- */

static void add_field(Ep__V1__GroupChange *entry, const char *field, const char *from, const char *to)
{
    Ep__V1__FieldChange **fields = realloc(entry->fields, (entry->n_fields + 1) * sizeof *fields), *new;

    if (!fields)
        abort();
    new = group_allocate(1, sizeof *new);
    ep__v1__field_change__init(new);
    new->field = group_copy(field);
    new->from = group_copy(from);
    new->to = group_copy(to);
    entry->fields = fields;
    entry->fields[entry->n_fields++] = new;
}

/* Loads, homes and secrets make no text, so messages are compared as a whole. */
static bool same_field(const Ep__V1__GroupSpec *a, const Ep__V1__GroupSpec *b, const ProtobufCFieldDescriptor *field)
{
    const void *x = (const uint8_t *)a + field->offset, *y = (const uint8_t *)b + field->offset;

    if (field->type != PROTOBUF_C_TYPE_MESSAGE || field->label == PROTOBUF_C_LABEL_REPEATED)
        return true; /* its text says it */
    return ep_message_same(*(ProtobufCMessage *const *)x, *(ProtobufCMessage *const *)y);
}

void history_fields(Ep__V1__GroupChange *entry, const Ep__V1__GroupSpec *from, const Ep__V1__GroupSpec *to)
{
    static const Ep__V1__GroupSpec empty = EP__V1__GROUP_SPEC__INIT;
    const ProtobufCMessageDescriptor *type = &ep__v1__group_spec__descriptor;

    from = from ? from : &empty;
    for (unsigned i = 0; i < type->n_fields; i++) {
        const struct text a = text_of(from, &type->fields[i]), b = text_of(to, &type->fields[i]);
        const bool same_text = !strcmp(a.s, b.s), another = same_text && !strcmp(type->fields[i].name, "attach_token");

        if (!same_text || !same_field(from, to, &type->fields[i]))
            add_field(entry, type->fields[i].name, a.s, another ? "another" : b.s);
    }
}

/* Of a plan that did not come off. */
static void drop_nodes(Ep__V1__GroupChange *entry)
{
    if (entry->n_fields && !strcmp(entry->fields[entry->n_fields - 1]->field, "nodes"))
        ep__v1__field_change__free_unpacked(entry->fields[--entry->n_fields], NULL);
}

void history_nodes(Ep__V1__GroupChange *entry, const struct ep_plan *from, const struct ep_plan *to)
{
    char a[TEXT_MAX] = "", b[TEXT_MAX] = "";

    if (from)
        ep_plan_text(from, a, sizeof a);
    ep_plan_text(to, b, sizeof b);
    drop_nodes(entry);
    if (strcmp(a, b) != 0)
        add_field(entry, "nodes", a, b);
}

/* ---- entries --------------------------------------------------------------------------------------- */

/* A renewal that is tried again after it failed: one entry for all of them, or they would push out all others. */
static bool is_again(const struct group *group, const char *change)
{
    const Ep__V1__GroupChange *last = group->history[group->history_number % HISTORY_KEPT];

    return last && last->number == group->history_number && !strcmp(change, "renewal") &&
           !strcmp(last->change, change) && !strcmp(last->outcome, "failed");
}

Ep__V1__GroupChange *history_begin(struct group *group, const char *change, const Ep__V1__Asker *asker)
{
    Ep__V1__GroupChange *entry = group_allocate(1, sizeof *entry);

    ep__v1__group_change__init(entry);
    entry->number = is_again(group, change) ? group->history_number : ++group->history_number;
    entry->change = group_copy(change);
    entry->time_us = ep_clock_wall_us();
    entry->by = group_copy(asker ? asker->by : nodes_self(group->groups));
    entry->server = group_copy(asker ? asker->server : nodes_self(group->groups));
    entry->epoch_before = entry->epoch_after = group->epoch_number;
    entry->outcome = group_copy("committed");
    return entry;
}

static void write_nothing(const struct ep_error *error, uint64_t revision, void *user)
{
    (void)error, (void)revision, (void)user; /* best effort */
}

void history_end(struct group *group, Ep__V1__GroupChange *entry, const char *outcome, const struct ep_error *error)
{
    set(&entry->outcome, outcome);
    if (error->status)
        set(&entry->reason, error->text);
    if (error->status)
        entry->epoch_after = entry->epoch_before;
    if (group->visible && !group->gone && !group->dead && ep_cluster_leads(group->groups->cluster))
        records_history(group, entry, write_nothing, NULL);
}

void history_refused(struct group *group, const char *change, const Ep__V1__Asker *asker,
                     const Ep__V1__GroupSpec *asked, const struct ep_error *error)
{
    Ep__V1__GroupChange *entry;

    if (!group->visible || !ep_cluster_leads(group->groups->cluster))
        return;
    entry = history_begin(group, change, asker);
    if (asked)
        history_fields(entry, group->asked, asked);
    history_end(group, entry, "refused", error);
    ep__v1__group_change__free_unpacked(entry, NULL);
}

/* ---- what all servers know ------------------------------------------------------------------------------ */

void history_read(struct group *group, uint32_t slot, const struct ep_record *record)
{
    Ep__V1__GroupChange *entry =
        record->value ? ep_message_unpack(&ep__v1__group_change__descriptor, record->size, record->value) : NULL;

    if (slot >= HISTORY_KEPT)
        return;
    if (group->history[slot])
        ep__v1__group_change__free_unpacked(group->history[slot], NULL);
    group->history[slot] = entry;
    group->history_slots &= ~(1ull << slot);
    group->history_slots |= (uint64_t)(record->value != NULL) << slot;
    if (entry && entry->number > group->history_number)
        group->history_number = entry->number;
}

void history_forget(struct group *group)
{
    for (uint32_t slot = 0; slot < HISTORY_KEPT; slot++) {
        if (group->history[slot])
            ep__v1__group_change__free_unpacked(group->history[slot], NULL);
        group->history[slot] = NULL;
    }
}

static int by_number(const void *x, const void *y)
{
    const Ep__V1__GroupChange *a = *(Ep__V1__GroupChange *const *)x, *b = *(Ep__V1__GroupChange *const *)y;

    return a->number < b->number ? -1 : a->number > b->number;
}

ep_status ep_groups_history(struct ep_groups *groups, const char *name, Ep__V1__GroupChange *list[EP_GROUP_HISTORY],
                            size_t *n, struct ep_error *error)
{
    struct group *group = group_get(groups, name, error);

    *n = 0;
    if (!group)
        return EP_NOT_FOUND;
    for (uint32_t slot = 0; slot < HISTORY_KEPT; slot++)
        if (group->history[slot])
            list[(*n)++] = group->history[slot];
    qsort(list, *n, sizeof *list, by_number);
    return EP_OK;
}
