"""Seeded interleavings of synchronous rounds.

`run_seed` plays one schedule from its seed alone, and raises `Violation` with the seed when a promise was broken.
"""

from __future__ import annotations

from kvstore_server.engine import Engine
from kvstore_server.hyper import pack_hypers
from tests.support.sim_compression import HALF, TWO_BIT
from tests.support.sim_held import NORM_TYPES
from tests.support.sim_lane import BY_ROWS, NEVER, NUM_WORKERS, TABLES, SimOptions
from tests.support.sim_model import FAILED, RATES, TableModel
from tests.support.sim_optimizers import Cautious, Lazy, Remembering
from tests.support.sim_payloads import row_slices
from tests.support.sim_referee import Referee, Violation
from tests.support.sim_schedule import Schedule, packed, played

HYPERS = tuple(pack_hypers([{"lr": rate}], {}, {}, True) for rate in RATES)


def run_seed(seed: int) -> Simulation:
    """Play the schedule of one seed to its end. Raises Violation."""
    return played(Simulation(seed))


class Simulation(Schedule[Referee]):
    """One schedule of synchronous rounds."""

    def _begin(self) -> None:
        """Choose what is the same for all processes."""
        rng = self.rng
        self._scales = rng.choice([(None, None, None), (1.0, 1.0, 1.0), (0.5, 0.5, 0.5), (1.0, 0.3, 0.7)])
        self._optimizer = (Remembering, Lazy, Cautious)[self.seed % 3]
        self._options = SimOptions(
            packed(self._optimizer.name),
            codec=rng.choice((b"", b"", TWO_BIT, HALF)),
            assigns=rng.choice((0, 0, 1, 2)),
            hypers=rng.choice(((), HYPERS)),
            hyper_changes=rng.choice((1, 2, 3, NEVER)),
            joins=rng.choice(((), (), (), (2, 1, 3), (0, 1, 1))),
            hold=rng.choice((0.0, 0.0, *NORM_TYPES)),
            by_rows=row_slices(self._plans[BY_ROWS]) if rng.random() < 0.6 else frozenset(),
        )
        self._goal = 1 if rng.random() < 0.85 else 0

    def _referee(self, engine: Engine) -> Referee:
        optimizer = self._optimizer
        models = [
            TableModel(
                number, plan, engine.config.server, NUM_WORKERS, optimizer.may_raise, self._options, optimizer is Lazy
            )
            for number, plan in enumerate(self._plans)
        ]  # fmt: skip
        return Referee(engine, models, self.processes, self.seen)

    def run(self) -> None:
        """Begin in order, go through some steps of disorder, bring everything to an end and check it."""
        for rank in range(NUM_WORKERS):
            self._start_process(rank)
        self._drain(self._goal)
        for step in range(1, self.STEPS + 1):
            self.step = step
            self._chaos()
        self._revive()
        self._drain(0)
        begun = [lane.round + lane.is_open for p in self._alive() for lane in p.lanes]
        ended = [model.open for referee in self.servers for model in referee.models]
        # What the disorder left behind of residuals shows in one more round.
        self._drain(max(begun + ended) + bool(self._options.codec))
        self._check_end()

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
                alike = {"failed"} if first == FAILED else {"done", "kept"}
                allowed = alike if (first == FAILED) == (second == FAILED) else {"apart"}
                if not seen <= allowed:
                    raise Violation(
                        f"round {round_} of table {table} is {first} and {second}, workers saw {seen}"
                    )
