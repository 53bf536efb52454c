"""Gluon's optimizers against runs recorded from MXNet 2.0.0b1 and 1.9.1, and their formulas in float64 NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer import Optimizer, create, gluon, layerwise
from kvstore_server.optimizer.layerwise import layerwise_norm
from kvstore_server.plan import TensorSpec, make_plan
from tests.support.gluon_cases import CASES, SAME_IN_MXNET1, Case
from tests.support.gluon_formulas import FORMULAS, Numbers, Zeros
from tests.support.optimizer_slices import Key, empty, update_slice
from tests.support.pairwise import pairwise

DATA = Path(__file__).parents[2] / "data"
START = [[1.0, -2.0], [0.5, 3.0]]
UPDATES = 5
RESCALED: dict[str, Any] = {"rescale_grad": 0.5, "clip_gradient": 0.06}
TOLERANCE = 1e-6
"""Absolute, and relative to the recorded weight."""


class Golden(NamedTuple):
    """A recorded run: the optimizer, its options, and the weights at the end of the two versions."""

    name: str
    options: dict[str, Any]
    plain: list[float]
    rescaled: list[float]


def gradient(t: int) -> list[list[float]]:
    """The gradient of update t, which counts from 1."""
    return [[0.1 * t, -0.2], [0.3 * (-1) ** t, 0.05]]


GOLDEN: dict[str, Golden] = {
    label: Golden(**run) for label, run in json.loads((DATA / "gluon_runs.json").read_text()).items()
}
"""Every optimizer of Gluon except SGLD, which draws noise."""


SHAPE = (7, 11)
RATES = [0.05, 0.02, 0.1, 0.005, 0.07, 0.01, 0.03]
BOUND = 0.4
_BETAS = CASES["lamb"].options
EVERY: dict[str, Case] = {
    **CASES,
    "lamb uncorrected": Case("lamb", {**_BETAS, "bias_correction": False}),
    "lamb above a bound": Case("lamb", {**_BETAS, "lower_bound": 30.0}),
    "lans below a bound": Case("lans", {**_BETAS, "upper_bound": 2.0}),
    "lars without momentum": Case("lars", {"eta": 0.1, "momentum": 0.0, "epsilon": 0.1}),
    "mxnet1:lars as in 2.x": Case(
        "mxnet1:lars", {**CASES["mxnet1:lars"].options, "momentum_correction": False}
    ),
}
each_case = pytest.mark.parametrize("label", EVERY)


def train(optimizer: Optimizer, weight: Tensor, grads: list[Tensor], name: str = "w") -> Tensor:
    """Update one key once for each gradient."""
    key = Key(optimizer, weight, name)
    for grad in grads:
        key.update(grad * optimizer.rescale_grad)
    return key.weight


@pytest.mark.parametrize("rescaled", [False, True], ids=["plain", "rescaled"])
@pytest.mark.parametrize("label", GOLDEN)
def test_five_updates_end_where_mxnet_ends(label: str, rescaled: bool) -> None:
    row = GOLDEN[label]
    optimizer = create(row.name, **row.options, **(RESCALED if rescaled else {}))
    grads = [torch.tensor(gradient(t)) for t in range(1, UPDATES + 1)]
    result = train(optimizer, torch.tensor(START), grads).reshape(-1)
    expected = torch.tensor(row.rescaled if rescaled else row.plain)
    torch.testing.assert_close(result, expected, rtol=TOLERANCE, atol=TOLERANCE)


def gradients(steps: int) -> list[Numbers]:
    """Multiples of 2**-7, some beyond the bound, with few changes of sign: exact in every dtype."""
    generator = np.random.default_rng(3)
    return [np.round((generator.random(SHAPE) * 0.6 + 0.05) * 128) / 128 for _ in range(steps)]


def start() -> Numbers:
    """Multiples of 2**-6 in [-1, 1]: exact in every dtype."""
    return np.round(np.random.default_rng(4).uniform(-1, 1, SHAPE) * 64) / 64


def decay(case: Case) -> float:
    return 0.0 if case.name.endswith("groupadagrad") else 0.1


def by_formula(
    case: Case, grads: list[Numbers], rates: list[float], wd: float, first: int = 1, **options: Any
) -> Numbers:
    w, state = start(), Zeros(product=1.0) if first > 1 else Zeros()
    for t, (g, lr) in enumerate(zip(grads, rates, strict=True), first):
        w = FORMULAS[case.name](w, g, state, t, lr, wd, {**case.options, **options, "key": "w"})
    return w


def by_shard(case: Case, dtype: torch.dtype, master: bool = False) -> Numbers:
    """The weights in float64 after as many updates of one key as there are RATES."""
    options = {**case.options, "wd": decay(case), "clip_gradient": BOUND, "multi_precision": master}
    optimizer = create(case.name, **options)
    key = Key(optimizer, torch.from_numpy(start()).to(dtype))
    for g, lr in zip(gradients(len(RATES)), RATES, strict=True):
        key.update(torch.from_numpy(g), lr=lr)
    assert not key.padding.any()
    return key.weight.double().numpy()


def off(result: Numbers, case: Case) -> float:
    """How far weights are from the formula's, relative to those above 1."""
    reference = by_formula(case, gradients(len(RATES)), RATES, decay(case), clip_gradient=BOUND)
    return float(np.max(np.abs(result - reference) / np.maximum(np.abs(reference), 1.0)))


