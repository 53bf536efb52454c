"""Where contributions count one by one: what a worker was given, beside what the store has by then.

All workers are in one thread, so a test says who acts when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import kvtrainer
from kvtrainer.common.env import TRANSPORT
from kvtrainer.errors import WeightsWrittenError
from kvtrainer.kvstore import DistKVStore
from tests.support.processes import Members, new_name, together
from tests.support.stores import Servers

SIZES = (5, 40_000)
"""Elements of the weight: one is copied as it comes, one is shown."""
RATE, LAMDA = 1.0, 0.5


@pytest.fixture(params=["auto", "tcp"], autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TRANSPORT, request.param)
    return str(request.param)


class Worker:
    """A Trainer of one weight that begins as ones, and whose gradient is the same in all elements."""

    def __init__(self, kv: DistKVStore, size: int, optimizer: str, **options: Any) -> None:
        self.weight = Parameter(torch.ones(size))
        numbers = {"learning_rate": RATE} | ({"lamda": LAMDA} if optimizer == "dcasgd" else {})
        self.trainer = kvtrainer.Trainer({"w": self.weight}, optimizer, numbers, kvstore=kv, **options)

    def step(self, gradient: float, times: int = 1) -> None:
        for _ in range(times):
            self.weight.grad = torch.full_like(self.weight, gradient)
            self.trainer.step(1)

    @property
    def value(self) -> float:
        """The one value of all elements."""
        [value] = self.weight.detach().unique().tolist()  # type: ignore[no-untyped-call]
        return float(value)


@contextmanager
def pair(
    jobs: Servers,
    type: str = "dist_async",
    size: int = SIZES[0],
    optimizer: str = "sgd",
    store: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[Worker, Worker]]:
    """Two workers that have the first weights."""
    name, given = (
        new_name(),
        {"type": type, **({"staleness": 100} if type == "dist_ssp" else {}), **(store or {})},
    )
    with Members() as members:
        stores = [members.join(jobs.of(2), rank, 2, name, **given) for rank in range(2)]
        first, second = (Worker(kv, size, optimizer, **options) for kv in stores)
        assert together(first.trainer.set_data, second.trainer.set_data) == [None, None]
        yield first, second
        for worker in (first, second):
            worker.trainer.close()


def looks(worker: Worker) -> None:
    assert worker.trainer.pull_weights()[worker.weight].unique().tolist() != [worker.value]


def saves_states(worker: Worker, folder: Path) -> None:
    worker.trainer.save_states(folder / "states")


def reads_all(worker: Worker, folder: Path) -> None:
    """All that only reads."""
    looks(worker)
    saves_states(worker, folder)
    worker.trainer.state_dict()
    worker.trainer.server_stats()
    kept = worker.weight.detach().clone()
    with torch.no_grad():
        worker.weight.fill_(100.0)  # averaged weights, for an evaluation
        worker.weight.copy_(kept)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("type", ["dist_async", "dist_ssp"])
def test_a_gradient_is_as_stale_as_the_weights_that_it_was_computed_with_whatever_was_read_since(
    jobs: Servers, type: str, size: int, tmp_path: Path
) -> None:
    with pair(jobs, type, size, store={"scale_lr_by_staleness": True}) as (slow, fast):
        fast.step(2.0, times=3)
        reads_all(slow, tmp_path)
        assert slow.trainer.version == 0
        slow.step(2.0)
        assert slow.trainer.staleness == 3
        assert slow.value == pytest.approx(1.0 - 3 * 2.0 - 2.0 / 3)
        assert slow.trainer.version == 4


@pytest.mark.parametrize("size", SIZES)
def test_delay_compensation_starts_at_the_weights_of_the_gradient_whatever_was_read_since(
    jobs: Servers, size: int, tmp_path: Path
) -> None:
    with pair(jobs, size=size, optimizer="dcasgd") as (slow, fast):
        fast.step(2.0, times=3)
        store = 1.0 - 3 * 2.0  # the fast one has all that the store has: nothing to make up for
        assert fast.value == store
        for _ in range(3):
            reads_all(slow, tmp_path)
        slow.step(0.5)
        assert slow.value == pytest.approx(store - (0.5 + LAMDA * 0.5**2 * (store - 1.0)))


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_weights_may_be_written_and_put_back_although_the_store_has_newer_ones(
    jobs: Servers, size: int, zero_copy: bool
) -> None:
    with pair(jobs, size=size, zero_copy=zero_copy) as (slow, fast):
        fast.step(2.0)
        with torch.no_grad():
            slow.weight.mul_(1)
        slow.step(3.0)
        assert (slow.value, slow.trainer.staleness) == (1.0 - 2.0 - 3.0, 1)
        with torch.no_grad():
            slow.weight.mul_(2).div_(2)
        slow.step(3.0)
        assert (slow.value, slow.trainer.staleness) == (-7.0, 0)


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("write", [lambda w: w.mul_(2), lambda w: w.data.mul_(2), lambda w: w.fill_(-1.0)])
def test_weights_that_were_changed_are_told_although_the_store_has_newer_ones(
    jobs: Servers, size: int, zero_copy: bool, write: Callable[[Tensor], object]
) -> None:
    """Also those that are as the other worker's were in between."""
    with pair(jobs, size=size, zero_copy=zero_copy) as (slow, fast):
        fast.step(2.0, times=2)
        with torch.no_grad():
            write(slow.weight)
        with pytest.raises(WeightsWrittenError, match="w"):
            slow.step(3.0)
        with torch.no_grad():
            slow.weight.fill_(1.0)
        slow.step(3.0)
        assert (slow.value, slow.trainer.staleness) == (1.0 - 2 * 2.0 - 3.0, 2)


