/* Puts to another process of this host: what is one copy, and when it is told.  The GPU is a double, both ends are here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "ring.h"
#include "transport.h"

enum { PEER = 1, OTHER = 2, RANKS = 3, REGIONS = 2, COPIES = 64, STORES = 1024, PAGE = 4096 };

#define REGION_BYTES (1ull << 30)
#define MOST         (32ull << 20) /* of several puts that may be one copy */
#define LARGE        (1ull << 20)  /* it stands in line */

/* ---- a GPU that copies nothing, and is through with what its streams hold when the test says so ------------------- */

struct gpu_copy {
    const uint8_t *to, *from;
    uint64_t bytes;
};

struct gpu_store {
    uint64_t *to, value;
};

static struct {
    struct gpu_store store[STORES]; /* those from [stored] on are yet to be done */
    uint32_t stores, stored;
    struct gpu_copy copy[COPIES];
    uint32_t copies;
    bool prompt;          /* a stream does at once what it is told */
    uint32_t unmapped;    /* regions */
    uint32_t copies_then; /* there had been so many when the last one was */
} gpu;

static ep_status gpu_stream_create(uint32_t device, void **stream, struct ep_error *error)
{
    (void)device, (void)error;
    *stream = &gpu;
    return EP_OK;
}

static void gpu_stream_destroy(uint32_t device, void *stream)
{
    (void)device, (void)stream;
}

static ep_status gpu_copy(uint32_t device, void *to, const void *from, uint64_t bytes, void *stream,
                          struct ep_error *error)
{
    (void)device, (void)stream, (void)error;
    assert_true(gpu.copies < COPIES);
    gpu.copy[gpu.copies++] = (struct gpu_copy){ to, from, bytes };
    return EP_OK;
}

static void store_next(void)
{
    const struct gpu_store *store = &gpu.store[gpu.stored++];

    __atomic_store_n(store->to, store->value, __ATOMIC_RELEASE);
}

static void finish(void)
{
    while (gpu.stored < gpu.stores)
        store_next();
}

static ep_status gpu_store(uint32_t device, void *to, uint64_t value, void *stream, struct ep_error *error)
{
    (void)device, (void)stream, (void)error;
    assert_true(gpu.stores < STORES);
    gpu.store[gpu.stores++] = (struct gpu_store){ to, value };
    if (gpu.prompt)
        finish();
    return EP_OK;
}

/* It stores in the order of all calls, so it may be anything. */
static ep_status gpu_marker_open(uint32_t device, struct ep_cuda_marker **out, struct ep_error *error)
{
    (void)device, (void)error;
    *out = (struct ep_cuda_marker *)&gpu;
    return EP_OK;
}

static void gpu_marker_close(struct ep_cuda_marker *marker)
{
    (void)marker;
}

static ep_status gpu_marker_store(struct ep_cuda_marker *marker, void *to, uint64_t value, void *stream,
                                  struct ep_error *error)
{
    (void)marker;
    return gpu_store(0, to, value, stream, error);
}

static ep_status gpu_import(uint32_t device, int fd, uint64_t bytes, struct ep_cuda_memory **out, struct ep_error *error)
{
    (void)device, (void)fd, (void)error;
    *out = (struct ep_cuda_memory *)(uintptr_t)bytes; /* an address of its own for each size */
    return EP_OK;
}

static void *gpu_at(const struct ep_cuda_memory *memory)
{
    return (void *)((uintptr_t)memory << 8);
}

static void gpu_unmap(struct ep_cuda_memory *memory)
{
    (void)memory;
    gpu.unmapped++;
    gpu.copies_then = gpu.copies;
}

static const struct ep_cuda_api api = {
    .memory_import = gpu_import,
    .memory_at = gpu_at,
    .memory_destroy = gpu_unmap,
    .copy = gpu_copy,
    .store = gpu_store,
    .marker_open = gpu_marker_open,
    .marker_store = gpu_marker_store,
    .marker_close = gpu_marker_close,
    .stream_create = gpu_stream_create,
    .stream_destroy = gpu_stream_destroy,
};

/* ---- a communicator with two peers, whose rings are the links' own -------------------------------------------------- */

struct world {
    struct ep_gin_comm comm;
    struct ep_gin_peer peers[RANKS];
    struct ep_gin_region sources[REGIONS], targets[REGIONS];
    struct ep_gin_remote remote[2 * REGIONS][RANKS];
    void *links[RANKS];
    struct ep_gin_ring *rings[RANKS];
    uint64_t words[(RANKS + 1) * 8]; /* a cache line for each stream */
};

