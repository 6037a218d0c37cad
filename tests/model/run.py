"""Checks the model of the LL protocol (ll.pml) with spin, and that each mutant of it is caught.

    python3 tests/model/run.py [NAME]     only the cases with NAME in their name

A case is a set of macros; ll.pml says what they mean.  Three kinds:

  in full   Every state that can be reached is looked at, so there is no counterexample with so many ranks and ops.
            They are small: 2 ranks with 2 to 6 dispatches, 3 ranks with 3 and no combine.
  sampled   What is larger: 3 ranks that combine, or of which one leaves or joins; ops in halves, or a rank that comes
            back, where one is killed.  SAMPLE_S seconds of a search in random order, in which a state counts as seen
            when its hash was (spin's bitstate search).  That finds mistakes and proves nothing.
  mutant    The protocol with a mistake in it.  The search must find a counterexample.

It takes about two minutes on two idle cores.  A line per case, `ok` or `FAIL`, and `N passed, N failed`; 77 where
spin or gcc is missing.  What they make lies below TMPDIR and goes with it.
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

MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ll.pml")
JOBS = len(os.sched_getaffinity(0))
MEMORY_MB = 2000  # of one search
DEPTH = 100000    # steps
SEARCH_S = 400    # a full search has failed then
SAMPLE_S = 6
SAMPLE_BITS = 30  # log2 of the bits that hashes are kept in
SKIPPED = 77


@dataclasses.dataclass
class Case:
    name: str
    macros: str
    kind: str = "in full"
    gcc: str = "-Og"  # more costs more time than it saves


def small(name, macros):
    return Case(name, macros, gcc="-O0")


def sampled(name, macros):
    return Case(name, macros, "sampled")


def mutant(name, macros):
    return Case("mutant, " + name, macros, "mutant", "-O0")


SCRIPTS = ("PAIRS", "INTERLEAVED", "SPLIT", "SKIPPED", "REPLACED")

CASES = [
    *(small("2 ranks, " + script, "R=2 N=6 " + script) for script in SCRIPTS),
    *(small("2 ranks, sparse, " + script, "R=2 N=6 SPARSE " + script) for script in SCRIPTS),
    Case("2 ranks, all choices", "R=2 N=4 MIXED"),
    Case("3 ranks, SKIPPED", "R=3 N=3 SKIPPED"),
    Case("3 ranks, sparse, REPLACED", "R=3 N=3 SPARSE REPLACED"),
    Case("2 ranks, one is killed, PAIRS", "R=2 N=3 LEAVES PAIRS"),
    Case("2 ranks, the first is killed, PAIRS", "R=2 N=2 LEAVES VICTIM=0 PAIRS"),
    Case("2 ranks, one is killed, SKIPPED", "R=2 N=3 LEAVES SKIPPED"),
    Case("2 ranks, one leaves and lives on, SKIPPED", "R=2 N=3 LEAVES LIVES_ON SKIPPED"),
    Case("2 ranks, one joins, PAIRS", "R=2 N=4 JOINS PAIRS"),
    Case("2 ranks, one joins, INTERLEAVED", "R=2 N=4 JOINS INTERLEAVED"),
    Case("2 ranks, one joins, REPLACED", "R=2 N=3 JOINS REPLACED"),
    small("2 ranks, a timeout, PAIRS", "R=2 N=3 TIMEOUTS=1 PAIRS"),
    small("2 ranks, a timeout, INTERLEAVED", "R=2 N=4 TIMEOUTS=1 INTERLEAVED"),
    small("2 ranks, two timeouts, SKIPPED", "R=2 N=4 TIMEOUTS=2 SKIPPED"),

    sampled("2 ranks, one is killed, INTERLEAVED", "R=2 N=4 LEAVES INTERLEAVED"),
    sampled("2 ranks, one is killed, SPLIT", "R=2 N=4 LEAVES SPLIT"),
    sampled("2 ranks, one leaves and lives on, PAIRS", "R=2 N=3 LEAVES LIVES_ON PAIRS"),
    sampled("2 ranks, one is killed and comes back, REPLACED", "R=2 N=4 LEAVES JOINS REPLACED"),
    sampled("3 ranks, PAIRS", "R=3 N=4 PAIRS"),
    sampled("3 ranks, SPLIT", "R=3 N=4 SPLIT"),
    sampled("3 ranks, one is killed, PAIRS", "R=3 N=2 LEAVES PAIRS"),
    sampled("3 ranks, one leaves and lives on, SKIPPED", "R=3 N=3 LEAVES LIVES_ON SKIPPED"),
    sampled("3 ranks, one joins, INTERLEAVED", "R=3 N=4 JOINS INTERLEAVED"),

    mutant("blocks of a dispatch keep their own view", "N=2 LEAVES PAIRS MUTANT_OWN_VIEW"),
    mutant("blocks of a combine keep their own view, one joins", "N=3 JOINS PAIRS MUTANT_OWN_VIEW_COMBINE"),
    mutant("blocks of a combine keep their own view", "N=2 LEAVES PAIRS MUTANT_OWN_VIEW_COMBINE"),
    mutant("who takes part no more owes no credit", "N=3 LEAVES LIVES_ON SKIPPED MUTANT_ABSENT_OWES_NOTHING"),
    mutant("credit before the combine has read", "N=3 PAIRS MUTANT_CREDIT_EARLY"),
    mutant("no credit without a combine", "N=4 SKIPPED MUTANT_NO_CREDIT_ON_SKIP"),
    mutant("nobody waits for credit", "N=4 SKIPPED MUTANT_NO_CREDIT_WAIT"),
    mutant("one bank", "N=4 INTERLEAVED MUTANT_ONE_BANK"),
    mutant("header before its row", "N=2 PAIRS MUTANT_HEADER_FIRST"),
    mutant("partial announced before it is there", "N=2 PAIRS MUTANT_PARTIAL_FIRST"),
    mutant("counts of any number", "N=3 PAIRS MUTANT_STALE_COUNTS"),
    mutant("waits do not look at from", "N=2 LEAVES PAIRS MUTANT_BLIND"),
    mutant("from is not read again", "N=3 JOINS PAIRS MUTANT_NO_REREAD"),
    mutant("the server does not raise from", "N=3 JOINS PAIRS MUTANT_NO_RAISE"),
]


class Failed(Exception):
    """The program could not be made or run; the text says why."""


def make(case, folder):
    """Makes the program that searches."""
    search = ["-DBITSTATE", "-DT_RAND", "-DP_RAND"] if case.kind == "sampled" else ["-DCOLLAPSE"]
    for command in (["spin", "-a", *("-D" + macro for macro in case.macros.split()), MODEL],
                    ["gcc", case.gcc, "-w", "-DSAFETY", "-DVECTORSZ=2048", "-DMEMLIM=%d" % MEMORY_MB, *search,
                     "-o", "pan", "pan.c"]):
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise Failed("%s: %s" % (command[0], (made.stdout + made.stderr).strip().splitlines()[-1:]))


def search(case, folder):
    """What the program says at its end.  A sample ends when its time is over."""
    flags = ["-m%d" % DEPTH, "-n"]
    if "TIMEOUTS" in case.macros:
        flags.append("-E")  # ends of another kind are no errors then
    if case.kind == "sampled":
        flags += ["-w%d" % SAMPLE_BITS, "-RS1"]
    with subprocess.Popen(["./pan", *flags], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as pan:
        try:
            return pan.communicate(timeout=SAMPLE_S if case.kind == "sampled" else SEARCH_S)[0]
        except subprocess.TimeoutExpired:
            if case.kind != "sampled":
                pan.kill()
                raise Failed("did not end within %d s" % SEARCH_S) from None
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
    if case.kind == "mutant":
        return bool(why), said + (", caught by " + why[1][:60] if why else ", not caught")
    if errors[2] != "0":
        return False, said + ", " + (why[1] if why else errors[2] + " errors")
    if case.kind == "sampled":
        return True, said + ", sampled"
    complete = "Search not completed" not in out and "max search depth too small" not in out
    return complete, said + (", in full" if complete else ", not completed")


def check(case):
    folder = tempfile.mkdtemp(prefix="ll-model-")
    try:
        make(case, folder)
        return judge(case, search(case, folder))
    except Failed as failed:
        return False, str(failed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    if not shutil.which("spin") or not shutil.which("gcc"):
        print("spin and gcc are needed: deploy/setup.sh --tests")
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
