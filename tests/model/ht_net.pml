/*
 * ht_net.pml: a model of what HT adds for ranks on several nodes (kernels/cuda/ht_net.cuh), for spin.  run.py checks it:
 * python3 tests/model/run.py ht_net
 *
 * ## What stands for what
 *   block(r)     all blocks of each kernel of rank r: what they do at once they do here one after the other, but wait in
 *                any order
 *   network()    what is under way lands, and signals are seen, at any time
 *   server()     leave(), cut() and, as all nodes hold, the admission of server/node/team_cuda.c and span_cuda.c;
 *                others hear in any order that VICTIM has left
 *   ask_far, put_record, relay_records, sum_records, await_sum, close_far, acknowledge, ...   the functions of these
 *                names in kernels/cuda/ht_*.cuh
 * SHAPE says how ranks lie on nodes: 11, 111, 12, 22, 13 ranks.  A token of each rank goes to all ranks of other nodes
 * (ONE_WAY: rank 0's only), in one record to each node, which is put in one piece.  What ranks of one node tell and send
 * each other for tokens of their own is ht.pml's; here they ask, grant and close only.
 *
 * ## What is checked
 * An ask, a record, a row, a partial and a sum hold the tag of the op that wrote them last.
 *   - Nothing is written to where a put still reads, nothing is read where one may still land, and what is read is of
 *     the reader's op.
 *   - Rows are written while the op that they are for is open at their owner, and partials where nobody sums others.
 *   - What `arrived` of a dispatch names has come, and what came of others is zeros; what it names of a combine is in
 *     the sum.  All are named that did not leave and whose gate did not, unless TIMEOUTS says otherwise; so nobody who is
 *     there is without a gate.
 *   - Nothing waits for ever: every rank comes to the end of its script.  No wait has a timeout, unless TIMEOUTS says in
 *     how many ops one has.
 *
 * ## What is left out
 * Memory is sequentially consistent.  CLOSED and ACK are seen at once: who looks later sees them later.  What has come
 * is behind a signal of its raiser, so CLOSED counts when all that it put has landed, and ACK when all that it put up to
 * that op has.  kDrainNs is over when who has left
 * was told so and has no row in hand.  A rank that left comes back when its last op is over; that a hold lets all agree
 * on when is join.pml's.  Tags do not wrap.
 *
 * Macros: SHAPE, N dispatches, a script (PAIRS, ...), ONE_WAY, AWAY=mask (ranks that are never there), LEAVES (VICTIM's
 * worker is lost), DIES (its node, where it is alone), JOINS, LEAVES and JOINS (it comes back), TIMEOUTS, MISSED (each has
 * missed the rank before it in an op before), FORGOES (no combine of what failed), MUTANT_... (what must be caught).  Two
 * are not in run.py, with SHAPE=12 N=2 ONE_WAY LEAVES VICTIM=1: MUTANT_ONE_FLAG (SKIPPED), as twenty million states are
 * searched before, and MUTANT_ONE_BOX_BACK (PAIRS), which no search has caught so far.
 */
#if defined(LEAVES) || defined(JOINS) || defined(DIES)
#define MEMBERSHIP
#endif
#ifndef N
#define N 2 /* dispatches */
#endif
#ifndef SHAPE
#define SHAPE 11
#endif

/* ---- nodes: who is on one, the gate of rank s there, and who stands in for it --------- */

#if SHAPE == 11 || SHAPE == 111
#define R (SHAPE == 11 -> 2 : 3)
#define NODE(r) (r)
#define ON(k) BIT(k)
#define GATE(s, k) (k)
#define NEXT(g) (g)
#elif SHAPE == 22
#define NODE(r) ((r) / 2)
#define ON(k) (3 << 2 * (k))
#define GATE(s, k) (2 * (k) + (s) % 2)
#define NEXT(g) ((g) ^ 1)
#elif SHAPE == 12
#define NODE(r) ((r) > 0)
#define ON(k) ((k) == 0 -> 1 : 6)
#define GATE(s, k) (k)
#define NEXT(g) ((g) == 0 -> 0 : 3 - (g))
#elif SHAPE == 13
#define NODE(r) ((r) > 0)
#define ON(k) ((k) == 0 -> 1 : 14)
#define GATE(s, k) (k)
#define NEXT(g) ((g) == 0 -> 0 : (g) % 3 + 1)
#endif
#undef R
#if SHAPE == 11
#define R 2
#define EACH(option) option(0) option(1)
#elif SHAPE == 111 || SHAPE == 12
#define R 3
#define EACH(option) option(0) option(1) option(2)
#else
#define R 4
#define EACH(option) option(0) option(1) option(2) option(3)
#endif
#if SHAPE == 13
#define WAYS 3
#else
#define WAYS 2
#endif
#if SHAPE == 111
#define NODES 3
#define EACH_NODE(option) option(0) option(1) option(2)
#else
#define NODES 2
#define EACH_NODE(option) option(0) option(1)
#endif
#ifndef VICTIM
#define VICTIM (R - 1) /* the rank that leaves or joins */
#endif
#ifndef AWAY
#define AWAY 0
#endif
/* Of those that may act as the gate g the first that is there, or NOBODY (find_acting). */
#ifdef MUTANT_TWO_WAYS /* not the one after the next */
#define ACTING(g, there) (there(g) -> g : (there(NEXT(g)) -> NEXT(g) : NOBODY))
#else
#define ACTING(g, there) \
    (there(g) -> g : (there(NEXT(g)) -> NEXT(g) : (there(NEXT(NEXT(g))) -> NEXT(NEXT(g)) : NOBODY)))
#endif
#define WAY_BEHIND(g, w) ((w) == (g) -> 0 : ((w) == NEXT(g) || WAYS == 2 -> 1 : 2))
#define ALL ((1 << R) - 1)
#define BIT(x) (1 << (x))
#define IN(mask, x) ((mask) >> (x) & 1)
#define PAIR(w, r) ((w) * R + (r)) /* of w, for r or from r */
#define BOX(r, k) ((r) * NODES + (k)) /* of rank r, for a node or from it */
#define HERE(r) (ON(NODE(r)))
#define FAR(r) (ALL & ~HERE(r))
#define IS_FAR(p) (NODE(p) != NODE(r))
#define NOBODY R
#ifdef ONE_WAY
#define SENDS(s) ((s) == 0)
#else
#define SENDS(s) true
#endif

