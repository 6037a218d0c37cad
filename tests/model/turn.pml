/*
 * turn.pml: a model of how the ranks of a group go over from one epoch to the next, for spin (run.py checks it).
 *
 * ## What stands for what
 *   epoch 0       what runs; the turn is from here.  1: the next, which is agreed on, and all ranks have attached to
 *                 it.  2: a later one
 *   record        what the store keeps, by its revisions: the newest epoch, and the turn: to which epoch, and at
 *                 which position
 *   lead          the term of whoever leads, by the store's own order; a commit holds while it is still the leader's
 *   rank          one on each server.  Position: ops begun.  Its program: boundary, op, boundary, the op is finished,
 *                 the next op, and so on.  An op is finished when all have sent for it
 *   server        hears what leaders ask, in numbers that grow with each request of whatever leader, and answers for
 *                 its rank; hears of records late, and perhaps not of each.  What it hears its rank hears in the same
 *                 step: what is between the two stays in order
 *   leader        of one term.  It begins with what the store has once it leads; withdraws what was asked before; asks
 *                 for a turn, and commits it when all have promised.  Its next step comes at any time or never, but
 *                 for the last leader
 *   late          a request that its leader does not wait for any more: it comes at any time or never
 *   in_flight     the same of a commit
 *   joiner        the last rank, absent at first, joins epoch 0 behind all that has begun
 *   change        an operator's: a record of epoch 2, which keeps the turn of the one before
 *
 * ## What is checked
 *   - Ranks that turn do so at the same boundary, to the same epoch, which the store has.  None begins an op, or has
 *     passed a boundary, beyond it.
 *   - Nobody waits for ever.
 *   - With ENDS: a finished op has all that living ranks have sent for it, and memory of epoch 0 is given back when
 *     all have finished there.
 *
 * Macros: SERVERS (2, 3), M ops, LEADERS (terms), ASKS of each, SPARSE (boundaries at even positions only), JOINS,
 * KILLED (the first rank may be), CHANGES, LATE requests, UNKNOWN commits (no answer comes), ENDS (what ranks send
 * takes its time, and what comes after the turn is looked at), LEAVES_EARLY (with ENDS: the first rank may end without
 * a turn), MUTANT_... (what must be caught).
 */
#ifndef SERVERS
#define SERVERS 2
#endif
#ifndef M
#define M 2
#endif
#ifndef LEADERS
#define LEADERS 2
#endif
#ifndef ASKS
#define ASKS 1
#endif
#ifndef LATE
#define LATE 0
#endif
#ifndef UNKNOWN
#define UNKNOWN 0
#endif

#define NONE 255
#define LAST (SERVERS - 1)
#define PAIR(r, q) ((r) * SERVERS + (q))
#define REVISIONS 5 /* the first, a change, a turn; mutants write more */

#ifdef SPARSE
#define BOUNDARY(p) ((p) % 2 == 0)
#else
#define BOUNDARY(p) true
#endif

/* ---- the store ------------------------------------------------------------------------------- */

byte revision;
byte record_epoch[REVISIONS];
byte record_to[REVISIONS]; /* the turn's */
byte record_at[REVISIONS]; /* NONE: there is no turn */
byte lead;
byte elected; /* terms so far */
byte stored_to, stored_at = NONE; /* the turn that a record has had */

inline write(epoch, to, at)
{
    assert(epoch >= record_epoch[revision]);
    assert(stored_at == NONE || at == NONE || (stored_at == at && stored_to == to));
    if
    :: at != NONE -> stored_to = to; stored_at = at
    :: else
    fi;
    revision++;
    record_epoch[revision] = epoch;
    record_to[revision] = to;
    record_at[revision] = at
}

/* ---- what a server knows, and its rank ----------------------------------------------------------- */

byte seen[SERVERS];     /* revision */
byte heard[SERVERS];    /* number of the last request */
byte promised[SERVERS]; /* position, NONE: nothing.  Its rank waits there, and none joins */
byte told_to[SERVERS];
byte told_at[SERVERS];  /* position of the turn, NONE: it has not heard of any */

bit there[SERVERS];     /* the rank begins ops in epoch 0 */
bit dead[SERVERS];
byte begins[SERVERS];   /* the position that it began with */
byte position[SERVERS];
byte passed[SERVERS];   /* 1 + position of the last boundary that it has passed without a turn */
byte turned[SERVERS];   /* 1 + position of the boundary at which it has turned */
byte lates, unknowns;

