"""Checks models of protocols with spin, and that each mutant of them is caught.

    ll.pml      low latency ops of ranks on GPUs
    ll_net.pml  what these do when ranks are on several nodes
    ht.pml      high throughput ops of ranks on GPUs
    ht_net.pml  likewise
    join.pml    ranks that join and leave a group on several nodes
    epoch.pml   servers that agree on a group's next epoch
    turn.pml    ranks that go over to it
    mailbox.pml ops that a worker hands to its server on a GPU

    python3 tests/model/run.py [NAME]     only the cases with NAME in their name

A case is a model with a set of macros; the model says what they mean.  Four kinds:

  in full   Every state that can be reached is looked at, so there is no counterexample with so many ranks and ops.
            They are small: of ll, 2 ranks with 2 to 6 dispatches, 3 ranks with 3 and no combine; of ht, 2 ranks with 2
            to 6, 3 ranks with 2; of ll_net, 2 ranks with 2 to 6, 3 ranks with one; 2 or 3 nodes, servers.
  sampled   What is larger: 3 ranks that combine, or of which one leaves or joins; ops in halves, or a rank that comes
            back, where one is killed.  SAMPLE_S seconds of a search in random order, in which a state counts as seen
            when its hash was (spin's bitstate search).  That finds mistakes and proves nothing.
  mutant    The protocol with a mistake in it.  The search must find a counterexample.
  hunted    A mutant that is looked for in random order, as samples are: in HUNTS searches of HUNT_S seconds at most, as one
            that has gone the wrong way seldom comes back.

It takes about five minutes on two idle cores.  A line per case, `ok` or `FAIL`, and `N passed, N failed`; 77 where
spin, gcc or tcc is missing.  What they make lies below TMPDIR and goes with it.
"""
import concurrent.futures
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

MODELS = os.path.dirname(os.path.abspath(__file__))
JOBS = len(os.sched_getaffinity(0))
MEMORY_MB = 2000  # of one search
DEPTH = 100000    # steps
# Of a core's time: what else the machine does changes nothing of what is found.
SEARCH_S = 400    # a full search has failed then
SAMPLE_S = 6
HUNT_S = 15
HUNTS = 8
LOOK_S = 0.1      # how often it is looked at
SAMPLE_BITS = 30  # log2 of the bits that hashes are kept in
SKIPPED = 77


@dataclasses.dataclass
class Case:
    name: str
    macros: str
    kind: str = "in full"
    model: str = "ll"
    large: bool = False  # so many states that good code saves more time than it costs


def large(name, macros):
    return Case(name, macros, large=True)


def sampled(name, macros):
    return Case(name, macros, "sampled")


def mutant(name, macros):
    return Case("mutant, " + name, macros, "mutant")


def of(model):
    """Cases of that model, named for it."""
    def case(name, macros, kind="in full", large=False):
        return Case("%s, %s" % (model, name), macros, kind, model, large)
    return case


ll_net, ht, ht_net = of("ll_net"), of("ht"), of("ht_net")
join, epoch, turn, mailbox = of("join"), of("epoch"), of("turn"), of("mailbox")


SCRIPTS = ("PAIRS", "INTERLEAVED", "SPLIT", "SKIPPED", "REPLACED")

