"""torch's classes, their sparse gradients, and foreign classes, against torch's own loop over the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from kvstore_server.errors import ConfigurationError, OptimizerError
from kvstore_server.optimizer import Optimizer, State, apply_update, checked_optimizer_spec, create, register
from kvstore_server.optimizer.rows import GradFragments
from kvstore_server.optimizer.torch_family import ELEMENTWISE, WHOLE, TorchOptimizer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer import Trainer
from tests.support.optimizer_slices import Key, empty, numbers, state_of, update_slice

Case = tuple[type[optim.Optimizer], dict[str, Any]]


SHAPES = [(3, 5), (1,), (40,), (), (7, 2)]
CASES: list[Case] = [
    (optim.SGD, dict(lr=0.1, weight_decay=0.1)),
    (optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.1)),
    (optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3, maximize=True)),
    (optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, fused=False)),
    (optim.SGD, dict(lr=0.1, momentum=0.9, foreach=True)),
    (optim.Adam, dict(lr=0.1, weight_decay=0.1)),
    (optim.Adam, dict(lr=0.1, amsgrad=True, betas=(0.5, 0.7))),
    (optim.Adam, dict(lr=0.1, maximize=True, decoupled_weight_decay=True, weight_decay=0.1)),
    (optim.Adam, dict(lr=0.1, capturable=True, eps=0.1)),
    (optim.RAdam, dict(lr=0.1, capturable=True, eps=0.1)),
    (optim.AdamW, dict(lr=0.1, weight_decay=0.1)),
    (optim.AdamW, dict(lr=0.1, amsgrad=True, fused=True)),
    (optim.Adagrad, dict(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5, weight_decay=0.1)),
    (optim.Adadelta, dict(lr=0.5, rho=0.8, weight_decay=0.1)),
    (optim.Adamax, dict(lr=0.1, weight_decay=0.1)),
    (optim.NAdam, dict(lr=0.1, momentum_decay=0.1, weight_decay=0.1)),
    (optim.NAdam, dict(lr=0.1, decoupled_weight_decay=True, weight_decay=0.1)),
    (optim.RAdam, dict(lr=0.1, weight_decay=0.1)),
    (optim.RAdam, dict(lr=0.1, betas=(0.5, 0.9), decoupled_weight_decay=True, weight_decay=0.1)),
    (optim.RMSprop, dict(lr=0.1, weight_decay=0.1)),
    (optim.RMSprop, dict(lr=0.1, centered=True, momentum=0.9, alpha=0.5)),
    (optim.Rprop, dict(lr=0.1, etas=(0.4, 1.3))),
    (optim.ASGD, dict(lr=0.1, t0=5, weight_decay=0.1, alpha=0.6)),
]


def named(case: Case) -> str:
    return f"{case[0].__name__}-{'-'.join(sorted(case[1]))}"


def schedule(step: int, key: int) -> bool:
    """Key 1 starts at step 3, key 2 leaves out every fourth step, the others are always there."""
    return not (key == 1 and step < 3) and not (key == 2 and step % 4 == 1)


def torch_loop(
    cls: type[optim.Optimizer], options: dict[str, Any], weights: list[Tensor], grads: list[list[Tensor]]
) -> tuple[list[Tensor], optim.Optimizer]:
    """torch's own unfused optimizer over separate parameters, key i with i + 1 times the learning rate."""
    params = [weight.clone().requires_grad_() for weight in weights]
    plain = {key: v for key, v in options.items() if key not in ("fused", "foreach", "capturable")}
    groups = [{"params": [p], "lr": options["lr"] * (i + 1)} for i, p in enumerate(params)]
    oracle = cls(groups, **plain)
    for step, row in enumerate(grads):
        for i, param in enumerate(params):
            param.grad = row[i].clone() if schedule(step, i) else None
        oracle.step()
    return params, oracle


