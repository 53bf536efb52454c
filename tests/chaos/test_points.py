"""A process that dies at any named point comes back, and the job ends with the bits of one in which nobody died.

Each case runs a job whose failpoints are armed, and every one of them must have fired. `make test` has some points in
each of its jobs, and meets every point once. `make chaos` gives each point a job of its own, in the first, the 7th and
the last round, with memory that is shared and over TCP.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore_server.failpoints import POINTS
from tests.chaos.jobs import SERVERS, WORKERS, Undisturbed, run_case
from tests.chaos.test_members import POINTS as OF_MEMBERS
from tests.chaos.training import CASES

ROUNDS = 9
WHEN = {"first": 1, "7th": 7, "last": ROUNDS}
WAYS = ("auto", "tcp")


@dataclass(frozen=True)
class Place:
    """When a process gets to a point.

    Args:
        before: How often it has got there before the first round that trains; round 0 sets the first values. Below 0 if
            it does not get there in the first of these rounds.
        each: How often it gets there in every round; 0 if the point is not in a round.
        case: The training in which it does.
        after: Another point at which a process has to die first.
    """

    before: int = 0
    each: int = 0
    case: str = "momentum"
    after: str = ""

    def times(self) -> dict[str, int]:
        """By name, the numbers to arm it with."""
        if not self.each:
            return {"": self.before + 1}
        return {name: max(1, self.before + (at - 1) * self.each + 1) for name, at in WHEN.items()}


PLACES = {
    "worker.connect.hello": Place(2),
    "worker.connect.welcome": Place(2),
    "worker.connect.open": Place(1),
    "worker.register.begin": Place(),
    "worker.register.next": Place(),
    "worker.register.end": Place(),
    "worker.optimizer.next": Place(),
    "worker.init.begin": Place(),
    "worker.init.end": Place(),
    "worker.round.begin": Place(1, 1),
    "worker.round.eager": Place(0, 10, "overlap"),
    "worker.round.next_slices": Place(2, 2),
    "worker.round.commit": Place(1, 1),
    "worker.round.next_commit": Place(2, 2),
    "worker.round.committed": Place(1, 1),
    "worker.round.held": Place(0, 2, "clip"),
    "worker.round.next_decision": Place(0, 2, "clip"),
    "worker.round.answered": Place(1, 1),
    "worker.round.write": Place(1, 1),
    "worker.round.next_write": Place(2, 2),
    "worker.round.written": Place(1, 1),
    "worker.round.end": Place(1, 1),
    "worker.memory.written": Place(1, 1, "2bit"),
    "worker.rows.asked": Place(0, 1, "stored"),
    "worker.barrier.begin": Place(0, 0, "barrier"),
    "worker.barrier.end": Place(0, 0, "barrier"),
    "worker.join": Place(0, 0, "join"),
    "worker.close": Place(),
    "worker.close.next": Place(),
    "worker.close.left": Place(),
    "server.update.begin": Place(1, 1),
    "server.update.next_chunk": Place(1, 1),
    "server.update.end": Place(1, 1),
    "server.update.next_row_group": Place(0, 1, "adagrad"),
    "server.hash_table.taken": Place(0, 1, "hash"),
    "server.hash_table.updated": Place(0, 1, "hash"),
    "server.memory.made": Place(),
    "server.memory.stored": Place(),
    "server.memory.drop": Place(),
    "server.journal.copied": Place(0, 1),
    "server.journal.recorded": Place(0, 1),
    "server.journal.ranges_copied": Place(1, 3, "adagrad"),
    "server.journal.rows_copied": Place(-2, 2, "adagrad"),
    "server.commit.begin": Place(13, 1),
    "server.commit.logged": Place(13, 1),
    "server.log.unpublished": Place(22, 1),
    "server.compact.written": Place(),
    "server.compact.stored": Place(),
    "server.compact.removed": Place(),
    "server.recovery.undone": Place(after="server.update.next_chunk"),
    "server.recovery.declared": Place(after="server.update.end"),
    "server.recovery.applied": Place(after="server.update.end"),
    "server.recovery.remove": Place(after="server.update.end"),
}
OF_SNAPSHOTS = {
    name
    for name in POINTS
    if name.startswith(("server.snapshot.", "worker.snapshot.", "worker.save."))
    or name == "worker.connect.next_return"
}
"""These are met in `test_snapshots` and `test_saves`, in jobs that write some."""


def entries_of(name: str, when: str, index: int) -> list[str]:
    """Arm a point in one process, and what has to come before."""
    place = PLACES[name]
    found = [f"{name}@{index}:{place.times()[when]}"]
    if place.after:
        found.insert(0, f"{place.after}@{index}:{PLACES[place.after].times()['7th']}")
    return found


def index_of(name: str) -> int:
    """Which rank or server dies at a point, in a job of its own; the points are spread over them."""
    return zlib.crc32(name.encode()) % (SERVERS if name.startswith("server.") else WORKERS)


EVERY = [(name, when) for name, place in PLACES.items() for when in place.times()]


def batches() -> list[tuple[str, list[str]]]:
    """(case, entries) of jobs that together meet every point once; in each of them every process dies once.

    A process that is started again counts from 1, so it might not get to a second point in the rounds that are left.
    """
    found: list[tuple[str, list[str]]] = []
    for case in CASES:
        jobs: dict[int, list[str]] = {}
        for role, members in (("server.", SERVERS), ("worker.", WORKERS)):
            names = [name for name, place in PLACES.items() if place.case == case and name.startswith(role)]
            for at, name in enumerate(names):
                whens = list(PLACES[name].times())
                when = whens[zlib.crc32(f"{name} when".encode()) % len(whens)]
                jobs.setdefault(at // members, []).extend(entries_of(name, when, at % members))
        found += [(case, entries) for entries in jobs.values()]
    return found


def test_every_point_has_its_place_here() -> None:
    assert set(PLACES) | set(OF_MEMBERS) == set(POINTS) - OF_SNAPSHOTS
    assert {place.case for place in PLACES.values()} <= set(CASES)
    assert len(POINTS) >= 40


@pytest.mark.parametrize("at", range(len(batches())))
def test_a_job_whose_processes_die_one_after_the_other_ends_with_the_same_bits(
    at: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    case, entries = batches()[at]
    run_case(case, entries, WAYS[at % 2], tmp_path, undisturbed(case, ROUNDS), ROUNDS)


HALF = ("adagrad", "stored", "hash", "own")
"""Trainings whose half commits are met in `make test`; `momentum` is in `PLACES`."""


@pytest.mark.parametrize(
    "case",
    # Those that save have servers with a directory, see test_saves.py.
    [pytest.param(c, marks=() if c in HALF else pytest.mark.chaos) for c in CASES if not CASES[c].saves],
)
def test_a_worker_that_dies_between_two_commits_leaves_no_half_round(
    case: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    place = PLACES["worker.round.next_commit"]
    entry = f"worker.round.next_commit@1:{place.times()['7th']}"
    run_case(case, [entry], WAYS[zlib.crc32(case.encode()) % 2], tmp_path, undisturbed(case, ROUNDS), ROUNDS)


@pytest.mark.chaos
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "when"), EVERY)
def test_a_process_that_dies_at_a_point_leaves_the_same_bits(
    name: str, when: str, way: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    case = PLACES[name].case
    run_case(case, entries_of(name, when, index_of(name)), way, tmp_path, undisturbed(case, ROUNDS), ROUNDS)


SURVIVING = ["2bit", "topk", "worker_update"]
"""Trainings in which workers have state of their own, which outlives them."""


OF_WORKERS = [at for at in EVERY if at[0].startswith("worker.") and PLACES[at[0]].case == "momentum"]
NO_OPTIMIZER = ("worker_update", "worker.optimizer.next")
"""Where workers update, servers have none."""


@pytest.mark.chaos
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("case", "name", "when"),
    [(case, *at) for case in SURVIVING for at in OF_WORKERS if (case, at[0]) != NO_OPTIMIZER],
)
def test_what_a_worker_has_alone_outlives_it(
    case: str, name: str, when: str, way: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    entries = entries_of(name, when, index_of(name))
    run_case(case, entries, way, tmp_path, undisturbed(case, ROUNDS), ROUNDS)


def test_the_bits_of_an_undisturbed_job_do_not_depend_on_the_transport(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    run_case("momentum", (), "tcp", tmp_path, undisturbed("momentum", ROUNDS), ROUNDS)
