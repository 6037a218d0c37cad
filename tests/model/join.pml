/*
 * join.pml: a model of how ranks join and leave a group that spans nodes, for spin (run.py checks it).
 *
 * ## What stands for what
 *   from[x][r]   node x's own view: rank r takes part in ops of this number and later (NEVER: it is absent)
 *   life[x][r]   the life of r that this is about: each attempt to join has a higher one
 *   left[x][r]   the last life of r that has left, as x has heard
 *   rank         ops of the rank of node x, numbered by counting: it takes a number when nobody holds, sends to all
 *                that it counts in, and waits for what they send.  What arrives for a rank that is absent at its own
 *                node is dropped.
 *   joiner       Node.Hold on all nodes, then Node.Admit with the highest number begun anywhere + 1, on its own node
 *                first; an admit whose hold has ended is refused, and then the rank leaves everywhere and tries again or
 *                gives up
 *   killer       its worker is killed: absent at its own node at once, the others hear of it at any later time
 *   crash        its node dies, in the middle of joining or later: each other node notices at some time, and takes
 *                nothing from it afterwards; what was under way arrives before that or never
 *   expire       a hold ends by itself
 *
 * ## What is checked
 *   - Ranks that take part in an op of the same number count each other in, whoever joins when.
 *   - Nobody waits for ever: every rank that lives comes to its last op.
 *
 * Macros: NODES (2, 3; one rank on each), M ops, JOINS (the last joins), TWO_JOIN (the last two do), KILLED (the last
 * one is killed, and its next life joins), CRASHES (the node of the last one, which joins, dies), EXPIRES holds that end
 * by themselves, MUTANT_... (what must be caught).
 */
#ifndef NODES
#define NODES 2
#endif
#ifndef M
#define M 3
#endif
#ifndef EXPIRES
#define EXPIRES 0
#endif
#define NEVER 255
#define LAST (NODES - 1)
#define BIT(r) (1 << (r))
#define VIEW(x, r) ((x) * NODES + (r))
#define AT(r, n) ((r) * (M + 2) + (n))
#define GOT(r, s, n) (((r) * NODES + (s)) * (M + 2) + (n))

#ifdef TWO_JOIN
#define JOINS
#define JOINER(r) ((r) >= NODES - 2)
#elif defined(JOINS) || defined(CRASHES)
#define JOINER(r) ((r) == LAST)
#else
#define JOINER(r) false
#endif

byte from[NODES * NODES];
byte life[NODES * NODES];
byte left[NODES * NODES];
byte holds[NODES];  /* bit r: a hold of r's next life */
byte begun[NODES];
byte view[NODES * (M + 2)]; /* of rank and number: whom it counts in */
bit took[NODES * (M + 2)];
bit unsaid[NODES * (M + 2)];  /* it was killed, before the op was over or after it: nothing is said about it */
bit got[NODES * NODES * (M + 2)];
bit dead[NODES];    /* the life that runs was killed */
bit gone[NODES];    /* the node has died */
byte deaf[NODES];   /* bit r: this node has noticed that r's node died */
byte first[NODES];  /* number that the life may begin with; 0: none yet */
byte lives[NODES];  /* the last life, at its own node */
bit over[NODES];    /* its last op is over */
byte expiries;

/* ---- what a node does when it is asked ---------------------------------------------------------- */

inline hear_leave(at, whose, which)
{
    if
#ifdef MUTANT_LEAVES_OF_ANY_LIFE
    :: true ->
#else
    :: which >= life[VIEW(at, whose)] ->
#endif
        from[VIEW(at, whose)] = NEVER
    :: else
    fi;
    if
    :: which > left[VIEW(at, whose)] -> left[VIEW(at, whose)] = which
    :: else
    fi
}

inline hear_hold(at, whose)
{
    if
    :: !(deaf[at] & BIT(whose)) -> holds[at] = holds[at] | BIT(whose)
    :: else
    fi
}

