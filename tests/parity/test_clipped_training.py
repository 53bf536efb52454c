"""Two workers with clipped gradients, changing learning rates and momenta end where the arithmetic by hand does.

The same three parameters and gradients on every synchronous store, at both sites of the update: a norm of 5 is limited
to 1, then one of 2.236; later ones are below the limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.kvstore import DistKVStore
from tests.support import allreduce  # noqa: F401  registers the store
from tests.support.jobs import Job, Results, run_job
from tests.support.stores import Servers

RATES = [(0.1, 0.9), (0.1, 0.9), (0.01, 0.5), (0.01, 0.5)]
"""(learning rate, momentum) of every step."""
GRADIENTS = [
    [([6.0, 8.0], [0.0]), ([1.0, 0.0], [2.0]), ([0.1, 0.2], [-0.2]), ([0.5, 0.5], [0.5])],
    [([0.0, 0.0], [0.0]), ([1.0, 0.0], [2.0]), ([0.3, 0.0], [0.2]), ([0.5, 0.5], [0.5])],
]
"""By worker and step, of a and b."""


class Expected(NamedTuple):
    """One step in the arithmetic of plain floats."""

    norm: float
    coef: float
    weights: list[float]


def by_hand(is_rate_inside: bool) -> list[Expected]:
    weights, velocity = [1.0, 2.0, 3.0], [0.0] * 3
    steps = []
    for step, (rate, momentum) in enumerate(RATES):
        mine, theirs = ([*worker[step][0], *worker[step][1]] for worker in GRADIENTS)
        mean = [(one + other) / 2 for one, other in zip(mine, theirs, strict=True)]
        norm = math.sqrt(sum(g * g for g in mean))
        coef = min(1.0, 1.0 / (norm + 1e-6))
        for i, g in enumerate(mean):
            own = rate * (2 if i == 2 else 1)
            slope = coef * g + (0.0 if i == 2 else 0.01) * weights[i]
            velocity[i] = momentum * velocity[i] + (own if is_rate_inside else 1.0) * slope
            weights[i] -= velocity[i] if is_rate_inside else own * velocity[i]
        steps.append(Expected(norm, coef, list(weights)))
    return steps


OUTSIDE, INSIDE = by_hand(False), by_hand(True)


class Case(NamedTuple):
    """An optimizer, its options, and what every step leads to."""

    optimizer: str
    options: dict[str, Any]
    expected: list[Expected]


CASES = {
    "torch": Case("torch:SGD", {"lr": 0.1, "weight_decay": 0.01}, OUTSIDE),
    "lr in the velocity": Case("sgd", {"learning_rate": 0.1, "wd": 0.01}, INSIDE),
    "corrected": Case("sgd", {"learning_rate": 0.1, "wd": 0.01, "momentum_correction": True}, OUTSIDE),
}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, Parameter]:
    a = Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    b = Parameter(torch.tensor([3.0], dtype=dtype))
    b.lr_mult, b.wd_mult = 2, 0  # type: ignore[attr-defined]
    return {"a": a, "b": b}


def train(
    case: Case, replicas: Sequence[dict[str, Parameter]], workers: Sequence[int], **options: Any
) -> list[list[float]]:
    """What steps with the gradients of some workers lead to, by turns for each replica; checks what steps report."""
    params: Any = {name: [one[name] for one in replicas] for name in ("a", "b")}
    if len(replicas) == 1:
        params = replicas[0]
    number = {"momentum": 0.9, **case.options}
    with Trainer(params, case.optimizer, number, clip_grad={"max_norm": 1.0}, **options) as trainer:
        path = []
        for step, (rate, momentum) in enumerate(RATES):
            for group in trainer.param_groups:
                group["lr"], group["momentum"] = rate, momentum
            for worker, own in zip(workers, itertools.cycle(replicas), strict=False):
                give(own, GRADIENTS[worker][step])
            result = trainer.step(2)
            exact = 1e-12 if replicas[0]["a"].dtype == torch.float64 else 1e-6
            assert result.grad_norm == pytest.approx(case.expected[step].norm, rel=exact)
            assert result.clip_coef == pytest.approx(case.expected[step].coef, rel=exact)
            assert result.lr == rate
            path.append([*replicas[0]["a"].tolist(), *replicas[0]["b"].tolist()])
    return path


def give(own: dict[str, Parameter], gradient: tuple[list[float], list[float]]) -> None:
    slopes = [torch.tensor(values, dtype=own["a"].dtype) for values in gradient]
    loss: Tensor = own["a"] @ slopes[0] + own["b"] @ slopes[1]
    loss.backward()


def train_in_a_group(rank: int, ranks: int) -> Results:
    """All cases on a rank of torch.distributed, and with a third-party store by name; rank 0's weights count."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        for where in ("None", "True", "False", "plug-in"):
            own, in_store = parameters(), {"True": True, "False": False}.get(where)
            for p in own.values():
                p.data.add_(rank)
            store = "allreduce" if where == "plug-in" else "device"
            found[f"{where} {name}"] = train(case, [own], [rank], kvstore=store, update_on_kvstore=in_store)
    return found


