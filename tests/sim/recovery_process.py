"""One process of a rank in the simulation of recovery, and what it trains.

It is written down here once more and simply: it sends one request at a time to each server until it is answered, and a
successor does what `StoreExchange.resume` does. Every gradient is a function of all weights that the process has.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control, unpack_control
from kvstore_server.protocol.rows import PACKED_ROWS, RowSet, encode_rows
from kvstore_server.shard.norms import Decision, combine
from tests.sim.model import Violation
from tests.sim.workers import Array, packed

RANKS, SERVERS = 2, 2
ROUNDS = 4
"""Those after the first one, which sets the first values."""
SPECS = (
    TensorSpec("w", (8, 4), "float32"),
    TensorSpec("b", (3,), "float32"),
    TensorSpec("c", (16,), "float32"),
)
ROWS = 4
"""Of a slice of the first key."""
RATES = tuple(pack_hypers([{"lr": rate}], {}, {}, True) for rate in (1.0, 0.5))
Place = tuple[int, int]
"""A server, and a slot there."""


class Case(NamedTuple):
    """What the workers train."""

    optimizer: str
    hold: float = 0.0
    """The type of norm after which the sum is scaled; 0: it is not measured."""
    by_rows: bool = False
    """Gradients of the first key have some of its rows, sometimes none."""


@cache
def plan() -> Plan:
    """The layout of the table; to be asked for while slices are tiny."""
    return make_plan(SPECS, SERVERS)


@cache
def slots() -> tuple[int, ...]:
    return tuple(len(plan().slices_of(server)) for server in range(SERVERS))


def every_place() -> list[Place]:
    return [(server, slot) for server in range(SERVERS) for slot in range(slots()[server])]


_POOL = np.random.default_rng(20240).integers(-64, 65, 1 << 14).astype(np.float32) / np.float32(64)


def digest(weights: Mapping[Place, bytes]) -> int:
    """What tells all weights that a process has from others."""
    return zlib.crc32(b"".join([weights[place] for place in sorted(weights)]))


def gradient(rank: int, round_: int, place: Place, seen: int) -> Array:
    """What a rank gives to a slice in a round, with padding, when it has weights with a digest `seen`."""
    slice_ = plan().slices_of(place[0])[place[1]]
    start = zlib.crc32(b"%d %d %d %d" % (round_, rank, *place), seen) % (len(_POOL) - slice_.used)
    values = np.zeros(slice_.length, np.float32)
    values[: slice_.used] = _POOL[start : start + slice_.used]
    return values


class Network(Protocol):
    """What a process needs of the job."""

    to_server: dict[tuple[int, int], deque[m.Request]]
    """(number of a process, server) → what is on its way."""

    def note_computed(self, rank: int, round_: int) -> None: ...


@dataclass
class Call:
    """What a process sends to a server and gets an answer to."""

    number: int
    bodies: list[m.RequestBody]
    is_sent: bool = False
    """Whether the answer will come, as far as the process knows."""


class Process:
    """One process of a rank. `act` sends again what a server has not answered, to one after the other."""

    def __init__(self, rank: int, number: int, restarts: int, case: Case, job: Network) -> None:
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
        self.last_number = 0
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
        self.send(sorted(self.calls)[self._turn % len(self.calls)])

    def send_new(self) -> None:
        """Send what was not sent yet, or may be lost."""
        for server, call in self.calls.items() if not self.is_over else ():
            if not call.is_sent:
                self.send(server)

    def note_lost(self, server: int) -> None:
        """The connection to a server has broken."""
        if server in self.calls:
            self.calls[server].is_sent = False

    def send(self, server: int) -> None:
        call = self.calls[server]
        self._post(server, call.number, call.bodies)
        call.is_sent = True

    def _post(self, server: int, number: int, bodies: Sequence[m.RequestBody]) -> None:
        run_id, session = self.tokens.get(server, (0, 0))
        self.job.to_server[self.number, server].extend(
            [m.Request(run_id, session, number, body) for body in bodies]
        )

    def _call(self, server: int, *bodies: m.RequestBody) -> None:
        self.last_number += 1
        self.calls[server] = Call(self.last_number, list(bodies))

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
            if not commit.commits[0, m.COMMIT_FLAGS] & m.REPEATS:
                call.is_sent = False
                return  # everything is sent again
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
            for to, call in self.calls.items():
                if not isinstance(call.bodies[-1], m.Resolve):
                    call.bodies.append(m.Resolve(0, self.round, *decision))
                    self._post(to, call.number, call.bodies[-1:])

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
        seen = digest(self.weights)
        for server in range(SERVERS):
            given = [(server, slot) for slot in range(slots()[server])] if round_ or not self.rank else []
            slices = [self._slice(place, seen) for place in given]
            self._call(server, *self._joined(slices, self._commit(round_, len(given))))

    def _joined(self, slices: Sequence[m.Contribute], commit: m.Contribute) -> list[m.Contribute]:
        """The messages of a round: every other process sends the commit with the slices that are not encoded."""
        plain = [one for one in slices if not one.encoding]
        if self.number % 2 or not plain:
            return [*slices, commit]
        pushes = np.concatenate([one.pushes for one in plain])
        payloads = tuple(payload for one in plain for payload in one.payloads)
        encoded = [one for one in slices if one.encoding]
        return [*encoded, replace(commit, pushes=pushes, payloads=payloads)]

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

    def _slice(self, place: Place, seen: int) -> m.Contribute:
        server, slot = place
        slice_, encoding = plan().slices_of(server)[slot], b""
        payload = torch.from_numpy(gradient(self.rank, self.round, place, seen))
        if self.round and self.case.by_rows and [one.key for one in slice_.segments] == [0]:
            chosen = zlib.crc32(b"%d %d %d" % (self.round, self.rank, slot)) % (1 << ROWS)
            chosen = 0 if self.round == 3 or (self.round + self.rank) % 3 == 0 else chosen
            ids = torch.tensor([row for row in range(ROWS) if chosen & 1 << row], dtype=torch.int64)
            rows = RowSet(ids, payload[: slice_.used].view(ROWS, -1)[ids])
            payload, encoding = encode_rows(plan(), slice_, {0: rows}), PACKED_ROWS
        pushes = m.matrix([(slot, self.round, 0, payload.nbytes)], m.PUSH_WORDS)
        return m.Contribute(pushes, (payload,), m.matrix((), m.COMMIT_WORDS), encoding)
