"""Requests that a server answers at once: optimizer, optimizer state, counters, profiles."""

from __future__ import annotations

from kvstore_server.admission import EngineConfig
from kvstore_server.errors import ProtocolError, UnknownNameError
from kvstore_server.namespace import Namespace
from kvstore_server.optimizer.state import pack_states, unpack_states
from kvstore_server.protocol import messages as m
from kvstore_server.tracing import Clock


def control(
    space: Namespace,
    rank: int,
    body: m.RequestBody,
    config: EngineConfig,
    clock: Clock | None,
    now: float,
) -> m.ReplyBody:
    """Do what a rank asks of its namespace.

    Raises:
        KVStoreError: it cannot be done; nothing has changed.
    """
    if isinstance(body, m.SetOptimizer):
        try:
            space.set_optimizer(rank, body.spec)
        except UnknownNameError as error:
            raise UnknownNameError(f"server {config.server} cannot run the optimizer: {error}") from None
        return m.Info()
    if isinstance(body, m.GetState):
        table = space.table(body.table)
        found = table.shard.get_state(table.unit, body.index)
        return m.State(body.table, body.index, *pack_states(found))
    if isinstance(body, m.State):
        table = space.table(body.table)
        table.shard.slot_of(table.unit, body.index)
        piece = table.plan.slices[body.index]
        table.shard.put_state(table.unit, body.index, unpack_states(piece, body.summary, body.data))
        return m.Info()
    if isinstance(body, m.Stats):
        return m.Info(space.stats(now, config))
    if isinstance(body, m.Profile):
        return m.Info(space.profiling.control(body, clock))
    raise ProtocolError(f"{type(body).__name__} is not a request")
