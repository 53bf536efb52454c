"""A store over a client, without the verbs for its keys' values: members, optimizer, compression, the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from kvstore_server.codec import Codec, make_codec
from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer import Optimizer
from kvtrainer.comm.client import Client
from kvtrainer.comm.compressor import Compressor
from kvtrainer.comm.tickets import RemoteTable, RoundItem
from kvtrainer.kvstore import store_states
from kvtrainer.kvstore.base import OPTIMIZER, Key, KVStoreBase
from kvtrainer.kvstore.entries import Entry
from kvtrainer.optimizer import create as create_optimizer

_Store = TypeVar("_Store", bound="ClientStore")


class ClientStore(KVStoreBase):
    """Base of the stores that keep their keys in engines; each key is a table of its own. Not thread-safe."""

    def __init__(self, type: str, client: Client) -> None:
        self._type = type
        self._client = client
        self._can_compress = True
        self._codec: Codec | None = None
        self._entries: dict[Key, Entry] = {}
        self._optimizer: Optimizer | None = None
        self._sent_spec: dict[str, Any] | None = None

    @property
    def type(self) -> str:
        return self._type

    @property
    def rank(self) -> int:
        return self._client.options.rank

    @property
    def num_workers(self) -> int:
        return self._client.options.num_workers

    @property
    def num_servers(self) -> int:
        """How many servers hold the keys."""
        return self._client.num_servers

    def is_capable(self, capability: str) -> bool:
        return self._capability(capability) == OPTIMIZER or self._can_compress

    def set_optimizer(self, optimizer: Any) -> None:
        """Apply this optimizer to every round from now on, where the keys live.

        Call it on every worker (those that call it must name the same one), with what `kvtrainer.optimizer.create`
        returns, a name, or a torch.optim class. Later changes of its numbers (`set_learning_rate`) are sent
        with the next push. Naming the same optimizer again keeps its state. Blocks; with an optimizer that needs whole
        keys until every worker has called it, because keys that are spread over servers are brought together.
        """
        self._optimizer = create_optimizer(optimizer)
        self._refresh_optimizer()
        if not self._optimizer.elementwise:
            self._bring_together()

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Save the optimizer's state of every key, wherever it is; any one worker may, between its pushes; blocks.

        With `dump_optimizer` the optimizer's numbers count as well when the file is loaded.

        Raises:
            ConfigurationError: no optimizer is set.
            StateFileError: the file cannot be written; the former one is unchanged.
        """
        tables = [entry.table for entry in self._entries.values()]
        store_states.save(fname, self._client, tables, self._known_optimizer(), dump_optimizer)

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Go on from saved state; call it on every worker, with the same file, after `init` and `set_optimizer`.

        Raises:
            ConfigurationError: no optimizer is set.
            StateFileError, StateMismatchError: the file cannot be read or does not fit; nothing has changed.
        """
        optimizer = self._known_optimizer()
        tables = [entry.table for entry in self._entries.values()]
        optimizer.hyper.update(store_states.load(fname, self._client, tables, optimizer))

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what this worker pushes from now on; what is lost is added to its next push of the key.

        Waits for this worker's own pushes. Initial values are never compressed. A round that fails changes nothing
        of what is kept back.

        Args:
            compression_params: {"type": "2bit", "threshold": 0.5}, or "1bit", "fp16", "bf16" or "none". Residuals of
                an earlier compression are dropped.

        Raises:
            ConfigurationError: this store does not compress, or the parameters are wrong.
        """
        if not self._can_compress:
            raise ConfigurationError(
                f"gradient compression is not supported for kvstore {self._type!r}, which sends nothing anywhere"
            )
        codec = make_codec(compression_params)
        self._client.settle()  # a push under way may have to be sent again, as it was
        self._compress_with(None if codec.name == "none" else codec)

    def barrier(self) -> None:
        """Block until every worker has come here."""
        self._client.barrier()

    def num_dead_nodes(self) -> int:
        """How many workers came and have since left or fallen silent; asks the servers."""
        return max(int(stats["num_dead"]) for stats in self._client.stats())

    def server_stats(self) -> list[dict[str, Any]]:
        """Each server's counters for this store, in server order; waits for this worker's own pushes."""
        self._client.settle()
        return self._client.stats()

    def close(self) -> None:
        """Wait for this worker's pushes and leave; idempotent. Other workers' rounds that need it fail."""
        if not self._client.is_closed:
            try:
                self._client.settle()
            finally:
                self._client.close()

    def __enter__(self: _Store) -> _Store:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._client.close(error)  # without waiting for rounds that may never end
        self.close()

    def _known_optimizer(self) -> Optimizer:
        if self._optimizer is None:
            raise ConfigurationError(
                "this kvstore has no optimizer, hence no states; call set_optimizer first"
            )
        return self._optimizer

    def _refresh_optimizer(self) -> None:
        if self._optimizer is None:
            return
        spec = self._optimizer.spec()
        if spec != self._sent_spec:
            self._client.set_optimizer(spec)
            self._sent_spec = spec

    def _bring_together(self) -> None:
        """Lay out anew, with whole keys, those that are spread over servers, with the values that they have now."""
        spread = [entry for entry in self._entries.values() if len(entry.table.plan.servers) > 1]
        if not spread:
            return
        values = [entry.new_arena() for entry in spread]
        self._client.rounds.pull([(entry.table, arena) for entry, arena in zip(spread, values, strict=True)])
        self._client.barrier()
        specs = {f"{entry.spec.key} (whole)": [entry.spec] for entry in spread}
        tables = self._client.register(specs, whole_keys=True)
        items = [
            RoundItem(table, arena if self.rank == 0 else None, None)
            for table, arena in zip(tables, values, strict=True)
        ]
        self._client.rounds.wait(self._client.rounds.start(items))
        for entry, table in zip(spread, tables, strict=True):
            table.compressor = self._compressor(table)
            if table.compressor is not None and entry.table.compressor is not None:
                table.compressor.set_residuals(entry.table.compressor.residuals())
            entry.table = table

    def _compress_with(self, codec: Codec | None) -> None:
        self._codec = codec
        for entry in self._entries.values():
            entry.table.compressor = self._compressor(entry.table)

    def _compressor(self, table: RemoteTable) -> Compressor | None:
        return None if self._codec is None else Compressor(self._codec, table.plan)
