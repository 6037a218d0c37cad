/*
 * ht.pml: a model of the HT protocol as the GPU kernels run it (kernels/cuda/ht_device.cuh), for spin.  run.py checks
 * it: python3 tests/model/run.py ht,
 *
 * ## What stands for what
 *   block(r)       block 0 of each kernel of rank r, which speaks for it, and what waits for rows and partials
 *   pusher(r)      the warps that push, between the barriers before and after it
 *   server()       leave() and join() of server/node/team_cuda.c, with agree() in it; kills the worker; cut() is
 *                  team_cuda.c's, and libepclient's when it hears that its rank is lost.
 *   begin, ask, take_asks, announce, take_grants, close, drain, ...    the functions of these names in
 *                  kernels/cuda/ht_*.cuh; open_of() is the gate in pusher(), pushed() is tell_done()
 * A token of each rank goes to all ranks, or to the next one only (SPARSE), always in one row.  What a rank sends to
 * itself is left out, but for the place that its rows take.
 *
 * ## What is checked
 * A row and a partial hold the tag of the op that wrote them last, and its rank.
 *   - Who finds a header, `done` or the tag of a partial finds that row or partial, of that op and that rank.
 *   - Nobody writes a row or a partial but while the op that it is for is open at its owner (`opened`): not before the
 *     owner has begun it, and not after it is over, when the memory is the worker's or the next op's.
 *   - What `arrived` of a dispatch names has come, and what came of others is zeros; what it names of a combine is in
 *     the sum.  All that did not leave are named, unless TIMEOUTS or a stale handle says otherwise.
 *   - Nothing waits for ever: every rank comes to the end of its script, also when others were killed or late.  No
 *     wait has a timeout, unless TIMEOUTS says in how many ops one has; drain() needs none for writers that are there.
 *   - Who joins takes part in number n for all ranks or for none, himself included.
 * Ranks need not agree on who took part in an op that somebody left: each has what came to it.
 *
 * ## What is left out
 * Memory is sequentially consistent; that there are fences where things are done in an order here is taken for granted
 * (MUTANT_LOOKS_FIRST, MUTANT_HEADER_FIRST, ... are what happens otherwise).  kDrainNs is over when who has left was
 * told so, or is dead, and has no row in hand; and its rank is joined again when nobody has one in hand.  What a rank
 * that has left reads is void (`out`).  What workers can forge, ops that do not fit and lack of room are not modelled.
 * LL has memory of its own: an LL op (LL_BETWEEN) is but a wait for those that are not absent.
 *
 * Steps that are not atomic in the kernels and are here commute with whatever others do meanwhile.  A worker can be
 * killed between any two writes to peers all the same (DYING).
 *
 * Macros: R ranks (2, 3), N dispatches, a script (PAIRS, ...), SPARSE, LEAVES (VICTIM is killed; LIVES_ON: its worker
 * is not), JOINS, both (it is killed and comes back), TIMEOUTS, MUTANT_... (what must be caught).
 */
#if defined(LEAVES) || defined(JOINS)
#define MEMBERSHIP
#endif
#ifndef R
#define R 2 /* ranks */
#endif
#ifndef N
#define N 2 /* dispatches */
#endif
#ifndef VICTIM
#define VICTIM (R - 1) /* the rank that leaves or joins */
#endif
#define ALL ((1 << R) - 1)
#define BIT(x) (1 << (x))
#define BELOW(x) (BIT(x) - 1)
#define IN(mask, x) ((mask) >> (x) & 1)
#define POPC(mask) (IN(mask, 0) + IN(mask, 1) + IN(mask, 2))

/* ---- the ops of every rank, in the order of its stream ------------------------------ */

#define DISPATCH 0
#define COMBINE 1
#define LL 2

