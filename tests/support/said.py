"""Messages as a test says them: one value for each slice and round, by table and slice; and from and to the real ones.

The names are those of `kvstore_server.protocol.messages`, so that a test may take this module in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvstore_server.engine import Engine
from kvstore_server.namespace import Namespace
from kvstore_server.protocol import messages as real
from kvstore_server.protocol.buffers import payload_bytes, payload_size
from kvstore_server.protocol.messages import (
    ROWS,
    VALUES,
    WHOLE,
    Abort,
    Absent,
    Command,
    Contribute,
    Failed,
    Gather,
    Gathered,
    GetState,
    Heartbeat,
    Held,
    Hello,
    Info,
    InForce,
    Leave,
    Outgoing,
    Pending,
    Profile,
    Pull,
    PullRows,
    Register,
    Registered,
    Reply,
    Request,
    Resolve,
    SetOptimizer,
    State,
    Stats,
    Vetoed,
    Welcome,
)
from kvstore_server.reduction import torch_dtype

__all__ = [
    "ROWS", "VALUES", "WHOLE", "Abort", "Absent", "Command", "Commit", "CommitBatch", "Contribute", "Done", "Failed",
    "Gather", "Gathered", "GetState", "Heartbeat", "Held", "Hello", "InForce", "Info", "Leave", "Missing", "Outgoing",
    "Pending", "Profile", "Pull", "PullRows", "Push", "PushBatch", "Register", "Registered", "Reply", "ReplyBody",
    "Request", "RequestBody", "Resolve", "SetOptimizer", "State", "Stats", "Vetoed", "Weights", "WeightsPart",
    "Welcome", "contribution", "handle", "said", "tick", "to_wire",
]  # fmt: skip

RequestBody = Any
ReplyBody = Any


class Push(NamedTuple):
    """One slice of a contribution."""

    table: int
    slice: int
    round: int
    generation: int
    payload: Any


@dataclass(frozen=True)
class PushBatch:
    """Several slices in one message."""

    pushes: tuple[Push, ...]
    form: bytes = b""


class Commit(NamedTuple):
    """The end of a rank's contribution to one round of one table."""

    table: int
    round: int
    manifest: tuple[tuple[int, int], ...]
    """(slice, generation) of every slice that takes part."""
    rescale: float | None
    want_weights: bool
    timeout: float
    veto: bool = False
    assign: bool = False
    joined: bool = False
    delta: bool = False
    version: int = -1
    hold: float = 0.0


@dataclass(frozen=True)
class CommitBatch:
    """Commits of several tables, with their last slices; factor, patience and norm are those of the first one."""

    commits: tuple[Commit, ...]
    hyper: bytes = b""
    absent: tuple[int, ...] = ()
    pushed: PushBatch = PushBatch(())


class WeightsPart(NamedTuple):
    """One slice of a table, or some of its rows."""

    table: int
    slice: int
    version: int
    payload: Any
    kind: int = WHOLE


@dataclass(frozen=True)
class Weights:
    """The slices of an answer, without their padding; not copies."""

    parts: tuple[WeightsPart, ...]


@dataclass(frozen=True)
class Done:
    """(table, round, version) of rounds that were applied."""

    rounds: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Missing:
    """The slices of a table that a commit lacks."""

    table: int
    round: int
    slices: tuple[int, ...]


def to_wire(body: RequestBody, space: Namespace | None) -> real.RequestBody:
    """What is sent for a message of a test."""
    if isinstance(body, PushBatch):
        return _contribute(CommitBatch((), pushed=body), space)
    return _contribute(body, space) if isinstance(body, CommitBatch) else body


def _contribute(batch: CommitBatch, space: Namespace | None) -> real.Contribute:
    pushes, payloads = [], []
    for table, slice_, round_, generation, payload in batch.pushed.pushes:
        slot, piece = _place(space, table, slice_)
        if not batch.pushed.form and piece is not None and payload_size(payload) == piece.nbytes:
            payload = _padded(payload, piece)
        payloads.append(payload)
        pushes.append((slot, round_, generation, payload_size(payload)))
    commits, flags = [], (real.WANTS_WEIGHTS, real.VETOES, real.ASSIGNS, real.HAS_JOINED, real.WANTS_DELTA)
    for one in batch.commits:
        said_so = (one.want_weights, one.veto, one.assign, one.joined, one.delta)
        bits = sum(flag for flag, is_said in zip(flags, said_so, strict=True) if is_said)
        given = (len(one.manifest), sum(generation for _, generation in one.manifest))
        commits.append((one.table, one.round, *given, one.version, bits))
    absent = tuple((one.table, key) for one in batch.commits for key in batch.absent)
    first = batch.commits[0] if batch.commits else Commit(0, 0, (), None, False, 0.0)
    return real.Contribute(
        real.matrix(pushes, real.PUSH_WORDS), tuple(payloads), real.matrix(commits, real.COMMIT_WORDS),
        batch.pushed.form, batch.hyper, absent, first.rescale, first.timeout, first.hold,
    )  # fmt: skip


