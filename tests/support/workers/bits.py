"""Part of a job: float32 runs whose every step enters a digest; returns the digests under a name for each run.

All of a process computes on one thread, so that the forward and backward passes themselves repeat bit for bit.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer.kvstore import KVStoreBase
from kvtrainer.kvstore.verbs import TableKVStore
from tests.support.jobs import Results

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
