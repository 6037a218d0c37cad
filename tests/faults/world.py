"""What faults happen to: an etcd of three members, an ep-server on each of three nodes, a worker at each rank."""

import itertools
import json
import os
import re
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration"))
import harness  # noqa: E402
import hosts  # noqa: E402
import network  # noqa: E402

NODES = ("a", "b", "c")
STORES = ("e0", "e1", "e2")
RANKS_PER_NODE = 2
RANKS = RANKS_PER_NODE * len(NODES)
OP_MS = 2000  # the group's timeout
WORDS = 8000  # characters of what each has said last
NODE_MIB, STORE_MIB = 32, 192  # disks; a member of etcd takes 128 MiB ahead for its log


class Loopback:
    """Instead of a network, where namespaces cannot be made: all hosts are this one, and nothing can be cut."""

    def address(self, host):
        return "127.0.0.1"

    def inside(self, host):
        return ()

    def close(self):
        pass


class Stalls:
    """How long this machine, or this program on it, did not get on: what nobody here can be blamed for."""

    STEP_S = 0.02

    def __init__(self):
        self.ms, self.over = 0.0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self):
        last = time.monotonic()
        while not self.over.wait(self.STEP_S):
            now = time.monotonic()
            self.ms = max(self.ms, 1000 * (now - last - self.STEP_S))
            last = now

    def close(self):
        self.over.set()
        self.thread.join()


class Slot:
    """One rank, and the worker that should be there."""

    def __init__(self, rank, node):
        self.rank, self.node, self.process, self.read = rank, node, None, 0

    def news(self):
        """The lines that it has said since the last time."""
        text = self.process.out()[self.read:] if self.process else ""
        text = text[:text.rfind("\n") + 1]
        self.read += len(text)
        return text.splitlines()


