"""The plan: where every element of every key is stored, a pure function of names, shapes, dtypes and topology.

Keys of one dtype share one flat arena. It is cut into slices, the unit of transfer, summation, update and placement: a
slice contains several small keys (a bucket) or one part of a big key. `make_plan` lays the arenas out with
`_PlanArena`, and `_place_slices` assigns slices to servers, largest first to the least loaded.

Row-sparse keys come last in their arena, each in slices of its own, over which its rows are interleaved; workers hold
the arena without them. `RowPlaces` and `RowBlock` translate row ids of a key to rows on a server and back. A row group
is a sequence of keys whose rows have the same width and are adjacent, so that they can be sent like rows of one key.

A hash table is a row-sparse key without a number of rows. Its row numbers are hashes of 64 bits, and each of its slices
has a range of them; what the slice has in the arena is one unused line or row. `hash_table_spec` makes its spec.

Invariants:

- Slice boundaries depend only on shapes and dtypes, never on the number of servers, so neither do results.
- Keys and slices start on 64-byte boundaries, because fused kernels round the tail of a vector differently from its
  body.
- Equal inputs give equal plans in every process, and `Plan.digest` tells plans apart.
- Nothing here touches a tensor, a socket or the clock.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, compress, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore_server.errors import ConfigurationError, PlanMismatchError

Ints: TypeAlias = npt.NDArray[np.int64]

ALIGNMENT = 64
MIN_SLICE = 16 * 1024
MAX_SLICE = 1024 * 1024
MAX_ROWS = (1 << 31) - 1
"""Row ids are sent in 4 bytes."""
SLICES_PER_TABLE = 8
"""A table is cut into about this many slices, as long as these have between MIN_SLICE and MAX_SLICE bytes."""

PAGE = 4096
"""Size of a memory page."""
LONG = 64 * 1024
"""Slices from this size are mapped rather than copied."""

ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""The dtypes that can be stored and updated, with their size in bytes."""
INTEGERS = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
"""Dtypes that a store in one process accepts, too, without an optimizer."""
SIZES = {**ITEM_SIZE, **INTEGERS}


HASH_SLICES = 128
"""A hash table has this many slices: ranges of row numbers, which are hashes, so all have about as many rows."""


_HASHED_ROW, _HELD_ROW = 9, 12
"""Bytes of a row of a hash table beside its values, and of a row that is asked for, at most."""
_LONGEST_OPTIMIZER = 4096
"""Characters that describe the optimizer of a hash table."""
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38, "float64": 1.7e308}
"""About the largest number of each dtype."""


class HashTableOptions(NamedTuple):
    """How rows of a hash table come and go. A round that updates the table counts as one step of its clock."""

    seed: int = 0
    """Of the initial values."""
    init: str = "normal"
    """Initial values: "normal", "uniform" or "constant"."""
    scale: float = 1.0
    """The standard deviation, the bound, or the constant."""
    admit_after: int = 1
    """A row comes with its nth gradient; those before are ignored. A worker gives one a round."""
    expire_after: int = 0
    """A row goes that had no gradient for this many rounds; 0: never."""
    max_rows: int = 0
    """The table has about that many rows at most: each slice its share, of which a tenth goes when it is full."""
    evict: str = "lru"
    """Which go then: "lru", those whose last gradient is the oldest, "lfu", those that had the fewest, or "norm", those
    with the smallest Euclidean norm."""
    weight_decay: float = 0.0
    """Each round multiplies all rows by 1 - lr * weight_decay, those that have no gradient, too."""
    max_norm: float = 0.0
    """The largest Euclidean norm of a row, which is scaled down to it after an update; 0: none."""
    optimizer: str = ""
    """The table's own, as `describe_table_optimizer` returns it; empty: the table has that of all parameters."""


class TensorSpec(NamedTuple):
    """Name, shape and dtype of one key, and the index of its parameter group."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0
    row_sparse: bool = False
    """Whether only the store has the key: workers send and fetch rows of it, and hold no copy."""
    hash_table: HashTableOptions | None = None
    """For a row-sparse key without a number of rows; its shape counts unused ones."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * SIZES[self.dtype]

    @property
    def fields(self) -> tuple[Any, ...]:
        """What messages and files have of it: a sixth field only for a hash table."""
        return tuple(self) if self.hash_table is not None else tuple(self)[:-1]


