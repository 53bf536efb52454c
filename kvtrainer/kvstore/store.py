"""The kvstore verbs over a client, the same for every store that keeps its tables in engines.

Each key is a table of its own, so workers may push keys in any order and any subset of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvstore_server.codec import Codec, make_codec
from kvstore_server.errors import ConfigurationError, KeyNotFoundError
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import TensorSpec
from kvtrainer.comm.client import Client
from kvtrainer.comm.compressor import Compressor
from kvtrainer.comm.tickets import RemoteTable, RoundItem, Ticket
from kvtrainer.kvstore.base import OPTIMIZER, Key, KVStoreBase
from kvtrainer.kvstore.entries import Entry, target_of
from kvtrainer.kvstore.quiet import without_collections
from kvtrainer.kvstore.values import check_fits, check_key, merge, pair, spec_of
from kvtrainer.optimizer import create as create_optimizer


class TableKVStore(KVStoreBase):
    """init, push, pull, pushpull and broadcast as MXNet defines them, with errors raised at once.

    Not thread-safe. `push` returns at once and its error is raised by the next call that concerns the key, by
    `barrier` or by `close`; everything else blocks. A `pull` sees this worker's own earlier pushes. Keys are all
    int or all str within one store.
    """

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

    @without_collections
    def init(self, key: Any, value: Any) -> None:
        """Create keys with rank 0's values; blocks until every worker has called it.

        Raises:
            ConfigurationError: a key exists already, or is of another type than the keys before it.
            PlanMismatchError: workers give different shapes or dtypes.
        """
        self._create(pair(key, value, "value"), None)

    @without_collections
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Create keys with rank 0's values and write those to `out` on every worker; blocks as `init` does."""
        self._create(pair(key, value, "value"), pair(key, out, "out"))

    @without_collections
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Give this worker's part to the next round of each key and return; `value` may be changed at once.

        Replicas and repeated keys are summed. When every worker has pushed, the optimizer is applied to the sum, or
        without one the sum replaces the value.

        Raises:
            KeyNotFoundError: a key was never initialised.
            ShapeMismatchError: a value does not fit its key. Nothing has been sent then.
        """
        self._refresh_optimizer()
        items = []
        for entry, replicas in self._lookup(pair(key, value, "value"), same_dtype=True):
            flat, is_own = self._merged(entry.spec, replicas)
            items.append(RoundItem(entry.table, {entry.spec.dtype: flat if is_own else flat.clone()}, None))
        self._start(items)

    @without_collections
    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the present values of keys to `out`, after this worker's own pushes; blocks."""
        wanted = self._lookup(self._outs(key, out), same_dtype=False)
        targets = [target_of(entry, outs) for entry, outs in wanted]
        arenas = [{entry.spec.dtype: target.flat} for (entry, _), target in zip(wanted, targets, strict=True)]
        self._client.rounds.pull(
            [(entry.table, arena) for (entry, _), arena in zip(wanted, arenas, strict=True)]
        )
        for target in targets:
            target.finish()

    @without_collections
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, wait for the round, and write the new values to `out`, or back to `value`; blocks.

        All workers must come to the same keys before their deadline; a worker that pushes only counts as well.
        """
        pushed = self._lookup(pair(key, value, "value"), same_dtype=True)
        pulled = self._lookup(pair(key, value if out is None else out, "out"), same_dtype=False)
        self._refresh_optimizer()
        outs: dict[Key, list[Tensor]] = {}
        for entry, tensors in pulled:
            outs.setdefault(entry.spec.key, []).extend(tensors)
        items, targets = [], []
        for entry, replicas in pushed:
            flat, _ = self._merged(entry.spec, replicas)
            target = target_of(entry, outs[entry.spec.key])
            targets.append(target)
            items.append(RoundItem(entry.table, {entry.spec.dtype: flat}, {entry.spec.dtype: target.flat}))
        self._client.rounds.wait(self._start(items))
        for target in targets:
            target.finish()

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

    def _compress_with(self, codec: Codec | None) -> None:
        self._codec = codec
        for entry in self._entries.values():
            entry.table.compressor = self._compressor(entry.table)

    def _merged(self, spec: TensorSpec, replicas: Sequence[Tensor]) -> tuple[Tensor, bool]:
        """The flat sum of what is pushed, and whether it is a tensor of its own rather than the caller's memory."""
        return merge(replicas)

    def _start(self, items: Sequence[RoundItem]) -> Ticket:
        return self._client.rounds.start(items)

    def _compressor(self, table: RemoteTable) -> Compressor | None:
        return None if self._codec is None else Compressor(self._codec, table.plan)

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

    def __enter__(self) -> TableKVStore:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._client.close(error)  # without waiting for rounds that may never end
        self.close()

    def _create(
        self, values: Sequence[tuple[Key, list[Tensor]]], outs: Sequence[tuple[Key, list[Tensor]]] | None
    ) -> None:
        specs: list[TensorSpec] = []
        for key, replicas in values:
            self._check_new(key, [spec.key for spec in specs])
            specs.append(spec_of(key, replicas[0]))
        for spec, (_, tensors) in zip(specs, outs or (), strict=False):
            for tensor in tensors:
                check_fits(spec, tensor, any_dtype=True)
        whole_keys = self._optimizer is not None and not self._optimizer.elementwise
        tables = self._client.register({spec.key: [spec] for spec in specs}, whole_keys)
        for table in tables:
            table.compressor = self._compressor(table)
        created: dict[Key, Entry] = {}
        items, targets = [], []
        for at, ((key, replicas), spec) in enumerate(zip(values, specs, strict=True)):
            entry = created[key] = Entry(spec, tables[at])
            flat, _ = merge(replicas[:1])
            target = target_of(entry, outs[at][1]) if outs is not None else None
            if target is not None:
                targets.append(target)
            mine = {spec.dtype: flat} if self.rank == 0 else None
            items.append(RoundItem(entry.table, mine, None if target is None else {spec.dtype: target.flat}))
        self._client.rounds.wait(self._client.rounds.start(items))
        self._entries.update(created)
        for target in targets:
            target.finish()

    def _check_new(self, key: Key, also: Sequence[str]) -> None:
        self._check_type(key)
        if key in self._entries or str(key) in also:
            raise ConfigurationError(
                f"key {key!r} is initialised already; call init or broadcast once per key"
            )

    def _check_type(self, key: Key) -> None:
        known = next(iter(self._entries), key)
        if type(known) is not type(check_key(key)):
            raise ConfigurationError(
                f"this store has {type(known).__name__} keys, so {key!r} cannot be one of them"
            )

    def _lookup(
        self, pairs: Sequence[tuple[Key, list[Tensor]]], same_dtype: bool
    ) -> list[tuple[Entry, list[Tensor]]]:
        """Find the entries of keys, values of a repeated key joined; everything is checked before anything is sent."""
        found: dict[Key, tuple[Entry, list[Tensor]]] = {}
        for key, tensors in pairs:
            self._check_type(key)
            entry = self._entries.get(key)
            if entry is None:
                raise KeyNotFoundError(f"key {key!r} has not been initialised; call init or broadcast first")
            for tensor in tensors:
                check_fits(entry.spec, tensor, any_dtype=not same_dtype)
            found.setdefault(key, (entry, []))[1].extend(tensors)
        return list(found.values())

    def _outs(self, key: Any, out: Any) -> list[tuple[Key, list[Tensor]]]:
        if out is None:
            raise ConfigurationError("pull needs out=…: the tensor, or list of tensors, to write to")
        return pair(key, out, "out")

    def _refresh_optimizer(self) -> None:
        if self._optimizer is None:
            return
        spec = self._optimizer.spec()
        if spec != self._sent_spec:
            self._client.set_optimizer(spec)
            self._sent_spec = spec
