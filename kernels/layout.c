/* Sizes and offsets of a window, from a group's limits.  Arithmetic is in 128 bits: any limits that
 * fit their fields are judged, none overflow. */
#include "ep_kernels.h"

typedef unsigned __int128 wide;

/* A window beyond this is a mistake in the limits, not a wish. */
#define MAX_WINDOW_BYTES (1ull << 44)
#define SCALE_BYTES 4u

static const char *const dtype_names[] = {
    [EP_BF16] = "bf16", [EP_FP16] = "fp16", [EP_FP32] = "fp32", [EP_FP8_E4M3] = "fp8_e4m3",
};

static bool has_mode(const struct ep_limits *l, ep_mode mode)
{
    return (l->modes >> mode & 1u) != 0;
}

static bool has_dtype(const struct ep_limits *l, ep_dtype dtype)
{
    return (l->dtypes >> dtype & 1u) != 0;
}

static uint64_t align_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

/* ---- checks --------------------------------------------------------------------- */

static ep_status check_range(const char *field, uint64_t value, uint64_t low, uint64_t high,
                             struct ep_error *error)
{
    if (value >= low && value <= high)
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is %llu: must be %llu to %llu", field,
                        (unsigned long long)value, (unsigned long long)low,
                        (unsigned long long)high);
}

static ep_status check_sets(const struct ep_limits *l, struct ep_error *error)
{
    const uint32_t modes = 1u << EP_MODE_LL | 1u << EP_MODE_HT;
    const uint32_t all = 1u << EP_BF16 | 1u << EP_FP16 | 1u << EP_FP32 | 1u << EP_FP8_E4M3;
    const uint32_t wide_dtypes = all & ~(1u << EP_FP8_E4M3);

    if (l->modes == 0 || (l->modes & ~modes) != 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "modes: must be LL, HT or both");
    if ((l->dtypes & ~all) != 0 || (l->dtypes & wide_dtypes) == 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "dtypes: must name at least one of bf16, fp16 and fp32, which "
                            "combines carry, and fp8_e4m3 besides if wanted");
    return EP_OK;
}

static ep_status check_rows(const struct ep_limits *l, struct ep_error *error)
{
    for (uint32_t d = EP_BF16; d <= EP_FP8_E4M3; d++) {
        uint64_t bytes = (uint64_t)l->hidden * ep_dtype_bytes(d);

        if (has_dtype(l, (ep_dtype)d) && bytes % 16 != 0)
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "hidden is %u: its row of %llu bytes (%s) must be a multiple of "
                                "16 bytes", l->hidden, (unsigned long long)bytes, dtype_names[d]);
    }
    return EP_OK;
}

static ep_status check_limits(const struct ep_limits *l, struct ep_error *error)
{
    ep_status status;

    if ((status = check_range("ranks", l->ranks, 1, EP_MAX_RANKS, error)) != EP_OK
        || (status = check_range("experts", l->experts, 1, 1u << 20, error)) != EP_OK
        || (status = check_range("local_experts", l->local_experts, 1, l->experts, error)) != EP_OK
        || (status = check_range("top_k", l->top_k, 1, EP_MAX_TOP_K, error)) != EP_OK
        || (status = check_range("hidden", l->hidden, 8, 1u << 20, error)) != EP_OK
        || (status = check_sets(l, error)) != EP_OK || (status = check_rows(l, error)) != EP_OK)
        return status;
    if (l->top_k > l->experts)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "top_k is %u: must be at most experts, which is %u", l->top_k, l->experts);
    if (has_mode(l, EP_MODE_LL)
        && ((status = check_range("ll_max_tokens", l->ll_max_tokens, 1, 1u << 16, error)) != EP_OK
            || (status = check_range("ll_banks", l->ll_banks, 2, EP_MAX_LL_BANKS, error)) != EP_OK))
        return status;
    if (has_mode(l, EP_MODE_HT)
        && (status = check_range("ht_max_tokens", l->ht_max_tokens, 1, 1u << 20, error)) != EP_OK)
        return status;
    return EP_OK;
}

