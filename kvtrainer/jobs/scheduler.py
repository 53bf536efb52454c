"""The scheduler of a job of MXNet's launcher: tells workers where the servers are, and stays until they are done.

It is a service for the loop of `kvstore_server.server`, without sockets and clocks: a message and the time go in, the
answer comes out. Each question is answered from the current state, and a process repeats it until the answer is no
longer Pending, so lost or repeated messages do no harm. A failure of one process fails the job, and all are told why.

    server     JoinJob → Info: rank        once all processes have joined
               Listening → Info            once all servers listen
    worker     JoinJob → Info: servers     once every server knows that, and so no longer needs the scheduler
               Heartbeat …, Leave          until its process ends

Ranks do not depend on the order of arrival. A process keeps the rank that its launcher gave it. The others of its role
get the remaining ranks in the order of their task numbers, or else of (host, start time, process id).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore_server.errors import (
    ConfigurationError,
    ConnectTimeoutError,
    KVStoreError,
    ProtocolError,
    RoundAbortedError,
    to_wire,
)
from kvstore_server.protocol import messages as m

SERVER, WORKER = "server", "worker"
REPLACED_AFTER = 1.0
"""Waiting processes ask many times a second. After this many seconds of silence another one may take the place."""
# Seconds of silence after which the scheduler no longer waits for a process before it exits.
_SILENT_AFTER = 2.0
# The most characters of a description of missing processes.
_LONGEST = 4000
_MAX_NAME = 255


@dataclass
class _ScheduledProcess:
    """A process that has joined."""

    join: m.JoinJob
    # Identifies its heartbeats.
    token: int
    heard: float
    rank: int = -1
    # Address of a server, once it listens.
    address: str = ""
    # True once it has its last answer: the servers, that all listen, or why there is no job.
    is_told: bool = False
    is_done: bool = False

    @property
    def name(self) -> str:
        return _describe_scheduled_process(self.join)

    def claims_the_place_of(self, join: m.JoinJob) -> bool:
        own = self.join
        if own.rank < 0 and join.rank < 0:
            return own.role == join.role and own.task == join.task >= 0
        return own.role == join.role and own.rank == join.rank


class Scheduler:
    """Brings workers and servers together and waits until the workers are done.

    Args:
        timeout: Seconds after which missing processes are given up.
        dead_after: Seconds of silence after which a process counts as dead.
        now: The time in seconds of a monotonic clock.
        tokens: Returns an unguessable number for each process.
    """

    num_ended = 0

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        timeout: float,
        dead_after: float,
        now: float,
        tokens: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.failure: KVStoreError | None = None
        """Why the job cannot begin; sent to every process that asks."""
        self.is_complete = False
        """All servers know that all of them listen. From then on nothing needs the scheduler."""
        self.is_stopping = False
        self._counts = {SERVER: num_servers, WORKER: num_workers}
        self._timeout = timeout
        self._deadline = now + timeout
        self._dead_after = dead_after
        self._tokens = tokens
        self._now = now
        # By routing id of the asking socket.
        self._members: dict[bytes, _ScheduledProcess] = {}
        # Token → routing id.
        self._peers: dict[int, bytes] = {}
        # All processes have joined and have their ranks.
        self._is_assigned = False
        self._turned_away = ""

    def handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        member = self._members.get(self._peers.get(request.session, peer))
        if member is not None:
            member.heard = now
        try:
            answer = self._answer(peer, member, request.body, now)
        except KVStoreError as error:
            answer = m.Failed(*to_wire(error))
        return [] if answer is None else [m.Outgoing(peer, m.Reply(request.number, answer))]

    def tick(self, now: float) -> list[m.Outgoing]:
        """Forget processes that fall silent before all have joined. At the deadline, fail the job."""
        self._now = now
        if not self._is_assigned:
            for peer, member in list(self._members.items()):
                if now - member.heard > self._dead_after:
                    self._forget(peer)
        if now >= self._deadline and not self.is_complete:
            self._fail(ConnectTimeoutError(f"after {self._timeout:g} s {self.missing()}"))
        return []

    def is_over(self, now: float) -> bool:
        """Return whether the job cannot begin, or every worker is done or silent too long."""
        if not self.is_complete:
            return self.failure is not None
        return all(worker.is_done or now - worker.heard > self._dead_after for worker in self._of(WORKER))

    def reset_liveness(self, now: float) -> None:
        """Treat every process as just heard, after a time when the scheduler itself did not listen."""
        for member in self._members.values():
            member.heard = now

    def stop(self) -> None:
        self.is_stopping = True

    def is_idle(self) -> bool:
        """Return whether all processes that are still there have their last answer."""
        return all(
            member.is_told or self._now - member.heard > _SILENT_AFTER for member in self._members.values()
        )

    def abandon(self, now: float) -> list[m.Outgoing]:
        return []

    def missing(self) -> str:
        if self._is_assigned:
            late = [one for one in self._servers() if not (one.address and one.is_told)]
            names = ", ".join(f"server {server.rank} ({server.name})" for server in late)
            return f"{names} did not say where it listens, or did not come back to hear that all do"
        return f"there is no {' and no '.join(filter(None, map(self._missing_of, self._counts)))}" + (
            f"; turned away was {self._turned_away}" if self._turned_away else ""
        )

    def _missing_of(self, role: str) -> str:
        here, count = self._of(role), self._counts[role]
        if len(here) >= count:
            return ""
        if here and all(member.join.rank >= 0 for member in here):
            left = sorted(set(range(count)) - {member.join.rank for member in here})
            return f"{role} {', '.join(map(str, left[:20]))}"
        names = ", ".join(sorted(member.name for member in here)[:20]) or "nobody"
        return f"{role} but {len(here)} of {count} ({names})"

    def _answer(
        self, peer: bytes, member: _ScheduledProcess | None, body: m.RequestBody, now: float
    ) -> m.ReplyBody | None:
        # 1. Messages that are answered in any state.
        if isinstance(body, m.Leave):
            if member is not None:
                if not self.is_complete:
                    self._fail(RoundAbortedError(f"{member.name} gave up: {body.reason}"))
                member.is_told = member.is_done = True
            return None
        if isinstance(body, m.Heartbeat):
            return m.Pending(())
        # 2. A new process joins. If the job has failed, everybody gets the reason.
        if self.failure is None and isinstance(body, m.JoinJob) and member is None:
            member = self._join(peer, body, now)
        if self.failure is not None:
            if member is not None:
                member.is_told = True
            raise self.failure
        # 3. Answer from the current state, or name what is missing.
        if not isinstance(body, m.JoinJob | m.Listening):
            raise ProtocolError(
                f"this is the scheduler of a job, which has no answer to {type(body).__name__}"
            )
        if member is None:
            raise ConfigurationError("the scheduler does not know this process")
        told = self._told_at_listening(member, body) if isinstance(body, m.Listening) else self._told(member)
        return m.Pending((), self.missing()[:_LONGEST]) if told is None else m.Status(told)

    def _told(self, member: _ScheduledProcess) -> Mapping[str, Any] | None:
        """Return the answer to JoinJob, or None while processes are missing."""
        known = {"rank": member.rank, "session": member.token}
        if member.join.role == SERVER and self._is_assigned:
            machines = {other.join.machine for other in self._members.values()}
            return {**known, "is_one_machine": len(machines) == 1}
        if member.join.role == WORKER and self.is_complete:
            member.is_told = True
            return {**known, "servers": [server.address for server in self._servers()]}
        return None

    def _told_at_listening(
        self, member: _ScheduledProcess, listening: m.Listening
    ) -> Mapping[str, Any] | None:
        if member.rank < 0 or member.join.role != SERVER:
            raise ProtocolError(f"no server of this job listens at {listening.address!r:.80}")
        member.address = listening.address
        servers = self._of(SERVER)
        if not all(server.address for server in servers):
            return None
        member.is_told = True
        self.is_complete = all(server.is_told for server in servers)
        return {}

    def _join(self, peer: bytes, join: m.JoinJob, now: float) -> _ScheduledProcess:
        # 1. Refuse what cannot belong to this job.
        if join.role not in self._counts or max(len(join.host), len(join.machine)) > _MAX_NAME:
            raise ProtocolError(f"no process of a job: {join!r:.200}")
        if self._is_assigned:
            raise ConfigurationError(
                f"{_describe_scheduled_process(join)} comes too late: all processes of this job are there"
            )
        self._check(join)
        # 2. A process that was restarted takes the place of its silent predecessor. A second live one is an error.
        for other_peer, other in list(self._members.items()):
            if not other.claims_the_place_of(join):
                continue
            if now - other.heard > REPLACED_AFTER:
                self._forget(other_peer)
            else:
                claim = f"rank {join.rank}" if join.rank >= 0 else f"task {join.task} (DMLC_TASK_ID)"
                self._refuse(f"{other.name} and {_describe_scheduled_process(join)} both have {claim}")
        # 3. Add it, and assign ranks once all are there.
        member = self._members[peer] = _ScheduledProcess(join, self._tokens(), now)
        self._peers[member.token] = peer
        self._check_number(join.role, now)
        if all(len(self._of(role)) == count for role, count in self._counts.items()):
            self._is_assigned = True
            for members in map(self._of, self._counts):
                ranks = scheduled_ranks([member.join for member in members])
                for each, rank in zip(members, ranks, strict=True):
                    each.rank = rank
        return member

    def _check(self, join: m.JoinJob) -> None:
        theirs, ours = (join.num_workers, join.num_servers), (self._counts[WORKER], self._counts[SERVER])
        if theirs != ours or join.rank >= self._counts[join.role]:
            self._turned_away = (
                f"{_describe_scheduled_process(join)}, which has rank {join.rank} in a job of {theirs[0]} workers and "
                f"{theirs[1]} servers, while the scheduler's has {ours[0]} and {ours[1]}"
            )
            raise ConfigurationError(f"the scheduler has turned away {self._turned_away}")

    def _check_number(self, role: str, now: float) -> None:
        """If a role has too many processes, drop silent ones. Fail the job if there are none."""
        while len(self._of(role)) > self._counts[role]:
            silent = [
                peer
                for peer, member in self._members.items()
                if member.join.role == role and now - member.heard > REPLACED_AFTER
            ]
            if not silent:
                names = ", ".join(sorted(member.name for member in self._of(role)))
                self._refuse(f"the job has {self._counts[role]} {role}s, but there are {names}")
                return
            self._forget(silent[0])

    def _refuse(self, text: str) -> None:
        self._fail(
            ConfigurationError(
                f"{text}; give every process a number of its own, and end what is left of an earlier job"
            )
        )

    def _fail(self, error: KVStoreError) -> None:
        self.failure = self.failure or error

    def _forget(self, peer: bytes) -> None:
        del self._peers[self._members.pop(peer).token]

    def _servers(self) -> list[_ScheduledProcess]:
        return sorted(self._of(SERVER), key=lambda server: server.rank)

    def _of(self, role: str) -> list[_ScheduledProcess]:
        return [member for member in self._members.values() if member.join.role == role]


def scheduled_ranks(joins: list[m.JoinJob]) -> list[int]:
    """Return the rank of each process of one role, independent of the order of `joins`."""
    ranks = [join.rank for join in joins]
    free = sorted(set(range(len(joins))) - set(ranks))
    others = sorted(
        (join.task < 0, join.task, join.host, join.started, join.pid, i)
        for i, join in enumerate(joins)
        if join.rank < 0
    )
    for (*_, i), rank in zip(others, free, strict=True):
        ranks[i] = rank
    return ranks


def _describe_scheduled_process(join: m.JoinJob) -> str:
    return f"{join.role} on {join.host} (process {join.pid})"
