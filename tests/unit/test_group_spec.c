/* What a group is settled to, and what is refused: which field, what was wrong, what would be right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_state.h"
#include "spec.h"

#define MODE(name)     EP__V1__MODE__MODE_##name
#define DTYPE(name)    EP__V1__DTYPE__DTYPE_##name
#define STRATEGY(name) EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_##name

static const struct ep_spec_bounds plenty = { .node = "n1", .devices = 16, .memory_left = 1ull << 40 };

static Ep__V1__GroupSpec good(void)
{
    Ep__V1__GroupSpec spec = EP__V1__GROUP_SPEC__INIT;

    spec.ranks = 4;
    spec.experts = 8;
    spec.hidden = 64;
    spec.top_k = 2;
    return spec;
}

static struct ep_settled settle(const Ep__V1__GroupSpec *asked)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled settled;

    assert_int_equal(ep_spec_settle(asked, &plenty, &settled, &error), EP_OK);
    return settled;
}

static void says(const struct ep_error *error, const char *text)
{
    if (!strstr(error->text, text))
        fail_msg("\"%s\" does not say \"%s\"", error->text, text);
}

static void refused(const Ep__V1__GroupSpec *asked, ep_status status, const char *text)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled settled;

    assert_int_equal(ep_spec_settle(asked, &plenty, &settled, &error), status);
    says(&error, text);
}

static bool has_note(const struct ep_settled *settled, const char *text)
{
    for (size_t i = 0; i < settled->n_notes; i++)
        if (strstr(settled->notes[i], text))
            return true;
    return false;
}

/* ---- names --------------------------------------------------------------------------- */

static void names_follow_the_rule(void **state)
{
    static const char *const right[] = {
        "a", "0", "moe", "moe-1", "a--b", "a23456789012345678901234567890123456789012345678901234567890123"
    };
    static const char *const wrong[] = {
        "",    "-a",  "a-",  "A",        "a_b",
        "a.b", "a/b", "a b", "\xc3\xa4", "a234567890123456789012345678901234567890123456789012345678901234"
    };
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    for (size_t i = 0; i < sizeof right / sizeof *right; i++)
        assert_int_equal(ep_group_name_check(right[i], &error), EP_OK);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(ep_group_name_check(wrong[i], &error), EP_INVALID_ARGUMENT);
        assert_non_null(strstr(error.text, "name is \""));
    }
}

/* ---- defaults ------------------------------------------------------------------------ */

static void what_is_not_asked_is_settled_and_noted(void **state)
{
    Ep__V1__GroupSpec spec = good();
    struct ep_settled s = settle(&spec);

    (void)state;
    assert_int_equal(s.spec->n_modes, 2);
    assert_int_equal(s.spec->modes[0], MODE(LL));
    assert_int_equal(s.spec->modes[1], MODE(HT));
    assert_int_equal(s.spec->n_dtypes, 2);
    assert_int_equal(s.spec->dtypes[0], DTYPE(BF16));
    assert_int_equal(s.spec->dtypes[1], DTYPE(FP8_E4M3));
    assert_int_equal(s.spec->ll_max_tokens, 128);
    assert_int_equal(s.spec->ht_max_tokens, 4096);
    assert_int_equal(s.spec->ll_banks, 2);
    assert_int_equal(s.spec->timeout_ms, 10000);
    assert_int_equal(s.spec->backend, EP__V1__BACKEND__BACKEND_HOST);
    assert_int_equal(s.spec->placement->strategy, STRATEGY(CONTIGUOUS));
    assert_int_equal(s.spec->placement->n_homes, 0);
    assert_int_equal(s.placement.first[8], 8);
    assert_int_equal(s.placement.rank[7], 3);
    assert_int_equal(s.spec->arena_bytes, ep_layout_default_arena(&s.map.limits));
    assert_int_equal(s.map.limits.local_experts, 2);
    assert_true(has_note(&s, "modes: none asked, ll and ht settled"));
    assert_true(has_note(&s, "dtypes: none asked"));
    assert_true(has_note(&s, "ll_max_tokens: 0 asked, 128 settled"));
    assert_true(has_note(&s, "ht_max_tokens: 0 asked, 4096 settled"));
    assert_true(has_note(&s, "ll_banks: 0 asked, 2 settled"));
    assert_true(has_note(&s, "timeout_ms: 0 asked, 10000 settled"));
    assert_true(has_note(&s, "arena_bytes: 0 asked, "));
    ep_settled_clear(&s);
}

