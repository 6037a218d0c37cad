#!/usr/bin/python3
"""Groups over several nodes: three ep-servers on one etcd, workers at each."""

import re
import shutil
import signal
import unittest

import harness

NAMES = ("a", "b", "c")


class SpanCase(harness.TestCase):
    lost_after = harness.NOT_LOST
    names = NAMES

    def setUp(self):
        super().setUp()
        self.etcd = harness.Etcd(self.box)
        self.servers = {name: self.start(name) for name in self.names}
        for server in self.servers.values():
            server.wait_ready()

    def start(self, name, store=None):
        return self.start_server("--store=" + (store or self.etcd.url("/span")), "--name=" + name, "--host-ranks=2",
                                 self.lost_after, name=name, ready=False)

    # ---- operators

    def admin(self, name, *args, code=0):
        result = self.operate(self.servers[name], *args)
        self.assertEqual(result.code, code, result)
        return result

    def create(self, name="a", *flags, ranks=6, code=0):
        return self.admin(name, "group", "create", "moe", "--ranks=%d" % ranks, "--experts=12", "--hidden=64",
                          "--top-k=2", "--ll-max-tokens=16", "--ht-max-tokens=64", "--timeout-ms=60000", *flags,
                          code=code)

    def group(self, name):
        return self.admin(name, "group", "get", "moe", "-o", "json").json()

    def status(self, name):
        return self.group(name)["status"]

    def nodes(self, name):
        return [rank["node"] for rank in self.status(name)["ranks"]]

    def states(self, name):
        return [rank["state"].replace("RANK_STATE_", "") for rank in self.status(name)["ranks"]]

    def leader(self):
        listed = self.admin("a", "node", "list", "-o", "json").json()["nodes"]
        return next(node["name"] for node in listed if node.get("leader"))

    def wait_states(self, states, names=NAMES):
        for name in names:
            harness.wait_until(lambda: self.states(name) == states,
                               lambda: "%s at %s: %s" % (states, name, self.status(name)), interval=0.05)

    # ---- workers

    def worker(self, name, rank, *flags, tag="", mode="both"):
        where = [] if rank is None else ["--rank=%d" % rank]
        process = self.spawn(["worker", "--group=moe", "--pause-ms=5", "--mode=" + mode, *where, *flags], server=self.servers[name],
                             name="w%s%s" % (rank, tag))
        harness.wait_until(lambda: "attached" in process.out() or not process.alive(),
                           lambda: "worker %s attached: %s%s" % (rank, process.out(), process.log()))
        return process

    def workers(self, mode="both"):
        """One at every rank, on its node."""
        return [self.worker(node, rank, mode=mode) for rank, node in enumerate(self.nodes("a"))]

    def wait_line(self, process, pattern):
        """What it prints from now on."""
        start = len(process.out())
        harness.wait_until(lambda: re.search(pattern, process.out()[start:]),
                           lambda: "%s in:\n%s%s" % (pattern, process.out(), process.log()), interval=0.05)

    def check_steps(self, *processes, absent=0):
        for process in processes:
            self.wait_line(process, r"absent %d, failures 0 .* [1-9]\d* steps.* 0 wrong" % absent)


NEEDS_ETCD = unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")


