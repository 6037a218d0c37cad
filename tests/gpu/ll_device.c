/*
 * ll_device: are the LL kernels right?
 *
 * All ranks of a group in one process, against kernels/reference: every layout, format and shape, ops in
 * unusual orders, ranks that leave, return or are late, captured graphs, and random ops for as long as one
 * likes.  One line per case, `N passed, N failed` at the end.  Without a GPU it says so and exits with 77.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ll_tests.h"

enum { EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_SKIPPED = 77, MOST_FAILURES = 12 };
enum { TIMEOUT_MS = 20000 }; /* passes are compared on slow hosts too */

/* ---- cases --------------------------------------------------------------------------- */

#define EM     EP_LAYOUT_EXPERT_MAJOR
#define RM     EP_LAYOUT_RANK_MAJOR
#define PACKED EP_LAYOUT_PACKED
#define FLAT   EP_LAYOUT_FLAT

/* Defaults of all of them; what is named again differs. */
#define SHAPE(...)                                                                                           \
    {                                                                                                        \
        .layout = EM, .dtype = BENCH_BF16, .experts = 64, .hidden = 1024, .tokens = 77, .top_k = 8,          \
        __VA_ARGS__                                                                                          \
    }
#define ENTRY(name, run, least, served, nodes, ...)                                                          \
    {                                                                                                        \
        name, run, SHAPE(__VA_ARGS__), least, served, nodes                                                  \
    }
#define CASE(...)                       ENTRY(NULL, ll_case_shape, 1, false, LL_ANY_NODES, __VA_ARGS__)
#define NAMED(name, run, least, ...)    ENTRY(name, run, least, false, LL_ANY_NODES, __VA_ARGS__)
#define SERVED(name, run, least, ...)   ENTRY(name, run, least, true, LL_ANY_NODES, __VA_ARGS__)
#define ONE_NODE(name, run, least, ...) ENTRY(name, run, least, false, LL_ONE_NODE, __VA_ARGS__)
#define NODES(name, run, least, ...)    ENTRY(name, run, least, false, LL_SEVERAL_NODES, __VA_ARGS__)

#define EACH_LAYOUT(...)                                                                                     \
    CASE(.layout = EM, __VA_ARGS__), CASE(.layout = RM, __VA_ARGS__), CASE(.layout = PACKED, __VA_ARGS__),   \
        CASE(.layout = PACKED, .alignment = 16, __VA_ARGS__)

