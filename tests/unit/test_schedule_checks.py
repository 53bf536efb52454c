"""Which schedules may be beside which, and what is left of those that were bound in vain."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.param_rules import Rule
from kvtrainer.schedules.binding import bind_schedules, build_param_schedules
from kvtrainer.schedules.param_schedule import ParamSchedule
from tests.support.scalar_training import step, zeros

WARM_UP = {"type": "LinearLR", "start_factor": 0.1, "end": 3, "by_epoch": False}
PLATEAU = {"type": "ReduceOnPlateauLR", "patience": 0, "factor": 0.5}


def trainer_of(schedules: list[Any]) -> Trainer:
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
def test_what_a_metric_has_lowered_stays_so_beside_other_schedules_also_after_a_resume(
    schedules: list[Any], tmp_path: Path
) -> None:
    first = trainer_of(schedules)
    assert epoch(first) == pytest.approx([0.01, 0.055, 0.1])
    assert epoch(first) == pytest.approx([0.1] * 3)
    assert epoch(first) == pytest.approx([0.05] * 3)
    first.save_states(tmp_path / "states")
    second = trainer_of(schedules)
    second.load_states(tmp_path / "states")
    assert epoch(second) == pytest.approx([0.025] * 3)
    assert epoch(second) == pytest.approx([0.0125] * 3)


def test_metric_lowers_a_rate_in_the_middle_of_its_way() -> None:
    trainer = trainer_of([{"policy": "exp", "gamma": 0.5, "by_epoch": False}, PLATEAU])
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
        trainer_of([{**PLATEAU, **more}])


@pytest.mark.parametrize(
    "schedules",
    [
        [WARM_UP, partial(lr_scheduler.ExponentialLR, gamma=0.5)],
        [lr_scheduler.ReduceLROnPlateau, {"policy": "fixed"}],
        [
            partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9),
            {"policy": "fixed", "name": "momentum"},
        ],
        [
            lambda optimizer: ParamSchedule(optimizer, policy="exp", gamma=0.5),
            lambda optimizer: ParamSchedule(optimizer, policy="step", step=2),
        ],
    ],
)
def test_schedules_that_would_undo_one_another_are_refused(schedules: list[Any]) -> None:
    optimizer = torch.optim.SGD(zeros(1), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigurationError, match="undo what the other one writes"):
        bind_schedules(schedules, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_schedules_of_other_groups_or_values_may_be_beside_one_another() -> None:
    optimizer = torch.optim.SGD([{"params": zeros(1)}, {"params": zeros(1)}], lr=0.1, momentum=0.9)
    by_group = [
        lambda optimizer: ParamSchedule(optimizer, policy="exp", gamma=0.5, groups=[0]),
        lambda optimizer: ParamSchedule(optimizer, policy="exp", gamma=0.1, groups=[1]),
    ]
    for schedule in bind_schedules(by_group, optimizer):
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])
    torchs = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    assert len(bind_schedules([torchs, {"policy": "fixed", "name": "momentum"}], optimizer)) == 2


TENTH = {"policy": "fixed", "by_epoch": False, "warmup": "constant", "warmup_iters": 9, "warmup_ratio": 0.1}


def test_schedules_of_which_one_is_wrong_leave_groups_and_former_schedules_as_they_were() -> None:
    trainer = trainer_of([{"policy": "exp", "gamma": 0.5, "by_epoch": False}])
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
    trainer = Trainer(
        model,
        "sgd",
        {"learning_rate": 0.1},
        kvstore=None,
        paramwise=[Rule(".bias", extra={"name": "biases"})],
        schedules=[{"policy": "exp", "gamma": 0.5, "groups": ["biases"]}],
    )
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
def test_states_of_another_kind_of_schedule_are_refused_before_anything_changes(
    here: str, there: str, tmp_path: Path
) -> None:
    saving, loading = trainer_of([KINDS[there]]), trainer_of([KINDS[here]])
    step(saving)
    saving.set_learning_rate(0.7)
    saving.save_states(tmp_path / "states")
    if here == there:
        loading.load_states(tmp_path / "states")
        return
    with pytest.raises(StateMismatchError, match="no state of a"):
        loading.load_states(tmp_path / "states")
    assert loading.get_lr()["lr"] == [0.1]
    assert loading.optimizer.num_update == 0


def test_schedules_built_for_a_trainer_build_on_those_that_it_has() -> None:
    trainer = trainer_of([{"policy": "exp", "gamma": 0.5, "by_epoch": False}])
    built = build_param_schedules({"type": "StepLR", "step_size": 1, "end": 9, "by_epoch": False}, trainer)
    assert isinstance(built, list)
    trainer.configure(schedules=built)
    step(trainer)
    assert trainer.get_lr()["lr"] == pytest.approx([0.1 * 0.5 * 0.1])
