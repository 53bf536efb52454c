"""Physical limits of the machine, measured in fresh processes within the run that they are compared with.

    python benchmarks/limits.py

Memory: bytes that are read and written in a second by `a += b` of 64 MiB on all cores, payload bytes of a copy, and
those of rows of 64 and of 256 bytes that are copied from anywhere in a table of 256 MiB.
Loopback: bytes that one TCP connection moves in a second between two processes, and the time of a byte and its answer;
and bytes that ZeroMQ moves over TCP, in frames of 1 MiB that are not copied to be handed over.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import zmq

_BYTES = 64 << 20
_TABLE = 256 << 20
_GATHERED = 8 << 20
"""Bytes that each core copies row by row: fewer, and more of them lie in its cache."""
_CHUNK = 1 << 20
_SENT = 256
_TURNS = 2000
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Limits:
    """Bytes in a second and seconds; `add` counts two reads and one write."""

    copy: float
    add: float
    loopback: float
    round_trip: float
    zmq_tcp: float
    rows_64: float = 0.0
    """Of rows of 64 bytes, at any place."""
    rows_256: float = 0.0

    def __str__(self) -> str:
        rates = {"copy": self.copy, "add": self.add, "TCP": self.loopback, "ZeroMQ tcp": self.zmq_tcp}
        rates |= {"rows of 64 bytes": self.rows_64, "of 256": self.rows_256}
        said = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items())
        return f"{said} GB/s, TCP round trip {self.round_trip * 1e6:.0f} µs"


def measure_limits() -> Limits:
    """Limits as a fresh process finds them.

    Raises:
        subprocess.SubprocessError: it failed, or took longer than a minute.
    """
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT)
    return Limits(**json.loads(done.stdout))


def _measure() -> Limits:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    zmq_tcp = _measure_zmq(f"tcp://127.0.0.1:{port}")
    loopback, round_trip = _measure_loopback()
    a, b = np.ones((2, _BYTES // 4), np.float32)
    cores = len(os.sched_getaffinity(0))
    parts = list(zip(np.array_split(a, cores), np.array_split(b, cores), strict=True))
    with ThreadPoolExecutor(cores) as pool:
        copy = _best(lambda: list(pool.map(lambda part: np.copyto(*part), parts)))
        add = _best(lambda: list(pool.map(lambda part: np.add(*part, out=part[0]), parts)))
        rows = [_measure_rows(pool, cores, width) for width in (64, 256)]
    return Limits(_BYTES / copy, 3 * _BYTES / add, loopback, round_trip, zmq_tcp, *rows)


def _measure_rows(pool: ThreadPoolExecutor, cores: int, width: int) -> float:
    """Payload bytes of rows of some bytes that all cores copy in a second, from random places to one place."""
    table, drawn = np.zeros((_TABLE // width, width), np.uint8), np.random.default_rng(0)
    table += 1  # zeros that nobody has written are all one page
    ids = [drawn.integers(0, len(table), _GATHERED // width) for _ in range(cores)]
    spaces = [table[own] for own in ids]

    def gather(at: int) -> None:
        np.take(table, ids[at], axis=0, out=spaces[at], mode="clip")

    return cores * _GATHERED / _best(lambda: list(pool.map(gather, range(cores))))


def _best(run: Callable[[], object]) -> float:
    def seconds() -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return min(seconds() for _ in range(24))


def _measure_loopback() -> tuple[float, float]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if not child:
            _echo(server.getsockname()[1])
            os._exit(0)
        peer, _ = server.accept()
    with peer:
        peer.settimeout(_TIMEOUT)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        chunk = memoryview(bytearray(_CHUNK))
        rates = []
        for _ in range(3):
            began = time.perf_counter()
            for _ in range(_SENT):
                peer.sendall(chunk)
            peer.recv(1)
            rates.append(_SENT * _CHUNK / (time.perf_counter() - began))
        turns = []
        for _ in range(_TURNS):
            began = time.perf_counter()
            peer.sendall(b"x")
            peer.recv(1)
            turns.append(time.perf_counter() - began)
    os.waitpid(child, 0)
    return max(rates), statistics.median(turns)


def _measure_zmq(endpoint: str) -> float:
    child = os.fork()
    if not child:
        with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
            sender.connect(endpoint)
            chunk = bytearray(_CHUNK)
            for _ in range(3 * (_SENT + 1)):
                sender.send(chunk, copy=False)
        os._exit(0)
    rates = []
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver:
        receiver.rcvtimeo = int(1e3 * _TIMEOUT)
        receiver.bind(endpoint)
        for _ in range(3):
            receiver.recv(copy=False)
            began = time.perf_counter()
            for _ in range(_SENT):
                receiver.recv(copy=False)
            rates.append(_SENT * _CHUNK / (time.perf_counter() - began))
    os.waitpid(child, 0)
    return max(rates)


def _echo(port: int) -> None:
    """The other process: take in what is sent, and say when all is there; then answer byte by byte."""
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        space = memoryview(bytearray(_CHUNK))
        for _ in range(3):
            left = _SENT * _CHUNK
            while left:
                left -= peer.recv_into(space, min(left, _CHUNK))
            peer.sendall(b"x")
        while peer.recv(1):
            peer.sendall(b"x")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(json.dumps(asdict(_measure())))
