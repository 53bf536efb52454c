"""Workers that train with every kind of store and save states, or go on from states that others have saved.

A place goes on with one kind of optimizer from each source, such that it meets every kind, and every kind meets every
place and source. All workers have the same data, so that a mean over them has the bits of one worker's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kvtrainer
from tests.support.jobs import own_place

BEFORE, AFTER = 3, 3
"""Steps before the states are saved, and after."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01},
    "torch:NAdam": {"lr": 0.01},
    "lamb": {"learning_rate": 0.01},
}
PLACES: dict[str, tuple[str | None, bool | None]] = {
    "none": (None, None),
    "local": ("local", True),
    "device": ("device", True),
    "reduced": ("local", False),
    "dist": ("dist_sync", True),
    "dist reduced": ("dist_sync", False),
}
"""The store, and whether the optimizer runs in it."""


class Net(nn.Module):
    """A parameter that is spread over all servers, small ones of unequal size, and a 0-d one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.inner = nn.Linear(60, 301)
        self.outer = nn.Linear(301, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(x))) * self.scale
        return out


def trainer_of(net: Net, kind: str, place: str, options: dict[str, Any] | None = None) -> kvtrainer.Trainer:
    name, in_store = PLACES[place]
    store = None if name is None else kvtrainer.kvstore.create(name)
    options = OPTIMIZERS[kind] if options is None else options
    return kvtrainer.Trainer(net.named_parameters(), kind, options, kvstore=store, update_on_kvstore=in_store)


def train(net: Net, trainer: kvtrainer.Trainer, first: int, steps: int) -> None:
    """Steps whose data and learning rate depend only on their number."""
    for i in range(first, first + steps):
        generator = torch.Generator().manual_seed(i)
        trainer.set_learning_rate(0.05 / (i + 1))
        trainer.zero_grad()
        net(torch.randn(4, 60, generator=generator)).square().mean().backward()
        trainer.step()


def weights(net: Net) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def save(folder: Path, place: str, kind: str) -> list[Tensor]:
    """Train, save in the middle on the last rank, and train on."""
    rank, workers = own_place()
    net = Net()
    with trainer_of(net, kind, place) as trainer:
        train(net, trainer, 0, BEFORE)
        if rank == workers - 1:
            trainer.save_states(folder / "states")
            torch.save(net.state_dict(), folder / "weights")
        train(net, trainer, BEFORE, AFTER)
    return weights(net)


def load(folder: Path, place: str, kind: str) -> list[Tensor]:
    """Go on from the middle; options that the file must overrule are other ones here."""
    net = Net()
    net.load_state_dict(torch.load(folder / "weights"))
    decay = "weight_decay" if kind.startswith("torch:") else "wd"
    with trainer_of(net, kind, place, {**OPTIMIZERS[kind], decay: 0.5}) as trainer:
        trainer.load_states(folder / "states")
        train(net, trainer, BEFORE, AFTER)
    return weights(net)


def folder_of(base: Path, source: str, kind: str) -> Path:
    """Where the files of one run are; `source` names the place and the size of its job."""
    found = base / source.replace(" ", "-") / kind.replace(":", "-")
    found.mkdir(parents=True, exist_ok=True)
    return found


def kind_of(place: str, source: str, sources: Sequence[str]) -> str:
    """Give the optimizer with which a place goes on from a source."""
    kinds = [*OPTIMIZERS]
    return kinds[(sources.index(place) + sources.index(source)) % len(kinds)]


def save_all(rank: int, workers: int, folder: str, places: list[str]) -> dict[str, Any]:
    """The weights of runs that were never interrupted, by place and kind; they save in the middle."""
    base = Path(folder)
    return {
        place: {kind: save(folder_of(base, place, kind), place.rstrip("123 "), kind) for kind in OPTIMIZERS}
        for place in places
    }


def load_all(rank: int, workers: int, folder: str, places: list[str], sources: list[str]) -> dict[str, Any]:
    """The weights of runs that went on from the files of the sources, by place and source."""
    results: dict[str, Any] = {place: {} for place in places}
    for place, found in results.items():
        for source in sources:
            kind = kind_of(place, source, sources)
            found[source] = load(folder_of(Path(folder), source, kind), place.rstrip("123 "), kind)
    return results
