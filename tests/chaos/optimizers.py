"""An optimizer as a user writes it, which the servers of the jobs load with --import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import kvtrainer


@kvtrainer.optimizer.register
class Skewed(kvtrainer.optimizer.Optimizer):
    """m ← m / 2 + g; w ← w − lr · m / ‖m‖: it needs whole keys, may raise, and keeps a number beside its tensor."""

    name = "skewed"
    defaults = {"learning_rate": 0.1}  # noqa: RUF012

    def create_state(self, weight: Tensor) -> dict[str, Any]:
        return {"memory": torch.zeros_like(weight), "norm": 1.0}

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Mapping[str, Any]) -> None:
        memory = state["memory"].mul_(0.5).add_(grad)
        state["norm"] = 0.5 * state["norm"] + 0.5 * float(memory.norm())
        weight.sub_(memory, alpha=hyper["lr"] / state["norm"])
