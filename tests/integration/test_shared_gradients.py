"""Gradients where servers of the host read them: allocated there by a backward pass, or copied there once."""

from __future__ import annotations

import copy
import gc
import logging
import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import kvtrainer
from kvstore_server.probe import probe_servers
from kvstore_server.protocol import messages as m
from kvstore_server.transport.channel import Channel
from kvstore_server.transport.exports import ExportedStagingRequest
from kvtrainer.client import shared_gradients
from kvtrainer.client.connection import Connection
from kvtrainer.errors import ServerUnreachableError
from kvtrainer.kvstore import DistKVStore
from kvtrainer.sync.exchange import StoreExchange
from tests.support.drawn_workers import DrawnWorker, are_equal, on_two
from tests.support.limits import DEAD_AFTER, LIMIT
from tests.support.processes import Members, Process, Processes, eventually, new_name
from tests.support.stores import Servers

SHAPES = ((1200, 333), (5,), (64, 4096), (512, 700))
"""Slices that fill their pages, others that two servers share a page of, and one that is too short."""
LONG = (0, 2, 3)
MIB = 1 << 20
WAY = "auto"
"""Servers share memory whatever way the other tests take."""


class Worker(DrawnWorker):
    shapes = SHAPES


def are_shared(worker: Worker) -> list[bool]:
    """Tell of which parameters the gradients lie in memory of servers, by the system's list of mappings."""
    mappings = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    parts = [[int(edge, 16) for edge in one[0].split("-")] for one in mappings if "memfd:kvstore " in one[-1]]
    places = [grad.data_ptr() + grad.nbytes // 3 for grad in worker.grads]
    return [any([begin <= place < end for begin, end in parts]) for place in places]


def memory_of(servers: Sequence[Process]) -> int:
    """The bytes that servers have promised together, as they tell whoever looks."""
    told = probe_servers([server.address for server in servers], LIMIT)
    return sum([facts["memory"] for facts in told if facts is not None])


SHARED = [at in LONG for at in range(len(SHAPES))]
COPIED = [False] * len(SHAPES)


def alone(jobs: Servers, members: Members, servers: int = 2, **options: Any) -> Worker:
    """A worker of its own job after two steps: the second one has found gradients that can be allocated, and asked."""
    worker = Worker(members.join(jobs.of(servers), 0, 1, new_name()), 0, **options)
    worker.steps(2)
    return worker


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_weights_are_the_same_to_the_bit_whether_gradients_are_shared_in_shared_memory_or_copied(
    jobs: Servers, members: Members, optimizer: str
) -> None:
    def train(worker: Worker) -> tuple[list[Tensor], list[bool]]:
        worker.steps(4)
        drawn = worker.backward()
        assert all(map(torch.equal, worker.grads, drawn))
        return worker.weights(), are_shared(worker)

    servers = jobs.of(3)
    found = on_two(members, servers, Worker, train, optimizer=optimizer)
    found += on_two(members, servers, Worker, train, optimizer=optimizer, zero_copy=False)
    assert [where for _, where in found] == [SHARED, SHARED, COPIED, COPIED]
    assert all(all(map(torch.equal, weights, found[0][0])) for weights, _ in found)


@pytest.mark.parametrize(("limit", "num_sharing"), [(17, {0}), (36, {0, 1}), (80, {2})])
def test_weights_are_the_same_to_the_bit_whatever_memory_a_server_may_share_and_it_keeps_its_limit(
    processes: Processes, jobs: Servers, members: Members, limit: int, num_sharing: set[int]
) -> None:
    """Tables need 16 MiB; for each worker messages need 12, and gradients 4. Who comes first gets more."""

    def train(worker: Worker) -> tuple[list[Tensor], bool]:
        worker.steps(4)
        worker.backward()
        return worker.weights(), any(are_shared(worker))

    bounded = processes.servers(1, "--max-memory", str(limit * MIB))
    found = on_two(members, bounded, Worker, train)
    assert sum([shares for _, shares in found]) in num_sharing
    assert memory_of(bounded) <= limit * MIB
    expected = on_two(members, jobs.of(1), Worker, train)
    for weights, _ in found + expected:
        assert all(map(torch.equal, weights, expected[0][0]))


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad": {"max_norm": 0.1}},
        {"clip_grad": {"type": "value", "clip_value": 0.1}},
        {"on_nonfinite": "skip"},
    ],
)
def test_a_step_whose_sum_the_servers_look_at_copies_no_long_gradient(
    jobs: Servers, members: Members, options: dict[str, Any]
) -> None:
    worker = alone(jobs, members, **options)
    worker.steps(1)
    copied = worker.trainer._pipeline.memory.arena.grads["float32"].count_nonzero()
    assert 0 < copied <= sum(math.prod(shape) for at, shape in enumerate(SHAPES) if at not in LONG)


