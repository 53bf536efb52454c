"""A small model in front of one store and one site of the update, with which the options of a Trainer are tried out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import kvtrainer
from kvtrainer.kvstore import KVStoreBase
from kvtrainer.types import StepResult


@dataclass(frozen=True)
class Place:
    """A store, and how many copies of each parameter the process has."""

    title: str
    make: Callable[[], Any]
    copies: int = 1
    is_sync: bool = True
    """False where every contribution is an update of its own."""


class Bench:
    """Trains `w`, of two elements, and `bias`, of one; both start at zero unless told otherwise.

    All numbers are means over workers and copies, so every place gives the same.
    """

    def __init__(self, place: Place, site: bool | None) -> None:
        self.place, self.site = place, site
        self.is_built = False
        """Whether the Trainer was made and configured."""
        self.logged: list[str] = []
        self._open: list[Any] = []
        self.w: list[Tensor] = []
        self.bias: list[Tensor] = []
        self.trainer: Any = None
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    def build(
        self,
        optimizer: Any = "sgd",
        optimizer_params: dict[str, Any] | None = None,
        configure: dict[str, Any] | None = None,
        start: float = 0.0,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        """Make the Trainer; any error of the library is one at construction then."""
        copies = range(self.place.copies)
        self.w = [nn.Parameter(torch.full((2,), start, dtype=dtype)) for _ in copies]
        self.bias = [nn.Parameter(torch.full((1,), start, dtype=dtype)) for _ in copies]
        store = self.place.make()
        if isinstance(store, KVStoreBase):
            self._open.append(store)
        params = (
            {"w": self.w, "bias": self.bias} if len(copies) > 1 else {"w": self.w[0], "bias": self.bias[0]}
        )
        rate = {"lr": 1.0} if isinstance(optimizer, type) else {"learning_rate": 1.0}
        given = {**rate, **(optimizer_params or {})} if isinstance(optimizer, str | type) else None
        made = kvtrainer.Trainer(
            params, optimizer, given, store, options.pop("compression_params", None), self.site, **options
        )
        self._open.insert(0, made)
        self.trainer = made
        if configure:
            made.configure(**configure)
        self.is_built = True

    def losses(self, *slopes: float, bad: bool = False, leaves_out_bias: bool = False) -> list[Tensor]:
        """Losses with these gradients of w[0], w[1] and bias; `bad`: infinite on the first worker."""
        first = math.inf if bad and self._rank == 0 else 1.0
        a, b, c = (*slopes, 0.0, 0.0)[:3]
        made = []
        for w, bias in zip(self.w, self.bias, strict=True):
            loss = (w * torch.tensor([a * first, b], dtype=w.dtype)).sum()
            made.append(loss if leaves_out_bias else loss + c * bias.sum())
        return made

    def push(self, *slopes: float, bad: bool = False) -> StepResult:
        """One update of the Trainer."""
        result = self.trainer.update_params(self.losses(*slopes, bad=bad))
        assert isinstance(result, StepResult)
        return result

    def weights(self) -> list[float]:
        """w[0], w[1], bias; the same in every copy."""
        found = [[*w.tolist(), *bias.tolist()] for w, bias in zip(self.w, self.bias, strict=True)]
        assert all(str(one) == str(found[0]) for one in found), f"copies differ: {found}"
        return found[0]

    def close(self) -> None:
        for one in self._open:
            one.close()
        self._open = []


@contextmanager
def bench_at(place: Place, site: bool | None) -> Iterator[Bench]:
    """A bench whose `logged` gets what the library logs as a warning or an error; closed with the block."""
    bench = Bench(place, site)
    logger, handler = logging.getLogger("kvtrainer"), _Keeper(bench.logged)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield bench
    finally:
        bench.close()
        logger.removeHandler(handler)
        logger.propagate = propagates


class _Keeper(logging.Handler):
    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(record.getMessage())
