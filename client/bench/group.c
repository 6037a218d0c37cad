#include "group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ep/v1/admin.pb-c.h"
#include "ep_clock.h"
#include "ep_address.h"
#include "ep_rpc.h"

enum { CALL_MS = 10000, FORM_MS = 60000 };

struct group_link {
    struct ep_rpc *rpc;
    struct ep_rpc_channel *channel;
};

ep_status group_link_open(const char *server, struct group_link **out, struct ep_error *error)
{
    char fallback[EP_ADDRESS_MAX];
    const char *target = server[0] ? server : ep_address_default(fallback, sizeof fallback);
    struct group_link *link = calloc(1, sizeof *link);

    if (!link)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a connection");

    ep_status status = ep_rpc_open(NULL, &link->rpc, error);

    if (status == EP_OK)
        status = ep_rpc_channel_open(link->rpc, target, NULL, 0, &link->channel, error);
    if (status != EP_OK) {
        group_link_close(link);
        return status;
    }
    *out = link;
    return EP_OK;
}

void group_link_close(struct group_link *link)
{
    if (!link)
        return;
    if (link->channel)
        ep_rpc_channel_close(link->channel);
    if (link->rpc)
        ep_rpc_close(link->rpc);
    free(link);
}

static ep_status call(struct group_link *link, const char *method, const ProtobufCMessage *request,
                      ProtobufCMessage **reply, struct ep_error *error)
{
    return ep_rpc_unary(link->channel, &ep__v1__admin__descriptor, method, NULL, 0, request, CALL_MS, reply,
                        error);
}

/* ---- the node ---------------------------------------------------------------------------- */

static enum bench_backend backend_of(Ep__V1__Backend backend)
{
    return backend == EP__V1__BACKEND__BACKEND_CUDA ? BENCH_BACKEND_CUDA : BENCH_BACKEND_HOST;
}

static ep_status get_node(struct group_link *link, Ep__V1__NodeInfo **node, struct ep_error *error)
{
    Ep__V1__GetNodeRequest request = EP__V1__GET_NODE_REQUEST__INIT;

    return call(link, "GetNode", &request.base, (ProtobufCMessage **)node, error);
}

ep_status group_node_backend(struct group_link *link, enum bench_backend *backend, struct ep_error *error)
{
    Ep__V1__NodeInfo *node = NULL;
    ep_status status = get_node(link, &node, error);

    if (status != EP_OK)
        return status;
    *backend = node->n_devices > 0 ? backend_of(node->devices[0]->backend) : BENCH_BACKEND_HOST;
    ep__v1__node_info__free_unpacked(node, NULL);
    return EP_OK;
}

/* ---- a group of our own ------------------------------------------------------------------- */

void group_needs_of(const struct bench_config *config, struct group_needs *needs)
{
    *needs = (struct group_needs){ 0 };
    for (uint32_t i = 0; i < config->n_cases; i++) {
        const struct bench_case *of = &config->cases[i];
        const struct bench_dtype_info *dtype = &bench_dtypes[of->dtype];
        uint32_t *most = of->mode == EP_MODE_LL ? &needs->ll_max_tokens : &needs->ht_max_tokens;

        needs->ll = needs->ll || of->mode == EP_MODE_LL;
        needs->ht = needs->ht || of->mode == EP_MODE_HT;
        needs->dtypes |= 1u << dtype->input | 1u << dtype->wire | 1u << dtype->combine;
        if (of->tokens > *most)
            *most = of->tokens;
    }
    if (needs->ll && needs->ll_max_tokens == 0)
        needs->ll_max_tokens = 1;
    if (needs->ht && needs->ht_max_tokens == 0)
        needs->ht_max_tokens = 1;
}

static void fill_spec(const struct bench_config *config, const struct group_needs *needs,
                      Ep__V1__GroupSpec *spec, Ep__V1__Mode *modes, Ep__V1__Dtype *dtypes)
{
    spec->ranks = config->ranks;
    spec->experts = config->experts;
    spec->hidden = config->hidden;
    spec->top_k = config->top_k;
    spec->modes = modes;
    if (needs->ll)
        modes[spec->n_modes++] = EP__V1__MODE__MODE_LL;
    if (needs->ht)
        modes[spec->n_modes++] = EP__V1__MODE__MODE_HT;
    spec->dtypes = dtypes;
    for (int dtype = EP_BF16; dtype <= EP_FP8_E4M3; dtype++)
        if (needs->dtypes & 1u << dtype)
            dtypes[spec->n_dtypes++] = (Ep__V1__Dtype)dtype;
    spec->ll_max_tokens = needs->ll_max_tokens;
    spec->ht_max_tokens = needs->ht_max_tokens;
    spec->arena_bytes = needs->arena_bytes;
    spec->timeout_ms = config->timeout_ms;
}

