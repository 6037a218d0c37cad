#!/usr/bin/python3
"""ep-admin against real servers: every command, its output formats, exit codes, and how it fails."""

import fcntl
import glob
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
import unittest

import harness

SPEC = ["--ranks", "2", "--experts", "8", "--hidden", "64", "--top-k", "2", "--ll-max-tokens", "8",
        "--ht-max-tokens", "16", "--arena", "1MiB", "--timeout-ms", "2000"]
UNIT = os.path.join(os.path.dirname(harness.BIN), "unit")
NO_GPUS = not glob.glob("/dev/nvidia[0-9]*")
CERTS = os.path.join(harness.ROOT, "deploy", "certs.sh")


class AdminTest(harness.TestCase):
    """Runs ep-admin; without `server=` there is none."""

    def admin(self, *args, server=None, code=0, env=None, input=None, **more):
        result = self.run_cmd(["ep-admin", *args], server=server, env=env, input=input, **more)
        self.assertEqual(result.code, code, result)
        for word in harness.COMPLAINTS:
            self.assertNotIn(word, result.err)
        if code not in (0, 6):
            self.assertTrue(result.err.startswith("ep-admin: "), result)
        return result

    def refused(self, *args, says, code=2, server=None, **more):
        """Nothing on stdout, one sentence on stderr (and where help is, for usage)."""
        result = self.admin(*args, code=code, server=server, **more)
        self.assertEqual(result.out, "", result)
        self.assertIn(says, result.err.split("\n")[0], result)
        return result

    def create(self, server, name="moe", *flags):
        self.admin("group", "create", name, *SPEC, *flags, server=server)

    def get(self, server, name="moe"):
        return self.admin("group", "get", name, "-o", "json", server=server).json()

    def watch(self, server, *args, name):
        """A running `group watch -o json`; events() are those it has printed."""
        process = self.spawn(["ep-admin", "group", "watch", "-o", "json", *args], name=name, server=server)
        process.events = lambda: [json.loads(line) for line in process.out().splitlines(True) if line.endswith("\n")]
        return process


