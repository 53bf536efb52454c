"""Synchronous rounds of two ranks on two servers whose processes die, come back, and speak although they were replaced.

Every gradient is a function of all weights that its process has, so a process that continues from a wrong place ends
with other weights. A schedule is a list of `Event`s, each of which can be left out: what it does depends on the state
that it finds. So a schedule that fails can be shortened (`shortest`). After the last event nothing is lost any more,
and the job has to come to its end with the weights and the optimizer's state of one in which nothing happened.

The servers are real engines with durable state. The processes are written down here once more and simply: they send
one request at a time to each server until it is answered, and a successor does what `StoreExchange.resume` does.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.failpoints import POINTS
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control, unpack_control
from kvstore_server.protocol.rows import PACKED_ROWS, RowSet, encode_rows
from kvstore_server.shard.norms import Decision, combine
from tests.sim.model import Violation
from tests.sim.schedule import Cautious, Lazy, Remembering
from tests.sim.workers import Array, packed, tiny_slices
from tests.support.durable import Crash, HeldDescriptors, crash_at, durable_engine
from tests.support.restarts import state_of

RANKS, SERVERS = 2, 2
ROUNDS = 4
"""Those after the first one, which sets the first values."""
EVENTS = 80
TURNS = 200
"""Turns after which a job in which nothing is lost has come to its end."""
SPECS = (
    TensorSpec("w", (8, 4), "float32"),
    TensorSpec("b", (3,), "float32"),
    TensorSpec("c", (16,), "float32"),
)
ROWS = 4
"""Of a slice of the first key."""
RATES = tuple(pack_hypers([{"lr": rate}], {}, {}, True) for rate in (1.0, 0.5))
CRASHES = sorted(name for name in POINTS if name.startswith("server."))
OFTEN = [name for name in CRASHES if name.startswith(("server.update", "server.journal", "server.commit"))]
"""Points to which a server gets in every round."""
Place = tuple[int, int]
"""A server, and a slot there."""


class Case(NamedTuple):
    """What the workers train."""

    optimizer: str
    hold: float = 0.0
    """The type of norm after which the sum is scaled; 0: it is not measured."""
    by_rows: bool = False
    """Gradients of the first key have some of its rows, sometimes none."""


CASES = (
    Case(Remembering.name),
    Case(Lazy.name, by_rows=True),
    Case(Cautious.name),
    Case(Remembering.name, hold=2.0),
)


Result = list[tuple[Any, ...]]
"""Of each server: its weights, the optimizer's state, the counts of updates and rounds, and of barriers."""


class Event(NamedTuple):
    """Something that happens: what, and two numbers that choose to whom and how."""

    what: str
    which: int
    how: int


WEIGHTS = {
    "turn": 40, "act": 8, "deliver": 10, "answer": 8, "lose": 4, "repeat": 4, "overtake": 4, "kill server": 3,
    "crash server": 8, "kill worker": 4, "replace worker": 2,
}  # fmt: skip
"""How often each kind of event is drawn."""


def schedule(seed: int) -> list[Event]:
    draw = random.Random(seed)
    kinds = draw.choices([*WEIGHTS], [*WEIGHTS.values()], k=EVENTS)
    return [Event(kind, draw.randrange(1 << 16), draw.randrange(1 << 16)) for kind in kinds]


@cache
def plan() -> Plan:
    """The layout of the table; to be asked for while slices are tiny."""
    return make_plan(SPECS, SERVERS)


@cache
def slots() -> tuple[int, ...]:
    return tuple(len(plan().slices_of(server)) for server in range(SERVERS))


def every_place() -> list[Place]:
    return [(server, slot) for server in range(SERVERS) for slot in range(slots()[server])]


def gradient(rank: int, round_: int, place: Place, weights: Mapping[Place, bytes]) -> Array:
    """What a rank gives to a slice in a round, with padding; in round 0, the first values."""
    piece = plan().slices_of(place[0])[place[1]]
    seen = b"".join(weights[one] for one in sorted(weights))
    seed = zlib.crc32(seen + b"%d %d %d %d" % (round_, rank, *place))
    values = np.zeros(piece.length, np.float32)
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(-64, 65, piece.used)
    values[: piece.used] = drawn / np.float32(64)
    return values


# ---------------------------------------------------------------- a process


