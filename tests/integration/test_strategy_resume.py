"""Two workers train by a Strategy, save, end; new ones go on from the checkpoint as if nothing had been."""

from __future__ import annotations

import pytest
import torch

from tests.support.jobs import Job, run_job

KINDS = pytest.mark.parametrize(
    "kind", ["dist_sync", "dist_sync compressed", "dist_sync at workers", "device"]
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Job]:
    folder = tmp_path_factory.mktemp("files")
    first = run_job("strategy", tmp_path_factory.mktemp("first"), 2, 2, "first", str(folder))
    (folder / "meeting").unlink(missing_ok=True)
    return first, run_job("strategy", tmp_path_factory.mktemp("again"), 2, 2, "again", str(folder))


@KINDS
def test_a_resumed_job_goes_on_with_the_bits_of_an_uninterrupted_one(
    jobs: tuple[Job, Job], kind: str
) -> None:
    """With clipping, options by parameter, schedules, dropout, random data and a loss scale, whose state is saved."""
    for uninterrupted, resumed in zip(jobs[0][kind], jobs[1][kind], strict=True):
        for name, value in uninterrupted["weights"].items():
            assert torch.equal(resumed["weights"][name], value), name
        for part in ("lr", "norms", "draws"):
            assert resumed[part] == uninterrupted[part]


def test_a_step_overflowed_before_the_checkpoint(jobs: tuple[Job, Job]) -> None:
    assert jobs[0]["dist_sync"][0]["skipped"]


@KINDS
def test_workers_have_the_weights_and_statistics_of_rank_0_from_the_beginning(
    jobs: tuple[Job, Job], kind: str
) -> None:
    """Although each draws its own, from another seed."""
    mine, other = (found["begun"] for found in jobs[0][kind])
    assert all(torch.equal(mine[name], other[name]) for name in mine)


@KINDS
def test_workers_agree_on_names_and_know_their_places_from_the_kvstore(
    jobs: tuple[Job, Job], kind: str
) -> None:
    first, second = jobs[0][kind]
    assert [first["place"], second["place"]] == [[0, 2, "kvlaunch", True], [1, 2, "kvlaunch", True]]
    assert first["names"] == second["names"]
    assert first["names"][1] == f"experiment of rank 0_{first['names'][0]}"


@KINDS
def test_every_rank_has_random_numbers_of_its_own_also_after_resuming(
    jobs: tuple[Job, Job], kind: str
) -> None:
    assert [found["seed"] for found in jobs[1][kind]] == [5, 6]
    first, second = (found["draws"] for found in jobs[1][kind])
    assert all(a != b for a, b in zip(first, second, strict=True))
