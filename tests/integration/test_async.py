"""Contributions that count one by one, on real servers: exact sums, own writes, versions, staleness.

In the contract each worker owns a column of every key: it adds whole numbers there, and one to its clock. So what it
reads in its own column is known exactly, what it reads of the others may only grow, and in the end all sums are exact.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import DistKVStore
from tests.support.limits import LIMIT
from tests.support.sizes import sizes
from tests.support.stores import Servers

SHAPES = {"small": (3,), "sliced": (300, 200)}
ADD = {"learning_rate": -1.0}
"""For the optimizer 'test': w += g."""


def started(kv: DistKVStore, value: float = 1.0) -> dict[str, torch.Tensor]:
    kv.set_optimizer(kvtrainer.optimizer.create("test", **ADD))
    kv.init(list(SHAPES), [torch.full(shape, value) for shape in SHAPES.values()])
    return {key: torch.empty(shape) for key, shape in SHAPES.items()}


def pulled(kv: DistKVStore, out: dict[str, torch.Tensor]) -> list[float]:
    kv.pull(list(out), list(out.values()))
    return [value for tensor in out.values() for value in tensor.unique().tolist()]


def test_with_priorities_every_push_counts_exactly_once_too(
    jobs: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMLC_PS_VAN_TYPE", "p3")
    monkeypatch.setenv("DMLC_PS_WATER_MARK", "1")

    def body(kv: DistKVStore, rank: int) -> list[float]:
        out = started(kv)
        for _ in range(10):
            for priority, (key, tensor) in enumerate(out.items()):
                kv.push(key, torch.full_like(tensor, rank + 1.0), priority=-priority)
        kv.barrier()
        return pulled(kv, out)

    assert jobs.results(2, 2, body, type="dist_async") == [[31.0, 31.0]] * 2


def test_a_push_without_an_optimizer_is_refused_before_anything_is_sent(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        kv.init("w", torch.zeros(3))
        with pytest.raises(ConfigurationError, match="needs an optimizer"):
            kv.push("w", torch.ones(3))
        return kv.server_stats()[0]["tables"][0]["version"]

    assert jobs.results(1, 1, body, type="dist_async") == [0]


def test_versions_count_updates_and_staleness_those_of_others(jobs: Servers) -> None:
    turns = [threading.Barrier(2, timeout=LIMIT) for _ in range(3)]

    def body(kv: DistKVStore, rank: int) -> tuple[int, int]:
        out = started(kv)
        kv.pull("small", out["small"])
        turns[0].wait()
        for _ in range(3 if rank == 1 else 0):
            kv.pushpull("small", torch.ones(3), out["small"])
        turns[1].wait()
        if rank == 0:
            kv.push("small", torch.ones(3))
        turns[2].wait()
        return kv.version("small"), kv.staleness("small")

    # Rank 0 has read version 0 only, and three updates came before its own.
    assert jobs.results(2, 1, body, type="dist_async") == [(0, 3), (3, 0)]


def test_the_learning_rate_shrinks_with_the_staleness_where_that_is_asked_for(jobs: Servers) -> None:
    turns = [threading.Barrier(2, timeout=LIMIT) for _ in range(3)]

    def body(kv: DistKVStore, rank: int) -> float:
        out = started(kv)
        kv.pull("small", out["small"])
        turns[0].wait()
        for _ in range(4 if rank == 1 else 0):
            kv.pushpull("small", torch.ones(3), out["small"])
        turns[1].wait()
        if rank == 0:
            kv.pushpull("small", torch.ones(3), out["small"])
        turns[2].wait()
        return out["small"][0].item()

    # Four fresh updates of one, then one that is four updates old.
    assert jobs.results(2, 1, body, type="dist_async", scale_lr_by_staleness=True) == [5.25, 5.0]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_read_waits_for_a_worker_that_is_too_far_behind(jobs: Servers, staleness: int) -> None:
    ahead = threading.Event()

    def body(kv: DistKVStore, rank: int) -> list[float]:
        out = started(kv)
        if rank == 1:
            assert ahead.wait(LIMIT)
            kv.push("small", torch.ones(3))
            return []
        seen = []
        for at in range(staleness + 1):
            if at == staleness:
                ahead.set()
            kv.pushpull("small", torch.ones(3), out["small"])
            seen.append(out["small"][0].item())
        return seen

    seen = jobs.results(2, 2, body, type="dist_ssp", staleness=staleness)[0]
    assert seen == [2.0 + at for at in range(staleness)] + [3.0 + staleness]


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


def check_contract(jobs: Servers, type: str, workers: int, count: int, pushes: int, **options: Any) -> None:
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


@pytest.mark.parametrize(
    ("type", "workers", "pushes", "options"),
    [
        ("dist_async", 8, 100, {}),
        ("dist_ssp", 4, 100, {"staleness": 0}),
        ("dist_ssp", 4, 100, {"staleness": 3}),
        pytest.param("dist_async", 8, 2000, {}, marks=pytest.mark.full),
        pytest.param("dist_ssp", 8, 2000, {"staleness": 4}, marks=pytest.mark.full),
    ],
)
def test_of_many_pushes_every_sum_is_exact_and_nobody_reads_weights_staler_than_the_bound(
    jobs: Servers, type: str, workers: int, pushes: int, options: dict[str, int]
) -> None:
    check_contract(jobs, type, workers, 2, pushes, **options)


@pytest.mark.parametrize("type", ["dist_async", "dist_ssp"])
@pytest.mark.parametrize("size", sizes((1, 3), (2, 1), (3, 2)))
def test_the_contract_holds_for_any_number_of_workers_and_servers(
    jobs: Servers, type: str, size: tuple[int, int]
) -> None:
    check_contract(jobs, type, *size, 60)