/* ---- the ops of every rank, in the order of its stream ------------------------------ */

#define DISPATCH 0
#define COMBINE 1

#if defined(PAIRS) /* dispatch, combine */
#define KIND (step % 2)
#define H 0
#define STEPS (2 * N)
#define FIRST(n) (2 * ((n) - 1))
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
#endif

/* ---- memory ------------------------------------------------------------------------- */

#define C 3 /* tags of a dispatch and its combines */
#define TAG(dispatch, combines) ((dispatch) * C + (combines))
#define ASKED 1
#define OVER 2
#define STEP(tag, step) ((tag) * 3 + (step))
#define TAG_OF(value) ((value) / 3)
#define IS_OVER(value) ((value) % 3 == OVER)
#define SPOILT 128

/* What is under way from w to o, and what has been told and seen.  An ask: its step; a record, a sum: its tag. */
byte fly_ask[R * R], fly_record[R * R], fly_sum[R * R];
byte put_told[R * R], put_seen[R * R], closed_told[R * R], ack_told[R * R];
byte last[R * R]; /* ht_last */
bit filling[R * R]; /* records of w for o are in the box, or may be, and not put yet */
/* Beside windows, at o from w. */
byte asks[R * R], ask_acts[R * R], records[R * R], sum_tag[R * R], sum_mask[R * R];
byte sum_out[R * R];  /* of w for o */
byte partial[R * R];  /* of s, by rank d of the gate's node */
/* windows and states, of ranks of the node */
#if SHAPE == 11 || SHAPE == 111 || defined(MUTANT_ONE_FLAG)
#define FLAGS (R * R)
#define FLAG(d, s, w) PAIR(d, s)
#else /* of the gate, and of each that may stand in for it */
#define FLAGS (WAYS * R * R)
#define FLAG(d, s, w) (PAIR(d, s) + (NODE(s) == NODE(d) -> 0 : WAY_BEHIND(GATE(s, NODE(d)), w) * R * R))
#endif
byte asked[R], granted[R], given_of[R], closed[R];
byte begun[FLAGS], done[FLAGS], ceased[FLAGS]; /* at d: of rows from s on another node, of partials of d' on this one */
byte row[R * R];      /* at d from s */
byte to[R * R];       /* a gate: who has granted s rows */
byte via[R * R];      /* who takes here what s sends */
byte acts[R * NODES]; /* who is this rank's gate */
byte ht_begun[R], number[R], combines[R];
byte pushed_by[R * R], pushed_at[R * R]; /* the last partial of d for s: through whom, and when */

#define HANDLE(r, h) ((r) * 2 + (h))
#define AT(r, h, x) (HANDLE(r, h) * R + (x))
byte h_number[R * 2], h_arrived[R * 2], h_from[R * 2], h_to[R * 2];
byte h_via[R * 2 * R], h_acts[R * 2 * R];
bit h_routed[R * 2];

/* membership */
bit absent[R * R];
byte from_number = 1; /* VICTIM's ht_from */
bit doomed;           /* its node dies */

/* ---- what only the proof knows ------------------------------------------------------- */

byte opened[R];      /* tag of the op whose rows may come */
byte summing[R * R]; /* tag of the op that still reads partials for s */
byte sums_of[R];     /* and whose */
bit hand[R];         /* a row or partial is in hand: between the look at the gate and the end of its stores */
bit out[R];          /* has left: what it reads is void */
byte lates;          /* timeouts so far */
bit idle;            /* VICTIM runs nothing */

#define HAS_LEFT(p) (absent[PAIR(r, p)] || ((p) == VICTIM && from_number > n))
#ifdef MUTANT_BLIND
#define LEFT(p) false
#else
#define LEFT(p) HAS_LEFT(p)
#endif
#define PRESENT_BIT(p) | !HAS_LEFT(p) << (p)
#define SEEN (0 EACH(PRESENT_BIT))
#ifdef DIES
#define DYING (r == VICTIM && doomed)
#define ESCAPE :: DYING -> goto dies
#else
#define DYING false
#define ESCAPE
#endif
#ifdef TIMEOUTS
#define TIME_IS_OVER (expired || lates < TIMEOUTS)
#else
#define TIME_IS_OVER false
#endif

/* ---- signals ------------------------------------------------------------------------- */

#define FLIES(way, upto) \
    (fly_ask[way] > 0 && TAG_OF(fly_ask[way]) <= (upto) || fly_record[way] > 0 && fly_record[way] <= (upto) || \
     fly_sum[way] > 0 && fly_sum[way] <= (upto))
/* Is p's last ACK still behind what p had put before? */
#define IS_BEHIND(p) FLIES(PAIR(p, r), ack_told[PAIR(p, r)])
#ifdef MUTANT_CLOSED_IS_ENOUGH
#define MAY_PUT(p) (ack_told[PAIR(p, r)] >= last[PAIR(r, p)] || closed_told[PAIR(p, r)] >= last[PAIR(r, p)])
#elif defined(MUTANT_NO_ACK)
#define MAY_PUT(p) true
#elif defined(MUTANT_ACK_BEFORE_DATA)
#define MAY_PUT(p) (ack_told[PAIR(p, r)] >= last[PAIR(r, p)])
#else
#define MAY_PUT(p) (ack_told[PAIR(p, r)] >= last[PAIR(r, p)] && !IS_BEHIND(p))
#endif
#define FAR_CLOSED(p) \
    ((closed_told[PAIR(p, r)] >= tag || ack_told[PAIR(p, r)] >= tag) && !FLIES(PAIR(p, r), tag))
#define HAS_COME(p, step) (put_seen[PAIR(p, r)] >= STEP(tag, step) || FAR_CLOSED(p))
#define OVER_BY(p) (LEFT(p) || (IS_FAR(p) -> FAR_CLOSED(p) : closed[p] >= tag))

