/* What a GIN peer may say, and what is not believed: bytes of strangers, and rings that somebody has written into. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ring.h"

enum { PIECE = 4096, RANKS = 8, ROUNDS = 2000000 };

static struct ep_gin_message good(void)
{
    return (struct ep_gin_message){ .magic = EP_GIN_MAGIC,
                                    .flags = EP_GIN_PAYLOAD,
                                    .signal_op = NCCL_SIGNAL_ADD,
                                    .number = 7,
                                    .back = 1,
                                    .bytes = PIECE,
                                    .total = 3 * PIECE,
                                    .region = 1025,
                                    .signal_region = 1026,
                                    .offset = 4097,
                                    .signal_offset = 16,
                                    .signal_value = 5 };
}

static struct ep_gin_message signal_alone(void)
{
    struct ep_gin_message m = good();

    m.flags = 0;
    m.bytes = 0;
    m.total = 0;
    m.region = 0;
    return m;
}

static struct ep_gin_message whole(void)
{
    struct ep_gin_message m = good();

    m.flags = EP_GIN_WHOLE;
    m.bytes = 0;
    m.total = 1ull << 36;
    return m;
}

static void what_is_said_is_valid(void **state)
{
    struct ep_gin_message m = good(), alone = signal_alone(), all = whole();

    (void)state;
    assert_true(ep_gin_message_valid(&m, PIECE));
    assert_true(ep_gin_message_valid(&alone, PIECE));
    assert_true(ep_gin_message_valid(&all, PIECE));
    assert_int_equal(ep_gin_message_bytes(&m), PIECE);
    assert_int_equal(ep_gin_message_bytes(&all), 1ull << 36);
    m.signal_op = 0;
    m.signal_region = 0;
    assert_true(ep_gin_message_valid(&m, PIECE));
}

#define REFUSED(from, change)                                                                                          \
    do {                                                                                                               \
        struct ep_gin_message m = from();                                                                              \
        change;                                                                                                        \
        assert_false(ep_gin_message_valid(&m, PIECE));                                                                 \
    } while (0)

static void what_nobody_says_is_refused(void **state)
{
    (void)state;
    REFUSED(good, m.magic++);
    REFUSED(good, m.flags |= 4);
    REFUSED(good, m.flags |= EP_GIN_WHOLE);
    REFUSED(good, m.bytes = PIECE + 1);
    REFUSED(good, m.bytes = 0);
    REFUSED(good, m.total = PIECE - 1);
    REFUSED(good, m.total = NCCL_MAX_BYTES + 1);
    REFUSED(good, m.region = 0);
    REFUSED(good, m.signal_op = 3);
    REFUSED(good, m.signal_op = 0);
    REFUSED(good, m.signal_region = 0);
    REFUSED(good, m.signal_offset = 12);
    REFUSED(signal_alone, m.bytes = 1);
    REFUSED(signal_alone, m.region = 1);
    REFUSED(signal_alone, m.flags = EP_GIN_PAYLOAD);
    REFUSED(signal_alone, m.flags = EP_GIN_WHOLE);
    REFUSED(whole, m.bytes = 1);
    REFUSED(whole, m.region = 0);
    REFUSED(whole, m.total = NCCL_MAX_BYTES + 1);
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Whatever passes has a payload that fits and bytes that make sense. */
static void random_bytes_that_pass_are_harmless(void **state)
{
    uint64_t random = 1;
    uint32_t passed = 0;

    (void)state;
    for (uint32_t i = 0; i < ROUNDS; i++) {
        struct ep_gin_message m = i % 2 ? good() : signal_alone();
        uint8_t *bytes = (uint8_t *)&m;

        for (uint64_t n = next_random(&random) % 4; n > 0; n--)
            bytes[next_random(&random) % sizeof m] = (uint8_t)next_random(&random);
        if (!ep_gin_message_valid(&m, PIECE))
            continue;
        passed++;
        assert_true(!(m.flags & EP_GIN_PAYLOAD) || (m.bytes > 0 && m.bytes <= PIECE));
        assert_true(ep_gin_message_bytes(&m) <= m.total && m.total <= NCCL_MAX_BYTES);
        assert_true(m.signal_offset % 8 == 0 || m.signal_op == 0);
    }
    assert_true(passed > 0);
}

/* ---- sums -------------------------------------------------------------------------------------------- */

static void ranges_do_not_wrap(void **state)
{
    (void)state;
    assert_true(ep_gin_inside(0, 0, 0));
    assert_true(ep_gin_inside(10, 6, 16));
    assert_true(ep_gin_inside(16, 0, 16));
    assert_false(ep_gin_inside(10, 7, 16));
    assert_false(ep_gin_inside(17, 0, 16));
    assert_false(ep_gin_inside(UINT64_MAX, 2, 16));
    assert_false(ep_gin_inside(8, UINT64_MAX - 4, 16));
}

