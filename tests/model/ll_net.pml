/*
 * ll_net.pml: a model of what LL adds for ranks on several nodes (kernels/cuda/ll_net.cuh), for spin.  run.py checks it:
 * python3 tests/model/run.py ll_net
 *
 * ## What stands for what
 *   rank(r)      all blocks of each kernel of rank r: what they do at once they do here one after the other, but wait in
 *                any order.  Each rank is on a node of its own, and a token of each goes to all others
 *   network()    what is under way lands at any time; a signal is seen at any time when all has landed that its raiser put
 *                to the same rank before
 *   server()     leave() and, as all nodes hold, the admission of server/node/team_cuda.c and span_cuda.c; others hear in
 *                any order that VICTIM has left
 *   has_room, release_to, give_credit, catch_up, put_box, ...   the functions of these names in kernels/cuda/ll_*.cuh
 *
 * ## What is checked
 * A box holds the number of the op that wrote it last, and whether these are rows or partials.
 *   - Nothing is written to where a put still reads or may still land, and nothing is read where one may.
 *   - What is read is of the reader's op.
 *   - What ACK says is so: the rows of its number, and all that was put before them in their bank, have landed.
 *   - Each rank gets rows and partials of all that did not leave, unless TIMEOUTS says otherwise.
 *   - Nothing waits for ever: every rank comes to the end of its script.  No wait has a timeout, unless TIMEOUTS says in
 *     how many ops one has.
 *
 * ## What is left out
 * Memory is sequentially consistent; ranks of one node are ll.pml's.  A signal that is raised again before it was seen is
 * seen once, for both.  A rank that left comes back when its last op is over; that a hold lets all agree on when is join.pml's.
 * Numbers do not wrap.
 *
 * Macros: R ranks, N dispatches, a script (PAIRS, ...), LEAVES (VICTIM's worker is lost), LEAVES and JOINS (it comes back),
 * TIMEOUTS, MISSED (each has missed the rank before it in number 1, whose put is under way yet, and they begin number 3),
 * MUTANT_... (what must be caught).
 */
#ifndef R
#define R 2
#endif
#ifndef N
#define N 4 /* dispatches */
#endif
#ifndef VICTIM
#define VICTIM (R - 1)
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0
#endif
#define BANKS 2
#define NEVER 100
#define BIT(x) (1 << (x))
#define IN(mask, x) ((mask) >> (x) & 1)
#define PAIR(x, y) ((x) * R + (y))
#define AT(x, y, n) (PAIR(x, y) * BANKS + (n) % BANKS)
#define MAX(x, y) ((x) > (y) -> (x) : (y))
#define MIN(x, y) ((x) < (y) -> (x) : (y))
#if R == 2
#define EACH(option) option(0) option(1)
#else
#define EACH(option) option(0) option(1) option(2)
#endif

/* ---- the ops of every rank, in the order of its stream ------------------------------ */

#define DISPATCH 0
#define COMBINE 1
#if defined(PAIRS) /* dispatch, combine */
#define KIND (step % 2)
#define STEPS (2 * N)
#define NUMBER (step / 2 + 1)
#define FIRST(n) (2 * ((n) - 1))
#elif defined(INTERLEAVED) /* dispatch a, dispatch b, combine a, combine b */
#define KIND (step % 4 / 2)
#define STEPS (2 * N)
#define NUMBER (step / 4 * 2 + step % 2 + 1)
#define FIRST(n) (((n) - 1) / 2 * 4 + ((n) - 1) % 2)
#else /* SKIPPED: every other one is not combined */
#define KIND (step % 3 == 1)
#define STEPS (3 * N / 2)
#define NUMBER (step / 3 * 2 + (step % 3 == 2) + 1)
#define FIRST(n) (((n) - 1) / 2 * 3 + ((n) - 1) % 2 * 2)
#endif

/* ---- memory ----------------------------------------------------------------------------- */

#define ROWS(n) (2 * (n))
#define PARTIALS(n) (2 * (n) + 1)
#define SLOTS (R * R * BANKS)
byte out[SLOTS]; /* of x, for y */
byte in[SLOTS];  /* of x, of what y sends */
byte rows[SLOTS];     /* from x to y: the number of what is under way from out to in; 0: nothing is */
byte partials[SLOTS]; /* and back, from x's in to y's out */

