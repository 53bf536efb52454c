"""Optimizers that need whole keys on real servers: keys that are spread over them are brought together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.optimizer import create
from kvtrainer.errors import ConfigurationError, PlanMismatchError
from kvtrainer.kvstore import DistKVStore
from kvtrainer.kvstore.verbs import KVStoreVerbs
from tests.integration import raising_optimizer
from tests.support.processes import raised
from tests.support.stores import Servers, servers

SHAPES = {"small": (3,), "sliced": (150, 200), "odd": (7, 13), "other": (100, 211)}
ROUNDS = 3
WORKERS = 2


@pytest.fixture(scope="module")
def jobs() -> Iterator[Servers]:
    with servers("--import", raising_optimizer.__name__) as started:
        yield started


def normal(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def pulled(kv: KVStoreVerbs) -> list[Tensor]:
    outs = [torch.empty(shape) for shape in SHAPES.values()]
    kv.pull(list(SHAPES), out=outs)
    return outs


def lamb() -> Any:
    return create("lamb", learning_rate=0.1, rescale_grad=0.5)


def expected() -> list[Tensor]:
    """One process with both workers' gradients as replicas; one round without an optimizer comes first."""
    kv = kvtrainer.kvstore.create("local")
    assert isinstance(kv, KVStoreVerbs)
    kv.init(list(SHAPES), normal(0))
    kv.set_optimizer(lamb())
    for round_ in range(ROUNDS):
        replicas = [normal(10 * round_ + rank + 1) for rank in range(WORKERS)]
        kv.push(list(SHAPES), [list(pair) for pair in zip(*replicas, strict=True)])
    return pulled(kv)


@pytest.mark.parametrize("when", ["before init", "after init", "between"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_lamb_gives_the_bits_of_one_process_whenever_it_is_set(jobs: Servers, count: int, when: str) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        names, values = list(SHAPES), normal(0)
        if when == "before init":
            kv.set_optimizer(lamb())
        first = names if when != "between" else names[:2]
        kv.init(first, values[: len(first)])
        if when != "before init":
            kv.set_optimizer(lamb())
        if when == "between":
            kv.init(names[2:], values[2:])
        assert all(torch.equal(*pair) for pair in zip(pulled(kv), values, strict=True))
        for round_ in range(ROUNDS):
            kv.push(names, normal(10 * round_ + rank + 1))
        return pulled(kv)

    want = expected()
    for got in jobs.results(WORKERS, count, body):
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_keys_that_were_trained_before_keep_the_values_that_they_have_then(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        kv.init(list(SHAPES), normal(0))
        kv.push(list(SHAPES), normal(rank + 1))  # without an optimizer the sum replaces the value
        kv.set_optimizer(lamb())
        return pulled(kv)

    want = [first + second for first, second in zip(normal(1), normal(2), strict=True)]
    for got in jobs.results(WORKERS, 3, body):
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_what_compression_held_back_of_a_key_survives_when_it_is_brought_together(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.init("k", torch.zeros(150, 200))
        kv.push("k", torch.full((150, 200), 0.3))
        kv.set_optimizer(raising_optimizer.RaisesOnHugeMeans())
        out = torch.empty(150, 200)
        kv.pushpull("k", torch.full((150, 200), 0.2), out=out)
        distinct: list[float] = out.unique().tolist()
        return distinct

    assert jobs.results(WORKERS, 3, body) == [[-1.0]] * WORKERS


def test_a_worker_that_does_not_set_the_optimizer_makes_the_others_round_fail_by_name(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> None:
        if rank == 0:
            kv.set_optimizer(lamb())
        kv.init("k", torch.zeros(150, 200))

    outcomes = jobs.everybody(WORKERS, 2, body)
    texts = raised([outcome for outcome in outcomes if outcome is not None], PlanMismatchError)
    assert texts
    for text in texts:
        assert "slices of keys" in text, text
        assert "set the same one on every worker" in text, text


def test_a_table_that_stays_spread_refuses_the_update_for_all_and_keeps_its_values(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> tuple[str, Tensor]:
        kv.init("k", torch.ones(150, 200))
        if rank == 0:
            kv._client.set_optimizer(lamb().spec())  # a client that does not know what this optimizer needs
        kv.barrier()
        out = torch.empty(150, 200)
        with pytest.raises(ConfigurationError) as caught:
            kv.pushpull("k", torch.ones(150, 200), out=out)
        kv.pull("k", out=out)
        return str(caught.value), out

    for text, out in jobs.results(WORKERS, 3, body):
        assert "'lamb' needs whole keys, but 'k' is spread over 3 servers" in text
        assert torch.equal(out, torch.ones(150, 200))
