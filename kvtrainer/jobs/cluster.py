"""Servers and workers on this host for a notebook, a REPL or a test: runs a function on every worker.

    with kvtrainer.local_cluster(workers=2, servers=2) as cluster:
        accuracies = cluster.run(train, epochs=3)

A worker is `python -m kvtrainer.jobs.cluster CODE OUTCOME`. Both arguments are descriptors of memory files without a
name, which only the program's own children inherit. That makes pickle safe here, unlike between peers: a process
that can write to this memory can run code as this user anyway. Functions of a notebook or of `__main__`, and lambdas,
are packed with cloudpickle if it is installed.

Processes are started, watched and ended as those of `kvlaunch`. But a notebook has threads of its own and none to
spare, so the event loop runs in a separate thread, no signal handlers are installed, and no Python code runs between
fork and exec.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from kvstore_server.engine.views import check_backup_workers
from kvstore_server.keys import KEYS, OFF
from kvtrainer.common.env import REJOIN_TIMEOUT, Topology, as_int, parse_address, parse_range
from kvtrainer.errors import (
    ArgumentTypeError,
    ClusterError,
    ConcurrentCallError,
    ConfigurationError,
    ConnectTimeoutError,
    WorkerTraceback,
)
from kvtrainer.jobs.guardian import GUARDIAN_DIES, end_with_parent, guarded_environment
from kvtrainer.jobs.job import JobTimeouts
from kvtrainer.jobs.job_keys import JobKeys
from kvtrainer.jobs.processes import (
    LAST_OUTPUT_WAIT,
    ChildProcess,
    ProcessAddresses,
    ProcessEvents,
    ProcessGroup,
    Put,
    inherited_environment,
    server_command,
)
from kvtrainer.jobs.restarted_ranks import RestartedRanks
from kvtrainer.jobs.worker_memories import WorkerMemories

_P = ParamSpec("_P")
_T = TypeVar("_T")


def local_cluster(
    workers: int | str,
    servers: int = 1,
    *,
    server_args: Sequence[str] = (),
    restart: int = 0,
    backup_workers: int = 0,
    start_timeout: float = JobTimeouts.start,
    linger: float = JobTimeouts.linger,
    grace: float = JobTimeouts.grace,
) -> LocalCluster:
    """Start servers on this host and return the cluster, a context manager that ends them. Blocks until they listen.

    No process outlives this program, even if it is killed. The servers accept only processes of this cluster, by keys
    that are made for it (unless KVSTORE_KEYS names some, or is "off").

    Args:
        workers: Number of processes that run a function, at least 1. "MIN..MAX" starts MAX, and a run goes on without
            those that fail as long as MIN are left; the function then calls `Trainer.resume`, as with `kvlaunch -n`.
        servers: Number of servers; 0 for stores without servers.
        server_args: Flags for every server, such as `["--import", "my_optimizers"]`.
        restart: How often each server, and each worker of a run, is started again when it is killed or fails. A
            worker then calls the function again, which goes on by `Trainer.resume`; a server has its weights again.
        backup_workers: With workers="MIN..MAX": each step goes on without so many of the slowest workers, but with MIN
            at least.
        start_timeout: Seconds to wait for the servers to listen.
        linger: Seconds that the other workers have to report their own errors once one has failed.
        grace: Seconds between SIGTERM and SIGKILL.

    Raises:
        ConfigurationError: A number is missing or too small.
        ClusterError: A server ended before it listened. Its output says why.
        ConnectTimeoutError: A server did not listen in time.
    """
    elastic = parse_range(workers, "workers") if isinstance(workers, str) else None
    most: Any = workers if elastic is None else elastic[1]
    for name, count, least in (("workers", most, 1), ("servers", servers, 0), ("restart", restart, 0)):
        if as_int(count, name) < least:
            raise ConfigurationError(f"{name} is {count}; a cluster has at least {least}")
    if elastic is not None and not servers:
        raise ConfigurationError(
            f"workers={workers!r} needs servers, which decide who is left, and servers is 0"
        )
    limits = JobTimeouts(start_timeout, linger, linger, grace)
    if backup_workers and elastic is None:
        raise ConfigurationError(
            f"backup_workers={backup_workers} is for a job whose number of workers may change: give workers as "
            f"'MIN..MAX', not as {workers}"
        )
    check_backup_workers(as_int(backup_workers, "backup_workers"), most)
    return LocalCluster(most, servers, server_args, limits, restart, elastic, backup_workers)


class LocalCluster:
    """Running servers, and workers that are started for each `run`. Created by `local_cluster`."""

    def __init__(
        self,
        workers: int,
        servers: int,
        server_args: Sequence[str],
        limits: JobTimeouts,
        restart: int = 0,
        elastic: tuple[int, int] | None = None,
        backup_workers: int = 0,
    ) -> None:
        self._limits = limits
        self._restart = restart
        self._elastic, self._backup_workers = elastic, backup_workers
        self._server_args = list(server_args)
        if elastic is not None and not restart and REJOIN_TIMEOUT not in os.environ:
            # Nobody starts a worker again, so the others need not wait; the caller's own flag counts.
            self._server_args[:0] = ["--rejoin-timeout", "0.001"]
        self._num_servers = servers
        self._running = threading.Lock()
        self._is_closed = False
        self._changed = threading.Condition()
        self._group: ClusterProcesses | None = None
        self._keys: JobKeys | None = None
        self.num_workers = workers
        self.servers: tuple[str, ...] = ()
        """Addresses of the servers, by index, as KVSTORE_SERVERS and `kvstore.create(servers=…)` take them. Such
        a store needs `keys`, too."""
        self._start()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"servers={list(self.servers)}"
        return f"<LocalCluster workers={self.num_workers} {state}>"

    def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> list[_T]:
        """Run a function on every worker, each a new process, and return the results by rank. Blocks.

        Workers that a run goes on without are left out.

        Workers find rank, number of workers and servers in their environment, so a Trainer needs only
        `kvstore="dist_sync"`. Their output appears here line by line, prefixed with the rank. Function, arguments and
        results are pickled, so workers modify copies. A run that fails or is interrupted also ends the servers; the
        next run starts new ones.

        Raises:
            Exception: What the function raised on the worker that failed first. Its `__cause__` is a WorkerTraceback.
            ClusterError: A worker was killed or called sys.exit(), a server ended, or a result or exception cannot be
                pickled.
            ConfigurationError: The function or an argument cannot be pickled, or the cluster is closed.
            ConcurrentCallError: Another thread is in `run`.
        """
        packed = pack_cluster_call(function, args, kwargs)
        if not self._running.acquire(blocking=False):
            raise ConcurrentCallError("the cluster is in a run that another thread has started")
        try:
            if self._is_closed:
                raise ConfigurationError("the cluster is closed; make another one")
            servers = self._group or self._start()
            try:
                return self._run(servers, packed)
            except BaseException:
                self._end()
                raise
        finally:
            self._running.release()

    def close(self) -> None:
        self._is_closed = True
        self._end()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> ClusterProcesses:
        self._keys = JobKeys(os.environ) if self._num_servers else None
        remove = self.keys if self._keys is not None and self._keys.is_own else ""
        grace = self._limits.grace
        group = self._group = ClusterProcesses(grace, self._changed, self._key_variables, remove)
        count, grace, flags = self._num_servers, self._limits.grace, self._server_args
        commands = {
            index: server_command(index, count, grace, flags, self._restart) for index in range(count)
        }
        try:
            self.servers = start_cluster_servers(group, commands, self._limits.start)
            if self._keys is not None:
                self._keys.note_servers(self.servers)
        except BaseException:
            self._end()
            raise
        return group

    def _end(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
        keys, self._keys = self._keys, None
        if keys is not None:
            keys.close()

    @property
    def keys(self) -> str:
        """The directory of keys for a store of this process, as `kvstore.create(servers=…, keys=…)` takes it."""
        return self._key_variables.get(KEYS, OFF)

    @property
    def _key_variables(self) -> Mapping[str, str]:
        return {} if self._keys is None else self._keys.environment

    def _run(self, servers: ClusterProcesses, packed: bytes) -> list[Any]:
        code = ClusterMemFile()
        group = ClusterProcesses(self._limits.grace, self._changed, self._key_variables)
        topology = Topology(0, self.num_workers, self.servers, self._elastic, self._backup_workers)
        workers = _ClusterWorkers(group, topology, code, self._restart)
        # 1. Start the workers, wait for all of them or for the first failure, and collect what they wrote.
        try:
            code.write(packed)
            workers.start()
            failed = self._wait(servers, group, workers)
            group.close()
            outcomes = workers.outcomes()
        finally:
            group.close()
            workers.close()
            code.close()
        # 2. Raise what failed, or return the results.
        if failed:
            raise _cluster_run_error(failed, workers.children, outcomes)
        return workers.results(outcomes)

    def _wait(
        self, servers: ClusterProcesses, group: ClusterProcesses, workers: _ClusterWorkers
    ) -> list[ChildProcess]:
        """Wait until all workers are done or some process fails. Return those that failed first, usually one."""
        failed: list[ChildProcess] = []

        def is_decided() -> bool:
            if not (servers.ensure_guardian() and group.ensure_guardian()):
                raise ClusterError(GUARDIAN_DIES)
            failed.extend(child for child in servers.children if child.returncode is not None)
            failed.extend(workers.look(time.monotonic()))
            return bool(failed) or workers.are_done

        group.wait(is_decided, None)
        if failed:
            # The others get some time to report how they fail.
            group.wait(lambda: not group.alive, self._limits.linger)
        return failed


class _ClusterWorkers:
    """The workers of one run, by rank; each is started again when it fails, as often as is allowed."""

    def __init__(
        self, group: ClusterProcesses, topology: Topology, code: ClusterMemFile, restart: int
    ) -> None:
        count = topology.num_workers
        self._group = group
        self._topology = topology
        self._code = code
        self._lost: set[int] = set()
        """The ranks that the run goes on without."""
        self._restarted = RestartedRanks(count, restart)
        self._memories = WorkerMemories(count if restart else 0)
        self._papers = [ClusterMemFile() for _ in range(count)]
        self.children: list[ChildProcess] = []

    @property
    def are_done(self) -> bool:
        return not (self._group.alive or self._restarted.are_awaited)

    def start(self) -> None:
        for rank in range(self._topology.num_workers):
            self.children.append(self._start(rank))

    def look(self, now: float) -> list[ChildProcess]:
        """Start again those whose wait is over. Return the workers that ended before their work was done, for good."""
        for rank in self._restarted.take_due(now):
            self._papers[rank].close()
            self._papers[rank] = ClusterMemFile()
            self.children[rank] = self._start(rank)
        ended = [
            (rank, child)
            for rank, child in enumerate(self.children)
            if child.returncode is not None
            and not self._restarted.is_awaited(rank)
            and rank not in self._lost
        ]
        return [child for rank, child in ended if self._has_failed(rank, child, now)]

    def outcomes(self) -> list[ClusterCallResult | None]:
        return [unpack_cluster_outcome(paper.read()) for paper in self._papers]

    def results(self, outcomes: Sequence[ClusterCallResult | None]) -> list[Any]:
        return [one.value for rank, one in enumerate(outcomes) if one is not None and rank not in self._lost]

    def close(self) -> None:
        for paper in self._papers:
            paper.close()
        self._memories.close()

    def _start(self, rank: int) -> ChildProcess:
        place = replace(self._topology, rank=rank).as_variables(rank) | self._restarted.environment(rank)
        place |= self._memories.environment(rank)
        fds = self._code.fd, self._papers[rank].fd
        command = [sys.executable, "-m", "kvtrainer.jobs.cluster", *map(str, fds)]
        share = self._topology.num_workers
        inherited = *fds, *self._memories.descriptors(rank)
        return self._group.start("worker", rank, command, place, share=share, pass_fds=inherited)

    def _has_failed(self, rank: int, child: ChildProcess, now: float) -> bool:
        """Return whether a worker that has ended is not done, and will not be; count its death otherwise."""
        assert child.returncode is not None
        death = None
        if child.returncode:
            death = self._restarted.count(rank, child.name, child.returncode, now - child.began, now)
        elif self._papers[rank].is_written:
            return False
        text = child.describe_exit() if death is None else death.text
        if death is None or death.is_last:
            if not self._goes_on_without(rank):
                return True
            text += f"; the run goes on with {self._topology.num_workers - len(self._lost)} workers"
        child.end_session()
        print_cluster_line(2, "local_cluster: ", text.encode())
        return False

    def _goes_on_without(self, rank: int) -> bool:
        """Count a worker as lost if enough others are left; those that are done count as left."""
        elastic = self._topology.elastic
        if elastic is None or self._topology.num_workers - len(self._lost) <= elastic[0]:
            return False
        self._lost.add(rank)
        return True


def _cluster_run_error(
    failed: Sequence[ChildProcess],
    workers: Sequence[ChildProcess],
    outcomes: Sequence[ClusterCallResult | None],
) -> Exception:
    """Return the error of a failed run, with a worker's traceback as its cause if there is one."""
    told = {rank: one for rank, one in enumerate(outcomes) if one is not None and one.trace}
    order = sorted(told, key=lambda rank: told[rank].at)
    silent = [child for child in failed if child not in [workers[rank] for rank in order]]
    error: Exception = ClusterError(
        _describe_cluster_end(silent[0], "before its work was done")
        if silent
        else f"worker {order[0]} failed"
    )
    if not order:
        return error
    first = told[order[0]]
    lines = [first.trace, *(f"then rank {rank}: {told[rank].trace.splitlines()[-1]}" for rank in order[1:])]
    if not silent:
        said = ClusterError(f"worker {order[0]}: {first.trace.splitlines()[-1]}")
        error = first.error if isinstance(first.error, Exception) else said
    error.__cause__ = WorkerTraceback(order[0], "\n".join(lines))
    return error


