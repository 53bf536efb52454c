"""Replies of the engine, made from what there is to say."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_server.errors import KVStoreError, to_wire
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import payload_size
from kvstore_server.row_replies import changed_parts, pulled_parts
from kvstore_server.shard import Partial
from kvstore_server.table import Given, RoundEnd, Table, Waiter

Parts = tuple[m.WeightsPart, ...]


def parts_of(table: Table, rank: int) -> Parts:
    """The present weights of all slices of a table that are here, except row-sparse ones, for a rank; not copies."""
    return _sent(table, rank, _whole(table))


def _whole(table: Table) -> Parts:
    number, version, shard, unit = table.number, table.version, table.shard, table.unit
    pieces = table.plan.resident_slices_of(unit.server)
    return tuple([m.WeightsPart(number, p.index, version, shard.visible(unit, p.index)) for p in pieces])


def rows_for(table: Table, rank: int, pull: m.PullRows) -> Parts:
    """The rows that a rank asks for. Raises as `pulled_parts`."""
    return _sent(table, rank, pulled_parts(table.shard, table.unit, table.number, table.version, pull))


def _sent(table: Table, rank: int, parts: Parts) -> Parts:
    table.note_read(rank)
    for part in parts:
        table.bytes_out += payload_size(part.payload)
    return parts


def held(table: Table, round_: int, waiter: Waiter, partials: Sequence[Partial]) -> list[m.Outgoing]:
    """What there is to decide about in a round."""
    told = tuple([(one.slice, one.value) for one in partials])
    return reply(waiter, m.Held(table.number, round_, told, all(one.is_finite for one in partials)))


def outcomes(table: Table, ended: Given) -> list[m.Outgoing]:
    """How a round of all ranks ended, which did not fail, for each that waits."""
    out: list[m.Outgoing] = []
    whole: Parts | None = None
    for rank, mine in ended:
        if mine.commit is None or mine.waiter is None:
            continue
        end = table.end_of(rank, mine.commit.round)
        if whole is None and mine.commit.want_weights and not mine.commit.delta:
            whole = _whole(table)  # the same for all of them
        out += outcome(table, rank, mine.commit, mine.waiter, end, whole)
    return out


def outcome(
    table: Table, rank: int, commit: m.Commit, waiter: Waiter, end: RoundEnd, whole: Parts | None = None
) -> list[m.Outgoing]:
    """How the round of a commit ended, which did not fail: first what was special about it, then the weights.

    They are those of all slices, `whole` if they were looked up, or what has changed since those that its worker holds.
    """
    out: list[m.Outgoing] = []
    if commit.joined:
        out += reply(waiter, m.InForce(table.number, commit.round, end.hyper, end.is_over))
    if end.left_out:
        out += reply(waiter, m.Absent(table.number, commit.round, end.left_out))
    if end.is_skipped:
        out += reply(waiter, m.Vetoed(table.number, commit.round, end.vetoes))
    elif commit.want_weights:
        if not table.mode.is_sync:  # by the time that the weights may be read they can be newer
            out += reply(waiter, m.Done(((table.number, commit.round, end.version),)))
        if commit.delta:
            parts = changed_parts(table.shard, table.unit, table.number, table.version, commit.version)
        else:
            parts = _whole(table) if whole is None else whole
        return out + reply(waiter, m.Weights(_sent(table, rank, parts)))
    return out + reply(waiter, m.Done(((table.number, commit.round, end.version),)))


def tell(
    table: Table, number: int, following: int, waiters: list[Waiter], error: KVStoreError
) -> list[m.Outgoing]:
    """Tell everybody who waits for a round of a table that it has failed, and which one comes next."""
    return [failed(w.peer, w.number, error, table.number, number, following) for w in waiters]


def reply(waiter: Waiter, body: m.ReplyBody) -> list[m.Outgoing]:
    """One reply to one request."""
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, body))]


def failed(
    peer: bytes, number: int, error: KVStoreError, table: int = -1, round_: int = -1, next_round: int = -1
) -> m.Outgoing:
    """A request, or with a table one round of it, has failed."""
    code, text = to_wire(error)
    return m.Outgoing(peer, m.Reply(number, m.Failed(code, text, table, round_, next_round)))