inline hear_admit(at, whose, which, number, answer)
{
    if
#ifndef MUTANT_HEARS_THE_DEAD
    :: deaf[at] & BIT(whose) -> answer = false
#endif
    :: (holds[at] & BIT(whose)) == 0 && !(deaf[at] & BIT(whose)) -> answer = false
#ifndef MUTANT_LEAVES_OF_ANY_LIFE
    :: (holds[at] & BIT(whose)) && which <= left[VIEW(at, whose)] -> answer = false; holds[at] = holds[at] & ~BIT(whose)
#endif
    :: else ->
        from[VIEW(at, whose)] = number;
        life[VIEW(at, whose)] = which;
        holds[at] = holds[at] & ~BIT(whose);
        answer = true
    fi
}

/* ---- ops ------------------------------------------------------------------------------------------- */

/* Whoever takes part in n beside me counts me in, and I count it in. */
inline check_agreement(one, op)
{
    s = 0;
    do
    :: s == NODES -> break
    :: else ->
        assert(s == one || !took[AT(s, op)] || unsaid[AT(s, op)] || dead[s] || gone[s] ||
               ((view[AT(s, op)] & BIT(one)) && (view[AT(one, op)] & BIT(s))));
        s++
    od
}

inline take_number(me, number)
{
    begun[me] = (begun[me] < number -> number : begun[me]);
    took[AT(me, number)] = 1;
    s = 0;
    do
    :: s == NODES -> break
    :: else ->
        if
        :: from[VIEW(me, s)] <= number -> view[AT(me, number)] = view[AT(me, number)] | BIT(s)
        :: else
        fi;
        s++
    od;
    check_agreement(me, number)
}

proctype rank(byte r)
{
    byte n, s;

again:
end_idle: /* who gave up joining */
    atomic { first[r] != 0 || gone[r] -> n = first[r] }
    do
    :: gone[r] || n > M -> break
    :: else ->
        atomic {
            if
            :: dead[r] || gone[r] -> goto ended
#ifdef MUTANT_NOBODY_HOLDS
            :: !dead[r] && !gone[r] -> take_number(r, n)
#else
            :: !dead[r] && !gone[r] && holds[r] == 0 -> take_number(r, n)
#endif
            fi
        }
        s = 0;
        do
        :: s == NODES -> break
        :: else ->
            atomic { /* a frame: it arrives or is dropped */
                if
                :: s != r && !dead[r] && !gone[r] && (view[AT(r, n)] & BIT(s)) && from[VIEW(s, s)] <= n ->
                    got[GOT(s, r, n)] = 1
                :: else
                fi;
                s++
            }
        od;
        s = 0;
        do
        :: s == NODES -> break
        :: else ->
            atomic {
                s == r || !(view[AT(r, n)] & BIT(s)) || got[GOT(r, s, n)] || from[VIEW(r, s)] > n || dead[r] || gone[r] ->
                s++
            }
        od;
        n++
    od;
ended:
    atomic {
        if
        :: dead[r] && !gone[r] -> /* its next life runs here too */
            n = 0;
            do
            :: n > M -> break
            :: else -> unsaid[AT(r, n)] = took[AT(r, n)]; n++
            od;
            first[r] = 0;
            dead[r] = 0;
            goto again
        :: else -> over[r] = 1
        fi
    }
}

/* ---- joining ------------------------------------------------------------------------------------------ */

/* The i-th that is asked: the own node first. */
#ifdef MUTANT_OTHERS_FIRST
#define ASKED(r, i) (((r) + 1 + (i)) % NODES)
#else
#define ASKED(r, i) (((r) + (i)) % NODES)
#endif