class ClusterCallResult(NamedTuple):
    """The result of a call in a worker."""

    at: float
    """When it ended, in seconds of the host's monotonic clock."""
    value: Any
    error: BaseException | None
    """None also if it is not an Exception, as for sys.exit(), or does not survive pickling."""
    trace: str
    """The traceback of the exception; empty if the call returned."""


class ClusterMemFile:
    """A memfd that one process writes once and another reads."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("kvtrainer", os.MFD_ALLOW_SEALING) if fd is None else fd

    def write(self, data: bytes) -> None:
        """Write all and seal the memory. Without the seal, what a killed process wrote is ignored."""
        with open(self.fd, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    @property
    def is_written(self) -> bool:
        return bool(fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    def read(self) -> bytes:
        # Opened again, because inherited descriptors share one file position.
        return Path(f"/proc/self/fd/{self.fd}").read_bytes() if self.is_written else b""

    def close(self) -> None:
        os.close(self.fd)


def pack_cluster_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call for `main`. Raises ArgumentTypeError if it is not callable, ConfigurationError if not picklable."""
    if not callable(function):
        raise ArgumentTypeError(f"workers run a function, got {function!r:.80}")
    dumps = _find_cloudpickle_for_cluster()
    name = getattr(function, "__qualname__", "")
    if dumps is None and (getattr(function, "__module__", "") == "__main__" or "<" in name):
        raise ConfigurationError(
            f"{name} is a function of a notebook, a script or another function, which workers cannot import: pip "
            "install 'kvtrainer[notebook]', or put it into a module"
        )
    try:
        call = (dumps or pickle.dumps)((function, args, kwargs))
    except Exception as error:
        raise ConfigurationError(
            f"{name or function!r:.80} or an argument cannot be packed: {error}"
        ) from None
    return pickle.dumps((sys.path, call))


