"""Tables that live on servers of this host are read there: equal rows, no memory of the worker's own."""

from __future__ import annotations

import gc
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvtrainer
from kvtrainer.errors import RowIdError, ServerUnreachableError
from kvtrainer.kvstore import DistKVStore
from tests.support.drawn_workers import on_two
from tests.support.limits import DEAD_AFTER
from tests.support.processes import Members, Processes, new_name
from tests.support.stores import Servers

SIZES, WIDTH = (300_000, 80_001), 16
"""Neither table of rows of 64 bytes ends where a page does."""
WAY = "auto"
"""Servers share memory whatever way the other tests take."""


class Worker:
    """A worker with two tables, whose batches are drawn by its rank; numbers of few bits, whose sums are exact."""

    def __init__(self, store: DistKVStore, rank: int, **options: Any) -> None:
        self.rank, self.step = rank, 0
        self.tables = [kvtrainer.RowSparseParameter((size, WIDTH), first(size)) for size in SIZES]
        rates = {"learning_rate": 1.0, "lazy_update": True}
        self.trainer = kvtrainer.Trainer(self.tables, "sgd", rates, kvstore=store, **options)

    def train(self, steps: int = 1) -> list[torch.Tensor]:
        """Steps; returns the rows of all batches, as the worker saw them."""
        seen = []
        for _ in range(steps):
            for at, table in enumerate(self.tables):
                ids, grads = batch(at, self.rank, self.step)
                rows = table.row_sparse_data(ids)
                (rows * grads).sum().backward()
                seen.append(rows.detach())
            self.trainer.step(1)
            self.step += 1
        return seen


def first(size: int) -> torch.Tensor:
    return torch.arange(size * WIDTH, dtype=torch.float32).remainder_(1024).view(size, WIDTH)


def batch(table: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = np.random.default_rng((table, rank, step))
    ids = torch.from_numpy(drawn.integers(0, SIZES[table], (20, 15)))
    ids[0, :5] = ids[1, :5] = torch.arange(5)
    return ids, torch.from_numpy(drawn.integers(-4, 5, (20, 15, WIDTH))).float()


def expected(rank: int, steps: int) -> list[torch.Tensor]:
    """The rows that a rank sees if the gradients of both ranks are subtracted from one table."""
    tables, seen = [first(size) for size in SIZES], []
    for step in range(steps):
        seen += [table[batch(at, rank, step)[0]] for at, table in enumerate(tables)]
        for at, table in enumerate(tables):
            for ids, grads in (batch(at, one, step) for one in range(2)):
                table.index_add_(0, ids.view(-1), -grads.view(-1, WIDTH))
    return seen


def mapped() -> list[dict[str, int]]:
    """What is mapped of servers' weights to be read alone: KiB by name."""
    gc.collect()  # or what earlier tests left would count, until it goes
    found, is_one = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            is_one = " r--p " in line and "memfd:kvstore-weights" in line
            found += [{}] if is_one else []
        elif is_one and line.endswith("kB"):
            name, value, _ = line.split()
            found[-1][name.rstrip(":")] = int(value)
    return found


def test_workers_read_rows_in_the_servers_memory_as_every_round_leaves_them(
    jobs: Servers, members: Members
) -> None:
    found = on_two(members, jobs.of(2), Worker, lambda worker: (worker.train(4), mapped(), worker))
    for rank, (seen, regions, _) in enumerate(found):
        assert all(map(torch.equal, seen, expected(rank, 4)))
        assert sum(one["Rss"] for one in regions) > 0
        assert not any(one["Private_Dirty"] for one in regions)


@pytest.mark.parametrize("way", ["copies", "tcp"])
def test_workers_that_ask_for_rows_get_the_same(
    jobs: Servers, members: Members, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "tcp":
        monkeypatch.setenv("KVSTORE_TRANSPORT", "tcp")
    before, servers = len(mapped()), jobs.of(2)
    for rank, (seen, _) in enumerate(
        on_two(members, servers, Worker, lambda worker: (worker.train(3), worker), zero_copy=way == "tcp")
    ):
        assert all(map(torch.equal, seen, expected(rank, 3)))
    assert len(mapped()) == before


def test_new_values_are_read_once_they_are_published(jobs: Servers, members: Members) -> None:
    def publish(worker: Worker) -> torch.Tensor:
        worker.train()
        if not worker.rank:
            worker.tables[1].copy_(torch.full((SIZES[1], WIDTH), 7.5))
        worker.trainer.set_data()
        return worker.tables[1].row_sparse_data(torch.tensor([3, 80_000, 3])).detach()

    for rows in on_two(members, jobs.of(2), Worker, publish):
        assert torch.equal(rows, torch.full((3, WIDTH), 7.5))


def test_a_worker_knows_the_version_of_rows_that_it_has_read(processes: Processes, members: Members) -> None:
    def count(worker: Worker) -> list[int]:
        versions = []
        for _ in range(3):
            worker.train()
            worker.tables[0].row_sparse_data([0])
            versions.append(worker.trainer.version)
        return versions

    servers = processes.servers(2)
    found = on_two(members, servers, Worker, count) + on_two(members, servers, Worker, count, zero_copy=False)
    assert found[0] == found[1] == found[2] == found[3]


def test_ids_whose_memory_is_used_again_before_the_backward_pass_have_their_gradients(
    processes: Processes, members: Members
) -> None:
    def train(worker: Worker) -> torch.Tensor:
        ids = torch.tensor([5, 1, 5])
        rows = worker.tables[0].row_sparse_data(ids)
        ids.fill_(9)
        rows.sum().backward()
        grad = worker.tables[0].grad
        assert grad is not None
        return grad._indices()[0]

    for ids in on_two(members, processes.servers(1), Worker, train):
        assert ids.tolist() == [1, 5]


def test_rows_can_be_read_after_a_server_was_killed_and_the_next_step_says_so(
    processes: Processes, members: Members
) -> None:
    servers = processes.servers(2)
    worker = Worker(members.join(servers, 0, 1, new_name(), dead_after=DEAD_AFTER), 0)
    worker.train(2)
    ids = torch.arange(0, SIZES[0], 777)
    before = worker.tables[0].row_sparse_data(ids).detach()
    servers[1].signal(signal.SIGKILL)
    servers[1].end()
    assert torch.equal(worker.tables[0].row_sparse_data(ids).detach(), before)
    with pytest.raises(ServerUnreachableError):
        worker.train()


def test_ids_that_a_table_has_not_are_refused(processes: Processes, members: Members) -> None:
    def ask(worker: Worker) -> list[str]:
        worker.train()
        texts = []
        for wrong in (SIZES[0], -1):
            with pytest.raises(RowIdError) as raised:
                worker.tables[0].row_sparse_data([0, wrong])
            texts.append(str(raised.value))
        return texts

    for high, low in on_two(members, processes.servers(1), Worker, ask):
        assert str(SIZES[0]) in high
        assert "-1" in low
