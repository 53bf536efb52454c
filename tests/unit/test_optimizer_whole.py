"""LAMB, LANS, LARS and GroupAdaGrad against MXNet's trajectories and against their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer import Optimizer, State, create, create_from_spec, update_key
from kvstore_server.optimizer.layerwise import l2_norm
from tests.support.gluon_formulas import FORMULAS, Zeros
from tests.support.golden import GOLDEN, RESCALED, START, TOLERANCE, UPDATES, gradient

NAMES = ["lamb", "lans", "lars", "groupadagrad"]


def make(name: str, **options: Any) -> Optimizer:
    """With momentum and weight decay where the optimizer has them."""
    extra = {"lars": {"momentum": 0.9, "wd": 0.01}, "groupadagrad": {}}.get(name, {"wd": 0.01})
    return create(name, **{**extra, **options})


def train(
    optimizer: Optimizer,
    weight: Tensor,
    grads: list[Tensor],
    rates: list[float] | None = None,
    key: str = "w",
) -> tuple[Tensor, State]:
    """Update one key once for each gradient; return a changed copy of the weights, and the state."""
    weight, state = weight.clone(), State()
    for i, grad in enumerate(grads):
        if rates is not None:
            optimizer.lr = rates[i]
        change = grad.to(torch.promote_types(grad.dtype, torch.float32)) * optimizer.rescale_grad
        update_key(optimizer, weight, change, state, {**optimizer.hyper, "key": key})
    return weight, state


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rescaled", [False, True])
def test_five_updates_end_where_mxnet_ends(name: str, rescaled: bool) -> None:
    row = GOLDEN[name]
    optimizer = create(name, **row.options, **(RESCALED if rescaled else {}))
    grads = [torch.tensor(gradient(t)) for t in range(1, UPDATES + 1)]
    result, _ = train(optimizer, torch.tensor(START), grads)
    expected = torch.tensor(row.rescaled if rescaled else row.plain)
    torch.testing.assert_close(result.reshape(-1), expected, rtol=TOLERANCE, atol=TOLERANCE)


ADAPTIVE = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3, "wd": 0.1}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("lamb", {**ADAPTIVE}),
    ("lamb", {**ADAPTIVE, "bias_correction": False, "clip_gradient": 0.5}),
    ("lamb", {**ADAPTIVE, "lower_bound": 30.0}),
    ("lamb", {**ADAPTIVE, "upper_bound": 2.0, "lower_bound": 1.0}),
    ("lans", {**ADAPTIVE}),
    ("lans", {**ADAPTIVE, "clip_gradient": 0.1, "upper_bound": 2.0}),
    ("lars", {"eta": 0.1, "momentum": 0.9, "wd": 0.1, "epsilon": 0.1}),
    ("lars", {"eta": 0.1, "momentum": 0.0, "wd": 0.1, "epsilon": 0.1, "clip_gradient": 0.5}),
    ("groupadagrad", {"epsilon": 0.1}),
    ("groupadagrad", {"epsilon": 0.1, "clip_gradient": 0.5}),
]
RATES = [0.1, 0.01, 0.2, 0.0, -0.1, 0.05, 0.3, 0.1]


def reference(
    name: str, options: dict[str, Any], weight: Tensor, grads: list[Tensor], rates: list[float]
) -> Tensor:
    w, state, wd = weight.double().numpy(), Zeros(), options.get("wd", 0.0)
    for t, (grad, lr) in enumerate(zip(grads, rates, strict=True), 1):
        w = FORMULAS[name](w, grad.double().numpy(), state, t, lr, wd, {**options, "key": "w"})
    return torch.from_numpy(w)


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(7, 11, generator=generator, dtype=torch.float64).to(dtype)
    return weight, [torch.randn(7, 11, generator=generator, dtype=torch.float64).to(dtype) for _ in RATES]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_changing_learning_rate_follows_the_formula(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    weight, grads = problem(dtype)
    result, _ = train(create(name, **options), weight, grads, RATES)
    error = (result.double() - reference(name, options, weight, grads, RATES)).abs().max()
    assert error <= (1e-12 if dtype == torch.float64 else 5e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_with_a_float32_master_are_the_rounded_float32_trajectory(
    name: str, dtype: torch.dtype
) -> None:
    options = next(given for other, given in OPTIONS if other == name)
    weight, grads = problem(dtype)
    result, state = train(create(name, multi_precision=True, **options), weight, grads, RATES)
    assert state.master is not None
    assert (state.master.double() - reference(name, options, weight, grads, RATES)).abs().max() <= 5e-6
    assert torch.equal(result, state.master.to(dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_without_a_master_move_as_the_formula_up_to_rounding(
    name: str, dtype: torch.dtype
) -> None:
    options = next(given for other, given in OPTIONS if other == name)
    weight, grads = problem(dtype)
    result, state = train(create(name, **options), weight, grads, RATES)
    expected = reference(name, options, weight, grads, RATES)
    assert state.master is None
    rounding = len(RATES) * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())
    assert (result.double() - expected).abs().max() <= rounding < (weight.double() - expected).abs().max()


def test_replaced_half_weights_win_over_the_master() -> None:
    weight, state = torch.ones(2, 2, dtype=torch.float16), State()
    optimizer = make("lars", multi_precision=True)
    update_key(optimizer, weight, torch.ones(2, 2), state, optimizer.hyper)
    weight[0] = 8.0
    update_key(
        optimizer, weight, torch.zeros(2, 2), state, {**optimizer.hyper, "momentum": 0.0, "weight_decay": 0.0}
    )
    assert state.master is not None
    assert state.master[0].tolist() == [8.0, 8.0]
    assert weight[0].tolist() == [8.0, 8.0]


@pytest.mark.parametrize("suffix", ["gamma", "beta", "bias"])
def test_lars_gives_keys_with_such_names_the_plain_learning_rate(suffix: str) -> None:
    optimizer = create("lars", lr=0.5)
    grads = [torch.tensor([2.0, 4.0])]
    assert train(optimizer, torch.ones(2), grads, key=f"layer_{suffix}")[0].tolist() == [0.0, -1.0]
    assert train(optimizer, torch.ones(2), grads, key=f"{suffix}_weight")[0][0] > 0.99


def test_lars_takes_the_norm_of_the_gradient_before_it_is_clipped() -> None:
    optimizer = create("lars", lr=1.0, eta=1.0, epsilon=0.0, clip_gradient=1.0)
    result, _ = train(optimizer, torch.tensor([3.0, 4.0]), [torch.tensor([0.0, 10.0])])
    assert result.tolist() == [3.0, 3.5]


@pytest.mark.parametrize("name", ["lamb", "lans", "lars"])
def test_a_norm_of_zero_leaves_the_step_its_own_length(name: str) -> None:
    optimizer = create(name, lr=0.5, wd=0.0)
    zero, grad = torch.zeros(2), torch.tensor([3.0, 4.0])
    moved, _ = train(optimizer, zero, [grad])
    assert moved.isfinite().all()
    assert moved[0] < 0
    still, _ = train(optimizer, torch.ones(2), [zero])
    assert still.tolist() == [1.0, 1.0]


def test_norms_are_those_of_the_whole_key_not_of_its_first_axis() -> None:
    optimizer = create("lamb", lr=1.0, epsilon=0.0, wd=0.0)
    weight = torch.tensor([[[3.0]], [[4.0]]])
    moved, _ = train(optimizer, weight, [torch.ones_like(weight)])
    assert torch.allclose(weight - moved, torch.full_like(weight, 5 / 2**0.5))


def test_a_norm_neither_overflows_nor_loses_small_addends() -> None:
    assert l2_norm(torch.full((4,), 3e30)) == pytest.approx(6e30)
    many = torch.full((300_000,), 1e-4)
    many[0] = 1e4
    assert l2_norm(many) ** 2 == pytest.approx(1e8 + 299_999 * 1e-8, rel=1e-12)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_number_of_threads(name: str, threads: Callable[[int], None]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(317, 331, generator=generator)
    grads = [torch.randn(317, 331, generator=generator) for _ in range(2)]
    results = []
    for count in (1, 3):
        threads(count)
        results.append(train(make(name), weight, grads)[0])
    assert torch.equal(*results)


def test_groupadagrad_names_the_key_that_is_no_matrix() -> None:
    optimizer, weight = create("groupadagrad"), torch.ones(3)
    with pytest.raises(ConfigurationError, match=r"'fc\.bias' has the shape \(3,\)"):
        update_key(optimizer, weight, torch.ones(3), State(), {**optimizer.hyper, "key": "fc.bias"})
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_groupadagrad_refuses_weight_decay_when_it_is_made_and_when_it_is_set_later() -> None:
    with pytest.raises(ConfigurationError, match=r"no weight decay.*0\.1"):
        create("groupadagrad", wd=0.1)
    optimizer = create("groupadagrad")
    with pytest.raises(ConfigurationError, match=r"'w' has 0\.2"):
        optimizer.check_key("w", (2, 2), {**optimizer.hyper, "weight_decay": 0.2})


@pytest.mark.parametrize("option", ["lower_bound", "upper_bound"])
def test_a_bound_may_be_none_or_zero_but_not_negative(option: str) -> None:
    weight, grads = problem()
    expected, _ = train(create("lamb"), weight, grads)
    for value in (None, 0):
        assert torch.equal(train(create("lamb", **{option: value}), weight, grads)[0], expected)
    with pytest.raises(ConfigurationError, match=option):
        create("lamb", **{option: -1.0})


@pytest.mark.parametrize("name", NAMES)
def test_a_description_rebuilds_the_optimizer_with_all_its_numbers(name: str) -> None:
    optimizer = make(name, lr=0.3, epsilon=1e-3, clip_gradient=0.5, multi_precision=True, begin_num_update=4)
    rebuilt = create_from_spec(optimizer.spec())
    assert type(rebuilt) is type(optimizer)
    assert rebuilt.spec() == optimizer.spec()
    assert not rebuilt.elementwise


def test_updates_before_the_first_one_count_in_the_bias_correction() -> None:
    weight, grads = problem()
    later, _ = train(create("lamb", begin_num_update=3), weight, grads[:1])
    options = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6}
    expected = FORMULAS["lamb"](weight.numpy(), grads[0].numpy(), Zeros(), 4, 0.001, 0.0, options)
    assert (later - torch.from_numpy(expected)).abs().max() <= 1e-12
