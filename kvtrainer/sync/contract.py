"""Contract of a Trainer and what synchronises it, and its simplest form: over a third-party store."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from kvstore_server.norms import Decision, Guard, Measured
from kvstore_server.plan import Plan
from kvstore_server.rows import RowSet
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.memory.row_sparse import NO_TABLES, Tables


class Gradients(NamedTuple):
    """The part that one worker gives to a round."""

    arenas: Mapping[str, Tensor]
    """Flat, laid out by the plan; also where sums come back."""
    rows: Mapping[int, RowSet]
    """Keys (by index) that have only some rows."""
    scale: float
    absent: frozenset[int]
    """Keys without a gradient."""
    hyper: bytes = b""
    """The hyper-parameters, packed; empty when nothing changed."""
    veto: bool = False
    """These gradients are not finite: the round has no effect on any worker."""
    guard: Guard | None = None
    """All workers' sum is measured and decided about before it is used. Only for a store that updates in synchronous
    rounds; every worker must give one, of the same type of norm."""


class Outcome(NamedTuple):
    """The end of a round that did not fail."""

    left_out: frozenset[int]
    """The keys (by index) that no worker contributed to."""
    skipped: bool
    """A worker vetoed: weights, gradients and optimizer state are as before, for every worker."""
    rows: Mapping[int, RowSet] | None = None
    """The scaled sums of those keys of which all workers gave only rows; None where rows did not travel, or sums do
    not come back."""
    measured: Measured | None = None
    """The gradient that the store updated with, where it was asked."""
    decision: Decision = Decision()
    """The decision about it."""


class Shadowed(NamedTuple):
    """A round to which this worker gave nothing because it has no more data."""

    outcome: Outcome
    hyper: bytes
    """The hyper-parameters of those that have some, packed; empty when there were none."""
    is_over: bool
    """No worker has: the round was none."""


class Exchange(ABC):
    """One way to synchronise a Trainer: over an engine, over ranks, or over somebody else's store."""

    num_workers: int
    updates_weights: bool = False
    """Whether the optimizer runs in the store."""
    is_sync: bool = True
    """Whether a round takes one contribution of every worker."""
    is_ours: bool = True
    """Whether it knows which keys all workers left out, and workers without data that take part with nothing."""
    refuses_rows: str = ""
    """Why gradients may not be row-sparse here; empty where they may."""

    @abstractmethod
    def init(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        """Give every worker rank 0's weights, and the store rank 0's row-sparse ones."""

    @abstractmethod
    def run(self, grads: Gradients, weights: Mapping[str, Tensor]) -> Outcome:
        """Run one round. New weights go to `weights`, or else sums of gradients to those of `grads`."""

    @abstractmethod
    def shadow(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Shadowed:
        """Run one round to which this worker gives nothing; sums go to `grads`.

        When it is over for all workers, or where contributions count one by one, the store's weights go to `weights`.
        """

    @abstractmethod
    def assign(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        """Give every worker, and the store, rank 0's weights as they are now; optimizer state stays. Of row-sparse keys
        only those of rank 0's `tables` change."""

    def stats(self) -> list[dict[str, Any]]:
        """Fetch the counters of every server; none for stores that keep none."""
        return []


class PluginExchange(Exchange):
    """Over a third-party store: `broadcast` and `pushpull` of one key per parameter; the trainer updates."""

    is_ours = False

    def __init__(self, store: KVStoreBase, plan: Plan) -> None:
        self.num_workers = store.num_workers
        self._store = store
        self._plan = plan
        self.refuses_rows = (
            f"but kvstore {store.type!r} sums dense gradients only; build the module with sparse=False"
        )

    def init(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        for key, piece in enumerate(self._pieces(weights)):
            self._store.broadcast(key, piece, piece)

    def run(self, grads: Gradients, weights: Mapping[str, Tensor]) -> Outcome:
        for key, piece in enumerate(self._pieces(grads.arenas)):
            if grads.scale != 1.0:
                piece.mul_(grads.scale)
            if grads.veto:
                piece.fill_(math.inf)  # a sum is all that such a store knows: this one tells every worker
            self._store.pushpull(key, piece, piece, priority=-key)
        # Zeros stand in for what one of several workers left out. Who did not veto learns of it from the sums.
        return Outcome(grads.absent if self.num_workers == 1 else frozenset(), skipped=grads.veto)

    def shadow(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Shadowed:
        raise ConfigurationError(f"kvstore {self._store.type!r} does not know workers without data")

    def assign(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        for key, piece in enumerate(self._pieces(weights)):
            if self._store.rank != 0:
                piece.zero_()
            self._store.pushpull(key, piece, piece, priority=-key)

    def _pieces(self, arenas: Mapping[str, Tensor]) -> Sequence[Tensor]:
        rows = zip(self._plan.specs, self._plan.key_offsets, strict=True)
        return [arenas[spec.dtype][at : at + spec.numel].view(spec.shape) for spec, at in rows]
