"""Gradients that a step copies once, to memory of the host's servers: equal results, and nothing is overwritten."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import kvtrainer
from kvstore_server.protocol import messages as m
from kvstore_server.transport.channel import Channel
from kvstore_server.transport.exports import StagingBufferRequest
from kvtrainer.client.connection import Connection
from kvtrainer.kvstore import DistKVStore
from kvtrainer.sync.exchange import StoreExchange
from tests.support.limits import LIMIT
from tests.support.processes import Members, Process, new_name
from tests.support.stores import Servers

WAY = "auto"
"""Servers share memory whatever way the other tests take."""
ASYNCHRONOUS = {"type": "dist_async"}
ROWS = 40


class Worker:
    """A worker with many short parameters, long ones of no whole lines, one in half precision, and a small table.

    Its gradients are drawn by its rank.
    """

    def __init__(self, store: DistKVStore, rank: int, is_sparse: bool = False, **options: Any) -> None:
        drawn = torch.Generator().manual_seed(5)
        shapes = [(97, 101)] * 24 + [(701, 513), (300, 333)]
        self.parameters = [Parameter(torch.randn(shape, generator=drawn)) for shape in shapes]
        self.parameters.append(Parameter(torch.randn(640, 511, generator=drawn).bfloat16()))
        self.table = nn.Embedding.from_pretrained(
            torch.randn(ROWS, 8, generator=drawn), freeze=False, sparse=is_sparse
        )
        self.parameters.append(self.table.weight)
        names = {f"p{at}": parameter for at, parameter in enumerate(self.parameters)}
        self.trainer = kvtrainer.Trainer(names, "adam", {"learning_rate": 0.01}, kvstore=store, **options)
        self._drawn = torch.Generator().manual_seed(rank)

    def backward(self, without: Sequence[int] = ()) -> None:
        """Run a backward pass, without some parameters."""
        losses = [self.table(torch.randint(ROWS, (9,), generator=self._drawn)).pow(2).sum()]
        for at, parameter in enumerate(self.parameters[:-1]):
            drawn = torch.randn(parameter.shape, generator=self._drawn).to(parameter.dtype)
            if at not in without:
                losses.append((parameter * drawn).sum().float())
        torch.stack(losses).sum().backward()

    def steps(self, number: int = 1, without: Sequence[int] = ()) -> None:
        for _ in range(number):
            self.backward(without)
            self.trainer.step()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    @property
    def exchange(self) -> Any:
        return self.trainer._pipeline.link.exchange

    @property
    def copied(self) -> int:
        """How many numbers were gathered in memory of the worker's own, since this was asked last."""
        flats = self.trainer._pipeline.memory.arena.grads.values()
        number = sum([int(flat.count_nonzero()) for flat in flats])
        for flat in flats:
            flat.zero_()
        return number


def alone(jobs: Servers, members: Members, servers: int = 2, **options: Any) -> Worker:
    """A worker of its own job after three steps: the third has found the memory that it asked for before."""
    worker = Worker(members.join(jobs.of(servers), 0, 1, new_name()), 0, **options)
    worker.steps(3)
    return worker


def on_two(members: Members, servers: Sequence[Process], work: Any, **options: Any) -> list[Any]:
    """What two workers return that do the same work."""
    return members.on_two(servers, lambda store, rank: work(Worker(store, rank, **options)))


