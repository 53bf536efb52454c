"""Who may speak, who takes part, and what people are told of that: sessions of one server; ranks and their barriers.

A session is one process in the place of one rank, known by a secret token and by its sockets; a newer process of the
same rank fences the older one. A token is random, and good only from the sockets that the process named when it said
hello. Both are told to nobody else, so whoever knows neither cannot speak for a rank. Nothing of that is ever logged or
sent to others.

Whoever reaches a server may ask for facts, in no session; nothing in them lets anybody speak for a worker. They are
plain values, bounded in size, and made at most a few times a second, so that looking costs the job next to nothing.

All times are given by the caller, in seconds of one monotonic clock.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvstore_server.engine.rounds import Waiter
from kvstore_server.errors import (
    ConfigurationError,
    FencedError,
    KVStoreError,
    ProtocolError,
    ServerLostState,
    ServerStoppingError,
    ServerUnreachableError,
    WorkerLostError,
    from_wire,
)
from kvstore_server.processes import LAST_WORDS, ProcessState
from kvstore_server.protocol.messages import Gather, Hello

_ENDED_KEPT = 1024
"""How many sessions that have ended are remembered with the reason; older ones get a general answer."""
_LOST_SERVERS = {kind.__name__ for kind in (ServerLostState, ServerStoppingError, ServerUnreachableError)}
_NAMED = 8
"""Of how many ranks a message tells more than their number."""


@dataclass(repr=False)
class RankSession:
    """A process that stands for a rank."""

    token: int
    hello: Hello
    peer: bytes
    """The socket that said hello: where it is told what it did not ask for."""
    last_heard: float
    report: Mapping[str, float] = field(default_factory=dict)
    """What the process has told about itself last; see `facts`."""
    state: ProcessState = ProcessState.UNKNOWN
    """What the process does, where it is of the server's host and is looked at, because it is silent."""
    seen_at: float = -math.inf
    """When it was last seen to run, or was found to have ended."""
    how_ended: str = ""
    """What is known about that."""
    is_logged: bool = False
    """The log says that the process is dead."""

    def __repr__(self) -> str:
        hello, ended = self.hello, f", {self.how_ended}" if self.how_ended else ""
        who = f"rank {hello.rank} of {hello.namespace!r} ({hello.address})"  # the token and the sockets are secret
        return (
            f"<{type(self).__name__} of {who}: {self.state.name}, last heard at {self.last_heard:.3f}{ended}>"
        )

    @property
    def last_sign(self) -> float:
        """When the process was heard last, or seen although it said nothing."""
        return max(self.last_heard, self.seen_at)

    def is_dead(self, now: float) -> bool:
        """Tell whether the process has ended, and all that it said has come."""
        return self.state is ProcessState.ENDED and now - self.last_sign >= LAST_WORDS

    @property
    def process(self) -> Hashable:
        """Who said hello; equal when that is repeated."""
        return _process_of(self.hello)


_SEEN = {ProcessState.RUNS: ", but its process runs", ProcessState.STOPPED: ", and its process is stopped"}
"""What a message adds about a rank of whose process more is known than that it is silent."""


def _process_of(hello: Hello) -> Hashable:
    return hello.namespace, hello.rank, hello.nonce, hello.sockets


def random_token() -> int:
    """Return a token that nobody can guess."""
    return secrets.randbits(64)


class Sessions:
    """All sessions of one engine; `tokens` gives numbers of 64 bits."""

    def __init__(self, server: int, tokens: Callable[[], int]) -> None:
        self._server = server
        self._tokens = tokens
        self._live: dict[int, RankSession] = {}
        self._ended: OrderedDict[int, tuple[RankSession, str]] = OrderedDict()
        """Token → whose it was, and why it is good no more."""
        self._opened: dict[Hashable, int] = {}
        """The tokens of both, by process."""

    def __iter__(self) -> Iterator[RankSession]:
        return iter(self._live.values())

    def find(self, peer: bytes, token: int) -> RankSession:
        """Return the session of that token, for a message from the socket `peer`.

        Raises:
            FencedError: it has ended; or there is none, or it is not that socket's, which sound alike.
        """
        session = self._live.get(token)
        if session is not None and peer in session.hello.sockets:
            return session
        session, reason = self._ended.get(token, (None, ""))
        if session is None or peer not in session.hello.sockets:
            reason = "it has no session there"
        raise FencedError(f"this process may no longer write to server {self._server}: {reason}")

    def of_socket(self, peer: bytes) -> RankSession | None:
        """Return the newest open session that has the socket `peer`. It searches all, so only the debug log asks."""
        return next((one for one in reversed(self._live.values()) if peer in one.hello.sockets), None)

    def repeated(self, peer: bytes, hello: Hello) -> RankSession | None:
        """Return the session that the same Hello of the process has opened, if any.

        Raises:
            FencedError: it has ended since.
            ProtocolError: the Hello does not name the socket that sends it.
        """
        if peer not in hello.sockets:
            raise ProtocolError("a Hello must name the routing id of the socket that sends it")
        token = self._opened.get(_process_of(hello))
        return None if token is None else self.find(peer, token)

    def new(self, peer: bytes, hello: Hello, now: float) -> RankSession:
        """Return a session with a token that no other has; 0 is none. It may not speak before it is opened."""
        token = 0
        while not token or token in self._live or token in self._ended:
            token = self._tokens()
        return RankSession(token, hello, peer, now)

    def open(self, session: RankSession) -> None:
        """Let a process speak for its rank from now on."""
        self._live[session.token] = session
        self._opened[session.process] = session.token

    def end(self, token: int, reason: str) -> None:
        """Refuse what is still said in a session, with this reason."""
        self._ended[token] = (self._live.pop(token), reason)
        if len(self._ended) > _ENDED_KEPT:
            _, (session, _) = self._ended.popitem(last=False)
            del self._opened[session.process]


