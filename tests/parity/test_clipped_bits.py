"""Limited float32 gradients give the same bits in every store, for any number of servers, at both sites of the update.

With a loss scale that is no power of two, a step that overflows, and parameters that are left out on one worker or on
all. What steps report has the same bits, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.kvstore import DistKVStore
from tests.support.pairwise import pairwise
from tests.support.stores import Servers

SHAPES = {"sliced": (131, 257), "small": (2, 3), "odd": (7, 13), "scalar": ()}
ROWS = (40, 5)
STEPS = 5
OVERFLOW, ONE_LEAVES_OUT, ALL_LEAVE_OUT = 1, 2, 3
"""Steps in which that happens; to 'odd', if to one parameter."""
WORKERS = 2
LIMITS: dict[str, dict[str, Any]] = {
    "norm": {"max_norm": 1.0},
    "greatest": {"max_norm": 0.5, "norm_type": "inf"},
    "sum": {"max_norm": 30.0, "norm_type": 1},
    "value": {"type": "value", "clip_value": 0.3},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01, "wd": 0.01},
    "lamb": {"learning_rate": 0.01, "wd": 0.01},
}
CASES = [
    ("norm", "sgd"),
    ("norm", "adam"),
    ("norm", "lamb"),
    ("greatest", "sgd"),
    ("sum", "sgd"),
    ("value", "adam"),
]
PLACES = pairwise(CASES, (1, 2, 3), (True, False))
"""Which case runs with how many servers and with the update in the store or in the workers."""


class Net(nn.Module):
    """The parameters; with rows of a table, whose gradient is row-sparse."""

    def __init__(self, has_rows: bool) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(3)
        for name, shape in SHAPES.items():
            self.register_parameter(name, Parameter(torch.randn(shape, generator=chance)))
        self.table = (
            nn.Embedding(*ROWS, sparse=True, _weight=torch.randn(ROWS, generator=chance))
            if has_rows
            else None
        )

    def loss(self, step: int, worker: int) -> Tensor:
        """Its gradients are of very unequal sizes, so that sums depend on their order."""
        chance = torch.Generator().manual_seed(100 * step + worker)
        total = torch.zeros(())
        for name, p in self.named_parameters(recurse=False):
            slopes = torch.randn(p.shape, generator=chance) * 10 ** (
                3 * torch.rand(p.shape, generator=chance)
            )
            is_out = step == ALL_LEAVE_OUT or (step, worker) == (ONE_LEAVES_OUT, 0)
            if name != "odd" or not is_out:
                total = total + (p * slopes).sum()
        if self.table is not None:
            ids = torch.randint(ROWS[0], (6,), generator=chance)
            total = total + (self.table(ids) * torch.randn(6, ROWS[1], generator=chance)).sum()
        return total * math.inf if (step, worker) == (OVERFLOW, 1) else total


def trained(
    case: tuple[str, str], workers: Sequence[int], store: Any, in_store: bool | None, rows: bool = False
) -> Any:
    """Weights and reports after every step, as bytes and exact numbers; a replica for each of the workers."""
    limit, optimizer = case
    nets = [Net(rows) for _ in workers]
    named = [dict(net.named_parameters()) for net in nets]
    params: Any = {name: [one[name] for one in named] for name in named[0]} if len(nets) > 1 else named[0]
    options = OPTIMIZERS[optimizer] | ({"lazy_update": True} if rows else {})
    given = (params, optimizer, options, store, None, in_store)
    with Trainer(*given, clip_grad=LIMITS[limit], amp=1000.0) as trainer:
        found: list[Any] = []
        for step in range(STEPS):
            losses = [net.loss(step, worker) for net, worker in zip(nets, workers, strict=True)]
            result = trainer.update_params(losses if len(nets) > 1 else losses[0])
            weights = [p.detach().numpy().tobytes() for p in nets[0].parameters()]
            found.append((weights, vars(result)))
    return found


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_workers_of_any_number_of_servers_and_replicas_get_the_same_bits(
    jobs: Servers, case: tuple[str, str]
) -> None:
    expected = trained(case, range(WORKERS), "local", True)
    assert [step[1]["skipped"] for step in expected] == [step == OVERFLOW for step in range(STEPS)]
    assert trained(case, range(WORKERS), "local", False) == expected
    for count, in_store in (place for own, *place in PLACES if own == case):

        def body(kv: DistKVStore, rank: int, in_store: bool = in_store) -> Any:
            return trained(case, [rank], kv, in_store)

        assert jobs.results(WORKERS, count, body) == [expected] * WORKERS, (count, in_store)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_one_worker_gets_the_same_bits_with_any_store_or_none(jobs: Servers, case: tuple[str, str]) -> None:
    expected = trained(case, [1], None, None)
    for in_store in (True, False):
        assert trained(case, [1], "local", in_store) == expected

        def body(kv: DistKVStore, _: int, in_store: bool = in_store) -> Any:
            return trained(case, [1], kv, in_store)

        assert jobs.results(1, 2, body) == [expected]


@pytest.mark.parametrize("limit", LIMITS)
def test_so_they_do_with_rows_of_a_table_in_the_store(jobs: Servers, limit: str) -> None:
    case = (limit, "sgd")
    expected = trained(case, range(WORKERS), "local", True, rows=True)
    for count in (1, 3):

        def body(kv: DistKVStore, rank: int) -> Any:
            return trained(case, [rank], kv, True, rows=True)

        assert jobs.results(WORKERS, count, body) == [expected] * WORKERS, count
