"""The referee of the simulation: hands every message to a real engine and to the model, and compares the two.

After each message it checks that rounds and weights are those of the model, that whoever waited for a round was told
its outcome once, that every later answer about that round says the same, and that a fenced process was refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from kvstore_server.engine import Engine
from kvstore_server.norms import Decision
from kvstore_server.rows import PACKED_ROWS
from kvstore_server.table import Table
from tests.support import said as m
from tests.support.sim_compression import Array
from tests.support.sim_delivery import Delivery, copies, is_fencing, token_in
from tests.support.sim_ends import count_end
from tests.support.sim_held import is_told
from tests.support.sim_lane import DEAD_AFTER, NAMESPACE, NUM_WORKERS
from tests.support.sim_model import APPLIED, FAILED, HELD, VETOED, Given, TableModel, same_bits
from tests.support.sim_workers import SimProcess

Views: TypeAlias = Mapping[int, Array]
"""Slice → the weights of an engine, as numpy sees them."""


def views_of(table: Table, model: Any) -> Views:
    """The weights of a table on a server, in place."""
    return {s: table.shard.visible(table.unit, s).numpy() for s in model.weights}


class Violation(AssertionError):
    """The engine broke a promise of the protocol."""


class Referee:
    """One server of the simulation."""

    def __init__(
        self, engine: Engine, models: list[TableModel], processes: dict[int, SimProcess], seen: Counter[str]
    ) -> None:
        self.engine = engine
        self.models = models
        self.current: dict[int, int] = {}
        """Rank → the process that stands for it here."""
        self.tokens: dict[int, int] = {}
        """What every process was given here at its first hello."""
        self.heard: dict[int, float] = {}
        self.left: set[int] = set()
        self._processes = processes
        self._seen = seen
        self._texts: dict[tuple[int, int], str] = {}
        self._views: list[Views] = []

    def handle(self, process: int, request: m.Request, now: float) -> list[Delivery]:
        """Let the engine handle a request and check all that it did."""
        sender = self._processes[process]
        body = request.body
        out = copies(m.handle(self.engine, b"%d" % process, request, now, NAMESPACE))
        if isinstance(body, m.Hello) and process in self.tokens:
            self._hello_again(sender, out, now)
        elif self.current.get(sender.rank) != process and not isinstance(body, m.Hello):
            self._check(bool(out) and all(is_fencing(d.reply.body) for d in out), "a fenced process", out)
            self._seen["fenced"] += 1
        else:
            self.heard[sender.rank] = now
            self._follow(sender, body, out, now)
        if not isinstance(body, m.PushBatch):  # did it change anything, the next message would show it
            self._compare(out)
        return out

    def tick(self, now: float) -> list[Delivery]:
        """Let time pass; a round that waits may fail."""
        out = copies(m.tick(self.engine, now, NAMESPACE))
        self._end_hopeless(out, now)
        self._compare(out)
        return out

    # ---------------------------------------------------------------- what the model expects

    def _follow(self, sender: SimProcess, body: m.RequestBody, out: list[Delivery], now: float) -> None:
        if isinstance(body, m.Hello):
            self.tokens[sender.process] = token_in(out)
            self.current[sender.rank] = sender.process
            self.left.discard(sender.rank)
            for model in self.models:
                model.replace_process(sender.rank)
        elif isinstance(body, m.PushBatch):
            for push in body.pushes:
                model = self.models[push.table]
                codec = b"" if body.form == PACKED_ROWS else body.form
                model.push(sender.rank, push.round, push.slice, push.generation, codec)
            self._check(not out, "a push was answered", out)
        elif isinstance(body, m.CommitBatch):
            for commit in body.commits:
                self._commit(sender, commit, body.hyper, out, now)
        elif isinstance(body, m.Resolve):
            self._resolve(body, out)
        elif isinstance(body, m.Abort):
            self._abort(body, out)
        elif isinstance(body, m.Leave):
            self._leave(sender.rank, out, now)

    def _hello_again(self, sender: SimProcess, out: list[Delivery], now: float) -> None:
        if self.current.get(sender.rank) == sender.process:
            self._check(token_in(out) == self.tokens[sender.process], "a repeated hello", out)
            self.heard[sender.rank] = now
        else:
            self._check(
                all(is_fencing(d.reply.body) for d in out), "hello of a process that is replaced", out
            )
        self._seen["hello again"] += 1

    def _commit(
        self, sender: SimProcess, commit: m.Commit, hyper: bytes, out: list[Delivery], now: float
    ) -> None:
        model = self.models[commit.table]
        if commit.round < model.open:
            if APPLIED in model.outcomes[commit.round + 1 :] or VETOED in model.outcomes[commit.round + 1 :]:
                return  # every rank knew how it had ended before it gave anything to the later one
            want = self._answers(model.outcomes[commit.round], commit.want_weights, commit.joined)
            is_asked = commit.hold > 0 and model.outcomes[commit.round] != FAILED
            want = [m.Held] * (is_asked and not model.vetoes.get(commit.round)) + want
            self._check([type(d.reply.body) for d in out] == want, "a repeated commit of a past round", out)
        elif commit.round > model.open:
            raise Violation(f"{self._name}: p{sender.process} commits {commit} while {model.open} is open")
        elif sender.rank in model.committed:
            model.waiting[sender.rank] = sender.process
            self._seen["repeated"] += 1
            want = [m.Held if model.is_held and commit.hold else m.Pending]
            self._check([type(d.reply.body) for d in out] == want, "a repeated commit", out)
        elif missing := model.missing(sender.rank, commit.manifest):
            self._seen["missing"] += 1
            answers = [d.reply.body for d in out]
            self._check(
                answers == [m.Missing(commit.table, commit.round, missing)], f"missing {missing}", out
            )
        else:
            self._seen["replaced generation"] += any(generation for _, generation in commit.manifest)
            model.committed[sender.rank] = Given(
                sender.process,
                commit.manifest,
                commit.rescale,
                commit.veto,
                commit.assign,
                commit.joined,
                commit.hold,
            )
            if hyper:
                model.beliefs[sender.rank] = hyper
            model.waiting[sender.rank] = sender.process
            model.deadlines[sender.rank] = now + commit.timeout
            if model.is_complete() and model.outcome() == HELD:
                self._hold(model, out)
            elif model.is_complete():
                self._end(model, model.outcome(), out)
            elif self._is_hopeless(model, now):
                self._end(model, FAILED, out)
            else:
                self._check(not out, "a commit was answered before the round was over", out)

    def _hold(self, model: TableModel, out: list[Delivery]) -> None:
        model.hold()
        self._seen["held"] += 1
        told = sorted(d.process for d in out if isinstance(d.reply.body, m.Held))
        want = sorted(p for rank, p in model.waiting.items() if model.committed[rank].hold)
        self._check(told == want and len(out) == len(want), f"{want} wait for what is held", out)

    def _resolve(self, resolve: m.Resolve, out: list[Delivery]) -> None:
        model = self.models[resolve.table]
        if resolve.round < model.open:
            self._seen["resolved again"] += model.outcomes[resolve.round] != FAILED
            self._check(not out, "a decision about a round that is over was answered", out)
            return
        if not model.is_held:
            raise Violation(f"{self._name}: {resolve} of a round that is not held")
        model.decision = Decision(resolve.coef, resolve.clip_value, resolve.skip)
        self._seen["skipped" if resolve.skip else "clipped"] += 1
        self._end(model, VETOED if resolve.skip else APPLIED, out)

    def _abort(self, abort: m.Abort, out: list[Delivery]) -> None:
        model = self.models[abort.table]
        own = out.pop() if out else None
        if abort.round == model.open:
            self._end(model, FAILED, out)
        elif abort.undo and abort.round == model.open - 1 and model.can_undo:
            model.undo()
            self._seen["undone"] += 1
        kept = model.outcomes[abort.round] != FAILED
        is_true = (
            own is not None
            and isinstance(own.reply.body, m.Info)
            and own.reply.body.values == {"applied": kept}
        )
        self._check(
            is_true, f"an abort of a round that was {model.outcomes[abort.round]}", [own] if own else []
        )
        if own is not None:
            out.append(own)

    def _leave(self, rank: int, out: list[Delivery], now: float) -> None:
        del self.current[rank], self.heard[rank]
        self.left.add(rank)
        self._seen["left"] += 1
        for model in self.models:
            model.replace_process(rank)
        self._end_hopeless(out, now)

    def _end_hopeless(self, out: list[Delivery], now: float) -> None:
        for model in self.models:
            if self._is_hopeless(model, now):
                self._end(model, FAILED, out)
                self._seen["hopeless"] += 1

    def _end(self, model: TableModel, outcome: str, out: list[Delivery]) -> None:
        told = [d for d in out if self._is_about(d, model.number, model.open)]
        kinds = {p: [type(d.reply.body) for d in told if d.process == p] for p in model.waiting.values()}
        wants = {
            p: self._answers(outcome, self._processes[p].wants_weights, model.committed[rank].joined)
            for rank, p in model.waiting.items()
        }
        is_right = kinds == wants and len(told) == sum(map(len, wants.values()))
        self._check(is_right, f"{model.waiting} waited and were told {kinds}", out)
        self._seen[outcome] += 1
        count_end(self._seen, model, outcome)
        model.end(outcome)

    def _answers(self, outcome: str, want_weights: bool, joined: bool) -> list[type]:
        """What somebody is told who waits for a round that ends so."""
        if outcome == FAILED:
            return [m.Failed]
        told: list[type] = [m.InForce] if joined else []
        return told + ([m.Weights if want_weights else m.Done] if outcome == APPLIED else [m.Vetoed, m.Done])

    def _is_about(self, delivery: Delivery, table: int, round_: int) -> bool:
        about = self._processes[delivery.process].about
        return about.get(delivery.reply.number) == (table, round_)

    def _is_hopeless(self, model: TableModel, now: float) -> bool:
        """Whether the open round can never complete, or not in time."""
        missing = [rank for rank in range(NUM_WORKERS) if rank not in model.committed]
        silent = any(now - self.heard[rank] > DEAD_AFTER for rank in missing if rank in self.heard)
        is_lost = silent or not self.left.isdisjoint(missing)
        return bool(model.committed) and (is_lost or now >= min(model.deadlines.values()))

    # ---------------------------------------------------------------- comparing

    def _compare(self, out: list[Delivery]) -> None:
        space = self.engine.namespaces.get(NAMESPACE)
        for number, table in enumerate(space.tables if space is not None else ()):
            assert space is not None
            model = self.models[number]
            if number == len(self._views):
                # Taken once: without leases the engine writes its weights in place.
                self._views.append(views_of(table, model))
            if (number_here := space.rounds.shared.number(number)) != model.open:
                raise Violation(f"{self._name}: {table.name} is at round {number_here}, not {model.open}")
            if not same_bits(self._views[number], model.weights):
                raise Violation(f"{self._name}: {table.name} has wrong weights after round {model.open - 1}")
        for delivery in out:
            self._check_outcome(delivery)

    def _check_outcome(self, delivery: Delivery) -> None:
        body = delivery.reply.body
        about = self._processes[delivery.process].about.get(delivery.reply.number)
        if about is None or isinstance(body, m.Info | m.Pending | m.Missing):
            return
        model = self.models[about[0]]
        outcome = model.outcomes[about[1]] if about[1] < model.open else "open"
        if isinstance(body, m.Weights):
            self._check(outcome == APPLIED, f"weights of a round that is {outcome}", [delivery])
            sent = {part.slice: part.payload.numpy() for part in body.parts}
            is_right = set(sent) == set(model.weights) and same_bits(sent, model.weights)
            is_right = is_right and {part.version for part in body.parts} == {model.version}
            self._check(is_right, f"other weights than version {model.version}", [delivery])
        elif isinstance(body, m.InForce):
            want = m.InForce(about[0], about[1], model.hyper_told, model.is_over)
            self._check(outcome != FAILED and body == want, f"no {want}", [delivery])
            self._seen["told new numbers after joining"] += bool(body.hyper)
        elif isinstance(body, m.Held):
            want = model.partials.get(body.round, {})
            self._check(outcome != FAILED and is_told(body, want), f"no {want}", [delivery])
        elif isinstance(body, m.Vetoed):
            ranks = model.vetoes.get(body.round) if outcome == VETOED else None
            self._check(body.ranks == ranks, f"vetoes of a round that is {outcome} by {ranks}", [delivery])
        elif isinstance(body, m.Done):
            is_right = outcome in (APPLIED, VETOED) and body.rounds == ((*about, model.end_version),)
            self._check(is_right, f"'done' for a round that is {outcome}: {model.end_version}", [delivery])
        elif isinstance(body, m.Failed) and not is_fencing(body):
            self._check(outcome == FAILED, f"failure of a round that is {outcome}", [delivery])
            first = self._texts.setdefault(about, body.text)
            self._check(body.text == first, f"another error than before: {first}", [delivery])

    def _check(self, holds: bool, what: str, out: list[Delivery]) -> None:
        if not holds:
            said = "; ".join(f"to {d.process}: {d.reply}" for d in out) or "no reply"
            raise Violation(f"{self._name}: {what}: {said}")

    @property
    def _name(self) -> str:
        return f"server {self.engine.config.server}"
