/*
 * What a node knows of its GPUs from NVML, with a double of it.  Which one a process finds is settled when it starts, by
 * LD_LIBRARY_PATH, so each case is this program once more: it opens a node of two GPUs and says what is known of them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_fixture.h"
#include "ep_log.h"
#include "ep_node.h"

#define NVML EP_UNIT_DIR "/nvml"
#define OLD  EP_UNIT_DIR "/nvml_old"

/* ---- the other program ------------------------------------------------------------------- */

static void one_way(uint32_t device, struct ep_cuda_device *info)
{
    if (device == 1)
        info->peers = 1u << 1;
}

static void say_number(bool known, uint32_t n)
{
    if (known)
        printf("%u ", n);
    else
        printf("? ");
}

/* Of each GPU a line: NVLinks, peers over NVLink, over PCIe, the fabric's state, and the sentence. */
static void say(const Ep__V1__Device *device)
{
    say_number(device->_nvlinks_case == EP__V1__DEVICE___NVLINKS_NVLINKS, device->nvlinks);
    say_number(device->_nvlink_peers_case == EP__V1__DEVICE___NVLINK_PEERS_NVLINK_PEERS,
               device->nvlink_peers);
    say_number(device->_pcie_peers_case == EP__V1__DEVICE___PCIE_PEERS_PCIE_PEERS, device->pcie_peers);
    printf("%d %s\n", (int)device->fabric, strstr(device->detail, "reaches"));
}

/* The log goes to standard error, which is this one's output too. */
static int play(bool apart)
{
    struct ep_node_options o = { .name = "n1", .backend = EP_NODE_CUDA, .cuda = cuda_fixture_api() };
    struct ep_error error = EP_ERROR_INIT;
    struct ep_node *node;
    Ep__V1__NodeInfo info;

    cuda_fixture.on_info = apart ? one_way : NULL;
    if (ep_node_open(&o, &node, &error) != EP_OK) {
        printf("%s\n", error.text);
        return 1;
    }
    ep_node_info(node, &info);
    for (size_t i = 0; i < info.n_devices; i++)
        say(info.devices[i]);
    ep_node_info_clear(&info);
    ep_node_close(node);
    return 0;
}

/* ---- running it --------------------------------------------------------------------------- */

static char told[8192];

/* settings: of the environment, as a shell has them. */
static void run(const char *library, const char *settings, const char *how)
{
    char self[512], command[2048];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    FILE *out;
    size_t n;

    assert_true(length > 0);
    self[length] = '\0';
    snprintf(command, sizeof command, "LD_LIBRARY_PATH='%s' %s exec '%s' %s 2>&1", library, settings, self,
             how);
    out = popen(command, "re");
    assert_non_null(out);
    n = fread(told, 1, sizeof told - 1, out);
    told[n] = '\0';
    if (pclose(out) != 0)
        fail_msg("%s: %s", command, told);
}

static void says(const char *text)
{
    if (!strstr(told, text))
        fail_msg("\"%s\" is not in:\n%s", text, told);
}

static void ask(const char *library, const char *settings, const char *first, const char *second)
{
    run(library, settings, "play");
    says(first);
    says(second);
}

/* ---- cases ---------------------------------------------------------------------------------- */

#define NOT_KNOWN "? ? ? 0 reaches 1 of 1 other GPUs, over NVLink or PCIe is not known, no MPS\n"

static void all_links_are_up_and_the_fabric_is_completed(void **state)
{
    (void)state;
    ask(NVML, "EP_NVML_FABRIC=33 EP_NVML_LINKS=18 EP_NVML_DOMAINS=aa",
        "18 1 0 4 reaches 1 of 1 other GPUs over NVLink, no MPS\n18 1 0 4 ", "GPU-fixture-1");
    says("nvlinks=18");
    says("fabric=completed");
    says("reaches=\"1 of 1 other GPUs over NVLink\"");
}

static void some_links_are_down(void **state)
{
    (void)state;
    ask(NVML, "EP_NVML_FABRIC=33 EP_NVML_LINKS=17 EP_NVML_DOMAINS=aa", "17 1 0 4 reaches", "nvlinks=17");
}

static void gpus_without_nvlink_reach_each_other_over_pcie(void **state)
{
    (void)state;
    ask(NVML, "EP_NVML_FABRIC=00", "0 0 1 1 reaches 1 of 1 other GPUs over PCIe, no MPS\n0 0 1 1 ",
        "fabric=none");
}

