/* Ops in other orders than dispatch, combine, dispatch, combine. */
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
