"""The kvstore verbs over a client, the same for every store that keeps its tables in engines.

Each key is a table of its own, so workers may push keys in any order and any subset of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from torch import Tensor

from kvstore_server.errors import ConfigurationError, KeyNotFoundError
from kvstore_server.plan import TensorSpec
from kvtrainer.comm.tickets import Arenas, RoundItem, Ticket
from kvtrainer.errors import SparsePullWarning
from kvtrainer.kvstore.base import Key
from kvtrainer.kvstore.client_store import ClientStore
from kvtrainer.kvstore.entries import Entry, target_of
from kvtrainer.kvstore.quiet import without_collections
from kvtrainer.kvstore.row_values import dense_sum, densified, is_sparse, merge_rows
from kvtrainer.kvstore.row_verbs import pull, read_pulls, without_sparse
from kvtrainer.kvstore.values import check_fits, check_key, check_out, merge, pair, spec_of
from kvtrainer.one_thread import by_one_thread


class TableKVStore(ClientStore):
    """init, push, pull, pushpull and broadcast as MXNet defines them, with errors raised at once.

    Not thread-safe. `push` returns at once and its error is raised by the next call that concerns the key, by
    `barrier` or by `close`; everything else blocks. A `pull` sees this worker's own earlier pushes. Keys are all
    int or all str within one store.
    """

    _has_warned = False
    _other_dtypes: ClassVar[Collection[str]] = ()
    """What keys may be beside the dtypes that an optimizer updates."""

    @by_one_thread
    @without_collections
    def init(self, key: Any, value: Any) -> None:
        """Create keys with rank 0's values; blocks until every worker has called it.

        Raises:
            ConfigurationError: a key exists already, or is of another type than the keys before it.
            PlanMismatchError: workers give different shapes or dtypes.
        """
        self._create(pair(key, value, "value"), None)

    @by_one_thread
    @without_collections
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Create keys with rank 0's values and write those to `out` on every worker; blocks as `init` does."""
        self._create(pair(key, value, "value"), pair(key, out, "out"))

    @by_one_thread
    @without_collections
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Give this worker's part to the next round of each key and return; `value` may be changed at once.

        Replicas and repeated keys are summed. When every worker has pushed, the optimizer is applied to the sum, or
        without one the sum replaces the value. If all have pushed some rows of it, on servers the others stay; in
        process they become zero.

        Raises:
            KeyNotFoundError: a key was never initialised.
            ConfigurationError: rows are too long for a server to know them apart, and there is no optimizer.
            ShapeMismatchError: a value does not fit its key. Nothing has been sent then.
        """
        self._refresh_optimizer()
        items = []
        for entry, replicas in self._lookup(pair(key, value, "value"), same_dtype=True):
            items.append(self._item(entry, replicas, None))
        self._start(items, priority)

    @by_one_thread
    @without_collections
    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the present values of keys to `out`, after this worker's own pushes; blocks.

        A sparse `out` is left as it is, with a SparsePullWarning: `row_sparse_pull` is meant. Where `ignore_sparse` is
        false, a store of this process writes the rows that are not zero to it, and others raise ConfigurationError.
        """
        dense = without_sparse(self._outs(key, out), ignore_sparse, self._warn_of_sparse_out)
        wanted = self._lookup(dense, same_dtype=False)
        targets = [target_of(entry.spec, outs) for entry, outs in wanted]
        arenas = [{entry.spec.dtype: target.flat} for (entry, _), target in zip(wanted, targets, strict=True)]
        self._client.rounds.pull(
            [(entry.table, arena) for (entry, _), arena in zip(wanted, arenas, strict=True)]
        )
        for target in targets:
            target.finish()

    @by_one_thread
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
            target = target_of(entry.spec, outs[entry.spec.key])
            targets.append(target)
            items.append(self._item(entry, replicas, {entry.spec.dtype: target.flat}))
        self._client.rounds.wait(self._start(items, priority))
        for target in targets:
            target.finish()

    @by_one_thread
    def version(self, key: Key) -> int:
        """How many updates are in the values of a key that this worker read last: the most that any server had applied.

        -1 if it has read none. Waits for this worker's own push of the key.
        """
        entry = self._lookup_one(key)
        return max(entry.table.versions.values(), default=-1)

    @by_one_thread
    def staleness(self, key: Key) -> int:
        """How many updates others made between this worker's last read of a key and its last push of it.

        Always 0 with synchronous rounds. Of several servers the one with most counts. Waits for this worker's own
        push of the key.
        """
        return self._lookup_one(key).table.staleness

    def _lookup_one(self, key: Key) -> Entry:
        [(entry, _)] = self._lookup([(key, [])], same_dtype=True)
        self._client.rounds.settle(entry.table)
        return entry

    @by_one_thread
    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> Tensor | list[Any]:
        """Fetch some rows of keys, after this worker's own pushes; only these travel; blocks.

        Args:
            key: A key, or a list of keys.
            out: Tensors of the keys' shapes that get the rows too, and are zero elsewhere: one, or a list of them.
            row_ids: Whole numbers in any shape, also repeated or none. For several `out` one for all, or one each.

        Returns:
            For each set of ids a coalesced sparse tensor of the key's shape: one, a list for several sets, and a list
            of those for a list of keys.

        Raises:
            RowIdError: ids outside a key; nothing has been written then.
            ShapeMismatchError, KeyNotFoundError, ConfigurationError: as of the other verbs.
        """
        for one in key if isinstance(key, list | tuple) else (key,):
            self._check_type(one)
        pulls, are_several = read_pulls(self._entries, key, out, row_ids)
        found = iter(pull(self._client, [one for of_key in pulls for one in of_key]))
        results = [
            [next(found) for _ in of_key] if several else next(found)
            for of_key, several in zip(pulls, are_several, strict=True)
        ]
        return results if isinstance(key, list | tuple) else results[0]

    def _item(self, entry: Entry, replicas: Sequence[Tensor], out: Arenas | None) -> RoundItem:
        """What is pushed of a key: the caller's memory only if the caller waits for the new weights."""
        spec, table = entry.spec, entry.table
        sparse = [is_sparse(one) for one in replicas]
        if all(sparse):
            if self._goes_by_rows(entry):
                return RoundItem(table, {}, out, rows={0: merge_rows(spec, replicas)})
            return RoundItem(table, {spec.dtype: dense_sum(spec, replicas).view(-1)}, out)
        if any(sparse):
            replicas = [densified(spec, one) for one in replicas]
        flat, is_own = self._merged(spec, replicas)
        return RoundItem(table, {spec.dtype: flat if is_own or out is not None else flat.clone()}, out)

    def _goes_by_rows(self, entry: Entry) -> bool:
        """Whether only rows are pushed of a key of which only rows are given. Raises as `push`."""
        if entry.table.plan.takes_rows(0):
            return True
        if self._optimizer is None:
            raise ConfigurationError(
                f"the rows of key {entry.spec.key!r} are longer than the 1 MiB that a server tells apart, so without "
                "an optimizer a push of some would replace them all; push a dense value, or set an optimizer"
            )
        return False

    def _warn_of_sparse_out(self, key: Key) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"pull into a sparse tensor (of key {key!r}) has been ignored; use row_sparse_pull(…, row_ids=…)",
                SparsePullWarning,
                stacklevel=5,
            )

    def _merged(self, spec: TensorSpec, replicas: Sequence[Tensor]) -> tuple[Tensor, bool]:
        """The flat sum of what is pushed, and whether it is a tensor of its own rather than the caller's memory."""
        return merge(replicas)

    def _start(self, items: Sequence[RoundItem], priority: int) -> Ticket:
        if self._optimizer is None and not self._client.options.mode.is_sync:
            raise ConfigurationError(
                f"kvstore {self._type!r} applies every push by itself and needs an optimizer for that; call "
                "set_optimizer on every worker before the first push"
            )
        return self._client.rounds.start(items, priority=priority)

    def _create(
        self, values: Sequence[tuple[Key, list[Tensor]]], outs: Sequence[tuple[Key, list[Tensor]]] | None
    ) -> None:
        specs: list[TensorSpec] = []
        seen: set[str] = set()
        for key, replicas in values:
            self._check_new(key, seen)
            specs.append(spec_of(key, replicas[0], self._other_dtypes))
            seen.add(str(key))
        for spec, (_, tensors) in zip(specs, outs or (), strict=False):
            for tensor in tensors:
                check_out(spec, tensor)
        # Before a key is registered, because from then on the other workers wait for this one's value.
        rows = zip(specs, values, strict=True)
        flats = [merge([densified(spec, replicas[0])])[0] for spec, (_, replicas) in rows]
        targets = [target_of(spec, tensors) for spec, (_, tensors) in zip(specs, outs or (), strict=False)]
        whole_keys = self._optimizer is not None and not self._optimizer.elementwise
        tables = self._client.register({spec.key: [spec] for spec in specs}, whole_keys)
        items = []
        for at, (spec, table) in enumerate(zip(specs, tables, strict=True)):
            table.compressor = self._compressor(table)
            mine = {spec.dtype: flats[at]} if self._client.options.rank == 0 else None
            items.append(RoundItem(table, mine, {spec.dtype: targets[at].flat} if targets else None))
        self._client.rounds.initialise(items)
        made = zip(values, specs, tables, strict=True)
        self._entries.update({key: Entry(spec, table) for (key, _), spec, table in made})
        for target in targets:
            target.finish()

    def _check_new(self, key: Key, also: Collection[str]) -> None:
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
        check = check_fits if same_dtype else check_out
        for key, tensors in pairs:
            self._check_type(key)
            entry = self._entries.get(key)
            if entry is None:
                raise KeyNotFoundError(f"key {key!r} has not been initialised; call init or broadcast first")
            for tensor in tensors:
                check(entry.spec, tensor)
            found.setdefault(key, (entry, []))[1].extend(tensors)
        return list(found.values())

    def _outs(self, key: Any, out: Any) -> list[tuple[Key, list[Tensor]]]:
        if out is None:
            raise ConfigurationError("pull needs out=…: the tensor, or list of tensors, to write to")
        return pair(key, out, "out")
