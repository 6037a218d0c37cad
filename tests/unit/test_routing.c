/* Where tokens go in ep-bench: distinct experts, odds, groups, words, traces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "routing.h"
#include "temporary.h"

enum { TOKENS = 500 };

static char directory[256];

static int make_directory(void **state)
{
    (void)state;
    return temporary_directory(directory, sizeof directory) ? 0 : -1;
}

static int remove_directory(void **state)
{
    (void)state;
    return rmdir(directory);
}

static const char *write_file(const char *content)
{
    static char path[300];
    FILE *file;

    snprintf(path, sizeof path, "%s/file", directory);
    file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(content, 1, strlen(content), file), strlen(content));
    assert_int_equal(fclose(file), 0);
    return path;
}

static struct routing *open_shape(const char *name, const struct routing_shape *shape)
{
    struct routing_spec spec;
    struct ep_error error = EP_ERROR_INIT;
    struct routing *routing = NULL;

    assert_int_equal(routing_parse(name, &spec, &error), EP_OK);
    if (routing_open(&spec, shape, &routing, &error) != EP_OK)
        fail_msg("%s: %s", name, error.text);
    return routing;
}

static struct routing *open_named(const char *name, uint32_t ranks, uint32_t experts, uint32_t top_k,
                                  double drop)
{
    return open_shape(name, &(struct routing_shape){ ranks, experts, top_k, 7, drop });
}

static void check_distinct(const char *name, uint32_t experts, uint32_t top_k)
{
    struct routing *routing = open_named(name, 3, experts, top_k, 0);
    int64_t topk[EP_MAX_TOP_K];
    float weights[EP_MAX_TOP_K];

    for (uint32_t rank = 0; rank < 3; rank++)
        for (uint32_t t = 0; t < TOKENS; t++) {
            float sum = 0;

            routing_token(routing, rank, t, topk, weights);
            for (uint32_t j = 0; j < top_k; j++) {
                assert_in_range(topk[j], 0, experts - 1);
                for (uint32_t i = 0; i < j; i++)
                    assert_true(topk[i] != topk[j]);
                assert_true(weights[j] > 0);
                sum += weights[j];
            }
            if (strcmp(name, "deepseek-v3") == 0)
                sum /= 2.5f;
            assert_true(sum > 0.999f && sum < 1.001f);
        }
    routing_close(routing);
}

static void experts_of_a_token_differ(void **state)
{
    static const char *names[] = { "uniform", "zipf:1.2", "zipf:8", "hot:3", "deepseek-v3" };
    (void)state;

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        check_distinct(names[i], 256, 8);
        check_distinct(names[i], 60, 6);
        check_distinct(names[i], 16, 16);
        check_distinct(names[i], 7, 1);
        check_distinct(names[i], 11, 9);
    }
}

static void count_experts(struct routing *routing, uint32_t top_k, uint32_t *count)
{
    int64_t topk[EP_MAX_TOP_K];
    float weights[EP_MAX_TOP_K];

    for (uint32_t t = 0; t < 4000; t++) {
        routing_token(routing, 1, t, topk, weights);
        for (uint32_t j = 0; j < top_k; j++)
            if (topk[j] >= 0)
                count[topk[j]]++;
    }
}

static void uniform_is_flat_and_zipf_is_not(void **state)
{
    uint32_t uniform[32] = { 0 }, zipf[32] = { 0 }, hot[32] = { 0 };
    struct routing *routing = open_named("uniform", 2, 32, 4, 0);
    (void)state;

    count_experts(routing, 4, uniform); /* 500 each, standard deviation about 21 */
    for (uint32_t e = 0; e < 32; e++)
        assert_in_range(uniform[e], 390, 610);
    routing_close(routing);

    routing = open_named("zipf:1", 2, 32, 1, 0);
    count_experts(routing, 1, zipf); /* 1/i of 4000 / H(32) = 985.6 */
    assert_in_range(zipf[0], 900, 1080);
    assert_in_range(zipf[1], 420, 570);
    assert_in_range(zipf[9], 60, 140);
    routing_close(routing);

    routing = open_named("hot:5", 2, 32, 4, 0);
    count_experts(routing, 4, hot);
    assert_int_equal(hot[5], 4000);
    assert_in_range(hot[6], 280, 500); /* 3 of 31 */
    routing_close(routing);
}

static void the_same_seed_gives_the_same_choices(void **state)
{
    struct routing_shape shape = { 2, 64, 8, 1, 0 };
    struct routing *a = open_shape("uniform", &shape), *b = open_shape("uniform", &shape);
    int64_t first[8], second[8], other[8];
    float weights[3][8];
    uint32_t differs = 0;
    (void)state;

    shape.seed = 2;

    struct routing *c = open_shape("uniform", &shape);

    for (uint32_t t = 0; t < TOKENS; t++) {
        routing_token(a, 0, t, first, weights[0]);
        routing_token(b, 0, t, second, weights[1]);
        routing_token(c, 0, t, other, weights[2]);
        assert_memory_equal(first, second, sizeof first);
        assert_memory_equal(weights[0], weights[1], sizeof weights[0]);
        differs += memcmp(first, other, sizeof first) != 0;
    }
    assert_in_range(differs, TOKENS - 5, TOKENS);
    routing_close(a);
    routing_close(b);
    routing_close(c);
}

