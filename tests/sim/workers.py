"""Workers of the simulation: what a real worker process does, one small step at a time, and what it contributes.

A process has one lane for each table. A lane gives slices in any order and any number of generations, commits, waits
for every server, and gives a round up everywhere when one server reports its failure or when its own code raises.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from kvstore_server import plan as plan_module
from kvstore_server.codec import make_codec
from kvstore_server.engine import pipelined
from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.plan import Plan, Slice, TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control, unpack_control
from kvstore_server.protocol.rows import PACKED_ROWS, RowSet, encode_rows
from kvstore_server.shard.norms import Decision, combine
from kvtrainer.client.tables import Compressor

Array = npt.NDArray[np.float32]
Place = tuple[int, int]
"""A server, and a slot there."""

NUM_WORKERS, NUM_SERVERS = 3, 2
NAMESPACE = "sim"
TIMEOUT = 30.0
REPEAT = 0.3
"""How often a lane that waits asks again when it is its turn."""
RAISES = 0.08
"""How often a process gives up a round rather than to tell a server what it makes of its norm, or to commit what it has
announced."""
CONFIRMS, EDITS = 0.3, 0.4
"""How often a process that has said what is to be expected says what it will commit before it does anything else; and
how often a slice is replaced just before that."""
TOGETHER = 0.3
"""How often a commit travels with the last slices."""
NORM_TYPES = (2.0, 1.0, 3.0, float("inf"))
NEVER = 1 << 30
SPECS = (
    (TensorSpec("w", (8, 4), "float32"), TensorSpec("b", (3,), "float32"), TensorSpec("c", (16,), "float32")),
    (TensorSpec("x", (16,), "float32"), TensorSpec("y", (7,), "float32")),
)
BY_ROWS, COMPRESSED = 0, 1
"""The table of which some gradients are row-sparse, and that whose gradients are compressed, where any are."""
ROWS = 4
"""Rows of a slice that takes rows, each of as many elements."""
TWO_BIT = pack_control({"type": "2bit", "threshold": 0.5})
HALF = pack_control({"type": "fp16"})


@contextmanager
def tiny_slices() -> Iterator[None]:
    """Cut tables into slices of 64 bytes, to be applied one by one, while this lasts: tiny keys lie on both servers."""
    with mock.patch.object(plan_module, "MIN_SLICE", 64), mock.patch.object(pipelined, "MIN_PIPELINED", 64):
        yield


class Layout:
    """The plan of every table, and the slots of every server."""

    def __init__(self) -> None:
        self.plans: list[Plan] = [make_plan(specs, NUM_SERVERS) for specs in SPECS]
        self.digests = [plan.digest for plan in self.plans]
        self.slices: dict[Place, Slice] = {}
        self.slots: dict[Place, list[int]] = {}
        """(table, server) → its slots there."""
        for server in range(NUM_SERVERS):
            end = 0
            for table, plan in enumerate(self.plans):
                slices = plan.slices_of(server)
                self.slots[table, server] = list(range(end, end + len(slices)))
                self.slices |= {(server, slot): slice_ for slot, slice_ in enumerate(slices, end)}
                end += len(slices)
        self.takes_rows = {
            (server, slot)
            for server in range(NUM_SERVERS)
            for slot in self.slots[BY_ROWS, server]
            if [s.key for s in self.slices[server, slot].segments] == [0]
        }

    def places(self, table: int) -> list[Place]:
        return [(server, slot) for server in range(NUM_SERVERS) for slot in self.slots[table, server]]


@cache
def layout() -> Layout:
    """The only one; to be asked for while slices are tiny."""
    return Layout()


# ---------------------------------------------------------------- values, known by who gives them and when

_POOL_SIZE = 1 << 14


def _make_pools() -> tuple[Array, Array]:
    rng = np.random.default_rng(20240)
    magnitude = np.exp2(rng.integers(-12, 13, _POOL_SIZE)).astype(np.float32)
    pool: Array = rng.standard_normal(_POOL_SIZE).astype(np.float32) * magnitude
    return pool, rng.integers(-8, 9, _POOL_SIZE).astype(np.float32)


_POOL, _INTEGERS = _make_pools()
"""Values of very different magnitude: their sum in another order has other bits. And some whose sums are exact."""


@dataclass(frozen=True)
class SimOptions:
    """What all processes of one schedule have in common."""

    seed: int
    optimizer: bytes
    codec: bytes = b""
    """How gradients of one table are compressed; empty where they are not."""
    assigns: int = 0
    """The round in which rank 0's values replace the weights; 0: in none."""
    mode: Mode = SYNCHRONOUS
    hypers: tuple[bytes, ...] = ()
    """The hyper-parameters before and from `hyper_changes` on; none are sent where there are none."""
    hyper_changes: int = NEVER
    joins: tuple[int, ...] = ()
    """How many rounds each rank has data for, between the rounds in which all have joined; empty: for any number."""
    by_rows: bool = False
    """Whether gradients of one table are row-sparse now and then."""
    hold: float = 0.0
    """The type of norm that is wanted of every gradient; 0 for none."""
    differs: float = 0.0
    """How often a process wants another one."""
    announces: float = 0.0
    """How often a process announces to a server what it will commit."""
    expects: float = 0.0
    """How often it does so while it may still change its mind."""
    expects_wrongly: bool = False
    """Whether it then has former numbers in mind, or another factor."""

    def hyper(self, round_: int) -> bytes:
        """The hyper-parameters that everybody who has data believes in."""
        return self.hypers[round_ >= self.hyper_changes] if self.hypers else b""

    def values(self, process: int, place: Place, round_: int, generation: int) -> Array:
        """A slice with its padding; different identities give different values."""
        slice_ = layout().slices[place]
        pool = _POOL if self.mode.is_sync else _INTEGERS
        start = self._mixed(process, place, round_, generation) % (_POOL_SIZE - slice_.used)
        values = np.zeros(slice_.length, np.float32)
        values[: slice_.used] = pool[start : start + slice_.used]
        return values

    def rows(self, process: int, place: Place, round_: int, generation: int) -> tuple[int, ...] | None:
        """The rows that a gradient has, often none; None: it is given whole."""
        if not self.by_rows or not round_ or place not in layout().takes_rows:
            return None
        mixed = (self._mixed(process, place, round_, generation) * 2654435761 % (1 << 32)) >> 8
        if not mixed % 16:
            return None
        if self._mixed(process, (0, 0), round_, 0) % 3 == 0:
            return ()  # the whole key has none, on any server
        return tuple(row for row in range(ROWS) if mixed // 16 & (1 << row))

    def _mixed(self, process: int, place: Place, round_: int, generation: int) -> int:
        server, slot = place
        within = process * 7919 + server * 104729 + round_ * 611953 + slot * 15485863 + generation * 32452843
        return within + self.seed * 86028121


def packed(optimizer: str) -> bytes:
    """An optimizer as it is named on the wire."""
    return pack_control({"name": optimizer, "hyper": {"lr": 1.0}, "rescale_grad": 1.0})


# ---------------------------------------------------------------- one table as a process drives it


@dataclass
class Lane:
    """Where a process stands with one table."""

    table: int
    next_rounds: dict[int, int] = field(default_factory=dict)
    """Server → the round with which it says to begin."""
    round: int = 0
    is_open: bool = False
    generations: dict[Place, int] = field(default_factory=dict)
    """Of the slices that are given to the open round."""
    to_push: list[Place] = field(default_factory=list)
    to_commit: list[int] = field(default_factory=list)
    to_announce: list[int] = field(default_factory=list)
    """Servers that are to be told what will be committed before they get slices."""
    to_confirm: list[int] = field(default_factory=list)
    """Servers that were told what is to be expected, and are to be told what is so."""
    was_announced: bool = False
    """Some server was told."""
    fixed: set[int] = field(default_factory=set)
    """Servers to which what was given will not be replaced."""
    came: dict[int, tuple[int, dict[int, bytes]]] = field(default_factory=dict)
    """Server → version and slots of the new weights that have come."""
    requests: dict[int, int] = field(default_factory=dict)
    """Server → the number of the commit, or announcement, sent there."""
    accepted: set[int] = field(default_factory=set)
    """Servers that said that the commit counts."""
    done: set[int] = field(default_factory=set)
    given_up: bool = False
    is_undoing: bool = False
    """Whether the aborts ask for the round to be taken back, because a server has failed it."""
    aborts: dict[int, int] = field(default_factory=dict)
    """Server → the number of the abort that it has not acknowledged."""
    kept: set[int] = field(default_factory=set)
    """Servers that keep the round as applied although this process gave it up."""
    log: dict[int, str] = field(default_factory=dict)
    """Round → 'done', 'failed', 'kept' (given up, but it stands) or 'apart', as this process saw it."""
    compressor: Compressor | None = None
    """The real one; None where this process sends its gradients as they are."""
    encoded: dict[Place, torch.Tensor] = field(default_factory=dict)
    """The slices of the open round as they are sent, where they are compressed."""
    flags: int = 0
    """What the commits of the open round say."""
    vetoed: set[int] = field(default_factory=set)
    """Servers that said that the round was vetoed."""
    joins_at: int = NEVER
    """The round from which on this process has no more data."""
    overs: set[int] = field(default_factory=set)
    """Servers that said that all ranks have joined."""
    empty: set[int] = field(default_factory=set)
    """The rounds that this process vetoed, or in which it had no more data."""
    hold: float = 0.0
    """The type of norm that this process wants of the open round; 0 for none."""
    held: dict[int, m.Held] = field(default_factory=dict)
    """Server → what it said about a sum that it holds."""
    decision: Decision | None = None
    to_resolve: list[int] = field(default_factory=list)
    """Servers that are yet to be told the decision, the next one last."""
    was_vetoed: bool = False
    """Whether a rank has vetoed the open round, so that nothing was held."""

    def note_held(self, server: int, held: m.Held) -> None:
        """A server says what it holds; once both have, it is clear what this process makes of it."""
        self.held[server] = held
        if self.decision is not None:
            self.to_resolve.append(server)  # it has not heard it yet
        elif self.was_vetoed:
            self.note_veto()
        elif len(self.held) == NUM_SERVERS:
            self.decision = decided(self.held.values(), self.hold)
            self.to_resolve = list(range(NUM_SERVERS))

    def note_veto(self) -> None:
        """A rank has vetoed on one server, and its successor has not on the other: both are to end alike."""
        self.was_vetoed = True
        if self.held and self.decision is None:
            self.decision = Decision(skip=True)
            self.to_resolve = list(self.held)

    @property
    def is_known(self) -> bool:
        """Whether this process knows all of a round of which both servers have told it the end."""
        return not self.hold or len(self.held) == NUM_SERVERS or self.was_vetoed


def decided(held: Iterable[m.Held], norm_type: float) -> Decision:
    """What every process makes of the partial norms of all servers: something that no other norm gives."""
    norm = combine((value for _, value in sorted(part for one in held for part in one.partials)), norm_type)
    choice = (int(np.float64(norm).view(np.int64)) >> 7) % 6
    if choice < 2:
        return Decision(skip=not choice)
    return Decision(1.0 / (1.0 + norm), norm / 16 if choice == 2 else None)


class Worker:
    """One process; `say_hello` opens its sessions, `act` takes a step, `take` handles a reply."""

    def __init__(
        self,
        process: int,
        rank: int,
        options: SimOptions,
        scale: float | None,
        send: Callable[[int, m.Request], None],
    ) -> None:
        self.process = process
        self.rank = rank
        self.options = options
        self.is_alive = True
        self.sessions: dict[int, tuple[int, int]] = {}
        self.about: dict[int, tuple[int, int]] = {}
        """Request number → (table, round)."""
        self.lanes = [Lane(table) for table in range(len(SPECS))]
        if options.codec and process < NUM_WORKERS:
            # A successor may be told of a round to which its predecessor gave: it does not know what was said.
            codec = make_codec(unpack_control(options.codec))
            self.lanes[COMPRESSED].compressor = Compressor(codec, layout().plans[COMPRESSED])
        self._scale = scale
        self._send_request = send
        self._last_number = 0
        self._pulls: set[int] = set()
        self.read: list[tuple[int, int, int, dict[int, bytes]]] = []
        """(server, table, round, weights by slot) of new weights that came whole."""

    @property
    def is_ready(self) -> bool:
        return all(len(lane.next_rounds) == NUM_SERVERS for lane in self.lanes)

    @property
    def wants_weights(self) -> bool:
        return self.rank != 1

    def awaits(self, number: int) -> bool:
        """Whether it does anything about a reply to that request."""
        return number not in self._pulls

    # ---------------------------------------------------------------- what it does when it is its turn

    def say_hello(self) -> None:
        """Ask the servers that have not answered yet for a session."""
        name, mode = f"p{self.process}", self.options.mode
        for server in set(range(NUM_SERVERS)) - self.sessions.keys():
            hello = m.Hello(
                NAMESPACE, self.rank, NUM_WORKERS, server, NUM_SERVERS, "", name, name.encode(),
                (b"%d" % self.process,), mode.name, mode.staleness,
            )  # fmt: skip
            self._send_request(server, m.Request(0, 0, self._number(), hello))

    def act(self, lane: Lane, rng: random.Random, goal: int) -> None:
        """Take the lane's next step, if it has one; begin no round from `goal` on."""
        if len(self.sessions) < NUM_SERVERS:
            self.say_hello()
        elif not lane.is_open:
            if lane.round < goal and self.is_ready:
                self._begin(lane, rng)
        elif lane.given_up:
            for server in lane.aborts:
                self._abort(lane, server)
        elif lane.to_announce:
            server = lane.to_announce.pop()
            may_change = rng.random() < self.options.expects
            if may_change and rng.random() < 0.5:
                lane.to_confirm.append(server)
            self._declare_intent(lane, server, rng, may_change)
        elif lane.to_confirm and rng.random() < CONFIRMS:
            if rng.random() < EDITS:
                self.push_again(lane, rng)
            self._declare_intent(lane, lane.to_confirm.pop(), rng, may_change=False)
        elif lane.to_push:
            self._push_some(lane, rng)
        elif lane.to_commit and lane.was_announced and rng.random() < RAISES:
            self.give_up(lane)
        elif lane.to_commit:
            self._give(lane, lane.to_commit.pop(), [], is_last=True)
        elif lane.to_resolve and rng.random() < RAISES:
            self.give_up(lane)
        elif lane.to_resolve:
            server = lane.to_resolve.pop()
            assert lane.decision is not None
            self._send(server, lane.requests[server], m.Resolve(lane.table, lane.round, *lane.decision))
        elif rng.random() < REPEAT:
            for server in range(NUM_SERVERS):
                if server not in lane.done or not lane.is_known:
                    self._give(lane, server, [], is_last=True)

    def push_again(self, lane: Lane, rng: random.Random) -> None:
        """Replace a slice by a higher generation: before the commit it counts, afterwards it must not."""
        pushed = [place for place in lane.generations if place not in lane.to_push]
        if not lane.is_open or lane.given_up or not pushed:
            return
        place = rng.choice(pushed)
        if place[0] in lane.accepted:
            later = self.options.values(self.process, place, lane.round, lane.generations[place] + 1)
            row = (place[1], lane.round, lane.generations[place] + 1, later.nbytes)
            body = m.Contribute(m.matrix([row], 4), (torch.from_numpy(later),), m.matrix((), 6))
            self._send(place[0], self._number(), body)
        elif place[0] not in lane.fixed:
            lane.generations[place] += 1
            self._encode(lane)
            lane.to_push.append(place)

    def discard_eager(self, lane: Lane, rng: random.Random) -> None:
        """Leave out some slices that may have been pushed: the others count in a higher generation alone."""
        if not lane.is_open or lane.given_up or lane.fixed or not lane.round:
            return
        is_needed = bool(lane.flags & m.ASSIGNS) and not self.rank
        lane.flags |= m.DISCARD_EAGER
        if (
            rng.random() < 0.2
            and not lane.flags & (m.ASSIGNS | m.HAS_JOINED)
            and not any(lane.generations.values())
        ):
            lane.flags |= m.VETOES
            lane.generations.clear()
        for place, generation in [*lane.generations.items()]:
            if not generation and not is_needed and rng.random() < 0.3:
                del lane.generations[place]
        lane.to_push = [place for place in lane.to_push if place in lane.generations]
        for place, generation in lane.generations.items():
            if not generation:
                lane.generations[place] = 1
                lane.to_push += [place] if place not in lane.to_push else []
        self._encode(lane)

    def give_up(self, lane: Lane) -> None:
        """Fail the round everywhere, as a worker does whose own code raised."""
        if lane.is_open and not lane.given_up:
            lane.given_up = True
            self._abort_all(lane, range(NUM_SERVERS))

    def leave(self, is_clean: bool = False) -> None:
        """Say goodbye in the middle of everything, as a worker does whose program raised, or is done."""
        for server in self.sessions:
            self._send(server, self._number(), m.Leave("an exception", is_clean))

    def pull(self, lane: Lane, server: int) -> None:
        """Ask for the present weights; nothing depends on whether they come."""
        number = self._number()
        self._pulls.add(number)
        self._send(server, number, m.Pull((lane.table,), TIMEOUT))

    def _begin(self, lane: Lane, rng: random.Random) -> None:
        options, places = self.options, layout().places(lane.table)
        joined = lane.round >= lane.joins_at
        assigns = 0 < lane.round == options.assigns and not joined and rng.random() < 0.97
        vetoes = lane.round > 0 and not assigns and not joined and rng.random() < 0.04
        lane.flags = m.WANTS_WEIGHTS * self.wants_weights | m.HAS_JOINED * joined
        lane.flags |= m.ASSIGNS * assigns | m.VETOES * vetoes
        if joined or vetoes or (not lane.round and self.rank):
            places = []
        elif lane.round and not assigns:
            places = [place for place in places if rng.random() < 0.95]
        wanted = NORM_TYPES[0] if rng.random() < options.differs else options.hold
        lane.hold = wanted if lane.round and not assigns and not joined else 0.0
        lane.generations = dict.fromkeys(places, 0)
        rng.shuffle(places)
        lane.to_push, lane.to_commit = places, rng.sample(range(NUM_SERVERS), NUM_SERVERS)
        lane.is_open, lane.given_up, lane.is_undoing, lane.was_vetoed = True, False, False, False
        lane.requests, lane.aborts, lane.held, lane.decision, lane.to_resolve = {}, {}, {}, None, []
        lane.accepted, lane.done, lane.kept, lane.vetoed, lane.overs = set(), set(), set(), set(), set()
        lane.came, lane.to_announce, lane.was_announced = {}, [], False
        lane.to_confirm, lane.fixed = [], set()
        if options.announces and lane.round and not lane.hold and not lane.flags & ~m.WANTS_WEIGHTS:
            lane.to_announce = [s for s in range(NUM_SERVERS) if rng.random() < options.announces]
        self._encode(lane)

    def _push_some(self, lane: Lane, rng: random.Random) -> None:
        server = lane.to_push[-1][0]
        here = [place for place in lane.to_push if place[0] == server]
        chosen = here if rng.random() < 0.6 else here[-1:]
        lane.to_push = [place for place in lane.to_push if place not in chosen]
        is_last = len(chosen) == len(here) and server in lane.to_commit and rng.random() < TOGETHER
        if is_last:
            lane.to_commit.remove(server)
        self._give(lane, server, chosen, is_last)

    # ---------------------------------------------------------------- what it hears

    def take(self, server: int, reply: m.Reply) -> None:
        """Handle a reply, however late it comes."""
        body = reply.body
        if (
            isinstance(body, m.Welcome) and server not in self.sessions
        ):  # else it has said hello more than once
            self.sessions[server] = (body.run_id, body.session)
            self._send(server, self._number(), m.SetOptimizer(self.options.optimizer))
            for name, specs, digest in zip("ab", SPECS, layout().digests, strict=True):
                declared = tuple((s.key, s.shape, s.dtype, s.group, s.row_sparse) for s in specs)
                self._send(server, self._number(), m.Register(name, declared, False, digest=digest))
        elif isinstance(body, m.Registered):
            self._registered(self.lanes[body.table], server, body.next_round)
        elif reply.number in self.about:
            table, round_ = self.about[reply.number]
            lane = self.lanes[table]
            if lane.is_open and lane.round == round_:
                self._take_outcome(lane, server, reply.number, body)

    def _registered(self, lane: Lane, server: int, next_round: int) -> None:
        lane.next_rounds[server] = next_round
        # A round that is open anywhere wants this rank; a rank that contributes by itself begins alike everywhere.
        is_alone = not self.options.mode.is_sync and all(lane.next_rounds.values())
        lane.round = (max if is_alone else min)(lane.next_rounds.values())
        lane.joins_at = max(1, self._next_join(lane))

    def _next_join(self, lane: Lane) -> int:
        return lane.round + self.options.joins[self.rank] if self.options.joins else NEVER

    def _take_outcome(self, lane: Lane, server: int, number: int, body: m.ReplyBody) -> None:
        if lane.given_up:
            if lane.aborts.get(server) == number and isinstance(body, m.Status):
                del lane.aborts[server]
                lane.kept.update({server} if body.values["applied"] else ())
        elif isinstance(body, m.Vetoed):
            lane.vetoed.add(server)
            if body.ranks:
                lane.note_veto()
        elif isinstance(body, m.Held):
            lane.note_held(server, body)
        elif isinstance(body, m.EffectiveOptions):
            lane.overs.update({server} if body.is_over else ())
        elif isinstance(body, m.Weights):
            self._take_weights(lane, server, body)
        elif isinstance(body, m.Done):
            if not self.wants_weights or server in lane.vetoed:  # else weights follow
                lane.done.add(server)
        elif isinstance(body, m.Failed):
            self.give_up(lane)
        elif isinstance(body, m.Pending):
            lane.accepted.add(server)
        elif isinstance(body, m.Missing):
            again = [(server, slot) for slot in body.slots if (server, slot) in lane.generations]
            self._give(lane, server, again, is_last=True)
        if lane.given_up and not lane.aborts:
            self._given_up(lane)
        elif len(lane.done) == NUM_SERVERS and lane.is_known:
            self._end(lane, "done")

    def _take_weights(self, lane: Lane, server: int, weights: m.Weights) -> None:
        """Keep new weights; those of a higher version take the place of all that came before."""
        version, came = lane.came.get(server, (-1, {}))
        for (slot, newer, *_), payload in zip(weights.parts.tolist(), weights.payloads, strict=True):
            if newer > version:
                version, came = newer, {}
            if newer == version:
                came[slot] = payload.numpy().tobytes()
        lane.came[server] = version, came
        if server not in lane.done and len(came) == len(layout().slots[lane.table, server]):
            lane.done.add(server)
            self.read.append((server, lane.table, lane.round, came))

    def _given_up(self, lane: Lane) -> None:
        """Every server has answered: the round is over, or is to be taken back where it was applied."""
        is_apart = 0 < len(lane.kept) < NUM_SERVERS
        if is_apart and not lane.is_undoing:
            lane.is_undoing = True
            kept, lane.kept = sorted(lane.kept), set()
            self._abort_all(lane, kept)
        else:
            self._end(lane, "apart" if is_apart else "kept" if lane.kept else "failed")

    def _end(self, lane: Lane, how: str) -> None:
        if lane.encoded and lane.compressor is not None:
            if lane.kept or 0 < len(lane.vetoed) < NUM_SERVERS:
                lane.compressor = None  # what was said is not known any more
            elif how == "done" and not lane.vetoed:
                lane.compressor.accept()
        lane.log[lane.round] = how
        lane.empty.update({lane.round} if lane.flags & (m.VETOES | m.HAS_JOINED) else ())
        lane.is_open = False
        lane.round += 1
        if len(lane.overs) == NUM_SERVERS and how == "done":
            lane.joins_at = self._next_join(lane)

    # ---------------------------------------------------------------- what it sends

    def _encode(self, lane: Lane) -> None:
        """Compress the gradients of the open round in their present generations; values that replace never are."""
        lane.encoded = {}
        if lane.compressor is None or not lane.round or lane.flags & (m.ASSIGNS | m.VETOES | m.HAS_JOINED):
            return
        plan = layout().plans[lane.table]
        arena = torch.zeros(plan.arena_sizes["float32"])
        slices = {place: layout().slices[place] for place in lane.generations}
        for place, slice_ in slices.items():
            values = self.options.values(self.process, place, lane.round, lane.generations[place])
            arena[slice_.offset : slice_.offset + slice_.length] = torch.from_numpy(values)
        found = lane.compressor.encode({"float32": arena}, [*slices.values()], frozenset())
        lane.encoded = {place: found[slice_.index] for place, slice_ in slices.items()}

    def _payload(self, lane: Lane, place: Place) -> tuple[bytes, torch.Tensor]:
        """How a slice is sent, and what: in the form of a codec, of rows, or as plain numbers."""
        if lane.encoded:
            return self.options.codec, lane.encoded[place]
        identity = (self.process, place, lane.round, lane.generations[place])
        values = torch.from_numpy(self.options.values(*identity))
        rows = None if lane.flags & m.ASSIGNS else self.options.rows(*identity)
        if rows is None:
            return b"", values
        ids = torch.tensor(rows, dtype=torch.int64)
        part = {0: RowSet(ids, values.view(ROWS, -1)[ids])}
        return PACKED_ROWS, encode_rows(layout().plans[lane.table], layout().slices[place], part)

    def _declare_intent(self, lane: Lane, server: int, rng: random.Random, may_change: bool) -> None:
        """Say what will be committed; unless it may change, slices stay as they are from then on."""
        given = {slot: generation for (at, slot), generation in lane.generations.items() if at == server}
        if not given or lane.flags & ~(m.WANTS_WEIGHTS | m.DISCARD_EAGER) or server not in lane.to_commit:
            return
        others = rng.choice(list(given.values()))
        rows = [(slot, lane.round, one, 0) for slot, one in given.items() if one != others]
        flags = lane.flags | m.DECLARES_INTENT | m.TENTATIVE * may_change
        is_wrong = may_change and self.options.expects_wrongly
        body = m.Contribute(
            m.matrix(rows, m.PUSH_WORDS), (),
            m.matrix([(lane.table, lane.round, len(given), sum(given.values()), -1, flags)], m.COMMIT_WORDS),
            hyper=self.options.hyper(lane.round - is_wrong),
            rescale=2.0 if is_wrong and not self.options.hypers else self._scale, timeout=TIMEOUT,
        )  # fmt: skip
        number = lane.requests.setdefault(server, self._number())
        self.about[number] = (lane.table, lane.round)
        self._send(server, number, body)
        lane.was_announced = True
        lane.fixed |= set() if may_change else {server}

    def _give(self, lane: Lane, server: int, places: list[Place], is_last: bool) -> None:
        """Send slices, those of one form in one buffer, and with the last of them the commit if it is time for that."""
        batches: dict[bytes, list[tuple[Place, torch.Tensor]]] = {}
        for place in places:
            form, payload = self._payload(lane, place)
            batches.setdefault(form, []).append((place, payload))
        commits: list[tuple[int, ...]] = []
        for left, (form, batch) in enumerate([*batches.items()] or [(b"", [])], 1 - max(len(batches), 1)):
            rows = [(p[1], lane.round, lane.generations[p], payload.nbytes) for p, payload in batch]
            buffer = (torch.cat([payload for _, payload in batch]),) if batch else ()
            number = self._number()
            hyper = b""
            if is_last and not left:
                number = lane.requests.setdefault(server, number)
                lane.fixed.add(server)
                self.about[number] = (lane.table, lane.round)
                given = [generation for place, generation in lane.generations.items() if place[0] == server]
                commits = [(lane.table, lane.round, len(given), sum(given), -1, lane.flags)]
                hyper = b"" if lane.flags & m.HAS_JOINED else self.options.hyper(lane.round)
            body = m.Contribute(
                m.matrix(rows, m.PUSH_WORDS), buffer, m.matrix(commits, m.COMMIT_WORDS), form, hyper,
                rescale=self._scale, timeout=TIMEOUT, hold=lane.hold,
            )  # fmt: skip
            self._send(server, number, body)

    def _abort_all(self, lane: Lane, servers: Iterable[int]) -> None:
        lane.aborts = {server: self._number() for server in servers}
        for server in lane.aborts:
            self._abort(lane, server)

    def _abort(self, lane: Lane, server: int) -> None:
        self.about[lane.aborts[server]] = (lane.table, lane.round)
        reason = f"p{self.process} raised"
        self._send(server, lane.aborts[server], m.Abort(lane.table, lane.round, reason, lane.is_undoing))

    def _send(self, server: int, number: int, body: m.RequestBody) -> None:
        self._send_request(server, m.Request(*self.sessions[server], number, body))

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number
