"""Slices cut into parts. Servers sum, update and answer the first ones while the last are on their way.

Parts are smaller the less a server has of what is under way: the time in which a link carries nothing one way is about
that of one part. Where tables follow each other, the next one fills that time.

Parts wait in this process until earlier ones are answered. One is answered with new weights when all workers have given
it. So no worker gets far ahead of the others on any server, and none keeps a link busy with what nobody can use yet;
what is urgent finds no long queue in the network. Where a round is not answered part by part, because some worker is
late or has announced nothing, the rest of it goes after a while, and some of the next rounds go as a whole: twice as
many each time that this happens. While workers still compute the round, one of them is often late, and the next rounds
are not changed for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

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
_UNDER_WAY, _BESIDE_OTHERS = 3, 2
"""Parts of a table that are on their way at once: one up, one down, and one so that neither way waits for the slowest
worker; where parts of another table are on their way, those do as well."""
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


class Window:
    """The parts of a round that are on their way to one server."""

    def __init__(self) -> None:
        self.until: float | None = None
        """When what is held back goes all the same; None while nothing is."""
        self._is_on = False
        self._is_computing = False
        """Workers still compute the gradients of the round, so that one is late says nothing of the next round."""
        self._ahead = self._longest = 0
        """Elements that were sent and not answered, and those of the longest part of the round."""
        self._most = _UNDER_WAY
        self._sent: dict[int, int] = {}
        """Slot → the element before which the last part of it ends that was sent in the round."""
        self._answered: dict[int, int] = {}
        """Slot → the same of what was answered."""
        self._stalls = Backoff()
        """Rounds that go as a whole, because earlier ones have stalled."""

    def holds(self, body: m.RequestBody, now: float) -> bool:
        """Tell whether a message has to wait: a part, while enough of them are on their way."""
        numel = self._numel(body) if self._is_on else 0
        self._longest = max(self._longest, numel)
        if not numel or self._ahead + numel <= self._longest * self._most:
            return False
        if self.until is None:
            self.until = now + STALL
        if now < self.until:
            return True
        self._is_on, self.until = False, None
        if not self._is_computing:
            self._stalls.fail()
        return False

    def sent(self, body: m.RequestBody) -> None:
        """Note that a message has gone."""
        if isinstance(body, m.Contribute) and len(body.commits) and body.commits[0, 5] & m.ANNOUNCES:
            self._is_on = not self._stalls.skips()
            self._is_computing = bool(body.commits[0, 5] & m.MAY_CHANGE)
            self._most = _BESIDE_OTHERS if self._ahead else _UNDER_WAY
            self._ahead, self._longest, self.until = 0, 0, None
            self._sent, self._answered = {}, {}
        elif self._is_on and (part := _part(body)) is not None:
            self._ahead += self._numel(body)
            self._sent[part[0]] = part[1]

    def answered(self, body: m.ReplyBody) -> None:
        """Note what a server says."""
        if not self._is_on or not isinstance(body, m.Weights):
            return
        for slot, end in map(m.place_of, body.parts[:, 0].tolist()):
            sent, before = self._sent.get(slot, 0), self._answered.get(slot, 0)
            last = min(end, sent) if end else sent
            self._ahead -= max(last - before, 0)
            self._answered[slot] = max(last, before)
        self._stalls.succeed()
        self.until = None

    def _numel(self, body: m.RequestBody) -> int:
        """Count the elements of a part of a slice that were not sent before; 0 of any other message."""
        part = _part(body)
        return 0 if part is None else max(part[1] - self._sent.get(part[0], 0), 0)


def _part(body: m.RequestBody) -> tuple[int, int] | None:
    """Return of a part of a slice the slot and the element before which it ends; None of any other message."""
    if not isinstance(body, m.Contribute) or len(body.pushes) != 1:
        return None
    slot, end = m.place_of(int(body.pushes[0, 0]))
    return (slot, end) if end else None
