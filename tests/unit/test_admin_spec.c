/* What ep-admin reads: command lines, sizes and times, YAML, and the specs made from them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "command.h"
#include "spec.h"
#include "text.h"
#include "yaml_json.h"

/* ---- sizes, times, numbers ------------------------------------------------------------ */

static void sizes_have_binary_and_decimal_units(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        { "0", 0 },          { "17", 17 },           { "64MiB", 64 << 20 },
        { "64M", 64 << 20 }, { "64 mib", 64 << 20 }, { "1.5k", 1536 },
        { "1KB", 1000 },     { "2G", 2ull << 30 },   { "18446744073709551615", UINT64_MAX },
    };
    static const char *const bad[] = { "",     "-1",    " 1",   "+1",  "64MiBs", "MiB",
                                       "0x10", "1e30G", "1..5", "nan", "inf" };
    uint64_t bytes;

    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_true(ep_text_parse_size(good[i].text, &bytes));
        assert_int_equal(bytes, good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(ep_text_parse_size(bad[i], &bytes));
}

static void times_are_seconds_without_a_unit(void **state)
{
    int64_t ms;

    (void)state;
    assert_true(ep_text_parse_duration("5", &ms) && ms == 5000);
    assert_true(ep_text_parse_duration("250ms", &ms) && ms == 250);
    assert_true(ep_text_parse_duration("1.5s", &ms) && ms == 1500);
    assert_true(ep_text_parse_duration("2m", &ms) && ms == 120000);
    assert_true(ep_text_parse_duration("0", &ms) && ms == 0);
    assert_true(ep_text_parse_duration("0.2ms", &ms) && ms == 1);
    assert_true(ep_text_parse_duration("1.2ms", &ms) && ms == 2);
    assert_false(ep_text_parse_duration("soon", &ms));
    assert_false(ep_text_parse_duration("-5s", &ms));
    assert_false(ep_text_parse_duration("9999999h", &ms));
}

static void values_are_written_for_people(void **state)
{
    (void)state;
    assert_string_equal(ep_text_size(0).s, "0 B");
    assert_string_equal(ep_text_size(1536).s, "1.5 KiB");
    assert_string_equal(ep_text_size(64 << 20).s, "64 MiB");
    assert_string_equal(ep_text_count(999).s, "999");
    assert_string_equal(ep_text_count(12345).s, "12.3k");
    assert_string_equal(ep_text_micros(1500).s, "1.5 ms");
    assert_string_equal(ep_text_age(0).s, "-");
}

static void control_characters_do_not_reach_the_terminal(void **state)
{
    char clean[16];

    (void)state;
    ep_text_clean("a\033[31m\nb\x7f", clean, sizeof clean);
    assert_string_equal(clean, "a?[31m?b?");
    ep_text_clean("0123456789abcdefghij", clean, sizeof clean);
    assert_string_equal(clean, "0123456789abcde");
}

/* ---- YAML ------------------------------------------------------------------------------ */

static json_t *read_yaml(const char *text)
{
    struct ep_error error = EP_ERROR_INIT;
    json_t *json = NULL;

    if (ep_yaml_parse(text, strlen(text), "f", &json, &error) != EP_OK)
        fail_msg("%s", error.text);
    return json;
}

static void scalars_have_the_types_of_the_core_schema(void **state)
{
    json_t *json =
        read_yaml("{a: 1, b: '1', c: true, d: yes, e: ~, f: 1.5, g: -3, h: 0x10, i: 1.2.3, j: '', k: .}");
    json_t *expected =
        json_loads("{\"a\": 1, \"b\": \"1\", \"c\": true, \"d\": \"yes\", \"e\": null, \"f\": 1.5,"
                   " \"g\": -3, \"h\": 16, \"i\": \"1.2.3\", \"j\": \"\", \"k\": \".\"}",
                   0, NULL);

    (void)state;
    assert_true(json_equal(json, expected));
    json_decref(json);
    json_decref(expected);
}

