"""Seeded schedules of three workers, two servers and two tables, over a network that loses, repeats and delays.

There are no sockets and no clock. `run_seed` and `run_async_seed` play a schedule from its seed alone, and raise
`Violation` with the seed when a promise was broken.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.rounds import Mode
from kvstore_server.optimizer import gluon, register
from kvstore_server.optimizer.base import StateValue
from kvstore_server.optimizer.gluon import state_tensor
from kvstore_server.protocol import messages as m
from tests.sim.model import DEAD_AFTER, FAILED, RATES, AsyncModel, Members, SyncModel, Violation
from tests.sim.referee import Delivery, Referee, is_fencing
from tests.sim.workers import (
    HALF,
    NEVER,
    NORM_TYPES,
    NUM_SERVERS,
    NUM_WORKERS,
    SPECS,
    TWO_BIT,
    Lane,
    SimOptions,
    Worker,
    packed,
    tiny_slices,
)

STRANGER = b"stranger"
MAX_DRAIN = 100
"""Turns after which a schedule without loss must have come to its end."""
HYPERS = tuple(pack_hypers([{"lr": rate}], {}, {}, True) for rate in RATES)
TABLES = range(len(SPECS))
LOOKS_EVERY = 8
"""Steps between two looks of a server at the workers' processes."""
CRASHES_HALFWAY, CHANGES_HALFWAY = 0.05, 0.1
"""How often in a step a process ends, or gives something else, while some slices of a round are applied and others are
not."""


@register
class Remembering(gluon.Test):
    """`m = m / 2 + grad; w -= lr * m`: the state shows in the weights of later rounds."""

    __test__ = False
    name = "sim_remembering"

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        memory = state_tensor(state, "memory", weight)
        weight.sub_(memory.mul_(0.5).add_(grad), alpha=hyper["lr"])


@register
class Cautious(Remembering):
    """The same, with the last round kept so that it can be taken back."""

    name = "sim_cautious"
    may_raise = True


@register
class Lazy(Remembering):
    """The same, except that rows alone touch those rows alone."""

    name = "sim_lazy"

    def updates_rows(self, hyper: Mapping[str, Any]) -> bool:
        return True


@register
class Adding(gluon.Test):
    """`w += grad`; with integers any order of contributions gives the same sum."""

    __test__ = False
    name = "sim_adding"

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        weight.add_(grad)

    def updates_rows(self, hyper: Mapping[str, Any]) -> bool:
        return not self.may_raise


@register
class CautiousAdding(Adding):
    """The same, with the last contribution kept so that it can be taken back."""

    name = "sim_cautious_adding"
    may_raise = True


def run_seed(seed: int) -> Counter[str]:
    """Play a schedule of synchronous rounds; returns how often what happened in it. Raises Violation."""
    return _played(SyncSchedule, seed)


def run_async_seed(seed: int) -> Counter[str]:
    """Play a schedule of contributions that count one by one, as `run_seed` does."""
    return _played(AsyncSchedule, seed)


def _played(kind: type[Schedule], seed: int) -> Counter[str]:
    with tiny_slices():
        schedule = kind(seed)
        try:
            schedule.run()
        except Violation as error:
            raise Violation(f"seed {seed}, step {schedule.step}: {error}") from None
    return schedule.seen


