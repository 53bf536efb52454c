"""Sums that servers hold until workers have decided: the same bits as in process, for any number of servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.norms import Decision, Guard, Measured
from kvstore_server.optimizer import create
from kvtrainer.comm import session
from kvtrainer.errors import PlanMismatchError, WorkerLostError
from kvtrainer.kvstore import DistKVStore, LocalKVStore
from kvtrainer.sync.contract import Gradients, Outcome
from kvtrainer.sync.servers import StoreExchange
from tests.support.engines import filled, plan_of
from tests.support.lossy import LossyProxy
from tests.support.processes import FORGETFUL, Members, Processes, new_name, together
from tests.support.stores import Servers, servers

SHAPES = {"W1": (60, 300), "b1": (300,), "W2": (300, 130), "b2": (13,)}
STEPS = 6
OVERFLOW = 3
"""The step in which two finite gradients have an infinite sum."""


@pytest.fixture(scope="module")
def jobs() -> Iterator[Servers]:
    with servers() as started:
        yield started


def arenas(seed: int, dtype: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    plan = plan_of(SHAPES, dtype)
    values = {key: torch.randn(*shape, generator=generator) for key, shape in SHAPES.items()}
    return filled(plan, {key: value.to(getattr(torch, dtype)) for key, value in values.items()})


def gradient_of(rank: int, step: int, dtype: str) -> dict[str, Tensor]:
    grads = arenas(100 * step + rank, dtype)
    if step == OVERFLOW:
        grads[dtype][7] = torch.finfo(getattr(torch, dtype)).max
    return grads


def clip(measured: Measured) -> Decision:
    """By the norm, as torch does; every second decision limits the elements as well."""
    if not measured.is_finite:
        return Decision(skip=True)
    coef = min(1.0, 10.0 / (measured.norm + 1e-6))
    return Decision(coef, 0.05 if int(measured.norm) % 2 else None)


def exchange_over(client: Any, dtype: str) -> tuple[StoreExchange, dict[str, Tensor]]:
    optimizer = create("sgd", learning_rate=0.1, momentum=0.9, wd=1e-3)
    exchange = StoreExchange(client, plan_of(SHAPES, dtype), optimizer)
    weights = arenas(0, dtype)
    exchange.init(weights)
    return exchange, weights


def train(
    client: Any, gradient: Callable[[int], Mapping[str, Tensor]], dtype: str
) -> tuple[list[Outcome], Tensor]:
    exchange, weights = exchange_over(client, dtype)
    seen = [
        exchange.run(
            Gradients(gradient(step), {}, 0.5, frozenset()), weights, b"", guard=Guard(2.0, clip)
        )._replace(rows=None)
        for step in range(1, STEPS)
    ]
    return seen, weights[dtype]


def in_process(dtype: str) -> tuple[list[Outcome], Tensor]:
    """One worker that has the gradients of both."""

    def both(step: int) -> dict[str, Tensor]:
        return {dtype: gradient_of(0, step, dtype)[dtype] + gradient_of(1, step, dtype)[dtype]}

    return train(LocalKVStore().open_client(), both, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_clipping_on_servers_has_the_bits_of_clipping_in_process(
    jobs: Servers, count: int, dtype: str
) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        return train(kv.open_client(), lambda step: gradient_of(rank, step, dtype), dtype)

    expected, weights = in_process(dtype)
    assert [outcome.skipped for outcome in expected] == [step == OVERFLOW for step in range(1, STEPS)]
    assert len({outcome.decision.clip_value for outcome in expected}) == 2
    for outcomes, got in jobs.results(2, count, body):
        for mine, theirs in zip(outcomes, expected, strict=True):
            assert (mine.decision, mine.skipped) == (theirs.decision, theirs.skipped)
            assert mine.measured == theirs.measured or mine.skipped
        assert torch.equal(got, weights)


def test_messages_that_get_lost_change_nothing(jobs: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "REPEAT_AFTER", 0.1)
    proxies = [LossyProxy(server.address, 0.15, seed) for seed, server in enumerate(jobs.of(2))]
    name = new_name()
    try:
        with Members() as members:
            stores = [members.join([p.address for p in proxies], rank, 2, name) for rank in range(2)]
            calls = (
                lambda kv=kv, rank=rank: train(
                    kv.open_client(), lambda step: gradient_of(rank, step, "float32"), "float32"
                )
                for rank, kv in enumerate(stores)
            )
            outcomes = together(*calls)
    finally:
        for proxy in proxies:
            proxy.close()
    assert sum(proxy.lost for proxy in proxies) > 5
    expected, weights = in_process("float32")
    for seen, got in outcomes:
        assert [one.decision for one in seen] == [one.decision for one in expected]
        assert torch.equal(got, weights)


DIES = """
from tests.integration.test_held_rounds import Decision, Gradients, Guard, exchange_over, gradient_of
exchange, weights = exchange_over(kv.open_client(), "float32")
def decide(measured):
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return Decision(0.5)
for step in (1, 2):
    grads = Gradients(gradient_of(1, step, "float32"), {}, 0.5, frozenset())
    exchange.run(grads, weights, b"", guard=Guard(2.0, decide))
"""


def test_a_worker_that_dies_before_it_has_decided_does_not_undo_the_round() -> None:
    with Processes() as processes, Members() as members:
        started, name = processes.servers(2, *FORGETFUL), new_name()
        worker = processes.worker(DIES, started, 1, 2, name)
        exchange, weights = exchange_over(members.join(started, 0, 2, name).open_client(), "float32")

        def step(number: int) -> Outcome:
            grads = Gradients(gradient_of(0, number, "float32"), {}, 0.5, frozenset())
            return exchange.run(grads, weights, b"", guard=Guard(2.0, lambda measured: Decision(0.5)))

        assert [step(1).decision, step(2).decision] == [Decision(0.5)] * 2
        assert worker.end()[0] == -9
        rows = [row for counters in exchange.stats() for row in counters["tables"]]
        assert [row["rounds_applied"] for row in rows] == [2, 2]
        with pytest.raises(WorkerLostError, match="rank 1"):
            step(3)


def test_workers_that_do_not_want_the_same_checked_are_told_so(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> None:
        exchange, weights = exchange_over(kv.open_client(), "float32")
        guard = Guard(math.inf, clip) if rank else None
        exchange.run(
            Gradients(gradient_of(rank, 1, "float32"), {}, 1.0, frozenset()), weights, b"", guard=guard
        )

    for error in jobs.everybody(2, 2, body):
        assert isinstance(error, PlanMismatchError)
        assert "rank 0 wants nothing to be checked, rank 1 wants its norm of type inf" in str(error)
