"""One namespace: members, tables, optimizer and barrier of one Trainer or kvstore object.

Namespaces share a server without seeing each other: each has its own keys, rounds, optimizer and memory account.

A namespace connects the parts that know nothing of each other. `Membership` knows the processes, `NamespaceRounds`
which contributions count, `Shard` holds the numbers of all tables, and a `Table` says what a round does to its part of
them. The namespace checks what arrives against the plan before it is stored, builds the contributions that the shard
sums, and builds replies with weights.

Invariants:

- Slots number the slices of all tables on this server consecutively; messages name slices by slot.
- Whatever depends only on the names and sizes in a message is computed once and cached (`TableBatch`,
  `SliceLocations`), because every step of a job sends the same names.
- Memory is claimed from the server's budget before it is allocated, and all of it is given back at the end.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from kvstore_server.budget import Budget
from kvstore_server.codec import Codec, make_codec, torch_dtype
from kvstore_server.debug_log import debug_log
from kvstore_server.durable.journal import Journal
from kvstore_server.durable.spill_folder import SpillFolder
from kvstore_server.engine.agreed_options import AgreedOptimizer
from kvstore_server.engine.changes import ImageChanges
from kvstore_server.engine.facts import waits_of, workers_of
from kvstore_server.engine.membership import ERROR_LENGTH, ERRORS_KEPT, Membership
from kvstore_server.engine.memory import KEY, MEMBER, NAMESPACE, size_of_copy, size_of_deltas, size_of_table
from kvstore_server.engine.partial_slice import NO_BYTES, SlicePart
from kvstore_server.engine.rounds import (
    BufferRange,
    CommitInfo,
    DelayedRequest,
    DelayedRequests,
    Intent,
    Ints,
    Mode,
    NamespaceRounds,
    RoundTracker,
    Waiter,
)
from kvstore_server.engine.table import ALL, RankCommit, RowPart, Table
from kvstore_server.engine.views import Views
from kvstore_server.errors import (
    ConfigurationError,
    KVStoreError,
    PlanMismatchError,
    ProtocolError,
    ShapeMismatchError,
    WorkerLostError,
    describe,
)
from kvstore_server.log_limit import SLOW_AFTER, SlowReports
from kvstore_server.memo import BoundedCache
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import (
    SIZES,
    Plan,
    TensorSpec,
    check_name,
    check_same,
    check_specs,
    make_plan,
    tensor_spec_from,
)
from kvstore_server.processes import DEAD_AFTER
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE, unpack_control
from kvstore_server.protocol.rows import PACKED_ROWS, read_payload
from kvstore_server.shard.reduction import NO_KEYS, RankContribution, Run, part_of
from kvstore_server.shard.shard import Leases, Shard
from kvstore_server.shard.storage import Hypers
from kvstore_server.tracing import Recording

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    Args:
        server: Index of this server, from 0.
        num_servers: The number of servers of the job.
        run_id: A non-zero number that identifies this server process.
        dead_after: Seconds of silence after which a worker counts as lost.
        rejoin_timeout: Seconds that the others wait for a process that takes over the rank of a lost worker, if the
            lost one said that another can continue.
        slow_after: Seconds that a rank waits for others before the wait is logged.
        capability: Instruction set of this CPU. Workers with another one are refused, because their results differ in
            bits.
        allow_mixed_cpu: Accept such workers.
        max_table_bytes: Largest accepted table, summed over all servers.
        max_memory: Bytes that all namespaces and the memory shared with workers may occupy; 0: unlimited.
        max_namespaces: The most namespaces at a time.
        forget_after: Seconds of silence of all its workers after which a namespace is freed although it has weights.
        max_message_keys: The most keys, slices or tables in one message.
        allow_integers: Whether keys may be integers, which no optimizer can update.
        spread_from: A Trainer's table of at least this many bytes is spread over all servers; a smaller one is on a
            single server, because waking several servers on one host takes longer than summing so little.
        restart_timeout: Seconds that workers wait for a restart of this server, whose state outlives its process; 0: it
            does not.
    """

    server: int = 0
    num_servers: int = 1
    run_id: int = 1
    dead_after: float = DEAD_AFTER
    rejoin_timeout: float = 60.0
    slow_after: float = SLOW_AFTER
    capability: str = ""
    allow_mixed_cpu: bool = False
    max_table_bytes: int = 1 << 40
    max_memory: int = 0
    max_namespaces: int = 1024
    forget_after: float = 86400.0
    max_message_keys: int = KEYS_PER_MESSAGE
    allow_integers: bool = False
    spread_from: int = 0
    restart_timeout: float = 0.0


class SliceLocations(NamedTuple):
    """Where the slices of a contribution are in its payloads."""

    table_numbers: Ints
    """For each slice, the number of its table."""
    payload_indices: Ints
    """For each slice, the index of its payload."""
    offsets: Ints
    """For each slice, its offset in that payload, in bytes."""
    misfits: list[int]
    """The positions of slices whose size or dtype is not that of their slot."""
    received: list[tuple[int, int]]
    """(table number, bytes received for that table)."""


class BatchUpdate(NamedTuple):
    """How some tables are updated together."""

    optimizer: Optimizer | None
    hypers: Sequence[Hypers]
    """The options of each table, as the shard takes them."""
    packed: Sequence[bytes]
    """The same, as they were sent."""


class TableBatch(NamedTuple):
    """Cached lookups for a batch of tables that are requested together.

    A *part* is a slice that workers keep a copy of, so that its new weights are sent to them.
    """

    numbers: Ints
    """The number of each table."""
    number_list: list[int]
    """The same as Python's integers."""
    tables: list[Table]
    is_ascending: bool
    """Whether the numbers are ascending."""
    all_slots: Ints
    """The slots of all slices, ascending, also of those that are not parts."""
    parts: m.Matrix
    """The rows of a `Weights` message, one for each part, with the versions left out."""
    part_slots: list[int]
    """For each part, its slot."""
    part_tables: Ints
    """For each part, the index of its table in `tables`."""
    part_locations: Ints
    """For each part, the location at which peers map it while it has not moved; -1 if it cannot be mapped."""
    first_mapped: Ints
    """The first part that can be mapped of each table that has one."""
    table_nbytes: list[int]
    """For each table, the bytes of its parts."""


class Lineage(NamedTuple):
    """From what a job has continued on a server since its processes have started.

    Args:
        generation: How often it has gone back to a snapshot.
        round: To which one the last time; 0 if it has not.
        loaded: The tags that its present state descends from.
        tag, save: What was loaded the last time, if that was by hand.
    """

    generation: int = 0
    round: int = 0
    loaded: tuple[str, ...] = ()
    tag: str = ""
    save: str = ""


