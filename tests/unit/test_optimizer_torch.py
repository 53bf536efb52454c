"""torch's family against torch's own loop over the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from kvstore_server.errors import ConfigurationError, OptimizerError
from kvstore_server.optimizer import (
    Optimizer,
    create,
    create_from_spec,
    register,
    registry,
)
from kvstore_server.optimizer.torch_family import ELEMENTWISE, TorchOptimizer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer import Trainer
from tests.support.optimizer_slices import empty, update_slice

SHAPES = [(3, 5), (1,), (40,), (), (7, 2)]
CASES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
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


def named(case: tuple[type[optim.Optimizer], dict[str, Any]]) -> str:
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


def problem() -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(7)
    weights = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    return weights, [[torch.randn_like(weight) for weight in weights] for _ in range(20)]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_twenty_steps_equal_torchs_loop_with_late_and_absent_keys(
    case: tuple[type[optim.Optimizer], dict[str, Any]],
) -> None:
    cls, options = case
    weights, grads = problem()
    expected, oracle = torch_loop(cls, options, weights, grads)
    optimizer = create(cls, **options)
    piece = make_plan([TensorSpec(str(i), shape, "float64") for i, shape in enumerate(SHAPES)], 1).slices[0]
    flat, state = torch.zeros(piece.length, dtype=torch.float64), empty(piece)
    parts = [slice(s.start, s.start + s.numel) for s in piece.segments]
    for part, weight in zip(parts, weights, strict=True):
        flat[part] = weight.reshape(-1)
    hypers = [{**optimizer.hyper, "lr": optimizer.lr * (i + 1)} for i in range(len(SHAPES))]
    for step, row in enumerate(grads):
        change, present = torch.zeros_like(flat), [schedule(step, i) for i in range(len(SHAPES))]
        for i, part in enumerate(parts):
            if present[i]:
                change[part] = row[i].reshape(-1)
        update_slice(optimizer, piece, flat, change, state, hypers, present)
    for i, (part, param) in enumerate(zip(parts, expected, strict=True)):
        assert (flat[part] - param.detach().reshape(-1)).abs().max() <= 1e-12
        mine = state.state_of(i)
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
    with pytest.raises(ConfigurationError, match="lr beside a AdamW"):
        create(instance, lr=1.0)


def test_an_instance_with_several_groups_brings_its_defaults() -> None:
    groups = [{"params": [torch.zeros(1)], "lr": 1.0}, {"params": [torch.zeros(1)]}]
    assert create(optim.SGD(groups, lr=torch.tensor(0.5), momentum=0.9)).lr == 0.5


class HalfLife(optim.Optimizer):
    """A foreign class that counts its steps in a Python int and makes its state in the first step."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"] = 0
                state["step"] += 1
                assert isinstance(state["step"], int)
                param.sub_(param.grad, alpha=group["lr"] ** state["step"])


@pytest.fixture
def _registered() -> Any:
    register(HalfLife)
    yield
    del registry._registry["torch:halflife"]
    registry._declared.discard(HalfLife)


@pytest.mark.usefixtures("_registered")
def test_a_declared_foreign_class_runs_with_its_own_step_count() -> None:
    optimizer = create_from_spec(create(HalfLife, lr=0.5).spec())
    piece = make_plan([TensorSpec("w", (3,), "float32")], 1).slices[0]
    weight, state = torch.zeros(piece.length), empty(piece)
    for _ in range(3):
        update_slice(optimizer, piece, weight, torch.ones(piece.length), state, [optimizer.hyper])
    assert weight.tolist() == [-0.875] * 3 + [0.0] * 13
    assert optimizer.may_raise


def test_class_that_a_store_would_take_for_another_one_is_refused() -> None:
    namesake = type("SGD", (optim.SGD,), {})
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigurationError, match="a store would take 'torch:SGD' for torch"):
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


def test_a_state_entry_of_another_shape_is_refused_with_its_name() -> None:
    class Wrong(Optimizer):
        def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
            state["norms"] = torch.zeros(2)

    piece = make_plan([TensorSpec("w", (3,), "float32")], 1).slices[0]
    optimizer = Wrong()
    with pytest.raises(OptimizerError, match=r"wrong put a tensor of shape \(2,\) into its state as 'norms'"):
        update_slice(optimizer, piece, torch.zeros(16), torch.zeros(16), empty(piece), [optimizer.hyper])
