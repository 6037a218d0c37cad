/*
 * ep_scale: takes many nodes through a group's life and says, a line of JSON for each step, how long that took and what
 * it cost.  sim.h says what is real; scale.py starts it, and reads etcd's own figures between the steps: after each
 * line the next step begins when there is a line on stdin.
 */
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "sim.h"

#define LOOK_MS 5 /* how fine times are */
#define KILLED_PERCENT 1
#define WAVE 32 /* nodes that start at once */

struct sim sim;

static const char *store_url;
static uint32_t nodes_per_store = 8, within_s = 120;
static uint64_t epoch; /* that all should serve */

/* ---- waiting ------------------------------------------------------------------------------- */

static void on_look(uv_timer_t *timer)
{
    (void)timer;
}

static double since_s(uint64_t began)
{
    return (double)(ep_clock_ns() - began) / EP_NS_PER_S;
}

static uint32_t living(void)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < sim.nodes; i++)
        n += !sim.node[i].away;
    return n;
}

typedef bool (*condition_fn)(struct sim_node *node);

/* Until it holds at each node that is there, one after the other: what has held once goes on to hold in its step. */
static void wait_all(const char *what, condition_fn holds)
{
    const uint64_t began = ep_clock_ns();
    uint32_t next = 0;
    uv_timer_t look;

    uv_timer_init(&sim.loop, &look);
    uv_timer_start(&look, on_look, LOOK_MS, LOOK_MS);
    for (;;) {
        while (next < sim.nodes && (sim.node[next].away || holds(&sim.node[next])))
            next++;
        if (next == sim.nodes)
            break;
        if (since_s(began) > within_s)
            sim_fail("%s: not after %u s, not at node %s", what, within_s, sim.node[next].name);
        uv_run(&sim.loop, UV_RUN_ONCE);
    }
    uv_close((uv_handle_t *)&look, NULL);
    uv_run(&sim.loop, UV_RUN_NOWAIT);
}

static struct sim_node *leader(void)
{
    for (uint32_t i = 0; i < sim.nodes; i++)
        if (node_leads(&sim.node[i]))
            return &sim.node[i];
    sim_fail("nobody leads");
}

/* ---- steps ----------------------------------------------------------------------------------- */

static struct { uint64_t began_ns, cpu_us, waited_ns; } step;

