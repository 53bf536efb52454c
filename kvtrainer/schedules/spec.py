"""A schedule as it was asked for, checked, before it has an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.schedules.policies import Policy
from kvtrainer.schedules.policy_names import make_policy

_WARMUPS = ("constant", "linear", "exp")


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule before it has an optimizer; the arguments are those of ParamSchedule.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    name: str = "lr"
    policy: str | Policy = "fixed"
    by: str = "epoch"
    begin: int = 0
    end: int | None = None
    warmup: str | None = None
    warmup_iters: int = 0
    warmup_ratio: float = 0.1
    warmup_by_epoch: bool = False
    epoch_length: int | None = None
    groups: Sequence[int | str] | None = None
    passed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ArgumentTypeError(f"the name of the scheduled value must be a string, got {self.name!r}")
        if self.by not in ("step", "epoch"):
            raise ConfigurationError(f"by must be 'step' or 'epoch', got {self.by!r}")
        self.check_count("begin", self.begin, 0)
        self.check_count("passed", self.passed, 0)
        if self.end is not None:
            self.check_count("end", self.end, 0)
            if self.end <= self.begin:
                raise ConfigurationError(
                    f"end must be greater than begin, got begin={self.begin} and end={self.end}"
                )
        if self.epoch_length is not None:
            self.check_count("epoch_length", self.epoch_length, 1)
        self._check_warmup()
        if not isinstance(self.options.get("max_lr", self.options.get("maximum")), list | tuple):
            make_policy(self.policy, self.options, self.name, self.span)

    @property
    def span(self) -> int | None:
        """How many steps or epochs the policy has."""
        return None if self.end is None else self.end - self.begin

    @property
    def is_driven_by(self) -> str:
        """What advances it: with `epoch_length` steps, also where its values go by epoch."""
        return "step" if self.epoch_length is not None else self.by

    @property
    def has_own_warmup_clock(self) -> bool:
        """Whether the values go by epoch and the warm-up by step, and nothing says how long an epoch is."""
        return self.warmup is not None and self.is_driven_by == "epoch" and not self.warmup_by_epoch

    @property
    def warmup_length(self) -> int:
        """In what advances it, or in steps for a warm-up with a clock of its own."""
        per_unit = self.epoch_length if self.epoch_length is not None and self.warmup_by_epoch else 1
        return self.warmup_iters * per_unit if self.warmup is not None else 0

    @staticmethod
    def check_count(name: str, value: object, least: int) -> None:
        """Raise ConfigurationError unless `value` is an integer of at least `least`."""
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(
                f"{name} of a schedule must be an integer of at least {least}, got {value!r}"
            )

    def _check_warmup(self) -> None:
        if self.warmup is None:
            return
        if self.warmup not in _WARMUPS:
            raise ConfigurationError(
                f"warmup must be None or one of {', '.join(_WARMUPS)}, got {self.warmup!r}"
            )
        self.check_count("warmup_iters", self.warmup_iters, 1)
        if not isinstance(self.warmup_ratio, int | float) or not 0.0 < self.warmup_ratio <= 1.0:
            raise ConfigurationError(f"warmup_ratio must be above 0 and at most 1, got {self.warmup_ratio!r}")
        if self.warmup_by_epoch and self.by == "step" and self.epoch_length is None:
            raise ConfigurationError("warmup_by_epoch of a schedule by step needs epoch_length")
        if self.has_own_warmup_clock and self.begin:
            raise ConfigurationError(
                f"a warm-up by step of a schedule that begins with epoch {self.begin} needs epoch_length, the "
                "number of steps in an epoch"
            )