static void what_is_asked_is_kept_and_not_noted(void **state)
{
    Ep__V1__GroupSpec spec = good();
    Ep__V1__Mode modes[] = { MODE(HT), MODE(LL) };
    Ep__V1__Dtype dtypes[] = { DTYPE(FP32) };
    struct ep_settled s;

    (void)state;
    spec.modes = modes;
    spec.n_modes = 2;
    spec.dtypes = dtypes;
    spec.n_dtypes = 1;
    spec.ll_max_tokens = 7;
    spec.ht_max_tokens = 9;
    spec.ll_banks = 3;
    spec.timeout_ms = 5;
    spec.arena_bytes = 12345;
    s = settle(&spec);
    assert_int_equal(s.spec->modes[0], MODE(LL)); /* in order, so that equal specs are equal bytes */
    assert_int_equal(s.spec->dtypes[0], DTYPE(FP32));
    assert_int_equal(s.spec->ll_max_tokens, 7);
    assert_int_equal(s.spec->ht_max_tokens, 9);
    assert_int_equal(s.spec->ll_banks, 3);
    assert_int_equal(s.spec->timeout_ms, 5);
    assert_int_equal(s.spec->arena_bytes, 12345);
    assert_int_equal(s.n_notes, 0);
    ep_settled_clear(&s);
}

static void sizes_of_a_mode_that_is_not_there_are_dropped(void **state)
{
    Ep__V1__GroupSpec spec = good();
    Ep__V1__Mode modes[] = { MODE(HT) };
    struct ep_settled s;

    (void)state;
    spec.modes = modes;
    spec.n_modes = 1;
    spec.ll_max_tokens = 64;
    s = settle(&spec);
    assert_int_equal(s.spec->ll_max_tokens, 0);
    assert_int_equal(s.spec->ll_banks, 0);
    assert_true(has_note(&s, "ll_max_tokens: 64 asked, 0 settled: modes lacks ll"));
    ep_settled_clear(&s);
}

static void uneven_experts_are_placed_on_the_first_ranks(void **state)
{
    Ep__V1__GroupSpec spec = good();
    struct ep_settled s;

    (void)state;
    spec.experts = 10;
    s = settle(&spec);
    assert_int_equal(s.map.limits.local_experts, 3);
    assert_int_equal(s.placement.local_experts[1], 3);
    assert_int_equal(s.placement.local_experts[2], 2);
    assert_int_equal(s.placement.rank[9], 3);
    ep_settled_clear(&s);
    spec.experts = 3;
    s = settle(&spec);
    assert_int_equal(s.placement.local_experts[3], 0);
    ep_settled_clear(&s);
}

/* ---- refusals, field by field --------------------------------------------------------- */

static void ranks_experts_and_top_k(void **state)
{
    Ep__V1__GroupSpec spec = good();

    (void)state;
    spec.ranks = 0;
    refused(&spec, EP_INVALID_ARGUMENT, "ranks is 0: must be 1 to 1024");
    spec.ranks = 1025;
    refused(&spec, EP_INVALID_ARGUMENT, "ranks is 1025: must be 1 to 1024");
    spec.ranks = 17;
    refused(&spec, EP_FAILED_PRECONDITION, "ranks is 17: node n1 has 16 devices");
    spec = good();
    spec.experts = 0;
    refused(&spec, EP_INVALID_ARGUMENT, "experts is 0: must be 1 to ");
    spec = good();
    spec.top_k = 0;
    refused(&spec, EP_INVALID_ARGUMENT, "top_k is 0: must be 1 to 16");
    spec.top_k = 17;
    refused(&spec, EP_INVALID_ARGUMENT, "top_k is 17: must be 1 to 16");
    spec.top_k = 9;
    refused(&spec, EP_INVALID_ARGUMENT, "top_k is 9: must be at most experts, which is 8");
}

static void hidden_is_a_multiple_of_16_bytes(void **state)
{
    Ep__V1__GroupSpec spec = good();

    (void)state;
    spec.hidden = 0;
    refused(&spec, EP_INVALID_ARGUMENT, "hidden is 0");
    spec.hidden = 72; /* 144 bytes of bf16, 72 of fp8 */
    refused(&spec, EP_INVALID_ARGUMENT, "hidden is 72");
    spec.hidden = 60;
    refused(&spec, EP_INVALID_ARGUMENT, "hidden is 60");
}

