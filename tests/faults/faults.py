"""What can go wrong.  Each fault has a name, begins, lasts for a time, and ends; then the world has to heal."""

import random
import signal

from world import NODES, STORES, hosts


class Fault:
    """What it does to whom was drawn when it was made, so that the same seed brings the same."""

    shortest, longest = 0.1, 3.0

    def __init__(self, world, draw):
        self.world, self.seconds = world, draw.uniform(self.shortest, self.longest)
        self.whom = self.choose(draw)

    def choose(self, draw):
        return draw.choice(NODES)

    def begin(self):
        raise NotImplementedError

    def end(self):
        pass

    def answers(self, node):
        """Can an operator ask that server meanwhile?"""
        return self.world.servers[node].alive()

    def __str__(self):
        return "%s %s for %.1f s" % (type(self).__name__, self.whom, self.seconds)


class WorkerKilled(Fault):
    def choose(self, draw):
        return draw.randrange(len(self.world.slots))

    def begin(self):
        self.world.slots[self.whom].process.kill()


class WorkerStopped(WorkerKilled):
    """For less than ops wait, or for more: then the others time out, and say whom they waited for."""

    longest = 4.0

    def begin(self):
        self.world.stopped = {self.whom}
        self.process = self.world.slots[self.whom].process
        self.process.signal(signal.SIGSTOP)

    def end(self):
        if self.process.alive():
            self.process.signal(signal.SIGCONT)


class ServerKilled(Fault):
    def begin(self):
        self.world.servers[self.whom].kill()

    def end(self):
        self.world.start_server(self.whom)
        self.world.servers[self.whom].wait_ready(60.0)


class LeaderKilled(ServerKilled):
    def begin(self):
        listed = self.world.admin(self.whom, "node", "list", "-o", "json").json()["nodes"]
        self.whom = next((node["name"] for node in listed if node.get("leader")), self.whom)
        super().begin()


class ServerEnded(ServerKilled):
    def begin(self):
        self.world.servers[self.whom].signal(signal.SIGTERM)
        self.world.servers[self.whom].signal(signal.SIGTERM)
        self.world.servers[self.whom].wait()


class ServerStopped(Fault):
    """Below and beyond its lease."""

    longest = 6.0

    def begin(self):
        self.world.stop_server(self.whom)

    def end(self):
        self.world.servers[self.whom].signal(signal.SIGCONT)

    def answers(self, node):
        return node != self.whom


class StoreMemberKilled(Fault):
    def choose(self, draw):
        return draw.choice(STORES)

    def begin(self):
        self.world.etcd[self.whom].kill()

    def end(self):
        self.world.start_etcd(self.whom)


class StoreStopped(Fault):
    """Two of three: nothing can be decided."""

    longest = 6.0

    def choose(self, draw):
        return draw.sample(STORES, 2)

    def begin(self):
        for host in self.whom:
            self.world.etcd[host].signal(signal.SIGSTOP)

    def end(self):
        for host in self.whom:
            self.world.etcd[host].signal(signal.SIGCONT)


class NodeCut(Fault):
    """From everybody."""

    longest = 6.0

    def begin(self):
        self.world.net.cut(self.whom)

    def end(self):
        self.world.net.mend(self.whom)


class CutOneWay(Fault):
    """What one server sends to another is lost."""

    longest = 6.0

    def choose(self, draw):
        return draw.sample(NODES, 2)

    def begin(self):
        self.world.net.cut_one_way(*self.whom)

    def end(self):
        self.world.net.mend_one_way(*self.whom)


class CutFromStore(Fault):
    """The server is there, and can neither hear nor be heard by the store."""

    longest = 6.0

    def begin(self):
        for host in STORES:
            self.world.net.cut_one_way(self.whom, host)

    def end(self):
        for host in STORES:
            self.world.net.mend_one_way(self.whom, host)


class StoreMemberLostBesideCut(NodeCut):
    """The rest of the store has to do, for the rest of the nodes."""

    def begin(self):
        super().begin()
        self.world.etcd[self.member].kill()

    def end(self):
        self.world.start_etcd(self.member)
        super().end()

    def choose(self, draw):
        self.member = draw.choice(STORES)
        return super().choose(draw)


class NodeSlow(Fault):
    """Every packet is late, and few get through."""

    longest = 6.0

    def choose(self, draw):
        return draw.choice(NODES + STORES)

    def begin(self):
        self.world.net.slow(self.whom)

    def end(self):
        self.world.net.hurry(self.whom)


class DiskFull(Fault):
    """A member of etcd ends when it cannot write what it must; a server only has its log there."""

    longest = 6.0

    def choose(self, draw):
        return draw.choice(NODES + STORES)

    def begin(self):
        self.world.disks[self.whom].fill()

    def end(self):
        self.world.disks[self.whom].free()
        if self.whom in STORES and not self.world.etcd[self.whom].alive():
            self.world.start_etcd(self.whom)


class ClockJump(Fault):
    """The wall clock of a server or a member of etcd, forwards or backwards and then home again."""

    def choose(self, draw):
        self.by_s = draw.choice((-1, 1)) * draw.choice((3, 60, 3600, 86400 * 400))
        return draw.choice(NODES + STORES)

    def begin(self):
        self.world.clocks[self.whom].move(self.by_s)

    def end(self):
        self.world.clocks[self.whom].move(0)

    def __str__(self):
        return "ClockJump %s by %+d s for %.1f s" % (self.whom, self.by_s, self.seconds)


class NodeDrained(Fault):
    """Its workers leave; there is no room for their ranks elsewhere."""

    def ask(self, what):
        at = next(node for node in NODES if node != self.whom)
        self.world.admin(at, "node", what, self.whom, must=True)

    def begin(self):
        self.ask("drain")

    def end(self):
        self.ask("uncordon")


PROCESSES = (WorkerKilled, WorkerStopped, ServerKilled, LeaderKilled, ServerEnded, ServerStopped, StoreMemberKilled,
             StoreStopped, NodeDrained)
WIRES = (NodeCut, CutOneWay, CutFromStore, StoreMemberLostBesideCut, NodeSlow, DiskFull)  # as root


def kinds(world):
    """What can be done here."""
    return (PROCESSES + (WIRES if world.cuttable else ()) + ((ClockJump,) if hosts.Clock.available() else ()))


def draws(world, seed, only=""):
    """Faults without end."""
    draw = random.Random(seed)
    chosen = [kind for kind in kinds(world) if not only or kind.__name__ in only.split(",")]
    while True:
        yield draw.choice(chosen)(world, draw)
