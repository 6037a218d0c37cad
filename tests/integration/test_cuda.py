"""Ranks on GPUs, where there is none: server, library and tools with a module that computes on CPUs.

The module (tests/cuda_cpu) stands in for libep_cuda.so.  An address of its "GPU" memory cannot be followed, so a
program that takes it for its own dies.  The kernels themselves are tested where GPUs are (tests/gpu).
"""
import json
import os
import shutil
import unittest

import harness

MODULE = os.path.join(os.path.dirname(harness.BIN), "unit", "libep_cuda_cpu.so")
KERNELS = os.path.join(os.path.dirname(harness.BIN), "unit", "libep_cuda_kernels.so")  # which runs the kernels, on CPUs
ENV = {"EP_CUDA_MODULE": MODULE}
LAYOUTS = {"expert-major", "rank-major", "packed"}
HT_LAYOUTS = {"packed", "flat"}
ALL_DTYPES = "bf16,fp16,fp32,fp8,fp16-to-fp8,fp32-to-fp8,fp8-given"
SPEC = ["--ranks=3", "--experts=12", "--hidden=256", "--top-k=2", "--wait=20s"]
QUICK = ["--hidden=256", "--experts=16", "--top-k=4", "--modes=ll"]


@unittest.skipUnless(os.path.exists(MODULE), "no %s" % MODULE)
class CudaTest(harness.TestCase):
    def bench(self, *flags, code=0, env=None, **more):
        if "--spawn" in flags:  # CPUs that have other things to do are slow GPUs
            flags = ("--timeout-ms=60000", *flags)
        result = self.run_cmd(["ep-bench", *flags], env=dict(ENV, **(env or {})), timeout=120.0, **more)
        for word in harness.COMPLAINTS + ("wait status", "left behind"):
            self.assertNotIn(word, result.err, result)
        self.assertEqual(result.code, code, result)
        return result

    def bench_json(self, *flags, executor="direct", **more):
        report = json.loads(self.bench("--output=json", "--backend=cuda", *flags, **more).out)
        self.assertEqual((report["backend"], report["executor"]), ("cuda", executor))
        return report

    def start(self, *flags, **more):
        return self.start_server("--backend=cuda", *flags, env=ENV, **more)

    def create(self, server, *flags):
        result = self.run_cmd(["ep-admin", "group", "create", "moe", *SPEC, *flags], server=server)
        self.assertEqual(result.code, 0, result)

    def admin_json(self, server, *words):
        return self.run_cmd(["ep-admin", *words, "--output=json"], server=server).json()

    def workers(self, server, ranks, *flags):
        return [self.spawn(["worker", "--group=moe", "--rank=%d" % r, "--pause-ms=5", "--once", *flags], env=ENV,
                           server=server) for r in ranks]

    def says(self, process, text):
        harness.wait_until(lambda: text in process.out(),
                           lambda: "%r in what it says:\n%s%s" % (text, process.out(), process.log()))


class RankTest(CudaTest):
    """What ranks compute, whoever runs their ops."""
    executor = "direct"

    def ranks(self, *flags, **more):
        report = self.bench_json("--spawn", "--executor=" + self.executor, *flags, executor=self.executor, **more)
        self.assertTrue(report["ok"], report)
        return report

    def test_every_combination_is_right(self):
        report = self.ranks("--ranks=3", "--experts=20", "--hidden=320", "--top-k=6", "--modes=ll", "--tokens=0,7",
                            "--dtypes=" + ALL_DTYPES, "--zero-rank=1", "--drop=0.3", "--alignment=8", "--iters=3",
                            "--warmup=1")
        self.assertEqual({(c["layout"], c["dtype"]) for c in report["cases"]},
                         {(l, d) for l in LAYOUTS for d in ALL_DTYPES.split(",")})
        self.assertTrue(all(c["verified"] and c["graph_pair_us"] is None for c in report["cases"]), report)

    def test_scales_in_ue8m0_are_right(self):
        report = self.ranks("--ranks=3", "--experts=20", "--hidden=1040", "--top-k=6", "--modes=ll", "--tokens=7",
                            "--dtypes=fp8,fp16-to-fp8,fp32-to-fp8,fp8-given", "--scales=ue8m0", "--alignment=8",
                            "--iters=3", "--warmup=1")
        self.assertEqual({(c["layout"], c["scales"]) for c in report["cases"]}, {(l, "ue8m0") for l in LAYOUTS})

    def test_a_graph_of_pairs_gives_the_same(self):
        report = self.ranks(*QUICK, "--tokens=4", "--iters=20", "--graph=6", "--replays=20")
        self.assertTrue(all(c["graph_pair_us"] > 0 for c in report["cases"]), report)

    def test_a_killed_worker_costs_the_others_nothing(self):
        kill = self.ranks(*QUICK, "--ranks=3", "--tokens=4", "--iters=20", "--kill=1@1")["kill"]
        self.assertTrue(kill["done"] and kill["masked_verified"], kill)
        self.assertEqual((kill["ops_finished"], kill["ops_failed"]), (kill["ops_expected"], 0))


    def test_a_bias_is_added(self):
        report = self.ranks(*QUICK, "--tokens=5", "--iters=4", "--dtypes=bf16,fp8", "--bias", "--graph=4", "--replays=8")
        self.assertEqual(len(report["cases"]), 2 * len(LAYOUTS))

    @unittest.skipUnless(os.path.exists(KERNELS), "sanitizers know no fibers, which the kernels run on")
    def test_ht_is_right_on_as_many_multiprocessors_as_one_likes(self):
        report = self.ranks("--hidden=256", "--experts=8", "--top-k=2", "--tokens=5", "--iters=2", "--warmup=1", "--bias",
                            "--layouts=packed,flat", "--ht-sms=1,3,0,100", env={"EP_CUDA_MODULE": KERNELS})
        self.assertEqual([(c["mode"], c["layout"], c["sms"]) for c in report["cases"]],
                         [("ll", "packed", None)] + [("ht", layout, sms) for sms in (1, 3, 8, 8)
                                                     for layout in ("packed", "flat")])


