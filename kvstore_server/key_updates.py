"""Updates of whole keys on a server, for optimizers that need more of a key than one element at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvstore_server.optimizer import KeyState, Optimizer, update_key, update_rows
from kvstore_server.optimizer.rows import moves_only_rows
from kvstore_server.plan import Plan, Segment, row_numel
from kvstore_server.reduction import Addend, RowSet, SparsePayload, compute_dtype
from kvstore_server.row_changes import RowChanges
from kvstore_server.sums import Sums

Place = tuple[int, Segment]
"""The position of a slice in the table, and a segment of it."""
Writable = Callable[[int], Tensor]


class KeyUpdates:
    """The state of the keys that lie on one server, and their update; the weights are the table's.

    Args:
        plan, server: Which keys; each must lie whole on the server by the time that it is updated.
        changes: Is told what was written.
    """

    def __init__(self, plan: Plan, server: int, changes: RowChanges) -> None:
        self._plan = plan
        self._slices = plan.slices_of(server)
        self._changes = changes
        self.states: dict[int, KeyState] = {}
        """Of the keys that were updated, or whose state was asked for."""

    def state(self, key: int) -> KeyState:
        """The state of a key, made now where it has none yet."""
        return self.states.setdefault(key, KeyState())

    @cached_property
    def _places(self) -> dict[int, list[Place]]:
        places: dict[int, list[Place]] = {}
        for at, piece in enumerate(self._slices):
            for segment in piece.segments:
                places.setdefault(segment.key, []).append((at, segment))
        return places

    def update(
        self,
        optimizer: Optimizer,
        addends: Sequence[Addend],
        hypers: Sequence[Mapping[str, Any]],
        sums: Sums,
        writable: Writable,
    ) -> None:
        """Update each key by the sum of what was given for it.

        Args:
            hypers: `hypers[i]` holds for key i.
            writable: Gives the weights of the slice at a position, to be written.
        """
        gathered: dict[int, Tensor] = {}
        rows: dict[int, list[RowSet]] = {}
        for at, piece in enumerate(self._slices):
            given = [a for a in addends if piece.index in a.slices]
            present = [any(s.key not in a.absent for a in given) for s in piece.segments]
            if any(isinstance(a.slices[piece.index], SparsePayload) for a in given):
                for position, segment in enumerate(piece.segments):
                    part = sums.rows(piece, position, addends) if present[position] else None
                    if part is not None:
                        present[position] = False
                        rows.setdefault(segment.key, []).append(_of_key(segment, part))
                        if self._places[segment.key][-1][0] == at:
                            self._update(
                                optimizer, segment.key, rows[segment.key], hypers[segment.key], writable
                            )
            if not any(present):
                continue
            total = sums.total(piece, addends)
            for segment, here in zip(piece.segments, present, strict=True):
                if not here:
                    continue
                grad = total[segment.start : segment.start + segment.numel]
                places = self._places[segment.key]
                if len(places) > 1:
                    # The next slice's sum takes the place of this one.
                    grad = self._gather(gathered, segment, grad)
                if places[-1][0] == at:
                    self._update(optimizer, segment.key, grad, hypers[segment.key], writable)

    def _gather(self, gathered: dict[int, Tensor], segment: Segment, grad: Tensor) -> Tensor:
        spec = self._plan.specs[segment.key]
        if segment.key not in gathered:
            gathered[segment.key] = torch.empty(spec.numel, dtype=compute_dtype(spec.dtype))
        whole = gathered[segment.key]
        whole[segment.key_start : segment.key_start + segment.numel].copy_(grad)
        return whole

    def _update(
        self,
        optimizer: Optimizer,
        key: int,
        grad: Tensor | Sequence[RowSet],
        hyper: Mapping[str, Any],
        writable: Writable,
    ) -> None:
        """Update a key by its gradient, or by the rows of it that its slices have."""
        spec, places = self._plan.specs[key], self._places[key]
        parts = [writable(at)[s.start : s.start + s.numel] for at, s in places]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        named = {**hyper, "key": spec.key}
        state, shaped = self.state(key), weight.view(spec.shape)
        if isinstance(grad, Tensor):
            update_key(optimizer, shaped, grad.view(spec.shape), state, named)
        else:
            ids, values = torch.cat([rows.ids for rows in grad]), torch.cat([rows.values for rows in grad])
            update_rows(optimizer, shaped, ids, values, state, named)
        self._note(key, grad, moves_only_rows(optimizer, hyper))
        if len(parts) > 1:
            for part, (_, s) in zip(parts, places, strict=True):
                part.copy_(weight[s.key_start : s.key_start + s.numel])

    def _note(self, key: int, grad: Tensor | Sequence[RowSet], moves_only: bool) -> None:
        """Say what an update of a key has changed."""
        width = row_numel(self._plan.specs[key])
        for at, (place, segment) in enumerate(self._places[key]):
            piece = self._slices[place]
            ids = None
            if moves_only and not isinstance(grad, Tensor):
                ids = grad[at].ids - segment.key_start // width
            self._changes.note(piece.index, piece.segments.index(segment), ids)


def _of_key(segment: Segment, rows: RowSet) -> RowSet:
    """Rows of a segment, counted from the first row of the key."""
    return RowSet(rows.ids + segment.key_start // rows.values.shape[1], rows.values)
