"""Combine the values that several devices report for one step: sum losses, average metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvtrainer.errors import ConfigurationError


def sum_losses(by_device: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sum each loss over devices, where every device has divided its own by their number.

    Args:
        by_device: For each device the same names, with numbers or one-element tensors, for whose values this waits.

    Raises:
        ConfigurationError: There is no device, or devices report different names.
    """
    return {name: float(sum(values)) for name, values in _metric_values_by_name(by_device).items()}


def mean_metrics(by_device: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Average each metric over devices. Arguments and errors are those of `sum_losses`."""
    return {
        name: float(sum(values)) / len(values) for name, values in _metric_values_by_name(by_device).items()
    }


def total_loss(losses: Mapping[str, Any] | Sequence[Any], device: torch.device | str | None = None) -> Tensor:
    """Sum losses by name or by device into a scalar to call `backward` on; by default on the first loss's device.

    Raises:
        ConfigurationError: There is no loss, or one is not a tensor.
    """
    parts = list(losses.values()) if isinstance(losses, Mapping) else list(losses)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if not tensors or len(tensors) < len(parts):
        raise ConfigurationError(f"a total loss needs tensors, got {parts!r:.120}")
    place = tensors[0].device if device is None else torch.device(device)
    moved = [tensor.to(place) for tensor in tensors]
    return torch.stack([one.sum() if one.dim() else one for one in moved]).sum()


def _metric_values_by_name(by_device: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    if not by_device:
        raise ConfigurationError("there is no device whose values could be combined; pass at least one")
    first = by_device[0]
    for at, values in enumerate(by_device):
        if set(values) != set(first):
            raise ConfigurationError(
                f"device {at} reports {', '.join(sorted(values))}, but the first one {', '.join(sorted(first))}"
            )
    return {name: [float(values[name]) for values in by_device] for name in first}
