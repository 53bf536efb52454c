"""Synchronise a Trainer over a third-party store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvstore_server.norms import Guard
from kvstore_server.plan import Plan
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.memory.row_sparse import NO_TABLES, Tables
from kvtrainer.sync.contract import Gradients, Outcome, Shadowed


class PluginExchange:
    """Over a third-party store: `broadcast` and `pushpull` of one key per parameter; the trainer updates."""

    updates_weights = False
    knows_left_out = False
    is_sync = True
    can_shadow = False

    def __init__(self, store: KVStoreBase, plan: Plan) -> None:
        self.num_workers = store.num_workers
        self._store = store
        self._plan = plan

    def init(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        for key, piece in enumerate(self._pieces(weights)):
            self._store.broadcast(key, piece, piece)

    def check_sparse(self, names: Sequence[str]) -> None:
        raise ConfigurationError(
            f"the gradient of {', '.join(map(repr, names))} is row-sparse, but kvstore {self._store.type!r} sums dense "
            "gradients only; build the module with sparse=False"
        )

    def run(
        self,
        grads: Gradients,
        weights: Mapping[str, Tensor],
        hyper: bytes,
        veto: bool = False,
        guard: Guard | None = None,
    ) -> Outcome:
        for key, piece in enumerate(self._pieces(grads.arenas)):
            if grads.scale != 1.0:
                piece.mul_(grads.scale)
            if veto:
                piece.fill_(math.inf)  # a sum is all that such a store knows: this one tells every worker
            self._store.pushpull(key, piece, piece, priority=-key)
        # Zeros stand in for what one of several workers left out. Who did not veto learns of it from the sums.
        return Outcome(grads.absent if self.num_workers == 1 else frozenset(), skipped=veto)

    def shadow(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Shadowed:
        raise ConfigurationError(f"kvstore {self._store.type!r} does not know workers without data")

    def assign(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        for key, piece in enumerate(self._pieces(weights)):
            if self._store.rank != 0:
                piece.zero_()
            self._store.pushpull(key, piece, piece, priority=-key)

    def stats(self) -> list[dict[str, Any]]:
        return []

    def _pieces(self, arenas: Mapping[str, Tensor]) -> Sequence[Tensor]:
        rows = zip(self._plan.specs, self._plan.key_offsets, strict=True)
        return [arenas[spec.dtype][at : at + spec.numel].view(spec.shape) for spec, at in rows]