/* Signals: told by x to y; as y sees it; puts of x to y that land before: 2 bits for rows of each bank, 2 for partials. */
#define SENT 0
#define CREDIT 1
#define ACK 2
#define SIGNAL(kind, x, y, n) ((kind) * SLOTS + AT(x, y, n))
byte told[3 * SLOTS], seen[3 * SLOTS], before[3 * SLOTS];
#define IS_ON(x) ((x) > 0 -> 1 : 0)
#define UNDER_WAY(x, y) \
    (IS_ON(rows[AT(x, y, 0)]) | IS_ON(rows[AT(x, y, 1)]) << 1 | IS_ON(partials[AT(x, y, 0)]) << 2 | \
     IS_ON(partials[AT(x, y, 1)]) << 3)

byte from[R * R]; /* as x has it: y takes part from then on */
byte begun[R];
bool cut, over; /* VICTIM: all are absent to it; its process has ended */
byte timeouts = TIMEOUTS;

#ifdef MUTANT_SIGNAL_FIRST
#define BEHIND(x, y) 0
#else
#define BEHIND(x, y) UNDER_WAY(x, y)
#endif

/* x raises its signal at y, of the bank of m, to v. */
inline raise(kind, x, y, m, v)
{
    told[SIGNAL(kind, x, y, m)] = v;
    before[SIGNAL(kind, x, y, m)] = before[SIGNAL(kind, x, y, m)] | BEHIND(x, y)
}

/* One of these puts of x has landed at y. */
#define LANDED(kind, x, y, b, bits) before[SIGNAL(kind, x, y, b)] = before[SIGNAL(kind, x, y, b)] & ~(bits)
#define ALL_LANDED(x, y, bits) \
    LANDED(SENT, x, y, 0, bits); LANDED(SENT, x, y, 1, bits); \
    LANDED(CREDIT, x, y, 0, bits); LANDED(CREDIT, x, y, 1, bits); \
    LANDED(ACK, x, y, 0, bits); LANDED(ACK, x, y, 1, bits)
#define SEE(kind, x, y, b) \
    :: atomic { seen[SIGNAL(kind, x, y, b)] != told[SIGNAL(kind, x, y, b)] && before[SIGNAL(kind, x, y, b)] == 0 -> \
                seen[SIGNAL(kind, x, y, b)] = told[SIGNAL(kind, x, y, b)] }
#define WAY(x, y, b) \
    :: atomic { rows[AT(x, y, b)] > 0 -> \
                in[AT(y, x, b)] = ROWS(rows[AT(x, y, b)]); rows[AT(x, y, b)] = 0; ALL_LANDED(x, y, 1 << b) } \
    :: atomic { partials[AT(x, y, b)] > 0 -> \
                out[AT(y, x, b)] = PARTIALS(partials[AT(x, y, b)]); partials[AT(x, y, b)] = 0; ALL_LANDED(x, y, 4 << b) }
#define WAYS(x, y) WAY(x, y, 0) WAY(x, y, 1) SEE(SENT, x, y, 0) SEE(SENT, x, y, 1) SEE(CREDIT, x, y, 0) \
    SEE(CREDIT, x, y, 1) SEE(ACK, x, y, 0) SEE(ACK, x, y, 1)

proctype network()
{
end:
    do
    WAYS(0, 1)
    WAYS(1, 0)
#if R > 2
    WAYS(0, 2)
    WAYS(1, 2)
    WAYS(2, 0)
    WAYS(2, 1)
#endif
    od
}

/* ---- signals: of rank r, which this is ------------------------------------------------------ */

#define RELEASED_BY(p, m) MAX(seen[SIGNAL(CREDIT, p, r, m)], seen[SIGNAL(ACK, p, r, m)])
#ifdef MUTANT_NO_ACK
#define HAS_ROOM(p) (n <= BANKS || RELEASED_BY(p, n) >= n - BANKS)
#else
#define HAS_ROOM(p) \
    (n <= BANKS || (seen[SIGNAL(ACK, p, r, n)] >= told[SIGNAL(SENT, r, p, n)] && RELEASED_BY(p, n) >= n - BANKS))
