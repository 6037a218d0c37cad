/*
 * Any descriptor: ep_op_check refuses it, or executing it stays inside the window.  ep_op_check_own refuses it, or
 * every span lies in the arena or in a region.
 *
 * The input is a template's number, a list of patches to the descriptor, and then what the arena
 * holds (so that expert numbers are arbitrary too).  The window lies between two pages that fault; the
 * control block, which no op may touch, is compared afterwards.  One rank, so nothing is waited for.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ep_kernels.h"

enum { EXPERTS = 4, K = 2, HIDDEN = 256, T_LL = 4, T_HT = 8, ARENA = 1 << 16, GUARD = 1 << 16 };

static struct ep_layout_map map;
static struct ep_placement placement;
static struct ep_host_team *team;
static uint8_t *window;

static void check(bool ok)
{
    if (!ok)
        abort();
}

static void set_up(void)
{
    const struct ep_limits limits = {
        .ranks = 1, .experts = EXPERTS, .local_experts = EXPERTS, .top_k = K, .hidden = HIDDEN,
        .modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT,
        .dtypes = 1u << EP_BF16 | 1u << EP_FP16 | 1u << EP_FP32 | 1u << EP_FP8_E4M3,
        .ll_max_tokens = T_LL, .ht_max_tokens = T_HT, .ll_banks = 2, .arena_bytes = ARENA,
    };

    check(ep_layout_compute(&limits, &map, NULL) == EP_OK);
    check(ep_placement_contiguous(1, EXPERTS, &placement, NULL) == EP_OK);
    check(ep_host_team_create(&map, &placement, 100, NULL, &team, NULL) == EP_OK);

    uint8_t *base = mmap(NULL, map.total_bytes + 2 * GUARD, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    check(base != MAP_FAILED);
    window = base + GUARD;
    check(mprotect(window, map.total_bytes, PROT_READ | PROT_WRITE) == 0);
    ep_host_team_set_window(team, 0, window);
}

static struct ep_span take(uint64_t *at, uint64_t bytes)
{
    struct ep_span span = { map.arena + *at, bytes };

    *at += (bytes + 15) / 16 * 16;
    return span;
}

/* Good ops of every kind, mode and layout to start from; number 0 is all zeroes.  Dispatches of each other round
 * quantise to fp8 on the way, with scales in UE8M0. */
static struct ep_op template_op(unsigned number)
{
    static const struct { uint32_t kind, mode, layout; } all[] = {
        { 0, 0, 0 },
        { EP_OP_DISPATCH, EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR },
        { EP_OP_DISPATCH, EP_MODE_LL, EP_LAYOUT_RANK_MAJOR },
        { EP_OP_DISPATCH, EP_MODE_LL, EP_LAYOUT_PACKED },
        { EP_OP_DISPATCH, EP_MODE_HT, EP_LAYOUT_PACKED },
        { EP_OP_DISPATCH, EP_MODE_HT, EP_LAYOUT_FLAT },
        { EP_OP_COMBINE, EP_MODE_LL, EP_LAYOUT_EXPERT_MAJOR },
        { EP_OP_COMBINE, EP_MODE_LL, EP_LAYOUT_RANK_MAJOR },
        { EP_OP_COMBINE, EP_MODE_LL, EP_LAYOUT_PACKED },
        { EP_OP_COMBINE, EP_MODE_HT, EP_LAYOUT_PACKED },
        { EP_OP_COMBINE, EP_MODE_HT, EP_LAYOUT_FLAT },
        { EP_OP_COMPLETE, EP_MODE_LL, EP_LAYOUT_PACKED },
        { EP_OP_RELEASE, EP_MODE_LL, EP_LAYOUT_PACKED },
    };
    uint64_t at = 0;
    unsigned n = sizeof all / sizeof *all, i = number % n;
    struct ep_op op = { .kind = all[i].kind, .mode = all[i].mode, .layout = all[i].layout };

