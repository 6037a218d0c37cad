#!/usr/bin/python3
"""What a change would do, what members offer, homes by load, and the history of a group: ep-admin at real servers."""

import base64
import json
import os
import re
import shutil
import unittest
import urllib.request

import harness

SIZES = ["--experts=16", "--hidden=64", "--top-k=2", "--ll-max-tokens=16", "--ht-max-tokens=64"]
MIB = 1 << 20


class PlanTest(harness.TestCase):
    def admin(self, *args, code=0, server=None):
        result = self.run_cmd(["ep-admin", "--timeout=30s", *args], server=server or self.server)
        self.assertEqual(result.code, code, result)
        return result

    def plan(self, *args, **more):
        return self.admin("group", "plan", "moe", *args, "-o", "json", **more).json()

    def create(self, *flags, ranks=4):
        self.admin("group", "create", "moe", "--ranks=%d" % ranks, *SIZES, *flags)

    def history(self, **more):
        return self.admin("group", "history", "moe", "-o", "json", **more).json()["changes"]

    def get(self, **more):
        return self.admin("group", "get", "moe", "-o", "json", **more).json()

    def loads(self, counts):
        lines = "".join("%d,%d\n" % entry for entry in enumerate(counts))
        return "--loads=" + self.box.write("loads%d.csv" % len(counts), "expert,count\n" + lines)


    def run_workers(self, ranks):
        """One at each rank, which have checked some results."""
        nodes = [rank["node"] for rank in self.get()["status"]["ranks"]]
        workers = [self.spawn(["worker", "--group=moe", "--rank=%d" % r, "--mode=ll", "--pause-ms=5"], name="w%d" % r,
                              server=self.servers.get(nodes[r], self.server)) for r in range(ranks)]
        harness.wait_until(lambda: all(re.search(r"[1-9]\d* steps.* 0 wrong", w.out()) for w in workers), "steps")
        return workers


