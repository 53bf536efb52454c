"""Types that many modules share: parameter groups, and the result of a Trainer's step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor

Group: TypeAlias = dict[str, Any]
"""A parameter group, as in torch.optim."""
NO_TARGETS: Mapping[int, Tensor] = MappingProxyType({})
"""No targets: everything gathered is stored at its place in the arena."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step. It is the same on every worker if contributions are summed in rounds."""

    grad_norm: float | None = None
    """2-norm of the gradient before clipping: unscaled, divided by the batch size, summed over workers and replicas.
    Infinite if the step was skipped; None if no norm is limited.
    """
    clip_coef: float = 1.0
    """The factor by which the gradient was multiplied to limit its norm."""
    skipped: bool = False
    """Nothing was updated, because a gradient or the loss was infinite or NaN on some worker."""
    loss_scale: float = 1.0
    """The factor by which the loss was multiplied."""
    lr: float | None = None
    """Learning rate of the first parameter group in this step, before `lr_mult`; None if the optimizer has none."""
    updated: bool = True
    """False if the step was skipped, if gradients are still being accumulated, or if there was no gradient."""


Arenas = Mapping[str, Tensor]
"""Dtype → flat tensor."""
