"""Servers that are a function: a transport without sockets, in which time passes only while somebody waits."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from kvstore_server.codec import torch_dtype
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvstore_server.processes import ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import divided
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.round import Round
from kvtrainer.client.rounds import Rounds
from kvtrainer.client.session import MakeReport, Session, SessionIds, SessionOptions, Transport
from kvtrainer.client.tables import RemoteTable

Answer = Callable[[int, m.Request], Iterable[m.ReplyBody] | None]
"""(server, request) → what it answers at once; None leaves it to the defaults."""
Act = Callable[[int, m.Contribute], Iterable[m.ReplyBody]]
SLOT = 100
"""The number of the first slice of the bench's table on each server."""


class Scripted(Transport):
    """A transport to `num_servers` servers that answer as `answer` says, and welcome and confirm by default."""

    def __init__(self, num_servers: int = 1, answer: Answer | None = None) -> None:
        self.num_servers = num_servers
        self.answer = answer
        self.now = 100.0
        self.sent: list[tuple[int, m.Request]] = []
        self.heartbeats: list[tuple[int, int]] = []
        self.signs: dict[int, float] = {}
        self.ended: set[int] = set()
        self.disconnected: set[int] = set()
        self.restart_timeout = 0.0
        """For how long servers are waited for whose processes end."""
        self.may_reopen = True
        """Whether `reopen` succeeds."""
        self.reconnected: list[int] = []
        """The servers to which new connections were made, in order."""
        self.reopened: list[tuple[int, int, int]] = []
        """(server, run, session) of those whose memory was shared again."""
        self.states: dict[int, ProcessState] = {}
        """What the processes of servers of this host do."""
        self.is_closed = False
        self._order = itertools.count()
        self._replies: list[tuple[float, int, int, m.Reply]] = []

    def session(self, **options: float) -> Session:
        """A connected session over this transport."""
        session = Session(self, SessionOptions("job", 0, 2, **options), self.clock)  # type: ignore[arg-type]
        session.connect()
        self.sent.clear()
        return session

    def clock(self) -> float:
        return self.now

    def reply(self, server: int, number: int, body: m.ReplyBody, after: float = 0.0) -> None:
        """Let a server say something, `after` seconds from now."""
        heapq.heappush(self._replies, (self.now + after, next(self._order), server, m.Reply(number, body)))

    def bodies(self, kind: type, server: int | None = None) -> list[m.RequestBody]:
        """What was sent so far, of one kind, to one server or all."""
        return [r.body for to, r in self.sent if isinstance(r.body, kind) and server in (None, to)]

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        for body in divided(request.body):  # as a connection does
            self.sent.append((server, request._replace(body=body)))
        answered = self.answer(server, request) if self.answer is not None else None
        for body in self._default(server, request) if answered is None else answered:
            self.reply(server, request.number, body)

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        if not self._replies or self._replies[0][0] > self.now + timeout:
            self.now += timeout
            return None
        at, _, server, reply = heapq.heappop(self._replies)
        self.now = max(self.now, at)
        return server, reply

    def describe(self, server: int) -> str:
        return f"server {server} (here)"

    def sockets(self, server: int) -> tuple[bytes, ...]:
        return (b"socket to %d" % server,)

    def begin(
        self, sessions: SessionIds, report: MakeReport = bytes, restartable: Collection[int] = ()
    ) -> None:
        self.heartbeats = list(sessions)

    def reconnect(self, server: int) -> None:
        self.reconnected.append(server)
        self.ended.discard(server)
        self.disconnected.discard(server)
        self._replies = [one for one in self._replies if one[2] != server]  # what was on its way is lost
        heapq.heapify(self._replies)

    def reopen(self, server: int, run: int, session: int) -> bool:
        if self.may_reopen:
            self.reopened.append((server, run, session))
        return self.may_reopen

    def is_remote(self, server: int) -> bool:
        return True

    def last_heartbeat(self, server: int) -> float:
        return self.signs.get(server, 0.0)

    def process(self, server: int) -> ProcessState:
        return self.states.get(server, ProcessState.UNKNOWN)

    def how_ended(self, server: int) -> str:
        return "was killed by signal 9 (SIGKILL)" if server in self.ended else ""

    def close(self) -> None:
        self.is_closed = True

    def _default(self, server: int, request: m.Request) -> list[m.ReplyBody]:
        if isinstance(request.body, m.Hello):
            return [m.Welcome(1000 + server, 10 + server, restart_timeout=self.restart_timeout)]
        if isinstance(request.body, m.Abort):
            return [m.Status({"applied": False})]
        return []


