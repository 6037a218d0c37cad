#include "group_phase.h"

#define PHASES (EP_PHASE(DELETED) + 1)
#define RANK_STATES (EP_RANK_STATE(QUARANTINED) + 1)

ep_phase ep_phase_next(ep_phase phase, enum ep_phase_event event)
{
    static const ep_phase next[PHASES][EP_PHASE_EVENTS] = {
        [EP_PHASE(PENDING)] = {
            [EP_PHASE_FORM] = EP_PHASE(FORMING),
            [EP_PHASE_REMOVE] = EP_PHASE(DRAINING),
        },
        [EP_PHASE(FORMING)] = {
            [EP_PHASE_FORMED] = EP_PHASE(READY),
            [EP_PHASE_FORM_FAILED] = EP_PHASE(FAILED),
            [EP_PHASE_REMOVE] = EP_PHASE(DRAINING),
        },
        [EP_PHASE(READY)] = {
            [EP_PHASE_RANK_LOST] = EP_PHASE(DEGRADED),
            [EP_PHASE_ALL_WELL] = EP_PHASE(READY),
            [EP_PHASE_CHANGE] = EP_PHASE(RECONFIGURING),
            [EP_PHASE_REMOVE] = EP_PHASE(DRAINING),
        },
        [EP_PHASE(DEGRADED)] = {
            [EP_PHASE_RANK_LOST] = EP_PHASE(DEGRADED),
            [EP_PHASE_ALL_WELL] = EP_PHASE(READY),
            [EP_PHASE_CHANGE] = EP_PHASE(RECONFIGURING),
            [EP_PHASE_REMOVE] = EP_PHASE(DRAINING),
        },
        [EP_PHASE(RECONFIGURING)] = {
            [EP_PHASE_FORMED] = EP_PHASE(READY),
            [EP_PHASE_FORM_FAILED] = EP_PHASE(FAILED),
            [EP_PHASE_RANK_LOST] = EP_PHASE(RECONFIGURING),
            [EP_PHASE_ALL_WELL] = EP_PHASE(RECONFIGURING),
            [EP_PHASE_KEPT] = EP_PHASE(READY),
            [EP_PHASE_CHANGE] = EP_PHASE(RECONFIGURING),
            [EP_PHASE_REMOVE] = EP_PHASE(DRAINING),
        },
        [EP_PHASE(FAILED)] = {
            [EP_PHASE_CHANGE] = EP_PHASE(RECONFIGURING),
            [EP_PHASE_REMOVE] = EP_PHASE(DRAINING),
        },
        [EP_PHASE(DRAINING)] = {
            [EP_PHASE_RANK_LOST] = EP_PHASE(DRAINING),
            [EP_PHASE_ALL_WELL] = EP_PHASE(DRAINING),
            [EP_PHASE_REMOVE] = EP_PHASE(DRAINING),
            [EP_PHASE_GONE] = EP_PHASE(DELETED),
        },
    };

    return (unsigned)phase < PHASES && (unsigned)event < EP_PHASE_EVENTS ? next[phase][event]
                                                                         : EP_PHASE(UNSPECIFIED);
}

const char *ep_phase_name(ep_phase phase)
{
    static const char *const names[PHASES] = {
        "unspecified", "pending", "forming", "ready", "reconfiguring", "degraded", "draining", "failed", "deleted",
    };

    return (unsigned)phase < PHASES ? names[phase] : "?";
}

ep_rank_state ep_rank_state_next(ep_rank_state state, enum ep_rank_event event)
{
    static const ep_rank_state next[RANK_STATES][EP_RANK_EVENTS] = {
        [EP_RANK_STATE(EXPECTED)] = {
            [EP_RANK_ATTACH] = EP_RANK_STATE(ATTACHED),
            [EP_RANK_FORSAKEN] = EP_RANK_STATE(ABSENT),
            [EP_RANK_RESET] = EP_RANK_STATE(EXPECTED),
        },
        [EP_RANK_STATE(ATTACHED)] = {
            [EP_RANK_LEFT] = EP_RANK_STATE(ABSENT),
            [EP_RANK_LEFT_ALIVE] = EP_RANK_STATE(QUARANTINED),
        },
        [EP_RANK_STATE(ABSENT)] = {
            [EP_RANK_ATTACH] = EP_RANK_STATE(ATTACHED),
            [EP_RANK_RESET] = EP_RANK_STATE(EXPECTED),
        },
        [EP_RANK_STATE(QUARANTINED)] = {
            [EP_RANK_WRITER_GONE] = EP_RANK_STATE(ABSENT),
        },
    };

    return (unsigned)state < RANK_STATES && (unsigned)event < EP_RANK_EVENTS ? next[state][event]
                                                                             : EP_RANK_STATE(UNSPECIFIED);
}

const char *ep_rank_state_name(ep_rank_state state)
{
    static const char *const names[RANK_STATES] = {
        "unspecified", "expected", "attached", "absent", "quarantined",
    };

    return (unsigned)state < RANK_STATES ? names[state] : "?";
}