static void connect_link(struct world *w, uint32_t rank)
{
    struct ep_gin_card card = { .fd = { -1, -1 } };

    assert_int_equal(ep_gin_host.link_open(&w->comm, &w->peers[rank], &w->links[rank], &card, NULL), EP_OK);
    assert_int_equal(ep_gin_host.link_connect(w->links[rank], &card, NULL), EP_OK);
    w->rings[rank] = mmap(NULL, sizeof *w->rings[rank], PROT_READ | PROT_WRITE, MAP_SHARED, card.fd[0], 0);
    assert_ptr_not_equal(w->rings[rank], MAP_FAILED);
    close(card.fd[0]);
    close(card.fd[1]);
    w->peers[rank].main = (struct ep_gin_link){ &ep_gin_host, w->links[rank] };
}

static void reach(struct world *w, uint32_t rank, uint32_t i)
{
    struct ep_gin_card card = { .fd = { -1, -1 }, .fds = 1 };
    const uint64_t offset = 0, bytes = REGION_BYTES + i * PAGE;

    memcpy(card.bytes, &offset, sizeof offset);
    memcpy(card.bytes + sizeof offset, &bytes, sizeof bytes);
    assert_int_equal(ep_gin_host.region_reach(w->links[rank], &w->targets[i], &card,
                                              &w->remote[REGIONS + i][rank].reached, NULL),
                     EP_OK);
}

/* They lie side by side. */
static void set_regions(struct world *w)
{
    for (uint32_t i = 0; i < REGIONS; i++) {
        uint8_t *at = (uint8_t *)(uintptr_t)(REGION_BYTES * (i + 1));

        w->sources[i] = (struct ep_gin_region){
            .key = i + 1, .type = NCCL_MEMORY_CUDA, .at = at, .bytes = REGION_BYTES, .remote = w->remote[i]
        };
        w->targets[i] = (struct ep_gin_region){
            .key = REGIONS + i + 1, .type = NCCL_MEMORY_CUDA, .at = at, .bytes = REGION_BYTES, .remote = w->remote[REGIONS + i]
        };
        for (uint32_t r = PEER; r < RANKS; r++) {
            w->remote[REGIONS + i][r].key = 100 + i;
            reach(w, r, i);
        }
    }
}

static int set_up(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    uint32_t first;

    assert_non_null(w);
    memset(&gpu, 0, sizeof gpu);
    w->comm.cuda = &api;
    w->comm.ranks = RANKS;
    w->comm.peers = w->peers;
    w->comm.refused.done = true;
    w->comm.words = (uint8_t *)w->words;
    w->comm.settings.timeout_ns = EP_NS_PER_S;
    pthread_mutex_init(&w->comm.sending, NULL);
    pthread_mutex_init(&w->comm.receiving, NULL);
    for (uint32_t r = 0; r < RANKS; r++)
        w->peers[r] = (struct ep_gin_peer){ .comm = &w->comm, .rank = r };
    w->comm.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_int_equal(ep_gin_host.start(&w->comm, &w->comm.shared[EP_GIN_HOST], NULL), EP_OK);
    for (uint32_t r = PEER; r < RANKS; r++)
        connect_link(w, r);
    set_regions(w);
    assert_int_equal(ep_gin_contexts_take(&w->comm, 1, &first, NULL), EP_OK);
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    struct world *w = *state;

    gpu.prompt = true;
    finish();
    for (uint32_t r = PEER; r < RANKS; r++) {
        for (uint32_t i = 0; i < REGIONS; i++)
            ep_gin_host.region_leave(w->links[r], &w->targets[i], w->remote[REGIONS + i][r].reached);
        ep_gin_host.link_close(w->links[r]);
        munmap(w->rings[r], sizeof *w->rings[r]);
    }
    ep_gin_host.stop(w->comm.shared[EP_GIN_HOST]);
    close(w->comm.wake);
    ep_gin_pool_close(&w->comm.pool);
    free(w);
    return 0;
}

/* ---- puts ------------------------------------------------------------------------------------------------------------ */

static struct ep_gin_put *put_between(struct world *w, uint32_t rank, uint32_t source, uint64_t from, uint32_t target,
                                      uint64_t to, uint64_t bytes)
{
    const struct ep_gin_put_args a = { .rank = rank,
                                       .source = &w->sources[source],
                                       .source_offset = from,
                                       .target = &w->targets[target],
                                       .target_offset = to,
                                       .bytes = bytes };

    return ep_gin_put(&w->comm, &a);
}

