"""What the rounds of a table do to its weights: values that replace them, and updates.

Which contributions make a round, and who is answered, is the business of `table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore_server.addends import keys_in, slowed_down
from kvstore_server.consistency import Contribution
from kvstore_server.errors import (
    ConfigurationError,
    KeyNotFoundError,
    KVStoreError,
    OptimizerError,
    PlanMismatchError,
    ProtocolError,
)
from kvstore_server.hyper import HyperBelief
from kvstore_server.lanes import Lanes
from kvstore_server.modes import Mode
from kvstore_server.norms import UNCHANGED, Decision
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import Plan
from kvstore_server.protocol.messages import Commit
from kvstore_server.reduction import Contribution as Summand
from kvstore_server.reduction import same_payload
from kvstore_server.shard import HeldSum, Leases, Partial, Shard, Updater


class Waiter(NamedTuple):
    """The request that is answered when a round is over."""

    peer: bytes
    number: int


class RoundEnd(NamedTuple):
    """How the last round of a rank ended that was applied."""

    version: int
    left_out: tuple[int, ...] = ()
    """The keys here that no rank contributed to."""
    vetoes: tuple[int, ...] = ()
    """The ranks because of which nothing was changed."""
    hyper: bytes = b""
    """The hyper-parameters in force, as they were sent."""
    is_over: bool = False
    """All ranks have joined."""
    partials: tuple[Partial, ...] = ()
    """What was told of the sums before they were used."""
    decision: Decision = Decision()
    """What became of them."""

    @property
    def is_skipped(self) -> bool:
        """Whether nothing was changed, though the ranks have contributed."""
        return bool(self.vetoes) or self.decision.skip


@dataclass(frozen=True)
class HeldRound:
    """The open round once all ranks have committed it, while its sums wait for a decision."""

    optimizer: Optimizer
    hyper: bytes
    hypers: Sequence[Mapping[str, Any]]
    sum: HeldSum


Given = list[tuple[int, Contribution[Waiter]]]
"""Contributions that are committed, with their ranks, in rank order."""


class TableValues:
    """The weights of a table on one server, with what its ranks believe and have read."""

    def __init__(
        self, name: str, plan: Plan, server: int, num_workers: int, leases: Leases | None, mode: Mode
    ) -> None:
        self.name = name
        self.plan = plan
        self.mode = mode
        self._is_sync = mode.is_sync
        self.num_workers = num_workers
        self.shard = Shard(leases)
        self.unit = self.shard.add(plan, server)
        self.lanes: Lanes[Waiter] = Lanes(num_workers, mode.bound, same_payload)
        self.notes_reads = False
        """Whether the optimizer needs to know what each rank has read."""
        self.hyper = HyperBelief(plan)
        self.absent: dict[int, frozenset[int]] = {}
        """What each rank leaves out of the open round."""
        self.conflict: KVStoreError | None = None
        """Why the table cannot be used any more: ranks declared different keys, or an update broke off."""
        self.held: HeldRound | None = None
        self.is_initialised = False
        """Whether round 0 was applied."""
        self.version = -1
        """How often the weights have changed since their first values."""
        self.rounds_applied = 0
        self.keys_applied = 0

    def _lowest(self) -> bytes:
        """The hyper-parameters of the lowest rank that has data; of the lowest, where none has."""
        return self.hyper.lowest(self.lanes.joined | self.lanes.left)

    def _apply(
        self,
        number: int,
        given: Given,
        optimizer: Optimizer | None,
        updater: Updater | None,
        is_lane: bool,
    ) -> RoundEnd:
        """The effect of a round on the weights, and how it ends; ranks that have joined are not among the given."""
        commits: dict[int, Commit] = {}
        vetoes: list[int] = []
        is_assigned = number == 0
        for rank, mine in given:  # in one go: there may be thousands of small tables
            if mine.commit is not None:
                commits[rank] = mine.commit
                is_assigned = is_assigned or mine.commit.assign
                if mine.commit.veto:
                    vetoes.append(rank)
        if not commits:
            return RoundEnd(self.version, hyper=self._lowest() if is_lane else b"")
        if is_assigned:
            self._assign(number, given, is_lane)
            return RoundEnd(self.version)
        if not self.is_initialised:
            raise KeyNotFoundError(
                f"table {self.name!r} has no values: initialising it failed; restart the job"
            )
        if vetoes:
            return RoundEnd(self.version, (), tuple(vetoes))
        hyper = self._lowest() if is_lane else self.hyper.common(commits)
        summands = self._summands(given, optimizer)
        if updater is not None:
            self.shard.call_updater(self.unit, summands, updater)
        elif optimizer is not None:
            hypers = self._hypers(summands, optimizer, hyper, given if is_lane else None)
            self._update(summands, optimizer, hypers)
        elif not self.mode.is_sync:
            raise ConfigurationError(
                f"{self.name!r} got a contribution in {self.mode.name} mode but has no optimizer to apply it; call "
                "set_optimizer on every worker before the first push"
            )
        else:
            self.shard.assign_sum(summands)
        return self._applied(summands, hyper)

    def _hold(self, given: Given, optimizer: Optimizer, norm_type: float) -> HeldRound:
        """Sum what ranks that have not joined gave, and keep that; the weights are as before."""
        commits = {rank: mine.commit for rank, mine in given if mine.commit is not None}
        hyper = self.hyper.common(commits)
        summands = self._summands(given, optimizer)
        hypers = self._hypers(summands, optimizer, hyper, None)
        held = self.shard.hold(summands, optimizer, hypers, norm_type, self.unit)
        return HeldRound(optimizer, hyper, hypers, held)

    def _apply_held(self, held: HeldRound, decision: Decision) -> RoundEnd:
        """Update with the sums that were kept, as was decided."""
        if decision.skip:
            return RoundEnd(self.version, partials=held.sum.partials, decision=decision)
        summands = [held.sum.total]
        self._update(summands, held.optimizer, held.hypers, decision)
        end = self._applied(summands, held.hyper)
        return end._replace(partials=held.sum.partials, decision=decision)

    def _summands(self, given: Given, optimizer: Optimizer | None) -> list[Summand]:
        """Each rank's part in the sum; without a factor of its own that of the optimizer counts."""
        found = []
        for rank, mine in given:
            assert mine.commit is not None
            scale = mine.commit.rescale
            if scale is None:
                scale = optimizer.rescale_grad if optimizer is not None else 1.0
            payloads: dict[int, Any] = {s: payload for s, (_, payload) in mine.slices.items()}
            absent = self.absent.get(rank, frozenset())
            found.append(self.shard.contribution(self.unit, payloads, scale, absent))
        return found

    def _applied(self, summands: Sequence[Summand], hyper: bytes) -> RoundEnd:
        """Count a round that has changed the weights."""
        keys = keys_in(summands, self.unit.keys)
        self.version += 1
        self.rounds_applied += 1
        self.keys_applied += len(keys)
        left_out = () if keys is self.unit.keys else tuple(sorted(self.unit.keys - keys))
        return RoundEnd(self.version, left_out, (), hyper)

    def _assign(self, number: int, given: Given, is_lane: bool) -> None:
        """Take over the lowest rank's values, in the first round and wherever all ranks want that."""
        rank, first = given[0]
        updating = [r for r, mine in given if mine.commit is not None and not mine.commit.assign]
        if is_lane and not first.slices:
            return  # another rank gives the values
        if number and not is_lane and len(given) < self.num_workers:
            raise PlanMismatchError(
                f"ranks replace the values of {self.name!r} while another one has no more data; call set_data outside "
                "of the join() block"
            )
        if number and updating:
            raise PlanMismatchError(
                f"rank {updating[0]} updates {self.name!r} in a round in which other ranks replace its values; "
                "call set_data, or add_param_group, before the same step on every worker"
            )
        # A row-sparse key has its values here alone: they may stay.
        needed = self.plan.resident_slices_of(self.unit.server) if number else self.unit.slices
        missing = [piece.index for piece in needed if piece.index not in first.slices]
        if missing:
            raise ProtocolError(
                f"rank {rank} gave table {self.name!r} values without its slices {missing[:8]}"
            )
        values: dict[int, Any] = {s: payload for s, (_, payload) in first.slices.items()}
        self.shard.assign(self.unit, values)
        self.is_initialised = True
        self.version += 1
        if self.notes_reads:
            self.shard.note_read(self.unit, range(self.num_workers))

    def _hypers(
        self, summands: Sequence[Summand], optimizer: Optimizer, hyper: bytes, alone: Given | None
    ) -> Sequence[Mapping[str, Any]]:
        """The numbers with which the optimizer updates each key by a sum, or by what one rank gave `alone`."""
        if not optimizer.elementwise and not self.plan.whole_keys and len(self.plan.servers) > 1:
            raise ConfigurationError(
                f"optimizer {optimizer.registered_name!r} needs whole keys, but {self.name!r} is spread over "
                f"{len(self.plan.servers)} servers; set the optimizer on every worker before the next push"
            )
        hypers: Sequence[Mapping[str, Any]]
        hypers = self.hyper.effective(optimizer, hyper, self._scheduled_rate(optimizer, summands))
        if alone is not None:
            [(rank, mine)] = alone
            if self.notes_reads and optimizer.delay_state is not None:
                self.shard.restore_read(self.unit, rank, optimizer.delay_state)
            if self.mode.slow_down and mine.commit is not None:
                hypers = slowed_down(hypers, self.staleness(mine.commit))
        return hypers

    def _update(
        self,
        summands: Sequence[Summand],
        optimizer: Optimizer,
        hypers: Sequence[Mapping[str, Any]],
        decision: Decision = UNCHANGED,
    ) -> None:
        """Let the optimizer apply the sum of what was given."""
        try:
            self.shard.update(summands, optimizer, [hypers], decision=decision)
        except OptimizerError:
            raise  # has been undone
        except Exception as error:
            # No copy is kept for the built-in optimizers: the table must not be trained on as if nothing had happened.
            self.conflict = KVStoreError(
                f"the update of {self.name!r} broke off with {type(error).__name__}: {error}; its weights may be half "
                "updated. Restart the job from its last saved states"
            )
            raise self.conflict from error

    def staleness(self, commit: Commit) -> int:
        """How many updates came between the weights that a contribution was computed with and now."""
        return self.version - commit.version if commit.version >= 0 else 0

    def _scheduled_rate(self, optimizer: Optimizer, summands: Sequence[Summand]) -> float | None:
        """The learning rate that the optimizer's scheduler gives for this update of the table; None without one.

        Each table counts for itself, so that neither other keys nor the number of servers matter.
        """
        if optimizer.lr_scheduler is None:
            return None
        updates = self.shard.updates_after(self.unit, summands)
        return float(optimizer.lr_scheduler(optimizer.begin_num_update + updates))
