/* Ops in other orders than dispatch, combine, dispatch, combine. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "ep_clock.h"
#include "ll_tests.h"

static ep_status on_all(const struct ll_setting *setting, const struct shape *shape, uint32_t places,
                        ll_fn fn, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, places, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), fn, error);
    ll_close(&passes);
    return status;
}

/* ---- two handles --------------------------------------------------------------------- */

static ep_status check_both(struct pass *const *pass, ep_status (*check)(struct pass *, struct ep_error *),
                            struct ep_error *error)
{
    ep_status status = check(pass[0], error);

    return status == EP_OK ? check(pass[1], error) : status;
}

static ep_status run_experts(struct pass *pass, struct ep_error *error)
{
    return pass_experts(pass, false, error);
}

/* Both dispatches, then both combines, that of handle `first` first. */
static ep_status pair_of(struct pass *const *pass, uint32_t first, uint32_t flags, struct ep_error *error)
{
    const bool halves = (flags & EP_OP_SEND_ONLY) != 0;
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < 2; i++)
        status = pass_dispatch(pass[i], flags, error);
    for (uint32_t i = 0; status == EP_OK && halves && i < 2; i++)
        status = pass_complete(pass[i ^ first], error);
    if (status == EP_OK)
        status = check_both(pass, pass_received, error);
    if (status == EP_OK)
        status = check_both(pass, run_experts, error);
    for (uint32_t i = 0; status == EP_OK && i < 2; i++)
        status = pass_combine(pass[i ^ first], flags, false, error);
    for (uint32_t i = 0; status == EP_OK && halves && i < 2; i++)
        status = pass_complete(pass[i], error);
    return status == EP_OK ? check_both(pass, pass_result, error) : status;
}

static ep_status run_interleaved(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *const *pass = passes->pass[rank];
    ep_status status = pair_of(pass, 0, 0, error);

    for (uint32_t i = 0; status == EP_OK && i < 3; i++) {
        status = pass_reseed(pass[i % 2], pass[i % 2]->config.seed + 100, true, error);
        if (status == EP_OK)
            status = pair_of(pass, i % 2, 0, error);
    }
    return status;
}

static ep_status run_halves(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *const *pass = passes->pass[rank];
    ep_status status = pair_of(pass, 0, EP_OP_SEND_ONLY, error);

    return status == EP_OK ? pair_of(pass, 1, EP_OP_SEND_ONLY, error) : status;
}

/* Ranks of the first node if the rank is there, of all others if not. */
static uint64_t its_side(const struct ll_passes *passes, uint32_t rank)
{
    const uint64_t first = ll_ranks_on(passes, passes->pass[rank][0]->config.node_of[0]);

    return first & world_bit(rank) ? first : world_all(passes->world) & ~first;
}

/* The first node combines another dispatch than the others do: no sum has partials of both sides. */
static ep_status run_crossed(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *const *pass = passes->pass[rank];
    const uint64_t own = its_side(passes, rank);
    const uint32_t first = own & world_bit(0) ? 0 : 1;
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < 2; i++)
        status = pass_dispatch(pass[i], 0, error);
    if (status == EP_OK)
        status = check_both(pass, pass_received, error);
    if (status == EP_OK)
        status = check_both(pass, run_experts, error);
    for (uint32_t i = 0; i < 2; i++) {
        pass[i]->expected = own;
        if (status == EP_OK)
            status = pass_combine(pass[i ^ first], 0, false, error);
    }
    if (status == EP_OK)
        status = check_both(pass, pass_result, error);
    for (uint32_t i = 0; i < 2; i++)
        pass[i]->expected = world_all(passes->world);
    return status == EP_OK ? pair_of(pass, 0, 0, error) : status;
}

ep_status ll_case_crossed(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    return on_all(setting, shape, 2, run_crossed, error);
}

ep_status ll_case_interleaved(const struct ll_setting *setting, const struct shape *shape,
                              struct ep_error *error)
{
    return on_all(setting, shape, 2, run_interleaved, error);
}

ep_status ll_case_halves(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    return on_all(setting, shape, 2, run_halves, error);
}

/* ---- dispatches that nobody combines ------------------------------------------------- */

