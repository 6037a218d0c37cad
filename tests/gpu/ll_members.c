/* Ranks that are absent, leave, return or are late. */
#include <stdlib.h>
#include <unistd.h>

#include "bench_hash.h"
#include "ep_clock.h"
#include "ll_tests.h"

/* Where ranks are late and --late-ms says nothing else.  LONG_MS: a wait for credit ends an eighth of it sooner, and how far
 * apart threads begin is to be less. */
enum { SHORT_MS = 200, LONG_MS = 4000, PAUSE_US = 100000, SLACK_MS = 2000 };

/* The rank that does what the others do not expect: the last one. */
static uint32_t odd_one(const struct ll_passes *passes)
{
    return passes->world->ranks - 1;
}

static uint64_t others(const struct ll_passes *passes)
{
    return world_all(passes->world) & ~world_bit(odd_one(passes));
}

static void expect(struct ll_passes *passes, uint64_t mask)
{
    for (uint32_t r = 0; r < passes->world->ranks; r++) {
        passes->pass[r][0]->expected = mask;
        passes->pass[r][0]->changing = false;
    }
}

/* The last rank leaves while the others' ops run. */
static void expect_to_leave(struct ll_passes *passes)
{
    expect(passes, others(passes));
    for (uint32_t r = 0; r < passes->world->ranks; r++)
        passes->pass[r][0]->changing = true;
}

/*
 * Whose parts a rank may be without when the last one leaves in the middle of an op: that one's, and in HT what went
 * through it, as it is a gate of its node (kernels/device_net.h).  Ranks there may miss whose gate it is; and these, in a
 * combine, all ranks of its node.
 */
static uint64_t lost_with_it(const struct ll_passes *passes, uint32_t rank, uint32_t part)
{
    const uint32_t odd = odd_one(passes), *node = passes->pass[rank][0]->config.node_of;
    uint64_t lost = world_bit(odd);

    for (uint32_t r = 0; passes->shape->ht && r < passes->world->ranks; r++)
        if (part == EP_DEVICE_DISPATCH ? node[rank] == node[odd] && node[r] != node[odd]
                                       : node[rank] != node[odd] && node[r] == node[odd])
            lost |= world_bit(r);
    return lost;
}

/* The op is over.  What its record says of who is in the result is expected from here on, if that may be. */
static ep_status accept(struct ll_passes *passes, struct pass *pass, uint32_t part, struct ep_error *error)
{
    const uint64_t all = world_all(passes->world), may = lost_with_it(passes, pass->rank->rank, part);
    struct ep_device_record record = { 0 };
    ep_status status = world_wait(pass->rank, error);

    if (status == EP_OK)
        status = world_record(pass->rank, pass->handle, part, &record, error);
    if (status == EP_OK && all & ~record.arrived[0] & ~may)
        return ep_error_set(error, EP_VERIFY_FAILED, "rank %u: arrived is %llx, and only %llx may be missing",
                            pass->rank->rank, (unsigned long long)record.arrived[0], (unsigned long long)may);
    pass->expected = record.arrived[0];
    return status;
}

/* The last rank is back, and everything is as before. */
static ep_status join_and_run(struct ll_passes *passes, struct ep_error *error)
{
    ep_status status = world_join(passes->world, odd_one(passes), error);

    expect(passes, world_all(passes->world));
    if (status == EP_OK)
        status = ll_each_three(passes, world_all(passes->world), error);
    return status == EP_OK ? EP_OK : ep_error_prefix(error, "after its return");
}

/* ---- absent -------------------------------------------------------------------------- */

/* Its own op ends at once and says why. */
static ep_status run_detached(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status;

    pass->status = EP_DETACHED;
    status = pass_dispatch(pass, 0, error);
    if (status == EP_OK)
        status = pass_received(pass, error);
    pass->status = EP_OK;
    return status;
}