#endif
#ifdef MUTANT_ACK_UNSEEN
#define COME(p, m) (m)
#else
#define COME(p, m) MIN(seen[SIGNAL(SENT, p, r, m)], m)
#endif

inline tell_ack(to_whom, bank, upto)
{
    if
    :: told[SIGNAL(ACK, r, to_whom, bank)] < (upto) ->
        assert(rows[AT(to_whom, r, bank)] == 0 || rows[AT(to_whom, r, bank)] > (upto));
        assert(partials[AT(to_whom, r, bank)] == 0 || partials[AT(to_whom, r, bank)] >= (upto));
        raise(ACK, r, to_whom, bank, upto)
    :: else
    fi
}

inline release_to(whom, m)
{
    if
    :: from[PAIR(r, whom)] != NEVER ->
        come = COME(whom, m);
        tell_ack(whom, m, come);
        if
        :: come < m && told[SIGNAL(CREDIT, r, whom, m)] < m -> raise(CREDIT, r, whom, m, m)
        :: else
        fi;
        come = 0
    :: else
    fi
}

#ifdef MUTANT_SAID_ONCE
#define IS_SAID(m) (released[(m) % BANKS] >= (m))
#else
#define IS_SAID(m) false
#endif
#define THEN_RELEASE(p) \
    if \
    :: p != r && !IS_SAID(number) -> release_to(p, number) \
    :: else \
    fi;

/* To those on other nodes it is said again. */
inline give_credit(which)
{
    number = which;
    EACH(THEN_RELEASE)
    released[number % BANKS] = MAX(released[number % BANKS], number);
    number = 0
}

#define OWES(p, b) (p != r && told[SIGNAL(CREDIT, r, p, b)] > told[SIGNAL(ACK, r, p, b)] && \
                    MIN(seen[SIGNAL(SENT, p, r, b)], told[SIGNAL(CREDIT, r, p, b)]) > told[SIGNAL(ACK, r, p, b)])
inline catch_up(with, of_bank)
{
    come = MIN(seen[SIGNAL(SENT, with, r, of_bank)], told[SIGNAL(CREDIT, r, with, of_bank)]);
    tell_ack(with, of_bank, come);
    come = 0
}

#if defined(MUTANT_NO_CATCH_UP)
#define CATCH_UP(p)
#elif defined(MUTANT_CATCHES_UP_WITH_ONE)
#define CATCH_UP(p) \
    :: atomic { IN(todo, p) && OWES(p, 0) -> catch_up(p, 0) } \
    :: atomic { IN(todo, p) && OWES(p, 1) -> catch_up(p, 1) }
#else
#define CATCH_UP(p) \
    :: atomic { todo != 0 && OWES(p, 0) -> catch_up(p, 0) } \
    :: atomic { todo != 0 && OWES(p, 1) -> catch_up(p, 1) }
#endif

/* ---- waits --------------------------------------------------------------------------------------- */

#ifdef MUTANT_BLIND
#define IS_GONE(p) false
#else
#define IS_GONE(p) (from[PAIR(r, p)] > n)
#endif
#define HAS_RELEASED(p) (RELEASED_BY(p, n) >= n)
#define MISS(p) todo = todo & ~BIT(p); missed = missed | BIT(p)

/* For p of todo: it is there, it is gone or has given up, or the op's time is over. */
#define AWAIT(p, there, given_up, then) \
    :: atomic { IN(todo, p) && there(p) -> then(p); todo = todo & ~BIT(p) } \
    :: atomic { IN(todo, p) && !there(p) && (IS_GONE(p) || given_up(p)) -> MISS(p) } \
    :: atomic { IN(todo, p) && !there(p) && !IS_GONE(p) && (is_late || timeouts > 0) -> \
                timeouts = (is_late -> timeouts : timeouts - 1); is_late = true; MISS(p) }
