"""Values of an epoch, and their averages, weighted by how many samples each is of."""

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
    """A history of named values, as MMCV's runners keep it: `update` adds, `average` fills `output`.

    Args:
        window: how many values of each name are kept; all, until `clear`, if it is None.

        buffer.update({"loss": loss.item(), "grad_norm": result.grad_norm}, num_samples)
        buffer.average(10)
        buffer.output["loss"]
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = None if window is None else check.integer("window", window, 1)
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
        values = check.mapping("the values of a LogBuffer, by name,", values)
        weight = check.number("num_samples", num_samples, 0, finite=False)
        numbers = {name: _number(name, value) for name, value in values.items()}
        for name, number in numbers.items():
            self.val_history.setdefault(name, deque(maxlen=self._window)).append(number)
            self.n_history.setdefault(name, deque(maxlen=self._window)).append(weight)

    def average(self, n: int = 0) -> None:
        """Put the weighted mean of each name's latest `n` values into `output`; 0 means all.

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
        """Put the unweighted median of each name's latest `n` values into `output`. 0 means all.

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
        latest = check.integer("n", n, 0)
        return {name: list(values)[-latest:] for name, values in self.val_history.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach().item()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name!r} must be a number to be averaged, got {value!r:.80}") from None
