"""Options of the stages of a step, limits of gradients, and gradient accumulation.

`StageOptions` checks all of a Trainer's stage options, and how they fit together, before anything is built. Decisions
about a gradient (`GradientLimits.decide`) are pure functions of values that are the same on all workers, so all workers
decide the same without a message.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from kvstore_server import check
from kvstore_server.shard.norms import Decision, Guard, Measured
from kvtrainer.anomalies import checked_mode
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.options.loss_scaler import Precision, StaticLossScaler, make_precision

_log = logging.getLogger(__name__)

STAGES = ("clip_grad", "amp", "accumulate", "schedules", "detect_anomalous_params", "on_nonfinite")
ON_NONFINITE = ("raise", "skip", "ignore")
"""What to do about a gradient or loss that is infinite or NaN."""

_EPSILON = 1e-6
"""Added to the norm, as in torch.nn.utils.clip_grad_norm_."""
_KEYS = {"norm": {"type", "max_norm", "norm_type", "error_if_nonfinite"}, "value": {"type", "clip_value"}}


class GradientCheck(NamedTuple):
    measured: Measured | None = None
    decision: Decision = Decision()


@dataclass(frozen=True)
class GradientLimits:
    """Everything that a Trainer checks about the gradient of a step. None means no limit.

    `on_nonfinite` is one of ON_NONFINITE; None means "skip" if the gradient is measured anyway. With `has_scaler`,
    losses are scaled, so a gradient that overflows skips the step.
    """

    max_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None
    on_nonfinite: str | None = None
    has_scaler: bool = False

    @cached_property
    def clips(self) -> bool:
        return self.max_norm is not None or self.clip_value is not None

    @cached_property
    def checks_finite(self) -> bool:
        """Whether a non-finite gradient skips the step."""
        if self.has_scaler or self.on_nonfinite in ("raise", "skip"):
            return True
        return self.clips and self.on_nonfinite is None

    @cached_property
    def is_needed(self) -> bool:
        return self.clips or self.checks_finite

    @cached_property
    def with_scaler(self) -> GradientLimits:
        return replace(self, has_scaler=True)

    @cached_property
    def guard(self) -> Guard | None:
        """What a store needs to hold a round until its decision; None if nothing is checked."""
        return Guard(self.norm_type, self.decide) if self.is_needed else None

    def decide(self, measured: Measured) -> Decision:
        """Return whether to skip a gradient, or how to clip it.

        The coefficient is max_norm / (norm + 1e-6), at most 1, as in torch. A norm that is infinite or NaN cannot be
        limited: the gradient is skipped or, if it should not be, used unchanged.
        """
        is_usable = measured.is_finite and (self.max_norm is None or math.isfinite(measured.norm))
        if not is_usable and self.checks_finite:
            return Decision(skip=True)
        if self.clip_value is not None:
            return Decision(clip_value=self.clip_value)
        if self.max_norm is None or not is_usable:
            return Decision()
        return Decision(coef=min(1.0, self.max_norm / (measured.norm + _EPSILON)))

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """Plain values through which workers compare their limits; None if there are none."""
        if not self.is_needed:
            return None
        return {
            "max_norm": self.max_norm,
            "norm_type": self.norm_type,
            "clip_value": self.clip_value,
            "checks_finite": self.checks_finite,
        }


def make_stage_limits(clip_grad: Any, on_nonfinite: Any = None) -> GradientLimits:
    """Read `clip_grad`, with the arguments of torch's clip_grad_norm_ or (type="value") clip_grad_value_."""
    check.one_of("on_nonfinite", on_nonfinite, (None, *ON_NONFINITE))
    if clip_grad is None:
        return GradientLimits(on_nonfinite=on_nonfinite)
    # 1. The kind of limit, and its items.
    what = "clip_grad, such as dict(max_norm=35, norm_type=2),"
    clip_grad = check.mapping(what, clip_grad, error=ArgumentTypeError)
    kind = check.one_of("clip_grad type", clip_grad.get("type", "norm"), tuple(_KEYS))
    needed = "max_norm" if kind == "norm" else "clip_value"
    check.known(f"clip_grad of type {kind!r}", clip_grad, sorted(_KEYS[kind]))
    if needed not in clip_grad:
        raise ConfigurationError(f"clip_grad of type {kind!r} needs {needed}")
    limit = check.number(f"{needed} of clip_grad", clip_grad[needed], above=0)
    if kind == "value":
        return GradientLimits(clip_value=limit, on_nonfinite=on_nonfinite)
    # 2. The kind of norm; configurations without floats write "inf".
    norm_type = clip_grad.get("norm_type", 2.0)
    norm_type = math.inf if norm_type == "inf" else norm_type
    check.number("norm_type of clip_grad", norm_type, above=0, finite=False)
    # 3. torch's flag means the same as on_nonfinite="raise".
    if check.boolean("error_if_nonfinite of clip_grad", clip_grad.get("error_if_nonfinite", False)):
        if on_nonfinite not in (None, "raise"):
            raise ConfigurationError(
                f"clip_grad has error_if_nonfinite=True, but on_nonfinite is {on_nonfinite!r}; leave one of the two out"
            )
        on_nonfinite = "raise"
    return GradientLimits(limit, float(norm_type), on_nonfinite=on_nonfinite)


