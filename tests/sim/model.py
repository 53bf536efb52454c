"""What one server of the simulation must answer: the promise of the protocol, written down a second time and simply.

A model of a table never sees the engine. It follows the messages that reached the server, and foresees every reply:
`SyncModel` of rounds for which all ranks are needed, `AsyncModel` of contributions that count one by one, where who
waits for what follows from the clocks of the ranks. Weights are numpy arrays by slot; without synchronous rounds they
are small integers, exact in whatever order they are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_server.protocol import messages as m
from kvstore_server.shard.norms import UNCHANGED, Decision
from tests.sim.workers import BY_ROWS, HALF, NUM_WORKERS, ROWS, Array, SimOptions, layout

APPLIED, VETOED, FAILED, HELD = "applied", "vetoed", "failed", "held"
RATES = (1.0, 0.5)
"""The learning rates before and after they change."""
DEAD_AFTER = 20.0
FINAL_MESSAGE_TIME = 0.25
"""Seconds in which messages of a process that has ended may still come."""

To = tuple[int, int]
"""(process, request number)."""
Told = list[tuple[To, Sequence[m.ReplyBody]]]
"""Who is told what; of a Failed only the round counts, and of Weights only table and version."""


class Violation(AssertionError):
    """A promise of the protocol was broken."""


class Weights(NamedTuple):
    """In place of m.Weights: those of the model."""

    table: int
    early: tuple[list[int], int] | None = None
    """Slots, and their version, of which a round was applied before the others; None: all, as they are."""


@dataclass
class Members:
    """Who stands for the ranks on one server."""

    may_be_replaced: bool
    """Another process may go on in the place of a rank, so one that is dead is waited for."""
    current: dict[int, int] = field(default_factory=dict)
    """Rank → process."""
    heard: dict[int, float] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    """Ranks whose process has left before it was done."""
    done: set[int] = field(default_factory=set)
    """Ranks whose process has left because it was done."""
    ended: dict[int, float] = field(default_factory=dict)
    """Process → when the server has seen that it has ended."""

    def lost(self, now: float) -> set[int]:
        """The ranks that give nothing any more."""
        ended = {rank: self.ended[one] for rank, one in self.current.items() if one in self.ended}
        signs = {rank: max(heard, ended.get(rank, heard)) for rank, heard in self.heard.items()}
        silent = {rank for rank, sign in signs.items() if now - sign > DEAD_AFTER}
        dead = {
            rank for rank in ended if now - signs[rank] >= FINAL_MESSAGE_TIME and not self.may_be_replaced
        }
        return self.left | silent | dead


class Commit(NamedTuple):
    """One row of a Contribute, with what else it says."""

    to: To
    round: int
    count: int
    generations: int
    flags: int
    said: m.Contribute
    meant: dict[int, int] | None
    """Slot → generation, as the process means it, if that is known."""

    @property
    def joined(self) -> bool:
        return bool(self.flags & m.HAS_JOINED)

    @property
    def wants_weights(self) -> bool:
        return bool(self.flags & m.WANTS_WEIGHTS)

    @property
    def terms(self) -> tuple[To, int, float | None, bytes]:
        """All that it says but for its slices, and whether that may change."""
        flags = self.flags & ~(m.DECLARES_INTENT | m.TENTATIVE)
        return self.to, flags, self.said.rescale, self.said.hyper

    @property
    def is_firm(self) -> bool:
        return not self.flags & m.TENTATIVE

    def announced(self, slot: int) -> int:
        """The generation in which a slice is to come, be it given or not."""
        named = {one: generation for one, _, generation, _ in self.said.pushes.tolist()}
        others = (self.generations - sum(named.values())) // max(self.count - len(named), 1)
        return int(named.get(slot, others))

    def without_former(self, arrived: dict[int, int]) -> dict[int, int]:
        """Of slices that have come, those that may count."""
        return {slot: g for slot, g in arrived.items() if g or not self.flags & m.DISCARD_EAGER}

    def is_all_of(self, arrived: dict[int, int]) -> bool:
        """Whether a server that has these slices lacks none."""
        is_all = (self.count, self.generations) == (len(arrived), sum(arrived.values()))
        if is_all and self.meant not in (None, arrived):
            raise Violation(f"{arrived} came, {self.meant} was meant")
        return is_all


class RankInputs(NamedTuple):
    """A contribution that counts, with the generation of each slot."""

    commit: Commit
    slots: dict[int, int]

    @property
    def identity(self) -> tuple[int, int]:
        """(process, round)."""
        return self.commit.to[0], self.commit.round

    @property
    def flags(self) -> int:
        return self.commit.flags

    @property
    def hold(self) -> float:
        return self.commit.said.hold


class Model:
    """One table on one server."""

    def __init__(
        self,
        table: int,
        server: int,
        options: SimOptions,
        may_raise: bool,
        members: Members,
        seen: Counter[str],
    ) -> None:
        self.table = table
        self.slots = layout().slots[table, server]
        self.weights: dict[int, Array] = {}
        self.version = -1
        self.counted = 0
        """Contributions that count one by one, those without data among them."""
        self.early: list[int] = []
        """The slots of which a round was applied that is not over."""
        self._server = server
        self._options = options
        self._may_raise = may_raise
        """Whether the last change is kept until the next one begins, so that it can be taken back."""
        self._members = members
        self._seen = seen

    def release(self) -> Told:
        """Answer who waits for nobody any more."""
        return []

    def announce(self, rank: int, commit: Commit) -> Told:
        """A rank says what it will commit."""
        return []

    def advance(self, slots: Sequence[int]) -> Told:
        """Slices have come."""
        return []

    def roll_back(self) -> None:
        """Undo what was applied of a round that is not over."""

    def missing(self, commit: Commit, arrived: dict[int, int]) -> Told:
        """Refuse a commit of which slices have not arrived."""
        self._seen["missing"] += 1
        is_short = len(arrived) < commit.count
        lacking = [slot for slot in self.slots if slot not in arrived] if is_short else self.slots
        return [(commit.to, [m.Missing(self.table, commit.round, tuple(lacking))])]

    def value(self, given: RankInputs, slot: int) -> Array:
        """What a slice means: rows that are not given are zero."""
        process, round_ = given.identity
        values = self._options.values(process, (self._server, slot), round_, given.slots[slot])
        rows = self.rows(given, slot)
        if rows is None:
            return values
        only = np.zeros_like(values)
        only.reshape(ROWS, -1)[list(rows)] = values.reshape(ROWS, -1)[list(rows)]
        return only

    def rows(self, given: RankInputs, slot: int) -> tuple[int, ...] | None:
        if self.table != BY_ROWS or given.flags & m.ASSIGNS:
            return None
        process, round_ = given.identity
        return self._options.rows(process, (self._server, slot), round_, given.slots[slot])

    def failed(self, round_: int, next_round: int) -> m.Failed:
        return m.Failed("", "", self.table, round_, next_round)


# ---------------------------------------------------------------- synchronous rounds


@dataclass(frozen=True)
class Stored:
    """What a table holds after a round, and what compression held back of every process's slices."""

    weights: dict[int, Array]
    memory: dict[int, Array]
    """The optimizer's state of each slot."""
    residuals: dict[tuple[int, int], Array] = field(default_factory=dict)
    """(process, slot) → residual."""


