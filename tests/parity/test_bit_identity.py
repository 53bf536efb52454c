"""float32 runs give the same bits in every store, for any number of servers, in any order of arrival.

Digests cover the weights after every step, so equal digests mean equal trajectories. All of a process computes on one
thread, so that the forward and backward passes themselves repeat bit for bit.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.kvstore import KVStoreBase
from kvtrainer.kvstore.verbs import TableKVStore
from tests.support.jobs import Job, PartOfJob, Results

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


def run(rank: int, workers: int) -> Results:
    results: dict[str, Any] = {"sums": sums(rank, workers)}
    for optimizer in OPTIMIZERS:
        results[f"trainer {optimizer}"] = trainer_runs(optimizer, rank, workers)
        results[f"verbs {optimizer}"] = {
            "local": verbs(kvtrainer.kvstore.create("local"), optimizer, [*range(workers)], _no_pause),
            "dist_sync": verbs(kvtrainer.kvstore.create("dist_sync"), optimizer, [rank], _pauses(rank)),
        }
    return results


def trainer_runs(optimizer: str, rank: int, workers: int) -> dict[str, str]:
    """Digests of the same training on servers, twice at other times, and if alone in every other way too."""
    runs: dict[str, tuple[Any, bool | None, Pause]] = {
        f"dist_sync {in_store} {again}": ("dist_sync", in_store, _pauses(10 * again + rank))
        for in_store in (True, False)
        for again in (0, 1)
    }
    if workers == 1:
        runs |= {f"{store} in place": (store, None, _no_pause) for store in (None, "local", "device")}
        for in_store in (True, False):
            local = kvtrainer.kvstore.create("local")
            runs[f"local {in_store}"] = (local, in_store, _no_pause)
    return {name: _train(optimizer, rank, workers, *run) for name, run in runs.items()}


def _train(
    optimizer: str,
    rank: int,
    workers: int,
    kvstore: str | KVStoreBase | None,
    in_store: bool | None,
    pause: Pause,
) -> str:
    torch.manual_seed(7)
    first, second, third = (nn.Linear(LAYERS[i], LAYERS[i + 1]) for i in range(3))
    net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)
    digest = hashlib.sha256()
    options = OPTIMIZERS[optimizer]
    with kvtrainer.Trainer(
        net.named_parameters(), optimizer, options, kvstore=kvstore, update_on_kvstore=in_store
    ) as trainer:
        for step in range(STEPS):
            trainer.set_learning_rate(0.05 / (step + 1))
            x = torch.randn(BATCH, LAYERS[0], generator=_generator(step, rank))
            net(x).square().sum().backward()
            pause()
            trainer.step(3 * BATCH * workers)
            _add(digest, net.parameters())
    return digest.hexdigest()


def verbs(kv: KVStoreBase, optimizer: str, ranks: list[int], pause: Pause) -> str:
    """Push the gradients of `ranks`, as replicas if several, and pull, step by step, with a changing rate."""
    assert isinstance(kv, TableKVStore)
    rule = kvtrainer.optimizer.create(optimizer, **OPTIMIZERS[optimizer], rescale_grad=1 / 3)
    kv.init(list(KEYS), [torch.randn(shape, generator=_generator(-1, 0)) for shape in KEYS.values()])
    kv.set_optimizer(rule)
    digest = hashlib.sha256()
    for step in range(STEPS):
        rule.set_learning_rate(0.05 / (step + 1))
        pause()
        kv.push(list(KEYS), [[gradient(key, step, rank) for rank in ranks] for key in KEYS])
        _add(digest, _pulled(kv))
    kv.close()
    return digest.hexdigest()


def sums(rank: int, workers: int) -> dict[str, Tensor]:
    """Without an optimizer: what the servers make of everybody's gradient of step 0."""
    kv = kvtrainer.kvstore.create("dist_sync")
    assert isinstance(kv, TableKVStore)
    kv.init(list(KEYS), [torch.zeros(shape) for shape in KEYS.values()])
    _pauses(workers - rank)()
    kv.push(list(KEYS), [gradient(key, 0, rank) for key in KEYS])
    result = dict(zip(KEYS, _pulled(kv), strict=True))
    kv.close()
    return result


