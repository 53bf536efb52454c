"""The store of one process: the servers' engine, called in place of a server."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.admission import EngineConfig
from kvstore_server.codec import Codec
from kvstore_server.engine import Engine
from kvstore_server.errors import ConfigurationError, OptimizerError
from kvstore_server.plan import INTEGERS, TensorSpec
from kvstore_server.protocol import messages as m
from kvtrainer.comm.client import Client
from kvtrainer.comm.loopback import Loopback
from kvtrainer.comm.tickets import RoundItem, Ticket
from kvtrainer.comm.transport import SessionOptions
from kvtrainer.kvstore.base import (
    OPTIMIZER,
    SPARSE_GRADIENTS,
    SPARSE_WEIGHTS,
    Key,
    register,
)
from kvtrainer.kvstore.entries import Entry
from kvtrainer.kvstore.replica_compression import ReplicaCompressor
from kvtrainer.kvstore.row_values import is_sparse
from kvtrainer.kvstore.store import TableKVStore
from kvtrainer.kvstore.values import pair

_KEYS = "keys"
"""The namespace of the store's own keys; each Trainer has another."""


@register("local", "local_update_cpu", "local_allreduce_cpu")
class LocalKVStore(TableKVStore):
    """Keeps keys in this process; several replicas of a value are summed. Rank 0 of 1 worker.

    Sums and updates run on the CPU for every name, so results are the same bit for bit. A round is over, and its
    error raised, when `push` returns. Keys may also be integers, which no optimizer can update.
    """

    capabilities: ClassVar[Collection[str]] = (OPTIMIZER, SPARSE_GRADIENTS, SPARSE_WEIGHTS)
    _other_dtypes = tuple(INTEGERS)

    def __init__(self, type: str = "local") -> None:
        self._engine = Engine(EngineConfig(integers=True), clock=time.monotonic)
        self._replicas: ReplicaCompressor | None = None
        self._transport = _Direct([self._engine], time.monotonic)
        super().__init__(type, _connected(self._transport, _KEYS))
        self._can_compress = "device" in type.lower()

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        if ignore_sparse or out is None:
            super().pull(key, out, priority, ignore_sparse)
            return
        pairs = pair(key, out, "out")
        dense = [
            [torch.empty_like(one, layout=torch.strided) if is_sparse(one) else one for one in outs]
            for _, outs in pairs
        ]
        super().pull([one for one, _ in pairs], dense, priority)
        for (_, outs), values in zip(pairs, dense, strict=True):
            for one, value in zip(outs, values, strict=True):
                if one is not value:
                    one.copy_(value.to_sparse(1))

    def set_optimizer(self, optimizer: Any) -> None:
        """As TableKVStore.set_optimizer; takes the place of an updater."""
        super().set_optimizer(optimizer)
        self._engine.updaters.pop(_KEYS, None)

    def set_updater(self, updater: Callable[[Key, Tensor, Tensor], object]) -> None:
        """Call `updater(key, merged, stored)` in place of an optimizer; it changes `stored` in place.

        An error that it raises is raised by the push (as OptimizerError) and leaves the values as they were. It must
        not call this store, which is busy with the push.
        """
        if not callable(updater):
            raise ConfigurationError(
                f"an updater is a function of (key, merged, stored), got {updater!r:.80}"
            )
        keys: dict[str, Key] = {}

        def call(name: str, merged: Tensor, stored: Tensor) -> None:
            if name not in keys:
                keys.update({str(key): key for key in self._entries})
            updater(keys[name], merged, stored)

        self._engine.updaters[_KEYS] = call

    def open_client(self) -> Client:
        """A client with a namespace of its own, for a Trainer."""
        name = f"trainer{len(self._for_trainers) + 1}"
        client = _connected(Loopback([self._engine], time.monotonic), name)
        self._for_trainers.append(weakref.ref(client))
        return client

    @property
    def rank(self) -> int:
        return 0

    @property
    def num_workers(self) -> int:
        return 1

    @property
    def _client(self) -> Client:
        if self._transport.is_busy:
            raise OptimizerError(
                f"this {self._type!r} store was called by the updater or optimizer that one of its own rounds was "
                "running: re-entrance, which would wait for itself. Change `stored` in place, and use the store after "
                "the push"
            )
        return self._only_client

    @_client.setter
    def _client(self, client: Client) -> None:
        self._only_client = client

    def _compress_with(self, codec: Codec | None) -> None:
        # Replicas are compressed before their sum; what goes to the engine goes nowhere.
        self._replicas = None if codec is None else ReplicaCompressor(codec)

    def _merged(self, spec: TensorSpec, replicas: Sequence[Tensor]) -> tuple[Tensor, bool]:
        if self._replicas is None or spec.dtype in INTEGERS:
            return super()._merged(spec, replicas)
        return self._replicas.merge(spec.key, replicas), True

    def _goes_by_rows(self, entry: Entry) -> bool:
        # Without an optimizer MXNet's own stores in process put zeros in the place of the other rows.
        return self._optimizer is not None and super()._goes_by_rows(entry)

    def _start(self, items: Sequence[RoundItem], priority: int) -> Ticket:
        if self._optimizer is not None and _KEYS not in self._engine.updaters:
            for spec in (item.table.plan.specs[0] for item in items):
                if spec.dtype in INTEGERS:
                    raise ConfigurationError(
                        f"key {spec.key!r} is {spec.dtype}, which {self._optimizer.registered_name!r} cannot update; "
                        "keep integers in a store without an optimizer, or with an updater"
                    )
        ticket = super()._start(items, priority)
        try:
            self._client.rounds.wait(ticket)
        finally:
            if self._replicas is not None:
                self._replicas.accept(
                    item.table.plan.specs[0].key for item in items if not ticket.is_lost(item.table)
                )
        return ticket


class _Direct(Loopback):
    """Knows whether the engine is in the middle of a request: its caller is then code that the request runs."""

    is_busy = False

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        self.is_busy = True
        try:
            super().send(server, request, priority)
        finally:
            self.is_busy = False


def _connected(transport: Loopback, namespace: str) -> Client:
    client = Client(transport, SessionOptions(namespace, rank=0, num_workers=1), time.monotonic)
    client.connect()
    return client