#define MAY_ACK(p, upto) \
    (IS_FAR(p) && IS_OVER(put_seen[PAIR(p, r)]) && TAG_OF(put_seen[PAIR(p, r)]) <= (upto) && \
     TAG_OF(put_seen[PAIR(p, r)]) > ack_told[PAIR(r, p)])
#ifdef MUTANT_ACK_EARLY
#define CAUGHT_UP tag
#else
#define CAUGHT_UP (tag - 1)
#endif
#ifdef MUTANT_NO_CATCH_UP
#define OWES(p) false
#else
#define OWES(p) MAY_ACK(p, CAUGHT_UP)
#endif

/* Parts of atomic steps, as all below unless they say otherwise. */
inline acknowledge(p, upto)
{
    ack_told[PAIR(r, p)] = (MAY_ACK(p, upto) -> TAG_OF(put_seen[PAIR(p, r)]) : ack_told[PAIR(r, p)])
}

inline catch_up_all()
{
#ifndef MUTANT_NO_CATCH_UP
    d = 0;
    do
    :: d < R -> acknowledge(d, CAUGHT_UP); d++
    :: else -> break
    od;
#endif
    d = 0
}

/* A combine that was asked for and did not come. */
inline forgo_sums()
{
#if !defined(MUTANT_NOT_FORGONE) && !defined(MUTANT_NOT_OVER)
    d = 0;
    do
    :: d < R ->
        put_told[PAIR(r, d)] = (last[PAIR(r, d)] > 0 && last[PAIR(r, d)] < tag -> STEP(last[PAIR(r, d)], OVER)
                                                                               : put_told[PAIR(r, d)]);
        d++
    :: else -> break
    od;
#endif
    d = 0
}

inline close_far()
{
    d = 0;
    do
    :: d < R && !IS_FAR(d) -> d++
    :: d < R && IS_FAR(d) ->
#ifndef MUTANT_NOT_OVER
        put_told[PAIR(r, d)] = (last[PAIR(r, d)] == tag -> STEP(tag, OVER) : put_told[PAIR(r, d)]);
#endif
        if
        :: !absent[PAIR(r, d)] ->
#ifdef MUTANT_ACK_UNSEEN
            ack_told[PAIR(r, d)] = tag
#else
            acknowledge(d, tag)
#endif
#ifndef MUTANT_NOT_CLOSED
            ;
            closed_told[PAIR(r, d)] = (ack_told[PAIR(r, d)] < tag -> tag : closed_told[PAIR(r, d)])
#endif
        :: else
        fi;
        d++
    :: d == R -> break
    od;
    d = 0
}

/* ---- waiting ------------------------------------------------------------------------- */

/* Of the ranks in `todo`, in any order: there(p), or it is given up; w(p): who is waited for. */
#define AWAIT(p, w, there, gave_up, then) \
    :: atomic { IN(todo, p) && there(p) && !DYING -> todo = todo & ~BIT(p); then(p) } \
    :: atomic { IN(todo, p) && !there(p) && (OVER_BY(w(p)) || gave_up(p)) && !DYING -> \
                todo = todo & ~BIT(p); gone = gone | BIT(p) } \
    :: atomic { IN(todo, p) && !there(p) && TIME_IS_OVER && !DYING -> todo = todo & ~BIT(p); be_late(p) } \
    :: atomic { IN(todo, p) && !there(p) && OWES(w(p)) && !DYING -> acknowledge(w(p), CAUGHT_UP) }
#define ITSELF(p) p
#define NEVER_SO(p) false

inline be_late(p)
{
    lates = (expired -> lates : lates + 1);
    expired = 1;
    late = late | BIT(p)
}

#define LOST (gone | late)

/* ---- puts ---------------------------------------------------------------------------- */

#define RECORDS(s, k) (SENDS(s) && NODE(s) != (k))

#define MORE(p) (acts[BOX(r, NODE(p))] == p && RECORDS(r, NODE(p)))

/* Of a dispatch the note; a combine's is a step alone. */
inline put_ask(p)
{
    assert(!FLIES(PAIR(r, p), 255));
    last[PAIR(r, p)] = tag;
    put_told[PAIR(r, p)] = (kind == COMBINE || MORE(p) -> STEP(tag, ASKED) : STEP(tag, OVER));
    fly_ask[PAIR(r, p)] = (kind == DISPATCH -> put_told[PAIR(r, p)] : 0);
    filling[PAIR(r, p)] = kind == DISPATCH && MORE(p);
    ask_acts[PAIR(r, p)] = (kind == DISPATCH -> acts[BOX(r, NODE(p))] : ask_acts[PAIR(r, p)])
}

/* And asks for the sums of the first combine. */
inline put_record(p)
{
    fly_record[PAIR(r, p)] = tag;
    filling[PAIR(r, p)] = 0;
#ifdef MUTANT_ASKED_AND_FREE
    last[PAIR(r, p)] = tag;
#else
    last[PAIR(r, p)] = tag + 1;
#endif
    put_told[PAIR(r, p)] = STEP(tag + 1, ASKED)
}

inline put_sum(p)
{
    assert(fly_sum[PAIR(r, p)] == 0);
    last[PAIR(r, p)] = tag;
    fly_sum[PAIR(r, p)] = tag;
    put_told[PAIR(r, p)] = STEP(tag, OVER)
}

#define IS_ASKED(p) (TAG_OF(put_told[PAIR(r, p)]) == tag)
#define THEN_ASK(p) \
    assert(kind != DISPATCH || fly_sum[PAIR(p, r)] == 0); /* where records are to be */ \
    open = open | BIT(p); \
    put_ask(p)
#define AWAIT_ROOM(p) AWAIT(p, ITSELF, MAY_PUT, NEVER_SO, THEN_ASK)
/* Whoever waits here catches up with all. */
#ifdef MUTANT_CATCHES_UP_WITH_ONE
#define CATCH_UP(p)
#else
#define CATCH_UP(p) :: atomic { todo != 0 && OWES(p) && !DYING -> acknowledge(p, CAUGHT_UP) }
#endif

inline ask_far(whom)
{
    todo = whom;
    do
    EACH(AWAIT_ROOM)
    EACH(CATCH_UP)
    ESCAPE
    :: todo == 0 && !DYING -> break
    od
}

