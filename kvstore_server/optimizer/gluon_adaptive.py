"""Gluon's optimizers that scale each element by its past gradients, numerically those of MXNet 2.x.

In the formulas g = grad + wd * w, and grad has been rescaled and clipped on entry: MXNet's order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.optimizer.base import Optimizer, StateValue
from kvstore_server.optimizer.kernels import fused_scaled, state_tensor


class AdaDelta(Optimizer):
    """`a = rho * a + (1 - rho) * g**2; d = g * sqrt(b + epsilon) / sqrt(a + epsilon);
    b = rho * b + (1 - rho) * d**2; w -= lr * d`.

    Options: learning_rate 1.0, rho 0.9, epsilon 1e-6. State: 'square_avg' a, 'acc_delta' b.
    """

    name = "adadelta"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1.0, "rho": 0.9, "eps": 1e-6}
    fractions = frozenset({"rho"})
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        square, moved = state_tensor(state, "square_avg", weight), state_tensor(state, "acc_delta", weight)
        rho, eps = hyper["rho"], hyper["eps"]
        grad.add_(weight, alpha=hyper["weight_decay"])
        square.mul_(rho).addcmul_(grad, grad, value=1.0 - rho)
        delta = (moved + eps).sqrt_().div_((square + eps).sqrt_()).mul_(grad)
        moved.mul_(rho).addcmul_(delta, delta, value=1.0 - rho)
        weight.sub_(delta, alpha=hyper["lr"])


class AdaGrad(Optimizer):
    """`h += g**2; w -= lr * g / (sqrt(h) + epsilon)`. A row-sparse gradient updates only its rows while wd is 0.

    Options: learning_rate 0.01, epsilon 1e-6. State: 'sum' h.
    """

    name = "adagrad"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.01, "eps": 1e-6}
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        torch._fused_adagrad_(
            [weight],
            [grad],
            [state_tensor(state, "sum", weight)],
            [torch.scalar_tensor(1.0, device=weight.device)],
            lr=hyper["lr"],
            lr_decay=0.0,
            weight_decay=hyper["weight_decay"],
            eps=hyper["eps"],
            maximize=False,
        )

    def updates_rows(self, hyper: Mapping[str, Any]) -> bool:
        """Whether there is no weight decay; see `Optimizer.updates_rows`."""
        return bool(hyper["weight_decay"] == 0.0)


class RMSProp(Optimizer):
    """`v = rho * v + (1 - rho) * g**2; w -= lr * g / (sqrt(v) + epsilon)`.

    Centered: besides `n = rho * n + (1 - rho) * g; d = momentum * d - lr * g / sqrt(v - n**2 + epsilon); w += d`,
    where v - n**2, which only rounding makes negative, counts as 0 then. Last, `clip_weights` bounds the weights.

    Options: learning_rate 0.001, rho 0.9, momentum 0.9 (if centered), epsilon 1e-8, centered False, clip_weights
    None. State: 'square_avg' v, 'grad_avg' n, 'momentum_buffer' -d.
    """

    name = "rmsprop"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.001,
        "rho": 0.9,
        "momentum": 0.9,
        "eps": 1e-8,
        "centered": False,
        "clip_weights": None,
    }
    fractions = frozenset({"rho"})
    never_negative = frozenset({"clip_weights"})
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        square, rho, bound = state_tensor(state, "square_avg", weight), hyper["rho"], hyper["clip_weights"]
        lr, eps, wd = hyper["lr"], hyper["eps"], hyper["weight_decay"]
        if hyper["centered"]:
            mean, buffer = (state_tensor(state, name, weight) for name in ("grad_avg", "momentum_buffer"))
            grad.add_(weight, alpha=wd)
            mean.lerp_(grad, 1.0 - rho)
            square.mul_(rho).addcmul_(grad, grad, value=1.0 - rho)
            spread = square.addcmul(mean, mean, value=-1.0).clamp_min_(0.0).add_(eps).sqrt_()
            weight.sub_(buffer.mul_(hyper["momentum"]).addcdiv_(grad, spread, value=lr))
        else:
            fused_scaled(weight, grad, square, lr=lr, beta=rho, eps=eps, wd=wd, step=math.inf)
        if bound is not None:
            weight.clamp_(-bound, bound)


class Ftrl(Optimizer):
    """`z += grad - (sqrt(n + grad**2) - sqrt(n)) / lr * w; n += grad**2;
    w = -sign(z) * max(|z| - lamda1, 0) / ((beta + sqrt(n)) / lr + wd)`.

    A row-sparse gradient updates only its rows. Where lr is not positive there is no such weight: nothing changes.

    Options: learning_rate 0.1, at least 0; lamda1 0.01, beta 1.0. State: 'z', 'n'.
    """

    name = "ftrl"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.1, "lamda1": 0.01, "beta": 1.0}
    never_negative = frozenset({"lr", "lamda1", "beta"})
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        z, n = state_tensor(state, "z", weight), state_tensor(state, "n", weight)
        lr, threshold = hyper["lr"], hyper["lamda1"]
        if lr <= 0.0:
            return
        growth = n.sqrt().neg_()
        root = n.addcmul_(grad, grad).sqrt()
        z.add_(grad).addcmul_(growth.add_(root), weight, value=-1.0 / lr)
        # Without beta, wd and any gradient so far the divisor is 0, and so is the dividend.
        scale = root.add_(hyper["beta"]).div_(lr).add_(hyper["weight_decay"])
        scale.clamp_min_(torch.finfo(scale.dtype).tiny)
        torch.sub(z.clamp(-threshold, threshold), z, out=weight).div_(scale)

    def updates_rows(self, hyper: Mapping[str, Any]) -> bool:
        """Always; see `Optimizer.updates_rows`."""
        return True
