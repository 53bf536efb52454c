"""Gradients that go to servers during the backward pass: the same bits, whatever a loop does to them before its step.

Two workers on two servers train with and without the option, and do the same beside it. Digests cover the weights after
every step.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer.errors import WorkerLostError
from kvtrainer.kvstore import DistKVStore
from kvtrainer.lr_scheduler import FactorScheduler
from tests.support.one_in import one_in
from tests.support.overlap_loops import CASES, SIZES, STEPS, Case, Loop, dropped, grown, one_edited, plain
from tests.support.stores import Servers


def trained(jobs: Servers, name: str, overlap: bool, servers: int = 2) -> list[str]:
    """The digests of both workers."""
    case, options = CASES[name]

    def body(kv: DistKVStore, rank: int) -> str:
        loop = Loop(kv, rank, overlap, **options)
        for at in range(STEPS):
            case(loop, at)
        return loop.digest.hexdigest()

    return jobs.results(2, servers, body, **({"type": "p3"} if name == "p3" else {}))


@functools.cache
def expected(jobs: Servers, name: str) -> list[str]:
    """The digests without the option; they do not depend on the way to the servers."""
    return trained(jobs, name, False)


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_without_overlap(jobs: Servers, name: str) -> None:
    assert trained(jobs, name, True) == expected(jobs, name)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("name", one_in(3, CASES))
def test_over_a_network_the_bits_are_those_without_overlap(jobs: Servers, name: str) -> None:
    assert trained(jobs, name, True, servers=1) == expected(jobs, name)


@pytest.mark.usefixtures("far")
def test_new_weights_come_during_the_backward_pass_over_a_network(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> int:
        loop = Loop(kv, rank, True)
        for at in range(2):
            plain(loop, at)
        before = sent(loop)
        loop.loss().backward()
        sent(loop)  # which is answered when the server has what this worker has sent before
        kv.barrier()
        after = sent(loop)
        kv.barrier()
        loop.step()
        return after - before

    def sent(loop: Loop) -> int:
        return sum(row["bytes_out"] for one in loop.trainer.server_stats() for row in one["tables"])

    assert jobs.results(2, 1, body)[0] > 0


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("is_scheduled", [True, False])
def test_a_rate_that_changes_in_every_step_is_predicted_so_that_nothing_is_rolled_back(
    jobs: Servers, is_scheduled: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[int]:
        numbers: dict[str, Any] = {"learning_rate": 0.01}
        if is_scheduled:
            numbers["lr_scheduler"] = FactorScheduler(1, 0.9, base_lr=0.01)
        loop = Loop(kv, rank, True, optimizer_params=numbers)
        for at in range(STEPS):
            plain(loop, at)
            if not is_scheduled:
                loop.trainer.set_learning_rate(0.01 / (at + 2))
        return [row["version"] for one in loop.trainer.server_stats() for row in one["tables"]]

    assert jobs.results(2, 1, body)[0] == [STEPS]  # the way back would be a version, too


@pytest.mark.usefixtures("sent_once")
def test_a_gradient_is_on_the_servers_before_the_step_which_sends_no_more_of_it(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[int]:
        loop = Loop(kv, rank, True)
        plain(loop, 0)
        seen = []
        for _ in range(2):
            loop.loss().backward()
            loop.received()  # which every server answers when it has what this worker has sent before
            kv.barrier()
            seen.append(loop.received())
            kv.barrier()
            loop.step()
        return seen

    first, second = jobs.results(2, 2, body)[0]
    whole = second - first
    elements = sum(numel + pair[1] for pair in itertools.pairwise(SIZES) for numel in [pair[0] * pair[1]])
    assert 2 * 4 * elements <= whole <= 2 * 4 * elements * 1.01


def test_row_sparse_gradients_go_with_the_step_beside_dense_ones_that_went_before(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int, overlap: bool) -> list[Tensor]:
        chance = torch.Generator().manual_seed(rank)
        net = nn.ModuleDict({"table": nn.Embedding(500, 16, sparse=True), "head": nn.Linear(16, 120)})
        for p in net.parameters():
            nn.init.constant_(p, 0.01)
        trainer = kvtrainer.Trainer(net, "sgd", {"learning_rate": 0.1}, kv, overlap=overlap)
        for _ in range(STEPS):
            ids = torch.randint(0, 500, (20,), generator=chance)
            net["head"](net["table"](ids)).square().sum().backward()
            trainer.step(40)
        return [p.detach().clone() for p in net.parameters()]

    found = [jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on)) for on in (True, False)]
    for first, *others in zip(*found[0], *found[1], strict=True):
        assert all(torch.equal(first, other) for other in others)


def test_parameters_that_come_while_training_go_during_the_backward_pass_too(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int, overlap: bool) -> str:
        loop = Loop(kv, rank, overlap)
        for at in range(2):
            plain(loop, at)
        grown(loop)
        for at in range(2):
            plain(loop, at)
        return loop.digest.hexdigest()

    found = [jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on)) for on in (True, False)]
    assert len({*found[0], *found[1]}) == 1


@pytest.mark.parametrize("case", [plain, one_edited, dropped])
def test_lost_messages_change_no_bit(jobs: Servers, case: Case) -> None:
    def body(kv: DistKVStore, rank: int) -> str:
        loop = Loop(kv, rank, True)
        for at in range(STEPS):
            case(loop, at)
        kv.barrier()
        return loop.digest.hexdigest()

    name = next(name for name, (one, options) in CASES.items() if one is case and not options)
    assert jobs.over_losses(2, 2, body) == expected(jobs, name)


def test_of_a_worker_that_ends_between_its_backward_pass_and_its_step_nothing_counts(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[int]:
        loop = Loop(kv, rank, True)
        plain(loop, 0)
        loop.loss().backward()
        kv.barrier()
        if rank:
            loop.trainer.__exit__(RuntimeError, RuntimeError("of the script"), None)
            return []
        with pytest.raises(WorkerLostError, match="rank 1"):
            loop.step()
        return [row["version"] for one in loop.trainer.server_stats() for row in one["tables"]]

    assert jobs.results(2, 2, body)[0] == [1, 1]


# torch hides this warning, but not from those who want errors: tensors with a graph wait between compiled graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_that_is_compiled_with_its_steps_trains_as_a_plain_one(jobs: Servers, overlap: bool) -> None:
    def body(kv: DistKVStore, rank: int, is_compiled: bool) -> list[Tensor]:
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        for p in net.parameters():
            nn.init.constant_(p, 0.5)
        trainer = kvtrainer.Trainer(net, "sgd", {"learning_rate": 0.25}, kv, overlap=overlap)

        def run(x: Tensor) -> None:
            net(x).sum().backward()
            trainer.step(2)

        call = torch.compile(run, backend="aot_eager") if is_compiled else run
        for at in range(3):
            call(torch.full((2, 3), 0.1 * (at + 1)))
        trainer.close()
        return [p.detach().clone() for p in net.parameters()]

    torch._dynamo.reset()
    for found, expected in zip(
        *(jobs.results(1, 2, lambda kv, rank, on=on: body(kv, rank, on)) for on in (True, False)), strict=True
    ):
        assert all(map(torch.equal, found, expected))
