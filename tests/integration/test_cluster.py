#!/usr/bin/python3
"""Several ep-servers on one etcd: who is there, who leads, drains, and what happens while a server or etcd is away."""

import os
import shutil
import signal
import subprocess
import time
import unittest

import harness

NAMES = ("a", "b", "c")


class ClusterTest(harness.TestCase):
    members = 1  # of etcd

    def setUp(self):
        super().setUp()
        self.etcd = harness.Etcd(self.box, self.members)

    def start(self, name, *flags, home=None, **more):
        return self.start_server("--store=" + self.etcd.url("/cluster"), "--name=" + name, "--host-ranks=2",
                                 "--lost-after=4s", *flags, name=home or name, **more)

    def start_all(self, *flags):
        servers = {name: self.start(name, *flags, ready=False) for name in NAMES}
        for server in servers.values():
            server.wait_ready()
        return servers

    def admin(self, server, *args, code=0):
        result = self.operate(server, *args)
        self.assertEqual(result.code, code, result)
        return result

    def nodes(self, server):
        """{name: what `node list` says of it}"""
        listed = self.admin(server, "node", "list", "-o", "json").json()
        return {node["name"]: node for node in listed.get("nodes", [])}

    def states(self, server):
        return {name: node["state"].replace("NODE_STATE_", "") for name, node in self.nodes(server).items()}

    def leader(self, server):
        return [name for name, node in self.nodes(server).items() if node.get("leader")]

    def get(self, server, name):
        return self.admin(server, "node", "get", name, "-o", "json").json()

    def wait_states(self, server, **expected):
        harness.wait_until(lambda: self.states(server) == expected,
                           lambda: "%s, not %s" % (expected, self.states(server)), interval=0.05)


@unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")
class MembershipTest(ClusterTest):
    def test_every_server_lists_all_and_one_leads(self):
        servers = self.start_all(harness.NOT_LOST)
        for server in servers.values():
            self.wait_states(server, a="READY", b="READY", c="READY")
        leaders = [self.leader(server) for server in servers.values()]
        self.assertEqual(len(leaders[0]), 1)
        self.assertEqual(leaders, [leaders[0]] * 3)
        other = self.get(servers["a"], "b")
        self.assertEqual((other["pid"], other["admin_address"]), (servers["b"].pid, "127.0.0.1:%d" % servers["b"].port))
        self.assertGreater(int(other["round_trip_us"]), 0)
        self.assertIn("there and back", self.admin(servers["a"], "node", "get", "b").out)
        table = self.admin(servers["c"], "node", "list").out
        self.assertEqual([line.split()[0] for line in table.splitlines()], ["NAME", "a", "b", "c"])
        self.assertEqual([line.split()[0] for line in table.splitlines() if " leader " in line], leaders[0])
        self.assertEqual(self.admin(servers["b"], "node", "list", "-q").out, "a\nb\nc\n")
        findings = self.run_cmd(["ep-admin", "doctor", "-o", "json"], server=servers["a"]).json()["findings"]
        found = [f["finding"].split(", ")[0] for f in findings if f["check"] in ("cluster", "reach")]
        self.assertEqual(found, ["3 nodes", "node b", "node c"])
        refused = self.admin(servers["a"], "node", "get", "d", code=3)
        self.assertIn('node "d" is not known: this server is node "a", one of 3', refused.err)

    def test_a_leader_that_is_killed_is_replaced_and_comes_back(self):
        servers = self.start_all()
        dead, = self.leader(servers["a"])
        rest = [name for name in NAMES if name != dead]
        one, two = (servers[name] for name in rest)
        servers[dead].kill()
        self.wait_states(one, **{name: "READY" for name in rest})
        self.wait_states(two, **{name: "READY" for name in rest})
        harness.wait_until(lambda: self.leader(one) and self.leader(one) == self.leader(two), "another leads")
        self.assertIn(self.leader(one)[0], rest)
        self.start(dead)
        self.wait_states(one, a="READY", b="READY", c="READY")
        self.assertNotEqual(self.leader(one), [dead])

    def test_one_that_is_killed_is_lost_no_sooner_than_was_asked_for(self):
        servers = {name: self.start(name, "--lost-after=9s") for name in ("a", "b")}
        self.wait_states(servers["a"], a="READY", b="READY")
        killed = time.monotonic()
        servers["b"].kill()
        self.wait_states(servers["a"], a="READY")
        self.assertGreater(time.monotonic() - killed, 5)  # it had been heard of a third of that time before

    def test_one_that_stops_is_gone_at_once(self):
        servers = {name: self.start(name, "--lost-after=1h") for name in ("a", "b")}
        self.wait_states(servers["a"], a="READY", b="READY")
        self.assertEqual(servers["b"].stop(), 0)
        self.wait_states(servers["a"], a="READY")
        self.start("b")
        self.wait_states(servers["a"], a="READY", b="READY")

    def test_a_drain_from_elsewhere_is_kept_by_the_node(self):
        servers = {name: self.start(name) for name in ("a", "b")}
        told = self.admin(servers["a"], "node", "drain", "b", "--reason=new driver", "--wait=5s")
        self.assertEqual(told.out, "node b drained: CORDONED, 0 workers attached\n")
        self.assertEqual(self.get(servers["b"], "b")["state"], "NODE_STATE_CORDONED")
        self.assertEqual(self.get(servers["b"], "b")["reason"], "new driver")
        servers["b"].kill()
        self.wait_states(servers["a"], a="READY", b="LOST")
        self.assertIn("new driver", self.admin(servers["a"], "node", "list").out)
        self.assertIn("not there", self.get(servers["a"], "b")["unreachable"])
        servers["b"] = self.start("b")
        self.wait_states(servers["a"], a="READY", b="CORDONED")
        back = self.admin(servers["b"], "node", "uncordon", "b")
        self.assertEqual(back.out, "node b takes workers again: READY, 0 workers attached\n")
        self.wait_states(servers["a"], a="READY", b="READY")

    def test_a_node_that_is_away_can_be_drained_and_forgotten(self):
        servers = {name: self.start(name) for name in ("a", "b")}
        self.admin(servers["a"], "node", "drain", "b")
        self.assertEqual(servers["b"].stop(), 0)
        self.wait_states(servers["a"], a="READY", b="LOST")
        self.assertIn("LOST", self.admin(servers["a"], "node", "drain", "b", "--reason=gone for good").out)
        self.admin(servers["a"], "node", "uncordon", "b")
        self.wait_states(servers["a"], a="READY")
        self.admin(servers["a"], "node", "drain", "b", code=3)

    def test_what_a_node_has_left_is_known_elsewhere(self):
        servers = {name: self.start(name) for name in ("a", "b")}
        self.admin(servers["b"], "group", "create", "moe", "--ranks=2", "--experts=8", "--hidden=64", "--top-k=2",
                   "--ll-max-tokens=8", "--ht-max-tokens=16", "--arena=1MiB", "--wait=10s")
        group = self.admin(servers["b"], "group", "get", "moe", "-o", "json").json()
        on = group["status"]["ranks"][0]["node"]
        other = servers["a" if on == "b" else "b"]
        used = self.get(servers[on], on)["memory_used_bytes"]
        self.assertGreater(int(used), 0)
        harness.wait_until(lambda: self.get(other, on).get("memory_used_bytes") == used, "the same elsewhere")

    def test_a_drain_tells_which_ranks_stay_and_an_update_moves_them(self):
        servers = {name: self.start(name) for name in ("a", "b")}
        for server in servers.values():
            self.wait_states(server, a="READY", b="READY")
        self.admin(servers["a"], "group", "create", "moe", "--ranks=2", "--experts=8", "--hidden=64", "--top-k=2",
                   "--ll-max-tokens=8", "--ht-max-tokens=16", "--arena=1MiB", "--placement=spread", "--wait=20s")
        homes = lambda: [rank["node"] for rank in self.admin(
            servers["a"], "group", "get", "moe", "-o", "json").json()["status"]["ranks"]]
        drained = self.admin(servers["a"], "node", "drain", "b")
        self.assertEqual(drained.out, "node b drained: CORDONED, 0 workers attached\n")
        self.assertEqual(drained.err.split(";")[0], "ep-admin: node drain: 1 rank of group moe stays placed on b, and "
                         "has no worker when those there have left")
        self.assertEqual(homes(), ["a", "b"])
        self.admin(servers["a"], "group", "update", "moe", "--placement=spread")
        harness.wait_until(lambda: homes() == ["a", "a"], "both ranks on the node that is left")
        self.assertEqual(self.admin(servers["a"], "node", "drain", "b").err, "")

    def test_a_name_that_is_taken_is_refused(self):
        first = self.start("a")
        second = self.start("a", home="other", ready=False)
        self.assertEqual(second.wait(), 1)
        self.assertIn('name is "a": another server of this store has that name: it is at 127.0.0.1:%d, pid %d'
                      % (first.port, first.pid), second.log())
        self.assertEqual(self.states(first), {"a": "READY"})

    def test_a_server_whose_name_another_took_while_it_was_stopped_ends(self):
        servers = {name: self.start(name) for name in ("a", "b")}
        servers["a"].signal(signal.SIGSTOP)
        self.wait_states(servers["b"], b="READY")
        second = self.start("a", home="other")
        servers["a"].signal(signal.SIGCONT)
        self.assertEqual(servers["a"].wait(), 1)
        self.assertIn('name is "a": another server of this store has that name: it is at 127.0.0.1:%d, pid %d'
                      % (second.port, second.pid), servers["a"].log())
        for server in (servers["b"], second):
            self.wait_states(server, a="READY", b="READY")
            self.assertEqual(self.get(server, "a")["pid"], second.pid)

    def test_a_server_that_was_stopped_for_long_comes_back(self):
        servers = {name: self.start(name) for name in ("a", "b")}
        harness.wait_until(lambda: self.leader(servers["b"]), "a leader")
        servers["a"].signal(signal.SIGSTOP)
        self.wait_states(servers["b"], b="READY")
        harness.wait_until(lambda: self.leader(servers["b"]) == ["b"], "b leads")
        servers["a"].signal(signal.SIGCONT)
        for server in servers.values():
            self.wait_states(server, a="READY", b="READY")
            harness.wait_until(lambda: self.leader(server) == ["b"], "b leads")

    def test_while_etcd_is_away_nobody_is_gone(self):
        servers = {name: self.start(name) for name in ("a", "b")}
        self.wait_states(servers["a"], a="READY", b="READY")
        self.assertIn("\nep_cluster_registered 1\n", servers["b"].http("/metrics")[2])
        self.etcd.kill(0)
        for server in servers.values():
            server.wait_log("not registered any more")
            metrics = server.http("/metrics")[2]
            for line in ("ep_cluster_registered 0", "ep_cluster_leads 0", "ep_cluster_nodes 2"):
                self.assertIn("\n" + line + "\n", metrics)
            self.assertEqual(self.states(server), {"a": "READY", "b": "READY"})
        self.assertGreater(int(self.get(servers["a"], "b")["round_trip_us"]), 0)
        refused = self.admin(servers["a"], "node", "drain", "b", code=4)
        self.assertIn("cannot write", refused.err)
        self.etcd.start(0)
        for server in servers.values():
            harness.wait_until(lambda: len(self.leader(server)) == 1, "somebody leads")
        self.wait_states(servers["a"], a="READY", b="READY")
        self.admin(servers["b"], "node", "drain", "a")
        self.wait_states(servers["b"], a="CORDONED", b="READY")
        for server in servers.values():
            self.assertNotIn("node gone", server.log())
        for server in servers.values():
            self.assertEqual(server.stop(), 0)  # before etcd, which it would wait for


@unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")
class ThreeMembersTest(ClusterTest):
    members = 3

    def test_a_member_of_etcd_may_go(self):
        servers = self.start_all()
        self.wait_states(servers["a"], a="READY", b="READY", c="READY")
        self.etcd.kill(0)
        self.admin(servers["a"], "node", "drain", "b")
        for server in servers.values():
            self.wait_states(server, a="READY", b="CORDONED", c="READY")
        self.etcd.start(0)


@unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")
class TlsTest(ClusterTest):
    def setUp(self):
        super().setUp()
        self.certs = self.path("certs")
        subprocess.run(["bash", os.path.join(harness.ROOT, "deploy", "certs.sh"), self.certs], check=True,
                       capture_output=True)

    def cert(self, name):
        return os.path.join(self.certs, name)

    def test_servers_call_each_other_with_their_own_certificates(self):
        flags = ["--tls-ca=" + self.cert("ca.pem"), "--tls-cert=" + self.cert("server.pem"),
                 "--tls-key=" + self.cert("server.key")]
        servers = {name: self.start(name, *flags) for name in ("a", "b")}
        servers["c"] = self.start("c", "--listen=0.0.0.0:0", "--advertise=127.0.0.1:0", *flags)
        self.wait_states(servers["a"], a="READY", b="READY", c="READY")
        for one in servers:
            for other in servers:
                if one != other:
                    self.assertGreater(int(self.get(servers[one], other).get("round_trip_us", 0)), 0)
        self.assertEqual(self.get(servers["a"], "c")["admin_address"], "127.0.0.1:%d" % servers["c"].port)

    def test_a_change_that_is_handed_on_is_in_both_logs_with_who_asked_for_it(self):
        flags = [harness.NOT_LOST, "--peer-ou=server", "--tls-ca=" + self.cert("ca.pem"), "--tls-cert=" + self.cert("server.pem"),
                 "--tls-key=" + self.cert("server.key")]
        servers = {name: self.start(name, *flags) for name in ("a", "b")}
        self.wait_states(servers["a"], a="READY", b="READY")
        leader = self.leader(servers["a"])[0]
        asked = servers["b" if leader == "a" else "a"]
        made = self.run_cmd(["ep-admin", "--server", "127.0.0.1:%d" % asked.port, "--tls-ca", self.cert("ca.pem"), "--tls-cert",
                             self.cert("client.pem"), "--tls-key", self.cert("client.key"), "group", "create", "moe",
                             "--ranks=2", "--experts=4", "--hidden=64", "--top-k=2"])
        self.assertEqual(made.code, 0, made)
        for server in servers.values():
            self.assertRegex(server.log(),
                             r'mod=audit msg="change made" action=group.create target=moe by=ep-admin status=OK')

    def test_one_whose_certificate_is_another_authoritys_is_not_reached(self):
        other = self.path("other")
        subprocess.run(["bash", os.path.join(harness.ROOT, "deploy", "certs.sh"), other], check=True,
                       capture_output=True)
        flags = lambda at: ["--tls-%s=%s" % (what, os.path.join(at, file)) for what, file in
                            (("ca", "ca.pem"), ("cert", "server.pem"), ("key", "server.key"))]
        a, b = self.start("a", *flags(self.certs)), self.start("b", *flags(other))
        self.wait_states(a, a="READY", b="READY")
        self.assertIn("127.0.0.1:%d" % b.port, self.get(a, "b")["unreachable"])
        self.assertIn("not from the server that answers", self.admin(a, "node", "get", "b").out)
        self.assertIn("node b is not reached", self.admin(a, "doctor", code=6).out)


if __name__ == "__main__":
    harness.main()
