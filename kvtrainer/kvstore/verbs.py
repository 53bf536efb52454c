"""The kvstore verbs (init, push, pull, pushpull, …) over a client of engines, in this process or on servers.

A store keeps a `ValueEntry` for each key: its spec and its table. Each key is a table of its own, so workers may push
keys in any order and push any subset of them. `push` and `pushpull` go through `_contribute`: find the keys, sum the
replicas of each value, sum over ranks if there is a process group, then start a round of the client. A pull writes
directly into `out` where its memory allows it.

Invariants: arguments are checked before anything is sent. With a process group, the ranks agree on a call before they
reduce anything, and a rank whose arguments are wrong reports that to the others instead of leaving them waiting.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from kvstore_server.codec import Codec, make_codec
from kvstore_server.commands import LONGEST, check_command_head
from kvstore_server.errors import (
    ConfigurationError,
    KeyNotFoundError,
    KVStoreError,
    OptimizerError,
    ServerUnreachableError,
)
from kvstore_server.optimizer import Optimizer, States, checked_optimizer_spec
from kvstore_server.plan import INTEGERS, Slice, TensorSpec
from kvstore_server.protocol.rows import RowSet
from kvtrainer.client.client import Client, LocalEngine
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.profiler import Profiler
from kvtrainer.client.replica_sums import (
    ReplicaCompressor,
    densify_replica,
    merge_replica_rows,
    merge_replicas,
    sum_dense_replicas,
    sum_replica_rows,
)
from kvtrainer.client.round import Round
from kvtrainer.client.tables import Compressor, RemoteTable
from kvtrainer.common.tensors import is_sparse_tensor
from kvtrainer.common.thread_guard import exclusive
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import SparsePullWarning, StateMismatchError
from kvtrainer.kvstore.agreement import Agreement, RankAgreement
from kvtrainer.kvstore.base import BUILT_IN, COMPRESSION, Key, KVStoreBase
from kvtrainer.kvstore.captured_call import CapturedCall
from kvtrainer.kvstore.values import (
    RowPull,
    ValueEntry,
    Values,
    as_sparse_value,
    check_on_cuda,
    check_out_value,
    check_value_key,
    check_value_keys,
    flat_view,
    read_row_pulls,
    read_values,
    shape_mismatch_error,
    spec_of_value,
    targets_of_values,
    write_row_values,
)
from kvtrainer.optimizer import create as create_optimizer
from kvtrainer.parallel.replicas import AUTO
from kvtrainer.ranks.process_group import RankGroup
from kvtrainer.states.format import (
    SavedParameter,
    SavedStates,
    export_states,
    import_states,
    read_state_file,
    saved_state_problems,
    write_state_file,
)

WORKERS, SERVERS = 4, 2
"""Bits that name groups of processes in the `node_id` of `num_dead_nodes`."""
# Key in a state file's extra values: whether loading also restores the optimizer's options and update count.
_NUMBERS = "numbers count"

Found = tuple[list[ValueEntry], Values]
"""Known keys, each once, and their checked tensors."""
_Store = TypeVar("_Store", bound="KVStoreVerbs")


@uncompiled
class KVStoreVerbs(KVStoreBase):
    """init, push, pull, pushpull and broadcast as in MXNet.

    Not thread-safe. `push` returns at once, and its error is raised by the next call that uses the key, by `barrier` or
    by `close`. Everything else blocks and raises at once. A `pull` sees this worker's own earlier pushes. The keys of a
    store are either all int or all str.

    Args:
        type: The name under which the store was created.
        client: Connects to the engines that hold the keys.
        engine: The engine behind the client if it runs in this process. A push is then complete when it returns.
        group: Ranks of torch.distributed over which values are summed first. Each rank holds all keys.
    """

    def __init__(
        self, type: str, client: Client, engine: LocalEngine | None = None, group: RankGroup | None = None
    ) -> None:
        self.group = group
        self._type = type
        self._connected = client
        self._engine = engine
        self._can_compress = COMPRESSION in self.capabilities_as(type)
        # True if values must be on CUDA devices.
        self._only_cuda = False
        # How replicas are summed: a name out of reducers.REDUCERS.
        self._reducer = AUTO
        # Compresses each replica before the sum, if the sum stays in this process.
        self._replicas: ReplicaCompressor | None = None
        # Compresses the sum of the replicas on its way to servers.
        self._codec: Codec | None = None
        self._entries: dict[Key, ValueEntry] = {}
        # (table, round) of each key of the push in progress. Kept if the push is interrupted, for the next one to
        # check.
        self._given: list[tuple[RemoteTable, int]] = []
        self._captured_call: CapturedCall | None = None
        """What the keys of the last call were, if it was a plain one to servers."""
        self._optimizer: Optimizer | None = None
        self._sent_spec: dict[str, Any] | None = None
        self._profiler: Profiler | None = None
        # The clients of the Trainers that use this store.
        self._for_trainers: list[weakref.ref[Client]] = []
        self._has_warned = False

    capabilities: ClassVar[Collection[str]] = BUILT_IN["dist_sync"]
    """The capabilities under names that are not built in."""

    @classmethod
    def capabilities_as(cls, type: str) -> Collection[str]:
        return BUILT_IN.get(type.lower(), cls.capabilities)

    @property
    def type(self) -> str:
        return self._type

    @property
    def rank(self) -> int:
        return self._connected.options.rank if self.group is None else self.group.rank

    @property
    def num_workers(self) -> int:
        options = self._connected.options
        return (options.initial_workers or options.num_workers) if self.group is None else self.group.size

    @property
    def num_servers(self) -> int:
        """Number of servers that hold the keys."""
        return self._client.num_servers

    @property
    def _client(self) -> Client:
        if self._engine is not None and self._engine.is_busy:
            raise OptimizerError(
                f"this {self._type!r} store was called by the updater or optimizer that one of its own rounds was "
                "running: re-entrance, which would wait for itself. Change `stored` in place, and use the store after "
                "the push"
            )
        return self._connected

    @exclusive
    def init(self, key: Any, value: Any) -> None:
        """Create keys with rank 0's values. Blocks until every worker has called it.

        Raises:
            ConfigurationError: A key exists already, or differs in type from earlier keys.
            PlanMismatchError: Workers give different shapes or dtypes.
        """
        self._create(*read_values(key, value, "value"), Values([], {}))

    @exclusive
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Create keys as `init` does, and write rank 0's values to `out` on every worker."""
        keys, values = read_values(key, value, "value")
        self._create(keys, values, read_values(key, out, "out")[1])

    @exclusive
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Contribute to the next round of each key, and return without waiting.

        `value` may be modified as soon as this returns. Replicas and repeated keys are summed. When every worker has
        pushed, the optimizer is applied to the sum; without an optimizer the sum replaces the value. If all workers
        push row-sparse values, the other rows keep their values on servers, and become zero in process.

        Raises:
            KeyNotFoundError: A key was never initialised.
            ConfigurationError: Rows are too long to be pushed separately, and there is no optimizer.
            ShapeMismatchError: A value does not fit its key. Nothing has been sent.
        """
        self._contribute("push", key, value, None, priority)

    @exclusive
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, wait for the round, and write the new values to `out`, or to `value` if `out` is None. Blocks.

        All workers must push the same keys before their deadlines, by `push` or `pushpull`.
        """
        self._contribute("pushpull", key, value, value if out is None else out, priority)

    @exclusive
    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the current values of keys to `out`, including this worker's own pushes. Blocks.

        A sparse `out` is left unchanged with a SparsePullWarning: use `row_sparse_pull`. With `ignore_sparse=False`, a
        store in this process writes the nonzero rows to it, and other stores raise ConfigurationError.
        """
        if out is None:
            raise ConfigurationError("pull needs out=…: the tensor, or list of tensors, to write to")
        keys, outs = read_values(key, out, "out")
        copies: list[tuple[Tensor, Tensor]] = []
        if any(
            [one.layout is not torch.strided for some in (outs.first, *outs.others.values()) for one in some]
        ):
            keys, outs, copies = self._without_sparse(keys, outs, ignore_sparse)
        entries, outs = self._find_entries(keys, outs, is_out=True)
        arenas, others = targets_of_values(entries, outs)
        self._client.rounds.pull([entry.table for entry in entries], arenas)
        for target, flat in others:
            target.copy_(flat.view(target.shape))
        for sparse, dense in copies:
            sparse.copy_(dense.to_sparse(1))

    @exclusive
    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> Tensor | list[Any]:
        """Fetch rows of keys, including this worker's own pushes. Only these rows are transferred. Blocks.

        Args:
            key: A key or a list of keys.
            out: Tensors of the keys' shapes that also receive the rows, with zeros elsewhere: one or a list.
            row_ids: Integers in any shape; they may repeat, and may be empty. For several `out`, either one set for all
                or one each.

        Returns:
            A coalesced sparse tensor of the key's shape for each set of ids; a list of them for several sets, and a
            list over the keys for a list of keys.

        Raises:
            RowIdError: An id is out of range. Nothing has been written.
            ShapeMismatchError, KeyNotFoundError, ConfigurationError: As in the other verbs.
        """
        is_list = isinstance(key, list | tuple)
        for one in key if is_list else (key,):
            self._check_type(one)
        pulls, are_several = read_row_pulls(self._entries, key, out, row_ids)
        found = iter(self._pull_rows([one for of_key in pulls for one in of_key]))
        results = [
            [next(found) for _ in of_key] if several else next(found)
            for of_key, several in zip(pulls, are_several, strict=True)
        ]
        return results if is_list else results[0]

    @exclusive
    def version(self, key: Key) -> int:
        """Return how many updates the values contain that this worker last read of a key, or -1 if it has read none.

        The highest count over servers. Waits for this worker's own push of the key.
        """
        return max(self._wait_for_table(key).versions.values(), default=-1)

    @exclusive
    def staleness(self, key: Key) -> int:
        """Return how many updates of other workers happened between this worker's last read and last push of a key.

        Always 0 in synchronous rounds. The highest count over servers. Waits for this worker's own push of the key.
        """
        return self._wait_for_table(key).staleness

    @exclusive
    def set_optimizer(self, optimizer: Any) -> None:
        """Apply an optimizer to every later round, where the keys live.

        Call it on every worker with the same optimizer: a result of `kvtrainer.optimizer.create`, a name, or a
        torch.optim class. Later changes of its options (`set_learning_rate`) are sent with the next push. Setting the
        same optimizer again keeps its state. Blocks; an optimizer that needs whole keys also waits until every worker
        has called this, because keys that are sharded over servers are moved to one server each.
        """
        self._check_fixed()
        self._optimizer = create_optimizer(optimizer)
        self._send_optimizer(self._optimizer)
        if not self._optimizer.elementwise:
            self._relayout_whole()
        if self._engine is not None:
            self._engine.set_updater(None)

    def set_updater(self, updater: Callable[[Key, Tensor, Tensor], object]) -> None:
        """Call `updater(key, merged, stored)` instead of an optimizer. It modifies `stored` in place.

        Only for keys in this process, because code is not sent to servers. An exception in the function is raised by
        the push as OptimizerError, and the values stay unchanged. The function must not call this store.

        Raises:
            ConfigurationError: `updater` is not callable, or the keys are on servers.
        """
        if not callable(updater):
            raise ConfigurationError(
                f"an updater must be a function of (key, merged, stored), got {updater!r:.80}"
            )
        if self._engine is None:
            raise ConfigurationError(
                f"kvstore {self.type!r} keeps its values on servers, and functions are not sent there. Write a "
                "subclass of kvtrainer.optimizer.Optimizer in a module, register it, start the servers with --import "
                "MODULE, and give set_optimizer its name; or set no optimizer, use pushpull for the sum over workers, "
                "and update with it in the workers"
            )
        keys: dict[str, Key] = {}

        def call(name: str, merged: Tensor, stored: Tensor) -> None:
            if name not in keys:
                keys.update({str(key): key for key in self._entries})
            updater(keys[name], merged, stored)

        self._engine.set_updater(call)

    # MXNet's name.
    _set_updater = set_updater

    @exclusive
    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Save the optimizer's state of every key to a file. Blocks.

        Any single worker may call this, between its pushes. With `dump_optimizer`, loading the file also restores the
        optimizer's options and update count.

        Raises:
            ConfigurationError: No optimizer is set.
            StateFileError: The file cannot be written. An existing file is unchanged.
        """
        optimizer, parameters = self._known_optimizer(), dict[str, SavedParameter]()
        for spec, table in [(entry.spec, entry.table) for entry in self._entries.values()]:
            state = export_states(table.plan, _VerbsStateHolder(self._client, table)).get(0, {})
            counted = {**state, "step": int(state["step"])} if state else {}
            parameters[spec.key] = SavedParameter(spec.shape, spec.dtype, 0, counted)
        options, extra = [dict(optimizer.plain_hyper())], {_NUMBERS: dump_optimizer}
        saved = SavedStates(optimizer.spec(), optimizer.num_update, options, parameters, extra)
        write_state_file(fname, saved)

    @exclusive
    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Load saved states. Every worker loads the same file, after `init` and `set_optimizer`.

        Collective: blocks until all workers have applied it. If it fails, nothing has changed on any worker.

        Raises:
            ConfigurationError: No optimizer is set.
            StateFileError, StateMismatchError: The file cannot be read or does not fit.
            RoundAbortedError: Another worker failed. The message has its rank and error.
        """
        with closing(self.open_agreement("load_optimizer_states()")) as agreement:
            with agreement.all_or_none(f"read {os.fspath(fname)!r}"):
                saved = self._fitting_states(fname)
            # A barrier on both sides: no worker may go on while another one is still replacing state on servers.
            with agreement.all_or_none(f"take over the states of {os.fspath(fname)!r}"):
                self._adopt_states(saved)

    def _fitting_states(self, fname: str | os.PathLike[str]) -> SavedStates:
        optimizer, specs = self._known_optimizer(), [entry.spec for entry in self._entries.values()]
        saved = read_state_file(fname)
        if problems := [*saved_state_problems(saved, specs, optimizer, "keys", "this kvstore")]:
            raise StateMismatchError(
                f"the saved states do not fit this kvstore, which is unchanged: {'; '.join(problems)}. Load the states "
                "of the same keys and the same optimizer"
            )
        return saved

    def _adopt_states(self, saved: SavedStates) -> None:
        optimizer = self._known_optimizer()
        for entry in self._entries.values():
            found, holder = (
                saved.parameters[entry.spec.key].state,
                _VerbsStateHolder(self._client, entry.table),
            )
            states = {0: dict(found)} if found else {}
            import_states(entry.table.plan, holder, states, optimizer, torch.device("cpu"))
        if saved.extra.get(_NUMBERS) and saved.groups:
            optimizer.hyper.update(saved.groups[0])

    @exclusive
    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what this worker pushes from now on.

        The error of each compression is kept as a residual and added to the key's next push. Initial values are never
        compressed. A round that fails leaves residuals unchanged. Waits for this worker's own pushes.

        Args:
            compression_params: {"type": "2bit", "threshold": 0.5}, or "1bit" with its threshold, {"type": "topk",
                "ratio": 0.01}, "ternary", "int8", "fp16", "bf16" or "none". Residuals of an earlier setting are
                dropped.

        Raises:
            ConfigurationError: This store does not compress, or the parameters are wrong.
        """
        if not self._can_compress:
            raise ConfigurationError(
                f"gradient compression is not supported for kvstore {self._type!r}, which sends nothing over a network"
            )
        codec = make_codec(compression_params)
        # A push in flight may have to be sent again, and must then be encoded as before.
        self._client.wait_pending()
        wanted = None if codec.name == "none" else codec
        if self._engine is not None:
            self._replicas = None if wanted is None else ReplicaCompressor(wanted)
            return
        self._codec = wanted
        for entry in self._entries.values():
            entry.table.compressor = self._compressor(entry.table)

    @exclusive
    def barrier(self) -> None:
        """Block until every worker has called this."""
        if self.group is None:
            self._client.barrier()
        else:
            self.group.agree("barrier", {})

    @exclusive
    def num_dead_nodes(self, node_id: int = WORKERS) -> int:
        """Return how many processes of the job the servers consider dead.

        A worker is dead if it ended without `close`, or was silent for the servers' --dead-after seconds. A server is
        dead if it does not answer, or was restarted and holds nothing of this job. Blocks up to `dead_after` seconds if
        a server is silent.

        Args:
            node_id: What to count, as in MXNet: WORKERS (4), SERVERS (2), or their sum.

        Raises:
            ServerUnreachableError: Workers are to be counted, but no server answered.
        """
        if type(node_id) is not int or node_id & ~(WORKERS | SERVERS) or not node_id:
            raise ConfigurationError(f"node_id is 4 (workers), 2 (servers) or their sum, got {node_id!r:.80}")
        answers = self._client.poll()
        there = [stats for stats in answers if stats is not None]
        if node_id & WORKERS and not there:
            raise ServerUnreachableError(
                f"none of the {len(answers)} servers answered; are they still running?"
            )
        workers = max((int(stats["num_dead"]) for stats in there), default=0) if node_id & WORKERS else 0
        return workers + (len(answers) - len(there) if node_id & SERVERS else 0)

    @exclusive
    def send_command_to_servers(self, head: int, body: str) -> list[str]:
        """Send a command to every server and return their answers in server order. Blocks.

        Commands are functions that servers load with --import and register under the number `head` with
        `kvstore_server.commands.register`. Each call runs the function once on every server. A store without servers
        uses the functions that are registered in this process.

        Raises:
            CommandError: A server has no such function, or it raised. The message has the server, head and body.
            ConfigurationError: `head` is not an int in 0 … 2**31 - 1, or `body` is not a text of up to 1 MiB.
            ServerUnreachableError: A server did not answer within `dead_after` seconds.
        """
        head = check_command_head(head)
        if not isinstance(body, str):
            raise ConfigurationError(f"the body of a command must be a str, got {type(body).__name__}")
        try:
            packed = body.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"the body of a command cannot be written as UTF-8: {error}") from None
        if len(packed) > LONGEST:
            raise ConfigurationError(
                f"the body of a command may have up to {LONGEST} bytes, got {len(packed)}"
            )
        return [answer.decode() for answer in self._client.command(head, packed)]

    @property
    def profiler(self) -> Profiler:
        """Profiler of this worker and the servers, for the store's own keys. A Trainer has its own."""
        if self._profiler is None:
            self._profiler = Profiler(self._client, time.monotonic)
        return self._profiler

    @exclusive
    def server_stats(self) -> list[dict[str, Any]]:
        """Fetch the servers' counters for this store, in server order, after this worker's pushes.

        "tables" lists the store's own keys first, then the parameters of the open Trainers that use this store, told
        apart by "namespace". See also `trainer.server_stats()`.
        """
        self._client.wait_pending()
        stats = self._client.stats()
        for of_trainer in [client.stats() for client in self._clients_of_trainers()]:
            for mine, theirs in zip(stats, of_trainer, strict=True):
                mine["tables"] = [*mine["tables"], *theirs["tables"]]
        return stats

    def open_client(self, by_host: bool = False, resumes: bool = False) -> Client:
        """Connect a client with its own namespace, for a Trainer. Blocks until the servers answer.

        Args:
            by_host: Sum over the workers of each host first; must be equal on all workers. Ignored without servers.
            resumes: Another process can take this rank over, so the others wait for it. Ignored without servers.
        """
        assert self._engine is not None
        return self._borrow(self._engine.open_client(f"trainer{len(self._for_trainers) + 1}"))

    def open_agreement(self, what: str = "this call") -> Agreement:
        """Open an exchange of bytes between all workers. Collective. The caller closes it. Messages name `what`."""
        return Agreement() if self.group is None else RankAgreement(self.group)

    def _clients_of_trainers(self) -> list[Client]:
        """Return the clients of open Trainers."""
        made = [client() for client in self._for_trainers]
        return [client for client in made if client is not None and not client.is_closed]

    def _borrow(self, client: Client) -> Client:
        self._for_trainers.append(weakref.ref(client))
        return client

    def close(self) -> None:
        """Wait for this worker's pushes and leave. Idempotent. Other workers' rounds that need this worker fail."""
        if not self._client.is_closed:
            try:
                self._client.wait_pending()
            finally:
                self._client.close()

    def __enter__(self: _Store) -> _Store:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            # After an error, do not wait for rounds that may never end.
            self._client.close(error)
        self.close()

    # ---------------------------------------------------------------- the way of a value

    def _find_entries(self, keys: Sequence[Key], values: Values, is_out: bool = False) -> Found:
        """Look up keys and check the tensors to be read or written. Tensors of a repeated key are joined."""
        entries: list[ValueEntry] = []
        more, key_type = values.others, type(next(iter(self._entries), None))
        for at, (key, first) in enumerate(zip(keys, values.first, strict=True)):
            entry = self._entries.get(key) if type(key) is key_type else None
            if entry is None:
                self._refuse(key, keys)
            for tensor in (first, *more[at]) if at in more else (first,):
                if tensor.shape != entry.spec.shape or not (is_out or tensor.dtype is entry.dtype):
                    raise shape_mismatch_error(entry.spec, tensor)
                if is_out and (tensor.layout is not torch.strided or not tensor.is_contiguous()):
                    check_out_value(entry.spec, tensor)
            if self._only_cuda:
                devices = [one.device for one in (first, *more.get(at, ()))]
                check_on_cuda(devices, f"the values of key {entry.spec.key!r}")
            entries.append(entry)
        if len(set(entries)) == len(entries):
            return entries, values
        joined: dict[ValueEntry, list[Tensor]] = {}
        for entry, tensors in zip(entries, values.lists(), strict=True):
            joined.setdefault(entry, []).extend(tensors)
        return list(joined), Values.of(joined.values())

    def _contribute(self, verb: str, key: Any, value: Any, out: Any, priority: int) -> None:
        """Contribute values to the next round of their keys. With `out`, wait and write the new values there.

        Raises:
            ProtocolError, PlanMismatchError: Ranks make different calls. Raised on every rank.
            RoundAbortedError: Another rank's arguments are wrong.
            ConfigurationError: The optimizer, or its absence, does not suit the keys. Nothing has been sent.
        """
        client, optimizer, by_rows = self._client, self._optimizer, []
        # 0. The same keys as in the last call, with plain tensors.
        call = self._captured_call
        if call is not None and call.has(key) and not self._given and self._replicas is None:
            values, outs = call.arenas(value), call.arenas(out)
            if values is not None and outs is not None:
                if optimizer is not None:
                    self._send_optimizer(optimizer)
                self._give(Contribution(call.tables, values, outs, priority=priority), client.rounds.run)
                self._given = []
                return
        # 1. Look up the keys and check all arguments, before anything is sent.
        try:
            entries, given = self._find_entries(*read_values(key, value, "value"))
            if self._given:
                self._tell_interrupted()
            arenas: list[dict[str, Tensor]] | None = None
            others: list[tuple[Tensor, Tensor]] = []
            if out is not None:
                arenas, others = targets_of_values(
                    *self._find_entries(*read_values(key, out, "out"), is_out=True)
                )
            for entry, replicas in zip(entries, given.lists(), strict=True) if self.group is not None else ():
                if all(map(is_sparse_tensor, replicas)) and self._goes_by_rows(entry):
                    by_rows.append(entry.spec.key)
        except Exception as error:
            if self.group is not None:
                self.group.report(verb, error)
            raise
        # 2. Sum over the ranks of the process group.
        if self.group is not None:
            given = self._sum_over_ranks(self.group, verb, entries, given, by_rows)
        # 3. Make sure that the engines can update these keys, and have the optimizer's current options.
        if optimizer is not None:
            integers = [entry.spec for entry in entries if entry.spec.dtype in INTEGERS]
            if integers and self._engine is not None and not self._engine.has_updater:
                raise ConfigurationError(
                    f"key {integers[0].key!r} is {integers[0].dtype}, which {optimizer.registered_name!r} cannot "
                    "update; keep integers in a store without an optimizer, or with an updater"
                )
            self._send_optimizer(optimizer)
        elif not client.options.mode.is_sync:
            raise ConfigurationError(
                f"kvstore {self._type!r} applies every push by itself and needs an optimizer for that; call "
                "set_optimizer on every worker before the first push"
            )
        # 4. Sum the replicas of each key: to flat memory, or to rows.
        merged: list[Mapping[str, Tensor]] = []
        rows: dict[tuple[int, int], RowSet] = {}
        for at, (entry, first) in enumerate(zip(entries, given.first, strict=True)):
            # Memory of the caller may be passed on only if this call waits until the round has ended.
            total = self._merge(entry, first, given.others.get(at, ()), is_borrowed=arenas is not None)
            if isinstance(total, RowSet):
                rows[at, 0] = total
                merged.append({})
            else:
                merged.append({entry.spec.dtype: total})
        # 5. Start the round, and wait if its result is needed here.
        contribution = Contribution(
            [entry.table for entry in entries], merged, arenas, rows=rows, priority=priority
        )
        is_waited = self._engine is not None or arenas is not None
        if is_waited and self._replicas is None:
            self._give(contribution, client.rounds.run)
            is_plain = self._engine is None and type(key) is list and len(key) == len(entries) and not rows
            self._captured_call = CapturedCall(key, entries) if is_plain else None
        elif is_waited:
            self._give(contribution, lambda one: self._wait(client.rounds.start(one), entries))
        else:
            self._give(contribution, client.rounds.start)
        for target, flat in others:
            target.copy_(flat.view(target.shape))
        self._given = []

    def _give(self, contribution: Contribution, run: Callable[[Contribution], object]) -> None:
        """Finish earlier pushes of the same keys, then run a round.

        If that is interrupted, `_given` says what was given; the caller resets it when all is done.
        """
        rounds, tables = self._client.rounds, contribution.tables
        for table in tables if rounds.open else ():
            rounds.wait_pending(table)
        numbers = rounds.tables.round[[table.index for table in tables]].tolist()
        self._given = list(zip(tables, numbers, strict=True))
        try:
            run(contribution)
        except Exception:
            # The error tells the loop that this push failed, so there is no interrupted push to report.
            self._given = []
            raise

    def _wait(self, round_: Round, entries: Sequence[ValueEntry]) -> None:
        """Wait for a round. Residuals of the keys that were applied are committed."""
        try:
            self._client.rounds.wait(round_)
        finally:
            if self._replicas is not None:
                applied = [entry for entry in entries if not round_.is_outcome_unknown(entry.table)]
                self._replicas.accept(entry.spec.key for entry in applied)

    def _tell_interrupted(self) -> None:
        """Raise KVStoreError, once, if an interrupted push was applied: a loop would push the same values again."""
        for table, _ in self._given:
            self._client.rounds.wait_pending(table)
        names = [table.name for table, number in self._given if table.stands(number)]
        self._given = []
        if names:
            raise KVStoreError(
                f"a push of {', '.join(map(repr, names[:3]))}{', …' if len(names) > 3 else ''} was interrupted after "
                "it was sent, so it counts: do not repeat it. This call has pushed nothing; continue with the next push"
            )

    def _sum_over_ranks(
        self,
        group: RankGroup,
        verb: str,
        entries: Sequence[ValueEntry],
        given: Values,
        by_rows: Sequence[str],
    ) -> Values:
        """Sum values over all ranks, row by row for keys that are row-sparse on every rank. Raises as `_contribute`."""
        said = {
            "keys": [entry.spec.key for entry in entries],
            "optimizer": None if self._optimizer is None else self._optimizer.spec(),
            "sparse": by_rows,
            "bucket_size_mb": group.buckets.size_mb,
        }
        rows_only = frozenset.intersection(*(frozenset(one["sparse"]) for one in group.agree(verb, said)))
        summed: list[Tensor] = []
        for entry, values in zip(entries, given.lists(), strict=True):
            spec = entry.spec
            # A key is summed by rows only if all ranks gave rows; otherwise all use the dense form.
            if spec.key in rows_only:
                mine = merge_replica_rows(spec, values)
                counts = [int(one) for one in group.all_gather(torch.tensor([len(mine.ids)], device="cpu"))]
                ids, total = sum_replica_rows(group.gather_rows(mine, counts), spec.dtype)
                summed.append(as_sparse_value(spec, ids, total.to(entry.dtype)))
            else:
                first, *others = [densify_replica(spec, one) for one in values]
                flat = self._merge(entry, first, others, is_borrowed=False)
                assert isinstance(flat, Tensor)
                group.sum(flat, [(0, flat.numel())])
                summed.append(flat.view(spec.shape))
        return Values(summed, {})

    def _merge(
        self, entry: ValueEntry, first: Tensor, others: Sequence[Tensor], is_borrowed: bool
    ) -> Tensor | RowSet:
        """Sum replicas to flat memory (the caller's own if `is_borrowed`) or to rows. Raises as `push`."""
        spec = entry.spec
        is_compressed = self._replicas is not None and spec.dtype not in INTEGERS
        flat = None if others or is_compressed else flat_view(first)
        if flat is not None:
            return flat if is_borrowed else flat.clone()
        replicas = [first, *others]
        sparse = [is_sparse_tensor(one) for one in replicas]
        if all(sparse):
            if self._goes_by_rows(entry):
                return merge_replica_rows(spec, replicas)
            return sum_dense_replicas(spec, replicas).view(-1)
        if any(sparse):
            replicas = [densify_replica(spec, one) for one in replicas]
        if self._replicas is not None and is_compressed:
            return self._replicas.merge(spec.key, replicas)
        return merge_replicas(replicas, self._reducer)

    def _goes_by_rows(self, entry: ValueEntry) -> bool:
        """Return whether row-sparse values of a key are pushed by rows. Raises as `push`."""
        if self._optimizer is None and self._engine is not None:
            # As in MXNet's stores in process: the other rows become zero.
            return False
        if entry.table.plan.takes_rows(0):
            return True
        if self._optimizer is None:
            raise ConfigurationError(
                f"the rows of key {entry.spec.key!r} are longer than 1 MiB, the most that a server updates by row, so "
                "without an optimizer a push of some rows would replace all; push a dense value, or set an optimizer"
            )
        return False

    def _without_sparse(
        self, keys: Sequence[Key], outs: Values, ignore_sparse: bool
    ) -> tuple[list[Key], Values, list[tuple[Tensor, Tensor]]]:
        """Return keys and tensors without sparse ones, and (sparse, dense) pairs to be copied after the pull."""
        left: list[Key] = []
        dense: list[list[Tensor]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for key, tensors in zip(keys, outs.lists(), strict=True):
            kept = []
            for one in tensors:
                if not is_sparse_tensor(one):
                    kept.append(one)
                elif not ignore_sparse:
                    if self._engine is None:
                        raise ConfigurationError(
                            f"out of key {key!r} is sparse, and pull writes dense tensors only; use row_sparse_pull(…, "
                            "row_ids=…)"
                        )
                    kept.append(torch.empty_like(one, layout=torch.strided))
                    copies.append((one, kept[-1]))
                elif not self._has_warned:
                    self._has_warned = True
                    warnings.warn(
                        f"pull into a sparse tensor (of key {key!r}) has been ignored; use row_sparse_pull(…, "
                        "row_ids=…)",
                        SparsePullWarning,
                        stacklevel=4,
                    )
            if kept:
                left.append(key)
                dense.append(kept)
        return left, Values.of(dense), copies

    def _pull_rows(self, pulls: Sequence[RowPull]) -> list[Tensor]:
        """Fetch all rows, write them to their `outs`, and return them as sparse tensors. Blocks."""
        by_rows = [p for p in pulls if p.entry.table.plan.takes_rows(0)]
        fetched = iter(self._client.rows.pull([(p.entry.table, 0, p.ids) for p in by_rows]))
        results = []
        for p in pulls:
            spec, table = p.entry.spec, p.entry.table
            if table.plan.takes_rows(0):
                found = next(fetched)
            else:
                # Rows longer than a slice cannot be requested alone: pull the whole key.
                arena = p.entry.new_arena()
                self._client.rounds.pull([table], [arena])
                found = arena[spec.dtype].view(spec.shape[0], -1)[p.ids]
            results.append(as_sparse_value(spec, p.ids, found))
        for p, rows in zip(pulls, results, strict=True):
            for out in p.outs:
                write_row_values(out, rows)
        return results

    def _create(self, keys: Sequence[Key], values: Values, outs: Values) -> None:
        """Register keys and set them to rank 0's values; `outs` may be empty. Raises as `init`."""
        self._check_fixed()
        specs: list[TensorSpec] = []
        seen: set[str] = set()
        integers = INTEGERS if self._engine is not None else ()
        # 1. Check keys, values and outs.
        try:
            check_value_keys(keys)
            for key, replicas in zip(keys, values.lists(), strict=True):
                self._check_new(key, seen)
                seen.add(str(key))
                if self._only_cuda and self.group is not None:
                    check_on_cuda([one.device for one in replicas], f"the values of key {key!r}")
                specs.append(spec_of_value(key, replicas[0], integers))
            for spec, tensors in zip(specs, outs.lists(), strict=False):
                for tensor in tensors:
                    check_out_value(spec, tensor)
        except Exception as error:
            if self.group is not None:
                self.group.report("init", error)
            raise
        # 2. Densify before registering: from the registration on, the other workers wait for this one's value.
        rows = zip(specs, values.first, strict=True)
        flats = [merge_replicas([densify_replica(spec, first)]) for spec, first in rows]
        # 3. Agree with the other ranks, and take rank 0's values.
        if self.group is not None:
            self.group.agree("init", {"specs": [[spec.key, list(spec.shape), spec.dtype] for spec in specs]})
            flats = [flat.clone() for flat in flats]
            for flat in flats:
                self.group.broadcast(flat)
        # 4. Register the keys and send the values.
        whole_keys = self._optimizer is not None and not self._optimizer.elementwise
        tables = self._client.register({spec.key: [spec] for spec in specs}, whole_keys)
        entries = [ValueEntry(spec, table) for spec, table in zip(specs, tables, strict=True)]
        arenas, others = targets_of_values(entries if outs.first else (), outs)
        for table in tables:
            table.compressor = self._compressor(table)
        mine = None
        if self._connected.options.rank == 0:
            mine = [{spec.dtype: flat} for spec, flat in zip(specs, flats, strict=True)]
        self._client.rounds.initialise(Contribution(tables, mine, arenas or None))
        self._entries.update(zip(keys, entries, strict=True))
        for target, flat in others:
            target.copy_(flat.view(target.shape))

    # ---------------------------------------------------------------- keys that are refused

    def _refuse(self, unknown: Key, keys: Sequence[Key]) -> NoReturn:
        self._check_fixed()
        check_value_keys(keys)
        self._check_type(unknown)
        raise KeyNotFoundError(f"key {unknown!r} has not been initialised; call init or broadcast first")

    def _check_new(self, key: Key, also: Collection[str]) -> None:
        self._check_type(key)
        if key in self._entries or str(key) in also:
            raise ConfigurationError(
                f"key {key!r} is initialised already; call init or broadcast once per key"
            )

    def _check_type(self, key: Key) -> None:
        known = next(iter(self._entries), key)
        if type(known) is not type(check_value_key(key)):
            raise ConfigurationError(
                f"this store has {type(known).__name__} keys, so {key!r} cannot be one of them"
            )

    # ---------------------------------------------------------------- optimizer and compression

    def _wait_for_table(self, key: Key) -> RemoteTable:
        if type(key) is not type(next(iter(self._entries), None)) or key not in self._entries:
            self._refuse(key, [key])
        table = self._entries[key].table
        self._client.rounds.wait_pending(table)
        return table

    def _known_optimizer(self) -> Optimizer:
        if self._optimizer is None:
            raise ConfigurationError(
                "this kvstore has no optimizer, hence no states; call set_optimizer first"
            )
        return self._optimizer

    def _send_optimizer(self, optimizer: Optimizer) -> None:
        """Send the optimizer's spec to the engines if it is new or its options changed."""
        spec = checked_optimizer_spec(optimizer)
        if spec != self._sent_spec:
            self._client.set_optimizer(spec)
            self._sent_spec = spec

    def _check_fixed(self) -> None:
        """Raise ConfigurationError if the number of workers may change: one that joins could not take keys over."""
        self._connected.check_fixed(
            "keys of init, push and pull are", "give the tensors to a Trainer, and call resume()"
        )

    def _relayout_whole(self) -> None:
        """Move keys that are sharded over servers to one server each. They keep their values and residuals."""
        spread = [entry for entry in self._entries.values() if len(entry.table.plan.servers) > 1]
        if not spread:
            return
        values = [entry.new_arena() for entry in spread]
        # All workers read the values before any of them registers the keys under new names.
        self._client.rounds.pull([entry.table for entry in spread], values)
        self._client.barrier()
        specs = {f"{entry.spec.key} (whole)": [entry.spec] for entry in spread}
        tables = self._client.register(specs, whole_keys=True)
        mine = values if self._connected.options.rank == 0 else None
        self._client.rounds.wait(self._client.rounds.start(Contribution(tables, mine, None)))
        for entry, table in zip(spread, tables, strict=True):
            table.compressor = self._compressor(table)
            if table.compressor is not None and entry.table.compressor is not None:
                table.compressor.set_residuals(entry.table.compressor.residuals())
            self._client.rounds.forget(entry.table)
            entry.table = table
        self._captured_call = None

    def _compressor(self, table: RemoteTable) -> Compressor | None:
        return None if self._codec is None else Compressor(self._codec, table.plan)


def agreement_of(store: KVStoreBase | None, what: str = "this call") -> Agreement:
    """Return the exchange over a store's workers, or one of this process alone for one worker or no store.

    Args:
        what: For which call it is, for messages.

    Raises:
        ConfigurationError: A third-party store has several workers. It can sum tensors, but not exchange bytes.
    """
    if store is None or store.num_workers == 1:
        return Agreement()
    if not isinstance(store, KVStoreVerbs):
        raise ConfigurationError(
            f"the {store.num_workers} workers of kvstore {store.type!r} can only exchange sums, because it is a "
            "third-party store. load_states(), a Strategy, and workers of other frameworks need 'dist_sync', or "
            "'device' over torch.distributed. A Trainer works without; restore the state of its optimizer with "
            "load_state_dict() on every worker"
        )
    return store.open_agreement(what)


class _VerbsStateHolder:
    """Reads and writes the optimizer state of one table."""

    def __init__(self, client: Client, table: RemoteTable) -> None:
        self._client, self._table = client, table

    def get_states(self, slices: Sequence[Slice], since: Sequence[int]) -> Iterator[States]:
        return self._client.get_states(self._table, slices, since)

    def put_state(self, slice_: Slice, state: States) -> None:
        self._client.put_state(self._table, slice_, state)
