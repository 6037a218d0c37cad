"""Workers and the side socket, black box: claims, deaths on either side, and hostile clients."""

import ctypes
import json
import mmap
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import harness
import rawrpc
import worker

GROUP = ["ep-admin", "group", "create", "moe", "--ranks=2", "--experts=8", "--hidden=64", "--top-k=2",
         "--ll-max-tokens=16", "--ht-max-tokens=64", "--arena=4MiB", "--timeout-ms=60000"]  # nobody waits for so long


# ---- a client that writes the ring by hand (kernels/window.h) --------------------------------------

WAKE, ASLEEP, SLOT, SLOT_BYTES, RING_SLOTS = 192, 256, 320, 1152, 32
DOORBELL, DONE, WAITERS, OP, RESULT, RESULT_TEXT = 0, 64, 68, 128, 640, 176
FUTEX_WAKE = 1
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
libc = ctypes.CDLL(None, use_errno=True)

# kind mode layout flags input_dtype wire_dtype tokens top_k index_bytes alignment handle generation, spans
OP_WORDS = struct.Struct("=12I")


def claim(path, group, rank):
    """(ticket, its life in ms, side socket)"""
    reply = rawrpc.call(path, "ep.v1.Attach/Claim",
                        rawrpc.field(1, group) + rawrpc.field(2, rank) + rawrpc.field(3, "test_attach")
                        + rawrpc.field(4, worker.WINDOW_VERSION) + rawrpc.field(5, worker.VERSION))
    found = rawrpc.fields(reply)
    return found[1], found[2], found[3].decode()


class Worker(worker.Worker):
    """Attached, and quiet."""

    def __init__(self, path, group, rank):
        ticket, _, side = claim(path, group, rank)
        self.fd, self.rank = -1, rank
        self.socket = harness.connect_unix(side, socket.SOCK_SEQPACKET)
        self.socket.send(worker.pack(worker.HELLO, ticket))
        welcome = self.frame()
        assert welcome.type == worker.WELCOME and self.fd >= 0, welcome


class Raw(Worker):
    """An attached rank whose window is mapped here."""

    def __init__(self, *args):
        super().__init__(*args)
        self.window = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        self.next = 0

    def word(self, at, value=None):
        if value is not None:
            struct.pack_into("=I", self.window, at, value)
        return struct.unpack_from("=I", self.window, at)[0]

    def wake(self):
        self.word(WAKE, (self.word(WAKE) + 1) & 0xffffffff)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.window, WAKE))
        libc.syscall(SYS_FUTEX, ctypes.c_void_p(address), FUTEX_WAKE, 1000, None, None, 0)

    def run(self, op, timeout=harness.PATIENCE_S):
        """Posts the 288 bytes of an op; its (status, text)."""
        slot = SLOT + self.next % RING_SLOTS * SLOT_BYTES
        self.next += 1
        self.window[slot + OP:slot + OP + len(op)] = op
        self.word(slot + DOORBELL, 1)
        self.wake()
        harness.wait_until(lambda: self.word(slot + DONE) == 1, "an op's result", timeout, 0.001)
        text = bytes(self.window[slot + RESULT:slot + 512 + RESULT])
        status = struct.unpack_from("=i", text)[0]
        found = re.search(rb"[ -~]{6,}\0", text)
        self.word(slot + DONE, 0)
        return status, found.group(0)[:-1].decode() if found else ""


def op_bytes(kind=1, mode=1, layout=1, dtype=1, tokens=1, top_k=2, handle=0, generation=1, spans=()):
    words = OP_WORDS.pack(kind, mode, layout, 0, dtype, dtype, tokens, top_k, 4, 1, handle, generation)
    body = b"".join(struct.pack("=QQ", offset, size) for offset, size in spans)
    return (words + body).ljust(288, b"\0")


# ---- tests --------------------------------------------------------------------------------------------


