"""Gluon's optimizers against runs recorded from MXNet 2.0.0b1 and 1.9.1, and their formulas in float64 NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer import Optimizer, create, gluon, layerwise
from kvstore_server.optimizer.layerwise import l2_norm
from kvstore_server.plan import TensorSpec, make_plan
from tests.support.gluon_cases import CASES, SAME_IN_MXNET1, Case
from tests.support.gluon_formulas import FORMULAS, Numbers, Zeros
from tests.support.optimizer_slices import Key, empty, update_slice
from tests.support.pairwise import pairwise

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


def _row(name: str, plain: list[float], rescaled: list[float], **options: Any) -> Golden:
    decay = {} if name.endswith("groupadagrad") else {"wd": 0.01}
    return Golden(name, {**decay, **options}, plain, rescaled)


GOLDEN: dict[str, Golden] = {
    "sgd": _row(
        "sgd",
        [0.8452098, -1.8902199, 0.5274451, 2.9600801],
        [0.9660659, -1.9600798, 0.5034931, 2.9725544],
    ),
    "sgd with momentum": _row(
        "sgd",
        [0.6703619, -1.7115114, 0.5670984, 2.8950951],
        [0.9122861, -1.895095, 0.5081744, 2.9278779],
        momentum=0.9,
    ),
    "nag": _row(
        "nag",
        [0.5491129, -1.6312518, 0.5875915, 2.8659096],
        [0.8873225, -1.8659097, 0.5108138, 2.9078131],
    ),
    "signum": _row(
        "signum",
        [0.949951, -1.949901, 0.5099747, 2.9498508],
        [0.949951, -1.949901, 0.5099747, 2.9498508],
        wd_lh=0.001,
    ),
    "ftml": _row(
        "ftml",
        [0.9905028, -1.9924293, 0.5020744, 2.9924304],
        [0.9921847, -1.99243, 0.5017779, 2.9924309],
    ),
    "dcasgd": _row(
        "dcasgd",
        [0.670572, -1.7115837, 0.5670487, 2.8950987],
        [0.9122883, -1.8950986, 0.5081741, 2.9278789],
        momentum=0.9,
    ),
    "adam": _row(
        "adam",
        [0.9951315, -1.9949998, 0.5013705, 2.9950004],
        [0.9949888, -1.9949999, 0.5011101, 2.9950004],
    ),
    "adamw": _row(
        "adamw",
        [0.9951387, -1.9949782, 0.5014293, 2.9949687],
        [0.9949794, -1.9949795, 0.5014288, 2.9949706],
    ),
    "adabelief": _row(
        "adabelief",
        [0.9942558, -1.9939643, 0.5014972, 2.9944904],
        [0.9948598, -1.9948599, 0.5013638, 2.9949992],
    ),
    "adamax": _row(
        "adamax",
        [0.9924207, -1.9899992, 0.502725, 2.9899976],
        [0.9903248, -1.9899977, 0.5021865, 2.9899967],
    ),
    "nadam": _row(
        "nadam",
        [0.9950333, -1.9959507, 0.5009817, 2.9959509],
        [0.9958344, -1.9959508, 0.5008034, 2.9959509],
    ),
    "adadelta": _row(
        "adadelta",
        [0.9760768, -1.9835716, 0.5030993, 2.9835885],
        [0.982697, -1.9835883, 0.5024565, 2.9836068],
    ),
    "adagrad": _row(
        "adagrad",
        [0.9592636, -1.9676919, 0.5078456, 2.9677072],
        [0.9666167, -1.9677072, 0.506532, 2.9677181],
    ),
    "rmsprop": _row(
        "rmsprop",
        [0.9868495, -1.9893557, 0.5025409, 2.9893568],
        [0.9890326, -1.9893571, 0.5021195, 2.9893579],
    ),
    "rmsprop centered": _row(
        "rmsprop",
        [0.9595566, -1.9654574, 0.5091119, 2.9654658],
        [0.9644569, -1.9654658, 0.508047, 2.9654715],
        centered=True,
    ),
    "ftrl": _row(
        "ftrl",
        [-0.0106842, -0.2570632, 0.1354728, 0.1187152],
        [0.0201678, -0.0849095, 0.0328256, 0.0601378],
    ),
    "lamb": _row(
        "lamb",
        [0.9897763, -1.9893521, 0.5027325, 2.989248],
        [0.9895421, -1.9894627, 0.5027211, 2.9893596],
    ),
    "lans": _row(
        "lans",
        [0.9894094, -1.989664, 0.5027814, 2.9895599],
        [0.9896647, -1.9895625, 0.5026319, 2.98946],
    ),
    "lars": _row(
        "lars",
        [0.997565, -1.9977098, 0.5006082, 2.9991674],
        [0.9987196, -1.9984586, 0.5001458, 2.9989402],
        momentum=0.9,
    ),
    "groupadagrad": _row(
        "groupadagrad",
        [0.9610049, -1.9665232, 0.5114032, 2.9924865],
        [0.9680223, -1.9662117, 0.5106711, 2.9824219],
    ),
    "test": _row(
        "test",
        [0.9845021, -1.9890022, 0.5027494, 2.996001],
        [0.9920011, -1.9940014, 0.5012497, 2.9972506],
    ),
    "mxnet1:sgd": _row(
        "mxnet1:sgd",
        [0.9845021, -1.9890022, 0.5027494, 2.996001],
        [0.9966006, -1.9960008, 0.5003499, 2.9972506],
    ),
    "mxnet1:sgd with momentum": _row(
        "mxnet1:sgd",
        [0.9669878, -1.9710897, 0.506738, 2.9894874],
        [0.9912106, -1.9894872, 0.5008219, 2.9927723],
        momentum=0.9,
    ),
    "mxnet1:nag": _row(
        "mxnet1:nag",
        [0.984502, -1.9890022, 0.5027494, 2.996001],
        [0.9966006, -1.9960008, 0.5003498, 2.9972498],
    ),
    "mxnet1:nag with momentum": _row(
        "mxnet1:nag",
        [0.954801, -1.9629941, 0.5088099, 2.9865432],
        [0.9886935, -1.9865433, 0.5010892, 2.9907486],
        momentum=0.9,
    ),
    "mxnet1:signum": _row(
        "mxnet1:signum",
        [0.949951, -1.949901, 0.5099747, 2.9498508],
        [0.949951, -1.949901, 0.5099747, 2.9498508],
        wd_lh=0.001,
    ),
    "mxnet1:ftml": _row(
        "mxnet1:ftml",
        [0.9620123, -1.9697226, 0.5082946, 2.9697349],
        [0.9697152, -1.9697149, 0.5085937, 2.9697447],
    ),
    "mxnet1:dcasgd": _row(
        "mxnet1:dcasgd",
        [0.9845028, -1.9890023, 0.5027495, 2.996001],
        [0.9966006, -1.9960008, 0.5003499, 2.9972506],
    ),
    "mxnet1:adam": _row(
        "mxnet1:adam",
        [0.9951315, -1.9949998, 0.5013705, 2.9950004],
        [0.9950001, -1.9949998, 0.501435, 2.9950004],
    ),
    "mxnet1:adamax": _row(
        "mxnet1:adamax",
        [0.9924207, -1.9899992, 0.502725, 2.9899976],
        [0.9900001, -1.9900001, 0.5028698, 2.9899967],
    ),
    "mxnet1:nadam": _row(
        "mxnet1:nadam",
        [0.9950333, -1.9959507, 0.5009817, 2.9959509],
        [0.9959506, -1.9959506, 0.501026, 2.9959509],
    ),
    "mxnet1:adadelta": _row(
        "mxnet1:adadelta",
        [0.8759396, -1.8510925, 0.4855911, 2.8030403],
        [0.8977432, -1.8517439, 0.4854563, 2.8057833],
    ),
    "mxnet1:adagrad": _row(
        "mxnet1:adagrad",
        [0.9585021, -1.9666911, 0.5079221, 2.9661915],
        [0.9659161, -1.9666915, 0.5079219, 2.966193],
    ),
    "mxnet1:rmsprop": _row(
        "mxnet1:rmsprop",
        [0.9868495, -1.9893557, 0.5025409, 2.989357],
        [0.9893548, -1.9893547, 0.5026464, 2.9893584],
    ),
    "mxnet1:rmsprop centered": _row(
        "mxnet1:rmsprop",
        [0.9595566, -1.9654574, 0.5091119, 2.9654658],
        [0.9654532, -1.9654533, 0.5093803, 2.9654715],
        centered=True,
    ),
    "mxnet1:ftrl": _row(
        "mxnet1:ftrl",
        [-0.0106842, -0.2570632, 0.1354728, 0.1187152],
        [0.0201678, -0.0849095, 0.0328256, 0.0601378],
    ),
    "mxnet1:lamb": _row(
        "mxnet1:lamb",
        [0.9897763, -1.9893521, 0.5027325, 2.989248],
        [0.9895421, -1.9894627, 0.5027211, 2.9893596],
    ),
    "mxnet1:lars": _row(
        "mxnet1:lars",
        [0.9997565, -1.999771, 0.5000609, 2.9999166],
        [0.9998719, -1.9998457, 0.5000146, 2.9998941],
        momentum=0.9,
    ),
    "mxnet1:groupadagrad": _row(
        "mxnet1:groupadagrad",
        [0.9610072, -1.9665264, 0.5114021, 2.9924867],
        [0.9680483, -1.9662406, 0.5106466, 2.9824448],
    ),
    "mxnet1:test": _row(
        "mxnet1:test", [2.5000002, -3.0000002, 0.2, 3.2499998], [1.75, -2.4999995, 0.35, 3.1250005]
    ),
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
def test_half_precision_is_rounded_once_with_a_master_and_else_in_every_update(
    label: str, dtype: torch.dtype, master: bool
) -> None:
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
def test_momentum_reads_a_gradient_where_it_lies(
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
    piece = make_plan([TensorSpec(name, (3,), "float32") for name in "ab"], 1).slices[0]
    state, flat = empty(piece), torch.zeros(piece.length)
    for _ in range(4):
        update_slice(optimizer, piece, flat, torch.ones(piece.length), state, [optimizer.hyper] * 2)
    alone = train(create("nadam", lr=0.1), torch.zeros(3), [torch.ones(3)] * 4)
    for segment in piece.segments:
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
    assert l2_norm(torch.full((4,), 3e30)) == pytest.approx(6e30)
    many = torch.full((300_000,), 1e-4)
    many[0] = 1e4
    assert l2_norm(many) ** 2 == pytest.approx(1e8 + 299_999 * 1e-8, rel=1e-12)


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
