"""What happens to whom × when contributions count: every job ends with a typed error in time, or goes on.

The jobs of all modes run at the same time. Rank 0 is a thread of the test, rank 1 a process; two servers.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import pytest
import torch

from kvtrainer.errors import ServerLostState, ServerUnreachableError, WorkerLostError
from tests.support.faulty_worker import Loop, Training
from tests.support.limits import DEAD_AFTER, LIMIT
from tests.support.processes import (
    FORGETFUL,
    Members,
    Process,
    Processes,
    assert_serve,
    eventually,
    held_port,
    new_name,
    round_of,
    together,
)

MODES = ["dist_sync", "dist_async", "dist_ssp"]
HOW = [pytest.param("verbs", id="verbs"), pytest.param("trainer", id="trainer", marks=pytest.mark.full)]


class Job:
    """Two workers that train: rank 0 here, rank 1 a process."""

    def __init__(
        self,
        processes: Processes,
        members: Members,
        servers: list[Process],
        type: str,
        how: str,
        dead_after: float,
    ) -> None:
        self._processes, self._servers, self._how = processes, servers, how
        self._dead_after = dead_after
        self.type = type
        self._name = new_name()
        self.other = self.successor()
        self.other.go()
        options = {"type": type, "timeout": LIMIT, "dead_after": dead_after}
        self.loop = Loop(
            lambda: Training(members.join(servers, 0, 2, self._name, **options), how == "trainer")
        )

    def successor(self) -> Process:
        """A further process of rank 1, which has loaded all it needs and waits to `go`."""
        command = [sys.executable, "-m", "tests.support.faulty_worker"]
        env = {
            "KVSTORE_RANK": "1",
            "KVSTORE_NUM_WORKERS": "2",
            "KVSTORE_SERVERS": ",".join(server.address for server in self._servers),
        }
        arguments = [self.type, self._name, str(self._dead_after), self._how]
        process = self._processes.start([*command, *arguments], env)
        assert process.line() == "loaded"
        return process

    def fate(self) -> str:
        """The class of the error that rank 0 gets."""
        assert self.loop.fails(LIMIT), f"{self.type} goes on"
        return type(self.loop.error).__name__

    def own_fate(self) -> str:
        """What became of rank 1, which has an error: its class."""
        with suppress(BrokenPipeError):  # it has ended
            self.other.go()
        code, stderr = self.other.end()
        assert code == 1, stderr
        return stderr.strip().splitlines()[-1].partition(":")[0].rpartition(".")[2]


class Jobs(Protocol):
    """Starts a job for each mode; `dead_after` is how long a server may be silent for its workers."""

    def __call__(
        self, servers: list[Process], how: str, dead_after: float = LIMIT, modes: Sequence[str] = MODES
    ) -> dict[str, Job]: ...


@pytest.fixture
def start(processes: Processes) -> Iterator[Jobs]:
    """Starts the jobs of some modes, and waits until their workers train side by side."""
    running: list[Job] = []

    def jobs(
        servers: list[Process], how: str, dead_after: float = LIMIT, modes: Sequence[str] = MODES
    ) -> dict[str, Job]:
        shared = (processes, members, servers)
        made = in_all({type: partial(Job, *shared, type, how, dead_after) for type in modes})
        running.extend(made.values())
        assert all(job.loop.goes_on(1) for job in running), [job.loop.error for job in running]
        return made

    with Members() as members:
        yield jobs
        together(*(job.loop.close for job in running))


def in_all(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run a call for each mode at the same time; what they returned."""
    outcomes = together(*calls.values())
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return dict(zip(calls, outcomes, strict=True))


def assert_one_of(jobs: dict[str, Job], *kinds: type[BaseException]) -> None:
    """Every worker of every mode gets one of these errors."""
    names = {kind.__name__ for kind in kinds}
    fates = in_all({mode: job.fate for mode, job in jobs.items()})
    assert names >= {*fates.values(), *[job.own_fate() for job in jobs.values()]}, fates


def assert_fates(jobs: dict[str, Job], *expected: type[BaseException] | None) -> None:
    """Rank 0 gets this error in each mode; where none is expected it still goes on when all the others have theirs."""
    lost = {mode: error.__name__ for mode, error in zip(MODES, expected, strict=True) if error is not None}
    assert in_all({mode: jobs[mode].fate for mode in lost}) == lost
    for mode in jobs.keys() - lost.keys():
        assert jobs[mode].loop.goes_on(0), jobs[mode].loop.error


@pytest.mark.parametrize("how", HOW)
def test_a_worker_is_killed(processes: Processes, start: Jobs, how: str) -> None:
    servers = processes.servers(2, *FORGETFUL)
    jobs = start(servers, how)
    for job in jobs.values():
        job.other.signal(signal.SIGKILL)
    assert_fates(jobs, WorkerLostError, None, WorkerLostError)
    for type in ("dist_sync", "dist_ssp"):
        assert "rank 1" in str(jobs[type].loop.error)
    # The round that failed has left no trace on any server.
    training = jobs["dist_sync"].loop.training
    assert training is not None
    assert len(training.seen()) == 1
    assert_serve(servers)


