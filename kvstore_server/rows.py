"""What is given to a slice: plain numbers, what a codec wrote, or some rows of some of its keys; as bytes and back.

Rows, in a contribution or as new values, are

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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import Codec, torch_dtype
from kvstore_server.errors import ProtocolError, ShapeMismatchError
from kvstore_server.plan import Plan, Slice, row_numel
from kvstore_server.protocol.frames import pack_control

ROWS = "rows"
PACKED_ROWS = pack_control({"type": ROWS})
"""What takes the place of a codec's description for such payloads."""


class Encoded(NamedTuple):
    """A compressed payload and how to read it."""

    codec: Codec
    data: Tensor
    """uint8, as long as the codec says."""


class RowSet(NamedTuple):
    """Some rows of a key, or of a block of its rows."""

    ids: Tensor
    """int64, distinct and ascending, counted from the first row of the block."""
    values: Tensor
    """(number of ids, elements of a row)."""


class SparsePayload(NamedTuple):
    """What a rank gives to a slice of which it has only some rows of some keys."""

    rows: Mapping[int, RowSet]
    """Position of a segment in the slice → its rows."""
    dense: Tensor | None
    """The other segments, `used` elements; None where there are none."""


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
            parts[position] = reader.take(torch_dtype(piece.dtype), size)
        elif form in (_IDS, _BITS):
            parts[position] = _read_rows(reader, plan, piece, position, size, form == _BITS)
        else:
            raise ProtocolError(f"a row-sparse slice has a segment in form {form}")
    if reader.at != len(data):
        raise ProtocolError(f"a row-sparse slice has {len(data)} bytes, {reader.at} of them are named")
    return parts


def read_payload(plan: Plan, piece: Slice, payload: Tensor, form: Codec | RowForm) -> Encoded | SparsePayload:
    """View bytes as what a codec reads, or as some rows. Nothing large is copied.

    Raises:
        ProtocolError: rows are malformed, or no codec of that kind wrote the bytes.
        ShapeMismatchError: the payload has another size than the slice compressed.
    """
    if isinstance(form, RowForm):
        return as_contribution(piece, decode_rows(plan, piece, payload.numpy().data))
    if payload.nbytes != form.encoded_nbytes(piece.used, piece.dtype):
        names = ", ".join(repr(plan.specs[segment.key].key) for segment in piece.segments[:3])
        raise ShapeMismatchError(
            f"slice {piece.index} (of {names}) takes {piece.dtype}[{piece.used}], got {payload.nbytes} bytes "
            f"compressed by {form.spec()}"
        )
    form.check_payload(payload, piece.dtype, piece.used)  # in the middle of an update it would be too late
    return Encoded(form, payload)


def payload_nbytes(payload: Tensor | Encoded | SparsePayload) -> int:
    """The bytes of what a rank gave to a slice."""
    if isinstance(payload, SparsePayload):
        return sum(one.nbytes for one in _tensors_of(payload) if one is not None)
    return payload.data.nbytes if isinstance(payload, Encoded) else payload.nbytes


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
        packed = reader.take(torch.uint8, -(-num_rows // 8)).numpy()
        ids = np.flatnonzero(np.unpackbits(packed, count=num_rows, bitorder="little"))
    else:
        ids = reader.take(torch.int32, num_ids).numpy().astype(np.int64)
    if len(ids) != num_ids or (
        num_ids and (ids[0] < 0 or ids[-1] >= num_rows or (ids[1:] <= ids[:-1]).any())
    ):
        raise ProtocolError(
            f"the {num_ids} rows of {spec.key!r} are not distinct, ascending and below {num_rows}"
        )
    return RowSet(
        torch.from_numpy(ids), reader.take(torch_dtype(piece.dtype), num_ids * width).view(num_ids, width)
    )


class _Reader:
    """Takes parts off the front of a buffer; each begins at a multiple of 8."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def skip(self, size: int) -> int:
        """Go on by so many bytes; returns where they begin."""
        start = self.at
        if size > len(self.data) - start:
            raise ProtocolError(f"a row-sparse slice of {len(self.data)} bytes ends too early")
        self.at += -(-size // 8) * 8
        return start

    def numbers(self, count: int) -> tuple[int, ...]:
        """The next integers of 4 bytes, of which there are few."""
        return struct.unpack_from(f"<{count}i", self.data, self.skip(4 * count))

    def take(self, dtype: torch.dtype, count: int) -> Tensor:
        """The next so many numbers; not a copy."""
        start = self.skip(count * dtype.itemsize)
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.data, dtype=dtype, count=count, offset=start)


def _raw(values: Tensor) -> np.ndarray[Any, Any]:
    flat = values.reshape(-1)
    if not len(flat):
        return np.zeros(0, np.uint8)
    if flat.stride() != (1,):  # one that `expand` made has strides that cannot be viewed as bytes
        flat = torch.empty(len(flat), dtype=values.dtype).copy_(flat)
    found: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return found


def _bits(ids: np.ndarray[Any, Any], num_rows: int) -> np.ndarray[Any, Any]:
    present = np.zeros(num_rows, dtype=bool)
    present[ids] = True
    return np.packbits(present, bitorder="little")


def cut_rows(rows: RowSet, starts: Sequence[int]) -> list[RowSet]:
    """Cut rows into those from each start, the first of which is 0, up to the next one, counted from there."""
    if len(starts) == 1:
        return [rows]
    cuts = torch.searchsorted(rows.ids, torch.tensor(starts[1:], dtype=torch.int64)).tolist()
    counts = np.diff([0, *cuts, len(rows.ids)]).tolist()
    ids = torch.split(rows.ids - torch.from_numpy(np.repeat(starts, counts)), counts)
    return list(map(RowSet, ids, torch.split(rows.values, counts)))


def split_rows(plan: Plan, rows: Mapping[int, RowSet]) -> dict[int, dict[int, RowSet]]:
    """Distribute rows of keys over their slices: slice → position of the segment → its rows.

    Every slice of a key gets an entry, with no rows where none are in it: the key has taken part there too.
    """
    found: dict[int, dict[int, RowSet]] = {}
    for key, (ids, values) in rows.items():
        width, pieces = row_numel(plan.specs[key]), plan.slices_with(key)
        positions = [next(at for at, s in enumerate(piece.segments) if s.key == key) for piece in pieces]
        starts = [piece.segments[at].key_start // width for piece, at in zip(pieces, positions, strict=True)]
        parts = cut_rows(RowSet(ids, values.reshape(len(ids), width)), starts)
        for piece, position, part in zip(pieces, positions, parts, strict=True):
            found.setdefault(piece.index, {})[position] = part
    return found


def same_payload(a: object, b: object) -> bool:
    """Whether two payloads of one slice are the same contribution."""
    if isinstance(a, Encoded) and isinstance(b, Encoded):
        return a.codec == b.codec and torch.equal(a.data, b.data)
    if isinstance(a, SparsePayload) and isinstance(b, SparsePayload):
        return a.rows.keys() == b.rows.keys() and all(
            _same_bits(x, y) for x, y in zip(_tensors_of(a), _tensors_of(b), strict=True)
        )
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or _same_bits(a, b)
    return False


def _tensors_of(payload: SparsePayload) -> list[Tensor | None]:
    return [payload.dense, *(tensor for _, rows in sorted(payload.rows.items()) for tensor in rows)]


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or not a.numel():  # an empty tensor may have strides that no view as bytes allows
        return a.shape == b.shape
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
