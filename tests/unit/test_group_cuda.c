/* Groups on GPUs: who may run its own ops, what it gets for that, and what its peers and operators see. */
#include "group_fixture.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_fixture.h"

#define STATE(name)    EP__V1__RANK_STATE__RANK_STATE_##name
#define PHASE(name)    EP__V1__PHASE__PHASE_##name
#define EXECUTOR(name) EP__V1__EXECUTOR__EXECUTOR_##name
#define DIRECT(name)   EP__V1__DIRECT__DIRECT_##name
#define RANKS 4

static int setup(void **state)
{
    cuda_fixture_reset();
    return fixture_setup_gpus(state, cuda_fixture_api());
}

static int teardown(void **state)
{
    __atomic_store_n(&cuda_fixture.lost, 0, __ATOMIC_RELAXED);
    fixture_teardown(state);
    assert_int_equal(cuda_fixture.memories, 0);
    return 0;
}

/* ---- workers with their memory --------------------------------------------------------------- */

static void *map(const struct ep_membership_memory *memory)
{
    void *at = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);

    assert_ptr_not_equal(at, MAP_FAILED);
    return at;
}

static struct ep_membership_memory memory_of(const struct worker *w, uint32_t index)
{
    struct ep_membership_memory memory;
    struct ep_error error = EP_ERROR_INIT;

    assert_int_equal(ep_membership_memory(w->membership, index, &memory, &error), EP_OK);
    return memory;
}

/* For the worker's life; a direct worker maps it, and kernels write there. */
static struct ep_device_state *map_state(const struct worker *w)
{
    struct ep_membership_memory memory = memory_of(w, 1);
    void *at = map(&memory);

    assert_int_equal(memory.kind, EP_MEMORY_STATE);
    close(memory.fd);
    return at;
}

static void unmap_state(struct ep_device_state *state, const struct worker *w)
{
    munmap(state, w->info.state_bytes);
}

struct team {
    struct worker w[RANKS];
    struct ep_device_state *state[RANKS];
};

static void join_all(struct fixture *f, struct team *t)
{
    for (int i = 0; i < RANKS; i++) {
        join(f, &t->w[i], "moe", i);
        t->state[i] = map_state(&t->w[i]);
    }
}

static void unmap_all(struct team *t)
{
    for (int i = 0; i < RANKS; i++)
        unmap_state(t->state[i], &t->w[i]);
}

static void release_all(struct team *t)
{
    for (int i = 0; i < RANKS; i++)
        if (t->w[i].membership)
            release(&t->w[i], false);
    unmap_all(t);
}

static void on_counted(const struct ep_error *error, void *user)
{
    assert_int_equal(error->status, EP_OK);
    *(bool *)user = true;
}

static void count(struct fixture *f)
{
    bool counted = false;

    ep_groups_before_stats(f->groups, "moe", 60000, on_counted, &counted);
    RUN_UNTIL(f, counted);
}

/* ---- what a group is settled to -------------------------------------------------------------- */

static void the_spec_names_gpus(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    const Ep__V1__Group *group;

    create(f, "moe", &spec);
    group = get(f, "moe");
    assert_int_equal(group->spec->backend, EP__V1__BACKEND__BACKEND_CUDA);
    assert_int_equal(group->spec->n_modes, 1);
    assert_string_equal(group->status->ranks[1]->device, "GPU-fixture-1");
    assert_string_equal(group->status->ranks[2]->device, "GPU-fixture-0"); /* two on each */
}

/* Window and state of each rank, and nothing else; all of it is given back. */
static void memory_is_what_is_reserved(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;

    create(f, "moe", &spec);
    assert_int_equal(cuda_fixture.memories, 2 * RANKS);
    assert_true(ep_node_memory_left(f->node) < 2 * f->budget);
    assert_int_equal(ep_node_device_memory_left(f->node)[0], ep_node_device_memory_left(f->node)[1]);
    answer = delete (f, "moe", false);
    answer_clear(&answer);
    assert_int_equal(cuda_fixture.memories, 0);
    assert_int_equal(ep_node_memory_left(f->node), 2 * f->budget);
}