@dataclass
class Call:
    """What a process has sent to a server and gets an answer to."""

    number: int
    bodies: list[m.RequestBody]


class Process:
    """One process of a rank. `act` sends again what was not answered, to one server after the other."""

    def __init__(self, rank: int, number: int, restarts: int, case: Case, job: Job) -> None:
        self.rank, self.number, self.restarts = rank, number, restarts
        self.peer = b"%d" % number
        self.case, self.job = case, job
        self.is_fenced = self.is_done = self.is_replaced = False
        self.round = self.num_barriers = 0
        self.weights: dict[Place, bytes] = {}
        self.tokens: dict[int, tuple[int, int]] = {}
        self.calls: dict[int, Call] = {}
        self._next: Callable[[], None] = self._name_optimizer
        """What follows once all calls are answered."""
        self._found: dict[int, m.Registered] = {}
        self._came: dict[Place, bytes] = {}
        self._held: dict[int, m.Held] = {}
        self._is_lost = self._has_sent_hyper = False
        self._last_number = 0
        self._turn = 0
        for server in range(SERVERS):
            hello = m.Hello(
                "sim", rank, RANKS, server, SERVERS, "", f"p{number}", self.peer, (self.peer,),
                resumes=True, restarts=restarts,
            )  # fmt: skip
            self._call(server, hello)

    @property
    def is_over(self) -> bool:
        return self.is_fenced or self.is_done

    def act(self) -> None:
        if self.is_over or not self.calls:
            return
        self._turn += 1
        server = sorted(self.calls)[self._turn % len(self.calls)]
        call = self.calls[server]
        for body in call.bodies:
            request = m.Request(*self.tokens.get(server, (0, 0)), call.number, body)
            self.job.to_server[self.number, server].append(request)

    def _call(self, server: int, *bodies: m.RequestBody) -> None:
        self._last_number += 1
        self.calls[server] = Call(self._last_number, list(bodies))

    # ---------------------------------------------------------------- what it hears

    def take(self, server: int, reply: m.Reply) -> None:
        call, body = self.calls.get(server), reply.body
        if self.is_over or call is None or call.number != reply.number or isinstance(body, m.Pending):
            return
        if isinstance(body, m.Failed):
            if body.code != "FencedError" or not self.is_replaced:
                raise Violation(f"rank {self.rank}, process {self.number} was told {body}")
            self.is_fenced = True
            return
        if isinstance(body, m.Missing):
            # A decision may follow the commit, if a sum was held that a killed server has lost since.
            commit = [one for one in call.bodies if isinstance(one, m.Contribute)][-1]
            if not commit.commits[0, 5] & m.REPEATS:
                return  # everything is sent again anyway
            # What the others answer does not matter any more. One may hold a sum until this rank commits elsewhere.
            self._is_lost = True
            self.calls = {server: call}
        elif isinstance(body, m.Held):
            self._take_held(server, body)
            return
        elif isinstance(body, m.Weights):
            told = zip(body.parts.tolist(), body.payloads, strict=True)
            self._came |= {(server, slot): payload.numpy().tobytes() for (slot, *_), payload in told}
        elif isinstance(body, m.Welcome):
            self.tokens[server] = (body.run_id, body.session)
        elif isinstance(body, m.Registered):
            self._found[server] = body
        elif isinstance(body, m.Gathered):
            self._check(list(body.parts) == [b"0", b"1"], f"a barrier gave {body.parts}")
            self.num_barriers += 1
        del self.calls[server]
        if not self.calls:
            self._next()

    def _take_held(self, server: int, held: m.Held) -> None:
        self._held[server] = held
        if len(self._held) == SERVERS:
            norm = combine(
                (value for _, value in sorted(p for h in self._held.values() for p in h.partials)), 2.0
            )
            decision = Decision(1.0 / (1.0 + norm), norm / 16)
            for call in self.calls.values():
                if not isinstance(call.bodies[-1], m.Resolve):
                    call.bodies.append(m.Resolve(0, self.round, *decision))

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(f"rank {self.rank}, process {self.number}: {what}")

    # ---------------------------------------------------------------- what it does next

    def _name_optimizer(self) -> None:
        self._next = self._register
        for server in range(SERVERS):
            self._call(server, m.SetOptimizer(packed(self.case.optimizer)))

    def _register(self) -> None:
        specs = tuple((s.key, s.shape, s.dtype, s.group, s.row_sparse) for s in SPECS)
        self._next = self._take_over
        for server in range(SERVERS):
            self._call(server, m.Register("t", specs, False, digest=plan().digest))

    def _take_over(self) -> None:
        """Go on where the earlier process of the rank has ended, according to what all servers say."""
        committed = [one.next_round - (not one.has_committed) for one in self._found.values()]
        first = min(committed)
        if max(committed) < 0:
            self._begin_round()
        elif max(committed) == first:
            self._ask_again(first)
        else:
            self._repeat(first + 1)

    def _ask_again(self, round_: int) -> None:
        self.round, self._came, self._held = round_, {}, {}
        self._next = partial(self._end_round, is_asked=True)
        for server in range(SERVERS):
            self._call(server, self._commit(round_, 0, m.REPEATS))

    def _repeat(self, round_: int) -> None:
        """Take the weights with which a round began that some servers have; all of them, if a server lost it."""
        self.round, self._came = round_, {}
        if round_ == 0:
            self._begin_round()
            return
        self._adopt(round_ - 1)
        self._next = self._begin_with_former
        for server in range(SERVERS):
            self._call(server, m.Pull((0,), 60.0, round_))

    def _begin_with_former(self) -> None:
        self.weights = dict(self._came)
        self._begin_round()

    def _adopt(self, round_: int) -> None:
        """Continue from what the commit of a round said."""
        states = [unpack_control(state) for one in self._found.values() for state in one.client_states]
        found = [state for state in states if state[0] == round_]
        self._check(bool(found), f"no server has the state of round {round_}, only {states}")
        self.num_barriers = found[0][1]

    def _begin_round(self) -> None:
        if self.round > ROUNDS:
            self.is_done = True
            return
        if self.round % 2 and self.num_barriers <= self.round // 2:
            self._next = self._give
            self._call(0, m.Gather(self.num_barriers, 60.0, b"%d" % self.rank))
        else:
            self._give()

    def _give(self) -> None:
        """Compute a gradient with all weights, and give it to all servers."""
        round_ = self.round
        if not self.is_replaced:
            self.job.note_computed(self.rank, round_)
        self._came, self._held = {}, {}
        self._next = self._end_round
        for server in range(SERVERS):
            given = [(server, slot) for slot in range(slots()[server])] if round_ or not self.rank else []
            self._call(server, *[self._slice(place) for place in given], self._commit(round_, len(given)))

    def _end_round(self, is_asked: bool = False) -> None:
        if self._is_lost and is_asked:
            self._is_lost = False
            self._repeat(self.round)
            return
        self._check(len(self._came) == sum(slots()), f"{len(self._came)} slices of round {self.round} came")
        if is_asked:
            self._adopt(self.round)
        self.weights, self.round = dict(self._came), self.round + 1
        self._begin_round()

    # ---------------------------------------------------------------- what it sends

    def _commit(self, round_: int, given: int, flags: int = 0) -> m.Contribute:
        row = (0, round_, given, 0, -1, m.WANTS_WEIGHTS | flags)
        hyper = b""
        if round_ and not flags and (not self._has_sent_hyper or round_ == 2):
            # Sent when it changes, and by a new process.
            self._has_sent_hyper, hyper = True, RATES[round_ >= 2]
        state = b"" if flags else pack_control([round_, self.num_barriers])
        return m.Contribute(
            m.matrix((), m.PUSH_WORDS), (), m.matrix([row], m.COMMIT_WORDS), hyper=hyper, timeout=1e6,
            hold=self.case.hold if round_ else 0.0, client_state=state,
        )  # fmt: skip

    def _slice(self, place: Place) -> m.Contribute:
        server, slot = place
        piece, encoding = plan().slices_of(server)[slot], b""
        payload = torch.from_numpy(gradient(self.rank, self.round, place, self.weights))
        if self.round and self.case.by_rows and [one.key for one in piece.segments] == [0]:
            chosen = zlib.crc32(b"%d %d %d" % (self.round, self.rank, slot)) % (1 << ROWS)
            chosen = 0 if self.round == 3 or (self.round + self.rank) % 3 == 0 else chosen
            ids = torch.tensor([row for row in range(ROWS) if chosen & 1 << row], dtype=torch.int64)
            rows = RowSet(ids, payload[: piece.used].view(ROWS, -1)[ids])
            payload, encoding = encode_rows(plan(), piece, {0: rows}), PACKED_ROWS
        pushes = m.matrix([(slot, self.round, 0, payload.nbytes)], m.PUSH_WORDS)
        return m.Contribute(pushes, (payload,), m.matrix((), m.COMMIT_WORDS), encoding)


