"""Gluon's schedulers under a Trainer: which update has which learning rate, and the count of updates behind it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvstore_server.optimizer import create
from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, OptimizerError, SchedulerInUseError
from kvtrainer.groups import UpdateCounter
from kvtrainer.lr_scheduler import CosineScheduler, FactorScheduler, LRScheduler, PolyScheduler
from kvtrainer.types import Group
from tests.support import ways_to_train
from tests.support.scalar_training import zeros
from tests.support.ways_to_train import STORES

TRACES: dict[str, tuple[LRScheduler, list[float]]] = {
    # MXNet's own traces for num_update 1, 2, 3, …
    "factor": (FactorScheduler(step=2, factor=0.5, base_lr=1), [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]),
    "poly": (PolyScheduler(10, base_lr=1, pwr=2), [0.81, 0.64, 0.49, 0.36, 0.25, 0.16, 0.09]),
    "warm-up": (CosineScheduler(10, base_lr=1, warmup_steps=4), [0.25, 0.5, 0.75, 1, 0.9330127, 0.75, 0.5]),
}


def trainer_of(parameters: Any, uok: bool | None = None, kind: str = "sgd", **options: Any) -> Trainer:
    return ways_to_train.trainer_of(parameters, uok, kind, options)


def step(trainer: Trainer, *parameters: Parameter) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)
    trainer.step(1, ignore_stale_grad=True)


def moves(trainer: Trainer, p: Parameter, steps: int) -> list[float]:
    """By how much each step with a gradient of 1 lowers `p`: with plain SGD, the learning rate."""
    seen = []
    for _ in range(steps):
        before = p.item()
        step(trainer, p)
        seen.append(before - p.item())
    return seen


@pytest.mark.parametrize("uok", STORES)
@pytest.mark.parametrize("name", TRACES)
def test_update_n_has_the_rate_that_the_scheduler_gives_for_n_and_says_so(
    name: str, uok: bool | None
) -> None:
    scheduler, trace = TRACES[name]
    [p] = zeros(1)
    trainer = trainer_of([p], uok, lr_scheduler=scheduler)
    for rate in trace:
        assert moves(trainer, p, 1) == pytest.approx([rate], abs=1e-6)
        assert trainer.last is not None
        assert trainer.last.lr == pytest.approx(rate)


@pytest.mark.parametrize("uok", STORES)
def test_learning_rate_is_that_of_the_last_update_and_holds_for_all_groups(uok: bool | None) -> None:
    a, b = zeros(2)
    b.lr_mult = 2.0  # type: ignore[attr-defined]
    trainer = trainer_of(
        [{"params": [a]}, {"params": [b], "momentum": 0.0}], uok, lr_scheduler=lambda n: n / 8
    )
    assert trainer.learning_rate == 0
    for n in (1, 2, 3):
        step(trainer, a, b)
        assert trainer.learning_rate == trainer.optimizer.learning_rate == n / 8
        assert [group["lr"] for group in trainer.param_groups] == [n / 8] * 2
    assert (a.item(), b.item()) == (-6 / 8, -12 / 8)


@pytest.mark.parametrize("uok", STORES)
def test_updates_count_from_begin_num_update(uok: bool | None) -> None:
    [p] = zeros(1)
    trainer = trainer_of([p], uok, lr_scheduler=lambda n: n / 8, begin_num_update=4)
    assert trainer.learning_rate == 4 / 8
    assert moves(trainer, p, 2) == [5 / 8, 6 / 8]


@pytest.mark.parametrize("uok", STORES)
def test_update_count_is_the_greatest_of_all_keys_as_in_mxnet(uok: bool | None) -> None:
    a, b = zeros(2)
    trainer = trainer_of([a, b], uok, lr_scheduler=lambda n: float(n))
    seen = []
    for keys in ([a], [b], [b], [a], [a, b], []):
        step(trainer, *keys)
        seen.append(trainer.optimizer.num_update)
    # a's updates are 1, 2, 3, b's are 1, 2, 3; num_update never falls.
    assert seen == [1, 1, 2, 2, 3, 3]
    assert (a.item(), b.item()) == (-(1 + 2 + 3), -(1 + 2 + 3))


@pytest.mark.parametrize("uok", STORES)
def test_plain_function_schedules_wherever_the_optimizer_runs_and_is_not_sent(uok: bool | None) -> None:
    [p] = zeros(1)
    trainer = trainer_of([p], uok, kind="adam", lr_scheduler=lambda n: 0.5**n)
    assert moves(trainer, p, 3) == pytest.approx([0.5, 0.25, 0.125], rel=1e-5)


def test_setting_the_rate_beside_a_scheduler_is_an_error_and_a_user_warning() -> None:
    [p] = zeros(1)
    trainer = trainer_of([p], lr_scheduler=FactorScheduler(2, 0.5, base_lr=1))
    with pytest.raises(SchedulerInUseError, match="takes its learning rate from FactorScheduler") as caught:
        trainer.set_learning_rate(0.1)
    assert isinstance(caught.value, UserWarning)
    trainer.optimizer.lr_scheduler.base_lr = 0.25  # type: ignore[union-attr]
    assert moves(trainer, p, 1) == [0.25]


def test_rate_of_a_group_that_somebody_else_sets_is_noticed() -> None:
    [p] = zeros(1)
    trainer = trainer_of([p], lr_scheduler=lambda n: 0.5)
    step(trainer, p)
    trainer.param_groups[0]["lr"] = 0.1
    with pytest.raises(SchedulerInUseError, match=r"was set to 0\.1, but .* decides it"):
        step(trainer, p)
    assert p.item() == -0.5


def test_rate_of_a_single_group_is_refused_beside_a_scheduler() -> None:
    [p] = zeros(1)
    with pytest.raises(ConfigurationError, match=r"group has lr=0\.5, but FactorScheduler.*lr_mult"):
        trainer_of([{"params": [p], "learning_rate": 0.5}], lr_scheduler=FactorScheduler(2))


@pytest.mark.parametrize("uok", STORES)
def test_failed_step_is_not_counted(uok: bool | None) -> None:
    [p] = zeros(1)
    failing = [3]

    def schedule(n: int) -> float:
        if failing and n == failing[0]:
            raise OptimizerError("no rate for this one")
        return float(n)

    trainer = trainer_of([p], uok, lr_scheduler=schedule)
    assert moves(trainer, p, 2) == [1, 2]
    with pytest.raises(OptimizerError):
        step(trainer, p)
    failing.clear()
    assert moves(trainer, p, 2) == [3, 4]


@pytest.mark.parametrize("how", ["state_dict", "file"])
@pytest.mark.parametrize("uok", STORES)
def test_count_goes_on_after_loading(how: str, uok: bool | None, tmp_path: Path) -> None:
    [p], [q] = zeros(1), zeros(1)
    trainer, other = (
        trainer_of([one], uok, lr_scheduler=PolyScheduler(8, base_lr=8, pwr=1)) for one in (p, q)
    )
    assert moves(trainer, p, 3) == [7, 6, 5]
    if how == "file":
        trainer.save_states(tmp_path / "states")
        other.load_states(tmp_path / "states")
    else:
        other.load_state_dict(trainer.state_dict())
    assert other.optimizer.num_update == 3
    assert moves(other, q, 2) == [4, 3]


def test_count_goes_on_with_a_group_that_is_added() -> None:
    a, b = zeros(2)
    trainer = trainer_of([a], lr_scheduler=lambda n: float(n))
    assert moves(trainer, a, 3) == [1, 2, 3]
    trainer.add_param_group({"params": [b]})
    step(trainer, b)
    assert (b.item(), trainer.optimizer.num_update) == (-3, 3)
    assert moves(trainer, a, 1) == [4]


def test_frozen_parameter_does_not_hold_the_count_up() -> None:
    a, b = zeros(2)
    trainer = trainer_of([a, b], lr_scheduler=lambda n: float(n))
    b.requires_grad_(False)
    assert moves(trainer, a, 3) == [1, 2, 3]
    b.requires_grad_(True)
    step(trainer, a, b)
    assert (b.item(), trainer.optimizer.num_update) == (-4, 4)


KEYS = 4


class PerKey:
    """MXNet's rule: a count per key, from begin_num_update; num_update is the greatest that ever was."""

    def __init__(self, begin: int) -> None:
        self.counts = [begin] * KEYS
        self.num_update = begin

    def update(self, keys: list[bool]) -> None:
        self.counts = [count + is_in for count, is_in in zip(self.counts, keys, strict=True)]
        self.num_update = max(self.num_update, *self.counts)


