"""torch's classes that need whole keys, its sparse gradients, and foreign classes, against torch's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from kvstore_server.errors import ConfigurationError, OptimizerError
from kvstore_server.optimizer import (
    Optimizer,
    State,
    create,
    create_from_spec,
    register,
    registry,
    spec_for_store,
    update_key,
    update_rows,
)
from kvstore_server.optimizer.torch_family import ELEMENTWISE, WHOLE

Case = tuple[type[optim.Optimizer], dict[str, Any]]


class Centered(optim.Optimizer):
    """A foreign class that is not elementwise, counts steps in a tensor and starts its state in the first step."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if len(state) == 0:
                    state["step"], state["mean"] = torch.tensor(0.0), torch.zeros(param.shape[-1])
                state["step"] += 1
                state["mean"].lerp_(param.grad.reshape(-1, param.shape[-1]).mean(dim=0), group["beta"])
                param.sub_((param.grad - state["mean"]) * group["lr"] / state["step"])


WHOLE_CASES: list[Case] = [
    (optim.Muon, dict(lr=0.1)),
    (optim.Muon, dict(lr=0.1, nesterov=False, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")),
    (optim.Adafactor, dict(lr=0.1, weight_decay=0.1)),
    (optim.Adafactor, dict(lr=0.1, maximize=True, d=1.5, eps=(1e-4, 1e-2), beta2_decay=-0.5)),
    (Centered, dict(lr=0.3, beta=0.7)),
]
SPARSE_CASES: list[Case] = [
    (optim.SGD, dict(lr=0.1)),
    (optim.SGD, dict(lr=0.1, momentum=0.9)),
    (optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    (optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.5, maximize=True)),
    (optim.Adagrad, dict(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5)),
    (optim.SparseAdam, dict(lr=0.1, betas=(0.5, 0.7))),
    (optim.SparseAdam, dict(lr=0.1, maximize=True)),
]
CHECKED: Any = torch.sparse.check_sparse_tensor_invariants
ROWS = [[1], [0, 1, 5], [], [2, 5], [5], [0, 1, 2, 3, 4, 5]]


def named(case: Case) -> str:
    return f"{case[0].__name__}-{'-'.join(sorted(case[1]))}"


def filled(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sparse(rows: list[int], values: Tensor, num_rows: int) -> Tensor:
    shape = (num_rows, *values.shape[1:])
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, shape, is_coalesced=True, check_invariants=False
    )


def same_state(mine: State, theirs: dict[str, Any]) -> bool:
    """Whether all of torch's own entries are here with the same bits; its step count is `State.step`."""
    names = [name for name, value in theirs.items() if name != "step" and value is not None]
    dense = {
        name: value.to_dense() if value.is_sparse else value
        for name, value in theirs.items()
        if name in names
    }
    return all(torch.equal(torch.as_tensor(mine.values[name]), dense[name]) for name in names)


@pytest.mark.parametrize("case", WHOLE_CASES, ids=named)
def test_six_updates_of_a_whole_key_equal_torchs(case: Case) -> None:
    cls, options = case
    optimizer = create(cls, **options)
    assert not optimizer.elementwise
    weight, state = filled(4, 6, seed=0), State()
    param = weight.clone().requires_grad_()
    oracle = cls([param], **options)
    for step in range(6):
        oracle.param_groups[0]["lr"] = 0.1 * step
        grad = filled(4, 6, seed=step + 1)
        param.grad = grad.clone()
        oracle.step()
        update_key(optimizer, weight, grad, state, {**optimizer.hyper, "lr": 0.1 * step, "key": "w"})
    assert torch.equal(weight, param)
    assert same_state(state, oracle.state[param])


def test_adafactor_updates_vectors_and_scalars_too() -> None:
    optimizer = create("torch:adafactor", lr=0.1)
    for shape in ((5,), (), (2, 3, 4)):
        weight, param = filled(*shape, seed=0), filled(*shape, seed=0).requires_grad_()
        param.grad = torch.ones(shape)
        oracle: optim.Optimizer = optim.Adafactor([param], lr=0.1)
        oracle.step()
        update_key(optimizer, weight, torch.ones(shape), State(), optimizer.hyper)
        assert torch.equal(weight, param)


def test_every_class_of_torch_but_lbfgs_has_a_way_to_run() -> None:
    known = {v for v in vars(optim).values() if isinstance(v, type) and issubclass(v, optim.Optimizer)}
    assert known - {optim.Optimizer, optim.LBFGS} == {*ELEMENTWISE, *WHOLE}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_muon_moves_half_weights_through_their_float32_master(dtype: torch.dtype) -> None:
    optimizer = create("torch:Muon", lr=0.1, multi_precision=True)
    half, state = filled(4, 6, seed=0).to(dtype), State()
    param = half.float().requires_grad_()
    oracle: optim.Optimizer = optim.Muon([param], lr=0.1)
    for step in range(3):
        param.grad = filled(4, 6, seed=step)
        update_key(optimizer, half, param.grad.clone(), state, optimizer.hyper)
        oracle.step()
    assert state.master is not None
    assert torch.equal(state.master, param)
    assert torch.equal(half, param.to(dtype))


def test_muon_names_the_key_that_is_no_matrix() -> None:
    optimizer, weight = create(optim.Muon), torch.ones(3)
    with pytest.raises(ConfigurationError, match=r"Muon cannot update key 'bias' of shape \(3,\): .*2D"):
        update_key(optimizer, weight, torch.ones(3), State(), {**optimizer.hyper, "key": "bias"})
    optimizer.check_key("weight", (3, 3), optimizer.hyper)


def test_a_whole_key_class_travels_as_a_description() -> None:
    optimizer = create("torch:Adafactor", lr=0.5, eps=(None, 0.1))
    rebuilt = create_from_spec(optimizer.spec())
    assert rebuilt.hyper == optimizer.hyper
    assert not rebuilt.elementwise


@pytest.mark.parametrize("case", SPARSE_CASES, ids=named)
def test_updates_by_sparse_gradients_equal_torchs(case: Case) -> None:
    cls, options = case
    optimizer = create(cls, **options)
    weight, state = filled(6, 3, seed=0), State()
    param = weight.clone().requires_grad_()
    oracle = cls([param], **options)
    for step, rows in enumerate(ROWS):
        values = filled(len(rows), 3, seed=step + 1)
        param.grad = sparse(rows, values.clone(), 6)
        with CHECKED(True):
            oracle.step()
        update_rows(optimizer, weight, torch.tensor(rows, dtype=torch.int64), values, state, optimizer.hyper)
    assert torch.equal(weight, param)
    assert same_state(state, oracle.state[param])
    assert all(not value.is_sparse for value in state.values.values() if isinstance(value, Tensor))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sparse_gradients_of_other_dtypes_move_the_rows_they_have(dtype: torch.dtype) -> None:
    compute = torch.promote_types(dtype, torch.float32)
    weight, before = filled(6, 3, seed=0).to(dtype), filled(6, 3, seed=0).to(dtype)
    param = before.to(compute).requires_grad_()
    param.grad = sparse([2], filled(1, 3, seed=1).to(compute), 6)
    oracle: optim.Optimizer = optim.SparseAdam([param], lr=0.1)
    oracle.step()
    optimizer = create("torch:SparseAdam", lr=0.1)
    update_rows(
        optimizer, weight, torch.tensor([2]), filled(1, 3, seed=1).to(compute), State(), optimizer.hyper
    )
    assert torch.equal(weight, param.to(dtype))
    assert torch.equal(weight[3:], before[3:])


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adagrad, optim.Adam])
def test_a_sparse_gradient_that_torchs_class_would_refuse_counts_as_dense(cls: Any) -> None:
    optimizer = create(cls, lr=0.1, weight_decay=0.1)
    weight, values = filled(6, 3, seed=0), filled(2, 3, seed=1)
    param = weight.clone().requires_grad_()
    param.grad = sparse([0, 4], values.clone(), 6).to_dense()
    cls([param], lr=0.1, weight_decay=0.1, fused=True).step()
    update_rows(optimizer, weight, torch.tensor([0, 4]), values, State(), optimizer.hyper)
    assert torch.allclose(weight, param, rtol=1e-6, atol=1e-7)


