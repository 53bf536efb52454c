"""A Trainer over lazy modules: built before their shapes are known, complete from the first step on."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks
from torch.nn.parameter import is_lazy

from kvtrainer import Trainer, kvstore
from kvtrainer.errors import NotInitializedError, StaleGradientError
from tests.support.saved_training import same
from tests.support.ways_to_train import STORES

X = torch.ones(2, 3)


def lazy_net() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1))


def trainer_of(net: Any, uok: bool | None = None, kind: Any = "sgd", **options: Any) -> Trainer:
    store = None if uok is None else kvstore.create("local")
    return Trainer(net.named_parameters(), kind, options or None, kvstore=store, update_on_kvstore=uok)


def freeze(module: nn.Module) -> None:
    # A parameter without a shape knows the attribute, but not requires_grad_().
    for p in module.parameters():
        p.requires_grad = False


@pytest.mark.parametrize("uok", STORES)
def test_trainer_built_before_the_first_forward_trains_as_one_built_after_it(uok: bool | None) -> None:
    runs = []
    for early in (True, False):
        torch.manual_seed(3)
        net = lazy_net()
        if not early:
            net(X)
        trainer = trainer_of(net, uok, learning_rate=0.5, momentum=0.5)
        for _ in range(3):
            net(X).square().sum().backward()
            trainer.step(2)
        runs.append(net)
    assert same(*[list(net.parameters()) for net in runs])


@pytest.mark.parametrize("uok", STORES)
def test_gradients_are_watched_from_the_first_backward_pass_on(uok: bool | None) -> None:
    net = nn.Sequential(nn.LazyLinear(1, bias=False))
    net[0].weight.grad_req = "write"
    trainer = trainer_of(net, uok, learning_rate=1.0)
    start: Tensor | None = None
    for factor in (100.0, 1.0):  # overwritten, although there was no step and no arena yet
        loss = net(X).sum() * factor
        start = net[0].weight.detach().clone() if start is None else start
        loss.backward()
    trainer.step(1)
    assert net[0].weight.tolist() == (start - 2).tolist()
    net(X).sum().backward()  # drops what was used
    assert net[0].weight.grad is not None
    assert net[0].weight.grad.tolist() == [[2, 2, 2]]
    trainer.step(1)
    with pytest.raises(StaleGradientError, match=r"0\.weight"):
        trainer.step(1)


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("uok", STORES)
def test_step_names_every_parameter_without_a_shape(uok: bool | None, is_strict: bool) -> None:
    net = lazy_net()
    trainer = trainer_of(net, uok)
    net[0](X).sum().backward()
    with pytest.raises(NotInitializedError, match=r"2 of 4 .*: 2\.weight, 2\.bias\."):
        trainer.step(1) if is_strict else trainer.step()
    assert trainer.server_stats() == []
    net(X).sum().backward()
    trainer.step(1)


@pytest.mark.parametrize("how", ["requires_grad", "grad_req"])
@pytest.mark.parametrize("uok", STORES)
def test_unused_parameter_may_stay_without_a_shape(uok: bool | None, how: str, tmp_path: Path) -> None:
    net = lazy_net()
    for p in net[2].parameters():
        if how == "requires_grad":
            p.requires_grad = False
        else:
            p.grad_req = "null"
    trainer = trainer_of(net, uok, "adam")
    for _ in range(2):
        net[0](X).sum().backward()
        trainer.step(1)
    assert set(trainer.state_dict()["state"]) == {0, 1}
    trainer.save_states(tmp_path / "states")


@pytest.mark.parametrize("uok", STORES)
def test_parameter_that_joins_late_is_trained_and_the_state_of_the_others_stays(uok: bool | None) -> None:
    net = lazy_net()
    freeze(net[2])
    trainer = trainer_of(net, uok, learning_rate=1.0, momentum=0.5)
    for _ in range(2):
        net[0](X).sum().backward()
        trainer.step(1)
    momentum = trainer.state_dict()["state"][1]["momentum_buffer"].clone()
    net(X)
    net[2].requires_grad_(True)
    before = net[2].bias.item()
    net(X).sum().backward()
    net[0](X)  # no backward pass, and no harm
    trainer.step(1)
    assert net[2].bias.item() == pytest.approx(before - 2)
    assert trainer.state_dict()["state"][1]["momentum_buffer"].shape == momentum.shape
    assert float(trainer.state_dict()["state"][1]["step"]) == 3


@pytest.mark.parametrize("uok", STORES)
def test_states_are_refused_until_shapes_are_known(uok: bool | None, tmp_path: Path) -> None:
    net = lazy_net()
    trainer = trainer_of(net, uok, "adam")
    saved = tmp_path / "states"
    calls: list[Any] = [
        trainer.state_dict,
        lambda: trainer.load_state_dict({}),
        lambda: trainer.save_states(saved),
        lambda: trainer.load_states(saved),
        trainer.set_data,
        trainer.allreduce_grads if not uok else trainer.step,
    ]
    for call in calls:
        with pytest.raises(NotInitializedError, match=r"4 of 4 parameters have no shape yet"):
            call()
    assert not saved.exists()
    net(X).sum().backward()
    trainer.save_states(saved)
    trainer.load_states(saved)
    trainer.step(1)


@pytest.mark.parametrize("uok", STORES)
def test_states_loaded_after_the_first_forward_count(uok: bool | None, tmp_path: Path) -> None:
    def train(trainer: Trainer, net: nn.Module, steps: int) -> None:
        for _ in range(steps):
            net(X).square().sum().backward()
            trainer.step(1)

    torch.manual_seed(5)
    net, other = lazy_net(), lazy_net()
    trainer, successor = (trainer_of(one, uok, learning_rate=0.1, momentum=0.9) for one in (net, other))
    train(trainer, net, 2)
    trainer.save_states(tmp_path / "states")
    other(X)
    other.load_state_dict(net.state_dict())
    successor.load_states(tmp_path / "states")
    train(trainer, net, 2)
    train(successor, other, 2)
    assert same(list(net.parameters()), list(other.parameters()))


def test_group_of_a_lazy_module_may_be_added_before_and_after_the_first_step() -> None:
    first, second, third = (
        nn.Linear(3, 3, bias=False),
        nn.LazyLinear(3, bias=False),
        nn.LazyLinear(1, bias=False),
    )
    trainer = trainer_of(first, None, learning_rate=1.0, momentum=0.5)
    trainer.add_param_group({"params": [("second", second.weight)]})
    second(first(X)).sum().backward()
    trainer.step(1)
    trainer.add_param_group({"params": [("third", third.weight)]})
    with pytest.raises(NotInitializedError, match="third"):
        trainer.state_dict()
    third(second(first(X))).sum().backward()
    trainer.step(1)
    assert [float(state["step"]) for state in trainer.state_dict()["state"].values()] == [2, 2, 1]


def test_torch_instance_over_lazy_parameters_is_followed() -> None:
    net = lazy_net()
    instance = torch.optim.SGD(net.parameters(), lr=1.0)
    trainer = trainer_of(net, None, instance)
    net(X).sum().backward()
    before = net[2].bias.item()
    trainer.step(1)
    assert net[2].bias.item() == pytest.approx(before - 2)


def test_nothing_watches_forward_passes_once_all_shapes_are_known_or_the_trainer_is_gone() -> None:
    known = set(_global_forward_hooks)
    net = lazy_net()
    trainer = trainer_of(net)
    assert set(_global_forward_hooks) - known
    net(X)
    assert set(_global_forward_hooks) == known
    trainer_of(lazy_net()).close()
    assert set(_global_forward_hooks) == known
    forgotten = trainer_of(lazy_net())
    del forgotten, trainer
    gc.collect()
    assert set(_global_forward_hooks) == known


def test_first_forward_in_inference_mode_does_no_harm() -> None:
    net = nn.Linear(3, 1)
    lazy = nn.LazyLinear(1)
    trainer_of(nn.ModuleList([net, lazy]))
    with torch.inference_mode():
        net(X)
    assert is_lazy(lazy.weight)
    assert lazy(X).shape == (len(X), 1)
    assert not is_lazy(lazy.weight)
