/*
 * ll.pml: a model of the LL protocol as the GPU kernels run it, for spin.  run.py checks it: python3 tests/model/run.py
 *
 * ## What stands for what
 *   block(r, 1)    the first block of each kernel of rank r.  Dispatch: gives up old numbers (in the kernels the block
 *                  that tells() does), waits for counts and headers, places rows.  Combine: pushes partials.
 *   block(r, 0)    the last block.  Dispatch: waits for credits, sends counts, rows, headers; waits for counts as all
 *                  blocks do.  Combine: sums partials.  Tokens are counted from the end and rows from the beginning, so
 *                  with small batches this is how kernels divide the work.
 *   server()       leave() and join() of server/node/team_cuda.c, with agree() in it; kills the worker; cut() is
 *                  team_cuda.c's, and libepclient's when it hears that its rank is lost.
 *   ask            the beginning of dispatch: begin() of ll_dispatch.cu
 *   tell_outside   what arrive() of ll_device.cuh does with the ranks that a block leaves out; DIFFERED: differed()
 *   give_up_old, give_credit, newcomers, take_counts, receive_again, finish_dispatch, end_push, find_partials, ...
 *                  the functions of these names in ll_dispatch.cu, ll_combine.cu and ll_device.cuh
 *   launched       the stream: a kernel begins when all blocks of the one before have ended, all its blocks at once.
 * A token of each rank goes to all ranks, or to the next one only (SPARSE), always in one row.
 *
 * ## What is checked
 * A memory cell holds the number of the op that wrote it last.
 *   - Who reads counts, a header, a row or a partial for number n finds n there.  Who writes a row or a partial does so
 *     where nobody still needs an older one (`held`, `summing`).
 *   - Nothing waits for ever: every rank comes to the end of its script.  No wait has a timeout, unless TIMEOUTS says in
 *     how many ops one has.  So no timeout makes anybody else wait for his.
 *   - Who joins takes part in number n for all ranks or for none, himself included.
 *   - Each block keeps to what it saw itself of who takes part.  Still, what a dispatch leaves behind is of the same
 *     sources for all blocks, those that `arrived` names; and in a combine `arrived` names nobody whose part a sum lacks.
 *
 * ## What is left out
 * Memory is sequentially consistent, but for `begun`, which becomes visible at any time up to the fence in newcomers(),
 * which is before a block's last headers are out or after it;
 * that each header is fenced from its row is taken for granted (MUTANT_HEADER_FIRST is what happens otherwise).  What a
 * worker had under way when it was killed has landed before its rank is joined again.  What a rank that has left reads
 * is void (`out`): its peers may write on.  Numbers do not wrap, arithmetic on them is not modelled.
 *
 * Steps that are not atomic in the kernels and are here commute with whatever others do meanwhile: a wait for what does
 * not change again with the write after it; writes to several ranks, none of which sees the others' memory.  A
 * worker can be killed between any two of these writes all the same (DYING).
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
#define N 4 /* dispatches */
#endif
#ifndef VICTIM
#define VICTIM (R - 1) /* the rank that leaves or joins */
#endif
#define B 2
#define NEVER 255
#define ALL ((1 << R) - 1)

/* ---- the ops of every rank, in the order of its stream ------------------------------ */

#define SEND 1
#define RECEIVE 2
#define DISPATCH 0
#define COMBINE 1
#define RELEASE 2
#define NOTHING 3

