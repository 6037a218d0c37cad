#!/usr/bin/python3
"""Attached workers go over to a group's next epoch together, ops going on: ep_advance(), worker --follow and
ep-bench --soak --follow, which checks every result, while an operator changes the group."""

import os
import re
import shutil
import signal
import unittest

import harness

MODULE = os.path.join(os.path.dirname(harness.BIN), "unit", "libep_cuda_cpu.so")
FOR_EVER = 3600  # seconds: it is ended when it has done what was waited for


class TurnCase(harness.TestCase):
    """The group moe, and who looks at it.  self.servers: by name; "a" is asked."""
    env = None

    def admin(self, *args, code=0):
        result = self.operate(self.servers["a"], *args)
        self.assertEqual(result.code, code, result)
        return result

    def create(self, *flags, ranks=3):
        self.admin("group", "create", "moe", "--ranks=%d" % ranks, "--experts=12", "--hidden=128", "--top-k=3",
                   "--ll-max-tokens=16", "--ht-max-tokens=32", "--arena=16MiB", "--timeout-ms=60000", *flags)

    def group(self):
        return self.admin("group", "get", "moe", "-o", "json").json()

    def status(self):
        return self.group()["status"]

    def update(self, *flags):
        """The epoch of the change."""
        self.admin("group", "update", "moe", *flags)
        return self.status()["epoch"]

    def wait_turned(self, epoch):
        """Everybody is in that epoch, and nothing is left of older ones."""
        def turned():
            status = self.status()
            return status["epoch"] == epoch and not status.get("draining_epochs") and status["phase"] != "PHASE_RECONFIGURING"
        harness.wait_until(turned, lambda: "all in epoch %d: %s" % (epoch, self.status()), interval=0.05)

    def turn(self, *flags):
        epoch = self.update(*flags)
        self.wait_turned(epoch)
        return epoch

    def wait_attached(self, ranks):
        harness.wait_until(lambda: [rank["state"] for rank in self.status()["ranks"]] == ["RANK_STATE_ATTACHED"] * ranks,
                           lambda: self.status(), interval=0.05)

    # ---- ep-bench

    def soak(self, *flags, ranks=3):
        servers = ["--server=" + server.address for server in self.servers.values()]
        bench = self.spawn(["ep-bench", *servers, "--group=moe", "--soak=%d" % FOR_EVER, "--follow", "--tokens=4,16,32",
                            "--output=json", *flags], env=self.env)
        self.wait_attached(ranks)
        return bench

    def told(self, bench):
        """[(ops of each rank, kills)], one every few seconds"""
        said = re.findall(r"soak: (\d+) ops of each rank, (\d+) kills", bench.log())
        return [(int(ops), int(kills)) for ops, kills in said]

    def check_soak(self, bench, epochs=None):
        """It goes on for a while, everything was right, and it went over to these epochs (None: to any)."""
        before = len(self.told(bench))
        harness.wait_until(lambda: not bench.alive() or len({ops for ops, _ in self.told(bench)[before:]}) > 1,
                           bench.log)
        bench.signal(signal.SIGINT)
        self.assertEqual(bench.wait(), 0, bench.log())
        report = harness.json.loads(bench.out())
        self.assertTrue(report["ok"], report)
        self.assertEqual(report["soak"]["wrong"], 0)
        if epochs is not None:
            self.assertEqual([turn["epoch"] for turn in report["turns"]["each"]], epochs, report["turns"])
        return report

    def kill_over_changes(self, *flags):
        self.create("--modes=ll")
        bench = self.soak("--soak-kill=2", *flags)
        for tokens in (32, 24, 16):
            self.turn("--ll-max-tokens=%d" % tokens)
        harness.wait_until(lambda: not bench.alive() or any(kills for _, kills in self.told(bench)), bench.log)
        report = self.check_soak(bench)
        self.assertGreaterEqual(report["turns"]["count"], 3)
        self.assertGreater(report["soak"]["kills"], 0)

    # ---- worker

    def worker(self, rank, *flags, node="a", tag=""):
        process = self.spawn(["worker", "--group=moe", "--rank=%d" % rank, "--pause-ms=2", "--mode=both", *flags],
                             env=self.env, server=self.servers[node], name="w%d%s" % (rank, tag))
        harness.wait_until(lambda: "attached" in process.out() or not process.alive(),
                           lambda: "worker %d attached: %s%s" % (rank, process.out(), process.log()))
        return process

    def wait_line(self, process, pattern):
        """What it prints from now on."""
        start = len(process.out())
        harness.wait_until(lambda: re.search(pattern, process.out()[start:]),
                           lambda: "%s in:\n%s%s" % (pattern, process.out(), process.log()), interval=0.05)

    def check_steps(self, *processes, epoch, absent=0):
        for process in processes:
            self.wait_line(process, r"epoch %d: absent %d, failures 0 .* [1-9]\d* steps" % (epoch, absent))
            self.assertNotRegex(process.out(), r"[1-9]\d* wrong")