#if defined(PAIRS) /* dispatch, combine */
#define KIND (step % 2)
#define H 0
#define STEPS (2 * N)
#define FIRST(n) (2 * ((n) - 1))
#elif defined(PASSES) /* dispatch, combine it twice: forward and backward */
#define KIND (step % 3 > 0)
#define H 0
#define STEPS (3 * N)
#define FIRST(n) (3 * ((n) - 1))
#elif defined(INTERLEAVED) /* dispatch a, dispatch b, combine a, combine b */
#define KIND (step % 4 / 2)
#define H (step % 2)
#define STEPS (2 * N)
#define FIRST(n) (((n) - 1) / 2 * 4 + ((n) - 1) % 2)
#elif defined(SKIPPED) /* no combine ever */
#define KIND DISPATCH
#define H 0
#define STEPS N
#define FIRST(n) ((n) - 1)
#elif defined(LL_BETWEEN) /* dispatch, LL, combine, LL */
#define KIND (step % 2 -> LL : step % 4 / 2)
#define H 0
#define STEPS (4 * N)
#define FIRST(n) (4 * ((n) - 1))
#endif
#ifdef CACHED /* all but the first dispatch use its routing: who has not been there cannot */
#define USABLE (n == 1 || h_number[HANDLE(r, h)] > 0)
#else
#define USABLE true
#endif

/* ---- memory ------------------------------------------------------------------------- */

#define C 3 /* tags of a dispatch and its combines */
#define TAG(dispatch, combines) ((dispatch) * C + (combines))
#define PAIR(w, r) ((w) * R + (r)) /* of w, for r or from r */
#define VALUE(tag, s) ((tag) * R + (s) + 1)
#define ZERO 0

/* windows */
byte ask_first[R * R], ask_rest[R * R], grant[R * R], place[R * R]; /* notes, in the window of who tells them */
byte begun[R * R], done[R * R], ceased[R * R], closed[R * R];
byte row[R * R], header[R * R], partial[R * R], partial_tag[R * R]; /* by place */

/* ep_device_state of each rank */
#define HANDLE(r, h) ((r) * 2 + (h))
bit absent[R * R];   /* from */
byte ht_from[R * R];
byte ht_begun[R], number[R], combines[R];
byte h_number[R * 2], h_arrived[R * 2], h_sent[R * 2];
bit h_routed[R * 2];

/* ep_device_ht_run: what block and pusher tell each other */
bit pushing[R];
byte tag_of[R], number_of[R], kind_of[R], members_of[R], to_of[R], unsent[R];
byte granted_at[R * R]; /* the places of its rows */

byte ll_sent[R];

/* workers */
bit doomed;     /* VICTIM's is killed */
byte ceased_processes; /* of it */

/* ---- what only the proof knows ---------------------------------------------------------- */

byte opened[R];  /* tag of the op whose rows or partials may come */
bit hand[R];     /* a row is in hand: between the look at the gate and the end of its stores */
bit out[R];      /* has left: what it reads is void */
byte joined;     /* VICTIM: the number that it joined at */
byte without[R]; /* the highest number that a rank did without VICTIM */
byte lates;      /* timeouts so far */

#if R == 2
#define EACH(option) option(0) option(1)
#define NO_HAND !(hand[0] || hand[1])
#else
#define EACH(option) option(0) option(1) option(2)
#define NO_HAND !(hand[0] || hand[1] || hand[2])
#endif
#define PRESENT_BIT(p) | (!absent[PAIR(r, p)] && ht_from[PAIR(r, p)] <= n) << (p)
#define SEEN (0 EACH(PRESENT_BIT))
#ifdef SPARSE /* a rank's token goes to the next rank only, otherwise to all */
#define GOAL(s) BIT(((s) + 1) % R)
#define COMES(d) BIT(((d) + R - 1) % R)
#else
#define GOAL(s) ALL
#define COMES(d) ALL
#endif

