"""The life of a launched job: servers, then workers, then the orderly end of all of them; on this host or on several.

`Launcher.run` reads from top to bottom; wherever it waits, it runs the event loop. The first failure, or signal,
decides the exit code, and everything after it is about leaving nothing behind.

A host file says which process runs on which host; it is started there over ssh. Workers: every host, in the order of
the file, takes as many consecutive ranks as it has slots (1 unless the file says otherwise); when all slots are taken,
the first host is next again. Servers: one per host in the order of the file, whatever its slots, then again from the
first.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvstore_server.check import is_loopback
from kvstore_server.errors import ConfigurationError
from kvtrainer.common.env import Topology, numeric_host, parse_address, tcp_address
from kvtrainer.jobs.guardian import GUARDIAN_DIES, KILL, TERMINATE, end_with_parent, environment
from kvtrainer.jobs.processes import LAST_OUTPUT_WAIT, Addresses, Child, Events, ProcessGroup, Put

MAX_SLOTS = 4096
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=3")
_PASSED = ("KVSTORE_", "MALLOC_")
_PASSED_NAMES = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")
# A name never begins with a dash, which ssh would take for an option.
_LINE = re.compile(
    r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])"
    r"(?:\s+slots\s*=\s*(?P<slots>[0-9]+)|:(?P<number>[0-9]+))?"
)


@dataclass(frozen=True)
class Host:
    """One line of a host file: the user to log in as, if any is named, the host, and its slots for workers."""

    user: str
    name: str
    slots: int

    @property
    def target(self) -> str:
        """The destination, as ssh is given it."""
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hosts(text: str, path: str) -> list[Host]:
    """Return the hosts of a file of `path` that has this text, in order; a host may have several lines.

    Each line is `HOST`, `HOST slots=N` or `HOST:N`, where HOST may be `USER@HOST` and an IPv6 address is in brackets;
    `#` begins a comment.

    Raises:
        ConfigurationError: a line is none of these, or there is no host at all.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.partition("#")[0].strip()
        if not stripped:
            continue
        match = _LINE.fullmatch(stripped)
        slots = int((match["slots"] or match["number"] or "1")[:9]) if match else 0
        if match is None or not 1 <= slots <= MAX_SLOTS:
            raise ConfigurationError(
                f"{path}, line {number}: {stripped!r:.80} is not HOST, HOST slots=N or HOST:N with N in 1..{MAX_SLOTS}"
            )
        hosts.append(Host((match["user"] or "").rstrip("@"), match["name"].strip("[]"), slots))
    if not hosts:
        raise ConfigurationError(f"{path} names no host; write one per line")
    return hosts


def place_workers(hosts: Sequence[Host], count: int) -> list[Host]:
    """Return the host of each rank."""
    slots = [host for host in hosts for _ in range(host.slots)]
    return [slots[rank % len(slots)] for rank in range(count)]


def place_servers(hosts: Sequence[Host], count: int) -> list[Host]:
    """Return the host of each server, by its index."""
    return [hosts[index % len(hosts)] for index in range(count)]


def bind_addresses(servers: Sequence[Host], is_public: bool) -> list[str]:
    """Return for each server a tcp://host:0 to listen on, which all hosts reach.

    Args:
        servers: Their hosts.
        is_public: Whether any process of the job runs on another machine than the launcher's.

    Raises:
        ConfigurationError: the address of a host cannot be found, or is one that other hosts cannot reach.
    """
    addresses = [numeric_host(host.name) if is_public else "127.0.0.1" for host in servers]
    for host, address in zip(servers, addresses, strict=True):
        if is_public and is_loopback(address):
            raise ConfigurationError(
                f"host {host.name} has the address {address} here, which other hosts cannot reach; write the address "
                "into the host file under which they do"
            )
    return [tcp_address(address, 0) for address in addresses]


