"""Parameters that were moved or replaced behind the Trainer's back: said so, instead of steps that do nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvtrainer import Trainer, kvstore
from kvtrainer.errors import NoGradientWarning, ParameterMovedError, StaleGradientError

STORES = [
    pytest.param(None, id="in-process"),
    pytest.param(False, id="reduced"),
    pytest.param(True, id="in-store"),
]


def trainer_of(net: nn.Module, uok: bool | None) -> Trainer:
    store = None if uok is None else kvstore.create("local")
    return Trainer(net, "sgd", {"lr": 0.1}, kvstore=store, update_on_kvstore=uok)


def backward(net: nn.Module) -> None:
    dtype = next(net.parameters()).dtype
    net(torch.ones(1, 3, dtype=dtype)).sum().backward()


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "double": lambda net: net.double(),
    "half and back": lambda net: net.half().float(),
    "new data": lambda net: [setattr(p, "data", p.data.clone()) for p in net.parameters()],
}
STEPS: dict[str, Callable[[Trainer], object]] = {
    "step()": lambda trainer: trainer.step(),
    "step(1)": lambda trainer: trainer.step(1),
    "ignoring": lambda trainer: trainer.step(1, ignore_stale_grad=True),
}


@pytest.mark.parametrize("uok", STORES)
@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("is_late", [False, True])
def test_moved_data_are_named_whatever_became_of_the_gradients(
    move: str, how: str, uok: bool | None, is_late: bool
) -> None:
    net = nn.Linear(3, 2)
    trainer = trainer_of(net, uok)
    if is_late:
        backward(net)
        trainer.step()
    MOVES[move](net)
    for _ in range(2):
        backward(net)
        with pytest.raises(ParameterMovedError, match=r"2 of 2 parameters were replaced .*: weight, bias"):
            STEPS[how](trainer)


def replace(net: nn.Module) -> None:
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)


@pytest.mark.parametrize("uok", STORES)
def test_replaced_parameters_are_hinted_at_once_where_nothing_gets_a_gradient(uok: bool | None) -> None:
    net = nn.Linear(3, 2)
    trainer = trainer_of(net, uok)
    replace(net)
    backward(net)
    with pytest.warns(
        NoGradientWarning, match=r"none of the 2 parameters .* load_state_dict\(assign=True\)"
    ) as caught:
        trainer.step()
    assert caught[0].filename == __file__
    trainer.step()  # a second warning would be an error here


def test_replaced_parameters_are_hinted_at_by_a_strict_step() -> None:
    net = nn.Linear(3, 2)
    trainer = trainer_of(net, None)
    replace(net)
    backward(net)
    with pytest.raises(
        StaleGradientError, match=r"2 of 2 .*load_state_dict\(assign=True\).*build a new Trainer"
    ):
        trainer.step(1)


def test_a_single_stale_parameter_is_not_taken_for_a_replaced_one() -> None:
    net = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    trainer = trainer_of(net, None)
    backward(net[0])
    with pytest.raises(StaleGradientError, match=r"since the last step: 1\.weight, 1\.bias\. If the"):
        trainer.step(1)


def test_a_step_without_gradients_that_is_meant_says_nothing() -> None:
    trainer = trainer_of(nn.Linear(3, 2), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(ignore_stale_grad=True)
        trainer.step(4, ignore_stale_grad=True)
    assert trainer.optimizer.num_update == 0
