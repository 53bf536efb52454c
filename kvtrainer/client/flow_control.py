"""Flow control over a network: slices are cut into parts, and only some parts are on their way at a time.

Servers sum, update and answer the first parts while the last are still on their way. Parts are smaller the less a
server has of what is under way, because the time in which a link carries nothing one way is about that of one part.
Where tables follow each other, the next one fills that time.

A `Window` per server holds parts back until earlier ones are answered with new weights, which happens when all
workers have sent them. So no worker gets far ahead of the others, no link is busy with what no server can use yet,
and an urgent slice finds no long queue in the network: it waits only for parts that are at least as urgent.

If a round is not answered part by part, because a worker is late or has announced nothing, the rest of it goes after
`STALL` seconds, and some of the next rounds go as a whole: twice as many each time. While workers still compute the
gradients of the round, a late worker is normal and has no such consequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import divided

_STEP = 4096
"""Bytes (a page). The length of parts is rounded up to a multiple of it."""
_WHOLE = 1024
"""Elements. Parts are multiples of it, so that they are whole lines and whole units of every kernel."""
_LEAST, LONGEST = 8 * _STEP, 256 * _STEP
"""Bytes of the shortest parts, since each costs some time, and of the longest, which keep a fast link busy."""
_PARTS = 24
"""What is under way to a server is cut into this many parts. While the first goes up and the last comes down, the other
direction is idle; more parts cost more CPU time than they save on a link of 1 Gb/s."""
STALL = 0.25
"""Seconds without an answer after which the rest of a round goes."""
_MOST_IN_FLIGHT, _WITH_EAGER = 3, 2
"""Parts of a table that are on their way at once: one up, one down, and one so that neither direction waits for the
slowest worker. If parts of another table are on their way, these count for the third."""
_WHILE_LEFT = 48 * 1024
"""Elements that may be on their way in any case, in short parts, while a worker computes and takes no answers."""
_MOST_SKIPPED = 64


def size_of_parts(share: int) -> int:
    return min(max(-(-share // (_PARTS * _STEP)) * _STEP, _LEAST), LONGEST)


def cut(body: m.Contribute, share: int, itemsize_of: Callable[[int], int | None]) -> Iterator[m.Contribute]:
    """Yield a message that brings slices, without commits, as one message for each slice, and long ones in parts.

    Args:
        share: How many bytes are under way to the server.
        itemsize_of: Slot → bytes of one element of its slice as it is sent; None if it cannot be cut.
    """
    most = size_of_parts(share)
    for one in divided(body):
        slot, _, _, nbytes = one.pushes[0].tolist()
        size = itemsize_of(slot) if len(one.pushes) == 1 and nbytes > most else None
        if size is None:
            yield one
            continue
        # Parts are views of the payload. Each names the element before which it ends.
        raw, length = one.payloads[0].view(torch.uint8), max(most // (size * _WHOLE), 1) * _WHOLE * size
        for begin in range(0, nbytes, length):
            part, pushes = raw[begin : begin + length], one.pushes.copy()
            pushes[0, 0] |= (begin + len(part)) // size << m.PART
            pushes[0, 3] = len(part)
            yield replace(one, pushes=pushes, payloads=(part,))


class Backoff:
    """Counts rounds that do without something after it went wrong: one at first, and twice as many each time."""

    def __init__(self) -> None:
        self._next, self._left = 1, 0

    def fail(self) -> None:
        self._left, self._next = self._next, min(2 * self._next, _MOST_SKIPPED)

    def succeed(self) -> None:
        """Reset: the next failure skips one round."""
        self._next = 1

    def skips(self) -> bool:
        is_skipped = self._left > 0
        self._left -= is_skipped
        return is_skipped


class Flight:
    """How many elements of a slice were sent and answered, from its beginning."""

    __slots__ = ("answered", "priority", "round", "sent")

    def __init__(self, round_: int, priority: int) -> None:
        self.round, self.priority = round_, priority
        self.sent = self.answered = 0


class Window:
    """The parts that are on their way to one server.

    A part waits only for parts that are at least as urgent, on every worker alike. Otherwise workers of different
    speed would send different parts and wait for each other.
    """

    def __init__(self) -> None:
        self.until: float | None = None
        """When parts that are held back go anyway, unless an answer comes; None while none are."""
        self.polls_only = False
        """The worker computes and receives no answers meanwhile."""
        self._is_on = False
        self._is_computing = False
        """Workers still compute the gradients of the round, so a late one says nothing about the next round."""
        self._flights: dict[int, Flight] = {}
        """Slot → the last round in which a part of its slice was sent."""
        self._queued: dict[int, int] = {}
        """Priority → elements that were sent and not answered."""
        self._longest, self._most = 0, _MOST_IN_FLIGHT
        """Elements of the longest part, and how many parts may be on their way."""
        self._stalls = Backoff()
        """Rounds that go as a whole, because earlier ones have stalled."""

    def holds(self, body: m.RequestBody, priority: int, now: float) -> bool:
        """Return whether a message has to wait: a part, while enough parts of its urgency are on their way."""
        part = _part(body) if self._is_on else None
        numel = 0 if part is None else part.end - self._sent_of(part)
        self._longest = max(self._longest, numel)
        queued = (
            sum([count for other, count in self._queued.items() if other >= priority]) if numel > 0 else 0
        )
        if queued + numel <= max(self._longest * self._most, _WHILE_LEFT * self.polls_only):
            return False
        if self.until is None:
            self.until = now + STALL
        return True

    def has_stalled(self, now: float) -> bool:
        """Stop holding parts back if no answer has come for too long; returns whether that has happened."""
        if self.until is None or now < self.until:
            return False
        self._is_on, self.until = False, None
        self._flights, self._queued = {}, {}
        if not self._is_computing:
            self._stalls.fail()
        return True

    def sent(self, body: m.RequestBody, priority: int) -> None:
        if isinstance(body, m.Contribute) and len(body.commits) and body.commits[0, 5] & m.DECLARES_INTENT:
            # An announced round begins. Others are not answered in parts, so nothing is held back for them.
            self._is_on = not self._stalls.skips()
            self._is_computing = bool(body.commits[0, 5] & m.TENTATIVE)
            self.until = None
            self._most = _WITH_EAGER if self._queued else _MOST_IN_FLIGHT
            self._longest = self._longest if self._queued else 0
        elif self._is_on and (part := _part(body)) is not None:
            flight = self._flights.get(part.slot)
            if flight is None or flight.round != part.round:
                if flight is not None:
                    self._count(flight.priority, flight.answered - flight.sent)
                flight = self._flights[part.slot] = Flight(part.round, priority)
            self._count(flight.priority, max(part.end - flight.sent, 0))
            flight.sent = max(part.end, flight.sent)

    def answered(self, body: m.ReplyBody) -> None:
        if not self._flights or not isinstance(body, m.Weights):
            return
        for slot, end in map(m.place_of, body.parts[:, 0].tolist()):
            flight = self._flights.get(slot)
            if flight is not None:
                last = min(end, flight.sent) if end else flight.sent
                self._count(flight.priority, min(flight.answered - last, 0))
                flight.answered = max(flight.answered, last)
        if self._is_on:
            self._stalls.succeed()
        self.until = None

    def _count(self, priority: int, change: int) -> None:
        self._queued[priority] = self._queued.get(priority, 0) + change
        if not self._queued[priority]:
            del self._queued[priority]

    def _sent_of(self, part: SliceChunk) -> int:
        flight = self._flights.get(part.slot)
        return flight.sent if flight is not None and flight.round == part.round else 0


class SliceChunk(NamedTuple):
    slot: int
    end: int
    """The element of the slice before which it ends."""
    round: int


def _part(body: m.RequestBody) -> SliceChunk | None:
    if not isinstance(body, m.Contribute) or len(body.pushes) != 1:
        return None
    slot, end = m.place_of(int(body.pushes[0, 0]))
    return SliceChunk(slot, end, int(body.pushes[0, 1])) if end else None
