#!/usr/bin/python3
"""What ep-server keeps, on either store: groups and the drain over kill -9, and what is said while etcd is away."""

import shutil
import socket
import unittest

import harness
import reflect

if not reflect.MISSING:
    import grpc

GROUP = {"ranks": 2, "experts": 8, "hidden": 64, "top_k": 2, "ll_max_tokens": 8, "ht_max_tokens": 16,
         "arena_bytes": 1 << 20, "timeout_ms": 2000}
needs_grpc = unittest.skipIf(reflect.MISSING, reflect.MISSING)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


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
        self.port, self.peer = free_port(), free_port()
        self.start_etcd()
        self.flags = ("--store=etcd://127.0.0.1:%d/clusters/one" % self.port,)

    def start_etcd(self):
        client, peer = ("http://127.0.0.1:%d" % port for port in (self.port, self.peer))
        self.etcd = self.spawn(["/usr/bin/env", "etcd", "--name=one", "--data-dir=" + self.path("etcd"),
                                "--listen-client-urls=" + client, "--advertise-client-urls=" + client,
                                "--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer,
                                "--initial-cluster=one=" + peer])

    def test_while_etcd_is_away_changes_are_refused_and_the_rest_goes_on(self):
        server = self.start_server(*self.flags)
        with reflect.Client(server.address, timeout=30) as rpc:
            self.create_group(rpc, "before")
            self.etcd.kill()
            told = self.run_cmd(["ep-admin", "group", "delete", "before"], server=server)  # before it gives up
            self.assertEqual(told.code, 4, told)
            self.assertIn("cannot write", told.err)
            with self.assertRaises(grpc.RpcError) as refused:
                self.create_group(rpc, "meanwhile")
            self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertIn("store etcd://127.0.0.1:%d: cannot write" % self.port, refused.exception.details())
            self.assertEqual(self.group_names(rpc), ["before"])
            self.assertIn("ep_store_healthy 0", server.http("/metrics")[2])
            self.start_etcd()
            harness.wait_until(lambda: "ep_store_healthy 1" in server.http("/metrics")[2], "the store is back", 20)
            self.create_group(rpc, "after")
            self.assertEqual(self.group_names(rpc), ["after", "before"])
        self.assertEqual(server.stop(), 0)

    def test_a_server_without_its_etcd_says_so_and_ends(self):
        self.etcd.kill()
        server = self.start_server(*self.flags, ready=False)
        self.assertEqual(server.wait(60), 4)
        self.assertIn("store etcd://127.0.0.1:%d: cannot read: cannot reach 127.0.0.1:%d" % (self.port, self.port),
                      server.log())


if __name__ == "__main__":
    harness.main()
