/* What a node is and has: name, devices, memory; and its windows, which are sealed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ep_log.h"
#include "ep_node.h"

#define MIB (1ull << 20)

static int setup(void **state)
{
    const struct ep_node_options options = {
        .name = "n1", .host_devices = 2, .memory_budget = 10 * MIB, .socket = "/run/s", .admin_address = "h:1"
    };

    ep_log_configure(EP_LOG_OFF, EP_LOG_LOGFMT);
    assert_int_equal(ep_node_open(&options, (struct ep_node **)state, NULL), EP_OK);
    return 0;
}

static int teardown(void **state)
{
    ep_node_close(*state);
    return 0;
}

static void the_inventory_is_filled_in(void **state)
{
    Ep__V1__NodeInfo info;

    ep_node_info(*state, &info);
    assert_string_equal(info.name, "n1");
    assert_int_equal(info.state, EP__V1__NODE_STATE__NODE_STATE_READY);
    assert_int_equal(info.n_devices, 2);
    assert_string_equal(info.devices[1]->name, "host1");
    assert_int_equal(info.memory_budget_bytes, 10 * MIB);
    assert_string_equal(info.socket, "/run/s");
    assert_string_equal(info.admin_address, "h:1");
    assert_true(info.cpus >= 1);
    assert_int_equal(info.pid, getpid());
    assert_non_null(strstr(info.kernel, "Linux "));
    assert_string_equal(info.version->backends[0], "host");
    assert_true(strlen(info.version->version) > 0);
    assert_true(info.version->window_version > 0 && info.version->attach_version > 0);
    ep_node_info_clear(&info);
    assert_string_equal(ep_node_device_name(*state, 0), "host0");
    assert_string_equal(ep_node_device_name(*state, 2), "?");
}

static void without_options_the_host_decides(void **state)
{
    const struct ep_node_options options = { .host_devices = 1 };
    char name[256] = "";
    struct ep_node *node;

    (void)state;
    gethostname(name, sizeof name - 1);
    assert_int_equal(ep_node_open(&options, &node, NULL), EP_OK);
    assert_string_equal(ep_node_name(node), name);
    assert_true(ep_node_memory_left(node) > 0);
    ep_node_close(node);
}

static void impossible_device_counts_are_refused(void **state)
{
    struct ep_node_options options = { .host_devices = 0 };
    struct ep_error error = EP_ERROR_INIT;
    struct ep_node *node;

    (void)state;
    assert_int_equal(ep_node_open(&options, &node, &error), EP_INVALID_ARGUMENT);
    assert_string_equal(error.text, "host_devices is 0: must be 1..1024");
    options.host_devices = 1025;
    assert_int_equal(ep_node_open(&options, &node, &error), EP_INVALID_ARGUMENT);
}

static void memory_is_accounted_and_refused_by_name(void **state)
{
    struct ep_node *node = *state;
    struct ep_error error = EP_ERROR_INIT;
    Ep__V1__NodeInfo info;
    struct ep_node_window *window;

    assert_int_equal(ep_node_reserve(node, 0, 6 * MIB, NULL), EP_OK);
    assert_int_equal(ep_node_window_create(node, 0, "moe/1/0", 6 * MIB, &window, NULL), EP_OK);
    assert_int_equal(ep_node_memory_left(node), 4 * MIB);
    assert_int_equal(ep_node_reserve(node, 1, 5 * MIB, &error), EP_RESOURCE_EXHAUSTED);
    assert_string_equal(error.text, "5.0 MiB (5242880 bytes) asked, 4.0 MiB (4194304 bytes) left of 10.0 MiB "
                                    "(10485760 bytes) on node n1; in use: group moe 6.0 MiB");
    assert_int_equal(ep_node_reserve(node, 2, 1, &error), EP_INVALID_ARGUMENT);
    ep_node_info(node, &info);
    assert_int_equal(info.devices[0]->used_bytes, 6 * MIB);
    assert_int_equal(info.devices[1]->used_bytes, 0);
    assert_int_equal(info.memory_used_bytes, 6 * MIB);
    ep_node_info_clear(&info);
    ep_node_window_destroy(window);
    ep_node_release(node, 0, 6 * MIB);
    assert_int_equal(ep_node_memory_left(node), 10 * MIB);
}

static void a_window_is_zeroed_shared_and_sealed(void **state)
{
    struct ep_node *node = *state;
    struct ep_node_window *window;
    uint8_t *base, *other;
    struct stat st;
    int fd;

    assert_int_equal(ep_node_window_create(node, 0, "moe/1/0", MIB, &window, NULL), EP_OK);
    assert_int_equal(ep_node_window_export(window, &fd, NULL), EP_OK);
    base = ep_node_window_base(window);
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, MIB);
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    assert_int_equal(base[0] | base[MIB - 1], 0);
    other = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(other, MAP_FAILED);
    other[17] = 42;
    assert_int_equal(base[17], 42);
    assert_int_equal(ftruncate(fd, MIB / 2), -1); /* a worker cannot make the server fault */
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(fd, 2 * MIB), -1);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1); /* nor lock out the next one */
    munmap(other, MIB);
    close(fd);
    ep_node_window_destroy(window);
}

static void a_window_that_cannot_be_names_its_bytes(void **state)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_node_window *window;

    assert_int_equal(ep_node_window_create(*state, 0, "moe/1/0", 1ull << 62, &window, &error),
                     EP_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(error.text, "window moe/1/0: cannot "));
    assert_non_null(strstr(error.text, "(4611686018427387904 bytes)"));
}

static void cordon_and_stopping_show(void **state)
{
    struct ep_node *node = *state;
    Ep__V1__NodeInfo info;
    const char *why;

    assert_false(ep_node_cordoned(node, NULL));
    ep_node_cordon(node, true, "new disk");
    assert_true(ep_node_cordoned(node, &why));
    assert_string_equal(why, "new disk");
    ep_node_info(node, &info);
    assert_int_equal(info.state, EP__V1__NODE_STATE__NODE_STATE_CORDONED);
    assert_string_equal(info.reason, "new disk");
    ep_node_info_clear(&info);
    ep_node_cordon(node, false, NULL);
    assert_false(ep_node_cordoned(node, NULL));
    ep_node_set_stopping(node);
    assert_true(ep_node_cordoned(node, &why));
    assert_string_equal(why, "the server is stopping");
    ep_node_info(node, &info);
    assert_int_equal(info.state, EP__V1__NODE_STATE__NODE_STATE_STOPPING);
    ep_node_info_clear(&info);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_inventory_is_filled_in),
        TEST(without_options_the_host_decides),
        TEST(impossible_device_counts_are_refused),
        TEST(memory_is_accounted_and_refused_by_name),
        TEST(a_window_is_zeroed_shared_and_sealed),
        TEST(a_window_that_cannot_be_names_its_bytes),
        TEST(cordon_and_stopping_show),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
