#!/usr/bin/python3
"""
Changes of a running group in random order, while workers on three nodes and more exchange tokens and follow them.

    tests/faults/reconfigure.sh [--changes N] [--seed S] [--only Modes,Tokens]

Modes from ll to ll,ht to ht and back, tokens doubled and back, a fourth server added and removed, one replaced, one
drained and uncordoned.  Every change is drawn from the seed, which is printed; Nothing is one of them, and says what
pauses this machine makes by itself.

Bad is: a wrong result, an op that failed, or that went without one of the ranks or dropped a token; a change that is
refused, or has not come to its end in SETTLE_S; a worker that ends where its rank stays; a program that crashes.

Told for each kind of change: how many; the longest pause of any worker during it, which is for how long no op of its
ended, but for the rest that it takes itself, as the median, the 99th percentile and the most over these changes; and
how long it took until all ranks were in the new epoch (several of them where ranks move to and fro).
"""

import argparse
import collections
import json
import math
import re
import signal
import sys
import time

import changes
from world import RANKS_PER_NODE, Slot, World, harness

SETTLE_S = 30.0
BAD = ("failures", "absent", "dropped", "wrong")


class Follower(Slot):
    """A rank at one place, and what its worker has told since it was asked to forget."""

    def __init__(self, rank, node):
        super().__init__(rank, node)
        self.bad, self.failures = collections.Counter(), 0
        self.forget()

    def forget(self):
        self.reports, self.pause_us = 0, 0.0

    def listen(self):
        for line in self.news():
            pause = re.search(r"longest pause ([\d.]+) us", line)
            if pause:
                self.reports += 1
                self.pause_us = max(self.pause_us, float(pause.group(1)))
                self.count(line)

    def count(self, line):
        failures = int(re.search(r"failures (\d+)", line).group(1))  # of its whole life
        self.bad["failures"] += failures - self.failures
        self.failures = failures
        for what, pattern in (("absent", r"absent (\d+)"), ("dropped", r"(\d+) dropped"), ("wrong", r"(\d+) wrong")):
            self.bad[what] += sum(map(int, re.findall(pattern, line)))


class Watch:
    """What a server says of the group, as it says it: whoever asks all servers all the time is a load of its own."""

    def __init__(self, world, node):
        self.process = world.box.spawn(["ep-admin", "--timeout=1h", "group", "watch", "moe", "-o", "json"],
                                       server=world.servers[node], name="watch-%s-%d" % (node, next(world.lives)))
        self.read, self.last = 0, {}

    def status(self):
        with open(self.process.out_path, "rb") as told:
            told.seek(self.read)
            lines = told.read()
        lines = lines[:lines.rfind(b"\n") + 1]
        self.read += len(lines)
        for line in lines.splitlines():
            group = json.loads(line).get("group")  # none: it has told what was there before
            self.last = group["status"] if group else self.last
        return self.last


class Moving(World):
    """A world whose servers and ranks come and go, with workers that follow."""

    spares = ("d", "e")
    devices = 4  # room for the ranks of a server that is drained
    worker_flags = ("--follow",)

    def __init__(self):
        super().__init__("both")
        self.homes = [node for node in self.nodes for _ in range(RANKS_PER_NODE)]
        self.modes, self.doubled = "ll,ht", set()
        self.leaving = []
        self.watches, self.epoch = {}, 0  # the epoch of the last update

    def start(self):
        super().start()
        self.epoch = int(self.status("a")["epoch"])
        for node in self.nodes:
            self.watches[node] = Watch(self, node)

    def free(self):
        """Nodes without a server."""
        return [node for node in (*"abc", *self.spares) if node not in self.nodes]

    # ---- what changes do

    def operate(self, *args):
        result = self.admin(self.nodes[0], *args)
        if result.code != 0:
            self.wrong.append("refused: %s" % result)
        return result

    def update(self, *flags):
        result = self.operate("group", "update", "moe", "-o", "json", *flags)
        if not self.wrong:
            self.epoch = int(result.json()["status"]["epoch"])
            self.settle()

    def move(self, homes):
        """The ranks to these nodes."""
        ranks = ", ".join("{rank: %d, node: %s}" % place for place in enumerate(homes))
        path = self.box.write("homes", "nodes: explicit\nranks: [%s]\n" % ranks)
        self.homes = list(homes)
        self.update("--ranks=%d" % len(homes), "--placement=" + path)

    def add_server(self, node):
        self.start_server(node)
        self.servers[node].wait_ready(60.0)
        self.nodes.append(node)
        self.watches[node] = Watch(self, node)

    def remove_server(self, node):
        self.nodes.remove(node)
        self.watches.pop(node).process.kill()
        if self.servers[node].stop() != 0:
            self.wrong.append("node %s ended badly:\n%s" % (node, self.servers[node].log()[-3000:]))

    # ---- workers

    def staff(self):
        """A worker for every rank where it is now; that of where it was leaves when the others go over."""
        self.leaving += self.slots[len(self.homes):]
        del self.slots[len(self.homes):]
        for rank, node in enumerate(self.homes):
            if rank < len(self.slots) and self.slots[rank].node == node:
                continue
            self.leaving += self.slots[rank:rank + 1]
            self.slots[rank:rank + 1] = [Follower(rank, node)]
            self.start_worker(self.slots[rank])

    def listen(self, slot):
        slot.listen()

    def followers(self):
        return self.slots + self.leaving

    def listen_all(self):
        for slot in self.followers():
            slot.listen()

    def check_workers(self):
        for slot in self.slots:
            if not slot.process.alive():
                self.wrong.append("the worker of rank %d at %s has ended:\n%s%s" % (
                    slot.rank, slot.node, slot.process.out()[-2000:], slot.process.log()[-2000:]))

    def drop_left(self):
        """Of those who have left, counts are kept by whoever measures."""
        for slot in self.leaving:
            if not slot.process.alive() and slot.process.wait() != 0:
                self.wrong.append("the worker that left rank %d at %s ended badly:\n%s%s" % (
                    slot.rank, slot.node, slot.process.out()[-2000:], slot.process.log()[-2000:]))
        return all(not slot.process.alive() for slot in self.leaving)

    # ---- the end of a change

    def is_settled_at(self, node):
        status = self.watches[node].status()  # may be some moments old
        ranks = status.get("ranks", [])
        return (int(status.get("epoch", 0)) >= self.epoch and status.get("phase") == "PHASE_READY" and
                [rank["node"] for rank in ranks] == self.homes and
                all(rank["state"] == "RANK_STATE_ATTACHED" for rank in ranks))

    def settle(self):
        """Until every rank is where it should be and goes on there, and no worker is left elsewhere."""
        self.staff()
        end = time.monotonic() + SETTLE_S * harness.SCALE
        while not self.wrong:
            self.check_workers()
            if self.drop_left() and all(self.is_settled_at(node) for node in self.nodes):
                return
            if time.monotonic() > end:
                self.wrong.append("not settled in %.0f s:\n%s" % (SETTLE_S, "\n".join(
                    "%s: %s" % (node, self.admin(node, "group", "get", "moe").out) for node in self.nodes)))
            time.sleep(0.02)

    def wait_reports(self):
        """One more of every worker, which tells of all until now."""
        self.listen_all()
        before = {slot: slot.reports for slot in self.slots}
        harness.wait_until(lambda: self.listen_all() or all(slot.reports > n for slot, n in before.items()),
                           "reports of all workers", 15.0, 0.02)

    def forget_start(self):
        """Ranks came one after the other."""
        self.wait_reports()
        for slot in self.slots:
            slot.bad.clear()