/* The box of a node, or of whoever acts as the gate there. */
#ifdef MUTANT_ONE_BOX_OUT
#define RECORD_FLIES(p) | (IN(ON(k), p) && fly_record[PAIR(r, p)] > 0)
#define BOX_IS_FREE !(0 EACH(RECORD_FLIES))
#else
#define BOX_IS_FREE (fly_record[PAIR(r, acts[BOX(r, k)])] == 0)
#endif

inline put_records()
{
    k = 0;
    do
    :: k < NODES && k != NODE(r) && RECORDS(r, k) && acts[BOX(r, k)] != NOBODY && IN(open, acts[BOX(r, k)]) ->
        assert(BOX_IS_FREE && fly_sum[PAIR(acts[BOX(r, k)], r)] == 0);
        sum_tag[PAIR(r, acts[BOX(r, k)])] = 0; /* it lies where the record is */
        put_record(acts[BOX(r, k)]);
        h_to[HANDLE(r, h)] = h_to[HANDLE(r, h)] | BIT(k);
        k++
    :: else ->
        k++;
        if
        :: k >= NODES -> break
        :: else
        fi
    od;
    k = 0
}

/* ---- network ------------------------------------------------------------------------- */

#ifdef MUTANT_ONE_BOX_BACK
#define SUM_FROM(o, w) PAIR(o, GATE(o, NODE(w)))
#define SUM_LIES(p) (fly_sum[PAIR(p, r)] == 0 && fly_sum[PAIR(NEXT(p), r)] == 0)
#else
#define SUM_FROM(o, w) PAIR(o, w)
#define SUM_LIES(p) (fly_sum[PAIR(p, r)] == 0)
#endif

inline land_ask(w, o)
{
    asks[PAIR(o, w)] = (fly_ask[PAIR(w, o)] > 0 -> TAG_OF(fly_ask[PAIR(w, o)]) : asks[PAIR(o, w)]);
    fly_ask[PAIR(w, o)] = 0
}

inline land_record(w, o)
{
    land_ask(w, o);
    records[PAIR(o, w)] = (fly_record[PAIR(w, o)] > 0 -> fly_record[PAIR(w, o)] : records[PAIR(o, w)]);
    fly_record[PAIR(w, o)] = 0
}

inline land_all(w, o)
{
    land_record(w, o);
    sum_tag[SUM_FROM(o, w)] = (fly_sum[PAIR(w, o)] > 0 -> fly_sum[PAIR(w, o)] : sum_tag[SUM_FROM(o, w)]);
    sum_mask[SUM_FROM(o, w)] = (fly_sum[PAIR(w, o)] > 0 -> sum_out[PAIR(w, o)] : sum_mask[SUM_FROM(o, w)]);
    fly_sum[PAIR(w, o)] = 0
}

#ifdef MUTANT_SIGNAL_FIRST
#define DELIVER(how, w, o) skip
#else
#define DELIVER(how, w, o) how(w, o)
#endif
/* Before its signal is seen: only whoever knows that it is closed can tell. */
#define IS_CLOSED(w, o) (FLIES(PAIR(w, o), closed_told[PAIR(w, o)]) || FLIES(PAIR(w, o), ack_told[PAIR(w, o)]))
#define RECORD_STEP(w, o) STEP(fly_record[PAIR(w, o)] + 1, ASKED)
#define WAY(w, o) \
    :: atomic { NODE(w) != NODE(o) && IS_CLOSED(w, o) -> land_all(w, o) } \
    :: atomic { NODE(w) != NODE(o) && fly_ask[PAIR(w, o)] > put_seen[PAIR(w, o)] && \
                fly_ask[PAIR(w, o)] < put_told[PAIR(w, o)] -> \
                put_seen[PAIR(w, o)] = fly_ask[PAIR(w, o)]; DELIVER(land_ask, w, o) } \
    :: atomic { NODE(w) != NODE(o) && fly_record[PAIR(w, o)] > 0 && RECORD_STEP(w, o) > put_seen[PAIR(w, o)] && \
                RECORD_STEP(w, o) < put_told[PAIR(w, o)] -> \
                put_seen[PAIR(w, o)] = RECORD_STEP(w, o); DELIVER(land_record, w, o) } \
    :: atomic { NODE(w) != NODE(o) && put_seen[PAIR(w, o)] < put_told[PAIR(w, o)] -> \
                DELIVER(land_all, w, o); put_seen[PAIR(w, o)] = put_told[PAIR(w, o)] }
#define WAYS_0(o) WAY(0, o)
#define WAYS_1(o) WAY(1, o)
#define WAYS_2(o) WAY(2, o)
#define WAYS_3(o) WAY(3, o)

proctype network()
{
end:
    do
    EACH(WAYS_0)
    EACH(WAYS_1)
#if R > 2
    EACH(WAYS_2)
#endif
#if R > 3
    EACH(WAYS_3)
#endif
    od
}

/* ---- dispatch: asks and grants ----------------------------------------------------------- */

#define HAS_ASKED(p) (IS_FAR(p) -> HAS_COME(p, ASKED) && asks[PAIR(r, p)] == tag : asked[p] == tag)
#define ASKS_NOT(p) (IS_FAR(p) -> HAS_COME(p, ASKED) && asks[PAIR(r, p)] != tag : asked[p] > tag)
#ifdef MUTANT_OWN_GATE /* each finds out who is the gate */
#define IS_THERE(x) (!LEFT(x))
#define TOLD_VIA(p) ACTING(GATE(p, NODE(r)), IS_THERE)
#else
#define TOLD_VIA(p) ask_acts[PAIR(p, r)]
#endif
#define THEN_TAKEN(p) \
    assert(out[r] || !IS_FAR(p) || fly_ask[PAIR(p, r)] == 0); \
    got = got | BIT(p); \
    via[PAIR(r, p)] = (kind == DISPATCH && IS_FAR(p) -> TOLD_VIA(p) : via[PAIR(r, p)])
#define AWAIT_ASK(p) AWAIT(p, ITSELF, HAS_ASKED, ASKS_NOT, THEN_TAKEN)