def test_a_gradient_that_is_not_finite_on_one_worker_skips_the_step_of_all_though_no_worker_looks(
    jobs: Servers, members: Members
) -> None:
    def train(worker: Worker) -> tuple[bool, bool, bool]:
        worker.steps(2)
        before = worker.weights()

        def spoil(one: Worker) -> None:
            if one.trainer.rank == 1:
                one.grads[2].view(-1)[7] = math.inf

        worker.steps(1, spoil)
        was_skipped, is_same = worker.trainer.last.skipped, all(map(torch.equal, worker.weights(), before))
        worker.steps(1)
        return was_skipped, is_same, all(map(torch.equal, worker.weights(), before))

    assert (
        on_two(members, jobs.of(2), Worker, train, clip_grad={"max_norm": 0.1}) == [(True, True, False)] * 2
    )


def _clip(worker: Worker) -> None:
    torch.nn.utils.clip_grad_norm_(worker.parameters, 0.5)


def _write(worker: Worker) -> None:
    for grad in worker.grads:
        grad.numpy()[-1] = 3.0
        grad.view(-1)[:7].mul_(2.0)


def _replace(worker: Worker) -> None:
    for parameter in worker.parameters[1:]:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.25


def _add(worker: Worker) -> None:
    worker.backward()


@pytest.mark.parametrize("edit", [_clip, _write, _replace, _add])
def test_whatever_a_loop_does_to_gradients_before_the_step_counts(
    jobs: Servers, members: Members, edit: Callable[[Worker], None]
) -> None:
    def train(worker: Worker) -> list[Tensor]:
        worker.steps(3, edit)
        return worker.weights()

    servers = jobs.of(2)
    found = on_two(members, servers, Worker, train)
    found += on_two(members, servers, Worker, train, zero_copy=False)
    assert all(all(map(torch.equal, weights, found[0])) for weights in found)


@pytest.mark.parametrize("keep", [lambda g: g, lambda g: g.detach(), lambda g: g[3:], lambda g: g.numpy()])
def test_a_gradient_that_a_loop_keeps_is_not_overwritten(
    jobs: Servers, members: Members, keep: Callable[[Tensor], Any]
) -> None:
    worker = alone(jobs, members)
    worker.steps()
    kept = [keep(grad) for grad in worker.grads]
    before = copy.deepcopy(kept)
    worker.trainer.zero_grad()
    drawn = worker.backward()
    assert are_shared(worker) == COPIED
    assert all(map(torch.equal, worker.grads, drawn))
    assert all(np.array_equal(a, b) for a, b in zip(kept, before, strict=True))
    worker.trainer.step(1)
    del kept
    worker.steps()
    assert are_shared(worker) == SHARED


def test_no_gradient_is_allocated_there_while_a_server_has_not_said_that_it_has_read_the_former_one(
    jobs: Servers, members: Members
) -> None:
    worker = alone(jobs, members)
    worker.steps()
    exchange: Any = worker.trainer._pipeline.binding.exchange
    unread = exchange.shared_grads._staging_buffers[1]._reads
    assert not unread
    unread[0] = []
    worker.trainer.zero_grad()
    drawn = worker.backward()
    assert are_shared(worker) == COPIED
    assert all(map(torch.equal, worker.grads, drawn))
    del unread[0]
    worker.trainer.step(1)
    worker.steps()
    assert are_shared(worker) == SHARED


