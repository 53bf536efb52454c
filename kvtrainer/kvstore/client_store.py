"""A store over a client, without the verbs for its keys' values: members, optimizer, compression, the end."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

from kvstore_server.codec import Codec, make_codec
from kvstore_server.commands import LONGEST, check_head
from kvstore_server.errors import ConfigurationError, ServerUnreachableError
from kvstore_server.optimizer import Optimizer, spec_for_store
from kvtrainer.comm.client import Client
from kvtrainer.comm.compressor import Compressor
from kvtrainer.comm.tickets import RemoteTable, RoundItem
from kvtrainer.kvstore import store_states
from kvtrainer.kvstore.base import Key, KVStoreBase
from kvtrainer.kvstore.entries import Entry
from kvtrainer.one_thread import by_one_thread
from kvtrainer.optimizer import create as create_optimizer
from kvtrainer.profiler import Profiler

_Store = TypeVar("_Store", bound="ClientStore")

WORKERS, SERVERS = 4, 2
"""Groups of processes, as `num_dead_nodes` takes them."""


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
        self._profiler: Profiler | None = None
        self._for_trainers: list[weakref.ref[Client]] = []
        """The clients that Trainers were given."""

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

    @by_one_thread
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

    @by_one_thread
    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Save the optimizer's state of every key, wherever it is; any one worker may, between its pushes; blocks.

        With `dump_optimizer` the optimizer's numbers count as well when the file is loaded.

        Raises:
            ConfigurationError: no optimizer is set.
            StateFileError: the file cannot be written; the former one is unchanged.
        """
        tables = [entry.table for entry in self._entries.values()]
        store_states.save(fname, self._client, tables, self._known_optimizer(), dump_optimizer)

    @by_one_thread
    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Go on from saved state; call it on every worker, with the same file, after `init` and `set_optimizer`.

        Raises:
            ConfigurationError: no optimizer is set.
            StateFileError, StateMismatchError: the file cannot be read or does not fit; nothing has changed.
        """
        optimizer = self._known_optimizer()
        tables = [entry.table for entry in self._entries.values()]
        optimizer.hyper.update(store_states.load(fname, self._client, tables, optimizer))

    @by_one_thread
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

    @by_one_thread
    def barrier(self) -> None:
        """Block until every worker has come here."""
        self._client.barrier()

    @by_one_thread
    def num_dead_nodes(self, node_id: int = WORKERS) -> int:
        """How many processes of the job are dead; asks the servers, up to `dead_after` seconds if one is silent.

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

    @by_one_thread
    def send_command_to_servers(self, head: int, body: str) -> list[str]:
        """Have every server answer a command, and return the answers in server order; blocks until all have.

        Commands are functions that the servers loaded by --import, registered under the number `head` with
        `kvstore_server.commands.register`. Each call runs the function once on every server. A store without servers
        answers by what this process has registered.

        Raises:
            CommandError: a server has no such function, or it raised; names server, head and body.
            ConfigurationError: `head` is no int of 0 … 2**31 - 1, or `body` no text of up to 1 MiB.
            ServerUnreachableError: a server did not answer within `dead_after` seconds.
        """
        check_head(head)
        return [answer.decode() for answer in self._client.command(head, _encoded(body))]

    @property
    def profiler(self) -> Profiler:
        """Profiles what this worker and the servers do for this store's own keys; a Trainer has its own."""
        if self._profiler is None:
            self._profiler = Profiler(self._client, time.monotonic)
        return self._profiler

    @by_one_thread
    def server_stats(self) -> list[dict[str, Any]]:
        """Each server's counters for this store, in server order; waits for this worker's own pushes.

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
        spec = spec_for_store(self._optimizer)
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


def _encoded(body: object) -> bytes:
    """The body of a command as it travels. Raises ConfigurationError if it cannot."""
    if not isinstance(body, str):
        raise ConfigurationError(f"the body of a command must be a str, got {type(body).__name__}")
    try:
        packed = body.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"the body of a command cannot be written as UTF-8: {error}") from None
    if len(packed) > LONGEST:
        raise ConfigurationError(f"the body of a command may have {LONGEST} bytes, got {len(packed)}")
    return packed
