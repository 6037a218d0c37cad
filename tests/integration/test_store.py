#!/usr/bin/python3
"""What ep-server keeps, on either store: groups and the drain over kill -9, and what is said while etcd is away."""

import os
import shutil
import signal
import unittest

import harness
import reflect

if not reflect.MISSING:
    import grpc

GROUP = {"ranks": 2, "experts": 8, "hidden": 64, "top_k": 2, "ll_max_tokens": 8, "ht_max_tokens": 16,
         "arena_bytes": 1 << 20, "timeout_ms": 2000}
needs_grpc = unittest.skipIf(reflect.MISSING, reflect.MISSING)


class Survival:
    """The cases that hold on every store; flags: what makes the server use it."""
    flags = ()

    @staticmethod
    def create_group(rpc, name="moe", **changes):
        return rpc.call("ep.v1.Admin/CreateGroup", {"name": name, "spec": dict(GROUP, **changes)})

    @staticmethod
    def group_names(rpc):
        return [g["name"] for g in rpc.call("ep.v1.Admin/ListGroups").get("groups", [])]

    def test_groups_survive_kill_and_restart(self):
        server = self.start_server(*self.flags)
        with reflect.Client(server.address) as rpc:
            for name in ("a", "b", "c"):
                self.create_group(rpc, name, labels={"x": name})
            rpc.call("ep.v1.Admin/DeleteGroup", {"name": "b"})
            rpc.call("ep.v1.Admin/DrainNode", {"reason": "maintenance"})
            before = rpc.call("ep.v1.Admin/GetGroup", {"name": "c"})
        server.kill()
        server = self.start_server(*self.flags)
        with reflect.Client(server.address) as rpc:
            self.assertEqual(self.group_names(rpc), ["a", "c"])
            after = rpc.call("ep.v1.Admin/GetGroup", {"name": "c"})
            self.assertEqual(after["spec"], before["spec"])
            self.assertEqual(after["revision"], before["revision"])
            self.assertGreater(int(after["status"]["epoch"]), 0)
            harness.wait_until(lambda: rpc.call("ep.v1.Admin/GetNode").get("state") == "NODE_STATE_CORDONED",
                               "cordoned")
            self.assertEqual(rpc.call("ep.v1.Admin/GetNode")["reason"], "maintenance")
        if harness.have("ep-admin"):
            listed = self.run_cmd(["ep-admin", "group", "list"], server=server)
            self.assertEqual(listed.code, 0, listed)
            self.assertRegex(listed.out, r"(?m)^a\b")

    def test_kill_in_the_middle_of_changes_loses_nothing_acknowledged(self):
        server = self.start_server("--host-ranks=4", *self.flags)
        for round_ in range(3):
            acknowledged = []
            with reflect.Client(server.address) as rpc:
                rpc.service("ep.v1.Admin")
                for i in range(5):
                    name = "g%d-%d" % (round_, i)
                    self.create_group(rpc, name)
                    acknowledged.append(name)
                server.kill()
            server = self.start_server("--host-ranks=4", *self.flags)
            with reflect.Client(server.address) as rpc:
                self.assertLessEqual(set(acknowledged), set(self.group_names(rpc)))
                for name in self.group_names(rpc):
                    rpc.call("ep.v1.Admin/DeleteGroup", {"name": name})


@needs_grpc
class SqliteTest(Survival, harness.TestCase):
    pass


