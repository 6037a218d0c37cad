"""What a host has besides its wire: a disk that can be full, and a wall clock that can be moved."""

import errno
import os
import struct
import subprocess

import harness

CLOCK = os.path.join(harness.BIN, "..", "unit", "libep_wall_clock.so")  # tests/faults/clock.c


class Disk:
    """A small file system in memory.  Needs root."""

    def __init__(self, path, mib):
        self.path = path
        os.makedirs(path, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=%dm,mode=0755" % mib, "ep-test", path], check=True)

    def fill(self):
        """To the last byte."""
        with open(os.path.join(self.path, "ballast"), "ab", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12):
                self._write_all(ballast, bytes(size))

    @staticmethod
    def _write_all(file, block):
        try:
            while True:
                file.write(block)
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise

    def free(self):
        os.unlink(os.path.join(self.path, "ballast"))

    def close(self):
        """Who uses it has ended.  What is on it is kept, if everything is."""
        kept = self.path + ".kept"
        if os.environ.get("EP_KEEP"):
            subprocess.run(["cp", "-a", self.path, kept], check=False)
        subprocess.run(["umount", self.path], check=True)


class Clock:
    """The wall clock of the programs that are started with env; see clock.c for what moves and what does not."""

    def __init__(self, path):
        self.path = path
        self.move(0)

    @staticmethod
    def available():
        return os.path.exists(CLOCK)

    def env(self):
        return {"LD_PRELOAD": os.path.abspath(CLOCK), "EP_WALL_CLOCK": self.path}

    def move(self, seconds):
        """So far from what it is."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(fd, struct.pack("=q", int(seconds * 1e9)), 0)
        os.close(fd)