ep_status ll_case_absent(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each_three(&passes, world_all(passes.world), error);
    if (status == EP_OK)
        status = world_leave(passes.world, odd_one(&passes), error);
    if (status == EP_OK) {
        expect(&passes, others(&passes));
        status = ll_each_three(&passes, others(&passes), error);
    }
    if (status == EP_OK)
        status = ll_each(&passes, world_bit(odd_one(&passes)), run_detached, error);
    if (status == EP_OK)
        status = join_and_run(&passes, error);
    ll_close(&passes);
    return status;
}

/* ---- leaves while it is waited for --------------------------------------------------- */

static ep_status leave_soon(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    usleep(PAUSE_US);
    return world_leave(passes->world, rank, error);
}

/* What has come is as expected, and goes back. */
static ep_status check_and_combine(struct pass *pass, struct ep_error *error)
{
    ep_status status = pass_received(pass, error);

    if (status == EP_OK)
        status = pass_experts(pass, false, error);
    return status == EP_OK ? pass_combine(pass, 0, false, error) : status;
}

static ep_status leave_or_dispatch(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status;

    if (rank == odd_one(passes))
        return leave_soon(passes, rank, error);
    status = pass_dispatch(pass, 0, error);
    if (status == EP_OK)
        status = accept(passes, pass, EP_DEVICE_DISPATCH, error);
    if (status == EP_OK)
        status = check_and_combine(pass, error);
    if (status == EP_OK)
        status = accept(passes, pass, EP_DEVICE_COMBINE, error);
    return status == EP_OK ? pass_result(pass, error) : status;
}

static ep_status dispatch_only(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = pass_dispatch(pass, 0, error);

    if (status == EP_OK)
        status = pass_received(pass, error);
    return status == EP_OK ? pass_experts(pass, false, error) : status;
}

static ep_status leave_or_combine(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status;

    if (rank == odd_one(passes))
        return leave_soon(passes, rank, error);
    status = pass_combine(pass, 0, false, error);
    if (status == EP_OK)
        status = accept(passes, pass, EP_DEVICE_COMBINE, error);
    return status == EP_OK ? pass_result(pass, error) : status;
}

/* Nobody waits until the timeout for one who is known to be gone. */
static ep_status check_soon(const struct ll_passes *passes, uint64_t start, struct ep_error *error)
{
    uint64_t ms = (ep_clock_ns() - start) / EP_NS_PER_MS;

    if (ms < passes->timeout_ms / 2)
        return EP_OK;
    return ep_error_set(error, EP_VERIFY_FAILED, "the others took %llu ms to see that a rank had left",
                        (unsigned long long)ms);
}

ep_status ll_case_leaves_dispatch(const struct ll_setting *setting, const struct shape *shape,
                                  struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);
    uint64_t start = ep_clock_ns();

    if (status == EP_OK) {
        expect_to_leave(&passes);
        status = ll_each(&passes, world_all(passes.world), leave_or_dispatch, error);
    }
    if (status == EP_OK)
        status = check_soon(&passes, start, error);
    if (status == EP_OK)
        status = join_and_run(&passes, error);
    ll_close(&passes);
    return status;
}

ep_status ll_case_leaves_combine(const struct ll_setting *setting, const struct shape *shape,
                                 struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);
    uint64_t start = ep_clock_ns();

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), dispatch_only, error);
    if (status == EP_OK) {
        expect_to_leave(&passes);
        status = ll_each(&passes, world_all(passes.world), leave_or_combine, error);
    }
    if (status == EP_OK)
        status = check_soon(&passes, start, error);
    if (status == EP_OK)
        status = join_and_run(&passes, error);
    ll_close(&passes);
    return status;
}

/* ---- leaves in the middle of an op ---------------------------------------------------- */

/*
 * The rank runs its op like the others and leaves before they begin theirs, between two of their blocks'
 * beginnings, or later.  Nobody can choose which, so it is done many times.  Whichever it was, all blocks of
 * an op are to go by it: counts and rows are those of the ranks that `arrived` names, and a rank that is named
 * is in every sum.
 */
enum { LEAVES = 200, LEAVES_WITHIN_NS = 150000 };