CASES = [
    *(Case("2 ranks, " + script, "R=2 N=6 " + script) for script in SCRIPTS),
    *(Case("2 ranks, sparse, " + script, "R=2 N=6 SPARSE " + script) for script in SCRIPTS),
    large("2 ranks, all choices", "R=2 N=4 MIXED"),
    large("3 ranks, SKIPPED", "R=3 N=3 SKIPPED"),
    large("3 ranks, sparse, REPLACED", "R=3 N=3 SPARSE REPLACED"),
    large("2 ranks, one is killed, PAIRS", "R=2 N=3 LEAVES PAIRS"),
    large("2 ranks, the first is killed, PAIRS", "R=2 N=2 LEAVES VICTIM=0 PAIRS"),
    large("2 ranks, one is killed, SKIPPED", "R=2 N=3 LEAVES SKIPPED"),
    large("2 ranks, one leaves and lives on, SKIPPED", "R=2 N=3 LEAVES LIVES_ON SKIPPED"),
    large("2 ranks, one joins, PAIRS", "R=2 N=4 JOINS PAIRS"),
    large("2 ranks, one joins, INTERLEAVED", "R=2 N=4 JOINS INTERLEAVED"),
    large("2 ranks, one joins, REPLACED", "R=2 N=3 JOINS REPLACED"),
    Case("2 ranks, a timeout, PAIRS", "R=2 N=3 TIMEOUTS=1 PAIRS"),
    Case("2 ranks, a timeout, INTERLEAVED", "R=2 N=4 TIMEOUTS=1 INTERLEAVED"),
    Case("2 ranks, a timeout, SPLIT", "R=2 N=4 TIMEOUTS=1 SPLIT"),
    Case("2 ranks, two timeouts, SKIPPED", "R=2 N=4 TIMEOUTS=2 SKIPPED"),
    Case("2 ranks, sparse, two timeouts, PAIRS", "R=2 N=3 SPARSE TIMEOUTS=2 PAIRS"),

    sampled("2 ranks, one is killed, INTERLEAVED", "R=2 N=4 LEAVES INTERLEAVED"),
    sampled("2 ranks, one is killed, SPLIT", "R=2 N=4 LEAVES SPLIT"),
    sampled("2 ranks, one leaves and lives on, PAIRS", "R=2 N=3 LEAVES LIVES_ON PAIRS"),
    sampled("2 ranks, one is killed and comes back, REPLACED", "R=2 N=4 LEAVES JOINS REPLACED"),
    sampled("3 ranks, PAIRS", "R=3 N=4 PAIRS"),
    sampled("3 ranks, SPLIT", "R=3 N=4 SPLIT"),
    sampled("3 ranks, a timeout, PAIRS", "R=3 N=3 TIMEOUTS=1 PAIRS"),
    sampled("2 ranks, one is killed, a timeout, PAIRS", "R=2 N=3 LEAVES TIMEOUTS=1 PAIRS"),
    sampled("3 ranks, one is killed, PAIRS", "R=3 N=2 LEAVES PAIRS"),
    sampled("3 ranks, one leaves and lives on, SKIPPED", "R=3 N=3 LEAVES LIVES_ON SKIPPED"),
    sampled("3 ranks, one joins, INTERLEAVED", "R=3 N=4 JOINS INTERLEAVED"),

    mutant("blocks of a dispatch keep their own view", "N=2 LEAVES PAIRS MUTANT_OWN_VIEW"),
    mutant("blocks of a combine keep their own view, one joins", "N=3 JOINS PAIRS MUTANT_OWN_VIEW_COMBINE"),
    mutant("blocks of a combine keep their own view", "N=2 LEAVES PAIRS MUTANT_OWN_VIEW_COMBINE"),
    mutant("who takes part no more owes no credit", "N=3 LEAVES LIVES_ON SKIPPED MUTANT_ABSENT_OWES_NOTHING"),
    mutant("credit before the combine has read", "N=3 PAIRS MUTANT_CREDIT_EARLY"),
    mutant("no credit without a combine", "N=4 SKIPPED MUTANT_NO_CREDIT_ON_SKIP"),
    mutant("no credit for what failed", "N=3 TIMEOUTS=1 PAIRS MUTANT_NO_CREDIT_ON_FAILURE"),
    mutant("credit for what failed, before all have read", "N=4 TIMEOUTS=2 PAIRS MUTANT_CREDIT_EARLY_ON_FAILURE"),
    mutant("waits for who gave up", "N=3 TIMEOUTS=2 PAIRS MUTANT_WAITS_FOR_WHO_GAVE_UP"),
    mutant("nobody waits for credit", "N=4 SKIPPED MUTANT_NO_CREDIT_WAIT"),
    mutant("one bank", "N=4 INTERLEAVED MUTANT_ONE_BANK"),
    mutant("header before its row", "N=2 PAIRS MUTANT_HEADER_FIRST"),
    mutant("partial announced before it is there", "N=2 PAIRS MUTANT_PARTIAL_FIRST"),
    mutant("counts of any number", "N=3 PAIRS MUTANT_STALE_COUNTS"),
    mutant("waits do not look at from", "N=2 LEAVES PAIRS MUTANT_BLIND"),
    mutant("from is not read again", "N=3 JOINS PAIRS MUTANT_NO_REREAD"),
    mutant("the server does not raise from", "N=3 JOINS PAIRS MUTANT_NO_RAISE"),

    ll_net("2 ranks, PAIRS", "N=4 PAIRS"),
    ll_net("2 ranks, INTERLEAVED", "N=6 INTERLEAVED"),
    ll_net("2 ranks, SKIPPED", "N=6 SKIPPED"),
    ll_net("2 ranks, a timeout, PAIRS", "N=3 PAIRS TIMEOUTS=1"),
    ll_net("2 ranks, a timeout, INTERLEAVED", "N=4 INTERLEAVED TIMEOUTS=1"),
    ll_net("2 ranks, a timeout, SKIPPED", "N=4 SKIPPED TIMEOUTS=1"),
    ll_net("2 ranks, one leaves, PAIRS", "N=2 PAIRS LEAVES"),
    ll_net("2 ranks, one leaves, INTERLEAVED", "N=2 INTERLEAVED LEAVES"),
    ll_net("2 ranks, one leaves and comes back, PAIRS", "N=3 PAIRS LEAVES JOINS", large=True),
    ll_net("2 ranks, one leaves and comes back, SKIPPED", "N=3 SKIPPED LEAVES JOINS"),
    ll_net("3 ranks, PAIRS", "R=3 N=1 PAIRS", large=True),
    ll_net("3 ranks, each has missed one, PAIRS", "R=3 N=3 MISSED PAIRS", large=True),
    ll_net("2 ranks, two timeouts, PAIRS", "N=3 PAIRS TIMEOUTS=2", "sampled"),
    ll_net("2 ranks, one leaves, a timeout, PAIRS", "N=3 PAIRS LEAVES TIMEOUTS=1", "sampled"),
    ll_net("2 ranks, one leaves and comes back, longer", "N=5 PAIRS LEAVES JOINS", "sampled"),
    ll_net("3 ranks, three timeouts, SKIPPED", "R=3 N=3 SKIPPED TIMEOUTS=3", "sampled"),
    ll_net("3 ranks, one leaves and comes back, PAIRS", "R=3 N=3 PAIRS LEAVES JOINS", "sampled"),
    ll_net("mutant, nobody waits for an ACK", "N=4 SKIPPED TIMEOUTS=1 MUTANT_NO_ACK", "mutant"),
    ll_net("mutant, ACK before all has come", "N=4 SKIPPED TIMEOUTS=1 MUTANT_ACK_UNSEEN", "mutant"),
    ll_net("mutant, no ACK while one waits", "N=4 SKIPPED TIMEOUTS=1 MUTANT_NO_CATCH_UP", "mutant"),
    ll_net("mutant, ACKs for whom one waits only", "R=3 N=3 MISSED PAIRS MUTANT_CATCHES_UP_WITH_ONE", "mutant"),
    ll_net("mutant, released once for all", "N=3 PAIRS LEAVES JOINS MUTANT_SAID_ONCE", "mutant"),
    ll_net("mutant, waits for who gave up", "N=3 PAIRS TIMEOUTS=2 MUTANT_WAITS_FOR_WHO_GAVE_UP", "mutant"),
    ll_net("mutant, signals before data", "N=4 PAIRS MUTANT_SIGNAL_FIRST", "mutant"),
    ll_net("mutant, SENT is seen before what is told later", "N=2 PAIRS MUTANT_SENT_IS_SEEN_FIRST", "mutant"),
    ll_net("mutant, credit before partials", "N=4 PAIRS MUTANT_CREDIT_FIRST", "mutant"),
    ll_net("mutant, rows of any number", "N=4 SKIPPED TIMEOUTS=1 MUTANT_ANY_ROWS", "mutant"),
    ll_net("mutant, partials of any number", "N=2 PAIRS TIMEOUTS=1 MUTANT_ANY_PARTIALS", "mutant"),
    ll_net("mutant, waits do not look at from", "N=2 PAIRS LEAVES MUTANT_BLIND", "mutant"),

    ht("2 ranks, PAIRS", "N=6 PAIRS"),
    ht("2 ranks, PASSES", "N=4 PASSES"),
    ht("2 ranks, INTERLEAVED", "N=6 INTERLEAVED"),
    ht("2 ranks, SKIPPED", "N=6 SKIPPED"),
    ht("2 ranks, sparse, LL_BETWEEN", "N=4 SPARSE LL_BETWEEN"),
    ht("3 ranks, PAIRS", "R=3 N=2 PAIRS"),
    ht("2 ranks, one is killed, SKIPPED", "N=2 LEAVES SKIPPED"),
    ht("2 ranks, one leaves and lives on, SKIPPED", "N=2 LEAVES LIVES_ON SKIPPED"),
    ht("2 ranks, one joins, PAIRS", "N=2 JOINS PAIRS"),
    ht("2 ranks, one joins, its handle is stale", "N=2 JOINS CACHED PAIRS"),
    ht("2 ranks, a timeout, PAIRS", "N=2 TIMEOUTS=1 PAIRS"),
    ht("2 ranks, a timeout, INTERLEAVED", "N=4 TIMEOUTS=1 INTERLEAVED"),
    ht("2 ranks, one is killed, LL_BETWEEN", "N=2 LEAVES LL_BETWEEN", "sampled"),
    ht("2 ranks, one is killed and comes back, PAIRS", "N=3 LEAVES JOINS PAIRS", "sampled"),
    ht("3 ranks, a timeout, PASSES", "R=3 N=2 TIMEOUTS=1 PASSES", "sampled"),
    ht("3 ranks, one is killed, PAIRS", "R=3 N=2 LEAVES VICTIM=0 PAIRS", "sampled"),
    ht("mutant, header before its row", "N=2 PAIRS MUTANT_HEADER_FIRST", "mutant"),
    ht("mutant, done before the last row", "N=2 PAIRS MUTANT_DONE_FIRST", "mutant"),
    ht("mutant, partials before they are asked for", "N=2 PAIRS MUTANT_NOT_ASKED", "mutant"),
    ht("mutant, partials of any tag", "N=2 PAIRS MUTANT_ANY_PARTIAL", "mutant"),
    ht("mutant, no second look", "N=2 PAIRS MUTANT_NO_SECOND_LOOK", "mutant"),
    ht("mutant, one tag for a note", "N=2 TIMEOUTS=1 PAIRS MUTANT_ONE_TAG", "mutant"),
    ht("mutant, a closed op is written to", "N=2 TIMEOUTS=1 PAIRS MUTANT_NO_GATE", "mutant"),
    ht("mutant, late writers are not awaited", "N=2 TIMEOUTS=1 PAIRS MUTANT_NO_DRAIN", "mutant"),
    ht("mutant, writers are not announced", "N=2 TIMEOUTS=1 PAIRS MUTANT_NOT_ANNOUNCED", "mutant"),
    ht("mutant, a look before it is announced", "N=2 TIMEOUTS=1 PAIRS MUTANT_LOOKS_FIRST", "mutant"),
    ht("mutant, nobody is told that it is closed", "N=2 TIMEOUTS=1 PAIRS MUTANT_NOT_CLOSED", "mutant"),
    ht("mutant, who ceased is awaited", "N=2 TIMEOUTS=1 PAIRS MUTANT_CEASED_IS_NOTHING", "mutant"),
    ht("mutant, zeros under a late writer", "N=2 TIMEOUTS=1 PAIRS MUTANT_ZERO_FIRST", "mutant"),
    ht("mutant, waits do not look at from", "N=2 LEAVES PAIRS MUTANT_BLIND", "mutant"),
    ht("mutant, a look before it has begun", "N=3 JOINS PAIRS MUTANT_RAISES_LATER", "mutant"),
    ht("mutant, the server does not raise ht_from", "N=3 JOINS PAIRS MUTANT_NOT_AGREED", "mutant"),
    ht("mutant, the source places its rows", "R=3 N=2 VICTIM=0 JOINS SKIPPED MUTANT_OWN_PLACE", "mutant"),
    ht("mutant, partials lie by who is there", "R=3 N=1 VICTIM=0 JOINS PAIRS MUTANT_PARTIALS_BY_MEMBERS", "mutant"),

    ht_net("1 + 1 ranks, PAIRS", "SHAPE=11 N=4 PAIRS"),
    ht_net("1 + 1 ranks, INTERLEAVED", "SHAPE=11 N=4 INTERLEAVED"),
    ht_net("1 + 1 ranks, a timeout, PAIRS", "SHAPE=11 N=2 TIMEOUTS=1 PAIRS"),
    ht_net("1 + 1 ranks, a timeout and no combine after it, PAIRS", "SHAPE=11 N=3 TIMEOUTS=1 FORGOES PAIRS"),
    ht_net("1 + 1 ranks, a timeout, SKIPPED", "SHAPE=11 N=3 TIMEOUTS=1 SKIPPED"),
    ht_net("1 + 1 ranks, one joins, PAIRS", "SHAPE=11 N=3 JOINS PAIRS"),
    ht_net("1 + 1 ranks, one leaves, PAIRS", "SHAPE=11 N=1 LEAVES PAIRS"),
    ht_net("1 + 1 ranks, a node dies, PAIRS", "SHAPE=11 N=2 DIES PAIRS"),
    ht_net("1 + 1 + 1 ranks, each has missed one, SKIPPED", "SHAPE=111 N=1 MISSED SKIPPED"),
    ht_net("1 + 2 ranks, PAIRS", "SHAPE=12 N=1 PAIRS"),
    ht_net("1 + 2 ranks, SKIPPED", "SHAPE=12 N=2 SKIPPED"),
    ht_net("1 + 2 ranks, one way, PAIRS", "SHAPE=12 N=2 ONE_WAY PAIRS"),
    ht_net("1 + 2 ranks, one way, the gate joins, SKIPPED", "SHAPE=12 N=2 ONE_WAY JOINS VICTIM=1 SKIPPED"),
    ht_net("1 + 2 ranks, a timeout, SKIPPED", "SHAPE=12 N=1 TIMEOUTS=1 SKIPPED", large=True),
    ht_net("1 + 3 ranks, one way, two in a row are away, PAIRS", "SHAPE=13 N=4 ONE_WAY AWAY=6 PAIRS"),
    ht_net("1 + 3 ranks, one way, the gate joins, the next one is away, SKIPPED",
           "SHAPE=13 N=2 ONE_WAY AWAY=4 JOINS VICTIM=1 SKIPPED"),
    ht_net("1 + 3 ranks, one way, the next one joins, the gate is away, SKIPPED",
           "SHAPE=13 N=2 ONE_WAY AWAY=2 JOINS VICTIM=2 SKIPPED"),
    ht_net("1 + 1 ranks, one leaves, PAIRS", "SHAPE=11 N=2 LEAVES PAIRS", "sampled"),
    ht_net("1 + 1 + 1 ranks, PAIRS", "SHAPE=111 N=2 PAIRS", "sampled"),
    ht_net("1 + 2 ranks, one way, the gate leaves, PAIRS", "SHAPE=12 N=2 ONE_WAY LEAVES VICTIM=1 PAIRS", "sampled"),
    ht_net("1 + 2 ranks, the gate comes back, PAIRS", "SHAPE=12 N=3 ONE_WAY LEAVES JOINS VICTIM=1 PAIRS", "sampled"),
    ht_net("1 + 2 ranks, two timeouts, INTERLEAVED", "SHAPE=12 N=2 TIMEOUTS=2 INTERLEAVED", "sampled"),
    ht_net("1 + 3 ranks, the gate joins, INTERLEAVED", "SHAPE=13 N=2 ONE_WAY JOINS VICTIM=1 INTERLEAVED", "sampled"),
    ht_net("1 + 3 ranks, the gate joins, the next one is away, INTERLEAVED",
           "SHAPE=13 N=2 ONE_WAY AWAY=4 JOINS VICTIM=1 INTERLEAVED", "sampled"),
    ht_net("2 + 2 ranks, PAIRS", "SHAPE=22 N=2 PAIRS", "sampled"),
    ht_net("mutant, nobody waits for an ACK", "SHAPE=11 N=2 PAIRS MUTANT_NO_ACK", "mutant"),
    ht_net("mutant, ACK before data", "SHAPE=11 N=2 TIMEOUTS=1 PAIRS MUTANT_ACK_BEFORE_DATA", "mutant"),
    ht_net("mutant, CLOSED is enough", "SHAPE=11 N=2 TIMEOUTS=1 PAIRS MUTANT_CLOSED_IS_ENOUGH", "mutant"),
    ht_net("mutant, ACK while it is read", "SHAPE=11 N=2 TIMEOUTS=1 SKIPPED MUTANT_ACK_EARLY", "mutant"),
    ht_net("mutant, ACK before all has come", "SHAPE=11 N=2 TIMEOUTS=1 PAIRS MUTANT_ACK_UNSEEN", "mutant"),
    ht_net("mutant, no ACK after the op", "SHAPE=11 N=2 TIMEOUTS=1 PAIRS MUTANT_NO_CATCH_UP", "mutant"),
    ht_net("mutant, ACKs for whom one waits only", "SHAPE=111 N=1 MISSED SKIPPED MUTANT_CATCHES_UP_WITH_ONE", "mutant"),
    ht_net("mutant, not told that it is over", "SHAPE=11 N=2 TIMEOUTS=1 SKIPPED MUTANT_NOT_OVER", "mutant"),
    ht_net("mutant, not told that it is closed", "SHAPE=11 N=2 TIMEOUTS=1 PAIRS MUTANT_NOT_CLOSED", "mutant"),
    ht_net("mutant, drains before it is told", "SHAPE=12 N=2 TIMEOUTS=2 SKIPPED MUTANT_DRAINS_FIRST", "hunted"),
    ht_net("mutant, signals before data", "SHAPE=11 N=2 PAIRS MUTANT_SIGNAL_FIRST", "mutant"),
    ht_net("mutant, records of any tag", "SHAPE=11 N=2 TIMEOUTS=1 PAIRS MUTANT_ANY_RECORD", "mutant"),
    ht_net("mutant, a combine that did not come is not forgone", "SHAPE=11 N=2 SKIPPED MUTANT_NOT_FORGONE", "mutant"),
    ht_net("mutant, records where sums were asked for", "SHAPE=11 N=2 TIMEOUTS=1 PAIRS MUTANT_ASKED_AND_FREE", "mutant"),
    ht_net("mutant, sums for the dispatch's ask", "SHAPE=11 N=2 TIMEOUTS=1 PAIRS MUTANT_ANY_ASK", "mutant"),
    ht_net("mutant, sums of any tag", "SHAPE=11 N=2 TIMEOUTS=1 PAIRS MUTANT_ANY_SUM", "mutant"),
    ht_net("mutant, waits do not look at from", "SHAPE=11 N=1 LEAVES PAIRS MUTANT_BLIND", "mutant"),
    ht_net("mutant, rows are awaited as their source is", "SHAPE=12 N=1 SKIPPED MUTANT_AWAITS_SOURCE", "mutant"),
    ht_net("mutant, a closed op is written to", "SHAPE=12 N=1 TIMEOUTS=1 SKIPPED MUTANT_NO_GATE", "hunted"),
    ht_net("mutant, late gates are not awaited", "SHAPE=12 N=1 TIMEOUTS=1 SKIPPED MUTANT_NO_DRAIN", "mutant"),
    ht_net("mutant, gates are not announced", "SHAPE=12 N=1 TIMEOUTS=1 SKIPPED MUTANT_NOT_ANNOUNCED", "mutant"),
    ht_net("mutant, each finds out who is the gate", "SHAPE=12 N=1 ONE_WAY LEAVES VICTIM=1 SKIPPED MUTANT_OWN_GATE", "hunted"),
    ht_net("mutant, one box for a gate and its stand-in", "SHAPE=12 N=2 ONE_WAY LEAVES VICTIM=1 SKIPPED MUTANT_ONE_BOX_OUT",
           "hunted"),
    ht_net("mutant, the one after the next does not stand in", "SHAPE=13 N=1 ONE_WAY AWAY=6 SKIPPED MUTANT_TWO_WAYS",
           "mutant"),
    ht_net("mutant, partials over those of another gate", "SHAPE=13 N=2 ONE_WAY JOINS VICTIM=1 INTERLEAVED "
           "MUTANT_PARTIALS_AT_ONCE", "hunted"),

    join("2 nodes, a hold ends", "NODES=2 M=3 JOINS EXPIRES=2"),
    join("2 nodes, both join", "NODES=2 M=3 TWO_JOIN EXPIRES=1"),
    join("2 nodes, one is killed and joins", "NODES=2 M=3 KILLED EXPIRES=1"),
    join("3 nodes, one joins", "NODES=3 M=3 JOINS EXPIRES=1"),
    join("3 nodes, two join", "NODES=3 M=2 TWO_JOIN EXPIRES=1"),
    join("3 nodes, one is killed and joins", "NODES=3 M=2 KILLED"),
    join("3 nodes, one dies", "NODES=3 M=2 CRASHES"),
    join("mutant, nobody holds", "NODES=2 M=3 JOINS MUTANT_NOBODY_HOLDS", "mutant"),
    join("mutant, its own node is asked last", "NODES=2 M=3 JOINS MUTANT_OTHERS_FIRST", "mutant"),
    join("mutant, who fails tells nobody", "NODES=3 M=2 JOINS EXPIRES=1 MUTANT_FAILED_AND_SILENT", "mutant"),
    join("mutant, leaves of any life", "NODES=2 M=3 KILLED MUTANT_LEAVES_OF_ANY_LIFE", "mutant"),
    join("mutant, the dead are heard", "NODES=2 M=3 CRASHES MUTANT_HEARS_THE_DEAD", "mutant"),

    epoch("2 members, 3 leaders", "MEMBERS=2 LEADERS=3"),
    epoch("2 members, 2 leaders, two changes", "MEMBERS=2 LEADERS=2 CHANGES=2"),
    epoch("2 members, 3 leaders, a member crashes", "MEMBERS=2 LEADERS=3 CRASHES=1"),
    epoch("2 members that refuse, crash and forget", "MEMBERS=2 LEADERS=2 CRASHES=2 FORGETS=1 REFUSES"),
    epoch("3 members, two changes, a member crashes", "MEMBERS=3 LEADERS=2 CRASHES=1 CHANGES=2"),
    epoch("2 servers, leaders that plan otherwise, messages lost", "MEMBERS=2 LEADERS=3 OMITS LOSES"),
    epoch("3 servers, leaders that plan otherwise, one crashes", "MEMBERS=3 LEADERS=2 OMITS LOSES CRASHES=1"),
    epoch("mutant, a part of another term is taken", "MEMBERS=2 LEADERS=2 OMITS LOSES MUTANT_ANY_TERM", "mutant"),
    epoch("mutant, who hears late drops what is next", "MEMBERS=2 LEADERS=3 OMITS LOSES MUTANT_DROPS_THE_NEXT", "mutant"),
    epoch("mutant, old terms are heard", "MEMBERS=2 LEADERS=2 MUTANT_NO_FENCE", "mutant"),
    epoch("mutant, commits are not guarded", "MEMBERS=2 LEADERS=2 MUTANT_NO_GUARD", "mutant"),
    epoch("mutant, what is committed is aborted", "MEMBERS=2 LEADERS=2 MUTANT_ABORTS_ALL", "mutant"),
    epoch("mutant, a prepare says nothing of the store", "MEMBERS=2 LEADERS=2 MUTANT_DEAF CHANGES=2", "mutant"),
    epoch("mutant, nothing is cleared", "MEMBERS=2 LEADERS=2 MUTANT_NOTHING_CLEARED", "mutant"),

    turn("2 ranks, 2 leaders", "M=2 LEADERS=2"),
    turn("2 ranks, 2 leaders, no answer to a commit", "M=1 LEADERS=2 UNKNOWN=1"),
    turn("2 ranks, 2 leaders, one joins", "M=1 LEADERS=2 JOINS"),
    turn("2 ranks, 2 leaders, one is killed", "M=1 LEADERS=2 KILLED"),
    turn("2 ranks, late requests", "M=2 LEADERS=1 ASKS=2 LATE=1"),
    turn("2 ranks, late requests, one joins", "M=2 LEADERS=1 ASKS=2 LATE=1 JOINS"),
    turn("2 ranks, a later epoch", "M=2 LEADERS=1 ASKS=2 CHANGES"),
    turn("2 ranks, a later epoch, no answer to a commit", "M=1 LEADERS=1 CHANGES UNKNOWN=1"),
    turn("2 ranks, a boundary at every other op, one joins", "M=4 LEADERS=1 SPARSE JOINS"),
    turn("3 ranks, one joins", "SERVERS=3 M=2 LEADERS=1 JOINS"),
    turn("3 ranks, 2 leaders", "SERVERS=3 M=1 LEADERS=2"),
    turn("2 ranks, the end, one leaves early", "M=2 LEADERS=1 ENDS LEAVES_EARLY"),
    turn("2 ranks, the end, one is killed", "M=2 LEADERS=1 ENDS KILLED"),
    turn("3 ranks, the end", "SERVERS=3 M=1 LEADERS=1 ENDS"),
    turn("mutant, what is passed is promised", "LEADERS=1 MUTANT_PROMISES_WHAT_IT_PASSED", "mutant"),
    turn("mutant, who has promised does not wait", "LEADERS=1 MUTANT_DOES_NOT_WAIT", "mutant"),
    turn("mutant, old terms are heard", "LEADERS=2 MUTANT_NO_FENCE", "mutant"),
    turn("mutant, requests have no numbers", "LEADERS=1 ASKS=2 LATE=1 MUTANT_NO_NUMBERS", "mutant"),
    turn("mutant, a commit of any term", "LEADERS=2 MUTANT_NO_TERM", "mutant"),
    turn("mutant, a commit over any record", "LEADERS=1 CHANGES MUTANT_NO_REVISION", "mutant"),
    turn("mutant, a leader's view is older than its lead", "LEADERS=2 MUTANT_OLD_VIEW", "mutant"),
    turn("mutant, a new leader withdraws nothing", "LEADERS=2 MUTANT_WITHDRAWS_NOTHING", "mutant"),
    turn("mutant, told before it is stored", "LEADERS=1 MUTANT_TELLS_FIRST", "mutant"),
    turn("mutant, withdraws what may be stored", "LEADERS=1 UNKNOWN=1 MUTANT_WITHDRAWS_BLINDLY", "mutant"),
    turn("mutant, looks whether it is stored", "LEADERS=1 UNKNOWN=1 MUTANT_LOOKS_INSTEAD_OF_WRITING", "mutant"),
    turn("mutant, a change of what was there before", "LEADERS=1 CHANGES MUTANT_BUILT_BEFORE", "mutant"),
    turn("mutant, a change forgets the turn", "LEADERS=1 CHANGES MUTANT_FORGETS_THE_TURN", "mutant"),
    turn("mutant, not said where to", "LEADERS=1 CHANGES MUTANT_NOT_SAID_WHERE_TO", "mutant"),
    turn("mutant, who has promised lets one join", "LEADERS=1 JOINS MUTANT_JOINS_AT_ANY_TIME", "mutant"),
    turn("mutant, one joins before its boundary", "LEADERS=1 JOINS MUTANT_JOINS_BEFORE_THE_BOUNDARY", "mutant"),
    turn("mutant, who has no worker is not asked", "LEADERS=1 JOINS MUTANT_ASKS_ATTACHED_ONLY", "mutant"),
    turn("mutant, who is done is masked", "LEADERS=1 ENDS MUTANT_DONE_IS_MASKED", "mutant"),
    turn("mutant, whoever leaves is done", "LEADERS=1 ENDS LEAVES_EARLY MUTANT_ANY_BYE_IS_DONE", "mutant"),
    turn("mutant, given back when its own are done", "LEADERS=1 ENDS MUTANT_ONLY_ITS_OWN_IS_DONE", "mutant"),

    mailbox("streams wait", "OPS=3"),
    mailbox("its kernel waits", "OPS=3 SPINS"),
    mailbox("a warp polls", "OPS=3 SPINS POLLS", large=True),
    mailbox("a warp polls, 3 blocks", "OPS=1 SPINS POLLS BLOCKS=3", large=True),
    mailbox("a warp polls, the stream waits for the end", "OPS=2 POLLS", large=True),
    mailbox("the serve ends at any time", "OPS=2 CLOSES"),
    mailbox("a warp polls, the serve ends at any time", "OPS=2 SPINS POLLS CLOSES", large=True),
    mailbox("a worker that writes what it likes", "OPS=3 HOSTILE", large=True),
    mailbox("a warp polls, a worker that writes what it likes", "OPS=3 SPINS POLLS HOSTILE", large=True),
    mailbox("mutant, rings before the op is there", "OPS=2 MUTANT_RINGS_FIRST", "mutant"),
    mailbox("mutant, the first block tells", "OPS=1 MUTANT_FIRST_BLOCK_TELLS", "mutant"),
    mailbox("mutant, any entry has taken it", "OPS=3 MUTANT_TAKEN_BY_ANY", "mutant"),
    mailbox("mutant, the bell is answered late", "OPS=2 SPINS MUTANT_ANSWERS_LATE", "mutant"),
    mailbox("mutant, the bell is answered after the arrival", "OPS=2 SPINS MUTANT_ANSWERS_WHEN_IT_HAS_ARRIVED", "mutant"),
    mailbox("mutant, who leaves it does not count", "OPS=3 HOSTILE MUTANT_WHO_LEAVES_IT_DOES_NOT_COUNT", "mutant"),
    mailbox("mutant, what any entry has found", "OPS=2 SPINS POLLS MUTANT_FOUND_BY_ANY", "mutant"),
    mailbox("mutant, each block looks where a warp polls", "OPS=2 SPINS POLLS MUTANT_EACH_BLOCK_LOOKS", "mutant"),
    mailbox("mutant, compares before it hears of the op", "OPS=2 SPINS POLLS MUTANT_COMPARES_FIRST", "mutant"),
    mailbox("mutant, does not wait for the op ahead", "OPS=2 SPINS POLLS MUTANT_POLLS_AT_ONCE", "mutant"),
    mailbox("mutant, announced while blocks may take the op ahead", "OPS=2 SPINS MUTANT_ANNOUNCES_AT_ONCE", "mutant"),
    mailbox("mutant, over before the stream is told", "OPS=2 POLLS MUTANT_IS_OVER_BEFORE_IT_TELLS", "mutant"),
    mailbox("mutant, the server's ring is taken for the worker's",
            "OPS=1 SPINS POLLS CLOSES MUTANT_RINGS_OUT_AS_THE_WORKER", "mutant"),
]


