"""The lifetime of a launched job, on this host or several: servers start, then workers, then all are ended in order.

`JobLauncher.run` reads from top to bottom, and runs the event loop wherever it waits. The first failure or signal
decides the exit code. Whatever happens after it, no process is left behind. With restarts, the death of a worker is a
failure only when it has no restart left; servers are started again by supervisors of their own (`kvstore-server
--supervise`). If snapshots are written, a supervisor that is killed, or whose host is lost, is started again, too.

A host file assigns processes to hosts, where they are started over ssh. Workers: each host, in file order, gets as many
consecutive ranks as it has slots (1 by default), starting over when all slots are taken. Servers: one per host in file
order, regardless of slots, starting over as well.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from kvstore_server.check import is_loopback
from kvstore_server.errors import ConfigurationError
from kvstore_server.keys import KEYS
from kvtrainer.common.env import Topology, numeric_host, parse_address, tcp_address
from kvtrainer.jobs.guardian import GUARDIAN_DIES, KILL, TERMINATE, end_with_parent, guarded_environment
from kvtrainer.jobs.job_keys import JobKeys
from kvtrainer.jobs.processes import (
    LAST_OUTPUT_WAIT,
    ChildProcess,
    ProcessAddresses,
    ProcessEvents,
    ProcessGroup,
    Put,
)
from kvtrainer.jobs.restarted_ranks import RestartedRanks
from kvtrainer.jobs.worker_memories import WorkerMemories

MAX_SLOTS = 4096
SSH_FAILED = 255
"""The exit code of ssh when it cannot connect, or the connection is lost."""
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=3")
_PASSED = ("KVSTORE_", "MALLOC_")
_PASSED_NAMES = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")
# Names must not begin with a dash, which ssh would take for an option.
_LINE = re.compile(
    r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])"
    r"(?:\s+slots\s*=\s*(?P<slots>[0-9]+)|:(?P<number>[0-9]+))?"
)


@dataclass(frozen=True)
class JobHost:
    """One line of a host file: login user (may be empty), host name, and slots for workers."""

    user: str
    name: str
    slots: int

    @property
    def target(self) -> str:
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hosts(text: str, path: str) -> list[JobHost]:
    """Return the hosts in a host file's text: lines of `HOST`, `HOST slots=N` or `HOST:N`, and comments after `#`.

    HOST may be `USER@HOST`, and IPv6 addresses are in brackets. A host may have several lines. Raises
    ConfigurationError.
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
        hosts.append(JobHost((match["user"] or "").rstrip("@"), match["name"].strip("[]"), slots))
    if not hosts:
        raise ConfigurationError(f"{path} names no host; write one per line")
    return hosts


def place_workers(hosts: Sequence[JobHost], count: int) -> list[JobHost]:
    slots = [host for host in hosts for _ in range(host.slots)]
    return [slots[rank % len(slots)] for rank in range(count)]


def place_servers(hosts: Sequence[JobHost], count: int) -> list[JobHost]:
    return [hosts[index % len(hosts)] for index in range(count)]


def bind_addresses(servers: Sequence[JobHost], is_public: bool) -> list[str]:
    """Return a tcp://host:0 for each server that all hosts can reach; loopback unless `is_public`.

    Raises ConfigurationError if a host's address cannot be resolved, or cannot be reached by others.
    """
    addresses = [numeric_host(host.name) if is_public else "127.0.0.1" for host in servers]
    for host, address in zip(servers, addresses, strict=True):
        if is_public and is_loopback(address):
            raise ConfigurationError(
                f"host {host.name} has the address {address} here, which other hosts cannot reach; write an address "
                "into the host file that they can reach"
            )
    return [tcp_address(address, 0) for address in addresses]


@dataclass(frozen=True)
class Remote:
    """The hosts of a job's processes, and the commands that start them there.

    Args:
        workers, servers: The host of each.
        grace: Seconds between SIGTERM and SIGKILL for what is left when the connection ends.
        ssh: The program and its arguments.
        names: Environment variables to pass on besides KVSTORE_… and the number of threads.
        directory: Working directory on every host.
    """

    workers: Sequence[JobHost]
    servers: Sequence[JobHost]
    grace: float
    ssh: Sequence[str] = ("ssh",)
    names: Sequence[str] = ()
    directory: str = field(default_factory=os.getcwd)

    def host_of(self, role: str, index: int) -> JobHost:
        return (self.workers if role == "worker" else self.servers)[index]

    def local_rank(self, rank: int) -> int:
        target = self.workers[rank].target
        return sum(other.target == target for other in self.workers[:rank])

    def command(
        self,
        role: str,
        index: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        has_keys: bool = False,
    ) -> list[str]:
        """Return the ssh command for a worker or server. The cores of a host are divided among its workers.

        Keys, if it has any, come through its standard input.
        """
        host = self.host_of(role, index)
        share = sum(other.target == host.target for other in self.workers) if role == "worker" else 0
        passed = [
            f"{name}={value}"
            for name, value in environ.items()
            if (name.startswith(_PASSED) or name in _PASSED_NAMES or name in self.names)
            and not (has_keys and name == KEYS)
        ]
        program = [sys.executable, "-m", "kvtrainer.jobs.guardian"]
        guardian = [*program, "--grace", f"{self.grace:g}", "--share", str(share)]
        guardian += ["--keys", "--"] if has_keys else ["--"]
        line = shlex.join(["env", *passed, *guardian, *command])
        options = [part for option in _OPTIONS for part in ("-o", option)]
        return [*self.ssh, *options, host.target, f"cd {shlex.quote(self.directory)} && exec {line}"]