# ---------------------------------------------------------------- a job


@dataclass
class Job:
    """All processes, the servers, and what is on its way."""

    case: Case
    events: Sequence[Event] = ()
    seen: Counter[Hashable] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.stores = [HeldDescriptors() for _ in range(SERVERS)]
        self._tokens = random.Random(7).getrandbits
        self.engines = [self._engine(server) for server in range(SERVERS)]
        self.to_server: dict[tuple[int, int], deque[m.Request]] = {}
        self.to_process: dict[tuple[int, int], deque[m.Reply]] = {}
        self.processes: list[Process] = []
        for rank in range(RANKS):
            self._start(rank)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self.stores:
            store.close()

    def run(self) -> Result:
        """Do all events, and come to the end; the weights and the state of the optimizer. Raises Violation."""
        for event in self.events:
            self._happen(event)
        for _ in range(TURNS):
            for process in self.processes:
                process.act()
            for link in list(self.to_server):
                while self.to_server[link]:
                    self._deliver(link, self.to_server[link].popleft())
            for server, number in list(self.to_process):
                while self.to_process[server, number]:
                    self.processes[number].take(server, self.to_process[server, number].popleft())
            if all(process.is_done for process in self._current()):
                return self._result()
        where = [(p.rank, p.number, p.round, sorted(p.calls)) for p in self._current()]
        raise Violation(f"the job does not come to its end: {where}")

    def note_computed(self, rank: int, round_: int) -> None:
        """Raises Violation if all servers have a rank's commit of a round that it computes again."""
        spaces = [engine.namespaces["sim"] for engine in self.engines]
        trackers = [space.rounds.shared for space in spaces if space.tables]
        if len(trackers) == SERVERS and all(
            one.number(0) > round_ or (one.number(0) == round_ and one.has_committed(rank, 0))
            for one in trackers
        ):
            raise Violation(f"rank {rank} computes round {round_} again, which all servers have")
        self.seen["computed"] += 1

    def _current(self) -> list[Process]:
        return [process for process in self.processes if not process.is_replaced]

    def _result(self) -> Result:
        self._check_fences()
        found: Result = []
        for server, engine in enumerate(self.engines):
            state = state_of(engine, "sim")
            applied, barriers = state["t", "applied"][:2], state["barrier"][0]
            found.append(
                (state["t", "weights"], state["t", "state"], state["t", "counts"], applied, barriers)
            )
            for process in self._current():
                own = [process.weights[place] for place in every_place() if place[0] == server]
                if own != state["t", "weights"]:
                    raise Violation(f"rank {process.rank} has other weights than server {server}")
        return found

    def _check_fences(self) -> None:
        """No process that was replaced may speak in a session that it had."""
        for process in self.processes:
            for server, place in process.tokens.items() if process.is_replaced else ():
                request = m.Request(*place, 1 << 40, m.Heartbeat())
                [out] = self.engines[server].handle(process.peer, request, 0.0)
                if not isinstance(out.reply.body, m.Failed):
                    raise Violation(
                        f"server {server} listens to process {process.number}, which was replaced"
                    )

    # ---------------------------------------------------------------- what happens

    def _happen(self, event: Event) -> None:
        what, which, how = event
        if what in ("act", "turn"):
            alive = [process for process in self.processes if not process.is_over]
            if alive and what == "act":
                alive[which % len(alive)].act()
            elif alive:
                self._turn(alive[which % len(alive)])
        elif what in ("deliver", "lose", "repeat", "overtake"):
            self._send_on(what, which)
        elif what == "answer":
            full = sorted(link for link, queue in self.to_process.items() if queue)
            if full:
                server, number = full[which % len(full)]
                reply = self.to_process[server, number].popleft()
                if how % 16:  # the others are lost
                    self.processes[number].take(server, reply)
        elif what == "kill server":
            self._restart(which % SERVERS)
        elif what == "crash server":
            self._crash(which, how)
        else:
            self._replace(which % RANKS, is_killed=what == "kill worker")

    def _turn(self, process: Process) -> None:
        """Let a process talk to all servers, and hear what they say."""
        for server in range(SERVERS):
            process.act()
            queue = self.to_server[process.number, server]
            while queue:
                self._deliver((process.number, server), queue.popleft())
        for server in range(SERVERS):
            replies = self.to_process.get((server, process.number), deque())
            while replies:
                process.take(server, replies.popleft())

    def _send_on(self, what: str, which: int) -> None:
        full = sorted(link for link, queue in self.to_server.items() if queue)
        if not full:
            return
        link = full[which % len(full)]
        queue = self.to_server[link]
        if what == "overtake":
            queue.rotate(-1)
        request = queue.popleft()
        self.seen[what] += 1
        if what != "lose":
            self._deliver(link, request)
        if what == "repeat":
            queue.append(request)

    def _deliver(self, link: tuple[int, int], request: m.Request) -> None:
        number, server = link
        out = self.engines[server].handle(self.processes[number].peer, request, 0.0)
        for one in out:
            self.to_process.setdefault((server, int(one.peer)), deque()).append(_copied(one.reply))

    def _crash(self, which: int, how: int) -> None:
        """Let a process talk to a server, which is killed at a failpoint if it gets there."""
        alive = [process for process in self.processes if not process.is_over]
        if not alive:
            return
        process, server = alive[which % len(alive)], which // len(alive) % SERVERS
        points = CRASHES if how % 4 == 0 else OFTEN
        process.act()
        queue = self.to_server[process.number, server]
        try:
            with crash_at((points[how // 4 % len(points)], 1 + how // 256 % 2)):
                while queue:
                    self._deliver((process.number, server), queue.popleft())
        except Crash as crash:
            self.seen["crashed", str(crash)] += 1
            self._restart(server)

    def _restart(self, server: int) -> None:
        self.seen["restarted"] += 1
        self.engines[server] = self._engine(server)
        for link, queue in self.to_server.items():
            if link[1] == server:
                queue.clear()
        for (sender, _), replies in self.to_process.items():
            if sender == server:
                replies.clear()

    def _engine(self, server: int) -> Engine:
        config = EngineConfig(server, SERVERS, run_id=server + 1)
        return durable_engine(self.stores[server], config, tokens=partial(self._tokens, 64))

    def _replace(self, rank: int, is_killed: bool) -> None:
        [former] = [process for process in self._current() if process.rank == rank]
        if former.is_over:
            return  # its place is free; nobody starts it again
        former.is_replaced = True
        former.is_fenced = is_killed
        self.seen["killed" if is_killed else "replaced"] += 1
        self._start(rank, former.restarts + 1)

    def _start(self, rank: int, restarts: int = 0) -> None:
        number = len(self.processes)
        for server in range(SERVERS):
            self.to_server[number, server] = deque()
        self.processes.append(Process(rank, number, restarts, self.case, self))


def _copied(reply: m.Reply) -> m.Reply:
    """A reply as it leaves the server: its weights change afterwards."""
    if not isinstance(reply.body, m.Weights):
        return reply
    payloads = tuple([payload.clone() for payload in reply.body.payloads])
    return reply._replace(body=m.Weights(reply.body.parts, payloads, locations=reply.body.locations))


# ---------------------------------------------------------------- schedules


@cache
def undisturbed(case: Case) -> Result:
    with Job(case) as job:
        return job.run()


def play(seed: int, events: Sequence[Event] | None = None) -> Counter[Hashable]:
    """Play a schedule, or some of its events; how often what happened. Raises Violation."""
    case = CASES[seed % len(CASES)]
    with tiny_slices():
        expected = undisturbed(case)
        with Job(case, schedule(seed) if events is None else events) as job:
            if job.run() != expected:
                raise Violation(f"seed {seed}: the job ended with other weights, state, counts or barriers")
            return job.seen


def fails(seed: int, events: Sequence[Event]) -> bool:
    try:
        play(seed, events)
    except Exception:
        return True
    return False


def shortest(seed: int) -> list[Event]:
    """The shortest part of a failing schedule that fails, found by leaving out longer and then shorter parts."""
    events, size = schedule(seed), EVENTS // 2
    while size:
        at = 0
        while at < len(events):
            less = events[:at] + events[at + size :]
            if fails(seed, less):
                events = less
            else:
                at += size
        size //= 2
    return events
