"""Workers of the simulation: what a real worker process does, one small step at a time.

A process has one lane for each table. A lane pushes slices in any order and any number of generations, commits, waits
for every server, and gives a round up everywhere when one server reports its failure or when its own code raises.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from kvstore_server.codec import make_codec
from kvstore_server.plan import Plan
from kvstore_server.protocol.control import unpack_control
from kvtrainer.comm.compressor import Compressor
from tests.support import said as m
from tests.support.sim_contributions import Contributions
from tests.support.sim_held import NORM_TYPES, RAISES, is_known, note_held, note_veto, resolve_of
from tests.support.sim_lane import (
    COMPRESSED,
    NAMESPACE,
    NEVER,
    NUM_SERVERS,
    NUM_WORKERS,
    REPEAT,
    TABLES,
    TIMEOUT,
    Lane,
    SimOptions,
)

Send = Callable[[int, m.Request], None]
"""Puts a request on the link to a server."""


class SimProcess:
    """One worker process; `say_hello` opens its sessions, `act` takes a step, `take` handles a reply."""

    def __init__(
        self, process: int, rank: int, plans: list[Plan], options: SimOptions, scale: float | None, send: Send
    ) -> None:
        self.process = process
        self.rank = rank
        self.is_alive = True
        self.sessions: dict[int, tuple[int, int]] = {}
        self.about: dict[int, tuple[int, int]] = {}
        """Request number → (table, round)."""
        self.lanes = [Lane(table, plan) for table, plan in enumerate(plans)]
        if options.codec and process < NUM_WORKERS:
            # A successor may be told of a round to which its predecessor gave: it does not know what was said.
            codec = make_codec(unpack_control(options.codec))
            self.lanes[COMPRESSED].compressor = Compressor(codec, plans[COMPRESSED])
        self._options = options
        self._contributions = Contributions(process, options)
        self._scale = scale
        self._send_request = send
        self._last_number = 0
        self._pulls: set[int] = set()

    def say_hello(self) -> None:
        """Ask the servers that have not answered yet for a session."""
        name, mode = f"p{self.process}", self._options.mode
        for server in set(range(NUM_SERVERS)) - self.sessions.keys():
            hello = m.Hello(
                NAMESPACE, self.rank, NUM_WORKERS, server, NUM_SERVERS, "", name, name.encode(),
                (b"%d" % self.process,), mode.name, mode.staleness,
            )  # fmt: skip
            self._send_request(server, m.Request(0, 0, self._number(), hello))

    @property
    def is_ready(self) -> bool:
        return all(len(lane.numbers) == NUM_SERVERS for lane in self.lanes)

    def awaits(self, number: int) -> bool:
        """Whether it does anything about a reply to that request."""
        return number not in self._pulls

    @property
    def wants_weights(self) -> bool:
        return self.rank != 1

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
        elif lane.to_push:
            self._push_some(lane, rng)
        elif lane.to_commit:
            self._commit(lane, lane.to_commit.pop())
        elif lane.to_resolve and rng.random() < RAISES:
            self.give_up(lane)
        elif lane.to_resolve:
            server = lane.to_resolve.pop()
            self._send(server, lane.requests[server], resolve_of(lane, server))
        elif rng.random() < REPEAT:
            for server in range(NUM_SERVERS):
                if server not in lane.done or not is_known(lane):
                    self._commit(lane, server)

    def push_again(self, lane: Lane, rng: random.Random) -> None:
        """Replace a slice by a higher generation: before the commit it counts, afterwards it must not."""
        pushed = [s for s in lane.generations if s not in lane.to_push]
        if not lane.is_open or lane.given_up or not pushed:
            return
        slice_ = rng.choice(pushed)
        server = lane.plan.slices[slice_].server
        if server in lane.accepted:
            self._push(lane, server, [(slice_, lane.generations[slice_] + 1)])
        elif server not in lane.requests:
            lane.generations[slice_] += 1
            self._contributions.encode(lane)
            lane.to_push.append(slice_)

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
        self._send(server, number, m.Pull((lane.numbers[server],), TIMEOUT))

    def take(self, server: int, reply: m.Reply) -> None:
        """Handle a reply, however late it comes."""
        body = reply.body
        if isinstance(body, m.Welcome) and server in self.sessions:
            return  # it has said hello more than once
        if isinstance(body, m.Welcome):
            self.sessions[server] = (body.run, body.session)
            self._send(server, self._number(), m.SetOptimizer(self._options.optimizer))
            for name, specs in TABLES:
                declared = tuple((s.key, s.shape, s.dtype, s.group, s.row_sparse) for s in specs)
                self._send(server, self._number(), m.Register(name, declared, False))
        elif isinstance(body, m.Registered):
            self._registered(server, body)
        elif reply.number in self.about:
            table, round_ = self.about[reply.number]
            lane = self.lanes[table]
            if lane.is_open and lane.round == round_:
                self._take_outcome(lane, server, reply.number, body)

    def _take_outcome(self, lane: Lane, server: int, number: int, body: m.ReplyBody) -> None:
        if lane.given_up:
            if lane.aborts.get(server) == number and isinstance(body, m.Info):
                del lane.aborts[server]
                lane.kept.update({server} if body.values["applied"] else ())
        elif isinstance(body, m.Vetoed):
            lane.vetoed.add(server)
            if body.ranks:
                note_veto(lane)
        elif isinstance(body, m.Held):
            note_held(lane, server, body)
        elif isinstance(body, m.InForce):
            lane.overs.update({server} if body.is_over else ())
        elif isinstance(body, m.Weights) or (isinstance(body, m.Done) and not self._waits_on(lane, server)):
            lane.done.add(server)
        elif isinstance(body, m.Failed):
            self.give_up(lane)
        elif isinstance(body, m.Pending):
            lane.accepted.add(server)
        elif isinstance(body, m.Missing):
            self._push(lane, server, [(s, lane.generations[s]) for s in body.slices if s in lane.generations])
            self._commit(lane, server)
        if lane.given_up and not lane.aborts:
            self._given_up(lane)
        elif len(lane.done) == NUM_SERVERS and is_known(lane):
            self._end(lane)

    def _waits_on(self, lane: Lane, server: int) -> bool:
        """Whether weights follow when a contribution of its own is done."""
        return self.wants_weights and server not in lane.vetoed

    def _given_up(self, lane: Lane) -> None:
        """Every server has answered: the round is over, or is to be taken back where it was applied."""
        if 0 < len(lane.kept) < NUM_SERVERS and not lane.is_undoing:
            lane.is_undoing = True
            kept, lane.kept = sorted(lane.kept), set()
            self._abort_all(lane, kept)
        else:
            self._end(lane)

    def _end(self, lane: Lane) -> None:
        apart = 0 < len(lane.kept) < NUM_SERVERS
        if lane.encoded and lane.compressor is not None:
            if lane.kept or 0 < len(lane.vetoed) < NUM_SERVERS:
                lane.compressor = None  # what was said is not known any more
            elif not lane.given_up and not lane.vetoed:
                lane.compressor.accept()
        given_up = "apart" if apart else "kept" if lane.kept else "failed"
        lane.log[lane.round] = given_up if lane.given_up else "done"
        lane.empty.update({lane.round} if lane.veto or lane.joined else ())
        lane.is_open = False
        lane.round += 1
        if len(lane.overs) == NUM_SERVERS and not lane.given_up:
            lane.joins_at = self._next_join(lane)

    def _next_join(self, lane: Lane) -> int:
        return lane.round + self._options.joins[self.rank] if self._options.joins else NEVER

    def _registered(self, server: int, body: m.Registered) -> None:
        lane = next(lane for lane in self.lanes if server not in lane.numbers)
        lane.numbers[server] = body.table
        lane.next_rounds[server] = body.next_round
        # A round that is open anywhere wants this rank; a rank that contributes by itself begins alike everywhere.
        is_alone = not self._options.mode.is_sync and all(lane.next_rounds.values())
        lane.round = (max if is_alone else min)(lane.next_rounds.values())
        lane.joins_at = max(1, self._next_join(lane))

    def _begin(self, lane: Lane, rng: random.Random) -> None:
        pieces = [piece.index for piece in lane.plan.slices]
        lane.joined = lane.round >= lane.joins_at
        lane.assign = 0 < lane.round == self._options.assigns and not lane.joined and rng.random() < 0.97
        lane.veto = not lane.assign and not lane.joined and lane.round > 0 and rng.random() < 0.04
        if lane.round == 0:
            slices = pieces if self.rank == 0 else []
        elif lane.joined:
            slices = []
        elif lane.assign:
            slices = pieces
        else:
            slices = [s for s in pieces if not lane.veto and rng.random() < 0.95]
        lane.is_open, lane.given_up, lane.is_undoing = True, False, False
        lane.generations = dict.fromkeys(slices, 0)
        rng.shuffle(slices)
        lane.to_push, lane.to_commit = slices, rng.sample(range(NUM_SERVERS), NUM_SERVERS)
        lane.requests, lane.aborts = {}, {}
        lane.accepted, lane.done, lane.kept = set(), set(), set()
        lane.vetoed, lane.overs = set(), set()
        is_gradient = lane.round > 0 and not lane.assign and not lane.joined
        wanted = NORM_TYPES[0] if rng.random() < 0.02 else self._options.hold
        lane.hold = wanted if is_gradient and self._options.hold else 0.0
        lane.held, lane.decision, lane.to_resolve, lane.was_vetoed = {}, None, [], False
        self._contributions.encode(lane)

    def _push_some(self, lane: Lane, rng: random.Random) -> None:
        server = lane.plan.slices[lane.to_push[-1]].server
        here = [s for s in lane.to_push if lane.plan.slices[s].server == server]
        chosen = here if rng.random() < 0.6 else here[-1:]
        lane.to_push = [s for s in lane.to_push if s not in chosen]
        self._push(lane, server, [(s, lane.generations[s]) for s in chosen])

    def _push(self, lane: Lane, server: int, chosen: list[tuple[int, int]]) -> None:
        batches: dict[bytes, list[m.Push]] = {}
        for slice_, generation in chosen:
            form, payload = self._contributions.payload(lane, slice_, generation)
            push = m.Push(lane.numbers[server], slice_, lane.round, generation, payload)
            batches.setdefault(form, []).append(push)
        for form, pushes in batches.items():
            self._send(server, self._number(), m.PushBatch(tuple(pushes), form))

    def _commit(self, lane: Lane, server: int) -> None:
        if server not in lane.requests:
            lane.requests[server] = self._number()
            self.about[lane.requests[server]] = (lane.table, lane.round)
        here = sorted(s for s in lane.generations if lane.plan.slices[s].server == server)
        manifest = tuple((s, lane.generations[s]) for s in here)
        wants = self.wants_weights
        number = lane.numbers[server]
        commit = m.Commit(
            number,
            lane.round,
            manifest,
            self._scale,
            wants,
            TIMEOUT,
            lane.veto,
            lane.assign,
            lane.joined,
            hold=lane.hold,
        )
        hyper = b"" if lane.joined else self._options.hyper(lane.round)
        self._send(server, lane.requests[server], m.CommitBatch((commit,), hyper))

    def _abort_all(self, lane: Lane, servers: Iterable[int]) -> None:
        lane.aborts = {server: self._number() for server in servers}
        for server in lane.aborts:
            self._abort(lane, server)

    def _abort(self, lane: Lane, server: int) -> None:
        self.about[lane.aborts[server]] = (lane.table, lane.round)
        reason = f"p{self.process} raised"
        abort = m.Abort(lane.numbers[server], lane.round, reason, lane.is_undoing)
        self._send(server, lane.aborts[server], abort)

    def _send(self, server: int, number: int, body: m.RequestBody) -> None:
        run, session = self.sessions[server]
        self._send_request(server, m.Request(run, session, number, body))

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number
