"""Names, order and stages of hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtrainer.errors import ConfigurationError
from kvtrainer.hooks import (
    Hook,
    OptimizerHook,
    Priority,
    get_priority,
)
from kvtrainer.registry import HOOKS


def test_hook_names_the_stages_at_which_it_does_something() -> None:
    class Every(Hook):
        def after_epoch(self, runner: Any) -> None: ...

        def before_train_iter(self, runner: Any) -> None: ...

    assert Hook().get_triggered_stages() == []
    assert OptimizerHook().get_triggered_stages() == ["before_run", "after_train_iter"]
    assert Every().get_triggered_stages() == ["before_train_iter", "after_train_epoch", "after_val_epoch"]


def test_priorities_are_mmcvs() -> None:
    assert [get_priority(one) for one in ("HIGHEST", "very_high", Priority.NORMAL, 33)] == [0, 10, 50, 33]
    assert get_priority(OptimizerHook.priority) == get_priority("ABOVE_NORMAL") == 40
    for bad, error in (
        (101, ValueError),
        (-1, ValueError),
        ("SOON", KeyError),
        (True, TypeError),
        (1.5, TypeError),
    ):
        with pytest.raises(error) as raised:
            get_priority(bad)  # type: ignore[arg-type]
        assert isinstance(raised.value, ConfigurationError)


def test_hooks_are_found_by_name() -> None:
    hook = HOOKS.build({"type": "OptimizerHook", "grad_clip": {"max_norm": 35}})
    assert type(hook) is OptimizerHook
    cumulative = HOOKS.build({"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 4})
    assert isinstance(cumulative, OptimizerHook)
    for name in ("Fp16OptimizerHook", "GradientCumulativeFp16OptimizerHook"):
        assert isinstance(HOOKS.build({"type": name}), OptimizerHook)


def test_places_of_training_and_validation_are_places_of_any_epoch_and_batch() -> None:
    class Recorder(Hook):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def before_epoch(self, runner: Any) -> None:
            self.seen.append("before_epoch")

        def after_epoch(self, runner: Any) -> None:
            self.seen.append("after_epoch")

        def before_iter(self, runner: Any) -> None:
            self.seen.append("before_iter")

        def after_iter(self, runner: Any) -> None:
            self.seen.append("after_iter")

    hook = Recorder()
    for kind in ("train", "val"):
        for when in ("before", "after"):
            for what in ("epoch", "iter"):
                getattr(hook, f"{when}_{kind}_{what}")(None)
    assert hook.seen == ["before_epoch", "before_iter", "after_epoch", "after_iter"] * 2
    hook.before_run(None)
    hook.after_run(None)


def test_hooks_can_ask_where_a_run_is() -> None:
    hook = Hook()
    runner = SimpleNamespace(epoch=3, iter=19, inner_iter=4, max_epochs=4, max_iters=20, data_loader=range(5))
    assert [hook.every_n_epochs(runner, n) for n in (0, 2, 3, 4)] == [False, True, False, True]
    assert [hook.every_n_iters(runner, n) for n in (-1, 10, 6)] == [False, True, False]
    assert [hook.every_n_inner_iters(runner, n) for n in (5, 2)] == [True, False]
    assert hook.end_of_epoch(runner)
    assert hook.is_last_epoch(runner)
    assert hook.is_last_iter(runner)
