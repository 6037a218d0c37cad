/* The driver: how it is started, and what its results mean.  It is played by this file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#ifndef EP_WITH_CUDA
int main(void)
{
    printf("no CUDA compiler: kernels/cuda is not built\n");
    return 77;
}
#else

#include "cuda_private.h"

static CUresult init_result;
static int inits, told;
static struct ep_error why;

/* ---- what is called --------------------------------------------------------------------- */

CUresult cuInit(unsigned int flags)
{
    (void)flags;
    inits++;
    return init_result;
}

CUresult cuDeviceGetCount(int *n)
{
    *n = 2;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult result, const char **name)
{
    *name = result == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : NULL;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult result, const char **text)
{
    *text = result == CUDA_ERROR_LAUNCH_FAILED ? "unspecified launch failure" : NULL;
    return CUDA_SUCCESS;
}

static void tell(const struct ep_error *error, void *user)
{
    assert_ptr_equal(user, &told);
    told++;
    why = *error;
}

/* ---- results ------------------------------------------------------------------------------ */

static void a_device_is_lost_for_good_and_that_is_told_once(void **state)
{
    static const CUresult lost[] = { CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_ECC_UNCORRECTABLE,
                                     CUDA_ERROR_NVLINK_UNCORRECTABLE, CUDA_ERROR_MPS_CLIENT_TERMINATED };
    static const CUresult others[] = { CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_NOT_READY,
                                       CUDA_ERROR_MPS_SERVER_NOT_READY, CUDA_ERROR_UNKNOWN };
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    ep_cuda_on_lost(tell, &told);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        assert_int_not_equal(ep_cuda_fail(&error, others[i], "a call"), EP_DEVICE_LOST);
    assert_int_equal(told, 0);
    assert_int_equal(ep_cuda_launched(&error, 1, 0), EP_OK);
    assert_int_equal(ep_cuda_launched(&error, 1, CUDA_ERROR_LAUNCH_FAILED), EP_DEVICE_LOST);
    assert_string_equal(error.text, "launch on device 1: unspecified launch failure (CUDA_ERROR_LAUNCH_FAILED 719)");
    assert_int_equal(told, 1);
    assert_string_equal(why.text, error.text);
    for (size_t i = 0; i < sizeof lost / sizeof *lost; i++)
        assert_int_equal(ep_cuda_fail(NULL, lost[i], "a call"), EP_DEVICE_LOST);
    assert_int_equal(told, 1);
}

/* ---- the start ------------------------------------------------------------------------------ */

/* An MPS server that recovers takes nobody on for a while. */
static void a_driver_that_does_not_start_is_tried_again(void **state)
{
    struct ep_error error = EP_ERROR_INIT;
    uint32_t n = 0;

    (void)state;
    init_result = CUDA_ERROR_MPS_SERVER_NOT_READY;
    assert_int_equal(ep_cuda_device_count(&n, &error), EP_UNAVAILABLE);
    assert_non_null(strstr(error.text, "MPS server takes no new one on"));
    init_result = CUDA_SUCCESS;
    assert_int_equal(ep_cuda_device_count(&n, &error), EP_OK);
    assert_int_equal(n, 2);
    assert_int_equal(ep_cuda_device_count(&n, &error), EP_OK);
    assert_int_equal(inits, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_device_is_lost_for_good_and_that_is_told_once),
        cmocka_unit_test(a_driver_that_does_not_start_is_tried_again),
    };

    return cmocka_run_group_tests_name("cuda_driver", tests, NULL, NULL);
}

#endif