@pytest.mark.parametrize("seed", range(20))
def test_rate_and_count_follow_the_greatest_count_of_any_key(seed: int) -> None:
    chance = random.Random(seed)
    begin = chance.choice([0, 7])
    optimizer = create("sgd", lr_scheduler=lambda n: float(n), begin_num_update=begin)
    schedule, expected = UpdateCounter(optimizer), PerKey(begin)
    groups: list[Group] = [{"lr": 0.0}, {"lr": 0.0}]
    for _ in range(60):
        keys = [chance.random() < chance.choice([0.1, 0.5, 1.0]) for _ in range(KEYS)]
        schedule.apply(groups, keys)
        schedule.count(keys)
        expected.update(keys)
        assert optimizer.num_update == expected.num_update
        if any(keys):
            assert [group["lr"] for group in groups] == [expected.num_update] * 2
        if chance.random() < 0.1:
            updates = {key: count - begin for key, count in enumerate(expected.counts) if count > begin}
            schedule = UpdateCounter(optimizer)
            schedule.restore(updates, KEYS)
            assert optimizer.num_update == expected.num_update


def test_coming_update_of_several_workers_counts_as_one_of_the_leading_key() -> None:
    optimizer = create("sgd", lr_scheduler=lambda n: float(n))
    schedule, group = UpdateCounter(optimizer), {"lr": 0.0}
    for keys, several, alone in (([True, True], 1, 1), ([True, False], 2, 2), ([False, True], 3, 2)):
        schedule.apply([group], None)
        assert group["lr"] == several
        schedule.apply([group], keys)
        assert group["lr"] == alone
        schedule.count(keys)


def test_without_a_scheduler_updates_are_counted_all_the_same() -> None:
    optimizer = create("sgd", learning_rate=0.5)
    UpdateCounter(optimizer).count([True])
    assert optimizer.num_update == 1