@pytest.mark.parametrize(
    "case", [one for one in CASES if create(one[0], **one[1]).takes_pieces], ids=lambda case: named(case)
)
@pytest.mark.parametrize(("scale", "bound"), [(1.0, None), (0.5, None), (2.0, 0.7)])
def test_fragments_of_a_gradient_have_the_bits_of_one_without_cuts(
    case: Case, scale: float, bound: float | None
) -> None:
    torch.manual_seed(4)
    optimizer, sizes = create(case[0], **case[1]), [16, 320, 64]
    hyper = {**optimizer.hyper, "clip_gradient": bound}
    whole, states = torch.randn(400), (State(), State())
    cut = whole.clone()
    for _ in range(4):
        grad = torch.randn(400)
        fragments = GradFragments(list(grad.clone().split(sizes)))
        ready = (grad * scale).clamp(-bound, bound) if bound else grad * scale
        apply_update(optimizer, whole, ready, states[0], {**hyper, "clip_gradient": None})
        apply_update(optimizer, cut, fragments, states[1], hyper, scale=scale)
        assert torch.equal(fragments.tensors[1], grad[16:336])
    assert torch.equal(cut, whole)
    assert states[0].values.keys() == states[1].values.keys()
    for name, value in states[0].values.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1].values[name])), name


def problem() -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(7)
    weights = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    return weights, [[torch.randn_like(weight) for weight in weights] for _ in range(20)]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_twenty_steps_equal_torchs_loop_with_late_and_absent_keys(case: Case) -> None:
    cls, options = case
    weights, grads = problem()
    expected, oracle = torch_loop(cls, options, weights, grads)
    optimizer = create(cls, **options)
    slice_ = make_plan([TensorSpec(str(i), shape, "float64") for i, shape in enumerate(SHAPES)], 1).slices[0]
    flat, state = torch.zeros(slice_.length, dtype=torch.float64), empty(slice_)
    parts = [slice(s.start, s.start + s.numel) for s in slice_.segments]
    for part, weight in zip(parts, weights, strict=True):
        flat[part] = weight.reshape(-1)
    hypers = [{**optimizer.hyper, "lr": optimizer.lr * (i + 1)} for i in range(len(SHAPES))]
    for step, row in enumerate(grads):
        change, present = torch.zeros_like(flat), [schedule(step, i) for i in range(len(SHAPES))]
        for i, part in enumerate(parts):
            if present[i]:
                change[part] = row[i].reshape(-1)
        update_slice(optimizer, slice_, flat, change, state, hypers, present)
    for i, (part, param) in enumerate(zip(parts, expected, strict=True)):
        assert (flat[part] - param.detach().reshape(-1)).abs().max() <= 1e-12
        mine = state_of(state, i)
        for name, value in oracle.state[param].items():
            if isinstance(value, Tensor):
                difference = torch.as_tensor(mine[name]).double() - value.reshape(-1).double()
                assert difference.abs().max() <= 1e-12, name


def test_every_elementwise_class_is_compared_with_torch() -> None:
    assert {cls for cls, _ in CASES} == set(ELEMENTWISE)


def test_an_instance_brings_the_current_options_of_its_only_group() -> None:
    instance = optim.AdamW([torch.zeros(1)], lr=torch.tensor(0.5), weight_decay=0.3, amsgrad=True)
    instance.param_groups[0]["lr"] = 0.25
    optimizer = create(instance)
    assert isinstance(optimizer, TorchOptimizer)
    assert (optimizer.cls, optimizer.lr, optimizer.wd, optimizer.hyper["amsgrad"]) == (
        optim.AdamW,
        0.25,
        0.3,
        True,
    )
    with pytest.raises(ConfigurationError, match="AdamW"):
        create(instance, lr=1.0)


def test_an_instance_with_several_groups_brings_its_defaults() -> None:
    groups = [{"params": [torch.zeros(1)], "lr": 1.0}, {"params": [torch.zeros(1)]}]
    assert create(optim.SGD(groups, lr=torch.tensor(0.5), momentum=0.9)).lr == 0.5


def test_class_that_a_store_would_take_for_another_one_is_refused() -> None:
    namesake = type("SGD", (optim.SGD,), {})
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigurationError, match="'torch:SGD'"):
        Trainer([parameter], namesake, {"lr": 0.1}, kvstore="local", update_on_kvstore=True)


def test_hooks_on_the_class_of_the_users_optimizer_are_not_run_for_a_slice() -> None:
    calls: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        optimizer = create("torch:SGD", lr=1.0)
        weight = torch.zeros(1)
        optimizer.update(weight, torch.ones(1), {}, {**optimizer.hyper, "step": 1})
    finally:
        handle.remove()
    assert (weight.item(), calls) == (-1.0, [])


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


def sparse(rows: list[int], values: Tensor, num_rows: int) -> Tensor:
    shape = (num_rows, *values.shape[1:])
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, shape, is_coalesced=True, check_invariants=False
    )


