"""Members that change, under random interleavings of messages: no two servers apply a round with different members.

The servers are engines, and the workers are small models of what a client does. Messages between each worker and each
server are delivered in any order, some twice, some late, some never. Workers join, leave and die at random, and servers
are killed and go on with what outlives them. In jobs with backup workers, workers are also paused for a while.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch

from kvstore_server.engine import engine as engine_module
from kvstore_server.engine import pipelined
from kvstore_server.engine.cut import CutBuffer, StoredSpace, _read_cut_space, make_cut, tensors_of_cuts
from kvstore_server.engine.engine import Engine, Sender
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.rounds import Waiter
from kvstore_server.engine.table import Table
from kvstore_server.engine.views import MemberView, Views
from kvstore_server.errors import RepeatedRoundError
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.processes import ProcessState
from kvstore_server.protocol import messages as m
from tests.sim.schedule import CautiousAdding
from tests.sim.workers import packed, tiny_slices
from tests.support.durable import HeldDescriptors, durable_engine

SERVERS, CAPACITY, INITIAL, LEAST, ROUNDS = 2, 5, 3, 1, 6
SPECS = (TensorSpec("a", (16,), "float32"), TensorSpec("b", (16,), "float32"))
with tiny_slices():
    PLAN = make_plan(SPECS, SERVERS)
LEASE = 5.0
CALM = 40.0
"""From then on no server is killed: how long a rank has been silent counts from a server's start."""
LEAVES = 1 << 20
"""The number of requests to leave."""


def value(rank: int, round_: int, length: int) -> torch.Tensor:
    """What a rank gives to a round: sums of these say which ranks they are of, and of which round."""
    given = torch.full((length,), float(10**rank) if round_ else 0.0)
    given[1] *= round_
    return given


