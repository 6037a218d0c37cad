/*
 * mailbox.pml: a model of how a worker hands ops to its server on a GPU (window.h, kernels/cuda/ll_serve.cu, ll_expect.cu,
 * ll_poll.cu), for spin (run.py checks it).
 *
 * ## What stands for what
 *   op           what is in the mailbox, in two pieces: 1 and 2 are two ops that may come in any order, BAD is refused
 *   bell         SILENT, DONE, COMING, RUNG or CLOSING
 *   through, arrived, blocks, closing, taken, found, over   as in the mailbox and at the desk, `arrived` and `through` being
 *                one word there; `counted` is the desk's `through`
 *   worker       rings for OPS ops, each when the one before is over; with SPINS its kernel waits, else its stream.  A kernel
 *                that waits may let the next one announce its op
 *   HOSTILE      it writes what it likes to its mailbox instead, OPS times, and never waits
 *   stream       the server's: one entry after the other, each for any op, or for one that is expected, every other one also
 *                for others of its form, with a wait of the stream ahead of it or (POLLS) a warp that looks, and gives up
 *                whenever it likes.  The warp, and the blocks behind it, may come while the blocks of the entry ahead end
 *   block        of an entry's kernel, BLOCKS of them at a time
 *   ender        ends the serve when the worker is through, or (CLOSES) at any time
 *
 * ## What is checked
 *   - An op is executed once, by all blocks of one entry; when its worker goes on none of them runs any more, and it was
 *     what the worker had rung for.
 *   - None of an entry's blocks executes anything before all of the entry ahead are through.
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
#define EXPECTED 1 /* where one is; the worker has two */
#define BAD 3

#define SILENT 0
#define DONE   1
#define RUNG   2
#define COMING 3
#define CLOSING 4
#define ANY    0
#define EXPECT 1
#define POLL   2
#define UNTOLD 0
#define THERE  1
#define OTHER  2
#define LEAVES 3

byte bell;
byte op[2];
byte through, arrived, blocks; /* of the mailbox */
byte counted;         /* blocks of the entry that are through, at the desk */
bit closing;
/* Of this entry and the one ahead, by turns; their numbers tell them apart there: */
byte found[2];
bit taken[2], over[2];
byte kind[2];

bit comes[2 * BLOCKS]; /* a block of an entry is to begin */
byte come[2];         /* blocks of an entry that let the next one come */
byte ended[2];        /* that have come to their end */
byte rung_for;        /* what the worker waits for; 0: for nothing */
byte executed;        /* blocks that have begun with it */
byte running;         /* blocks that execute anything */
bit work_over, serve_over; /* the worker; the stream */

/* ---- blocks -------------------------------------------------------------------------------------- */

/* One block of a kernel: so many blocks will tell. */
inline answer()
{
    if
    :: SPINNING ->
#ifndef MUTANT_ANSWERS_WHEN_IT_HAS_ARRIVED
        bell = SILENT;
#endif
        blocks = BLOCKS
    :: else
    fi
}

/* As each block does for itself. */
inline copy()
{
    c[0] = op[0];
    c[1] = op[1]
}

/* What it is to do is known, and nobody is waited for any more. */
inline arrive()
{
    if
    :: SPINNING -> arrived++
    :: else
    fi;
    atomic {
        come[e]++;
        running--
    }
}

