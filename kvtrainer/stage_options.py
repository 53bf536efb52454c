"""The options of the stages of a step, checked before anything is made, and the count of accumulated passes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore_server import check
from kvstore_server.errors import did_you_mean
from kvtrainer.anomalies import checked_mode
from kvtrainer.clipping import Limits, make_limits
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.scaling import Precision, StaticLossScaler, make_precision

_log = logging.getLogger(__name__)

STAGES = ("clip_grad", "amp", "accumulate", "schedules", "detect_anomalous_params", "on_nonfinite")


@dataclass(frozen=True)
class StageOptions:
    """What the stages of a step do beside the plain one; the arguments are those of the Trainer.

    Raises:
        ConfigurationError: an argument is wrong, or two contradict each other.
    """

    clip_grad: Mapping[str, Any] | None = None
    amp: Any = None
    accumulate: int = 1
    schedules: Sequence[Any] = ()
    detect_anomalous_params: bool | str = False
    on_nonfinite: str | None = None
    limits: Limits = field(init=False)
    precision: Precision | None = field(init=False)

    def __post_init__(self) -> None:
        limits, precision = make_limits(self.clip_grad, self.on_nonfinite), make_precision(self.amp)
        Accumulation(self.accumulate)
        checked_mode(self.detect_anomalous_params)
        if not isinstance(self.schedules, Sequence) or isinstance(self.schedules, str):
            raise ArgumentTypeError(f"schedules must be a list of schedules, got {self.schedules!r:.80}")
        if precision is not None and precision.scaler is not None:
            _check_scaling(limits, precision)
        object.__setattr__(self, "limits", limits)
        object.__setattr__(self, "precision", precision)

    def changed(self, options: Mapping[str, Any]) -> StageOptions:
        """The same with some options changed; schedules are added. Raises ConfigurationError as the constructor."""
        unknown = sorted(set(options) - set(STAGES))
        if unknown:
            raise ConfigurationError(
                f"there is no option {', '.join(map(repr, unknown))} of a stage; they are {', '.join(STAGES)}"
                f"{did_you_mean(unknown, STAGES)}"
            )
        given = dict(options)
        given["schedules"] = [*self.schedules, *given.get("schedules", ())]
        return replace(self, **given)


def _check_scaling(limits: Limits, precision: Precision) -> None:
    if limits.on_nonfinite == "ignore":
        raise ConfigurationError(
            "on_nonfinite='ignore' contradicts amp: a step whose scaled gradients overflow is always skipped"
        )
    if limits.on_nonfinite == "raise" and not isinstance(precision.scaler, StaticLossScaler):
        raise ConfigurationError(
            "on_nonfinite='raise' contradicts a dynamic loss scale, which is found by letting gradients overflow now "
            "and then; give amp a number, or leave on_nonfinite out"
        )


class Accumulation:
    """Counts backward passes in windows of `counts`, each of which ends in one update.

    The sum of a window's gradients is that of the mean loss. With the total known, the last window may be shorter: its
    losses are divided by how many there are, and the last pass of all ends it.

    Args:
        counts: backward passes per update.

    Raises:
        ConfigurationError: it is not an int of at least 1.
    """

    def __init__(self, counts: Any = 1) -> None:
        self.counts = check.integer("accumulate", counts, 1)
        self.done = 0
        """Backward passes so far."""
        self.total: int | None = None
        """How many there will be in all, if that is known."""
        self._in_window = 0

    def set_progress(self, done: int, total: int | None) -> None:
        """Go on after `done` backward passes of `total`; a window that was begun then begins anew.

        Raises:
            ConfigurationError: the numbers are impossible.
        """
        for name, number in (("done", done), ("in all", 0 if total is None else total)):
            check.integer(f"backward passes {name}", number)
        if done < 0 or (total is not None and total < max(done, 1)):
            raise ConfigurationError(f"{done} backward passes of {total} cannot have been made")
        if done % self.counts:
            _log.warning(
                "going on after %d backward passes, which is within a window of %d: the gradients of the first %d are "
                "not there",
                done,
                self.counts,
                done % self.counts,
            )
        self.done, self.total, self._in_window = done, total, 0

    @property
    def divisor(self) -> int:
        """What the loss of the next backward pass is divided by: the length of its window."""
        if self.total is None:
            return self.counts
        rest = self.total % self.counts
        return rest if rest and self.total - rest <= self.done < self.total else self.counts

    def count(self) -> None:
        """Note a backward pass."""
        self.done += 1
        self._in_window += 1

    @property
    def has_begun(self) -> bool:
        """Whether there was a backward pass since the last update."""
        return self._in_window > 0

    @property
    def pending(self) -> int:
        """Backward passes of a window that is not full."""
        return 0 if self.is_boundary else self._in_window

    @property
    def is_boundary(self) -> bool:
        """Whether the window is full."""
        return self.counts == 1 or self.done % self.counts == 0 or self.done == self.total

    def end(self) -> None:
        """Note an update."""
        self._in_window = 0

    def end_early(self) -> int:
        """Let the next backward pass begin a window; returns how many there were in the one that was begun."""
        if not self.is_boundary:
            self.done += -self.done % self.counts
        passes, self._in_window = self._in_window, 0
        return passes
