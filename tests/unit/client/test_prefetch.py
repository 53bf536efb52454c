"""Over a network, weights that a loop pulls after each of its pushes are requested with the push."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.rounds import ASYNC, SYNCHRONOUS, Mode
from kvstore_server.optimizer import create
from kvstore_server.plan import TensorSpec
from kvstore_server.protocol import messages as m
from kvtrainer.client.contribution import Contribution
from kvtrainer.errors import KVStoreError, RoundAbortedError
from tests.support.scripted import is_commit
from tests.support.switchboard import connected, line_of

NUMEL = 100


class Job:
    """Two workers on one server, where the sum replaces the weights; both have pushed three times, and rank 0 pulled
    after the second and the third.
    """

    def __init__(self, mode: Mode = SYNCHRONOUS) -> None:
        self.clients = connected([Engine(EngineConfig())], 2, mode=mode)
        for client in self.clients if not mode.is_sync else ():
            client.set_optimizer(create("sgd", learning_rate=-1.0, wd=0.0).spec())
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
        """The weights as a worker pulls them."""
        found = torch.zeros(NUMEL)
        self.clients[rank].rounds.pull([self.tables[rank]], [{"float32": found}])
        return found

    @property
    def wants(self) -> list[bool]:
        """Of each commit of rank 0, whether it requests weights."""
        commits = [body for _, body in self.line.sent if is_commit(body)]
        return [
            bool(body.commits[0, m.COMMIT_FLAGS] & m.WANTS_WEIGHTS)
            for body in commits
            if isinstance(body, m.Contribute)
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


def test_what_was_not_pulled_after_the_last_push_is_not_requested(job: Job) -> None:
    for value in (2.0, 3.0):
        job.push(value)
    assert job.wants == [True, False]
    assert job.pull().unique().tolist() == [6.0]
    assert job.num_pulls == 1


def test_what_came_with_a_push_may_be_pulled_again(job: Job) -> None:
    job.push(2.0)
    job.pull().fill_(9.0)
    assert job.pull().unique().tolist() == [4.0]


def test_what_came_with_a_push_counts_as_read_only_when_it_is_pulled(job: Job) -> None:
    table, rounds = job.tables[0], job.clients[0].rounds
    before = table.versions[0]
    job.push(2.0)
    rounds.wait_pending(table)
    assert table.versions[0] == before
    job.pull()
    assert table.versions[0] == before + 1


def test_in_synchronous_rounds_no_update_of_others_is_ever_missed(job: Job) -> None:
    table, rounds = job.tables[0], job.clients[0].rounds
    for value in (2.0, 3.0, 4.0):
        job.push(value)
        rounds.wait_pending(table)
        assert table.staleness == 0


def test_in_asynchronous_modes_a_pull_sees_what_others_pushed_before_it() -> None:
    job = Job(Mode(ASYNC))
    job.push(2.0, 0)
    job.clients[0].rounds.wait_pending(job.tables[0])
    before = job.pull()
    job.push(5.0, 1)
    job.clients[1].rounds.wait_pending(job.tables[1])
    assert (job.pull() - before).unique().tolist() == [5.0]
    assert job.wants == [False]


def test_after_a_round_that_failed_the_weights_are_those_before_it(job: Job) -> None:
    job.clients[1].rounds.wait_all_pending()
    job.push(2.0, 0)
    job.clients[1]._session.call(0, m.Abort(0, job.tables[1].round, "it raised", undo=False))
    with pytest.raises(RoundAbortedError):
        job.pull()
    assert job.pull().unique().tolist() == [2.0]
    assert job.num_pulls == 1


def test_after_a_push_that_could_not_be_sent_the_weights_are_requested_again(job: Job) -> None:
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


def test_after_a_vetoed_round_the_weights_are_requested_again(job: Job) -> None:
    job.push(2.0, 0)
    veto = Contribution([job.tables[1]], None, None, veto=True)
    job.clients[1].rounds.start(veto)
    assert job.pull().unique().tolist() == [2.0]
    assert job.wants == [True]
    assert job.num_pulls == 1


def test_a_table_whose_weights_came_may_be_pulled_beside_one_whose_did_not(job: Job) -> None:
    others = [client.register({"u": [TensorSpec("j", (NUMEL,), "float32")]})[0] for client in job.clients]
    for client, table in zip(job.clients, others, strict=True):
        client.rounds.start(Contribution([table], [{"float32": torch.full((NUMEL,), 5.0)}], None))
    job.push(2.0)
    found = [torch.zeros(NUMEL), torch.zeros(NUMEL)]
    job.clients[0].rounds.pull([others[0], job.tables[0]], [{"float32": one} for one in found])
    assert [one.unique().tolist() for one in found] == [[5.0], [4.0]]