/* A driver may be busy for seconds: so long the server answers others. */
static void the_loop_goes_on_while_a_window_is_mapped(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer = { 0 };

    __atomic_store_n(&cuda_fixture.asleep, 1, __ATOMIC_RELAXED);
    ep_groups_create(f->groups, "moe", &spec, false, NULL, on_answer, &answer);
    while (!__atomic_load_n(&cuda_fixture.slept, __ATOMIC_RELAXED))
        uv_run(&f->loop, UV_RUN_NOWAIT);
    assert_int_equal(__atomic_load_n(&cuda_fixture.memories, __ATOMIC_RELAXED), 0); /* it still waits, and the loop has come here */
    __atomic_store_n(&cuda_fixture.asleep, 0, __ATOMIC_RELAXED);
    RUN_UNTIL(f, answer.done);
    assert_string_equal(answer.error.text, "");
    answer_clear(&answer);
}

static void a_group_that_cannot_have_its_memory_leaves_none(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    static const char *const functions[] = { "memory_create", "write" };

    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        struct answer answer;

        cuda_fixture_fail(functions[i], 6);
        answer = create_refused(f, "moe", &spec);
        assert_non_null(strstr(answer.error.text, functions[i]));
        answer_clear(&answer);
        cuda_fixture_fail(NULL, 0);
        RUN_UNTIL(f, ep_node_memory_left(f->node) == 2 * f->budget); /* given back on another thread */
        assert_int_equal(cuda_fixture.memories, 0);
    }
    create(f, "moe", &spec);
}

/* ---- claims ---------------------------------------------------------------------------------- */

static void a_claim_is_for_the_direct_executor(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    static const Ep__V1__Executor asked[] = { EXECUTOR(AUTO), EXECUTOR(DIRECT) };
    struct ep_membership_info info;
    struct worker w;

    create(f, "moe", &spec);
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        f->identity.executor = asked[i];
        assert_int_equal(claim(f, &w, "moe", 1, NULL), EP_OK);
        ep_membership_info(w.membership, &info);
        assert_int_equal(info.executor, EXECUTOR(DIRECT));
        assert_memory_equal(info.device_uuid, cuda_fixture_uuid(1), EP_CUDA_UUID_BYTES);
        assert_int_equal(info.memories, 1 + 1 + (RANKS - 1));
        assert_true(info.state_bytes > sizeof(struct ep_device_state));
        assert_int_equal(info.sms, 4); /* of 8, which two ranks share */
        release(&w, false);
    }
}

/* Multiprocessors of a direct worker in a group with one rank on each GPU. */
static uint32_t sms_alone(struct fixture *f)
{
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_membership_info info;
    struct worker w;

    spec.ranks = 2;
    create(f, "alone", &spec);
    f->identity.executor = EXECUTOR(DIRECT);
    assert_int_equal(claim(f, &w, "alone", 1, NULL), EP_OK);
    ep_membership_info(w.membership, &info);
    release(&w, false);
    return info.sms;
}

static void a_direct_worker_alone_on_a_gpu_has_all_of_it(void **state)
{
    assert_int_equal(sms_alone(*state), 0);
}

static void a_served_worker_gets_its_window_only(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_membership_info info;
    struct worker w;

    create(f, "moe", &spec);
    f->identity.executor = EXECUTOR(SERVER);
    assert_int_equal(claim(f, &w, "moe", 1, NULL), EP_OK);
    ep_membership_info(w.membership, &info);
    assert_int_equal(info.executor, EXECUTOR(SERVER));
    assert_memory_equal(info.device_uuid, cuda_fixture_uuid(1), EP_CUDA_UUID_BYTES);
    assert_int_equal(info.memories, 1);
    assert_int_equal(info.state_bytes, 0);
    assert_int_equal(info.sms, 0);
    release(&w, false);
}

