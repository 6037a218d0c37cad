/*
 * group_phase: the two state machines of a group, as tables.
 *
 * Phase of a group (rows: phase, columns: what happened; -: must not happen):
 *
 *                  FORM     FORMED  FAILED   RANK_LOST  ALL_WELL  CHANGE         KEPT     REMOVE    GONE
 *   PENDING        FORMING  -       -        -          -         -              -        DRAINING  -
 *   FORMING        -        READY   FAILED   -          -         -              -        DRAINING  -
 *   READY          -        -       -        DEGRADED   READY     RECONFIGURING  -        DRAINING  -
 *   DEGRADED       -        -       -        DEGRADED   READY     RECONFIGURING  -        DRAINING  -
 *   RECONFIGURING  -        READY   FAILED   RECONF.    RECONF.   RECONFIGURING  READY    DRAINING  -
 *   FAILED         -        -       -        -          -         RECONFIGURING  -        DRAINING  -
 *   DRAINING       -        -       -        DRAINING   DRAINING  -              -        DRAINING  DELETED
 *   DELETED        -        -       -        -          -         -              -        -         -
 *
 *   FORM       the spec is good, its first epoch is being formed
 *   FORMED     the new epoch is there and stored
 *   FAILED     it could not be formed, and none is there
 *   RANK_LOST  a rank of the newest epoch is absent or quarantined
 *   ALL_WELL   no rank of it is
 *   CHANGE     a further epoch is being formed, or workers are to go over to it
 *   KEPT       it could not be formed or stored: the one before goes on; or they have gone over (then RANK_LOST where due)
 *   REMOVE     the group's end is stored
 *   GONE       its last engine has stopped and its last worker is gone
 *
 * State of a rank:
 *
 *                ATTACH    LEFT    LEFT_ALIVE   WRITER_GONE  RESET     FORSAKEN
 *   EXPECTED     ATTACHED  -       -            -            EXPECTED  ABSENT
 *   ATTACHED     -         ABSENT  QUARANTINED  -            -         -
 *   ABSENT       ATTACHED  -       -            -            EXPECTED  -
 *   QUARANTINED  -         -       -            ABSENT       -         -
 *
 *   LEFT         its worker is gone;  LEFT_ALIVE: it may still write the window
 *   RESET        the last worker of the epoch has left;  FORSAKEN: whoever was to come over from the epoch before is lost
 */
#ifndef EP_GROUP_PHASE_H
#define EP_GROUP_PHASE_H

#include "ep/v1/common.pb-c.h"

typedef Ep__V1__Phase ep_phase;
typedef Ep__V1__RankState ep_rank_state;

#define EP_PHASE(name) EP__V1__PHASE__PHASE_##name
#define EP_RANK_STATE(name) EP__V1__RANK_STATE__RANK_STATE_##name

enum ep_phase_event {
    EP_PHASE_FORM, EP_PHASE_FORMED, EP_PHASE_FORM_FAILED, EP_PHASE_RANK_LOST, EP_PHASE_ALL_WELL,
    EP_PHASE_CHANGE, EP_PHASE_KEPT, EP_PHASE_REMOVE, EP_PHASE_GONE, EP_PHASE_EVENTS
};
/* UNSPECIFIED where the table has a dash. */
ep_phase ep_phase_next(ep_phase phase, enum ep_phase_event event);
const char *ep_phase_name(ep_phase phase);

enum ep_rank_event {
    EP_RANK_ATTACH, EP_RANK_LEFT, EP_RANK_LEFT_ALIVE, EP_RANK_WRITER_GONE, EP_RANK_RESET, EP_RANK_FORSAKEN,
    EP_RANK_EVENTS
};
ep_rank_state ep_rank_state_next(ep_rank_state state, enum ep_rank_event event);
const char *ep_rank_state_name(ep_rank_state state);

#endif
