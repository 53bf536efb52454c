"""Replies on their way out: packed into messages, and kept for peers that are slow to take them. No sockets here.

Weights are sent without a copy, so nobody may write to them meanwhile: `Leases` knows which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from kvstore_server.errors import KVStoreError, to_wire
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import KEYS_PER_MESSAGE, groups
from kvstore_server.protocol.frames import encode_reply

PartKey = tuple[int, int, int]
"""(request number, slot, version) of a slice of weights."""
_LEAST, _OF_PART = 4096, 256
"""Bytes that take about as long as what is done once for each message, and for each part of it."""


@dataclass(frozen=True)
class Message:
    """One message as it is sent."""

    frames: list[Any]
    payload: Tensor | None
    """The buffer behind the last frame, where it is sent without a copy."""

    @classmethod
    def of(cls, reply: m.Reply) -> Message:
        """Encode a reply; one that no frame can hold becomes the failure to send it."""
        try:
            frames = encode_reply(reply)
        except KVStoreError as error:
            frames = encode_reply(m.Reply(reply.number, m.Failed(*to_wire(error))))
        if not isinstance(reply.body, m.Weights):
            return cls(frames, None)
        return cls(frames, reply.body.payloads[0] if len(reply.body.payloads) == 1 else None)


@dataclass
class Backlog:
    """Replies that a peer has not been sent yet, oldest first; each is encoded when it is its turn."""

    replies: deque[m.Reply] = field(default_factory=deque)
    nbytes: int = 0
    _coming: set[PartKey] = field(default_factory=set)
    _first: Message | None = None

    @property
    def has_state(self) -> bool:
        """True while optimizer state waits here."""
        return any(isinstance(reply.body, m.State) for reply in self.replies)

    def append(self, reply: m.Reply) -> None:
        self.replies.append(reply)
        self.nbytes += size_of(reply)
        self._coming.update(_keys(reply))

    def first(self) -> Message:
        """Return the oldest message."""
        if self._first is None:
            self._first = Message.of(self.replies[0])
        return self._first

    def popleft(self) -> m.Reply:
        reply, self._first = self.replies.popleft(), None
        self.nbytes -= size_of(reply)
        self._coming.difference_update(_keys(reply))
        return reply

    def without_coming(self, reply: m.Reply) -> m.Reply:
        """Return the reply without weights that wait here already, which a repeated request asks for again."""
        if not isinstance(reply.body, m.Weights):
            return reply
        news = [at for at, key in enumerate(_keys(reply)) if key not in self._coming]
        payloads = tuple([reply.body.payloads[at] for at in news])
        return m.Reply(reply.number, m.Weights(reply.body.parts[news], payloads))


def payloads_of(reply: m.Reply) -> Sequence[Tensor]:
    """The buffers of the store that a reply reads from, one for each part."""
    return reply.body.payloads if isinstance(reply.body, m.Weights) else ()


def size_of(reply: m.Reply) -> int:
    """Estimate the bytes of a reply when it is sent, which is also what it costs to encode it."""
    if isinstance(reply.body, m.State):
        return _LEAST + len(reply.body.data)
    if isinstance(reply.body, m.Weights):
        return _LEAST + _OF_PART * len(reply.body.parts) + int(reply.body.parts[:, 3].sum())
    return _LEAST


def _keys(reply: m.Reply) -> list[PartKey]:
    parts = reply.body.parts[:, :2].tolist() if isinstance(reply.body, m.Weights) else ()
    return [(reply.number, slot, version) for slot, version in parts]


def packed(replies: Iterable[m.Outgoing]) -> Iterable[m.Outgoing]:
    """Join what goes to one request into messages of at most MAX_PAYLOAD bytes; order within a request is kept."""
    weights: dict[tuple[bytes, int], list[m.Weights]] = {}
    done: dict[tuple[bytes, int], list[m.Matrix]] = {}
    others: list[m.Outgoing] = []
    for out in replies:
        where = (out.peer, out.reply.number)
        if isinstance(out.reply.body, m.Weights):
            weights.setdefault(where, []).append(out.reply.body)
        elif isinstance(out.reply.body, m.Done):
            done.setdefault(where, []).append(out.reply.body.rounds)
        else:
            others.append(out)
    yield from others  # what is said about a round (Absent, Done) goes ahead of its weights
    for (peer, number), several in done.items():
        rounds = np.concatenate(several)
        for at in range(0, len(rounds), KEYS_PER_MESSAGE):
            yield m.Outgoing(peer, m.Reply(number, m.Done(rounds[at : at + KEYS_PER_MESSAGE])))
    for (peer, number), bodies in weights.items():
        parts = np.concatenate([body.parts for body in bodies])
        payloads = [payload for body in bodies for payload in body.payloads]
        for group in groups(parts[:, 3].tolist()):
            yield m.Outgoing(peer, m.Reply(number, m.Weights(parts[group], tuple(payloads[group]))))


class Tracker(Protocol):
    """The state of one buffer that the socket reads from."""

    @property
    def done(self) -> bool: ...


class Leases:
    """Buffers that the socket or a queue still reads from, by address."""

    def __init__(self) -> None:
        self._trackers: dict[int, list[Tracker]] = {}
        self._held: dict[int, int] = {}

    def __len__(self) -> int:
        """How many buffers may still be read from."""
        return len(self._trackers) + len(self._held)

    def hold(self, buffer: Tensor) -> None:
        """Note that a message with this buffer waits in a queue of ours; may be called several times."""
        self._held[buffer.data_ptr()] = self._held.get(buffer.data_ptr(), 0) + 1

    def release(self, buffer: Tensor) -> None:
        """Note that one of the messages with this buffer has left its queue."""
        left = self._held[buffer.data_ptr()] - 1
        if left:
            self._held[buffer.data_ptr()] = left
        else:
            del self._held[buffer.data_ptr()]

    def track(self, buffer: Tensor, tracker: Tracker) -> None:
        """Note that the socket has taken a message with this buffer, and reads it until the tracker is done."""
        known = self._trackers.get(buffer.data_ptr(), [])
        self._trackers[buffer.data_ptr()] = [one for one in known if not one.done] + [tracker]

    def is_busy(self, buffer: Tensor) -> bool:
        """Say whether somebody still reads from the buffer, so that it must not be written."""
        address = buffer.data_ptr()
        if address in self._held:
            return True
        trackers = self._trackers.get(address)
        if trackers is None:
            return False
        if all(tracker.done for tracker in trackers):
            del self._trackers[address]
            return False
        return True