/* ---- layout ---------------------------------------------------------------------- */

static void lay_strides(struct ep_layout_map *map)
{
    const struct ep_limits *l = &map->limits;

    map->header_bytes = (uint32_t)(sizeof(struct ep_row_header) + l->top_k * sizeof(struct ep_route));
    map->counts_bytes = (l->local_experts + 3) / 3 * 16; /* 1 + L of them, rounded up */
    map->places_bytes = (uint32_t)align_up(l->top_k * sizeof(uint32_t), 16);
    map->scales_bytes = has_dtype(l, EP_FP8_E4M3)
        ? (uint32_t)align_up(ep_row_scales(l->hidden) * SCALE_BYTES, 16) : 0;
    map->row_bytes = map->combine_row_bytes = 0;
    for (uint32_t d = EP_BF16; d <= EP_FP8_E4M3; d++) {
        uint32_t bytes = l->hidden * ep_dtype_bytes(d);

        if (has_dtype(l, (ep_dtype)d) && bytes > map->row_bytes)
            map->row_bytes = bytes;
        if (has_dtype(l, (ep_dtype)d) && d != EP_FP8_E4M3 && bytes > map->combine_row_bytes)
            map->combine_row_bytes = bytes;
    }
    map->partial_bytes = ep_packets(map->combine_row_bytes) * EP_PACKET_BYTES;
    map->ht_fanout = l->top_k < l->ranks ? l->top_k : l->ranks;
}

/* The next region starts at *end; returns its offset.  Sums stay below 2^128 whatever the limits. */
static uint64_t region(wide *end, wide bytes)
{
    wide start = (*end + EP_REGION_ALIGN - 1) / EP_REGION_ALIGN * EP_REGION_ALIGN;

    *end = start + bytes;
    return (uint64_t)start;
}

static wide lay_bank(struct ep_layout_map *map)
{
    const struct ep_limits *l = &map->limits;
    wide slots = (wide)l->ranks * l->ll_max_tokens, lines = (wide)l->ranks * EP_LINE, end = 0;

    map->bank.dispatch_flags = region(&end, lines);
    map->bank.combine_flags = region(&end, lines);
    map->bank.credits = region(&end, lines);
    map->bank.counts = region(&end, (wide)l->ranks * map->counts_bytes);
    map->bank.places = region(&end, slots * map->places_bytes);
    map->bank.headers = region(&end, slots * map->header_bytes);
    map->bank.scales = region(&end, slots * map->scales_bytes);
    map->bank.rows = region(&end, slots * map->row_bytes);
    map->bank.combine_rows = region(&end, slots * map->partial_bytes);
    region(&end, 0);
    return (end + EP_REGION_ALIGN - 1) / EP_REGION_ALIGN * EP_REGION_ALIGN;
}

static wide note_bytes(const struct ep_limits *l)
{
    wide notes = EP_HT_GRANT_EXPERTS / 2 + (wide)l->local_experts; /* a grant is longer than what is asked for */

    return (notes * sizeof(struct ep_ht_note) + EP_LINE - 1) / EP_LINE * EP_LINE;
}

static void lay_ht(struct ep_layout_map *map, wide *end)
{
    const struct ep_limits *l = &map->limits;
    wide note = note_bytes(l), lines = (wide)l->ranks * EP_LINE;
    wide partials = (wide)l->ht_max_tokens * map->ht_fanout;

    map->ht_note_stride = (uint64_t)note;
    map->ht_notes = region(end, 2 * note * l->ranks);
    map->ht_flags = region(end, (wide)l->ranks * EP_HT_FLAGS_BYTES);
    map->ht_closed = region(end, lines);
    map->ht_combine_tags = region(end, partials * sizeof(uint64_t));
    map->ht_headers = region(end, (wide)l->ranks * l->ht_max_tokens * map->header_bytes);
    map->ht_combine_rows = region(end, partials * map->combine_row_bytes);
    map->ht_combine_grads = region(end, partials * l->top_k * sizeof(float));
}

