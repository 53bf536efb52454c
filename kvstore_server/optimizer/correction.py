"""Momentum that has the learning rate inside, when the learning rate changes.

With the rate inside, `m = momentum * m - lr * g` weighs former gradients with the rates they came with. Multiplying m
by new / old gives them the new one, which is what torch's form has always; Detectron does it at jumps of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer.base import StateValue

_TINY = 1e-10
"""What Detectron divides by at least when it compares two rates."""


class Correction(NamedTuple):
    """When momentum is corrected."""

    threshold: float = 1.1
    """By what factor the rate must have changed, up or down, and more."""
    min_lr: float = 1e-7
    """What the former rate must have exceeded."""


def read_correction(value: Any) -> Correction | None:
    """Read the option: None or False, True, a mapping, or the two numbers as which it travels.

    Raises:
        ConfigurationError: it is nothing of this, or a number is impossible.
    """
    if value is None or value is False:
        return None
    if value is True:
        return Correction()
    if isinstance(value, Mapping) and not set(value) - set(Correction._fields):
        numbers: Any = Correction(**value)
    elif isinstance(value, list | tuple) and len(value) == len(Correction._fields):
        numbers = Correction(*value)
    else:
        raise ConfigurationError(
            "momentum_correction must be None, True or a dict of threshold and min_lr, such as "
            f"{Correction()._asdict()}, got {value!r:.80}"
        )
    for name, number, least in zip(Correction._fields, numbers, (1.0, 0.0), strict=True):
        is_number = isinstance(number, Real) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or number < least:
            raise ConfigurationError(
                f"{name} of momentum_correction must be a number of at least {least:g}, got {number!r}"
            )
    return Correction(float(numbers.threshold), float(numbers.min_lr))


def correct_momentum(
    buffer: Tensor, state: dict[str, StateValue], lr: float, correction: Correction | None
) -> None:
    """Multiply the momentum by new / old if the rate has changed enough since the last update; note the new rate.

    Args:
        buffer: The momentum, changed in place.
        state: Its 'last_lr' is the rate of the last update; none before the first one.
        lr: The rate of this update, multipliers applied.
    """
    last, state["last_lr"] = state.get("last_lr"), lr
    if last is None or correction is None:
        return
    former = float(last)
    if former <= correction.min_lr or max(lr / former, former / max(lr, _TINY)) <= correction.threshold:
        return
    if lr == 0.0:
        buffer.zero_()
    else:
        buffer.mul_(lr / former)
