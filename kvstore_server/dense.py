"""The dense table: the weights of the slices that one server holds, their sums and their updates.

Every slice is reduced and updated on its own, or every key with an optimizer that needs whole keys, so the bits do
not depend on arrival order or on the number of servers. Nothing here knows a message, a clock or a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.errors import OptimizerError, ProtocolError
from kvstore_server.key_updates import KeyUpdates
from kvstore_server.optimizer import KeyState, Optimizer, SliceState, update_slice
from kvstore_server.optimizer.rows import moves_only_rows
from kvstore_server.optimizer.segment_rows import SegmentPlace, update_segment_rows
from kvstore_server.payloads import view_payload
from kvstore_server.plan import ALIGNMENT, Plan, Slice
from kvstore_server.protocol.messages import Payload
from kvstore_server.reduction import Addend, Reducer, torch_dtype
from kvstore_server.row_changes import RowChanges
from kvstore_server.row_payload import RowForm
from kvstore_server.state_blob import pack_key_state, pack_state, unpack_key_state, unpack_state
from kvstore_server.sums import HeldSums, Sums, present_segments, sums_of_rows
from kvstore_server.update_counts import UpdateCounts, following_here, left_out_by_all

Updater = Callable[[str, Tensor, Tensor], None]
"""`updater(key, merged, stored)` changes `stored` in place."""


class Leases(Protocol):
    """Knows which buffers are still being sent, and so may not be written."""

    def is_busy(self, buffer: Tensor) -> bool: ...


@dataclass
class _Undo:
    """What a table looked like before its last round."""

    weights: list[Tensor]
    states: list[SliceState]
    key_states: dict[int, KeyState]
    counts: UpdateCounts


class DenseTable:
    """Weights, optimizer state and arithmetic of the part of a table that lives on `server`."""

    def __init__(self, plan: Plan, server: int, leases: Leases | None = None) -> None:
        self.plan = plan
        self.server = server
        self.slices = plan.slices_of(server)
        self.changes = RowChanges(self.slices)
        self.by_index = {piece.index: at for at, piece in enumerate(self.slices)}
        self.keys = frozenset(segment.key for piece in self.slices for segment in piece.segments)
        self.arenas, self.weights = _allocate(self.slices)
        self._visible = list(map(_without_padding, self.weights, self.slices))
        self.states = [SliceState.empty(piece) for piece in self.slices]
        self._whole = KeyUpdates(plan, server, self.changes)
        self._leases = leases
        self._reducer = Reducer()
        self.kept = HeldSums(self.slices, self._reducer)
        """The sums of a round that waits for a decision."""
        self._undo: _Undo | None = None
        self._counts = UpdateCounts(len(plan.specs))

    def check_payload(self, index: int, payload: Payload, form: Codec | RowForm | None) -> Payload:
        """View a payload as what it stands for; see `payloads.view_payload`.

        Raises:
            ProtocolError: this server does not hold that slice, or the payload is malformed.
            ShapeMismatchError: the payload has another size or dtype.
        """
        return view_payload(self.plan, self.slices[self._at(index)], payload, form)

    def visible(self, index: int) -> Tensor:
        """The weights of a slice without its padding, as they are sent; not a copy."""
        return self._visible[self.by_index[index]]

    def assign(self, slices: Mapping[int, Payload]) -> None:
        """Replace the weights of the given slices."""
        for index, payload in slices.items():
            at = self.by_index[index]
            self.changes.note(index)
            self._writable(at)[: self.slices[at].used].copy_(payload)

    def assign_sum(self, addends: Sequence[Addend]) -> None:
        """Without an optimizer the sum replaces the weights; keys that every rank left out stay.

        So do the other rows of a key of which all ranks gave only rows.
        """
        for at, piece in enumerate(self.slices):
            present = present_segments(piece, addends)
            if not any(present):
                continue
            weight = self._writable(at)
            for position, rows in sums_of_rows(piece, addends, None, (), present, self._reducer).items():
                present[position] = False
                segment = piece.segments[position]
                part = weight[segment.start : segment.start + segment.numel]
                part.view(-1, rows.values.shape[1])[rows.ids] = rows.values.to(part.dtype)
                self.changes.note(piece.index, position, rows.ids)
            if not any(present):
                continue
            self.changes.note_segments(piece.index, present)
            if all(present) and piece.dtype in ("float32", "float64"):
                self._reducer.sum_into(self._visible[at], piece, addends)
                continue
            total = self._reducer.total(piece, addends)
            for segment, here in zip(piece.segments, present, strict=True):
                if here:
                    end = segment.start + segment.numel
                    weight[segment.start : end].copy_(total[segment.start : end])

    def update(
        self,
        addends: Sequence[Addend],
        optimizer: Optimizer,
        hypers: Sequence[Mapping[str, Any]],
        sums: Sums | None = None,
    ) -> None:
        """Sum the contributions, or take the sums that were kept, and apply the optimizer. `hypers[i]` holds for key i.

        Raises:
            OptimizerError: the optimizer raised; weights and state are as before.
        """
        self._undo = self._snapshot() if optimizer.may_raise else None
        sums = sums or self._reducer
        try:
            if optimizer.elementwise:
                self._update_slices(addends, optimizer, hypers, sums)
            else:
                self._whole.update(optimizer, addends, hypers, sums, self._writable)
        except Exception as error:
            if self._undo is None:
                raise
            self.undo()
            raise OptimizerError(
                f"optimizer {optimizer.spec()['name']!r} raised {type(error).__name__}: {error}; "
                "the round was not applied"
            ) from error
        self._counts.count(left_out_by_all(addends))

    def _update_slices(
        self,
        addends: Sequence[Addend],
        optimizer: Optimizer,
        hypers: Sequence[Mapping[str, Any]],
        sums: Sums,
    ) -> None:
        for at, piece in enumerate(self.slices):
            present = present_segments(piece, addends)
            if not any(present):
                continue
            numbers = [hypers[segment.key] for segment in piece.segments]
            names = [self.plan.specs[s.key].key for s in piece.segments] if optimizer.positioned else None
            weight, state = self._writable(at), self.states[at]
            for position, rows in sums_of_rows(piece, addends, optimizer, numbers, present, sums).items():
                present[position] = False
                spec = self.plan.specs[piece.segments[position].key]
                place = SegmentPlace(piece, position, spec)
                update_segment_rows(optimizer, place, weight, rows.ids, rows.values, state, numbers[position])
                moved = rows.ids if moves_only_rows(optimizer, numbers[position]) else None
                self.changes.note(piece.index, position, moved)
            if any(present):
                self.changes.note_segments(piece.index, present)
                total = sums.total(piece, addends)
                update_slice(optimizer, piece, weight, total, state, numbers, present, names)

    def call_updater(self, addends: Sequence[Addend], updater: Updater) -> None:
        """Sum the contributions and let a user's function change each key; the table holds all slices.

        Raises:
            OptimizerError: the function raised; the weights are as before.
        """
        self._undo = self._snapshot()
        self.changes.note_all()
        sums = {dtype: torch.zeros_like(arena) for dtype, arena in self.arenas.items()}
        for piece in self.slices:
            total = self._reducer.total(piece, addends)
            sums[piece.dtype][piece.offset : piece.offset + piece.length] = total
        try:
            for key, spec in enumerate(self.plan.specs):
                if all(key in addend.absent for addend in addends):
                    continue
                begin = self.plan.key_offsets[key]
                end = begin + spec.numel
                merged = sums[spec.dtype][begin:end].view(spec.shape)
                updater(spec.key, merged, self.arenas[spec.dtype][begin:end].view(spec.shape))
        except Exception as error:
            self.undo()
            raise OptimizerError(f"the updater raised {type(error).__name__}: {error}") from error

    @property
    def state_nbytes(self) -> int:
        """Bytes of the optimizer state."""
        entries: list[Any] = []
        for state in self.states:
            entries += [*state.tensors.values(), state.master]
        for whole in self._whole.states.values():
            entries += [*whole.values.values(), whole.master]
        return sum(entry.nbytes for entry in entries if isinstance(entry, Tensor))

    @property
    def can_undo(self) -> bool:
        """Whether the last round can still be taken back."""
        return self._undo is not None

    def undo(self) -> None:
        """Take the last round back; allowed while `can_undo`."""
        assert self._undo is not None
        self.changes.note_all()
        for at, weight in enumerate(self._undo.weights):
            self._writable(at).copy_(weight)
        self.states = self._undo.states
        self._whole.states = self._undo.key_states
        self._counts = self._undo.counts
        self._undo = None

    def forget_undo(self) -> None:
        """The next round has begun: the last one is final."""
        self._undo = None

    def export_state(self, index: int) -> tuple[dict[str, Any], bytes]:
        """The optimizer state of one slice, as `state_blob` packs it."""
        return pack_state(self.states[self._at(index)])

    def import_state(self, index: int, summary: Mapping[str, Any], data: bytes) -> None:
        """Replace the optimizer state of one slice.

        Raises:
            ProtocolError: the bytes are no state of a slice of this shape; nothing has changed then.
        """
        at = self._at(index)
        self.states[at] = unpack_state(self.slices[at], summary, data)
        self._undo = None

    def export_key_state(self, key: int) -> tuple[dict[str, Any], bytes]:
        """The optimizer state of one whole key, as `state_blob` packs it."""
        return pack_key_state(self._whole.state(self._held(key)))

    def import_key_state(self, key: int, summary: Mapping[str, Any], data: bytes) -> None:
        """Replace the optimizer state of one whole key. Raises as `import_state`."""
        self._whole.states[self._held(key)] = unpack_key_state(self.plan.specs[key], summary, data)
        self._undo = None

    def updates_after(self, addends: Sequence[Addend]) -> int:
        """The number of updates of the key, on whichever server, that will have had most after this one."""
        left_out = left_out_by_all(addends)
        here = following_here(self.slices, self.states, self._whole.states, left_out)
        return max(here, self._counts.following(left_out))

    def reset_states(self) -> None:
        """Drop all optimizer state."""
        self.states = [SliceState.empty(piece) for piece in self.slices]
        self._whole.states = {}
        self._counts = UpdateCounts(len(self.plan.specs))

    def _at(self, index: int) -> int:
        at = self.by_index.get(index)
        if at is None:
            raise ProtocolError(f"slice {index} of the table is not on this server")
        return at

    def _held(self, key: int) -> int:
        if key not in self.keys:
            raise ProtocolError(f"key {key} of the table is not on this server")
        return key

    def _snapshot(self) -> _Undo:
        return _Undo(
            [w.clone() for w in self.weights],
            [state.copy() for state in self.states],
            {key: state.copy() for key, state in self._whole.states.items()},
            self._counts.copy(),
        )

    def _writable(self, at: int) -> Tensor:
        # A buffer that a slow peer is still being sent is left to it; the table goes on with a copy.
        weight = self.weights[at]
        if self._leases is not None and self._leases.is_busy(weight):
            self.weights[at] = weight = weight.clone()
            self._visible[at] = _without_padding(weight, self.slices[at])
        return weight


def _allocate(slices: Sequence[Slice]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """One zeroed buffer per dtype, and the piece of it that belongs to each slice.

    The system provides the memory of a large one as it is written, so weights that never come occupy nothing.
    """
    sizes: dict[str, int] = {}
    starts = []
    for piece in slices:
        starts.append(sizes.get(piece.dtype, 0))
        sizes[piece.dtype] = starts[-1] + piece.length
    arenas = {dtype: _zeros(size, torch_dtype(dtype)) for dtype, size in sizes.items()}
    views = [
        arenas[piece.dtype][start : start + piece.length] for piece, start in zip(slices, starts, strict=True)
    ]
    return arenas, views


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """As torch.zeros, which writes the zeros; on a boundary of a cache line as well."""
    nbytes = numel * dtype.itemsize
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + nbytes]).view(dtype)


def _without_padding(weight: Tensor, piece: Slice) -> Tensor:
    return weight[: piece.used]
