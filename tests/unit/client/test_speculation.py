"""Speculative rounds: announced during the backward pass, with weights that come before the step.

Without an optimizer the weights after a round are the sum of what was given, so what counted can be read there. The
table has eight slices, each of which is applied by itself.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.plan import TensorSpec
from kvstore_server.protocol import messages as m
from kvtrainer.client.contribution import Contribution
from kvtrainer.errors import RoundAbortedError
from tests.support.scripted import is_announcement, is_commit
from tests.support.switchboard import connected, line_of, play

NUMEL = 140_000
NUMBERS = pack_hypers([{"lr": 0.5}], {}, {}, True)


class Job:
    """Two workers on one server, of which both have made a round like those that follow."""

    def __init__(self) -> None:
        self.clients = connected([Engine(EngineConfig())], 2)
        self.tables = [
            client.register({"t": [TensorSpec("k", (NUMEL,), "float32")]})[0] for client in self.clients
        ]
        self.outs = [torch.zeros(NUMEL) for _ in self.clients]
        self.line = line_of(self.clients[0])
        self.play(0.0, 0.0)
        self.round(1.0, 1.0)
        self.forget()

    def forget(self) -> None:
        """Count what is sent and comes from now on."""
        self.line.sent.clear()
        self.line.came.clear()

    def given(self, rank: int, value: float | Tensor | None, **said: Any) -> Contribution:
        """A worker's part in a round."""
        values = None
        if value is not None:
            values = [{"float32": value if isinstance(value, Tensor) else torch.full((NUMEL,), value)}]
        return Contribution([self.tables[rank]], values, [{"float32": self.outs[rank]}], **said)

    def push(self, *values: float, predict_hypers: Callable[[], bytes] = bytes) -> None:
        """Have both workers send all slices ahead; the first one then looks what has come."""
        for client, table, value in zip(self.clients, self.tables, values, strict=True):
            for slice_ in table.plan.slices:
                client.rounds.push_eagerly(table, slice_, [torch.full((slice_.used,), value)], predict_hypers)
        self.clients[0]._session.process_received()

    def play(self, *values: float | Tensor | None, **said: Any) -> list[float]:
        """Make a round to which the first worker says something more; the distinct new weights of both."""
        parts = [self.given(rank, value, **(said if rank == 0 else {})) for rank, value in enumerate(values)]
        play(self.clients, parts)
        return [number for out in self.outs for number in out.unique().tolist()]

    def round(self, *values: float) -> list[float]:
        """The same, with all slices sent ahead as they are given."""
        self.push(*values)
        return self.play(*values)

    @property
    def expected(self) -> list[bool]:
        """Of each announcement of the first worker, whether it says only what is to be expected."""
        said = [
            body for _, body in self.line.sent if isinstance(body, m.Contribute) and is_announcement(body)
        ]
        return [bool(body.commits[0, m.COMMIT_FLAGS] & m.TENTATIVE) for body in said]


@pytest.fixture
def job() -> Job:
    return Job()


def test_new_weights_come_before_the_step_that_is_as_expected(job: Job) -> None:
    job.push(2.0, 3.0)
    assert any([isinstance(body, m.Weights) for body in job.line.came])
    assert job.play(2.0, 3.0) == [5.0, 5.0]
    assert job.expected == [True]
    assert (
        len([body for _, body in job.line.sent if is_commit(body)]) == 1
    )  # to what is missing another one would be the answer


def test_a_gradient_that_was_replaced_after_servers_had_applied_it_counts_as_it_is_at_last(job: Job) -> None:
    job.push(2.0, 3.0)
    changed = torch.full((NUMEL,), 2.0)
    changed[5] = 7.0
    assert job.play(changed, 3.0) == [5.0, 10.0, 5.0, 10.0]
    assert job.outs[1][5] == 10.0


