"""Gluon's elementwise optimizers against their published formulas, written here in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore_server.optimizer import create, gluon
from kvstore_server.plan import TensorSpec, make_plan
from tests.support.gluon_cases import ELEMENTWISE, Case
from tests.support.gluon_formulas import FORMULAS, Numbers, Zeros
from tests.support.optimizer_slices import empty, update_slice

NUMEL = 77
RATES = [0.05, 0.02, 0.1, 0.005, 0.07, 0.01, 0.03]
BOUND = 0.8
each_case = pytest.mark.parametrize("label", ELEMENTWISE)


def gradients(steps: int) -> list[Numbers]:
    """Multiples of 2**-7, some beyond the bound, with few changes of sign: exact in every dtype."""
    generator = np.random.default_rng(3)
    return [np.round((generator.random(NUMEL) * 1.2 + 0.1) * 128) / 128 for _ in range(steps)]


def start() -> Numbers:
    """Multiples of 2**-6 in [-1, 1]: exact in every dtype."""
    return np.round(np.random.default_rng(4).uniform(-1, 1, NUMEL) * 64) / 64


def by_formula(case: Case, wd: float) -> Numbers:
    w, state = start(), Zeros()
    for t, (g, lr) in enumerate(zip(gradients(len(RATES)), RATES, strict=True), 1):
        w = FORMULAS[case.name](w, 0.5 * g, state, t, lr, wd, {**case.options, "clip_gradient": BOUND / 2})
    return w


def by_slice(case: Case, wd: float, dtype: torch.dtype, master: bool = False) -> Numbers:
    """The weights in float64 after as many updates of one slice as there are RATES."""
    optimizer = create(case.name, wd=wd, clip_gradient=BOUND / 2, multi_precision=master, **case.options)
    piece = make_plan([TensorSpec("w", (NUMEL,), str(dtype)[6:])], 1).slices[0]
    weight, state = torch.zeros(piece.length, dtype=dtype), empty(piece)
    weight[:NUMEL] = torch.from_numpy(start()).to(dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for g, lr in zip(gradients(len(RATES)), RATES, strict=True):
        optimizer.lr = lr
        grad = torch.zeros(piece.length, dtype=compute)
        grad[:NUMEL] = torch.from_numpy(0.5 * g)
        update_slice(optimizer, piece, weight, grad, state, [optimizer.hyper])
    assert not weight[NUMEL:].any()
    return weight[:NUMEL].double().numpy()


def relative(result: Numbers, reference: Numbers) -> float:
    return float(np.max(np.abs(result - reference) / np.maximum(np.abs(reference), 1.0)))


def test_every_optimizer_without_noise_has_its_formula_here() -> None:
    assert {case.name for case in ELEMENTWISE.values()} == {cls.name for cls in gluon.FAMILY} - {"sgld"}


@each_case
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 5e-6)], ids=["f64", "f32"]
)
def test_a_changing_learning_rate_follows_the_formula(label: str, dtype: torch.dtype, bound: float) -> None:
    case = ELEMENTWISE[label]
    assert relative(by_slice(case, 0.1, dtype), by_formula(case, 0.1)) <= bound


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_half_precision_with_a_master_ends_at_the_rounded_weights_of_float64(
    label: str, dtype: torch.dtype
) -> None:
    case = ELEMENTWISE[label]
    result = by_slice(case, 0.1, dtype, master=True)
    assert relative(result, by_formula(case, 0.1)) <= torch.finfo(dtype).eps
    assert np.any(result != start())


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_half_precision_without_a_master_stays_within_one_rounding_per_update(
    label: str, dtype: torch.dtype
) -> None:
    case = ELEMENTWISE[label]
    result = by_slice(case, 0.1, dtype)
    assert relative(result, by_formula(case, 0.1)) <= len(RATES) * torch.finfo(dtype).eps
    assert np.any(result != start())


@pytest.mark.parametrize(
    "label", ["sgd", "nag", "dcasgd", "adam", "adamw", "adamax", "rmsprop", "ftml", "test"]
)
def test_a_negative_learning_rate_climbs(label: str) -> None:
    case = ELEMENTWISE[label]
    optimizer = create(case.name, lr=-0.05, **case.options)
    piece = make_plan([TensorSpec("w", (NUMEL,), "float64")], 1).slices[0]
    weight = torch.zeros(piece.length, dtype=torch.float64)
    weight[:NUMEL] = torch.from_numpy(start())
    grad = torch.zeros(piece.length, dtype=torch.float64)
    grad[:NUMEL] = torch.from_numpy(gradients(1)[0])
    update_slice(optimizer, piece, weight, grad, empty(piece), [optimizer.hyper])
    expected = FORMULAS[case.name](start(), gradients(1)[0], Zeros(), 1, -0.05, 0.0, case.options)
    assert relative(weight[:NUMEL].numpy(), expected) <= 1e-12


@pytest.mark.parametrize("label", ["ftml", "adam", "nadam"])
def test_begin_num_update_counts_as_updates_that_came_before(label: str) -> None:
    case = ELEMENTWISE[label]
    optimizer = create(case.name, lr=0.05, begin_num_update=6, **case.options)
    piece = make_plan([TensorSpec("w", (NUMEL,), "float64")], 1).slices[0]
    weight, state = torch.zeros(piece.length, dtype=torch.float64), empty(piece)
    weight[:NUMEL] = torch.from_numpy(start())
    expected, reference = start(), Zeros(product=1.0)
    for t in (7, 8, 9):
        grad = torch.zeros(piece.length, dtype=torch.float64)
        grad[:NUMEL] = torch.from_numpy(gradients(9)[t - 1])
        update_slice(optimizer, piece, weight, grad, state, [optimizer.hyper])
        expected = FORMULAS[case.name](expected, gradients(9)[t - 1], reference, t, 0.05, 0.0, case.options)
    assert relative(weight[:NUMEL].numpy(), expected) <= 1e-11
    assert state.steps.tolist() == [3]
