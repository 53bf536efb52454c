"""An optimizer that a job brings along, with `--import`: it needs whole keys, and can raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer, register
from kvstore_server.optimizer.base import StateValue


@register
class RaisesOnHugeMeans(Optimizer):
    """`m = m / 2 + mean(grad); w -= m`; raises, after it has changed both, where the mean exceeds 100."""

    name = "raises_on_huge_means"
    elementwise = False

    def create_state(self, weight: Tensor) -> dict[str, StateValue]:
        return {"m": torch.zeros_like(weight)}

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        memory, mean = state["m"], grad.mean()
        assert isinstance(memory, Tensor)
        weight.sub_(memory.mul_(0.5).add_(mean))
        if mean > 100:
            raise ValueError(f"the mean of {hyper['key']} is {mean:g}")