class OneServerTest(TurnCase):
    def setUp(self):
        super().setUp()
        self.servers = {"a": self.start_server("--host-ranks=5", name="a")}

    def test_modes_come_and_go(self):
        self.create("--modes=ll")
        bench = self.soak()
        epochs = [self.turn("--modes=" + modes) for modes in ("ll,ht", "ht", "ll")]
        report = self.check_soak(bench, epochs)
        self.assertEqual({layout["mode"] for layout in report["soak"]["layouts"]}, {"ll", "ht"})

    def test_sizes_and_placement_of_experts_change(self):
        self.create()
        bench = self.soak()
        homes = self.write("homes", "[[0, 3, 6, 9, 1], [4, 7, 10, 2, 0], [5, 8, 11, 3]]")
        epochs = [self.turn("--ll-max-tokens=32"), self.turn("--placement=" + homes)]
        live = self.update("--timeout-ms=9000")  # which needs no turn
        self.assertEqual(live, epochs[-1])
        epochs.append(self.turn("--placement=contiguous", "--hidden=256"))
        report = self.check_soak(bench, epochs)
        self.assertGreater(report["turns"]["pause_max_us"], 0)

    def test_ranks_come_and_go(self):
        self.create()
        bench = self.soak()
        epochs = [self.turn("--ranks=5"), self.turn("--ranks=2"), self.turn("--ranks=3")]
        report = self.check_soak(bench, epochs)
        self.assertEqual((report["turns"]["workers_added"], report["turns"]["workers_removed"]), (3, 3))

    def test_what_is_changed_while_workers_go_over_does_not_hide_that_they_have(self):
        self.create(ranks=2)
        workers = [self.worker(rank, "--follow") for rank in range(2)]
        self.update("--ranks=3")
        for i in range(40):
            self.update("--timeout-ms=%d" % (50000 + i))
        workers.append(self.worker(2, "--follow"))
        harness.wait_until(lambda: self.status()["phase"] == "PHASE_READY", lambda: str(self.status()))
        for worker in workers:
            worker.kill()

    def test_two_changes_in_quick_succession(self):
        self.create()
        bench = self.soak()
        first, last = self.update("--ll-max-tokens=32"), self.update("--ll-max-tokens=24")
        self.wait_turned(last)
        report = self.check_soak(bench)
        self.assertIn([turn["epoch"] for turn in report["turns"]["each"]], ([last], [first, last]))

    def test_workers_are_killed_and_replaced_over_changes(self):
        self.kill_over_changes()

    def test_workers_go_over_without_leaving(self):
        self.create()
        workers = [self.worker(rank, "--follow") for rank in range(3)]
        self.check_steps(*workers, epoch=1)
        self.assertEqual(self.turn("--ll-max-tokens=32"), 2)
        self.check_steps(*workers, epoch=2)
        self.turn("--modes=ht")
        self.check_steps(*workers, epoch=3)
        for worker in workers:
            self.assertRegex(worker.out(), r"epoch 2: gone over, 3 ranks")
            self.assertNotRegex(worker.out(), r"epoch \d: left")
        for worker in workers:
            self.assertEqual(worker.stop(), 0, worker.log())

    def test_a_removed_rank_is_told_and_leaves(self):
        self.create()
        workers = [self.worker(rank, "--follow") for rank in range(3)]
        self.check_steps(*workers, epoch=1)
        self.turn("--ranks=2")
        self.assertEqual(workers[2].wait(), 0, workers[2].log())
        self.assertRegex(workers[2].out(), r"has gone over to epoch 2, where this rank has no place here")
        self.assertIn("it ends, as there is no place for it any more: rank is 2: group moe has ranks 0 to 1",
                      workers[2].log())
        self.check_steps(*workers[:2], epoch=2)

    def test_one_that_does_not_follow_holds_nobody_up_when_it_has_left(self):
        self.create("--modes=ll")
        workers = [self.worker(0, "--follow"), self.worker(1, "--follow"), self.worker(2)]
        self.check_steps(*workers, epoch=1)
        self.turn("--ll-max-tokens=32")
        self.check_steps(*workers, epoch=2)
        self.assertIn("gone over", workers[0].out())
        self.assertIn("left", workers[2].out())  # and came back

    def kill_one(self, before):
        self.create("--modes=ll")
        workers = [self.worker(rank, "--follow") for rank in range(3)]
        self.check_steps(*workers, epoch=1)
        if before:
            workers[2].signal(signal.SIGSTOP)  # it attaches to nothing, and its peers wait for it
        epoch = self.update("--ll-max-tokens=32")
        if not before:
            harness.wait_until(lambda: self.status()["ranks"][2]["state"] == "RANK_STATE_ATTACHED", "attached to both")
        workers[2].kill()
        self.check_steps(*workers[:2], epoch=epoch, absent=1)
        self.check_steps(self.worker(2, "--follow", tag="again"), *workers[:2], epoch=epoch)
        self.wait_turned(epoch)

    def test_a_worker_is_killed_before_it_attached_to_the_next_epoch(self):
        self.kill_one(True)

    def test_a_worker_is_killed_after_it_attached_to_the_next_epoch(self):
        self.kill_one(False)

    def test_the_server_goes_away_between_change_and_turn(self):
        self.create()
        workers = [self.worker(rank, "--follow", "--once") for rank in range(3)]
        self.check_steps(*workers, epoch=1)
        self.update("--ll-max-tokens=32")
        self.servers["a"].kill()
        for worker in workers:
            self.assertNotEqual(worker.wait(), 0)