/* More of them than there are banks, each on a handle of its own; then the first one's is stale. */
static ep_status run_skipped(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    const uint32_t skipped = 2 * passes->world->map.limits.ll_banks + 1; /* HT: nothing is stale for that */
    ep_status status = EP_OK;

    for (pass->handle = 0; status == EP_OK && pass->handle < skipped; pass->handle++)
        status = pass_dispatch(pass, 0, error);
    pass->handle = 0;
    pass->status = EP_STALE_HANDLE;
    if (status == EP_OK)
        status = pass_combine(pass, 0, false, error);
    if (status == EP_OK)
        status = pass_result(pass, error);
    pass->status = EP_OK;
    for (uint32_t i = 0; status == EP_OK && i < 3; i++) /* on one handle, which gives its old number up */
        status = pass_dispatch(pass, 0, error);
    return status == EP_OK ? ll_three_passes(passes, rank, error) : status;
}

ep_status ll_case_skipped(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    return on_all(setting, shape, 1, run_skipped, error);
}

static ep_status run_released(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < 5; i++) {
        status = pass_dispatch(pass, 0, error);
        if (status == EP_OK)
            status = pass_received(pass, error);
        if (status == EP_OK)
            status = pass_release(pass, error);
        pass->generation++;
    }
    return status == EP_OK ? ll_three_passes(passes, rank, error) : status;
}

ep_status ll_case_released(const struct ll_setting *setting, const struct shape *shape,
                           struct ep_error *error)
{
    return on_all(setting, shape, 1, run_released, error);
}

/* ---- handles that hold no such dispatch ------------------------------------------------- */

static ep_status run_op(struct pass *pass, const struct ep_op *op, ep_status expected, const char *what, struct ep_error *error)
{
    const uint32_t part = op->kind == EP_OP_DISPATCH ? EP_DEVICE_DISPATCH : EP_DEVICE_COMBINE;
    struct ep_device_record record;
    ep_status status = world_run(pass->rank, op, error);

    if (status == EP_OK)
        status = world_wait(pass->rank, error);
    if (status == EP_OK)
        status = world_record(pass->rank, op->handle, part, &record, error);
    if (status == EP_OK && record.status != (int32_t)expected)
        return ep_error_set(error, EP_VERIFY_FAILED, "%s ended with %s, not %s", what,
                            ep_status_name((ep_status)record.status), ep_status_name(expected));
    return status;
}

/* Dispatches on so many handles after the pass's own. */
static ep_status dispatch_others(struct pass *pass, uint32_t n, struct ep_error *error)
{
    const uint32_t own = pass->handle;
    ep_status status = EP_OK;

    for (uint32_t i = 1; status == EP_OK && i <= n; i++) {
        pass->handle = own + i;
        status = pass_dispatch(pass, 0, error);
    }
    if (status == EP_OK) /* rows are the same ones for all */
        status = pass_received(pass, error);
    pass->handle = own;
    return status == EP_OK ? run_experts(pass, error) : status;
}

/* As if of another dispatch: nothing comes of it, and the right one goes on to be combined. */
static ep_status combine_others(struct pass *pass, struct ep_error *error)
{
    struct ep_op op = pass_combine_op(pass, 0, false);
    ep_status status;

    op.generation++;
    status = run_op(pass, &op, EP_STALE_HANDLE, "a combine of another generation", error);
    op = pass_combine_op(pass, 0, false);
    op.tokens--;
    if (status == EP_OK)
        status = run_op(pass, &op, EP_STALE_HANDLE, "a combine of fewer tokens", error);
    op = pass_combine_op(pass, 0, false);
    op.layout = op.mode == EP_MODE_HT ? EP_LAYOUT_FLAT : EP_LAYOUT_RANK_MAJOR;
    if (status == EP_OK)
        status = run_op(pass, &op, EP_STALE_HANDLE, "a combine of another layout", error);
    if (status == EP_OK)
        status = pass_combine(pass, 0, false, error);
    return status == EP_OK ? pass_result(pass, error) : status;
}

/* The last bank that a handle can have, and the one after that. */
static ep_status combine_old(struct pass *pass, struct ep_error *error)
{
    const uint32_t banks = pass->rank->world->map.limits.ll_banks;
    const struct ep_op combine = pass_combine_op(pass, 0, false);
    ep_status status = pass_dispatch(pass, 0, error);

    if (status == EP_OK)
        status = dispatch_others(pass, banks - 1, error);
    if (status == EP_OK)
        status = pass_combine(pass, 0, false, error);
    if (status == EP_OK)
        status = pass_result(pass, error);
    if (status == EP_OK) /* LL alone: HT has no second one */
        status = run_op(pass, &combine, EP_STALE_HANDLE, "a second combine", error);
    if (status == EP_OK)
        status = pass_dispatch(pass, 0, error);
    if (status == EP_OK)
        status = dispatch_others(pass, banks, error);
    if (status == EP_OK)
        status = run_op(pass, &combine, EP_STALE_HANDLE, "a combine of a dispatch whose bank another one has", error);
    return status;
}

