"""One step of the Trainer: scaling, closures, reduction apart from the update, and failures."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvstore_server.optimizer.gluon import SGD
from kvtrainer import Trainer, kvstore
from kvtrainer.errors import ConfigurationError, OptimizerError, StaleGradientError
from kvtrainer.optimizer import Optimizer, register
from tests.support.ways_to_train import STORES, backward, trainer_of, zeros


@pytest.mark.parametrize("uok", STORES)
def test_rescale_grad_set_later_holds_from_the_next_step_on(uok: bool | None) -> None:
    p = zeros(1)
    trainer = trainer_of([p], uok)
    for rescale in (0.5, 0.25):
        trainer.optimizer.rescale_grad = rescale
        backward(p)
        trainer.step(1)
    assert p.item() == -0.75


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("uok", STORES)
def test_closure_runs_with_gradients_and_returns_its_result(uok: bool | None, by_keyword: bool) -> None:
    p = zeros()
    trainer = trainer_of([p], uok)

    def closure() -> Tensor:
        return backward(p, 2)

    with torch.no_grad():
        loss = trainer.step(2, closure=closure) if by_keyword else trainer.step(closure)
    assert loss.item() == 0
    assert p.tolist() == ([-1, -1] if by_keyword else [-2, -2])


NO_BATCH_SIZES = [
    *(0, -1, True, "8", float("nan"), float("inf"), [4], np.array([4]), torch.tensor(0), torch.tensor(4.0)),
    *(
        torch.tensor(True),
        torch.tensor([4, 4]),
        torch.tensor([]),
        torch.empty((), dtype=torch.int64, device="meta"),
    ),
]


@pytest.mark.parametrize("batch_size", NO_BATCH_SIZES, ids=repr)
def test_impossible_batch_size_is_refused_before_anything_happens(batch_size: Any) -> None:
    p = zeros()
    trainer = trainer_of([p])
    backward(p)
    for method in (trainer.step, trainer.update):
        with pytest.raises(ConfigurationError, match="batch size must be a number above 0, got"):
            method(batch_size)
    trainer.step(1)
    assert p.tolist() == [-1, -1]


@pytest.mark.parametrize(
    "batch_size",
    [np.int64(4), np.array(4), torch.tensor(4), torch.tensor([4]), torch.tensor(4, dtype=torch.uint8)],
    ids=repr,
)
def test_batch_size_may_be_whatever_holds_one_integer(batch_size: Any) -> None:
    p = zeros()
    trainer = trainer_of([p])
    backward(p)
    trainer.step(batch_size)
    assert p.tolist() == [-0.25, -0.25]


def test_summed_gradient_that_is_dropped_before_the_update_counts_as_stale() -> None:
    a, b = zeros(), zeros()
    trainer = Trainer({"a": a, "b": b}, "sgd", {"lr": 1.0}, kvstore=Twins())
    backward(a)
    backward(b)
    trainer.allreduce_grads()
    b.grad = None
    with pytest.raises(StaleGradientError, match=r": b\."):
        trainer.update(1)
    trainer.update(1, ignore_stale_grad=True)
    assert (a.tolist(), b.tolist()) == ([-2, -2], [0, 0])


def test_reduction_puts_the_sum_over_workers_into_grad_and_update_without_batch_size_takes_the_mean() -> None:
    p = zeros()
    trainer = Trainer([p], "sgd", {"lr": 1.0}, kvstore=Twins())
    backward(p, 3)
    trainer.allreduce_grads()
    assert p.grad is not None
    assert p.grad.tolist() == [6, 6]
    trainer.update()
    assert p.tolist() == [-3, -3]


class Twins(kvstore.KVStoreBase):
    """A store of two workers that always do the same."""

    type = "twins"
    rank = 0
    num_workers = 2

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        out.copy_(value)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        (value if out is None else out).copy_(2 * value)


def test_each_worker_divides_by_its_own_batch_size_before_the_sum() -> None:
    p = zeros()
    trainer = Trainer([p], "sgd", {"lr": 1.0}, kvstore=Twins())
    backward(p)
    trainer.step(4)
    backward(p)
    trainer.step()
    assert p.tolist() == [-0.5 - 1] * 2


@pytest.mark.parametrize("method", ["allreduce_grads", "update"])
def test_separate_reduction_and_update_are_refused_where_the_store_updates(method: str) -> None:
    p = zeros()
    trainer = trainer_of([p], True)
    backward(p)
    with pytest.raises(ConfigurationError, match=r"runs in the kvstore.*update_on_kvstore=False"):
        getattr(trainer, method)()
    trainer.step(1)
    assert p.tolist() == [-1, -1]


@pytest.mark.parametrize("uok", STORES)
def test_optimizer_that_raises_leaves_weights_and_state_as_they_were(uok: bool | None) -> None:
    class Fragile(Optimizer):
        name = "fragile-for-the-step-test"

        def create_state(self, weight: Tensor) -> dict[str, Any]:
            return {"total": torch.zeros_like(weight)}

        def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
            state["total"] += grad
            weight -= grad
            if grad[0] == 2:
                raise ArithmeticError("two is too much")

    register(Fragile)
    p = zeros()
    trainer = trainer_of([p], uok, Fragile.name, {})
    for slope in (1, 2, 3):
        backward(p, slope)
        if slope == 2:
            with pytest.raises(OptimizerError, match="ArithmeticError: two is too much"):
                trainer.step(1)
        else:
            trainer.step(1)
    state = trainer.state_dict()["state"][0]
    # The gradient of the failed step was not used up; the next backward pass added to it.
    assert p.tolist() == [-1 - 5] * 2
    assert state["total"].tolist() == [1 + 5] * 2
    assert float(state["step"]) == 2


@pytest.mark.parametrize("uok", STORES)
def test_key_that_the_optimizer_cannot_update_is_found_before_any_other_is_updated(uok: bool | None) -> None:
    matrix, scalar = zeros(2, 2), Parameter(torch.tensor(1.0))
    trainer = trainer_of({"matrix": matrix, "scalar": scalar}, uok, "groupadagrad")
    backward(matrix)
    backward(scalar)
    with pytest.raises(ConfigurationError, match="'scalar'"):
        trainer.step(1)
    assert (matrix.tolist(), scalar.item()) == ([[0, 0], [0, 0]], 1)


def test_step_hooks_of_torch_run_around_the_step() -> None:
    p = zeros()
    trainer = trainer_of([p])
    seen: list[list[float]] = []
    trainer.register_step_pre_hook(lambda *_: seen.append(p.tolist()))
    trainer.register_step_post_hook(lambda *_: seen.append(p.tolist()))
    backward(p)
    trainer.step(1)
    assert seen == [[0, 0], [-1, -1]]


def test_a_profile_of_torch_names_the_step() -> None:
    p = zeros()
    trainer = trainer_of([p])
    backward(p)
    with torch.profiler.profile() as profile:
        trainer.step(1)
    assert "Optimizer.step#Trainer.step" in {event.name for event in profile.events()}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    "optimizer",
    [("sgd", {"momentum": 0.9, "wd": 0.1}), ("sgd", {}), ("nag", {}), ("adam", {}), ("adamw", {}), ("adagrad", {}),
     ("adam", {"clip_gradient": 0.5}), ("rmsprop", {}), ("torch:SGD", {"momentum": 0.9}), ("torch:AdamW", {}),
     ("torch:Adagrad", {})],
)  # fmt: skip
@pytest.mark.parametrize("has_short", [True, False], ids=["short ones between", "long ones alone"])
def test_long_gradients_give_the_same_bits_where_they_lie_and_copied_and_stay_as_they_are(
    optimizer: tuple[str, dict[str, Any]], batch_size: int, has_short: bool
) -> None:
    shapes = [(256, 160), (700, 512), (333, 129), (1000, 64), (64, 64), (2, 96, 32)]
    shapes = [(5,), shapes[0], (3, 7), *shapes[1:]] if has_short else shapes
    gen = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=gen) for shape in shapes]
    grads = [[torch.randn(shape, generator=gen) for shape in shapes] for _ in range(3)]
    found = []
    for is_copied in (False, True):
        parameters = [Parameter(value.clone()) for value in first]
        trainer = Trainer(parameters, *optimizer, kvstore=None)
        for number, given in enumerate(grads):
            for at, (p, grad) in enumerate(zip(parameters, given, strict=True)):
                # Of another memory format a gradient has to be copied.
                own = grad.t().contiguous().t() if is_copied and grad.dim() == 2 else grad.clone()
                p.grad = None if (number, at) == (1, 3) else own
            trainer.step(batch_size, ignore_stale_grad=True)
            assert all(
                p.grad is None or torch.equal(p.grad, grad) for p, grad in zip(parameters, given, strict=True)
            )
        found.append(parameters)
    assert all(map(torch.equal, *found))


def test_optimizer_derived_from_one_that_takes_gradients_in_place_may_write_to_its_gradient() -> None:
    class Halved(SGD):
        name = "halved"

        def update(self, weight: Tensor, grad: Any, state: Any, hyper: Any) -> None:
            super().update(weight, grad.mul_(0.5), state, hyper)

    p, grad = zeros(200_000), torch.ones(200_000)
    p.grad = grad
    Trainer([p], Halved(learning_rate=1.0), kvstore=None).step(1)
    assert torch.equal(p.detach(), torch.full((200_000,), -0.5))
    assert torch.equal(grad, torch.ones(200_000))


@pytest.mark.parametrize("uok", STORES)
def test_steps_of_many_parameters_give_the_garbage_collector_no_work(uok: bool | None) -> None:
    parameters, runs = [zeros() for _ in range(1_000)], 0
    trainer = trainer_of(parameters, uok)

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal runs
        runs += phase == "start"

    for at in range(3):
        for p in parameters:
            p.grad = torch.ones(2)
        gc.collect()
        gc.callbacks.append(count)
        trainer.step(1)
        gc.callbacks.remove(count)
        if not at:
            runs = 0  # the first step makes what stays
    assert runs == 0


class Untrained(Parameter):
    """A parameter whose class says what its gradients are for."""

    grad_req = "null"


def test_class_of_a_parameter_may_say_what_is_asked_of_the_parameter() -> None:
    kept, p = Untrained(torch.zeros(2)), zeros()
    trainer = trainer_of([kept, p])
    for one in (kept, p):
        backward(one)
    trainer.step(1)
    assert [kept.tolist(), p.tolist()] == [[0, 0], [-1, -1]]
