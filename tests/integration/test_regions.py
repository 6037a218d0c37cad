"""GPU memory of workers' own under executor server, black box, with the module that computes on CPUs: no GPU is needed.

What it has of GPU memory is shared memory, so a worker of these tests can hand on a memfd, and ring for ops.
"""

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import unittest

import harness
import test_gpus
import worker

OK, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, UNAVAILABLE, TIMEOUT = 0, 1, 2, 5, 8, 13 # in proto/base/ep_status.h
TIMEOUT_MS = 3000
GROUP = test_gpus.GROUP + ["--timeout-ms=%d" % TIMEOUT_MS]
BYTES, TOPK = 1 << 20, 4096
REGIONS, REGION = 64, 1 << 48 # in kernels/window.h
BELL, OP = 320, 576 # in a window; of the mailbox's first op
RECORD = OP + 512 * 288 + 320 # behind all of them, and of the report: of handle 0's dispatch
RUNG, DONE = 2, 1 # ep_bell_of(0), EP_BELL_DONE


def memory(size=BYTES):
    """As GPU memory of a process is there."""
    fd = os.memfd_create("own", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def dispatch(region):
    """An LL dispatch of 4 tokens, bf16, expert-major, with all that it uses in that region."""
    spans = [(0, 0)] * 14
    for i, at, size in ((0, 0, 4 * 64 * 2), (2, TOPK, 4 * 2 * 4), (6, 8192, 2 * 4 * 16 * 64 * 2), (8, 4608, 8)):
        spans[i] = ((region + 1) * REGION + at, size)
    return (struct.pack("=12I", 1, 1, 1, 0, 1, 1, 4, 2, 4, 1, 0, 1)
            + b"".join(struct.pack("=QQ", *span) for span in spans) + bytes(16))


class Worker(test_gpus.Worker):
    """One whose ops the server runs."""

    def __init__(self, path, rank):
        super().__init__(path, rank, test_gpus.SERVER)
        self.asked = 0
        self.window = self.windows[rank]

    def request(self, kind, fds=(), timeout=harness.PATIENCE_S, **fields):
        """The status that the server answers with."""
        self.asked += 1
        self.ask(kind, fds, count=self.asked, **fields)
        answer = self.answer(timeout)
        assert answer and answer.count == self.asked, answer
        return answer

    def register(self, region, fd, value=BYTES, offset=0):
        return self.request(worker.REGISTER, [fd], region=region, value=value, offset=offset).status

    def unregister(self, region, timeout=harness.PATIENCE_S):
        return self.request(worker.UNREGISTER, region=region, timeout=timeout).status

    def ring(self, op):
        self.window[OP:OP + len(op)] = op
        struct.pack_into("=i", self.window, RECORD, -1)
        struct.pack_into("=I", self.window, BELL, RUNG)

    def done(self):
        return struct.unpack_from("=I", self.window, BELL)[0] == DONE

    def outcome(self):
        """Status of the last dispatch."""
        return struct.unpack_from("=i", self.window, RECORD)[0]


@unittest.skipUnless(os.path.exists(test_gpus.MODULE), "the double of the cuda backend is not built")
class RegionsTest(harness.TestCase):
    def serve(self, *flags):
        self.server = self.start_server("--backend=cuda", *flags, env={"EP_CUDA_MODULE": test_gpus.MODULE})
        self.admin(*GROUP[1:])

    def admin(self, *arguments):
        result = self.run_cmd(["ep-admin", *arguments], server=self.server)
        self.assertEqual(result.code, 0, result)
        return result

    def own(self, size=BYTES):
        fd = memory(size)
        self.addCleanup(os.close, fd)
        return fd

    def held(self):
        """Descriptors and mappings of memory of workers' own that the server has."""
        links = sum(link.startswith("/memfd:own") for link in self.server.open_files())
        with open("/proc/%d/maps" % self.server.pid) as maps:
            return links + sum("/memfd:own" in line for line in maps)

    def descriptors(self):
        return len(self.server.open_files())

    # -- ops --

    def bench(self, *flags, code=0, backend="cuda"):
        result = self.run_cmd(["ep-bench", "--spawn", "--backend=" + backend, "--modes=ll", "--experts=7",
                               "--hidden=528", "--top-k=3", "--iters=3", "--warmup=1", "--memory=own",
                               "--output=json", *flags],
                              env={"EP_CUDA_MODULE": test_gpus.MODULE}, timeout=120 * harness.SCALE)
        self.assertEqual(result.code, code, result)
        return result

    def check_bench(self, executor, expected):
        report = self.bench("--tokens=0,13", "--dtypes=bf16,fp16,fp32,fp8,fp16-to-fp8,fp32-to-fp8,fp8-given",
                            "--scales=fp32,ue8m0", "--alignment=8", "--drop=0.3", "--graph=2", "--replays=3",
                            "--executor=" + executor).json()
        self.assertEqual((report["ok"], report["executor"], report["config"]["memory"]), (True, expected, "own"))
        self.assertEqual({c["layout"] for c in report["cases"]}, {"expert-major", "rank-major", "packed"})
        self.assertEqual([c for c in report["cases"] if not c["verified"] or c["mismatches"]], [])

    def test_ops_use_memory_of_the_workers_own(self):
        self.check_bench("auto", "direct")

    def test_ops_that_the_server_runs_do(self):
        self.check_bench("server", "server")

    def test_ops_of_a_mixed_group_do(self):
        self.check_bench("mixed", "mixed")

    def test_on_the_host_backend_there_is_the_window_only(self):
        result = self.bench("--tokens=4", code=1, backend="host")
        self.assertIn("is on the host backend, where the server sees its window only", result.err)

    def test_an_op_that_names_a_region_that_is_none_is_refused(self):
        self.serve()
        with Worker(self.server.socket, 0) as w:
            def run(op):
                w.ring(op)
                harness.wait_until(w.done, "the op over")
                return w.outcome()

            self.assertEqual(run(dispatch(3)), INVALID_ARGUMENT)
            self.assertEqual(w.register(3, self.own()), OK)
            self.assertEqual(run(dispatch(2)), INVALID_ARGUMENT)
            self.assertEqual(w.unregister(3), OK)
            for region in (3, 0, REGIONS - 1, REGIONS, 65534):
                self.assertEqual(run(dispatch(region)), INVALID_ARGUMENT)
            self.assertEqual(w.register(3, self.own(), value=8192), OK) # too short for the output
            self.assertEqual(run(dispatch(3)), INVALID_ARGUMENT)

    def test_memory_that_a_running_op_uses_is_not_unmapped(self):
        """The op waits for its peers, which never come, and its worker lets go of the memory."""
        self.serve()
        fd = self.own()
        os.pwrite(fd, struct.pack("=8i", 2, 3, 2, 3, 2, 3, 2, 3), TOPK) # experts of rank 1
        with Worker(self.server.socket, 0) as w, test_gpus.Worker(self.server.socket, 1, test_gpus.DIRECT) as peer:
            self.assertEqual(w.register(5, fd), OK)
            before = bytes(peer.windows[1])
            w.ring(dispatch(5))
            harness.wait_until(lambda: bytes(peer.windows[1]) != before, "rows at the peer")
            w.asked += 1
            w.ask(worker.UNREGISTER, count=w.asked, region=5)
            self.assertEqual(w.request(worker.REGISTER, [fd], region=6, value=BYTES).status, UNAVAILABLE)
            held = self.held()
            while not w.done(): # looked at after what is held
                self.assertGreater(held, 0)
                time.sleep(0.02)
                held = self.held()
            late = w.answer()
            self.assertEqual((late.status, late.count), (OK, w.asked - 1))
            self.assertEqual(self.held(), 0)
            self.assertEqual(w.outcome(), TIMEOUT)
            w.ring(dispatch(5))
            harness.wait_until(w.done, "the op over")
            self.assertEqual(w.outcome(), INVALID_ARGUMENT)

    # -- the end --

    def spawn_worker(self, rank, regions):
        """A process of its own with that many regions registered."""
        script = ("import sys, test_regions\n"
                  "w = test_regions.Worker(sys.argv[1], int(sys.argv[2]))\n"
                  "for i in range(int(sys.argv[3])):\n"
                  "    assert w.register(i, test_regions.memory()) == 0\n"
                  "w.ring(test_regions.dispatch(0))\n"
                  "print('attached', flush=True)\n"
                  "sys.stdin.readline()\n")
        process = subprocess.Popen([sys.executable, "-c", script, self.server.socket, str(rank), str(regions)],
                                   text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   cwd=os.path.dirname(os.path.abspath(__file__)))
        self.addCleanup(process.wait)
        self.addCleanup(process.stdin.close)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), "attached\n")
        return process

    def test_a_killed_worker_leaves_nothing_mapped(self):
        self.serve()
        for _ in range(3):
            process = self.spawn_worker(1, REGIONS)
            self.assertGreaterEqual(self.held(), REGIONS)
            process.kill()
            process.wait()
            harness.wait_until(lambda: self.held() == 0, "all given back")
        with Worker(self.server.socket, 1) as w:
            self.assertEqual(w.register(0, self.own()), OK)

    def test_who_leaves_and_a_server_that_stops_leave_nothing(self):
        self.serve()
        with Worker(self.server.socket, 1) as w:
            self.assertEqual(w.register(0, self.own()), OK)
        harness.wait_until(lambda: self.held() == 0, "all given back")
        w = Worker(self.server.socket, 1)
        self.assertEqual(w.register(0, self.own()), OK)
        self.server.signal(signal.SIGKILL) # what it had mapped goes with it
        self.server.wait()
        w.socket.close()

    def test_regions_come_and_go(self):
        self.serve()
        fd = self.own()
        with Worker(self.server.socket, 0) as w:
            self.assertEqual((w.register(0, fd), w.unregister(0)), (OK, OK))
            before = self.descriptors()
            for i in range(1000):
                self.assertEqual((w.register(i % REGIONS, fd), w.unregister(i % REGIONS)), (OK, OK))
            self.assertLessEqual(self.descriptors(), before) # the claim's connection ends in between
            self.assertEqual(self.held(), 0)

    # -- hostile ones --

    def test_what_can_be_mapped_is_bounded(self):
        self.serve("--max-region-bytes=%d" % (2 * BYTES))
        fd = self.own(4 * BYTES)
        with Worker(self.server.socket, 0) as w:
            self.assertEqual(w.register(0, fd), OK)
            answer = w.request(worker.REGISTER, [fd], region=1, value=16, offset=BYTES)
            self.assertEqual(answer.status, RESOURCE_EXHAUSTED)
            self.assertIn("--max-region-bytes", answer.text)
            self.assertEqual(w.register(1, fd), OK)
            self.assertEqual(w.unregister(0), OK)
            self.assertEqual(w.register(0, fd, value=16), OK)

    def test_a_server_may_map_nothing(self):
        self.serve("--max-region-bytes=0")
        with Worker(self.server.socket, 0) as w:
            self.assertEqual(w.register(0, self.own(), value=16), RESOURCE_EXHAUSTED)

    def test_anything_may_be_sent_as_a_region(self):
        self.serve()
        rng = random.Random(7)
        pair = socket.socketpair()
        pipe = os.pipe()
        others = [os.open("/dev/null", os.O_RDWR), os.open("/proc/self/maps", os.O_RDONLY), pair[0].fileno(), *pipe,
                  os.open("/", os.O_RDONLY), self.own(0), self.own(100)]
        with Worker(self.server.socket, 0) as w:
            before = self.descriptors()
            for fd in others:
                self.assertNotEqual(w.register(0, fd), OK)
            for _ in range(300):
                fields = {"region": rng.choice((0, 1, 63, 64, 2**32 - 1)),
                          "value": rng.choice((1, 16, BYTES, BYTES + 1, 2**48, 2**63, 2**64 - 1)),
                          "offset": rng.choice((0, 8, 16, BYTES, 2**48, 2**63, 2**64 - 16))}
                fds = rng.choices(others, k=rng.randrange(4))
                self.assertNotEqual(w.request(worker.REGISTER, fds, **fields).status, OK)
                self.assertEqual(w.unregister(fields["region"]), NOT_FOUND)
            self.assertLessEqual(self.descriptors(), before) # the claim's connection ends in between
            self.assertEqual(w.register(0, self.own()), OK) # it is as good as ever
        for end in pair:
            end.close()
        for fd in (*others[:2], *pipe, others[5]):
            os.close(fd)

    def test_a_flood_that_nobody_waits_for(self):
        self.serve()
        fd = self.own()
        w = Worker(self.server.socket, 0)
        before = self.descriptors()
        for i in range(5000):
            w.ask(worker.REGISTER if i % 2 else worker.UNREGISTER, [fd] if i % 2 else (), count=i, region=i % REGIONS,
                  value=BYTES if i % 2 else 0)
        self.assertLess(self.held(), 2 * REGIONS + 1)
        with Worker(self.server.socket, 1) as other: # is served meanwhile
            self.assertEqual(other.register(0, fd), OK)
        w.leave()
        harness.wait_until(lambda: self.held() == 0 and self.descriptors() < before, "all given back")


if __name__ == "__main__":
    harness.main()
