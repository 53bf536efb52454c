"""W workers with batch b train as one process with batch W · b does, for every optimizer and both update sites.

The oracle is a plain float64 torch loop (tests/support/float64_loop.py). Its sums are the same sums in another
order, so after 25 steps weights differ by rounding alone.
"""

from __future__ import annotations

import pytest
from torch import Tensor

from kvstore_server.optimizer.torch_family import ELEMENTWISE
from kvstore_server.plan import TensorSpec, make_plan
from tests.support import float64_loop
from tests.support.coupled_model import BIASES, CASES, SHAPES, STEPS, start_weights
from tests.support.jobs import Job, PartOfJob
from tests.support.sizes import sizes

TOLERANCE = 1e-11
SITES = [pytest.param(True, id="store"), pytest.param(False, id="worker")]


@pytest.fixture(scope="module", params=sizes((2, 2), workers=(2, 3), servers=(2,)))
def job(request: pytest.FixtureRequest, part_of_job: PartOfJob) -> Job:
    return part_of_job("one_problem", *request.param)


def farthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The greatest difference of any element."""
    return max(float((a[name] - b[name]).abs().max()) for name in SHAPES)


@pytest.mark.parametrize("in_store", SITES)
@pytest.mark.parametrize("case", CASES)
def test_workers_and_servers_train_as_one_process_does(job: Job, case: str, in_store: bool) -> None:
    expected = float64_loop.train(CASES[case], job.workers)
    assert farthest(start_weights(), expected) > 0.01
    for rank, seen in enumerate(job[f"{case} {in_store}"]):
        assert farthest(seen["weights"], expected) <= TOLERANCE, f"rank {rank}"


def test_every_server_took_part_in_every_round(job: Job) -> None:
    specs = [TensorSpec(name, SHAPES[name], "float64") for name in (*(SHAPES.keys() - {*BIASES}), *BIASES)]
    plan = make_plan(specs, job.servers)
    key = [spec.key for spec in specs].index("W2")
    holders = {piece.server for piece in plan.slices for segment in piece.segments if segment.key == key}
    assert holders == set(range(job.servers))
    assert job["sgd True"][0]["applied"] == [[STEPS]] * job.servers


def test_every_elementwise_optimizer_of_torch_has_a_case() -> None:
    assert {f"torch:{cls.__name__}" for cls in ELEMENTWISE} <= {case.optimizer for case in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_the_problem_depends_on_every_worker_and_stays_bounded(case: str) -> None:
    # A run that blows up would amplify rounding without limit, and prove nothing.
    two, three = (float64_loop.train(CASES[case], workers) for workers in (2, 3))
    assert farthest(two, three) > 1e-4
    assert all(weight.abs().max() < 3 for weights in (two, three) for weight in weights.values())
