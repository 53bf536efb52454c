"""Requests that a server answers at once: optimizer, optimizer state, counters, profiles."""

from __future__ import annotations

from kvstore_server.admission import EngineConfig
from kvstore_server.errors import ProtocolError, UnknownNameError
from kvstore_server.namespace import Namespace
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
        dense = space.table(body.table).dense
        export = dense.export_key_state if body.of_key else dense.export_state
        return m.State(body.table, body.index, body.of_key, *export(body.index))
    if isinstance(body, m.State):
        dense = space.table(body.table).dense
        take = dense.import_key_state if body.of_key else dense.import_state
        take(body.index, body.summary, body.data)
        return m.Info()
    if isinstance(body, m.Stats):
        return m.Info(space.stats(now, config))
    if isinstance(body, m.Profile):
        return m.Info(space.profiling.control(body, clock))
    raise ProtocolError(f"{type(body).__name__} is not a request")
