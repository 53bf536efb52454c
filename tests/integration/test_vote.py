"""Loss scales of several workers on real servers: what overflows on one of them is skipped by all, at equal scales."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.amp import GradScaler
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import DistKVStore
from tests.support.stores import Servers, servers

SITES = pytest.mark.parametrize("in_store", [True, False])
SCALE = {"init_scale": 8.0, "growth_interval": 3}
STEPS = 6
BAD = (1, 3)
"""The worker, and its step, whose gradient overflows."""


@pytest.fixture(scope="module")
def jobs() -> Iterator[Servers]:
    with servers() as started:
        yield started


def slope(rank: int, step: int) -> float:
    return math.inf if (rank, step) == BAD else 1.0


def trainer_of(kv: DistKVStore, p: Parameter, in_store: bool, **options: Any) -> Trainer:
    return Trainer([p], "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=in_store, **options)


@SITES
def test_overflow_of_one_worker_is_skipped_by_all_and_scales_stay_equal(
    jobs: Servers, in_store: bool
) -> None:
    """Without a vote the weights would be -6 and -5, and the scales 32 and 8."""

    def body(kv: DistKVStore, rank: int) -> Any:
        p: Any = Parameter(torch.zeros(1))
        trainer, scaler = trainer_of(kv, p, in_store), GradScaler("cpu", **SCALE)  # type: ignore[arg-type]
        skipped = []
        for step in range(1, STEPS + 1):
            scaler.scale((p * slope(rank, step)).sum()).backward()
            skipped.append(scaler.step(trainer).skipped)
            scaler.update()
        return p.item(), scaler.get_scale(), scaler._get_growth_tracker(), skipped

    assert jobs.results(2, 2, body) == [(-5.0, 8.0, 0, [False, False, True, False, False, False])] * 2


def test_torchs_own_grad_scaler_is_refused_and_the_one_that_votes_is_named(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        p = Parameter(torch.zeros(1))
        trainer, scaler = trainer_of(kv, p, True), torch.amp.GradScaler("cpu")
        scaler.scale(p.sum()).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(ConfigurationError, match=r"2.*kvtrainer\.amp\.GradScaler"):
            scaler.step(trainer)
        return p.item()

    assert jobs.results(2, 1, body) == [0.0, 0.0]
