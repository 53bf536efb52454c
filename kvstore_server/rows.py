"""What is given to a slice: plain numbers, what a codec wrote, or some rows of some of its keys; as bytes and back.

Rows, in a contribution or as new values, are

    head      int32: number of segments that follow; number of slices
    segments  int32 each: position in the slice, number of rows (or elements), form, 0
    parts     of each segment, by its form. 0: ids as int32, then values; 1: one bit for each row, then values, where
              that is shorter; 2: all numbers of the segment

Of the other segments there is nothing. A key that has slices of its own gives the first of them what it has for several
neighbours on a server, as many as the head says, so that rows of a key take one message where they fit into one. Each
part begins at a multiple of 8 bytes. However many rows there are, the bytes exceed those of the dense slices by no more
than a frame allows.
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
from kvstore_server.plan import SIZES, Ints, Plan, Slice, TensorSpec, row_numel
from kvstore_server.protocol.frames import MAX_PAYLOAD, pack_control

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
    """int64, distinct and ascending, counted from the first row of the key, or of the block."""
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


def encode_rows(plan: Plan, piece: Slice, parts: Parts, slices: int = 1) -> Tensor:
    """Write some parts of a slice, or rows of a key in several slices from this one on, as one uint8 tensor."""
    head = [len(parts), slices]
    body: list[np.ndarray[Any, Any]] = []
    for position, part in sorted(parts.items()):
        if isinstance(part, Tensor):
            head += [position, len(part), _ALL, 0]
            body.append(_raw(part))
            continue
        num_rows, count = _num_rows(plan, piece, position, slices), len(part.ids)
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


def decode_rows(plan: Plan, piece: Slice, data: memoryview) -> tuple[Parts, int]:
    """Read what `encode_rows` has written; nothing large is copied.

    Returns:
        The parts, and the number of slices that they are of.

    Raises:
        ProtocolError: the bytes do not fit the slice.
    """
    reader = _Reader(data)
    count, slices = reader.numbers(2)
    if not 0 < count <= len(piece.segments):
        raise ProtocolError(f"a slice of {len(piece.segments)} segments cannot have rows of {count}")
    table = reader.numbers(4 * count)
    parts: dict[int, RowSet | Tensor] = {}
    for position, size, form in zip(table[::4], table[1::4], table[2::4], strict=True):
        if not 0 <= position < len(piece.segments) or position in parts:
            raise ProtocolError(f"a row-sparse slice names segment {position} of {len(piece.segments)}")
        if form == _ALL:
            if size != piece.segments[position].numel or slices != 1:
                raise ProtocolError(f"a row-sparse slice gives {size} numbers to segment {position}")
            parts[position] = reader.take(torch_dtype(piece.dtype), size)
        elif form in (_IDS, _BITS):
            parts[position] = _read_rows(reader, plan, piece, position, (size, slices), form == _BITS)
        else:
            raise ProtocolError(f"a row-sparse slice has a segment in form {form}")
    if reader.at != len(data):
        raise ProtocolError(f"a row-sparse slice has {len(data)} bytes, {reader.at} of them are named")
    return parts, slices


def num_slices(data: Tensor) -> int:
    """The number of slices that rows are of."""
    return int(data[4:8].numpy().view("<i4")[0]) if len(data) >= 8 else 1


def read_payload(plan: Plan, piece: Slice, payload: Tensor, form: Codec | RowForm) -> Encoded | SparsePayload:
    """View bytes as what a codec reads, or as some rows. Nothing large is copied.

    Raises:
        ProtocolError: rows are malformed, or no codec of that kind wrote the bytes.
        ShapeMismatchError: the payload has another size than the slice compressed.
    """
    if isinstance(form, RowForm):
        return as_contribution(piece, decode_rows(plan, piece, payload.numpy().data)[0])
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


def _num_rows(plan: Plan, piece: Slice, position: int, slices: int) -> int:
    """The rows that a segment, and those of the key in the next slices on its server, have together.

    Raises:
        ProtocolError: it has no rows, or there are not so many slices.
    """
    segment = piece.segments[position]
    spec = plan.specs[segment.key]
    if not row_numel(spec) or not plan.takes_rows(segment.key):
        raise ProtocolError(f"key {spec.key!r} of shape {list(spec.shape)} takes no rows")
    block = plan.rows(segment.key).blocks[piece.server]
    first = block.order[piece.index]
    if not 0 < slices <= len(block.pieces) - first:
        raise ProtocolError(
            f"{slices} slices from {piece.index} on are not all here, or not all of {spec.key!r}"
        )
    return int(block.starts[first + slices] - block.starts[first])


def _read_rows(
    reader: _Reader, plan: Plan, piece: Slice, position: int, size: tuple[int, int], as_bits: bool
) -> RowSet:
    """Read so many rows of a key in so many slices."""
    spec, (num_ids, slices) = plan.specs[piece.segments[position].key], size
    num_rows, width = _num_rows(plan, piece, position, slices), row_numel(spec)
    if not 0 <= num_ids <= num_rows:
        raise ProtocolError(f"a row-sparse slice of {spec.key!r} names {num_ids} of its {num_rows} rows")
    if as_bits:
        packed = reader.take(torch.uint8, -(-num_rows // 8)).numpy()
        ids = np.flatnonzero(np.unpackbits(packed, count=num_rows, bitorder="little"))
    else:
        ids = reader.take(torch.int32, num_ids).numpy().astype(np.int64)
    if len(ids) != num_ids or not are_rows(ids, num_rows):
        raise ProtocolError(
            f"the {num_ids} rows of {spec.key!r} are not distinct, ascending and below {num_rows}"
        )
    return RowSet(
        torch.from_numpy(ids), reader.take(torch_dtype(piece.dtype), num_ids * width).view(num_ids, width)
    )


def are_rows(ids: Ints, num_rows: int) -> bool:
    """Whether ids are distinct, ascending and of so many rows."""
    return not len(ids) or bool(ids[0] >= 0 and ids[-1] < num_rows and (ids[1:] > ids[:-1]).all())


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
        places = plan.rows(key)
        parts = cut_rows(
            RowSet(ids, values.reshape(len(ids), row_numel(plan.specs[key]))), places.starts[:-1].tolist()
        )
        for piece, part in zip(places.pieces, parts, strict=True):
            found.setdefault(piece.index, {})[places.position] = part
    return found


def pack_rows(
    plan: Plan, rows: Mapping[int, RowSet], arenas: Mapping[str, Tensor], absent: frozenset[int]
) -> dict[int, Tensor]:
    """Write rows of keys for their servers, as few messages as have room for them.

    Args:
        arenas: All numbers of the other keys, as the plan lays them out.
        absent: The keys of which there is nothing.

    Returns:
        The slice that each message goes with → its bytes.
    """
    found: dict[int, tuple[dict[int, RowSet | Tensor], int]] = {}
    for key, (ids, values) in rows.items():
        spec = plan.specs[key]
        given, most = values.reshape(len(ids), row_numel(spec)), rows_per_message(spec)
        for block, where, own in plan.rows(key).by_server(ids.numpy()):
            here = (
                given[where] if isinstance(where, slice) else given.index_select(0, torch.from_numpy(where))
            )
            for first, end, part in block.cut(own, most):
                some = RowSet(torch.from_numpy(own[part] - block.starts[first]), here[part])
                found.setdefault(block.pieces[first].index, ({}, end - first))[0][block.position] = some
    packed = {}
    for index, (parts, slices) in found.items():
        piece = plan.slices[index]
        for position, segment in enumerate(piece.segments):
            if position not in parts and segment.key not in absent:
                start = piece.offset + segment.start
                parts[position] = arenas[piece.dtype][start : start + segment.numel]
        packed[index] = encode_rows(plan, piece, parts, slices)
    return packed


def rows_per_message(spec: TensorSpec) -> int:
    """How many rows of a key fit into a message, with their ids; at least one does."""
    return max(MAX_PAYLOAD // (4 + row_numel(spec) * SIZES[spec.dtype]), 1)


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
