"""What the integration tests share: a private directory, real servers in it, and their end.

    import harness

    class AttachTest(harness.TestCase):
        def test_something(self):
            server = self.start_server("--host-ranks=4")          # is ready when this returns
            result = self.run_cmd(["ep-admin", "group", "list"], server=server)
            self.assertEqual(result.code, 0, result)
            self.assertEqual(server.stop(), 0)                    # or leave it to the end of the test

    if __name__ == "__main__":
        harness.main()

Every test gets its own temporary directory (`self.dir`, `self.path("name")`); sockets, state, logs and
configuration live there.  Ports are 0 and come back through the server's --port-file.  At the end of
a test whatever it started is stopped; a server that then does not exit with 0, or that a sanitizer
complained about, fails the test.  Nothing is left behind, unless EP_KEEP is set.

Without a TestCase use `with harness.Sandbox() as box: box.start_server()`.

Environment
    EP_BIN         directory of the binaries; default: build/bin of this checkout
    EP_KEEP        keep the directories and say where they are
    EP_TIME_SCALE  multiplies every deadline (valgrind, sanitizers, slow machines); default 1

Waiting: never sleep for a state; use wait_until(condition, "what").  How long it may take is no promise of anybody's:
a machine may stand still for seconds.
"""

import base64
import collections
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.abspath(os.environ.get("EP_BIN", os.path.join(ROOT, "build", "bin")))
SCALE = float(os.environ.get("EP_TIME_SCALE", "1"))
PATIENCE_S = 40.0  # with what should be there at once
NOT_LOST = "--lost-after=20s"  # where no server is to be gone, also when the machine stands still
COMPLAINTS = ("AddressSanitizer", "ThreadSanitizer", "LeakSanitizer", "MemorySanitizer", "runtime error:")


def binary(name):
    """Path of one of our programs; a name with a slash stays as it is."""
    return name if "/" in name else os.path.join(BIN, name)


def have(name):
    return os.access(binary(name), os.X_OK)


def wait_until(condition, what, timeout=PATIENCE_S, interval=0.01):
    """Returns the first true value of condition(); AssertionError when there is none in time."""
    end = time.monotonic() + timeout * SCALE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError("not in %.1f s: %s" % (timeout * SCALE, what() if callable(what) else what))
        time.sleep(interval)


class Result(collections.namedtuple("Result", "cmd code out err")):
    """A finished command: exit code, stdout, stderr; prints as something to read."""

    def json(self):
        return json.loads(self.out)

    def __str__(self):
        return "$ %s\n-> %d\n--- stdout\n%s--- stderr\n%s" % (" ".join(self.cmd), self.code, self.out, self.err)


def run(cmd, env=None, input=None, timeout=60.0, cwd=None):
    """Runs one of our programs (or any) to its end.  env is added to a clean environment."""
    cmd = [binary(cmd[0])] + [str(c) for c in cmd[1:]]
    done = subprocess.run(cmd, env=environment(env), input=input, text=True, errors="replace", cwd=cwd,
                          stdin=None if input is not None else subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout * SCALE)
    return Result(cmd, done.returncode, done.stdout, done.stderr)


def environment(extra=None):
    """The environment of a child: ours without EP_* settings and proxies, and `extra`."""
    env = {k: v for k, v in os.environ.items()
           if not k.startswith("EP_") and not k.lower().endswith("_proxy") and k != "NOTIFY_SOCKET"}
    env["LC_ALL"] = "C.UTF-8"
    env.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # a login has it, a bare shell may not
    env.update(extra or {})
    return env


def die_with_us(cmd):
    """The kernel kills the child when this thread ends; for the main thread that is this process."""
    if threading.current_thread() is threading.main_thread() and shutil.which("setpriv"):
        return ["setpriv", "--pdeathsig", "KILL", "--"] + cmd
    return cmd


