"""Gradients that a backward pass puts where servers of the host read them: equal results, and every edit counts."""

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
from torch import Tensor
from torch.nn import Parameter

import kvtrainer
from kvstore_server.probe import look
from kvtrainer.client import shared_gradients
from kvtrainer.errors import ServerUnreachableError
from kvtrainer.kvstore import DistKVStore
from tests.support.limits import DEAD_AFTER, LIMIT
from tests.support.processes import Members, Process, Processes, new_name
from tests.support.stores import Servers

SHAPES = ((1200, 333), (5,), (64, 4096), (512, 700))
"""Slices that fill their pages, others that two servers share a page of, and one that is too short."""
LONG = (0, 2, 3)
MIB = 1 << 20
WAY = "auto"
"""Servers share memory whatever way the other tests take."""


class Worker:
    """A worker with parameters of SHAPES, whose gradients are drawn by its rank."""

    def __init__(self, store: DistKVStore, rank: int, optimizer: str = "adam", **options: Any) -> None:
        drawn = torch.Generator().manual_seed(5)
        self.parameters = [Parameter(torch.randn(shape, generator=drawn)) for shape in SHAPES]
        names = {f"p{at}": parameter for at, parameter in enumerate(self.parameters)}
        self.trainer = kvtrainer.Trainer(names, optimizer, {"learning_rate": 0.01}, kvstore=store, **options)
        self._drawn = torch.Generator().manual_seed(rank)

    def backward(self) -> list[Tensor]:
        """Run a backward pass; return the gradients that it has."""
        drawn = [torch.randn(shape, generator=self._drawn) for shape in SHAPES]
        torch.stack([(p * d).sum() for p, d in zip(self.parameters, drawn, strict=True)]).sum().backward()
        return drawn

    def steps(self, number: int = 1, edit: Callable[[Worker], object] = lambda _: None) -> None:
        for _ in range(number):
            self.backward()
            edit(self)
            self.trainer.step(2)

    @property
    def grads(self) -> list[Tensor]:
        return [grad for p in self.parameters if (grad := p.grad) is not None]

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]


def are_born(worker: Worker) -> list[bool]:
    """Tell of which parameters the gradients lie in memory of servers, by the system's list of mappings."""
    mappings = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    parts = [[int(edge, 16) for edge in one[0].split("-")] for one in mappings if "memfd:kvstore " in one[-1]]
    places = [grad.data_ptr() + grad.nbytes // 3 for grad in worker.grads]
    return [any([begin <= place < end for begin, end in parts]) for place in places]


def memory_of(servers: Sequence[Process]) -> int:
    """The bytes that servers have promised together, as they tell whoever looks."""
    told = look([server.address for server in servers], LIMIT)
    return sum([facts["memory"] for facts in told if facts is not None])


BORN = [at in LONG for at in range(len(SHAPES))]
NOT_BORN = [False] * len(SHAPES)


def alone(jobs: Servers, members: Members, servers: int = 2, **options: Any) -> Worker:
    """A worker of its own job after two steps: the second one has found gradients that can be allocated, and asked."""
    worker = Worker(members.join(jobs.of(servers), 0, 1, new_name()), 0, **options)
    worker.steps(2)
    return worker


def on_two(
    members: Members, servers: Sequence[Process], work: Callable[[Worker], Any], **options: Any
) -> list[Any]:
    """What two workers return that do the same work."""
    return members.on_two(servers, lambda store, rank: work(Worker(store, rank, **options)))


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_weights_are_the_same_to_the_bit_whether_gradients_are_born_in_shared_memory_or_copied(
    jobs: Servers, members: Members, optimizer: str
) -> None:
    def train(worker: Worker) -> tuple[list[Tensor], list[bool]]:
        worker.steps(4)
        drawn = worker.backward()
        assert all(map(torch.equal, worker.grads, drawn))
        return worker.weights(), are_born(worker)

    servers = jobs.of(3)
    found = on_two(members, servers, train, optimizer=optimizer)
    found += on_two(members, servers, train, optimizer=optimizer, zero_copy=False)
    assert [where for _, where in found] == [BORN, BORN, NOT_BORN, NOT_BORN]
    assert all(all(map(torch.equal, weights, found[0][0])) for weights, _ in found)


@pytest.mark.parametrize(("limit", "num_sharing"), [(17, {0}), (36, {0, 1}), (80, {2})])
def test_weights_are_the_same_to_the_bit_whatever_memory_a_server_may_share_and_it_keeps_its_limit(
    processes: Processes, jobs: Servers, members: Members, limit: int, num_sharing: set[int]
) -> None:
    """Tables need 16 MiB; for each worker messages need 12, and gradients 4. Who comes first gets more."""

    def train(worker: Worker) -> tuple[list[Tensor], bool]:
        worker.steps(4)
        worker.backward()
        return worker.weights(), any(are_born(worker))

    bounded = processes.servers(1, "--max-memory", str(limit * MIB))
    found = on_two(members, bounded, train)
    assert sum([shares for _, shares in found]) in num_sharing
    assert memory_of(bounded) <= limit * MIB
    expected = on_two(members, jobs.of(1), train)
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

    assert on_two(members, jobs.of(2), train, clip_grad={"max_norm": 0.1}) == [(True, True, False)] * 2


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
    found = on_two(members, servers, train)
    found += on_two(members, servers, train, zero_copy=False)
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
    assert are_born(worker) == NOT_BORN
    assert all(map(torch.equal, worker.grads, drawn))
    assert all(np.array_equal(a, b) for a, b in zip(kept, before, strict=True))
    worker.trainer.step(1)
    del kept
    worker.steps()
    assert are_born(worker) == BORN


def test_no_gradient_is_born_while_a_server_has_not_said_that_it_has_read_the_former_one(
    jobs: Servers, members: Members
) -> None:
    worker = alone(jobs, members)
    worker.steps()
    exchange: Any = worker.trainer._pipeline.link.exchange
    unread = exchange.shared_grads._staging_buffers[1]._reads
    assert not unread
    unread[0] = []
    worker.trainer.zero_grad()
    drawn = worker.backward()
    assert are_born(worker) == NOT_BORN
    assert all(map(torch.equal, worker.grads, drawn))
    del unread[0]
    worker.trainer.step(1)
    worker.steps()
    assert are_born(worker) == BORN


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
    assert are_born(worker) == BORN


def test_a_gradient_with_a_graph_of_its_own_is_left_alone(jobs: Servers, members: Members) -> None:
    worker = alone(jobs, members)
    worker.trainer.zero_grad()
    total = torch.stack([p.pow(3).sum() for p in worker.parameters]).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a cycle, which the last line here undoes
        total.backward(create_graph=True)
    assert are_born(worker) == NOT_BORN
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
    assert are_born(worker) == [*BORN[:3], True]


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
    assert are_born(worker) == NOT_BORN
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
    assert are_born(worker) == NOT_BORN
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