#ifdef MEMBERSHIP
#define MAY_LACK BIT(VICTIM)
#define DYING (r == VICTIM && doomed) /* it dies at the next wait or in the middle of what it writes */
#define ESCAPE :: DYING -> goto dies
#ifdef MUTANT_BLIND
#define LEFT(p) false
#else
#define LEFT(p) (absent[PAIR(r, p)] || ht_from[PAIR(r, p)] > n)
#endif
#else
#define MAY_LACK 0
#define DYING false
#define ESCAPE
#define LEFT(p) false
#endif
#define DEAD(d) (d == VICTIM && doomed && ceased_processes == 2)
#ifdef TIMEOUTS
#define TIME_IS_OVER (expired || lates < TIMEOUTS)
#else
#define TIME_IS_OVER false
#endif
#ifdef MUTANT_NOT_CLOSED
#define OVER(p) LEFT(p)
#else
#define OVER(p) (LEFT(p) || closed[PAIR(r, p)] >= tag)
#endif

/* ---- waiting ------------------------------------------------------------------------- */

/* Of the ranks in `todo`, in any order: there(p), or it is given up. */
#ifdef MUTANT_NO_SECOND_LOOK
#define GIVEN_UP(p, there, gave_up) (OVER(p) || gave_up(p))
#else
#define GIVEN_UP(p, there, gave_up) (!there(p) && (OVER(p) || gave_up(p)))
#endif
#define AWAIT(p, todo, there, gave_up, then) \
    :: atomic { IN(todo, p) && there(p) && !DYING -> todo = todo & ~BIT(p); then(p) } \
    :: atomic { IN(todo, p) && GIVEN_UP(p, there, gave_up) && !DYING -> todo = todo & ~BIT(p); gone = gone | BIT(p) } \
    :: atomic { IN(todo, p) && !there(p) && TIME_IS_OVER && !DYING -> todo = todo & ~BIT(p); be_late(p) }
#define NEVER_SO(p) false

inline be_late(p)
{
    lates = (expired -> lates : lates + 1);
    expired = 1;
    late = late | BIT(p)
}

/* ---- notes --------------------------------------------------------------------------- */

#define FIRST_ASKED(p) (ask_first[PAIR(p, r)] == tag)
#ifdef MUTANT_ONE_TAG /* for all of a note: the others are what they are */
#define REST_ASKED(p) (ask_rest[PAIR(p, r)] > 0)
#else
#define REST_ASKED(p) (ask_rest[PAIR(p, r)] == tag)
#endif
#define FIRST_BEYOND(p) (ask_first[PAIR(p, r)] > tag)
#define REST_BEYOND(p) (ask_rest[PAIR(p, r)] > tag)
#define GRANTED(p) (grant[PAIR(p, r)] == tag)
#define GRANT_BEYOND(p) (grant[PAIR(p, r)] > tag)

inline ask()
{
    d = 0;
    do
    :: d < R -> ask_first[PAIR(r, d)] = (IN(members, d) -> tag : ask_first[PAIR(r, d)]);
                ask_rest[PAIR(r, d)] = (IN(members, d) -> tag : ask_rest[PAIR(r, d)]); d++
    :: d == R -> break
    od;
    d = 0
}

#define THEN_REST(p) rest = rest | BIT(p)
#define THEN_ASKED(p) assert(ask_rest[PAIR(p, r)] == tag); got = got | BIT(p)
#define AWAIT_FIRST(p) AWAIT(p, todo, FIRST_ASKED, FIRST_BEYOND, THEN_REST)
#define AWAIT_REST(p) AWAIT(p, rest, REST_ASKED, REST_BEYOND, THEN_ASKED)

inline take_asks(from_whom)
{
    todo = (from_whom) & ~BIT(r);
    do
    EACH(AWAIT_FIRST)
    EACH(AWAIT_REST)
    ESCAPE
    :: (todo | rest) == 0 && !DYING -> break
    od
}

