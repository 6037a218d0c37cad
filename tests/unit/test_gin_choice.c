/* What a GIN communicator is set to, which interfaces it takes, which host it is on, and what it then uses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "transport.h"

/* ---- settings ------------------------------------------------------------------------------------------ */

static const char *const variables[] = { "EP_GIN_TRANSPORT",   "EP_GIN_INTERFACE",   "NCCL_SOCKET_IFNAME",
                                         "NCCL_SOCKET_FAMILY", "EP_GIN_CONNECTIONS", "EP_GIN_PIECE_KIB",
                                         "EP_GIN_STAGING_MIB", "EP_GIN_TIMEOUT_S",   "EP_GIN_SILENCE_S",
                                         "EP_GIN_SPIN_US",     "EP_GIN_MOVERS" };

static int clear(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        unsetenv(variables[i]);
    return 0;
}

static void expect_refused(const char *name, const char *value, const char *sentence)
{
    struct ep_gin_settings settings;
    struct ep_error error = EP_ERROR_INIT;

    setenv(name, value, 1);
    assert_int_equal(ep_gin_settings_read(&settings, &error), EP_INVALID_ARGUMENT);
    assert_string_equal(error.text, sentence);
    unsetenv(name);
}

static void defaults_are_what_is_documented(void **state)
{
    const bool few_cpus = sysconf(_SC_NPROCESSORS_ONLN) < EP_GIN_MANY_CPUS;
    struct ep_gin_settings s;

    (void)state;
    assert_int_equal(ep_gin_settings_read(&s, NULL), EP_OK);
    assert_int_equal(s.transport, EP_GIN_AUTO);
    assert_string_equal(s.interfaces, "");
    assert_int_equal(s.connections, 0);
    assert_int_equal(ep_gin_usual_connections(8), few_cpus ? 4 : 8);
    assert_int_equal(ep_gin_usual_connections(9), 4);
    assert_int_equal(s.movers, few_cpus ? 0 : 16);
    assert_int_equal(s.piece_bytes, 512 << 10);
    assert_int_equal(s.staging_bytes, 64 << 20);
    assert_int_equal(s.timeout_ns, 20000000000);
    assert_int_equal(s.silence_ms, 20000);
    assert_int_equal(s.spin_ns, few_cpus ? 50000 : 1000000);
}

static void settings_are_read(void **state)
{
    struct ep_gin_settings s;

    (void)state;
    setenv("EP_GIN_TRANSPORT", "tcp", 1);
    setenv("NCCL_SOCKET_IFNAME", "eth", 1);
    setenv("NCCL_SOCKET_FAMILY", "AF_INET6", 1);
    setenv("EP_GIN_CONNECTIONS", "16", 1);
    setenv("EP_GIN_MOVERS", "3", 1);
    setenv("EP_GIN_PIECE_KIB", "", 1); /* as if it were not set */
    assert_int_equal(ep_gin_settings_read(&s, NULL), EP_OK);
    assert_int_equal(s.transport, EP_GIN_TCP);
    assert_string_equal(s.interfaces, "eth");
    assert_int_equal(s.family, 6);
    assert_int_equal(s.connections, 16);
    assert_int_equal(s.movers, 3);
    assert_int_equal(s.piece_bytes, 512 << 10);
    setenv("EP_GIN_INTERFACE", "ib", 1);
    assert_int_equal(ep_gin_settings_read(&s, NULL), EP_OK);
    assert_string_equal(s.interfaces, "ib");
}

static void settings_that_make_no_sense_are_named(void **state)
{
    (void)state;
    expect_refused("EP_GIN_CONNECTIONS", "0", "EP_GIN_CONNECTIONS is \"0\": must be a number from 1 to 16");
    expect_refused("EP_GIN_CONNECTIONS", "4x", "EP_GIN_CONNECTIONS is \"4x\": must be a number from 1 to 16");
    expect_refused("EP_GIN_MOVERS", "33", "EP_GIN_MOVERS is \"33\": must be a number from 0 to 32");
    expect_refused("EP_GIN_PIECE_KIB", "-1", "EP_GIN_PIECE_KIB is \"-1\": must be a number from 16 to 4096");
    expect_refused("EP_GIN_TIMEOUT_S", "99999999999999999999",
                   "EP_GIN_TIMEOUT_S is \"99999999999999999999\": must be a number from 1 to 3600");
    expect_refused("NCCL_SOCKET_FAMILY", "ipx", "NCCL_SOCKET_FAMILY is \"ipx\": must be AF_INET or AF_INET6");
}

static void a_transport_that_is_not_there_is_named(void **state)
{
    struct ep_gin_settings s;
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    setenv("EP_GIN_TRANSPORT", "pigeon", 1);
    assert_int_equal(ep_gin_settings_read(&s, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "EP_GIN_TRANSPORT is \"pigeon\": must be auto, host"));
}

/* ---- interfaces -------------------------------------------------------------------------------------------- */

static void lists_are_read_as_nccl_reads_them(void **state)
{
    (void)state;
    assert_true(ep_gin_interface_listed("", "eth0"));
    assert_true(ep_gin_interface_listed("eth", "eth0"));
    assert_true(ep_gin_interface_listed("ib,eth", "eth0"));
    assert_false(ep_gin_interface_listed("ib,eth1", "eth0"));
    assert_true(ep_gin_interface_listed("=eth0", "eth0"));
    assert_false(ep_gin_interface_listed("=eth", "eth0"));
    assert_false(ep_gin_interface_listed("=eth0", "eth01"));
    assert_false(ep_gin_interface_listed("^eth", "eth0"));
    assert_true(ep_gin_interface_listed("^eth", "ib0"));
    assert_false(ep_gin_interface_listed("^=ib0,eth0", "eth0"));
    assert_true(ep_gin_interface_listed("^=ib0,eth0", "eth01"));
    assert_false(ep_gin_interface_listed(",", "eth0"));
}

