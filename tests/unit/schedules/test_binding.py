"""Forms of schedules, those of torch, which may be beside which, and what is left of those bound in vain."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from kvtrainer import Trainer
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, StateMismatchError, UnknownNameError
from kvtrainer.options.paramwise import Rule
from kvtrainer.schedules import (
    ParamSchedule,
    bind_schedules,
    build_param_schedules,
    detectron_schedule,
    schedule_from_lr_config,
    schedule_from_momentum_config,
)
from tests.support.pairwise import pairwise
from tests.support.scalar_training import scheduled, sgd, step, trainer_of, values, zeros


def rates(given: Any, count: int, optimizer: Any = None, **run: Any) -> list[float]:
    return scheduled([given], count, optimizer=optimizer, **run)


HALVED = [0.1, 0.05, 0.025]


@pytest.mark.parametrize(
    "given",
    [
        ParamSchedule.unbound("lr", "exp", gamma=0.5),
        {"policy": "exp", "gamma": 0.5},
        {"type": "ExponentialLR", "gamma": 0.5, "end": 9},
        partial(lr_scheduler.ExponentialLR, gamma=0.5),
        lambda optimizer: ParamSchedule(optimizer, "lr", "exp", gamma=0.5),
        lambda optimizer: ParamSchedule.unbound("lr", "exp", gamma=0.5),
        {"scheduler": partial(lr_scheduler.ExponentialLR, gamma=0.5), "by": "epoch"},
        {"scheduler": {"policy": "exp", "gamma": 0.5}},
    ],
)
def test_schedules_are_taken_in_every_form(given: Any) -> None:
    assert rates(given, 3) == pytest.approx(HALVED)


def test_what_is_bound_already_is_taken_as_it_is() -> None:
    for make in (
        partial(lr_scheduler.ExponentialLR, gamma=0.5),
        partial(ParamSchedule, policy="exp", gamma=0.5),
    ):
        optimizer = sgd()
        assert rates(make(optimizer), 3, optimizer) == pytest.approx(HALVED)
        with pytest.raises(ConfigurationError, match="bound to another optimizer"):
            bind_schedules([make(sgd())], optimizer)


class Foreign:
    """A scheduler with torch's interface that is none of its classes."""

    def __init__(self, optimizer: torch.optim.Optimizer, by_epoch: bool = False) -> None:
        self.optimizer, self.by_epoch = optimizer, by_epoch

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.optimizer.param_groups[0]["lr"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.param_groups[0]["lr"] = state_dict["rate"]


class Demanding(Foreign):
    def step(self, epoch: int) -> None:  # type: ignore[override]
        raise AssertionError(epoch)


def test_foreign_schedulers_that_are_used_as_those_of_torch_are_taken() -> None:
    assert rates(Foreign, 3) == pytest.approx(HALVED)
    [bound] = bind_schedules([partial(Foreign, by_epoch=True)], sgd())
    assert bound.by == "epoch"
    with pytest.raises(ArgumentTypeError, match="got Demanding"):
        bind_schedules([Demanding], sgd())
    with pytest.raises(ArgumentTypeError, match="got SGD"):
        bind_schedules([lambda optimizer: optimizer], sgd())


def test_scheduler_of_an_instance_that_shares_its_groups_is_taken() -> None:
    parameters = zeros(1)
    instance = torch.optim.SGD(parameters, lr=0.1)
    scheduler = lr_scheduler.ExponentialLR(instance, 0.5)
    assert rates(scheduler, 3, trainer_of(parameters, instance)) == pytest.approx(HALVED)


@pytest.mark.parametrize(
    ("given", "by"),
    [
        (partial(lr_scheduler.ExponentialLR, gamma=0.5), "step"),
        ({"scheduler": partial(lr_scheduler.ExponentialLR, gamma=0.5), "by": "epoch"}, "epoch"),
        ({"type": "torch:ExponentialLR", "gamma": 0.5}, "epoch"),
        ({"type": "torch:ExponentialLR", "gamma": 0.5, "by_epoch": False}, "step"),
        (lr_scheduler.ReduceLROnPlateau, "metric"),
        ({"policy": "exp", "gamma": 0.5}, "epoch"),
        ({"policy": "exp", "gamma": 0.5, "by_epoch": False}, "step"),
        ({"policy": "cyclic", "max_iters": 9}, "step"),
        (detectron_schedule({}), "step"),
    ],
)
def test_schedules_say_what_they_go_by(given: Any, by: str) -> None:
    assert [one.by for one in bind_schedules([given], sgd())] == [by]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (0.1, ArgumentTypeError),
        ("step", ArgumentTypeError),
        (lambda optimizer: 0.1, ArgumentTypeError),
        ({"gamma": 0.5}, ConfigurationError),
        ({"policy": None}, ConfigurationError),
        ({"scheduler": lr_scheduler.ConstantLR, "by": "iter"}, ConfigurationError),
        ({"scheduler": lr_scheduler.ConstantLR, "end": 3}, ConfigurationError),
        ({"policy": "cyclic", "by_epoch": True, "max_epochs": 3}, ConfigurationError),
        ({"scheduler": {"policy": "exp", "gamma": 0.5}, "by": "step"}, ConfigurationError),
        ({"policy": "cosine"}, UnknownNameError),
        ({"policy": "exp", "gamma": 0.5, "warmup": "cosine", "warmup_iters": 3}, ConfigurationError),
    ],
)
def test_what_is_no_schedule_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        bind_schedules([given], sgd())