def _place(space: Namespace | None, table: int, slice_: int) -> tuple[int, Any]:
    """The slot of a slice, and the slice; of one that is not there a slot that is not there either."""
    if space is None or not 0 <= table < len(space.tables) or slice_ not in space.tables[table].unit.slots:
        return 1 << 40, None
    unit = space.tables[table].unit
    at = unit.slots[slice_] - unit.first
    return int(space.rounds.slots.first[table]) + at, unit.slices[at]


def _padded(payload: Any, piece: Any) -> torch.Tensor:
    whole = torch.zeros(piece.length, dtype=torch_dtype(piece.dtype))
    values = payload if isinstance(payload, torch.Tensor) else torch.frombuffer(payload, dtype=whole.dtype)
    whole[: piece.used] = values
    return whole


def contribution(
    slices: Iterable[tuple[int, Any]],
    round_: int,
    table: int = -1,
    given: int = 0,
    generation: int = 0,
    **options: Any,
) -> real.Contribute:
    """Slices, as (slot, bytes); with a table, also the commit of its round, to which so many slices were given."""
    pushes = [(slot, round_, generation, payload_size(payload)) for slot, payload in slices]
    flags = options.pop("flags", 0)
    commits = [(table, round_, given, given * generation, -1, flags)] if table >= 0 else []
    payloads = tuple(payload for _, payload in slices)
    matrices = real.matrix(pushes, real.PUSH_WORDS), real.matrix(commits, real.COMMIT_WORDS)
    return real.Contribute(matrices[0], payloads, matrices[1], **options)


def said(body: real.ReplyBody, space: Namespace | None) -> ReplyBody:
    """An answer as tests look at it."""
    if isinstance(body, real.Done):
        return Done(tuple(map(tuple, body.rounds.tolist())))
    if isinstance(body, real.Missing):
        assert space is not None
        places = [space.place(slot) for slot in body.slots]
        return Missing(body.table, body.round, tuple(table.unit.slices[at].index for table, at in places))
    if not isinstance(body, real.Weights):
        return body
    assert space is not None
    parts, raw, end = [], [payload_bytes(payload) for payload in body.payloads], 0
    joined = raw[0] if len(raw) == 1 else memoryview(b"".join(raw))
    for at, (slot, version, kind, nbytes) in enumerate(body.parts.tolist()):
        table, position = space.place(slot)
        piece = table.unit.slices[position]
        payload = body.payloads[at] if len(raw) == len(body.parts) else joined[end : end + nbytes]
        if kind == WHOLE:
            if not isinstance(payload, torch.Tensor):
                payload = torch.frombuffer(payload, dtype=torch_dtype(piece.dtype))
            payload = payload[: piece.used]
        parts.append(WeightsPart(table.number, piece.index, version, payload, kind))
        end += nbytes
    return Weights(tuple(parts))


def handle(engine: Engine, peer: bytes, request: Request, now: float, namespace: str) -> list[Outgoing]:
    """Let an engine handle a request of a test, and answer as tests look at it."""
    sent = request._replace(body=to_wire(request.body, engine.namespaces.get(namespace)))
    return _all_said(engine.handle(peer, sent, now), engine, namespace)


def tick(engine: Engine, now: float, namespace: str) -> list[Outgoing]:
    """Let time pass for an engine."""
    return _all_said(engine.tick(now), engine, namespace)


def _all_said(outgoing: Iterable[Outgoing], engine: Engine, namespace: str) -> list[Outgoing]:
    space = engine.namespaces.get(namespace)
    return [Outgoing(o.peer, Reply(o.reply.number, said(o.reply.body, space))) for o in outgoing]