class Schedule(ABC):
    """One schedule; a subclass says what is at stake."""

    STEPS: ClassVar[int]
    """Steps of disorder in it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.step = 0
        self.now = 0.0
        self.processes: dict[int, Worker] = {}
        self.to_server: dict[tuple[int, int], deque[m.Request]] = {}
        self.to_process: dict[tuple[int, int], deque[m.Reply]] = {}
        self.replays: list[tuple[int, int, m.Request]] = []
        self.seen: Counter[str] = Counter()
        """How often what happened, so that a test can tell that the schedules reach everything."""
        self.gives_up = self.rng.choice((0.0, 0.005, 0.02))
        """How often in a step a process fails a round."""
        self.loses = self.rng.choice((0.02, 0.05, 0.15))
        """How often a message is lost."""
        self.sees_processes = seed % 2 == 1
        """The servers are on the workers' host."""
        self.scales: tuple[float | None, ...] = (None,) * NUM_WORKERS
        self.options = self._options()
        tokens = partial(random.Random(seed).getrandbits, 64)
        self.servers = [
            self._referee(
                self._engine(
                    EngineConfig(server, NUM_SERVERS, run_id=server + 1, dead_after=DEAD_AFTER), tokens
                )
            )
            for server in range(NUM_SERVERS)
        ]

    def _engine(self, config: EngineConfig, tokens: Callable[[], int]) -> Engine:
        return Engine(config, tokens=tokens)

    @abstractmethod
    def _options(self) -> SimOptions:
        """Choose what is the same for all processes, and the factor of each rank."""

    @abstractmethod
    def _referee(self, engine: Engine) -> Referee:
        """Who watches a server."""

    @abstractmethod
    def run(self) -> None:
        """Begin in order, go through some steps of disorder, bring everything to an end and check it."""

    # ---------------------------------------------------------------- disorder

    def _chaos(self) -> None:
        rng = self.rng
        dice = rng.random()
        if dice < 0.37:
            self._deliver_request(rng.random())
        elif dice < 0.52:
            self._deliver_reply(rng.random())
        elif dice < 0.87:
            process, lane = self._some_lane()
            process.act(lane, rng, goal=NEVER)
        elif dice < 0.92:
            process, lane = self._some_lane()
            process.push_again(lane, rng)
        elif dice < 0.93:
            process, lane = self._some_lane()
            process.discard_eager(lane, rng)
        elif dice < 0.96 and self.replays:
            process_, server, request = rng.choice(self.replays)
            self._to_engine(process_, server, request)
        elif dice < 0.96 + self.gives_up:
            process, lane = self._some_lane()
            process.give_up(lane)
        elif dice < 0.98:
            process, lane = self._some_lane()
            process.act(lane, rng, goal=NEVER)
        elif dice < 0.985:
            self._tick(rng.choice((0.5, 3.0, 40.0)))
        elif dice < 0.99:
            self._crash(rng.choice(self._alive()))
        else:
            self._intrude()

    def _some_lane(self) -> tuple[Worker, Lane]:
        process = self.rng.choice(self._alive())
        return process, self.rng.choice(process.lanes)

    def _alive(self) -> list[Worker]:
        return [process for process in self.processes.values() if process.is_alive]

    def _deliver_request(self, fate: float) -> None:
        full = [link for link, queue in self.to_server.items() if queue]
        if not full:
            return
        process, server = self.rng.choice(full)
        request = self.to_server[process, server].popleft()
        is_safe = isinstance(request.body, m.Register | m.SetOptimizer)
        if fate < self.loses and not is_safe:
            return
        self._to_engine(process, server, request)
        if fate > 0.85 and not is_safe:
            self.replays.append((process, server, request))
            if fate > 0.95:
                self._to_engine(process, server, request)

    def _to_engine(self, process: int, server: int, request: m.Request) -> None:
        self._post(server, self.servers[server].handle(process, request, self.now))

    def _post(self, server: int, deliveries: Iterable[Delivery]) -> None:
        for process, reply in deliveries:
            # Nobody does anything about weights that were pulled: the referee has seen them.
            if self.processes[process].is_alive and self.processes[process].awaits(reply.number):
                self.to_process[server, process].append(_sent(reply))

    def _deliver_reply(self, fate: float) -> None:
        full = [link for link, queue in self.to_process.items() if queue]
        if not full:
            return
        server, process = self.rng.choice(full)
        queue = self.to_process[server, process]
        replies = [queue.popleft()]
        while isinstance(replies[-1].body, m.Vetoed | m.EffectiveOptions):
            replies.append(queue.popleft())  # one message after the other on one connection: all or none
        if fate < self.loses and not isinstance(replies[0].body, m.Registered):
            return
        for reply in replies:
            self.processes[process].take(server, reply)

    def _look(self) -> None:
        """Let servers that see processes do so often, as they do."""
        if self.sees_processes and self.step % LOOKS_EVERY == 0:
            self._tick(0.2)

    def _tick(self, seconds: float) -> None:
        self.now += seconds
        for server, referee in enumerate(self.servers):
            for process in self._alive():
                if server in process.sessions:
                    request = m.Request(*process.sessions[server], 0, m.Heartbeat())
                    referee.handle(process.process, request, self.now)
            if self.sees_processes:
                referee.look(self.now)
            self._post(server, referee.tick(self.now))

    def _intrude(self) -> None:
        """Let a stranger who has learnt of a session speak in it, from a socket of his own."""
        process = self.rng.choice([*self.processes.values()])
        lane, server = self.rng.choice(process.lanes), self.rng.randrange(NUM_SERVERS)
        if server not in lane.next_rounds:
            return
        bodies: list[m.RequestBody] = [m.Heartbeat(), m.Leave("a stranger", True), m.Stats()]
        bodies.append(m.Abort(lane.table, lane.round, "a stranger", False))
        bodies += [request.body for _, to, request in self.replays[-3:] if to == server and request.session]
        request = m.Request(*process.sessions[server], 1, self.rng.choice(bodies))
        out = self.servers[server].engine.handle(STRANGER, request, self.now)
        if len(out) != 1 or out[0].peer != STRANGER or not is_fencing(out[0].reply.body):
            raise Violation(f"server {server}: a stranger spoke for p{process.process}: {out}")
        self.seen["strangers"] += 1

    def _crash(self, process: Worker) -> None:
        """End a process; what it has sent still arrives. Its successor starts at once, or later."""
        if len(self.processes) > NUM_WORKERS + 1 or not process.is_ready:
            return
        at_once = 0.7
        if self.rng.random() < 0.5 and len(self._alive()) > 1:  # with the last one the job would be over
            # In a synchronous round everybody is needed, so there nobody is done before the others.
            is_done = not self.options.mode.is_sync and self.rng.random() < 0.5
            process.leave(is_done)
            at_once = 0.2 if is_done else 0.7
        process.is_alive = False
        for server in range(NUM_SERVERS):
            self.to_process[server, process.process].clear()
        if self.rng.random() < at_once or not self._alive():
            self._start_process(process.rank)

    def _revive(self) -> None:
        for rank in set(range(NUM_WORKERS)) - {process.rank for process in self._alive()}:
            self._start_process(rank)

    def _start_process(self, rank: int) -> None:
        number = len(self.processes)

        def send(server: int, request: m.Request) -> None:
            self.to_server[number, server].append(request)

        for server in range(NUM_SERVERS):
            self.to_server[number, server] = deque()
            self.to_process[server, number] = deque()
        process = Worker(number, rank, self.options, self.scales[rank], send)
        self.processes[number] = process
        process.say_hello()

    # ---------------------------------------------------------------- the end

    def _drain(self, goal: int) -> None:
        """Deliver everything without loss until every lane has come to round `goal`."""
        self._drain_to({(p.process, table): goal for p in self._alive() for table in TABLES})

    def _drain_to(self, goals: Mapping[tuple[int, int], int]) -> None:
        """The same with a goal for each (process, table)."""
        for _ in range(MAX_DRAIN):
            if self._deliver_all():
                continue
            late = [process for process in self._alive() if len(process.sessions) < NUM_SERVERS]
            for process in late:
                process.say_hello()
            if late:
                continue
            steps = [(self.processes[number], table, goal) for (number, table), goal in goals.items()]
            steps = [step for step in steps if step[0].lanes[step[1]].round < step[2]]
            if not steps:
                return
            for process, table, goal in steps:
                process.act(process.lanes[table], self.rng, goal)
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