@dataclass
class Worker:
    """A process of a rank: registers everywhere, joins, then commits round after round until it leaves or dies."""

    rank: int
    life: int
    last: int
    """The last round that it takes part in; then it leaves."""
    sessions: dict[int, int] = field(default_factory=dict)
    tables: dict[int, m.Registered] = field(default_factory=dict)
    view: MemberView | None = None
    following: MemberView | None = None
    round: int = 0
    done: set[int] = field(default_factory=set)
    number: int = 0
    """Of the requests of the open round; answers to earlier ones do not count."""
    state: str = "hello"
    ended: str = ""
    completed: list[int] = field(default_factory=list)
    aborted: int = 0
    """The round that it gives up."""
    is_late: bool = False
    """Whether the gradient that it has then does not count in the next one."""
    applied: dict[int, bool] = field(default_factory=dict)
    """While it gives a round up: whether each server counts it as applied."""
    undoes: bool = False
    """Whether it has it undone where it was applied, because another server has failed it."""
    backup: int = 0
    """The number of backup workers of the job."""
    closed: MemberView | None = None
    """With which ranks the coordinator has closed the open round."""
    asked: int = 0
    """While it follows: it asks what there is when this round is over."""
    left_out: dict[int, m.LeftOut] = field(default_factory=dict)
    """What servers have said of rounds that have ended without it."""
    resumes_at: float = 0.0
    """Until then it is paused."""
    missed: int = 0
    """How often it was left out."""

    @property
    def peer(self) -> bytes:
        return b"%d.%d" % (self.rank, self.life)

    def requests(self) -> list[tuple[int, m.RequestBody]]:
        """What it sends now, and again as long as it is not answered."""
        if self.state == "hello":
            return [
                (s, m.Hello("j", self.rank, CAPACITY, s, SERVERS, "", self.peer.decode(), self.peer.ljust(16),
                            (self.peer,), resumes=True, initial_workers=INITIAL, min_workers=LEAST,
                            backup_workers=self.backup))
                for s in range(SERVERS) if s not in self.sessions
            ]  # fmt: skip
        if self.state == "register":
            specs = tuple(tuple(spec) for spec in PLAN.specs)
            register = m.Register("t", specs, False, digest=PLAN.digest)  # type: ignore[arg-type]
            return [
                (s, body)
                for s in range(SERVERS)
                for body in (m.SetOptimizer(packed(CautiousAdding.name)), register)
            ]
        if self.state == "tell":
            return [(1, m.LeaveRounds(0))]
        if self.state == "join":
            return [(0, m.JoinRounds(0, 1e6))]
        if self.state == "enter":
            # As a process does that takes a rank over: how has the round before ended?
            flags = m.WANTS_WEIGHTS | m.REPEATS
            return [(s, self.commit(s, self.round - 1, flags, 0)) for s in self.open()]
        if self.state == "follow":
            flags = m.WANTS_WEIGHTS | m.FOLLOWS
            asked = [
                (s, self.commit(s, self.asked, flags, 0)) for s in range(SERVERS) if s not in self.left_out
            ]
            return [*asked, *self.passed_on()]
        if self.state == "leave":
            return [(0, m.LeaveRounds(0))]
        if self.state == "give up":
            abort = m.Abort(0, self.aborted, "", self.undoes, True)
            return [(s, abort) for s in range(SERVERS) if s not in self.applied]
        commits = [(s, self.commit(s, self.round, m.WANTS_WEIGHTS, 1)) for s in self.open()]
        if self.closed is None:
            return [*commits, *self.passed_on()]
        told = m.CloseRound(0, self.round, self.closed.number, self.closed.ranks)
        return [*commits, *[(s, told) for s in self.open() if s]]

    def passed_on(self) -> list[tuple[int, m.RequestBody]]:
        """What the coordinator has said about a round that has ended there without this rank."""
        told = self.left_out.get(0)
        if told is None or told.closed_view < 0:
            return []
        closed = m.CloseRound(0, told.round - 1, told.closed_view, told.closed_ranks)
        return [(s, closed) for s in range(1, SERVERS) if s not in self.left_out]

    def open(self) -> list[int]:
        """The servers that have not answered; the coordinator has to tell the next members, too."""
        return [s for s in range(SERVERS) if s not in self.done or (s == 0 and not self.is_told)]

    @property
    def is_told(self) -> bool:
        """Whether the coordinator has told all about the round."""
        is_closed = self.view is None or not self.view.num_backup or self.closed is not None
        return self.following is not None and (is_closed or self.state != "round")

    def commit(self, server: int, round_: int, flags: int, gives: int) -> m.Contribute:
        slices, first = PLAN.slices_of(server), self.tables[server].slot
        given = [value(self.rank, round_, one.length) for one in slices] if gives else []
        pushes = [(first + at, round_, 0, one.nbytes) for at, one in enumerate(given)]
        view = self.closed or self.view
        assert view is not None
        return m.Contribute(
            m.matrix(pushes, m.PUSH_WORDS), tuple(given),
            m.matrix([(0, round_, len(given), 0, -1, flags)], m.COMMIT_WORDS),
            timeout=1e6, view=view.number, members=view.ranks, num_backup=view.num_backup, closes=view.closes >= 0,
        )  # fmt: skip

    def receive(self, server: int, number: int, body: m.ReplyBody) -> None:
        if isinstance(body, m.Welcome):
            self.sessions[server] = body.session
            self.state = "register" if len(self.sessions) == SERVERS and self.state == "hello" else self.state
        elif isinstance(body, m.Registered):
            self.tables[server] = body
            if len(self.tables) == SERVERS and self.state == "register":
                self.state = "join" if self.tables[0].is_member else "tell"
        elif self.state == "tell" and isinstance(body, m.Status) and number == LEAVES:
            self.state = "join"
        elif isinstance(body, m.Members) and self.state == "join":
            self.view = MemberView(body.view, body.ranks, body.num_backup)
            self.round, self.state = max(body.since, 0), "enter" if body.since else "round"
            if self.backup and body.since:
                self.follow(body.since - 1)
        elif isinstance(body, m.Failed):
            if self.state in ("round", "follow", "give up") and body.code == RepeatedRoundError.__name__:
                if number == self.number and self.state == "round":
                    self.give_up(self.round, {server: False})
                elif number == self.number and self.state == "follow":
                    self.give_up(self.asked, {})
            else:
                self.ended = f"{body.code}: {body.text}"
        elif self.state == "give up":
            if isinstance(body, m.Status) and number == self.number:
                self.applied[server] = body.values["applied"]
                self.go_on_giving_up()
        elif self.state == "leave" and isinstance(body, m.Status) and number == LEAVES:
            self.ended = "left"
        elif number != self.number or self.state not in ("enter", "round", "follow"):
            return
        elif isinstance(body, m.LeftOut):
            if server not in self.done or (server == 0 and not self.is_told):
                self.left_out[server] = body
                self.go_on_following()
        elif isinstance(body, m.Members):
            self.receive_members(server, body)
        elif isinstance(body, m.Weights) and server not in self.left_out and self.state != "follow":
            self.done.add(server)
            self.advance()

    def follow(self, asked: int) -> None:
        """Ask all servers how a round has ended, and for the weights after it."""
        self.state, self.asked, self.closed, self.following = "follow", asked, None, None
        self.left_out.clear()
        self.done.clear()
        self.number += 1

    def go_on_following(self) -> None:
        """Go on with the open round, if all servers have told the same and this rank is a member of it."""
        told = self.left_out
        if self.state == "round" and len(told) + len(self.done - set(told)) < SERVERS:
            return
        if self.state == "follow" and len(told) < SERVERS:
            return
        last = max([one.round for one in told.values()])
        failed = {s: False for s, one in told.items() if one.round == last and one.applied < last - 1}
        if len(told) == SERVERS and len({(one.round, one.applied) for one in told.values()}) == 1:
            self.enter(last)
        elif failed:
            self.give_up(last - 1, failed)  # a round that one server has failed fails everywhere
        else:
            self.follow(last - 1)

    def enter(self, last: int) -> None:
        """Go on with the open round, about which all servers agree, or wait for its end if it has begun without it."""
        told = self.left_out
        if self.rank not in told[0].members:
            self.follow(last)
        else:
            assert len({one.client_states for one in told.values()}) == 1, told  # the weights
            self.missed += told[0].round - self.round
            self.view = MemberView(told[0].view, told[0].members, told[0].num_backup)
            self.round = told[0].round
            self.begin_round()

    def begin_round(self) -> None:
        self.state, self.closed, self.following = "round", None, None
        self.left_out.clear()
        self.done.clear()
        self.number += 1
        if self.round > self.last:
            self.state = "leave"

    def receive_members(self, server: int, body: m.Members) -> None:
        view, opened = (
            MemberView(body.view, body.ranks, body.num_backup),
            self.round - (self.state == "enter"),
        )
        assert self.view is not None
        if body.closes:
            if body.round == self.round and self.state == "round":
                self.closed = view._replace(closes=body.round)
                self.advance()
        elif body.round == opened + 1 and server == 0:
            self.following = view
            self.advance()
        elif body.round == self.round and self.state == "round" and view.number > self.view.number:
            if self.rank not in view.ranks:
                self.ended = "FencedError: not a member"
            elif self.done - ({0} if self.following is None else set()):
                self.give_up(self.round, {})  # a server has ended the round with former members
                return
            self.view, self.number = view, self.number + 1
            self.done.clear()

    def give_up(self, round_: int, applied: dict[int, bool]) -> None:
        """Abort a round everywhere, before it is made again."""
        is_undecided = self.view is not None and self.view.num_backup > 0 and self.closed is None
        self.is_late = self.state == "follow" or is_undecided
        self.aborted, self.state, self.applied, self.undoes = round_, "give up", applied, False
        self.number += 1
        self.go_on_giving_up()

    def go_on_giving_up(self) -> None:
        if len(self.applied) < SERVERS:
            return
        where = {server for server, is_applied in self.applied.items() if is_applied}
        if where and not self.undoes and len(where) < SERVERS:
            self.undoes, self.number = True, self.number + 1
            for server in where:
                del self.applied[server]
        elif where:
            self.ended = "WorkerLostError: servers are one round apart"
        elif self.is_late:
            # Its gradient may be of weights that servers have changed and restored meanwhile.
            self.follow(self.aborted)
        else:
            self.round += 1
            self.begin_round()

    def advance(self) -> None:
        if len(self.done) < SERVERS or not self.is_told or self.following is None:
            return
        if self.state == "round":
            self.completed.append(self.round)
            self.round += 1
        self.view = self.following
        self.begin_round()


