"""Clipped training of three parameters, worked out in plain floats: on every store it has to end there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvtrainer import Trainer

RATES = [(0.1, 0.9), (0.1, 0.9), (0.01, 0.5), (0.01, 0.5)]
"""(learning rate, momentum) of every step."""
GRADIENTS = [
    [([6.0, 8.0], [0.0]), ([1.0, 0.0], [2.0]), ([0.1, 0.2], [-0.2]), ([0.5, 0.5], [0.5])],
    [([0.0, 0.0], [0.0]), ([1.0, 0.0], [2.0]), ([0.3, 0.0], [0.2]), ([0.5, 0.5], [0.5])],
]
"""By worker and step, of a and b."""


class Expected(NamedTuple):
    """One step in the arithmetic of plain floats."""

    norm: float
    coef: float
    weights: list[float]


def by_hand(is_rate_inside: bool) -> list[Expected]:
    weights, velocity = [1.0, 2.0, 3.0], [0.0] * 3
    steps = []
    for step, (rate, momentum) in enumerate(RATES):
        mine, theirs = ([*worker[step][0], *worker[step][1]] for worker in GRADIENTS)
        mean = [(one + other) / 2 for one, other in zip(mine, theirs, strict=True)]
        norm = math.sqrt(sum(g * g for g in mean))
        coef = min(1.0, 1.0 / (norm + 1e-6))
        for i, g in enumerate(mean):
            own = rate * (2 if i == 2 else 1)
            slope = coef * g + (0.0 if i == 2 else 0.01) * weights[i]
            velocity[i] = momentum * velocity[i] + (own if is_rate_inside else 1.0) * slope
            weights[i] -= velocity[i] if is_rate_inside else own * velocity[i]
        steps.append(Expected(norm, coef, list(weights)))
    return steps


OUTSIDE, INSIDE = by_hand(False), by_hand(True)


class Case(NamedTuple):
    """An optimizer, its options, and what every step leads to."""

    optimizer: str
    options: dict[str, Any]
    expected: list[Expected]


CASES = {
    "torch": Case("torch:SGD", {"lr": 0.1, "weight_decay": 0.01}, OUTSIDE),
    "lr in the velocity": Case("sgd", {"learning_rate": 0.1, "wd": 0.01}, INSIDE),
    "corrected": Case("sgd", {"learning_rate": 0.1, "wd": 0.01, "momentum_correction": True}, OUTSIDE),
}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, Parameter]:
    a = Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    b = Parameter(torch.tensor([3.0], dtype=dtype))
    b.lr_mult, b.wd_mult = 2, 0  # type: ignore[attr-defined]
    return {"a": a, "b": b}


def train(
    case: Case, replicas: Sequence[dict[str, Parameter]], workers: Sequence[int], **options: Any
) -> list[list[float]]:
    """What steps with the gradients of some workers lead to, one for each replica; checks what steps report."""
    params: Any = {name: [one[name] for one in replicas] for name in ("a", "b")}
    if len(replicas) == 1:
        params = replicas[0]
    number = {"momentum": 0.9, **case.options}
    with Trainer(params, case.optimizer, number, clip_grad={"max_norm": 1.0}, **options) as trainer:
        path = []
        for step, (rate, momentum) in enumerate(RATES):
            for group in trainer.param_groups:
                group["lr"], group["momentum"] = rate, momentum
            for own, worker in zip(replicas, workers, strict=True):
                give(own, GRADIENTS[worker][step])
            result = trainer.step(2)
            exact = 1e-12 if replicas[0]["a"].dtype == torch.float64 else 1e-6
            assert result.grad_norm == pytest.approx(case.expected[step].norm, rel=exact)
            assert result.clip_coef == pytest.approx(case.expected[step].coef, rel=exact)
            assert result.lr == rate
            path.append([*replicas[0]["a"].tolist(), *replicas[0]["b"].tolist()])
    return path


def give(own: dict[str, Parameter], gradient: tuple[list[float], list[float]]) -> None:
    slopes = [torch.tensor(values, dtype=own["a"].dtype) for values in gradient]
    loss: Tensor = own["a"] @ slopes[0] + own["b"] @ slopes[1]
    loss.backward()
