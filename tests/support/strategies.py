"""Strategies for tests: in a directory of their own, quiet, and closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer.strategy import Strategy

Make = Callable[..., Strategy]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes strategies in `tmp_path / "work"`; seed 1 unless something else is asked for."""
    made: list[Strategy] = []
    before = torch.get_rng_state()

    def strategy(kvstore: Any = "device", cls: type[Strategy] = Strategy, **options: Any) -> Strategy:
        given = {"work_dir": str(tmp_path / "work"), "env_kwargs": {"randomness": {"seed": 1}}, **options}
        made.append(cls(kvstore=kvstore, **given))
        return made[-1]

    yield strategy
    for one in made:
        one.close()
    torch.set_rng_state(before)


class Net(nn.Module):
    """A weight, a bias and a buffer; `head` is a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return out

    def train_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


SCHEDULE = {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 5}
AMP: dict[str, Any] = {
    "optimizer": {"type": "Adam", "lr": 0.1},
    "type": "AmpOptimWrapper",
    "loss_scale": {"init_scale": 8.0, "growth_interval": 2},
    "accumulative_counts": 2,
}
SGD: dict[str, Any] = {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}


class ConfigObject:
    """What mmengine's Config is like: no Mapping, but it can be made a dict."""

    def __init__(self, **content: Any) -> None:
        self._content = content

    def to_dict(self) -> dict[str, Any]:
        return self._content


def steps(model: Any, trainer: Any, count: int) -> None:
    """Steps with random data."""
    for _ in range(count):
        trainer.update_params(model(torch.randn(4, 2)).square().mean())


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
