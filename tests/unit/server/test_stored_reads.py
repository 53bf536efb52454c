"""Snapshots are read in the background: requests that need them wait, and are handled once more when they are there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore_server.engine.rounds import Waiter
from kvstore_server.engine.stored_reads import StoredJob, StoredReads
from kvstore_server.errors import RecoveryError
from kvstore_server.protocol import messages as m


class Later:
    """A task that runs when the test says so."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._function, self._is_over = function, False

    def run(self) -> None:
        try:
            self._function()
        except RecoveryError as error:
            self.error = error
        self._is_over = True

    def is_over(self, seconds: float = 0.0) -> bool:
        return self._is_over


class Reads:
    def __init__(self) -> None:
        self.tasks: list[Later] = []
        self.reads = StoredReads(self._start)
        self.handled: list[tuple[bytes, StoredJob | str | None]] = []

    def _start(self, function: Callable[[], None]) -> Later:
        self.tasks.append(Later(function))
        return self.tasks[-1]

    def ask(self, peer: bytes, key: str, read: Callable[[], StoredJob]) -> StoredJob | None:
        def again(now: float) -> list[m.Outgoing]:
            try:
                self.handled.append((peer, self.reads.result(key, read, waiter, again)))
            except RecoveryError as error:
                self.handled.append((peer, str(error)))
            return []

        waiter = Waiter(peer, 1)
        return self.reads.result(key, read, waiter, again)


def test_requests_for_the_same_snapshot_wait_for_one_read() -> None:
    own, stored = Reads(), StoredJob((), ("a",))
    for peer in (b"1", b"2", b"1"):  # the last one is repeated
        assert own.ask(peer, "key", lambda: stored) is None
    assert own.reads.resume(0.0) == []
    [task] = own.tasks
    task.run()
    own.reads.resume(0.0)
    assert own.handled == [(b"1", stored), (b"2", stored)]
    own.reads.resume(0.0)
    assert len(own.handled) == 2


def test_an_error_of_the_read_is_raised_for_all_and_the_next_request_reads_again() -> None:
    own = Reads()

    def fail() -> StoredJob:
        raise RecoveryError("damaged")

    assert own.ask(b"1", "key", fail) is None
    own.tasks[0].run()
    own.reads.resume(0.0)
    assert own.handled == [(b"1", "damaged")]
    assert own.ask(b"2", "key", fail) is None
    assert len(own.tasks) == 2


def test_a_read_that_is_over_at_once_needs_nobody_to_wait() -> None:
    own = Reads()

    def start(function: Callable[[], None]) -> Later:
        task = Later(function)
        task.run()
        return task

    own.reads = StoredReads(start)
    assert own.ask(b"1", "key", StoredJob) == StoredJob()
    assert own.reads.resume(0.0) == []
    with pytest.raises(RecoveryError):
        own.ask(b"1", "key", lambda: (_ for _ in ()).throw(RecoveryError("damaged")))
