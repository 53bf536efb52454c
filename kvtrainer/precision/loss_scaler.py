"""The factor by which a loss is multiplied so that small gradients survive half precision, and how it adapts."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol

import torch

from kvtrainer.errors import AmpNotInitializedError, ConfigurationError

_log = logging.getLogger(__name__)

FIRST, LARGEST, LEAST = 2.0**16, 2.0**24, 2.0**-24
CLEAN_STEPS = 2000
"""So many steps in a row without an overflow double the scale."""


class Scaler(Protocol):
    """What a Trainer needs of a loss scaler; LossScaler says what each member means."""

    loss_scale: float

    @property
    def factor(self) -> float: ...

    @property
    def is_scaled(self) -> bool: ...

    def mark_scaled(self) -> None: ...

    def mark_unscaled(self) -> None: ...

    def mark_dropped(self) -> None: ...

    def update(self, overflow: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class LossScaler:
    """A power of two that halves at once when gradients overflow and doubles after 2000 clean steps in a row.

    MXNet's numbers, except that MXNet halves one step late and so overflows twice.

    Args:
        loss_scale: what to begin with; at most 2^24.
    """

    def __init__(self, loss_scale: float = FIRST) -> None:
        self.loss_scale = _checked_scale(loss_scale)
        """The factor of the next loss."""
        self.clean_steps = 0
        """Steps without an overflow since the scale last changed."""
        self._is_scaled = False
        self._is_unscaled = False
        self._carried = 1.0
        """The scale that the present gradients carry, which may have been replaced since."""

    @property
    def factor(self) -> float:
        """What the present gradients must be multiplied by: 1 unless they come from a loss that was scaled."""
        return 1.0 / self._carried if self._is_scaled else 1.0

    @property
    def is_scaled(self) -> bool:
        """Whether the present gradients come from a loss that was scaled; they may have been unscaled since."""
        return self._is_scaled or self._is_unscaled

    def mark_scaled(self) -> None:
        """Note that gradients of a scaled loss follow.

        Raises:
            ConfigurationError: the gradients that they would be added to were unscaled already.
        """
        if self._is_unscaled:
            raise ConfigurationError(
                "the gradients were unscaled already, and a scaled loss would be added to them; call amp.unscale after "
                "the last backward pass before the step"
            )
        self._is_scaled, self._carried = True, self.loss_scale

    def mark_unscaled(self) -> None:
        """Note that the present gradients were multiplied by `factor`."""
        self._is_unscaled = self._is_unscaled or self._is_scaled
        self._is_scaled = False

    def mark_dropped(self) -> None:
        """Note that there are no gradients any more."""
        self._is_scaled = self._is_unscaled = False

    def update(self, overflow: bool) -> None:
        """End a step: adapt the scale. `overflow`: whether a gradient was infinite or not a number, on any worker."""
        self.mark_dropped()
        if overflow:
            self.clean_steps = 0
            self.loss_scale = max(self.loss_scale / 2, LEAST)
            if self.loss_scale == LEAST:
                _log.warning(
                    "gradients overflow even with a loss scale of %g, so no step is applied; look for an infinity or a "
                    "NaN in the data or the loss",
                    LEAST,
                )
            return
        self.clean_steps += 1
        if self.clean_steps == CLEAN_STEPS:
            self.clean_steps = 0
            self.loss_scale = min(self.loss_scale * 2, LARGEST)

    def state_dict(self) -> dict[str, Any]:
        """The scale and the count of clean steps, as plain numbers."""
        return {"loss_scale": self.loss_scale, "clean_steps": self.clean_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ConfigurationError: it is something else; nothing has changed then.
        """
        if not isinstance(state, Mapping) or set(state) != {"loss_scale", "clean_steps"}:
            raise ConfigurationError(f"these are no numbers of a loss scaler: {state!r:.120}")
        count = state["clean_steps"]
        if not isinstance(count, int) or not 0 <= count < CLEAN_STEPS:
            raise ConfigurationError(f"clean_steps must be an int from 0 to {CLEAN_STEPS - 1}, got {count!r}")
        self.loss_scale, self.clean_steps = _checked_scale(state["loss_scale"]), count


def scaler_of(trainer: object) -> Scaler:
    """The loss scaler of a Trainer.

    Raises:
        AmpNotInitializedError: it has none.
    """
    scaler: Scaler | None = getattr(trainer, "loss_scaler", None)
    if scaler is None:
        raise AmpNotInitializedError(
            "the Trainer has no loss scaler; call kvtrainer.amp.init_trainer(trainer) before the training loop"
        )
    return scaler


def _checked_scale(value: object) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not LEAST <= float(value) <= LARGEST:  # type: ignore[arg-type]
        raise ConfigurationError(f"a loss scale must be a number from 2^-24 to 2^24, got {value!r}")
    return float(value)  # type: ignore[arg-type]


@torch.no_grad()
def unscale(trainer: Any) -> None:
    """Divide the Trainer's gradients by the loss scale now, so that they can be clipped; the step will not do it again.

    With several workers call `trainer.allreduce_grads()` before it.

    Raises:
        AmpNotInitializedError: the Trainer has no loss scaler.
    """
    scaler = scaler_of(trainer)
    if scaler.factor != 1.0:
        grads = [p.grad for group in trainer.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, scaler.factor)
    scaler.mark_unscaled()