static void sets_hold_known_values_once(void **state)
{
    Ep__V1__GroupSpec spec = good();
    Ep__V1__Mode modes[] = { MODE(LL), (Ep__V1__Mode)7 };
    Ep__V1__Dtype dtypes[] = { DTYPE(FP8_E4M3), DTYPE(UNSPECIFIED) };

    (void)state;
    spec.modes = modes;
    spec.n_modes = 2;
    refused(&spec, EP_INVALID_ARGUMENT, "modes has 7: must be of 1 (ll), 2 (ht)");
    modes[1] = MODE(LL);
    refused(&spec, EP_INVALID_ARGUMENT, "modes has 1 twice");
    spec.n_modes = 0;
    spec.dtypes = dtypes;
    spec.n_dtypes = 2;
    refused(&spec, EP_INVALID_ARGUMENT, "dtypes has 0: must be of 1 (bf16)");
    spec.n_dtypes = 1;
    refused(&spec, EP_INVALID_ARGUMENT, "dtypes");
}

static void sizes_are_bounded(void **state)
{
    Ep__V1__GroupSpec spec = good();

    (void)state;
    spec.ll_max_tokens = 1u << 30;
    refused(&spec, EP_INVALID_ARGUMENT, "ll_max_tokens is 1073741824");
    spec = good();
    spec.ht_max_tokens = 1u << 30;
    refused(&spec, EP_INVALID_ARGUMENT, "ht_max_tokens is 1073741824");
    spec = good();
    spec.ll_banks = 1;
    refused(&spec, EP_INVALID_ARGUMENT, "ll_banks is 1");
    spec.ll_banks = 5;
    refused(&spec, EP_INVALID_ARGUMENT, "ll_banks is 5");
    spec = good();
    spec.timeout_ms = 3600001;
    refused(&spec, EP_INVALID_ARGUMENT, "timeout_ms is 3600001: must be 0 to 3600000");
    spec = good();
    spec.arena_bytes = UINT64_MAX;
    refused(&spec, EP_RESOURCE_EXHAUSTED, "arena_bytes");
}

static void backends_are_those_of_the_node(void **state)
{
    Ep__V1__GroupSpec spec = good();

    (void)state;
    spec.backend = EP__V1__BACKEND__BACKEND_CUDA;
    refused(&spec, EP_FAILED_PRECONDITION, "backend is cuda: node n1 runs with backend host");
    spec.backend = (Ep__V1__Backend)9;
    refused(&spec, EP_INVALID_ARGUMENT, "backend is 9");
}

static void direct_is_one_of_its_names(void **state)
{
    Ep__V1__GroupSpec spec = good();

    (void)state;
    spec.direct = (Ep__V1__Direct)4;
    refused(&spec, EP_INVALID_ARGUMENT, "direct is 4: must be 1 (same_uid), 2 (any) or 3 (none)");
}

/* ---- GPUs ---------------------------------------------------------------------------- */

#define MIB (1ull << 20)

static const uint64_t left[] = { 100 * MIB, 40 * MIB };
static const struct ep_spec_bounds gpus = { .node = "n1", .backend = EP__V1__BACKEND__BACKEND_CUDA, .devices = 2,
                                            .memory_left = 140 * MIB, .device_left = left, .granule = 2 * MIB };

static const struct ep_spec_pool gpu_pools[] = {
    { .node = "n1", .device = "GPU 0", .left = 100 * MIB, .granule = 2 * MIB, .ranks = 2 },
    { .node = "n1", .device = "GPU 1", .left = 40 * MIB, .granule = 2 * MIB, .ranks = 2 },
};

static void refused_on_gpus(const Ep__V1__GroupSpec *asked, ep_status status, const char *text)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled settled;

    assert_int_equal(ep_spec_settle(asked, &gpus, &settled, &error), status);
    says(&error, text);
}