def test_schedules_are_a_list() -> None:
    with pytest.raises(ArgumentTypeError, match="a list of schedules"):
        bind_schedules("step", sgd())


def test_end_of_a_config_is_the_end_of_training() -> None:
    cfg = {"policy": "poly", "power": 1.0}
    by_step, quarters = {**cfg, "by_epoch": False}, pytest.approx([0.1, 0.075, 0.05])
    assert rates(cfg, 3, max_epochs=4, max_iters=40) == quarters
    assert rates(by_step, 3, max_epochs=2, epoch_length=2) == quarters
    with pytest.raises(ConfigurationError, match="max_epochs or max_iters"):
        schedule_from_lr_config(cfg)


@pytest.mark.parametrize("by", ["epoch", "step"])
def test_policy_goes_by_what_it_says_in_either_form(by: str) -> None:
    cfg = {"policy": "exp", "gamma": 0.5}
    for said in ({"by": by}, {"by_epoch": by == "epoch"}, {"by": by, "by_epoch": by == "epoch"}):
        assert [one.by for one in bind_schedules([{**cfg, **said}], sgd())] == [by]
    for wrong in ({"by": by, "by_epoch": by != "epoch"}, {"by": "metric"}):
        with pytest.raises(ConfigurationError, match="by='epoch' or by='step'"):
            bind_schedules([{**cfg, **wrong}], sgd())


def test_warm_up_by_step_in_a_config_by_epoch_adds_a_clock() -> None:
    cfg = {"policy": "step", "step": [8, 11], "warmup": "linear", "warmup_iters": 5, "warmup_ratio": 0.001}
    for more in ({}, {"warmup_by_epoch": True}):
        bound = bind_schedules([{**cfg, **more}], sgd(), {"max_epochs": 12, "epoch_length": 100})
        assert [one.by for one in bound] == ["epoch", "step"]


def test_warm_up_of_momentum_begins_at_nine_tenths_unless_it_is_said_otherwise() -> None:
    warm = {"policy": "step", "step": 9, "by_epoch": False, "warmup": "constant", "warmup_iters": 3}
    for more, ratio in (({}, 0.9), ({"warmup_ratio": 0.95}, 0.95)):
        optimizer = torch.optim.SGD(zeros(1), lr=0.1, momentum=0.8)
        bind_schedules([schedule_from_momentum_config({**warm, **more})], optimizer)
        assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.8 / ratio)


