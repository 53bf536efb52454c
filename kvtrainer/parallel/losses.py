"""The losses of several replicas, and the one backward pass through them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvtrainer.errors import BackwardTwiceError, ConfigurationError


class ReplicaLosses(list[Tensor]):
    """One loss of each replica that got data, multiplied by its share: their sum is the mean loss of the batch.

    A list, so it goes wherever a list of losses does: `trainer.backward`, `amp.scale_loss`, `GradScaler.scale`.

    Args:
        losses: scalars, each on its device.
        outputs: what the replicas' loss functions returned, unscaled.
    """

    def __init__(self, losses: Iterable[Tensor] = (), outputs: Sequence[Any] | None = None) -> None:
        super().__init__(losses)
        self.outputs: list[Any] = list(self if outputs is None else outputs)
        self._is_used = False

    def backward(self, factor: float | Tensor = 1.0) -> None:
        """Compute the gradients of all replicas, of the losses times `factor`; they add to those that there are.

        Raises:
            BackwardTwiceError: there was a backward pass of these losses; nothing has happened then.
        """
        self.mark_used()
        is_plain = not isinstance(factor, Tensor) and factor == 1.0
        scaled = [loss if is_plain else loss * _on(factor, loss.device) for loss in self]
        torch.autograd.backward(scaled)

    def mark_used(self) -> None:
        """Note that a backward pass of these losses begins. Raises BackwardTwiceError if there was one."""
        if self._is_used:
            raise BackwardTwiceError(
                "the gradients of these losses have been computed already; a second backward pass would count the "
                "batch twice. Compute new losses with forward_losses(batch)"
            )
        self._is_used = True

    @property
    def total(self) -> Tensor:
        """The sum of the scaled losses without their graphs, on the first one's device: the batch's mean loss."""
        return torch.stack([loss.detach().to(self[0].device) for loss in self]).sum()


def total_of(output: Any, replica: int) -> Tensor:
    """One scalar out of what a loss function returned: a loss, or several in a mapping or a list, which are added.

    Raises:
        ConfigurationError: it is something else.
    """
    if isinstance(output, Tensor) and output.numel() == 1:
        return output.reshape(())
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple) and output:
        totals = [total_of(one, replica) for one in output]
        return sum(totals[1:], start=totals[0])
    got = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ConfigurationError(
        f"the loss of replica {replica} must be a scalar tensor, or a dict or list of them; got {got}. Pass loss_fn, a "
        "function of the replica and its part of the batch"
    )


def _on(factor: float | Tensor, device: torch.device) -> float | Tensor:
    return factor.to(device) if isinstance(factor, Tensor) else factor