ep_status ep_layout_compute(const struct ep_limits *limits, struct ep_layout_map *out,
                            struct ep_error *error)
{
    struct ep_layout_map map = { .limits = *limits };
    wide end = sizeof(struct ep_control);
    ep_status status = check_limits(limits, error);

    if (status != EP_OK)
        return status;
    if (!has_mode(limits, EP_MODE_LL))
        map.limits.ll_max_tokens = map.limits.ll_banks = 0;
    if (!has_mode(limits, EP_MODE_HT))
        map.limits.ht_max_tokens = 0;
    lay_strides(&map);
    if (has_mode(limits, EP_MODE_LL)) {
        wide bank = lay_bank(&map);

        map.bank_bytes = (uint64_t)bank;
        map.ll = region(&end, bank * limits->ll_banks);
    }
    if (has_mode(limits, EP_MODE_HT)) {
        map.ht = region(&end, 0);
        lay_ht(&map, &end);
        map.ht_bytes = (uint64_t)(end - map.ht);
    }
    map.arena = region(&end, limits->arena_bytes);
    region(&end, 0);
    end = (end + EP_REGION_ALIGN - 1) / EP_REGION_ALIGN * EP_REGION_ALIGN;
    if (end > MAX_WINDOW_BYTES)
        return ep_error_set(error, EP_RESOURCE_EXHAUSTED,
                            "the window of a rank would have %.0f GiB: lower ht_max_tokens, "
                            "ll_max_tokens or arena_bytes to stay within %llu GiB",
                            (double)(end >> 30), MAX_WINDOW_BYTES >> 30);
    map.total_bytes = (uint64_t)end;
    *out = map;
    return EP_OK;
}

uint64_t ep_layout_smallest(void)
{
    struct ep_limits limits = { .ranks = 1, .experts = 1, .local_experts = 1, .top_k = 1, .hidden = 8,
                                .modes = 1u << EP_MODE_LL, .dtypes = 1u << EP_BF16, .ll_max_tokens = 1,
                                .ht_max_tokens = 1, .ll_banks = 2, .arena_bytes = 1 };
    struct ep_layout_map ll, ht;
    ep_status status = ep_layout_compute(&limits, &ll, NULL);

    limits.modes = 1u << EP_MODE_HT;
    if (status != EP_OK || ep_layout_compute(&limits, &ht, NULL) != EP_OK)
        return 0;
    return ll.total_bytes < ht.total_bytes ? ll.total_bytes : ht.total_bytes;
}

/* ---- default arena ------------------------------------------------------------------ */

#define ARENA_SPARE (1u << 20) /* counts, offsets and the allocator's rounding */

static wide token_bytes(const struct ep_limits *l)
{
    return (wide)l->hidden * (has_dtype(l, EP_FP32) ? 4u : 2u) + ep_row_scales(l->hidden) * SCALE_BYTES;
}

/* Inputs, bias and result of one op, and what its dispatch delivers at most. */
static wide mode_arena(const struct ep_limits *l, wide tokens, wide rows)
{
    wide route = 2 * (wide)l->top_k * 8; /* ids and weights, in and out */

    return tokens * (3 * token_bytes(l) + route) + rows * (token_bytes(l) + route + 16);
}

uint64_t ep_layout_default_arena(const struct ep_limits *l)
{
    wide need = 0, fan = l->top_k < l->local_experts ? l->top_k : l->local_experts;

    if (has_mode(l, EP_MODE_LL))
        need = mode_arena(l, l->ll_max_tokens,
                          (wide)l->local_experts * l->ranks * l->ll_max_tokens);
    if (has_mode(l, EP_MODE_HT)) {
        wide rows = (wide)l->ranks * l->ht_max_tokens * fan;
        wide ht = mode_arena(l, l->ht_max_tokens, rows);

        need = ht > need ? ht : need;
    }
    need = (need + ARENA_SPARE + EP_REGION_ALIGN - 1) / EP_REGION_ALIGN * EP_REGION_ALIGN;
    return need > MAX_WINDOW_BYTES ? MAX_WINDOW_BYTES : (uint64_t)need;
}