static void on_gpus_it_is_ll_and_several_ranks_share_one(void **state)
{
    Ep__V1__GroupSpec spec = good();
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled s;

    (void)state;
    assert_int_equal(ep_spec_settle(&spec, &gpus, &s, &error), EP_OK);
    assert_int_equal(s.spec->backend, EP__V1__BACKEND__BACKEND_CUDA);
    assert_int_equal(s.spec->n_modes, 1);
    assert_int_equal(s.spec->modes[0], MODE(LL));
    assert_int_equal(s.spec->ht_max_tokens, 0);
    assert_int_equal(s.spec->direct, EP__V1__DIRECT__DIRECT_SAME_UID);
    assert_true(has_note(&s, "modes: none asked, ll settled: ht takes memory of the GPUs"));
    assert_true(has_note(&s, "ranks: 4 on 2 GPUs"));
    ep_settled_clear(&s);
}

static void gpus_have_the_modes_that_are_asked_for(void **state)
{
    Ep__V1__Mode modes[] = { MODE(LL), MODE(HT) };
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    for (size_t first = 0; first < 2; first++) { /* both, and ht alone */
        Ep__V1__GroupSpec spec = good();
        struct ep_settled s;

        spec.modes = modes + first;
        spec.n_modes = 2 - first;
        assert_int_equal(ep_spec_settle(&spec, &gpus, &s, &error), EP_OK);
        assert_int_equal(s.spec->n_modes, 2 - first);
        assert_int_equal(s.spec->ht_max_tokens, EP_DEFAULT_HT_MAX_TOKENS);
        ep_settled_clear(&s);
    }
}

static void what_gpus_cannot_do_is_refused(void **state)
{
    Ep__V1__GroupSpec spec = good();

    (void)state;
    spec.backend = EP__V1__BACKEND__BACKEND_HOST;
    refused_on_gpus(&spec, EP_FAILED_PRECONDITION, "backend is host: node n1 runs with backend cuda");
    spec = good();
    spec.ranks = 1025;
    refused_on_gpus(&spec, EP_INVALID_ARGUMENT, "ranks is 1025: must be 1 to 1024");
    spec = good();
    spec.ll_max_tokens = 65536; /* what the kernels would refuse when a worker attaches */
    refused_on_gpus(&spec, EP_INVALID_ARGUMENT, "ll_max_tokens is 65536: with top_k 2 must be at most ");
}

static void memory_of_a_rank_is_its_window_and_its_state(void **state)
{
    Ep__V1__GroupSpec spec = good();
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled s;
    uint64_t state_bytes;

    (void)state;
    assert_int_equal(ep_spec_settle(&spec, &gpus, &s, &error), EP_OK);
    state_bytes = ep_device_state_bytes(&s.map, &s.placement);
    assert_int_equal(s.rank_bytes % (2 * MIB), 0);
    assert_true(s.rank_bytes >= s.map.total_bytes + state_bytes);
    assert_true(s.rank_bytes < s.map.total_bytes + state_bytes + 4 * MIB);
    ep_settled_clear(&s);
}

/* Two ranks on each; the second GPU has the least for each. */
static void every_gpu_must_hold_its_ranks(void **state)
{
    Ep__V1__GroupSpec spec = good();
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled s;
    uint32_t fits;

    (void)state;
    spec.arena_bytes = MIB;
    spec.hidden = 4096;
    spec.ll_max_tokens = 1024;
    assert_int_equal(ep_spec_settle(&spec, &gpus, &s, &error), EP_OK);
    assert_int_equal(ep_spec_fit(&spec, &s, gpu_pools, 2, &error), EP_RESOURCE_EXHAUSTED);
    says(&error, "2 of the ranks are on GPU 1 of node n1 and need ");
    says(&error, "it has 41943040 left: ll_max_tokens ");
    ep_settled_clear(&s);
    assert_int_equal(sscanf(strstr(error.text, "ll_max_tokens "), "ll_max_tokens %u would fit", &fits), 1);
    for (uint32_t more = 0; more < 2; more++) {
        spec.ll_max_tokens = fits + more;
        assert_int_equal(ep_spec_settle(&spec, &gpus, &s, &error), EP_OK);
        assert_int_equal(ep_spec_fit(&spec, &s, gpu_pools, 2, &error), more ? EP_RESOURCE_EXHAUSTED : EP_OK);
        ep_settled_clear(&s);
    }
}