class Failed(Exception):
    """The program could not be made or run; the text says why."""


def make(case, folder):
    """Makes the program that searches."""
    search = ["-DBITSTATE", "-DT_RAND", "-DP_RAND"] if case.kind in ("sampled", "hunted") else ["-DCOLLAPSE"]
    compiler = ["gcc", "-O1"] if case.large or case.kind == "sampled" else ["tcc"]
    model = os.path.join(MODELS, case.model + ".pml")
    for command in (["spin", "-a", *("-D" + macro for macro in case.macros.split()), model],
                    [*compiler, "-w", "-DSAFETY", "-DVECTORSZ=2048", "-DMEMLIM=%d" % MEMORY_MB, *search,
                     "-o", "pan", "pan.c"]):
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise Failed("%s: %s" % (command[0], (made.stdout + made.stderr).strip().splitlines()[-1:]))


def core_seconds(pid):
    """What the process has had of the cores so far: its CPU clock, by the number that clock_getcpuclockid(3) gives it."""
    return time.clock_gettime(~pid << 3 | 2)


def output_within(pan, seconds):
    """What it says, when it ends before it has had so much of a core.  None when not."""
    while core_seconds(pan.pid) < seconds:
        try:
            return pan.communicate(timeout=LOOK_S)[0]
        except subprocess.TimeoutExpired:
            continue
    return None


