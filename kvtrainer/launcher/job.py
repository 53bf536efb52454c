"""The life of a launched job: servers, then workers, then the orderly end of all of them.

`Launcher.run` reads from top to bottom; wherever it waits, it runs the event loop. The first failure, or signal,
decides the exit code, and everything after it is about leaving nothing behind.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore_server.errors import ConfigurationError
from kvtrainer.env import DEAD_AFTER, NUM_WORKERS, RANK, SERVERS, parse_address, read_timeout
from kvtrainer.launcher.guardian import KILL_WAIT, Guardian, environment
from kvtrainer.launcher.hosts import Remote, RemoteChild, without_address
from kvtrainer.launcher.processes import Child, Events, Put

_LAST_OUTPUT_WAIT = 1.0
_MAX_READY_LINE = 1024
_TO_REPORT = 5.0
"""Seconds that processes need to end with a traceback, once they know that another one is dead."""


@dataclass(frozen=True)
class Limits:
    """How long the launcher of a job waits, in seconds."""

    start: float = 60.0
    """For all servers to be ready."""
    linger: float = 2.0
    """After the first failure, for the others to report it in their own words."""
    linger_unheard: float = 2.0
    """The same where the others can only find out by silence: a server is gone, or a worker that could say nothing."""
    grace: float = 5.0
    """Between SIGTERM and SIGKILL."""


def until_noticed(environ: Mapping[str, str]) -> float:
    """Return the seconds in which processes notice a silent death and say so, as this environment sets them.

    Raises:
        ConfigurationError: KVSTORE_DEAD_AFTER is not a number above 0.
    """
    return read_timeout(environ, DEAD_AFTER) + _TO_REPORT


class Launcher:
    """Runs one job, on this machine or on others.

    Args:
        worker_command: What every worker runs; rank, count and servers are in its environment.
        num_workers: At least 1.
        server_commands: What each server runs, with `--ready-fd` and a file descriptor behind it, to which it must
            write its address and a newline when it is ready. Without any, KVSTORE_SERVERS stays unset.
        environ: The environment that all processes inherit.
        remote: The hosts on which they run; None means this one.
    """

    def __init__(
        self,
        worker_command: Sequence[str],
        num_workers: int,
        server_commands: Sequence[Sequence[str]],
        environ: Mapping[str, str],
        limits: Limits,
        remote: Remote | None = None,
    ) -> None:
        self._worker_command = worker_command
        self._num_workers = num_workers
        self._server_commands = server_commands
        self._limits = limits
        self._remote = remote
        self._linger = limits.linger
        self._mark = secrets.token_hex(16)
        kept = {k: v for k, v in environ.items() if k not in (RANK, NUM_WORKERS, SERVERS)}
        self._environ = environment({"PYTHONUNBUFFERED": "1", **kept}, self._mark)
        self._events = Events()
        self._servers: list[Child] = []
        self._workers: list[Child] = []
        self._addresses = Addresses(len(server_commands), self._events, lambda text: self._fail(1, text))
        self._code: int | None = None
        self._stopping = False

    def run(self) -> int:
        """Run the job and return its exit code; blocks until no process of it is left. Main thread only."""
        with self._events:
            self._guardian = Guardian(self._mark, self._limits.grace)
            try:
                self._start_and_work()
                self._stop()
            finally:
                self._signal_all(signal.SIGKILL)  # none is left, unless the lines above raised
                self._guardian.close()
                self._addresses.close()
            self._sweep()
        return self._code or 0

    # The phases.

    def _start_and_work(self) -> None:
        for index in range(len(self._server_commands)):
            if self._code is None:
                self._start_server(index)
        if not self._wait(self._addresses.are_complete, self._limits.start):
            late = ", ".join(map(str, self._addresses.missing()))
            within = f"within {self._limits.start:g} s; allow more with --start-timeout"
            self._fail(1, f"server {late} did not report an address {within}")
        for rank in range(self._num_workers):
            if self._code is None:
                self._start_worker(rank)
        self._wait(self._workers_done, None)

    def _stop(self) -> None:
        if self._code is not None:
            self._wait(self._no_worker_left, self._linger, until=self._was_signalled)
        self._stopping = True
        self._signal_all(signal.SIGTERM)
        self._wait(self._no_child_left, self._limits.grace, until=self._in_a_hurry)
        self._signal_all(signal.SIGKILL)
        self._wait(self._no_child_left, KILL_WAIT, until=_never)
        for server in self._servers:
            if server.returncode:
                self._fail(server.shell_code(), f"{server.describe_exit()} while it was stopping")

    def _sweep(self) -> None:
        """Wait until the guardian has ended what children left behind; print what is still in the pipes."""
        patience = self._limits.grace + KILL_WAIT + 1.0
        self._wait(self._guardian.closed, patience, until=_never)
        children = self._servers + self._workers
        self._wait(lambda: not any(c.streams for c in children), _LAST_OUTPUT_WAIT, until=_never)
        for child in children:
            for fd in list(child.streams):
                self._close_stream(child, fd)
        # A reader that is slow gets everything, as long as nobody asks us to end.
        output = self._events.output
        self._wait(lambda: output.target is None, None, until=self._was_signalled)
        self._wait(lambda: output.target is None, _LAST_OUTPUT_WAIT, until=_never)

    # Starting.

    def _start_server(self, index: int) -> None:
        command, put = self._server_commands[index], self._events.output.put
        if self._remote is None:
            with self._addresses.pipe_to(index) as fd:
                here = [*command, "--ready-fd", str(fd)]
                self._spawn(self._servers, "server", here, self._environ, put, (fd,))
        else:
            word = secrets.token_hex(16)
            there = self._remote.of_server(index, command, self._environ, word)
            hear = without_address(word, lambda text: self._addresses.note(index, text), put)
            self._spawn(self._servers, "server", there, self._environ, hear)

    def _start_worker(self, rank: int) -> None:
        environ = {**self._environ, RANK: str(rank), NUM_WORKERS: str(self._num_workers)}
        if self._server_commands:
            environ[SERVERS] = ",".join(self._addresses.in_order())
        command = self._worker_command
        if self._remote is not None:
            command = self._remote.of_worker(rank, command, environ)
        else:
            environ = environment(environ, "", self._num_workers)
        self._spawn(self._workers, "worker", command, environ, self._events.output.put)

    def _spawn(
        self,
        group: list[Child],
        role: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        put: Put,
        pass_fds: Sequence[int] = (),
    ) -> None:
        index = len(group)
        name, tag = f"{role} {index}", f"{role[0]}{index}"
        try:
            if self._remote is None:
                child = Child(name, tag, command, environ, put, pass_fds)
            else:
                hosts = self._remote.servers if role == "server" else self._remote.workers
                name += f" on {hosts[index].name}"
                child = RemoteChild(name, tag, command, environ, put)
        except (OSError, ValueError) as error:
            # As a shell does: 127 for a command that does not exist, 126 for one that cannot be run.
            self._fail(127 if isinstance(error, FileNotFoundError) else 126, f"cannot start {name}: {error}")
            return
        self._guardian.watch(child.pid)
        group.append(child)
        for fd in child.streams:
            self._events.add_reader(fd, lambda fd=fd: self._read(child, fd), pausable=True)  # type: ignore[misc]

    # While it runs.

    def _wait(
        self, done: Callable[[], bool], seconds: float | None, until: Callable[[], bool] | None = None
    ) -> bool:
        """Run the loop until `done`, or `until` (by default: the job has failed), or the time is over."""
        interrupted = until or (lambda: self._code is not None)
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        while not done() and not interrupted():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._events.turn(left)
            self._look()
        return done()

    def _look(self) -> None:
        """Draw the consequences of what one turn of the loop has brought."""
        if self._events.child_changed:
            self._events.child_changed = False
            self._reap()
            if not self._stopping and not self._guardian.ensure():
                self._fail(
                    1, "the guardian process keeps dying, and a killed launcher would leave processes behind"
                )
        signals = self._events.stop_signals
        if signals:
            self._fail(128 + signals[0], f"received {signals[0].name}")
        error = self._events.write_error
        if error is not None:
            self._fail(128 + signal.SIGPIPE, f"cannot write the output: {error.strerror}")

    def _reap(self) -> None:
        gone = [child for child in self._alive() if child.reap()]
        for child in gone:
            self._guardian.forget_if_empty(child.pid)
            for fd, stream in list(child.streams.items()):
                if not stream.drain():
                    self._close_stream(child, fd)
        if self._stopping or (self._workers_done() and not any(w.returncode for w in self._workers)):
            return
        # When both exited since the last look, the server is the likelier cause.
        for child in sorted(gone, key=lambda child: child not in self._servers):
            if child in self._servers and self._servers.index(child) in self._addresses.missing():
                self._fail(1, f"{child.describe_exit()} before it was ready")
            elif child in self._servers:
                text = f"{child.describe_exit()} before the workers were done"
                self._fail(child.shell_code() or 1, text, was_unheard=True)
            elif child.returncode:
                self._fail(child.shell_code(), child.describe_exit(), was_unheard=child.was_killed())

    def _read(self, child: Child, fd: int) -> None:
        if not child.streams[fd].read():
            self._close_stream(child, fd)

    def _close_stream(self, child: Child, fd: int) -> None:
        self._events.remove_reader(fd)
        child.close_stream(fd)

    def _fail(self, code: int, text: str, was_unheard: bool = False) -> None:
        """Note the first failure and say so; later ones are its consequences."""
        if self._code is None:
            self._code = code
            suffix = "; stopping the others" if self._alive() else ""
            if was_unheard and self._limits.linger_unheard > self._linger and not self._no_worker_left():
                self._linger = self._limits.linger_unheard
                suffix += f", which get up to {self._linger:g} s to notice"
            self._events.output.put(2, "kvlaunch: ", f"{text}{suffix}".encode())

    def _was_signalled(self) -> bool:
        return bool(self._events.stop_signals)

    def _in_a_hurry(self) -> bool:
        """Say whether the user pressed Ctrl-C once more, while the job was being stopped for a signal."""
        signals = self._events.stop_signals
        return len(signals) > 1 and signals[-1] == signal.SIGINT

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self._alive():
            child.signal(number)

    def _alive(self) -> list[Child]:
        return [child for child in self._servers + self._workers if child.returncode is None]

    def _no_child_left(self) -> bool:
        return not self._alive()

    def _no_worker_left(self) -> bool:
        return all(worker.returncode is not None for worker in self._workers)

    def _workers_done(self) -> bool:
        return len(self._workers) == self._num_workers and self._no_worker_left()


class Addresses:
    """Where the servers listen, as they report it when they are ready; `fail` is told what is wrong with a report."""

    def __init__(self, count: int, events: Events, fail: Callable[[str], None]) -> None:
        self._count = count
        self._events = events
        self._fail = fail
        self._known: dict[int, str] = {}
        self._unread: set[int] = set()
        """Pipes of servers that have not reported an address yet."""

    def are_complete(self) -> bool:
        return not self.missing()

    def missing(self) -> list[int]:
        return [index for index in range(self._count) if index not in self._known]

    def in_order(self) -> list[str]:
        """All of them, by index; complete ones only."""
        return [self._known[index] for index in range(self._count)]

    @contextmanager
    def pipe_to(self, index: int) -> Iterator[int]:
        """Open a file descriptor within the block for one server, which writes its address and a newline."""
        reading, writing = os.pipe()
        try:
            yield writing
        finally:
            os.close(writing)
        self._unread.add(reading)
        received = bytearray()
        self._events.add_reader(reading, lambda: self._read(index, reading, received), pausable=False)

    def note(self, index: int, text: str) -> None:
        """Take down what one server reported."""
        try:
            self._known[index] = parse_address(text)
        except ConfigurationError as error:
            self._fail(f"server {index} did not report its address: {error}")

    def close(self) -> None:
        for fd in list(self._unread):
            self._close_pipe(fd)

    def _read(self, index: int, fd: int, received: bytearray) -> None:
        data = os.read(fd, _MAX_READY_LINE)
        received += data
        if data and b"\n" not in received and len(received) < _MAX_READY_LINE:
            return
        self._close_pipe(fd)
        if received:  # else it has exited, which is reported as that
            self.note(index, received.decode(errors="replace").partition("\n")[0])

    def _close_pipe(self, fd: int) -> None:
        self._unread.discard(fd)
        self._events.remove_reader(fd)
        os.close(fd)


def _never() -> bool:
    return False
