"""Gluon's optimizers against trajectories recorded from MXNet 2.0.0b1 and against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer, SliceState, create, update_slice
from kvstore_server.plan import TensorSpec, make_plan

CLIPPED = dict(rescale_grad=0.5, clip_gradient=0.06)

# Weights after 5 updates from [[1, -2], [.5, 3]] with gradients [[.1 t, -.2], [.3 (-1)^t, .05]], wd .01:
# name, options, result, result with CLIPPED.
GOLDEN: list[tuple[str, dict[str, Any], list[float], list[float]]] = [
    ("sgd", {}, [0.8452098, -1.8902199, 0.5274451, 2.9600801], [0.9660659, -1.9600798, 0.5034931, 2.9725544]),
    (
        "sgd",
        dict(momentum=0.9),
        [0.6703619, -1.7115114, 0.5670984, 2.8950951],
        [0.9122861, -1.895095, 0.5081744, 2.9278779],
    ),
    ("nag", {}, [0.5491129, -1.6312518, 0.5875915, 2.8659096], [0.8873225, -1.8659097, 0.5108138, 2.9078131]),
    (
        "signum",
        dict(wd_lh=0.001),
        [0.949951, -1.949901, 0.5099747, 2.9498508],
        [0.949951, -1.949901, 0.5099747, 2.9498508],
    ),
    ("ftml", {}, [0.9905028, -1.9924293, 0.5020744, 2.9924304], [0.9921847, -1.99243, 0.5017779, 2.9924309]),
    (
        "dcasgd",
        dict(momentum=0.9),
        [0.670572, -1.7115837, 0.5670487, 2.8950987],
        [0.9122883, -1.8950986, 0.5081741, 2.9278789],
    ),
    (
        "adam",
        {},
        [0.9951315, -1.9949998, 0.5013705, 2.9950004],
        [0.9949888, -1.9949999, 0.5011101, 2.9950004],
    ),
    (
        "adamw",
        {},
        [0.9951387, -1.9949782, 0.5014293, 2.9949687],
        [0.9949794, -1.9949795, 0.5014288, 2.9949706],
    ),
    (
        "adabelief",
        {},
        [0.9942558, -1.9939643, 0.5014972, 2.9944904],
        [0.9948598, -1.9948599, 0.5013638, 2.9949992],
    ),
    (
        "adamax",
        {},
        [0.9924207, -1.9899992, 0.502725, 2.9899976],
        [0.9903248, -1.9899977, 0.5021865, 2.9899967],
    ),
    (
        "nadam",
        {},
        [0.9950333, -1.9959507, 0.5009817, 2.9959509],
        [0.9958344, -1.9959508, 0.5008034, 2.9959509],
    ),
    (
        "adadelta",
        {},
        [0.9760768, -1.9835716, 0.5030993, 2.9835885],
        [0.982697, -1.9835883, 0.5024565, 2.9836068],
    ),
    (
        "adagrad",
        {},
        [0.9592636, -1.9676919, 0.5078456, 2.9677072],
        [0.9666167, -1.9677072, 0.506532, 2.9677181],
    ),
    (
        "rmsprop",
        {},
        [0.9868495, -1.9893557, 0.5025409, 2.9893568],
        [0.9890326, -1.9893571, 0.5021195, 2.9893579],
    ),
    (
        "rmsprop",
        dict(centered=True),
        [0.9595566, -1.9654574, 0.5091119, 2.9654658],
        [0.9644569, -1.9654658, 0.508047, 2.9654715],
    ),
    (
        "ftrl",
        {},
        [-0.0106842, -0.2570632, 0.1354728, 0.1187152],
        [0.0201678, -0.0849095, 0.0328256, 0.0601378],
    ),
    ("test", {}, [0.9845021, -1.9890022, 0.5027494, 2.996001], [0.9920011, -1.9940014, 0.5012497, 2.9972506]),
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


@pytest.mark.parametrize("clipped", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize(
    ("name", "options", "plain_end", "clipped_end"), GOLDEN, ids=[f"{row[0]}{row[1] or ''}" for row in GOLDEN]
)
def test_five_updates_end_where_mxnet_ends(
    name: str, options: dict[str, Any], plain_end: list[float], clipped_end: list[float], clipped: bool
) -> None:
    optimizer = create(name, wd=0.01, **options, **(CLIPPED if clipped else {}))
    grads = [torch.tensor([[0.1 * t, -0.2], [0.3 * (-1) ** t, 0.05]]) for t in range(1, 6)]
    result = train(optimizer, torch.tensor([[1.0, -2.0], [0.5, 3.0]]), grads).reshape(-1)
    torch.testing.assert_close(
        result, torch.tensor(clipped_end if clipped else plain_end), rtol=1e-6, atol=1e-6
    )


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


def test_an_update_without_learning_rate_moves_no_weight() -> None:
    for name in sorted({row[0] for row in GOLDEN}):
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
    state, flat = SliceState.empty(piece), torch.zeros(piece.length)
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
