"""Who writes to one server: sessions, ranks and their barriers.

A session is one process that stands for one rank. It has a secret random token, which is accepted only from the
sockets that the process named in its Hello; a newer process of the same rank fences the older one. Neither tokens nor
socket ids are logged or sent to others, so no other process can speak for a rank.

`Sessions` belongs to the server and finds the session of a message. `Membership` belongs to a namespace: which ranks
are connected, have left, are lost or wait at the barrier, and how to describe them in messages. A rank is lost when
its process is dead, or silent for too long although it is not known to be running.

Any process may ask a server for its status without a session. What it is told are plain values of bounded size, which
contain nothing secret and are computed at most a few times a second.

All times are given by the caller, in seconds of one monotonic clock.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvstore_server.commands import CommandAnswer
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
from kvstore_server.processes import FINAL_MESSAGE_TIME, ProcessState
from kvstore_server.protocol.messages import Gather, Hello
from kvstore_server.restarts import RESTARTS

_ENDED_KEPT = 1024
"""How many ended sessions are remembered with their reason; older ones get a general answer."""
_LOST_SERVERS = {kind.__name__ for kind in (ServerLostState, ServerStoppingError, ServerUnreachableError)}
_GATHERED_KEPT = 4 << 20
"""Bytes of what was gathered at past barriers. Half of them are for the first ones, which a process that is started
again repeats before it knows how far the former one of its rank has got; the rest for the latest."""
_OF_GATHERED, _OF_PART = 64, 16
"""Bytes that a past barrier takes, and each part in it, beside its data."""
_NAMED = 8
"""How many ranks a message describes; of others it gives the number."""


@dataclass(repr=False)
class RankSession:
    """A process that stands for a rank."""

    token: int
    hello: Hello
    peer: bytes
    """The socket of the last request that was no heartbeat; notices that the process did not ask for go there."""
    last_heard: float
    report: Mapping[str, float] = field(default_factory=dict)
    """What the process last reported about itself; see `facts`."""
    state: ProcessState = ProcessState.UNKNOWN
    """The state of the process, checked only if it runs on the server's host and is silent."""
    seen_at: float = -math.inf
    """When it was last seen running, or was found to have ended."""
    how_ended: str = ""
    """How the process ended, if known."""
    is_logged: bool = False
    """True once the log says that the process is dead."""
    has_left: bool = False
    """True once the process has left because it failed, while a successor is awaited."""
    command: CommandAnswer | None = None
    """The answer to its last command, so that one that is repeated does not run again."""

    def __repr__(self) -> str:
        hello, ended = self.hello, f", {self.how_ended}" if self.how_ended else ""
        who = f"rank {hello.rank} of {hello.namespace!r} ({hello.address})"  # the token and the sockets are secret
        return (
            f"<{type(self).__name__} of {who}: {self.state.name}, last heard at {self.last_heard:.3f}{ended}>"
        )

    @property
    def last_heartbeat(self) -> float:
        """When the process was last heard, or seen running although it was silent."""
        return max(self.last_heard, self.seen_at)

    def is_dead(self, now: float) -> bool:
        """Return whether the process has ended and its last messages have arrived."""
        return self.state is ProcessState.ENDED and now - self.last_heartbeat >= FINAL_MESSAGE_TIME

    @property
    def process(self) -> Hashable:
        """Identifies the process; equal for a repeated Hello."""
        return _process_of(self.hello)


_SEEN = {
    ProcessState.RUNS: ", but its process runs",
    ProcessState.STOPPED: ", and its process is paused by a signal or a debugger",
}
"""What a message adds about a silent rank if more is known about its process."""


def _process_of(hello: Hello) -> Hashable:
    return hello.namespace, hello.rank, hello.nonce, hello.sockets


def random_token() -> int:
    return secrets.randbits(64)