static ep_status leave_by_chance(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    const uint64_t random = bench_hash(pass->config.seed, STREAM_PICK, rank, 0, 0);
    const uint64_t at = ep_clock_ns() + bench_below(random, LEAVES_WITHIN_NS);
    ep_status status;

    while (ep_clock_ns() < at)
        ;
    status = world_leave(passes->world, rank, error);
    return status == EP_OK ? world_wait(pass->rank, error) : status;
}

/* Was it in or not?  Its peers' results are to say the one or the other. */
static ep_status ask_record(struct ll_passes *passes, struct pass *pass, uint32_t part, bool *in,
                            struct ep_error *error)
{
    ep_status status = accept(passes, pass, part, error);

    *in = pass->expected == world_all(passes->world);
    pass->changing = !*in || passes->shape->ht; /* HT: its rows may be here, and ours not there */
    return status;
}

static ep_status dispatch_or_leave(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = pass_dispatch(pass, 0, error);
    bool in;

    if (status == EP_OK && rank == odd_one(passes))
        return leave_by_chance(passes, rank, error);
    if (status == EP_OK)
        status = ask_record(passes, pass, EP_DEVICE_DISPATCH, &in, error);
    return status == EP_OK ? pass_received(pass, error) : status;
}

static ep_status combine_or_leave(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = pass_combine(pass, 0, false, error);
    bool in = true;

    if (status == EP_OK && rank == odd_one(passes))
        return leave_by_chance(passes, rank, error);
    if (status == EP_OK)
        status = ask_record(passes, pass, EP_DEVICE_COMBINE, &in, error);
    pass->hash_only = !in; /* some sums may have it then and others not */
    if (status == EP_OK)
        status = pass_result(pass, error);
    pass->hash_only = false;
    return status;
}

static ep_status reseed(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    return pass_reseed(passes->pass[rank][0], passes->seed + 1000ull * passes->round, true, error);
}

static ep_status leave_often(struct ll_passes *passes, ll_fn before, ll_fn leave, struct ep_error *error)
{
    const uint64_t all = world_all(passes->world);
    ep_status status = EP_OK;

    for (passes->round = 1; status == EP_OK && passes->round <= LEAVES; passes->round++) {
        if (passes->round > 1)
            status = world_join(passes->world, odd_one(passes), error);
        expect(passes, all);
        if (status == EP_OK)
            status = ll_each(passes, all, reseed, error);
        if (status == EP_OK && before)
            status = ll_each(passes, all, before, error);
        if (status == EP_OK)
            status = ll_each(passes, all, leave, error);
        if (status != EP_OK)
            ep_error_prefix(error, "the %uth time", passes->round);
    }
    return status == EP_OK ? join_and_run(passes, error) : status;
}

ep_status ll_case_leaves_in_dispatch(const struct ll_setting *setting, const struct shape *shape,
                                     struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = leave_often(&passes, NULL, dispatch_or_leave, error);
    ll_close(&passes);
    return status;
}

ep_status ll_case_leaves_in_combine(const struct ll_setting *setting, const struct shape *shape,
                                    struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = leave_often(&passes, dispatch_only, combine_or_leave, error);
    ll_close(&passes);
    return status;
}

/* ---- gates and who stands in for them -------------------------------------------------- */

/*
 * HT, where nodes have three ranks or more (kernels/device_net.h): two in a row of a node may be absent, and every rank
 * that is there gets every token.  On one node there are no gates, and all of this holds as well.
 */
enum { GATE_ROUNDS = 150, ODDS_OF_ABSENT = 4, ODDS_OF_NODE = 8 };

uint64_t ll_ranks_on(const struct ll_passes *passes, uint32_t node)
{
    const uint32_t *node_of = passes->pass[0][0]->config.node_of;
    uint64_t ranks = 0;

    for (uint32_t r = 0; r < passes->world->ranks; r++)
        ranks |= node_of[r] == node ? world_bit(r) : 0;
    return ranks;
}

