/*
 * epoch.pml: a model of how servers agree on the next epoch of a group, for spin (run.py checks it).
 *
 * ## What stands for what
 *   store_...      the group's record: epoch, and the term of the leader that prepared it
 *   lead           the term of whoever leads, by the store's own order; a commit holds while it is still the leader's
 *   member         a server's part: the epoch that it runs, one that is prepared, the highest term that it has heard of.
 *                  It learns of records late, and perhaps of the newest one only.
 *   leader         of one term: reads the record, clears what earlier ones have left, prepares the next epoch on all
 *                  members, commits it, or aborts it when a member cannot; again for members that lack their part.  Each
 *                  request says what the store has, so a member that has not heard of it yet does then.  The next step
 *                  of a leader that has lost the lead, or that has died with a request under way, comes at any time or
 *                  never
 *   crash          a member ends and starts again: nothing of its parts is left
 *
 * ## What is checked
 *   - Servers that run the same epoch run what one leader has prepared.
 *   - A member runs what the store has, and never goes back.
 *   - When all is quiet every member runs the record's epoch, and nothing is left prepared.
 *
 * Macros: MEMBERS (2, 3), LEADERS (terms), CHANGES that each wants to make, CRASHES of members, REFUSES (a member may
 * refuse to prepare), FORGETS (a prepared part may go by itself), OMITS (leaders of odd terms plan without the first
 * server), LOSES (what a new leader tells a member first may be lost; then a part may stay until it goes by itself),
 * MUTANT_... (what must be caught).
 */
#ifndef MEMBERS
#define MEMBERS 2
#endif
#ifndef LEADERS
#define LEADERS 2
#endif
#ifndef CHANGES
#define CHANGES 1
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef FORGETS
#define FORGETS 0
#endif

#ifdef OMITS
#define IN_PLAN(term, m) ((term) % 2 == 0 || (m) != 0)
#else
#define IN_PLAN(term, m) true
#endif

byte store_epoch = 1, store_term = 1;
byte lead = 1;
byte elected = 1; /* terms so far: who made the first epoch had the first */
byte over;        /* leaders that take no further step */
bit settled;      /* the last one among them: it would see to a member that crashes later */

byte running[MEMBERS], running_term[MEMBERS];   /* 0: none */
byte prepared[MEMBERS], prepared_term[MEMBERS]; /* 0: none */
byte heard[MEMBERS];                            /* terms below are refused */
byte missing[MEMBERS];                          /* the epoch that it lacks its part of */
byte crashes, forgets;

/* ---- a member ------------------------------------------------------------------------------- */

inline drop(m)
{
    prepared[m] = 0;
    prepared_term[m] = 0
}

inline check_together(m)
{
    other = 0;
    do
    :: other == MEMBERS -> break
    :: else ->
        assert(running[other] != running[m] || running_term[other] == running_term[m]);
        other++
    od
}

/* What was prepared is committed. */
inline serve(m)
{
    running[m] = prepared[m];
    running_term[m] = prepared_term[m];
    drop(m);
    check_together(m)
}

/* What its leader asks: beside epoch e, which the leader of term `by` made, make the next. */
inline hear_prepare(m, e, by, term, good)
{
    if
#ifndef MUTANT_NO_FENCE
    :: term < heard[m] -> good = false
#endif
    :: else ->
        heard[m] = (heard[m] < term -> term : heard[m]);
#ifndef MUTANT_DEAF
        if
        :: prepared[m] == e && prepared_term[m] == by && running[m] < e -> serve(m)
        :: else
        fi;
#endif
        prepared[m] = e + 1;
        prepared_term[m] = term;
        good = true
#ifdef REFUSES
    :: term >= heard[m] -> good = false
#endif
    fi
}

/* The leader of this term says what the store has; whatever else is prepared will not come. */
inline hear_abort(m, term, e, by)
{
    if
#ifndef MUTANT_NO_FENCE
    :: term < heard[m]
#endif
    :: else ->
        heard[m] = (heard[m] < term -> term : heard[m]);
        if
#ifndef MUTANT_ABORTS_ALL
        :: prepared[m] == e && prepared_term[m] == by
#endif
        :: else -> drop(m)
        fi
    fi
}


/* It has no part in what is committed. */
inline follow(m)
{
    running[m] = store_epoch;
    running_term[m] = store_term;
    if
#ifndef MUTANT_DROPS_THE_NEXT
    :: prepared[m] > store_epoch /* it hears late */
#endif
    :: else -> drop(m)
    fi
}

