/* Messages as JSON and back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ep/v1/admin.pb-c.h"
#include "ep/v1/attach.pb-c.h"
#include "ep_json.h"

#define assert_text(said, part)                                        \
    do {                                                               \
        if (!strstr((said), (part)))                                   \
            fail_msg("\"%s\" does not say \"%s\"", (said), (part));    \
    } while (0)

static ProtobufCMessage *parse(const char *text, const ProtobufCMessageDescriptor *type,
                               struct ep_error *error)
{
    ProtobufCMessage *message = NULL;
    json_error_t where;
    json_t *json = json_loads(text, JSON_DECODE_ANY, &where);

    if (!json)
        fail_msg("test's own JSON: %s", where.text);
    (void)ep_json_to_message(json, type, &message, error);
    json_decref(json);
    return message;
}

static void refused(const char *text, const ProtobufCMessageDescriptor *type, const char *part)
{
    struct ep_error error = EP_ERROR_INIT;

    assert_null(parse(text, type, &error));
    assert_int_equal(error.status, EP_INVALID_ARGUMENT);
    assert_text(error.text, part);
}

/* To a message and back to the same JSON; expect NULL: the text itself. */
static void round_trip(const char *text, const char *expect, const ProtobufCMessageDescriptor *type)
{
    struct ep_error error = EP_ERROR_INIT;
    ProtobufCMessage *message = parse(text, type, &error);
    json_t *json;
    char *dump;

    if (!message)
        fail_msg("%s", error.text);
    json = ep_json_from_message(message);
    dump = json_dumps(json, JSON_COMPACT);
    assert_string_equal(dump, expect ? expect : text);
    free(dump);
    json_decref(json);
    protobuf_c_message_free_unpacked(message, NULL);
}

static void defaults_are_present_and_unset_messages_null(void **state)
{
    (void)state;
    round_trip("{}", "{\"name\":\"\",\"spec\":null,\"dry_run\":false,\"asker\":null}",
               &ep__v1__create_group_request__descriptor);
}

static void spec_round_trips(void **state)
{
    (void)state;
    round_trip("{\"ranks\":8,\"experts\":256,\"hidden\":4294967295,\"top_k\":8,"
               "\"modes\":[\"MODE_LL\",\"MODE_HT\"],\"dtypes\":[],\"ll_max_tokens\":0,"
               "\"ht_max_tokens\":0,\"arena_bytes\":9223372036854775807,\"timeout_ms\":0,"
               "\"placement\":{\"strategy\":\"PLACEMENT_STRATEGY_EXPLICIT\","
               "\"homes\":[{\"expert\":1,\"rank\":2},{\"expert\":3,\"rank\":4}],"
               "\"nodes\":\"NODE_STRATEGY_UNSPECIFIED\",\"ranks\":[],\"redundant\":0,\"loads\":[]},"
               "\"labels\":{\"zone\":\"a\",\"\":\"empty key\"},\"backend\":\"BACKEND_HOST\","
               "\"ll_banks\":2,\"direct\":\"DIRECT_ANY\",\"attach_token\":{\"set\":true}}",
               NULL, &ep__v1__group_spec__descriptor);
}

static void integers_above_int64_are_strings(void **state)
{
    (void)state;
    round_trip("{\"revision\":\"18446744073709551615\"}",
               "{\"name\":\"\",\"revision\":\"18446744073709551615\",\"spec\":null,\"status\":null,\"plan\":null,\"behind\":\"\"}",
               &ep__v1__group__descriptor);
    round_trip("{\"revision\":\"12\"}",
               "{\"name\":\"\",\"revision\":12,\"spec\":null,\"status\":null,\"plan\":null,\"behind\":\"\"}",
               &ep__v1__group__descriptor);
}

