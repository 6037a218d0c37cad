/*
 * The cuda backend: the states of the ranks (device_state.h), each on its rank's GPU.
 *
 * Workers run the kernels, or the server does for them, at any time and without asking.  What has to be said
 * to these is who takes part: rank r does in every number n >= from[r], and every rank's state has a from[] of
 * its own, which running kernels look at again while they wait.  So
 *
 *   leave  is one word in each state, EP_DEVICE_NEVER, and in its own all of them: to who has left, all are absent;
 *   join   needs a number that nobody has begun: a kernel that began it before it saw from[r] would
 *          neither send to r nor wait for it, while r waits for that kernel.  Dekker, with the kernels:
 *              kernel: begun = n; fence; look at from[]
 *              here:   from[r] = n in every state; look at every begun
 *          Either the kernel's look finds r, or ours finds that n was too low.  While ops run, they go on
 *          between two looks of ours; so n is raised, in the end by more than they went on, until it holds.  A rank that
 *          has been told a lower number meanwhile stops waiting when it looks again.
 *          r's own begun counts too: what it sent in an earlier life bears those numbers.
 *          HT counts for itself: ht_from and ht_begun are held against each other in the same way and at the same
 *          time.  ht_from counts where from says that a rank is not absent, so leave() leaves it alone, and
 *          cuda_tell_from() writes it first.
 *   reset  starts numbers again at 1.  What bears old numbers would pass for new: the banks, and all of HT's region
 *          that says what is there, are cleared.  Nothing runs then.
 *
 * Over several nodes it is span_cuda.c that has ranks join, and nothing is reset.
 *
 * Copies go through a stream of the backend's own and wait for no kernel.
 */
#include "team_cuda.h"

#include <stdlib.h>
#include <string.h>

#include "ep_log.h"
#include "node_private.h"

/* A state that says more was overwritten by its worker: this many ops take longer than a machine lives. */
#define MAX_NUMBER (1ull << 56)
#define MAX_HT_NUMBER (MAX_NUMBER >> EP_HT_TAG_SHIFT)
#define TRIES_AT_ONCE 16u

static struct cuda_team *cuda(struct ep_team *team)
{
    return (struct cuda_team *)team;
}

/* ---- states ------------------------------------------------------------------------ */

ep_status cuda_write_state(struct cuda_team *team, uint32_t rank, struct ep_error *error)
{
    const uint64_t number = team->from[rank] - 1;
    const uint64_t bytes = ep_device_state_image_bytes(team->map, team->placement);
    struct ep_device_state *image = calloc(1, bytes);
    ep_status status;

    if (!image)
        return ep_error_set(error, EP_NO_MEMORY, "state of rank %u: out of memory", rank);
    ep_device_state_image(team->map, team->placement, rank, team->epoch, team->timeout_ms, image);
    memcpy(image->from, team->from, sizeof image->from);
    memcpy(image->ht_from, team->ht_from, sizeof image->ht_from);
    image->begun = image->number = number;
    image->net = team->ranks[rank].net ? (uint64_t)(uintptr_t)team->api->memory_at(team->ranks[rank].net) : 0;
    image->held = cuda_span_held(team);
    image->whole_lines = team->whole_lines;
    image->ht_begun = image->ht_number = team->ht_from[rank] - 1;
    for (uint32_t bank = 0; bank < EP_MAX_LL_BANKS; bank++)
        image->released[bank] = number;
    status = cuda_write(team, rank, cuda_state(team, rank), image, bytes, error);
    free(image);
    if (status)
        return ep_error_prefix(error, "state of rank %u", rank);
    memset(team->ranks[rank].seen, 0, sizeof team->ranks[rank].seen);
    memset(team->ranks[rank].ht_seen, 0, sizeof team->ranks[rank].ht_seen);
    return EP_OK;
}

static bool has_ht(const struct cuda_team *team)
{
    return team->map->limits.modes >> EP_MODE_HT & 1;
}

static ep_status tell(struct cuda_team *team, uint32_t i, uint32_t rank, struct ep_error *error)
{
    struct ep_device_state *state = cuda_state(team, i);

    if (has_ht(team) && team->from[rank] != EP_DEVICE_NEVER
        && cuda_write(team, i, &state->ht_from[rank], &team->ht_from[rank], sizeof team->ht_from[rank], error))
        return error->status;
    return cuda_write(team, i, &state->from[rank], &team->from[rank], sizeof team->from[rank], error);
}

