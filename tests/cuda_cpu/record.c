/* What is told of ops, as kernels tell it. */
#include "cuda_cpu.h"
#include "ep_clock.h"

void cpu_store_words(void *to, const void *from, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t))
        __atomic_store_n((uint64_t *)(void *)((uint8_t *)to + at),
                         *(const uint64_t *)(const void *)((const uint8_t *)from + at), __ATOMIC_RELAXED);
}

void cpu_note_failure(struct ep_device_report *report, const struct ep_device_record *record, uint64_t part)
{
    if (__atomic_load_n(&report->failures, __ATOMIC_SEQ_CST) == 0) {
        cpu_store_words(&report->failure, record, sizeof *record);
        cpu_store_words(&report->failure_op, &part, sizeof part);
    }
    __atomic_fetch_add(&report->failures, 1, __ATOMIC_SEQ_CST);
}

void cpu_refuse(struct cpu_rank *r, const struct ep_op *op, ep_status why)
{
    struct ep_device_report *report = &((struct ep_control *)(void *)r->window[r->rank])->gpu.report;
    const uint32_t part = op->kind == EP_OP_COMBINE ? EP_DEVICE_COMBINE : EP_DEVICE_DISPATCH;
    const uint64_t now = ep_clock_ns();
    const struct ep_device_record record = { .status = (int32_t)why,
                                             .generation = op->generation,
                                             .sequence = ++r->state->scratch.sequence,
                                             .start_ns = now,
                                             .end_ns = now };

    struct ep_device_counters counters = r->state->counters[part];

    counters.count++;
    counters.errors++;
    cpu_store_words(&r->state->counters[part], &counters, sizeof counters);
    if (op->handle < EP_MAX_HANDLES)
        report->records[op->handle][part] = record;
    cpu_note_failure(report, &record, part);
}