/* Part of an atomic step, as all below unless they say otherwise. */
inline give(mask)
{
    d = 0;
    do
    :: d < R && IN(mask, d) ->
        grant[PAIR(r, d)] = tag;
        place[PAIR(r, d)] = POPC((mask) & COMES(r) & BELOW(d));
        d++
    :: d < R && !IN(mask, d) -> d++
    :: d == R -> break
    od;
    d = 0
}

#ifdef MUTANT_OWN_PLACE /* the source finds out where its rows go */
#define PLACE_OF_ROW(p) POPC(members & COMES(p) & BELOW(r))
#else
#define PLACE_OF_ROW(p) place[PAIR(p, r)]
#endif
#define THEN_KEEP(p) granted_at[PAIR(r, p)] = PLACE_OF_ROW(p); got = got | BIT(p)
#define AWAIT_GRANT(p) AWAIT(p, todo, GRANTED, GRANT_BEYOND, THEN_KEEP)

inline take_grants()
{
    todo = members & ~BIT(r);
    do
    EACH(AWAIT_GRANT)
    ESCAPE
    :: todo == 0 && !DYING -> break
    od
}

/* ---- the gate ------------------------------------------------------------------------ */

/* To all ranks of the mask, none of which sees the others' memory. */
#define TELL(word, mask, what) \
    d = 0; \
    do \
    :: d < R && IN(mask, d) -> word[PAIR(d, r)] = (DEAD(d) -> word[PAIR(d, r)] : what); d++ \
    :: d < R && !IN(mask, d) -> d++ \
    :: DYING -> goto dies \
    :: d == R && !DYING -> break \
    od; \
    d = 0

inline close()
{
#ifdef MUTANT_NOT_CLOSED
    skip
#else
    TELL(closed, ALL, tag)
#endif
}

/* kDrainNs */
#define LONG_AGO(s) (LEFT(s) && (DEAD(s) || joined > n || absent[PAIR(s, r)] && !hand[s]))
#ifdef MUTANT_CEASED_IS_NOTHING
#define HAS_CEASED(s) false
#else
#define HAS_CEASED(s) (ceased[PAIR(r, s)] == tag)
#endif
#define WRITES_NOT(s) (begun[PAIR(r, s)] != tag || done[PAIR(r, s)] == tag || HAS_CEASED(s) || LONG_AGO(s))

inline drain()
{
#ifndef MUTANT_NO_DRAIN
    d = 0;
    do
    :: d < R && (d == r || WRITES_NOT(d)) && !DYING -> d++
    ESCAPE
    :: d == R -> break
    od;
#endif
    d = 0
}

/* ---- a worker dies --------------------------------------------------------------------- */

inline forget_state()
{
    pushing[r] = 0; hand[r] = 0; unsent[r] = 0; opened[r] = 0; number[r] = 0; combines[r] = 0;
    tag_of[r] = 0; number_of[r] = 0; kind_of[r] = 0; members_of[r] = 0; to_of[r] = 0;
    d = 0;
    do
    :: d < 2 ->
        h_number[HANDLE(r, d)] = 0; h_routed[HANDLE(r, d)] = 0; h_arrived[HANDLE(r, d)] = 0; h_sent[HANDLE(r, d)] = 0;
        d++
    :: d == 2 -> break
    od;
#ifndef JOINS
    ht_begun[r] = 0;
    d = 0;
    do
    :: d < R ->
        begun[PAIR(r, d)] = 0; done[PAIR(r, d)] = 0; ceased[PAIR(r, d)] = 0; closed[PAIR(r, d)] = 0;
        row[PAIR(r, d)] = 0; header[PAIR(r, d)] = 0; partial[PAIR(r, d)] = 0; partial_tag[PAIR(r, d)] = 0;
        granted_at[PAIR(r, d)] = 0;
        d++
    :: d == R -> break
    od;
#endif
    d = 0
}

