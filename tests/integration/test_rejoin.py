"""Strategies whose workers are killed and started again: the run ends with the bits of an undisturbed one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kvtrainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.integrations.workers import Workers
from kvtrainer.utils import ResumableBatches, get_random_state, set_random_state
from tests.support.jobs import Job, Results, error_of, run_job, run_with_deaths

WORKERS, EPOCHS, BATCHES = 2, 3, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def training(rank: int, workers: int, folder: str, publishes: bool = False) -> Results:
    """A loop over shuffled batches with dropout, buffers and a schedule, which saves a checkpoint after each epoch."""
    noise = dict(randomness=dict(seed=5, diff_rank_seed=True))
    strategy = kvtrainer.Strategy("dist_sync", work_dir=folder, env_kwargs=noise)
    net, trainer, _ = strategy.prepare(
        model(),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.05)),
        param_scheduler=[
            dict(type="StepParamScheduler", param_name="lr", step_size=3, gamma=0.5, by_epoch=False, end=99)
        ],
    )
    x = torch.randn(8 * BATCHES, 6, generator=torch.Generator().manual_seed(rank))
    batches = ResumableBatches(DataLoader(TensorDataset(x), 8, shuffle=True))
    start = strategy.rejoin()
    made = 0
    if start.client_state is not None:
        batches.load_state_dict(start.client_state)
    for epoch in range(batches.epoch, EPOCHS):
        for (inputs,) in batches:
            if publishes and batches.position == 2:  # weights that the loop has changed
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.mul_(0.5 if rank == 0 else 7.0)
                trainer.set_data()
            net(inputs).square().mean().backward()
            strategy.client_state = batches.state_dict()
            trainer.step()
            made += 1
        meta = dict(epoch=epoch + 1, iter=(epoch + 1) * BATCHES)
        strategy.save_checkpoint(f"{folder}/epoch_{epoch + 1}.pt", extra_ckpt=dict(meta=meta))
    saved = torch.load(f"{folder}/epoch_{EPOCHS}.pt", weights_only=True)
    found = {
        "values": [value.clone() for value in net.state_dict().values()],
        "optimizer": [one for name, one in sorted(saved["optimizer"]["parameters"].items())],
        "random": get_random_state(),
        "lr": trainer.param_groups[0]["lr"],
        "place": [strategy.seed, strategy.timestamp == strategy.experiment_name],
        "made": made,
    }
    strategy.close()
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Job]:
    known: dict[bool, Job] = {}

    def run(publishes: bool) -> Job:
        if publishes not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[publishes] = run_job(training, folder, WORKERS, 2, str(folder / "work"), publishes)
        return known[publishes]

    return run


def assert_the_same(points: str, folder: Path, expected: Job, publishes: bool = False) -> Job:
    job = run_with_deaths(training, folder, points, WORKERS, 2, str(folder / "work"), publishes)
    for name in ("values", "optimizer", "random", "lr", "place"):
        assert equal(job[name], expected[name]), name
    return job


@pytest.mark.parametrize(
    "points",
    [
        pytest.param("worker.round.begin@0:1", marks=pytest.mark.chaos),  # the first values
        "worker.round.committed@1:7,worker.round.begin@0:9",
        "worker.round.end@0:5,worker.barrier.begin@1:16",  # the end of an epoch, and between collective calls
        pytest.param("worker.round.committed@0:13", marks=pytest.mark.chaos),
        pytest.param("worker.barrier.end@0:14,worker.barrier.end@1:15", marks=pytest.mark.chaos),
    ],
)
def test_a_rank_of_a_strategy_goes_on_in_its_epoch_with_its_random_numbers_buffers_and_schedules(
    points: str, tmp_path: Path, undisturbed: Callable[[bool], Job]
) -> None:
    job = assert_the_same(points, tmp_path, undisturbed(False))
    assert sum(job["made"]) < 2 * EPOCHS * BATCHES or "begin@0:1" in points


def test_weights_that_a_former_process_has_published_are_not_published_twice(
    tmp_path: Path, undisturbed: Callable[[bool], Job]
) -> None:
    # Round 0 are the first values; in each epoch the third round publishes weights.
    points = "worker.round.begin@1:4,worker.round.end@0:8"
    assert_the_same(points, tmp_path, undisturbed(True), publishes=True)


def test_buffers_that_are_too_long_to_travel_with_each_step_are_refused(tmp_path: Path) -> None:
    strategy = kvtrainer.Strategy("local", work_dir=str(tmp_path))
    strategy.prepare(nn.BatchNorm1d(4000), optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)))
    with pytest.raises(ConfigurationError):
        strategy.rejoin()
    strategy.close()


def test_batches_go_on_in_the_middle_of_an_epoch_with_the_numbers_that_follow() -> None:
    loader = DataLoader(TensorDataset(torch.arange(12)), 3, shuffle=True)

    def rest(batches: ResumableBatches, until: int, stop: int = -1) -> list[Any]:
        found = []
        for _ in range(batches.epoch, until):
            for (batch,) in batches:
                found.append([*batch.tolist(), torch.rand(1).item()])
                if batches.position == stop:
                    return found
        return found

    torch.manual_seed(3)
    whole = rest(ResumableBatches(loader), 3)
    torch.manual_seed(3)
    first = ResumableBatches(loader)
    seen = rest(first, 1)
    seen += rest(first, 2, stop=3)
    state, random = first.state_dict(), get_random_state()
    torch.manual_seed(9)
    second = ResumableBatches(loader)
    second.load_state_dict(state)
    set_random_state(random)
    assert (second.epoch, second.position) == (1, 3)
    assert seen + rest(second, 3) == whole
    assert second.state_dict() == {"epoch": 3, "position": 0, "random": None}


@pytest.mark.parametrize("state", [{}, {"epoch": 0, "position": -1, "random": None}, [1, 2, 3]])
def test_something_else_than_a_place_in_batches_is_refused(state: Any) -> None:
    batches = ResumableBatches([1, 2])
    with pytest.raises(ConfigurationError):
        batches.load_state_dict(state)
    assert list(batches) == [1, 2]


def in_a_group(rank: int, workers: int) -> Results:
    """A loop as a framework's, whose workers are also ranks of torch.distributed."""

    def train() -> None:
        place, net = Workers("dist_sync"), model()
        with place.trainer_of(torch.optim.SGD(net.parameters(), lr=0.1), net) as trainer:
            for _ in range(4):
                net(torch.ones(2, 6)).sum().backward()
                trainer.step()

    return {"told": error_of(train)}


def test_a_successor_is_told_that_a_group_of_torch_distributed_does_not_take_it_in(tmp_path: Path) -> None:
    told = run_with_deaths(in_a_group, tmp_path, "worker.round.begin@1:4", 2, 1)["told"]
    assert [one.partition(":")[0] for one in told] == ["WorkerLostError"] * 2
    assert "torch.distributed" in told[1]
