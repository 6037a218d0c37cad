/* What operators see: groups as messages, counters, watches. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"
#include "ep_log.h"
#include "group_private.h"

/* ---- counters ------------------------------------------------------------------- */

static uint64_t load(const uint64_t *counter)
{
    return __atomic_load_n(counter, __ATOMIC_RELAXED); /* a moment old is good enough */
}

static void add_op(struct ep_op_counters *sum, const struct ep_op_counters *op)
{
    uint64_t max_wait = load(&op->max_wait_ns);

    sum->count += load(&op->count);
    sum->errors += load(&op->errors);
    sum->timeouts += load(&op->timeouts);
    sum->tokens += load(&op->tokens);
    sum->wire_bytes += load(&op->wire_bytes);
    sum->busy_ns += load(&op->busy_ns);
    sum->wait_ns += load(&op->wait_ns);
    if (max_wait > sum->max_wait_ns)
        sum->max_wait_ns = max_wait;
    for (size_t i = 0; i < sizeof op->buckets / sizeof *op->buckets; i++)
        sum->buckets[i] += load(&op->buckets[i]);
}

static void add_counters(struct ep_rank_counters *sum, const struct ep_rank_counters *counters)
{
    for (int i = 0; i < EP_OP_CLASSES; i++)
        add_op(&sum->op[i], &counters->op[i]);
    sum->dropped_routes += load(&counters->dropped_routes);
    sum->bad_descriptors += load(&counters->bad_descriptors);
}

/* ---- figures of GPUs, which are to be fetched ------------------------------------- */

/* Ranks whose figures are older than is wanted. */
struct unread {
    uint64_t since_ns;
    uint32_t n;
    const struct rank *first;
};

static void refresh_epoch(const struct epoch *epoch, struct unread *unread)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);

    for (uint32_t i = 0; i < here.n; i++) {
        const struct rank *rank = &epoch->ranks[here.number[i]];

        if (!rank->own->executor || ep_executor_refresh(rank->own->executor, unread->since_ns))
            continue;
        if (unread->n++ == 0)
            unread->first = rank;
    }
}

static bool is_asked_for(const struct group *group, const char *name)
{
    return group_is_listed(group) && (!name || !strcmp(name, group->name));
}

static void say_unread(const struct unread *unread, struct ep_error *error)
{
    const char *group = unread->first->epoch->group->name;

    if (unread->n == 1)
        ep_error_set(error, EP_DEADLINE_EXCEEDED, "the GPU of rank %u of group %s does not answer: the rank's figures are those "
                     "that were read last", unread->first->number, group);
    else
        ep_error_set(error, EP_DEADLINE_EXCEEDED, "the GPUs of %u ranks, of which rank %u of group %s is one, do not answer: "
                     "these ranks' figures are those that were read last", unread->n, unread->first->number, group);
}

bool status_fresh(const struct ep_groups *groups, const char *name, uint64_t since_ns, struct ep_error *error)
{
    struct unread unread = { .since_ns = since_ns };

    for (size_t i = 0; i < groups->n; i++) {
        const struct group *group = groups->list[i];

        if (!is_asked_for(group, name))
            continue;
        if (group->epoch)
            refresh_epoch(group->epoch, &unread);
        for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
            refresh_epoch(epoch, &unread);
    }
    if (unread.n)
        say_unread(&unread, error);
    return !unread.n;
}

/* ---- sums ------------------------------------------------------------------------- */

/* NULL: no epoch that is gone had that rank here. */
static struct ep_rank_counters *find_retired(const struct group *group, uint32_t rank)
{
    for (uint32_t i = 0; i < group->n_retired; i++)
        if (group->retired[i].rank == rank)
            return &group->retired[i].counters;
    return NULL;
}

static struct ep_rank_counters *add_retired(struct group *group, uint32_t rank)
{
    struct retired *retired = realloc(group->retired, (group->n_retired + 1) * sizeof *retired);

    if (!retired)
        abort();
    group->retired = retired;
    retired += group->n_retired++;
    *retired = (struct retired){ .rank = rank };
    return &retired->counters;
}

