/* ep_device_check: what groups the kernels can do, to the last token and expert. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "device_state.h"

static struct ep_limits good(void)
{
    return (struct ep_limits){ .ranks = 8, .experts = 256, .local_experts = 32, .top_k = 8, .hidden = 7168,
                               .modes = 1u << EP_MODE_LL, .dtypes = 1u << EP_BF16, .ll_max_tokens = 128,
                               .ll_banks = 2 };
}

static void refused(const struct ep_limits *limits, const char *text)
{
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(ep_device_check(limits, &error), EP_INVALID_ARGUMENT);
    if (!strstr(error.text, text))
        fail_msg("\"%s\" is not in \"%s\"", text, error.text);
}

static void usual_groups_are_good(void **state)
{
    struct ep_limits l = good();

    (void)state;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l.ll_max_tokens = 1024;
    l.top_k = 16;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l = good();
    l.ranks = EP_DEVICE_MAX_RANKS;
    l.local_experts = 8;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
}

static void ranks_are_those_of_one_nvlink_domain(void **state)
{
    struct ep_limits l = good();

    (void)state;
    l.ranks = EP_DEVICE_MAX_RANKS + 1;
    refused(&l, "ranks is 33: the cuda backend has at most 32 in a group");
}

static void modes_are_ll(void **state)
{
    struct ep_limits l = good();

    (void)state;
    l.modes = 1u << EP_MODE_HT;
    refused(&l, "modes: the cuda backend has ll only");
}

/* The number that the refusal names is good, and the next one is not. */
static void tokens_are_bounded_by_shared_memory(void **state)
{
    struct ep_limits l = good();
    struct ep_error error = EP_ERROR_INIT;
    const uint32_t most = (EP_DEVICE_MAX_SHARED_BYTES / 4 - 2 * l.local_experts - 1) / l.top_k;
    char text[64];

    (void)state;
    l.ll_max_tokens = 65536;
    snprintf(text, sizeof text, "ll_max_tokens is 65536: with top_k 8 must be at most %u", most);
    refused(&l, text);
    l.ll_max_tokens = most;
    assert_int_equal(ep_device_check(&l, &error), EP_OK);
    assert_true(ep_device_shared_bytes(&l) <= EP_DEVICE_MAX_SHARED_BYTES);
    l.ll_max_tokens = most + 1;
    refused(&l, "ll_max_tokens is");
}

/* Fewer tokens would not help, so they are not what is named. */
static void experts_are_bounded_too(void **state)
{
    struct ep_limits l = good();

    (void)state;
    l.experts = l.local_experts = 8191;
    l.ranks = 1;
    assert_int_equal(ep_device_check(&l, NULL), EP_OK);
    l.experts = l.local_experts = 8192;
    refused(&l, "experts is 8192, up to 8192 on a rank, with 1 ranks");
    l.experts = 65536; /* all of them on one of many ranks */
    l.local_experts = 65536;
    l.ranks = 32;
    refused(&l, "experts is 65536");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(usual_groups_are_good),
        cmocka_unit_test(ranks_are_those_of_one_nvlink_domain),
        cmocka_unit_test(modes_are_ll),
        cmocka_unit_test(tokens_are_bounded_by_shared_memory),
        cmocka_unit_test(experts_are_bounded_too),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