def test_clock_of_a_warm_up_counts_once_where_it_is_given_with_its_schedule() -> None:
    cfg = {"policy": "fixed", "warmup": "linear", "warmup_iters": 5}
    optimizer = sgd()
    bound = bind_schedules([cfg], optimizer)
    assert bind_schedules(bound, optimizer) == bound


def test_warm_up_by_epoch_in_a_config_goes_on_within_an_epoch() -> None:
    cfg = {"policy": "fixed", "warmup": "linear", "warmup_iters": 2, "warmup_by_epoch": True}
    for by_epoch in (True, False):
        optimizer, seen = sgd(), []
        bound = bind_schedules([{**cfg, "by_epoch": by_epoch}], optimizer, {"epoch_length": 2})
        for _ in range(5):
            seen.append(optimizer.param_groups[0]["lr"])
            bound[-1].step()
        assert seen == pytest.approx([0.01, 0.0325, 0.055, 0.0775, 0.1])


TORCHS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.MultiStepLR(o, [1, 4])], [5]
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: math.exp(-n / 5)),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.5}),
}


@pytest.mark.parametrize(("name", "kind", "in_store"), pairwise(TORCHS, OPTIMIZERS, [False, True]))
def test_torchs_schedulers_reach_the_update_and_resume(name: str, kind: str, in_store: bool) -> None:
    made, options = OPTIMIZERS[kind]
    [theirs] = zeros(1)
    reference = made([theirs], **options)
    expected = TORCHS[name](reference)
    [ours] = zeros(1)
    trainer = trainer_of([ours], f"torch:{kind}", options, in_store)
    [bound] = bind_schedules([TORCHS[name]], trainer)
    for i in range(8):
        if i == 4:
            state, saved = json.loads(json.dumps(bound.state_dict())), trainer.state_dict()
            ours = torch.nn.Parameter(ours.detach().clone())
            trainer = trainer_of([ours], f"torch:{kind}", options, in_store)
            [bound] = bind_schedules([TORCHS[name]], trainer)
            trainer.load_state_dict(saved)
            bound.load_state_dict(state)
        step(trainer, slope=i - 3.5)
        theirs.grad = torch.full_like(theirs, i - 3.5)
        reference.step()
        bound.step()
        expected.step()
        assert trainer.learning_rate == reference.param_groups[0]["lr"]
        for key in {"momentum", "betas"} & set(reference.param_groups[0]):
            assert trainer.param_groups[0][key] == reference.param_groups[0][key]
        assert values([ours]) == pytest.approx(values([theirs]), abs=1e-6)


def test_plateau_of_torch_goes_by_its_metric() -> None:
    trainer = trainer_of(zeros(1), "sgd", {"learning_rate": 1.0})
    [bound] = bind_schedules([partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)], trainer)
    for _ in range(3):
        bound.step(1.0)  # type: ignore[call-arg]
    assert trainer.learning_rate == 0.25
    with pytest.raises(ConfigurationError, match="metric"):
        bound.step()
    [resumed] = bind_schedules([partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)], trainer)
    resumed.load_state_dict(json.loads(json.dumps(bound.state_dict())))
    resumed.step(0.5)  # type: ignore[call-arg]
    assert trainer.learning_rate == 0.25


def test_no_warning_where_an_update_is_not_a_step() -> None:
    # Warnings are errors in these tests.
    trainer = trainer_of(zeros(1), "sgd")
    bound = bind_schedules([partial(lr_scheduler.StepLR, step_size=1)], trainer)
    for group in trainer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    trainer.update(1)
    for schedule in bound:
        schedule.step()
    assert trainer.learning_rate == pytest.approx(0.01)


WARM_UP = {"type": "LinearLR", "start_factor": 0.1, "end": 3, "by_epoch": False}
PLATEAU = {"type": "ReduceOnPlateauLR", "patience": 0, "factor": 0.5}


