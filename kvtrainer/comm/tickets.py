"""What a worker knows about its tables and about the rounds that it has in flight; no messages are sent here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.errors import KVStoreError, ProtocolError
from kvstore_server.norms import Decision, Guard, Measured
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import payload_bytes, payload_size
from kvstore_server.reduction import RowSet
from kvstore_server.row_payload import decode_rows
from kvtrainer.comm.compressor import Compressor

Arenas = Mapping[str, Tensor]
"""dtype name → flat tensor laid out as the Plan says; padding behind the last key may be missing. Row-sparse keys are
not in it."""

Source = Callable[[int, int], Tensor]
"""(first element, number of elements) → these values of a key, flat, on the CPU."""


class Encoded(NamedTuple):
    """A slice as it is sent."""

    form: bytes
    """As `PushBatch.form`."""
    data: Tensor


@dataclass
class RemoteTable:
    """A table as this worker sees it."""

    name: str
    plan: Plan
    numbers: dict[int, int]
    """Server → the table's number there."""
    round: int = 0
    """The next round."""
    is_initialised: bool = False
    """Whether a round was applied yet; the first one that is gives the initial values."""
    ticket: Ticket | None = None
    """The exchange in flight."""
    versions: dict[int, int] = field(default_factory=dict)
    """Server → the version of its weights that this worker has."""
    staleness: int = 0
    """How many updates came between the weights of this worker's last contribution and that, on any server."""
    broken: KVStoreError | None = None
    """Set when servers no longer agree on the last round."""
    compressor: Compressor | None = None
    """How this rank's contributions are compressed; None: they are not."""
    held: dict[int, int] = field(default_factory=dict)
    """Server → the version of its weights in the arena of items that are `kept`."""


class RoundItem(NamedTuple):
    """One table's part in an exchange.

    Args:
        table: Which table.
        values: What this rank contributes; None contributes nothing but takes part.
        out: Where the new weights are written; None means that they are not wanted.
        rescale: Factor of the contribution; None means the optimizer's own.
        absent: Keys (by index) that are left out; a slice of which all keys are absent is not sent.
        veto: The values are not finite: they are not sent, and the round changes nothing for anybody.
        assign: The lowest rank's values replace the weights; every rank must say so.
        joined: This rank has no more data: it gives nothing, until all ranks have said so.
        rows: Key (by index) → rows of it, of which this rank has only those; `values` do not count there.
        tables: Row-sparse key (by index) → its values, in the first round or with `assign`.
        is_kept: `out` still holds what the table's last item with this mark left there: rows that have not changed
            since then need not come again.
        guard: The sum is measured, and decided about, before it is used; every rank must want that.
    """

    table: RemoteTable
    values: Arenas | None
    out: Arenas | None
    rescale: float | None = None
    absent: frozenset[int] = frozenset()
    veto: bool = False
    assign: bool = False
    rows: Mapping[int, RowSet] | None = None
    joined: bool = False
    tables: Mapping[int, Source] | None = None
    is_kept: bool = False
    guard: Guard | None = None

    def sent_slices(self, server: int) -> Sequence[Slice]:
        """The slices that this rank gives to a server."""
        if self.values is None or self.veto or self.joined:
            return ()
        plan = self.table.plan
        pieces = plan.slices_of(server)
        if plan.has_row_sparse:
            given = {*(self.rows or ()), *(self.tables or ())}
            pieces = tuple(p for p in pieces if plan.is_resident(p) or p.segments[0].key in given)
        if not self.absent:
            return pieces
        return [p for p in pieces if any(segment.key not in self.absent for segment in p.segments)]


