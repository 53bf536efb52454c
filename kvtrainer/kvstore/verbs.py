"""The kvstore verbs over a client of engines, in this process or on servers.

Each key is a table of its own, so workers may push keys in any order and any subset of them.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from kvstore_server.codec import Codec, make_codec
from kvstore_server.commands import LONGEST, check_head
from kvstore_server.errors import (
    ConfigurationError,
    KeyNotFoundError,
    KVStoreError,
    OptimizerError,
    ServerUnreachableError,
)
from kvstore_server.optimizer import Optimizer, States, spec_for_store
from kvstore_server.plan import INTEGERS, Slice, TensorSpec
from kvstore_server.protocol.rows import RowSet
from kvtrainer.client.client import Client, LocalEngine
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.profiler import Profiler
from kvtrainer.client.replica_sums import (
    ReplicaCompressor,
    dense_sum,
    densified,
    merge,
    merge_rows,
    sum_rows,
)
from kvtrainer.client.server_request import Round
from kvtrainer.client.tables import Compressor, RemoteTable
from kvtrainer.common.tensors import is_sparse
from kvtrainer.common.thread_guard import exclusive
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import SparsePullWarning, StateMismatchError
from kvtrainer.kvstore.agreement import Agreement, OverRanks
from kvtrainer.kvstore.base import BUILT_IN, COMPRESSION, Key, KVStoreBase
from kvtrainer.kvstore.values import (
    Entry,
    RowPull,
    Values,
    as_sparse,
    check_key,
    check_keys,
    check_on_cuda,
    check_out,
    flat_view,
    mismatch,
    read_row_pulls,
    read_values,
    spec_of,
    targets_of,
    write_rows,
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
    saved_problems,
    write_state_file,
)

WORKERS, SERVERS = 4, 2
"""Groups of processes, as `num_dead_nodes` takes them."""
_NUMBERS = "numbers count"
"""Key of a state file's extra values: whether the optimizer's numbers are taken over as well."""

Found = tuple[list[Entry], Values]
"""Keys that are known, each once, with their tensors, which were checked."""
_Store = TypeVar("_Store", bound="TableKVStore")


@uncompiled
class TableKVStore(KVStoreBase):
    """init, push, pull, pushpull and broadcast as in MXNet. Errors are raised at once.

    Not thread-safe. `push` returns at once and its error is raised by the next call that concerns the key, by
    `barrier` or by `close`; everything else blocks. A `pull` sees this worker's own earlier pushes. Keys are all
    int or all str within one store.

    Args:
        type: The name under which it was created.
        client: Where its keys live.
        engine: The engine behind the client, if that is in this process. Then a push is over when it returns.
        group: The ranks of torch.distributed over which values are summed before; each of them keeps all keys.
    """

    def __init__(
        self, type: str, client: Client, engine: LocalEngine | None = None, group: RankGroup | None = None
    ) -> None:
        self.group = group
        self._type = type
        self._connected = client
        self._engine = engine
        self._can_compress = COMPRESSION in self.capabilities_as(type)
        self._only_cuda = False
        """Whether values have to be on CUDA devices."""
        self._reducer = AUTO
        """How replicas are summed, out of reducers.REDUCERS."""
        self._replicas: ReplicaCompressor | None = None
        """Compresses replicas before they are summed, where the sum stays in this process."""
        self._codec: Codec | None = None
        """How sums of replicas are compressed on their way to servers."""
        self._entries: dict[Key, Entry] = {}
        self._given: list[tuple[RemoteTable, int]] = []
        """Table and round of what a push gives, until it returns; an interrupt leaves them to the next one."""
        self._optimizer: Optimizer | None = None
        self._sent_spec: dict[str, Any] | None = None
        self._profiler: Profiler | None = None
        self._for_trainers: list[weakref.ref[Client]] = []
        """The clients that Trainers were given."""
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
        return self._connected.options.num_workers if self.group is None else self.group.size

    @property
    def num_servers(self) -> int:
        """The number of servers that hold the keys."""
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
        """Create keys with rank 0's values; blocks until every worker has called it.

        Raises:
            ConfigurationError: a key exists already, or is of another type than the keys before it.
            PlanMismatchError: workers give different shapes or dtypes.
        """
        self._create(*read_values(key, value, "value"), Values([], {}))

    @exclusive
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Create keys as `init` does and write rank 0's values to `out` on every worker."""
        keys, values = read_values(key, value, "value")
        self._create(keys, values, read_values(key, out, "out")[1])

    @exclusive
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Give this worker's part to the next round of each key and return.

        `value` may be changed at once. Replicas and repeated keys are summed. When every worker has pushed, the
        optimizer is applied to the sum, or without one the sum replaces the value. If all have pushed some rows of it,
        on servers the others stay; in process they become zero.

        Raises:
            KeyNotFoundError: a key was never initialised.
            ConfigurationError: rows are too long for a server to know them apart, and there is no optimizer.
            ShapeMismatchError: a value does not fit its key. Nothing has been sent then.
        """
        self._give("push", key, value, None, priority)

    @exclusive
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, wait for the round, and write the new values to `out`, or back to `value`; blocks.

        All workers must come to the same keys before their deadline; a worker that pushes only counts as well.
        """
        self._give("pushpull", key, value, value if out is None else out, priority)

    @exclusive
    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the present values of keys to `out`, after this worker's own pushes; blocks.

        A sparse `out` is left as it is, with a SparsePullWarning: `row_sparse_pull` is meant. Where `ignore_sparse` is
        false, a store of this process writes the rows that are not zero to it, and others raise ConfigurationError.
        """
        if out is None:
            raise ConfigurationError("pull needs out=…: the tensor, or list of tensors, to write to")
        keys, outs = read_values(key, out, "out")
        copies: list[tuple[Tensor, Tensor]] = []
        if any(
            [one.layout is not torch.strided for some in (outs.first, *outs.others.values()) for one in some]
        ):
            keys, outs, copies = self._without_sparse(keys, outs, ignore_sparse)
        entries, outs = self._find(keys, outs, is_out=True)
        arenas, others = targets_of(entries, outs)
        self._client.rounds.pull([entry.table for entry in entries], arenas)
        for target, flat in others:
            target.copy_(flat.view(target.shape))
        for sparse, dense in copies:
            sparse.copy_(dense.to_sparse(1))

    @exclusive
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
        """Count the updates in the values of a key that this worker read last.

        Of several servers the one with most counts; -1 if it has read none. Waits for this worker's own push of the
        key.
        """
        return max(self._settled(key).versions.values(), default=-1)

    @exclusive
    def staleness(self, key: Key) -> int:
        """Count others' updates between this worker's last read and last push of a key.

        Always 0 with synchronous rounds. Of several servers the one with most counts. Waits for this worker's own
        push of the key.
        """
        return self._settled(key).staleness

    @exclusive
    def set_optimizer(self, optimizer: Any) -> None:
        """Apply this optimizer to every round from now on, where the keys live.

        Call it on every worker (those that call it must name the same one), with what `kvtrainer.optimizer.create`
        returns, a name, or a torch.optim class. Later changes of its numbers (`set_learning_rate`) are sent
        with the next push. Naming the same optimizer again keeps its state. Blocks; with an optimizer that needs whole
        keys until every worker has called it, because keys that are spread over servers are brought together.
        """
        self._optimizer = create_optimizer(optimizer)
        self._send_optimizer(self._optimizer)
        if not self._optimizer.elementwise:
            self._relayout_whole()
        if self._engine is not None:
            self._engine.set_updater(None)

    def set_updater(self, updater: Callable[[Key, Tensor, Tensor], object]) -> None:
        """Call `updater(key, merged, stored)` in place of an optimizer; it changes `stored` in place.

        For keys of this process: code does not travel to servers. An error that the function raises is raised by the
        push (as OptimizerError) and leaves the values as they were. It must not call this store, which is busy with
        the push.

        Raises:
            ConfigurationError: `updater` is no function, or the keys are on servers.
        """
        if not callable(updater):
            raise ConfigurationError(
                f"an updater is a function of (key, merged, stored), got {updater!r:.80}"
            )
        if self._engine is None:
            raise ConfigurationError(
                f"kvstore {self.type!r} keeps its values on servers, and a function does not travel there. Write a "
                "subclass of kvtrainer.optimizer.Optimizer in a module, register it, start the servers with --import "
                "MODULE, and give set_optimizer its name; or set none, use pushpull for the sum over workers, and "
                "update with that in the workers"
            )
        keys: dict[str, Key] = {}

        def call(name: str, merged: Tensor, stored: Tensor) -> None:
            if name not in keys:
                keys.update({str(key): key for key in self._entries})
            updater(keys[name], merged, stored)

        self._engine.set_updater(call)

    _set_updater = set_updater
    """MXNet's name."""

    @exclusive
    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Save the optimizer's state of every key, wherever it is; blocks.

        Any one worker may do so, between its pushes. With `dump_optimizer` the optimizer's numbers count as well when
        the file is loaded.

        Raises:
            ConfigurationError: no optimizer is set.
            StateFileError: the file cannot be written; the former one is unchanged.
        """
        optimizer, parameters = self._known_optimizer(), dict[str, SavedParameter]()
        for spec, table in [(entry.spec, entry.table) for entry in self._entries.values()]:
            state = export_states(table.plan, _Holder(self._client, table)).get(0, {})
            counted = {**state, "step": int(state["step"])} if state else {}
            parameters[spec.key] = SavedParameter(spec.shape, spec.dtype, 0, counted)
        options, extra = [dict(optimizer.plain_hyper())], {_NUMBERS: dump_optimizer}
        saved = SavedStates(optimizer.spec(), optimizer.num_update, options, parameters, extra)
        write_state_file(fname, saved)

    @exclusive
    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Load saved states; on every worker the same file, after `init` and `set_optimizer`.

        Collective: blocks until all workers have taken it over, or none.

        Raises:
            ConfigurationError: no optimizer is set.
            StateFileError, StateMismatchError: the file cannot be read or does not fit.
            RoundAbortedError: another worker cannot read it, or it does not fit there; says which and why.
            In each case nothing has changed, on any worker.
        """
        with closing(self.open_agreement()) as agreement:
            with agreement.all_or_none(f"read {os.fspath(fname)!r}"):
                saved = self._fitting_states(fname)
            # No worker goes on while another one may still replace what is on servers.
            with agreement.all_or_none(f"take over the states of {os.fspath(fname)!r}"):
                self._adopt_states(saved)

    def _fitting_states(self, fname: str | os.PathLike[str]) -> SavedStates:
        """Read saved states. Raises StateFileError; StateMismatchError unless they fit the keys and the optimizer."""
        optimizer, specs = self._known_optimizer(), [entry.spec for entry in self._entries.values()]
        saved = read_state_file(fname)
        if problems := [*saved_problems(saved, specs, optimizer, "keys", "this kvstore")]:
            raise StateMismatchError(
                f"the saved states do not fit this kvstore, which is unchanged: {'; '.join(problems)}. Load the states "
                "of the same keys and the same optimizer"
            )
        return saved

    def _adopt_states(self, saved: SavedStates) -> None:
        optimizer = self._known_optimizer()
        for entry in self._entries.values():
            found, holder = saved.parameters[entry.spec.key].state, _Holder(self._client, entry.table)
            states = {0: dict(found)} if found else {}
            import_states(entry.table.plan, holder, states, optimizer, torch.device("cpu"))
        if saved.extra.get(_NUMBERS) and saved.groups:
            optimizer.hyper.update(saved.groups[0])

    @exclusive
    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what this worker pushes from now on.

        What is lost is added to its next push of the key. Waits for this worker's own pushes. Initial values are never
        compressed. A round that fails changes nothing of what is kept back.

        Args:
            compression_params: {"type": "2bit", "threshold": 0.5}, or "1bit" with its threshold, {"type": "topk",
                "ratio": 0.01}, "ternary", "int8", "fp16", "bf16" or "none". Residuals of an earlier compression are
                dropped.

        Raises:
            ConfigurationError: this store does not compress, or the parameters are wrong.
        """
        if not self._can_compress:
            raise ConfigurationError(
                f"gradient compression is not supported for kvstore {self._type!r}, which sends nothing anywhere"
            )
        codec = make_codec(compression_params)
        self._client.settle()  # a push under way may have to be sent again, as it was
        wanted = None if codec.name == "none" else codec
        if self._engine is not None:
            self._replicas = None if wanted is None else ReplicaCompressor(wanted)
            return
        self._codec = wanted
        for entry in self._entries.values():
            entry.table.compressor = self._compressor(entry.table)

    @exclusive
    def barrier(self) -> None:
        """Block until every worker has come here."""
        if self.group is None:
            self._client.barrier()
        else:
            self.group.agree("barrier", {})

    @exclusive
    def num_dead_nodes(self, node_id: int = WORKERS) -> int:
        """Count the dead processes of the job, as the servers know them.

        Blocks up to `dead_after` seconds if a server is silent.
        A worker is dead when it ended without `close`, or was silent for the servers' --dead-after; one that left as it
        should is not. A server is dead when it does not answer, or was started anew and holds none of this job.

        Args:
            node_id: Who counts, as in MXNet: WORKERS (4), SERVERS (2), or their sum.

        Raises:
            ServerUnreachableError: workers count, but no server answered.
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
        """Send a command to every server and return their answers, in server order; blocks.

        Commands are functions that the servers loaded by --import, registered under the number `head` with
        `kvstore_server.commands.register`. Each call runs the function once on every server. A store without servers
        answers by what this process has registered.

        Raises:
            CommandError: a server has no such function, or it raised; names server, head and body.
            ConfigurationError: `head` is no int of 0 … 2**31 - 1, or `body` no text of up to 1 MiB.
            ServerUnreachableError: a server did not answer within `dead_after` seconds.
        """
        head = check_head(head)
        if not isinstance(body, str):
            raise ConfigurationError(f"the body of a command must be a str, got {type(body).__name__}")
        try:
            packed = body.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"the body of a command cannot be written as UTF-8: {error}") from None
        if len(packed) > LONGEST:
            raise ConfigurationError(f"the body of a command may have {LONGEST} bytes, got {len(packed)}")
        return [answer.decode() for answer in self._client.command(head, packed)]

    @property
    def profiler(self) -> Profiler:
        """The profiler of this worker and the servers, for the store's own keys; a Trainer has its own."""
        if self._profiler is None:
            self._profiler = Profiler(self._client, time.monotonic)
        return self._profiler

    @exclusive
    def server_stats(self) -> list[dict[str, Any]]:
        """Fetch servers' counters for this store, in order, after this worker's pushes.

        In "tables" come the store's own keys first, and then the parameters of the Trainers that were given this store
        and are not closed; the "namespace" of each tells them apart. A Trainer has its own in `trainer.server_stats()`.
        """
        self._client.settle()
        stats = self._client.stats()
        trainers = [client for made in self._for_trainers if (client := made()) is not None]
        for of_trainer in [client.stats() for client in trainers if not client.is_closed]:
            for mine, theirs in zip(stats, of_trainer, strict=True):
                mine["tables"] = [*mine["tables"], *theirs["tables"]]
        return stats

    def open_client(self, by_host: bool = False) -> Client:
        """Connect a client with a namespace of its own, for a Trainer; blocks until the servers answer.

        Args:
            by_host: As of the mode, where there are servers; the same for all workers.
        """
        assert self._engine is not None
        return self._borrow(self._engine.open_client(f"trainer{len(self._for_trainers) + 1}"))

    def open_agreement(self) -> Agreement:
        """Return how all workers agree on something beside their rounds. Collective; close it when that is done."""
        return Agreement() if self.group is None else OverRanks(self.group)

    def _borrow(self, client: Client) -> Client:
        self._for_trainers.append(weakref.ref(client))
        return client

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

    # ---------------------------------------------------------------- the way of a value

    def _find(self, keys: Sequence[Key], values: Values, is_out: bool = False) -> Found:
        """Find known keys and check their tensors, which are read or written to; those of a repeated key are joined."""
        entries: list[Entry] = []
        more, key_type = values.others, type(next(iter(self._entries), None))
        for at, (key, first) in enumerate(zip(keys, values.first, strict=True)):
            entry = self._entries.get(key) if type(key) is key_type else None
            if entry is None:
                self._refuse(key, keys)
            for tensor in (first, *more[at]) if at in more else (first,):
                if tensor.shape != entry.spec.shape or not (is_out or tensor.dtype is entry.dtype):
                    raise mismatch(entry.spec, tensor)
                if is_out and (tensor.layout is not torch.strided or not tensor.is_contiguous()):
                    check_out(entry.spec, tensor)
            if self._only_cuda:
                devices = [one.device for one in (first, *more.get(at, ()))]
                check_on_cuda(devices, f"the values of key {entry.spec.key!r}")
            entries.append(entry)
        if len(set(entries)) == len(entries):
            return entries, values
        joined: dict[Entry, list[Tensor]] = {}
        for entry, tensors in zip(entries, values.lists(), strict=True):
            joined.setdefault(entry, []).extend(tensors)
        return list(joined), Values.of(joined.values())

    def _give(self, verb: str, key: Any, value: Any, out: Any, priority: int) -> None:
        """Give values to the next round of their keys; with `out`, wait and write the new values there.

        Raises:
            ProtocolError, PlanMismatchError: ranks differ in what they call; on every rank.
            RoundAbortedError: another rank's arguments are wrong.
            ConfigurationError: the optimizer, or its absence, does not go with the keys; nothing has been sent.
        """
        client, optimizer, by_rows = self._client, self._optimizer, []
        try:
            entries, given = self._find(*read_values(key, value, "value"))
            if self._given:
                self._tell_interrupted()
            arenas: list[dict[str, Tensor]] | None = None
            others: list[tuple[Tensor, Tensor]] = []
            if out is not None:
                arenas, others = targets_of(*self._find(*read_values(key, out, "out"), is_out=True))
            for entry, replicas in zip(entries, given.lists(), strict=True) if self.group is not None else ():
                if all(map(is_sparse, replicas)) and self._goes_by_rows(entry):
                    by_rows.append(entry.spec.key)
        except Exception as error:
            if self.group is not None:
                self.group.report(verb, error)
            raise
        if self.group is not None:
            given = self._sum_over_ranks(self.group, verb, entries, given, by_rows)
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
        values: list[Mapping[str, Tensor]] = []
        rows: dict[tuple[int, int], RowSet] = {}
        for at, (entry, first) in enumerate(zip(entries, given.first, strict=True)):
            # It may be the caller's memory only if the caller waits for the end.
            merged = self._merge(entry, first, given.others.get(at, ()), is_borrowed=arenas is not None)
            if isinstance(merged, RowSet):
                rows[at, 0] = merged
                values.append({})
            else:
                values.append({entry.spec.dtype: merged})
        tables = [entry.table for entry in entries]
        for table in tables if client.rounds.open else ():
            client.rounds.settle(table)
        number_of = client.rounds.tables.round.item
        self._given = [(table, number_of(table.index)) for table in tables]
        try:
            ticket = client.rounds.start(Contribution(tables, values, arenas, rows=rows, priority=priority))
            if self._engine is not None or arenas is not None:
                self._wait(ticket, entries)
        except Exception:
            self._given = []  # the loop is told
            raise
        for target, flat in others:
            target.copy_(flat.view(target.shape))
        self._given = []

    def _wait(self, ticket: Round, entries: Sequence[Entry]) -> None:
        """Wait for a round of keys; what was kept back of them moves if it was applied."""
        try:
            self._client.rounds.wait(ticket)
        finally:
            if self._replicas is not None:
                applied = [entry for entry in entries if not ticket.is_lost(entry.table)]
                self._replicas.accept(entry.spec.key for entry in applied)

    def _tell_interrupted(self) -> None:
        """Raise KVStoreError, once, if a push that was interrupted counts: a loop would give the same again."""
        for table, _ in self._given:
            self._client.rounds.settle(table)
        names = [table.name for table, number in self._given if table.stands(number)]
        self._given = []
        if names:
            raise KVStoreError(
                f"a push of {', '.join(map(repr, names[:3]))}{', …' if len(names) > 3 else ''} was interrupted when it "
                "had been given, so it counts: do not repeat it. This call has given nothing; push what comes next"
            )

    def _sum_over_ranks(
        self, group: RankGroup, verb: str, entries: Sequence[Entry], given: Values, by_rows: Sequence[str]
    ) -> Values:
        """Sum values over all ranks, by rows where every rank gives a key so. Raises as `_give`."""
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
            if spec.key in rows_only:
                mine = merge_rows(spec, values)
                counts = [int(one) for one in group.all_gather(torch.tensor([len(mine.ids)], device="cpu"))]
                ids, total = sum_rows(group.gather_rows(mine, counts), spec.dtype)
                summed.append(as_sparse(spec, ids, total.to(entry.dtype)))
            else:
                first, *others = [densified(spec, one) for one in values]
                flat = self._merge(entry, first, others, is_borrowed=False)
                assert isinstance(flat, Tensor)
                group.sum(flat, [(0, flat.numel())])
                summed.append(flat.view(spec.shape))
        return Values(summed, {})

    def _merge(
        self, entry: Entry, first: Tensor, others: Sequence[Tensor], is_borrowed: bool
    ) -> Tensor | RowSet:
        """Sum the replicas of a key: flat, or rows where it is pushed by rows. Raises as `push`.

        The sum may be the caller's own memory if that `is_borrowed`.
        """
        spec = entry.spec
        is_compressed = self._replicas is not None and spec.dtype not in INTEGERS
        flat = None if others or is_compressed else flat_view(first)
        if flat is not None:
            return flat if is_borrowed else flat.clone()
        replicas = [first, *others]
        sparse = [is_sparse(one) for one in replicas]
        if all(sparse):
            if self._goes_by_rows(entry):
                return merge_rows(spec, replicas)
            return dense_sum(spec, replicas).view(-1)
        if any(sparse):
            replicas = [densified(spec, one) for one in replicas]
        if self._replicas is not None and is_compressed:
            return self._replicas.merge(spec.key, replicas)
        return merge(replicas, self._reducer)

    def _goes_by_rows(self, entry: Entry) -> bool:
        """Tell whether a key of which only rows are given is pushed by rows. Raises as `push`."""
        if self._optimizer is None and self._engine is not None:
            return False  # MXNet's own stores in process put zeros in the place of the other rows
        if entry.table.plan.takes_rows(0):
            return True
        if self._optimizer is None:
            raise ConfigurationError(
                f"the rows of key {entry.spec.key!r} are longer than the 1 MiB that a server tells apart, so without "
                "an optimizer a push of some would replace them all; push a dense value, or set an optimizer"
            )
        return False

    def _without_sparse(
        self, keys: Sequence[Key], outs: Values, ignore_sparse: bool
    ) -> tuple[list[Key], Values, list[tuple[Tensor, Tensor]]]:
        """Take sparse tensors, and keys that have no others, out of what a pull writes to.

        Returns also those that get a copy afterwards, each with its dense source.

        Raises:
            ConfigurationError: there is one, and it is neither to be ignored nor can be written to.
        """
        left: list[Key] = []
        dense: list[list[Tensor]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for key, tensors in zip(keys, outs.lists(), strict=True):
            kept = []
            for one in tensors:
                if not is_sparse(one):
                    kept.append(one)
                elif not ignore_sparse:
                    if self._engine is None:
                        raise ConfigurationError(
                            f"out of key {key!r} is sparse, which pull does not write to; use row_sparse_pull(…, "
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
        """Fetch all rows, write them to their `outs`, and return them as sparse tensors; blocks."""
        by_rows = [p for p in pulls if p.entry.table.plan.takes_rows(0)]
        fetched = iter(self._client.rows.pull([(p.entry.table, 0, p.ids) for p in by_rows]))
        results = []
        for p in pulls:
            spec, table = p.entry.spec, p.entry.table
            if table.plan.takes_rows(0):
                found = next(fetched)
            else:  # they are too long for a slice, so that a server cannot tell them apart
                arena = p.entry.new_arena()
                self._client.rounds.pull([table], [arena])
                found = arena[spec.dtype].view(spec.shape[0], -1)[p.ids]
            results.append(as_sparse(spec, p.ids, found))
        for p, rows in zip(pulls, results, strict=True):
            for out in p.outs:
                write_rows(out, rows)
        return results

    def _create(self, keys: Sequence[Key], values: Values, outs: Values) -> None:
        """Register keys and give them rank 0's values; `outs` may be empty.

        Raises as `init`; nothing has been sent then.
        """
        specs: list[TensorSpec] = []
        seen: set[str] = set()
        integers = INTEGERS if self._engine is not None else ()
        try:
            check_keys(keys)
            for key, replicas in zip(keys, values.lists(), strict=True):
                self._check_new(key, seen)
                seen.add(str(key))
                if self._only_cuda and self.group is not None:
                    check_on_cuda([one.device for one in replicas], f"the values of key {key!r}")
                specs.append(spec_of(key, replicas[0], integers))
            for spec, tensors in zip(specs, outs.lists(), strict=False):
                for tensor in tensors:
                    check_out(spec, tensor)
        except Exception as error:
            if self.group is not None:
                self.group.report("init", error)
            raise
        # Before a key is registered, because from then on the other workers wait for this one's value.
        rows = zip(specs, values.first, strict=True)
        flats = [merge([densified(spec, first)]) for spec, first in rows]
        if self.group is not None:
            self.group.agree("init", {"specs": [[spec.key, list(spec.shape), spec.dtype] for spec in specs]})
            flats = [flat.clone() for flat in flats]
            for flat in flats:
                self.group.broadcast(flat)
        whole_keys = self._optimizer is not None and not self._optimizer.elementwise
        tables = self._client.register({spec.key: [spec] for spec in specs}, whole_keys)
        entries = [Entry(spec, table) for spec, table in zip(specs, tables, strict=True)]
        arenas, others = targets_of(entries if outs.first else (), outs)
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
        """Say why one of a call's keys is not known."""
        check_keys(keys)
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
        if type(known) is not type(check_key(key)):
            raise ConfigurationError(
                f"this store has {type(known).__name__} keys, so {key!r} cannot be one of them"
            )

    # ---------------------------------------------------------------- optimizer and compression

    def _settled(self, key: Key) -> RemoteTable:
        """Return the table of a key, after this worker's own push of it."""
        if type(key) is not type(next(iter(self._entries), None)) or key not in self._entries:
            self._refuse(key, [key])
        table = self._entries[key].table
        self._client.rounds.settle(table)
        return table

    def _known_optimizer(self) -> Optimizer:
        if self._optimizer is None:
            raise ConfigurationError(
                "this kvstore has no optimizer, hence no states; call set_optimizer first"
            )
        return self._optimizer

    def _send_optimizer(self, optimizer: Optimizer) -> None:
        """Tell engines of the optimizer, if it is new to them or has other numbers."""
        spec = spec_for_store(optimizer)
        if spec != self._sent_spec:
            self._client.set_optimizer(spec)
            self._sent_spec = spec

    def _relayout_whole(self) -> None:
        """Lay out keys that are spread over servers anew, as whole ones. They keep their present values."""
        spread = [entry for entry in self._entries.values() if len(entry.table.plan.servers) > 1]
        if not spread:
            return
        values = [entry.new_arena() for entry in spread]
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
            self._client.rounds.leave(entry.table)
            entry.table = table

    def _compressor(self, table: RemoteTable) -> Compressor | None:
        return None if self._codec is None else Compressor(self._codec, table.plan)


def agreement_of(store: KVStoreBase | None) -> Agreement:
    """Return how the workers of a store agree; for one worker, or no store, this process alone.

    Raises:
        ConfigurationError: a third-party store has several workers: it adds up tensors, and carries no bytes.
    """
    if store is None or store.num_workers == 1:
        return Agreement()
    if not isinstance(store, TableKVStore):
        raise ConfigurationError(
            f"the {store.num_workers} workers of kvstore {store.type!r} cannot agree on anything but sums, because it "
            "is a third-party store. load_states(), a Strategy, and workers of other frameworks need 'dist_sync', or "
            "'device' over torch.distributed; a Trainer steps without, and takes over the state of its optimizer by "
            "load_state_dict() on every worker"
        )
    return store.open_agreement()


class _Holder:
    """The optimizer's state of one table, where it lies."""

    def __init__(self, client: Client, table: RemoteTable) -> None:
        self._client, self._table = client, table

    def get_state(self, piece: Slice) -> States:
        return self._client.get_state(self._table, piece)

    def put_state(self, piece: Slice, state: States) -> None:
        self._client.put_state(self._table, piece, state)
