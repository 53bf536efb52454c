"""Sockets of a worker: one DEALER per server, and a second one per server for heartbeats.

The only file of the trainer that knows ZeroMQ. A process that was forked from the one that made a connection (a
DataLoader's worker, say) must leave it alone: sending is refused there, and closing does nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq
from torch import Tensor

from kvstore_server.errors import KVStoreError
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import MAX_FRAME, SENT_ALONE
from kvstore_server.protocol.frames import decode_reply, encode_request

HEARTBEAT_INTERVAL = 1.0
"""Seconds between two signs of life to every server."""
_LINGER_MS = 2000


class Connection:
    """A transport over ZeroMQ to the servers at `addresses`, in index order.

    Large payloads are sent from the caller's memory, which must not change until the request is answered.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.num_servers = len(addresses)
        self._addresses = list(addresses)
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._sockets = [_dealer(self._context, address) for address in addresses]
        self._index = {socket: server for server, socket in enumerate(self._sockets)}
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._ready: deque[int] = deque()
        self._answered: set[int] = set()
        self._heartbeats: _Heartbeats | None = None
        self._is_closed = False

    def send(self, server: int, request: m.Request) -> None:
        """Queue a request without blocking. Raises KVStoreError in a process that was forked from the owner."""
        if os.getpid() != self._pid:
            raise KVStoreError(
                f"this connection belongs to process {self._pid}; process {os.getpid()} was forked from it and "
                "must make its own"
            )
        frames = encode_request(request)
        body = request.body
        if isinstance(body, m.PushBatch) and len(body.pushes) == 1 and _is_large(body.pushes[0].payload):
            head = [zmq.Frame(frame) for frame in frames[:-1]]
            self._sockets[server].send_multipart([*head, zmq.Frame(frames[-1], copy=False)], copy=False)
        else:
            self._sockets[server].send_multipart(frames, copy=True)

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        if not self._is_usable():
            return None
        got = self._take_ready()
        if got is None:
            # Only what a new poll reports is ready: after the last look every socket was empty.
            self._ready.extend(
                self._index[socket] for socket, _ in self._poller.poll(max(0, int(timeout * 1000)))
            )
            got = self._take_ready()
        return got

    def _take_ready(self) -> tuple[int, m.Reply] | None:
        """Take one reply from the sockets that had some, in turn, so that no server is starved."""
        while self._ready:
            server = self._ready[0]
            try:
                frames = self._sockets[server].recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._ready.popleft()
                continue
            self._ready.rotate(-1)
            self._answered.add(server)
            return server, decode_reply(frames)
        return None

    def describe(self, server: int) -> str:
        return f"server {server} ({self._addresses[server]})"

    def last_sign(self, server: int) -> float:
        return self._heartbeats.heard[server] if self._heartbeats is not None else 0.0

    def start_heartbeats(self, sessions: Sequence[tuple[int, int]]) -> None:
        self._heartbeats = _Heartbeats(self._context, self._addresses, sessions)

    def close(self) -> None:
        if not self._is_usable():
            return
        self._is_closed = True
        if self._heartbeats is not None:
            self._heartbeats.stop()
        for server, socket in enumerate(self._sockets):
            # What was meant for a server that never answered is not worth waiting for.
            socket.close(linger=_LINGER_MS if server in self._answered else 0)
        self._context.term()

    def _is_usable(self) -> bool:
        return not self._is_closed and os.getpid() == self._pid


class _Heartbeats:
    """A thread with sockets of its own, because ZeroMQ sockets belong to one thread."""

    def __init__(self, context: Any, addresses: Sequence[str], sessions: Sequence[tuple[int, int]]) -> None:
        self._context = context
        self._addresses = list(addresses)
        self._frames = [
            encode_request(m.Request(run, session, 0, m.Heartbeat())) for run, session in sessions
        ]
        self.heard = [0.0] * len(self._addresses)
        """When each server last answered, on the monotonic clock."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        sockets = [_dealer(self._context, address, queue=2) for address in self._addresses]
        try:
            while not self._stop.wait(HEARTBEAT_INTERVAL):
                for server, socket in enumerate(sockets):
                    while socket.poll(
                        0
                    ):  # whatever it says: that it lost our session, the main thread will find out
                        socket.recv_multipart()
                        self.heard[server] = time.monotonic()
                    with suppress(zmq.Again):  # the server is away; there is nothing to queue up for it
                        socket.send_multipart(self._frames[server], zmq.NOBLOCK)
        finally:
            for socket in sockets:
                socket.close(linger=0)


def _dealer(context: Any, address: str, queue: int = 0) -> Any:
    """A connected socket that queues up to `queue` messages in each direction; 0 means any number."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
    socket.connect(address)
    return socket


def _is_large(payload: m.Payload) -> bool:
    return isinstance(payload, Tensor) and payload.nbytes >= SENT_ALONE
