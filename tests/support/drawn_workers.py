"""Workers of real servers whose first weights are the same, and whose gradients are drawn by their rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import kvtrainer
from kvtrainer.kvstore import DistKVStore
from tests.support.processes import Members, Process


class DrawnWorker:
    """A Trainer of parameters "p0", "p1", …; with `assigns` gradients are assigned, else a backward pass makes them."""

    shapes: Sequence[tuple[int, ...]] = ()
    assigns = False

    def __init__(self, store: DistKVStore, rank: int, optimizer: str = "adam", **options: Any) -> None:
        drawn = torch.Generator().manual_seed(5)
        self.parameters = self.made(drawn)
        names = {f"p{at}": parameter for at, parameter in enumerate(self.parameters)}
        self.trainer = kvtrainer.Trainer(names, optimizer, {"learning_rate": 0.01}, kvstore=store, **options)
        self._drawn = torch.Generator().manual_seed(rank)

    def made(self, drawn: torch.Generator) -> list[Parameter]:
        return [Parameter(torch.randn(shape, generator=drawn)) for shape in self.shapes]

    def backward(self) -> list[Tensor]:
        """Give all parameters gradients; return what they have to be."""
        drawn = [torch.randn(shape, generator=self._drawn) for shape in self.shapes]
        if self.assigns:
            for parameter, grad in zip(self.parameters, drawn, strict=True):
                parameter.grad = grad
        else:
            products = [(p * d).sum() for p, d in zip(self.parameters, drawn, strict=True)]
            torch.stack(products).sum().backward()  # type: ignore[no-untyped-call]
        return drawn

    def steps(self, number: int = 1, edit: Callable[[Any], object] = lambda _: None) -> None:
        for _ in range(number):
            self.backward()
            edit(self)
            self.trainer.step(2)

    @property
    def grads(self) -> list[Tensor]:
        return [grad for p in self.parameters if (grad := p.grad) is not None]

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]


def on_two(
    members: Members,
    servers: Sequence[Process],
    make: Callable[..., Any],
    work: Callable[[Any], Any],
    **options: Any,
) -> list[Any]:
    """What two workers return that do the same work; `make` makes each of them out of its store and rank."""
    return members.on_two(servers, lambda store, rank: work(make(store, rank, **options)))


def are_equal(found: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all of these lists hold the same bits."""
    return all(all(map(torch.equal, weights, found[0])) for weights in found)
