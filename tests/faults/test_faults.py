#!/usr/bin/python3
"""One fault at a time, and what is promised for it: the world of the soak, three nodes and an etcd of three members."""

import contextlib
import json
import os
import signal
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration"))
import harness  # noqa: E402
import hosts  # noqa: E402
import network  # noqa: E402
from world import NODES, RANKS_PER_NODE, STORES, World  # noqa: E402

YEAR_S = 366 * 86400

# Puts of so many bytes, so often, into the member of etcd at the first argument; says why it does not take them.
PUT = """
import base64, json, sys, urllib.error, urllib.request
value = base64.b64encode(b"x" * int(sys.argv[2])).decode()
for i in range(int(sys.argv[3])):
    body = json.dumps({"key": base64.b64encode(b"/other/%d" % i).decode(), "value": value}).encode()
    try:
        urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v3/kv/put", body), timeout=60).read()
    except urllib.error.HTTPError as e:
        print(e.read().decode())
        break
"""


class FaultTest(harness.TestCase):
    store_flags = ()
    server_flags = ()

    def setUp(self):
        super().setUp()
        self.world = World("ll", self.box, self.store_flags, self.server_flags)
        self.addCleanup(self.end)
        self.world.start()
        self.wait_well()

    def end(self):
        self.world.stop_workers()
        self.assertEqual(self.world.wrong, [])

    # ---- what servers and workers say

    def others(self, *names):
        return [node for node in NODES if node not in names]

    def leader(self, node):
        listed = self.world.admin(node, "node", "list", "-o", "json").json()["nodes"]
        return next((each["name"] for each in listed if each.get("leader")), None)

    def update(self, node, *flags):
        return self.world.admin(node, "group", "update", "moe", *flags)

    def change(self, node, *flags):
        """An update that is taken."""
        result = self.operate(self.world.servers[node], "group", "update", "moe", *flags)
        self.assertEqual(result.code, 0, result)

    def renewals(self, node):
        """What became of those, the last first."""
        told = self.world.admin(node, "group", "history", "moe", "-o", "json", must=True).json()["changes"]
        return [change["outcome"] for change in told if change["change"] == "renewal"]

    def label(self, node):
        return (self.world.group(node) or {}).get("spec", {}).get("labels", {}).get("n")

    def wait_label(self, value, *nodes):
        for node in nodes or NODES:
            harness.wait_until(lambda: self.label(node) == value, "n=%s at %s" % (value, node), interval=0.1)

    def wait_phase(self, phase, *nodes, reason=""):
        for node in nodes or NODES:
            harness.wait_until(lambda: self.world.status(node).get("phase") == "PHASE_" + phase and
                               reason in self.world.status(node).get("reason", ""),
                               lambda: "%s at %s: %s" % (phase, node, self.world.status(node)), interval=0.1)

    def wait_steps(self, *nodes, absent=0):
        """From now on."""
        marks = self.world.marks(*nodes)
        harness.wait_until(lambda: self.world.steps_since(marks, absent),
                           lambda: "steps at %s with %d absent" % (nodes or NODES, absent), interval=0.1)
        self.world.listen_all()

    def wait_well(self):
        """Whoever has ended is started again meanwhile."""
        def is_well():
            self.world.tend()
            ranks = [self.world.status(node).get("ranks", []) for node in NODES]
            return all(rank and all(r["state"] == "RANK_STATE_ATTACHED" for r in rank) for rank in ranks)
        harness.wait_until(is_well, lambda: [self.world.status(node) for node in NODES], 60, 0.1)
        self.wait_phase("READY")
        self.wait_steps()

    def said(self, node):
        return self.world.servers[node].log()

    def in_host(self, host, program, *args):
        return harness.run(["/usr/bin/env", *self.world.net.inside(host), sys.executable, "-c", program,
                            self.world.url(host, 2379), *args], timeout=60)