/* The next rank of its node, the first after the last. */
static uint32_t next_of(const struct ll_passes *passes, uint32_t rank)
{
    const uint64_t here = ll_ranks_on(passes, passes->pass[0][0]->config.node_of[rank]);
    uint32_t next = rank;

    do
        next = (next + 1) % passes->world->ranks;
    while (!(here >> next & 1));
    return next;
}

/* From *members on to these; passes of that place expect them. */
static ep_status change_members(struct ll_passes *passes, uint64_t *members, uint64_t to, uint32_t place,
                                struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t r = 0; status == EP_OK && r < passes->world->ranks; r++) {
        if (*members & ~to & world_bit(r))
            status = world_leave(passes->world, r, error);
        else if (to & ~*members & world_bit(r))
            status = world_join(passes->world, r, error);
    }
    for (uint32_t r = 0; r < passes->world->ranks; r++)
        passes->pass[r][place]->expected = to;
    *members = to;
    return status;
}

static ep_status three_without(struct ll_passes *passes, uint64_t *members, uint64_t absent, struct ep_error *error)
{
    const uint64_t to = world_all(passes->world) & ~absent;
    ep_status status = change_members(passes, members, to, 0, error);

    if (status == EP_OK)
        status = ll_each_three(passes, to, error);
    return status == EP_OK ? EP_OK : ep_error_prefix(error, "without %#llx", (unsigned long long)absent);
}

/* Each rank of the last node and the next one; then all of it, which nobody is to wait for. */
ep_status ll_case_absent_in_a_row(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);
    uint64_t members = 0, node = 0;

    if (status == EP_OK) {
        members = world_all(passes.world);
        node = ll_ranks_on(&passes, passes.pass[0][0]->config.node_of[odd_one(&passes)]);
    }
    for (uint32_t r = 0; status == EP_OK && r < passes.world->ranks; r++)
        if (node >> r & 1)
            status = three_without(&passes, &members, world_bit(r) | world_bit(next_of(&passes, r)), error);
    if (status == EP_OK)
        status = three_without(&passes, &members, node & ~world_bit(0), error);
    if (status == EP_OK)
        status = three_without(&passes, &members, 0, error);
    ll_close(&passes);
    return status;
}

static uint32_t draw(const struct ll_passes *passes, uint32_t what, uint32_t of, uint32_t below)
{
    return (uint32_t)bench_below(bench_hash(passes->seed, STREAM_PICK, passes->round, what, of), below);
}

/* Of each node all, but for two at most; or none of it, of the last ones. */
static uint64_t draw_members(const struct ll_passes *passes)
{
    uint64_t members = world_all(passes->world);

    for (uint32_t r = 0; r < passes->world->ranks; r++) {
        const uint32_t node = passes->pass[0][0]->config.node_of[r];
        const uint64_t here = ll_ranks_on(passes, node), absent = here & ~members;
        const bool node_is_gone = node > 0 && draw(passes, 0, node, ODDS_OF_NODE) == 0;

        if (node_is_gone || (__builtin_popcountll(absent) < 2 && (here & ~absent) != world_bit(r)
                             && draw(passes, 1, r, ODDS_OF_ABSENT) > 0))
            members &= ~world_bit(r);
    }
    return members;
}

static ep_status dispatch_once(struct ll_passes *passes, uint32_t rank, uint32_t place, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][place];
    ep_status status = pass_reseed(pass, passes->seed + 1000ull * passes->round + place, true, error);

    if (status == EP_OK)
        status = pass_dispatch(pass, 0, error);
    if (status == EP_OK)
        status = pass_received(pass, error);
    return status == EP_OK ? pass_experts(pass, false, error) : status;
}

static ep_status first_dispatch(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    return dispatch_once(passes, rank, 0, error);
}

static ep_status second_dispatch(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    return dispatch_once(passes, rank, 1, error);
}

/* Then the combines of both: that of the first goes the way of its dispatch. */
static ep_status second_and_combines(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    ep_status status = dispatch_once(passes, rank, 1, error);

    for (uint32_t place = 0; status == EP_OK && place < 2; place++) {
        status = pass_combine(passes->pass[rank][place], 0, false, error);
        if (status == EP_OK)
            status = pass_result(passes->pass[rank][place], error);
    }
    return status;
}

