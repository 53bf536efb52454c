"""New weights that one server sends in a round, from the first message until they are written.

A slice comes in one of these forms: whole; in parts, from its first element on; rounded to bfloat16; as changes of the
weights before; as rows; or as its location in the server's memory, which this worker maps.

Nothing is written before all servers have answered, because until then the round may fail on one of them: then the
weights here must still be those of the last round. A server may also roll a round back and send newer weights of it,
so all slices of a table come with one version, and those of an older one are dropped.

Tables and slices are named by their position in the layout of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import Codec, torch_dtype
from kvstore_server.errors import ProtocolError
from kvstore_server.optimizer.rows import scatter_rows
from kvstore_server.plan import LONG, Slice
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import RowSet, cut_rows, decode_rows
from kvstore_server.shard.deltas import add_delta_changes
from kvstore_server.transport.arena import SharedArena
from kvtrainer.client.contribution import Contribution, ContributionLayout, GatheredContribution
from kvtrainer.client.tables import RemoteTable
from kvtrainer.client.weight_sinks import WeightSink
from kvtrainer.types import Arenas

MemoryAt = Callable[[int, int], tuple[SharedArena, int] | None]
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


class IncomingWeights:
    """New weights from one server, stored until all servers have sent theirs.

    Args:
        memory: Where small slices are gathered.
        open_tables: Those whose end the server has not reported yet; the caller changes it.
        are_wanted: Whether any weights are to come.
        memory_at: (server, location) → the memory that has it now, and where it begins there.
    """

    def __init__(
        self,
        layout: ContributionLayout,
        memory: GatheredContribution,
        open_tables: Collection[int],
        are_wanted: bool,
        memory_at: MemoryAt,
    ) -> None:
        self._layout, self._memory, self._memory_at = layout, memory, memory_at
        self._mapped = layout.mapped
        """The slices that the server may call unmoved: those that were mapped when the request was made."""
        self.open = open_tables
        self.are_wanted = are_wanted
        self.has_intent = False
        """Weights may come before all slices are sent, so they must not be stored where those are."""
        self.num_pending: list[int] = layout.num_resident.tolist() if are_wanted else [0] * len(layout.tables)
        """How many slices of each table are still to come; if none are wanted, the server only confirms."""
        self.came = [-1] * len(layout.tables)
        """The version of the weights that came, by table."""
        self._is_pending = bytearray(layout.is_resident if are_wanted else len(layout.slices))
        self._gathered: list[int] = []
        """Slices whose new weights are in `memory`."""
        self._staged: list[tuple[int, int, Tensor, int]] = []
        """(slice, kind, bytes, first element) of all others that came as bytes."""
        self._levels: dict[int, int] = {}
        """Slice → how many of its elements are here, if it comes in parts."""
        self._locations: list[tuple[int, int, tuple[SharedArena, int] | None]] = []
        """(slice, location in the server's memory, what that was when it came): the server may be restarted since then,
        and number its memory in another way."""

    def receive(self, weights: m.Weights) -> list[int]:
        """Store what one message brings; returns the tables that are complete now.

        Raises:
            ProtocolError: the bytes do not fit the slices.
        """
        layout, is_pending, came = self._layout, self._is_pending, self.came
        # 1. Slices that can be read in the server's memory.
        finished = self._receive_locations(weights.locations) if len(weights.locations) else []
        # 2. Slices that come as bytes.
        runs: list[tuple[Tensor, int, int, int]] = []
        """(source, where it begins there and ends, where it begins in memory): neighbours here and there together."""
        for slot, version, kind, source, start, nbytes in parts_of_incoming_weights(weights):
            at = layout.slots.get(slot)
            if at is None:
                finished += self._receive_part(slot, version, kind, source[start : start + nbytes])
                continue
            # A rolled back round comes again with a newer version; an older one must not be mixed with it.
            table = layout.table[at]
            if -1 < came[table] < version and table in self.open:
                self.roll_back(table)
            elif version < came[table]:
                continue
            end, num_new = at + 1, is_pending[at]
            if kind == m.ROWS:
                end = layout.end_of_rows(at, source[start : start + nbytes])
                num_new = is_pending.count(1, at, end)
            if not num_new:
                continue
            # Rows of one slice may bring those of the slices behind it, too.
            if kind == m.WHOLE and nbytes != layout.nbytes[at]:
                raise ProtocolError(f"a slice of {layout.nbytes[at]} bytes came back with {nbytes} bytes")
            if kind == m.HALF and nbytes != layout.slices[at].length * torch.bfloat16.itemsize:
                raise ProtocolError(
                    f"a slice of {layout.nbytes[at]} bytes came back rounded, with {nbytes} bytes"
                )
            begin = layout.begin[at]
            if kind != m.WHOLE or begin < 0 or layout.is_converted or self.has_intent:
                # Keep the message itself; the gather buffer is not free, or the bytes need decoding.
                self._staged += [(at, kind, source[start : start + nbytes], 0)] if nbytes else []
            else:
                self._gathered.append(at)
                same, first, last, to = runs[-1] if runs else (None, 0, 0, 0)
                if same is source and last == start and to + last - first == begin:
                    runs[-1] = source, first, last + nbytes, to
                else:
                    runs.append((source, start, start + nbytes, begin))
            is_pending[at:end] = bytes(end - at)
            came[table] = version
            self.num_pending[table] -= num_new
            if not self.num_pending[table]:
                finished.append(table)
        # 3. Neighbours are copied together.
        for source, first, end, to in runs:
            self._memory.raw[to : to + end - first].copy_(source[first:end])
        return finished

    def _receive_part(self, word: int, version: int, kind: int, raw: Tensor) -> list[int]:
        """Store a part of a slice; returns its table if that is complete now.

        A part that leaves a gap is dropped: if what was to fill the gap is lost, the weights come again as a whole.
        """
        (slot, end), layout = m.unpack_slot(word), self._layout
        at = layout.slots.get(slot)
        if at is None or not end:
            return []
        table, slice_ = layout.table[at], layout.slices[at]
        if -1 < self.came[table] < version and table in self.open:
            self.roll_back(table)
        elif version < self.came[table]:
            return []
        itemsize = torch.bfloat16.itemsize if kind == m.HALF else torch_dtype(slice_.dtype).itemsize
        # Only the part that follows the last one, or the first one.
        begin = self._levels.get(at, 0)
        if not self._is_pending[at] or (end - begin) * itemsize != len(raw):
            return []
        if end > slice_.length or kind not in (m.WHOLE, m.HALF):
            raise ProtocolError(
                f"{len(raw)} bytes up to element {end} of a slice of {slice_.length} came back as kind {kind}"
            )
        self._staged.append((at, kind, raw, begin))
        # The slice is complete when its last part has come.
        self._levels[at], self.came[table] = end, version
        if end < slice_.length:
            return []
        self._is_pending[at] = 0
        self.num_pending[table] -= 1
        return [] if self.num_pending[table] else [table]

    def _receive_locations(self, locations: m.Matrix) -> list[int]:
        finished = list[int]()
        for slot, version, location in locations.tolist():
            at = self._layout.slots.get(slot)
            if at is not None and location == m.SAME_LOCATION and self._mapped is not None:
                finished += self._receive_unmoved(self._layout.table[at], version)
            elif at is not None and self._is_pending[at]:
                table = self._layout.table[at]
                self._locations.append((at, location, self._memory_at(self._layout.server, location)))
                self._is_pending[at] = 0
                self.came[table] = version
                self.num_pending[table] -= 1
                if not self.num_pending[table]:
                    finished.append(table)
        return finished

    def _receive_unmoved(self, table: int, version: int) -> list[int]:
        pending, mapped = np.frombuffer(self._is_pending, np.uint8), self._mapped
        self.came[table] = version
        self.num_pending[table] -= int(pending[mapped].sum())
        pending[mapped] = 0
        return [] if self.num_pending[table] else [table]

    def roll_back(self, table: int) -> None:
        """Discard what has come of a table, because its server has rolled back the round: all comes again."""
        layout = self._layout
        self.num_pending[table], self.came[table] = int(layout.num_resident[table]), -1
        for at in layout.resident:
            self._is_pending[at] |= layout.table[at] == table
        self._gathered = [at for at in self._gathered if layout.table[at] != table]
        self._staged = [one for one in self._staged if layout.table[one[0]] != table]
        self._locations = [one for one in self._locations if layout.table[one[0]] != table]
        self._levels = {at: level for at, level in self._levels.items() if layout.table[at] != table}

    def skip(self, table: int) -> None:
        """Discard what has come of a table, because its round is not applied: nothing comes any more."""
        self.roll_back(table)
        self.num_pending[table] = 0
        for at in self._layout.resident:
            self._is_pending[at] &= self._layout.table[at] != table

    def write(
        self,
        contribution: Contribution,
        gone: Collection[int],
        follows: bool,
        rows: dict[tuple[int, int], list[Tensor | None]],
    ) -> None:
        """Write what came as bytes to the `outs` of a contribution, and map what is in the server's memory.

        Messages that came are not kept alive.

        Args:
            gone: Tables (by index) whose weights are not written, because the round failed.
            follows: Changes of weights are added to those of the last round.
            rows: (position of the table in the round, key) → ids of the rows that came, to which these are added;
                None for all of them. Only if the contribution is kept.

        Raises:
            ProtocolError: a part does not fit its slice.
        """
        layout, outs, unread = self._layout, contribution.outs, contribution.unread
        assert outs is not None
        # 1. Leave out the tables that failed, and slices that hold only keys without use.
        kept = [layout.index[at] not in gone for at in layout.table] if gone else None
        if unread:
            pairs = zip(kept or [True] * len(layout.slices), layout.slices, strict=True)
            kept = [
                is_incremental and any(s.key not in unread for s in slice_.segments)
                for is_incremental, slice_ in pairs
            ]
        # 2. Small slices, all at once.
        ready = self._gathered if kept is None else [at for at in self._gathered if kept[at]]
        if ready:
            targets = [part_of(outs[layout.at[layout.table[at]]], layout.slices[at]) for at in ready]
            torch._foreach_copy_(targets, [self._memory.views[at] for at in ready])
        for at in ready if contribution.is_incremental else ():
            rows[layout.at[layout.table[at]], layout.slices[at].segments[0].key] = [None]
        # 3. The others, in the order in which they came.
        for at, kind, raw, begin in self._staged:
            if kept is None or kept[at]:
                of, slice_ = layout.table[at], layout.slices[at]
                version = self.came[of] if follows else -1
                written = _write_incoming_slice(
                    layout.tables[of], outs[layout.at[of]], slice_, kind, raw, begin, version
                )
                for key, ids in written.items() if contribution.is_incremental else ():
                    rows.setdefault((layout.at[of], key), []).append(ids)
        # 4. What can be read in the server's memory, and what cannot any more.
        if contribution.sink.maps:
            self._map(contribution.sink, gone)
        self._staged.clear()

    def _map(self, sink: WeightSink, gone: Collection[int]) -> None:
        layout = self._layout
        # 1. What came as bytes was written to this worker's own memory.
        copied = [*self._gathered, *[at for at, *_ in self._staged]]
        for at in copied:
            sink.unmap(layout.slices[at])
        # A long slice that came as bytes may only have been read by another worker, and can be mapped the next time.
        are_short = all([layout.slices[at].nbytes < LONG for at in copied])
        if self._locations or not are_short:
            layout.mapped = None
        # 2. A slice that cannot be mapped makes the caller pull all weights, see `WeightSink.problem`.
        for at, location, memory in self._locations if not gone else ():
            slice_ = layout.slices[at]
            if sink.is_mapped(slice_, layout.server, location, memory and memory[0]):
                continue
            try:
                if memory is None:
                    raise OSError("the channel to its server was lost")
                sink.map(slice_, layout.server, location, *memory)
            except OSError as error:
                sink.problem = error
        if self._locations and not gone and sink.problem is None and are_short:
            layout.mapped = np.array([at for at, *_ in self._locations])


def parts_of_incoming_weights(weights: m.Weights) -> Iterator[tuple[int, int, int, Tensor, int, int]]:
    """Yield (slot, version, kind, byte buffer, offset in it, size) of each part.

    Raises ProtocolError if the parts are not all of the buffers.
    """
    payloads = iter(weights.payloads)
    source, start, left = _NO_BYTES, 0, 0
    for slot, version, kind, nbytes in weights.parts.tolist():
        while nbytes and not left and (payload := next(payloads, None)) is not None:
            source = payload.view(torch.uint8)
            start, left = 0, payload.nbytes
        if not 0 <= nbytes <= left:
            raise ProtocolError(f"{nbytes} bytes of slot {slot} are not all in one payload")
        yield slot, version, kind, source, start, nbytes
        start += nbytes
        left -= nbytes


def part_of(arenas: Arenas, slice_: Slice) -> Tensor:
    flat = arenas[slice_.dtype]
    return flat if slice_.used == flat.numel() else flat[slice_.offset : slice_.offset + slice_.used]


def _write_incoming_slice(
    table: RemoteTable, arenas: Arenas, slice_: Slice, kind: int, raw: Tensor, begin: int, version: int
) -> Mapping[int, Tensor | None]:
    """Write one slice's new weights, or rows of it and of the slices behind it. Raises as `IncomingWeights.write`.

    `begin` is the element of the slice with which the bytes begin, and `version` what changes lead to, or -1.
    Returns the ids of the rows that were written, by key; None if it was something else.
    """
    # 1. Changes of the weights before, or weights that later changes are added to.
    plan, out, key = table.plan, part_of(arenas, slice_), slice_.segments[0].key
    if table.delta_codec is not None and version >= 0 and kind in (m.WHOLE, m.DELTA):
        out.copy_(
            _apply_incoming_changes(table, table.delta_codec, slice_, kind, raw, version)[: slice_.used]
        )
        return {key: None}
    # 2. A slice, or a part of it.
    if kind in (m.WHOLE, m.HALF):
        given = raw.view(out.dtype if kind == m.WHOLE else torch.bfloat16)
        target = out[begin:][: len(given)]
        given = given[: len(target)]
        target.copy_(_round_incoming_to_bfloat16(given) if table.takes_half else given)
        return {key: None}
    if kind != m.ROWS:
        raise ProtocolError(f"slice {slice_.index} of {table.name!r} came back as kind {kind}")
    # 3. Rows. They may be of several slices on the server, and of several keys in a row group.
    parts, slices = decode_rows(plan, slice_, raw.numpy().data, is_joined=True)
    written: Mapping[int, Tensor | None] = {key: None}
    for position, values in parts.items():
        segment = slice_.segments[position]
        if isinstance(values, Tensor):
            values = _round_incoming_to_bfloat16(values) if table.takes_half else values
            out[segment.start : segment.start + segment.numel].copy_(values)
            continue
        places, start = plan.joined_rows(segment.key), plan.key_offsets[segment.key]
        block = places.blocks[slice_.server]
        first = block.order[slice_.index]
        for one in block.slices[first : first + slices]:
            table.followed.pop(one.index, None)  # its rows come from now on
        ids = torch.from_numpy(block.in_key(values.ids.numpy(), first, first + slices))
        rows = _round_incoming_to_bfloat16(values.values) if table.takes_half else values.values
        whole = arenas[slice_.dtype][start : start + int(places.starts[-1]) * places.width]
        scatter_rows(whole.view(-1, places.width), ids, rows)
        if len(slice_.segments) == 1:
            own = cut_rows(RowSet(ids, rows), places.bounds)
            written = {key: part.ids for key, part in zip(places.keys, own, strict=True)}
    return written


def _apply_incoming_changes(
    table: RemoteTable, codec: Codec, slice_: Slice, kind: int, raw: Tensor, version: int
) -> Tensor:
    """Return the weights of a slice that all workers have, with changes added or replaced by whole ones.

    They are replaced at once, not in place: if that is interrupted and repeated, no changes are added twice.
    """
    if kind == m.WHOLE:
        weights = raw.view(torch_dtype(slice_.dtype)).clone()
    elif slice_.index not in table.followed:
        raise ProtocolError(f"changes of slice {slice_.index} of {table.name!r} came before its weights")
    else:
        known, weights = table.followed[slice_.index]
        if known != version:
            weights = weights.clone()
            add_delta_changes(codec, raw, weights)
    table.followed[slice_.index] = version, weights
    return weights


def _round_incoming_to_bfloat16(weights: Tensor) -> Tensor:
    """Round weights to bfloat16, in their own dtype, as `Storage.half` does."""
    is_wider = weights.dtype.itemsize > torch.bfloat16.itemsize
    return weights.to(torch.bfloat16).to(weights.dtype) if is_wider else weights
