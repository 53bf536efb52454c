"""Jobs with backup workers: each step takes the gradients of those that are fast enough, and has the bits of a loop
with these.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import DistKVStore
from tests.integration.test_elastic import first_weights, gradient, plain_loop, sgd
from tests.support.cluster_work import train_with_pauses
from tests.support.processes import Process, eventually, new_name, together
from tests.support.stores import Servers, servers

STEPS = 15
HELD = {2: (3, 7), 1: (10, 12)}
"""Rank → the first step that it is late for, and the one until whose end it is."""


def adam(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, lr=0.01)


class BackupJob:
    """Three workers as threads of the test, of which each step takes two; HELD says who is late when."""

    def __init__(self, places: Sequence[Process], **options: Any) -> None:
        self.addresses, self.options = [one.address for one in places], options
        self.name = new_name()
        self.done = [threading.Event() for _ in range(STEPS)]
        self.members: list[set[int]] = [set() for _ in range(STEPS)]
        self.last: dict[int, Mapping[str, Tensor]] = {}
        self.left_out: dict[int, int] = {}

    def store(self, rank: int, **options: Any) -> DistKVStore:
        return DistKVStore(
            "dist_sync", rank=rank, num_workers=3, servers=self.addresses, namespace=self.name, elastic="1..3",
            timeout=30.0, **{"backup_workers": 1, **options},
        )  # fmt: skip

    def run(self, optimizer: str, hypers: dict[str, Any]) -> None:
        for outcome in together(*[lambda rank=rank: self.live(rank, optimizer, hypers) for rank in range(3)]):
            if isinstance(outcome, BaseException):
                raise outcome

    def live(self, rank: int, optimizer: str, hypers: dict[str, Any]) -> None:
        weights = {key: torch.nn.Parameter(value) for key, value in first_weights().items()}
        store = self.store(rank)
        trainer = kvtrainer.Trainer(weights, optimizer, hypers, kvstore=store, **self.options)
        assert trainer.resume().round == trainer.round == 0
        while (step := trainer.round) < STEPS:
            first, last = HELD.get(rank, (STEPS, 0))
            if first <= step <= last:
                assert self.done[last].wait(30.0)
            assert trainer.members == (0, 1, 2)
            for key, grad in gradient({k: w.detach() for k, w in weights.items()}, rank, step).items():
                weights[key].grad = grad
            missed = trainer.num_left_out
            trainer.client_state = {"step": step}
            trainer.step()
            assert trainer.client_state == {"step": trainer.round - 1}
            if trainer.num_left_out == missed:
                assert trainer.round == step + 1
                self.members[step].add(rank)
            assert trainer.num_left_out - missed in (0, trainer.round - step)
            for event in self.done[: trainer.round] if rank == 0 else ():
                event.set()
        assert trainer.round == STEPS
        self.last[rank] = {key: w.detach().clone() for key, w in weights.items()}
        self.left_out[rank] = trainer.num_left_out
        trainer.close()
        store.close()


@pytest.fixture(scope="module")
def on_servers() -> Iterator[Servers]:
    with servers("--spread-from", "1") as started:
        yield started


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("name", "hypers", "by_torch"),
    [("torch:SGD", {"lr": 0.1, "momentum": 0.9}, sgd), ("torch:Adam", {"lr": 0.01}, adam)],
)
def test_a_worker_that_is_late_holds_nobody_up_and_takes_part_again(
    name: str,
    hypers: dict[str, Any],
    by_torch: Any,
    transport: str,
    num_servers: int,
    on_servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", transport)
    job = BackupJob(on_servers.of(num_servers))
    job.run(name, hypers)
    assert all(len(ranks) == 2 for ranks in job.members)
    assert job.members[3:8] == [{0, 1}] * 5
    assert job.members[10:13] == [{0, 2}] * 3
    assert job.left_out == {rank: sum([rank not in one for one in job.members]) for rank in range(3)}
    expected = plain_loop([sorted(ranks) for ranks in job.members], by_torch, None)[-1]
    for weights in job.last.values():
        for key, weight in expected.items():
            assert torch.allclose(weights[key], weight, rtol=0.0, atol=1e-6)
            assert torch.equal(weights[key], job.last[0][key])


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_processes_that_are_stopped_for_a_while_take_part_again(
    transport: str, num_servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", transport)
    flags = ["--spread-from", "1"]
    pauses = {3: (3, 10), 1: (12, 15)}
    with kvtrainer.local_cluster("2..4", num_servers, server_args=flags, backup_workers=1) as cluster:
        found = cluster.run(train_with_pauses, str(tmp_path), 20, pauses)
    members = [{rank for rank, (given, _, _) in enumerate(found) if step in given} for step in range(20)]
    assert all(len(ranks) == 3 for ranks in members)
    assert members[3:10] == [{0, 1, 2}] * 7
    assert members[12:15] == [{0, 2, 3}] * 3
    total = -sum([10.0**rank for ranks in members for rank in ranks])
    assert [weights for _, _, weights in found] == [{key: {total} for key in "abc"}] * 4
    assert sum([left_out for _, left_out, _ in found]) == 20

