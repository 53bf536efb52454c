"""Half-precision weights and the float32 copy, the master, that `multi_precision` keeps of them."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def is_half(weight: Tensor) -> bool:
    """Whether an update of `weight` is computed in float32 and rounded afterwards."""
    return weight.dtype in _HALF


def follow(master: Tensor, weight: Tensor) -> Tensor:
    """Return `master`, changed in place where the weights are not its rounding: they were replaced, and win."""
    replaced = master.to(weight.dtype) != weight
    if replaced.any():
        master.copy_(torch.where(replaced, weight.to(master.dtype), master))
    return master
