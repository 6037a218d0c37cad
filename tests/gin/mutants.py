"""Does gin_conformance find what it is for?

The reference plugin (reference.c) can break one rule at a time; for each rule the case that must fail is named here.
A line per rule, `N passed, N failed` at the end. Usage: mutants.py FOLDER, where program and plugin are.
"""
import concurrent.futures
import os
import subprocess
import sys
import textwrap

SOUND_S, BROKEN_S = 60, 5  # of a case: one that passes has all the time that a busy machine takes, one that hangs is found
LIMIT_S = 90
AT_ONCE = 4    # most of what takes time waits

# Rule that is broken: a part of the case's name, arguments.
MUTANTS = {
    "a handle is too long": ("the tables are", []),
    "a signal alone is dropped": ("a signal alone", []),
    "additions are increments": ("incremented and added", []),
    "signals are 32 bits": ("incremented and added", []),
    "the signal comes before its data": ("data is there", []),
    "a put comes after a later signal": ("data is there", []),
    "one byte too many": ("data is there", []),
    "puts to oneself are lost": ("puts to oneself", []),
    "offsets are 32 bits": ("beyond 4 GiB", []),
    "progress is needed": ("without progress", ["--table", "rma-v14"]),
    "registration is not collective": ("regions of different", []),
    "numbers of regions are reused": ("regions of different", []),
    "only one context works": ("several contexts", ["--table", "rma-v14"]),
    "connect needs its context": ("several communicators", []),
    "queues are short": ("full queues", []),
    "requests may be missing": ("full queues", []),
    "a request is forgotten": ("full queues", []),
    "done before it is read": ("written again", []),
    "no range check": ("not inside", []),
    "one slow peer holds all up": ("stopped for a while", []),
    "puts to the dead are never done": ("a rank is killed", []),
    "errors for the dead": ("a rank is killed", []),
    "one dead peer kills all": ("a rank is killed", []),
    "one error is everybody's": ("a rank is killed", []),
    "strangers are let in": ("strangers", []),
    "strangers are waited for": ("strangers", []),
    "connect waits for ever": ("never connects", []),
    "memory is touched when it is gone": ("a signal alone", []),
    "descriptors leak": ("50 communicators", []),
    "threads leak": ("50 communicators", []),
    "mappings leak": ("50 communicators", []),
}


def run(folder, rule, seconds, case, arguments):
    """The program's exit code and what it said; with the rule "" nothing is broken."""
    command = [os.path.join(folder, "gin_conformance"), "--plugin", os.path.join(folder, "libgin_reference.so"),
               "--seconds", str(seconds), "--filter", case, *arguments]
    done = subprocess.run(command, env={**os.environ, "GIN_REFERENCE_WRONG": rule}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stdout


def try_mutant(folder, rule, case, arguments):
    """What went wrong, as a text; "" when the case passes as it is and fails without the rule."""
    code, output = run(folder, "", SOUND_S, case, arguments)
    if code != 0:
        return "fails without it:\n" + output
    code, output = run(folder, rule, BROKEN_S, case, arguments)
    return "" if code == 1 else "was not found, the program ended with %d:\n%s" % (code, output)


def main():
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        running = {rule: pool.submit(try_mutant, sys.argv[1], rule, *mutant) for rule, mutant in MUTANTS.items()}
        for rule, future in running.items():
            problem = future.result()
            failed += bool(problem)
            print("FAIL %s: %s" % (rule, textwrap.indent(problem, "  ")) if problem else "ok   %s" % rule, flush=True)
    print("%d passed, %d failed" % (len(MUTANTS) - failed, failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