/* The second half of a dispatch, whose bank another one has by now; or whose handle. */
static ep_status complete_old(struct pass *pass, struct ep_error *error)
{
    const uint32_t banks = pass->rank->world->map.limits.ll_banks;
    struct ep_op complete = pass_dispatch_op(pass, 0);
    ep_status status = pass_dispatch(pass, EP_OP_SEND_ONLY, error);

    complete.kind = EP_OP_COMPLETE;
    if (status == EP_OK)
        status = dispatch_others(pass, banks, error);
    if (status == EP_OK)
        status = run_op(pass, &complete, EP_STALE_HANDLE, "the half of a dispatch whose bank another one has", error);
    if (status == EP_OK)
        status = pass_dispatch(pass, EP_OP_SEND_ONLY, error);
    pass->generation++;
    if (status == EP_OK)
        status = pass_dispatch(pass, 0, error);
    return status == EP_OK ? run_op(pass, &complete, EP_STALE_HANDLE, "the half of a dispatch whose handle another one has", error)
                           : status;
}

/* The number of the last dispatch, as its bank is released. */
static ep_status check_released(struct pass *pass, uint64_t before, const char *what, struct ep_error *error)
{
    const struct world_rank *own = pass->rank;
    uint64_t number, released[EP_MAX_LL_BANKS];
    ep_status status = own->world->api->read(own->device, &number, &own->state->number, sizeof number, NULL, error);

    number -= before;
    if (status == EP_OK)
        status = own->world->api->read(own->device, released, own->state->released, sizeof released, NULL, error);
    if (status == EP_OK && released[number % own->world->map.limits.ll_banks] != number)
        return ep_error_set(error, EP_VERIFY_FAILED, "%s does not give its bank back", what);
    return status;
}

static ep_status give_back(struct pass *pass, struct ep_error *error)
{
    ep_status status = pass_run(pass, 0, false, error);

    if (status == EP_OK)
        status = check_released(pass, 0, "a combine", error);
    for (uint32_t i = 0; status == EP_OK && i < 2; i++)
        status = pass_dispatch(pass, 0, error);
    if (status == EP_OK)
        status = pass_received(pass, error);
    if (status == EP_OK)
        status = check_released(pass, 1, "a dispatch on the handle of the one before", error);
    return status;
}

/* A release of another generation is none. */
static ep_status release(struct pass *pass, struct ep_error *error)
{
    const struct ep_op combine = pass_combine_op(pass, 0, false);
    ep_status status = pass_dispatch(pass, 0, error);

    pass->generation++;
    if (status == EP_OK)
        status = pass_release(pass, error);
    pass->generation--;
    if (status == EP_OK)
        status = pass_received(pass, error);
    if (status == EP_OK)
        status = run_experts(pass, error);
    if (status == EP_OK)
        status = pass_combine(pass, 0, false, error);
    if (status == EP_OK)
        status = pass_result(pass, error);
    if (status == EP_OK)
        status = pass_dispatch(pass, 0, error);
    if (status == EP_OK)
        status = pass_release(pass, error);
    return status == EP_OK ? run_op(pass, &combine, EP_STALE_HANDLE, "a combine of a released handle", error) : status;
}

/* A dispatch that failed. */
static ep_status combine_failed(struct pass *pass, struct ep_error *error)
{
    struct ep_op dispatch = pass_dispatch_op(pass, 0), combine = pass_combine_op(pass, 0, false);
    ep_status status;

    dispatch.out.bytes = dispatch.out.bytes / 16 / pass->shape->hidden * 16; /* not a row */
    status = run_op(pass, &dispatch, EP_OVERFLOW, "a dispatch without room", error);
    return status == EP_OK ? run_op(pass, &combine, EP_STALE_HANDLE, "a combine of a dispatch that failed", error) : status;
}

/* The routing that is to be used again; it stays what it is. */
static ep_status dispatch_stale(struct pass *pass, struct ep_error *error)
{
    struct ep_op op = pass_dispatch_op(pass, EP_OP_CACHED);
    ep_status status = pass_run(pass, 0, false, error);

    op.generation++;
    if (status == EP_OK)
        status = run_op(pass, &op, EP_STALE_HANDLE, "a dispatch with the routing of another generation", error);
    op = pass_dispatch_op(pass, EP_OP_CACHED);
    op.tokens--;
    if (status == EP_OK)
        status = run_op(pass, &op, EP_STALE_HANDLE, "a dispatch with the routing of more tokens", error);
    if (status == EP_OK)
        status = pass_combine(pass, 0, false, error);
    return status == EP_OK ? pass_result(pass, error) : status;
}

