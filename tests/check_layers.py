"""Checks that folders are layers: a file includes only what its floor may use.

Floors (README, "The tree"):
    server/main > api > attach, metrics > group > cluster > node, store
    client/admin, client/bench > lib
    both > kernels > proto/rpc > proto/base

A folder offers the headers named ep_*.h (all headers in proto/, kernels/ and client/include);
its others are its own.  A library from outside is used in the folders named below only.
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOP = ("proto", "kernels", "server", "client")

# What each folder may include beside its own files.  The longest folder that matches counts.
BASE = {"proto/base"}
PROTO = BASE | {"proto/rpc", "proto/attach", "generated"}
NODE = PROTO | {"kernels"}
CLUSTER = NODE | {"server/node", "server/store"}
GROUP = CLUSTER | {"server/cluster"}
ATTACH = GROUP | {"server/group"}
API = ATTACH | {"server/attach", "server/metrics"}
LIB = BASE | {"proto/rpc", "proto/attach", "generated", "kernels", "client/include"}
USES = {
    "proto/base": set(),
    "proto/rpc": BASE | {"generated"},
    "proto/attach": BASE,
    "kernels": BASE,
    "kernels/cuda": BASE | {"kernels"},
    "kernels/gin": BASE | {"kernels"},
    "kernels/host": BASE | {"kernels", "kernels/gin"},
    "server/node": NODE,
    "server/store": BASE | {"proto/rpc", "generated"},
    "server/cluster": CLUSTER,
    "server/group": GROUP,
    "server/attach": ATTACH,
    "server/metrics": BASE,
    "server/api": API,
    "server": API | {"server/api"},
    "client/include": BASE,
    "client/lib": LIB,
    "client/examples": {"client/include"} | BASE,
    "client/admin": PROTO | {"kernels", "client/include"},
    "client/bench": PROTO | {"kernels", "client/include"},
}

# Where a library from outside may be included.
OUTSIDE = {
    r"grpc/": {"proto/rpc"},
    r"sqlite3\.h": {"server/store"},
    r"crypt\.h": {"server/group"},
    r"microhttpd\.h": {"server/metrics"},
    r"libsmartcols": {"client/admin", "client/bench"},
    r"systemd/": {"server"},
    r"yaml\.h": {"server", "client/admin"},
    r"jansson\.h": {"proto/rpc", "server", "client/admin", "client/bench"},
    r"infiniband/": {"kernels/gin"},
    r"cuda|nccl": {"kernels/cuda", "server/node"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.M)


def sources():
    for top in TOP:
        for folder, _, files in os.walk(os.path.join(ROOT, top)):
            for name in files:
                if name.endswith((".c", ".h", ".cu", ".cuh")):
                    yield os.path.relpath(os.path.join(folder, name), ROOT)


def longest(table, path):
    """The longest key of table that is path's folder or above it."""
    folder = os.path.dirname(path)
    while folder and folder not in table:
        folder = os.path.dirname(folder)
    return folder


def problems_of(path, headers):
    folder = longest(USES, path)
    if not folder:
        yield "%s: its folder has no floor; name it in tests/check_layers.py" % path
        return
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        text = f.read()
    for bracket, name in INCLUDE.findall(text):
        for pattern, allowed in OUTSIDE.items():
            if bracket == "<" and re.match(pattern, name) and folder not in allowed:
                yield "%s: <%s> belongs in %s only" % (path, name, ", ".join(sorted(allowed)))
        if bracket == "<":
            continue
        if name.endswith(".pb-c.h"):
            if "generated" not in USES[folder]:
                yield "%s: %s may not use generated messages" % (path, folder)
            continue
        owners = headers.get(os.path.basename(name), set())
        if not owners:
            yield "%s: \"%s\" is nowhere in the tree" % (path, name)
        elif folder not in owners and not owners & USES[folder]:
            yield "%s: %s may not use %s (\"%s\")" % (path, folder, " or ".join(sorted(owners)), name)
        elif folder not in owners and not offered(name, owners):
            yield "%s: \"%s\" is private to %s" % (path, name, " or ".join(sorted(owners)))


def offered(name, owners):
    return os.path.basename(name).startswith("ep_") or \
        any(o.startswith(("proto", "kernels", "client/include")) for o in owners) and "private" not in name


def main():
    files = sorted(sources())
    headers = {}
    for path in files:
        if path.endswith((".h", ".cuh", ".cu")): # a kernel may be compiled in two ways
            headers.setdefault(os.path.basename(path), set()).add(longest(USES, path))
    problems = [p for path in files for p in problems_of(path, headers)]
    for problem in problems:
        print(problem)
    print("%d files, %d problems" % (len(files), len(problems)))
    sys.exit(1 if problems or not files else 0)


if __name__ == "__main__":
    main()
