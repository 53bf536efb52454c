"""A job whose server is killed at failpoints and restarted: what the workers send is scripted, and sent again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import make_codec, torch_dtype
from kvstore_server.durable.spill_folder import SpillFolder
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig, Namespace
from kvstore_server.engine.rounds import SYNCHRONOUS, Mode, RoundTracker
from kvstore_server.engine.table import Table
from kvstore_server.optimizer import create
from kvstore_server.optimizer.state import pack_states
from kvstore_server.plan import Plan, Slice, TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
from kvstore_server.protocol.rows import PACKED_ROWS, RowSet, encode_rows
from kvstore_server.transport.arena import Leases
from tests.support.durable import Crash, HeldDescriptors, durable_engine

RUN = 1
_NOW = 100.0


@dataclass
class Case:
    """What the workers of a job do.

    Args:
        keys: The keys of each table.
        optimizer: Its name and options; None: the sum replaces the weights.
        codec: The encoding of gradients.
        pull_codec: The encoding of new weights.
        flags: Of each commit.
        hold: The type of norm that is asked for, and then the sum is clipped.
        rows: The rows that a rank gives of the first key of each table in a round, in place of the whole key; of a hash
            table, of each slice.
        is_pipelined: The ranks declare what they will commit, so that slices are applied one by one.
        integers: Gradients are whole numbers, whose sums are exact in any order.
    """

    keys: Sequence[Sequence[TensorSpec]]
    optimizer: tuple[str, dict[str, Any]] | None = None
    codec: dict[str, Any] | None = None
    pull_codec: dict[str, Any] | None = None
    flags: int = m.WANTS_WEIGHTS
    hold: float = 0.0
    rows: Callable[[int, int], Sequence[int]] | None = None
    is_pipelined: bool = False
    integers: bool = False
    mode: Mode = SYNCHRONOUS
    ranks: int = 2
    rounds: int = 4
    hypers: Callable[[int], bytes] = lambda _: b""
    whole_keys: bool = False
    plans: list[Plan] = field(init=False)

    def __post_init__(self) -> None:
        self.plans = [make_plan(list(keys), 1, self.whole_keys) for keys in self.keys]


@dataclass
class Job:
    """A job and its server. With `store`, the server's state outlives it, and it is restarted after each Crash."""

    case: Case
    store: HeldDescriptors | None = None
    leases: Leases | None = None
    crashes: int = 0
    spill: SpillFolder | None = None

    def __post_init__(self) -> None:
        tokens = partial(random.Random(7).getrandbits, 64)
        self.sessions: dict[int, int] = {}
        self.answers: dict[tuple[int, int], list[m.ReplyBody]] = {}
        if self.store is None:
            self.engine = Engine(EngineConfig(run_id=RUN), tokens=tokens)
        else:
            self._start(tokens)

    def run(self) -> None:
        """Do all that the case says; each step again from its beginning after a crash."""
        for step in self.steps():
            requests = list(step)
            while not self.send(requests):
                pass

    def ask(self, rank: int, body: m.RequestBody) -> list[m.ReplyBody]:
        """Send a request that answers itself; the answers."""
        self.answers.pop((rank, 99_999), None)
        while not self.send([(rank, 99_999, body)]):
            pass
        return self.answers.get((rank, 99_999), [])

    def leave(self, rank: int) -> None:
        self.ask(rank, m.Leave("done", True))

    def send(self, requests: Sequence[tuple[int, int, m.RequestBody]]) -> bool:
        """Send requests; return False if the server was killed and restarted meanwhile."""
        for rank, number, body in requests:
            if isinstance(body, m.Hello) and rank in self.sessions:
                self.sessions.pop(rank)
            request = m.Request(RUN, self.sessions.get(rank, 0), number, body)
            try:
                out = self.engine.handle(b"%d" % rank, request, _NOW)
            except Crash:
                self.crashes += 1
                self._start()
                return False
            for one in out:
                self.answers.setdefault((int(one.peer), one.reply.number), []).append(one.reply.body)
                if isinstance(one.reply.body, m.Welcome):
                    self.sessions[rank] = one.reply.body.session
        return True

    def _start(self, tokens: Callable[[], int] | None = None) -> None:
        assert self.store is not None
        while True:
            try:
                self.engine = durable_engine(
                    self.store,
                    EngineConfig(run_id=RUN),
                    self.leases,
                    now=_NOW,
                    tokens=tokens,
                    spill=self.spill,
                )
                return
            except Crash:
                self.crashes += 1

    # ---------------------------------------------------------------- what the workers send

    def steps(self) -> Iterator[Iterator[tuple[int, int, m.RequestBody]]]:
        """The requests (rank, number, body), in steps after each of which nothing is open."""
        case = self.case
        yield self._begin()
        for round_ in range(case.rounds + 1):
            if case.mode.is_sync or not round_:
                yield self._round(round_, range(case.ranks))
            else:
                for rank in range(case.ranks):
                    yield self._round(round_, [rank])
        yield iter([(rank, 9_000, m.Gather(0, 60.0, b"%d" % rank)) for rank in range(case.ranks)])

    def _begin(self) -> Iterator[tuple[int, int, m.RequestBody]]:
        case, mode = self.case, self.case.mode
        for rank in range(case.ranks):
            hello = m.Hello(
                "job", rank, case.ranks, 0, 1, "", f"h{rank}", b"%d" % rank, (b"%d" % rank,), mode.name, mode.staleness
            )  # fmt: skip
            yield rank, 1, hello
            if case.optimizer is not None:
                name, options = case.optimizer
                yield rank, 2, m.SetOptimizer(pack_control(create(name, **options).spec()))
            form = b"" if case.pull_codec is None else pack_control(make_codec(case.pull_codec).spec())
            for at, plan in enumerate(case.plans):
                specs = tuple(tuple(spec) for spec in plan.specs)
                yield rank, 3 + at, m.Register(f"t{at}", specs, case.whole_keys, delta_encoding=form)  # type: ignore[arg-type]

    def _round(self, round_: int, ranks: Sequence[int]) -> Iterator[tuple[int, int, m.RequestBody]]:
        case, first = self.case, 100 * (round_ + 1)
        if case.is_pipelined and round_:
            for rank in ranks:
                yield rank, first + 50, self._commit(round_, rank, m.DECLARES_INTENT)
        # 1. The slices, one by one, of all ranks in turn.
        number = first
        for table, plan in enumerate(case.plans):
            for slice_ in plan.slices:
                for rank in ranks:
                    number += 1
                    if round_ or rank == 0:
                        yield rank, number, self._slice(round_, rank, table, slice_)
        # 2. The commits, and if the sum is held, the decisions.
        for rank in ranks:
            yield rank, first + 50, self._commit(round_, rank, 0)
        for rank in ranks if case.hold and round_ else ():
            for table in range(len(case.plans)):
                yield rank, first + 60 + table, m.Resolve(table, round_, 0.5, 1.5, False)
        if case.flags & m.WANTS_DELTA:
            return
        for rank in ranks:
            yield rank, first + 70, m.Pull(tuple(range(len(case.plans))))

    def _slot(self, table: int, slice_: Slice) -> int:
        return sum(len(plan.slices) for plan in self.case.plans[:table]) + slice_.index

    def _values(self, round_: int, rank: int, table: int, slice_: Slice) -> Tensor:
        seed = ((round_ * 31 + rank) * 31 + table) * 1009 + slice_.index
        rng = np.random.default_rng(seed)
        values = rng.integers(-8, 9, slice_.used) if self.case.integers else rng.standard_normal(slice_.used)
        found = torch.zeros(slice_.length, dtype=torch_dtype(slice_.dtype))
        found[: slice_.used] = torch.from_numpy(values.astype(np.float64))
        return found

    def _slice(self, round_: int, rank: int, table: int, slice_: Slice) -> m.Contribute:
        case, plan = self.case, self.case.plans[table]
        values, form = self._values(round_, rank, table, slice_), b""
        if case.rows is not None and round_ and slice_.segments[0].key == 0:
            width = plan.specs[0].shape[1]
            ids = torch.tensor(list(case.rows(round_, rank)), dtype=torch.int64)
            rows = RowSet(ids, values[: slice_.used].view(-1, width)[ids])
            if plan.specs[0].hash_table is not None:  # so many rows from the first one of the slice on
                block = plan.rows(0).blocks[0]
                rows = rows._replace(ids=ids + int(block.starts[block.order[slice_.index]]))
            values, form = encode_rows(plan, slice_, {0: rows}), PACKED_ROWS
        elif case.codec is not None and round_:
            codec = make_codec(case.codec)
            own = values[: slice_.used].float()
            values = torch.empty(codec.encoded_nbytes(len(own), "float32"), dtype=torch.uint8)
            codec.encode(own, torch.zeros_like(own), values, torch.empty_like(own))
            form = pack_control(codec.spec())
        pushes = m.matrix([(self._slot(table, slice_), round_, 0, values.nbytes)], m.PUSH_WORDS)
        return m.Contribute(pushes, (values,), m.matrix((), m.COMMIT_WORDS), form)

    def _commit(self, round_: int, rank: int, flags: int) -> m.Contribute:
        case, commits = self.case, []
        for table, plan in enumerate(case.plans):
            given = len(plan.slices) if round_ or rank == 0 else 0
            version = round_ - 1 if case.flags & m.WANTS_DELTA else -1
            commits.append((table, round_, given, 0, version, case.flags | flags))
        state = b"" if flags else b"state %d of %d" % (round_, rank)
        return m.Contribute(
            m.matrix((), m.PUSH_WORDS), (), m.matrix(commits, m.COMMIT_WORDS), timeout=600.0,
            hyper=case.hypers(round_), hold=case.hold if round_ else 0.0, client_state=state,
        )  # fmt: skip

    # ---------------------------------------------------------------- what the server has

    def weights(self) -> dict[int, list[bytes]]:
        """The weights of each table, by slot."""
        shard, tables = self.engine.namespaces["job"].shard, self.engine.namespaces["job"].tables
        return {
            t.number: [_bytes(shard.storage.padded[slot]) for slot in range(t.unit.first, t.unit.end)]
            for t in tables
        }

    def former(self, table: Table) -> list[bytes]:
        """The weights of a table before its last round."""
        found = [table.shard.former_weights(table.unit, slice_.index) for slice_ in table.unit.slices]
        return [b"" if one is None else _bytes(one) for one in found]

    def facts(self) -> dict[str, Any]:
        """All that must not depend on crashes: rounds, weights, optimizer state, counts, and what workers were told."""
        return state_of(self.engine, "job", with_versions=not self.case.is_pipelined)


