"""What a training script does between steps leaves the optimizer state on the servers as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer import kvstore
from kvtrainer.kvstore.verbs import TableKVStore
from tests.support.jobs import Job, Results, run_job

MOMENTUM, RATE, NEW_RATE = 0.5, 0.5, 0.25
SHAPES = {"w": (2, 3), "v": (9000,)}
"""The second lies on both servers."""

Change = Callable[[kvtrainer.Trainer, dict[str, nn.Parameter], Path], None]


def nothing(trainer: kvtrainer.Trainer, parameters: dict[str, nn.Parameter], path: Path) -> None:
    pass


def rate(trainer: kvtrainer.Trainer, parameters: dict[str, nn.Parameter], path: Path) -> None:
    trainer.set_learning_rate(NEW_RATE)


def data(trainer: kvtrainer.Trainer, parameters: dict[str, nn.Parameter], path: Path) -> None:
    trainer.set_data({"w": torch.zeros(SHAPES["w"])})


def written(trainer: kvtrainer.Trainer, parameters: dict[str, nn.Parameter], path: Path) -> None:
    nn.init.zeros_(parameters["w"])
    trainer.set_data()


def saved(trainer: kvtrainer.Trainer, parameters: dict[str, nn.Parameter], path: Path) -> None:
    """Every worker has a file of its own; each holds the state of all servers."""
    trainer.save_states(path)
    trainer.load_states(path)


CHANGES: dict[str, Change] = {c.__name__: c for c in (nothing, rate, data, written, saved)}


def with_trainer(change: Change, path: Path) -> dict[str, Tensor]:
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    options = {"learning_rate": RATE, "momentum": MOMENTUM}
    with kvtrainer.Trainer(
        parameters, "sgd", options, kvstore="dist_sync", update_on_kvstore=True
    ) as trainer:
        for step in range(4):
            if step == 2:
                change(trainer, parameters, path)
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            trainer.step()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def with_verbs(workers: int) -> dict[str, Tensor]:
    """Every worker names the optimizer again in the middle, with another rate, as a script that is run again does."""
    outs = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    kv = kvstore.create("dist_sync")
    assert isinstance(kv, TableKVStore)
    with kv:
        kv.init(list(SHAPES), [torch.ones(shape) for shape in SHAPES.values()])
        for step in range(4):
            if step % 2 == 0:
                lr = NEW_RATE if step else RATE
                kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=lr, momentum=MOMENTUM))
            kv.push(list(SHAPES), [torch.full(shape, 1 / workers) for shape in SHAPES.values()])
        kv.pull(list(SHAPES), out=list(outs.values()))
        kv.barrier()
    return outs


def run_all(rank: int, workers: int, folder: str) -> Results:
    runs = {name: with_trainer(change, Path(folder) / f"states{rank}") for name, change in CHANGES.items()}
    return {**runs, "verbs": with_verbs(workers)}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(run_all, tmp_path_factory.mktemp("job"), 2, 2, str(tmp_path_factory.mktemp("files")))


def expected(later_rate: float = RATE, start_again: bool = False) -> float:
    """Gluon's rule for a gradient of 1 in plain numbers: m = μ m − lr; w += m."""
    weight, momentum = 1.0, 0.0
    for step in range(4):
        if step == 2 and start_again:
            weight = 0.0
        momentum = MOMENTUM * momentum - (RATE if step < 2 else later_rate)
        weight += momentum
    return weight


def check(job: Job, run: str, name: str, value: float) -> None:
    for weights in job[run]:
        torch.testing.assert_close(weights[name], torch.full_like(weights[name], value), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["w", "v"])
def test_momentum_survives_a_new_learning_rate(job: Job, name: str) -> None:
    check(job, "nothing", name, expected())
    check(job, "rate", name, expected(NEW_RATE))


@pytest.mark.parametrize("name", ["w", "v"])
def test_momentum_survives_naming_the_optimizer_again(job: Job, name: str) -> None:
    check(job, "verbs", name, expected(NEW_RATE))


@pytest.mark.parametrize("run", ["data", "written"])
def test_new_weights_for_one_parameter_leave_the_momentum_of_all(job: Job, run: str) -> None:
    check(job, run, "w", expected(start_again=True))
    check(job, run, "v", expected())


@pytest.mark.parametrize("name", ["w", "v"])
def test_states_on_servers_can_be_saved_and_loaded(job: Job, name: str) -> None:
    check(job, "saved", name, expected())