static void set_direct(struct fixture *f, Ep__V1__Direct direct)
{
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;

    spec.direct = direct;
    answer = update(f, "moe", 0, &spec, "direct");
    assert_int_equal(answer.error.status, EP_OK);
    assert_int_equal(answer.group->status->epoch, 1); /* it is looked at by claims only */
    answer_clear(&answer);
}

static Ep__V1__Executor settled(struct fixture *f, Ep__V1__Executor asked)
{
    struct ep_membership_info info;
    struct worker w;

    f->identity.executor = asked;
    assert_int_equal(claim(f, &w, "moe", 0, NULL), EP_OK);
    ep_membership_info(w.membership, &info);
    release(&w, false);
    return info.executor;
}

static void the_group_says_who_may_run_its_own_ops(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    struct worker w;
    char own[64];

    create(f, "moe", &spec);
    f->identity.uid = geteuid() + 1;
    f->identity.executor = EXECUTOR(DIRECT);
    assert_int_equal(claim(f, &w, "moe", 0, &error), EP_PERMISSION_DENIED);
    snprintf(own, sizeof own, "is not the server's, which is %u;", (unsigned)geteuid());
    assert_non_null(strstr(error.text, "executor is direct: direct of group moe is same_uid, and uid "));
    assert_non_null(strstr(error.text, own));
    assert_int_equal(settled(f, EXECUTOR(AUTO)), EXECUTOR(SERVER));
    assert_int_equal(settled(f, EXECUTOR(SERVER)), EXECUTOR(SERVER));

    set_direct(f, DIRECT(ANY));
    assert_int_equal(settled(f, EXECUTOR(DIRECT)), EXECUTOR(DIRECT));
    assert_int_equal(settled(f, EXECUTOR(AUTO)), EXECUTOR(DIRECT));

    set_direct(f, DIRECT(NONE));
    f->identity.uid = geteuid();
    f->identity.executor = EXECUTOR(DIRECT);
    assert_int_equal(claim(f, &w, "moe", 0, &error), EP_PERMISSION_DENIED);
    assert_non_null(strstr(error.text, "direct of group moe is none"));
    assert_int_equal(settled(f, EXECUTOR(AUTO)), EXECUTOR(SERVER));
}

/* ---- multiprocessors --------------------------------------------------------------------------- */

static void claim_served(struct fixture *f, struct worker *w, const char *group, int32_t rank)
{
    f->identity.executor = EXECUTOR(SERVER);
    claim_when_free(f, w, group, rank);
}

/* 8 of them, and two ranks of the group on each GPU. */
static void served_ranks_divide_a_gpu(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w[RANKS];

    create(f, "moe", &spec);
    for (int i = 0; i < RANKS; i++) {
        claim_served(f, &w[i], "moe", i);
        attach(&w[i]);
        assert_int_equal(cuda_fixture.served.max_sms, 4);
    }
    assert_int_equal(ep_groups_sms(f->groups, 0), 8);
    assert_int_equal(ep_groups_sms(f->groups, 1), 8);
    for (int i = 0; i < RANKS; i++)
        release(&w[i], false);
    RUN_UNTIL(f, ep_groups_sms(f->groups, 0) == 0 && ep_groups_sms(f->groups, 1) == 0);
}

/* What it asks for bounds its HT ops alone, and is bounded by its part of the GPU. */
static void a_served_worker_says_what_its_ht_ops_fill(void **state)
{
    static const struct { uint32_t asked, fills; } cases[] = {
        { 0, 4 }, { 1, 1 }, { 3, 3 }, { 4, 4 }, { 5, 4 }, { UINT32_MAX, 4 }
    };
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_membership_info info;
    struct worker w;

    create(f, "moe", &spec);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        f->identity.ht_sms = cases[i].asked;
        claim_served(f, &w, "moe", 0);
        ep_membership_info(w.membership, &info);
        assert_int_equal(info.ht_sms, cases[i].fills);
        attach(&w);
        assert_int_equal(cuda_fixture.served.max_sms, 4);
        assert_int_equal(cuda_fixture.served.max_ht_sms, cases[i].fills);
        assert_int_equal(ep_groups_sms(f->groups, 0), 4);
        release(&w, false);
    }
}

