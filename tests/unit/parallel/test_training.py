"""A Trainer over replicas of a model does what it does over the model and the whole batch, with all its stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, Parameter, Sequential, Tanh

from kvtrainer import DataParallel, Trainer
from kvtrainer.errors import NonFiniteGradientError, StaleGradientError
from tests.support.pairwise import pairwise
from tests.support.replica_training import STORES

OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def net(seed: int = 1) -> Sequential:
    torch.manual_seed(seed)
    return Sequential(Linear(3, 5), Tanh(), Linear(5, 2)).double()


def squares(module: Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return torch.nn.functional.mse_loss(module(x), y)


def batches(size: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(7)

    def draw(width: int) -> Tensor:
        return torch.randn(size, width, dtype=torch.float64, generator=made)

    return [(draw(3), draw(2)) for _ in range(count)]


def trained_by_torch(size: int) -> list[Tensor]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), **OPTIONS)
    for batch in batches(size):
        optimizer.zero_grad()
        squares(module, batch).backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def train(model: DataParallel, trainer: Trainer, size: int = 8) -> None:
    for batch in batches(size):
        model.forward_losses(batch, squares).backward()
        trainer.step()


def zeroed(count: int, **options: Any) -> DataParallel:
    """A model with one weight, which is 0."""
    model = DataParallel(Linear(1, 1, bias=False), ["cpu"] * count, **options)
    model.load_state_dict({"weight": torch.zeros(1, 1)})
    return model


def mean(module: Module, x: Tensor) -> Tensor:
    result: Tensor = module(x).mean()
    return result


def check_equal(found: list[list[Parameter]], expected: list[Tensor]) -> None:
    for replicas, p in zip(found, expected, strict=True):
        assert torch.allclose(replicas[0], p, rtol=0, atol=1e-12)
        assert all(torch.equal(replicas[0], one) for one in replicas)


@pytest.mark.parametrize(
    ("store", "size", "count", "reducer"),
    pairwise(
        [("device", None), ("local", True), ("device", False), ("local", False)],
        [8, 7, 2],
        [2, 3, 4],
        ["auto", "tree", "flat", "coalesced"],
    ),
)
def test_replicas_train_as_one_device_does(store: Any, size: int, count: int, reducer: str) -> None:
    """Also where the parts are unequal, and where a replica gets nothing; the model chooses the reducer."""
    model = DataParallel(net(), ["cpu"] * count, reducer=reducer)
    trainer = Trainer(model, torch.optim.SGD, OPTIONS, kvstore=store[0], update_on_kvstore=store[1])
    train(model, trainer, size)
    check_equal(model.params, trained_by_torch(size))


@pytest.mark.parametrize(("reducer", "expected"), [("tree", 0.0), ("flat", -0.25)])
def test_order_of_the_models_reducer_is_the_one_that_is_used(reducer: str, expected: float) -> None:
    model = zeroed(4, reducer=reducer)
    trainer = Trainer(model, "sgd", {"lr": 1.0}, kvstore="local")
    x = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    model.forward_losses(x, mean).backward()
    trainer.step(1)
    assert [p.item() for p in model.params[0]] == [expected] * 4


@pytest.mark.parametrize("is_scaled", [True, False])
def test_step_without_batch_size_is_a_mean_whether_losses_are_scaled_or_not(is_scaled: bool) -> None:
    """Gradients .6 and .4. Scaled losses are not divided by the number of replicas once more."""
    x = torch.tensor([[0.6], [0.4]])
    for in_store in (True, False):
        model = zeroed(2, loss_scale_by_replicas=is_scaled)
        trainer = Trainer(model, "sgd", {"lr": 1.0}, update_on_kvstore=in_store)
        model.forward_losses(x, mean).backward()
        trainer.step()
        assert [p.item() for p in model.params[0]] == pytest.approx([-0.5] * 2)


def test_halves_of_a_step_average_as_the_step_does() -> None:
    model = DataParallel(net(), ["cpu"] * 2)
    trainer = Trainer(model, torch.optim.SGD, OPTIONS, update_on_kvstore=False)
    for batch in batches(8):
        model.forward_losses(batch, squares).backward()
        trainer.allreduce_grads()
        trainer.update()
    check_equal(model.params, trained_by_torch(8))


def test_replicas_that_get_no_data_are_not_stale_but_a_batch_is_needed() -> None:
    model = DataParallel(net(), ["cpu"] * 3)
    trainer = Trainer(model, "sgd", {"lr": 0.1})
    model.forward_losses(batches(1)[0], squares).backward()
    trainer.step(1)
    with pytest.raises(StaleGradientError, match="12 of 12"):
        trainer.step(1)


class Partly(Module):
    """Of its two layers one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Linear(1, 1, bias=False), Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x)
        return result


