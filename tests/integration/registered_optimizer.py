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


@OPTIMIZERS.register_module()
class InEighths(torch.optim.Optimizer):
    """SGD with a momentum in eighths; its scale, and what else it keeps, lies in trees."""

    def __init__(self, params: object, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p.grad, Tensor):
                    p.sub_(self._direction(p, p.grad), alpha=group["lr"])
        return None

    def _direction(self, p: Tensor, grad: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state.update(
                quant={"code": torch.zeros_like(p), "absmax": [torch.ones(1)]}, mode="fast", seen=(b"", 0)
            )
        if (state["mode"], type(state["seen"])) != ("fast", tuple):
            raise ValueError(f"this is no state of mine: {state}")
        code, scale = state["quant"]["code"], state["quant"]["absmax"][0]
        value = code / 8 * scale * 0.5 + grad
        scale.copy_(value.abs().max())
        code.copy_((value / scale * 8).round())
        state["seen"] = (b"\xff", state["seen"][1] + 1)
        return value