#if LATE > 0
#define NUMBER(term, i) ((term) * 16 + (i))
#else
#define NUMBER(term, i) (term) /* those of one leader come in order */
#endif
#ifdef MUTANT_NO_FENCE
#define IS_OLD(s, number) false
#elif defined(MUTANT_NO_NUMBERS)
#define IS_OLD(s, number) ((number) / 16 < heard[s] / 16)
#else
#define IS_OLD(s, number) ((number) < heard[s])
#endif
#ifdef MUTANT_PROMISES_WHAT_IT_PASSED
#define CAN_PROMISE(s, at) true
#else
#define CAN_PROMISE(s, at) (!there[s] || dead[s] || passed[s] <= (at))
#endif

/* A turn to that epoch at that position; at NONE: withdrawn.  What was promised before is void. */
inline hear_ask(s, number, to, at, good)
{
    if
    :: IS_OLD(s, number) || told_at[s] != NONE -> good = false
    :: else ->
        heard[s] = number;
        promised[s] = NONE;
        if
        :: at == NONE -> good = true
        :: at != NONE && record_epoch[seen[s]] == to && CAN_PROMISE(s, at) -> promised[s] = at; good = true
        :: else -> good = false
        fi
    fi
}

inline hear_turn(s, to, at)
{
    if
    :: told_at[s] == NONE && there[s] && !dead[s] ->
        assert(passed[s] <= at);
        told_to[s] = to;
        told_at[s] = at
    :: else
    fi
}

#ifdef MUTANT_NOT_SAID_WHERE_TO
#define TURN_TO(r) record_epoch[r]
#else
#define TURN_TO(r) record_to[r]
#endif

proctype watch(byte s)
{
end_idle:
    do
    :: atomic {
        seen[s] < revision ->
        if
        :: seen[s]++
        :: seen[s] = revision
        fi;
        if
        :: record_at[seen[s]] != NONE -> hear_turn(s, TURN_TO(seen[s]), record_at[seen[s]])
        :: else
        fi
    }
    od
}

/* ---- what ranks send, and the end of epoch 0 ------------------------------------------------------- */

#ifdef ENDS
byte arrived[SERVERS * SERVERS]; /* ops of the other rank whose messages are here */
bit masked[SERVERS * SERVERS];   /* the other rank is not waited for any more */
bit over[SERVERS * SERVERS];     /* the other rank has finished or is gone, as this server has heard */
bit done[SERVERS];               /* it has turned, and has finished what it began */
bit left[SERVERS];               /* it has ended without a turn */
bit given_back[SERVERS];
#define SENT(r, q, p) (arrived[PAIR(r, q)] > (p) || masked[PAIR(r, q)])
#else
#define SENT(r, q, p) (position[q] > (p) || dead[q])
#endif

#define HAS(r, q, p) ((r) == (q) || begins[q] > (p) || SENT(r, q, p))
#if SERVERS == 2
#define HAS_ALL(r, p) (HAS(r, 0, p) && HAS(r, 1, p))
#else
#define HAS_ALL(r, p) (HAS(r, 0, p) && HAS(r, 1, p) && HAS(r, 2, p))
#endif

#ifdef ENDS
#define USES(r) ((there[r] || turned[r]) && !done[r] && !left[r] && !dead[r])
#define GONE(r) (done[r] || left[r] || dead[r])

#ifdef MUTANT_DONE_IS_MASKED
#define MASKS(q) true
#elif defined(MUTANT_ANY_BYE_IS_DONE)
#define MASKS(q) (dead[q] || (left[q] && told_at[q] == NONE))
#else
#define MASKS(q) (!done[q])
#endif

/* From q to r. */
proctype wire(byte r, q)
{
end_idle:
    do
    :: atomic { arrived[PAIR(r, q)] < position[q] && !given_back[q] -> arrived[PAIR(r, q)]++ }
    :: atomic { GONE(q) && !over[PAIR(r, q)] -> over[PAIR(r, q)] = 1; masked[PAIR(r, q)] = MASKS(q) }
    od
}

#ifdef MUTANT_ONLY_ITS_OWN_IS_DONE
#define IS_OVER(s, q) ((s) != (q) || GONE(q))
#else
#define IS_OVER(s, q) ((s) == (q) -> GONE(q) : over[PAIR(s, q)])
#endif
#if SERVERS == 2
#define ALL_OVER(s) (IS_OVER(s, 0) && IS_OVER(s, 1))
#else
#define ALL_OVER(s) (IS_OVER(s, 0) && IS_OVER(s, 1) && IS_OVER(s, 2))
#endif

proctype give_back(byte s)
{
    byte q;

end_idle:
    atomic {
        ALL_OVER(s) ->
        given_back[s] = 1;
        do
        :: q == SERVERS -> break
        :: else -> assert(!USES(q)); q++
        od
    }
}
#endif

/* ---- a rank ------------------------------------------------------------------------------------------ */

