"""Synchronous rounds of two ranks on two servers whose processes die, come back, and speak although they were replaced.

Every gradient is a function of all weights that its process has, so a process that continues from a wrong place ends
with other weights. A schedule is a list of `Event`s, each of which can be left out: what it does depends on the state
that it finds. So a schedule that fails can be shortened (`shortest`). After the last event nothing is lost any more,
and the job has to come to its end with the weights and the optimizer's state of one in which nothing happened.

The servers are real engines with durable state; `recovery_process` has the processes.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.failpoints import POINTS, ArmedFailpoint, Failpoints
from kvstore_server.protocol import messages as m
from tests.sim.model import Violation
from tests.sim.recovery_process import RANKS, SERVERS, Case, Process, every_place
from tests.sim.schedule import Cautious, Lazy, Remembering
from tests.sim.workers import tiny_slices
from tests.support.captures import handle_frames
from tests.support.durable import Crash, HeldDescriptors, crashes, durable_engine
from tests.support.restarts import state_of

EVENTS = 66
STEPS = 6
"""How often a process hears from all servers in a turn, at most."""
PATIENCE = 4
"""Turns after which a process sends again what was not answered, although nothing seems to be lost."""
TURNS = 200
"""Turns after which a job in which nothing is lost has come to its end."""
CRASHES = sorted(n for n in POINTS if n.startswith("server.") and not n.startswith("server.snapshot."))
OFTEN = [name for name in CRASHES if name.startswith(("server.update", "server.journal", "server.commit"))]
"""Points to which a server gets in every round."""
NOTHING_ARMED = nullcontext()
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
    "turn": 20, "act": 7, "deliver": 8, "answer": 7, "lose": 4, "repeat": 4, "overtake": 4, "kill server": 2,
    "crash server": 4, "kill worker": 4, "replace worker": 2,
}  # fmt: skip
"""How often each kind of event is drawn."""


def schedule(seed: int) -> list[Event]:
    draw = random.Random(seed)
    kinds = draw.choices([*WEIGHTS], [*WEIGHTS.values()], k=EVENTS)
    return [Event(kind, draw.randrange(1 << 16), draw.randrange(1 << 16)) for kind in kinds]


# ---------------------------------------------------------------- a job


@dataclass
class Job:
    """All processes, the servers, and what is on its way."""

    case: Case
    events: Sequence[Event] = ()
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.stores = [HeldDescriptors() for _ in range(SERVERS)]
        self._tokens = random.Random(7).getrandbits
        self._armed: list[Failpoints | None] = [None] * SERVERS
        """Where each server is killed."""
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
        self._armed = [None] * SERVERS
        for turn in range(TURNS):
            for process in self.processes:
                if turn % PATIENCE:
                    process.send_new()
                else:
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
        alive = [process for process in self.processes if not process.is_over]
        if what == "act" and alive:
            alive[which % len(alive)].act()
        elif what == "turn" and alive:
            self._turn(alive[which % len(alive)], 1 + how % STEPS)
        elif what in ("deliver", "lose", "repeat", "overtake"):
            if alive and not any(self.to_server.values()):
                alive[how % len(alive)].act()
            self._send_on(what, which)
        elif what == "answer":
            full = sorted(link for link, queue in self.to_process.items() if queue)
            if full:
                server, number = full[which % len(full)]
                reply = self.to_process[server, number].popleft()
                if how % 16:
                    self.processes[number].take(server, reply)
                else:
                    self.processes[number].note_lost(server)
        elif what == "kill server":
            self._restart(which % SERVERS)
        elif what == "crash server":
            self._crash(which % SERVERS, how)
        elif what in ("kill worker", "replace worker"):
            self._replace(which % RANKS, is_killed=what == "kill worker")

    def _turn(self, process: Process, steps: int) -> None:
        """Let a process talk to all servers, and hear what they say, some times or until it waits."""
        for _ in range(steps):
            before = process.last_number
            process.send_new()
            for server in range(SERVERS):
                queue = self.to_server[process.number, server]
                while queue:
                    self._deliver((process.number, server), queue.popleft())
            for server in range(SERVERS):
                replies = self.to_process.get((server, process.number), deque())
                while replies:
                    process.take(server, replies.popleft())
            if process.last_number == before:
                return

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
        if what == "lose":
            self.processes[link[0]].note_lost(link[1])
        else:
            self._deliver(link, request)
        if what == "repeat":
            queue.append(request)

    def _deliver(self, link: tuple[int, int], request: m.Request) -> None:
        number, server = link
        peer, armed = self.processes[number].peer, self._armed[server]
        try:
            with crashes(armed) if armed is not None else NOTHING_ARMED:
                out = handle_frames(self.engines[server], peer, request, 0.0, self.seen)
        except Crash as crash:
            self.seen.update(["crashed", f"crashed at {crash}"])
            self._restart(server)
            return
        for one in out:
            self.to_process.setdefault((server, int(one.peer)), deque()).append(_copied(one.reply))

    def _crash(self, server: int, how: int) -> None:
        """Kill a server at a failpoint as soon as it gets there."""
        points = CRASHES if how % 4 == 0 else OFTEN
        self._armed[server] = Failpoints(
            [ArmedFailpoint(points[how // 4 % len(points)], None, 1 + how // 256 % 2)]
        )

    def _restart(self, server: int) -> None:
        for link, queue in self.to_server.items():
            if link[1] == server:
                queue.clear()
        for (sender, _), replies in self.to_process.items():
            if sender == server:
                replies.clear()
        for process in self.processes:
            process.note_lost(server)
        while True:
            self.seen["restarted"] += 1
            try:
                with crashes(self._armed[server] or Failpoints([])):
                    self.engines[server] = self._engine(server)
            except Crash as crash:
                self.seen.update(["crashed", f"crashed at {crash}"])
            else:
                return

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


def play(seed: int, events: Sequence[Event] | None = None) -> Counter[str]:
    """Play a schedule, or some of its events; how often what happened. Raises Violation."""
    case = CASES[seed % len(CASES)]
    with tiny_slices(), torch.no_grad():
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
