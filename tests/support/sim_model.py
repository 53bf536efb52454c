"""What one server of the simulation must do: the promise of the protocol, written down a second time and simply.

The model never sees the engine. It follows the messages that reached the server and knows, for every table, which
round is open, what each rank's contribution to it is, how the past rounds ended, and the weights in numpy float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvstore_server.plan import Plan
from tests.support.sim_compression import Array, said

APPLIED, VETOED, FAILED = "applied", "vetoed", "failed"

_POOL_SIZE = 1 << 14


def _make_pool() -> Array:
    rng = np.random.default_rng(20240)
    magnitude = np.exp2(rng.integers(-12, 13, _POOL_SIZE)).astype(np.float32)
    pool: Array = rng.standard_normal(_POOL_SIZE).astype(np.float32) * magnitude
    return pool


POOL = _make_pool()
"""Values of very different magnitude: their sum in another order has other bits."""


def payload_at(process: int, table: int, round_: int, slice_: int, generation: int, numel: int) -> slice:
    """The part of `POOL` that is the payload of this identity; different identities give different values."""
    mixed = process * 7919 + table * 104729 + round_ * 611953 + slice_ * 15485863 + generation * 32452843
    start = mixed % (_POOL_SIZE - numel)
    return slice(start, start + numel)


@dataclass(frozen=True)
class Given:
    """A committed contribution: whose, which generation of each slice, and its factor."""

    process: int
    manifest: tuple[tuple[int, int], ...]
    scale: float | None
    veto: bool
    assign: bool


@dataclass(frozen=True)
class Stored:
    """What a table holds after a round, and what compression held back of every process's slices."""

    weights: dict[int, Array]
    memory: dict[int, Array]
    """The optimizer's state of each slice."""
    residuals: dict[tuple[int, int], Array]
    """(process, slice) → residual."""


@dataclass
class TableModel:
    """One table on one server."""

    number: int
    plan: Plan
    server: int
    num_workers: int
    keeps_last: bool
    """Whether the optimizer may raise, so that the last round is kept until the next one begins."""
    open: int = 0
    can_undo: bool = False
    is_initialised: bool = False
    arrived: dict[int, dict[int, int]] = field(default_factory=dict)
    """Rank → slice → highest generation that its present process delivered for the open round."""
    committed: dict[int, Given] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    """Rank → the process that is to be answered."""
    deadlines: dict[int, float] = field(default_factory=dict)
    codecs: dict[int, bytes] = field(default_factory=dict)
    """Rank → how its slices are compressed; empty where they are not."""
    outcomes: list[str] = field(default_factory=list)
    """How each past round ended."""
    vetoes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Vetoed round → the ranks that vetoed it."""
    stored: Stored = field(init=False)
    before: Stored = field(init=False)
    """As it was before the last round that was applied."""

    def __post_init__(self) -> None:
        zeros = {p.index: np.zeros(p.used, np.float32) for p in self.plan.slices_of(self.server)}
        self.stored = self.before = Stored(zeros, zeros, {})

    @property
    def weights(self) -> dict[int, Array]:
        return self.stored.weights

    def replace_process(self, rank: int) -> None:
        self.waiting.pop(rank, None)
        if rank not in self.committed:
            self.arrived.pop(rank, None)

    def push(self, rank: int, round_: int, slice_: int, generation: int, codec: bytes) -> None:
        if round_ == self.open:
            self.can_undo = False
        if round_ == self.open and rank not in self.committed:
            self.codecs[rank] = codec
            seen = self.arrived.setdefault(rank, {})
            seen[slice_] = max(generation, seen.get(slice_, -1))

    def missing(self, rank: int, manifest: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """The slices of a manifest that have not arrived in exactly the generation that it names."""
        seen = self.arrived.get(rank, {})
        return tuple(s for s, g in manifest if seen.get(s) != g)

    def is_complete(self) -> bool:
        return len(self.committed) == self.num_workers

    def outcome(self) -> str:
        """How the open round ends, which every rank has committed."""
        given = [self.committed[rank] for rank in range(self.num_workers)]
        if self.open == 0 or all(g.assign for g in given):
            return APPLIED
        if not self.is_initialised or any(g.assign for g in given):
            return FAILED
        return VETOED if any(g.veto for g in given) else APPLIED

    def end(self, outcome: str) -> None:
        """End the open round; an applied one changes what is stored."""
        assigns = self.open == 0 or (outcome == APPLIED and self.committed[0].assign)
        self.can_undo = outcome == APPLIED and self.keeps_last and not assigns
        if outcome == VETOED:
            self.can_undo = True
            self.before = self.stored
            self.vetoes[self.open] = tuple(r for r, given in sorted(self.committed.items()) if given.veto)
        if outcome == APPLIED:
            self.is_initialised = True
            self.before = self.stored
            self.stored = self._assigned() if assigns else self._updated()
        self.outcomes.append(outcome)
        self.arrived, self.committed, self.waiting, self.deadlines = {}, {}, {}, {}
        self.open += 1

    def undo(self) -> None:
        """Take the last round back."""
        self.can_undo = False
        self.outcomes[-1] = FAILED
        self.stored = self.before

    def has_compressed(self) -> bool:
        """Whether a contribution to the open round is compressed."""
        return any(self.codecs.get(r) and g.manifest and not g.assign for r, g in self.committed.items())

    def _assigned(self) -> Stored:
        """The lowest rank's values; the optimizer's state and the residuals stay."""
        given = dict(self.committed[0].manifest)
        weights = {s: self._payload(self.committed[0].process, s, given[s]) for s in self.weights}
        return Stored(weights, self.stored.memory, self.stored.residuals)

    def _updated(self) -> Stored:
        """Each slice that anybody gave: m = m / 2 + sum; w = w - m."""
        weights, memory = dict(self.weights), dict(self.stored.memory)
        residuals = dict(self.stored.residuals)
        for s in weights:
            if self._is_given(s):
                memory[s] = memory[s] * np.float32(0.5) + self._sum(s, residuals)
                weights[s] = weights[s] - memory[s]
        return Stored(weights, memory, residuals)

    def _is_given(self, slice_: int) -> bool:
        return any(slice_ == s for given in self.committed.values() for s, _ in given.manifest)

    def _sum(self, slice_: int, residuals: dict[tuple[int, int], Array]) -> Array:
        """The left fold in rank order of the committed generation of every rank, each with its factor.

        Moves the residuals of those that are compressed.
        """
        total: Array | None = None
        for rank in range(self.num_workers):
            given = self.committed[rank]
            generation = dict(given.manifest).get(slice_)
            if generation is None:
                continue
            part = self._payload(given.process, slice_, generation)
            if codec := self.codecs[rank]:
                whole = part + residuals.get((given.process, slice_), np.float32(0))
                part = said(codec, whole)
                residuals[given.process, slice_] = whole - part
            part = part if given.scale is None else part * np.float32(given.scale)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _payload(self, process: int, slice_: int, generation: int) -> Array:
        numel = self.plan.slices[slice_].used
        return POOL[payload_at(process, self.number, self.open, slice_, generation, numel)]


def same_bits(a: Mapping[int, Array], b: Mapping[int, Array]) -> bool:
    return all(a[s].tobytes() == b[s].tobytes() for s in a)