@dataclass(frozen=True)
class Remote:
    """The hosts of a job's processes, and the commands that start them there.

    Args:
        workers, servers: The host of each.
        grace: Seconds between SIGTERM and SIGKILL for what is left when the connection ends.
        ssh: The program, with arguments of its own.
        names: Environment variables that are passed on beside KVSTORE_… and the number of threads.
        directory: Where commands run on every host.
    """

    workers: Sequence[Host]
    servers: Sequence[Host]
    grace: float
    ssh: Sequence[str] = ("ssh",)
    names: Sequence[str] = ()
    directory: str = field(default_factory=os.getcwd)

    def host_of(self, role: str, index: int) -> Host:
        """Return the host of a worker or server."""
        return (self.workers if role == "worker" else self.servers)[index]

    def local_rank(self, rank: int) -> int:
        """Return which worker of its host the one of a rank is."""
        target = self.workers[rank].target
        return sum(other.target == target for other in self.workers[:rank])

    def command(self, role: str, index: int, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """Return the ssh command that runs a worker or server; cores are divided among the workers of a host."""
        host = self.host_of(role, index)
        share = sum(other.target == host.target for other in self.workers) if role == "worker" else 0
        passed = [
            f"{name}={value}"
            for name, value in environ.items()
            if name.startswith(_PASSED) or name in _PASSED_NAMES or name in self.names
        ]
        program = [sys.executable, "-m", "kvtrainer.jobs.guardian"]
        guardian = [*program, "--grace", f"{self.grace:g}", "--share", str(share), "--"]
        line = shlex.join(["env", *passed, *guardian, *command])
        options = [part for option in _OPTIONS for part in ("-o", option)]
        return [*self.ssh, *options, host.target, f"cd {shlex.quote(self.directory)} && exec {line}"]


class RemoteChild(Child):
    """The local end of a process on another host: signals travel over its standard input."""

    stdin_kind = subprocess.PIPE
    _was_killed = False

    def signal(self, number: signal.Signals) -> None:
        """Pass SIGTERM or SIGKILL on; where SIGKILL was passed on before, end the connection itself."""
        if self.returncode is None and number == signal.SIGKILL and self._was_killed:
            super().signal(number)
        elif self.returncode is None:
            self._was_killed = number == signal.SIGKILL
            assert self.process.stdin is not None
            with suppress(OSError):  # the connection has ended
                os.write(self.process.stdin.fileno(), KILL if number == signal.SIGKILL else TERMINATE)

    def describe_exit(self) -> str:
        text = super().describe_exit()
        return f"{text} (which ssh also uses if it cannot connect)" if self.returncode == 255 else text


# ---------------------------------------------------------------- the job

TO_REPORT = 5.0
"""Seconds that processes need to end with a traceback, once they know that another one is dead."""


@dataclass(frozen=True)
class JobTimeouts:
    """How long the launcher of a job waits, in seconds."""

    start: float = 60.0
    """For all servers to be ready."""
    linger: float = 2.0
    """After the first failure, for the others to report it in their own words."""
    linger_unheard: float = 2.0
    """The same where the others can only find out by silence: a server is gone, or a worker that could say nothing."""
    grace: float = 5.0
    """Between SIGTERM and SIGKILL."""


class Launcher:
    """Runs one job, on this machine or on others.

    Args:
        worker_command: What every worker runs; rank, count and servers are in its environment.
        num_workers: At least 1.
        server_commands: What each server runs; when it is ready it must print a line with LISTENS and its address.
            Without any, KVSTORE_SERVERS stays unset.
        environ: The environment of all processes; see `inherited`.
        remote: The hosts on which they run; None means this one.
        viewer: What shows the job, here, given the servers' addresses as further arguments; the job goes on without it.
    """

    def __init__(
        self,
        worker_command: Sequence[str],
        num_workers: int,
        server_commands: Sequence[Sequence[str]],
        environ: Mapping[str, str],
        limits: JobTimeouts,
        remote: Remote | None = None,
        viewer: Sequence[str] = (),
    ) -> None:
        self._viewer_command = viewer
        self._worker_command = worker_command
        self._num_workers = num_workers
        self._server_commands = server_commands
        self._limits = limits
        self._remote = remote
        self._linger = limits.linger
        self._inherited = environ
        self._events = Events()
        self._servers: list[Child] = []
        self._workers: list[Child] = []
        self._viewers: list[Child] = []
        self._addresses = Addresses(self._events.output.put)
        self._code: int | None = None
        self._stopping = False

    def run(self) -> int:
        """Run the job and return its exit code; blocks until no process of it is left. Main thread only."""
        with self._events:
            self._group = ProcessGroup(self._events, self._limits.grace)
            self._environ = environment(self._inherited, self._group.mark)
            try:
                self._start_and_work()
            finally:
                self._stop()
            self._flush()
        return self._code or 0

    # The phases.

    def _start_and_work(self) -> None:
        for index, command in enumerate(self._server_commands):
            put = self._addresses.put_of(index)
            self._spawn(self._servers, "server", command, self._environ, put)
        if not self._wait(lambda: not self._silent_servers(), self._limits.start):
            late = ", ".join(map(str, self._silent_servers()))
            within = f"within {self._limits.start:g} s; allow more with --start-timeout"
            self._fail(1, f"server {late} did not report an address {within}")
        servers: list[str] = []
        for index, text in sorted(self._addresses.found.items()):
            try:
                servers.append(parse_address(text))
            except ConfigurationError as error:
                self._fail(1, f"server {index} did not report its address: {error}")
        if servers and self._code is None:
            told = f"servers are ready; to look at them: kvtop {' '.join(servers)}"
            self._events.output.put(2, "kvlaunch: ", told.encode())
        if self._viewer_command:
            shown = [*self._viewer_command, *servers]
            self._spawn(self._viewers, "view", shown, self._environ, self._events.output.put)
        share = self._num_workers if self._remote is None else 0
        for rank in range(self._num_workers):
            local_rank = rank if self._remote is None else self._remote.local_rank(rank)
            place = Topology(rank, self._num_workers, tuple(servers)).as_variables(local_rank)
            environ = environment({**self._environ, **place}, "", share)
            self._spawn(self._workers, "worker", self._worker_command, environ, self._events.output.put)
        self._wait(self._workers_done, None)

    def _stop(self) -> None:
        """End all processes; after a failure workers first get a while to end in their own words."""
        if self._code is not None:
            self._wait(self._no_worker_left, self._linger, until=self._was_signalled)
        self._stopping = True
        self._group.end(partial(self._wait, until=_never), self._in_a_hurry)
        self._group.close_streams()
        for server in self._servers:
            if server.returncode:
                self._fail(server.shell_code(), f"{server.describe_exit()} while it was stopping")

    def _flush(self) -> None:
        """Print what waits to be printed. A slow reader gets everything, as long as nobody asks us to end."""
        output = self._events.output
        self._wait(lambda: output.target is None, None, until=self._was_signalled)
        self._wait(lambda: output.target is None, LAST_OUTPUT_WAIT, until=_never)

    # Starting.

    def _spawn(
        self, role_group: list[Child], role: str, command: Sequence[str], environ: Mapping[str, str], put: Put
    ) -> None:
        """Start the next process of a role, unless the job has failed."""
        if self._code is not None:
            return
        index = len(role_group)
        name, tag, kind = f"{role} {index}", f"{role[0]}{index}", Child
        if self._remote is not None and role_group is not self._viewers:
            name, kind = f"{name} on {self._remote.host_of(role, index).name}", RemoteChild
            command = self._remote.command(role, index, command, environ)
        try:
            child = kind(name, tag, command, environ, put, prepare=end_with_parent(os.getpid()))
        except (OSError, ValueError) as error:
            # As a shell does: 127 for a command that does not exist, 126 for one that cannot be run.
            self._fail(127 if isinstance(error, FileNotFoundError) else 126, f"cannot start {name}: {error}")
            return
        role_group.append(child)
        self._group.add(child)

    def _silent_servers(self) -> list[int]:
        return [index for index in range(len(self._server_commands)) if index not in self._addresses.found]

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
        self._explain(self._group.reap())
        if not self._stopping and not self._group.ensure_guardian():
            self._fail(1, GUARDIAN_DIES)
        signals = self._events.stop_signals
        if signals:
            self._fail(128 + signals[0], f"received {signals[0].name}")
        error = self._events.write_error
        if error is not None:
            self._fail(128 + signal.SIGPIPE, f"cannot write the output: {error.strerror}")

    def _explain(self, gone: Sequence[Child]) -> None:
        """Fail if one of the processes that have exited should not have."""
        if self._stopping or (self._workers_done() and not any(w.returncode for w in self._workers)):
            return
        # When both exited since the last look, the server is the likelier cause.
        for child in sorted(gone, key=lambda child: child not in self._servers):
            if child in self._servers and self._servers.index(child) in self._silent_servers():
                self._fail(1, f"{child.describe_exit()} before it was ready")
            elif child in self._servers:
                text = f"{child.describe_exit()} before the workers were done"
                self._fail(child.shell_code() or 1, text, was_unheard=True)
            elif child.returncode and child not in self._viewers:
                self._fail(child.shell_code(), child.describe_exit(), was_unheard=child.shell_code() > 128)

    def _fail(self, code: int, text: str, was_unheard: bool = False) -> None:
        """Note the first failure and say so; later ones are its consequences."""
        if self._code is None:
            self._code = code
            suffix = "; stopping the others" if self._group.alive else ""
            if was_unheard and self._limits.linger_unheard > self._linger and not self._no_worker_left():
                self._linger = self._limits.linger_unheard
                suffix += f", which get up to {self._linger:g} s to notice"
            self._events.output.put(2, "kvlaunch: ", f"{text}{suffix}".encode())

    def _was_signalled(self) -> bool:
        return bool(self._events.stop_signals)

    def _in_a_hurry(self) -> bool:
        """Say whether the user pressed Ctrl-C again while a signal was stopping the job."""
        signals = self._events.stop_signals
        return len(signals) > 1 and signals[-1] == signal.SIGINT

    def _no_worker_left(self) -> bool:
        return all(worker.returncode is not None for worker in self._workers)

    def _workers_done(self) -> bool:
        return len(self._workers) == self._num_workers and self._no_worker_left()


def _never() -> bool:
    return False
