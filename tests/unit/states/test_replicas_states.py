"""Optimizer state and residuals of parameters with replicas: kept, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import (
    NonFiniteGradientError,
)
from tests.support.replica_training import STORES, backward, replicas, values


@STORES
def test_state_is_kept_once_and_moves_between_one_device_and_several(
    name: str, in_store: bool | None, tmp_path: Path
) -> None:
    def trainer_of(parameters: list[Parameter], given: Any, uok: bool | None) -> Trainer:
        options = {"learning_rate": 1.0, "momentum": 0.5}
        return Trainer({"w": parameters}, "sgd", options, kvstore=given, update_on_kvstore=uok)

    w, one, again = replicas(), replicas(1), replicas()
    trainer = trainer_of(w, name, in_store)
    backward(w)
    trainer.step(1)
    state = trainer.state_dict()
    assert list(state["state"]) == [0]
    assert state["param_groups"][0]["params"] == [0]
    assert len(trainer.param_groups[0]["params"]) == 2
    trainer.save_states(tmp_path / "states")
    single = trainer_of(one, None, None)
    single.load_state_dict(state)
    backward(one)
    single.step(1)
    assert values(one) == [-2.0]  # 0.5 · 2 from before, 1 now
    single.save_states(tmp_path / "single")
    other = trainer_of(again, name, in_store)
    other.load_states(tmp_path / "single")
    assert len(other.param_groups[0]["params"]) == 2
    backward(again)
    other.step(1)
    assert values(again) == [-3.0, -3.0]  # 0.5 · 2 from before, 2 now
    other.load_states(tmp_path / "states")
    backward(again)
    other.step(1)
    assert values(again) == [-6.0, -6.0]


def test_loaded_state_reaches_every_replica_without_a_store() -> None:
    w, one = replicas(), replicas(1)
    single = Trainer([one], "sgd", {"lr": 1.0, "momentum": 0.5}, kvstore=None)
    backward(one)
    single.step(1)
    trainer = Trainer([w], "sgd", {"lr": 1.0, "momentum": 0.5}, kvstore=None)
    trainer.load_state_dict(single.state_dict())
    backward(w)
    trainer.step(1)
    assert values(w) == [-1.5, -1.5]


def test_each_replica_is_compressed_with_a_residual_of_its_own() -> None:
    w = replicas()
    params = {"type": "2bit", "threshold": 0.5}
    trainer = Trainer([w], "sgd", {"learning_rate": 1.0}, kvstore="device", compression_params=params)
    for expected in (0.0, -1.0, -1.0, -2.0):
        backward(w, 0.3)
        trainer.step(1)
        assert values(w) == [expected] * 2


@pytest.mark.parametrize("before_first_step", [True, False])
def test_residuals_of_replicas_are_saved(before_first_step: bool, tmp_path: Path) -> None:
    def trainer_of(parameters: list[Parameter]) -> Trainer:
        params = {"type": "2bit", "threshold": 0.5}
        return Trainer([parameters], "sgd", {"lr": 1.0}, kvstore="device", compression_params=params)

    w, again = replicas(), replicas()
    trainer, other = trainer_of(w), trainer_of(again)
    backward(w, [0.3, 0.1])
    trainer.step(1)
    trainer.save_states(tmp_path / "states")
    if not before_first_step:
        backward(again, [0.4, 0.4])
        other.step(1)
    other.load_states(tmp_path / "states")
    backward(again, [0.3, 0.3])
    other.step(1)
    assert values(again) == [-0.5, -0.5]  # the first said .5 of .6, the second nothing of .4
    backward(again, [0.0, 0.1])
    other.step(1)
    assert values(again) == [-1.0, -1.0]


def test_stale_replica_keeps_its_residual() -> None:
    w = replicas()
    params = {"type": "2bit", "threshold": 0.5}
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore="device", compression_params=params)
    for slopes, expected in (([0.3, 0.3], 0.0), ([0.3, None], -0.5), ([0.0, 0.3], -1.0)):
        backward(w, slopes)
        trainer.step(1, ignore_stale_grad=True)
        assert values(w) == [expected] * 2


def test_replica_that_cannot_be_compressed_raises_and_changes_nothing() -> None:
    w = replicas()
    params = {"type": "2bit", "threshold": 0.5}
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore="device", compression_params=params)
    backward(w, [0.3, float("inf")])
    with pytest.raises(NonFiniteGradientError):
        trainer.step(1)
    for expected in (0.0, -1.0):
        w[0].grad = w[1].grad = None
        backward(w, 0.3)
        trainer.step(1)
        assert values(w) == [expected] * 2
