"""MXNet's closed forms for the stores that sum replicas first and for "p3", exactly, on real servers.

The numbers are those of MXNet's dist_device_sync_kvstore.py and dist_device_sync_kvstore_custom.py, with two replicas
in each worker, and of ps-lite's test_kv_app. S is the sum of what the workers push, 1 + 2 + … + W.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.kvstore import DistKVStore
from tests.support.limits import FOREVER
from tests.support.stores import Servers

CASES = [
    ("dist_sync", 2, 3),
    ("dist_sync_device", 1, 1),
    ("dist_device_sync", 3, 2),
    ("p3", 3, 2),
    *(pytest.param(type, 7, 3, marks=pytest.mark.full) for type in ("dist_sync_device", "p3")),
]
"""Names of stores, numbers of workers and servers."""
SYNC_AND_ASYNC = ["dist_sync", "p3", "dist_async", "dist_ssp"]
REPLICAS, RATE, REPEATS = 2, 2, 3
SHAPES = {1001: (2, 3), 1002: (300, 301), 1003: (2, 3), 1004: (300, 301)}
"""The first two are pushed and pulled, the others pushpulled."""


def replicas(value: float, shape: tuple[int, ...]) -> list[Tensor]:
    return [torch.full(shape, value) for _ in range(REPLICAS)]


def seen(tensors: list[Tensor]) -> list[float]:
    """The one value of all elements of all tensors, or all values that there are."""
    return sorted({value for tensor in tensors for value in tensor.unique().tolist()})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("type", "workers", "count"), CASES)
def test_replicas_of_all_workers_add_up_and_sums_in_place_do_not_accumulate(
    jobs: Servers, type: str, workers: int, count: int
) -> None:
    def body(
        kv: DistKVStore, rank: int
    ) -> tuple[str, list[list[float]], list[list[float]], list[list[float]]]:
        outs = [replicas(-1.0, (2, 3) if j % 40 else (70, 80)) for j in range(400)]
        kv.broadcast(
            list(range(400)), [torch.full_like(one[0], float(j)) for j, one in enumerate(outs)], outs
        )
        in_place, added = [], []
        for _ in range(REPEATS):
            values = replicas(rank + 1.0, (70, 80))
            kv.pushpull(40, values)
            in_place.append(seen(values))
        kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0, rescale_grad=float(RATE)))
        kv.init(list(SHAPES), [torch.ones(shape) for shape in SHAPES.values()])
        for _ in range(REPEATS):
            for key, shape in SHAPES.items():
                found = replicas(0.0, shape)
                if key in (1001, 1002):
                    kv.push(key, replicas(rank + 1.0, shape))
                    kv.pull(key, out=found)
                else:
                    kv.pushpull(key, replicas(rank + 1.0, shape), out=found)
                added.append(seen(found))
        return kv.type, [seen(out) for out in outs], in_place, added

    total = workers * (workers + 1) // 2 * REPLICAS
    sums = [[total * RATE * (i + 1) + 1.0] for i in range(REPEATS) for _ in SHAPES]
    expected = (type, [[float(j)] for j in range(400)], [[float(total)]] * REPEATS, sums)
    assert jobs.results(workers, count, body, type=type) == [expected] * workers


@pytest.mark.parametrize("type", ["dist_sync", "p3", "dist_async_device", "dist_device_ssp"])
def test_keys_may_be_initialised_in_any_order_which_differs_between_workers(jobs: Servers, type: str) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        keys = list(range(9, -1, -1)) if rank == 0 else list(range(10))
        # Large enough for every key to lie on all servers.
        kv.init(keys, [torch.full((300, 100), float(key)) for key in keys])
        outs = [torch.empty(300, 100) for _ in range(10)]
        kv.pull(list(range(10)), out=outs)
        return [seen([out]) for out in outs]

    assert jobs.results(3, 3, body, type=type) == [[[float(key)] for key in range(10)]] * 3


@pytest.mark.parametrize("type", SYNC_AND_ASYNC)
@pytest.mark.parametrize(
    ("count", "repeats"),
    [(100, 3), pytest.param(10_000, 50, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
)
def test_many_keys_in_one_call_are_pushed_and_pushpulled_exactly(
    jobs: Servers, type: str, count: int, repeats: int
) -> None:
    workers = 2
    is_sync = type in ("dist_sync", "p3")

    def values_of(rank: int) -> dict[int, Tensor]:
        """What a worker pushes: without rounds each pushes keys of its own, as ps-lite's test does."""
        random = torch.Generator().manual_seed(rank + 7)
        spread = (1 << 62) // count
        numbers = torch.randint(0, 1000, (count,), generator=random).float()
        return {spread * i + (0 if is_sync else rank): numbers[i : i + 1] for i in range(count)}

    def body(kv: DistKVStore, rank: int) -> tuple[bool, bool]:
        given = [values_of(other) for other in range(workers)]
        mine, keys = given[rank], list(given[rank])
        every = sorted({key for one in given for key in one})
        kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0))
        kv.init(every, [torch.zeros(1)] * len(every))
        each = torch.stack([torch.cat([one[key] for key in keys]) for one in given if keys[0] in one]).sum(0)
        for _ in range(repeats):
            kv.push(keys, list(mine.values()))
        outs = [torch.empty(1) for _ in keys]
        kv.pull(keys, out=outs)
        pushed = torch.equal(torch.cat(outs), each * repeats)
        for _ in range(repeats):
            kv.pushpull(keys, list(mine.values()), out=outs)
        return pushed, torch.equal(torch.cat(outs), each * 2 * repeats)

    options: dict[str, Any] = {} if type != "dist_ssp" else {"staleness": 2 * repeats}
    assert jobs.results(workers, 2, body, type=type, seconds=FOREVER, **options) == [(True, True)] * workers
