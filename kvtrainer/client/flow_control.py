"""Flow control over a network: slices are cut into parts, and only some parts are in flight at a time.

How it works:

- **Parts.** A server sums, updates and answers the first part of a slice while later ones are still on the wire. The
  less data is in flight to a server, the smaller its parts: at the start and end of a transfer one direction of the
  link is idle for about the time of one part. If tables follow each other, the next one fills that time.
- **Windows.** A `FlowWindow` per server holds parts back until earlier ones are answered with new weights, and they are
  answered when all workers have sent them. So no worker gets far ahead of the others, no link carries what no server
  can use yet, and an urgent slice finds no long queue in the network.
- **Stalls.** A round may not be answered part by part: a worker is late, or has not declared its intent. If no answer
  comes within `STALL` seconds of the first part that is held back, the window switches off: the rest of the round goes
  at once, and the next round goes without parts being held back. After each further stall twice as many rounds do, at
  most 64; an answer in a windowed round resets that to one. While workers still compute the gradients of the round, a
  late worker is normal, and a stall has no effect on later rounds.

Invariants: a part waits only for parts that are at least as urgent, on every worker alike, so workers never wait for
each other in a cycle. The clock is an argument. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import divided

_PAGE_BYTES = 4096
"""The length of parts in bytes is rounded up to a multiple of this."""
_PART_MULTIPLE = 1024
"""Elements. Parts are multiples of it, so that they are whole cache lines and whole units of every kernel."""
_MIN_PART_BYTES = 8 * _PAGE_BYTES
"""Shorter parts would cost more time for each message than they save."""
MAX_PART_BYTES = 256 * _PAGE_BYTES
"""Parts of this length keep a fast link busy."""
_PARTS = 24
"""What is in flight to a server is cut into this many parts. While the first goes up and the last comes down, the other
direction is idle; more parts cost more CPU time than they save on a link of 1 Gb/s."""
STALL = 0.25
"""Seconds without an answer after which the parts that are held back go."""
_MAX_IN_FLIGHT = 3
"""Parts of a table that are in flight at once: one up, one down, and one so that neither direction waits for the
slowest worker."""
_MAX_WITH_OTHERS = 2
"""The same where parts of another table are in flight: these count for the third."""
_IN_FLIGHT_WHILE_COMPUTING = 48 * 1024
"""Elements that may be in flight in any case, in short parts, while a worker computes and takes no answers."""
_MAX_SKIPPED = 64
"""Rounds. A `StallBackoff` skips no more of them in a row."""


def part_bytes_in_flight(bytes_in_flight: int) -> int:
    """Return the length of parts in bytes, given how much is in flight to their server in all."""
    pages = -(-bytes_in_flight // (_PARTS * _PAGE_BYTES))
    return min(max(pages * _PAGE_BYTES, _MIN_PART_BYTES), MAX_PART_BYTES)


def cut(
    body: m.Contribute, bytes_in_flight: int, itemsize_of: Callable[[int], int | None]
) -> Iterator[m.Contribute]:
    """Yield a message that brings slices, without commits, as one message for each slice, and long ones in parts.

    Args:
        bytes_in_flight: What all open rounds send to the server.
        itemsize_of: Slot → bytes of one element of its slice as it is sent; None if it cannot be cut.
    """
    most = part_bytes_in_flight(bytes_in_flight)
    for one in divided(body):
        slot, _, _, nbytes = one.pushes[0].tolist()
        itemsize = itemsize_of(slot) if len(one.pushes) == 1 and nbytes > most else None
        if itemsize is None:
            yield one
            continue
        # Parts are views of the payload. The first word of a push has the slot in its low bits and, above them, the
        # element of the slice before which the part ends; 0 there is a whole slice. The fourth word is its bytes.
        raw = one.payloads[0].view(torch.uint8)
        length = max(most // (itemsize * _PART_MULTIPLE), 1) * _PART_MULTIPLE * itemsize
        for begin in range(0, nbytes, length):
            part, pushes = raw[begin : begin + length], one.pushes.copy()
            pushes[0, m.PUSH_SLOT] |= (begin + len(part)) // itemsize << m.PART
            pushes[0, m.PUSH_NBYTES] = len(part)
            yield replace(one, pushes=pushes, payloads=(part,))


class StallBackoff:
    """Counts rounds that do without something after it failed: one at first, and twice as many after each failure."""

    def __init__(self) -> None:
        self._next, self._left = 1, 0

    def fail(self) -> None:
        self._left, self._next = self._next, min(2 * self._next, _MAX_SKIPPED)

    def reset(self) -> None:
        """Make the next failure skip one round only. Rounds that are still to be skipped stay so."""
        self._next = 1

    def take_skip(self) -> bool:
        """Return whether this round does without it, and count that round. Call once for each round."""
        is_skipped = self._left > 0
        self._left -= is_skipped
        return is_skipped


class SliceProgress:
    """How many elements of a slice were sent and answered in a round, from the slice's beginning."""

    __slots__ = ("answered", "priority", "round", "sent")

    def __init__(self, round_: int, priority: int) -> None:
        self.round, self.priority = round_, priority
        self.sent = self.answered = 0


