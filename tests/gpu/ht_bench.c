/*
 * ht_bench: how long HT ops take, beside what is aimed at and what the wire allows.
 *
 * All ranks in one process, one per GPU, launching the kernels themselves, as ll_bench.  Without a GPU it says so and
 * exits with 77.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include "ll_time.h"

enum { EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_SKIPPED = 77 };

struct options {
    uint32_t gpus, pairs, tokens, sms; /* gpus, sms 0: all */
    uint32_t sharing;                  /* ranks on each GPU */
    bool verify;
};

/* ---- cases --------------------------------------------------------------------------- */

#define MODEL .ht = true, .experts = 256, .hidden = 7168, .top_k = 8

static const struct shape shapes[] = {
    { MODEL, .layout = EP_LAYOUT_FLAT, .dtype = BENCH_BF16 },
    { MODEL, .layout = EP_LAYOUT_PACKED, .dtype = BENCH_BF16, .alignment = 128 },
    { MODEL, .layout = EP_LAYOUT_FLAT, .dtype = BENCH_FP8_GIVEN },
    { MODEL, .layout = EP_LAYOUT_FLAT, .dtype = BENCH_FP8 },
    { MODEL, .layout = EP_LAYOUT_PACKED, .dtype = BENCH_FP8_GIVEN, .alignment = 128 },
    { MODEL, .layout = EP_LAYOUT_FLAT, .dtype = BENCH_BF16, .routing = "zipf:1.2" },
};

/* us that have to be reached with 4096 tokens, dispatch and combine; 0: not said */
struct bar {
    uint32_t gpus;
    ep_layout layout;
    enum bench_dtype dtype;
    float dispatch, combine;
};

static const struct bar bars[] = {
    { 8, EP_LAYOUT_FLAT, BENCH_BF16, 900, 880 },   { 8, EP_LAYOUT_PACKED, BENCH_BF16, 950, 950 },
    { 8, EP_LAYOUT_FLAT, BENCH_FP8_GIVEN, 470, 0 }, { 4, EP_LAYOUT_FLAT, BENCH_BF16, 540, 510 },
    { 4, EP_LAYOUT_PACKED, BENCH_BF16, 580, 560 }, { 4, EP_LAYOUT_FLAT, BENCH_FP8_GIVEN, 310, 0 },
};

static const struct bar *find_bar(uint32_t gpus, const struct shape *s)
{
    for (size_t i = 0; i < sizeof bars / sizeof *bars; i++)
        if (bars[i].gpus == gpus && bars[i].layout == s->layout && bars[i].dtype == s->dtype && !s->routing
            && s->tokens == 4096 && s->sms == 0)
            return &bars[i];
    return NULL;
}

/* ---- the table ----------------------------------------------------------------------- */

static void print_head(void)
{
    printf("\nus, between events on the stream, slowest rank, median (by the GPU's clock, mean).  push: the dispatch's "
           "remote rows with plain stores; ratio: dispatch by that\n");
    printf("%-7s %-9s %-9s %5s %4s | %15s %15s %7s | %7s %5s %5s | %s\n", "layout", "wire", "routing", "T", "SMs",
           "dispatch", "combine", "pair", "push", "GB/s", "ratio", "must");
}

static void print_row(const struct shape *s, const struct ll_times *t, uint32_t gpus)
{
    const struct bar *bar = find_bar(gpus, s);
    char dispatch[32], combine[32], sms[16];

    snprintf(sms, sizeof sms, s->sms ? "%u" : "all", s->sms);
    snprintf(dispatch, sizeof dispatch, "%.1f (%.1f)", t->dispatch, t->dispatch_kernel);
    snprintf(combine, sizeof combine, "%.1f (%.1f)", t->combine, t->combine_kernel);
    printf("%-7s %-9s %-9s %5u %4s | %15s %15s %7.1f", bench_layout_name(s->layout), bench_dtypes[s->dtype].name,
           s->routing ? s->routing : "uniform", s->tokens, sms, dispatch, combine, t->pair);
    if (t->push > 0)
        printf(" | %7.1f %5.0f %5.2f", t->push, t->push_gbps, t->dispatch / t->push);
    else
        printf(" | %7s %5s %5s", "-", "-", "-");
    if (bar)
        printf(" | %.0f / %.0f", (double)bar->dispatch, (double)bar->combine);
    printf("\n");
    fflush(stdout);
}

