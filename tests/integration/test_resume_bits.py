"""Two epochs, a checkpoint, and a third in new processes with new servers are three epochs in one go, to the bit.

With mixed precision, an overflow before the checkpoint, clipping, options by parameter, schedules of the learning rate
and of momentum, dropout and shuffled data at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.support.jobs import Job, run_job

STORES = (
    "none", "local in store", "local by trainer", "device", "dist_sync in store", "dist_sync by workers"
)  # fmt: skip
OPTIMIZERS = ("momentum", "adam", "corrected", "accumulated", "pair")
CASES = [
    "none, adam",
    "local in store, corrected",
    "local by trainer, momentum",
    "device, momentum",
    "device, accumulated",
    "dist_sync in store, momentum",
    "dist_sync in store, corrected",
    "dist_sync in store, pair",
    "dist_sync by workers, accumulated",
]
OTHERS = [case for place in STORES for kind in OPTIMIZERS if (case := f"{place}, {kind}") not in CASES]

Runs = tuple[Job, Job]


def run(make: pytest.TempPathFactory, cases: list[str]) -> Runs:
    """Uninterrupted runs, and resumed ones."""
    folder = make.mktemp("files")
    first = run_job("resume_bits", make.mktemp("first"), 2, 2, "first", str(folder), *cases)
    (folder / "meeting").unlink(missing_ok=True)
    return first, run_job("resume_bits", make.mktemp("again"), 2, 2, "again", str(folder), *cases)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run(tmp_path_factory, CASES)


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run(tmp_path_factory, OTHERS)


def differences(mine: Any, other: Any, where: str = "") -> list[str]:
    """The places in which two nested values differ in a bit."""
    if isinstance(mine, torch.Tensor):
        return [] if mine.dtype == other.dtype and torch.equal(mine, other) else [where]
    if isinstance(mine, Mapping):
        if set(mine) != set(other):
            return [where]
        return [one for name in mine for one in differences(mine[name], other[name], f"{where}/{name}")]
    if isinstance(mine, Sequence) and not isinstance(mine, str):
        pairs = enumerate(zip(mine, other, strict=True))
        return [one for at, (a, b) in pairs for one in differences(a, b, f"{where}/{at}")]
    return [] if mine == other else [f"{where}: {mine} and {other}"]


def check(runs: Runs, case: str) -> None:
    for at, (uninterrupted, resumed) in enumerate(zip(*(job.results for job in runs), strict=True)):
        if case in uninterrupted:
            expected = {name: one for name, one in uninterrupted[case].items() if name != "skipped"}
            assert differences(resumed[case], expected, f"rank {at}") == []


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(runs: Runs, case: str) -> None:
    check(runs, case)


@pytest.mark.full
@pytest.mark.parametrize("case", OTHERS)
def test_so_has_one_with_any_store_and_optimizer(more_runs: Runs, case: str) -> None:
    check(more_runs, case)


def test_a_step_overflowed_before_the_checkpoint(runs: Runs) -> None:
    assert all(found["skipped"] for found in runs[0].results[0].values())
    assert all(found["skipped"] for found in runs[0].results[1].values())
