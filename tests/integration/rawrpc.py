"""One unary gRPC call over a unix socket with the standard library alone: enough HTTP/2 for that.

    rawrpc.call("/run/ep-server/ep.sock", "ep.v1.Attach/Claim", b"...")     # -> the reply's bytes

Messages are protobuf's wire format; varint(), field() and fields() make and read it.
"""

import socket
import struct

import harness

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, ACK, END_HEADERS = 1, 1, 4
UNAVAILABLE = 14


class RpcError(Exception):
    def __init__(self, code, text):
        super().__init__("%d: %s" % (code, text))
        self.code, self.text = code, text


# ---- protobuf ---------------------------------------------------------------------------------


def varint(n):
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7f | 0x80)
        n >>= 7
    return bytes(out + bytes([n]))


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def read_varint(data, at):
    n = shift = 0
    while True:
        n |= (data[at] & 0x7f) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return n, at


def fields(data):
    """{number: last value}; varints and length-delimited fields."""
    found, at = {}, 0
    while at < len(data):
        key, at = read_varint(data, at)
        value, at = read_varint(data, at)
        if key & 7 == 2:
            value, at = data[at:at + value], at + value
        found[key >> 3] = value
    return found


# ---- headers (HPACK, RFC 7541, without Huffman codes, which gRPC's C core does not use) ----------


def literal(name, value):
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def hpack_int(data, at, bits):
    most = (1 << bits) - 1
    n = data[at] & most
    if n < most:
        return n, at + 1
    more, at = read_varint(data, at + 1)
    return most + more, at


def hpack_string(data, at):
    n, at = hpack_int(data, at, 7)
    return data[at:at + n].decode(errors="replace"), at + n


class Headers:
    """Names of the static table stay numbers: none that we look for is in it."""

    def __init__(self):
        self.table = []

    def entry(self, index):
        return self.table[index - 62] if index >= 62 else (str(index), "")

    def decode(self, data):
        found, at = {}, 0
        while at < len(data):
            first = data[at]
            if first & 0x80:
                index, at = hpack_int(data, at, 7)
                name, value = self.entry(index)
            elif first & 0xe0 == 0x20:
                _, at = hpack_int(data, at, 5)
                continue
            else:
                kept = first & 0x40
                index, at = hpack_int(data, at, 6 if kept else 4)
                if index:
                    name = self.entry(index)[0]
                else:
                    name, at = hpack_string(data, at)
                value, at = hpack_string(data, at)
                if kept:
                    self.table.insert(0, (name, value))
            found[name] = value
        return found


# ---- the call -------------------------------------------------------------------------------------


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def read_exactly(connection, n):
    data = b""
    while len(data) < n:
        more = connection.recv(n - len(data))
        if not more:
            raise RpcError(UNAVAILABLE, "connection closed")
        data += more
    return data


def request(method, message):
    block = b"".join(literal(*h) for h in (
        (":method", "POST"), (":scheme", "http"), (":path", "/" + method), (":authority", "localhost"),
        ("te", "trailers"), ("content-type", "application/grpc")))
    return (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, block)
            + frame(DATA, END_STREAM, 1, b"\0" + struct.pack(">I", len(message)) + message))


def converse(connection, method, message):
    connection.sendall(request(method, message))
    headers, data = Headers(), b""
    while True:
        head = read_exactly(connection, 9)
        size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        payload = read_exactly(connection, size)
        if kind in (SETTINGS, PING) and not flags & ACK:
            connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == DATA:
            data += payload
        elif kind == HEADERS:
            found = headers.decode(payload)
            if flags & END_STREAM:
                return found, data
        elif kind in (RST_STREAM, GOAWAY):
            raise RpcError(UNAVAILABLE, "the server ended the connection")


def call(path, method, message, timeout=harness.PATIENCE_S):
    try:
        with harness.connect_unix(path, socket.SOCK_STREAM, timeout) as connection:
            trailers, data = converse(connection, method, message)
    except OSError as e:
        raise RpcError(UNAVAILABLE, str(e)) from e
    code = int(trailers.get("grpc-status", "2"))
    if code:
        raise RpcError(code, trailers.get("grpc-message", ""))
    return data[5:]
