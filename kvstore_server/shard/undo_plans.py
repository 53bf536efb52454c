"""Protects the chunks of an update by plans of the journal.

Rounds of the same tables change the same memory, chunk by chunk: weights, their write counters, and optimizer state.
What has to be copied before a chunk is updated is worked out once and kept as long as the chunks and the state are the
same, so that a round costs the copies, and next to nothing for a small table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.durable.journal import Journal, JournalPlan
from kvstore_server.shard.reduction import ReduceChunk
from kvstore_server.shard.storage import Storage

_MAX_PLANS = 64
"""Plans that are kept; a table has one for each set of keys that a round can leave out."""


class _PlannedUndo(NamedTuple):
    plan: JournalPlan
    chunks: Sequence[ReduceChunk]
    """Referenced, so that their identity stays their own."""
    state: list[Tensor]
    """All memory for optimizer state when the plan was made."""


class ChunkUndoPlans:
    """Plans for the updates of a Shard."""

    def __init__(self, storage: Storage, journal: Journal) -> None:
        self._storage = storage
        self._journal = journal
        self._known: dict[int, _PlannedUndo] = {}
        """By the identity of the chunks, which are cached themselves."""

    def begin(self, chunks: Sequence[ReduceChunk]) -> JournalPlan | None:
        """Begin to update chunks one after the other; each is then protected by `protect`, unless it is left out.

        Returns None if they must be protected otherwise, because weights may have to move (`Storage.may_move`), or
        something else was protected in the same change.
        """
        if self._journal.is_open or self._storage.may_move or not chunks:
            return None
        known = self._known.get(id(chunks))
        state = [one for block in self._storage.all_blocks for one in block.states.tensors.values()]
        if known is None or len(known.state) != len(state) or not all(map(is_, known.state, state)):
            if len(self._known) >= _MAX_PLANS:
                self._known.clear()
            known = _PlannedUndo(self._journal.plan(map(self._written_by, chunks)), chunks, state)
            self._known[id(chunks)] = known
        return known.plan if self._journal.begin_plan(known.plan) else None

    def protect(self, plan: JournalPlan, at: int, chunk: ReduceChunk) -> None:
        """Copy all that the update of a chunk writes, which is part `at` of the plan, to the journal's shadow."""
        self._journal.protect_part(plan, at)
        self._storage.note_protected(chunk.first, chunk.end)

    def _written_by(self, chunk: ReduceChunk) -> Iterable[Tensor]:
        """Return all memory that an update of a chunk writes."""
        block, lines = chunk.block, self._storage.lines
        yield block.weights[chunk.place]
        for memory in block.states.tensors.values():
            yield memory[chunk.place]
        for row in () if block.counters is None else block.counters:
            yield torch.from_numpy(row[lines[chunk.first].start : lines[chunk.end - 1].stop])