class Bench:
    """One table, "w", over scripted servers that answer a commit as `act` says; its number on server s is s + 5."""

    def __init__(
        self,
        num_servers: int,
        act: Act,
        numel: int = 1 << 18,
        restart_timeout: float = 0.0,
        **options: float,
    ) -> None:
        self.act = act
        self.servers = Scripted(num_servers)
        self.servers.restart_timeout = restart_timeout
        self.session = self.servers.session(**options)
        self.servers.answer = self._answer
        self.rounds = Rounds(self.session)
        self.plan = make_plan([TensorSpec("w", (numel,), "float32")], num_servers)
        self.table = add_table(self.rounds, "w", self.plan, 5, 3)
        self.out = torch.zeros(numel)

    def run(self, value: float = 1.0) -> None:
        self.rounds.wait(self.start(value))

    def start(self, value: float = 1.0) -> Round:
        return self.rounds.start(self.contribution(value))

    def contribution(self, value: float = 1.0, **options: Any) -> Contribution:
        values = {"float32": torch.full_like(self.out, value)}
        return Contribution([self.table], [values], [{"float32": self.out}], **options)

    def weights(self, server: int, value: float, round_: int = 3) -> m.Weights:
        slices = self.plan.slices_of(server)
        return weights(SLOT, [torch.full((slice_.length,), value) for slice_ in slices], round_)

    def failed(self, server: int, code: str, next_round: int = 4) -> m.Failed:
        return m.Failed(code, f"{code} of server {server}", server + 5, 3, next_round)

    def _answer(self, server: int, request: m.Request) -> Iterable[m.ReplyBody] | None:
        return self.act(server, request.body) if is_commit(request.body) else None


def is_commit(body: m.RequestBody) -> bool:
    """Whether a message ends a contribution."""
    return isinstance(body, m.Contribute) and len(body.commits) > 0 and not is_announcement(body)


def is_announcement(body: m.RequestBody) -> bool:
    """Whether a message says what a commit is going to say."""
    return isinstance(body, m.Contribute) and bool(
        (body.commits[:, m.COMMIT_FLAGS] & m.DECLARES_INTENT).any()
    )


def add_table(rounds: Rounds, name: str, plan: Plan, number: int, round_: int = 0) -> RemoteTable:
    """A table that has the number `number + s` on server s, where its slices have those from SLOT on."""
    table = rounds.tables.add(name, plan)
    for server in plan.servers:
        table.register(server, m.Registered(number + server, SLOT, round_))
    table.resume(round_, round_ > 0)
    return table


def weights(slot: int, slices: Sequence[torch.Tensor], version: int) -> m.Weights:
    """Whole slices from a slot on."""
    parts = [(slot + at, version, m.WHOLE, one.nbytes) for at, one in enumerate(slices)]
    return m.Weights(m.matrix(parts, 4), tuple(slices))


def padded(values: Sequence[float], plan: Plan) -> torch.Tensor:
    """The one slice of a plan, with its padding."""
    [slice_] = plan.slices
    whole = torch.zeros(slice_.length, dtype=torch_dtype(slice_.dtype))
    whole[: slice_.used] = torch.tensor(values)
    return whole
