"""States saved in one job go on in another one, whatever the store of each: processes and servers are new ones.

One job saves for all places that it can have, one job for each size loads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.jobs import run_job
from tests.support.workers.states_matrix import OPTIMIZERS, Net, weights

IN_PROCESS = ["none", "local", "device", "reduced"]
SIZES: dict[int, list[str]] = {
    0: IN_PROCESS,
    1: ["dist 1"],
    2: ["dist 2", "dist reduced 2"],
    3: ["dist 3"],
}
"""Number of servers → the places in a job with so many."""
WORKERS = {0: 1, 1: 2, 2: 2, 3: 2}

Runs = Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Weights by place and optimizer, of the job with so many servers; states are in `folder` then."""
    done: dict[int, dict[str, Any]] = {}

    def run(servers: int) -> dict[str, Any]:
        if servers not in done:
            own = tmp_path_factory.mktemp(f"save{servers}")
            job = run_job(
                "states_matrix", own, WORKERS[servers], servers, "save", str(folder), *SIZES[servers]
            )
            done[servers] = {place: job[place][0] for place in SIZES[servers]}
        return done[servers]

    return run


@pytest.fixture(scope="module")
def resumed(folder: Path, uninterrupted: Runs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights by place, source and optimizer, of the job with so many servers, from states of jobs of given sizes."""
    done: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}

    def run(servers: int, sources: tuple[int, ...]) -> dict[str, Any]:
        if (servers, sources) not in done:
            places = [place for size in sources for place in uninterrupted(size)]
            own = tmp_path_factory.mktemp(f"load{servers}")
            arguments = ["load", str(folder), *SIZES[servers], "--", *places]
            job = run_job("states_matrix", own, WORKERS[servers], servers, *arguments)
            done[servers, sources] = {place: job[place][0] for place in SIZES[servers]}
        return done[servers, sources]

    return run


def check(uninterrupted: Runs, resumed: Any, sources: tuple[int, ...], target: int) -> None:
    for size in sources:
        for source, expected in uninterrupted(size).items():
            for place, runs in resumed(target, sources).items():
                for kind in OPTIMIZERS:
                    _check_equal(runs[source][kind], expected[kind], source == place, (source, place, kind))


def _check_equal(found: list[Tensor], expected: list[Tensor], is_same_kind: bool, what: object) -> None:
    start = weights(Net())
    assert all(not torch.equal(a, b) for a, b in zip(expected, start, strict=True)), what
    for a, b in zip(found, expected, strict=True):
        if is_same_kind:
            assert torch.equal(a, b), what
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=str(what))


@pytest.mark.parametrize("target", [0, 3])
def test_training_goes_on_in_another_place_as_if_never_interrupted(
    uninterrupted: Runs, resumed: Any, target: int
) -> None:
    check(uninterrupted, resumed, (0, 3), target)


@pytest.mark.full
@pytest.mark.parametrize("target", SIZES)
def test_training_goes_on_from_any_place_in_any_other(uninterrupted: Runs, resumed: Any, target: int) -> None:
    check(uninterrupted, resumed, tuple(SIZES), target)
