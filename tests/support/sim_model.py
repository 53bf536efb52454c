"""What one server of the simulation must do: the promise of the protocol, written down a second time and simply.

The model never sees the engine. It follows the messages that reached the server and knows, for every table, which
round is open, what each rank's contribution to it is, how the past rounds ended, and the weights in numpy float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore_server.plan import Plan

Array = npt.NDArray[np.float32]

APPLIED, FAILED = "applied", "failed"

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
    outcomes: list[str] = field(default_factory=list)
    """How each past round ended."""
    weights: dict[int, Array] = field(default_factory=dict)
    before: dict[int, Array] = field(default_factory=dict)
    """The weights before the last round that was applied."""

    def __post_init__(self) -> None:
        for piece in self.plan.slices_of(self.server):
            self.weights[piece.index] = np.zeros(piece.used, np.float32)

    def replace_process(self, rank: int) -> None:
        self.waiting.pop(rank, None)
        if rank not in self.committed:
            self.arrived.pop(rank, None)

    def push(self, rank: int, round_: int, slice_: int, generation: int) -> None:
        if round_ == self.open:
            self.can_undo = False
        if round_ == self.open and rank not in self.committed:
            seen = self.arrived.setdefault(rank, {})
            seen[slice_] = max(generation, seen.get(slice_, -1))

    def missing(self, rank: int, manifest: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """The slices of a manifest that have not arrived in exactly the generation that it names."""
        seen = self.arrived.get(rank, {})
        return tuple(s for s, g in manifest if seen.get(s) != g)

    def is_complete(self) -> bool:
        return len(self.committed) == self.num_workers

    def end(self, outcome: str) -> None:
        """End the open round; an applied one changes the weights."""
        self.can_undo = outcome == APPLIED and self.keeps_last and self.open > 0
        if outcome == APPLIED:
            self.is_initialised = True
            self.before = self.weights
            self.weights = self._initial() if self.open == 0 else self._updated()
        self.outcomes.append(outcome)
        self.arrived, self.committed, self.waiting, self.deadlines = {}, {}, {}, {}
        self.open += 1

    def undo(self) -> None:
        """Take the last round back."""
        self.can_undo = False
        self.outcomes[-1] = FAILED
        self.weights = self.before

    def _initial(self) -> dict[int, Array]:
        given = dict(self.committed[0].manifest)
        return {s: self._payload(self.committed[0].process, s, given[s]) for s in self.weights}

    def _updated(self) -> dict[int, Array]:
        return {s: w - self._sum(s) if self._is_given(s) else w for s, w in self.weights.items()}

    def _is_given(self, slice_: int) -> bool:
        return any(slice_ == s for given in self.committed.values() for s, _ in given.manifest)

    def _sum(self, slice_: int) -> Array:
        """The left fold in rank order of the committed generation of every rank, each with its factor."""
        total: Array | None = None
        for rank in range(self.num_workers):
            given = self.committed[rank]
            generation = dict(given.manifest).get(slice_)
            if generation is not None:
                part = self._payload(given.process, slice_, generation)
                part = part if given.scale is None else part * np.float32(given.scale)
                total = part if total is None else total + part
        assert total is not None
        return total

    def _payload(self, process: int, slice_: int, generation: int) -> Array:
        numel = self.plan.slices[slice_].used
        return POOL[payload_at(process, self.number, self.open, slice_, generation, numel)]


def same_bits(a: Mapping[int, Array], b: Mapping[int, Array]) -> bool:
    return all(a[s].tobytes() == b[s].tobytes() for s in a)
