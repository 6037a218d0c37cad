"""Takes a group over many nodes through its life, and says how long each step took and what it cost.

Starts an etcd and build/scale/ep_scale (EP_BUILD: another build), which simulates the nodes; reads etcd's own figures
between the steps; repeats that, each time with a new etcd, and prints medians:

    seconds  until the step was over at every node
    own      of it, without the time in which the simulation's only loop was ready to run and something else ran: on a
             machine that others use too, this is what tells
    cpu      seconds of the simulation, and of etcd
    writes   records written or deleted, by all nodes together; and the most by one of them
    KiB      of these records with their keys
    puts     what etcd counted, with the markers of its client;  sent: MiB that etcd sent to the nodes' watches
    calls    messages between servers, and their MiB
    open     the most connections for one call each that one server had at once

--check is for CI: no times are looked at, but each node may write at most CHECK_WRITES records a step and have CHECK_OPEN such
connections, and an epoch is formed with CHECK_CALLS messages for each node.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration"))
import harness  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("EP_BUILD", os.path.join(ROOT, "build"))

SWEEP = (8, 16, 32, 64, 128, 256, 512)
CHECK_WRITES = 16      # by one node, in one step; 2 to 4 are usual, and a machine so busy that leases run out makes more
CHECK_OPEN = 16        # of one node at once; as many as reach.c asks
CHECK_CALLS = 12       # between the leader and one node in a step that forms an epoch
FORMING = ("form", "update", "heal")
ETCD_S = 30            # until it answers
METRICS = {"puts": "etcd_debugging_mvcc_put_total", "deletes": "etcd_debugging_mvcc_delete_total",
           "sent": "etcd_network_client_grpc_sent_bytes_total", "cpu": "process_cpu_seconds_total",
           "resident": "process_resident_memory_bytes"}


class Etcd:
    """A cluster of one, in a directory."""

    def __init__(self, directory):
        self.client = "http://127.0.0.1:%d" % harness.free_port()
        peer = "http://127.0.0.1:%d" % harness.free_port()
        self.log = open(os.path.join(directory, "etcd.log"), "wb")
        self.process = subprocess.Popen(
            ["etcd", "--name=m", "--data-dir=" + os.path.join(directory, "etcd"), "--listen-client-urls=" + self.client,
             "--advertise-client-urls=" + self.client, "--listen-peer-urls=" + peer,
             "--initial-advertise-peer-urls=" + peer, "--initial-cluster=m=" + peer],
            stdout=self.log, stderr=subprocess.STDOUT)
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.wait()

    def wait(self):
        until = time.monotonic() + ETCD_S
        while True:
            try:
                self.metrics()
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def metrics(self):
        text = self.opener.open(self.client + "/metrics", timeout=10).read().decode()
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(found.get(metric, 0)) for name, metric in METRICS.items()}

    def url(self):
        return "etcd://" + self.client.removeprefix("http://") + "/scale"

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


def difference(before, after):
    """Counters; memory is as it is."""
    return {name: after[name] - (0 if name == "resident" else before[name]) for name in after}


def read_steps(process, etcd):
    """Each step begins when a line is sent, and has ended with the line that comes."""
    before = etcd.metrics()
    while True:
        try:
            process.stdin.write("\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has said why on stderr, or is done
        line = process.stdout.readline()
        if not line:
            return
        after = etcd.metrics()
        yield {**json.loads(line), "etcd": difference(before, after)}
        before = after


def run(options, nodes):
    """The steps of one life of a group, in order; a step that comes twice has a number the second time."""
    with tempfile.TemporaryDirectory() as directory:
        etcd = Etcd(directory)
        try:
            process = subprocess.Popen(
                [os.path.join(BUILD, "scale", "ep_scale"), "--store=" + etcd.url(), "--nodes=%d" % nodes,
                 "--ranks=%d" % options.ranks, "--within=%d" % options.within, "--ttl-ms=%d" % options.ttl_ms],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            steps = {}
            for step in read_steps(process, etcd):
                name = step["step"]
                steps[name + "-2" if name in steps else name] = step
            process.stdin.close()
            if process.wait():
                sys.exit("ep_scale ended with %d after %s" % (process.returncode, list(steps)))
            return steps
        finally:
            etcd.close()


# ---- what is said of it -------------------------------------------------------------------------


def figures(step):
    own = step["seconds"] - step["waited_seconds"]
    return {"seconds": step["seconds"], "own": max(own, 0.0), "cpu": step["cpu_seconds"], "etcd_cpu": step["etcd"]["cpu"],
            "writes": step["writes"], "most": step["most_writes"], "KiB": step["bytes"] / 1024, "puts": step["etcd"]["puts"],
            "sent": step["etcd"]["sent"] / 2**20, "calls": step["calls"], "calls_MiB": step["call_bytes"] / 2**20,
            "open": step["most_opened"],
            "resident": step["resident_kib"] / 1024, "etcd_resident": step["etcd"]["resident"] / 2**20}


def medians(runs):
    return {name: {key: statistics.median(figures(r[name])[key] for r in runs) for key in figures(runs[0][name])}
            for name in runs[0]}


HEAD = ("%-9s %8s %7s %7s %7s %7s %5s %8s %7s %7s %8s %8s %5s %7s" %
        ("step", "seconds", "own", "cpu", "etcd", "writes", "most", "KiB", "puts", "sent", "calls", "MiB", "open", "RSS MiB"))


def print_table(nodes, options, steps):
    print("\n%d nodes of %d ranks, median of %d" % (nodes, options.ranks, options.runs))
    print(HEAD)
    for name, f in steps.items():
        print("%-9s %8.2f %7.2f %7.2f %7.2f %7d %5d %8.0f %7d %7.1f %8d %8.1f %5d %7.0f" %
              (name, f["seconds"], f["own"], f["cpu"], f["etcd_cpu"], f["writes"], f["most"], f["KiB"], f["puts"],
               f["sent"], f["calls"], f["calls_MiB"], f["open"], f["resident"]), flush=True)


CURVE = ("register", "form", "attach", "update", "move", "detect", "heal", "split", "delete")


def print_curve(curve, key):
    print("\n%s by nodes" % key)
    print("%6s" % "nodes" + "".join("%10s" % name for name in CURVE))
    for nodes, steps in curve.items():
        print("%6d" % nodes + "".join("%10.2f" % steps[name][key] for name in CURVE))


# ---- what CI looks at ------------------------------------------------------------------------------


def check(nodes, steps):
    """Counts only."""
    wrong = ["%s: a node wrote %d records, at most %d are expected" % (name, f["most"], CHECK_WRITES)
             for name, f in steps.items() if f["most"] > CHECK_WRITES]
    wrong += ["%s: %d messages between servers, at most %d for each of %d nodes are expected"
              % (name, steps[name]["calls"], CHECK_CALLS, nodes)
              for name in FORMING if steps[name]["calls"] > CHECK_CALLS * nodes]
    wrong += ["%s: a server had %d connections for one call each at once, at most %d are expected"
              % (name, f["open"], CHECK_OPEN) for name, f in steps.items() if f["open"] > CHECK_OPEN]
    for text in wrong:
        print("FAIL " + text)
    print("%s counts of %d nodes" % ("FAIL" if wrong else "ok", nodes))
    return not wrong


def main():
    parser = argparse.ArgumentParser(prog="tests/scale/scale.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=8, help="of each node")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="doubling, from %d up to --nodes" % SWEEP[0])
    parser.add_argument("--within", type=int, default=120, metavar="S", help="the longest that a step may take")
    parser.add_argument("--ttl-ms", type=int, default=2000, help="of the nodes' sessions; a server's has 2000")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail if there were more writes or messages than expected")
    options = parser.parse_args()

    if not os.path.exists(os.path.join(BUILD, "scale", "ep_scale")) or subprocess.call(
            ["sh", "-c", "command -v etcd"], stdout=subprocess.DEVNULL):
        print("etcd (package etcd-server) or build/scale/ep_scale is not there")
        sys.exit(77)
    sizes = [n for n in SWEEP if n < options.nodes] if options.sweep else []
    curve = {}
    for nodes in [*sizes, options.nodes]:
        curve[nodes] = medians([run(options, nodes) for _ in range(options.runs)])
        if not options.json:
            print_table(nodes, options, curve[nodes])
    if options.json:
        print(json.dumps(curve))
    elif options.sweep:
        for key in ("seconds", "own", "cpu", "etcd_cpu"):
            print_curve(curve, key)
    if options.check and not all([check(nodes, steps) for nodes, steps in curve.items()]):
        sys.exit(1)


if __name__ == "__main__":
    main()
