"""Loses, delays and duplicates messages between a worker and its servers on purpose, to test that nothing is lost.

    KVSTORE_FAULTS=drop=0.1,delay=0.05,duplicate=0.1,seconds=0.02,seed=1

`drop`, `delay` and `duplicate` are shares of the messages, in both directions. A delayed message comes up to `seconds`
late, and so behind later ones; the second copy of a duplicated one does, too. Each rank draws from `seed` and its rank.

`FaultyTransport` stands between a session and its transport, so it does not matter whether messages go through
ZeroMQ or shared memory, and without the variable there is nothing in their way. Heartbeats pass.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.processes import ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import MAX_PAYLOAD, Frame, decode_frames, divided, encode_frames
from kvstore_server.transport.channel import Channel
from kvtrainer.client.session import MakeReport, SessionIds, Transport

FAULTS = "KVSTORE_FAULTS"

MessageT = TypeVar("MessageT")


@dataclass(frozen=True)
class MessageFaults:
    """Shares of messages, 0 to 1, the longest delay in seconds, and the seed of the draws."""

    drop: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    seconds: float = 0.02
    seed: int = 0


def parse_message_faults(text: str) -> MessageFaults | None:
    """Return what KVSTORE_FAULTS says; None if it is empty. Raises ConfigurationError."""
    given: dict[str, float] = {}
    for one in filter(None, map(str.strip, text.split(","))):
        name, _, value = one.partition("=")
        most = {"drop": 1.0, "delay": 1.0, "duplicate": 1.0, "seconds": 3600.0, "seed": 1e18}.get(name, -1.0)
        try:
            number = int(value) if name == "seed" else float(value)
        except ValueError:
            number = -1
        if not 0 <= number <= most:
            raise ConfigurationError(
                f"{FAULTS}: {one!r:.80} is not one of drop=, delay=, duplicate= (shares from 0 to 1), seconds= and "
                "seed=, as in drop=0.1,delay=0.05,duplicate=0.1,seconds=0.02,seed=1"
            )
        given[name] = number
    seed = int(given.pop("seed", 0))
    return MessageFaults(**given, seed=seed) if text.strip(" ,") else None


class FaultDraws:
    """Draws what happens to one message after the other.

    Args:
        stream: Names whose messages these are; each stream has draws of its own.
    """

    def __init__(self, faults: MessageFaults, stream: str) -> None:
        self._faults = faults
        self._random = random.Random(f"{faults.seed} {stream}")

    def delays(self) -> list[float]:
        """Return after how many seconds each copy of the next message arrives: none if it is lost, 0 for at once."""
        faults, draw = self._faults, self._random.random
        is_lost, is_late, comes_twice = draw() < faults.drop, draw() < faults.delay, draw() < faults.duplicate
        times = [draw() * faults.seconds, draw() * faults.seconds]
        if is_lost:
            return []
        return [times[0] if is_late else 0.0, *times[1:][: int(comes_twice)]]


class FaultyTransport(Transport):
    """A transport whose messages suffer faults in both directions.

    Copies that arrive later have memory of their own, as in a network. They arrive when the worker sends or receives.

    Args:
        clock: The session's.
        rank: Of the worker; chooses the draws.
    """

    def __init__(
        self, inner: Transport, faults: MessageFaults, clock: Callable[[], float], rank: int
    ) -> None:
        self._inner = inner
        self._clock = clock
        self.num_servers = inner.num_servers
        self._sent = FaultDraws(faults, f"sent by {rank}")
        self._received = FaultDraws(faults, f"received by {rank}")
        self._outgoing: list[tuple[float, int, tuple[int, m.Request, int]]] = []
        self._incoming: list[tuple[float, int, tuple[int, m.Reply]]] = []
        """Heaps of what is under way, by the time at which it arrives."""
        self._count = 0

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        self._send_due()
        for delay in self._sent.delays():
            if not delay:
                self._inner.send(server, request, priority)
                continue
            for body in divided(request.body, MAX_PAYLOAD):
                copy = m.Request(*decode_frames(_frames_of_faulty_message(request._replace(body=body))))
                self._hold(self._outgoing, delay, (server, copy, priority))

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        """Wait up to `timeout` seconds for a reply, after it was dropped, delayed or duplicated at random."""
        deadline = self._clock() + timeout
        while True:
            # 1. What was held back and is due.
            self._send_due()
            now = self._clock()
            if self._incoming and self._incoming[0][0] <= now:
                return heapq.heappop(self._incoming)[2]
            # 2. Wait for the next message, until something else is due.
            due = min([deadline, *(heap[0][0] for heap in (self._outgoing, self._incoming) if heap)])
            got = self._inner.receive(max(due - now, 0.0))
            if got is None:
                if due < deadline and self._clock() >= due:
                    continue
                return None
            # 3. It suffers its faults.
            server, reply = got
            is_here = False
            for delay in self._received.delays():
                if delay:
                    _, _, number, body = decode_frames(_frames_of_faulty_message(reply))
                    self._hold(self._incoming, delay, (server, m.Reply(number, body)))
                else:
                    is_here = True
            if is_here:
                return got

    def _send_due(self) -> None:
        while self._outgoing and self._outgoing[0][0] <= self._clock():
            self._inner.send(*heapq.heappop(self._outgoing)[2])

    def _hold(self, heap: list[tuple[float, int, MessageT]], delay: float, message: MessageT) -> None:
        self._count += 1
        heapq.heappush(heap, (self._clock() + delay, self._count, message))

    @property
    def ended(self) -> Collection[int]:  # type: ignore[override]
        return self._inner.ended

    def describe(self, server: int) -> str:
        return self._inner.describe(server)

    def sockets(self, server: int) -> tuple[bytes, ...]:
        return self._inner.sockets(server)

    def begin(
        self, sessions: SessionIds, report: MakeReport = bytes, restartable: Collection[int] = ()
    ) -> None:
        self._inner.begin(sessions, report, restartable)

    @property
    def disconnected(self) -> Collection[int]:  # type: ignore[override]
        return self._inner.disconnected

    def reconnect(self, server: int) -> None:
        # What is held back would come from the old connection, too.
        self._outgoing = [one for one in self._outgoing if one[2][0] != server]
        self._incoming = [one for one in self._incoming if one[2][0] != server]
        heapq.heapify(self._outgoing)
        heapq.heapify(self._incoming)
        self._inner.reconnect(server)

    def reopen(self, server: int, run_id: int, session: int) -> bool:
        return self._inner.reopen(server, run_id, session)

    def last_heartbeat(self, server: int) -> float:
        return self._inner.last_heartbeat(server)

    def is_remote(self, server: int) -> bool:
        return self._inner.is_remote(server)

    def process(self, server: int) -> ProcessState:
        return self._inner.process(server)

    def how_ended(self, server: int) -> str:
        return self._inner.how_ended(server)

    def why_refused(self, server: int) -> str:
        return self._inner.why_refused(server)

    def can_post(self, server: int) -> bool:
        return False  # each message has to come by here

    def post(self, server: int, head: Frame, payloads: Sequence[Tensor]) -> bool:
        return False

    def receive_frames(self, timeout: float) -> tuple[int, Sequence[Frame]] | None:
        return None

    def channel(self, server: int) -> Channel | None:
        return self._inner.channel(server)

    def close(self) -> None:
        """Close the transport; what is held back is lost."""
        self._inner.close()


def _frames_of_faulty_message(message: m.Request | m.Reply) -> list[bytearray]:
    return [bytearray(frame) for frame in encode_frames(message)]
