"""Limits of a reduced gradient: how large it may be, and whether it must be finite.

The decision is a pure function of numbers that all workers have alike, so all of them decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvstore_server import check
from kvstore_server.norms import Decision, Guard, Measured
from kvtrainer.errors import ArgumentTypeError, ConfigurationError

ON_NONFINITE = ("raise", "skip", "ignore")
"""Answers to a gradient or loss that is infinite or not a number."""

_EPSILON = 1e-6
"""Added to the norm, as torch.nn.utils.clip_grad_norm_ does."""
_KEYS = {"norm": {"type", "max_norm", "norm_type", "error_if_nonfinite"}, "value": {"type", "clip_value"}}


class Verdict(NamedTuple):
    """A gradient's norm, if it was looked at, and the decision about it."""

    measured: Measured | None = None
    decision: Decision = Decision()


@dataclass(frozen=True)
class Clipping:
    """A limit of the gradient's norm over all parameters, or of every element."""

    max_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None
    error_if_nonfinite: bool = False


@dataclass(frozen=True)
class Limits:
    """All that a Trainer checks of the gradient of a step.

    Args:
        clip: None for no limit.
        on_nonfinite: one of ON_NONFINITE; None means "skip" where the gradient is measured anyway.
        has_scaler: whether losses are scaled: then a gradient that overflows skips the step.
    """

    clip: Clipping | None = None
    on_nonfinite: str | None = None
    has_scaler: bool = False

    @property
    def checks_finite(self) -> bool:
        """Whether a gradient that is not finite skips the step."""
        if self.has_scaler or self.on_nonfinite in ("raise", "skip"):
            return True
        return self.clip is not None and self.on_nonfinite is None

    @property
    def is_needed(self) -> bool:
        """Whether the gradient has to be looked at."""
        return self.clip is not None or self.checks_finite

    @property
    def norm_type(self) -> float:
        return 2.0 if self.clip is None else self.clip.norm_type

    @property
    def reports_norm(self) -> bool:
        """Whether the norm means something to the user."""
        return self.clip is not None and self.clip.max_norm is not None

    def with_scaler(self, has_scaler: bool) -> Limits:
        return self if has_scaler == self.has_scaler else replace(self, has_scaler=has_scaler)

    def guard(self) -> Guard | None:
        """Return what a store needs to hold a round until it was decided; None if nothing is checked."""
        return Guard(self.norm_type, self.decide) if self.is_needed else None

    def decide(self, measured: Measured) -> Decision:
        """Decide about a gradient.

        The coefficient is max_norm / (norm + 1e-6), at most 1, as torch's. A norm that is not a number cannot be
        limited; where such a gradient is not to be skipped, it is used as it is.
        """
        if not measured.is_finite and self.checks_finite:
            return Decision(skip=True)
        if self.clip is None:
            return Decision()
        if self.clip.max_norm is None:
            return Decision(clip_value=self.clip.clip_value)
        if not measured.is_finite:
            return Decision()
        return Decision(coef=min(1.0, self.clip.max_norm / (measured.norm + _EPSILON)))

    def summary(self) -> dict[str, Any] | None:
        """Return plain values by which workers compare their limits; None for none."""
        if not self.is_needed:
            return None
        clip = self.clip or Clipping()
        return {
            "max_norm": clip.max_norm,
            "norm_type": self.norm_type,
            "clip_value": clip.clip_value,
            "checks_finite": self.checks_finite,
        }


def make_limits(clip_grad: Any, on_nonfinite: Any) -> Limits:
    """Make the limits that a Trainer's arguments ask for.

    Raises:
        ConfigurationError: an argument is wrong, or two contradict each other.
    """
    check.one_of("on_nonfinite", on_nonfinite, (None, *ON_NONFINITE))
    clip = make_clipping(clip_grad)
    if clip is not None and clip.error_if_nonfinite:
        if on_nonfinite not in (None, "raise"):
            raise ConfigurationError(
                f"clip_grad has error_if_nonfinite=True, but on_nonfinite is {on_nonfinite!r}; leave one of the two out"
            )
        on_nonfinite = "raise"
    return Limits(clip, on_nonfinite)


def make_clipping(given: Any) -> Clipping | None:
    """Read `clip_grad`: the arguments of torch's clip_grad_norm_, or with type="value" clip_value.

    Raises:
        ArgumentTypeError: it is no dict.
        ConfigurationError: an entry is unknown, missing or impossible.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            f"clip_grad must be a dict such as dict(max_norm=35, norm_type=2), got {given!r:.80}"
        )
    kind = check.one_of("clip_grad type", given.get("type", "norm"), tuple(_KEYS))
    needed = "max_norm" if kind == "norm" else "clip_value"
    check.known(f"clip_grad of type {kind!r}", given, sorted(_KEYS[kind]))
    if needed not in given:
        raise ConfigurationError(f"clip_grad of type {kind!r} needs {needed}")
    limit = check.number(f"{needed} of clip_grad", given[needed], above=0)
    if kind == "value":
        return Clipping(clip_value=limit)
    norm_type = given.get("norm_type", 2.0)
    norm_type = math.inf if norm_type == "inf" else norm_type
    return Clipping(
        limit,
        check.number("norm_type of clip_grad", norm_type, above=0, finite=False),
        error_if_nonfinite=check.boolean(
            "error_if_nonfinite of clip_grad", given.get("error_if_nonfinite", False)
        ),
    )
