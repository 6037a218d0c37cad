/* Puts from iput to done, over a link that takes what the test lets it take; staging memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "transport.h"

enum { RANKS = 3, CONTEXTS = 2, BYTES = 1 << 20, TAKEN = 1024 };

/* ---- a link that the test holds -------------------------------------------------------------------------- */

struct fake {
    uint64_t room; /* bytes that it takes; a put of none takes one */
    struct ep_gin_put *taken[TAKEN];
    uint32_t n;
    void (*at_progress)(struct fake *at); /* NULL: nothing */
};

static struct fake fakes[RANKS];
static uint32_t looks, looked_at[RANKS]; /* calls of progress, and at which link in the first ones */

static bool fake_start(void *link, struct ep_gin_put *put)
{
    struct fake *fake = link;
    const uint64_t left = put->bytes - put->taken, cost = left > 0 ? left : 1;
    const uint64_t now = cost < fake->room ? cost : fake->room;

    fake->room -= now;
    put->taken += left > 0 ? now : 0;
    if (now < cost)
        return false;
    assert_true(fake->n < TAKEN);
    fake->taken[fake->n++] = put;
    return true;
}

static void fake_progress(void *link)
{
    struct fake *at = link;

    if (at->at_progress)
        at->at_progress(at);
    if (looks < RANKS)
        looked_at[looks] = (uint32_t)((struct fake *)link - fakes);
    looks++;
}

static const struct ep_gin_transport fake = { .name = "fake", .put_start = fake_start, .progress = fake_progress };

/* ---- a communicator without sockets ------------------------------------------------------------------------- */

struct world {
    struct ep_gin_comm comm;
    struct ep_gin_peer peers[RANKS];
    struct ep_gin_region source, target, signal;
    struct ep_gin_remote remote[3][RANKS];
};

static void set_region(struct world *w, struct ep_gin_region *region, uint32_t i)
{
    static uint8_t memory[BYTES];

    *region = (struct ep_gin_region){
        .key = i + 1, .type = NCCL_MEMORY_HOST, .at = memory, .bytes = BYTES, .remote = w->remote[i]
    };
    for (uint32_t r = 0; r < RANKS; r++)
        w->remote[i][r].key = 100 * r + i + 1;
}

static struct world *open_world(void)
{
    struct world *w = calloc(1, sizeof *w);
    uint32_t first;

    assert_non_null(w);
    w->comm.ranks = RANKS;
    w->comm.peers = w->peers;
    w->comm.refused.done = true;
    pthread_mutex_init(&w->comm.sending, NULL);
    pthread_mutex_init(&w->comm.receiving, NULL);
    memset(fakes, 0, sizeof fakes);
    looks = 0;
    for (uint32_t r = 0; r < RANKS; r++) {
        w->peers[r].comm = &w->comm;
        w->peers[r].rank = r;
        w->peers[r].main = (struct ep_gin_link){ &fake, &fakes[r] };
        fakes[r].room = UINT64_MAX;
    }
    set_region(w, &w->source, 0);
    set_region(w, &w->target, 1);
    set_region(w, &w->signal, 2);
    assert_int_equal(ep_gin_contexts_take(&w->comm, CONTEXTS, &first, NULL), EP_OK);
    assert_int_equal(first, 0);
    return w;
}

static void close_world(struct world *w)
{
    ep_gin_pool_close(&w->comm.pool);
    free(w);
}

static struct ep_gin_put_args args(struct world *w, uint32_t rank, uint32_t context, uint64_t bytes)
{
    return (struct ep_gin_put_args){
        .rank = rank, .context = context, .source = &w->source, .target = &w->target, .bytes = bytes
    };
}

static struct ep_gin_put *put(struct world *w, uint32_t rank, uint32_t context, uint64_t bytes)
{
    const struct ep_gin_put_args a = args(w, rank, context, bytes);
    struct ep_gin_put *p = ep_gin_put(&w->comm, &a);

    assert_non_null(p);
    return p;
}

/* ---- what is asked for ------------------------------------------------------------------------------------------ */

static void a_put_is_done_when_its_source_is_free(void **state)
{
    struct world *w = open_world();
    struct ep_gin_put *p = put(w, 1, 0, 100), *none = put(w, 1, 0, 0);

    (void)state;
    assert_false(ep_gin_put_test(&w->comm, p));
    ep_gin_put_sent(p, 60);
    assert_false(ep_gin_put_test(&w->comm, p));
    ep_gin_put_sent(p, 40);
    assert_true(ep_gin_put_test(&w->comm, p));
    assert_false(ep_gin_put_test(&w->comm, none));
    ep_gin_put_sent(none, 0);
    assert_true(ep_gin_put_test(&w->comm, none));
    assert_int_equal(w->comm.active, 0);
    close_world(w);
}