/* One that cannot be reached must not keep it from the others. */
ep_status cuda_tell_from(struct cuda_team *team, uint32_t rank, struct ep_error *error)
{
    struct ep_error why = EP_ERROR_INIT;
    ep_status status = EP_OK;

    for (uint32_t i = 0; i < team->n; i++)
        if (cuda_is_here(team, i) && tell(team, i, rank, &why) && !status)
            status = ep_error_set(error, why.status, "state of rank %u: %.340s", i, why.text);
    return status;
}

static ep_status read_word(const struct cuda_team *team, uint32_t rank, const uint64_t *word, uint64_t most,
                           uint64_t *highest, struct ep_error *error)
{
    uint64_t begun;
    ep_status status = cuda_read(team, rank, &begun, word, sizeof begun, error);

    if (status)
        return ep_error_prefix(error, "state of rank %u", rank);
    if (begun > most)
        return ep_error_set(error, EP_INTERNAL,
                            "state of rank %u says that op %llu has begun: its worker has overwritten it", rank,
                            (unsigned long long)begun);
    *highest = begun > *highest ? begun : *highest;
    return EP_OK;
}

ep_status cuda_read_begun(const struct cuda_team *team, struct ep_team_numbers *out, struct ep_error *error)
{
    struct ep_team_numbers highest = { 0, 0 };
    ep_status status = EP_OK;

    for (uint32_t i = 0; !status && i < team->n; i++) {
        const struct ep_device_state *state = cuda_is_here(team, i) ? cuda_state(team, i) : NULL;

        if (!state)
            continue;
        status = read_word(team, i, &state->begun, MAX_NUMBER, &highest.ll, error);
        if (!status && has_ht(team))
            status = read_word(team, i, &state->ht_begun, MAX_HT_NUMBER, &highest.ht, error);
    }
    if (!status)
        *out = highest;
    return status;
}

/* ---- membership -------------------------------------------------------------------- */

/* Its running op stops waiting: peers that have left it out send it nothing any more. */
static void cut(struct cuda_team *team, uint32_t rank)
{
    struct ep_error error = EP_ERROR_INIT;

    if (cuda_write(team, rank, cuda_state(team, rank)->from, team->never, team->n * sizeof *team->never, &error))
        EP_ERROR("node", "a rank cannot be told that all are absent", EP_U("rank", rank),
                 EP_U("epoch", team->epoch), EP_S("error", error.text));
}

static void leave(struct ep_team *base, uint32_t rank)
{
    struct cuda_team *team = cuda(base);
    struct ep_error error = EP_ERROR_INIT;

    if (team->from[rank] == EP_DEVICE_NEVER)
        return;
    team->from[rank] = EP_DEVICE_NEVER;
    if (cuda_tell_from(team, rank, &error))
        EP_ERROR("node", "a rank's peers cannot be told that it is absent", EP_U("rank", rank),
                 EP_U("epoch", team->epoch), EP_S("error", error.text));
    if (cuda_is_here(team, rank))
        cut(team, rank);
}

static void leave_all(struct ep_team *base)
{
    struct cuda_team *team = cuda(base);

    for (uint32_t i = 0; i < team->n; i++)
        team->from[i] = EP_DEVICE_NEVER;
    for (uint32_t i = 0; i < team->n; i++)
        if (cuda_is_here(team, i))
            cut(team, i);
}

/*
 * from[rank] and ht_from[rank] are numbers that nobody has begun, in every state.  Of a group of both modes they should be
 * the next ones of one moment, as whoever joins knows by them where in a step the others are; where ops begin faster
 * than all can be told, they are beyond what has begun, each for itself.
 */
static ep_status agree(struct cuda_team *team, uint32_t rank, struct ep_error *error)
{
    uint64_t *from = &team->from[rank], *ht_from = &team->ht_from[rank];
    struct ep_team_numbers begun, before;
    uint32_t at_once = has_ht(team) && team->map->limits.modes >> EP_MODE_LL & 1 ? TRIES_AT_ONCE : 0;
    ep_status status = cuda_read_begun(team, &begun, error);

    if (status)
        return status;
    *from = begun.ll + 1;
    *ht_from = begun.ht + 1;
    for (;;) {
        before = begun;
        if ((status = cuda_tell_from(team, rank, error)) || (status = cuda_read_begun(team, &begun, error)))
            return status;
        if (begun.ll < *from && begun.ht < *ht_from)
            return EP_OK;
        const uint64_t ahead = at_once > 0 ? 0 : 2;

        at_once -= at_once > 0;
        if (begun.ll >= *from)
            *from = begun.ll + 1 + ahead * (begun.ll - before.ll);
        if (begun.ht >= *ht_from)
            *ht_from = begun.ht + 1 + ahead * (begun.ht - before.ht);
    }
}

