/* One pass after the other; and what all cases are made of. */
#include "ll_tests.h"

/* ---- worlds with passes -------------------------------------------------------------- */

struct each {
    struct ll_passes *passes;
    ll_fn fn;
};

static ep_status call(struct world_rank *rank, void *arg, struct ep_error *error)
{
    const struct each *each = arg;

    return each->fn(each->passes, rank->rank, error);
}

ep_status ll_each(struct ll_passes *passes, uint64_t mask, ll_fn fn, struct ep_error *error)
{
    struct each each = { passes, fn };

    return world_each(passes->world, mask, call, &each, error);
}

static ep_status open_passes(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    ep_status status = EP_OK;

    for (uint32_t p = 0; status == EP_OK && p < passes->places; p++)
        status = pass_open(&passes->world->rank[rank], p ? &passes->second : passes->shape, p, p, passes->seed + p,
                           &passes->pass[rank][p], error);
    return status;
}

ep_status ll_open(const struct ll_setting *setting, const struct shape *shape, uint32_t places,
                  struct ll_passes *passes, struct ep_error *error)
{
    struct world_options options;
    ep_status status =
        shape_options(shape, setting->ranks, setting->gpus, places, setting->timeout_ms, &options, error);

    *passes = (struct ll_passes){
        .shape = shape, .second = *shape, .places = places, .timeout_ms = setting->timeout_ms, .seed = setting->seed
    };
    passes->second.ht = shape->ht != shape->both;
    if (setting->sms)
        options.max_sms = setting->sms;
    options.served = setting->served;
    options.pcie = setting->pcie;
    if (status == EP_OK)
        status = world_open(setting->api, &options, &passes->world, error);
    if (status == EP_OK)
        status = ll_each(passes, world_all(passes->world), open_passes, error);
    return status;
}

void ll_close(struct ll_passes *passes)
{
    for (uint32_t r = 0; r < WORLD_MAX_RANKS; r++)
        for (uint32_t p = 0; p < LL_PLACES; p++)
            pass_close(passes->pass[r][p]);
    world_close(passes->world);
}

ep_status ll_three_passes(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < 3; i++) {
        status = pass_reseed(pass, passes->seed + 1000 * (3ull * passes->round + i + 1), true, error);
        if (status == EP_OK)
            status = pass_run(pass, 0, false, error);
    }
    return status;
}

ep_status ll_each_three(struct ll_passes *passes, uint64_t mask, struct ep_error *error)
{
    passes->round++;
    return ll_each(passes, mask, ll_three_passes, error);
}

/* ---- a shape ------------------------------------------------------------------------- */

static ep_status run_again(struct pass *pass, uint32_t flags, uint64_t hash, const char *what,
                           struct ep_error *error)
{
    ep_status status;

    pass->hash_only = true;
    status = pass_run(pass, flags, false, error);
    pass->hash_only = false;
    if (status != EP_OK)
        return ep_error_prefix(error, "%s", what);
    if (pass->hash != hash)
        return ep_error_set(error, EP_VERIFY_FAILED, "%s: not the same bits as the first time", what);
    return EP_OK;
}

static ep_status run_shape(struct ll_passes *passes, uint32_t rank, struct ep_error *error)
{
    struct pass *pass = passes->pass[rank][0];
    ep_status status = pass_run(pass, 0, true, error);
    uint64_t hash = pass->hash;

    if (status == EP_OK)
        status = run_again(pass, 0, hash, "again", error);
    if (status == EP_OK)
        status = run_again(pass, EP_OP_CACHED | (pass->shape->ht ? 0 : EP_OP_SEND_ONLY), hash,
                           pass->shape->ht ? "cached" : "cached, in halves", error);
    if (status == EP_OK)
        status = pass_reseed(pass, pass->config.seed + 1, false, error);
    if (status == EP_OK && (status = pass_run(pass, EP_OP_CACHED, false, error)) != EP_OK)
        return ep_error_prefix(error, "cached, with other rows");
    return status;
}

ep_status ll_case_shape(const struct ll_setting *setting, const struct shape *shape, struct ep_error *error)
{
    struct ll_passes passes;
    ep_status status = ll_open(setting, shape, 1, &passes, error);

    if (status == EP_OK)
        status = ll_each(&passes, world_all(passes.world), run_shape, error);
    ll_close(&passes);
    return status;
}