@unittest.skipUnless(os.path.exists(MODULE), "no %s" % MODULE)
class CudaTest(TurnCase):
    """On GPUs, which a module stands in for that computes LL ops on CPUs."""
    env = {"EP_CUDA_MODULE": MODULE}
    executor = "--executor=direct"

    def setUp(self):
        super().setUp()
        self.servers = {"a": self.start_server("--backend=cuda", env=self.env, name="a")}

    def create(self, *flags, ranks=3):
        super().create("--modes=ll", *flags, ranks=ranks)

    def test_sizes_placement_and_ranks_change(self):
        self.create()
        bench = self.soak("--modes=ll", self.executor)
        homes = self.write("homes", "[[0, 3, 6, 9, 1], [4, 7, 10, 2, 0], [5, 8, 11, 3]]")
        epochs = [self.turn("--ll-max-tokens=32"), self.turn("--placement=" + homes),
                  self.turn("--placement=contiguous", "--hidden=256"), self.turn("--ranks=4"), self.turn("--ranks=2")]
        report = self.check_soak(bench, epochs)
        self.assertEqual((report["turns"]["workers_added"], report["turns"]["workers_removed"]), (1, 2))

    def test_workers_are_killed_and_replaced_over_changes(self):
        self.kill_over_changes("--modes=ll", self.executor)

    def test_workers_go_over_without_leaving(self):
        self.create()
        workers = [self.worker(rank, "--follow", "--mode=ll") for rank in range(3)]
        self.check_steps(*workers, epoch=1)
        for tokens in (32, 24):
            self.check_steps(*workers, epoch=self.turn("--ll-max-tokens=%d" % tokens))
        for worker in workers:
            self.assertNotRegex(worker.out(), r"epoch \d: left")
        for worker in workers:
            self.assertEqual(worker.stop(), 0, worker.log())


