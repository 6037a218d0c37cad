/*
 * gin_conformance: does a GIN plugin do what NCCL and GPU kernels rely on?
 *
 * Any plugin, without NCCL and, unless asked for, without a GPU: processes play the ranks of a communicator and call
 * the plugin as NCCL's proxy does. One line per case, `N passed, N failed` at the end; 77 where it cannot run.
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "gin_tests.h"

enum { EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_SKIPPED = 77, MOST_FAILURES = 8 };

struct options {
    struct gin_setting setting;
    const char *filter;
    bool bench;
};

struct tally {
    uint32_t passed, failed, skipped;
};

static const struct gin_case cases[] = {
    { "the tables are what NCCL takes", gin_case_tables, 1 },
    { "a signal alone", gin_case_signal_alone, 1 },
    { "signals that are incremented and added to", gin_case_increments, 1 },
    { "values out of descriptors", gin_case_values, 1 },

    { "data is there when its signal is", gin_case_order, 1 },
    { "puts of every size", gin_case_sizes, 1 },
    { "puts to oneself", gin_case_self, 1 },
    { "large puts, all to all", gin_case_large, 1 },
    { "offsets beyond 4 GiB", gin_case_far, 1 },
    { "puts to oneself, without progress", gin_case_no_progress, 1 },
    { "a source in host memory", gin_case_host_source, 1 },
    { "a target in host memory", gin_case_host_target, 1 },
    { "several communicators", gin_case_communicators, 1 },
    { "several contexts", gin_case_contexts, 1 },

    { "full queues", gin_case_full_queues, 1 },
    { "64 Ki puts under way", gin_case_many, 1 },
    { "requests are asked for in any order", gin_case_shuffled, 1 },
    { "a source that is written again", gin_case_source_again, 1 },
    { "unequal load", gin_case_unequal, 2 },

    { "regions of different sizes", gin_case_regions, 1 },
    { "regions come and go meanwhile", gin_case_regions_change, 1 },
    { "puts that are not inside", gin_case_outside, 1 },

    { "a rank is stopped for a while", gin_case_stopped, 3 },
    { "a rank is killed", gin_case_killed, 3 },
    { "a rank closes", gin_case_closed, 3 },
    { "closed while puts are under way", gin_case_closed_busy, 1 },
    { "strangers at the door", gin_case_strangers, 2 },
    { "a peer that never connects", gin_case_never_connects, 2 },
    { "a peer that died before", gin_case_died_before, 2 },

    { "50 communicators, one after the other", gin_case_churn, 1 },
    { "finalized and started again", gin_case_restart, 1 },
};

/* ---- running them -------------------------------------------------------------------------------- */

struct run {
    const struct gin_setting *setting;
    gin_case_fn *fn;
};

static ep_status run_rank(struct crew *crew, const void *arg, struct ep_error *error)
{
    const struct run *run = arg;
    struct player player;
    ep_status status = player_open(crew, run->setting, &player, error);

    if (status == EP_OK)
        status = run->fn(&player, error);
    return status == EP_OK ? player_close(&player, error) : status;
}

static void print_report(const char *report)
{
    while (*report) {
        const size_t length = strcspn(report, "\n");

        printf("     %.*s\n", (int)length, report);
        report += length + (report[length] == '\n');
    }
}

static void say(struct tally *tally, const char *name, uint64_t start, ep_status status, const char *report)
{
    const double seconds = (double)(ep_clock_ns() - start) / 1e9;

    if (status == EP_OK) {
        printf("ok   %s (%.2f s)\n", name, seconds);
        tally->passed++;
    } else if (status == EP_UNIMPLEMENTED) {
        printf("skip %s: %.*s\n", name, (int)strcspn(report, "\n"), report);
        tally->skipped++;
    } else {
        printf("FAIL %s (%.2f s)\n", name, seconds);
        print_report(report);
        tally->failed++;
    }
}

static void run_case(const struct gin_case *c, const struct gin_setting *setting, struct tally *tally)
{
    const struct run run = { .setting = setting, .fn = c->run };
    const uint64_t start = ep_clock_ns();
    char report[CREW_REPORT];

    if (setting->ranks < c->least_ranks) {
        snprintf(report, sizeof report, "needs %u ranks", c->least_ranks);
        say(tally, c->name, start, EP_UNIMPLEMENTED, report);
        return;
    }
    say(tally, c->name, start, crew_run(setting->ranks, setting->seconds, run_rank, &run, report), report);
    fflush(stdout);
}

static int run_cases(const struct options *o)
{
    struct tally tally = { 0 };

    for (size_t i = 0; i < sizeof cases / sizeof *cases && tally.failed < MOST_FAILURES; i++)
        if (!o->filter || strstr(cases[i].name, o->filter))
            run_case(&cases[i], &o->setting, &tally);
    if (tally.failed == MOST_FAILURES) /* what fails so often has one cause */
        printf("stopped after %u failures\n", tally.failed);
    printf("%u passed, %u failed", tally.passed, tally.failed);
    printf(tally.skipped ? ", %u skipped\n" : "\n", tally.skipped);
    return tally.failed ? EXIT_FAILED : 0;
}