def gradient(key: str, step: int, rank: int) -> Tensor:
    """A worker's gradient of one key; of very unequal sizes, so that sums depend on their order."""
    generator = _generator(step, rank)
    shape = KEYS[key]
    return torch.randn(shape, generator=generator) * 10 ** (3 * torch.rand(shape, generator=generator))


def _pulled(kv: TableKVStore) -> list[Tensor]:
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

# One fixture runs three jobs.


@pytest.fixture(scope="module")
def alone(part_of_job: PartOfJob) -> list[Job]:
    """One worker, with every number of servers."""
    return [part_of_job("bits", 1, servers) for servers in SERVERS]


@pytest.fixture(scope="module")
def three(part_of_job: PartOfJob) -> list[Job]:
    """Three workers, with every number of servers."""
    return [part_of_job("bits", 3, servers) for servers in SERVERS]


def named(jobs: Iterable[Job], name: str) -> dict[str, str]:
    """The digests of one kind of run: by servers, rank and store."""
    return {
        f"{job.servers} servers, rank {rank}: {store}": digest
        for job in jobs
        for rank, digests in enumerate(job[name])
        for store, digest in digests.items()
    }


def assert_all_equal(digests: dict[str, str], count: int) -> None:
    assert len(digests) == count
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_gets_the_same_bits_from_every_store_and_update_site(
    alone: list[Job], optimizer: str
) -> None:
    # Servers: in the store or not, each twice. One process: in place by three names, an engine with and without.
    assert_all_equal(named(alone, f"trainer {optimizer}"), len(SERVERS) * (4 + 5))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_gets_the_same_bits_from_the_verbs_of_every_store(
    alone: list[Job], optimizer: str
) -> None:
    assert_all_equal(named(alone, f"verbs {optimizer}"), len(SERVERS) * 2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_workers_get_the_same_bits_whatever_the_servers_site_and_arrival(
    three: list[Job], optimizer: str
) -> None:
    assert_all_equal(named(three, f"trainer {optimizer}"), len(SERVERS) * 3 * 4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_replicas_in_one_process_give_the_bits_of_three_workers(
    three: list[Job], optimizer: str
) -> None:
    assert_all_equal(named(three, f"verbs {optimizer}"), len(SERVERS) * 3 * 2)


def test_a_sum_is_the_left_fold_in_rank_order(three: list[Job]) -> None:
    for key in KEYS:
        first, second, third = (gradient(key, 0, rank) for rank in range(3))
        expected = (first + second) + third
        for job in three:
            assert all(torch.equal(seen[key], expected) for seen in job["sums"]), (
                f"{key}, {job.servers} servers"
            )


def test_the_sums_would_differ_in_another_order() -> None:
    first, second, third = (gradient("sliced", 0, rank) for rank in range(3))
    assert not torch.equal((first + second) + third, first + (second + third))


def test_the_digests_tell_optimizers_and_worker_counts_apart(alone: list[Job], three: list[Job]) -> None:
    runs = [named(jobs, f"trainer {optimizer}") for jobs in (alone, three) for optimizer in OPTIMIZERS]
    assert len({digest for digests in runs for digest in digests.values()}) == 2 * len(OPTIMIZERS)


@pytest.mark.parametrize("shapes", [KEYS, {"weight": (LAYERS[2], LAYERS[1])}], ids=["verbs", "trainer"])
def test_the_biggest_key_lies_on_all_three_servers(shapes: dict[str, tuple[int, ...]]) -> None:
    key = max(shapes, key=lambda name: shapes[name][0] * shapes[name][-1])
    plan = make_plan([TensorSpec(key, shapes[key], "float32")], 3)
    assert {piece.server for piece in plan.slices} == {0, 1, 2}
