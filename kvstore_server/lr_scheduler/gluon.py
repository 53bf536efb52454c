"""Gluon's four schedulers, with MXNet's arguments, traces and errors.

Unlike MXNet's they keep no place in the schedule: the number of decays is computed from `num_update`. So jumping
ahead, asking twice or going back gives the same answer, and a new `base_lr` counts from the start. Operations come in
MXNet's order, so the bits are its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

from kvstore_server.lr_scheduler.base import LRScheduler, register

_ONE_BY_ONE = 1 << 16
"""Decays that are multiplied one by one; whole blocks of so many are a power, so that no count takes long."""


class _Decaying(LRScheduler):
    """A schedule that multiplies by `factor`, again and again."""

    factor: float
    _reached: tuple[object, int, float] | None = None
    """Where the last answer was found, so that the next one need not begin at `base_lr`; changes no answer."""

    def _decayed(self, decays: int, least: float = -math.inf) -> float:
        """Multiply `base_lr` so many times, never below `least`; one by one, because a power is rounded otherwise."""
        done = decays - decays % _ONE_BY_ONE
        start = self.base_lr, self.factor, least, done
        lr = max(self.base_lr * self.factor**done, least) if done else self.base_lr
        if self._reached is not None and self._reached[0] == start and self._reached[1] <= decays:
            _, done, lr = self._reached
        for _ in range(done, decays):
            lr = max(lr * self.factor, least)
        self._reached = start, decays, lr
        return lr


@register
class FactorScheduler(_Decaying):
    """`base_lr * factor**k` with `k = ceil(num_update / step) - 1`, and from k = 1 at least `stop_factor_lr`.

    Args:
        step: how many updates lie between two decays, at least 1; those of the warm-up are counted.
        factor: what each decay multiplies by, from 0 to 1.
        stop_factor_lr: no decay goes below it.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: as of `LRScheduler`.
    """

    name = "factor"

    def __init__(
        self,
        step: int,
        factor: float = 1,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = self._integer("step", step, 1)
        self.factor = _checked_factor(self, factor)
        self.stop_factor_lr = self._number("stop_factor_lr", stop_factor_lr)

    def after_warmup(self, num_update: int) -> float:
        """Return the learning rate of an update after the warm-up."""
        return self._decayed(max(0, (num_update - 1) // self.step), self.stop_factor_lr)


@register
class MultiFactorScheduler(_Decaying):
    """`base_lr * factor**k`, where k is how many of the entries of `step` are less than `num_update`.

    Args:
        step: a list of increasing ints, the first at least 1; updates of the warm-up are counted.
        factor: what each decay multiplies by, from 0 to 1.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: as of `LRScheduler`.
    """

    name = "multifactor"

    def __init__(
        self,
        step: Sequence[int],
        factor: float = 1,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        if not isinstance(step, list | tuple) or not step:
            raise self._wrong(f"step must be a list of at least one int, got {step!r}")
        self.step = [self._integer("each entry of step", entry, 1) for entry in step]
        if any(after <= before for before, after in zip(self.step, self.step[1:], strict=False)):
            raise self._wrong(f"step must be an increasing list of ints, got {step!r}")
        self.factor = _checked_factor(self, factor)

    def after_warmup(self, num_update: int) -> float:
        """Return the learning rate of an update after the warm-up."""
        return self._decayed(bisect_left(self.step, num_update))


class _Annealing(LRScheduler, ABC):
    """A decay from `base_lr` to `final_lr` that begins after the warm-up and ends at `max_update`."""

    def __init__(
        self,
        max_update: int,
        final_lr: float,
        base_lr: float,
        warmup_steps: int,
        warmup_begin_lr: float,
        warmup_mode: str,
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.max_update = self._integer("max_update, the maximum number of updates,", max_update, 1)
        if self.max_update <= self.warmup_steps:
            raise self._wrong(
                f"max_update must be more than warmup_steps, for the decay lies between them; got {max_update} and "
                f"{warmup_steps}"
            )
        self.final_lr = self._number("final_lr", final_lr)

    def after_warmup(self, num_update: int) -> float:
        """Return the learning rate of an update after the warm-up."""
        done = min(num_update, self.max_update) - self.warmup_steps
        left = self._left(done, self.max_update - self.warmup_steps)
        return self.final_lr + (self.base_lr - self.final_lr) * left

    @abstractmethod
    def _left(self, done: int, span: int) -> float:
        """How much of the way from `final_lr` to `base_lr` is left after some of `span` updates, from 1 after none."""


@register
class PolyScheduler(_Annealing):
    """`final_lr + (base_lr - final_lr) * (1 - p)**pwr`, where p goes from 0 to 1 between warm-up and `max_update`.

    Args:
        max_update: the update at which the decay ends; more than `warmup_steps`.
        pwr: the exponent, at least 0.
        final_lr: where the decay ends.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: as of `LRScheduler`.
    """

    name = "poly"

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pwr: float = 2,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(max_update, final_lr, base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.pwr = self._number("pwr", pwr)
        if self.pwr < 0:
            raise self._wrong(f"pwr must not be negative, got {pwr!r}")

    def _left(self, done: int, span: int) -> float:
        return float((1 - done / span) ** self.pwr)


@register
class CosineScheduler(_Annealing):
    """`final_lr + (base_lr - final_lr) * (1 + cos(pi p)) / 2`, p from 0 to 1 between warm-up and `max_update`.

    Args:
        max_update: the update at which the decay ends; more than `warmup_steps`.
        final_lr: where the decay ends.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: as of `LRScheduler`.
    """

    name = "cosine"

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(max_update, final_lr, base_lr, warmup_steps, warmup_begin_lr, warmup_mode)

    def _left(self, done: int, span: int) -> float:
        return (1 + math.cos(math.pi * done / span)) / 2


def _checked_factor(scheduler: LRScheduler, value: object) -> float:
    factor = scheduler._number("factor", value)
    if not 0 <= factor <= 1:
        raise scheduler._wrong(
            f"factor must be at least 0 and no more than 1, or the lr would grow; got {value!r}"
        )
    return factor
