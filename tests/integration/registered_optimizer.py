"""A torch optimizer that a job brings along: registered for configurations, and for servers with `--import`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvtrainer.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
class MeanDescent(torch.optim.Optimizer):
    """`w -= lr * (mean(grad) + weight_decay * w)`, the mean being that of the whole parameter."""

    def __init__(self, params: object, lr: float = 1.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p.grad, Tensor):
                    p.sub_(p.grad.mean() + group["weight_decay"] * p, alpha=group["lr"])
        return None


@OPTIMIZERS.register_module()
class Shift(torch.optim.Optimizer):
    """`w -= a * (grad + b)`: no learning rate, and an argument, `note`, that is an attribute alone."""

    def __init__(self, params: object, a: float, b: float, note: str) -> None:
        super().__init__(params, {"a": a, "b": b})  # type: ignore[arg-type]
        self.note = note

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p.grad, Tensor):
                    p.sub_(p.grad + group["b"], alpha=group["a"])
        return None
