"""Scheduled learning rates and momenta reach real servers in the middle of training, and with them the correction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtrainer import Trainer
from kvtrainer.schedules.param_schedule import ParamSchedule
from tests.support.processes import together
from tests.support.stores import Servers, servers
from tests.support.taking_turns import SHAPES, Worker, gradient, start_of, workers

RATES = (0.05, 0.1, 0.1, 0.01, 0.01, 0.01)
"""A warm-up of one step, and a tenth from step 3 on."""
MOMENTA = (0.9, 0.8, 0.7, 0.6, 0.5, 0.5)
OPTIONS = {"learning_rate": 0.1, "momentum": 0.9, "momentum_correction": True}
SCHEDULES: list[Any] = [
    {
        "policy": "step",
        "step": [3],
        "by_epoch": False,
        "warmup": "constant",
        "warmup_iters": 1,
        "warmup_ratio": 0.5,
    },
    ParamSchedule.unbound("momentum", lambda base, at, span: max(0.5, base - 0.1 * at), by="step"),
]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Servers]:
    with servers() as started:
        yield started


def run(made: list[Worker], turns: range) -> dict[str, Any]:
    """Steps of all workers together; every one contributes the same."""
    for turn in turns:
        for outcome in together(*(lambda w=w, turn=turn: w.step(turn) for w in made)):
            assert not isinstance(outcome, BaseException), outcome
    first, second = (worker.values() for worker in made)
    np.testing.assert_equal(first, second)
    return first


def torchs_momentum(turns: int) -> dict[str, np.ndarray]:
    """In float64, with the learning rate outside the momentum: what corrected momentum must come to."""
    weights = {name: start_of(name).double().numpy() for name in SHAPES}
    buffers = {name: np.zeros_like(weights[name]) for name in SHAPES}
    for turn, rate, momentum in zip(range(turns), RATES, MOMENTA, strict=False):
        for name in SHAPES:
            buffers[name] = momentum * buffers[name] + 2 * gradient(name, turn).double().numpy()
            weights[name] -= rate * buffers[name]
    return weights


def check(found: dict[str, Any], turns: int) -> None:
    for name, expected in torchs_momentum(turns).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_store", [True, False], ids=["on-servers", "on-workers"])
def test_scheduled_rate_and_momentum_are_those_of_the_updates(jobs: Servers, in_store: bool) -> None:
    with workers(jobs, "dist_sync", "sgd", OPTIONS, schedules=SCHEDULES, update_on_kvstore=in_store) as made:
        check(run(made, range(6)), 6)
        trainer: Trainer = made[0].trainer
        assert trainer.get_lr()["lr"] == [pytest.approx(0.01)]
        assert trainer.get_momentum()["momentum"] == [0.5]


def test_saved_states_go_on_with_the_rates_and_the_correction_that_were_due(
    jobs: Servers, tmp_path: Path
) -> None:
    with workers(jobs, "dist_sync", "sgd", OPTIONS, schedules=SCHEDULES) as made:
        weights = run(made, range(3))
        made[0].trainer.save_states(tmp_path / "states")
        expected = run(made, range(3, 6))
    # The first rate after the save is a tenth of the last one before it.
    with workers(jobs, "dist_sync", "sgd", OPTIONS, num_servers=1, schedules=SCHEDULES) as made:
        given = {name: torch.from_numpy(value).float() for name, value in weights.items()}
        for outcome in together(*(lambda w=w: w.trainer.set_data(given) for w in made)):
            assert outcome is None
        for worker in made:
            worker.trainer.load_states(tmp_path / "states")
        np.testing.assert_equal(run(made, range(3, 6)), expected)
    check(expected, 6)
