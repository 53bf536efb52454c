"""Any one worker may save between its steps, while others are ahead, and saves the state of its own last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtrainer.states.file import read_state_file
from tests.support.jobs import Job, run_job
from tests.support.workers.states_matrix import OPTIMIZERS, Net, train, trainer_of, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cut")


@pytest.fixture(scope="module")
def job(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job("states_cut", tmp_path_factory.mktemp("job"), 2, 2, str(folder))


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
