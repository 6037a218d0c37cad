"""A server's whole life under valgrind: start, group, attach, ops, a dead worker, detach, stop; and a client's."""
import os
import shutil
import sys
import unittest

import harness

ERROR = 97  # exit code of a program that valgrind complains about
VALGRIND = [shutil.which("valgrind") or "valgrind", "--quiet", "--error-exitcode=%d" % ERROR, "--leak-check=full",
            "--show-leak-kinds=definite,indirect", "--errors-for-leak-kinds=definite,indirect", "--track-fds=no",
            "--child-silent-after-fork=yes"]
SUPPRESSIONS = os.path.join(harness.ROOT, "tests", "valgrind.supp")
if os.path.exists(SUPPRESSIONS):
    VALGRIND.append("--suppressions=" + SUPPRESSIONS)
GROUP = ["--ranks=2", "--experts=4", "--hidden=256", "--top-k=2", "--ll-max-tokens=8", "--ht-max-tokens=16"]


@unittest.skipUnless(shutil.which("valgrind"), "valgrind is not installed")
class Valgrind(harness.TestCase):
    def start(self, *wrapper):
        self.server = self.start_server("--host-ranks=2", wrapper=wrapper, timeout=60)
        made = self.run_cmd(["ep-admin", "group", "create", "g", *GROUP, "--wait=30s", "--timeout=30s"], server=self.server)
        self.assertEqual(made.code, 0, made)

    def test_server(self):
        self.start(*VALGRIND)
        for _ in range(2):
            hello = self.run_cmd(["hello_dispatch", "g"], server=self.server, timeout=120)
            self.assertEqual(hello.code, 0, hello)
        worker = self.spawn(["worker", "--group=g"], server=self.server)
        harness.wait_until(lambda: "attached" in self.phase() or "ATTACHED" in self.phase(), self.phase, 60)
        worker.kill()
        harness.wait_until(lambda: "absent" in self.phase().lower() or "expected" in self.phase().lower(),
                           self.phase, 60)
        deleted = self.run_cmd(["ep-admin", "group", "delete", "g", "--force", "--timeout=30s"], server=self.server)
        self.assertEqual(deleted.code, 0, deleted)
        self.assertEqual(self.server.stop(60), 0, self.server.log())

    def phase(self):
        return self.run_cmd(["ep-admin", "group", "get", "g", "--output=json", "--timeout=30s"], server=self.server).out

    def test_client(self):
        self.start()
        hello = self.run_cmd([*VALGRIND, harness.binary("hello_dispatch"), "g"], server=self.server, timeout=180)
        self.assertEqual(hello.code, 0, hello)


if __name__ == "__main__":
    harness.main()