def same_state(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether all of torch's own entries are here with the same bits; a step count is kept under another name."""
    dense = {
        n: v.to_dense() if v.is_sparse else v for n, v in theirs.items() if n != "step" and v is not None
    }
    return all(torch.equal(torch.as_tensor(mine[name]), value) for name, value in dense.items())


@pytest.mark.parametrize("case", WHOLE_CASES, ids=named)
def test_six_updates_of_a_whole_key_equal_torchs(case: Case) -> None:
    cls, options = case
    key = Key(create(cls, **options), numbers(4, 6, seed=0))
    assert not key.optimizer.elementwise
    param = key.weight.clone().requires_grad_()
    oracle = cls([param], **options)
    for step in range(6):
        oracle.param_groups[0]["lr"] = 0.1 * step
        param.grad = numbers(4, 6, seed=step + 1)
        key.update(param.grad, lr=0.1 * step)
        oracle.step()
    assert torch.equal(key.weight, param)
    assert same_state(key.state, oracle.state[param])


def test_every_class_of_torch_but_lbfgs_has_a_way_to_run() -> None:
    known = {v for v in vars(optim).values() if isinstance(v, type) and issubclass(v, optim.Optimizer)}
    assert known - {optim.Optimizer, optim.LBFGS} == {*ELEMENTWISE, *WHOLE}


def test_muon_names_the_key_that_is_no_matrix() -> None:
    optimizer = create(optim.Muon)
    with pytest.raises(ConfigurationError, match=r"'bias'.*shape \(3,\)"):
        optimizer.check_key("bias", (3,), optimizer.hyper)
    optimizer.check_key("weight", (3, 3), optimizer.hyper)


@pytest.mark.parametrize("case", SPARSE_CASES, ids=named)
def test_updates_by_sparse_gradients_equal_torchs(case: Case) -> None:
    cls, options = case
    key = Key(create(cls, **options), numbers(6, 3, seed=0))
    param = key.weight.clone().requires_grad_()
    oracle = cls([param], **options)
    for step, rows in enumerate(ROWS):
        values = numbers(len(rows), 3, seed=step + 1)
        param.grad = sparse(rows, values.clone(), 6)
        with CHECKED(True):
            oracle.step()
        key.update_rows(rows, values)
    assert torch.equal(key.weight, param)
    assert same_state(key.state, oracle.state[param])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sparse_gradients_of_other_dtypes_move_the_rows_they_have(dtype: torch.dtype) -> None:
    compute, before = torch.promote_types(dtype, torch.float32), numbers(6, 3, seed=0).to(dtype)
    param = before.to(compute, copy=True).requires_grad_()
    param.grad = sparse([2], numbers(1, 3, seed=1).to(compute), 6)
    oracle: optim.Optimizer = optim.SparseAdam([param], lr=0.1)
    oracle.step()
    key = Key(create("torch:SparseAdam", lr=0.1), before)
    key.update_rows([2], numbers(1, 3, seed=1).to(compute))
    assert torch.equal(key.weight, param.to(dtype))
    assert torch.equal(key.weight[3:], before[3:])


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adagrad, optim.Adam])
def test_a_sparse_gradient_that_torchs_class_would_refuse_counts_as_dense(cls: Any) -> None:
    key, values = Key(create(cls, lr=0.1, weight_decay=0.1), numbers(6, 3, seed=0)), numbers(2, 3, seed=1)
    param = key.weight.clone().requires_grad_()
    param.grad = sparse([0, 4], values.clone(), 6).to_dense()
    cls([param], lr=0.1, weight_decay=0.1, fused=True).step()
    key.update_rows([0, 4], values)
    assert torch.allclose(key.weight, param, rtol=1e-6, atol=1e-7)


def test_dense_and_sparse_gradients_of_torchs_sgd_may_alternate() -> None:
    optimizer = create("torch:SGD", lr=0.1, momentum=0.9, nesterov=True)
    mixed, dense = Key(optimizer, numbers(6, 3, seed=0)), Key(optimizer, numbers(6, 3, seed=0))
    for step, rows in enumerate(ROWS):
        values = numbers(len(rows), 3, seed=step + 1)
        whole = sparse(rows, values, 6).to_dense()
        dense.update(whole)
        if step % 2:
            mixed.update(whole)
        else:
            mixed.update_rows(rows, values)
    assert torch.allclose(mixed.weight, dense.weight, rtol=1e-6, atol=1e-6)


