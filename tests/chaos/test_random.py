"""Random schedules of deaths, pauses and successors of living processes leave the bits of an undisturbed job.

`make test` runs some seeds of each training, `make chaos` hundreds. A seed that fails is a bug: it names its schedule,

    python -m pytest tests/chaos/test_random.py -m chaos -k "momentum-tcp-17"

runs it again. The schedule repeats exactly; what it hits depends on the machine, so try it several times.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.jobs import REPLACED, SERVERS, WORKERS, Event, Job, Outcome, Undisturbed, check_bits

FEW_ROUNDS, ROUNDS = 24, 40
"""Rounds of a job in `make test`, and in `make chaos`."""
EVENTS = 6
"""In one job, unless it ends before."""
TRAININGS = ["momentum", "adam", "adagrad", "clip", "compressed", "stored", "own", "hash"]
SEEDS, MANY_SEEDS = 3, 64
"""Seeds of each training in `make test`, at most, and in `make chaos`."""
ALL_SEEDS = ("momentum", "compressed", "own", "hash")
"""Trainings of which `make test` has all of these; of the others it has all but the last one."""


def kill(job: Job, at: int) -> None:
    job.members[at].signal(signal.SIGKILL)


def pause(job: Job, at: int) -> None:
    """Stop a process; the event after that lets it go on."""
    job.members[at].signal(signal.SIGSTOP)


def go_on(job: Job, at: int) -> None:
    job.members[at].signal(signal.SIGCONT)


def replace(job: Job, at: int) -> None:
    """Stop a worker and start a successor, as if nobody could see that it lives."""
    job.members[at].signal(signal.SIGSTOP)
    job.replace(job.members[at])


def wake(job: Job) -> None:
    """Let the replaced workers go on: they find that they are fenced."""
    for member in job.workers:
        for process in member.zombies:
            process.send_signal(signal.SIGCONT)


def schedule(seed: int) -> Iterator[Event]:
    """Events drawn by a seed: what happens after how many seconds, and to whom."""
    draw = random.Random(seed)
    for _ in range(EVENTS):
        at, after = draw.randrange(SERVERS + WORKERS), draw.uniform(0.02, 0.3)
        what = draw.choice(["kill", "kill", "kill", "pause", "replace"])
        if what == "replace" and at >= SERVERS:
            yield after, partial(replace, at=at)
            yield draw.uniform(0.1, 0.4), wake
        elif what == "pause":
            yield after, partial(pause, at=at)
            yield draw.uniform(0.05, 0.3), partial(go_on, at=at)
        else:
            yield after, partial(kill, at=at)


def check(
    case: str, way: str, seed: int, folder: Path, undisturbed: Undisturbed, rounds: int, faults: str = ""
) -> Outcome:
    environ = {"KVSTORE_TRANSPORT": way, "KVSTORE_FAULTS": faults}
    with Job(case, rounds, folder, environ, stopped=lambda job, member: None) as job:
        outcome = job.run(schedule(seed))
    check_bits(outcome, undisturbed(case, rounds))
    return outcome


CI = [(case, seed) for case in TRAININGS for seed in range(SEEDS) if seed < SEEDS - 1 or case in ALL_SEEDS]
ALL = [(case, seed) for case in TRAININGS for seed in range(MANY_SEEDS) if (case, seed) not in CI]


def with_transport(cases: list[tuple[str, int]]) -> list[tuple[str, str, int]]:
    return [(case, ("auto", "tcp")[seed % 2], seed) for case, seed in cases]


@pytest.mark.parametrize(("case", "way", "seed"), with_transport(CI))
def test_a_random_schedule_leaves_the_same_bits(
    case: str, way: str, seed: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    check(case, way, seed, tmp_path, undisturbed, FEW_ROUNDS)


@pytest.mark.chaos
@pytest.mark.parametrize(("case", "way", "seed"), with_transport(ALL))
def test_many_random_schedules_leave_the_same_bits(
    case: str, way: str, seed: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    outcome = check(case, way, seed, tmp_path, undisturbed, ROUNDS)
    # One that was replaced is fenced, unless it had ended its work or was killed.
    assert set(outcome.codes) <= {REPLACED, 0, -signal.SIGKILL}


@pytest.mark.parametrize(
    ("case", "way", "seed", "rounds"),
    [
        pytest.param(
            case,
            way,
            seed,
            FEW_ROUNDS if (case, seed) == ("momentum", 2) else ROUNDS,
            marks=() if (case, seed) == ("momentum", 2) else pytest.mark.chaos,
        )
        for case, way, seed in with_transport([(case, seed) for case in TRAININGS for seed in range(6)])
    ],
)
def test_deaths_over_a_network_that_loses_delays_and_repeats_leave_the_same_bits(
    case: str, way: str, seed: int, rounds: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    faults = f"drop=0.003,delay=0.1,duplicate=0.1,seconds=0.02,seed={seed}"
    check(case, way, seed, tmp_path, undisturbed, rounds, faults)


def test_a_schedule_repeats_and_has_all_kinds_of_events() -> None:
    def kinds(seed: int) -> list[tuple[float, str]]:
        found: list[tuple[float, str]] = []
        for after, what in schedule(seed):
            call: Callable[..., None] = what.func if isinstance(what, partial) else what
            found.append((after, call.__name__))
        return found

    assert kinds(3) == kinds(3) != kinds(4)
    assert {name for seed in range(SEEDS) for _, name in kinds(seed)} == {
        "kill", "pause", "go_on", "replace", "wake"
    }  # fmt: skip
