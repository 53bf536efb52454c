"""The options of a Trainer's stages, checked before anything is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore_server.errors import did_you_mean
from kvtrainer.anomalies import checked_mode
from kvtrainer.clipping import Limits, make_limits
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.scaling import Precision, StaticLossScaler, make_precision
from kvtrainer.steps.accumulation import Accumulation

_NAMES = ("clip_grad", "amp", "accumulate", "schedules", "detect_anomalous_params", "on_nonfinite")


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
        unknown = sorted(set(options) - set(_NAMES))
        if unknown:
            raise ConfigurationError(
                f"there is no option {', '.join(map(repr, unknown))} of a stage; they are {', '.join(_NAMES)}"
                f"{did_you_mean(unknown, _NAMES)}"
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
