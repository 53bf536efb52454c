"""A worker's part in a round, its form on the way, and where slices lie.

A layout says that of messages, and of memory here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.engine.rounds import Ints
from kvstore_server.plan import Slice
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import SENT_ALONE
from kvstore_server.protocol.rows import PACKED_ROWS, RowSet, num_slices, pack_rows, same_bits
from kvstore_server.shard.norms import Guard
from kvtrainer.client.shared_weights import IN_PLACE, WeightSink
from kvtrainer.client.tables import RemoteTable, Tables
from kvtrainer.types import Arenas

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
        borrowed: Key (by index) → its values, flat, which are not in `values`; of the only table.
        shared_grads: Slice (by index) → its values in memory of its server, which reads them there.
        veto: The values are not finite: they are not sent, and the round changes nothing for anybody.
        assign: The lowest rank's values replace the weights; every rank must say so.
        joined: This rank has no more data: it gives nothing, until all ranks have said so.
        is_kept: `outs` still hold what the tables' last round with this mark left there: rows that have not changed
            since then need not come again.
        guard: The sum is measured, and decided about, before it is used; every rank must want that.
        unread: Keys (by index) of which the new weights do not matter; slices that hold nothing else are not written.
        sink: Where new weights of the only table arrive; `outs` are its own.
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
    borrowed: Mapping[int, Tensor] = {}
    shared_grads: Mapping[int, Tensor] = {}
    veto: bool = False
    assign: bool = False
    joined: bool = False
    is_kept: bool = False
    guard: Guard | None = None
    unread: frozenset[int] = frozenset()
    sink: WeightSink = IN_PLACE
    priority: int = 0

    @property
    def scale(self) -> float:
        """The factor of this contribution where no server knows the optimizer's own."""
        return 1.0 if self.rescale is None else self.rescale

    def gives(self, table: int, piece: Slice) -> bool:
        """Tell whether this rank gives a table's (by position) slice, or some keys of it."""
        first = piece.segments[0].key
        if (table, first) in self.rows and len(self.tables[table].plan.slices_with(first)) > 1:
            return False  # rows go with the first of several slices
        if first not in self.sources and not self.tables[table].plan.is_resident(piece):
            return False
        return not self.absent or any(segment.key not in self.absent for segment in piece.segments)

    def of(self, positions: Sequence[int]) -> Contribution:
        """Return the part in a round of some of the tables, which have no rows."""
        return self._replace(
            tables=[self.tables[at] for at in positions],
            values=None if self.values is None else [self.values[at] for at in positions],
            outs=None if self.outs is None else [self.outs[at] for at in positions],
        )


class EncodedSlice(NamedTuple):
    """A slice as it is sent."""

    form: bytes
    """As of Contribute."""
    data: Tensor


def kept(contribution: Contribution, sent: Mapping[int, Tensor]) -> frozenset[int]:
    """Find slices (by index) of the only table to be given as they were sent ahead.

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
        borrowed = contribution.borrowed.get(key)
        own = contribution.values[0][piece.dtype][piece.offset : piece.offset + piece.used]
        now = own if borrowed is None else borrowed[start : start + numel]
        is_valid = table.compressor is None or table.compressor.has_encoded(piece.index)
        if is_valid and same_bits(now, sent[piece.index]):
            found.add(piece.index)
    return frozenset(found)


def encode(contribution: Contribution, kept: Collection[int]) -> dict[int, dict[int, EncodedSlice]]:
    """Encode row-sparse slices, and compress others of compressed tables. By index of the table.

    Initial values, and others that replace what the store holds, are neither. Slices that are `kept` were compressed
    when they were sent ahead.

    Raises:
        NonFiniteGradientError: a gradient that is to be compressed is infinite or not a number.
    """
    encoded: dict[int, dict[int, EncodedSlice]] = {}
    if contribution.values is None or contribution.assign:
        return encoded
    with_rows = {at for at, _ in contribution.rows}
    for at, table in enumerate(contribution.tables):
        if (table.compressor is None and at not in with_rows) or not table.round:
            continue
        values, absent = contribution.values[at], contribution.absent
        rows = {key: rows for (position, key), rows in contribution.rows.items() if position == at}
        packed = pack_rows(table.plan, rows, values, absent, contribution.shared_grads)
        found = {index: EncodedSlice(PACKED_ROWS, data) for index, data in packed.items()}
        if table.compressor is not None:
            plain = [p for p in table.plan.slices if p.index not in found and contribution.gives(at, p)]
            data = table.compressor.encode(values, plain, absent, kept)
            found |= {index: EncodedSlice(table.compressor.packed_codec, one) for index, one in data.items()}
        if found:
            encoded[table.index] = found
    return encoded


class _Where(NamedTuple):
    """A large slice, by position; or where in the layout's memory neighbouring ones are gathered."""

    slice: int
    begin: int = -1
    end: int = -1