class FlowWindow:
    """The parts that are in flight to one server, and whether the next one has to wait."""

    def __init__(self) -> None:
        self.release_at: float | None = None
        """When parts that are held back go anyway, unless an answer comes; None while no part is held back."""
        self.polls_only = False
        """The worker computes and takes answers only now and then."""
        self._is_windowed = False
        """Whether parts of the round are held back at all: it was declared, and is not skipped after a stall."""
        self._is_computing = False
        """Workers still compute the gradients of the round, so a late one says nothing about the next round."""
        self._slices: dict[int, SliceProgress] = {}
        """Slot → the last round in which a part of its slice was sent."""
        self._in_flight: dict[int, int] = {}
        """Priority → elements that were sent and not answered; no entry for 0."""
        self._longest = 0
        """Elements of the longest part."""
        self._most = _MAX_IN_FLIGHT
        """How many parts may be in flight."""
        self._stalls = StallBackoff()
        """Rounds that are not windowed, because earlier ones have stalled."""

    def must_hold(self, body: m.RequestBody, priority: int, now: float) -> bool:
        """Return whether a message has to wait, because enough parts of at least its priority are in flight.

        A first message that waits starts the time after which the round counts as stalled (`release_at`). Messages
        other than parts never wait.
        """
        part = _partial_push(body) if self._is_windowed else None
        numel = 0 if part is None else part.end - self._sent_of(part)
        self._longest = max(self._longest, numel)
        ahead = (
            sum([count for other, count in self._in_flight.items() if other >= priority]) if numel > 0 else 0
        )
        if ahead + numel <= max(self._longest * self._most, _IN_FLIGHT_WHILE_COMPUTING * self.polls_only):
            return False
        if self.release_at is None:
            self.release_at = now + STALL
        return True

    def end_if_stalled(self, now: float) -> bool:
        """Stop holding parts back if no answer has come for too long; returns whether that has happened."""
        if self.release_at is None or now < self.release_at:
            return False
        self._is_windowed, self.release_at = False, None
        self._slices, self._in_flight = {}, {}
        if not self._is_computing:
            self._stalls.fail()
        return True

    def sent(self, body: m.RequestBody, priority: int) -> None:
        """Record a message that was sent: a declared intent begins a round, and a part of a slice is in flight."""
        if (
            isinstance(body, m.Contribute)
            and len(body.commits)
            and body.commits[0, m.COMMIT_FLAGS] & m.DECLARES_INTENT
        ):
            # A declared round begins. Others are not answered in parts, so nothing is held back for them.
            self._is_windowed = not self._stalls.take_skip()
            self._is_computing = bool(body.commits[0, m.COMMIT_FLAGS] & m.TENTATIVE)
            self.release_at = None
            self._most = _MAX_WITH_OTHERS if self._in_flight else _MAX_IN_FLIGHT
            self._longest = self._longest if self._in_flight else 0
        elif self._is_windowed and (part := _partial_push(body)) is not None:
            progress = self._slices.get(part.slot)
            if progress is None or progress.round != part.round:
                if progress is not None:
                    # What was not answered of the slice's former round is in flight no longer.
                    self._add_in_flight(progress.priority, progress.answered - progress.sent)
                progress = self._slices[part.slot] = SliceProgress(part.round, priority)
            if part.end > progress.sent:
                self._add_in_flight(progress.priority, part.end - progress.sent)
                progress.sent = part.end

    def answered(self, body: m.ReplyBody) -> None:
        """Record new weights that have come: the parts that they answer are no longer in flight."""
        if not self._slices or not isinstance(body, m.Weights):
            return
        for slot, end in map(m.unpack_slot, body.parts[:, m.PART_SLOT].tolist()):
            progress = self._slices.get(slot)
            if progress is not None:
                # Weights up to `end`, or of the whole slice, may be those of more than this worker has sent.
                last = min(end, progress.sent) if end else progress.sent
                if last > progress.answered:
                    self._add_in_flight(progress.priority, progress.answered - last)
                    progress.answered = last
        if self._is_windowed:
            self._stalls.reset()
        self.release_at = None

    def _add_in_flight(self, priority: int, numel: int) -> None:
        """Count elements that were sent, or, if negative, that no longer are in flight."""
        self._in_flight[priority] = self._in_flight.get(priority, 0) + numel
        if not self._in_flight[priority]:
            del self._in_flight[priority]

    def _sent_of(self, part: PartialPush) -> int:
        progress = self._slices.get(part.slot)
        return progress.sent if progress is not None and progress.round == part.round else 0


class PartialPush(NamedTuple):
    """A part of a slice in a message that pushes it."""

    slot: int
    end: int
    """The element of the slice before which it ends."""
    round: int


def _partial_push(body: m.RequestBody) -> PartialPush | None:
    if not isinstance(body, m.Contribute) or len(body.pushes) != 1:
        return None
    slot, end = m.unpack_slot(int(body.pushes[0, m.PUSH_SLOT]))
    return PartialPush(slot, end, int(body.pushes[0, m.PUSH_ROUND])) if end else None