static void a_message_says_where_its_bytes_go(void **state)
{
    struct world *w = open_world();
    struct ep_gin_put_args a = args(w, 2, 1, 5000);
    struct ep_gin_message m;

    (void)state;
    a.source_offset = 3;
    a.target_offset = 77;
    a.signal = &w->signal;
    a.signal_offset = 16;
    a.signal_value = 9;
    a.signal_op = NCCL_SIGNAL_ADD;
    ep_gin_put_message(ep_gin_put(&w->comm, &a), 4096, 904, &m);
    m.flags = EP_GIN_PAYLOAD;
    assert_true(ep_gin_message_valid(&m, 4096));
    assert_int_equal(m.number, 1);
    assert_int_equal(m.region, 202);
    assert_int_equal(m.offset, 77 + 4096);
    assert_int_equal(m.bytes, 904);
    assert_int_equal(m.total, 5000);
    assert_int_equal(m.signal_region, 203);
    assert_int_equal(m.signal_offset, 16);
    assert_int_equal(m.signal_value, 9);
    assert_ptr_equal(fakes[2].taken[0]->from, w->source.at + 3);
    close_world(w);
}

static void expect_refused(struct world *w, const struct ep_gin_put_args *a)
{
    const uint64_t before = w->comm.counts.bad_puts;
    struct ep_gin_put *p = ep_gin_put(&w->comm, a);

    assert_non_null(p);
    assert_int_equal(w->comm.counts.bad_puts, before + 1);
    assert_true(ep_gin_put_test(&w->comm, p));
    assert_true(ep_gin_put_test(&w->comm, p)); /* nothing was given back */
}

static void what_makes_no_sense_is_counted_and_done(void **state)
{
    struct world *w = open_world();
    const struct ep_gin_put_args good = args(w, 1, 0, 16);
    struct ep_gin_put_args bad[12];

    (void)state;
    for (uint32_t i = 0; i < 12; i++)
        bad[i] = good;
    bad[0].rank = RANKS;
    bad[1].context = CONTEXTS;
    bad[2].source = NULL;
    bad[3].target = NULL;
    bad[4].source_offset = BYTES - 15;
    bad[5].target_offset = UINT64_MAX;
    bad[6].bytes = BYTES + 1;
    bad[7].bytes = NCCL_MAX_BYTES + 1;
    for (uint32_t i = 8; i < 12; i++) {
        bad[i].signal = &w->signal;
        bad[i].signal_op = NCCL_SIGNAL_INC;
    }
    bad[8].signal_offset = BYTES;
    bad[9].signal_offset = 4;
    bad[10].signal_op = 0;
    bad[11].signal_op = 3;
    for (uint32_t i = 0; i < 12; i++)
        expect_refused(w, &bad[i]);
    w->target.key = 0; /* not registered any more */
    expect_refused(w, &good);
    assert_int_equal(fakes[1].n, 0);
    close_world(w);
}

/* ---- order ------------------------------------------------------------------------------------------------------- */

static void numbers_count_puts_to_a_peer_and_point_back_in_a_context(void **state)
{
    struct world *w = open_world();

    (void)state;
    put(w, 1, 0, 8);
    put(w, 1, 1, 8);
    put(w, 1, 1, 8);
    put(w, 1, 0, 8);
    put(w, 2, 0, 8);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(fakes[1].taken[i]->number, i + 1);
    assert_int_equal(fakes[1].taken[0]->back, 0);
    assert_int_equal(fakes[1].taken[1]->back, 0);
    assert_int_equal(fakes[1].taken[2]->back, 1);
    assert_int_equal(fakes[1].taken[3]->back, 3);
    assert_int_equal(fakes[2].taken[0]->number, 1);
    close_world(w);
}

static void what_is_further_back_than_the_window_is_not_pointed_at(void **state)
{
    struct world *w = open_world();

    (void)state;
    put(w, 1, 0, 8);
    for (uint32_t i = 0; i + 1 < EP_GIN_WINDOW; i++) {
        put(w, 1, 1, 8);
        fakes[1].n = 0;
    }
    put(w, 1, 0, 8);
    assert_int_equal(fakes[1].taken[0]->number, EP_GIN_WINDOW + 1);
    assert_int_equal(fakes[1].taken[0]->back, 0);
    close_world(w);
}

