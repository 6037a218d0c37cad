"""Checks the model of the LL protocol (ll.pml) with spin: every case in full, and that each mutant is caught.

    python3 tests/model/run.py [NAME]     only the cases with NAME in their name

A case is a set of macros; ll.pml says what they mean.  What spin and gcc make lies below TMPDIR and goes with it.
"""
import concurrent.futures
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile

MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ll.pml")
JOBS = len(os.sched_getaffinity(0))
MEMORY_MB = 2000  # of one search
DEPTH = 100000    # steps
SEARCH_S = 300
SKIPPED = 77


@dataclasses.dataclass
class Case:
    name: str
    macros: str
    caught: bool = False  # there must be a counterexample


SCRIPTS = ("PAIRS", "INTERLEAVED", "SPLIT", "SKIPPED", "REPLACED")

CASES = [
    *(Case("2 ranks: " + script, "R=2 N=6 " + script) for script in SCRIPTS),
    *(Case("2 ranks, sparse: " + script, "R=2 N=6 SPARSE " + script) for script in SCRIPTS),
    Case("2 ranks: all choices", "R=2 N=4 MIXED"),
    Case("3 ranks: PAIRS", "R=3 N=3 PAIRS"),
    Case("3 ranks: INTERLEAVED", "R=3 N=4 INTERLEAVED"),
    Case("3 ranks: SPLIT", "R=3 N=2 SPLIT"),
    Case("3 ranks: SKIPPED", "R=3 N=4 SKIPPED"),
    Case("3 ranks, sparse: REPLACED", "R=3 N=4 SPARSE REPLACED"),
    Case("2 ranks, one is killed: PAIRS", "R=2 N=3 LEAVES PAIRS"),
    Case("2 ranks, the first is killed: PAIRS", "R=2 N=2 LEAVES VICTIM=0 PAIRS"),
    Case("2 ranks, one is killed: INTERLEAVED", "R=2 N=4 LEAVES INTERLEAVED"),
    Case("2 ranks, one is killed: SPLIT", "R=2 N=2 LEAVES SPLIT"),
    Case("2 ranks, one is killed: SKIPPED", "R=2 N=4 LEAVES SKIPPED"),
    Case("2 ranks, one leaves: PAIRS", "R=2 N=2 LEAVES LIVES_ON PAIRS"),
    Case("2 ranks, one leaves: SKIPPED", "R=2 N=3 LEAVES LIVES_ON SKIPPED"),
    *(Case("2 ranks, one joins: " + script, "R=2 N=4 JOINS " + script)
      for script in ("PAIRS", "INTERLEAVED", "SKIPPED", "REPLACED")),
    Case("2 ranks, one is killed and comes back: REPLACED", "R=2 N=2 LEAVES JOINS REPLACED"),
    Case("3 ranks, one is killed: SKIPPED", "R=3 N=1 LEAVES SKIPPED"),
    Case("3 ranks, one joins: SKIPPED", "R=3 N=2 JOINS SKIPPED"),
    Case("2 ranks, a timeout: PAIRS", "R=2 N=3 TIMEOUTS=1 PAIRS"),
    Case("2 ranks, two timeouts: SKIPPED", "R=2 N=4 TIMEOUTS=2 SKIPPED"),
    Case("kernels as they are, one is killed", "R=2 N=3 LEAVES PAIRS MUTANT_OWN_VIEW ONLY_MEMORY"),
    Case("kernels as they are, one joins", "R=2 N=4 JOINS PAIRS MUTANT_OWN_VIEW ONLY_MEMORY"),

    Case("mutant: blocks keep their own view, one is killed", "N=2 LEAVES PAIRS MUTANT_OWN_VIEW", caught=True),
    Case("mutant: blocks keep their own view, one joins", "N=3 JOINS PAIRS MUTANT_OWN_VIEW", caught=True),
    Case("mutant: credit before the combine has read", "N=3 PAIRS MUTANT_CREDIT_EARLY", caught=True),
    Case("mutant: no credit without a combine", "N=4 SKIPPED MUTANT_NO_CREDIT_ON_SKIP", caught=True),
    Case("mutant: nobody waits for credit", "N=4 SKIPPED MUTANT_NO_CREDIT_WAIT", caught=True),
    Case("mutant: one bank", "N=4 INTERLEAVED MUTANT_ONE_BANK", caught=True),
    Case("mutant: header before its row", "N=2 PAIRS MUTANT_HEADER_FIRST", caught=True),
    Case("mutant: partial announced before it is there", "N=2 PAIRS MUTANT_PARTIAL_FIRST", caught=True),
    Case("mutant: counts of any number", "N=3 PAIRS MUTANT_STALE_COUNTS", caught=True),
    Case("mutant: waits do not look at from", "N=2 LEAVES PAIRS MUTANT_BLIND", caught=True),
    Case("mutant: from is not read again", "N=3 JOINS PAIRS MUTANT_NO_REREAD", caught=True),
    Case("mutant: the server does not raise from", "N=3 JOINS PAIRS MUTANT_NO_RAISE", caught=True),
]


def fail(text):
    return False, text.strip().splitlines()[-1] if text.strip() else "said nothing"


def search(case, folder):
    """Builds and runs the search.  Returns whether it was complete or caught something, and what to say."""
    def run(*command):
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=SEARCH_S)

    made = run("spin", "-a", *("-D" + macro for macro in case.macros.split()), MODEL)
    if made.returncode != 0:
        return fail(made.stdout + made.stderr)
    made = run("gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=2048", "-DMEMLIM=%d" % MEMORY_MB,
               "-o", "pan", "pan.c")
    if made.returncode != 0:
        return fail(made.stdout + made.stderr)
    flags = ["-E"] if "TIMEOUTS" in case.macros else []  # ends of another kind are no errors then
    out = run("./pan", "-m%d" % DEPTH, "-n", *flags).stdout
    return judge(case, out)


def judge(case, out):
    errors = re.search(r"depth reached (\d+), errors: (\d+)", out)
    states = re.search(r"(\d+) states, stored", out)
    seconds = re.search(r"elapsed time ([\d.]+)", out)
    memory = re.search(r"([\d.]+)\s+total actual memory", out)
    why = re.search(r"^pan:1: (.*) \(at depth", out, re.M)
    if not errors or not states:
        return fail(out)
    said = "%9s states, depth %6s, %5s s, %4.0f MB" % (states[1], errors[1], seconds[1] if seconds else "0",
                                                      float(memory[1]) if memory else 0)
    if case.caught:
        return bool(why), said + (": caught, " + why[1][:60] if why else ": not caught")
    complete = errors[2] == "0" and "Search not completed" not in out and "max search depth too small" not in out
    return complete, said + ("" if complete else ": " + (why[1] if why else "not completed"))


def check(case):
    folder = tempfile.mkdtemp(prefix="ll-model-")
    try:
        return search(case, folder)
    except subprocess.TimeoutExpired:
        return False, "did not end within %d s" % SEARCH_S
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
            print("%-7s %-44s %s" % ("ok" if good else "FAILED", case.name, said), flush=True)
    print("%d passed, %d failed" % (passed, len(cases) - passed))
    sys.exit(0 if cases and passed == len(cases) else 1)


if __name__ == "__main__":
    main()
