/* Frames from node to node where a node goes: all that has reached the other is taken, which is all if it leaves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <linux/sockios.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "ep_clock.h"
#include "net_private.h"

enum { NODES = 2, ROUNDS = 40, TIMEOUT_MS = 20000 };
#define WAIT_NS (20 * EP_NS_PER_S)

/* What both processes see. */
struct meeting {
    struct ep_host_card cards[NODES];
    uint32_t listen, works; /* nodes that do */
};

struct frames {
    uint32_t n, bytes; /* that are sent, and the size of each */
    bool dies;         /* the sender is killed when all has reached the other's kernel; else it closes its net */
};

static bool reached(const uint32_t *word, uint32_t value)
{
    const uint64_t end = ep_clock_ns() + WAIT_NS;

    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < value && ep_clock_ns() < end)
        usleep(200);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) >= value;
}

static struct ep_host_net *join(struct meeting *meeting, uint32_t own, const struct ep_host_net_events *events)
{
    struct ep_host_net *net;

    if (ep_host_net_listen(TIMEOUT_MS, &net, &meeting->cards[own], NULL) != EP_OK)
        return NULL;
    __atomic_add_fetch(&meeting->listen, 1, __ATOMIC_RELEASE);
    if (!reached(&meeting->listen, NODES) ||
        ep_host_net_connect(net, meeting->cards, NODES, own, TIMEOUT_MS, NULL) != EP_OK ||
        ep_host_net_start(net, events, NULL) != EP_OK) {
        ep_host_net_close(net);
        return NULL;
    }
    ep_host_net_work(net);
    __atomic_add_fetch(&meeting->works, 1, __ATOMIC_RELEASE);
    if (reached(&meeting->works, NODES))
        return net;
    ep_host_net_close(net);
    return NULL;
}

/* ---- what a node hears ---------------------------------------------------------------------- */

struct heard {
    uint32_t frames, wrong, lost;
};

static bool on_frame(void *user, uint32_t node, const void *frame, uint32_t bytes)
{
    struct heard *heard = user;

    (void)node, (void)bytes;
    heard->wrong += ((const uint8_t *)frame)[sizeof(struct ep_host_frame_size)] != (uint8_t)heard->frames;
    heard->frames++;
    return true;
}

static void on_room(void *user)
{
    (void)user;
}

static void on_lost(void *user, uint32_t node, const char *why)
{
    struct heard *heard = user;

    (void)node, (void)why;
    __atomic_store_n(&heard->lost, 1, __ATOMIC_RELEASE); /* partner: reached */
}

static struct ep_host_net_events events_of(struct heard *heard)
{
    return (struct ep_host_net_events){ .frame = on_frame, .room = on_room, .lost = on_lost, .user = heard };
}

/* ---- who goes ------------------------------------------------------------------------------------ */

static void send_all(struct ep_host_net *net, const struct frames *frames)
{
    for (uint32_t i = 0; i < frames->n; i++) {
        uint8_t *at;

        while ((at = ep_host_net_begin(net, 0, frames->bytes)) == NULL)
            usleep(100);
        memset(at + sizeof(struct ep_host_frame_size), (int)i, frames->bytes - sizeof(struct ep_host_frame_size));
        ep_host_net_commit(net, 0, 1);
        ep_host_net_flush(net, 0);
    }
}

/* Bytes of sockets that the other side's kernel has not acknowledged.  Of a process that is killed they are lost if it had
 * not read all that had come: its kernel resets the connection (RFC 1122, 4.2.2.13). */
static bool all_has_arrived(void)
{
    enum { FILES = 64 };
    int bytes;

    for (int fd = 3; fd < FILES; fd++)
        if (ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0)
            return false;
    return true;
}

static void go(struct meeting *meeting, const struct frames *frames)
{
    struct heard heard = { 0 };
    const struct ep_host_net_events events = events_of(&heard);
    struct ep_host_net *net = join(meeting, 1, &events);

    if (!net)
        _exit(1);
    send_all(net, frames);
    if (frames->dies) {
        while (__atomic_load_n(&net->comm->active, __ATOMIC_RELAXED) != 0 || !all_has_arrived())
            usleep(100);
        raise(SIGKILL);
    }
    ep_host_net_close(net);
    _exit(0);
}

static void stay(struct meeting *meeting, const struct frames *frames)
{
    struct heard heard = { 0 };
    const struct ep_host_net_events events = events_of(&heard);
    struct ep_host_net *net = join(meeting, 0, &events);

    assert_non_null(net);
    assert_true(reached(&heard.lost, 1));
    ep_host_net_close(net);
    assert_int_equal(heard.frames, frames->n);
    assert_int_equal(heard.wrong, 0);
}

static void check_round(const struct frames *frames)
{
    struct meeting *meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int status;
    pid_t pid;

    assert_true(meeting != MAP_FAILED);
    pid = fork();
    if (pid == 0)
        go(meeting, frames);
    assert_true(pid > 0);
    stay(meeting, frames);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(frames->dies ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    munmap(meeting, sizeof *meeting);
}

static void check(uint32_t n, uint32_t bytes, const char *connections, bool dies)
{
    const struct frames frames = { .n = n, .bytes = bytes, .dies = dies };

    setenv("EP_GIN_INTERFACE", "=lo", 1);
    setenv("EP_GIN_CONNECTIONS", connections, 1);
    for (int i = 0; i < ROUNDS; i++)
        check_round(&frames);
}

static void last_frames_of_a_node_that_leaves_come(void **state)
{
    (void)state;
    check(12, 256 << 10, "4", false);
    check(60, 64 << 10, "4", false);
}

static void what_has_come_of_a_node_that_is_killed_is_taken(void **state)
{
    (void)state;
    check(15, 256 << 10, "1", true);
    check(60, 64 << 10, "1", true);
    check(60, 64 << 10, "4", true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(last_frames_of_a_node_that_leaves_come),
        cmocka_unit_test(what_has_come_of_a_node_that_is_killed_is_taken),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
