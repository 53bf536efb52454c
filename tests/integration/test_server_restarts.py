"""Servers that die in the middle of a job and come back with their state: the job ends with the bits of a quiet one.

The servers are threads of the test whose sockets, channels and open rounds are lost (`tests/support/restarted_server`).
They die at requests that are drawn, before or after they have handled them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.protocol import messages as m
from kvtrainer.common.env import TRANSPORT
from kvtrainer.errors import ServerLostState, ServerUnreachableError
from kvtrainer.kvstore import DistKVStore
from tests.integration.test_mapped_tables import Worker as TableWorker
from tests.integration.test_mapped_tables import expected
from tests.integration.test_shared_gradients import are_shared
from tests.integration.test_zero_copy import SHAPES, is_mapped
from tests.support.drawn_workers import DrawnWorker
from tests.support.one_in import one_in
from tests.support.overlap_loops import CASES, STEPS, Loop
from tests.support.processes import Members, eventually, round_of, together
from tests.support.restarted_server import Deaths, RestartedServer, never
from tests.support.sparse_model import Embeddings, batches

WAY = "auto"
"""Tests that concern the way to servers name it."""

Body = Callable[[DistKVStore, int], Any]


@pytest.fixture(params=["auto", "tcp"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TRANSPORT, request.param)
    return str(request.param)


class Job:
    """A job of some workers, threads of the test, on servers that die and come back."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.servers: list[RestartedServer] = []

    def start(self, servers: int, **options: Any) -> list[RestartedServer]:
        self.servers = [
            self._stack.enter_context(RestartedServer(index, servers, **options)) for index in range(servers)
        ]
        return self.servers

    def run(
        self, body: Body, servers: int, seed: int | None = None, workers: int = 2, kind: type = m.Contribute,
        **options: Any,
    ) -> list[Any]:  # fmt: skip
        """What the workers return, with servers of their own, which die if there is a seed."""
        for at, server in enumerate(self.start(servers)):
            if seed is not None:
                server.plan = Deaths(10 * seed + at, kind=kind)
        with Members() as members:
            addresses = [server.address for server in self.servers]
            stores = [members.join(addresses, rank, workers, "job", **options) for rank in range(workers)]
            found = together(*(lambda s=s, r=r: body(s, r) for r, s in enumerate(stores)))
        for one in found:
            if isinstance(one, BaseException):
                raise one
        assert seed is None or all(server.deaths for server in self.servers)
        return found


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack)


def looped(name: str, overlap: bool) -> Body:
    case, options = CASES[name]

    def body(kv: DistKVStore, rank: int) -> str:
        loop = Loop(kv, rank, overlap, **options)
        for at in range(STEPS):
            case(loop, at)
        return loop.digest.hexdigest()

    return body


FEW = ("plain", "clip_grad, dropped", "overflowing", "by workers", "uneven", "2bit, edited", "topk, edited")
"""Cases that go their own ways through a round: slices, held sums, vetoes, sums that come back, joins, codecs."""


ONE_OF = dict(zip(FEW, cycle(product(["auto", "tcp"], [False, True]))))
"""The combination of each that `make test` has."""


@pytest.mark.parametrize(
    ("name", "way", "overlap"),
    [
        pytest.param(name, *one, marks=() if ONE_OF.get(name) == one else pytest.mark.full)
        for name in CASES
        for one in product(["auto", "tcp"], [False, True])
    ],
    indirect=["way"],
)
def test_a_training_that_servers_interrupt_has_the_bits_of_a_quiet_one(
    job: Job, way: str, name: str, overlap: bool
) -> None:
    type_ = {"type": "p3"} if name == "p3" else {}
    body = looped(name, overlap)
    assert job.run(body, 2, seed=1, **type_) == job.run(body, 2, **type_)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize(
    "name", ["plain", "one edited", "fp16, edited", "clipped by the loop", "2bit, dropped"]
)
def test_weights_that_came_before_the_end_of_a_round_are_not_mixed_with_those_of_the_next_process(
    job: Job, name: str
) -> None:
    body = looped(name, overlap=True)
    assert job.run(body, 1, seed=2) == job.run(body, 1)


class Worker(DrawnWorker):
    shapes = SHAPES


def test_weights_are_mapped_and_gradients_shared_again_with_the_next_process(job: Job) -> None:
    """Also where the new process numbers its memory in another way."""

    def body(kv: DistKVStore, rank: int) -> tuple[list[Tensor], bool, bool]:
        worker = Worker(kv, rank)
        worker.steps(8)
        for server in job.servers:
            server.plan = never
        worker.steps(4)
        worker.backward()
        is_shared = are_shared(worker)[0]
        worker.trainer.step(2)
        return worker.weights(), is_shared, is_mapped(worker.parameters[0])

    found = job.run(body, 2, seed=3) + job.run(body, 2)
    assert all(all(map(torch.equal, weights, found[0][0])) for weights, _, _ in found)
    assert [(is_shared, is_shown) for _, is_shared, is_shown in found] == [(True, True)] * 4


@pytest.mark.parametrize("way", [pytest.param("auto", marks=pytest.mark.full), "tcp"], indirect=True)
def test_rows_are_loaded_into_servers_that_die_meanwhile(job: Job, way: str) -> None:
    rows = torch.arange(1200.0).view(300, 4)

    def load(kv: DistKVStore, rank: int) -> Tensor:
        table = kvtrainer.Embedding(4)
        with kvtrainer.Trainer(
            [("t", table.weight)], "adagrad", {"learning_rate": 1.0}, kvstore=kv
        ) as trainer:
            for _ in range(2):  # before the first step, and after it
                table.load_rows(torch.arange(300), rows)
                table(torch.arange(300)).sum().backward()
                trainer.step(1)
                table.weight.grad = None
            return table(torch.arange(301)).detach()

    for found in job.run(load, 2, seed=3, kind=m.SliceState):
        assert torch.allclose(found[:300], rows - 1, atol=1e-4)
        assert bool((found[300].abs() < 5).all())


