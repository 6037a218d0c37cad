/* ep_layout_compute: sizes, order, alignment, and what it refuses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "ep_kernels.h"

/* 8 ranks of the shape that the field quotes. */
static struct ep_limits deepseek(void)
{
    return (struct ep_limits){
        .ranks = 8, .experts = 256, .local_experts = 32, .top_k = 8, .hidden = 7168,
        .modes = 1u << EP_MODE_LL, .dtypes = 1u << EP_BF16 | 1u << EP_FP8_E4M3,
        .ll_max_tokens = 128, .ll_banks = 2, .arena_bytes = 0,
    };
}

static struct ep_limits both_modes(void)
{
    struct ep_limits l = deepseek();

    l.modes |= 1u << EP_MODE_HT;
    l.ht_max_tokens = 4096;
    l.arena_bytes = 1u << 20;
    return l;
}

/* DESIGN: the LL window at T = 128 is to stay within 64 MiB. */
static void ll_window_is_small(void **state)
{
    struct ep_limits l = deepseek();
    struct ep_layout_map map;

    (void)state;
    assert_int_equal(ep_layout_compute(&l, &map, NULL), EP_OK);
    assert_true(map.total_bytes <= 64u << 20);
    assert_int_equal(map.row_bytes, 14336);
    assert_int_equal(map.combine_row_bytes, 14336);
    assert_int_equal(map.partial_bytes, 29 * EP_PACKET_BYTES);
    assert_int_equal(map.scales_bytes, 224);
    assert_int_equal(map.ht_bytes, 0);
}

struct extent { uint64_t begin, end; };

static void check_disjoint(const struct extent *e, size_t n, uint64_t limit)
{
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(e[i].begin % EP_REGION_ALIGN, 0);
        assert_true(e[i].begin <= e[i].end && e[i].end <= limit);
        for (size_t k = 0; k < n; k++)
            assert_true(i == k || e[i].end <= e[k].begin || e[k].end <= e[i].begin);
    }
}

static void regions_of_a_bank_are_disjoint(void **state)
{
    struct ep_limits l = deepseek();
    struct ep_layout_map m;

    (void)state;
    assert_int_equal(ep_layout_compute(&l, &m, NULL), EP_OK);
    uint64_t lines = 8 * EP_LINE, slots = 8 * 128;
    struct extent e[] = {
        { m.bank.dispatch_flags, m.bank.dispatch_flags + lines },
        { m.bank.combine_flags, m.bank.combine_flags + lines },
        { m.bank.credits, m.bank.credits + lines },
        { m.bank.counts, m.bank.counts + 8ull * m.counts_bytes },
        { m.bank.places, m.bank.places + slots * m.places_bytes },
        { m.bank.headers, m.bank.headers + slots * m.header_bytes },
        { m.bank.scales, m.bank.scales + slots * m.scales_bytes },
        { m.bank.rows, m.bank.rows + slots * m.row_bytes },
        { m.bank.combine_rows, m.bank.combine_rows + slots * m.partial_bytes },
    };

    check_disjoint(e, sizeof e / sizeof *e, m.bank_bytes);
}

static void regions_of_a_window_are_disjoint(void **state)
{
    struct ep_limits l = both_modes();
    struct ep_layout_map m;

    (void)state;
    assert_int_equal(ep_layout_compute(&l, &m, NULL), EP_OK);
    uint64_t partials = 4096ull * m.ht_fanout;
    struct extent e[] = {
        { 0, sizeof(struct ep_control) },
        { m.ll, m.ll + 2 * m.bank_bytes },
        { m.ht_notes, m.ht_notes + 2 * 8 * m.ht_note_stride },
        { m.ht_flags, m.ht_flags + 8 * EP_HT_FLAGS_BYTES },
        { m.ht_closed, m.ht_closed + 8 * EP_LINE },
        { m.ht_combine_tags, m.ht_combine_tags + partials * sizeof(uint64_t) },
        { m.ht_headers, m.ht_headers + 8ull * 4096 * m.header_bytes },
        { m.ht_combine_rows, m.ht_combine_rows + partials * m.combine_row_bytes },
        { m.ht_combine_grads, m.ht_combine_grads + partials * 8 * sizeof(float) },
        { m.arena, m.arena + l.arena_bytes },
    };

    check_disjoint(e, sizeof e / sizeof *e, m.total_bytes);
    assert_true(m.ht_note_stride >= 16u * (EP_HT_GRANT_EXPERTS / 2 + 32));
}