def test_gradients_that_are_zeroed_in_place_and_added_to_stay_where_they_are(
    jobs: Servers, members: Members
) -> None:
    worker = alone(jobs, members)
    worker.steps()
    places = [grad.data_ptr() for grad in worker.grads]
    worker.trainer.zero_grad(set_to_none=False)
    drawn = worker.backward()
    more = worker.backward()
    assert [grad.data_ptr() for grad in worker.grads] == places
    for grad, one, other in zip(worker.grads, drawn, more, strict=True):
        torch.testing.assert_close(grad, one + other)


def test_servers_make_no_memory_for_gradients_that_a_loop_assigns(jobs: Servers, members: Members) -> None:
    worker = Worker(members.join(jobs.of(2), 0, 1, new_name()), 0)
    maps = Path("/proc/self/maps")
    for _ in range(3):
        for parameter in worker.parameters:
            parameter.grad = torch.ones_like(parameter)
        worker.trainer.step(1)
    gc.collect()  # or what earlier tests left would go meanwhile
    before = maps.read_text().count("memfd:kvstore ")
    worker.trainer.zero_grad()
    worker.steps()
    assert maps.read_text().count("memfd:kvstore ") > before
    worker.trainer.zero_grad()
    worker.backward()
    assert are_shared(worker) == SHARED


def test_a_gradient_with_a_graph_of_its_own_is_left_alone(jobs: Servers, members: Members) -> None:
    worker = alone(jobs, members)
    worker.trainer.zero_grad()
    total = torch.stack([p.pow(3).sum() for p in worker.parameters]).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a cycle, which the last line here undoes
        total.backward(create_graph=True)
    assert are_shared(worker) == COPIED
    assert all(grad.grad_fn is not None for grad in worker.grads)
    worker.trainer.zero_grad()


def test_hooks_of_a_loop_see_the_gradient_that_stays(jobs: Servers, members: Members) -> None:
    worker = alone(jobs, members)
    seen: list[Tensor | None] = []
    worker.parameters[0].register_hook(lambda grad: 2 * grad)
    worker.parameters[0].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    drawn = worker.backward()
    assert seen == [worker.parameters[0].grad]
    assert torch.equal(worker.grads[0], 2 * drawn[0])
    assert are_shared(worker) == [*SHARED[:3], True]


def test_a_forked_process_that_writes_gradients_changes_its_own_alone(
    jobs: Servers, members: Members
) -> None:
    worker = alone(jobs, members)
    drawn = worker.backward()

    def write() -> None:
        are_same = all(map(torch.equal, worker.grads, drawn))
        for grad in worker.grads:
            grad.fill_(7.0)
        are_own = all([bool((grad == 7.0).all()) for grad in worker.grads])
        os._exit(0 if are_same and are_own else 1)

    child = multiprocessing.get_context("fork").Process(target=write)
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0
    assert all(map(torch.equal, worker.grads, drawn))
    worker.trainer.step(1)


def test_a_copy_of_a_gradient_has_memory_of_its_own(jobs: Servers, members: Members) -> None:
    worker = alone(jobs, members)
    drawn = worker.backward()
    copied = copy.deepcopy(worker.grads)
    worker.trainer.step(1)
    worker.steps()
    assert all(map(torch.equal, copied, drawn))


def test_gradients_stay_when_their_server_was_killed_and_when_the_trainer_is_closed(
    processes: Processes, members: Members
) -> None:
    servers = processes.servers(2)
    worker = Worker(members.join(servers, 0, 1, new_name(), dead_after=DEAD_AFTER), 0)
    worker.steps(2)
    drawn = worker.backward()
    servers[1].signal(signal.SIGKILL)
    servers[1].end()
    with pytest.raises(ServerUnreachableError):
        worker.trainer.step(1)
    assert all(map(torch.equal, worker.grads, drawn))
    worker.trainer.zero_grad()
    drawn = worker.backward()
    assert are_shared(worker) == COPIED
    worker.trainer.close()
    assert all(map(torch.equal, worker.grads, drawn))


def test_closing_leaves_gradients_readable_and_writable(jobs: Servers, members: Members) -> None:
    worker = alone(jobs, members)
    drawn = worker.backward()
    worker.trainer.close()
    assert all(map(torch.equal, worker.grads, drawn))
    for grad in worker.grads:
        grad.zero_()
    more = worker.backward()
    assert all(map(torch.equal, worker.grads, more))


