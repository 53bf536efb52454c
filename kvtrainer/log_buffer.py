"""A history of named values within an epoch, and averages weighted by the number of samples."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvstore_server import check
from kvtrainer.errors import ConfigurationError


class LogBuffer:
    """A history of named values with the interface of MMCV's: `update` adds values, `average` fills `output`.

    Args:
        window: How many values of each name are kept; None keeps all until `clear`.

        buffer.update({"loss": loss.item(), "grad_norm": result.grad_norm}, num_samples)
        buffer.average(10)
        buffer.output["loss"]
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = None if window is None else check.integer("window", window, 1)
        self.val_history: dict[str, deque[float]] = {}
        self.n_history: dict[str, deque[float]] = {}
        self.output: dict[str, float] = {}
        """The results of `average` or `median`, and anything the script adds."""
        self.ready = False
        """Whether `output` was filled since it was last cleared."""

    def update(self, values: Mapping[str, Any], num_samples: float = 1) -> None:
        """Add a value for each name.

        Args:
            values: Numbers, or one-element tensors, for whose values this waits.
            num_samples: The weight of these values: how many samples they come from. At least 0.

        Raises:
            ConfigurationError: An argument is wrong; nothing was added then.
        """
        values = check.mapping("the values of a LogBuffer, by name,", values)
        weight = check.number("num_samples", num_samples, 0, finite=False)
        numbers = {name: _as_logged_number(name, value) for name, value in values.items()}
        for name, number in numbers.items():
            self.val_history.setdefault(name, deque(maxlen=self._window)).append(number)
            self.n_history.setdefault(name, deque(maxlen=self._window)).append(weight)

    def average(self, n: int = 0) -> None:
        """Store the weighted mean of the last `n` values per name in `output`; 0 means all. NaN without weight."""
        for name, values in self._latest(n).items():
            weights = list(self.n_history[name])[-n:]
            total = math.fsum(weights)
            weighted = [v * w for v, w in zip(values, weights, strict=True) if w]
            # Not fsum, which raises for infinities of both signs.
            self.output[name] = sum(weighted) / total if total else math.nan
        self.ready = True

    def median(self, n: int = 0) -> None:
        """Store the unweighted median of the last `n` values per name in `output`; 0 means all. NaN if any is."""
        for name, values in self._latest(n).items():
            self.output[name] = math.nan if any(map(math.isnan, values)) else statistics.median(values)
        self.ready = True

    def clear(self) -> None:
        """Remove all values and results."""
        self.val_history.clear()
        self.n_history.clear()
        self.clear_output()

    def clear_output(self) -> None:
        """Remove the results, but keep the values."""
        self.output.clear()
        self.ready = False

    def _latest(self, n: int) -> dict[str, list[float]]:
        latest = check.integer("n", n, 0)
        return {name: list(values)[-latest:] for name, values in self.val_history.items()}


def _as_logged_number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach().item()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name!r} must be a number to be averaged, got {value!r:.80}") from None
