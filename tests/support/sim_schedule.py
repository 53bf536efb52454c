"""A scheduler that loses, repeats and delays: three workers, two servers and two tables, without sockets or a clock."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvstore_server import plan as plan_module
from kvstore_server.engine import Engine
from kvstore_server.namespace import EngineConfig
from kvstore_server.plan import Plan
from kvstore_server.protocol.control import pack_control
from tests.support import said as m
from tests.support.sim_delivery import Delivery, is_fencing
from tests.support.sim_lane import NAMESPACE, NUM_SERVERS, NUM_WORKERS, TABLES, Lane, SimOptions
from tests.support.sim_referee import Violation
from tests.support.sim_workers import SimProcess

STRANGER = b"stranger"
MAX_DRAIN = 100
"""Turns after which a schedule without loss must have come to its end."""


class Judge(Protocol):
    """A server of the simulation, with somebody who watches it."""

    def handle(self, process: int, request: m.Request, now: float) -> list[Delivery]: ...
    def tick(self, now: float) -> list[Delivery]: ...


JudgeT = TypeVar("JudgeT", bound=Judge)
ScheduleT = TypeVar("ScheduleT", bound="Schedule[Any]")


def played(schedule: ScheduleT) -> ScheduleT:
    """Play a schedule to its end.

    Raises:
        Violation: a promise was broken; the message begins with the seed.
    """
    try:
        schedule.run()
    except Violation as error:
        raise Violation(f"seed {schedule.seed}, step {schedule.step}: {error}") from None
    return schedule


class Schedule(ABC, Generic[JudgeT]):
    """One schedule; a subclass says what is at stake."""

    STEPS: ClassVar[int] = 90
    """Steps of disorder in it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.step = 0
        self.now = 0.0
        self.seed = seed
        self.processes: dict[int, SimProcess] = {}
        self.to_server: dict[tuple[int, int], deque[m.Request]] = {}
        self.to_process: dict[tuple[int, int], deque[m.Reply]] = {}
        self.replays: list[tuple[int, int, m.Request]] = []
        plans = [plan_module.make_plan(specs, NUM_SERVERS) for _, specs in TABLES]
        tokens = partial(random.Random(seed).getrandbits, 64)
        self._engines = [
            Engine(EngineConfig(server, NUM_SERVERS, run=server + 1), tokens=tokens)
            for server in range(NUM_SERVERS)
        ]
        self.seen: Counter[str] = Counter()
        """How often what happened, so that a test can tell that the schedules reach everything."""
        self._plans: list[Plan] = plans
        self._scales: tuple[float | None, ...]
        self._options: SimOptions
        self._begin()
        self.servers = [self._referee(engine) for engine in self._engines]

    @abstractmethod
    def _begin(self) -> None:
        """Choose what is the same for all processes: the options, and the factor of each rank."""

    @abstractmethod
    def _referee(self, engine: Engine) -> JudgeT:
        """Who watches a server."""

    @abstractmethod
    def run(self) -> None:
        """Begin in order, go through some steps of disorder, bring everything to an end and check it."""

    # ---------------------------------------------------------------- the scheduler

    def _chaos(self) -> None:
        rng = self.rng
        dice = rng.random()
        if dice < 0.37:
            self._deliver_request(rng.random())
        elif dice < 0.52:
            self._deliver_reply(rng.random())
        elif dice < 0.90:
            process, lane = self._some_lane()
            process.act(lane, rng, goal=1 << 30)
        elif dice < 0.93:
            process, lane = self._some_lane()
            process.push_again(lane, rng)
        elif dice < 0.96 and self.replays:
            process_, server, request = rng.choice(self.replays)
            self._to_engine(process_, server, request)
        elif dice < 0.98:
            process, lane = self._some_lane()
            process.give_up(lane)
        elif dice < 0.985:
            self._tick(rng.choice((0.5, 3.0, 40.0)))
        elif dice < 0.99:
            self._crash(rng.choice(self._alive()))
        else:
            self._intrude()

    def _some_lane(self) -> tuple[SimProcess, Lane]:
        process = self.rng.choice(self._alive())
        return process, self.rng.choice(process.lanes)

    def _alive(self) -> list[SimProcess]:
        return [process for process in self.processes.values() if process.is_alive]

    def _deliver_request(self, fate: float) -> None:
        full = [link for link, queue in self.to_server.items() if queue]
        if not full:
            return
        process, server = self.rng.choice(full)
        request = self.to_server[process, server].popleft()
        is_safe = isinstance(request.body, m.Register | m.SetOptimizer)
        if fate < 0.05 and not is_safe:
            return
        self._to_engine(process, server, request)
        if fate > 0.85 and not is_safe:
            self.replays.append((process, server, request))
            if fate > 0.95:
                self._to_engine(process, server, request)

    def _to_engine(self, process: int, server: int, request: m.Request) -> None:
        self._post(server, self.servers[server].handle(process, request, self.now))

    def _deliver_reply(self, fate: float) -> None:
        full = [link for link, queue in self.to_process.items() if queue]
        if not full:
            return
        server, process = self.rng.choice(full)
        reply = self.to_process[server, process].popleft()
        replies = [reply]
        while isinstance(replies[-1].body, m.Vetoed | m.InForce):
            # One message after the other on one connection: all or none.
            replies.append(self.to_process[server, process].popleft())
        if fate < 0.05 and not isinstance(reply.body, m.Registered):
            return
        for reply in replies:
            self.processes[process].take(server, reply)

    def _tick(self, seconds: float) -> None:
        self.now += seconds
        for server, referee in enumerate(self.servers):
            for process in self._alive():
                if server in process.sessions:
                    run, session = process.sessions[server]
                    referee.handle(process.process, m.Request(run, session, 0, m.Heartbeat()), self.now)
            self._post(server, referee.tick(self.now))

    def _intrude(self) -> None:
        """Let a stranger who has learnt of a session speak in it, from a socket of his own."""
        process = self.rng.choice([*self.processes.values()])
        lane, server = self.rng.choice(process.lanes), self.rng.randrange(NUM_SERVERS)
        if server not in lane.numbers:
            return
        run, session = process.sessions[server]
        bodies: list[m.RequestBody] = [m.Heartbeat(), m.Leave("a stranger", True), m.Stats()]
        bodies.append(m.Abort(lane.numbers[server], lane.round, "a stranger", False))
        bodies += [request.body for _, to, request in self.replays[-3:] if to == server and request.session]
        request = m.Request(run, session, 1, self.rng.choice(bodies))
        out = m.handle(self._engines[server], STRANGER, request, self.now, NAMESPACE)
        if len(out) != 1 or out[0].peer != STRANGER or not is_fencing(out[0].reply.body):
            raise Violation(f"server {server}: a stranger spoke for p{process.process}: {out}")
        self.seen["strangers"] += 1

    def _crash(self, process: SimProcess) -> None:
        """End a process; what it has sent still arrives. Its successor starts at once, or later."""
        if len(self.processes) > NUM_WORKERS + 1 or not process.is_ready:
            return
        if self.rng.random() < 0.3 and len(self._alive()) > 1:  # with the last one the job would be over
            # In a synchronous round everybody is needed, so there nobody is done before the others.
            process.leave(is_clean=not self._options.mode.is_sync and self.rng.random() < 0.5)
        process.is_alive = False
        for server in range(NUM_SERVERS):
            self.to_process[server, process.process].clear()
        if self.rng.random() < 0.7 or len(self._alive()) == 0:
            self._start_process(process.rank)

    def _revive(self) -> None:
        present = {process.rank for process in self._alive()}
        for rank in set(range(NUM_WORKERS)) - present:
            self._start_process(rank)

    def _start_process(self, rank: int) -> None:
        number = len(self.processes)

        def send(server: int, request: m.Request) -> None:
            self.to_server[number, server].append(request)

        for server in range(NUM_SERVERS):
            self.to_server[number, server] = deque()
            self.to_process[server, number] = deque()
        process = SimProcess(number, rank, self._plans, self._options, self._scales[rank], send)
        self.processes[number] = process
        process.say_hello()

    def _post(self, server: int, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            if self.processes[delivery.process].is_alive:
                self.to_process[server, delivery.process].append(delivery.reply)

    # ---------------------------------------------------------------- the end

    def _drain(self, goal: int) -> None:
        """Deliver everything without loss until every lane has come to round `goal`."""
        self._drain_to({(p.process, lane.table): goal for p in self._alive() for lane in p.lanes})

    def _drain_to(self, goals: Mapping[tuple[int, int], int]) -> None:
        """The same with a goal for each (process, table)."""
        for _ in range(MAX_DRAIN):
            if self._deliver_all():
                continue
            lanes = {(p.process, lane.table): (p, lane) for p in self._alive() for lane in p.lanes}
            late = [process for process in self._alive() if len(process.sessions) < NUM_SERVERS]
            for process in late:
                process.say_hello()
            if late:
                continue
            behind = [where for where in goals if lanes[where][1].round < goals[where]]
            if not behind:
                return
            for where in behind:
                process, lane = lanes[where]
                process.act(lane, self.rng, goals[where])
        raise Violation("the workers never came to an end: a round neither ends nor fails")

    def _deliver_all(self) -> bool:
        """Deliver what is on the links now; return whether anything was."""
        was_any = False
        for (process, server), requests in list(self.to_server.items()):
            while requests:
                was_any = True
                self._to_engine(process, server, requests.popleft())
        for (server, process), replies in list(self.to_process.items()):
            while replies:
                was_any = True
                self.processes[process].take(server, replies.popleft())
        return was_any


def packed(optimizer: str) -> bytes:
    """An optimizer as it is named on the wire."""
    return pack_control({"name": optimizer, "hyper": {"lr": 1.0}, "rescale_grad": 1.0})
