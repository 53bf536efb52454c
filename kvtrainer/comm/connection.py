"""Sockets of a worker: one DEALER per server, and a second one per server for heartbeats.

The only file of the trainer that knows ZeroMQ. A process that was forked from the one that made a connection (a
DataLoader's worker, say) must leave it alone: sending is refused there, and closing does nothing.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from kvstore_server.errors import KVStoreError
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import MAX_FRAME, SENT_ALONE, decode_reply, encode_request
from kvstore_server.tcp import prepare, routing_id

HEARTBEAT_INTERVAL = 1.0
"""Seconds between two signs of life to every server."""
_LINGER_MS = 2000


class Connection:
    """A transport over ZeroMQ to the servers at `addresses`, in index order.

    Large payloads are sent from the caller's memory, which must not change until the request is answered.

    Args:
        addresses: Of the servers.
        water_mark: How many messages for a server may be on their way; the others queue here, where one of higher
            priority overtakes those of lower ones. 0: all are handed to the network at once, in order.
    """

    def __init__(self, addresses: Sequence[str], water_mark: int = 0) -> None:
        self.num_servers = len(addresses)
        self._addresses = list(addresses)
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._ids = [(routing_id(), routing_id()) for _ in addresses]
        """Of the socket for requests and of that for heartbeats, of each server."""
        self._sockets = [
            _dealer(self._context, address, own, sent=water_mark)
            for address, (own, _) in zip(addresses, self._ids, strict=True)
        ]
        self._may_queue = water_mark > 0
        self._queues: list[list[tuple[int, int, list[Any]]]] = [[] for _ in addresses]
        """For each server a heap of (-priority, number, frames) of what waits for its turn."""
        self._num_sent = 0
        self._index = {socket: server for server, socket in enumerate(self._sockets)}
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._ready: deque[int] = deque()
        self._answered: set[int] = set()
        self._heartbeats: _Heartbeats | None = None
        self._is_closed = False

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        """Queue a request without blocking. Raises KVStoreError in a process that was forked from the owner."""
        if os.getpid() != self._pid:
            raise KVStoreError(
                f"this connection belongs to process {self._pid}; process {os.getpid()} was forked from it and "
                "must make its own"
            )
        frames = encode_request(request)
        body = request.body
        if isinstance(body, m.Contribute) and len(body.payloads) == 1 and len(frames[-1]) >= SENT_ALONE:
            frames = [zmq.Frame(frame, copy=frame is not frames[-1]) for frame in frames]
        self._num_sent += 1
        heapq.heappush(self._queues[server], (-priority, self._num_sent, frames))
        self._flush(server)

    def _flush(self, server: int) -> None:
        """Hand a server's socket what it takes now, the most urgent messages first."""
        queue = self._queues[server]
        while queue:
            frames = queue[0][2]
            try:
                # What is no frame yet is small.
                self._sockets[server].send_multipart(
                    frames, zmq.NOBLOCK, copy=not isinstance(frames[0], zmq.Frame)
                )
            except zmq.Again:
                return
            heapq.heappop(queue)

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        """Wait up to `timeout` seconds for a reply of any server; meanwhile what queues for them goes out."""
        if self._is_closed or os.getpid() != self._pid:
            return None
        deadline = time.monotonic() + timeout
        while True:
            while self._ready:
                # One message of each socket that has some, in turn, so that no server is starved.
                server = self._ready.popleft()
                with suppress(zmq.Again):
                    frames = self._sockets[server].recv_multipart(zmq.NOBLOCK, copy=False)
                    self._answered.add(server)
                    return server, decode_reply(frames)
            pause = deadline - time.monotonic()
            if self._may_queue:
                for socket, queue in zip(self._sockets, self._queues, strict=True):
                    self._poller.modify(socket, zmq.POLLIN | (zmq.POLLOUT if queue else 0))
            for socket, event in self._poller.poll(max(0, int(1000 * pause))):
                server = self._index[socket]
                if event & zmq.POLLOUT:
                    self._flush(server)
                if event & zmq.POLLIN:
                    self._ready.append(server)
            if not self._ready and pause <= 0:
                return None

    def describe(self, server: int) -> str:
        return f"server {server} ({self._addresses[server]})"

    def last_sign(self, server: int) -> float:
        return self._heartbeats.heard[server] if self._heartbeats is not None else 0.0

    def sockets(self, server: int) -> tuple[bytes, ...]:
        return self._ids[server]

    def start_heartbeats(self, sessions: Sequence[tuple[int, int]]) -> None:
        places = [(address, own) for address, (_, own) in zip(self._addresses, self._ids, strict=True)]
        self._heartbeats = _Heartbeats(self._context, places, sessions)

    def close(self) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        if self._heartbeats is not None:
            self._heartbeats.stop()
        for server, socket in enumerate(self._sockets):
            if server in self._answered:
                self._drain(server)
            # What was meant for a server that never answered is not worth waiting for.
            socket.close(linger=_LINGER_MS if server in self._answered else 0)
        self._context.term()

    def _drain(self, server: int) -> None:
        """Give what still queues for a server a moment to leave."""
        deadline = time.monotonic() + _LINGER_MS / 1000
        while self._queues[server] and time.monotonic() < deadline:
            if self._sockets[server].poll(100, zmq.POLLOUT):
                self._flush(server)


class _Heartbeats:
    """A thread with sockets of its own, because ZeroMQ sockets belong to one thread."""

    def __init__(
        self, context: Any, places: Sequence[tuple[str, bytes]], sessions: Sequence[tuple[int, int]]
    ) -> None:
        self._context = context
        self._places = list(places)
        self._frames = [
            encode_request(m.Request(run, session, 0, m.Heartbeat())) for run, session in sessions
        ]
        self.heard = [0.0] * len(self._places)
        """When each server last answered, on the monotonic clock."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        sockets = [_dealer(self._context, *place, sent=2, received=2) for place in self._places]
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


def _dealer(context: Any, address: str, own: bytes, sent: int = 0, received: int = 0) -> Any:
    """A connected socket of that routing id, which queues up to so many messages each way; 0 means any number."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, own)
    socket.setsockopt(zmq.SNDHWM, sent)
    socket.setsockopt(zmq.RCVHWM, received)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    prepare(socket, address)
    socket.connect(address)
    return socket
