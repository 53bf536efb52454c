"""States saved in one job go on in another one, whatever the store of each: processes and servers are new ones.

One job saves for all places that it can have, one job for each size loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.jobs import run_job
from tests.support.workers.states_matrix import OPTIMIZERS, Net, kind_of, load_all, save_all, weights

IN_PROCESS = ["none", "local", "device", "reduced"]
SIZES: dict[int, list[str]] = {
    0: IN_PROCESS,
    1: ["dist 1"],
    2: ["dist 2", "dist reduced 2"],
    3: ["dist 3"],
}
"""Number of servers → the places in a job with so many."""
WORKERS = {0: 1, 1: 2, 2: 2, 3: 2}

Runs = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Weights by place and optimizer; states are in `folder` then."""
    found: Runs = {}
    for servers, places in SIZES.items():
        own = tmp_path_factory.mktemp(f"save{servers}")
        job = run_job(save_all, own, WORKERS[servers], servers, str(folder), places)
        found |= {place: job[place][0] for place in places}
    return found


@pytest.fixture(scope="module", params=SIZES, ids="servers={}".format)
def resumed(
    request: pytest.FixtureRequest,
    folder: Path,
    uninterrupted: Runs,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    """Weights by place, source and optimizer, of a job with so many servers, from the states of every place."""
    servers = request.param
    own = tmp_path_factory.mktemp(f"load{servers}")
    job = run_job(load_all, own, WORKERS[servers], servers, str(folder), SIZES[servers], [*uninterrupted])
    return {place: job[place][0] for place in SIZES[servers]}


def _check_equal(found: list[Tensor], expected: list[Tensor], is_same_kind: bool, what: object) -> None:
    start = weights(Net())
    assert all(not torch.equal(a, b) for a, b in zip(expected, start, strict=True)), what
    for a, b in zip(found, expected, strict=True):
        if is_same_kind:
            assert torch.equal(a, b), what
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=str(what))


def test_every_place_and_every_source_has_every_kind_of_optimizer() -> None:
    places = [place for one in SIZES.values() for place in one]
    for place in places:
        assert {kind_of(place, source, places) for source in places} == OPTIMIZERS.keys()
        assert {kind_of(other, place, places) for other in places} == OPTIMIZERS.keys()


def test_training_goes_on_in_any_other_place_as_if_never_interrupted(
    uninterrupted: Runs, resumed: Runs
) -> None:
    for source, expected in uninterrupted.items():
        for place, runs in resumed.items():
            kind = kind_of(place, source, [*uninterrupted])
            _check_equal(runs[source], expected[kind], source == place, (source, place, kind))
