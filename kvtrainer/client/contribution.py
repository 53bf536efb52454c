"""What a worker contributes to a round, how it is encoded, and where its slices lie on each server.

`Contribution` is the one container of a round's input, from the Trainer or a store's verbs down to the messages.
`encode_slices` turns row-sparse and compressed slices into bytes; all others are sent as they are.

`ContributionLayout` is computed once for calls of the same tables, for each server: it numbers the slices there by
position, holds templates of the messages (pushes and commits), and says where small slices are gathered in one buffer.
Everything about a round that depends on the tables alone belongs there, so that a round of thousands of tables costs
little.
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
from kvstore_server.protocol.rows import PACKED_ROWS, RowSet, num_slices_of_rows, pack_rows, same_bits
from kvstore_server.shard.norms import Guard
from kvtrainer.client.tables import RemoteTable, Tables
from kvtrainer.client.weight_sinks import IN_PLACE, WeightSink
from kvtrainer.types import Arenas

Source = Callable[[int, int], Tensor]
"""(first element, number of elements) → these values of a key, flat, on the CPU."""


class Contribution(NamedTuple):
    """One worker's part in a round of some tables.

    Args:
        tables: The tables, in any order.
        values: The values that this rank gives to each table. None gives nothing but takes part, as with `veto` and
            `joined`.
        outs: Where the new weights of each table are written; None if they are not wanted.
        rescale: Factor of the contribution; None means the optimizer's own.
        hyper: The hyper-parameters that go with the commits; empty when nothing changed.
        absent: Keys (by index) of every table that are left out; a slice whose keys are all absent is not sent.
        rows: (position of the table, key by index) → the only rows of it that this rank has; `values` do not count.
        sources: Row-sparse key (by index) → its values, in the first round or with `assign`.
        borrowed: Key (by index) → its values, flat, instead of those in `values`; only with one table.
        shared_grads: Slice (by index) → its values in the server's memory, where the server reads them.
        veto: The values are not finite: they are not sent, and the round changes nothing on any worker.
        assign: The lowest rank's values replace the weights; every rank must set it.
        joined: This rank has no more data: it gives nothing, until all ranks have joined.
        is_incremental: `outs` still hold what the last round with this flag left there: rows that have not changed
            since then need not be sent again.
        guard: The sum is measured and decided about before it is used; every rank must want that.
        unread: Keys (by index) whose new weights do not matter; slices that hold nothing else are not written.
        sink: Where new weights of the only table arrive; `outs` are its own.
        client_state: What a process that takes this rank over gets, if this is the rank's last contribution.
        mean: If the members may change: (factor, parts of this rank), from which `rescale` follows for a mean over all.
        priority: If messages have to queue, those of higher priority go first.
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
    is_incremental: bool = False
    guard: Guard | None = None
    unread: frozenset[int] = frozenset()
    sink: WeightSink = IN_PLACE
    priority: int = 0
    client_state: bytes = b""
    mean: tuple[float, int] | None = None

    def over(self, num_members: int) -> Contribution:
        """Return the contribution to a round with `num_members` members."""
        if self.mean is None:
            return self
        factor, parts = self.mean
        return self._replace(rescale=factor / (num_members * parts))

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but whole gradients, options, and what a successor gets."""
        return not (
            self.absent
            or self.rows
            or self.sources
            or self.veto
            or self.assign
            or self.joined
            or self.is_incremental
            or self.unread
            or self.guard is not None
        )

    @property
    def scale(self) -> float:
        """The factor of this contribution where no server knows the optimizer's own."""
        return 1.0 if self.rescale is None else self.rescale

    def gives(self, table: int, slice_: Slice) -> bool:
        first = slice_.segments[0].key
        if (table, first) in self.rows and len(self.tables[table].plan.slices_with(first)) > 1:
            return False  # rows go with the first of several slices
        if first not in self.sources and not self.tables[table].plan.is_resident(slice_):
            return False
        return not self.absent or any(segment.key not in self.absent for segment in slice_.segments)

    def of(self, positions: Sequence[int]) -> Contribution:
        """Return the part in a round of some of the tables, which have no rows."""
        return self._replace(
            tables=[self.tables[at] for at in positions],
            values=None if self.values is None else [self.values[at] for at in positions],
            outs=None if self.outs is None else [self.outs[at] for at in positions],
        )


class EncodedSlice(NamedTuple):
    form: bytes
    """Packed codec, as in `messages.Contribute`."""
    data: Tensor