@unittest.skipUnless(network.available(), "needs root, for network namespaces")
class CutTest(FaultTest):
    def cut_from_store(self, node):
        for host in STORES:
            self.world.net.cut_one_way(node, host)

    def mend(self, node):
        for host in STORES:
            self.world.net.mend_one_way(node, host)

    def test_a_leader_cut_off_from_the_store_lets_go_before_another_leads(self):
        old = self.leader("a")
        one, two = self.others(old)
        self.cut_from_store(old)
        harness.wait_until(lambda: self.leader(one) in (one, two), "another leads", interval=0.02)
        self.assertNotEqual(self.leader(old), old)  # asked after the other was seen
        refused = self.update(old, "--label=n=1")
        self.assertNotEqual(refused.code, 0, refused)
        self.assertRegex(refused.err, "store|no server leads")
        self.change(one, "--label=n=2")
        self.wait_phase("DEGRADED", one, two, reason="node %s is lost" % old)
        self.wait_phase("DEGRADED", old, reason="is lost: its connection is closed")  # which they have told it
        self.wait_steps(one, two, absent=RANKS_PER_NODE)
        self.wait_steps(old, absent=2 * RANKS_PER_NODE)
        self.mend(old)
        self.wait_label("2")
        self.wait_well()

    def test_a_node_that_was_cut_off_shows_what_was_acknowledged_or_says_that_it_may_be_behind(self):
        node = self.others(self.leader("a"))[0]
        self.world.net.cut(node)
        harness.wait_until(lambda: self.update(self.others(node)[0], "--label=n=1").code == 0, "a change is taken")
        told = self.world.admin(node, "group", "get", "moe")
        self.assertIn("may be older than what was acknowledged: ", told.err)
        self.assertIn("store", told.err)
        self.world.net.mend(node)

        def knows():
            group = self.world.group(node)
            new = group["spec"]["labels"]["n"] == "1"
            self.assertTrue(new or group.get("behind"), group)
            return new and not group.get("behind")
        harness.wait_until(knows, "node %s knows of it" % node, interval=0.02)
        self.wait_well()

    def test_nodes_that_have_lost_each_other_work_with_the_third_which_says_so(self):
        self.world.net.cut_one_way("a", "b")
        self.wait_phase("DEGRADED", "a", reason="node b is lost: its connection is closed")
        self.wait_phase("DEGRADED", "b", reason="node a is lost: its connection is closed")
        self.wait_phase("DEGRADED", "c", reason="is lost: its connection is closed")
        self.wait_steps("a", "b", absent=RANKS_PER_NODE)
        self.wait_steps("c")
        self.change("c", "--label=n=1")
        self.wait_label("1")
        self.assertEqual(self.renewals("c"), [])  # it would come to nothing
        self.world.net.mend_one_way("a", "b")
        self.wait_well()
        self.assertEqual(self.renewals("c"), ["made"])

    def test_a_cut_node_and_a_lost_member_of_the_store_leave_the_rest_at_work(self):
        self.world.net.cut("c")
        self.world.etcd["e1"].kill()
        self.wait_phase("DEGRADED", "a", "b", reason="node c is lost")
        self.wait_steps("a", "b", absent=RANKS_PER_NODE)
        harness.wait_until(lambda: self.update("a", "--label=n=3").code == 0, "a change is taken")
        self.world.start_etcd("e1")
        self.world.net.mend("c")
        self.wait_label("3")
        self.wait_well()


@unittest.skipUnless(network.available(), "needs root, for network namespaces")
class SlowTest(FaultTest):
    server_flags = ("--lost-after=6s",)  # no shorter than the machine may stand still

    def test_a_slow_node_is_none_that_is_lost(self):
        before = self.world.status("a")["epoch"]
        self.world.net.slow("b")
        self.change("b", "--label=n=4")
        for _ in range(3):
            self.wait_steps()
        self.world.net.hurry("b")
        self.wait_label("4")
        self.wait_steps()
        self.assertEqual(self.world.status("b")["epoch"], before)
        for node in NODES:
            self.assertNotIn("node gone", self.said(node))


