"""The referee of the simulation: hands every message to a real engine and to the models, and compares the two.

Whoever is to be told something is told that, in that order, and nobody else; a process that was replaced is refused;
and after each message the weights are those of the models, bit by bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore_server.engine.engine import Engine
from kvstore_server.processes import ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import PACKED_ROWS
from tests.sim.model import AsyncModel, Commit, Members, SyncModel, To, Told, Violation, Weights
from tests.sim.workers import NUM_WORKERS, Array, Worker
from tests.support.captures import handle_frames

PULL = 1 << 40
"""The number of a request of the referee's own."""


class Delivery(NamedTuple):
    """A reply on its way to a process."""

    process: int
    reply: m.Reply


class SeenProcesses:
    """In place of Processes: those of these sessions have ended, and of others nothing is known."""

    def __init__(self, ended: dict[tuple[bytes, int], str]) -> None:
        self._ended = ended

    def ended(self) -> dict[tuple[bytes, int], str]:
        return self._ended

    def state(self, _: object) -> ProcessState:
        return ProcessState.UNKNOWN


class Referee:
    """One server of the simulation; where `is_watching` is false, the models know nothing yet."""

    def __init__(
        self,
        engine: Engine,
        models: Sequence[SyncModel] | Sequence[AsyncModel],
        members: Members,
        processes: dict[int, Worker],
        seen: Counter[str],
    ) -> None:
        self.engine = engine
        self.models = models
        self.is_watching = True
        self.server = engine.config.server
        self._members = members
        self._processes = processes
        self._seen = seen
        self._tokens: dict[int, int] = {}
        """What every process was given here at its first hello."""
        self._texts: dict[tuple[int, int], str] = {}
        """(table, round) → why it failed for all."""
        self._views: dict[int, Array] = {}
        """Slot → the weights of the engine, in place."""
        self._bits: dict[int, tuple[Array, bytes]] = {}
        self._model_of = {slot: model for model in models for slot in model.slots}

    def handle(self, process: int, request: m.Request, now: float) -> list[Delivery]:
        """Let the engine handle a request and check all that it did."""
        sender, body = self._processes[process], request.body
        is_current = self._members.current.get(sender.rank) == process
        out = self._ask(process, request, now)
        if isinstance(body, m.Hello):
            self._hello(sender, is_current, out, now)
        elif not is_current:
            self._seen["fenced"] += 1
            self._check(bool(out) and all(is_fencing(d.reply.body) for d in out), "a fenced process", out)
        else:
            self._members.heard[sender.rank] = now
            if self.is_watching:
                self._expect(self._follow(sender, request, now), out)
        if not isinstance(body, m.Contribute) or len(
            body.commits
        ):  # did a push change anything, the next one shows it
            self._look(process, (request.run_id, request.session), now)
            self._compare()
        return out

    def watch(self, sender: Worker, now: float) -> None:
        """From now on the models know all: every process has given or seen the first values."""
        self.is_watching = True
        self._look(sender.process, sender.sessions[self.server], now)

    def look(self, now: float) -> None:
        """Let the server see which processes have ended."""
        ended = [number for number in self._tokens if not self._processes[number].is_alive]
        for number in ended:
            self._members.ended.setdefault(number, now)
        processes = SeenProcesses({(b"%d" % number, self._tokens[number]): "" for number in ended})
        self.engine.check_processes(processes, now)  # type: ignore[arg-type]

    def tick(self, now: float) -> list[Delivery]:
        """Let time pass; what waits may be answered, or fail."""
        out = [Delivery(int(o.peer), o.reply) for o in self.engine.tick(now)]
        self._expect([told for model in self.models for told in model.tick(now)], out)
        self._compare()
        return out

    def _ask(self, process: int, request: m.Request, now: float) -> list[Delivery]:
        found = handle_frames(self.engine, b"%d" % process, request, now, self._seen)
        return [Delivery(int(o.peer), o.reply) for o in found]

    # ---------------------------------------------------------------- what the models expect

    def _hello(self, sender: Worker, is_current: bool, out: list[Delivery], now: float) -> None:
        bodies = [d.reply.body for d in out]
        token = bodies[0].session if len(bodies) == 1 and isinstance(bodies[0], m.Welcome) else 0
        if sender.process not in self._tokens:
            self._tokens[sender.process] = token
            self._members.current[sender.rank] = sender.process
            self._members.left.discard(sender.rank)
            self._members.done.discard(sender.rank)
            for model in self.models:
                model.begin(sender.rank, sender.process)
        else:
            self._seen["hello again"] += 1
            is_right = token == self._tokens[sender.process] if is_current else all(map(is_fencing, bodies))
            self._check(is_right, "a repeated hello", out)
        if self._members.current.get(sender.rank) == sender.process:
            self._members.heard[sender.rank] = now

    def _follow(self, sender: Worker, request: m.Request, now: float) -> Told | None:
        body, rank, to = request.body, sender.rank, (sender.process, request.number)
        if isinstance(body, m.Contribute):
            return self._contribute(sender, to, body, now)
        if isinstance(body, m.Resolve):
            model = self.models[body.table]
            assert isinstance(model, SyncModel)
            return model.resolve(body)
        if isinstance(body, m.Abort):
            return self.models[body.table].abort(rank, to, body)
        if isinstance(body, m.Pull):
            [model] = [self.models[table] for table in body.tables]
            assert isinstance(model, AsyncModel)
            return model.read(rank, to, body, now)
        if isinstance(body, m.Register):
            model = self.models["ab".index(body.table)]
            has_committed = isinstance(model, SyncModel) and rank in model.committed
            return [(to, [m.Registered(model.table, model.slots[0], model.next_round(rank), has_committed)])]
        if isinstance(body, m.Leave):
            del self._members.current[rank], self._members.heard[rank]
            (self._members.done if body.is_clean else self._members.left).add(rank)
            self._seen["left, done" if body.is_clean else "left"] += 1
            for model in self.models:
                model.begin(rank, -1)
            return [told for model in self.models for told in model.tick(now)]
        return [(to, [m.Pending(()) if isinstance(body, m.Heartbeat) else m.Status()])]

    def _contribute(self, sender: Worker, to: To, body: m.Contribute, now: float) -> Told | None:
        codec = b"" if body.encoding == PACKED_ROWS else body.encoding
        told: Told = []
        is_announcement = len(body.commits) > 0 and body.commits[0, m.COMMIT_FLAGS] & m.DECLARES_INTENT
        pushes = [] if is_announcement else body.pushes.tolist()
        for slot, round_, generation, _ in pushes:
            self._model_of[slot].push(sender.rank, round_, slot, generation, codec)
        slots = [slot for slot, *_ in pushes]
        for model in {self._model_of[slot].table: self._model_of[slot] for slot in slots}.values():
            told += model.advance(slots)
        for table, round_, count, generations, _, flags in body.commits.tolist():
            model, lane = self.models[table], sender.lanes[table]
            meant = None
            if lane.is_open and lane.round == round_:
                meant = {slot: g for (server, slot), g in lane.generations.items() if server == self.server}
            commit = Commit(to, round_, count, generations, flags, body, meant)
            counted = model.counted
            if flags & m.DECLARES_INTENT:
                told += model.announce(sender.rank, commit)
                continue
            found = model.commit(sender.rank, commit, now)
            if found is None:
                return None
            told += found
            if model.counted > counted:
                told += [released for one in self.models for released in one.release()]
        return told

    # ---------------------------------------------------------------- comparing

    def _expect(self, wanted: Told | None, out: list[Delivery]) -> None:
        """Everybody who is to be told something is, and nobody else."""
        if wanted is None or not self.is_watching:
            return
        told: dict[To, list[Any]] = {}
        want: dict[To, list[Any]] = {}
        for process, reply in out:
            told.setdefault((process, reply.number), []).append(reply.body)
        for to, bodies in wanted:
            want.setdefault(to, []).extend(bodies)
        want = {to: bodies for to, bodies in want.items() if bodies}
        is_right = told.keys() == want.keys() and all(
            len(told[to]) == len(want[to])
            and all(map(self._is_alike, [to] * len(told[to]), told[to], want[to]))
            for to in told
        )
        if not is_right:
            self._check(False, f"{want} was to be told", out)

    def _is_alike(self, to: To, got: Any, want: Any) -> bool:
        """Whether a reply says what the model says."""
        if isinstance(want, Weights):
            return isinstance(got, m.Weights) and self._are_weights(to, got, want)
        if type(got) is not type(want):
            return False
        if isinstance(want, m.Done):
            return bool(np.array_equal(got.rounds, want.rounds))
        if isinstance(want, m.Held):
            same = (got.table, got.round, got.is_finite) == (want.table, want.round, want.is_finite)
            norms, wanted = dict(got.partials), dict(want.partials)
            same = same and [*norms] == [*wanted]
            return same and np.allclose([*norms.values()], [*wanted.values()], rtol=1e-12, atol=0)
        if isinstance(want, m.Failed):
            is_sync = isinstance(self.models[0], SyncModel)
            first = self._texts.setdefault((want.table, want.round), got.text) if is_sync else got.text
            return got.text == first and (got.table, got.round, got.next_round) == (
                want.table,
                want.round,
                want.next_round,
            )
        return isinstance(want, m.Pending) or bool(got == want)

    def _are_weights(self, to: To, got: m.Weights, want: Weights) -> bool:
        """Whether these are the present weights of a table, which the one who reads them may have."""
        model = self.models[want.table]
        slots, version = (model.slots, model.version) if want.early is None else want.early
        if isinstance(model, AsyncModel):
            self._check_bound(model, self._processes[to[0]].rank)
        if got.parts[:, :3].tolist() != [[slot, version, m.WHOLE] for slot in slots]:
            return False
        return all(
            p.numpy().tobytes() == model.weights[s].tobytes()
            for s, p in zip(slots, got.payloads, strict=True)
        )

    def _check_bound(self, model: AsyncModel, rank: int) -> None:
        """The promise of bounded staleness, for one read: no rank that has data lacks more than `staleness`."""
        self._seen["reads within a bound"] += model.limit < float("inf")
        for r in range(NUM_WORKERS):
            ahead = model.clocks[rank] - model.clocks[r]
            if ahead > model.limit and r not in model.joined and r not in self._members.done:
                raise Violation(f"{self}: rank {rank} read {ahead} ahead of {r}, {model.limit} allowed")

    def _look(self, process: int, session: tuple[int, int], now: float) -> None:
        """Have the weights of tables in view that have their first values; the engine changes them in place."""
        for model in self.models if self.is_watching else ():
            if model.slots[0] not in self._views and model.version >= 0:
                pull = m.Request(*session, PULL, m.Pull((model.table,)))
                body = self._ask(process, pull, now)[0].reply.body
                if isinstance(body, m.Weights):
                    self._views |= zip(model.slots, (p.numpy() for p in body.payloads), strict=True)

    def _compare(self) -> None:
        for slot, view in self._views.items():
            model = self._model_of[slot]
            weights, bits = self._bits.get(slot, (None, b""))
            if weights is not model.weights[slot]:
                weights, bits = self._bits[slot] = (model.weights[slot], model.weights[slot].tobytes())
            if view.tobytes() != bits:
                raise Violation(f"{self}: table {model.table} has wrong weights at version {model.version}")

    def _check(self, holds: bool, what: str, out: list[Delivery]) -> None:
        if not holds:
            said = "; ".join(f"to {d.process}: {d.reply}" for d in out) or "no reply"
            raise Violation(f"{self}: {what}: {said}")

    def __str__(self) -> str:
        return f"server {self.server}"


def is_fencing(body: m.ReplyBody) -> bool:
    return isinstance(body, m.Failed) and body.code == "FencedError"