static void labels_are_small_and_unique(void **state)
{
    Ep__V1__GroupSpec spec = good();
    Ep__V1__GroupSpec__LabelsEntry entries[2] = { EP__V1__GROUP_SPEC__LABELS_ENTRY__INIT,
                                                  EP__V1__GROUP_SPEC__LABELS_ENTRY__INIT };
    Ep__V1__GroupSpec__LabelsEntry *labels[EP_MAX_LABELS + 1];
    char key[] = "team", empty[] = "", value[300];

    (void)state;
    for (size_t i = 0; i < sizeof labels / sizeof *labels; i++)
        labels[i] = &entries[i % 2];
    memset(value, 'v', sizeof value);
    value[sizeof value - 1] = '\0';
    entries[0].key = entries[1].key = key;
    spec.labels = labels;
    spec.n_labels = 2;
    refused(&spec, EP_INVALID_ARGUMENT, "labels has the key team twice");
    entries[1].key = empty;
    refused(&spec, EP_INVALID_ARGUMENT, "labels has the key \"\": must be 1 to 63 bytes");
    entries[1].key = value;
    refused(&spec, EP_INVALID_ARGUMENT, "must be 1 to 63 bytes");
    spec.n_labels = 1;
    entries[0].value = value;
    refused(&spec, EP_INVALID_ARGUMENT, "labels.team has 299 bytes: must be at most 255");
    spec.n_labels = EP_MAX_LABELS + 1;
    refused(&spec, EP_INVALID_ARGUMENT, "labels has 65 entries: must be at most 64");
}

static void placements_are_checked_home_by_home(void **state)
{
    Ep__V1__GroupSpec spec = good();
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    Ep__V1__ExpertHome homes[9], *list[9];
    struct ep_settled s;

    (void)state;
    for (uint32_t i = 0; i < 9; i++) {
        ep__v1__expert_home__init(&homes[i]);
        homes[i].expert = i % 8;
        homes[i].rank = (i * 3 + 1) % 4;
        list[i] = &homes[i];
    }
    homes[8].rank = 0; /* expert 0 again, elsewhere: redundant */
    placement.homes = list;
    placement.n_homes = 9;
    spec.placement = &placement;
    refused(&spec, EP_INVALID_ARGUMENT,
            "placement.homes has 9 entries: they need placement.strategy explicit");
    placement.strategy = (Ep__V1__PlacementStrategy)5;
    refused(&spec, EP_INVALID_ARGUMENT, "placement.strategy is 5");
    placement.strategy = STRATEGY(EXPLICIT);
    s = settle(&spec);
    assert_int_equal(s.placement.first[1] - s.placement.first[0], 2);
    assert_int_equal(s.spec->placement->n_homes, 9);
    ep_settled_clear(&s);
    homes[8].rank = 4;
    refused(&spec, EP_INVALID_ARGUMENT, "placement.homes[8].rank is 4");
    homes[8].rank = homes[0].rank;
    refused(&spec, EP_INVALID_ARGUMENT, "placement.homes[8]: expert 0 is on rank 1 already");
    homes[8].expert = 8;
    refused(&spec, EP_INVALID_ARGUMENT, "placement.homes[8].expert is 8");
    placement.n_homes = 7;
    refused(&spec, EP_INVALID_ARGUMENT, "placement.homes");
}

static void redundant_homes_are_bounded_before_any_is_placed(void **state)
{
    const struct ep_spec_bounds large = { .node = "n1", .backend = EP__V1__BACKEND__BACKEND_CUDA, .devices = 1024 };
    Ep__V1__GroupSpec spec = good();
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled s;
    uint64_t loads[64];

    (void)state;
    for (uint32_t e = 0; e < 64; e++)
        loads[e] = 1;
    placement.strategy = STRATEGY(BY_LOAD);
    placement.loads = loads;
    placement.n_loads = 8;
    placement.redundant = 25;
    spec.placement = &placement;
    refused(&spec, EP_INVALID_ARGUMENT, "placement.redundant is 25: must be at most 24, when each of 8 experts is on all 4");
    placement.redundant = UINT32_MAX;
    refused(&spec, EP_INVALID_ARGUMENT, "placement.redundant is 4294967295: must be at most 24");
    placement.redundant = 24;
    s = settle(&spec);
    assert_int_equal(s.spec->placement->n_homes, 32);
    ep_settled_clear(&s);
    spec.ranks = 1024;
    spec.experts = 64;
    placement.n_loads = 64;
    placement.redundant = 64 * 1023;
    assert_int_equal(ep_spec_settle(&spec, &large, &s, &error), EP_INVALID_ARGUMENT);
    says(&error, "placement.redundant is 65472: must be at most 23488 with 64 experts, as a group of 1024 ranks has at most "
                 "23552 homes");
    placement.redundant = 23488;
    assert_int_equal(ep_spec_settle(&spec, &large, &s, &error), EP_OK);
    assert_int_equal(s.placement.max_local, 23);
    ep_settled_clear(&s);
}

