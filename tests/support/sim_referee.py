"""The referee of the simulation: hands every message to a real engine and to the model, and compares the two.

After each message it checks that rounds and weights are those of the model, that whoever waited for a round was told
its outcome once, that every later answer about that round says the same, and that a fenced process was refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvstore_server.engine import Engine
from kvstore_server.plan import Plan
from kvstore_server.protocol import messages as m
from tests.support.sim_model import APPLIED, FAILED, Given, TableModel, same_bits
from tests.support.sim_workers import NAMESPACE, NUM_WORKERS, SimProcess


class Violation(AssertionError):
    """The engine broke a promise of the protocol."""


@dataclass(frozen=True)
class Delivery:
    """A reply on its way: to which process, and what."""

    process: int
    reply: m.Reply


class Referee:
    """One server of the simulation."""

    def __init__(self, engine: Engine, plans: list[Plan], processes: dict[int, SimProcess], can_undo: bool) -> None:
        self.engine = engine
        self.models: list[TableModel] = []
        self.current: dict[int, int] = {}
        """Rank → the process that stands for it here."""
        server = engine.config.server
        self._model_of = {plan.digest: TableModel(i, plan, server, NUM_WORKERS) for i, plan in enumerate(plans)}
        self._processes = processes
        self._can_undo = can_undo
        self._texts: dict[tuple[int, int], str] = {}

    def handle(self, process: int, request: m.Request, now: float) -> list[Delivery]:
        """Let the engine handle a request and check all that it did."""
        sender = self._processes[process]
        body = request.body
        is_fenced = self.current.get(sender.rank) != process and not isinstance(body, m.Hello)
        ended_before = [len(model.outcomes) for model in self.models]
        out = self._copies(self.engine.handle(b"%d" % process, request, now))
        if is_fenced:
            self._check(all(_is_fencing(d.reply.body) for d in out) and bool(out), "a fenced process was answered", out)
        elif isinstance(body, m.Hello):
            self.current[sender.rank] = process
            for model in self.models:
                model.replace_process(sender.rank)
        elif isinstance(body, m.Register):
            self._register(body)
        elif isinstance(body, m.PushBatch):
            for push in body.pushes:
                self.models[push.table].push(sender.rank, push.round, push.slice, push.generation)
            self._check(not out, "a push was answered", out)
        elif isinstance(body, m.CommitBatch):
            self._commit(sender, body.commits[0], out)
        elif isinstance(body, m.Abort):
            self._abort(body, out)
        self._compare(out, ended_before)
        return out

    def tick(self, now: float) -> list[Delivery]:
        """Let time pass; a round that waits may fail."""
        out = self._copies(self.engine.tick(now))
        for model in self.models:
            if self._engine_number(model) == model.open + 1 and model.committed:
                self._fail(model, out)
        self._compare(out, [])
        return out

    def is_idle(self) -> bool:
        return self.engine.is_idle()

    # ---------------------------------------------------------------- what the model expects

    def _register(self, body: m.Register) -> None:
        known = [model.plan.specs[0].key for model in self.models]
        if body.specs[0][0] not in known:
            model = next(x for x in self._model_of.values() if x.plan.specs[0].key == body.specs[0][0])
            self.models.append(model)

    def _commit(self, sender: SimProcess, commit: m.Commit, out: list[Delivery]) -> None:
        model = self.models[commit.table]
        if commit.round < model.open:
            want = m.Failed if model.outcomes[commit.round] == FAILED else m.Weights if commit.want_weights else m.Done
            self._check([type(d.reply.body) for d in out] == [want], "a repeated commit of a past round", out)
        elif commit.round > model.open:
            raise Violation(f"{sender.process} is ahead: {commit}, open {model.open}")
        elif sender.rank in model.committed:
            model.waiting[sender.rank] = sender.process
            self._check([type(d.reply.body) for d in out] == [m.Pending], "a repeated commit", out)
        elif missing := model.missing(sender.rank, commit.manifest):
            answers = [d.reply.body for d in out]
            self._check(answers == [m.Missing(commit.table, commit.round, missing)], f"missing {missing}", out)
        else:
            model.committed[sender.rank] = Given(sender.process, commit.manifest, commit.rescale)
            model.waiting[sender.rank] = sender.process
            if model.is_complete():
                self._end(model, APPLIED, out)
            elif self._engine_number(model) == model.open + 1 and self._is_somebody_gone(model):
                self._fail(model, out)
            else:
                self._check(not out, "a commit was answered before the round was over", out)

    def _abort(self, abort: m.Abort, out: list[Delivery]) -> None:
        model = self.models[abort.table]
        own = out.pop() if out else None
        if abort.round == model.open:
            self._fail(model, out)
        elif self._can_undo and abort.round == model.open - 1 and model.outcomes[-1] == APPLIED:
            if same_bits(self._weights(model), model.before) and not same_bits(model.weights, model.before):
                model.undo()
        kept = model.outcomes[abort.round] == APPLIED
        is_true = own is not None and isinstance(own.reply.body, m.Info) and own.reply.body.values == {"applied": kept}
        self._check(is_true, f"an abort of a round that was {model.outcomes[abort.round]}", [own] if own else [])
        if own is not None:
            out.append(own)

    def _fail(self, model: TableModel, out: list[Delivery]) -> None:
        self._end(model, FAILED, out)

    def _end(self, model: TableModel, outcome: str, out: list[Delivery]) -> None:
        told = sorted(d.process for d in out if self._is_about(d, model.number, model.open))
        self._check(told == sorted(model.waiting.values()), f"{model.waiting} waited, {told} were told", out)
        model.end(outcome)

    def _is_about(self, delivery: Delivery, table: int, round_: int) -> bool:
        about = self._processes[delivery.process].about
        return about.get(delivery.reply.number) == (table, round_)

    def _is_somebody_gone(self, model: TableModel) -> bool:
        missing = set(range(NUM_WORKERS)) - set(model.committed)
        present = [self._processes[self.current[rank]] for rank in missing if rank in self.current]
        return any(not process.is_alive or self._server not in process.sessions for process in present)

    # ---------------------------------------------------------------- comparing

    def _compare(self, out: list[Delivery], ended_before: list[int]) -> None:
        for model in self.models:
            number = self._engine_number(model)
            if number != model.open:
                raise Violation(f"server {self._server}: table {model.number} is at round {number}, not {model.open}")
            if not same_bits(self._weights(model), model.weights):
                raise Violation(f"server {self._server}: wrong weights of table {model.number} before round {number}")
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
            self._check(set(sent) == set(model.weights) and same_bits(sent, model.weights), "other weights", [delivery])
        elif isinstance(body, m.Done):
            self._check(outcome == APPLIED, f"'done' for a round that is {outcome}", [delivery])
        elif isinstance(body, m.Failed) and not _is_fencing(body):
            self._check(outcome == FAILED, f"failure of a round that is {outcome}", [delivery])
            first = self._texts.setdefault(about, body.text)
            self._check(body.text == first, f"another error than before: {first}", [delivery])

    def _check(self, holds: bool, what: str, out: list[Delivery]) -> None:
        if not holds:
            said = "; ".join(f"to {d.process}: {d.reply}" for d in out) or "no reply"
            raise Violation(f"server {self._server}: {what}: {said}")

    @property
    def _server(self) -> int:
        return self.engine.config.server

    def _engine_number(self, model: TableModel) -> int:
        return self.engine.namespaces[NAMESPACE].tables[self.models.index(model)].rounds.number

    def _weights(self, model: TableModel) -> dict[int, object]:
        dense = self.engine.namespaces[NAMESPACE].tables[self.models.index(model)].dense
        return {s: dense.visible(s).numpy() for s in model.weights}

    def _copies(self, outgoing: list[m.Outgoing]) -> list[Delivery]:
        """What goes over the wire is a copy: later updates must not reach into it."""
        return [Delivery(int(o.peer), m.Reply(o.reply.number, _copied(o.reply.body))) for o in outgoing]


def _copied(body: m.ReplyBody) -> m.ReplyBody:
    if not isinstance(body, m.Weights):
        return body
    return m.Weights(tuple(m.WeightsPart(p.table, p.slice, p.round, torch.clone(p.payload)) for p in body.parts))


def _is_fencing(body: m.ReplyBody) -> bool:
    return isinstance(body, m.Failed) and body.code == "FencedError"
