"""Workers with different numbers of batches, in join() blocks, on real servers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import kvtrainer
from kvtrainer.errors import ConfigurationError, WorkerLostError
from kvtrainer.kvstore import DistKVStore
from tests.support.limits import LIMIT
from tests.support.stores import Servers


def trainer_over(
    kv: DistKVStore | None, in_store: bool, **options: Any
) -> tuple[nn.Linear, kvtrainer.Trainer]:
    net = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(net.weight)
    given = {"learning_rate": 1.0, "momentum": 0.5, **options}
    return net, kvtrainer.Trainer(
        net.named_parameters(), "sgd", given, kvstore=kv, update_on_kvstore=in_store
    )


def train(net: nn.Linear, trainer: kvtrainer.Trainer, gradient: float) -> None:
    (net(torch.ones(1, 3)) * gradient).sum().backward()
    trainer.step(1)


def expected(*sums: float, momentum: float = 0.5, rate: float = 1.0) -> float:
    weight = buffer = 0.0
    for total in sums:
        buffer = momentum * buffer + rate * total
        weight -= buffer
    return weight


@pytest.mark.parametrize("in_store", [True, False])
@pytest.mark.parametrize("batches", [(5, 3), (3, 5), (4, 0), (2, 2), (1, 4, 2)])
def test_uneven_workers_end_together_with_equal_weights(
    jobs: Servers, batches: tuple[int, ...], in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        net, trainer = trainer_over(kv, in_store)
        for _ in range(2):
            with trainer.join():
                for _ in range(batches[rank]):
                    train(net, trainer, rank + 1.0)
            assert len(net.weight.unique()) == 1
        train(net, trainer, rank + 1.0)
        return net.weight.unique().tolist()

    sums = [sum(r + 1.0 for r, n in enumerate(batches) if at < n) for at in range(max(batches))]
    everybody = sum(r + 1.0 for r in range(len(batches)))
    result = jobs.results(len(batches), 2, body)
    assert result == [[pytest.approx(expected(*sums, *sums, everybody), abs=1e-4)]] * len(batches)
    assert len({tuple(one) for one in result}) == 1


@pytest.mark.parametrize("in_store", [True, False])
def test_the_learning_rate_of_the_workers_with_data_holds_for_all(jobs: Servers, in_store: bool) -> None:
    def body(kv: DistKVStore, rank: int) -> tuple[float, float]:
        net, trainer = trainer_over(kv, in_store, momentum=0.0)
        with trainer.join():
            for at in range(1 if rank == 0 else 4):
                trainer.set_learning_rate(2.0**at)
                train(net, trainer, 1.0)
        return net.weight[0, 0].item(), trainer.learning_rate

    # Both in the first step; then rank 1 alone with rates of its own, which rank 0 has never seen.
    assert jobs.results(2, 2, body) == [(-2.0 - 2.0 - 4.0 - 8.0, 8.0)] * 2


@pytest.mark.parametrize("in_store", [True, False])
def test_a_scheduler_goes_on_as_if_all_had_taken_every_step(jobs: Servers, in_store: bool) -> None:
    def body(kv: DistKVStore, rank: int) -> tuple[float, float]:
        schedule = kvtrainer.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
        net, trainer = trainer_over(kv, in_store, momentum=0.0, lr_scheduler=schedule)
        with trainer.join():
            for _ in range(1 if rank == 0 else 3):
                train(net, trainer, 1.0)
        train(net, trainer, 1.0)
        return net.weight[0, 0].item(), trainer.learning_rate

    results = jobs.results(2, 1, body)
    assert results[0] == results[1]
    assert results[0][1] == 1.0 * 0.5**3
    assert results[0][0] == -(2.0 + 0.5 + 0.25 + 2 * 0.125)


@pytest.mark.parametrize("type", ["dist_async", "dist_ssp"])
def test_workers_of_asynchronous_stores_wait_for_each_other_only_at_the_end(jobs: Servers, type: str) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        net, trainer = trainer_over(kv, True, momentum=0.0)
        for _ in range(2):
            with trainer.join():
                for _ in range((2, 40)[rank]):
                    train(net, trainer, 1.0)
        return net.weight.unique().tolist()

    assert jobs.results(2, 2, body, type=type) == [[-84.0]] * 2


def test_the_options_of_a_worker_that_has_joined_no_longer_hold_for_others(jobs: Servers) -> None:
    joined = threading.Event()

    def body(kv: DistKVStore, rank: int) -> float:
        net, trainer = trainer_over(kv, True, momentum=0.0)
        trainer.set_data()
        with trainer.join():
            if rank == 0:
                train(net, trainer, 1.0)
                joined.set()
            else:
                assert joined.wait(LIMIT)
                # Rank 0 is between its last step and the end of the block, or has left it: wait for the latter.
                while not trainer.server_stats()[0]["tables"][0]["joined"]:
                    pass
                trainer.set_learning_rate(4.0)
                train(net, trainer, 1.0)
        return net.weight[0, 0].item()

    assert jobs.results(2, 1, body, type="dist_async") == [-5.0, -5.0]


def test_what_other_workers_cannot_repeat_is_refused_in_a_block(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> None:
        net, trainer = trainer_over(kv, False)
        with trainer.join():
            net(torch.ones(1, 3)).sum().backward()
            with pytest.raises(ConfigurationError, match="use step"):
                trainer.allreduce_grads()
            with pytest.raises(ConfigurationError, match="use step"):
                trainer.update(1)
            with pytest.raises(ConfigurationError, match="use step"):
                trainer.set_data()
            with pytest.raises(ConfigurationError, match="already"), trainer.join():
                pass
            trainer.step(1)

    jobs.results(2, 1, body)


def test_without_a_store_a_block_changes_nothing() -> None:
    net, trainer = trainer_over(None, False, momentum=0.0)
    with trainer.join():
        train(net, trainer, 1.0)
    assert net.weight.unique().tolist() == [-1.0]


def test_an_exception_leaves_the_block_without_waiting_for_others(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        net, trainer = trainer_over(kv, True)
        with trainer, trainer.join():
            train(net, trainer, 1.0)
            if rank == 0:
                raise ZeroDivisionError("a bad batch")

    failures = jobs.everybody(2, 1, body)
    assert isinstance(failures[0], ZeroDivisionError)
    assert isinstance(failures[1], WorkerLostError)
    assert "a bad batch" in str(failures[1])
