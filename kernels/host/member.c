/* Who takes part in the ops of a host team, and from which number on. */
#include "host_private.h"

#include <stdlib.h>
#include <string.h>

#include "ep_clock.h"

bool ep_host_is_absent(const struct ep_host_team *team, uint32_t rank)
{
    return __atomic_load_n(&team->ranks[rank].absent, __ATOMIC_SEQ_CST) != 0;
}

void ep_host_team_leave(struct ep_host_team *team, uint32_t rank)
{
    pthread_mutex_lock(&team->mutex);
    __atomic_store_n(&team->ranks[rank].absent, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&team->mutex);
    ep_host_wake_all(team);
    ep_host_gate_drain(team, rank); /* from here on no peer writes to its window */
}

static void forget_handles(struct ep_host_rank *rank)
{
    for (uint32_t h = 0; h < EP_MAX_HANDLES; h++) {
        struct ep_host_handle *handle = &rank->handles[h];

        handle->state = EP_HANDLE_EMPTY;
        handle->generation = 0;
        handle->retired = false;
        handle->has_choices = false;
        handle->number = 0;
    }
}

static void raise_to(uint64_t *word, uint64_t value)
{
    if (__atomic_load_n(word, __ATOMIC_RELAXED) < value)
        __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

/* The rank takes part from these numbers on; mutex held.  Peers read `joined_*` once they saw it present, so `absent`
 * is cleared last.  What a rank of another node has said of itself already is not taken back. */
static void admit(struct ep_host_team *team, uint32_t r, const struct ep_host_numbers *from)
{
    struct ep_host_rank *rank = &team->ranks[r];

    forget_handles(rank);
    rank->ll_number = from->ll - 1;
    rank->ht_number = from->ht - 1;
    for (uint32_t b = 0; b < EP_MAX_LL_BANKS; b++)
        raise_to(&rank->released[b], from->ll - 1);
    raise_to(&rank->ll_sent, from->ll - 1);
    rank->ht_combines = 0;
    raise_to(&rank->ht_closed, ep_ht_tag(from->ht, 0) - 1);
    __atomic_store_n(&rank->joined_ll, from->ll, __ATOMIC_SEQ_CST);
    __atomic_store_n(&rank->joined_ht, from->ht, __ATOMIC_SEQ_CST);
    __atomic_store_n(&rank->absent, 0, __ATOMIC_SEQ_CST);
}

/* After everything that has begun; mutex held. */
static struct ep_host_numbers next_numbers(const struct ep_host_team *team)
{
    return (struct ep_host_numbers){ .ll = team->ll_begun + 1, .ht = team->ht_begun + 1 };
}

void ep_host_team_join(struct ep_host_team *team, uint32_t rank)
{
    struct ep_host_numbers from;

    pthread_mutex_lock(&team->mutex);
    from = next_numbers(team);
    admit(team, rank, &from);
    pthread_mutex_unlock(&team->mutex);
    ep_host_wake_all(team);
}

struct ep_host_numbers ep_host_team_first(const struct ep_host_team *team, uint32_t rank)
{
    return (struct ep_host_numbers){
        .ll = __atomic_load_n(&team->ranks[rank].joined_ll, __ATOMIC_SEQ_CST),
        .ht = __atomic_load_n(&team->ranks[rank].joined_ht, __ATOMIC_SEQ_CST),
    };
}

void ep_host_team_reset(struct ep_host_team *team)
{
    struct ep_host_numbers from;

    pthread_mutex_lock(&team->mutex);
    from = next_numbers(team);
    for (uint32_t r = 0; r < team->map.limits.ranks; r++)
        admit(team, r, &from);
    pthread_mutex_unlock(&team->mutex);
}

void ep_host_begin_membership(struct ep_host_team *team)
{
    for (uint32_t r = 0; r < team->map.limits.ranks; r++) {
        team->ranks[r].joined_ll = team->ranks[r].joined_ht = 1;
        pthread_mutex_init(&team->ranks[r].notes, NULL);
    }
}

/* ---- holds: mutex held where not noted ------------------------------------------------- */

/* Those that have ended by themselves are gone after it. */
static void forget_ended(struct ep_host_team *team, uint64_t now)
{
    for (struct ep_host_hold **at = &team->holds; *at;) {
        struct ep_host_hold *hold = *at;

        if (hold->until_ns > now) {
            at = &hold->next;
            continue;
        }
        *at = hold->next;
        free(hold);
    }
}

/* When the last of them ends; 0: nobody holds. */
static uint64_t held_until(struct ep_host_team *team)
{
    uint64_t until = 0;

    forget_ended(team, ep_clock_ns());
    for (const struct ep_host_hold *hold = team->holds; hold; hold = hold->next)
        if (hold->until_ns > until)
            until = hold->until_ns;
    return until;
}

static bool end_hold(struct ep_host_team *team, uint64_t id)
{
    forget_ended(team, ep_clock_ns());
    for (struct ep_host_hold **at = &team->holds; *at; at = &(*at)->next)
        if ((*at)->id == id) {
            struct ep_host_hold *hold = *at;

            *at = hold->next;
            free(hold);
            return true;
        }
    return false;
}

void ep_host_end_membership(struct ep_host_team *team)
{
    for (uint32_t r = 0; team->memory && r < team->map.limits.ranks; r++)
        pthread_mutex_destroy(&team->ranks[r].notes);
    while (team->holds)
        end_hold(team, team->holds->id);
}

ep_status ep_host_team_hold(struct ep_host_team *team, uint32_t hold_ms, uint64_t *id, struct ep_host_numbers *begun,
                            struct ep_error *error)
{
    struct ep_host_hold *hold = malloc(sizeof *hold);

    if (!hold)
        return ep_error_set(error, EP_NO_MEMORY, "no memory to hold a team");
    pthread_mutex_lock(&team->mutex);
    *hold = (struct ep_host_hold){ .next = team->holds,
                                   .id = ++team->hold_ids,
                                   .until_ns = ep_clock_ns() + hold_ms * EP_NS_PER_MS };
    team->holds = hold;
    *id = hold->id;
    *begun = (struct ep_host_numbers){ .ll = team->ll_begun, .ht = team->ht_begun };
    pthread_mutex_unlock(&team->mutex);
    return EP_OK;
}

void ep_host_team_unhold(struct ep_host_team *team, uint64_t hold)
{
    pthread_mutex_lock(&team->mutex);
    (void)end_hold(team, hold);
    pthread_mutex_unlock(&team->mutex);
    ep_host_wake_all(team);
}

static ep_status admit_held(struct ep_host_team *team, uint64_t hold, uint32_t rank,
                            const struct ep_host_numbers *from, struct ep_error *error)
{
    if (!end_hold(team, hold))
        return ep_error_set(error, EP_ABORTED, "rank %u joins too late: the hold of the team had ended", rank);
    if (from->ll <= team->ll_begun || from->ht <= team->ht_begun)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "rank %u is to join at LL %llu, HT %llu: must be above %llu and "
                            "%llu, which have begun", rank, (unsigned long long)from->ll, (unsigned long long)from->ht,
                            (unsigned long long)team->ll_begun, (unsigned long long)team->ht_begun);
    admit(team, rank, from);
    return EP_OK;
}