inline take_asks(whom)
{
    todo = (whom) & ~BIT(r);
    do
    EACH(AWAIT_ASK)
    ESCAPE
    :: todo == 0 && !DYING -> break
    od
}

#define VIA_BIT(p) | (IN(given & FAR(r), p) && RECORDS(p, NODE(r)) && via[PAIR(r, p)] == r) << (p)

inline grant()
{
    granted[r] = tag;
    given_of[r] = given;
    relays = 0 EACH(VIA_BIT);
#ifndef MUTANT_NOT_ANNOUNCED
    d = 0;
    do
    :: d < R * R ->
        if
        :: IN(members & HERE(r), d / R) && IN(relays, d % R) -> begun[FLAG(d / R, d % R, r)] = tag
        :: else
        fi;
        d++
    :: else -> break
    od;
#endif
    d = 0
}

#define HAS_GRANTED(p) (granted[p] == tag)
#define GRANTS_NOT(p) (granted[p] > tag)
#define THEN_TO(p) keep_granted(p)
#define AWAIT_GRANT(p) AWAIT(p, ITSELF, HAS_GRANTED, GRANTS_NOT, THEN_TO)

inline keep_granted(p)
{
    d = 0;
    do
    :: d < R -> to[PAIR(r, d)] = to[PAIR(r, d)] | IN(relays & given_of[p], d) << p; d++
    :: else -> break
    od;
    d = 0
}

inline take_grants()
{
    todo = members & HERE(r);
    do
    EACH(AWAIT_GRANT)
    ESCAPE
    :: todo == 0 && !DYING -> break
    od
}

/* ---- dispatch: records and rows ------------------------------------------------------------- */

#ifdef MUTANT_NO_GATE
#define OPEN_BIT(p) | 1 << (p)
#else
#define OPEN_BIT(p) | (closed[p] < tag && !LEFT(p)) << (p)
#endif
#define OPEN (0 EACH(OPEN_BIT))
#ifdef MUTANT_ANY_RECORD
#define IS_RECORD(s) true
#else
#define IS_RECORD(s) (records[PAIR(r, s)] == tag)
#endif

inline write_rows(s)
{
    d = 0;
    do
    :: d < R && IN(mask, d) ->
        assert(out[d] || opened[d] == tag);
        row[PAIR(d, s)] = tag;
        d++
    :: d < R && !IN(mask, d) -> d++
    :: d == R -> break
    od;
    d = 0
}

#define RECORD_THERE(s) HAS_COME(s, OVER)
/* One after the other: the others are put off. */
#define THEN_RECORD(s) now_at = s; rest = todo; todo = 0
#define AWAIT_RECORD(p) AWAIT(p, ITSELF, RECORD_THERE, NEVER_SO, THEN_RECORD)

/* to[] becomes who did not get it. */
inline relay_record()
{
    if
    :: atomic { now_at < NOBODY && !DYING ->
        mask = (IS_RECORD(now_at) -> to[PAIR(r, now_at)] & OPEN : 0);
        to[PAIR(r, now_at)] = ALL & ~mask;
        hand[r] = mask > 0
    }
        atomic {
            assert(out[r] || mask == 0 || (records[PAIR(r, now_at)] == tag && fly_record[PAIR(now_at, r)] == 0));
            write_rows(now_at);
            hand[r] = 0;
            mask = 0;
            todo = rest; rest = 0;
            now_at = NOBODY
        }
    ESCAPE
    fi
}

#define UNSENT_BIT(s) to[PAIR(r, s)] = (IN(todo & gone, s) -> ALL : to[PAIR(r, s)]);

inline tell_relayed()
{
    d = 0;
    do
    :: d < R * R ->
        if
        :: IN(members & HERE(r), d / R) && IN(relays, d % R) && IN(to[PAIR(r, d % R)], d / R) || \
           IN(members & HERE(r), d / R) && IN(relays & LOST, d % R) -> ceased[FLAG(d / R, d % R, r)] = tag
        :: IN(members & HERE(r), d / R) && IN(relays & ~LOST, d % R) && !IN(to[PAIR(r, d % R)], d / R) -> \
           done[FLAG(d / R, d % R, r)] = tag
        :: else
        fi;
        d++
    :: else -> break
    od;
    d = 0;
    do
    :: d < R -> to[PAIR(r, d)] = 0; d++
    :: else -> break
    od;
    d = 0
}

inline relay_records()
{
    todo = relays;
    do
    EACH(AWAIT_RECORD)
    ESCAPE
    :: now_at < NOBODY -> relay_record()
    :: todo == 0 && now_at == NOBODY && !DYING -> break
    od;
    atomic { tell_relayed() }
}

#ifdef MUTANT_AWAITS_SOURCE
#define VIA(s) s
#else
#define VIA(s) via[PAIR(r, s)]
#endif
#define ROW_THERE(s) (done[FLAG(r, s, via[PAIR(r, s)])] == tag)
#define NO_ROW(s) (ceased[FLAG(r, s, via[PAIR(r, s)])] == tag)
#define THEN_ROW(s) assert(out[r] || row[PAIR(r, s)] == tag)
#define AWAIT_ROW(p) AWAIT(p, VIA, ROW_THERE, NO_ROW, THEN_ROW)
#define COMES_BIT(s) | (IN(given & FAR(r), s) && SENDS(s) && via[PAIR(r, s)] != NOBODY) << (s)
#define COMES (0 EACH(COMES_BIT))

inline receive_rows()
{
    todo = COMES & ~gone;
    do
    EACH(AWAIT_ROW)
    ESCAPE
    :: todo == 0 && !DYING -> break
    od
}

/* ---- the end of an op ---------------------------------------------------------------------------- */

/* kDrainNs */
#define LONG_AGO(p) (HAS_LEFT(p) && (absent[PAIR(p, p)] || (p == VICTIM && doomed)) && !hand[p])
#define WRITER(p) (kind == DISPATCH -> via[PAIR(r, p)] : p)
#define OF(p) FLAG(r, p, via[PAIR(r, p)])
#define WRITES_NOT(p) (begun[OF(p)] != tag || done[OF(p)] == tag || ceased[OF(p)] == tag || LONG_AGO(WRITER(p)))

