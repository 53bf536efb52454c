"""A batch, split over the devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtrainer.errors import ConfigurationError


class PerReplica(list[Any]):
    """Parts of a batch on the devices of the replicas, one for each; None where a replica gets nothing.

    Also what a loop makes itself when it has a part for each replica already.

    Attributes:
        shares: what part of the whole each is; None where that is not known.
    """

    shares: list[float] | None = None


def scatter(batch: Any, devices: Sequence[torch.device], axis: int = 0) -> PerReplica:
    """Split the tensors in a batch along an axis and move each part to its device.

    The batch may be a tensor or numpy array, or tuples, lists and mappings of them, nested as one likes. Anything else,
    and tensors without axes, go to every device as they are. Parts differ in length by one at most, the first ones are
    the longer ones, and gradients flow back through them; mappings become dicts. With fewer entries than devices the
    last devices get None.

    Raises:
        ConfigurationError: tensors differ in length along the axis, or have no entry.
    """
    sizes = dict(_sizes(batch, axis, "the batch"))
    if len(set(sizes.values())) > 1:
        raise ConfigurationError(
            f"the tensors of a batch differ in length along axis {axis}: "
            f"{', '.join(f'{path} has {size}' for path, size in sizes.items())}; leave what all replicas share out of "
            "the batch, or give a PerReplica with one part for each"
        )
    if not sizes:
        return PerReplica(to_device(batch, device) for device in devices)
    [total] = set(sizes.values())
    if total == 0:
        raise ConfigurationError(f"the batch has no entry along axis {axis}")
    lengths = [total // len(devices) + (at < total % len(devices)) for at in range(len(devices))]
    rows = zip(devices, lengths, accumulate(lengths), strict=True)
    parts = PerReplica(
        _mapped(batch, partial(_part, axis=axis, begin=end - length, length=length, device=device))
        if length
        else None
        for device, length, end in rows
    )
    parts.shares = [length / total for length in lengths]
    return parts


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with all its tensors on one device."""
    return _mapped(batch, partial(_to, device=device))


def _part(one: Tensor, axis: int, begin: int, length: int, device: torch.device) -> Tensor:
    return _to(one.narrow(axis, begin, length) if one.dim() else one, device)


def _to(one: Tensor, device: torch.device) -> Tensor:
    return one.to(device, non_blocking=one.device.type == "cpu" and device.type == "cuda" and one.is_pinned())


def _sizes(batch: Any, axis: int, path: str) -> Iterator[tuple[str, int]]:
    """What each tensor is called and how long it is."""
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim:
            if not -batch.ndim <= axis < batch.ndim:
                raise ConfigurationError(f"{path} has shape {list(batch.shape)} and no axis {axis}")
            yield path, int(batch.shape[axis])
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _sizes(value, axis, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for at, value in enumerate(batch):
            yield from _sizes(value, axis, f"{path}[{at}]")


def _mapped(batch: Any, call: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with `call` of every tensor in it."""
    if isinstance(batch, Tensor):
        return call(batch)
    if isinstance(batch, np.ndarray):
        return call(torch.from_numpy(batch))
    if isinstance(batch, Mapping):
        return {key: _mapped(value, call) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, call) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(value, call) for value in batch)
    return batch
