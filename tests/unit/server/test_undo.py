"""A round that one server has applied and another has failed is taken back, in an order that is fixed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.engine import Engine
from kvstore_server.errors import OptimizerError
from kvstore_server.namespace import EngineConfig
from kvstore_server.optimizer import Optimizer, create, register, registry
from kvstore_server.optimizer.base import StateValue
from kvstore_server.plan import TensorSpec
from kvtrainer.comm.client import Client
from kvtrainer.comm.contribution import Contribution
from kvtrainer.comm.tables import RemoteTable
from tests.support.switchboard import connected, play

SIZE = 300_000


@pytest.fixture
def fussy() -> Iterator[Optimizer]:
    """`m = m / 2 + grad; w -= m`, which raises on gradients above 100 after it has changed m."""

    class Fussy(Optimizer):
        def create_state(self, weight: Tensor) -> dict[str, StateValue]:
            return {"m": torch.zeros_like(weight)}

        def update(
            self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
        ) -> None:
            memory = state["m"]
            assert isinstance(memory, Tensor)
            weight.sub_(memory.mul_(0.5).add_(grad))
            if bool((grad > 100).any()):
                raise ValueError("gradient above 100")

    register(Fussy)
    yield create("fussy")
    del registry._registry["fussy"]


def started(optimizer: Optimizer) -> tuple[list[Client], list[RemoteTable]]:
    engines = [Engine(EngineConfig(server=i, num_servers=2)) for i in range(2)]
    clients = connected(engines, 2)
    tables = []
    for client in clients:
        client.set_optimizer(optimizer.spec())
        tables += client.register({"w": [TensorSpec("w", (SIZE,), "float32")]})
    zeros = {"float32": torch.zeros(SIZE)}
    play(clients, [Contribution([tables[0]], [zeros], None), Contribution([tables[1]], None, None)])
    return clients, tables


def test_what_server_0_had_applied_is_taken_back_once_when_server_1_fails(fussy: Optimizer) -> None:
    clients, tables = started(fussy)
    plan = tables[0].plan
    good, bad = torch.ones(SIZE), torch.ones(SIZE)
    bad[plan.slices_of(1)[-1].offset] = 1000.0
    outs = [torch.zeros(SIZE) for _ in clients]

    def round_of(*grads: Tensor) -> list[Exception | None]:
        rows = zip(tables, grads, outs, strict=True)
        # Rank 0 commits to both servers, then rank 1 to server 0 and only then to server 1.
        contributions = [Contribution([t], [{"float32": g}], [{"float32": o}], 1.0) for t, g, o in rows]
        return play(clients, contributions, OptimizerError)

    assert round_of(good, good) == [None, None]
    assert [type(outcome) for outcome in round_of(good, bad)] == [OptimizerError, OptimizerError]
    assert [row["rounds_undone"] for stats in clients[0].stats() for row in stats["tables"]] == [1, 0]
    # Neither weights nor memory of the failed round are left: 0 − 2, then m = 1 + 2.
    assert round_of(good, good) == [None, None]
    assert [out.unique().tolist() for out in outs] == [[-5.0], [-5.0]]