def tensor_spec_from(values: Sequence[Any]) -> TensorSpec:
    """Return the spec with these `fields`."""
    key, shape, dtype, group, row_sparse, *more = values
    options = [HashTableOptions(*one) for one in more if one is not None]
    return TensorSpec(key, tuple(shape), dtype, group, row_sparse, *options)


def hash_table_spec(
    key: str, row: tuple[int, ...], dtype: str, options: HashTableOptions, group: int = 0
) -> TensorSpec:
    """Return the spec of a hash table whose rows have this shape."""
    numel = math.prod(row)
    unused = math.lcm(max(numel, 1), ALIGNMENT // SIZES[dtype]) // max(numel, 1)
    return TensorSpec(key, (HASH_SLICES * unused, *row), dtype, group, True, options)


def slices_of_hashes(rows: Ints) -> Ints:
    """Return the number of the slice of each row number of a hash table: its highest bits."""
    return (rows >> (64 - _SLICE_BITS)) + HASH_SLICES // 2


_SLICE_BITS = (HASH_SLICES - 1).bit_length()
_FIRST_HASHES = (np.arange(HASH_SLICES, dtype=np.int64) - HASH_SLICES // 2) << (64 - _SLICE_BITS)
"""The first row number of each slice of a hash table."""
_LAST_HASH = np.iinfo(np.int64).max


class Segment(NamedTuple):
    """The part of one key in one slice; all numbers count elements."""

    key: int
    """Index of the key in `Plan.specs`."""
    start: int
    """Offset of the segment in its slice."""
    key_start: int
    """Offset of the segment in its key."""
    numel: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A contiguous, 64-byte aligned part of one dtype's arena; the unit of transfer and update."""

    index: int
    dtype: str
    offset: int
    """Offset in the arena of this dtype, in elements."""
    length: int
    """Elements, including padding to the next 64-byte boundary."""
    used: int
    """Elements up to the end of the last segment: what is sent."""
    segments: tuple[Segment, ...]
    server: int

    @property
    def nbytes(self) -> int:
        return self.used * SIZES[self.dtype]


def row_numel(spec: TensorSpec) -> int:
    """Return the elements in one row of a key, which are contiguous; all elements of a key without dimensions."""
    return math.prod(spec.shape[1:]) if spec.shape else 1


class RoundRobin(NamedTuple):
    """Round-robin assignment of rows to slices: consecutive rows are in consecutive slices.

    Rows that are used often tend to be adjacent: a vocabulary sorted by frequency has all of them at the beginning. If
    slices were contiguous ranges of rows, the server with the first one would have most of the work. Slices as long as
    the first one share rows round-robin; a shorter one at the end has the last rows.
    """

    slices: int
    """The number of slices of equal length; with fewer than two, every row is at its own number."""
    length: int
    """Rows of each of them."""

    @property
    def is_plain(self) -> bool:
        return self.slices < 2

    def places(self, rows: Ints) -> Ints:
        """Return the places of rows, counted from the first row of the first slice."""
        if self.is_plain:
            return rows
        # row = turn * slices + hand is at hand * length + turn, computed without a remainder.
        whole = self.slices * self.length
        interleaved = rows // self.slices
        interleaved *= 1 - whole
        interleaved += rows * self.length
        return np.where(rows < whole, interleaved, rows)

    def rows(self, places: Ints) -> Ints:
        """Return the rows at these places, the inverse of `places`."""
        return places if self.is_plain else RoundRobin(self.length, self.slices).places(places)

    def in_order(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the ascending places of ascending rows, and the index of the row at each."""
        places = self.places(rows)
        if self.is_plain:
            return places, np.arange(len(rows))
        # Within a slice rows ascend, so sorting by slice is enough. numpy sorts small integers six times as fast.
        order = (places // self.length).astype(np.min_scalar_type(self.slices)).argsort(kind="stable")
        return places[order], order


class RowBlock(NamedTuple):
    """The rows of a key on one server, in order, in adjacent slices."""

    server: int
    slices: tuple[Slice, ...]
    position: int
    """Position of the key's segment in each slice."""
    starts: Ints
    """The row of the block with which each slice begins, and the number of rows."""
    shifts: Ints
    """For each slice, what to add to a row of the block to get the row of the key."""
    order: dict[int, int]
    """Slice → its position here."""
    row_nbytes: int
    """Bytes of a row with its id in a message."""
    is_hashed: bool = False
    """Whether rows have their numbers in a hash table, on every server; `starts` ends with the last one."""

    @property
    def most(self) -> int:
        """How many rows fit into a message with their ids; at least one."""
        return max(MAX_SLICE // self.row_nbytes, 1)

    def counted_from(self, ids: Ints, first: int) -> Ints:
        """Return rows of the block as numbered in a message that begins with this slice (by position)."""
        return ids if self.is_hashed else ids - self.starts[first]

    def cut(self, ids: Ints) -> Iterator[tuple[int, int, slice]]:
        """Split (ascending) rows of the block into parts that fit into a message or are of one slice.

        Yields for each part the first slice and the end, by position, and which of the rows it has; all slices are
        covered.
        """
        last, first, most = len(self.slices), 0, self.most
        if len(ids) <= most and (self.is_hashed or self.starts[last] <= MAX_ROWS):
            yield 0, last, slice(None)
            return
        cuts = np.append(np.searchsorted(ids, self.starts[:-1]), len(ids))
        while first < last:
            few = np.searchsorted(cuts, cuts[first] + most, "right")
            near = len(self.starts)
            if not self.is_hashed:
                near = np.searchsorted(self.starts, self.starts[first] + MAX_ROWS, "right")
            end = min(max(int(min(few, near)) - 1, first + 1), last)
            yield first, end, slice(int(cuts[first]), int(cuts[end]))
            first = end

    def in_key(self, ids: Ints, first: int, end: int) -> Ints:
        """Return rows of the slices `first` to `end`, counted from the first one, as (ascending) rows of the key."""
        ids = ids + self.starts[first]
        ends = ids.searchsorted(self.starts[first : end + 1])
        return ids + self.shifts[first:end].repeat(ends[1:] - ends[:-1])


class RowPlaces(NamedTuple):
    """Where the rows of a key, or of a row group, are."""

    slices: tuple[Slice, ...]
    position: int
    """Position of the key's segment in each slice."""
    starts: Ints
    """The place with which each slice begins, and the number of rows."""
    servers: Ints
    """The server of each slice."""
    shifts: Ints
    """For each slice, what to add to a row of its block to get its place."""
    blocks: dict[int, RowBlock]
    """Server → its rows."""
    width: int
    """Elements of a row."""
    keys: tuple[int, ...]
    """The keys of the row group, in order."""
    bounds: list[int]
    """The row with which each key begins."""
    round_robins: tuple[RoundRobin, ...]
    """The interleaving of each key."""

    def by_server(self, ids: Ints) -> Iterator[tuple[RowBlock, Ints | slice, Ints]]:
        """Distribute (ascending) rows over the servers.

        Yields the block of each server, which of the rows are there, and their (ascending) numbers in the block.
        """
        places, order = self._in_order(ids)
        if len(self.blocks) == 1:
            [block] = self.blocks.values()
            yield block, slice(None) if order is None else order, places
            return
        counts = np.diff(places.searchsorted(self.starts[:-1]), append=len(places))
        servers, in_block = self.servers.repeat(counts), places - self.shifts.repeat(counts)
        for block in self.blocks.values():
            [mine] = (servers == block.server).nonzero()
            yield block, mine if order is None else order[mine], in_block[mine]

    def _in_order(self, ids: Ints) -> tuple[Ints, Ints | None]:
        """Return the ascending places of (ascending) rows, and the index of the row at each; None: unchanged."""
        if all([deal.is_plain for deal in self.round_robins]):
            return ids, None
        if len(self.round_robins) == 1:
            return self.round_robins[0].in_order(ids)
        cuts = [*ids.searchsorted(self.bounds).tolist(), len(ids)]
        places, order = np.empty_like(ids), np.empty_like(ids)
        for deal, bound, (first, end) in zip(self.round_robins, self.bounds, pairwise(cuts), strict=True):
            own, of = deal.in_order(ids[first:end] - bound)
            places[first:end], order[first:end] = own + bound, of + first
        return places, order


class _PlanArena:
    """Fills the arena of one dtype: buckets of small keys, then big keys, then row-sparse ones."""

    def __init__(self, dtype: str, slice_bytes: int, first: int) -> None:
        self.dtype = dtype
        self._first = first
        """The number of its first slice."""
        self.limit = slice_bytes // SIZES[dtype]
        self.slices: list[Slice] = []
        """Slices that are not assigned to servers yet."""
        self.end = 0
        self._unit = ALIGNMENT // SIZES[dtype]

    def add_small(self, keys: Sequence[int], numels: Sequence[int], key_offsets: list[int]) -> None:
        """Put keys into buckets, in order, and write their offsets to `key_offsets`."""
        unit, limit, used, length = self._unit, self.limit, 0, 0
        new = tuple.__new__  # thousands of keys are common, and calling Segment takes twice as long
        segments: list[Segment] = []
        for key in keys:
            numel = numels[key]
            if segments and length + numel > limit:
                self._append(segments, used)
                segments, length = [], 0
            segments.append(new(Segment, (key, length, 0, numel)))
            key_offsets[key] = self.end + length
            used = length + numel
            length = -(-used // unit) * unit
        if segments:
            self._append(segments, used)

    def add_big(self, key: int, numel: int, row: int, is_hashed: bool = False) -> int:
        """Cut a key into slices of its own, as short as possible for a hash table; return its offset."""
        offset = self.end
        # Whole rows in each slice, unless a row is too long for that.
        unit = math.lcm(max(row, 1), self._unit)
        limit = unit if is_hashed else self.limit - self.limit % unit or unit
        if limit * SIZES[self.dtype] > MAX_SLICE:
            limit = self.limit
        for start in range(0, numel, limit):
            size = min(limit, numel - start)
            self._append([Segment(key, 0, start, size)], size)
        return offset

    def _append(self, segments: Sequence[Segment], used: int) -> None:
        length = -(-used // self._unit) * self._unit
        number = self._first + len(self.slices)
        self.slices.append(Slice(number, self.dtype, self.end, length, used, tuple(segments), -1))
        self.end += length


def _slices_per_page(drafts: Sequence[Slice], of_key: Sequence[int], num_servers: int) -> int:
    """Return the number of adjacent slices of a key that are placed together."""
    # Mapped slices must start at the same offset in a page as on workers, so as many are kept together as fill whole
    # pages; if that would leave each server few such groups, a server's whole share is kept together.
    nbytes = drafts[of_key[0]].length * SIZES[drafts[of_key[0]].dtype]
    fill = PAGE // math.gcd(nbytes, PAGE)
    if nbytes < LONG or fill == 1:
        return 1
    return fill if len(of_key) >= 4 * fill * num_servers else -(-len(of_key) // num_servers)


def _place_slices(
    slices: Sequence[Slice],
    specs: Sequence[TensorSpec],
    num_servers: int,
    whole_keys: bool,
    one_server: bool,
) -> tuple[Slice, ...]:
    units: list[list[int]] = [list(range(len(slices)))] if one_server else []
    # A bucket contains whole keys, so it is placed on its own.
    keys = [slice_.segments[-1].key for slice_ in slices]
    for key, indices in itertools.groupby(range(len(slices)), keys.__getitem__) if not one_server else ():
        of_key, most = list(indices), 1
        if whole_keys:
            most = len(of_key)
        elif not specs[key].row_sparse:
            most = _slices_per_page(slices, of_key, num_servers)
        units += [of_key[at : at + most] for at in range(0, len(of_key), most)]
    sizes = [slice_.nbytes for slice_ in slices]
    servers = _assign_servers(sizes, units, num_servers, zlib.crc32(specs[0].key.encode()))
    for keys_of_slice, at in _slices_of_hash_tables(keys, specs) if not one_server else ():
        number = at * num_servers // HASH_SLICES + zlib.crc32(specs[keys[keys_of_slice]].key.encode())
        servers[keys_of_slice] = number % num_servers
    rows = zip(slices, servers, strict=True)
    return tuple([slice_ if slice_.server == at else replace(slice_, server=at) for slice_, at in rows])


def _slices_of_hash_tables(keys: Sequence[int], specs: Sequence[TensorSpec]) -> Iterator[tuple[int, int]]:
    """Yield (slice, its number in the key) of hash tables, given the key of each slice."""
    first = 0
    for key, of_key in itertools.groupby(keys):
        count = len(list(of_key))
        if specs[key].hash_table is not None:
            yield from zip(range(first, first + count), range(count), strict=True)
        first += count


def _assign_servers(
    sizes: Sequence[int], units: Sequence[Sequence[int]], num_servers: int, seed: int
) -> list[int]:
    """Return the server of each item. Units stay together; the largest go first, to the least loaded server."""
    # `seed` rotates the order of servers, so that many tables of one key are not all on server 0.
    loads = [0] * num_servers
    placed = [0] * len(sizes)
    totals = [sum(sizes[i] for i in unit) for unit in units]
    for at in sorted(range(len(units)), key=lambda at: (-totals[at], at)):
        server = min(range(num_servers), key=lambda s: (loads[s], (s - seed) % num_servers))
        loads[server] += totals[at]
        for i in units[at]:
            placed[i] = server
    return placed


MAX_NAME = 1024
"""The longest name of a key, table or namespace, in characters."""


@dataclass(frozen=True)
class Plan:
    """The layout of one table. Equal inputs give equal plans in every process."""

    specs: tuple[TensorSpec, ...]
    num_servers: int
    slices: tuple[Slice, ...]
    arena_sizes: dict[str, int]
    """Elements in the arena of each dtype, padding included."""
    resident_sizes: dict[str, int]
    """Elements in the arena of each dtype before its row-sparse keys: what a worker holds."""
    key_offsets: tuple[int, ...]
    """Offset of each key in the arena of its dtype, in elements."""
    numels: tuple[int, ...]
    whole_keys: bool
    """Whether all slices of a key are on one server."""
    one_server: bool = False
    """Whether all slices of the table are on one server."""
    _rows: dict[int, RowPlaces] = field(default_factory=dict, init=False, repr=False, compare=False)
    _joined: dict[int, RowPlaces] = field(default_factory=dict, init=False, repr=False, compare=False)

    def over(self, num_servers: int, whole_keys: bool = False, one_server: bool = False) -> Plan:
        """Return a plan with the same slices over another number of servers; arguments as for `make_plan`."""
        wanted = num_servers, whole_keys, one_server
        if wanted == (self.num_servers, self.whole_keys, self.one_server):
            return self
        return replace(
            self,
            num_servers=num_servers,
            slices=_place_slices(self.slices, self.specs, *wanted),
            whole_keys=whole_keys,
            one_server=one_server,
        )

    @cached_property
    def key_nbytes(self) -> tuple[int, ...]:
        sizes = map(SIZES.__getitem__, map(operator.attrgetter("dtype"), self.specs))
        return tuple(map(operator.mul, sizes, self.numels))

    @cached_property
    def nbytes(self) -> int:
        return sum(self.key_nbytes)

    @cached_property
    def servers(self) -> tuple[int, ...]:
        return tuple(sorted(self._by_server))

    @cached_property
    def has_row_sparse(self) -> bool:
        return any([spec.row_sparse for spec in self.specs])

    @cached_property
    def _by_server(self) -> dict[int, tuple[Slice, ...]]:
        return group_slices([(slice_.server, slice_) for slice_ in self.slices])

    @cached_property
    def _resident(self) -> dict[int, tuple[Slice, ...]]:
        return {server: tuple(filter(self.is_resident, p)) for server, p in self._by_server.items()}

    @cached_property
    def digest(self) -> str:
        """Identifies the layout: equal exactly for equal inputs and the same slicing rules."""
        layout = [ALIGNMENT, MIN_SLICE, MAX_SLICE, SLICES_PER_TABLE]
        layout += [self.num_servers, self.whole_keys, self.one_server]
        return hashlib.sha256(json.dumps([layout, self.specs]).encode()).hexdigest()

    @cached_property
    def _split_rows(self) -> frozenset[int]:
        """Keys that are cut within a row."""
        segments = [segment for slice_ in self.slices for segment in slice_.segments if segment.key_start]
        return frozenset(s.key for s in segments if s.key_start % max(row_numel(self.specs[s.key]), 1))

    @cached_property
    def _by_key(self) -> dict[int, tuple[Slice, ...]]:
        return group_slices([(segment.key, slice_) for slice_ in self.slices for segment in slice_.segments])

    def slices_of(self, server: int) -> tuple[Slice, ...]:
        return self._by_server.get(server, ())

    @cached_property
    def keys_alone(self) -> frozenset[int]:
        """Keys (by index) that share no slice with others."""
        shared = {s.key for slice_ in self.slices if len(slice_.segments) > 1 for s in slice_.segments}
        return frozenset(range(len(self.specs))) - shared

    def is_resident(self, slice_: Slice) -> bool:
        """Return whether workers hold a copy of a slice, because its keys are not row-sparse."""
        return not self.specs[slice_.segments[0].key].row_sparse

    def resident_slices_of(self, server: int) -> tuple[Slice, ...]:
        """Return the slices on one server that workers hold a copy of, in arena order."""
        return self._resident.get(server, ())

    def takes_rows(self, key: int) -> bool:
        """Return whether the slices of a key (by index) contain whole rows; False if a row is too long for that."""
        return key not in self._split_rows

    def slices_with(self, key: int) -> tuple[Slice, ...]:
        """Return the slices that contain a part of a key (by index), in order; empty if the key is."""
        return self._by_key.get(key, ())

    def rows(self, key: int) -> RowPlaces:
        """Return where the rows of a key (by index) are; no blocks if slices do not contain whole rows. Cached."""
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = _plan_row_places(self, (key,))
        return found

    def joined_rows(self, key: int) -> RowPlaces:
        """Return where the rows of the row group from a key on are, counted as rows of one key."""
        found = self._joined.get(key)
        if found is None:
            group = self.row_groups.get(key, (key,))
            found = self._joined[key] = _plan_row_places(self, group[group.index(key) :])
        return found

    @cached_property
    def row_groups(self) -> dict[int, tuple[int, ...]]:
        """Key → its row group: keys whose rows are adjacent in the arena, in this order.

        Rows of a group travel as those of one key. Its keys are alone in their slices, have rows of one dtype and
        width, and all or none of them are row-sparse. A key whose slices hold no whole rows has no group.
        """
        takes = [
            key
            for key in self.keys_alone
            if self.takes_rows(key) and row_numel(self.specs[key]) and self.specs[key].hash_table is None
        ]
        groups: list[list[int]] = []
        former: tuple[
            object, ...
        ] = ()  # what the next key must have, and where it must begin, to join the last group
        for key in sorted(takes, key=lambda key: (self.specs[key].dtype, self.key_offsets[key])):
            spec, at = self.specs[key], self.key_offsets[key]
            kind = spec.dtype, row_numel(spec), spec.row_sparse
            if former == (*kind, at):
                groups[-1].append(key)
            else:
                groups.append([key])
            former = (*kind, at + spec.numel) if spec.numel else ()
        return {key: tuple(group) for group in groups for key in group}


def group_slices(pairs: Iterable[tuple[int, Slice]]) -> dict[int, tuple[Slice, ...]]:
    found: dict[int, list[Slice]] = {}
    for number, slice_ in pairs:
        found.setdefault(number, []).append(slice_)
    return {number: tuple(slices) for number, slices in found.items()}


def _plan_row_places(plan: Plan, keys: tuple[int, ...]) -> RowPlaces:
    # 1. The slices of all keys, and how many rows each has.
    key, width = keys[0], max(row_numel(plan.specs[keys[0]]), 1)
    slices = tuple([slice_ for key in keys for slice_ in plan.slices_with(key)])
    positions = [0] * len(slices)
    if len(keys) == 1:
        positions = [[segment.key for segment in slice_.segments].index(key) for slice_ in slices]
    segments = [slice_.segments[at] for slice_, at in zip(slices, positions, strict=True)]
    counts = np.array([segment.numel // width for segment in segments], np.int64)
    starts = np.append(0, np.cumsum(counts))
    servers, shifts = (
        np.array([slice_.server for slice_ in slices], np.int64),
        np.zeros(len(slices), np.int64),
    )
    hashed = plan.specs[key].hash_table is not None
    if hashed:
        starts = np.append(_FIRST_HASHES, _LAST_HASH)
    # 2. The block of each server: which slices are there, and how its rows are numbered.
    blocks, position = {}, max(positions, default=0)
    # Requests of rows have 8 bytes for each id, whatever the width.
    values = width * SIZES[plan.specs[key].dtype]
    row_nbytes = max(_HASHED_ROW + values, _HELD_ROW) if hashed else max(4 + values, 8)
    takes_rows = plan.takes_rows(key) and row_numel(plan.specs[key])
    for server in sorted(set(servers.tolist())) if takes_rows else ():
        mine = np.flatnonzero(servers == server)
        own = np.append(0, np.cumsum(counts[mine]))
        if hashed:
            own = np.append(_FIRST_HASHES[mine], _LAST_HASH)
        shifts[mine] = starts[mine] - own[:-1]
        order = {slices[at].index: number for number, at in enumerate(mine.tolist())}
        here = tuple([slices[at] for at in mine.tolist()])
        blocks[server] = RowBlock(server, here, position, own, shifts[mine], order, row_nbytes, hashed)
    # 3. The bounds of keys, and their interleaving.
    bounds = list(accumulate([plan.specs[key].numel // width for key in keys[:-1]], initial=0))
    round_robins = tuple([_plan_round_robin(plan, key) for key in keys])
    return RowPlaces(slices, position, starts, servers, shifts, blocks, width, keys, bounds, round_robins)


def _plan_round_robin(plan: Plan, key: int) -> RoundRobin:
    """Return how the rows of a key are interleaved: only row-sparse keys of a store that may cut keys are."""
    if plan.whole_keys or not plan.specs[key].row_sparse or plan.specs[key].hash_table is not None:
        return RoundRobin(1, 0)
    numels, width = [slice_.used for slice_ in plan.slices_with(key)], max(row_numel(plan.specs[key]), 1)
    return RoundRobin(numels.count(numels[0]), numels[0] // width) if numels else RoundRobin(0, 0)


def make_plan(
    specs: Sequence[TensorSpec],
    num_servers: int,
    whole_keys: bool = False,
    allow_integers: bool = False,
    one_server: bool = False,
) -> Plan:
    """Lay out `specs` over `num_servers` servers.

    With `whole_keys` every key is on a single server, for optimizers that are not elementwise; with `one_server` the
    whole table is. The slices are the same, only their servers differ. Raises ConfigurationError if there are no
    keys, a key occurs twice, or a dtype or shape is impossible.
    """
    # 1. The size of slices follows from the size of the table.
    specs = tuple(specs)
    check_specs(specs, num_servers, allow_integers)
    _, shapes, dtypes, _, are_sparse, hash_tables = zip(*specs, strict=True)
    numel_of = {shape: math.prod(shape) for shape in set(shapes)}
    numels = list(map(numel_of.__getitem__, shapes))
    total = sum(map(operator.mul, numels, map(SIZES.__getitem__, dtypes)))
    wanted = math.ceil(total / SLICES_PER_TABLE / ALIGNMENT) * ALIGNMENT
    slice_bytes = min(max(wanted, MIN_SLICE), MAX_SLICE)
    drafts: list[Slice] = []
    arena_sizes: dict[str, int] = {}
    resident_sizes: dict[str, int] = {}
    key_offsets = [0] * len(specs)
    # 2. Fill one arena for each dtype: small keys, big keys, row-sparse keys.
    for dtype in sorted(set(dtypes)):
        layout = _PlanArena(dtype, slice_bytes, len(drafts))
        least_big = -(-slice_bytes // SIZES[dtype])
        own = [i for i, name in enumerate(dtypes) if name == dtype]
        resident = [i for i in own if not are_sparse[i]]
        layout.add_small([i for i in resident if numels[i] < least_big], numels, key_offsets)
        for i in [i for i in resident if numels[i] >= least_big]:
            key_offsets[i] = layout.add_big(i, numels[i], row_numel(specs[i]))
        resident_sizes[dtype] = layout.end
        for i in compress(own, map(are_sparse.__getitem__, own)):
            key_offsets[i] = layout.add_big(i, numels[i], row_numel(specs[i]), hash_tables[i] is not None)
        drafts.extend(layout.slices)
        arena_sizes[dtype] = layout.end
    # 3. Assign the slices to servers.
    slices = _place_slices(drafts, specs, num_servers, whole_keys, one_server)
    places = tuple(key_offsets), tuple(numels)
    return Plan(specs, num_servers, slices, arena_sizes, resident_sizes, *places, whole_keys, one_server)


def check_same(
    mine: Sequence[TensorSpec], theirs: Sequence[TensorSpec], who_mine: str, who_theirs: str
) -> None:
    """Raise PlanMismatchError naming the first key in which two lists of keys differ."""
    for i in range(max(len(mine), len(theirs))):
        a = mine[i] if i < len(mine) else None
        b = theirs[i] if i < len(theirs) else None
        if a != b:
            raise PlanMismatchError(
                f"workers have different models: key {i} is {_describe_tensor_spec(b)} on {who_theirs} but "
                f"{_describe_tensor_spec(a)} on {who_mine}; build the same model, in the same order, on every worker"
            )


def check_specs(specs: Sequence[TensorSpec], num_servers: int, allow_integers: bool = False) -> None:
    """Raise ConfigurationError unless `specs` can be laid out over `num_servers` servers."""
    if num_servers < 1:
        raise ConfigurationError(f"a plan needs at least one server, got {num_servers}")
    if not specs:
        raise ConfigurationError("a plan needs at least one key, got none")
    keys, shapes, dtypes, _, are_sparse, hash_tables = zip(*specs, strict=True)
    if len(set(keys)) < len(keys):
        [(twice, _)] = Counter(keys).most_common(1)
        raise ConfigurationError(f"key {twice!r} appears twice; every key must be named once")
    if max(map(len, keys)) > MAX_NAME:
        check_name("a key", max(keys, key=len))
    storable = {*ITEM_SIZE, *(INTEGERS if allow_integers else ())}
    impossible = {shape for shape in set(shapes) if shape and min(shape) < 0}
    if impossible or not storable.issuperset(dtypes):
        for spec in specs:
            if spec.dtype not in storable:
                raise ConfigurationError(
                    f"key {spec.key!r} has dtype {spec.dtype}; a store holds {', '.join(ITEM_SIZE)} only"
                )
            if spec.shape in impossible:
                raise ConfigurationError(f"key {spec.key!r} has the impossible shape {spec.shape}")
    for spec in compress(specs, are_sparse):
        _check_planned_rows(spec)
    for spec, options in zip(specs, hash_tables, strict=True) if any(hash_tables) else ():
        if options is not None:
            _check_hash_table(spec, options)


def check_name(what: str, name: str) -> None:
    if len(name) > MAX_NAME:
        raise ConfigurationError(
            f"{what} has a name of {len(name)} characters, {name[:40]!r}…; one may have {MAX_NAME}"
        )


def _check_planned_rows(spec: TensorSpec) -> None:
    if not spec.shape:
        raise ConfigurationError(f"key {spec.key!r} is row-sparse, but it has no dimensions and so no rows")
    size = ITEM_SIZE[spec.dtype]
    if row_numel(spec) and math.lcm(row_numel(spec) * size, ALIGNMENT) > MAX_SLICE:
        raise ConfigurationError(
            f"key {spec.key!r} is row-sparse, but its rows of {row_numel(spec) * size} bytes are too long for that; up "
            f"to {MAX_SLICE // ALIGNMENT} bytes are always possible, and multiples of {ALIGNMENT} up to {MAX_SLICE}"
        )


def check_hash_table_options(who: str, options: HashTableOptions, dtype: str) -> None:
    """Raise ConfigurationError unless all options have a type and a value that they can have for a dtype."""
    are_whole = all([type(count) is int and 0 <= count < MAX_ROWS for count in options[3:6]])
    if not are_whole or options.admit_after < 1 or options.evict not in ("lru", "lfu", "norm"):
        raise ConfigurationError(
            f"{who} has admit_after={options.admit_after!r}, expire_after={options.expire_after!r}, "
            f"max_rows={options.max_rows!r} and evict={options.evict!r}; admit_after is 1 or more, the others are 0 or "
            f"more, all are below {MAX_ROWS}, and evict is 'lru', 'lfu' or 'norm'"
        )
    # Normal values are up to 3.5 times the scale.
    is_finite = type(options.scale) is float and 4 * abs(options.scale) < _LARGEST.get(dtype, math.inf)
    is_seed = type(options.seed) is int and -(1 << 63) <= options.seed < 1 << 63
    if options.init not in ("normal", "uniform", "constant") or not is_finite or not is_seed:
        raise ConfigurationError(
            f"{who} begins with init={options.init!r}, scale={options.scale!r} and seed={options.seed!r}; init is "
            f"'normal', 'uniform' or 'constant', scale a finite number that {dtype} holds, and seed one of 64 bits"
        )
    for option in ("weight_decay", "max_norm"):
        value = getattr(options, option)
        if type(value) is not float or not 0 <= value < math.inf:
            raise ConfigurationError(f"{who} has {option}={value!r}; it is a positive number, or 0 for none")
    if type(options.optimizer) is not str or len(options.optimizer) > _LONGEST_OPTIMIZER:
        raise ConfigurationError(
            f"{who} describes its optimizer by {options.optimizer!r:.80}; that is a text of up to {_LONGEST_OPTIMIZER} "
            "characters"
        )


def _check_hash_table(spec: TensorSpec, options: HashTableOptions) -> None:
    if spec != hash_table_spec(spec.key, spec.shape[1:], spec.dtype, options, spec.group):
        raise ConfigurationError(
            f"key {spec.key!r} is a hash table, but its shape {spec.shape} is not that of one"
        )
    check_hash_table_options(f"hash table {spec.key!r}", options, spec.dtype)


def _describe_tensor_spec(spec: TensorSpec | None) -> str:
    if spec is None:
        return "missing"
    if spec.hash_table is not None:
        options = ", ".join(f"{name}={value!r}" for name, value in spec.hash_table._asdict().items())
        row = f"{spec.dtype}{list(spec.shape[1:])}"
        return f"{spec.key!r} a hash table of rows {row} with {options} in group {spec.group}"
    kind = "row-sparse " if spec.row_sparse else ""
    return f"{spec.key!r} {kind}{spec.dtype}{list(spec.shape)} in group {spec.group}"
