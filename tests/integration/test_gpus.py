"""ep-server on GPUs, black box, with the module that computes on CPUs: no GPU is needed.

What it has of GPU memory is shared memory, so a worker of these tests can map it and play the kernels.
"""

import mmap
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import unittest

import harness
import rawrpc
import reflect
import worker

MODULE = os.path.join(os.path.dirname(harness.BIN), "unit", "libep_cuda_cpu.so")
NVML = os.path.join(os.path.dirname(MODULE), "nvml")
KERNELS = os.path.join(os.path.dirname(harness.BIN), "unit", "libep_cuda_kernels.so")  # which runs the kernels, on CPUs
GROUP = ["ep-admin", "group", "create", "moe", "--ranks=4", "--experts=8", "--hidden=64", "--top-k=2",
         "--ll-max-tokens=16", "--arena=1MiB"]

DIRECT, SERVER = 2, 1
MEMORY, STATE, WINDOW = 6, 1, 2
WINDOW_MAGIC, STATE_MAGIC = 0x31574e4957534550, 0x3154535645445045
FROM, BEGUN, COUNTERS = 128, 8384, 8952 # in kernels/device_state.h
NEVER = 2**64 - 1


def fields(path, rank, executor=0, group="moe", ht_sms=0):
    """The fields of a ClaimReply, by number."""
    return rawrpc.fields(rawrpc.call(
        path, "ep.v1.Attach/Claim",
        rawrpc.field(1, group) + rawrpc.field(2, rank) + rawrpc.field(3, "test_gpus")
        + rawrpc.field(4, worker.WINDOW_VERSION) + rawrpc.field(5, worker.VERSION) + rawrpc.field(7, executor)
        + rawrpc.field(11, ht_sms)))


def word(memory, at, value=None):
    if value is not None:
        struct.pack_into("=Q", memory, at, value)
    return struct.unpack_from("=Q", memory, at)[0]


class Worker(worker.Worker):
    """Attached, with all its memory mapped: windows[rank], state."""

    def __init__(self, path, rank, executor=0, **more):
        self.claim = fields(path, rank, executor, **more)
        self.fd, self.rank, self.windows, self.state = -1, rank, {}, None
        self.socket = harness.connect_unix(self.claim[3].decode(), socket.SOCK_SEQPACKET)
        self.socket.send(worker.pack(worker.HELLO, self.claim[1]))
        welcome = self.frame()
        assert welcome.type == worker.WELCOME, welcome
        self.windows[rank] = self.map(welcome.value)
        for _ in range(welcome.count):
            self.take(self.frame())

    def take(self, frame):
        assert frame.type == MEMORY and frame.count in (STATE, WINDOW), frame
        if frame.count == STATE:
            self.state = self.map(frame.value)
        else:
            self.windows[frame.rank] = self.map(frame.value)

    def map(self, size):
        memory = mmap.mmap(self.fd, size)
        self._close_window()
        return memory

    def since(self, rank):
        return word(self.state, FROM + 8 * rank)


