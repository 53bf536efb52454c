"""Schedules that a Trainer was given: when it advances them, and how they are saved with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from kvtrainer import Trainer
from kvtrainer.schedules.param_schedule import ParamSchedule
from tests.support.scalar_training import IN_STORE, step, values, zeros

OPTIONS = {"learning_rate": 1.0, "momentum": 0.5}


def trainer_of(schedules: list[Any], in_store: bool = False, kind: str = "sgd") -> tuple[list[Any], Trainer]:
    parameters = zeros(1)
    given = {"w": parameters[0]}
    options = dict(OPTIONS)
    trainer = Trainer(given, kind, options, kvstore="local", update_on_kvstore=in_store, schedules=schedules)
    return parameters, trainer


@IN_STORE
def test_schedules_by_step_advance_with_the_updates(in_store: bool) -> None:
    schedules = [
        {"policy": "exp", "gamma": 0.5, "by_epoch": False},
        {"type": "StepMomentum", "step_size": 1, "end": 9},
    ]
    parameters, trainer = trainer_of(schedules, in_store)
    rate, momentum, moved, weight = 1.0, 0.5, 0.0, 0.0
    for _ in range(3):
        step(trainer)
        moved = momentum * moved - rate
        weight += moved
        rate /= 2
        assert values(parameters) == pytest.approx([weight])
    assert trainer.get_lr()["lr"] == [0.125]
    trainer.end_epoch()
    assert trainer.get_momentum()["momentum"] == pytest.approx([0.05])


def test_schedules_by_epoch_advance_with_the_epochs() -> None:
    schedules = [
        {"scheduler": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5), "by": "epoch"},
        ParamSchedule.unbound("momentum", "step", step=1, by="epoch"),
    ]
    _, trainer = trainer_of(schedules)
    for _ in range(2):
        step(trainer)
        step(trainer)
        trainer.end_epoch()
    assert trainer.get_lr()["lr"] == [0.25]
    assert trainer.get_momentum()["momentum"] == [0.125]


def test_warm_up_by_step_in_a_schedule_by_epoch() -> None:
    cfg = {"policy": "step", "step": [1], "warmup": "linear", "warmup_iters": 2, "warmup_ratio": 0.5}
    _, trainer = trainer_of([cfg])
    seen = []
    for _ in range(2):
        for _ in range(3):
            seen += trainer.get_lr()["lr"]
            step(trainer)
        trainer.end_epoch()
    assert seen == pytest.approx([0.5, 0.75, 1.0, 0.1, 0.1, 0.1])


@IN_STORE
def test_step_without_any_gradient_updates_nothing_and_advances_no_schedule(in_store: bool) -> None:
    _, trainer = trainer_of([{"policy": "exp", "gamma": 0.5, "by_epoch": False}], in_store)
    result = trainer.step(ignore_stale_grad=True)
    assert result is not None
    assert (result.updated, result.skipped, trainer.learning_rate) == (False, False, 1.0)
    step(trainer)
    assert trainer.last is not None
    assert trainer.last.updated
    assert trainer.learning_rate == 0.5


def test_skipped_step_advances_no_schedule() -> None:
    parameters = zeros(1)
    schedule = {"policy": "exp", "gamma": 0.5, "by_epoch": False}
    trainer = Trainer(parameters, "sgd", OPTIONS, kvstore=None, schedules=[schedule], on_nonfinite="skip")
    step(trainer, slope=float("nan"))
    assert trainer.get_lr()["lr"] == [1.0]
    step(trainer)
    assert trainer.get_lr()["lr"] == [0.5]


@IN_STORE
@pytest.mark.parametrize("gamma", [0.5, 0.8])
def test_saved_states_resume_schedules_and_a_new_course_holds(
    tmp_path: Path, in_store: bool, gamma: float
) -> None:
    course = {"policy": "exp", "gamma": 0.5, "by_epoch": False}
    _, first = trainer_of([course], in_store)
    for _ in range(3):
        step(first)
    first.save_states(tmp_path / "states")
    _, second = trainer_of([{**course, "gamma": gamma}], in_store)
    second.load_states(tmp_path / "states")
    assert second.get_lr()["lr"] == pytest.approx([gamma**3])
    step(second)
    assert second.get_lr()["lr"] == pytest.approx([gamma**4])


def test_scheduler_of_torch_resumes_with_the_trainer(tmp_path: Path) -> None:
    make = partial(lr_scheduler.MultiStepLR, milestones=[2, 4], gamma=0.1)
    _, first = trainer_of([make])
    for _ in range(3):
        step(first)
    first.save_states(tmp_path / "states")
    _, second = trainer_of([make])
    second.load_states(tmp_path / "states")
    assert second.get_lr()["lr"] == pytest.approx([0.1])
    step(second)
    assert second.get_lr()["lr"] == pytest.approx([0.01])


def test_schedules_that_are_added_build_on_those_that_are_there() -> None:
    _, trainer = trainer_of([{"policy": "exp", "gamma": 0.5, "by_epoch": False}])
    trainer.configure(
        schedules=[{"policy": "fixed", "warmup": "constant", "warmup_iters": 9, "by_epoch": False}]
    )
    assert trainer.get_lr()["lr"] == pytest.approx([0.1])
    step(trainer)
    assert trainer.get_lr()["lr"] == pytest.approx([0.05])


def test_groups_with_remembered_values_are_taken_again() -> None:
    _, trainer = trainer_of([{"policy": "step", "step": [1], "name": "momentum", "by_epoch": False}])
    step(trainer)
    [group] = trainer.param_groups
    assert group["initial_momentum"] == 0.5
    again = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    built = Trainer([{**again, "params": [torch.nn.Parameter(torch.zeros(1))]}], "sgd", kvstore=None)
    ParamSchedule(built, "momentum", "fixed")
    assert built.get_momentum()["momentum"] == [0.5]


@pytest.mark.parametrize(
    "schedule",
    [
        {"policy": "exp", "gamma": 0.5},
        {"scheduler": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5), "by": "epoch"},
    ],
    ids=["ours", "torch's"],
)
@pytest.mark.parametrize("epochs", [0, 1])
def test_schedule_by_epoch_of_a_run_that_never_ended_one_is_said_at_the_end(
    schedule: dict[str, Any], epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    _, trainer = trainer_of([schedule])
    with trainer:
        step(trainer)
        for _ in range(epochs):
            trainer.end_epoch()
    assert ("1 schedules that go by epoch never moved; call end_epoch()" in caplog.text) is (epochs == 0)
