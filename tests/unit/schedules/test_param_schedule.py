"""ParamSchedule: what it writes, where it starts from, and how it goes on after a save."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    SchedulerInUseError,
    ScheduleWarning,
    StateMismatchError,
)
from kvtrainer.schedules import ParamSchedule, bind_schedules
from tests.support.scalar_training import sgd, trainer_of, zeros


def seen(schedule: ParamSchedule, count: int, group: int = 0) -> list[float]:
    """The values before each of so many steps."""
    values = []
    for _ in range(count):
        values.append(schedule.last_values()[group])
        schedule.step()
    return values


def test_start_is_the_initial_value_that_a_group_remembers() -> None:
    optimizer = sgd(0.01, initial_lr=0.1)
    assert ParamSchedule(optimizer, "lr", "fixed").last_values() == [0.1]
    other = sgd(0.1)
    ParamSchedule(other, "lr", "exp", gamma=0.5).step(3)
    assert other.param_groups[0]["initial_lr"] == 0.1
    assert ParamSchedule(other, "lr", "fixed").last_values() == [0.1]


def test_only_the_groups_that_are_named_are_written() -> None:
    groups = [{"params": zeros(1), **name} for name in ({"name": "backbone"}, {}, {"name": "head"})]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = ParamSchedule(optimizer, "lr", "exp", gamma=0.5, groups=["head", 1])
    schedule.step()
    assert schedule.last_values() == [1.0, 0.5, 0.5]
    for wrong in (["neck"], [3], [-1]):
        with pytest.raises(ConfigurationError, match="no parameter group"):
            ParamSchedule(optimizer, "lr", "fixed", groups=wrong)
    with pytest.raises(ArgumentTypeError, match="a list"):
        ParamSchedule(optimizer, "lr", "fixed", groups="head")


def test_groups_that_are_added_later_are_scheduled_too() -> None:
    optimizer = sgd(0.1)
    schedule = ParamSchedule(optimizer, "lr", "exp", gamma=0.5)
    optimizer.add_param_group({"params": zeros(1), "lr": 0.8})
    schedule.step()
    assert schedule.last_values() == pytest.approx([0.05, 0.4])


def test_momentum_is_the_first_beta_of_the_adams() -> None:
    optimizer = torch.optim.Adam(zeros(1), betas=(0.9, 0.99))
    schedule = ParamSchedule(optimizer, "momentum", "step", by="step", step=1)
    schedule.step()
    assert optimizer.param_groups[0]["betas"] == (0.45, 0.99)
    gluons = trainer_of(zeros(1), "adam", {"beta1": 0.8})
    ParamSchedule(gluons, "momentum", "step", by="step", step=1).step()
    assert gluons.param_groups[0]["betas"] == (0.4, 0.999)


def test_any_number_of_a_group_can_be_scheduled() -> None:
    optimizer = sgd(weight_decay=0.1)
    schedule = ParamSchedule(optimizer, "weight_decay", "LinearAnnealing", end=2, min_lr_ratio=0.0)
    schedule.step()
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.05)
    for wrong in ("nesterov", "params", "none"):
        with pytest.raises(ConfigurationError, match=f"has no number '{wrong}' to schedule; it has"):
            ParamSchedule(optimizer, wrong, "fixed")


def test_rate_in_a_tensor_is_changed_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(zeros(1), lr=rate, foreach=False)
    held = optimizer.param_groups[0]["lr"]
    ParamSchedule(optimizer, "lr", "exp", gamma=0.5).step()
    assert held is optimizer.param_groups[0]["lr"]
    assert held.item() == 0.25


def test_function_may_be_the_policy() -> None:
    schedule = ParamSchedule(sgd(0.1), "lr", lambda base, at, span: base / (1 + at) + (span or 0), by="step")
    assert seen(schedule, 3) == pytest.approx([0.1, 0.05, 0.1 / 3])


def test_schedule_waits_for_its_begin_and_stays_after_its_end() -> None:
    optimizer = sgd(1.0)
    schedule = ParamSchedule(optimizer, "lr", "poly", begin=2, end=4)
    assert seen(schedule, 7) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    optimizer.param_groups[0]["lr"] = 7.0
    schedule.step()
    assert schedule.last_values() == [7.0]


def test_schedules_of_one_value_build_on_one_another() -> None:
    optimizer = sgd(1.0)
    first = ParamSchedule(optimizer, "lr", "step", by="step", step=2, gamma=0.5, end=4)
    second = ParamSchedule(optimizer, "lr", "poly", by="step", begin=4, end=8, after=first)
    values = []
    for _ in range(9):
        values.append(optimizer.param_groups[0]["lr"])
        second.step()
        first.step()
    assert values == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.5, 0.375, 0.25, 0.125, 0.125])


def test_schedule_cannot_build_on_one_of_another_value() -> None:
    optimizer = sgd()
    first = ParamSchedule(optimizer, "lr")
    for other, name in ((optimizer, "momentum"), (sgd(), "lr")):
        with pytest.raises(ConfigurationError, match="same value of the same optimizer"):
            ParamSchedule(other, name, "fixed", after=first)


WARM = {"policy": "step", "step": [8, 11], "warmup": "linear", "warmup_iters": 5, "warmup_ratio": 0.001}
WARMED = (0.0001, 0.02008, 0.04006, 0.06004, 0.08002, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.001)


def test_warm_up_by_step() -> None:
    assert seen(ParamSchedule(sgd(0.1), by="step", **WARM), 12) == pytest.approx(WARMED, rel=1e-9)


def test_warm_up_by_epoch_goes_from_step_to_step_where_the_length_of_an_epoch_is_known() -> None:
    by_step = ParamSchedule(
        sgd(0.1), "lr", "step", step=2, warmup="linear", warmup_iters=2, warmup_by_epoch=True, epoch_length=2
    )
    assert by_step.by == "step"
    assert seen(by_step, 6) == pytest.approx([0.01, 0.0325, 0.055, 0.0775, 0.01, 0.01])
    by_epoch = ParamSchedule(sgd(0.1), "lr", "fixed", warmup="linear", warmup_iters=2, warmup_by_epoch=True)
    assert (by_epoch.by, by_epoch.warmup_clock) == ("epoch", None)
    assert seen(by_epoch, 3) == pytest.approx([0.01, 0.055, 0.1])


def test_warm_up_raises_momentum_but_not_to_one() -> None:
    warm = {"warmup": "constant", "warmup_iters": 2, "warmup_ratio": 0.95}
    assert seen(ParamSchedule(sgd(), "momentum", by="step", **warm), 3) == pytest.approx(
        [0.9 / 0.95] * 2 + [0.9]
    )
    with pytest.warns(ScheduleWarning, match=r"momentum 0.9 to 1; it is kept at 0.999") as said:
        schedule = ParamSchedule(sgd(), "momentum", by="step", **{**warm, "warmup_ratio": 0.9})
    assert seen(schedule, 3) == pytest.approx([0.999, 0.999, 0.9])
    assert len(said) == 1
    with pytest.warns(ScheduleWarning):
        schedule = ParamSchedule(sgd(momentum=0.9995), "momentum", by="step", **{**warm, "warmup_ratio": 0.5})
    assert schedule.last_values() == [0.9995]


def test_loaded_schedule_goes_on_as_if_it_had_never_stopped() -> None:
    made = [ParamSchedule(sgd(rate), **WARM) for rate in (0.1, 7.0)]
    made[0].step()
    for _ in range(2):
        made[0].warmup_clock.step()  # type: ignore[union-attr]
    made[1].load_state_dict(made[0].state_dict())
    for schedule in made:
        schedule.warmup_clock.step()  # type: ignore[union-attr]
    assert made[0].last_values() == made[1].last_values() == pytest.approx([0.06004])


@pytest.mark.parametrize(
    "wrong", [{}, {"count": 1, "warmup_count": 0, "base_values": [0.1, 0.2]}, {"count": "x"}]
)
def test_state_of_something_else_is_refused(wrong: dict[str, Any]) -> None:
    schedule = ParamSchedule(sgd(0.1), "lr", "exp", gamma=0.5)
    schedule.step()
    with pytest.raises(StateMismatchError):
        schedule.load_state_dict(wrong)
    assert schedule.last_values() == [0.05]


def test_groups_that_loading_replaced_are_found() -> None:
    optimizer = sgd(0.1)
    schedule = ParamSchedule(optimizer, "lr", "exp", gamma=0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_rate_for_each_group_at_the_peak_of_a_cycle() -> None:
    schedule = ParamSchedule(sgd(1.0, 1.0), "lr", "OneCycle", by="step", end=10, max_lr=[0.1, 0.2])
    schedule.step(2)
    assert schedule.last_values() == pytest.approx([0.1, 0.2])
    with pytest.raises(ConfigurationError, match="3 values, but there are 2"):
        ParamSchedule(sgd(1.0, 1.0), "lr", "OneCycle", by="step", end=10, max_lr=[1, 2, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "iter"}, "'step' or 'epoch'"),
        ({"begin": -1}, "begin of a schedule"),
        ({"begin": 3, "end": 3}, "greater than begin"),
        ({"end": 2.0}, "integer"),
        ({"warmup": "cosine", "warmup_iters": 3}, "'constant', 'linear', 'exp'"),
        ({"warmup": "linear"}, "warmup_iters"),
        ({"warmup": "linear", "warmup_iters": 3, "warmup_ratio": 0.0}, "warmup_ratio"),
        ({"warmup": "linear", "warmup_iters": 3, "warmup_ratio": 1.1}, "warmup_ratio"),
        ({"warmup": "linear", "warmup_iters": 3, "begin": 2}, "epoch_length"),
        ({"warmup": "linear", "warmup_iters": 3, "by": "step", "warmup_by_epoch": True}, "epoch_length"),
        ({"epoch_length": 0}, "epoch_length"),
        ({"gamma": 1}, "no option 'gamma'"),
    ],
)
def test_impossible_arguments_are_refused_first(arguments: dict[str, Any], message: str) -> None:
    optimizer = sgd(0.1)
    with pytest.raises(ConfigurationError, match=message):
        ParamSchedule(optimizer, "lr", "fixed", **arguments)
    assert "initial_lr" not in optimizer.param_groups[0]


def test_only_an_optimizer_can_be_scheduled() -> None:
    with pytest.raises(ArgumentTypeError, match="got list"):
        ParamSchedule([0.1], "lr", "fixed")  # type: ignore[arg-type]


def test_trainer_with_a_scheduler_of_its_own_takes_no_schedule_of_the_rate() -> None:
    trainer = trainer_of(zeros(1), "sgd", {"lr_scheduler": lambda n: 0.1 / (1 + n)})
    for given in (ParamSchedule.unbound("lr"), {"type": "torch:ExponentialLR", "gamma": 0.5}):
        with pytest.raises(SchedulerInUseError, match="leave out lr_scheduler"):
            bind_schedules([given], trainer)
    ParamSchedule(trainer, "momentum", "fixed")
