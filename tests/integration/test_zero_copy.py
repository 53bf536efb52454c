"""Parameters that show weights: those of servers of their host, which are mapped, or those that came in messages.

Equal results, and writes that are found.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import logging
import mmap
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Parameter

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.transport import pages
from kvtrainer.client import weight_sinks
from kvtrainer.client.session import Session
from kvtrainer.common.env import TRANSPORT
from kvtrainer.errors import (
    KVStoreError,
    OptimizerError,
    ParameterMovedError,
    ServerUnreachableError,
    WeightsWrittenError,
)
from kvtrainer.kvstore import DistKVStore
from tests.integration.raising_optimizer import RaisesOnHugeMeans
from tests.support.drawn_workers import DrawnWorker, on_two
from tests.support.limits import DEAD_AFTER, LIMIT
from tests.support.processes import Members, Process, Processes, new_name, together
from tests.support.stores import Servers

SHAPES = ((1200, 333), (333,), (5, 5), (120_001,), (64, 4096))
"""Slices that fill their pages and others that do not, of several keys and of one."""
WAY = "auto"
"""Servers share memory whatever way the other tests take."""


@pytest.fixture(params=["auto", "tcp"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TRANSPORT, request.param)
    return str(request.param)


on_every_way = pytest.mark.usefixtures("way")


class Worker(DrawnWorker):
    shapes = SHAPES
    assigns = True


def alone(members: Members, servers: Sequence[Process]) -> Worker:
    """A worker of its own job after two steps."""
    worker = Worker(members.join(servers, 0, 1, new_name()), 0)
    worker.steps(2)
    return worker


def is_mapped(parameter: Parameter, what: str = "memfd:kvstore-weights") -> bool:
    """Tell whether a place within a parameter lies in memory of a server, or in other, by the system's list."""
    address = parameter.data_ptr() + parameter.nbytes // 3
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if begin <= address < end:
            return what in line
    return False


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
def test_weights_are_the_same_to_the_bit_whether_they_are_mapped_or_copied(
    jobs: Servers, members: Members, optimizer: str
) -> None:
    servers = jobs.of(2)

    def train(worker: Worker) -> tuple[list[torch.Tensor], bool]:
        worker.steps(4)
        return worker.weights(), is_mapped(worker.parameters[0])

    found = on_two(members, servers, Worker, train, optimizer=optimizer)
    found += on_two(members, servers, Worker, train, optimizer=optimizer, zero_copy=False)
    assert [mapped for _, mapped in found] == [True, True, False, False]
    assert all(all(map(torch.equal, weights, found[0][0])) for weights, _ in found)


def test_one_worker_may_copy_what_the_other_one_maps(processes: Processes, members: Members) -> None:
    pair = members.pair(processes.servers(2))
    workers = [Worker(kv, rank, zero_copy=rank == 0) for rank, kv in enumerate(pair)]
    together(*(lambda w=w: w.steps(4) for w in workers))
    assert [is_mapped(worker.parameters[0]) for worker in workers] == [True, False]
    assert all(map(torch.equal, workers[0].weights(), workers[1].weights()))