/* Who has joined after the first dispatch does not know its handle. */
static void expect_stale(struct ll_passes *passes, uint64_t ranks)
{
    for (uint32_t r = 0; r < passes->world->ranks; r++)
        passes->pass[r][0]->status = ranks >> r & 1 ? EP_STALE_HANDLE : EP_OK;
}

/* A dispatch, then one that others may have joined, and both combines. */
static ep_status two_by_chance(struct ll_passes *passes, uint64_t *members, struct ep_error *error)
{
    const uint64_t first = draw_members(passes), joined = draw(passes, 2, 0, 2) ? 0 : world_all(passes->world) & ~first;
    ep_status status = change_members(passes, members, first, 0, error);

    expect_stale(passes, 0);
    if (status == EP_OK)
        status = ll_each(passes, first, first_dispatch, error);
    if (status == EP_OK)
        status = change_members(passes, members, first | joined, 1, error);
    expect_stale(passes, joined);
    if (status == EP_OK)
        status = ll_each(passes, first | joined, second_and_combines, error);
    return status == EP_OK ? EP_OK
                           : ep_error_prefix(error, "round %u of %#llx, then %#llx", passes->round,
                                             (unsigned long long)first, (unsigned long long)(first | joined));
}

ep_status ll_case_gates_by_chance(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 2, &passes, error);
    uint64_t members = status == EP_OK ? world_all(passes.world) : 0;

    for (uint32_t i = 1; status == EP_OK && i <= GATE_ROUNDS; i++) {
        passes.round = i;
        status = two_by_chance(&passes, &members, error);
    }
    ll_close(&passes);
    return status;
}

/* ---- joins in the middle of an op ------------------------------------------------------ */

/*
 * Rank 0 dispatches while another one, the holder, still has the bank: all of its blocks have something to send, and wait for
 * that credit first.  So all of them look a second time who takes part after the last rank has joined; those that had begun did
 * not see it the first time.  Nobody can choose which, so it is done many times.  Then the holder dispatches too.  On
 * several nodes nobody joins what has begun (ll_net.cuh).
 */
enum { JOINS = 40, JOIN_WITHIN_NS = 500000, JOIN_POLL_US = 20 };

static uint32_t holder(const struct ll_passes *passes)
{
    return passes->world->ranks - 2;
}

static ep_status join_by_chance(struct ll_passes *passes, struct ep_error *error)
{
    const uint64_t number = passes->pass[0][1]->dispatched.number + 1;
    struct world_numbers from = { 0 };
    ep_status status = ll_wait_begun(&passes->world->rank[0], false, number, error);

    usleep((useconds_t)(bench_below(bench_hash(passes->seed, STREAM_PICK, passes->round, 0, 0), JOIN_WITHIN_NS) / 1000));
    if (status == EP_OK)
        status = world_next(passes->world, &from, error);
    from.ll = number;
    if (status == EP_OK)
        status = world_join_at(passes->world, odd_one(passes), &from, error);
    __atomic_store_n(&passes->joined, true, __ATOMIC_RELEASE);
    return status;
}

static ep_status join_amid(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = EP_OK;

    if (rank == odd_one(passes))
        status = join_by_chance(passes, error);
    while (rank == holder(passes) && !__atomic_load_n(&passes->joined, __ATOMIC_ACQUIRE))
        usleep(JOIN_POLL_US);
    return status == EP_OK ? pass_run(pass, 0, false, error) : status;
}

/* Two dispatches that nobody combines, then one for which the first one's credit is wanted. */
static ep_status join_once(struct ll_passes *passes, struct ep_error *error)
{
    const uint64_t all = world_all(passes->world);
    uint64_t members = all;
    ep_status status = EP_OK;

    passes->joined = false;
    for (uint32_t place = 0; status == EP_OK && place < 2; place++)
        status = change_members(passes, &members, others(passes), place, error);
    if (status == EP_OK)
        status = ll_each(passes, world_bit(odd_one(passes)), reseed, error);
    if (status == EP_OK)
        status = ll_each(passes, others(passes), first_dispatch, error);
    if (status == EP_OK)
        status = ll_each(passes, others(passes), second_dispatch, error);
    expect(passes, all);
    return status == EP_OK ? ll_each(passes, all, join_amid, error) : status;
}