static struct ep_team_numbers first(const struct ep_team *base, uint32_t rank)
{
    const struct cuda_team *team = (const struct cuda_team *)base;

    return (struct ep_team_numbers){ team->from[rank], team->ht_from[rank] };
}

static ep_status refuse_span(const struct cuda_team *team, const char *what, struct ep_error *error)
{
    if (!team->span)
        return EP_OK;
    return ep_error_set(error, EP_FAILED_PRECONDITION, "%s: ranks of a team over several nodes join on all of them, held "
                        "and admitted", what);
}

static ep_status join(struct ep_team *base, uint32_t rank, struct ep_error *error)
{
    struct cuda_team *team = cuda(base);
    ep_status status = refuse_span(team, "join", error);

    if (status)
        return status;
    status = agree(team, rank, error);
    if (!status)
        status = cuda_write_state(team, rank, error);
    if (status)
        leave(base, rank);
    return status;
}

/* And what is like them in HT's region. */
static ep_status clear_banks(struct cuda_team *team, uint32_t rank, struct ep_error *error)
{
    ep_status status = cuda_clear(team, rank, team->ranks[rank].window + team->map->ll,
                                  team->map->bank_bytes * team->map->limits.ll_banks, error);

    if (!status && has_ht(team))
        status = cuda_clear(team, rank, team->ranks[rank].window + team->map->ht,
                            team->map->ht_combine_rows - team->map->ht, error);
    return status ? ep_error_prefix(error, "window of rank %u", rank) : EP_OK;
}

static ep_status reset(struct ep_team *base, struct ep_error *error)
{
    struct cuda_team *team = cuda(base);
    ep_status status = refuse_span(team, "reset", error);

    if (status)
        return status;
    for (uint32_t i = 0; !status && i < team->n; i++)
        status = clear_banks(team, i, error);
    for (uint32_t i = 0; i < team->n; i++)
        team->from[i] = team->ht_from[i] = 1;
    for (uint32_t i = 0; !status && i < team->n; i++)
        status = cuda_write_state(team, i, error);
    if (status)
        leave_all(base);
    return status;
}

static void set_timeout(struct ep_team *base, uint32_t timeout_ms)
{
    struct cuda_team *team = cuda(base);
    const uint64_t timeout_ns = timeout_ms * 1000000ull;
    struct ep_error error = EP_ERROR_INIT;

    team->timeout_ms = timeout_ms;
    for (uint32_t i = 0; i < team->n; i++)
        if (cuda_is_here(team, i) && cuda_write(team, i, &cuda_state(team, i)->timeout_ns, &timeout_ns, sizeof timeout_ns, &error))
            EP_ERROR("node", "a rank keeps its old timeout", EP_U("rank", i), EP_U("epoch", team->epoch),
                     EP_S("error", error.text));
}

/* ---- windows ----------------------------------------------------------------------- */

static ep_status write_head(struct cuda_team *team, uint32_t rank, struct ep_error *error)
{
    const struct ep_window_head head = {
        .magic = EP_WINDOW_MAGIC,
        .version = EP_WINDOW_VERSION,
        .rank = rank,
        .epoch = team->epoch,
        .limits = team->map->limits,
    };

    return cuda_write(team, rank, team->ranks[rank].window, &head, sizeof head, error);
}

/* Whom the server runs ops for writes into the windows of all. */
static ep_status share_window(struct cuda_team *team, uint32_t rank, struct ep_cuda_memory *memory,
                              struct ep_error *error)
{
    uint64_t mapped = 1ull << team->ranks[rank].ordinal;
    ep_status status = EP_OK;

    for (uint32_t i = 0; !status && i < team->n; i++) {
        const uint32_t ordinal = team->ranks[i].ordinal;

        if (cuda_is_here(team, i) && !(mapped >> ordinal & 1))
            status = team->api->memory_share(memory, ordinal, error);
        mapped |= cuda_is_here(team, i) ? 1ull << ordinal : 0;
    }
    return status;
}

static ep_status set_window(struct ep_team *base, uint32_t rank, struct ep_node_window *window,
                            struct ep_error *error)
{
    struct cuda_team *team = cuda(base);
    ep_status status = share_window(team, rank, window->memory, error);

    if (!status && window->beside)
        status = share_window(team, rank, window->beside, error);
    team->ranks[rank].window = ep_node_window_base(window);
    team->ranks[rank].beside = ep_node_window_beside(window);
    if (!status)
        status = cuda_span_tell_window(team, rank, error);
    if (!status)
        status = write_head(team, rank, error);
    return status ? ep_error_prefix(error, "window of rank %u", rank) : EP_OK;
}