class RemoteJobProcess(ChildProcess):
    """The local end of a process on another host. Signals are sent through its standard input."""

    stdin_kind = subprocess.PIPE
    _was_killed = False

    def give_keys(self, files: Mapping[str, str]) -> None:
        """Send the files of its directory of keys; the guardian there waits for them."""
        assert self.process.stdin is not None
        left = json.dumps(files).encode() + b"\n"
        with suppress(OSError):  # the connection has ended
            while left:
                left = left[os.write(self.process.stdin.fileno(), left) :]

    def signal(self, number: signal.Signals) -> None:
        """Forward SIGTERM or SIGKILL. A second SIGKILL ends the connection itself."""
        if self.returncode is None and number == signal.SIGKILL and self._was_killed:
            super().signal(number)
        elif self.returncode is None:
            self._was_killed = number == signal.SIGKILL
            assert self.process.stdin is not None
            # OSError: the connection has ended.
            with suppress(OSError):
                os.write(self.process.stdin.fileno(), KILL if number == signal.SIGKILL else TERMINATE)

    def describe_exit(self) -> str:
        text = super().describe_exit()
        return f"{text} (which ssh also uses if it cannot connect)" if self.returncode == SSH_FAILED else text


# ---------------------------------------------------------------- the job

TO_REPORT = 5.0
"""Seconds that processes need to end with a traceback once they know that another one is dead."""


@dataclass(frozen=True)
class JobTimeouts:
    """How long the launcher waits, in seconds."""

    start: float = 60.0
    """For all servers to be ready."""
    linger: float = 2.0
    """After the first failure, for the others to report their own errors."""
    linger_unheard: float = 2.0
    """The same if others can notice only by silence: a server is gone, or a worker was killed."""
    grace: float = 5.0
    """Between SIGTERM and SIGKILL."""


