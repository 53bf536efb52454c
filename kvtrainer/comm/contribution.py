"""What one worker gives to a round of some tables, and the form in which it travels where that is not plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from kvstore_server.norms import Guard
from kvstore_server.plan import Slice
from kvstore_server.rows import PACKED_ROWS, RowSet, pack_rows, same_bits
from kvtrainer.comm.mapped import MappedWeights
from kvtrainer.comm.tables import RemoteTable

Arenas = Mapping[str, Tensor]
"""dtype name → flat tensor laid out as the Plan says; padding behind the last key may be missing. Row-sparse keys are
not in it."""
Source = Callable[[int, int], Tensor]
"""(first element, number of elements) → these values of a key, flat, on the CPU."""


class Contribution(NamedTuple):
    """One worker's part in a round of some tables.

    Args:
        tables: The tables, in any order.
        values: The values that this rank gives to each table; None gives nothing but takes part, as with `veto` and
            `joined`.
        outs: Where the new weights of each table are written; None means that they are not wanted.
        rescale: Factor of the contribution; None means the optimizer's own.
        hyper: The hyper-parameters that go with the commits; empty when nothing changed.
        absent: Keys (by index) of every table that are left out; a slice of which all keys are absent is not sent.
        rows: (position of the table, key by index) → rows of it, of which this rank has only those; `values` do not
            count there.
        sources: Row-sparse key (by index) → its values, in the first round or with `assign`.
        lent: Key (by index) → its values, flat, which are not in `values`; of the only table.
        born: Slice (by index) of those → its values in memory of its server, which reads them there.
        veto: The values are not finite: they are not sent, and the round changes nothing for anybody.
        assign: The lowest rank's values replace the weights; every rank must say so.
        joined: This rank has no more data: it gives nothing, until all ranks have said so.
        is_kept: `outs` still hold what the tables' last round with this mark left there: rows that have not changed
            since then need not come again.
        guard: The sum is measured, and decided about, before it is used; every rank must want that.
        unread: Keys (by index) of which the new weights do not matter; slices that hold nothing else are not written.
        mapped: Maps `outs` of the only table, as far as servers show their memory.
        priority: Where messages have to queue, those of a higher one go first.
    """

    tables: Sequence[RemoteTable]
    values: Sequence[Arenas] | None
    outs: Sequence[Arenas] | None
    rescale: float | None = None
    hyper: bytes = b""
    absent: frozenset[int] = frozenset()
    rows: Mapping[tuple[int, int], RowSet] = {}
    sources: Mapping[int, Source] = {}
    lent: Mapping[int, Tensor] = {}
    born: Mapping[int, Tensor] = {}
    veto: bool = False
    assign: bool = False
    joined: bool = False
    is_kept: bool = False
    guard: Guard | None = None
    unread: frozenset[int] = frozenset()
    mapped: MappedWeights | None = None
    priority: int = 0

    def gives(self, table: int, piece: Slice) -> bool:
        """Whether this rank gives the numbers of a slice of a table (by position), or of some of its keys."""
        first = piece.segments[0].key
        if (table, first) in self.rows and len(self.tables[table].plan.slices_with(first)) > 1:
            return False  # rows go with the first of several slices
        if first not in self.sources and not self.tables[table].plan.is_resident(piece):
            return False
        return not self.absent or any(segment.key not in self.absent for segment in piece.segments)

    def of(self, positions: Sequence[int]) -> Contribution:
        """The part in a round of some of the tables, which have no rows."""
        return self._replace(
            tables=[self.tables[at] for at in positions],
            values=None if self.values is None else [self.values[at] for at in positions],
            outs=None if self.outs is None else [self.outs[at] for at in positions],
        )


class Encoded(NamedTuple):
    """A slice as it is sent."""

    form: bytes
    """As of Contribute."""
    data: Tensor


def kept(contribution: Contribution, sent: Mapping[int, Tensor]) -> frozenset[int]:
    """Find the slices (by index) of the only table that are to be given as they were sent ahead.

    None are, where one of those that were sent is not to be given at all.
    """
    [table] = contribution.tables
    pieces = [table.plan.slices[index] for index in sent]
    if (
        contribution.assign
        or contribution.values is None
        or not all(contribution.gives(0, p) for p in pieces)
    ):
        return frozenset()
    others = {*contribution.absent, *contribution.sources, *[key for _, key in contribution.rows]}
    found = set()
    for piece in pieces:
        key, _, start, numel = piece.segments[0]
        if not others.isdisjoint([segment.key for segment in piece.segments]):
            continue
        lent = contribution.lent.get(key)
        own = contribution.values[0][piece.dtype][piece.offset : piece.offset + piece.used]
        now = own if lent is None else lent[start : start + numel]
        is_valid = table.compressor is None or table.compressor.has_encoded(piece.index)
        if is_valid and same_bits(now, sent[piece.index]):
            found.add(piece.index)
    return frozenset(found)


def encode(contribution: Contribution, kept: Collection[int]) -> dict[int, dict[int, Encoded]]:
    """Encode row-sparse slices, and compress the others of tables that are compressed, by index of the table.

    Initial values, and others that replace what the store holds, are neither. Slices that are `kept` were compressed
    when they were sent ahead.

    Raises:
        NonFiniteGradientError: a gradient that is to be compressed is infinite or not a number.
    """
    encoded: dict[int, dict[int, Encoded]] = {}
    if contribution.values is None or contribution.assign:
        return encoded
    with_rows = {at for at, _ in contribution.rows}
    for at, table in enumerate(contribution.tables):
        if (table.compressor is None and at not in with_rows) or not table.round:
            continue
        values, absent = contribution.values[at], contribution.absent
        rows = {key: rows for (position, key), rows in contribution.rows.items() if position == at}
        packed = pack_rows(table.plan, rows, values, absent)
        found = {index: Encoded(PACKED_ROWS, data) for index, data in packed.items()}
        if table.compressor is not None:
            plain = [p for p in table.plan.slices if p.index not in found and contribution.gives(at, p)]
            data = table.compressor.encode(values, plain, absent, kept)
            found |= {index: Encoded(table.compressor.packed_codec, one) for index, one in data.items()}
        if found:
            encoded[table.index] = found
    return encoded