class Simulation:
    def __init__(self, seed: int, loses: float, dies: float, restarts: float, backup: int = 0) -> None:
        self.rng = random.Random(seed)
        self.backup = backup
        self.loses, self.dies, self.restarts, self.now = loses, dies, restarts, 0.0
        self.stores = [HeldDescriptors() for _ in range(SERVERS)]
        self.engines = [self.engine(server) for server in range(SERVERS)]
        self.lives: defaultdict[int, int] = defaultdict(int)
        self.workers: dict[bytes, Worker] = {}
        self.flying: list[tuple[float, int, bytes, m.Request | m.Reply]] = []
        """(when it is delivered, server, process, message)."""
        self.totals: list[dict[int, float]] = [{} for _ in range(SERVERS)]
        """By server: round → the sum that was applied."""
        self.missed = 0
        """How many rounds workers were left out of."""
        for rank in range(INITIAL):
            self.begin(rank)

    def engine(self, server: int) -> Engine:
        """A server that begins, or goes on where its last process was killed."""
        config = EngineConfig(server, SERVERS, run_id=1, rejoin_timeout=LEASE, dead_after=20.0)
        tokens = partial(self.rng.getrandbits, 64)
        return durable_engine(self.stores[server], config, now=self.now, tokens=tokens)

    def begin(self, rank: int) -> None:
        self.lives[rank] += 1
        # Rank 0 stays to the end, so that there is always somebody.
        last = ROUNDS if rank == 0 or self.rng.random() < 0.3 else self.rng.randrange(1, ROUNDS)
        worker = Worker(rank, self.lives[rank], last, backup=self.backup)
        self.workers[worker.peer] = worker

    @property
    def first(self) -> Worker:
        """The worker that stays to the end."""
        return self.workers[b"0.1"]

    def run(self) -> None:
        for _ in range(4000):
            if self.first.ended or self.first.round > ROUNDS:
                break
            self.turn()
        self.check()
        for store in self.stores:
            store.close()

    def turn(self) -> None:
        rng, living = self.rng, [one for one in self.workers.values() if not one.ended]
        self.now += 0.05
        # 1. Somebody joins, or dies.
        if rng.random() < 0.02:
            # A rank whose process has died is taken over by nobody: it is dropped, and may join after that.
            free = set(range(CAPACITY)).difference([one.rank for one in living], self.members())
            if free:
                self.begin(rng.choice(sorted(free)))
        mortal = [one for one in living if one.rank]
        # The first values cannot be taken back, so nobody dies before they are everywhere.
        if mortal and self.first.round and rng.random() < self.dies:
            self.die(rng.choice(mortal))
        # 2. A server is killed and starts again; what was on its way to it and from it is lost.
        if rng.random() < self.restarts and self.now < CALM:
            server = rng.randrange(SERVERS)
            self.flying = [one for one in self.flying if one[1] != server]
            self.engines[server] = self.engine(server)
            self.see_dead(server)
        # 3. Some pause. The others send what is not answered yet, and that they are alive.
        for worker in living if self.backup else ():
            if self.now >= worker.resumes_at and rng.random() < 0.01:
                worker.resumes_at = self.now + rng.choice([0.5, 2.0, 5.0])
        for worker in [one for one in living if self.now >= one.resumes_at]:
            for server, session in worker.sessions.items() if rng.random() < 0.05 else ():
                self.post(server, worker.peer, m.Request(1, session, LEAVES - 1, m.Heartbeat()))
            if rng.random() < 0.3:
                for server, body in worker.requests():
                    if isinstance(body, m.Contribute) and rng.random() < 0.3:
                        continue
                    run = 0 if isinstance(body, m.Hello) else 1
                    number = LEAVES if isinstance(body, m.LeaveRounds) else worker.number
                    self.post(
                        server, worker.peer, m.Request(run, worker.sessions.get(server, 0), number, body)
                    )
        # 4. Some messages arrive.
        due = [one for one in self.flying if one[0] <= self.now and not self.is_held(one[2], one[3])]
        rng.shuffle(due)
        for one in due:
            self.flying.remove(one)
            self.deliver(*one[1:])
        for server, engine in enumerate(self.engines):
            self.answer(server, engine.tick(self.now))

    def is_held(self, peer: bytes, message: m.Request | m.Reply) -> bool:
        """Whether a message is for a worker that is paused."""
        return isinstance(message, m.Reply) and self.now < self.workers[peer].resumes_at

    def die(self, worker: Worker) -> None:
        worker.ended = "died"
        self.flying = [one for one in self.flying if one[2] != worker.peer or self.rng.random() < 0.5]
        for server in range(SERVERS):
            self.see_dead(server)

    def see_dead(self, server: int) -> None:
        """Let a server see which processes have died."""
        for session in self.engines[server]._sessions:
            if self.workers[session.peer].ended == "died" and session.state is not ProcessState.ENDED:
                session.state, session.seen_at = ProcessState.ENDED, self.now

    def post(self, server: int, peer: bytes, message: m.Request | m.Reply) -> None:
        for _ in range(1 + (self.rng.random() < 0.1)):
            if self.rng.random() >= self.loses:
                self.flying.append((self.now + self.rng.choice([0.0, 0.0, 0.1, 1.0]), server, peer, message))

    def deliver(self, server: int, peer: bytes, message: m.Request | m.Reply) -> None:
        worker = self.workers[peer]
        if isinstance(message, m.Request):
            if worker.state == "leave" and isinstance(message.body, m.JoinRounds):
                return  # over one connection it comes before the request to leave
            engine = self.engines[server]
            before, members, weights = (
                self.round_of(server),
                self.all_members(server),
                self.weights_of(server),
            )
            out = engine.handle(peer, message, self.now)
            if self.round_of(server) > before and (space := engine.namespaces.get("j")) is not None:
                self.totals[server][before] = float(space.shard.storage.padded[0][0])
                self.check_round(server, before, members, weights)
            self.answer(server, out)
        elif not worker.ended:
            worker.receive(server, message.number, message.body)

    def all_members(self, server: int) -> set[int]:
        space = self.engines[server].namespaces.get("j")
        return set() if space is None or space.views is None else space.views.members

    def weights_of(self, server: int) -> torch.Tensor:
        space = self.engines[server].namespaces.get("j")
        has_table = space is not None and space.tables
        return (
            space.shard.storage.padded[0][:2].clone() if space is not None and has_table else torch.zeros(2)
        )

    def check_round(self, server: int, round_: int, members: set[int], former: torch.Tensor) -> None:
        """A round that was applied has as many members as the job says, each once, with what it gave to this round."""
        space = self.engines[server].namespaces["j"]
        views, weights = space.views, space.shard.storage.padded[0]
        assert views is not None
        if not self.backup or not round_ or not space.rounds.shared.was_applied(0, round_):
            return
        ranks, (count, rounds) = views.ended.ranks, (weights[:2] - former).tolist()
        assert (count, rounds) == (sum([10**rank for rank in ranks]), round_ * count), (server, round_, ranks)
        if server == 0:
            assert len(ranks) == max(len(members) - self.backup, LEAST), (ranks, members, views)

    def answer(self, server: int, out: list[m.Outgoing]) -> None:
        late = {(one.peer, one.reply.number) for one in out if isinstance(one.reply.body, m.LeftOut)}
        for one in out:
            if one.peer not in self.workers:
                continue
            # The weights come behind what they are told with; here they come together, as what it says of them.
            number, body = one.reply
            if isinstance(body, m.LeftOut):
                weights = self.engines[server].namespaces["j"].shard.storage.padded[0]
                body = replace(body, client_states=(weights[:2].numpy().tobytes(),))
            elif isinstance(body, m.Weights) and (one.peer, number) in late:
                continue
            self.post(server, one.peer, m.Reply(number, body))

    def members(self) -> tuple[int, ...]:
        space = self.engines[0].namespaces.get("j")
        return () if space is None or space.views is None else space.views.current.ranks

    def round_of(self, server: int) -> int:
        space = self.engines[server].namespaces.get("j")
        return space.rounds.shared.number(0) if space is not None and space.tables else 0

    def check(self) -> None:
        """Rounds that a worker has completed have the same members on all servers."""
        first = self.first
        self.missed = sum([worker.missed for worker in self.workers.values()])
        for worker in self.workers.values():
            for round_ in worker.completed:
                sums = [totals.get(round_) for totals in self.totals]
                assert len(set(sums)) == 1, (worker, round_, sums)
        if not self.dies:
            failed = [one.ended for one in self.workers.values() if one.ended not in ("", "left", "lost")]
            assert all(text.startswith(("FencedError", "ConfigurationError")) for text in failed), failed
        # A round after which a rank has joined, or a server was killed, cannot be taken back.
        views = self.engines[0].namespaces["j"].views
        is_final = bool(self.restarts) or (views is not None and first.round + 1 in views.since.values())
        is_final = is_final and not (self.backup and not self.restarts)
        assert first.round > ROUNDS or (is_final and first.ended.startswith("WorkerLostError")), first