class SyncSchedule(Schedule):
    """Rounds for which all ranks are needed."""

    STEPS = 180

    def _options(self) -> SimOptions:
        rng = self.rng
        self.scales = rng.choice([(None, None, None), (1.0, 1.0, 1.0), (0.5, 0.5, 0.5), (1.0, 0.3, 0.7)])
        self.optimizer = (Remembering, Lazy, Cautious)[self.seed % 3]
        self.goal = 1 if rng.random() < 0.85 else 0
        announces = rng.choice((0.0, 0.9, 1.0))
        return SimOptions(
            self.seed,
            packed(self.optimizer.name),
            codec=rng.choice((b"", TWO_BIT, HALF)),
            assigns=rng.choice((0, 0, 1, 2)),
            hypers=rng.choice(((), HYPERS)),
            hyper_changes=rng.choice((1, 2, 3, NEVER)),
            joins=rng.choice(((), (), (), (2, 1, 3), (0, 1, 1))),
            by_rows=rng.random() < (0.9 if self.optimizer is Lazy else 0.5),
            hold=0.0 if announces == 1.0 else rng.choice((0.0, 0.0, *NORM_TYPES)),
            differs=rng.choice((0.0, 0.0, 0.15)),
            announces=announces,
            expects=rng.choice((0.0, 0.7, 1.0)),
            expects_wrongly=rng.random() < 0.3,
        )

    def _referee(self, engine: Engine) -> Referee:
        server, optimizer, members = engine.config.server, self.optimizer, Members(may_be_replaced=False)
        models = [
            SyncModel(
                table, server, self.options, optimizer.may_raise, members, self.seen, optimizer is Lazy
            )
            for table in TABLES
        ]  # fmt: skip
        return Referee(engine, models, members, self.processes, self.seen)

    def run(self) -> None:
        for rank in range(NUM_WORKERS):
            self._start_process(rank)
        self._drain(self.goal)
        for step in range(1, self.STEPS + 1):
            self.step = step
            self._look()
            is_halfway = any(model.early for referee in self.servers for model in referee.models)
            dice = self.rng.random() if is_halfway else 1.0
            if dice < CRASHES_HALFWAY:
                self._crash(self.rng.choice(self._alive()))
            elif dice < CRASHES_HALFWAY + CHANGES_HALFWAY:
                process, lane = self._some_lane()
                process.push_again(lane, self.rng)
            else:
                self._chaos()
        self._revive()
        self._drain(0)
        begun = [lane.round + lane.is_open for p in self._alive() for lane in p.lanes]
        ended = [model.next_round(0) for referee in self.servers for model in referee.models]
        # What the disorder left behind in states and residuals shows in one more round.
        self._drain(max(*begun, *ended, self.options.assigns + 1) + 1)
        for table in TABLES:
            self._check_end(table)
        for process in self.processes.values():
            for server, table, round_, found in process.read:
                model = self.servers[server].models[table]
                assert isinstance(model, SyncModel)
                if found != {slot: one.tobytes() for slot, one in model.results[round_].items()}:
                    raise Violation(
                        f"p{process.process} read other weights of round {round_} of table {table}"
                    )

    def _check_end(self, table: int) -> None:
        """Where servers differ about a round, every worker that saw its end knows; else all saw the same."""
        models = [referee.models[table] for referee in self.servers]
        first, second = [model.outcomes for model in models if isinstance(model, SyncModel)]
        if len(first) != len(second):
            raise Violation(f"table {table}: the servers ended {len(first)} and {len(second)} rounds")
        for round_, ends in enumerate(zip(first, second, strict=True)):
            is_apart = (ends[0] == FAILED) != (ends[1] == FAILED)
            self.seen["apart"] += is_apart
            seen = {p.lanes[table].log.get(round_) for p in self._alive()} - {None}
            # A worker may give up a round, for reasons of its own, that every server has applied.
            allowed = {"apart"} if is_apart else {"failed"} if ends[0] == FAILED else {"done", "kept"}
            if not seen <= allowed:
                raise Violation(f"round {round_} of table {table} is {ends}, workers saw {seen}")