/* When both have, what nobody will read any more is 0. */
inline cease()
{
    ceased_processes++;
    if
    :: ceased_processes == 2 -> forget_state()
    :: else
    fi;
    d = 0
}

/* ---- pushing --------------------------------------------------------------------------- */

#ifdef MUTANT_NO_GATE
#define OPEN_BIT(p) | 1 << (p)
#else
#define OPEN_BIT(p) | (closed[PAIR(r, p)] < tag && !LEFT(p)) << (p)
#endif
#define OPEN (0 EACH(OPEN_BIT))
#define PLACE(d) (kind_of[r] == DISPATCH -> granted_at[PAIR(r, d)] : PLACE_OF_PARTIAL(d))
/* Where partials from r lie at s: behind those of ranks below r that its token goes to. */
#define PLACE_OF_PARTIAL(s) POPC(GOAL(s) & BELOW(r))

inline write(d)
{
    assert(out[d] || opened[d] == tag);
    if
    :: kind_of[r] == DISPATCH -> row[PAIR(d, PLACE(d))] = VALUE(tag, r)
    :: else -> partial[PAIR(d, PLACE(d))] = VALUE(tag, r)
    fi
}

inline say_that_it_is_there(d)
{
    if
    :: kind_of[r] == DISPATCH -> header[PAIR(d, PLACE(d))] = tag
    :: else -> partial_tag[PAIR(d, PLACE(d))] = tag
    fi
}

inline write_all()
{
    d = 0;
    do
    :: d < R && IN(to, d) && !DEAD(d) -> write(d); d++
    :: d < R && (!IN(to, d) || DEAD(d)) -> d++
    :: DYING -> goto dies
    :: d == R && !DYING -> break
    od;
    d = 0
}

inline say_all()
{
    d = 0;
    do
    :: d < R && IN(to, d) && !DEAD(d) -> say_that_it_is_there(d); d++
    :: d < R && (!IN(to, d) || DEAD(d)) -> d++
    :: DYING -> goto dies
    :: d == R && !DYING -> break
    od;
    d = 0
}

inline tell_done()
{
    TELL(done, members_of[r] & ~unsent[r], tag);
    TELL(ceased, members_of[r] & unsent[r], tag)
}

#ifdef MUTANT_HEADER_FIRST
#define FIRST_PART say_all()
#define SECOND_PART write_all()
#else
#define FIRST_PART write_all()
#define SECOND_PART say_all()
#endif

proctype pusher(byte r)
{
    byte tag, n, to, d;

end_idle:
life:
    do
    :: atomic {
        pushing[r] && !DYING ->
        tag = tag_of[r];
        n = number_of[r];
        to = to_of[r] & OPEN;
        unsent[r] = unsent[r] | to_of[r] & ~to;
        hand[r] = to != 0
    }
#ifdef MUTANT_LOOKS_FIRST
        atomic { TELL(begun, members_of[r], tag) }
#endif
#ifdef MUTANT_DONE_FIRST
        atomic { tell_done() }
#endif
        atomic { FIRST_PART }
        atomic { SECOND_PART; hand[r] = 0 }
        atomic {
#ifndef MUTANT_DONE_FIRST
            tell_done();
#endif
            tag = 0; n = 0; to = 0;
            pushing[r] = 0
        }
    ESCAPE
    od;
#ifdef MEMBERSHIP
dies:
    atomic { cease(); tag = 0; n = 0; to = 0 }
end_dead:
    !doomed;
    goto life
#else
dies:
    skip
#endif
}

/* ---- dispatch ------------------------------------------------------------------------------- */

