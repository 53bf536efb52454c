"""Replies of the engine, made from what there is to say."""

from __future__ import annotations

from kvstore_server.errors import KVStoreError, to_wire
from kvstore_server.protocol import messages as m
from kvstore_server.table import Table, Waiter


def parts_of(table: Table) -> tuple[m.WeightsPart, ...]:
    """The present weights of all slices of a table that are here; not copies."""
    number = table.rounds.number - 1
    return tuple(
        m.WeightsPart(table.number, piece.index, number, table.dense.visible(piece.index))
        for piece in table.dense.slices
    )


def outcome(table: Table, commit: m.Commit, waiter: Waiter, weights: m.Weights) -> list[m.Outgoing]:
    """How the round of a commit ended, which did not fail: first what was special about it, then the weights."""
    out: list[m.Outgoing] = []
    if table.left_out:
        out += reply(waiter, m.Absent(table.number, commit.round, table.left_out))
    if table.vetoes:
        out += reply(waiter, m.Vetoed(table.number, commit.round, table.vetoes))
    elif commit.want_weights:
        return out + reply(waiter, weights)
    return out + reply(waiter, m.Done(((table.number, commit.round, table.rounds.number - 1),)))


def tell(table: Table, number: int, waiters: list[Waiter], error: KVStoreError) -> list[m.Outgoing]:
    """Tell everybody who waits for a round of a table that it has failed."""
    following = table.rounds.number
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
