"""Eager pushes: slices that are sent before their commit count if they still hold the same bits, and only then.

Without an optimizer the weights after a round are the sum of what was given, so what counted can be read there.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.plan import TensorSpec
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import RowSet, same_bits
from kvtrainer.client.client import Client
from kvtrainer.client.connection import Connection
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.rounds import EagerPush
from kvtrainer.client.tables import Compressor, RemoteTable
from kvtrainer.errors import KVStoreError, NonFiniteGradientError
from tests.support.engines import filled, views
from tests.support.scripted import is_announcement
from tests.support.switchboard import Line, connected, line_of, play

SPECS = [
    TensorSpec("small", (3,), "float32"),
    TensorSpec("few", (5, 2), "float32"),
    TensorSpec("big", (600, 80), "float32"),
]
SERVERS = 2


class Job:
    """Two workers; the first one pushes eagerly."""

    def __init__(self) -> None:
        engines = [Engine(EngineConfig(server=i, num_servers=SERVERS)) for i in range(SERVERS)]
        self.clients: list[Client] = connected(engines, 2)
        self.tables: list[RemoteTable] = []
        for client in self.clients:
            self.tables += client.register({"t": SPECS})
        self.table = self.tables[0]
        self.outs = [self.filled(0.0) for _ in self.clients]
        self.round(*[self.filled(0.0) for _ in self.clients])
        self.line = line_of(self.clients[0])

    def filled(self, *values: float) -> dict[str, Tensor]:
        """Arenas with one number for each key, or for all; between keys there are zeros."""
        of_each = values if len(values) == len(SPECS) else values * len(SPECS)
        rows = zip(SPECS, of_each, strict=True)
        return filled(self.tables[0].plan, {spec.key: torch.full(spec.shape, value) for spec, value in rows})

    def push_eagerly(self, values: dict[str, Tensor], *slices: int) -> None:
        """Send slices (by index; all by default) out of arenas."""
        for slice_ in self.table.plan.slices:
            if not slices or slice_.index in slices:
                flat = values["float32"]
                starts = [(slice_.offset + one.start, one.numel) for one in slice_.segments]
                parts = [flat[start : start + numel] for start, numel in starts]
                self.clients[0].rounds.push_eagerly(self.table, slice_, parts)

    def round(
        self, mine: dict[str, Tensor] | None, others: dict[str, Tensor], **said: Any
    ) -> list[list[float]]:
        """A round of both workers, of which the first one says something more, or both; the new weights."""
        play(
            self.clients,
            [self.given(0, mine, **said), self.given(1, others, assign=said.get("assign", False))],
        )
        return self.weights()

    def given(self, rank: int, values: dict[str, Tensor] | None, **said: Any) -> Contribution:
        """A worker's part in a round."""
        given = None if values is None else [values]
        return Contribution([self.tables[rank]], given, [self.outs[rank]], 1.0, **said)

    def weights(self) -> list[list[float]]:
        """The distinct numbers of each key that the first worker has."""
        return [key.unique().tolist() for key in views(self.table.plan, self.outs[0])]

    def generations(self) -> list[tuple[int, ...]]:
        """The generations, in order, in which each slice was sent."""
        found: dict[tuple[int, int], list[int]] = {}
        for server, body in self.sent:
            for slot, _, generation, _ in () if is_announcement(body) else body.pushes.tolist():
                found.setdefault((server, slot), []).append(generation)
        return [tuple(of) for of in found.values()]

    @property
    def sent(self) -> list[tuple[int, m.Contribute]]:
        """The contributions of the first one, in order, with the server of each."""
        return [(server, body) for server, body in self.line.sent if isinstance(body, m.Contribute)]

    @property
    def num_slices(self) -> int:
        return len(self.table.plan.slices)

    def discards(self) -> bool:
        [found] = {
            bool(body.commits[0, m.COMMIT_FLAGS] & m.DISCARD_EAGER)
            for _, body in self.sent
            if len(body.commits)
        }
        return found