/* ---- hellos ------------------------------------------------------------------------------------------- */

static const uint8_t token[EP_GIN_TOKEN_BYTES] = "sixteen bytes ok";

static struct ep_gin_hello hello(void)
{
    struct ep_gin_hello h = { .magic = EP_GIN_MAGIC,
                              .protocol = EP_GIN_PROTOCOL,
                              .purpose = EP_GIN_DATA,
                              .index = 3,
                              .rank = 7,
                              .ranks = RANKS,
                              .connections = 4,
                              .piece_bytes = PIECE };

    memcpy(h.token, token, sizeof token);
    return h;
}

#define SENT_AWAY(change)                                                                                              \
    do {                                                                                                               \
        struct ep_gin_hello h = hello();                                                                               \
        change;                                                                                                        \
        assert_false(ep_gin_hello_valid(&h, token, RANKS));                                                            \
    } while (0)

static void strangers_are_sent_away(void **state)
{
    struct ep_gin_hello friend = hello();

    (void)state;
    assert_true(ep_gin_hello_valid(&friend, token, RANKS));
    for (uint32_t i = 0; i < EP_GIN_TOKEN_BYTES; i++)
        SENT_AWAY(h.token[i] ^= 1);
    SENT_AWAY(h.magic++);
    SENT_AWAY(h.protocol++);
    SENT_AWAY(h.rank = RANKS);
    SENT_AWAY(h.ranks++);
    SENT_AWAY(h.purpose = 0);
    SENT_AWAY(h.purpose = 3);
    SENT_AWAY(h.index = EP_GIN_MAX_CONNECTIONS);
    SENT_AWAY(h.connections = 0);
    SENT_AWAY(h.connections = EP_GIN_MAX_CONNECTIONS + 1);
    SENT_AWAY(h.piece_bytes = 0);
}

/* ---- rings ---------------------------------------------------------------------------------------------- */

static struct ep_gin_ring *ring_make(void)
{
    struct ep_gin_ring *ring = calloc(1, sizeof *ring);

    assert_non_null(ring);
    ep_gin_ring_format(ring);
    assert_true(ep_gin_ring_valid(ring));
    return ring;
}

static void a_ring_gives_what_was_written_in_its_order(void **state)
{
    struct ep_gin_ring *ring = ring_make();
    struct ep_gin_message m = good();
    uint64_t written = 0, read = 0;
    bool broken;

    (void)state;
    for (uint32_t round = 0; round < 5; round++) {
        for (m.number = written; ep_gin_ring_write(ring, &m); m.number = written)
            written++;
        assert_int_equal(written - read, EP_GIN_RING_SLOTS);
        for (uint32_t i = 0; i < 700 && ep_gin_ring_peek(ring, &m, &broken); i++) {
            assert_int_equal(m.number, read++);
            ep_gin_ring_next(ring);
        }
    }
    while (ep_gin_ring_peek(ring, &m, &broken)) {
        assert_int_equal(m.number, read++);
        ep_gin_ring_next(ring);
    }
    assert_false(broken);
    assert_int_equal(read, written);
    free(ring);
}

static void an_index_that_makes_no_sense_is_seen(void **state)
{
    struct ep_gin_ring *ring = ring_make();
    struct ep_gin_message m;
    bool broken = false;

    (void)state;
    ring->written = EP_GIN_RING_SLOTS + 1;
    assert_false(ep_gin_ring_peek(ring, &m, &broken));
    assert_true(broken);
    ring->written = UINT64_MAX;
    assert_false(ep_gin_ring_peek(ring, &m, &broken));
    assert_true(broken);
    free(ring);
}

static void a_reader_that_sleeps_is_seen(void **state)
{
    struct ep_gin_ring *ring = ring_make();

    (void)state;
    assert_false(ep_gin_ring_sleeps(ring));
    ep_gin_ring_sleep(ring, true);
    assert_true(ep_gin_ring_sleeps(ring));
    ep_gin_ring_sleep(ring, false);
    assert_false(ep_gin_ring_sleeps(ring));
    free(ring);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_said_is_valid),
        cmocka_unit_test(what_nobody_says_is_refused),
        cmocka_unit_test(random_bytes_that_pass_are_harmless),
        cmocka_unit_test(ranges_do_not_wrap),
        cmocka_unit_test(strangers_are_sent_away),
        cmocka_unit_test(a_ring_gives_what_was_written_in_its_order),
        cmocka_unit_test(an_index_that_makes_no_sense_is_seen),
        cmocka_unit_test(a_reader_that_sleeps_is_seen),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