#define EACH_HT(...)                                                                                         \
    CASE(.ht = true, .layout = FLAT, __VA_ARGS__), CASE(.ht = true, .layout = PACKED, __VA_ARGS__),          \
        CASE(.ht = true, .layout = PACKED, .alignment = 16, .grads = true, __VA_ARGS__)

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverride-init" /* SHAPE's defaults */
static const struct ll_case cases[] = {
    /* formats */
    EACH_LAYOUT(.dtype = BENCH_BF16, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_LAYOUT(.dtype = BENCH_FP16, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_LAYOUT(.dtype = BENCH_FP32, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_LAYOUT(.dtype = BENCH_FP8, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_LAYOUT(.dtype = BENCH_FP16_TO_FP8, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_LAYOUT(.dtype = BENCH_FP32_TO_FP8, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_LAYOUT(.dtype = BENCH_FP8_GIVEN, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_LAYOUT(.dtype = BENCH_FP8, .scales = EP_SCALE_UE8M0, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_LAYOUT(.dtype = BENCH_FP16_TO_FP8, .scales = EP_SCALE_UE8M0, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_LAYOUT(.dtype = BENCH_FP32_TO_FP8, .scales = EP_SCALE_UE8M0, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_LAYOUT(.dtype = BENCH_FP8_GIVEN, .scales = EP_SCALE_UE8M0, .tokens = 33, .experts = 32, .top_k = 4),

    /* tokens */
    EACH_LAYOUT(.tokens = 0),
    EACH_LAYOUT(.tokens = 1),
    EACH_LAYOUT(.tokens = 7, .max_tokens = 128),
    EACH_LAYOUT(.tokens = 128),
    CASE(.tokens = 1024, .hidden = 1024),
    CASE(.tokens = 1024, .hidden = 1024, .layout = RM),
    CASE(.tokens = 1024, .hidden = 1024, .top_k = 2, .layout = PACKED, .dtype = BENCH_FP8),
    EACH_LAYOUT(.tokens = 50, .ragged = true),
    EACH_LAYOUT(.tokens = 50, .empty_rank = true),

    /* hidden sizes of models */
    CASE(.hidden = 2880, .tokens = 40),
    CASE(.hidden = 2880, .tokens = 40, .layout = RM, .dtype = BENCH_FP8),
    CASE(.hidden = 2880, .tokens = 40, .layout = PACKED, .dtype = BENCH_FP8_GIVEN),
    CASE(.hidden = 7168, .tokens = 128, .experts = 256),
    CASE(.hidden = 7168, .tokens = 128, .experts = 256, .layout = RM),
    CASE(.hidden = 7168, .tokens = 128, .experts = 256, .dtype = BENCH_FP8),
    CASE(.hidden = 7168, .tokens = 7, .max_tokens = 128, .experts = 256, .layout = PACKED, .alignment = 16),
    CASE(.hidden = 8192, .tokens = 20),
    CASE(.hidden = 8192, .tokens = 20, .layout = RM, .dtype = BENCH_FP32),
    CASE(.hidden = 8192, .tokens = 20, .layout = PACKED, .dtype = BENCH_FP8),
    CASE(.hidden = 1040, .tokens = 20, .layout = RM, .dtype = BENCH_FP16_TO_FP8),
    CASE(.hidden = 1040, .tokens = 20, .layout = PACKED, .dtype = BENCH_FP32_TO_FP8),
    CASE(.hidden = 1040, .tokens = 20, .dtype = BENCH_FP8), /* the last block of a row is a part of one */
    EACH_LAYOUT(.hidden = 1040, .tokens = 20, .dtype = BENCH_FP8, .scales = EP_SCALE_UE8M0),
    EACH_LAYOUT(.hidden = 1040, .tokens = 20, .dtype = BENCH_FP8_GIVEN, .scales = EP_SCALE_UE8M0),
    CASE(.hidden = 7168, .tokens = 128, .experts = 256, .dtype = BENCH_FP8, .scales = EP_SCALE_UE8M0),

    /* choices and experts */
    EACH_LAYOUT(.top_k = 1),
    EACH_LAYOUT(.top_k = 3, .max_top_k = 8),
    EACH_LAYOUT(.top_k = 16, .tokens = 40),
    EACH_LAYOUT(.experts = 37, .top_k = 5),
    EACH_LAYOUT(.experts = 300, .top_k = 6),
    EACH_LAYOUT(.experts = 40, .redundant = true),
    EACH_LAYOUT(.drop = 0.3),
    EACH_LAYOUT(.drop = 1.0, .tokens = 5),
    EACH_LAYOUT(.bad_ids = true),
    CASE(.bad_ids = true, .index_bytes = 8),
    CASE(.bad_ids = true, .index_bytes = 8, .layout = PACKED),
    EACH_LAYOUT(.repeats = true),
    EACH_LAYOUT(.no_weights = true),
    CASE(.bias = true),
    CASE(.bias = true, .layout = RM, .dtype = BENCH_FP16),
    CASE(.bias = true, .layout = PACKED, .dtype = BENCH_FP32),
    EACH_LAYOUT(.experts = 37, .redundant = true, .repeats = true, .bad_ids = true, .drop = 0.1,
                .ragged = true),
    CASE(.banks = 3),
    CASE(.banks = 4, .layout = RM),

    /* orders */
    NAMED("two handles interleaved", ll_case_interleaved, 1, .tokens = 40),
    NAMED("two handles interleaved, rank-major", ll_case_interleaved, 1, .tokens = 40, .layout = RM),
    NAMED("two handles interleaved, packed fp8", ll_case_interleaved, 1, .tokens = 40, .layout = PACKED,
          .dtype = BENCH_FP8),
    NAMED("two handles, each op in halves", ll_case_halves, 1, .tokens = 40),
    NAMED("two handles, each op in halves, rank-major", ll_case_halves, 1, .tokens = 40, .layout = RM),
    NAMED("skipped combines, a stale handle", ll_case_skipped, 1, .tokens = 40),
    NAMED("skipped combines, a stale handle, rank-major", ll_case_skipped, 1, .tokens = 40, .layout = RM),
    NAMED("skipped combines, four banks", ll_case_skipped, 1, .tokens = 40, .banks = 4),
    NAMED("released handles", ll_case_released, 1, .tokens = 40),
    NAMED("released handles of one rank", ll_case_released_by_one, 2, .tokens = 40),
    NAMED("handles that hold no such dispatch", ll_case_stale, 1, .tokens = 40),
    NAMED("handles that hold no such dispatch, packed, three banks", ll_case_stale, 1, .tokens = 40, .layout = PACKED,
          .banks = 3),
    NAMED("a combine comes when others dispatch again", ll_case_behind, 2, .tokens = 0),
    NAMED("packed rows do not fit", ll_case_overflow, 1, .tokens = 40, .layout = PACKED),

    /* membership */
    NAMED("a rank is absent and returns", ll_case_absent, 2, .tokens = 40),
    NAMED("a rank is absent and returns, rank-major", ll_case_absent, 2, .tokens = 40, .layout = RM),
    NAMED("a rank is absent and returns, packed fp8", ll_case_absent, 2, .tokens = 40, .layout = PACKED,
          .dtype = BENCH_FP8),
    NAMED("a rank leaves while others wait for its dispatch", ll_case_leaves_dispatch, 2, .tokens = 40),
    NAMED("a rank leaves while others wait for its dispatch, packed", ll_case_leaves_dispatch, 2,
          .tokens = 40, .layout = PACKED),
    NAMED("a rank leaves while others wait for its combine", ll_case_leaves_combine, 2, .tokens = 40),
    NAMED("a rank leaves while others wait for its combine, rank-major", ll_case_leaves_combine, 2,
          .tokens = 40, .layout = RM),
    NAMED("a rank leaves in the middle of a dispatch", ll_case_leaves_in_dispatch, 2, .tokens = 40),
    NAMED("a rank leaves in the middle of a dispatch, rank-major", ll_case_leaves_in_dispatch, 2, .tokens = 40,
          .layout = RM),
    NAMED("a rank leaves in the middle of a dispatch, packed", ll_case_leaves_in_dispatch, 2, .tokens = 40,
          .layout = PACKED),
    NAMED("a rank leaves in the middle of a combine", ll_case_leaves_in_combine, 2, .tokens = 40, .top_k = 2,
          .hidden = 512),
    ONE_NODE("somebody joins in the middle of a dispatch", ll_case_joins_in_dispatch, 3, .tokens = 77, .sms = 4),
    ONE_NODE("somebody joins in the middle of a dispatch, rank-major", ll_case_joins_in_dispatch, 3, .tokens = 77,
             .sms = 4, .layout = RM),
    ONE_NODE("somebody joins in the middle of a dispatch, packed", ll_case_joins_in_dispatch, 3, .tokens = 77,
             .sms = 4, .layout = PACKED),
    NODES("somebody joins while others go on", ll_case_joins_between, 2, .tokens = 12),
    NODES("somebody joins while others go on, rank-major", ll_case_joins_between, 2, .tokens = 12, .layout = RM),
    NAMED("a rank's dispatch is late", ll_case_late_dispatch, 2, .tokens = 40),
    NAMED("a rank's dispatch is late, rank-major", ll_case_late_dispatch, 2, .tokens = 40, .layout = RM),
    NAMED("a rank's credit is late", ll_case_late_credit, 2, .tokens = 40),
    NAMED("a rank's combine is late", ll_case_late_combine, 2, .tokens = 40),

    /* graphs */
    NAMED("1000 replays of a graph, other inputs each time", ll_case_graph, 1, .tokens = 16, .experts = 32,
          .top_k = 4),
    NAMED("1000 replays of a graph, other inputs each time, packed", ll_case_graph, 1, .tokens = 16,
          .experts = 32, .top_k = 4, .layout = PACKED),

    /* HT: formats */
    EACH_HT(.dtype = BENCH_BF16, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_HT(.dtype = BENCH_FP16, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_HT(.dtype = BENCH_FP32, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_HT(.dtype = BENCH_FP8, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_HT(.dtype = BENCH_FP16_TO_FP8, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_HT(.dtype = BENCH_FP32_TO_FP8, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_HT(.dtype = BENCH_FP8_GIVEN, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_HT(.dtype = BENCH_FP8, .scales = EP_SCALE_UE8M0, .tokens = 33, .experts = 32, .top_k = 4),
    EACH_HT(.dtype = BENCH_FP8_GIVEN, .scales = EP_SCALE_UE8M0, .tokens = 33, .experts = 32, .top_k = 4),

    /* HT: tokens */
    EACH_HT(.tokens = 0),
    EACH_HT(.tokens = 1),
    EACH_HT(.tokens = 7, .max_tokens = 128),
    EACH_HT(.tokens = 500, .experts = 256),
    EACH_HT(.tokens = 50, .ragged = true),
    EACH_HT(.tokens = 50, .empty_rank = true),
    CASE(.ht = true, .layout = FLAT, .tokens = 8192, .hidden = 16, .experts = 256, .grads = true),
    CASE(.ht = true, .layout = PACKED, .tokens = 9001, .hidden = 16, .experts = 256, .top_k = 6),
    CASE(.ht = true, .layout = FLAT, .tokens = 600, .hidden = 7168, .experts = 256),
    CASE(.ht = true, .layout = PACKED, .tokens = 600, .hidden = 7168, .experts = 256, .alignment = 128),
    CASE(.ht = true, .layout = PACKED, .tokens = 300, .hidden = 7168, .experts = 256, .dtype = BENCH_FP8),
    EACH_HT(.hidden = 2880, .tokens = 40),
    EACH_HT(.hidden = 1040, .tokens = 20, .dtype = BENCH_FP8), /* the last block of a row is a part of one */
    EACH_HT(.hidden = 1040, .tokens = 20, .dtype = BENCH_FP8_GIVEN, .scales = EP_SCALE_UE8M0),

    /* HT: choices and experts */
    EACH_HT(.top_k = 1),
    EACH_HT(.top_k = 3, .max_top_k = 8),
    EACH_HT(.top_k = 16, .tokens = 40),
    EACH_HT(.experts = 37, .top_k = 5),
    EACH_HT(.experts = 300, .top_k = 6),
    EACH_HT(.experts = 3000, .top_k = 6, .tokens = 40),
    EACH_HT(.experts = 40, .redundant = true),
    EACH_HT(.drop = 0.3),
    EACH_HT(.drop = 1.0, .tokens = 5),
    EACH_HT(.bad_ids = true, .index_bytes = 8),
    EACH_HT(.repeats = true),
    EACH_HT(.no_weights = true),
    EACH_HT(.bias = true),
    EACH_HT(.bias = true, .dtype = BENCH_FP32),
    EACH_HT(.routing = "zipf:1.2", .tokens = 200),
    EACH_HT(.experts = 37, .redundant = true, .repeats = true, .bad_ids = true, .drop = 0.1, .ragged = true),

    /* HT: orders */
    NAMED("HT: two handles interleaved", ll_case_interleaved, 1, .ht = true, .tokens = 40, .layout = FLAT),
    NAMED("HT: two handles interleaved, packed fp8", ll_case_interleaved, 1, .ht = true, .tokens = 40,
          .layout = PACKED, .dtype = BENCH_FP8),
    NAMED("HT: two handles interleaved, by one node in another order", ll_case_crossed, 2, .ht = true, .tokens = 40,
          .layout = FLAT),
    NAMED("HT and LL interleaved in one group", ll_case_interleaved, 1, .ht = true, .both = true, .tokens = 40,
          .layout = PACKED),
    NAMED("HT: a combine comes when others dispatch again", ll_case_behind, 2, .ht = true, .tokens = 0, .layout = FLAT),
    NAMED("HT: a combine comes when others dispatch again, packed", ll_case_behind, 2, .ht = true, .tokens = 0,
          .layout = PACKED),
    NAMED("HT: a combine comes when others dispatch in LL", ll_case_behind, 2, .ht = true, .both = true, .tokens = 128,
          .drop = 1.0, .layout = PACKED),
    NAMED("HT of one group while another one has LL", ll_case_two_groups, 1, .ht = true, .tokens = 128, .layout = PACKED),
    NAMED("HT: a combine of LL comes when others dispatch in HT", ll_case_behind, 2, .both = true, .tokens = 128,
          .drop = 1.0, .layout = PACKED),
    NAMED("HT: handles that hold no such dispatch", ll_case_stale, 1, .ht = true, .tokens = 40, .layout = PACKED),
    NAMED("HT: packed rows do not fit", ll_case_overflow, 1, .ht = true, .tokens = 40, .layout = PACKED),
    NAMED("HT: flat rows do not fit", ll_case_overflow, 1, .ht = true, .tokens = 40, .layout = FLAT),

    /* HT: membership */
    NAMED("HT: a rank is absent and returns", ll_case_absent, 2, .ht = true, .tokens = 40, .layout = FLAT),
    NAMED("HT: a rank is absent and returns, packed fp8", ll_case_absent, 2, .ht = true, .tokens = 40,
          .layout = PACKED, .dtype = BENCH_FP8),
    NAMED("HT: a rank leaves while others wait for its dispatch", ll_case_leaves_dispatch, 2, .ht = true,
          .tokens = 40, .layout = FLAT),
    NAMED("HT: a rank leaves while others wait for its dispatch, packed", ll_case_leaves_dispatch, 2, .ht = true,
          .tokens = 40, .layout = PACKED),
    NAMED("HT: a rank leaves while others wait for its combine", ll_case_leaves_combine, 2, .ht = true,
          .tokens = 40, .layout = FLAT),
    NAMED("HT: a rank leaves while others wait for its combine, packed", ll_case_leaves_combine, 2, .ht = true,
          .tokens = 40, .layout = PACKED),
    NAMED("HT: a rank leaves in the middle of a dispatch", ll_case_leaves_in_dispatch, 2, .ht = true, .tokens = 100,
          .layout = FLAT),
    NAMED("HT: a rank leaves in the middle of a dispatch, packed", ll_case_leaves_in_dispatch, 2, .ht = true,
          .tokens = 100, .layout = PACKED),
    NAMED("HT: a rank leaves in the middle of a combine", ll_case_leaves_in_combine, 2, .ht = true, .tokens = 200,
          .top_k = 2, .hidden = 512, .layout = PACKED),
    NAMED("HT: two ranks of a node in a row are absent", ll_case_absent_in_a_row, 6, .ht = true, .tokens = 40,
          .layout = FLAT),
    NAMED("HT: two ranks of a node in a row are absent, packed", ll_case_absent_in_a_row, 6, .ht = true, .tokens = 40,
          .layout = PACKED),
    NAMED("HT: ranks of a node come and go between ops", ll_case_gates_by_chance, 6, .ht = true, .tokens = 20,
          .hidden = 512, .layout = PACKED),
    NODES("HT: somebody joins while others go on", ll_case_joins_between, 2, .ht = true, .tokens = 12, .layout = FLAT),
    NODES("HT: somebody joins while others go on, packed", ll_case_joins_between, 2, .ht = true, .tokens = 12,
          .layout = PACKED),
    NAMED("HT: a rank's dispatch is late", ll_case_late_dispatch, 2, .ht = true, .tokens = 40, .layout = FLAT),
    NAMED("HT: a rank's dispatch is late, packed", ll_case_late_dispatch, 2, .ht = true, .tokens = 40,
          .layout = PACKED),
    NAMED("HT: a rank's combine is late", ll_case_late_combine, 2, .ht = true, .tokens = 40, .layout = FLAT),

    /* HT: graphs */
    NAMED("HT: 1000 replays of a graph, other inputs each time", ll_case_graph, 1, .ht = true, .tokens = 16,
          .experts = 32, .top_k = 4, .layout = PACKED),

    /* a worker that is not trusted */
    SERVED("memory and groups come and go while doorbells are waited for", ll_case_churn, 1, .tokens = 40),
    SERVED("ops that are none", ll_case_wrong_ops, 1, .tokens = 40),
    SERVED("a mailbox that is closed", ll_case_closed, 2, .tokens = 40),
    SERVED("the end of a serve whose op runs", ll_case_end, 2, .tokens = 40),
    SERVED("memory of the worker's own", ll_case_regions, 1, .tokens = 40),
    SERVED("memory of the worker's own, rank-major", ll_case_regions, 1, .tokens = 40, .layout = RM, .bias = true),
    SERVED("memory of the worker's own, packed fp8", ll_case_regions, 1, .tokens = 40, .layout = PACKED,
           .dtype = BENCH_FP8_GIVEN),
    SERVED("memory that is no region", ll_case_wrong_regions, 1, .tokens = 40),
    SERVED("memory that goes while ops use it", ll_case_lost_regions, 1, .tokens = 40),
    SERVED("memory that stays as long as an op uses it", ll_case_held_regions, 2, .tokens = 40),
    SERVED("ops that are not the expected ones", ll_case_unexpected, 1, .tokens = 300),
    SERVED("ops that are not the expected ones, packed fp8", ll_case_unexpected, 1, .tokens = 40, .layout = PACKED,
           .dtype = BENCH_FP8),
    SERVED("HT: ops that are not the expected ones", ll_case_unexpected, 1, .ht = true, .tokens = 40, .layout = PACKED),
    SERVED("HT: ops that repeat themselves are expected", ll_case_expected, 2, .ht = true, .tokens = 40, .layout = PACKED),
    SERVED("ops that change while they run", ll_case_storm, 1, .tokens = 40),
    SERVED("ops that change while they run, packed fp8", ll_case_storm, 1, .tokens = 40, .layout = PACKED,
           .dtype = BENCH_FP8),
    SERVED("HT: ops that change while they run, and forged notes", ll_case_storm, 1, .ht = true, .tokens = 40,
           .layout = PACKED, .dtype = BENCH_FP8),
    SERVED("a forged window", ll_case_forged, 2, .tokens = 40),
    SERVED("a forged window, rank-major", ll_case_forged, 2, .tokens = 40, .layout = RM),
    SERVED("a forged window, packed fp8", ll_case_forged, 2, .tokens = 40, .layout = PACKED, .dtype = BENCH_FP8),
    SERVED("HT: a forged window", ll_case_forged, 2, .ht = true, .tokens = 40, .layout = FLAT),
    SERVED("HT: a forged window, packed fp8", ll_case_forged, 2, .ht = true, .tokens = 40, .layout = PACKED,
           .dtype = BENCH_FP8),
};
#pragma GCC diagnostic pop

/* What a shape is called: its format and sizes, and what is odd about it. */
static void describe(const struct shape *s, char *text, size_t size)
{
    const struct {
        bool is;
        const char *name;
    } odd[] = {
        { s->layout == PACKED && s->alignment > 1, " aligned" },
        { s->max_tokens != 0, " of more tokens" },
        { s->max_top_k != 0, " of a larger K" },
        { s->ragged, " ragged" },
        { s->empty_rank, " one-empty-rank" },
        { s->redundant, " redundant" },
        { s->drop > 0, " -1" },
        { s->bad_ids, " bad-ids" },
        { s->repeats, " repeats" },
        { s->no_weights, " no-weights" },
        { s->bias, " bias" },
        { s->grads, " gradients" },
        { s->routing != NULL, " skewed" },
        { s->index_bytes == 8, " int64" },
        { s->banks > 2, " more-banks" },
    };
    int n = snprintf(text, size, "%s%s %s T=%u K=%u E=%u H=%u", s->ht ? "HT " : "", bench_layout_name(s->layout),
                     s->scales == EP_SCALE_UE8M0 ? bench_dtypes[s->dtype].powers : bench_dtypes[s->dtype].name,
                     s->tokens, s->top_k, s->experts, s->hidden);

    for (size_t i = 0; i < sizeof odd / sizeof *odd && n > 0 && (size_t)n < size; i++)
        if (odd[i].is)
            n += snprintf(text + n, size - (size_t)n, "%s", odd[i].name);
}

/* ---- running them -------------------------------------------------------------------- */

struct options {
    uint32_t ranks, gpus, sms; /* 0: as many as there are */
    const char *filter;
    bool served, ht, pcie;
    uint32_t timeout_ms, late_ms;
    uint64_t seed, soak;
};

struct tally {
    uint32_t passed, failed;
};

static bool report(struct tally *tally, const char *name, uint64_t start, ep_status status,
                   const struct ep_error *error)
{
    const double seconds = (double)(ep_clock_ns() - start) / 1e9;

    if (status == EP_OK) {
        printf("ok   %s (%.2f s)\n", name, seconds);
        tally->passed++;
    } else {
        printf("FAIL %s (%.2f s)\n     %s: %s\n", name, seconds, ep_status_name(status), error->text);
        tally->failed++;
    }
    fflush(stdout);
    return tally->failed < MOST_FAILURES; /* what fails so often has one cause */
}

static void run_cases(const struct ll_setting *setting, const struct options *o, struct tally *tally)
{
    const enum ll_nodes nodes = shape_nodes(setting->ranks) > 1 ? LL_SEVERAL_NODES : LL_ONE_NODE;
    char name[256];
    bool go_on = true;
    bool has_ht = true; /* a module that stands in for GPUs has it not */

    for (size_t i = 0; go_on && i < sizeof cases / sizeof *cases; i++) {
        const struct ll_case *c = &cases[i];
        const bool needs_ht = c->shape.ht || c->shape.both;
        struct ep_error error = EP_ERROR_INIT;
        const uint64_t start = ep_clock_ns();

        if (c->name)
            snprintf(name, sizeof name, "%s", c->name);
        else
            describe(&c->shape, name, sizeof name);
        if (setting->ranks < c->least_ranks || (c->served && !setting->served) || (c->nodes != LL_ANY_NODES && c->nodes != nodes)
            || (needs_ht && !has_ht) || (o->filter && !strstr(name, o->filter)))
            continue;

        const ep_status status = c->run(setting, &c->shape, &error);

        if (needs_ht && status == EP_UNIMPLEMENTED) {
            has_ht = false;
            printf("skip all of HT: %s\n", error.text);
        } else {
            go_on = report(tally, name, start, status, &error);
        }
    }
    if (!go_on)
        printf("stopped after %u failures\n", tally->failed);
}

static void run_soak(const struct ll_setting *setting, const struct options *o, struct tally *tally)
{
    struct ep_error error = EP_ERROR_INIT;
    const uint64_t start = ep_clock_ns();
    char name[64];

    snprintf(name, sizeof name, "soak of %llu random ops%s", (unsigned long long)o->soak,
             o->ht ? " of both modes" : "");
    report(tally, name, start, ll_soak(setting, o->soak, o->ht, &error), &error);
}

/* ---- the command line ---------------------------------------------------------------- */

static void usage(FILE *to)
{
    fputs("usage: ll_device [--ranks N] [--gpus N] [--executor direct|server] [--filter TEXT] [--seed N]\n"
          "                 [--soak N] [--ht] [--sms N] [--timeout-ms N] [--late-ms N]\n"
          "\n"
          "  --ranks N       ranks of the group (default: one per GPU, four on a single one)\n"
          "  --gpus N        GPUs to use (default: all)\n"
          "  --executor E    who launches ops: the ranks themselves, or another thread that they ring for\n"
          "                  (default direct)\n"
          "  --filter TEXT   only cases whose name has TEXT in it\n"
          "  --seed N        of all inputs (default 1)\n"
          "  --soak N        N random ops instead of the cases\n"
          "  --ht            HT ops among them\n"
          "  --sms N         multiprocessors that ops of a rank fill, at most (default: all, or its share of a GPU)\n"
          "  --pcie          as where PCIe joins the GPUs: lines of partials may come in pieces\n"
          "  --timeout-ms N  bound of a wait for a rank (default 20000); more where kernels are slow\n"
          "  --late-ms N     the same in cases where a rank is late, which others wait for in vain (default 200, or 4000\n"
          "                  where its credit is); more where kernels are slow\n",
          to);
}

static bool parse(int argc, char **argv, struct options *o)
{
    static const struct option known[] = { { "ranks", required_argument, NULL, 'r' },
                                           { "gpus", required_argument, NULL, 'g' },
                                           { "executor", required_argument, NULL, 'e' },
                                           { "filter", required_argument, NULL, 'f' },
                                           { "seed", required_argument, NULL, 's' },
                                           { "soak", required_argument, NULL, 'o' },
                                           { "ht", no_argument, NULL, 'h' + 256 },
                                           { "sms", required_argument, NULL, 'm' },
                                           { "pcie", no_argument, NULL, 'p' },
                                           { "timeout-ms", required_argument, NULL, 't' },
                                           { "late-ms", required_argument, NULL, 'l' },
                                           { "help", no_argument, NULL, 'h' },
                                           { NULL, 0, NULL, 0 } };
    int c;

    *o = (struct options){ .seed = 1, .timeout_ms = TIMEOUT_MS };
    while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (c) {
        case 'r': o->ranks = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'g': o->gpus = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'e':
            o->served = strcmp(optarg, "server") == 0;
            if (!o->served && strcmp(optarg, "direct") != 0)
                return false;
            break;
        case 'f': o->filter = optarg; break;
        case 's': o->seed = strtoull(optarg, NULL, 10); break;
        case 'o': o->soak = strtoull(optarg, NULL, 10); break;
        case 'h' + 256: o->ht = true; break;
        case 'm': o->sms = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'p': o->pcie = true; break;
        case 't': o->timeout_ms = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'l': o->late_ms = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'h': usage(stdout); exit(0);
        default: return false;
        }
    }
    return optind == argc && o->ranks <= WORLD_MAX_RANKS && o->timeout_ms > 0;
}

/* What there is, and how much of it is used. */
static ep_status settle(const struct options *o, struct ll_setting *setting, struct ep_error *error)
{
    struct ep_cuda_device device;
    uint32_t count = 0;
    ep_status status = setting->api->device_count(&count, error);

    if (status != EP_OK)
        return status;
    if (o->gpus > count)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--gpus is %u: there are %u", o->gpus, count);
    setting->gpus = o->gpus ? o->gpus : count;
    setting->ranks = o->ranks ? o->ranks : setting->gpus > 1 ? setting->gpus : 4;
    if (setting->gpus > setting->ranks)
        setting->gpus = setting->ranks;
    status = setting->api->device_info(0, &device, error);
    if (status == EP_OK)
        printf("%u ranks on %u x %s, driver %u, %s MPS, executor %s, seed %llu\n", setting->ranks, setting->gpus,
               device.name, device.driver, device.mps ? "with" : "without", setting->served ? "server" : "direct",
               (unsigned long long)setting->seed);
    return status;
}

int main(int argc, char **argv)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ll_setting setting = { 0 };
    struct tally tally = { 0 };
    struct options o;

    if (!parse(argc, argv, &o)) {
        usage(stderr);
        return EXIT_USAGE;
    }
    setting.seed = o.seed;
    setting.timeout_ms = o.timeout_ms;
    setting.late_ms = o.late_ms;
    setting.served = o.served;
    setting.pcie = o.pcie;
    setting.sms = o.sms;
    ep_cuda_ask_for_queues();
    if (ep_cuda_open(&setting.api, &error) != EP_OK) {
        printf("no GPU here: %s\n", error.text);
        return EXIT_SKIPPED;
    }
    if (settle(&o, &setting, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return EXIT_USAGE;
    }
    if (o.soak)
        run_soak(&setting, &o, &tally);
    else
        run_cases(&setting, &o, &tally);
    printf("%u passed, %u failed\n", tally.passed, tally.failed);
    return tally.failed ? EXIT_FAILED : 0;
}
