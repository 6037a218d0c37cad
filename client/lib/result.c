/*
 * What a GPU says of a rank's ops: the report in its window, read when the ops are over.
 *
 * A handle has one record per direction, of its last op; a graph that is launched again overwrites it.
 * So that no failure is missed, the report also keeps the first one since it was last asked.
 */
#include <stdio.h>
#include <string.h>

#include "client_private.h"

static const enum op_part parts[EP_DEVICE_PARTS] = { [EP_DEVICE_DISPATCH] = PART_DISPATCH,
                                                     [EP_DEVICE_COMBINE] = PART_COMBINE };

/* ---- a record as a result -------------------------------------------------------- */

static void describe(const struct ep_rank *rank, const struct ep_device_record *record, uint32_t part,
                     char *text, size_t size)
{
    const uint32_t mode = record->mode == EP_MODE_HT ? EP_MODE_HT : EP_MODE_LL;
    const char *name = mode == EP_MODE_HT ? "HT" : "LL", *verb = part == EP_DEVICE_DISPATCH ? "use again" : "combine";

    switch (record->status) {
    case EP_TIMEOUT:
        ep_op_late_text(text, size, record->late_rank, mode, record->number, record->timeout_ns / EP_NS_PER_MS,
                        record->wait_phase);
        return;
    case EP_OVERFLOW:
        snprintf(text, size, "%s holds fewer rows than %s %llu needs: %llu",
                 part == EP_DEVICE_DISPATCH ? "out" : "rows", name, (unsigned long long)record->number,
                 (unsigned long long)record->rows_needed);
        return;
    case EP_STALE_HANDLE:
        if (mode == EP_MODE_HT)
            snprintf(text, size, "the handle has no routing to %s: dispatch anew", verb);
        else
            snprintf(text, size, "the handle has no routing to %s: dispatch anew, and combine before %u further "
                     "LL dispatches of this rank", verb, rank->shape.map.limits.ll_banks);
        return;
    case EP_FAILED_PRECONDITION:
        snprintf(text, size, "a peer runs another dtype, scale format or dispatch as HT %llu: ranks must make the same "
                 "calls", (unsigned long long)record->number);
        return;
    default:
        snprintf(text, size, "the GPU's %s %s %llu ended with: %s",
                 part == EP_DEVICE_DISPATCH ? "dispatch" : "combine", name, (unsigned long long)record->number,
                 ep_status_text((ep_status)record->status));
    }
}

static uint32_t count_absent(const struct ep_rank *rank, const uint64_t *arrived)
{
    uint32_t here = 0;

    for (uint32_t w = 0; w < EP_MASK_WORDS; w++)
        here += (uint32_t)__builtin_popcountll(arrived[w]);
    return rank->shape.map.limits.ranks - here;
}

/* Rows of a source lie one after the other, those of the next one behind room for the widest dtype; scales in steps of the
 * group's. */
static void fill_view(const struct ep_rank *rank, const struct ep_device_record *record,
                      struct ep_op_result *result)
{
    const struct ep_layout_map *map = &rank->shape.map;
    const struct ep_limits *l = &map->limits;
    const uint64_t bank = map->ll + result->number % l->ll_banks * map->bank_bytes;

    result->view = bank + map->bank.rows;
    result->view_stride = (uint64_t)l->ll_max_tokens * map->row_bytes;
    if (record->wire_dtype != EP_FP8_E4M3)
        return;
    result->scales_view = bank + map->bank.scales;
    result->scales_view_stride = (uint64_t)l->ll_max_tokens * map->scales_bytes;
}

static void to_result(const struct ep_rank *rank, const struct ep_device_record *record, uint32_t part,
                      struct ep_op_result *result)
{
    *result = (struct ep_op_result){
        .status = record->status,
        .late_rank = record->late_rank,
        .wait_phase = record->wait_phase,
        .absent = count_absent(rank, record->arrived),
        .number = record->number,
        .rows = record->rows,
        .rows_needed = record->rows_needed,
        .dropped = record->dropped,
        .wire_bytes = record->wire_bytes,
        .logical_bytes = record->logical_bytes,
        .start_ns = record->start_ns,
        .end_ns = record->end_ns,
        .wait_ns = record->wait_ns,
    };
    memcpy(result->arrived, record->arrived, sizeof result->arrived);
    if (record->status != EP_OK)
        describe(rank, record, part, result->text, sizeof result->text);
}

/* ---- looking --------------------------------------------------------------------- */

static ep_handle *find_handle(const struct ep_rank *rank, uint32_t generation)
{
    for (uint32_t i = 0; i < EP_MAX_HANDLES; i++)
        if (rank->handles[i] && rank->handles[i]->generation == generation)
            return rank->handles[i];
    return NULL;
}

/* A handle that may have run without a call, in a graph that is launched again. */
static struct pending take_pending(ep_handle *handle, uint32_t part)
{
    struct pending *noted = &handle->device.pending[part], pending = *noted;

    *noted = (struct pending){ .half = pending.half, .part = parts[part] };
    pending.part = parts[part];
    pending.handle = handle;
    return pending;
}

static void look_at_record(struct ep_rank *rank, ep_handle *handle, uint32_t part)
{
    const struct ep_device_record *record = &rank->device->seen.records[handle->id][part];
    struct ep_op_result result;

    if (record->generation != handle->generation || record->sequence <= handle->device.seen[part])
        return;
    handle->device.seen[part] = record->sequence;
    to_result(rank, record, part, &result);
    if (part == EP_DEVICE_DISPATCH && record->layout == EP_LAYOUT_RANK_MAJOR && record->status == EP_OK)
        fill_view(rank, record, &result);

    const struct pending pending = take_pending(handle, part);

    if (pending.half && record->status == EP_OK)
        return; /* the record of its complete() is that of both halves */
    handle_result(rank, record->sequence, &pending, &result);
}

static void look_at_handle(struct ep_rank *rank, ep_handle *handle)
{
    for (uint32_t part = 0; part < EP_DEVICE_PARTS; part++)
        look_at_record(rank, handle, part);
}

/* The first failure since it was last taken.  It is read once more: an op on another stream may have been
 * writing it when the whole report was read. */
static ep_status take_failure(struct ep_rank *rank, struct ep_error *error)
{
    struct device *d = rank->device;
    struct ep_device_report *seen = &d->seen;
    const uint64_t none = 0;
    struct ep_op_result result;

    if (seen->failures == 0)
        return EP_OK;
    if (d->api->read(d->ordinal, seen, d->report, offsetof(struct ep_device_report, records), d->control, error)
            != EP_OK
        || d->api->write(d->ordinal, &d->report->failures, &none, sizeof none, d->control, error) != EP_OK)
        return error->status;
    to_result(rank, &seen->failure, (uint32_t)seen->failure_op, &result);
    handle_failure(rank, find_handle(rank, seen->failure.generation), seen->failure.sequence, &result);
    return EP_OK;
}

ep_status device_collect(struct ep_rank *rank, ep_handle *handle, struct ep_error *error)
{
    struct device *d = rank->device;

    if (d->api->read(d->ordinal, &d->seen, d->report, sizeof d->seen, d->control, error) != EP_OK
        || take_failure(rank, error) != EP_OK)
        return ep_error_prefix(error, "what became of the rank's ops");
    if (handle)
        look_at_handle(rank, handle);
    for (uint32_t i = 0; !handle && i < EP_MAX_HANDLES; i++)
        if (rank->handles[i])
            look_at_handle(rank, rank->handles[i]);
    return EP_OK;
}