/* ---- memory ---------------------------------------------------------------------------- */

static struct ep_error does_not_fit(const Ep__V1__GroupSpec *spec, uint64_t memory)
{
    const struct ep_spec_pool pool = { .node = "n1", .left = memory, .ranks = spec->ranks };
    struct ep_error error = EP_ERROR_INIT;
    struct ep_settled s = settle(spec);

    assert_int_equal(ep_spec_fit(spec, &s, &pool, 1, &error), EP_RESOURCE_EXHAUSTED);
    ep_settled_clear(&s);
    return error;
}

static bool fits(const Ep__V1__GroupSpec *spec, uint64_t memory)
{
    const struct ep_spec_pool pool = { .node = "n1", .left = memory, .ranks = spec->ranks };
    struct ep_settled s = settle(spec);
    bool good_enough = ep_spec_fit(spec, &s, &pool, 1, NULL) == EP_OK;

    ep_settled_clear(&s);
    return good_enough;
}

static void what_would_fit_is_exact(void **state)
{
    Ep__V1__GroupSpec spec = good();
    struct ep_settled s;
    struct ep_error error;
    const char *at;
    uint64_t memory;

    (void)state;
    spec.ll_max_tokens = 32; /* so that HT alone decides */
    spec.ht_max_tokens = 100000;
    s = settle(&spec);
    memory = s.map.total_bytes * 4;
    ep_settled_clear(&s);
    assert_true(fits(&spec, memory));
    error = does_not_fit(&spec, memory / 2);
    assert_non_null(strstr(error.text, "4 windows of "));
    assert_non_null(strstr(error.text, "node n1 has "));
    at = strstr(error.text, "ht_max_tokens ");
    assert_non_null(at);
    assert_non_null(strstr(error.text, " would fit"));
    spec.ht_max_tokens = (uint32_t)strtoul(at + strlen("ht_max_tokens "), NULL, 10);
    assert_true(fits(&spec, memory / 2));
    spec.ht_max_tokens++;
    assert_false(fits(&spec, memory / 2));
}

static void both_modes_are_lowered_when_one_does_not_do(void **state)
{
    Ep__V1__GroupSpec spec = good();
    struct ep_error error;
    const char *at;
    unsigned ll, ht;

    (void)state;
    spec.ll_max_tokens = 4096;
    spec.ht_max_tokens = 16384;
    error = does_not_fit(&spec, 6u << 20);
    at = strstr(error.text, "left: ll_max_tokens ");
    assert_non_null(at);
    assert_int_equal(sscanf(at, "left: ll_max_tokens %u with ht_max_tokens %u would fit", &ll, &ht), 2);
    spec.ll_max_tokens = ll;
    spec.ht_max_tokens = ht;
    assert_true(fits(&spec, 6u << 20));
}

static void hopeless_specs_are_told_so(void **state)
{
    Ep__V1__GroupSpec spec = good();

    (void)state;
    assert_non_null(strstr(does_not_fit(&spec, 4096).text, "no number of tokens would fit"));
    spec.arena_bytes = 1u << 30;
    assert_non_null(strstr(does_not_fit(&spec, 4096).text, "lower arena_bytes"));
}

static void an_arena_that_was_asked_for_is_told_how_large_it_may_be(void **state)
{
    Ep__V1__GroupSpec spec = good();
    struct ep_error error;
    const char *at;

    (void)state;
    spec.arena_bytes = 1u << 30;
    error = does_not_fit(&spec, 1u << 30);
    at = strstr(error.text, "arena_bytes ");
    assert_non_null(at);
    assert_int_equal(sscanf(at, "arena_bytes %" SCNu64 " would fit", &spec.arena_bytes), 1);
    assert_true(fits(&spec, 1u << 30));
    spec.arena_bytes += 4096;
    assert_false(fits(&spec, 1u << 30));
}