def on_two_that_send(members: Members, servers: Sequence[Process], work: Any, **options: Any) -> list[Any]:
    """The same, of workers that have no memory of servers for gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreExchange, "allocate_shared_grads", lambda *_, **__: None)
        return on_two(members, servers, work, **options)


def are_equal(found: Sequence[Sequence[Tensor]]) -> bool:
    return all(all(map(torch.equal, weights, found[0])) for weights in found)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_weights_are_the_same_to_the_bit_whether_gradients_are_gathered_in_shared_memory_or_sent(
    jobs: Servers, members: Members, servers: int, is_sparse: bool
) -> None:
    def train(worker: Worker) -> list[Tensor]:
        worker.steps(4)
        worker.steps(2, without=[1, 7, 24, 26])
        worker.steps()
        return worker.weights()

    running = jobs.of(servers)
    found = on_two(members, running, train, is_sparse=is_sparse)
    found += on_two(members, running, train, is_sparse=is_sparse, zero_copy=False)
    found += on_two_that_send(members, running, train, is_sparse=is_sparse)
    assert are_equal(found)


@pytest.mark.parametrize(
    "options",
    [{}, {"zero_copy": False}, {"clip_grad": {"max_norm": 0.1}}, {"amp": {"init_scale": 8.0}}, ASYNCHRONOUS],
)
def test_a_step_copies_gradients_once(jobs: Servers, members: Members, options: dict[str, Any]) -> None:
    options = options.copy()
    store = members.join(jobs.of(2), 0, 1, new_name(), type=options.pop("type", "dist_sync"))
    worker = Worker(store, 0, **options)

    def step() -> None:
        worker.trainer.update_params(
            torch.stack([(p * torch.ones_like(p)).sum().float() for p in worker.parameters]).sum()
        )

    step()
    assert worker.copied > 0  # it had no other place
    for _ in range(2):
        step()
    sent = [channel._sends.numbers for channel in worker.exchange.shared_grads._channels.values()]
    for numbers in sent:
        numbers.zero_()
    step()
    assert worker.copied == 0
    assert not any([bool(numbers.any()) for numbers in sent])


def test_nothing_is_gathered_where_a_server_still_reads(jobs: Servers, members: Members) -> None:
    worker, other = alone(jobs, members), alone(jobs, members)
    shared_grads = worker.exchange.shared_grads
    unread = shared_grads._staging_buffers[1]._reads
    assert not unread
    before = {
        server: staging_buffer.arena.numbers.clone()
        for server, staging_buffer in shared_grads._staging_buffers.items()
    }
    unread[0] = []
    worker.steps()
    assert worker.copied > 0
    assert all(
        [
            torch.equal(shared_grads._staging_buffers[server].arena.numbers, numbers)
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
    def train(worker: Worker) -> list[Tensor]:
        every_other = range(0, 24, 2)
        for _ in range(3):
            worker.steps(without=every_other)
            worker.steps()
        return worker.weights()

    running = jobs.of(2)
    found = on_two(members, running, train)
    assert are_equal(found + on_two_that_send(members, running, train))


def test_a_forked_process_gathers_in_memory_of_its_own(jobs: Servers, members: Members) -> None:
    worker = alone(jobs, members)
    shared_grads = worker.exchange.shared_grads
    before = {
        server: staging_buffer.arena.numbers.clone()
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
            torch.equal(shared_grads._staging_buffers[server].arena.numbers, numbers)
            for server, numbers in before.items()
        ]
    )


def test_gradients_that_are_born_later_have_room_beside_those_that_are_gathered(
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
        exchange: Any = trainer._pipeline.link.exchange
        shared_grads = exchange.shared_grads
        is_born = (
            parameters[0].grad is not None
            and shared_grads.in_place({0: parameters[0].grad.view(-1)}, False) != {}
        )
        return [parameter.detach().clone() for parameter in parameters], is_born and bool(
            shared_grads.targets()
        )

    (first, are_here), (second, _) = members.on_two(jobs.of(2), train)
    assert are_here
    assert are_equal([first, second])


def test_two_trainers_of_one_store_do_not_gather_in_the_same_memory(jobs: Servers, members: Members) -> None:
    def train(store: DistKVStore, rank: int) -> list[Tensor]:
        first, second = Worker(store, rank), Worker(store, rank + 7)
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

    def ask_for_too_much(channel: Channel, nbytes: int) -> StagingBufferRequest:
        first.append(channel)
        return ask(channel, 1 << 46 if channel is first[0] and nbytes > limit else nbytes)

    monkeypatch.setattr(Channel, "ask_for_staging_buffer", ask_for_too_much)
    store = members.join(jobs.of(2), 0, 1, new_name())
    parameters = [Parameter(torch.zeros(1024, 700)), *[Parameter(torch.zeros(60, 50)) for _ in range(40)]]
    trainer = kvtrainer.Trainer(parameters, "sgd", {"learning_rate": 0.5}, kvstore=store)
    for _ in range(6):
        torch.stack([p.sum() for p in parameters]).sum().backward()
        trainer.step()
    exchange: Any = trainer._pipeline.link.exchange
    assert bool(exchange.shared_grads.targets()) == (limit > 0)
    assert {value for p in parameters for value in p.detach().unique().tolist()} == {-3.0}
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_compressed_gradients_have_no_place_on_servers(jobs: Servers, members: Members) -> None:
    assert alone(jobs, members, compression_params={"type": "int8"}).exchange.shared_grads is None


def test_no_gradient_is_born_on_servers_that_apply_each_as_it_comes(jobs: Servers, members: Members) -> None:
    store = members.join(jobs.of(2), 0, 1, new_name(), type="dist_async")
    parameter = Parameter(torch.zeros(512, 700))
    trainer = kvtrainer.Trainer([parameter], "sgd", {"learning_rate": 0.5}, kvstore=store)
    for _ in range(3):
        parameter.sum().backward()
        trainer.step()
    assert trainer._pipeline.memory.devices[0].tracker.grad_allocators == {}
    assert set(parameter.view(-1).tolist()) == {-1.5}