class ServedRankTest(RankTest):
    executor = "server"


class MixedRankTest(RankTest):
    executor = "mixed"


class SameBitsTest(CudaTest):
    """Whoever runs an op, its results are the same, bit for bit."""

    def hashes(self, executor, *flags, **more):
        """Of what all ranks have received and what they have combined, by case."""
        report = self.bench_json("--spawn", "--executor=" + executor, "--experts=37", "--hidden=528", "--top-k=5",
                                 "--alignment=8", "--drop=0.3", "--tokens=17", "--iters=1", "--warmup=0", *flags,
                                 executor=executor, **more)
        self.assertTrue(report["ok"] and all(c["verified"] for c in report["cases"]), report)
        return {tuple(c[k] for k in ("mode", "layout", "dtype", "scales", "pass")): c["hash"] for c in report["cases"]}

    def same_bits(self, expected, *flags, **more):
        """expected: (mode, layout, pass) of the cases."""
        direct = self.hashes("direct", *flags, **more)
        self.assertEqual({(mode, layout, way) for mode, layout, _, _, way in direct}, expected)
        for executor in ("server", "mixed"):
            self.assertEqual(self.hashes(executor, *flags, **more), direct, executor)

    def test_executors_agree(self):
        self.same_bits({("ll", layout, "forward") for layout in LAYOUTS}, "--modes=ll", "--ranks=3", "--zero-rank=1",
                       "--dtypes=" + ALL_DTYPES, "--scales=fp32,ue8m0")

    @unittest.skipUnless(os.path.exists(KERNELS), "sanitizers know no fibers, which the kernels run on")
    def test_executors_agree_on_what_kernels_of_ll_compute(self):
        self.same_bits({("ll", layout, "forward") for layout in LAYOUTS}, "--modes=ll", "--dtypes=bf16,fp8",
                       env={"EP_CUDA_MODULE": KERNELS})

    @unittest.skipUnless(os.path.exists(KERNELS), "sanitizers know no fibers, which the kernels run on")
    def test_executors_agree_on_what_kernels_of_ht_compute(self):
        self.same_bits({("ht", layout, way) for layout in HT_LAYOUTS for way in ("forward", "backward")}, "--modes=ht",
                       "--dtypes=bf16,fp8", "--passes=forward,backward", env={"EP_CUDA_MODULE": KERNELS})