@pytest.mark.parametrize("optimizer", ["sgd", "dcasgd"])
@pytest.mark.parametrize("size", SIZES)
def test_pulled_weights_that_were_put_in_are_those_of_the_next_gradient_although_the_store_has_newer_ones(
    jobs: Servers, size: int, optimizer: str
) -> None:
    with pair(jobs, size=size, optimizer=optimizer) as (slow, fast):
        fast.step(2.0)
        with torch.no_grad():
            for parameter, weight in slow.trainer.pull_weights().items():
                parameter.copy_(weight)
        fast.step(2.0, times=2)
        slow.step(0.5)
        store, given = 1.0 - 3 * 2.0, 1.0 - 2.0
        drift = LAMDA * 0.5**2 * (store - given) if optimizer == "dcasgd" else 0.0
        assert slow.value == pytest.approx(store - (0.5 + drift))
        assert (slow.trainer.staleness, slow.trainer.version) == (2, 4)


def test_only_what_a_gradient_may_be_computed_with_makes_a_table_of_rows_newer(jobs: Servers) -> None:
    def made(kv: DistKVStore) -> tuple[kvtrainer.RowSparseParameter, kvtrainer.Trainer]:
        table = kvtrainer.RowSparseParameter((6, 2), 1.0)
        return table, kvtrainer.Trainer({"table": table}, "sgd", {"learning_rate": RATE}, kvstore=kv)

    def step(table: kvtrainer.RowSparseParameter, trainer: kvtrainer.Trainer) -> None:
        table.row_sparse_data([1]).sum().backward()  # type: ignore[no-untyped-call]
        trainer.step(1)

    name = new_name()
    with Members() as members:
        stores = [members.join(jobs.of(2), rank, 2, name, type="dist_async") for rank in range(2)]
        (slow, mine), (fast, others) = map(made, stores)
        assert together(mine.set_data, others.set_data) == [None, None]
        loss = slow.row_sparse_data([1, 5]).sum()
        for _ in range(3):
            step(fast, others)
        with torch.no_grad():
            assert slow.row_sparse_data([1]).tolist() == [[-2.0, -2.0]]
        assert slow.detach()[1].tolist() == [-2.0, -2.0]
        loss.backward()  # type: ignore[no-untyped-call]
        mine.step(1)
        assert mine.staleness == 3
        step(slow, mine)
        assert mine.staleness == 0
        mine.close()
        others.close()


def test_weights_that_come_with_steps_are_not_renewed_by_rows_that_are_read(jobs: Servers) -> None:
    def made(kv: DistKVStore) -> tuple[dict[str, Parameter], kvtrainer.Trainer]:
        both: dict[str, Parameter] = {
            "table": kvtrainer.RowSparseParameter((6, 2), 1.0),
            "w": Parameter(torch.ones(2)),
        }
        return both, kvtrainer.Trainer(both, "sgd", {"learning_rate": RATE}, kvstore=kv)

    def step(both: dict[str, Any], trainer: kvtrainer.Trainer) -> None:
        (both["table"].row_sparse_data([1]) * both["w"]).sum().backward()
        trainer.step(1)

    name = new_name()
    with Members() as members:
        stores = [members.join(jobs.of(1), rank, 2, name, type="dist_async") for rank in range(2)]
        (slow, mine), (fast, others) = map(made, stores)
        assert together(mine.set_data, others.set_data) == [None, None]
        for _ in range(3):
            step(fast, others)
        step(slow, mine)  # its rows are new, its "w" is not
        assert mine.staleness == 3
        mine.close()
        others.close()