#define FIRST_OF(s) POPC(given & COMES(r) & BELOW(s)) /* the first row of s here */
#define HEADER_THERE(s) (header[PAIR(r, FIRST_OF(s))] == tag)
#define ROWS_THERE(s) (done[PAIR(r, s)] == tag)
#define NO_MORE_ROWS(s) (ceased[PAIR(r, s)] == tag || done[PAIR(r, s)] == tag)
#define CEASED(s) (ceased[PAIR(r, s)] == tag)
#define THEN_ROW(s) assert(out[r] || row[PAIR(r, FIRST_OF(s))] == VALUE(tag, s))
#define AWAIT_HEADER(p) AWAIT(p, todo, HEADER_THERE, NO_MORE_ROWS, THEN_ROW)
#define AWAIT_ROWS(p) AWAIT(p, rest, ROWS_THERE, CEASED, THEN_ROW)

inline receive_rows()
{
    todo = given & COMES(r) & ~BIT(r);
    rest = todo;
    do
    EACH(AWAIT_HEADER)
    EACH(AWAIT_ROWS)
    ESCAPE
    :: (todo | rest) == 0 && !DYING -> break
    od
}

#define LOST (gone | late)

inline zero_sources()
{
    d = 0;
    do
    :: d < R && IN(LOST & given & COMES(r), d) -> row[PAIR(r, FIRST_OF(d))] = ZERO; d++
    :: d < R && !IN(LOST & given & COMES(r), d) -> d++
    :: d == R -> break
    od;
    d = 0
}

inline check_rows()
{
    d = 0;
    do
    :: d < R ->
        assert(out[r] || d == r || !IN(given & COMES(r), d) ||
               row[PAIR(r, FIRST_OF(d))] == (IN(LOST, d) -> ZERO : VALUE(tag, d)));
        d++
    :: d == R -> break
    od;
    d = 0
}

/* Is everybody in it, and do the ranks agree on when VICTIM joined? */
inline check_arrived(arrived)
{
#ifdef TIMEOUTS
    skip
#else
    assert(out[r] || (arrived | MAY_LACK) == ALL);
#ifndef CACHED
    assert(out[r] || out[VICTIM] || IN(arrived, VICTIM) || n < joined);
#endif
    without[r] = (out[r] || IN(arrived, VICTIM) -> without[r] : n)
#endif
}

inline finish_dispatch()
{
    if
    :: ok -> check_rows(); check_arrived(given & ~LOST)
    :: else
    fi;
    number[r] = n;
    combines[r] = 0;
    if
    :: !stale ->
        h_number[HANDLE(r, h)] = n;
        h_routed[HANDLE(r, h)] = ok && late == 0 && !LEFT(r);
        h_arrived[HANDLE(r, h)] = (ok -> given & ~LOST : 0);
        h_sent[HANDLE(r, h)] = (ok -> members & ~unsent[r] : 0)
    :: else
    fi
}

/* ---- combine ---------------------------------------------------------------------------------- */

#ifdef MUTANT_PARTIALS_BY_MEMBERS /* not as they were when it was dispatched */
#define PARTIAL_FROM(p) PAIR(r, POPC(GOAL(r) & members & BELOW(p)))
#else
#define PARTIAL_FROM(p) PAIR(r, POPC(GOAL(r) & BELOW(p)))
#endif
#ifdef MUTANT_ANY_PARTIAL
#define PARTIAL_THERE(p) (partial_tag[PARTIAL_FROM(p)] > 0)
#else
#define PARTIAL_THERE(p) (partial_tag[PARTIAL_FROM(p)] == tag)
#endif
#define THEN_SUM(p) assert(out[r] || partial[PARTIAL_FROM(p)] == VALUE(tag, p)); got = got | BIT(p)
#define AWAIT_PARTIAL(p) AWAIT(p, todo, PARTIAL_THERE, NO_MORE_ROWS, THEN_SUM)

inline sum_tokens()
{
    todo = members & h_sent[HANDLE(r, h)] & GOAL(r) & ~BIT(r);
    do
    EACH(AWAIT_PARTIAL)
    ESCAPE
    :: todo == 0 && !DYING -> break
    od
}