@pytest.mark.parametrize("how", HOW)
def test_a_worker_is_stopped_for_longer_than_the_dead_are_silent_and_continues(
    processes: Processes, start: Jobs, how: str
) -> None:
    servers = processes.servers(2, *FORGETFUL)
    jobs = start(servers, how)
    for job in jobs.values():
        job.other.freeze()
    assert_fates(jobs, WorkerLostError, None, WorkerLostError)
    for job in jobs.values():
        job.other.signal(signal.SIGCONT)
    bounded = jobs["dist_ssp"].loop
    training = bounded.training
    assert training is not None
    assert eventually(lambda: training.num_dead() == 0)  # before that a read fails again
    bounded.resume()
    assert jobs["dist_sync"].own_fate() == "WorkerLostError"
    for type in ("dist_async", "dist_ssp"):
        assert jobs[type].loop.goes_on(1), jobs[type].loop.error
        assert jobs[type].loop.goes_on(0), jobs[type].loop.error
    assert_serve(servers)


@pytest.mark.parametrize("how", HOW)
def test_a_worker_is_killed_and_its_script_started_again(processes: Processes, start: Jobs, how: str) -> None:
    servers = processes.servers(2)
    jobs = start(servers, how)
    successors = in_all({type: job.successor for type, job in jobs.items()})
    for type, job in jobs.items():
        job.other.signal(signal.SIGKILL)
        job.other.end()
        job.other = successors[type]
        job.other.go()
    assert jobs["dist_sync"].own_fate() == "ConfigurationError"
    assert "Restart the job and its servers" in jobs["dist_sync"].other.stderr()
    assert jobs["dist_sync"].fate() == "WorkerLostError"
    assert "rank 1" in str(
        jobs["dist_sync"].loop.error
    )  # killed, or its successor was refused: either may be first
    for type in ("dist_async", "dist_ssp"):
        assert jobs[type].loop.goes_on(1), jobs[type].loop.error
        assert jobs[type].loop.goes_on(0), jobs[type].loop.error
    assert_serve(servers)


@pytest.mark.parametrize("how", HOW)
def test_a_script_that_is_started_again_after_its_death_was_noticed_goes_on_where_that_can_be(
    processes: Processes, start: Jobs, how: str
) -> None:
    servers = processes.servers(2, *FORGETFUL)
    job = start(servers, how, modes=["dist_ssp"])["dist_ssp"]
    job.other.signal(signal.SIGKILL)
    assert job.fate() == "WorkerLostError"
    job.other = job.successor()
    job.other.go()
    assert job.loop.fails(1.0)
    while job.loop.error is not None:  # until the successor has come, nobody can go on
        assert isinstance(job.loop.error, WorkerLostError)
        job.loop.resume()
        job.loop.fails(1.0)
    assert job.loop.goes_on(1), job.loop.error
    assert job.loop.goes_on(0), job.loop.error


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_server_is_killed_or_stopped(processes: Processes, start: Jobs, is_killed: bool, how: str) -> None:
    servers = processes.servers(2)
    jobs = start(servers, how, dead_after=DEAD_AFTER)
    if is_killed:
        servers[1].signal(signal.SIGKILL)
    else:
        servers[1].freeze()
    assert_fates(jobs, *[ServerUnreachableError] * 3)
    for job in jobs.values():
        assert "server 1" in str(job.loop.error)
        assert job.own_fate() == "ServerUnreachableError"
    if not is_killed:
        servers[1].signal(signal.SIGCONT)
        assert_serve(servers)


@pytest.mark.parametrize("how", HOW)
def test_a_server_is_killed_and_started_again(processes: Processes, start: Jobs, how: str) -> None:
    flags = [["--bind", "tcp://127.0.0.1:0"], ["--bind", f"tcp://127.0.0.1:{held_port()}"]]
    servers = processes.servers(2, each=flags)
    jobs = start(servers, how)
    servers[1].signal(signal.SIGKILL)
    servers[1].end()
    again = processes.servers(2, each=flags)
    # Who is slow to notice that the process has ended may hear first from the one in its place.
    assert_one_of(jobs, ServerLostState, ServerUnreachableError)
    assert_serve([servers[0], again[1]])


def test_a_worker_that_sees_no_processes_hears_from_the_server_in_the_place_of_a_dead_one(
    processes: Processes, members: Members, unseen: None
) -> None:
    flags = ["--bind", f"tcp://127.0.0.1:{held_port()}"]
    servers = processes.servers(1, *flags)
    store = members.join(servers, 0, 1, new_name())
    store.init("w", torch.zeros(3))
    servers[0].signal(signal.SIGKILL)
    servers[0].end()
    again = processes.servers(1, *flags)
    with pytest.raises(ServerLostState, match="no longer holds this job's weights"):
        round_of(store, "w", torch.ones(3))
    assert_serve(again)
