"""Replies of an engine in the simulation, on their way to processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support import said as m


@dataclass(frozen=True)
class Delivery:
    """A reply on its way: to which process, and what."""

    process: int
    reply: m.Reply


def copies(outgoing: list[m.Outgoing]) -> list[Delivery]:
    """What goes over the wire is a copy: later updates must not reach into it."""
    return [Delivery(int(o.peer), m.Reply(o.reply.number, _copied(o.reply.body))) for o in outgoing]


def _copied(body: m.ReplyBody) -> m.ReplyBody:
    if not isinstance(body, m.Weights):
        return body
    return m.Weights(
        tuple(m.WeightsPart(p.table, p.slice, p.version, torch.clone(p.payload)) for p in body.parts)
    )


def is_fencing(body: m.ReplyBody) -> bool:
    return isinstance(body, m.Failed) and body.code == "FencedError"


def token_in(out: list[Delivery]) -> int:
    """The token of the only reply; 0 if it is no Welcome."""
    bodies = [d.reply.body for d in out]
    return bodies[0].session if len(bodies) == 1 and isinstance(bodies[0], m.Welcome) else 0
