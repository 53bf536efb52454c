"""One step of the Trainer: scaling, closures, reduction apart from the update, and failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvtrainer import Trainer, kvstore
from kvtrainer.errors import ConfigurationError, OptimizerError, StaleGradientError
from kvtrainer.optimizer import Optimizer, register
from tests.support.ways_to_train import STORES, backward, trainer_of, zeros


@pytest.mark.parametrize("uok", STORES)
def test_gradient_is_divided_by_the_batch_size_of_each_step(uok: bool | None) -> None:
    p = zeros()
    trainer = trainer_of([p], uok)
    for batch_size in (1, 2, 8, 0.5):
        backward(p)
        trainer.step(batch_size)
    assert p.tolist() == [-(1 + 1 / 2 + 1 / 8 + 2)] * 2


@pytest.mark.parametrize("uok", STORES)
def test_rescale_grad_set_later_holds_from_the_next_step_on(uok: bool | None) -> None:
    p = zeros(1)
    trainer = trainer_of([p], uok)
    for rescale in (0.5, 0.25):
        trainer.optimizer.rescale_grad = rescale
        backward(p)
        trainer.step(1)
    assert p.item() == -0.75


@pytest.mark.parametrize("uok", STORES)
def test_step_without_batch_size_takes_the_mean_over_workers(uok: bool | None) -> None:
    p = zeros()
    trainer = trainer_of([p], uok)
    backward(p, 3)
    assert trainer.step().updated
    assert p.tolist() == [-3, -3]


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("uok", STORES)
def test_closure_runs_with_gradients_enabled_and_its_result_comes_back(
    uok: bool | None, by_keyword: bool
) -> None:
    p = zeros()
    trainer = trainer_of([p], uok)

    def closure() -> Tensor:
        return backward(p, 2)

    with torch.no_grad():
        loss = trainer.step(2, closure=closure) if by_keyword else trainer.step(closure)
    assert loss.item() == 0
    assert p.tolist() == ([-1, -1] if by_keyword else [-2, -2])


@pytest.mark.parametrize("batch_size", [0, -1, True, "8", float("nan"), float("inf"), [4]])
def test_impossible_batch_size_is_refused_before_anything_happens(batch_size: Any) -> None:
    p = zeros()
    trainer = trainer_of([p])
    backward(p)
    for method in (trainer.step, trainer.update):
        with pytest.raises(ConfigurationError, match="batch size must be a number above 0, got"):
            method(batch_size)
    trainer.step(1)
    assert p.tolist() == [-1, -1]


def test_batch_size_may_be_a_numpy_integer() -> None:
    p = zeros()
    trainer = trainer_of([p])
    backward(p)
    trainer.step(torch.tensor([4]).numpy()[0])
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


def test_zero_sized_and_zero_dimensional_parameters_are_trained() -> None:
    scalar, empty = Parameter(torch.tensor(1.0)), zeros(0, 3)
    trainer = trainer_of([scalar, empty], True)
    for p in (scalar, empty):
        backward(p)
    trainer.step(1)
    assert scalar.item() == 0
    assert empty.shape == (0, 3)


def test_step_hooks_of_torch_run_around_the_step() -> None:
    p = zeros()
    trainer = trainer_of([p])
    seen: list[list[float]] = []
    trainer.register_step_pre_hook(lambda *_: seen.append(p.tolist()))
    trainer.register_step_post_hook(lambda *_: seen.append(p.tolist()))
    backward(p)
    trainer.step(1)
    assert seen == [[0, 0], [-1, -1]]
