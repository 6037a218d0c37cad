/*
 * nccl_gin: real NCCL with our plugin: do puts and signals of kernels do what they should, between "nodes" that are
 * processes of this host, and how fast?
 *
 * Each node is a process with an NCCL host id of its own and a thread for each of its ranks.  Ranks take the GPUs in
 * turn.  One line per case, `N passed, N failed` at the end; 77 where it cannot run.
 */
#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ep_clock.h"
#include "ep_cuda.h"
#include "nccl_gin.h"

enum {
    EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_SKIPPED = 77,
    MAX_NODES = 8, TEXT = 240,
    MEET_S = 60,   /* until all ranks have come to one place */
    WAIT_S = 10,   /* of a kernel for a signal */
    KERNEL_S = 40, /* of the host for a kernel */
    RUN_S = 300,   /* of all of it */
};

struct options {
    const char *nccl, *plugin, *filter;
    uint32_t nodes, ranks, gpus;
    bool own; /* windows of our own memory, not ncclMemAlloc()'s */
};

/* ---- what the processes share ------------------------------------------------------------------ */

struct note {
    bool failed;
    char text[TEXT];
};

struct shared {
    _Atomic uint32_t came, passed, failed;
    _Atomic bool over; /* somebody cannot go on */
    ncclUniqueId id;
    struct note notes[GIN_MAX_RANKS];
};

static struct shared *shared;
static struct options options = { .nccl = "libnccl.so.2", .filter = "", .nodes = 2 };

/* ---- NCCL, looked up at run time ------------------------------------------------------------------ */

static struct {
    ncclResult_t (*version)(int *);
    ncclResult_t (*unique_id)(ncclUniqueId *);
    ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int);
    ncclResult_t (*destroy)(ncclComm_t);
    ncclResult_t (*abort)(ncclComm_t);
    ncclResult_t (*allocate)(void **, size_t);
    ncclResult_t (*give_back)(void *);
    ncclResult_t (*window)(ncclComm_t, void *, size_t, ncclWindow_t *, int);
    ncclResult_t (*no_window)(ncclComm_t, ncclWindow_t);
    const char *(*error)(ncclComm_t);
    void *device_create, *device_destroy; /* C++ alone can name what they take */
} nccl;

static const char *load_nccl(void)
{
    const struct {
        const char *name;
        void *at;
    } functions[] = {
        { "ncclGetVersion", &nccl.version },
        { "ncclGetUniqueId", &nccl.unique_id },
        { "ncclCommInitRank", &nccl.init },
        { "ncclCommDestroy", &nccl.destroy },
        { "ncclCommAbort", &nccl.abort },
        { "ncclMemAlloc", &nccl.allocate },
        { "ncclMemFree", &nccl.give_back },
        { "ncclCommWindowRegister", &nccl.window },
        { "ncclCommWindowDeregister", &nccl.no_window },
        { "ncclGetLastError", &nccl.error },
        { "ncclDevCommCreate", &nccl.device_create },
        { "ncclDevCommDestroy", &nccl.device_destroy },
    };
    static char text[TEXT];
    void *library = dlopen(options.nccl, RTLD_NOW);

    if (!library)
        return dlerror();
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *symbol = dlsym(library, functions[i].name);

        if (!symbol) {
            snprintf(text, sizeof text, "%s has no %s", options.nccl, functions[i].name);
            return text;
        }
        memcpy(functions[i].at, &symbol, sizeof symbol);
    }
    return NULL;
}

/* ---- a rank ---------------------------------------------------------------------------------------- */

struct rank {
    struct gin_rank gin;
    const struct ep_cuda_api *api;
    struct ep_cuda_memory *memory; /* of our own window */
    ncclComm_t comm;
    uint32_t number, device, node; /* number: in the first world */
    uint32_t lsa;
    uint64_t exchanged, pinged, poured; /* rounds so far */
    double formed_s;
    char figures[TEXT]; /* that the case has to tell */
};

__attribute__((format(printf, 2, 3))) static bool fail(struct rank *r, const char *format, ...)
{
    struct note *note = &shared->notes[r->number];
    va_list arguments;

    if (note->failed)
        return false;
    note->failed = true;
    va_start(arguments, format);
    vsnprintf(note->text, sizeof note->text, format, arguments);
    va_end(arguments);
    return false;
}

static bool good(struct rank *r, const char *what, const char *wrong)
{
    return wrong ? fail(r, "%s: %s", what, wrong) : true;
}