static ep_status run_stale(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    const bool ht = pass->shape->ht;
    ep_status status = pass_dispatch(pass, 0, error);

    if (status == EP_OK)
        status = pass_received(pass, error);
    if (status == EP_OK)
        status = run_experts(pass, error);
    if (status == EP_OK)
        status = combine_others(pass, error);
    if (status == EP_OK)
        status = ht ? dispatch_stale(pass, error) : combine_old(pass, error);
    if (status == EP_OK && !ht)
        status = complete_old(pass, error);
    if (status == EP_OK && !ht)
        status = give_back(pass, error);
    if (status == EP_OK && !ht)
        status = release(pass, error);
    if (status == EP_OK && !ht && pass->shape->layout == EP_LAYOUT_PACKED)
        status = combine_failed(pass, error);
    return status == EP_OK ? ll_three_passes(passes, rank, error) : status;
}

ep_status ll_case_stale(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    return on_all(setting, shape, 1, run_stale, error);
}

/* A handle that is released is combined by nobody: the others' combines are without its rank, and do not wait for it. */
static ep_status release_or_combine(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    const uint32_t odd = passes->world->ranks - 1;
    ep_status status = pass_dispatch(pass, 0, error);

    if (status == EP_OK)
        status = pass_received(pass, error);
    if (status == EP_OK && rank == odd)
        return pass_release(pass, error);
    if (status == EP_OK)
        status = run_experts(pass, error);
    pass->expected &= ~world_bit(odd);
    if (status == EP_OK)
        status = pass_combine(pass, 0, false, error);
    if (status == EP_OK)
        status = pass_result(pass, error);
    pass->expected |= world_bit(odd);
    return status;
}

ep_status ll_case_released_by_one(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    const uint64_t start = ep_clock_ns();
    ep_status status = on_all(setting, shape, 1, release_or_combine, error);

    if (status == EP_OK && (ep_clock_ns() - start) / EP_NS_PER_MS > setting->timeout_ms / 2)
        return ep_error_set(error, EP_VERIFY_FAILED, "a rank that has released its handle is waited for");
    return status;
}

/* ---- a rank that is behind ------------------------------------------------------------- */

/* The last dispatch of the mode that a rank has begun. */
static ep_status read_begun(struct world_rank *rank, bool ht, uint64_t *begun, struct ep_error *error)
{
    const uint64_t *at = ht ? &rank->state->ht_begun : &rank->state->begun;

    return rank->world->api->read(rank->device, begun, at, sizeof *begun, NULL, error);
}

/* Until `peer` has begun a dispatch of the mode after number `last`. */
static ep_status wait_ahead(struct world_rank *peer, bool ht, uint64_t last, uint64_t until_ns, struct ep_error *error)
{
    uint64_t begun = 0;
    ep_status status;

    while ((status = read_begun(peer, ht, &begun, error)) == EP_OK && begun <= last)
        if (ep_clock_ns() > until_ns)
            return ep_error_set(error, EP_VERIFY_FAILED, "rank %u has not begun its next dispatch", peer->rank);
    return status;
}

/* Until all others have begun the dispatch that comes next. */
static ep_status fall_behind(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct world *world = passes->world;
    const bool ht = passes->pass[rank][passes->places - 1]->shape->ht;
    const uint64_t until_ns = ep_clock_ns() + passes->timeout_ms * EP_NS_PER_MS;
    uint64_t last;
    ep_status status = read_begun(&world->rank[rank], ht, &last, error);

    for (uint32_t r = 0; status == EP_OK && r < world->ranks; r++)
        if (r != rank)
            status = wait_ahead(&world->rank[r], ht, last, until_ns, error);
    return status;
}

static ep_status run_behind_at(struct ll_passes *passes, uint32_t rank, bool is_behind, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = pass_dispatch(pass, 0, error);

    if (status == EP_OK)
        status = pass_received(pass, error);
    if (status == EP_OK)
        status = pass_experts(pass, false, error);
    if (status == EP_OK && is_behind)
        status = fall_behind(passes, rank, error);
    if (status == EP_OK)
        status = pass_combine(pass, 0, false, error);
    return status == EP_OK ? pass_result(pass, error) : status;
}

