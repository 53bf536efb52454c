"""Jobs that lose a server with its memory, or everything, go on from snapshots and end with the same bits.

`make test` loses everything once in each of some trainings, at a round drawn by a seed. `make chaos` has many seeds.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.chaos.jobs import SERVERS, WORKERS, Event, Job, Member, Outcome, Undisturbed

ROUNDS, EVERY = 24, 6
TRAININGS = ["momentum", "adam", "adagrad", "clip", "hash"]
FEW = "adagrad", "clip", "hash"
"""Trainings that `make test` has."""
MANY_SEEDS = 12


Lost = Callable[[Job], Sequence[Member]]


def everything(job: Job) -> Sequence[Member]:
    return job.members


def signal_workers(job: Job, number: int) -> None:
    for member in job.workers:
        member.signal(number)


def flags_of(folder: Path, every: str = str(EVERY)) -> list[str]:
    return ["--state-dir", str(folder / "snapshots"), "--snapshot-every", every]


class Loss:
    """Loses some processes of a job and their memory once rank 0 has computed some gradients.

    Args:
        lost: Which ones.
        count: So many gradients.
        needs_snapshot: Wait until there is a snapshot of all servers, too.
    """

    def __init__(self, lost: Lost, count: int, folder: Path, needs_snapshot: bool) -> None:
        self._lost, self._count, self._needs_snapshot = lost, count, needs_snapshot
        self._folders = [folder / "snapshots" / f"server-{at}" for at in range(SERVERS)]
        self.round = 0
        """That of the latest snapshot of all servers before."""
        self.computed: list[int] = []
        """How many gradients each rank had computed."""

    def events(self, jobs: Sequence[Job]) -> Iterator[Event]:
        while not jobs or jobs[0].computed(0) < self._count:
            yield 0.01, lambda job: None
        # The job must not end while the disk is slow.
        yield 0.0, lambda job: signal_workers(job, signal.SIGSTOP)
        while self._needs_snapshot > self.latest():
            yield 0.01, lambda job: None
        self.round = self.latest()
        yield 0.0, self._lose

    def latest(self) -> int:
        rounds = [{int(path.name[6:18]) for path in one.glob("round-*")} for one in self._folders]
        return max(set.intersection(*rounds), default=0)

    def _lose(self, job: Job) -> None:
        for member in self._lost(job):
            member.lose()
        self.computed = [job.computed(rank) for rank in range(WORKERS)]
        signal_workers(job, signal.SIGCONT)

    def check(self, outcome: Outcome, expected: list[str]) -> None:
        assert outcome.results == expected, f"{outcome}, but expected {expected}"
        # The snapshot of round r has r - 1 steps. Workers that live may compute one more before they notice.
        most = [count - max(self.round - 1, 0) + 1 for count in self.computed]
        assert all(count <= most[rank] for rank, count in outcome.recomputed.items() if most), (most, outcome)


def run(case: str, folder: Path, loss: Loss, environ: dict[str, str] | None = None) -> Outcome:
    jobs: list[Job] = []
    with Job(case, ROUNDS, folder, environ or {}, flags_of(folder), lambda job, member: None) as job:
        jobs.append(job)
        return job.run(loss.events(jobs))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FEW else pytest.mark.chaos) for c in TRAININGS]
)
def test_a_job_that_loses_all_processes_and_their_memory_goes_on_from_a_snapshot(
    case: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    loss = Loss(everything, random.Random(case).randrange(EVERY + 3, ROUNDS), tmp_path, True)
    loss.check(run(case, tmp_path, loss), undisturbed(case, ROUNDS))
    assert loss.round >= EVERY


def test_a_job_with_a_period_in_seconds_goes_on_from_a_snapshot(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    loss, jobs = Loss(everything, EVERY, tmp_path, True), list[Job]()
    with Job("overlap", ROUNDS, tmp_path, {}, flags_of(tmp_path, "0.1s")) as job:
        jobs.append(job)
        loss.check(job.run(loss.events(jobs)), undisturbed("overlap", ROUNDS))
    assert loss.round > 0


@pytest.mark.parametrize("durability", ["process", pytest.param("off", marks=pytest.mark.chaos)])
def test_servers_that_have_lost_nothing_go_back_with_one_that_has(
    durability: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    loss = Loss(lambda job: job.servers[1:], EVERY + 3, tmp_path, True)
    outcome = run("barrier", tmp_path, loss, {"KVSTORE_DURABILITY": durability})
    loss.check(outcome, undisturbed("barrier", ROUNDS))
    assert outcome.starts["server0"] == 1
    assert {outcome.starts[f"worker{rank}"] for rank in range(WORKERS)} == {2}
    assert min(outcome.recomputed[rank] for rank in range(WORKERS)) > 1  # the survivor went back, too


def test_a_job_that_is_lost_before_its_first_snapshot_begins_again(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    loss = Loss(lambda job: job.servers[1:], 3, tmp_path, False)
    loss.check(run("momentum", tmp_path, loss), undisturbed("momentum", ROUNDS))


WRITING = ["cut", "tensors", "written", "renamed", "prune"]


def test_servers_that_die_while_they_write_snapshots_leave_the_same_bits(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    entries = [f"server.snapshot.{name}@{at % SERVERS}" for at, name in enumerate(WRITING)]
    entries.append("worker.snapshot.taken@0")
    (tmp_path / "fired").mkdir()
    environ = {"KVSTORE_FAILPOINT": ",".join(entries), "KVSTORE_FAILPOINT_DIR": str(tmp_path / "fired")}
    flags = ["--state-dir", str(tmp_path / "snapshots"), "--snapshot-every", "1"]
    with Job("momentum", ROUNDS, tmp_path, environ, flags) as job:
        outcome = job.run()
    assert outcome.results == undisturbed("momentum", ROUNDS)
    assert outcome.fired == sorted(f"{entry}:1=kill" for entry in entries)
    assert outcome.recomputed == {0: 1}  # the memory of servers outlives them


GOING_BACK = ["server.snapshot.load@1", "server.snapshot.restored@0", "worker.connect.next_return"]


@pytest.mark.parametrize(
    "entries",
    [GOING_BACK, *[pytest.param([one], marks=pytest.mark.chaos) for one in GOING_BACK]],
    ids=",".join,
)
def test_processes_that_die_while_a_job_goes_back_leave_the_same_bits(
    entries: list[str], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    (tmp_path / "fired").mkdir()
    environ = {"KVSTORE_FAILPOINT": ",".join(entries), "KVSTORE_FAILPOINT_DIR": str(tmp_path / "fired")}
    loss = Loss(everything, EVERY + 3, tmp_path, True)
    outcome = run("momentum", tmp_path, loss, environ)
    assert outcome.results == undisturbed("momentum", ROUNDS)
    assert len(outcome.fired) == len(entries)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(MANY_SEEDS))
@pytest.mark.parametrize("case", [*TRAININGS, "overlap", "stored", "compressed", "barrier", "join"])
def test_losses_at_random_rounds_leave_the_same_bits(
    case: str, seed: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    draw = random.Random(f"{case} {seed}")
    lost: Sequence[Lost] = [
        everything, lambda job: job.servers, lambda job: job.servers[:1], lambda job: job.servers[1:]
    ]  # fmt: skip
    loss = Loss(draw.choice(lost), draw.randrange(1, ROUNDS - 4), tmp_path, False)
    loss.check(run(case, tmp_path, loss), undisturbed(case, ROUNDS))
