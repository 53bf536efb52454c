"""The referee of servers without synchronous rounds: every reply is foreseen, and every read within the bound."""

from __future__ import annotations

from collections import Counter

from kvstore_server.engine import Engine
from tests.support import said as m
from tests.support.sim_async_model import AsyncModel, Told, Waiting
from tests.support.sim_delivery import Delivery, copies, is_fencing, token_in
from tests.support.sim_lane import DEAD_AFTER, NAMESPACE, NUM_WORKERS
from tests.support.sim_model import same_bits
from tests.support.sim_referee import Views, Violation, views_of
from tests.support.sim_workers import SimProcess


class AsyncReferee:
    """One server of the simulation; `watch` it when its tables have their first values."""

    def __init__(
        self, engine: Engine, models: list[AsyncModel], processes: dict[int, SimProcess], seen: Counter[str]
    ) -> None:
        self.engine = engine
        self.models = models
        self.is_watching = False
        self.current: dict[int, int] = {}
        """Rank → the process that stands for it here."""
        self.tokens: dict[int, int] = {}
        """What every process was given here at its first hello."""
        self.heard: dict[int, float] = {}
        self.lost: set[int] = set()
        """Ranks whose process left before it was done."""
        self._processes = processes
        self._seen = seen
        self._views: list[Views] = []

    def watch(self) -> None:
        """Every process has given or seen the first values: from now on the models know all."""
        self.is_watching = True
        tables = self.engine.namespaces[NAMESPACE].tables
        # Taken once: without leases the engine writes its weights in place.
        self._views = [views_of(tables[model.number], model) for model in self.models]

    def handle(self, process: int, request: m.Request, now: float) -> list[Delivery]:
        """Let the engine handle a request and check all that it did."""
        rank = self._processes[process].rank
        out = copies(m.handle(self.engine, b"%d" % process, request, now, NAMESPACE))
        body = request.body
        if isinstance(body, m.Hello) and self.current.get(rank) == process:
            self._seen["hello again"] += 1
            self._check(token_in(out) == self.tokens[process], "a repeated hello", out)
            self.heard[rank] = now
        elif isinstance(body, m.Hello) and process not in self.tokens:
            self.tokens[process] = token_in(out)
            self.current[rank], self.heard[rank] = process, now
            self.lost.discard(rank)
            for model in self.models:
                model.begin(rank, process)
        elif self.current.get(rank) != process:
            self._seen["fenced"] += 1
            self._check(bool(out) and all(is_fencing(d.reply.body) for d in out), "a fenced process", out)
        else:
            self.heard[rank] = now
            if self.is_watching:
                self._expect(self._follow(rank, process, request, now), out)
        if not isinstance(body, m.PushBatch):  # did it change anything, the next message would show it
            self._compare(out)
        return out

    def tick(self, now: float) -> list[Delivery]:
        """Let time pass; what waits may be answered, or fail."""
        out = copies(m.tick(self.engine, now, NAMESPACE))
        self._expect(self._tick(now), out)
        self._compare(out)
        return out

    # ---------------------------------------------------------------- what the models expect

    def _follow(self, rank: int, process: int, request: m.Request, now: float) -> list[Told]:
        body, number = request.body, request.number
        if isinstance(body, m.PushBatch):
            for push in body.pushes:
                self.models[push.table].push(rank, push.round, push.slice, push.generation)
            return []
        if isinstance(body, m.CommitBatch):
            [commit] = body.commits
            return self._commit(self.models[commit.table], rank, (process, number), commit, now)
        if isinstance(body, m.Abort):
            model = self.models[body.table]
            taken_back = len(model.ledger)
            told, stands = model.abort(rank, body)
            self._seen["undone"] += len(model.ledger) < taken_back
            self._seen["kept" if stands else "given up"] += 1
            return [*told, (process, number, [m.Info])]
        if isinstance(body, m.Pull):
            [table] = body.tables
            wait = Waiting(rank, [m.Weights], now + body.timeout)
            return [(process, number, self.models[table].read((process, number), wait))]
        if isinstance(body, m.Leave):
            return self._leave(rank, body.is_clean, now)
        kind = {m.Register: m.Registered, m.Heartbeat: m.Pending}.get(type(body), m.Info)
        return [(process, number, [kind])]

    def _commit(
        self, model: AsyncModel, rank: int, key: tuple[int, int], commit: m.Commit, now: float
    ) -> list[Told]:
        turn = model.turn(rank, commit.round)
        if commit.round > turn.open:
            raise Violation(f"{self._name}: p{key[0]} commits {commit} while {turn.open} is open")
        if commit.round in turn.failed:
            return [(*key, [m.Failed])]
        if commit.round < turn.open:
            self._seen["repeated"] += 1
            return [(*key, model.answer(rank, key, commit, now))]
        if model.missing(rank, commit):
            self._seen["missing"] += 1
            return [(*key, [m.Missing])]
        model.take(rank, commit, now)
        self._seen["joined" if commit.joined else "vetoed" if commit.veto else "applied"] += 1
        told = [(*key, model.answer(rank, key, commit, now))]
        self._seen["read had to wait"] += told[0][2] == [m.Pending] and not commit.joined
        return told + self._released()

    def _leave(self, rank: int, is_clean: bool, now: float) -> list[Told]:
        del self.current[rank], self.heard[rank]
        self._seen["left, done" if is_clean else "left"] += 1
        if not is_clean:
            self.lost.add(rank)
        for model in self.models:
            model.leave(rank, is_clean)
        return self._tick(now)

    def _tick(self, now: float) -> list[Told]:
        told = self._released()
        gone = self.lost | {r for r, heard in self.heard.items() if now - heard > DEAD_AFTER}
        for model in self.models:
            needed = {key: set(model.needed(w)) for key, w in model.waiting.items()}
            in_vain = [k for k, ranks in needed.items() if ranks & gone or now >= model.waiting[k].deadline]
            self._seen["waited in vain"] += len(in_vain)
            told += model.fail(in_vain)
        return told

    def _released(self) -> list[Told]:
        told = [one for model in self.models if model.waiting for one in model.release()]
        self._seen["all joined"] += any(m.InForce in kinds for _, _, kinds in told)
        self._seen["read released"] += any(m.InForce not in kinds for _, _, kinds in told)
        return told

    # ---------------------------------------------------------------- comparing

    def _expect(self, wanted: list[Told], out: list[Delivery]) -> None:
        """Everybody who is to be told something is, in that order, and nobody else."""
        told: dict[tuple[int, int], list[type]] = {}
        for d in out:
            told.setdefault((d.process, d.reply.number), []).append(type(d.reply.body))
        want: dict[tuple[int, int], list[type]] = {}
        for process, number, kinds in wanted:
            want.setdefault((process, number), []).extend(kinds)
        self._check(told == want, f"{want} was to be told", out)

    def _compare(self, out: list[Delivery]) -> None:
        if not self.is_watching:
            return
        for model, views in zip(self.models, self._views, strict=True):
            if not same_bits(views, model.weights):
                raise Violation(f"{self._name}: table {model.number} has wrong weights at {model.version}")
        for delivery in out:
            self._check_reply(delivery)

    def _check_reply(self, delivery: Delivery) -> None:
        body = delivery.reply.body
        if isinstance(body, m.Weights):
            model = self.models[body.parts[0].table]
            sent = {part.slice: part.payload.numpy() for part in body.parts}
            is_right = set(sent) == set(model.weights) and same_bits(sent, model.weights)
            is_right = is_right and {part.version for part in body.parts} == {model.version}
            self._check(is_right, f"not the weights of version {model.version}", [delivery])
            self._check_bound(model, self._processes[delivery.process].rank)
        elif isinstance(body, m.InForce):
            table, round_ = self._processes[delivery.process].about[delivery.reply.number]
            turn = self.models[table].turns[self._processes[delivery.process].rank]
            is_right = body.is_over or round_ < turn.open - 1
            self._check(is_right, "it is not over for who has joined", [delivery])
        elif isinstance(body, m.Registered):
            wanted = self.models[body.table].proposed(self._processes[delivery.process].rank)
            self._check(body.next_round == wanted, f"begin at {wanted}", [delivery])
        elif isinstance(body, m.Done):
            [(table, round_, version)] = body.rounds
            turn = self.models[table].turns[self._processes[delivery.process].rank]
            # Of an earlier one, which nobody waits for any more, it may say what was true then.
            is_right = version == turn.version if round_ == turn.open - 1 > 0 else version <= turn.version
            self._check(is_right, f"done at {turn.version}", [delivery])
        elif isinstance(body, m.Info) and "applied" in body.values:
            self._check_abort(delivery, body.values["applied"])

    def _check_bound(self, model: AsyncModel, rank: int) -> None:
        """The promise of bounded staleness, for one read: no rank that has data lacks more than `staleness`."""
        self._seen["reads within a bound"] += model.limit < float("inf")
        for r in range(NUM_WORKERS):
            ahead = model.clocks[rank] - model.clocks[r]
            if ahead > model.limit and r not in model.joined and r not in model.left:
                raise Violation(f"{self._name}: rank {rank} read {ahead} ahead of {r}, {model.limit} allowed")

    def _check_abort(self, delivery: Delivery, stands: bool) -> None:
        table, round_ = self._processes[delivery.process].about[delivery.reply.number]
        turn = self.models[table].turns[self._processes[delivery.process].rank]
        kept = round_ not in turn.failed
        self._check(stands == kept, f"an abort of {round_}, which stands: {kept}", [delivery])

    def _check(self, holds: bool, what: str, out: list[Delivery]) -> None:
        if not holds:
            said = "; ".join(f"to {d.process}: {d.reply}" for d in out) or "no reply"
            raise Violation(f"{self._name}: {what}: {said}")

    @property
    def _name(self) -> str:
        return f"server {self.engine.config.server}"
