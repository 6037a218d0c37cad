"""What TCP over loopback brings on this host, when nothing else is under way: beside it stands what nodes bring each other
with EP_GIN_TRANSPORT=tcp.

    python3 loopback.py N...     a line for each N: GB/s of N connections between processes, all together, one way and both
                                 ways, from and into a buffer that caches hold, and both ways through as much memory as
                                 nodes use, which they do not
"""
import itertools
import os
import socket
import struct
import sys
import threading
import time

SECONDS = 1.0
PIECE = 1 << 20
LARGE = 64 * PIECE
socket.setdefaulttimeout(10)  # where an end does not come, the other one does not wait for ever


def pieces(size):
    """Of a buffer, that has been written to."""
    memory = memoryview(bytearray(os.urandom(PIECE) * (size // PIECE)))
    return [memory[at:at + PIECE] for at in range(0, size, PIECE)]


def send(to, buffer):
    end = time.monotonic() + SECONDS
    for piece in itertools.cycle(buffer):
        if time.monotonic() > end:
            break
        to.sendall(piece)
    to.shutdown(socket.SHUT_WR)


def receive(source, buffer, report):
    n, start = 0, time.monotonic()
    for piece in itertools.cycle(buffer):
        more = source.recv_into(piece)
        if not more:
            break
        n += more
    os.write(report, struct.pack("d", n / (time.monotonic() - start)))


def serve(end, sends, receives, size, report):
    sender = threading.Thread(target=send, args=(end, pieces(size)))
    buffer = pieces(size)
    if sends:
        sender.start()
    if receives:
        receive(end, buffer, report)
    if sends:
        sender.join()


def child(work, *arguments):
    if os.fork() == 0:
        try:
            work(*arguments)
        finally:
            os._exit(0)


def rate(connections, both, size):
    """Bytes a second."""
    reports, report = os.pipe()
    for _ in range(connections):
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
            with listener.accept()[0] as other:
                child(serve, one, True, both, size, report)
                child(serve, other, both, True, size, report)
    os.close(report)  # a receiver that dies is the end of what there is to read
    ways = 2 if both else 1
    rates = [struct.unpack("d", os.read(reports, 8))[0] for _ in range(ways * connections)]
    os.close(reports)
    for _ in range(2 * connections):
        os.wait()
    return sum(rates)


for number in map(int, sys.argv[1:]):
    one, both, large = (rate(number, *how) / 1e9 for how in ((False, PIECE), (True, PIECE), (True, LARGE)))
    print("loopback, %d TCP connections, GB/s together: %.1f one way, %.1f both ways, %.1f both ways through %d MiB each"
          % (number, one, both, large, LARGE // PIECE), flush=True)
