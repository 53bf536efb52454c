"""What goes on seeing the memory that parameters had before a Trainer moved them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import ParameterMovedError, SharedWeightsWarning
from tests.support.ways_to_train import backward

VIEWS: dict[str, Callable[[nn.Module], Any]] = {
    "shared memory": lambda net: net.share_memory(),
    "NumPy": lambda net: net.get_parameter("weight").detach().numpy(),
    "state_dict": lambda net: net.state_dict(),
    "row": lambda net: net.get_parameter("weight").detach()[0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_sees_the_former_memory_is_warned_of_with_the_names(view: str) -> None:
    net = nn.Linear(2, 1)
    seen = VIEWS[view](net)
    with pytest.warns(SharedWeightsWarning, match=r"2 of 2 .*'weight', 'bias'|1 of 2 .*'weight'") as caught:
        Trainer(net, "sgd", kvstore=None)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    del seen


def test_views_that_are_gone_and_copies_and_views_of_larger_memory_are_not_warned_of() -> None:
    net, whole = nn.Linear(2, 1), torch.zeros(4)
    copy = {name: value.clone() for name, value in net.state_dict().items()}
    net.weight.detach().numpy()
    cycle: list[Any] = [net.weight.detach()]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        Trainer([*net.parameters(), Parameter(whole[:2])], "sgd", kvstore=None)
    finally:
        gc.enable()
    Trainer(net, "sgd", kvstore=None)  # what another Trainer holds is no view
    net(torch.ones(1, 2)).sum().backward()
    Trainer(net, "sgd", kvstore=None)
    assert len(copy) == 2


def test_parameters_of_one_memory_that_all_move_are_not_warned_of() -> None:
    whole = torch.zeros(4)
    parts = [Parameter(whole[:2]), Parameter(whole[2:])]
    del whole
    Trainer(parts, "sgd", kvstore=None)


def test_share_memory_after_the_trainer_is_refused_with_a_way_out() -> None:
    net = nn.Linear(2, 1)
    trainer = Trainer(net, "sgd", kvstore=None)
    net.share_memory()
    for p in net.parameters():
        backward(p)
    with pytest.raises(ParameterMovedError, match=r"share_memory\(\).*weight, bias.*clone\(\)"):
        trainer.step(1)
