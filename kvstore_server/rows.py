"""Some rows of some of the keys in one slice: as bytes and back, and which have changed.

In a contribution, or as new values, they are

    head      int32: number of segments that follow, 0
    segments  int32 each: position in the slice, number of rows (or elements), form, 0
    parts     of each segment, by its form. 0: ids as int32, then values; 1: one bit for each row of the segment, then
              values, where that is shorter; 2: all numbers of the segment

Of the other segments there is nothing. Each part begins at a multiple of 8 bytes. However many rows there are, the
bytes exceed those of the dense slice by no more than a frame allows.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.errors import ProtocolError
from kvstore_server.plan import ITEM_SIZE, Plan, Slice, row_numel
from kvstore_server.protocol.buffers import payload_bytes
from kvstore_server.protocol.control import pack_control
from kvstore_server.protocol.messages import Payload
from kvstore_server.reduction import Encoded, RowSet, SparsePayload, torch_dtype, view_payload

ROWS = "rows"
PACKED_ROWS = pack_control({"type": ROWS})
"""What takes the place of a codec's description for such payloads."""


Parts: TypeAlias = Mapping[int, RowSet | Tensor]
"""Position of a segment in the slice → some rows of it, or all its numbers, flat."""
_IDS, _BITS, _ALL = range(3)


class RowForm:
    """Stands where a codec stands, for contributions that give only some rows."""


