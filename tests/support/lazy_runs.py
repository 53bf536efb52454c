"""Training of a table by rows: MXNet's recorded trajectories, and an independent float64 loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

START = [[1.0, -2.0], [0.5, 3.0], [2.0, 2.0]]
TOUCHED = [[0], [0, 2], [2], [0], [1]]
"""The rows that have a gradient in each step."""

GOLDEN: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "lazy sgd": ("sgd", {"learning_rate": 0.1, "wd": 0.01, "lazy_update": True},
                 [0.927043, -1.934066, 0.4495, 3.017, 1.946022, 2.035982]),
    "sgd": ("sgd", {"learning_rate": 0.1, "wd": 0.01}, [0.92515, -1.93018, 0.447505, 3.00503, 1.94014, 2.02992]),
    "lazy momentum": ("sgd", {"learning_rate": 0.1, "wd": 0.01, "momentum": 0.9, "lazy_update": True},
                      [0.889353, -1.876686, 0.4495, 3.017, 1.926222, 2.052182]),
    "momentum": ("sgd", {"learning_rate": 0.1, "wd": 0.01, "momentum": 0.9},
                 [0.801548, -1.785635, 0.443443, 2.980661, 1.823988, 2.096497]),
    "lazy adam": ("adam", {"learning_rate": 0.01, "wd": 0.01, "lazy_update": True},
                  [0.971854, -1.970903, 0.494545, 3.005455, 1.984036, 2.016026]),
    "adam": ("adam", {"learning_rate": 0.01, "wd": 0.01},
             [0.957281, -1.955397, 0.454437, 2.962366, 1.959143, 2.015812]),
    "adagrad": ("adagrad", {"learning_rate": 0.1}, [0.723271, -1.771554, 0.4, 3.1, 1.816795, 2.170711]),
    "groupadagrad": ("groupadagrad", {"learning_rate": 0.1},
                     [0.759836, -1.745827, 0.368694, 3.052522, 1.807419, 2.161721]),
    "ftrl": ("ftrl", {"learning_rate": 0.1}, [0.037134, -0.285389, 0.132667, 0.515833, 0.293784, 0.364757]),
    "rmsprop": ("rmsprop", {"wd": 0.01}, [0.990982, -1.992155, 0.487782, 2.993942, 1.990686, 2.001723]),
}  # fmt: skip
"""MXNet 2.0.0b1's weights after five steps from START in which the TOUCHED rows get the gradient `gradient(step)`."""


def gradient(step: int) -> Tensor:
    """The gradient of each touched row in a step, from 0."""
    return torch.tensor([0.1 * (step + 1), -0.2])


def float64_momentum(start: Tensor, batches: list[Tensor], lr: float, momentum: float, wd: float) -> Tensor:
    """Gluon's momentum SGD of all rows, written out: the loss is the sum of squares of all rows that are looked up."""
    weight, buffer = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for ids in batches:
        grad = torch.zeros_like(weight)
        for row in ids.flatten().tolist():
            grad[row] += 2 * weight[row]
        buffer = momentum * buffer - lr * (grad + wd * weight)
        weight = weight + buffer
    return weight


def float64_lazy_momentum(
    start: Tensor, batches: list[Tensor], lr: float, momentum: float, wd: float
) -> Tensor:
    """As `float64_momentum`, with MXNet's lazy update: rows that are not looked up keep weight and momentum."""
    weight, buffer = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for ids in batches:
        counts = ids.flatten().bincount(minlength=len(weight))
        for row in counts.nonzero().flatten().tolist():
            grad = 2 * counts[row] * weight[row] + wd * weight[row]
            buffer[row] = momentum * buffer[row] - lr * grad
            weight[row] += buffer[row]
    return weight


ORACLES: dict[bool, Callable[..., Tensor]] = {False: float64_momentum, True: float64_lazy_momentum}
"""By `lazy_update`."""