class JobLauncher:
    """Runs one job, on this machine or on others.

    Args:
        worker_command: Command of every worker. Rank, number of workers and servers are in its environment.
        num_workers: At least 1.
        server_commands: Command of each server, which prints LISTENS and its address when it is ready. If there are
            none, KVSTORE_SERVERS stays unset.
        environ: Environment of all processes; see `inherited_environment`.
        remote: The hosts to run on; None for this one.
        viewer: Command that shows the job here, given the servers' addresses as further arguments. It may fail.
        restarts: How often each worker is started again when it is killed or fails. Servers have supervisors for that.
        server_restarts: How often each server, or its supervisor, is started again at the same address when it is
            killed, which loses its memory; for servers that write snapshots.
        elastic: The least and the most workers, if the job goes on without workers that have failed; all are started.
        backup_workers: How many of them each step may do without.
        keys: The keys of the job; None: it has no servers.
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
        restarts: int = 0,
        server_restarts: int = 0,
        elastic: tuple[int, int] | None = None,
        backup_workers: int = 0,
        keys: JobKeys | None = None,
    ) -> None:
        self._keys = keys
        self._viewer_command = viewer
        self._worker_command = worker_command
        self._num_workers = num_workers
        self._server_commands = server_commands
        self._limits = limits
        self._remote = remote
        self._linger = limits.linger
        self._inherited = environ
        self._events = ProcessEvents()
        self._servers: list[ChildProcess] = []
        self._workers: dict[int, ChildProcess] = {}
        self._viewers: list[ChildProcess] = []
        self._restarted = RestartedRanks(num_workers, restarts)
        self._restarted_servers = RestartedRanks(len(server_commands), server_restarts)
        self._memories = WorkerMemories(num_workers if restarts and remote is None else 0)
        self._elastic, self._backup_workers = elastic, backup_workers
        self._lost: set[str] = set()
        """Names of the workers that the job goes on without."""
        self._topology = Topology(0, num_workers, ())
        self._addresses = ProcessAddresses(self._events.output.put)
        self._code: int | None = None
        self._stopping = False

    def run(self) -> int:
        """Run the job and return its exit code. Blocks until none of its processes is left. Main thread only."""
        with self._events:
            keys = self._keys
            remove = keys.directory if keys is not None and keys.is_own else ""
            self._group = ProcessGroup(self._events, self._limits.grace, remove)
            inherited = self._inherited if keys is None else {**self._inherited, **keys.environment}
            self._environ = guarded_environment(inherited, self._group.mark)
            try:
                self._start_and_work()
            finally:
                self._stop()
                self._memories.close()
            self._flush()
        return self._code or 0

    # The phases.

    def _start_and_work(self) -> None:
        # 1. Start the servers and wait for their addresses.
        for index, command in enumerate(self._server_commands):
            put = self._addresses.put_of(index)
            self._servers += self._spawn("server", index, command, self._environ, put)
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
        # 2. Announce the addresses, and start the viewer.
        if servers and self._code is None:
            if self._keys is not None:
                self._keys.note_servers(servers)
            told = f"servers are ready; to look at them: kvtop {' '.join(servers)}"
            self._events.output.put(2, "kvlaunch: ", told.encode())
        if self._viewer_command:
            shown = [*self._viewer_command, *servers]
            self._viewers += self._spawn("view", 0, shown, self._environ, self._events.output.put)
        # 3. Start the workers and wait for the end.
        self._topology = Topology(0, self._num_workers, tuple(servers), self._elastic, self._backup_workers)
        for rank in range(self._num_workers):
            self._start_worker(rank)
        self._wait(self._workers_done, None)

    def _stop(self) -> None:
        """End all processes. After a failure workers first get some time to report their own errors."""
        if self._code is not None:
            self._wait(self._no_worker_left, self._linger, until=self._was_signalled)
        self._stopping = True
        self._group.end(partial(self._wait, until=_never_stop), self._in_a_hurry)
        self._group.close_streams()
        for server in self._servers:
            if server.returncode:
                self._fail(server.shell_code(), f"{server.describe_exit()} while it was stopping")

    def _flush(self) -> None:
        """Print the remaining output. A slow reader gets all of it, unless a signal asks the job to end."""
        output = self._events.output
        self._wait(lambda: output.target is None, None, until=self._was_signalled)
        self._wait(lambda: output.target is None, LAST_OUTPUT_WAIT, until=_never_stop)

    # Starting.

    def _start_worker(self, rank: int) -> None:
        """Start a worker, for the first time or again; its place is the same."""
        share = self._num_workers if self._remote is None else 0
        local_rank = rank if self._remote is None else self._remote.local_rank(rank)
        place = replace(self._topology, rank=rank).as_variables(local_rank)
        own = {
            **self._environ,
            **place,
            **self._restarted.environment(rank),
            **self._memories.environment(rank),
        }
        environ, fds = guarded_environment(own, "", share), self._memories.descriptors(rank)
        for worker in self._spawn(
            "worker", rank, self._worker_command, environ, self._events.output.put, fds
        ):
            self._workers[rank] = worker

    def _restart_server(self, index: int) -> None:
        """Start a server again, without its memory, at the address that workers know."""
        command = [*self._server_commands[index], "--bind", self._topology.servers[index]]
        for server in self._spawn("server", index, command, self._environ, self._addresses.put_again):
            self._servers[index] = server

    def _spawn(
        self,
        role: str,
        index: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        put: Put,
        pass_fds: Sequence[int] = (),
    ) -> list[ChildProcess]:
        """Start a process. Return it, or nothing if the job has failed, which it does if this one cannot be started."""
        if self._code is not None:
            return []
        name, tag, kind = f"{role} {index}", f"{role[0]}{index}", ChildProcess
        if self._remote is not None and role != "view":
            name, kind = f"{name} on {self._remote.host_of(role, index).name}", RemoteJobProcess
            command = self._remote.command(role, index, command, environ, self._has_keys)
        try:
            child = kind(name, tag, command, environ, put, pass_fds, prepare=end_with_parent(os.getpid()))
        except (OSError, ValueError) as error:
            # As a shell does: 127 for a command that does not exist, 126 for one that cannot be run.
            self._fail(127 if isinstance(error, FileNotFoundError) else 126, f"cannot start {name}: {error}")
            return []
        self._group.add(child)
        if isinstance(child, RemoteJobProcess) and self._keys is not None and self._has_keys:
            child.give_keys(self._keys.files_for(role == "server"))
        return [child]

    @property
    def _has_keys(self) -> bool:
        return self._keys is not None and bool(self._keys.directory)

    def _silent_servers(self) -> list[int]:
        return [index for index in range(len(self._server_commands)) if index not in self._addresses.found]

    # While it runs.

    def _wait(
        self, done: Callable[[], bool], seconds: float | None, until: Callable[[], bool] | None = None
    ) -> bool:
        """Run the loop until `done`, or `until` (by default: the job has failed), or the timeout."""
        interrupted = until or (lambda: self._code is not None)
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        while not done() and not interrupted():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            now = time.monotonic()
            due = min(self._restarted.seconds_left(now), self._restarted_servers.seconds_left(now))
            self._events.turn(min(left, due))
            self._look()
            for rank in self._restarted.take_due(time.monotonic()):
                self._start_worker(rank)
            for index in self._restarted_servers.take_due(time.monotonic()):
                self._restart_server(index)
        return done()

    def _look(self) -> None:
        self._explain(self._group.reap())
        if not self._stopping and not self._group.ensure_guardian():
            self._fail(1, GUARDIAN_DIES)
        signals = self._events.stop_signals
        if signals:
            self._fail(128 + signals[0], f"received {signals[0].name}")
        error = self._events.write_error
        if error is not None:
            self._fail(128 + signal.SIGPIPE, f"cannot write the output: {error.strerror}")

    def _explain(self, gone: Sequence[ChildProcess]) -> None:
        if self._stopping or (self._workers_done() and not any(w.returncode for w in self._workers.values())):
            return
        # If both exited since the last turn, the server is the likelier cause.
        for child in sorted(gone, key=lambda child: child not in self._servers):
            if child in self._servers and self._servers.index(child) in self._silent_servers():
                self._fail(1, f"{child.describe_exit()} before it was ready")
            elif child in self._servers:
                self._explain_server(child)
            elif child.returncode and child not in self._viewers:
                self._explain_worker(child)

    def _explain_server(self, server: ChildProcess) -> None:
        """Note that a server has ended: it is started again later, or the job has failed."""
        now, death, code = time.monotonic(), None, server.returncode
        # One that gives an exit code has its reason; of a host that is lost, ssh gives one.
        was_killed = code is not None and (
            code < 0 or (code == SSH_FAILED and isinstance(server, RemoteJobProcess))
        )
        if self._code is None and code is not None and was_killed and self._topology.servers:
            index = self._servers.index(server)
            death = self._restarted_servers.count(index, server.name, code, now - server.began, now)
        if death is None or death.is_last:
            text = f"{server.describe_exit()} before the workers were done" if death is None else death.text
            self._fail(server.shell_code() or 1, text, was_unheard=True)
        else:
            server.end_session()
            self._events.output.put(2, "kvlaunch: ", death.text.encode())

    def _explain_worker(self, worker: ChildProcess) -> None:
        """Note that a worker has failed: it is started again later, or the job has failed."""
        now, death = time.monotonic(), None
        if self._code is None:
            rank = next(rank for rank, one in self._workers.items() if one is worker)
            assert worker.returncode is not None
            death = self._restarted.count(rank, worker.name, worker.returncode, now - worker.began, now)
        if death is None or death.is_last:
            code, text = worker.shell_code(), worker.describe_exit()
            if death is not None:
                code, text = death.code, death.text
            if self._goes_on_without(worker):
                done = sum(one.returncode == 0 for one in self._workers.values())
                left = f"; the job goes on with {self._num_workers - len(self._lost) - done} workers"
                ended = f", {done} are done" if done else ""
                self._events.output.put(2, "kvlaunch: ", f"{text}{left}{ended}".encode())
            else:
                self._fail(code, text, was_unheard=code > 128)
        else:
            worker.end_session()
            self._events.output.put(2, "kvlaunch: ", death.text.encode())

    def _goes_on_without(self, worker: ChildProcess) -> bool:
        """Count a worker as lost if enough others are left.

        Those that are done count, because at the end of a job all are. If they had left before, servers tell those that
        still train that they are too few.
        """
        if self._elastic is None or self._code is not None:
            return False
        if self._num_workers - len(self._lost) <= self._elastic[0]:
            return False
        self._lost.add(worker.name)
        worker.end_session()
        return True

    def _fail(self, code: int, text: str, was_unheard: bool = False) -> None:
        """Record and report the first failure. Later ones are its consequences."""
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
        """Return whether the user pressed Ctrl-C again while a signal was stopping the job."""
        signals = self._events.stop_signals
        return len(signals) > 1 and signals[-1] == signal.SIGINT

    def _no_worker_left(self) -> bool:
        return all(worker.returncode is not None for worker in self._workers.values())

    def _workers_done(self) -> bool:
        are_all = len(self._workers) == self._num_workers and not self._restarted.are_awaited
        return are_all and self._no_worker_left()


def _never_stop() -> bool:
    return False
