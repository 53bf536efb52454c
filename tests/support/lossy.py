"""A network that loses messages: a proxy in front of a server that forwards some, by chance with a fixed seed."""

from __future__ import annotations

import random
import threading
from typing import Any

import zmq


class LossyProxy:
    """Stands between workers and one server, and loses a share of the messages in both directions.

    To the server each of its connections is the worker's socket for which it stands.

    Args:
        server: The address of the server.
        loss: The share of messages that get lost.
        seed: Of the choice.
    """

    def __init__(self, server: str, loss: float, seed: int) -> None:
        self.loss = loss
        self.lost = 0
        """How many messages it has dropped so far."""
        self._server = server
        self._random = random.Random(seed)
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind("tcp://127.0.0.1:0")
        self.address = str(self._front.getsockopt_string(zmq.LAST_ENDPOINT))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        backs: dict[bytes, Any] = {}
        peers: dict[Any, bytes] = {}
        while not self._stop.is_set():
            for socket, _ in poller.poll(50):
                frames = socket.recv_multipart()
                if socket is not self._front:
                    if self._passes():
                        self._front.send_multipart([peers[socket], *frames])
                    continue
                peer, *request = frames
                if peer not in backs:
                    backs[peer] = self._context.socket(zmq.DEALER)
                    backs[peer].setsockopt(zmq.ROUTING_ID, peer)
                    backs[peer].connect(self._server)
                    peers[backs[peer]] = peer
                    poller.register(backs[peer], zmq.POLLIN)
                if self._passes():
                    backs[peer].send_multipart(request)
        for socket in (self._front, *backs.values()):
            socket.close(linger=0)

    def _passes(self) -> bool:
        if self._random.random() >= self.loss:
            return True
        self.lost += 1
        return False
