"""The store side of systemd's file descriptor store, for servers that a test kills and starts again."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.forks import ROOT, Fork, fork_server
from tests.support.limits import LIMIT

_FIRST = 3
"""The first descriptor that a server is passed."""


class Supervisor:
    """Keeps descriptors of one server, and starts it with them. Use `supervising`.

    Attributes:
        kept: (name, descriptor), in the order in which they came.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[str, int]] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._null = open(os.devnull, "rb")  # noqa: SIM115
        self._name = f"kvstore-test-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self._name}")
        self._has_read = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def environment(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": f"@{self._name}", "FDSTORE": "4096"}

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.kept]

    def start(self, *flags: str) -> tuple[Fork, str]:
        """Start a server with what is kept; return it, and its address, which is empty if it has ended."""
        self._read_all()
        end, ready = os.pipe()
        kept = list(self.kept)
        told = {"LISTEN_FDS": str(len(kept)), "LISTEN_FDNAMES": ":".join(name for name, _ in kept)}
        server = ["-m", "kvstore_server", "--durability", "process"]
        process = fork_server().start(
            [*server, "--ready-fd", str(_FIRST + len(kept)), *flags],
            {**os.environ, **self.environment, **(told if kept else {})},
            ROOT,
            [self._null.fileno(), self._log.fileno(), self._log.fileno()],
            stored=[*(fd for _, fd in kept), ready],
        )
        os.close(ready)
        with os.fdopen(end) as lines:
            return process, lines.readline().strip()

    def said(self) -> str:
        """What its servers have written."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"STOP=1", f"\0{self._name}")
        self._reader.join()
        self._socket.close()
        self._log.close()
        self._null.close()
        for _, fd in self.kept:
            os.close(fd)

    def _read_all(self) -> None:
        """Wait until what a server that has ended had sent is kept."""
        self._has_read.clear()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"READ=1", f"\0{self._name}")
        assert self._has_read.wait(LIMIT)

    def _read(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
            told = dict(line.split("=", 1) for line in data.decode().split("\n"))
            if "STOP" in told:
                return
            if "READ" in told:
                self._has_read.set()
                continue
            if told.get("FDSTORE") == "1":
                self.kept += [(told["FDNAME"], fd) for fd in fds]
                continue
            if told.get("FDSTOREREMOVE") == "1":
                gone = [one for one in self.kept if one[0] == told["FDNAME"]]
                self.kept = [one for one in self.kept if one not in gone]
                fds += [fd for _, fd in gone]
            for fd in fds:
                os.close(fd)


@contextmanager
def supervising() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    try:
        yield supervisor
    finally:
        supervisor.close()
