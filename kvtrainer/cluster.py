"""Servers and workers of this host for a notebook, a REPL or a test: a function runs on every worker.

    with kvtrainer.local_cluster(workers=2, servers=2) as cluster:
        accuracies = cluster.run(train, epochs=3)

A worker is `python -m kvtrainer.cluster CODE OUTCOME`: both are descriptors of memory without a name, which a process
hands to its own children and to nobody else. That is why pickle may be used here, and nowhere between peers: whoever
could write to this memory could run code as this user anyway. Functions of a notebook or of `__main__`, and lambdas,
are packed with cloudpickle, where that is installed.

A program that has work and threads of its own, such as a notebook, cannot give its processes the one loop that
`Launcher` has. Here lines come through threads, nothing takes over signals, and no Python code runs between fork and
exec. A guardian ends the processes if their owner is gone, however it went.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, ParamSpec, TypeVar

from kvtrainer.env import LOCAL_RANK, NUM_WORKERS, RANK, SERVERS, as_int, parse_address
from kvtrainer.errors import (
    ArgumentTypeError,
    ClusterError,
    ConcurrentCallError,
    ConfigurationError,
    ConnectTimeoutError,
    WorkerTraceback,
)
from kvtrainer.launcher.guardian import KILL_WAIT, Guardian, end_with_parent, environment
from kvtrainer.launcher.job import Limits
from kvtrainer.launcher.processes import Child, inherited, server_command

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SIZE = 8
"""Bytes that say how much is written on a Paper."""


def local_cluster(
    workers: int,
    servers: int = 1,
    *,
    server_args: Sequence[str] = (),
    start_timeout: float = Limits.start,
    linger: float = Limits.linger,
    grace: float = Limits.grace,
) -> LocalCluster:
    """Start servers on this host and return the cluster, a context that ends them; blocks until they listen.

    Nothing of it outlives this program, even if that is killed.

    Args:
        workers: How many processes run a function, at least 1.
        servers: How many servers there are; 0 for stores without servers.
        server_args: Flags for every server, such as `["--import", "my_optimizers"]`.
        start_timeout: Seconds for the servers to listen.
        linger: Seconds that the other workers get to fail in their own words once one has failed.
        grace: Seconds between SIGTERM and SIGKILL for what is to end.

    Raises:
        ConfigurationError: a number is none, or too small.
        ClusterError: a server ended before it listened; its own lines say why.
        ConnectTimeoutError: a server did not listen in time.
    """
    for name, count, least in (("workers", workers, 1), ("servers", servers, 0)):
        if as_int(count, name) < least:
            raise ConfigurationError(f"{name} is {count}; a cluster has at least {least}")
    return LocalCluster(workers, servers, server_args, Limits(start_timeout, linger, linger, grace))


class LocalCluster:
    """Servers that run, and workers that each `run` starts anew; see `local_cluster`, which makes one."""

    def __init__(self, workers: int, servers: int, server_args: Sequence[str], limits: Limits) -> None:
        self._limits = limits
        self._server_args = list(server_args)
        self._num_servers = servers
        self._running = threading.Lock()
        self._is_closed = False
        self._group: Group | None = None
        self.num_workers = workers
        self.servers: tuple[str, ...] = ()
        """Where the servers listen, by their index, as KVSTORE_SERVERS and `kvstore.create(servers=…)` take it."""
        self._start()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"servers={list(self.servers)}"
        return f"<LocalCluster workers={self.num_workers} {state}>"

    def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> list[_T]:
        """Run a function on every worker, and return what it returned, by rank. Each worker is a fresh process.

        Workers find rank, count and servers in their environment, so `kvstore="dist_sync"` is all that a Trainer needs.
        What they print appears here at once, each line with the rank before it. Function, arguments and results
        are packed (pickle, between this program and its own children only); what a worker changes stays there.
        A run that fails, or is interrupted, ends the servers, too; the next one starts others.

        Raises:
            Exception: what the function raised on the worker that failed first. Its `__cause__` is a WorkerTraceback.
            ClusterError: a worker was killed or has left by sys.exit(), a server has ended, or what a worker raised
                or returned cannot be packed.
            ConfigurationError: the function or an argument cannot be packed, or the cluster is closed.
            ConcurrentCallError: a run is under way in another thread.
        """
        packed = pack(function, args, kwargs)
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
        """End the servers; idempotent. Blocks until nothing is left."""
        self._is_closed = True
        self._end()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Group:
        group = self._group = Group(self._limits.grace)
        count, grace = self._num_servers, self._limits.grace
        commands = [server_command(index, count, grace, self._server_args) for index in range(count)]
        try:
            self.servers = start_servers(group, commands, self._limits.start)
        except BaseException:
            self._end()
            raise
        return group

    def _end(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _run(self, servers: Group, packed: bytes) -> list[Any]:
        code, papers = Paper(), [Paper() for _ in range(self.num_workers)]
        group = Group(self._limits.grace)
        try:
            code.write(packed)
            environ = {NUM_WORKERS: str(self.num_workers)}
            if self.servers:
                environ[SERVERS] = ",".join(self.servers)
            program = [sys.executable, "-m", "kvtrainer.cluster", str(code.fd)]
            for rank, paper in enumerate(papers):
                place = {**environ, RANK: str(rank), LOCAL_RANK: str(rank)}
                group.start("worker", [*program, str(paper.fd)], place, self.num_workers, (code.fd, paper.fd))
            failed = self._wait(servers, group, papers)
            group.close()
            outcomes = [unpack(paper.read()) for paper in papers]
        finally:
            group.close()
            for paper in (code, *papers):
                paper.close()
        if failed:
            raise _failure(failed, group.children, outcomes)
        return [outcome.value for outcome in outcomes if outcome is not None]

    def _wait(self, servers: Group, workers: Group, papers: Sequence[Paper]) -> list[Child]:
        """Wait until all workers are done; return what was seen to fail first, which is often one process."""
        ranks = dict(zip(workers.children, papers, strict=True))
        failed: list[Child] = []
        deadline = float("inf")
        while workers.alive and (left := deadline - time.monotonic()) > 0:
            for group in (servers, workers):
                group.ensure_guardian()
            ended = exited([*servers.alive, *workers.alive], min(left, 1.0))
            if not failed:
                done = [
                    child
                    for child in ended
                    if not child.returncode and child in ranks and ranks[child].is_written
                ]
                failed = [child for child in ended if child not in done]
                deadline = time.monotonic() + self._limits.linger if failed else deadline
        return failed


def _failure(
    failed: Sequence[Child], workers: Sequence[Child], outcomes: Sequence[Outcome | None]
) -> Exception:
    """Return the error of a failed run. Its cause is what workers say about it, if any does.

    Args:
        failed: What was seen to fail first. One that could not say anything is the likeliest cause of all.
        workers, outcomes: All of them, by rank.
    """
    told = {rank: one for rank, one in enumerate(outcomes) if one is not None and one.trace}
    order = sorted(told, key=lambda rank: told[rank].at)
    silent = [child for child in failed if child not in [workers[rank] for rank in order]]
    error: Exception = ClusterError(end_of(silent[0]) if silent else f"worker {order[0]} failed")
    if not order:
        return error
    first = told[order[0]]
    lines = [first.trace, *(f"then rank {rank}: {told[rank].trace.splitlines()[-1]}" for rank in order[1:])]
    if not silent:
        said = ClusterError(f"worker {order[0]}: {first.trace.splitlines()[-1]}")
        error = first.error if isinstance(first.error, Exception) else said
    error.__cause__ = WorkerTraceback(order[0], "\n".join(lines))
    return error


class Outcome(NamedTuple):
    """How a call ended."""

    at: float
    """The monotonic clock of the host, in seconds."""
    value: Any
    error: BaseException | None
    """None also where it is no Exception, as in sys.exit(), or would not come back as itself."""
    trace: str
    """The traceback of the exception; empty where the call has returned."""


class Paper:
    """Memory without a name, to which one process writes once and which another reads."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("kvtrainer") if fd is None else fd

    def write(self, data: bytes) -> None:
        """Write all; its size comes last, so that what a killed process has begun counts as nothing."""
        with open(self.fd, "wb", closefd=False) as file:
            file.seek(_SIZE)
            file.write(data)
            file.flush()
            file.seek(0)
            file.write(len(data).to_bytes(_SIZE, "little"))

    @property
    def is_written(self) -> bool:
        return any(os.pread(self.fd, _SIZE, 0))

    def read(self) -> bytes:
        """Return what was written; empty if nothing was."""
        # Processes that have inherited the descriptor share its position, too: each says where it reads.
        left = int.from_bytes(os.pread(self.fd, _SIZE, 0), "little")
        data, end = bytearray(), _SIZE + left
        while left and (part := os.pread(self.fd, left, end - left)):
            data += part
            left -= len(part)
        return bytes(data)

    def close(self) -> None:
        os.close(self.fd)


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return a call as bytes that `main` understands.

    Raises:
        ArgumentTypeError: `function` cannot be called.
        ConfigurationError: it, or an argument, cannot be packed, or not without cloudpickle.
    """
    if not callable(function):
        raise ArgumentTypeError(f"workers run a function, got {function!r:.80}")
    dumps = _cloud()
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


def unpack(told: bytes) -> Outcome | None:
    """Return what a worker has told; None if nothing.

    Raises:
        ClusterError: this program cannot make it, such as an object of a module that only workers can import.
    """
    try:
        return Outcome(*pickle.loads(told)) if told else None
    except Exception as error:
        raise ClusterError(f"what a worker returned cannot be unpacked here: {error!r}") from error


def _cloud() -> Callable[[Any], bytes] | None:
    try:
        import cloudpickle
    except ImportError:
        return None
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    return dumps


def main(code: int, outcome: int) -> int:
    """Run the packed call of one descriptor, and write its outcome to the other; return an exit code."""
    end_with_parent(os.getppid())()
    told, value, failure, trace = Paper(outcome), None, None, ""
    try:
        sys.path[:], call = pickle.loads(Paper(code).read())
        function, args, kwargs = pickle.loads(call)
        value = function(*args, **kwargs)
    except BaseException as error:
        # Stores tell the servers why their process ends.
        sys.last_value = failure = error
        trace = "".join(traceback.format_exception(error))
    at = time.monotonic()
    try:
        told.write(_packed(Outcome(at, value, failure, trace)))
    except Exception as error:
        text = f"what the worker returned cannot be packed: {error}"
        told.write(pickle.dumps(tuple(Outcome(at, None, None, text))))
        return 1
    return 1 if trace else 0


def _packed(outcome: Outcome) -> bytes:
    """Return an outcome as bytes; see `Outcome.error` for what is left out."""
    dumps = _cloud() or pickle.dumps
    error = outcome.error
    try:
        is_whole = isinstance(error, Exception) and type(pickle.loads(dumps(error))) is type(error)
    except Exception:
        is_whole = False
    return dumps(tuple(outcome if is_whole else outcome._replace(error=None)))


# ---------------------------------------------------------------- its processes

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
    """Write a line to where this program's output goes now. In a notebook that is a page, no descriptor."""
    stream = sys.stdout if target == 1 else sys.stderr
    with suppress(OSError, ValueError):  # nobody reads any more; the processes must not wait for that
        stream.write(f"{tag}{line.decode(errors='replace')}\n")
        stream.flush()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