    if (i == 0)
        return op;
    op.input_dtype = op.wire_dtype = EP_BF16;
    op.tokens = 3;
    op.top_k = K;
    op.index_bytes = 4;
    op.alignment = 1;
    op.x = take(&at, EXPERTS * T_LL * HIDDEN * 2);
    op.topk_idx = op.kind == EP_OP_DISPATCH ? take(&at, 64) : (struct ep_span){ 0 };
    if (op.kind == EP_OP_COMBINE || op.layout != EP_LAYOUT_RANK_MAJOR)
        op.out = take(&at, EXPERTS * T_LL * HIDDEN * 2);
    if (op.kind == EP_OP_DISPATCH && number / n % 2 != 0) {
        op.wire_dtype = EP_FP8_E4M3;
        op.scale_format = EP_SCALE_UE8M0;
        if (op.layout != EP_LAYOUT_RANK_MAJOR)
            op.out_scales = take(&at, EXPERTS * T_LL * 2 * HIDDEN / EP_FP8_BLOCK);
    }
    if (op.kind == EP_OP_DISPATCH)
        op.counts = take(&at, 64);
    if (op.kind == EP_OP_DISPATCH && op.layout == EP_LAYOUT_PACKED)
        op.offsets = take(&at, 64);
    return op;
}

/* count, then count times (offset in 4-byte words, 4 bytes).  Returns what is left of the input. */
static size_t patch(struct ep_op *op, const uint8_t *data, size_t size)
{
    size_t n = size ? data[0] % 8u : 0, used = size ? 1 : 0;

    for (size_t i = 0; i < n && size - used >= 5; i++, used += 5)
        memcpy((uint8_t *)op + data[used] % (sizeof *op / 4) * 4, data + used + 1, 4);
    return used;
}

static bool within(struct ep_span span, uint64_t begin, uint64_t bytes)
{
    return span.offset >= begin && span.offset - begin <= bytes && span.bytes <= bytes - (span.offset - begin);
}

/* Spans that the executor uses of an op that may use regions. */
static void check_own(const struct ep_op *op)
{
    static const struct ep_regions regions = {
        4, { { NULL, 1 << 16 }, { NULL, 0 }, { NULL, EP_REGION_BYTES }, { NULL, 48 } }
    };
    const struct ep_span dispatch[] = { op->x, op->x_scales, op->topk_idx, op->topk_weights, op->out, op->counts,
                                        op->offsets, op->out_topk, op->out_weights, op->sources, op->out_scales };
    const struct ep_span combine[] = { op->x, op->bias, op->out, op->row_grads, op->topk_grads };
    const bool sends = op->kind == EP_OP_DISPATCH;
    const struct ep_span *span = sends ? dispatch : combine;
    struct ep_error error = EP_ERROR_INIT;

    if (ep_op_check_own(&map, &regions, op, &error) != EP_OK || op->kind > EP_OP_COMBINE)
        return;
    for (size_t i = 0; i < (sends ? sizeof dispatch : sizeof combine) / sizeof *span; i++) {
        bool in = span[i].bytes == 0 || within(span[i], map.arena, ARENA);

        for (uint32_t r = 0; r < regions.n; r++)
            in = in || within(span[i], ep_region_offset(r), regions.region[r].bytes);
        check(in);
    }
}

static void execute(const struct ep_op *op)
{
    static struct ep_op_result result;
    static struct ep_control before;

    memcpy(&before, window, sizeof before);
    ep_host_execute(team, 0, op, &result);
    check(memcmp(&before, window, sizeof before) == 0);
    check(memchr(result.text, '\0', sizeof result.text) != NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ep_error error = EP_ERROR_INIT;
    size_t used = 0;

    if (!team)
        set_up();
    /* Up to three ops in a row, so that combines find what dispatches left. */
    for (int i = 0; i < 3 && used < size; i++) {
        struct ep_op op = template_op(data[used++]);

        used += patch(&op, data + used, size - used);
        check_own(&op);
        memcpy(window + map.arena, data + used, size - used < ARENA ? size - used : ARENA);
        if (ep_op_check(&map, &op, &error) == EP_OK)
            execute(&op);
        else
            check(error.text[0] != '\0');
    }
    return 0;
}