inline execute(what)
{
    atomic {
        assert(over[1 - e] || ended[1 - e] == BLOCKS);
#ifndef HOSTILE
        assert(rung_for == what);
        executed++;
        assert(executed <= BLOCKS);
#endif
        running++
    };
    arrive()
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

/* Every other entry: the op that is there instead, if it is good. */
inline take_other()
{
    if
    :: e == 1 && !there && !leaves -> copy(); there = (c[0] == c[1] && c[0] != BAD && c[0] != 0)
    :: else
    fi
}

/* Block b of every other entry. */
proctype block(byte b; byte e)
{
    byte c[2];
    bool there = false, leaves = false, last = false;

end:
    atomic {
        comes[e * BLOCKS + b];
        comes[e * BLOCKS + b] = false
    };
    if
    :: kind[e] == ANY ->
        copy();
        leaves = closing
    :: kind[e] == EXPECT ->
        copy();
        there = (c[0] == EXPECTED && c[1] == EXPECTED);
        leaves = closing;
        take_other()
    :: kind[e] == POLL ->
#ifdef MUTANT_EACH_BLOCK_LOOKS
        copy();
        there = (bell != DONE && c[0] == EXPECTED && c[1] == EXPECTED);
        leaves = !there
#else
        atomic {
            found[e] != UNTOLD;
            c[0] = EXPECTED;
            there = (found[e] == THERE);
            leaves = (found[e] == LEAVES)
        };
        take_other()
#endif
    fi;
#ifdef MUTANT_WHO_LEAVES_IT_DOES_NOT_COUNT
    leaves = leaves || (kind[e] == EXPECT && !there);
#endif
    if
    :: leaves -> goto left
    :: else
    fi;
    if
    :: kind[e] == ANY ->
#ifndef MUTANT_ANSWERS_LATE
        if
        :: b == 0 -> answer()
        :: else
        fi;
#endif
        there = (c[0] == c[1] && c[0] != BAD && c[0] != 0) /* else it is turned away */
    :: kind[e] != ANY && there && b == 0 -> taken[e] = true; answer()
    :: else
    fi;
    if
    :: there -> execute(c[0])
    :: else
    fi;
#ifdef MUTANT_ANSWERS_WHEN_IT_HAS_ARRIVED
    if
    :: b == 0 && SPINNING -> bell = SILENT
    :: else
    fi;
#endif
#ifdef MUTANT_FIRST_BLOCK_TELLS
    if
    :: there && b == 0 -> tell_stream()
    :: else
    fi;
#endif
    pass(there || kind[e] == ANY, last);
#ifdef MUTANT_ANSWERS_LATE
    if
    :: kind[e] == ANY && b == 0 && SPINNING -> blocks = BLOCKS; bell = SILENT
    :: else
    fi;
#endif
#ifdef MUTANT_IS_OVER_BEFORE_IT_TELLS
    if
    :: last && kind[e] == POLL -> over[e] = true
    :: else
    fi;
#endif
#ifndef MUTANT_FIRST_BLOCK_TELLS
    if
    :: last && (kind[e] == ANY || taken[e]) -> tell_stream()
    :: else
    fi;
#endif
    if
    :: last && kind[e] == POLL -> over[e] = true
    :: else
    fi;
left:
    atomic {
        come[e] = (leaves || !there -> come[e] + 1 : come[e]);
        ended[e]++;
        c[0] = 0; /* here and below, so that there are fewer states */
        c[1] = 0;
        there = false;
        leaves = false;
        last = false
    };
    goto end
}

/* ---- the server's stream --------------------------------------------------------------------------- */

inline compare()
{
#ifndef MUTANT_COMPARES_FIRST
    look[0] = op[0];
    look[1] = op[1];
#endif
    if
    :: closing -> finds = LEAVES
    :: !closing && look[0] == EXPECTED && look[1] == EXPECTED -> finds = THERE
    :: !closing && (look[0] != EXPECTED || look[1] != EXPECTED) -> finds = OTHER
    fi
}

inline start_blocks()
{
    d_step {
        b = 0;
        do
        :: b == BLOCKS -> break
        :: b < BLOCKS -> comes[e * BLOCKS + b] = true; b++
        od;
        b = 0
    }
}

inline hear()
{
    heard = true;
    start_blocks();
    compare()
}

/* The warp's looks, each of which may be at two words in any order. */
inline poll()
{
    heard = false;
    finds = LEAVES;
#ifdef MUTANT_POLLS_AT_ONCE
    ahead_over = true;
#else
    ahead_over = false;
#endif
#ifdef MUTANT_COMPARES_FIRST
    look[0] = op[0];
    look[1] = op[1];
#endif
    do
    :: bell == CLOSING -> finds = LEAVES; break
    :: heard && ahead_over && bell == RUNG -> break
    :: heard && !ahead_over && bell == RUNG ->
        if
        :: over[1 - e] -> break
        :: else
        fi
    :: !ahead_over && (over[1 - e] || ended[1 - e] == BLOCKS) -> ahead_over = true
    :: !heard && (bell == COMING || (ahead_over && bell == RUNG)) -> hear()
    :: finds = LEAVES; break /* for too long */
    od;
    if
    :: !heard -> start_blocks()
    :: else
    fi;
    if
    :: finds == LEAVES -> (ahead_over || ended[1 - e] == BLOCKS)
    :: else
    fi;
    found[e] = finds;
    if
    :: finds == LEAVES -> over[e] = true
    :: else
    fi;
    d_step {
        look[0] = 0;
        look[1] = 0;
        heard = false;
        finds = 0;
        ahead_over = false
    }
}

/* What comes next on the stream. */
inline choose()
{
    if
    :: next = ANY
#ifdef POLLS
    :: next = POLL
#else
    :: next = EXPECT
#endif
    fi
}

active proctype stream()
{
    byte e = 0, next, b, look[2], finds;
    bool heard, ahead_over;

    come[1] = BLOCKS;
    ended[0] = BLOCKS;
    ended[1] = BLOCKS;
    b = 0;
    atomic {
        do
        :: b == BLOCKS -> break
        :: b < BLOCKS -> run block(b, 0); run block(b, 1); b++
        od;
        b = 0
    };
again:
    choose();
    if
    :: next == POLL -> come[1 - e] == BLOCKS
    :: next != POLL -> ended[1 - e] == BLOCKS
    fi;
    ended[e] == BLOCKS;
    atomic {
        assert(next == POLL || counted == 0 || closing);
        kind[e] = next;
        kind[1 - e] = (next == POLL -> kind[1 - e] : 0); /* its blocks may still end */
        next = 0;
        ended[e] = 0;
        come[e] = 0;
        over[e] = false;
#ifndef MUTANT_TAKEN_BY_ANY
        taken[e] = false;
#endif
#ifndef MUTANT_FOUND_BY_ANY
        found[e] = UNTOLD;
        found[1 - e] = UNTOLD /* its blocks have come */
#endif
    };
    if
    :: kind[e] == POLL -> poll()
    :: kind[e] != POLL -> (bell == RUNG || bell == CLOSING); start_blocks()
    fi;
    if
    :: closing -> ended[e] == BLOCKS && ended[1 - e] == BLOCKS; serve_over = true
    :: else -> e = 1 - e; goto again
    fi
}

active proctype ender()
{
#ifndef CLOSES
    work_over;
#endif
    closing = true;
    do
    :: serve_over -> break
#ifdef MUTANT_RINGS_OUT_AS_THE_WORKER
    :: !serve_over && bell != RUNG -> bell = RUNG
#else
    :: !serve_over && bell != CLOSING -> bell = CLOSING
#endif
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
        :: bell = COMING
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
    work_over = true
}

#else

inline put(what)
{
#ifdef MUTANT_RINGS_FIRST
    rung_for = what;
    bell = RUNG;
#endif
    op[0] = what;
    op[1] = what
}

/* Its kernel says that there will be an op, and it may be that the op ahead still ends. */
inline announce(what)
{
    put(what);
    if
    :: SPINNING -> bell = COMING
    :: else
    fi
}

inline ring(what)
{
    atomic {
        rung_for = what;
        executed = 0;
        bell = RUNG
    }
}

/* until: its server is gone, and libepclient has told it. */
inline await_end(until)
{
    if
    :: SPINNING && blocks != 0 && through >= blocks -> atomic { through = 0; arrived = 0; blocks = 0 }
    :: !SPINNING && bell == DONE
    :: serve_over -> until = true
    fi
}

/* The next kernel comes when no block of the op has to take anything or to wait; or later. */
inline let_next_come()
{
    if
#ifdef MUTANT_ANNOUNCES_AT_ONCE
    :: SPINNING && n < OPS -> next = 1; announce(next)
#else
    :: SPINNING && n < OPS && blocks != 0 && arrived >= blocks -> next = 1; announce(next)
    :: SPINNING && n < OPS && blocks != 0 && arrived >= blocks -> next = 2; announce(next)
#endif
    :: next = 0
    fi
}

active proctype worker()
{
    byte n = 0, what, next = 0;
    bool gone = false;

    do
    :: n == OPS || gone -> break
    :: n < OPS && !gone ->
        n++;
        if
        :: next != 0 -> what = next
        :: next == 0 -> what = 1; announce(what)
        :: next == 0 -> what = 2; announce(what)
        fi;
        ring(what);
        let_next_come();
        await_end(gone);
        atomic {
            assert(gone || (executed == BLOCKS && running == 0));
            rung_for = (gone -> rung_for : 0)
        }
    od;
    work_over = true
}

#endif