/* Of what nobody has asked for, HT is lowered first; what was asked for is not touched. */
static void sizes_that_nobody_asked_for_are_lowered(void **state)
{
    Ep__V1__GroupSpec spec = good();
    struct ep_spec_pool pool = { .node = "n1", .left = 1ull << 40, .ranks = spec.ranks };
    struct ep_spec_lowered lowered;
    struct ep_settled s;

    (void)state;
    spec.ll_max_tokens = spec.ht_max_tokens = 0;
    s = settle(&spec);
    pool.left = s.rank_bytes * spec.ranks / 2;
    assert_true(ep_spec_lower(&spec, &s, &pool, 1, &lowered));
    assert_int_equal(lowered.ll_max_tokens, EP_DEFAULT_LL_MAX_TOKENS);
    assert_in_range(lowered.ht_max_tokens, EP_DEFAULT_HT_MAX_TOKENS / 8, EP_DEFAULT_HT_MAX_TOKENS - 1);
    assert_ptr_equal(lowered.pool, &pool);
    pool.left = 4096; /* an eighth of the defaults does not fit either */
    assert_false(ep_spec_lower(&spec, &s, &pool, 1, &lowered));
    ep_settled_clear(&s);
    spec.ll_max_tokens = 64;
    spec.ht_max_tokens = 4096;
    s = settle(&spec);
    pool.left = s.rank_bytes * spec.ranks / 2;
    assert_false(ep_spec_lower(&spec, &s, &pool, 1, &lowered));
    ep_settled_clear(&s);
}

/* ---- fields of an update ------------------------------------------------------------------ */

static void named_fields_are_taken_and_others_kept(void **state)
{
    Ep__V1__GroupSpec base = good(), from = EP__V1__GROUP_SPEC__INIT, *out;
    Ep__V1__Mode modes[] = { MODE(LL) };
    Ep__V1__Placement placement = EP__V1__PLACEMENT__INIT;
    char f0[] = "modes", f1[] = "arena_bytes", f2[] = "modes", f3[] = "placement", f4[] = "timeout_ms";
    char *fields[] = { f0, f1, f2, f3, f4 };

    (void)state;
    from.ranks = 99;
    from.modes = modes;
    from.n_modes = 1;
    from.arena_bytes = 1ull << 40;
    from.timeout_ms = 77;
    placement.strategy = STRATEGY(EXPLICIT);
    from.placement = &placement;
    assert_int_equal(ep_spec_take(&base, &from, fields, 5, &out, NULL), EP_OK);
    assert_int_equal(out->ranks, 4);
    assert_int_equal(out->n_modes, 1); /* named twice, taken once */
    assert_int_equal(out->modes[0], MODE(LL));
    assert_int_equal(out->arena_bytes, 1ull << 40);
    assert_int_equal(out->timeout_ms, 77);
    assert_int_equal(out->placement->strategy, STRATEGY(EXPLICIT));
    ep__v1__group_spec__free_unpacked(out, NULL);
}

static void every_field_of_the_schema_can_be_taken(void **state)
{
    const ProtobufCMessageDescriptor *d = &ep__v1__group_spec__descriptor;
    Ep__V1__GroupSpec base = good(), from = EP__V1__GROUP_SPEC__INIT, *out;

    (void)state;
    for (unsigned i = 0; i < d->n_fields; i++) {
        char name[64], *fields[] = { name };

        snprintf(name, sizeof name, "%s", d->fields[i].name);
        assert_int_equal(ep_spec_take(&base, &from, fields, 1, &out, NULL), EP_OK);
        ep__v1__group_spec__free_unpacked(out, NULL);
    }
}

static void unknown_fields_are_refused(void **state)
{
    Ep__V1__GroupSpec base = good(), *out;
    struct ep_error error = EP_ERROR_INIT;
    char name[] = "tokens", *fields[] = { name };

    (void)state;
    assert_int_equal(ep_spec_take(&base, &base, fields, 1, &out, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "fields has \"tokens\""));
    assert_int_equal(ep_spec_take(&base, &base, NULL, 0, &out, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "fields is empty"));
}

