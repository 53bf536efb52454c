"""A link between workers and one server that stays open and carries nothing, in one direction or in both."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit

from tests.support.limits import LIMIT

TO_SERVER, TO_WORKER = "to the server", "to the worker"
BOTH = (TO_SERVER, TO_WORKER)


class PartitionedLink:
    """Stands between workers and one server at the level of TCP, and holds back what is sent while it is cut.

    No connection is closed, as when a cable is pulled or a firewall drops packets. What was sent meanwhile arrives when
    the link heals, as TCP would send it again.

    Args:
        server: The address of the server.
    """

    def __init__(self, server: str) -> None:
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

    def cut(self, *ways: str) -> None:
        for way in ways:
            self._passes[way].clear()

    def heal(self) -> None:
        for event in self._passes.values():
            event.set()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for end in self._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self.heal()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                worker, _ = self._listener.accept()
                server = socket.create_connection((self._server.hostname, self._server.port))
                with self._lock:
                    self._open += [worker, server]
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