def test_rows_are_read_and_given_as_before(job: Job, way: str) -> None:
    nets = [
        Embeddings() for _ in range(4)
    ]  # their weights are drawn by torch's own generator, which threads share

    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        net = nets.pop()
        trainer = kvtrainer.Trainer(net, "adagrad", {"learning_rate": 0.1}, kv)
        for big, small in batches(rank):
            net(big, small).backward()
            trainer.step(40)
        trainer.pull_weights()
        return [p.detach().clone() for p in net.parameters()]

    found = job.run(body, 2, seed=4) + job.run(body, 2)
    assert all(all(map(torch.equal, one, found[0])) for one in found)


def test_rows_that_are_read_in_the_memory_of_servers_or_asked_for_are_those_of_the_next_process(
    job: Job, way: str
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        return TableWorker(kv, rank).train(4)

    for rank, seen in enumerate(job.run(body, 2, seed=5, kind=object)):
        assert all(map(torch.equal, seen, expected(rank, 4)))


@pytest.mark.parametrize(("way", "seed"), one_in(2, ["auto", "tcp"], range(3)), indirect=["way"])
def test_verbs_barriers_and_states_survive_deaths_at_any_request(
    job: Job, way: str, seed: int, tmp_path: Path
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
        keys = [f"k{at}" for at in range(6)]
        sizes = [3, 5000, 70_000, 1, 40_000, 300]
        values = [torch.full((size,), float(at)) for at, size in enumerate(sizes)]
        kv.init(keys, values)
        order = keys if rank else keys[::-1]  # ranks may use keys in any order
        for step in range(4):
            for key in order:
                at = keys.index(key)
                kv.push(key, torch.full((sizes[at],), 0.1 * (step + rank + 1)))
            kv.barrier()
        path = str(tmp_path / f"states{seed}")
        if not rank:
            kv.save_optimizer_states(path)
        kv.barrier()
        kv.load_optimizer_states(path)
        kv.barrier()
        return [round_of(kv, key, torch.ones(size)) for key, size in zip(keys, sizes, strict=True)]

    found = job.run(body, 2, seed=seed, kind=object) + job.run(body, 2)
    assert all(all(map(torch.equal, one, found[0])) for one in found)


@pytest.mark.parametrize(
    ("way", "type_"), one_in(2, ["auto", "tcp"], ["dist_async", "dist_ssp"]), indirect=["way"]
)
def test_every_push_of_an_asynchronous_job_counts_once(job: Job, way: str, type_: str) -> None:
    def body(kv: DistKVStore, rank: int) -> float:
        kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=1.0))
        kv.init("sum", torch.zeros(20_000))
        for at in range(30):
            kv.push("sum", torch.full((20_000,), float(1 + at % 3)))
        kv.barrier()
        out = torch.empty(20_000)
        kv.pull("sum", out=out)
        kv.barrier()
        assert out.eq(out[0]).all()
        return float(out[0])

    options = {"staleness": 2} if type_ == "dist_ssp" else {}
    found = job.run(body, 2, seed=6, type=type_, **options)
    assert found == job.run(body, 2, type=type_, **options)


def test_a_server_that_does_not_come_back_is_an_error_only_after_its_time(
    job: Job, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    [server] = job.start(1, restart_timeout=0.5)
    with Members() as members:
        kv = members.join([server.address], 0, 1, "job")
        kv.init("a", torch.zeros(3))
        server.may_return.clear()
        server.plan = Deaths(1, between=(1, 1), most=1)
        with pytest.raises(ServerUnreachableError, match=r"did not come back within 0\.5 s"):
            round_of(kv, "a", torch.ones(3))
    assert caplog.text.count("waiting up to 0.5 s for it to come back") == 1


def test_a_server_that_comes_back_without_the_state_of_the_job_is_found_at_once(job: Job, way: str) -> None:
    [server] = job.start(1, keeps_state=False)
    with Members() as members:
        kv = members.join([server.address], 0, 1, "job")
        kv.init("a", torch.zeros(3))
        server.plan = Deaths(1, between=(1, 1), most=1)
        with pytest.raises(ServerLostState):
            round_of(kv, "a", torch.ones(3))


@pytest.mark.parametrize("way", ["auto", pytest.param("tcp", marks=pytest.mark.full)], indirect=True)
def test_a_worker_that_has_to_wait_for_nobody_goes_on_while_a_server_is_away(job: Job, way: str) -> None:
    """Heartbeats reach the next process, too."""
    first, second = job.start(2)
    with Members() as members:
        kv = members.join([first.address, second.address], 0, 1, "job")
        keys = ["a", "b", "c", "d"]
        kv.init(keys, [torch.zeros(3)] * 4)
        second.may_return.clear()
        second.plan = Deaths(1, between=(1, 1), most=1, kind=m.Heartbeat)
        assert eventually(lambda: second.deaths == 1)
        client = kv._clients[0]
        near = [t for t in client.rounds.tables.all if list(t.numbers) == [0]]
        for table in near:
            assert round_of(kv, table.name, torch.ones(3)).eq(1.0).all()
        assert near
        second.may_return.set()
        for key in keys:
            round_of(kv, key, torch.ones(3))
        heard = client._session.transport.last_heartbeat(1)
        assert eventually(lambda: client._session.transport.last_heartbeat(1) > heard)
