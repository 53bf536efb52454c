"""The contract of "dist_async" and "dist_ssp" with whole numbers: every contribution counts exactly once, in any order.

Each worker owns a column of every key: it adds whole numbers there, and one to its clock. So what it reads in its own
column is known exactly, what it reads of the others may only grow, and in the end all sums are exact.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.kvstore import DistKVStore
from tests.support.sizes import sizes
from tests.support.stores import Servers

ADD = {"learning_rate": -1.0}
"""For the optimizer 'test': w += g."""
CLOCK, SUM = 0, 1
"""The rows of the key "small"."""
PUSHPULL, PUSH_THEN_PULL = READING = 0, 2
"""Of every four contributions, which are read back, and how."""
SLICED_EVERY = 9
"""How many pushes of the small key come for one of the key that lies on all servers."""


class Worker:
    """One worker's pushes, and what it has to find in what it reads."""

    def __init__(self, kv: DistKVStore, pushes: int, bound: int | None) -> None:
        self.kv, self.pushes, self.bound = kv, pushes, bound
        self.random = torch.Generator().manual_seed(1000 + kv.rank)
        self.shapes = {"small": (2, kv.num_workers), "sliced": (256, 8 * kv.num_workers)}
        self.own = {key: torch.zeros(shape) for key, shape in self.shapes.items()}
        self.seen = {key: torch.zeros(shape) for key, shape in self.shapes.items()}
        kv.set_optimizer(kvtrainer.optimizer.create("test", **ADD))
        kv.init(list(self.shapes), list(self.own.values()))

    def run(self) -> dict[str, Tensor]:
        for at in range(self.pushes):
            keys = list(self.shapes) if at % SLICED_EVERY == 0 else ["small"]
            self.push(keys, at % 4)
            if at % 4 in READING:
                self.check(keys)
        self.kv.barrier()
        self.kv.pull(list(self.seen), list(self.seen.values()))
        return {"own sliced": self.own["sliced"], **self.seen}

    def push(self, keys: list[str], turn: int) -> None:
        """One contribution to each key; read back by the same message, by another one, or not at all."""
        values = [self.contribution(key) for key in keys]
        outs = [torch.empty(self.shapes[key]) for key in keys]
        if turn == PUSHPULL:
            self.kv.pushpull(keys, values, outs)
        else:
            self.kv.push(keys, values)
        if turn == PUSH_THEN_PULL:
            self.kv.pull(keys, outs)
        for key, value, out in zip(keys, values, outs, strict=True):
            self.own[key] += value
            if turn in READING:
                assert bool((out >= self.seen[key]).all()), f"{key} went backwards"
                self.seen[key] = out

    def contribution(self, key: str) -> Tensor:
        value = torch.zeros(self.shapes[key])
        value[:, self.mine(key)] = torch.randint(0, 8, (1,), generator=self.random).float()
        if key == "small":
            value[CLOCK, self.kv.rank] = 1.0
        return value

    def mine(self, key: str) -> slice:
        width = self.shapes[key][1] // self.kv.num_workers
        return slice(self.kv.rank * width, (self.kv.rank + 1) * width)

    def check(self, keys: list[str]) -> None:
        for key in keys:
            assert torch.equal(self.seen[key][:, self.mine(key)], self.own[key][:, self.mine(key)])
        if self.bound is not None:
            clocks = self.seen["small"][CLOCK]
            assert float(clocks.min()) >= float(clocks[self.kv.rank]) - self.bound


def run(jobs: Servers, type: str, workers: int, count: int, pushes: int, **options: Any) -> None:
    def body(kv: DistKVStore, rank: int) -> dict[str, Tensor]:
        return Worker(kv, pushes, options.get("staleness")).run()

    results = jobs.results(workers, count, body, type=type, **options)
    everybody = sum(one["own sliced"] for one in results)
    for one in results:
        assert one["small"][CLOCK].tolist() == [float(pushes)] * workers
        assert torch.equal(one["small"], results[0]["small"])
        assert torch.equal(one["sliced"], everybody)
    totals = [_random_total(rank, workers, pushes) for rank in range(workers)]
    assert results[0]["small"][SUM].tolist() == totals


def _random_total(rank: int, workers: int, pushes: int) -> float:
    """The sum of what a rank pushes to "small", out of its random numbers alone."""
    random = torch.Generator().manual_seed(1000 + rank)
    total = 0.0
    for at in range(pushes):
        total += float(torch.randint(0, 8, (1,), generator=random))
        if at % SLICED_EVERY == 0:
            torch.randint(0, 8, (1,), generator=random)
    return total


@pytest.mark.parametrize("pushes", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_eight_workers_push_many_times_each_and_every_sum_is_exact(jobs: Servers, pushes: int) -> None:
    run(jobs, "dist_async", 8, 2, pushes)


@pytest.mark.parametrize("staleness", [0, 3])
def test_nobody_ever_reads_weights_that_are_staler_than_the_bound(jobs: Servers, staleness: int) -> None:
    run(jobs, "dist_ssp", 4, 2, 200, staleness=staleness)


@pytest.mark.full
def test_eight_workers_within_a_bound_push_two_thousand_times_each(jobs: Servers) -> None:
    run(jobs, "dist_ssp", 8, 2, 2000, staleness=4)


@pytest.mark.parametrize("type", ["dist_async", "dist_ssp"])
@pytest.mark.parametrize("size", sizes((1, 3), (2, 1), (3, 2)))
def test_the_contract_holds_for_any_number_of_workers_and_servers(
    jobs: Servers, type: str, size: tuple[int, int]
) -> None:
    run(jobs, type, *size, 60)