static uint32_t groups_used(const int64_t *topk, uint32_t top_k, uint32_t group_size)
{
    uint64_t mask = 0;

    for (uint32_t j = 0; j < top_k; j++)
        mask |= 1ull << ((uint32_t)topk[j] / group_size);
    return (uint32_t)__builtin_popcountll(mask);
}

static void deepseek_keeps_to_its_groups(void **state)
{
    /* experts, top_k, size of a group, groups that stay */
    static const uint32_t shapes[][4] = {
        { 256, 8, 32, 4 }, { 60, 6, 10, 3 }, { 16, 16, 2, 8 }, { 7, 3, 1, 4 }, { 11, 2, 11, 1 }
    };
    (void)state;

    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct routing *routing = open_named("deepseek-v3", 1, shapes[i][0], shapes[i][1], 0);
        uint32_t most = 0;

        for (uint32_t t = 0; t < TOKENS; t++) {
            int64_t topk[EP_MAX_TOP_K];
            float weights[EP_MAX_TOP_K];
            uint32_t used;

            routing_token(routing, 0, t, topk, weights);
            used = groups_used(topk, shapes[i][1], shapes[i][2]);
            most = used > most ? used : most;
        }
        if (shapes[i][2] == 1) /* 7 groups of one expert: three choices are three groups */
            assert_int_equal(most, 3);
        else
            assert_int_equal(most, shapes[i][3]);
        routing_close(routing);
    }
}

static void drop_makes_that_share_of_choices_none(void **state)
{
    struct routing *routing = open_named("uniform", 1, 64, 8, 0.3);
    uint32_t dropped = 0;
    (void)state;

    for (uint32_t t = 0; t < 1000; t++) {
        int64_t topk[8];
        float weights[8];

        routing_token(routing, 0, t, topk, weights);
        for (uint32_t j = 0; j < 8; j++)
            dropped += topk[j] == -1;
    }
    assert_in_range(dropped, 2200, 2600);
    routing_close(routing);
}

static void the_same_word_goes_the_same_way(void **state)
{
    char name[400];
    int64_t topk[4][5];
    float weights[5];
    (void)state;

    snprintf(name, sizeof name, "text:%s", write_file("The cat saw --  the\ncat's CAT,"));
    /* words: the cat saw the cat's cat */
    struct routing *routing = open_named(name, 1, 9, 5, 0);

    routing_token(routing, 0, 0, topk[0], weights);
    routing_token(routing, 0, 3, topk[1], weights);
    routing_token(routing, 0, 1, topk[2], weights);
    routing_token(routing, 0, 5, topk[3], weights);
    assert_memory_equal(topk[0], topk[1], sizeof topk[0]);
    assert_memory_equal(topk[2], topk[3], sizeof topk[0]);
    assert_memory_not_equal(topk[0], topk[2], sizeof topk[0]);
    routing_token(routing, 0, 6, topk[1], weights); /* the text begins again */
    assert_memory_equal(topk[0], topk[1], sizeof topk[0]);
    routing_close(routing);
    check_distinct(name, 9, 9);
    unlink(name + 5);
}

static void a_trace_survives_a_round_trip(void **state)
{
    char path[300], name[320];
    struct ep_error error = EP_ERROR_INIT;
    struct routing *before = open_named("deepseek-v3", 3, 40, 6, 0.2);
    (void)state;

    snprintf(path, sizeof path, "%s/trace", directory);
    snprintf(name, sizeof name, "trace:%s", path);
    assert_int_equal(routing_record(before, 20, path, &error), EP_OK);

    struct routing *after = open_named(name, 4, 40, 6, 0);

    for (uint32_t rank = 0; rank < 4; rank++) /* rank 3 replays rank 0 */
        for (uint32_t t = 0; t < 45; t++) {   /* and token 20 is token 0 again */
            int64_t topk[2][6];
            float weights[2][6];

            routing_token(before, rank % 3, t % 20, topk[0], weights[0]);
            routing_token(after, rank, t, topk[1], weights[1]);
            assert_memory_equal(topk[0], topk[1], sizeof topk[0]);
            assert_memory_equal(weights[0], weights[1], sizeof weights[0]);
        }
    routing_close(before);
    routing_close(after);
    unlink(path);
}

