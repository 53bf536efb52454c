"""Seeded interleavings: three workers, two servers and two tables under a scheduler that loses, repeats and delays.

`run_seed` plays one schedule from its seed alone, without sockets, threads or a real clock, and raises `Violation`
with the seed when a promise was broken.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from torch import Tensor

from kvstore_server import namespace
from kvstore_server import plan as plan_module
from kvstore_server.admission import EngineConfig
from kvstore_server.engine import Engine
from kvstore_server.optimizer import gluon, register
from kvstore_server.optimizer.base import StateValue
from kvstore_server.optimizer.kernels import state_tensor
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.control import pack_control
from tests.support.sim_compression import HALF, TWO_BIT
from tests.support.sim_lane import NUM_SERVERS, NUM_WORKERS, TABLES, Lane, SimOptions
from tests.support.sim_model import FAILED, TableModel
from tests.support.sim_referee import Delivery, Referee, Violation
from tests.support.sim_workers import SimProcess

STEPS = 90
"""Steps of disorder in one schedule."""
MAX_DRAIN = 100
"""Turns after which a schedule without loss must have come to its end."""


@register
class Remembering(gluon.Test):
    """`m = m / 2 + grad; w -= m`: the state shows in the weights of later rounds."""

    __test__ = False
    name = "sim_remembering"

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        memory = state_tensor(state, "memory", weight)
        weight.sub_(memory.mul_(0.5).add_(grad))


@register
class Cautious(Remembering):
    """The same, with the last round kept so that it can be taken back."""

    name = "sim_cautious"
    may_raise = True


@contextmanager
def small_slices() -> Iterator[None]:
    """Cut tables into slices of 64 bytes, so that tiny keys lie on both servers; make each plan only once."""

    @cache
    def plan_once(specs: tuple[TensorSpec, ...], num_servers: int, whole_keys: bool) -> Plan:
        return make_plan(specs, num_servers, whole_keys)

    def planned(specs: Sequence[TensorSpec], num_servers: int, whole_keys: bool = False) -> Plan:
        return plan_once(tuple(specs), num_servers, whole_keys)

    with (
        mock.patch.object(plan_module, "MIN_SLICE", 64),
        mock.patch.object(plan_module, "make_plan", planned),
        mock.patch.object(namespace, "make_plan", planned),
    ):
        yield


def run_seed(seed: int) -> Simulation:
    """Play the schedule of one seed to its end.

    Raises:
        Violation: a promise was broken; the message begins with the seed.
    """
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Violation as error:
        raise Violation(f"seed {seed}, step {simulation.step}: {error}") from None
    return simulation


class Simulation:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.step = 0
        self.now = 0.0
        self.can_undo = seed % 3 == 2
        self.processes: dict[int, SimProcess] = {}
        self.to_server: dict[tuple[int, int], deque[m.Request]] = {}
        self.to_process: dict[tuple[int, int], deque[m.Reply]] = {}
        self.replays: list[tuple[int, int, m.Request]] = []
        plans = [plan_module.make_plan(specs, NUM_SERVERS) for _, specs in TABLES]
        engines = [Engine(EngineConfig(server, NUM_SERVERS, run=server + 1)) for server in range(NUM_SERVERS)]
        self.seen: Counter[str] = Counter()
        """How often what happened, so that a test can tell that the schedules reach everything."""
        self.servers = [
            Referee(engine, self._models(engine, plans), self.processes, self.seen) for engine in engines
        ]
        self._plans: list[Plan] = plans
        self._scales = self.rng.choice(
            [(None, None, None), (1.0, 1.0, 1.0), (0.5, 0.5, 0.5), (1.0, 0.3, 0.7)]
        )
        optimizer = "sim_cautious" if self.can_undo else "sim_remembering"
        self._options = SimOptions(
            pack_control({"name": optimizer, "hyper": {"lr": 1.0}, "rescale_grad": 1.0}),
            codec=self.rng.choice((b"", b"", TWO_BIT, HALF)),
            assigns=self.rng.choice((0, 0, 1, 2)),
        )
        self._goal = 1 if self.rng.random() < 0.85 else 0

    def run(self) -> None:
        """Begin in order, go through `STEPS` steps of disorder, bring everything to an end and check it."""
        for rank in range(NUM_WORKERS):
            self._start_process(rank)
        self._drain(self._goal)
        for self.step in range(1, STEPS + 1):
            self._chaos()
        self._revive()
        self._drain(0)
        begun = [lane.round + lane.is_open for p in self._alive() for lane in p.lanes]
        ended = [model.open for referee in self.servers for model in referee.models]
        # What the disorder left behind of residuals shows in one more round.
        self._drain(max(begun + ended) + bool(self._options.codec))
        self._check_end()

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

    def _models(self, engine: Engine, plans: list[Plan]) -> list[TableModel]:
        server = engine.config.server
        return [TableModel(i, plan, server, NUM_WORKERS, self.can_undo) for i, plan in enumerate(plans)]

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
        is_hello = isinstance(request.body, m.Hello | m.Register | m.SetOptimizer)
        if fate < 0.05 and not is_hello:
            return
        self._to_engine(process, server, request)
        if fate > 0.85 and not is_hello:
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
        if isinstance(reply.body, m.Vetoed):  # one message after the other on one connection: both or none
            replies.append(self.to_process[server, process].popleft())
        if fate < 0.05 and not isinstance(reply.body, m.Welcome | m.Registered):
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

    def _crash(self, process: SimProcess) -> None:
        """End a process; what it has sent still arrives. Its successor starts at once, or later."""
        if len(self.processes) > NUM_WORKERS + 1 or not process.is_ready:
            return
        if self.rng.random() < 0.3 and len(self._alive()) > 1:  # with the last one the job would be over
            process.leave()
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
        process.start()

    def _post(self, server: int, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            if self.processes[delivery.process].is_alive:
                self.to_process[server, delivery.process].append(delivery.reply)

    # ---------------------------------------------------------------- the end

    def _drain(self, goal: int) -> None:
        """Deliver everything without loss until every lane has come to round `goal`."""
        for _ in range(MAX_DRAIN):
            if self._deliver_all():
                continue
            behind = [(p, lane) for p in self._alive() for lane in p.lanes if lane.round < goal]
            if not behind:
                return
            for process, lane in behind:
                process.act(lane, self.rng, goal)
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

    def _check_end(self) -> None:
        """Where servers differ about a round, every worker that saw its end knows; else all saw the same."""
        for table in range(len(TABLES)):
            outcomes = [referee.models[table].outcomes for referee in self.servers]
            if len(outcomes[0]) != len(outcomes[1]):
                raise Violation(
                    f"table {table}: the servers ended {len(outcomes[0])} and {len(outcomes[1])} rounds"
                )
            for round_, (first, second) in enumerate(zip(*outcomes, strict=True)):
                self.seen["apart"] += (first == FAILED) != (second == FAILED)
                seen = {p.lanes[table].log.get(round_) for p in self._alive()} - {None}
                # A worker may give up a round, for reasons of its own, that every server has applied.
                alike = {"failed"} if first == FAILED else {"done", "failed"}
                allowed = alike if (first == FAILED) == (second == FAILED) else {"apart"}
                if not seen <= allowed:
                    raise Violation(
                        f"round {round_} of table {table} is {first} and {second}, workers saw {seen}"
                    )