static void contexts_take_turns(void **state)
{
    /* The first of context 0 has begun; then it is the other's turn, while it has something. */
    static const uint32_t expected[] = { 0, 1, 0, 1, 0, 0 };
    struct world *w = open_world();

    (void)state;
    fakes[1].room = 1;
    for (uint32_t i = 0; i < 4; i++)
        put(w, 1, 0, 8);
    put(w, 1, 1, 8);
    put(w, 1, 1, 8);
    assert_int_equal(fakes[1].n, 0);
    fakes[1].room = UINT64_MAX;
    ep_gin_progress(&w->comm);
    assert_int_equal(fakes[1].n, 6);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(fakes[1].taken[i]->context, expected[i]);
    close_world(w);
}

static void progress_begins_with_the_next_rank(void **state)
{
    struct world *w = open_world();

    (void)state;
    w->comm.rank = 1;
    for (uint32_t r = 0; r < RANKS; r++)
        put(w, r, 0, 100);
    ep_gin_progress(&w->comm);
    assert_int_equal(looks, RANKS);
    assert_int_equal(looked_at[0], 2);
    assert_int_equal(looked_at[1], 0);
    assert_int_equal(looked_at[2], 1);
    close_world(w);
}

static void a_link_without_room_goes_on_where_it_stopped(void **state)
{
    struct world *w = open_world();
    struct ep_gin_put *p;

    (void)state;
    fakes[1].room = 30;
    p = put(w, 1, 0, 100);
    put(w, 1, 0, 5);
    assert_int_equal(p->taken, 30);
    fakes[1].room = 75;
    ep_gin_progress(&w->comm);
    assert_int_equal(fakes[1].n, 2);
    assert_ptr_equal(fakes[1].taken[0], p);
    assert_int_equal(p->taken, 100);
    assert_int_equal(p->number, 1);
    close_world(w);
}

/* ---- peers that go --------------------------------------------------------------------------- */

static void puts_to_a_peer_that_is_gone_are_done(void **state)
{
    struct world *w = open_world();
    struct ep_gin_put *begun, *waiting, *other;

    (void)state;
    fakes[1].room = 30;
    begun = put(w, 1, 0, 100);
    waiting = put(w, 1, 1, 100);
    other = put(w, 2, 0, 100);
    ep_gin_put_sent(begun, 10);
    ep_gin_peer_lost(&w->peers[1], "the test says so");
    ep_gin_progress(&w->comm);
    assert_true(ep_gin_put_test(&w->comm, waiting));
    assert_false(ep_gin_put_test(&w->comm, begun)); /* the link still reads 20 bytes of it */
    ep_gin_put_sent(begun, 20);
    assert_true(ep_gin_put_test(&w->comm, begun));
    assert_true(ep_gin_put_test(&w->comm, put(w, 1, 0, 8)));
    assert_int_equal(w->comm.counts.lost_puts, 3);
    assert_false(ep_gin_put_test(&w->comm, other));
    ep_gin_put_sent(other, 100);
    assert_true(ep_gin_put_test(&w->comm, other));
    assert_int_equal(w->comm.failed, 0);
    close_world(w);
}

/* ---- many ------------------------------------------------------------------------------------ */

static void as_many_as_were_promised_are_taken(void **state)
{
    struct world *w = open_world();
    struct ep_gin_put **all = malloc(CONTEXTS * EP_GIN_PUTS * sizeof *all);

    (void)state;
    fakes[1].room = 0;
    for (uint32_t i = 0; i < CONTEXTS * EP_GIN_PUTS; i++)
        all[i] = put(w, 1, i % CONTEXTS, 8);
    assert_int_equal(w->comm.counts.crowded, 0);
    assert_true(ep_gin_put_test(&w->comm, put(w, 1, 0, 8)));
    assert_int_equal(w->comm.counts.crowded, 1);
    ep_gin_peer_lost(&w->peers[1], "the test says so");
    ep_gin_progress(&w->comm);
    for (uint32_t i = 0; i < CONTEXTS * EP_GIN_PUTS; i++)
        assert_true(ep_gin_put_test(&w->comm, all[i]));
    assert_ptr_not_equal(put(w, 2, 0, 8), &w->comm.refused); /* they can be had again */
    free(all);
    close_world(w);
}

