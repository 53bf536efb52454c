"""Payloads of a slice: plain numbers, bytes of a codec, or some rows of some of its keys; to bytes and back.

Rows, in a contribution or as new values, are encoded as

    head      int32: number of segments that follow; number of slices
    segments  int32 each: position in the slice, number of rows (or elements), form, 0
    parts     of each segment, by its form. 0: ids as int32, then values; 1: one bit for each row, then values, where
              that is shorter; 2: all numbers of the segment; 3: row numbers of a hash table as int64, then values

Segments that are not listed have nothing. A key with slices of its own may put rows of several adjacent slices on a
server into one payload, which belongs to the first of them; the head says how many. So rows of a key take one message
if they fit. New values may be rows of a row group, counted as rows of its first key. Each part begins at a multiple of
8 bytes. The bytes never exceed those of the dense slices by more than a frame allows.

A server sends rows of a hash table as `PulledRows`: it leaves out those that the worker has (`HeldRows`), and those
that are not in the table, whose initial values the worker computes.

Ids from a peer are copied and checked (distinct, ascending, in range); values are views of the received bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server.codec import Codec, compute_dtype, torch_dtype
from kvstore_server.errors import ProtocolError, ShapeMismatchError
from kvstore_server.plan import SIZES, Ints, Plan, RowBlock, Slice, slices_of_hashes
from kvstore_server.protocol.frames import pack_control

PACKED_ROWS = pack_control({"type": "rows"})
"""Stands for a codec's description in messages whose payloads are rows."""
_NO_SLICES: Mapping[int, Tensor] = MappingProxyType({})


