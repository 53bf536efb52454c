"""The verbs give the same bits in every store, for any number of servers, in any order of arrival.

Digests cover the weights after every step, so equal digests mean equal trajectories. Those of Trainers are in
`test_random_trajectories.py`.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.kvstore import DistKVStore
from tests.support.stores import Servers

STEPS = 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01, "wd": 0.01},
    "torch:AdamW": {"lr": 0.01, "weight_decay": 0.1},
}
KEYS = {"small": (2, 3), "odd": (7, 13), "sliced": (131, 257)}
"""One has nine slices."""

Pause = Callable[[], None]


def verbs(kv: Any, optimizer: str, ranks: list[int], pause: Pause) -> str:
    """Push the gradients of `ranks`, as replicas if several, and pull, step by step, with a changing rate."""
    rule = kvtrainer.optimizer.create(optimizer, **OPTIMIZERS[optimizer], rescale_grad=1 / 3)
    kv.init(list(KEYS), [torch.randn(shape, generator=_generator(-1, 0)) for shape in KEYS.values()])
    kv.set_optimizer(rule)
    digest = hashlib.sha256()
    for step in range(STEPS):
        rule.set_learning_rate(0.05 / (step + 1))
        pause()
        kv.push(list(KEYS), [[gradient(key, step, rank) for rank in ranks] for key in KEYS])
        _add(digest, _pulled(kv))
    return digest.hexdigest()


def gradient(key: str, step: int, rank: int) -> Tensor:
    """A worker's gradient of one key; of very unequal sizes, so that sums depend on their order."""
    generator = _generator(step, rank)
    shape = KEYS[key]
    return torch.randn(shape, generator=generator) * 10 ** (3 * torch.rand(shape, generator=generator))


def _pulled(kv: Any) -> list[Tensor]:
    outs = [torch.empty(shape) for shape in KEYS.values()]
    kv.pull(list(KEYS), out=outs)
    return outs


def _add(digest: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * (step + 1) + rank)


def _pauses(seed: int) -> Pause:
    """Waits of up to 10 ms that make the ranks arrive in ever other orders."""
    chance = random.Random(seed)
    return lambda: time.sleep(chance.uniform(0.0, 0.01))


SERVERS = (1, 2, 3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_verbs_give_workers_the_bits_of_replicas(jobs: Servers, optimizer: str) -> None:
    ends: set[str] = set()
    for count, again in ((1, 0), (2, 1), (3, 0), (3, 1)):

        def body(kv: DistKVStore, rank: int, again: int = again) -> str:
            return verbs(kv, optimizer, [rank], _pauses(10 * again + rank))

        ends.update(jobs.results(3, count, body))
    local = kvtrainer.kvstore.create("local")
    assert ends == {verbs(local, optimizer, [0, 1, 2], lambda: None)}


@pytest.mark.parametrize("count", SERVERS)
def test_a_sum_is_the_left_fold_in_rank_order(jobs: Servers, count: int) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        kv.init(list(KEYS), [torch.zeros(shape) for shape in KEYS.values()])
        _pauses(3 - rank)()
        kv.push(list(KEYS), [gradient(key, 0, rank) for key in KEYS])
        return _pulled(kv)

    for seen in jobs.results(3, count, body):
        for key, found in zip(KEYS, seen, strict=True):
            first, second, third = (gradient(key, 0, rank) for rank in range(3))
            assert torch.equal(found, (first + second) + third), key


def test_the_sums_would_differ_in_another_order() -> None:
    first, second, third = (gradient("sliced", 0, rank) for rank in range(3))
    assert not torch.equal((first + second) + third, first + (second + third))


def test_the_biggest_key_lies_on_all_three_servers() -> None:
    plan = make_plan([TensorSpec("sliced", KEYS["sliced"], "float32")], 3)
    assert {slice_.server for slice_ in plan.slices} == {0, 1, 2}