class LosingSimulation(Simulation):
    """Everything is lost once, and the job goes back to the newest snapshot with the workers that come then.

    The lowest rank of a round asks for a snapshot as it begins the round. That reaches both servers before they get
    anything of the round from it, so they must be after the same round.
    """

    def __init__(self, seed: int, loses: float, dies: float, restarts: float, backup: int = 0) -> None:
        super().__init__(seed, loses, dies, restarts, backup)
        self.cuts: list[StoredSpace] = []
        """The newest snapshot, by server."""
        self.loses_after = self.rng.randrange(1, ROUNDS)
        self.back_to = 0
        """The round to which it has gone back; 0: not yet."""

    @property
    def first(self) -> Worker:
        return self.workers[b"0.%d" % self.lives[0]]

    def deliver(self, server: int, peer: bytes, message: m.Request | m.Reply) -> None:
        worker = self.workers[peer]
        before = len(worker.completed)
        super().deliver(server, peer, message)
        view = worker.view
        if len(worker.completed) > before and view is not None and worker.rank == view.ranks[0]:
            assert [self.round_of(at) for at in range(SERVERS)] == [worker.round] * SERVERS
            self.cuts = [self.cut(engine) for engine in self.engines]

    def cut(self, engine: Engine) -> StoredSpace:
        space = engine.namespaces["j"]
        pipelined.roll_back_for_read(space, 0, [0])
        [found] = make_cut([space], CutBuffer())
        return _read_cut_space(0, tensors_of_cuts([found]))

    def turn(self) -> None:
        super().turn()
        is_due = bool(self.cuts) and self.first.round >= self.loses_after and not self.back_to
        if is_due and self.rng.random() < 0.05:
            self.lose_everything()

    def lose_everything(self) -> None:
        for worker in self.workers.values():
            worker.ended = worker.ended or "lost"
        self.flying.clear()
        for store in self.stores:
            store.close()
        self.stores = [HeldDescriptors() for _ in range(SERVERS)]
        self.engines = [self.engine(server) for server in range(SERVERS)]
        asks = SimpleNamespace(views=Views(CAPACITY, INITIAL, LEAST))
        for engine, stored in zip(self.engines, self.cuts, strict=True):
            engine._restore_space("j", stored, Sender(asks, 0, Waiter(b"", 0), 0, self.now))  # type: ignore[arg-type]
            engine.tick(self.now)  # logs it, as at the end of the request
        self.back_to = self.round_of(0)
        for rank in range(CAPACITY):
            if not rank or self.rng.random() < 0.5:
                self.begin(rank)