/* ---- the command line ---------------------------------------------------------------- */

static void usage(FILE *to)
{
    fputs("usage: ht_bench [--gpus N] [--sharing N] [--pairs N] [--tokens N] [--sms N] [--no-verify]\n"
          "\n"
          "  --gpus N      GPUs to use (default: all)\n"
          "  --sharing N   ranks on each of them (default 1; figures are for 1)\n"
          "  --pairs N     pairs in graphs that are timed (default 200)\n"
          "  --tokens N    of a rank (default 4096)\n"
          "  --sms N       multiprocessors of a rank (default: all)\n"
          "  --no-verify   do not compare one pass of each case with the reference first\n",
          to);
}

static bool parse(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {
        { "gpus", required_argument, NULL, 'g' }, { "sharing", required_argument, NULL, 'r' },
        { "pairs", required_argument, NULL, 'p' },
        { "tokens", required_argument, NULL, 't' }, { "sms", required_argument, NULL, 's' },
        { "no-verify", no_argument, NULL, 'n' }, { "help", no_argument, NULL, 'h' }, { NULL, 0, NULL, 0 }
    };
    int c;

    *o = (struct options){ .pairs = 200, .sharing = 1, .tokens = 4096, .verify = true };
    while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (c) {
        case 'g': o->gpus = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'r': o->sharing = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'p': o->pairs = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 't': o->tokens = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 's': o->sms = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'n': o->verify = false; break;
        case 'h': usage(stdout); exit(0);
        default: return false;
        }
    }
    return optind == argc && o->pairs > 0 && o->tokens > 0 && o->sharing > 0;
}

static int run(const struct ep_cuda_api *api, const struct options *o)
{
    int code = 0;

    print_head();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct ep_error error = EP_ERROR_INIT;
        struct shape shape = shapes[i];
        const struct ll_time_options how = {
            .ranks = o->gpus * o->sharing, .gpus = o->gpus, .pairs = o->pairs, .verify = o->verify
        };
        struct ll_times times;

        shape.tokens = o->tokens;
        shape.sms = o->sms;
        if (ll_time(api, &shape, &how, &times, &error) == EP_OK) {
            print_row(&shape, &times, o->sharing == 1 ? o->gpus : 0);
            continue;
        }
        printf("%-7s %-9s FAILED: %s\n", bench_layout_name(shape.layout), bench_dtypes[shape.dtype].name, error.text);
        code = EXIT_FAILED;
    }
    return code;
}

int main(int argc, char **argv)
{
    struct ep_error error = EP_ERROR_INIT;
    const struct ep_cuda_api *api;
    struct ep_cuda_device device;
    struct options o;
    uint32_t count = 0;

    if (!parse(argc, argv, &o)) {
        usage(stderr);
        return EXIT_USAGE;
    }
    if (o.sharing > 1)
        ep_cuda_ask_for_queues();
    if (ep_cuda_open(&api, &error) != EP_OK) {
        printf("no GPU here: %s\n", error.text);
        return EXIT_SKIPPED;
    }
    if (api->device_count(&count, &error) != EP_OK || api->device_info(0, &device, &error) != EP_OK) {
        fprintf(stderr, "%s\n", error.text);
        return EXIT_FAILED;
    }
    o.gpus = o.gpus ? o.gpus : count;
    if (o.gpus > count || o.gpus * o.sharing > WORLD_MAX_RANKS) {
        fprintf(stderr, "%u GPUs with %u ranks each: there are %u GPUs, and at most %u ranks\n", o.gpus, o.sharing, count,
                (uint32_t)WORLD_MAX_RANKS);
        return EXIT_USAGE;
    }
    printf("%u x %s, %u ranks, driver %u; H 7168, K 8, E 256\n", o.gpus, device.name, o.gpus * o.sharing, device.driver);
    return run(api, &o);
}