static void a_context_that_goes_leaves_no_puts_behind(void **state)
{
    struct world *w = open_world();
    struct ep_gin_put *done, *under_way, *other;
    uint32_t first;

    (void)state;
    done = put(w, 1, 0, 8);
    under_way = put(w, 1, 0, 8);
    other = put(w, 1, 1, 8);
    ep_gin_put_sent(done, 8);
    ep_gin_contexts_give(&w->comm, 0, 1);
    assert_false(done->in_use);
    assert_true(under_way->in_use);
    ep_gin_put_sent(under_way, 8);
    assert_false(under_way->in_use);
    assert_true(other->in_use);
    assert_true(ep_gin_put_test(&w->comm, put(w, 1, 0, 8))); /* no context of anybody's */
    assert_int_equal(w->comm.counts.bad_puts, 1);
    assert_int_equal(ep_gin_contexts_take(&w->comm, 1, &first, NULL), EP_OK);
    assert_int_equal(first, 0);
    assert_int_equal(ep_gin_contexts_take(&w->comm, EP_GIN_MAX_CONTEXTS, &first, NULL), EP_RESOURCE_EXHAUSTED);
    close_world(w);
}

static void a_region_knows_who_uses_it(void **state)
{
    struct world *w = open_world();
    struct ep_gin_put *a = put(w, 1, 0, 8), *b = put(w, 2, 0, 8);

    (void)state;
    assert_int_equal(w->source.uses, 2);
    assert_int_equal(w->target.uses, 2);
    ep_gin_put_sent(a, 8);
    ep_gin_put_sent(b, 8);
    assert_int_equal(w->source.uses, 0);
    assert_int_equal(w->target.uses, 0);
    close_world(w);
}

/* As of a region that was registered: what it has is its own. */
static void own_remotes(struct world *w, struct ep_gin_region *region)
{
    struct ep_gin_remote *remote = malloc(RANKS * sizeof *remote);

    assert_non_null(remote);
    memcpy(remote, region->remote, RANKS * sizeof *remote);
    region->remote = remote;
    w->comm.settings.timeout_ns = EP_NS_PER_S;
}

static void who_takes_no_puts_of_a_region_that_goes_is_given_up(void **state)
{
    struct world *w = open_world();
    struct ep_gin_put *stuck, *whole;

    (void)state;
    own_remotes(w, &w->source);
    fakes[1].room = 30;
    stuck = put(w, 1, 0, 100);
    whole = put(w, 2, 0, 8);
    ep_gin_put_sent(stuck, 30);
    ep_gin_put_sent(whole, 8);
    ep_gin_region_remove(&w->comm, &w->source);
    assert_true(ep_gin_put_test(&w->comm, stuck));
    assert_true(ep_gin_put_test(&w->comm, whole));
    assert_int_equal(w->source.uses, 0);
    assert_true(ep_gin_peer_is_lost(&w->peers[1]));
    assert_false(ep_gin_peer_is_lost(&w->peers[2]));
    assert_null(w->source.remote);
    close_world(w);
}

/* Bytes of a put leave one by one, so that it takes longer than a put that does not get on is waited for. */
static void trickle(struct fake *from)
{
    static uint64_t last;

    if (ep_clock_ns() - last < EP_NS_PER_S / 2)
        return;
    last = ep_clock_ns();
    if (from->n > 0)
        ep_gin_put_sent(from->taken[0], 1);
}

static void puts_of_a_region_that_goes_get_on_to_their_end(void **state)
{
    struct world *w = open_world();
    struct ep_gin_put *slow;

    (void)state;
    own_remotes(w, &w->source);
    slow = put(w, 1, 0, 6);
    fakes[1].at_progress = trickle;
    ep_gin_region_remove(&w->comm, &w->source);
    assert_true(ep_gin_put_test(&w->comm, slow));
    assert_int_equal(slow->sent, 6);
    assert_false(ep_gin_peer_is_lost(&w->peers[1]));
    close_world(w);
}

static void a_gpu_that_fails_ends_puts_and_says_so(void **state)
{
    struct world *w = open_world();
    struct ep_gin_put *p;

    (void)state;
    fakes[1].room = 0;
    p = put(w, 1, 0, 8);
    w->comm.failed = 1;
    ep_gin_progress(&w->comm);
    assert_true(ep_gin_put_test(&w->comm, p));
    assert_int_equal(fakes[1].n, 0);
    close_world(w);
}

/* ---- staging memory -------------------------------------------------------------------------- */

