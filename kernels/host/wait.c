/*
 * Sleeping until a peer has done something.
 *
 * A waiter spins briefly, then sleeps on its own event counter.  Whoever changes something that it
 * may wait for stores the change (seq_cst), then looks at `asleep`; the waiter stores `asleep`
 * (seq_cst), then looks at its condition once more.  In the single order of these four one of the two
 * sees the other (Dekker), so no wake-up is lost, and nobody makes a system call for a rank that is awake.
 */
#include "host_private.h"

#include <sched.h>
#include <unistd.h>

#include "ep_futex.h"

/* A peer that runs answers within a few us; a sleep and a wake-up cost about 5 to 50 us. */
#define SPIN_NS (20 * EP_NS_PER_US)
/* More ranks than cores: the peer may need this one. */
#define SPIN_CROWDED_NS EP_NS_PER_US
/* Looks at the condition between two looks at the clock. */
#define SPIN_BATCH 32

uint64_t ep_host_spin_ns(uint32_t ranks)
{
    return (long)ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? SPIN_NS : SPIN_CROWDED_NS;
}

static bool has_left(const struct ep_host_call *call)
{
    return __atomic_load_n(&call->me->absent, __ATOMIC_SEQ_CST) != 0;
}

static bool spin(struct ep_host_call *call, bool (*reached)(void *), void *context, uint64_t until)
{
    do {
        for (int i = 0; i < SPIN_BATCH; i++) {
            if (reached(context))
                return true;
            ep_cpu_relax();
        }
    } while (!has_left(call) && ep_clock_ns() < until);
    return false;
}

/* One sleep.  The caller looks again. */
static void doze(struct ep_host_call *call, bool (*reached)(void *), void *context, uint64_t for_ns)
{
    struct ep_host_rank *me = call->me;
    uint32_t seen;

    __atomic_store_n(&me->asleep, 1, __ATOMIC_SEQ_CST); /* partner: ep_host_wake */
    seen = __atomic_load_n(&me->events, __ATOMIC_SEQ_CST);
    if (!reached(context) && !has_left(call))
        ep_futex_wait(&me->events, seen, for_ns);
    __atomic_store_n(&me->asleep, 0, __ATOMIC_RELAXED);
}

static enum ep_host_wait_end wait_long(struct ep_host_call *call, bool (*reached)(void *), void *context,
                                       uint64_t start)
{
    uint64_t spin_end = start + call->team->spin_ns;

    if (spin(call, reached, context, spin_end < call->deadline_ns ? spin_end : call->deadline_ns))
        return EP_HOST_REACHED;
    for (;;) {
        uint64_t now;

        if (has_left(call))
            return EP_HOST_DETACHED;
        if (reached(context))
            return EP_HOST_REACHED;
        now = ep_clock_ns();
        if (now >= call->deadline_ns)
            return EP_HOST_LATE;
        doze(call, reached, context, call->deadline_ns - now);
    }
}

enum ep_host_wait_end ep_host_wait(struct ep_host_call *call, bool (*reached)(void *), void *context)
{
    enum ep_host_wait_end end;
    uint64_t start;

    if (has_left(call))
        return EP_HOST_DETACHED;
    if (reached(context))
        return EP_HOST_REACHED;
    start = ep_clock_ns();
    end = wait_long(call, reached, context, start);
    call->result->wait_ns += ep_clock_ns() - start;
    return end;
}

/* One writer, the rank's own thread; readers may be a moment behind. */
static void charge(struct ep_host_peer_wait *wait, uint64_t ns)
{
    __atomic_store_n(&wait->sum_ns, __atomic_load_n(&wait->sum_ns, __ATOMIC_RELAXED) + ns, __ATOMIC_RELAXED);
    if (ns > __atomic_load_n(&wait->max_ns, __ATOMIC_RELAXED))
        __atomic_store_n(&wait->max_ns, ns, __ATOMIC_RELAXED);
}

enum ep_host_wait_end ep_host_wait_for(struct ep_host_call *call, uint32_t peer, bool (*reached)(void *),
                                       void *context)
{
    uint64_t before = call->result->wait_ns;
    enum ep_host_wait_end end = ep_host_wait(call, reached, context);

    if (call->result->wait_ns != before)
        charge(&call->me->waits[peer], call->result->wait_ns - before);
    return end;
}

void ep_host_team_peer_wait(const struct ep_host_team *team, uint32_t rank, uint32_t peer, uint64_t *sum_ns,
                            uint64_t *max_ns)
{
    const struct ep_host_peer_wait *wait = &team->ranks[rank].waits[peer];

    *sum_ns = __atomic_load_n(&wait->sum_ns, __ATOMIC_RELAXED);
    *max_ns = __atomic_load_n(&wait->max_ns, __ATOMIC_RELAXED);
}

void ep_host_wake(struct ep_host_team *team, uint32_t rank)
{
    struct ep_host_rank *peer = &team->ranks[rank];

    if (__atomic_load_n(&peer->asleep, __ATOMIC_SEQ_CST) == 0) /* partner: doze */
        return;
    __atomic_fetch_add(&peer->events, 1, __ATOMIC_SEQ_CST);
    ep_futex_wake_all(&peer->events);
}

void ep_host_wake_all(struct ep_host_team *team)
{
    for (uint32_t r = 0; r < team->map.limits.ranks; r++)
        ep_host_wake(team, r);
}

/* ---- the gate ---------------------------------------------------------------------- */

void ep_host_gate_enter(struct ep_host_rank *me, uint32_t d)
{
    /* partner: ep_host_gate_drain.  The caller now looks at `absent` and `ht_closed`, seq_cst. */
    __atomic_store_n(&me->pushing, d + 1, __ATOMIC_SEQ_CST);
}

void ep_host_gate_enter_any(struct ep_host_rank *me)
{
    /* partner: ep_host_gate_drain.  The caller now looks at the offers, seq_cst. */
    __atomic_store_n(&me->pushing, EP_HOST_ANY, __ATOMIC_SEQ_CST);
}

void ep_host_gate_leave(struct ep_host_rank *me)
{
    __atomic_store_n(&me->pushing, 0, __ATOMIC_RELEASE);
}

void ep_host_gate_drain(struct ep_host_team *team, uint32_t d)
{
    for (uint32_t s = 0; s < team->map.limits.ranks; s++) {
        uint32_t at;

        if (s == d)
            continue;
        /* partner: ep_host_gate_enter; acquire: what was pushed lies before what we do next */
        do
            at = __atomic_load_n(&team->ranks[s].pushing, __ATOMIC_SEQ_CST);
        while ((at == d + 1 || at == EP_HOST_ANY) && sched_yield() == 0);
    }
}
