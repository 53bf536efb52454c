"""Compression of the replicas of a value before they are summed in one process, with error feedback for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.reduction import compute_dtype


class ReplicaCompressor:
    """Codec and residuals: one residual for every key and every position in its list of replicas.

    Args:
        codec: How replicas are compressed; residuals start at zero.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._residuals: dict[str, list[Tensor | None]] = {}
        self._next: dict[str, list[Tensor | None]] = {}

    def merge(self, key: str, replicas: Sequence[Tensor | None]) -> Tensor:
        """The flat sum, from left to right on the CPU, of what the compressed replicas say.

        Half precision accumulates in float32. Residuals stay as they are until `accept`. None stands for a replica
        that is left out, as is its residual; one at least is there.

        Raises:
            NonFiniteGradientError: a replica is infinite or not a number; nothing has changed.
        """
        first = next(replica for replica in replicas if replica is not None)
        dtype = str(first.dtype).removeprefix("torch.")
        kept = self._residuals.get(key, [])
        total = torch.empty(first.numel(), dtype=compute_dtype(dtype))
        said = torch.empty(self._codec.encoded_nbytes(first.numel(), dtype), dtype=torch.uint8)
        following: list[Tensor | None] = []
        is_first = True
        for at, replica in enumerate(replicas):
            if replica is None:
                following.append(kept[at] if at < len(kept) else None)
                continue
            grad = replica.detach().to("cpu").reshape(-1)
            residual, after = self._residual(kept[at] if at < len(kept) else None, grad, dtype)
            self._codec.encode(grad, residual, said, after)
            add = self._codec.decode if is_first else self._codec.decode_add
            add(said, dtype, total)
            is_first = False
            following.append(after)
        self._next[key] = following + kept[len(following) :]
        return total.to(first.dtype)

    def accept(self, keys: Iterable[str]) -> None:
        """The rounds of these keys were applied: what they did not say is left for the next ones."""
        for key in keys:
            if key in self._next:  # not where the replicas were sparse
                self._residuals[key] = self._next.pop(key)

    def accept_all(self) -> None:
        """The round of all that was merged since the last call was applied."""
        self.accept(list(self._next))

    def forget(self) -> None:
        """What was merged since the last `accept` did not count."""
        self._next.clear()

    def residuals(self) -> dict[str, list[Tensor | None]]:
        """What is held back of each replica, by key, flat; copies."""
        return {
            key: [None if one is None else one.clone() for one in kept]
            for key, kept in self._residuals.items()
        }

    def set_residuals(self, residuals: Mapping[str, Sequence[Tensor | None]]) -> None:
        """Replace all that is held back; in the form of `residuals`."""
        self._residuals = {
            key: [None if one is None else one.detach().reshape(-1).clone() for one in kept]
            for key, kept in residuals.items()
        }

    def _residual(self, kept: Tensor | None, grad: Tensor, dtype: str) -> tuple[Tensor | None, Tensor | None]:
        """What earlier rounds left of a replica, and room for what this one leaves; None where nothing is lost."""
        kind = self._codec.residual_dtype(dtype)
        if kind is None:
            return None, None
        residual = torch.zeros(grad.numel(), dtype=kind) if kept is None else kept
        return residual, torch.empty_like(residual)