static void pieces_lie_in_one_stretch_and_come_back_in_any_order(void **state)
{
    static uint8_t memory[1 << 16];
    static const struct ep_gin_stream no_stream; /* every mark is reached */
    struct ep_gin_staging s = { .at = memory, .bytes = sizeof memory };
    uint32_t piece[4], seed = 1;

    (void)state;
    for (uint32_t round = 0; round < 10000; round++) {
        uint8_t *at[4];
        uint32_t bytes[4], n = 0;
        void *taken;

        for (; n < 4; n++) {
            seed = seed * 1664525 + 1013904223;
            bytes[n] = 1 + seed % 20000;
            if (!ep_gin_staging_take(&s, bytes[n], &piece[n], &taken))
                break;
            at[n] = taken;
            assert_true(at[n] >= memory && at[n] + bytes[n] <= memory + sizeof memory);
            for (uint32_t i = 0; i < n; i++)
                assert_true(at[n] >= at[i] + bytes[i] || at[i] >= at[n] + bytes[n]);
        }
        assert_true(n > 0);
        while (n > 0)
            ep_gin_staging_give(&s, piece[--n], 0);
        ep_gin_staging_reclaim(&s, &no_stream);
    }
    assert_true(ep_gin_staging_take(&s, sizeof memory / 2, &piece[0], (void *[]){ NULL }));
}

static void a_piece_that_is_not_given_back_is_in_the_way(void **state)
{
    static uint8_t memory[4096];
    static const struct ep_gin_stream no_stream;
    struct ep_gin_staging s = { .at = memory, .bytes = sizeof memory };
    uint32_t first, second, third;
    void *at;

    (void)state;
    assert_true(ep_gin_staging_take(&s, 2048, &first, &at));
    assert_true(ep_gin_staging_take(&s, 2048, &second, &at));
    assert_false(ep_gin_staging_take(&s, 1, &third, &at));
    ep_gin_staging_give(&s, second, 0);
    ep_gin_staging_reclaim(&s, &no_stream);
    assert_false(ep_gin_staging_take(&s, 1, &third, &at));
    ep_gin_staging_give(&s, first, 0);
    ep_gin_staging_reclaim(&s, &no_stream);
    assert_true(ep_gin_staging_take(&s, 2048, &third, &at));
    assert_ptr_equal(at, memory);
}

static size_t pages_there(void *at, size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = bytes / page - 1;
    uint8_t *there = malloc(pages);
    size_t n = 0;

    assert_non_null(there);
    assert_int_equal(mincore((void *)(((uintptr_t)at + page - 1) & ~(uintptr_t)(page - 1)), pages * page, there), 0);
    for (size_t i = 0; i < pages; i++)
        n += there[i] & 1;
    free(there);
    return n;
}

/* Also of a pool that comes after others: an allocator that keeps their memory would have to clear it. */
static void memory_for_puts_is_not_there_before_they_are(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct ep_gin_pool pool = { .n = 0 };

        assert_int_equal(ep_gin_pool_grow(&pool, EP_GIN_PUTS, NULL), EP_OK);
        assert_int_equal(pages_there(pool.slabs[0], EP_GIN_PUTS * sizeof *pool.slabs[0]), 0);
        assert_non_null(ep_gin_pool_take(&pool));
        ep_gin_pool_close(&pool);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_put_is_done_when_its_source_is_free),
        cmocka_unit_test(a_message_says_where_its_bytes_go),
        cmocka_unit_test(what_makes_no_sense_is_counted_and_done),
        cmocka_unit_test(numbers_count_puts_to_a_peer_and_point_back_in_a_context),
        cmocka_unit_test(what_is_further_back_than_the_window_is_not_pointed_at),
        cmocka_unit_test(contexts_take_turns),
        cmocka_unit_test(progress_begins_with_the_next_rank),
        cmocka_unit_test(a_link_without_room_goes_on_where_it_stopped),
        cmocka_unit_test(puts_to_a_peer_that_is_gone_are_done),
        cmocka_unit_test(as_many_as_were_promised_are_taken),
        cmocka_unit_test(a_context_that_goes_leaves_no_puts_behind),
        cmocka_unit_test(a_region_knows_who_uses_it),
        cmocka_unit_test(who_takes_no_puts_of_a_region_that_goes_is_given_up),
        cmocka_unit_test(puts_of_a_region_that_goes_get_on_to_their_end),
        cmocka_unit_test(a_gpu_that_fails_ends_puts_and_says_so),
        cmocka_unit_test(pieces_lie_in_one_stretch_and_come_back_in_any_order),
        cmocka_unit_test(a_piece_that_is_not_given_back_is_in_the_way),
        cmocka_unit_test(memory_for_puts_is_not_there_before_they_are),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
