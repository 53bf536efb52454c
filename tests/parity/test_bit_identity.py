"""float32 runs give the same bits in every store, for any number of servers, in any order of arrival.

Digests cover the weights after every step, so equal digests mean equal trajectories. Each worker computes on one
thread, so that the forward and backward passes themselves repeat bit for bit.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.kvstore import DistKVStore
from tests.support.pairwise import pairwise
from tests.support.stores import Servers

STEPS = 5
BATCH = 8
LAYERS = (21, 64, 257, 5)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01, "wd": 0.01},
    "torch:AdamW": {"lr": 0.01, "weight_decay": 0.1},
}
KEYS = {"small": (2, 3), "odd": (7, 13), "sliced": (131, 257)}
"""Keys of the runs without a Trainer; "sliced" has nine slices."""

Pause = Callable[[], None]


def train(optimizer: str, rank: int, workers: int, kvstore: Any, in_store: bool | None, pause: Pause) -> str:
    torch.set_num_threads(1)  # holds for this thread alone
    net = nn.Sequential(
        *(nn.Linear(*LAYERS[:2]), nn.Tanh(), nn.Linear(*LAYERS[1:3]), nn.Tanh(), nn.Linear(*LAYERS[2:]))
    )
    chance = _generator(-2, 0)
    for p in net.parameters():
        nn.init.uniform_(p, -0.15, 0.15, generator=chance)
    digest = hashlib.sha256()
    trainer = kvtrainer.Trainer(
        net.named_parameters(), optimizer, OPTIMIZERS[optimizer], kvstore, update_on_kvstore=in_store
    )
    for step in range(STEPS):
        trainer.set_learning_rate(0.05 / (step + 1))
        x = torch.randn(BATCH, LAYERS[0], generator=_generator(step, rank))
        net(x).square().sum().backward()
        pause()
        trainer.step(3 * BATCH * workers)
        _add(digest, net.parameters())
    return digest.hexdigest()


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


def _no_pause() -> None:
    pass


SERVERS = (1, 2, 3)
SITES = (True, False)


def on_servers(
    jobs: Servers, workers: int, body: Callable[[DistKVStore, int, Pause, bool], str], sites: Sequence[bool]
) -> set[str]:
    """What all workers found with every number of servers and every site, at one and at other times of arrival."""
    found: set[str] = set()
    for count, again, site in pairwise(SERVERS, (0, 1), sites):
        found.update(
            jobs.results(
                workers,
                count,
                lambda kv, rank, again=again, site=site: body(kv, rank, _pauses(10 * again + rank), site),
            )
        )
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_workers_get_the_same_bits_whatever_the_store_the_site_and_the_arrival(
    jobs: Servers, optimizer: str
) -> None:
    ends = {}
    for workers in (1, 3):

        def body(kv: DistKVStore, rank: int, pause: Pause, site: bool, w: int = workers) -> str:
            return train(optimizer, rank, w, kv, site, pause)

        ends[workers] = on_servers(jobs, workers, body, SITES)
    # One process: in place by three names, an engine with and without.
    places: list[tuple[Any, bool | None]] = [(None, None), ("local", None), ("device", None)]
    places += [(kvtrainer.kvstore.create("local"), site) for site in SITES]
    ends[1] |= {train(optimizer, 0, 1, *place, _no_pause) for place in places}
    assert [len(found) for found in ends.values()] == [1, 1]
    assert ends[1] != ends[3]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workers", [1, 3])
def test_the_verbs_of_every_store_give_the_same_bits_to_workers_as_to_replicas_in_one_process(
    jobs: Servers, workers: int, optimizer: str
) -> None:
    ends = on_servers(jobs, workers, lambda kv, rank, pause, _: verbs(kv, optimizer, [rank], pause), [True])
    local = kvtrainer.kvstore.create("local")
    assert ends == {verbs(local, optimizer, [*range(workers)], _no_pause)}


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


def test_the_digests_tell_optimizers_apart() -> None:
    ends = {train(optimizer, 0, 1, None, None, _no_pause) for optimizer in OPTIMIZERS}
    assert len(ends) == len(OPTIMIZERS)


@pytest.mark.parametrize("shapes", [KEYS, {"weight": (LAYERS[2], LAYERS[1])}], ids=["verbs", "trainer"])
def test_the_biggest_key_lies_on_all_three_servers(shapes: dict[str, tuple[int, ...]]) -> None:
    key = max(shapes, key=lambda name: shapes[name][0] * shapes[name][-1])
    plan = make_plan([TensorSpec(key, shapes[key], "float32")], 3)
    assert {piece.server for piece in plan.slices} == {0, 1, 2}