class Process:
    """A program that goes on running; its stderr is in .log_path, its stdout in .out_path."""

    def __init__(self, cmd, directory, name, env=None):
        self.cmd = [binary(cmd[0])] + [str(c) for c in cmd[1:]]
        self.log_path = os.path.join(directory, name + ".log")
        self.out_path = os.path.join(directory, name + ".out")
        with open(self.log_path, "ab") as log, open(self.out_path, "ab") as out:
            self.popen = subprocess.Popen(die_with_us(self.cmd), env=environment(env),
                                          stdin=subprocess.DEVNULL, stdout=out, stderr=log)
        self.pid = self.popen.pid

    def log(self):
        with open(self.log_path, errors="replace") as f:
            return f.read()

    def out(self):
        with open(self.out_path, errors="replace") as f:
            return f.read()

    def alive(self):
        return self.popen.poll() is None

    def signal(self, number):
        self.popen.send_signal(number)

    def wait(self, timeout=PATIENCE_S):
        """The exit code (-N: killed by signal N)."""
        try:
            return self.popen.wait(timeout * SCALE)
        except subprocess.TimeoutExpired:
            raise AssertionError("pid %d still runs:\n%s\n%s" % (self.pid, " ".join(self.cmd), self.log()))

    def stop(self, timeout=PATIENCE_S):
        """SIGTERM, then the exit code."""
        if self.alive():
            self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self):
        if self.alive():
            self.signal(signal.SIGKILL)
        return self.popen.wait()

    def wait_log(self, text, timeout=PATIENCE_S):
        wait_until(lambda: text in self.log(), lambda: "%r in the log:\n%s" % (text, self.log()), timeout)

    def complaint(self):
        """Where a sanitizer began to complain, None when none did."""
        log = self.log()
        for word in COMPLAINTS:
            if word in log:
                return log[max(0, log.index(word) - 200):][:8000]
        return None


class Server(Process):
    """A running ep-server.  .socket, .side_socket, .port (admin TCP), .metrics_port, .address."""

    def __init__(self, directory, name, flags, env, wrapper, listen, metrics):
        self.home = os.path.join(directory, name)
        os.makedirs(self.home, exist_ok=True)
        self.socket = os.path.join(self.home, "ep.sock")
        self.address = "unix:" + self.socket
        self.port_file = os.path.join(self.home, "ports")
        self.state_dir = os.path.join(self.home, "state")
        if os.path.exists(self.port_file):
            os.unlink(self.port_file)
        cmd = ["ep-server", "--socket=" + self.socket, "--state-dir=" + self.state_dir,
               "--port-file=" + self.port_file, "--log-level=debug", "--backend=host"]
        cmd += ["--listen=127.0.0.1:0", "--insecure"] if listen else []
        cmd += ["--metrics=127.0.0.1:0"] if metrics else []
        cmd += list(flags)
        if wrapper:
            cmd = list(wrapper) + [binary(cmd[0])] + cmd[1:]
            cmd[0] = shutil.which(cmd[0]) or cmd[0]
        self.values = {}
        super().__init__(cmd, self.home, "server", env)

    @property
    def side_socket(self):
        return self.values["SIDE_SOCKET"]

    @property
    def port(self):
        return int(self.values["LISTEN_PORT"])

    @property
    def metrics_port(self):
        return int(self.values["METRICS_PORT"])

    def wait_ready(self, timeout=PATIENCE_S):
        """Until the port file is there, which is written when the server is SERVING."""
        def ready():
            if not self.alive():
                raise AssertionError("ep-server ended with %d:\n%s" % (self.popen.returncode, self.log()))
            return os.path.exists(self.port_file)
        wait_until(ready, lambda: "server ready:\n" + self.log(), timeout)
        with open(self.port_file) as f:
            self.values = dict(line.rstrip("\n").split("=", 1) for line in f)
        return self

    def open_files(self):
        """What each of its descriptors is, as /proc has it; those that are closed meanwhile are left out."""
        fds, found = "/proc/%d/fd" % self.pid, []
        for fd in os.listdir(fds):
            try:
                found.append(os.readlink(os.path.join(fds, fd)))
            except FileNotFoundError:
                pass
        return found

    def http(self, path, method="GET"):
        """(status, headers, body) of the metrics port."""
        request = urllib.request.Request("http://127.0.0.1:%d%s" % (self.metrics_port, path), method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=PATIENCE_S * SCALE) as reply:
                return reply.status, reply.headers, reply.read().decode()
        except urllib.error.HTTPError as reply:
            return reply.code, reply.headers, reply.read().decode()