proctype joiner(byte r)
{
    byte i, most;
    bool granted;

again:
    atomic { lives[r]++; most = 0; i = 0 }
    do
    :: i == NODES -> break
    :: else ->
        atomic {
            if
            :: gone[r] -> goto ended
            :: else -> hear_hold(i, r)
            fi;
            most = (most < begun[i] -> begun[i] : most);
            i++
        }
    od;
    i = 0;
    do
    :: i == NODES -> break
    :: else ->
        atomic {
            if
            :: gone[r] -> goto ended
            :: else -> hear_admit(ASKED(r, i), r, lives[r], most + 1, granted)
            fi;
            i++;
            if
            :: !granted -> break
            :: else
            fi
        }
    od;
    if
    :: granted ->
        atomic { first[r] = most + 1; goto ended }
    :: else -> /* everybody is told, and answers, before the next attempt */
        i = 0;
        do
        :: i == NODES -> break
        :: else ->
            atomic {
                if
                :: gone[r] -> goto ended
#ifndef MUTANT_FAILED_AND_SILENT
                :: else -> hear_leave(i, r, lives[r]); holds[i] = holds[i] & ~BIT(r)
#else
                :: else -> holds[i] = holds[i] & ~BIT(r)
#endif
                fi;
                i++
            }
        od;
        if
        :: goto again
        :: goto ended
        fi
    fi;
ended:
    skip
}

/* ---- what happens to them --------------------------------------------------------------------------- */

/* One node hears of it. */
proctype tell(byte x, r, l)
{
    atomic { hear_leave(x, r, l) }
}

proctype killer(byte r)
{
    byte x;

    atomic {
        if
        :: over[r] -> goto ended
        :: first[r] != 0 && begun[r] > 0 && !over[r] -> dead[r] = 1
        fi;
        hear_leave(r, r, lives[r]);
        x = 0;
        do
        :: x == NODES -> break
        :: x == r -> x++
        :: else -> run tell(x, r, lives[r]); x++
        od
    }
    atomic { !dead[r] -> run joiner(r) } /* the executor of the last life has stopped */
ended:
    skip
}

/* Until it has noticed a node hears what that sent. */
proctype notice(byte x, r)
{
    atomic {
        gone[r] ->
        deaf[x] = deaf[x] | BIT(r);
        from[VIEW(x, r)] = NEVER;
        holds[x] = holds[x] & ~BIT(r)
    }
}

proctype crash(byte r)
{
    gone[r] = 1
}

#ifdef MUTANT_HEARS_THE_DEAD
/* An admit that was under way. */
proctype late_admit(byte x, r)
{
    bool granted;

    atomic { gone[r] && lives[r] > 0 -> hear_admit(x, r, lives[r], begun[x] + 1, granted) }
}
#endif

proctype expire(byte x, r)
{
    do
    :: atomic { expiries < EXPIRES && (holds[x] & BIT(r)) -> holds[x] = holds[x] & ~BIT(r); expiries++ }
    :: break
    od
}

init
{
    byte x, r;

    atomic {
        do
        :: x == NODES -> break
        :: else ->
            r = 0;
            do
            :: r == NODES -> break
            :: else ->
                from[VIEW(x, r)] = (JOINER(r) -> NEVER : 1);
                r++
            od;
            first[x] = (JOINER(x) -> 0 : 1);
            x++
        od;
        x = 0;
        do
        :: x == NODES -> break
        :: else ->
            run rank(x);
            if
            :: JOINER(x) -> run joiner(x)
            :: else
            fi;
            x++
        od;
#if EXPIRES > 0
        x = 0;
        do
        :: x == NODES -> break
        :: else -> run expire(x, LAST); x++
        od;
#endif
#ifdef KILLED
        run killer(LAST);
#endif
#ifdef CRASHES
        run crash(LAST);
        x = 0;
        do
        :: x == LAST -> break
        :: else ->
            run notice(x, LAST);
#ifdef MUTANT_HEARS_THE_DEAD
            run late_admit(x, LAST);
#endif
            x++
        od;
#endif
    }
}
