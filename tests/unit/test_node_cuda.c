/* A node with GPUs: which backend it takes, what it says of them, memory of each, MPS. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_fixture.h"
#include "ep_log.h"
#include "ep_node.h"

#define MIB (1ull << 20)

static int setup(void **state)
{
    (void)state;
    ep_log_configure(EP_LOG_OFF, EP_LOG_LOGFMT);
    cuda_fixture_reset();
    return 0;
}

static struct ep_node_options options(enum ep_node_choice backend)
{
    return (struct ep_node_options){ .name = "n1", .backend = backend, .cuda = cuda_fixture_api(),
                                     .host_devices = 3 };
}

static struct ep_node *open_node(const struct ep_node_options *o)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_node *node = NULL;

    assert_int_equal(ep_node_open(o, &node, &error), EP_OK);
    assert_string_equal(error.text, "");
    return node;
}

static void refused(const struct ep_node_options *o, ep_status status, const char *text)
{
    struct ep_error error = EP_ERROR_INIT;
    struct ep_node *node;

    assert_int_equal(ep_node_open(o, &node, &error), status);
    if (!strstr(error.text, text))
        fail_msg("\"%s\" does not say \"%s\"", error.text, text);
}

/* ---- what devices can be like -------------------------------------------------------- */

static void second_is_not_shareable(uint32_t device, struct ep_cuda_device *info)
{
    info->shareable = device != 1;
}

static void first_is_not_shareable(uint32_t device, struct ep_cuda_device *info)
{
    info->shareable = device != 0;
}

static void none_is_shareable(uint32_t device, struct ep_cuda_device *info)
{
    (void)device;
    info->shareable = false;
}

static void with_mps(uint32_t device, struct ep_cuda_device *info)
{
    (void)device;
    info->mps = true;
}

static void small_and_uneven(uint32_t device, struct ep_cuda_device *info)
{
    info->memory_free = (device + 1) * 100 * MIB;
}

/* ---- the backend ----------------------------------------------------------------------- */

static void auto_takes_the_gpus(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);
    struct ep_node *node = open_node(&o);

    (void)state;
    assert_int_equal(ep_node_backend(node), EP__V1__BACKEND__BACKEND_CUDA);
    assert_int_equal(ep_node_devices(node), CUDA_FIXTURE_DEVICES);
    assert_string_equal(ep_node_device_name(node, 1), "GPU-fixture-1");
    assert_memory_equal(ep_node_device_uuid(node, 1), cuda_fixture_uuid(1), EP_CUDA_UUID_BYTES);
    ep_node_close(node);
}

static void a_server_takes_the_gpus_that_it_is_given(void **state)
{
    static const char *const bad[] = { "2", "0,0", "0,", ",1", "a", "-1", "0;1", " 0", "99999999999999999999" };
    struct ep_node_options o = options(EP_NODE_AUTO);
    struct ep_node *node;

    (void)state;
    assert_int_equal(CUDA_FIXTURE_DEVICES, 2);
    o.gpus = "1";
    node = open_node(&o);
    assert_int_equal(ep_node_devices(node), 1);
    assert_string_equal(ep_node_device_name(node, 0), "GPU-fixture-1");
    ep_node_close(node);
    o.gpus = "1,0";
    node = open_node(&o);
    assert_int_equal(ep_node_devices(node), 2);
    ep_node_close(node);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        o.gpus = bad[i];
        refused(&o, EP_INVALID_ARGUMENT, "must be numbers of GPUs that this process sees, from 0 to 1, each once");
    }
}

static void host_leaves_them_alone(void **state)
{
    struct ep_node_options o = options(EP_NODE_HOST);
    struct ep_node *node = open_node(&o);

    (void)state;
    assert_int_equal(ep_node_backend(node), EP__V1__BACKEND__BACKEND_HOST);
    assert_int_equal(ep_node_devices(node), 3);
    assert_null(ep_node_device_uuid(node, 0));
    assert_null(ep_node_device_memory_left(node));
    ep_node_close(node);
}