def test_rows_of_tables_between_which_pages_leave_gaps_come_to_their_places(
    jobs: Servers, members: Members
) -> None:
    sizes, steps = (300_000, 250_001, 50_000), 4  # 16 floats a row: no table ends where a page does

    def gradient(rank: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = np.random.default_rng((rank, step, size))
        ids, values = drawn.integers(0, size, 300), drawn.integers(-8, 9, (300, 16))
        return torch.from_numpy(ids), torch.from_numpy(values).float()

    def train(store: DistKVStore, rank: int) -> list[torch.Tensor]:
        tables = [Parameter(torch.zeros(size, 16)) for size in sizes]
        options = {"learning_rate": 1.0, "lazy_update": True}
        trainer = kvtrainer.Trainer(tables, "sgd", options, kvstore=store, zero_copy=rank == 0)
        for step in range(steps):
            for table, size in zip(tables, sizes, strict=True):
                ids, values = gradient(rank, step, size)
                table.grad = torch.sparse_coo_tensor(ids[None], values, table.shape, check_invariants=False)
            trainer.step(1)
        return [table.detach().clone() for table in tables]

    expected = [torch.zeros(size, 16) for size in sizes]
    for rank, step in itertools.product(range(2), range(steps)):
        for table, size in zip(expected, sizes, strict=True):
            ids, values = gradient(rank, step, size)
            table.index_add_(0, ids, -values)
    pair = members.pair(jobs.of(2))
    for found in together(*(lambda kv=kv, r=r: train(kv, r) for r, kv in enumerate(pair))):
        assert all(map(torch.equal, found, expected))


@on_every_way
def test_a_write_that_torch_does_not_see_is_found_before_anything_is_sent(
    jobs: Servers, members: Members
) -> None:
    def write(worker: Worker) -> tuple[str, bool]:
        worker.steps(2)
        worker.parameters[3].data[77_777] += 1.0
        before = worker.weights()
        with pytest.raises(WeightsWrittenError) as raised:
            worker.steps()
        return str(raised.value), all(map(torch.equal, before, worker.weights()))

    for text, is_unchanged in on_two(members, jobs.of(2), Worker, write):
        assert "p3" in text
        assert "p0" not in text
        assert is_unchanged


@pytest.mark.parametrize("sparse", [False, True])
@on_every_way
def test_one_number_that_is_written_to_a_large_table_is_found_at_once(
    jobs: Servers, members: Members, sparse: bool
) -> None:
    store = members.join(jobs.of(2), 0, 1, new_name())
    table = nn.Embedding.from_pretrained(torch.zeros(2**17, 32), freeze=False, sparse=sparse)
    options = {"learning_rate": 1.0, "lazy_update": True}
    trainer = kvtrainer.Trainer(table, "sgd", options, kvstore=store)
    for _ in range(3):
        table(torch.tensor([5, 70_000])).sum().backward()
        trainer.step(1)
        trainer.zero_grad()
    assert [table.weight[at, 3].item() for at in (5, 6, 70_000)] == [-3, 0, -3]
    for row in (6, 70_001, -1):
        table.weight.data[row, 5] = 1.0
        table(torch.tensor([5])).sum().backward()
        with pytest.raises(WeightsWrittenError):
            trainer.step(1)
        table.weight.data[row, 5] = 0.0
        trainer.step(1)


@on_every_way
@pytest.mark.parametrize(("written", "at"), [("p3", -1), ("p4", 0)])
def test_of_two_parameters_in_one_page_the_one_that_was_written_is_named(
    jobs: Servers, members: Members, written: str, at: int
) -> None:
    worker = alone(members, jobs.of(2))
    before, behind = worker.parameters[3], worker.parameters[4]
    assert (before.data_ptr() + before.nbytes - 1) // mmap.PAGESIZE == behind.data_ptr() // mmap.PAGESIZE
    worker.parameters[int(written[1])].detach().view(-1).numpy()[at] += 1.0
    with pytest.raises(WeightsWrittenError) as raised:
        worker.steps()
    assert [name for name in ("p0", "p1", "p2", "p3", "p4") if name in str(raised.value)] == [written]


@on_every_way
def test_weights_that_are_published_are_mapped_again_on_every_worker(jobs: Servers, members: Members) -> None:
    def publish(worker: Worker) -> list[list[torch.Tensor]]:
        worker.steps(2)
        with torch.no_grad():
            for parameter in worker.parameters:
                parameter.fill_(3.0 + worker.trainer.rank)
        worker.trainer.set_data()
        published = worker.weights()
        worker.steps(2)
        return [published, worker.weights()]

    (first, later), (second, after) = on_two(members, jobs.of(2), Worker, publish)
    assert all((weight == 3.0).all() for weight in (*first, *second))
    assert all(map(torch.equal, later, after))
    assert not any((weight == 3.0).all() for weight in later)


@on_every_way
def test_averaged_weights_may_be_swapped_in_and_out_between_steps(jobs: Servers, members: Members) -> None:
    def train(worker: Worker) -> list[torch.Tensor]:
        for _ in range(3):
            worker.steps()
            kept = worker.weights()
            for parameter, weight in zip(worker.parameters, kept, strict=True):
                parameter.data.zero_()
                parameter.data.copy_(weight)
        return worker.weights()

    servers = jobs.of(2)
    swapped = on_two(members, servers, Worker, train)
    plain = on_two(members, servers, Worker, lambda worker: (worker.steps(3), worker.weights())[1])
    assert all(map(torch.equal, swapped[0], plain[0]))
    assert all(map(torch.equal, swapped[1], plain[1]))


@on_every_way
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_weights_that_were_swapped_in_and_out_follow_those_of_workers_that_have_more_data(
    jobs: Servers, members: Members, kind: str
) -> None:
    def train(rank: int, store: DistKVStore) -> list[torch.Tensor]:
        worker = Worker(store, rank, "sgd")
        with worker.trainer.join():
            worker.steps(2 + 3 * rank)
            for parameter, weight in zip(worker.parameters, worker.weights(), strict=True):
                parameter.data.zero_()
                parameter.data.copy_(weight)
        return worker.weights()

    pair = members.pair(jobs.of(2), type=kind)
    first, second = together(*(lambda r=r, kv=kv: train(r, kv) for r, kv in enumerate(pair)))
    assert all(map(torch.equal, first, second))


def test_weights_that_come_in_messages_are_copied_with_a_line_where_no_memory_is_to_spare(
    jobs: Servers, members: Members, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TRANSPORT, "tcp")
    found = []
    for available in (1 << 40, 1 << 20):
        monkeypatch.setattr(weight_sinks, "available_memory", lambda available=available: available)
        worker = Worker(members.join(jobs.of(2), 0, 1, new_name()), 0)
        worker.steps(3)
        is_shown = is_mapped(worker.parameters[0], "memfd:kvtrainer-weights")
        found.append((is_shown, len(caplog.records), worker.weights()))
    assert [(shown, lines) for shown, lines, _ in found] == [(True, 0), (False, 1)]
    assert f"{1 << 20} are available" in caplog.text
    assert all(map(torch.equal, found[0][2], found[1][2]))


def test_weights_are_copied_where_all_memory_is_locked() -> None:
    """Such a process has copies of pages at once, and would not see what comes to them."""
    fork = multiprocessing.get_context("fork")
    lock, outcome = ctypes.CDLL(None).mlockall, fork.Queue()

    def look() -> None:
        flat = torch.from_numpy(np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float32))
        plan = make_plan([TensorSpec("w", (len(flat),), "float32")], 1)
        if lock(2):
            outcome.put("may not")
            return
        try:
            weight_sinks.PrivateWeightSink({"float32": flat}, plan)
            outcome.put("shown")
        except OSError:
            outcome.put("refused")

    child = fork.Process(target=look)
    child.start()
    found = outcome.get(timeout=LIMIT)
    child.join(LIMIT)
    if found == "may not":
        pytest.skip("this process may not lock its memory")
    assert found == "refused"