@pytest.fixture
def job() -> Job:
    return Job()


def test_what_has_not_changed_is_sent_once_and_counts(job: Job) -> None:
    grads = job.filled(2.0)
    job.push_eagerly(grads)
    assert job.round(grads, job.filled(1.0)) == [[3.0]] * 3
    assert job.generations() == [(0,)] * job.num_slices
    assert not job.discards()


def test_a_slice_is_pushed_once_in_a_round(job: Job) -> None:
    grads = job.filled(2.0)
    job.push_eagerly(grads)
    count = len(job.sent)
    job.push_eagerly(job.filled(4.0))
    assert len(job.sent) == count
    assert job.round(grads, job.filled(1.0)) == [[3.0]] * 3


def test_what_was_sent_may_be_written_to_at_once(job: Job) -> None:
    grads = job.filled(2.0)
    job.push_eagerly(grads)
    grads["float32"].fill_(9.0)
    assert job.round(job.filled(2.0), job.filled(1.0)) == [[3.0]] * 3


def test_rows_take_the_place_of_a_gradient_that_was_sent_whole(job: Job) -> None:
    job.push_eagerly(job.filled(2.0))
    rows = {(0, 2): RowSet(torch.tensor([1, 599]), torch.full((2, 80), 4.0))}
    assert job.round(job.filled(2.0), job.filled(1.0), rows=rows) == [[3.0], [3.0], [1.0, 5.0]]


def test_rows_count_though_the_numbers_beside_them_are_as_they_were_sent(job: Job) -> None:
    """Where rows are, the arena has zeros."""
    grads = job.filled(2.0, 0.0, 2.0)
    job.push_eagerly(grads)
    rows = {(0, 1): RowSet(torch.tensor([3]), torch.full((1, 2), 4.0))}
    assert job.round(grads, job.filled(1.0), rows=rows) == [[3.0], [1.0, 5.0], [3.0]]


def test_zero_copy_gradients_are_compared_where_they_are(job: Job) -> None:
    grads = job.filled(2.0)
    job.push_eagerly(grads)
    wrong = job.filled(2.0, 2.0, 9.0)
    borrowed = torch.full((SPECS[2].numel,), 2.0)
    assert job.round(wrong, job.filled(1.0), borrowed={2: borrowed}) == [[3.0]] * 3
    assert job.generations() == [(0,)] * job.num_slices


def test_after_a_round_that_failed_nothing_of_it_counts(job: Job) -> None:
    job.push_eagerly(job.filled(2.0))
    both = [job.given(0, job.filled(2.0)), job.given(1, job.filled(1.0), assign=True)]
    assert all(play(job.clients, both, KVStoreError))
    job.push_eagerly(job.filled(3.0), 0)
    assert job.round(job.filled(3.0), job.filled(1.0)) == [[4.0]] * 3


def test_compressed_slices_leave_one_residual_however_often_they_are_sent(job: Job) -> None:
    """Of 0.75 and of 0.625 two bits say 0.5."""
    compressors = [Compressor(make_codec({"type": "2bit", "threshold": 0.5}), t.plan) for t in job.tables]
    for table, one in zip(job.tables, compressors, strict=True):
        table.compressor = one
    job.push_eagerly(job.filled(0.75))
    assert job.round(job.filled(0.625, 0.625, 0.75), job.filled(0.0)) == [[0.5]] * 3
    residuals = compressors[0].residuals()
    assert [residuals[key].unique().tolist() for key in range(3)] == [[0.125], [0.125], [0.25]]


def test_the_residual_of_a_key_that_is_left_out_stays_though_zeros_of_it_were_sent(job: Job) -> None:
    """Of 1.25 two bits say 0.5; with a gradient of zeros they would say some of the rest."""
    job.table.compressor = Compressor(make_codec({"type": "2bit", "threshold": 0.5}), job.table.plan)
    job.round(job.filled(1.25), job.filled(0.0))
    grads = job.filled(0.0, 1.25, 1.25)
    job.push_eagerly(grads)
    job.round(grads, job.filled(0.0), absent=frozenset({0}))
    residuals = job.table.compressor.residuals()
    assert [residuals[key].unique().tolist() for key in range(3)] == [[0.75], [1.5], [1.5]]


