"""Values of an epoch, and their averages weighted by how many samples each stands for."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from kvtrainer.errors import ConfigurationError


class LogBuffer:
    """A history of named values, as MMCV's runners keep it: `update` adds, `average` fills `output`.

    Args:
        window: how many values of each name are kept; all, until `clear`, if it is None.

        buffer.update({"loss": loss.item(), "grad_norm": result.grad_norm}, num_samples)
        buffer.average(10)
        buffer.output["loss"]
    """

    def __init__(self, window: int | None = None) -> None:
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ConfigurationError(f"window must be an int of at least 1, got {window!r}")
        self._window = window
        self.val_history: dict[str, deque[float]] = {}
        self.n_history: dict[str, deque[float]] = {}
        self.output: dict[str, float] = {}
        """What `average` or `median` has computed, and what the script puts there."""
        self.ready = False
        """Whether `output` has been filled since it was cleared."""

    def update(self, values: Mapping[str, Any], num_samples: float = 1) -> None:
        """Add a value of each name.

        Args:
            values: numbers, or tensors of one element, which are waited for.
            num_samples: how many samples they stand for; at least 0.

        Raises:
            ConfigurationError: an argument is wrong; nothing has been added then.
        """
        if not isinstance(values, Mapping):
            raise ConfigurationError(f"a LogBuffer takes a dict of values by name, got {values!r:.80}")
        if isinstance(num_samples, bool) or not isinstance(num_samples, Real) or not num_samples >= 0:
            raise ConfigurationError(f"num_samples must be a number from 0 on, got {num_samples!r}")
        numbers = {name: _number(name, value) for name, value in values.items()}
        for name, number in numbers.items():
            self.val_history.setdefault(name, deque(maxlen=self._window)).append(number)
            self.n_history.setdefault(name, deque(maxlen=self._window)).append(float(num_samples))

    def average(self, n: int = 0) -> None:
        """Put the weighted mean of the latest `n` values of each name, or of all for 0, into `output`.

        It is not a number where their weights sum to 0.
        """
        for name, values in self._latest(n).items():
            weights = list(self.n_history[name])[-n:]
            total = math.fsum(weights)
            weighted = [v * w for v, w in zip(values, weights, strict=True) if w]
            # Not fsum, which raises for infinities of both signs.
            self.output[name] = sum(weighted) / total if total else math.nan
        self.ready = True

    def median(self, n: int = 0) -> None:
        """Put the median of the latest `n` values of each name, or of all for 0, into `output`, unweighted.

        It is not a number if one of them is not.
        """
        for name, values in self._latest(n).items():
            self.output[name] = math.nan if any(map(math.isnan, values)) else statistics.median(values)
        self.ready = True

    def clear(self) -> None:
        """Forget everything."""
        self.val_history.clear()
        self.n_history.clear()
        self.clear_output()

    def clear_output(self) -> None:
        """Forget what was computed, not the values."""
        self.output.clear()
        self.ready = False

    def _latest(self, n: int) -> dict[str, list[float]]:
        if isinstance(n, bool) or not isinstance(n, Integral) or n < 0:
            raise ConfigurationError(f"n must be an int from 0 on, got {n!r}")
        return {name: list(values)[-int(n) :] for name, values in self.val_history.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach().item()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name!r} must be a number to be averaged, got {value!r:.80}") from None
