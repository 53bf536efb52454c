"""What a server remembers of the weights that ranks have read, for optimizers that make up for delays."""

from __future__ import annotations

import pytest
import torch

import kvtrainer
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.rounds import Mode
from kvstore_server.optimizer import spec_for_store
from kvstore_server.plan import TensorSpec
from kvtrainer.client.contribution import Contribution
from tests.support.switchboard import connected, play

NUMEL, LAMDA = 1 << 16, 0.5


class Job:
    """Two ranks of a table of ones; the first one has its first weights, and the second one all that it has made."""

    def __init__(self, max_memory: int = 0) -> None:
        self.engine = Engine(EngineConfig(max_memory=max_memory))
        self.clients = connected([self.engine], 2, mode=Mode("async"))
        optimizer = kvtrainer.optimizer.create("dcasgd", learning_rate=1.0, lamda=LAMDA)
        for client in self.clients:
            client.set_optimizer(spec_for_store(optimizer))
        self.tables = [
            client.register({"t": [TensorSpec("k", (NUMEL,), "float32")]})[0] for client in self.clients
        ]
        self.outs = [{"float32": torch.zeros(NUMEL)} for _ in self.tables]
        first = [{"float32": torch.ones(NUMEL)}]
        rows = zip(self.tables, (first, None), self.outs, strict=True)
        play(self.clients, [Contribution([table], values, [out]) for table, values, out in rows])

    def step(self, rank: int, gradient: float) -> float:
        """Contribute, and read the weights, all of which are equal."""
        values = [{"float32": torch.full((NUMEL,), gradient)}]
        rounds = self.clients[rank].rounds
        rounds.wait(rounds.start(Contribution([self.tables[rank]], values, [self.outs[rank]])))
        return self.outs[rank]["float32"][0].item()

    def look(self) -> None:
        self.clients[0].rounds.look(self.tables[0], {"float32": torch.empty(NUMEL)})

    def pull(self) -> None:
        self.clients[0].rounds.pull([self.tables[0]], [self.outs[0]])

    @property
    def kept(self) -> list[list[int]]:
        """The versions of the weights that are kept for each rank."""
        reads = self.engine.namespaces["job"].tables[0].unit.reads
        return [[one.version for one in reads[rank]] for rank in range(2)]

    @property
    def claimed(self) -> int:
        return self.engine.budget.used


def compensated(weight: float, read: float, gradient: float) -> float:
    return weight - (gradient + LAMDA * gradient**2 * (weight - read))


def test_a_gradient_is_compensated_from_the_weights_that_its_commit_names() -> None:
    for was_pulled, read in ((False, 1.0), (True, 0.0)):
        job = Job()
        weight = job.step(1, 1.0)
        if was_pulled:
            job.pull()
        for _ in range(3):
            weight = job.step(1, 1.0)
        job.look()
        assert job.step(0, 0.5) == compensated(weight, read, 0.5)


def test_of_many_looks_no_more_than_two_are_kept_until_the_next_commit() -> None:
    job = Job()
    for _ in range(4):
        job.look()
        job.step(1, 1.0)
        job.look()
    assert job.kept == [[0, 3, 4], [4]]
    job.step(0, 1.0)
    assert job.kept == [[5], [4]]


def test_what_is_kept_of_pulls_is_claimed_once_and_given_back_with_the_namespace() -> None:
    job = Job()
    before, found = job.claimed, list[int]()
    for _ in range(3):
        for _ in range(3):
            job.step(1, 1.0)
            job.look()
        job.step(0, 1.0)
        found.append((job.claimed - before) // (4 * NUMEL))
    assert found == [2, 2, 2]
    for client in job.clients:
        client.close()
    assert job.claimed == 0


@pytest.mark.parametrize("was_pulled", [False, True])
def test_without_memory_for_more_what_was_sent_last_counts(was_pulled: bool) -> None:
    job = Job(max_memory=Job().claimed)
    weight = [job.step(1, 1.0) for _ in range(3)][-1]
    job.step(0, 0.0)
    weight = [job.step(1, 1.0) for _ in range(3)][-1]
    if was_pulled:
        job.pull()
    assert job.step(0, 0.5) == compensated(weight, weight if was_pulled else weight + 3.0, 0.5)