def trainer_with(schedules: list[Any]) -> Trainer:
    return Trainer({"w": zeros(1)[0]}, "sgd", {"learning_rate": 0.1}, kvstore=None, schedules=schedules)


def epoch(trainer: Trainer) -> list[float]:
    """Three steps and an epoch's end with the same metric; the rate of each step."""
    seen = []
    for _ in range(3):
        seen += trainer.get_lr()["lr"]
        step(trainer)
    trainer.end_epoch(1.0)
    return seen


@pytest.mark.parametrize("schedules", [[WARM_UP, PLATEAU], [PLATEAU, WARM_UP]])
def test_what_a_metric_lowered_stays_after_a_resume(schedules: list[Any], tmp_path: Path) -> None:
    first = trainer_with(schedules)
    assert epoch(first) == pytest.approx([0.01, 0.055, 0.1])
    assert epoch(first) == pytest.approx([0.1] * 3)
    assert epoch(first) == pytest.approx([0.05] * 3)
    first.save_states(tmp_path / "states")
    second = trainer_with(schedules)
    second.load_states(tmp_path / "states")
    assert epoch(second) == pytest.approx([0.025] * 3)
    assert epoch(second) == pytest.approx([0.0125] * 3)


def test_metric_lowers_a_rate_in_the_middle_of_its_way() -> None:
    trainer = trainer_with([{"policy": "exp", "gamma": 0.5, "by_epoch": False}, PLATEAU])
    epoch(trainer)
    epoch(trainer)
    assert epoch(trainer) == pytest.approx([0.05 / 2**6, 0.05 / 2**7, 0.05 / 2**8])


def test_metric_lowers_the_groups_that_are_named_also_later_ones() -> None:
    groups = [{"params": zeros(1), "name": name} for name in ("head", "neck")]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    chosen, every = (bind_schedules([{**PLATEAU, **more}], optimizer)[0] for more in ({"groups": [1]}, {}))
    for _ in range(2):
        chosen.step(1.0)  # type: ignore[call-arg]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]
    optimizer.add_param_group({"params": zeros(1)})
    for _ in range(2):
        every.step(1.0)  # type: ignore[call-arg]
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.025, 0.05]


@pytest.mark.parametrize(
    "more", [{"by_epoch": False}, {"convert_to_iter_based": True, "epoch_length": 3}, {"groups": ["tail"]}]
)
def test_what_means_nothing_to_a_schedule_by_a_metric_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"end_epoch\(metric\)|no parameter group 'tail'"):
        trainer_with([{**PLATEAU, **more}])


@pytest.mark.parametrize(
    "schedules",
    [
        [WARM_UP, partial(lr_scheduler.ExponentialLR, gamma=0.5)],
        [lr_scheduler.ReduceLROnPlateau, {"policy": "fixed"}],
        [partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9), {"policy": "fixed", "name": "momentum"}],
        [partial(ParamSchedule, policy="exp", gamma=0.5), partial(ParamSchedule, policy="step", step=2)],
    ],
)  # fmt: skip
def test_schedules_that_would_undo_one_another_are_refused(schedules: list[Any]) -> None:
    optimizer = torch.optim.SGD(zeros(1), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigurationError, match=r"'(lr|momentum)'"):
        bind_schedules(schedules, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_schedules_of_other_groups_or_values_may_be_beside_one_another() -> None:
    optimizer = torch.optim.SGD([{"params": zeros(1)}, {"params": zeros(1)}], lr=0.1, momentum=0.9)
    exponential = partial(ParamSchedule, policy="exp")
    by_group = [partial(exponential, gamma=0.5, groups=[0]), partial(exponential, gamma=0.1, groups=[1])]
    for schedule in bind_schedules(by_group, optimizer):
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])
    torchs = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    assert len(bind_schedules([torchs, {"policy": "fixed", "name": "momentum"}], optimizer)) == 2


