"""torch's schedulers, and torch's own optimizer instances, under a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from kvtrainer.errors import ConfigurationError
from tests.support.scalar_training import IN_STORE, step, trainer_of, values, zeros

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=10),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
}
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.5}),
}


@IN_STORE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_bind_and_reach_the_update(name: str, kind: str, in_store: bool) -> None:
    cls, options = KINDS[kind]
    [ours], [theirs] = zeros(1), zeros(1)
    trainer, reference = trainer_of([ours], f"torch:{kind}", options, in_store), cls([theirs], **options)
    schedules = SCHEDULERS[name](trainer), SCHEDULERS[name](reference)
    for i in range(9):
        step(trainer, slope=i - 3.5)
        theirs.grad = torch.full_like(theirs, i - 3.5)
        reference.step()
        for schedule in schedules:
            schedule.step()
        assert trainer.learning_rate == reference.param_groups[0]["lr"]
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)


@IN_STORE
def test_plateau_scheduler_lowers_the_rate(in_store: bool) -> None:
    [p] = zeros(1)
    trainer = trainer_of([p], "sgd", {"learning_rate": 1.0}, in_store)
    schedule = lr_scheduler.ReduceLROnPlateau(trainer, factor=0.5, patience=0)
    for _ in range(3):
        step(trainer)
        schedule.step(1.0)
    assert p.item() == -(1 + 1 + 0.5)


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
