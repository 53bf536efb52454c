"""Which sums an update takes, and sums that are kept until it is decided what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvstore_server.norms import Decision, apply_decision, only_segments, partial_of_slice
from kvstore_server.optimizer import Optimizer
from kvstore_server.optimizer.segment_rows import takes_rows
from kvstore_server.plan import Slice
from kvstore_server.reduction import Addend, Reducer, RowSet, SparsePayload, compute_dtype


class Sums(Protocol):
    """Gives the sums of a round, slice by slice: a Reducer, or sums that were made before."""

    def total(self, piece: Slice, addends: Sequence[Addend]) -> Tensor:
        """As `Reducer.total`."""

    def rows(self, piece: Slice, position: int, addends: Sequence[Addend]) -> RowSet | None:
        """As `Reducer.rows`."""


class Partial(NamedTuple):
    """What is told of the sum of one slice."""

    slice: int
    value: float
    is_finite: bool


def present_segments(piece: Slice, addends: Sequence[Addend]) -> list[bool]:
    """To which segments of a slice any rank contributed."""
    given = [a for a in addends if piece.index in a.slices]
    if any(not a.absent for a in given):
        return [True] * len(piece.segments)
    return [any(segment.key not in a.absent for a in given) for segment in piece.segments]


def sums_of_rows(
    piece: Slice,
    addends: Sequence[Addend],
    optimizer: Optimizer | None,
    numbers: Sequence[Mapping[str, Any]],
    present: Sequence[bool],
    sums: Sums,
) -> dict[int, RowSet]:
    """The segments that are updated by some rows alone: every rank gave only rows, and the optimizer wants that.

    Args:
        optimizer: None where the sums replace values.
        numbers: The hyper-parameters of each segment, if there is an optimizer.
    """
    found = {}
    if any(isinstance(a.slices.get(piece.index), SparsePayload) for a in addends):
        for position, here in enumerate(present):
            if here and (
                optimizer is None or not optimizer.elementwise or takes_rows(optimizer, numbers[position])
            ):
                rows = sums.rows(piece, position, addends)
                if rows is not None:
                    found[position] = rows
    return found


class HeldSums:
    """The sums of one round of some slices, kept; their memory is used again for those of the next one."""

    def __init__(self, slices: Sequence[Slice], reducer: Reducer) -> None:
        self._slices = slices
        self._reducer = reducer
        self._memory: dict[int, Tensor] = {}
        """Slice → as long as the slice, in the dtype to compute in."""
        self._rows: dict[int, dict[int, RowSet]] = {}
        """Slice → position of a segment → its rows."""
        self._held: set[int] = set()
        """The slices whose total is as it was summed."""
        self._decision = Decision()

    def hold(
        self,
        addends: Sequence[Addend],
        optimizer: Optimizer,
        hypers: Sequence[Mapping[str, Any]],
        norm_type: float,
    ) -> list[Partial]:
        """Keep all that an update will ask for; returns the partial norms of the slices that any rank contributed to.

        What all ranks gave as rows is measured as rows, whatever the optimizer makes of it: so does a worker that
        updates by itself. `hypers[i]` holds for key i.
        """
        self._rows.clear()
        self._held.clear()
        self._decision = Decision()
        partials = []
        for piece in self._slices:
            present = present_segments(piece, addends)
            if any(present):
                numbers = [hypers[segment.key] for segment in piece.segments]
                updated = sums_of_rows(piece, addends, optimizer, numbers, present, self._reducer)
                self._rows[piece.index] = updated
                body = None
                measured = self._rows_to_measure(piece, addends, present, updated)
                if len(updated) < sum(present):
                    total = self._total(piece, addends)
                    body = _only_dense(total[: piece.used], piece, present, measured)
                partials.append(Partial(piece.index, *partial_of_slice(body, measured, norm_type)))
        return partials

    def decide(self, decision: Decision) -> None:
        """From now on the sums are given as multiplied and clipped."""
        self._decision = decision

    def total(self, piece: Slice, addends: Sequence[Addend]) -> Tensor:
        total = self._memory[piece.index]
        if piece.index in self._held:
            # Here, not for all slices at once: this one is used now, and is in the cache from then on.
            self._held.remove(piece.index)
            apply_decision(total, self._decision)
        return total

    def rows(self, piece: Slice, position: int, addends: Sequence[Addend]) -> RowSet | None:
        rows = self._rows[piece.index].get(position)
        if rows is None:
            return None
        # Rows of a single rank are not copied when they are summed.
        values = rows.values.clone()
        apply_decision(values, self._decision)
        return rows._replace(values=values)

    def _total(self, piece: Slice, addends: Sequence[Addend]) -> Tensor:
        """Sum a slice into memory of its own."""
        if piece.index not in self._memory:
            self._memory[piece.index] = torch.empty(piece.length, dtype=compute_dtype(piece.dtype))
        self._held.add(piece.index)
        return self._reducer.total(piece, addends, self._memory[piece.index])

    def _rows_to_measure(
        self,
        piece: Slice,
        addends: Sequence[Addend],
        present: Sequence[bool],
        updated: Mapping[int, RowSet],
    ) -> Mapping[int, RowSet]:
        """The segments of which all ranks gave only rows; those that are `updated` by rows are known."""
        if not any(isinstance(a.slices.get(piece.index), SparsePayload) for a in addends):
            return {}
        others = [at for at, here in enumerate(present) if here and at not in updated]
        found = {at: self._reducer.rows(piece, at, addends) for at in others}
        return {**updated, **{at: rows for at, rows in found.items() if rows is not None}}


def _only_dense(
    body: Tensor, piece: Slice, present: Sequence[bool], rows: Mapping[int, RowSet]
) -> Tensor | None:
    """The elements of a slice that count beside some rows, zero elsewhere; None where there are none."""
    dense = [here and at not in rows for at, here in enumerate(present)]
    if not any(dense):
        return None
    return body if all(dense) else only_segments(body, piece, dense)