def test_a_worker_that_cannot_map_the_memory_copies_and_says_so(
    jobs: Servers, members: Members, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(shared_gradients, "put_pages", refuse)
    worker = alone(jobs, members)
    worker.steps()
    assert are_shared(worker) == COPIED
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


ASYNCHRONOUS = {"type": "dist_async"}
ROWS = 40


class ManyParameters(DrawnWorker):
    """Many short parameters, long ones of no whole lines, one in half precision, and a small table."""

    shapes = (*[(97, 101)] * 24, (701, 513), (300, 333), (640, 511))

    def __init__(self, store: DistKVStore, rank: int, is_sparse: bool = False, **options: Any) -> None:
        self.is_sparse = is_sparse
        super().__init__(store, rank, **options)

    def made(self, drawn: torch.Generator) -> list[Parameter]:
        *others, last = super().made(drawn)
        first = torch.randn(ROWS, 8, generator=drawn)
        self.table = nn.Embedding.from_pretrained(first, freeze=False, sparse=self.is_sparse)
        return [*others, Parameter(last.detach().bfloat16()), self.table.weight]

    def backward(self, without: Sequence[int] = ()) -> list[Tensor]:
        """Run a backward pass, without some parameters."""
        losses = [self.table(torch.randint(ROWS, (9,), generator=self._drawn)).pow(2).sum()]
        for at, parameter in enumerate(self.parameters[:-1]):
            drawn = torch.randn(parameter.shape, generator=self._drawn).to(parameter.dtype)
            if at not in without:
                losses.append((parameter * drawn).sum().float())
        torch.stack(losses).sum().backward()
        return []

    def steps(self, number: int = 1, without: Sequence[int] = ()) -> None:  # type: ignore[override]
        for _ in range(number):
            self.backward(without)
            self.trainer.step()

    @property
    def exchange(self) -> Any:
        return self.trainer._pipeline.binding.exchange

    @property
    def copied(self) -> int:
        """How many numbers were gathered in memory of the worker's own, since this was asked last."""
        flats = self.trainer._pipeline.memory.arena.grads.values()
        number = sum([int(flat.count_nonzero()) for flat in flats])
        for flat in flats:
            flat.zero_()
        return number


def many_alone(jobs: Servers, members: Members, servers: int = 2, **options: Any) -> ManyParameters:
    """A worker of its own job after three steps: the third has found the memory that it asked for before."""
    worker = ManyParameters(members.join(jobs.of(servers), 0, 1, new_name()), 0, **options)
    worker.steps(3)
    return worker


def on_two_that_send(members: Members, servers: Sequence[Process], work: Any, **options: Any) -> list[Any]:
    """The same, of workers that have no memory of servers for gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreExchange, "allocate_shared_grads", lambda *_, **__: None)
        return on_two(members, servers, ManyParameters, work, **options)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_weights_are_the_same_to_the_bit_whether_gradients_are_gathered_in_shared_memory_or_sent(
    jobs: Servers, members: Members, servers: int, is_sparse: bool
) -> None:
    def train(worker: ManyParameters) -> list[Tensor]:
        worker.steps(4)
        worker.steps(2, without=[1, 7, 24, 26])
        worker.steps()
        return worker.weights()

    running = jobs.of(servers)
    found = on_two(members, running, ManyParameters, train, is_sparse=is_sparse)
    found += on_two(members, running, ManyParameters, train, is_sparse=is_sparse, zero_copy=False)
    found += on_two_that_send(members, running, train, is_sparse=is_sparse)
    assert are_equal(found)


@pytest.mark.parametrize(
    "options",
    [{}, {"zero_copy": False}, {"clip_grad": {"max_norm": 0.1}}, {"amp": {"init_scale": 8.0}}, ASYNCHRONOUS],
)
def test_a_step_copies_gradients_once(jobs: Servers, members: Members, options: dict[str, Any]) -> None:
    options = options.copy()
    store = members.join(jobs.of(2), 0, 1, new_name(), type=options.pop("type", "dist_sync"))
    worker = ManyParameters(store, 0, **options)

    def step() -> None:
        worker.trainer.update_params(
            torch.stack([(p * torch.ones_like(p)).sum().float() for p in worker.parameters]).sum()
        )

    step()
    assert worker.copied > 0  # it had no other place
    for _ in range(2):
        step()
    sent = [channel._sends.data for channel in worker.exchange.shared_grads._channels.values()]
    for numbers in sent:
        numbers.zero_()
    step()
    assert worker.copied == 0
    assert not any([bool(numbers.any()) for numbers in sent])


def test_nothing_is_gathered_where_a_server_still_reads(jobs: Servers, members: Members) -> None:
    worker, other = many_alone(jobs, members), many_alone(jobs, members)
    shared_grads = worker.exchange.shared_grads
    unread = shared_grads._staging_buffers[1]._reads
    assert not unread
    before = {
        server: staging_buffer.arena.data.clone()
        for server, staging_buffer in shared_grads._staging_buffers.items()
    }
    unread[0] = []
    worker.steps()
    assert worker.copied > 0
    assert all(
        [
            torch.equal(shared_grads._staging_buffers[server].arena.data, numbers)
            for server, numbers in before.items()
        ]
    )
    del unread[0]
    worker.steps()
    assert worker.copied == 0
    other.steps(2)
    assert are_equal([worker.weights(), other.weights()])


def test_a_parameter_that_has_a_gradient_again_does_not_keep_that_of_former_steps(
    jobs: Servers, members: Members
) -> None:
    def train(worker: ManyParameters) -> list[Tensor]:
        every_other = range(0, 24, 2)
        for _ in range(3):
            worker.steps(without=every_other)
            worker.steps()
        return worker.weights()

    running = jobs.of(2)
    found = on_two(members, running, ManyParameters, train)
    assert are_equal(found + on_two_that_send(members, running, train))


def test_a_forked_process_gathers_in_memory_of_its_own(jobs: Servers, members: Members) -> None:
    worker = many_alone(jobs, members)
    shared_grads = worker.exchange.shared_grads
    before = {
        server: staging_buffer.arena.data.clone()
        for server, staging_buffer in shared_grads._staging_buffers.items()
    }
    worker.backward()

    def gather() -> None:
        memory = worker.trainer._pipeline.memory
        memory.gather([True] * len(worker.parameters), (), worker.exchange.shared_grads.targets())
        os._exit(0 if worker.copied > 0 else 1)

    child = multiprocessing.get_context("fork").Process(target=gather)
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0
    assert all(
        [
            torch.equal(shared_grads._staging_buffers[server].arena.data, numbers)
            for server, numbers in before.items()
        ]
    )


def test_gradients_that_are_allocated_there_later_have_room_beside_those_that_are_gathered(
    jobs: Servers, members: Members
) -> None:
    def train(store: DistKVStore, rank: int) -> tuple[list[Tensor], bool]:
        drawn = torch.Generator().manual_seed(rank)
        parameters = [Parameter(torch.zeros(512, 700)), *[Parameter(torch.zeros(60, 50)) for _ in range(40)]]
        trainer = kvtrainer.Trainer(parameters, "adam", {"learning_rate": 0.01}, kvstore=store)
        for at in range(8):
            given = [torch.randn(p.shape, generator=drawn) for p in parameters]
            if at < 4:
                for parameter, grad in zip(parameters, given, strict=True):
                    parameter.grad = grad
            else:
                torch.stack([(p * g).sum() for p, g in zip(parameters, given, strict=True)]).sum().backward()
            trainer.step()
        exchange: Any = trainer._pipeline.binding.exchange
        shared_grads = exchange.shared_grads
        is_shared = (
            parameters[0].grad is not None
            and shared_grads.in_place({0: parameters[0].grad.view(-1)}, False) != {}
        )
        return [parameter.detach().clone() for parameter in parameters], is_shared and bool(
            shared_grads.targets()
        )

    (first, are_here), (second, _) = members.on_two(jobs.of(2), train)
    assert are_here
    assert are_equal([first, second])


def test_two_trainers_of_one_store_do_not_gather_in_the_same_memory(jobs: Servers, members: Members) -> None:
    def train(store: DistKVStore, rank: int) -> list[Tensor]:
        first, second = ManyParameters(store, rank), ManyParameters(store, rank + 7)
        for _ in range(5):
            first.steps()
            second.backward()
            first.steps()
            second.trainer.step()
        return first.weights() + second.weights()

    running = jobs.of(2)
    found = members.on_two(running, train)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreExchange, "allocate_shared_grads", lambda *_, **__: None)
        found += members.on_two(running, train)
    assert are_equal(found)


def test_one_message_tells_a_server_of_all_gradients_and_that_they_count(
    jobs: Servers, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = members.join(jobs.of(2), 0, 1, new_name())
    parameters = [Parameter(torch.zeros(60, 50)) for _ in range(100)]
    trainer = kvtrainer.Trainer(parameters, "sgd", {"learning_rate": 0.5}, kvstore=store)
    sent: list[int] = []
    send = Connection.send

    def note(self: Connection, server: int, request: m.Request, priority: int = 0) -> None:
        if isinstance(request.body, m.Contribute) and len(request.body.pushes):
            sent.append(server)
            assert len(request.body.commits)
        send(self, server, request, priority)

    for at in range(4):
        torch.stack([p.sum() for p in parameters]).sum().backward()
        if at == 3:
            monkeypatch.setattr(Connection, "send", note)
        trainer.step()
    assert sorted(sent) == [0, 1]
    assert {value for p in parameters for value in p.detach().unique().tolist()} == {-2.0}


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_short_gradients_keep_their_memory_where_a_server_has_none_for_long_ones(
    jobs: Servers,
    members: Members,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: int,
) -> None:
    """Of two servers one makes none, or none of more than a limit."""
    ask, first = Channel.ask_for_staging_buffer, list[Channel]()

    def ask_for_too_much(channel: Channel, nbytes: int) -> ExportedStagingRequest:
        first.append(channel)
        return ask(channel, 1 << 46 if channel is first[0] and nbytes > limit else nbytes)

    monkeypatch.setattr(Channel, "ask_for_staging_buffer", ask_for_too_much)
    store = members.join(jobs.of(2), 0, 1, new_name())
    parameters = [Parameter(torch.zeros(1024, 700)), *[Parameter(torch.zeros(60, 50)) for _ in range(40)]]
    trainer = kvtrainer.Trainer(parameters, "sgd", {"learning_rate": 0.5}, kvstore=store)
    for _ in range(6):
        torch.stack([p.sum() for p in parameters]).sum().backward()
        trainer.step()
    exchange: Any = trainer._pipeline.binding.exchange
    assert bool(exchange.shared_grads.targets()) == (limit > 0)
    assert {value for p in parameters for value in p.detach().unique().tolist()} == {-3.0}
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_compressed_gradients_have_no_place_on_servers(jobs: Servers, members: Members) -> None:
    assert many_alone(jobs, members, compression_params={"type": "int8"}).exchange.shared_grads is None


def test_no_gradient_is_allocated_on_servers_that_apply_each_as_it_comes(
    jobs: Servers, members: Members
) -> None:
    store = members.join(jobs.of(2), 0, 1, new_name(), type="dist_async")
    parameter = Parameter(torch.zeros(512, 700))
    trainer = kvtrainer.Trainer([parameter], "sgd", {"learning_rate": 0.5}, kvstore=store)
    for _ in range(3):
        parameter.sum().backward()
        trainer.step()
    assert trainer._pipeline.memory.devices[0].tracker.grad_allocators == {}
    assert set(parameter.view(-1).tolist()) == {-1.5}


def test_servers_give_back_what_they_shared_with_a_worker_that_was_killed(processes: Processes) -> None:
    servers = processes.servers(2)
    script = """
import kvtrainer
w = torch.nn.Parameter(torch.zeros(1024, 4096))
trainer = kvtrainer.Trainer([w], "sgd", {"learning_rate": 0.1}, kvstore=kv)
for _ in range(3):
    w.sum().backward()
    trainer.step()
at("ready")
"""
    worker = processes.worker(script, servers, 0, 1, new_name())
    assert worker.line() == "ready"
    tables = 2 * 16 * MIB
    assert memory_of(servers) >= tables + 2 * (8 + 8) * MIB  # channels, and gradients
    worker.signal(signal.SIGKILL)
    assert eventually(lambda: memory_of(servers) < tables + MIB)