MISHAPS = [(0.0, 0.0, 0.0), (0.1, 0.0, 0.0), (0.1, 0.01, 0.0), (0.1, 0.01, 0.02)]
"""How often a message is lost, a process dies in a turn, and a server is killed in a turn."""
FEW = 3
"""Schedules in `make test`."""


Played = TypeVar("Played", bound=Simulation)


def play(seeds: range, make: Callable[[int], Played]) -> Iterator[Played]:
    """Run a schedule for each seed."""
    for seed in seeds:
        try:
            with tiny_slices():
                simulation = make(seed)
                simulation.run()
        except BaseException as error:
            raise AssertionError(f"{make} with seed {seed}") from error
        yield simulation


def run(seeds: range, loses: float, dies: float, restarts: float, backup: int = 0) -> int:
    """Run some schedules; returns how often workers were left out of a round."""
    make = partial(Simulation, loses=loses, dies=dies, restarts=restarts, backup=backup)
    return sum([one.missed for one in play(seeds, make)])


@pytest.mark.parametrize(("loses", "dies", "restarts"), MISHAPS)
def test_no_two_servers_complete_a_round_with_different_members(
    loses: float, dies: float, restarts: float
) -> None:
    run(range(FEW), loses, dies, restarts)


@pytest.mark.parametrize(("loses", "dies", "restarts"), MISHAPS)
def test_the_slowest_are_left_out_of_a_round_on_all_servers_alike(
    loses: float, dies: float, restarts: float
) -> None:
    assert run(range(FEW), loses, dies, restarts, backup=1) > 2 * FEW


