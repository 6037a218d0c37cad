"""Runs the unittest cases of one file and writes one JSON line per case.

    python3 run_unittest.py FILE RESULTS TIMEOUT_S [PATTERN]

A line: {"name": "Class.test", "outcome": "passed|failed|skipped", "seconds": 1.2, "output": "..."}.
The line {"started": "Class.test"} goes before it, so that whoever reads the file knows which case was
running when the process was killed.  A case that runs longer than TIMEOUT_S ends the process.
"""
import faulthandler
import importlib.util
import json
import os
import sys
import time
import unittest


class Recorder(unittest.TestResult):
    """Keeps the worst outcome of each case; sub-tests count for the case they are in."""

    def __init__(self, results, timeout_s):
        super().__init__()
        self.buffer = True
        self.results = results
        self.timeout_s = timeout_s
        self.outcome, self.output, self.began = "passed", "", 0.0

    def write(self, **line):
        self.results.write(json.dumps(line) + "\n")
        self.results.flush()

    def startTest(self, test):
        super().startTest(test)
        faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=sys.__stderr__)
        self.outcome, self.output, self.began = "passed", "", time.monotonic()
        self.write(started=name_of(test))

    def stopTest(self, test):
        faulthandler.cancel_dump_traceback_later()
        if self.outcome == "failed":
            self.output += sys.stdout.getvalue() + sys.stderr.getvalue()  # what cleanups wrote too
        super().stopTest(test)
        self.write(name=name_of(test), outcome=self.outcome, output=self.output,
                   seconds=round(time.monotonic() - self.began, 3))

    def fail(self, test, err):
        self.outcome = "failed"
        self.buffer = False  # else the text has what was captured in it, and stopTest adds that
        self.output += self._exc_info_to_string(err, test) + "\n"
        self.buffer = True
        if not isinstance(test, unittest.TestCase):  # setUpClass or setUpModule: no case was started
            self.write(name=str(test), outcome="failed", output=self.output, seconds=0)

    def addError(self, test, err):
        self.fail(test, err)

    def addFailure(self, test, err):
        self.fail(test, err)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.output += "%s\n" % subtest
            self.fail(test, err)

    def addSkip(self, test, reason):
        if not isinstance(test, unittest.TestCase):
            self.write(name=str(test), outcome="skipped", output=reason, seconds=0)
        elif self.outcome == "passed":
            self.outcome, self.output = "skipped", reason

    def addExpectedFailure(self, test, err):
        pass

    def addUnexpectedSuccess(self, test):
        self.outcome, self.output = "failed", "passed, though it is marked as an expected failure\n"


def name_of(test):
    return "%s.%s" % (type(test).__name__, getattr(test, "_testMethodName", "?"))


def cases(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test


def main():
    path, results, timeout_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    pattern = sys.argv[4] if len(sys.argv) > 4 else ""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    chosen = unittest.TestSuite(t for t in cases(suite) if pattern in "%s.%s" % (name, name_of(t)))
    with open(results, "w", encoding="utf-8") as out:
        recorder = Recorder(out, timeout_s)
        chosen.run(recorder)
        recorder.write(finished=True)


if __name__ == "__main__":
    main()
