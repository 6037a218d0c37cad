/* What doctor finds out about GPUs, on a cuda backend without any. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_fixture.h"
#include "doctor.h"

static struct ep_report report;

static int setup(void **state)
{
    (void)state;
    cuda_fixture_reset();
    report = (struct ep_report){ .findings = NULL };
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    free(report.findings);
    return 0;
}

/* The last finding of a check. */
static const struct ep_finding *found(const char *check)
{
    for (size_t i = report.n; i-- > 0;)
        if (strcmp(report.findings[i].check, check) == 0)
            return &report.findings[i];
    fail_msg("nothing was found about %s", check);
    return NULL;
}

static void says(const char *check, enum ep_finding_level level, const char *text)
{
    const struct ep_finding *finding = found(check);

    assert_int_equal(finding->level, level);
    if (!strstr(finding->text, text))
        fail_msg("\"%s\" is not in \"%s\"", text, finding->text);
    assert_true(level == EP_FINDING_OK || (finding->remedy && *finding->remedy));
}

static void look(size_t nodes)
{
    ep_doctor_cuda(&report, cuda_fixture_api(), nodes);
}

static void all_is_well(void **state)
{
    (void)state;
    look(CUDA_FIXTURE_DEVICES);
    says("gpu", EP_FINDING_OK, "2 (Fixture, sm_90), 32 GiB free");
    says("cuda", EP_FINDING_OK, "the driver is for CUDA 13.0");
    says("p2p", EP_FINDING_OK, "each of 2 GPUs reaches the memory of all others");
    says("mps", EP_FINDING_OK, "between kernels of a worker switch the GPU to its process and back");
    assert_true(report.has_gpu);
}

static void gpus_that_this_process_does_not_see(void **state)
{
    (void)state;
    look(8);
    says("gpu", EP_FINDING_WARN, "the machine has more");
}

static void a_gpu_that_does_not_answer(void **state)
{
    (void)state;
    cuda_fixture_fail("device_info", 1);
    look(CUDA_FIXTURE_DEVICES);
    says("cuda", EP_FINDING_FAIL, "device_info failed");
    assert_int_equal(report.n, 1); /* and nothing is said of what is not known */
}

static void with_mps(uint32_t device, struct ep_cuda_device *info)
{
    (void)device;
    info->mps = true;
}

static void mps_is_told_with_what_it_means(void **state)
{
    (void)state;
    cuda_fixture.on_info = with_mps;
    look(CUDA_FIXTURE_DEVICES);
    says("mps", EP_FINDING_OK, "on: processes that share a GPU run at once");
}

/* The directory of the tests' own MPS, where nobody is. */
static void a_pipe_without_a_server(void **state)
{
    char folder[] = "/tmp/ep-doctor-XXXXXX", path[64];
    FILE *pipe;

    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/control", folder);
    pipe = fopen(path, "w");
    assert_non_null(pipe);
    fclose(pipe);
    setenv("CUDA_MPS_PIPE_DIRECTORY", folder, 1);
    look(CUDA_FIXTURE_DEVICES);
    says("mps", EP_FINDING_WARN, path);
    unsetenv("CUDA_MPS_PIPE_DIRECTORY");
    remove(path);
    remove(folder);
}

static void one_way(uint32_t device, struct ep_cuda_device *info)
{
    if (device == 1)
        info->peers = 1u << 1;
}

static void pairs_that_do_not_reach_each_other_are_named(void **state)
{
    (void)state;
    cuda_fixture.on_info = one_way; /* loads and stores are wanted both ways */
    look(CUDA_FIXTURE_DEVICES);
    says("p2p", EP_FINDING_WARN, "1 of 1 pairs of GPUs do not reach each other's memory: 0-1");
}

static void old_ones(uint32_t device, struct ep_cuda_device *info)
{
    if (device == 0)
        info->shareable = false;
    else
        info->major = 8;
}

static void gpus_that_do_not_do_are_named(void **state)
{
    (void)state;
    cuda_fixture.on_info = old_ones;
    look(CUDA_FIXTURE_DEVICES);
    says("gpu", EP_FINDING_WARN, "GPU-fixture-1 (Fixture) is sm_80");
    assert_non_null(strstr(report.findings[1].text, "GPU-fixture-0 (Fixture): its memory cannot be shared"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(all_is_well),
        TEST(gpus_that_this_process_does_not_see),
        TEST(a_gpu_that_does_not_answer),
        TEST(mps_is_told_with_what_it_means),
        TEST(a_pipe_without_a_server),
        TEST(pairs_that_do_not_reach_each_other_are_named),
        TEST(gpus_that_do_not_do_are_named),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