static bool accepted(struct rank *r, const char *what, ncclResult_t result)
{
    return result == ncclSuccess ? true : fail(r, "%s: result %d: %s", what, (int)result, nccl.error(r->comm));
}

static bool done(struct rank *r, const char *what, ep_status status, const struct ep_error *error)
{
    return status == EP_OK ? true : fail(r, "%s: %s", what, error->text);
}

static uint32_t node_of(uint32_t rank)
{
    return rank * options.nodes / options.ranks;
}

/* All `ranks` that take part have come here; false when one of them never does. */
static bool meet(struct rank *r, uint32_t *met, uint32_t ranks)
{
    const uint64_t until = ep_clock_ns() + MEET_S * EP_NS_PER_S;

    *met += ranks;
    atomic_fetch_add(&shared->came, 1);
    while (atomic_load(&shared->came) < *met) {
        if (atomic_load(&shared->over) || ep_clock_ns() > until)
            return fail(r, "another rank did not get so far");
        nanosleep(&(struct timespec){ .tv_nsec = 200000 }, NULL);
    }
    return true;
}

/* Until the kernel is over; its report is good. */
static bool finish(struct rank *r, const char *what)
{
    const uint64_t until = ep_clock_ns() + KERNEL_S * EP_NS_PER_S;
    struct ep_error error = EP_ERROR_INIT;
    ep_status status;

    while ((status = r->api->stream_query(r->device, r->gin.stream, &error)) == EP_UNAVAILABLE) {
        if (ep_clock_ns() > until)
            return fail(r, "%s: the kernel does not end", what);
        nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
    }
    return done(r, what, status, &error);
}

static bool begin(struct rank *r, const char *what, const char *wrong)
{
    return good(r, what, wrong) && finish(r, what);
}

static bool all_came(struct rank *r, const char *what, uint64_t rounds)
{
    const struct gin_report *report = r->gin.report;

    if (report->wrong)
        return fail(r, "%s: %llu words are wrong; word %u of rank %u is %#llx, not %#llx", what,
                    (unsigned long long)report->wrong, report->word, report->source, (unsigned long long)report->got,
                    (unsigned long long)report->want);
    if (report->late)
        return fail(r, "%s: round %llu: no signal of rank %u within %d s", what,
                    (unsigned long long)report->rounds, report->late_rank, WAIT_S);
    if (report->rounds != rounds)
        return fail(r, "%s: %llu rounds, not %llu", what, (unsigned long long)report->rounds,
                    (unsigned long long)rounds);
    return true;
}

static void new_report(struct rank *r)
{
    memset(r->gin.report, 0, sizeof *r->gin.report);
}

/* ---- coming and going -------------------------------------------------------------------------------- */

static bool take_memory(struct rank *r)
{
    const uint64_t bytes = gin_window_bytes(options.ranks);
    struct ep_error error = EP_ERROR_INIT;
    void *base = NULL;

    if (!options.own) {
        if (!accepted(r, "ncclMemAlloc", nccl.allocate(&base, bytes)))
            return false;
    } else {
        if (!done(r, "memory_create", r->api->memory_create(r->device, bytes, &r->memory, &error), &error))
            return false;
        base = r->api->memory_at(r->memory);
    }
    r->gin.base = base;
    return true;
}

static bool open_rank(struct rank *r)
{
    struct ep_error error = EP_ERROR_INIT;

    if (!good(r, "cudaSetDevice", gin_use_device(r->device)) || !take_memory(r))
        return false;
    r->gin.report = aligned_alloc(4096, 4096);
    if (!r->gin.report)
        return fail(r, "out of memory");
    return done(r, "host_pin", r->api->host_pin(r->device, r->gin.report, 4096, &error), &error) &&
           done(r, "stream_create", r->api->stream_create(r->device, &r->gin.stream, &error), &error);
}

/* A communicator of `ranks`, in which this is `rank`, with the window that is there. */
static bool form(struct rank *r, uint32_t rank, uint32_t ranks, const ncclUniqueId *id)
{
    const uint64_t start = ep_clock_ns();

    r->gin.rank = rank;
    r->gin.ranks = ranks;
    r->gin.limit_ns = WAIT_S * EP_NS_PER_S;
    r->exchanged = r->pinged = r->poured = 0;
    if (!accepted(r, "ncclCommInitRank", nccl.init(&r->comm, (int)ranks, *id, (int)rank)) ||
        !accepted(r, "ncclCommWindowRegister",
                  nccl.window(r->comm, r->gin.base, gin_window_bytes(options.ranks), &r->gin.window,
                              NCCL_WIN_COLL_SYMMETRIC)))
        return false;
    if (!r->gin.window)
        return fail(r, "ncclCommWindowRegister gives no window: no symmetric memory");
    if (!good(r, "ncclDevCommCreate",
              gin_device_open(nccl.device_create, r->comm, ranks, &r->gin.device, &r->lsa)))
        return false;
    r->formed_s = (double)(ep_clock_ns() - start) / 1e9;
    return true;
}

