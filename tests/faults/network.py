"""Hosts that are network namespaces of this machine, on one switch, whose wires can be cut and made slow."""

import os
import shutil
import subprocess

NOWHERE = "02:00:00:00:00:00"  # no host has that address


SLOW = ("root", "netem", "delay", "20ms", "rate", "8mbit")
# Where the kernel has no netem: the queue delays, as soon as it fills.
SLOW_QUEUE = ("root", "tbf", "rate", "8mbit", "burst", "16kb", "latency", "100ms")


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


def tc(space, *args):
    """Does the kernel have it?"""
    return subprocess.run(["tc", "-n", space, "qdisc", *args], check=False, capture_output=True).returncode == 0


def available():
    """May this process make namespaces?"""
    name = "ep%d-try" % os.getpid()
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
        return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Network:
    def __init__(self, hosts):
        self.spaces = ["ep%d-%s" % (os.getpid(), name) for name in ("switch", *hosts)]
        self.number = {host: i + 1 for i, host in enumerate(hosts)}
        try:
            for space in self.spaces:
                ip("netns", "add", space)
            ip("-n", self.spaces[0], "link", "add", "switch", "type", "bridge")
            ip("-n", self.spaces[0], "link", "set", "switch", "up")
            for host in hosts:
                self._plug_in(host)
        except subprocess.CalledProcessError:
            self.close()
            raise

    def _plug_in(self, host):
        wire, switch = self._wire(host), self.spaces[0]
        ip("-n", self.space(host), "link", "add", "eth0", "type", "veth", "peer", "name", wire, "netns", switch)
        ip("-n", switch, "link", "set", wire, "master", "switch", "up")
        ip("-n", self.space(host), "address", "add", self.address(host) + "/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", self.space(host), "link", "set", link, "up")

    def _wire(self, host):
        return "wire%d" % self.number[host]

    def space(self, host):
        return self.spaces[self.number[host]]

    def address(self, host):
        return "10.77.0.%d" % self.number[host]

    def inside(self, host):
        """What a command begins with to run there."""
        return ("ip", "netns", "exec", self.space(host))

    def cut(self, host):
        ip("-n", self.spaces[0], "link", "set", self._wire(host), "down")

    def mend(self, host):
        ip("-n", self.spaces[0], "link", "set", self._wire(host), "up")

    def cut_one_way(self, sender, receiver):
        """What sender sends goes nowhere, without a word; what receiver sends arrives."""
        ip("-n", self.space(sender), "neighbour", "replace", self.address(receiver), "lladdr", NOWHERE, "dev", "eth0",
           "nud", "permanent")

    def mend_one_way(self, sender, receiver):
        ip("-n", self.space(sender), "neighbour", "del", self.address(receiver), "dev", "eth0")

    def slow(self, host):
        """What it sends and what is sent to it."""
        for space, link in self._ends(host):
            if not tc(space, "add", "dev", link, *SLOW) and not tc(space, "add", "dev", link, *SLOW_QUEUE):
                raise AssertionError("the kernel has neither netem nor tbf")

    def hurry(self, host):
        for space, link in self._ends(host):
            tc(space, "del", "dev", link, "root")

    def name(self, host, names, resolver):
        """For what is started there from now on: {name: address} in /etc/hosts, and who is asked for all others."""
        etc = self._etc(self.space(host))
        os.makedirs(etc, exist_ok=True)
        with open(os.path.join(etc, "hosts"), "w") as f:
            f.writelines("%s %s\n" % (address, name) for name, address in names.items())
        with open(os.path.join(etc, "resolv.conf"), "w") as f:
            f.write("nameserver %s\n" % resolver)

    @staticmethod
    def _etc(space):
        return os.path.join("/etc/netns", space)  # ip netns exec mounts what is there

    def _ends(self, host):
        return (self.space(host), "eth0"), (self.spaces[0], self._wire(host))

    def close(self):
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
            shutil.rmtree(self._etc(space), ignore_errors=True)