/* From the same place to the same place. */
static struct ep_gin_put *put_to(struct world *w, uint32_t rank, uint64_t at, uint64_t bytes)
{
    return put_between(w, rank, 0, at, 0, at, bytes);
}

static struct ep_gin_put *put(struct world *w, uint64_t at, uint64_t bytes)
{
    return put_to(w, PEER, at, bytes);
}

/* A copy is under way then, which nothing continues. */
static void keep_busy(struct world *w)
{
    gpu.copies = 0;
    put(w, REGION_BYTES - PAGE, PAGE);
    ep_gin_progress(&w->comm);
    assert_int_equal(gpu.copies, 1);
}

static void finish_once(struct world *w)
{
    finish();
    ep_gin_progress(&w->comm);
}

static void finish_all(struct world *w)
{
    for (uint32_t i = 0; i < 2 * COPIES; i++)
        finish_once(w);
}

/* Bytes of the next put that the peer is told of; UINT64_MAX: of none. */
static uint64_t told(struct world *w)
{
    struct ep_gin_message message;
    bool broken;

    if (!ep_gin_ring_peek(w->rings[PEER], &message, &broken))
        return UINT64_MAX;
    ep_gin_ring_next(w->rings[PEER]);
    return message.total;
}

static void expect_copy(uint32_t i, uint64_t at, uint64_t bytes)
{
    assert_true(i < gpu.copies);
    assert_ptr_equal(gpu.copy[i].from, REGION_BYTES + at);
    assert_ptr_equal(gpu.copy[i].to, (REGION_BYTES << 8) + at);
    assert_int_equal(gpu.copy[i].bytes, bytes);
}

/* ---- cases ------------------------------------------------------------------------------------------------------------- */

static void a_put_that_finds_nothing_under_way_is_a_copy_at_once(void **state)
{
    struct world *w = *state;
    struct ep_gin_put *first = put(w, PAGE, PAGE / 2);

    assert_int_equal(gpu.copies, 1);
    expect_copy(0, PAGE, PAGE / 2);
    ep_gin_progress(&w->comm);
    assert_int_equal(told(w), UINT64_MAX);
    assert_false(ep_gin_put_test(&w->comm, first));
    finish_once(w);
    assert_int_equal(told(w), PAGE / 2);
    assert_true(ep_gin_put_test(&w->comm, first));
    assert_int_equal(w->comm.active, 0);
}

static void puts_that_continue_each_other_while_another_is_copied_are_one_copy(void **state)
{
    struct world *w = *state;
    struct ep_gin_put *puts[3];

    keep_busy(w);
    for (uint64_t i = 0; i < 3; i++)
        puts[i] = put(w, i * PAGE, PAGE);
    ep_gin_progress(&w->comm);
    assert_int_equal(gpu.copies, 1);
    finish_once(w);
    assert_int_equal(gpu.copies, 2);
    expect_copy(1, 0, 3ull * PAGE);
    assert_int_equal(told(w), PAGE);
    assert_int_equal(told(w), UINT64_MAX);
    for (uint32_t i = 0; i < 3; i++)
        assert_false(ep_gin_put_test(&w->comm, puts[i]));
    finish_once(w);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(told(w), PAGE);
        assert_true(ep_gin_put_test(&w->comm, puts[i]));
    }
    assert_int_equal(told(w), UINT64_MAX);
}

struct place {
    uint32_t source, target;
    uint64_t from, to;
};

/* A put waits, and another comes that does not continue it. */
static void expect_apart(struct world *w, const struct place *other)
{
    keep_busy(w);
    put(w, 0, PAGE);
    assert_int_equal(gpu.copies, 1);
    put_between(w, PEER, other->source, other->from, other->target, other->to, 64);
    assert_int_equal(gpu.copies, 2);
    expect_copy(1, 0, PAGE);
    finish_all(w);
    assert_int_equal(gpu.copies, 3);
    assert_int_equal(gpu.copy[2].bytes, 64);
}

static void a_put_that_continues_nothing_is_another_copy_and_holds_up_nothing(void **state)
{
    static const struct place others[] = {
        { 0, 0, PAGE + 64, PAGE }, { 0, 0, PAGE, PAGE + 64 }, { 1, 0, PAGE, PAGE }, { 0, 1, PAGE, PAGE }, { 0, 0, 0, 0 },
    };

    for (uint32_t i = 0; i < sizeof others / sizeof *others; i++)
        expect_apart(*state, &others[i]);
}

