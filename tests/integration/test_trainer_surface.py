"""Two workers and two servers: loss scaling, published weights, schedulers and numbers that change while training.

Every test trains a sliced and a small parameter, with equal gradients everywhere, at both sites of the update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer, amp
from kvtrainer.errors import PlanMismatchError
from kvtrainer.kvstore import DistKVStore
from kvtrainer.lr_scheduler import PolyScheduler
from tests.support.stores import Servers

SHAPES = (3,), (170, 301)
MOMENTUM = {"learning_rate": 1.0, "momentum": 0.5}
SITES = pytest.mark.parametrize("in_store", [True, False], ids=["in-store", "reduced"])


def made(kv: DistKVStore, in_store: bool, options: dict[str, Any]) -> tuple[list[Parameter], Trainer]:
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    return parameters, Trainer(parameters, "sgd", options, kvstore=kv, update_on_kvstore=in_store)


def step(trainer: Trainer, parameters: Sequence[Parameter], batch_size: int = 2) -> list[float]:
    for p in parameters:
        p.sum().backward()
    trainer.step(batch_size)
    return values(parameters)


def values(parameters: Sequence[Parameter]) -> list[float]:
    """The one value of each parameter; NaN where its elements differ."""
    return [p.unique().item() if p.unique().numel() == 1 else math.nan for p in parameters]


@SITES
def test_overflow_on_one_worker_skips_the_step_on_all_and_halves_every_scale_once(
    jobs: Servers, in_store: bool
) -> None:
    """In step 1 one gradient of rank 1, of the small parameter, is infinite."""

    def body(kv: DistKVStore, rank: int) -> Any:
        parameters, trainer = made(kv, in_store, MOMENTUM)
        amp.init_trainer(trainer)
        weights, scales = [], []
        for at in range(4):
            for p in parameters:
                slope = math.inf if (at, rank, p.dim()) == (1, 1, 1) else 1.0
                with amp.scale_loss((p * slope).sum(), trainer) as scaled:
                    scaled.backward()
            scales.append(trainer.amp_loss_scale)
            trainer.step(2)
            weights.append(values(parameters))
        steps = [float(state["step"]) for state in trainer.state_dict()["state"].values()]
        return weights, scales, steps, trainer.optimizer.num_update

    # m = .5 m - 1 in three steps; the second of four is skipped.
    weights = [[-1.0] * 2, [-1.0] * 2, [-2.5] * 2, [-4.25] * 2]
    assert jobs.results(2, 2, body) == [(weights, [65536, 65536, 32768, 32768], [3, 3], 3)] * 2


@SITES
def test_published_weights_are_rank_0s_everywhere_and_momentum_goes_on(jobs: Servers, in_store: bool) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        parameters, trainer = made(kv, in_store, MOMENTUM)
        step(trainer, parameters)
        with torch.no_grad():
            parameters[0].fill_(10.0 + rank)
        trainer.set_data()
        return [values(parameters), step(trainer, parameters)]

    assert jobs.results(2, 2, body) == [[[10.0, -1.0], [8.5, -2.5]]] * 2


@SITES
def test_a_worker_that_steps_while_another_publishes_fails_on_both_and_the_next_step_counts(
    jobs: Servers, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        parameters, trainer = made(kv, in_store, {"learning_rate": 1.0})
        step(trainer, parameters)
        with pytest.raises(PlanMismatchError, match=r"rank 1.*'parameters'.*set_data.*add_param_group"):
            step(trainer, parameters) if rank else trainer.set_data()
        if rank:
            trainer.step(2)
            return values(parameters)
        return step(trainer, parameters)

    assert jobs.results(2, 2, body) == [[-2.0, -2.0]] * 2


@SITES
def test_scheduler_decides_the_rate_of_every_round(jobs: Servers, in_store: bool) -> None:
    """A scheduler of Gluon's for three steps, then a function, which cannot be sent, for three more."""

    def body(kv: DistKVStore, rank: int) -> list[float]:
        moves = []
        for scheduler in (PolyScheduler(8, base_lr=8.0, pwr=1), lambda n: float(n)):
            parameters, trainer = made(kv, in_store, {"lr_scheduler": scheduler})
            seen = [0.0, *(step(trainer, parameters)[1] for _ in range(3))]
            moves += [before - after for before, after in itertools.pairwise(seen)]
        return moves

    assert jobs.results(2, 2, body) == [[7, 6, 5, 1, 2, 3]] * 2


@SITES
def test_rate_multiplier_and_batch_size_reach_the_update_at_once_and_without_a_warning(
    jobs: Servers, in_store: bool
) -> None:
    """MXNet's servers keep the first learning rate, know no multipliers, and refuse another batch size."""

    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        parameters, trainer = made(kv, in_store, {"learning_rate": 1.0})
        seen = [step(trainer, parameters)]
        trainer.set_learning_rate(0.0)
        seen.append(step(trainer, parameters))
        trainer.set_learning_rate(1.0)
        parameters[0].lr_mult = 0.5  # type: ignore[attr-defined]
        seen.append(step(trainer, parameters))
        seen.append(step(trainer, parameters, 4 if rank else 8))
        return seen

    rest = 1 / 8 + 1 / 4
    expected = [[-1, -1], [-1, -1], [-1.5, -2], [-1.5 - rest / 2, -2 - rest]]
    assert jobs.results(2, 2, body) == [expected] * 2


@SITES
def test_a_parameter_that_is_frozen_on_one_worker_moves_alike_on_all(jobs: Servers, in_store: bool) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        parameters = [Parameter(torch.ones(shape)) for shape in SHAPES]
        parameters[0].requires_grad_(rank == 0)
        options = {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.125}
        trainer = Trainer(parameters, "sgd", options, kvstore=kv, update_on_kvstore=in_store)
        for _ in range(3):
            sum(p.sum() for p in parameters if p.requires_grad).backward()  # type: ignore[union-attr]
            trainer.step(1)
        return values(parameters)

    expected = []
    for gradient in (1.0, 2.0):  # of rank 0 alone, and of both
        weight, momentum = 1.0, 0.0
        for _ in range(3):
            momentum = 0.5 * momentum - 0.5 * (gradient + 0.125 * weight)
            weight += momentum
        expected.append(weight)
    assert jobs.results(2, 2, body) == [expected] * 2
