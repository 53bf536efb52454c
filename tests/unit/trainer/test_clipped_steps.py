"""Clipped gradients, changing learning rates and momenta end where the arithmetic by hand does.

A norm of 5 is limited to 1, then one of 2.236; later ones are below the limit. `tests/parity/test_clipped_bits.py` has
the same bits on servers, `tests/integration/test_option_table.py` the same options in every place.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer

RATES = [(0.1, 0.9), (0.1, 0.9), (0.01, 0.5), (0.01, 0.5)]
"""(learning rate, momentum) of every step."""
GRADIENTS = [
    [[6.0, 8.0, 0.0], [1.0, 0.0, 2.0], [0.1, 0.2, -0.2], [0.5, 0.5, 0.5]],
    [[0.0, 0.0, 0.0], [1.0, 0.0, 2.0], [0.3, 0.0, 0.2], [0.5, 0.5, 0.5]],
]
"""By replica and step, of both elements of a, and of b."""
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "torch": ("torch:SGD", {"lr": 0.1, "weight_decay": 0.01}, False),
    "lr in the velocity": ("sgd", {"learning_rate": 0.1, "wd": 0.01}, True),
    "corrected": ("sgd", {"learning_rate": 0.1, "wd": 0.01, "momentum_correction": True}, False),
}
"""An optimizer, its options, and whether the learning rate is inside its velocity."""


def by_hand(is_rate_inside: bool) -> list[list[float]]:
    """The norm, the coefficient and the weights after every step, in plain floats."""
    weights, velocity, steps = [1.0, 2.0, 3.0], [0.0] * 3, []
    for (rate, momentum), mine, theirs in zip(RATES, *GRADIENTS, strict=True):
        mean = [(one + other) / 2 for one, other in zip(mine, theirs, strict=True)]
        norm = math.sqrt(sum(g * g for g in mean))
        coef = min(1.0, 1.0 / (norm + 1e-6))
        for i, g in enumerate(mean):
            own = rate * (2 if i == 2 else 1)
            slope = coef * g + (0.0 if i == 2 else 0.01) * weights[i]
            velocity[i] = momentum * velocity[i] + (own if is_rate_inside else 1.0) * slope
            weights[i] -= velocity[i] if is_rate_inside else own * velocity[i]
        steps.append([norm, coef, *weights])
    return steps


def parameters(dtype: torch.dtype) -> tuple[Parameter, Parameter]:
    a, b = (Parameter(torch.tensor(values, dtype=dtype)) for values in ([1.0, 2.0], [3.0]))
    b.lr_mult, b.wd_mult = 2, 0  # type: ignore[attr-defined]
    return a, b


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("store", "in_store", "copies"),
    [(None, None, 1), ("local", True, 1), ("local", True, 2), ("device", False, 1), ("device", False, 2)],
)
def test_steps_end_where_the_arithmetic_by_hand_does(
    store: str | None, in_store: bool | None, copies: int, case: str
) -> None:
    kind, options, is_rate_inside = CASES[case]
    replicas = [parameters(torch.float64) for _ in range(copies)]
    given: Any = {"a": [a for a, _ in replicas], "b": [b for _, b in replicas]}
    if copies == 1:
        given = dict(zip(given, replicas[0], strict=True))
    trainer = Trainer(
        given, kind, {"momentum": 0.9, **options}, store, None, in_store, clip_grad={"max_norm": 1.0}
    )
    for step, expected in enumerate(by_hand(is_rate_inside)):
        trainer.param_groups[0]["lr"], trainer.param_groups[0]["momentum"] = RATES[step]
        for at, slopes in enumerate(GRADIENTS):
            a, b = replicas[at % copies]
            (a @ torch.tensor(slopes[step][:2], dtype=a.dtype) + b[0] * slopes[step][2]).backward()
        result = trainer.step(2)
        assert result.lr == RATES[step][0]
        for a, b in replicas:
            seen = [result.grad_norm, result.clip_coef, *a.tolist(), *b.tolist()]
            assert seen == pytest.approx(expected, rel=1e-9)
