"""Workers of stores without rounds, all in one thread: nothing waits for anything, so a test says who acts when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.kvstore import DistKVStore
from tests.support.processes import Members, new_name, together
from tests.support.stores import Servers

SHAPES = {"small": (3, 5), "sliced": (128, 64)}
"""Of the parameters; the second one lies on both servers."""


def start_of(name: str) -> Tensor:
    """A parameter's first values."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)))


def gradient(name: str, turn: int) -> Tensor:
    """What is contributed to a parameter at the n-th turn of all workers together."""
    random = torch.Generator().manual_seed(100 * len(name) + turn)
    return torch.randn(SHAPES[name], generator=random)


class Worker:
    """A Trainer over both parameters, and its store."""

    def __init__(
        self, kv: DistKVStore, optimizer: Any, options: dict[str, Any] | None, extra: Mapping[str, Any]
    ) -> None:
        self.kv = kv
        self.weights = {name: start_of(name).mul_(kv.rank == 0).requires_grad_() for name in SHAPES}
        self.trainer = kvtrainer.Trainer(list(self.weights.items()), optimizer, options, kvstore=kv, **extra)

    def backward(self, turn: int, *names: str) -> None:
        """Compute the gradients of a turn, of these parameters or of all."""
        losses = [(self.weights[name] * gradient(name, turn)).sum() for name in names or SHAPES]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]

    def step(self, turn: int) -> None:
        """Contribute the gradients of a turn."""
        self.backward(turn)
        self.trainer.step(1)

    def values(self) -> dict[str, Any]:
        """Its weights, in float64."""
        return {name: weight.detach().double().numpy() for name, weight in self.weights.items()}


@contextmanager
def workers(
    jobs: Servers, type: str, optimizer: Any, options: dict[str, Any] | None = None, *,
    count: int = 2, num_servers: int = 2, store: Mapping[str, Any] | None = None, **extra: Any,
) -> Iterator[list[Worker]]:  # fmt: skip
    """The workers of a job, whose weights are those of rank 0 already."""
    name = new_name()
    with Members() as members:
        servers, given = jobs.of(num_servers), {"type": type, **(store or {})}
        stores = [members.join(servers, rank, count, name, **given) for rank in range(count)]
        made = [Worker(kv, optimizer, None if options is None else dict(options), extra) for kv in stores]
        start_all(made)
        yield made
        for worker in made:
            worker.trainer.close()


def start_all(made: list[Worker]) -> None:
    """The first thing that workers do together: publish rank 0's weights."""
    for outcome in together(*(worker.trainer.set_data for worker in made)):
        if isinstance(outcome, BaseException):
            raise outcome


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any], atol: float = 2e-6) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-6, atol=atol, err_msg=name)
