"""A key of a store, and where its values go that are pulled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore_server.plan import TensorSpec
from kvstore_server.reduction import torch_dtype
from kvtrainer.comm.tickets import RemoteTable


@dataclass
class Entry:
    """What a store knows about a key."""

    spec: TensorSpec
    table: RemoteTable

    def new_arena(self) -> dict[str, Tensor]:
        """Room for its weights; not initialised."""
        return {self.spec.dtype: torch.empty(self.spec.numel, dtype=torch_dtype(self.spec.dtype))}


@dataclass
class Target:
    """Where pulled weights go: straight into the caller's tensor when it is flat memory of the right kind."""

    outs: list[Tensor]
    flat: Tensor
    is_direct: bool

    def finish(self) -> None:
        """The weights have come: bring them to the tensors that they were not written to."""
        for out in self.outs[1:] if self.is_direct else self.outs:
            out.copy_(self.flat.view(out.shape))


def target_of(spec: TensorSpec, outs: list[Tensor]) -> Target:
    """Where the weights of a key are to go that are wanted in `outs`."""
    first = outs[0].detach()
    name = str(first.dtype).removeprefix("torch.")
    is_direct = first.device.type == "cpu" and first.is_contiguous() and name == spec.dtype
    flat = first.view(-1) if is_direct else torch.empty(spec.numel, dtype=torch_dtype(spec.dtype))
    return Target([out.detach() for out in outs], flat, is_direct)
