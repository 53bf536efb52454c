"""Rows of row-sparse keys, fetched from servers: when they are needed, ahead of that, or read in shared memory.

`RowPulls` asks servers for rows of any keys: each server gets one message with those of all keys of a table, or several
if they do not fit into one.

`TableRowReads` serves the rows of one table to the parameters, of several keys at once. It can ask for rows between two
rounds that the next forward pass will read (`prefetch`); a pull then finds them, exactly as it would have fetched them
itself. In synchronous rounds, rows of servers on this host are read in their memory (`MappedRowReads`), with no message
at all: write counters beside the memory tell whether a server was writing meanwhile. Hash tables are not read so.

Rows of hash tables come without those that are not in the table, whose initial values are computed here, and without
those that a `RowCache` has and that have not changed since.

Versions of weights are recorded only for rows that this worker computes with, and only for servers that have nothing
but rows of the table: others send older weights with each round, and a gradient counts as old as those.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.engine.rounds import Ints
from kvstore_server.failpoints import failpoint
from kvstore_server.optimizer.rows import scatter_rows
from kvstore_server.plan import LONG, MAX_SLICE, PAGE, SIZES, Plan, RowBlock, TensorSpec, row_numel
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE
from kvstore_server.protocol.rows import INITIAL, SAME, SENT, HeldRows, PulledRows, read_pulled_rows
from kvstore_server.shard.id_index import IdIndex
from kvstore_server.shard.row_values import initial_rows
from kvstore_server.shard.storage import write_counters_in
from kvstore_server.transport.arena import SharedArena
from kvstore_server.transport.pages import put_pages
from kvtrainer.client.incoming_weights import parts_of_incoming_weights
from kvtrainer.client.rounds import Rounds
from kvtrainer.client.session import Calls, Session
from kvtrainer.client.tables import RemoteTable

_log = logging.getLogger(__name__)

_NO_IDS: Ints = np.zeros(0, np.int64)
_NO_RESERVE = 0x4000
"""MAP_NORESERVE: memory of the mapping is not counted before it is used."""

RowsWanted = tuple[RemoteTable, int, Tensor]
"""Some rows of one key: its table, its index in the plan, and ids (int64, distinct and ascending). Its slices hold
whole rows."""


class PlacedRows(NamedTuple):
    """Rows of a key that a message asks for, and where they go."""

    out: Tensor
    where: Ints
    """Their places there; rows that the cache has are there already."""
    spec: TensorSpec
    ids: Ints
    cache: RowCache | None
    held: HeldRows | None
    """What the server was told of the cache."""
    round: int
    """The worker's round of the table."""

    def after(self, at: int) -> PlacedRows:
        """Return these rows without the first ones."""
        held = self.held
        if held is not None:
            held = held._replace(steps=held.steps[at:])
        return self._replace(where=self.where[at:], ids=self.ids[at:], held=held)

    def write(self, data: Tensor, server: int, version: int) -> int:
        """Write the values that begin these bytes; returns how many bytes they take."""
        width, dtype = self.out.shape[1], self.out.dtype
        if self.spec.hash_table is None:
            nbytes = len(self.where) * width * dtype.itemsize
            own = data[:nbytes]
            own = (
                own.clone() if own.storage_offset() % dtype.itemsize else own
            )  # behind rows of another dtype
            scatter_rows(self.out, torch.from_numpy(self.where), own.view(dtype).view(-1, width))
            return nbytes
        pulled = read_pulled_rows(data, len(self.ids), width, dtype)
        sent, absent = (np.flatnonzero(pulled.forms == form) for form in (SENT, INITIAL))
        scatter_rows(self.out, torch.from_numpy(self.where[sent]), pulled.values)
        if len(absent):
            initial = initial_rows(self.spec.hash_table, self.spec.key, self.ids[absent], width, dtype)
            scatter_rows(self.out, torch.from_numpy(self.where[absent]), initial)
        if self.cache is not None and pulled.step >= 0:
            self.cache.put(self, pulled, server, version)
        return pulled.nbytes


