"""A rank's slices on their way out: compressed where they are to be, and packed into messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from kvstore_server.plan import Slice
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import MAX_PAYLOAD, SENT_ALONE
from kvtrainer.comm.tickets import RoundItem

Encoded = Mapping[str, Mapping[int, Tensor]]
"""Table → its slices as they are sent, where they are compressed."""


def compress(items: Iterable[RoundItem]) -> dict[str, Mapping[int, Tensor]]:
    """Compress what the items' tables send compressed; values that replace others never are.

    Raises:
        NonFiniteGradientError: a gradient is infinite or not a number.
    """
    encoded: dict[str, Mapping[int, Tensor]] = {}
    for item in items:
        table = item.table
        if table.compressor is None or item.values is None or item.assign or item.veto or not table.round:
            continue
        slices = [piece for server in table.numbers for piece in item.sent_slices(server)]
        encoded[table.name] = table.compressor.encode(item.values, slices, item.absent)
    return encoded


def push_batches(
    work: Iterable[tuple[RoundItem, Iterable[Slice]]], encoded: Encoded, server: int
) -> Iterator[m.PushBatch]:
    """The messages that carry slices to a server; small slices travel together."""
    batch: list[m.Push] = []
    size, codec = 0, b""
    for push, its_codec in _pushes(work, encoded, server):
        nbytes = push.payload.nbytes
        if nbytes >= SENT_ALONE:
            yield m.PushBatch((push,), its_codec)
            continue
        if batch and (size + nbytes > MAX_PAYLOAD or its_codec != codec):
            yield m.PushBatch(tuple(batch), codec)
            batch, size = [], 0
        batch.append(push)
        size, codec = size + nbytes, its_codec
    if batch:
        yield m.PushBatch(tuple(batch), codec)


def _pushes(
    work: Iterable[tuple[RoundItem, Iterable[Slice]]], encoded: Encoded, server: int
) -> Iterator[tuple[m.Push, bytes]]:
    """Each slice, and the description of its codec; empty where it is not compressed."""
    for item, pieces in work:
        table, values = item.table, item.values
        if values is None:
            continue
        number, round_, payloads = table.numbers[server], table.round, encoded.get(table.name)
        if payloads is not None and table.compressor is not None:
            codec = table.compressor.packed_codec
            for piece in pieces:
                yield m.Push(number, piece.index, round_, 0, payloads[piece.index]), codec
            continue
        for piece in pieces:
            payload = values[piece.dtype][piece.offset : piece.offset + piece.used]
            yield m.Push(number, piece.index, round_, 0, payload), b""