/* What anybody may send is looked through on the server's one loop. */
static void more_fields_than_there_are_are_refused(void **state)
{
    enum { MANY = 100 };
    Ep__V1__GroupSpec base = good(), *out;
    struct ep_error error = EP_ERROR_INIT;
    char name[] = "ranks", *fields[MANY];

    (void)state;
    for (int i = 0; i < MANY; i++)
        fields[i] = name;
    assert_int_equal(ep_spec_take(&base, &base, fields, MANY, &out, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "fields has 100 entries: must be at most"));
}

static void only_timeout_labels_and_direct_are_live(void **state)
{
    const ProtobufCMessageDescriptor *d = &ep__v1__group_spec__descriptor;

    (void)state;
    for (unsigned i = 0; i < d->n_fields; i++) {
        Ep__V1__GroupSpec a = good(), b = good();
        bool live = !strcmp(d->fields[i].name, "timeout_ms") || !strcmp(d->fields[i].name, "direct");

        if (d->fields[i].label == PROTOBUF_C_LABEL_REPEATED || d->fields[i].type == PROTOBUF_C_TYPE_MESSAGE)
            continue;
        *((uint8_t *)&b + d->fields[i].offset) ^= 1;
        assert_int_equal(ep_spec_same_epoch(&a, &b), live);
        assert_false(ep_spec_same(&a, &b));
    }
}

static void a_token_is_live_and_hidden_where_it_is_settled(void **state)
{
    Ep__V1__AttachToken token = EP__V1__ATTACH_TOKEN__INIT;
    Ep__V1__GroupSpec a = good(), b = good();
    struct ep_settled s;
    char hash[] = "$y$hash";

    (void)state;
    token.state_case = EP__V1__ATTACH_TOKEN__STATE_HASH;
    token.hash = hash;
    b.attach_token = &token;
    assert_true(ep_spec_same_epoch(&a, &b));
    assert_false(ep_spec_same(&a, &b));
    s = settle(&b);
    assert_int_equal(s.spec->attach_token->state_case, EP__V1__ATTACH_TOKEN__STATE_SET);
    assert_true(s.spec->attach_token->set);
    ep_settled_clear(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_follow_the_rule),
        cmocka_unit_test(what_is_not_asked_is_settled_and_noted),
        cmocka_unit_test(what_is_asked_is_kept_and_not_noted),
        cmocka_unit_test(sizes_of_a_mode_that_is_not_there_are_dropped),
        cmocka_unit_test(uneven_experts_are_placed_on_the_first_ranks),
        cmocka_unit_test(ranks_experts_and_top_k),
        cmocka_unit_test(hidden_is_a_multiple_of_16_bytes),
        cmocka_unit_test(sets_hold_known_values_once),
        cmocka_unit_test(sizes_are_bounded),
        cmocka_unit_test(backends_are_those_of_the_node),
        cmocka_unit_test(direct_is_one_of_its_names),
        cmocka_unit_test(on_gpus_it_is_ll_and_several_ranks_share_one),
        cmocka_unit_test(gpus_have_the_modes_that_are_asked_for),
        cmocka_unit_test(what_gpus_cannot_do_is_refused),
        cmocka_unit_test(memory_of_a_rank_is_its_window_and_its_state),
        cmocka_unit_test(every_gpu_must_hold_its_ranks),
        cmocka_unit_test(labels_are_small_and_unique),
        cmocka_unit_test(placements_are_checked_home_by_home),
        cmocka_unit_test(redundant_homes_are_bounded_before_any_is_placed),
        cmocka_unit_test(what_would_fit_is_exact),
        cmocka_unit_test(both_modes_are_lowered_when_one_does_not_do),
        cmocka_unit_test(hopeless_specs_are_told_so),
        cmocka_unit_test(an_arena_that_was_asked_for_is_told_how_large_it_may_be),
        cmocka_unit_test(sizes_that_nobody_asked_for_are_lowered),
        cmocka_unit_test(named_fields_are_taken_and_others_kept),
        cmocka_unit_test(every_field_of_the_schema_can_be_taken),
        cmocka_unit_test(unknown_fields_are_refused),
        cmocka_unit_test(more_fields_than_there_are_are_refused),
        cmocka_unit_test(only_timeout_labels_and_direct_are_live),
        cmocka_unit_test(a_token_is_live_and_hidden_where_it_is_settled),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