@needs_grpc
@unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")
class EtcdTest(Survival, harness.TestCase):
    def setUp(self):
        super().setUp()
        self.etcd = harness.Etcd(self.box)
        self.flags = ("--store=" + self.etcd.url("/clusters/one"),)

    def test_a_server_has_no_state_dir_beside_etcd(self):
        """Several servers of one machine may leave it at its default, and one that may not make it needs none."""
        servers = [self.start_server("--state-dir=/dev/null/state", "--name=" + name, *self.flags, name=name)
                   for name in ("a", "b")]
        self.assertEqual([server.stop() for server in servers], [0, 0])

    def test_while_etcd_is_away_changes_are_refused_and_the_rest_goes_on(self):
        server = self.start_server(*self.flags)
        with reflect.Client(server.address) as rpc:
            self.create_group(rpc, "before")
            self.etcd.kill(0)
            told = self.run_cmd(["ep-admin", "group", "delete", "before"], server=server)  # before it gives up
            self.assertEqual(told.code, 4, told)
            self.assertIn("cannot write", told.err)
            with self.assertRaises(grpc.RpcError) as refused:
                self.create_group(rpc, "meanwhile")
            self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertIn("store etcd://%s: cannot write" % self.etcd.endpoints(), refused.exception.details())
            self.assertEqual(self.group_names(rpc), ["before"])
            self.assertIn("ep_store_healthy 0", server.http("/metrics")[2])
            self.etcd.start(0)
            harness.wait_until(lambda: "ep_store_healthy 1" in server.http("/metrics")[2], "the store is back")
            harness.wait_until(lambda: self.is_taken(rpc, "after"), "changes are taken again")
            self.assertEqual(self.group_names(rpc), ["after", "before"])
        self.assertEqual(server.stop(), 0)

    def is_taken(self, rpc, name):
        """False: not yet, as whoever leads has to be found out first."""
        try:
            self.create_group(rpc, name)
        except grpc.RpcError as refused:
            self.assertIn("try again", refused.details())
            return False
        return True

    def test_a_server_waits_for_an_etcd_that_is_late(self):
        etcd = self.etcd.members[0]
        etcd.signal(signal.SIGSTOP)
        server = self.start_server(*self.flags, ready=False)
        harness.wait_until(lambda: os.path.exists(server.socket), "its socket", 15)
        with reflect.Client(server.address) as rpc:
            self.assertEqual(rpc.call("grpc.health.v1.Health/Check")["status"], "NOT_SERVING")
            server.wait_log("waiting for the store to take this server up", 15)
            etcd.signal(signal.SIGCONT)
            server.wait_ready(30)
            self.create_group(rpc)
        self.assertEqual(server.stop(), 0)

    def test_a_server_that_its_etcd_refuses_does_not_wait(self):
        """For what would have to be changed first: users where etcd has none, TLS where it speaks plaintext."""
        certs = self.box.path("certs")
        made = self.run_cmd(["/bin/bash", os.path.join(harness.ROOT, "deploy", "certs.sh"), certs], timeout=60)
        self.assertEqual(made.code, 0, made)
        refused = [(["--store-user=ep", "--store-password-file=" + self.box.write("password", "x\n")], 5,
                    "etcd refuses user ep"),
                   (["--store-ca=" + os.path.join(certs, "ca.pem")], 4, "is the server plaintext")]
        for n, (flags, code, says) in enumerate(refused):
            with self.subTest(flags=flags):
                server = self.start_server(*self.flags, *flags, name="refused%d" % n, ready=False)
                self.assertEqual(server.wait(60), code, server.log())
                self.assertIn(says, server.log())
                self.assertNotIn("within 20 s", server.log())

    def test_a_server_without_its_etcd_says_so_and_ends(self):
        self.etcd.kill(0)
        server = self.start_server(*self.flags, ready=False)
        self.assertEqual(server.wait(60), 4)
        endpoint = self.etcd.endpoints()
        self.assertIn("the store has not taken this server up within 20 s: store etcd://" + endpoint, server.log())
        self.assertRegex(server.log(), "store etcd://%s: cannot [a-z ]+: cannot reach %s" % (endpoint, endpoint))


@needs_grpc
@unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")
class GuardedEtcdTest(Survival, harness.TestCase):
    """On an etcd that asks for a certificate and a user, who may do what README.md says that one needs."""

    def setUp(self):
        super().setUp()
        self.etcd = harness.Etcd(self.box)
        certs = self.box.path("certs")
        made = self.run_cmd(["/bin/bash", os.path.join(harness.ROOT, "deploy", "certs.sh"), certs], timeout=60)
        self.assertEqual(made.code, 0, made)
        self.etcd.add_user("ep", "secret", "/clusters/one")
        self.etcd.ask_for_tls(certs)
        self.password = self.box.write("password", "secret\n")
        self.flags = ("--store=" + self.etcd.url("/clusters/one"), "--store-ca=" + self.etcd.cert("ca.pem"),
                      "--store-cert=" + self.etcd.cert("client.pem"), "--store-key=" + self.etcd.cert("client.key"),
                      "--store-user=ep", "--store-password-file=" + self.password)

    def test_a_restart_of_etcd_which_forgets_who_is_logged_in_is_got_over(self):
        server = self.start_server(*self.flags, harness.NOT_LOST)
        with reflect.Client(server.address) as rpc:
            self.create_group(rpc, "before")
            self.etcd.kill(0)
            harness.wait_until(lambda: not self.etcd.answers(0), "etcd is away")
            self.etcd.start(0)
            self.etcd.wait_answers(0)
            answer = self.operate(server, "group", "delete", "before")
            self.assertEqual(answer.code, 0, answer)
            self.create_group(rpc, "after")
            self.assertEqual(self.group_names(rpc), ["after"])
        self.assertEqual(server.stop(), 0)

    def test_what_it_may_not_do_is_refused_at_once(self):
        for n, (flag, code, says) in enumerate(((self.flags[0].replace("/one", "/two"), 5, "permission denied"),
                                                ("--store-user=nobody", 5, "etcd refuses user nobody"))):
            with self.subTest(flag=flag):
                server = self.start_server(*self.flags, flag, name="refused%d" % n, ready=False)
                self.assertEqual(server.wait(60), code, server.log())
                self.assertIn(says, server.log())


if __name__ == "__main__":
    harness.main()
