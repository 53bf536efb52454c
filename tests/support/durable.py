"""Durable engines in the test's own process: memory that the test holds, crashes at failpoints, and restarts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from kvstore_server import failpoints
from kvstore_server.durable.fd_store import FdStoreDescriptor
from kvstore_server.durable.spill_folder import SpillFolder
from kvstore_server.engine.durability import Durability, Head, read_durability
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.failpoints import ArmedFailpoint, Failpoints
from kvstore_server.transport.arena import Leases


class HeldDescriptors:
    """A file descriptor store as a supervisor has it."""

    def __init__(self) -> None:
        self.fds: list[FdStoreDescriptor] = []

    def store(self, name: str, fd: int) -> None:
        self.fds.append(FdStoreDescriptor(name, os.dup(fd)))

    def remove(self, name: str) -> None:
        for one in [one for one in self.fds if one.name == name]:
            self.fds.remove(one)
            os.close(one.fd)

    def passed(self) -> list[FdStoreDescriptor]:
        """What the next process gets, newest first: the order must not matter."""
        return [FdStoreDescriptor(one.name, os.dup(one.fd)) for one in reversed(self.fds)]

    def copied(self) -> HeldDescriptors:
        """What a supervisor has if the process is killed now; changing it does not change what the process has."""
        found = HeldDescriptors()
        for name, fd in self.fds:
            copy = os.memfd_create("copy")
            data = os.pread(fd, os.fstat(fd).st_size, 0)
            os.pwrite(copy, data, 0)
            found.fds.append(FdStoreDescriptor(name, copy))
        return found

    def close(self) -> None:
        for one in self.fds:
            os.close(one.fd)
        self.fds.clear()


class Crash(BaseException):
    """The process is killed at a failpoint: no `except Exception` may go on."""


@contextmanager
def crashes(points: Failpoints) -> Iterator[None]:
    """Raise Crash in the block where one of these points fires; they go on counting in the next block."""

    def crash(at: str) -> None:
        raise Crash(at)

    actions, armed = failpoints.ACTIONS["kill"], failpoints._armed
    failpoints.ACTIONS["kill"], failpoints._armed = crash, points
    try:
        yield
    finally:
        failpoints.ACTIONS["kill"], failpoints._armed = actions, armed


def crash_at(*points: tuple[str, int]) -> AbstractContextManager[None]:
    """Raise Crash in the block where failpoints are reached for the nth time."""
    return crashes(Failpoints([ArmedFailpoint(name, None, nth) for name, nth in points]))


def durable_engine(
    store: HeldDescriptors,
    config: EngineConfig | None = None,
    leases: Leases | None = None,
    now: float = 0.0,
    tokens: Callable[[], int] | None = None,
    spill: SpillFolder | None = None,
) -> Engine:
    """The engine of a server that begins, or that continues with what is held."""
    config = config or EngineConfig()
    kept = store.passed()
    try:
        stored = read_durability(kept)
        run = config.run_id if stored is None else stored.head.run_id
        durability, config = Durability(store, stored), replace(config, run_id=run, restart_timeout=60.0)
        others = {} if tokens is None else {"tokens": tokens}
        engine = Engine(config, leases, durability=durability, spill=spill, **others)
        if stored is not None:
            engine.restore(now)
        head = Head(config.server, config.num_servers, config.capability, run, "tcp://127.0.0.1:1")
        engine.begin_log(head)
    except BaseException:
        for one in kept:
            os.close(one.fd)
        raise
    return engine