/*
 * Each rank in turn is late with its combine: its peers, to whom no row has gone, need not wait for that, and when it comes,
 * their next dispatches, which may be of the other mode, wait for its own.  Where ranks share a GPU, it has to find room
 * beside them.
 */
static ep_status run_behind(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t late = 0; status == EP_OK && late < passes->world->ranks; late++) {
        status = run_behind_at(passes, rank, rank == late, error);
        if (status == EP_OK && passes->places > 1)
            status = pass_run(passes->pass[rank][1], 0, false, error);
    }
    return status == EP_OK ? ll_three_passes(passes, rank, error) : status;
}

ep_status ll_case_behind(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    return on_all(setting, shape, shape->both ? 2 : 1, run_behind, error);
}

/* ---- two groups on the same GPUs -------------------------------------------------------- */

enum { GROUPS = 2, GROUP_ROUNDS = 5 };

struct group {
    struct shape shape;
    struct ll_passes passes;
    pthread_t thread;
    ep_status status;
    struct ep_error error;
};

static void *run_group(void *arg)
{
    struct group *group = arg;

    group->error = (struct ep_error)EP_ERROR_INIT;
    for (uint32_t i = 0; group->status == EP_OK && i < GROUP_ROUNDS; i++)
        group->status = ll_each_three(&group->passes, world_all(group->passes.world), &group->error);
    return NULL;
}

static void run_groups(struct group *groups)
{
    for (uint32_t g = 0; g < GROUPS; g++)
        if (pthread_create(&groups[g].thread, NULL, run_group, &groups[g]) != 0) {
            fprintf(stderr, "no thread for a group\n");
            _exit(1);
        }
    for (uint32_t g = 0; g < GROUPS; g++)
        pthread_join(groups[g].thread, NULL);
}

/* Of each GPU a group has its part. */
static ep_status open_group(const struct ll_setting *setting, struct group *group, struct ep_error *error)
{
    const uint32_t sharing = (setting->ranks + setting->gpus - 1) / setting->gpus;
    struct ll_setting part = *setting;
    struct ep_cuda_device device;
    ep_status status = setting->api->device_info(0, &device, error);

    part.sms = device.sms / (GROUPS * sharing);
    if (part.sms == 0 || (setting->sms && setting->sms < part.sms))
        part.sms = setting->sms ? setting->sms : 1;
    return status == EP_OK ? ll_open(&part, &group->shape, 1, &group->passes, error) : status;
}

/* One has HT ops while the other one has those of LL, and in whatever order they come to each GPU, all of a rank's blocks
 * find room. */
ep_status ll_case_two_groups(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct group *groups = calloc(GROUPS, sizeof *groups);
    ep_status status = EP_OK;

    if (!groups)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for groups");
    for (uint32_t g = 0; status == EP_OK && g < GROUPS; g++) {
        groups[g].shape = *shape;
        groups[g].shape.ht = g == 0;
        status = open_group(setting, &groups[g], error);
    }
    if (status == EP_OK)
        run_groups(groups);
    for (uint32_t g = 0; status == EP_OK && g < GROUPS; g++)
        if (groups[g].status != EP_OK)
            status = ep_error_set(error, groups[g].status, "group %u: %.320s", g, groups[g].error.text);
    for (uint32_t g = 0; g < GROUPS; g++)
        ll_close(&groups[g].passes);
    free(groups);
    return status;
}

/* ---- outputs ------------------------------------------------------------------------- */

/* One row less than must come; with none to come, too little is enough. */
static ep_status run_overflow(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = pass_run(pass, 0, false, error);
    uint64_t rows = pass->plan.positions;

    if (status != EP_OK)
        return status;
    pass->out_rows = rows > 1 ? rows - 1 : 0;
    pass->status = pass->out_rows ? EP_OVERFLOW : EP_OK;
    status = pass_dispatch(pass, 0, error);
    if (status == EP_OK)
        status = pass_received(pass, error);
    if (status == EP_OK && pass->out_rows && pass->dispatched.rows_needed != rows)
        return ep_error_set(error, EP_VERIFY_FAILED, "rows_needed is %llu, must be %llu",
                            (unsigned long long)pass->dispatched.rows_needed, (unsigned long long)rows);
    pass->out_rows = 0;
    pass->status = EP_OK;
    return status == EP_OK ? ll_three_passes(passes, rank, error) : status;
}

ep_status ll_case_overflow(const struct ll_setting *setting, const struct shape *shape,
                           struct ep_error *error)
{
    return on_all(setting, shape, 1, run_overflow, error);
}