#define TURNS(r) (told_at[r] != NONE && position[r] >= told_at[r])
#ifdef MUTANT_DOES_NOT_WAIT
#define WAITS(r) false
#else
#define WAITS(r) (told_at[r] == NONE && promised[r] != NONE && position[r] >= promised[r])
#endif

inline turn(r)
{
    assert(stored_at == told_at[r] && stored_to == told_to[r]);
    turned[r] = position[r] + 1;
    there[r] = 0;
    q = 0;
    do
    :: q == SERVERS -> break
    :: else ->
        assert(!there[q] || dead[q] || (position[q] <= position[r] && passed[q] <= position[r]));
        assert(!turned[q] || (turned[q] == turned[r] && told_to[q] == told_to[r]));
        q++
    od;
    q = 0
}

inline begin_op(r)
{
    position[r]++;
    q = 0;
    do
    :: q == SERVERS -> break
    :: else -> assert(!turned[q] || position[r] < turned[q]); q++
    od;
    q = 0
}

inline finish_op(r)
{
#ifdef ENDS
    q = 0;
    do
    :: q == SERVERS -> break
    :: else ->
        assert(q == r || begins[q] >= position[r] || dead[q] || left[q] || arrived[PAIR(r, q)] >= position[r]);
        q++
    od;
    q = 0
#else
    skip
#endif
}

#ifdef LEAVES_EARLY
#define MAY_LEAVE(r) ((r) == 0)
#else
#define MAY_LEAVE(r) false
#endif
#define FINISHED(r) (position[r] == begins[r] || HAS_ALL(r, position[r] - 1))

proctype rank(byte r)
{
    byte q;

end_idle: /* nobody joins */
    (there[r]);
    if
    :: begins[r] > 0 -> goto op /* with a boundary or without: nobody knows */
    :: true
    fi;
boundary:
    if
    :: dead[r] -> goto ended
    :: atomic { !dead[r] && BOUNDARY(position[r]) && TURNS(r) -> turn(r) }
    :: atomic { !dead[r] && BOUNDARY(position[r]) && !TURNS(r) && !WAITS(r) -> passed[r] = position[r] + 1 }
    :: !dead[r] && !BOUNDARY(position[r])
    :: MAY_LEAVE(r) && !dead[r] -> goto leaves
    fi;
    atomic {
        if
        :: dead[r] -> goto ended
        :: !dead[r] && FINISHED(r) -> finish_op(r)
        fi;
        if
        :: turned[r] || position[r] == M -> goto leaves
        :: else -> begin_op(r); goto boundary
        fi
    }
op:
    atomic {
        if
        :: dead[r] -> goto ended
        :: else -> begin_op(r); goto boundary
        fi
    }
leaves:
    atomic {
#ifdef ENDS
        if
        :: dead[r]
        :: !dead[r] && turned[r] -> done[r] = 1
        :: !dead[r] && !turned[r] -> left[r] = 1
        fi;
#endif
        there[r] = 0
    }
ended:
    skip
}

#ifdef JOINS
#ifdef MUTANT_JOINS_AT_ANY_TIME
#define MAY_JOIN true
#else
#define MAY_JOIN (promised[LAST] == NONE)
#endif

proctype joiner()
{
    byte q, most;

end_idle:
    atomic {
        MAY_JOIN ->
        do
        :: q == SERVERS -> break
        :: else ->
            most = (most < position[q] -> position[q] : most);
            q++
        od;
        if
        :: most < M ->
            begins[LAST] = most;
            position[LAST] = most;
#ifndef MUTANT_JOINS_BEFORE_THE_BOUNDARY
            passed[LAST] = most + 1; /* others may wait at the boundary that is here */
#endif
            there[LAST] = 1
        :: else
        fi
    }
}
#endif

#ifdef KILLED
proctype killer()
{
end_idle:
    atomic { there[0] -> dead[0] = 1 }
}
#endif

/* ---- who leads -------------------------------------------------------------------------------------- */

#ifdef MUTANT_NO_TERM
#define HOLDS(term, read) (revision == (read))
#elif defined(MUTANT_NO_REVISION)
#define HOLDS(term, read) (lead == (term))
#else
#define HOLDS(term, read) (lead == (term) && revision == (read))
#endif

proctype late(byte s, number, to, at)
{
    bool good;

    if
    :: atomic { true -> hear_ask(s, number, to, at, good) }
    :: true
    fi
}

proctype in_flight(byte term, read, at)
{
    if
    :: atomic { HOLDS(term, read) -> write(record_epoch[read], record_epoch[read], at) }
    :: true
    fi
}

/* The last term has nobody after it, so it must come to its end. */
#define MAY_STOP(term) ((term) < LEADERS)

#if LATE > 0
#define NEXT count++
#else
#define NEXT skip
#endif

