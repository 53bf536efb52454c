"""Weights and gradients of a device, which is simulated, whose copies go to and from the memory of servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.optimizer import create
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.kvstore import DistKVStore
from kvtrainer.sync import device_staging
from kvtrainer.sync import exchange as exchanges
from kvtrainer.sync.device_staging import StagingSink
from kvtrainer.sync.exchange import StoreExchange
from tests.support.device_streams import CURRENT, SCHEDULES, OnDevice, Streams
from tests.support.engines import run_round
from tests.support.limits import LIMIT
from tests.support.stores import Servers

WAY = "auto"
"""Servers share memory whatever way the other tests take."""
NUMELS = (399_600, 5, 262_144, 358_401)
"""Slices that fill their pages, others that two servers share a page of, and one that is too short."""
LONG = frozenset({0, 2})
"""Those of whole lines."""
PLAN = make_plan([TensorSpec(str(at), (numel,), "float32") for at, numel in enumerate(NUMELS)], 1)
ROUNDS = 5


class Worker:
    """An exchange whose weights and gradients are on a device, or on the CPU."""

    def __init__(self, store: DistKVStore, streams: Streams | None, in_store: bool = True) -> None:
        self.streams = streams
        size = PLAN.resident_sizes["float32"]
        self.weights, self.grads = self._flat(torch.ones(size)), self._flat(torch.zeros(size))
        optimizer = create("adam", learning_rate=0.1) if in_store else None
        self.exchange = StoreExchange(store.open_client(), PLAN, optimizer, is_dist=True)
        if streams is not None:
            self.exchange.map(self.weights)
            self.exchange.allocate_shared_grads(LONG, allocates=True, gathers=False)
        self.exchange.init(self.weights)

    def _flat(self, numbers: Tensor) -> dict[str, Tensor]:
        return {"float32": numbers if self.streams is None else numbers.as_subclass(OnDevice)}

    def compute(self, work: Any) -> None:
        """Have the device do something when it comes to it."""
        if self.streams is None:
            work()
        else:
            self.streams.compute(work)

    def round(self, rank: int, step: int, absent: Sequence[int] = (), veto: bool = False) -> None:
        drawn = torch.randn(
            len(self.grads["float32"]), generator=torch.Generator().manual_seed(8 * step + rank)
        )
        self.compute(lambda: self.grads["float32"].copy_(drawn))
        run_round(self.exchange, self.grads, self.weights, absent=frozenset(absent), veto=veto)

    def values(self) -> list[Tensor]:
        """Copy the weights of each parameter, as the device has them when it has done all."""
        if self.streams is not None:
            self.streams.run(CURRENT)
        return self.weights_now()

    def weights_now(self) -> list[Tensor]:
        """Copy the weights of each parameter, as they are now."""
        flat = self.weights["float32"].as_subclass(Tensor)
        rows = zip(PLAN.key_offsets, NUMELS, strict=True)
        return [flat[at : at + numel].clone() for at, numel in rows]


FoundBy = Callable[..., list[Any]]
"""(schedule or None, what a worker does, …) → what two workers find: on simulated devices, or on the CPU for None."""


@pytest.fixture
def found_by(jobs: Servers, monkeypatch: pytest.MonkeyPatch) -> FoundBy:
    own = threading.local()
    monkeypatch.setattr(exchanges, "StagingStream", lambda device: own.streams)

    def found(eager: Sequence[str] | None, body: Any, in_store: bool = True, **options: Any) -> list[Any]:
        def run(store: DistKVStore, rank: int) -> Any:
            own.streams = None if eager is None else Streams(eager)
            return body(Worker(store, own.streams, in_store), rank)

        return jobs.results(2, 2, run, **options)

    return found


def trained(worker: Worker, rank: int) -> list[Tensor]:
    for step in range(ROUNDS):
        worker.round(rank, step)
    return worker.values()


@SCHEDULES
def test_weights_are_those_of_the_cpu_to_the_bit(eager: Sequence[str], found_by: FoundBy) -> None:
    found, expected = [found_by(one, trained) for one in (eager, None)]
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert torch.equal(mine, theirs)
    assert all(map(torch.equal, *found))


def test_long_gradients_and_weights_are_copied_by_the_device_alone(found_by: FoundBy) -> None:
    def body(worker: Worker, rank: int) -> tuple[int, set[int], list[int]]:
        trained(worker, rank)
        seen, shared_grads = worker.exchange.sink, worker.exchange.shared_grads
        assert isinstance(seen, StagingSink)
        assert shared_grads is not None
        free = shared_grads.places(without=())
        assert worker.streams is not None
        pinned = worker.streams.num_pinned
        worker.exchange.close()
        shown = sum([one.numel for one in seen.ranges()])
        return shown, set(free), [pinned, worker.streams.num_pinned]

    for shown, keys, pinned in found_by((), body):
        assert shown > 0.99 * sum(NUMELS)
        assert keys == LONG
        assert pinned == [3, 0]  # of two servers their weights, and what gradients are copied to


@pytest.mark.parametrize("eager", [(), (CURRENT,)], ids=str)
def test_rounds_without_some_gradients_and_without_effect_count_as_on_the_cpu(
    eager: Sequence[str], found_by: FoundBy
) -> None:
    def body(worker: Worker, rank: int) -> list[Tensor]:
        trained(worker, rank)
        worker.round(rank, 10, absent=[0])
        worker.round(rank, 11, veto=rank == 1)
        worker.round(rank, 12, absent=[0] if rank else [2, 3])
        return worker.values()

    found, expected = [found_by(one, body) for one in (eager, None)]
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(mine, theirs)


def test_weights_that_the_loop_assigns_reach_the_devices(found_by: FoundBy) -> None:
    def body(worker: Worker, rank: int) -> tuple[list[list[float]], list[Tensor]]:
        trained(worker, rank)
        worker.compute(lambda: worker.weights["float32"].fill_(5.0 + rank))
        worker.exchange.assign(worker.weights)
        assigned = [own.unique().tolist() for own in worker.values()]
        worker.round(rank, 10)
        return assigned, worker.values()

    found, expected = [found_by(one, body) for one in ((), None)]
    for assigned, values in found:
        assert assigned == [[5.0]] * len(NUMELS)
        assert all(map(torch.equal, values, expected[0][1]))


def test_workers_without_data_get_the_last_weights(found_by: FoundBy) -> None:
    def body(worker: Worker, rank: int) -> list[Tensor]:
        trained(worker, rank)
        if not rank:
            worker.round(rank, 10)
        while not worker.exchange.run_without_data(worker.weights, worker.grads).is_over:
            pass
        return worker.values()

    found = found_by((), body)
    assert all(map(torch.equal, *found))


def test_a_worker_without_data_waits_until_its_device_has_read_the_weights(found_by: FoundBy) -> None:
    """Its taking part lets servers write the next ones."""

    def body(worker: Worker, rank: int) -> list[Tensor]:
        read: list[Tensor] = []
        worker.round(rank, 0)
        worker.compute(lambda: read.extend(worker.weights_now()))
        if not rank:
            worker.round(rank, 1)
        while not worker.exchange.run_without_data(worker.weights, worker.grads).is_over:
            pass
        worker.values()
        return read

    found = found_by((), body)
    assert all(map(torch.equal, *found))


def test_gradients_of_a_worker_without_data_stay_where_no_sum_comes(found_by: FoundBy) -> None:
    def body(worker: Worker, rank: int) -> bool:
        worker.round(rank, 0)
        worker.compute(lambda: worker.grads["float32"].fill_(7.0))
        if not rank:
            worker.round(rank, 1, veto=True)
        joined = worker.exchange.run_without_data(worker.weights, worker.grads)
        worker.values()
        is_same = bool(worker.grads["float32"].as_subclass(Tensor).eq(7.0).all())
        while not joined.is_over:
            joined = worker.exchange.run_without_data(worker.weights, worker.grads)
        return is_same

    assert found_by((), body, in_store=False)[1]


def test_weights_that_servers_show_no_more_are_copied(found_by: FoundBy) -> None:
    def body(worker: Worker, rank: int) -> list[Tensor]:
        worker.round(rank, 0)
        if worker.exchange.sink.maps:
            worker.exchange.sink.problem = OSError("no memory")
        worker.round(rank, 1)
        worker.round(rank, 2)
        assert not worker.exchange.sink.maps
        return worker.values()

    found, expected = [found_by(one, body) for one in ((), None)]
    for mine in found:
        assert all(map(torch.equal, mine, expected[0]))


def test_weights_are_copied_with_a_line_where_memory_of_servers_cannot_be_mapped(
    found_by: FoundBy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = found_by(None, trained)

    def refuse(*args: object, **options: object) -> None:
        raise OSError("too many mappings")

    monkeypatch.setattr(device_staging, "put_pages", refuse)
    found = found_by((), trained)
    assert all(map(torch.equal, found[0], expected[0]))
    assert "too many mappings" in caplog.text


@SCHEDULES
def test_the_host_keeps_what_a_device_was_given_although_the_store_has_newer_weights(
    eager: Sequence[str], found_by: FoundBy
) -> None:
    is_ahead = threading.Event()

    def body(worker: Worker, rank: int) -> list[Tensor]:
        if rank == 1:
            worker.round(rank, 0)
            is_ahead.set()
            return []
        first = worker.values()
        assert is_ahead.wait(LIMIT)
        looked_at = worker.exchange.look()["float32"]
        assert not torch.equal(looked_at, torch.ones(len(looked_at)))
        given = worker.exchange.given(worker.weights)["float32"]
        assert all(
            torch.equal(given[at : at + len(one)], one)
            for at, one in zip(PLAN.key_offsets, first, strict=True)
        )
        worker.weights["float32"].copy_(looked_at)
        worker.exchange.accept(worker.weights, are_looked_at=True)
        assert worker.exchange.version == 1
        given = worker.exchange.given(worker.weights)["float32"]
        return [
            given[at : at + numel] - looked_at[at : at + numel]
            for at, numel in zip(PLAN.key_offsets, NUMELS, strict=True)
        ]

    [differences, _] = found_by(eager, body, type="dist_async")
    assert not any(map(torch.any, differences))
