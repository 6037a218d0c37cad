/*
 * mailbox.pml: a model of how a worker hands ops to its server on a GPU (window.h, kernels/cuda/ll_serve.cu, ll_expect.cu,
 * ll_poll.cu), for spin (run.py checks it).
 *
 * ## What stands for what
 *   op           what is in the mailbox, in two pieces: 1 and 2 are two ops that may come in any order, BAD is refused
 *   bell         SILENT, DONE or RUNG
 *   through, blocks, closing, taken, found   as in the mailbox and at the desk; `counted` is the desk's `through`
 *   worker       rings for OPS ops, each when the one before is over; with SPINS its kernel waits, else its stream
 *   HOSTILE      it writes what it likes to its mailbox instead, OPS times, and never waits
 *   stream       the server's: one entry after the other, each for any op, or for one that is expected and perhaps others of
 *                its form, with a wait of the stream ahead of it or (POLLS) a warp that looks, and gives up whenever it likes
 *   block        of an entry's kernel, BLOCKS of them at a time
 *   ender        ends the serve when the worker is through, or (CLOSES) at any time
 * A kernel that is launched early comes here when the one ahead is over, before which it reads nothing; behind a warp that
 * looks, when that has heard the bell or gives up.
 *
 * ## What is checked
 *   - An op is executed once, by all blocks of one entry; when its worker goes on none of them runs any more, and it was
 *     what the worker had rung for.
 *   - The counter of blocks is 0 between entries, whatever a worker writes, so there is a last block in each.
 *   - Nobody waits for ever: the worker comes to its end, and the stream to the serve's.
 *
 * Macros: OPS, BLOCKS, SPINS, POLLS, HOSTILE, CLOSES, MUTANT_... (what must be caught).
 */
#ifndef OPS
#define OPS 2
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifdef SPINS
#define SPINNING true
#else
#define SPINNING false
#endif
#define BAD 3

#define SILENT 0
#define DONE   1
#define RUNG   2
#define ANY    0
#define EXPECT 1
#define POLL   2
#define UNTOLD 0
#define THERE  1
#define OTHER  2
#define LEAVES 3

byte bell;
byte op[2];
byte through, blocks; /* of the mailbox */
byte counted;         /* blocks of the entry that are through, at the desk */
bit closing, taken;
byte found;           /* of this entry, as its number says there */

byte ended;           /* blocks of the entry that have come to their end */
byte rung_for;        /* what the worker waits for; 0: for nothing */
byte executed;        /* blocks that have begun with it */
byte running;         /* blocks that execute anything */
bit over, serve_over; /* the worker; the stream */

/* ---- blocks -------------------------------------------------------------------------------------- */

/* One block of a kernel: so many blocks will tell. */
inline answer()
{
    if
    :: SPINNING -> bell = SILENT; blocks = BLOCKS
    :: else
    fi
}

/* As each block does for itself. */
inline copy()
{
    c[0] = op[0];
    c[1] = op[1]
}

inline execute(what)
{
    running++;
#ifndef HOSTILE
    atomic {
        assert(rung_for == what);
        executed++;
        assert(executed <= BLOCKS)
    };
#endif
    running--
}

/* tells: the worker's kernel is told, if it waits. */
inline pass(tells, last)
{
    if
    :: SPINNING && tells -> through++
    :: else
    fi;
    atomic {
        counted++;
        last = (counted == BLOCKS);
        counted = (last -> 0 : counted)
    }
}

inline tell_stream()
{
    if
    :: !SPINNING -> bell = DONE
    :: else
    fi
}

/* The op that is there instead, if it is good. */
inline take_other()
{
    if
    :: takes_others && !there && !leaves -> copy(); there = (c[0] == c[1] && c[0] != BAD && c[0] != 0)
    :: else
    fi
}

proctype block(byte b; byte kind; byte expects; bool takes_others)
{
    byte c[2];
    bool there = false, leaves = false, last = false;

    if
    :: kind == ANY ->
        copy();
        leaves = closing
    :: kind == EXPECT ->
        copy();
        there = (c[0] == expects && c[1] == expects);
        leaves = closing;
        take_other()
    :: kind == POLL ->
#ifdef MUTANT_EACH_BLOCK_LOOKS
        copy();
        there = (bell != DONE && c[0] == expects && c[1] == expects);
        leaves = !there
#else
        found != UNTOLD;
        c[0] = expects;
        there = (found == THERE);
        leaves = (found == LEAVES);
        take_other()
#endif
    fi;
#ifdef MUTANT_WHO_LEAVES_IT_DOES_NOT_COUNT
    leaves = leaves || (kind == EXPECT && !there);
#endif
    if
    :: leaves -> goto left
    :: else
    fi;
    if
    :: kind == ANY ->
#ifndef MUTANT_ANSWERS_LATE
        if
        :: b == 0 -> answer()
        :: else
        fi;
#endif
        there = (c[0] == c[1] && c[0] != BAD && c[0] != 0) /* else it is turned away */
    :: kind != ANY && there && b == 0 -> answer(); taken = true
    :: else
    fi;
    if
    :: there -> execute(c[0])
    :: else
    fi;
#ifdef MUTANT_FIRST_BLOCK_TELLS
    if
    :: there && b == 0 -> tell_stream()
    :: else
    fi;
#endif
    pass(there || kind == ANY, last);
#ifdef MUTANT_ANSWERS_LATE
    if
    :: kind == ANY && b == 0 && SPINNING -> blocks = BLOCKS; bell = SILENT
    :: else
    fi;
#endif
#ifndef MUTANT_FIRST_BLOCK_TELLS
    if
    :: last && (kind == ANY || taken) -> tell_stream()
    :: else
    fi;
#endif
left:
    ended++
}

