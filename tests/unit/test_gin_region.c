/* What a registration leaves behind: peers that say what the test wrote, links that count, and an RDMA NIC's double. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "transport.h"

enum { RANKS = 3, BYTES = 4096 };

static uint8_t memory[BYTES];

/* ---- a link that counts ------------------------------------------------------------------------------------ */

struct fake {
    uint32_t offered, reached, left;
};

static struct fake fakes[RANKS];

static ep_status fake_offer(void *link, const struct ep_gin_region *region, struct ep_gin_card *card,
                            struct ep_error *error)
{
    (void)region, (void)card, (void)error;
    ((struct fake *)link)->offered++;
    return EP_OK;
}

static ep_status fake_reach(void *link, const struct ep_gin_region *region, const struct ep_gin_card *card,
                            void **remote, struct ep_error *error)
{
    (void)region, (void)card, (void)error;
    ((struct fake *)link)->reached++;
    *remote = link;
    return EP_OK;
}

static void fake_leave(void *link, const struct ep_gin_region *region, void *remote)
{
    struct fake *at = link;

    (void)region;
    assert_ptr_equal(remote, at->reached > 0 ? link : NULL);
    at->left++;
}

static const struct ep_gin_transport fake = {
    .name = "fake", .region_offer = fake_offer, .region_reach = fake_reach, .region_leave = fake_leave
};

/* ---- a communicator whose peers are sockets of the test's ---------------------------------------------------- */

struct world {
    struct ep_gin_comm comm;
    struct ep_gin_peer peers[RANKS];
    int theirs[RANKS]; /* a peer's end of its control connection */
};

static int set_up(void **state)
{
    struct world *w = calloc(1, sizeof *w);

    assert_non_null(w);
    memset(fakes, 0, sizeof fakes);
    w->comm.ranks = RANKS;
    w->comm.peers = w->peers;
    w->comm.regions = calloc(EP_GIN_MAX_REGIONS, sizeof *w->comm.regions);
    assert_non_null(w->comm.regions);
    w->comm.settings.timeout_ns = 30 * EP_NS_PER_S;
    pthread_mutex_init(&w->comm.sending, NULL);
    pthread_mutex_init(&w->comm.receiving, NULL);
    for (uint32_t r = 0; r < RANKS; r++) {
        int ends[2];

        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
        w->theirs[r] = ends[1];
        w->peers[r] = (struct ep_gin_peer){
            .comm = &w->comm, .rank = r, .control = ends[0], .main = { &fake, &fakes[r] }
        };
    }
    close(w->peers[0].control); /* that is this rank */
    w->peers[0].control = -1;
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    struct world *w = *state;

    for (uint32_t r = 0; r < RANKS; r++) {
        if (w->peers[r].control >= 0)
            close(w->peers[r].control);
        close(w->theirs[r]);
    }
    pthread_mutex_destroy(&w->comm.receiving);
    pthread_mutex_destroy(&w->comm.sending);
    free(w->comm.regions);
    free(w);
    return 0;
}

/* The peer's part of the first registration, without a card. */
static void say(struct world *w, uint32_t rank, uint64_t bytes)
{
    const struct ep_gin_frame frame = {
        .magic = EP_GIN_MAGIC, .kind = EP_GIN_FRAME_REGION, .key = 7, .type = NCCL_MEMORY_HOST, .bytes = bytes
    };

    assert_int_equal(write(w->theirs[rank], &frame, sizeof frame), sizeof frame);
}

static ep_status add(struct world *w, struct ep_gin_region **region)
{
    return ep_gin_region_add(&w->comm, memory, BYTES, NCCL_MEMORY_HOST, 0, -1, 0, region, NULL);
}

/* ---- tests ------------------------------------------------------------------------------------------------------ */

static void a_registration_that_fails_takes_back_what_was_offered(void **state)
{
    struct world *w = *state;
    struct ep_gin_region *region = NULL;

    say(w, 1, BYTES + 8);
    say(w, 2, BYTES);
    assert_int_equal(add(w, &region), EP_INVALID_ARGUMENT);
    assert_null(region);
    for (uint32_t r = 1; r < RANKS; r++) {
        assert_int_equal(fakes[r].offered, 1);
        assert_int_equal(fakes[r].left, 1);
    }
    assert_null(w->comm.regions[0].remote); /* the slot is free */
}

static void a_region_is_taken_back_from_peers_that_offer_none(void **state)
{
    struct world *w = *state;
    struct ep_gin_region *region = NULL;

    say(w, 1, BYTES);
    say(w, 2, BYTES);
    assert_int_equal(add(w, &region), EP_OK);
    assert_int_equal(fakes[1].reached + fakes[1].left, 0);
    ep_gin_region_remove(&w->comm, region);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(fakes[r].left, 1);
}

#ifdef EP_GIN_WITH_VERBS
void *__real_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags);

void *__wrap_dlopen(const char *name, int flags)
{
    return __real_dlopen(strcmp(name, "libibverbs.so.1") == 0 ? EP_UNIT_DIR "/verbs/libibverbs.so.1" : name,
                         flags);
}

static struct ep_gin_frame heard(struct world *w, uint32_t rank)
{
    struct ep_gin_frame frame;

    assert_int_equal(recv(w->theirs[rank], &frame, sizeof frame, MSG_WAITALL), sizeof frame);
    return frame;
}

static void open_nic(struct world *w)
{
    struct ep_gin_link *main = &w->peers[1].main;
    struct ep_gin_card card;

    assert_int_equal(ep_gin_verbs.usable(&w->comm, NULL), EP_OK);
    assert_int_equal(ep_gin_verbs.start(&w->comm, &w->comm.shared[EP_GIN_VERBS], NULL), EP_OK);
    main->transport = &ep_gin_verbs;
    assert_int_equal(ep_gin_verbs.link_open(&w->comm, &w->peers[1], &main->link, &card, NULL), EP_OK);
}

static void close_nic(struct world *w)
{
    ep_gin_verbs.link_close(w->peers[1].main.link);
    ep_gin_verbs.stop(w->comm.shared[EP_GIN_VERBS]);
}

/* What it still had under that key it would offer again; each registration of its has another key of the NIC's. */
static void a_nic_forgets_a_region_whose_registration_failed(void **state)
{
    struct world *w = *state;
    struct ep_gin_region *region = NULL, again = { .type = NCCL_MEMORY_HOST, .at = memory, .bytes = BYTES };
    struct ep_gin_card card = { .fds = 0 };
    struct ep_gin_frame frame;

    open_nic(w);
    say(w, 1, BYTES + 8);
    say(w, 2, BYTES);
    assert_int_equal(add(w, &region), EP_INVALID_ARGUMENT);
    frame = heard(w, 1);
    assert_true(frame.has_card);
    again.key = frame.key;
    assert_int_equal(ep_gin_verbs.region_offer(w->peers[1].main.link, &again, &card, NULL), EP_OK);
    assert_memory_not_equal(card.bytes, frame.card, sizeof card.bytes);
    close_nic(w);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
        TEST(a_registration_that_fails_takes_back_what_was_offered),
        TEST(a_region_is_taken_back_from_peers_that_offer_none),
#ifdef EP_GIN_WITH_VERBS
        TEST(a_nic_forgets_a_region_whose_registration_failed),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