/*
 * What was the worker's to write, mailbox and report among it.  Peers have the window mapped and may be in the
 * middle of an op, so it stays what it is, and so do the banks: numbers tell what is stale in them.
 */
static ep_status clean_rank(struct cuda_team *team, uint32_t rank, struct ep_error *error)
{
    struct cuda_rank *r = &team->ranks[rank];
    const uint64_t image = ep_device_state_image_bytes(team->map, team->placement);
    ep_status status;

    if (!r->used)
        return EP_OK;
    status = cuda_clear(team, rank, r->window + team->map->arena, team->map->limits.arena_bytes, error);
    if (!status)
        status = cuda_clear(team, rank, r->window, sizeof(struct ep_control), error);
    if (!status)
        status = write_head(team, rank, error);
    if (!status) /* the beginning is written when the next one joins; until then `begun` is of use */
        status = cuda_clear(team, rank, (uint8_t *)cuda_state(team, rank) + image,
                            team->base.state_bytes - image, error);
    if (status)
        return ep_error_prefix(error, "memory of rank %u cannot be cleared", rank);
    r->used = false;
    return EP_OK;
}

/* What cannot be cleared now is tried again when somebody wants it, and refused if need be. */
static bool clean(struct ep_team *team, uint32_t rank)
{
    struct ep_error error = EP_ERROR_INIT;

    if (clean_rank(cuda(team), rank, &error))
        EP_ERROR("node", "a rank's memory is not cleared", EP_U("epoch", cuda(team)->epoch),
                 EP_S("error", error.text));
    return true;
}

static ep_status state_export(const struct ep_team *base, uint32_t rank, int *fd, struct ep_error *error)
{
    const struct cuda_team *team = (const struct cuda_team *)base;

    return team->api->memory_export(team->ranks[rank].state, fd, error);
}

static bool stuck(const struct ep_team *base, int32_t rank)
{
    const struct cuda_team *team = (const struct cuda_team *)base;
    bool any = false;

    for (uint32_t i = 0; i < team->n; i++)
        any |= team->ranks[i].stuck | cuda_watch_lost(team, i);
    return rank < 0 ? any : team->ranks[rank].stuck;
}

static ep_status start(struct ep_team *base, const struct ep_executor_options *options, struct ep_executor **out,
                       struct ep_error *error)
{
    struct cuda_team *team = cuda(base);
    ep_status status;

    if (team->ranks[options->rank].stuck)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "what the server ran for the last worker of rank %u has not ended", options->rank);
    status = clean_rank(team, options->rank, error);
    if (!status)
        status = options->direct ? ep_team_cuda_watch(team, options, out, error)
                                 : ep_team_cuda_serve(team, options, out, error);
    if (!status)
        team->ranks[options->rank].used = true;
    return status;
}

/* Kernels count how long they waited, not for whom. */
static bool peer_wait(const struct ep_team *team, uint32_t rank, uint32_t peer, uint64_t *sum_ns,
                      uint64_t *max_ns)
{
    (void)team, (void)rank, (void)peer, (void)sum_ns, (void)max_ns;
    return false;
}

/* ---- life -------------------------------------------------------------------------- */

static void destroy(struct ep_team *base)
{
    struct cuda_team *team = cuda(base);

    cuda_span_close(team);
    cuda_loads_close(team);
    for (uint32_t i = 0; i < team->n; i++) {
        if (team->ranks[i].state)
            team->api->memory_destroy(team->ranks[i].state);
        team->api->memory_destroy(team->ranks[i].net);
    }
    free(team->ranks);
    free(team);
}

static ep_status make_state(struct cuda_team *team, uint32_t rank, struct ep_error *error)
{
    struct cuda_rank *r = &team->ranks[rank];
    ep_status status = team->api->memory_create(r->ordinal, team->base.state_bytes, &r->state, error);

    if (!status && team->span)
        status = cuda_span_make_net(team, rank, error);
    if (status)
        return ep_error_prefix(error, "state of rank %u", rank);
    return cuda_write_state(team, rank, error);
}

static bool is_here(const struct ep_team_options *options, uint32_t rank)
{
    const struct ep_team_span *span = options->span;

    return !span || span->node[rank] == span->own;
}