static void what_ht_ops_of_a_direct_worker_fill_is_told(void **state)
{
    static const struct { uint32_t asked, fills; } cases[] = { { 0, 4 }, { 3, 3 }, { 5, 4 } };
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_membership_info info;
    struct worker w;

    create(f, "moe", &spec);
    f->identity.executor = EXECUTOR(DIRECT);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        f->identity.ht_sms = cases[i].asked;
        assert_int_equal(claim(f, &w, "moe", 0, NULL), EP_OK);
        ep_membership_info(w.membership, &info);
        assert_int_equal(info.ht_sms, cases[i].fills);
        release(&w, false);
    }
}

static void refused_for_room(struct fixture *f, const char *group, int32_t rank, const char *text)
{
    struct ep_error error = EP_ERROR_INIT;
    struct worker w;

    f->identity.executor = EXECUTOR(SERVER);
    assert_int_equal(claim(f, &w, group, rank, &error), EP_RESOURCE_EXHAUSTED);
    if (!strstr(error.text, text))
        fail_msg("\"%s\" does not say \"%s\"", error.text, text);
}

static void a_full_gpu_serves_no_further_rank(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker a, b, other;

    create(f, "moe", &spec);
    create(f, "other", &spec);
    claim_served(f, &a, "moe", 0);
    claim_served(f, &b, "moe", 2);
    refused_for_room(f, "other", 0,
                     "executor server needs 4 of the 8 multiprocessors of GPU-fixture-0 for rank 0 of group other, and "
                     "0 are free; held by: group moe 8 (2 ranks); use executor direct, or start ep-server with "
                     "--sms-per-rank");
    assert_true(ep_groups_rank_free(f->groups, "other", 0)); /* who runs its own ops needs none */
    claim_served(f, &other, "other", -1); /* on the other GPU */
    attach(&other);
    assert_int_equal(other.info.rank, 1);
    f->identity.executor = EXECUTOR(DIRECT);
    release(&b, false); /* it never attached: at once */
    release(&other, false);
    claim_served(f, &b, "other", 0);
    refused_for_room(f, "moe", 2, "held by: group moe 4 (1 rank), group other 4 (1 rank)");
    release(&a, false);
    release(&b, false);
}

static void what_is_being_released_is_worth_waiting_for(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    struct worker a, b, other;

    create(f, "moe", &spec);
    create(f, "other", &spec);
    claim_served(f, &a, "moe", 0);
    attach(&a);
    claim_served(f, &b, "moe", 2);
    release(&a, false);
    assert_int_equal(claim(f, &other, "other", 0, &error), EP_UNAVAILABLE);
    assert_non_null(strstr(error.text, "the multiprocessors of GPU-fixture-0 are being released"));
    claim_when_free(f, &other, "other", 0);
    release(&other, false);
    release(&b, false);
}

static void a_smaller_share_leaves_room_for_others(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w[4];

    fixture_close(f);
    f->sms_per_rank = 2;
    fixture_open(f);
    create(f, "moe", &spec);
    create(f, "other", &spec);
    for (int i = 0; i < 4; i++)
        claim_served(f, &w[i], i < 2 ? "moe" : "other", i % 2 * 2);
    assert_int_equal(ep_groups_sms(f->groups, 0), 8);
    for (int i = 0; i < 4; i++)
        release(&w[i], false);
    assert_int_equal(sms_alone(f), 2); /* of those who run their own ops, too */
}

/* ---- the doorbell ---------------------------------------------------------------------------- */

static void first_has_mps(uint32_t device, struct ep_cuda_device *info)
{
    info->mps = device == 0;
}

/* Of each rank: where that is asked for, and contexts do not take turns. */
static void check_doorbells(struct fixture *f, const char *group, bool asked)
{
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w[RANKS];
    int with_mps = 0;

    cuda_fixture.on_info = first_has_mps;
    fixture_close(f);
    f->polls = asked;
    fixture_open(f);
    create(f, group, &spec);
    for (int i = 0; i < RANKS; i++) {
        claim_served(f, &w[i], group, i);
        attach(&w[i]);
        assert_int_equal(cuda_fixture.served.polls, asked && w[i].info.mps);
        with_mps += w[i].info.mps;
    }
    assert_int_equal(with_mps, RANKS / 2);
    for (int i = 0; i < RANKS; i++)
        release(&w[i], false);
}

