"""Stores of MXNet's other names on real servers: keys in any order, and many keys in one call, exactly.

The first is of MXNet's dist_device_sync_kvstore_custom.py, the second of ps-lite's test_kv_app.
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

SYNC_AND_ASYNC = ["dist_sync", "p3", "dist_async", "dist_ssp"]


def seen(tensors: list[Tensor]) -> list[float]:
    """The one value of all elements of all tensors, or all values that there are."""
    return sorted({value for tensor in tensors for value in tensor.unique().tolist()})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "type", ["dist_sync_device", "dist_device_sync", "p3", "dist_async_device", "dist_device_ssp"]
)
def test_keys_may_be_initialised_in_any_order_which_differs_between_workers(jobs: Servers, type: str) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        keys = list(range(9, -1, -1)) if rank == 0 else list(range(10))
        # Large enough for every key to lie on all servers.
        kv.init(keys, [torch.full((300, 100), float(key)) for key in keys])
        outs = [torch.empty(300, 100) for _ in range(10)]
        kv.pull(list(range(10)), out=outs)
        return [seen([out]) for out in outs]

    assert jobs.results(3, 3, body, type=type) == [[[float(key)] for key in range(10)]] * 3


@pytest.mark.parametrize("type", ["dist_sync_device", "p3"])
def test_workers_may_group_and_order_keys_differently(jobs: Servers, type: str) -> None:
    groups = ([[0, 1, 2, 3], [4]], [[4, 2], [0], [3, 1]], [[3], [2, 1, 0, 4]])
    shape = (300, 100)  # on all servers

    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        own, others = groups[rank], groups[(rank + 1) % 3]
        kv.init(list(range(5)), [torch.zeros(shape)] * 5)
        outs = {key: torch.empty(shape) for key in range(5)}
        for round_ in range(3):
            for keys in own:
                kv.push(keys, [torch.full(shape, float(10**rank * (key + round_))) for key in keys])
            for keys in others:
                kv.pull(keys, out=[outs[key] for key in keys])
        return [seen([outs[key]]) for key in range(5)]

    assert jobs.results(3, 3, body, type=type) == [[[111.0 * (key + 2)] for key in range(5)]] * 3


@pytest.mark.parametrize("type", SYNC_AND_ASYNC)
@pytest.mark.parametrize(
    ("count", "repeats"),
    [(100, 3), pytest.param(10_000, 50, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
)
def test_many_keys_in_one_call_are_exact(jobs: Servers, type: str, count: int, repeats: int) -> None:
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
