"""Connects a Trainer to what synchronises it: opened at the first step, then one round in every step.

`Binding` makes the store and the exchange that a `Selection` names (an engine, ranks of torch.distributed, a
third-party store, or none) and builds the contribution of each round. Around the round it keeps what belongs to the
Trainer and not to the store:

- whether the loop has written weights that the store would replace (`_check_written`): before each round weights
  that pages or checksums report are compared with the store's;
- whether a step may be applied in part (`StepGuard`), and whether servers know the options (`SentOptions`);
- residuals of compression, across restarts and changes of parameters;
- the exchange of a former set of parameters (`leave`), until all workers are known to go over to the next.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from kvstore_server.codec import BFloat16
from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.engine.memory import return_free_memory
from kvstore_server.errors import RepeatedRoundError
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import Plan
from kvtrainer.client.client import Client
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.profiler import Profiler
from kvtrainer.client.replica_sums import ReplicaCompressor
from kvtrainer.client.row_reads import TableRowReads
from kvtrainer.client.session import Report
from kvtrainer.client.weight_sinks import WeightSink
from kvtrainer.common.env import WORKER_MEMORY
from kvtrainer.errors import ConfigurationError, KVStoreError, WeightsWrittenError, WorkerLostError
from kvtrainer.kvstore import KVStoreBase, create
from kvtrainer.kvstore.agreement import Agreement
from kvtrainer.kvstore.device import DeviceKVStore
from kvtrainer.kvstore.dist import DistKVStore
from kvtrainer.kvstore.verbs import KVStoreVerbs, agreement_of
from kvtrainer.memory.arena import Arena
from kvtrainer.memory.hash_table import is_hash_table
from kvtrainer.memory.memory import DeviceMemory, Memory
from kvtrainer.options.stages import GradientLimits
from kvtrainer.ranks.host_reduce import HierarchicalReduce, open_host_sum
from kvtrainer.ranks.process_group import Buckets, RankGroup, current_group
from kvtrainer.states.surviving_memory import SurvivingMemory
from kvtrainer.sync.client_state import ASSIGNED, JOINED, LAST, ClientRecord, Records, find_records
from kvtrainer.sync.eager_push import Overlap
from kvtrainer.sync.exchange import (
    TABLE,
    Exchange,
    JoinedRound,
    PluginExchange,
    RoundResult,
    StoreExchange,
)
from kvtrainer.sync.rank_exchange import RankExchange
from kvtrainer.sync.select import Selection, group_too_late
from kvtrainer.sync.step_guard import StepGuard
from kvtrainer.types import Arenas

_log = logging.getLogger(__name__)

BUCKETS = ("bucket_size_mb", "coalesce")
"""The options of reductions over the ranks of torch.distributed."""


@dataclass(frozen=True)
class WorkerResiduals:
    rank: int
    num_workers: int
    values: Sequence[Mapping[int, Tensor]]
    """By index of the key, in its shape; one mapping for each device whose replicas are compressed."""

    @property
    def place(self) -> tuple[int, int, int]:
        """Rank, number of workers and of devices: residuals are of use only with the same."""
        return self.rank, self.num_workers, len(self.values)

    def moved(self, places: Mapping[int, int]) -> WorkerResiduals:
        """Return those of the keys that stay (former key → new key)."""
        return replace(
            self, values=[{places[k]: v for k, v in one.items() if k in places} for one in self.values]
        )

    def __str__(self) -> str:
        on = f" with {len(self.values)} devices" if len(self.values) > 1 else ""
        return f"rank {self.rank} of {self.num_workers}{on}"


class ResumedRounds(NamedTuple):
    """What an earlier process of this rank has done."""

    round: int
    """The last round that it has committed on every server."""
    records: Records
    outcome: RoundResult | None
    """How that ended; see `StoreExchange.resume`."""


class SentOptions:
    """The options and limits that servers were sent last, so that rounds send only what has changed."""

    def __init__(self) -> None:
        self._last: tuple[dict[str, Any], GradientLimits] | None = None
        self._packed = b""
        self._are_known = False
        """Whether all servers have them."""

    def changed(self, options: dict[str, Any], limits: GradientLimits, in_store: bool) -> bytes:
        """Pack the options of a round; empty if all servers have them. They must be confirmed if it is applied."""
        if self._last != (options, limits):
            self._last = options, limits
            self._packed = pack_hypers(**options, update_on_kvstore=in_store, limits=limits.summary)
            self._are_known = False
        changed = b"" if self._are_known else self._packed
        self._are_known = False  # if the round fails, some servers may lack them: they are sent again
        return changed

    def confirm(self) -> None:
        self._are_known = True

    def forget(self) -> None:
        self._are_known = False

    def predict(self, read: Callable[[], dict[str, Any]] | None, in_store: bool) -> bytes:
        """Pack the options that `read` returns now; empty if all servers have them."""
        assert self._last is not None
        former, limits = self._last
        try:
            options = former if read is None else read()
        except Exception:  # in a user's schedule: the step will raise it
            options = former
        if self._are_known and options == former:
            return b""
        return pack_hypers(**options, update_on_kvstore=in_store, limits=limits.summary)


class Binding:
    """Connects a Trainer to its kvstore: the store, the client and the Trainer's table.

    There may be no store; then there is no `exchange` either. With `zero_copy` weights may be mapped.
    """

    def __init__(self, selection: Selection, zero_copy: bool = True) -> None:
        # 1. The selection, and the store once it is open.
        self.selection = selection
        self.zero_copy = zero_copy
        self.store: KVStoreBase | None = None
        """The store; None without one, or while it is only named."""
        if isinstance(selection.kvstore, KVStoreBase):
            self.store = selection.kvstore
        self.updates_weights = selection.updates_weights
        """Whether the optimizer runs in the store."""
        self.allows_halves = selection.allows_halves
        """Whether `allreduce_grads` and `update` may be called."""
        self.is_open = selection.is_open
        """Whether `decide` has to be called before `start`."""
        self.exchange: Exchange | None = None
        """None before `start`, and if no store is needed."""
        self.holder: StoreExchange | None = None
        """The exchange, if it is over an engine, which holds weights and perhaps the optimizer's state."""
        self.report = Report()
        """What heartbeats tell those who watch the job about this worker."""
        self.replicas: ReplicaCompressor | None = None
        """Compresses replicas before they are summed; None if they are not compressed."""
        if selection.replica_codec is not None:
            self.replicas = ReplicaCompressor(selection.replica_codec)
        self.is_started = False
        self.is_closed = False
        # 2. What it makes of the selection, and what the Trainer tells it.
        self._client: Client | None = None
        """The Trainer's own connection; None for a third-party store."""
        self._group: RankGroup | None = None
        self._buckets: dict[str, Any] = {}
        self._layout: Memory | None = None
        self._profiler: Profiler | None = None
        self._sent = SentOptions()
        self._pending: WorkerResiduals | None = None
        """Residuals that were loaded before the store was made."""
        self.resumed: ResumedRounds | None = None
        """What an earlier process of this rank has done, once the store is open; None if there was none."""
        self.is_resumable = False
        """Whether another process may take this rank over."""
        self.survivors: SurvivingMemory | None = None
        """What only this worker has and another process of its rank needs; None if there is nothing."""
        self._left: tuple[Exchange, Memory] | None = None
        """The exchange of the former parameters, until all workers are known to go over to the next one."""
        # 3. What rounds leave for the next one.
        self._num_opened = 0
        self._num_shown = 0
        """The `changes` of the sink that write detection knows of."""
        self._earlier_updates = 0
        self._host: HierarchicalReduce | None = None
        """Sums gradients with other workers of this host."""
        self._overlap: Overlap | None = None
        """Pushes gradients during the backward pass; None if the step sends them."""
        self.read_hypers: weakref.WeakMethod[Callable[[], dict[str, Any]]] | None = None
        """Reads the options that hold now, as `round` takes them."""
        self.guard = StepGuard()

    @property
    def is_alone(self) -> bool:
        return self.selection.kvstore is None

    @property
    def is_dist(self) -> bool:
        """Whether the store is on servers in processes of their own; False before `start`."""
        return self.holder is not None and self.holder.is_dist

    @property
    def num_workers(self) -> int:
        """How many workers take part in the next round; 1 before `start`."""
        return self.exchange.num_workers if self.exchange is not None and self.is_started else 1

    @property
    def num_counted(self) -> int:
        """The gradients of how many workers the next round takes; 1 before `start`."""
        return self.exchange.num_counted if self.exchange is not None and self.is_started else 1

    def members(self) -> tuple[int, ...]:
        """Return the ranks that take part in the next round; opens the store, if necessary."""
        return tuple(range(self.worker()[1])) if self.holder is None else tuple(self.holder.members)

    def leave_rounds(self) -> None:
        """Have the other workers go on without this one. Raises ConfigurationError if that is not possible."""
        self.check_open()
        self.check_whole()
        if self.holder is None or self.holder.are_members_fixed:
            raise ConfigurationError(
                "leave() is for a job whose number of workers may change (kvlaunch -n MIN..MAX, KVSTORE_ELASTIC), "
                "after resume(); close() ends this worker"
            )
        self.holder.leave_rounds()

    def set_buckets(self, buckets: dict[str, Any]) -> None:
        self._buckets = buckets
        self._tell_buckets()

    def check_buckets(self, buckets: dict[str, Any]) -> None:
        """Raise ConfigurationError if the store does not reduce over ranks, or a value is wrong."""
        if not self.selection.over_ranks:
            name = self.store.type if self.store is not None else self.selection.kvstore
            raise ConfigurationError(
                f"{', '.join(buckets)} would have no effect: kvstore {name!r} does not reduce over ranks of "
                "torch.distributed"
            )
        Buckets(buckets.get("bucket_size_mb"), buckets.get("coalesce", True))

    def _tell_buckets(self) -> None:
        if isinstance(self.store, DeviceKVStore):
            for name, value in self._buckets.items():
                setattr(self.store, name, value)

    def decide(self, is_sparse: bool) -> None:
        """Decide by the first gradients who updates: with row-sparse ones the Trainer, as in MXNet."""
        if self.is_open and is_sparse:
            self.updates_weights, self.allows_halves = False, True
        self.is_open = False

    def is_lossy(self, dtypes: Iterable[str]) -> bool:
        """Return whether compression keeps back a part of gradients of any of these dtypes."""
        codec = self.selection.codec or self.selection.replica_codec
        return codec is not None and not all(map(codec.is_exact, dtypes))

    def checks_sums(self, dtypes: Iterable[str]) -> bool:
        """Return whether the store checks sums of gradients of these dtypes before it uses them.

        A sum is finite only if all contributions are; but compression can make finite values of others.
        """
        exchange = self.exchange
        in_rounds = exchange is not None and exchange.updates_weights and exchange.is_sync
        return in_rounds and not self.is_lossy(dtypes)

    @property
    def has_weights(self) -> bool:
        """Whether the store updates the weights and is open, so that its weights count."""
        return self.holder is not None and self.updates_weights

    def check_open(self) -> None:
        if self.is_closed:
            raise KVStoreError("this Trainer is closed; build a new one to go on")

    def start(self, layout: Memory, optimizer: Optimizer, resumes: GradientLimits | None = None) -> None:
        """Open the store, if there is one, and give every worker rank 0's weights; once, collectively.

        The caller ends the step of `guard`, because it has more to do.

        Args:
            resumes: Go on where an earlier process of this rank has ended, if there was one, with these limits of the
                gradients; `resumed` then says what it has done.
        """
        self.check_whole()
        arena = layout.arena
        layout.check_in_place()
        if self._left is not None:
            # 1. A last round of the former parameters. It fails on all workers unless all go over to the next ones.
            exchange, former = self._left
            state = b""
            if self.is_resumable and isinstance(exchange, StoreExchange):
                state = ClientRecord(LAST, exchange.round, 0, {}, b"").pack()
            exchange.assign(former.arena.weights, client_state=state)
            exchange.close()
            self._left = None
        if self.exchange is None:
            self.exchange = self._open_exchange(layout.plan, optimizer, resumes is not None)
        self.guard.begin()
        # 2. Where weights and gradients lie, and rank 0's weights.
        is_on_cpu = arena.device.type == "cpu"
        has_replicas = is_on_cpu and layout.has_replicas
        if isinstance(self.exchange, StoreExchange) and not has_replicas:
            if self.zero_copy:
                self.exchange.map(arena.weights)
            if not self.selection.overlaps:
                self.exchange.allocate_shared_grads(arena.long, allocates=self.zero_copy, gathers=is_on_cpu)
        if self.exchange is not None:
            with self.guard.ended_by_errors():
                self._place_weights(layout, resumes)
            layout.tables.are_placed()
            arena.mark_updated(None)
            self._let_residuals_survive()
        if is_on_cpu:
            return_free_memory()  # the parameters had memory of their own before
        # 3. From now on there are rounds.
        self._layout = layout
        self.is_started = True
        self.holder = self.exchange if isinstance(self.exchange, StoreExchange) else None
        if self.holder is not None and self.holder.sink.changes != self._num_shown:
            self._watch_writes(arena, self.holder.sink)
        for key, table in enumerate(layout.devices[0].parameters) if self.holder is not None else ():
            if is_hash_table(table) and table.cache_rows:
                self.rows.keep(key, table.cache_rows, table.cache_age)
        if self.holder is not None and self.holder.shared_grads is not None and is_on_cpu:
            layout.devices[0].tracker.grad_allocators = self.holder.shared_grads.grad_allocators()
        # 4. What listens to the backward pass.
        if self.selection.overlaps and self.holder is not None:
            self._overlap = Overlap(self.holder, layout.devices[0], self._predict_hypers)
        if isinstance(self.exchange, RankExchange):
            self.exchange.listen(layout.devices[0])
        if self._pending is not None:
            self.take_residuals(self._pending)

    def _place_weights(self, layout: Memory, resumes: GradientLimits | None) -> None:
        exchange, weights = self.exchange, layout.arena.weights
        assert exchange is not None
        takeover = exchange.takeover if isinstance(exchange, StoreExchange) else None
        if takeover is None or takeover.first < 0 or resumes is None:
            exchange.init(weights, layout.tables.first())
            return
        assert isinstance(exchange, StoreExchange)
        records = find_records(takeover)
        if any(one is not None and one.kind == LAST for one in records):
            raise WorkerLostError(
                "the former process of this rank has added parameters after its first step, so this process cannot "
                "continue with those that it has; restart the job from its last saved states, and add parameter groups "
                "before the first step"
            )
        joined = records.last is not None and records.last[:2] == (JOINED, takeover.first)
        guard = resumes.guard if exchange.is_sync and exchange.updates_weights else None
        target = self._target_of(layout, takeover.first, records)
        outcome = exchange.resume(target, guard, joined)
        if exchange.takeover is None:
            exchange.init(weights, layout.tables.first())
            return
        if exchange.takeover != takeover:  # a server had lost the last commit
            takeover = exchange.takeover
            records = find_records(takeover)
            if (other := self._target_of(layout, takeover.first, records)) is not target:
                for dtype, flat in other.items():
                    flat.copy_(target[dtype])
        self.resumed = ResumedRounds(takeover.first, records, outcome)

    def _target_of(self, layout: Memory, round_: int, records: Records) -> Arenas:
        """Return where what a round has left on the servers belongs.

        If workers update, that is a sum of gradients, but the first values and assigned ones are weights.
        """
        is_sum = round_ > 0 and (records.last is None or records.last.kind != ASSIGNED)
        return layout.arena.grads if is_sum and not self.updates_weights else layout.arena.weights

    def _let_residuals_survive(self) -> None:
        """Store residuals of compression where another process finds them, or go on with what is there."""
        survivors, resumed = self.survivors, self.resumed
        if survivors is None or not isinstance(self.exchange, StoreExchange):
            return
        last = None if resumed is None else resumed.records.last
        if resumed is None or last is None:
            survivors.begin()
            self.exchange.let_residuals_survive(survivors.sections[0], None)
            return
        counts = resumed.outcome is None or not resumed.outcome.skipped
        is_own = last.own.get("memory") == survivors.id
        if not is_own or not self.exchange.let_residuals_survive(survivors.sections[0], counts):
            raise WorkerLostError(
                f"{WORKER_MEMORY} does not have what the former process of this rank alone had in round "
                f"{resumed.round}: it was started on another host, or with other memory. Restart the job from its last "
                "saved states"
            )

    def check_growth(self, layout: Memory) -> bool:
        """Return whether parameters may be added, because the store can lay out its table again.

        Raises:
            WeightsWrittenError: the loop has written weights that the store would replace.
        """
        if self.exchange is None:
            return True
        self._check_written(layout)
        return self.exchange.is_ours and self.exchange.is_sync and not layout.plan.has_row_sparse

    def leave(self, former: Memory, places: Mapping[int, int]) -> None:
        """Use other parameters from the next `start` on, on every worker; `places`: former → new key."""
        if self.exchange is None:
            self._pending = self._pending and self._pending.moved(places)
            return
        if self.is_resumable:
            _log.warning(
                "parameters were added or removed after resume(): a worker that dies from now on cannot come back; add "
                "them before the first step"
            )
        residuals = self.residuals()
        self._pending = residuals and residuals.moved(places)
        self._earlier_updates = max(self.version, 0)
        self._left = self.exchange, former
        self.exchange, self.holder = None, None
        self._sent.forget()
        self.is_started = False
        self._num_shown = 0

    def round(
        self,
        layout: Memory,
        options: dict[str, Any],
        scale: float,
        absent: frozenset[int],
        veto: bool,
        limits: GradientLimits,
        describe_state: Callable[[], bytes] | None = None,
        mean: tuple[float, int] | None = None,
    ) -> RoundResult:
        """Run one round of the gathered gradients, scaled. Raises before or after the round, never in between.

        Args:
            options: The options that hold now, as `read_hypers` returns them.
            absent: The keys without a gradient here.
            veto: Whether a gradient here forbids the update on all workers.
            limits: What is checked of the sum; by the store if it updates in synchronous rounds.
            describe_state: Packs what the successor of this process gets if this is its last round.
            mean: See `Contribution`.

        Raises:
            WeightsWrittenError: the loop has written weights that the store would replace; nothing has been sent.
        """
        assert self.exchange is not None
        # 1. What may be refused, before anything is sent.
        self._check_written(layout)
        if self._overlap is not None:
            self._overlap.begin_round()
        arena, contribution = layout.arena, self._contribution(layout, options, scale, absent, veto, limits)
        if describe_state is not None:
            contribution = contribution._replace(client_state=describe_state())
        if mean is not None and self.holder is not None and not self.holder.are_members_fixed:
            contribution = contribution._replace(mean=mean)
        self.guard.begin()
        try:
            # 2. The round. Residuals of replicas move on only if it was applied.
            outcome = self._run(contribution, arena.weights, describe_state)
            if self.replicas is not None and not outcome.skipped:
                self.replicas.accept()
        except BaseException as error:
            self._abort(layout, error)
            raise
        finally:
            layout.devices[0].borrowed = {}
            if self.replicas is not None:
                self.replicas.forget()
        # 3. All workers have the new weights: those here are not the loop's writes.
        if outcome.missed is None:
            self._sent.confirm()
        else:
            self._sent.forget()  # servers may not have seen what came too late
        if self.exchange.updates_weights and (not outcome.skipped or outcome.missed is not None):
            arena.mark_updated(None)
            arena.writes.count_own(outcome.written)
            if self.holder is not None and self.holder.sink.changes != self._num_shown:
                self._watch_writes(arena, self.holder.sink)
            if not layout.has_replicas:
                arena.zeros = frozenset([key for _, key in contribution.rows])
        return outcome

    def _run(
        self, contribution: Contribution, weights: Arenas, describe_state: Callable[[], bytes] | None
    ) -> RoundResult:
        """Run a round, and make it again if a worker was lost or raised in its middle and the job can do without."""
        assert self.exchange is not None
        while True:
            try:
                return self.exchange.run(contribution, weights, self.guard)
            except RepeatedRoundError as error:
                if self.holder is None or self.holder.is_broken:  # a server could not undo it
                    raise WorkerLostError(f"{error}. Restart the job from its last saved states") from error
                _log.warning("the round is made again: %s", error)
                if describe_state is not None:  # it has the number of the round
                    contribution = contribution._replace(client_state=describe_state())

    def check_whole(self, consequence: str = "training goes on with them") -> None:
        """Raise KVStoreError if an interrupted step may have been applied in part; see `StepGuard.check`."""
        if self.guard.is_incomplete:
            self.guard.check(self.exchange is not None, consequence)

    def _contribution(
        self,
        layout: Memory,
        options: dict[str, Any],
        scale: float,
        absent: frozenset[int],
        veto: bool,
        limits: GradientLimits,
    ) -> Contribution:
        """Build what this worker gives to a round, with the options that servers may not have yet.

        Raises ConfigurationError for rows that the store does not take.
        """
        exchange, device = self.exchange, layout.devices[0]
        assert exchange is not None
        if device.rows and exchange.refuses_rows:
            names = ", ".join(repr(layout.names[key]) for key in device.rows)
            raise ConfigurationError(f"the gradient of {names} is row-sparse, {exchange.refuses_rows}")
        guard = limits.guard if exchange.updates_weights and exchange.is_sync else None
        changed = self._sent.changed(options, limits, exchange.updates_weights)
        borrowed = {key: grad if grad.dim() == 1 else grad.view(-1) for key, grad in device.borrowed.items()}
        rows = {(0, key): rows for key, rows in device.rows.items()}
        shared_grads: Mapping[int, Tensor] = {}
        if exchange.shared_grads is not None and layout.arena.device.type == "cpu":
            shared_grads = exchange.shared_grads.in_place(borrowed, bool(device.targets))
        return Contribution(
            (), [layout.arena.grads], None, scale, changed, absent, rows,
            borrowed=borrowed, shared_grads=shared_grads, veto=veto, guard=guard,
        )  # fmt: skip

    def _abort(self, layout: Memory, error: BaseException) -> None:
        # An interrupted round may have left some of the new weights here.
        layout.accept_writes(self.has_weights)
        # If the others apply the round, this worker lacks the sum for its own update. Weights that a store updates
        # come with the next round, but only an error tells the loop that there has to be one, an interrupt does not.
        is_missed = not self.updates_weights and self.num_workers > 1
        if isinstance(error, Exception):
            is_missed = is_missed and self.holder is not None
        else:
            is_missed = is_missed or self.updates_weights
        self.guard.abort(is_missed)

    def _predict_hypers(self) -> bytes:
        read = None if self.read_hypers is None else self.read_hypers()
        return self._sent.predict(read, self.updates_weights)

    def _watch_writes(self, arena: Arena, sink: WeightSink) -> None:
        """Let write detection use pages where the system reports them, and checksums elsewhere."""
        self._num_shown = sink.changes
        arena.writes.check_written(sink.unwatched())

    def _check_written(self, layout: Memory) -> None:
        """Raise WeightsWrittenError if the loop changed weights since the store gave them.

        Weights that were put back, as after an evaluation with averaged ones, are accepted; so are the store's
        present weights, if the loop has pulled them.
        """
        if not self.updates_weights or self.holder is None:
            return
        # 1. What may have been written.
        written = [one.arena.writes.written_by_others() for one in layout.devices]
        if found := self.holder.sink.written():
            written[0] += sorted(self.holder.keys_of(found).difference(written[0]))
        given = [layout.names[key] for key in layout.tables.changed()] if layout.plan.has_row_sparse else []
        if not any(written) and not given:
            return
        # 2. What differs from the weights that came last, and from the store's present ones.
        devices, weights, are_looked_at = layout.devices, layout.arena.weights, False
        changed = _differing_keys(devices, written, self.holder.given(weights))
        if any(changed) and not self.holder.is_sync:
            looked_at = self.holder.looked_at()
            changed = _differing_keys(devices, changed, looked_at)
            every = [range(len(one.names)) for one in devices]
            are_looked_at = not any(changed) and not any(_differing_keys(devices, every, looked_at))
        names = [one.names[key] for one, keys in zip(devices, changed, strict=True) for key in keys]
        if names or given:
            raise WeightsWrittenError.of([*names, *given], sum(len(one.names) for one in devices))
        self.holder.accept(weights, are_looked_at)
        layout.accept_writes(self.has_weights)

    def run_without_data(self, arena: Arena, client_state: bytes = b"") -> JoinedRound:
        assert self.exchange is not None
        self._sent.forget()  # the options of other workers hold now
        joined = self.exchange.run_without_data(arena.weights, arena.grads, client_state)
        if self.exchange.updates_weights:
            arena.mark_updated(None)
        return joined

    def refuse_backup(self, method: str) -> None:
        """Raise ConfigurationError for what all workers do in the same step, if a step may leave some out."""
        if self._client is not None and self._client.options.backup_workers:
            raise ConfigurationError(
                f"{method} is not possible with backup workers, because all workers have to do it in the same step, "
                "and a worker that is late skips steps; leave --backup-workers out"
            )

    def _check_backup(self, plan: Plan) -> None:
        """Raise ConfigurationError for what does not work where a step may leave a worker out."""
        if plan.has_row_sparse:
            raise ConfigurationError(
                "row-sparse parameters are not possible with backup workers, because their rows are read one after the "
                "other while the other workers go on; leave --backup-workers out, or build the module with sparse=False"
            )
        codec = self.selection.pull_codec
        if codec is not None and not isinstance(codec, BFloat16):
            raise ConfigurationError(
                f"'pull' in compression_params is {codec.name!r}, which sends changes from one step to the next, and "
                "with backup workers a worker that is late skips steps; use 'bf16', or leave it out"
            )

    def describe(self) -> str:
        return "none" if self.store is None else self.store.type

    def assign(self, layout: Memory, client_state: bytes = b"") -> None:
        """Give every worker, and the store, rank 0's weights; collective, and nothing without a store."""
        self.check_whole()
        self.refuse_backup("set_data()")
        if self.exchange is not None:
            self.exchange.assign(layout.arena.weights, layout.tables.changed(), client_state)
            layout.tables.are_placed()
            layout.arena.mark_updated(None)

    def adopt_assigned(self, layout: Memory) -> None:
        """Take the weights of an `assign` that an earlier process of this rank has made, instead of repeating it."""
        self.check_whole()
        assert self.holder is not None
        self.holder.adopt_assigned(layout.arena.weights)
        layout.tables.are_placed()
        layout.arena.mark_updated(None)

    @property
    def rows(self) -> TableRowReads:
        assert self.holder is not None
        return self.holder.rows

    def residuals(self) -> WorkerResiduals | None:
        if self.replicas is not None and self._layout is not None:
            layout = self._layout
            return WorkerResiduals(0, 1, self.replicas.residuals(layout.plan.specs, len(layout.devices)))
        if (exchange := self._compressing_exchange()) is None:
            return self._pending
        return WorkerResiduals(exchange.rank, exchange.num_workers, [exchange.residuals()])

    def take_residuals(self, saved: WorkerResiduals | None) -> None:
        """Load saved residuals, once the store is open, if they are this worker's; otherwise start with none."""
        if self._compressing_exchange() is None and (self.replicas is None or self._layout is None):
            is_compressing = self.selection.codec is not None or self.replicas is not None
            self._pending = saved if is_compressing and not self.is_started else None
            return
        # Residuals are of use only for the same rank, and as many workers and devices.
        mine = self.residuals()
        if saved is not None and mine is not None and saved.place != mine.place:
            _log.warning(
                "the saved states hold what compression kept back on %s; %s starts with nothing kept back",
                saved,
                mine,
            )
            saved = None
        held = () if saved is None else saved.values
        if self.replicas is not None and self._layout is not None:
            self.replicas.set_residuals(self._layout.plan.specs, held)
        elif self.holder is not None:
            self.holder.set_residuals(held[0] if held else {})
        self._pending = None

    def _compressing_exchange(self) -> StoreExchange | None:
        return self.holder if self.is_started and self.selection.codec is not None else None

    def profiler(self) -> Profiler:
        """Return the profiler of the connection; opens the store if necessary. Raises as `Trainer.profiler`."""
        self.check_open()
        if self._profiler is None:
            self._open_store()
            if self._client is None:
                has = "no kvstore" if self.store is None else f"kvstore {self.store.type!r}"
                raise ConfigurationError(
                    f"this Trainer has {has}, so there is nothing of ours to profile; use torch.profiler"
                )
            self._profiler = Profiler(self._client, time.monotonic)
        return self._profiler

    @property
    def version(self) -> int:
        return self._earlier_updates + self.holder.version if self.holder is not None else -1

    @property
    def staleness(self) -> int:
        return self.holder.staleness if self.holder is not None else 0

    def stats(self) -> list[dict[str, Any]]:
        return [] if self.exchange is None else self.exchange.stats()

    def close(self, error: BaseException | None) -> None:
        """Leave the store; other workers are told of the error. Idempotent. Closes everything, even if some of it
        raises.
        """
        self.is_closed = True
        with ExitStack() as stack:  # the last one first
            if self.store is not None and self.store is not self.selection.kvstore:
                stack.callback(self.store.close)
            if self._client is not None:
                stack.callback(self._client.close, error)
            if self._host is not None:
                stack.callback(self._host.close)
            if self.exchange is not None:
                stack.callback(self.exchange.close)
            if self.holder is not None:
                stack.callback(self.holder.sink.release)
            stack.callback(self.close_survivors)

    def close_survivors(self) -> None:
        """Let another Trainer use the memory that outlives this process. Idempotent."""
        if self.survivors is not None:
            self.survivors.close()
            self.survivors = None

    def worker(self) -> tuple[int, int]:
        self._open_store()
        return (0, 1) if self.store is None else (self.store.rank, self.store.num_workers)

    def open_agreement(self, what: str) -> Agreement:
        """Return collectives for a call beside training (`what`), to be closed afterwards; collective.

        Opens the store as `_open_store`, and raises ConfigurationError as `agreement_of`.
        """
        self.check_open()
        self._open_store()
        return agreement_of(self.store, what)

    def _open_store(self, resumes: bool = False) -> None:
        """Open the store and the connection, if there are to be any; blocks until the servers answer. Idempotent.

        With `resumes`, another process can take this rank over.

        Raises ConfigurationError if a torch.distributed group was initialised too late to be used.
        """
        if self.selection.is_alone_by_name and current_group() is not None:
            raise group_too_late("the Trainer was built")
        if self.store is None and isinstance(self.selection.kvstore, str):
            self.store = create(self.selection.kvstore)
            self._tell_buckets()
        if isinstance(self.store, DeviceKVStore):
            self._group = self.store.group
            if self._group is not None and not self.selection.over_ranks:
                raise group_too_late("the Trainer was built")
        if self._group is None and self._client is None and isinstance(self.store, KVStoreVerbs):
            self._client = self.store.open_client(self.selection.is_hierarchical, resumes)
            self._client.tell(self.report)

    def _open_exchange(self, plan: Plan, optimizer: Optimizer, resumes: bool) -> Exchange | None:
        self._open_store(resumes)
        if self._client is not None:
            is_sync = self._client.options.mode.is_sync
            there = None
            if self.updates_weights:
                # Workers evaluate a scheduler, because it may be user code. But if contributions count one by one, only
                # servers know how many there were.
                there = optimizer.without_scheduler() if is_sync else optimizer
            is_dist = isinstance(self.store, DistKVStore)
            if self.selection.is_hierarchical and not self._num_opened:
                self._host = open_host_sum(self._client)
            self._num_opened += 1
            name = TABLE if self._num_opened == 1 else f"{TABLE} ({self._num_opened})"
            if self._num_opened > 1:
                self._client.check_fixed(
                    "parameters that are added while training are", "add them before resume()"
                )
            if self._client.options.is_elastic and not resumes:
                raise ConfigurationError(
                    "the number of workers of this job may change (KVSTORE_ELASTIC), so each worker has to call "
                    "Trainer.resume() before its first step"
                )
            codec, pull_codec = self.selection.codec, self.selection.pull_codec
            if codec is not None and self._client.options.is_elastic:
                raise ConfigurationError(
                    "compression_params with a type keep back a part of each gradient in its worker, which ends when "
                    "the worker leaves; leave the type out in a job whose number of workers may change"
                )
            if self._client.options.backup_workers:
                self._check_backup(plan)
            if is_dist and self._client.options.is_elastic and not self.updates_weights:
                raise ConfigurationError(
                    "with update_on_kvstore=False each worker has weights and state of its own, which a worker that "
                    "joins cannot get; use update_on_kvstore=True in a job whose number of workers may change"
                )
            return StoreExchange(
                self._client, plan, there, codec, is_dist, name, pull_codec, self._host, resumes and is_dist
            )
        if self._group is not None:
            overlaps = self.selection.overlaps
            return RankExchange(self._group, plan, optimizer, self.describe().lower(), overlaps)
        return None if self.store is None else PluginExchange(self.store, plan)


def _differing_keys(
    devices: Sequence[DeviceMemory], among: Sequence[Iterable[int]], held: Mapping[str, Tensor]
) -> list[list[int]]:
    return [one.differing(keys, held) for one, keys in zip(devices, among, strict=True)]
