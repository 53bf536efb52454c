"""Schedules that a Trainer was given, and torch's schedulers and optimizer instances under a Trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.schedules.param_schedule import ParamSchedule
from tests.support.scalar_training import IN_STORE, step, trainer_of, values, zeros

RATES = {"learning_rate": 1.0, "momentum": 0.5}


def trainer_with(
    schedules: list[Any], in_store: bool = False, kind: str = "sgd"
) -> tuple[list[Any], Trainer]:
    parameters = zeros(1)
    given = {"w": parameters[0]}
    options = dict(RATES)
    trainer = Trainer(given, kind, options, kvstore="local", update_on_kvstore=in_store, schedules=schedules)
    return parameters, trainer


@IN_STORE
def test_schedules_by_step_advance_with_the_updates(in_store: bool) -> None:
    schedules = [
        {"policy": "exp", "gamma": 0.5, "by_epoch": False},
        {"type": "StepMomentum", "step_size": 1, "end": 9},
    ]
    parameters, trainer = trainer_with(schedules, in_store)
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
    _, trainer = trainer_with(schedules)
    for _ in range(2):
        step(trainer)
        step(trainer)
        trainer.end_epoch()
    assert trainer.get_lr()["lr"] == [0.25]
    assert trainer.get_momentum()["momentum"] == [0.125]


def test_warm_up_by_step_in_a_schedule_by_epoch() -> None:
    cfg = {"policy": "step", "step": [1], "warmup": "linear", "warmup_iters": 2, "warmup_ratio": 0.5}
    _, trainer = trainer_with([cfg])
    seen = []
    for _ in range(2):
        for _ in range(3):
            seen += trainer.get_lr()["lr"]
            step(trainer)
        trainer.end_epoch()
    assert seen == pytest.approx([0.5, 0.75, 1.0, 0.1, 0.1, 0.1])


@IN_STORE
def test_step_without_any_gradient_updates_nothing_and_advances_no_schedule(in_store: bool) -> None:
    _, trainer = trainer_with([{"policy": "exp", "gamma": 0.5, "by_epoch": False}], in_store)
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
    trainer = Trainer(parameters, "sgd", RATES, kvstore=None, schedules=[schedule], on_nonfinite="skip")
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
    _, first = trainer_with([course], in_store)
    for _ in range(3):
        step(first)
    first.save_states(tmp_path / "states")
    _, second = trainer_with([{**course, "gamma": gamma}], in_store)
    second.load_states(tmp_path / "states")
    assert second.get_lr()["lr"] == pytest.approx([gamma**3])
    step(second)
    assert second.get_lr()["lr"] == pytest.approx([gamma**4])


def test_schedules_that_are_added_build_on_those_that_are_there() -> None:
    _, trainer = trainer_with([{"policy": "exp", "gamma": 0.5, "by_epoch": False}])
    trainer.configure(
        schedules=[{"policy": "fixed", "warmup": "constant", "warmup_iters": 9, "by_epoch": False}]
    )
    assert trainer.get_lr()["lr"] == pytest.approx([0.1])
    step(trainer)
    assert trainer.get_lr()["lr"] == pytest.approx([0.05])


def test_groups_with_remembered_values_are_taken_again() -> None:
    _, trainer = trainer_with([{"policy": "step", "step": [1], "name": "momentum", "by_epoch": False}])
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
    _, trainer = trainer_with([schedule])
    with trainer:
        step(trainer)
        for _ in range(epochs):
            trainer.end_epoch()
    assert ("1 schedules that go by epoch never moved; call end_epoch()" in caplog.text) is (epochs == 0)


def test_scheduler_may_resume_from_the_initial_rate_that_a_group_carries() -> None:
    groups: list[list[dict[str, Any]]] = [
        [{"params": zeros(1), "lr": 0.5, "initial_lr": 1.0}] for _ in range(2)
    ]
    trainer, reference = trainer_of(groups[0], "torch:SGD"), torch.optim.SGD(groups[1])
    for one in (trainer, reference):
        lr_scheduler.CosineAnnealingLR(one, 8, last_epoch=3)
    assert trainer.learning_rate == reference.param_groups[0]["lr"]


@IN_STORE
def test_torch_instance_brings_its_groups_and_its_scheduler(in_store: bool) -> None:
    a, b = parameters = zeros()
    instance = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 2.0}], lr=1.0)
    schedule = lr_scheduler.StepLR(instance, 1, 0.5)
    trainer = trainer_of(parameters, instance, None, in_store)
    for _ in range(2):
        step(trainer)
        schedule.step()
    assert values(parameters) == [-1.5, -3.0]
    instance.zero_grad()
    assert a.grad is None
    assert trainer.param_groups is instance.param_groups


def test_torch_instance_keeps_its_order_and_the_names_that_the_trainer_was_given() -> None:
    a, b = zeros()
    trainer = trainer_of({"a": a, "b": b}, torch.optim.SGD([b, a], lr=1.0))
    b.grad = torch.ones(1)
    with pytest.raises(UserWarning, match=r": a\."):
        trainer.step(1)


@IN_STORE
def test_torch_instance_hands_over_the_momentum_that_it_has(in_store: bool) -> None:
    [ours], [theirs] = zeros(1), zeros(1)
    instance, reference = (torch.optim.SGD([p], lr=1.0, momentum=0.5) for p in (ours, theirs))
    for p in (ours, theirs):
        p.grad = torch.ones(1)
    instance.step()
    reference.step()
    trainer = trainer_of([ours], instance, None, in_store)
    step(trainer)
    reference.step()
    instance.load_state_dict(
        {**reference.state_dict(), "state": {0: {"momentum_buffer": torch.full((1,), 4.0)}}}
    )
    instance.param_groups[0]["lr"] = 0.5
    step(trainer)
    assert ours.item() == theirs.item() - 0.5 * (0.5 * 4 + 1)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (lambda p: [p], "trains 2 parameters, the Trainer was given 1"),
        (lambda p: [{"params": [p], "lr": 1.0}], "brings the options of its groups"),
    ],
)
def test_torch_instance_must_train_what_the_trainer_trains(parameters: Any, message: str) -> None:
    a, b = zeros()
    with pytest.raises(ConfigurationError, match=message):
        trainer_of(parameters(a), torch.optim.SGD([a, b], lr=1.0))


def test_parameters_added_to_the_instance_behind_the_trainers_back_are_noticed() -> None:
    a, b = zeros()
    instance = torch.optim.SGD([a], lr=1.0)
    trainer = trainer_of([a], instance)
    instance.add_param_group({"params": [b]})
    with pytest.raises(ConfigurationError, match=r"use trainer\.add_param_group"):
        step(trainer)