#if defined(PAIRS) /* dispatch, combine */
#define KIND (step % 2)
#define PHASES (SEND | RECEIVE)
#define H 0
#define STEPS (2 * N)
#define FIRST(n) (2 * ((n) - 1))
#elif defined(INTERLEAVED) /* dispatch a, dispatch b, combine a, combine b */
#define KIND (step % 4 / 2)
#define PHASES (SEND | RECEIVE)
#define H (step % 2)
#define STEPS (2 * N)
#define FIRST(n) (((n) - 1) / 2 * 4 + ((n) - 1) % 2)
#elif defined(SPLIT) /* the same, sent and completed apart */
#define KIND (step % 8 / 4)
#define PHASES (step % 4 / 2 + 1)
#define H (step % 2)
#define STEPS (4 * N)
#define FIRST(n) (((n) - 1) / 2 * 8 + ((n) - 1) % 2)
#elif defined(SKIPPED) /* no combine ever, two handles */
#define KIND DISPATCH
#define PHASES (SEND | RECEIVE)
#define H (step % 2)
#define STEPS N
#define FIRST(n) ((n) - 1)
#elif defined(REPLACED) /* no combine ever, one handle */
#define KIND DISPATCH
#define PHASES (SEND | RECEIVE)
#define H 0
#define STEPS N
#define FIRST(n) ((n) - 1)
#elif defined(MIXED) /* after each dispatch, what all ranks choose: combine it or the one before, release it, nothing */
#define KIND (step % 2 == 0 -> DISPATCH : chosen_kind[step / 2])
#define PHASES (SEND | RECEIVE)
#define H (step % 2 == 0 -> step / 2 % 2 : (step / 2 + chosen_before[step / 2]) % 2)
#define STEPS (2 * N)
#define FIRST(n) (2 * ((n) - 1))
#define CHOOSES
byte chosen_kind[N]; /* NOTHING + 1: not yet */
bit chosen_before[N];
#endif

/* ---- memory ------------------------------------------------------------------------- */

#ifdef MUTANT_ONE_BANK
#define CELL(w, n, s) ((w) * R + (s))
#define CELLS (R * R)
#else
#define CELL(w, n, s) ((w) * B * R + (n) % B * R + (s))
#define CELLS (R * B * R)
#endif
#define CREDIT(w, d, n) ((w) * R * B + (d) * B + (n) % B)
#define FROM(y, r) ((y) * R + (r))
#define BANK(r, n) ((r) * B + (n) % B)
#define HANDLE(r, h) ((r) * 2 + (h))

/* A cell is the number of what was written last.  Of window w, bank n % B, region s. */
byte counts[CELLS], row[CELLS], header[CELLS];
byte partial[CELLS], announced[CELLS]; /* combine_rows: the pieces and the numbers of packets */
byte credit[R * R * B];

/* ep_device_state of each rank */
byte from[R * R], begun[R], number[R], released[R * B];
byte h_number[R * 2], h_excluded[R * 2];
bit h_combined[R * 2], h_routed[R * 2];
byte gone[R], late[R], outside[R], outsiders[R], done[R], pushed[R]; /* scratch */

/* streams */
byte launched[R]; /* step */
byte ended[R];    /* blocks of it */

/* workers */
bit doomed;     /* VICTIM's is killed */
byte ceased[R]; /* blocks of it that run no more */

/* ---- what only the proof knows ---------------------------------------------------------- */

byte held[R * B];    /* number whose rows the rank may still read in a bank */
byte summing[R * B]; /* number whose partials it may still read there */
byte taken[R * 2];   /* by block: ranks whose part is in the result */
bit out[R];          /* has left: what it reads is void */
byte joined;         /* VICTIM: the number that it joined at */
byte without[R];     /* the highest number that a rank did without VICTIM */
byte lates;          /* timeouts so far */

#if R == 2
#define SEEN ((from[FROM(r, 0)] <= n) | (from[FROM(r, 1)] <= n) << 1)
#else
#define SEEN ((from[FROM(r, 0)] <= n) | (from[FROM(r, 1)] <= n) << 1 | (from[FROM(r, 2)] <= n) << 2)
#endif
#define IN(mask, x) ((mask) >> (x) & 1)
#define POPC(mask) (IN(mask, 0) + IN(mask, 1) + IN(mask, 2))
#define COUNTED_IN (members & ~outside[r])
#define DIFFERED ((gone[r] | late[r]) != 0 || outsiders[r] != 2 * POPC(outside[r]))