class UsageTest(AdminTest):
    def test_help_at_every_level(self):
        everything = self.admin("--help").out
        for words in ("group create", "node drain", "doctor", "Exit codes", "6  degraded"):
            self.assertIn(words, everything)
        self.assertIn("group watch", self.admin("group", "--help").out)
        self.assertNotIn("node drain", self.admin("group", "--help").out)
        self.assertIn("--top-k K", self.admin("group", "create", "--help").out)
        self.assertEqual(self.admin("help", "group", "create").out, self.admin("group", "create", "-h").out)

    def test_every_command_has_help(self):
        rows = re.findall(r"^  ([a-z]+(?: [a-z]+)?)", self.admin("--help").out.split("Global flags")[0], re.M)
        self.assertGreaterEqual(len(rows), 15, rows)
        for row in rows:
            words = [w for w in row.split() if w not in ("bash", "zsh")]
            self.assertIn("usage: ep-admin " + " ".join(words), self.admin(*words, "--help").out)

    def test_wrong_words(self):
        self.refused("nonsense", says="'nonsense' is not a command")
        self.refused("group", "nonsense", says="'nonsense' is not a verb")
        self.refused("group", says="a verb is missing")
        self.refused(says="a command is missing")
        self.refused("group", "get", says="NAME is missing")
        self.refused("group", "list", "moe", says="'moe' is one argument too many")
        self.refused("completion", "fish", says="SHELL 'fish' is not known")

    def test_wrong_flags(self):
        cases = {
            ("--nonsense",): "unknown flag --nonsense",
            ("-Z",): "unknown flag -Z",
            ("--ranks",): "--ranks needs a value",
            ("--ranks=-1",): "--ranks is '-1': must be a whole number",
            ("--ranks", "4294967296"): "--ranks is '4294967296'",
            ("--ranks", "eight"): "--ranks is 'eight'",
            ("--ranks", ""): "--ranks is ''",
            ("--modes", "ll,fast"): "--modes is 'll,fast': must be some of ll, ht",
            ("--dtypes", "int8"): "must be some of bf16, fp16, fp32, fp8_e4m3",
            ("--arena", "64MiBs"): "must be a size",
            ("--wait", "soon"): "must be a time",
            ("--label", "novalue"): "must be KEY=VALUE",
            ("--dry-run=yes",): "--dry-run takes no value",
            ("--output", "xml"): "must be one of table, json, yaml",
            ("--server", "nowhere"): "must be unix:PATH or HOST:PORT",
            ("--server", "host:0"): "must be unix:PATH or HOST:PORT",
            ("--server", "http://host:7300"): "must be unix:PATH or HOST:PORT",
            ("--server", "unix:/" + "x" * 200): "the path has 201 bytes",
            ("--server", "127.0.0.1:1", "--tls-cert", "x"): "a certificate and its key go together",
            ("--file", "/does/not/exist"): "/does/not/exist: cannot open: No such file",
            ("--placement", "sprad"): "--placement is 'sprad': must be pack, spread, contiguous, by-load or the name of a file",
        }
        for flags, says in cases.items():
            with self.subTest(flags=flags):
                self.refused("group", "create", "moe", *flags, says=says)

    def test_messages_name_the_command(self):
        error = self.refused("group", "create", "moe", "--ranks=x", says="--ranks").err
        self.assertTrue(error.startswith("ep-admin: group create: --ranks is 'x'"), error)

    def test_version_without_a_server(self):
        self.assertRegex(self.admin("--version").out, r"^ep-admin \d+\.\d+\.\d+ \(.+\)\n$")
        self.assertRegex(self.admin("version", "--client").out, r"^ep-admin +\d+\.\d+\.\d+ ")

    def test_output_to_a_full_device(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([harness.binary("ep-admin"), "--help"], stdout=full, stderr=subprocess.PIPE, text=True,
                                  env=harness.environment())
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("cannot write to standard output: No space left on device", done.stderr)

    def test_what_goes_on_writing_ends_at_a_full_device(self):
        server = self.start_server()
        for command in (["group", "watch"], ["top", "--interval=100ms"], ["top", "--interval=100ms", "--output=json"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([harness.binary("ep-admin"), *command], stdout=full, stderr=subprocess.PIPE, text=True,
                                      env=harness.environment({"EP_SERVER": server.address}),
                                      timeout=harness.PATIENCE_S * harness.SCALE)
            self.assertEqual(done.returncode, 1, done)
            self.assertRegex(done.stderr, "cannot write to standard output: (No space left|Input/output)")


class SpecFileTest(AdminTest):
    """Specification files, in dry runs and in their errors."""

    @staticmethod
    def yaml(**changes):
        fields = dict(ranks=2, experts=8, hidden=64, top_k=2, arena_bytes="1MiB", **changes)
        return "".join("%s: %s\n" % (k, v if isinstance(v, (str, int)) else json.dumps(v)) for k, v in fields.items())

    def settle(self, server, *args, input=None):
        return self.admin("group", "create", "--dry-run", "-o", "json", *args, server=server, input=input).json()["spec"]

    def test_yaml_json_and_standard_input(self):
        server = self.start_server("--host-ranks=4")
        path = self.write("spec.yaml", self.yaml(modes="[ll]", dtypes="[bf16]", labels="{team: a, 'no': 'yes'}"))
        spec = self.settle(server, "moe", "--file", path)
        self.assertEqual((spec["modes"], spec["dtypes"], spec["arena_bytes"]), (["MODE_LL"], ["DTYPE_BF16"], 1 << 20))
        self.assertEqual(spec["labels"], {"team": "a", "no": "yes"})
        as_json = self.write("spec.json", json.dumps({"ranks": 2, "experts": 8, "hidden": 64, "topK": 2,
                                                      "modes": ["MODE_LL"], "arena_bytes": "1MiB"}))
        self.assertEqual(self.settle(server, "moe", "-f", as_json)["top_k"], 2)
        self.assertEqual(self.settle(server, "moe", "-f", "-", input=self.yaml())["ranks"], 2)

    def test_flags_win_over_the_file(self):
        server = self.start_server("--host-ranks=4")
        path = self.write("spec.yaml", self.yaml(labels="{a: file, b: file}"))
        spec = self.settle(server, "moe", "--file", path, "--ranks=4", "--label", "a=flag", "--label=c=1=2")
        self.assertEqual((spec["ranks"], spec["experts"]), (4, 8))
        self.assertEqual(spec["labels"], {"a": "flag", "b": "file", "c": "1=2"})

    def test_every_form_of_a_placement(self):
        server = self.start_server("--host-ranks=4")
        homes = [(0, 1), (1, 0), (2, 0), (3, 1), (3, 0)]
        objects = [{"expert": e, "rank": r} for e, r in homes]
        forms = {"message": {"strategy": "explicit", "homes": objects}, "homes": {"homes": objects},
                 "list": objects, "by rank": [[1, 2, 3], [0, 3]]}
        flags = ["moe", "--ranks=2", "--experts=4", "--hidden=64", "--top-k=2"]
        for name, form in forms.items():
            with self.subTest(form=name):
                spec = self.settle(server, *flags, "--placement", self.write("placement.json", json.dumps(form)))
                self.assertEqual(spec["placement"]["strategy"], "PLACEMENT_STRATEGY_EXPLICIT")
                self.assertEqual({(h["expert"], h["rank"]) for h in spec["placement"]["homes"]}, set(homes))
        spec = self.settle(server, *flags, "--placement=contiguous")
        self.assertEqual(spec["placement"]["strategy"], "PLACEMENT_STRATEGY_CONTIGUOUS")

    def test_errors_name_file_and_field(self):
        cases = {
            "ranks: many\n": "f.yaml: ranks: expected an unsigned integer",
            "ranks: 2\nexpertz: 8\n": "f.yaml: expertz: there is no such field",
            "modes: [ll, fast]\n": "f.yaml: modes is 'fast': must be one of ll, ht",
            "arena_bytes: 3 apples\n": "f.yaml: arena_bytes is '3 apples': must be a size",
            "placement: {homes: [{expert: 0, rank: x}]}\n": "placement.homes[0].rank: expected an unsigned integer",
            "placement: {home: []}\n": "f.yaml: placement: home: there is no such field",
            "placement: [1]\n": "placement[0]: must be {expert, rank} or the list of a rank's experts",
            "labels: {a: 1}\n": "labels.a: expected",
            "ranks: 2\nranks: 3\n": "f.yaml:2:1: this key is there twice",
            "ranks: [\n": "f.yaml:2:1: ",
            "\tranks: 2\n": "f.yaml:1:1: ",
            "a: 1\n---\nb: 2\n": "must be one document",
            "": "f.yaml: is empty",
            "just words\n": "must be an object",
            "name: moe\nspec: 3\n": "spec: must be an object",
            "name: 12\nspec: {ranks: 2}\n": "f.yaml: name: must be a string",
            "modes: ll\n": "f.yaml: modes: must be a list, as in [ll, ht]",
            "a: &x [" + "1," * 10 + "1]\nb: " + "[" * 60 + "*x" + "]" * 60 + "\n": "too deep or too large",
        }
        for text, says in cases.items():
            with self.subTest(text=text[:40]):
                self.refused("group", "create", "moe", "--file", self.write("f.yaml", text), says=says)
        self.refused("group", "create", "moe", "--file", self.write("f.json", '{"ranks": 2,}'), says="f.json:1:")

    def test_what_get_prints_can_be_created_again(self):
        server = self.start_server("--host-ranks=4")
        self.create(server, "moe", "--label", "on=off", "--label", "n=1e3", "--label", "t=a: b # c")
        for form in ("yaml", "json"):
            text = self.admin("group", "get", "moe", "-o", form, server=server).out
            path = self.write("group." + form, text)
            self.admin("group", "create", "--dry-run", "-f", path, server=server, code=1)  # moe is there
            before = self.get(server)["spec"]
            self.admin("group", "delete", "moe", server=server)
            self.admin("group", "create", "--file", path, server=server)
            self.assertEqual(self.get(server)["spec"], before)
        self.refused("group", "create", "other", "-f", path, says="NAME is 'other', but the file is about 'moe'")


class GroupTest(AdminTest):
    def test_create_get_list_delete_in_every_format(self):
        server = self.start_server("--host-ranks=4")
        created = self.admin("group", "create", "moe", *SPEC, "--wait", "20s", server=server)
        self.assertRegex(created.out, r"^group moe created: READY, epoch 1, revision \d+, 2 ranks, window .* each\n$")
        self.assertEqual(created.err, "")

        table = self.admin("group", "list", server=server).out.splitlines()
        self.assertEqual(table[0].split(), "NAME PHASE EPOCH RANKS MODES EXPERTS HIDDEN TOP-K WINDOW AGE REASON".split())
        self.assertEqual(table[1].split()[:8], ["moe", "READY", "1", "0/2", "LL,HT", "8", "64", "2"])
        self.assertEqual(self.admin("group", "list", "--quiet", server=server).out, "moe\n")
        listed = self.admin("group", "list", "--output=json", server=server).json()
        self.assertEqual([g["name"] for g in listed["groups"]], ["moe"])
        self.assertIn("name: moe", self.admin("group", "list", "-o", "yaml", server=server).out)

        text = self.admin("group", "get", "moe", server=server).out
        for words in ("phase          READY", "0/2 attached", "8, top-k 2", "window", "EXPECTED"):
            self.assertIn(words, text)
        group = self.get(server)
        self.assertEqual((group["spec"]["timeout_ms"], group["status"]["phase"]), (2000, "PHASE_READY"))
        self.assertIn("phase: PHASE_READY", self.admin("group", "get", "moe", "-o", "yaml", server=server).out)

        self.assertEqual(self.admin("group", "delete", "moe", server=server).out, "group moe deleted\n")
        self.assertEqual(self.admin("group", "list", "-o", "json", server=server).json(), {"groups": [], "behind": ""})
        empty = self.admin("group", "list", server=server)
        self.assertEqual((empty.out, empty.err), ("", "ep-admin: group list: there are no groups\n"))

    def test_json_of_changes_is_the_reply(self):
        server = self.start_server("--host-ranks=4")
        created = self.admin("group", "create", "moe", *SPEC, "-o", "json", server=server).json()
        self.assertEqual(created["name"], "moe")
        updated = self.admin("group", "update", "moe", "--timeout-ms=9", "-o", "json", server=server).json()
        self.assertEqual(updated["spec"]["timeout_ms"], 9)
        self.assertEqual(self.admin("group", "delete", "moe", "-o", "json", server=server).json(), {})

    def test_the_servers_words(self):
        server = self.start_server("--host-ranks=4")
        result = self.refused("group", "create", "moe", "--ranks=2", "--experts=8", "--hidden=100", "--top-k=2",
                              says="hidden is 100: ", server=server)
        self.assertTrue(result.err.startswith("ep-admin: group create: hidden is 100: "), result)
        self.create(server)
        self.refused("group", "create", "moe", *SPEC, says="moe", code=1, server=server)

    def test_an_unknown_group_is_exit_code_3(self):
        server = self.start_server("--host-ranks=4")
        for words in (["group", "get"], ["group", "delete"], ["group", "update", "--timeout-ms=5"], ["stats"],
                      ["top", "--once"]):
            with self.subTest(words=words):
                self.refused(*words, "nope", says="nope", code=3, server=server)

    def test_a_dry_run_changes_nothing(self):
        server = self.start_server("--host-ranks=4")
        result = self.admin("group", "create", "moe", *SPEC, "--dry-run", server=server)
        self.assertIn("dry run: nothing was changed", result.err)
        self.assertIn("window", result.out)
        self.assertEqual(self.admin("group", "list", "-q", server=server).out, "")
        self.create(server)
        before = self.get(server)
        settled = self.admin("group", "update", "moe", "--hidden=128", "--dry-run", "-o", "json", server=server).json()
        self.assertEqual(settled["spec"]["hidden"], 128)
        self.assertEqual(self.get(server), before)

    def test_update_sends_only_what_is_named(self):
        server = self.start_server("--host-ranks=4")
        self.create(server)
        before = self.get(server)
        self.admin("group", "update", "moe", "--timeout-ms", "777", server=server)
        after = self.get(server)
        self.assertEqual(after["spec"], dict(before["spec"], timeout_ms=777))
        self.assertEqual(after["status"]["epoch"], before["status"]["epoch"])
        self.admin("group", "update", "moe", "--hidden", "128", "--wait", "20s", server=server)
        after = self.get(server)
        self.assertEqual((after["spec"]["hidden"], after["spec"]["experts"], after["spec"]["timeout_ms"]), (128, 8, 777))
        self.assertGreater(after["status"]["epoch"], before["status"]["epoch"])
        self.refused("group", "update", "moe", says="nothing to change", server=server)

    def test_direct_is_named_and_changes_at_once(self):
        server = self.start_server("--backend=host", "--host-ranks=4")
        self.create(server)
        self.assertNotIn("direct", self.admin("group", "get", "moe", server=server).out)  # no use for it on CPUs
        before = self.get(server)
        for name, value in (("none", "NONE"), ("any", "ANY"), ("same-uid", "SAME_UID"), ("same_uid", "SAME_UID")):
            if "_" in name:  # in files as in flags
                self.admin("group", "update", "moe", "-f", "-", input="direct: " + name, server=server)
            else:
                self.admin("group", "update", "moe", "--direct", name, server=server)
            after = self.get(server)
            self.assertEqual(after["spec"], dict(before["spec"], direct="DIRECT_" + value))
            self.assertEqual(after["status"]["epoch"], before["status"]["epoch"])
            self.assertRegex(self.admin("group", "get", "moe", server=server).out,
                             r"(?m)^direct +%s: " % name.replace("_", "-"))
        self.refused("group", "create", "b", *SPEC, "--direct=root", server=server,
                     says="--direct is 'root': must be one of same-uid, any, none")

    def test_update_of_labels_touches_only_those_named(self):
        server = self.start_server("--host-ranks=4")
        self.create(server, "moe", "-l", "a=1", "-l", "b=2")
        self.admin("group", "update", "moe", "--label", "c=3", "--label", "a-", server=server)
        self.assertEqual(self.get(server)["spec"]["labels"], {"b": "2", "c": "3"})

    def test_update_with_an_old_revision_is_refused(self):
        server = self.start_server("--host-ranks=4")
        self.create(server)
        revision = self.get(server)["revision"]
        self.admin("group", "update", "moe", "--timeout-ms=11", "--revision", str(revision), server=server)
        self.refused("group", "update", "moe", "--timeout-ms=12", "--revision", str(revision), says="revision",
                     code=1, server=server)
        self.assertEqual(self.get(server)["spec"]["timeout_ms"], 11)

    def test_quiet_confirms_nothing(self):
        server = self.start_server("--host-ranks=4")
        for words in (["create", "moe", *SPEC], ["update", "moe", "--timeout-ms=3"], ["delete", "moe"]):
            result = self.admin("group", *words, "--quiet", server=server)
            self.assertEqual((result.out, result.err), ("", ""))

    def test_degraded_groups_and_force(self):
        if not harness.have("worker"):
            self.skipTest("no example worker in " + harness.BIN)
        server = self.start_server("--host-ranks=4")
        self.create(server)
        workers = [self.spawn(["worker", "--group=moe", "--rank=%d" % r, "--pause-ms=10"], server=server)
                   for r in range(2)]
        self.admin("group", "watch", "moe", "--until=ready", "--timeout=20s", "-q", server=server)
        harness.wait_until(lambda: self.states(server) == ["ATTACHED"] * 2, "two workers attached")
        stats = self.admin("stats", "moe", server=server).out
        self.assertRegex(stats, r"moe +1 +0 ATTACHED +ll_dispatch +\d+")
        top = self.admin("top", "moe", "--once", "--interval=200ms", "-o", "json", server=server).json()
        self.assertGreater(max(row["ops_per_s"] for row in top["rows"]), 0)
        self.refused("group", "delete", "moe", says="moe", code=1, server=server)

        workers[1].kill()
        self.admin("group", "watch", "moe", "--until=degraded", "--timeout=20s", "-q", server=server)
        harness.wait_until(lambda: self.states(server) == ["ATTACHED", "ABSENT"], "rank 1 is absent")
        found = self.admin("doctor", "-o", "json", server=server, code=6).json()["findings"]
        self.assertTrue(any(f["check"] == "rank" and "rank 1 is absent" in f["finding"] for f in found), found)
        self.assertTrue(any(f["check"] == "group" and f["status"] == "fail" for f in found), found)
        self.admin("group", "delete", "moe", "--force", server=server)
        # The answer comes when the deletion is stored; the name is gone when the worker has let go.
        harness.wait_until(lambda: self.admin("group", "list", "-q", server=server).out == "", "the group is gone")
        workers[0].kill()

    def states(self, server):
        return [r["state"].replace("RANK_STATE_", "") for r in self.get(server)["status"]["ranks"]]


class WatchTest(AdminTest):
    @staticmethod
    def kinds(process):
        return [e["type"].replace("TYPE_", "") for e in process.events()]

    def test_create_update_delete_are_seen(self):
        server = self.start_server("--host-ranks=4")
        self.create(server, "old")
        watch = self.watch(server, name="w")
        harness.wait_until(lambda: "SYNCED" in self.kinds(watch), "the present state")
        self.assertEqual(self.kinds(watch), ["PRESENT", "SYNCED"])
        self.assertEqual(watch.events()[0]["group"]["name"], "old")
        self.create(server, "moe")
        self.admin("group", "update", "moe", "--timeout-ms=42", server=server)
        harness.wait_until(lambda: any(e["group"] and e["group"]["spec"]["timeout_ms"] == 42 for e in watch.events()),
                           "the update")
        self.admin("group", "delete", "moe", server=server)
        harness.wait_until(lambda: "DELETED" in self.kinds(watch), "the deletion")
        deleted = [e for e in watch.events() if e["type"] == "TYPE_DELETED"]
        self.assertEqual([e["group"]["name"] for e in deleted], ["moe"])

    def test_one_group_only(self):
        server = self.start_server("--host-ranks=4")
        self.create(server, "moe")
        self.create(server, "other")
        watch = self.watch(server, "moe", name="one")
        harness.wait_until(lambda: "SYNCED" in self.kinds(watch), "the present state")
        self.admin("group", "update", "other", "--timeout-ms=42", server=server)
        self.admin("group", "update", "moe", "--timeout-ms=43", server=server)
        harness.wait_until(lambda: any(e["group"] and e["group"]["spec"]["timeout_ms"] == 43 for e in watch.events()),
                           "the update")
        self.assertEqual({e["group"]["name"] for e in watch.events() if e["group"]}, {"moe"})

    def test_table_and_yaml(self):
        server = self.start_server("--host-ranks=4")
        self.create(server, "moe")
        lines = self.watched(server, "PRESENT").splitlines()
        self.assertEqual(lines[0].split()[:4], ["TIME", "EVENT", "NAME", "PHASE"])
        self.assertEqual(lines[1].split()[1:4], ["PRESENT", "moe", "READY"])
        self.assertEqual(self.watched(server, "SYNCED", "-o", "yaml").count("---\n"), 2)
        self.admin("group", "watch", "--timeout=300ms", server=server)  # ends by itself

    def test_watches_have_a_limit(self):
        server = self.start_server("--host-ranks=4", "--max-watches=2")
        first = self.watch(server, name="first")
        second = self.watch(server, name="second")
        harness.wait_until(lambda: first.events() and second.events(), "both watch")
        self.refused("group", "watch", "-o", "json", server=server, code=1, says="there are 2 watches at this socket, as many as max-watches")
        first.stop()
        harness.wait_until(lambda: self.run_cmd(["ep-admin", "group", "watch", "--timeout=300ms"], server=server).code == 0,
                           "a place that is free again")

    def watched(self, server, until, *flags):
        """What a watch has printed when that is among it."""
        process = self.spawn(["ep-admin", "group", "watch", *flags], server=server)
        harness.wait_until(lambda: until in process.out() and process.out().endswith("\n"), process.out)
        return process.out()

    def test_until(self):
        server = self.start_server("--host-ranks=4")
        self.create(server, "moe")
        self.admin("group", "watch", "moe", "--until", "ready", "--timeout", "10s", server=server)
        result = self.admin("group", "watch", "moe", "--until", "PHASE_FAILED", "--timeout", "300ms", server=server,
                            code=4)
        self.assertIn("moe is not FAILED after 0.3 s: it is READY", result.err)
        self.refused("group", "watch", "--until=ready", says="--until needs the NAME", server=server)
        deleter = threading.Timer(0.3, lambda: self.admin("group", "delete", "moe", server=server))
        deleter.start()
        self.admin("group", "watch", "moe", "--until=deleted", "--timeout=10s", server=server)
        deleter.join()

    def test_a_server_that_stops(self):
        server = self.start_server("--host-ranks=4")
        watch = self.watch(server, name="w")
        harness.wait_until(lambda: "SYNCED" in self.kinds(watch), "the present state")
        server.kill()
        self.assertEqual(watch.wait(), 4)
        self.assertIn("group watch: ", watch.log())


class AuditTest(AdminTest):
    CHANGE = re.compile(r'mod=audit msg="change (made|refused)" action=(\S+) target=(\S+) by=("[^"]*"|\S+) status=(\S+)')

    def test_every_change_is_in_the_log_with_who_and_what_became_of_it(self):
        server = self.start_server("--host-ranks=2", "--name=alpha")
        self.create(server)
        self.admin("group", "update", "moe", "--timeout-ms=1234", "--dry-run", server=server)
        self.admin("group", "plan", "moe", server=server)
        self.admin("group", "update", "moe", "--timeout-ms=1234", server=server)
        self.refused("group", "update", "moe", "--hidden=3", says="hidden", server=server)
        self.refused("group", "create", "moe", *SPEC, says="moe", code=1, server=server)
        self.admin("node", "drain", "alpha", server=server)
        self.admin("node", "uncordon", "alpha", server=server)
        self.refused("node", "drain", "beta", says="beta", code=3, server=server)
        self.refused("group", "delete", "nope", says="nope", code=3, server=server)
        self.admin("group", "delete", "moe", server=server)
        changes = self.CHANGE.findall(server.log())
        self.assertEqual([(what, action, target, status) for what, action, target, _, status in changes], [
            ("made", "group.create", "moe", "OK"), ("made", "group.update", "moe", "OK"),
            ("refused", "group.update", "moe", "INVALID_ARGUMENT"), ("refused", "group.create", "moe", "ALREADY_EXISTS"),
            ("made", "node.drain", "alpha", "OK"), ("made", "node.uncordon", "alpha", "OK"),
            ("refused", "node.drain", "beta", "NOT_FOUND"), ("refused", "group.delete", "nope", "NOT_FOUND"),
            ("made", "group.delete", "moe", "OK")])
        self.assertEqual(len({by for _, _, _, by, _ in changes}), 1)
        self.assertIn(str(os.getuid()), changes[0][3])

    def test_the_level_of_the_log_has_no_say_in_it(self):
        for level in ("warn", "error", "off"):
            server = self.start_server("--host-ranks=2", "--log-level=" + level, name=level)
            self.create(server)
            self.refused("group", "delete", "nope", says="nope", code=3, server=server)
            self.assertEqual([found[:3] for found in self.CHANGE.findall(server.log())],
                             [("made", "group.create", "moe"), ("refused", "group.delete", "nope")])
            self.assertNotIn("mod=main", server.log())

    def test_nor_has_a_level_that_is_set_by_sighup(self):
        path = self.write("c.yaml", "node:\n")
        flags = ["--socket=" + self.path("ep.sock"), "--state-dir=" + self.path("state"), "--backend=host",
                 "--host-ranks=2", "--config=" + path]
        server = self.spawn(["ep-server", *flags])
        server.address = "unix:" + self.path("ep.sock")
        server.wait_log("msg=serving")
        self.write("c.yaml", "log-level: 'off'\n")
        server.signal(signal.SIGHUP)
        server.wait_log("option=log-level")
        self.create(server)
        server.wait_log('mod=audit msg="change made" action=group.create target=moe')
        self.assertEqual(server.stop(), 0)
        self.assertNotIn("stopped", server.log())


class NodeTest(AdminTest):
    def test_list_and_get_in_every_format(self):
        server = self.start_server("--host-ranks=3", "--name=alpha")
        table = self.admin("node", "list", server=server).out.splitlines()
        self.assertEqual(table[0].split()[:5], ["NAME", "STATE", "ROLE", "BACKEND", "DEVICES"])
        self.assertEqual(table[1].split()[:5], ["alpha", "READY", "leader", "HOST", "3"])
        self.assertEqual(self.admin("node", "list", "-q", server=server).out, "alpha\n")
        self.assertEqual(len(self.admin("node", "list", "-o", "json", server=server).json()["nodes"]), 1)
        text = self.admin("node", "get", server=server).out
        self.assertIn(server.socket, text)
        self.assertIn("host2", text)
        node = self.admin("node", "get", "alpha", "-o", "json", server=server).json()
        self.assertEqual((node["name"], node["pid"], len(node["devices"])), ("alpha", server.pid, 3))
        self.assertIn("name: alpha", self.admin("node", "get", "-o", "yaml", server=server).out)
        self.refused("node", "get", "beta", says="beta", code=3, server=server)

    def test_drain_and_uncordon(self):
        server = self.start_server("--host-ranks=2", "--name=alpha")
        drained = self.admin("node", "drain", "alpha", "--reason", "new driver", "--wait=5s", server=server)
        self.assertEqual(drained.out, "node alpha drained: CORDONED, 0 workers attached\n")
        self.assertIn("new driver", self.admin("node", "get", server=server).out)
        back = self.admin("node", "uncordon", "alpha", server=server)
        self.assertEqual(back.out, "node alpha takes workers again: READY, 0 workers attached\n")
        self.refused("node", "drain", says="NAME is missing", server=server)


    def test_a_worker_that_does_not_leave(self):
        if not harness.have("worker"):
            self.skipTest("no example worker in " + harness.BIN)
        server = self.start_server("--host-ranks=2", "--name=alpha")
        self.create(server)
        worker = self.spawn(["worker", "--group=moe", "--rank=0", "--pause-ms=10"], server=server)
        node = lambda: self.admin("node", "get", "-o", "json", server=server).json()
        harness.wait_until(lambda: node()["attachments"] == 1, "a worker")
        worker.signal(signal.SIGSTOP)
        result = self.admin("node", "drain", "alpha", "--wait=1500ms", server=server, code=4)
        self.assertEqual(result.err.split("\n")[:2], [
            "ep-admin: node drain: waiting for 1 worker to leave",
            "ep-admin: node drain: alpha is drained, but 1 worker is still attached"])
        self.assertEqual(result.out, "")
        worker.signal(signal.SIGCONT)
        self.admin("node", "drain", "alpha", "--wait=20s", server=server)
        self.assertEqual(worker.stop(), 0)


class StatsTest(AdminTest):
    def test_stats_in_every_format(self):
        server = self.start_server("--host-ranks=4")
        self.create(server)
        text = self.admin("stats", server=server).out
        self.assertRegex(text, r"GROUP +EPOCH +RANK +STATE +OP")
        self.assertEqual(len(re.findall(r"^moe ", text, re.M)), 2)
        stats = self.admin("stats", "moe", "-o", "json", server=server).json()
        self.assertEqual([r["rank"] for r in stats["ranks"]], [0, 1])
        self.assertIn("time_us:", self.admin("stats", "-o", "yaml", server=server).out)
        self.admin("stats", "--peers", server=server)

    def test_top_for_scripts(self):
        server = self.start_server("--host-ranks=4")
        self.create(server)
        once = self.admin("top", "--once", "--interval", "200ms", server=server).out
        self.assertRegex(once, r"GROUP +RANK +STATE +OP +OPS/S")
        self.assertNotIn("\033", once)
        lines = self.admin("top", "--iterations=3", "-i", "100ms", "-o", "json", "--sort=name",
                           server=server).out.splitlines()
        self.assertEqual(len(lines), 3)
        self.assertEqual([r["rank"] for r in json.loads(lines[2])["rows"]], [0, 1])
        self.refused("top", "--sort=colour", says="must be one of ops, tokens", server=server)

    def on_terminal(self, server, keys, rows=24, columns=100):
        """Runs top on a terminal of its own; (exit code, everything it wrote, the terminal's modes before, after)."""
        go, let_go = os.pipe()
        pid, fd = pty.fork()
        if pid == 0:
            os.read(go, 1)
            os.execve(harness.binary("ep-admin"), ["ep-admin", "top", "-i", "100ms"],
                      dict(harness.environment({"EP_SERVER": server.address}), TERM="xterm"))
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        before, seen = termios.tcgetattr(fd), b""
        os.write(let_go, b".")
        end = time.monotonic() + harness.PATIENCE_S * harness.SCALE
        while time.monotonic() < end:
            if not select.select([fd], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(fd, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not data:
                break
            seen += data
            if keys and seen.count(b"\033[H") >= 2:  # drawn twice: a redraw in place
                os.write(fd, keys)
                keys = b""
            if b"\033[?1049l" in seen:
                after = termios.tcgetattr(fd)
        else:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        for each in (fd, go, let_go):
            os.close(each)
        return os.waitstatus_to_exitcode(status), seen, before, after

    def test_top_on_a_terminal(self):
        server = self.start_server("--host-ranks=4")
        self.create(server)
        for name, key in {"q": b"q", "order, then q": b"sq", "Ctrl-C": b"\x03"}.items():
            with self.subTest(key=name):
                code, seen, before, after = self.on_terminal(server, key)
                self.assertEqual(code, 0, seen)
                self.assertIn(b"\033[?1049h", seen)
                self.assertTrue(seen.rstrip().endswith(b"\033[?25h\033[?1049l"), seen[-200:])
                self.assertIn(b"moe", seen)
                self.assertEqual(after, before)


class ConnectionTest(AdminTest):
    def test_no_server_is_exit_code_4_at_once(self):
        address = "unix:" + self.path("none.sock")
        for words in (["group", "list"], ["group", "watch"], ["top", "--once"], ["node", "get"], ["stats"]):
            result = self.admin(*words, "--server", address, "--timeout=1h", code=4)
            self.assertIn("cannot reach %s: no such file" % address, result.err)
        result = self.admin("version", "--server", address, code=4)
        self.assertTrue(result.out.startswith("ep-admin "), result)

    def test_a_dead_socket_says_so(self):
        path = self.path("dead.sock")
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path)
        self.refused("group", "list", "--server", path, says="cannot reach unix:%s: connection refused" % path, code=4)

    def test_what_is_no_socket_says_so(self):
        for path in (self.dir, self.write("file", "")):
            self.refused("group", "list", "--server", path, says="cannot reach unix:%s: it is not a socket" % path, code=4)

    def test_a_closed_port_says_so(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = "127.0.0.1:%d" % s.getsockname()[1]
            self.refused("group", "list", "--server", address, says=address, code=4)

    def test_a_server_that_does_not_answer(self):
        path = self.path("mute.sock")
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path)
            s.listen()
            result = self.admin("group", "list", "--server", "unix:" + path, "--timeout", "1500ms", code=4)
            self.assertIn("no answer from unix:%s within 1500 ms" % path, result.err)
            took = min(self.time_to_end("group", "list", "--server", "unix:" + path, "--timeout", "300ms") for _ in range(3))
        self.assertLess(took, 1.5 * harness.SCALE)  # what it said it would wait for is over

    def time_to_end(self, *args):
        """Seconds from its message to its exit."""
        process = self.spawn(["ep-admin", *args])
        harness.wait_until(lambda: process.log() or not process.alive(), "a message", interval=0.01)
        start = time.monotonic()
        process.wait()
        return time.monotonic() - start

    def test_where_the_server_is_looked_for(self):
        server = self.start_server("--host-ranks=2", "--name=alpha")
        runtime = os.path.join(self.dir, "run")
        os.makedirs(os.path.join(runtime, "ep-server"))
        os.symlink(server.socket, os.path.join(runtime, "ep-server", "ep.sock"))
        self.admin("node", "list", env={"XDG_RUNTIME_DIR": runtime})
        self.admin("node", "list", env={"EP_SERVER": server.address, "XDG_RUNTIME_DIR": "/nowhere"})
        self.admin("node", "list", "-s", server.address, env={"EP_SERVER": "unix:/nowhere"})
        self.admin("node", "list", "-s", "unix://" + server.socket)
        self.admin("node", "list", "--server=127.0.0.1:%d" % server.port)

    def test_a_closed_output_ends_quietly(self):
        server = self.start_server("--host-ranks=2")
        self.create(server)
        for words in ("group list", "group watch", "top -i 100ms", "--help", "group get moe -o json"):
            with self.subTest(words=words):
                done = subprocess.run(["bash", "-o", "pipefail", "-c", "%s %s | head -n 1" % (
                    harness.binary("ep-admin"), words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    stdin=subprocess.DEVNULL, timeout=30 * harness.SCALE,
                    env=harness.environment({"EP_SERVER": server.address}))
                self.assertEqual((done.returncode, done.stderr), (0, ""), done)
                self.assertTrue(done.stdout)

    def test_a_closed_standard_output_is_said(self):
        server = self.start_server("--host-ranks=2")
        for words in ("node list", "--help"):
            done = subprocess.run(["bash", "-c", "%s %s >&-" % (harness.binary("ep-admin"), words)],
                                  stderr=subprocess.PIPE, text=True, env=harness.environment({"EP_SERVER": server.address}))
            self.assertEqual(done.returncode, 1, done)
            self.assertIn("cannot write to standard output: Bad file descriptor", done.stderr)

    def test_a_user_that_is_not_let_in(self):
        if os.geteuid() != 0 or not shutil.which("setpriv"):
            self.skipTest("needs root, to become somebody else")
        server = self.start_server("--host-ranks=2")
        os.chmod(self.dir, 0o755)
        os.chmod(server.home, 0o755)
        done = subprocess.run(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", harness.binary("ep-admin"),
                               "group", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=harness.environment({"EP_SERVER": server.address}))
        if "cannot execute" in done.stderr or done.returncode in (126, 127):
            self.skipTest("nobody cannot run " + harness.binary("ep-admin"))
        self.assertEqual(done.returncode, 5, done)
        self.assertIn("uid 65534", done.stderr)


@unittest.skipUnless(shutil.which("openssl"), "no openssl")
class TlsTest(AdminTest):
    def certificates(self, name):
        directory = self.path(name)
        subprocess.run(["bash", CERTS, directory], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return directory

    def start(self):
        self.certs = self.certificates("certs")
        return self.start_server("--host-ranks=2", *self.flags(self.certs, "server"))

    @staticmethod
    def flags(directory, who):
        return ["--tls-ca=%s/ca.pem" % directory, "--tls-cert=%s/%s.pem" % (directory, who),
                "--tls-key=%s/%s.key" % (directory, who)]

    def test_mutual_tls(self):
        server = self.start()
        address = "127.0.0.1:%d" % server.port
        self.admin("group", "create", "moe", *SPEC, "--server", address, *self.flags(self.certs, "client"))
        self.assertEqual(self.admin("group", "list", "-q", "-s", address, *self.flags(self.certs, "client")).out, "moe\n")
        self.assertRegex(server.log(), r'mod=audit msg="change made" action=group.create target=moe by=ep-admin status=OK')
        env = {"EP_SERVER": address, "EP_TLS_CA": self.certs + "/ca.pem", "EP_TLS_CERT": self.certs + "/client.pem",
               "EP_TLS_KEY": self.certs + "/client.key"}
        self.assertEqual(self.admin("group", "list", "-q", env=env).out, "moe\n")
        self.admin("doctor", env=env)
        self.admin("group", "list", env=dict(env, EP_TLS_NAME="not.this.host"), code=4)
        self.admin("group", "list", "--tls-name=localhost", env=env)

    def test_no_certificate(self):
        server = self.start()
        address = "127.0.0.1:%d" % server.port
        for flags in ([], ["--tls-ca=%s/ca.pem" % self.certs]):
            with self.subTest(flags=flags):
                result = self.admin("group", "list", "-s", address, "-t", "3s", *flags, code=4)
                self.assertIn(address, result.err)
                self.assertRegex(result.err, "(?i)tls|certificate")

    def test_wrong_authority(self):
        server = self.start()
        other = self.certificates("other")
        address = "127.0.0.1:%d" % server.port
        self.admin("group", "list", "-s", address, "-t", "3s", *self.flags(other, "client"), code=4)
        mixed = ["--tls-ca=%s/ca.pem" % self.certs] + self.flags(other, "client")[1:]
        self.admin("group", "list", "-s", address, "-t", "3s", *mixed, code=4)

    def test_files_that_are_not_there(self):
        certs = self.certificates("certs")
        ca, key = certs + "/ca.pem", certs + "/client.key"
        for flags, env, named in ((["--tls-ca=/none"], {}, "--tls-ca"), ([], {"EP_TLS_CA": "/none"}, "EP_TLS_CA"),
                                  (["--tls-ca=" + ca, "--tls-key=" + key, "--tls-cert=/none"], {}, "--tls-cert"),
                                  (["--tls-key=/none"], {"EP_TLS_CA": ca, "EP_TLS_CERT": ca}, "--tls-key")):
            with self.subTest(flags=flags, env=env):
                result = self.run_cmd(["ep-admin", "group", "list", "-s", "127.0.0.1:1", *flags], env=env)
                self.assertEqual((result.code, result.err), (2, "ep-admin: group list: %s: cannot read /none: No such file or "
                                                             "directory\n" % named))


class DoctorTest(AdminTest):
    def test_without_a_server(self):
        result = self.admin("doctor", "--server", "unix:" + self.path("none.sock"), code=6)
        self.assertRegex(result.out, r"(?m)^ok +kernel ")
        self.assertRegex(result.out, r"(?m)^fail +socket ")
        self.assertRegex(result.out, r"remedy: start it")
        for check in ("gpu", "cuda", "nccl", "cpus", "memory", "/dev/shm", "memfd", "nofile", "memlock", "clock"):
            self.assertRegex(result.out, r"(?m)^\w+ +%s " % check)

    def test_host_only_asks_no_server(self):
        found = self.admin("doctor", "--host-only", "-o", "json", "--server", "unix:/nowhere").json()
        self.assertEqual(found["fail"], 0)
        self.assertNotIn("socket", [f["check"] for f in found["findings"]])

    def test_with_a_server(self):
        server = self.start_server("--host-ranks=2", "--name=alpha")
        self.create(server)
        found = self.admin("doctor", "-o", "json", server=server).json()
        checks = {f["check"]: f for f in found["findings"]}
        for check in ("socket", "server", "version", "health", "store", "clocks", "node", "cluster", "budget", "group"):
            self.assertEqual(checks[check]["status"], "ok", checks[check])
        self.assertIn("moe is READY", checks["group"]["finding"])
        self.assertEqual(checks["cluster"]["finding"], "1 node, alpha leads")
        self.assertNotIn("reach", checks)
        self.assertIn("status: ok", self.admin("doctor", "-o", "yaml", server=server).out)

    def test_a_server_that_stops_is_not_to_be_uncordoned(self):
        if not harness.have("worker"):
            self.skipTest("no example worker in " + harness.BIN)
        server = self.start_server("--host-ranks=2", "--name=alpha", "--drain-grace=1h")
        self.create(server)
        stays = self.spawn(["worker", "--group=moe", "--rank=0"], server=server)
        harness.wait_until(lambda: self.get(server)["status"]["ranks"][0]["state"] == "RANK_STATE_ATTACHED", "a worker")
        os.kill(stays.pid, signal.SIGSTOP)
        server.signal(signal.SIGTERM)
        server.wait_log("draining")
        found = self.admin("doctor", "-o", "json", server=server, code=6).json()["findings"]
        node = next(f for f in found if f["check"] == "node")
        self.assertIn("alpha is STOPPING", node["finding"])
        self.assertIn("start its server again", node["remedy"])
        self.assertEqual(self.admin("node", "uncordon", "alpha", server=server).out,
                         "node alpha is drained no more: STOPPING, 1 worker attached\n")
        stays.kill()

    def test_a_drained_node_is_a_warning(self):
        server = self.start_server("--host-ranks=2", "--name=alpha")
        self.admin("node", "drain", "alpha", "--reason=tests", server=server)
        found = {f["check"]: f for f in self.admin("doctor", "-o", "json", server=server).json()["findings"]}
        self.assertEqual(found["node"]["status"], "warn")
        self.assertIn("tests", found["node"]["finding"])

    def findings(self, env, code=0):
        found = self.admin("doctor", "--host-only", "-o", "json", env=env, code=code).json()["findings"]
        return {f["check"]: f for f in found}

    @unittest.skipUnless(NO_GPUS, "here are GPUs")
    def test_gpus_are_looked_at_through_the_backend(self):
        found = self.findings({"EP_CUDA_MODULE": os.path.join(UNIT, "libep_cuda_cpu.so")})
        self.assertIn("2 (Fixture, sm_90)", found["gpu"]["finding"])
        self.assertEqual([found[c]["status"] for c in ("gpu", "cuda", "p2p", "mps", "fabric")], ["ok"] * 5)

    def test_the_fabric_manager_is_asked_through_nvml(self):
        for states, status, says in (("33", "ok", "is done with 2 of 2 GPUs"), ("00", "ok", "no fabric manager"),
                                     ("31", "fail", "has not begun with 1 of 2 GPUs"),
                                     ("32", "fail", "is not done with 1 of 2 GPUs"),
                                     ("93", "fail", "has failed with 1 of 2 GPUs: Unknown Error"),
                                     (None, "warn", "NVML does not start: Driver Not Loaded")):
            env = {"EP_CUDA_MODULE": os.path.join(UNIT, "libep_cuda_cpu.so"),
                   "LD_LIBRARY_PATH": os.path.join(UNIT, "nvml")}
            if states:
                env["EP_NVML_FABRIC"] = states
            fabric = self.findings(env, code=6 if status == "fail" else 0)["fabric"]
            self.assertEqual(fabric["status"], status, fabric)
            self.assertIn(says, fabric["finding"])
            self.assertEqual(bool(fabric["remedy"]), status != "ok")

    def test_an_old_nvml_does_not_tell_of_the_fabric_manager(self):
        fabric = self.findings({"EP_CUDA_MODULE": os.path.join(UNIT, "libep_cuda_cpu.so"), "EP_NVML_FABRIC": "33",
                                "LD_LIBRARY_PATH": os.path.join(UNIT, "nvml_old")})["fabric"]
        self.assertEqual((fabric["status"], fabric["remedy"]), ("ok", ""))
        self.assertEqual(fabric["finding"], "not known of 2 of 2 GPUs: NVML does not tell")

    @unittest.skipUnless(NO_GPUS, "here are GPUs")
    def test_a_module_that_is_not_there_is_no_failure_without_gpus(self):
        found = self.findings({"EP_CUDA_MODULE": "/nowhere/libep_cuda.so"})
        self.assertEqual(found["cuda"]["status"], "ok")
        self.assertIn("not needed without GPUs", found["cuda"]["finding"])
        self.assertIn("/nowhere/libep_cuda.so", found["cuda"]["finding"])

    def test_low_limits_are_named(self):
        done = subprocess.run(["bash", "-c", "ulimit -n 128; exec %s doctor --host-only" % harness.binary("ep-admin")],
                              stdout=subprocess.PIPE, text=True, env=harness.environment())
        self.assertRegex(done.stdout, r"(?m)^warn +nofile +RLIMIT_NOFILE is 128 ")
        self.assertIn("LimitNOFILE", done.stdout)


class CompletionTest(AdminTest):
    def complete(self, *words, server=None):
        """What bash would offer for the last of the words."""
        script = self.admin("completion", "bash").out
        quoted = " ".join("'%s'" % w for w in ("ep-admin",) + words)
        text = "%s\nCOMP_WORDS=(%s); COMP_CWORD=%d; _ep_admin; printf '%%s\\n' \"${COMPREPLY[@]}\"" % (
            script, quoted, len(words))
        env = harness.environment({"EP_SERVER": server.address if server else "unix:" + self.path("none")})
        env["PATH"] = harness.BIN + ":" + env["PATH"]
        done = subprocess.run(["bash", "--norc", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=env)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done)
        return done.stdout.split()

    def test_scripts_are_sound(self):
        bash = self.admin("completion", "bash").out
        self.assertEqual(subprocess.run(["bash", "-n"], input=bash, text=True).returncode, 0)
        zsh = self.admin("completion", "zsh").out
        self.assertTrue(zsh.startswith("#compdef ep-admin\n"))
        if shutil.which("zsh"):
            self.assertEqual(subprocess.run(["zsh", "-n", self.write("_ep-admin", zsh)]).returncode, 0)

    def test_words(self):
        self.assertEqual(self.complete("gr"), ["group"])
        self.assertIn("doctor", self.complete(""))
        self.assertEqual(self.complete("group", "d"), ["delete"])
        self.assertEqual(self.complete("--output", "json", "node", "un"), ["uncordon"])
        self.assertEqual(self.complete("completion", ""), ["bash", "zsh"])
        self.assertEqual(self.complete("help", "group", "li"), ["list"])
        self.assertEqual(self.complete("group", "list", ""), [])

    def test_flags_and_values(self):
        self.assertEqual(self.complete("group", "create", "--ll-"), ["--ll-max-tokens", "--ll-banks"])
        self.assertIn("--until", self.complete("group", "watch", "-"))
        self.assertNotIn("--until", self.complete("group", "get", "-"))
        self.assertEqual(self.complete("group", "create", "--modes", ""), ["ll", "ht"])
        self.assertEqual(self.complete("group", "create", "--dtypes", "bf16,fp8"), ["bf16,fp8_e4m3"])
        self.assertEqual(self.complete("group", "update", "--direct", ""), ["same-uid", "any", "none"])
        self.assertEqual(self.complete("group", "watch", "moe", "--until", "re"), ["ready", "reconfiguring"])
        self.assertEqual(self.complete("--output", "=", "y"), ["yaml"])  # as bash takes --output=y apart
        self.assertEqual(self.complete("-o", "j"), ["json"])
        self.assertEqual(self.admin("__complete", "--output=j").out, "--output=json\n")  # as zsh gives it

    def test_names_come_from_the_server(self):
        server = self.start_server("--host-ranks=4", "--name=alpha")
        self.create(server, "moe-a")
        self.create(server, "moe-b")
        self.assertEqual(self.complete("group", "get", "moe", server=server), ["moe-a", "moe-b"])
        self.assertEqual(self.complete("stats", "moe-b", server=server), ["moe-b"])
        self.assertEqual(self.complete("node", "drain", "", server=server), ["alpha"])
        self.assertEqual(self.complete("group", "get", "moe-a", "", server=server), [])
        parts = ["--server", "unix", ":", server.socket]  # as bash takes unix:PATH apart
        self.assertEqual(self.complete(*parts, "group", "delete", "moe-a"), ["moe-a"])
        self.assertEqual(self.complete("group", "get", ""), [])  # no server: nothing, and no noise


class ManualTest(AdminTest):
    def test_the_page_is_sound_and_complete(self):
        page = self.admin("__man").out
        for words in (".TH EP\\-ADMIN 1", "group create", "\\-\\-ll\\-max\\-tokens", "EP_SERVER", ".SH \"EXIT STATUS\""):
            self.assertIn(words, page)
        if shutil.which("groff"):
            done = subprocess.run(["groff", "-man", "-ww", "-z"], input=page, text=True, stderr=subprocess.PIPE)
            self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    harness.main()