/* The record comes. */
inline learn(m)
{
    assert(store_epoch > running[m]);
    if
#ifdef MUTANT_ANY_TERM
    :: prepared[m] == store_epoch -> serve(m)
    :: prepared[m] != store_epoch && !IN_PLAN(store_term, m) -> follow(m)
#else
    :: prepared[m] == store_epoch && prepared_term[m] == store_term -> serve(m)
    :: !IN_PLAN(store_term, m) -> follow(m)
#endif
    :: else ->
        assert(CRASHES || FORGETS); /* who lives has its part */
        missing[m] = store_epoch
    fi
}

#define NEWS(m) (store_epoch > running[m] && store_epoch > missing[m])

proctype member(byte m)
{
    byte other;

end_idle:
    do
    :: atomic { NEWS(m) -> learn(m) }
    :: atomic { crashes < CRASHES && !settled && running[m] != 0 ->
                crashes++; drop(m); running[m] = 0; running_term[m] = 0;
                missing[m] = store_epoch;
                heard[m] = 0 }
    :: atomic { forgets < FORGETS && prepared[m] != 0 -> forgets++; drop(m) }
    od
}

/* ---- a leader ------------------------------------------------------------------------------------ */

#define LACKS(m) (missing[m] == store_epoch)
#if MEMBERS == 2
#define SOMEBODY_LACKS (LACKS(0) || LACKS(1))
#define ALL_KNOW (!NEWS(0) && !NEWS(1))
#else
#define SOMEBODY_LACKS (LACKS(0) || LACKS(1) || LACKS(2))
#define ALL_KNOW (!NEWS(0) && !NEWS(1) && !NEWS(2))
#endif

/* The last term has nobody after it, so it must come to its end. */
#define MAY_STOP(term) ((term) <= LEADERS)

proctype leader(byte term)
{
    byte m, e, by, changes, other;
    bool good;

    /* the lease of the one before is over, whether it knows or not */
    atomic { elected == term - 1 -> elected = term; lead = term }
    atomic { e = store_epoch; by = store_term; m = 0 }
    if
    :: changes = CHANGES /* none to make, or as many as it can */
    :: skip
    fi;
#ifndef MUTANT_NOTHING_CLEARED
    do
    :: m == MEMBERS -> break
    :: MAY_STOP(term) -> goto stopped
    :: m < MEMBERS -> atomic { hear_abort(m, term, e, by); m++ }
#ifdef LOSES
    :: m < MEMBERS -> m++
#endif
    od;
#endif
    do
    :: MAY_STOP(term) -> goto stopped
    :: atomic { changes >= CHANGES && ALL_KNOW && !SOMEBODY_LACKS -> over++; settled = settled || !MAY_STOP(term); goto ended }
    :: changes < CHANGES || (ALL_KNOW && SOMEBODY_LACKS) ->
        changes = (changes < CHANGES -> changes + 1 : changes);
        m = 0;
        good = true;
        do
        :: m == MEMBERS || !good -> break
        :: MAY_STOP(term) -> goto stopped
        :: m < MEMBERS && good && IN_PLAN(term, m) -> atomic { hear_prepare(m, e, by, term, good); m++ }
        :: m < MEMBERS && good && !IN_PLAN(term, m) -> m++
        od;
        if
        :: MAY_STOP(term) -> goto stopped
        :: good ->
            atomic {
                if
#ifdef MUTANT_NO_GUARD
                :: store_epoch >= 0 ->
#else
                :: store_epoch == e && lead == term ->
#endif
                    store_epoch = e + 1; store_term = term; e = e + 1; by = term
#ifndef MUTANT_NO_GUARD
                :: else -> goto stopped /* somebody else leads */
#endif
                fi
            }
        :: !good ->
            m = 0;
            do
            :: m == MEMBERS -> break
            :: MAY_STOP(term) -> goto stopped
            :: m < MEMBERS -> atomic { hear_abort(m, term, e, by); m++ }
            od
        fi
    od;
stopped:
    over++;
ended:
    skip
}

/* ---- all ------------------------------------------------------------------------------------------ */

/* Nothing more happens: every leader has taken its last step, and all have heard. */
proctype quiet()
{
    byte m;

    atomic {
        over == LEADERS && ALL_KNOW && !SOMEBODY_LACKS ->
        m = 0;
        do
        :: m == MEMBERS -> break
        :: else ->
            assert(running[m] == store_epoch && running_term[m] == store_term);
#ifndef LOSES
            assert(prepared[m] == 0);
#endif
            m++
        od
    }
}

init
{
    byte m, t;

    atomic {
        m = 0;
        do
        :: m == MEMBERS -> break
        :: else -> running[m] = 1; running_term[m] = 1; run member(m); m++
        od;
        t = 2;
        do
        :: t > LEADERS + 1 -> break
        :: else -> run leader(t); t++
        od;
        run quiet()
    }
}