static ep_status check_number(const struct ep_team_options *options, struct ep_error *error)
{
    uint32_t here = 0;

    for (uint32_t i = 0; i < options->map->limits.ranks; i++)
        here += is_here(options, i);
    if (here > EP_DEVICE_NODE_RANKS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%u ranks are on this node: the cuda backend has at most %u of a "
                            "group on one", here, EP_DEVICE_NODE_RANKS);
    return EP_OK;
}

/* Kernels write into their peers' windows, whether over NVLink or PCIe: that they can is all that is asked for. */
static ep_status check_reach(const struct ep_team_options *options, struct ep_error *error)
{
    for (uint32_t a = 0; a < options->map->limits.ranks; a++)
        for (uint32_t b = 0; is_here(options, a) && b < a; b++)
            if (is_here(options, b) && !ep_node_gpus_reach(options->node, options->devices[a], options->devices[b]))
                return ep_error_set(error, EP_FAILED_PRECONDITION,
                                    "rank %u is on %s and rank %u on %s, which do not reach each other's memory: "
                                    "ask for fewer ranks, or give the server GPUs that do",
                                    b, ep_node_device_name(options->node, options->devices[b]), a,
                                    ep_node_device_name(options->node, options->devices[a]));
    return EP_OK;
}

/* So that a line which one stores comes to the other as a whole (kernels/cuda/ll_packet.cuh). */
static bool are_linked(const struct ep_team_options *options)
{
    for (uint32_t a = 0; a < options->map->limits.ranks; a++)
        for (uint32_t b = 0; is_here(options, a) && b < a; b++)
            if (is_here(options, b) && !ep_node_gpus_linked(options->node, options->devices[a], options->devices[b]))
                return false;
    return true;
}

static const struct ep_team_ops cuda_ops = {
    .destroy = destroy,
    .set_timeout = set_timeout,
    .set_window = set_window,
    .leave = leave,
    .leave_all = leave_all,
    .cut = cuda_span_cut,
    .distrust = cuda_span_distrust,
    .hold = cuda_span_hold,
    .admit = cuda_span_admit,
    .unhold = cuda_span_unhold,
    .join = join,
    .first = first,
    .reset = reset,
    .clean = clean,
    .peer_wait = peer_wait,
    .expert_rows = cuda_expert_rows,
    .state_export = state_export,
    .stuck = stuck,
    .start = start,
};

static void fill(struct cuda_team *team, const struct ep_team_options *options)
{
    team->base.ops = &cuda_ops;
    team->base.state_bytes = ep_device_state_bytes(options->map, options->placement);
    team->api = options->node->cuda;
    team->loop = options->loop;
    team->map = options->map;
    team->placement = options->placement;
    team->epoch = options->epoch;
    team->timeout_ms = options->timeout_ms;
    team->region_bytes = options->node->region_bytes;
    team->whole_lines = are_linked(options);
    team->n = options->map->limits.ranks;
    for (uint32_t i = 0; i < EP_DEVICE_MAX_RANKS; i++) {
        team->ht_from[i] = team->from[i] = i < team->n ? 1 : EP_DEVICE_NEVER;
        team->never[i] = EP_DEVICE_NEVER;
    }
    for (uint32_t i = 0; i < team->n; i++) {
        team->ranks[i].here = is_here(options, i);
        if (team->ranks[i].here)
            team->ranks[i].ordinal = options->node->devices[options->devices[i]].ordinal;
    }
}

static struct cuda_team *make_team(uint32_t n)
{
    struct cuda_team *team = calloc(1, sizeof *team);

    if (!team)
        return NULL;
    team->ranks = calloc(n, sizeof *team->ranks);
    if (team->ranks)
        return team;
    free(team);
    return NULL;
}

ep_status ep_team_cuda_create(const struct ep_team_options *options, struct ep_team **out,
                              struct ep_error *error)
{
    const uint32_t n = options->map->limits.ranks;
    struct cuda_team *team;
    ep_status status;

    status = ep_device_check(&options->map->limits, error);
    if (!status)
        status = check_number(options, error);
    if (!status)
        status = check_reach(options, error);
    if (status)
        return status;
    team = make_team(n);
    if (!team)
        return ep_error_set(error, EP_NO_MEMORY, "no memory for a team");
    fill(team, options);
    status = cuda_loads_open(team, error);
    if (!status && options->span)
        status = cuda_span_open(team, options->span, error);
    for (uint32_t i = 0; !status && i < n; i++)
        if (cuda_is_here(team, i))
            status = make_state(team, i, error);
    if (status)
        cuda_span_give_back(team); /* the net is the caller's still */
    if (status)
        destroy(&team->base);
    else
        *out = &team->base;
    return status;
}