def test_sparse_adam_names_the_key_whose_gradient_is_dense() -> None:
    key = Key(create("torch:SparseAdam"), torch.ones(2, 2), "emb")
    with pytest.raises(OptimizerError, match="'emb'"):
        key.update(torch.ones(2, 2))
    assert (key.weight == 1).all()


def test_a_foreign_class_gets_whole_keys_unless_it_is_declared_elementwise() -> None:
    assert not create(Centered).elementwise
    assert not create(Centered([torch.zeros(1, 1)], lr=0.5)).elementwise
    register(Centered, elementwise=False)
    assert not create("torch:Centered").elementwise
    register(Centered)
    assert create("torch:Centered").elementwise
    assert create(Centered).may_raise


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
    with pytest.raises(ConfigurationError, match=r"(LBFGS|Line) .*SGD"):
        checked_optimizer_spec(create(use))
    if isinstance(use, type):
        with pytest.raises(ConfigurationError, match=use.__name__):
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
    ("where", "name"), [("group", "'k'"), ("attribute", "'count'"), ("state", "'total'")]
)
def test_a_foreign_class_that_keeps_something_for_all_parameters_is_refused(where: str, name: str) -> None:
    key = Key(create(type("Sharing", (Sharing,), {"where": where})), torch.ones(2, 2))
    with pytest.raises(OptimizerError, match=f"{where}.* {name}"):
        key.update(torch.ones(2, 2))


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_an_empty_key_is_left_alone(name: str) -> None:
    key = Key(create(f"torch:{name}"), torch.zeros(4, 0))
    key.update(torch.zeros(4, 0))
    assert key.state == {"step": 1}


SWITCHED: list[tuple[type[optim.Optimizer], dict[str, Any], str]] = [
    (optim.Adam, dict(amsgrad=True), "max_exp_avg_sq"),
    (optim.AdamW, dict(amsgrad=True), "max_exp_avg_sq"),
    (optim.RMSprop, dict(momentum=0.9), "momentum_buffer"),
    (optim.RMSprop, dict(centered=True), "grad_avg"),
]


@pytest.mark.parametrize("case", SWITCHED, ids=lambda case: f"{case[0].__name__}-{case[2]}")
def test_an_option_with_state_may_be_switched_on(
    case: tuple[type[optim.Optimizer], dict[str, Any], str],
) -> None:
    """torch raises a KeyError then, unless the script makes the entry."""
    cls, options, entry = case
    grads = [numbers(40, seed=seed) for seed in range(1, 5)]
    key = Key(create(cls, lr=0.1), numbers(40, seed=0))
    parameter = numbers(40, seed=0).requires_grad_()
    oracle = cls([parameter], lr=0.1)  # type: ignore[call-arg]
    for at, grad in enumerate(grads):
        if at == 2:
            oracle.param_groups[0].update(options)
            oracle.state[parameter][entry] = torch.zeros(40)
        parameter.grad = grad.clone()
        oracle.step()
        key.update(grad, **(options if at >= 2 else {}))
    assert torch.allclose(key.weight, parameter, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", ["maximize", "nesterov"])
def test_an_option_counts_by_its_truth_as_in_torchs_loop(name: str) -> None:
    keys = [Key(create("torch:SGD", lr=0.1, momentum=0.9), torch.ones(3)) for _ in range(2)]
    for key, value in zip(keys, (1, True), strict=True):
        key.update(torch.ones(3), **{name: value})
    assert torch.equal(keys[0].weight, keys[1].weight)


class Masked(optim.SGD):
    """A foreign class with an option that is a tensor, and none of its groups."""

    def __init__(self, params: Any, lr: float = 1.0, mask: Tensor | None = None) -> None:
        super().__init__(params, lr=lr)
        assert mask is not None
        self.mask = mask

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.mask)
        return super().step(closure)


@pytest.mark.parametrize("mask", [torch.tensor([1.0, 0.0]), torch.tensor(0.5)])
def test_a_foreign_class_gets_a_tensor_as_its_option(mask: Tensor) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    trainer = Trainer([parameter], Masked, {"mask": mask}, kvstore=None)
    parameter.grad = torch.ones(2)
    trainer.step(1)
    assert parameter.equal(torch.ones(2) - mask)