def test_every_optimizer_without_noise_has_its_formula_and_was_recorded() -> None:
    family = (*gluon.FAMILY, *layerwise.FAMILY)
    names = {cls.name for cls in family} | {f"mxnet1:{cls.name}" for cls in family if cls.mxnet1 is not None}
    assert {row.name for row in GOLDEN.values()} == names - {"sgld", "mxnet1:sgld"}
    formulas = {case.name for case in CASES.values()}
    # Where MXNet 1.9.1 has no formula of its own, that of 2.x has cases enough.
    assert formulas | {f"mxnet1:{name}" for name in SAME_IN_MXNET1} == names - {"sgld", "mxnet1:sgld"}


@each_case
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 5e-6)], ids=["f64", "f32"]
)
def test_a_changing_learning_rate_follows_the_formula(label: str, dtype: torch.dtype, bound: float) -> None:
    assert off(by_shard(EVERY[label], dtype), EVERY[label]) <= bound


@pytest.mark.parametrize(
    ("label", "dtype", "master"), pairwise(EVERY, [torch.float16, torch.bfloat16], [True, False])
)
def test_half_precision_is_rounded_once_with_a_master(label: str, dtype: torch.dtype, master: bool) -> None:
    roundings = 1 if master else len(RATES)
    result = by_shard(EVERY[label], dtype, master)
    assert off(result, EVERY[label]) <= roundings * torch.finfo(dtype).eps
    assert np.any(result != start())


@pytest.mark.parametrize(
    "label", ["sgd", "nag", "dcasgd", "adam", "adamw", "adamax", "rmsprop", "ftml", "test", "lamb", "lars"]
)
def test_a_negative_learning_rate_climbs_as_the_formula_does(label: str) -> None:
    case, grads = CASES[label], gradients(1)
    optimizer = create(case.name, lr=-0.05, **case.options)
    result = train(optimizer, torch.from_numpy(start()), [torch.from_numpy(grads[0])])
    assert np.abs(result.numpy() - by_formula(case, grads, [-0.05], 0.0)).max() <= 1e-12


@pytest.mark.parametrize("label", ["ftml", "adam", "nadam", "lamb"])
def test_begin_num_update_counts_as_updates_that_came_before(label: str) -> None:
    case, grads = CASES[label], gradients(9)[6:]
    key = Key(create(case.name, lr=0.05, begin_num_update=6, **case.options), torch.from_numpy(start()))
    for grad in grads:
        key.update(torch.from_numpy(grad))
    assert np.abs(key.weight.numpy() - by_formula(case, grads, [0.05] * 3, 0.0, first=7)).max() <= 1e-11
    assert key.state["step"] == 3


def test_momentum_that_is_switched_on_later_starts_from_zero() -> None:
    key = Key(create("sgd", lr=0.5), torch.ones(1))
    for momentum in (0.0, 0.5, 0.5):
        key.update(torch.ones(1), momentum=momentum)
    assert key.weight.item() == 1.0 - 0.5 - 0.5 - (0.5 + 0.25)


@pytest.mark.parametrize("lr", [2.0, 0.7, 0.3, -0.05, 1e-3, 1e-6, 1e-9, 1e-12, 1e-18])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_a_rate_inside_the_momentum_keeps_its_digits_however_small(lr: float, dtype: torch.dtype) -> None:
    # From zero, so that the weight is nothing but the two updates.
    result = train(create("sgd", lr=lr, momentum=0.5), torch.zeros(32, dtype=dtype), [torch.ones(32)] * 2)
    bound = 4 * torch.finfo(dtype).eps
    assert result.tolist() == pytest.approx([-(1.0 + 1.5) * lr] * 32, rel=bound, abs=0.0)


