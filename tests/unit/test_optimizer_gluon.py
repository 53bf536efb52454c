"""Gluon's optimizers against trajectories recorded from MXNet 2.0.0b1 and against their formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer, SliceState, create, update_slice
from kvstore_server.plan import TensorSpec, make_plan

# Weights after 5 updates from [[1, -2], [.5, 3]] with gradients [[.1 t, -.2], [.3 (-1)^t, .05]], wd .01.
GOLDEN = [
    ("sgd", {}, {}, [0.8452098, -1.8902199, 0.5274451, 2.9600801]),
    ("sgd", {}, dict(rescale=0.5), [0.9660659, -1.9600798, 0.5034931, 2.9725544]),
    ("sgd", dict(momentum=0.9), {}, [0.6703619, -1.7115114, 0.5670984, 2.8950951]),
    ("sgd", dict(momentum=0.9), dict(rescale=0.5), [0.9122861, -1.895095, 0.5081744, 2.9278779]),
    ("adam", {}, {}, [0.9951315, -1.9949998, 0.5013705, 2.9950004]),
    ("adam", {}, dict(rescale=0.5), [0.9949888, -1.9949999, 0.5011101, 2.9950004]),
    ("test", {}, {}, [0.9845021, -1.9890022, 0.5027494, 2.996001]),
    ("test", {}, dict(rescale=0.5), [0.9920011, -1.9940014, 0.5012497, 2.9972506]),
]


def train(
    optimizer: Optimizer, weight: Tensor, grads: list[Tensor], rates: list[float] | None = None
) -> Tensor:
    """Update one key of a float32 or float64 slice once for each gradient."""
    piece = make_plan([TensorSpec("w", tuple(weight.shape), str(weight.dtype)[6:])], 1).slices[0]
    flat = torch.zeros(piece.length, dtype=weight.dtype)
    flat[: weight.numel()] = weight.reshape(-1)
    state = SliceState.empty(piece)
    for i, grad in enumerate(grads):
        if rates is not None:
            optimizer.lr = rates[i]
        change = torch.zeros_like(flat)
        change[: weight.numel()] = grad.reshape(-1) * optimizer.rescale_grad
        update_slice(optimizer, piece, flat, change, state, [optimizer.hyper], None)
    return flat[: weight.numel()].reshape(weight.shape)


@pytest.mark.parametrize(("name", "options", "how", "expected"), GOLDEN)
def test_five_updates_end_where_mxnet_ends(
    name: str, options: dict[str, Any], how: dict[str, float], expected: list[float]
) -> None:
    rescaled = dict(rescale_grad=how["rescale"], clip_gradient=0.06) if how else {}
    optimizer = create(name, wd=0.01, **options, **rescaled)
    grads = [torch.tensor([[0.1 * t, -0.2], [0.3 * (-1) ** t, 0.05]]) for t in range(1, 6)]
    result = train(optimizer, torch.tensor([[1.0, -2.0], [0.5, 3.0]]), grads)
    assert (result.reshape(-1) - torch.tensor(expected)).abs().max() <= 1e-6


def sgd_formula(w: Tensor, grads: list[Tensor], rates: list[float], wd: float, momentum: float) -> Tensor:
    m = torch.zeros_like(w)
    for g, lr in zip(grads, rates, strict=True):
        m = momentum * m - lr * (g + wd * w)
        w = w + m
    return w


def adam_formula(w: Tensor, grads: list[Tensor], rates: list[float], wd: float, eps: float) -> Tensor:
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (grad, lr) in enumerate(zip(grads, rates, strict=True), 1):
        g = grad + wd * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - lr * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * m / (v.sqrt() + eps)
    return w


@pytest.mark.parametrize(
    ("optimizer", "formula"),
    [
        (create("sgd", wd=0.1, momentum=0.9), lambda *a: sgd_formula(*a, 0.1, 0.9)),
        (create("sgd", wd=0.1), lambda *a: sgd_formula(*a, 0.1, 0.0)),
        (create("adam", wd=0.1, epsilon=0.1), lambda *a: adam_formula(*a, 0.1, 0.1)),
        (create("test", wd=0.1), lambda *a: sgd_formula(*a, 0.1, 0.0)),
    ],
    ids=["momentum", "sgd", "adam", "test"],
)
def test_a_changing_learning_rate_follows_the_formula_even_through_zero_and_below(
    optimizer: Optimizer, formula: Callable[[Tensor, list[Tensor], list[float]], Tensor]
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(77, dtype=torch.float64)
    grads = [torch.randn_like(weight) for _ in range(6)]
    rates = [0.1, 0.01, 0.0, -0.2, 0.5, 0.05]
    result = train(optimizer, weight, grads, rates)
    assert (result - formula(weight, grads, rates)).abs().max() <= 1e-12


def test_a_clipped_gradient_is_bounded_before_weight_decay_is_added() -> None:
    optimizer = create("sgd", lr=1.0, wd=0.5, clip_gradient=0.25)
    result = train(optimizer, torch.tensor([4.0, 4.0]), [torch.tensor([100.0, -0.125])])
    assert result.tolist() == [4.0 - (0.25 + 2.0), 4.0 - (-0.125 + 2.0)]


def test_momentum_that_is_switched_on_later_starts_from_zero() -> None:
    optimizer = create("sgd", lr=0.5)
    weight, grad = torch.tensor([1.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    piece = make_plan([TensorSpec("w", (1,), "float64")], 1).slices[0]
    flat, state = torch.zeros(piece.length, dtype=torch.float64), SliceState.empty(piece)
    flat[:1] = weight
    for momentum in (0.0, 0.5, 0.5):
        change = torch.zeros_like(flat)
        change[:1] = grad
        update_slice(optimizer, piece, flat, change, state, [{**optimizer.hyper, "momentum": momentum}], None)
    assert flat[0].item() == 1.0 - 0.5 - 0.5 - (0.5 + 0.25)