inline finish_combine()
{
    combines[r]++;
#ifndef TIMEOUTS
    assert(!ok || out[r] || (got | BIT(r) | MAY_LACK | ALL & ~GOAL(r)) == ALL)
#endif
}

/* ---- a rank ------------------------------------------------------------------------------------- */

inline raise()
{
    ht_begun[r] = (kind == DISPATCH && n > ht_begun[r] -> n : ht_begun[r])
}

inline begin()
{
    kind = KIND;
    h = H;
    n = (kind == DISPATCH -> number[r] + 1 : h_number[HANDLE(r, h)]);
    tag = (kind == DISPATCH -> TAG(n, 0) : TAG(number[r], combines[r] + 1));
    stale = (kind == DISPATCH -> !USABLE : n == 0 || !h_routed[HANDLE(r, h)]);
#ifndef MUTANT_RAISES_LATER
    raise()
#endif
}

/* In one step with the look: nobody can tell. */
inline look_and_ask()
{
    members = SEEN;
    ok = IN(members, r) && !stale;
    members = (ok -> members : 0);
    opened[r] = (ok && !out[r] -> tag : 0);
    unsent[r] = 0;
    ask()
}

inline start_pushing(to)
{
    tag_of[r] = tag;
    number_of[r] = n;
    kind_of[r] = kind;
    members_of[r] = members;
    to_of[r] = (to) & ~BIT(r);
    pushing[r] = 1
}

inline announce()
{
#ifdef MUTANT_RAISES_LATER
    raise();
#endif
#if !defined(MUTANT_NOT_ANNOUNCED) && !defined(MUTANT_LOOKS_FIRST)
    TELL(begun, members, tag)
#else
    skip
#endif
}

inline forget()
{
    n = 0; tag = 0; h = 0; d = 0; members = 0; todo = 0; rest = 0; got = 0; given = 0; gone = 0; late = 0;
    ok = 0; stale = 0; expired = 0; kind = DISPATCH
}

#define LL_THERE(p) (p == r || ll_sent[p] >= ll_sent[r] || absent[PAIR(r, p)])

inline ll_op()
{
    atomic { ll_sent[r]++ }
    d = 0;
    do
    :: atomic { d < R && LL_THERE(d) && !DYING -> d++ }
    ESCAPE
    :: d == R -> break
    od
}

/* From the asks to what others have granted. */
inline exchange()
{
    take_asks(members);
    atomic {
        given = members & (got | BIT(r));
        ok = late == 0;
        got = 0;
        if
        :: ok -> give(given)
        :: else
        fi
    }
    if
    :: ok ->
        atomic { announce() }
        take_grants();
        atomic { start_pushing(GOAL(r)); to_of[r] = to_of[r] & got; unsent[r] = GOAL(r) & ~got & ~BIT(r) }
        receive_rows()
    :: !ok
    fi
}

proctype block(byte r)
{
    byte step, kind, n, tag, h, d, members, todo, rest, got, given, gone, late;
    bit ok, stale, expired;

life:
    do
    :: step >= STEPS -> break
    :: step < STEPS && KIND == LL -> ll_op(); atomic { forget(); step++ }
    :: atomic { step < STEPS && KIND != LL && !DYING -> begin() }
        atomic { look_and_ask() }
        if
        :: ok && kind == DISPATCH -> exchange()
        :: ok && kind == COMBINE ->
            atomic { announce() }
#ifdef MUTANT_NOT_ASKED
            atomic { got = members & h_arrived[HANDLE(r, h)] & COMES(r) }
#else
            take_asks(members & h_arrived[HANDLE(r, h)] & COMES(r));
#endif
            atomic {
                start_pushing(got);
                unsent[r] = members & (COMES(r) | ~h_arrived[HANDLE(r, h)]) & ~got & ~BIT(r);
                got = 0
            }
            sum_tokens()
        :: !ok
        fi;
        if
        :: !pushing[r] && !DYING
        ESCAPE
        fi;
#ifdef MUTANT_ZERO_FIRST
        atomic { zero_sources() }
#endif
        atomic { close() }
        if
        :: !ok || LOST != 0 -> drain()
        :: else
        fi;
        atomic {
            if
            :: kind == DISPATCH ->
#ifndef MUTANT_ZERO_FIRST
                if
                :: ok -> zero_sources()
                :: else
                fi;
#endif
                finish_dispatch()
            :: else -> finish_combine()
            fi;
            opened[r] = 0;
            forget();
            step++
        }
    ESCAPE
    od;
#ifdef MEMBERSHIP
end_done:
    DYING;
dies:
    atomic { cease(); forget(); step = 0 }
end_dead:
    atomic {
        !doomed ->
        step = (number[r] < N -> FIRST(number[r] + 1) : STEPS);
        goto life
    }
#else
dies:
    skip
#endif
}