class CompressedPayload(NamedTuple):
    """Bytes of a codec, with the codec that decodes them."""

    codec: Codec
    data: Tensor
    """uint8, as long as the codec says."""

    def elements(self, dtype: str, begin: int, end: int) -> Tensor | None:
        """Decode elements of a gradient of `dtype`, as far as present; None if the codec has no single elements."""
        size = self.codec.itemsize(dtype)
        if size is None:
            return None
        data = self.data[begin * size : end * size]
        found = torch.empty(len(data) // size, dtype=compute_dtype(dtype), device="cpu")
        self.codec.decode(data, dtype, found)
        return found


class RowSet(NamedTuple):
    """Some rows of a key, or of a block of its rows."""

    ids: Tensor
    """int64, distinct and ascending, counted from the first row of the key or block; row numbers of a hash table."""
    values: Tensor
    """(number of ids, elements of a row)."""


class HeldRows(NamedTuple):
    """What a worker has of the rows of a hash table that it asks a server for: int64, then int32 for each row."""

    epoch: int
    """As in `PulledRows`."""
    steps: npt.NDArray[np.int32]
    """For each row, the step of the table whose value the worker has; -1: none."""

    def pack(self) -> bytes:
        return self.epoch.to_bytes(8, "little", signed=True) + self.steps.astype("<i4").tobytes()


def read_held_rows(packed: bytes, count: int) -> HeldRows | None:
    """Return what a worker has of `count` rows; None: nothing. Raises ProtocolError for another number of them."""
    if not packed:
        return None
    if len(packed) != 8 + 4 * count:
        raise ProtocolError(f"a worker has {len(packed)} bytes about {count} rows of a hash table")
    return HeldRows(int.from_bytes(packed[:8], "little", signed=True), np.frombuffer(packed, "<i4", offset=8))


SAME, INITIAL, SENT = range(3)
"""The worker has the row; the row is not in the table; its values follow."""


class PulledRows(NamedTuple):
    """Rows of a hash table as a server sends them: step and epoch as int64, forms, and values of rows that are SENT.

    Forms are one byte for each row. They, and the values, are padded to a multiple of 8 bytes.
    """

    step: int
    """Updates of the table so far; -1: the rows are of a former step, and must not be kept."""
    epoch: int
    """Changes when rows are replaced by others than an update's."""
    forms: npt.NDArray[np.uint8]
    values: Tensor
    nbytes: int


def new_pulled_rows(
    step: int, epoch: int, forms: npt.NDArray[np.uint8], width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the bytes of `PulledRows`, and the part of them that takes the values of the rows that are SENT."""
    count, begin = int(np.count_nonzero(forms == SENT)), 16 + -(-len(forms) // 8) * 8
    nbytes = count * width * dtype.itemsize
    data = torch.empty(begin + -(-nbytes // 8) * 8, dtype=torch.uint8, device="cpu")
    flat = data.numpy()
    flat[:16].view("<i8")[:] = step, epoch
    flat[16 : 16 + len(forms)] = forms
    flat[16 + len(forms) : begin] = 0
    flat[begin + nbytes :] = 0
    return data, data[begin : begin + nbytes].view(dtype).view(count, width)


def read_pulled_rows(data: Tensor, count: int, width: int, dtype: torch.dtype) -> PulledRows:
    """Read `PulledRows` of `count` rows from the beginning of some bytes. Raises ProtocolError if these are too few."""
    begin = 16 + -(-count // 8) * 8
    own = data if data.storage_offset() % 8 == 0 else data.clone()  # behind rows of another key
    flat = own.numpy()
    forms = flat[16 : 16 + count]
    nbytes = int(np.count_nonzero(forms == SENT)) * width * dtype.itemsize
    if len(flat) < begin + nbytes or (count and forms.max() > SENT):
        raise ProtocolError(f"a server has sent {len(flat)} bytes for {count} rows of a hash table")
    step, epoch = flat[:16].view("<i8").tolist()
    values = own[begin : begin + nbytes].view(dtype).view(-1, width)
    return PulledRows(step, epoch, forms, values, begin + -(-nbytes // 8) * 8)


Parts: TypeAlias = Mapping[int, RowSet | Tensor]
"""Position of a segment in the slice → some rows of it, or all its elements, flat."""
Payload: TypeAlias = Tensor | CompressedPayload | Parts
"""What a rank gives to a slice: plain numbers, compressed ones, or some parts."""
_IDS, _BITS, _ALL, _HASHES = range(4)
_INT, _LONG, _BYTE = np.dtype("<i4"), np.dtype("<i8"), np.dtype(np.uint8)
_PLAIN = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
"""Unsigned integers by size, as which numpy reads elements for torch: it has no bfloat16."""


def encode_rows(plan: Plan, slice_: Slice, parts: Parts, slices: int = 1) -> Tensor:
    """Encode parts of a slice, or rows of `slices` slices from it on (of one row group), as one uint8 tensor."""
    head = [len(parts), slices]
    body: list[np.ndarray[Any, Any]] = []
    for position, part in sorted(parts.items()):
        if isinstance(part, Tensor):
            head += [position, part.numel(), _ALL, 0]
            body.append(_to_numpy(part))
            # A bit for each row is shorter than int32 ids if more than 1/32 of the rows are listed.
            continue
        block, ids = plan.joined_rows(slice_.segments[position].key).blocks[slice_.server], part.ids.numpy()
        first, count = block.order[slice_.index], len(ids)
        form, num_rows = _HASHES, 0
        if not block.is_hashed:
            num_rows = int(block.starts[first + slices] - block.starts[first])
            form = _BITS if 4 * count > num_rows // 8 else _IDS
        head += [position, count, form, 0]
        if form == _BITS:
            present = np.zeros(num_rows, dtype=bool)
            present[ids] = True
            body.append(np.packbits(present, bitorder="little"))
        else:
            body.append(ids.astype(_INT if form == _IDS else _LONG))
        body.append(_to_numpy(part.values))
    buffers: list[Any] = [struct.pack(f"<{len(head)}i", *head)]
    for raw in body:
        buffers += [raw, bytes(-raw.nbytes % 8)]
    return torch.frombuffer(bytearray().join(buffers), dtype=torch.uint8)


def decode_rows(plan: Plan, slice_: Slice, data: memoryview, is_joined: bool = False) -> tuple[Parts, int]:
    """Decode what `encode_rows` wrote; values are views.

    Args:
        is_joined: The rows may be of a row group.

    Returns:
        The parts, and the number of slices that they belong to.

    Raises:
        ProtocolError: The bytes do not fit the slice.
    """
    # 1. The head.
    reader = _RowReader(data)
    count, slices = reader.take(_INT, 2).tolist()
    if not 0 < count <= len(slice_.segments):
        raise ProtocolError(f"a slice of {len(slice_.segments)} segments cannot have rows of {count}")
    # 2. Each segment, checked against the plan before anything is read.
    parts: dict[int, RowSet | Tensor] = {}
    for position, size, form, _ in reader.take(_INT, 4 * count).reshape(-1, 4).tolist():
        if not 0 <= position < len(slice_.segments) or position in parts:
            raise ProtocolError(f"a row-sparse slice names segment {position} of {len(slice_.segments)}")
        if form == _ALL:
            is_hashed = plan.specs[slice_.segments[position].key].hash_table is not None
            if size != slice_.segments[position].numel or slices != 1 or is_hashed:
                raise ProtocolError(f"a row-sparse slice gives {size} numbers to segment {position}")
            parts[position] = reader.values(slice_.dtype, size)
        elif form in (_IDS, _BITS, _HASHES):
            block, first = _block_of(plan, slice_, position, slices, is_joined)
            width = plan.rows(slice_.segments[position].key).width
            if (form == _HASHES) != block.is_hashed:
                raise ProtocolError(
                    f"a row-sparse slice has rows in form {form}, which its key does not have"
                )
            if form == _HASHES:
                ids = reader.hashes(size, block.starts[first : first + slices])
            else:
                num_rows = int(block.starts[first + slices] - block.starts[first])
                if not 0 <= size <= num_rows:
                    raise ProtocolError(
                        f"a row-sparse slice names {size} of the {num_rows} rows of segment {position}"
                    )
                ids = reader.ids(size, num_rows, form == _BITS)
            parts[position] = RowSet(ids, reader.values(slice_.dtype, size * width).view(size, width))
        else:
            raise ProtocolError(f"a row-sparse slice has a segment in form {form}")
    # 3. Nothing may be left over.
    if reader.at != len(data):
        raise ProtocolError(f"a row-sparse slice has {len(data)} bytes, {reader.at} of them are named")
    return parts, slices


def num_slices_of_rows(data: Tensor) -> int:
    return max(int(data[4:8].numpy().view("<i4")[0]), 1) if len(data) >= 8 else 1


def read_payload(
    plan: Plan, slice_: Slice, payload: Tensor, codec: Codec | None
) -> CompressedPayload | Parts:
    """Interpret bytes as a codec's payload, or as rows if there is no codec. Values are views.

    Raises:
        ProtocolError: Rows are malformed, or the codec cannot have written the bytes.
        ShapeMismatchError: The size is not that of the compressed slice.
    """
    if codec is None:
        return decode_rows(plan, slice_, payload.numpy().data)[0]
    if payload.nbytes != codec.encoded_nbytes(slice_.used, slice_.dtype):
        names = ", ".join(repr(plan.specs[segment.key].key) for segment in slice_.segments[:3])
        raise ShapeMismatchError(
            f"slice {slice_.index} (of {names}) takes {slice_.dtype}[{slice_.used}], got {payload.nbytes} bytes "
            f"compressed by {codec.spec()}"
        )
    # Now, because during an update it would be too late.
    codec.check_payload(payload, slice_.dtype, slice_.used)
    return CompressedPayload(codec, payload)


def payload_nbytes(payload: Payload) -> int:
    if isinstance(payload, Mapping):
        return sum(one.nbytes for one in _tensors_of_row_parts(payload))
    return payload.data.nbytes if isinstance(payload, CompressedPayload) else payload.nbytes


def _block_of(plan: Plan, slice_: Slice, position: int, slices: int, is_joined: bool) -> tuple[RowBlock, int]:
    """Return the rows of a segment's key on its server, and the position of the slice among those.

    Raises ProtocolError if it has none, or fewer slices.
    """
    segment = slice_.segments[position]
    spec = plan.specs[segment.key]
    places = plan.joined_rows(segment.key) if is_joined else plan.rows(segment.key)
    block = places.blocks.get(slice_.server)
    if block is None:
        raise ProtocolError(f"key {spec.key!r} of shape {list(spec.shape)} has no rows to give")
    first = block.order[slice_.index]
    if not 0 < slices <= len(block.slices) - first:
        raise ProtocolError(
            f"{slices} slices from {slice_.index} on are not all on this server, or not all of {spec.key!r}"
        )
    return block, first


class _RowReader:
    """Reads bytes front to back. Raises ProtocolError at the end of the data."""

    def __init__(self, data: memoryview) -> None:
        self.at = 0
        """Offset of the next part."""
        self._data = data

    def take(self, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
        size = dtype.itemsize * count
        if size > len(self._data) - self.at:
            raise ProtocolError(f"a row-sparse slice of {len(self._data)} bytes ends too early")
        found = np.frombuffer(self._data, dtype, count, self.at)
        self.at += -(-size // 8) * 8
        return found

    def values(self, dtype: str, count: int) -> Tensor:
        return torch.from_numpy(self.take(_PLAIN[SIZES[dtype]], count)).view(torch_dtype(dtype))

    def hashes(self, count: int, starts: Ints) -> Tensor:
        """Copy row numbers of the slices that begin with `starts`, and check them."""
        if count < 0:
            raise ProtocolError(f"a row-sparse slice names {count} rows")
        rows = self.take(_LONG, count).astype(np.int64)
        if not are_hashes(rows, starts):
            raise ProtocolError(
                f"the {count} rows of a hash table are not distinct, ascending and of their {len(starts)} slices"
            )
        return torch.from_numpy(rows)

    def ids(self, count: int, num_rows: int, as_bits: bool) -> Tensor:
        """Copy ids of rows and check them; a copy, because the peer could change them after the check."""
        if as_bits:
            bits = self.take(_BYTE, -(-num_rows // 8))
            [ids] = np.unpackbits(bits, count=num_rows, bitorder="little").nonzero()
        else:
            ids = self.take(_INT, count).astype(np.int64)
        if len(ids) != count or not are_row_ids(ids, num_rows):
            raise ProtocolError(
                f"the {count} rows of a slice are not distinct, ascending and below {num_rows}"
            )
        return torch.from_numpy(ids)


def are_row_ids(ids: Ints, num_rows: int) -> bool:
    """Return whether ids are distinct, ascending and below `num_rows`."""
    return not len(ids) or bool(ids[0] >= 0 and ids[-1] < num_rows and (ids[1:] > ids[:-1]).all())


def are_hashes(rows: Ints, starts: Ints) -> bool:
    """Return whether row numbers of a hash table are distinct, ascending and in adjacent slices with these starts."""
    if not len(rows):
        return True
    own, slices = slices_of_hashes(rows[[0, -1]]), slices_of_hashes(starts)
    return bool(slices[0] <= own[0] and own[1] <= slices[-1] and (rows[1:] > rows[:-1]).all())


def _to_numpy(values: Tensor) -> np.ndarray[Any, Any]:
    # View the bits as integers, because numpy has no bfloat16.
    plain = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    return np.ascontiguousarray(plain.numpy())


def cut_rows(rows: RowSet, starts: Sequence[int]) -> list[RowSet]:
    """Split rows at `starts`, which begin with 0; ids of each part are counted from its start."""
    if len(starts) == 1:
        return [rows]
    device = rows.ids.device
    edges = torch.tensor(starts[1:], dtype=torch.int64, device=device)
    counts = np.diff([0, *torch.searchsorted(rows.ids, edges).tolist(), len(rows.ids)]).tolist()
    ids = torch.split(rows.ids - torch.from_numpy(np.repeat(starts, counts)).to(device), counts)
    return list(map(RowSet, ids, torch.split(rows.values, counts)))


def split_rows(plan: Plan, rows: Mapping[int, RowSet]) -> dict[int, dict[int, RowSet]]:
    """Distribute rows of keys over their slices: slice → position of the segment → its rows.

    Every slice of a key gets an entry, possibly without rows: the key takes part there, too.
    """
    found: dict[int, dict[int, RowSet]] = {}
    for key, (ids, values) in rows.items():
        places = plan.rows(key)
        parts = cut_rows(RowSet(ids, values.reshape(len(ids), places.width)), places.starts[:-1].tolist())
        for slice_, part in zip(places.slices, parts, strict=True):
            found.setdefault(slice_.index, {})[places.position] = part
    return found


def pack_rows(
    plan: Plan,
    rows: Mapping[int, RowSet],
    arenas: Mapping[str, Tensor],
    absent: frozenset[int],
    overrides: Mapping[int, Tensor] = _NO_SLICES,
) -> dict[int, Tensor]:
    """Encode rows of keys for their servers, in as few messages as they fit into.

    Args:
        arenas: All elements of the other keys, laid out by the plan.
        absent: Keys that are left out.
        overrides: Slices (by index) whose elements are not in the arenas.

    Returns:
        The slice that each message belongs to → its bytes.
    """
    # 1. Group the rows by the message, named by its first slice.
    found: dict[int, tuple[dict[int, RowSet | Tensor], int]] = {}
    for key, (ids, values) in rows.items():
        places, numbers = plan.rows(key), ids.numpy()
        given = values.reshape(len(numbers), places.width)
        for block, where, own in places.by_server(numbers):
            here = given if isinstance(where, slice) else given.index_select(0, torch.from_numpy(where))
            for first, end, part in block.cut(own):
                some = RowSet(torch.from_numpy(block.counted_from(own[part], first)), here[part])
                found.setdefault(block.slices[first].index, ({}, end - first))[0][block.position] = some
    # 2. Add the elements of dense keys in the same slices, and encode.
    packed = {}
    for index, (parts, slices) in found.items():
        slice_ = plan.slices[index]
        for position, segment in enumerate(slice_.segments):
            if position not in parts and segment.key not in absent:
                flat, start = overrides.get(index), segment.start
                if flat is None:
                    flat, start = arenas[slice_.dtype], slice_.offset + start
                parts[position] = flat[start : start + segment.numel]
        packed[index] = encode_rows(plan, slice_, parts, slices)
    return packed


def same_payload(a: object, b: object) -> bool:
    if isinstance(a, CompressedPayload) and isinstance(b, CompressedPayload):
        return a.codec == b.codec and torch.equal(a.data, b.data)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        mine, theirs = _tensors_of_row_parts(a), _tensors_of_row_parts(b)
        return a.keys() == b.keys() and len(mine) == len(theirs) and all(map(same_bits, mine, theirs))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or same_bits(a, b)
    return False


def _tensors_of_row_parts(parts: Parts) -> list[Tensor]:
    pairs = [part for _, part in sorted(parts.items())]
    return [tensor for part in pairs for tensor in (part if isinstance(part, RowSet) else (part,))]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors on the CPU have the same shape and bits; compares eight bytes at a time."""
    if a.shape != b.shape or not a.numel():  # strides of an empty tensor may not allow a view as bytes
        return a.shape == b.shape
    mine, theirs = (one.contiguous().view(-1).view(torch.uint8).numpy() for one in (a, b))
    body = len(mine) // 8 * 8
    return (
        len(mine) == len(theirs)
        and np.array_equal(mine[:body].view(np.int64), theirs[:body].view(np.int64))
        and np.array_equal(mine[body:], theirs[body:])
    )
