"""Rows of row-sparse keys, fetched from servers: when they are needed, ahead of that, or read in shared memory.

`RowPulls` asks servers for rows of any keys: each server gets one message with those of all keys of a table, or several
if they do not fit into one.

`TableRowReads` serves the rows of one table to the parameters, of several keys at once. It can ask for rows between two
rounds that the next forward pass will read (`prefetch`); a pull then finds them, exactly as it would have fetched them
itself. In synchronous rounds, rows of servers on this host are read in their memory (`MappedRowReads`), with no message
at all: write counters beside the memory tell whether a server was writing meanwhile. Hash tables are not read so.

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
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.engine.rounds import Ints
from kvstore_server.failpoints import failpoint
from kvstore_server.optimizer.rows import scatter_rows
from kvstore_server.plan import LONG, MAX_SLICE, PAGE, SIZES, Plan, RowBlock, row_numel
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE
from kvstore_server.shard.storage import write_counters_in
from kvstore_server.transport.arena import SharedArena
from kvstore_server.transport.pages import put_pages
from kvtrainer.client.incoming_weights import parts_of_incoming_weights
from kvtrainer.client.rounds import Rounds
from kvtrainer.client.session import Calls, Session
from kvtrainer.client.tables import RemoteTable

_log = logging.getLogger(__name__)

_NO_RESERVE = 0x4000
"""MAP_NORESERVE: memory of the mapping is not counted before it is used."""

RowsWanted = tuple[RemoteTable, int, Tensor]
"""Some rows of one key: its table, its index in the plan, and ids (int64, distinct and ascending). Its slices hold
whole rows."""


@dataclass
class RowRequest:
    """Rows of several keys that one message asks for."""

    table: RemoteTable
    server: int
    keys: list[int] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    places: list[tuple[Tensor, Ints]] = field(default_factory=list)
    """For each key, the output, and the places of its rows there."""
    nbytes: int = 0
    """Bytes of its ids and rows."""

    def add(self, block: RowBlock, ids: Ints, out: Tensor, where: Ints) -> int:
        """Add as many of some rows as fit; returns how many."""
        is_full = len(self.keys) == KEYS_PER_MESSAGE
        count = 0 if is_full else (MAX_SLICE - self.nbytes) // block.row_nbytes
        count = min(count if self.keys else max(count, 1), len(ids))
        if count:
            self.keys.append(block.slices[0].segments[block.position].key)
            self.ids.append(ids[:count].astype("<i8").tobytes())
            self.places.append((out, where[:count]))
            self.nbytes += count * block.row_nbytes
        return count

    def message(self, timeout: float) -> m.PullRows:
        number, before = self.table.numbers[self.server], self.table.round if self.table.is_repeated else -1
        return m.PullRows(number, tuple(self.keys), tuple(self.ids), timeout, before)

    def write(self, values: Tensor) -> None:
        """Write the bytes of all rows to the outputs."""
        start = 0
        for out, where in self.places:
            end = start + len(where) * out.shape[1] * out.itemsize
            own = values[start:end]
            if own.storage_offset() % out.itemsize:
                own = own.clone()  # behind rows of another dtype
            scatter_rows(out, torch.from_numpy(where), own.view(out.dtype).view(-1, out.shape[1]))
            start = end


class RowsAsked(NamedTuple):
    calls: Calls
    requests: list[RowRequest]
    outs: list[Tensor]


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
            # 2. One request to each server, or several for many rows.
            for block, where, own in rows.by_server(given.numpy()):
                where = np.arange(len(given))[where]
                place, at = (block.server, table.index), 0
                while at < len(own):
                    if place in last:
                        at += last[place].add(block, own[at:], out, where[at:])
                    if at < len(own):
                        last[place] = RowRequest(table, block.server)
                        requests.append(last[place])
        messages = [(one.server, one.message(self.session.options.timeout)) for one in requests]
        asked = RowsAsked(self.session.begin(messages), requests, outs)
        failpoint("worker.rows.asked")
        return asked

    def take(self, asked: RowsAsked) -> RowsTaken:
        options = self.session.options
        answers = self.session.finish(asked.calls, options.timeout + options.dead_after)
        read: dict[tuple[int, int], int] = {}
        for request, answer in zip(asked.requests, answers, strict=True):
            assert isinstance(answer, m.Weights)
            [(_, version, _, source, start, nbytes)] = parts_of_incoming_weights(answer)
            request.write(source[start : start + nbytes])
            place = request.server, request.table.index
            read[place] = min(version, read.get(place, version))
        return RowsTaken(asked.outs, read)


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
            pieces = {
                table.slot_of(slice_): slice_
                for slice_ in table.plan.slices_with(key)
                if slice_.server == server
            }
            for slot, _, location in answer.locations.tolist():
                memory = session.memory_at(server, location) if slot in pieces else None
                if memory is not None:
                    shown[pieces[slot].index] = memory
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

    def drop(self) -> None:
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
        spec, size, pieces = plan.specs[key], SIZES[plan.specs[key].dtype], plan.slices_with(key)
        if mmap.PAGESIZE != PAGE or not pieces or not plan.rows(key).blocks:
            raise OSError(f"key {spec.key!r} has no rows in whole pages")
        # 1. Reserve addresses for the whole key, and map each slice to its place.
        self._room = mmap.mmap(-1, -(-spec.nbytes // PAGE) * PAGE, mmap.MAP_PRIVATE | _NO_RESERVE)
        room = np.frombuffer(self._room, np.uint8)
        spans: dict[int, tuple[SharedArena, int, int]] = {}
        """By memory, where the slices there begin and end; they are neighbours."""
        for slice_ in pieces:
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