def unpack_cluster_outcome(told: bytes) -> ClusterCallResult | None:
    """Return what a worker has written, or None. Raises ClusterError if it cannot be unpickled here."""
    try:
        return ClusterCallResult(*pickle.loads(told)) if told else None
    except Exception as error:
        raise ClusterError(f"what a worker returned cannot be unpacked here: {error!r}") from error


def _find_cloudpickle_for_cluster() -> Callable[[Any], bytes] | None:
    try:
        import cloudpickle
    except ImportError:
        return None
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    return dumps


def main(code: int, outcome: int) -> int:
    """Run the pickled call of one descriptor, and write its result to the other. Return an exit code."""
    end_with_parent(os.getppid())()
    told, value, failure, trace = ClusterMemFile(outcome), None, None, ""
    try:
        sys.path[:], call = pickle.loads(ClusterMemFile(code).read())
        function, args, kwargs = pickle.loads(call)
        value = function(*args, **kwargs)
    except BaseException as error:
        # Stores report `sys.last_value` to the servers as the reason why the process ends.
        sys.last_value = failure = error
        trace = "".join(traceback.format_exception(error))
    at = time.monotonic()
    try:
        told.write(_pickle_cluster_outcome(ClusterCallResult(at, value, failure, trace)))
    except Exception as error:
        text = f"what the worker returned cannot be packed: {error}"
        told.write(pickle.dumps(tuple(ClusterCallResult(at, None, None, text))))
        return 1
    return 1 if trace else 0