/* ---- hosts ---------------------------------------------------------------------------------------------------- */

static void a_process_is_on_its_own_host(void **state)
{
    static const uint8_t zeros[16];
    struct ep_gin_host_id a, b;

    (void)state;
    assert_int_equal(ep_gin_host_id_read(&a, NULL), EP_OK);
    assert_int_equal(ep_gin_host_id_read(&b, NULL), EP_OK);
    assert_true(ep_gin_same_host(&a, &b));
    assert_memory_not_equal(a.boot, zeros, sizeof zeros);
    assert_true(a.network != 0);
    b.network++; /* another container, which sees other sockets */
    assert_false(ep_gin_same_host(&a, &b));
    b = a;
    b.boot[15] ^= 1;
    assert_false(ep_gin_same_host(&a, &b));
}

/* ---- transports ------------------------------------------------------------------------------------------------ */

enum {
    BOTH = 1 << EP_GIN_TCP | 1 << EP_GIN_HOST,
    TCP_ONLY = 1 << EP_GIN_TCP,
    ALL = BOTH | 1 << EP_GIN_VERBS
};

static struct ep_gin_hello side(uint32_t rank, uint32_t wanted, uint32_t able, uint8_t host)
{
    return (struct ep_gin_hello){ .rank = rank, .wanted = wanted, .able = able, .host = { .boot = { host } } };
}

/* Both sides must come to the same. */
static void expect_chosen(struct ep_gin_hello a, struct ep_gin_hello b, enum ep_gin_transport_id expected)
{
    enum ep_gin_transport_id chosen = EP_GIN_AUTO;

    assert_int_equal(ep_gin_transport_choose(&a, &b, &chosen, NULL), EP_OK);
    assert_int_equal(chosen, expected);
    assert_int_equal(ep_gin_transport_choose(&b, &a, &chosen, NULL), EP_OK);
    assert_int_equal(chosen, expected);
}

static void expect_none(struct ep_gin_hello a, struct ep_gin_hello b, const char *reason)
{
    enum ep_gin_transport_id chosen = EP_GIN_AUTO;
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(ep_gin_transport_choose(&b, &a, &chosen, NULL), EP_FAILED_PRECONDITION);
    assert_int_equal(ep_gin_transport_choose(&a, &b, &chosen, &error), EP_FAILED_PRECONDITION);
    assert_int_equal(chosen, EP_GIN_AUTO);
    assert_non_null(strstr(error.text, reason));
}

static void auto_takes_the_best_that_both_can(void **state)
{
    (void)state;
    expect_chosen(side(0, EP_GIN_AUTO, BOTH, 1), side(1, EP_GIN_AUTO, BOTH, 1), EP_GIN_HOST);
    expect_chosen(side(0, EP_GIN_AUTO, BOTH, 1), side(1, EP_GIN_AUTO, BOTH, 2), EP_GIN_TCP);
    expect_chosen(side(0, EP_GIN_AUTO, BOTH, 1), side(1, EP_GIN_AUTO, TCP_ONLY, 1), EP_GIN_TCP);
}

static void verbs_are_asked_for(void **state)
{
    (void)state;
    expect_chosen(side(0, EP_GIN_AUTO, ALL, 1), side(1, EP_GIN_AUTO, ALL, 2), EP_GIN_TCP);
    expect_chosen(side(0, EP_GIN_VERBS, ALL, 1), side(1, EP_GIN_AUTO, ALL, 2), EP_GIN_VERBS);
    expect_none(side(0, EP_GIN_VERBS, ALL, 1), side(1, EP_GIN_AUTO, BOTH, 2), "the other cannot");
}

static void a_named_one_is_taken_or_refused(void **state)
{
    (void)state;
    expect_chosen(side(0, EP_GIN_TCP, BOTH, 1), side(1, EP_GIN_AUTO, BOTH, 1), EP_GIN_TCP);
    expect_chosen(side(0, EP_GIN_HOST, BOTH, 1), side(1, EP_GIN_HOST, BOTH, 1), EP_GIN_HOST);
    expect_none(side(0, EP_GIN_HOST, BOTH, 1), side(1, EP_GIN_AUTO, BOTH, 2), "not on one host");
    expect_none(side(0, EP_GIN_HOST, BOTH, 1), side(1, EP_GIN_AUTO, TCP_ONLY, 1), "the other cannot");
    expect_none(side(0, EP_GIN_HOST, TCP_ONLY, 1), side(1, EP_GIN_HOST, BOTH, 1), "this rank cannot");
    expect_none(side(0, EP_GIN_HOST, BOTH, 1), side(1, EP_GIN_TCP, BOTH, 1), "another at rank 1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(defaults_are_what_is_documented, clear),
        cmocka_unit_test_setup(settings_are_read, clear),
        cmocka_unit_test_setup(settings_that_make_no_sense_are_named, clear),
        cmocka_unit_test_setup(a_transport_that_is_not_there_is_named, clear),
        cmocka_unit_test(lists_are_read_as_nccl_reads_them),
        cmocka_unit_test(a_process_is_on_its_own_host),
        cmocka_unit_test(auto_takes_the_best_that_both_can),
        cmocka_unit_test(verbs_are_asked_for),
        cmocka_unit_test(a_named_one_is_taken_or_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