@on_every_way
def test_a_copy_of_a_model_has_weights_of_its_own(jobs: Servers, members: Members) -> None:
    worker = alone(members, jobs.of(2))
    before, copies = worker.weights(), copy.deepcopy(worker.parameters)
    worker.steps(1)
    assert not is_mapped(copies[0])
    assert all(map(torch.equal, copies, before))


@on_every_way
def test_weights_that_are_moved_to_memory_of_torch_are_refused(
    processes: Processes, members: Members
) -> None:
    worker = alone(members, processes.servers(1))
    worker.parameters[0].share_memory_()
    with pytest.raises(ParameterMovedError, match="p0"):
        worker.steps()


def test_a_forward_pass_that_writes_weights_is_found(jobs: Servers, members: Members, way: str) -> None:
    store = members.join(jobs.of(2), 0, 1, new_name())
    embedding = nn.Embedding(20_000, 16, max_norm=1.0)
    trainer = kvtrainer.Trainer(embedding.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    embedding.weight.grad = torch.ones(20_000, 16)
    trainer.step(1)
    assert is_mapped(embedding.weight) == (way == "auto")
    embedding(torch.arange(100)).sum().backward()  # rows of a norm above one become shorter
    with pytest.raises(WeightsWrittenError, match="weight"):
        trainer.step(1)


@on_every_way
def test_a_worker_whose_page_map_is_hidden_copies_and_says_so(
    jobs: Servers,
    members: Members,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(pages, "_PAGE_MAP", str(tmp_path / "none"))
    worker = alone(members, jobs.of(1))
    assert not is_mapped(worker.parameters[0])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@on_every_way
def test_weights_stay_and_are_the_workers_own_when_its_trainer_is_closed(
    jobs: Servers, members: Members
) -> None:
    worker = alone(members, jobs.of(2))
    before = worker.weights()
    assert is_mapped(worker.parameters[0], "memfd:")
    worker.trainer.close()
    assert not is_mapped(worker.parameters[0], "memfd:")
    assert all(map(torch.equal, before, worker.weights()))


@on_every_way
def test_weights_can_be_read_after_their_server_was_killed(processes: Processes, members: Members) -> None:
    servers = processes.servers(2)
    worker = alone(members, servers)
    before = worker.weights()
    servers[1].signal(signal.SIGKILL)
    servers[1].end()
    assert all(map(torch.equal, before, worker.weights()))


@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_server_that_dies_before_it_has_written_leaves_two_rounds_only_where_weights_are_mapped(
    processes: Processes, members: Members, zero_copy: bool
) -> None:
    servers = processes.servers(2)
    store = members.join(servers, 0, 1, new_name(), dead_after=DEAD_AFTER)
    worker = Worker(store, 0, zero_copy=zero_copy)
    worker.steps(2)
    before = worker.weights()
    servers[1].signal(signal.SIGKILL)
    servers[1].end()
    with pytest.raises(ServerUnreachableError) as raised:
        worker.steps()
    changed = [
        f"p{at}" for at, (a, b) in enumerate(zip(before, worker.weights(), strict=True)) if (a != b).any()
    ]
    assert bool(changed) == zero_copy
    assert all(name in str(raised.value) for name in changed)
    assert ("two rounds" in str(raised.value)) == zero_copy


def test_a_round_that_servers_take_back_leaves_whole_weights_and_the_error_says_nothing_else(
    processes: Processes, members: Members
) -> None:
    servers = processes.servers(2, "--import", "tests.integration.raising_optimizer")

    def work(worker: Worker) -> tuple[str, bool]:
        worker.steps(2)
        before = worker.weights()
        for parameter in worker.parameters:
            parameter.grad = torch.zeros_like(parameter)
        worker.parameters[3].grad = torch.full_like(worker.parameters[3], 1000.0)
        with pytest.raises(OptimizerError) as raised:
            worker.trainer.step(2)
        return str(raised.value), all(map(torch.equal, before, worker.weights()))

    for text, is_unchanged in on_two(members, servers, Worker, work, optimizer=RaisesOnHugeMeans.name):
        assert "nothing was applied" in text
        assert "two rounds" not in text
        assert is_unchanged


def test_a_step_that_was_interrupted_when_servers_had_made_it_is_not_made_once_more(
    jobs: Servers, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(members.join(jobs.of(2), 0, 1, new_name()), 0)
    worker.steps(2)
    real, interrupted = Session.wait, list[bool]()

    def wait(*args: Any, **options: Any) -> bool:
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(Session, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        worker.steps()
    with pytest.raises(KVStoreError):
        worker.steps()


def test_memory_that_a_job_maps_is_not_that_of_another_one(processes: Processes, members: Members) -> None:
    servers = processes.servers(1)
    workers = [alone(members, servers) for _ in range(2)]
    assert all(is_mapped(worker.parameters[0]) for worker in workers)
    shown = []
    for worker in workers:
        channel = worker.trainer._pipeline.binding._client._session.transport.channel(0)
        shown.append({os.fstat(memory.fd).st_ino for memory in channel._weights.values()})
    assert all(shown)
    assert shown[0].isdisjoint(shown[1])
