"""A worker that does in the middle of training what must not cost the servers their optimizer state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer import kvstore
from kvtrainer.kvstore.verbs import TableKVStore
from tests.support.jobs import deliver, own_place

MOMENTUM, RATE, NEW_RATE = 0.5, 0.5, 0.25
SHAPES = {"w": (2, 3), "v": (9000,)}
"""The second lies on both servers."""

Change = Callable[[kvtrainer.Trainer, dict[str, nn.Parameter], Path], None]


def nothing(trainer: kvtrainer.Trainer, parameters: dict[str, nn.Parameter], path: Path) -> None:
    pass


def rate(trainer: kvtrainer.Trainer, parameters: dict[str, nn.Parameter], path: Path) -> None:
    trainer.set_learning_rate(NEW_RATE)


def data(trainer: kvtrainer.Trainer, parameters: dict[str, nn.Parameter], path: Path) -> None:
    trainer.set_data({"w": torch.zeros(SHAPES["w"])})


def written(trainer: kvtrainer.Trainer, parameters: dict[str, nn.Parameter], path: Path) -> None:
    nn.init.zeros_(parameters["w"])
    trainer.set_data()


def saved(trainer: kvtrainer.Trainer, parameters: dict[str, nn.Parameter], path: Path) -> None:
    """Every worker has a file of its own; each holds the state of all servers."""
    trainer.save_states(path)
    trainer.load_states(path)


CHANGES: dict[str, Change] = {c.__name__: c for c in (nothing, rate, data, written, saved)}


def with_trainer(change: Change, path: Path) -> dict[str, Tensor]:
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    options = {"learning_rate": RATE, "momentum": MOMENTUM}
    with kvtrainer.Trainer(
        parameters, "sgd", options, kvstore="dist_sync", update_on_kvstore=True
    ) as trainer:
        for step in range(4):
            if step == 2:
                change(trainer, parameters, path)
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            trainer.step()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def with_verbs() -> dict[str, Tensor]:
    """Every worker names the optimizer again in the middle, with another rate, as a script that is run again does."""
    _, workers = own_place()
    outs = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    kv = kvstore.create("dist_sync")
    assert isinstance(kv, TableKVStore)
    with kv:
        kv.init(list(SHAPES), [torch.ones(shape) for shape in SHAPES.values()])
        for step in range(4):
            if step % 2 == 0:
                lr = NEW_RATE if step else RATE
                kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=lr, momentum=MOMENTUM))
            kv.push(list(SHAPES), [torch.full(shape, 1 / workers) for shape in SHAPES.values()])
        kv.pull(list(SHAPES), out=list(outs.values()))
        kv.barrier()
    return outs


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    own, _ = own_place()
    runs = {name: with_trainer(change, folder / f"states{own}") for name, change in CHANGES.items()}
    deliver({**runs, "verbs": with_verbs()})
