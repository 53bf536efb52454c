"""Over a network, weights that a loop pulls after each of its pushes are asked for with the push."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvstore_server.engine import Engine
from kvstore_server.namespace import EngineConfig
from kvstore_server.plan import TensorSpec
from kvstore_server.protocol import messages as m
from kvtrainer.comm.contribution import Contribution
from kvtrainer.errors import KVStoreError, RoundAbortedError
from tests.support.scripted import is_commit
from tests.support.switchboard import connected, line_of

NUMEL = 100


class Job:
    """Two workers on one server, where the sum replaces the weights; they have pushed ones, and pulled."""

    def __init__(self) -> None:
        self.clients = connected([Engine(EngineConfig())], 2)
        self.tables = [
            client.register({"t": [TensorSpec("k", (NUMEL,), "float32")]})[0] for client in self.clients
        ]
        self.line = line_of(self.clients[0])
        for value in (0.0, 1.0):
            self.push(value)
        self.pull()
        self.push(1.0)
        self.pull()
        self.line.sent.clear()

    def push(self, value: float, *ranks: int) -> None:
        """Have both workers push, or some, and wait for nothing."""
        for rank in ranks or range(2):
            values = [{"float32": torch.full((NUMEL,), value)}]
            self.clients[rank].rounds.start(Contribution([self.tables[rank]], values, None))

    def pull(self, rank: int = 0) -> Tensor:
        """The weights as a worker reads them."""
        found = torch.zeros(NUMEL)
        self.clients[rank].rounds.pull([self.tables[rank]], [{"float32": found}])
        return found

    @property
    def wants(self) -> list[bool]:
        """Of each commit of the first worker, whether it asks for weights."""
        commits = [body for _, body in self.line.sent if is_commit(body)]
        return [
            bool(body.commits[0, 5] & m.WANTS_WEIGHTS) for body in commits if isinstance(body, m.Contribute)
        ]

    @property
    def num_pulls(self) -> int:
        return sum(isinstance(body, m.Pull) for _, body in self.line.sent)


@pytest.fixture
def job() -> Job:
    return Job()


def test_what_is_pulled_after_each_push_comes_with_it(job: Job) -> None:
    for value in (2.0, 3.0):
        job.push(value)
        assert job.pull().unique().tolist() == [2 * value]
    assert job.wants == [True, True]
    assert job.num_pulls == 0


def test_what_was_not_pulled_after_the_last_push_is_not_asked_for(job: Job) -> None:
    for value in (2.0, 3.0):
        job.push(value)
    assert job.wants == [True, False]
    assert job.pull().unique().tolist() == [6.0]
    assert job.num_pulls == 1


def test_what_came_along_may_be_pulled_again(job: Job) -> None:
    job.push(2.0)
    job.pull().fill_(9.0)
    assert job.pull().unique().tolist() == [4.0]


def test_what_came_along_counts_as_read_only_when_it_is_pulled(job: Job) -> None:
    table, rounds = job.tables[0], job.clients[0].rounds
    before = table.versions[0]
    job.push(2.0)
    rounds.settle(table)
    assert table.versions[0] == before
    job.pull()
    assert table.versions[0] == before + 1


def test_in_synchronous_rounds_no_update_of_others_is_ever_missed(job: Job) -> None:
    table, rounds = job.tables[0], job.clients[0].rounds
    for value in (2.0, 3.0, 4.0):
        job.push(value)
        rounds.settle(table)
        assert table.staleness == 0


def test_after_a_round_that_failed_the_weights_are_those_of_before(job: Job) -> None:
    job.clients[1].rounds.settle_all()
    job.push(2.0, 0)
    job.clients[1]._session.call(0, m.Abort(0, job.tables[1].round, "it raised", undo=False))
    with pytest.raises(RoundAbortedError):
        job.pull()
    assert job.pull().unique().tolist() == [2.0]
    assert job.num_pulls == 1


def test_after_a_push_that_could_not_be_sent_the_weights_are_read_anew(job: Job) -> None:
    def loses(body: m.RequestBody) -> bool:
        if is_commit(body):
            job.line.loses = lambda _: False
            raise KVStoreError("no way out")
        return False

    job.line.loses = loses
    with pytest.raises(KVStoreError, match="no way out"):
        job.push(2.0, 0)
    assert job.pull().unique().tolist() == [2.0]
    assert job.num_pulls == 1


def test_a_table_that_comes_along_may_be_pulled_beside_one_that_does_not(job: Job) -> None:
    others = [client.register({"u": [TensorSpec("j", (NUMEL,), "float32")]})[0] for client in job.clients]
    for client, table in zip(job.clients, others, strict=True):
        client.rounds.start(Contribution([table], [{"float32": torch.full((NUMEL,), 5.0)}], None))
    job.push(2.0)
    found = [torch.zeros(NUMEL), torch.zeros(NUMEL)]
    job.clients[0].rounds.pull([others[0], job.tables[0]], [{"float32": one} for one in found])
    assert [one.unique().tolist() for one in found] == [[5.0], [4.0]]
