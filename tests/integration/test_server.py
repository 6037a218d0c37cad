#!/usr/bin/python3
"""ep-server as a program: configuration, start, readiness, reload, drain, stop, and hostile clients."""

import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import time
import unittest

import harness
import rawrpc
import reflect

if not reflect.MISSING:
    import grpc
    import worker

GROUP = {"ranks": 2, "experts": 8, "hidden": 64, "top_k": 2, "ll_max_tokens": 8, "ht_max_tokens": 16,
         "arena_bytes": 1 << 20, "timeout_ms": 2000}
needs_grpc = unittest.skipIf(reflect.MISSING, reflect.MISSING)


def create_group(rpc, name="moe", **changes):
    return rpc.call("ep.v1.Admin/CreateGroup", {"name": name, "spec": dict(GROUP, **changes)})


def group_names(rpc):
    return [g["name"] for g in rpc.call("ep.v1.Admin/ListGroups").get("groups", [])]


def health(rpc, service=""):
    return rpc.call("grpc.health.v1.Health/Check", {"service": service}).get("status", "UNKNOWN")


class ConfigTest(harness.TestCase):
    def refused(self, *flags, env=None, code=2):
        """What stderr says: one line, after the log."""
        result = self.run_cmd(["ep-server", *flags], env=env)
        self.assertEqual(result.code, code, result)
        self.assertEqual(result.out, "", result)
        lines = result.err.strip().split("\n")
        self.assertTrue(lines[-1].startswith("ep-server: "), result)
        self.assertEqual([line for line in lines[:-1] if not line.startswith("ts=")], [], result)
        return lines[-1]

    def test_print_config_round_trips_through_a_file(self):
        flags = ["--host-ranks=3", "--memory=1536MiB", "--name=a \"b\" # c: d", "--allow-uid=0,7", "--drain-grace=2500ms",
                 "--log-level=off", "--listen=[::1]:0", "--insecure", "--socket-mode=0600"]
        first = self.run_cmd(["ep-server", "--print-config", *flags])
        self.assertEqual(first.code, 0, first)
        path = self.write("c.yaml", first.out)
        second = self.run_cmd(["ep-server", "--print-config", "--config", path])
        self.assertEqual(second.code, 0, second)
        values = [re.sub(r" +# [^#]*$", "", line) for line in first.out.splitlines()]
        self.assertEqual([re.sub(r" +# [^#]*$", "", line) for line in second.out.splitlines()], values)
        self.assertIn("# flag --host-ranks", first.out)
        self.assertRegex(second.out, r"  host-ranks: 3 +# %s:\d+\n" % re.escape(path))
        third = self.run_cmd(["ep-server", "--print-config", "--config", path, "--host-ranks=4"],
                             env={"EP_SERVER_MEMORY": "1GiB"})
        self.assertRegex(third.out, r"  host-ranks: 4 +# flag --host-ranks\n")
        self.assertRegex(third.out, r"  memory: 1GiB +# environment EP_SERVER_MEMORY\n")

    def test_unreadable_files_are_named(self):
        self.assertIn("cannot read /no/such.yaml: No such file or directory", self.refused("--config=/no/such.yaml"))
        self.assertIn("it is a directory, not a file", self.refused("--config=" + self.dir))
        self.assertIn("it is a device or pipe", self.refused("--config=/dev/zero"))
        path = self.write("c.yaml", "name: x\n")
        os.chmod(path, 0)
        os.chmod(self.dir, 0o755)
        if os.geteuid() == 0 and shutil.which("setpriv"):
            program = harness.binary("ep-server")
            done = subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", program, "--check", "--config=" + path],
                                  capture_output=True, text=True, env=harness.environment())
            if "Permission denied" in done.stderr and program in done.stderr:
                self.skipTest("another user cannot run " + program)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("cannot read %s: Permission denied" % path, done.stderr)
        elif os.geteuid() != 0:
            self.assertIn("Permission denied", self.refused("--check", "--config=" + path))

    def test_wrong_values_name_file_and_line(self):
        path = self.write("c.yaml", "# x\nnode:\n  host-ranks: [1]\n")
        self.assertIn("host-ranks is a list (%s:3): must be an integer from 1 to 1024" % path,
                      self.refused("--config=" + path))
        self.assertIn("did you mean --host-ranks?", self.refused("--host-rank=1"))
        self.assertIn("environment EP_SERVER_LOG_LEVEL", self.refused(env={"EP_SERVER_LOG_LEVEL": "loud"}))

    def test_check_says_only_what_is_wrong(self):
        good = self.run_cmd(["ep-server", "--check"])
        self.assertEqual((good.code, good.out, good.err), (0, "", ""), good)
        self.assertIn("there is no TLS", self.refused("--check", "--listen=0.0.0.0:1"))

    def test_the_least_memory_is_good_for_the_smallest_group(self):
        least = int(re.search(r"no window has less than (\d+);", self.refused("--check", "--memory=5"))[1])
        server = self.start_server("--host-ranks=1", "--memory=%d" % least)
        create = ["ep-admin", "group", "create", "least", "--ranks=1", "--experts=1", "--top-k=1", "--hidden=8",
                  "--dtypes=bf16", "--modes=ht", "--ht-max-tokens=1"]
        for arena, code in (("4097", 1), ("1", 0)):
            result = self.run_cmd([*create, "--arena=" + arena], server=server)
            self.assertEqual(result.code, code, result)

    def test_cuda_without_a_gpu_is_refused(self):
        env = {"EP_CUDA_MODULE": self.path("no-such-module.so")}
        run = ["--socket=" + self.path("s"), "--state-dir=" + self.path("state")]
        text = self.refused("--backend=cuda", *run, env=env, code=4)
        self.assertIn("backend is cuda: no cuda backend: ", text)
        self.assertIn("no-such-module.so", text)
        self.assertIn("mps is require: this node's backend is host", self.refused("--mps=require", *run, env=env, code=1))

    def test_what_is_for_gpus_is_told_to_be_of_no_use_without_one(self):
        server = self.start_server("--backend=auto", "--gpus=0", "--doorbell=poll", "--sms-per-rank=4",
                                   env={"EP_CUDA_MODULE": self.path("no-such-module.so")})
        for what in ("gpus is set", "doorbell is poll", "sms-per-rank is set"):
            self.assertIn(what + ", and ranks run on the host's CPUs: it is of no use there", server.log())

    def test_help_and_version(self):
        text = self.run_cmd(["ep-server", "--help"])
        self.assertEqual((text.code, text.err), (0, ""))
        for word in ("--host-ranks=N", "EP_SERVER_HOST_RANKS", "reloadable"):
            self.assertIn(word, text.out)
        self.assertRegex(self.run_cmd(["ep-server", "--version"]).out, r"^ep-server \d+\.\d+\.\d+ \(\S+\)\n$")

    def test_what_cannot_be_written_to_standard_output_is_an_error(self):
        for flag in ("--help", "--version", "--print-config"):
            for output, why in ((">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
                with self.subTest(flag=flag, output=output):
                    done = subprocess.run(["bash", "-c", 'exec "$0" "$1" ' + output, harness.binary("ep-server"), flag],
                                          stderr=subprocess.PIPE, text=True, env=harness.environment())
                    self.assertEqual((done.returncode, done.stderr),
                                     (1, "ep-server: cannot write to standard output: %s\n" % why), done)

    def test_a_port_file_replaces_nothing_but_a_file(self):
        """/dev/null would be gone, for a server that root starts."""
        path = self.path("ports")
        os.mkfifo(path)
        text = self.refused("--backend=host", "--socket=" + self.path("s"), "--state-dir=" + self.path("state"),
                            "--port-file=" + path, code=1)
        self.assertEqual(text, "ep-server: %s exists and is not a regular file" % path)
        self.assertTrue(stat.S_ISFIFO(os.stat(path).st_mode))
        self.assertFalse(os.path.exists(self.path("s")))


class StartTest(harness.TestCase):
    def test_ready_writes_the_port_file_and_stop_removes_everything(self):
        server = self.start_server("--pid-file=" + self.path("pid"))
        self.assertEqual(int(server.values["PID"]), server.pid)
        self.assertEqual(server.values["SOCKET"], server.socket)
        self.assertTrue(stat.S_ISSOCK(os.stat(server.side_socket).st_mode))
        self.assertEqual(stat.S_IMODE(os.stat(server.socket).st_mode), 0o666)
        self.assertEqual(stat.S_IMODE(os.stat(server.state_dir).st_mode), 0o700)
        with open(self.path("pid")) as f:
            self.assertEqual(int(f.read()), server.pid)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(sorted(set(os.listdir(server.home)) - {"state", "server.log", "server.out"}), [])
        self.assertFalse(os.path.exists(self.path("pid")))
        self.assertEqual(os.listdir(server.state_dir), ["ep-server.db"])
        self.assertEqual(server.out(), "")

    def test_without_standard_input_output_and_error(self):
        closed = ["bash", "-c", 'exec "$0" "$@" <&- >&- 2>&-']
        server = self.start_server("--pid-file=" + self.path("pid"), wrapper=closed)
        self.assertEqual(self.run_cmd(["ep-admin", "group", "list"], server=server).code, 0)
        first = [os.readlink("/proc/%d/fd/%d" % (server.pid, fd)) for fd in range(3)]
        self.assertEqual(first, ["/dev/null"] * 3)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(os.listdir(self.dir), ["s"], "the pid file is gone")

    def test_stops_while_it_starts(self):
        for _ in range(5):
            server = self.start_server(ready=False)
            harness.wait_until(lambda: "msg=starting" in server.log() or not server.alive(), "it starts")
            server.signal(signal.SIGTERM)
            self.assertIn(server.wait(), (0, -signal.SIGTERM), server.log())

    def refused(self, server, code):
        self.assertEqual(server.wait(), code, server.log())
        last = server.log().strip().split("\n")[-1]
        self.assertTrue(last.startswith("ep-server: "), server.log())
        return last

    def test_a_second_server_is_refused_and_the_first_goes_on(self):
        first = self.start_server()
        same_socket = self.start_server("--socket=" + first.socket, name="b", ready=False)
        self.assertIn("socket %s is in use by another ep-server (pid %d)" % (first.socket, first.pid),
                      self.refused(same_socket, 1))
        same_state = self.start_server("--state-dir=" + first.state_dir, name="c", ready=False)
        self.assertIn("state-dir %s is in use by another ep-server (pid %d)" % (first.state_dir, first.pid),
                      self.refused(same_state, 1))
        same_port = self.start_server("--listen=127.0.0.1:%d" % first.port, name="d", ready=False)
        self.assertIn("127.0.0.1:%d" % first.port, self.refused(same_port, 1))
        same_metrics = self.start_server("--metrics=127.0.0.1:%d" % first.metrics_port, name="e", ready=False)
        self.assertIn("cannot listen on 127.0.0.1:%d: Address already in use" % first.metrics_port,
                      self.refused(same_metrics, 1))
        self.assertEqual(first.http("/readyz")[0], 200)
        self.assertTrue(os.path.exists(first.socket))
        self.assertEqual(first.stop(), 0)

    def test_a_server_is_patient_with_one_that_is_being_taken_apart(self):
        state = self.path("held")
        os.makedirs(state)
        with open(os.path.join(state, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            server = self.start_server("--state-dir=" + state, ready=False)
            harness.wait_until(lambda: lock.name in server.open_files(), "it asks for the lock")
        self.assertEqual(server.wait_ready().stop(), 0)

    def test_what_a_killed_server_left_is_no_obstacle(self):
        server = self.start_server()
        server.kill()
        self.assertTrue(os.path.exists(server.socket))
        self.assertTrue(os.path.exists(server.side_socket))
        self.assertEqual(self.start_server().stop(), 0)

    def test_a_state_that_is_none_is_refused(self):
        os.makedirs(self.path("s"))
        self.write("s/state", "a file")
        self.assertIn("state is there and is not a directory", self.refused(self.start_server(ready=False), 1))
        os.makedirs(self.path("t/state"))
        self.write("t/state/ep-server.db", "this is no database, whatever its name says " * 100)
        self.assertIn("ep-server.db", self.refused(self.start_server(name="t", ready=False), 1))

    def test_a_file_at_the_socket_path_is_not_replaced(self):
        os.makedirs(self.path("s"))
        self.write("s/ep.sock", "precious")
        server = self.start_server(ready=False)
        self.assertNotEqual(server.wait(), 0)
        with open(self.path("s/ep.sock")) as f:
            self.assertEqual(f.read(), "precious")

    def test_an_empty_token_is_refused(self):
        path = self.write("token", "\n")
        server = self.start_server("--attach-token-file=" + path, ready=False)
        self.assertIn("attach-token-file: %s must hold 1 to 4096 bytes of text" % path, self.refused(server, 2))

    def test_systemd_is_told(self):
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(notify.close)
        notify.bind(self.path("notify"))
        notify.settimeout(10 * harness.SCALE)
        server = self.start_server(env={"NOTIFY_SOCKET": self.path("notify"), "WATCHDOG_USEC": "200000"})
        seen = ""

        def until(word):
            nonlocal seen
            while word not in seen:
                seen += notify.recv(4096).decode() + "\n"
        until("READY=1")
        self.assertIn("STATUS=Serving 0 groups on " + server.socket, seen)
        seen = ""
        until("WATCHDOG=1")
        seen = ""
        until("WATCHDOG=1")  # again and again
        server.signal(signal.SIGTERM)
        until("STOPPING=1")
        self.assertEqual(server.wait(), 0)

    def test_the_limit_of_open_files_is_raised(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        server = self.start_server()
        with open("/proc/%d/limits" % server.pid) as f:
            line = [x for x in f if x.startswith("Max open files")][0]
        self.assertEqual(line.split()[3], str(hard))

    def start_within(self, name, *wrapper):
        """What a server says that ends at once."""
        return self.refused(self.start_server(name=name, wrapper=wrapper, ready=False), 1)

    def test_too_few_descriptors_are_said_at_the_start(self):
        for n in (4, 5, 11, 16, 24, 40):  # libraries end the process without those that they want for themselves
            last = self.start_within("n%d" % n, "bash", "-c", 'ulimit -n %d; exec "$0" "$@"' % n)
            self.assertIn("of the 48 descriptors that a server needs at least are to be had (ulimit -n): Too many", last)

    @unittest.skipUnless(os.getuid() == 0, "to be another user, who has no other threads, takes root")
    def test_too_few_threads_are_said_at_the_start(self):
        os.chmod(self.dir, 0o777)
        for n in (12, 20):  # too few for libuv's pool; for gRPC beside it
            last = self.start_within("p%d" % n, "setpriv", "--reuid=64017", "--inh-caps=+dac_override",
                                     "--ambient-caps=+dac_override", "prlimit", "--nproc=%d" % n)
            self.assertRegex(last, r"ep-server: .* threads .*ulimit -u")

    def test_a_window_beyond_the_limit_of_a_files_size_is_refused(self):
        server = self.start_server("--host-ranks=1", wrapper=["bash", "-c", 'ulimit -f 4096; exec "$0" "$@"'])
        spec = ["--ranks=1", "--experts=1", "--hidden=64", "--top-k=1"]
        result = self.run_cmd(["ep-admin", "group", "create", "large", *spec, "--arena=64MiB", "--wait=30s"], server=server)
        self.assertEqual(result.code, 1, result)
        self.assertIn("File too large", result.err)
        result = self.run_cmd(["ep-admin", "group", "create", "small", *spec, "--arena=1MiB", "--modes=ll", "--wait=30s"],
                              server=server)
        self.assertEqual(result.code, 0, result)


class ReloadTest(harness.TestCase):
    def test_sighup_takes_what_may_change(self):
        path = self.write("c.yaml", "log-format: logfmt\nhost-ranks: 2\n")
        server = self.start_server("--config=" + path)
        self.write("c.yaml", "log-format: json\nhost-ranks: 3\ndrain-grace: 7s\n")
        server.signal(signal.SIGHUP)
        server.wait_log("configuration reloaded")
        log = server.log()
        self.assertRegex(log, r'(?m)^ts=.*needs a restart.*option=host-ranks value=3')
        self.assertRegex(log, r'(?m)^ts=.*option changed.*option=drain-grace value=7s')
        self.assertRegex(log, r'(?m)^\{.*configuration reloaded')
        self.assertEqual(server.http("/healthz")[0], 200)

    def test_a_broken_file_changes_nothing(self):
        path = self.write("c.yaml", "log-level: debug\n")
        server = self.start_server("--config=" + path)
        for text in ("log-format: json\nhost-ranks: many\n", "{", "log-format: json\ntls-cert: /no\n"):
            self.write("c.yaml", text)
            before = server.log().count("not reloaded")
            server.signal(signal.SIGHUP)
            harness.wait_until(lambda: server.log().count("not reloaded") > before, "the error is logged")
        os.unlink(path)
        server.signal(signal.SIGHUP)
        server.wait_log("cannot read " + path)
        self.assertNotIn("configuration reloaded", server.log())
        self.assertEqual([line for line in server.log().splitlines() if line.startswith("{")], [])
        self.assertEqual(server.http("/readyz")[0], 200)


@needs_grpc
class DrainTest(harness.TestCase):
    def serve(self, *flags):
        server = self.start_server(*flags)
        with reflect.Client(server.address) as rpc:
            create_group(rpc)
        return server

    def test_sigterm_waits_for_the_workers(self):
        server = self.serve("--drain-grace=1h")
        rpc = reflect.Client(server.address)
        self.addCleanup(rpc.close)
        self.assertEqual(health(rpc), "SERVING")
        with worker.Worker(server, "moe") as w:
            server.signal(signal.SIGTERM)
            event = w.event(worker.DRAINING)
            self.assertIn("stopping", event.text)
            self.assertEqual(server.http("/readyz")[::2], (503, "draining\n"))
            self.assertEqual(server.http("/healthz")[0], 200)
            self.assertEqual(health(rpc), "NOT_SERVING")
            with self.assertRaises(grpc.RpcError) as refused:
                worker.claim(rpc, "moe")
            self.assertEqual(refused.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
            self.assertTrue(server.alive())
        rpc.close()
        self.assertEqual(server.wait(), 0, server.log())

    def test_workers_that_stay_are_detached_after_the_grace(self):
        server = self.serve("--drain-grace=300ms")
        with worker.Worker(server, "moe") as w:
            start = time.monotonic()
            server.signal(signal.SIGTERM)
            self.assertEqual(server.wait(), 0, server.log())
            self.assertGreaterEqual(time.monotonic() - start, 0.3)
            self.assertIsNone(w.event(worker.RANK_LOST))  # closed
        self.assertIn("workers did not leave in time", server.log())

    def test_the_second_signal_waits_for_nobody(self):
        server = self.serve("--drain-grace=1h")
        with worker.Worker(server, "moe") as w:
            server.signal(signal.SIGINT)
            self.assertIsNotNone(w.event(worker.DRAINING))
            self.assertTrue(server.alive())
            server.signal(signal.SIGTERM)
            self.assertEqual(server.wait(), 0, server.log())

    def test_watches_do_not_hold_up_the_stop(self):
        server = self.serve()
        with reflect.Client(server.address) as rpc:
            streams = [rpc.stream("ep.v1.Admin/WatchGroups", timeout=3600),
                       rpc.stream("ep.v1.Admin/WatchStats", {"interval_ms": 100}, timeout=3600),
                       rpc.stream("grpc.health.v1.Health/Watch", {"service": ""}, timeout=3600)]
            for stream in streams:
                next(stream)
            self.assertEqual(server.stop(), 0, server.log())
            for stream in streams:
                try:
                    for _ in stream:
                        pass
                except grpc.RpcError:
                    pass


@needs_grpc
class ServicesTest(harness.TestCase):
    def test_health_and_reflection_on_both_listeners(self):
        server = self.start_server()
        common = ["ep.v1.Admin", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
                  "grpc.reflection.v1alpha.ServerReflection"]
        for target, services in ((server.address, common + ["ep.v1.Attach"]),
                                 ("127.0.0.1:%d" % server.port, common + ["ep.v1.Node"])):
            for version in ("v1", "v1alpha"):
                with reflect.Client(target, version=version) as rpc:
                    self.assertEqual(rpc.services(), sorted(services))
                    self.assertEqual(health(rpc), "SERVING")
                    self.assertEqual(health(rpc, "ep.v1.Admin"), "SERVING")
                    with self.assertRaises(grpc.RpcError) as unknown:
                        health(rpc, "no.such.Service")
                    self.assertEqual(unknown.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_text_that_is_no_utf8_is_refused_by_name(self):
        """Whoever reads messages as protobuf has them could not read an answer that has it."""
        server, f = self.start_server(), rawrpc.field
        spec = f(1, 2) + f(2, 4) + f(3, 64) + f(4, 2)
        for method, request, field in (
                ("Admin/CreateGroup", f(1, "moe") + f(2, spec + f(12, f(1, "k") + f(2, b"\xff"))), "spec.labels.value"),
                ("Admin/DrainNode", f(2, b"why \xe2\x82"), "reason"),
                ("Attach/Claim", f(1, "moe") + f(3, b"\xff"), "worker")):
            with self.subTest(method), self.assertRaises(rawrpc.RpcError) as refused:
                rawrpc.call(server.socket, "ep.v1." + method, request)
            self.assertEqual(refused.exception.code, grpc.StatusCode.INVALID_ARGUMENT.value[0])
            self.assertEqual(refused.exception.text, field + " is no UTF-8: the text of messages must be")

    def test_a_server_that_wants_a_token_says_where_it_is_given(self):
        server = self.start_server("--attach-token-file=" + self.write("token", "a secret\n"))
        with reflect.Client(server.address) as rpc:
            create_group(rpc)
            for token in ("", "another secret"):
                with self.subTest(token=token), self.assertRaises(grpc.RpcError) as refused:
                    worker.claim(rpc, "moe", token=token)
                self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAUTHENTICATED)
                self.assertIn("give %s by ep_client_options.token" % ("that" if token else "it"), refused.exception.details())
        worker.Worker(server, "moe", token="a secret").leave()

    def test_a_long_name_of_a_worker_is_cut_between_characters(self):
        server = self.start_server()
        with reflect.Client(server.address) as rpc:
            create_group(rpc)
            with worker.Worker(server, "moe", name="\u00e9" * 40):
                group = rpc.call("ep.v1.Admin/GetGroup", {"name": "moe"})
            self.assertEqual(group["status"]["ranks"][0]["worker"], "\u00e9" * 31)

    def test_attach_is_not_served_over_tcp(self):
        server = self.start_server()
        with reflect.Client(server.address) as local, reflect.Client("127.0.0.1:%d" % server.port) as remote:
            create_group(local)
            local.service("ep.v1.Attach")
            remote.pool = local.pool  # remote reflection does not tell of it
            with self.assertRaises(grpc.RpcError) as refused:
                remote.call("ep.v1.Attach/Claim", {"group": "moe"})
            self.assertEqual(refused.exception.code(), grpc.StatusCode.UNIMPLEMENTED)

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs root, to be somebody else")
    def test_other_users_are_turned_away_unless_allowed(self):
        cases = {"none": ((), False), "uid": (("--allow-uid=12345",), True), "gid": (("--allow-gid=12345",), True)}
        for name, (flags, allowed) in cases.items():
            server = self.start_server(*flags, name=name)
            os.chmod(self.dir, 0o755)
            code = ("import sys; sys.path.insert(0, %r); import reflect\n"
                    "print(reflect.Client(%r, timeout=60).services())" % (os.path.dirname(__file__), server.address))
            done = subprocess.run(["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "/usr/bin/python3", "-B",
                                   "-c", code], capture_output=True, text=True, env=harness.environment(), cwd="/")
            self.assertEqual("ep.v1.Admin" in done.stdout, allowed, (flags, done.stdout, done.stderr, server.log()))
            server.stop()


SPEC = ["--ranks=1", "--experts=4", "--hidden=64", "--top-k=2"]
CHANGES = (["group", "create", "b", *SPEC], ["group", "update", "moe", "--no-attach-token"],
           ["group", "update", "moe", "--timeout-ms=1234"], ["group", "delete", "moe"], ["node", "drain", "s"],
           ["node", "uncordon", "s"])


class OperatorsTest(harness.TestCase):
    """Who may change things over a socket, and who may only look."""

    OTHER = 12345

    def serve(self, *flags, name="s"):
        server = self.start_server("--name=s", "--host-ranks=2", *flags, name=name)
        for path in (self.dir, server.home):
            os.chmod(path, 0o755)
        return server

    def as_other(self, server, program, *args):
        if os.geteuid() != 0 or not shutil.which("setpriv"):
            self.skipTest("needs root, to be somebody else")
        done = self.run_cmd([shutil.which("setpriv"), "--reuid=%d" % self.OTHER, "--regid=%d" % self.OTHER, "--clear-groups",
                             harness.binary(program), *args], server=server)
        if done.code in (126, 127):
            self.skipTest("another user cannot run " + harness.binary(program))
        return done

    def admin(self, server, *args, code=0):
        done = self.run_cmd(["ep-admin", *args], server=server)
        self.assertEqual(done.code, code, done)
        return done

    def refused(self, done, who):
        self.assertEqual(done.code, 5, done)
        self.assertRegex(done.err, r'/ep\.v1\.Admin/\w+ is for operators, and "%s" may only look' % who)

    def test_a_workers_user_attaches_and_looks_and_changes_nothing(self):
        server = self.serve("--allow-uid=%d" % self.OTHER)
        token = self.write("token", "a secret\n")
        os.chmod(token, 0o644)
        self.admin(server, "group", "create", "moe", *SPEC, "--attach-token-file=" + token)
        for change in CHANGES:
            self.refused(self.as_other(server, "ep-admin", *change), "uid:%d" % self.OTHER)
        refused = re.findall(r'mod=audit msg="call refused" method=/ep.v1.Admin/(\w+) by=uid:%d role=viewer' % self.OTHER,
                             server.log())
        self.assertEqual(refused, ["CreateGroup", "UpdateGroup", "UpdateGroup", "DeleteGroup", "DrainNode", "UncordonNode"])
        for look in (["group", "get", "moe"], ["group", "list"], ["group", "history", "moe"], ["group", "plan", "b", *SPEC],
                     ["group", "create", "b", "--dry-run", *SPEC], ["node", "list"], ["node", "get", "s"], ["stats"],
                     ["version"], ["group", "watch", "moe", "--until=ready"]):
            self.assertEqual(self.as_other(server, "ep-admin", *look).code, 0, look)
        worker = ["worker", "--group=moe", "--rank=0", "--seconds=1"]
        self.assertNotEqual(self.as_other(server, *worker).code, 0)  # without the token
        done = self.as_other(server, *worker, "--token-file=" + token)
        self.assertEqual(done.code, 0, done)
        for change in CHANGES:  # the server's own user
            self.admin(server, *change)

    def test_admin_uid_and_admin_gid_say_who_may_change_things(self):
        for name, flag in (("u", "--admin-uid=%d" % self.OTHER), ("g", "--admin-gid=%d" % self.OTHER)):
            server = self.serve(flag, name=name)
            self.assertEqual(self.as_other(server, "ep-admin", "group", "create", "moe", *SPEC).code, 0)
            self.assertEqual(self.as_other(server, "worker", "--group=moe", "--rank=0", "--seconds=1").code, 0)
            self.refused(self.run_cmd(["ep-admin", "group", "delete", "moe"], server=server), "uid:%d" % os.geteuid())
            self.admin(server, "group", "list")

    def test_without_a_certificate_one_looks_unless_insecure_says_otherwise(self):
        server = self.serve("--insecure=false")
        address = "127.0.0.1:%d" % server.port
        self.admin(server, "group", "create", "moe", *SPEC)
        for change in CHANGES:
            self.refused(self.admin(server, "--server", address, *change, code=5), "anonymous")
        self.assertEqual(self.admin(server, "--server", address, "group", "list", "-q").out, "moe\n")
        self.assertIn('mod=audit msg="call refused" method=/ep.v1.Admin/DrainNode by=anonymous role=viewer', server.log())
        server = self.serve("--insecure", name="open")
        self.admin(server, "--server", "127.0.0.1:%d" % server.port, "group", "create", "moe", *SPEC)


@needs_grpc
class LimitsTest(harness.TestCase):
    """What is given to a server is what its sockets hold to."""

    def targets(self, server):
        return server.address, "127.0.0.1:%d" % server.port

    def test_max_message_bytes(self):
        server = self.start_server("--max-message-bytes=64KiB")
        for target in self.targets(server):
            with reflect.Client(target) as rpc:
                for size, code in ((60000, grpc.StatusCode.NOT_FOUND), (70000, grpc.StatusCode.RESOURCE_EXHAUSTED)):
                    with self.assertRaises(grpc.RpcError) as refused:
                        rpc.call("ep.v1.Admin/DeleteGroup", {"name": "x" * size})
                    self.assertEqual(refused.exception.code(), code, refused.exception)

    def test_max_connections(self):
        server = self.start_server("--max-connections=2")
        for target in self.targets(server):
            inside = [reflect.Client(target) for _ in range(2)]
            for rpc in inside:
                self.addCleanup(rpc.close)
                self.assertEqual(health(rpc), "SERVING")
            with reflect.Client(target, timeout=3) as rpc, self.assertRaises(grpc.RpcError):
                rpc.services()
            for rpc in inside:
                self.assertEqual(health(rpc), "SERVING")
            inside[0].close()

            def comes_in():
                with reflect.Client(target, timeout=5) as rpc:
                    try:
                        return rpc.services()
                    except grpc.RpcError:
                        return None
            harness.wait_until(comes_in, "another has a place")

    def test_a_fence_that_no_leader_has(self):
        server = self.start_server("--host-ranks=2")
        for target in self.targets(server)[1:]:
            with reflect.Client(target) as rpc:
                for fence in (2 ** 64 - 1, 2 ** 63 - 1, 2 ** 40):
                    with self.assertRaises(grpc.RpcError) as refused:
                        rpc.call("ep.v1.Node/Abort", {"fence": str(fence)})
                    self.assertEqual(refused.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
                    self.assertIn("fence is %d: no leader has that term" % fence, refused.exception.details())
                create_group(rpc)
                self.assertEqual(group_names(rpc), ["moe"])

    def test_what_has_lost_nobody_and_what_does_not_run(self):
        server = self.start_server("--host-ranks=2")
        for target in self.targets(server)[1:]:
            with reflect.Client(target) as rpc:
                create_group(rpc)
                rpc.call("ep.v1.Node/Reach", {"group": "moe", "epoch": "1"})
                for name, epoch in (("moe", 2), ("other", 1), ("", 0)):
                    with self.assertRaises(grpc.RpcError) as refused:
                        rpc.call("ep.v1.Node/Reach", {"group": name, "epoch": str(epoch)})
                    self.assertEqual(refused.exception.code(), grpc.StatusCode.NOT_FOUND)
                    self.assertRegex(refused.exception.details(),
                                     'epoch %d of group "%s" does not run on node ' % (epoch, name))

    def test_texts_that_servers_would_keep(self):
        server = self.start_server()
        for target in self.targets(server):
            with reflect.Client(target) as rpc:
                self.assertEqual(next(rpc.stream("ep.v1.Admin/WatchGroups", {"name": "nobody"}))["type"], "TYPE_SYNCED")
                for name in ("x" * 64, "X", "a b"):
                    with self.assertRaises(grpc.RpcError) as refused:
                        next(rpc.stream("ep.v1.Admin/WatchGroups", {"name": name}))
                    self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
                    self.assertIn("name is \"", refused.exception.details())
                with self.assertRaises(grpc.RpcError) as refused:
                    rpc.call("ep.v1.Admin/DrainNode", {"reason": "x" * 1025})
                self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
                self.assertEqual(refused.exception.details(), "reason has 1025 bytes: it may have 1024")
                rpc.call("ep.v1.Admin/DrainNode", {"reason": "x" * 1024})
                self.assertEqual(rpc.call("ep.v1.Admin/UncordonNode").get("state"), "NODE_STATE_READY")
        self.assertIn("action=node.drain", server.log())


@needs_grpc
class TlsTest(harness.TestCase):
    def setUp(self):
        super().setUp()
        if not shutil.which("openssl"):
            self.skipTest("openssl is not installed")
        self.certs = self.path("certs")
        self.make_certs()

    def make_certs(self, *names):
        script = os.path.join(harness.ROOT, "deploy", "certs.sh")
        done = subprocess.run(["bash", script, self.certs, *names], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def cert(self, name):
        return os.path.join(self.certs, name)

    def start(self, *flags):
        return self.start_server("--tls-ca=" + self.cert("ca.pem"), "--tls-cert=" + self.cert("server.pem"),
                                 "--tls-key=" + self.cert("server.key"), *flags)

    def credentials(self):
        return [self.cert("ca.pem"), self.cert("client.pem"), self.cert("client.key")]

    def test_certs_sh_changes_nothing_twice(self):
        def state():
            return [(name, os.stat(self.cert(name)).st_mtime_ns) for name in sorted(os.listdir(self.certs))]
        before = state()
        self.assertEqual(len(before), 8, before)
        self.assertEqual(self.make_certs(), "")
        self.assertEqual(state(), before)
        self.assertEqual(self.make_certs("other.example"), "made %s\n" % self.cert("server.pem"))
        self.assertEqual(self.make_certs("other.example"), "")

    def test_only_clients_with_a_certificate_get_in(self):
        server = self.start()
        target = "localhost:%d" % server.port
        with reflect.Client(target, tls=self.credentials()) as rpc:
            self.assertEqual(health(rpc), "SERVING")
        with reflect.Client(target, timeout=5) as rpc, self.assertRaises(grpc.RpcError):
            rpc.services()
        other = self.path("other")
        subprocess.run(["bash", os.path.join(harness.ROOT, "deploy", "certs.sh"), other], check=True, capture_output=True)
        stranger = [self.cert("ca.pem"), os.path.join(other, "client.pem"), os.path.join(other, "client.key")]
        with reflect.Client(target, timeout=5, tls=stranger) as rpc, self.assertRaises(grpc.RpcError):
            rpc.services()
        with reflect.Client(server.address) as rpc:  # the unix socket does not mind
            self.assertEqual(health(rpc), "SERVING")

    def issue(self, name, subject):
        """A client's certificate with that subject, by the same authority."""
        key, request, pem = (self.cert(name + end) for end in (".key", ".csr", ".pem"))
        for command in (["req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key,
                         "-multivalue-rdn", "-subj", subject, "-out", request],
                        ["x509", "-req", "-in", request, "-CA", self.cert("ca.pem"), "-CAkey", self.cert("ca.key"),
                         "-CAcreateserial", "-out", pem]):
            subprocess.run(["openssl"] + command, check=True, capture_output=True)
        return [self.cert("ca.pem"), pem, key]

    def test_viewers_look_and_operators_change(self):
        server = self.start()
        target = "localhost:%d" % server.port
        viewers = [[self.cert("ca.pem"), self.cert("viewer.pem"), self.cert("viewer.key")],
                   self.issue("one", "/CN=one/OU=viewer"), self.issue("two", "/O=x/CN=two+OU=viewer/L=here")]
        operators = [self.credentials(), self.issue("three", "/OU=viewers/CN=three"),
                     self.issue("four", "/CN=OU=viewer")]
        for tls in viewers:
            with reflect.Client(target, tls=tls) as rpc:
                self.assertEqual(health(rpc), "SERVING")
                self.assertEqual(len(rpc.call("ep.v1.Admin/ListNodes")["nodes"]), 1)
                self.assertEqual(next(rpc.stream("ep.v1.Admin/WatchGroups"))["type"], "TYPE_SYNCED")
                for method in ("ep.v1.Admin/DrainNode", "ep.v1.Admin/CreateGroup", "ep.v1.Node/Ping"):
                    with self.assertRaises(grpc.RpcError) as refused:
                        rpc.call(method)
                    self.assertEqual(refused.exception.code(), grpc.StatusCode.PERMISSION_DENIED)
                    self.assertIn("/%s is for operators" % method, refused.exception.details())
        self.assertRegex(server.log(), r'mod=audit msg="call refused" method=/ep.v1.Admin/DrainNode by=ep-viewer role=viewer')
        for tls in operators:
            with reflect.Client(target, tls=tls) as rpc:
                rpc.call("ep.v1.Admin/DrainNode")
                rpc.call("ep.v1.Admin/UncordonNode")
        flags = ["--server", target, "--tls-ca", self.cert("ca.pem"), "--tls-cert", self.cert("viewer.pem"), "--tls-key",
                 self.cert("viewer.key")]
        sizes = ["--ranks=2", "--experts=8", "--hidden=64", "--top-k=2"]
        for words in (["plan"], ["create", "--dry-run"]):
            planned = self.run_cmd(["ep-admin", *flags, "group", *words, "moe", *sizes])
            self.assertEqual(planned.code, 0, planned)
            self.assertIn("host1", planned.out)
        refused = self.run_cmd(["ep-admin", *flags, "group", "create", "moe", *sizes])
        self.assertEqual(refused.code, 5, refused)
        self.assertIn("/ep.v1.Admin/CreateGroup is for operators", refused.err)
        refused = self.run_cmd(["ep-admin", *flags, "node", "drain", "x"])
        self.assertEqual(refused.code, 5, refused)
        self.assertIn('is for operators, and the certificate of "ep-viewer" is a viewer\'s (OU=viewer)', refused.err)

    def test_only_servers_call_as_servers_where_peer_ou_says_who_they_are(self):
        server = self.start("--peer-ou=server")
        target = "localhost:%d" % server.port
        others = [self.credentials(), self.issue("near", "/OU=servers/CN=near"), self.issue("name", "/CN=OU=server"),
                  self.issue("comma", "/CN=x,OU=server"), self.issue("plus", "/CN=x\\+OU=server/O=y")]
        for tls in others:
            with reflect.Client(target, tls=tls) as rpc:
                self.assertEqual(len(rpc.call("ep.v1.Admin/ListNodes")["nodes"]), 1)
                rpc.call("ep.v1.Admin/DrainNode")
                rpc.call("ep.v1.Admin/UncordonNode")
                with self.assertRaises(grpc.RpcError) as refused:
                    rpc.call("ep.v1.Node/Abort", {"reason": "x"})
                self.assertEqual(refused.exception.code(), grpc.StatusCode.PERMISSION_DENIED)
                self.assertIn("/ep.v1.Node/Abort is for servers of the cluster", refused.exception.details())
        self.assertIn('mod=audit msg="call refused" method=/ep.v1.Node/Abort by=ep-admin role=operator', server.log())
        for tls in ([self.cert("ca.pem"), self.cert("server.pem"), self.cert("server.key")],
                    self.issue("escape", "/OU=server/CN=x\\\\"), self.issue("both", "/CN=x+OU=server/L=here")):
            with reflect.Client(target, tls=tls) as rpc:
                self.assertIn("boot_us", rpc.call("ep.v1.Node/Ping"))

    def test_a_new_certificate_is_served_without_a_restart(self):
        server = self.start()

        def served():
            return ssl.get_server_certificate(("127.0.0.1", server.port))
        first = served()
        self.make_certs("renewed.example")
        harness.wait_until(lambda: served() != first, "the new certificate is served")
        with reflect.Client("localhost:%d" % server.port, tls=self.credentials()) as rpc:
            self.assertEqual(health(rpc), "SERVING")

    def test_wrong_files_are_refused(self):
        bad = self.write("bad.pem", "no certificate\n")
        server = self.start_server("--tls-ca=" + self.cert("ca.pem"), "--tls-cert=" + bad,
                                   "--tls-key=" + self.cert("server.key"), ready=False)
        self.assertEqual(server.wait(), 2, server.log())
        self.assertIn(bad, server.log().strip().split("\n")[-1])


# ---- Prometheus text format 0.0.4, strictly ----

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(r"(%s)(?:\{(%s(?:,%s)*)\})? (NaN|[+-]Inf|-?[0-9.]+(?:e[+-][0-9]+)?)" % (NAME, LABEL, LABEL))
TYPES = {"counter": ("",), "gauge": ("",), "untyped": ("",), "summary": ("", "_sum", "_count"),
         "histogram": ("_bucket", "_sum", "_count")}


def parse_metrics(text):
    """{family: (type, {(name, labels): value})}; ValueError on anything that is not exactly right."""
    families, family = {}, None
    if not text.endswith("\n"):
        raise ValueError("no newline at the end")
    for number, line in enumerate(text[:-1].split("\n"), 1):
        def wrong(why):
            return ValueError("line %d: %s: %s" % (number, why, line))
        if line.startswith("# HELP "):
            found = re.fullmatch(r"# HELP (%s) ((?:[^\\\n]|\\[\\n])+)" % NAME, line)
            if not found or found[1] in families:
                raise wrong("bad or repeated HELP")
            family = found[1]
            families[family] = [None, {}]
        elif line.startswith("# TYPE "):
            found = re.fullmatch(r"# TYPE (%s) (\w+)" % NAME, line)
            if not found or found[1] != family or families[family][0] or found[2] not in TYPES:
                raise wrong("TYPE must follow its HELP, once")
            families[family][0] = found[2]
        else:
            found = SAMPLE.fullmatch(line)
            if not found:
                raise wrong("neither comment nor sample")
            name, labels, value = found.groups()
            kind, samples = families.get(family, (None, None))
            if not kind or not name.startswith(family) or name[len(family):] not in TYPES[kind]:
                raise wrong("a sample outside its family %s" % family)
            names = re.findall(r'([a-zA-Z_][a-zA-Z0-9_]*)="', labels or "")
            if len(set(names)) != len(names) or (name, labels) in samples:
                raise wrong("the same label or sample twice")
            samples[name, labels] = float(value)
            if kind == "counter" and not (name.endswith("_total") and float(value) >= 0):
                raise wrong("a counter is named _total and not negative")
    for name, (kind, samples) in families.items():
        if kind == "histogram":
            check_histogram(name, samples)
    return families


def check_histogram(name, samples):
    """Buckets grow, the last is +Inf and equals _count."""
    series = {}
    for (sample, labels), value in samples.items():
        if sample == name + "_bucket":
            rest, bound = re.fullmatch(r'(.*?),?le="([^"]*)"', labels).groups()
            series.setdefault(rest, []).append((float(bound), value))
    for rest, buckets in series.items():
        if [b for b, _ in buckets] != sorted(b for b, _ in buckets) or buckets[-1][0] != float("inf"):
            raise ValueError("%s{%s}: buckets are not in order up to +Inf" % (name, rest))
        if [v for _, v in buckets] != sorted(v for _, v in buckets):
            raise ValueError("%s{%s}: buckets are not cumulative" % (name, rest))
        if samples[name + "_count", rest or None] != buckets[-1][1]:
            raise ValueError("%s{%s}: _count is not the last bucket" % (name, rest))


class MetricsTest(harness.TestCase):
    def test_the_parser_is_strict(self):
        good = "# HELP a_total x\n# TYPE a_total counter\na_total{x=\"\\\"\\n\\\\\"} 1\n"
        parse_metrics(good)
        for bad in (good[:-1], good + good, good.replace("counter", "thing"), good.replace("} 1", "} one"),
                    good.replace("\\n", "\\t"), "a_total 1\n", good + "a_total{x=\"1\",x=\"2\"} 1\n",
                    good.replace(" 1", " -1"), good + "\n", good.replace(" 1\n", " 1 \n")):
            with self.assertRaises(ValueError, msg=bad):
                parse_metrics(bad)

    def test_an_idle_server(self):
        server = self.start_server()
        status, headers, text = server.http("/metrics")
        self.assertEqual(status, 200)
        self.assertEqual(headers["Content-Type"], "text/plain; version=0.0.4; charset=utf-8")
        families = parse_metrics(text)
        self.assertTrue(families)
        for name in families:
            self.assertTrue(name.startswith("ep_") or name.startswith("process_"), name)
        self.assertEqual(server.http("/healthz")[::2], (200, "ok\n"))
        self.assertEqual(server.http("/readyz")[::2], (200, "ok\n"))
        self.assertEqual(server.http("/nothing")[0], 404)
        self.assertEqual(server.http("/metrics", "POST")[0], 405)
        self.assertEqual(server.http("/metrics", "HEAD")[::2], (200, ""))

    @needs_grpc
    def test_groups_and_workers_show(self):
        server = self.start_server()
        with reflect.Client(server.address) as rpc:
            create_group(rpc)
            with worker.Worker(server, "moe"):
                text = server.http("/metrics")[2]
                parse_metrics(text)
                self.assertIn('"moe"', text)


@needs_grpc
class HostileTest(harness.TestCase):
    CONNECTS = int(os.environ.get("EP_HOSTILE_CONNECTS", "10000"))
    GARBAGE = [b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 500, os.urandom(65536),
               b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
               b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0" + b"\0\xff\xff\1\5\0\0\0\1" + b"\x82" * 1000]

    def endpoints(self, server):
        return {"unix": lambda: (socket.AF_UNIX, socket.SOCK_STREAM, server.socket),
                "side": lambda: (socket.AF_UNIX, socket.SOCK_SEQPACKET, server.side_socket),
                "tcp": lambda: (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", server.port)),
                "metrics": lambda: (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", server.metrics_port))}

    def check_alive(self, server, rpc):
        rpc.call("ep.v1.Admin/ListGroups")
        self.assertTrue(server.alive(), server.log()[-4000:])

    def test_garbage_disturbs_nobody(self):
        server = self.start_server()
        with reflect.Client(server.address) as rpc:
            create_group(rpc)
            for name, where in self.endpoints(server).items():
                for data in self.GARBAGE:
                    family, kind, address = where()
                    s = socket.socket(family, kind)
                    s.settimeout(5 * harness.SCALE)
                    s.connect(address)
                    try:
                        s.sendall(data)
                        s.recv(4096)
                    except OSError:
                        pass
                    s.close()
                    self.check_alive(server, rpc)
            with worker.Worker(server, "moe"):
                pass
            self.assertEqual(server.http("/readyz")[0], 200)

    def flood(self, server, where, rpc):
        """Connects that say nothing, as many at a time as descriptors allow; some are turned away."""
        limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 256, self.CONNECTS)
        silent = []
        try:
            for i in range(self.CONNECTS):
                family, kind, address = where()
                s = socket.socket(family, kind | socket.SOCK_NONBLOCK)
                silent.append(s)
                s.connect_ex(address)
                if len(silent) >= limit:
                    for old in silent[:limit // 2]:
                        old.close()
                    del silent[:limit // 2]
                if i % 500 == 0:
                    self.check_alive(server, rpc)
            self.check_alive(server, rpc)
        finally:
            for s in silent:
                s.close()

    def test_ten_thousand_silent_connects_disturb_nobody(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        server = self.start_server("--log-level=info")
        with reflect.Client(server.address) as rpc:
            create_group(rpc)
            with worker.Worker(server, "moe", 0) as attached:
                for name, where in self.endpoints(server).items():
                    with self.subTest(endpoint=name):
                        self.flood(server, where, rpc)
                        self.check_recovered(server)
                self.check_attached(attached)

    def check_attached(self, attached):
        """Nothing but news of rank 1 has come, and the connection is open."""
        with self.assertRaises(socket.timeout):
            while True:
                frame = attached.frame(timeout=0.2)
                self.assertIsNotNone(frame)
                self.assertIn(frame.event, (worker.RANK_JOINED, worker.RANK_LOST, worker.EVENTS_LOST), frame)

    def check_recovered(self, server):
        """When the silent ones have gone, newcomers get in on every endpoint."""
        def in_again():
            try:
                with reflect.Client(server.address, timeout=5) as a, \
                        reflect.Client("127.0.0.1:%d" % server.port, timeout=5) as b:
                    if health(a) != "SERVING" or health(b) != "SERVING":
                        return False
                with worker.Worker(server, "moe", 1):
                    pass
                return server.http("/readyz")[0] == 200
            except (grpc.RpcError, OSError, AssertionError) as e:
                self.why = e
                return False
        harness.wait_until(in_again, lambda: "newcomers get in: %s" % self.why, interval=0.1)


@needs_grpc
@unittest.skipUnless(shutil.which("valgrind"), "valgrind is not installed")
class ValgrindTest(harness.TestCase):
    """Start, attach, detach, stop: no error and no leak.  Not for sanitizer builds."""

    def setUp(self):
        super().setUp()
        with open(harness.binary("ep-server"), "rb") as f:
            if b"__asan_init" in (data := f.read()) or b"__tsan_init" in data:
                self.skipTest("this is a sanitizer build")

    def valgrind(self):
        suppressions = os.path.join(os.path.dirname(os.path.abspath(__file__)), "valgrind.supp")
        command = ["valgrind", "--quiet", "--leak-check=full", "--show-leak-kinds=definite,indirect,possible",
                   "--errors-for-leak-kinds=definite,indirect,possible", "--error-exitcode=99", "--num-callers=30"]
        return command + (["--suppressions=" + suppressions] if os.path.exists(suppressions) else [])

    def test_a_whole_life_leaves_nothing(self):
        certs = self.path("certs")
        subprocess.run(["bash", os.path.join(harness.ROOT, "deploy", "certs.sh"), certs], check=True, capture_output=True)
        server = self.start_server("--tls-ca=%s/ca.pem" % certs, "--tls-cert=%s/server.pem" % certs,
                                   "--tls-key=%s/server.key" % certs, wrapper=self.valgrind(), timeout=120)
        with reflect.Client(server.address, timeout=60) as rpc:
            create_group(rpc)
            with worker.Worker(server, "moe"), worker.Worker(server, "moe"):
                server.http("/metrics")
            rpc.call("ep.v1.Admin/UpdateGroup", {"name": "moe", "spec": {"top_k": 4}, "fields": ["top_k"]})
            create_group(rpc, "other")
            rpc.call("ep.v1.Admin/DeleteGroup", {"name": "other"})
            with self.assertRaises(grpc.RpcError):
                create_group(rpc, "bad", hidden=3)
            stream = rpc.stream("ep.v1.Admin/WatchGroups", timeout=60)
            next(stream)
            tls = [os.path.join(certs, name) for name in ("ca.pem", "client.pem", "client.key")]
            with reflect.Client("localhost:%d" % server.port, timeout=60, tls=tls) as remote:
                self.assertEqual(health(remote), "SERVING")
            server.signal(signal.SIGHUP)
            server.wait_log("configuration reloaded", timeout=60)
            self.assertEqual(server.stop(timeout=120), 0, server.log())
        self.assertNotRegex(server.log(), r"(?m)^==\d+==")

    def test_a_failed_start_leaves_nothing(self):
        for i, flags in enumerate((["--metrics=no.such.host.invalid:1"], ["--listen=no.such.host.invalid:1", "--insecure"],
                                   ["--host-ranks=many"])):
            server = self.start_server(*flags, name="f%d" % i, wrapper=self.valgrind(), ready=False)
            self.assertIn(server.wait(timeout=60), (1, 2, 4), server.log())
            self.assertNotRegex(server.log(), r"(?m)^==\d+==")


if __name__ == "__main__":
    harness.main()
