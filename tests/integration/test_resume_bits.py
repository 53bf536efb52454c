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
CASES = [f"{place}, {kind}" for place in STORES for kind in OPTIMIZERS]

Runs = tuple[Job, Job]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Uninterrupted runs, and resumed ones."""
    make, folder = tmp_path_factory.mktemp, tmp_path_factory.mktemp("files")
    first = run_job("resume_bits", make("first"), 2, 2, "first", str(folder), *CASES)
    (folder / "meeting").unlink(missing_ok=True)
    return first, run_job("resume_bits", make("again"), 2, 2, "again", str(folder), *CASES)


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


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(runs: Runs, case: str) -> None:
    for at, (uninterrupted, resumed) in enumerate(zip(*(job.results for job in runs), strict=True)):
        if case in uninterrupted:
            expected = {name: one for name, one in uninterrupted[case].items() if name != "skipped"}
            assert differences(resumed[case], expected, f"rank {at}") == []


def test_a_step_overflowed_before_the_checkpoint(runs: Runs) -> None:
    assert all(found["skipped"] for found in runs[0].results[0].values())
    assert all(found["skipped"] for found in runs[0].results[1].values())