static void auto_is_the_host_when_no_gpu_will_do(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);
    struct ep_node *node;

    (void)state;
    cuda_fixture.on_info = none_is_shareable;
    node = open_node(&o);
    assert_int_equal(ep_node_backend(node), EP__V1__BACKEND__BACKEND_HOST);
    assert_int_equal(ep_node_devices(node), 3);
    ep_node_close(node);
}

/* A server that is started again while MPS recovers, or before the fabric is ready, would be one without GPUs for good. */
static void auto_is_not_the_host_when_gpus_fail(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);

    (void)state;
    cuda_fixture_fail("device_count", 0);
    refused(&o, EP_INTERNAL, "backend is auto, and there are GPUs: device_count failed because the test says so");
    cuda_fixture_fail("device_info", 1);
    refused(&o, EP_INTERNAL, "backend is auto, and there are GPUs: device_info failed because the test says so");
}

static void keep_why(const struct ep_error *why, void *user)
{
    struct ep_error *kept = user;

    assert_int_equal(kept->status, EP_OK); /* once */
    *kept = *why;
}

static void who_has_a_lost_gpu_is_told_once(void **state)
{
    struct ep_error why = EP_ERROR_INIT, error = EP_ERROR_INIT;
    struct ep_node_options o = options(EP_NODE_AUTO);
    struct ep_node_window *window;
    struct ep_node *node;

    (void)state;
    o.on_lost = keep_why;
    o.user = &why;
    node = open_node(&o);
    __atomic_store_n(&cuda_fixture.lost, 1u << 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; i++)
        assert_int_equal(ep_node_window_create(node, 1, "moe/1", 4096, &window, &error), EP_DEVICE_LOST);
    assert_int_equal(why.status, EP_DEVICE_LOST);
    assert_non_null(strstr(why.text, "fallen off the bus"));
    ep_node_close(node);
}

static void cuda_that_cannot_be_is_refused_with_the_reason(void **state)
{
    struct ep_node_options o = options(EP_NODE_CUDA);

    (void)state;
    cuda_fixture.on_info = none_is_shareable;
    refused(&o, EP_UNAVAILABLE, "backend is cuda: of 2 GPUs none has memory that can be shared with workers");
    cuda_fixture_fail("device_info", 0);
    refused(&o, EP_INTERNAL, "backend is cuda: device_info failed because the test says so");
}

static void a_gpu_whose_memory_cannot_be_shared_is_left_out(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);
    struct ep_node *node;

    (void)state;
    cuda_fixture.on_info = second_is_not_shareable;
    node = open_node(&o);
    assert_int_equal(ep_node_devices(node), 1);
    assert_string_equal(ep_node_device_name(node, 0), "GPU-fixture-0");
    ep_node_close(node);
}

/* The node's numbers are not those of the process then. */
static void windows_go_to_the_device_that_is_meant(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);
    struct ep_node_window *window;
    struct ep_error error = EP_ERROR_INIT;
    struct ep_node *node;

    (void)state;
    cuda_fixture.on_info = first_is_not_shareable;
    node = open_node(&o);
    __atomic_store_n(&cuda_fixture.lost, 1u << 1, __ATOMIC_RELAXED);
    assert_int_equal(ep_node_window_create(node, 0, "moe/1/0", MIB, &window, &error), EP_DEVICE_LOST);
    assert_string_equal(error.text,
                        "window moe/1/0: 1.0 MiB (1048576 bytes) on GPU-fixture-1: device 1 has fallen off the bus");
    ep_node_close(node);
}

/* ---- inventory ------------------------------------------------------------------------- */

static void the_inventory_shows_gpus(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);
    struct ep_node *node = open_node(&o);
    Ep__V1__NodeInfo info;

    (void)state;
    ep_node_info(node, &info);
    assert_int_equal(info.n_devices, 2);
    assert_int_equal(info.devices[0]->backend, EP__V1__BACKEND__BACKEND_CUDA);
    assert_string_equal(info.devices[0]->name, "GPU-fixture-0");
    assert_string_equal(info.devices[0]->detail,
                        "Fixture, 16.0 GiB, 8 SMs, sm_90, 0000:00:00.0, reaches 1 of 1 other GPUs, over NVLink or PCIe is not known, no MPS");
    assert_int_equal(info.devices[0]->memory_bytes, 1ull << 33); /* half of what is free */
    assert_int_equal(info.memory_budget_bytes, 1ull << 34);
    assert_int_equal(info.version->n_backends, 2);
    assert_string_equal(info.version->backends[1], "cuda");
    assert_non_null(strstr(info.nccl, "NCCL"));
    ep_node_info_clear(&info);
    ep_node_close(node);
}

