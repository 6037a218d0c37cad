"""What TCP over loopback brings on this host, when nothing else is under way: beside it stands what nodes bring each other
with EP_GIN_TRANSPORT=tcp.

    python3 loopback.py N...     a line for each N: GB/s of N connections together, each from one process to another
"""
import os
import socket
import struct
import sys
import time

SECONDS = 1.0
PIECE = 1 << 20
socket.setdefaulttimeout(10)  # where an end does not come, the other one does not wait for ever


def send(address):
    with socket.create_connection(address) as out:
        data, end = bytes(PIECE), time.monotonic() + SECONDS
        while time.monotonic() < end:
            out.sendall(data)


def receive(listener, report):
    source, buffer, n, start = listener.accept()[0], bytearray(PIECE), 0, time.monotonic()
    while more := source.recv_into(buffer):
        n += more
    os.write(report, struct.pack("d", n / (time.monotonic() - start)))


def child(work, *arguments):
    if os.fork() == 0:
        try:
            work(*arguments)
        finally:
            os._exit(0)


def rate(connections):
    """Bytes a second."""
    reports, report = os.pipe()
    for _ in range(connections):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            child(receive, listener, report)
            child(send, listener.getsockname())
    os.close(report)  # a receiver that dies is the end of what there is to read
    rates = [struct.unpack("d", os.read(reports, 8))[0] for _ in range(connections)]
    os.close(reports)
    for _ in range(2 * connections):
        os.wait()
    return sum(rates)


for number in sys.argv[1:]:
    print("loopback, %s TCP connections: %.1f GB/s together" % (number, rate(int(number)) / 1e9), flush=True)