static ep_status get(struct group_link *link, const char *name, Ep__V1__Group **group, struct ep_error *error)
{
    Ep__V1__GetGroupRequest request = EP__V1__GET_GROUP_REQUEST__INIT;

    request.name = (char *)name;
    return call(link, "GetGroup", &request.base, (ProtobufCMessage **)group, error);
}

static ep_status wait_ready(struct group_link *link, const char *name, struct ep_error *error)
{
    uint64_t deadline = ep_clock_ns() + FORM_MS * EP_NS_PER_MS;

    for (;;) {
        Ep__V1__Group *group = NULL;
        ep_status status = get(link, name, &group, error);
        Ep__V1__Phase phase;

        if (status != EP_OK)
            return status;
        phase = group->status ? group->status->phase : EP__V1__PHASE__PHASE_PENDING;
        if (phase == EP__V1__PHASE__PHASE_FAILED)
            status = ep_error_set(error, EP_FAILED_PRECONDITION, "group %s cannot be formed: %s", name,
                                  group->status->reason);
        ep__v1__group__free_unpacked(group, NULL);
        if (phase == EP__V1__PHASE__PHASE_READY || status != EP_OK)
            return status;
        if (ep_clock_ns() > deadline)
            return ep_error_set(error, EP_DEADLINE_EXCEEDED, "group %s is not ready after %d ms", name,
                                FORM_MS);
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    }
}

ep_status group_create(struct group_link *link, const struct bench_config *config,
                       const struct group_needs *needs, struct ep_error *error)
{
    Ep__V1__CreateGroupRequest request = EP__V1__CREATE_GROUP_REQUEST__INIT;
    Ep__V1__GroupSpec spec = EP__V1__GROUP_SPEC__INIT;
    Ep__V1__Mode modes[2];
    Ep__V1__Dtype dtypes[EP_FP8_E4M3 + 1];
    ProtobufCMessage *reply = NULL;
    ep_status status;

    fill_spec(config, needs, &spec, modes, dtypes);
    request.name = (char *)config->group;
    request.spec = &spec;
    status = call(link, "CreateGroup", &request.base, &reply, error);
    if (status != EP_OK)
        return status;
    protobuf_c_message_free_unpacked(reply, NULL);
    status = wait_ready(link, config->group, error);
    if (status != EP_OK) {
        struct ep_error ignored = EP_ERROR_INIT;

        group_delete(link, config->group, &ignored);
    }
    return status;
}

ep_status group_delete(struct group_link *link, const char *name, struct ep_error *error)
{
    Ep__V1__DeleteGroupRequest request = EP__V1__DELETE_GROUP_REQUEST__INIT;
    ProtobufCMessage *reply = NULL;
    ep_status status;

    request.name = (char *)name;
    request.force = true;
    status = call(link, "DeleteGroup", &request.base, &reply, error);
    if (status == EP_OK)
        protobuf_c_message_free_unpacked(reply, NULL);
    return status;
}

/* ---- a group that is there ------------------------------------------------------------------ */

static ep_status adopt(uint32_t *value, uint32_t has, const char *flag, const char *group,
                       struct ep_error *error)
{
    if (*value != 0 && *value != has)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--%s %u: group %s has %u", flag, *value, group, has);
    *value = has;
    return EP_OK;
}

static bool has_mode(const Ep__V1__GroupSpec *spec, ep_mode mode)
{
    for (size_t i = 0; i < spec->n_modes; i++)
        if (spec->modes[i] == (Ep__V1__Mode)mode)
            return true;
    return false;
}

static ep_status fit_cases(struct bench_config *config, const Ep__V1__GroupSpec *spec, struct ep_error *error)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < config->n_cases; i++) {
        struct bench_case of = config->cases[i];
        uint32_t most = of.mode == EP_MODE_LL ? spec->ll_max_tokens : spec->ht_max_tokens;
        bool mode_fits = has_mode(spec, of.mode);

        if (!mode_fits && config->modes_given)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "--modes %s: group %s does not have it",
                                bench_mode_name(of.mode), config->group);
        if (mode_fits && of.tokens > most && config->tokens_given)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "--tokens %u: group %s takes at most %u with %s",
                                of.tokens, config->group, most, bench_mode_name(of.mode));
        if (mode_fits && of.tokens <= most)
            config->cases[kept++] = of;
    }
    config->n_cases = kept;
    if (kept == 0)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--group %s: it takes none of the cases",
                            config->group);
    return EP_OK;
}