class ServedCudaTest(CudaTest):
    executor = "--executor=server"

    def create(self, *flags, ranks=3):
        super().create("--direct=none", *flags, ranks=ranks)


@unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")
class SpanTest(TurnCase):
    NAMES = ("a", "b", "c")

    def start_one(self, name, home=None, **more):
        return self.start_server("--store=" + self.etcd.url("/turn"), "--name=" + name, "--host-ranks=3", harness.NOT_LOST,
                                 name=home or name, **more)

    def start(self, n):
        self.etcd = harness.Etcd(self.box)
        self.servers = {name: self.start_one(name, ready=False) for name in self.NAMES[:n]}
        for server in self.servers.values():
            server.wait_ready()

    def change_everything(self, n):
        self.start(n)
        self.create("--placement=spread", "--modes=ll")
        bench = self.soak()
        epochs = [self.turn(*flags) for flags in (["--modes=ll,ht"], ["--ll-max-tokens=32"], ["--ranks=5"], ["--ranks=3"])]
        turns = self.check_soak(bench, epochs)["turns"]
        self.assertGreaterEqual(turns["workers_added"], 2)  # and those of ranks that move to another node
        self.assertEqual(turns["workers_removed"], turns["workers_added"])

    def test_everything_changes_over_two_servers(self):
        self.change_everything(2)

    def test_everything_changes_over_three_servers(self):
        self.change_everything(3)

    def test_ranks_move_to_other_nodes(self):
        self.start(2)
        self.create("--placement=spread")
        bench = self.soak()
        moved = self.turn("--placement=pack")
        back = self.turn("--placement=spread")
        report = self.check_soak(bench, [moved, back])
        self.assertGreaterEqual(report["turns"]["workers_removed"], 1)

    # ---- a node that stands still

    def test_who_went_on_without_a_node_that_stood_still_is_left_out(self):
        self.etcd = harness.Etcd(self.box)
        self.servers = {name: self.start_server("--store=" + self.etcd.url("/turn"), "--name=" + name, "--host-ranks=1",
                                                "--lost-after=2s", name=name) for name in "ab"}
        self.create("--modes=ll", "--placement=spread", "--timeout-ms=2000", ranks=2)
        flags = ["--follow", "--mode=ll", "--tokens=1", "--pause-ms=2"]
        workers = [self.worker(rank, *flags, node=node) for rank, node in enumerate("ab")]
        self.wait_attached(2)
        for process in (self.servers["b"], workers[1]):
            process.signal(signal.SIGSTOP)
        self.wait_line(workers[0], r"absent 1, ")
        ops = self.status()["ranks"][0]["ops"]
        harness.wait_until(lambda: self.status()["ranks"][0]["ops"] > ops + 4000, lambda: self.status(), interval=0.2)
        for process in (self.servers["b"], workers[1]):
            process.signal(signal.SIGCONT)
        self.wait_line(workers[0], r"epoch 1: the group has gone over to epoch 2, .* too far from them: join again")
        self.assertIn("a worker is too far from the others to go over with them", self.servers["a"].log())
        for worker in workers:
            self.wait_line(worker, r"epoch 2: absent 0, ")
        self.wait_turned(2)
        self.assertNotRegex(workers[0].out() + workers[1].out(), r"epoch 2: .* late")  # nobody waits for what others missed

    # ---- node drain --move

    def homes(self, group="moe"):
        ranks = self.admin("group", "get", group, "-o", "json").json()["status"]["ranks"]
        return [rank["node"] for rank in ranks]

    def node(self, name):
        return self.admin("node", "get", name, "-o", "json").json()

    def test_a_node_is_drained_and_nobody_misses_a_step(self):
        self.start(3)
        self.create("--placement=spread")
        by_load = self.write("by-load", "{strategy: by-load, nodes: spread, redundant: 3, loads: [9, 1, 1, 1, 1, 1]}")
        self.admin("group", "create", "idle", "--ranks=3", "--experts=6", "--hidden=64", "--top-k=2", "--ll-max-tokens=8",
                   "--ht-max-tokens=8", "--arena=1MiB", "--placement=" + by_load)
        self.assertEqual((self.homes(), self.homes("idle")), (["a", "b", "c"], ["a", "b", "c"]))
        bench = self.soak()
        drained = self.admin("node", "drain", "b", "--move", "--wait=120s")
        self.assertEqual(drained.out, "node b drained: CORDONED, 0 workers attached\n")
        self.assertNotIn("stay", drained.err)
        self.assertNotIn("b", self.homes() + self.homes("idle"))
        idle = self.admin("group", "get", "idle", "-o", "json").json()
        self.assertEqual((idle["status"]["epoch"], len(idle["spec"]["placement"]["homes"])), (2, 9))
        report = self.check_soak(bench, [2])
        self.assertEqual(report["soak"]["masked_dispatches"], 0)
        self.assertGreaterEqual(report["turns"]["workers_added"], 1)

    def test_a_drain_that_moves_says_where_a_worker_is_wanted(self):
        self.start(2)
        self.create("--placement=spread", "--modes=ll", ranks=2)
        first, moved = self.worker(0, "--follow"), self.worker(1, "--follow", node="b")
        self.check_steps(first, moved, epoch=1)
        drain = self.spawn(["ep-admin", "node", "drain", "b", "--move", "--wait=120s", "--reason=new disk"],
                           server=self.servers["a"])
        drain.wait_log("group moe: epoch 2 waits for rank 1 on node a to attach")
        self.check_steps(first, moved, epoch=1)  # nobody has been asked to leave
        self.assertEqual((self.node("b")["state"], self.node("b")["reason"]), ("NODE_STATE_CORDONED", "new disk"))
        new = self.worker(1, "--follow", tag="new")
        self.assertEqual(drain.wait(), 0, drain.log())
        self.assertEqual(moved.wait(), 0, moved.log())
        self.assertIn("has gone over to epoch 2, where this rank", moved.out())
        self.check_steps(first, new, epoch=2)
        for worker in (first, moved, new):
            self.assertNotRegex(worker.out(), r"absent [1-9]|failures [1-9]|lost|drains")

    def test_a_drain_that_moves_outlives_a_store_that_is_away(self):
        self.start(2)
        self.create("--placement=spread", "--modes=ll", ranks=2)
        self.etcd.kill(0)
        drain = self.spawn(["ep-admin", "node", "drain", "b", "--move", "--wait=120s"], server=self.servers["a"])
        drain.wait_log("it is tried again")
        self.etcd.start(0)
        self.assertEqual(drain.wait(), 0, drain.log())
        self.assertIn("group moe: placed anew, epoch 2", drain.log())

    def place_wanted(self, workers):
        """Where a change waits for a worker that is not there: (epoch, rank, node).  The others attach by themselves."""
        pattern = r"epoch (\d+) waits for rank (\d+) on node (\w+) to attach"

        def wanted():
            found = re.search(pattern, self.status().get("reason", ""))
            place = found and (int(found[1]), int(found[2]), found[3])
            return place if place and (place[1] not in workers or workers[place[1]][1] != place[2]) else None
        return harness.wait_until(wanted, lambda: "a place without a worker: %s" % self.status(), interval=0.05)

    def fill_place(self, workers, tag, expected=None):
        """Starts the worker that a change waits for, while the others go on; who had its rank elsewhere leaves then."""
        epoch, rank, node = self.place_wanted(workers)
        if expected:
            self.assertEqual((rank, node), expected)
        self.check_steps(*(worker for worker, _ in workers.values()), epoch=epoch - 1)  # nobody was asked to leave
        old, _ = workers.get(rank, (None, None))
        workers[rank] = self.worker(rank, "--follow", node=node, tag=tag), node
        if old:
            self.assertEqual(old.wait(), 0, old.log())
            self.assertIn("has gone over to epoch %d, where this rank" % epoch, old.out())
        self.wait_turned(epoch)
        self.check_steps(*(worker for worker, _ in workers.values()), epoch=epoch)

    def test_a_server_is_added_and_another_replaced_under_workers_that_follow(self):
        self.start(2)
        self.create("--placement=spread", "--modes=ll", ranks=2)
        workers = {0: (self.worker(0, "--follow"), "a"), 1: (self.worker(1, "--follow", node="b"), "b")}
        self.check_steps(*(worker for worker, _ in workers.values()), epoch=1)
        self.servers["c"] = self.start_one("c")
        self.update("--ranks=3")
        self.fill_place(workers, "added", (2, "c"))
        drain = self.spawn(["ep-admin", "node", "drain", "b", "--move", "--wait=300s"], server=self.servers["a"])
        self.fill_place(workers, "moved")
        self.assertEqual(drain.wait(), 0, drain.log())
        self.assertEqual(self.servers["b"].stop(), 0)
        self.servers["b"] = self.start_one("b", home="another")
        self.admin("node", "uncordon", "b")
        homes = self.write("homes", "ranks: [{rank: 0, node: a}, {rank: 1, node: b}, {rank: 2, node: c}]")
        self.update("--placement=" + homes)
        self.fill_place(workers, "back", (1, "b"))
        self.assertEqual(self.homes(), ["a", "b", "c"])
        for process in self.box.processes:
            if process.cmd[0].endswith("worker"):
                self.assertNotRegex(process.out(), r"absent [1-9]|failures [1-9]|lost|drains|[1-9]\d* (wrong|dropped)")

    def test_a_drain_that_moves_is_refused_where_an_operator_has_to_say_more(self):
        self.start(2)
        homes = self.write("homes", "ranks: [{rank: 0, node: a}, {rank: 1, node: b}]")
        self.create("--placement=" + homes, ranks=2)
        refused = self.admin("node", "drain", "b", "--move", code=1)
        self.assertIn("group moe: its placement names a node for each rank, and b for 1 of them: give it a new file",
                      refused.err)
        self.assertEqual(self.node("b")["state"], "NODE_STATE_READY")
        self.admin("group", "delete", "moe")
        self.create("--placement=pack", ranks=5)
        before = self.group()
        refused = self.admin("node", "drain", "b", "--move", code=1)
        self.assertRegex(refused.err, r"group moe: the other nodes have no room for [23] of its ranks")
        self.assertIn("'node uncordon b' takes it back", refused.err)
        self.assertEqual(self.node("b")["state"], "NODE_STATE_CORDONED")
        self.assertEqual((self.group()["revision"], self.status()["epoch"]), (before["revision"], 1))

    def test_a_drain_that_moves_goes_on_where_it_was_left(self):
        self.start(2)
        self.create("--placement=spread", "--modes=ll", ranks=2)
        first, old = self.worker(0, "--follow"), self.worker(1, "--follow", node="b")
        self.check_steps(first, old, epoch=1)
        late = self.admin("node", "drain", "b", "--move", "--wait=1s", code=4)
        self.assertIn("group moe: its workers have not gone over to epoch 2: epoch 2 waits for rank 1 on node a", late.err)
        self.assertIn("those there were not asked to leave: the same again goes on", late.err)
        self.check_steps(first, old, epoch=1)
        self.assertNotIn("drains", first.out() + old.out())
        again = self.spawn(["ep-admin", "node", "drain", "b", "--move", "--wait=120s"], server=self.servers["b"])
        again.wait_log("group moe: epoch 2 waits for rank 1 on node a to attach")
        new = self.worker(1, "--follow", tag="new")
        self.assertEqual(again.wait(), 0, again.log())
        self.assertEqual(again.out(), "node b drained: CORDONED, 0 workers attached\n")
        self.assertEqual(self.status()["epoch"], 2)
        self.check_steps(first, new, epoch=2)


if __name__ == "__main__":
    harness.main()