#ifdef MEMBERSHIP
#define MAY_LACK (1 << VICTIM)
#define DYING (r == VICTIM && doomed) /* it dies at the next wait or in the middle of what it writes */
#define ESCAPE :: DYING -> goto dies
#ifdef MUTANT_BLIND
#define GONE(peer) false
#else
#define GONE(peer) (from[FROM(r, peer)] > n)
#endif
#else
#define MAY_LACK 0
#define DYING false
#define ESCAPE
#define GONE(peer) false
#endif
#if defined(LEAVES) && !defined(JOINS)
#define DEAD(d) (d == VICTIM && ceased[d] == 2) /* for ever: nobody reads its memory */
#else
#define DEAD(d) false
#endif
#ifdef SPARSE /* a rank's token goes to the next rank only, otherwise to all */
#define GOES(s, d) ((d) == ((s) + 1) % R)
#define GOAL (1 << (r + 1) % R)
#else
#define GOES(s, d) true
#define GOAL ALL
#endif
#ifdef TIMEOUTS
#define LATE(peer, there) \
        :: !(there) && (late[r] != 0 || lates < TIMEOUTS) -> \
            lates = (late[r] != 0 -> lates : lates + 1); late[r] = late[r] | 1 << (peer); missed = missed | 1 << (peer)
#else
#define LATE(peer, there)
#endif
#ifdef MUTANT_NO_CREDIT_WAIT
#define HAS_CREDIT true
#elif defined(MUTANT_ABSENT_OWES_NOTHING)
#define HAS_CREDIT (n <= B || from[FROM(r, d)] > n - B || credit[CREDIT(r, d, n)] >= n - B)
#else
#define HAS_CREDIT (n <= B || from[FROM(r, d)] > n - B && from[FROM(r, d)] <= n || credit[CREDIT(r, d, n)] >= n - B)
#endif
#define HEADER_THERE (!GOES(d, r) || header[CELL(r, n, d)] == n)
#define HAS_RELEASED(d) (credit[CREDIT(r, d, n)] >= n)
#ifdef MUTANT_WAITS_FOR_WHO_GAVE_UP
#define SENDS_NO_MORE(s) false
#else
#define SENDS_NO_MORE(s) HAS_RELEASED(s)
#endif
#ifdef MUTANT_STALE_COUNTS
#define COUNTS_THERE (counts[CELL(r, n, d)] > 0)
#else
#define COUNTS_THERE (counts[CELL(r, n, d)] == n)
#endif

/* ---- the end of an op ---------------------------------------------------------------------- */

inline tell_outside()
{
    outside[r] = outside[r] | ALL & ~members;
    outsiders[r] = outsiders[r] + POPC(ALL & ~members)
}

inline take_scratch()
{
    done[r] = 0; pushed[r] = 0; gone[r] = 0; late[r] = 0; outside[r] = 0; outsiders[r] = 0
}

/* ---- credits ------------------------------------------------------------------------------ */

/* Part of an atomic step, as all below unless they say otherwise. */
inline give_credit(m)
{
    if
    :: m > 0 && released[BANK(r, m)] < m ->
        if
        :: held[BANK(r, m)] == m -> held[BANK(r, m)] = 0
        :: else
        fi;
        d = 0;
        do
        :: d < R -> credit[CREDIT(d, r, m)] = (DEAD(d) -> 0 : m); d++
        :: DYING -> goto dies
        :: d == R && !DYING -> break
        od;
        d = 0;
        released[BANK(r, m)] = m
    :: else
    fi
}

/* ---- dispatch ------------------------------------------------------------------------------- */

inline raise()
{
    if
    :: begun[r] < n -> begun[r] = n
    :: else
    fi;
    raised = 1
}

inline ask()
{
    sends = (PHASES & SEND) != 0;
    receives = (PHASES & RECEIVE) != 0;
    h = H;
    n = (sends -> number[r] + 1 : h_number[HANDLE(r, h)]);
    ok = sends || (n > 0 && number[r] - n < B);
    members = SEEN;
    members = (IN(members, r) -> members : 0);
    if
    :: sends && held[BANK(r, n)] != n ->
        held[BANK(r, n)] = (out[r] -> 0 : n);
        summing[BANK(r, n)] = (out[r] -> 0 : n)
    :: else
    fi;
#ifdef MEMBERSHIP
    if
    :: !sends -> raised = 1
    :: sends -> raise()
#ifdef JOINS
    :: sends /* it is still under way */
#endif
    fi
#endif
}