def valid_pushes(contribution: Contribution, sent: Mapping[int, Tensor]) -> frozenset[int]:
    """Return the slices (by index) of the only table whose eager push still holds the same bits.

    None do if one of those that were pushed is not to be given at all: then the server discards all of them.
    """
    [table] = contribution.tables
    slices = [table.plan.slices[index] for index in sent]
    if (
        contribution.assign
        or contribution.values is None
        or not all(contribution.gives(0, p) for p in slices)
    ):
        return frozenset()
    # Slices with rows, or whose keys are left out now, are encoded again.
    others = {*contribution.absent, *contribution.sources, *[key for _, key in contribution.rows]}
    found = set()
    for slice_ in slices:
        key, _, start, numel = slice_.segments[0]
        if not others.isdisjoint([segment.key for segment in slice_.segments]):
            continue
        borrowed = contribution.borrowed.get(key)
        own = contribution.values[0][slice_.dtype][slice_.offset : slice_.offset + slice_.used]
        now = own if borrowed is None else borrowed[start : start + numel]
        is_valid = table.compressor is None or table.compressor.has_encoded(slice_.index)
        if is_valid and same_bits(now, sent[slice_.index]):
            found.add(slice_.index)
    return frozenset(found)


def encode_slices(contribution: Contribution, valid: Collection[int]) -> dict[int, dict[int, EncodedSlice]]:
    """Encode row-sparse slices, and compress others of compressed tables; by index of the table.

    Initial values, and values that replace what the store holds, are sent as they are. Slices that are `valid` were
    compressed by their eager push.

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
        # A slice with rows is never compressed: its rows are few already.
        packed = pack_rows(table.plan, rows, values, absent, contribution.shared_grads)
        found = {index: EncodedSlice(PACKED_ROWS, data) for index, data in packed.items()}
        if table.compressor is not None:
            plain = [p for p in table.plan.slices if p.index not in found and contribution.gives(at, p)]
            data = table.compressor.encode(values, plain, absent, valid)
            table.compressor.store(table.round)
            found |= {index: EncodedSlice(table.compressor.packed_codec, one) for index, one in data.items()}
        if found:
            encoded[table.index] = found
    return encoded


class _ContributionPlace(NamedTuple):
    """A large slice, by position; or the range of the gather buffer that holds neighbouring small ones."""

    slice: int
    begin: int = -1
    end: int = -1


class ContributionLayout:
    """Slices of some tables on one server, by position, and where they lie in memory here.

    Large slices are sent from and written to where they are; small ones are gathered in one buffer. `first` is the
    position of the first table in the round; some of the tables may have no slices on the server.
    """

    def __init__(self, server: int, tables: Sequence[RemoteTable], first: int, all_tables: Tables) -> None:
        # 1. The tables that have slices on the server, in the order of its numbers.
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
        # 2. Their slices, in the same order.
        by_table = [table.plan.slices_of(server) for table in self.tables]
        self.takes_half = any([table.takes_half for table in self.tables])
        """Whether new weights come rounded to bfloat16; the same for all tables."""
        self.takes_deltas = any([table.delta_codec is not None for table in self.tables])
        """Whether new weights come as changes; the same for all tables."""
        self.is_converted = self.takes_half or self.takes_deltas
        self.slices = [slice_ for slices in by_table for slice_ in slices]
        self.table = [at for at, slices in enumerate(by_table) for _ in slices]
        """The position of each slice's table."""
        self.is_resident = bytes(
            [t.plan.is_resident(p) for t, slices in zip(self.tables, by_table, strict=True) for p in slices]
        )
        self.resident = [at for at, is_resident in enumerate(self.is_resident) if is_resident]
        self.num_resident = np.bincount(
            np.array(self.table, np.int64)[self.resident], minlength=len(self.tables)
        )
        """How many slices of each table travel whole."""
        self.nbytes = [slice_.length * torch_dtype(slice_.dtype).itemsize for slice_ in self.slices]
        self.total = sum(self.nbytes)
        # 3. Where small slices are gathered.
        self.begin: list[int] = []
        """Where a gathered slice begins in memory; -1 for others."""
        self.size = 0
        for is_resident, nbytes in zip(self.is_resident, self.nbytes, strict=True):
            is_gathered = is_resident and nbytes < SENT_ALONE
            self.begin.append(self.size if is_gathered else -1)
            self.size += nbytes if is_gathered else 0
        # 4. Templates of messages, filled in by each round.
        starts = all_tables.slot[server, self.index].tolist()
        slots = [
            start + at for start, slices in zip(starts, by_table, strict=True) for at in range(len(slices))
        ]
        self.slots = {slot: at for at, slot in enumerate(slots)}
        self.pushes = np.zeros((len(slots), m.PUSH_WORDS), np.int64)
        self.pushes[:, m.PUSH_SLOT], self.pushes[:, m.PUSH_NBYTES] = slots, self.nbytes
        self.push_table = np.array(self.table, np.int64)
        self.commits = np.zeros((len(self.tables), m.COMMIT_WORDS), np.int64)
        self.commits[:, m.COMMIT_TABLE], self.commits[:, m.COMMIT_COUNT] = numbers[here], self.num_resident
        self.commits[:, m.COMMIT_FLAGS] = m.WANTS_WEIGHTS * (self.num_resident > 0)
        # 5. What rounds leave for the next one.
        self.spare: GatheredContribution | None = None
        """The buffer of a round that is over."""
        self.mapped: Ints | None = None
        """The slices that are mapped, if these are all that can be; None if some may be missing."""
        self.runs = self.runs_of(self.resident)
        """Where slices lie if all are given."""
        self._plain: tuple[tuple[frozenset[object], ...], set[int]] | None = None
        """The keys that were left out last or given as rows, and the slices (by position) that were given then."""

    @cached_property
    def _key_ends(self) -> list[int]:
        """By slice, the end of its key's exclusive slices; for shared slices, the next index."""
        where = [(of, slice_.segments[0].key) for of, slice_ in zip(self.table, self.slices, strict=True)]
        return _ends_of_contribution_runs(where)

    @cached_property
    def _run_ends(self) -> list[int]:
        groups = [table.plan.row_groups for table in self.tables]
        keys = [(of, slice_.segments[0].key) for of, slice_ in zip(self.table, self.slices, strict=True)]
        return _ends_of_contribution_runs([(of, groups[of].get(key, (key,))[0]) for of, key in keys])

    @cached_property
    def _place(self) -> dict[tuple[int, int], int]:
        index = self.index.tolist()
        return {
            (index[of], p.index): at for at, (of, p) in enumerate(zip(self.table, self.slices, strict=True))
        }

    def itemsize(self, form: bytes, slot: int) -> int | None:
        """Return the bytes of one element of an encoded slice; None if the encoding cannot be cut."""
        at = self.slots[slot]
        dtype, compressor = self.slices[at].dtype, self.tables[self.table[at]].compressor
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
        of = contribution.absent, frozenset(contribution.rows), frozenset(contribution.sources)
        if self._plain is None or self._plain[0] != of:
            pairs = enumerate(zip(self.table, self.slices, strict=True))
            self._plain = of, {at for at, (n, slice_) in pairs if contribution.gives(self.at[n], slice_)}
        places = [self._place.get((index, slice_)) for index, slices in encoded.items() for slice_ in slices]
        return sorted(self._plain[1].union([at for at in places if at is not None]))

    def end_of_rows(self, at: int, raw: Tensor) -> int:
        """Return the end of the slice range that a reply with rows covers: the whole key if it has no rows."""
        return min(at + num_slices_of_rows(raw), self._run_ends[at]) if len(raw) else self._key_ends[at]

    def runs_of(self, given: Sequence[int]) -> list[_ContributionPlace]:
        runs: list[_ContributionPlace] = []
        for at in given:
            begin, end, before = self.begin[at], self.begin[at] + self.nbytes[at], runs[-1:]
            if begin < 0:
                runs.append(_ContributionPlace(at))
            elif before and before[0].end == begin:
                runs[-1] = before[0]._replace(end=end)
            else:
                runs.append(_ContributionPlace(-1, begin, end))
        return runs


class GatheredContribution:
    """The gather buffer of a layout, with a view of each small slice."""

    @torch.inference_mode(False)
    def __init__(self, layout: ContributionLayout) -> None:
        self.raw = torch.zeros(layout.size, dtype=torch.uint8, device="cpu")
        self.views = [
            self.raw[begin : begin + nbytes].view(torch_dtype(slice_.dtype))[: slice_.used]
            if begin >= 0
            else self.raw
            for slice_, begin, nbytes in zip(layout.slices, layout.begin, layout.nbytes, strict=True)
        ]


def _ends_of_contribution_runs(where: Sequence[object]) -> list[int]:
    """For each item, return the end of the run of equal neighbours that it is in."""
    sizes = [len(list(own)) for _, own in itertools.groupby(where)]
    return np.repeat(np.cumsum(sizes), sizes).tolist()