class StopTest(FaultTest):
    @contextlib.contextmanager
    def standing_still(self, node):
        """Its server."""
        self.world.begin_fault()
        self.world.stop_server(node)
        try:
            yield
        finally:
            self.world.servers[node].signal(signal.SIGCONT)
            self.world.end_fault()

    def test_a_leader_that_stood_still_in_a_change_does_not_end_it_against_another(self):
        old = self.leader("a")
        one, _ = self.others(old)
        asked = self.world.box.spawn(["ep-admin", "--timeout=20s", "group", "update", "moe", "--ll-max-tokens=24",
                                      "--label=n=5"], server=self.world.servers[one])
        with self.standing_still(old):
            harness.wait_until(lambda: self.leader(one) not in (None, old), "another leads", interval=0.1)
        made = asked.wait(40) == 0
        self.wait_well()
        labels = {self.label(node) for node in NODES}
        self.assertEqual(len(labels), 1)
        self.assertLessEqual(labels, {"5"} if made else {"0", "5"})
        groups = [self.world.group(node) for node in NODES]
        self.assertEqual(len({(group["revision"], group["status"]["epoch"]) for group in groups}), 1)
        self.assertEqual(len({json.dumps(group["spec"], sort_keys=True) for group in groups}), 1)

    def test_a_server_that_slept_through_a_change_of_its_ranks_takes_it_over(self):
        with self.standing_still("c"):
            self.wait_phase("DEGRADED", "a", "b", reason="node c is lost")
            self.change("a", "--ranks=4", "--placement=pack", "--label=n=6")
        self.wait_label("6")
        for node in NODES:
            ranks = self.world.status(node)["ranks"]
            self.assertEqual([rank["node"] for rank in ranks], ["a", "a", "b", "b"])
        refused = self.run_cmd(["worker", "--group=moe", "--rank=4", "--once"], server=self.world.servers["c"])
        self.assertNotEqual(refused.code, 0)
        self.assertIn("rank is 4: group moe has ranks 0 to 3", refused.err)
        self.wait_steps("a", "b")

    def test_a_drained_node_loses_its_workers_and_gets_them_back(self):
        told = self.world.admin("a", "node", "drain", "c", "--reason=new driver", "--wait=20s")
        self.assertIn("CORDONED, 0 workers attached", told.out)
        self.wait_steps("a", "b", absent=RANKS_PER_NODE)
        self.assertEqual(self.world.admin("b", "node", "uncordon", "c").code, 0)
        self.wait_well()


@unittest.skipUnless(network.available(), "needs root, for disks of its own")
class DiskTest(FaultTest):
    def test_a_member_of_the_store_with_a_full_disk_is_gone_and_the_rest_goes_on(self):
        self.world.disks["e0"].fill()
        self.in_host("e1", PUT, "500000", "60")
        self.assertNotEqual(self.world.etcd["e0"].wait(), 0)
        harness.wait_until(lambda: self.update("b", "--label=n=7").code == 0, "a change is taken")
        self.world.disks["e0"].free()
        self.world.start_etcd("e0")
        self.wait_label("7")
        self.wait_well()

    def test_a_server_with_a_full_disk_goes_on(self):
        self.world.disks["a"].fill()
        self.change("a", "--label=n=8")
        self.change("a", "--ll-max-tokens=24")
        self.world.disks["a"].free()
        self.wait_label("8")
        self.wait_well()


class StoreFullTest(FaultTest):
    store_flags = ("--quota-backend-bytes=4000000",)
    server_flags = (harness.NOT_LOST,)

    def test_a_full_store_refuses_changes_and_traffic_goes_on(self):
        full = self.in_host("e0", PUT, "500000", "20")
        self.assertIn("exceeded", full.out)
        refused = self.update("b", "--label=n=9")
        self.assertNotEqual(refused.code, 0, refused)
        self.assertIn("space", refused.err)
        self.wait_steps()
        for node in NODES:
            self.assertEqual(self.world.status(node)["phase"], "PHASE_READY")
            self.assertNotIn("node gone", self.said(node))