static void regions_that_lie_side_by_side_are_two_copies(void **state)
{
    struct world *w = *state;

    keep_busy(w);
    put_between(w, PEER, 0, REGION_BYTES - PAGE, 0, 0, PAGE);
    put_between(w, PEER, 1, 0, 0, PAGE, 64);
    assert_int_equal(gpu.copies, 2);
    assert_int_equal(gpu.copy[1].bytes, PAGE);
}

/* NCCL's thread looks at each rank, and calls progress after it. */
static void look_at_all(struct world *w)
{
    for (uint32_t r = 0; r < RANKS; r++)
        ep_gin_progress(&w->comm);
}

/* The GPU is through with the next copy, and what is told then is told. */
static void finish_next(struct world *w)
{
    store_next();
    ep_gin_progress(&w->comm);
}

static void large_puts_to_all_are_copied_in_one_line_that_begins_with_the_next_rank(void **state)
{
    struct world *w = *state;

    gpu.copies = 0;
    put_to(w, OTHER, 0, LARGE);
    put_to(w, PEER, LARGE, 2 * LARGE);
    assert_int_equal(gpu.copies, 0);
    look_at_all(w);
    assert_int_equal(gpu.copies, 2);
    expect_copy(0, LARGE, 2 * LARGE);
    expect_copy(1, 0, LARGE);
    assert_int_equal(gpu.stores, gpu.stored + 2);
    finish_next(w);
    assert_int_equal(told(w), 2 * LARGE);
    assert_int_equal(w->peers[OTHER].active, 1);
    finish_next(w);
    assert_int_equal(w->peers[OTHER].active, 0);
}

static void what_is_in_line_grows_until_one_copy_at_most_is_before_it(void **state)
{
    struct world *w = *state;

    gpu.copies = 0;
    put_to(w, PEER, 0, LARGE);
    put_to(w, OTHER, 0, LARGE);
    look_at_all(w);
    assert_int_equal(gpu.copies, 2);
    put_to(w, OTHER, LARGE, LARGE);
    look_at_all(w);
    put_to(w, OTHER, 2 * LARGE, 2 * LARGE);
    look_at_all(w);
    assert_int_equal(gpu.copies, 2);
    finish_next(w);
    assert_int_equal(gpu.copies, 3);
    expect_copy(2, LARGE, 3 * LARGE);
}

static void what_is_small_does_not_stand_in_line(void **state)
{
    struct world *w = *state;

    gpu.copies = 0;
    put(w, 0, LARGE);
    put_to(w, OTHER, 0, LARGE);
    look_at_all(w);
    put_to(w, OTHER, 2 * LARGE, LARGE);
    look_at_all(w);
    assert_int_equal(gpu.copies, 2);
    put(w, LARGE, LARGE - PAGE);
    assert_int_equal(gpu.copies, 3);
    expect_copy(2, LARGE, LARGE - PAGE);
}

static void what_is_large_goes_by_halves_and_puts_stay_whole(void **state)
{
    struct world *w = *state;

    gpu.copies = 0;
    for (uint64_t i = 0; i < 7; i++)
        put(w, i * LARGE, LARGE);
    look_at_all(w);
    look_at_all(w);
    assert_int_equal(gpu.copies, 2); /* of which one waits behind the other */
    expect_copy(0, 0, 4 * LARGE);
    expect_copy(1, 4 * LARGE, 2 * LARGE);
    put(w, 7 * LARGE, LARGE);
    finish_next(w);
    assert_int_equal(gpu.copies, 3);
    expect_copy(2, 6 * LARGE, LARGE);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(told(w), LARGE);
    assert_int_equal(told(w), UINT64_MAX);
    finish_next(w);
    expect_copy(3, 7 * LARGE, LARGE);
    finish_all(w);
    assert_int_equal(w->peers[PEER].active, 0);
}

/* A single put may have more. */
static void no_more_puts_than_make_the_most_may_be_one_copy(void **state)
{
    struct world *w = *state;

    gpu.copies = 0;
    put(w, 0, MOST - LARGE);
    put(w, MOST - LARGE, LARGE);
    put(w, MOST, PAGE);
    look_at_all(w);
    assert_int_equal(gpu.copies, 1);
    expect_copy(0, 0, MOST - LARGE);
    ep_gin_progress(&w->comm);
    assert_int_equal(gpu.copies, 2);
    expect_copy(1, MOST - LARGE, LARGE);
    ep_gin_progress(&w->comm);
    assert_int_equal(gpu.copies, 3);
    expect_copy(2, MOST, PAGE);
    finish_all(w);
    gpu.copies = 0;
    put(w, 4 * MOST, 3 * MOST);
    look_at_all(w);
    assert_int_equal(gpu.copies, 1);
    expect_copy(0, 4 * MOST, 3 * MOST);
}

