"""Ranks of torch.distributed that sum gradients during the backward pass, whatever a loop does to them before its step.

Scenarios run on every rank of one job. Each gives what was found there beside what it has to be: the weights of the
same loop without overlap, those of DDP, or how many sums the backward pass and the step have begun.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kvtrainer
from kvtrainer.common.env import TRANSPORT
from kvtrainer.sync.select import select_store
from tests.support.jobs import Job, Results, begin_group, error_of, run_job
from tests.support.limits import SOON
from tests.support.overlap_loops import CASES, SIZES, STEPS, Loop, grown, plain
from tests.support.scenarios import Pairs, check_every_rank, scenarios_of

SMALL = 65536 / 2**20
"""Of a bucket, in MB: the second weight of a Loop is one, what comes before it and what comes behind it are others. It
takes two sums where it is summed in the step."""
HERE = sorted(
    name
    for name, (_, options) in CASES.items()
    if "compression_params" not in options and name not in ("p3", "written")
)
"""The cases in which the ranks update."""


def build(rank: int, overlap: bool, size: float | None = SMALL, **options: Any) -> Loop:
    loop = Loop("device", rank, overlap, **options)
    loop.trainer.configure(bucket_size_mb=size)
    return loop


@contextmanager
def counted() -> Iterator[mock.Mock]:
    """Count the sums that this rank begins in the block."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        yield called


def sums_of(loop: Loop, edit: Callable[[], object] = lambda: None) -> list[int]:
    """How many sums a backward pass begins, and then the step."""
    with counted() as ahead:
        loop.loss().backward()
    edit()
    with counted() as behind:
        loop.step(ignore_stale_grad=True)
    return [ahead.call_count, behind.call_count]


def learned(rank: int, **options: Any) -> Loop:
    """A loop of which the order of the gradients is known."""
    loop = build(rank, True, **options)
    for at in range(2):
        plain(loop, at)
    return loop


def weights_of(loop: Loop) -> list[Tensor]:
    return [p.detach().clone() for p in loop.net.parameters()]


def all_is_summed_during_the_backward_pass_once_the_order_is_known(rank: int, ranks: int) -> Pairs:
    loop = build(rank, True)
    yield [sums_of(loop) for _ in range(4)], [[0, 3], [0, 3], [3, 0], [3, 0]]


def sums_are_kept_until_others_have_ended(rank: int, ranks: int) -> Pairs:
    """If a thread of gloo lets go last of what torch keeps with them, it may abort a process that ends meanwhile."""
    loop, begun = learned(rank), list[Any]()

    def note(tensor: Tensor, **options: Any) -> Any:
        begun.append(weakref.ref(work := real(tensor, **options)))
        return work

    real = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", note):
        for _ in range(2):
            plain(loop, 0)
    yield [one() is None for one in begun], [True] * 3 + [False] * 3


def only_a_bucket_with_an_edited_gradient_is_summed_again_and_on_all_ranks(rank: int, ranks: int) -> Pairs:
    loop = learned(rank)

    def edit() -> None:
        if not rank and loop.second.grad is not None:
            loop.second.grad.data[3, 3] = -7.0

    yield sums_of(loop, edit), [3, 2]
    yield sums_of(loop), [3, 0]


def a_gradient_that_one_rank_drops_is_summed_with_zeros(rank: int, ranks: int) -> Pairs:
    loop = learned(rank)

    def drop() -> None:
        if rank:
            loop.second.grad = None

    yield sums_of(loop, drop), [3, 2]


def several_passes_send_with_the_last_one(rank: int, ranks: int) -> Pairs:
    loop = learned(rank)
    loop.loss().backward()
    sums_of(loop)
    with counted() as first:
        loop.loss().backward()
    yield first.call_count, 0
    yield sums_of(loop), [3, 0]


def each_gradient_may_go_by_itself_and_all_may_go_at_once(rank: int, ranks: int) -> Pairs:
    for options, count in (
        ({"coalesce": False}, 6),
        ({"bucket_size_mb": -1}, 1),
        ({"bucket_size_mb": None}, 1),
    ):
        loop = Loop("device", rank, True)
        loop.trainer.configure(**options)
        for at in range(2):
            plain(loop, at)
        yield sums_of(loop), [count, 0]


def the_order_is_that_of_the_gradients_not_of_the_parameters(rank: int, ranks: int) -> Pairs:
    """The layer that was made first is used last, so its gradient comes, and goes, first."""
    seen: list[list[int]] = []
    last, first = nn.Linear(40, 50, bias=False), nn.Linear(30, 40, bias=False)
    net = nn.Sequential(first, last)
    trainer = kvtrainer.Trainer([last.weight, first.weight], "sgd", kvstore="device", overlap=True)
    trainer.configure(coalesce=False)
    for _ in range(3):
        with counted() as called:
            net(torch.ones(2, 30)).sum().backward()
        seen.append([call.args[0].numel() for call in called.call_args_list])
        trainer.step(1)
    yield seen[:2], [[], []]
    yield [len(seen[2]), seen[2][0] >= 2000 > seen[2][1]], [2, True]


