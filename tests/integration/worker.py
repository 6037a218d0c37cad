"""A worker that attaches to a rank and does nothing with it: Claim over gRPC, then the side socket.

    with worker.Worker(server, "moe", rank=1) as w:
        w.frame(timeout=5)          # the next event, or None when the server closed the connection

Frames are those of proto/attach/attach_frame.h.
"""

import array
import base64
import os
import socket
import struct

import harness
import reflect

HELLO, WELCOME, REFUSED, EVENT, BYE = 1, 2, 3, 4, 5
REGISTER, UNREGISTER, ANSWER = 7, 8, 9
RANK_LOST, RANK_JOINED, EPOCH, DRAINING, DETACHED, EVENTS_LOST = 1, 2, 3, 4, 5, 6
MAGIC, VERSION, WINDOW_VERSION = 0x41535045, 5, 12
LAYOUT = struct.Struct("=IHHIIIIQQQQII16s256s")


class Frame:
    def __init__(self, data):
        (self.magic, self.version, self.type, self.status, self.event, self.rank, self.count, self.epoch,
         self.value, self.offset, self.ht, self.region, _, self.ticket, text) = LAYOUT.unpack(data)
        self.text = text.split(b"\0")[0].decode()

    def __repr__(self):
        return "Frame(type=%d status=%d event=%d rank=%d text=%r)" % (self.type, self.status, self.event, self.rank,
                                                                     self.text)


def pack(kind, ticket=b"", count=0, value=0, offset=0, region=0):
    return LAYOUT.pack(MAGIC, VERSION, kind, 0, 0, 0, count, 0, value, offset, 0, region, 0, ticket, b"")


def claim(rpc, group, rank=None, name="test-worker", token="", group_token=""):
    """The ClaimReply as a dict."""
    version = rpc.call("ep.v1.Admin/GetVersion")
    request = {"group": group, "worker": name, "window_version": version["window_version"],
               "attach_version": version["attach_version"], "token": token, "group_token": group_token}
    if rank is not None:
        request["rank"] = rank
    return rpc.call("ep.v1.Attach/Claim", request)


class Worker:
    def __init__(self, server, group, rank=None, name="test-worker", token=""):
        with reflect.Client(server.address) as rpc:
            reply = claim(rpc, group, rank, name, token)
        self.fd = -1
        self.rank = reply.get("rank", 0)
        self.socket = harness.connect_unix(reply["socket"], socket.SOCK_SEQPACKET)
        self.socket.send(pack(HELLO, base64.b64decode(reply["ticket"])))
        welcome = self.frame()
        assert welcome and welcome.type == WELCOME and self.fd >= 0, welcome

    def frame(self, timeout=harness.PATIENCE_S):
        self.socket.settimeout(timeout * harness.SCALE)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(LAYOUT.size + 1, socket.CMSG_SPACE(4))
        except ConnectionResetError:
            return None
        for _, kind, payload in ancillary:
            if kind == socket.SCM_RIGHTS:
                fds = array.array("i", payload)
                self.fd = fds[0]
        return Frame(data) if data else None

    def event(self, wanted, timeout=harness.PATIENCE_S):
        """The next frame of this event; others are passed over."""
        while True:
            frame = self.frame(timeout)
            if frame is None or frame.type == EVENT and frame.event == wanted:
                return frame

    def ask(self, kind, fds=(), **fields):
        """Sends a request, with descriptors."""
        self.socket.sendmsg([pack(kind, **fields)],
                            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])

    def answer(self, timeout=harness.PATIENCE_S):
        """The next ANSWER; events are passed over."""
        while True:
            frame = self.frame(timeout)
            if frame is None or frame.type == ANSWER:
                return frame

    def leave(self):
        """BYE: the window is unmapped."""
        self._close_window()
        try:
            self.socket.send(pack(BYE))
        except OSError:
            pass
        self.socket.close()

    def _close_window(self):
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.leave()