@dataclass(frozen=True)
class StageOptions:
    """The options of the stages of a step. The fields are arguments of the Trainer."""

    clip_grad: Mapping[str, Any] | None = None
    amp: Any = None
    accumulate: int = 1
    schedules: Sequence[Any] = ()
    detect_anomalous_params: bool | str = False
    on_nonfinite: str | None = None
    limits: GradientLimits = field(init=False)
    precision: Precision | None = field(init=False)

    def __post_init__(self) -> None:
        # Each of these raises if its option is wrong.
        limits, precision = make_stage_limits(self.clip_grad, self.on_nonfinite), make_precision(self.amp)
        Accumulation(self.accumulate)
        checked_mode(self.detect_anomalous_params)
        if not isinstance(self.schedules, Sequence) or isinstance(self.schedules, str):
            raise ArgumentTypeError(f"schedules must be a list of schedules, got {self.schedules!r:.80}")
        if precision is not None and precision.scaler is not None:
            if limits.on_nonfinite == "ignore":
                raise ConfigurationError(
                    "on_nonfinite='ignore' contradicts amp: a step whose scaled gradients overflow is always skipped"
                )
            if limits.on_nonfinite == "raise" and not isinstance(precision.scaler, StaticLossScaler):
                raise ConfigurationError(
                    "on_nonfinite='raise' contradicts a dynamic loss scale, which lets gradients overflow from time to "
                    "time; give amp a number, or leave on_nonfinite out"
                )
        object.__setattr__(self, "limits", limits)
        object.__setattr__(self, "precision", precision)

    def changed(self, options: Mapping[str, Any]) -> StageOptions:
        """Return a copy with some options changed and schedules appended. Raises as the constructor does."""
        check.known("a stage", options, STAGES)
        given = dict(options)
        given["schedules"] = [*self.schedules, *given.get("schedules", ())]
        return replace(self, **given)


class Accumulation:
    """Counts backward passes in windows of `counts`; each window ends in one update.

    The accumulated gradient is that of the mean loss. If the total is known, the last window may be shorter: its losses
    are divided by its own length, and the very last pass ends it.
    """

    def __init__(self, counts: Any = 1) -> None:
        self.counts = check.integer("accumulate", counts, 1)
        self.done = 0
        """Backward passes so far."""
        self.total: int | None = None
        """The total number of backward passes, if known."""
        self.in_window = 0
        """Backward passes since the last update."""

    def set_progress(self, done: int, total: int | None) -> None:
        """Continue after `done` of `total` backward passes. An incomplete window starts over."""
        for name, number in (("done", done), ("in all", 0 if total is None else total)):
            check.integer(f"backward passes {name}", number)
        if done < 0 or (total is not None and total < max(done, 1)):
            raise ConfigurationError(f"{done} of {total} backward passes is impossible")
        if done % self.counts:
            _log.warning(
                "resuming after %d backward passes, within a window of %d: the gradients of its first %d passes are "
                "missing",
                done,
                self.counts,
                done % self.counts,
            )
        self.done, self.total, self.in_window = done, total, 0

    @property
    def divisor(self) -> int:
        """The divisor of the next loss: the length of its window."""
        if self.total is None:
            return self.counts
        rest = self.total % self.counts
        return rest if rest and self.total - rest <= self.done < self.total else self.counts

    def count(self) -> None:
        self.done += 1
        self.in_window += 1

    @property
    def pending(self) -> int:
        """The number of backward passes in an incomplete window."""
        return 0 if self.is_boundary else self.in_window

    @property
    def is_boundary(self) -> bool:
        """Whether the window is complete."""
        return self.counts == 1 or self.done % self.counts == 0 or self.done == self.total

    def end_early(self) -> int:
        """End the window, so that the next backward pass begins one; returns how many passes it had."""
        if not self.is_boundary:
            self.done += -self.done % self.counts
        passes, self.in_window = self.in_window, 0
        return passes
