"""What a model under a Trainer can still do: be copied, saved, compiled and differentiated."""

from __future__ import annotations

import copy
import cProfile
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from kvtrainer import Trainer

IN_STORE = pytest.mark.parametrize("in_store", [False, True], ids=["in-process", "in-store"])


def trainer_of(params: Any, kind: str = "sgd", in_store: bool = False, **options: Any) -> Trainer:
    return Trainer(params, kind, options, kvstore="local", update_on_kvstore=in_store)


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(net: nn.Module, trainer: Trainer, steps: int = 2) -> None:
    for i in range(steps):
        net(torch.full((1, 3), 1.0 + i)).sum().backward()
        trainer.step(1)


def weights(net: nn.Module) -> list[list[float]]:
    return [p.flatten().tolist() for p in net.parameters()]


def pickled(net: nn.Module) -> nn.Module:
    result: nn.Module = pickle.loads(pickle.dumps(net))
    return result


def saved(net: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    result: nn.Module = torch.load(buffer, weights_only=False)
    return result


@IN_STORE
@pytest.mark.parametrize("copier", [copy.deepcopy, pickled, saved])
def test_copied_model_trains_alike(copier: Callable[[nn.Module], nn.Module], in_store: bool) -> None:
    net = model()
    trainer = trainer_of(net.named_parameters(), "sgd", in_store, learning_rate=0.1)
    train(net, trainer)
    other = copier(net)
    kept = weights(other)
    train(net, trainer)
    assert weights(other) == kept
    other.zero_grad()
    train(other, trainer_of(other.named_parameters(), "sgd", in_store, learning_rate=0.1))
    assert weights(other) == weights(net)


@IN_STORE
def test_safetensors_file_of_the_model_loads_into_another(in_store: bool, tmp_path: Path) -> None:
    net, other = model(), model()
    trainer = trainer_of(net.named_parameters(), in_store=in_store)
    train(net, trainer)
    save_model(net, str(tmp_path / "net.safetensors"))
    load_model(other, str(tmp_path / "net.safetensors"))
    assert weights(other) == weights(net)


@IN_STORE
def test_weights_loaded_in_place_before_the_first_step_are_trained_on(in_store: bool) -> None:
    net, other = model(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    trainer = trainer_of(net.named_parameters(), in_store=in_store, learning_rate=0.5)
    net.load_state_dict(other.state_dict())
    train(net, trainer, 1)
    plain = torch.optim.SGD(other.parameters(), lr=0.5)
    other(torch.ones(1, 3)).sum().backward()
    plain.step()
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@IN_STORE
def test_tied_weights_are_one_parameter_with_one_gradient(in_store: bool) -> None:
    runs = []
    for ours in (True, False):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        net[1].weight = net[0].weight
        params = [*net[0].parameters(), *net[1].parameters()]
        optimizer: Any = (
            trainer_of(params, in_store=in_store) if ours else torch.optim.SGD(net.parameters(), lr=0.1)
        )
        net(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        assert len(list(net.parameters())) == 3
        runs.append(net[1].weight.detach().clone())
    torch.testing.assert_close(runs[0], runs[1])


@IN_STORE
def test_compiled_model_sees_every_update(in_store: bool) -> None:
    net, other = model(), model()
    compiled = torch.compile(net, backend="eager")
    pairs = (compiled, trainer_of(compiled, in_store=in_store)), (other, trainer_of(other, in_store=in_store))  # type: ignore[arg-type]
    for module, trainer in pairs:
        train(module, trainer)  # type: ignore[arg-type]
    assert weights(net) == weights(other)
    assert compiled(torch.ones(1, 3)).tolist() == other(torch.ones(1, 3)).tolist()


@IN_STORE
def test_backward_through_a_graph_from_before_the_step_raises_as_in_torch(in_store: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    for optimizer in (torch.optim.SGD(net.parameters(), lr=0.1), trainer_of(net, in_store=in_store)):
        loss = net(torch.ones(1, 3)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()


def test_weights_that_were_not_updated_may_be_used_in_an_older_graph() -> None:
    used, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    trainer = trainer_of([used, other])
    loss = other.square().sum()
    used.sum().backward()
    trainer.step(1, ignore_stale_grad=True)
    loss.backward()
    assert other.grad is not None
    assert other.grad.tolist() == [2, 2]


@pytest.mark.parametrize("kind", ["adam", "lamb", "torch:AdamW"])
@pytest.mark.parametrize("store", [None, "local", "dist_sync"])
def test_building_a_trainer_takes_linear_time_in_parameters(store: str | None, kind: str) -> None:
    def calls(count: int) -> int:
        parameters = [nn.Parameter(torch.zeros(3)) for _ in range(count)]
        profile = cProfile.Profile()
        profile.runcall(Trainer, parameters, kind, kvstore=store)
        return sum(row.callcount for row in profile.getstats())

    calls(1)
    assert calls(800) < 4.5 * calls(200)
    # Each costs a good part of a microsecond, of which there shall be about ten for a parameter.
    assert calls(800) < 800 * 100
