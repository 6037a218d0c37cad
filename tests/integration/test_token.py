#!/usr/bin/python3
"""Attach tokens of groups: who gets in with which, and that nobody gets to see one."""

import base64
import json
import os
import re
import shutil
import unittest
import urllib.request

import harness
import reflect
import worker

FIRST, SECOND, WRONG = "sesame-first-3f9c", "sesame-second-81aa", "sesame-wrong-77e0"
NOT_ALLOWED = 5  # exit code


class TokenCase(harness.TestCase):
    """The group moe, and files with tokens.  self.server: who is asked."""

    def setUp(self):
        super().setUp()
        self.first, self.second, self.wrong = (self.write(name, token + "\n") for name, token in
                                               (("first", FIRST), ("second", SECOND), ("wrong", WRONG)))

    def admin(self, *args, code=0, server=None):
        result = self.operate(server or self.server, *args)
        self.assertEqual(result.code, code, result)
        return result

    def create(self, *flags, ranks=1):
        return self.admin("group", "create", "moe", "--ranks=%d" % ranks, "--experts=8", "--hidden=64", "--top-k=2",
                          "--ll-max-tokens=16", "--ht-max-tokens=16", "--arena=4MiB", "--timeout-ms=60000", *flags)

    def update(self, *flags):
        return self.admin("group", "update", "moe", *flags)

    def group(self):
        return self.admin("group", "get", "moe", "-o", "json").json()

    def rank(self, number=0):
        return self.group()["status"]["ranks"][number]

    def start_worker(self, rank, *flags, env=None, server=None):
        process = self.spawn(["worker", "--group=moe", "--rank=%d" % rank, "--pause-ms=2", *flags], env=env,
                             server=server or self.server)
        harness.wait_until(lambda: "attached" in process.out() or not process.alive(), process.log)
        return process

    def gets_in(self, rank, *flags, **more):
        process = self.start_worker(rank, *flags, **more)
        self.assertTrue(process.alive(), process.log())
        return process

    def stays_out(self, why, rank, *flags, **more):
        process = self.start_worker(rank, *flags, **more)
        self.assertEqual(process.wait(), NOT_ALLOWED, process.log())
        self.assertIn(why, process.log())

    def leave(self, *processes):
        for process in processes:
            self.assertEqual(process.stop(), 0, process.log())

    def refusals(self, server=None):
        return [line for line in (server or self.server).log().splitlines()
                if "mod=audit" in line and "action=attach.claim" in line]

    def check_hidden(self, *texts):
        for text in texts:
            for secret in (FIRST, SECOND, WRONG):
                self.assertNotIn(secret, text)

    def check_no_hash(self, *texts):
        self.check_hidden(*texts)
        for text in texts:
            self.assertNotIn("$y$", text)


class ServersOwnTest(TokenCase):
    """The secret that a server asks all workers for, beside those of groups."""

    def setUp(self):
        super().setUp()
        self.server = self.start_server("--host-ranks=4", "--attach-token-file=" + self.first)

    def own(self, path):
        return {"EP_CLIENT_TOKEN_FILE": path}

    def test_only_the_right_one_gets_in(self):
        self.create(ranks=2)
        for why, env in (("this server asks workers for one", None), ("token is not the one", self.own(self.wrong))):
            with self.subTest(why):
                self.stays_out(why, 0, env=env)
                self.stays_out("or a file that EP_CLIENT_TOKEN_FILE names", 0, env=env)
        self.leave(self.gets_in(0, env=self.own(self.first)), self.gets_in(1, env=self.own(self.first)))
        self.check_hidden(self.server.log())

    def test_that_of_a_group_is_asked_for_too(self):
        self.create("--attach-token-file=" + self.second)
        self.stays_out("group moe wants an attach token", 0, env=self.own(self.first))
        self.stays_out("this server asks workers for one", 0, "--token-file=" + self.second)
        self.leave(self.gets_in(0, "--token-file=" + self.second, env=self.own(self.first)))

    def test_every_program_takes_it(self):
        self.create()
        for command in (["hello_dispatch", "moe"], ["ep-bench", "--group=moe", "--tokens=8", "--iters=5", "--modes=ll"]):
            with self.subTest(command[0]):
                self.assertEqual(self.run_cmd(command, server=self.server, env=self.own(self.first)).code, 0)
                refused = self.run_cmd(command, server=self.server, env=self.own(self.wrong))
                self.assertNotEqual(refused.code, 0)
                self.assertIn("token is not the one", refused.out + refused.err)
                unread = self.run_cmd(command, server=self.server, env=self.own("/no/file"))
                self.assertNotEqual(unread.code, 0)
                self.assertIn("EP_CLIENT_TOKEN_FILE: cannot read /no/file", unread.out + unread.err)


