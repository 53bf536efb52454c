"""Seeded interleavings of contributions that count one by one, with and without a bound on how far ranks drift."""

from __future__ import annotations

from typing import ClassVar

from kvstore_server.engine import Engine
from kvstore_server.modes import Mode
from tests.support.sim_async_model import AsyncModel
from tests.support.sim_async_referee import AsyncReferee
from tests.support.sim_delivery import Delivery
from tests.support.sim_lane import BY_ROWS, NUM_SERVERS, NUM_WORKERS, SimOptions
from tests.support.sim_model import same_bits
from tests.support.sim_optimizers import Adding, CautiousAdding
from tests.support.sim_payloads import row_slices
from tests.support.sim_referee import Violation
from tests.support.sim_schedule import Schedule, packed, played
from tests.support.sim_workers import SimProcess


def run_async_seed(seed: int) -> AsyncSimulation:
    """Play the schedule of one seed to its end. Raises Violation as `run_seed` does."""
    return played(AsyncSimulation(seed))


class AsyncSimulation(Schedule[AsyncReferee]):
    """One schedule of contributions that count one by one."""

    STEPS: ClassVar[int] = 150

    def _begin(self) -> None:
        rng = self.rng
        self._scales = rng.choice([(None, None, None), (1.0, 2.0, 3.0)])
        self._optimizer = (Adding, CautiousAdding)[self.seed % 2]
        mode = rng.choice((Mode("async"), Mode("ssp", 0), Mode("ssp", 1), Mode("ssp", 1), Mode("ssp", 3)))
        self._options = SimOptions(
            packed(self._optimizer.name),
            codec=b"",
            assigns=0,
            mode=mode,
            joins=rng.choice(((), (), (2, 1, 3), (5, 2, 4))),
            by_rows=row_slices(self._plans[BY_ROWS]) if rng.random() < 0.5 else frozenset(),
            integers=True,
        )
        self._pulls = rng.choice((0.1, 0.3, 0.3))

    def _referee(self, engine: Engine) -> AsyncReferee:
        models = [
            AsyncModel(number, plan, engine.config.server, self._optimizer.may_raise, self._options)
            for number, plan in enumerate(self._plans)
        ]
        return AsyncReferee(engine, models, self.processes, self.seen)

    def run(self) -> None:
        """Begin in order, go through some steps of disorder, let all join, and check what is there."""
        for rank in range(NUM_WORKERS):
            self._start_process(rank)
        self._drain(1)
        for referee in self.servers:
            referee.watch()
        for step in range(1, self.STEPS + 1):
            self.step = step
            dice = self.rng.random()
            if dice < self._pulls:
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
        self._check_end()

    def _post(self, server: int, deliveries: list[Delivery]) -> None:
        # Nobody does anything about weights that were pulled: the referee has seen them.
        super()._post(server, [d for d in deliveries if self.processes[d.process].awaits(d.reply.number)])

    def _pull(self) -> None:
        """Ask a server for weights a few times, and as a rule have it hear that at once."""
        rng = self.rng
        process, lane = self._some_lane()
        server = rng.randrange(NUM_SERVERS)
        if server in lane.numbers:
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
        for referee in self.servers:
            for model in referee.models:
                if model.waiting or model.joined:
                    raise Violation(
                        f"table {model.number}: {model.waiting} of {model.joined} wait at the end"
                    )

    def _check_end(self) -> None:
        """The weights are the sum of what stands; what a worker was told of that is true."""
        for server, referee in enumerate(self.servers):
            for model in referee.models:
                if not same_bits(model.total(), model.weights):
                    raise Violation(f"server {server}: table {model.number} is not the sum of what stands")
                for process in self.processes.values():
                    self._check_told(server, model, process)

    def _check_told(self, server: int, model: AsyncModel, process: SimProcess) -> None:
        lane = process.lanes[model.number]
        for round_, how in lane.log.items():
            if not round_ or round_ in lane.empty or how == "apart":
                continue
            if (how == "failed") == ((process.process, round_) in model.ledger):
                raise Violation(f"server {server}: p{process.process} believes that round {round_} is {how}")
