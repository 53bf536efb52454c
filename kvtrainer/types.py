"""Types that many modules share: parameter groups, and what a step of a Trainer reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor

Group: TypeAlias = dict[str, Any]
"""A parameter group, as torch.optim has them."""
NO_TARGETS: Mapping[int, Tensor] = MappingProxyType({})
"""No targets: all that is gathered goes to its place in the arena."""


@dataclass(frozen=True)
class StepResult:
    """How a step ended; the same on every worker, where contributions are summed in rounds.

    `grad_norm` and `clip_coef` are two numbers: the norm is that before clipping.
    """

    grad_norm: float | None = None
    """Norm of the gradient that the update would have used unclipped: unscaled, divided by the batch size, summed over
    workers and replicas; infinite if the step was skipped. None where no norm is limited."""
    clip_coef: float = 1.0
    """The factor by which the gradient was multiplied to limit its norm."""
    skipped: bool = False
    """Nothing was updated because a gradient, or the loss, was infinite or not a number on some worker."""
    loss_scale: float = 1.0
    """The factor that the loss carried."""
    lr: float | None = None
    """Learning rate of the first parameter group in this step, before `lr_mult`; None of an optimizer without one."""
    updated: bool = True
    """False if the step was skipped, while gradients are still being accumulated, and where there was no gradient."""


Arenas = Mapping[str, Tensor]
"""Dtype → flat tensor."""