ep_status ll_case_joins_in_dispatch(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 2, &passes, error);

    for (passes.round = 1; status == EP_OK && passes.round <= JOINS; passes.round++) {
        status = join_once(&passes, error);
        if (status != EP_OK)
            ep_error_prefix(error, "the %uth time", passes.round);
    }
    ll_close(&passes);
    return status;
}

/* ---- joins between ops -------------------------------------------------------------------- */

/*
 * Ranks on several nodes run op after op.  The last rank joins meanwhile, and runs what is left.  Ops of numbers below the one that
 * it joins at are without it, all others with it, at every rank; which these are is up to chance.  While this is found out and
 * told, the ranks are held, until they have come to that number.
 */
enum { BETWEEN_ROUNDS = 4, BETWEEN_OPS = 5 };

/* Of an op of this number, which is over: had it been held for the last rank, that would have joined before. */
static uint64_t members_of(struct ll_passes *passes, uint64_t number)
{
    const struct world *world = passes->world;
    const uint64_t *from = passes->shape->ht ? world->ht_from : world->from;
    const bool joined = __atomic_load_n(&passes->joined, __ATOMIC_ACQUIRE);

    return joined && from[odd_one(passes)] <= number ? world_all(world) : others(passes);
}

static ep_status run_number(struct ll_passes *passes, struct pass *pass, uint64_t number, struct ep_error *error)
{
    ep_status status = pass_reseed(pass, passes->seed + number, true, error);

    if (status == EP_OK)
        status = pass_dispatch(pass, 0, error);
    if (status == EP_OK)
        status = world_wait(pass->rank, error);
    pass->expected = members_of(passes, number);
    if (status == EP_OK)
        status = check_and_combine(pass, error);
    if (status == EP_OK)
        status = pass_result(pass, error);
    return status == EP_OK ? EP_OK : ep_error_prefix(error, "number %llu", (unsigned long long)number);
}

/* At a number up to `end`, and then while rank 0 begins it; or behind that. */
static ep_status join_held(struct ll_passes *passes, uint64_t end, struct ep_error *error)
{
    const bool ht = passes->shape->ht;
    struct world *world = passes->world;
    struct world_numbers from = { 0 };
    const uint64_t *number = ht ? &from.ht : &from.ll;
    ep_status status = ll_wait_begun(&world->rank[0], ht, end - draw(passes, 0, 0, BETWEEN_OPS), error);

    if (status == EP_OK)
        status = world_hold(world, true, error);
    if (status == EP_OK)
        status = world_next(world, &from, error);
    if (status == EP_OK && *number <= end)
        status = ll_wait_begun(&world->rank[0], ht, *number, error);
    if (status == EP_OK)
        status = world_join_at(world, odd_one(passes), &from, error);
    __atomic_store_n(&passes->joined, true, __ATOMIC_RELEASE);
    return status == EP_OK ? world_hold(world, false, error) : status;
}

static ep_status run_on(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    const bool ht = passes->shape->ht;
    uint64_t number = 0, end;
    ep_status status = world_begun(&passes->world->rank[rank], ht, &number, error);

    end = number + BETWEEN_OPS;
    if (status == EP_OK && rank == odd_one(passes)) {
        status = join_held(passes, end, error);
        number = (ht ? passes->world->ht_from : passes->world->from)[rank] - 1;
    }
    while (status == EP_OK && number < end)
        status = run_number(passes, passes->pass[rank][0], ++number, error);
    return status;
}

