/*
 * ll_bench: how long LL ops take, beside what peers need, what is aimed at, and what the wire allows.
 *
 * All ranks in one process, one per GPU, launching the kernels themselves: what executor `direct` does
 * without the client library around it.  Without a GPU it says so and exits with 77.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bars.h"
#include "ll_time.h"

enum { EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_SKIPPED = 77 };

struct options {
    uint32_t gpus, pairs; /* gpus 0: all */
    uint32_t sharing;     /* ranks on each GPU */
    bool verify, bars;    /* bars: print them, and nothing else */
    bool served, polls;   /* executor server beside direct; and what waits for its bells */
    const char *json;     /* NULL: nowhere */
};

/* ---- cases --------------------------------------------------------------------------- */

#define MODEL .experts = 256, .hidden = 7168, .top_k = 8, .max_tokens = 128
#define EM    .layout = EP_LAYOUT_EXPERT_MAJOR
#define RM    .layout = EP_LAYOUT_RANK_MAJOR

static const struct shape shapes[] = {
    { EM, .dtype = BENCH_BF16, .tokens = 128, MODEL },
    { EM, .dtype = BENCH_BF16, .tokens = 64, MODEL },
    { EM, .dtype = BENCH_BF16, .tokens = 32, MODEL },
    { EM, .dtype = BENCH_BF16, .tokens = 8, MODEL },
    { EM, .dtype = BENCH_BF16, .tokens = 1, MODEL },
    { RM, .dtype = BENCH_BF16, .tokens = 128, MODEL },
    { RM, .dtype = BENCH_BF16, .tokens = 64, MODEL },
    { RM, .dtype = BENCH_BF16, .tokens = 32, MODEL },
    { RM, .dtype = BENCH_BF16, .tokens = 8, MODEL },
    { RM, .dtype = BENCH_BF16, .tokens = 1, MODEL },
    { EM, .dtype = BENCH_FP8, .tokens = 128, MODEL },
    { EM, .dtype = BENCH_BF16, .tokens = 128, .routing = "zipf:1.2", MODEL },
    { EM, .dtype = BENCH_BF16, .tokens = 128, .routing = "hot:0", MODEL },
};

/* ---- the table ----------------------------------------------------------------------- */

static void print_head(void)
{
    printf("\nus; pair: %s\n",
           "chained in a CUDA graph, slowest rank, median.  alone: between events, and by the "
           "GPU's clock (mean)");
    printf("%-12s %-5s %-9s %4s | %7s | %15s %15s | %9s %5s %5s | %7s %6s %6s\n", "", "", "", "", "", "alone",
           "", "", "", "", "peers'", "must", "");
    printf("%-12s %-5s %-9s %4s | %7s | %15s %15s | %9s %5s %5s | %7s %6s %6s\n", "layout", "wire", "routing",
           "T", "pair", "dispatch", "combine", "push x 2", "GB/s", "ratio", "best", "direct", "aim");
}

/* Of kernels alone, which the table has no column for: in proportion to the bytes on the wire. */
static void print_foot(uint32_t gpus)
{
    static const char *const names[] = { "kernel_dispatch_us", "kernel_combine_us", "kernel_dispatch_fp8_us" };
    static const char *const what[] = { "bf16 dispatch", "combine", "fp8 dispatch" };
    const double share = bar_remote_rows(gpus) / bar_remote_rows(8);

    printf("\npush x 2: the dispatch's remote rows with plain stores, there and back; ratio: pair by that\n");
    if (gpus == 1)
        return; /* nothing is on the wire */
    printf("kernel alone on %u GPUs, expert-major, T=128, must (aim):", gpus);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct bar_figure *f = bar_figure(names[i]);

        printf(" %s %.1f (%.1f)", what[i], (double)f->must * share, (double)f->aim * share);
    }
    printf("\n");
}

static const char *verdict(const struct bar *bar, double pair)
{
    return pair <= (double)bar->aim ? "aim reached" : pair <= (double)bar->direct ? "bar reached" : "MISSED";
}

static void print_peers(const struct bar *bar, double pair)
{
    if (bar)
        printf(" | %7.1f %6.0f %6.0f %s\n", (double)bar_best_peer(bar), (double)bar->direct, (double)bar->aim,
               verdict(bar, pair));
    else
        printf(" | %7s %6s %6s\n", "-", "-", "-");
}