static ep_status check_dtypes(const struct bench_config *config, const Ep__V1__GroupSpec *spec,
                              uint32_t wanted, struct ep_error *error)
{
    static const char *const names[] = { "", "bf16", "fp16", "fp32", "fp8" };

    for (size_t i = 0; i < spec->n_dtypes; i++)
        wanted &= ~(1u << spec->dtypes[i]);
    for (uint32_t dtype = EP_BF16; dtype <= EP_FP8_E4M3; dtype++)
        if (wanted & 1u << dtype)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "--dtypes: group %s does not carry %s",
                                config->group, names[dtype]);
    return EP_OK;
}

static ep_status adopt_placement(struct bench_config *config, const Ep__V1__Placement *placement,
                                 struct ep_error *error)
{
    if (!placement || placement->strategy != EP__V1__PLACEMENT_STRATEGY__PLACEMENT_STRATEGY_EXPLICIT)
        return EP_OK;
    if (placement->n_homes > BENCH_MAX_HOMES)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "--group %s: its placement has %zu homes, at most %d are possible", config->group,
                            placement->n_homes, BENCH_MAX_HOMES);
    for (size_t i = 0; i < placement->n_homes; i++)
        config->homes[i] = (struct ep_ref_home){ placement->homes[i]->expert, placement->homes[i]->rank };
    config->n_homes = (uint32_t)placement->n_homes;
    return EP_OK;
}

static ep_status adopt_backend(struct bench_config *config, enum bench_backend has, struct ep_error *error)
{
    if (config->backend != BENCH_BACKEND_AUTO && config->backend != has)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "--backend %s: group %s is on %s",
                            bench_backends[config->backend], config->group, bench_backends[has]);
    config->backend = has;
    return EP_OK;
}

static ep_status adopt_spec(struct bench_config *config, const Ep__V1__GroupSpec *spec,
                            struct ep_error *error)
{
    struct group_needs needs;
    ep_status status;

    if ((status = adopt(&config->ranks, spec->ranks, "ranks", config->group, error)) != EP_OK ||
        (status = adopt(&config->experts, spec->experts, "experts", config->group, error)) != EP_OK ||
        (status = adopt(&config->hidden, spec->hidden, "hidden", config->group, error)) != EP_OK ||
        (status = adopt(&config->top_k, spec->top_k, "top-k", config->group, error)) != EP_OK ||
        (status = adopt_backend(config, backend_of(spec->backend), error)) != EP_OK)
        return status;
    if (config->ranks > BENCH_MAX_RANKS)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "--group %s: it has %u ranks, at most %d are possible", config->group,
                            config->ranks, BENCH_MAX_RANKS);
    status = adopt_placement(config, spec->placement, error);
    if (status != EP_OK)
        return status;
    config->timeout_ms = spec->timeout_ms ? spec->timeout_ms : config->timeout_ms;
    if (config->follow) /* they must fit what the group is at each time: its workers see to that */
        return EP_OK;
    status = fit_cases(config, spec, error);
    if (status != EP_OK)
        return status;
    group_needs_of(config, &needs);
    return check_dtypes(config, spec, needs.dtypes, error);
}

ep_status group_adopt(struct group_link *link, struct bench_config *config, struct ep_error *error)
{
    Ep__V1__Group *group = NULL;
    ep_status status = get(link, config->group, &group, error);

    if (status != EP_OK)
        return status;
    if (!group->spec)
        status = ep_error_set(error, EP_PROTOCOL, "group %s came without a spec", config->group);
    else
        status = adopt_spec(config, group->spec, error);
    ep__v1__group__free_unpacked(group, NULL);
    return status;
}

/* ---- whose ranks are where ------------------------------------------------------------------- */

static ep_status get_node_of(const char *server, Ep__V1__NodeInfo **node, struct ep_error *error)
{
    struct group_link *link;
    ep_status status = group_link_open(server, &link, error);

    if (status != EP_OK)
        return status;
    status = get_node(link, node, error);
    group_link_close(link);
    return status;
}

/* The ranks of that server's node that no server before it has. */
static ep_status claim_ranks(struct bench_config *config, uint32_t server, const Ep__V1__GroupStatus *status,
                             bool *found, struct ep_error *error)
{
    Ep__V1__NodeInfo *node = NULL;

    if (get_node_of(config->server[server], &node, error) != EP_OK)
        return error->status;
    for (size_t i = 0; i < status->n_ranks; i++) {
        const Ep__V1__RankStatus *rank = status->ranks[i];

        if (rank->rank >= config->ranks || found[rank->rank] || strcmp(rank->node, node->name) != 0)
            continue;
        config->server_of[rank->rank] = (uint8_t)server;
        found[rank->rank] = true;
    }
    ep__v1__node_info__free_unpacked(node, NULL);
    return EP_OK;
}

