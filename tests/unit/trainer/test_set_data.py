"""Weights that the loop writes itself, published in the middle of training: optimizer state stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from kvtrainer import Trainer, kvstore
from kvtrainer.errors import ConfigurationError, KVStoreError, ParameterMovedError
from tests.support.ways_to_train import STORES


def trainer_of(parameters: Any, uok: bool | None = None, kind: str = "sgd", **options: Any) -> Trainer:
    store = None if uok is None else kvstore.create("local")
    return Trainer(parameters, kind, options, kvstore=store, update_on_kvstore=uok)


def step(trainer: Trainer, *parameters: Parameter) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)
    trainer.step(1)


def zeros(*shape: int) -> Parameter:
    return Parameter(torch.zeros(*shape or (1,)))


@pytest.mark.parametrize("uok", STORES)
def test_momentum_of_all_parameters_survives(uok: bool | None) -> None:
    """MXNet forgets it: after set_data(10) its next step gives 8 and not 7."""
    a, b = zeros(), zeros()
    trainer = trainer_of([a, b], uok, learning_rate=2.0, momentum=0.5)
    step(trainer, a, b)
    with torch.no_grad():
        a.fill_(10)
    trainer.set_data()
    assert (a.item(), b.item()) == (10, -2)
    step(trainer, a, b)
    assert (a.item(), b.item()) == (10 - 1 - 2, -2 - 1 - 2)
    assert [float(state["step"]) for state in trainer.state_dict()["state"].values()] == [2, 2]


@pytest.mark.parametrize("uok", STORES)
def test_values_may_be_given_by_name(uok: bool | None) -> None:
    net = nn.Linear(2, 1)
    trainer = trainer_of(net.named_parameters(), uok, "test", learning_rate=1.0)
    step(trainer, net.weight, net.bias)
    trainer.set_data({"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.tensor([5.0], dtype=torch.float64)})
    step(trainer, net.weight, net.bias)
    assert (net.weight.tolist(), net.bias.tolist()) == ([[2, 3]], [4])


@pytest.mark.parametrize("uok", STORES)
def test_float32_masters_follow_the_new_weights(uok: bool | None) -> None:
    p = Parameter(torch.ones(4, dtype=torch.float16))
    trainer = trainer_of([p], uok, learning_rate=1.0, momentum=0.5, multi_precision=True)
    step(trainer, p)
    with torch.no_grad():
        p.fill_(8)
    trainer.set_data()
    step(trainer, p)
    assert p.tolist() == [8 - 1.5] * 4


@pytest.mark.parametrize("uok", STORES)
def test_before_the_first_step_it_makes_the_store_and_changes_nothing_else(uok: bool | None) -> None:
    p = zeros()
    trainer = trainer_of([p], uok, learning_rate=1.0)
    with torch.no_grad():
        p.fill_(4)
    trainer.set_data()
    step(trainer, p)
    assert p.item() == 3


class Leader(kvstore.KVStoreBase):
    """Two workers of which this one is the second; the first one's weights are 5 and its gradients 0."""

    type = "leader"
    rank = 1
    num_workers = 2

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        out.fill_(5)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        if not value.any():  # what a worker that is not the first contributes to new weights
            (value if out is None else out).fill_(7)


def test_weights_of_rank_0_win_over_a_third_party_store() -> None:
    p = zeros()
    trainer = Trainer([p], "sgd", {"lr": 1.0}, kvstore=Leader())
    step(trainer, p)
    assert p.item() == 4
    with torch.no_grad():
        p.fill_(100)
    saved = (p * p).sum()
    trainer.set_data()
    assert p.item() == 7
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weigth": torch.zeros(1, 2)}, r"no parameter 'weigth'; its parameters are weight, bias"),
        (
            {"bias": torch.ones(1), "weight": torch.zeros(2, 1)},
            r"'weight' has shape \[1, 2\], its new value \[2, 1\]",
        ),
        ({"bias": 1.0}, r"'bias' has shape \[1\], its new value float"),
    ],
)
def test_values_that_do_not_fit_are_named_and_nothing_changes(values: Any, message: str) -> None:
    net = nn.Linear(2, 1)
    trainer = trainer_of(net.named_parameters())
    before = [p.tolist() for p in net.parameters()]
    with pytest.raises(ConfigurationError, match=message):
        trainer.set_data(values)
    assert [p.tolist() for p in net.parameters()] == before


def test_data_that_were_replaced_instead_of_written_are_noticed() -> None:
    p = zeros()
    trainer = trainer_of([p], True)
    step(trainer, p)
    p.data = torch.ones(1)
    with pytest.raises(ParameterMovedError):
        trainer.set_data()


def test_closed_trainer_publishes_nothing() -> None:
    trainer = trainer_of([zeros()], True)
    trainer.close()
    with pytest.raises(KVStoreError, match="closed"):
        trainer.set_data()