def parameters_without_gradients_hold_up_nothing(rank: int, ranks: int) -> Pairs:
    """One is frozen, one is never used, and one is used by rank 0 alone."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [nn.Linear(20, 20) for _ in range(5)]
    layers[1].requires_grad_(False)
    trainer = kvtrainer.Trainer(nn.ModuleList(layers), "sgd", {"lr": 0.01}, "device", overlap=True)
    trainer.configure(coalesce=False)
    counts = []
    for _ in range(6):
        x = torch.ones(2, 20)
        for at, layer in enumerate(layers):
            x = layer(x) if at != 3 and (at != 2 or not rank) else x
        with counted() as ahead:
            x.sum().backward()
        with counted() as behind:
            trainer.step(1, ignore_stale_grad=True)
        counts.append((ahead.call_count, behind.call_count))
    yield counts[0], (0, 6)
    yield counts[-1], (6, 0)


def gradients_of_other_parameters_get_buckets_of_their_own_in_time(rank: int, ranks: int) -> Pairs:
    loop = learned(rank)
    loop.net[0].requires_grad_(False)
    found = [sums_of(loop) for _ in range(6)]
    yield found[-1], [2, 0]


def a_backward_pass_that_broke_off_on_one_rank_can_be_made_again(rank: int, ranks: int) -> Pairs:
    loops = [learned(rank), build(rank, False)]
    for at in range(2):
        plain(loops[1], at)
    for loop in loops:
        x = loop.loss()
        if rank:
            hook = loop.first.register_hook(_raise)
            try:
                x.backward()
            except ArithmeticError:
                hook.remove()
                loop.trainer.zero_grad()
                loop.loss().backward()
        else:
            x.backward()
        loop.step()
        plain(loop, 0)
    yield loops[0].digest.hexdigest(), loops[1].digest.hexdigest()


def _raise(grad: Tensor) -> Tensor:
    raise ArithmeticError


def an_edit_in_every_step_is_said_once(rank: int, ranks: int) -> Pairs:
    loop, said = learned(rank), _Records()
    logger = logging.getLogger("kvtrainer.client.rounds")
    logger.addHandler(said)
    propagates, logger.propagate = logger.propagate, False

    def halve() -> None:
        for p in loop.net.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)

    for _ in range(6):
        sums_of(loop, halve)
    logger.removeHandler(said)
    logger.propagate = propagates
    yield [("overlap=True" in text, "twice" in text) for text in said.texts], [(True, True)]


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def weights_are_those_of_ddp(rank: int, ranks: int) -> Pairs:
    loop = build(rank, True, optimizer="torch:SGD", optimizer_params={"lr": 0.01, "momentum": 0.9})
    other = build(rank, False)
    wrapped = DistributedDataParallel(other.net)
    sgd = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        loop.loss().backward()
        loop.trainer.step()
        sgd.zero_grad()
        wrapped(torch.randn(8, SIZES[0], generator=other.chance)).square().sum().backward()
        sgd.step()
    for mine, theirs in zip(loop.net.parameters(), other.net.parameters(), strict=True):
        yield bool(torch.allclose(mine, theirs, rtol=1e-6, atol=1e-6)), True


def half_precision_and_several_dtypes_have_the_bits_of_a_loop_without_overlap(rank: int, ranks: int) -> Pairs:
    found = []
    for overlap in (True, False):
        chance = torch.Generator().manual_seed(4)
        drawn = [torch.rand(size, generator=chance) for size in (700, 30, 2000, 11)]
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
        w = [nn.Parameter(one.to(dtype, copy=True)) for one, dtype in zip(drawn, dtypes, strict=True)]
        trainer = kvtrainer.Trainer(w, "sgd", {"lr": 0.1}, "device", overlap=overlap)
        for at in range(STEPS):
            torch.stack([(p.float() * (p.float() + rank + at)).sum() for p in w]).sum().backward()
            trainer.step(8)
        found.append([p.detach().clone() for p in w])
    yield [torch.equal(*pair) for pair in zip(*found, strict=True)], [True] * 4


def row_sparse_gradients_go_with_the_step(rank: int, ranks: int) -> Pairs:
    found, counts = [], []
    for overlap in (True, False):
        chance = torch.Generator().manual_seed(rank)
        net = nn.ModuleDict({"table": nn.Embedding(500, 16, sparse=True), "head": nn.Linear(16, 120)})
        for p in net.parameters():
            nn.init.constant_(p, 0.01)
        trainer = kvtrainer.Trainer(net, "sgd", {"learning_rate": 0.1}, "device", overlap=overlap)
        for _ in range(STEPS):
            ids = torch.randint(0, 500, (20,), generator=chance)
            with counted() as ahead:
                net["head"](net["table"](ids)).square().sum().backward()
            counts.append(ahead.call_count)
            trainer.step(40)
        found.append([p.detach().clone() for p in net.parameters()])
    yield [torch.equal(*pair) for pair in zip(*found, strict=True)], [True] * 3
    yield counts, [0, 0, 1, 1, 1, 1] + [0] * STEPS


def parameters_that_come_while_training_are_summed_during_the_backward_pass_too(
    rank: int, ranks: int
) -> Pairs:
    found = []
    for overlap in (True, False):
        loop = build(rank, overlap)
        for at in range(3):
            plain(loop, at)
        grown(loop)
        for at in range(3):
            plain(loop, at)
        found.append(loop.digest.hexdigest())
    yield found[0], found[1]


def ranks_that_disagree_about_overlap_are_told(rank: int, ranks: int) -> Pairs:
    loop = Loop("device", rank, rank == 1)
    loop.loss().backward()
    said = error_of(lambda: loop.step())
    yield said.startswith("PlanMismatchError"), True
    yield [part in said for part in ("overlap is False on rank 0", "True on rank 1")], [True] * 2


def several_trainers_sum_beside_each_other(rank: int, ranks: int) -> Pairs:
    """One backward pass brings gradients of both."""
    found = []
    for overlap in (True, False):
        loops = [build(rank, overlap), build(rank, overlap)]
        for _ in range(4):
            (loops[0].loss() + 2 * loops[1].loss()).backward()
            for loop in loops:
                loop.step()
        for loop in loops:
            loop.trainer.close()
        found.append([loop.digest.hexdigest() for loop in loops])
    yield found[0], found[1]


def two_copies_of_a_parameter_and_cuda_without_nccl_are_refused(rank: int, ranks: int) -> Pairs:
    for devices in (["cpu", "cpu"], ["cuda:0"]):
        places = [torch.device(name) for name in devices]
        said = error_of(lambda places=places: select_store("device", overlap=True, devices=places))
        yield "ConfigurationError: overlap=True needs all parameters on one device" in said, True
    assert select_store("device", overlap=True).overlaps


def a_rank_that_sends_and_never_steps_is_a_deadline_error(rank: int, ranks: int, folder: Path) -> Pairs:
    """The last scenario: nothing works in the group after it."""
    loop = learned(rank)
    before = weights_of(loop)
    loop.loss().backward()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SOON))
    store = dist.FileStore(str(folder / "absence"), ranks)
    if rank:
        store.wait(["over"])
        yield rank, rank
        return
    said = error_of(loop.step)
    yield said.startswith(f"DeadlineError: rank 0 of {ranks} waited for the other ranks"), True
    yield [torch.equal(*pair) for pair in zip(before, weights_of(loop), strict=True)], [True] * 6
    store.set("over", "yes")


SCENARIOS = scenarios_of(globals())
LAST = a_rank_that_sends_and_never_steps_is_a_deadline_error


def run(rank: int, ranks: int, place: str) -> Results:
    os.environ[TRANSPORT] = "tcp"  # in memory there are no buckets
    begin_group(rank, ranks, Path(place, "meeting"))
    found: dict[str, Any]
    found = {name: list(one(rank, ranks)) for name, one in SCENARIOS.items() if one is not LAST}
    return found | {LAST.__name__: list(LAST(rank, ranks, Path(place)))}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("overlap")
    return run_job(run, folder, 2, 0, str(folder))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_every_rank(job: Job, scenario: str) -> None:
    check_every_rank(job, scenario)


def train(rank: int, ranks: int, place: str, transport: str) -> Results:
    """Weights after every case, with and without overlap."""
    os.environ[TRANSPORT] = transport
    begin_group(rank, ranks, Path(place, "meeting"))
    found: dict[str, Any] = {}
    for name in HERE:
        case, options = CASES[name]
        for overlap in (True, False):
            loop = build(rank, overlap, **options)
            for at in range(STEPS):
                case(loop, at)
            loop.trainer.close()
            found[f"{name} {overlap}"] = [loop.digest.hexdigest(), *weights_of(loop)]
    last = learned(rank)
    if not rank:
        last.loss().backward()  # sums that nobody ends hold up no end
        last.trainer.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


WAYS = [
    pytest.param((2, "tcp"), id="2-tcp"),
    pytest.param((3, "shm"), id="3-shm"),
    pytest.param((3, "tcp"), id="3-tcp", marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=WAYS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, bool]:
    """A job, and whether its sums are the same to the bit with overlap."""
    folder = tmp_path_factory.mktemp("trained")
    ranks, transport = request.param
    return run_job(train, folder, ranks, 0, str(folder), transport), (ranks, transport) != (3, "tcp")


@pytest.mark.parametrize("name", HERE)
def test_weights_are_those_without_overlap(trained: tuple[Job, bool], name: str) -> None:
    job, is_exact = trained
    for ahead, plain_ in zip(job[f"{name} True"], job[f"{name} False"], strict=True):
        if is_exact:
            assert ahead[0] == plain_[0]
        for mine, other in zip(ahead[1:], plain_[1:], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, equal_nan=True)