static void bytes_are_base64(void **state)
{
    static const char *const texts[] = { "", "AA==", "AAE=", "AAEC", "/+8=" };

    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        Ep__V1__ClaimReply reply = EP__V1__CLAIM_REPLY__INIT;
        struct ep_error error = EP_ERROR_INIT;
        json_t *json = json_pack("{s:s}", "ticket", texts[i]);
        ProtobufCMessage *message = NULL;

        assert_int_equal(ep_json_to_message(json, reply.base.descriptor, &message, &error), EP_OK);
        json_decref(json);
        json = ep_json_from_message(message);
        assert_string_equal(json_string_value(json_object_get(json, "ticket")), texts[i]);
        json_decref(json);
        protobuf_c_message_free_unpacked(message, NULL);
    }
}

static void bytes_take_the_url_alphabet_without_padding(void **state)
{
    struct ep_error error = EP_ERROR_INIT;
    ProtobufCMessage *m = parse("{\"ticket\":\"_-8\"}", &ep__v1__claim_reply__descriptor, &error);

    (void)state;
    assert_non_null(m);
    assert_int_equal(((Ep__V1__ClaimReply *)m)->ticket.len, 2);
    assert_memory_equal(((Ep__V1__ClaimReply *)m)->ticket.data, "\xff\xef", 2);
    protobuf_c_message_free_unpacked(m, NULL);
}

static void oneof_is_absent_until_set(void **state)
{
    (void)state;
    round_trip("{\"group\":\"g\"}",
               "{\"group\":\"g\",\"worker\":\"\",\"window_version\":0,\"attach_version\":0,"
               "\"token\":\"\",\"executor\":\"EXECUTOR_AUTO\",\"follow\":false,\"after\":0,\"group_token\":\"\","
               "\"ht_sms\":0,\"after_ticket\":\"\"}",
               &ep__v1__claim_request__descriptor);
    round_trip("{\"group\":\"g\",\"rank\":0}",
               "{\"group\":\"g\",\"rank\":0,\"worker\":\"\",\"window_version\":0,"
               "\"attach_version\":0,\"token\":\"\",\"executor\":\"EXECUTOR_AUTO\",\"follow\":false,"
               "\"after\":0,\"group_token\":\"\",\"ht_sms\":0,\"after_ticket\":\"\"}",
               &ep__v1__claim_request__descriptor);
}

static void null_and_lower_camel_case_are_read(void **state)
{
    struct ep_error error = EP_ERROR_INIT;
    ProtobufCMessage *m = parse("{\"topK\":4,\"placement\":null,\"modes\":null,\"timeoutMs\":\"7\"}",
                                &ep__v1__group_spec__descriptor, &error);

    (void)state;
    assert_non_null(m);
    assert_int_equal(((Ep__V1__GroupSpec *)m)->top_k, 4);
    assert_int_equal(((Ep__V1__GroupSpec *)m)->timeout_ms, 7);
    assert_null(((Ep__V1__GroupSpec *)m)->placement);
    protobuf_c_message_free_unpacked(m, NULL);
}

static void enum_without_a_name_is_its_number(void **state)
{
    Ep__V1__GroupSpec spec = EP__V1__GROUP_SPEC__INIT;
    json_t *json;

    (void)state;
    spec.backend = (Ep__V1__Backend)77;
    json = ep_json_from_message(&spec.base);
    assert_int_equal(json_integer_value(json_object_get(json, "backend")), 77);
    json_decref(json);
}

static void string_that_is_no_utf8_still_gives_json(void **state)
{
    Ep__V1__GetGroupRequest request = EP__V1__GET_GROUP_REQUEST__INIT;
    json_t *json;

    (void)state;
    request.name = (char *)(uintptr_t) "a\xff" "b";
    json = ep_json_from_message(&request.base);
    assert_string_equal(json_string_value(json_object_get(json, "name")), "a\xef\xbf\xbd" "b");
    json_decref(json);
}

