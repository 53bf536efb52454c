"""Ranks of torch.distributed on one host exchange numbers through memory: sums to the bit, and what can go wrong.

A scenario runs on every rank of one job, in a process group of its own, and gives what was found there beside what it
has to be.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.utils.data import DataLoader, TensorDataset

from kvtrainer import Trainer
from kvtrainer.common.env import TRANSPORT
from kvtrainer.ranks import shared_memory
from kvtrainer.ranks.process_group import RankGroup
from tests.support.jobs import Job, Results, begin_group, error_of, run_job
from tests.support.limits import LIMIT
from tests.support.processes import Processes
from tests.support.scenarios import Pairs, check_every_rank, scenarios_of

CPU = torch.device("cpu")
PLACE, SMALL = 4096, 1024
"""Bytes, so that sums of a few thousand elements take every way."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
SIZES = (1, 15, 17, 256, 1025, 20_003)


def addends(dtype: torch.dtype, numel: int, rank: int) -> torch.Tensor:
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(numel + rank), dtype=torch.float64)
    return drawn.mul(100).to(dtype)


def left_fold(dtype: torch.dtype, numel: int, ranks: int, before: float, after: float) -> torch.Tensor:
    """The sum of all ranks' addends, element by element in the order of ranks, in single precision at least."""
    compute = torch.float32 if dtype.itemsize < 4 else dtype
    total = torch.zeros(numel, dtype=compute)
    for rank in range(ranks):
        part = addends(dtype, numel, rank).to(compute)
        total = total + (part * before if before != 1.0 else part)
    return (total * after if after != 1.0 else total).to(dtype)


def sums_of_all_dtypes_and_sizes_are_left_folds(rank: int, ranks: int) -> Pairs:
    group = RankGroup()
    for dtype in DTYPES:
        for numel in SIZES:
            for before, after in ((1.0, 1.0), (0.3, 1.0), (1.0, 0.7))[: 1 if dtype == torch.int64 else 3]:
                flat = addends(dtype, numel, rank)
                group.sum(flat, [(0, numel)], before, after)
                yield torch.equal(flat, left_fold(dtype, numel, ranks, before, after)), True
    yield group.memory_for(CPU) is not None, True


def parts_of_a_tensor_are_summed_and_the_others_stay(rank: int, ranks: int) -> Pairs:
    group, numel = RankGroup(), 20_003
    flat, expected = addends(torch.float32, numel, rank), addends(torch.float32, numel, rank)
    total = left_fold(torch.float32, numel, ranks, 1.0, 1.0)
    runs = [(0, 3), (64, 64), (100, 9000), (9000, 9500), (20_000, numel)]
    borrowed = {9000: flat[9000:9500].clone()}
    flat[9000:9500] = -1.0
    for begin, end in runs:
        expected[begin:end] = total[begin:end]
    group.sum(flat, runs, borrowed=borrowed)
    yield torch.equal(flat, expected), True
    yield torch.equal(borrowed[9000], addends(torch.float32, numel, rank)[9000:9500]), True


def what_is_longer_than_a_place_is_gathered_and_broadcast(rank: int, ranks: int) -> Pairs:
    group = RankGroup()
    for dtype in (torch.uint8, torch.bool, torch.float64):
        for numel in (1, 9999):
            all_of = [addends(torch.float64, numel, other).clamp(0, 200).to(dtype) for other in range(ranks)]
            yield all(map(torch.equal, group.all_gather(all_of[rank]), all_of)), True
            mine = all_of[rank].clone()
            group.broadcast(mine)
            yield torch.equal(mine, all_of[0]), True
    texts = [b"x" * 5000 * other for other in range(ranks)]
    yield group.all_gather_bytes(texts[rank]) == texts, True


def trained(rank: int, ranks: int) -> list[torch.Tensor]:
    """Weights after three steps with parameters of many sizes, two of which are long, and two dtypes."""
    sizes = [3, 70_000, 1, 1000, 48_000, *range(1, 200)]
    params = [Parameter(torch.ones(n, dtype=torch.float64 if n % 3 == 2 else torch.float32)) for n in sizes]
    trainer = Trainer(params, "adam", {"learning_rate": 0.1})
    for _ in range(3):
        for param in params:
            param.grad = addends(param.dtype, param.numel(), rank)
        trainer.step(2 + rank)
        assert torch.equal(params[1].grad, addends(params[1].dtype, 70_000, rank))
    return [param.detach().clone() for param in params]


def weights_are_those_of_a_sum_by_torch_distributed(
    rank: int, ranks: int, again: Callable[[str], None]
) -> Pairs:
    """Which two ranks have to the bit, and more but for rounding, because the order of a sum is gloo's then."""
    found = {}
    for transport in ("shm", "tcp", "auto"):
        again(transport)
        found[transport] = trained(rank, ranks)
        yield RankGroup().memory_for(CPU) is None, transport == "tcp"
    near = 0.0 if ranks == 2 else 1e-5
    for memory, plain, auto in zip(found["shm"], found["tcp"], found["auto"], strict=True):
        yield torch.equal(memory, auto), True
        yield torch.allclose(memory, plain, rtol=0, atol=near), True


