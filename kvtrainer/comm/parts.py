"""Slices cut into parts, so that servers sum, update and answer the first ones while the last are on their way.

Parts are smaller the less a server has of a table: what is given and not yet answered is about one part, and so is the
time in which a link carries nothing one way.

Parts wait in this process until earlier ones are answered. One is answered with new weights when all workers have given
it. So no worker gets far ahead of the others on any server, and none keeps a link busy with what nobody can use yet;
what is urgent finds no long queue in the network. Where a round is not answered part by part, because some worker is
late or has announced nothing, the rest of it goes after a while, and some of the next rounds go as a whole: twice as
many each time that this happens. While workers still compute the round, one of them is often late, and the next rounds
are not changed for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import divided

_STEP = 4096
"""Bytes of whose multiples parts are: whole lines, in whole units of every kernel."""
_LEAST, LONGEST = 4 * _STEP, 256 * _STEP
"""Bytes of the smallest parts, for each costs some time; and of the longest ones, which keep a fast link busy."""
_PARTS = 16
"""Parts of what a server has of a table: the first one on its way up and the last one down are a sixteenth each."""
STALL = 0.25
"""Seconds without an answer after which the rest of a round goes."""
_UNDER_WAY = 2
"""Parts that are on their way at once."""
_MOST_SKIPPED = 64


def size_of_parts(share: int) -> int:
    """Return the bytes of a part of a slice on a server that has so many bytes of the table."""
    return min(max(-(-share // (_PARTS * _STEP)) * _STEP, _LEAST), LONGEST)


def cut(body: m.Contribute, most: int) -> Iterator[m.Contribute]:
    """Yield messages that bring slices, without commits, and those larger than `most` bytes in parts of so many."""
    for one in divided(body):
        nbytes = int(one.pushes[0, 3])
        if len(one.pushes) > 1 or nbytes <= most:
            yield one
            continue
        raw = one.payloads[0].view(torch.uint8)
        for begin in range(0, nbytes, most):
            part, pushes = raw[begin : begin + most], one.pushes.copy()
            pushes[0, 0] |= (begin + len(part)) << m.PART
            pushes[0, 3] = len(part)
            yield replace(one, pushes=pushes, payloads=(part,))


class Backoff:
    """Rounds that do without something after it went wrong: one at first, and twice as many each time."""

    def __init__(self) -> None:
        self._next, self._left = 1, 0

    def fail(self) -> None:
        """It went wrong."""
        self._left, self._next = self._next, min(2 * self._next, _MOST_SKIPPED)

    def succeed(self) -> None:
        """It went well: the next time that it does not, one round does without it."""
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
        """Bytes that were sent and not answered, and those of the longest part of the round."""
        self._stalls = Backoff()
        """Rounds that go as a whole, because earlier ones have stalled."""

    def holds(self, body: m.RequestBody, now: float) -> bool:
        """Tell whether a message has to wait: a part, while enough of them are on their way."""
        nbytes = _size_of_part(body) if self._is_on else 0
        self._longest = max(self._longest, nbytes)
        if not nbytes or self._ahead + nbytes <= self._longest * _UNDER_WAY:
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
            is_whole = self._stalls.skips()
            # Weights that come rounded do not tell how much of what was sent they answer.
            self._is_on = not (is_whole or body.commits[0, 5] & m.WANTS_HALF)
            self._is_computing = bool(body.commits[0, 5] & m.MAY_CHANGE)
            self._ahead, self._longest, self.until = 0, 0, None
        elif self._is_on:
            self._ahead += _size_of_part(body)

    def answered(self, body: m.ReplyBody) -> None:
        """Note what a server says."""
        if self._is_on and isinstance(body, m.Weights):
            self._ahead = max(self._ahead - int(body.parts[:, 3].sum()), 0)
            self._stalls.succeed()
            self.until = None


def _size_of_part(body: m.RequestBody) -> int:
    """The bytes of a part of a slice; 0 of any other message."""
    if not isinstance(body, m.Contribute) or len(body.pushes) != 1 or not body.pushes[0, 0] >> m.PART:
        return 0
    return int(body.pushes[0, 3])
