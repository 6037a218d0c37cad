/* The allocator of a rank's arena: its table, its limits, and that it never touches the memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client_private.h"

enum { BYTES = 64 * 256 };

static struct arena make(uint64_t bytes)
{
    struct arena arena;

    assert_int_equal(arena_init(&arena, bytes, NULL), EP_OK);
    return arena;
}

static uint64_t take(struct arena *arena, uint64_t bytes)
{
    uint64_t offset = UINT64_MAX;

    assert_int_equal(arena_take(arena, bytes, &offset, NULL), EP_OK);
    return offset;
}

/* Blocks cover the arena without gaps, and no two free ones touch. */
static void check_table(const struct arena *arena)
{
    uint64_t at = 0;

    for (uint32_t i = 0; i < arena->n; i++) {
        assert_int_equal(arena->block[i].offset, at);
        assert_int_equal(arena->block[i].bytes % ARENA_ALIGN, 0);
        if (i > 0)
            assert_true(arena->block[i].used || arena->block[i - 1].used);
        at += arena->block[i].bytes;
    }
    assert_int_equal(at, arena->bytes);
}

static void first_fit_and_aligned(void **state)
{
    struct arena arena = make(BYTES);

    (void)state;
    assert_int_equal(take(&arena, 1), 0);
    assert_int_equal(take(&arena, 256), 256);
    assert_int_equal(take(&arena, 257), 512);
    assert_int_equal(take(&arena, 0), 1024); /* empty, with an address of its own */
    assert_int_equal(take(&arena, 1), 1280);
    assert_true(arena_give(&arena, 256));
    assert_int_equal(take(&arena, 200), 256);
    check_table(&arena);
    arena_fini(&arena);
}

static void the_whole_arena_and_not_one_byte_more(void **state)
{
    struct arena arena = make(BYTES);
    struct ep_error error = EP_ERROR_INIT;
    uint64_t offset;

    (void)state;
    assert_int_equal(arena_take(&arena, BYTES + 1, &offset, &error), EP_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(error.text, "arena"));
    assert_int_equal(arena_take(&arena, UINT64_MAX, &offset, &error), EP_RESOURCE_EXHAUSTED);
    assert_int_equal(take(&arena, BYTES), 0);
    assert_int_equal(arena_take(&arena, 1, &offset, &error), EP_RESOURCE_EXHAUSTED);
    assert_true(arena_give(&arena, 0));
    assert_int_equal(take(&arena, BYTES), 0);
    arena_fini(&arena);
}

static void only_what_was_taken_can_be_given(void **state)
{
    struct arena arena = make(BYTES);
    uint64_t a = take(&arena, 512), b = take(&arena, 512);

    (void)state;
    assert_false(arena_give(&arena, a + 256)); /* inside a block */
    assert_false(arena_give(&arena, 2048));    /* free */
    assert_false(arena_give(&arena, BYTES));
    assert_true(arena_give(&arena, b));
    assert_false(arena_give(&arena, b)); /* twice */
    assert_true(arena_give(&arena, a));
    assert_int_equal(arena.n, 1);
    arena_fini(&arena);
}

static void reach_ends_with_the_block(void **state)
{
    struct arena arena = make(BYTES);
    uint64_t a = take(&arena, 512), b = take(&arena, 256);

    (void)state;
    assert_int_equal(arena_reach(&arena, a), 512);
    assert_int_equal(arena_reach(&arena, a + 500), 12);
    assert_int_equal(arena_reach(&arena, b), 256);
    assert_int_equal(arena_reach(&arena, b + 256), 0); /* free */
    assert_int_equal(arena_reach(&arena, BYTES), 0);
    assert_int_equal(arena_reach(&arena, UINT64_MAX), 0);
    arena_fini(&arena);
}

static void an_empty_arena_has_nothing(void **state)
{
    struct arena arena = make(255);
    uint64_t offset;

    (void)state;
    assert_int_equal(arena_take(&arena, 1, &offset, NULL), EP_RESOURCE_EXHAUSTED);
    assert_int_equal(arena_reach(&arena, 0), 0);
    assert_false(arena_give(&arena, 0));
    arena_fini(&arena);
}

/* Against a plain map of who owns which line. */
static void random_use_keeps_blocks_apart(void **state)
{
    enum { LINES = BYTES / 256, HELD = 24 };
    struct arena arena = make(BYTES);
    uint8_t owner[LINES] = { 0 };
    struct { uint64_t offset, bytes; } held[HELD] = { 0 };

    (void)state;
    srand(1);
    for (int step = 0; step < 20000; step++) {
        int i = rand() % HELD;

        if (held[i].bytes) {
            assert_true(arena_give(&arena, held[i].offset));
            memset(owner + held[i].offset / 256, 0, (held[i].bytes + 255) / 256);
            held[i].bytes = 0;
        } else {
            uint64_t bytes = (uint64_t)(1 + rand() % 2500), offset;

            if (arena_take(&arena, bytes, &offset, NULL) == EP_OK) {
                for (uint64_t line = offset / 256; line < (offset + bytes + 255) / 256; line++) {
                    assert_int_equal(owner[line], 0);
                    owner[line] = (uint8_t)(i + 1);
                }
                held[i].offset = offset;
                held[i].bytes = bytes;
            }
        }
        check_table(&arena);
    }
    arena_fini(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_fit_and_aligned),
        cmocka_unit_test(the_whole_arena_and_not_one_byte_more),
        cmocka_unit_test(only_what_was_taken_can_be_given),
        cmocka_unit_test(reach_ends_with_the_block),
        cmocka_unit_test(an_empty_arena_has_nothing),
        cmocka_unit_test(random_use_keeps_blocks_apart),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