@pytest.mark.parametrize(("seed", "backup"), [(41, 1), (49, 1), (19, 2)])
def test_rounds_end_on_all_servers_although_those_that_count_have_died(seed: int, backup: int) -> None:
    run(range(seed, seed + 1), 0.1, 0.01, 0.0, backup)


def run_losing(seeds: range, loses: float, dies: float, restarts: float) -> int:
    """Run some schedules in which everything is lost; returns how many jobs went back."""
    make = partial(LosingSimulation, loses=loses, dies=dies, restarts=restarts)
    return sum([one.back_to > 0 for one in play(seeds, make)])


@pytest.mark.parametrize(("loses", "dies", "restarts"), MISHAPS)
def test_servers_agree_on_the_members_after_a_job_has_gone_back(
    loses: float, dies: float, restarts: float
) -> None:
    assert run_losing(range(FEW), loses, dies, restarts) > FEW // 2


@pytest.mark.chaos
@pytest.mark.parametrize("first", range(FEW, 303, 20))
@pytest.mark.parametrize(("loses", "dies", "restarts"), MISHAPS)
def test_servers_agree_on_the_members_after_many_jobs_have_gone_back(
    first: int, loses: float, dies: float, restarts: float
) -> None:
    run_losing(range(first, first + 20), loses, dies, restarts)


