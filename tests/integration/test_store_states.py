"""Optimizer state of a store's own keys: saved by one worker, loaded by all, whatever the number of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtrainer import kvstore
from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.kvstore import DistKVStore
from kvtrainer.lr_scheduler import FactorScheduler
from kvtrainer.optimizer import create
from tests.support.stores import Servers

SHAPES = {"big": (90, 301), "small": (3,)}


def grads(step: int, rank: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=gen) for shape in SHAPES.values()]


def steps(kv: Any, which: range, ranks: range) -> list[Tensor]:
    """Push for the given ranks in one (they are summed, as replicas), and pull."""
    outs = [torch.zeros(shape) for shape in SHAPES.values()]
    for step in which:
        kv.push(
            list(SHAPES), [list(parts) for parts in zip(*(grads(step, rank) for rank in ranks), strict=True)]
        )
    kv.pull(list(SHAPES), outs)
    return outs


def started(kv: Any, optimizer: str, values: list[Tensor] | None = None) -> Any:
    kv.set_optimizer(
        create(optimizer, learning_rate=0.1, **({"momentum": 0.9} if optimizer == "sgd" else {}))
    )
    kv.init(list(SHAPES), [torch.ones(shape) for shape in SHAPES.values()] if values is None else values)
    return kv


@pytest.mark.parametrize(("optimizer", "before", "after"), [("sgd", 2, 3), ("adam", 3, 1), ("lamb", 2, 3)])
def test_training_goes_on_as_if_never_interrupted(
    jobs: Servers, tmp_path: Path, optimizer: str, before: int, after: int
) -> None:
    file = tmp_path / "states"

    def first(kv: DistKVStore, rank: int) -> list[Tensor]:
        weights = steps(started(kv, optimizer), range(3), range(rank, rank + 1))
        if rank == 1:
            kv.save_optimizer_states(file)
        kv.barrier()
        return weights

    def second(kv: DistKVStore, rank: int) -> list[Tensor]:
        started(kv, optimizer, weights)
        kv.load_optimizer_states(file)
        return steps(kv, range(3, 5), range(rank, rank + 1))

    weights = jobs.results(2, before, first)[0]
    found = jobs.results(2, after, second)
    expected = steps(started(kvstore.create("local"), optimizer), range(5), range(2))
    for one in found:
        for a, b in zip(one, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dump_optimizer", [True, False])
def test_the_optimizers_numbers_come_along_if_they_were_dumped(tmp_path: Path, dump_optimizer: bool) -> None:
    first = started(kvstore.create("local"), "sgd")
    steps(first, range(1), range(1))
    first.save_optimizer_states(tmp_path / "states", dump_optimizer=dump_optimizer)
    second = kvstore.create("local")
    optimizer = create("sgd", learning_rate=0.5, momentum=0.9)
    second.set_optimizer(optimizer)
    second.init(list(SHAPES), [torch.ones(shape) for shape in SHAPES.values()])
    second.load_optimizer_states(tmp_path / "states")
    assert optimizer.learning_rate == (0.1 if dump_optimizer else 0.5)


def test_states_of_other_keys_or_of_another_optimizer_are_refused_with_every_difference(
    tmp_path: Path,
) -> None:
    first = started(kvstore.create("local"), "sgd")
    steps(first, range(1), range(1))
    first.save_optimizer_states(tmp_path / "states")
    second = kvstore.create("local")
    second.set_optimizer("adam")
    second.init(["big", "other"], [torch.ones(2), torch.ones(3)])
    with pytest.raises(StateMismatchError) as caught:
        second.load_optimizer_states(tmp_path / "states")
    for part in ("'sgd' in the file and 'adam' here", "lacks the keys 'other'", "has the keys 'small'",
                 "'big' has shape [90, 301] in the file and [2] here"):  # fmt: skip
        assert part in str(caught.value)


def test_without_an_optimizer_there_are_no_states(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="set_optimizer"):
        kvstore.create("local").save_optimizer_states(tmp_path / "states")


def test_a_scheduler_decides_the_rate_of_every_push_wherever_the_key_lives(
    jobs: Servers, tmp_path: Path
) -> None:
    def moves(kv: Any, rank: int = 0) -> list[float]:
        schedule = FactorScheduler(step=2, factor=0.5, base_lr=1.0)
        kv.set_optimizer(create("sgd", lr_scheduler=schedule))
        kv.init("w", torch.zeros(2))
        out, found = torch.zeros(2), []
        for _ in range(6):
            before = out.clone()
            kv.pushpull("w", torch.ones(2), out)
            found.append(float((before - out)[0]))
        return found

    # MXNet's trace for updates 1, 2, …
    expected = [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert moves(kvstore.create("local")) == expected
    assert jobs.results(1, 2, moves) == [expected]