/* Of a dispatch, what is told for ranks on other nodes; of a combine, by ranks of this one. */
inline drain()
{
    d = 0;
#ifndef MUTANT_NO_DRAIN
    do
    :: atomic { d < R && (WRITES_NOT(d) || (kind == DISPATCH) != IS_FAR(d)) && !DYING -> d++ }
    ESCAPE
    :: d == R -> break
    od;
#endif
    d = 0
}

/* Those need not be there: who has left or is to come, and whose gate has left. */
#if defined(LEAVES) || defined(DIES)
#define EXCUSED(p, gate) (IN(AWAY, p) || (p) == VICTIM || (gate) == VICTIM)
#elif defined(JOINS)
#define EXCUSED(p, gate) (IN(AWAY, p) || (p) == VICTIM && (out[VICTIM] || n < from_number))
#else
#define EXCUSED(p, gate) IN(AWAY, p)
#endif

inline check_rows()
{
    d = 0;
    do
    :: d < R ->
        row[PAIR(r, d)] = (IN(LOST & given, d) -> 0 : row[PAIR(r, d)]);
        assert(out[r] || !IN(COMES & ~LOST, d) || row[PAIR(r, d)] == tag);
#ifndef TIMEOUTS
        assert(out[r] || !IS_FAR(d) || !SENDS(d) || IN(COMES & ~LOST, d) || EXCUSED(d, via[PAIR(r, d)]));
#endif
        d++
    :: d == R -> break
    od;
    d = 0
}

#define KEEP_WAY(p) h_via[AT(r, h, p)] = via[PAIR(r, p)];

inline finish_dispatch()
{
    if
    :: ok -> check_rows()
    :: else
    fi;
    number[r] = n;
    combines[r] = 0;
    h_number[HANDLE(r, h)] = n;
    h_routed[HANDLE(r, h)] = ok && late == 0 && !LEFT(r);
    h_arrived[HANDLE(r, h)] = (ok -> given & ~LOST : 0);
    h_from[HANDLE(r, h)] = (ok -> relays : 0);
    h_to[HANDLE(r, h)] = (ok -> h_to[HANDLE(r, h)] : 0);
    EACH(KEEP_WAY)
    d = 0;
    do
    :: d < NODES -> h_acts[AT(r, h, d)] = acts[BOX(r, d)]; d++
    :: else -> break
    od;
    d = 0
}

/* ---- combine --------------------------------------------------------------------------------------- */

#define WAY_OF(s) h_via[AT(r, h, s)] /* the dispatch's */
#define WAY_BIT(s) | (IN(h_arrived[HANDLE(r, h)] & FAR(r), s) && SENDS(s) && IN(members, WAY_OF(s))) << WAY_OF(s)
#define VIAS (0 EACH(WAY_BIT))
#define TAKES(s) (IN(h_arrived[HANDLE(r, h)] & FAR(r), s) && SENDS(s) && IN(got | BIT(r), WAY_OF(s)) && \
                  IN(members, WAY_OF(s)))
#ifdef MUTANT_PARTIALS_AT_ONCE
#define IS_FREE(s) true
#else
#define IS_FREE(s) \
    (pushed_at[PAIR(r, s)] == 0 || pushed_by[PAIR(r, s)] == WAY_OF(s) || \
     closed[pushed_by[PAIR(r, s)]] >= pushed_at[PAIR(r, s)] || \
     (LONG_AGO(pushed_by[PAIR(r, s)]) && summing[PAIR(pushed_by[PAIR(r, s)], s)] == 0))
#endif

/* Of an op before: of a later one x reads what r has yet to write. */
#define SUMS_OTHERS(x) (IN(HERE(r), x) && IN(sums_of[x], r) && summing[PAIR(x, s)] > 0 && summing[PAIR(x, s)] < tag)
#define DISTURB(x) \
    assert(!SUMS_OTHERS(x) || out[x]); \
    summing[PAIR(x, s)] = (SUMS_OTHERS(x) -> SPOILT : summing[PAIR(x, s)]);

/* mask: who did not get all; and who has not asked, or runs something else. */
#define TELL_PUSHED(p) \
    ceased[PAIR(p, r)] = (IN(members & HERE(r), p) && IN(mask | ~(got | BIT(r)), p) -> tag : ceased[PAIR(p, r)]); \
    done[PAIR(p, r)] = (IN(members & HERE(r), p) && !IN(mask | ~(got | BIT(r)), p) -> tag : done[PAIR(p, r)]);

inline tell_pushed()
{
    EACH(TELL_PUSHED)
    mask = 0; s = 0
}

/* One for each source; some steps. */
inline push_partials()
{
    s = 0;
    do
    :: atomic { s < R && (!TAKES(s) || closed[WAY_OF(s)] >= tag || LEFT(WAY_OF(s))) && !DYING ->
                mask = (s < R && TAKES(s) -> mask | BIT(WAY_OF(s)) : mask); s++ }
    :: atomic { s < R && TAKES(s) && closed[WAY_OF(s)] < tag && !LEFT(WAY_OF(s)) && IS_FREE(s) && !DYING -> hand[r] = 1 }
        atomic {
            assert(out[WAY_OF(s)] || opened[WAY_OF(s)] == tag);
            EACH(DISTURB)
            partial[PAIR(s, r)] = tag;
            pushed_by[PAIR(r, s)] = WAY_OF(s);
            pushed_at[PAIR(r, s)] = tag;
            hand[r] = 0;
            s++
        }
    ESCAPE
    :: s == R -> break
    od;
    atomic { tell_pushed() }
}

/* Lane by lane: rank d's partial of what came from s. */
#ifdef MUTANT_ANY_ASK /* the dispatch's too, before what it sent has come */
#define HAS_ASKED_FOR_SUM(s) (TAG_OF(put_seen[PAIR(s, r)]) >= tag - 1)
#else
#define HAS_ASKED_FOR_SUM(s) (TAG_OF(put_seen[PAIR(s, r)]) == tag)
#endif
#define SOURCE_THERE(s) (HAS_ASKED_FOR_SUM(s) && (last[PAIR(r, s)] == tag || MAY_PUT(s)))
#define THEN_SOURCE(s) \
    assert(fly_record[PAIR(s, r)] == 0 && !filling[PAIR(s, r)]); \
    now_at = s; mask = 0; d = 0; \
    rest = todo; todo = 0