@dataclass
class BarrierWait:
    """One rank that waits at a barrier."""

    since: float
    deadline: float
    waiter: Waiter
    data: bytes
    reads: bool


class Membership:
    """The members of one namespace. Membership is static: ranks 0 … num_workers − 1.

    Args:
        awaits_successors: A rank whose process is dead may be taken over by another one that goes on with its weights,
            so the others wait for it as long as for one that is silent.
    """

    def __init__(self, namespace: str, num_workers: int, awaits_successors: bool = False) -> None:
        self.namespace = namespace
        self.num_workers = num_workers
        self._awaits_successors = awaits_successors
        self.members: dict[int, RankSession] = {}
        self.departed: dict[int, str] = {}
        """Rank → why it left."""
        self.failed: set[int] = set()
        """The departed ranks that did not leave because they were done."""
        self.finished: set[int] = set()
        """Those that did."""
        self.barrier_sequence = 0
        self.barrier: dict[int, BarrierWait] = {}
        self._gathered: tuple[bytes, ...] = ()
        """What the ranks gave at the last barrier."""

    def join(self, session: RankSession) -> RankSession | None:
        """Let a process stand for its rank; return the session that it replaces, if any.

        Raises:
            ConfigurationError: the process disagrees about the number of workers, or its rank is out of range.
        """
        hello, rank = session.hello, session.hello.rank
        if hello.num_workers != self.num_workers:
            raise ConfigurationError(
                f"rank {rank} ({hello.address}) believes in {hello.num_workers} workers, the ranks before it in "
                f"{self.num_workers}; start all workers of a job with the same number"
            )
        if not 0 <= rank < self.num_workers:
            raise ConfigurationError(f"rank {rank} is not in 0 … {self.num_workers - 1}")
        replaced = self.members.get(rank)
        self.members[rank] = session
        self.barrier.pop(rank, None)
        self.departed.pop(rank, None)
        self.failed.discard(rank)
        self.finished.discard(rank)
        return replaced

    def refuse(self, rank: int, reason: str) -> None:
        """Note that a process cannot stand for a rank; whoever waits for that rank is told why."""
        if rank not in self.members and 0 <= rank < self.num_workers:
            self.departed[rank] = reason

    def leave(self, rank: int, reason: str, is_clean: bool) -> None:
        """Let a rank go; whoever still needs it is told the reason."""
        self.members.pop(rank, None)
        self.barrier.pop(rank, None)
        self.departed[rank] = reason
        (self.finished if is_clean else self.failed).add(rank)

    def is_over(self) -> bool:
        """Tell whether every rank that ever came has left."""
        return not self.members

    def last_sign(self, now: float) -> float:
        """Say when a member gave its last sign; now if there is none."""
        return max([member.last_sign for member in self.members.values()], default=now)

    def lost(self, now: float, dead_after: float) -> list[int]:
        """Members that are not waited for any more: they are dead, or gave no sign for `dead_after` seconds."""
        return [
            rank
            for rank, m in sorted(self.members.items())
            if now - m.last_sign > dead_after or (m.is_dead(now) and not self._awaits_successors)
        ]

    def num_dead(self, now: float, dead_after: float) -> int:
        """Say how many ranks came and then failed, died or fell silent."""
        dead = [rank for rank, member in self.members.items() if member.is_dead(now)]
        return len(self.failed) + len({*self.lost(now, dead_after), *dead})

    def lost_error(
        self, waiting_for: list[int], what: str, now: float, dead_after: float
    ) -> KVStoreError | None:
        """Return the error of a wait that cannot end, for a rank that is gone, or None.

        One that has left because it lost a server is not what the others should look for: their error is its own.
        """
        for rank in waiting_for:
            if rank in self.departed:
                kind, _, cause = self.departed[rank].partition(": ")
                if kind in _LOST_SERVERS:
                    return from_wire(
                        kind,
                        f"{what} cannot complete: rank {rank} has left, because it lost a server: {cause}",
                    )
                uneven = (
                    "if it had fewer batches than the others, let every worker train in a block "
                    "`with trainer.join():`, and otherwise "
                )
                return WorkerLostError(
                    f"{what} cannot complete: rank {rank} has left ({self.departed[rank]}); "
                    f"{uneven if rank in self.finished else ''}restart the job from its last saved states"
                )
        lost = set(self.lost(now, dead_after))
        for rank in waiting_for:
            if rank in lost:
                return self._lost_error(rank, what, now, dead_after)
        return None

    def _lost_error(self, rank: int, what: str, now: float, dead_after: float) -> WorkerLostError:
        """Return the error of a wait for a member that is dead, or silent too long."""
        state = self.members[rank].state
        if state is ProcessState.ENDED:
            return WorkerLostError(
                f"{what} cannot complete: {self.describe(rank, now)}. Look for its own last words, and restart the job "
                "from its last saved states"
            )
        may_be = (
            ". If it was in one long call in C that holds Python's interpreter lock (GIL), raise KVSTORE_DEAD_AFTER "
            "for workers and servers"
        )
        return WorkerLostError(
            f"{what} cannot complete: {self.describe(rank, now)}; "
            f"a worker counts as lost after {dead_after:g} s of silence (--dead-after). Look for its own last words, "
            f"and restart the job from its last saved states{may_be if state is ProcessState.UNKNOWN else ''}"
        )

    def enter_barrier(
        self, rank: int, gather: Gather, waiter: Waiter, now: float
    ) -> list[tuple[Waiter, tuple[bytes, ...]]]:
        """Let a rank wait; return whom to release with what all have given; nobody while somebody is missing.

        Raises:
            ProtocolError: the rank is at another barrier than the others.
        """
        if gather.sequence < self.barrier_sequence:
            is_last = gather.sequence == self.barrier_sequence - 1
            return [(waiter, self._gathered if is_last and gather.reads else ())]
        if gather.sequence > self.barrier_sequence:
            raise ProtocolError(
                f"rank {rank} is at barrier {gather.sequence} while barrier {self.barrier_sequence} is open"
            )
        known = self.barrier.get(rank)
        since = now if known is None else known.since  # one that is repeated has no more time than it had
        self.barrier[rank] = BarrierWait(since, since + gather.timeout, waiter, gather.data, gather.reads)
        if self.absent_from_barrier():
            return []
        self._gathered = tuple(self.barrier[each].data for each in range(self.num_workers))
        self.barrier_sequence += 1
        released = [(wait.waiter, self._gathered if wait.reads else ()) for wait in self.barrier.values()]
        self.barrier.clear()
        return released

    def absent_from_barrier(self) -> list[int]:
        """Return the ranks that have not come to the barrier."""
        return [rank for rank in range(self.num_workers) if rank not in self.barrier]

    def take_barrier(self) -> list[Waiter]:
        """Take out those that wait at the barrier."""
        waiters = [wait.waiter for wait in self.barrier.values()]
        self.barrier.clear()
        return waiters

    def describe_all(self, ranks: Iterable[int], now: float) -> str:
        """Name some ranks for a message; of very many the first ones."""
        listed = list(ranks)
        named = [self.describe(rank, now) for rank in listed[:_NAMED]]
        more = len(listed) - len(named)
        return "; ".join(named) + (f"; and {more} more" if more else "")

    def describe(self, rank: int, now: float) -> str:
        """Name a rank for an error message: where it runs and when it was last heard."""
        member = self.members.get(rank)
        if member is not None and member.state is ProcessState.ENDED:
            how = member.how_ended or "has ended without a word"
            return f"the process of rank {rank} ({member.hello.address}) {how}"
        if member is not None:
            heard = f"rank {rank} ({member.hello.address}) was last heard {now - member.last_heard:.1f} s ago"
            return heard + _SEEN.get(member.state, "")
        if rank in self.departed:
            return f"rank {rank} has left ({self.departed[rank]})"
        return f"rank {rank} never connected"


# ---------------------------------------------------------------- facts for people

ERRORS_KEPT, ERROR_LENGTH = 8, 500
"""Of how many failed rounds the error is kept, and how many characters of that."""