@dataclass
class Ticket:
    """An exchange in flight."""

    items: list[RoundItem]
    started: float
    deadline: float
    hyper: bytes | None
    """The hyper-parameters that go with the commits; None when weights are only read."""
    priority: int = 0
    """Where messages have to queue, those of a higher one go first."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Server → request number."""
    outstanding: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """(server, table number there) → slices still to come; an empty set waits for a plain acknowledgement."""
    tables: dict[tuple[int, int], RoundItem] = field(default_factory=dict)
    error: KVStoreError | None = None
    absent: dict[str, set[int]] = field(default_factory=dict)
    """Table → keys that no worker contributed to."""
    in_force: dict[str, m.InForce] = field(default_factory=dict)
    """Table → what holds for those that have joined."""
    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    """(server, table number there) → the version of the weights that came."""
    applied: dict[tuple[int, int], int] = field(default_factory=dict)
    """(server, table number there) → the version right after this worker's contribution."""
    vetoes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Table → ranks because of which its round was not applied; none, where that was decided."""
    skipped: set[tuple[int, int]] = field(default_factory=set)
    """(server, table number there) of rounds that were not applied because of that."""
    held: dict[tuple[int, int], m.Held] = field(default_factory=dict)
    """(server, table number there) → what the server measured of a sum that it holds."""
    decided: dict[str, tuple[Measured | None, Decision]] = field(default_factory=dict)
    """Table → all that was measured, and what is made of it."""
    complete: set[tuple[int, int]] = field(default_factory=set)
    """(server, table number there) of which all has come, except for what was measured."""
    encoded: Mapping[str, Mapping[int, Encoded]] = field(default_factory=dict)
    """Table → its slices as they are sent, where that is not as plain numbers."""
    failed: dict[tuple[int, int], int] = field(default_factory=dict)
    """(server, table number there) → the next round after the one that failed; -1 when it did not say."""
    aborted: set[str] = field(default_factory=set)
    """Tables whose round was given up as soon as one server had failed it."""
    staged: dict[str, list[m.WeightsPart]] = field(default_factory=dict)
    """Table → new weights that wait for those of the other servers."""
    is_over: bool = False

    def is_lost(self, table: RemoteTable) -> bool:
        """Whether the round of a table, which is over, was not applied on every server, as far as is known here."""
        if not self.outstanding and not self.failed:
            return False
        return any(where in self.outstanding or where in self.failed for where in table.numbers.items())


def write_parts(item: RoundItem, parts: Iterable[m.WeightsPart]) -> None:
    """Bring new weights to their places in `item.out`.

    Raises:
        ProtocolError: a part does not fit its slice.
    """
    versions: dict[int, int] = {}
    slices = item.table.plan.slices
    for part in parts:
        piece = slices[part.slice]
        _write_part(item, piece, part)
        if item.is_kept:
            versions[piece.server] = min(part.version, versions.get(piece.server, part.version))
    if item.is_kept:
        item.table.held |= versions


def _write_part(item: RoundItem, piece: Slice, part: m.WeightsPart) -> None:
    assert item.out is not None
    out = item.out[piece.dtype][piece.offset : piece.offset + piece.used]
    if part.kind == m.WHOLE:
        out.copy_(_as_tensor(part.payload, out))
    elif part.kind != m.ROWS:
        raise ProtocolError(f"slice {part.slice} of {item.table.name!r} came back as kind {part.kind}")
    elif payload_size(part.payload):
        changed = decode_rows(item.table.plan, piece, payload_bytes(part.payload))
        for position, values in changed.items():
            segment = piece.segments[position]
            mine = out[segment.start : segment.start + segment.numel]
            if isinstance(values, Tensor):
                mine.copy_(values)
            else:
                mine.view(-1, values.values.shape[1])[values.ids] = values.values


def _as_tensor(payload: m.Payload, like: Tensor) -> Tensor:
    if isinstance(payload, Tensor):
        return payload
    if memoryview(payload).nbytes != like.nbytes:
        raise ProtocolError(
            f"a slice of {like.nbytes} bytes came back with {memoryview(payload).nbytes} bytes"
        )
    return torch.frombuffer(payload, dtype=like.dtype) if like.numel() else like
