"""Two workers and two servers: loss scaling, published weights, schedulers and numbers that change while training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import kvtrainer
from kvtrainer import Trainer, amp
from kvtrainer.lr_scheduler import PolyScheduler
from tests.support.jobs import Job, Results, run_job

SHAPES = (3,), (170, 301)


def overflow(rank: int, in_store: bool) -> Results:
    """Gradients of 1 in every step; in step 1 one of rank 1's, of the small parameter, is infinite."""
    parameters, trainer = _setup(in_store, {"learning_rate": 1.0, "momentum": 0.5})
    amp.init_trainer(trainer)
    weights, scales = [], []
    for step in range(4):
        for p in parameters:
            slope = math.inf if (step, rank, p.dim()) == (1, 1, 1) else 1.0
            with amp.scale_loss((p * slope).sum(), trainer) as scaled:
                scaled.backward()
        scales.append(trainer.amp_loss_scale)
        trainer.step(2)
        weights.append(_values(parameters))
    steps = [float(state["step"]) for state in trainer.state_dict()["state"].values()]
    trainer.close()
    return {"weights": weights, "scales": scales, "steps": steps, "num_update": trainer.optimizer.num_update}


def published(rank: int, in_store: bool) -> Results:
    """After a step with momentum, every rank writes its own weights and all publish them."""
    parameters, trainer = _setup(in_store, {"learning_rate": 1.0, "momentum": 0.5})
    weights = []
    _step(trainer, parameters, 2)
    with torch.no_grad():
        parameters[0].fill_(10.0 + rank)
    trainer.set_data()
    weights.append(_values(parameters))
    _step(trainer, parameters, 2)
    weights.append(_values(parameters))
    trainer.close()
    return {"weights": weights}


def scheduled(rank: int, in_store: bool) -> Results:
    """A scheduler of Gluon's for three steps, then a function, which cannot be sent, for three more."""
    moves = []
    for scheduler in (PolyScheduler(8, base_lr=8.0, pwr=1), lambda n: float(n)):
        parameters, trainer = _setup(in_store, {"lr_scheduler": scheduler})
        for _ in range(3):
            before = parameters[1][0, 0].item()
            _step(trainer, parameters, 2)
            moves.append(before - parameters[1][0, 0].item())
        trainer.close()
    return {"moves": moves}


def live_numbers(rank: int, in_store: bool) -> Results:
    """The learning rate, a multiplier and the batch size change from step to step; the last batch is smaller."""
    parameters, trainer = _setup(in_store, {"learning_rate": 1.0})
    weights = []
    _step(trainer, parameters, 2)
    weights.append(_values(parameters))
    trainer.set_learning_rate(0.0)
    _step(trainer, parameters, 2)
    weights.append(_values(parameters))
    trainer.set_learning_rate(1.0)
    parameters[0].lr_mult = 0.5  # type: ignore[attr-defined]
    _step(trainer, parameters, 2)
    weights.append(_values(parameters))
    _step(trainer, parameters, 4 if rank else 8)
    weights.append(_values(parameters))
    trainer.close()
    return {"weights": weights}


def _setup(in_store: bool, options: dict[str, Any]) -> tuple[list[Parameter], Trainer]:
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    return parameters, kvtrainer.Trainer(
        parameters, "sgd", options, kvstore="dist_sync", update_on_kvstore=in_store
    )


def _step(trainer: Trainer, parameters: list[Parameter], batch_size: int) -> None:
    for p in parameters:
        p.sum().backward()
    trainer.step(batch_size)


def _values(parameters: list[Parameter]) -> list[float]:
    """The one value of each parameter; NaN where its elements differ."""
    return [p.unique().item() if p.unique().numel() == 1 else math.nan for p in parameters]


def run_all(rank: int, workers: int) -> Results:
    """Every run trains a sliced and a small parameter with gradients that are the same everywhere."""
    runs: list[Callable[[int, bool], Results]] = [overflow, published, scheduled, live_numbers]
    return {f"{run.__name__} {in_store}": run(rank, in_store) for run in runs for in_store in (True, False)}


SITES = pytest.mark.parametrize("in_store", [True, False], ids=["in-store", "reduced"])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(run_all, tmp_path_factory.mktemp("surface"), 2, 2)


@SITES
def test_overflow_on_one_worker_skips_the_step_on_all_and_halves_every_scale_once(
    job: Job, in_store: bool
) -> None:
    for result in job[f"overflow {in_store}"]:
        # m = .5 m - 1 in three steps; the second of four is skipped.
        assert result["weights"] == [[-1.0] * 2, [-1.0] * 2, [-2.5] * 2, [-4.25] * 2]
        assert result["scales"] == [65536, 65536, 32768, 32768]
        assert result["steps"] == [3, 3]
        assert result["num_update"] == 3


@SITES
def test_published_weights_are_rank_0s_everywhere_and_momentum_goes_on(job: Job, in_store: bool) -> None:
    for result in job[f"published {in_store}"]:
        assert result["weights"] == [[10.0, -1.0], [8.5, -2.5]]


@SITES
def test_scheduler_decides_the_rate_of_every_round(job: Job, in_store: bool) -> None:
    for result in job[f"scheduled {in_store}"]:
        assert result["moves"] == [7, 6, 5, 1, 2, 3]


@SITES
def test_rate_multiplier_and_batch_size_reach_the_update_at_once_and_without_a_warning(
    job: Job, in_store: bool
) -> None:
    """MXNet's servers keep the first learning rate, know no multipliers, and refuse another batch size."""
    for result in job[f"live_numbers {in_store}"]:
        rest = 1 / 8 + 1 / 4
        assert result["weights"] == [[-1, -1], [-1, -1], [-1.5, -2], [-1.5 - rest / 2, -2 - rest]]