def test_residuals_that_were_loaded_count_for_what_was_sent_before(job: Job) -> None:
    job.table.compressor = Compressor(make_codec({"type": "2bit", "threshold": 0.5}), job.table.plan)
    job.push_eagerly(job.filled(0.25))
    job.table.compressor.set_residuals({key: torch.full(s.shape, 0.375) for key, s in enumerate(SPECS)})
    assert job.round(job.filled(0.25), job.filled(0.0)) == [[0.5]] * 3


def test_what_cannot_be_compressed_is_left_to_the_step(job: Job) -> None:
    job.table.compressor = Compressor(make_codec({"type": "2bit", "threshold": 0.5}), job.table.plan)
    grads = job.filled(0.75)
    grads["float32"][0] = float("inf")
    with pytest.raises(NonFiniteGradientError):
        job.push_eagerly(grads)
    grads["float32"][0] = 0.75
    assert job.round(grads, job.filled(0.0)) == [[0.5]] * 3


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(s, marks=pytest.mark.full) for s in range(5, 12))]
)
def test_whatever_is_sent_lost_repeated_and_changed_the_round_has_what_was_given_at_last(seed: int) -> None:
    """Rounds one after the other, of whole numbers; messages of both kinds get lost, and some come twice, or late."""
    job, draw = Job(), random.Random(seed)
    client, held_back = job.clients[0], list[tuple[int, m.Contribute]]()

    def loses(body: m.RequestBody) -> bool:
        assert isinstance(body, m.Contribute)
        is_lost = not len(body.commits) and draw.random() < 0.3
        if draw.random() < 0.3:
            held_back.append(job.sent[-1])
        return is_lost

    def repeat() -> None:
        """Let some of what was sent in this round, or an earlier one, come again."""
        for server, body in draw.sample(held_back, min(len(held_back), 4)):
            copies = tuple([payload.clone() for payload in body.payloads])
            again = replace(body, payloads=copies, commits=m.matrix((), m.COMMIT_WORDS))
            client._session.send(server, client._session.next_number(), again)

    want = [0.0] * len(SPECS)
    for _ in range(25):
        mine = [float(draw.randrange(1, 100)) for _ in SPECS]
        job.line.loses = loses
        some = [slice_.index for slice_ in job.table.plan.slices if draw.random() < 0.8]
        if some:
            job.push_eagerly(job.filled(*mine), *some)
        repeat()
        mine = [float(draw.randrange(1, 100)) if draw.random() < 0.2 else one for one in mine]
        absent = frozenset([key for key in range(len(SPECS)) if draw.random() < 0.1])
        is_vetoed, is_assigned = draw.random() < 0.1, draw.random() < 0.1
        absent = frozenset() if is_assigned else absent
        given = [0.0 if key in absent else one for key, one in enumerate(mine)]
        gives = None if is_vetoed and not is_assigned else job.filled(*given)
        first = job.given(0, gives, absent=absent, veto=gives is None, assign=is_assigned)
        ticket = client.rounds.start(first)
        repeat()
        other = job.clients[1].rounds.start(job.given(1, job.filled(1.0), assign=is_assigned))
        client.rounds.wait(ticket)
        job.clients[1].rounds.wait(other)
        if gives is not None:
            want = [one + (not is_assigned) for one in given]
        assert job.weights() == [[one] for one in want]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_are_compared_to_the_last_one(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, float("nan"), 0.0, 2.0, 5.0], dtype=dtype)
    other = one.clone()
    assert same_bits(one, other)
    assert same_bits(one[1:], other[1:])
    other[4] = 6.0
    assert not same_bits(one, other)
    other[4], other[2] = 5.0, -0.0
    assert not same_bits(one, other)
    assert not same_bits(one, one[:4])