def test_after_a_round_that_came_otherwise_nothing_is_expected_of_one(job: Job) -> None:
    job.push(2.0, 3.0)
    job.play(2.0, 3.0, rescale=0.5)
    said = []
    for _ in range(2):
        job.forget()
        job.push(2.0, 3.0)
        job.play(2.0, 3.0)
        said.append(job.expected)
    assert said == [[False], [True]]


def test_predicted_options_are_not_announced_again(job: Job) -> None:
    job.push(2.0, 3.0, predict_hypers=lambda: NUMBERS)
    parts = [job.given(rank, value, hyper=NUMBERS) for rank, value in enumerate((2.0, 3.0))]
    play(job.clients, parts)
    assert job.expected == [True]
    assert job.outs[0].unique().tolist() == [5.0]


def test_of_a_round_that_fails_no_weights_are_kept_that_came_before(job: Job) -> None:
    job.push(2.0, 3.0)
    first = job.clients[0].rounds.start(job.given(0, 2.0))
    job.clients[1]._session.call(0, m.Abort(0, job.tables[1].round, "it raised", undo=False))
    with pytest.raises(RoundAbortedError):
        job.clients[0].rounds.wait(first)
    assert job.outs[0].unique().tolist() == [2.0]


def test_a_worker_that_gives_nothing_after_all_is_told_that_the_round_is_over(job: Job) -> None:
    job.push(2.0, 3.0)
    joined = Contribution([job.tables[0]], None, None, joined=True)
    play(job.clients, [joined, job.given(1, 3.0)])
    assert job.outs[1].unique().tolist() == [3.0]
    session: Any = job.clients[0]._session
    assert not session._handlers


def test_a_backward_pass_that_is_interrupted_as_servers_are_told_leaves_nothing_behind(job: Job) -> None:
    session: Any = job.clients[0]._session
    before = len(session._handlers)

    def interrupted(body: m.RequestBody) -> bool:
        job.line.loses = lambda _: False
        raise KeyboardInterrupt

    job.line.loses = interrupted
    with pytest.raises(KeyboardInterrupt):
        job.push(2.0, 3.0)
    assert job.round(4.0, 1.0) == [5.0, 5.0]
    assert len(session._handlers) == before


def test_weights_that_came_before_a_step_that_was_interrupted_do_not_count_for_the_next_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    job.push(2.0, 3.0)
    with monkeypatch.context() as patched:
        patched.setattr("kvtrainer.client.rounds.valid_pushes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.clients[0].rounds.start(job.given(0, 2.0))
    with pytest.raises(RoundAbortedError):
        job.clients[1].rounds.wait(job.clients[1].rounds.start(job.given(1, 3.0)))
    assert job.play(6.0, 1.0) == [7.0, 7.0]


def test_of_a_table_that_a_worker_leaves_no_gradients_and_weights_are_kept(job: Job) -> None:
    job.round(2.0, 3.0)
    out = weakref.ref(job.outs[0])
    job.clients[0].rounds.forget(job.tables[0])
    job.outs = []
    gc.collect()
    assert out() is None


def test_keys_without_elements_are_pushed_as_others_are() -> None:
    clients, outs = connected([Engine(EngineConfig())], 2), [torch.zeros(NUMEL) for _ in range(2)]
    specs = [TensorSpec("k", (NUMEL,), "float32"), TensorSpec("none", (0, 4), "float64")]
    tables = [client.register({"t": specs})[0] for client in clients]
    given = {"float32": torch.ones(NUMEL), "float64": torch.ones(0, dtype=torch.float64)}
    for round_ in range(4):
        for client, table in zip(clients, tables, strict=True) if round_ else ():
            for slice_ in table.plan.slices:
                parts = [torch.ones(one.numel, dtype=given[slice_.dtype].dtype) for one in slice_.segments]
                client.rounds.push_eagerly(table, slice_, parts)
        arenas = [{"float32": out, "float64": given["float64"].clone()} for out in outs]
        play(clients, [Contribution([t], [given], [a]) for t, a in zip(tables, arenas, strict=True)])
    assert [out.unique().tolist() for out in outs] == [[2.0], [2.0]]