def test_parameter_that_no_replica_used_is_skipped() -> None:
    model = DataParallel(Partly(), ["cpu"] * 2)
    before = [p.item() for p in model.params[1]]
    trainer = Trainer(model, "sgd", {"lr": 1.0, "wd": 0.5})
    model.forward_losses(torch.ones(2, 1), mean).backward()
    with pytest.raises(StaleGradientError, match="unused"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)
    assert [p.item() for p in model.params[1]] == before
    assert model.params[0][0].item() == model.params[0][1].item()


def test_groups_of_the_first_replica_become_groups_of_all() -> None:
    model = DataParallel(Linear(1, 1), ["cpu"] * 2)
    weight, bias = model.module.parameters()
    groups = model.with_replicas([{"params": [weight], "lr": 1.0}, {"params": [bias], "lr": 0.0}])
    trainer = Trainer(groups, "sgd", {"lr": 5.0})
    assert trainer.param_groups[0]["param_names"] == ["weight", "weight on cpu (replica 1)"]
    before = [[p.item() for p in pair] for pair in model.params]
    model.forward_losses(torch.ones(2, 1), mean).backward()
    trainer.step()
    assert [p.item() for p in model.params[0]] == pytest.approx([before[0][0] - 1.0] * 2)
    assert [p.item() for p in model.params[1]] == before[1]


def test_loaded_weights_are_those_of_every_replica_in_the_next_step() -> None:
    model = zeroed(2)
    trainer = Trainer(model, "sgd", {"lr": 1.0})
    for _ in range(2):
        model.load_state_dict({"weight": torch.full((1, 1), 3.0)})
        trainer.set_data()
        model.forward_losses(torch.ones(2, 1), mean).backward()
        trainer.step()
        assert [p.item() for p in model.params[0]] == [2.0, 2.0]


def test_batch_norm_normalises_on_every_replica_by_itself() -> None:
    torch.manual_seed(3)
    model = DataParallel(Sequential(BatchNorm1d(3), Linear(3, 2)).double(), ["cpu"] * 2)
    single = Sequential(BatchNorm1d(3), Linear(3, 2)).double()
    single.load_state_dict(model.state_dict())
    trainer = Trainer(model, "sgd", {"lr": 0.1})
    [(x, y)] = batches(8, 1)
    model.forward_losses((x, y), squares).backward()
    trainer.step()
    loss = (squares(single, (x[:4], y[:4])) + squares(single, (x[4:], y[4:]))) / 2
    grads = torch.autograd.grad(loss, list(single.parameters()))
    expected = [p.detach() - 0.1 * grad for p, grad in zip(single.parameters(), grads, strict=True)]
    check_equal(model.params, expected)


STAGES: dict[str, Any] = {
    "paramwise": {"bias_lr_mult": 2.0, "norm_decay_mult": 0.0},
    "clip_grad": {"max_norm": 0.05},
    "accumulate": 2,
    "detect_anomalous_params": "raise",
    "on_nonfinite": "raise",
}


def mean_square(module: Module, x: Tensor) -> Tensor:
    result: Tensor = module(x).pow(2).mean()
    return result


@STORES
@pytest.mark.filterwarnings("ignore::kvtrainer.errors.UnmatchedRuleWarning")
def test_norm_clipping_accumulation_and_rules_count_replicas_once(name: str, in_store: bool | None) -> None:
    single = net()
    model = DataParallel(copy.deepcopy(single), ["cpu"] * 3, reducer="tree")
    trainers = [
        Trainer(one, torch.optim.SGD, OPTIONS, name, update_on_kvstore=in_store, **STAGES)
        for one in (single, model)
    ]
    for _ in range(6):
        x = torch.randn(7, 3, dtype=torch.float64)
        expected = trainers[0].update_params(mean_square(single, x))
        found = trainers[1].update_params(model.forward_losses(x, mean_square))
        assert found.updated == expected.updated
        if found.updated:
            assert found.grad_norm == pytest.approx(expected.grad_norm, abs=1e-12)
            assert found.clip_coef == pytest.approx(expected.clip_coef, abs=1e-12)
            assert found.clip_coef < 1.0
    check_equal(model.params, list(single.parameters()))


@STORES
def test_loss_that_is_not_finite_on_any_replica_stops_the_step_for_all(name: str, in_store: Any) -> None:
    model = DataParallel(net(), ["cpu"] * 2)
    before = [p.clone() for p in model.parameters()]
    trainer = Trainer(model, "sgd", {"lr": 0.1}, name, update_on_kvstore=in_store, on_nonfinite="raise")
    x = torch.ones(4, 3, dtype=torch.float64)
    x[3] = float("nan")
    with pytest.raises(NonFiniteGradientError):
        trainer.update_params(model.forward_losses(x, mean_square))
    check_equal(model.params, before)