static int run_bench(const struct options *o)
{
    const struct run run = { .setting = &o->setting, .fn = gin_bench };
    char report[CREW_REPORT];
    ep_status status = crew_run(o->setting.ranks, o->setting.seconds, run_rank, &run, report);

    print_report(report);
    return status == EP_OK ? 0 : EXIT_FAILED;
}

static ep_status do_nothing(struct player *player, struct ep_error *error)
{
    (void)player, (void)error;
    return EP_OK;
}

/* Can it run at all? */
static ep_status probe(const struct gin_setting *setting)
{
    const struct run run = { .setting = setting, .fn = do_nothing };
    char report[CREW_REPORT];
    ep_status status = crew_run(1, setting->seconds, run_rank, &run, report);

    if (status != EP_OK)
        printf("%s", report);
    return status;
}

/* ---- the command line ---------------------------------------------------------------------------- */

static void usage(FILE *to)
{
    fputs("usage: gin_conformance --plugin PATH [--table NAME] [--ranks N] [--memory host|cuda] [--filter TEXT]\n"
          "                       [--seconds N] [--seed N] [--log] [--bench]\n"
          "\n"
          "  --plugin PATH   the plugin, as in NCCL_NET_PLUGIN\n"
          "  --table NAME    gin-v11 (NCCL 2.28 on), rma-v13 or rma-v14 (NCCL 2.30); default: the first that it has\n"
          "  --ranks N       processes, 1 to 16 (default 4)\n"
          "  --memory M      where windows and signals are: host (default), or cuda: of GPUs, in turn\n"
          "  --filter TEXT   only cases whose name has TEXT in it\n"
          "  --seconds N     bound of a case (default 30)\n"
          "  --seed N        of everything random (default 1)\n"
          "  --log           what the plugin logs goes to stderr\n"
          "  --bench         measure: no cases, nothing is judged\n",
          to);
}

static bool number(const char *text, uint64_t low, uint64_t high, uint64_t *value)
{
    char *end;

    errno = 0;
    *value = strtoull(text, &end, 10);
    return end != text && !*end && !strchr(text, '-') && !errno && *value >= low && *value <= high;
}

static bool memory_kind(const char *text, bool *cuda)
{
    *cuda = strcmp(text, "cuda") == 0;
    return *cuda || strcmp(text, "host") == 0;
}

static bool parse(int argc, char **argv, struct options *o)
{
    static const struct option known[] = { { "plugin", required_argument, NULL, 'p' },
                                           { "table", required_argument, NULL, 't' },
                                           { "ranks", required_argument, NULL, 'r' },
                                           { "memory", required_argument, NULL, 'm' },
                                           { "filter", required_argument, NULL, 'f' },
                                           { "seconds", required_argument, NULL, 's' },
                                           { "seed", required_argument, NULL, 'e' },
                                           { "log", no_argument, NULL, 'l' },
                                           { "bench", no_argument, NULL, 'b' },
                                           { "help", no_argument, NULL, 'h' },
                                           { NULL, 0, NULL, 0 } };
    uint64_t ranks = 4, seconds = 30, seed = 1;
    bool good = true;
    int c;

    *o = (struct options){ 0 };
    while (good && (c = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (c) {
        case 'p': o->setting.plugin = optarg; break;
        case 't': o->setting.table = optarg; break;
        case 'r': good = number(optarg, 1, CREW_MAX_RANKS, &ranks); break;
        case 'm': good = memory_kind(optarg, &o->setting.cuda); break;
        case 'f': o->filter = optarg; break;
        case 's': good = number(optarg, 1, 3600, &seconds); break;
        case 'e': good = number(optarg, 0, UINT64_MAX, &seed); break;
        case 'l': o->setting.log = true; break;
        case 'b': o->bench = true; break;
        case 'h': usage(stdout); exit(0);
        default: good = false;
        }
    }
    o->setting.ranks = (uint32_t)ranks;
    o->setting.seconds = (uint32_t)seconds;
    o->setting.seed = seed;
    return good && optind == argc && o->setting.plugin;
}

int main(int argc, char **argv)
{
    struct options o;
    ep_status status;

    if (!parse(argc, argv, &o)) {
        usage(stderr);
        return EXIT_USAGE;
    }
    ep_cuda_ask_for_queues();
    printf("%s, %s, %u ranks, %s memory, seed %llu\n", o.setting.plugin,
           o.setting.table ? o.setting.table : "any table", o.setting.ranks, o.setting.cuda ? "cuda" : "host",
           (unsigned long long)o.setting.seed);
    status = probe(&o.setting);
    if (status != EP_OK)
        return status == EP_UNIMPLEMENTED ? EXIT_SKIPPED : EXIT_FAILED;
    return o.bench ? run_bench(&o) : run_cases(&o);
}
