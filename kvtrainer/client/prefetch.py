"""Weights that are requested with a push, because a loop pulled them after its last push and will pull them again."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrainer.client.tables import RemoteTable
from kvtrainer.types import Arenas


class Prefetch:
    """Buffers for weights that are requested with a push; pulls copy them until this worker contributes again.

    Only for synchronous rounds, where no other worker can change the weights before that.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Arenas] = {}
        """Table (by index) → where its weights arrive."""
        self._pulled: set[int] = set()
        """Tables that were pulled after this worker's last round of them."""
        self._ready: set[int] = set()
        """Tables whose buffers hold the weights of that round."""

    def begin(self, tables: Sequence[RemoteTable], may_prefetch: bool) -> list[Arenas] | None:
        """Begin a round of some tables; returns the buffers for their weights if these should be requested with it."""
        indices = [table.index for table in tables]
        were_pulled = self._pulled.issuperset(indices)
        self._pulled.difference_update(indices)
        self._ready.difference_update(indices)
        if not (may_prefetch and were_pulled):
            return None
        for table in tables:
            if table.index not in self._buffers:
                self._buffers[table.index] = table.new_arenas()
        return [self._buffers[index] for index in indices]

    def complete(self, indices: set[int]) -> None:
        self._ready |= indices

    def pull(self, tables: Sequence[RemoteTable], outs: Sequence[Arenas]) -> bool:
        """Copy the weights of tables whose rounds are over to `outs`; returns False if not all have been requested."""
        indices = [table.index for table in tables]
        self._pulled.update(indices)
        if not self._ready.issuperset(indices):
            return False
        for index, out in zip(indices, outs, strict=True):
            for dtype, flat in self._buffers[index].items():
                out[dtype].copy_(flat[: len(out[dtype])])
        return True

    def forget(self, index: int) -> None:
        self._buffers.pop(index, None)
        self._pulled.discard(index)
        self._ready.discard(index)