ep_status ll_case_joins_between(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    for (passes.round = 1; status == EP_OK && passes.round <= BETWEEN_ROUNDS; passes.round++) {
        passes.joined = false;
        status = world_leave(passes.world, odd_one(&passes), error);
        if (status == EP_OK)
            status = ll_each(&passes, world_all(passes.world), run_on, error);
        if (status != EP_OK)
            ep_error_prefix(error, "the %uth time", passes.round);
    }
    ll_close(&passes);
    return status;
}

/* ---- late ---------------------------------------------------------------------------- */

/* The op ended with a timeout: of the right rank, and when it had to.  phase: EP_WAIT_NONE, it waited for more. */
static ep_status check_blame(const struct ll_passes *passes, const struct ep_device_record *record, uint32_t phase,
                             struct ep_error *error)
{
    uint64_t ms = (record->end_ns - record->start_ns) / EP_NS_PER_MS, bound = record->timeout_ns / EP_NS_PER_MS;

    if (record->late_rank != odd_one(passes))
        return ep_error_set(error, EP_VERIFY_FAILED, "rank %u is named as late, not %u", record->late_rank,
                            odd_one(passes));
    if (phase != EP_WAIT_NONE && record->wait_phase != phase)
        return ep_error_set(error, EP_VERIFY_FAILED, "phase %u is named, not %u", record->wait_phase, phase);
    if (ms + 1 < bound || ms > bound + SLACK_MS)
        return ep_error_set(error, EP_VERIFY_FAILED, "the op took %llu ms with a timeout of %llu",
                            (unsigned long long)ms, (unsigned long long)bound);
    return EP_OK;
}

/* What an op waits for first. */
static uint32_t first_wait(const struct ll_passes *passes)
{
    return passes->shape->ht ? EP_WAIT_READY : EP_WAIT_ARRIVAL;
}

static ep_status dispatch_and_blame(struct ll_passes *passes, uint32_t rank, uint32_t phase, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status;

    pass->status = EP_TIMEOUT;
    status = pass_dispatch(pass, 0, error);
    if (status == EP_OK)
        status = pass_received(pass, error);
    pass->status = EP_OK;
    return status == EP_OK ? check_blame(passes, &pass->dispatched, phase, error) : status;
}

static ep_status dispatch_in_vain(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    return dispatch_and_blame(passes, rank, first_wait(passes), error);
}

/* The late one still has both banks: it can be sent nothing, and sends nothing. */
static ep_status dispatch_without_credit(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    return dispatch_and_blame(passes, rank, EP_WAIT_NONE, error);
}

static ep_status combine_in_vain(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status;

    pass->status = EP_TIMEOUT;
    status = pass_combine(pass, 0, false, error);
    if (status == EP_OK)
        status = pass_result(pass, error);
    pass->status = EP_OK;
    return status == EP_OK ? check_blame(passes, &pass->combined, first_wait(passes), error) : status;
}

/* Those whose dispatch failed do not combine, and say so: nobody waits for them, only to be late for them again. */
static ep_status combine_alone(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = pass_experts(pass, false, error);

    pass->expected = world_bit(rank);
    pass->changing = false;
    if (status == EP_OK)
        status = pass_combine(pass, 0, false, error);
    if (status == EP_OK)
        status = pass_result(pass, error);
    pass->expected = world_all(passes->world);
    return status;
}

/* The late one comes in the end.  In LL, all rows have come meanwhile; in HT, whatever it finds, it does not hang. */
static ep_status dispatch_late(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = pass_dispatch(pass, 0, error);

    if (passes->shape->ht)
        return status == EP_OK ? world_wait(pass->rank, error) : status;
    if (status == EP_OK)
        status = pass_received(pass, error);
    return status == EP_OK ? combine_alone(passes, rank, error) : status;
}

/* Nobody waits for it any more, nor it for anybody; they take part all the same, and are sent their rows. */
static ep_status dispatch_alone(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    passes->pass[rank][0]->expected = world_bit(rank);
    passes->pass[rank][0]->changing = true;
    return dispatch_late(passes, rank, error);
}

/* All partials have come meanwhile; in HT they are sent to who asks in time, and he did not. */
static ep_status combine_late(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = pass_combine(pass, 0, false, error);

    if (passes->shape->ht)
        return status == EP_OK ? world_wait(pass->rank, error) : status;
    return status == EP_OK ? pass_result(pass, error) : status;
}