#define SOURCE_ASKS_NOT(s) (TAG_OF(put_seen[PAIR(s, r)]) > tag)
#define AWAIT_SOURCE(p) AWAIT(p, ITSELF, SOURCE_THERE, SOURCE_ASKS_NOT, THEN_SOURCE)
#define PARTIAL_THERE (partial[PAIR(now_at, d)] == tag)
#define NO_PARTIAL (LEFT(d) || closed[d] >= tag || done[PAIR(r, d)] == tag || ceased[PAIR(r, d)] == tag)

inline sum_record()
{
    do
    :: atomic { d < R && !IN(members & HERE(r), d) && !DYING -> d++ }
    :: atomic { d < R && IN(members & HERE(r), d) && PARTIAL_THERE && !DYING -> mask = mask | BIT(d); d++ }
    :: atomic { d < R && IN(members & HERE(r), d) && !PARTIAL_THERE && NO_PARTIAL && !DYING -> d++ }
    :: atomic { d < R && IN(members & HERE(r), d) && !PARTIAL_THERE && TIME_IS_OVER && !DYING -> be_late(d); d++ }
    ESCAPE
    :: atomic { d == R && !DYING ->
        assert(fly_record[PAIR(now_at, r)] == 0 && !filling[PAIR(now_at, r)]);
        records[PAIR(r, now_at)] = 0; /* it lay where the sum is */
        sum_out[PAIR(r, now_at)] = mask | (summing[PAIR(r, now_at)] == SPOILT -> SPOILT : 0);
        put_sum(now_at);
        summing[PAIR(r, now_at)] = 0;
        now_at = NOBODY; mask = 0; d = 0;
        todo = rest; rest = 0;
        break
    }
    od
}

inline sum_records()
{
    todo = relays;
    do
    EACH(AWAIT_SOURCE)
    ESCAPE
    :: now_at < NOBODY -> sum_record()
    :: todo == 0 && now_at == NOBODY && !DYING -> break
    od
}

#define SUM_THERE(p) HAS_COME(p, OVER)
#ifdef MUTANT_ANY_SUM
#define IS_SUM(p) true
#else
#define IS_SUM(p) (sum_tag[SUM_FROM(r, p)] == tag)
#endif
#define THEN_SUM(p) \
    assert(out[r] || !IS_SUM(p) || SUM_LIES(p) && sum_tag[SUM_FROM(r, p)] == tag && sum_mask[SUM_FROM(r, p)] < SPOILT); \
    got = (IS_SUM(p) -> got | sum_mask[SUM_FROM(r, p)] : got)
#define AWAIT_SUM(p) AWAIT(p, ITSELF, SUM_THERE, NEVER_SO, THEN_SUM)
#define GATE_BIT(k) | (IN(h_to[HANDLE(r, h)], k) && IN(members, ACTS(k))) << ACTS(k)
#define ACTS(k) h_acts[AT(r, h, k)]
#define GATES (0 EACH_NODE(GATE_BIT))

inline sum_tokens()
{
    atomic { got = 0; todo = GATES & ~gone }
    do
    EACH(AWAIT_SUM)
    ESCAPE
    :: todo == 0 && !DYING -> break
    od
}

/* Whoever's rows came is asked for a partial, unless the way back is cut. */
inline finish_combine()
{
    combines[r]++;
#ifndef TIMEOUTS
    d = 0;
    do
    :: d < R ->
        assert(!ok || out[r] || !IS_FAR(d) || !SENDS(r) || IN(got, d) || EXCUSED(d, h_acts[AT(r, h, NODE(d))]));
        d++
    :: d == R -> break
    od;
    d = 0
#endif
}

/* ---- a rank ---------------------------------------------------------------------------------------------- */

#define IS_MEMBER(x) IN(members, x)
#define CHOOSE(k) acts[BOX(r, k)] = (k == NODE(r) -> r : ACTING(GATE(r, k), IS_MEMBER));
#define HOME(p) via[PAIR(r, p)] = GATE(p, NODE(r));
#define FOLLOW(k) acts[BOX(r, k)] = ACTS(k);
#define SUM_FOR(s) summing[PAIR(r, s)] = (IN(relays, s) -> tag : summing[PAIR(r, s)]);
#define ANNOUNCE(p) begun[PAIR(p, r)] = (IN(members & HERE(r), p) -> tag : begun[PAIR(p, r)]);

#ifdef FORGOES /* whoever's dispatch failed does not try to combine it */
#define IS_FORGONE (KIND == COMBINE && !h_routed[HANDLE(r, H)])
#endif

inline begin()
{
    kind = KIND;
    h = H;
    n = (kind == DISPATCH -> number[r] + 1 : h_number[HANDLE(r, h)]);
    tag = (kind == DISPATCH -> TAG(n, 0) : TAG(number[r], combines[r] + 1));
    ht_begun[r] = (kind == DISPATCH && n > ht_begun[r] -> n : ht_begun[r]);
    members = SEEN;
    ok = IN(members, r) && (kind == DISPATCH || (n > 0 && h_routed[HANDLE(r, h)]));
    members = (ok -> members : 0);
    forgo_sums();
    catch_up_all();
    opened[r] = (ok && !out[r] -> tag : 0);
    now_at = NOBODY;
    if
    :: ok && kind == DISPATCH ->
        EACH_NODE(CHOOSE)
        EACH(HOME)
        h_to[HANDLE(r, h)] = 0;
        asked[r] = tag
    :: ok && kind == COMBINE ->
        relays = members & h_from[HANDLE(r, h)];
        EACH_NODE(FOLLOW)
        EACH(SUM_FOR)
        sums_of[r] = members;
        asked[r] = tag;
        EACH(ANNOUNCE)
    :: else
    fi
}

