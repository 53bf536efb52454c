"""Hooks that write learning rates and momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.hooks import (
    CyclicLrUpdaterHook,
    FixedLrUpdaterHook,
    Hook,
    LrUpdaterHook,
    MomentumUpdaterHook,
    OneCycleLrUpdaterHook,
    OptimizerHook,
    Priority,
    StepLrUpdaterHook,
)
from kvtrainer.registry import HOOKS
from tests.support.hook_runner import Runner, Weights, batch
from tests.support.scalar_training import zeros
from tests.unit.schedules.test_formulas import MMCV


def scheduled(hook: Any, optimizer: Any, epochs: int, length: int, key: str = "lr") -> list[float]:
    """What the first group has in each batch of a run in which the hook takes part."""
    runner = SimpleNamespace(optimizer=optimizer, epoch=0, iter=0, data_loader=range(length))
    runner.max_epochs, runner.max_iters = epochs, epochs * length
    hook.before_run(runner)
    seen = []
    for runner.epoch in range(epochs):
        hook.before_train_epoch(runner)
        for _ in range(length):
            hook.before_train_iter(runner)
            seen.append(optimizer.param_groups[0][key])
            runner.iter += 1
    return seen


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(("policy", "name", "options", "base", "expected"), MMCV)
def test_hooks_of_schedules_write_the_values_of_mmcv(
    policy: str, name: str, options: dict[str, Any], base: float, expected: Sequence[float], length: int
) -> None:
    # As MMCV's runner finds the class of a policy; those of a cycle go by batch only.
    kind = policy.title() if policy == policy.lower() else policy
    cfg = {"type": kind + {"lr": "LrUpdaterHook", "momentum": "MomentumUpdaterHook"}[name], **options}
    by_batch = length == 1 or policy in ("cyclic", "OneCycle")
    cfg |= {"by_epoch": False} if by_batch else {}
    optimizer = torch.optim.SGD(zeros(1), **{"lr": 0.1, "momentum": 0.9, name: base})
    if by_batch:
        seen = scheduled(HOOKS.build(cfg), optimizer, 1, len(expected), name)
    else:
        seen = scheduled(HOOKS.build(cfg), optimizer, len(expected), length, name)[::length]
    assert seen == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    "warm_up", [{"warmup_iters": 4}, {"warmup_iters": 2, "warmup_by_epoch": True}], ids=["batches", "epochs"]
)
def test_hook_of_a_schedule_by_epoch_warms_up_from_batch_to_batch(warm_up: dict[str, Any]) -> None:
    hook = StepLrUpdaterHook(step=[1, 3], gamma=0.5, warmup="linear", warmup_ratio=0.2, **warm_up)
    optimizer = torch.optim.SGD(zeros(1), lr=0.1)
    expected = [0.1 * factor for factor in (0.2, 0.4, 0.5 * 0.6, 0.5 * 0.8, 0.5, 0.5, 0.25, 0.25)]
    assert scheduled(hook, optimizer, 4, 2) == pytest.approx(expected)
    assert hook.step == [1, 3]
    assert hook.priority == Priority.VERY_HIGH


def test_classes_derived_from_the_hook_have_a_formula_of_their_own() -> None:
    class Root(LrUpdaterHook):
        def get_lr(self, runner: Any, base_lr: float) -> float:
            return base_lr / math.sqrt(1 + runner.iter)

    class Half(MomentumUpdaterHook):
        def get_momentum(self, runner: Any, base_momentum: float) -> float:
            return base_momentum / 2

    optimizer = torch.optim.SGD(zeros(1), lr=0.1, momentum=0.8)
    assert scheduled(Root(by_epoch=False), optimizer, 1, 3) == pytest.approx(
        [0.1, 0.1 / 2**0.5, 0.1 / 3**0.5]
    )
    warm = Half(warmup="constant", warmup_iters=1)
    assert scheduled(warm, optimizer, 1, 2, "momentum") == pytest.approx([0.4 / 0.9, 0.4])
    adam = torch.optim.Adam(zeros(1), betas=(0.8, 0.99))
    scheduled(Half(), adam, 1, 1)
    assert adam.param_groups[0]["betas"] == (0.4, 0.99)
    with pytest.raises(NotImplementedError):
        scheduled(LrUpdaterHook(), optimizer, 1, 1)


def test_formula_of_a_derived_class_finds_all_options_under_mmcvs_names() -> None:
    class Own(StepLrUpdaterHook):
        def get_lr(self, runner: Any, base_lr: float) -> float:
            options: Any = self
            return float(max(base_lr * options.gamma ** (runner.iter // options.step), options.min_lr or 0))

    optimizer = torch.optim.SGD(zeros(1), lr=0.5)
    assert scheduled(Own(step=2, by_epoch=False), optimizer, 1, 3) == pytest.approx([0.5, 0.5, 0.05])
    momentum = HOOKS.build({"type": "StepMomentumUpdaterHook", "step": 2, "min_momentum": 0.1})
    assert (momentum.gamma, momentum.min_momentum) == (0.5, 0.1)


def test_hook_writes_the_rates_of_a_trainer_before_it_updates() -> None:
    model = Weights()
    schedule, update = CyclicLrUpdaterHook(target_ratio=(3.0, 1.0), step_ratio_up=0.5), OptimizerHook()
    runner = Runner(model, update, max_iters=2)
    schedule.before_run(runner)
    for expected in (-1.0, -1.0 - 3.0):  # the rate is 1, and then 3
        schedule.before_train_iter(runner)
        runner.run([batch([1.0, 1.0])])
        assert model.w.tolist() == pytest.approx([expected] * 2)


def test_one_cycle_comes_to_mmcvs_numbers_to_the_last_bit() -> None:
    hook = OneCycleLrUpdaterHook(max_lr=0.01, pct_start=0.5)
    seen = scheduled(hook, torch.optim.SGD(zeros(1), lr=0.1), 1, 10)
    assert (seen[0], seen[5], seen[9]) == (0.0003999999999999993, 0.00904508879153485, 4e-08)


def test_peaks_of_a_cycle_may_differ_between_groups_and_optimizers() -> None:
    def made(*rates: float) -> torch.optim.SGD:
        return torch.optim.SGD([{"params": zeros(1), "lr": rate} for rate in rates])

    several = {"body": made(0.1, 0.2), "head": made(0.3)}
    hook = OneCycleLrUpdaterHook(max_lr={"body": [1.0, 2.0], "head": 4.0}, div_factor=10.0)
    runner = SimpleNamespace(optimizer=several, iter=0, max_iters=10)
    hook.before_run(runner)
    hook.before_train_iter(runner)
    rates = {name: [group["lr"] for group in one.param_groups] for name, one in several.items()}
    assert hook.base_lr == {"body": [0.1, 0.2], "head": [0.4]}
    assert rates == {"body": pytest.approx([0.1, 0.2]), "head": pytest.approx([0.4])}
    with pytest.raises(ConfigurationError, match="max_lr has 3 values"):
        scheduled(OneCycleLrUpdaterHook(max_lr=[1.0, 2.0, 3.0]), made(0.1, 0.2), 1, 5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("StepLrUpdaterHook", {}),
        ("StepLrUpdaterHook", {"step": 0}),
        ("ExpLrUpdaterHook", {"gamma": 0.5, "gama": 1}),
        ("StepLrUpdaterHook", {"step": 2, "by_epoch": [8, 11]}),
        ("FixedLrUpdaterHook", {"warmup": "slow", "warmup_iters": 3}),
        ("FixedLrUpdaterHook", {"warmup": "linear"}),
        ("CyclicLrUpdaterHook", {"by_epoch": True}),
        ("CyclicLrUpdaterHook", {"gamma": 5}),
        ("CosineAnnealingMomentumUpdaterHook", {}),
    ],
)
def test_impossible_options_of_schedules_are_refused_at_once(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        HOOKS.build({"type": kind, **options})


def test_hook_beside_a_schedule_of_the_trainer_is_refused() -> None:
    runner = Runner(Weights(), Hook(), schedules=[{"policy": "exp", "gamma": 0.5}])
    with pytest.raises(ConfigurationError, match="would undo"):
        FixedLrUpdaterHook().before_run(runner)
    with pytest.raises(ArgumentTypeError):
        FixedLrUpdaterHook().before_run(SimpleNamespace())
    rates_only = SimpleNamespace(optimizer=torch.optim.Adagrad(zeros(1)))
    with pytest.raises(KeyError):
        MomentumUpdaterHook().before_run(rates_only)