/* ---- the server ------------------------------------------------------------------------------------------ */

inline tell_absent(v)
{
    do
    :: atomic {
        absent[PAIR(i, VICTIM)] = v;
        i++;
        if
        :: i == R -> i = 0; break
        :: else
        fi
    }
    od
}

inline tell_from(v)
{
    do
    :: atomic {
        ht_from[PAIR(i, VICTIM)] = v;
        absent[PAIR(i, VICTIM)] = 0;
        i++;
        if
        :: i == R -> i = 0; break
        :: else
        fi
    }
    od
}

inline read_begun()
{
    highest = 0;
    do
    :: atomic {
        highest = (ht_begun[i] > highest -> ht_begun[i] : highest);
        i++;
        if
        :: i == R -> i = 0; break
        :: else
        fi
    }
    od
}

inline leave()
{
    atomic { out[VICTIM] = 1; opened[VICTIM] = 0 }
    tell_absent(1)
}

inline kill()
{
    doomed = 1
}

/* What the server, and libepclient when it hears of it, do to the state of the rank that is lost. */
inline cut()
{
    atomic {
        do
        :: i < R -> absent[PAIR(VICTIM, i)] = 1; i++
        :: i == R -> break
        od;
        i = 0
    }
}

inline join()
{
    read_begun();
    v = highest + 1;
    do
    :: before = highest;
        tell_from(v);
        read_begun();
        if
#ifdef MUTANT_NOT_AGREED
        :: true -> break
#else
        :: highest < v -> break
        :: else -> v = highest + 1 + 2 * (highest - before)
#endif
        fi
    od;
    atomic { /* write_state */
        ht_begun[VICTIM] = v - 1;
        number[VICTIM] = v - 1;
        out[VICTIM] = 0;
        joined = v;
        do
        :: i < R ->
            assert(i == VICTIM || without[i] < v);
            absent[PAIR(VICTIM, i)] = 0;
            ht_from[PAIR(VICTIM, i)] = (i == VICTIM -> v : 1);
            i++
        :: else -> break
        od;
        i = 0;
        ceased_processes = 0;
        doomed = 0
    }
}

#ifdef MEMBERSHIP
proctype server()
{
    byte i, v, highest, before;

#ifdef LEAVES
#ifdef LIVES_ON
    leave();
    cut()
#else
    if
    :: kill(); leave(); cut()
    :: leave(); cut(); kill()
    fi
#endif
#endif
#ifdef JOINS
    ceased_processes == 2 && NO_HAND;
    join()
#endif
}
#endif

init
{
    atomic {
        byte i;

        for (i : 0 .. R * R - 1) {
            ht_from[i] = 1
        }
        for (i : 0 .. R - 1) {
            run block(i);
            run pusher(i)
        }
#ifdef MEMBERSHIP
#ifndef LEAVES
        for (i : 0 .. R - 1) {
            absent[PAIR(i, VICTIM)] = 1
        }
        out[VICTIM] = 1;
        doomed = 1;
#endif
        run server()
#endif
    }
}