class Sessions:
    """All sessions of one engine. `tokens` returns random 64-bit numbers."""

    def __init__(self, server: int, tokens: Callable[[], int]) -> None:
        self._server = server
        self._tokens = tokens
        self._live: dict[int, RankSession] = {}
        self._ended: OrderedDict[int, tuple[RankSession, str]] = OrderedDict()
        """Token → the session, and the reason why it ended."""
        self._opened: dict[Hashable, int] = {}
        """Process → token, of open and ended sessions."""

    def __iter__(self) -> Iterator[RankSession]:
        return iter(self._live.values())

    def find(self, peer: bytes, token: int) -> RankSession:
        """Return the session with this token, for a message from the socket `peer`.

        Raises:
            ServerLostState: The job has gone back to a former state.
            FencedError: The session has ended otherwise, does not exist or belongs to another socket; the last two
                look alike to the sender.
        """
        session = self._live.get(token)
        if session is not None and peer in session.hello.sockets:
            return session
        # A wrong socket is told the same as an unknown token, so that tokens cannot be probed.
        session, reason = self._ended.get(token, (None, ""))
        kind, _, text = reason.partition(": ")
        if session is not None and peer in session.hello.sockets and kind == ServerLostState.__name__:
            raise ServerLostState(text)
        if session is None or peer not in session.hello.sockets:
            reason = "it has no session on this server"
        raise FencedError(f"this process may no longer write to server {self._server}: {reason}")

    def of_socket(self, peer: bytes) -> RankSession | None:
        """Return the newest open session with the socket `peer`. It searches all of them; only for the debug log."""
        return next((one for one in reversed(self._live.values()) if peer in one.hello.sockets), None)

    def repeated(self, peer: bytes, hello: Hello) -> RankSession | None:
        """Return the session that the same Hello of the process has opened, if any.

        Raises:
            FencedError: That session has ended.
            ProtocolError: The Hello does not name the socket that sends it.
        """
        if peer not in hello.sockets:
            raise ProtocolError("a Hello must name the routing id of the socket that sends it")
        token = self._opened.get(_process_of(hello))
        return None if token is None else self.find(peer, token)

    def new(self, peer: bytes, hello: Hello, now: float) -> RankSession:
        """Return a session with a new non-zero token. It is not valid before `open`."""
        token = 0
        # 0 stands for no session in messages.
        while not token or token in self._live or token in self._ended:
            token = self._tokens()
        return RankSession(token, hello, peer, now)

    def open(self, session: RankSession) -> None:
        self._live[session.token] = session
        self._opened[session.process] = session.token

    def known(self, token: int) -> RankSession | None:
        """Return a session, also one that has ended."""
        return self._live.get(token) or self._ended.get(token, (None, ""))[0]

    def named(self, tokens: Iterable[int]) -> list[tuple[RankSession, str | None]]:
        """Return those of some sessions that are still known, and why they ended; None: they are open."""
        found: list[tuple[RankSession, str | None]] = []
        for token in tokens:
            if token in self._live:
                found.append((self._live[token], None))
            elif token in self._ended:
                found.append(self._ended[token])
        return found

    def of_namespace(self, name: str) -> list[int]:
        ended = [token for token, (one, _) in self._ended.items() if one.hello.namespace == name]
        return ended + [token for token, one in self._live.items() if one.hello.namespace == name]

    def restore(self, session: RankSession, reason: str | None) -> None:
        """Open a session of an earlier process of this server, or end it for a reason."""
        self._ended.pop(session.token, None)
        self.open(session)
        if reason is not None:
            self.end(session.token, reason)

    def end(self, token: int, reason: str) -> None:
        """End a session; later messages in it are refused with this reason. One that has ended keeps its own."""
        session = self._live.pop(token, None)
        if session is None:
            return
        session.command, session.report = None, {}  # half of its memory
        self._ended[token] = (session, reason)
        # Oldest first, so that memory stays bounded however often processes come back.
        if len(self._ended) > _ENDED_KEPT:
            _, (oldest, _) = self._ended.popitem(last=False)
            del self._opened[oldest.process]


@dataclass
class BarrierWait:
    since: float
    deadline: float
    waiter: Waiter
    data: bytes
    reads: bool