class Sandbox:
    """A temporary directory and the processes in it.  Used as a context, or with close()."""

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="ep-")
        self.processes = []
        self.afterwards = []  # called when these have ended, while the directory is there

    def path(self, name):
        return os.path.join(self.dir, name)

    def write(self, name, text):
        with open(self.path(name), "w") as f:
            f.write(text)
        return self.path(name)

    def start_server(self, *flags, name="s", env=None, wrapper=(), listen=True, metrics=True, ready=True,
                     timeout=PATIENCE_S):
        """
        An ep-server in its own directory below the sandbox.  The same `name` again is the same
        socket and state: a restart.  flags come last, so they win over what is set here.
        wrapper: ["valgrind", ...].  ready=False returns at once: call wait_ready() yourself.
        """
        server = Server(self.dir, name, [str(f) for f in flags], env, wrapper, listen, metrics)
        self.processes.append(server)
        return server.wait_ready(timeout) if ready else server

    def spawn(self, cmd, name=None, env=None, server=None):
        """Starts a program that goes on running, a worker for instance."""
        name = name or "%s-%d" % (os.path.basename(cmd[0]), len(self.processes))
        process = Process(cmd, self.dir, name, self._with_server(env, server))
        self.processes.append(process)
        return process

    def run_cmd(self, cmd, env=None, server=None, **more):
        """run() with EP_SERVER set to the server's socket."""
        return run(cmd, env=self._with_server(env, server), cwd=self.dir, **more)

    def operate(self, server, *args):
        """
        ep-admin, tried again where its answer says so: on a busy machine a leader may lose its lease, and another has
        to lead first.
        """
        def asked():
            result = self.run_cmd(["ep-admin", "--timeout=30s", *args], server=server)
            return None if result.code != 0 and "try again" in result.err else result
        return wait_until(asked, lambda: "an answer that does not ask to try again: %s" % (args,), interval=0.1)

    @staticmethod
    def _with_server(env, server):
        return dict({"EP_SERVER": server.address} if server else {}, **(env or {}))

    def close(self):
        """Ends everything; returns what was wrong with it, as a list of texts."""
        wrong = []
        for process in reversed(self.processes):
            wrong += self._end(process)
        for call in reversed(self.afterwards):
            call()
        if os.environ.get("EP_KEEP"):
            print("kept: " + self.dir, file=sys.stderr)
        else:
            shutil.rmtree(self.dir, ignore_errors=True)
        self.processes = []
        return wrong

    @staticmethod
    def _end(process):
        wrong = []
        was_alive = process.alive()
        if was_alive and isinstance(process, Server):
            process.signal(signal.SIGTERM)
            try:
                process.popen.wait(0.3)
            except subprocess.TimeoutExpired:
                process.signal(signal.SIGTERM)  # the second one: do not wait for workers
            try:
                code = process.wait()
                if code != 0:
                    wrong.append("ep-server exited with %d:\n%s" % (code, process.log()))
            except AssertionError as e:
                wrong.append(str(e))
        process.kill()
        if process.complaint():
            wrong.append("%s:\n%s" % (process.cmd[0], process.complaint()))
        return wrong

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        wrong = self.close()
        if wrong and not kind:
            raise AssertionError("\n".join(wrong))


class TestCase(unittest.TestCase):
    """A test with a sandbox of its own."""

    maxDiff = None

    def setUp(self):
        self.box = Sandbox()
        self.dir = self.box.dir
        self.path = self.box.path
        self.write = self.box.write
        self.start_server = self.box.start_server
        self.spawn = self.box.spawn
        self.run_cmd = self.box.run_cmd
        self.operate = self.box.operate
        self.addCleanup(self._finish)

    def _callTestMethod(self, method):
        """As in unittest; it hides a failure from the cleanups, which want to show the logs."""
        try:
            method()
        except unittest.SkipTest:
            raise
        except BaseException:
            self._show_logs()
            raise

    def _show_logs(self):
        for process in self.box.processes:
            sys.stderr.write("\n--- log of %s (pid %d)\n%s" % (
                os.path.basename(process.cmd[0]), process.pid, process.log()[-6000:]))

    def _finish(self):
        wrong = self.box.close()
        if wrong:
            self.fail("\n".join(wrong))


