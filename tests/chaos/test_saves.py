"""Jobs that are saved by hand and lose everything, also while they are being saved, go on from the last whole save."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.jobs import SERVERS, WORKERS, Job, Member, Outcome, Undisturbed
from tests.chaos.training import CASES, SAVED

ROUNDS = 20
"""The job is saved after 6, 12 and 18 steps."""
SAVING = [
    "worker.save.asked", "worker.save.written", "worker.save.next_kept", "server.snapshot.cut",
    "server.snapshot.tensors", "server.snapshot.written", "server.snapshot.renamed", "server.snapshot.prune",
]  # fmt: skip
SAVED_CASES = [name for name, case in CASES.items() if case.saves]


def flags_of(folder: Path) -> list[str]:
    return ["--state-dir", str(folder / "states"), "--snapshot-every", "1000"]


def saved_parts(folder: Path) -> list[int]:
    """How many saves each server has."""
    folders = (folder / "states" / f"server-{at}" for at in range(SERVERS))
    return [len(list(one.glob(f"save-{SAVED}.*"))) for one in folders]


def fail_at(entry: str, folder: Path) -> dict[str, str]:
    (folder / "fired").mkdir()
    return {"KVSTORE_FAILPOINT": entry, "KVSTORE_FAILPOINT_DIR": str(folder / "fired")}


def index_of(name: str) -> int:
    """Which process gets there: rank 0, and the servers in turn."""
    return 0 if name.startswith("worker.") else SAVING.index(name) % SERVERS


class LosesEverything:
    """Kills all processes of a job with their memory, when one of them has stopped itself."""

    def __init__(self) -> None:
        self.computed: list[int] = []
        """How many gradients each rank had computed then."""

    def __call__(self, job: Job, stopped: Member) -> None:
        for member in job.workers:
            member.signal(signal.SIGSTOP)
        self.computed = [job.computed(rank) for rank in range(WORKERS)]
        for member in job.members:
            member.lose()


def check_lost(outcome: Outcome, loss: LosesEverything, expected: list[str]) -> None:
    assert outcome.results == expected
    # It goes on from what it had saved after 6 steps, or from a later save that is complete.
    most = [count - (6 if loss.computed[0] >= 12 else 0) for count in loss.computed]
    assert all(count <= most[rank] for rank, count in outcome.recomputed.items()), (loss.computed, outcome)


def test_processes_that_die_while_they_save_leave_the_same_bits_and_a_whole_save(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    expected = undisturbed("momentum", ROUNDS)
    entries = [f"{name}@{index_of(name)}" for name in SAVING]
    with Job("saved", ROUNDS, tmp_path, fail_at(",".join(entries), tmp_path), flags_of(tmp_path)) as job:
        outcome = job.run()
    assert outcome.results == expected
    assert outcome.fired == sorted(f"{entry}:1=kill" for entry in entries)
    assert max(outcome.recomputed.values(), default=0) <= 3  # the steps before which rank 0 has died
    assert saved_parts(tmp_path) == [1, 1]
    # Then another number of servers goes on from what was saved last.
    with Job("saved", ROUNDS, tmp_path, {}, flags_of(tmp_path), servers=3) as job:
        outcome = job.run()
    assert outcome.results == expected


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "server.snapshot.tensors" else pytest.mark.chaos) for n in SAVING],
)
def test_a_job_that_loses_everything_while_it_saves_goes_on_from_a_whole_save(
    name: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    loss, entry = LosesEverything(), f"{name}@{index_of(name)}:2=stop"
    with Job("saved", ROUNDS, tmp_path, fail_at(entry, tmp_path), flags_of(tmp_path), loss) as job:
        outcome = job.run()
    assert outcome.fired == [entry]
    check_lost(outcome, loss, undisturbed("momentum", ROUNDS))


@pytest.mark.chaos
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("case", SAVED_CASES)
def test_what_was_saved_is_loaded_by_any_number_of_servers(
    case: str, servers: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with Job(case, ROUNDS, tmp_path, {}, flags_of(tmp_path)) as job:
        expected = job.run().results
    with Job(case, ROUNDS, tmp_path, {}, flags_of(tmp_path), servers=servers) as job:
        outcome = job.run()
    assert outcome.results == expected  # of a job that was not interrupted
    assert outcome.computed[0, 18] == outcome.computed[0, 17] + 1 == 2
