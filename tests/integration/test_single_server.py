"""Weights of a small Trainer lie on one of several servers of a host, those of a large one on all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvtrainer
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.rounds import SYNCHRONOUS
from kvstore_server.errors import PlanMismatchError, from_wire
from kvstore_server.plan import TensorSpec
from kvstore_server.protocol import messages as m
from kvtrainer.kvstore import DistKVStore
from tests.support.engines import EngineJob, client_of
from tests.support.stores import Servers, servers

LEAST = 64 << 10
"""Bytes from which on weights are spread."""


@pytest.fixture(scope="module")
def together() -> Iterator[Servers]:
    with servers("--spread-from", str(LEAST)) as running:
        yield running


@pytest.fixture(scope="module")
def spread() -> Iterator[Servers]:
    with servers("--spread-from", "1") as running:
        yield running


def trained(store: DistKVStore, rank: int, numel: int) -> tuple[list[float], list[int]]:
    """The weights after four steps, and how many rounds each server has applied."""
    random = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(numel // 8, generator=random)) for _ in range(8)]
    trainer = kvtrainer.Trainer(parameters, "adam", {"learning_rate": 0.1}, kvstore=store)
    for step in range(4):
        for at, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, (step + at + rank) / 7)
        trainer.step(2)
    tables = [one["tables"] for one in trainer.server_stats()]
    return torch.cat([p.detach() for p in parameters]).tolist(), [len(own) for own in tables]


def test_small_weights_lie_on_one_server_and_have_the_same_bits(together: Servers, spread: Servers) -> None:
    (here, tables), (_, others) = together.results(2, 2, lambda store, rank: trained(store, rank, 8192))
    (there, spread_tables), _ = spread.results(2, 2, lambda store, rank: trained(store, rank, 8192))
    assert here == there
    assert sorted(tables) == [0, 1]
    assert tables == others
    assert spread_tables == [1, 1]


def test_weights_that_are_not_small_lie_on_all_servers(together: Servers) -> None:
    [(_, tables), _] = together.results(2, 2, lambda store, rank: trained(store, rank, LEAST // 4))
    assert tables == [1, 1]


def test_rows_of_a_hash_table_lie_on_all_servers_however_small_the_other_weights(together: Servers) -> None:
    def body(store: DistKVStore, _: int) -> list[int]:
        table, linear = kvtrainer.Embedding(4), torch.nn.Linear(4, 1)
        with kvtrainer.Trainer({"t": table, "l": linear}, "adagrad", kvstore=store) as trainer:
            linear(table(torch.arange(500))).sum().backward()
            trainer.step(1)
            held = [one["tables"][0]["hash_tables"]["t.weight"]["rows"] for one in trainer.server_stats()]
        return sorted(held)

    [[few, many]] = together.results(1, 2, body)
    assert few + many == 500
    assert few > 200


def test_keys_of_the_verbs_are_spread_whatever_their_size(together: Servers) -> None:
    def body(store: DistKVStore, _: int) -> int:
        store.init("k", torch.ones(10_000))
        return sum(len(one["tables"]) for one in store.server_stats())

    assert together.results(1, 2, body) == [2]


def test_of_servers_that_differ_the_least_size_counts() -> None:
    engines = [
        Engine(EngineConfig(at, 2, run_id=at + 1, spread_from=size)) for at, size in enumerate((1000, 500))
    ]
    client = client_of(2, engines)
    specs = {
        name: [TensorSpec(name, (numel,), "float32")] for name, numel in (("small", 100), ("large", 5000))
    }
    small, large = client.register(specs, allow_single_server=True)
    assert (small.plan.one_server, large.plan.one_server) == (True, False)
    [between] = client.register({"t": [TensorSpec("t", (200,), "float32")]}, allow_single_server=True)
    assert not between.plan.one_server


def test_ranks_that_heard_of_different_sizes_are_told_so() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    specs = (("k", (4, 2), "float32", 0, False),)
    job.ask(0, m.Register("u", specs, False))
    [refused] = job.ask(1, m.Register("u", specs, False, one_server=True))
    assert isinstance(refused, m.Failed)
    assert isinstance(from_wire(refused.code, refused.text), PlanMismatchError)