static void print_row(const struct shape *s, const struct ll_times *t, uint32_t gpus)
{
    const bool plain = s->dtype == BENCH_BF16 && !s->routing;
    char dispatch[32], combine[32];

    snprintf(dispatch, sizeof dispatch, "%.1f (%.1f)", t->dispatch, t->dispatch_kernel);
    snprintf(combine, sizeof combine, "%.1f (%.1f)", t->combine, t->combine_kernel);
    printf("%-12s %-5s %-9s %4u | %7.1f | %15s %15s", bench_layout_name(s->layout),
           bench_dtypes[s->dtype].name, s->routing ? s->routing : "uniform", s->tokens, t->pair, dispatch,
           combine);
    if (t->push > 0)
        printf(" | %9.1f %5.0f %5.2f", 2 * t->push, t->push_gbps, t->pair / (2 * t->push));
    else
        printf(" | %9s %5s %5s", "-", "-", "-");
    print_peers(plain ? bar_find(gpus, s->layout, s->tokens) : NULL, t->pair);
    fflush(stdout);
}

/* ---- executor server beside direct ----------------------------------------------------- */

static void print_served_head(void)
{
    printf("\nus, executor direct / server, both in this process.  own: what the server costs an op, half of what a "
           "pair takes longer.\nchanging: a pair, without a graph, where after every 61 pairs a token more or less "
           "is sent\n");
    printf("%-12s %-5s %-9s %4s | %15s %6s | %15s %15s %15s\n", "layout", "wire", "routing", "T", "pair", "own",
           "dispatch", "combine", "changing");
}

static void print_served_row(const struct shape *s, const struct ll_times *direct, const struct ll_times *served)
{
    printf("%-12s %-5s %-9s %4u | %6.1f / %6.1f %6.1f | %6.1f / %6.1f %6.1f / %6.1f %6.1f / %6.1f\n",
           bench_layout_name(s->layout), bench_dtypes[s->dtype].name, s->routing ? s->routing : "uniform", s->tokens,
           direct->pair, served->pair, (served->pair - direct->pair) / 2, direct->dispatch, served->dispatch,
           direct->combine, served->combine, direct->changing, served->changing);
    fflush(stdout);
}

/* ---- for machines ---------------------------------------------------------------------- */

static void write_json(FILE *to, const struct shape *s, const struct ll_times *t, bool served, uint32_t gpus)
{
    fprintf(to,
            "{\"what\": \"%s\", \"gpus\": %u, \"layout\": \"%s\", \"dtype\": \"%s\", \"routing\": \"%s\", "
            "\"tokens\": %u, \"graph_pair_us\": %.2f, \"dispatch_us\": %.2f, \"combine_us\": %.2f, "
            "\"dispatch_kernel_us\": %.2f, \"combine_kernel_us\": %.2f, \"push_us\": %.2f, \"push_gbps\": %.1f}\n",
            served ? "served" : "kernels", gpus, bench_layout_name(s->layout), bench_dtypes[s->dtype].name,
            s->routing ? s->routing : "uniform", s->tokens, t->pair, t->dispatch, t->combine,
            t->dispatch_kernel, t->combine_kernel, t->push, t->push_gbps);
    fflush(to);
}

/* For bench.sh, which measures the same through real processes. */
static void print_bars(void)
{
    for (size_t i = 0; i < sizeof bars / sizeof *bars; i++)
        printf("pair,%u,%s,%u,%.1f,%.1f,%.1f,%.1f\n", bars[i].gpus, bench_layout_name(bars[i].layout), bars[i].tokens,
               (double)bar_best_peer(&bars[i]), (double)bars[i].direct, (double)bars[i].aim, (double)bars[i].server);
    for (size_t i = 0; i < sizeof bar_figures / sizeof *bar_figures; i++)
        printf("figure,%s,%.1f,%.1f\n", bar_figures[i].name, (double)bar_figures[i].must,
               (double)bar_figures[i].aim);
}

/* ---- the command line ---------------------------------------------------------------- */

