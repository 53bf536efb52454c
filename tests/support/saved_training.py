"""A small model, its training by every kind of optimizer at every place, and ways in which its states are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvtrainer import Trainer, kvstore
from kvtrainer.strategy.checkpoint import (
    common_checkpoint_states,
    fit_checkpoint_states,
    own_checkpoint_states,
    pack_checkpoint_tree,
    unpack_checkpoint_tree,
)

PLACES = pytest.mark.parametrize("uok", [None, False, True], ids=["in-process", "reduced", "in-store"])
ELEMENTWISE: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {},
    "nadam": {},
    "rmsprop": {"centered": True},
    "ftrl": {},
    "sgld": {"learning_rate": 1e-3},
    "test": {},
    "torch:SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "torch:Adam": {"lr": 0.1, "amsgrad": True},
    "torch:AdamW": {"lr": 0.1},
    "torch:Adagrad": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5},
    "torch:Adadelta": {"lr": 0.5},
    "torch:Adamax": {"lr": 0.1},
    "torch:NAdam": {"lr": 0.1, "momentum_decay": 0.1},
    "torch:RAdam": {"lr": 0.1},
    "torch:RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "torch:Rprop": {"lr": 0.1},
    "torch:ASGD": {"lr": 0.1, "t0": 2, "lambd": 0.1},
}
WHOLE: dict[str, dict[str, Any]] = {
    "lamb": {},
    "lans": {},
    "lars": {"momentum": 0.9},
    "groupadagrad": {"learning_rate": 0.1},
    "rowadam": {"learning_rate": 0.1},
    "torch:Muon": {"lr": 0.1},
    "torch:Adafactor": {"lr": 0.1},
}
MATRICES_ONLY = ("groupadagrad", "rowadam", "torch:Muon")


class Net(nn.Module):
    """A 0-d parameter, one that is cut into slices, and small ones that share a slice."""

    def __init__(self, with_vectors: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=with_vectors)
        self.inner = nn.Linear(7, 900, bias=with_vectors)
        self.outer = nn.Linear(900, 3, bias=with_vectors)
        self.to(dtype)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(x))) * self.scale
        return out


def trainer_of(net: Net, kind: str, uok: bool | None = None, **options: Any) -> Trainer:
    store = None if uok is None else kvstore.create("local")
    options = {**ELEMENTWISE, **WHOLE}.get(kind, {}) | options
    return Trainer(net.trained(), kind, options, kvstore=store, update_on_kvstore=uok)


def train(net: nn.Module, trainer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Steps whose data depend only on their number."""
    for i in range(first, first + steps):
        generator = torch.Generator().manual_seed(i)
        trainer.zero_grad()
        x = torch.randn(4, 7, generator=generator).to(next(net.parameters()).dtype)
        net(x).square().mean().backward()
        trainer.step()


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def random_steps(net: nn.Module, optimizer: Any, *steps: int) -> None:
    """Steps of torch's optimizer, or of a Trainer, with random gradients that depend only on their number."""
    for at in steps:
        generator = torch.Generator().manual_seed(at)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def by_file(trainer: Any, other: Trainer, path: Path) -> None:
    trainer.save_states(path)
    other.load_states(path)


def by_state_dict(trainer: Any, other: Trainer, path: Path) -> None:
    other.load_state_dict(trainer.state_dict())


def by_checkpoint(trainer: Any, other: Trainer, path: Path) -> None:
    """As a strategy's checkpoint has the states."""
    common, own = unpack_checkpoint_tree(
        pack_checkpoint_tree([common_checkpoint_states(trainer), own_checkpoint_states(trainer)])
    )
    fit_checkpoint_states(other, common, own)()