static uint32_t late_ms(const struct ll_setting *setting, uint32_t on_gpus)
{
    return setting->late_ms ? setting->late_ms : on_gpus;
}

static ep_status wait_in_vain(struct ll_passes *passes, uint32_t timeout_ms, ll_fn in_vain, struct ep_error *error)
{
    ep_status status = world_set_timeout(passes->world, timeout_ms, error);

    return status == EP_OK ? ll_each(passes, others(passes), in_vain, error) : status;
}

static ep_status come_at_last(struct ll_passes *passes, ll_fn at_last, struct ep_error *error)
{
    ep_status status = ll_each(passes, world_bit(odd_one(passes)), at_last, error);

    if (status == EP_OK)
        status = world_set_timeout(passes->world, passes->timeout_ms, error);
    if (status != EP_OK)
        return status;
    status = ll_each_three(passes, world_all(passes->world), error);
    return status == EP_OK ? EP_OK : ep_error_prefix(error, "after the timeout");
}

static ep_status late(struct ll_passes *passes, uint32_t timeout_ms, ll_fn in_vain, ll_fn at_last,
                      struct ep_error *error)
{
    ep_status status = wait_in_vain(passes, timeout_ms, in_vain, error);

    return status == EP_OK ? come_at_last(passes, at_last, error) : status;
}

ep_status ll_case_late_dispatch(const struct ll_setting *setting, const struct shape *shape,
                                struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each_three(&passes, world_all(passes.world), error);
    if (status == EP_OK)
        status = late(&passes, late_ms(setting, SHORT_MS), dispatch_in_vain, dispatch_late, error);
    ll_close(&passes);
    return status;
}

static ep_status copy_banks(const struct ll_passes *passes, uint8_t **copy, struct ep_error *error)
{
    const struct ep_layout_map *map = &passes->world->map;
    const uint64_t bytes = map->limits.ll_banks * map->bank_bytes;

    *copy = malloc(bytes);
    if (!*copy)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a copy of banks");
    return world_get(&passes->world->rank[odd_one(passes)], map->ll, *copy, bytes, error);
}

/* Nothing was sent into banks whose credit was not given: what peers write there, but for their own credits, is as before. */
static ep_status check_banks(const struct ll_passes *passes, const uint8_t *before, struct ep_error *error)
{
    const struct ep_layout_map *map = &passes->world->map;
    uint8_t *after;
    ep_status status = copy_banks(passes, &after, error);

    for (uint32_t b = 0; status == EP_OK && b < map->limits.ll_banks; b++)
        for (uint64_t at = map->bank.counts; status == EP_OK && at < map->bank_bytes; at++)
            if (before[b * map->bank_bytes + at] != after[b * map->bank_bytes + at])
                status = ep_error_set(error, EP_VERIFY_FAILED, "byte %llu of bank %u of rank %u changed without its credit",
                                      (unsigned long long)at, b, odd_one(passes));
    free(after);
    return status;
}

ep_status ll_case_late_credit(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    uint8_t *before = NULL;
    ep_status status = ll_open(setting, shape, 2, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), first_dispatch, error);
    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), second_dispatch, error);
    if (status == EP_OK)
        status = copy_banks(&passes, &before, error);
    if (status == EP_OK)
        status = wait_in_vain(&passes, late_ms(setting, LONG_MS), dispatch_without_credit, error);
    if (status == EP_OK)
        status = check_banks(&passes, before, error);
    if (status == EP_OK)
        status = come_at_last(&passes, dispatch_alone, error);
    free(before);
    ll_close(&passes);
    return status;
}

ep_status ll_case_late_combine(const struct ll_setting *setting, const struct shape *shape,
                               struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), dispatch_only, error);
    if (status == EP_OK)
        status = late(&passes, late_ms(setting, SHORT_MS), combine_in_vain, combine_late, error);
    ll_close(&passes);
    return status;
}