class RowCache:
    """Rows of a hash table that this worker has read: it asks servers only for those that have changed since.

    Args:
        capacity: How many rows are kept: those that were read last.
        max_age: Rows that were read at most this many rounds ago are used without asking; 0: servers are always asked.
    """

    @torch.inference_mode(False)
    def __init__(self, capacity: int, max_age: int, width: int, dtype: torch.dtype) -> None:
        self.capacity, self.max_age = capacity, max_age
        self._values = torch.empty(capacity, width, dtype=dtype, device="cpu")
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._rows = np.zeros(self.capacity, np.int64)
        self._steps = np.zeros(self.capacity, np.int32)
        """The step of the table that the values of each row belong to."""
        self._rounds, self._versions, self._used = np.zeros((3, self.capacity), np.int64)
        """When it was read, by the worker's rounds; the version of weights; and when it was used last, in calls."""
        self._index = IdIndex(self._rows)
        self._free = np.arange(self.capacity)[::-1].copy()
        """Slots that have no row: the first `_num_free`."""
        self._num_free, self._calls = self.capacity, 0
        self._epochs: dict[int, int] = {}
        """Server → that of its rows."""

    def find(self, rows: Ints) -> Ints:
        """Return the slot of each row; -1: it is not kept."""
        slots = self._index.find(rows)
        self._calls += 1
        self._used[slots[slots >= 0]] = self._calls
        return slots

    def values(self, slots: Ints) -> Tensor:
        return self._values.index_select(0, torch.from_numpy(slots))

    def are_fresh(self, slots: Ints, round_: int) -> npt.NDArray[np.bool_]:
        """Return which rows can be used without asking."""
        if not self.max_age:
            return np.zeros(len(slots), bool)
        return (slots >= 0) & (round_ - self._rounds[slots] <= self.max_age)

    def oldest(self, slots: Ints) -> int:
        """Return the version of the oldest of some rows."""
        return int(self._versions[slots].min())

    def held(self, slots: Ints, server: int) -> HeldRows | None:
        """Return what to tell a server about these rows; None if none of them is kept."""
        if server not in self._epochs or not (slots >= 0).any():
            return None
        return HeldRows(self._epochs[server], np.where(slots >= 0, self._steps[slots], -1).astype(np.int32))

    def put(self, placed: PlacedRows, pulled: PulledRows, server: int, version: int) -> None:
        """Keep rows that a server has sent, and note which ones it found unchanged."""
        if self._epochs.setdefault(server, pulled.epoch) != pulled.epoch:
            self.clear()
            self._epochs[server] = pulled.epoch
        # 1. Rows that are kept: newer, or unchanged. Another request may have replaced or dropped them meanwhile.
        slots = self._index.find(placed.ids)
        is_sent = pulled.forms == SENT
        is_kept = (slots >= 0) & (self._steps[slots] <= pulled.step)
        if placed.held is None:
            is_kept &= is_sent
        else:
            is_kept &= is_sent | ((pulled.forms == SAME) & (self._steps[slots] == placed.held.steps))
        # 2. Rows that are new take slots; if there are none left, a quarter of the rows, the least recently used, goes.
        new = np.flatnonzero(is_sent & (slots < 0))[: self.capacity]
        if len(new) > self._num_free:
            self._evict(max(self.capacity // 4, len(new) - self._num_free))
            slots = self._index.find(placed.ids)
            is_kept &= slots >= 0
        self._num_free -= len(new)
        free = self._free[self._num_free :][: len(new)]
        self._rows[free] = placed.ids[new]
        self._index.insert(free)
        slots[new], is_kept[new] = free, True
        # 3. Their values.
        every, sent = np.flatnonzero(is_kept), np.flatnonzero(is_kept & is_sent)
        self._steps[slots[every]], self._versions[slots[every]] = pulled.step, version
        self._rounds[slots[every]], self._used[slots[every]] = placed.round, max(self._calls, 1)
        number = np.cumsum(is_sent) - 1
        rows = pulled.values.index_select(0, torch.from_numpy(number[sent]))
        scatter_rows(self._values, torch.from_numpy(slots[sent]), rows)

    def _evict(self, count: int) -> None:
        live = np.flatnonzero(self._used)
        going = live[np.argpartition(self._used[live], count - 1)[:count]] if count < len(live) else live
        self._index.remove(going)
        self._used[going] = 0
        self._free[self._num_free :][: len(going)] = going
        self._num_free += len(going)


@dataclass
class RowRequest:
    """Rows of several keys that one message asks for."""

    table: RemoteTable
    server: int
    keys: list[int] = field(default_factory=list)
    places: list[PlacedRows] = field(default_factory=list)
    """For each key."""
    nbytes: int = 0
    """Bytes of its ids and rows."""

    def add(self, block: RowBlock, rows: PlacedRows) -> int:
        """Add as many of some rows as fit; returns how many."""
        is_full = len(self.keys) == KEYS_PER_MESSAGE
        count = 0 if is_full else (MAX_SLICE - self.nbytes) // block.row_nbytes
        count = min(count if self.keys else max(count, 1), len(rows.ids))
        if count:
            self.keys.append(block.slices[0].segments[block.position].key)
            held = rows.held
            if held is not None:
                held = held._replace(steps=held.steps[:count])
            self.places.append(rows._replace(where=rows.where[:count], ids=rows.ids[:count], held=held))
            self.nbytes += count * block.row_nbytes
        return count

    def message(self, timeout: float) -> m.PullRows:
        number, before = self.table.numbers[self.server], self.table.round if self.table.is_repeated else -1
        ids = tuple([one.ids.astype("<i8").tobytes() for one in self.places])
        held = tuple([b"" if one.held is None else one.held.pack() for one in self.places])
        return m.PullRows(number, tuple(self.keys), ids, held, timeout, before)

    def write(self, values: Tensor, version: int) -> None:
        """Write the bytes of all rows to the outputs."""
        start = 0
        for one in self.places:
            start += one.write(values[start:], self.server, version)


class RowsAsked(NamedTuple):
    calls: Calls
    requests: list[RowRequest]
    outs: list[Tensor]
    versions: dict[tuple[int, int], int]
    """As in `RowsTaken`, of rows that the cache had."""


class RowsTaken(NamedTuple):
    rows: list[Tensor]
    versions: dict[tuple[int, int], int]
    """(server, table by index) → the version of the oldest rows."""


class PickedRows(NamedTuple):
    """Those of some rows that were prefetched."""

    is_here: Tensor
    rows: Tensor

    @property
    def are_all(self) -> bool:
        return len(self.rows) == len(self.is_here)

    def joined(self, others: Tensor) -> Tensor:
        """Return all rows in order, with those that were not prefetched."""
        found = self.rows.new_empty(len(self.is_here), self.rows.shape[1])
        found[self.is_here], found[~self.is_here] = self.rows, others
        return found


class RowPulls:
    """Fetches rows of keys after this worker's own rounds."""

    def __init__(self, session: Session, rounds: Rounds) -> None:
        self.session = session
        self.rounds = rounds
        self.caches: dict[tuple[int, int], RowCache] = {}
        """(table by index, key) → rows that this worker keeps."""
        self._num_reconnects = 0
        """How often a server had come back after it was gone, when these were filled."""

    def pull(self, wanted: Sequence[RowsWanted]) -> list[Tensor]:
        """Fetch present values of rows to compute with, after this worker's rounds of the tables; blocks.

        Returns (number of ids, elements of a row) for each, on the CPU.

        Raises:
            KVStoreError: what a server answered.
            DeadlineError, ServerUnreachableError: a server did not answer in time.
        """
        taken = self.take(self.ask(wanted))
        self.note(taken.versions)
        return taken.rows

    def note(self, versions: Mapping[tuple[int, int], int]) -> None:
        for (server, index), version in versions.items():
            self.rounds.tables.version[server, index] = version

    def ask(self, wanted: Sequence[RowsWanted]) -> RowsAsked:
        """Request rows as `pull` does and return at once; `take` them, or `drop` the calls."""
        outs: list[Tensor] = []
        requests: list[RowRequest] = []
        last: dict[tuple[int, int], RowRequest] = {}
        """(server, table by index) → the request that more rows are added to."""
        old: dict[tuple[int, int], int] = {}
        """(server, table by index) → the version of the oldest row that is not asked for."""
        if self._num_reconnects != self.session.num_reconnects:
            self._num_reconnects = self.session.num_reconnects
            self.forget()
        for table, keys, ids in _group_row_reads(wanted):
            # 1. The requests of one row group count as rows of one key.
            self.rounds.wait_pending(table)
            spec, lengths = table.plan.specs[keys[0]], list(map(len, ids))
            rows = table.plan.rows(keys[0])
            given = ids[0]
            if len(keys) > 1:
                rows = table.plan.joined_rows(keys[0])
                starts = dict(zip(rows.keys, rows.bounds, strict=True))
                given = torch.cat([own + starts[key] for key, own in zip(keys, ids, strict=True)])
            out = torch.empty(sum(lengths), row_numel(spec), dtype=torch_dtype(spec.dtype), device="cpu")
            outs += torch.split(out, lengths)
            # 2. Rows that are cached.
            cache = None if table.is_repeated else self.caches.get((table.index, keys[0]))
            slots, is_fresh = _NO_IDS, np.zeros(0, bool)
            if cache is not None:
                slots = cache.find(given.numpy())
                kept, is_fresh = np.flatnonzero(slots >= 0), cache.are_fresh(slots, table.round)
                scatter_rows(out, torch.from_numpy(kept), cache.values(slots[kept]))
            # 3. One request to each server for the others, or several for many rows.
            for block, where, own in rows.by_server(given.numpy()):
                where = np.arange(len(given))[where]
                place, held = (block.server, table.index), None
                if cache is not None:
                    fresh = where[is_fresh[where]]
                    if len(fresh):
                        oldest = cache.oldest(slots[fresh])
                        old[place] = min(oldest, old.get(place, oldest))
                    own, where = own[~is_fresh[where]], where[~is_fresh[where]]
                    held = cache.held(slots[where], block.server)
                placed, at = PlacedRows(out, where, spec, own, cache, held, table.round), 0
                while at < len(own):
                    if place in last:
                        at += last[place].add(block, placed.after(at))
                    if at < len(own):
                        last[place] = RowRequest(table, block.server)
                        requests.append(last[place])
        messages = [(one.server, one.message(self.session.options.timeout)) for one in requests]
        asked = RowsAsked(self.session.begin(messages), requests, outs, old)
        failpoint("worker.rows.asked")
        return asked

    def take(self, asked: RowsAsked) -> RowsTaken:
        options = self.session.options
        answers = self.session.finish(asked.calls, options.timeout + options.dead_after)
        read = dict(asked.versions)
        for request, answer in zip(asked.requests, answers, strict=True):
            assert isinstance(answer, m.Weights)
            [(_, version, _, source, start, nbytes)] = parts_of_incoming_weights(answer)
            request.write(source[start : start + nbytes], version)
            place = request.server, request.table.index
            read[place] = min(version, read.get(place, version))
        return RowsTaken(asked.outs, read)

    def forget(self) -> None:
        """Forget what is cached."""
        for cache in self.caches.values():
            cache.clear()


def _group_row_reads(
    wanted: Sequence[RowsWanted],
) -> Iterator[tuple[RemoteTable, list[int], list[Tensor]]]:
    """Yield neighbours in `wanted` that belong to one row group together, in order."""
    at = 0
    while at < len(wanted):
        table, first, _ = wanted[at]
        following, end = table.plan.joined_rows(first).keys, at + 1
        while end < len(wanted) and wanted[end][0] is table and wanted[end][1] in following:
            if wanted[end][1] <= wanted[end - 1][1]:
                break
            end += 1
        yield table, [key for _, key, _ in wanted[at:end]], [ids for _, _, ids in wanted[at:end]]
        at = end


class TableRowReads:
    """Rows of one table's keys (by index) on the CPU, after this worker's rounds.

    Rows are prefetched between two rounds, not with a commit: a server that has the commit of one rank still waits
    for others, and would send rows as they were before.
    """

    def __init__(self, pulls: RowPulls, table: RemoteTable) -> None:
        self.are_read = False
        """Rows may be read in the memory of this host's servers; only in synchronous rounds."""
        self.wanted: Mapping[int, Tensor] = {}
        """Key → ids of the rows that were prefetched."""
        self._pulls, self._table = pulls, table
        self._asked: RowsAsked | None = None
        """The prefetch that is still under way."""
        self._rows: dict[int, Tensor] = {}
        self._versions: Mapping[tuple[int, int], int] = {}
        """Their versions, as in `RowsTaken`."""
        plan = table.plan
        self._alone = frozenset([server for server in plan.servers if not plan.resident_slices_of(server)])
        """Servers that hold nothing but rows of the table."""
        self._mapped: dict[int, MappedRowReads | None] = {}
        """Key → its rows in its servers' memory; None if they have to be requested."""
        self._num_reconnects = 0
        """How often a server had come back after it was gone, when these were mapped."""

    def read(self, key: int, ids: Tensor, are_given: bool) -> Tensor | None:
        """Copy rows of a key (int64 ids, in any order) from its servers' memory; None if that is impossible.

        Args:
            are_given: This worker computes with them, and does not only inspect them.
        """
        if not self.are_read or self._table.is_repeated:
            return None
        rounds, table = self._pulls.rounds, self._table
        rounds.wait_pending(table)
        if self._num_reconnects != self._pulls.session.num_reconnects:
            self._num_reconnects = self._pulls.session.num_reconnects
            self._mapped.clear()
        if key not in self._mapped:
            self._mapped[key] = self._map(key)
        mapped, servers = self._mapped[key], list(table.plan.rows(key).blocks)
        # Before the first round there may be nothing yet on some server.
        versions = rounds.tables.newest[servers, table.index]
        rows = mapped.take(ids) if mapped is not None and (versions >= 0).all() else None
        if rows is not None:
            known = zip(servers, versions.tolist(), strict=True)
            self._record_versions({(server, table.index): version for server, version in known}, are_given)
        return rows

    def _map(self, key: int) -> MappedRowReads | None:
        session, table, shown = self._pulls.session, self._table, dict[int, tuple[SharedArena, int]]()
        servers = list(table.plan.rows(key).blocks)
        if not all(map(session.transport.channel, servers)):
            return None
        num_reconnects = session.num_reconnects
        answers = session.call_all([(server, m.MapRows(table.numbers[server])) for server in servers])
        if session.num_reconnects != num_reconnects:
            return None  # the answers may be from two processes of a server; the next read asks again
        for server, answer in zip(servers, answers, strict=True):
            assert isinstance(answer, m.Weights)
            # The server also shows slices of other keys.
            slices = {
                table.slot_of(slice_): slice_
                for slice_ in table.plan.slices_with(key)
                if slice_.server == server
            }
            for slot, _, location in answer.locations.tolist():
                memory = session.memory_at(server, location) if slot in slices else None
                if memory is not None:
                    shown[slices[slot].index] = memory
        try:
            return MappedRowReads(table.plan, key, shown)
        except OSError as error:
            _log.debug("rows of %s are asked for: %s", table.plan.specs[key].key, error)
            return None

    def prefetch(self, wanted: Mapping[int, Tensor]) -> None:
        """Request rows (distinct, ascending ids by key), which `pull` finds until `drop`; returns at once.

        Rows that can be read in shared memory are not requested.
        """
        self.drop()
        unread = {key: ids for key, ids in wanted.items() if self.read(key, ids[:0], are_given=False) is None}
        if unread:
            self._asked = self._pulls.ask([(self._table, key, ids) for key, ids in unread.items()])
            self.wanted = unread

    def pull(self, wanted: Sequence[tuple[int, Tensor]], are_given: bool) -> list[Tensor]:
        """Return rows of keys, (key, distinct and ascending ids) each; fetches those that were not prefetched.

        Args:
            are_given: As of `read`.

        Raises:
            KVStoreError: the store answered with an error, or not at all; the next call asks again.
        """
        has_prefetched = any([key in self.wanted for key, _ in wanted])
        if has_prefetched and self._asked is not None:
            # 1. Wait for the prefetch. If that raises, nothing was prefetched.
            asked, self._asked, prefetched = self._asked, None, self.wanted
            self.wanted = {}
            taken = self._pulls.take(asked)
            self._rows, self._versions = dict(zip(prefetched, taken.rows, strict=True)), taken.versions
            self.wanted = prefetched
        # 2. Pick rows from it, and fetch all others together.
        picked = [self._pick(key, ids) for key, ids in wanted]
        missing = [
            (self._table, key, ids if own is None else ids[~own.is_here])
            for (key, ids), own in zip(wanted, picked, strict=True)
            if own is None or not own.are_all
        ]
        fetched = iter(self._fetch(missing, are_given))
        if has_prefetched:
            self._record_versions(self._versions, are_given)  # those of the prefetch are the older ones
        return [
            next(fetched) if own is None else own.rows if own.are_all else own.joined(next(fetched))
            for own in picked
        ]

    def _pick(self, key: int, ids: Tensor) -> PickedRows | None:
        """Copy the prefetched rows with these ids; None if none of the key's were prefetched."""
        if key not in self.wanted:
            return None
        have, rows = self.wanted[key], self._rows[key]
        if torch.equal(have, ids):
            return PickedRows(torch.ones(len(ids), dtype=torch.bool, device="cpu"), rows.clone())
        place = torch.searchsorted(have, ids).clamp_(max=max(len(have) - 1, 0))
        is_here = have[place] == ids if len(have) else torch.zeros(len(ids), dtype=torch.bool, device="cpu")
        return PickedRows(is_here, rows[place[is_here]])

    def keep(self, key: int, capacity: int, max_age: int) -> None:
        """Keep rows of a hash table that were read; see `RowCache`."""
        spec = self._table.plan.specs[key]
        cache = RowCache(capacity, max_age, row_numel(spec), torch_dtype(spec.dtype))
        self._pulls.caches[self._table.index, key] = cache

    def forget(self) -> None:
        """Forget all rows that are here, because others have been put into the store."""
        self.drop()
        self._pulls.forget()

    def drop(self) -> None:
        """Forget the rows that were prefetched."""
        if self._asked is not None:
            self._pulls.session.drop(self._asked.calls)
        self.wanted, self._asked, self._rows, self._versions = {}, None, {}, {}

    def _fetch(self, wanted: Sequence[RowsWanted], are_given: bool) -> list[Tensor]:
        if not wanted:
            return []
        taken = self._pulls.take(self._pulls.ask(wanted))
        self._record_versions(taken.versions, are_given)
        return taken.rows

    def _record_versions(self, versions: Mapping[tuple[int, int], int], are_given: bool) -> None:
        if are_given:
            self._pulls.note(
                {place: version for place, version in versions.items() if place[0] in self._alone}
            )


class MappedRowReads:
    """All rows of a key, read in the memory of servers on this host. Not for forked processes.

    The slices are mapped one behind the other, whichever servers hold them, so rows are picked by one call.

    Args:
        shown: Slice (by index) → a server's memory, and where it begins there.

    Raises:
        OSError: the slices do not fill pages, are not all shown, or the system refuses.
    """

    def __init__(self, plan: Plan, key: int, shown: Mapping[int, tuple[SharedArena, int]]) -> None:
        spec, size, slices = plan.specs[key], SIZES[plan.specs[key].dtype], plan.slices_with(key)
        if mmap.PAGESIZE != PAGE or not slices or not plan.rows(key).blocks:
            raise OSError(f"key {spec.key!r} has no rows in whole pages")
        # 1. Reserve addresses for the whole key, and map each slice to its place.
        self._room = mmap.mmap(-1, -(-spec.nbytes // PAGE) * PAGE, mmap.MAP_PRIVATE | _NO_RESERVE)
        room = np.frombuffer(self._room, np.uint8)
        spans: dict[int, tuple[SharedArena, int, int]] = {}
        """By memory, where the slices there begin and end; they are neighbours."""
        for slice_ in slices:
            at, nbytes = slice_.segments[0].key_start * size, slice_.nbytes
            memory, begin = shown.get(slice_.index, (None, 0))
            if memory is None or at % PAGE or begin % PAGE or begin + nbytes > memory.nbytes:
                raise OSError(f"slice {slice_.index} of key {spec.key!r} cannot be mapped")
            put_pages(room.ctypes.data + at, -(-nbytes // PAGE) * PAGE, memory.fd, begin, mmap.PROT_READ)
            _, first, end = spans.get(id(memory), (memory, begin, 0))
            spans[id(memory)] = memory, min(first, begin), max(end, begin + nbytes)
        # 2. The write counters of the slices.
        self._counters = [
            write_counters_in(memory.data)[:, first // LONG : -(-end // LONG)]
            for memory, first, end in spans.values()
        ]
        """By memory, how often a write to these slices was begun, and ended."""
        width = plan.rows(key).width
        [self._round_robin] = plan.rows(key).round_robins
        self._rows = torch.from_numpy(room).view(torch_dtype(spec.dtype))[: spec.numel].view(-1, width)
        self._process = os.getpid()

    def take(self, ids: Tensor) -> Tensor | None:
        """Copy rows (int64 ids of the table), in this order; None if a server may be writing some."""
        if os.getpid() != self._process:
            return None
        # A seqlock: the copy is good if no write had begun that was not ended before it.
        ended = [counters[1].copy() for counters in self._counters]
        rows = self._rows.index_select(0, torch.from_numpy(self._round_robin.places(ids.numpy())))
        is_still = [(counters[0] == own).all() for counters, own in zip(self._counters, ended, strict=True)]
        return rows if all(is_still) else None