static bool leave(struct rank *r)
{
    return good(r, "ncclDevCommDestroy", gin_device_close(nccl.device_destroy, r->comm, &r->gin.device)) &&
           accepted(r, "ncclCommWindowDeregister", nccl.no_window(r->comm, r->gin.window)) &&
           accepted(r, "ncclCommDestroy", nccl.destroy(r->comm));
}

static void close_rank(struct rank *r)
{
    if (r->gin.stream)
        r->api->stream_destroy(r->device, r->gin.stream);
    if (r->gin.report)
        r->api->host_unpin(r->device, r->gin.report);
    free(r->gin.report);
    if (options.own)
        r->api->memory_destroy(r->memory);
    else if (r->gin.base)
        (void)nccl.give_back(r->gin.base);
}

/* ---- cases ----------------------------------------------------------------------------------------------- */

static bool exchange(struct rank *r, uint32_t rounds)
{
    new_report(r);
    if (!begin(r, "exchange", gin_exchange(&r->gin, r->exchanged, rounds)) || !all_came(r, "exchange", rounds))
        return false;
    r->exchanged += rounds;
    return true;
}

static bool case_formed(struct rank *r, uint32_t *met)
{
    (void)met;
    snprintf(r->figures, sizeof r->figures, "communicator, window and device communicator in %.2f s, LSA team of %u",
             r->formed_s, r->lsa);
    return true;
}

static bool case_launches(struct rank *r, uint32_t *met)
{
    (void)met;
    for (int i = 0; i < 50; i++)
        if (!exchange(r, 1))
            return false;
    return true;
}

static bool case_one_kernel(struct rank *r, uint32_t *met)
{
    (void)met;
    return exchange(r, 200);
}