@pytest.mark.parametrize(("steps", "lines"), [([0, 0], 0), ([0, 1, 0, 0], 0), ([0, 0, 0, 0, 0], 1)])
def test_that_everything_is_sent_twice_is_said_once(
    steps: list[int], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    pushed = EagerPush()
    with caplog.at_level(logging.WARNING):
        for kept in steps:
            pushed.end(range(kept))
    assert len(caplog.records) == lines


class Held:
    """Lets a worker's messages queue, in a real connection, until they are let go.

    Attributes:
        gone: What has left the queues, with the server of each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connection = Connection(["ipc:///dev/null/nobody"] * SERVERS, 1)
        self.gone: list[tuple[int, m.Contribute]] = []
        self.is_holding = True
        self._monkeypatch = monkeypatch

    def stand_before(self, line: Line) -> None:
        """Have all that a worker sends from now on queue here."""
        send = line.send

        def send_far(server: int, request: m.Request, *_: int) -> bool:
            if not self.is_holding:
                assert isinstance(request.body, m.Contribute)
                self.gone.append((server, request.body))
                send(server, request)
            return not self.is_holding

        self._monkeypatch.setattr(self.connection, "_send_far", send_far)
        self._monkeypatch.setattr(line, "send", self.connection.send)

    def backward_pass(self) -> tuple[Job, dict[str, Tensor]]:
        """Have gradients queue here, the last slice first, after a round that they are expected to be like."""
        job = Job()
        grads = job.filled(2.0)
        job.push_eagerly(grads)
        job.round(grads, grads)
        self.stand_before(job.line)
        for slice_ in reversed(job.table.plan.slices):
            job.push_eagerly(grads, slice_.index)
        return job, grads

    def let_go(self) -> None:
        """Let all that queues go, and whatever comes."""
        self.is_holding = False
        for server in range(SERVERS):
            self.connection._flush(server)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.connection.close()


@pytest.mark.parametrize("is_remote", [True, False])
def test_slices_that_queue_leave_in_the_order_of_the_next_forward_pass_and_the_commit_last(
    is_remote: bool, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Line, "is_remote", lambda *_: is_remote)
    job, grads = held.backward_pass()
    plan = job.table.plan
    ticket = job.clients[0].rounds.start(job.given(0, grads))
    held.let_go()
    other = job.clients[1].rounds.start(job.given(1, job.filled(1.0)))
    job.clients[0].rounds.wait(ticket)
    job.clients[1].rounds.wait(other)
    assert job.weights() == [[3.0]] * 3
    for server in range(SERVERS):
        bodies = [body for to, body in held.gone if to == server]
        assert is_announcement(bodies[0]) == is_remote
        slots = [slot for body in bodies for slot in body.pushes[:, m.PUSH_SLOT].tolist()]
        assert len(slots) == len(plan.slices_of(server)) > 1
        assert slots == sorted(slots)
        assert [at for at, body in enumerate(bodies) if len(body.commits)][-1] == len(bodies) - 1


def test_parts_of_slices_that_queue_leave_as_the_backward_pass_gave_them(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every worker alike: what one has sent is answered when the others have sent it."""
    monkeypatch.setattr(f"{__name__}.SPECS", [TensorSpec("big", (1 << 18,), "float32")])
    job, grads = held.backward_pass()
    plan = job.table.plan
    held.let_go()
    for server in range(SERVERS):
        places = [
            m.unpack_slot(int(one.pushes[0, m.PUSH_SLOT]))
            for to, one in held.gone
            if to == server and len(one.pushes)
        ]
        assert places == sorted(places, key=lambda place: (-place[0], place[1]))
        assert len(places) > len(plan.slices_of(server)) > 1
    assert job.round(grads, job.filled(1.0)) == [[3.0]]