static void modes_that_are_off_take_no_room(void **state)
{
    struct ep_limits l = both_modes();
    struct ep_layout_map m;

    (void)state;
    l.modes = 1u << EP_MODE_HT;
    assert_int_equal(ep_layout_compute(&l, &m, NULL), EP_OK);
    assert_int_equal(m.bank_bytes, 0);
    assert_int_equal(m.limits.ll_max_tokens, 0);
}

/* What is refused, and the field that the error names. */
static void check_refused(struct ep_limits l, const char *field)
{
    struct ep_layout_map map;
    struct ep_error error = EP_ERROR_INIT;

    assert_int_not_equal(ep_layout_compute(&l, &map, &error), EP_OK);
    assert_memory_equal(error.text, field, strlen(field));
}

static void refused_limits_are_named(void **state)
{
    struct ep_limits l;

    (void)state;
#define REFUSED(field, value) l = both_modes(); l.field = (value); check_refused(l, #field)
    REFUSED(ranks, 0);
    REFUSED(ranks, EP_MAX_RANKS + 1);
    REFUSED(experts, 0);
    REFUSED(local_experts, 0);
    REFUSED(local_experts, 257);
    REFUSED(top_k, 0);
    REFUSED(top_k, 17);
    REFUSED(hidden, 0);
    REFUSED(hidden, 100);
    REFUSED(hidden, 7170);
    REFUSED(hidden, UINT32_MAX);
    REFUSED(modes, 0);
    REFUSED(modes, 1u << 5);
    REFUSED(dtypes, 0);
    REFUSED(dtypes, 1u << EP_FP8_E4M3);
    REFUSED(dtypes, 1u << 9);
    REFUSED(ll_max_tokens, 0);
    REFUSED(ll_banks, 1);
    REFUSED(ll_banks, EP_MAX_LL_BANKS + 1);
    REFUSED(ht_max_tokens, 0);
#undef REFUSED
    l = both_modes();
    l.experts = l.local_experts = 4;
    check_refused(l, "top_k");
}

/* The largest values of every field at once: refused for their size, not wrapped around. */
static void sizes_do_not_overflow(void **state)
{
    struct ep_limits l = both_modes();
    struct ep_layout_map map;
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    l.ranks = EP_MAX_RANKS;
    l.experts = l.local_experts = 1u << 20;
    l.hidden = 1u << 20;
    l.ht_max_tokens = 1u << 20;
    l.arena_bytes = UINT64_MAX;
    assert_int_equal(ep_layout_compute(&l, &map, &error), EP_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(error.text, "ht_max_tokens"));
}

static void default_arena_holds_the_largest_outputs(void **state)
{
    struct ep_limits l = deepseek();
    uint64_t expert_major = 32ull * 8 * 128 * 14336, inputs = 128ull * 14336;

    (void)state;
    assert_true(ep_layout_default_arena(&l) >= expert_major + inputs);
    assert_int_equal(ep_layout_default_arena(&l) % EP_REGION_ALIGN, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ll_window_is_small),
        cmocka_unit_test(regions_of_a_bank_are_disjoint),
        cmocka_unit_test(regions_of_a_window_are_disjoint),
        cmocka_unit_test(modes_that_are_off_take_no_room),
        cmocka_unit_test(refused_limits_are_named),
        cmocka_unit_test(sizes_do_not_overflow),
        cmocka_unit_test(default_arena_holds_the_largest_outputs),
    };

    return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