class AttachTest(harness.TestCase):
    def serve(self, *flags, **more):
        self.server = self.start_server("--host-ranks=4", *flags, **more)
        self.create()
        return self.server

    def create(self, *flags):
        result = self.run_cmd(GROUP + list(flags), server=self.server)
        self.assertEqual(result.code, 0, result)

    def start_worker(self, rank, *flags, name=None):
        """One that has attached."""
        process = self.spawn(["worker", "--group=moe", "--rank=%d" % rank, *flags], server=self.server, name=name)
        harness.wait_until(lambda: "attached" in process.out() or not process.alive(), "worker attached")
        self.assertTrue(process.alive(), process.log())
        return process

    def rank(self, number):
        result = self.run_cmd(["ep-admin", "group", "get", "moe", "--output=json"], server=self.server)
        self.assertEqual(result.code, 0, result)
        return json.loads(result.out)["status"]["ranks"][number]

    def wait_state(self, number, state):
        harness.wait_until(lambda: self.rank(number)["state"] == "RANK_STATE_" + state,
                           lambda: "rank %d %s: %s" % (number, state, self.rank(number)))

    def wait_step(self, process, pattern, timeout=harness.PATIENCE_S):
        """A report line, newer than what is there now, that matches."""
        start = len(process.out())
        harness.wait_until(lambda: re.search(pattern, process.out()[start:]),
                           lambda: "%s in %s\n%s" % (pattern, process.out()[start:], process.log()), timeout)

    def check_steps(self, *processes):
        """They work, and nothing of it fails."""
        for process in processes:
            self.wait_step(process, r"absent 0, failures 0.* [1-9]\d* steps.* 0 wrong")

    def refusal(self, connection):
        frame = connection.recv(4096)
        self.assertEqual(len(frame), worker.LAYOUT.size)
        frame = worker.Frame(frame)
        self.assertEqual(frame.type, worker.REFUSED)
        return frame.text

    def claim(self, rank):
        return claim(self.server.socket, "moe", rank)

    def side(self):
        def try_connect():
            try:
                return harness.connect_unix(self.server.side_socket, socket.SOCK_SEQPACKET)
            except BlockingIOError:  # the backlog is full for the moment
                return None
        connection = harness.wait_until(try_connect, "a connection to the side socket", interval=0.001)
        self.addCleanup(connection.close)
        return connection

    # -- threads --

    def may_raise_priorities(self):
        with open("/proc/%d/status" % self.server.pid) as status:
            return int(re.search(r"CapEff:\s+(\w+)", status.read())[1], 16) >> 23 & 1

    def nices(self, prefix):
        """Of the server's threads whose names begin so."""
        tasks, found = "/proc/%d/task" % self.server.pid, set()
        for task in os.listdir(tasks):
            with open("%s/%s/stat" % (tasks, task)) as stat:
                name, rest = re.match(r"\d+ \((.*)\) (.*)", stat.read()).groups()
            if name.startswith(prefix):
                found.add(int(rest.split()[16]))
        return found

    def test_threads_that_ops_wait_for_come_first(self):
        self.serve()
        self.start_worker(0)
        raised = self.may_raise_priorities()
        harness.wait_until(lambda: self.nices("ep-rank-") == {-5 if raised else 0},
                           lambda: "engines at their priority: %s" % self.nices("ep-rank-"))
        self.assertEqual(self.nices("ep-server"), {5 if raised else 0})

    # -- claims --

    def test_a_held_rank_is_refused_and_the_holder_named(self):
        self.serve()
        first = self.start_worker(0)
        second = self.run_cmd(["worker", "--group=moe", "--rank=0", "--once"], server=self.server)
        self.assertEqual(second.code, 1, second)
        self.assertRegex(second.err, r"held by pid %d \(uid %d" % (first.pid, os.getuid()))
        self.assertTrue(first.alive())

    def test_two_processes_dispatch_and_combine(self):
        self.serve()
        self.check_steps(self.start_worker(0, "--mode=both"), self.start_worker(1, "--mode=both"))

    def test_wrong_flags_are_refused_by_name(self):
        number = "must be a whole number from 0 to "
        for flag, why in (("--rank=-1", '--rank is "-1": %s1023' % number), ("--rank=", '--rank is "": %s1023' % number),
                          ("--tokens=8x", '--tokens is "8x": %s1048576' % number),
                          ("--pause-ms=+1", '--pause-ms is "+1": %s60000' % number),
                          ("--seconds=99999999999999999999", "--seconds is"),
                          ("--mode=LL", '--mode is "LL": must be ll, ht or both'),
                          ("stray", 'unexpected argument "stray"')):
            with self.subTest(flag=flag):
                result = self.run_cmd(["worker", flag])
                self.assertEqual(result.code, 2, result)
                self.assertIn(why, result.err)
        self.serve()
        result = self.run_cmd(["worker", "--group=moe", "--token-file=/no/file"], server=self.server)
        self.assertEqual((result.code, result.err),
                         (2, "worker: --token-file: cannot read a token from /no/file: No such file or directory\n"))
        self.assertEqual(self.run_cmd(["hello_dispatch", "--help"]).code, 0)
        self.assertEqual(self.run_cmd(["hello_dispatch", "--group=moe"]).code, 2)

    def test_one_process_with_all_ranks(self):
        self.serve()
        result = self.run_cmd(["hello_dispatch", "moe"], server=self.server)
        self.assertEqual(result.code, 0, result)
        self.assertIn("all results are right", result.out)

    def test_sigterm_leaves_cleanly(self):
        self.serve()
        stays, leaves = self.start_worker(0), self.start_worker(1)
        self.check_steps(stays, leaves)
        self.assertEqual(leaves.stop(), 0)
        self.wait_state(1, "ABSENT")
        self.assertIn("its worker left", self.rank(1)["reason"])
        self.wait_step(stays, r"absent 1, failures 0")

    def test_a_group_that_is_not_there(self):
        self.serve()
        result = self.run_cmd(["worker", "--group=none", "--once"], server=self.server)
        self.assertEqual(result.code, 3, result)
        self.assertIn("none", result.err)

    # -- a worker dies --

    def test_peers_go_on_and_the_rank_can_be_taken_again(self):
        self.serve()
        stays, dies = self.start_worker(0), self.start_worker(1)
        self.check_steps(stays, dies)
        dies.kill()
        self.wait_step(stays, r"absent 1, failures 0.* [1-9]\d* steps")
        self.assertIn("rank 1 lost", stays.out())
        self.wait_state(1, "ABSENT")
        gone = self.rank(1)
        # A process may take longer to end than its sockets: then nobody can say yet that it died.
        self.assertRegex(gone["reason"], r"(died|closed without a goodbye) \(pid %d\)" % dies.pid)
        again = self.start_worker(1, name="again")
        self.assertIn("rank 1 joined", stays.out())
        self.check_steps(stays, again)

    def test_a_new_worker_attaches_at_once_after_a_kill(self):
        """Once of five times within 100 ms, whatever else the machine does: there is nothing that it waits for."""
        self.serve()
        took = []
        for i in range(5):
            dies = self.start_worker(1, "--pause-ms=100", name="dies-%d" % i)
            start = time.monotonic()
            dies.kill()
            new = harness.wait_until(lambda: self.take("moe", 1), "the rank taken again", interval=0.001)
            took.append(time.monotonic() - start)
            new.leave()
        self.assertLess(min(took), 0.1 * harness.SCALE, took)

    def test_a_killed_worker_is_gone_though_a_child_has_its_connection(self):
        self.serve()
        script = ("import os\n"
                  "import sys\n"
                  "import time\n"
                  "import test_attach\n"
                  "w = test_attach.Worker(sys.argv[1], 'moe', 1)\n"
                  "child = os.fork()\n"
                  "if child == 0:\n"
                  "    time.sleep(60)\n"
                  "print(child, flush=True)\n"
                  "time.sleep(60)\n")
        with subprocess.Popen([sys.executable, "-c", script, self.server.socket], stdout=subprocess.PIPE, text=True,
                              cwd=os.path.dirname(os.path.abspath(__file__))) as process:
            child = int(process.stdout.readline())
            try:
                process.kill()
                harness.wait_until(lambda: self.take("moe", 1), "the rank taken again").leave()
            finally:
                os.kill(child, signal.SIGKILL)

    def test_a_closed_connection_is_quarantined_until_the_process_is_gone(self):
        self.serve()
        script = ("import sys\n"
                  "import test_attach\n"
                  "w = test_attach.Worker(sys.argv[1], 'moe', 1)\n"
                  "w.socket.close()\n"  # and the window's descriptor stays open
                  "print('closed', flush=True)\n"
                  "sys.stdin.readline()\n")
        with subprocess.Popen([sys.executable, "-c", script, self.server.socket], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True,
                              cwd=os.path.dirname(os.path.abspath(__file__))) as process:
            self.assertEqual(process.stdout.readline(), "closed\n")
            self.wait_state(1, "QUARANTINED")
            with self.assertRaises(rawrpc.RpcError) as caught:
                self.claim(1)
            self.assertIn("pid %d" % process.pid, caught.exception.text)
            process.stdin.close()
        self.wait_state(1, "EXPECTED")  # it was the only one
        Worker(self.server.socket, "moe", 1).leave()

    def test_a_worker_that_gives_up_attaching_leaves_its_rank_free(self):
        """Its process goes on, and it has not even looked at what it was given."""
        self.serve()
        ticket, _, side = self.claim(1)
        with harness.connect_unix(side, socket.SOCK_SEQPACKET) as connection:
            connection.send(worker.pack(worker.HELLO, ticket))
            connection.send(worker.pack(worker.BYE))
        harness.wait_until(lambda: self.take("moe", 1), "the rank taken again").leave()

    def test_claims_that_wait_for_a_rank_are_so_many_at_most(self):
        self.serve("--max-watches=2")
        script = ("import sys\n"
                  "import test_attach\n"
                  "w = test_attach.Worker(sys.argv[1], 'moe', 1)\n"
                  "w.socket.close()\n"
                  "print('closed', flush=True)\n"
                  "sys.stdin.readline()\n")
        said = []

        def claim():
            try:
                self.claim(1)
            except rawrpc.RpcError as error:
                said.append(error.text)
        with subprocess.Popen([sys.executable, "-c", script, self.server.socket], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True,
                              cwd=os.path.dirname(os.path.abspath(__file__))) as process:
            self.assertEqual(process.stdout.readline(), "closed\n")
            self.wait_state(1, "QUARANTINED")
            threads = [threading.Thread(target=claim) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            process.stdin.close()
        self.assertEqual(len([text for text in said if "is quarantined" in text]), 2, said)
        self.assertEqual(len([text for text in said if "2 claims wait for a rank here, as many as max-watches" in text]), 2,
                         said)
        self.wait_state(1, "EXPECTED")
        Worker(self.server.socket, "moe", 1).leave()  # there is room again

    # -- the server dies --

    def test_clients_of_a_killed_server_end_with_server_lost(self):
        self.serve()
        workers = [self.start_worker(r, "--once", "--mode=both") for r in (0, 1)]
        self.check_steps(*workers)
        self.server.kill()
        for process in workers:
            self.assertEqual(process.wait(), 4, process.log())
            self.assertIn("the server is gone", process.out())

    def test_a_waiting_client_of_a_killed_server_does_not_hang(self):
        self.serve()
        waits = self.start_worker(0, "--once")  # its peer never comes
        self.server.kill()
        self.assertEqual(waits.wait(), 4, waits.log())

    def test_a_stopped_server_that_dies_is_no_hang_either(self):
        self.serve()
        workers = [self.start_worker(0, "--once"), self.start_worker(1, "--once")]
        self.check_steps(*workers)
        self.server.signal(signal.SIGSTOP)
        self.server.kill()
        for process in workers:
            self.assertEqual(process.wait(), 4, process.log())

    def test_groups_are_there_after_a_restart_and_workers_come_back(self):
        self.serve()
        workers = [self.start_worker(0), self.start_worker(1)]
        self.check_steps(*workers)
        self.server.kill()  # its sockets stay behind and are replaced
        self.server = self.start_server("--host-ranks=4")
        self.check_steps(*workers)

    def test_the_socket_of_a_live_server_is_not_taken(self):
        self.serve()
        second = self.box.start_server("--state-dir=" + self.path("other"), name="s", ready=False)
        self.assertNotEqual(second.wait(), 0)
        Worker(self.server.socket, "moe", 0).leave()

    def test_a_deleted_group_detaches_its_workers(self):
        self.serve()
        workers = [self.start_worker(0), self.start_worker(1)]
        self.check_steps(*workers)
        result = self.run_cmd(["ep-admin", "group", "delete", "moe", "--force"], server=self.server)
        self.assertEqual(result.code, 0, result)
        for process in workers:
            process.wait()
            self.assertRegex(process.out(), "detached|has left the group")

    def test_who_has_claimed_before_a_drain_is_told_when_it_is_welcomed(self):
        self.serve()
        ticket = self.claim(0)[0]
        name = json.loads(self.run_cmd(["ep-admin", "node", "get", "-o", "json"], server=self.server).out)["name"]
        self.assertEqual(self.run_cmd(["ep-admin", "node", "drain", name], server=self.server).code, 0)
        connection = self.side()
        connection.send(worker.pack(worker.HELLO, ticket))
        self.assertEqual(worker.Frame(connection.recv(4096)).type, worker.WELCOME)
        told = worker.Frame(connection.recv(4096))
        self.assertEqual((told.type, told.event), (worker.EVENT, worker.DRAINING))
        connection.close()

    def test_a_drained_node_is_left(self):
        self.serve()
        workers = [self.start_worker(0), self.start_worker(1)]
        self.check_steps(*workers)
        name = json.loads(self.run_cmd(["ep-admin", "node", "get", "-o", "json"], server=self.server).out)["name"]
        result = self.run_cmd(["ep-admin", "node", "drain", name], server=self.server)
        self.assertEqual(result.code, 0, result)
        for process in workers:
            self.assertEqual(process.wait(10), 0, process.log())
            self.assertIn("drains", process.out())

    # -- hostile connections --

    def hostile(self):
        """Two workers that must not notice anything."""
        self.serve()
        self.create_second_group()
        return [self.start_worker(0, "--pause-ms=5"), self.start_worker(1, "--pause-ms=5")]

    def create_second_group(self):
        result = self.run_cmd(["ep-admin", "group", "create", "other"] + GROUP[4:-1] + ["--timeout-ms=500"],
                              server=self.server)
        self.assertEqual(result.code, 0, result)

    def test_garbage_and_truncated_frames(self):
        workers = self.hostile()
        good = worker.pack(worker.HELLO, os.urandom(16))
        rng = random.Random(1)
        messages = [good[:n] for n in range(1, len(good), 7)] + [good + b"x", b"\0" * len(good), b"\xff" * len(good)]
        messages += [rng.randbytes(rng.randrange(1, 2000)) for _ in range(50)]
        for kind in (0, worker.WELCOME, worker.EVENT, worker.BYE, worker.REGISTER, worker.UNREGISTER, worker.ANSWER, 9999):
            messages.append(worker.pack(kind, value=1))
        for message in messages:
            connection = self.side()
            connection.send(message)
            self.assertNotEqual(self.refusal(connection), "")
            self.assertEqual(self.rest(connection), b"")
            connection.close()
        self.check_steps(*workers)

    @staticmethod
    def rest(connection):
        try:
            return connection.recv(4096)
        except ConnectionResetError:
            return connection.recv(4096)

    def test_descriptors_sent_to_the_server_are_closed(self):
        workers = self.hostile()
        before = len(self.server.open_files())
        for _ in range(50):
            connection = self.side()
            socket.send_fds(connection, [worker.pack(worker.HELLO, os.urandom(16))], [0] * 20)
            self.refusal(connection)
            connection.close()
        harness.wait_until(lambda: len(self.server.open_files()) <= before + 2, "descriptors closed")
        self.check_steps(*workers)

    def test_a_wrong_ticket(self):
        workers = self.hostile()
        connection = self.side()
        connection.send(worker.pack(worker.HELLO, os.urandom(16)))
        self.assertIn("ticket", self.refusal(connection))
        self.check_steps(*workers)

    def test_a_ticket_is_good_for_one_connection(self):
        self.serve()
        ticket = self.claim(0)[0]
        first, second = self.side(), self.side()
        first.send(worker.pack(worker.HELLO, ticket))
        self.assertEqual(worker.Frame(first.recv(4096)).type, worker.WELCOME)
        second.send(worker.pack(worker.HELLO, ticket))
        self.assertIn("used", self.refusal(second))
        self.assertEqual(self.rank(0)["state"], "RANK_STATE_ATTACHED")

    def test_a_ticket_belongs_to_the_process_that_claimed(self):
        self.serve()
        ticket = self.claim(0)[0]
        script = ("import socket, sys\n"
                  "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
                  "s.connect(sys.argv[1]); s.send(bytes.fromhex(sys.argv[2])); sys.stdout.buffer.write(s.recv(4096))\n")
        out = subprocess.run([sys.executable, "-c", script, self.server.side_socket,
                              worker.pack(worker.HELLO, ticket).hex()], stdout=subprocess.PIPE, check=True).stdout
        self.assertIn("belongs to pid %d" % os.getpid(), worker.Frame(out).text)
        mine = self.side()  # and it is still good here
        mine.send(worker.pack(worker.HELLO, ticket))
        self.assertEqual(worker.Frame(mine.recv(4096)).type, worker.WELCOME)

    def test_a_ticket_expires_and_the_rank_is_free_again(self):
        self.serve()
        ticket, ticket_ms, _ = self.claim(0)
        with self.assertRaises(rawrpc.RpcError):
            self.claim(0)

        harness.wait_until(lambda: self.take_ticket(0), "the claim expired", interval=0.1)
        connection = self.side()
        connection.send(worker.pack(worker.HELLO, ticket))
        self.assertIn("expired", self.refusal(connection))

    def test_a_worker_that_dies_before_it_attaches_leaves_its_rank_free(self):
        self.serve()
        script = "import sys, test_attach; test_attach.claim(sys.argv[1], 'moe', 0)"
        subprocess.run([sys.executable, "-B", "-c", script, self.server.socket], check=True,
                       cwd=os.path.dirname(os.path.abspath(__file__)))
        harness.wait_until(lambda: self.take_ticket(0), "rank 0 free", interval=0.001)
        self.assertIn("died before it attached", self.server.log())
        self.assertNotIn("did not attach in time", self.server.log())

    def take_ticket(self, rank):
        try:
            return self.claim(rank)
        except rawrpc.RpcError:
            return None

    def test_silent_connections_are_dropped_and_in_nobodys_way(self):
        workers = self.hostile()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        silent = [self.side() for _ in range(2000)]
        start = time.monotonic()
        late = Worker(self.server.socket, "other", 0)
        self.assertLess(time.monotonic() - start, 1.0 * harness.SCALE)
        for connection in silent:
            connection.settimeout(harness.PATIENCE_S * harness.SCALE)
            self.assertEqual(self.rest(connection), b"")
        late.leave()
        self.check_steps(*workers)

    def hello_to_a_stopped_server(self):
        """Its answer; None when it must be tried again, as this machine stood still by itself for too long."""
        before, began = set(self.server.open_files()), time.monotonic()
        connection = self.side()
        harness.wait_until(lambda: set(self.server.open_files()) - before or time.monotonic() - began > 1.0,
                           "the connection accepted, or dropped already", interval=0.001)
        try:
            ticket, ticket_ms, _ = self.claim(0)
        except rawrpc.RpcError:
            return None  # the ticket of the try before is still good
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            connection.send(worker.pack(worker.HELLO, ticket))
            time.sleep(2.5)  # more than a connection may be silent, less than a ticket is good for
        except BrokenPipeError:
            return None  # it was silent for too long already
        finally:
            os.kill(self.server.pid, signal.SIGCONT)
        in_time = time.monotonic() - began < ticket_ms / 1e3 - 1.0
        frame = worker.Frame(connection.recv(4096))
        return frame if in_time or frame.type == worker.WELCOME else None

    def test_a_server_that_stood_still_reads_before_it_drops(self):
        self.serve()
        frame = harness.wait_until(self.hello_to_a_stopped_server, "a ticket that was good for long enough")
        self.assertEqual(frame.type, worker.WELCOME, frame.text)

    def test_a_second_hello_ends_the_attachment(self):
        workers = self.hostile()
        twice = Worker(self.server.socket, "other", 0)
        twice.socket.send(worker.pack(worker.HELLO, os.urandom(16)))
        while True:  # events may be ahead of it
            frame = twice.frame()
            if frame.type == worker.REFUSED:
                break
        self.assertIn("BYE", frame.text)
        twice.socket.close()
        self.check_steps(*workers)

    def test_events_that_nobody_reads_are_counted(self):
        self.serve()
        deaf = Worker(self.server.socket, "moe", 0)
        for _ in range(600):
            harness.wait_until(lambda: self.take("moe", 1), "rank 1 taken", interval=0.001).leave()
        # Who has the rank now has it because the one before is gone: all 1201 have been told.
        last = harness.wait_until(lambda: self.take("moe", 1), "rank 1 taken", interval=0.001)
        seen = 0
        while True:
            frame = deaf.frame()
            if frame.event == worker.EVENTS_LOST:
                break
            seen += 1
        self.assertGreater(frame.value, 0)
        self.assertEqual(seen + frame.value, 1201)
        last.leave()
        deaf.leave()

    # -- hostile rings --

    def test_descriptors_outside_the_window(self):
        workers = self.hostile()
        evil = Raw(self.server.socket, "other", 0)
        size = len(evil.window)
        for offset, length in ((size, 4096), (2 ** 64 - 16, 4096), (0, 4096), (320, 64), (size - 16, 2 ** 63),
                               (2 ** 63, 2 ** 63), (1, 1)):
            for place in range(14):
                spans = [(0, 0)] * 14
                spans[place] = (offset, length)
                status, text = evil.run(op_bytes(spans=spans))
                self.assertEqual(status, 1, text)
                self.assertNotEqual(text, "")
        for kind in (0, 5, 2 ** 32 - 1):
            self.assertEqual(evil.run(op_bytes(kind=kind))[0], 1)
        rng = random.Random(2)
        for _ in range(500):
            self.assertNotEqual(evil.run(rng.randbytes(288))[0], 0)
        evil.leave()
        self.check_steps(*workers)

    def test_a_client_that_scribbles_over_its_window(self):
        workers = self.hostile()
        evil = Raw(self.server.socket, "other", 0)
        rng = random.Random(3)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            at = rng.randrange(0, SLOT + RING_SLOTS * SLOT_BYTES - 64)
            evil.window[at:at + 64] = rng.randbytes(64)
            if rng.random() < 0.2:
                evil.word(SLOT + rng.randrange(RING_SLOTS) * SLOT_BYTES + DOORBELL, 1)
                evil.wake()
            if rng.random() < 0.001:
                evil.window[:] = b"\xff" * len(evil.window)
        self.check_steps(*workers)
        evil.leave()
        harness.wait_until(lambda: self.take("other", 0), "the rank can be taken again").leave()
        self.assertTrue(self.server.alive())

    def take(self, group, rank):
        try:
            return Worker(self.server.socket, group, rank)
        except rawrpc.RpcError:
            return None

    def test_an_idle_group_uses_no_cpu(self):
        self.serve()
        held = [Worker(self.server.socket, "moe", r) for r in (0, 1)]

        def cpu():
            with open("/proc/%d/stat" % self.server.pid) as f:
                fields = f.read().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        before = cpu()
        time.sleep(1)  # the time that is measured
        self.assertLess(cpu() - before, 0.1)
        for each in held:
            each.leave()

    def test_without_descriptors_the_server_does_not_spin(self):
        self.serve(wrapper=["prlimit", "--nofile=128:128"])
        held = Worker(self.server.socket, "moe", 0)
        for _ in range(400):
            try:
                self.side()
            except OSError:
                break
        self.assertTrue(self.server.alive())

        def again():
            try:
                Worker(self.server.socket, "moe", 1).leave()
                return True
            except (rawrpc.RpcError, OSError, AssertionError):
                return False
        harness.wait_until(again, "workers get in again")
        held.leave()


if __name__ == "__main__":
    harness.main()
