"""A server whose process seems to be killed and started again: sockets, channels and all that was open are lost.

The server runs in a thread. Its engine stands for the durable memory: weights, state and counts of rounds that are over
stay; slices, commits and waits do not, and neither does what it has not sent yet.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvstore_server.engine import pipelined
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.memory import available_memory
from kvstore_server.protocol import messages as m
from kvstore_server.server import Server, ServerOptions
from kvstore_server.transport.arena import Leases
from kvstore_server.transport.channel import ChannelListener
from tests.support.limits import LIMIT
from tests.support.processes import config_of_server

Plan = Callable[[m.RequestBody], str]
"""A request → "before" or "after" if the server is to die before or after it has handled it, and else ""."""


def never(_: m.RequestBody) -> str:
    return ""


class _KilledError(Exception):
    """Ends the loop of a server in the middle of whatever it does."""


class _Killed:
    """Stands for the engine, and ends its server as the plan says. Everything else is the engine's own."""

    def __init__(self, engine: Engine, owner: RestartedServer) -> None:
        self._engine, self._owner = engine, owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        when = self._owner.plan(request.body)
        if when == "before":
            raise _KilledError
        replies = self._engine.handle(peer, request, now)
        if when == "after":
            raise _KilledError
        return [self._owner.welcome(one) for one in replies]


class RestartedServer:
    """One server of a job; as a context manager it ends with the block.

    Args:
        restart_timeout: What it tells its workers.
        pause: Seconds until the next process serves.
        keeps_state: False: the next process knows nothing of the job.

    Attributes:
        plan: When it dies; called for each request.
        deaths: How often it has died.
    """

    def __init__(
        self,
        index: int = 0,
        num_servers: int = 1,
        restart_timeout: float = LIMIT,
        pause: float = 0.05,
        keeps_state: bool = True,
    ) -> None:
        self.plan: Plan = never
        self.deaths = 0
        self.may_return = threading.Event()
        """Cleared: it stays away after its next death."""
        self.may_return.set()
        self._restart_timeout, self._pause, self._keeps_state = restart_timeout, pause, keeps_state
        self._config = config_of_server(server=index, num_servers=num_servers, dead_after=LIMIT)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._leases = Leases()
        self.engine = self._new_engine()
        self._server: Server | None = None
        self._exports: Any = None
        self._is_ending = threading.Event()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def welcome(self, out: m.Outgoing) -> m.Outgoing:
        body = out.reply.body
        if not isinstance(body, m.Welcome):
            return out
        return out._replace(
            reply=m.Reply(out.reply.number, replace(body, restart_timeout=self._restart_timeout))
        )

    def __enter__(self) -> RestartedServer:
        self._thread.start()
        assert self._is_up.wait(LIMIT)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        self.may_return.set()
        if self._server is not None:
            self._server.request_stop()
        self._thread.join()

    def _new_engine(self) -> Engine:
        engine = Engine(self._config, self._leases)
        engine.budget.available = available_memory
        return engine

    def _run(self) -> None:
        while not self._is_ending.is_set():
            self._server = server = self._start()
            self._is_up.set()
            try:
                server.run()
                break
            except _KilledError:
                self.deaths += 1
                self._kill(server)
            self.may_return.wait()
            self._is_ending.wait(self._pause)
        if self._server is not None:
            self._server.close()

    def _start(self) -> Server:
        config, engine = self._config, self.engine
        listener = ChannelListener(
            config.run_id, engine.is_session, engine.budget, self._leases, engine.check_processes
        )
        if self._exports is not None:
            # The same memory, which the new process numbers in its own way.
            exports = listener._exports
            for fd, place in self._exports:
                exports._last += 1
                exports.fds[exports._last], exports._memories[exports._last] = fd, place
            self._exports = None
        options = ServerOptions(bind=self.address, drain_timeout=0.0)
        return Server(_Killed(engine, self), options, self._leases, listener=listener)  # type: ignore[arg-type]

    def _kill(self, server: Server) -> None:
        # 1. The memory outlives the process.
        assert server._listener is not None
        exports = server._listener._exports
        numbers = sorted(exports.fds, reverse=True)
        self._exports = [(os.dup(exports.fds[number]), exports._memories[number]) for number in numbers]
        # 2. Nothing else does.
        server._socket.close(linger=0)
        server.close()
        self._server = None
        self._leases.held.clear()
        if self._keeps_state:
            forget_open(self.engine)
        else:
            self._config = replace(self._config, run_id=self._config.run_id + 2)
            self.engine = self._new_engine()


def forget_open(engine: Engine) -> None:
    """Lose what a killed process loses: whatever belongs to rounds and waits that are not over."""
    for space in engine.namespaces.values():
        for number in list(space.rounds.pipelined):
            table = space.tables[number]
            version = table.version
            pipelined.roll_back(space, table)
            table.version = version  # a restored image knows of no rollback
        for tracker in (space.rounds.shared, *space.rounds.lanes.values()):
            tracker.inputs = {}
            tracker.num_committed[:] = 0
        for table in space.tables:
            table.held = None
        space.absent.clear()
        space.waits.all.clear()
        space.membership.barrier.clear()
    engine.reset_liveness(time.monotonic())


class Deaths:
    """Kills a server at requests of some kind that are drawn, before or after it has handled them.

    Args:
        seed: Of the draws.
        between: The least and the most such requests between two deaths.
        most: How often it dies at most.
        kind: What is counted.
    """

    def __init__(
        self, seed: int, between: tuple[int, int] = (2, 12), most: int = 6, kind: type = m.Contribute
    ) -> None:
        self._random = random.Random(seed)
        self._between, self._left, self._kind = between, most, kind
        self._next = self._random.randint(*between)

    def __call__(self, body: m.RequestBody) -> str:
        if not isinstance(body, self._kind) or not self._left:
            return ""
        self._next -= 1
        if self._next > 0:
            return ""
        self._left -= 1
        self._next = self._random.randint(*self._between)
        return self._random.choice(["before", "after"])