def state_of(engine: Engine, name: str, with_versions: bool = True) -> dict[str, Any]:
    """What must survive of a namespace; of a table whose round is partly applied, what it was before.

    Args:
        with_versions: False if rounds were applied slice by slice: one that begins again counts as a change.
    """
    space = engine.namespaces[name]
    shard, found = space.shard, dict[str, Any]()
    for table in space.tables:
        unit, number, key = table.unit, table.number, table.name
        undo = None if table.pipelined is None else table.pipelined.undo
        counts = shard.counts[unit.first_key : unit.first_key + len(table.plan.specs)]
        weights = [shard.storage.padded[slot] for slot in range(unit.first, unit.end)]
        states = [shard.get_state(unit, slice_.index) for slice_ in unit.slices]
        if undo is not None:
            weights, states, counts = undo.weights, undo.states, undo.counts
        found[key, "weights"] = [_bytes(one) for one in weights]
        found[key, "state"] = [_plain(pack_states(one)) for one in states]
        found[key, "counts"] = counts.tolist()
        found[key, "round"] = space.rounds.shared.number(number)
        found[key, "failed"] = _failed(space.rounds.shared, number)
        found[key, "clocks"] = list(space.rounds.clocks(number)), sorted(space.rounds.joined(number))
        found[key, "applied"] = (
            table.rounds_applied,
            table.keys_applied,
            table.undone,
            table.decisions_differing,
        )
        found[key, "hyper"] = table.hyper.sent()
        found[key, "conflict"] = str(table.conflict), table.is_initialised, table.last_rank
        if with_versions:
            found[key, "version"] = table.version + (undo is not None), table.ends
        if table.deltas is not None:
            found[key, "workers"] = {slot: _bytes(one) for slot, one in table.deltas.weights.items()}
        found[key, "reads"] = {
            rank: [(one.version, [_bytes(w) for w in one.weights]) for one in reads]
            for rank, reads in unit.reads.items()
        }
        for rank, lane in space.rounds.lanes.items():
            found[key, "lane", rank] = lane.number(number), _failed(lane, number)
    members = space.membership
    found["barrier"] = members.barrier_sequence, dict(members.gathered)
    found["members"] = sorted(members.members), members.departed, members.failed, members.finished
    found["left"] = space.rounds.left, members.resumable
    found["clients"] = {
        (table, rank): [(at, state) for at, state in states if at < _open_round(space, rank, table)]
        for (table, rank), states in space.client_states.items()
    }
    found["optimizer"] = space.optimizer.sent()
    return found


