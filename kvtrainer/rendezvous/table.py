"""The scheduler's state: who has come, which rank each gets, and when everybody can be told where the servers are.

No sockets and no clock: a question and the time go in, the answer comes out. Ranks do not depend on the order in which
processes arrive: a process has the rank that its launcher gave it, and the others of its role take what is left in the
order of their task numbers, or else of (host, time of start, process id).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore_server.errors import (
    ConfigurationError,
    ConnectTimeoutError,
    KVStoreError,
    ProtocolError,
    RoundAbortedError,
)
from kvtrainer.dmlc import SERVER, WORKER
from kvtrainer.rendezvous import messages as m

REPLACED_AFTER = 1.0
"""A process that waits asks many times a second; after so many seconds of silence another one may take its place."""
_LONGEST = 4000
"""Characters that are said about who is missing."""


@dataclass
class _Present:
    """A process that has joined."""

    join: m.Join
    heard: float


class Rendezvous:
    """The meeting of `num_workers` workers and `num_servers` servers; ends in a table, or in `failure`."""

    def __init__(self, num_workers: int, num_servers: int, dead_after: float) -> None:
        self.failure: KVStoreError | None = None
        """Why the job cannot begin; every process that asks is told."""
        self.workers: tuple[str, ...] = ()
        """Tokens of the workers by rank, once all processes are there."""
        self._counts = {WORKER: num_workers, SERVER: num_servers}
        self._dead_after = dead_after
        self._present: dict[str, _Present] = {}
        self._ranks: dict[str, int] = {}
        self._ready: dict[int, m.Ready] = {}
        self._told: set[str] = set()
        self._turned_away = ""

    @property
    def is_complete(self) -> bool:
        """Whether all are there, and all servers listen and know the workers: these need the scheduler no more."""
        return self._do_all_listen() and all(
            token in self._told for token in self._ranks if self._is(token, SERVER)
        )

    def handle(self, question: m.Question, now: float) -> m.Answer:
        """Take note of what a process says and return what it has to know at this time."""
        present = self._present.get(question.token)
        if present is not None:
            present.heard = now
        if isinstance(question, m.GivingUp) and present is not None and not self.is_complete:
            self.fail(RoundAbortedError(f"{present.join.name} gave up: {question.text}"))
        if self.failure is not None:
            self._told.add(question.token)
            return m.Refused.because(self.failure)
        try:
            if isinstance(question, m.Join):
                self._join(question, now)
            elif isinstance(question, m.Ready):
                self._note(question)
        except KVStoreError as error:
            return m.Refused.because(self.failure or error)
        return self._state_for(question.token)

    def expire(self, now: float) -> None:
        """Forget processes that fell silent before all were there."""
        if not self._ranks:
            for token, present in list(self._present.items()):
                if now - present.heard > self._dead_after:
                    del self._present[token]

    def fail(self, error: KVStoreError) -> None:
        """Let the job not begin; the first reason counts."""
        self.failure = self.failure or error

    def fail_late(self, timeout: float) -> None:
        """Let the job not begin because `timeout` seconds are over."""
        self.fail(ConnectTimeoutError(f"after {timeout:g} s {self.missing()}"))

    def is_everybody_told(self) -> bool:
        """Whether all that were there have got their last answer: the table, or why there is none."""
        return self._told >= self._present.keys()

    def missing(self) -> str:
        """Who has not come, in words."""
        if self._ranks:
            late = [
                f"server {rank} ({self._present[token].join.name})"
                for token, rank in sorted(self._ranks.items(), key=lambda item: item[1])
                if self._is(token, SERVER) and not (rank in self._ready and token in self._told)
            ]
            return (
                f"{', '.join(late)} did not say where it listens, or did not come back for the workers' names"
            )
        return f"there is no {' and no '.join(filter(None, map(self._missing_of, (SERVER, WORKER))))}" + (
            f"; turned away was {self._turned_away}" if self._turned_away else ""
        )

    def _missing_of(self, role: str) -> str:
        here = [present.join for present in self._present.values() if present.join.role == role]
        count = self._counts[role]
        if len(here) >= count:
            return ""
        if here and all(join.rank >= 0 for join in here):
            left = sorted(set(range(count)) - {join.rank for join in here})
            return f"{role} {', '.join(map(str, left[:20]))}"
        names = ", ".join(sorted(join.name for join in here)[:20]) or "nobody"
        return f"{role} but {len(here)} of {count} ({names})"

    def _join(self, join: m.Join, now: float) -> None:
        known = self._present.get(join.token)
        if known is not None:
            return
        if self._ranks:
            raise ConfigurationError(f"{join.name} comes too late: all processes of this job are there")
        self._check(join)
        for token, other in list(self._present.items()):
            if _claims_the_same(join, other.join) and now - other.heard > REPLACED_AFTER:
                del self._present[token]  # its launcher has started it again
            elif _claims_the_same(join, other.join):
                self._refuse(f"{other.join.name} and {join.name} both have {_claim(join)}")
        self._present[join.token] = _Present(join, now)
        self._check_number(join.role, now)
        if all(self._number_of(role) == count for role, count in self._counts.items()):
            self._assign()

    def _check(self, join: m.Join) -> None:
        theirs = (join.num_workers, join.num_servers)
        ours = (self._counts[WORKER], self._counts[SERVER])
        if theirs != ours or join.rank >= self._counts[join.role]:
            self._turned_away = (
                f"{join.name}, which has rank {join.rank} in a job of {theirs[0]} workers and "
            )
            self._turned_away += f"{theirs[1]} servers, while the scheduler's has {ours[0]} and {ours[1]}"
            raise ConfigurationError(f"the scheduler has turned away {self._turned_away}")

    def _check_number(self, role: str, now: float) -> None:
        """Refuse a process too many, unless one without a rank has fallen silent and makes room."""
        while self._number_of(role) > self._counts[role]:
            silent = [
                token
                for token, present in self._present.items()
                if present.join.role == role and now - present.heard > REPLACED_AFTER
            ]
            if not silent:
                names = sorted(p.join.name for p in self._present.values() if p.join.role == role)
                self._refuse(f"the job has {self._counts[role]} {role}s, but there are {', '.join(names)}")
            del self._present[silent[0]]

    def _refuse(self, text: str) -> None:
        self.fail(
            ConfigurationError(
                f"{text}; give every process a number of its own, and end what is left of an earlier job"
            )
        )
        assert self.failure is not None
        raise self.failure

    def _assign(self) -> None:
        for role in (WORKER, SERVER):
            self._ranks.update(ranks_of([p.join for p in self._present.values() if p.join.role == role]))
        workers = sorted((rank, token) for token, rank in self._ranks.items() if self._is(token, WORKER))
        self.workers = tuple(token for _, token in workers)

    def _note(self, ready: m.Ready) -> None:
        rank = self._ranks.get(ready.token)
        if rank is None or not self._is(ready.token, SERVER):
            raise ProtocolError(f"no server of this job listens at {ready.address}")
        self._ready[rank] = ready

    def _state_for(self, token: str) -> m.Answer:
        if token not in self._present:
            return m.Refused.because(ConfigurationError("the scheduler does not know this process"))
        is_server = self._is(token, SERVER)
        if self._ranks and is_server and not self._do_all_listen():
            machines = {present.join.machine for present in self._present.values()}
            return m.Assigned(self._ranks[token], len(machines) == 1)
        if not (self._do_all_listen() if is_server else self.is_complete):
            return m.Waiting(self.missing()[:_LONGEST])
        self._told.add(token)
        listening = [self._ready[index] for index in range(self._counts[SERVER])]
        return m.Table(
            self._ranks[token],
            tuple(ready.address for ready in listening),
            tuple(ready.attendance for ready in listening),
            self.workers if is_server else (),
        )

    def _do_all_listen(self) -> bool:
        return len(self._ready) == self._counts[SERVER]

    def _is(self, token: str, role: str) -> bool:
        return self._present[token].join.role == role

    def _number_of(self, role: str) -> int:
        return sum(present.join.role == role for present in self._present.values())


def ranks_of(joins: list[m.Join]) -> dict[str, int]:
    """The rank of each process of one role by its token, whatever the order of `joins`."""
    taken = {join.token: join.rank for join in joins if join.rank >= 0}
    free = [rank for rank in range(len(joins)) if rank not in taken.values()]
    others = sorted((join for join in joins if join.rank < 0), key=_order)
    return {**taken, **{join.token: rank for join, rank in zip(others, free, strict=True)}}


def _order(join: m.Join) -> tuple[int, int, str, int, int]:
    return (join.task < 0, join.task, join.host, join.started, join.pid)


def _claims_the_same(one: m.Join, other: m.Join) -> bool:
    if one.role != other.role:
        return False
    return one.rank == other.rank >= 0 or (one.rank < 0 and other.rank < 0 and one.task == other.task >= 0)


def _claim(join: m.Join) -> str:
    return f"rank {join.rank}" if join.rank >= 0 else f"task {join.task} (DMLC_TASK_ID)"