class OneServerTest(TokenCase):
    def setUp(self):
        super().setUp()
        self.server = self.start_server("--host-ranks=4")

    def test_only_the_right_token_gets_in(self):
        self.create("--attach-token-file=" + self.first, ranks=2)
        self.stays_out("group moe wants an attach token: give it by ep_join_options.token, or a file that "
                       "EP_ATTACH_TOKEN_FILE names (--token-file of worker and ep-bench)", 0)
        self.stays_out("that is not the attach token of group moe", 0, "--token-file=" + self.wrong)
        self.leave(self.gets_in(0, "--token-file=" + self.first), self.gets_in(1, env={"EP_ATTACH_TOKEN_FILE": self.first}))
        missing, wrong = self.refusals()
        for line in (missing, wrong):
            self.assertIn('msg="claim refused"', line)
            self.assertIn("target=moe", line)
            self.assertIn("by=uid:%d" % os.getuid(), line)
            self.assertIn("status=PERMISSION_DENIED", line)
        self.check_no_hash(self.server.log())

    def test_unchanged_programs_get_in_by_their_environment(self):
        self.create("--attach-token-file=" + self.first)
        right, wrong = ({"EP_ATTACH_TOKEN_FILE": path} for path in (self.first, self.wrong))
        self.assertEqual(self.run_cmd(["hello_dispatch", "moe"], server=self.server, env=right).code, 0)
        self.assertEqual(self.run_cmd(["hello_dispatch", "moe"], server=self.server, env=wrong).code, 1)
        result = self.run_cmd(["hello_dispatch", "moe"], server=self.server, env={"EP_ATTACH_TOKEN_FILE": "/no/file"})
        self.assertIn("EP_ATTACH_TOKEN_FILE: cannot read /no/file", result.out + result.err)

    def test_what_a_program_gives_itself_comes_before_its_environment(self):
        self.create("--attach-token-file=" + self.first)
        right, wrong = ({"EP_ATTACH_TOKEN_FILE": path} for path in (self.first, self.wrong))
        self.leave(self.gets_in(0, "--token-file=" + self.first, env=wrong))
        self.stays_out("that is not the attach token", 0, "--token-file=" + self.wrong, env=right)
        missing = self.start_worker(0, "--token-file=/no/file", env=right)
        self.assertEqual(missing.wait(), 2)
        self.assertIn("--token-file: cannot read a token from /no/file", missing.log())
        too_long = self.start_worker(0, "--token-file=" + self.write("long", "x" * 257))
        self.assertEqual(too_long.wait(), 2)
        self.assertIn("ep_join_options.token has 257 bytes: must have at most 256", too_long.log())

    def test_the_bench_takes_it_from_a_file(self):
        self.create("--attach-token-file=" + self.first)
        bench = ["ep-bench", "--group=moe", "--tokens=8", "--iters=5", "--modes=ll"]
        done = self.run_cmd(bench + ["--token-file=" + self.first], server=self.server)
        self.assertEqual(done.code, 0, done)
        refused = self.run_cmd(bench, server=self.server)
        self.assertNotEqual(refused.code, 0)
        self.assertIn("group moe wants an attach token", refused.err)
        unread = self.run_cmd(bench + ["--token-file=/no/file"], server=self.server)
        self.assertEqual(unread.code, 2, unread)
        self.assertIn("--token-file: cannot read /no/file", unread.err)

    def test_a_group_without_one_takes_any(self):
        self.create(ranks=2)
        self.leave(self.gets_in(0), self.gets_in(1, "--token-file=" + self.wrong))

    def test_a_change_is_for_later_attaches_and_makes_no_epoch(self):
        self.create(ranks=2)
        early = self.gets_in(0)
        told = self.update("--attach-token-file=" + self.first)
        self.assertIn("epoch 1,", told.out)
        self.stays_out("wants an attach token", 1)
        later = self.gets_in(1, "--token-file=" + self.first)
        self.update("--attach-token-file=" + self.second)
        self.assertTrue(early.alive() and later.alive())
        self.leave(later)
        self.stays_out("that is not the attach token", 1, "--token-file=" + self.first)
        later = self.gets_in(1, "--token-file=" + self.second)
        self.update("--no-attach-token")
        self.assertEqual(self.group()["spec"].get("attach_token"), None)
        self.leave(later)
        self.leave(self.gets_in(1))
        self.assertEqual(self.rank(0)["pid"], early.pid)
        self.assertEqual(self.group()["status"]["epoch"], 1)
        self.leave(early)

    def test_who_follows_goes_over_after_a_change_of_the_token(self):
        self.create("--attach-token-file=" + self.first, ranks=2)
        workers = [self.gets_in(rank, "--follow", "--token-file=" + self.first) for rank in range(2)]
        self.update("--attach-token-file=" + self.second)
        self.update("--ll-max-tokens=32")
        for process in workers:
            harness.wait_until(lambda: "epoch 2: gone over" in process.out(), process.out)
            harness.wait_until(lambda: re.search(r"epoch 2: absent 0, failures 0 .* [1-9]\d* steps", process.out()),
                               process.out)
        self.assertEqual(self.refusals(), [])
        self.leave(*workers)

    def test_it_survives_a_restart(self):
        self.create("--attach-token-file=" + self.first)
        self.assertEqual(self.server.stop(), 0)
        self.server = self.start_server("--host-ranks=4")
        self.stays_out("wants an attach token", 0)
        self.leave(self.gets_in(0, "--token-file=" + self.first))

    def test_nobody_sees_it(self):
        watch = self.spawn(["ep-admin", "group", "watch", "-o", "json"], server=self.server)
        self.create("--attach-token-file=" + self.first)
        self.update("--attach-token-file=" + self.second)
        self.stays_out("that is not", 0, "--token-file=" + self.wrong)
        self.leave(self.gets_in(0, "--token-file=" + self.second))
        shown = [self.admin("group", *words).out for words in (
            ("get", "moe"), ("get", "moe", "-o", "json"), ("get", "moe", "-o", "yaml"), ("list", "-o", "json"),
            ("plan", "moe", "-o", "json"), ("history", "moe"), ("history", "moe", "-o", "json"),
            ("update", "moe", "--attach-token-file=" + self.first, "--dry-run", "-o", "json"))]
        self.assertRegex(shown[0], r"(?m)^attach token +set$")
        self.assertEqual(json.loads(shown[1])["spec"]["attach_token"], {"set": True})
        with reflect.Client(self.server.address) as rpc:
            got = rpc.call("ep.v1.Admin/GetGroup", {"name": "moe"})
            self.assertEqual(got["spec"]["attach_token"], {"set": True})
            described = rpc.call("ep.v1.Attach/Describe", {"group": "moe"})
            self.assertEqual(described["spec"]["attach_token"], {"set": True})
            claimed = worker.claim(rpc, "moe", 0, group_token=SECOND)
            self.assertEqual(claimed["spec"]["attach_token"], {"set": True})
        harness.wait_until(lambda: watch.out().count("attach_token") > 1, watch.out)
        watch.kill()
        changes = [{change["field"]: (change.get("from", ""), change.get("to", "")) for change in entry["fields"]}
                   for entry in json.loads(shown[6])["changes"]]
        self.assertEqual([change["attach_token"] for change in changes], [("", "set"), ("set", "another")])
        self.check_no_hash(*shown, watch.out(), json.dumps([got, described, claimed]), self.server.log(),
                           self.server.http("/metrics")[2])
        self.server.stop()
        stored = ""
        for name in os.listdir(self.server.state_dir):
            with open(os.path.join(self.server.state_dir, name), "rb") as f:
                stored += f.read().decode("latin-1")
        self.assertIn("$y$", stored)
        self.check_hidden(stored)

    def test_what_get_prints_is_good_for_an_update_and_not_for_a_creation(self):
        self.create("--attach-token-file=" + self.first)
        path = self.write("group.yaml", self.admin("group", "get", "moe", "-o", "yaml").out)
        self.update("--file=" + path)
        self.stays_out("wants", 0)
        self.leave(self.gets_in(0, "--token-file=" + self.first))
        self.admin("group", "delete", "moe")
        refused = self.admin("group", "create", "--file=" + path, code=2)
        self.assertIn("attach_token.set is true: the group has no token", refused.err)
        self.admin("group", "create", "--file=" + path, "--attach-token-file=" + self.second)
        self.leave(self.gets_in(0, "--token-file=" + self.second))

    def test_files_that_hold_no_token_are_refused(self):
        for text in ("", "\n" + FIRST, "x" * 257):
            path = self.write("bad", text)
            refused = self.run_cmd(["ep-admin", "group", "create", "moe", "--ranks=1", "--experts=2", "--hidden=64",
                                    "--top-k=1", "--attach-token-file=" + path], server=self.server)
            self.assertEqual(refused.code, 2, refused)
            self.assertIn("--attach-token-file: the first line of %s must have 1 to 256 bytes of text" % path, refused.err)
        longest = self.write("longest", "x" * 256 + "\r\nanything")
        self.create("--attach-token-file=" + longest)
        self.leave(self.gets_in(0, "--token-file=" + longest))
        both = self.run_cmd(["ep-admin", "group", "update", "moe", "--no-attach-token", "--attach-token-file=" + self.first],
                            server=self.server)
        self.assertEqual(both.code, 2, both)
        self.assertIn("one of the two", both.err)

    def test_a_hash_is_not_taken_from_operators(self):
        with reflect.Client("127.0.0.1:%d" % self.server.port) as rpc:
            with self.assertRaises(Exception) as refused:
                rpc.call("ep.v1.Admin/CreateGroup", {"name": "moe", "spec": {
                    "ranks": 1, "experts": 2, "hidden": 64, "top_k": 1, "attach_token": {"hash": "$y$j75$abc$def"}}})
        self.assertIn("attach_token.hash is given: servers alone", str(refused.exception))
        self.assertIn("attach_token.hash is given", [line for line in self.server.log().splitlines()
                                                     if "action=group.create" in line][0])

    def test_a_user_who_guesses_is_slowed_down(self):
        self.create("--attach-token-file=" + self.first)
        with reflect.Client(self.server.address) as rpc:
            for guess in range(40):
                with self.assertRaises(Exception):
                    worker.claim(rpc, "moe", 0, group_token="guess %d" % guess)
        wrong = [line for line in self.refusals() if "that is not the attach token" in line]
        self.assertTrue(wrong)
        seconds = {}
        for line in wrong:
            second = re.search(r"T(\d\d:\d\d:\d\d)", line).group(1)
            seconds[second] = seconds.get(second, 0) + 1
        self.assertLessEqual(max(seconds.values()), 20, seconds)  # seconds of another clock
        self.leave(self.gets_in(0, "--token-file=" + self.first))  # it waits for its turn


@unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")
class ClusterTest(TokenCase):
    def records(self):
        everything = base64.b64encode(b"\0").decode()
        request = urllib.request.Request("http://127.0.0.1:%d/v3/kv/range" % self.etcd.ports[0][0], method="POST",
                                         data=json.dumps({"key": everything, "range_end": everything}).encode())
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as reply:
            found = json.load(reply)["kvs"]
        return {base64.b64decode(kv["key"]).decode(): base64.b64decode(kv.get("value", "")) for kv in found}

    def test_every_server_asks_for_it_and_etcd_has_the_hash_alone(self):
        self.etcd = harness.Etcd(self.box)
        servers = {name: self.start_server("--store=" + self.etcd.url("/token"), "--name=" + name, "--host-ranks=2",
                                           harness.NOT_LOST, name=name, ready=False) for name in ("a", "b")}
        for server in servers.values():
            server.wait_ready()
        for name, self.server in servers.items():  # one of them leads, and is handed the other's change
            path = self.write("token-" + name, FIRST + name + "\n")
            if name == "a":
                self.create("--placement=spread", "--attach-token-file=" + path, ranks=2)
            else:
                self.update("--attach-token-file=" + path)
            on = {rank["node"]: rank["rank"] for rank in self.group()["status"]["ranks"]}
            for node, server in servers.items():
                harness.wait_until(lambda: self.tried(server, on[node], FIRST + name) is None,
                                   lambda: self.tried(server, on[node], FIRST + name))
                self.assertIn("wants an attach token", self.tried(server, on[node], ""))
                self.assertIn("that is not", self.tried(server, on[node], WRONG))
                self.assertTrue(self.refusals(server))
        records = self.records()
        with_hash = [key for key, value in records.items() if b"$y$" in value]
        self.assertEqual(with_hash, ["/token/groups/moe/spec"])
        self.check_hidden(*(value.decode("latin-1") for value in records.values()))
        self.check_no_hash(*(server.log() for server in servers.values()))

    @staticmethod
    def tried(server, rank, token):
        """Why not, or None."""
        with reflect.Client(server.address) as rpc:
            try:
                reply = worker.claim(rpc, "moe", rank, group_token=token)
            except Exception as e:  # grpc's
                return str(e)
            side = harness.connect_unix(reply["socket"], harness.socket.SOCK_SEQPACKET)
            side.send(worker.pack(worker.HELLO, base64.b64decode(reply["ticket"])))
            side.recv(worker.LAYOUT.size)
            side.send(worker.pack(worker.BYE))
            side.close()
            return None


if __name__ == "__main__":
    harness.main()
