"""One round of a Trainer's gradients over what synchronises it. Ranks of torch.distributed are in `rank_exchange`.

`Exchange` is the interface. `StoreExchange` works over the client of an engine, in this process or on servers;
`PluginExchange` over a third-party store's `broadcast` and `pushpull`.

If the store updates, a round sends gradients and brings new weights to the exchange's `WeightSink`. Otherwise sums
of gradients come back to where the gradients were. On a CUDA device both go through pinned memory of the host
(`Staging`), or large gradients through the servers' memory.

A round that raises leaves the gradients as they were. Whether other workers may still apply it is told to the
`StepGuard`. The rows of row-sparse keys never pass through the arenas: they are sent and fetched by themselves.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import BFloat16, Codec, torch_dtype
from kvstore_server.errors import RepeatedRoundError
from kvstore_server.optimizer import Optimizer, States, checked_optimizer_spec
from kvstore_server.plan import LONG, Plan, Slice, row_numel
from kvstore_server.protocol.rows import RowSet
from kvstore_server.shard.norms import Decision, Guard, Measured
from kvtrainer.client.client import Client
from kvtrainer.client.contribution import Contribution, Source
from kvtrainer.client.round import Round
from kvtrainer.client.row_reads import TableRowReads
from kvtrainer.client.shared_gradients import SharedGradients
from kvtrainer.client.tables import Compressor, Takeover
from kvtrainer.client.weight_sinks import (
    IN_PLACE,
    CopyWeightSink,
    MappedWeightSink,
    PrivateWeightSink,
    WeightSink,
)
from kvtrainer.common.progress import print_duration
from kvtrainer.errors import ConfigurationError, KVStoreError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.memory.row_sparse import NO_TABLES, Tables
from kvtrainer.ranks.host_reduce import HierarchicalReduce
from kvtrainer.states.surviving_memory import SurvivingVersions
from kvtrainer.sync.device_staging import Staging, StagingSink, StagingStream
from kvtrainer.sync.step_guard import StepGuard
from kvtrainer.types import Arenas

_log = logging.getLogger(__name__)

TABLE = "parameters"
_MIN_BORROWED = 128 << 10
"""Gradients of at least this many bytes are sent without a copy; copying a shorter one is faster."""


def keys_sent_without_copy(plan: Plan, keys: Iterable[int]) -> frozenset[int]:
    """Select the keys (by index) whose gradients are large enough to send without a copy."""
    nbytes = plan.key_nbytes
    return frozenset([key for key in keys if nbytes[key] >= _MIN_BORROWED])


class MissedRounds(NamedTuple):
    """What has become of the rounds that have ended without this worker."""

    first: int
    """The round that this worker gave a gradient to."""
    applied: int
    """The last round that was applied. The result says how it has ended; the weights are those after it."""
    client_states: Sequence[bytes]
    """What the latest commits have brought of a rank that has made most rounds."""


class RoundResult(NamedTuple):
    left_out: frozenset[int]
    """The keys (by index) that no worker contributed to."""
    skipped: bool
    """A worker vetoed: weights, gradients and optimizer state are as before, on every worker."""
    rows: Mapping[int, RowSet] | None = None
    """The scaled sums of keys that came only as rows from all workers; None if rows were not exchanged, or sums do not
    come back."""
    measured: Measured | None = None
    """The measures of the gradient that the store updated with, if it was asked for them."""
    decision: Decision = Decision()
    """The decision about that gradient."""
    written: Mapping[int, Tensor | None] = {}
    """Large key (by index) → ids of the rows that came from the store; None for all. Empty unless a gradient of this
    worker has been row-sparse."""
    missed: MissedRounds | None = None
    """The gradient of this worker came too late, and was not used; None: it was."""


class JoinedRound(NamedTuple):
    """The result of a round that this worker joined without data."""

    outcome: RoundResult
    hyper: bytes
    """The packed hyper-parameters of the workers that have data; empty if there were none."""
    is_over: bool
    """No worker has data, so there was no round."""


class Exchange(ABC):
    """The interface of what synchronises a Trainer: an engine, ranks, or a third-party store."""

    _num_workers: int
    updates_weights: bool = False
    """Whether the optimizer runs in the store."""
    is_sync: bool = True
    """Whether a round takes one contribution of every worker."""
    is_ours: bool = True
    """Whether it knows which keys all workers left out, and supports workers without data."""
    zero_copy_keys: frozenset[int] = frozenset()
    """Keys (by index) whose gradients may be sent without a copy."""
    shared_grads: SharedGradients | None = None
    """Gradients in the servers' memory; None if that is impossible."""
    refuses_rows: str = ""
    """Why gradients may not be row-sparse; empty if they may."""

    @property
    def num_workers(self) -> int:
        """How many workers take part in the next round."""
        return self._num_workers

    @property
    def num_counted(self) -> int:
        """The gradients of how many workers the next round takes."""
        return self.num_workers

    @abstractmethod
    def init(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        """Give every worker rank 0's weights, and the store rank 0's row-sparse ones."""

    @abstractmethod
    def run(self, contribution: Contribution, weights: Mapping[str, Tensor], step: StepGuard) -> RoundResult:
        """Run one round. New weights go to `weights`, or else sums of gradients to the values of the contribution.

        Args:
            contribution: Without tables. Its values are given also with a veto.
            step: Is told whether other workers may apply the round.
        """

    @abstractmethod
    def run_without_data(
        self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], client_state: bytes = b""
    ) -> JoinedRound:
        """Run one round to which this worker gives nothing; sums go to `grads`.

        When no worker has data any more, or if contributions count one by one, the store's weights go to `weights`.
        """

    @abstractmethod
    def assign(
        self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES, client_state: bytes = b""
    ) -> None:
        """Give every worker, and the store, rank 0's weights as they are now; optimizer state stays.

        Row-sparse keys change only if they are in rank 0's `tables`. `client_state` is as in a `Contribution`.
        """

    def stats(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        return None


class Looked(NamedTuple):
    weights: Arenas
    """Flat, laid out by the plan, on the CPU."""
    versions: Mapping[int, int]
    """Server → their version."""


class StoreExchange(Exchange):
    """Over the client of an engine, in this process or, if it `is_dist`, on servers.

    Slices are those of the Trainer's plan; the table's plan differs from it only in the servers.
    """

    def __init__(
        self,
        client: Client,
        plan: Plan,
        optimizer: Optimizer | None,
        codec: Codec | None = None,
        is_dist: bool = False,
        name: str = TABLE,
        pull_codec: Codec | None = None,
        host: HierarchicalReduce | None = None,
        resumes: bool = False,
    ) -> None:
        self._has_rows = False
        """Whether a gradient of this worker has been row-sparse."""
        # 1. The table on the servers.
        self.rank, self._num_workers = client.options.rank, client.options.num_workers
        self.updates_weights = optimizer is not None
        self.is_sync = client.options.mode.is_sync
        self.is_dist = is_dist
        self._client = client
        if optimizer is not None:
            client.set_optimizer(checked_optimizer_spec(optimizer))
        whole_keys = optimizer is not None and not optimizer.elementwise
        self._name = name
        takes_half = isinstance(pull_codec, BFloat16)
        [self._table] = client.register(
            {name: plan},
            whole_keys,
            allow_single_server=True,
            delta_codec=None if takes_half else pull_codec,
            resumes=resumes,
        )
        # 2. How gradients go there.
        if is_dist and self.updates_weights and codec is None:
            self.zero_copy_keys = keys_sent_without_copy(plan, plan.keys_alone)
        self._table.takes_half, self._pull_codec = takes_half, pull_codec
        if codec is not None:
            self._table.compressor = Compressor(codec, self._table.plan)
        # 3. How weights come back.
        self.rows = TableRowReads(client.rows, self._table)
        """Of row-sparse keys."""
        self._staging: Staging | None = None
        """Copies between the CUDA device with the weights and the host; made when it is needed."""
        self.sink: WeightSink = IN_PLACE
        """Where new weights arrive, if the store updates them."""
        self._looked_at: Looked | None = None
        """The weights of the store that were fetched to inspect them since the last round."""
        # 4. Workers of one host, and what this store cannot do.
        self._host: HierarchicalReduce | None = None
        """Sums gradients with other workers of this host before one of them gives the sum."""
        if host is not None and host.takes(plan):
            self._host, self.zero_copy_keys = host, frozenset()
        # Also with one worker: a script that works with one works with several.
        if optimizer is None and is_dist:
            self.refuses_rows = (
                "which needs update_on_kvstore=True with a dist kvstore: rows that other workers have cannot be summed "
                "here"
            )

    def map(self, weights: Mapping[str, Tensor]) -> None:
        """Map weights in the servers' memory, or in a file that rounds write; before `init`.

        Weights of an engine in this process are not mapped, because forked processes are to keep them as they were.
        Nor are tables without a long slice: to compare all of them takes no time. A CUDA device reads the servers'
        memory, if all servers are on this host.

        Args:
            weights: Flat, laid out by the plan, on the CPU in pages of their own.
        """
        self.rows.are_read = self.is_sync and self._client.shares_memory
        is_long = any([slice_.nbytes >= LONG for slice_ in self._table.plan.slices])
        if not (self.updates_weights and self.is_dist and is_long):
            return
        # With backup workers servers go on while this worker still computes with the weights.
        is_whole = self.is_sync and self._pull_codec is None and self._host is None and not self.has_backup
        if (staging := self._staging_of(weights)) is not None:
            self.sink = StagingSink(staging, maps=is_whole and self._client.shares_all_memory)
            return
        try:
            if is_whole and self._client.shares_memory:
                self.sink = MappedWeightSink(weights)
            else:
                self.sink = PrivateWeightSink(weights, self._table.plan)
        except OSError as error:
            _log.warning("weights are copied, not mapped: %s (zero_copy=False says so)", error)

    def allocate_shared_grads(self, keys: Collection[int], allocates: bool, gathers: bool) -> None:
        """Allocate gradient buffers in the servers' shared memory, if possible. Call before `init`.

        Args:
            keys: Those (by index) whose gradients may be used where they are.
            allocates: Whether large ones of these may be allocated there.
            gathers: Whether all others are gathered there, and not in the arena.
        """
        is_plain = self.is_dist and self.updates_weights and self._table.compressor is None
        if is_plain and self._host is None and self._client.shares_memory:
            keys, allocates = self.zero_copy_keys.intersection(keys), allocates and self.is_sync
            shared_grads = self._client.shared_gradients(self._table, keys, allocates, gathers)
            self.shared_grads = shared_grads if shared_grads.has_some else None

    def init(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        mine = self._open_sink(weights)
        with print_duration("weights go to servers", self._table.plan.nbytes):
            self._client.rounds.initialise(self._of_rank_0(mine, tables, self.sink.outs(weights)))
        self._check_mapped(mine)
        self.sink.deliver(weights, self.sink.outs(weights))

    def _open_sink(self, weights: Arenas) -> Arenas:
        """Decide where weights arrive that are not mapped; return the weights on the host."""
        mine = self._copy_to_host(weights)
        if self.sink is IN_PLACE and self._staging is not None:
            self.sink = StagingSink(self._staging, maps=False)
        elif self.sink is IN_PLACE and self.updates_weights and not self.is_sync:
            self.sink = CopyWeightSink(weights)
        return mine

    @property
    def num_workers(self) -> int:
        return len(self.members)

    @property
    def num_counted(self) -> int:
        return self.num_workers if self._table.view is None else self._table.view.counted

    @property
    def has_backup(self) -> bool:
        """Whether a round may end without this worker."""
        return self._client.options.backup_workers > 0

    @property
    def members(self) -> Sequence[int]:
        """The ranks that take part in the next round, ascending."""
        return range(self._num_workers) if self._table.view is None else self._table.view.ranks

    @property
    def are_members_fixed(self) -> bool:
        return self._table.view is None

    def leave_rounds(self) -> None:
        """Have the other workers go on without this one; blocks. Raises as `Client.leave_rounds`."""
        self._client.leave_rounds(self._table)

    @property
    def takeover(self) -> Takeover | None:
        """What an earlier process of this rank has done; None if there was none, or this one does not resume."""
        return self._table.takeover

    def resume(
        self, weights: Mapping[str, Tensor], guard: Guard | None, joined: bool = False
    ) -> RoundResult | None:
        """Take the place of an earlier process of this rank, instead of `init`; blocks.

        Returns how its last round ended, after waiting for that: its weights, or the sum if workers update, are in
        `weights`. None if that changed
        nothing because all workers had joined, or if this process has to repeat a round, because not all servers have
        its commit; `weights` are then those before it. In asynchronous modes they are the present ones. There is no
        `takeover` any more if that round is the first one, so `init` has to follow.

        Args:
            guard: As in every round of this Trainer.
            joined: The earlier process had no more data in its last round.

        Raises:
            WorkerLostError: The round has to be repeated, and a server does not have the weights before it any more.
        """
        mine, takeover = self._open_sink(weights), self._table.takeover
        assert takeover is not None
        rounds, out, outcome = self._client.rounds, self.sink.outs(weights), None
        # 0. With backup workers the others do not wait for this one, so it goes on where they are.
        if self.has_backup:
            followed = rounds.follow(Contribution([self._table], None, [out], sink=self.sink), takeover.first)
            result = self._result_of_late(followed, takeover.first, weights, out)
            assert result.missed is not None
            states = {-1: result.missed.client_states}
            self._table.takeover = Takeover(dict.fromkeys(takeover.committed, result.missed.applied), states)
            return result
        # 1. The commit of the earlier process counts. To commit again only asks for its answer.
        round_, is_whole = None, self.is_sync and not takeover.is_partial
        if is_whole:
            again = Contribution([self._table], None, [out], guard=guard, sink=self.sink, joined=joined)
            round_ = rounds.repeat_commit(again)
        if round_ is not None:
            _, decision = round_.decided.get(self._name, (None, Decision()))
            left_out = frozenset(round_.absent.get(self._name, ()))
            is_over = joined and round_.in_force[self._name].is_over
            outcome = RoundResult(left_out, self._name in round_.vetoes or is_over, None, None, decision)
            if outcome.skipped:
                rounds.pull([self._table], [out])  # no weights came with the answer
            outcome = None if is_over else outcome
        # 2. Otherwise the round is repeated from the weights before it.
        elif is_whole:
            self._table.lose_commit()
        if round_ is None and self._table.takeover is not None:
            if self.is_sync:
                self._table.repeat()
            rounds.pull([self._table], [out], self._table.round if self.is_sync else -1)
        self._check_mapped(mine)
        self.sink.deliver(weights, self.sink.outs(weights))
        if not self.sink.maps:
            self.sink.attach()
        return outcome

    def _check_mapped(self, places: Mapping[str, Tensor]) -> None:
        if self.sink.problem is not None:
            _log.warning("weights are copied from now on, not mapped: %s", self.sink.problem)
            self.sink.release()
            self._client.rounds.pull([self._table], [places])

    def _report_inconsistent(self, error: BaseException) -> None:
        """Add to an error the parameters whose weights here are of another round than the others'."""
        keys = self.keys_of(self.sink.roll_back())
        if keys and isinstance(error, KVStoreError):
            names = [self._table.plan.specs[key].key for key in sorted(keys)]
            error.args = (
                f"{error}. The weights here are of two rounds, for servers have begun to write those of {len(names)} "
                f"parameters: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}; go on from saved states, or "
                "have weights that stay whole by zero_copy=False",
            )

    def keys_of(self, slices: Collection[int]) -> set[int]:
        return {segment.key for at in slices for segment in self._table.plan.slices[at].segments}

    def run(self, contribution: Contribution, weights: Mapping[str, Tensor], step: StepGuard) -> RoundResult:
        """Send gradients, and write new weights to `weights`, or sums to the gradients; blocks until the round ends.

        Args:
            contribution: Values as arenas, on the device or the host; without tables, which are filled in here.
            weights: Arenas, by dtype.
            step: Is told that other workers may apply the round, and whether that is known not to have happened.

        Raises:
            KVStoreError: As `Rounds.wait`; says which weights here are of two rounds, if any.
        """
        self._forget_read()
        assert contribution.values is not None
        [arenas] = contribution.values
        # 1. Gradients on the host, and where the result goes.
        target = weights if self.updates_weights else arenas
        if self._staging is not None:
            contribution = self._from_device(self._staging, contribution)
        out = self.sink.outs(target)
        # 2. Rows.
        specs = self._table.plan.specs
        rows: dict[tuple[int, int], RowSet] = {}
        unsent = unread = frozenset[int]()
        if contribution.rows and self.updates_weights:
            # Only with rows is it worth while that servers track what has changed.
            self._has_rows = True
            for place, (ids, values) in contribution.rows.items():
                dtype = torch_dtype(specs[place[1]].dtype)  # the sum of replicas may have come in a wider one
                rows[place] = RowSet(ids.cpu(), values.to("cpu", dtype))
        elif contribution.rows:
            # Rows of a single worker are their own sum.
            unsent = frozenset([key for _, key in contribution.rows])
            unread = unsent & self._table.plan.keys_alone
        contribution = contribution._replace(
            tables=[self._table], values=None if contribution.veto else contribution.values, outs=[out],
            absent=contribution.absent | unsent, rows=rows, unread=unread, sink=self.sink,
            is_incremental=self._has_rows and self.updates_weights and self.sink.holds_all,
        )  # fmt: skip
        # 3. The round. From here on other workers may apply it, unless it is known to have failed.
        number = self._table.round
        step.sent()
        try:
            given = contribution if self._host is None else self._host.before(contribution)
            round_ = self._run_round(given, out)
            if self._host is not None:
                self._host.after(contribution, round_)
        except BaseException as error:
            self._table.forget_held()  # all weights have to come again
            self._report_inconsistent(error)
            is_open = self._table.index in self._client.rounds.open  # interrupted as it ended
            step.sent(may_be_applied=is_open or self._table.stands(number))
            raise
        # 4. The result.
        if round_.is_late:
            return self._result_of_late(round_, number, target, out)
        self._check_mapped(out)
        if self.shared_grads is not None and self.shared_grads.is_coming:
            former = self.shared_grads.memory
            self.shared_grads.open()
            if self._staging is not None and self.shared_grads.memory.data_ptr() != former.data_ptr():
                self._staging.unpin(former)  # shared with a server that was restarted
        measured, decision = round_.decided.get(self._name, (None, Decision()))
        if self._name in round_.vetoes:
            return RoundResult(frozenset(), True, None, measured, decision)
        self.sink.deliver(target, out)
        for key in unsent - unread:
            # What came for these is the value of a key that all left out, not a sum.
            at = self._table.plan.key_offsets[key]
            arenas[specs[key].dtype][at : at + specs[key].numel].zero_()
        left_out = frozenset(round_.absent.get(self._name, ())) - unsent
        written = {key: ids for (_, key), ids in round_.written().items()} if round_.rows else {}
        return RoundResult(left_out, False, None, measured, decision, written)

    def _run_round(self, contribution: Contribution, out: Arenas) -> Round:
        """Run a round, and return it. If it has failed before it was known whether this worker counts, its gradient is
        dropped: others may have changed the weights that it was computed with.
        """
        rounds, number = self._client.rounds, self._table.round
        if not self.has_backup:
            return rounds.run(contribution)
        round_ = rounds.start(contribution)
        try:
            rounds.wait(round_)
        except RepeatedRoundError as error:
            if not round_.needs_closing or self.is_broken:
                raise
            _log.warning("the gradient of this worker is dropped: %s", error)
            return rounds.follow(Contribution([self._table], None, [out], sink=self.sink), number)
        return round_

    def _result_of_late(self, round_: Round, number: int, target: Arenas, out: Arenas) -> RoundResult:
        """Deliver the weights that came instead of those after a round, and return what has happened meanwhile."""
        told = round_.left_out.values()
        [applied] = {one.applied for one in told}
        self.sink.deliver(target, out)
        if not self.sink.maps:
            self.sink.attach()
        left_out = frozenset([key for one in told for key in one.absent])
        missed = MissedRounds(number, applied, round_.left_out[round_.coordinator].client_states)
        return RoundResult(left_out, any(one.is_skipped for one in told), missed=missed)

    @property
    def plan(self) -> Plan:
        return self._table.plan

    @property
    def is_broken(self) -> bool:
        """Whether servers may not agree on the last round, so that there are no others."""
        return self._table.broken is not None

    @property
    def round(self) -> int:
        """The number of the table's next round."""
        return self._table.round

    def push_eagerly(
        self, slice_: Slice, parts: Sequence[Tensor], predict_hypers: Callable[[], bytes]
    ) -> None:
        self._client.rounds.push_eagerly(self._table, slice_, parts, predict_hypers)

    def run_without_data(
        self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], client_state: bytes = b""
    ) -> JoinedRound:
        """Take part in a round of the others without gradients; blocks until it has ended.

        Sums are written to `grads`, or new weights to `weights`, in synchronous rounds only at the end of joining.
        """
        self._forget_read()
        if self._staging is not None:
            self._staging.wait()  # servers write weights that the device may still read once this worker takes part
        # In synchronous rounds the weights of the others' rounds are not needed before the last one.
        target = grads if not self.updates_weights else None if self.is_sync else weights
        out = (
            None
            if target is None
            else self.sink.outs(target)
            if self.updates_weights
            else self._copy_to_host(target)
        )
        outs = None if out is None else [out]
        contribution = Contribution([self._table], None, outs, joined=True, client_state=client_state)
        if self._host is not None:
            self._host.before(contribution)  # tell the other workers of this host that this one gives nothing
        round_ = self._client.rounds.start(contribution)
        self._client.rounds.wait(round_)
        said = round_.in_force[self._name]
        if target is not None and out is not None:
            self.sink.deliver(target, out)
        if said.is_over and self.updates_weights and self.is_sync:
            mine = self.sink.outs(weights)
            self._client.rounds.pull([self._table], [mine])
            self.sink.deliver(weights, mine)
        if not self.sink.maps:
            self.sink.attach()  # pages that were written with the bytes that they had
        outcome = RoundResult(frozenset(round_.absent.get(self._name, ())), self._name in round_.vetoes)
        return JoinedRound(outcome, said.hyper, said.is_over)

    def adopt_assigned(self, weights: Mapping[str, Tensor]) -> None:
        """Read what an `assign` has left in which an earlier process of this rank took part."""
        self._forget_read()
        mine = self._copy_to_host(weights)
        # If the next round is to be repeated, some servers may have applied it already.
        repeated = self._table.round if self._table.is_repeated else -1
        self._client.rounds.pull([self._table], [self.sink.outs(weights)], repeated)
        self._check_mapped(mine)
        self.sink.attach()
        self.sink.deliver(weights, self.sink.outs(weights))

    def assign(
        self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES, client_state: bytes = b""
    ) -> None:
        """Give all workers rank 0's weights and row-sparse `tables`, as a round of its own; blocks until all have them.

        Every worker calls it. In the asynchronous modes barriers keep contributions of other workers out.
        """
        self._forget_read()
        mine = self._copy_to_host(weights)
        rounds = self._client.rounds
        if self.is_sync:
            contribution = self._of_rank_0(mine, tables, self.sink.outs(weights), assign=True)
            contribution = contribution._replace(client_state=client_state)
            try:
                if self._host is not None:
                    # As in `run_without_data`; a call that is not the others' fails on servers.
                    self._host.before(contribution)
                rounds.wait(rounds.start(contribution))
            except BaseException:
                self._table.forget_held()
                raise
            self._check_mapped(mine)
        else:
            # Contributions count one by one: none may come in between, and no worker may read before.
            self._client.barrier()
            if self._is_first:
                rounds.wait(rounds.start(self._of_rank_0(mine, tables, None, assign=True)))
            self._client.barrier()
            rounds.pull([self._table], [self.sink.outs(weights)])
        self.sink.attach()
        self.sink.deliver(weights, self.sink.outs(weights))

    def look(self) -> Arenas:
        """Fetch the store's present weights, laid out by the plan, on the CPU; this worker's own stay."""
        held = self._table.new_arenas()
        self._looked_at = Looked(held, self._client.rounds.read(self._table, held))
        return held

    def looked_at(self) -> Arenas:
        """Return the weights fetched by `look` since the last round; fetches them if there are none."""
        return self.look() if self._looked_at is None else self._looked_at.weights

    def given(self, weights: Arenas) -> Arenas:
        """Return the weights as they came from the store last, laid out by the plan, on the CPU; not to be changed.

        In synchronous rounds without backup workers the store still has them. `weights` are those of `init`, perhaps
        written since.
        """
        if (self.is_sync and not self.has_backup) or not self.is_dist:
            return self.look()
        return self.sink.outs(weights)

    def accept(self, weights: Arenas, are_looked_at: bool) -> None:
        """Take the present weights for what came from the store.

        If they are those that `look` fetched last, this worker computes with these now.
        """
        if are_looked_at and self._looked_at is not None:
            for server, version in self._looked_at.versions.items():
                self._table.record_version(server, version)
        self.sink.accept(weights)
        if not self.is_sync:
            self._copy_to_host(weights)

    def _forget_read(self) -> None:
        self._looked_at = None
        if self.rows.wanted:
            self.rows.drop()

    def get_states(self, slices: Sequence[Slice], since: Sequence[int]) -> Iterator[States]:
        own = [self._table.plan.slices[slice_.index] for slice_ in slices]
        return self._client.get_states(self._table, own, since)

    def put_state(self, slice_: Slice, state: States) -> None:
        self._client.put_state(self._table, self._table.plan.slices[slice_.index], state)

    @property
    def version(self) -> int:
        return max(self._table.versions.values(), default=-1)

    @property
    def staleness(self) -> int:
        return self._table.staleness

    def residuals(self) -> dict[int, Tensor]:
        compressor = self._table.compressor
        return {} if compressor is None else compressor.residuals()

    def set_residuals(self, residuals: Mapping[int, Tensor]) -> None:
        compressor = self._table.compressor
        if compressor is not None:
            compressor.set_residuals(residuals)
            if compressor.survivors is not None:
                compressor.begin_to_store(compressor.survivors, self._table.round)

    def let_residuals_survive(self, survivors: SurvivingVersions, counts: bool | None) -> bool:
        """Store residuals where they outlive this process, or go on with those that an earlier one has stored.

        Args:
            counts: Whether the last round of the earlier process has changed anything; None: there is no such process.

        Returns whether those of the earlier process were found, if there was one.
        """
        compressor = self._table.compressor
        if compressor is None:
            return True
        if counts is None:
            compressor.begin_to_store(survivors, self._table.round)
            return True
        found = survivors.find(self._table.round, counts)
        if found is not None:
            compressor.go_on_with(survivors, found)
        return found is not None

    def stats(self) -> list[dict[str, Any]]:
        return self._client.stats()

    def close(self) -> None:
        self._client.rounds.forget(self._table)
        if self._staging is not None:
            self._staging.close()

    def _staging_of(self, arenas: Arenas) -> Staging | None:
        """Return the staging for the CUDA device that tensors are on; None if they are on the host."""
        flat = next(iter(arenas.values()), None)
        if flat is None or flat.is_cpu:
            return None
        if self._staging is None:
            self._staging = Staging(StagingStream(flat.device))
        return self._staging

    def _copy_to_host(self, arenas: Arenas) -> Arenas:
        staging = self._staging_of(arenas)
        return arenas if staging is None else staging.down(arenas)

    def _from_device(self, staging: Staging, contribution: Contribution) -> Contribution:
        """Copy gradients from a CUDA device to the host, large ones to the servers' memory if there is a place for
        them.
        """
        assert contribution.values is not None
        [arenas] = contribution.values
        if self.shared_grads is None or contribution.veto:
            return contribution._replace(values=[staging.down(arenas)])
        borrowed = self.shared_grads.places(contribution.absent.union([key for _, key in contribution.rows]))
        if borrowed:
            staging.pin(self.shared_grads.memory)
        places: dict[str, list[tuple[int, Tensor]]] = {}
        for key, place in borrowed.items():
            places.setdefault(self.plan.specs[key].dtype, []).append((self.plan.key_offsets[key], place))
        values = [staging.down(arenas, places)]
        shared_grads = self.shared_grads.in_place(borrowed, are_gathered=False)
        return contribution._replace(values=values, borrowed=borrowed, shared_grads=shared_grads)

    @property
    def _is_first(self) -> bool:
        """Whether this rank's values are those that every worker gets."""
        return self.rank == self.members[0]

    def _of_rank_0(
        self,
        mine: Mapping[str, Tensor],
        tables: Tables,
        out: Mapping[str, Tensor] | None,
        assign: bool = False,
    ) -> Contribution:
        plan = self._table.plan
        given = (
            {key: _interleave_rows(plan, key, make()) for key, make in tables.items()}
            if self._is_first
            else {}
        )
        is_incremental = self.updates_weights and self._has_rows and out is not None and self.sink.holds_all
        values, outs = [mine] if self._is_first else None, None if out is None else [out]
        return Contribution(
            [self._table],
            values,
            outs,
            assign=assign,
            sources=given,
            is_incremental=is_incremental,
            sink=self.sink,
        )


def _interleave_rows(plan: Plan, key: int, source: Source) -> Source:
    """Return a source of a key's values in the order of its slices, over which rows are interleaved."""
    [deal] = plan.rows(key).round_robins
    if deal.is_plain:
        return source
    width = row_numel(plan.specs[key])
    table = source(0, plan.specs[key].numel).view(-1, width)

    def values(start: int, numel: int) -> Tensor:
        rows = deal.rows(np.arange(start // width, (start + numel) // width))
        return table.index_select(0, torch.from_numpy(rows)).view(-1)

    return values


class PluginExchange(Exchange):
    """Over a third-party store: `broadcast` and `pushpull` for each parameter; the Trainer updates."""

    is_ours = False

    def __init__(self, store: KVStoreBase, plan: Plan) -> None:
        self._num_workers = store.num_workers
        self._store = store
        self._plan = plan
        self.refuses_rows = (
            f"but kvstore {store.type!r} sums dense gradients only; build the module with sparse=False"
        )

    def init(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        for key, piece in enumerate(self._views_of_keys(weights)):
            self._store.broadcast(key, piece, piece)

    def run(self, contribution: Contribution, weights: Mapping[str, Tensor], step: StepGuard) -> RoundResult:
        step.sent()
        [arenas] = contribution.values or ()
        for key, piece in enumerate(self._views_of_keys(arenas)):
            if contribution.scale != 1.0:
                piece.mul_(contribution.scale)
            if contribution.veto:
                piece.fill_(math.inf)  # a sum is all that such a store has: this one tells every worker
            self._store.pushpull(key, piece, piece, priority=-key)
        # What one of several workers left out is zero in the sum. Other workers see a veto in the sums.
        left_out = contribution.absent if self.num_workers == 1 else frozenset[int]()
        return RoundResult(left_out, skipped=contribution.veto)

    def run_without_data(
        self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], client_state: bytes = b""
    ) -> JoinedRound:
        raise ConfigurationError(f"kvstore {self._store.type!r} does not know workers without data")

    def assign(
        self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES, client_state: bytes = b""
    ) -> None:
        for key, piece in enumerate(self._views_of_keys(weights)):
            if self._store.rank != 0:
                piece.zero_()
            self._store.pushpull(key, piece, piece, priority=-key)

    def _views_of_keys(self, arenas: Mapping[str, Tensor]) -> Sequence[Tensor]:
        rows = zip(self._plan.specs, self._plan.key_offsets, strict=True)
        return [arenas[spec.dtype][at : at + spec.numel].view(spec.shape) for spec, at in rows]