@pytest.mark.parametrize("options", [{}, {"wd": 0.1}, {"lr": 3.0}, {"lr": 0.0}], ids=str)
def test_momentum_reads_a_gradient_in_place(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, grad, given = torch._fused_sgd_, torch.ones(32), list[Tensor]()

    def seen(weights: list[Tensor], grads: list[Tensor], *others: Any, **numbers: Any) -> None:
        given.extend(grads)
        kernel(weights, grads, *others, **numbers)

    optimizer = create("sgd", momentum=0.9, **options)
    monkeypatch.setattr(torch, "_fused_sgd_", seen)
    optimizer.update(torch.ones(32), grad, {}, optimizer.hyper)
    assert [one.data_ptr() for one in given] == [grad.data_ptr()]


def test_an_update_without_learning_rate_moves_no_weight() -> None:
    for case in CASES.values():
        if case.name in ("mxnet1:adadelta", "mxnet1:test"):  # which know none
            continue
        optimizer = create(case.name, lr=0.0, wd=decay(case) / 10)
        weight = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
        assert torch.equal(train(optimizer, weight, [torch.ones(2, 2)] * 2), weight), case.name


def test_a_constant_gradient_keeps_centered_rmsprop_finite() -> None:
    # The two averages end up equal, and rounding makes their difference negative.
    optimizer = create("rmsprop", centered=True, lr=1e-6, momentum=0.0)
    start = torch.linspace(1.0, 100.0, 64)
    assert train(optimizer, start, [start] * 300).isfinite().all()


def test_ftrl_leaves_a_weight_that_never_had_a_gradient_at_zero_even_without_beta() -> None:
    result = train(create("ftrl", beta=0.0), torch.tensor([0.0, 0.0]), [torch.tensor([0.0, 1.0])] * 2)
    assert result[0] == 0.0
    assert result[1] < 0.0


def test_ftrl_leaves_weights_where_they_are_once_the_rate_has_faded_to_nothing() -> None:
    key = Key(create("ftrl"), torch.ones(2))
    for lr in (1e-300, 1e-40, 0.0):
        key.update(torch.ones(2), lr=lr)
    assert key.weight.tolist() == [1.0, 1.0]


def test_weights_may_be_limited_to_more_than_their_dtype_holds() -> None:
    assert train(create("rmsprop", clip_weights=1e300), torch.ones(2), [torch.ones(2)]).isfinite().all()


def test_nadam_gives_every_key_its_own_momentum_schedule() -> None:
    optimizer = create("nadam", lr=0.1)
    slice_ = make_plan([TensorSpec(name, (3,), "float32") for name in "ab"], 1).slices[0]
    state, flat = empty(slice_), torch.zeros(slice_.length)
    for _ in range(4):
        update_slice(optimizer, slice_, flat, torch.ones(slice_.length), state, [optimizer.hyper] * 2)
    alone = train(create("nadam", lr=0.1), torch.zeros(3), [torch.ones(3)] * 4)
    for segment in slice_.segments:
        assert torch.equal(flat[segment.start : segment.start + 3], alone)


@pytest.mark.parametrize("suffix", ["gamma", "beta", "bias"])
def test_lars_gives_keys_with_such_names_the_plain_learning_rate(suffix: str) -> None:
    optimizer, grads = create("lars", lr=0.5), [torch.tensor([2.0, 4.0])]
    assert train(optimizer, torch.ones(2), grads, f"layer_{suffix}").tolist() == [0.0, -1.0]
    assert train(optimizer, torch.ones(2), grads, f"{suffix}_weight")[0] > 0.99


@pytest.mark.parametrize("name", ["lamb", "lans", "lars"])
def test_a_norm_of_zero_leaves_the_step_its_own_length(name: str) -> None:
    optimizer, zero = create(name, lr=0.5, wd=0.0), torch.zeros(2)
    moved = train(optimizer, zero, [torch.tensor([3.0, 4.0])])
    assert moved.isfinite().all()
    assert moved[0] < 0
    assert train(optimizer, torch.ones(2), [zero]).tolist() == [1.0, 1.0]


def test_a_norm_neither_overflows_nor_loses_small_addends() -> None:
    assert layerwise_norm(torch.full((4,), 3e30)) == pytest.approx(6e30)
    many = torch.full((300_000,), 1e-4)
    many[0] = 1e4
    assert layerwise_norm(many) ** 2 == pytest.approx(1e8 + 299_999 * 1e-8, rel=1e-12)


def test_groupadagrad_refuses_weight_decay_when_it_is_made_and_when_it_is_set_later() -> None:
    with pytest.raises(ConfigurationError, match=r"0\.1"):
        create("groupadagrad", wd=0.1)
    optimizer = create("groupadagrad")
    with pytest.raises(ConfigurationError, match=r"'w' has 0\.2"):
        optimizer.check_key("w", (2, 2), {**optimizer.hyper, "weight_decay": 0.2})


@pytest.mark.parametrize("option", ["lower_bound", "upper_bound"])
def test_a_bound_of_zero_is_none(option: str) -> None:
    weight, grads = torch.from_numpy(start()), [torch.from_numpy(g) for g in gradients(2)]
    without, with_zero = (train(create("lamb", **given), weight, grads) for given in ({}, {option: 0}))
    assert torch.equal(without, with_zero)