static void a_put_of_no_bytes_is_told_behind_those_before_it(void **state)
{
    struct world *w = *state;

    put_between(w, PEER, 0, 0, 0, 0, 0);
    ep_gin_progress(&w->comm);
    assert_int_equal(told(w), 0); /* there are none */
    keep_busy(w);
    put(w, 0, PAGE / 2);
    put_between(w, PEER, 0, 0, 0, 0, 0);
    put(w, PAGE / 2, PAGE / 4);
    assert_int_equal(gpu.copies, 2);
    ep_gin_progress(&w->comm);
    assert_int_equal(told(w), UINT64_MAX);
    finish_once(w);
    assert_int_equal(told(w), PAGE);
    assert_int_equal(told(w), PAGE / 2);
    assert_int_equal(told(w), 0);
    assert_int_equal(told(w), UINT64_MAX);
    finish_once(w);
    assert_int_equal(told(w), PAGE / 4);
}

static void what_waits_is_copied_before_its_region_is_left(void **state)
{
    struct world *w = *state;

    keep_busy(w);
    put(w, 0, PAGE);
    assert_int_equal(gpu.copies, 1);
    gpu.prompt = true;
    ep_gin_host.region_leave(w->links[PEER], &w->targets[0], w->remote[REGIONS][PEER].reached);
    assert_int_equal(gpu.unmapped, 1);
    assert_int_equal(gpu.copies_then, 2);
    reach(w, PEER, 0);
}

static void no_more_puts_are_under_way_than_the_stream_takes(void **state)
{
    enum { MANY = 600, ROOM = 400 };
    struct world *w = *state;

    keep_busy(w);
    for (uint64_t i = 0; i < MANY; i++)
        put(w, i * 64, 64);
    assert_int_equal(w->peers[PEER].waiting + 1, MANY - (ROOM - 1));
    finish_all(w);
    assert_int_equal(w->peers[PEER].active, 0);
    expect_copy(1, 0, (ROOM - 1) * 64);
}

static void a_mark_that_nobody_asks_for_is_not_written(void **state)
{
    struct world *w = *state;
    struct ep_gin_stream stream;
    uint64_t word = 0;

    assert_int_equal(ep_gin_stream_open(&w->comm, &stream, NULL, NULL), EP_OK);
    ep_gin_stream_store(&stream, &word, 5);
    ep_gin_stream_flush(&stream);
    finish();
    assert_int_equal(gpu.stores, 1);
    assert_false(ep_gin_stream_idle(&stream));
    assert_int_equal(ep_gin_stream_mark(&stream), 1);
    ep_gin_stream_flush(&stream);
    assert_int_equal(gpu.stores, 2);
    assert_false(ep_gin_stream_reached(&stream, 1));
    finish();
    assert_true(ep_gin_stream_reached(&stream, 1));
    assert_true(ep_gin_stream_idle(&stream));
    ep_gin_stream_flush(&stream);
    assert_int_equal(gpu.stores, 2);
    ep_gin_stream_close(&stream);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(a_put_that_finds_nothing_under_way_is_a_copy_at_once),
        TEST(puts_that_continue_each_other_while_another_is_copied_are_one_copy),
        TEST(a_put_that_continues_nothing_is_another_copy_and_holds_up_nothing),
        TEST(regions_that_lie_side_by_side_are_two_copies),
        TEST(large_puts_to_all_are_copied_in_one_line_that_begins_with_the_next_rank),
        TEST(what_is_in_line_grows_until_one_copy_at_most_is_before_it),
        TEST(what_is_small_does_not_stand_in_line),
        TEST(what_is_large_goes_by_halves_and_puts_stay_whole),
        TEST(no_more_puts_than_make_the_most_may_be_one_copy),
        TEST(a_put_of_no_bytes_is_told_behind_those_before_it),
        TEST(what_waits_is_copied_before_its_region_is_left),
        TEST(no_more_puts_are_under_way_than_the_stream_takes),
        TEST(a_mark_that_nobody_asks_for_is_not_written),
    };

    cmocka_set_test_filter(argc == 2 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
