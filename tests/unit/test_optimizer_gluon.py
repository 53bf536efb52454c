"""Gluon's optimizers against trajectories recorded from MXNet 2.0.0b1 and against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer, create
from kvstore_server.plan import TensorSpec, make_plan
from tests.support.golden import GOLDEN, RESCALED, START, TOLERANCE, UPDATES, gradient
from tests.support.optimizer_slices import empty, update_slice


def train(
    optimizer: Optimizer, weight: Tensor, grads: list[Tensor], rates: list[float] | None = None
) -> Tensor:
    """Update one key of a float32 or float64 slice once for each gradient."""
    piece = make_plan([TensorSpec("w", tuple(weight.shape), str(weight.dtype)[6:])], 1).slices[0]
    flat = torch.zeros(piece.length, dtype=weight.dtype)
    flat[: weight.numel()] = weight.reshape(-1)
    state = empty(piece)
    for i, grad in enumerate(grads):
        if rates is not None:
            optimizer.lr = rates[i]
        change = torch.zeros_like(flat)
        change[: weight.numel()] = grad.reshape(-1) * optimizer.rescale_grad
        update_slice(optimizer, piece, flat, change, state, [optimizer.hyper], None)
    return flat[: weight.numel()].reshape(weight.shape)


ELEMENTWISE = {label: row for label, row in GOLDEN.items() if create(row.name).elementwise}


@pytest.mark.parametrize("rescaled", [False, True], ids=["plain", "rescaled"])
@pytest.mark.parametrize("label", ELEMENTWISE)
def test_five_updates_end_where_mxnet_ends(label: str, rescaled: bool) -> None:
    row = GOLDEN[label]
    optimizer = create(row.name, **row.options, **(RESCALED if rescaled else {}))
    grads = [torch.tensor(gradient(t)) for t in range(1, UPDATES + 1)]
    result = train(optimizer, torch.tensor(START), grads).reshape(-1)
    expected = torch.tensor(row.rescaled if rescaled else row.plain)
    torch.testing.assert_close(result, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_clipped_gradient_is_bounded_before_weight_decay_is_added() -> None:
    optimizer = create("sgd", lr=1.0, wd=0.5, clip_gradient=0.25)
    result = train(optimizer, torch.tensor([4.0, 4.0]), [torch.tensor([100.0, -0.125])])
    assert result.tolist() == [4.0 - (0.25 + 2.0), 4.0 - (-0.125 + 2.0)]


def test_momentum_that_is_switched_on_later_starts_from_zero() -> None:
    optimizer = create("sgd", lr=0.5)
    weight, grad = torch.tensor([1.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    piece = make_plan([TensorSpec("w", (1,), "float64")], 1).slices[0]
    flat, state = torch.zeros(piece.length, dtype=torch.float64), empty(piece)
    flat[:1] = weight
    for momentum in (0.0, 0.5, 0.5):
        change = torch.zeros_like(flat)
        change[:1] = grad
        update_slice(optimizer, piece, flat, change, state, [{**optimizer.hyper, "momentum": momentum}], None)
    assert flat[0].item() == 1.0 - 0.5 - 0.5 - (0.5 + 0.25)


def test_an_update_without_learning_rate_moves_no_weight() -> None:
    for name in sorted({row.name for row in ELEMENTWISE.values()}):
        weight = torch.tensor([1.0, -2.0, 0.5, 3.0])
        assert torch.equal(train(create(name, lr=0.0, wd=0.01), weight, [torch.ones(4)] * 2), weight), name


def test_a_constant_gradient_keeps_centered_rmsprop_finite() -> None:
    # The two averages end up equal, and rounding makes their difference negative.
    optimizer = create("rmsprop", centered=True, lr=1e-6, momentum=0.0)
    start = torch.linspace(1.0, 100.0, 64)
    assert train(optimizer, start, [start] * 300).isfinite().all()


def test_rmsprop_bounds_the_weights_last() -> None:
    optimizer = create("rmsprop", lr=0.5, clip_weights=2.0)
    result = train(optimizer, torch.tensor([1.9, -1.9, 0.0]), [torch.tensor([-1.0, 1.0, 1.0])])
    assert result[:2].tolist() == [2.0, -2.0]
    assert -2.0 < result[2] < 0.0


def test_ftrl_leaves_a_weight_that_never_had_a_gradient_at_zero_even_without_beta() -> None:
    result = train(create("ftrl", beta=0.0), torch.tensor([0.0, 0.0]), [torch.tensor([0.0, 1.0])] * 2)
    assert result[0] == 0.0
    assert result[1] < 0.0


def test_nadam_gives_every_key_its_own_momentum_schedule() -> None:
    optimizer = create("nadam", lr=0.1)
    piece = make_plan([TensorSpec(name, (3,), "float32") for name in "ab"], 1).slices[0]
    state, flat = empty(piece), torch.zeros(piece.length)
    for _ in range(4):
        update_slice(optimizer, piece, flat, torch.ones(piece.length), state, [optimizer.hyper] * 2)
    alone = train(create("nadam", lr=0.1), torch.zeros(3), [torch.ones(3)] * 4)
    for segment in piece.segments:
        assert torch.equal(flat[segment.start : segment.start + 3], alone)


@pytest.mark.parametrize(
    ("name", "options", "wd", "rows"),
    [
        ("sgd", {}, 0.0, False),
        ("sgd", dict(lazy_update=True), 0.1, True),
        ("adam", {}, 0.0, False),
        ("adam", dict(lazy_update=True), 0.1, True),
        ("adagrad", {}, 0.0, True),
        ("adagrad", {}, 0.1, False),
        ("ftrl", {}, 0.1, True),
        ("rmsprop", {}, 0.0, False),
        ("nag", {}, 0.0, False),
    ],
)
def test_which_optimizers_update_only_the_rows_of_a_row_sparse_gradient(
    name: str, options: dict[str, Any], wd: float, rows: bool
) -> None:
    optimizer = create(name, wd=wd, **options)
    assert optimizer.updates_rows(optimizer.hyper) is rows
