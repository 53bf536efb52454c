"""The Plan: where every element of every key lies, a pure function of names, shapes, dtypes and topology.

Keys of one dtype share one flat arena. It is cut into slices, the unit that is sent, reduced, updated and
placed on a server: a slice holds several small keys (a bucket) or one piece of a big key. Slice boundaries
depend on shapes and dtypes alone, never on the number of servers, so results do not either. Keys and slices
start on 64-byte boundaries, because fused kernels treat the tail of a vector differently from its body.

Nothing here touches a tensor, a socket or the clock.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_server.errors import ConfigurationError, PlanMismatchError
from kvstore_server.placement import place

ALIGNMENT = 64
MIN_SLICE = 16 * 1024
MAX_SLICE = 1024 * 1024
SLICES_PER_TABLE = 8
"""A table is cut into about this many slices while they stay between MIN_SLICE and MAX_SLICE bytes."""

ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""The dtypes that can be stored, and their size in bytes."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one key, and the index of the parameter group that it belongs to."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0
    row_sparse: bool = False
    """Whether the key lives in the store alone: workers send and fetch rows of it, and hold no copy."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_SIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one key that lies in one slice; all numbers count elements."""

    key: int
    """Index of the key in `Plan.specs`."""
    start: int
    """Where the segment begins, from the start of its slice."""
    key_start: int
    """Where the segment begins, from the start of its key."""
    numel: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A contiguous, 64-byte aligned piece of one dtype's arena; the unit of transfer and update."""

    index: int
    dtype: str
    offset: int
    """Start in the arena of this dtype, in elements."""
    length: int
    """Elements including padding up to the next 64-byte boundary."""
    used: int
    """Elements up to the end of the last segment: what is sent."""
    segments: tuple[Segment, ...]
    server: int

    @property
    def nbytes(self) -> int:
        return self.used * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class Plan:
    """The layout of one table. Equal inputs give equal plans, and equal digests, in every process."""

    specs: tuple[TensorSpec, ...]
    num_servers: int
    slices: tuple[Slice, ...]
    arena_sizes: dict[str, int]
    """Elements in the arena of each dtype, padding included."""
    key_offsets: tuple[int, ...]
    """Where each key begins in the arena of its dtype, in elements."""
    whole_keys: bool
    """Whether all slices of a key are on one server."""
    digest: str
    servers: tuple[int, ...] = field(init=False)
    """The servers that hold at least one slice, in ascending order."""

    _by_server: dict[int, tuple[Slice, ...]] = field(init=False, repr=False, compare=False)
    _by_key: dict[int, tuple[Slice, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_server: dict[int, list[Slice]] = {}
        for piece in self.slices:
            by_server.setdefault(piece.server, []).append(piece)
        object.__setattr__(self, "_by_server", {server: tuple(p) for server, p in by_server.items()})
        object.__setattr__(self, "servers", tuple(sorted(by_server)))
        by_key: dict[int, list[Slice]] = {}
        for piece in self.slices:
            for segment in piece.segments:
                by_key.setdefault(segment.key, []).append(piece)
        object.__setattr__(self, "_by_key", {key: tuple(p) for key, p in by_key.items()})

    def slices_of(self, server: int) -> tuple[Slice, ...]:
        """The slices on one server, in arena order."""
        return self._by_server.get(server, ())

    def takes_rows(self, key: int) -> bool:
        """Whether the slices of a key (by index) hold whole rows of it; not so where a row is too long for one."""
        width = row_numel(self.specs[key])
        return all(
            segment.key_start % width == 0
            for piece in self.slices_with(key)
            for segment in piece.segments
            if segment.key == key
        )

    def slices_with(self, key: int) -> tuple[Slice, ...]:
        """The slices that hold a part of a key (by index), in the order of its elements; none of an empty key."""
        return self._by_key.get(key, ())


def row_numel(spec: TensorSpec) -> int:
    """The elements in one row of a key, which are neighbours in its slices; all of a key without dimensions."""
    return math.prod(spec.shape[1:]) if spec.shape else 1


def make_plan(specs: Sequence[TensorSpec], num_servers: int, whole_keys: bool = False) -> Plan:
    """Lay out `specs` over `num_servers` servers.

    With `whole_keys` a key is not spread over servers, for optimizers that need more of it than one element at a
    time; the slices are the same, only their places differ.

    Raises:
        ConfigurationError: no keys, a key twice, a dtype that cannot be stored, or a shape with a negative size.
    """
    specs = tuple(specs)
    check_specs(specs, num_servers)
    piece_bytes = _slice_bytes(sum(spec.nbytes for spec in specs))
    drafts: list[_Draft] = []
    arena_sizes: dict[str, int] = {}
    key_offsets = [0] * len(specs)
    for dtype in sorted({spec.dtype for spec in specs}):
        layout = _ArenaLayout(dtype, piece_bytes)
        members = [i for i, spec in enumerate(specs) if spec.dtype == dtype]
        small = [i for i in members if specs[i].nbytes < piece_bytes]
        big = [i for i in members if specs[i].nbytes >= piece_bytes]
        for i in small:
            key_offsets[i] = layout.add_small(i, specs[i].numel)
        layout.close()
        for i in big:
            key_offsets[i] = layout.add_big(i, specs[i].numel, row_numel(specs[i]))
        drafts.extend(layout.drafts)
        arena_sizes[dtype] = layout.end
    units = _units(drafts) if whole_keys else [[i] for i in range(len(drafts))]
    sizes = [draft.used * ITEM_SIZE[draft.dtype] for draft in drafts]
    servers = place(sizes, units, num_servers, zlib.crc32(specs[0].key.encode()))
    slices = tuple(draft.freeze(i, servers[i]) for i, draft in enumerate(drafts))
    digest = _digest(specs, num_servers, whole_keys)
    return Plan(specs, num_servers, slices, arena_sizes, tuple(key_offsets), whole_keys, digest)


def check_same(
    mine: Sequence[TensorSpec], theirs: Sequence[TensorSpec], who_mine: str, who_theirs: str
) -> None:
    """Raise PlanMismatchError naming the first key in which two lists of keys differ; return if none does."""
    for i in range(max(len(mine), len(theirs))):
        a = mine[i] if i < len(mine) else None
        b = theirs[i] if i < len(theirs) else None
        if a != b:
            raise PlanMismatchError(
                f"workers have different models: key {i} is {_describe(b)} on {who_theirs} but {_describe(a)} on "
                f"{who_mine}; build the same model, in the same order, on every worker"
            )


@dataclass
class _Draft:
    """A slice before its number and its server are known."""

    dtype: str
    offset: int
    segments: list[Segment]
    used: int = 0

    @property
    def length(self) -> int:
        return _align(self.used, self.dtype)

    def append(self, key: int, key_start: int, numel: int) -> None:
        start = self.length
        self.segments.append(Segment(key, start, key_start, numel))
        self.used = start + numel

    def freeze(self, index: int, server: int) -> Slice:
        return Slice(index, self.dtype, self.offset, self.length, self.used, tuple(self.segments), server)


class _ArenaLayout:
    """Fills the arena of one dtype from front to back: buckets of small keys first, then the big keys."""

    def __init__(self, dtype: str, piece_bytes: int) -> None:
        self.dtype = dtype
        self.limit = piece_bytes // ITEM_SIZE[dtype]
        self.drafts: list[_Draft] = []
        self.end = 0
        self._bucket: _Draft | None = None

    def add_small(self, key: int, numel: int) -> int:
        if self._bucket is not None and self._bucket.length + numel > self.limit:
            self.close()
        if self._bucket is None:
            self._bucket = _Draft(self.dtype, self.end, [])
        self._bucket.append(key, 0, numel)
        return self._bucket.offset + self._bucket.segments[-1].start

    def close(self) -> None:
        if self._bucket is not None:
            self._finish(self._bucket)
            self._bucket = None

    def add_big(self, key: int, numel: int, row: int) -> int:
        offset = self.end
        # Whole rows, so that a slice takes rows by itself; unless one is too long for that.
        unit = math.lcm(row, ALIGNMENT // ITEM_SIZE[self.dtype])
        limit = self.limit - self.limit % unit or unit
        if limit * ITEM_SIZE[self.dtype] > MAX_SLICE:
            limit = self.limit
        for start in range(0, numel, limit):
            draft = _Draft(self.dtype, self.end, [])
            draft.append(key, start, min(limit, numel - start))
            self._finish(draft)
        return offset

    def _finish(self, draft: _Draft) -> None:
        self.drafts.append(draft)
        self.end += draft.length


def check_specs(specs: Sequence[TensorSpec], num_servers: int) -> None:
    """Raise ConfigurationError unless `specs` can be laid out over `num_servers` servers."""
    if num_servers < 1:
        raise ConfigurationError(f"a plan needs at least one server, got {num_servers}")
    if not specs:
        raise ConfigurationError("a plan needs at least one key, got none")
    seen: set[str] = set()
    for spec in specs:
        if spec.key in seen:
            raise ConfigurationError(f"key {spec.key!r} appears twice; every key must be named once")
        seen.add(spec.key)
        if spec.dtype not in ITEM_SIZE:
            raise ConfigurationError(
                f"key {spec.key!r} has dtype {spec.dtype}; a store holds {', '.join(ITEM_SIZE)} only"
            )
        if any(size < 0 for size in spec.shape):
            raise ConfigurationError(f"key {spec.key!r} has the impossible shape {spec.shape}")


def _slice_bytes(total: int) -> int:
    wanted = math.ceil(total / SLICES_PER_TABLE / ALIGNMENT) * ALIGNMENT
    return min(max(wanted, MIN_SLICE), MAX_SLICE)


def _align(numel: int, dtype: str) -> int:
    unit = ALIGNMENT // ITEM_SIZE[dtype]
    return -(-numel // unit) * unit


def _units(drafts: Sequence[_Draft]) -> list[list[int]]:
    """Slices that share a key, together: the pieces of a big key. A bucket holds whole keys and stands alone."""
    units: list[list[int]] = []
    for i, draft in enumerate(drafts):
        if i and drafts[i - 1].segments[-1].key == draft.segments[0].key:
            units[-1].append(i)
        else:
            units.append([i])
    return units


def _digest(specs: tuple[TensorSpec, ...], num_servers: int, whole_keys: bool) -> str:
    layout = [ALIGNMENT, MIN_SLICE, MAX_SLICE, SLICES_PER_TABLE, num_servers, whole_keys]
    rows = [[spec.key, list(spec.shape), spec.dtype, spec.group, spec.row_sparse] for spec in specs]
    return hashlib.sha256(json.dumps([layout, rows]).encode()).hexdigest()


def _describe(spec: TensorSpec | None) -> str:
    if spec is None:
        return "missing"
    kind = "row-sparse " if spec.row_sparse else ""
    return f"{spec.key!r} {kind}{spec.dtype}{list(spec.shape)} in group {spec.group}"