/* The next server hears it. */
inline ask(term, to, at)
{
    s = (term + asked) % SERVERS;
    asked++;
    if
#ifdef MUTANT_ASKS_ATTACHED_ONLY
    :: !there[s] && at != NONE -> good = true
    :: there[s] || at == NONE ->
#else
    :: true ->
#endif
        NEXT;
        hear_ask(s, NUMBER(term, count), to, at, good)
    fi;
    s = 0
}

/* The next server hears it later, or never. */
inline ask_late(term, to, at)
{
    s = (term + asked) % SERVERS;
    lates++;
    NEXT;
    run late(s, NUMBER(term, count), to, at);
    s = 0
}

/* It hears of the records late, too. */
inline look()
{
    if
    :: read < revision -> read++
    :: read = revision
    fi
}

proctype leader(byte term)
{
    byte read, asks, asked, at, s, count;
    bool good;

    atomic { elected == term - 1 -> elected = term; lead = term }
#ifdef MUTANT_OLD_VIEW
    read = seen[term % SERVERS];
#else
    read = revision;
#endif
#ifdef MUTANT_WITHDRAWS_NOTHING
    atomic { if :: record_at[read] != NONE -> goto ended :: else -> goto next fi }
#endif
again:
    atomic { if :: record_at[read] != NONE -> goto ended /* decided */ :: else fi }
withdraw:
    asked = 0;
    do
    :: asked == SERVERS -> break
    :: MAY_STOP(term) -> goto ended
    :: atomic { asked != SERVERS -> ask(term, 0, NONE); if :: !good -> goto ended :: else fi }
    :: atomic { asked != SERVERS && lates < LATE -> ask_late(term, 0, NONE) } /* and once more */
    od;
next:
    atomic {
        if
        :: goto ended /* it has no need to, or cannot */
        :: asks < ASKS -> asks++
        fi;
        asked = 0;
        good = true;
        at = 0;
        do
        :: at < M -> at++
        :: break
        od
    }
    do
    :: asked == SERVERS || !good -> break
    :: MAY_STOP(term) -> goto ended
    :: atomic { asked != SERVERS && good -> ask(term, record_epoch[read], at) }
    :: atomic { asked != SERVERS && good && lates < LATE -> ask_late(term, record_epoch[read], at); good = false }
    od;
    atomic { if :: !good -> look(); at = 0; goto again :: else fi }
#ifdef MUTANT_TELLS_FIRST
    atomic { hear_turn(0, record_epoch[read], at) }
#endif
commit:
    if
    :: MAY_STOP(term) -> goto ended
    :: atomic { HOLDS(term, read) -> write(record_epoch[read], record_epoch[read], at); goto ended }
    :: atomic { !HOLDS(term, read) -> if :: lead == term -> look(); at = 0; goto again :: else -> goto ended fi }
    :: atomic { unknowns < UNKNOWN -> unknowns++; run in_flight(term, read, at) }
#ifdef MUTANT_WITHDRAWS_BLINDLY
        goto withdraw
#elif defined(MUTANT_LOOKS_INSTEAD_OF_WRITING)
        atomic { read = revision; goto again }
#else
        goto commit /* the same once more: when that is answered, what was before has happened or never will */
#endif
    fi;
ended:
    atomic { read = 0; asks = 0; asked = 0; at = 0; count = 0; good = false }
}

#ifdef CHANGES
proctype change()
{
    byte read;

    do
    :: read = revision;
        if
#ifdef MUTANT_BUILT_BEFORE
        :: atomic { true -> write(2, record_to[read], record_at[read]); break }
#elif defined(MUTANT_FORGETS_THE_TURN)
        :: atomic { revision == read -> write(2, 0, NONE); break }
#else
        :: atomic { revision == read -> write(2, record_to[read], record_at[read]); break }
        :: revision != read
#endif
        fi
    od
}
#endif

init
{
    byte s, q;

    atomic {
        record_epoch[0] = 1;
        record_at[0] = NONE;
        do
        :: s == SERVERS -> break
        :: else ->
            promised[s] = NONE;
            told_at[s] = NONE;
            begins[s] = 0;
            there[s] = 1;
            s++
        od;
#ifdef JOINS
        there[LAST] = 0;
        begins[LAST] = NONE;
        run joiner();
#endif
#ifdef KILLED
        run killer();
#endif
#ifdef CHANGES
        run change();
#endif
        s = 0;
        do
        :: s == SERVERS -> break
        :: else ->
            run watch(s);
            run rank(s);
#ifdef ENDS
            run give_back(s);
            q = 0;
            do
            :: q == SERVERS -> break
            :: else ->
                if
                :: q != s -> run wire(s, q)
                :: else
                fi;
                q++
            od;
#endif
            s++
        od;
        s = 1;
        do
        :: s > LEADERS -> break
        :: else -> run leader(s); s++
        od
    }
}
