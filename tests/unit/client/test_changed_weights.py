"""Weights that a worker keeps from round to round, of which only changes come: always those of the store.

Two workers and one to three engines, without sockets. After every round the arena of each worker is compared with
weights that are fetched whole, or, where the second worker takes bfloat16, with their rounding. Changes are rows, or
those of all weights, encoded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.errors import KVStoreError
from kvstore_server.optimizer import Optimizer, create, register, registry
from kvstore_server.optimizer.base import StateValue
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import RowSet
from kvstore_server.shard.deltas import add_delta_changes
from kvstore_server.shard.shard import Shard
from kvtrainer.client import incoming_weights
from kvtrainer.client.client import Client
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.tables import RemoteTable
from tests.support.optimizer_slices import given_to
from tests.support.switchboard import connected, play

SPECS = [
    TensorSpec("big", (6_000, 9), "float32"),
    TensorSpec("small", (50, 4), "float32"),
    TensorSpec("head", (13, 3), "float32"),
    TensorSpec("half", (900, 16), "float16"),
    TensorSpec("long rows", (2, 300_001), "float32"),
]
SPARSE = (0, 1, 3)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lazy_update": True, "momentum": 0.9, "wd": 0.01, "multi_precision": True},
    "adam": {"lazy_update": True},
    "adagrad": {},
    "groupadagrad": {},
    "torch:SGD": {"momentum": 0.9},
    "torch:Adagrad": {},
    "rmsprop": {},
    "fussy": {},
}
"""Lazy ones by slices and by keys, torch's with and without momentum, one that moves all rows, one that raises."""
FORMS = ("plain", "half", "ternary", "int8", "topk")
CODECS = {form: make_codec({"type": form}) for form in FORMS[2:]}
"""How new weights come where changes of all are encoded."""


@pytest.fixture(autouse=True)
def fussy() -> Iterator[None]:
    """Plain lazy SGD that raises on gradients above 100, after it has written some weights."""

    class Fussy(Optimizer):
        may_raise = True

        def updates_rows(self, hyper: Mapping[str, Any]) -> bool:
            return True

        def update(
            self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
        ) -> None:
            weight.sub_(grad)
            if bool((grad > 100).any()):
                raise ValueError("gradient above 100")

    register(Fussy)
    yield
    del registry._registry["fussy"]


class Job:
    """Both workers, each with the arena that it keeps."""

    def __init__(self, servers: int, optimizer: str, form: str = "plain") -> None:
        built = create(optimizer, learning_rate=0.1, **OPTIMIZERS[optimizer])
        engines = [Engine(EngineConfig(server=i, num_servers=servers)) for i in range(servers)]
        self.clients: list[Client] = connected(engines, 2)
        self.tables: list[RemoteTable] = []
        for client in self.clients:
            client.set_optimizer(built.spec())
            self.tables += client.register({"t": SPECS}, not built.elementwise, delta_codec=CODECS.get(form))
        self.tables[1].takes_half = form == "half"
        self.hyper = pack_hypers([dict(built.plain_hyper())], {}, {}, True)
        self.arenas = [self.empty(), self.empty()]
        gen = torch.Generator().manual_seed(0)
        start = {name: torch.rand(len(flat), generator=gen).to(flat) for name, flat in self.empty().items()}
        self.play([self.item(0, start), self.item(1, None)])

    def empty(self) -> dict[str, Tensor]:
        sizes = self.tables[0].plan.arena_sizes
        return {name: torch.zeros(size, dtype=getattr(torch, name)) for name, size in sizes.items()}

    def item(
        self,
        rank: int,
        values: Mapping[str, Tensor] | None,
        rows: Mapping[int, RowSet] | None = None,
        **options: Any,
    ) -> Contribution:
        given = None if values is None else [values]
        by_table = {(0, key): of_key for key, of_key in (rows or {}).items()}
        return Contribution(
            [self.tables[rank]],
            given,
            [self.arenas[rank]],
            hyper=self.hyper,
            rows=by_table,
            is_incremental=True,
            **options,
        )

    def play(self, items: list[Contribution]) -> list[Exception | None]:
        return play(self.clients, items, KVStoreError)

    def check(self) -> None:
        held = self.empty()
        self.clients[0].rounds.pull([self.tables[0]], [held])
        plan = self.tables[0].plan
        for arena, table in zip(self.arenas, self.tables, strict=True):
            for spec, at in zip(SPECS, plan.key_offsets, strict=True):
                mine, theirs = arena[spec.dtype], held[spec.dtype]
                if table.takes_half and spec.dtype == "float32":
                    theirs = theirs.to(torch.bfloat16).float()
                assert torch.equal(mine[at : at + spec.numel], theirs[at : at + spec.numel]), spec.key


