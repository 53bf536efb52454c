"""Hooks for a runner, which call a Trainer at the right places of its loop; under MMCV's names."""

from __future__ import annotations

from kvtrainer.hooks.base import Hook, Priority, get_priority
from kvtrainer.hooks.optimizer_hooks import (
    Fp16OptimizerHook,
    GradientCumulativeFp16OptimizerHook,
    GradientCumulativeOptimizerHook,
    OptimizerHook,
)
from kvtrainer.hooks.schedule_hooks import (
    CosineAnnealingLrUpdaterHook,
    CosineAnnealingMomentumUpdaterHook,
    CosineRestartLrUpdaterHook,
    CyclicLrUpdaterHook,
    CyclicMomentumUpdaterHook,
    ExpLrUpdaterHook,
    FixedLrUpdaterHook,
    FlatCosineAnnealingLrUpdaterHook,
    InvLrUpdaterHook,
    LinearAnnealingLrUpdaterHook,
    LinearAnnealingMomentumUpdaterHook,
    LrUpdaterHook,
    MomentumUpdaterHook,
    OneCycleLrUpdaterHook,
    OneCycleMomentumUpdaterHook,
    PolyLrUpdaterHook,
    StepLrUpdaterHook,
    StepMomentumUpdaterHook,
)

__all__ = [
    "CosineAnnealingLrUpdaterHook",
    "CosineAnnealingMomentumUpdaterHook",
    "CosineRestartLrUpdaterHook",
    "CyclicLrUpdaterHook",
    "CyclicMomentumUpdaterHook",
    "ExpLrUpdaterHook",
    "FixedLrUpdaterHook",
    "FlatCosineAnnealingLrUpdaterHook",
    "Fp16OptimizerHook",
    "GradientCumulativeFp16OptimizerHook",
    "GradientCumulativeOptimizerHook",
    "Hook",
    "InvLrUpdaterHook",
    "LinearAnnealingLrUpdaterHook",
    "LinearAnnealingMomentumUpdaterHook",
    "LrUpdaterHook",
    "MomentumUpdaterHook",
    "OneCycleLrUpdaterHook",
    "OneCycleMomentumUpdaterHook",
    "OptimizerHook",
    "PolyLrUpdaterHook",
    "Priority",
    "StepLrUpdaterHook",
    "StepMomentumUpdaterHook",
    "get_priority",
]