def free_port():
    """Below those that connections are made from: else one may have it while a server that was stopped is started."""
    while True:
        port = random.SystemRandom().randrange(10000, 30000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


class Etcd:
    """An etcd of one or more members, in a sandbox."""

    def __init__(self, box, members=1):
        self.box = box
        self.certs = None  # what clients show, and are shown: a folder of deploy/certs.sh
        self.ports = [(free_port(), free_port()) for _ in range(members)]  # clients', peers'
        self.members = [None] * members
        for member in range(members):
            self.start(member)
        for member in range(members):
            self.wait_answers(member)

    def cert(self, name):
        return os.path.join(self.certs, name)

    def ask(self, member, path, body=None):
        """Of its JSON gateway: the answer."""
        context = None
        if self.certs:
            context = ssl.create_default_context(cafile=self.cert("ca.pem"))
            context.load_cert_chain(self.cert("client.pem"), self.cert("client.key"))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        url = "http%s://127.0.0.1:%d%s" % ("s" if self.certs else "", self.ports[member][0], path)
        with opener.open(url, None if body is None else json.dumps(body).encode(), timeout=2) as reply:
            return json.load(reply)

    def answers(self, member):
        try:
            return self.ask(member, "/health")["health"] == "true"
        except (OSError, ValueError):
            return False

    def wait_answers(self, member):
        wait_until(lambda: self.answers(member), "etcd has a leader")

    def start(self, member):
        url = "http://127.0.0.1:%d"
        client, peer = (url % port for port in self.ports[member])
        cluster = ",".join("m%d=%s" % (i, url % ports[1]) for i, ports in enumerate(self.ports))
        tls = []
        if self.certs:
            client = client.replace("http:", "https:")
            tls = ["--client-cert-auth", "--trusted-ca-file=" + self.cert("ca.pem"),
                   "--cert-file=" + self.cert("server.pem"), "--key-file=" + self.cert("server.key")]
        self.members[member] = self.box.spawn(
            ["/usr/bin/env", "etcd", "--name=m%d" % member, "--data-dir=" + self.box.path("etcd%d" % member),
             "--listen-client-urls=" + client, "--advertise-client-urls=" + client, "--listen-peer-urls=" + peer,
             "--initial-advertise-peer-urls=" + peer, "--initial-cluster=" + cluster,
             "--heartbeat-interval=50", "--election-timeout=500", *tls])

    def kill(self, member):
        self.members[member].kill()

    def add_user(self, name, password, prefix):
        """One who may read and write below the prefix and nothing else; from now on nobody may without a user."""
        key, end = (base64.b64encode(text.encode()).decode() for text in (prefix + "/", prefix + "0"))
        for path, body in (("user/add", {"name": "root", "password": password + "-of-root"}),
                           ("role/add", {"name": "root"}), ("user/grant", {"user": "root", "role": "root"}),
                           ("user/add", {"name": name, "password": password}), ("role/add", {"name": name}),
                           ("role/grant", {"name": name, "perm": {"permType": "READWRITE", "key": key, "range_end": end}}),
                           ("user/grant", {"user": name, "role": name}), ("enable", {})):
            self.ask(0, "/v3/auth/" + path, body)

    def ask_for_tls(self, certs):
        """From now on; its members are started again."""
        for member in range(len(self.members)):
            self.kill(member)
        self.certs = certs
        for member in range(len(self.members)):
            self.start(member)
        for member in range(len(self.members)):
            self.wait_answers(member)

    def endpoints(self):
        return ",".join("127.0.0.1:%d" % client for client, _ in self.ports)

    def url(self, prefix):
        return "etcd://" + self.endpoints() + prefix


def connect_unix(path, kind=socket.SOCK_STREAM, timeout=PATIENCE_S):
    s = socket.socket(socket.AF_UNIX, kind)
    s.settimeout(timeout * SCALE)
    s.connect(path)
    return s


def connect_tcp(port, timeout=PATIENCE_S):
    return socket.create_connection(("127.0.0.1", port), timeout * SCALE)


def main():
    if not have("ep-server"):
        print("no ep-server in %s: build first, or set EP_BIN" % BIN)
        sys.exit(77)
    unittest.main(verbosity=2)