class Membership:
    """The processes of one namespace, for ranks 0 … num_workers − 1; which of these are members, `views` may change.

    Args:
        awaits_successors: A new process may take over a rank whose process is dead and continue with its weights, so
            the others wait for it as long as for a silent one.
        rejoin_timeout: Seconds that the others wait for the successor of a resumable rank.
        resumable: The ranks whose processes said that another one can continue where they end; added to here.
    """

    def __init__(
        self,
        namespace: str,
        num_workers: int,
        awaits_successors: bool = False,
        rejoin_timeout: float = 0.0,
        resumable: set[int] | None = None,
    ) -> None:
        self.namespace = namespace
        self.num_workers = num_workers
        self.is_used_again = False
        """Whether all workers of a former job of this name have finished."""
        self._awaits_successors = awaits_successors
        self.rejoin_timeout = rejoin_timeout
        self.resumable = set() if resumable is None else resumable
        self.members: dict[int, RankSession] = {}
        self.departed: dict[int, str] = {}
        """Rank → why it left."""
        self.failed: set[int] = set()
        """The departed ranks that did not finish."""
        self.finished: set[int] = set()
        """The departed ranks that finished."""
        self.barrier_sequence = 0
        self.may_skip_barriers = False
        """Whether the next barrier is the one that its first rank names, because this count began again when the job
        went back to a snapshot, and theirs did not."""
        self.barrier: dict[int, BarrierWait] = {}
        self.gathered: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()
        """Barrier → what the ranks gave there; the last one, and as many others as `_GATHERED_KEPT` allows, for
        processes that come again to a barrier that another one of their rank has passed."""
        self._gathered_bytes = 0

    def join(self, session: RankSession) -> RankSession | None:
        """Let a process stand for its rank; return the session that it replaces, if any.

        Raises ConfigurationError if the process disagrees about the number of workers, or its rank is out of range.
        """
        hello, rank = session.hello, session.hello.rank
        if hello.num_workers != self.num_workers:
            raise ConfigurationError(
                f"rank {rank} ({hello.address}) expects {hello.num_workers} workers, the ranks before it "
                f"{self.num_workers}; start all workers of a job with the same number"
            )
        if not 0 <= rank < self.num_workers:
            raise ConfigurationError(f"rank {rank} is not in 0 … {self.num_workers - 1}")
        replaced = self.members.get(rank)
        self.members[rank] = session
        if hello.resumes:
            self.resumable.add(rank)
        self.barrier.pop(rank, None)
        self.departed.pop(rank, None)
        self.failed.discard(rank)
        self.finished.discard(rank)
        return replaced

    def refuse(self, rank: int, reason: str) -> None:
        """Record why a process was not accepted for a rank; ranks that wait for it are told."""
        if rank not in self.members and 0 <= rank < self.num_workers:
            self.departed[rank] = reason

    def leave(self, rank: int, reason: str, is_clean: bool, now: float) -> None:
        """Remove a rank that leaves; ranks that still need it are told the reason.

        A resumable rank that fails stays as one whose process has ended, because a successor may come.
        """
        self.barrier.pop(rank, None)
        if rank in self.resumable and not is_clean and self.rejoin_timeout > 0:
            member = self.members[rank]
            member.state, member.seen_at = ProcessState.ENDED, now
            member.how_ended, member.is_logged, member.has_left = f"has failed: {reason}", True, True
            return
        self.members.pop(rank, None)
        self.departed[rank] = reason
        (self.finished if is_clean else self.failed).add(rank)

    def give_up(self, rank: int, reason: str) -> None:
        """Forget the process of a rank that the others do not wait for any more."""
        self.members.pop(rank, None)
        self.departed[rank] = reason
        self.failed.add(rank)

    def is_over(self, lost: Collection[int], without_lost: bool = False) -> bool:
        """Return whether no process is left, except those that failed and whose successors are not awaited any more.

        Args:
            lost: The ranks that others no longer wait for.
            without_lost: Those whose processes did not say that they have failed do not count either.
        """
        return all(rank in lost and (without_lost or self.members[rank].has_left) for rank in self.members)

    def last_heartbeat(self, now: float) -> float:
        """Return when any member was last heard or seen running; `now` without members."""
        return max([member.last_heartbeat for member in self.members.values()], default=now)

    def lost(self, now: float, dead_after: float) -> list[int]:
        """Return the members that others no longer wait for: dead, or silent for `dead_after` seconds.

        A resumable rank gets `rejoin_timeout` seconds more for its successor to come.
        """
        found = []
        for rank, member in sorted(self.members.items()):
            silence = now - member.last_heartbeat
            is_dead = member.is_dead(now) and not self._awaits_successors
            if rank in self.resumable:
                is_lost = silence > self.rejoin_timeout + (0 if is_dead else dead_after)
            else:
                is_lost = is_dead or silence > dead_after
            if is_lost:
                found.append(rank)
        return found

    def num_dead(self, now: float, dead_after: float) -> int:
        """Return how many ranks connected and then failed, died or fell silent."""
        dead = [rank for rank, member in self.members.items() if member.is_dead(now)]
        return len(self.failed) + len({*self.lost(now, dead_after), *dead})

    def lost_error(
        self, waiting_for: list[int], what: str, now: float, dead_after: float
    ) -> KVStoreError | None:
        """Return the error of a wait that cannot end because a rank is gone; None if it still can."""
        for rank in waiting_for:
            if rank in self.departed:
                kind, _, cause = self.departed[rank].partition(": ")
                # The rank is a victim, too: name the server that it lost instead.
                if kind in _LOST_SERVERS:
                    return from_wire(
                        kind,
                        f"{what} cannot complete: rank {rank} has left because it lost a server: {cause}",
                    )
                uneven = (
                    "if it had fewer batches than the others, let every worker train in a block "
                    "`with trainer.join():`, and otherwise "
                )
                return WorkerLostError(
                    f"{what} cannot complete: rank {rank} has left ({self.departed[rank]}); "
                    f"{uneven if rank in self.finished else ''}restart the job from its last saved states"
                )
        # None of them has left; perhaps one is dead or silent.
        lost = set(self.lost(now, dead_after))
        for rank in waiting_for:
            if rank in lost:
                return self._lost_error(rank, what, now, dead_after)
        return None

    def _lost_error(self, rank: int, what: str, now: float, dead_after: float) -> WorkerLostError:
        state = self.members[rank].state
        if state is ProcessState.ENDED:
            since = f", and no process has taken its rank over within {self.rejoin_timeout:g} s (--rejoin-timeout)"
            return WorkerLostError(
                f"{what} cannot complete: {self.describe(rank, now)}{since if rank in self.resumable else ''}. Look "
                "for its own last error message, and restart the job from its last saved states"
            )
        may_be = (
            ". If it was in one long call in C that holds Python's interpreter lock (GIL), raise KVSTORE_DEAD_AFTER "
            "for workers and servers"
        )
        return WorkerLostError(
            f"{what} cannot complete: {self.describe(rank, now)}; "
            f"a worker counts as lost after {dead_after:g} s of silence (--dead-after). Look for its own last error "
            f"message, and restart the job from its last saved states{may_be if state is ProcessState.UNKNOWN else ''}"
        )

    def enter_barrier(
        self, rank: int, gather: Gather, waiter: Waiter, now: float
    ) -> list[tuple[Waiter, tuple[bytes, ...]]]:
        """Add a rank to the barrier. With the last one, return all waiters and what the ranks gave; otherwise nothing.

        Raises:
            ProtocolError: The rank is at another barrier than the others.
            WorkerLostError: The rank comes to a past barrier again, and what was gathered there is not kept any more.
        """
        # 1. A repeated request for a barrier that has ended.
        if gather.sequence < self.barrier_sequence:
            if gather.reads and gather.sequence not in self.gathered:
                raise WorkerLostError(
                    f"rank {rank} has come to barrier {gather.sequence} again, and what was gathered there is not kept "
                    f"any more (up to {_GATHERED_KEPT >> 20} MiB are); restart the job from its last saved states"
                )
            return [(waiter, self.gathered[gather.sequence] if gather.reads else ())]
        if gather.sequence > self.barrier_sequence and self.may_skip_barriers and not self.barrier:
            self.barrier_sequence, self.may_skip_barriers = gather.sequence, False
        if gather.sequence > self.barrier_sequence:
            raise ProtocolError(
                f"rank {rank} is at barrier {gather.sequence} while barrier {self.barrier_sequence} is open"
            )
        # 2. Wait, unless this is the last rank.
        known = self.barrier.get(rank)
        since = now if known is None else known.since  # a repeated request keeps its deadline
        self.barrier[rank] = BarrierWait(since, since + gather.timeout, waiter, gather.data, gather.reads)
        if self.absent_from_barrier():
            return []
        gathered = tuple(self.barrier[each].data for each in range(self.num_workers))
        self.keep_gathered(self.barrier_sequence, gathered)
        self.barrier_sequence += 1
        released = [(wait.waiter, gathered if wait.reads else ()) for wait in self.barrier.values()]
        self.barrier.clear()
        return released

    def keep_gathered(self, sequence: int, parts: tuple[bytes, ...]) -> None:
        """Keep what was gathered at the latest barrier, and drop some of the earlier ones that is too much."""
        if sequence not in self.gathered:
            self._gathered_bytes += _nbytes_of_parts(parts)
        self.gathered[sequence] = parts
        if self._gathered_bytes <= _GATHERED_KEPT:
            return
        # 1. The first ones stay, as long as they are not too many themselves.
        first = first_bytes = 0
        while (
            first_bytes + _nbytes_of_parts(self.gathered.get(first, ())) <= _GATHERED_KEPT // 2
            and first < sequence
        ):
            first_bytes += _nbytes_of_parts(self.gathered.get(first, ()))
            first += 1
        # 2. Of the others the oldest go, a quarter at once, so that not every barrier looks through all of them.
        for at in [at for at in self.gathered if first <= at < sequence]:
            if self._gathered_bytes <= _GATHERED_KEPT // 4 * 3:
                break
            self._gathered_bytes -= _nbytes_of_parts(self.gathered.pop(at))

    def absent_from_barrier(self) -> list[int]:
        return [rank for rank in range(self.num_workers) if rank not in self.barrier]

    def take_barrier(self) -> list[Waiter]:
        waiters = [wait.waiter for wait in self.barrier.values()]
        self.barrier.clear()
        return waiters

    def describe_all(self, ranks: Iterable[int], now: float) -> str:
        """Name some ranks in a message; if there are very many, only the first ones."""
        listed = list(ranks)
        named = [self.describe(rank, now) for rank in listed[:_NAMED]]
        more = len(listed) - len(named)
        return "; ".join(named) + (f"; and {more} more" if more else "")

    def describe(self, rank: int, now: float) -> str:
        """Name a rank in an error message: where it runs and when it was last heard."""
        member = self.members.get(rank)
        if member is not None and member.state is ProcessState.ENDED:
            how = member.how_ended or "has ended without giving a reason"
            left = self.rejoin_timeout - (now - member.last_heartbeat) if rank in self.resumable else 0
            awaited = f", and its successor is awaited for {left:.0f} s more" if left > 0 else ""
            return f"the process of rank {rank} ({member.hello.address}) {how}{awaited}"
        if member is not None:
            heard = f"rank {rank} ({member.hello.address}) was last heard {now - member.last_heard:.1f} s ago"
            return heard + _SEEN.get(member.state, "")
        if rank in self.departed:
            return f"rank {rank} has left ({self.departed[rank]})"
        again = ""
        if self.is_used_again:
            again = (
                ". All workers of a former job of this name have finished; if this process was started again after "
                f"that, it waits in vain: let what starts it set {RESTARTS}, by which servers tell it so"
            )
        return f"rank {rank} never connected{again}"


def _nbytes_of_parts(parts: Iterable[bytes]) -> int:
    return _OF_GATHERED + sum([_OF_PART + len(part) for part in parts])


# ---------------------------------------------------------------- status

ERRORS_KEPT, ERROR_LENGTH = 8, 500
"""How many errors of failed rounds are kept, and the longest text of each."""