inline give_up_old()
{
#ifdef MUTANT_NO_CREDIT_ON_SKIP
    skip
#else
    m = h_number[HANDLE(r, h)];
    if
    :: m + B > n -> give_credit(m)
    :: else
    fi;
    m = (n > B -> n - B : 0);
    give_credit(m);
    m = 0
#endif
}

inline write_row(d)
{
    assert(out[d] || held[BANK(d, n)] == 0 || held[BANK(d, n)] >= n);
    row[CELL(d, n, r)] = (GOES(r, d) -> n : row[CELL(d, n, r)])
}

inline write_header(d)
{
    header[CELL(d, n, r)] = (GOES(r, d) -> n : header[CELL(d, n, r)])
}

#ifdef MUTANT_HEADER_FIRST
#define FIRST_PART write_header(d)
#define SECOND_PART write_row(d)
#else
#define FIRST_PART write_row(d)
#define SECOND_PART write_header(d)
#endif

inline push_rows(to)
{
    d = 0;
    do
    :: d < R && IN(to & ~missed, d) && !DEAD(d) -> counts[CELL(d, n, r)] = n; FIRST_PART; d++
    :: d < R && (!IN(to & ~missed, d) || DEAD(d)) -> d++
    :: DYING -> goto dies
    :: d == R && !DYING -> break
    od;
    d = 0
}

inline push_headers(to)
{
    d = 0;
    do
    :: d < R && IN(to & ~missed, d) && !DEAD(d) -> SECOND_PART; d++
    :: d < R && (!IN(to & ~missed, d) || DEAD(d)) -> d++
    :: DYING -> goto dies
    :: d == R && !DYING -> break
    od;
    d = 0
}

inline miss(d)
{
    gone[r] = gone[r] | 1 << d;
    missed = missed | 1 << d
}

inline wait_credit()
{
    d = 0;
    do
    :: d < R && !IN(members, d) -> d++
    :: d < R && IN(members, d) ->
        if
        :: !DYING && HAS_CREDIT
        :: !DYING && !HAS_CREDIT && GONE(d) -> miss(d)
        LATE(d, HAS_CREDIT)
        ESCAPE
        fi;
        d++
    :: d == R -> break
    od;
    d = 0
}

inline newcomers()
{
#ifdef MEMBERSHIP
    if
    :: !raised -> raise() /* the fence */
    :: else
    fi;
#ifndef MUTANT_NO_REREAD
    newly = (sends && members != 0 -> SEEN & ~members : 0);
#endif
    members = members | newly
#endif
}

inline take_counts(mask)
{
    d = 0;
    do
    :: d < R && !IN((mask) & ~got & ~missed, d) -> d++
    :: d < R && IN((mask) & ~got & ~missed, d) ->
        if
        :: !DYING && COUNTS_THERE ->
            assert(out[r] || counts[CELL(r, n, d)] == n);
            got = got | 1 << d
        :: !DYING && !COUNTS_THERE && (GONE(d) || SENDS_NO_MORE(d)) -> miss(d)
        LATE(d, COUNTS_THERE)
        ESCAPE
        fi;
        d++
    :: d == R -> break
    od;
    d = 0
}

inline take_headers()
{
    d = 0;
    do
    :: d < R && !IN(got, d) -> d++
    :: d < R && IN(got, d) ->
        if
        :: !DYING && HEADER_THERE
        :: !DYING && !HEADER_THERE && (GONE(d) || SENDS_NO_MORE(d)) -> miss(d)
        LATE(d, HEADER_THERE)
        ESCAPE
        fi;
        d++
    :: d == R -> break
    od;
    d = 0;
    got = got & ~missed
}