class World:
    devices = RANKS_PER_NODE
    spares = ()         # nodes that begin without a server
    worker_flags = ()

    def __init__(self, mode, box=None, store_flags=(), server_flags=()):
        """box: where all of it lies, somebody else's; the flags: more, for every member of etcd, and every server."""
        self.mode, self.store_flags, self.server_flags = mode, store_flags, server_flags
        self.nodes = list(NODES)
        every = NODES + self.spares + STORES
        self.cuttable = network.available()
        self.net = network.Network(every) if self.cuttable else Loopback()
        self.box = box or harness.Sandbox()
        self.box.afterwards += [self.net.close]
        self.ports = {}
        self.clocks = {host: hosts.Clock(self.box.path(host + ".clock")) for host in every}
        self.disks = {host: self.disk(host) for host in every} if self.cuttable else {}
        self.etcd, self.servers, self.slots, self.lives = {}, {}, [], itertools.count(1)
        self.wrong = []  # what must not have happened
        self.stopped = set()  # ranks whose worker, or the server that runs their ops, does nothing in this fault
        self.fault_began, self.fault_ms = 0.0, 0.0  # the latter once it is over
        self.stalls = Stalls()

    # ---- hosts

    def port(self, host, number):
        """The number itself on a host of its own, else one that is free."""
        if self.cuttable:
            return number
        return self.ports.setdefault((host, number), harness.free_port())

    def disk(self, host):
        """What its program keeps; of a server the log, too."""
        disk = hosts.Disk(self.box.path(host), STORE_MIB if host in STORES else NODE_MIB)
        self.box.afterwards.append(disk.close)
        return disk

    def clock(self, host):
        """For the environment of its program."""
        return self.clocks[host].env() if hosts.Clock.available() else {}

    def url(self, host, number):
        return "http://%s:%d" % (self.net.address(host), self.port(host, number))

    def start_etcd(self, host):
        client, peer = self.url(host, 2379), self.url(host, 2380)
        self.etcd[host] = self.box.spawn(
            ["/usr/bin/env", *self.net.inside(host), "etcd", "--name=" + host, "--data-dir=" + self.box.path(host),
             "--listen-client-urls=" + client, "--advertise-client-urls=" + client, "--listen-peer-urls=" + peer,
             "--initial-advertise-peer-urls=" + peer, "--heartbeat-interval=50", "--election-timeout=500",
             "--initial-cluster=" + ",".join("%s=%s" % (h, self.url(h, 2380)) for h in STORES),
             *self.store_flags], env=self.clock(host))

    def start_server(self, node):
        endpoints = ",".join(self.url(h, 2379)[len("http://"):] for h in STORES)
        self.servers[node] = self.box.start_server(
            "--store=etcd://%s/soak" % endpoints, "--name=" + node, "--host-ranks=%d" % self.devices,
            "--listen=%s:%d" % (self.net.address(node), self.port(node, 7300)), "--log-level=info", "--insecure",
            *self.server_flags,
            name=node, wrapper=self.net.inside(node), env=self.clock(node), metrics=False, ready=False)

    def start(self):
        for host in STORES:
            self.start_etcd(host)
        for node in self.nodes:
            self.start_server(node)
        for server in self.servers.values():
            server.wait_ready(60.0)
        harness.wait_until(self.create, "a group, made by whoever leads", 30.0)
        self.staff()

    def create(self):
        """Where a server has lost its lease, since the machine was busy, the next one has to lead first."""
        self.admin("a", "group", "create", "moe", "--ranks=%d" % RANKS, "--experts=24", "--hidden=128", "--top-k=4",
                   "--ll-max-tokens=16", "--ht-max-tokens=32", "--timeout-ms=%d" % OP_MS, "--label=n=0",
                   "--placement=spread")
        return self.group("a")

    def stop_workers(self):
        self.stalls.close()
        for slot in self.slots:
            if slot.process:
                slot.process.stop()
            self.listen(slot)

    def last_words(self):
        """Of all, for whoever looks for the reason of what was wrong."""
        workers = [("worker of rank %d" % slot.rank, slot.process.out() + slot.process.log())
                   for slot in self.slots if slot.process]
        servers = [("server " + node, server.log()) for node, server in self.servers.items()]
        return "".join("\n--- %s\n%s" % (who, text[-WORDS:]) for who, text in workers + servers)

    def close(self):
        self.stop_workers()
        self.wrong += self.box.close()

    # ---- operators

    def admin(self, node, *args, must=False):
        result = self.box.run_cmd(["ep-admin", "--timeout=8s", *args], server=self.servers[node], timeout=30.0)
        if must and result.code != 0:
            raise AssertionError(str(result))
        return result

    def group(self, node):
        """As that server sees it; None: it does not answer."""
        result = self.admin(node, "group", "get", "moe", "-o", "json")
        return json.loads(result.out) if result.code == 0 else None

    def status(self, node):
        return (self.group(node) or {}).get("status", {})

    # ---- workers

    def staff(self):
        """A worker for every rank, where it is."""
        self.slots = [Slot(rank.get("rank", 0), rank["node"]) for rank in self.status("a")["ranks"]]
        self.tend()

    def tend(self):
        """Whoever has ended is started again, as an orchestrator would."""
        for slot in self.slots:
            if slot.process and slot.process.alive():
                continue
            self.listen(slot)
            self.start_worker(slot)

    def start_worker(self, slot):
        slot.read = 0
        slot.process = self.box.spawn(
            ["worker", "--group=moe", "--rank=%d" % slot.rank, "--mode=" + self.mode, "--tokens=16", "--pause-ms=2",
             *self.worker_flags], server=self.servers[slot.node], name="rank%d-%d" % (slot.rank, next(self.lives)))

    def op_within_ms(self, rank):
        return OP_MS + 2000 * harness.SCALE + (self.fault_ms if rank in self.stopped else 0) + self.stalls.ms

    def stop_server(self, node):
        """Ops of its ranks take as long as it stands still."""
        self.stopped = {slot.rank for slot in self.slots if slot.node == node}
        self.servers[node].signal(signal.SIGSTOP)

    def begin_fault(self):
        """What made ops late before is over, and told."""
        self.listen_all()
        self.stopped, self.stalls.ms = set(), 0.0
        self.fault_began, self.fault_ms = time.monotonic(), 0.0

    def end_fault(self):
        """It may have lasted for longer than was drawn: an operator waits as long as a change takes."""
        self.fault_ms = 1000 * (time.monotonic() - self.fault_began)

    def listen(self, slot):
        for line in slot.news():
            if re.search(r" [1-9]\d* wrong", line):
                self.wrong.append("worker of rank %d: %s" % (slot.rank, line))
            for longest in re.findall(r"at most ([\d.]+) us", line):
                if float(longest) > 1000 * self.op_within_ms(slot.rank):
                    self.wrong.append("worker of rank %d: an op took too long (the machine stood still for %.0f ms): %s"
                                      % (slot.rank, self.stalls.ms, line))

    def listen_all(self):
        for slot in self.slots:
            self.listen(slot)

    def steps_since(self, marks, absent=0):
        """Has every worker that was marked made steps since then, with so many ranks that were not there?"""
        return all(re.search(r"absent %d, .* [1-9]\d* steps" % absent, slot.process.out()[marks[slot.rank]:])
                   for slot in self.slots if slot.rank in marks)

    def marks(self, *nodes):
        """How much the workers have said, all or those of some nodes."""
        return {slot.rank: len(slot.process.out()) for slot in self.slots if not nodes or slot.node in nodes}