_FIRST = [[0.93900001, 1.91800002, 3.0], [0.83843968, 1.84228203, 2.82111464]]
CORRECTED = [*_FIRST, [0.83132782, 1.83731190, 2.81217037], [0.82268876, 1.82964311, 2.79769824]]
PLAIN = [*_FIRST, [0.78607567, 1.80323881, 2.73167196], [0.75481506, 1.77853687, 2.67695062]]
"""Known to eight digits: with the learning rate outside of the velocity, and inside of it."""


def agrees(path: list[list[float]], expected: Sequence[Expected], dtype: torch.dtype = torch.float64) -> bool:
    return agree_to(1e-9 if dtype == torch.float64 else 1e-6, path, [step.weights for step in expected])


def agree_to(tolerance: float, path: list[list[float]], expected: list[list[float]]) -> bool:
    mine, theirs = (torch.tensor(rows, dtype=torch.float64) for rows in (path, expected))
    return torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)


def test_arithmetic_by_hand_gives_the_known_digits() -> None:
    assert agree_to(6e-9, [step.weights for step in OUTSIDE], CORRECTED)
    assert agree_to(6e-9, [step.weights for step in INSIDE], PLAIN)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("type", "count", "in_store", "dtype"),
    [
        ("dist_sync", 1, True, torch.float64),
        ("dist_sync", 2, False, torch.float32),
        ("dist_sync", 3, True, torch.float32),
        ("p3", 2, True, torch.float64),
        ("p3", 3, False, torch.float64),
    ],
)
def test_two_workers_and_servers_end_where_the_arithmetic_does(
    jobs: Servers, type: str, count: int, in_store: bool, case: Case, dtype: torch.dtype
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        return train(case, [parameters(dtype)], [rank], kvstore=kv, update_on_kvstore=in_store)

    paths = jobs.results(2, count, body, type=type)
    assert paths[0] == paths[1]
    assert agrees(paths[0], case.expected, dtype)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("clipped")
    return run_job(train_in_a_group, folder, 2, 0, in_group=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("where", ["None", "True", "False", "plug-in"])
def test_ranks_of_torch_distributed_and_workers_of_a_third_party_store_end_there_too(
    ranks: Job, where: str, name: str
) -> None:
    paths = ranks[f"{where} {name}"]
    assert paths[0] == paths[1]
    assert agrees(paths[0], CASES[name].expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("in_store", [True, False], ids=["in-store", "by-trainer"])
@pytest.mark.parametrize("store", ["local", "device"])
def test_two_replicas_in_one_process_end_there_too(store: str, in_store: bool, case: Case) -> None:
    replicas = [parameters(), parameters()]
    path = train(case, replicas, [0, 1], kvstore=store, update_on_kvstore=in_store)
    assert agrees(path, case.expected)
    assert torch.equal(replicas[0]["a"], replicas[1]["a"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("store", "in_store"), [("local", True), ("local", False), (None, None)])
def test_one_worker_with_the_sum_of_both_gradients_ends_there_too(
    store: str | None, in_store: bool | None, case: Case
) -> None:
    path = train(case, [parameters()], [0, 1], kvstore=store, update_on_kvstore=in_store)
    assert agrees(path, case.expected)
