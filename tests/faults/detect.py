#!/usr/bin/python3
"""
How soon it is known that a server is gone, and how soon all is well after its return.

    tests/faults/detect.sh [--times N]

An etcd of three members, three servers, a worker at each rank.  In turn, each so many times:

    killed       with SIGKILL, and started again
    cut          from all others and from the store
    cut at once  as soon as another is back from that: the server that was away may take what goes for what comes back
    cut one way  what it sends to one other goes nowhere; both have the store, and the third one

Told for each: how long it took until both others say DEGRADED (the later one; as a watch of the group tells it), and from
the end of the loss until all three say READY (as they are asked, which takes some 0.1 s).
"""

import argparse
import signal
import sys
import time

from reconfigure import Watch, part
from world import NODES, World, harness

REST_S = 10.0  # after which who was away has no doubts any more: they end with a time, and nothing tells of it


class Killed:
    name, rest_s = "killed", REST_S

    def begin(self, world, node):
        world.servers[node].kill()

    def end(self, world, node):
        world.start_server(node)


class Cut:
    name, rest_s = "cut", REST_S

    def begin(self, world, node):
        world.net.cut(node)

    def end(self, world, node):
        world.net.mend(node)


class CutAtOnce(Cut):
    name, rest_s = "cut at once", 0.0


class CutOneWay:
    name, rest_s = "cut one way", REST_S

    @staticmethod
    def whom(node):
        return node, NODES[(NODES.index(node) + 1) % len(NODES)]

    def begin(self, world, node):
        world.net.cut_one_way(*self.whom(node))

    def end(self, world, node):
        world.net.mend_one_way(*self.whom(node))


def is_in(status, phase):
    return status.get("phase") == "PHASE_" + phase


def wait_phase(statuses, phase):
    """Until all say so; in s."""
    start = time.monotonic()
    harness.wait_until(lambda: all(is_in(status(), phase) for status in statuses),
                       lambda: "%s: %s" % (phase, [status() for status in statuses]), 60.0, 0.01)
    return time.monotonic() - start


def wait_ready(world):
    return wait_phase([lambda node=node: world.status(node) for node in NODES], "READY")


def lose(world, loss, node):
    """How long until it was known, and until all was well after the return."""
    watches = [Watch(world, other) for other in NODES if other != node]
    wait_phase([watch.status for watch in watches], "READY")
    loss.begin(world, node)
    known_s = wait_phase([watch.status for watch in watches], "DEGRADED")
    for watch in watches:
        watch.process.kill()
    loss.end(world, node)
    return known_s, wait_ready(world)


def attached(world):
    """Whoever has ended is started again meanwhile."""
    world.tend()
    ranks = world.status(NODES[0]).get("ranks", [])
    return ranks and all(rank["state"] == "RANK_STATE_ATTACHED" for rank in ranks)


def measure(world, loss, times):
    known, ready = [], []
    for i in range(times):
        time.sleep(loss.rest_s)
        known_s, ready_s = lose(world, loss, NODES[i % len(NODES)])
        known.append(known_s)
        ready.append(ready_s)
        if loss.rest_s:
            harness.wait_until(lambda: attached(world), "all ranks attached", 60.0)
    print("%-12s %5d %10.2f %10.2f %10.2f %10.2f" % (loss.name, times, part(known, 0.5), max(known), part(ready, 0.5),
                                                     max(ready)), flush=True)


def main():
    parser = argparse.ArgumentParser(description="How soon a lost server is known; see the top of this file.")
    parser.add_argument("--times", type=int, default=6, help="each loss so many times (6)")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not before the world is closed
    world = World("ll")
    losses = (Killed(), Cut(), CutAtOnce(), CutOneWay()) if world.cuttable else (Killed(),)
    try:
        world.start()
        harness.wait_until(lambda: attached(world), "all ranks attached", 60.0)
        print("%-12s %5s %10s %10s %10s %10s" % ("lost", "times", "known p50", "max s", "READY p50", "max s"), flush=True)
        for loss in losses:
            measure(world, loss, asked.times)
    finally:
        world.close()
    for wrong in world.wrong:
        print("\nWRONG: %s" % wrong)
    sys.exit(1 if world.wrong else 0)


if __name__ == "__main__":
    main()