static ep_status check_found(const struct bench_config *config, const Ep__V1__GroupStatus *status, const bool *found,
                             struct ep_error *error)
{
    for (size_t i = 0; i < status->n_ranks; i++) {
        const Ep__V1__RankStatus *rank = status->ranks[i];

        if (rank->rank < config->ranks && !found[rank->rank])
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "--server: rank %u of group %s is on node %s, and no server of that node was given",
                                rank->rank, config->group, rank->node);
    }
    return EP_OK;
}

/* A node has the number of the first rank that is there. */
static void number_nodes(struct bench_config *config, const Ep__V1__GroupStatus *status)
{
    for (size_t i = 0; i < status->n_ranks; i++) {
        size_t first = 0;

        while (strcmp(status->ranks[first]->node, status->ranks[i]->node) != 0)
            first++;
        if (status->ranks[i]->rank < config->ranks)
            config->node_of[status->ranks[i]->rank] = (uint32_t)first;
    }
}

static ep_status find_servers(struct bench_config *config, const Ep__V1__GroupStatus *status, struct ep_error *error)
{
    const uint32_t servers = config->servers ? config->servers : 1;
    bool found[BENCH_MAX_RANKS] = { false };

    number_nodes(config, status);
    for (uint32_t i = 0; i < servers; i++)
        if (claim_ranks(config, i, status, found, error) != EP_OK)
            return error->status;
    return check_found(config, status, found, error);
}

ep_status group_find_servers(struct group_link *link, struct bench_config *config, struct ep_error *error)
{
    Ep__V1__Group *group = NULL;
    ep_status status = get(link, config->group, &group, error);

    if (status != EP_OK)
        return status;
    if (!group->status || group->status->n_ranks != config->ranks)
        status = ep_error_set(error, EP_PROTOCOL, "group %s came without the status of its %u ranks", config->group,
                              config->ranks);
    else
        status = find_servers(config, group->status, error);
    ep__v1__group__free_unpacked(group, NULL);
    return status;
}

/* ---- a group that changes ---------------------------------------------------------------------- */

static ep_status view_of(const Ep__V1__GroupStatus *status, struct group_view *view, struct ep_error *error)
{
    *view = (struct group_view){ .epoch = status->epoch, .ranks = (uint32_t)status->n_ranks };
    for (size_t i = 0; i < status->n_ranks; i++) {
        const Ep__V1__RankStatus *rank = status->ranks[i];

        if (status->n_ranks > BENCH_MAX_RANKS || rank->rank >= status->n_ranks)
            return ep_error_set(error, EP_UNIMPLEMENTED, "a rank %u of %zu: at most %d ranks are possible", rank->rank,
                                status->n_ranks, BENCH_MAX_RANKS);
        snprintf(view->node[rank->rank], sizeof view->node[0], "%s", rank->node);
        view->expected[rank->rank] = rank->state == EP__V1__RANK_STATE__RANK_STATE_EXPECTED;
    }
    return EP_OK;
}

ep_status group_look(struct group_link *link, const char *name, struct group_view *view, struct ep_error *error)
{
    Ep__V1__Group *group = NULL;
    ep_status status = get(link, name, &group, error);

    if (status != EP_OK)
        return status;
    status = group->status ? view_of(group->status, view, error)
                           : ep_error_set(error, EP_PROTOCOL, "group %s came without a status", name);
    ep__v1__group__free_unpacked(group, NULL);
    return status;
}

ep_status group_node_name(const char *server, char *name, size_t size, struct ep_error *error)
{
    Ep__V1__NodeInfo *node = NULL;

    if (get_node_of(server, &node, error) != EP_OK)
        return error->status;
    snprintf(name, size, "%s", node->name);
    ep__v1__node_info__free_unpacked(node, NULL);
    return EP_OK;
}

/* ---- timing ---------------------------------------------------------------------------------- */

ep_status group_time_rpc(struct group_link *link, uint32_t n, double *us, struct ep_error *error)
{
    Ep__V1__GetVersionRequest request = EP__V1__GET_VERSION_REQUEST__INIT;
    ep_status status = EP_OK;

    for (uint32_t i = 0; status == EP_OK && i < n; i++) {
        ProtobufCMessage *reply = NULL;
        uint64_t start = ep_clock_ns();

        status = call(link, "GetVersion", &request.base, &reply, error);
        us[i] = (double)(ep_clock_ns() - start) / 1e3;
        if (status == EP_OK)
            protobuf_c_message_free_unpacked(reply, NULL);
    }
    return status;
}
