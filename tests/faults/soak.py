#!/usr/bin/python3
"""
Faults at random, while workers exchange tokens through ep-servers on three nodes and an operator makes changes.

    tests/faults/soak.sh --seconds N --seed S [--mode ll|ht] [--only ClockJump,DiskFull]

Nodes and members of etcd are network namespaces where these can be made (root), so that wires can be cut as well;
without them faults of processes are left.  Every fault, whom it hits and for how long is drawn from the seed, which is
printed: the same seed brings the same faults.

What must hold, all the time:
  - no result is wrong, no op takes longer than the group's timeout (and a bit);
  - no server goes back to an earlier epoch, and two that are at the same one have the same ranks at the same places;
  - a change that was acknowledged is never lost, and no server shows less without saying that it may be behind;
  - no program crashes or complains.
And when a fault is over, in HEAL_S: every server says READY with all ranks attached, and every worker goes on.
"""

import argparse
import collections
import signal
import sys
import time

import faults
from world import NODES, RANKS, World, harness

HEAL_S = 60.0


class Watch:
    """What servers say, and what follows from it."""

    def __init__(self, world):
        self.world = world
        self.newest = {}      # node: epoch
        self.placements = {}  # epoch: [(node, device)]
        self.acknowledged = self.asked = 0
        self.changes = collections.Counter()

    def look(self):
        self.world.listen_all()
        for node in NODES:
            if self.world.servers[node].alive():
                self.look_at(node)

    def look_at(self, node):
        group = self.world.group(node)
        if group:
            self.judge(node, group)
            self.check_label(node, group)

    def check_labels(self):
        """When all is well: each server tells what is known now."""
        for node in NODES:
            self.check_label(node, harness.wait_until(lambda: self.current(node), "node %s is not behind" % node, HEAL_S))

    def current(self, node):
        group = self.world.group(node)
        return group if group and not group["behind"] else None

    def judge(self, node, group):
        status = group.get("status", {})
        epoch = int(status.get("epoch", 0))
        places = [(rank["node"], rank["device"]) for rank in status.get("ranks", [])]
        if epoch < self.newest.get(node, 0):
            self.world.wrong.append("node %s: epoch %d after %d" % (node, epoch, self.newest[node]))
        if self.placements.setdefault(epoch, places) != places:
            self.world.wrong.append("node %s: epoch %d has other places than elsewhere" % (node, epoch))
        self.newest[node] = epoch

    def change(self, number, node):
        """An operator counts up; now and then sizes or modes change too, which makes a new epoch."""
        flags = ["--label=n=%d" % number]
        if number % 3 == 0:
            flags.append("--ll-max-tokens=%d" % (16 + number % 2 * 16))
        self.asked = number
        result = self.world.admin(node, "group", "update", "moe", *flags)
        self.changes["acknowledged" if result.code == 0 else "refused"] += 1
        if result.code == 0:
            self.acknowledged = number

    def check_label(self, node, group):
        label = int(group.get("spec", {}).get("labels", {}).get("n", -1))
        if not (self.acknowledged <= label or group.get("behind")) or label > self.asked:
            self.world.wrong.append("node %s: n is %d, and %d was acknowledged, %d asked for" % (
                node, label, self.acknowledged, self.asked))


def well(world):
    def is_well(node):
        group = world.group(node) or {}
        status = group.get("status", {})
        ranks = status.get("ranks", [])
        return not group.get("behind") and status.get("phase") == "PHASE_READY" and len(ranks) == RANKS and all(
            rank["state"] == "RANK_STATE_ATTACHED" for rank in ranks)
    return all(is_well(node) for node in NODES) and len({world.status(node)["epoch"] for node in NODES}) == 1


def heal(world, watch):
    """Until all is well and every worker gets on; how long that took."""
    start = time.monotonic()
    marks = None
    while time.monotonic() - start < HEAL_S * harness.SCALE:
        world.tend()
        watch.look()
        if not well(world):
            marks = None
        elif marks is None:
            marks = world.marks()
        elif world.steps_since(marks):
            return time.monotonic() - start
        time.sleep(0.1)
    world.wrong.append("not well %.0f s after the fault:\n%s" % (
        HEAL_S, "\n".join("%s: %s" % (node, world.admin(node, "group", "get", "moe").out) for node in NODES)))
    return time.monotonic() - start


def suffer(world, watch, fault, number):
    world.begin_fault()
    end = time.monotonic() + fault.seconds
    fault.begin()
    node, other = (NODES[(number + i) % len(NODES)] for i in range(2))
    if fault.answers(node):
        watch.change(number, node)
    if fault.answers(other):
        watch.look_at(other)
    while time.monotonic() < end:
        world.listen_all()
        time.sleep(0.05)
    fault.end()
    world.end_fault()


def soak(world, watch, seconds, seed, only):
    end = time.monotonic() + seconds
    kinds, healed = collections.Counter(), []
    for number, fault in enumerate(faults.draws(world, seed, only), 1):
        if time.monotonic() >= end or world.wrong:
            break
        print("%3d  %-44s" % (number, fault), end="", flush=True)
        suffer(world, watch, fault, number)
        healed.append(heal(world, watch))
        watch.check_labels()
        kinds[type(fault).__name__] += 1
        print(" well after %.1f s, epoch %d" % (healed[-1], max(watch.newest.values())), flush=True)
    return kinds, healed


def arguments():
    parser = argparse.ArgumentParser(description="Faults at random; see the top of this file.")
    parser.add_argument("--seconds", type=float, default=120, help="begin faults for so long (120)")
    parser.add_argument("--mode", choices=("ll", "ht"), default="ll", help="of the workers' ops (ll)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of what happens (the time)")
    parser.add_argument("--only", default="", metavar="KIND,...", help="of faults; all by default")
    return parser.parse_args()


def main():
    asked = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not before the world is closed
    world = World(asked.mode)
    print("seed %d; wires %s be cut" % (asked.seed, "can" if world.cuttable else "cannot"), flush=True)
    kinds, healed = collections.Counter(), []
    watch = Watch(world)
    try:
        world.start()
        heal(world, watch)
        kinds, healed = soak(world, watch, asked.seconds, asked.seed, asked.only)
        if world.wrong:
            print(world.last_words())
    finally:
        world.close()
    for wrong in world.wrong:
        print("\nWRONG: %s" % wrong)
    print("%d faults (%s), well again after %.1f s at most; changes: %d acknowledged, %d refused; %d wrong (seed %d)" % (
        sum(kinds.values()), ", ".join("%s %d" % kind for kind in sorted(kinds.items())), max(healed, default=0),
        watch.changes["acknowledged"], watch.changes["refused"], len(world.wrong), asked.seed))
    sys.exit(1 if world.wrong or not healed else 0)


if __name__ == "__main__":
    main()