static void doorbells_are_polled_with_mps(void **state)
{
    check_doorbells(*state, "moe", false);
    check_doorbells(*state, "other", true);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void a_worker_gets_its_window_its_state_and_its_peers_windows(void **state)
{
    static const uint32_t whose[] = { 2, 2, 0, 1, 3 };
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w;

    create(f, "moe", &spec);
    join(f, &w, "moe", 2);
    for (uint32_t i = 0; i < w.info.memories; i++) {
        struct ep_membership_memory memory = memory_of(&w, i);
        void *at = map(&memory);

        assert_int_equal(memory.rank, whose[i]);
        assert_int_equal(fcntl(memory.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        if (i == 1) {
            assert_int_equal(memory.kind, EP_MEMORY_STATE);
            assert_int_equal(memory.bytes, w.info.state_bytes);
            assert_int_equal(((struct ep_device_state *)at)->magic, EP_DEVICE_STATE_MAGIC);
            assert_int_equal(((struct ep_device_state *)at)->rank, 2);
        } else {
            assert_int_equal(memory.kind, i == 0 ? EP_MEMORY_OWN_WINDOW : EP_MEMORY_PEER_WINDOW);
            assert_int_equal(memory.bytes, w.info.window_bytes);
            assert_int_equal(((struct ep_control *)at)->head.magic, EP_WINDOW_MAGIC);
            assert_int_equal(((struct ep_control *)at)->head.rank, whose[i]);
            assert_int_equal(((struct ep_control *)at)->head.epoch, 1);
        }
        munmap(at, memory.bytes);
        close(memory.fd);
    }
    release(&w, false);
}

/* ---- coming and going ------------------------------------------------------------------------ */

static void peers_kernels_are_told_who_has_gone(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct team t;

    create(f, "moe", &spec);
    join_all(f, &t);
    release(&t.w[2], false);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(t.state[i]->from[2], EP_DEVICE_NEVER); /* before release returned */
    assert_int_equal(t.w[0].lost, 1);
    assert_int_equal(t.w[0].lost_rank, 2);
    assert_int_equal(get(f, "moe")->status->phase, PHASE(DEGRADED));
    release_all(&t);
}

static void a_new_worker_takes_part_from_the_next_number(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct team t;
    struct worker next;
    struct ep_device_state *its;
    uint8_t *kept;

    create(f, "moe", &spec);
    join_all(f, &t);
    kept = map_window(&t.w[2]); /* as its peers have it */
    kept[t.w[2].map.arena] = 'a';
    kept[t.w[2].map.ll] = 'r';
    t.state[0]->begun = 100;
    release(&t.w[2], false);
    join(f, &next, "moe", 2);
    its = map_state(&next);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(t.state[i]->from[2], 101);
    assert_int_equal(its->begun, 100);
    assert_int_equal(next.window[next.map.arena], 0); /* nothing of the one before */
    assert_int_equal(next.window[next.map.ll], 'r');  /* what peers send is in the same memory as before */
    kept[next.map.ll] = 's';
    assert_int_equal(next.window[next.map.ll], 's');
    assert_int_equal(get(f, "moe")->status->phase, PHASE(READY));
    munmap(kept, next.window_bytes);
    unmap_state(its, &next);
    release(&next, false);
    release_all(&t);
}

static void memory_is_cleared_when_no_one_can_write_it(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    struct worker a, b, c;
    uint8_t *kept;

    create(f, "moe", &spec);
    join(f, &a, "moe", 0);
    join(f, &b, "moe", 1);
    kept = map_window(&b);
    kept[b.map.arena] = 'b';
    release(&b, true);
    assert_int_equal(claim(f, &c, "moe", 1, &error), EP_UNAVAILABLE);
    count(f); /* its executor stops, after a last look */
    assert_int_equal(kept[b.map.arena], 'b');
    writer_gone(&b);
    assert_int_equal(kept[b.map.arena], 0);
    join(f, &c, "moe", 1);
    munmap(kept, c.window_bytes);
    release(&c, false);
    release(&a, false);
}

static void numbers_begin_again_when_the_last_has_left(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct team t;

    create(f, "moe", &spec);
    for (int round = 0; round < 3; round++) {
        join_all(f, &t);
        for (int i = 0; i < RANKS; i++) {
            assert_int_equal(t.state[i]->begun, 0);
            for (int r = 0; r < RANKS; r++)
                assert_int_equal(t.state[i]->from[r], 1);
            assert_int_equal(t.w[i].window[t.w[i].map.ll], 0);
            t.state[i]->begun = 50;
            t.w[i].window[t.w[i].map.ll] = 0xee;
        }
        release_all(&t);
        RUN_UNTIL(f, rank_state(f, "moe", 0) == STATE(EXPECTED));
    }
}

static void a_broken_gpu_is_told_to_who_wants_to_join(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker a, b;

    create(f, "moe", &spec);
    join(f, &a, "moe", 0);
    __atomic_store_n(&cuda_fixture.lost, 1u << 1, __ATOMIC_RELAXED);
    release(&a, false);
    claim_when_free(f, &b, "moe", 0); /* nobody is kept waiting for a reset that cannot be */
    ep_membership_attach(b.membership, &f->identity, on_attached);
    assert_int_equal(b.attached.status, EP_DEVICE_LOST);
    assert_non_null(strstr(b.attached.text, "device 1 has fallen off the bus"));
    release(&b, false);
    __atomic_store_n(&cuda_fixture.lost, 0, __ATOMIC_RELAXED);
    join(f, &b, "moe", 0);
    release(&b, false);
}

/* ---- executor server --------------------------------------------------------------------------- */

static void ranks_of_both_executors_are_one_team(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_device_state *peers;
    struct worker own, served, next;

    create(f, "moe", &spec);
    f->identity.executor = EXECUTOR(DIRECT);
    join(f, &own, "moe", 0);
    peers = map_state(&own);
    f->identity.executor = EXECUTOR(SERVER);
    join(f, &served, "moe", 1);
    assert_int_equal(cuda_fixture_serves(), 1);
    peers->begun = 30;
    release(&served, false);
    assert_int_equal(peers->from[1], EP_DEVICE_NEVER);
    join(f, &next, "moe", 1);
    assert_int_equal(peers->from[1], 31);
    assert_int_equal(cuda_fixture_serves(), 1);
    unmap_state(peers, &own);
    release(&next, false);
    release(&own, false);
}

static struct ep_mailbox *mailbox_of(uint8_t *window)
{
    return &((struct ep_control *)(void *)window)->gpu.mailbox;
}

/* It may ring as long as it lives, and nobody hears it. */
static void a_mailbox_is_cleared_when_its_worker_is_gone(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    struct worker a, b, next;
    uint8_t *kept;

    create(f, "moe", &spec);
    f->identity.executor = EXECUTOR(SERVER);
    join(f, &a, "moe", 0);
    join(f, &b, "moe", 1);
    kept = map_window(&b);
    release(&b, true);
    RUN_UNTIL(f, cuda_fixture_serves() == 1);
    mailbox_of(kept)->bell = ep_bell_of(0);
    f->identity.executor = EXECUTOR(SERVER);
    assert_int_equal(claim(f, &next, "moe", 1, &error), EP_UNAVAILABLE);
    assert_int_equal(rank_state(f, "moe", 1), STATE(QUARANTINED));
    writer_gone(&b);
    RUN_UNTIL(f, mailbox_of(kept)->bell == 0);
    join(f, &next, "moe", 1);
    munmap(kept, next.window_bytes);
    release(&next, false);
    release(&a, false);
}

static void a_worker_that_nobody_serves_any_more_is_detached(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker a, b;

    create(f, "moe", &spec);
    f->identity.executor = EXECUTOR(SERVER);
    join(f, &a, "moe", 0);
    cuda_fixture_fail("serve_wait", 2);
    join(f, &b, "moe", 1);
    RUN_UNTIL(f, a.detached + b.detached == 1);
    cuda_fixture_fail(NULL, 0);
    assert_non_null(strstr(a.detached ? a.text : b.text, "the server cannot run its ops any more: serve_wait failed"));
    release(&a, false);
    release(&b, false);
}

/* What may still be written is not given to anybody, nor back. */
static void a_rank_that_does_not_end_is_lost_with_its_epoch(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    uint64_t left, all = ep_node_memory_left(f->node);
    struct answer answer;
    struct worker a, b;

    spec.timeout_ms = 1;
    create(f, "moe", &spec);
    left = ep_node_memory_left(f->node);
    f->identity.executor = EXECUTOR(SERVER);
    join(f, &a, "moe", 0);
    join(f, &b, "moe", 1);
    __atomic_store_n(&cuda_fixture.stuck, 1, __ATOMIC_SEQ_CST);
    release(&b, false);
    while (claim(f, &b, "moe", 1, &error) == EP_UNAVAILABLE)
        uv_run(&f->loop, UV_RUN_ONCE);
    __atomic_store_n(&cuda_fixture.stuck, 0, __ATOMIC_SEQ_CST);
    assert_int_equal(error.status, EP_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "rank 1 of group moe is lost: what the server ran for its last worker"));
    assert_int_equal(ep_groups_sms(f->groups, 1), 4);
    release(&a, false);
    claim_when_free(f, &a, "moe", 0); /* numbers do not begin anew, and the others may come and go */
    attach(&a);
    release(&a, false);
    answer = delete (f, "moe", false);
    assert_int_equal(answer.error.status, EP_OK);
    answer_clear(&answer);
    assert_int_equal(ep_node_memory_left(f->node), left);
    ep_node_release(f->node, 0, (all - left) / 2); /* the fixture wants it back */
    ep_node_release(f->node, 1, (all - left) / 2);
}

static int teardown_lost(void **state)
{
    fixture_teardown(state);
    assert_int_equal(cuda_fixture.memories, 2 * RANKS);
    return 0;
}

/* ---- what operators see ---------------------------------------------------------------------- */

static void counters_of_kernels_are_shown_when_asked_for(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_rank_counters counters;
    Ep__V1__Stats stats;
    struct worker w;
    struct ep_device_state *s;

    create(f, "moe", &spec);
    join(f, &w, "moe", 1);
    s = map_state(&w);
    s->counters[EP_DEVICE_DISPATCH].count = 7;
    count(f);
    assert_int_equal(get(f, "moe")->status->ranks[1]->ops, 7);
    s->counters[EP_DEVICE_COMBINE].count = 6;
    count(f);
    ep_groups_stats(f->groups, "moe", false, &stats);
    assert_int_equal(stats.ranks[1]->ops[EP_CLASS_LL_COMBINE]->count, 6);
    assert_int_equal(stats.ranks[1]->ops[EP_CLASS_LL_COMBINE]->n_busy_buckets, 0); /* not known, which is not 0 */
    assert_int_equal(stats.ranks[1]->n_peers, 0);
    ep_groups_stats_clear(&stats);
    s->counters[EP_DEVICE_COMBINE].count = 8;
    count(f);
    assert_true(ep_groups_rank_counters(f->groups, "moe", 1, &counters));
    assert_int_equal(counters.op[EP_CLASS_LL_COMBINE].count, 8);
    s->counters[EP_DEVICE_COMBINE].count = 9;
    unmap_state(s, &w);
    release(&w, false);
    count(f); /* with the last look */
    assert_int_equal(get(f, "moe")->status->ranks[1]->ops, 16); /* of the epoch, whoever made them */
}

static void fail_of(const struct worker *w, uint64_t sequence)
{
    struct ep_device_report *report = &((struct ep_control *)(void *)w->window)->gpu.report;

    report->failure = (struct ep_device_record){ .status = EP_TIMEOUT, .late_rank = 3,
                                                 .wait_phase = EP_WAIT_ARRIVAL, .number = 12,
                                                 .sequence = sequence, .wait_ns = 50000000 };
    report->failures = 1;
}

static void a_late_rank_is_recorded_by_name(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    const Ep__V1__TimeoutRecord *record;
    struct worker w;

    create(f, "moe", &spec);
    join(f, &w, "moe", 1);
    fail_of(&w, 1);
    count(f);
    assert_int_equal(get(f, "moe")->status->n_timeouts, 1);
    record = get(f, "moe")->status->timeouts[0];
    assert_int_equal(record->rank, 1);
    assert_int_equal(record->late_rank, 3);
    assert_int_equal(record->seq, 12);
    assert_string_equal(record->op, "ll_dispatch");
    assert_string_equal(record->phase, "arrival");
    assert_int_equal(record->waited_us, 50000);
    release(&w, false);
}

static void count_changes(Ep__V1__GroupEvent__Type type, const Ep__V1__Group *group, void *user)
{
    (void)type;
    *(size_t *)user = group->status->n_timeouts;
}

static void watchers_hear_of_a_late_rank_unasked(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_group_watch *watch;
    struct worker w;
    size_t heard = 0;

    create(f, "moe", &spec);
    join(f, &w, "moe", 1);
    watch = ep_groups_watch(f->groups, count_changes, &heard);
    fail_of(&w, 1);
    RUN_UNTIL(f, heard == 1);
    ep_groups_unwatch(watch);
    release(&w, false);
}

static void closing_with_workers_leaves_their_memberships_safe(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_membership_memory memory;
    struct worker w;

    create(f, "moe", &spec);
    join(f, &w, "moe", 0);
    fixture_close(f);
    assert_int_equal(ep_membership_memory(w.membership, 2, &memory, NULL), EP_DETACHED);
    release(&w, true);
    writer_gone(&w);
    fixture_open(f);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_spec_names_gpus),
        TEST(memory_is_what_is_reserved),
        TEST(the_loop_goes_on_while_a_window_is_mapped),
        TEST(a_group_that_cannot_have_its_memory_leaves_none),
        TEST(a_claim_is_for_the_direct_executor),
        TEST(a_direct_worker_alone_on_a_gpu_has_all_of_it),
        TEST(a_served_worker_gets_its_window_only),
        TEST(the_group_says_who_may_run_its_own_ops),
        TEST(served_ranks_divide_a_gpu),
        TEST(a_served_worker_says_what_its_ht_ops_fill),
        TEST(what_ht_ops_of_a_direct_worker_fill_is_told),
        TEST(a_full_gpu_serves_no_further_rank),
        TEST(what_is_being_released_is_worth_waiting_for),
        TEST(a_smaller_share_leaves_room_for_others),
        TEST(doorbells_are_polled_with_mps),
        TEST(a_worker_gets_its_window_its_state_and_its_peers_windows),
        TEST(peers_kernels_are_told_who_has_gone),
        TEST(a_new_worker_takes_part_from_the_next_number),
        TEST(memory_is_cleared_when_no_one_can_write_it),
        TEST(numbers_begin_again_when_the_last_has_left),
        TEST(a_broken_gpu_is_told_to_who_wants_to_join),
        TEST(ranks_of_both_executors_are_one_team),
        TEST(a_mailbox_is_cleared_when_its_worker_is_gone),
        TEST(a_worker_that_nobody_serves_any_more_is_detached),
        TEST(counters_of_kernels_are_shown_when_asked_for),
        TEST(a_late_rank_is_recorded_by_name),
        TEST(watchers_hear_of_a_late_rank_unasked),
        TEST(closing_with_workers_leaves_their_memberships_safe),
        /* The last one: memory stays. */
        cmocka_unit_test_setup_teardown(a_rank_that_does_not_end_is_lost_with_its_epoch, setup, teardown_lost),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
