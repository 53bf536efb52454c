"""What is held is measured and used with the same bits as where a worker does both: all kinds of keys and servers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.norms import Decision, Guard, Measured, apply_decision, measure
from kvstore_server.optimizer import create
from kvstore_server.plan import Plan
from kvstore_server.rows import RowSet
from kvtrainer.errors import ConfigurationError
from kvtrainer.sync.exchange import Gradients, Outcome, StoreExchange
from tests.support.engines import client_of, filled, plan_of
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
    ) -> Outcome:
        guard = Guard(norm_type, lambda measured: decision) if decision is not None else None
        return self.exchange.run(Gradients(arenas, rows or {}, scale, absent, guard=guard), self.weights)


def clipped(arenas: Mapping[str, Tensor], decision: Decision) -> dict[str, Tensor]:
    """What a worker makes of its gradient by itself."""
    mine = {dtype: flat * SCALE for dtype, flat in arenas.items()}
    for flat in mine.values():
        apply_decision(flat, decision)
    return mine


def same(a: Job, b: Job) -> bool:
    return all(torch.equal(a.weights[dtype], b.weights[dtype]) for dtype in a.weights)


@pytest.mark.parametrize(
    ("optimizer", "servers", "dtype"), pairwise(OPTIMIZERS, [1, 2, 3], ["float32", "float64"])
)
def test_a_held_update_has_the_bits_of_one_by_a_gradient_that_the_worker_has_clipped(
    optimizer: str, servers: int, dtype: str
) -> None:
    held, plain = Job(servers, optimizer, dtype), Job(1, optimizer, dtype)
    for step, decision in enumerate(
        [Decision(0.37), Decision(0.81, 0.05), Decision(), Decision(clip_value=0.1)]
    ):
        grads = held.arenas(2 + step)
        outcome = held.run(grads, decision)
        assert (outcome.decision, outcome.skipped) == (decision, False)
        plain.run(clipped(grads, decision), scale=1.0)
        assert same(held, plain)


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


def rows_of_table(seed: int) -> RowSet:
    ids = torch.randperm(4000, generator=torch.Generator().manual_seed(seed))[:50].sort().values
    return RowSet(ids, randn((50, 20), seed))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "lamb", "torch:SparseAdam"])
@pytest.mark.parametrize("servers", [1, 3])
def test_rows_are_measured_and_clipped_as_dense_gradients_are(optimizer: str, servers: int) -> None:
    held, plain = Job(servers, optimizer), Job(1, optimizer)
    decision = Decision(0.37, 0.2)
    for step in range(2):
        grads, rows = held.arenas(5 + step), rows_of_table(20 + step)
        absent = frozenset({1, 2, 3}) if optimizer == "torch:SparseAdam" else frozenset[int]()
        before = rows.values.clone()
        outcome = held.run(grads, decision, absent=absent, rows={0: rows})
        assert torch.equal(rows.values, before)
        present = [key not in absent for key in range(len(SHAPES))]
        assert outcome.measured == measure(held.plan, grads, {0: rows}, present, 2.0, SCALE)
        mine = rows._replace(values=rows.values * SCALE)
        apply_decision(mine.values, decision)
        plain.run(clipped(grads, decision), scale=1.0, absent=absent, rows={0: mine})
        assert same(held, plain)


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


def test_half_precision_is_clipped_in_single_precision() -> None:
    held, plain = (
        Job(2, "sgd", "bfloat16", multi_precision=True),
        Job(1, "sgd", "bfloat16", multi_precision=True),
    )
    grads = held.arenas(7)
    held.run(grads, Decision(0.5), scale=0.25)
    plain.run(grads, scale=0.125)
    assert same(held, plain)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_gradient_that_is_skipped_leaves_weights_and_state_and_what_is_not_finite_is_told(
    servers: int,
) -> None:
    held, plain = Job(servers, "adam"), Job(servers, "adam")
    bad = held.arenas(3)
    bad["float32"][40_000] = math.nan
    outcome = held.run(bad, Decision(skip=True))
    assert outcome.skipped
    assert outcome.measured is not None
    assert not outcome.measured.is_finite
    assert same(held, plain)
    for job in (held, plain):
        job.run(job.arenas(4))
    assert same(held, plain)


def test_doubles_whose_squares_overflow_are_still_finite() -> None:
    job = Job(2, "sgd", "float64")
    outcome = job.run({"float64": torch.full_like(job.weights["float64"], 1e200)}, Decision(skip=True))
    assert outcome.measured == Measured(math.inf, True)


def test_without_a_guard_nothing_is_measured() -> None:
    job = Job(2, "sgd")
    outcome = job.run(job.arenas(2))
    assert (outcome.measured, outcome.decision) == (None, Decision())


def test_a_guard_where_the_store_does_not_update_is_refused() -> None:
    plan = plan_of(SHAPES)
    exchange = StoreExchange(client_of(1), plan, None)
    weights = filled(plan, {key: torch.zeros(shape) for key, shape in SHAPES.items()})
    exchange.init(weights)
    guarded = Gradients(weights, {}, 1.0, frozenset(), guard=Guard(2.0, lambda m: Decision()))
    with pytest.raises(ConfigurationError):
        exchange.run(guarded, weights)