def _sent(reply: m.Reply) -> m.Reply:
    """A reply as it is on its way: the weights of a server change meanwhile."""
    body = reply.body
    if not isinstance(body, m.Weights):
        return reply
    return reply._replace(body=replace(body, payloads=tuple([one.clone() for one in body.payloads])))


class AsyncSchedule(Schedule):
    """Contributions that count one by one, with and without a bound on how far ranks drift."""

    STEPS = 300

    def _options(self) -> SimOptions:
        rng = self.rng
        self.scales = rng.choice([(None, None, None), (1.0, 2.0, 3.0)])
        self.optimizer = (Adding, CautiousAdding)[self.seed % 2]
        self.pulls = rng.choice((0.2, 0.4, 0.4))
        return SimOptions(
            self.seed,
            packed(self.optimizer.name),
            mode=rng.choice((Mode("async"), Mode("ssp", 0), Mode("ssp", 1), Mode("ssp", 1), Mode("ssp", 3))),
            joins=rng.choice(((), (), (2, 1, 3), (5, 2, 4))),
            by_rows=rng.random() < 0.5,
        )

    def _referee(self, engine: Engine) -> Referee:
        server, members = engine.config.server, Members(may_be_replaced=True)
        models = [
            AsyncModel(table, server, self.options, self.optimizer.may_raise, members, self.seen)
            for table in TABLES
        ]
        referee = Referee(engine, models, members, self.processes, self.seen)
        referee.is_watching = False
        return referee

    def run(self) -> None:
        for rank in range(NUM_WORKERS):
            self._start_process(rank)
        self._drain(1)
        for referee in self.servers:
            referee.watch(self.processes[0], self.now)
        for step in range(1, self.STEPS + 1):
            self.step = step
            self._look()
            dice = self.rng.random()
            if dice < self.pulls:
                self._pull()
            elif dice > 0.98:
                self._tick(self.rng.choice((1.0, 28.0)))
            else:
                self._chaos()
        self._revive()
        self._drain(0)
        self._settle()
        for _ in range(1 + (self.seed % 4 == 0)):
            self._join_all()
        for server, referee in enumerate(self.servers):
            for model in referee.models:
                assert isinstance(model, AsyncModel)
                self._check_end(server, model)

    def _pull(self) -> None:
        """Ask a server for weights a few times, and as a rule have it hear that at once."""
        rng = self.rng
        process, lane = self._some_lane()
        server = rng.randrange(NUM_SERVERS)
        if server in lane.next_rounds:
            for _ in range(rng.choice((1, 1, 3, 8))):
                process.pull(lane, server)
            queue = self.to_server[process.process, server]
            while queue and rng.random() < 0.95:
                self._to_engine(process.process, server, queue.popleft())

    def _settle(self) -> None:
        """Whoever waits does so no more: a rank may have joined on one server alone."""
        goals = {}
        for process in self._alive():
            for lane in process.lanes:
                process.give_up(lane)
                goals[process.process, lane.table] = lane.round + lane.is_open
        self._drain_to(goals)

    def _join_all(self) -> None:
        """Let every rank give some more, differently many, and then wait for the others."""
        goals = {}
        for process in self._alive():
            for lane in process.lanes:
                lane.joins_at = lane.round + self.rng.randrange(3)
                goals[process.process, lane.table] = lane.joins_at + 1
        self._drain_to(goals)

    def _check_end(self, server: int, model: AsyncModel) -> None:
        """The weights are the sum of what stands, nobody waits, and what a worker was told is true."""
        if model.waiting or model.joined:
            raise Violation(f"table {model.table}: {model.waiting} of {model.joined} wait at the end")
        total = model.total()
        if any(total[slot].tobytes() != model.weights[slot].tobytes() for slot in model.slots):
            raise Violation(f"server {server}: table {model.table} is not the sum of what stands")
        for process in self.processes.values():
            lane = process.lanes[model.table]
            for round_, how in lane.log.items():
                if not round_ or round_ in lane.empty or how == "apart":
                    continue
                if (how == "failed") == ((process.process, round_) in model.ledger):
                    raise Violation(
                        f"server {server}: p{process.process} believes that round {round_} is {how}"
                    )
