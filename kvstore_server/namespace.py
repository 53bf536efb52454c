"""One namespace: the members of one Trainer or kvstore object, its tables, its optimizer and its barrier.

Namespaces share a server without seeing each other: each has its own keys, rounds and optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvstore_server.codec import Codec, make_codec
from kvstore_server.errors import (
    ConfigurationError,
    DeadlineError,
    KVStoreError,
    PlanMismatchError,
    ProtocolError,
)
from kvstore_server.hyper import OptimizerBelief
from kvstore_server.log_limit import SLOW_AFTER, SlowReports
from kvstore_server.membership import BarrierWait, Membership
from kvstore_server.memory import KEY, MEMBER, NAMESPACE, Budget, footprint
from kvstore_server.modes import SYNCHRONOUS, Mode
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import TensorSpec, check_name, check_same, check_specs, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.control import unpack_control
from kvstore_server.row_payload import PACKED_ROWS, RowForm
from kvstore_server.shard import Leases
from kvstore_server.table import Table
from kvstore_server.tracing import Profiling
from kvstore_server.waits import Waits

_log = logging.getLogger(__name__)

_ROW_FORM = RowForm()
_CODECS_KEPT = 16
"""Descriptions of codecs that are remembered; a job has one."""


class PlaceConfig(Protocol):
    """What a namespace needs to know of the engine that it lives in."""

    @property
    def server(self) -> int: ...
    @property
    def num_servers(self) -> int: ...
    @property
    def dead_after(self) -> float: ...
    @property
    def max_table_bytes(self) -> int: ...
    @property
    def integers(self) -> bool: ...


class Namespace:
    """Members, tables, optimizer and barrier of one name."""

    def __init__(
        self,
        name: str,
        num_workers: int,
        mode: Mode = SYNCHRONOUS,
        slow_after: float = SLOW_AFTER,
        budget: Budget | None = None,
    ) -> None:
        self.name = name
        self.mode = mode
        self.membership = Membership(name, num_workers)
        self.waits = Waits()
        self.optimizer = OptimizerBelief()
        self.profiling = Profiling()
        self.slow_reports = SlowReports(slow_after)
        self.next_look = 0.0
        """When the waits are to be looked at again."""
        self.messages_in = 0
        """Messages of its members so far, without their heartbeats."""
        self.tables: dict[int, Table] = {}
        self._numbers: dict[str, int] = {}
        self._registered_by: dict[str, int] = {}
        self._codecs: dict[bytes, Codec] = {}
        self._declaring: dict[int, tuple[str, list[TensorSpec]]] = {}
        """Rank → the table that it declares now, and the keys of it that have come."""
        self.budget = budget or Budget(0, 0)
        self._claimed = 0
        self._footprints: dict[int, int] = {}
        """Table → what is claimed for it."""

    def register(
        self, rank: int, register: m.Register, config: PlaceConfig, leases: Leases | None
    ) -> Table | int:
        """Return the table of that name, made now if this rank is the first to name it.

        While keys of it are still to come: how many have.

        Raises:
            PlanMismatchError: another rank declared different keys under this name; from then on the table
                is in conflict.
            ConfigurationError: it is too large.
        """
        number = self._numbers.get(register.table)
        if number is not None and register.digest == self.tables[number].plan.digest:
            self.forget_declaration(rank)
            return self.tables[number]
        specs = self._declared(rank, register)
        if isinstance(specs, int):
            return specs
        if number is not None:
            table = self.tables[number]
            first = self._registered_by[register.table]
            try:
                check_same(table.plan.specs, specs, f"rank {first}", f"rank {rank}")
                _check_same_placement(table.plan.whole_keys, register.whole_keys, first, rank)
            except PlanMismatchError as error:
                table.conflict = error
                raise
            return table
        check_name("a table", register.table)
        check_specs(specs, config.num_servers, config.integers)
        self._check_size(register.table, specs, config)
        plan = make_plan(specs, config.num_servers, register.whole_keys, config.integers)
        workers = self.membership.num_workers
        needed = footprint(plan, config.server, workers, self.mode, self.optimizer.named)
        self.claim(needed, f"table {register.table!r}")
        number = len(self.tables)
        table = Table(number, register.table, plan, config.server, workers, leases, self.mode)
        self._let_note_reads([table])
        self.tables[number] = table
        self._footprints[number] = needed
        self._numbers[register.table] = number
        self._registered_by[register.table] = rank
        return table

    def _declared(self, rank: int, register: m.Register) -> list[TensorSpec] | int:
        """All keys of the table that a rank declares, portion by portion; while they are not all here, how many are."""
        name, specs = self.forget_declaration(rank)
        if name != register.table:
            specs = []
        if register.first < 0:
            raise ProtocolError(f"a declaration begins with key {register.first}")
        if register.first <= len(specs):
            total = max(register.total, len(register.specs))
            self.budget.check(KEY * total, f"declaring {total} keys of table {register.table!r}")
            specs[register.first :] = [TensorSpec(*spec) for spec in register.specs]
        if register.first <= len(specs) and len(specs) >= register.total:
            return specs
        self.claim(KEY * len(specs), f"declaring {len(specs)} keys of table {register.table!r}")
        self._declaring[rank] = (register.table, specs)
        return len(specs)

    def forget_declaration(self, rank: int) -> tuple[str, list[TensorSpec]]:
        """Take out what a rank has declared of a table that is not complete, and give its memory back."""
        name, specs = self._declaring.pop(rank, ("", []))
        self.claim(-KEY * len(specs), "")
        return name, specs

    def _check_size(self, table: str, specs: Sequence[TensorSpec], config: PlaceConfig) -> None:
        """Before the plan is made: it grows with the size that a peer claims."""
        size = sum(spec.nbytes for spec in specs)
        if size > config.max_table_bytes:
            raise ConfigurationError(
                f"table {table!r} has {size} bytes, server {config.server} accepts tables of up to "
                f"{config.max_table_bytes} bytes (--max-table-bytes)"
            )
        self.budget.check(size // config.num_servers, f"table {table!r}, of {size} bytes on all servers,")

    def claim(self, nbytes: int, what: str) -> None:
        """Ask for memory, which the namespace has until it ends. Raises ConfigurationError if there is not so much."""
        self.budget.claim(nbytes, what)
        self._claimed += nbytes

    @property
    def least_memory(self) -> int:
        """Bytes that it needs without any table."""
        return NAMESPACE + MEMBER * self.membership.num_workers

    def begin(self) -> None:
        """Claim what it needs without any table."""
        self.claim(self.least_memory, f"namespace {self.name!r}")

    def end(self) -> None:
        """Give back what the namespace has claimed."""
        self.budget.give_back(self._claimed)
        self._claimed = 0

    @property
    def has_values(self) -> bool:
        """Whether there is anything that ending the namespace would lose."""
        return any(table.is_initialised for table in self.tables.values())

    def table(self, number: int) -> Table:
        """The table of that number.

        Raises:
            ProtocolError: there is none.
        """
        table = self.tables.get(number)
        if table is None:
            raise ProtocolError(f"namespace {self.name!r} has no table {number}; register it first")
        return table

    def form(self, packed: bytes) -> Codec | RowForm:
        """The form of payloads that a push describes.

        Raises:
            ConfigurationError: the description is not one of a codec.
        """
        if packed == PACKED_ROWS:
            return _ROW_FORM
        codec = self._codecs.get(packed)
        if codec is None:
            codec = make_codec(unpack_control(packed))
            if len(self._codecs) >= _CODECS_KEPT:
                self._codecs.clear()
            self._codecs[packed] = codec
        return codec

    def set_optimizer(self, rank: int, spec: bytes) -> None:
        """Note the optimizer that a rank names; another algorithm than before starts with fresh state.

        Raises:
            ConfigurationError: its numbers are not valid, or its state needs more memory than there is.
        """
        replaced = self.optimizer.set(rank, spec, self._make_room)
        if replaced is not None:
            _log.warning(
                "namespace %r: the state of optimizer %r is dropped for another one", self.name, replaced
            )
            for table in self.tables.values():
                table.shard.reset_states()
        self._let_note_reads(self.tables.values())

    def _make_room(self, optimizer: Optimizer) -> None:
        """Claim the memory that the tables need with another optimizer."""
        workers = self.membership.num_workers
        needed = {
            number: footprint(table.plan, table.unit.server, workers, self.mode, optimizer)
            for number, table in self.tables.items()
        }
        more = sum(needed.values()) - sum(self._footprints.values())
        self.claim(more, f"the state of optimizer {optimizer.registered_name!r} in namespace {self.name!r}")
        self._footprints = needed

    def _let_note_reads(self, tables: Iterable[Table]) -> None:
        """Have tables remember what each rank has read, where the optimizer asks for that."""
        optimizer = None if self.mode.is_sync else self.optimizer.named
        for table in tables:
            wanted = optimizer is not None and optimizer.delay_state is not None
            if wanted and not table.notes_reads and table.is_initialised:
                # Without an optimizer nothing has changed the first values, so these are what every rank has.
                table.shard.note_read(table.unit, range(self.membership.num_workers))
            table.notes_reads = wanted

    def enter_barrier(
        self, rank: int, barrier: m.Barrier, peer: bytes, number: int, now: float, dead_after: float
    ) -> list[tuple[bytes, int]] | None:
        """Let a rank wait; return whom to release (peer, request number), or None while somebody is missing.

        Raises:
            WorkerLostError: a rank that the barrier needs is gone.
            ProtocolError: the rank is at another barrier than the others.
        """
        members = self.membership
        if barrier.sequence < members.barrier_sequence:
            return [(peer, number)]
        if barrier.sequence > members.barrier_sequence:
            raise ProtocolError(
                f"rank {rank} is at barrier {barrier.sequence} while barrier {members.barrier_sequence} is open"
            )
        known = members.barrier.get(rank)
        since = now if known is None else known.since  # one that is repeated has no more time than it had
        members.barrier[rank] = BarrierWait(barrier.sequence, since, since + barrier.timeout, peer, number)
        absent = self.absent_from_barrier()
        if absent:
            lost = members.lost_error(absent, f"barrier {barrier.sequence}", now, dead_after)
            if lost is not None:
                del members.barrier[rank]
                raise lost
            return None
        released = [(wait.peer, wait.number) for wait in members.barrier.values()]
        members.barrier.clear()
        members.barrier_sequence += 1
        return released

    def absent_from_barrier(self) -> list[int]:
        members = self.membership
        return [rank for rank in range(members.num_workers) if rank not in members.barrier]

    def expired_barriers(self, now: float, dead_after: float) -> list[tuple[bytes, int, KVStoreError]]:
        """Waits at the barrier that have no hope any more, with the error to send; they are dropped."""
        members = self.membership
        if not members.barrier:
            return []
        absent = self.absent_from_barrier()
        what = f"barrier {members.barrier_sequence}"
        error: KVStoreError | None = members.lost_error(absent, what, now, dead_after)
        if error is None and now >= min(wait.deadline for wait in members.barrier.values()):
            who = members.describe_all(absent, now)
            error = DeadlineError(f"{what} reached its deadline while waiting for {who}")
        if error is None:
            return []
        waits = list(members.barrier.values())
        members.barrier.clear()
        return [(wait.peer, wait.number, error) for wait in waits]

    def is_waiting(self) -> bool:
        """Whether a rank waits for a round or at the barrier."""
        return (
            bool(self.membership.barrier)
            or bool(self.waits)
            or any(t.rounds.is_waiting() for t in self.tables.values())
        )

    def stats(self, now: float, config: PlaceConfig) -> Mapping[str, Any]:
        """Counters of every table and the state of every member."""
        members = self.membership
        return {
            "server": config.server,
            "namespace": self.name,
            "num_workers": members.num_workers,
            "num_dead": members.num_dead(now, config.dead_after),
            "messages_in": self.messages_in,
            "tables": [{"namespace": self.name, **table.counters()} for table in self.tables.values()],
        }


def _check_same_placement(mine: bool, theirs: bool, first: int, rank: int) -> None:
    if mine != theirs:
        names = {True: "whole keys", False: "slices of keys"}
        raise PlanMismatchError(
            f"rank {first} wants {names[mine]} on a server, rank {rank} wants {names[theirs]}: one of them has an "
            "optimizer that needs whole keys; set the same one on every worker"
        )