@NEEDS_ETCD
class SpanTest(SpanCase):
    def test_three_servers_form_one_group_and_workers_exchange_tokens(self):
        self.create()
        for name in NAMES:
            self.assertEqual(self.nodes(name), ["a", "a", "b", "b", "c", "c"])
            self.assertEqual(self.status(name)["phase"], "PHASE_READY")
        self.check_steps(*self.workers())
        self.wait_states(["ATTACHED"] * 6)

    def test_a_rank_is_claimed_on_its_node(self):
        self.create()
        refused = self.run_cmd(["worker", "--group=moe", "--rank=2", "--once"], server=self.servers["a"])
        self.assertIn("rank 2 of group moe is on node b, this is node a", refused.err)
        any_rank = self.worker("c", None)
        self.assertRegex(any_rank.out(), "rank 4 epoch 1: attached")

    def test_a_killed_worker_is_left_and_its_successor_taken_in(self):
        self.create()
        workers = self.workers("ll")
        self.check_steps(*workers)
        workers[3].kill()
        stay = workers[:3] + workers[4:]
        self.check_steps(*stay, absent=1)
        self.wait_states(["ATTACHED"] * 3 + ["ABSENT"] + ["ATTACHED"] * 2)
        self.assertIn("its worker died", self.status("c")["reason"])
        self.check_steps(self.worker("b", 3, tag="again", mode="ll"), *stay)
        self.wait_states(["ATTACHED"] * 6)
        self.assertEqual(self.status("c")["phase"], "PHASE_READY")
        self.assertEqual(self.status("c")["epoch"], 1)

    def test_a_newcomer_begins_where_the_others_are_in_their_step(self):
        self.create()
        workers = [self.worker(node, rank, "--pause-ms=0") for rank, node in enumerate(self.nodes("a"))]
        self.check_steps(*workers)
        for again in "abcd":  # each time they are in the first half of a step or in the second one
            workers[3].kill()
            self.wait_states(["ATTACHED"] * 3 + ["ABSENT"] + ["ATTACHED"] * 2)
            workers[3] = self.worker("b", 3, "--pause-ms=0", tag=again)
            self.check_steps(*workers)  # nobody was late

    def test_when_all_have_left_every_rank_is_expected_again(self):
        self.create()
        workers = self.workers()
        self.check_steps(*workers)
        for worker in workers:
            self.assertEqual(worker.stop(), 0, worker.log())
        self.wait_states(["EXPECTED"] * 6)
        self.assertEqual(self.status("b")["epoch"], 2)
        self.assertEqual(self.status("b")["phase"], "PHASE_READY")

    def test_changes_are_made_at_any_server(self):
        for name in NAMES:
            self.create(name, "--dry-run")
            self.create(name)
            self.assertEqual(self.status(name)["phase"], "PHASE_READY")
            self.create(name, code=1)
            self.admin(name, "group", "update", "moe", "--timeout-ms=77")
            self.assertEqual(self.group(name)["spec"]["timeout_ms"], 77)
            self.admin(name, "group", "update", "moe", "--hidden=128")
            self.assertEqual(self.status(name)["epoch"], 2)
            self.admin(name, "group", "delete", "moe")
            self.admin(name, "group", "get", "moe", code=3)

    def test_an_update_goes_on_beside_the_old_epoch(self):
        self.create()
        workers = self.workers()
        self.check_steps(*workers)
        self.admin("b", "group", "update", "moe", "--ll-max-tokens=32")
        self.check_steps(*workers)  # which move to the new epoch
        self.wait_states(["ATTACHED"] * 6)
        for name in NAMES:
            self.assertEqual(self.status(name)["epoch"], 2)
            harness.wait_until(lambda: not self.status(name).get("draining_epochs"), "the old epoch retired")

    def test_a_deletion_reaches_workers_everywhere(self):
        self.create()
        workers = self.workers()
        self.check_steps(*workers)
        refused = self.admin("a", "group", "delete", "moe", code=1)
        self.assertIn("group moe has 6 workers", refused.err)
        self.admin("a", "group", "delete", "moe", "--force")
        for worker in workers:
            self.assertNotEqual(worker.wait(), 0)
        for name in NAMES:
            harness.wait_until(lambda: "moe" not in self.admin(name, "group", "list").out, "gone at " + name)
        self.create("c")

    def bench(self, *flags):
        """ep-bench with a worker at each rank of a group that it makes at the first server."""
        servers = ["--server=" + server.address for server in self.servers.values()]
        result = self.run_cmd(["ep-bench", *servers, "--ranks=6", "--experts=13", "--hidden=128", "--top-k=3",
                               "--timeout-ms=60000", *flags], timeout=100.0)
        self.assertEqual(result.code, 0, result)
        self.assertNotIn("left behind", result.err)
        return result

    def test_every_result_is_right_over_nodes(self):
        report = self.bench("--tokens=0,1,19", "--dtypes=bf16,fp8", "--passes=forward,backward", "--drop=0.1", "--bias",
                            "--iters=2", "--warmup=1", "--output=json").json()
        self.assertTrue(report["ok"], report)
        self.assertEqual(report["nodes"], "3x2")
        self.assertEqual({case["mode"] for case in report["cases"]}, {"ll", "ht"})

    def test_random_ops_are_right_while_workers_are_killed(self):
        told = self.bench("--modes=ll", "--tokens=16", "--soak=8", "--soak-kill=2")
        self.assertRegex(told.out, r"soak: [1-9]\d* kills")
        self.assertIn("soak: 0 wrong", told.out)

    def test_a_rank_of_a_node_without_a_server_is_told(self):
        self.create()
        told = self.run_cmd(["ep-bench", "--group=moe", "--server=" + self.servers["a"].address], timeout=60.0)
        self.assertEqual(told.code, 2, told)
        self.assertIn("--server: rank 2 of group moe is on node b, and no server of that node was given", told.err)

    def test_each_server_has_metrics_of_its_own_ranks(self):
        self.create()
        workers = [self.worker(NAMES[rank // 2], rank) for rank in range(6)]
        self.wait_states(["ATTACHED"] * 6)
        for at, name in enumerate(NAMES):
            harness.wait_until(lambda: self.ranks_with_ops(name) == {2 * at, 2 * at + 1},
                               lambda: "ops at %s: %s" % (name, self.ranks_with_ops(name)), interval=0.05)
        for worker in workers:
            worker.kill()

    def ranks_with_ops(self, name):
        metrics = self.servers[name].http("/metrics")[2]
        return {int(rank) for rank in re.findall(r'^ep_op_total\{.*rank="(\d+)".*\} [1-9]', metrics, re.M)}

    def test_ranks_are_placed_as_asked(self):
        self.create("a", ranks=2)
        self.assertEqual(len(set(self.nodes("a"))), 1)  # packed
        self.admin("a", "group", "delete", "moe")
        self.create("a", "--placement=spread", ranks=3)
        self.assertEqual(self.nodes("b"), ["a", "b", "c"])
        self.assertIn("a (1 rank), b (1 rank), c (1 rank)", self.admin("c", "group", "get", "moe").out)
        self.admin("a", "group", "delete", "moe")
        homes = "nodes: explicit\nranks: [{rank: 0, node: c}, {rank: 1, node: a}, {rank: 2, node: c}]\n"
        self.create("b", "--placement=" + self.box.write("homes", homes), ranks=3)
        self.assertEqual(self.nodes("a"), ["c", "a", "c"])
        self.admin("a", "group", "delete", "moe")
        refused = self.create("b", ranks=7, code=1)
        self.assertIn("3 nodes that take workers have 6 devices", refused.err)


@NEEDS_ETCD
class CutOffTest(SpanCase):
    """Node c, which does not lead, reaches etcd by a gateway, and no more when that is stopped."""

    names = ("a", "b")

    def setUp(self):
        super().setUp()
        port = harness.free_port()
        self.gateway = self.spawn(["/usr/bin/env", "etcd", "gateway", "start", "--endpoints=" + self.etcd.endpoints(),
                                   "--listen-addr=127.0.0.1:%d" % port])
        harness.wait_until(lambda: "ready to proxy" in self.gateway.log(), "the gateway listens")
        self.servers["c"] = self.start("c", "etcd://127.0.0.1:%d/span" % port)
        self.servers["c"].wait_ready()

    def homes(self):
        return self.box.write("homes", "nodes: explicit\nranks: [{rank: 0, node: a}, {rank: 1, node: b}]\n")

    def test_what_the_leader_has_changed_is_answered_where_it_is_not_seen(self):
        self.gateway.signal(signal.SIGSTOP)
        made = self.create("c", "--placement=" + self.homes(), "-o", "json", ranks=2).json()
        self.assertEqual(made["status"]["epoch"], self.status("a")["epoch"])
        self.assertEqual(made["behind"], "")
        unknown = self.admin("c", "group", "get", "moe", code=3)
        self.assertIn("as far as this server knows: the store does not tell node c what is new", unknown.err)
        changed = self.admin("c", "group", "update", "moe", "--ll-max-tokens=32", "-o", "json").json()
        self.assertEqual(changed["revision"], self.group("a")["revision"])
        self.admin("c", "group", "delete", "moe")

    def test_who_looks_on_is_told_that_it_may_be_old_and_is_not_told_what_is_not_known(self):
        old = "this may be older than what was acknowledged: the store does not tell node c what is new"
        seen = self.admin("c", "--timeout=2s", "group", "watch", "moe", "--until=deleted")
        self.assertNotIn(old, seen.err)
        self.gateway.signal(signal.SIGSTOP)
        self.create("a", "--placement=" + self.homes(), ranks=2)
        self.assertIn(old, self.admin("c", "group", "list").err)
        seen = self.admin("c", "--timeout=3s", "group", "watch", "moe", "--until=deleted", code=4)
        self.assertIn(old, seen.err)
        self.assertIn("moe is not DELETED after 3.0 s: it is not there", seen.err)
        self.gateway.signal(signal.SIGCONT)
        harness.wait_until(lambda: old not in self.admin("c", "group", "list").err, "c is told what is new")
        seen = self.admin("c", "group", "watch", "moe", "--until=ready")
        self.assertNotIn(old, seen.err)


@NEEDS_ETCD
class RestoreTest(SpanCase):
    names = ("a",)
    lost_after = "--lost-after=3s"

    def test_groups_change_after_the_store_was_set_back(self):
        self.create(ranks=1)
        old = self.box.path("old")
        self.etcd.kill(0)
        shutil.copytree(self.box.path("etcd0"), old)
        self.etcd.start(0)
        self.etcd.wait_answers(0)
        for i in range(10):  # terms to come are later ones
            self.update("--timeout-ms=%d" % (50000 + i))
        self.servers["a"].kill()
        self.servers["a"] = self.start("a").wait_ready()
        self.update("--ll-max-tokens=24")
        self.etcd.kill(0)
        shutil.rmtree(self.box.path("etcd0"))
        shutil.copytree(old, self.box.path("etcd0"))
        self.etcd.start(0)
        self.etcd.wait_answers(0)
        self.update("--ll-max-tokens=32")
        self.assertEqual(self.group("a")["spec"]["ll_max_tokens"], 32)

    def update(self, *flags):
        """When there is a leader."""
        def done():
            self.result = self.operate(self.servers["a"], "group", "update", "moe", *flags)
            return self.result.code == 0
        harness.wait_until(done, lambda: self.result, interval=0.2)


@NEEDS_ETCD
class LossTest(SpanCase):
    lost_after = "--lost-after=4s"

    def lose(self, name):
        """Kills a server; the others go on without its ranks.  Then it comes back."""
        others = [other for other in NAMES if other != name]
        self.create()
        workers = dict(zip(("a0", "a1", "b0", "b1", "c0", "c1"), self.workers()))
        stay = [worker for place, worker in workers.items() if place[0] != name]
        self.check_steps(*workers.values())
        self.servers[name].kill()
        self.check_steps(*stay, absent=2)
        for other in others:
            harness.wait_until(lambda: self.status(other)["phase"] == "PHASE_DEGRADED", "degraded")
            self.assertIn("node %s is lost" % name, self.status(other)["reason"])
        self.servers[name] = self.start(name).wait_ready()
        for other in NAMES:
            harness.wait_until(lambda: self.status(other)["phase"] == "PHASE_READY" and
                               self.status(other)["epoch"] > 1, lambda: self.status(other), interval=0.1)
        self.check_steps(*workers.values())  # they come back by themselves
        self.wait_states(["ATTACHED"] * 6)

    def test_a_lost_server_degrades_the_group_and_comes_back_into_a_new_epoch(self):
        self.lose(next(name for name in NAMES if name != self.leader()))

    def test_the_leader_is_lost_and_comes_back(self):
        self.lose(self.leader())


if __name__ == "__main__":
    harness.main()