static void wrong_values_name_the_field(void **state)
{
    static const struct { const char *json, *part; } cases[] = {
        { "{\"spec\":{\"hidden\":\"abc\"}}", "spec.hidden: expected an unsigned integer, found \"abc\"" },
        { "{\"spec\":{\"hidden\":-1}}", "spec.hidden: expected an unsigned integer, found -1" },
        { "{\"spec\":{\"hidden\":4294967296}}", "spec.hidden: expected an unsigned integer of 32 bits" },
        { "{\"spec\":{\"hidden\":1.5}}", "spec.hidden: expected an unsigned integer, found 1.5" },
        { "{\"spec\":{\"hidden\":true}}", "spec.hidden: expected an unsigned integer, found true" },
        { "{\"spec\":{\"hidden\":{}}}", "spec.hidden: expected an unsigned integer, found an object" },
        { "{\"spec\":{\"arena_bytes\":\"18446744073709551616\"}}", "spec.arena_bytes: expected" },
        { "{\"spec\":{\"modes\":\"MODE_LL\"}}", "spec.modes: expected an array" },
        { "{\"spec\":{\"modes\":[\"MODE_LL\",\"LL\"]}}",
          "spec.modes[1]: expected one of MODE_UNSPECIFIED, MODE_LL, MODE_HT, found \"LL\"" },
        { "{\"spec\":{\"modes\":[null]}}", "spec.modes[0]: expected one of" },
        { "{\"spec\":{\"placement\":{\"homes\":[{\"expert\":1},{\"expert\":\"x\"}]}}}",
          "spec.placement.homes[1].expert: expected" },
        { "{\"spec\":{\"labels\":[]}}", "spec.labels: expected an object" },
        { "{\"spec\":{\"labels\":{\"zone\":7}}}", "spec.labels.zone: expected a string, found 7" },
        { "{\"spec\":[]}", "spec: expected an object, found an array" },
        { "{\"name\":7}", "name: expected a string, found 7" },
        { "{\"dry_run\":\"yes\"}", "dry_run: expected true or false, found \"yes\"" },
        { "{\"spec\":{\"hiden\":1}}", "spec.hiden: no such field; allowed: ranks, experts, hidden" },
        { "{\"dryRun\":true,\"dry_run\":true}", "given twice" },
        { "[]", "expected an object, found an array" },
        { "7", "expected an object, found 7" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refused(cases[i].json, &ep__v1__create_group_request__descriptor, cases[i].part);
    refused("{\"ticket\":\"A\"}", &ep__v1__claim_reply__descriptor, "ticket: expected bytes in base64");
    refused("{\"ticket\":\"A*==\"}", &ep__v1__claim_reply__descriptor, "ticket: expected bytes in base64");
    refused("{\"x\":1}", &ep__v1__list_groups_request__descriptor, "none is allowed here");
}

static void half_read_message_leaks_nothing(void **state)
{
    (void)state;
    /* Strings, arrays, maps and sub-messages are there when the error comes. */
    refused("{\"name\":\"x\",\"spec\":{\"modes\":[\"MODE_LL\"],\"labels\":{\"a\":\"b\",\"c\":1}}}",
            &ep__v1__create_group_request__descriptor, "spec.labels.c");
    refused("{\"nodes\":[{\"name\":\"a\",\"devices\":[{\"name\":\"d\"},{\"name\":\"e\",\"groups\":\"?\"}]}]}",
            &ep__v1__list_nodes_reply__descriptor, "nodes[0].devices[1].groups");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_present_and_unset_messages_null),
        cmocka_unit_test(spec_round_trips),
        cmocka_unit_test(integers_above_int64_are_strings),
        cmocka_unit_test(bytes_are_base64),
        cmocka_unit_test(bytes_take_the_url_alphabet_without_padding),
        cmocka_unit_test(oneof_is_absent_until_set),
        cmocka_unit_test(null_and_lower_camel_case_are_read),
        cmocka_unit_test(enum_without_a_name_is_its_number),
        cmocka_unit_test(string_that_is_no_utf8_still_gives_json),
        cmocka_unit_test(wrong_values_name_the_field),
        cmocka_unit_test(half_read_message_leaks_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
