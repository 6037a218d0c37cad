"""ep-bench against a real ep-server: every combination is right, failures are told apart and cleaned up."""
import glob
import json
import os
import signal
import subprocess
import tempfile
import unittest

import harness

TEXT = os.path.join(harness.ROOT, "tests", "data", "text.txt")
CASE_KEYS = {
    "mode", "layout", "dtype", "scales", "pass", "tokens", "verified", "mismatches", "p50_us", "p90_us", "p99_us",
    "pair_us", "dispatch_p50_us", "combine_p50_us", "service_us", "wire_gbps", "logical_gbps", "buffer_bytes",
    "max_error", "max_bound_ratio"}
LL_LAYOUTS = ["expert-major", "rank-major", "packed"]
HT_LAYOUTS = ["packed", "flat"]
ALL_DTYPES = "bf16,fp16,fp32,fp8,fp16-to-fp8,fp32-to-fp8,fp8-given"
# Nothing about these sizes is a multiple of anything.
ODD = ["--ranks=3", "--experts=60", "--hidden=2880", "--top-k=6"]
QUICK = ["--hidden=256", "--experts=16", "--top-k=4", "--iters=4", "--warmup=1"]


class BenchCase(harness.TestCase):
    def bench(self, *flags, timeout=120.0, **more):
        if "--spawn" in flags and harness.SCALE > 1:  # its ranks wait for each other as much longer
            flags = ("--timeout-ms=%d" % (10000 * harness.SCALE), *flags)
        result = self.run_cmd(["ep-bench", *flags], timeout=timeout, **more)
        for word in harness.COMPLAINTS + ("wait status", "left behind"):
            self.assertNotIn(word, result.err, result)
        return result

    def bench_json(self, *flags, code=0, **more):
        result = self.bench("--output=json", *flags, **more)
        self.assertEqual(result.code, code, result)
        return json.loads(result.out)

    def groups(self, server):
        result = self.run_cmd(["ep-admin", "group", "list", "--output=json"], server=server)
        self.assertEqual(result.code, 0, result)
        return json.dumps(json.loads(result.out))

    def ops(self, server):
        """Ops that the server's ranks have executed."""
        result = self.run_cmd(["ep-admin", "stats", "--output=json"], server=server)
        self.assertEqual(result.code, 0, result)
        return sum(op["count"] for rank in json.loads(result.out)["ranks"] for op in rank["ops"])


    def find_workers(self, bench):
        """Pids of the workers, by rank."""
        found = {}
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                with open(path) as f:
                    words = f.read().split("\0")
                with open(os.path.dirname(path) + "/stat") as f:
                    parent = int(f.read().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == bench.pid and len(words) > 1 and words[1].startswith("--worker="):
                found[int(words[1][len("--worker="):].split(",")[0])] = int(os.path.basename(os.path.dirname(path)))
        return found


class Verification(BenchCase):
    def test_the_executor_asked_for_must_exist(self):
        result = self.bench("--spawn", *QUICK, "--tokens=1", "--executor=direct")
        self.assertNotEqual(result.code, 0)
        self.assertIn("direct", result.err)
        report = self.bench_json("--spawn", *QUICK, "--tokens=1", "--executor=server", "--backend=host")
        self.assertEqual((report["backend"], report["executor"]), ("host", "server"))

    def test_every_combination_of_an_odd_shape_is_right(self):
        report = self.bench_json("--spawn", *ODD, "--tokens=77", "--dtypes=" + ALL_DTYPES, "--zero-rank=1",
                                 "--drop=0.3", "--alignment=8", "--iters=4", "--warmup=1")
        self.assertTrue(report["ok"])
        seen = {(c["mode"], c["layout"], c["dtype"]) for c in report["cases"]}
        expected = {("ll", layout, d) for layout in LL_LAYOUTS for d in ALL_DTYPES.split(",")}
        expected |= {("ht", layout, d) for layout in HT_LAYOUTS for d in ALL_DTYPES.split(",")}
        self.assertEqual(seen, expected)
        for case in report["cases"]:
            with self.subTest(**{k: case[k] for k in ("mode", "layout", "dtype")}):
                self.assertTrue(case["verified"])
                self.assertEqual(case["mismatches"], 0)
                self.assertGreater(case["max_error"], 0)  # sums were rounded, and by no more than they may be
                self.assertLessEqual(case["max_bound_ratio"], 1)

    def test_a_rank_without_tokens_sends_gradients_back(self):
        report = self.bench_json("--spawn", *ODD, "--tokens=17", "--modes=ht", "--passes=backward", "--zero-rank=1",
                                 "--iters=3", "--warmup=0")
        self.assertTrue(report["ok"])
        self.assertEqual({c["layout"] for c in report["cases"]}, set(HT_LAYOUTS))

    def test_scales_of_both_formats_are_right(self):
        report = self.bench_json("--spawn", "--ranks=3", "--experts=20", "--hidden=1040", "--top-k=4", "--tokens=19",
                                 "--dtypes=bf16,fp8,fp16-to-fp8,fp32-to-fp8,fp8-given", "--scales=fp32,ue8m0",
                                 "--drop=0.3", "--alignment=8", "--iters=2", "--warmup=1")
        self.assertTrue(report["ok"])
        seen = {(c["mode"], c["layout"], c["dtype"], c["scales"]) for c in report["cases"]}
        places = [("ll", layout) for layout in LL_LAYOUTS] + [("ht", layout) for layout in HT_LAYOUTS]
        expected = {place + ("bf16", None) for place in places}
        expected |= {place + (dtype, scales) for place in places for scales in ("fp32", "ue8m0")
                     for dtype in ("fp8", "fp16-to-fp8", "fp32-to-fp8", "fp8-given")}
        self.assertEqual(seen, expected)
        self.assertEqual(len(report["cases"]), len(expected))
        self.assertTrue(all(c["verified"] and c["mismatches"] == 0 for c in report["cases"]), report)
        hashes = {(c["mode"], c["layout"], c["dtype"], c["scales"]): c["hash"] for c in report["cases"]}
        for place in places:
            self.assertNotEqual(hashes[place + ("fp8", "fp32")], hashes[place + ("fp8", "ue8m0")])

    def test_backward_passes_are_right(self):
        flags = ["--spawn", "--ranks=3", "--experts=20", "--hidden=528", "--top-k=4", "--tokens=0,19", "--drop=0.2",
                 "--dtypes=" + ALL_DTYPES, "--alignment=8", "--iters=2", "--warmup=1"]
        report = self.bench_json(*flags, "--passes=backward,forward")
        self.assertTrue(report["ok"], report)
        seen = {(c["mode"], c["layout"], c["dtype"], c["pass"]) for c in report["cases"]}
        expected = {("ll", layout, d, "forward") for layout in LL_LAYOUTS for d in ALL_DTYPES.split(",")}
        expected |= {("ht", layout, d, p) for layout in HT_LAYOUTS for d in ALL_DTYPES.split(",")
                     for p in ("forward", "backward")}
        self.assertEqual(seen, expected)
        self.assertTrue(all(c["verified"] and c["mismatches"] == 0 for c in report["cases"]), report)
        self.assertTrue(all(c["max_bound_ratio"] <= 1 for c in report["cases"]), report)
        again = self.bench_json(*flags, "--passes=backward")
        backward = [c["hash"] for c in report["cases"] if c["pass"] == "backward"]
        self.assertEqual([c["hash"] for c in again["cases"]], backward)
        forward = [c["hash"] for c in report["cases"] if (c["mode"], c["pass"]) == ("ht", "forward")]
        self.assertTrue(all(a != b for a, b in zip(forward, backward)))

    def test_a_bias_is_in_every_combine(self):
        flags = ["--spawn", *ODD, "--iters=2", "--warmup=1", "--tokens=5", "--dtypes=" + ALL_DTYPES,
                 "--passes=forward,backward", "--drop=0.1"]
        hashes = []
        for bias in ([], ["--bias"]):
            report = self.bench_json(*flags, *bias)
            self.assertTrue(report["ok"], report)
            self.assertEqual(report["config"]["bias"], bool(bias))
            hashes.append([c["hash"] for c in report["cases"]])
        self.assertEqual(len(hashes[0]), 7 * (3 + 2 * 2))
        self.assertFalse(set(hashes[0]) & set(hashes[1]), hashes)

    def test_batches_of_any_size(self):
        report = self.bench_json("--spawn", *ODD, "--tokens=0,1,2,129", "--iters=3", "--warmup=0")
        self.assertTrue(all(c["verified"] for c in report["cases"]), report)
        self.assertEqual({c["tokens"] for c in report["cases"]}, {0, 1, 2, 129})

    def test_one_rank_and_more_experts_than_tokens_of_it(self):
        report = self.bench_json("--spawn", "--ranks=1", "--experts=7", "--top-k=7", "--hidden=64", "--tokens=5",
                                 "--iters=3")
        self.assertTrue(report["ok"], report)

    def test_more_ranks_than_experts(self):
        report = self.bench_json("--spawn", "--ranks=5", "--experts=3", "--top-k=2", "--hidden=64", "--tokens=9",
                                 "--iters=3")
        self.assertTrue(report["ok"], report)

    def test_every_routing_is_right(self):
        for routing in ("uniform", "zipf:1.5", "hot:3", "deepseek-v3", "text:" + TEXT):
            with self.subTest(routing=routing):
                report = self.bench_json("--spawn", *QUICK, "--tokens=40", "--routing=" + routing)
                self.assertTrue(report["ok"], report)
                self.assertEqual(report["config"]["routing"], routing)

    def test_two_runs_give_the_same_bits(self):
        flags = ["--spawn", *QUICK, "--ranks=3", "--tokens=33", "--dtypes=bf16,fp8"]
        first, second = self.bench_json(*flags), self.bench_json(*flags)
        self.assertEqual([c["hash"] for c in first["cases"]], [c["hash"] for c in second["cases"]])
        other = self.bench_json(*flags, "--seed=2")
        for a, b in zip(first["cases"], other["cases"]):
            self.assertNotEqual(a["hash"], b["hash"])

    def test_a_trace_replays_what_was_recorded(self):
        flags = ["--spawn", *QUICK, "--tokens=20"]
        trace = self.path("trace")
        recorded = self.bench_json(*flags, "--routing=zipf:1.2", "--drop=0.2", "--record=" + trace)
        with open(trace) as f:
            self.assertEqual(f.readline(), "ep-trace 1 ranks 2 experts 16 top_k 4\n")
            self.assertEqual(sum(1 for _ in f), 40)
        replayed = self.bench_json(*flags, "--routing=trace:" + trace)
        self.assertEqual([c["hash"] for c in recorded["cases"]], [c["hash"] for c in replayed["cases"]])


class Output(BenchCase):
    def test_json_is_one_object_with_what_is_promised(self):
        report = self.bench_json("--spawn", *QUICK, "--tokens=1,8")
        self.assertTrue({"ok", "config", "cases"} <= set(report))
        for case in report["cases"]:
            self.assertTrue(CASE_KEYS <= set(case), CASE_KEYS - set(case))
            self.assertGreater(case["p50_us"], 0)
            self.assertLessEqual(case["p50_us"], case["p99_us"])
            self.assertGreater(case["pair_us"], 0)
            self.assertGreater(case["buffer_bytes"], 0)
            self.assertGreater(case["logical_gbps"], 0)
        self.assertEqual(report["config"]["ranks"], 2)

    def test_csv_has_a_line_per_case(self):
        result = self.bench("--spawn", *QUICK, "--tokens=1,8", "--output=csv")
        lines = result.out.splitlines()
        self.assertEqual(len(lines), 1 + 2 * 5, result)
        width = len(lines[0].split(","))
        for line in lines:
            self.assertEqual(len(line.split(",")), width, line)
        self.assertTrue(lines[0].endswith(",bias,sms,nodes"), lines[0])
        self.assertTrue(all(line.endswith(",no,,1x2") for line in lines[1:]), lines)

    def test_on_cpus_ht_ops_fill_no_multiprocessors(self):
        result = self.bench("--output=json", "--spawn", *QUICK, "--tokens=1", "--layouts=packed", "--ht-sms=4,0")
        report = json.loads(result.out)
        self.assertTrue(report["ok"], report)
        self.assertIn("--ht-sms: of no effect, ops of the host backend fill no multiprocessors", result.err)
        self.assertEqual([(c["mode"], c["sms"]) for c in report["cases"]], [("ll", None), ("ht", None), ("ht", None)])

    def test_the_table_defines_its_numbers(self):
        result = self.bench("--spawn", *QUICK, "--tokens=8", "--modes=ll", "--layouts=rank-major", "--bias")
        self.assertEqual(result.code, 0, result)
        for word in ("nodes 1x2,", "with bias", "SMS", "rank-major", "yes", "WIRE GB/s", "each (token, rank) once",
                     "the executor's own time"):
            self.assertIn(word, result.out)

    def test_unverified_is_not_called_verified(self):
        report = self.bench_json("--spawn", *QUICK, "--tokens=8", "--no-verify")
        self.assertTrue(report["ok"])
        self.assertFalse(any(c["verified"] for c in report["cases"]))

    @unittest.skipIf(harness.SCALE >= 5, "its full-size cases take minutes in so slow a build")
    def test_reference_figures_stand_beside_their_bounds(self):
        report = self.bench_json("--spawn", *QUICK, "--tokens=1", "--modes=ll", "--layouts=packed", "--reference")
        figures = {f["name"]: f for f in report["reference"]}
        self.assertEqual(figures["rpc_unary_p50"]["less_than"], 300)
        self.assertEqual(figures["attach"]["less_than"], 10)
        self.assertEqual(figures["ll_t1_round_trip_p50"]["less_than"], 100)
        self.assertIn("at_least", figures["payload_copy"])
        for name in ("memcpy_one_thread", "memcpy_all_threads", "futex_round_trip_p50"):
            self.assertGreater(figures[name]["value"], 0)


class Flags(BenchCase):
    def test_bad_flags_are_refused_by_name(self):
        cases = [
            ("--ranks=0", "--ranks"), ("--ranks=65", "--ranks"), ("--experts=x", "--experts"),
            ("--hidden=-1", "--hidden"), ("--top-k=17", "--top-k"), ("--tokens=1,,2", "--tokens"),
            ("--soak=0", "--soak"), ("--soak-ops=-1", "--soak-ops"), ("--soak-kill=1", "--soak-kill"),
            ("--modes=xl", "--modes"), ("--passes=up", "--passes"), ("--layouts=round", "--layouts"),
            ("--dtypes=int8", "--dtypes"), ("--ht-sms=4,,0", "--ht-sms"), ("--ht-sms=1025", "--ht-sms"),
            ("--routing=zipf", "--routing"), ("--routing=text:/nowhere", "--routing"), ("--iters=0", "--iters"),
            ("--seed=1x", "--seed"), ("--drop=1.5", "--drop"), ("--alignment=3", "--alignment"),
            ("--output=xml", "--output"), ("--kill=1", "--kill"), ("--timeout-ms=0", "--timeout-ms"),
            ("--ranks=+2", "--ranks +2"), ("--iters= 5", "--iters"), ("--kill=-1@2", "--kill -1@2"),
            ("--kill=1@ 2", "--kill 1@ 2"), ("--kill=1@4294967296", "--kill"), ("--server=unix:", "--server unix:"),
            ("--server=localhost:1", "--server"), ("--nonsense", "--nonsense"), ("stray", "stray")]
        for flag, named in cases:
            with self.subTest(flag=flag):
                spawn = ["--spawn"] if flag.startswith("--routing=text") else []
                result = self.bench(flag, *spawn)
                self.assertEqual(result.code, 2, result)
                self.assertIn(named, result.err)
                self.assertEqual(result.out, "")

    def test_what_cannot_be_written_to_standard_output_is_an_error(self):
        run = ["--spawn", *QUICK, "--tokens=1", "--modes=ll", "--layouts=packed"]
        for program, flags in (("ep-bench", ["--help"]), ("ep-bench", ["--version"]), ("ep-bench", run),
                               ("ep-bench", [*run, "--output=json"]), ("worker", ["--help"])):
            with self.subTest(program=program, flags=flags), open("/dev/full", "w") as full:
                done = subprocess.run([harness.binary(program), *flags], stdout=full, stderr=subprocess.PIPE, text=True,
                                      env=harness.environment())
                self.assertEqual(done.returncode, 1, done)
                self.assertEqual(done.stderr.splitlines()[-1],
                                 program + ": cannot write to standard output: No space left on device")

    def test_what_does_not_fit_together_is_refused(self):
        for flags, named in ([["--zero-rank=2"], "--zero-rank"], [["--kill=2@0"], "--kill"],
                             [["--soak=1", "--kill=0@0"], "--kill"],
                             [["--soak=1", "--passes=backward"], "--passes"],
                             [["--soak=1", "--no-verify"], "--no-verify"],
                             [["--soak=1", "--ht-sms=4,0"], "--ht-sms"],
                             [["--soak=1", "--soak-kill=1", "--ranks=1"], "--soak-kill"],
                             [["--kill=0@9", "--tokens=1"], "--kill"], [["--kill=0@0", "--ranks=1"], "--kill"],
                             [["--top-k=9", "--experts=8"], "top_k"], [["--routing=hot:64"], "--routing"]):
            with self.subTest(flags=flags):
                result = self.bench("--spawn", *flags)
                self.assertEqual(result.code, 2, result)
                self.assertIn(named, result.err)

    def test_combinations_that_do_not_exist_are_left_out(self):
        result = self.bench("--modes=ll", "--layouts=flat")
        self.assertEqual(result.code, 2, result)
        self.assertIn("--layouts", result.err)
        result = self.bench("--modes=ll", "--passes=backward")
        self.assertEqual(result.code, 2, result)
        self.assertIn("--passes", result.err)
        report = self.bench_json("--spawn", *QUICK, "--tokens=1", "--layouts=flat,packed")
        self.assertEqual([(c["mode"], c["layout"]) for c in report["cases"]],
                         [("ll", "packed"), ("ht", "packed"), ("ht", "flat")])

    def test_a_malformed_trace_is_named_by_line_and_field(self):
        trace = self.write("trace", "ep-trace 1 ranks 1 experts 16 top_k 4\n0 0 1:1 2:1 3:1 99:1\n")
        result = self.bench("--spawn", *QUICK, "--routing=trace:" + trace)
        self.assertEqual(result.code, 2, result)
        self.assertIn(trace + ":2: expert of choice 3 is '99'", result.err)

    def test_without_a_server_it_says_where_it_looked(self):
        address = "unix:" + self.path("none.sock")
        result = self.bench("--server=" + address)
        self.assertEqual(result.code, 4, result)
        self.assertIn(self.path("none.sock"), result.err)


class Groups(BenchCase):
    def test_its_own_group_is_gone_afterwards(self):
        server = self.start_server("--host-ranks=4")
        report = self.bench_json(*QUICK, "--tokens=4", server=server)
        self.assertTrue(report["config"]["group"].startswith("bench-"))
        self.assertNotIn("bench-", self.groups(server))

    def test_sizes_come_from_a_group_that_is_there(self):
        server = self.start_server("--host-ranks=4")
        made = self.run_cmd(["ep-admin", "group", "create", "moe", "--ranks=3", "--experts=20", "--hidden=128",
                             "--top-k=5", "--ll-max-tokens=16", "--ht-max-tokens=64", "--wait=10s"], server=server)
        self.assertEqual(made.code, 0, made)
        report = self.bench_json("--group=moe", "--tokens=16", "--iters=4", "--dtypes=bf16,fp8", server=server)
        self.assertTrue(report["ok"], report)
        self.assertEqual([report["config"][k] for k in ("group", "ranks", "experts", "hidden", "top_k")],
                         ["moe", 3, 20, 128, 5])
        self.assertIn("moe", self.groups(server))
        report = self.bench_json("--group=moe", "--iters=4", server=server)  # what the group takes of the defaults
        self.assertEqual({(c["mode"], c["tokens"]) for c in report["cases"]}, {("ll", 1), ("ht", 1), ("ht", 32)})
        for flags, named in ((["--ranks=2"], "--ranks"), (["--tokens=17"], "--tokens"), (["--dtypes=fp32"], "--dtypes")):
            result = self.bench("--group=moe", *flags, server=server)
            self.assertEqual(result.code, 2, result)
            self.assertIn(named, result.err)

    def test_ranks_are_found_at_the_server_of_their_node(self):
        there, other = (self.start_server("--host-ranks=2", "--name=" + name, name=name) for name in "ab")
        report = self.bench_json(*QUICK, "--tokens=4", "--server=" + other.address, "--server=" + there.address)
        self.assertTrue(report["ok"], report)
        made = self.run_cmd(["ep-admin", "group", "create", "moe", "--ranks=2", "--experts=8", "--hidden=128",
                             "--top-k=2", "--wait=10s"], server=there)
        self.assertEqual(made.code, 0, made)
        self.assertTrue(self.bench_json("--group=moe", "--tokens=4", "--iters=4", "--server=" + there.address,
                                        "--server=" + other.address)["ok"])

    def test_redundant_experts_are_verified_too(self):
        server = self.start_server("--host-ranks=3")
        homes = [{"expert": e, "rank": (e * 2 + 1) % 3} for e in range(10)]
        homes += [{"expert": 7, "rank": r} for r in (1, 2)] + [{"expert": 2, "rank": 0}]
        spec = self.write("spec.json", json.dumps({
            "ranks": 3, "experts": 10, "hidden": 128, "top_k": 4, "ll_max_tokens": 16, "ht_max_tokens": 32,
            "placement": {"strategy": "explicit", "homes": homes}}))
        made = self.run_cmd(["ep-admin", "group", "create", "twice", "--file=" + spec, "--wait=10s"], server=server)
        self.assertEqual(made.code, 0, made)
        report = self.bench_json("--group=twice", "--tokens=15", "--iters=4", "--dtypes=bf16,fp8",
                                 "--routing=zipf:1", server=server)
        self.assertTrue(report["ok"], report)

    def test_a_group_that_is_not_there(self):
        server = self.start_server()
        result = self.bench("--group=nobody", server=server)
        self.assertEqual(result.code, 3, result)
        self.assertIn("nobody", result.err)


class Deaths(BenchCase):
    def test_a_killed_worker_costs_the_others_nothing(self):
        for flags in (["--modes=ll", "--layouts=rank-major"], ["--modes=ht", "--layouts=flat"],
                      ["--modes=ll", "--layouts=expert-major", "--dtypes=fp8"],
                      ["--modes=ht", "--layouts=packed", "--passes=backward"]):
            with self.subTest(flags=flags):
                report = self.bench_json("--spawn", *ODD, "--tokens=16,24", *flags, "--iters=20", "--kill=1@1")
                kill = report["kill"]
                self.assertTrue(report["ok"], report)
                self.assertTrue(kill["done"])
                self.assertTrue(kill["masked_verified"])
                self.assertEqual((kill["survivors"], kill["ops_failed"]), (2, 0))
                self.assertEqual(kill["ops_finished"], kill["ops_expected"])
                self.assertGreater(kill["attach_us"], 0)
                self.assertTrue(all(c["verified"] for c in report["cases"]))

    def start_long(self, server, *flags):
        bench = self.spawn(["ep-bench", *QUICK, "--ranks=3", "--tokens=8", "--iters=100000", "--modes=ll", *flags],
                           server=server)
        workers = harness.wait_until(lambda: len(self.find_workers(bench)) == 3 and self.find_workers(bench),
                                     "three workers")
        harness.wait_until(lambda: self.ops(server) > 100, "ops under way")
        return bench, workers

    def test_a_worker_that_dies_is_noticed(self):
        server = self.start_server("--host-ranks=3")
        bench, workers = self.start_long(server)
        os.kill(workers[2], signal.SIGKILL)
        self.assertEqual(bench.wait(), 1, bench.log())
        self.assertIn("rank 2: its worker was ended by signal 9", bench.log() + bench.out())
        self.assertNotIn("bench-", self.groups(server))

    def test_a_worker_that_hangs_is_noticed(self):
        server = self.start_server("--host-ranks=3")
        bench, workers = self.start_long(server, "--timeout-ms=3000")
        os.kill(workers[1], signal.SIGSTOP)
        self.assertEqual(bench.wait(90), 4, bench.log())
        self.assertIn("rank 1", bench.log() + bench.out())
        self.assertNotIn("bench-", self.groups(server))

    def test_an_interrupt_leaves_nothing_behind(self):
        server = self.start_server("--host-ranks=3")
        bench, workers = self.start_long(server)
        bench.signal(signal.SIGINT)
        self.assertEqual(bench.wait(), 1, bench.log())
        self.assertNotIn("bench-", self.groups(server))
        for pid in workers.values():
            self.assertFalse(os.path.exists("/proc/%d" % pid))

    def test_a_private_server_goes_with_its_run(self):
        before = set(os.listdir(tempfile.gettempdir()))
        self.assertEqual(self.bench("--spawn", *QUICK, "--tokens=1").code, 0)
        left = [n for n in set(os.listdir(tempfile.gettempdir())) - before if n.startswith("ep-bench.")]
        self.assertEqual(left, [])

    def test_workers_end_with_a_coordinator_that_was_killed(self):
        server = self.start_server("--host-ranks=3")
        bench, workers = self.start_long(server)
        bench.kill()
        for pid in workers.values():
            harness.wait_until(lambda: not os.path.exists("/proc/%d" % pid) or "Z" in state_of(pid), "worker %d" % pid)


class Soaks(BenchCase):
    SHAPE = ["--ranks=3", "--experts=20", "--hidden=272", "--top-k=4", "--tokens=24", "--alignment=8"]

    def soak(self, *flags):
        report = self.bench_json("--spawn", *self.SHAPE, *flags)
        self.assertTrue(report["ok"], report)
        self.assertEqual(report["soak"]["wrong"], 0)
        return report["soak"]

    def test_random_ops_of_both_modes_are_right(self):
        soak = self.soak("--soak=5")
        self.assertEqual({(l["mode"], l["layout"]) for l in soak["layouts"]},
                         {("ll", layout) for layout in LL_LAYOUTS} | {("ht", layout) for layout in HT_LAYOUTS})
        self.assertGreater(soak["dropped"], 0)
        self.assertGreater(soak["ops_per_second"], 0)
        self.assertEqual((soak["kills"], soak["masked_dispatches"]), (0, 0))

    def test_the_same_seed_gives_the_same_ops(self):
        first, again = self.soak("--soak-ops=40", "--seed=7"), self.soak("--soak-ops=40", "--seed=7")
        self.assertEqual(first["steps"], 40)
        self.assertEqual((first["layouts"], first["dropped"]), (again["layouts"], again["dropped"]))
        self.assertEqual(sum(l["dispatches"] for l in first["layouts"]), 40 * 3)
        self.assertNotEqual(self.soak("--soak-ops=40", "--seed=8")["layouts"], first["layouts"])

    def test_only_what_was_asked_for_is_soaked(self):
        soak = self.soak("--soak-ops=32", "--modes=ll", "--layouts=packed", "--dtypes=bf16")
        self.assertEqual([(l["mode"], l["layout"]) for l in soak["layouts"]], [("ll", "packed")])

    def test_killed_workers_cost_the_others_nothing(self):
        soak = self.soak("--soak=%d" % (5 * max(1, harness.SCALE)), "--soak-kill=1")
        self.assertGreater(soak["kills"], 0)
        self.assertGreater(soak["masked_dispatches"], 0)

    def test_a_rank_that_hangs_fails_the_soak_by_op(self):
        server = self.start_server("--host-ranks=3")
        bench = self.spawn(["ep-bench", *self.SHAPE, "--soak=60", "--timeout-ms=%d" % (3000 * harness.SCALE)],
                           server=server)
        workers = harness.wait_until(lambda: len(self.find_workers(bench)) == 3 and self.find_workers(bench),
                                     "three workers")
        harness.wait_until(lambda: self.ops(server) > 50, "ops under way")
        os.kill(workers[1], signal.SIGSTOP)
        self.assertNotEqual(bench.wait(60), 0, bench.log())
        # Rank 2 may wait for rank 0, which waits for rank 1: the server hears of both.
        self.assertRegex(bench.log(), r"rank [01] was late")
        self.assertIn("late_rank=1", server.log())
        self.assertRegex(bench.log(), r"op \d+ of rank [02] \(.*again: --seed=1 --soak-ops=\d+")
        self.assertNotIn("bench-", self.groups(server))

    def test_other_outputs_have_it_too(self):
        flags = ["--spawn", *self.SHAPE, "--soak-ops=32"]
        self.assertIn("\nsoak: 0 wrong\n", self.bench(*flags).out)
        lines = self.bench(*flags, "--output=csv").out.splitlines()
        self.assertEqual(lines[0].split(",")[-2:], ["kills", "wrong"])
        self.assertEqual({len(line.split(",")) for line in lines}, {12})


def state_of(pid):
    try:
        with open("/proc/%d/stat" % pid) as f:
            return f.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


if __name__ == "__main__":
    harness.main()