/* Of `all` it got those that did not leave.  Who is cut off himself gets nothing. */
#ifdef LEAVES
#define MAY_LACK BIT(VICTIM)
#else
#define MAY_LACK 0
#endif
#define HAS_ALL(some, all) (TIMEOUTS > 0 || (cut && r == VICTIM) || (some | MAY_LACK) == (all | MAY_LACK))
#define NEVER_SO(p) false
#define NOTHING(p) skip

/* ---- dispatch --------------------------------------------------------------------------------------- */

#define IS_MEMBER(p) | (p != r && from[PAIR(r, p)] <= n) << p
#ifdef MUTANT_WAITS_FOR_WHO_GAVE_UP
#define AWAIT_ROOM(p) AWAIT(p, HAS_ROOM, NEVER_SO, NOTHING)
#else
#define AWAIT_ROOM(p) AWAIT(p, HAS_ROOM, HAS_RELEASED, NOTHING)
#endif

#define SEND(p) \
    if \
    :: IN(to, p) -> \
        assert(rows[AT(r, p, n)] == 0 && partials[AT(p, r, n)] == 0); \
        out[AT(r, p, n)] = ROWS(n); \
        rows[AT(r, p, n)] = n; \
        raise(SENT, r, p, n, n) \
    :: else \
    fi;

#ifdef MUTANT_ANY_ROWS
#define IS_ROWS(p) true
#else
#define IS_ROWS(p) (in[AT(r, p, n)] == ROWS(n))
#endif
#ifdef MUTANT_SENT_IS_SEEN_FIRST /* before whatever is told later */
#define HAS_COME(p) (seen[SIGNAL(SENT, p, r, n)] >= n && IS_ROWS(p))
#else
#define HAS_COME(p) ((seen[SIGNAL(SENT, p, r, n)] >= n || HAS_RELEASED(p)) && IS_ROWS(p))
#endif
#define TAKE(p) \
    assert(rows[AT(p, r, n)] == 0 && in[AT(r, p, n)] == ROWS(n)); \
    got = got | BIT(p)
#define AWAIT_ROWS(p) AWAIT(p, HAS_COME, HAS_RELEASED, TAKE)

inline dispatch()
{
    atomic {
        begun[r] = n;
        is_late = false;
        missed = 0;
        got = 0;
        members = 0 EACH(IS_MEMBER);
        if
        :: n > BANKS -> give_credit(n - BANKS)
        :: else
        fi;
        todo = members
    }
    do
    EACH(AWAIT_ROOM)
    EACH(CATCH_UP)
    :: todo == 0 -> break
    od;
    atomic {
        to = members & ~missed;
        EACH(SEND)
        todo = members
    }
    do
    EACH(AWAIT_ROWS)
    EACH(CATCH_UP)
    :: todo == 0 -> break
    od;
    atomic {
        got = got & ~missed;
        routed[n % BANKS] = !is_late;
        h_got[n % BANKS] = got;
        h_to[n % BANKS] = to;
        if
        :: is_late -> give_credit(n)
        :: else
        fi;
        assert(HAS_ALL(got, members))
    }
}

/* ---- combine -------------------------------------------------------------------------------------------- */

#define PUSH(p) \
    if \
    :: IN(got, p) -> \
        assert(rows[AT(p, r, n)] == 0 && partials[AT(r, p, n)] == 0 && in[AT(r, p, n)] == ROWS(n)); \
        in[AT(r, p, n)] = PARTIALS(n) \
    :: else \
    fi;
#define PUT_BACK(p) \
    if \
    :: IN(got, p) -> \
        partials[AT(r, p, n)] = n; \
        tell_ack(p, n, n) \
    :: else \
    fi;

#ifdef MUTANT_ANY_PARTIALS
#define IS_PARTIALS(p) true
#else
#define IS_PARTIALS(p) (out[AT(r, p, n)] == PARTIALS(n))
#endif
#define IS_BACK(p) (HAS_RELEASED(p) && IS_PARTIALS(p))
#define ADD(p) \
    assert(partials[AT(p, r, n)] == 0 && out[AT(r, p, n)] == PARTIALS(n)); \
    summed = summed | BIT(p)
#define AWAIT_PARTIALS(p) AWAIT(p, IS_BACK, HAS_RELEASED, ADD)

