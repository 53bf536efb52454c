"""A rank's slices on their way out: brought into the form in which they travel, and packed into messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from kvstore_server.plan import Slice
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import KEYS_PER_MESSAGE, MAX_PAYLOAD, SENT_ALONE
from kvstore_server.reduction import RowSet
from kvstore_server.row_payload import PACKED_ROWS, encode_rows, split_rows
from kvtrainer.comm.tickets import Encoded, RoundItem

AllEncoded = Mapping[str, Mapping[int, Encoded]]
"""Table → its slices as they are sent, where that is not as plain numbers."""


def encode(items: Iterable[RoundItem]) -> dict[str, Mapping[int, Encoded]]:
    """Encode row-sparse slices, and compress the others of tables that are compressed.

    Initial values, and others that replace what the store holds, are neither.

    Raises:
        NonFiniteGradientError: a gradient that is to be compressed is infinite or not a number.
    """
    encoded: dict[str, Mapping[int, Encoded]] = {}
    for item in items:
        if item.values is None or item.assign or item.veto or not item.table.round:
            continue
        found = _row_slices(item) if item.rows else {}
        compressor = item.table.compressor
        if compressor is not None:
            pieces = [piece for server in item.table.numbers for piece in item.sent_slices(server)]
            plain = [piece for piece in pieces if piece.index not in found]
            data = compressor.encode(item.values, plain, item.absent)
            found |= {index: Encoded(compressor.packed_codec, one) for index, one in data.items()}
        if found:
            encoded[item.table.name] = found
    return encoded


def push_batches(
    work: Iterable[tuple[RoundItem, Iterable[Slice]]], encoded: AllEncoded, server: int
) -> Iterator[m.PushBatch]:
    """The messages that carry slices to a server; small slices of one form travel together."""
    batch: list[m.Push] = []
    size, form = 0, b""
    for push, its_form in _pushes(work, encoded, server):
        nbytes = push.payload.nbytes
        if nbytes >= SENT_ALONE:
            yield m.PushBatch((push,), its_form)
            continue
        is_full = size + nbytes > MAX_PAYLOAD or len(batch) == KEYS_PER_MESSAGE
        if batch and (is_full or its_form != form):
            yield m.PushBatch(tuple(batch), form)
            batch, size = [], 0
        batch.append(push)
        size, form = size + nbytes, its_form
    if batch:
        yield m.PushBatch(tuple(batch), form)


def _pushes(
    work: Iterable[tuple[RoundItem, Iterable[Slice]]], encoded: AllEncoded, server: int
) -> Iterator[tuple[m.Push, bytes]]:
    """Each slice and its form."""
    for item, pieces in work:
        if item.values is None:
            continue
        number, round_ = item.table.numbers[server], item.table.round
        others = encoded.get(item.table.name)
        for piece in pieces:
            form = b""
            if others is not None and piece.index in others:
                form, payload = others[piece.index]
            elif item.tables is not None:
                payload = _plain(item, piece)
            else:
                payload = item.values[piece.dtype][piece.offset : piece.offset + piece.used]
            yield m.Push(number, piece.index, round_, 0, payload), form


def _plain(item: RoundItem, piece: Slice) -> Tensor:
    """The numbers of a slice: out of the arena or, of a row-sparse key, from where its values are."""
    segment = piece.segments[0]
    assert item.values is not None
    assert item.tables is not None
    if segment.key in item.tables:
        return item.tables[segment.key](segment.key_start, segment.numel)
    return item.values[piece.dtype][piece.offset : piece.offset + piece.used]


def _row_slices(item: RoundItem) -> dict[int, Encoded]:
    """The slices that hold a part of a key of which there are only some rows."""
    assert item.values is not None
    plan = item.table.plan
    found: dict[int, dict[int, RowSet | Tensor]] = {}
    for key, (ids, values) in (item.rows or {}).items():
        for index, (position, part) in split_rows(plan, key, ids, values).items():
            found.setdefault(index, {})[position] = part
    for index, parts in found.items():
        piece = plan.slices[index]
        for position, segment in enumerate(piece.segments):
            if position not in parts and segment.key not in item.absent:
                start = piece.offset + segment.start
                parts[position] = item.values[piece.dtype][start : start + segment.numel]
    return {i: Encoded(PACKED_ROWS, encode_rows(plan, plan.slices[i], parts)) for i, parts in found.items()}