/* ---- memory ---------------------------------------------------------------------------- */

static void each_gpu_has_a_budget_of_its_own(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);
    struct ep_error error = EP_ERROR_INIT;
    struct ep_node_window *window;
    struct ep_node *node;

    (void)state;
    cuda_fixture.on_info = small_and_uneven;
    node = open_node(&o);
    assert_int_equal(ep_node_memory_left(node), 150 * MIB);
    assert_int_equal(ep_node_granule(node), 2 * MIB);
    assert_int_equal(ep_node_reserve(node, 0, 40 * MIB, NULL), EP_OK);
    assert_int_equal(ep_node_window_create(node, 0, "moe/1/0", 40 * MIB, &window, NULL), EP_OK);
    assert_int_equal(ep_node_device_memory_left(node)[0], 10 * MIB);
    assert_int_equal(ep_node_device_memory_left(node)[1], 100 * MIB);
    assert_int_equal(ep_node_reserve(node, 0, 20 * MIB, &error), EP_RESOURCE_EXHAUSTED);
    assert_string_equal(error.text,
                        "20.0 MiB (20971520 bytes) asked, 10.0 MiB (10485760 bytes) left of 50.0 MiB (52428800 "
                        "bytes) on GPU-fixture-0 of node n1; in use: group moe 40.0 MiB");
    assert_int_equal(ep_node_reserve(node, 1, 101 * MIB, &error), EP_RESOURCE_EXHAUSTED);
    assert_null(strstr(error.text, "in use")); /* nobody has any on that one */
    assert_int_equal(ep_node_reserve(node, 1, 100 * MIB, NULL), EP_OK);
    ep_node_release(node, 1, 100 * MIB);
    ep_node_window_destroy(window);
    ep_node_release(node, 0, 40 * MIB);
    assert_int_equal(ep_node_memory_left(node), 150 * MIB);
    assert_int_equal(cuda_fixture.memories, 0);
    ep_node_close(node);
}

static void an_asked_budget_is_for_each_gpu(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);
    struct ep_node *node;

    (void)state;
    o.memory_budget = 30 * MIB;
    node = open_node(&o);
    assert_int_equal(ep_node_device_memory_left(node)[0], 30 * MIB);
    assert_int_equal(ep_node_memory_left(node), 60 * MIB);
    ep_node_close(node);
}

static void a_window_is_exported_when_it_is_asked_for(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);
    struct ep_node *node = open_node(&o);
    struct ep_node_window *window;
    uint8_t *mine, *theirs;
    int fd[2];

    (void)state;
    assert_int_equal(ep_node_window_create(node, 1, "moe/1/0", MIB, &window, NULL), EP_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ep_node_window_export(window, &fd[i], NULL), EP_OK);
        assert_int_equal(fcntl(fd[i], F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    }
    assert_int_not_equal(fd[0], fd[1]);
    mine = cuda_fixture_host(ep_node_window_base(window));
    theirs = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd[1], 0);
    assert_ptr_not_equal(theirs, MAP_FAILED);
    mine[9] = 9;
    assert_int_equal(theirs[9], 9);
    munmap(theirs, MIB);
    close(fd[0]);
    close(fd[1]);
    ep_node_window_destroy(window);
    ep_node_close(node);
}

