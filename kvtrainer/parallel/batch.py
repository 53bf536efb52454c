"""Split a batch over the devices of one process, and combine the losses of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtrainer.errors import BackwardTwiceError, ConfigurationError


class PerReplica(list[Any]):
    """Parts of a batch, one per replica and on its device; None where a replica gets none.

    A loop may also create one itself, if it already has a part for each replica.

    Attributes:
        shares: The fraction of the batch in each part; None if unknown.
    """

    shares: list[float] | None = None


def scatter_batch(batch: Any, devices: Sequence[torch.device], axis: int = 0) -> PerReplica:
    """Split the tensors of a batch along an axis and move each part to its device.

    The batch may be a tensor or NumPy array, or tuples, lists and mappings of them, nested to any depth. Anything else,
    and 0-d tensors, go to every device unchanged. The lengths of parts differ by at most one, longer ones first.
    Gradients flow back through the parts. Mappings become dicts. If there are fewer entries than devices, the last
    devices get None.

    Raises:
        ConfigurationError: Tensors differ in length along the axis, or have no entries.
    """
    sizes = dict(_batch_lengths_along(batch, axis, "the batch"))
    if len(set(sizes.values())) > 1:
        lengths = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise ConfigurationError(
            f"the tensors of a batch differ in length along axis {axis}: {lengths}; remove what all replicas share "
            "from the batch, or pass a PerReplica"
        )
    if not sizes:
        return PerReplica(move_batch_to_device(batch, device) for device in devices)
    [total] = set(sizes.values())
    if total == 0:
        raise ConfigurationError(f"the batch has no entry along axis {axis}")
    counts = [total // len(devices) + (at < total % len(devices)) for at in range(len(devices))]

    def part(one: Tensor, at: int) -> Tensor:
        return _copy_batch_tensor(one.tensor_split(len(devices), axis)[at] if one.dim() else one, devices[at])

    parts = PerReplica(
        _map_batch_tensors(batch, partial(part, at=at)) if n else None for at, n in enumerate(counts)
    )
    parts.shares = [count / total for count in counts]
    return parts


def move_batch_to_device(batch: Any, device: torch.device) -> Any:
    return _map_batch_tensors(batch, partial(_copy_batch_tensor, device=device))


def _copy_batch_tensor(one: Tensor, device: torch.device) -> Tensor:
    # Only copies from pinned memory are asynchronous; elsewhere non_blocking is unsafe or useless.
    return one.to(device, non_blocking=one.device.type == "cpu" and device.type == "cuda" and one.is_pinned())


def _batch_lengths_along(batch: Any, axis: int, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim:
            if not -batch.ndim <= axis < batch.ndim:
                raise ConfigurationError(f"{path} has shape {list(batch.shape)} and no axis {axis}")
            yield path, int(batch.shape[axis])
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _batch_lengths_along(value, axis, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for at, value in enumerate(batch):
            yield from _batch_lengths_along(value, axis, f"{path}[{at}]")


def _map_batch_tensors(batch: Any, call: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return call(batch)
    if isinstance(batch, np.ndarray):
        return call(torch.from_numpy(batch))
    if isinstance(batch, Mapping):
        return {key: _map_batch_tensors(value, call) for key, value in batch.items()}
    # A named tuple takes its fields as separate arguments.
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_batch_tensors(value, call) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map_batch_tensors(value, call) for value in batch)
    return batch


class ReplicaLosses(list[Tensor]):
    """The loss of each replica that got data, times its share: their sum is the mean loss of the batch.

    It is a list, so it can be used wherever a list of losses can: `trainer.backward`, `amp.scale_loss`,
    `GradScaler.scale`.

    Args:
        losses: Scalars, each on its device.
        outputs: What the replicas' loss functions returned, unscaled.
    """

    def __init__(self, losses: Iterable[Tensor] = (), outputs: Sequence[Any] | None = None) -> None:
        super().__init__(losses)
        self.outputs: list[Any] = list(self if outputs is None else outputs)
        self._is_used = False

    def backward(self, factor: float | Tensor = 1.0) -> None:
        """Compute the gradients of all replicas, for the losses times `factor`, and add them to the present ones.

        Raises:
            BackwardTwiceError: These losses already had a backward pass; nothing has happened then.
        """
        self.mark_used()
        factors = [factor.to(loss.device) if isinstance(factor, Tensor) else factor for loss in self]
        is_plain = not isinstance(factor, Tensor) and factor == 1.0
        torch.autograd.backward(
            [loss if is_plain else loss * by for loss, by in zip(self, factors, strict=True)]
        )

    def mark_used(self) -> None:
        """Record that the backward pass begins. Raises BackwardTwiceError if there was one."""
        if self._is_used:
            raise BackwardTwiceError(
                "these gradients were already computed; call forward_losses(batch) again"
            )
        self._is_used = True

    @property
    def total(self) -> Tensor:
        """The mean loss of the batch: the detached sum of the scaled losses, on the first one's device."""
        return torch.stack([loss.detach().to(self[0].device) for loss in self]).sum()


def total_loss_of_batch(output: Any, replica: int) -> Tensor:
    """Return the scalar loss in a loss function's result: a loss, or a mapping or list of losses to add."""
    if isinstance(output, Tensor) and output.numel() == 1:
        return output.reshape(())
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple) and output:
        totals = [total_loss_of_batch(one, replica) for one in output]
        return sum(totals[1:], start=totals[0])
    got = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ConfigurationError(
        f"the loss of replica {replica} must be a scalar, or scalars in a dict or list; got {got}. Pass a loss_fn"
    )
