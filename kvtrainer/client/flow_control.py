"""Slices cut into parts. Servers sum, update and answer the first ones while the last are on their way.

Parts are smaller the less a server has of what is under way: the time in which a link carries nothing one way is about
that of one part. Where tables follow each other, the next one fills that time.

Parts wait in this process until earlier ones are answered. One is answered with new weights when all workers have given
it. So no worker gets far ahead of the others on any server, and none keeps a link busy with what nobody can use yet.
What is urgent waits for nothing that is less so, and finds no long queue in the network. Where a round is not answered
part by part, because some worker is late or has announced nothing, the rest of it goes after a while, and some of the
next rounds go as a whole: twice as many each time that this happens. While workers still compute the round, one of them
is often late, and the next rounds are not changed for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import divided

_STEP = 4096
"""Bytes, a page: the length of the longest parts of a round is rounded up to a multiple of it."""
_WHOLE = 1024
"""Elements of whose multiples parts are: whole lines, in whole units of every kernel."""
_LEAST, LONGEST = 8 * _STEP, 256 * _STEP
"""Bytes of the smallest parts, for each costs some time; and of the longest ones, which keep a fast link busy."""
_PARTS = 24
"""Parts of what is under way to a server. While the first goes up and the last comes down, the other way is idle; more
of them take more time of processors than they save on a link of 1 Gb/s."""
STALL = 0.25
"""Seconds without an answer after which the rest of a round goes."""
_UNDER_WAY, _WITH_EAGER = 3, 2
"""Parts of a table that are on their way at once: one up, one down, and one so that neither way waits for the slowest
worker; where parts of another table are on their way, those do as well."""
_WHILE_LEFT = 48 * 1024
"""Elements that may be on their way in any case, in short parts, while a worker computes and takes no answers."""
_MOST_SKIPPED = 64


def size_of_parts(share: int) -> int:
    """Return the bytes of a slice's part for a server to which so many are under way."""
    return min(max(-(-share // (_PARTS * _STEP)) * _STEP, _LEAST), LONGEST)


def cut(body: m.Contribute, share: int, itemsize_of: Callable[[int], int | None]) -> Iterator[m.Contribute]:
    """Yield messages that bring slices, without commits, and long ones in parts.

    Args:
        share: How many bytes are under way to the server.
        itemsize_of: Slot → bytes of one element of its slice, as it is sent; None: it cannot be cut.
    """
    most = size_of_parts(share)
    for one in divided(body):
        slot, _, _, nbytes = one.pushes[0].tolist()
        size = itemsize_of(slot) if len(one.pushes) == 1 and nbytes > most else None
        if size is None:
            yield one
            continue
        raw, length = one.payloads[0].view(torch.uint8), max(most // (size * _WHOLE), 1) * _WHOLE * size
        for begin in range(0, nbytes, length):
            part, pushes = raw[begin : begin + length], one.pushes.copy()
            pushes[0, 0] |= (begin + len(part)) // size << m.PART
            pushes[0, 3] = len(part)
            yield replace(one, pushes=pushes, payloads=(part,))


class Backoff:
    """Rounds that do without something after it went wrong: one at first, and twice as many each time."""

    def __init__(self) -> None:
        self._next, self._left = 1, 0

    def fail(self) -> None:
        """Note that it went wrong."""
        self._left, self._next = self._next, min(2 * self._next, _MOST_SKIPPED)

    def succeed(self) -> None:
        """Note that it went well: the next time that it does not, one round does without it."""
        self._next = 1

    def skips(self) -> bool:
        """Tell whether the round that begins does without it."""
        is_skipped = self._left > 0
        self._left -= is_skipped
        return is_skipped


class Flight:
    """How much of a slice is on its way, in elements from its beginning."""

    __slots__ = ("answered", "priority", "round", "sent")

    def __init__(self, round_: int, priority: int) -> None:
        self.round, self.priority = round_, priority
        self.sent = self.answered = 0


class Window:
    """The parts that are on their way to one server.

    A part waits for those that are at least as urgent as it is, on every worker alike. Were it to wait for less urgent
    ones, too, workers that compute at different speeds would send different ones, and wait for each other.
    """

    def __init__(self) -> None:
        self.until: float | None = None
        """When what is held back goes all the same, unless an answer comes; None while nothing is."""
        self.is_left = False
        """The worker computes, and takes no answers meanwhile."""
        self._is_on = False
        self._is_computing = False
        """Workers still compute the gradients of the round, so that one is late says nothing of the next round."""
        self._flights: dict[int, Flight] = {}
        """Slot → what is known of the last round of it of which a part was sent."""
        self._ahead: dict[int, int] = {}
        """Priority → elements that were sent and not answered."""
        self._longest, self._most = 0, _UNDER_WAY
        """Elements of the longest part, and how many parts may be on their way."""
        self._stalls = Backoff()
        """Rounds that go as a whole, because earlier ones have stalled."""

    def holds(self, body: m.RequestBody, priority: int, now: float) -> bool:
        """Tell whether a message has to wait: a part, while enough as urgent ones are on their way."""
        part = _part(body) if self._is_on else None
        numel = 0 if part is None else part.end - self._sent_of(part)
        self._longest = max(self._longest, numel)
        ahead = sum([count for other, count in self._ahead.items() if other >= priority]) if numel > 0 else 0
        if ahead + numel <= max(self._longest * self._most, _WHILE_LEFT * self.is_left):
            return False
        if self.until is None:
            self.until = now + STALL
        return True

    def has_stalled(self, now: float) -> bool:
        """Hold nothing back any more if no answer has come for too long; return whether that is so."""
        if self.until is None or now < self.until:
            return False
        self._is_on, self.until = False, None
        self._flights, self._ahead = {}, {}
        if not self._is_computing:
            self._stalls.fail()
        return True

    def sent(self, body: m.RequestBody, priority: int) -> None:
        """Note that a message has gone."""
        if isinstance(body, m.Contribute) and len(body.commits) and body.commits[0, 5] & m.ANNOUNCES:
            self._is_on = not self._stalls.skips()
            self._is_computing = bool(body.commits[0, 5] & m.MAY_CHANGE)
            self.until = None
            self._most = _WITH_EAGER if self._ahead else _UNDER_WAY
            self._longest = self._longest if self._ahead else 0
        elif self._is_on and (part := _part(body)) is not None:
            flight = self._flights.get(part.slot)
            if flight is None or flight.round != part.round:
                if flight is not None:
                    self._count(flight.priority, flight.answered - flight.sent)
                flight = self._flights[part.slot] = Flight(part.round, priority)
            self._count(flight.priority, max(part.end - flight.sent, 0))
            flight.sent = max(part.end, flight.sent)

    def answered(self, body: m.ReplyBody) -> None:
        """Note what a server says."""
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
        """Add to the elements of a priority that are on their way."""
        self._ahead[priority] = self._ahead.get(priority, 0) + change
        if not self._ahead[priority]:
            del self._ahead[priority]

    def _sent_of(self, part: SliceChunk) -> int:
        """Return how many elements of a part's slice were sent in its round."""
        flight = self._flights.get(part.slot)
        return flight.sent if flight is not None and flight.round == part.round else 0


class SliceChunk(NamedTuple):
    """A part of a slice that a message brings."""

    slot: int
    end: int
    """The element of the slice before which it ends."""
    round: int


def _part(body: m.RequestBody) -> SliceChunk | None:
    """Return the part of a slice that a message brings; None of any other message."""
    if not isinstance(body, m.Contribute) or len(body.pushes) != 1:
        return None
    slot, end = m.place_of(int(body.pushes[0, 0]))
    return SliceChunk(slot, end, int(body.pushes[0, 1])) if end else None
