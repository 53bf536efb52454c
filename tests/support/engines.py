"""Servers as engines in the test's own process: a client of any number of them, without sockets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvstore_server.engine import Engine
from kvstore_server.namespace import EngineConfig
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvtrainer.comm.client import Client
from kvtrainer.comm.loopback import Loopback
from kvtrainer.comm.session import SessionOptions
from kvtrainer.sync.contract import Exchange, Gradients, Outcome


def client_of(num_servers: int, engines: Sequence[Engine] | None = None) -> Client:
    """The only worker of a job with so many servers; `engines` gives their places to hold on to them."""
    places = engines or [Engine(EngineConfig(i, num_servers, run=i + 1)) for i in range(num_servers)]
    client = Client(Loopback(places, time.monotonic), SessionOptions("job", 0, 1), time.monotonic)
    client.connect()
    return client


def plan_of(shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> Plan:
    """The layout of keys of one dtype, as a Trainer makes it before it knows the servers."""
    return make_plan([TensorSpec(key, shape, dtype) for key, shape in shapes.items()], 1)


def filled(plan: Plan, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arenas with a tensor for each key, and zero padding."""
    arenas = {name: torch.zeros(size, dtype=getattr(torch, name)) for name, size in plan.arena_sizes.items()}
    for spec, view in zip(plan.specs, views(plan, arenas), strict=True):
        view.copy_(values[spec.key])
    return arenas


def views(plan: Plan, arenas: Mapping[str, Tensor]) -> list[Tensor]:
    """The keys in the arenas, in their shapes."""
    rows = zip(plan.specs, plan.key_offsets, strict=True)
    return [arenas[spec.dtype][at : at + spec.numel].view(spec.shape) for spec, at in rows]


def step(
    exchange: Exchange,
    grads: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    scale: float = 1.0,
    absent: frozenset[int] = frozenset(),
    veto: bool = False,
) -> Outcome:
    """One round of dense gradients without new hyper-parameters."""
    return exchange.run(Gradients(grads, {}, scale, absent), weights, b"", veto)