inline forget()
{
    n = 0; tag = 0; h = 0; d = 0; k = 0; s = 0; members = 0; todo = 0; open = 0; got = 0; given = 0; gone = 0; late = 0;
    relays = 0; mask = 0; rest = 0; ok = 0; expired = 0; put = 0; kind = DISPATCH; now_at = 0
}

inline dispatch()
{
    ask_far(members & FAR(r));
    atomic { /* what all ranks ask is heard meanwhile, and the op may not take place */
        if
        :: true -> put_records(); put = 1
        :: true
        fi
    }
    take_asks(members & ~gone);
    atomic {
        given = members & (got | BIT(r));
        ok = late == 0;
        if
        :: ok -> grant()
        :: else
        fi
    }
    if
    :: ok ->
        take_grants();
        atomic {
            if
            :: !put -> put_records()
            :: put
            fi
        }
        relay_records();
        receive_rows()
    :: !ok -> h_to[HANDLE(r, h)] = 0
    fi
}

#define ASKED_BIT(p) | IS_ASKED(p) << (p)

inline combine()
{
    ask_far(GATES & ~(0 EACH(ASKED_BIT)));
    take_asks(VIAS);
    push_partials();
    sum_records();
    sum_tokens()
}

#define FILLS_NOT(p) filling[PAIR(r, p)] = 0;
#define NOT_SUMMING(s) summing[PAIR(r, s)] = 0;

proctype block(byte r)
{
    byte step, kind, n, tag, h, d, k, s, members, todo, rest, open, got, given, gone, late, relays, mask,
        now_at;
    bit ok, expired, put;

life:
    do
    :: step >= STEPS || absent[PAIR(r, r)] -> break
#ifdef FORGOES
    :: atomic { step < STEPS && !DYING && IS_FORGONE -> step++ }
    :: atomic { step < STEPS && !DYING && !IS_FORGONE -> begin() }
#else
    :: atomic { step < STEPS && !DYING -> begin() }
#endif
        if
        :: ok && kind == DISPATCH -> dispatch()
        :: ok && kind == COMBINE -> combine()
        :: !ok
        fi;
        atomic {
            closed[r] = tag;
            EACH(NOT_SUMMING)
            EACH(FILLS_NOT)
#ifndef MUTANT_DRAINS_FIRST
            close_far()
#endif
        }
        if
        :: !ok || LOST != 0 -> drain()
        :: else
        fi;
        atomic {
#ifdef MUTANT_DRAINS_FIRST
            close_far();
#endif
            opened[r] = 0;
            if
            :: kind == DISPATCH -> finish_dispatch()
            :: else -> finish_combine()
            fi;
            forget();
            step++
        }
    ESCAPE
    od;
#ifdef FORGOES /* there is always a next op */
    atomic {
        tag = TAG(N + 1, 0);
        forgo_sums();
        catch_up_all();
        closed[r] = tag;
        close_far();
        forget()
    }
#endif
#ifdef MEMBERSHIP
    if
    :: r == VICTIM -> idle = 1
    :: else
    fi;
end_idle:
    atomic {
        r == VICTIM && absent[PAIR(r, r)] == 0 && !idle ->
        step = (number[r] < N -> FIRST(number[r] + 1) : STEPS)
    };
    goto life;
#endif
dies:
    atomic { opened[r] = 0; hand[r] = 0; forget() }
}

/* ---- the server ------------------------------------------------------------------------------------------ */

#define BEGUN(p) v = (ht_begun[p] > v -> ht_begun[p] : v);
#define IS_BACK(p) absent[PAIR(p, VICTIM)] = 0; absent[PAIR(VICTIM, p)] = IN(AWAY, p);
#define HEARS(p) :: atomic { p != VICTIM && !absent[PAIR(p, VICTIM)] -> absent[PAIR(p, VICTIM)] = 1 }
#define HAS_HEARD(p) && absent[PAIR(p, VICTIM)]
#define CUT(p) absent[PAIR(VICTIM, p)] = 1;

#ifdef MEMBERSHIP
proctype server()
{
    byte v;

#ifndef JOINS
#define LEAVES_ONLY
#endif
#if defined(LEAVES) || defined(DIES)
    atomic {
        out[VICTIM] = 1; opened[VICTIM] = 0;
#ifdef DIES
        doomed = 1;
        EACH(CUT)
#endif
        skip
    }
    do
    EACH(HEARS)
#ifndef DIES
    :: atomic { !absent[PAIR(VICTIM, VICTIM)] -> EACH(CUT) skip }
#endif
    :: true EACH(HAS_HEARD) || false -> break
    od;
#endif
#ifdef JOINS
    idle && !hand[VICTIM];
    atomic {
        EACH(BEGUN)
        v = v + 1;
        from_number = v;
        EACH(IS_BACK)
        ht_begun[VICTIM] = v - 1;
        number[VICTIM] = v - 1;
        combines[VICTIM] = 0;
        h_number[HANDLE(VICTIM, 0)] = 0; h_routed[HANDLE(VICTIM, 0)] = 0;
        h_number[HANDLE(VICTIM, 1)] = 0; h_routed[HANDLE(VICTIM, 1)] = 0;
        out[VICTIM] = 0;
        v = 0;
        idle = 0
    }
#endif
}
#endif

init
{
    atomic {
        byte i;

#ifdef MISSED
        for (i : 0 .. R - 1) {
            last[PAIR(i, (i + 1) % R)] = 1;
            put_told[PAIR(i, (i + 1) % R)] = STEP(1, OVER)
        }
#endif
#if AWAY
        for (i : 0 .. R * R - 1) {
            absent[i] = IN(AWAY, i / R) || IN(AWAY, i % R)
        }
        for (i : 0 .. R - 1) {
            out[i] = IN(AWAY, i)
        }
#endif
        for (i : 0 .. R - 1) {
            if
            :: !IN(AWAY, i) -> run block(i)
            :: else
            fi
        }
        run network();
#ifdef MEMBERSHIP
#if !defined(LEAVES) && !defined(DIES)
        for (i : 0 .. R - 1) {
            absent[PAIR(i, VICTIM)] = 1;
            absent[PAIR(VICTIM, i)] = 1
        }
        out[VICTIM] = 1;
#endif
        run server()
#endif
    }
}