@pytest.mark.chaos
@pytest.mark.parametrize("backup", [1, 2])
@pytest.mark.parametrize("first", range(FEW, 303, 20))
@pytest.mark.parametrize(("loses", "dies", "restarts"), MISHAPS)
def test_backup_workers_are_the_same_on_all_servers_in_many_schedules(
    first: int, loses: float, dies: float, restarts: float, backup: int
) -> None:
    run(range(first, first + 20), loses, dies, restarts, backup)


@pytest.mark.chaos
@pytest.mark.parametrize("first", range(FEW, 303, 20))
@pytest.mark.parametrize(("loses", "dies", "restarts"), MISHAPS)
def test_members_are_the_same_on_all_servers_in_many_schedules(
    first: int, loses: float, dies: float, restarts: float
) -> None:
    run(range(first, first + 20), loses, dies, restarts)


def test_the_simulation_notices_if_commits_under_former_members_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "check_view", lambda *_: None)
    with pytest.raises(AssertionError, match="Simulation"):
        run(range(12), 0.0, 0.0, 0.0)


def test_the_simulation_notices_if_a_partial_commit_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Table, "undo", lambda *_: True)
    with pytest.raises(AssertionError, match="Simulation"):
        run(range(15, 55), 0.1, 0.03, 0.0)


def test_the_simulation_notices_if_a_round_without_members_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Views, "is_complete", lambda self, _, committed: committed == len(self.current.ranks))
    with pytest.raises(AssertionError, match="LosingSimulation"):
        run_losing(range(12), 0.0, 0.0, 0.0)


def test_the_simulation_notices_if_a_restarted_server_does_not_know_the_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Views, "restore", lambda *_: None)
    with pytest.raises(AssertionError, match="Simulation"):
        run(range(12), *MISHAPS[-1])