static void usage(FILE *to)
{
    fputs("usage: ll_bench [--gpus N] [--sharing N] [--pairs N] [--executor direct|server]\n"
          "                [--doorbell wait|poll] [--no-verify] [--json FILE] [--bars]\n"
          "\n"
          "  --gpus N      GPUs to use (default: all)\n"
          "  --sharing N   ranks on each of them (default 1; figures are for 1)\n"
          "  --pairs N     pairs in graphs that are timed (default 600)\n"
          "  --executor E  server: what it costs that another thread launches what ranks ring for\n"
          "  --doorbell D  poll: as ep-server with this option (default wait)\n"
          "  --no-verify   do not compare one pass of each case with the reference first\n"
          "  --json FILE   add a line for each case to it\n"
          "  --bars        print what is aimed at as comma-separated lines: no GPU is needed\n",
          to);
}

static bool parse(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {
        { "gpus", required_argument, NULL, 'g' },  { "sharing", required_argument, NULL, 's' },
        { "pairs", required_argument, NULL, 'p' }, { "no-verify", no_argument, NULL, 'n' },
        { "executor", required_argument, NULL, 'e' }, { "json", required_argument, NULL, 'j' },
        { "doorbell", required_argument, NULL, 'd' }, { "bars", no_argument, NULL, 'b' },
        { "help", no_argument, NULL, 'h' },        { NULL, 0, NULL, 0 }
    };
    int c;

    *o = (struct options){ .pairs = 600, .sharing = 1, .verify = true };
    while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (c) {
        case 'g': o->gpus = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 's': o->sharing = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'p': o->pairs = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'e':
            o->served = strcmp(optarg, "server") == 0;
            if (!o->served && strcmp(optarg, "direct") != 0)
                return false;
            break;
        case 'd':
            o->polls = strcmp(optarg, "poll") == 0;
            if (!o->polls && strcmp(optarg, "wait") != 0)
                return false;
            break;
        case 'n': o->verify = false; break;
        case 'j': o->json = optarg; break;
        case 'b': o->bars = true; break;
        case 'h': usage(stdout); exit(0);
        default: return false;
        }
    }
    return optind == argc && o->pairs > 0 && o->sharing > 0;
}

/* One case: a line of the table, and of the file. */
static ep_status run_case(const struct ep_cuda_api *api, const struct options *o, const struct shape *shape, FILE *json,
                          struct ep_error *error)
{
    struct ll_time_options how = {
        .ranks = o->gpus * o->sharing, .gpus = o->gpus, .pairs = o->pairs, .polls = o->polls, .verify = o->verify
    };
    struct ll_times direct, served;
    ep_status status = ll_time(api, shape, &how, &direct, error);

    how.served = true;
    if (status == EP_OK && o->served)
        status = ll_time(api, shape, &how, &served, error);
    if (status != EP_OK)
        return status;
    if (o->served)
        print_served_row(shape, &direct, &served);
    else
        print_row(shape, &direct, o->sharing == 1 ? o->gpus : 0);
    if (json && o->served)
        write_json(json, shape, &served, true, o->gpus);
    else if (json)
        write_json(json, shape, &direct, false, o->gpus);
    return EP_OK;
}

static int run(const struct ep_cuda_api *api, const struct options *o)
{
    FILE *json = o->json ? fopen(o->json, "a") : NULL;
    int code = 0;

    if (o->json && !json) {
        perror(o->json);
        return EXIT_USAGE;
    }
    if (o->served)
        print_served_head();
    else
        print_head();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct ep_error error = EP_ERROR_INIT;

        if (run_case(api, o, &shapes[i], json, &error) == EP_OK)
            continue;
        printf("%-12s %-5s %4u FAILED: %s\n", bench_layout_name(shapes[i].layout),
               bench_dtypes[shapes[i].dtype].name, shapes[i].tokens, error.text);
        code = EXIT_FAILED;
    }
    if (!o->served)
        print_foot(o->gpus);
    if (json)
        fclose(json);
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
    if (o.bars) {
        print_bars();
        return 0;
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
    if (o.gpus > count || o.gpus * o.sharing > EP_DEVICE_NODE_RANKS) {
        fprintf(stderr, "%u GPUs with %u ranks each: there are %u GPUs, and at most %u ranks\n", o.gpus,
                o.sharing, count, EP_DEVICE_NODE_RANKS);
        return EXIT_USAGE;
    }
    printf("%u x %s, %u ranks, driver %u, %s MPS; H 7168, K 8, E 256\n", o.gpus, device.name,
           o.gpus * o.sharing, device.driver, device.mps ? "with" : "without");
    return run(api, &o);
}