def search(case, folder, seed=1):
    """What the program says at its end.  A sample ends when its time is over."""
    flags = ["-m%d" % DEPTH, "-n"]
    if case.kind in ("sampled", "hunted"):
        flags += ["-w%d" % SAMPLE_BITS, "-RS%d" % seed]
    with subprocess.Popen(["./pan", *flags], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as pan:
        said = output_within(pan, {"sampled": SAMPLE_S, "hunted": HUNT_S}.get(case.kind, SEARCH_S))
        if said is not None:
            return said
        if case.kind not in ("sampled", "hunted"):
            pan.kill()
            raise Failed("did not end within %d s of a core" % SEARCH_S)
        pan.send_signal(signal.SIGINT)
        return pan.communicate()[0]


def judge(case, out):
    """Is that as it should be?  And what is there to say?"""
    errors = re.search(r"depth reached (\d+), errors: (\d+)", out)
    states = re.search(r"(\d+) states, stored", out)
    seconds = re.search(r"elapsed time ([\d.]+)", out)
    why = re.search(r"^pan:1: (.*) \(at depth", out, re.M)
    if not errors or not states:
        return False, (out.strip().splitlines() or ["pan said nothing"])[-1]
    said = "%s states, depth %s, %s s" % (states[1], errors[1], seconds[1] if seconds else "0")
    if case.kind in ("mutant", "hunted"):
        return bool(why), said + (", caught by " + why[1][:60] if why else ", not caught")
    if errors[2] != "0":
        return False, said + ", " + (why[1] if why else errors[2] + " errors")
    if case.kind == "sampled":
        return True, said + ", sampled"
    complete = "Search not completed" not in out and "max search depth too small" not in out
    return complete, said + (", in full" if complete else ", not completed")


def check(case):
    folder = tempfile.mkdtemp(prefix="model-")
    try:
        make(case, folder)
        for seed in range(1, HUNTS + 1):
            good, said = judge(case, search(case, folder, seed))
            if good or case.kind != "hunted":
                break
        return good, said
    except Failed as failed:
        return False, str(failed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    if not all(map(shutil.which, ("spin", "gcc", "tcc"))):
        print("spin, gcc and tcc are needed: deploy/setup.sh --tests")
        sys.exit(SKIPPED)
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    cases = [case for case in CASES if wanted in case.name]
    passed = 0
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        for case, (good, said) in zip(cases, pool.map(check, cases)):
            passed += good
            print("%-4s %s: %s" % ("ok" if good else "FAIL", case.name, said), flush=True)
    print("%d passed, %d failed" % (passed, len(cases) - passed))
    sys.exit(0 if cases and passed == len(cases) else 1)


if __name__ == "__main__":
    main()
