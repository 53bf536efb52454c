"""Servers as engines in the test's own process: a client of any number of them, or ranks that speak for themselves."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.rounds import Mode
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import RowSet
from kvstore_server.transport.arena import Leases
from kvtrainer.client.client import Client, LoopbackTransport
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.session import SessionOptions
from kvtrainer.sync.exchange import Exchange, RoundResult
from kvtrainer.sync.step_guard import StepGuard
from tests.sim.schedule import Adding
from tests.sim.workers import packed
from tests.support.messages import contribution

DEAD_AFTER = 20.0
"""Seconds of silence after which a `Job` counts a rank as lost."""


def client_of(num_servers: int, engines: Sequence[Engine] | None = None) -> Client:
    """The only worker of a job with so many servers; `engines` gives their places to hold on to them."""
    places = engines or [Engine(EngineConfig(i, num_servers, run_id=i + 1)) for i in range(num_servers)]
    client = Client(LoopbackTransport(places, time.monotonic), SessionOptions("job", 0, 1), time.monotonic)
    client.connect()
    return client


def plan_of(shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> Plan:
    """The layout of keys of one dtype, as a Trainer makes it before it knows the servers."""
    return make_plan([TensorSpec(key, shape, dtype) for key, shape in shapes.items()], 1)


def filled(plan: Plan, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arenas with a tensor for each key, and zero padding."""
    arenas = {name: torch.zeros(size, dtype=getattr(torch, name)) for name, size in plan.arena_sizes.items()}
    for spec, view in zip(plan.specs, views(plan, arenas), strict=True):
        view.copy_(values[spec.key])
    return arenas


def views(plan: Plan, arenas: Mapping[str, Tensor]) -> list[Tensor]:
    """The keys in the arenas, in their shapes."""
    rows = zip(plan.specs, plan.key_offsets, strict=True)
    return [arenas[spec.dtype][at : at + spec.numel].view(spec.shape) for spec, at in rows]


def run_round(
    exchange: Exchange,
    grads: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    scale: float = 1.0,
    absent: frozenset[int] = frozenset(),
    rows: Mapping[int, RowSet] | None = None,
    **others: Any,
) -> RoundResult:
    """One round of dense gradients; `others` are more fields of what this worker gives."""
    own = {(0, key): one for key, one in (rows or {}).items()}
    return exchange.run(
        Contribution((), [grads], None, scale, absent=absent, rows=own, **others), weights, StepGuard()
    )


class EngineJob:
    """Ranks of a job with one table of zeros, to which contributions are added.

    `replies` has all answers so far, by rank and number of the request.

    Without `first` the ranks have registered the table, and nobody has given it values. `more` are further fields of
    every Hello.
    """

    def __init__(
        self,
        workers: int,
        mode: Mode,
        first: bool = True,
        shape: tuple[int, ...] = (4, 2),
        leases: Leases | None = None,
        **more: Any,
    ) -> None:
        self.engine = Engine(EngineConfig(dead_after=DEAD_AFTER), leases)
        self.shape = shape
        self.slices = make_plan([TensorSpec("k", shape, "float32")], 1).slices
        self.workers = workers
        self.mode = mode
        self.now = 0.0
        self.sessions: dict[int, int] = {}
        self.replies: dict[tuple[int, int], list[m.ReplyBody]] = {}
        self._numbers = itertools.count(1)
        for rank in range(workers):
            self.hello(rank, **more)
        for rank in range(workers if first else 0):
            self.commit(rank, 0, 0.0 if rank == 0 else None)
        [self._pulled] = self.pull(0)

    def hello(self, rank: int, **more: Any) -> m.ReplyBody:
        """Begin a process for a rank; `more` are further fields of its Hello. The answer about the table."""
        mode = self.mode
        nonce, sockets = b"%d" % next(self._numbers), (b"%d" % rank,)
        hello = m.Hello(
            "j", rank, self.workers, 0, 1, "", f"h{rank}", nonce, sockets, mode.name, mode.staleness, mode.slow_down,
            **more,
        )  # fmt: skip
        [welcome] = self.ask(rank, hello)
        if not isinstance(welcome, m.Welcome):
            return welcome
        self.sessions[rank] = welcome.session
        self.ask(rank, m.SetOptimizer(packed(Adding.name)))
        [registered] = self.ask(rank, m.Register("t", (("k", self.shape, "float32", 0, False),), False))
        return registered

    def ask(self, rank: int, body: m.RequestBody, number: int | None = None) -> list[m.ReplyBody]:
        """Send a request; its own answers, without those that others get."""
        number = next(self._numbers) if number is None else number
        request = m.Request(1, self.sessions.get(rank, 0), number, body)
        replies = self._keep(self.engine.handle(b"%d" % rank, request, self.now))
        return replies.get((rank, number), [])

    def push(self, rank: int, round_: int, value: float) -> list[m.ReplyBody]:
        given = [(slice_.index, torch.zeros(slice_.length)) for slice_ in self.slices]
        for slice_, (_, numbers) in zip(self.slices, given, strict=True):
            numbers[: slice_.used] = value
        return self.ask(rank, contribution(given, round_))

    def commit(
        self,
        rank: int,
        round_: int,
        value: float | None = None,
        flags: int = 0,
        number: int | None = None,
        pushed: bool = False,
        **said: Any,
    ) -> list[m.ReplyBody]:
        """Commit a round, after pushing that value if there is one, unless it was pushed before."""
        if value is not None:
            self.push(rank, round_, value)
        given = len(self.slices) * (value is not None or pushed)
        return self.ask(
            rank, contribution([], round_, 0, given, flags=flags, **{"timeout": 30.0, **said}), number
        )

    def pull(self, rank: int) -> list[m.ReplyBody]:
        return self.ask(rank, m.Pull((0,), 30.0))

    def tick(
        self, seconds: float = 0.0, alive: Sequence[int] = ()
    ) -> dict[tuple[int, int], list[m.ReplyBody]]:
        """Let time pass, in which some ranks are heard; the answers."""
        self.now += seconds
        for rank in alive:
            self.ask(rank, m.Heartbeat(), 0)
        return self._keep(self.engine.tick(self.now))

    def leave(self, rank: int, is_clean: bool) -> dict[tuple[int, int], list[m.ReplyBody]]:
        request = m.Request(1, self.sessions.pop(rank), 0, m.Leave("over", is_clean))
        return self._keep(self.engine.handle(b"%d" % rank, request, self.now))

    @property
    def total(self) -> list[float]:
        """The values of the table, which the engine changes in place."""
        assert isinstance(self._pulled, m.Weights)
        return sorted(set(self._pulled.payloads[0][:8].tolist()))

    def _keep(self, out: list[m.Outgoing]) -> dict[tuple[int, int], list[m.ReplyBody]]:
        replies: dict[tuple[int, int], list[m.ReplyBody]] = {}
        for one in out:
            replies.setdefault((int(one.peer), one.reply.number), []).append(one.reply.body)
        for key, bodies in replies.items():
            self.replies.setdefault(key, []).extend(bodies)
        return replies