static int by_value(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* us; the first tenth is left out. */
static double median_us(const struct rank *r, uint32_t rounds)
{
    uint64_t ns[GIN_MAX_TIMES];
    const uint32_t skip = rounds / 10, n = rounds - skip;

    memcpy(ns, r->gin.report->ns + skip, n * sizeof *ns);
    qsort(ns, n, sizeof *ns, by_value);
    return (double)ns[n / 2] / 1e3;
}

/* The first rank and the first of the last node. */
static bool case_ping_pong(struct rank *r, uint32_t *met)
{
    const uint32_t a = 0, rounds = 200;
    uint32_t b = 0;

    (void)met;
    while (node_of(b) + 1 < options.nodes)
        b++;
    if (r->number != a && r->number != b)
        return true;
    new_report(r);
    if (!begin(r, "ping pong", gin_ping_pong(&r->gin, r->number == a ? b : a, r->number == a, r->pinged, rounds)) ||
        !all_came(r, "ping pong", rounds))
        return false;
    r->pinged += rounds;
    if (r->number == a)
        snprintf(r->figures, sizeof r->figures, "16 bytes and a signal: %.1f us one way", median_us(r, rounds) / 2);
    return true;
}

static uint32_t ranks_of_other_nodes(const struct rank *r)
{
    uint32_t mask = 0;

    for (uint32_t d = 0; d < options.ranks; d++)
        mask |= (uint32_t)(node_of(d) != r->node) << d;
    return mask;
}

static bool pour(struct rank *r, uint32_t peers, uint32_t puts, uint32_t bytes, const char *what)
{
    const uint32_t rounds = 20;
    const double total = (double)puts * bytes * __builtin_popcount(peers);
    size_t n;

    new_report(r);
    if (!begin(r, what, gin_pour(&r->gin, peers, peers, puts, bytes, r->poured, rounds)) ||
        !all_came(r, what, rounds))
        return false;
    r->poured += rounds;
    n = strlen(r->figures);
    snprintf(r->figures + n, sizeof r->figures - n, "%s%u x %u bytes to each of %d: %.2f GB/s", n ? "; " : "", puts,
             bytes, __builtin_popcount(peers), total / median_us(r, rounds) / 1e3);
    return true;
}

static bool case_pour(struct rank *r, uint32_t *met)
{
    const uint32_t peers = ranks_of_other_nodes(r);

    (void)met;
    return pour(r, peers, 16, 1 << 20, "large puts") && pour(r, peers, 64, 14336, "rows");
}

/* What a copy engine of this GPU carries to the next one, for comparison. */
static bool case_copy(struct rank *r, uint32_t *met)
{
    const uint64_t bytes = 64ull << 20; /* of less, beginnings and ends are what is measured */
    const uint32_t times = 20;
    struct ep_cuda_memory *here = NULL, *there = NULL;
    struct ep_error error = EP_ERROR_INIT;
    uint64_t start;
    void *to;
    bool fine;

    (void)met;
    if (r->number || options.gpus < 2)
        return true;
    fine = done(r, "memory_create", r->api->memory_create(r->device, bytes, &here, &error), &error)
           && done(r, "memory_create", r->api->memory_create((r->device + 1) % options.gpus, bytes, &there, &error), &error)
           && done(r, "memory_share", r->api->memory_share(there, r->device, &error), &error);
    to = fine ? r->api->memory_at(there) : NULL;
    start = ep_clock_ns();
    for (uint32_t i = 0; fine && i < times; i++)
        fine = done(r, "copy", r->api->copy(r->device, to, r->api->memory_at(here), bytes, r->gin.stream, &error), &error);
    fine = fine && finish(r, "copy");
    if (fine)
        snprintf(r->figures, sizeof r->figures, "copies of %llu MiB to another GPU: %.1f GB/s",
                 (unsigned long long)bytes >> 20, (double)bytes * times / (double)(ep_clock_ns() - start));
    r->api->memory_destroy(there);
    r->api->memory_destroy(here);
    return fine;
}

/* A second communicator beside the first, which then goes: how a group gets its next epoch. */
static bool case_again(struct rank *r, uint32_t *met)
{
    struct rank old = *r;

    if (r->number == 0 && !accepted(r, "ncclGetUniqueId", nccl.unique_id(&shared->id)))
        return false;
    if (!meet(r, met, options.ranks) || !form(r, r->number, options.ranks, &shared->id) || !exchange(r, 20))
        return false;
    snprintf(r->figures, sizeof r->figures, "formed beside the first in %.2f s", r->formed_s);
    return (leave(&old) && exchange(r, 20)) || fail(r, "the first could not be left");
}

/* The last node dies in the middle of it; the others are told who is late, and form a communicator without it. */
static bool case_killed(struct rank *r, uint32_t *met)
{
    const uint32_t left = options.ranks - options.ranks / options.nodes;
    const uint64_t start = ep_clock_ns();

    if (options.nodes < 2)
        return true;
    new_report(r);
    if (!good(r, "exchange", gin_exchange(&r->gin, r->exchanged, 1u << 30)))
        return false;
    nanosleep(&(struct timespec){ .tv_nsec = 300000000 }, NULL);
    if (r->node + 1 == options.nodes)
        kill(getpid(), SIGKILL);
    if (!finish(r, "an exchange with a dead node"))
        return false;
    if (r->gin.report->wrong || !r->gin.report->late)
        return fail(r, "%llu words are wrong, %u ranks late", (unsigned long long)r->gin.report->wrong,
                    r->gin.report->late);
    if (!accepted(r, "ncclCommAbort", nccl.abort(r->comm)))
        return false;
    if (r->number == 0 && !accepted(r, "ncclGetUniqueId", nccl.unique_id(&shared->id)))
        return false;
    if (!meet(r, met, left) || !form(r, r->number, left, &shared->id) || !exchange(r, 20))
        return false;
    snprintf(r->figures, sizeof r->figures, "the rest formed anew in %.2f s, all of it took %.1f s", r->formed_s,
             (double)(ep_clock_ns() - start) / 1e9);
    return true;
}

static const struct {
    const char *name;
    bool (*fn)(struct rank *r, uint32_t *met);
    bool last_node_dies;
} cases[] = {
    { "a communicator of several nodes", case_formed, false },
    { "every size to every rank, 50 kernels", case_launches, false },
    { "every size to every rank, 200 rounds of one kernel", case_one_kernel, false },
    { "there and back", case_ping_pong, false },
    { "all to all between nodes", case_pour, false },
    { "a copy, for comparison", case_copy, false },
    { "a second communicator, and the first one goes", case_again, false },
    { "a node is killed", case_killed, true },
};

/* ---- running them -------------------------------------------------------------------------------------------- */

static void say(const struct rank *first, const char *name)
{
    bool failed = false;

    for (uint32_t i = 0; i < options.ranks; i++)
        failed |= shared->notes[i].failed;
    printf("%s %s%s%s\n", failed ? "FAIL" : "ok  ", name, *first->figures ? ": " : "", first->figures);
    for (uint32_t i = 0; i < options.ranks; i++)
        if (shared->notes[i].failed)
            printf("     rank %u: %s\n", i, shared->notes[i].text);
    atomic_fetch_add(failed ? &shared->failed : &shared->passed, 1);
    if (failed)
        atomic_store(&shared->over, true); /* not all ranks are where they should be for the next one */
}

static bool run_case(struct rank *r, size_t i, uint32_t *met)
{
    const uint32_t left = cases[i].last_node_dies ? options.ranks - options.ranks / options.nodes : options.ranks;

    *r->figures = '\0';
    (void)cases[i].fn(r, met);
    if (!meet(r, met, left) && r->number)
        return false;
    if (r->number == 0)
        say(r, cases[i].name);
    return meet(r, met, left) && !atomic_load(&shared->over);
}

static void *rank_main(void *user)
{
    struct rank *r = user;
    uint32_t met = 0;
    bool fine = open_rank(r);

    if (fine && r->number == 0)
        fine = accepted(r, "ncclGetUniqueId", nccl.unique_id(&shared->id));
    fine = meet(r, &met, options.ranks) && fine && form(r, r->number, options.ranks, &shared->id);
    if (!fine) {
        printf("FAIL rank %u: %s\n", r->number, shared->notes[r->number].text);
        atomic_fetch_add(&shared->failed, 1);
        atomic_store(&shared->over, true);
    }
    for (size_t i = 0; fine && i < sizeof cases / sizeof *cases; i++)
        if (strstr(cases[i].name, options.filter))
            fine = run_case(r, i, &met);
    if (fine && leave(r))
        close_rank(r);
    return NULL;
}

static void set_environment(uint32_t node)
{
    char host[32];

    snprintf(host, sizeof host, "ep-node-%u", node);
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_NET_PLUGIN", options.plugin, 1);
    setenv("NCCL_NET_PLUGIN_REF_COUNT", "1", 0);
    setenv("NCCL_GIN_ENABLE", "1", 0);
    setenv("NCCL_GIN_NCONTEXTS", "1", 0);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    setenv("NCCL_MNNVL_ENABLE", "0", 0);
    setenv("NCCL_CUMEM_ENABLE", "1", 0);
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

static int skip(const char *why)
{
    printf("not run: %s\n", why);
    return EXIT_SKIPPED;
}

/* Loaded by each node for itself: nothing of CUDA outlives a fork. */
static int check_machine(const struct ep_cuda_api **api)
{
    struct ep_error error = EP_ERROR_INIT;
    const char *wrong = load_nccl();
    char text[TEXT];
    int version = 0;

    if (wrong)
        return skip(wrong);
    if (nccl.version(&version) != ncclSuccess || version != NCCL_VERSION_CODE) {
        snprintf(text, sizeof text, "%s is version %d, the kernels are of %d: name another with --nccl", options.nccl,
                 version, NCCL_VERSION_CODE);
        return skip(text);
    }
    if (ep_cuda_open(api, &error) != EP_OK || (*api)->device_count(&options.gpus, &error) != EP_OK)
        return skip(error.text);
    return 0;
}

static int run_node(uint32_t node)
{
    struct rank ranks[GIN_MAX_RANKS] = { 0 };
    pthread_t threads[GIN_MAX_RANKS];
    const struct ep_cuda_api *api;
    uint32_t n = 0;
    int code;

    set_environment(node);
    code = check_machine(&api);
    if (code)
        return code;
    for (uint32_t i = 0; i < options.ranks; i++) {
        if (node_of(i) != node)
            continue;
        ranks[n] = (struct rank){ .api = api, .number = i, .node = node, .device = i % options.gpus };
        if (pthread_create(&threads[n], NULL, rank_main, &ranks[n]))
            return EXIT_FAILED;
        n++;
    }
    for (uint32_t i = 0; i < n; i++)
        (void)pthread_join(threads[i], NULL);
    return 0;
}

/* Waits for all nodes, for so long; a node that was to be killed is no failure. */
static int gather(const pid_t *nodes)
{
    const uint64_t until = ep_clock_ns() + RUN_S * EP_NS_PER_S;
    uint32_t left = options.nodes;
    bool skipped = false;

    while (left) {
        int how;
        const pid_t pid = waitpid(-1, &how, WNOHANG);

        if (pid > 0) {
            left--;
            skipped |= WIFEXITED(how) && WEXITSTATUS(how) == EXIT_SKIPPED;
            if (pid != nodes[options.nodes - 1] && !(WIFEXITED(how) && WEXITSTATUS(how) % EXIT_SKIPPED == 0)) {
                printf("FAIL a node ended with %#x\n", (unsigned)how);
                atomic_fetch_add(&shared->failed, 1);
                atomic_store(&shared->over, true);
            }
        } else if (ep_clock_ns() > until) {
            printf("FAIL %u nodes did not end within %d s\n", left, RUN_S);
            for (uint32_t i = 0; i < options.nodes; i++)
                kill(nodes[i], SIGKILL);
            atomic_fetch_add(&shared->failed, 1);
            break;
        } else {
            nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
        }
    }
    if (skipped) {
        puts("0 passed, 0 failed, 1 skipped");
        return EXIT_SKIPPED;
    }
    printf("%u passed, %u failed\n", atomic_load(&shared->passed), atomic_load(&shared->failed));
    return atomic_load(&shared->failed) || !atomic_load(&shared->passed) ? EXIT_FAILED : 0;
}

static int run(void)
{
    pid_t nodes[MAX_NODES];

    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("mmap");
        return EXIT_FAILED;
    }
    for (uint32_t node = 0; node < options.nodes; node++) {
        nodes[node] = fork();
        if (nodes[node] == 0) {
            alarm(RUN_S);
            exit(run_node(node));
        }
        if (nodes[node] < 0) {
            perror("fork");
            return EXIT_FAILED;
        }
    }
    return gather(nodes);
}

/* ---- options --------------------------------------------------------------------------------------------------- */

static const char usage[] =
    "usage: nccl_gin --plugin FILE [--nodes N] [--ranks N] [--memory nccl|own] [--nccl FILE] [--filter TEXT]\n\n"
    "  --plugin FILE      the GIN plugin, libnccl-net-ep.so\n"
    "  --nodes N          pretended nodes, each a process (default 2, at most 8)\n"
    "  --ranks N          of all nodes together, which take the GPUs in turn (default: one for each node)\n"
    "  --memory nccl|own  who allocates windows: ncclMemAlloc() (default), or the cuda backend\n"
    "  --nccl FILE        the library (default libnccl.so.2)\n"
    "  --filter TEXT      only cases with TEXT in their name\n";

static bool read_number(const char *text, uint32_t most, uint32_t *out)
{
    char *end;
    unsigned long value;

    errno = 0;
    value = strtoul(text, &end, 10);
    *out = (uint32_t)value;
    return !errno && *text && !*end && value >= 1 && value <= most;
}

static int read_options(int argc, char **argv)
{
    static const struct option known[] = {
        { "plugin", required_argument, NULL, 'p' }, { "nodes", required_argument, NULL, 'n' },
        { "ranks", required_argument, NULL, 'r' },  { "memory", required_argument, NULL, 'm' },
        { "nccl", required_argument, NULL, 'l' },   { "filter", required_argument, NULL, 'f' },
        { "help", no_argument, NULL, 'h' },         { NULL, 0, NULL, 0 },
    };
    bool fine = true;
    int option;

    while (fine && (option = getopt_long(argc, argv, "h", known, NULL)) != -1) {
        switch (option) {
        case 'p': options.plugin = optarg; break;
        case 'n': fine = read_number(optarg, MAX_NODES, &options.nodes); break;
        case 'r': fine = read_number(optarg, GIN_MAX_RANKS, &options.ranks); break;
        case 'm':
            options.own = !strcmp(optarg, "own");
            fine = options.own || !strcmp(optarg, "nccl");
            break;
        case 'l': options.nccl = optarg; break;
        case 'f': options.filter = optarg; break;
        case 'h': fputs(usage, stdout); exit(0);
        default: fine = false;
        }
    }
    if (!options.ranks)
        options.ranks = options.nodes;
    if (fine && optind == argc && options.plugin && options.ranks >= options.nodes)
        return 0;
    fputs(usage, stderr);
    return EXIT_USAGE;
}

int main(int argc, char **argv)
{
    const int code = read_options(argc, argv);

    setvbuf(stdout, NULL, _IOLBF, 0);
    return code ? code : run();
}