def encode_rows(plan: Plan, piece: Slice, parts: Parts) -> Tensor:
    """The bytes of some parts of a slice, as one uint8 tensor."""
    head = [len(parts), 0]
    body: list[np.ndarray[Any, Any]] = []
    for position, part in sorted(parts.items()):
        if isinstance(part, Tensor):
            head += [position, len(part), _ALL, 0]
            body.append(_raw(part))
            continue
        segment = piece.segments[position]
        num_rows, count = segment.numel // row_numel(plan.specs[segment.key]), len(part.ids)
        form = _BITS if 4 * count > num_rows // 8 else _IDS
        head += [position, count, form, 0]
        ids = part.ids.numpy()
        body.append(_bits(ids, num_rows) if form == _BITS else ids.astype("<i4").view(np.uint8))
        body.append(_raw(part.values))
    starts = list(itertools.accumulate((-(-len(part) // 8) * 8 for part in body), initial=4 * len(head)))
    data = np.zeros(starts[-1], np.uint8)
    data[: 4 * len(head)] = np.array(head, "<i4").view(np.uint8)
    for start, raw in zip(starts, body, strict=False):
        data[start : start + len(raw)] = raw
    return torch.from_numpy(data)


def decode_rows(plan: Plan, piece: Slice, data: memoryview) -> Parts:
    """Inverse of `encode_rows`; the tensors are views of `data` where that is possible.

    Raises:
        ProtocolError: the bytes do not fit the slice.
    """
    reader = _Reader(data)
    count, zero = reader.numbers(2)
    if not 0 < count <= len(piece.segments) or zero:
        raise ProtocolError(f"a slice of {len(piece.segments)} segments cannot have rows of {count} ({zero})")
    table = reader.numbers(4 * count)
    parts: dict[int, RowSet | Tensor] = {}
    for position, size, form in zip(table[::4], table[1::4], table[2::4], strict=True):
        if not 0 <= position < len(piece.segments) or position in parts:
            raise ProtocolError(f"a row-sparse slice names segment {position} of {len(piece.segments)}")
        if form == _ALL:
            if size != piece.segments[position].numel:
                raise ProtocolError(f"a row-sparse slice gives {size} numbers to segment {position}")
            parts[position] = reader.tensor(size, piece.dtype)
        elif form in (_IDS, _BITS):
            parts[position] = _read_rows(reader, plan, piece, position, size, form == _BITS)
        else:
            raise ProtocolError(f"a row-sparse slice has a segment in form {form}")
    reader.finish()
    return parts


def read_payload(
    plan: Plan, piece: Slice, payload: Payload, form: Codec | RowForm | None
) -> Tensor | Encoded | SparsePayload:
    """View a payload as the numbers of a slice, or what a codec reads, or some rows. Nothing large is copied.

    Raises:
        ProtocolError: rows are malformed, or no codec of that kind wrote the bytes.
        ShapeMismatchError: the payload has another size or dtype than the slice.
    """
    if isinstance(form, RowForm):
        return as_contribution(piece, decode_rows(plan, piece, payload_bytes(payload)))
    return view_payload(plan, piece, payload, form)


def as_contribution(piece: Slice, parts: Parts) -> SparsePayload:
    """What these parts stand for in a sum: nothing where there is none."""
    rows = {position: part for position, part in parts.items() if isinstance(part, RowSet)}
    dense = None
    for position, part in parts.items():
        if isinstance(part, Tensor):
            if dense is None:
                dense = torch.zeros(piece.used, dtype=part.dtype)
            segment = piece.segments[position]
            dense[segment.start : segment.start + segment.numel] = part
    return SparsePayload(rows, dense)


def _read_rows(
    reader: _Reader, plan: Plan, piece: Slice, position: int, num_ids: int, as_bits: bool
) -> RowSet:
    segment = piece.segments[position]
    spec = plan.specs[segment.key]
    width = row_numel(spec)
    if not width or segment.numel % width or segment.key_start % width:
        raise ProtocolError(f"key {spec.key!r} of shape {list(spec.shape)} takes no rows")
    num_rows = segment.numel // width
    if not 0 <= num_ids <= num_rows:
        raise ProtocolError(f"a row-sparse slice of {spec.key!r} names {num_ids} of its {num_rows} rows")
    if as_bits:
        bits = np.unpackbits(reader.take("u1", -(-num_rows // 8)), count=num_rows, bitorder="little")
        ids = np.flatnonzero(bits)
    else:
        ids = reader.take("<i4", num_ids).astype(np.int64)
    if len(ids) != num_ids or (
        num_ids and (ids[0] < 0 or ids[-1] >= num_rows or (ids[1:] <= ids[:-1]).any())
    ):
        raise ProtocolError(
            f"the {num_ids} rows of {spec.key!r} are not distinct, ascending and below {num_rows}"
        )
    return RowSet(torch.from_numpy(ids), reader.tensor(num_ids * width, piece.dtype).view(num_ids, width))


class _Reader:
    """Takes parts off the front of a buffer; each begins at a multiple of 8."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, dtype: str, count: int) -> np.ndarray[Any, Any]:
        size = np.dtype(dtype).itemsize * count
        if size > len(self._data) - self._at:
            raise ProtocolError(f"a row-sparse slice of {len(self._data)} bytes ends too early")
        part = np.frombuffer(self._data, dtype, count, self._at)
        self._at += -(-size // 8) * 8
        return part

    def numbers(self, count: int) -> tuple[int, ...]:
        """The same as plain integers of 4 bytes, of which there are few."""
        at, self._at = self._at, self._at + -(-4 * count // 8) * 8
        if 4 * count > len(self._data) - at:
            raise ProtocolError(f"a row-sparse slice of {len(self._data)} bytes ends too early")
        return struct.unpack_from(f"<{count}i", self._data, at)

    def tensor(self, numel: int, dtype: str) -> Tensor:
        start, size = self._at, numel * ITEM_SIZE[dtype]
        if size > len(self._data) - start:
            raise ProtocolError(f"a row-sparse slice of {len(self._data)} bytes ends too early")
        self._at += -(-size // 8) * 8
        if not numel:
            return torch.empty(0, dtype=torch_dtype(dtype))
        return torch.frombuffer(self._data, dtype=torch_dtype(dtype), count=numel, offset=start)

    def finish(self) -> None:
        if self._at != len(self._data):
            raise ProtocolError(
                f"a row-sparse slice has {len(self._data)} bytes, {self._at} of them are named"
            )


def _raw(values: Tensor) -> np.ndarray[Any, Any]:
    flat = values.reshape(-1)
    if len(flat) and flat.stride() != (
        1,
    ):  # one that `expand` made has strides that cannot be viewed as bytes
        flat = torch.empty(len(flat), dtype=values.dtype).copy_(flat)
    found: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy() if len(flat) else np.zeros(0, np.uint8)
    return found


def _bits(ids: np.ndarray[Any, Any], num_rows: int) -> np.ndarray[Any, Any]:
    present = np.zeros(num_rows, dtype=bool)
    present[ids] = True
    return np.packbits(present, bitorder="little")


def split_rows(plan: Plan, key: int, ids: Tensor, values: Tensor) -> dict[int, tuple[int, RowSet]]:
    """Distribute rows of a key over its slices: slice index → (position of the segment, its rows).

    Every slice of the key gets an entry, with no rows where none are in it: the key has taken part there too.
    """
    width = row_numel(plan.specs[key])
    pieces = plan.slices_with(key)
    positions = [next(at for at, s in enumerate(piece.segments) if s.key == key) for piece in pieces]
    starts = [piece.segments[at].key_start // width for piece, at in zip(pieces, positions, strict=True)]
    cuts = torch.searchsorted(ids, torch.tensor(starts[1:], dtype=torch.int64)).tolist()
    counts = np.diff([0, *cuts, len(ids)]).tolist()
    local = torch.split(ids - torch.from_numpy(np.repeat(starts, counts)), counts)
    found = zip(pieces, positions, local, torch.split(values.reshape(len(ids), width), counts), strict=True)
    return {piece.index: (at, RowSet(own, some)) for piece, at, own, some in found}


Rows = Mapping[int, Tensor | None]
"""Position of a segment in a slice → ids of rows, from the first row there, distinct and ascending; None: all."""

VERSIONS_KEPT = 256
"""Changes of a slice that are remembered one by one."""


class RowChanges:
    """Which rows of a table have changed since a worker was sent its weights.

    The table notes every change as it is made; changes get the table's version when somebody asks. Row ids count for as
    long as sending rows is cheaper than sending the slice; for what is older, and for changes of all rows, a slice is
    sent whole. More than what has changed may be named, never less. It costs nothing until `since` is called for the
    first time.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._slices = {piece.index: piece for piece in slices}
        self._is_wanted = False
        self._pending: dict[int, list[Rows] | None] = {}
        """Slice → changes that have no version yet; None: all of it."""
        self._entries: dict[int, deque[tuple[int, Rows]]] = {}
        """Slice → versions, ascending, and what has changed since the one before."""
        self._kept: dict[int, int] = {}
        """Slice → the number of ids in its entries."""
        self._floors: dict[int, int] = {}
        """Slice → the version up to which nothing is known."""

    def note(self, index: int, position: int | None = None, ids: Tensor | None = None) -> None:
        """Some rows of a segment of a slice have changed, `ids` as in `Rows`; without a position all of the slice."""
        if self._is_wanted:
            before = self._pending.setdefault(index, [])
            if position is None or before is None:
                self._pending[index] = None
            elif ids is None or len(ids):
                before.append({position: ids})

    def note_segments(self, index: int, changed: Sequence[bool]) -> None:
        """All of some segments of a slice has changed."""
        if all(changed):
            self.note(index)
            return
        for position, is_changed in enumerate(changed):
            if is_changed:
                self.note(index, position)

    def note_all(self) -> None:
        """All slices have changed."""
        for index in self._slices:
            self.note(index)

    def since(self, index: int, held: int, version: int) -> Rows | None:
        """What a worker that holds version `held` of a slice must be sent to have `version`, which is the present one.

        Empty where nothing has changed; None where the slice must be sent whole.
        """
        if not self._is_wanted:
            self._is_wanted = True
            self._floors = dict.fromkeys(self._slices, version)
        self._stamp(version)
        if held == version:
            return {}
        if held < self._floors[index]:
            return None
        newest_first = reversed(self._entries.get(index, ()))
        return _union([rows for _, rows in itertools.takewhile(lambda entry: entry[0] > held, newest_first)])

    def _stamp(self, version: int) -> None:
        """What was noted since the last time has happened by now."""
        for index, noted in self._pending.items():
            entries = self._entries.setdefault(index, deque())
            if noted is None:
                entries.clear()
                self._kept[index] = 0
                self._floors[index] = version
            elif noted:
                entries.append((version, _union(noted)))
                self._kept[index] = self._kept.get(index, 0) + _count(entries[-1][1])
                self._forget_old(index, entries)
        self._pending.clear()

    def _forget_old(self, index: int, entries: deque[tuple[int, Rows]]) -> None:
        """Keep no more ids than the slice has elements."""
        room = self._slices[index].used
        while self._kept[index] > room or len(entries) > VERSIONS_KEPT:
            self._floors[index], oldest = entries.popleft()
            self._kept[index] -= _count(oldest)


def _count(rows: Rows) -> int:
    return sum(1 if ids is None else len(ids) for ids in rows.values())


def _union(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    found: dict[int, list[Tensor] | None] = {}
    for rows in parts:
        for position, ids in rows.items():
            before = found.setdefault(position, [])
            if ids is None or before is None:
                found[position] = None
            else:
                before.append(ids)
    return {at: None if some is None else torch.unique(torch.cat(some)) for at, some in found.items()}