inline check_rows(mask)
{
    d = 0;
    do
    :: d < R ->
        assert(out[r] || !IN(mask, d) ||
               (counts[CELL(r, n, d)] == n && (!GOES(d, r) || header[CELL(r, n, d)] == n && row[CELL(r, n, d)] == n)));
        d++
    :: d == R -> break
    od;
    d = 0
}

/* Do the ranks agree who took part in n? */
inline check_agreement(mask)
{
#ifdef TIMEOUTS
    skip
#else
    assert(out[VICTIM] || IN(mask, VICTIM) || n < joined);
    assert(r != VICTIM || joined == 0 || mask == ALL);
    assert((mask | MAY_LACK) == ALL);
    if
    :: !IN(mask, VICTIM) -> without[r] = n
    :: else
    fi
#endif
}

inline finish_dispatch()
{
    if
    :: receives && COUNTED_IN != 0 ->
        assert(taken[2 * r] == taken[2 * r + 1]);
        assert((COUNTED_IN & ~(gone[r] | late[r])) == taken[2 * r]); /* "arrived" tells the truth */
        if
        :: !out[r] -> check_agreement(taken[2 * r])
        :: else
        fi
    :: else
    fi;
    number[r] = (sends -> n : number[r]);
    h_number[HANDLE(r, h)] = n;
    h_combined[HANDLE(r, h)] = 0;
    h_routed[HANDLE(r, h)] = receives && COUNTED_IN != 0 && late[r] == 0;
    h_excluded[HANDLE(r, h)] = gone[r] | outside[r];
#ifndef MUTANT_NO_CREDIT_ON_FAILURE
    if
    :: receives && !h_routed[HANDLE(r, h)] -> give_credit(n)
    :: else
    fi;
#endif
    take_scratch()
}

inline arrive()
{
    taken[2 * r + first] = got;
#ifndef MUTANT_OWN_VIEW
    tell_outside();
#endif
    done[r]++;
    last = done[r] == 2;
    again = last && ok && receives && DIFFERED;
    if
    :: last && ok && !again -> finish_dispatch()
    :: last && !ok -> take_scratch() /* refuse */
    :: else
    fi
}

