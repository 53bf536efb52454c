"""What one server of the simulation must do: the promise of the protocol, written down a second time and simply.

The model never sees the engine. It follows the messages that reached the server and knows, for every table, which
round is open, what each rank's contribution to it is, how the past rounds ended, and the weights in numpy float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvstore_server.norms import Decision
from kvstore_server.plan import Plan
from tests.support.sim_compression import Array, said
from tests.support.sim_held import applied, partial
from tests.support.sim_lane import BY_ROWS, SimOptions
from tests.support.sim_payloads import POOL, ROWS, only_rows, payload_at, rows_at

APPLIED, VETOED, FAILED, HELD = "applied", "vetoed", "failed", "held"
RATES = (1.0, 0.5)
"""The learning rates before and after they change."""


@dataclass(frozen=True)
class Given:
    """A committed contribution: whose, which generation of each slice, and its factor."""

    process: int
    manifest: tuple[tuple[int, int], ...]
    scale: float | None
    veto: bool
    assign: bool
    joined: bool
    hold: float = 0.0


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
    options: SimOptions
    is_lazy: bool = False
    """Whether a sum that has only some rows changes nothing of the others."""
    open: int = 0
    version: int = -1
    end_version: int = -1
    """As of the last round that was applied or vetoed."""
    hyper_told: bytes = b""
    """The hyper-parameters that were in force in it, as those hear that have joined."""
    is_over: bool = False
    """Whether all ranks had joined in it."""
    beliefs: dict[int, bytes] = field(default_factory=dict)
    """Rank → the hyper-parameters that it sent last."""
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
    is_held: bool = False
    """Whether the open round waits for a decision."""
    partials: dict[int, dict[int, float]] = field(default_factory=dict)
    """Round that was held → the partial norm of every slice that was given."""
    decision: Decision = field(default_factory=Decision)
    stored: Stored = field(init=False)
    before: Stored = field(init=False)
    """As it was before the last round that was applied."""
    is_changed: bool = field(default=False, init=False)
    """Whether that round has changed the weights."""

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
        """What a server says that a commit lacks: all that has not arrived, or everything if that is nothing.

        It lacks nothing if each slice of the manifest has arrived in exactly the generation that it names.
        """
        seen = self.arrived.get(rank, {})
        if all(seen.get(s) == g for s, g in manifest):
            return ()
        return tuple(s for s in self.weights if s not in seen) or tuple(self.weights)

    def is_complete(self) -> bool:
        return len(self.committed) == self.num_workers

    def outcome(self) -> str:
        """How the open round ends, which every rank has committed; or that it is held."""
        given = self.active()
        assigns = [g.assign for g in given.values()]
        if not self.open or not given:
            return APPLIED
        if any(assigns):  # all want that, and all have data
            return APPLIED if assigns.count(True) == self.num_workers else FAILED
        if not self.is_initialised:
            return FAILED
        if any(g.veto for g in given.values()):
            return VETOED
        if len({g.hold for g in given.values()}) > 1:
            return FAILED
        if len({self.beliefs.get(rank, b"") for rank in given} - {b""}) > 1:
            return FAILED
        return HELD if any(g.hold for g in given.values()) else APPLIED

    def hold(self) -> None:
        """The open round waits for a decision."""
        self.is_held = True
        norm_type = next(iter(self.active().values())).hold
        given = (s for s in self.weights if self._is_given(s))
        self.partials[self.open] = {
            s: partial(self._sum(s, dict(self.stored.residuals)), norm_type) for s in given
        }

    def active(self) -> dict[int, Given]:
        """The contributions of the ranks that have data, in rank order."""
        return {rank: given for rank, given in sorted(self.committed.items()) if not given.joined}

    def hyper(self) -> bytes:
        """The hyper-parameters in force: those of the lowest rank that has data."""
        return next((self.beliefs[rank] for rank in self.active() if rank in self.beliefs), b"")

    def end(self, outcome: str) -> None:
        """End the open round; an applied one changes what is stored."""
        active = self.active()
        assigns = self.open == 0 or (outcome == APPLIED and any(g.assign for g in active.values()))
        self.can_undo = outcome == APPLIED and self.keeps_last and not assigns
        self.is_changed = bool(active) and outcome == APPLIED
        if outcome != FAILED:
            self.is_over = not active
            self.hyper_told = self.hyper() if self.is_changed and not assigns else b""
            self.version += self.is_changed
            self.end_version = self.version
        if not active:
            self.can_undo = True
        if outcome == VETOED:
            self.can_undo = True
            self.before = self.stored
            self.vetoes[self.open] = tuple(r for r, given in active.items() if given.veto)
        if outcome == APPLIED:
            self.is_initialised = self.is_initialised or bool(active)
            self.before = self.stored
            if active:
                self.stored = self._assigned() if assigns else self._updated()
        self.outcomes.append(outcome)
        self.arrived, self.committed, self.waiting, self.deadlines = {}, {}, {}, {}
        if outcome == FAILED:
            self.partials.pop(self.open, None)
        self.is_held, self.decision = False, Decision()
        self.open += 1

    def undo(self) -> None:
        """Take the last round back."""
        self.can_undo = False
        self.version += self.is_changed
        self.outcomes[-1] = FAILED
        self.stored = self.before

    def has_compressed(self) -> bool:
        """Whether a contribution to the open round is compressed."""
        return any(self.codecs.get(r) and g.manifest and not g.assign for r, g in self.committed.items())

    def kinds_of_rows(self) -> set[bool]:
        """Whether a slice of the open round that takes rows is given by them, of all that give it."""
        slices = self.options.by_rows if self.number == BY_ROWS and self.open else frozenset()
        given = [(g.process, s, n) for g in self.active().values() if not g.assign for s, n in g.manifest]
        return {self._rows(*one) is not None for one in given if one[1] in slices}

    def _assigned(self) -> Stored:
        """The lowest rank's values; the optimizer's state and the residuals stay."""
        first = next(iter(self.active().values()))
        given = dict(first.manifest)
        weights = {s: self._payload(first.process, s, given[s]) for s in self.weights}
        return Stored(weights, self.stored.memory, self.stored.residuals)

    def _updated(self) -> Stored:
        """Each slice that anybody gave: m = m / 2 + sum; w = w - lr * m."""
        weights, memory = dict(self.weights), dict(self.stored.memory)
        residuals = dict(self.stored.residuals)
        rate = np.float32(RATES[self.options.hypers.index(hyper)] if (hyper := self.hyper()) else 1.0)
        for s in weights:
            if self._is_given(s):
                touched = self._touched(s)
                total = applied(self._sum(s, residuals), self.decision)
                moved = memory[s] * np.float32(0.5) + total
                memory[s] = np.where(touched, moved, memory[s])
                weights[s] = np.where(touched, weights[s] - rate * memory[s], weights[s])
        return Stored(weights, memory, residuals)

    def _touched(self, slice_: int) -> Array:
        """The elements of a slice that are updated: all, or the rows that anybody gave where everybody gave rows."""
        touched = np.zeros((ROWS, ROWS), bool)
        for given in self.active().values():
            for s, generation in given.manifest:
                rows = self._rows(given.process, s, generation) if s == slice_ else ()
                if rows is None or not self.is_lazy:
                    return np.ones(self.plan.slices[slice_].used, bool)
                touched[list(rows)] = True
        return touched.reshape(-1)

    def _rows(self, process: int, slice_: int, generation: int) -> tuple[int, ...] | None:
        if slice_ not in self.options.by_rows or self.number != BY_ROWS:
            return None
        return rows_at(process, self.number, self.open, slice_, generation)

    def _is_given(self, slice_: int) -> bool:
        return any(slice_ == s for given in self.committed.values() for s, _ in given.manifest)

    def _sum(self, slice_: int, residuals: dict[tuple[int, int], Array]) -> Array:
        """The left fold in rank order of the committed generation of every rank, each with its factor.

        Moves the residuals of those that are compressed.
        """
        total: Array | None = None
        for rank, given in self.active().items():
            generation = dict(given.manifest).get(slice_)
            if generation is None:
                continue
            part = self._payload(given.process, slice_, generation)
            part = only_rows(part, self._rows(given.process, slice_, generation))
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