def random_rows(rng: random.Random, key: int) -> RowSet:
    spec = SPECS[key]
    ids = sorted(rng.sample(range(spec.shape[0]), rng.choice([0, 1, 5, 40])))
    values = torch.full((len(ids), spec.shape[1]), 0.5, dtype=getattr(torch, spec.dtype))
    return RowSet(torch.tensor(ids, dtype=torch.int64), values)


def played(job: Job, rng: random.Random) -> str:
    """One random round; says which kind it was."""
    kind = rng.choice(["rows"] * 6 + ["dense", "veto", "assign", "disagree", "raise"])
    everything = frozenset(range(len(SPECS)))
    grads = {name: torch.full_like(flat, 0.25) for name, flat in job.arenas[0].items()}
    if kind == "assign":
        flat = {name: torch.full_like(flat, rng.random()) for name, flat in grads.items()}
        job.play([job.item(0, flat, assign=True), job.item(1, None, assign=True)])
    elif kind == "disagree":
        errors = job.play([job.item(0, grads, assign=True), job.item(1, grads)])
        assert None not in errors
    elif kind == "veto":
        job.play([job.item(0, grads, rescale=1.0), job.item(1, grads, rescale=1.0, veto=True)])
    elif kind == "dense":
        absent = frozenset(rng.sample(sorted(everything), 2))
        job.play([job.item(rank, grads, rescale=1.0, absent=absent) for rank in range(2)])
    else:
        scale = 1000.0 if kind == "raise" else 1.0
        items = []
        for rank in range(2):
            rows = {key: random_rows(rng, key) for key in SPARSE if rng.random() < 0.8}
            others = {2, 4} if rng.random() < 0.1 else set()
            items.append(
                job.item(rank, grads, rescale=scale, absent=everything - set(rows) - others, rows=rows)
            )
        job.play(items)
    return kind


@pytest.mark.parametrize(
    ("optimizer", "servers", "form"),
    [
        pytest.param(name, 1 + i % 3, form, marks=() if at == i % len(FORMS) else pytest.mark.full)
        for i, name in enumerate(OPTIMIZERS)
        for at, form in enumerate(FORMS)
    ],
)
def test_every_round_leaves_the_weights_of_the_store(optimizer: str, servers: int, form: str) -> None:
    job, rng = Job(servers, optimizer, form), random.Random(servers)
    job.check()
    for _ in range(16):
        # Of a round that was taken back nobody is told, so who reads then is a step of changes ahead.
        if played(job, rng) != "raise" or form not in CODECS:
            job.check()


class Dropping:
    """A transport that loses, now and then, a reply with weights."""

    def __init__(self, inner: Any, rng: random.Random) -> None:
        self._inner, self._rng = inner, rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        got: tuple[int, m.Reply] | None = self._inner.receive(timeout)
        if got is not None and isinstance(got[1].body, m.Weights) and self._rng.random() < 0.5:
            body = got[1].body
            kept = [at for at in range(len(body.parts)) if self._rng.random() < 0.5]
            some = m.Weights(body.parts[kept], tuple(body.payloads[at] for at in kept))
            return got[0], m.Reply(got[1].number, some)
        return got