static void a_bad_trace_is_refused_by_line_and_field(void **state)
{
    static const struct {
        const char *content, *named;
    } cases[] = {
        { "", "no line 'ep-trace" },
        { "hello\n", ":1: not a trace" },
        { "ep-trace 2 ranks 1 experts 4 top_k 2\n", ":1: version is '2'" },
        { "ep-trace 1 ranks x experts 4 top_k 2\n", ":1: ranks is 'x'" },
        { "ep-trace 1 ranks 1 experts 4\n", ":1: top_k is missing" },
        { "ep-trace 1 ranks 1 experts 4 top_k 99\n", ":1: top_k is '99'" },
        { "ep-trace 1 ranks 1 experts 4 top_k 2 more\n", ":1: more words" },
        { "ep-trace 1 ranks 1 experts 4 top_k 2\n", "rank 0 has no token" },
        { "# a remark\n\nep-trace 1 ranks 1 experts 4 top_k 2\n1 0 1:1 2:1\n", ":4: rank is '1'" },
        { "ep-trace 1 ranks 1 experts 4 top_k 2\n0 1 1:1 2:1\n", ":2: token is 1: rank 0 goes on with 0" },
        { "ep-trace 1 ranks 1 experts 4 top_k 2\n0\n", ":2: token is missing" },
        { "ep-trace 1 ranks 1 experts 4 top_k 2\n0 0 1:1\n", ":2: choice 1 is missing" },
        { "ep-trace 1 ranks 1 experts 4 top_k 2\n0 0 1 2:1\n", ":2: choice 0 is '1'" },
        { "ep-trace 1 ranks 1 experts 4 top_k 2\n0 0 1:1 4:1\n", ":2: expert of choice 1 is '4'" },
        { "ep-trace 1 ranks 1 experts 4 top_k 2\n0 0 1:1 2:inf\n", ":2: weight of choice 1 is 'inf'" },
        { "ep-trace 1 ranks 1 experts 4 top_k 2\n0 0 1:1 2:\n", ":2: weight of choice 1 is ''" },
        { "ep-trace 1 ranks 1 experts 4 top_k 2\n0 0 1:1 2:1 3:1\n", ":2: more than 2 choices" },
        { "ep-trace 1 ranks 1 experts 9 top_k 2\n0 0 1:1 2:1\n", "has experts 9" },
    };
    char name[400];
    (void)state;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct routing_spec spec;
        struct routing_shape shape = { 1, 4, 2, 1, 0 };
        struct ep_error error = EP_ERROR_INIT;
        struct routing *routing = NULL;

        snprintf(name, sizeof name, "trace:%s", write_file(cases[i].content));
        assert_int_equal(routing_parse(name, &spec, &error), EP_OK);
        assert_int_equal(routing_open(&spec, &shape, &routing, &error), EP_INVALID_ARGUMENT);
        if (!strstr(error.text, cases[i].named))
            fail_msg("'%s' does not say '%s'", error.text, cases[i].named);
        assert_non_null(strstr(error.text, name + 6));
    }
    unlink(name + 6);
}

static void a_bad_name_is_refused(void **state)
{
    static const char *names[] = { "",       "uniformly", "uniform:1", "zipf",  "zipf:",
                                   "zipf:x", "zipf:-1",   "zipf:nan",  "hot",   "hot:-1",
                                   "hot:1x", "text:",     "trace",     "unifor" };
    struct routing_spec spec;
    struct ep_error error;
    (void)state;

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        error = (struct ep_error)EP_ERROR_INIT;
        assert_int_equal(routing_parse(names[i], &spec, &error), EP_INVALID_ARGUMENT);
        assert_true(strlen(error.text) > 0);
    }
}

static void shapes_that_cannot_be_are_refused(void **state)
{
    struct routing_spec spec;
    struct ep_error error = EP_ERROR_INIT;
    struct routing *routing;
    (void)state;

    routing_parse("uniform", &spec, &error);
    assert_int_equal(routing_open(&spec, &(struct routing_shape){ 1, 4, 5, 1, 0 }, &routing, &error),
                     EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "top_k is 5"));
    routing_parse("hot:4", &spec, &error);
    assert_int_equal(routing_open(&spec, &(struct routing_shape){ 1, 4, 2, 1, 0 }, &routing, &error),
                     EP_INVALID_ARGUMENT);
    routing_parse("text:/nowhere/at/all", &spec, &error);
    assert_int_equal(routing_open(&spec, &(struct routing_shape){ 1, 4, 2, 1, 0 }, &routing, &error),
                     EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "/nowhere/at/all"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_of_a_token_differ),
        cmocka_unit_test(uniform_is_flat_and_zipf_is_not),
        cmocka_unit_test(the_same_seed_gives_the_same_choices),
        cmocka_unit_test(deepseek_keeps_to_its_groups),
        cmocka_unit_test(drop_makes_that_share_of_choices_none),
        cmocka_unit_test(the_same_word_goes_the_same_way),
        cmocka_unit_test(a_trace_survives_a_round_trip),
        cmocka_unit_test(a_bad_trace_is_refused_by_line_and_field),
        cmocka_unit_test(a_bad_name_is_refused),
        cmocka_unit_test(shapes_that_cannot_be_are_refused),
    };

    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