def forked_loaders_of_batches_disturb_nobody(rank: int, ranks: int) -> Pairs:
    weight = Parameter(torch.zeros(4))
    trainer = Trainer([weight], "sgd", {"lr": 1.0})
    data = TensorDataset(torch.full((6, 4), rank + 1.0))
    trainer.set_data()
    for _ in range(2):
        for [x] in DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork"):
            (weight * x).sum().backward()
            trainer.step(1)
    yield weight.tolist(), [-12.0 * sum(range(1, ranks + 1))] * 4


def ranks_that_come_with_different_calls_are_told(rank: int, ranks: int) -> Pairs:
    group, flat = RankGroup(), torch.ones(8)
    group.barrier()
    call = (lambda: group.broadcast(flat)) if rank == 0 else (lambda: group.sum(flat, [(0, 8)]))
    yield error_of(call).split(":")[0], "ProtocolError"


def one_rank_without_memory_has_all_go_without_and_one_line_says_so(
    rank: int, ranks: int, again: Callable[[str], None]
) -> Pairs:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(shared_memory.__name__)
    log.addHandler(handler)

    def broken(*_: object) -> Any:
        raise OSError("no memory today")

    for name, at in (
        ("_share_memory_arena", ranks - 1),
        ("_share_memory_arena", 0),
        ("_connect_memory_peers", 1),
        ("_make_memory_socket", 1),
    ):
        kept = getattr(shared_memory, name)
        again("auto")
        lines.clear()
        if rank == at:
            setattr(shared_memory, name, broken)
        flat = torch.ones(3)
        RankGroup().sum(flat, [(0, 3)])
        yield flat.tolist(), [float(ranks)] * 3
        yield RankGroup().memory_for(CPU) is None, True
        said = [line for line in lines if f"rank {at}: no memory today" in line]
        yield (len(lines), len(said)), (1, 1) if rank == 0 else (0, 0)
        if name == "_make_memory_socket":
            again("shm")
            for _ in range(2):
                text = error_of(RankGroup().barrier)
                yield text[:20] + text[-40:], "ConfigurationError: (KVSTORE_TRANSPORT=auto goes without it)"
        setattr(shared_memory, name, kept)
    again("auto" if rank else "tcp")
    lines.clear()
    RankGroup().barrier()
    yield (RankGroup().memory_for(CPU) is None, lines), (True, [])
    again("rdma" if rank else "auto")
    yield "ConfigurationError: KVSTORE_TRANSPORT is 'rdma'" in error_of(RankGroup().barrier), True
    log.removeHandler(handler)


SCENARIOS = scenarios_of(globals())


def run(rank: int, ranks: int, place: str) -> Results:
    shared_memory.PLACE, shared_memory.SMALL, shared_memory._CONNECT_TIMEOUT = PLACE, SMALL, 2.0
    meetings = iter(range(1000))

    def again(transport: str) -> None:
        """Go on in another process group."""
        if dist.is_initialized():
            dist.barrier()  # one that is ended while others still connect breaks theirs
            dist.destroy_process_group()
        os.environ[TRANSPORT] = transport
        begin_group(rank, ranks, Path(place, f"meeting {next(meetings)}"))

    found: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        again("auto")
        takes_again = scenario.__code__.co_argcount == 3
        found[name] = list(scenario(rank, ranks, again) if takes_again else scenario(rank, ranks))
    return found


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("memory")
    return run_job(run, folder, request.param, 0, str(folder))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_every_rank(job: Job, scenario: str) -> None:
    check_every_rank(job, scenario)


RANK = """
import os, sys, time, torch, torch.distributed as dist
from kvtrainer.ranks.process_group import RankGroup
rank, place = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + place, rank=rank, world_size=2)
group = RankGroup()
group.barrier()
if rank == 1:
    child = os.fork()
    if not child:
        sys.stdin.readline()
        os._exit(0)
print("ready", flush=True)
if rank == 1:
    time.sleep(1000)
try:
    group.barrier()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


def test_a_rank_that_was_killed_is_lost_at_once_although_a_child_has_its_socket(
    processes: Processes, tmp_path: Path
) -> None:
    started = [
        processes.start([sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting")])
        for rank in range(2)
    ]
    for process in started:
        assert process.line() == "ready"
    began = time.monotonic()
    started[1].signal(signal.SIGKILL)
    said = started[0].line()
    assert said.startswith("WorkerLostError rank 0 of 2 could not exchange what they hold")
    assert "the process of rank 1 has ended" in said
    assert time.monotonic() - began < LIMIT