/* Whatever text a label or a reason has, it comes back. */
static void what_is_written_is_read_again(void **state)
{
    static const char *const texts[] = {
        "",     "yes",  "No", "null", "~",  "1",    "1e3", "0x1f", "1_000",       "12:30", "- a",
        "a: b", "a #b", "'",  "\"",   "\\", "a\nb", " a",  "a ",   "{x}",         "[x]",   "&a",
        "*a",   "!a",   "%a", "@a",   "`a", "?",    ":",   "\t",   "caf\xc3\xa9", "=",     "<<",
    };
    json_t *list = json_array(), *object = json_object(), *back;
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);

    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        json_array_append_new(list, json_string(texts[i]));
        json_object_set_new(object, texts[i], json_string(texts[i]));
    }
    json_object_set_new(object, "list", list);
    json_object_set_new(object, "numbers", json_pack("[i, I, f, b, n]", -7, (json_int_t)INT64_MAX, 0.25, 1));
    json_object_set_new(object, "nested", json_pack("[{s:[], s:{}}]", "a", "b"));
    assert_true(ep_yaml_write(object, false, out));
    fclose(out);
    back = read_yaml(text);
    assert_true(json_equal(object, back));
    json_decref(back);
    json_decref(object);
    free(text);
}

static void aliases_cannot_make_a_small_file_large(void **state)
{
    struct ep_error error = EP_ERROR_INIT;
    json_t *json = NULL;
    char text[2048] = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";

    (void)state;
    for (int i = 1; i < 10; i++) {
        size_t used = strlen(text);

        snprintf(text + used, sizeof text - used,
                 "a%d: &a%d [*a%d, *a%d, *a%d, *a%d, *a%d, *a%d, *a%d, *a%d]\n", i, i, i - 1, i - 1, i - 1,
                 i - 1, i - 1, i - 1, i - 1, i - 1);
    }
    assert_int_equal(ep_yaml_parse(text, strlen(text), "f", &json, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "too deep or too large"));
    assert_null(json);
}

/* ---- specs ------------------------------------------------------------------------------ */

static Ep__V1__GroupSpec *spec_of(const char *text)
{
    struct ep_error error = EP_ERROR_INIT;
    Ep__V1__GroupSpec *message = NULL;
    json_t *json = NULL;
    char name[64];

    if (ep_spec_parse(text, strlen(text), "f", name, sizeof name, &json, &error) != EP_OK ||
        ep_spec_message(json, &message, &error) != EP_OK)
        fail_msg("%s", error.text);
    json_decref(json);
    return message;
}

static void a_spec_takes_short_names_and_units(void **state)
{
    Ep__V1__GroupSpec *spec =
        spec_of("ranks: 8\ntopK: 4\nmodes: [ht, MODE_LL]\ndtypes: [fp8_e4m3]\narena_bytes: 1.5MiB\n"
                "ll_max_tokens:\nlabels: {a: b}\n");

    (void)state;
    assert_int_equal(spec->ranks, 8);
    assert_int_equal(spec->top_k, 4);
    assert_int_equal(spec->n_modes, 2);
    assert_int_equal(spec->modes[0], EP__V1__MODE__MODE_HT);
    assert_int_equal(spec->modes[1], EP__V1__MODE__MODE_LL);
    assert_int_equal(spec->dtypes[0], EP__V1__DTYPE__DTYPE_FP8_E4M3);
    assert_int_equal(spec->arena_bytes, 3 << 19);
    assert_int_equal(spec->n_labels, 1);
    protobuf_c_message_free_unpacked(&spec->base, NULL);
}

static void a_whole_group_gives_its_name(void **state)
{
    static const char text[] =
        "{\"name\": \"moe\", \"revision\": 3, \"spec\": {\"ranks\": 2}, \"status\": {\"epoch\": 1}}";
    struct ep_error error = EP_ERROR_INIT;
    json_t *json = NULL;
    char name[64];

    (void)state;
    assert_int_equal(ep_spec_parse(text, strlen(text), "f", name, sizeof name, &json, &error), EP_OK);
    assert_string_equal(name, "moe");
    assert_int_equal(json_object_size(json), 1);
    json_decref(json);
}