TENTH = {"policy": "fixed", "by_epoch": False, "warmup": "constant", "warmup_iters": 9, "warmup_ratio": 0.1}


def test_schedules_of_which_one_is_wrong_leave_groups_and_former_schedules_as_they_were() -> None:
    trainer = trainer_with([{"policy": "exp", "gamma": 0.5, "by_epoch": False}])
    with pytest.raises(ConfigurationError, match="no number 'dampening'"):
        trainer.configure(schedules=[TENTH, ParamSchedule.unbound("dampening")])
    assert trainer.get_lr()["lr"] == [0.1]
    step(trainer)
    assert trainer.get_lr()["lr"] == [0.05]


def test_trainer_that_cannot_be_built_leaves_the_groups_of_an_instance_as_they_were() -> None:
    parameters = zeros(1)
    instance = torch.optim.SGD(parameters, lr=torch.tensor(0.1))
    rate, keys = instance.param_groups[0]["lr"], set(instance.param_groups[0])
    with pytest.raises(ConfigurationError, match="no number 'nothing'"):
        Trainer(parameters, instance, kvstore=None, schedules=[TENTH, ParamSchedule.unbound("nothing")])
    assert instance.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    assert set(instance.param_groups[0]) == keys


def test_policy_that_fails_at_once_is_not_built_on() -> None:
    def failing(base: float, at: int, span: int | None) -> float:
        raise ZeroDivisionError

    optimizer = torch.optim.SGD(zeros(1), lr=0.1)
    first = ParamSchedule(optimizer, policy="exp", gamma=0.5)
    with pytest.raises(ZeroDivisionError):
        ParamSchedule(optimizer, policy=failing, after=first)
    first.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_group_that_a_rule_names_can_be_scheduled_by_its_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    named = {
        "paramwise": [Rule(".bias", extra={"name": "biases"})],
        "schedules": [{"policy": "exp", "gamma": 0.5, "groups": ["biases"]}],
    }
    trainer = Trainer(model, "sgd", {"learning_rate": 0.1}, kvstore=None, **named)  # type: ignore[arg-type]
    trainer.end_epoch()
    table = trainer.describe_params()
    assert (table["0.weight"].lr, table["0.bias"].lr) == (0.1, 0.05)


KINDS: dict[str, Any] = {
    "ours": {"policy": "exp", "gamma": 0.5, "by_epoch": False},
    "by a metric": PLATEAU,
    "torch's": partial(lr_scheduler.StepLR, step_size=1),
    "torch's by a metric": lr_scheduler.ReduceLROnPlateau,
}


@pytest.mark.parametrize("here", KINDS)
@pytest.mark.parametrize("there", KINDS)
def test_states_of_another_kind_of_schedule_are_refused(here: str, there: str, tmp_path: Path) -> None:
    saving, loading = trainer_with([KINDS[there]]), trainer_with([KINDS[here]])
    step(saving)
    saving.set_learning_rate(0.7)
    saving.save_states(tmp_path / "states")
    if here == there:
        loading.load_states(tmp_path / "states")
        for trainer in (saving, loading):
            epoch(trainer)
        assert loading.get_lr() == saving.get_lr()
        return
    with pytest.raises(StateMismatchError):
        loading.load_states(tmp_path / "states")
    assert loading.get_lr()["lr"] == [0.1]
    assert loading.optimizer.num_update == 0


def test_schedules_built_for_a_trainer_build_on_those_that_it_has() -> None:
    trainer = trainer_with([{"policy": "exp", "gamma": 0.5, "by_epoch": False}])
    built = build_param_schedules({"type": "StepLR", "step_size": 1, "end": 9, "by_epoch": False}, trainer)
    assert isinstance(built, list)
    trainer.configure(schedules=built)
    step(trainer)
    assert trainer.get_lr()["lr"] == pytest.approx([0.1 * 0.5 * 0.1])
