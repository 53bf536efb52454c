"""Networks with faults: proxies in front of a server that lose messages by chance, or disturb connections."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import zmq

from tests.support.limits import LIMIT

TO_SERVER, TO_WORKER = "to the server", "to the worker"
BOTH = (TO_SERVER, TO_WORKER)


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


class LinkProxy:
    """Stands between workers and one server at the level of TCP, and disturbs all connections when it is told to.

    Args:
        server: The address of the server.
    """

    def __init__(self, server: str) -> None:
        self.made = 0
        """How many connections there were so far."""
        self.held = 0
        """How many times bytes have had to wait so far."""
        self._server = urlsplit(server)
        self._passes = {way: threading.Event() for way in BOTH}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self.heal()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection that is open now, in the middle of whatever is on its way."""
        with self._lock:
            for end in self._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def hold(self, *ways: str) -> None:
        """Hold back what is sent from now on, and close nothing, as when a cable is pulled or packets are dropped."""
        for way in ways:
            self._passes[way].clear()

    def heal(self) -> None:
        """Let what was held back arrive, as TCP would send it again."""
        for event in self._passes.values():
            event.set()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.heal()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                worker, _ = self._listener.accept()
                server = socket.create_connection((self._server.hostname, self._server.port))
                with self._lock:
                    self._open += [worker, server]
                    self.made += 1
                for way, source, target in ((TO_SERVER, worker, server), (TO_WORKER, server, worker)):
                    threading.Thread(target=self._forward, args=(way, source, target), daemon=True).start()

    def _forward(self, way: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._passes[way].is_set():
                    self.held += 1
                    self._passes[way].wait(LIMIT)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()
