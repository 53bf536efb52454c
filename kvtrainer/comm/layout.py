"""Where the slices of some tables lie that are on one server: in messages, and in memory here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.plan import Slice
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import SENT_ALONE
from kvstore_server.rounds import Ints
from kvstore_server.rows import num_slices
from kvtrainer.comm.contribution import Contribution, Encoded
from kvtrainer.comm.tables import RemoteTable, Tables


class _Where(NamedTuple):
    """A large slice, by position; or where in the layout's memory neighbouring ones are gathered."""

    slice: int
    begin: int = -1
    end: int = -1


class Layout:
    """The slices of some tables on one server, in the order of their slots, and where they lie in memory here.

    It is made once for calls of the same tables. Large slices are sent from and written to where they are; all others
    are gathered in one piece of memory.

    Args:
        tables: Tables, of which some may have no slices on the server.
        first: The position of the first one in the round.
    """

    def __init__(self, server: int, tables: Sequence[RemoteTable], first: int, book: Tables) -> None:
        self.server = server
        index = np.array([table.index for table in tables], np.int64)
        numbers = book.number[server, index]
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
        starts = book.slot[server, self.index].tolist()
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
        self.spare: Memory | None = None
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
        """The same, of keys that lie side by side together."""
        runs = [table.plan.run_of for table in self.tables]
        keys = [(of, piece.segments[0].key) for of, piece in zip(self.table, self.pieces, strict=True)]
        return _ends([(of, runs[of].get(key, key)) for of, key in keys])

    @cached_property
    def _place(self) -> dict[tuple[int, int], int]:
        """Table (index) and slice → its position."""
        index = self.index.tolist()
        return {
            (index[of], p.index): at for at, (of, p) in enumerate(zip(self.table, self.pieces, strict=True))
        }

    def place_of(self, table: RemoteTable, piece: Slice) -> int:
        """Find the position of a slice of one of the tables."""
        return self._place[table.index, piece.index]

    def itemsize(self, form: bytes, slot: int) -> int | None:
        """The bytes of one element of a slice that is sent in a form, as of Contribute; None if it cannot be cut."""
        at = self.slots[slot]
        dtype, compressor = self.pieces[at].dtype, self.tables[self.table[at]].compressor
        if not form:
            return torch_dtype(dtype).itemsize
        return (
            None
            if compressor is None or form != compressor.packed_codec
            else compressor.codec.itemsize(dtype)
        )

    def given(self, contribution: Contribution, encoded: Mapping[int, Mapping[int, Encoded]]) -> list[int]:
        """The slices, by position, that a rank gives which leaves some out or has some encoded."""
        of = contribution.absent, frozenset(contribution.rows), frozenset(contribution.sources)
        if self._plain is None or self._plain[0] != of:
            pairs = enumerate(zip(self.table, self.pieces, strict=True))
            self._plain = of, {at for at, (n, piece) in pairs if contribution.gives(self.at[n], piece)}
        places = [self._place.get((index, piece)) for index, pieces in encoded.items() for piece in pieces]
        return sorted(self._plain[1].union([at for at in places if at is not None]))

    def end_of_rows(self, at: int, raw: Tensor) -> int:
        """Where the slices end that rows are of, which came back for one: without any, all of the key."""
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


class Memory:
    """The gathered slices of a layout, and a view of the numbers of each."""

    def __init__(self, layout: Layout) -> None:
        self.raw = torch.zeros(layout.size, dtype=torch.uint8)
        self.views = [
            self.raw[begin : begin + nbytes].view(torch_dtype(piece.dtype))[: piece.used]
            if begin >= 0
            else self.raw
            for piece, begin, nbytes in zip(layout.pieces, layout.begin, layout.nbytes, strict=True)
        ]


def _ends(where: Sequence[object]) -> list[int]:
    """Of each item, where those end that are equal to it and beside it."""
    sizes = [len(list(own)) for _, own in itertools.groupby(where)]
    return np.repeat(np.cumsum(sizes), sizes).tolist()
