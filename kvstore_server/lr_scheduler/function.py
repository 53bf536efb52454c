"""A plain function of `num_update` as a scheduler: it serves in this process and cannot leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore_server.errors import ConfigurationError
from kvstore_server.lr_scheduler.base import LRScheduler


class FunctionScheduler(LRScheduler):
    """The learning rate that a user's function returns for `num_update`. No base_lr, no warm-up: it decides alone."""

    warmup_steps = 0

    def __init__(self, function: Callable[[int], float]) -> None:
        self.function = function

    @property
    def base_lr(self) -> float:
        """The learning rate at update 0."""
        return self(0)

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        raise ConfigurationError(
            f"learning_rate {value!r} would have no effect beside {self!r}, which alone decides the learning rate; "
            "give one of the two"
        )

    def __call__(self, num_update: int) -> float:
        """Return what the function returns for `num_update`.

        Raises:
            ConfigurationError: that is not a finite number.
        """
        return self._number(f"what {self.function!r} returns for {num_update}", self.function(num_update))

    def spec(self) -> dict[str, Any]:
        """Raise ConfigurationError: a function is code, and code is neither sent nor saved."""
        raise ConfigurationError(
            f"{self.function!r} as lr_scheduler works only where this process computes the learning rate; code is "
            "neither sent to a server nor saved. Use a scheduler of kvtrainer.lr_scheduler, or write a subclass of "
            "LRScheduler, register it, and start servers with --import MODULE"
        )


def as_scheduler(value: object) -> LRScheduler:
    """Return a scheduler as it is, and a function of `num_update` as a `FunctionScheduler`.

    Raises:
        ConfigurationError: `value` is neither.
    """
    if isinstance(value, LRScheduler):
        return value
    if isinstance(value, type) or not callable(value):
        raise ConfigurationError(
            "lr_scheduler must be a scheduler, such as kvtrainer.lr_scheduler has them, or a function that returns the "
            f"learning rate for num_update; got {value!r}"
        )
    return FunctionScheduler(value)
