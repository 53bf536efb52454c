"""What Gluon's optimizers are made of: torch's fused kernels on one flat vector, and state made when first needed."""

from __future__ import annotations

import math
import platform

import torch
from torch import Tensor

from kvstore_server.optimizer.base import StateValue


def capability() -> str:
    """Name the instruction set of these kernels, as `x86_64/AVX2`; results have the same bits only on equal ones."""
    return f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}"


def state_tensor(state: dict[str, StateValue], name: str, weight: Tensor) -> Tensor:
    """The entry `name` of the state; zeros like `weight` where it has none yet."""
    value = state.get(name)
    if not isinstance(value, Tensor):
        value = state[name] = torch.zeros_like(weight)
    return value


def fused_sgd(weight: Tensor, grad: Tensor, *, lr: float, wd: float) -> None:
    """`w -= lr * (grad + wd * w)`."""
    _sgd(weight, grad, [], lr=lr, wd=wd, momentum=0.0, nesterov=False)


def fused_momentum(
    weight: Tensor, grad: Tensor, buffer: Tensor, *, lr: float, wd: float, momentum: float, nesterov: bool
) -> None:
    """With g = lr * (grad + wd * w): `b = momentum * b + g`, then `w -= b`, or Nesterov's `w -= momentum * b + g`.

    The learning rate is inside the buffer, as in MXNet; in torch's kernel it is outside, so it goes into the gradient
    and into the weight decay. `grad` is overwritten.
    """
    _sgd(weight, grad.mul_(lr), [buffer], lr=1.0, wd=lr * wd, momentum=momentum, nesterov=nesterov)


def fused_adam(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    wd: float,
    step: float,
    decoupled: bool = False,
) -> None:
    """torch's Adam, or with `decoupled` its AdamW; `step` counts from 1, and math.inf corrects no bias."""
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        [weight],
        [grad],
        [mean],
        [square],
        [],
        [torch.scalar_tensor(step, device=weight.device)],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=wd,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def fused_scaled(
    weight: Tensor,
    grad: Tensor,
    square: Tensor,
    *,
    lr: float,
    beta: float,
    eps: float,
    wd: float,
    step: float,
) -> None:
    """With g = grad + wd * w: `v = beta * v + (1 - beta) * g**2; w -= lr * g / (sqrt(v / (1 - beta**step)) + eps)`.

    Adam whose average of gradients forgets at once. A `step` of math.inf corrects no bias.
    """
    mean = torch.zeros_like(weight)
    fused_adam(weight, grad, mean, square, lr=lr, betas=(0.0, beta), eps=eps, wd=wd, step=step)


def bias_corrections(betas: tuple[float, float], step: float) -> tuple[float, float]:
    """`1 - beta1**step` and `sqrt(1 - beta2**step)`, by which Adam's averages must be divided."""
    return 1.0 - betas[0] ** step, math.sqrt(1.0 - betas[1] ** step)


def _sgd(
    weight: Tensor,
    grad: Tensor,
    buffers: list[Tensor],
    *,
    lr: float,
    wd: float,
    momentum: float,
    nesterov: bool,
) -> None:
    torch._fused_sgd_(
        [weight],
        [grad],
        buffers,
        weight_decay=wd,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
    )
