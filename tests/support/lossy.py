"""Networks with faults: proxies in front of a server that lose messages by chance, or cut connections."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

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
            for ready, _ in poller.poll(50):
                frames = ready.recv_multipart()
                if ready is not self._front:
                    if self._passes():
                        self._front.send_multipart([peers[ready], *frames])
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
        for one in (self._front, *backs.values()):
            one.close(linger=0)

    def _passes(self) -> bool:
        if self._random.random() >= self.loss:
            return True
        self.lost += 1
        return False


class CuttingProxy:
    """Stands between workers and one server at the level of TCP, and cuts all connections when it is told to.

    Args:
        server: The address of the server.
    """

    def __init__(self, server: str) -> None:
        self.made = 0
        """How many connections there were so far."""
        self._server = urlsplit(server)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection that is open now, in the middle of whatever is on its way."""
        with self._lock:
            for end in self._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                worker, _ = self._listener.accept()
                server = socket.create_connection((self._server.hostname, self._server.port))
                with self._lock:
                    self._open += [worker, server]
                    self.made += 1
                for source, target in ((worker, server), (server, worker)):
                    threading.Thread(target=_forward, args=(source, target), daemon=True).start()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()
