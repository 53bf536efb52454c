"""Gluon's optimizers, numerically those of MXNet 2.x, as torch's fused kernels with rewritten inputs.

The order is MXNet's: rescale, clip, then weight decay; the first two have been applied to `grad` on entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.optimizer.base import Optimizer, StateValue


class SGD(Optimizer):
    """`m = momentum * m - lr * (grad + wd * w); w += m`; unlike torch's, lr is inside m.

    Options: learning_rate 0.1, momentum 0.0. State: 'momentum_buffer', the negative of MXNet's m.
    """

    name = "sgd"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.1, "momentum": 0.0}
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        lr, wd, momentum = hyper["lr"], hyper["weight_decay"], hyper["momentum"]
        if momentum == 0.0:
            _fused_sgd(weight, grad, [], lr=lr, wd=wd, momentum=0.0)
            return
        buffer = state.get("momentum_buffer")
        if not isinstance(buffer, Tensor):
            buffer = state["momentum_buffer"] = torch.zeros_like(weight)
        # With the learning rate moved into the gradient, torch's kernel keeps MXNet's momentum.
        _fused_sgd(weight, grad.mul_(lr), [buffer], lr=1.0, wd=lr * wd, momentum=momentum)


class Adam(Optimizer):
    """Adam with MXNet's epsilon, added outside the bias correction, and weight decay added to the gradient.

    `w -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)`, t per key.
    Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-8. State: 'exp_avg' m, 'exp_avg_sq' v.
    """

    name = "adam"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8}
    may_raise = False
    verified = True

    def create_state(self, weight: Tensor) -> dict[str, StateValue]:
        """Return zero averages."""
        return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        beta1, beta2 = hyper["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        assert isinstance(mean, Tensor)
        assert isinstance(square, Tensor)
        step = hyper["step"]
        torch._fused_adam_(
            [weight],
            [grad],
            [mean],
            [square],
            [],
            [torch.scalar_tensor(step, device=weight.device)],
            lr=hyper["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=hyper["weight_decay"],
            # torch divides sqrt(v) by this root before it adds eps; dividing eps too gives MXNet's formula.
            eps=hyper["eps"] / math.sqrt(1.0 - beta2**step),
            amsgrad=False,
            maximize=False,
        )


class Test(Optimizer):
    """`w -= lr * (grad + wd * w)`: MXNet's optimizer for tests, which ignores clip_gradient.

    Options: learning_rate 0.01. No state.
    """

    __test__ = False  # keeps pytest from collecting a class of this name
    clips = False
    name = "test"
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        _fused_sgd(weight, grad, [], lr=hyper["lr"], wd=hyper["weight_decay"], momentum=0.0)


def _fused_sgd(
    weight: Tensor, grad: Tensor, buffers: list[Tensor], *, lr: float, wd: float, momentum: float
) -> None:
    torch._fused_sgd_(
        [weight],
        [grad],
        buffers,
        weight_decay=wd,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