@pytest.mark.parametrize("form", FORMS)
def test_lost_replies_are_asked_for_again(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    job, rng = Job(2, "sgd", form), random.Random(5)
    for client in job.clients:
        session = client._session
        monkeypatch.setattr(session, "transport", Dropping(session.transport, rng))
        monkeypatch.setattr(session, "check_silence", lambda *_: True)
    for _ in range(20):
        played(job, rng)
    for client in job.clients:
        monkeypatch.setattr(client._session, "transport", client._session.transport._inner)
    job.check()


def parts_of(job: Job, items: list[Contribution]) -> dict[int, tuple[int, int]]:
    """Slot → kind and size of what comes back to rank 0 in a round."""
    replies: dict[int, tuple[int, int]] = {}
    rounds = job.clients[0].rounds
    take = rounds._receive

    def note(round_: Any, server_request: Any, server: int, reply: m.ReplyBody) -> None:
        if isinstance(reply, m.Weights):
            replies.update({slot: (kind, nbytes) for slot, _, kind, nbytes in reply.parts.tolist()})
        take(round_, server_request, server, reply)

    rounds._receive = note  # type: ignore[method-assign]
    job.play(items)
    return replies


def test_what_comes_back_is_rows_whole_keys_or_nothing() -> None:
    job = Job(1, "sgd")
    job.play([job.item(rank, {}, rescale=1.0, absent=frozenset(range(5))) for rank in range(2)])
    grads = {name: torch.ones_like(flat) for name, flat in job.arenas[0].items()}
    rows = {0: RowSet(torch.tensor([3, 5_999]), torch.ones(2, 9))}
    items = [job.item(rank, grads, rescale=1.0, absent=frozenset({1, 3, 4}), rows=rows) for rank in range(2)]
    parts = parts_of(job, items)
    plan = job.tables[0].plan
    sizes = {tuple(SPECS[s.key].key for s in plan.slices[i].segments): parts[i][1] for i in parts}
    assert all(kind == m.ROWS for kind, _ in parts.values())
    # The bucket: two rows of nine numbers with their ids, and 39 numbers, each with 16 bytes about it and 8 before all.
    assert sizes["big", "small", "head"] == 8 + (16 + 8 + 72) + (16 + 160)
    assert sizes["half",] == 0
    assert sizes["long rows",] == 0
    job.check()


def dense(job: Job, **options: Any) -> list[Contribution]:
    """Gradients of all elements, by both workers."""
    gen = torch.Generator().manual_seed(3)
    grads = {name: torch.rand(len(flat), generator=gen).to(flat) for name, flat in job.arenas[0].items()}
    return [job.item(rank, grads, rescale=1.0, **options) for rank in range(2)]


def test_a_key_whose_changes_were_encoded_comes_whole_and_then_by_rows_once_it_has_row_sparse_gradients() -> (
    None
):
    job = Job(1, "sgd", "ternary")
    others, rows = frozenset(range(1, 5)), {0: RowSet(torch.tensor([3, 5_999]), torch.ones(2, 9))}
    slots = [at for at, slice_ in enumerate(job.tables[0].plan.slices) if slice_.segments[0].key == 0]
    kinds = []
    for given in (dense(job), None, None):
        by_rows = given or [
            job.item(rank, job.empty(), rescale=1.0, absent=others, rows=rows) for rank in range(2)
        ]
        parts = parts_of(job, by_rows)
        kinds.append({parts[at][0] for at in slots if at in parts})
        job.check()
    assert kinds == [{m.DELTA}, {m.WHOLE}, {m.ROWS}]
    assert not job.tables[1].followed.keys() & set(slots)


def test_changes_of_a_slice_are_encoded_although_some_of_its_keys_have_no_gradient() -> None:
    job = Job(1, "torch:SGD", "ternary")
    [slot] = [at for at, slice_ in enumerate(job.tables[0].plan.slices) if len(slice_.segments) == 3]
    for _ in range(2):
        assert parts_of(job, dense(job, absent=frozenset({1, 4})))[slot][0] == m.DELTA
        job.check()


def test_nothing_is_sent_of_weights_that_workers_have_as_they_are() -> None:
    job = Job(1, "torch:SGD", "ternary")
    slices = job.tables[0].plan.slices
    [slot] = [at for at, slice_ in enumerate(slices) if len(slice_.segments) == 3]
    absent = frozenset([segment.key for segment in slices[slot].segments])
    job.play(dense(job, absent=absent))
    sizes = {at: nbytes for at, (_, nbytes) in parts_of(job, dense(job, absent=absent)).items()}
    assert [at for at, nbytes in sizes.items() if not nbytes] == [slot]
    job.play(dense(job))
    job.check()


def test_after_a_round_that_was_skipped_changes_come_as_ever() -> None:
    job = Job(2, "torch:SGD", "ternary")
    job.play(dense(job))
    job.play([job.item(0, job.empty(), rescale=1.0), job.item(1, job.empty(), rescale=1.0, veto=True)])
    assert {kind for kind, _ in parts_of(job, dense(job)).values()} == {m.DELTA}
    job.check()


def test_a_round_whose_end_was_interrupted_is_not_made_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, calls = Job(1, "torch:SGD", "int8"), list[int]()
    job.play(dense(job))

    def interrupted(codec: Any, changes: Tensor, weights: Tensor) -> None:
        calls.append(len(weights))
        if len(calls) == 3:
            raise KVStoreError("interrupted")
        add_delta_changes(codec, changes, weights)

    with monkeypatch.context() as patch:
        patch.setattr(incoming_weights, "add_delta_changes", interrupted)
        assert [type(one) for one in job.play(dense(job))] == [KVStoreError, type(None)]
    first = job.clients[0].rounds
    for resume in (lambda: first.start(dense(job)[0]), first.wait_all_pending):
        with pytest.raises(KVStoreError):
            resume()


def test_a_round_that_is_taken_back_changes_everything_for_whoever_has_read_it() -> None:
    plan = make_plan([TensorSpec("w", (40, 2), "float32")], 1)
    shard = Shard()
    unit = shard.add(plan)
    shard.tracks_changes = True
    assert unit.changes.since(0, 0, 0) == {}
    rows = {0: RowSet(torch.tensor([3]), torch.ones(1, 2))}
    optimizer = create("fussy")
    given = given_to(shard, {0: rows})
    shard.update([given], optimizer, [[optimizer.hyper]])
    assert unit.changes.since(0, 0, 1) == {0: torch.tensor([3])}
    shard.undo(unit)
    assert unit.changes.since(0, 1, 2) is None
    assert shard.updates_after(unit, [given]) == 1


class Deaf:
    """A transport over which nothing gets to one server."""

    def __init__(self, inner: Any, server: int) -> None:
        self._inner, self._server = inner, server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        if server != self._server:
            self._inner.send(server, request, priority)


def taken_back(form: str) -> Job:
    """A round that one server has applied is taken back, because another one has failed it; and the loop goes on."""
    job = Job(2, "fussy", form)
    rows = {0: RowSet(torch.tensor([3, 5_999]), torch.ones(2, 9))}
    others = frozenset({1, 2, 3, 4})
    both = [job.item(rank, {}, rescale=1.0, absent=others, rows=rows) for rank in range(2)]
    job.play(both)
    first, second = (client.rounds for client in job.clients)
    grads = {name: torch.full_like(flat, 0.25) for name, flat in job.arenas[0].items()}
    begun = first.start(Contribution([job.tables[0]], [grads], [job.arenas[0]], 1.0, job.hyper))
    session = second._session
    transport, session.transport = session.transport, Deaf(session.transport, 1)
    lost = second.start(job.item(1, grads, rescale=1.0))
    session.transport = transport
    second._end(lost, KVStoreError("given up"))
    with pytest.raises(KVStoreError, match="given up"):
        first.wait(begun)
    job.play(both)
    return job


@pytest.mark.parametrize("form", ["plain", "int8"])
def test_weights_of_a_round_that_was_taken_back_all_come_again(form: str) -> None:
    taken_back(form).check()


def test_a_round_that_was_taken_back_leaves_no_trace_in_weights_whose_changes_are_encoded() -> None:
    plain, encoded = taken_back("plain"), taken_back("int8")
    for mine, theirs in zip(plain.arenas, encoded.arenas, strict=True):
        assert all(torch.equal(flat, theirs[name]) for name, flat in mine.items())
