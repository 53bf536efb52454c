"""Gluon's loss scaling, for gradients in half precision, such as `torch.autocast` makes::

    kvtrainer.amp.init_trainer(trainer)
    ...
    with torch.autocast("cuda", torch.float16):
        loss = loss_fn(net(x), y)
    with kvtrainer.amp.scale_loss(loss, trainer) as scaled:
        scaled.backward()
    trainer.step(batch_size)

A step in which a gradient overflows on any worker is skipped by all of them, wherever the optimizer runs: no weight, no
optimizer state and no update count changes, the gradients are used up, and the scale is halved for the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.optim
from torch import Tensor

from kvtrainer.errors import ArgumentTypeError
from kvtrainer.optimizer import Optimizer
from kvtrainer.precision.grad_scaler import GradScaler
from kvtrainer.precision.loss_scaler import LossScaler, Scaler, scaler_of, unscale
from kvtrainer.trainer import Trainer

__all__ = ["GradScaler", "LossScaler", "init_trainer", "scale_loss", "unscale"]

_Loss = TypeVar("_Loss", bound=Tensor | Sequence[Tensor])


def init_trainer(trainer: Trainer, scaler: Scaler | None = None) -> None:
    """Give a Trainer a loss scaler; call it on every worker, with equal scalers.

    Args:
        trainer: one that has a scaler, from saved states say, keeps it unless another is given.
        scaler: by default a new LossScaler, which begins at 2^16.

    Raises:
        ArgumentTypeError: `trainer` is no Trainer.
    """
    if isinstance(trainer, Optimizer | torch.optim.Optimizer) and not isinstance(trainer, Trainer):
        raise ArgumentTypeError(
            f"loss scaling works with a kvtrainer.Trainer only, got the optimizer {type(trainer).__name__}; build a "
            "Trainer with it and give that"
        )
    if not isinstance(trainer, Trainer):
        raise ArgumentTypeError(
            f"init_trainer needs a kvtrainer.Trainer, got {type(trainer).__name__}: {trainer!r:.80}"
        )
    if scaler is not None or trainer.loss_scaler is None:
        trainer.loss_scaler = LossScaler() if scaler is None else scaler


@contextmanager
def scale_loss(loss: _Loss, trainer: Trainer) -> Iterator[Any]:
    """Yield the loss, or a list of the losses, multiplied by the Trainer's loss scale, to call `backward` on.

    The next `step` or `update` divides the gradients by the scale. A loss of half precision may overflow itself; keep
    it in float32, as torch.autocast does.

    Raises:
        AmpNotInitializedError: the Trainer has no loss scaler.
        ConfigurationError: `unscale` was called since the last step.
    """
    scaler = scaler_of(trainer)
    scaler.mark_scaled()
    if isinstance(loss, Tensor):
        yield loss * scaler.loss_scale
    else:
        yield [one * scaler.loss_scale for one in loss]
