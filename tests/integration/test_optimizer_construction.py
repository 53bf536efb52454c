"""Optimizers from configurations on a real server: options by parameter, and classes that a job brings along."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import Trainer
from kvtrainer.config import trainer_arguments
from kvtrainer.errors import UnknownNameError
from tests.integration import registered_optimizer
from tests.support.processes import Members, Process, Processes, new_name


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes() as started:
        yield started


@pytest.fixture(scope="module")
def server(processes: Processes) -> Process:
    [started] = processes.servers(1, "--import", registered_optimizer.__name__)
    return started


def config(kind: str) -> dict[str, Any]:
    paramwise = {"bias_lr_mult": 2.0, "bias_decay_mult": 0.0, "custom_keys": {".0.": {"lr_mult": 0.5}}}
    imports = {"imports": [registered_optimizer.__name__]}
    return {
        "optimizer": {"type": kind, "lr": 0.25, "weight_decay": 0.5, "paramwise_cfg": paramwise},
        "custom_imports": imports,
    }


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    for p in made.parameters():
        nn.init.ones_(p)
    return made


def step(net: nn.Module, trainer: Trainer) -> None:
    """One update with a gradient whose elements are 0 and 2, so that their mean is 1."""
    loss = sum(p.flatten()[::2].sum() * 2 for p in net.parameters())
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    trainer.step(1)


@pytest.mark.parametrize("kind", ["MeanDescent", "SGD"])
def test_options_by_parameter_and_their_changes_reach_the_server(server: Process, kind: str) -> None:
    net = model()
    with Members() as members:
        store = members.join([server], 0, 1, new_name())
        trainer = Trainer(
            **trainer_arguments(net, {**config(kind), "kvstore": store, "update_on_kvstore": True})
        )
        assert [group["param_names"] for group in trainer.param_groups] == [
            ["0.weight", "0.bias"],
            ["1.weight"],
            ["1.bias"],
        ]
        step(net, trainer)
        for group in trainer.param_groups:
            group["lr"] *= 2
        step(net, trainer)
    numbers = {
        "0.weight": (0.125, 0.5),
        "0.bias": (0.125, 0.5),
        "1.weight": (0.25, 0.5),
        "1.bias": (0.5, 0.0),
    }
    for name, p in net.named_parameters():
        rate, decay = numbers[name]
        for at, element in enumerate(p.detach().flatten().tolist()):
            gradient = 1.0 if kind == "MeanDescent" else 2.0 * (at % 2 == 0)
            expected = 1.0
            for factor in (1, 2):
                expected -= factor * rate * (gradient + decay * expected)
            assert element == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize("way", ["type", "instance"])
def test_optimizer_without_a_learning_rate_is_built_on_the_server(server: Process, way: str) -> None:
    net = model()
    options = {"a": 0.25, "b": 1.0, "note": "mine"}
    optimizer: Any = {"type": "Shift", **options, "paramwise_cfg": {"custom_keys": {"bias": {"a": 0.5}}}}
    if way == "instance":
        named = dict(net.named_parameters())
        groups = [
            {"params": [p for name, p in named.items() if "weight" in name]},
            {"params": [p for name, p in named.items() if "bias" in name], "a": 0.5},
        ]
        optimizer = registered_optimizer.Shift(groups, **options)  # type: ignore[arg-type]
    with Members() as members:
        store = members.join([server], 0, 1, new_name())
        trainer = Trainer.from_config(
            net, {"optimizer": optimizer, "kvstore": store, "update_on_kvstore": True}
        )
        step(net, trainer)
        for group in trainer.param_groups:
            group["b"] = 0.0
        step(net, trainer)
        assert trainer.get_lr() == {"lr": []}
    for name, p in net.named_parameters():
        rate = 0.5 if "bias" in name else 0.25
        for at, element in enumerate(p.detach().flatten().tolist()):
            assert element == pytest.approx(1 - rate * (2 * 2.0 * (at % 2 == 0) + 1.0), rel=1e-12), name


def test_server_that_did_not_import_the_class_says_what_it_needs(processes: Processes) -> None:
    [without] = processes.servers(1)
    net = model()
    with Members() as members:
        store = members.join([without], 0, 1, new_name())
        trainer = Trainer(**trainer_arguments(net, {**config("MeanDescent"), "kvstore": store}))
        with pytest.raises(UnknownNameError, match=r"'torch:MeanDescent'.*--import MODULE"):
            step(net, trainer)


def test_state_of_trees_goes_to_servers_and_into_files_and_back(server: Process, tmp_path: Path) -> None:
    def trained(trainer: torch.optim.Optimizer, net: nn.Module, *steps: int) -> None:
        for at in steps:
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(at), dtype=p.dtype)
            trainer.step(1 if isinstance(trainer, Trainer) else None)

    nets = [model() for _ in range(3)]
    oracle = registered_optimizer.InEighths(nets[0].parameters())
    trained(oracle, nets[0], 0, 1, 2, 3)
    with Members() as members:
        stores = [members.join([server], 0, 1, new_name()) for _ in range(2)]
        first, second = (
            Trainer(net, registered_optimizer.InEighths, {}, kvstore=store, update_on_kvstore=True)
            for net, store in zip(nets[1:], stores, strict=True)
        )
        trained(first, nets[1], 0, 1)
        first.save_states(tmp_path / "states")
        nets[2].load_state_dict(nets[1].state_dict())
        second.load_states(tmp_path / "states")
        trained(second, nets[2], 2)
        second.load_state_dict(second.state_dict())  # while it is on the server
        assert second.state_dict()["state"][0]["seen"] == (b"\xff", 3)
        trained(second, nets[2], 3)
    for mine, expected in zip(nets[2].parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(mine, expected)