inline combine()
{
    if
    :: routed[n % BANKS] ->
        atomic {
            is_late = false;
            missed = 0;
            summed = 0;
            members = 0 EACH(IS_MEMBER);
            got = h_got[n % BANKS] & members;
            to = h_to[n % BANKS] & members;
            EACH(PUSH)
        }
        atomic {
#ifdef MUTANT_CREDIT_FIRST
            give_credit(n);
            EACH(PUT_BACK)
#else
            EACH(PUT_BACK)
            give_credit(n);
#endif
            todo = to
        }
        do
        EACH(AWAIT_PARTIALS)
        EACH(CATCH_UP)
        :: todo == 0 -> break
        od;
        assert(HAS_ALL(summed, to))
    :: else
    fi
}

/* ---- ranks ------------------------------------------------------------------------------------------------ */

#define ENDS (cut && r == VICTIM)

proctype rank(byte r; byte step)
{
    byte n, todo, missed, members, got, to, summed, number, come;
    byte h_got[BANKS], h_to[BANKS], released[BANKS];
    bool routed[BANKS], is_late;

    do
    :: step < STEPS && !ENDS ->
        n = NUMBER;
        if
        :: KIND == DISPATCH -> dispatch()
        :: else -> combine()
        fi;
        step++
    :: else -> break
    od;
    atomic {
        over = over | (r == VICTIM);
        n = 0; members = 0; got = 0; to = 0; missed = 0; summed = 0
    }
    /* Who has nothing more to do looks no more either; the others must not need it. */
}

/* ---- membership ------------------------------------------------------------------------------------------- */

#define HEARS(p) :: from[PAIR(p, VICTIM)] != NEVER && p != VICTIM -> from[PAIR(p, VICTIM)] = NEVER
#define HAS_HEARD(p) && (p == VICTIM || from[PAIR(p, VICTIM)] == NEVER)
#define CUT_OFF(p) from[PAIR(VICTIM, p)] = NEVER;
#define LATEST(p) first = MAX(first, begun[p] + 1);
#define ADMIT(p) from[PAIR(p, VICTIM)] = first; from[PAIR(VICTIM, p)] = 1;

#ifdef LEAVES
proctype server()
{
    byte first;

    atomic { cut = true; EACH(CUT_OFF) }
    do
    EACH(HEARS)
    :: true EACH(HAS_HEARD) -> break
    od;
#ifdef JOINS
    atomic {
        over -> over = false; cut = false;
        EACH(LATEST)
        EACH(ADMIT)
        if
        :: first <= N && FIRST(first) < STEPS -> run rank(VICTIM, FIRST(first))
        :: else -> over = true
        fi;
        first = 0
    }
#endif
}
#endif

#ifdef MISSED
#define BEGIN FIRST(3)
#define HAS_MISSED(x, y) \
    told[SIGNAL(SENT, x, y, 1)] = 1; \
    before[SIGNAL(SENT, x, y, 1)] = 2; \
    rows[AT(x, y, 1)] = 1; \
    out[AT(x, y, 1)] = ROWS(1); \
    told[SIGNAL(CREDIT, y, x, 1)] = 1; \
    seen[SIGNAL(CREDIT, y, x, 1)] = 1;
#define HAS_ACKNOWLEDGED(x, y, n) \
    told[SIGNAL(SENT, x, y, n)] = n; \
    seen[SIGNAL(SENT, x, y, n)] = n; \
    told[SIGNAL(ACK, y, x, n)] = n; \
    seen[SIGNAL(ACK, y, x, n)] = n;
#define AFTER_THAT(x) \
    HAS_MISSED(x, (x + 1) % R) \
    HAS_ACKNOWLEDGED((x + 1) % R, x, 1) \
    HAS_ACKNOWLEDGED(x, (x + 1) % R, 2) \
    HAS_ACKNOWLEDGED((x + 1) % R, x, 2)
#else
#define BEGIN 0
#endif

init {
    atomic {
#ifdef MISSED
        EACH(AFTER_THAT)
#endif
        run network();
        run rank(0, BEGIN);
        run rank(1, BEGIN);
#if R > 2
        run rank(2, BEGIN);
#endif
#ifdef LEAVES
        run server();
#endif
    }
}
