"""Any one worker may save between its steps, while others are ahead, and saves the state of its own last step."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtrainer
from kvtrainer.states.file import read_state_file
from tests.support.jobs import Job, Results, run_job
from tests.support.limits import LIMIT
from tests.support.workers.states_matrix import OPTIMIZERS, Net, train, trainer_of, weights


def wait_until_it_waits(trainer: kvtrainer.Trainer, rank: int) -> None:
    """Return when the next round of every server lacks nobody but `rank`."""
    pause, deadline = threading.Event(), time.monotonic() + LIMIT
    while True:
        tables = [table for stats in trainer.server_stats() for table in stats["tables"]]
        if all(table["waiting_for"] == [rank] for table in tables):
            return
        assert time.monotonic() < deadline, f"the other worker never came to the next round: {tables}"
        pause.wait(0.01)


def run(base: Path, kind: str, rank: int, saver: int) -> dict[str, object]:
    """Train, and save while the other worker is already in the next round; then go back to what was saved."""
    path = base / f"{kind}-{saver}"
    net = Net()
    results: dict[str, object] = {}
    with trainer_of(net, kind, "dist") as trainer:
        train(net, trainer, 0, 2)
        if rank == saver:
            wait_until_it_waits(trainer, rank)
            trainer.save_states(path)
            wait_until_it_waits(trainer, rank)
        train(net, trainer, 2, 2)
        results["after 4"] = weights(net)
        # Back to the states of step 2, with the weights of step 4; the third step made sure that the file is there.
        trainer.load_states(path)
        train(net, trainer, 2, 2)
        results["again"] = weights(net)
    return results


def run_all(rank: int, workers: int, folder: str) -> Results:
    return {
        f"{kind} {saver}": run(Path(folder), kind, rank, saver) for kind in OPTIMIZERS for saver in (0, 1)
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cut")


@pytest.fixture(scope="module")
def job(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(run_all, tmp_path_factory.mktemp("job"), 2, 2, str(folder))


@pytest.fixture(params=[(kind, saver) for kind in OPTIMIZERS for saver in (0, 1)], ids=str)
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    found: tuple[str, int] = request.param
    return found


def in_one_process(kind: str) -> Any:
    """The same training without a store, whose gradients are those of the job's mean."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        net = Net()
        trainer = trainer_of(net, kind, "none")
        train(net, trainer, 0, 2)
        states = trainer.state_dict()["state"]
        train(net, trainer, 2, 2)
    finally:
        torch.set_num_threads(threads)
    return states, weights(net)


def test_saved_state_is_that_of_the_savers_last_step_on_every_server(
    job: Job, folder: Path, case: tuple[str, int]
) -> None:
    kind, saver = case
    saved = read_state_file(folder / f"{kind}-{saver}")
    states, _ = in_one_process(kind)
    assert [parameter.state["step"] for parameter in saved.parameters.values()] == [2, 2, 2, 2, 2]
    for parameter, expected in zip(saved.parameters.values(), states.values(), strict=True):
        assert parameter.state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.as_tensor(parameter.state[name]), value, rtol=0, atol=1e-7, check_dtype=False
            )


def test_saving_does_not_disturb_the_round_that_waits(job: Job, case: tuple[str, int]) -> None:
    kind, saver = case
    _, expected = in_one_process(kind)
    for results in job[f"{kind} {saver}"]:
        for a, b in zip(results["after 4"], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_all_workers_can_go_back_to_saved_states_in_the_middle(
    job: Job, folder: Path, case: tuple[str, int]
) -> None:
    kind, saver = case
    for results in job[f"{kind} {saver}"]:
        net = Net()
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), results["after 4"], strict=True):
                parameter.copy_(value)
        trainer = trainer_of(net, kind, "none")
        trainer.load_states(folder / f"{kind}-{saver}")
        train(net, trainer, 2, 2)
        for a, b in zip(results["again"], weights(net), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
