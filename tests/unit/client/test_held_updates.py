"""What is held is measured and used with the same bits as where a worker does both: all kinds of keys and servers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.optimizer import create
from kvstore_server.plan import Plan
from kvstore_server.protocol.rows import RowSet
from kvstore_server.shard.norms import Decision, Guard, Measured, measure
from kvtrainer.errors import ConfigurationError
from kvtrainer.sync.exchange import RoundResult, StoreExchange
from tests.support.engines import client_of, filled, plan_of, run_round
from tests.support.pairwise import pairwise

SHAPES = {"table": (4000, 20), "bias": (9,), "big": (300, 700), "scale": (3, 3)}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "wd": 1e-2},
    "adam": {},
    "lamb": {},
    "adagrad": {},
}
SCALE = 0.3


def randn(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


class Job:
    """One worker of a job with so many servers, in this process."""

    def __init__(
        self, servers: int, optimizer: str, dtype: str = "float32", codec: Any = None, **options: Any
    ):
        self.plan: Plan = plan_of(SHAPES, dtype)
        self.dtype = dtype
        built = create(optimizer, learning_rate=0.1, **{**OPTIMIZERS.get(optimizer, {}), **options})
        self.exchange = StoreExchange(client_of(servers), self.plan, built, codec)
        self.weights = self.arenas(1)
        self.exchange.init(self.weights)

    def arenas(self, seed: int) -> dict[str, Tensor]:
        values = {
            key: randn(shape, seed * 10 + at, self.dtype) for at, (key, shape) in enumerate(SHAPES.items())
        }
        return filled(self.plan, values)

    def run(
        self,
        arenas: Mapping[str, Tensor],
        decision: Decision | None = None,
        norm_type: float = 2.0,
        scale: float = SCALE,
        absent: frozenset[int] = frozenset(),
        rows: Mapping[int, RowSet] | None = None,
    ) -> RoundResult:
        guard = Guard(norm_type, lambda measured: decision) if decision is not None else None
        return run_round(self.exchange, arenas, self.weights, scale, absent, rows=rows or {}, guard=guard)


@pytest.mark.parametrize(
    ("norm_type", "servers", "dtype"),
    pairwise([1.0, 2.0, 3.5, math.inf], [1, 2, 3], ["float32", "float64", "bfloat16"]),
)
def test_servers_measure_the_bits_that_a_worker_measures(norm_type: float, servers: int, dtype: str) -> None:
    job = Job(servers, "sgd", dtype)
    for seed, absent in enumerate([frozenset[int](), frozenset({1}), frozenset({0, 2, 3})], 2):
        grads = job.arenas(seed)
        present = [key not in absent for key in range(len(SHAPES))]
        for key in absent:
            at = job.plan.key_offsets[key]
            grads[dtype][at : at + job.plan.specs[key].numel] = 0.0
        outcome = job.run(grads, Decision(), norm_type, absent=absent)
        assert outcome.measured == measure(job.plan, grads, {}, present, norm_type, SCALE)
        assert outcome.left_out == absent


def test_compressed_gradients_are_measured_as_they_arrive_and_a_skipped_one_leaves_the_residual() -> None:
    job = Job(2, "sgd", codec=make_codec({"type": "2bit", "threshold": 0.5}))
    grads = {"float32": torch.full_like(job.weights["float32"], 0.3)}
    numel = sum(spec.numel for spec in job.plan.specs)
    norms = []
    for skip in (True, False, True, False):
        outcome = job.run(grads, Decision(skip=skip), 1.0, scale=1.0)
        assert outcome.measured is not None
        norms.append(outcome.measured.norm)
    # 0.3 says nothing and leaves 0.3; then 0.6 says 0.5.
    assert norms == [0.0, 0.0, 0.5 * numel, 0.5 * numel]


def test_doubles_whose_squares_overflow_have_a_finite_norm() -> None:
    job = Job(2, "sgd", "float64")
    grads = {key: torch.full(shape, 1e200, dtype=torch.float64) for key, shape in SHAPES.items()}
    outcome = job.run(filled(job.plan, grads), Decision(skip=True))
    numel = sum(spec.numel for spec in job.plan.specs)
    assert outcome.measured == Measured(pytest.approx(SCALE * 1e200 * math.sqrt(numel), rel=1e-12), True)


def test_a_guard_where_the_store_does_not_update_is_refused() -> None:
    plan = plan_of(SHAPES)
    exchange = StoreExchange(client_of(1), plan, None)
    weights = filled(plan, {key: torch.zeros(shape) for key, shape in SHAPES.items()})
    exchange.init(weights)
    with pytest.raises(ConfigurationError):
        run_round(exchange, weights, weights, guard=Guard(2.0, lambda m: Decision()))
