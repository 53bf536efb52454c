"""Real servers and workers for tests: started, followed line by line, stopped, and always reaped.

Workers that need no process of their own are stores in the test's process, one thread each; see `member` and
`together`. Nothing here sleeps until something has probably happened: every wait has a condition and a limit.
"""

from __future__ import annotations

import atexit
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.optimizer.base import capability
from kvstore_server.server import Server
from kvtrainer.kvstore import DistKVStore
from tests.support.forks import Fork, inherited, piped_fork
from tests.support.limits import DEAD_AFTER, LIMIT

ROOT = Path(__file__).parents[2]
FORGETFUL = ("--dead-after", str(DEAD_AFTER))
"""Flags for the servers of a test that waits for the death of a worker."""

WORKER = """
import os, signal, sys, torch, kvtrainer
from kvtrainer import kvstore
def at(word):
    print(word, flush=True)
    sys.stdin.readline()
timeout, dead_after = map(float, sys.argv[2:])
kv = kvstore.create(
    "dist_sync", namespace=sys.argv[1], timeout=timeout, connect_timeout=timeout, dead_after=dead_after
)
"""
"""What every worker's script begins with; `at` reports a place in the script and waits for `Process.go`."""


class Process:
    """A child whose standard output is read with a limit; standard error is kept for the end.

    A module or a script for Python is forked from a process that has imported torch; anything else is executed.
    """

    def __init__(self, command: Sequence[str], env: dict[str, str], cwd: Path | None) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._unread = b""
        self._address = ""
        environ = {**inherited(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        self.popen: Fork | subprocess.Popen[bytes]
        if command[0] == sys.executable and command[1] in ("-m", "-c"):
            self.popen = piped_fork(command[1:], environ, cwd or ROOT, self._stderr.fileno())
        else:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environ,
                cwd=cwd or ROOT,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def address(self) -> str:
        """Where a server listens; waits until it says so, in its first line."""
        self._address = self._address or self.line().rpartition(" ")[2]
        return self._address

    def line(self) -> str:
        """The next line of standard output, without its end."""
        assert self.popen.stdout is not None
        while b"\n" not in self._unread:
            part = _read(self.popen.stdout.fileno(), LIMIT)
            assert part, f"the process ended: {self.end()}"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def go(self) -> None:
        """Let a worker go on from `at`."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(b"\n")
        self.popen.stdin.flush()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def freeze(self) -> None:
        """Stop the process and wait until it has stopped; `signal(SIGCONT)` lets it go on."""
        self.signal(signal.SIGSTOP)
        assert eventually(lambda: _state(self.pid) == "T")

    def end(self, seconds: float = LIMIT) -> tuple[int, str]:
        """Wait for the end: exit code and standard error."""
        return self.popen.wait(seconds), self.stderr()

    def stderr(self) -> str:
        """What has come on standard error so far."""
        return os.pread(self._stderr.fileno(), 1 << 20, 0).decode()

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            stream.close()
        self._stderr.close()


class Processes:
    """Everything that a test started; as a context manager it ends it all."""

    def __init__(self) -> None:
        self._started: list[Process] = []

    def servers(
        self, count: int, *flags: str, each: Sequence[Sequence[str]] | None = None, cwd: Path | None = None
    ) -> list[Process]:
        """Start the servers of one job and wait until they listen; `each` holds more flags for each of them."""
        base = [
            sys.executable,
            "-m",
            "kvstore_server",
            "--num-servers",
            str(count),
            "--dead-after",
            str(LIMIT),
        ]
        started = [
            self.start([*base, "--index", str(index), *flags, *(each[index] if each else ())], cwd=cwd)
            for index in range(count)
        ]
        for server in started:
            assert server.address
        return started

    def worker(
        self, script: str, servers: Sequence[Process], rank: int, num_workers: int, namespace: str,
        dead_after: float = LIMIT, env: dict[str, str] | None = None,
    ) -> Process:  # fmt: skip
        """Start a worker that runs WORKER and then `script`."""
        env = {
            **(env or {}),
            "KVSTORE_RANK": str(rank),
            "KVSTORE_NUM_WORKERS": str(num_workers),
            "KVSTORE_SERVERS": ",".join(server.address for server in servers),
        }
        return self.start(
            [sys.executable, "-c", WORKER + script, namespace, str(LIMIT), str(dead_after)], env=env
        )

    def start(
        self, command: Sequence[str], env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> Process:
        process = Process(command, env or {}, cwd)
        self._started.append(process)
        return process

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.close()


class Members:
    """Workers as stores in this process; as a context manager it closes them."""

    def __init__(self) -> None:
        self._stores: list[DistKVStore] = []

    def join(
        self, servers: Sequence[Process | str], rank: int, num_workers: int, namespace: str, **options: Any
    ) -> DistKVStore:
        """Connect one worker."""
        addresses = [server if isinstance(server, str) else server.address for server in servers]
        limits = {"timeout": LIMIT, "connect_timeout": LIMIT, "dead_after": LIMIT, **options}
        store = DistKVStore(
            limits.pop("type", "dist_sync"),
            rank=rank,
            num_workers=num_workers,
            servers=addresses,
            namespace=namespace,
            **limits,
        )
        self._stores.append(store)
        return store

    def pair(self, servers: Sequence[Process | str], **options: Any) -> tuple[DistKVStore, DistKVStore]:
        """Both workers of a job of two, in a namespace of their own."""
        name = new_name()
        return self.join(servers, 0, 2, name, **options), self.join(servers, 1, 2, name, **options)

    def on_two(self, servers: Sequence[Process | str], work: Callable[[DistKVStore, int], Any]) -> list[Any]:
        """What both workers of a job of two return that do the same work, given their stores and ranks."""
        pair = self.pair(servers)
        return together(*(lambda kv=kv, r=r: work(kv, r) for r, kv in enumerate(pair)))

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        # Rounds that a test left open are not waited for.
        together(*(client.close for store in self._stores for client in store._clients))


@contextmanager
def impatient(store: DistKVStore, **limits: float) -> Iterator[None]:
    """Within the block a worker waits only so long: `timeout` for the others, `dead_after` for servers."""
    before = [(client, client.options) for client in store._clients]
    for client, options in before:
        client.options = client._session.options = replace(options, **limits)  # type: ignore[arg-type]
    yield
    for client, options in before:
        client.options = client._session.options = options


def together(*calls: Callable[[], Any], seconds: float = LIMIT) -> list[Any]:
    """Run calls at the same time, a thread each; what each returned, or the exception that it raised."""
    threads = [Call(call) for call in calls]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_running for thread in threads):  # perhaps for one that has failed
        raise AssertionError("\n".join(map(str, threads)))
    return [thread.outcome() for thread in threads]


def config_of_server(**options: Any) -> EngineConfig:
    """Make the configuration of a server whose socket on this host has a name of its own, whatever else runs."""
    return EngineConfig(run_id=secrets.randbits(62) | 1, capability=capability(), **options)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Run a server in a thread of this process, where its inside can be looked at; it has ended with the block."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.request_stop()
        thread.join()
        server.close()


class Call:
    """A call that runs in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for its end, so long."""
        self._thread.join(seconds)

    def outcome(self, seconds: float = LIMIT) -> Any:
        """What the call returned, or the exception that it raised."""
        self.join(seconds)
        assert not self.is_running, str(self)
        return self._outcome

    def __str__(self) -> str:
        """Say how it ended, or where it hangs."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is not None:
            return f"{self._call} hangs:\n{''.join(traceback.format_stack(frame))}"
        if isinstance(self._outcome, BaseException):
            return "".join(traceback.format_exception(self._outcome))
        return f"{self._call} has returned"

    def _run(self) -> None:
        try:
            self._outcome = self._call()
        except BaseException as error:
            self._outcome = error


def raised(outcomes: Sequence[Any], kind: type[BaseException]) -> list[str]:
    """The texts of the errors; every outcome must be an error of exactly this class."""
    assert [type(outcome) for outcome in outcomes] == [kind] * len(outcomes), outcomes
    return [str(outcome) for outcome in outcomes]


def round_of(store: DistKVStore, key: Any, value: torch.Tensor) -> torch.Tensor:
    """One pushpull of this worker: the new value of the key."""
    out = torch.empty_like(value)
    store.pushpull(key, value, out=out)
    return out


def assert_serve(servers: Sequence[Process | str]) -> None:
    """The servers still complete a job of two workers, with the right sums."""
    with Members() as members:
        stores = members.pair(servers)
        keys = [str(i) for i in range(4)]
        together(*(lambda s=s: s.init(keys, [torch.zeros(3)] * 4) for s in stores))
        out = [[torch.empty(3) for _ in keys] for _ in stores]
        values = [[torch.full((3,), float(1 + rank))] * 4 for rank in range(2)]
        outcomes = together(
            *(
                lambda s=s, v=v, o=o: s.pushpull(keys, v, out=o)
                for s, v, o in zip(stores, values, out, strict=True)
            )
        )
        assert outcomes == [None, None]
        assert all(torch.equal(one, torch.full((3,), 3.0)) for outs in out for one in outs)


def new_name() -> str:
    """A namespace that nobody else uses."""
    return uuid.uuid4().hex[:12]


def held_port() -> int:
    """Take a port of loopback that the system gives to nobody else as long as this process lives.

    It is bound, and nobody listens: whoever may reuse addresses, as servers do, can listen there all the same.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    atexit.register(holder.close)
    return int(holder.getsockname()[1])


def eventually(condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
    """Whether `condition` becomes true within the time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def _read(fd: int, seconds: float) -> bytes:
    poll = select.poll()  # select takes no descriptor above 1023
    poll.register(fd, select.POLLIN)
    assert poll.poll(1000 * seconds), f"nothing came within {seconds:g} s"
    return os.read(fd, 4096)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
