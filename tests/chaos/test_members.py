"""A worker that dies while the members of its job change comes back, and the job ends with the bits of a plain loop.

Ranks 0 and 1 begin, rank 2 joins after two steps, and rank 1 leaves after four. The others wait until rank 2 has asked
to join, so that the members of every step are the same however long a process takes to come back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.kvstore import DistKVStore
from tests.support.jobs import FOLDER, Job, Results, run_with_deaths
from tests.support.processes import eventually

SCHEDULE = [(0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (0, 2), (0, 2)]
ENDS = {0: 6, 1: 4, 2: 6}
SERVERS = 2
POINTS = {
    "worker.members.join": 2,
    "worker.members.joined": 2,
    "worker.members.changed": 0,
    "worker.members.leave": 1,
}
"""Which rank dies at each of them."""


def first_weights() -> Tensor:
    return torch.randn(600, 60, generator=torch.Generator().manual_seed(0))


def gradient(weights: Tensor, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(weights.shape, generator=generator) + 0.1 * weights


def plain_loop(schedule: Sequence[Sequence[int]]) -> Tensor:
    weights = torch.nn.Parameter(first_weights())
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    for step, ranks in enumerate(schedule):
        total = torch.zeros_like(weights)
        for rank in ranks:
            total += gradient(weights.detach(), rank, step)
        weights.grad = total * (1.0 / len(ranks))
        optimizer.step()
    return weights.detach()


def training(rank: int, workers: int) -> Results:
    weights = torch.nn.Parameter(first_weights())
    signal = Path(os.environ[FOLDER]) / "may join"
    if rank == 2:
        assert eventually(signal.exists)
    store = DistKVStore(num_workers=2, elastic="1..3")
    options = {"learning_rate": 0.1, "momentum": 0.9}
    with kvtrainer.Trainer({"w": weights}, "torch:SGD", options, kvstore=store) as trainer:

        def has_asked() -> bool:
            view = trainer._pipeline.binding.stats()[0]["view"]
            return 2 in view["joining"] + view["members"]

        start, members = trainer.resume(), []
        for step in range(start.round, ENDS[rank]):
            if step == 1:
                signal.touch()
                assert eventually(has_asked)
            weights.grad, before = gradient(weights.detach(), rank, step), trainer.members
            trainer.step()
            # Who joins is a member from the next step on; who leaves is not one of this step any more.
            members.append(sorted({*before} & {*trainer.members}))
        if ENDS[rank] < len(SCHEDULE):
            trainer.leave()
        return {"weights": weights.detach().clone(), "members": members}


def check(points: str, folder: Path, **environ: str) -> Job:
    """Run the job, whose members are those of the schedule as long as no server dies."""
    job = run_with_deaths(training, folder, points, 3, SERVERS, environ=environ)
    schedule = job["members"][0] if "server" in points else SCHEDULE
    for rank in (0, 2):
        assert torch.equal(job["weights"][rank], plain_loop(schedule))
    return job


def test_workers_that_die_while_members_change_leave_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    check("worker.members.joined@2,worker.members.changed@0,worker.members.leave@1", tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_dies_at_a_point_leaves_the_bits_of_a_plain_loop(
    point: str, transport: str, tmp_path: Path
) -> None:
    check(f"{point}@{POINTS[point]}", tmp_path, KVSTORE_TRANSPORT=transport)


@pytest.mark.chaos
@pytest.mark.parametrize("nth", range(6, 22, 2))
@pytest.mark.parametrize("point", ["server.commit.begin", "server.commit.logged"])
def test_a_server_that_dies_while_members_change_knows_them_afterwards(
    point: str, nth: int, tmp_path: Path
) -> None:
    job = check(f"{point}@0:{nth},{point}@1:{nth}", tmp_path, KVSTORE_DURABILITY="process")
    # Who has asked to join has to ask again if the server dies before the round in which that happens: it may be the
    # next one.
    members = job["members"][0]
    assert len(members) == len(SCHEDULE)
    assert (members[0], members[-1]) == ([0, 1], [0, 2])
    assert members[3] == [0, 1, 2]
