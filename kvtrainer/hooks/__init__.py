"""Hooks for a runner, which call a Trainer at the right places of its loop; under MMCV's names."""

from __future__ import annotations

from kvtrainer.hooks.base import Hook, Priority, get_priority
from kvtrainer.hooks.fp16_hook import Fp16OptimizerHook, GradientCumulativeFp16OptimizerHook
from kvtrainer.hooks.optimizer_hook import GradientCumulativeOptimizerHook, OptimizerHook

__all__ = [
    "Fp16OptimizerHook",
    "GradientCumulativeFp16OptimizerHook",
    "GradientCumulativeOptimizerHook",
    "Hook",
    "OptimizerHook",
    "Priority",
    "get_priority",
]