def test_dense_and_sparse_gradients_of_torchs_sgd_may_alternate() -> None:
    optimizer = create("torch:SGD", lr=0.1, momentum=0.9, nesterov=True)
    mixed, dense, states = filled(6, 3, seed=0), filled(6, 3, seed=0), (State(), State())
    for step, rows in enumerate(ROWS):
        values = filled(len(rows), 3, seed=step + 1)
        whole = sparse(rows, values, 6).to_dense()
        update_key(optimizer, dense, whole.clone(), states[1], optimizer.hyper)
        if step % 2:
            update_key(optimizer, mixed, whole, states[0], optimizer.hyper)
        else:
            update_rows(
                optimizer, mixed, torch.tensor(rows, dtype=torch.int64), values, states[0], optimizer.hyper
            )
    assert torch.allclose(mixed, dense, rtol=1e-6, atol=1e-6)


def test_sparse_adam_names_the_key_whose_gradient_is_dense() -> None:
    optimizer, weight = create("torch:SparseAdam"), torch.ones(2, 2)
    with pytest.raises(ConfigurationError, match="sparse gradients only, and that of 'emb' is dense"):
        update_key(optimizer, weight, torch.ones(2, 2), State(), {**optimizer.hyper, "key": "emb"})
    assert (weight == 1).all()