@unittest.skipUnless(os.path.exists(MODULE), "the double of the cuda backend is not built")
class GpusTest(harness.TestCase):
    def serve(self, *flags):
        self.server = self.start_server("--backend=auto", *flags, env={"EP_CUDA_MODULE": MODULE})
        self.admin(*GROUP[1:])

    def admin(self, *arguments, code=0):
        result = self.run_cmd(["ep-admin", *arguments], server=self.server)
        self.assertEqual(result.code, code, result)
        return result

    def rank_state(self, rank):
        group = self.admin("group", "get", "moe", "--output=json").json()
        return group["status"]["ranks"][rank]["state"]

    def spawn_worker(self, rank, executor):
        """A process of its own, which says when it is attached."""
        script = ("import sys, test_gpus\n"
                  "w = test_gpus.Worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))\n"
                  "print('attached', flush=True)\n"
                  "sys.stdin.readline()\n")
        process = subprocess.Popen([sys.executable, "-c", script, self.server.socket, str(rank), str(executor)], text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   cwd=os.path.dirname(os.path.abspath(__file__)))
        self.addCleanup(process.wait)
        self.addCleanup(process.stdin.close)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), "attached\n")
        return process

    # -- what the node is --

    def test_auto_takes_the_gpus(self):
        self.serve("--memory=1GiB")
        node = self.admin("node", "get", "--output=json").json()
        self.assertEqual([(d["name"], d["backend"]) for d in node["devices"]],
                         [("GPU-fixture-0", "BACKEND_CUDA"), ("GPU-fixture-1", "BACKEND_CUDA")])
        self.assertRegex(node["devices"][0]["detail"], r"reaches 1 of 1 other GPUs, .*no MPS$")
        self.assertEqual([d["groups"] for d in node["devices"]], [1, 1])
        self.assertEqual(int(node["memory_budget_bytes"]), 2 << 30)
        self.assertIn("gpu=GPU-fixture-1", self.server.log())

    def with_nvml(self, **settings):
        """The environment of a server whose NVML is the double (tests/unit/nvml_double.c) or none."""
        folder = NVML if settings else self.path("no-nvml")
        if not settings:
            os.mkdir(folder)
            open(os.path.join(folder, "libnvidia-ml.so.1"), "wb").close()
        return {"EP_CUDA_MODULE": MODULE, "LD_LIBRARY_PATH": folder,
                **{"EP_NVML_" + key: value for key, value in settings.items()}}

    def links(self, env):
        """What a server says of its GPUs: (NVLinks, peers over NVLink, over PCIe, fabric, sentence) of each, its table."""
        self.server = self.start_server("--backend=cuda", env=env)
        node = self.admin("node", "get", "--output=json").json()
        table = self.admin("node", "get").out
        log = self.server.log()
        self.assertEqual(self.server.stop(), 0)
        return [(d.get("nvlinks"), d.get("nvlink_peers"), d.get("pcie_peers"), d["fabric"].replace("FABRIC_STATE_", ""),
                 d["detail"].split(", reaches ")[1]) for d in node["devices"]], table, log

    def test_gpus_of_one_nvlink_domain(self):
        found, table, log = self.links(self.with_nvml(FABRIC="33", LINKS="18", DOMAINS="aa"))
        self.assertEqual(found, [(18, 1, 0, "COMPLETED", "1 of 1 other GPUs over NVLink, no MPS")] * 2)
        self.assertRegex(table, r"GPU-fixture-0 .* 18 +COMPLETED ")
        self.assertRegex(log, r'gpu=GPU-fixture-1 .* reaches="1 of 1 other GPUs over NVLink" nvlinks=18 fabric=completed')

    def test_gpus_on_pcie(self):
        found, table, _ = self.links(self.with_nvml(FABRIC="00"))
        self.assertEqual(found, [(0, 0, 1, "NONE", "1 of 1 other GPUs over PCIe, no MPS")] * 2)
        self.assertRegex(table, r"GPU-fixture-0 .* 0 +NONE ")

    def test_a_fabric_that_is_not_done(self):
        found, _, log = self.links(self.with_nvml(FABRIC="29", LINKS="18", DOMAINS="aa"))
        self.assertEqual([gpu[3] for gpu in found], ["IN_PROGRESS", "FAILED"])
        self.assertIn('"the fabric manager is not done with a GPU" gpu=GPU-fixture-0', log)
        self.assertIn('"the fabric manager has failed with a GPU" gpu=GPU-fixture-1 why="Unknown Error"', log)

    def test_what_nvml_does_not_tell_is_not_known(self):
        found, table, log = self.links(self.with_nvml())
        self.assertEqual(found, [(None, None, None, "UNSPECIFIED",
                                  "1 of 1 other GPUs, over NVLink or PCIe is not known, no MPS")] * 2)
        self.assertRegex(table, r"GPU-fixture-0 .* not known +not known ")
        self.assertIn("NVLinks and the state of the fabric manager are not known", log)

    @unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")
    def test_other_nodes_know_them_from_its_registration(self):
        store = "--store=" + harness.Etcd(self.box).url("/cluster")
        self.start_server(store, "--name=a", "--backend=cuda", name="a",
                          env=self.with_nvml(FABRIC="33", LINKS="18", DOMAINS="aa"))
        self.server = self.start_server(store, "--name=b", "--host-ranks=2", name="b")

        def listed():
            return {node["name"]: node["devices"] for node in
                    self.admin("node", "list", "--output=json").json()["nodes"]}
        harness.wait_until(lambda: set(listed()) == {"a", "b"}, listed)
        for gpu in listed()["a"]:
            self.assertEqual((gpu["nvlinks"], gpu["nvlink_peers"], gpu["pcie_peers"], gpu["fabric"]),
                             (18, 1, 0, "FABRIC_STATE_COMPLETED"))
        for cpu in listed()["b"]:
            self.assertEqual((cpu.get("nvlinks"), cpu["fabric"]), (None, "FABRIC_STATE_UNSPECIFIED"))

    def loads_are_a_sample(self, module, modes, mode):
        env = {"EP_CUDA_MODULE": module}
        self.server = self.start_server("--backend=cuda", env=env)
        self.admin("group", "create", "moe", "--ranks=2", "--experts=8", "--hidden=1024", "--top-k=2",
                   "--modes=" + modes, "--ll-max-tokens=8", "--ht-max-tokens=8", "--arena=4MiB", "--timeout-ms=60000")
        for rank in range(2):
            self.spawn(["worker", "--group=moe", "--mode=" + mode, "--rank=%d" % rank], server=self.server, env=env)

        def rows():
            stats = self.admin("stats", "moe", "--experts", "-o", "json").json()
            return [list(map(int, rank["expert_rows"])) for rank in stats["ranks"]]
        harness.wait_until(lambda: all(map(all, rows())), rows)  # in time every expert has a row of each rank's
        self.assertEqual([len(rank) for rank in rows()], [8, 8])
        plan = self.admin("group", "plan", "moe", "--placement=by-load", "--redundant=2", "-o", "json").json()
        self.assertTrue(all(float(rank["load"]) > 0 for rank in plan["plan"]["ranks"]), plan)

    def test_loads_of_experts_are_a_sample(self):
        self.loads_are_a_sample(MODULE, "ll", "ll")

    @unittest.skipUnless(os.path.exists(KERNELS), "sanitizers know no fibers, which the kernels run on")
    def test_loads_of_experts_are_a_sample_of_what_kernels_keep(self):
        self.loads_are_a_sample(KERNELS, "ll,ht", "both")

    def test_what_gpus_cannot_do_is_refused(self):
        self.serve()
        for command in (["create", "big", *GROUP[4:]], ["create", "big", *GROUP[4:], "--dry-run"], ["update", "moe"]):
            big = self.run_cmd(["ep-admin", "group", *command, "--ll-max-tokens=60000"], server=self.server)
            self.assertEqual(big.code, 2, big)
            self.assertIn("ll_max_tokens is 60000: with top_k 2 must be at most ", big.err)

    def test_mps_that_is_not_there(self):
        result = self.run_cmd(["ep-server", "--socket=" + self.path("s"), "--state-dir=" + self.path("d"),
                               "--mps=require"], env={"EP_CUDA_MODULE": MODULE})
        self.assertEqual(result.code, 1, result)
        self.assertIn("mps is require: there is no MPS server for GPU-fixture-0", result.err)

    def test_groups_are_there_again_after_a_restart(self):
        self.serve()
        self.assertEqual(self.server.stop(), 0)
        self.server = self.start_server("--backend=cuda", env={"EP_CUDA_MODULE": MODULE})
        group = self.admin("group", "get", "moe", "--output=json").json()
        self.assertEqual((group["status"]["phase"], int(group["status"]["epoch"])), ("PHASE_READY", 2))
        with Worker(self.server.socket, 0) as w:
            self.assertEqual(word(w.windows[0], 16), 2) # epoch

    # -- which of them a group is on --

    def test_groups_take_gpus_that_others_leave(self):
        self.server = self.start_server("--backend=auto", env={"EP_CUDA_MODULE": MODULE})

        def gpus(name):
            return [rank["device"][-1] for rank in
                    self.admin("group", "get", name, "--output=json").json()["status"]["ranks"]]

        for name, gpu in (("a", "0"), ("b", "1"), ("c", "0")):
            self.admin("group", "create", name, "--ranks=1", *GROUP[5:])
            self.assertEqual(gpus(name), [gpu])
        self.admin("group", "update", "b", "--hidden=128")
        self.assertEqual(gpus("b"), ["1"])
        self.admin("group", "update", "b", "--ranks=2")
        self.assertEqual(gpus("b"), ["1", "0"])
        self.admin("group", "update", "b", "--placement=spread")
        self.assertEqual(gpus("b"), ["1", "0"])

    # -- workers --

    def test_a_direct_worker_gets_all_its_memory(self):
        self.serve()
        with Worker(self.server.socket, 2, DIRECT) as w:
            self.assertEqual((w.claim[8], w.claim[9], len(w.claim[10])), (2, DIRECT, 16))
            self.assertEqual(sorted(w.windows), [0, 1, 2, 3])
            for rank, window in w.windows.items():
                self.assertEqual((word(window, 0), struct.unpack_from("=I", window, 12)[0]), (WINDOW_MAGIC, rank))
            self.assertEqual((word(w.state, 0), len(w.state)), (STATE_MAGIC, w.claim[11]))
            self.assertEqual([w.since(rank) for rank in range(5)], [1, 1, 1, 1, NEVER])

    def test_direct_is_for_whom_the_group_says(self):
        self.serve()
        self.admin("group", "update", "moe", "--direct=none")
        with self.assertRaises(rawrpc.RpcError) as caught:
            fields(self.server.socket, 0, DIRECT)
        self.assertIn("direct of group moe is none", caught.exception.text)
        with Worker(self.server.socket, 0) as w:
            self.assertEqual((w.claim[9], sorted(w.windows)), (SERVER, [0]))
        self.admin("group", "update", "moe", "--direct=any")
        with Worker(self.server.socket, 0, DIRECT) as w:
            self.assertEqual(len(w.windows), 4)
        self.admin("group", "create", "other", *GROUP[4:], "--direct=none")
        self.assertRegex(self.admin("group", "get", "other").out, r"(?m)^direct +none: ")

    def test_a_served_worker_gets_its_window_only(self):
        self.serve()
        with Worker(self.server.socket, 2, SERVER) as w:
            self.assertEqual((w.claim[8], w.claim[9], len(w.claim[10]), 11 in w.claim), (2, SERVER, 16, False))
            self.assertEqual((sorted(w.windows), w.state), ([2], None))
            self.assertEqual(struct.unpack_from("=I", w.windows[2], 12)[0], 2)

    def served(self, device):
        """Multiprocessors of a GPU that ranks hold, and how many it has."""
        info = self.admin("node", "get", "--output=json").json()["devices"][device]
        return info["sms_held"], info["sms"]

    def test_a_gpu_that_is_full_serves_no_further_rank(self):
        self.serve()
        self.admin("group", "create", "other", *GROUP[4:])
        with Worker(self.server.socket, 0, SERVER), Worker(self.server.socket, 2, SERVER):
            self.assertEqual((self.served(0), self.served(1)), ((8, 8), (0, 8)))
            self.assertRegex(self.admin("node", "get").out, r"GPU-fixture-0 .* 8 of 8 ")
            with self.assertRaises(rawrpc.RpcError) as caught:
                fields(self.server.socket, 0, SERVER, group="other")
            self.assertIn("held by: group moe 8 (2 ranks); use executor direct", caught.exception.text)
            self.assertEqual(fields(self.server.socket, 0, group="other")[9], DIRECT)
        harness.wait_until(lambda: self.served(0) == (0, 8), "the ranks' part free")

    def test_what_a_rank_may_fill_is_the_operators_choice(self):
        self.serve("--sms-per-rank=1")
        with Worker(self.server.socket, 0, SERVER), Worker(self.server.socket, 1, DIRECT):
            self.assertEqual((self.served(0), self.served(1)), ((1, 8), (0, 8)))

    def test_a_worker_says_what_its_ht_ops_fill(self):
        self.serve()
        for executor in (SERVER, DIRECT):
            for asked, fills in ((0, 4), (3, 3), (4, 4), (100, 4)):  # of 8, which two ranks share
                with self.subTest(executor=executor, asked=asked), \
                        Worker(self.server.socket, 0, executor, ht_sms=asked) as w:
                    self.assertEqual(w.claim[14], fills)
                    self.assertEqual(self.served(0), (4 if executor == SERVER else 0, 8))
                harness.wait_until(lambda: self.served(0) == (0, 8), "the rank's part free")

    def test_peers_see_each_others_windows(self):
        self.serve()
        with Worker(self.server.socket, 0) as a, Worker(self.server.socket, 3) as b:
            a.windows[3][-1] = 7
            self.assertEqual(b.windows[3][-1], 7)

    def test_a_killed_worker_is_absent_for_the_kernels_of_its_peers(self):
        self.killed(DIRECT)

    def test_so_is_one_whose_ops_the_server_runs(self):
        self.killed(SERVER)

    def killed(self, executor):
        self.serve()
        took = []
        with Worker(self.server.socket, 0) as w:
            for i in range(5):
                process = self.spawn_worker(1, executor)
                began = 100 * (i + 1)
                word(w.state, BEGUN, began)
                start = time.monotonic()
                process.kill()
                harness.wait_until(lambda: w.since(1) == NEVER, "the rank absent", interval=0.0002)
                took.append(time.monotonic() - start)
                process.wait()
                harness.wait_until(lambda: self.rank_state(1) == "RANK_STATE_ABSENT", "the rank free")
                with Worker(self.server.socket, 1, executor) as again:
                    self.assertEqual(w.since(1), began + 1) # the first number that nobody has begun
                    self.assertEqual(again.state and word(again.state, BEGUN), began if executor == DIRECT else None)
        self.assertLess(min(took), 0.05 * harness.SCALE, took)  # it waits for nothing: once of five times that shows

    def test_numbers_begin_again_when_all_have_left(self):
        self.serve()
        for _ in range(2):
            with Worker(self.server.socket, 0) as w:
                self.assertEqual((w.since(0), word(w.state, BEGUN)), (1, 0))
                word(w.state, BEGUN, 5)
            harness.wait_until(lambda: self.rank_state(0) == "RANK_STATE_EXPECTED", "a new start")


