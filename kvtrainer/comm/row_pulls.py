"""Some rows of keys, fetched from the servers that hold them: only these travel."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.errors import DeadlineError, KVStoreError, ProtocolError, from_wire
from kvstore_server.plan import row_numel
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import KEYS_PER_MESSAGE, located
from kvstore_server.reduction import torch_dtype
from kvtrainer.comm.session import Session
from kvtrainer.comm.tables import RemoteTable

IDS_PER_MESSAGE = 240_000
"""Of 4 bytes each; with what else is in it, the message fits a frame."""
BYTES_PER_ANSWER = 64 << 20
"""Of values: a server gathers all that one message asks for at once."""


class RowsWanted(NamedTuple):
    """Some rows of one key."""

    table: RemoteTable
    key: int
    """Its index in the plan; its slices hold whole rows."""
    ids: Tensor
    """int64, distinct and ascending."""


class _Some(NamedTuple):
    """Rows of one slice: which, and where they go."""

    slice: int
    slot: int
    position: int
    ids: Tensor
    """From the first row of the segment."""
    out: Tensor


@dataclass
class _Request:
    """One message and what it is still to be answered with."""

    server: int
    table: RemoteTable
    rows: list[_Some] = field(default_factory=list)
    waiting: dict[int, Tensor] = field(default_factory=dict)
    """Slot → where its rows go."""
    size: int = 0
    nbytes: int = 0
    version: int = sys.maxsize
    """The lowest of the weights that came."""

    def takes(self, some: _Some) -> bool:
        is_small = self.size + len(some.ids) <= IDS_PER_MESSAGE and len(self.rows) < KEYS_PER_MESSAGE
        return (
            is_small and self.nbytes + some.out.nbytes <= BYTES_PER_ANSWER and some.slot not in self.waiting
        )

    def add(self, some: _Some) -> None:
        self.rows.append(some)
        self.waiting[some.slot] = some.out
        self.size += len(some.ids)
        self.nbytes += some.out.nbytes

    def body(self, timeout: float) -> m.PullRows:
        wanted = tuple((some.slice, some.position, len(some.ids)) for some in self.rows)
        ids = torch.cat([some.ids for some in self.rows]).numpy().astype("<i4").tobytes()
        return m.PullRows(self.table.numbers[self.server], wanted, ids, timeout)

    def take(self, weights: m.Weights) -> None:
        """Bring the rows of some slices to their places; rows that came before are the same."""
        sources, which, starts = located(weights.payloads, weights.parts[:, 3])
        for at, (slot, version, kind, nbytes) in enumerate(weights.parts.tolist()):
            out = self.waiting.get(slot)
            if out is None:
                continue
            if kind != m.VALUES or nbytes != out.nbytes:
                raise ProtocolError(
                    f"{out.nbytes} bytes of slice {slot} of {self.table.name!r} were asked for, but {nbytes} came, of "
                    f"kind {kind}"
                )
            out.view(torch.uint8).view(-1).copy_(sources[which[at]][starts[at] : starts[at] + nbytes])
            self.version = min(self.version, version)
            del self.waiting[slot]


def pull_rows(session: Session, wanted: Sequence[RowsWanted]) -> list[Tensor]:
    """Fetch the present values of some rows of keys: (number of ids, elements of a row) each, on the CPU; blocks.

    Raises:
        KVStoreError: what a server answered.
        DeadlineError, ServerUnreachableError: a server did not answer in time.
    """
    outs = []
    requests: list[_Request] = []
    for table, key, ids in wanted:
        spec = table.plan.specs[key]
        outs.append(torch.empty(len(ids), row_numel(spec), dtype=torch_dtype(spec.dtype)))
        requests += _requests(table, key, ids, outs[-1])
    if requests:
        _fetch(session, requests)
    read: dict[tuple[RemoteTable, int], int] = {}
    for one in requests:
        where = (one.table, one.server)
        read[where] = min(one.version, read.get(where, one.version))
    for (table, server), version in read.items():
        table.note_read(server, version)
    return outs


def _requests(table: RemoteTable, key: int, ids: Tensor, out: Tensor) -> list[_Request]:
    by_server: dict[int, list[_Request]] = {}
    for server, some in _by_slice(table, key, ids, out):
        batches = by_server.setdefault(server, [])
        if not batches or not batches[-1].takes(some):
            batches.append(_Request(server, table))
        batches[-1].add(some)
    return [one for batches in by_server.values() for one in batches]


def _by_slice(table: RemoteTable, key: int, ids: Tensor, out: Tensor) -> Iterator[tuple[int, _Some]]:
    """The rows of each slice, in pieces that fit into a message, and the server that has them."""
    width = max(row_numel(table.plan.specs[key]), 1)
    for piece in table.plan.slices_with(key):
        position = next(at for at, segment in enumerate(piece.segments) if segment.key == key)
        segment = piece.segments[position]
        first, end = segment.key_start // width, (segment.key_start + segment.numel) // width
        low, high = torch.searchsorted(ids, torch.tensor([first, end])).tolist()
        for at in range(low, high, IDS_PER_MESSAGE):
            part = slice(at, min(at + IDS_PER_MESSAGE, high))
            yield (
                piece.server,
                _Some(piece.index, table.slot_of(piece), position, ids[part] - first, out[part]),
            )


def _fetch(session: Session, requests: Sequence[_Request]) -> None:
    """Send all requests and wait until all are answered; repeats those to servers that fall silent."""
    timeout, started = session.options.timeout, session.clock()
    failures: list[KVStoreError] = []
    numbers: dict[int, _Request] = {}

    def take(request: _Request, reply: m.ReplyBody) -> None:
        if isinstance(reply, m.Failed):
            failures.append(from_wire(reply.code, reply.text))
        elif isinstance(reply, m.Weights):
            request.take(reply)

    def repeat(now: float) -> None:
        for number, request in numbers.items():
            if request.waiting and session.is_silent(request.server, started, now):
                session.send(request.server, number, bodies[number])

    def is_over() -> bool:
        return bool(failures) or not any(request.waiting for request in numbers.values())

    for request in requests:
        numbers[session.next_number(lambda _, reply, request=request: take(request, reply))] = request  # type: ignore[misc]
    bodies = {number: request.body(timeout) for number, request in numbers.items()}
    try:
        for number, request in numbers.items():
            session.send(request.server, number, bodies[number])
        limit = started + timeout + session.options.dead_after
        session.wait(is_over, limit, repeat, lambda: {one.server for one in requests if one.waiting})
    except DeadlineError as error:
        raise error if type(error) is not DeadlineError else _too_late(session, requests) from None
    finally:
        for number in numbers:
            session.forget(number)
    if failures:
        raise failures[0]


def _too_late(session: Session, requests: Sequence[_Request]) -> DeadlineError:
    late = [request for request in requests if request.waiting]
    servers = ", ".join(session.describe(server) for server in sorted({request.server for request in late}))
    return DeadlineError(
        f"{servers} did not send the rows of {late[0].table.name!r} within {session.options.timeout:g} s; is it "
        "overloaded? (timeout=… of the kvstore or KVSTORE_TIMEOUT raises the limit)"
    )