static void placements_of_every_form_are_the_same(void **state)
{
    /* clang-format off */
    static const char *const forms[] = {
        "placement: [[1, 2], [0]]",
        "placement: [{expert: 1, rank: 0}, {expert: 2, rank: 0}, {expert: 0, rank: 1}]",
        "placement: {homes: [{expert: 1, rank: 0}, {expert: 2, rank: 0}, {expert: 0, rank: 1}]}",
        "placement: {strategy: EXPLICIT, homes: [{expert: 1}, {expert: 2}, {expert: 0, rank: 1}]}",
    };
    /* clang-format on */

    (void)state;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        Ep__V1__GroupSpec *spec = spec_of(forms[i]);
        const Ep__V1__Placement *placement = spec->placement;

        assert_int_equal(placement->strategy, EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_EXPLICIT);
        assert_int_equal(placement->n_homes, 3);
        assert_int_equal(placement->homes[0]->expert, 1);
        assert_int_equal(placement->homes[2]->rank, 1);
        protobuf_c_message_free_unpacked(&spec->base, NULL);
    }
}

/* ---- command lines ----------------------------------------------------------------------- */

static ep_status parse(struct ep_invocation *invocation, struct ep_error *error, int argc, const char **argv)
{
    return ep_invocation_parse(argc, (char **)(uintptr_t)argv, invocation, error);
}
#define PARSE(invocation, error, ...)                                                                        \
    parse(invocation, error, (int)(sizeof((const char *[]){ "ep-admin", __VA_ARGS__ }) / sizeof(char *)),    \
          (const char *[]){ "ep-admin", __VA_ARGS__, NULL })

static void flags_may_stand_anywhere(void **state)
{
    struct ep_invocation invocation;
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    assert_int_equal(PARSE(&invocation, &error, "-ojson", "group", "--timeout=2s", "create", "--ranks", "8",
                           "moe", "--server", "unix:/x", "--ranks=9"),
                     EP_OK);
    assert_string_equal(ep_command_name(invocation.command).s, "group create");
    assert_string_equal(invocation.argument, "moe");
    assert_string_equal(ep_invocation_text(&invocation, "output"), "json");
    assert_string_equal(ep_invocation_text(&invocation, "server"), "unix:/x");
    assert_int_equal(ep_invocation_u64(&invocation, "ranks", 0), 9);
    assert_int_equal(ep_invocation_ms(&invocation, "timeout", 0), 2000);
    assert_false(ep_invocation_given(&invocation, "dry-run"));
    ep_invocation_clear(&invocation);
}

static void words_after_two_dashes_are_no_flags(void **state)
{
    struct ep_invocation invocation;
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    assert_int_equal(PARSE(&invocation, &error, "group", "get", "--", "--help"), EP_OK);
    assert_string_equal(invocation.argument, "--help");
    ep_invocation_clear(&invocation);
}

/* Completion and parsing find a flag by its name, so a name must not mean two things. */
static void no_command_has_a_flag_twice(void **state)
{
    const struct ep_flag *flags[EP_MAX_FLAGS];

    (void)state;
    for (const struct ep_command *command = ep_commands; command->noun; command++) {
        size_t n = ep_command_flags(command, flags);

        assert_true(n < EP_MAX_FLAGS);
        assert_non_null(ep_noun_find(command->noun));
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < i; j++) {
                assert_string_not_equal(flags[i]->name, flags[j]->name);
                assert_true(!flags[i]->letter || flags[i]->letter != flags[j]->letter);
            }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_have_binary_and_decimal_units),
        cmocka_unit_test(times_are_seconds_without_a_unit),
        cmocka_unit_test(values_are_written_for_people),
        cmocka_unit_test(control_characters_do_not_reach_the_terminal),
        cmocka_unit_test(scalars_have_the_types_of_the_core_schema),
        cmocka_unit_test(what_is_written_is_read_again),
        cmocka_unit_test(aliases_cannot_make_a_small_file_large),
        cmocka_unit_test(a_spec_takes_short_names_and_units),
        cmocka_unit_test(a_whole_group_gives_its_name),
        cmocka_unit_test(placements_of_every_form_are_the_same),
        cmocka_unit_test(flags_may_stand_anywhere),
        cmocka_unit_test(words_after_two_dashes_are_no_flags),
        cmocka_unit_test(no_command_has_a_flag_twice),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