/* An atomic block is a step: what is in one could as well be done apart, nobody could tell. */
inline dispatch_first() /* the first block: receives */
{
#ifdef MEMBERSHIP
    atomic { kind == DISPATCH && first -> newcomers() }
    atomic {
#else
    atomic {
        kind == DISPATCH && first ->
#endif
        if
        :: ok && receives -> take_counts(members); take_headers()
        :: else
        fi;
        arrive()
    }
    atomic {
        if
        :: again -> receive_again()
        :: !again -> check_rows(got) /* the row in hand, after it has arrived */
        fi;
        end_of_block()
    }
}

inline dispatch_last() /* the last block: sends */
{
    atomic {
        kind == DISPATCH && !first ->
        newly = (ok && sends -> members : 0);
        if
        :: ok && sends -> wait_credit()
        :: else
        fi;
        push_rows(newly)
    }
#ifdef MEMBERSHIP
    atomic {
        if
        :: early = 1; m = newly; newly = 0; newcomers()
        :: push_headers(newly); newly = 0
        fi
    }
    atomic {
        if
        :: early -> push_headers(m); m = 0
        :: !early -> newcomers()
        fi
    }
    if
    :: newly != 0 ->
        atomic {
            if
            :: receives -> take_counts(members & ~newly)
            :: else
            fi;
            push_rows(newly)
        }
        atomic { push_headers(newly) }
    :: newly == 0
    fi;
    atomic {
#else
    atomic {
        push_headers(newly);
        newly = 0
    }
    atomic {
#endif
        if
        :: ok && receives -> take_counts(members)
        :: else
        fi;
        arrive();
        if
        :: again -> receive_again()
        :: else
        fi;
        end_of_block()
    }
}

inline receive_again() /* when the other block has left */
{
#ifdef MUTANT_CREDIT_EARLY_ON_FAILURE
    give_credit(n);
#endif
    if
    :: !DYING && ended[r] == 1
    ESCAPE
    fi;
    members = members & ~(gone[r] | late[r] | outside[r]);
    got = members;
    check_rows(got);
    taken[2 * r] = got;
    taken[2 * r + 1] = got;
    finish_dispatch()
}

/* ---- combine ------------------------------------------------------------------------------------ */

#define HAS_ROW(s) (GOES(s, r) && !DEAD(s) && IN(members & ~h_excluded[HANDLE(r, h)], s) && counts[CELL(r, n, s)] == n)

#ifdef MUTANT_PARTIAL_FIRST
#define FIRST_HALF announced[CELL(d, n, r)] = n
#define SECOND_HALF write_partial(d)
#else
#define FIRST_HALF write_partial(d)
#define SECOND_HALF announced[CELL(d, n, r)] = n
#endif

inline write_partial(d)
{
    assert(out[d] || summing[BANK(d, n)] == 0 || summing[BANK(d, n)] >= n);
    partial[CELL(d, n, r)] = n
}

/* Reads the rows of source d, writes its partials. */
inline push_partials()
{
    d = 0;
    do
    :: d < R && HAS_ROW(d) ->
        assert(out[r] || (header[CELL(r, n, d)] == n && row[CELL(r, n, d)] == n));
        FIRST_HALF;
        d++
    :: d < R && !HAS_ROW(d) -> d++
    :: DYING -> goto dies
    :: d == R && !DYING -> break
    od;
    d = 0
}

inline announce()
{
    d = 0;
    do
    :: d < R && HAS_ROW(d) -> SECOND_HALF; d++
    :: d < R && !HAS_ROW(d) -> d++
    :: DYING -> goto dies
    :: d == R && !DYING -> break
    od;
    d = 0
}

inline find_partials()
{
    d = 0;
    do
    :: d < R && !(GOES(r, d) && IN(members, d)) -> d++
    :: d < R && GOES(r, d) && IN(members, d) ->
        if
        :: !DYING && announced[CELL(r, n, d)] == n -> got = got | 1 << d
        :: !DYING && announced[CELL(r, n, d)] != n && (GONE(d) || HAS_RELEASED(d)) -> miss(d)
        LATE(d, announced[CELL(r, n, d)] == n)
        ESCAPE
        fi;
        d++
    :: d == R -> break
    od;
    d = 0
}

inline sum_partials()
{
    d = 0;
    do
    :: d < R -> assert(out[r] || !IN(got, d) || partial[CELL(r, n, d)] == n); d++
    :: d == R -> break
    od;
    d = 0
}

inline finish_combine()
{
    if
    :: ok && receives ->
        assert((COUNTED_IN & GOAL & ~(gone[r] | late[r]) & ~taken[2 * r]) == 0); /* "arrived" tells the truth */
#ifndef TIMEOUTS
        assert(out[r] || (taken[2 * r] | MAY_LACK | ~GOAL & ALL) == ALL);
#endif
    :: else
    fi;
    take_scratch()
}

inline begin()
{
    sends = (PHASES & SEND) != 0;
    receives = (PHASES & RECEIVE) != 0;
    h = H;
    n = h_number[HANDLE(r, h)];
    members = SEEN;
    members = (IN(members, r) -> members : 0);
    ok = members != 0 && n > 0 && number[r] - n < B && h_routed[HANDLE(r, h)] &&
         !(sends && h_combined[HANDLE(r, h)]);
}

inline end_push()
{
    pushed[r] = pushed[r] + (ok && sends -> 1 : 0);
    if
    :: ok && sends && pushed[r] == 2 ->
        h_combined[HANDLE(r, h)] = 1;
        give_credit(n)
    :: else
    fi
}

inline arrive_combine()
{
#ifndef MUTANT_OWN_VIEW_COMBINE
    tell_outside();
#endif
    done[r]++;
    if
    :: done[r] == 2 -> finish_combine()
    :: else
    fi
}

inline combine_first() /* the first block: pushes partials */
{
    atomic {
        kind == COMBINE && first ->
        if
        :: ok && sends ->
#ifdef MUTANT_CREDIT_EARLY
            give_credit(n);
#endif
            push_partials()
        :: else
        fi
    }
    atomic {
        if
        :: ok && sends -> announce()
        :: else
        fi
    }
    atomic {
        end_push();
        arrive_combine();
        end_of_block()
    }
}

inline combine_last() /* the last block: sums them up */
{
    atomic { kind == COMBINE && !first -> end_push() }
    atomic {
        if
        :: ok && receives -> find_partials()
        :: else
        fi
    }
    atomic {
        taken[2 * r] = got;
        arrive_combine()
    }
    atomic {
        sum_partials(); /* the last sum, after it has arrived */
        summing[BANK(r, n)] = (ok && receives -> 0 : summing[BANK(r, n)]);
        end_of_block()
    }
}

/* ---- a handle is given up --------------------------------------------------------------------------- */

inline release()
{
    if
    :: first ->
        h = H;
        m = h_number[HANDLE(r, h)];
        if
        :: m > 0 && number[r] - m < B ->
            summing[BANK(r, m)] = 0;
            give_credit(m)
        :: else
        fi;
        h_number[HANDLE(r, h)] = 0;
        h_routed[HANDLE(r, h)] = 0
    :: else
    fi
}

/* ---- a rank ------------------------------------------------------------------------------------------- */

inline forget()
{
    n = 0; m = 0; members = 0; missed = 0; got = 0; newly = 0; d = 0; h = 0;
    sends = 0; receives = 0; ok = 0; raised = 0; last = 0; again = 0; early = 0
}

/* A kernel ends when all its blocks have; then the stream goes on. */
inline end_of_block()
{
    forget();
    step++;
    ended[r]++;
    if
    :: ended[r] == 2 -> ended[r] = 0; launched[r]++
    :: else
    fi
}

/* What nobody will read any more is 0: states that differ in it only are one. */
inline forget_state()
{
    number[r] = 0; launched[r] = 0; ended[r] = 0;
    take_scratch();
    d = 0;
    do
    :: d < 2 ->
        released[BANK(r, d)] = 0; held[BANK(r, d)] = 0; summing[BANK(r, d)] = 0;
        h_number[HANDLE(r, d)] = 0; h_excluded[HANDLE(r, d)] = 0;
        h_combined[HANDLE(r, d)] = 0; h_routed[HANDLE(r, d)] = 0;
        taken[2 * r + d] = 0;
        d++
    :: d == 2 -> break
    od;
#ifndef JOINS
    begun[r] = 0;
    d = 0;
    do
    :: d < B * R ->
        counts[r * B * R + d] = 0; row[r * B * R + d] = 0; header[r * B * R + d] = 0;
        partial[r * B * R + d] = 0; announced[r * B * R + d] = 0; credit[r * B * R + d] = 0;
        d++
    :: d == B * R -> break
    od;
#endif
    d = 0
}

#ifdef CHOOSES
inline choose()
{
    if
    :: step % 2 == 1 && chosen_kind[step / 2] == NOTHING + 1 ->
        if
        :: chosen_kind[step / 2] = COMBINE
        :: chosen_kind[step / 2] = COMBINE; chosen_before[step / 2] = 1
        :: chosen_kind[step / 2] = RELEASE
        :: chosen_kind[step / 2] = NOTHING
        fi
    :: else
    fi
}
#endif

proctype block(byte r; bit first)
{
    byte step, kind, n, m, members, missed, got, newly, d, h;
    bit sends, receives, ok, raised, last, again, early;

life:
    do
    :: step >= STEPS -> break
    :: atomic {
        step < STEPS ->
        if
        :: !DYING && launched[r] == step
        ESCAPE
        fi;
#ifdef CHOOSES
        choose();
#endif
        kind = KIND;
        if
        :: kind == DISPATCH ->
            ask();
            if
            :: sends && first -> give_up_old()
            :: else
            fi
        :: kind == COMBINE -> begin()
        :: kind == RELEASE -> release(); end_of_block()
        :: kind == NOTHING -> end_of_block()
        fi
    }
        if
        :: dispatch_first()
        :: dispatch_last()
        :: combine_first()
        :: combine_last()
        :: kind != DISPATCH && kind != COMBINE
        fi
    od;
#ifdef MEMBERSHIP
end_done:
    DYING;
dies:
    atomic { /* what it had under way lands */
        begun[r] = (sends && kind == DISPATCH && n > begun[r] -> n : begun[r]);
        forget();
        kind = 0;
        step = 0;
        ceased[r]++;
        if
        :: ceased[r] == 2 -> forget_state()
        :: else
        fi
    }
end_dead:
    atomic {
        !doomed ->
        step = launched[r];
        goto life
    }
#else
dies:
    skip
#endif
}

/* ---- the server ------------------------------------------------------------------------------------------ */

inline tell_from(v)
{
    do
    :: atomic {
        from[FROM(i, VICTIM)] = v;
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
        highest = (begun[i] > highest -> begun[i] : highest);
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
    d_step { out[VICTIM] = 1; i = 0 }
    tell_from(NEVER)
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
        :: i < R -> from[FROM(VICTIM, i)] = NEVER; i++
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
#ifdef MUTANT_NO_RAISE
        :: true -> break
#else
        :: highest < v -> break
        :: else -> v = highest + 1 + 2 * (highest - before)
#endif
        fi
    od;
    atomic { /* write_state, and what was known of the old worker */
        begun[VICTIM] = v - 1;
        number[VICTIM] = v - 1;
        released[BANK(VICTIM, 0)] = v - 1;
        released[BANK(VICTIM, 1)] = v - 1;
        h_number[HANDLE(VICTIM, 0)] = 0; h_number[HANDLE(VICTIM, 1)] = 0;
        h_routed[HANDLE(VICTIM, 0)] = 0; h_routed[HANDLE(VICTIM, 1)] = 0;
        gone[VICTIM] = 0; late[VICTIM] = 0; outside[VICTIM] = 0; outsiders[VICTIM] = 0;
        done[VICTIM] = 0; pushed[VICTIM] = 0; ended[VICTIM] = 0;
        taken[2 * VICTIM] = 0; taken[2 * VICTIM + 1] = 0;
        held[BANK(VICTIM, 0)] = 0; held[BANK(VICTIM, 1)] = 0;
        summing[BANK(VICTIM, 0)] = 0; summing[BANK(VICTIM, 1)] = 0;
        out[VICTIM] = 0;
        joined = v;
        do
        :: i < R ->
            assert(i == VICTIM || without[i] < v);
            from[FROM(VICTIM, i)] = (i == VICTIM -> v : 1);
            i++
        :: else -> break
        od;
        i = 0;
        launched[VICTIM] = (v <= N -> FIRST(v) : STEPS);
        ceased[VICTIM] = 0;
        doomed = 0
    }
}

#ifdef MEMBERSHIP
proctype server()
{
    byte i, v, highest, before;

#ifdef LEAVES
#ifdef JOINS
    if
    :: kill(); leave(); cut()
    :: leave(); kill(); cut()
    :: leave(); cut(); kill()
    fi;
#else
#ifdef LIVES_ON
    leave();
    cut()
#else
    kill();
    leave();
    cut()
#endif
#endif
#endif
#ifdef JOINS
    ceased[VICTIM] == 2;
    join()
#endif
}
#endif

init
{
    atomic {
        byte i;

        for (i : 0 .. R * R - 1) {
            from[i] = 1
        }
#ifdef CHOOSES
        for (i : 0 .. N - 1) {
            chosen_kind[i] = NOTHING + 1
        }
#endif
        for (i : 0 .. R - 1) {
            run block(i, 0);
            run block(i, 1)
        }
#ifdef MEMBERSHIP
#ifndef LEAVES
        for (i : 0 .. R - 1) {
            from[FROM(i, VICTIM)] = NEVER
        }
        out[VICTIM] = 1;
        doomed = 1;
#endif
        run server()
#endif
    }
}