/* Of others, who made it in this process. */
static void memory_is_exported_by_an_address_in_it(void **state)
{
    const struct ep_cuda_api *api = cuda_fixture_api();
    struct ep_cuda_memory *memory, *import;
    struct ep_error error = EP_ERROR_INIT;
    uint64_t offset, bytes;
    uint8_t *at;
    int fd;

    (void)state;
    assert_int_equal(api->memory_create(1, MIB, &memory, &error), EP_OK);
    at = (uint8_t *)api->memory_at(memory) + 4711;
    assert_int_equal(api->memory_export_at(1, at, &fd, &offset, &bytes, &error), EP_OK);
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    assert_int_equal(offset, 4711);
    assert_int_equal(bytes, MIB);
    assert_int_equal(api->memory_import(1, fd, bytes, &import, &error), EP_OK);
    close(fd);
    *(uint8_t *)cuda_fixture_host(at) = 9;
    api->memory_destroy(memory); /* what was imported stays */
    assert_int_equal(((uint8_t *)cuda_fixture_host(api->memory_at(import)))[4711], 9);
    api->memory_destroy(import);
    assert_int_equal(api->memory_export_at(1, &error, &fd, &offset, &bytes, &error), EP_INVALID_ARGUMENT);
    assert_int_equal(cuda_fixture.memories, 0);
}

/* ---- MPS ------------------------------------------------------------------------------- */

static void mps_is_required_or_forbidden(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);

    (void)state;
    o.mps = EP_NODE_MPS_REQUIRE;
    refused(&o, EP_FAILED_PRECONDITION, "mps is require: there is no MPS server for GPU-fixture-0");
    o.mps = EP_NODE_MPS_OFF;
    ep_node_close(open_node(&o));
    cuda_fixture.on_info = with_mps;
    refused(&o, EP_FAILED_PRECONDITION, "mps is off: the work of this server on GPU-fixture-0");
    o.mps = EP_NODE_MPS_REQUIRE;
    ep_node_close(open_node(&o));
    o.mps = EP_NODE_MPS_AUTO;
    ep_node_close(open_node(&o));
}

static void check_mps_text(bool polls, const char *text)
{
    struct ep_node_options o = options(EP_NODE_CUDA);
    struct ep_node *node;
    Ep__V1__NodeInfo info;
    const char *detail;

    o.polls = polls;
    node = open_node(&o);
    ep_node_info(node, &info);
    detail = info.devices[0]->detail;
    assert_string_equal(detail + strlen(detail) - strlen(text), text);
    ep_node_info_clear(&info);
    ep_node_close(node);
}

static void the_inventory_shows_mps(void **state)
{
    (void)state;
    check_mps_text(true, ", no MPS");
    cuda_fixture.on_info = with_mps;
    check_mps_text(false, ", MPS");
    check_mps_text(true, ", MPS, doorbells are polled");
}

/* Falling back to the host would hide that it is not there. */
static void mps_is_required_of_a_node_without_gpus_too(void **state)
{
    struct ep_node_options o = options(EP_NODE_AUTO);

    (void)state;
    cuda_fixture.on_info = none_is_shareable;
    o.mps = EP_NODE_MPS_REQUIRE;
    refused(&o, EP_FAILED_PRECONDITION, "mps is require: this node's backend is host");
}

#define TEST(name) cmocka_unit_test_setup(name, setup)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(auto_takes_the_gpus),
        TEST(a_server_takes_the_gpus_that_it_is_given),
        TEST(host_leaves_them_alone),
        TEST(auto_is_the_host_when_no_gpu_will_do),
        TEST(auto_is_not_the_host_when_gpus_fail),
        TEST(who_has_a_lost_gpu_is_told_once),
        TEST(cuda_that_cannot_be_is_refused_with_the_reason),
        TEST(a_gpu_whose_memory_cannot_be_shared_is_left_out),
        TEST(windows_go_to_the_device_that_is_meant),
        TEST(the_inventory_shows_gpus),
        TEST(each_gpu_has_a_budget_of_its_own),
        TEST(an_asked_budget_is_for_each_gpu),
        TEST(a_window_is_exported_when_it_is_asked_for),
        TEST(memory_is_exported_by_an_address_in_it),
        TEST(mps_is_required_or_forbidden),
        TEST(the_inventory_shows_mps),
        TEST(mps_is_required_of_a_node_without_gpus_too),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
