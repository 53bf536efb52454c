"""Processes that start and end together, for a program that has work and threads of its own, such as a notebook.

`Launcher` has a process for itself and one loop. Here lines come through threads, nothing takes over signals, and no
Python code runs between fork and exec. A guardian ends the processes if their owner is gone, however it went.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from kvtrainer.env import parse_address
from kvtrainer.errors import ClusterError, ConnectTimeoutError
from kvtrainer.launcher.guardian import KILL_WAIT, Guardian, environment
from kvtrainer.launcher.processes import Child, inherited

_LAST_OUTPUT_WAIT = 1.0


class Group:
    """Processes of this host, in the order of their start; each of their lines goes to this program's `sys.stdout`.

    Args:
        grace: Seconds between SIGTERM and SIGKILL.
        first: Index of the first of them, which their lines begin with.
    """

    def __init__(self, grace: float, first: int = 0) -> None:
        self._grace = grace
        self._first = first
        self._mark = secrets.token_hex(16)
        self._guardian = Guardian(self._mark, grace)
        self._readers: list[threading.Thread] = []
        self.children: list[Child] = []

    @property
    def alive(self) -> list[Child]:
        return [child for child in self.children if child.returncode is None]

    def start(
        self,
        role: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        share: int,
        pass_fds: Sequence[int],
    ) -> None:
        """Start the next process; `environ` comes on top of this program's, and cores are divided by `share`.

        Raises:
            OSError: it cannot be started.
        """
        index = self._first + len(self.children)
        child = Child(
            f"{role} {index}",
            f"{role[0]}{index}",
            command,
            environment({**inherited(os.environ), **environ}, self._mark, share),
            _show,
            pass_fds,
        )
        self._guardian.watch(child.process.pid)
        self.children.append(child)
        for fd in list(child.streams):
            reader = threading.Thread(target=_pass_on, args=(child, fd), daemon=True)
            reader.start()
            self._readers.append(reader)

    def ensure_guardian(self) -> None:
        """Start another guardian if this one was killed.

        Raises:
            ClusterError: that has happened too often.
        """
        if not self._guardian.ensure():
            raise ClusterError(
                "the guardian process keeps dying, and this program, when killed, would leave processes behind"
            )

    def close(self) -> None:
        """End all processes, and what they have left behind; returns when nothing is left of them."""
        try:
            self._end(signal.SIGTERM, self._grace)
            self._end(signal.SIGKILL, KILL_WAIT)
        finally:
            self._guardian.close()
        deadline = time.monotonic() + self._grace + KILL_WAIT + 1.0
        while not self._guardian.closed() and time.monotonic() < deadline:
            time.sleep(0.01)
        deadline = time.monotonic() + _LAST_OUTPUT_WAIT
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def _end(self, number: signal.Signals, seconds: float) -> None:
        for child in self.alive:
            child.signal(number)
        deadline = time.monotonic() + seconds
        while self.alive and (left := deadline - time.monotonic()) > 0:
            exited(self.alive, left)


def exited(children: Collection[Child], seconds: float) -> list[Child]:
    """Wait for the first of running children to exit, at most so many seconds; return those that have."""
    poll = select.poll()
    pidfds = [os.pidfd_open(child.process.pid) for child in children]
    try:
        for fd in pidfds:
            poll.register(fd, select.POLLIN)
        poll.poll(1000 * seconds)
    finally:
        for fd in pidfds:
            os.close(fd)
    return [child for child in children if child.process.poll() is not None]


def start_servers(group: Group, commands: Sequence[Sequence[str]], seconds: float) -> tuple[str, ...]:
    """Start servers, given the command of each; return their addresses when all listen.

    Raises:
        ClusterError: one ended before it listened; its own lines say why.
        ConnectTimeoutError: one did not listen within so many seconds.
    """
    deadline = time.monotonic() + seconds
    ready: list[tuple[Child, int]] = []
    try:
        for command in commands:
            reading, writing = os.pipe()
            try:
                group.start("server", [*command, "--ready-fd", str(writing)], {}, 0, (writing,))
            finally:
                os.close(writing)
            ready.append((group.children[-1], reading))
        return tuple([_address(server, fd, deadline) for server, fd in ready])
    finally:
        for _, fd in ready:
            os.close(fd)


def end_of(child: Child) -> str:
    """Say how a process has ended that has not said so itself."""
    if child.returncode == -signal.SIGKILL:
        return f"{child.describe_exit()}, as the system does when memory runs out"
    if child.returncode == 0:
        return f"{child.describe_exit()} before its work was done"
    return child.describe_exit()


def _address(server: Child, ready: int, deadline: float) -> str:
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        raise ConnectTimeoutError(f"{server.name} did not listen in time; allow more with start_timeout=")
    address = os.read(ready, 4096).decode()
    if not address:
        exited([server], KILL_WAIT)
        raise ClusterError(f"{end_of(server)} before it listened")
    return parse_address(address)


def _pass_on(child: Child, fd: int) -> None:
    while child.streams[fd].read():
        pass
    child.close_stream(fd)


def _show(target: int, tag: str, line: bytes) -> None:
    """Write a line to where this program's output goes now, which in a notebook is no descriptor but a page."""
    stream = sys.stdout if target == 1 else sys.stderr
    with suppress(OSError, ValueError):  # nobody reads any more; the processes must not wait for that
        stream.write(f"{tag}{line.decode(errors='replace')}\n")
        stream.flush()