ep_status ep_host_team_admit(struct ep_host_team *team, uint64_t hold, uint32_t rank,
                             const struct ep_host_numbers *from, struct ep_error *error)
{
    ep_status status;

    pthread_mutex_lock(&team->mutex);
    status = admit_held(team, hold, rank, from, error);
    pthread_mutex_unlock(&team->mutex);
    ep_host_wake_all(team);
    return status;
}

/* ---- numbers ------------------------------------------------------------------------------ */

/* Takes the next number, unless the team is held: until when. */
static uint64_t try_begin(struct ep_host_call *call, uint32_t mode, uint64_t *participants, uint64_t *number)
{
    struct ep_host_team *team = call->team;
    bool ll = mode == EP_MODE_LL;
    uint64_t *begun = ll ? &team->ll_begun : &team->ht_begun;
    uint64_t until;

    pthread_mutex_lock(&team->mutex);
    until = held_until(team);
    if (until == 0) {
        *number = ll ? ++call->me->ll_number : ++call->me->ht_number;
        if (*begun < *number)
            *begun = *number;
        memset(participants, 0, EP_MASK_WORDS * sizeof *participants);
        for (uint32_t r = 0; r < team->map.limits.ranks; r++) {
            const struct ep_host_rank *rank = &team->ranks[r];

            if (!rank->absent && (ll ? rank->joined_ll : rank->joined_ht) <= *number)
                ep_mask_set(participants, r);
        }
    }
    pthread_mutex_unlock(&team->mutex);
    return until;
}

static bool not_held(void *context)
{
    struct ep_host_team *team = context;
    bool held;

    pthread_mutex_lock(&team->mutex);
    held = held_until(team) != 0;
    pthread_mutex_unlock(&team->mutex);
    return !held;
}

/* Nobody wakes for the end of a hold that ends by itself: the wait is over then. */
static enum ep_host_wait_end await_end_of_hold(struct ep_host_call *call, uint64_t until)
{
    uint64_t deadline = call->deadline_ns;
    enum ep_host_wait_end end;

    if (until < deadline)
        call->deadline_ns = until;
    end = ep_host_wait(call, not_held, call->team);
    call->deadline_ns = deadline;
    return end == EP_HOST_LATE && until < deadline ? EP_HOST_REACHED : end;
}

ep_status ep_host_begin(struct ep_host_call *call, uint32_t mode, uint64_t *participants, uint64_t *number)
{
    uint64_t until;

    while ((until = try_begin(call, mode, participants, number)) != 0)
        switch (await_end_of_hold(call, until)) {
        case EP_HOST_REACHED: break;
        case EP_HOST_DETACHED: return ep_host_detached(call);
        case EP_HOST_LATE:
            return ep_host_fail(call, EP_UNAVAILABLE, "ranks were joining for as long as the op may last");
        }
    call->result->number = *number;
    return EP_OK;
}