static uint64_t cpu_us(void)
{
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    return (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000u +
           (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* How long the loop's thread, which is the process's first, was ready to run and others ran. */
static uint64_t waited_ns(void)
{
    unsigned long long waited = 0;
    FILE *file = fopen("/proc/self/schedstat", "re");

    if (!file || fscanf(file, "%*u %llu", &waited) != 1)
        sim_fail("cannot read /proc/self/schedstat");
    fclose(file);
    return waited;
}

static uint64_t resident_kib(void)
{
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");

    if (!file || fscanf(file, "%*u %llu", &pages) != 1)
        sim_fail("cannot read /proc/self/statm");
    fclose(file);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE) / 1024;
}

static void begin(void)
{
    char line[16];

    if (!fgets(line, sizeof line, stdin))
        exit(1); /* whoever wanted to know is gone */
    tally_reset();
    step.cpu_us = cpu_us();
    step.waited_ns = waited_ns();
    step.began_ns = ep_clock_ns();
}

static void end(const char *name)
{
    const double seconds = since_s(step.began_ns);
    const struct tally t = tally_read();

    printf("{\"step\": \"%s\", \"seconds\": %.3f, \"commits\": %llu, \"writes\": %llu, \"bytes\": %llu, \"most_writes\": "
           "%llu, \"calls\": %llu, \"call_bytes\": %llu, \"most_opened\": %llu, \"cpu_seconds\": %.3f, \"waited_seconds\": "
           "%.3f, \"resident_kib\": %llu}\n",
           name, seconds, (unsigned long long)t.commits, (unsigned long long)t.writes, (unsigned long long)t.bytes,
           (unsigned long long)t.most_writes, (unsigned long long)t.calls, (unsigned long long)t.call_bytes,
           (unsigned long long)t.most_opened, (double)(cpu_us() - step.cpu_us) / 1e6,
           (double)(waited_ns() - step.waited_ns) / EP_NS_PER_S, (unsigned long long)resident_kib());
    fflush(stdout);
}

/* ---- what is asked ------------------------------------------------------------------------------ */

struct answer {
    bool done;
    struct ep_error error;
};

static void on_answer(const struct ep_error *error, const Ep__V1__Group *group, void *user)
{
    struct answer *answer = user;

    (void)group;
    answer->error = *error;
    answer->done = true;
}

static struct answer asked;

static bool is_answered(struct sim_node *node)
{
    (void)node;
    return asked.done;
}

static void await_answer(const char *what)
{
    wait_all(what, is_answered);
    if (asked.error.status)
        sim_fail("%s: %s", what, asked.error.text);
    asked = (struct answer){ 0 };
}

static Ep__V1__GroupSpec spec_of(uint32_t hidden)
{
    static Ep__V1__Mode modes[] = { EP__V1__MODE__MODE_LL };
    Ep__V1__GroupSpec spec = EP__V1__GROUP_SPEC__INIT;

    spec.ranks = sim.nodes * sim.ranks;
    spec.experts = spec.ranks;
    spec.hidden = hidden;
    spec.top_k = 2;
    spec.modes = modes;
    spec.n_modes = 1;
    spec.ll_max_tokens = 1;
    spec.arena_bytes = 4096;
    return spec;
}

/* ---- conditions ------------------------------------------------------------------------------------ */

static bool is_ready(struct sim_node *node)
{
    return node->cluster_ready && node->groups_ready;
}

static bool sees_all(struct sim_node *node)
{
    return node_sees(node, sim.nodes);
}

static bool has_epoch(struct sim_node *node)
{
    return node_has_epoch(node, epoch);
}

static bool serves(struct sim_node *node)
{
    return node_serves(node, epoch);
}

static bool is_full(struct sim_node *node)
{
    return node_counts(node, sim.nodes * sim.ranks);
}

static bool knows_losses(struct sim_node *node)
{
    return node_sees(node, living()) && node_mourns(node, (sim.nodes - living()) * sim.ranks);
}

static bool has_attached(struct sim_node *node)
{
    return node_attach(node);
}

/* ---- the life of a group ------------------------------------------------------------------------------ */

static void start_all(void)
{
    begin();
    for (uint32_t i = 0; i < sim.nodes; i++)
        sim.node[i].away = true;
    for (uint32_t i = 0; i < sim.nodes; i++) {
        node_start(&sim.node[i]);
        if (i % WAVE == WAVE - 1 || i == sim.nodes - 1)
            wait_all("start", is_ready);
    }
    wait_all("register", sees_all);
    end("register");
}

static void create(void)
{
    const Ep__V1__GroupSpec spec = spec_of(16);

    begin();
    ep_groups_create(leader()->groups, SIM_GROUP, &spec, false, NULL, on_answer, &asked);
    await_answer("create");
    epoch = node_epoch(leader());
    wait_all("form", serves);
    end("form");
}

static void attach_all(const char *name)
{
    begin();
    wait_all(name, has_attached);
    wait_all(name, is_full);
    end(name);
}

static void release_all(void)
{
    for (uint32_t i = 0; i < sim.nodes; i++)
        if (!sim.node[i].away)
            node_release(&sim.node[i]);
}

static void update(void)
{
    const Ep__V1__GroupSpec spec = spec_of(32);
    char hidden[] = "hidden", *fields[] = { hidden };

    begin();
    ep_groups_update(leader()->groups, SIM_GROUP, 0, &spec, fields, 1, false, NULL, on_answer, &asked);
    await_answer("update");
    epoch = node_epoch(leader());
    wait_all("update", has_epoch);
    end("update");
}

/* All workers go over to the epoch that was formed beside theirs. */
static void move_all(void)
{
    begin();
    release_all();
    wait_all("move", has_attached);
    wait_all("move", is_full);
    wait_all("move", serves);
    end("move");
}

static void kill_some(void)
{
    uint32_t n = (sim.nodes * KILLED_PERCENT + 99) / 100;

    begin();
    for (uint32_t i = sim.nodes; i-- > 0 && n;)
        if (!node_leads(&sim.node[i])) {
            node_kill(&sim.node[i]);
            n--;
        }
    wait_all("detect", knows_losses);
    end("detect");
}

static bool is_healed(struct sim_node *node)
{
    const uint64_t newest = node_epoch(leader());

    return newest > epoch && node_has_epoch(node, newest) && node_sees(node, sim.nodes);
}

/* They come back, and the leader forms the epoch anew. */
static void heal(void)
{
    begin();
    for (uint32_t i = 0; i < sim.nodes; i++)
        if (sim.node[i].away)
            node_start(&sim.node[i]);
    wait_all("heal", is_healed);
    epoch = node_epoch(leader());
    wait_all("heal", has_epoch);
    end("heal");
}

/* The halves lose each other and find each other again, and the leader forms the epoch anew. */
static void split(void)
{
    begin();
    teams_split(sim.nodes / 2);
    wait_all("split", is_healed);
    epoch = node_epoch(leader());
    wait_all("split", has_epoch);
    end("split");
}

static void delete_group(void)
{
    begin();
    release_all();
    ep_groups_delete(leader()->groups, SIM_GROUP, true, NULL, on_answer, &asked);
    await_answer("delete");
    epoch = 0;
    wait_all("delete", serves);
    end("delete");
}

static uint32_t closed;

static bool all_closed(struct sim_node *node)
{
    (void)node;
    return closed == sim.nodes;
}

static void stop_all(void)
{
    const uint32_t n = sim.nodes;

    begin();
    for (uint32_t i = 0; i < n; i++)
        node_close(&sim.node[i], &closed);
    sim.node[0].away = false; /* whose condition it is */
    wait_all("stop", all_closed);
    end("stop");
}

/* ---- opening and closing ---------------------------------------------------------------------------------- */

static void open_stores(void)
{
    const struct ep_store_etcd options = { .url = store_url, .answer_within_ms = 30000 };
    struct ep_error error = EP_ERROR_INIT;

    sim.n_stores = (sim.nodes + nodes_per_store - 1) / nodes_per_store;
    sim.stores = sim_allocate(sim.n_stores, sizeof *sim.stores);
    for (uint32_t i = 0; i < sim.n_stores; i++)
        if (ep_store_open_etcd(&sim.loop, &options, &sim.stores[i], &error))
            sim_fail("%s", error.text);
}

static void make_nodes(void)
{
    sim.node = sim_allocate(sim.nodes, sizeof *sim.node);
    for (uint32_t i = 0; i < sim.nodes; i++) {
        struct sim_node *node = &sim.node[i];

        snprintf(node->name, sizeof node->name, "n%05u", i);
        node->index = i;
        node->store = sim.stores[i / nodes_per_store];
        node->workers = sim_allocate(sim.ranks, sizeof(struct ep_membership *));
    }
}

static void close_everything(void)
{
    for (uint32_t i = 0; i < sim.n_stores; i++)
        ep_store_close(sim.stores[i], NULL, NULL);
    sim_close();
    for (uint32_t i = 0; i < sim.nodes; i++)
        free(sim.node[i].workers);
    free(sim.node);
    free(sim.stores);
}

static uint32_t number(const char *name, const char *text, unsigned long most)
{
    char *end;
    const unsigned long value = strtoul(text, &end, 10);

    if (!*text || *end || value < 1 || value > most)
        sim_fail("--%s is \"%s\": must be 1 to %lu", name, text, most);
    return (uint32_t)value;
}

static void read_options(int argc, char **argv)
{
    static const struct option options[] = {
        { "store", required_argument, NULL, 's' },           { "nodes", required_argument, NULL, 'n' },
        { "ranks", required_argument, NULL, 'r' },           { "within", required_argument, NULL, 'w' },
        { "nodes-per-store", required_argument, NULL, 'p' }, { "ttl-ms", required_argument, NULL, 't' },
        { 0 },
    };
    int c;

    sim.nodes = 16;
    sim.ranks = 8;
    sim.ttl_ms = 2000; /* as of a server (daemon.c) */
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1)
        switch (c) {
        case 's': store_url = optarg; break;
        case 'n': sim.nodes = number("nodes", optarg, 4096); break;
        case 'r': sim.ranks = number("ranks", optarg, 64); break;
        case 'w': within_s = number("within", optarg, 3600); break;
        case 't': sim.ttl_ms = number("ttl-ms", optarg, 600000); break;
        case 'p': nodes_per_store = number("nodes-per-store", optarg, 4096); break;
        default: exit(2);
        }
    if (!store_url || optind != argc)
        sim_fail("--store=etcd://HOST:PORT/PREFIX [--nodes=N] [--ranks=R] [--nodes-per-store=N] [--ttl-ms=MS] [--within=S]");
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    read_options(argc, argv);
    ep_log_configure(getenv("EP_SCALE_LOG") ? EP_LOG_INFO : EP_LOG_OFF, EP_LOG_LOGFMT);
    tally_reset();
    sim_open();
    open_stores();
    make_nodes();
    start_all();
    create();
    attach_all("attach");
    update();
    move_all();
    kill_some();
    heal();
    move_all();
    split();
    move_all();
    delete_group();
    stop_all();
    close_everything();
    return 0;
}
