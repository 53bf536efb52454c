"""What a server must do without synchronous rounds: the promise, written down a second time and simply.

A contribution counts once, when it comes; who waits for what, and until when, follows from the clocks of the ranks. The
model never sees the engine. Values are small integers, so the weights are exact whatever the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvstore_server.plan import Plan
from tests.support import said as m
from tests.support.sim_compression import Array
from tests.support.sim_lane import BY_ROWS, NUM_WORKERS, SimOptions
from tests.support.sim_payloads import INTEGERS, only_rows, payload_at, rows_at

Told = tuple[int, int, list[type]]
"""(process, request number, kinds of the replies in order)."""


class Contributed(NamedTuple):
    """What is in the weights: which process, its round, its factor, and the generation of each slice."""

    process: int
    round: int
    scale: float
    manifest: tuple[tuple[int, int], ...]


@dataclass
class Turn:
    """The contributions of the present process of a rank."""

    process: int
    open: int = 0
    """The number of its open contribution; 0: it has not begun, and may with any."""
    arrived: dict[int, int] = field(default_factory=dict)
    """Slice → highest generation that came of the open one."""
    failed: set[int] = field(default_factory=set)
    """Those that failed since the last one that counts."""
    last: m.Commit | None = None
    """The last one that counts."""
    version: int = 0
    """Of the weights right after it."""


@dataclass
class Waiting:
    """A request that is answered later."""

    rank: int
    kinds: list[type]
    deadline: float
    timeout: float = 0.0
    is_join: bool = False
    round: int = -1


class AsyncModel:
    """One table on one server, after its first round."""

    def __init__(self, number: int, plan: Plan, server: int, keeps_last: bool, options: SimOptions) -> None:
        self.number = number
        self.options = options
        self.plan = plan
        self.slices = [piece.index for piece in plan.slices_of(server)]
        self.weights = {s: self._value(0, 0, s, 0) for s in self.slices}
        self.version = 0
        self.clocks = [0] * NUM_WORKERS
        self.joined: set[int] = set()
        self.left: set[int] = set()
        self.turns: dict[int, Turn] = {}
        self.waiting: dict[tuple[int, int], Waiting] = {}
        """(process, request number) → who waits there."""
        self.ledger: dict[tuple[int, int], Contributed] = {}
        """(process, round) → what it gave, as long as that stands."""
        self.undoable: Contributed | None = None
        """The contribution that can be taken back: the very last change, unless its rank went on."""
        self._keeps_last = keeps_last

    # ---------------------------------------------------------------- who takes part

    def begin(self, rank: int, process: int) -> None:
        """A process stands for a rank from now on."""
        self._forget(rank)
        self.joined.discard(rank)
        self.left.discard(rank)
        self.turns[rank] = Turn(process)

    def leave(self, rank: int, is_clean: bool) -> None:
        self._forget(rank)
        self.turns.pop(rank, None)
        if is_clean:
            self.left.add(rank)

    def needed(self, waiting: Waiting) -> list[int]:
        """The ranks that a request waits for."""
        taking_part = [r for r in range(NUM_WORKERS) if r not in self.joined and r not in self.left]
        if waiting.is_join:
            return taking_part
        return [r for r in taking_part if self.clocks[waiting.rank] - self.clocks[r] > self.limit]

    @property
    def limit(self) -> float:
        """How far a rank that reads may be ahead."""
        return self.options.mode.staleness if self.options.mode.name == "ssp" else float("inf")

    def _forget(self, rank: int) -> None:
        self.waiting = {key: w for key, w in self.waiting.items() if w.rank != rank}

    # ---------------------------------------------------------------- contributions

    def turn(self, rank: int, round_: int) -> Turn:
        """The turn of the present process, which means that round."""
        turn = self.turns[rank]
        if not turn.open:
            turn.open = round_
            self.clocks[rank] = max(self.clocks[rank], round_ - 1)
        return turn

    def proposed(self, rank: int) -> int:
        """Where a process of a rank that registers now should begin."""
        others = [c for r, c in enumerate(self.clocks) if r not in {rank, *self.joined, *self.left}]
        return self.turns[rank].open or 1 + max(self.clocks[rank], min(others, default=0))

    def push(self, rank: int, round_: int, slice_: int, generation: int) -> None:
        turn = self.turn(rank, round_)
        if round_ == turn.open:
            turn.arrived[slice_] = max(generation, turn.arrived.get(slice_, -1))
            if self.undoable is not None and self.undoable.process == turn.process:
                self.undoable = None

    def missing(self, rank: int, commit: m.Commit) -> tuple[int, ...]:
        arrived = self.turns[rank].arrived
        return tuple(s for s, g in commit.manifest if arrived.get(s) != g)

    def take(self, rank: int, commit: m.Commit, now: float) -> None:
        """Count a contribution."""
        turn = self.turns[rank]
        given = Contributed(turn.process, commit.round, commit.rescale or 1.0, commit.manifest)
        self.undoable = None
        self.clocks[rank] += 1
        self.joined.discard(rank)
        if not commit.joined and not commit.veto:
            assert (given.process, given.round) not in self.ledger
            self.ledger[given.process, given.round] = given
            self._add(given, 1.0)
            self.undoable = given if self._keeps_last else None
        turn.arrived, turn.last, turn.failed, turn.version = {}, commit, set(), self.version
        turn.open += 1
        self.waiting = {k: w for k, w in self.waiting.items() if not (w.is_join and w.rank == rank)}
        for waiting in self.waiting.values():
            if waiting.is_join:
                waiting.deadline = now + waiting.timeout
        if commit.joined:
            self.joined.add(rank)

    def answer(self, rank: int, key: tuple[int, int], commit: m.Commit, now: float) -> list[type]:
        """What a commit of a round that counts is told now."""
        last = self.turns[rank].last
        is_vetoed = last is not None and last.veto and commit.round > 0
        kinds: list[type] = [m.InForce] if commit.joined else []
        if is_vetoed:
            kinds += [m.Vetoed, m.Done]
        else:
            kinds += [m.Done, m.Weights] if commit.want_weights else [m.Done]
        limit = now + commit.timeout
        if commit.joined and rank in self.joined:
            return self.wait(key, Waiting(rank, kinds, limit, commit.timeout, True, commit.round))
        if is_vetoed or not commit.want_weights:
            return kinds
        return self.read(key, Waiting(rank, kinds, limit, round=commit.round))

    def read(self, key: tuple[int, int], waiting: Waiting) -> list[type]:
        return self.wait(key, waiting) if self.needed(waiting) else waiting.kinds

    def wait(self, key: tuple[int, int], waiting: Waiting) -> list[type]:
        if key in self.waiting:
            waiting.deadline = self.waiting[key].deadline
        self.waiting[key] = waiting
        return [m.Pending]

    def release(self) -> list[Told]:
        """Who is answered now."""
        ready = {key: w for key, w in self.waiting.items() if not self.needed(w)}
        if any(w.is_join for w in ready.values()):
            self.joined.clear()
            self.clocks = [max(self.clocks)] * NUM_WORKERS
        for key in ready:
            del self.waiting[key]
        return [(*key, w.kinds) for key, w in ready.items()]

    # ---------------------------------------------------------------- giving up

    def fail(self, keys: list[tuple[int, int]]) -> list[Told]:
        """Requests that wait in vain."""
        for key in keys:
            waiting = self.waiting.pop(key)
            if waiting.is_join:
                self.joined.discard(waiting.rank)
                self.turns[waiting.rank].failed.add(waiting.round)
        return [(*key, [m.Failed]) for key in keys]

    def abort(self, rank: int, abort: m.Abort) -> tuple[list[Told], bool]:
        """Who is told that a contribution was given up, and whether it stands all the same."""
        turn = self.turn(rank, abort.round)
        if abort.round == turn.open:
            self.clocks[rank] += 1
            self.joined.discard(rank)
            turn.failed.add(abort.round)
            turn.arrived = {}
            turn.open += 1
            if self.undoable is not None and self.undoable.process == turn.process:
                self.undoable = None
        elif abort.undo and abort.round == turn.open - 1 and abort.round not in turn.failed | {0}:
            self._undo(turn)
        told = self.fail([k for k, w in self.waiting.items() if (w.rank, w.round) == (rank, abort.round)])
        return told, abort.round not in turn.failed

    def _undo(self, turn: Turn) -> None:
        here = (turn.process, turn.open - 1)
        if here in self.ledger:
            if self.undoable != self.ledger[here]:
                return
            self._add(self.ledger.pop(here), -1.0)
            self.undoable = None
        turn.failed.add(turn.open - 1)

    # ---------------------------------------------------------------- numbers

    def total(self) -> dict[int, Array]:
        """The weights once more, from the ledger alone."""
        weights = {s: self._value(0, 0, s, 0).astype(np.int64) for s in self.slices}
        for given in self.ledger.values():
            for s, generation in given.manifest:
                part = given.scale * self._value(given.process, given.round, s, generation)
                weights[s] += part.astype(np.int64)
        return {s: weight.astype(np.float32) for s, weight in weights.items()}

    def _add(self, given: Contributed, sign: float) -> None:
        self.version += 1
        for s, generation in given.manifest:
            part = self._value(given.process, given.round, s, generation)
            self.weights[s] = self.weights[s] + np.float32(sign * given.scale) * part

    def _value(self, process: int, round_: int, slice_: int, generation: int) -> Array:
        identity = (process, self.number, round_, slice_, generation)
        values: Array = INTEGERS[payload_at(*identity, self.plan.slices[slice_].used)]
        if round_ and self.number == BY_ROWS and slice_ in self.options.by_rows:
            return only_rows(values, rows_at(*identity))
        return values
