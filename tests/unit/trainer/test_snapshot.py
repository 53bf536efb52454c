"""A snapshot has the weights of one moment, whatever the Trainer does meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import kvtrainer


def stepped(trainer: Any, net: nn.Module, times: int = 1) -> None:
    """Make steps of plain SGD with gradients of one."""
    for _ in range(times):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        trainer.step(1)


def test_a_snapshot_stays_as_it_was_while_training_goes_on() -> None:
    net = nn.Linear(2, 1)
    nn.init.constant_(net.weight, 0.0)
    nn.init.constant_(net.bias, 0.0)
    trainer = kvtrainer.Trainer(net.named_parameters(), "sgd", {"learning_rate": 1.0})
    stepped(trainer, net)
    with trainer.snapshot() as state:
        stepped(trainer, net, 2)
        assert {name: value.tolist() for name, value in state.items()} == {
            "weight": [[-1.0, -1.0]],
            "bias": [-1.0],
        }
    assert net.bias.tolist() == [-3.0]


def test_a_snapshot_is_given_back_when_its_block_ends() -> None:
    net = nn.Linear(2, 1)
    trainer = kvtrainer.Trainer(net.named_parameters(), "sgd", {"learning_rate": 1.0})
    with trainer.snapshot() as state:
        assert state
    assert not state


def test_a_snapshot_leaves_out_parameters_without_a_shape() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(1))
    trainer = kvtrainer.Trainer(net.named_parameters(), "sgd", {"learning_rate": 1.0})
    with trainer.snapshot() as state:
        assert sorted(state) == ["0.bias", "0.weight"]
