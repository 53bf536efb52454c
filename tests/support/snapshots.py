"""Engines in the test's own process that write snapshots, and a job of one worker that trains on them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvstore_server.durable.snapshot_folder import SnapshotFolder
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.snapshots import SnapshotPeriod, Snapshots
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import Plan
from kvstore_server.protocol.rows import RowSet
from kvtrainer.client.client import Client, LoopbackTransport
from kvtrainer.client.session import SessionOptions
from kvtrainer.sync.exchange import StoreExchange
from tests.support.engines import run_round


class Immediately:
    """Runs a function before it returns, as if the disk took no time."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        try:
            function()
        except Exception as error:
            self.error = error

    def is_over(self, seconds: float = 0.0) -> bool:
        return True


class SnapshotServers:
    """Servers with snapshots in a directory; `lose` lets some of them begin again without memory."""

    def __init__(
        self,
        root: Path,
        count: int,
        every: int,
        run: Callable[[Callable[[], None]], Any] = Immediately,
        seconds: float = 0.0,
    ) -> None:
        self.root, self.count, self._run = root, count, run
        self.period = SnapshotPeriod(every, seconds)
        self._runs = 0
        self.engines: list[Engine] = [self._start(at) for at in range(count)]

    def lose(self, *servers: int) -> None:
        for at in servers or range(self.count):
            snapshots = self.engines[at].snapshots
            assert snapshots is not None
            snapshots.close()
            self.engines[at] = self._start(at)

    def close(self) -> None:
        for engine in self.engines:
            if engine.snapshots is not None:
                engine.snapshots.close()

    def rounds(self, server: int = 0) -> list[int]:
        """The rounds of the snapshots of a server."""
        found = (self.root / f"server-{server}").glob("round-*")
        return sorted(int(path.name.removeprefix("round-").partition(".")[0]) for path in found)

    def _start(self, at: int) -> Engine:
        self._runs += 1
        config = EngineConfig(at, self.count, run_id=self._runs)
        identity = {"server": at, "num_servers": self.count, "capability": ""}
        folder = SnapshotFolder(str(self.root), at)
        made = partial(Snapshots, folder, self.period, identity, run=self._run)
        return Engine(config, snapshots=made)


def plain_engines(count: int) -> list[Engine]:
    """Servers without snapshots."""
    return [Engine(EngineConfig(at, count, run_id=1 + at)) for at in range(count)]


_processes = itertools.count(1)


class SnapshotJob:
    """One worker with one table, whose gradients are a function of the round.

    With `tag`, it loads what was saved under it before it begins. `number`: which Trainer of the worker it is. `most`:
    0, or as many workers as there may be in a job whose members change.
    """

    def __init__(
        self,
        servers: SnapshotServers | Sequence[Engine],
        plan: Plan,
        optimizer: Optimizer,
        rows: Mapping[int, int] | None = None,
        resumes: bool = True,
        tag: str | None = None,
        number: int = 1,
        most: int = 0,
    ) -> None:
        engines = servers.engines if isinstance(servers, SnapshotServers) else servers
        self.plan, self._rows = plan, rows or {}
        """Key → how many of its rows have a gradient."""
        self._store, self.client = (
            Client(
                LoopbackTransport(list(engines), time.monotonic),
                SessionOptions(
                    namespace,
                    0,
                    most or 1,
                    address=f"host:{next(_processes)}",
                    resumes=resumes,
                    initial_workers=min(most, 1),
                    min_workers=min(most, 1),
                ),
                time.monotonic,
            )
            for namespace in ("job", f"job/trainer{number}")
        )
        self._store.connect()
        if tag is not None:
            self._store.load(tag)
        self.client.connect()
        self.client.schedule_snapshots(None)
        self.exchange = StoreExchange(self.client, plan, optimizer, is_dist=True, resumes=resumes)
        self.weights = {
            name: torch.linspace(-1, 1, size).to(getattr(torch, name))
            for name, size in plan.arena_sizes.items()
        }
        if self.exchange.takeover is None:
            self.exchange.init(self.weights)
        else:
            self.exchange.resume(self.weights, None)

    @property
    def round(self) -> int:
        return self.exchange.round

    def save(self, tag: str) -> None:
        self._store.save(tag, self.round)

    def close(self) -> None:
        self.client.close()
        self._store.close()

    def train(self, until: int) -> dict[str, Tensor]:
        """Run rounds until the next one has this number; copies of the weights then."""
        while self.round < until:
            draw = torch.Generator().manual_seed(self.round)
            grads = {n: torch.randn(w.numel(), generator=draw).to(w.dtype) for n, w in self.weights.items()}
            rows = {}
            for key, count in self._rows.items():
                height, *width = self.plan.specs[key].shape
                ids = torch.randperm(height, generator=draw)[:count].sort().values
                rows[key] = RowSet(ids, torch.randn(count, *width, generator=draw))
            run_round(self.exchange, grads, self.weights, rows=rows)
        return {name: one.clone() for name, one in self.weights.items()}

    def state(self) -> list[Any]:
        """The optimizer's state by slice: counts, and tensors by name."""
        [table] = [self.exchange._table]
        found = []
        for slice_ in table.plan.slices:
            [states] = self.client.get_states(table, [slice_], [0])
            found.append((states.steps.tolist(), {n: t.tolist() for n, t in sorted(states.tensors.items())}))
        return found
