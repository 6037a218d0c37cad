/* The state machines of a group: every phase and event, every rank state and event. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "group_phase.h"

#define P(name) EP_PHASE(name)
#define NONE EP_PHASE(UNSPECIFIED)
#define R(name) EP_RANK_STATE(name)
#define NO_RANK EP_RANK_STATE(UNSPECIFIED)

/* As the header's table reads. */
static const ep_phase phases[][1 + EP_PHASE_EVENTS] = {
    /* from             FORM        FORMED    FAILED     RANK_LOST         ALL_WELL          CHANGE            KEPT      REMOVE       GONE */
    { P(UNSPECIFIED),   NONE,       NONE,     NONE,      NONE,             NONE,             NONE,             NONE,     NONE,        NONE },
    { P(PENDING),       P(FORMING), NONE,     NONE,      NONE,             NONE,             NONE,             NONE,     P(DRAINING), NONE },
    { P(FORMING),       NONE,       P(READY), P(FAILED), NONE,             NONE,             NONE,             NONE,     P(DRAINING), NONE },
    { P(READY),         NONE,       NONE,     NONE,      P(DEGRADED),      P(READY),         P(RECONFIGURING), NONE,     P(DRAINING), NONE },
    { P(DEGRADED),      NONE,       NONE,     NONE,      P(DEGRADED),      P(READY),         P(RECONFIGURING), NONE,     P(DRAINING), NONE },
    { P(RECONFIGURING), NONE,       P(READY), P(FAILED), P(RECONFIGURING), P(RECONFIGURING), P(RECONFIGURING), P(READY), P(DRAINING), NONE },
    { P(FAILED),        NONE,       NONE,     NONE,      NONE,             NONE,             P(RECONFIGURING), NONE,     P(DRAINING), NONE },
    { P(DRAINING),      NONE,       NONE,     NONE,      P(DRAINING),      P(DRAINING),      NONE,             NONE,     P(DRAINING), P(DELETED) },
    { P(DELETED),       NONE,       NONE,     NONE,      NONE,             NONE,             NONE,             NONE,     NONE,        NONE },
};

static const ep_rank_state ranks[][1 + EP_RANK_EVENTS] = {
    /* from           ATTACH       LEFT       LEFT_ALIVE      WRITER_GONE RESET        FORSAKEN */
    { NO_RANK,        NO_RANK,     NO_RANK,   NO_RANK,        NO_RANK,    NO_RANK,     NO_RANK },
    { R(EXPECTED),    R(ATTACHED), NO_RANK,   NO_RANK,        NO_RANK,    R(EXPECTED), R(ABSENT) },
    { R(ATTACHED),    NO_RANK,     R(ABSENT), R(QUARANTINED), NO_RANK,    NO_RANK,     NO_RANK },
    { R(ABSENT),      R(ATTACHED), NO_RANK,   NO_RANK,        NO_RANK,    R(EXPECTED), NO_RANK },
    { R(QUARANTINED), NO_RANK,     NO_RANK,   NO_RANK,        R(ABSENT),  NO_RANK,     NO_RANK },
};

static void every_phase_takes_every_event_as_the_table_says(void **state)
{
    (void)state;
    assert_int_equal(sizeof phases / sizeof *phases, P(DELETED) + 1);
    for (size_t i = 0; i < sizeof phases / sizeof *phases; i++)
        for (int event = 0; event < EP_PHASE_EVENTS; event++)
            assert_int_equal(ep_phase_next(phases[i][0], (enum ep_phase_event)event), phases[i][1 + event]);
}

static void every_rank_state_takes_every_event_as_the_table_says(void **state)
{
    (void)state;
    assert_int_equal(sizeof ranks / sizeof *ranks, R(QUARANTINED) + 1);
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
        for (int event = 0; event < EP_RANK_EVENTS; event++)
            assert_int_equal(ep_rank_state_next(ranks[i][0], (enum ep_rank_event)event), ranks[i][1 + event]);
}

static void values_outside_the_tables_lead_nowhere(void **state)
{
    (void)state;
    assert_int_equal(ep_phase_next((ep_phase)99, EP_PHASE_FORM), NONE);
    assert_int_equal(ep_phase_next(P(READY), (enum ep_phase_event)99), NONE);
    assert_int_equal(ep_rank_state_next((ep_rank_state)-1, EP_RANK_ATTACH), NO_RANK);
    assert_int_equal(ep_rank_state_next(R(EXPECTED), EP_RANK_EVENTS), NO_RANK);
    assert_string_equal(ep_phase_name((ep_phase)99), "?");
    assert_string_equal(ep_rank_state_name((ep_rank_state)99), "?");
}

static void names_are_what_people_read(void **state)
{
    (void)state;
    assert_string_equal(ep_phase_name(P(READY)), "ready");
    assert_string_equal(ep_phase_name(P(RECONFIGURING)), "reconfiguring");
    assert_string_equal(ep_phase_name(P(DELETED)), "deleted");
    assert_string_equal(ep_rank_state_name(R(QUARANTINED)), "quarantined");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_phase_takes_every_event_as_the_table_says),
        cmocka_unit_test(every_rank_state_takes_every_event_as_the_table_says),
        cmocka_unit_test(values_outside_the_tables_lead_nowhere),
        cmocka_unit_test(names_are_what_people_read),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