/* ---- the server's stream --------------------------------------------------------------------------- */

inline compare()
{
#ifndef MUTANT_COMPARES_FIRST
    look[0] = op[0];
    look[1] = op[1];
#endif
    if
    :: closing -> found = LEAVES
    :: !closing && look[0] == expects && look[1] == expects -> found = THERE
    :: !closing && (look[0] != expects || look[1] != expects) -> found = OTHER
    fi
}

/* The kernel's blocks come between the bell and the comparison. */
inline poll()
{
#ifndef MUTANT_FOUND_BY_ANY
    found = UNTOLD;
#endif
#ifdef MUTANT_COMPARES_FIRST
    look[0] = op[0];
    look[1] = op[1];
#endif
    if
    :: bell == RUNG || early -> rung = true
    :: rung = false /* for too long */
    fi;
    early = false
}

inline tell_found()
{
    if
    :: kind == POLL && rung -> compare()
    :: kind == POLL && !rung -> found = LEAVES
    :: kind != POLL
    fi
}

inline choose()
{
    if
    :: kind = ANY
    :: kind = EXPECT
#ifdef POLLS
    :: kind = POLL
#endif
    fi;
    if
    :: kind == ANY -> expects = 0
    :: kind != ANY -> expects = 1
    :: kind != ANY -> expects = 2
    fi;
    if
    :: takes_others = false
    :: takes_others = true
    fi
}

active proctype stream()
{
    byte kind;
    byte expects, b, look[2];
    bool early = false, rung, takes_others;

again:
    choose();
#ifndef MUTANT_TAKEN_BY_ANY
    taken = false;
#endif
    if
    :: kind == POLL -> poll()
    :: kind != POLL -> bell == RUNG
    fi;
    ended = 0;
    b = 0;
    do
    :: b == BLOCKS -> break
    :: b < BLOCKS -> run block(b, kind, expects, takes_others); b++
    od;
    tell_found();
#ifdef MUTANT_POLLS_AT_ONCE
    early = (bell == RUNG);
#endif
    ended == BLOCKS && _nr_pr <= 3; /* and gone, else spin keeps them */
    assert(counted == 0 || closing);
    if
    :: closing -> serve_over = true
    :: else -> goto again
    fi
}

active proctype ender()
{
#ifndef CLOSES
    over;
#endif
    closing = true;
    do
    :: serve_over -> break
    :: !serve_over && bell != RUNG -> bell = RUNG
    od
}

/* ---- the worker -------------------------------------------------------------------------------------- */

#ifdef HOSTILE

active proctype worker()
{
    byte n = 0;

    do
    :: n == OPS -> break
    :: n < OPS ->
        n++;
        if
        :: bell = SILENT
        :: bell = DONE
        :: bell = RUNG
        :: op[0] = 1
        :: op[1] = 1
        :: op[0] = 2
        :: op[1] = 2
        :: op[0] = BAD
        :: op[1] = BAD
        :: through = 0
        :: blocks = 1
        fi
    od;
    over = true
}

#else

inline ring(what)
{
    atomic {
        rung_for = what;
        executed = 0
    };
#ifdef MUTANT_RINGS_FIRST
    bell = RUNG;
#endif
    op[0] = what;
    op[1] = what;
#ifndef MUTANT_RINGS_FIRST
    bell = RUNG
#endif
}

/* until: its server is gone, and libepclient has told it. */
inline await_end(until)
{
    if
    :: SPINNING && blocks != 0 && through >= blocks -> through = 0; blocks = 0
    :: !SPINNING && bell == DONE
    :: serve_over -> until = true
    fi
}

active proctype worker()
{
    byte n = 0;
    bool gone = false;

    do
    :: n == OPS || gone -> break
    :: n < OPS && !gone ->
        n++;
        if
        :: ring(1)
        :: ring(2)
        fi;
        await_end(gone);
        atomic {
            assert(gone || (executed == BLOCKS && running == 0));
            rung_for = (gone -> rung_for : 0)
        }
    od;
    over = true
}

#endif
