"""Workers of a job on real servers as threads of the test: `everybody` runs one function in each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from kvtrainer.client import session
from kvtrainer.common.env import TRANSPORT
from kvtrainer.kvstore import DistKVStore
from tests.support.limits import LIMIT
from tests.support.lossy import LossyProxy
from tests.support.processes import Members, Process, Processes, new_name, together

Body = Callable[[DistKVStore, int], Any]
"""What a worker does with its store, given its rank."""


class Servers:
    """Server processes for jobs of each number of servers, started when they are first needed."""

    def __init__(self, processes: Processes, *flags: str) -> None:
        self._processes = processes
        self._flags = flags
        self._running: dict[int, list[Process]] = {}

    def of(self, count: int) -> list[Process]:
        if count not in self._running:
            self._running[count] = self._processes.servers(count, *self._flags)
        return self._running[count]

    def everybody(
        self, workers: int, servers: int, body: Body, seconds: float = LIMIT, **options: Any
    ) -> list[Any]:
        """Run a job in a namespace of its own: what `body` returned, or raised, for each rank.

        `options` are those of the workers' stores.
        """
        name = new_name()
        with Members() as members:
            stores = [
                members.join(self.of(servers), rank, workers, name, **options) for rank in range(workers)
            ]
            calls = [lambda s=s, r=r: body(s, r) for r, s in enumerate(stores)]
            return together(*calls, seconds=seconds)

    def results(
        self, workers: int, servers: int, body: Body, seconds: float = LIMIT, **options: Any
    ) -> list[Any]:
        """As `everybody`; the first error that a worker raised is raised here."""
        outcomes = self.everybody(workers, servers, body, seconds, **options)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def over_losses(self, workers: int, servers: int, body: Body) -> list[Any]:
        """As `everybody`, with a tenth of all messages lost, which workers notice soon."""
        proxies = [LossyProxy(one.address, 0.1, seed) for seed, one in enumerate(self.of(servers))]
        name = new_name()
        with ExitStack() as stack:
            for proxy in proxies:
                stack.callback(proxy.close)
            stack.enter_context(mock.patch.object(session, "REPEAT_AFTER", 0.1))
            stack.enter_context(mock.patch.dict(os.environ, {TRANSPORT: "tcp"}))
            members = stack.enter_context(Members())
            addresses = [proxy.address for proxy in proxies]
            stores = [members.join(addresses, rank, workers, name) for rank in range(workers)]
            found = together(*[lambda s=s, r=r: body(s, r) for r, s in enumerate(stores)])
            assert any([proxy.lost for proxy in proxies])
            for proxy in proxies:
                proxy.loss = 0.0
        return found


@contextmanager
def servers(*flags: str) -> Iterator[Servers]:
    """All of them end with the block."""
    with Processes() as processes:
        yield Servers(processes, *flags)