void status_retire_counters(struct epoch *epoch)
{
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);

    for (uint32_t i = 0; i < here.n; i++) {
        struct ep_rank_counters *sum = find_retired(epoch->group, here.number[i]);

        add_counters(sum ? sum : add_retired(epoch->group, here.number[i]), epoch->ranks[here.number[i]].own->counters);
    }
}

static bool add_epoch_rank(const struct epoch *epoch, uint32_t rank, struct ep_rank_counters *sum)
{
    if (!epoch || rank >= epoch->n_ranks || !epoch->ranks[rank].here)
        return false;
    add_counters(sum, epoch->ranks[rank].own->counters);
    return true;
}

static uint32_t more(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

uint32_t ep_groups_rank_end(const struct ep_groups *groups, const char *name)
{
    const struct group *group = group_find((struct ep_groups *)(uintptr_t)groups, name);
    uint32_t end = group && group->epoch ? group->epoch->n_ranks : 0;

    for (const struct epoch *epoch = group ? group->older : NULL; epoch; epoch = epoch->next)
        end = more(end, epoch->n_ranks);
    for (uint32_t i = 0; group && i < group->n_retired; i++)
        end = more(end, group->retired[i].rank + 1);
    return end;
}

bool ep_groups_rank_counters(const struct ep_groups *groups, const char *name, uint32_t rank,
                             struct ep_rank_counters *out)
{
    const struct group *group = group_find((struct ep_groups *)(uintptr_t)groups, name);
    bool found;

    memset(out, 0, sizeof *out);
    if (!group)
        return false;
    found = add_epoch_rank(group->epoch, rank, out);
    for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        found |= add_epoch_rank(epoch, rank, out);
    if (!find_retired(group, rank))
        return found;
    add_counters(out, find_retired(group, rank));
    return true;
}

/* ---- messages ------------------------------------------------------------------- */

/* As operators read it, and as it is stored with the status: the hash of a token is for this server alone. */
static Ep__V1__GroupSpec *copy_spec(struct arena *arena, const Ep__V1__GroupSpec *spec)
{
    Ep__V1__AttachToken token = EP__V1__ATTACH_TOKEN__INIT;
    Ep__V1__GroupSpec short_spec = *spec, *copy;
    size_t size;
    uint8_t *bytes;

    if (spec->attach_token) {
        token.state_case = EP__V1__ATTACH_TOKEN__STATE_SET;
        token.set = true;
        short_spec.attach_token = &token;
    }
    bytes = ep_message_pack(&short_spec.base, &size);
    copy = arena_unpack(arena, short_spec.base.descriptor, size, bytes);
    free(bytes);
    if (!copy)
        abort();
    return copy;
}

static Ep__V1__Settled *settled_message(struct arena *arena, const struct ep_settled *settled)
{
    Ep__V1__Settled *message = arena_alloc(arena, sizeof *message);
    const struct ep_layout_map *map = &settled->map;

    ep__v1__settled__init(message);
    message->window_bytes = map->total_bytes;
    message->ll_bytes = map->bank_bytes * map->limits.ll_banks;
    message->ht_bytes = map->ht_bytes;
    message->arena_bytes = map->limits.arena_bytes;
    message->ll_banks = map->limits.ll_banks;
    message->max_local_experts = map->limits.local_experts;
    message->n_notes = settled->n_notes;
    message->notes = arena_alloc(arena, settled->n_notes * sizeof *message->notes + 1);
    for (size_t i = 0; i < settled->n_notes; i++)
        message->notes[i] = arena_strdup(arena, settled->notes[i]);
    return message;
}

static Ep__V1__RankStatus *rank_message(struct arena *arena, const struct ep_plan *plan, uint32_t number,
                                        uint32_t local_experts)
{
    Ep__V1__RankStatus *message = arena_alloc(arena, sizeof *message);

    ep__v1__rank_status__init(message);
    message->rank = number;
    message->state = EP_RANK_STATE(EXPECTED);
    message->node = arena_strdup(arena, plan->name[plan->node[number]]);
    message->device = arena_strdup(arena, plan->device[number]);
    message->local_experts = local_experts;
    return message;
}

static void fill_counted(const struct rank *rank, Ep__V1__RankStatus *message)
{
    message->ops = rank_worker(rank)->counted.ops;
    message->timeouts = rank_worker(rank)->counted.timeouts;
    message->dropped_routes = rank_worker(rank)->counted.dropped_routes;
    if (!rank->own->counters)
        return;
    for (int i = 0; i < EP_OP_CLASSES; i++) {
        message->ops += load(&rank->own->counters->op[i].count);
        message->timeouts += load(&rank->own->counters->op[i].timeouts);
    }
    message->dropped_routes += load(&rank->own->counters->dropped_routes);
}

static void fill_rank(struct arena *arena, const struct rank *rank, Ep__V1__RankStatus *message)
{
    const struct worker *worker = rank_worker(rank);

    message->state = rank->state;
    message->pid = worker->pid;
    message->uid = worker->pid ? (int64_t)worker->uid : 0;
    message->worker = arena_strdup(arena, worker_name(worker));
    message->since_us = rank->since_us;
    message->reason = arena_strdup(arena, rank_reason(rank));
    message->follows = rank->follows;
    fill_counted(rank, message);
}

/* Of a rank of an epoch that is known. */
static Ep__V1__RankStatus *full_message(struct arena *arena, const struct epoch *epoch, uint32_t number)
{
    Ep__V1__RankStatus *message =
        rank_message(arena, &epoch->plan, number, epoch->settled.placement.local_experts[number]);

    fill_rank(arena, &epoch->ranks[number], message);
    return message;
}

static Ep__V1__RankStatus **rank_messages(struct arena *arena, const struct ep_plan *plan,
                                          const struct ep_settled *settled)
{
    uint32_t n = settled->spec->ranks;
    Ep__V1__RankStatus **messages = arena_alloc(arena, n * sizeof *messages);

    for (uint32_t i = 0; i < n; i++)
        messages[i] = rank_message(arena, plan, i, settled->placement.local_experts[i]);
    return messages;
}

static void fill_epoch(struct arena *arena, const struct epoch *epoch, Ep__V1__GroupStatus *status)
{
    status->epoch = epoch->number;
    status->settled = settled_message(arena, &epoch->settled);
    status->n_ranks = epoch->n_ranks;
    status->ranks = arena_alloc(arena, epoch->n_ranks * sizeof *status->ranks);
    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        status->ranks[i] = full_message(arena, epoch, i);
}

/* in_use: without those that are only kept for other nodes. */
static void fill_draining(struct arena *arena, const struct group *group, bool in_use, Ep__V1__GroupStatus *status)
{
    size_t n = 0;

    for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        n++;
    status->draining_epochs = arena_alloc(arena, n * sizeof *status->draining_epochs + 1);
    for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
        if (!in_use || !epoch_idle(epoch))
            status->draining_epochs[status->n_draining_epochs++] = epoch->number;
}

/* The oldest of those kept first. */
static void fill_timeouts(struct arena *arena, const struct group *group, Ep__V1__GroupStatus *status)
{
    uint64_t n = group->n_timeouts < TIMEOUTS_KEPT ? group->n_timeouts : TIMEOUTS_KEPT;

    status->timeouts = arena_alloc(arena, n * sizeof *status->timeouts + 1);
    for (uint64_t i = group->n_timeouts - n; i < group->n_timeouts; i++) {
        Ep__V1__TimeoutRecord *record = arena_alloc(arena, sizeof *record);

        *record = group->timeouts[i % TIMEOUTS_KEPT];
        status->timeouts[status->n_timeouts++] = record;
    }
}

static Ep__V1__Group *empty_message(struct arena *arena, const char *name)
{
    Ep__V1__Group *message = arena_alloc(arena, sizeof *message);

    ep__v1__group__init(message);
    message->name = arena_strdup(arena, name);
    message->status = arena_alloc(arena, sizeof *message->status);
    ep__v1__group_status__init(message->status);
    return message;
}

static void make_stale(struct group *group)
{
    struct ep_groups *groups = group->groups;
    struct arena *stale;

    if (!group->arena.blocks)
        return;
    stale = realloc(groups->stale, (groups->n_stale + 1) * sizeof *stale);
    if (!stale)
        abort();
    groups->stale = stale;
    groups->stale[groups->n_stale++] = group->arena;
    group->arena = (struct arena){ 0 };
}

const Ep__V1__Group *status_message(struct group *group)
{
    Ep__V1__Group *message;
    struct arena *arena = &group->arena;

    make_stale(group);
    message = empty_message(arena, group->name);
    message->revision = group->revision;
    message->status->phase = group->phase;
    message->status->reason = arena_strdup(arena, group->reason);
    message->status->created_us = group->created_us;
    message->status->updated_us = group->updated_us;
    message->status->epoch = group->epoch_number;
    if (group->epoch) {
        message->spec = copy_spec(arena, group->epoch->settled.spec);
        fill_epoch(arena, group->epoch, message->status);
    } else if (group->asked) {
        message->spec = copy_spec(arena, group->asked);
    }
    fill_draining(arena, group, false, message->status);
    fill_timeouts(arena, group, message->status);
    return message;
}

Ep__V1__Group *status_preview(struct arena *arena, const char *name, uint64_t revision,
                              const struct ep_settled *settled, const struct ep_plan *plan, uint64_t epoch)
{
    Ep__V1__Group *message = empty_message(arena, name);

    message->revision = revision;
    message->spec = copy_spec(arena, settled->spec);
    message->status->phase = EP_PHASE(PENDING);
    message->status->reason = arena_strdup(arena, "dry run: nothing was changed");
    message->status->epoch = epoch;
    message->status->settled = settled_message(arena, settled);
    message->status->n_ranks = settled->spec->ranks;
    message->status->ranks = rank_messages(arena, plan, settled);
    return message;
}

/* ---- records ---------------------------------------------------------------------- */

Ep__V1__GroupStatus *status_record(const struct ep_settled *settled, const struct ep_plan *plan, uint64_t epoch,
                                   uint64_t created_us, uint64_t updated_us)
{
    Ep__V1__GroupStatus message = EP__V1__GROUP_STATUS__INIT, *own;
    struct arena arena = { 0 };

    message.epoch = epoch;
    message.created_us = created_us;
    message.updated_us = updated_us;
    message.settled = settled_message(&arena, settled);
    message.settled->spec = copy_spec(&arena, settled->spec);
    message.runs = ep_plan_runs(plan, &arena, &message.n_runs);
    own = ep_message_copy(&message.base);
    arena_clear(&arena);
    return own;
}

static Ep__V1__Turn *copy_turn(const Ep__V1__Turn *turn)
{
    return (Ep__V1__Turn *)ep_message_copy(&turn->base);
}

void status_keep_turn(const struct group *group, Ep__V1__GroupStatus *record)
{
    if (group->turned.to && !record->turn)
        record->turn = copy_turn(&group->turned);
}

void status_begin_absent(Ep__V1__GroupStatus *record, uint32_t rank)
{
    if (rank >= record->settled->spec->ranks)
        return;
    if (!record->absent)
        record->absent = group_allocate(record->settled->spec->ranks, sizeof *record->absent);
    record->absent[record->n_absent++] = rank;
}

void status_keep(const struct group *group, Ep__V1__GroupStatus *record)
{
    record->term = group->epoch->fence;
    for (uint32_t i = 0; i < group->epoch->n_ranks; i++)
        if (group->epoch->ranks[i].began_absent)
            status_begin_absent(record, i);
    status_keep_turn(group, record);
}

Ep__V1__GroupStatus *status_record_now(const struct group *group)
{
    const struct epoch *epoch = group->epoch;
    Ep__V1__GroupStatus *record =
        status_record(&epoch->settled, &epoch->plan, epoch->number, group->created_us, group->updated_us);

    status_keep(group, record);
    return record;
}

/* Older epochs too: who could let go of one has to know whether others still use it. */
static void fill_turn(struct arena *arena, const struct group *group, Ep__V1__GroupStatus *message)
{
    char *waits = arena_alloc(arena, REASON_MAX);

    message->turn_part = arena_alloc(arena, sizeof *message->turn_part);
    follow_part(group, waits, message->turn_part);
    fill_draining(arena, group, true, message);
}

/* Who reads it knows where the rank is. */
static Ep__V1__RankStatus *short_message(struct arena *arena, const struct rank *rank)
{
    Ep__V1__RankStatus *message = arena_alloc(arena, sizeof *message);

    ep__v1__rank_status__init(message);
    message->rank = rank->number;
    fill_rank(arena, rank, message);
    return message;
}

/* Is the rank as those of `first`, behind which it is? */
static bool is_more(const Ep__V1__RankStatus *first, const Ep__V1__RankStatus *rank)
{
    return rank->rank == first->rank + first->more + 1 && rank->state == first->state && rank->pid == first->pid &&
           rank->uid == first->uid && rank->since_us == first->since_us && rank->ops == first->ops &&
           rank->timeouts == first->timeouts && rank->dropped_routes == first->dropped_routes &&
           rank->follows == first->follows && !strcmp(rank->worker, first->worker) && !strcmp(rank->reason, first->reason);
}

static void add_rank(struct arena *arena, const struct rank *rank, Ep__V1__GroupStatus *report)
{
    Ep__V1__RankStatus *message = short_message(arena, rank);

    if (report->n_ranks && is_more(report->ranks[report->n_ranks - 1], message))
        report->ranks[report->n_ranks - 1]->more++;
    else
        report->ranks[report->n_ranks++] = message;
}

const Ep__V1__GroupStatus *status_report(struct arena *arena, const struct group *group)
{
    const struct epoch *epoch = group->epoch;
    const struct ranks here = epoch_ranks_of(epoch, epoch->own);
    Ep__V1__GroupStatus *message = arena_alloc(arena, sizeof *message);

    ep__v1__group_status__init(message);
    message->created_us = group->created_us;
    message->epoch = epoch->number;
    message->ranks = arena_alloc(arena, here.n * sizeof *message->ranks);
    for (uint32_t i = 0; i < here.n; i++)
        add_rank(arena, &epoch->ranks[here.number[i]], message);
    message->phase = epoch_whole(epoch) ? EP_PHASE(READY) : EP_PHASE(PENDING);
    message->reason = arena_strdup(arena, epoch->torn);
    fill_turn(arena, group, message);
    share_report(arena, group, message);
    return message;
}

/* ---- messages of this turn ---------------------------------------------------------- */

void status_free_stale(struct ep_groups *groups)
{
    for (size_t i = 0; i < groups->n_stale; i++)
        arena_clear(&groups->stale[i]);
    free(groups->stale);
    groups->stale = NULL;
    groups->n_stale = 0;
}

/* ---- reading -------------------------------------------------------------------- */

const Ep__V1__Group *ep_groups_get(struct ep_groups *groups, const char *name, struct ep_error *error)
{
    struct group *group = group_get(groups, name, error);

    return group ? status_message(group) : NULL;
}

bool group_is_listed(const struct group *group)
{
    return group->visible && !group->dead && !group->replaced;
}

size_t ep_groups_count(const struct ep_groups *groups)
{
    size_t n = 0;

    for (size_t i = 0; i < groups->n; i++)
        n += group_is_listed(groups->list[i]);
    return n;
}

const Ep__V1__Group *ep_groups_at(struct ep_groups *groups, size_t index)
{
    for (size_t i = 0; i < groups->n; i++)
        if (group_is_listed(groups->list[i]) && index-- == 0)
            return status_message(groups->list[i]);
    return NULL;
}

bool ep_groups_rank_free(struct ep_groups *groups, const char *name, int32_t rank)
{
    struct group *group = group_get(groups, name, NULL);
    uint32_t first = rank < 0 ? 0 : (uint32_t)rank;

    if (!group || !group->epoch || group->phase == EP_PHASE(DRAINING))
        return false;
    for (uint32_t i = first; i < group->epoch->n_ranks && (rank < 0 || i == first); i++)
        if (rank_claimable(&group->epoch->ranks[i], NULL) == EP_OK)
            return true;
    return false;
}

/* ---- watches -------------------------------------------------------------------- */

struct ep_group_watch *ep_groups_watch(struct ep_groups *groups, ep_group_watch_fn fn, void *user)
{
    struct ep_group_watch *watch = group_allocate(1, sizeof *watch);

    *watch = (struct ep_group_watch){ .next = groups->watches, .groups = groups, .fn = fn, .user = user };
    groups->watches = watch;
    return watch;
}

/* It may be removed out of its own callback: it is unlinked when no callback runs. */
void ep_groups_unwatch(struct ep_group_watch *watch)
{
    watch->fn = NULL;
    watch->groups->dead_watches = true;
    group_later(watch->groups);
}

void status_drop_watches(struct ep_groups *groups)
{
    groups->dead_watches = false;
    for (struct ep_group_watch **link = &groups->watches; *link;) {
        struct ep_group_watch *watch = *link;

        if (watch->fn) {
            link = &watch->next;
            continue;
        }
        *link = watch->next;
        free(watch);
    }
}

void status_free_watches(struct ep_groups *groups)
{
    for (struct ep_group_watch *watch = groups->watches; watch; watch = watch->next)
        watch->fn = NULL;
    status_drop_watches(groups);
}

static void tell(struct group *group, Ep__V1__GroupEvent__Type type)
{
    struct ep_groups *groups = group->groups;
    const Ep__V1__Group *message;

    if (!group->visible || group->replaced || groups->closing || !groups->ready || !groups->watches)
        return;
    message = status_message(group);
    for (struct ep_group_watch *watch = groups->watches; watch; watch = watch->next)
        if (watch->fn)
            watch->fn(type, message, watch->user);
}

void status_changed(struct group *group)
{
    if (!group->dead)
        tell(group, EP__V1__GROUP_EVENT__TYPE__TYPE_CHANGED);
}

void status_deleted(struct group *group)
{
    tell(group, EP__V1__GROUP_EVENT__TYPE__TYPE_DELETED);
}

/* ---- late ranks ------------------------------------------------------------------ */

static const char *wait_phase_name(uint32_t phase)
{
    static const char *const names[] = {
        [EP_WAIT_NONE] = "",
        [EP_WAIT_ARRIVAL] = "arrival",
        [EP_WAIT_CREDIT] = "credit",
        [EP_WAIT_READY] = "ready",
    };

    return phase < sizeof names / sizeof *names ? names[phase] : "?";
}

void status_timeout(struct rank *rank, const struct ep_engine_timeout *timeout)
{
    struct group *group = rank->epoch->group;
    Ep__V1__TimeoutRecord *record = &group->timeouts[group->n_timeouts++ % TIMEOUTS_KEPT];

    ep__v1__timeout_record__init(record);
    record->epoch = rank->epoch->number;
    record->seq = timeout->number;
    /* Constants, so the record owns nothing. */
    record->op = (char *)(uintptr_t)ep_op_class_name((enum ep_op_class)timeout->op_class);
    record->phase = (char *)(uintptr_t)wait_phase_name(timeout->wait_phase);
    record->rank = rank->number;
    record->late_rank = timeout->late_rank;
    record->waited_us = timeout->waited_us;
    record->time_us = timeout->time_us;
    EP_WARN("group", "a rank was late", EP_S("group", group->name), EP_U("epoch", record->epoch),
            EP_U("seq", record->seq), EP_S("op", record->op), EP_S("phase", record->phase),
            EP_U("rank", record->rank), EP_U("late_rank", record->late_rank),
            EP_U("waited_us", record->waited_us));
    status_changed(group);
}

/* ---- statistics ------------------------------------------------------------------- */

#define BUCKETS (sizeof ((struct ep_op_counters *)NULL)->buckets / sizeof(uint64_t))

static void fill_buckets(const struct ep_op_counters *op, Ep__V1__OpStats *stats)
{
    uint64_t sorted = 0;

    stats->busy_buckets = group_allocate(BUCKETS, sizeof *stats->busy_buckets);
    for (size_t i = 0; i < BUCKETS; i++)
        sorted += stats->busy_buckets[i] = load(&op->buckets[i]);
    stats->n_busy_buckets = sorted || !stats->count ? BUCKETS : 0;
}

static Ep__V1__OpStats *op_stats(enum ep_op_class class, const struct ep_op_counters *op)
{
    Ep__V1__OpStats *stats = group_allocate(1, sizeof *stats);

    ep__v1__op_stats__init(stats);
    stats->op = group_copy(ep_op_class_name(class));
    stats->count = load(&op->count);
    stats->errors = load(&op->errors);
    stats->timeouts = load(&op->timeouts);
    stats->tokens = load(&op->tokens);
    stats->wire_bytes = load(&op->wire_bytes);
    stats->busy_us = load(&op->busy_ns) / EP_NS_PER_US;
    stats->wait_us = load(&op->wait_ns) / EP_NS_PER_US;
    stats->max_wait_us = load(&op->max_wait_ns) / EP_NS_PER_US;
    fill_buckets(op, stats);
    return stats;
}

/* NULL: the backend does not know. */
static Ep__V1__PeerWait *peer_wait(const struct rank *rank, uint32_t peer)
{
    Ep__V1__PeerWait *wait;
    uint64_t sum_ns, max_ns;

    if (!ep_team_peer_wait(rank->epoch->team, rank->number, peer, &sum_ns, &max_ns))
        return NULL;
    wait = group_allocate(1, sizeof *wait);
    ep__v1__peer_wait__init(wait);
    wait->rank = peer;
    wait->wait_us = sum_ns / EP_NS_PER_US;
    wait->max_wait_us = max_ns / EP_NS_PER_US;
    return wait;
}

static void fill_expert_rows(const struct rank *rank, Ep__V1__RankStats *stats)
{
    const uint32_t experts = rank->epoch->settled.spec->experts;

    stats->expert_rows = group_allocate(experts, sizeof *stats->expert_rows);
    for (uint32_t e = 0; e < experts; e++)
        stats->expert_rows[stats->n_expert_rows++] = ep_team_expert_rows(rank->epoch->team, rank->number, e);
}

static Ep__V1__RankStats *rank_stats(const struct rank *rank, bool experts)
{
    Ep__V1__RankStats *stats = group_allocate(1, sizeof *stats);

    ep__v1__rank_stats__init(stats);
    stats->group = group_copy(rank->epoch->group->name);
    stats->epoch = rank->epoch->number;
    stats->rank = rank->number;
    stats->state = rank->state;
    stats->ops = group_allocate(EP_OP_CLASSES, sizeof *stats->ops);
    for (int i = 0; i < EP_OP_CLASSES; i++)
        stats->ops[stats->n_ops++] = op_stats((enum ep_op_class)i, &rank->own->counters->op[i]);
    stats->peers = group_allocate(rank->epoch->n_ranks, sizeof *stats->peers);
    for (uint32_t peer = 0; peer < rank->epoch->n_ranks; peer++) {
        Ep__V1__PeerWait *wait = peer != rank->number ? peer_wait(rank, peer) : NULL;

        if (wait)
            stats->peers[stats->n_peers++] = wait;
    }
    stats->dropped_routes = load(&rank->own->counters->dropped_routes);
    stats->bad_descriptors = load(&rank->own->counters->bad_descriptors);
    if (experts)
        fill_expert_rows(rank, stats);
    return stats;
}

static void add_epoch_stats(Ep__V1__Stats *stats, const struct epoch *epoch, bool experts)
{
    Ep__V1__RankStats **ranks = realloc(stats->ranks, (stats->n_ranks + epoch->n_ranks) * sizeof *ranks);

    if (!ranks)
        abort();
    stats->ranks = ranks;
    for (uint32_t i = 0; i < epoch->n_ranks; i++)
        if (epoch->ranks[i].here && epoch->team)
            stats->ranks[stats->n_ranks++] = rank_stats(&epoch->ranks[i], experts);
}

void ep_groups_stats(struct ep_groups *groups, const char *name, bool experts, Ep__V1__Stats *stats)
{
    ep__v1__stats__init(stats);
    stats->time_us = ep_clock_wall_us();
    stats->node = group_copy(ep_node_name(groups->node));
    for (size_t i = 0; i < groups->n; i++) {
        const struct group *group = groups->list[i];

        if (!is_asked_for(group, name))
            continue;
        if (group->epoch)
            add_epoch_stats(stats, group->epoch, experts);
        for (const struct epoch *epoch = group->older; epoch; epoch = epoch->next)
            add_epoch_stats(stats, epoch, experts);
    }
}

void ep_groups_stats_clear(Ep__V1__Stats *stats)
{
    for (size_t i = 0; i < stats->n_ranks; i++)
        ep__v1__rank_stats__free_unpacked(stats->ranks[i], NULL);
    free(stats->ranks);
    free(stats->node);
    ep__v1__stats__init(stats);
}