class Namespace:
    """The members, tables, optimizer and barrier of one name."""

    def __init__(
        self,
        name: str,
        num_workers: int,
        mode: Mode,
        config: EngineConfig,
        budget: Budget,
        leases: Leases | None,
        now: float,
        resumable: set[int] | None = None,
        durable: tuple[Journal, str, Callable[[], object]] | None = None,
        views: Views | None = None,
        spill: SpillFolder | None = None,
    ) -> None:
        """
        Args:
            durable: The journal, a prefix for its memory, and what is called with every change; see `durability`.
            views: The members, if these may change; None: all workers, always.
            spill: Where rows of hash tables are; None: in memory.
        """
        # 1. Who takes part, and which rounds are open.
        self.name = name
        self.created_at = now
        self.mode = mode
        self.config = config
        self.membership = Membership(name, num_workers, not mode.is_sync, config.rejoin_timeout, resumable)
        self.views = views
        self.rounds = NamespaceRounds(num_workers, mode, views)
        self.waits = DelayedRequests(self.rounds)
        self.optimizer = AgreedOptimizer(mode.is_sync)
        self.recording = Recording()
        self.log = debug_log("kvstore_server.debug")
        """The debug logger for rounds; None unless that logger shows debug lines."""
        self.slow_reports = SlowReports(config.slow_after)
        self.next_check = 0.0
        """When the waits are checked next."""
        self.failures: deque[tuple[int, str]] = deque(maxlen=ERRORS_KEPT)
        """(rounds ended by then, error text) of the latest failed rounds."""
        self.messages_in = 0
        """Messages received from members, without heartbeats."""
        # 2. The tables, and the slots of their slices.
        self.tables: list[Table] = []
        """By table number."""
        self.absent: dict[tuple[int, int], frozenset[int]] = {}
        """(table, rank) → the keys that the rank leaves out of the open round."""
        self.client_states: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        """(table, rank) → (round, `client_state`) of the rank's latest two commits with one, in order."""
        self.lineage = Lineage()
        """From what its job has continued on this server."""
        self._dtypes: list[torch.dtype] = []
        """The dtype of each slot."""
        self.num_option_changes = 0
        """How often the optimizer, or what a rank has sent of its options, has changed."""
        self._is_resident: list[bool] = []
        """For each slot, whether workers hold a copy of it."""
        self._batches = BoundedCache[TableBatch](self.rounds.slots)
        self._locations = BoundedCache[SliceLocations](self.rounds.slots)
        journal, prefix, mark = durable or (None, "", None)
        self.changes = None if mark is None else ImageChanges(mark, BoundedCache(self.rounds.slots))
        """What the next image contains; None: the state ends with the process."""
        self.shard = Shard(leases, journal, prefix, spill)
        space = weakref.proxy(self)  # no cycle: the memory of a namespace is free when it ends
        self.shard.claim = lambda nbytes, what: space.claim(nbytes, what)
        """The numbers of all tables."""
        self._numbers: dict[str, int] = {}
        """Name of a table → its number."""
        self._registered_by: dict[str, int] = {}
        """Name of a table → the rank that declared it first."""
        self._declaring: dict[int, tuple[str, list[TensorSpec]]] = {}
        """Rank → the table that it is declaring, and the keys received so far."""
        # 3. The memory account.
        self.budget = budget
        self.claimed = 0
        """Bytes claimed from the budget."""
        self._claimed_for_tables = 0
        """Bytes of that for the tables and their optimizer state."""

    def __repr__(self) -> str:
        shared = self.rounds.shared
        waiting = [
            f"{self.open_round(at)} waits for ranks {shared.missing_ranks(at)}" for at in shared.oldest()
        ]
        waiting += [f"{len(self.waits.all)} requests wait"] if self.waits.all else []
        sizes = f"{self.membership.num_workers} workers, {len(self.tables)} tables"
        return f"<{type(self).__name__} {self.name!r}, {self.mode}, {sizes}: {', '.join(waiting) or 'nothing waits'}>"

    def log_rounds(
        self,
        state: str,
        tracker: RoundTracker,
        tables: Sequence[Table],
        rank: int | None = None,
        error: KVStoreError | None = None,
        back: int = 0,
    ) -> None:
        """Log a transition of the open round of some tables, or of a rank's part in it, if debug logging is on.

        Args:
            tracker: Where the round is open.
            error: Why the round failed.
            back: How many rounds before the open one it is.
        """
        if self.log is None or not tables:
            return
        numbers, is_shared = [table.number for table in tables], tracker is self.rounds.shared
        missing = (
            tracker.missing_ranks(numbers[0]) if is_shared and state in ("pipelined", "committed") else []
        )
        self.log.round(
            state,
            self.name,
            numbers,
            [tracker.number(number) - back for number in numbers],
            [table.name for table in tables],
            rank if is_shared or len(tracker.inputs) != 1 else next(iter(tracker.inputs)),
            [f"worker:{one}" for one in missing],
            error,
        )

    def note_tables(self, numbers: Iterable[int]) -> None:
        """Let the next image have the present state of these tables; without effect unless the state is durable."""
        if self.changes is not None:
            self.changes.note_tables(numbers)

    def note_begun(self) -> None:
        """Like `note_tables`, for the tables for which a rank's lane has begun."""
        if self.rounds.begun:
            self.note_tables(self.rounds.begun)
            self.rounds.begun.clear()

    def note_members(self) -> None:
        """Like `note_tables`, for members and the barrier."""
        if self.changes is not None:
            self.changes.note_members()

    def registered_by(self, table: Table) -> int:
        return self._registered_by[table.name]

    def restore_extra_reads(self, table: Table, more: int) -> None:
        """Claim the memory of the copies of weights that ranks had read when the state was stored."""
        self.claim(
            max(more - table.extra_reads, 0) * _weights_nbytes(table),
            f"what workers of table {table.name!r} have",
        )
        table.extra_reads = more

    def claim_restored(self) -> None:
        """Claim the memory of what was restored and is not claimed with its table."""
        self.claim(
            sum(map(_nbytes_of_client_states, self.client_states.values())),
            "what the successors of ranks get",
        )

    def _table_nbytes(self, plan: Plan, optimizer: Optimizer | None) -> int:
        needed = size_of_table(plan, self.config.server, self.membership.num_workers, self.mode, optimizer)
        # The journal's shadow is as large as what it protects.
        return needed + (0 if self.changes is None else size_of_copy(plan, self.config.server, optimizer))

    def register(self, rank: int, register: m.Register) -> Table | int:
        """Return the table of that name, created if this rank is the first to declare it.

        While some of its keys have not been received yet: returns how many have.

        Raises:
            PlanMismatchError: Another rank declared different keys under this name. The table is then in conflict.
            ConfigurationError: The table is too large.
        """
        # 1. The common case: the same table is declared again.
        number = self._numbers.get(register.table)
        if number is not None and register.digest == self.tables[number].plan.digest:
            self.forget_declaration(rank)
            self._check_same_delta_codec(self.tables[number], register, rank)
            return self.tables[number]
        # 2. Collect the keys, which may come in several messages.
        specs = self._declared(rank, register)
        if isinstance(specs, int):
            return specs
        # 3. Another rank has declared this name with another digest: find the difference and report it.
        if number is not None:
            table = self.tables[number]
            first = self._registered_by[register.table]
            try:
                # Name the first key that differs; the digests only say that something does.
                check_same(table.plan.specs, specs, f"rank {first}", f"rank {rank}")
                _check_same_placement(table.plan, register, first, rank)
            except PlanMismatchError as error:
                table.conflict = error
                raise
            self._check_same_delta_codec(table, register, rank)
            return table
        # 4. A new table: check it, claim its memory, then create it. Nothing is changed before the claim succeeds.
        if self.views is not None and self.tables:
            raise ConfigurationError(
                f"namespace {self.name!r} has table {self.tables[0].name!r}, and members that may change, which change "
                "at the rounds of one table; give other tables another namespace"
            )
        check_name("a table", register.table)
        check_specs(specs, self.config.num_servers, self.config.allow_integers)
        self._check_size(register.table, specs)
        plan = make_plan(
            specs,
            self.config.num_servers,
            register.whole_keys,
            self.config.allow_integers,
            register.one_server,
        )
        workers = self.membership.num_workers
        codec = _codec_of(register.delta_encoding) if register.delta_encoding else None
        needed = self._table_nbytes(plan, self.optimizer.named)
        for_deltas = 0 if codec is None else size_of_deltas(plan, self.config.server)
        self.claim(needed + for_deltas, f"table {register.table!r}")
        number = len(self.tables)
        table = Table(number, register.table, plan, self.config.server, workers, self.shard, self.mode, codec)
        self._track_reads_if_needed([table])
        # Other servers may have to go on without a rank that has committed a round here. With a journal, the former
        # values are kept anyway, unless only some rows change.
        is_shared = self.views is not None and len(plan.servers) > 1
        self.shard.keeps_undos |= is_shared and self.changes is not None and not plan.has_row_sparse
        self.tables.append(table)
        # 5. Number its slices, and open its first round.
        slots, storage = range(table.unit.first, table.unit.end), self.shard.storage
        sizes = [slice_.length * SIZES[slice_.dtype] for slice_ in table.unit.slices]
        self.rounds.add(sizes, [slot > 0 and storage.is_next(slot - 1, slot) for slot in slots])
        self._dtypes += [torch_dtype(slice_.dtype) for slice_ in table.unit.slices]
        self._is_resident += [plan.is_resident(slice_) for slice_ in table.unit.slices]
        self._claimed_for_tables += needed
        self._numbers[register.table] = number
        self._registered_by[register.table] = rank
        self.note_tables([number])
        self.count_members()
        return table

    def count_members(self) -> None:
        """Let tables know how many ranks take part in the open round, if that may change."""
        if self.views is not None:
            for table in self.tables:
                table.num_workers = len(self.views.current.ranks)

    @property
    def are_weights_stable(self) -> bool:
        """Whether weights that a rank was sent cannot change before it contributes again."""
        return self.mode.is_sync and (self.views is None or not self.views.backup_workers)

    @property
    def is_coordinator(self) -> bool:
        """Whether this server decides about the members, if they may change: the first one that has the table."""
        return self.views is not None and any(
            table.plan.servers[0] == self.config.server for table in self.tables
        )

    def have_members_finished(self, lost: Collection[int] = ()) -> bool:
        """Return whether all members, except for lost ones, have left because they were done, and there are any.

        If members may change, these are the present ones.
        """
        members = range(self.membership.num_workers) if self.views is None else self.views.current.ranks
        others = set(members).difference(lost)
        return bool(others) and self.membership.finished.issuperset(others)

    def _check_same_delta_codec(self, table: Table, register: m.Register, rank: int) -> None:
        own = None if table.deltas is None else table.deltas.codec
        theirs = _codec_of(register.delta_encoding) if register.delta_encoding else None
        if own != theirs:
            names = [None if codec is None else codec.spec() for codec in (own, theirs)]
            table.conflict = PlanMismatchError(
                f"workers want the new weights of {table.name!r} in different forms: rank "
                f"{self._registered_by[table.name]} gives {names[0]} as 'pull' in compression_params, rank {rank} "
                f"{names[1]}; give all workers the same"
            )
            raise table.conflict

    def _declared(self, rank: int, register: m.Register) -> list[TensorSpec] | int:
        """Return all keys of a table that a rank declares in several messages, or how many arrived so far."""
        name, specs = self.forget_declaration(rank)
        if name != register.table:
            specs = []
        if register.first < 0:
            raise ProtocolError(f"a declaration begins with key {register.first}")
        # A repeated message rewrites what it brought before; one beyond a gap is ignored.
        if register.first <= len(specs):
            total = max(register.total, len(register.specs))
            self.budget.check(KEY * total, f"declaring {total} keys of table {register.table!r}", self.name)
            specs[register.first :] = list(map(tensor_spec_from, register.specs))
        if register.first <= len(specs) and len(specs) >= register.total:
            return specs
        self.claim(KEY * len(specs), f"declaring {len(specs)} keys of table {register.table!r}")
        self._declaring[rank] = (register.table, specs)
        return len(specs)

    def forget_declaration(self, rank: int) -> tuple[str, list[TensorSpec]]:
        """Remove a rank's declaration of an incomplete table, and give its memory back."""
        name, specs = self._declaring.pop(rank, ("", []))
        self._release(KEY * len(specs))
        return name, specs

    def _check_size(self, table: str, specs: Sequence[TensorSpec]) -> None:
        """Check before the plan is made, whose size grows with what a peer claims."""
        size = sum(spec.nbytes for spec in specs)
        if size > self.config.max_table_bytes:
            raise ConfigurationError(
                f"table {table!r} has {size} bytes, server {self.config.server} accepts tables of up to "
                f"{self.config.max_table_bytes} bytes (--max-table-bytes)"
            )
        what = f"table {table!r}, of {size} bytes on all servers,"
        self.budget.check(size // self.config.num_servers, what, self.name)

    def claim(self, nbytes: int, what: str) -> None:
        """Claim memory until the namespace ends. Raises ConfigurationError if there is not enough."""
        self.budget.claim(nbytes, what, self.name)
        self.claimed += nbytes

    def _release(self, nbytes: int) -> None:
        self.budget.release(nbytes)
        self.claimed -= nbytes

    def _resize_claim(self, former: int, needed: int, what: str) -> None:
        """Claim what is needed beyond the `former` bytes, or release the rest. Raises like `claim`."""
        if needed >= former:
            self.claim(needed - former, what)
        else:
            self._release(former - needed)

    @property
    def has_values(self) -> bool:
        """Whether weights would be lost if the namespace ended."""
        return any(table.is_initialised for table in self.tables)

    @property
    def least_memory(self) -> int:
        return NAMESPACE + MEMBER * self.membership.num_workers

    def begin(self) -> None:
        self.claim(self.least_memory, f"namespace {self.name!r}")

    def end(self) -> None:
        self.budget.release(self.claimed)
        self.claimed = 0

    def table(self, number: int) -> Table:
        """Return the table with that number. Raises ProtocolError if it does not exist."""
        if not 0 <= number < len(self.tables):
            raise ProtocolError(f"namespace {self.name!r} has no table {number}; register it first")
        return self.tables[number]

    def batch_of(self, numbers: Ints) -> TableBatch:
        """Return the cached lookups for the tables with these numbers.

        Raises ProtocolError if one does not exist or is repeated, or if there are too many.
        """
        return self._batches.get(numbers.tobytes(), self._make_batch, numbers)

    def _make_batch(self, numbers: Ints) -> TableBatch:
        number_list = numbers.tolist()
        self.check_named("request", number_list)
        tables = [self.table(number) for number in number_list]
        # 1. The parts: slices that workers keep a copy of.
        all_slots = self.rounds.slots.of(numbers)
        slots = all_slots[[self._is_resident[slot] for slot in all_slots.tolist()]]
        nbytes, zeros = self.rounds.slots.nbytes[slots], np.zeros(len(slots), np.int64)
        # 2. The table of each part, as an index in this batch.
        index_of_table = np.zeros(len(self.tables), np.int64)
        index_of_table[numbers] = np.arange(len(numbers))
        part_tables = index_of_table[self.rounds.slots.table[slots]]
        # 3. Where peers can map them.
        locations = np.array([self.shard.storage.locations[slot] for slot in slots.tolist()], np.int64)
        [mapped] = (locations >= 0).nonzero()
        return TableBatch(
            numbers=numbers.copy(),
            number_list=number_list,
            tables=tables,
            is_ascending=number_list == sorted(number_list),
            all_slots=np.sort(all_slots),
            parts=np.stack((slots, zeros, zeros + m.WHOLE, nbytes), axis=1),
            part_slots=slots.tolist(),
            part_tables=part_tables,
            part_locations=locations,
            first_mapped=mapped[np.unique(part_tables[mapped], return_index=True)[1]],
            table_nbytes=np.bincount(part_tables, nbytes, len(numbers)).astype(np.int64).tolist(),
        )

    def check_named(self, message: str, named: Collection[Hashable]) -> None:
        """Raise ProtocolError if a message names too many things, or one twice, which would then be answered twice."""
        if len(named) > self.config.max_message_keys:
            raise ProtocolError(
                f"a {message} names {len(named)} keys, slices or tables, server {self.config.server} accepts up to "
                f"{self.config.max_message_keys} in one message (--max-message-keys)"
            )
        if len(set(named)) < len(named):
            raise ProtocolError(f"a {message} names one of its {len(named)} tables or slices twice")

    def keep_client_state(
        self, rank: int, tables: Sequence[Table], tracker: RoundTracker, state: bytes
    ) -> None:
        """Store what the successor of a rank gets. Raises ConfigurationError if there is no memory for it.

        Two are kept: the last commit may be lost with this process, or reach no other server.
        """
        for table in tables:
            round_, key = tracker.number(table.number), (table.number, rank)
            former = self.client_states.get(key, [])
            found = [*[one for one in former if one[0] < round_][-1:], (round_, state)]
            what = f"what the successor of rank {rank} gets"
            self._resize_claim(_nbytes_of_client_states(former), _nbytes_of_client_states(found), what)
            self.client_states[key] = found
            if self.changes is not None:
                self.changes.note_client(table.number, rank)

    def begin_process(self, rank: int, resumes: bool) -> None:
        """Drop what a rank had not committed, because a new process takes it over."""
        self.rounds.begin_process(rank, resumes)
        self._drop_uncommitted(rank)

    def end_process(self, rank: int, is_done: bool) -> None:
        """Drop what a rank had not committed, because its process has ended."""
        self.rounds.end_process(rank, is_done, rank in self.membership.resumable)
        self._drop_uncommitted(rank)

    def _drop_uncommitted(self, rank: int) -> None:
        self.waits.take(lambda wait: wait.rank == rank)
        self.forget_declaration(rank)
        for table in self.tables if not self.mode.is_sync else ():
            table.hyper.forget(rank)
        self.num_option_changes += 1
        if self.changes is not None and not self.mode.is_sync:  # its lane and its clocks are gone, too
            self.changes.note_hypers(range(len(self.tables)))
            self.changes.note_tables(range(len(self.tables)))

    def forget_member(self, rank: int) -> None:
        """Forget what a rank that is no member any more has left for its successor, and what it said of options."""
        # With backup workers those that come late may need what it has left, if it was the fastest.
        is_kept = self.views is not None and self.views.backup_workers
        for key in [key for key in self.client_states if key[1] == rank and not is_kept]:
            self.claim(-_nbytes_of_client_states(self.client_states.pop(key)), "")
            if self.changes is not None:
                self.changes.note_client(*key)
        for table in self.tables:
            table.hyper.forget(rank)
        self.num_option_changes += 1
        if self.changes is not None:
            self.changes.note_hypers(range(len(self.tables)))

    def open_round(self, number: int) -> str:
        return f"round {self.rounds.shared.number(number)} of {self.tables[number].name!r}"

    def describe_wait(self, wait: DelayedRequest) -> str:
        if wait.is_entry:
            when = "at the end of" if self.rounds.shared.members else "in"
            return f"the entry of rank {wait.rank} {when} {self.open_round(wait.table)}"
        return f"{'the end' if wait.is_join else 'a read'} of {self.tables[wait.table].name!r} by rank {wait.rank}"

    def undo_last_round(
        self, tracker: RoundTracker, table: Table, whose: int, error: KVStoreError, rank: int | None = None
    ) -> bool:
        """Turn the last round of a rank, or of ALL, into a failed one, if it was applied and can be undone.

        Args:
            rank: Who asked for that.
        """
        number = tracker.number(table.number)
        # What a rank that has joined with the next round got are the weights after this one.
        # With backup workers it compares how the round has ended on all servers before it begins.
        views = self.views
        has_begun = views is not None and not views.backup_workers and number in views.since.values()
        if has_begun or not tracker.was_applied(table.number, number - 1) or not table.undo(whose):
            return False
        tracker.undo(table.number, error)
        self.note_tables([table.number])
        self.log_rounds("undone", tracker, [table], rank, error, back=1)
        return True

    def forget_absent(self, tables: Collection[int]) -> None:
        self.absent = {where: keys for where, keys in self.absent.items() if where[0] not in tables}

    # ---------------------------------------------------------------- slices

    def push(self, rank: int, body: m.Contribute) -> None:
        """Store the slices of a rank after checking that they fit.

        Raises:
            ProtocolError: A slice does not exist, or its round is not open yet; nothing was stored.
            ShapeMismatchError: A slice has another size or dtype.
        """
        if len(body.pushes) == 1 and body.pushes[0, m.PUSH_SLOT] >> m.PART > 0:
            self._push_part(rank, body)
            return
        # 1. Find each slice in the payloads. The lookup is cached by the slots, sizes and dtypes of the message.
        slots, sizes = body.pushes[:, m.PUSH_SLOT], body.pushes[:, m.PUSH_NBYTES]
        types, sources = list[tuple[int, torch.dtype]](), list[Any]()
        for payload in body.payloads:
            types.append((payload.nbytes, payload.dtype))
            sources.append(payload if payload.dtype is torch.uint8 else payload.view(torch.uint8))
        payload_types = tuple(types)
        key = body.pushes[:, ::3].tobytes(), payload_types
        located = (
            self._slice_locations(slots, sizes, payload_types)  # sizes of rows hardly ever repeat
            if body.encoding == PACKED_ROWS
            else self._locations.get(key, self._slice_locations, slots, sizes, payload_types)
        )
        table_numbers, which, starts, misfits, received = located
        # 2. Encoded payloads become one source for each slice; plain ones are read where they are.
        if body.encoding:
            codec = None if body.encoding == PACKED_ROWS else _codec_of(body.encoding)
            layouts = self.shard.storage.slots
            rows = zip(slots.tolist(), which.tolist(), starts.tolist(), sizes.tolist(), strict=True)
            sources = [
                read_payload(
                    layouts[slot].unit.plan, layouts[slot].slice, sources[at][start : start + size], codec
                )
                for slot, at, start, size in rows
            ]
            which, starts = np.arange(len(slots)), np.zeros(len(slots), np.int64)
        elif misfits:
            first = misfits[0]
            self._refuse_slice(int(slots[first]), int(sizes[first]), payload_types[which[first]][1])
        for number, nbytes in received:
            self.tables[number].bytes_in += nbytes
        # 3. Store them in the trackers of their rounds.
        for tracker, mine in self.rounds.trackers(rank, table_numbers, body.pushes[:, m.PUSH_ROUND]):
            pushes = body.pushes
            if mine is None:
                tracker.push(rank, pushes, sources, which, starts)
            else:
                pushes = pushes[mine]
                tracker.push(rank, pushes, sources, which[mine], starts[mine])
            # A slice of the next round makes the last one final: it can no longer be undone.
            if self.shard.undos:
                of = self.rounds.slots.table[pushes[:, m.PUSH_SLOT]]
                for number in set(of[pushes[:, m.PUSH_ROUND] == tracker.numbers[of]].tolist()):
                    self.tables[number].begin_round(ALL if tracker is self.rounds.shared else rank)

    def _push_part(self, rank: int, body: m.Contribute) -> None:
        word, round_, generation, nbytes = body.pushes[0].tolist()
        slot, end = m.unpack_slot(word)
        if slot >= len(self.rounds.slots):
            raise ProtocolError(f"slice {slot} of namespace {self.name!r} is not on this server")
        part = self._part(slot, end, body)
        if not self.mode.is_sync or part is None or part.data.numel() != nbytes:
            raise ProtocolError(
                f"{nbytes} bytes up to element {end} of slice {slot} of namespace {self.name!r} are not a valid part "
                "of it; only slices of synchronous rounds may come in parts, and row-sparse ones may not"
            )
        table = self.tables[int(self.rounds.slots.table[slot])]
        table.bytes_in += nbytes
        self.rounds.shared.push_part(rank, (slot, round_, generation), part)
        if self.shard.undos and round_ == self.rounds.shared.number(table.number):
            table.begin_round(ALL)

    def _part(self, slot: int, end: int, body: m.Contribute) -> SlicePart | None:
        """Return the only payload of a message as the part of a slot up to element `end`; None if it does not fit."""
        (table, position), codec = self.slice_of(slot), None
        slice_ = table.unit.slices[position]
        numel, itemsize = slice_.length, SIZES[slice_.dtype]
        if body.encoding:
            codec = None if body.encoding == PACKED_ROWS else _codec_of(body.encoding)
            numel, itemsize = slice_.used, 0 if codec is None else codec.itemsize(slice_.dtype) or 0
        data = body.payloads[0].view(torch.uint8) if len(body.payloads) == 1 else NO_BYTES
        nbytes = data.numel()
        begin = end * itemsize - nbytes
        if not itemsize or end > numel or begin < 0 or not nbytes or nbytes % itemsize:
            return None
        return SlicePart(data, begin, end, numel * itemsize, codec)

    def _slice_locations(
        self, slots: Ints, sizes: Ints, payload_types: Sequence[tuple[int, torch.dtype]]
    ) -> SliceLocations:
        """Find the slices in payloads of these sizes and dtypes; uint8 stands for any. Raises ProtocolError."""
        if (
            len(slots) == len(payload_types) == 1
            and sizes[0] == payload_types[0][0]
            and 0 <= slots[0] < len(self._dtypes)
        ):
            # Fast path for rows of one table: a single slice that fills a single payload.
            [slot], [nbytes], zeros = slots.tolist(), sizes.tolist(), np.zeros(1, np.int64)
            tables, is_of_dtype = (
                self.rounds.slots.table[slots],
                payload_types[0][1] in (torch.uint8, self._dtypes[slot]),
            )
            fits = is_of_dtype and nbytes == self.rounds.slots.nbytes[slot]
            return SliceLocations(tables, zeros, zeros, [] if fits else [0], [(int(tables[0]), nbytes)])
        # 1. Check the names; then find the payload of each slice by its offset in all of them.
        self.check_named("contribution", slots.tolist())
        unknown = slots[(slots < 0) | (slots >= len(self.rounds.slots.table))]
        if len(unknown):
            raise ProtocolError(f"slice {unknown[0]} of namespace {self.name!r} is not on this server")
        lengths = np.array([nbytes for nbytes, _ in payload_types], np.int64)
        ends, starts, total = np.cumsum(lengths), np.cumsum(sizes) - sizes, int(lengths.sum())
        which = np.minimum(np.searchsorted(ends, starts, side="right"), len(lengths) - 1)
        if (sizes < 0).any() or int(sizes.sum()) != total or (starts + sizes > ends[which]).any():
            raise ProtocolError(f"slices of {int(sizes.sum())} bytes came in payloads of {total}")
        # 2. Compare sizes and dtypes with the slots, and count the bytes of each table.
        tables = self.rounds.slots.table[slots]
        of_slots = zip(slots.tolist(), which.tolist(), strict=True)
        is_wrong = np.array(
            [payload_types[at][1] not in (torch.uint8, self._dtypes[slot]) for slot, at in of_slots]
        )
        distinct = np.flatnonzero(np.bincount(tables))
        received = np.bincount(tables, sizes).astype(np.int64)[distinct]
        return SliceLocations(
            tables,
            which,
            starts - np.append(0, ends)[which],
            np.flatnonzero(is_wrong & (sizes > 0) | (sizes != self.rounds.slots.nbytes[slots])).tolist(),
            list(zip(distinct.tolist(), received.tolist(), strict=True)),
        )

    def _refuse_slice(self, slot: int, nbytes: int, dtype: torch.dtype) -> NoReturn:
        table, position = self.slice_of(slot)
        slice_ = table.unit.slices[position]
        names = ", ".join(repr(table.plan.specs[segment.key].key) for segment in slice_.segments[:3])
        got = f"{nbytes} bytes" if dtype is torch.uint8 else f"{dtype}[{nbytes // dtype.itemsize}]"
        raise ShapeMismatchError(
            f"slice {slice_.index} (of {names}) takes {slice_.dtype}[{slice_.length}], padding included, got {got}"
        )

    def slice_of(self, slot: int) -> tuple[Table, int]:
        """Return the table of a slot, and the position of the slice among those of the table on this server."""
        table = int(self.rounds.slots.table[slot])
        return self.tables[table], slot - int(self.rounds.slots.first[table])

    def dtype_of(self, slot: int) -> torch.dtype:
        return self._dtypes[slot]

    def rank_commit(
        self, rank: int, tracker: RoundTracker, table: Table, optimizer: Optimizer | None
    ) -> RankCommit | None:
        """Return what a rank committed to the open round of a table; None if it has joined."""
        inputs, number, unit = tracker.of(rank), table.number, table.unit
        flags, info = int(inputs.flags[number]), inputs.commit_infos[number]
        assert info is not None
        if flags & m.HAS_JOINED:
            return None
        # Messages number keys by table, the shard numbers them over all tables.
        absent = frozenset(unit.first_key + key for key in self.absent.get((number, rank), ()))
        ranges = inputs.ranges(np.arange(unit.first, unit.end))
        contribution = self.contribution(info, optimizer, ranges, absent)
        return RankCommit(contribution, flags, int(inputs.version[number]), info.hold)

    def can_batch(self, tracker: RoundTracker, batch: TableBatch, optimizer: Optimizer | None) -> list[bool]:
        """Return for each table, whose round is complete, whether it can be applied in one update with the others.

        True for a plain sum of all keys in a synchronous round, with commits that ask for the same in all tables.
        """
        may_be_undone = self.shard.keeps_undos or (optimizer is not None and optimizer.may_raise)
        if not self.mode.is_sync or may_be_undone or self.recording.active:
            return [False] * len(batch.number_list)
        with_absent_keys = {number for number, _ in self.absent} if self.absent else ()
        found = [
            one.is_initialised
            and one.held is None
            and one.pipelined is None
            and one.number not in with_absent_keys
            for one in batch.tables
        ]
        for inputs in tracker.inputs.values():
            infos: list[Any] = list(map(inputs.commit_infos.__getitem__, batch.number_list))
            first = infos[0]
            if not first.is_plain or infos.count(first) < len(infos):
                same = [one.is_plain and one.rescale == first.rescale for one in infos]
                found = [a and b for a, b in zip(found, same, strict=True)]
        return found

    def contribution(
        self,
        info: CommitInfo | Intent | None,
        optimizer: Optimizer | None,
        ranges: Iterable[BufferRange],
        absent: frozenset[int] = NO_KEYS,
    ) -> RankContribution:
        """Build a contribution from what a rank gave to some slots (`ranges`).

        Args:
            info: What it said with its commit, or with its intent; without a factor (`rescale`), that of the
                optimizer applies.
            absent: The keys that it leaves out, as the shard numbers them.
        """
        assert info is not None
        runs, are_plain, scale = list[Run](), True, info.rescale
        if scale is None:
            scale = 1.0 if optimizer is None else optimizer.rescale_grad
        for first, end, source, begin, last in ranges:
            if isinstance(source, Tensor):
                source = part_of(source, begin, last)
                # Arrived as bytes; the slot knows the dtype.
                if source.dtype is torch.uint8:
                    source = source.view(self._dtypes[first])
            else:
                are_plain = False
            runs.append(Run(first, end, source))
        plain = RankContribution(runs, scale, absent)
        return plain if are_plain else self.shard.contribution_of(runs, scale, absent)

    def update_tables(
        self, batch: TableBatch, contributions: Sequence[RankContribution], update: BatchUpdate
    ) -> None:
        """Sum and update some tables in one call, and count the round of each. Raises as the shard does."""
        if update.optimizer is None:
            self.shard.assign_sum(contributions)
        else:
            units = [table.unit for table in batch.tables]
            self.shard.update(contributions, update.optimizer, update.hypers, units)
        end = None
        for table, hyper in zip(batch.tables, update.packed, strict=True):
            end = table.changed(hyper, end)  # tables with equal ends share one object

    def answer_plainly(self, batch: TableBatch, asked: Sequence[tuple[int, int, Waiter]]) -> list[m.Outgoing]:
        """Return the new weights of some tables for ranks, given as (rank, flags, waiter).

        Those with equal flags share a message.
        """
        weights: dict[int, m.Weights] = {}
        for _, flags, _ in asked:
            if flags not in weights:
                ranks = [rank for rank, own, _ in asked if own == flags]
                if flags == m.WANTS_WEIGHTS:
                    weights[flags] = self.weights(batch, *ranks)
                else:
                    are_known = bool(flags & m.LOCATIONS_CACHED)
                    weights[flags] = self.weights_to_map(batch, len(ranks), are_known)
        return [m.Outgoing(waiter.peer, m.Reply(waiter.number, weights[flags])) for _, flags, waiter in asked]

    def weights(self, batch: TableBatch, *ranks: int, half: bool = False, is_pull: bool = False) -> m.Weights:
        """Return the current weights of some tables, except row-sparse ones, for some ranks; not copies.

        With `half`, wider ones are rounded to bfloat16. `is_pull`: the ranks only look at them, and do not compute
        with them.
        """
        parts, storage, sizes = batch.parts.copy(), self.shard.storage, batch.table_nbytes
        parts[:, m.PART_VERSION] = np.array([table.version for table in batch.tables])[batch.part_tables]
        payloads = list(map(storage.padded.__getitem__, batch.part_slots))
        if half:
            payloads = [
                storage.half(*where)
                for where in zip(batch.part_slots, parts[:, m.PART_VERSION].tolist(), strict=True)
            ]
            parts[:, m.PART_NBYTES] = [payload.nbytes for payload in payloads]
            parts[parts[:, m.PART_NBYTES] < batch.parts[:, m.PART_NBYTES], m.PART_KIND] = m.HALF
            sizes = (
                np.bincount(batch.part_tables, parts[:, m.PART_NBYTES], len(batch.tables))
                .astype(np.int64)
                .tolist()
            )
        for table, size in zip(batch.tables, sizes, strict=True):
            table.bytes_out += size * len(ranks)
            if is_pull:
                for rank in ranks:
                    self._record_read(table, rank)
            else:
                table.reset_reads(ranks)
        if self.changes is not None and not self.mode.is_sync:
            self.note_tables([table.number for table in batch.tables if table.tracks_reads])
        return m.Weights(parts, tuple(payloads), self.are_weights_stable)

    def weights_before(self, round_: int, table: Table) -> m.Weights:
        """Return the weights of a table with which a round began, for a process that repeats it.

        Raises WorkerLostError if they are not kept any more.
        """
        batch = self.batch_of(np.array([table.number], np.int64))
        if not self.is_over(round_, table):
            return self.weights(batch, is_pull=True)
        parts = batch.parts.copy()
        parts[:, m.PART_VERSION] = table.version - 1
        former = [self.shard.storage.former(slot) for slot in batch.part_slots]
        return m.Weights(parts, tuple([weights.clone() for weights in former if weights is not None]))

    def is_over(self, round_: int, table: Table) -> bool:
        """Return whether a round that a process repeats has changed the weights, so that it needs the former ones.

        Raises WorkerLostError if they are not kept any more.
        """
        number, storage = table.number, self.shard.storage
        open_round = self.rounds.shared.number(number)
        # A round that failed, or ended without an update, has left the weights as they were when it began.
        has_changed = self.rounds.shared.was_applied(number, round_) and not table.ends[ALL].is_skipped
        if open_round == round_ or (open_round == round_ + 1 and not has_changed):
            return False
        are_kept = all(map(storage.knows_former, range(table.unit.first, table.unit.end)))
        if open_round != round_ + 1 or not are_kept:
            raise WorkerLostError(
                f"round {round_} of {table.name!r} cannot be repeated on server {self.config.server}, where round "
                f"{open_round} is open: a process has committed it to some of the servers and died, and the weights "
                "before it are not kept; they are with --durability process. Restart the job from its last saved states"
            )
        return True

    def weights_to_map(self, batch: TableBatch, num_ranks: int, are_known: bool) -> m.Weights:
        """Return the current weights of some tables for ranks that map them: locations, and bytes of what has none.

        Args:
            num_ranks: How many ranks get the message.
            are_known: They know all locations, so one for each table says that they have not changed.
        """
        storage, locations = self.shard.storage, batch.part_locations
        if storage.has_moved:
            locations = np.array([storage.location(slot) for slot in batch.part_slots], np.int64)
        versions = np.array([table.version for table in batch.tables])[batch.part_tables]
        [mapped], [others] = (locations >= 0).nonzero(), (locations < 0).nonzero()
        # The common case of a step: one record for each table instead of all locations.
        if are_known and not storage.has_moved:
            mapped = batch.first_mapped
            locations = np.full_like(locations, m.SAME_LOCATION)
        located = np.array((batch.parts[mapped, m.PART_SLOT], versions[mapped], locations[mapped])).T
        # What cannot be mapped is sent as bytes.
        parts = batch.parts[others]
        parts[:, m.PART_VERSION] = versions[others]
        payloads = tuple([storage.padded[slot] for slot in parts[:, m.PART_SLOT].tolist()])
        for payload, index in zip(payloads, batch.part_tables[others].tolist(), strict=True):
            batch.tables[index].bytes_out += payload.nbytes * num_ranks
        return m.Weights(parts, payloads, self.are_weights_stable, located)

    def mapped_rows(self, table: Table) -> m.Weights:
        """Return the locations of a table's slices that workers keep no copy of but can map."""
        unit, storage = table.unit, self.shard.storage
        first = int(self.rounds.slots.first[table.number])
        rows = [at for at, slice_ in enumerate(unit.slices) if not table.plan.is_resident(slice_)]
        locations = [
            (first + at, table.version, storage.location(unit.slots[unit.slices[at].index])) for at in rows
        ]
        mapped = m.matrix([one for one in locations if one[2] >= 0], m.LOCATION_WORDS)
        return m.Weights(m.NO_PARTS, (), locations=mapped)

    def rows(self, rank: int, table: Table, found: Sequence[RowPart], is_pull: bool = False) -> m.Weights:
        """Return rows of a table for a rank. `is_pull`: the rank only looks at them."""
        if is_pull:
            self._record_read(table, rank)
        else:
            table.reset_reads([rank], None if table.deltas is None else table.deltas.weights)
        if table.deltas is not None or table.tracks_reads:
            self.note_tables([table.number])
        parts = [(part.slot, table.version, part.kind, part.payload.nbytes) for part in found]
        table.bytes_out += sum([nbytes for _, _, _, nbytes in parts])
        return m.Weights(np.array(parts, np.int64).reshape(-1, 4), tuple([part.payload for part in found]))

    def _record_read(self, table: Table, rank: int) -> None:
        """Like `Table.record_read`, with the memory that this namespace may still claim."""

        def has_room(more: int) -> bool:
            copies = max(more - table.extra_reads, 0)
            try:
                self.claim(
                    copies * _weights_nbytes(table), f"what workers of table {table.name!r} have pulled"
                )
            except ConfigurationError:
                return False
            table.extra_reads += copies
            return True

        table.record_read(rank, has_room, None if table.deltas is None else table.deltas.weights)

    # ---------------------------------------------------------------- optimizer

    def set_optimizer(self, rank: int, spec: bytes) -> None:
        """Set the optimizer that a rank names; another algorithm than before starts with fresh state.

        Raises ConfigurationError if its options are not valid, or its state needs more memory than there is.
        """
        # Memory for its state is claimed before it is accepted.
        replaced = self.optimizer.set(rank, spec, self._make_room)
        self.num_option_changes += 1
        if replaced is not None:
            _log.warning(
                "namespace %r: the state of optimizer %r is dropped because another one is set",
                self.name,
                replaced,
            )
            self.shard.reset_states()
            self.note_tables(range(len(self.tables)))
        if self.changes is not None:
            self.changes.note_optimizer()
        self._track_reads_if_needed(self.tables)

    def check_restored(self, spec: bytes) -> None:
        """Raise ConfigurationError for another optimizer than that of the snapshot with which this began."""
        if self.lineage.round and self.optimizer.named is not None and not self.optimizer.is_known(spec):
            former, values = self.optimizer.named.registered_name, unpack_control(spec)
            name = values.get("name") if isinstance(values, dict) else None
            if name != former:
                raise ConfigurationError(
                    f"the snapshot of round {self.lineage.round} is of a job with the optimizer {former!r}, and this "
                    f"one has {name!r}; use the same, or start the job with an empty --state-dir"
                )

    def _make_room(self, optimizer: Optimizer) -> None:
        needed = sum(self._table_nbytes(table.plan, optimizer) for table in self.tables)
        what = f"the state of optimizer {optimizer.registered_name!r} in namespace {self.name!r}"
        self._resize_claim(self._claimed_for_tables, needed, what)
        self._claimed_for_tables = needed

    def _track_reads_if_needed(self, tables: Iterable[Table]) -> None:
        """Let tables remember what each rank has read if the optimizer needs that (delay compensation)."""
        optimizer = None if self.mode.is_sync else self.optimizer.named
        for table in tables:
            wanted = optimizer is not None and optimizer.delay_state is not None
            begins = wanted and not table.tracks_reads
            table.tracks_reads = wanted
            if begins and table.is_initialised:
                # Without an optimizer nothing has changed the first values, so every rank has these.
                table.reset_reads(range(self.membership.num_workers))
                self.note_tables([table.number])

    def is_waiting(self) -> bool:
        return bool(self.membership.barrier or self.waits.all or self.rounds.shared.num_committed.any())

    def stats(self, now: float) -> Mapping[str, Any]:
        members = self.membership
        return {
            "server": self.config.server,
            "namespace": self.name,
            "num_workers": members.num_workers,
            "num_dead": members.num_dead(now, self.config.dead_after),
            "messages_in": self.messages_in,
            "tables": [{"namespace": self.name, **self._counters(table)} for table in self.tables],
            **({} if self.views is None else {"view": self.views.facts()}),
        }

    def record_failure(self, error: KVStoreError) -> None:
        """Record the error of a failed round; equal consecutive errors count once."""
        text = describe(error)[:ERROR_LENGTH]
        if not self.failures or self.failures[-1][1] != text:
            self.failures.append((self.rounds.num_ended, text))

    def facts(self, pending: Iterable[Any], now: float) -> Mapping[str, Any]:
        """Return the state of the namespace for status displays; `pending` are the engine's `RankWait`s."""
        has_clocks = bool(self.tables) and not self.mode.is_sync
        clocks = dict(enumerate(self.rounds.clocks(0))) if has_clocks else {}
        joined = self.rounds.joined(0) if self.tables else set()
        durations = self.rounds.durations
        return {
            "name": self.name,
            "mode": self.mode.name,
            "staleness": self.mode.staleness,
            "num_workers": self.membership.num_workers,
            "age": now - self.created_at,
            "rounds": self.rounds.num_ended,
            "round_seconds": {
                "bounds": list(durations.bounds),
                "counts": list(durations.counts),
                "sum": durations.total,
            },
            "waited": self.rounds.shared.waited,
            "updates": max([table.version for table in self.tables], default=0),
            "tables": len(self.tables),
            "keys": sum([len(table.unit.keys) for table in self.tables]),
            "bytes_in": sum([table.bytes_in for table in self.tables]),
            "bytes_out": sum([table.bytes_out for table in self.tables]),
            "messages_in": self.messages_in,
            "memory": self.claimed,
            "workers": workers_of(
                self.membership,
                self.rounds.shared.lateness,
                {} if self.views is None else self.views.left_out,
                clocks,
                joined,
                now,
            ),
            "waits": waits_of(pending, now),
            "errors": [{"rounds": at, "text": text} for at, text in self.failures],
        }

    def _counters(self, table: Table) -> Mapping[str, Any]:
        shared, number = self.rounds.shared, table.number
        return {
            "table": table.name,
            "round": shared.number(number),
            "version": table.version,
            "rounds_applied": table.rounds_applied,
            "keys": len(table.unit.keys),
            "keys_applied": table.keys_applied,
            "payload_mismatches": self.rounds.mismatches(number),
            "rounds_undone": table.undone,
            "decisions_differing": table.decisions_differing,
            "bytes_in": table.bytes_in,
            "bytes_out": table.bytes_out,
            "joined": sorted(self.rounds.joined(number)),
            "waiting_for": shared.missing_ranks(number) if shared.num_committed[number] else [],
            "hash_tables": {
                name: stats._asdict() for name, stats in self.shard.hash_table_stats(table.unit).items()
            },
        }


def _weights_nbytes(table: Table) -> int:
    return sum([slice_.length * SIZES[slice_.dtype] for slice_ in table.unit.slices])


@functools.lru_cache(maxsize=16)
def _codec_of(packed: bytes) -> Codec:
    """Return the codec that a push describes. Raises ConfigurationError if it is not valid."""
    return make_codec(unpack_control(packed))


def _nbytes_of_client_states(states: Iterable[tuple[int, bytes]]) -> int:
    return sum([len(state) for _, state in states])


def _check_same_placement(mine: Plan, theirs: m.Register, first: int, rank: int) -> None:
    if mine.whole_keys != theirs.whole_keys:
        names = {True: "whole keys", False: "slices of keys"}
        raise PlanMismatchError(
            f"rank {first} wants {names[mine.whole_keys]} on a server, rank {rank} wants {names[theirs.whole_keys]}: "
            "one of them has an optimizer that needs whole keys; set the same one on every worker"
        )
    if mine.one_server != theirs.one_server:
        names = {True: "one server", False: "all servers"}
        raise PlanMismatchError(
            f"rank {first} wants the table on {names[mine.one_server]}, rank {rank} on {names[theirs.one_server]}: "
            "servers told them different values of --spread-from; start all servers with the same one, and do not "
            "replace a server while workers start"
        )