class SyncModel(Model):
    """Which round is open, what each rank has given to it, how the past ones ended, and what they made of weights."""

    def __init__(
        self,
        table: int,
        server: int,
        options: SimOptions,
        may_raise: bool,
        members: Members,
        seen: Counter[str],
        is_lazy: bool,
    ) -> None:
        super().__init__(table, server, options, may_raise, members, seen)
        self._is_lazy = is_lazy
        """Whether a sum that has only some rows changes nothing of the others."""
        self.open = 0
        self.outcomes: list[str] = []
        """How each past round ended."""
        self.is_initialised = False
        self.can_undo = False
        self.end = (-1, b"", False)
        """The last round that was applied or vetoed: its version, the hyper-parameters in force, if all had joined."""
        self.beliefs: dict[int, bytes] = {}
        """Rank → the hyper-parameters that it sent last."""
        self.arrived: dict[int, dict[int, int]] = {}
        """Rank → slot → highest generation that its present process delivered for the open round."""
        self.committed: dict[int, RankInputs] = {}
        self.waiting: dict[int, To] = {}
        """Rank → the request that is to be answered, in the form that it asks for."""
        self.deadline = float("inf")
        self.codecs: dict[int, bytes] = {}
        """Rank → how its slices are compressed; empty where they are not."""
        self.vetoes: dict[int, tuple[int, ...]] = {}
        """Vetoed round → the ranks that vetoed it; none where it was skipped."""
        self.partials: dict[int, tuple[tuple[int, float], ...]] = {}
        """Round that was held → the partial norm of every slice that was given, by its index."""
        self.is_held = False
        zeros = {
            slot: np.zeros(len(options.values(0, (server, slot), 0, 0)), np.float32) for slot in self.slots
        }
        self.stored = self.before = Stored(zeros, zeros)
        self.announced: dict[int, Commit] = {}
        """Rank → what it said that it will commit to the open round."""
        self.begun: dict[int, Commit] | None = None
        """The same of all ranks, while the open round may be applied slice by slice."""
        self.begun_hyper = b""
        """The hyper-parameters with which it is."""
        self.results: dict[int, dict[int, Array]] = {}
        """Round that was applied → the weights then."""
        self.is_changed = False
        """Whether the last round that was applied has changed the weights; `before` is what it has changed."""
        self.weights = zeros

    def next_round(self, rank: int) -> int:
        return self.open

    def begin(self, rank: int, process: int) -> None:
        """Another process stands for a rank, or none any more."""
        self.waiting.pop(rank, None)
        if rank not in self.committed:
            self.arrived.pop(rank, None)
            self.announced.pop(rank, None)
            self.roll_back()

    def announce(self, rank: int, commit: Commit) -> Told:
        if commit.round != self.open or rank in self.committed:
            return []
        former = self.announced.get(rank)
        if former is not None:
            is_same = former.terms == commit.terms and former.is_firm == commit.is_firm
            is_same = is_same and all(former.announced(s) == commit.announced(s) for s in self.slots)
            if is_same or (former.is_firm and not commit.is_firm):
                return []
            self._seen["announced otherwise"] += self.begun is not None
        self.announced[rank] = commit
        if self.begun is not None and former is not None:
            if former.terms == commit.terms and all(
                former.announced(s) == commit.announced(s) for s in self.early
            ):
                self._seen["announced again"] += bool(self.early)
                self.begun[rank] = commit
                return self.advance(self.slots)
            self.roll_back()
        hypers = {c.said.hyper or self.beliefs.get(r, b"") for r, c in self.announced.items()}
        may_begin = len(self.announced) == NUM_WORKERS and self.is_initialised and not self._may_raise
        if not may_begin or len(self.slots) == 1 or len(hypers - {b""}) > 1:
            return []
        self._seen["begun"] += 1
        self.begun = dict(sorted(self.announced.items()))
        self.begun_hyper = min(hypers - {b""}, default=b"")
        return self.advance(self.slots)

    def advance(self, slots: Sequence[int]) -> Told:
        if self.begun is None:
            return []
        ready = [s for s in self.slots if s not in self.early and s in slots and self._is_here(s)]
        if len(ready) + len(self.early) == len(self.slots):
            ready.pop()
        if not ready:
            return []
        committed, beliefs = self.committed, self.beliefs
        self.committed = {rank: RankInputs(c, self.arrived[rank]) for rank, c in self.begun.items()}
        self.beliefs = beliefs | {rank: c.said.hyper for rank, c in self.begun.items() if c.said.hyper}
        updated = self._updated(UNCHANGED).weights
        self.committed, self.beliefs = committed, beliefs
        self.early += ready
        self.weights = {**self.weights, **{slot: updated[slot] for slot in ready}}
        told = Weights(self.table, (ready, self.version + 1))
        return [(c.to, [told]) for c in self.begun.values() if c.wants_weights]

    def _is_here(self, slot: int) -> bool:
        """Whether all ranks have given a slice as they announced it."""
        begun = (self.begun or {}).items()
        return all(self.arrived.get(r, {}).get(slot, -1) == c.announced(slot) for r, c in begun)

    def _is_as_announced(self) -> bool:
        """Whether what all ranks have committed is that from which slices were applied."""
        begun = (self.begun or {}).items()
        return self.hyper() == self.begun_hyper and all(
            self.committed[r].commit.terms[1:3] == c.terms[1:3]
            and all(self.committed[r].slots.get(s, -1) == c.announced(s) for s in self.early)
            for r, c in begun
        )

    def roll_back(self) -> None:
        self._seen["taken back"] += bool(self.early)
        self.version += bool(self.early)
        self.weights, self.begun, self.early = self.stored.weights, None, []

    def push(self, rank: int, round_: int, slot: int, generation: int, codec: bytes) -> None:
        if round_ == self.open:
            self.can_undo = False
        if round_ == self.open and rank not in self.committed:
            self.codecs[rank] = codec
            here = self.arrived.setdefault(rank, {})
            here[slot] = max(generation, here.get(slot, -1))

    def commit(self, rank: int, commit: Commit, now: float) -> Told | None:
        """Foresee the answers; None: it is not known what is said of a round so long ago."""
        if commit.round > self.open:
            raise Violation(f"{commit} came while {self.open} is open")
        if commit.round < self.open:
            return (
                None if self._is_history(commit.round) else [(commit.to, self._answer(commit, is_again=True))]
            )
        if rank in self.committed:
            self._seen["repeated"] += 1
            self.waiting[rank], former = commit.to, self.committed[rank]
            flags = former.flags & ~m.WANTS_WEIGHTS | commit.flags & m.WANTS_WEIGHTS
            self.committed[rank] = former._replace(commit=former.commit._replace(flags=flags))
            held = [m.Held(self.table, self.open, self.partials[self.open], True)] if self.is_held else []
            return [(commit.to, held if held and commit.said.hold else [m.Pending(())])]
        arrived = self.arrived[rank] = commit.without_former(self.arrived.get(rank, {}))
        if not commit.is_all_of(arrived):
            return self.missing(commit, arrived)
        self._seen["replaced generation"] += commit.generations > 0
        self._seen["begun anew"] += bool(commit.flags & m.DISCARD_EAGER)
        self.committed[rank], self.waiting[rank] = RankInputs(commit, dict(arrived)), commit.to
        if commit.said.hyper:
            self.beliefs[rank] = commit.said.hyper
        self.deadline = min(self.deadline, now + commit.said.timeout)
        if len(self.committed) < NUM_WORKERS:
            return []
        outcome = self._outcome()
        return self._hold() if outcome == HELD else self._end(outcome)

    def _is_history(self, round_: int) -> bool:
        """Whether every rank knew how a round had ended before it gave anything to a later one, which did not fail."""
        return not {APPLIED, VETOED}.isdisjoint(self.outcomes[round_ + 1 :])

    def resolve(self, resolve: m.Resolve) -> Told:
        if resolve.round < self.open:
            self._seen["resolved again"] += self.outcomes[resolve.round] != FAILED
            return []
        if not self.is_held:
            raise Violation(f"{resolve} of a round that is not held")
        self._seen["skipped" if resolve.skip else "clipped"] += 1
        decision = Decision(resolve.coef, resolve.clip_value, resolve.skip)
        return self._end(VETOED if resolve.skip else APPLIED, decision)

    def abort(self, rank: int, to: To, abort: m.Abort) -> Told | None:
        told: Told = []
        if self._is_history(abort.round):
            return None
        if abort.round == self.open:
            told = self._end(FAILED)
        elif abort.undo and abort.round == self.open - 1 and self.can_undo:
            self._seen["undone"] += 1
            self.can_undo = False
            self.version += self.is_changed
            self.outcomes[-1] = FAILED
            self.stored = self.before
            self.weights = self.stored.weights
        return [*told, (to, [m.Status({"applied": self.outcomes[abort.round] != FAILED})])]

    def tick(self, now: float) -> Told:
        """Fail the open round if it can never complete, or not in time."""
        missing = set(range(NUM_WORKERS)) - self.committed.keys()
        is_lost = not missing.isdisjoint(self._members.lost(now))
        if not self.committed or not (is_lost or now >= self.deadline):
            return []
        self._seen["hopeless"] += 1
        is_dead = [self._members.current.get(rank) in self._members.ended for rank in missing]
        self._seen["hopeless, for a process is seen to be dead"] += any(is_dead)
        return self._end(FAILED)

    # ---------------------------------------------------------------- how a round ends

    def active(self) -> dict[int, RankInputs]:
        """The contributions of the ranks that have data, in rank order."""
        return {
            rank: given for rank, given in sorted(self.committed.items()) if not given.flags & m.HAS_JOINED
        }

    def hyper(self) -> bytes:
        """The hyper-parameters in force: those of the lowest rank that has data."""
        return next((self.beliefs[rank] for rank in self.active() if rank in self.beliefs), b"")

    def _outcome(self) -> str:
        """How the open round ends, which every rank has committed; or that it is held."""
        given = self.active()
        assigns = [bool(one.flags & m.ASSIGNS) for one in given.values()]
        if not self.open or not given:
            return APPLIED
        if any(assigns):  # all want that, and all have data
            return APPLIED if assigns.count(True) == NUM_WORKERS else FAILED
        if not self.is_initialised:
            return FAILED
        if any(one.flags & m.VETOES for one in given.values()):
            return VETOED
        if len({one.hold for one in given.values()}) > 1:
            return FAILED
        if len({self.beliefs.get(rank, b"") for rank in given} - {b""}) > 1:
            return FAILED
        return HELD if any(one.hold for one in given.values()) else APPLIED

    def _hold(self) -> Told:
        """The open round waits for a decision."""
        self.roll_back()
        self._seen["held"] += 1
        self.is_held = True
        norm_type = next(iter(self.active().values())).hold
        residuals = dict(self.stored.residuals)
        partials = {s: _partial(self._sum(s, residuals), norm_type) for s in self.slots if self._givers(s)}
        slices = layout().slices
        told = tuple((slices[self._server, slot].index, partial) for slot, partial in partials.items())
        self.partials[self.open] = told
        held = m.Held(self.table, self.open, told, True)
        return [(to, [held]) for rank, to in self.waiting.items() if self.committed[rank].hold]

    def _end(self, outcome: str, decision: Decision = UNCHANGED) -> Told:
        """End the open round; an applied one changes what is stored."""
        self._count(outcome)
        begun, left = self.begun, [slot for slot in self.slots if slot not in self.early]
        if outcome != APPLIED or not self.early or not self._is_as_announced():
            self._seen["committed otherwise"] += outcome == APPLIED and bool(self.early)
            self.roll_back()
        active = self.active()
        assigns = self.open == 0 or (outcome == APPLIED and any(g.flags & m.ASSIGNS for g in active.values()))
        is_changed = bool(active) and outcome == APPLIED
        has_changed_nothing = outcome != FAILED and not is_changed
        self.can_undo = has_changed_nothing or (is_changed and self._may_raise and not assigns)
        self.is_changed = is_changed
        if outcome == FAILED:
            self.partials.pop(self.open, None)
        else:
            self.version += is_changed
            self.end = (self.version, self.hyper() if is_changed and not assigns else b"", not active)
            self.before = self.stored
        if outcome == VETOED:
            self.vetoes[self.open] = tuple(rank for rank, one in active.items() if one.flags & m.VETOES)
        elif is_changed:
            self.is_initialised = True
            self.stored = self._assigned() if assigns else self._updated(decision)
            self.weights = self.stored.weights
        self.results[self.open] = self.weights
        self.outcomes.append(outcome)
        self.open += 1
        waiting = [self.committed[rank].commit._replace(to=to) for rank, to in self.waiting.items()]
        self.arrived, self.committed, self.waiting, self.deadline = {}, {}, {}, float("inf")
        self.is_held = False
        told = [(commit.to, self._answer(commit)) for commit in waiting]
        if self.early and begun is not None:
            self._seen["applied slice by slice"] += 1
            rest = [Weights(self.table, (left, self.version))]
            at_once = {c.to for c in begun.values() if c.wants_weights}
            told = [(to, rest if to in at_once else bodies) for to, bodies in told]
        self.announced, self.begun, self.early = {}, None, []
        return told

    def _answer(self, commit: Commit, is_again: bool = False) -> list[m.ReplyBody]:
        """What is said to a commit of the last round that did not fail, or of one that did."""
        round_, outcome = commit.round, self.outcomes[commit.round]
        if outcome == FAILED:
            return [self.failed(round_, self.open)]
        version, hyper, is_over = self.end
        told: list[m.ReplyBody] = []
        if is_again and commit.said.hold and not self.vetoes.get(round_):
            told.append(m.Held(self.table, round_, self.partials.get(round_, ()), True))
        if commit.joined:
            self._seen["told new numbers after joining"] += bool(hyper)
            told.append(m.EffectiveOptions(self.table, round_, hyper, is_over))
        if outcome == VETOED:
            told.append(m.Vetoed(self.table, round_, self.vetoes[round_]))
        elif commit.wants_weights:
            return [*told, Weights(self.table)]
        return [*told, m.Done(m.matrix([(self.table, round_, version)], 3))]

    def _count(self, outcome: str) -> None:
        """Note what was special about the open round, which ends so."""
        seen, committed, active = self._seen, self.committed.values(), self.active().values()
        assigns = [bool(one.flags & m.ASSIGNS) for one in committed]
        joined = len(committed) - len(active)
        seen[outcome] += 1
        seen[f"joined by some, {outcome}"] += 0 < joined < len(committed)
        seen[f"joined by all, {outcome}"] += joined == NUM_WORKERS
        if outcome == APPLIED and self.open:
            rows = [
                {self.rows(one, s) is not None for one in self._givers(s)}
                for s in self.slots
                if self._takes_rows(s)
            ]
            seen["by rows alone"] += {True} in rows
            seen["rows and all of it"] += {True, False} in rows
            seen["without rows"] += any(
                self.rows(one, s) == () for s in self.slots for one in self._givers(s)
            )
        seen["assigned"] += outcome == APPLIED and any(assigns)
        seen["assigned by some"] += len(assigns) == NUM_WORKERS and any(assigns) and not all(assigns)
        compressed = [
            self.codecs.get(rank) for rank, g in self.active().items() if g.slots and not g.flags & m.ASSIGNS
        ]
        seen[f"compressed, {outcome}"] += any(compressed)
        seen["held by some"] += len({one.hold for one in active}) > 1
        seen["given up while held"] += self.is_held and outcome == FAILED

    def _takes_rows(self, slot: int) -> bool:
        return self._options.by_rows and (self._server, slot) in layout().takes_rows

    # ---------------------------------------------------------------- numbers

    def _assigned(self) -> Stored:
        """The lowest rank's values; the optimizer's state and the residuals stay."""
        first = next(iter(self.active().values()))
        return replace(self.stored, weights={slot: self.value(first, slot) for slot in self.slots})

    def _updated(self, decision: Decision) -> Stored:
        """Each slice that anybody gave: m = m / 2 + sum; w = w - lr * m."""
        weights, memory = dict(self.stored.weights), dict(self.stored.memory)
        residuals = dict(self.stored.residuals)
        rate = np.float32(RATES[self._options.hypers.index(hyper)] if (hyper := self.hyper()) else 1.0)
        for slot in self.slots:
            if self._givers(slot):
                total = self._sum(slot, residuals)
                if decision.coef != 1.0:
                    total = total * np.float32(decision.coef)
                if decision.clip_value is not None:
                    limit = np.float32(decision.clip_value)
                    total = np.clip(total, -limit, limit)
                touched = self._touched(slot)
                memory[slot] = np.where(touched, memory[slot] * np.float32(0.5) + total, memory[slot])
                weights[slot] = np.where(touched, weights[slot] - rate * memory[slot], weights[slot])
        return Stored(weights, memory, residuals)

    def _givers(self, slot: int) -> list[RankInputs]:
        return [given for given in self.active().values() if slot in given.slots]

    def _touched(self, slot: int) -> npt.NDArray[np.bool_]:
        """The elements of a slice that are updated: all, or the rows that anybody gave where everybody gave rows."""
        rows = [self.rows(given, slot) for given in self._givers(slot)]
        if not self._is_lazy or None in rows:
            return np.ones(len(self.weights[slot]), np.bool_)
        touched = np.zeros((ROWS, len(self.weights[slot]) // ROWS), np.bool_)
        touched[sorted({row for some in rows for row in some or ()})] = True
        return touched.reshape(-1)

    def _sum(self, slot: int, residuals: dict[tuple[int, int], Array]) -> Array:
        """The left fold in rank order of the committed generation of every rank, each with its factor.

        Moves the residuals of those that are compressed.
        """
        total: Array | None = None
        for rank, given in self.active().items():
            if slot not in given.slots:
                continue
            part = self.value(given, slot)
            if codec := self.codecs[rank]:
                where = given.commit.to[0], slot
                whole = part + residuals.get(where, np.float32(0))
                part = _decoded(codec, whole)
                residuals[where] = whole - part
            scale = given.commit.said.rescale
            part = part if scale is None else part * np.float32(scale)
            total = part if total is None else total + part
        assert total is not None
        return total


def _decoded(codec: bytes, total: Array) -> Array:
    """What a sender says of a gradient plus residual, from the formulas alone; the rest is its next residual."""
    if codec == HALF:
        half: Array = np.clip(total, -65504, 65504).astype(np.float16).astype(np.float32)
        return half
    fired: Array = np.float32(0.5) * (np.abs(total) >= 0.5) * np.sign(total)
    return fired.astype(np.float32)


def _partial(total: Array, norm_type: float) -> float:
    """The partial norm of a slice, from the formula alone."""
    wide = np.abs(total.astype(np.float64))
    return float(wide.max() if norm_type == np.inf else (wide**norm_type).sum() ** (1.0 / norm_type))


# ---------------------------------------------------------------- contributions one by one


@dataclass
class Turn:
    """The contributions of the present process of a rank."""

    process: int
    open: int = 0
    """The number of its open contribution; 0: it has not begun, and may with any."""
    arrived: dict[int, int] = field(default_factory=dict)
    """Slot → highest generation that came of the open one."""
    failed: set[int] = field(default_factory=set)
    """Those that failed since the last one that counts."""
    last: Commit | None = None
    """The last one that counts."""
    version: int = 0
    """Of the weights right after it."""


@dataclass
class Waiting:
    """A request that is answered later."""

    rank: int
    timeout: float
    deadline: float
    commit: Commit | None = None
    """None: it only reads."""
    is_join: bool = False


class AsyncModel(Model):
    """What each rank has given, who waits for whom, and what stands; from the first values on."""

    def __init__(
        self,
        table: int,
        server: int,
        options: SimOptions,
        may_raise: bool,
        members: Members,
        seen: Counter[str],
    ) -> None:
        super().__init__(table, server, options, may_raise, members, seen)
        self.first = {slot: options.values(0, (server, slot), 0, 0) for slot in self.slots}
        self.weights = self.first
        self.version = 0
        self.clocks = [0] * NUM_WORKERS
        self.joined: set[int] = set()
        self.turns: dict[int, Turn] = {}
        self.waiting: dict[To, Waiting] = {}
        self.ledger: dict[tuple[int, int], RankInputs] = {}
        """(process, round) → what it gave, as long as that stands."""
        self.undoable: RankInputs | None = None
        """The contribution that can be taken back: the very last change, unless its rank went on."""
        mode = options.mode
        self.limit = mode.staleness if mode.name == "ssp" else float("inf")
        """How far a rank that reads may be ahead."""

    # ---------------------------------------------------------------- who takes part

    def begin(self, rank: int, process: int) -> None:
        """Another process stands for a rank, or none any more."""
        self.waiting = {to: wait for to, wait in self.waiting.items() if wait.rank != rank}
        if process >= 0:
            self.joined.discard(rank)
        self.turns[rank] = Turn(process)

    def next_round(self, rank: int) -> int:
        """Where the process of a rank that registers now should begin."""
        out = {rank, *self.joined, *self._members.done}
        others = [clock for r, clock in enumerate(self.clocks) if r not in out]
        return self.turns[rank].open or 1 + max(self.clocks[rank], min(others, default=0))

    def behind(self, rank: int) -> list[int]:
        """The ranks because of which one may not read now."""
        return [r for r in self._taking_part() if self.clocks[rank] - self.clocks[r] > self.limit]

    def _taking_part(self) -> list[int]:
        return [r for r in range(NUM_WORKERS) if r not in self.joined and r not in self._members.done]

    def _needed(self, waiting: Waiting) -> list[int]:
        return self._taking_part() if waiting.is_join else self.behind(waiting.rank)

    def turn(self, rank: int, round_: int) -> Turn:
        """The turn of the present process, which means that round."""
        turn = self.turns[rank]
        if not turn.open:
            turn.open = round_
            self.clocks[rank] = max(self.clocks[rank], round_ - 1)
        return turn

    # ---------------------------------------------------------------- contributions

    def push(self, rank: int, round_: int, slot: int, generation: int, codec: bytes) -> None:
        turn = self.turn(rank, round_)
        if round_ == turn.open:
            turn.arrived[slot] = max(generation, turn.arrived.get(slot, -1))
            self._go_on(turn)

    def commit(self, rank: int, commit: Commit, now: float) -> Told:
        turn = self.turn(rank, commit.round)
        if commit.round > turn.open:
            raise Violation(f"{commit} came while {turn.open} is open")
        if commit.round in turn.failed:
            return [(commit.to, [self.failed(commit.round, turn.open)])]
        if commit.round < turn.open:
            self._seen["repeated"] += 1
            return self._answer(rank, commit, now)
        turn.arrived = commit.without_former(turn.arrived)
        if not commit.is_all_of(turn.arrived):
            return self.missing(commit, turn.arrived)
        self._take(rank, turn, commit, now)
        return self._answer(rank, commit, now)

    def read(self, rank: int, to: To, pull: m.Pull, now: float) -> Told:
        return self._wait(to, Waiting(rank, pull.timeout, now + pull.timeout))

    def _take(self, rank: int, turn: Turn, commit: Commit, now: float) -> None:
        """Count a contribution."""
        given = RankInputs(commit, dict(turn.arrived))
        self.counted += 1
        self.undoable = None
        self.clocks[rank] += 1
        self.joined.discard(rank)
        is_vetoed = bool(commit.flags & m.VETOES)
        self._seen["joined" if commit.joined else "vetoed" if is_vetoed else "applied"] += 1
        if not commit.joined and not is_vetoed:
            assert given.identity not in self.ledger
            self.ledger[given.identity] = given
            self._add(given, 1.0)
            self.undoable = given if self._may_raise else None
        turn.arrived, turn.last, turn.failed, turn.version = {}, commit, set(), self.version
        turn.open += 1
        self.waiting = {to: w for to, w in self.waiting.items() if not (w.is_join and w.rank == rank)}
        for waiting in self.waiting.values():
            if waiting.is_join:
                waiting.deadline = now + waiting.timeout
        if commit.joined:
            self.joined.add(rank)

    def _answer(self, rank: int, commit: Commit, now: float) -> Told:
        """What a commit that counts is told now."""
        wait = Waiting(rank, commit.said.timeout, now + commit.said.timeout, commit, commit.joined)
        if not (commit.joined and rank in self.joined):
            wait.is_join = False
            if self._is_vetoed(rank) or not commit.wants_weights:
                return [(commit.to, self._bodies(wait))]
            self._seen["read had to wait"] += bool(self._needed(wait))
        return self._wait(commit.to, wait)

    def _is_vetoed(self, rank: int) -> bool:
        last = self.turns[rank].last
        return last is not None and bool(last.flags & m.VETOES)

    def _bodies(self, waiting: Waiting) -> list[m.ReplyBody]:
        """What is said to who need not wait any more."""
        rank, commit = waiting.rank, waiting.commit
        if commit is None:
            return [Weights(self.table)]
        last = self.turns[rank].last
        done = m.Done(m.matrix([(self.table, commit.round, self.turns[rank].version)], 3))
        told: list[m.ReplyBody] = []
        if commit.joined:
            told.append(m.EffectiveOptions(self.table, commit.round, b"", last is not None and last.joined))
        if self._is_vetoed(rank):
            return [*told, m.Vetoed(self.table, commit.round, (rank,)), done]
        return [*told, done, Weights(self.table)] if commit.wants_weights else [*told, done]

    def _wait(self, to: To, waiting: Waiting) -> Told:
        if not (waiting.is_join or self._needed(waiting)):
            return [(to, self._bodies(waiting))]
        if to in self.waiting:
            waiting.deadline = self.waiting[to].deadline
        self.waiting[to] = waiting
        return [(to, [m.Pending(())])]

    def release(self) -> Told:
        """Answer who waits for nobody any more."""
        ready = {to: wait for to, wait in self.waiting.items() if not self._needed(wait)}
        if any(wait.is_join for wait in ready.values()):
            self._seen["all joined"] += 1
            self._end_join()
        self._seen["read released"] += any(not wait.is_join for wait in ready.values())
        self.waiting = {to: wait for to, wait in self.waiting.items() if to not in ready}
        return [(to, self._bodies(wait)) for to, wait in ready.items()]

    def tick(self, now: float) -> Told:
        """Answer who waits for nobody any more, and fail who waits in vain."""
        told = self.release()
        lost = self._members.lost(now)
        late = {to: w for to, w in self.waiting.items() if now >= w.deadline or lost & set(self._needed(w))}
        self._seen["waited in vain"] += len(late)
        return told + self._fail(late)

    def _end_join(self) -> None:
        self.joined.clear()
        self.clocks = [max(self.clocks)] * NUM_WORKERS

    # ---------------------------------------------------------------- giving up

    def _fail(self, waits: dict[To, Waiting]) -> Told:
        told: Told = []
        for to, waiting in waits.items():
            del self.waiting[to]
            round_ = waiting.commit.round if waiting.commit is not None else -1
            if waiting.is_join:
                self.joined.discard(waiting.rank)
                self.turns[waiting.rank].failed.add(round_)
            told.append((to, [self.failed(round_, round_ + 1 if waiting.is_join else -1)]))
        return told

    def abort(self, rank: int, to: To, abort: m.Abort) -> Told:
        turn = self.turn(rank, abort.round)
        if abort.round == turn.open:
            self.clocks[rank] += 1
            self.joined.discard(rank)
            turn.failed.add(abort.round)
            turn.arrived = {}
            turn.open += 1
            self._go_on(turn)
        elif abort.undo and abort.round == turn.open - 1 and abort.round not in turn.failed | {0}:
            self._undo(turn)
        waits = {
            t: w
            for t, w in self.waiting.items()
            if w.commit and (w.rank, w.commit.round) == (rank, abort.round)
        }
        told, stands = self._fail(waits), abort.round not in turn.failed
        self._seen["kept" if stands else "given up"] += 1
        return [*told, (to, [m.Status({"applied": stands})])]

    def _go_on(self, turn: Turn) -> None:
        """A process has begun with something new: its last contribution is final."""
        if self.undoable is not None and self.undoable.identity[0] == turn.process:
            self.undoable = None

    def _undo(self, turn: Turn) -> None:
        here = (turn.process, turn.open - 1)
        if here in self.ledger:
            if self.undoable != self.ledger[here]:
                return
            self._seen["undone"] += 1
            self._add(self.ledger.pop(here), -1.0)
            self.undoable = None
        turn.failed.add(turn.open - 1)

    # ---------------------------------------------------------------- numbers

    def total(self) -> dict[int, Array]:
        """The weights once more, from the ledger alone."""
        weights = {slot: first.astype(np.int64) for slot, first in self.first.items()}
        for given in self.ledger.values():
            for slot in given.slots:
                weights[slot] += (_scale(given) * self.value(given, slot)).astype(np.int64)
        return {slot: weight.astype(np.float32) for slot, weight in weights.items()}

    def _add(self, given: RankInputs, sign: float) -> None:
        self.version += 1
        factor = np.float32(sign * _scale(given))
        self.weights = self.weights | {
            s: self.weights[s] + factor * self.value(given, s) for s in given.slots
        }


def _scale(given: RankInputs) -> float:
    return given.commit.said.rescale or 1.0
