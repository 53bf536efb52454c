"""Gluon's Adam and its relatives, numerically those of MXNet 2.x.

In the formulas g = grad + wd * w, grad has been rescaled and clipped on entry (MXNet's order), t is the number of the
key's update, and `m, v` are the averages `m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g**2`.
MXNet adds epsilon outside the bias correction, torch inside; torch's kernels get an epsilon that makes up for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.optimizer.base import Optimizer, StateValue
from kvstore_server.optimizer.kernels import bias_corrections, fused_adam, fused_scaled, state_tensor


class Adam(Optimizer):
    """`w -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)`.

    Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-8, lazy_update False (True: of a row-sparse
    gradient only the rows). State: 'exp_avg' m, 'exp_avg_sq' v.
    """

    name = "adam"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.001,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "lazy_update": False,
    }
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        mean, square = state_tensor(state, "exp_avg", weight), state_tensor(state, "exp_avg_sq", weight)
        _, root = bias_corrections(hyper["betas"], hyper["step"])
        fused_adam(
            weight,
            grad,
            mean,
            square,
            lr=hyper["lr"],
            betas=hyper["betas"],
            eps=hyper["eps"] / root,
            wd=hyper["weight_decay"],
            step=hyper["step"],
        )

    def updates_rows(self, hyper: Mapping[str, Any]) -> bool:
        """Whether `lazy_update` is on; see `Optimizer.updates_rows`."""
        return bool(hyper["lazy_update"])


class AdamW(Optimizer):
    """`w -= lr_t * (m / (sqrt(v) + epsilon) + wd * w)`, with g = grad and Adam's lr_t, or lr without `correct_bias`.

    The decay has the corrected learning rate, unlike torch's. This is MXNet's fused kernel, its default; its other
    implementation decays the weight that it has just updated.

    Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-6, correct_bias True. State: as Adam's.
    """

    name = "adamw"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.001,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "correct_bias": True,
    }
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        mean, square = state_tensor(state, "exp_avg", weight), state_tensor(state, "exp_avg_sq", weight)
        step = hyper["step"] if hyper["correct_bias"] else math.inf
        correction, root = bias_corrections(hyper["betas"], step)
        fused_adam(
            weight,
            grad,
            mean,
            square,
            lr=hyper["lr"],
            betas=hyper["betas"],
            eps=hyper["eps"] / root,
            wd=hyper["weight_decay"] * root / correction,
            step=step,
            decoupled=True,
        )


class AdaBelief(Optimizer):
    """`v = beta2 * v + (1 - beta2) * (g - m)**2 + epsilon`, else as Adam; clips grad + wd * w, not grad.

    Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-6, correct_bias True. State: 'exp_avg' m,
    'exp_avg_var' v.
    """

    name = "adabelief"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.001,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "correct_bias": True,
    }
    clips = False
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        mean, variance = state_tensor(state, "exp_avg", weight), state_tensor(state, "exp_avg_var", weight)
        (beta1, beta2), eps, bound = hyper["betas"], hyper["eps"], hyper["clip_gradient"]
        correction, root = bias_corrections(
            hyper["betas"], hyper["step"] if hyper["correct_bias"] else math.inf
        )
        grad.add_(weight, alpha=hyper["weight_decay"])
        if bound is not None:
            grad.clamp_(-bound, bound)
        mean.lerp_(grad, 1.0 - beta1)
        surprise = grad.sub_(mean)
        variance.mul_(beta2).addcmul_(surprise, surprise, value=1.0 - beta2).add_(eps)
        weight.addcdiv_(mean, variance.sqrt().add_(eps), value=-hyper["lr"] * root / correction)


class Adamax(Optimizer):
    """`u = max(beta2 * u, |g|); w -= lr / (1 - beta1**t) * m / (u + epsilon)`.

    Options: learning_rate 0.002, beta1 0.9, beta2 0.999, epsilon 1e-8. State: 'exp_avg' m, 'exp_inf' u.
    """

    name = "adamax"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.002, "betas": (0.9, 0.999), "eps": 1e-8}
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        mean, largest = state_tensor(state, "exp_avg", weight), state_tensor(state, "exp_inf", weight)
        beta1, beta2 = hyper["betas"]
        grad.add_(weight, alpha=hyper["weight_decay"])
        mean.lerp_(grad, 1.0 - beta1)
        torch.maximum(largest.mul_(beta2), grad.abs_(), out=largest)
        correction, _ = bias_corrections(hyper["betas"], hyper["step"])
        weight.addcdiv_(mean, largest + hyper["eps"], value=-hyper["lr"] / correction)


class Nadam(Optimizer):
    """Adam with Nesterov's momentum, whose rate `u(t) = beta1 * (1 - 0.96**(t * schedule_decay) / 2)` warms up.

    With p(t) = u(1) * ... * u(t): `w -= lr * (u(t+1) * m / (1 - p(t+1)) + (1 - u(t)) * g / (1 - p(t))) /
    (sqrt(v / (1 - beta2**t)) + epsilon)`. MXNet shares p among all keys, and so multiplies it once per key and update;
    here every key has its own.

    Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-8, schedule_decay 0.004. State: 'exp_avg' m,
    'exp_avg_sq' v, 'mu_product' p.
    """

    name = "nadam"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.001,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "schedule_decay": 0.004,
    }
    never_negative = frozenset({"schedule_decay"})
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        mean, square = state_tensor(state, "exp_avg", weight), state_tensor(state, "exp_avg_sq", weight)
        (beta1, beta2), lr, step = hyper["betas"], hyper["lr"], hyper["step"]
        rate, next_rate = (
            beta1 * (1 - 0.5 * 0.96 ** (t * hyper["schedule_decay"])) for t in (step, step + 1)
        )
        product = float(state.get("mu_product", 1.0)) * rate
        state["mu_product"] = product
        grad.add_(weight, alpha=hyper["weight_decay"])
        mean.lerp_(grad, 1.0 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        _, root = bias_corrections(hyper["betas"], step)
        scale = square.sqrt().div_(root).add_(hyper["eps"])
        weight.addcdiv_(mean, scale, value=-lr * next_rate / (1 - product * next_rate))
        weight.addcdiv_(grad, scale, value=-lr * (1 - rate) / (1 - product))


class FTML(Optimizer):
    """Follow the moving leader: `d = (1 - beta1**t) / lr * (sqrt(v / (1 - beta2**t)) + epsilon)`, then with the d'
    of the update before `z = beta1 * z + (1 - beta1) * g - (d - beta1 * d') * w; w = -z / d`.

    Before every update z = -d' * w, so this is `w -= (1 - beta1) * g / d`, which needs neither z nor d, loses no
    digits in their difference, and stays as it is where lr is 0. (Only weights that were replaced in between differ:
    MXNet pulls them back to what it remembers in z.)

    Options: learning_rate 0.0025, beta1 0.6, beta2 0.999, epsilon 1e-8. State: 'exp_avg_sq' v.
    """

    name = "ftml"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.0025, "betas": (0.6, 0.999), "eps": 1e-8}
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        beta1, beta2 = hyper["betas"]
        fused_scaled(
            weight,
            grad,
            state_tensor(state, "exp_avg_sq", weight),
            lr=hyper["lr"] * (1.0 - beta1) / (1.0 - beta1 ** hyper["step"]),
            beta=beta2,
            eps=hyper["eps"],
            wd=hyper["weight_decay"],
            step=hyper["step"],
        )
