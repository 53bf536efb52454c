"""The schedules over servers with durable state: all promises hold as without it, and whenever a server were killed
between two messages, its next process would have the same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.protocol import messages as m
from tests.sim.model import Violation
from tests.sim.schedule import AsyncSchedule, Schedule, SyncSchedule
from tests.sim.workers import tiny_slices
from tests.support.durable import HeldDescriptors, durable_engine
from tests.support.restarts import sessions_of, state_of

SEEDS, ASYNC_SEEDS = 48, 24
EVERY = 7
"""Messages between two looks at what a next process would have."""


class _Restarts(Schedule):
    """Compares the servers with their next processes."""

    def __init__(self, seed: int) -> None:
        self.stores: list[HeldDescriptors] = []
        self._handled = 0
        super().__init__(seed)

    def _engine(self, config: EngineConfig, tokens: Callable[[], int]) -> Engine:
        self.stores.append(HeldDescriptors())
        return durable_engine(self.stores[-1], config, tokens=tokens)

    def _to_engine(self, process: int, server: int, request: m.Request) -> None:
        super()._to_engine(process, server, request)
        self._handled += 1
        if self._handled % EVERY == 0:
            self._look_at_next(server)

    def _look_at_next(self, server: int) -> None:
        copy, engine = self.stores[server].copied(), self.servers[server].engine
        following = durable_engine(copy, engine.config, now=self.now)
        assert following.namespaces.keys() == engine.namespaces.keys()
        for name in engine.namespaces:
            has, had = state_of(following, name), state_of(engine, name)
            assert has.keys() == had.keys()
            differing = [key for key in has if has[key] != had[key]]
            for key in differing[:1]:
                raise Violation(f"server {server}: after a restart {key} is {has[key]}, and was {had[key]}")
            assert sessions_of(following, name) == sessions_of(engine, name)
        self.seen["looks at the next process"] += 1
        self.seen["in the middle of a round"] += any(
            table.pipelined is not None and table.pipelined.undo is not None
            for space in engine.namespaces.values() for table in space.tables
        )  # fmt: skip
        copy.close()


class SyncRestarts(_Restarts, SyncSchedule):
    pass


class AsyncRestarts(_Restarts, AsyncSchedule):
    pass


def blocks(seeds: int, size: int, in_ci: int) -> list[Any]:
    """Where each block of so many schedules starts; all but the first ones are for the full run."""
    starts = range(0, seeds, size)
    return [pytest.param(at, marks=() if at < in_ci * size else pytest.mark.full) for at in starts]


def played(kind: type[_Restarts], seeds: range) -> Counter[str]:
    seen = Counter[str]()
    for seed in seeds:
        with tiny_slices():
            schedule = kind(seed)
            try:
                schedule.run()
            except (Violation, AssertionError) as error:
                raise Violation(f"seed {seed}, step {schedule.step}: {error}") from error
            finally:
                for store in schedule.stores:
                    store.close()
        seen += schedule.seen
    return seen


@pytest.mark.parametrize("first", blocks(SEEDS, 12, 2))
def test_servers_of_synchronous_rounds_could_be_restarted_at_any_time(first: int) -> None:
    seen = played(SyncRestarts, range(first, first + 12))
    assert seen["looks at the next process"] > 100
    assert seen["in the middle of a round"]


@pytest.mark.parametrize("first", blocks(ASYNC_SEEDS, 6, 1))
def test_servers_of_asynchronous_contributions_could_be_restarted_at_any_time(first: int) -> None:
    assert played(AsyncRestarts, range(first, first + 6))["looks at the next process"] > 50