class ServerLayout:
    """Slices of some tables on one server, by slot, and where they lie in memory here.

    It is made once for calls of the same tables. Large slices are sent from and written to where they are; all others
    are gathered in one piece of memory.

    Args:
        tables: Tables, of which some may have no slices on the server.
        first: The position of the first one in the round.
    """

    def __init__(self, server: int, tables: Sequence[RemoteTable], first: int, all_tables: Tables) -> None:
        self.server = server
        index = np.array([table.index for table in tables], np.int64)
        numbers = all_tables.number[server, index]
        here = np.flatnonzero(numbers >= 0)
        here = here[np.argsort(numbers[here])]
        self.at: list[int] = (first + here).tolist()
        """The position in the round of each table that is here."""
        self.tables = [tables[at] for at in here.tolist()]
        self.index = index[here]
        self.position = {number: at for at, number in enumerate(numbers[here].tolist())}
        """Number of the table on the server → its position here."""
        by_table = [table.plan.slices_of(server) for table in self.tables]
        self.takes_half = any([table.takes_half for table in self.tables])
        """As of the tables, which are alike in that."""
        self.takes_deltas = any([table.delta_codec is not None for table in self.tables])
        """Whether new weights come as changes; the tables are alike in that, too."""
        self.is_converted = self.takes_half or self.takes_deltas
        self.pieces = [piece for pieces in by_table for piece in pieces]
        self.table = [at for at, pieces in enumerate(by_table) for _ in pieces]
        """The position of each slice's table."""
        self.is_resident = bytes(
            [t.plan.is_resident(p) for t, pieces in zip(self.tables, by_table, strict=True) for p in pieces]
        )
        self.resident = [at for at, is_resident in enumerate(self.is_resident) if is_resident]
        self.num_resident = np.bincount(
            np.array(self.table, np.int64)[self.resident], minlength=len(self.tables)
        )
        """How many slices of each table travel whole."""
        self.nbytes = [piece.length * torch_dtype(piece.dtype).itemsize for piece in self.pieces]
        self.total = sum(self.nbytes)
        self.begin: list[int] = []
        """Where a gathered slice begins in memory; -1 for others."""
        self.size = 0
        for is_resident, nbytes in zip(self.is_resident, self.nbytes, strict=True):
            is_gathered = is_resident and nbytes < SENT_ALONE
            self.begin.append(self.size if is_gathered else -1)
            self.size += nbytes if is_gathered else 0
        starts = all_tables.slot[server, self.index].tolist()
        slots = [
            start + at for start, pieces in zip(starts, by_table, strict=True) for at in range(len(pieces))
        ]
        self.slots = {slot: at for at, slot in enumerate(slots)}
        self.pushes = np.zeros((len(slots), m.PUSH_WORDS), np.int64)
        self.pushes[:, 0], self.pushes[:, 3] = slots, self.nbytes
        self.push_table = np.array(self.table, np.int64)
        self.commits = np.zeros((len(self.tables), m.COMMIT_WORDS), np.int64)
        self.commits[:, 0], self.commits[:, 2] = numbers[here], self.num_resident
        self.commits[:, 5] = m.WANTS_WEIGHTS * (self.num_resident > 0)
        self.spare: GatheredSlices | None = None
        """Memory of a round that is over."""
        self.mapped: Ints | None = None
        """The slices that are mapped: all that ever have a place on the server. None if some may be missing."""
        self.runs = self.runs_of(self.resident)
        """Where all slices lie, if all are given."""
        self._plain: tuple[tuple[frozenset[object], ...], set[int]] | None = None
        """What a rank left out last, and the slices, by position, that it gave all the same."""

    @cached_property
    def _stack_ends(self) -> list[int]:
        """Of each slice, where those end that its key has for itself; otherwise the next one."""
        where = [(of, piece.segments[0].key) for of, piece in zip(self.table, self.pieces, strict=True)]
        return _ends(where)

    @cached_property
    def _run_ends(self) -> list[int]:
        """The same, of row groups."""
        groups = [table.plan.row_groups for table in self.tables]
        keys = [(of, piece.segments[0].key) for of, piece in zip(self.table, self.pieces, strict=True)]
        return _ends([(of, groups[of].get(key, (key,))[0]) for of, key in keys])

    @cached_property
    def _place(self) -> dict[tuple[int, int], int]:
        """Table (index) and slice → its position."""
        index = self.index.tolist()
        return {
            (index[of], p.index): at for at, (of, p) in enumerate(zip(self.table, self.pieces, strict=True))
        }

    def itemsize(self, form: bytes, slot: int) -> int | None:
        """Return the bytes of an element of a slice in a form, as of Contribute; None if it cannot be cut."""
        at = self.slots[slot]
        dtype, compressor = self.pieces[at].dtype, self.tables[self.table[at]].compressor
        if not form:
            return torch_dtype(dtype).itemsize
        return (
            None
            if compressor is None or form != compressor.packed_codec
            else compressor.codec.itemsize(dtype)
        )

    def given(
        self, contribution: Contribution, encoded: Mapping[int, Mapping[int, EncodedSlice]]
    ) -> list[int]:
        """Return positions of slices that a rank gives. It leaves some out, or has some encoded."""
        of = contribution.absent, frozenset(contribution.rows), frozenset(contribution.sources)
        if self._plain is None or self._plain[0] != of:
            pairs = enumerate(zip(self.table, self.pieces, strict=True))
            self._plain = of, {at for at, (n, piece) in pairs if contribution.gives(self.at[n], piece)}
        places = [self._place.get((index, piece)) for index, pieces in encoded.items() for piece in pieces]
        return sorted(self._plain[1].union([at for at in places if at is not None]))

    def end_of_rows(self, at: int, raw: Tensor) -> int:
        """Say where the slices end that rows are of, which came back for one: without any, all of the key."""
        return min(at + num_slices(raw), self._run_ends[at]) if len(raw) else self._stack_ends[at]

    def runs_of(self, given: Sequence[int]) -> list[_Where]:
        """List where slices, by position, lie, one behind the other."""
        runs: list[_Where] = []
        for at in given:
            begin, end, before = self.begin[at], self.begin[at] + self.nbytes[at], runs[-1:]
            if begin < 0:
                runs.append(_Where(at))
            elif before and before[0].end == begin:
                runs[-1] = before[0]._replace(end=end)
            else:
                runs.append(_Where(-1, begin, end))
        return runs


class GatheredSlices:
    """The gathered slices of a layout, and a view of the numbers of each."""

    def __init__(self, layout: ServerLayout) -> None:
        self.raw = torch.zeros(layout.size, dtype=torch.uint8, device="cpu")
        self.views = [
            self.raw[begin : begin + nbytes].view(torch_dtype(piece.dtype))[: piece.used]
            if begin >= 0
            else self.raw
            for piece, begin, nbytes in zip(layout.pieces, layout.begin, layout.nbytes, strict=True)
        ]


def _ends(where: Sequence[object]) -> list[int]:
    """Say for each item where those end that are equal to it and beside it."""
    sizes = [len(list(own)) for _, own in itertools.groupby(where)]
    return np.repeat(np.cumsum(sizes), sizes).tolist()