def sessions_of(engine: Engine, name: str) -> dict[int, tuple[m.Hello, str | None]]:
    """Token of each session of a namespace → its hello, and why it ended."""
    sessions = engine._sessions
    named = sessions.named(sessions.of_namespace(name))
    return {session.token: (session.hello, reason) for session, reason in named}


def _open_round(space: Namespace, rank: int, table: int) -> int:
    lane = space.rounds.lanes.get(rank)
    return space.rounds.shared.number(table) if lane is None else max(lane.number(table), 1)


def _failed(tracker: RoundTracker, table: int) -> tuple[int, dict[int, str]]:
    [first] = tracker.first_failed(np.array([table])).tolist()
    return first, {at: repr(error) for at, error in tracker.failures(table).items()}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _plain(packed: tuple[dict[str, Any], bytes]) -> Any:
    """State without the order of its entries."""
    summary, data = packed
    tensors, at = {}, 0
    for name, dtype, shape, index in summary["tensors"]:
        size = int(np.prod(shape)) * torch_dtype(dtype).itemsize if dtype != "bool" else int(np.prod(shape))
        tensors[name, index] = dtype, tuple(shape), data[at : at + size]
        at += size
    return summary["steps"], [dict(sorted(one.items())) for one in summary["entries"]], tensors