def _pickle_cluster_outcome(outcome: ClusterCallResult) -> bytes:
    dumps = _find_cloudpickle_for_cluster() or pickle.dumps
    error = outcome.error
    try:
        is_whole = isinstance(error, Exception) and type(pickle.loads(dumps(error))) is type(error)
    except Exception:
        is_whole = False
    return dumps(tuple(outcome if is_whole else outcome._replace(error=None)))


# ---------------------------------------------------------------- its processes


def print_cluster_line(target: int, tag: str, line: bytes) -> None:
    """Write a line to the program's current output, which in a notebook is not a file descriptor."""
    stream = sys.stdout if target == 1 else sys.stderr
    # Processes must not block because nothing reads their output any more.
    with suppress(Exception):
        stream.write(f"{tag}{line.decode(errors='replace')}\n")
        stream.flush()


class ClusterProcesses(ProcessGroup):
    """Processes whose event loop runs in a thread. Notifies `changed` when one may have changed, and every second."""

    def __init__(
        self,
        grace: float,
        changed: threading.Condition,
        keys: Mapping[str, str] | None = None,
        remove: str = "",
    ) -> None:
        """
        Args:
            keys: Variables with which all processes find their keys.
            remove: A directory that is removed at the end, also if this program is killed; empty: none.
        """
        self._keys = keys or {}
        super().__init__(ProcessEvents(), grace, remove)
        self._changed = changed
        self._is_closed = False
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def start(
        self,
        role: str,
        index: int,
        command: Sequence[str],
        place: Mapping[str, str],
        put: Put = print_cluster_line,
        share: int = 0,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """Start a process. `place` is added to this program's environment, and `share` divides the CPU cores."""
        environ = guarded_environment(
            {**inherited_environment(os.environ), **self._keys, **place}, self.mark, share
        )
        child = ChildProcess(f"{role} {index}", f"{role[0]}{index}", command, environ, put, pass_fds)
        self.add(child)
        self._notice_end_of(child.process.pid)
        return child

    def wait(self, done: Callable[[], bool], seconds: float | None) -> None:
        with self._changed:
            self._changed.wait_for(done, seconds)

    def close(self) -> None:
        """End all processes and their descendants. Blocks until none is left. Idempotent."""
        if self._is_closed:
            return
        try:
            self._notice_end_of(self.guardian.process.pid)
            self.end(self.wait)
        finally:
            # Under the lock, so that the thread closes the events only after they were woken.
            with self._lock:
                self._is_closed = True
                self._events.wake()
        self._thread.join(LAST_OUTPUT_WAIT)

    def _follow(self) -> None:
        while not self._is_closed:
            self._events.turn(1.0)
            self.reap()
            with self._changed:
                self._changed.notify_all()
        self.close_streams()
        with self._lock:
            self._events.close()

    def _notice_end_of(self, pid: int) -> None:
        """Wake the loop when a process ends. SIGCHLD belongs to the program, so this uses a pidfd."""
        # Without a pidfd the loop checks once a second.
        with suppress(OSError):
            fd = os.pidfd_open(pid)
            self._events.add_reader(fd, partial(self._look, fd), pausable=False)
            self._events.wake()

    def _look(self, pidfd: int) -> None:
        self._events.remove_reader(pidfd)
        os.close(pidfd)
        self._events.child_changed = True


def start_cluster_servers(
    group: ClusterProcesses, commands: Mapping[int, Sequence[str]], seconds: float
) -> tuple[str, ...]:
    """Start servers, given the command of each index, and return their addresses once all listen.

    Raises:
        ClusterError: A server ended before it listened. Its output says why.
        ConnectTimeoutError: A server did not listen within `seconds`.
    """
    addresses = ProcessAddresses(print_cluster_line)
    for index, command in commands.items():
        group.start("server", index, command, {}, addresses.put_of(index))
    servers = dict(zip(commands, group.children, strict=True))

    def silent() -> list[ChildProcess]:
        return [servers[index] for index in commands if index not in addresses.found]

    group.wait(lambda: not silent() or any(server.returncode is not None for server in silent()), seconds)
    for server in sorted(silent(), key=lambda server: server.returncode is None):
        if server.returncode is not None:
            raise ClusterError(_describe_cluster_end(server, "before it listened"))
        raise ConnectTimeoutError(
            f"{server.name} did not listen in time; raise the limit with start_timeout="
        )
    return tuple(parse_address(addresses.found[index]) for index in commands)


def _describe_cluster_end(child: ChildProcess, when: str) -> str:
    """Describe the end of a process that left no error of its own."""
    cause = ", as the system does when memory runs out" if child.returncode == -signal.SIGKILL else ""
    return f"{child.describe_exit()} {when}{cause}"


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