static void gpus_that_do_not_reach_each_other_do_so_over_nothing(void **state)
{
    (void)state;
    run(NVML, "EP_NVML_FABRIC=33 EP_NVML_LINKS=18 EP_NVML_DOMAINS=aa", "apart");
    says("18 0 0 4 reaches 0 of 1 other GPUs, no MPS\n18 0 0 4 ");
}

static void the_fabric_is_in_progress_or_has_failed(void **state)
{
    (void)state;
    ask(NVML, "EP_NVML_FABRIC=29 EP_NVML_LINKS=18 EP_NVML_DOMAINS=aa", "18 1 0 3 reaches",
        "18 1 0 5 reaches");
    says("the fabric manager is not done with a GPU");
    says("the fabric manager has failed with a GPU\" gpu=GPU-fixture-1 why=\"Unknown Error\"");
    /* not begun; and what nobody has heard of */
    ask(NVML, "EP_NVML_FABRIC=17", "0 0 1 2 reaches", "0 0 1 0 reaches");
}

/* CUDA_VISIBLE_DEVICES renumbers: the process's 0 is the last of three that NVML counts. */
static void gpus_are_matched_by_name(void **state)
{
    (void)state;
    ask(NVML, "EP_NVML_FABRIC=123 EP_NVML_GPUS=510 EP_NVML_LINKS=4 EP_NVML_DOMAINS=aba",
        "4 0 1 4 reaches 1 of 1 other GPUs over PCIe", "4 0 1 3 reaches 1 of 1 other GPUs over PCIe");
    ask(NVML, "EP_NVML_FABRIC=123 EP_NVML_GPUS=510 EP_NVML_LINKS=4 EP_NVML_DOMAINS=abb EP_NVML_PARTS=1",
        "4 1 0 4 reaches 1 of 1 other GPUs over NVLink", "4 1 0 3 reaches 1 of 1 other GPUs over NVLink");
}

static void of_a_gpu_that_nvml_does_not_know_nothing_is_known(void **state)
{
    (void)state;
    ask(NVML, "EP_NVML_FABRIC=33 EP_NVML_GPUS=71 EP_NVML_LINKS=18 EP_NVML_DOMAINS=aa", NOT_KNOWN,
        "18 ? ? 4 reaches 1 of 1 other GPUs, over NVLink or PCIe is not known");
}

static void an_nvml_without_the_functions_tells_nothing(void **state)
{
    (void)state;
    ask(OLD, "EP_NVML_FABRIC=33 EP_NVML_LINKS=18 EP_NVML_DOMAINS=aa", NOT_KNOWN NOT_KNOWN,
        "nvlinks=\"not known\"");
}

static void an_nvml_that_does_not_start_tells_nothing(void **state)
{
    (void)state;
    ask(NVML, "", NOT_KNOWN NOT_KNOWN, "why=\"NVML does not start: Driver Not Loaded\"");
}

/* A file that is no library comes before that of a driver, if there is one. */
static void without_nvml_nothing_is_known(void **state)
{
    char folder[] = "/tmp/ep-links-XXXXXX", path[64];
    FILE *file;

    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/libnvidia-ml.so.1", folder);
    file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
    ask(folder, "", NOT_KNOWN NOT_KNOWN, "NVLinks and the state of the fabric manager are not known");
    says("fabric=\"not known\"");
    remove(path);
    remove(folder);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_links_are_up_and_the_fabric_is_completed),
        cmocka_unit_test(some_links_are_down),
        cmocka_unit_test(gpus_without_nvlink_reach_each_other_over_pcie),
        cmocka_unit_test(gpus_that_do_not_reach_each_other_do_so_over_nothing),
        cmocka_unit_test(the_fabric_is_in_progress_or_has_failed),
        cmocka_unit_test(gpus_are_matched_by_name),
        cmocka_unit_test(of_a_gpu_that_nvml_does_not_know_nothing_is_known),
        cmocka_unit_test(an_nvml_without_the_functions_tells_nothing),
        cmocka_unit_test(an_nvml_that_does_not_start_tells_nothing),
        cmocka_unit_test(without_nvml_nothing_is_known),
    };

    if (argc == 2)
        return play(strcmp(argv[1], "apart") == 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