@unittest.skipUnless(hosts.Clock.available(), "no clock to move in a build with a sanitizer")
class ClockTest(FaultTest):
    server_flags = (harness.NOT_LOST,)

    def test_clocks_that_jump_take_no_lease_away(self):
        leader, epoch = self.leader("a"), self.world.status("a")["epoch"]
        for seconds in (YEAR_S, -YEAR_S, -3, 0):
            for host in (leader, "e0", "e1"):
                self.world.clocks[host].move(seconds)
            self.change("b", "--label=n=%d" % seconds)
            self.wait_label(str(seconds))
            self.wait_steps()
        self.assertIn("ts=%d-" % time.gmtime(time.time() + YEAR_S).tm_year, self.said(leader))  # it did see that clock
        self.assertEqual((self.leader("b"), self.world.status("b")["epoch"]), (leader, epoch))
        for node in NODES:
            self.assertNotIn("node gone", self.said(node))
            self.assertNotIn("session lost", self.said(node))


@unittest.skipUnless(network.available(), "needs root, for a disk of its own")
class OwnStoreTest(harness.TestCase):
    """A server with a store of its own, a file."""

    def test_a_full_disk_refuses_changes_and_traffic_goes_on(self):
        disk = hosts.Disk(self.path("s"), 8)
        self.box.afterwards.append(disk.close)
        server = self.start_server("--host-ranks=1")
        admin = lambda *args: self.run_cmd(["ep-admin", "group", *args], server=server)
        self.assertEqual(admin("create", "moe", "--ranks=1", "--experts=4", "--hidden=64", "--top-k=2",
                               "--ll-max-tokens=8", "--ht-max-tokens=8").code, 0)
        worker = self.spawn(["worker", "--group=moe", "--pause-ms=2"], server=server)
        disk.fill()
        refused = admin("update", "moe", "--label=n=1")
        self.assertNotEqual(refused.code, 0, refused)
        self.assertIn("the disk is full", refused.err)
        said = len(worker.out())
        harness.wait_until(lambda: " steps" in worker.out()[said:], "steps")
        self.assertIn("failures 0", worker.out())
        disk.free()
        harness.wait_until(lambda: admin("update", "moe", "--label=n=2").code == 0, "a change is taken")
        self.assertEqual(server.stop(), 0)


@unittest.skipUnless(network.available(), "needs root, for network namespaces")
class NamesTest(harness.TestCase):
    """Hosts that have names in /etc/hosts, and a DNS server that does not answer."""

    def test_what_etc_hosts_has_is_found_while_dns_is_away(self):
        net = network.Network(("a", "dns"))
        self.box.afterwards.append(net.close)
        net.cut_one_way("a", "dns")
        net.name("a", {"a.test": net.address("a")}, resolver=net.address("dns"))
        url = "http://%s:" % net.address("a")
        self.spawn(["/usr/bin/env", *net.inside("a"), "etcd", "--data-dir=" + self.path("etcd"),
                    "--listen-client-urls=" + url + "2379", "--advertise-client-urls=" + url + "2379",
                    "--listen-peer-urls=" + url + "2380"])
        server = self.start_server("--store=etcd://a.test:2379/names", "--name=a", "--listen=0.0.0.0:7300",
                                   "--advertise=a.test:7300", "--insecure", harness.NOT_LOST, wrapper=net.inside("a"),
                                   listen=False, metrics=False)
        listed = harness.run(["/usr/bin/env", *net.inside("a"), harness.binary("ep-admin"), "--timeout=10s",
                              "--server=a.test:7300", "node", "list"])
        self.assertEqual(listed.code, 0, listed)
        self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    harness.main()