class Measure:
    """What changes of one kind did."""

    def __init__(self):
        self.pauses_ms, self.took_s, self.bad = [], [], collections.Counter()

    def take(self, world, change):
        """Does it.  Who was started for it has no pause yet: it waits for the others."""
        world.wait_reports()
        old = world.followers()
        for slot in old:
            slot.forget()
        start = time.monotonic()
        change.do()
        self.took_s.append(time.monotonic() - start)
        if not world.wrong:
            world.wait_reports()
        world.listen_all()
        self.pauses_ms.append(max(slot.pause_us for slot in old) / 1000)
        for slot in world.followers():
            self.bad.update(slot.bad)
            slot.bad.clear()
        world.leaving.clear()

    def is_bad(self):
        return any(self.bad[what] for what in BAD)


def part(values, share):
    """The smallest of them that so many are not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(measures):
    head = ("change", "times", *BAD, "p50 ms", "p99 ms", "max ms", "took p50 s", "max s")
    print(("%-10s" + "%9s" * 5 + "%11s" * 5) % head)
    for kind, m in sorted(measures.items()):
        print(("%-10s" + "%9d" * 5 + "%11.1f" * 3 + "%11.2f" * 2) % (
            kind, len(m.took_s), *(m.bad[what] for what in BAD), part(m.pauses_ms, 0.5), part(m.pauses_ms, 0.99),
            max(m.pauses_ms), part(m.took_s, 0.5), max(m.took_s)))


def reconfigure(world, measures, number, seed, only):
    for i, change in enumerate(changes.draws(world, seed, only), 1):
        if i > number or world.wrong:
            break
        measure = measures[type(change).__name__]
        print("%3d  %-24s" % (i, change), end="", flush=True)
        measure.take(world, change)
        print(" %6.2f s, longest pause %8.1f ms%s" % (measure.took_s[-1], measure.pauses_ms[-1],
                                                     ", BAD" if measure.is_bad() else ""), flush=True)


def arguments():
    parser = argparse.ArgumentParser(description="Changes in random order; see the top of this file.")
    parser.add_argument("--changes", type=int, default=100, help="so many (100)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of their order (the time)")
    parser.add_argument("--only", default="", metavar="KIND,...", help="of changes; all by default")
    return parser.parse_args()


def main():
    asked = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not before the world is closed
    print("seed %d" % asked.seed, flush=True)
    measures = collections.defaultdict(Measure)
    world = Moving()
    try:
        world.start()
        world.settle()
        world.forget_start()
        reconfigure(world, measures, asked.changes, asked.seed, asked.only)
    finally:
        world.close()
    for wrong in world.wrong:
        print("\nWRONG: %s" % wrong)
    table(measures)
    done = sum(len(m.took_s) for m in measures.values())
    sys.exit(1 if world.wrong or done < asked.changes or any(m.is_bad() for m in measures.values()) else 0)


if __name__ == "__main__":
    main()