class BenchTest(CudaTest):
    def test_csv_says_who_ran_the_ops(self):
        result = self.bench("--spawn", "--backend=cuda", "--modes=ll", "--hidden=256", "--experts=16", "--top-k=4",
                            "--tokens=2", "--iters=2", "--output=csv")
        lines = result.out.strip().split("\n")
        self.assertEqual(len(lines), 1 + len(LAYOUTS))
        self.assertTrue(all(line.startswith("ll,") and line.endswith("cuda,direct,forward,no,,1x2") for line in lines[1:]), lines)

    def test_the_backend_asked_for_is_the_one_used(self):
        server = self.start()
        self.assertIn("this ep-server runs ranks on cuda", self.bench("--backend=host", code=1, server=server).err)
        self.create(server)
        self.assertIn("group moe is on cuda",
                      self.bench("--backend=host", "--group=moe", code=2, server=server).err)

    def test_the_executor_is_the_one_asked_for(self):
        server = self.start()
        self.create(server)
        for executor in ("server", "direct", "mixed"):
            report = self.bench_json("--group=moe", "--executor=" + executor, "--tokens=1", "--iters=2", server=server,
                                     executor=executor)
            self.assertTrue(report["ok"], report)

    def test_who_may_not_run_its_own_ops_is_served(self):
        server = self.start()
        self.create(server, "--direct=none")
        report = self.bench_json("--group=moe", "--tokens=1", "--iters=2", server=server, executor="server")
        self.assertTrue(report["ok"], report)
        self.assertIn("direct of group moe is none",
                      self.bench("--group=moe", "--executor=direct", code=5, server=server).err)

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs root, to be somebody else")
    def test_another_user_is_served(self):
        server = self.start("--allow-uid=0,65534")
        self.create(server)
        for path in (self.dir, server.home):
            os.chmod(path, 0o755)
        done = self.run_cmd([shutil.which("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups",
                             harness.binary("ep-bench"), "--group=moe", "--tokens=1", "--iters=2", "--output=json"],
                            env=ENV, server=server, timeout=60.0)
        if done.code in (126, 127):
            self.skipTest("nobody cannot run ep-bench")
        self.assertEqual(done.code, 0, done)
        self.assertEqual((done.json()["ok"], done.json()["executor"]), (True, "server"), done)

    def test_replays_need_a_graph(self):
        self.assertIn("--replays: of which graph?", self.bench("--spawn", "--replays=3", code=2).err)

    def test_a_worker_without_the_module(self):
        server = self.start()
        self.create(server)
        result = self.bench("--group=moe", "--modes=ll", "--tokens=1", code=1, server=server,
                            env={"EP_CUDA_MODULE": self.path("nothing.so")})
        self.assertIn("the group's backend is cuda: no cuda backend", result.err)


class WorkerTest(CudaTest):
    flags = ()

    def test_the_examples_run_unchanged(self):
        server = self.start()
        self.create(server, *self.flags)
        result = self.run_cmd(["hello_dispatch", "moe"], env=ENV, server=server)
        self.assertEqual(result.code, 0, result)
        self.assertIn("all results are right", result.out)

    def test_a_dead_workers_rank_is_taken_again(self):
        server = self.start()
        self.create(server, *self.flags, "--timeout-ms=60000")  # a new worker may begin late
        workers = self.workers(server, range(3))
        for worker in workers:
            self.says(worker, "absent 0, failures 0")
        workers[2].kill()
        self.says(workers[0], "rank 2 lost")
        self.says(workers[0], "absent 1, failures 0")
        again = self.workers(server, [2])[0]
        self.says(workers[0], "rank 2 joined")
        self.says(again, "absent 0, failures 0")
        ranks = self.admin_json(server, "group", "get", "moe")["status"]["ranks"]
        self.assertGreater(int(ranks[0]["dropped_routes"]), 0)  # what it had for rank 2 meanwhile
        for worker in (workers[0], workers[1], again):
            self.assertNotRegex(worker.out(), r"[1-9]\d* wrong")

    def test_a_worker_whose_context_takes_longer_than_its_ticket_claims_again(self):
        server = self.start()
        self.create(server, *self.flags)
        slow = self.spawn(["worker", "--group=moe", "--rank=2", "--pause-ms=5", "--once"], server=server,
                          env=dict(ENV, EP_CUDA_CONTEXT_MS="6000"))  # of 5000
        workers = self.workers(server, range(2))
        for worker in (*workers, slow):
            self.says(worker, "absent 0, failures 0")
        self.assertIn("did not attach in time", server.log())

    def test_a_lost_server_ends_the_workers(self):
        server = self.start()
        self.create(server, *self.flags, "--timeout-ms=60000")
        workers = self.workers(server, range(3))
        for worker in workers:
            self.says(worker, "absent 0")
        server.kill()
        for worker in workers:  # ops that wait do not wait for their timeout
            self.assertEqual(worker.wait(), 4, worker.log())
            self.says(worker, "the server is gone")

    def test_a_late_rank_is_named(self):
        server = self.start()
        self.create(server, *self.flags, "--timeout-ms=200")
        worker = self.workers(server, [0])[0]
        self.says(worker, "was late: LL 1 waited 200 ms for its rows")


class ServedWorkerTest(WorkerTest):
    flags = ("--direct=none",)


if __name__ == "__main__":
    harness.main()
