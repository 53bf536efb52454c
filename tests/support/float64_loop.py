"""The oracle: one process, one big batch, float64, plain torch; nothing of ours.

Gluon's two optimizers are written out here after MXNet 2.x; torch's are torch.optim's own classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.coupled_model import (
    BATCH,
    BIAS_RATE,
    BIASES,
    MULTIPLIERS,
    STEPS,
    Case,
    batch_of,
    loss_of,
    rate_factor,
    start_weights,
)


def train(case: Case, workers: int) -> dict[str, Tensor]:
    """The weights after STEPS steps on the joined batches of all workers, of the mean loss over examples."""
    weights = {name: weight.requires_grad_() for name, weight in start_weights().items()}
    multipliers: dict[str, dict[str, float]] = {"lr_mult": {}, "wd_mult": {}}
    update = _Torch(case, weights) if case.optimizer.startswith("torch:") else _GLUON[case.optimizer](case)
    for step in range(STEPS):
        for kind, changed in MULTIPLIERS.get(step, {}).items():
            multipliers[kind] |= changed
        parts = [batch_of(step, rank) for rank in range(workers)]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        for weight in weights.values():
            weight.grad = None
        (loss_of(weights, x, y) / (workers * BATCH)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            update.start_step()
            for name, weight in weights.items():
                base = case.lr * (BIAS_RATE if name in BIASES else 1.0)
                lr = base * rate_factor(step) * multipliers["lr_mult"].get(name, 1.0)
                update.apply(name, weight, lr, multipliers["wd_mult"].get(name, 1.0))
    return {name: weight.detach() for name, weight in weights.items()}


class _Torch:
    """A torch.optim class with one instance, hence one learning rate and weight decay, per parameter."""

    def __init__(self, case: Case, weights: dict[str, Tensor]) -> None:
        cls = getattr(torch.optim, case.optimizer.removeprefix("torch:"))
        self._kernels = {name: cls([weight], lr=case.lr, **case.options) for name, weight in weights.items()}
        self._decay = case.options.get("weight_decay")

    def start_step(self) -> None:
        pass

    def apply(self, name: str, weight: Tensor, lr: float, wd_mult: float) -> None:
        [group] = self._kernels[name].param_groups
        group["lr"] = lr
        if self._decay is not None:
            group["weight_decay"] = self._decay * wd_mult
        self._kernels[name].step()


class _Gluon:
    """What the optimizers of MXNet have in common: rescale, clip, then weight decay into the gradient."""

    def __init__(self, case: Case) -> None:
        self.options: dict[str, Any] = case.options
        self.step = 0

    def start_step(self) -> None:
        self.step += 1

    def gradient(self, weight: Tensor, wd_mult: float) -> Tensor:
        assert weight.grad is not None
        gradient = weight.grad * self.options.get("rescale_grad", 1.0)
        bound = self.options.get("clip_gradient", float("inf"))
        decay: float = self.options["wd"] * wd_mult
        clipped = torch.clamp(gradient, -bound, bound)
        return clipped.add(weight, alpha=decay)


class _Sgd(_Gluon):
    """m = μ m − lr g; w = w + m."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._momenta: dict[str, Tensor] = {}

    def apply(self, name: str, weight: Tensor, lr: float, wd_mult: float) -> None:
        before = self._momenta.get(name, torch.zeros_like(weight))
        self._momenta[name] = self.options["momentum"] * before - lr * self.gradient(weight, wd_mult)
        weight += self._momenta[name]


class _Adam(_Gluon):
    """w = w − lr √(1 − β2ᵗ) / (1 − β1ᵗ) · m / (√v + ε)."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._averages: dict[str, tuple[Tensor, Tensor]] = {}

    def apply(self, name: str, weight: Tensor, lr: float, wd_mult: float) -> None:
        beta1, beta2 = self.options["beta1"], self.options["beta2"]
        zero = torch.zeros_like(weight)
        mean, square = self._averages.get(name, (zero, zero))
        gradient = self.gradient(weight, wd_mult)
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        self._averages[name] = (mean, square)
        rate = lr * (1 - beta2**self.step) ** 0.5 / (1 - beta1**self.step)
        weight -= rate * mean / (square.sqrt() + self.options["epsilon"])


_GLUON: dict[str, type[_Sgd] | type[_Adam]] = {"sgd": _Sgd, "adam": _Adam}
