"""What a training script does between steps leaves the optimizer state on the servers as it is."""

from __future__ import annotations

import pytest
import torch

from tests.support.jobs import Job, run_job
from tests.support.workers.states_kept import MOMENTUM, NEW_RATE, RATE


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job("states_kept", tmp_path_factory.mktemp("job"), 2, 2, str(tmp_path_factory.mktemp("files")))


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
