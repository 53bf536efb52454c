"""The ranks of a job over one engine that is called as a function, and what each of them was told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from kvstore_server.engine import Engine
from kvstore_server.modes import Mode
from kvstore_server.namespace import EngineConfig
from tests.sim.schedule import Adding
from tests.sim.workers import packed
from tests.support import said as m

ADD = packed(Adding.name)


class EngineJob:
    """Ranks of a job with one table of 8 zeros, to which contributions are added; `told` keeps what was said to whom.

    Without `first` the ranks have registered the table, and nobody has given it values.
    """

    def __init__(self, workers: int, mode: Mode, first: bool = True) -> None:
        self.engine = Engine(EngineConfig())
        self.workers = workers
        self.mode = mode
        self.now = 0.0
        self.sessions: dict[int, int] = {}
        self.told: dict[tuple[int, int], list[m.ReplyBody]] = {}
        self._numbers = itertools.count(1)
        for rank in range(workers):
            self.hello(rank)
        for rank in range(workers if first else 0):
            self.commit(rank, 0, 0.0 if rank == 0 else None)

    def hello(self, rank: int) -> m.ReplyBody:
        """Begin a process for a rank: what it was told about the table."""
        mode = self.mode
        address = f"h{rank}"
        nonce, sockets = b"%d" % next(self._numbers), (b"%d" % rank,)
        hello = m.Hello(
            "j", rank, self.workers, 0, 1, "", address, nonce, sockets, mode.name, mode.staleness, mode.slow_down
        )  # fmt: skip
        [welcome] = self.ask(rank, hello)
        assert isinstance(welcome, m.Welcome)
        self.sessions[rank] = welcome.session
        self.ask(rank, m.SetOptimizer(ADD))
        [registered] = self.ask(rank, m.Register("t", (("k", (4, 2), "float32", 0, False),), False))
        return registered

    def ask(self, rank: int, body: m.RequestBody, number: int | None = None) -> list[m.ReplyBody]:
        """Send a request; what this one is told now, others' answers aside."""
        number = next(self._numbers) if number is None else number
        request = m.Request(1, self.sessions.get(rank, 0), number, body)
        told = self._keep(m.handle(self.engine, b"%d" % rank, request, self.now, "j"))
        return told.get((rank, number), [])

    def push(self, rank: int, round_: int, value: float) -> list[m.ReplyBody]:
        payload = torch.full((8,), value)
        return self.ask(rank, m.PushBatch((m.Push(0, 0, round_, 0, payload),)))

    def commit(self, rank: int, round_: int, value: float | None = None, **said: Any) -> list[m.ReplyBody]:
        """Commit a round, after pushing that value if there is one; without weights unless they are asked for."""
        number = said.pop("number", None)
        if value is not None:
            self.push(rank, round_, value)
        manifest = ((0, 0),) if value is not None or said.pop("pushed", False) else ()
        commit = m.Commit(0, round_, manifest, None, **{"want_weights": False, "timeout": 30.0, **said})
        return self.ask(rank, m.CommitBatch((commit,)), number)

    def pull(self, rank: int) -> list[m.ReplyBody]:
        return self.ask(rank, m.Pull((0,), 30.0))

    def tick(
        self, seconds: float = 0.0, alive: Sequence[int] = ()
    ) -> dict[tuple[int, int], list[m.ReplyBody]]:
        """Let time pass, in which some ranks are heard; what was told."""
        self.now += seconds
        for rank in alive:
            self.ask(rank, m.Heartbeat(), 0)
        return self._keep(m.tick(self.engine, self.now, "j"))

    def leave(self, rank: int, is_clean: bool) -> dict[tuple[int, int], list[m.ReplyBody]]:
        request = m.Request(1, self.sessions.pop(rank), 0, m.Leave("over", is_clean))
        return self._keep(m.handle(self.engine, b"%d" % rank, request, self.now, "j"))

    @property
    def total(self) -> list[float]:
        table = self.engine.namespaces["j"].tables[0]
        return sorted(set(table.shard.visible(table.unit, 0).tolist()))

    def _keep(self, out: list[m.Outgoing]) -> dict[tuple[int, int], list[m.ReplyBody]]:
        told: dict[tuple[int, int], list[m.ReplyBody]] = {}
        for one in out:
            told.setdefault((int(one.peer), one.reply.number), []).append(one.reply.body)
        for key, bodies in told.items():
            self.told.setdefault(key, []).extend(bodies)
        return told