class OneServerTest(PlanTest):
    servers = {}

    def setUp(self):
        super().setUp()
        self.server = self.start_server("--host-ranks=6", "--memory=96MiB")

    # ---- negotiation

    def test_sizes_that_nobody_asked_for_are_settled_within_the_memory(self):
        settled = self.admin("group", "create", "big", "--ranks=4", "--experts=16", "--hidden=512", "--top-k=2", "-o",
                             "json").json()
        tokens = settled["spec"]["ht_max_tokens"]
        self.assertTrue(512 <= tokens < 4096, tokens)
        note = next(n for n in settled["status"]["settled"]["notes"] if n.startswith("ht_max_tokens"))
        self.assertRegex(note, r"0 asked, %d settled: the memory of node \S+ has \d+ bytes left for 4 ranks" % tokens)
        same = self.admin("group", "update", "big", "--timeout-ms=99", "-o", "json").json()
        self.assertEqual((same["status"]["epoch"], same["spec"]["ht_max_tokens"]), (1, tokens))

    def test_a_refusal_says_what_would_fit_and_that_fits(self):
        for flag, field, too_much in (("--ht-max-tokens", "ht_max_tokens", 10**6), ("--arena", "arena_bytes", 2**30)):
            args = ["group", "create", "big", "--ranks=4", "--experts=16", "--hidden=512", "--top-k=2",
                    "--ll-max-tokens=16", "--ht-max-tokens=64"]
            refused = self.admin(*args, flag + "=%d" % too_much, code=1)
            most = int(re.search(field + r" (\d+)", refused.err).group(1))
            self.admin(*args, "%s=%d" % (flag, most))
            self.admin("group", "delete", "big")

    def test_an_update_needs_room_beside_the_epoch_that_runs(self):
        self.create("--arena=12MiB")
        refused = self.admin("group", "update", "moe", "--arena=14MiB", code=1)
        self.assertRegex(refused.err, r"arena_bytes \d+ would fit beside epoch 1, which keeps \d+ bytes of each rank")
        self.admin("group", "delete", "moe")
        self.create("--arena=14MiB")

    # ---- plans

    def test_a_plan_says_what_would_be_and_changes_nothing(self):
        text = self.admin("group", "plan", "moe", "--ranks=4", *SIZES).out
        for words in ("epoch          1, a new one", "0-3", "12-15", "window", "BESIDE"):
            self.assertIn(words, text)
        self.admin("group", "get", "moe", code=3)
        self.create()
        before = self.get()
        plan = self.plan("--arena=4MiB")
        self.assertEqual(plan["plan"]["moved_experts"], [])
        device, = plan["plan"]["devices"]
        self.assertEqual(device["before"], 4 * before["status"]["settled"]["window_bytes"])
        self.assertEqual(device["after"], 4 * plan["status"]["settled"]["window_bytes"])
        self.assertEqual(device["beside"], device["before"] + device["after"])
        self.assertEqual(device["total"], 96 * MIB)
        self.assertEqual(plan["plan"], self.admin("group", "update", "moe", "--arena=4MiB", "--dry-run", "-o",
                                                  "json").json()["plan"])
        moved = self.plan("--ranks=5")["plan"]
        self.assertEqual([rank["was_node"] != "" for rank in moved["ranks"]], [True] * 4 + [False])
        self.assertEqual(moved["moved_experts"], [7, 10, 11, 13, 14, 15])  # 4, 3, 3, 3, 3 on each instead of 4
        self.assertFalse(self.plan("--timeout-ms=5")["plan"]["new_epoch"])
        self.assertFalse(self.plan()["plan"]["new_epoch"])
        self.assertEqual(self.get(), before)
        self.assertIn("ranks:", self.admin("group", "plan", "moe", "-o", "yaml").out)
        self.admin("group", "plan", "nope", code=3)

    def test_the_plan_is_what_happens(self):
        self.create()
        plan = self.plan("--ll-max-tokens=32", "--ranks=5")
        done = self.admin("group", "update", "moe", "--ll-max-tokens=32", "--ranks=5", "-o", "json").json()
        self.assertEqual(done["status"]["settled"], plan["status"]["settled"])
        self.assertEqual(done["spec"], plan["spec"])
        self.assertEqual([rank["local_experts"] for rank in done["status"]["ranks"]],
                         [len(rank["experts"]) for rank in plan["plan"]["ranks"]])

    # ---- homes by load

    def test_hot_experts_get_more_homes(self):
        self.create()
        flags = ["--placement=by-load", "--redundant=4", self.loads([1000 // (e + 1) for e in range(16)])]
        ranks = self.plan(*flags)["plan"]["ranks"]
        loads, before = ([rank[key] for rank in ranks] for key in ("load", "was_load"))
        self.assertGreater(4 * max(before), 2 * sum(before))
        self.assertLess(4 * max(loads), 1.1 * sum(loads))
        self.assertIn("balance        fullest rank 1.", self.admin("group", "plan", "moe", *flags).out)
        done = self.admin("group", "update", "moe", *flags, "-o", "json").json()
        self.assertEqual(done["spec"]["placement"]["strategy"], "PLACEMENT_STRATEGY_EXPLICIT")
        self.assertEqual(len(done["spec"]["placement"]["homes"]), 20)
        live = self.admin("group", "update", "moe", "--timeout-ms=9000", "-o", "json").json()
        self.assertEqual((live["status"]["epoch"], live["spec"]["placement"]), (2, done["spec"]["placement"]))
        packed = self.admin("group", "update", "moe", "--placement=pack", "-o", "json").json()  # the experts stay
        self.assertEqual(packed["spec"]["placement"]["homes"], done["spec"]["placement"]["homes"])
        wider = self.admin("group", "update", "moe", "--ranks=5", "-o", "json").json()  # balanced by the same loads
        self.assertEqual([rank["local_experts"] for rank in wider["status"]["ranks"]], [4] * 5)
        contiguous = self.admin("group", "update", "moe", "--ranks=4", "--placement=contiguous", "-o", "json").json()
        self.assertEqual((contiguous["status"]["epoch"], contiguous["spec"]["placement"].get("homes", [])), (4, []))
        self.admin("group", "update", "moe", *flags)
        self.run_workers(4)

    def test_loads_of_any_size_are_told(self):
        self.create()
        most = 2 ** 64 - 1
        for each, told in ((2 ** 61, 2 ** 63), (most, most)):  # four experts on each rank
            ranks = self.plan("--placement=by-load", self.loads([each] * 16))["plan"]["ranks"]
            self.assertEqual([(int(rank["load"]), int(rank["was_load"])) for rank in ranks], [(told, told)] * 4)

    def test_what_the_servers_have_counted_is_taken(self):
        self.create(ranks=2)
        refused = self.admin("group", "plan", "moe", "--placement=by-load", code=1)
        self.assertIn("no rows were counted", refused.err)
        workers = self.run_workers(2)
        table = self.admin("stats", "moe", "--experts").out.splitlines()
        self.assertEqual((table[0].split()[:2], len(table)), (["EXPERT", "ROWS"], 17))
        self.assertGreater(sum(int(line.split()[1]) for line in table[1:]), 0)
        loads = [rank["load"] for rank in self.plan("--placement=by-load")["plan"]["ranks"]]
        self.assertGreater(min(loads), 0)
        self.admin("stats", "--experts", code=2)
        for worker in workers:
            worker.stop()

    def test_loads_come_in_every_form(self):
        self.create()
        counts = [1000 // (e + 1) for e in range(16)]
        forms = {"list.json": json.dumps(counts), "with-header.csv": "expert,count\n",
                 "objects.json": json.dumps([{"expert": e, "count": n} for e, n in enumerate(counts)]),
                 "list.yaml": "".join("- %d\n" % n for n in counts), "bare.csv": ""}
        for name in ("with-header.csv", "bare.csv"):
            forms[name] += "".join("%d, %d\n" % entry for entry in enumerate(counts))
        plans = [self.plan("--placement=by-load", "--loads=" + self.box.write(name, text))["plan"]["ranks"]
                 for name, text in forms.items()]
        self.assertEqual(sum(rank["load"] for rank in plans[0]) // 10, sum(counts) // 10)
        for ranks in plans[1:]:
            self.assertEqual(ranks, plans[0])

    def test_loads_that_cannot_be_used_are_refused(self):
        self.create()
        for flags, words in ((["--redundant=3"], "--redundant goes with --placement by-load"),
                             (["--placement=by-load", self.loads([1, 2])], "placement.loads has 2 entries"),
                             (["--placement=by-load", "--redundant=100", self.loads([1] * 16)],
                              "placement.redundant is 100: must be at most 48"),
                             (["--placement=by-load", "--loads=" + self.box.write("bad", "1;2\n")], "bad:1: must be"),
                             (["--placement=by-load", "--loads=" + self.box.write("bad.json", '[1, "x"]')],
                              "[1] must be")):
            with self.subTest(flags=flags):
                refused = self.run_cmd(["ep-admin", "group", "plan", "moe", *flags], server=self.server)
                self.assertNotEqual(refused.code, 0)
                self.assertIn(words, refused.err)

    # ---- history

    def test_every_change_is_told_with_who_and_what_and_how_long(self):
        self.create()
        self.admin("group", "update", "moe", "--hidden=128")
        self.admin("group", "update", "moe", "--timeout-ms=7")
        self.admin("group", "update", "moe", "--hidden=3", code=2)
        self.admin("group", "update", "moe", "--hidden=256", "--dry-run")
        harness.wait_until(lambda: len(self.history()) == 4, "four entries")
        made, update, live, refused = self.history()
        self.assertEqual([entry["outcome"] for entry in (made, update, live, refused)], ["made"] * 3 + ["refused"])
        self.assertEqual([(entry["epoch_before"], entry["epoch_after"]) for entry in (made, update, live)],
                         [(0, 1), (1, 2), (2, 2)])
        self.assertEqual(update["fields"], [{"field": "hidden", "from": "64", "to": "128"}])
        self.assertEqual(made["by"], "uid:%d" % os.getuid())
        self.assertTrue(all(update[phase + "_us"] > 0 for phase in ("prepare", "connect", "commit", "settle")), update)
        self.assertIn("hidden is 3", refused["reason"])
        self.assertEqual(refused["fields"], [{"field": "hidden", "from": "128", "to": "3"}])
        self.assertIn("hidden 64 -> 128", self.admin("group", "history", "moe").out)

    def test_the_last_64_are_kept_over_a_restart_and_gone_with_the_group(self):
        self.create()
        for i in range(70):
            self.admin("group", "update", "moe", "--timeout-ms=%d" % (i + 1))
        harness.wait_until(lambda: self.history()[-1]["number"] == 71, "the last")
        kept = self.history()
        self.assertEqual([entry["number"] for entry in kept], list(range(8, 72)))
        self.server.stop()
        self.server = self.start_server("--host-ranks=6", "--memory=96MiB")
        harness.wait_until(lambda: self.history()[-1]["change"] == "renewal", "the epoch formed anew")
        self.assertEqual(self.history()[:-1], kept[1:])
        self.admin("group", "delete", "moe")
        self.admin("group", "history", "moe", code=3)
        self.create()
        harness.wait_until(lambda: len(self.history()) == 1, "a history of its own")
        self.assertEqual(self.history()[0]["number"], 1)


@unittest.skipUnless(shutil.which("etcd"), "etcd is not installed (package etcd-server)")
class ThreeServersTest(PlanTest):
    def setUp(self):
        super().setUp()
        self.etcd = harness.Etcd(self.box)
        self.servers = {name: self.start(name) for name in "abc"}
        for server in self.servers.values():
            server.wait_ready()
        self.server = self.servers["a"]

    def start(self, name, *flags):
        return self.start_server("--store=" + self.etcd.url("/plan"), "--name=" + name, "--host-ranks=2", *flags,
                                 name=name, ready=False)

    def test_plans_and_histories_are_the_same_at_every_server(self):
        self.create("--placement=spread", ranks=3)
        loads = self.loads([1000 // (e + 1) for e in range(16)])
        plans = [self.plan("--placement=by-load", "--redundant=2", loads, server=s) for s in self.servers.values()]
        self.assertEqual(plans[0]["plan"], plans[1]["plan"])
        self.assertEqual(plans[0]["plan"], plans[2]["plan"])
        self.assertEqual([rank["node"] for rank in plans[0]["plan"]["ranks"]], ["a", "b", "c"])  # nodes stay
        self.assertEqual(len(plans[0]["plan"]["devices"]), 3)
        for name, server in self.servers.items():
            self.admin("group", "update", "moe", "--hidden=%d" % (64 + 16 * ord(name)), server=server)
        for server in self.servers.values():
            harness.wait_until(lambda: [entry["outcome"] for entry in self.history(server=server)] == ["made"] * 4,
                               lambda: self.history(server=server), 5)
            entries = self.history(server=server)
            self.assertEqual([entry["server"] for entry in entries], ["a", "a", "b", "c"])
            self.assertEqual({entry["by"] for entry in entries}, {"uid:%d" % os.getuid()})

    def test_rows_of_experts_are_summed_over_nodes(self):
        self.create(ranks=6)
        workers = self.run_workers(6)
        stats = self.admin("stats", "moe", "--experts", "-o", "json").json()
        self.assertEqual(sorted(rank["rank"] for rank in stats["ranks"]), list(range(6)))
        self.assertTrue(all(sum(rank["expert_rows"]) > 0 for rank in stats["ranks"]), stats)
        for worker in workers:
            worker.stop()

    def test_a_node_with_less_memory_decides(self):
        self.servers["b"].stop()
        self.servers["b"] = self.start("b", "--memory=80MiB").wait_ready()
        refused = self.admin("group", "create", "moe", "--ranks=6", "--experts=12", "--hidden=512", "--top-k=2",
                             "--ll-max-tokens=16", "--ht-max-tokens=20000", code=1)
        self.assertIn("node b has", refused.err)
        most = int(re.search(r"ht_max_tokens (\d+) would fit", refused.err).group(1))
        self.admin("group", "create", "moe", "--ranks=6", "--experts=12", "--hidden=512", "--top-k=2",
                   "--ll-max-tokens=16", "--ht-max-tokens=%d" % most)

    def store(self, method, **message):
        """etcd's JSON gateway; keys and values are bytes."""
        body = {name: base64.b64encode(value).decode() for name, value in message.items()}
        request = urllib.request.Request("http://%s/v3/kv/%s" % (self.etcd.endpoints(), method),
                                         json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def test_a_node_of_another_release_is_no_member(self):
        record = base64.b64decode(self.store("range", key=b"/plan/nodes/b/server")["kvs"][0]["value"])
        self.assertIn(b"\n\x050.1.0", record)
        self.store("put", key=b"/plan/nodes/z/server",
                   value=record.replace(b"\n\x050.1.0", b"\n\x059.9.9").replace(b"\n\x01b", b"\n\x01z"))
        harness.wait_until(lambda: "z" in self.admin("node", "list", "-q").out.split(), "node z")
        refused = self.admin("group", "create", "moe", "--ranks=8", *SIZES, code=1)
        self.assertRegex(refused.err, r"node z is of release 9\.9\.9 \(windows \d+\), not 0\.1\.0 \(windows \d+\)")
        self.create(ranks=6)
        self.assertNotIn("z", [rank["node"] for rank in self.get()["status"]["ranks"]])
        homes = "nodes: explicit\nranks: [{rank: 0, node: z}]\n"
        refused = self.admin("group", "plan", "one", "--ranks=1", "--placement=" + self.box.write("homes", homes),
                             *SIZES, code=1)
        self.assertIn("rank 0 is on node z, which is of release 9.9.9", refused.err)


if __name__ == "__main__":
    harness.main()