@pytest.fixture
def _clean_registry() -> Iterator[None]:
    names, declared = dict(registry._registry), set(registry._declared)
    yield
    registry._registry.clear()
    registry._registry.update(names)
    registry._declared.clear()
    registry._declared.update(declared)


@pytest.mark.usefixtures("_clean_registry")
def test_a_foreign_class_gets_whole_keys_unless_it_is_declared_elementwise() -> None:
    assert not create(Centered).elementwise
    assert not create(Centered([torch.zeros(1, 1)], lr=0.5)).elementwise
    register(Centered, elementwise=False)
    assert not create("torch:Centered").elementwise
    register(Centered)
    assert create("torch:Centered").elementwise
    assert create(Centered).may_raise


@pytest.mark.usefixtures("_clean_registry")
def test_what_is_known_of_a_class_cannot_be_declared_otherwise() -> None:
    class Whole(Optimizer):
        elementwise = False

    wrong: list[tuple[Any, bool]] = [(optim.Muon, True), (optim.SGD, False), (Whole, True)]
    for cls, elementwise in wrong:
        with pytest.raises(ConfigurationError, match=f"elementwise={elementwise}"):
            register(cls, elementwise=elementwise)
        register(cls)
    assert not create("torch:Muon").elementwise
    assert not create("whole").elementwise


class Line(optim.LBFGS):
    """A subclass of a class that no store can run."""


@pytest.mark.parametrize("use", ["torch:LBFGS", optim.LBFGS, Line])
def test_a_class_that_looks_at_the_whole_model_is_refused_with_the_reason(use: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot run on a store, because.*whole model.*one of SGD"):
        spec_for_store(create(use))
    if isinstance(use, type):
        with pytest.raises(ConfigurationError, match="cannot run on a store"):
            register(use)


class Sharing(Centered):
    """A foreign class that keeps something elsewhere than in the state of a parameter."""

    where = "group"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.where == "group":
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        elif self.where == "attribute":
            self.count = getattr(self, "count", 0) + 1
        else:
            self.state["total"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("where", "match"), [("group", "'k'"), ("attribute", "'count'"), ("state", "'total'")]
)
def test_a_foreign_class_that_keeps_something_for_all_parameters_is_refused(where: str, match: str) -> None:
    optimizer = create(type("Sharing", (Sharing,), {"where": where}))
    with pytest.raises(OptimizerError, match=f"{where}.* {match}.*all parameters share"):
        update_key(optimizer, torch.ones(2, 2), torch.ones(2, 2), State(), optimizer.hyper)


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_an_empty_key_is_left_alone(name: str) -> None:
    state = State()
    optimizer = create(f"torch:{name}")
    update_key(optimizer, torch.zeros(4, 0), torch.zeros(4, 0), state, {**optimizer.hyper, "key": "empty"})
    assert state.step == 1
    assert state.values == {}