@unittest.skipUnless(os.path.exists(MODULE), "the double of the cuda backend is not built")
class LostGpuTest(harness.TestCase):
    """The driver gives up a GPU for the server's process, as it does where MPS has another one's kernel go wrong."""

    def serve(self):
        return self.start_server("--backend=cuda", env={"EP_CUDA_MODULE": MODULE, "EP_CUDA_LOST": self.path("lost")})

    def test_the_server_ends_and_comes_back(self):
        server = self.serve()
        created = self.run_cmd(["ep-admin", "group", "create", "moe", "--ranks=2", *GROUP[5:]], server=server)
        self.assertEqual(created.code, 0, created)
        with Worker(server.socket, 0, DIRECT, group="moe"):
            self.box.write("lost.0", "")
            self.run_cmd(["ep-admin", "stats"], server=server)  # which looks at GPUs
            self.assertEqual(server.wait(), 4, server.log())
            self.assertIn("a GPU is lost: this server ends, to be started again", server.log())
            self.assertIn("device 0 has fallen off the bus", server.log())
        os.unlink(self.path("lost.0"))
        server = self.serve()
        for rank in range(2):
            with Worker(server.socket, rank, DIRECT, group="moe"):
                pass


@unittest.skipUnless(os.path.exists(MODULE), "the double of the cuda backend is not built")
class DeafGpuTest(harness.TestCase):
    """GPU 0 does not answer who reads of it; group a is there, group b on GPU 1."""
    deaf_log = "a GPU does not answer"

    def serve(self, *flags):
        self.server = self.start_server("--backend=cuda", *flags, env={"EP_CUDA_MODULE": MODULE,
                                                                       "EP_CUDA_DEAF": self.path("deaf")})
        for name in ("a", "b"):
            self.admin("group", "create", name, "--ranks=1", *GROUP[5:])

    def admin(self, *arguments):
        result = self.run_cmd(["ep-admin", *arguments], server=self.server)
        self.assertEqual(result.code, 0, result)
        return result

    def deafen(self, deaf=True):
        if deaf:
            self.box.write("deaf.0", "")
        else:
            os.unlink(self.path("deaf.0"))

    def attach(self, group):
        return Worker(self.server.socket, 0, DIRECT, group=group)

    def done(self, worker, ops):
        """As if its kernels had."""
        word(worker.state, COUNTERS, ops)

    def stats(self, *words, server=None):
        """Dispatches of each group's rank, and why that may be old."""
        reply = self.run_cmd(["ep-admin", "stats", *words, "--output=json"], server=server or self.server)
        self.assertEqual(reply.code, 0, reply)
        counted = {rank["group"]: sum(int(op["count"]) for op in rank["ops"] if op["op"] == "ll_dispatch")
                   for rank in reply.json()["ranks"]}
        return counted, reply.json()["behind"]

    def test_others_go_on(self):
        self.serve()
        with self.attach("a") as a, self.attach("b") as b:
            self.done(a, 3)
            self.assertEqual(self.stats(), ({"a": 3, "b": 0}, ""))
            self.deafen()
            self.done(a, 5)
            self.done(b, 7)
            self.assertEqual(self.stats("b"), ({"b": 7}, ""))
            counted, behind = self.stats()
            self.assertEqual(counted, {"a": 3, "b": 7})
            self.assertIn("the GPU of rank 0 of group a does not answer", behind)
            self.assertIn("figures may be old", self.admin("stats", "a").err)
            self.assertIn("the GPU of rank 0 of group a", self.admin("group", "get", "a").err)
            self.server.wait_log(self.deaf_log)
            self.assertEqual(self.server.http("/healthz")[0], 200)
            self.assertIn('ep_op_total{group="b",rank="0",op="ll_dispatch"} 7', self.server.http("/metrics")[2])
            self.admin("group", "create", "c", "--ranks=1", *GROUP[5:])
            b.leave()
            harness.wait_until(lambda: self.free("b"), "the rank of another group free")
            with self.attach("b") as b:
                self.done(b, 2)
                harness.wait_until(lambda: self.stats("b") == ({"b": 9}, ""), lambda: self.stats("b"))
            self.assertEqual(self.server.log().count(self.deaf_log), 1)
            self.deafen(False)
            harness.wait_until(lambda: self.stats("a") == ({"a": 5}, ""), lambda: self.stats("a"))
            self.done(a, 6)
            self.assertEqual(self.stats("a"), ({"a": 6}, ""))
            self.server.wait_log("a GPU answers again")

    def free(self, group):
        status = self.admin("group", "get", group, "--output=json").json()["status"]
        return status["ranks"][0]["state"] == "RANK_STATE_EXPECTED"

    def test_a_stream_of_stats_goes_on(self):
        self.serve()
        with self.attach("a"), self.attach("b") as b, reflect.Client(self.server.address) as rpc:
            self.deafen()
            self.done(b, 7)
            stream = rpc.stream("ep.v1.Admin/WatchStats", {"interval_ms": 50})
            for _ in range(3):
                self.assertIn("does not answer", next(stream)["behind"])
            self.deafen(False)
            harness.wait_until(lambda: self.stats()[1] == "", self.stats)

    def requests(self):
        return int(re.search(r"(?m)^ep_rpc_requests_total (\d+)", self.server.http("/metrics")[2])[1])

    def test_who_asks_may_go(self):
        self.serve()
        with self.attach("a") as a, reflect.Client(self.server.address) as rpc:
            self.deafen()
            for words in (("stats",), ("stats", "a", "--experts"), ("group", "get", "a")):
                before = self.requests()
                asker = self.spawn(["ep-admin", *words], server=self.server)
                harness.wait_until(lambda: self.requests() > before, "the request there")
                asker.kill()
            before = self.requests()
            stream = rpc.stream("ep.v1.Admin/WatchStats", {"interval_ms": 50})
            harness.wait_until(lambda: self.requests() > before, "the request there")
            stream.cancel()
            self.assertIn("does not answer", self.stats()[1]) # later than all of these
            self.deafen(False)
            self.done(a, 1)
            harness.wait_until(lambda: self.stats("a") == ({"a": 1}, ""), lambda: self.stats("a"))

    def test_its_worker_may_leave_and_the_next_come(self):
        self.serve()
        with self.attach("a") as a:
            self.done(a, 3)
            self.deafen()
        self.server.wait_log("what a rank's last ops have counted is not known")
        self.assertEqual(self.stats()[1], "") # nobody is waited for
        self.deafen(False)
        harness.wait_until(lambda: self.free("a"), "numbers begin again")
        with self.attach("a") as a:
            self.done(a, 4)
            self.assertEqual(self.stats("a"), ({"a": 4}, ""))

    def test_its_group_may_go(self):
        self.serve()
        with self.attach("a"):
            self.deafen()
            self.admin("group", "delete", "a", "--force")
        harness.wait_until(lambda: "a" not in self.stats()[0], self.stats)
        with self.attach("b") as b:
            self.done(b, 1)
            self.assertEqual(self.stats("b"), ({"b": 1}, ""))
        self.deafen(False)

    def test_the_server_may_stop(self):
        self.serve("--drain-grace=0s")
        with self.attach("a"):
            self.deafen()
            self.assertEqual(self.server.stop(), 0)

    @unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")
    def test_the_servers_lease_is_kept(self):
        etcd = "--store=" + harness.Etcd(self.box).url("/cluster")
        self.serve(etcd, "--name=a", "--lost-after=3s")
        other = self.start_server(etcd, "--name=b", "--host-ranks=2", "--lost-after=3s", name="b")
        with self.attach("a"):
            self.deafen()
            self.server.wait_log(self.deaf_log)
            nodes = self.run_cmd(["ep-admin", "node", "list", "--output=json"], server=other).json()["nodes"]
            self.assertEqual({node["name"]: node["state"] for node in nodes}, dict.fromkeys("ab", "NODE_STATE_READY"))
            self.assertNotIn("node gone", other.log())
            self.assertNotIn("not registered any more", self.server.log())
            self.deafen(False)


if __name__ == "__main__":
    harness.main()
