"""One table of one namespace: its rounds, its weights and what its ranks believe, tied together.

A table takes messages of known ranks and says whom to answer; sessions, sockets and the clock are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstore_server.addends import addend_of, keys_in, slowed_down
from kvstore_server.codec import Codec
from kvstore_server.consistency import Contribution, SyncRounds
from kvstore_server.delayed_reads import DelayedReads
from kvstore_server.dense import DenseTable, Leases, Updater
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
from kvstore_server.modes import SYNCHRONOUS, Mode
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import Plan
from kvstore_server.protocol.buffers import payload_size
from kvstore_server.protocol.messages import Commit, Push
from kvstore_server.reduction import Addend, same_payload
from kvstore_server.row_payload import RowForm


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


Given = list[tuple[int, Contribution[Waiter]]]
"""Contributions that are committed, with their ranks, in rank order."""


class Table:
    """A table and the state of its rounds on one server."""

    def __init__(
        self,
        number: int,
        name: str,
        plan: Plan,
        server: int,
        num_workers: int,
        leases: Leases | None,
        mode: Mode = SYNCHRONOUS,
    ) -> None:
        self.number = number
        self.name = name
        self.plan = plan
        self.mode = mode
        self.dense = DenseTable(plan, server, leases)
        self.rounds: SyncRounds[Waiter] = SyncRounds(num_workers, same_payload)
        """Those of all ranks together; without synchronous rounds, only the first one, which gives the first values."""
        self.lanes: Lanes[Waiter] = Lanes(num_workers, mode.bound, same_payload)
        self.delayed = DelayedReads(self.dense)
        self.notes_reads = False
        """Whether the optimizer needs to know what each rank has read."""
        self.hyper = HyperBelief(plan)
        self.absent: dict[int, frozenset[int]] = {}
        """What each rank leaves out of the open round."""
        self.conflict: KVStoreError | None = None
        """Why the table cannot be used any more: ranks declared different keys, or an update broke off."""
        self.is_initialised = False
        """Whether round 0 was applied."""
        self.version = -1
        """How often the weights have changed since their first values."""
        self.rounds_applied = 0
        self.keys_applied = 0
        self.undone = 0
        self.bytes_in = 0
        """Bytes of payload that ranks have sent, as they came: compressed, or rows alone."""
        self.bytes_out = 0
        """Bytes of weights that were handed out."""
        self._ends: dict[int, RoundEnd] = {}
        self._last_rank = -1
        """Whose contribution was applied last, where ranks contribute by themselves."""

    def rounds_of(self, rank: int, number: int = -1) -> SyncRounds[Waiter]:
        """The rounds of which a rank means that number, or its present one: those of all ranks, or its lane."""
        return self.rounds if self._whose(rank, number) == _ALL else self.lanes.of(rank, number)

    def next_round(self, rank: int) -> int:
        """The number of the round that a rank should begin with."""
        return self.rounds.number if self._whose(rank, -1) == _ALL else self.lanes.proposed(rank)

    def end_of(self, rank: int, number: int = -1) -> RoundEnd:
        """How the last round that was applied has ended, of those of which a rank means that number."""
        return self._ends[self._whose(rank, number)]

    def push(self, rank: int, push: Push, form: Codec | RowForm | None) -> None:
        """Take a provisional slice, in a form other than plain numbers if there is one, after checking that it fits."""
        payload = self.dense.check_payload(push.slice, push.payload, form)
        self.bytes_in += payload_size(push.payload)
        rounds = self.rounds_of(rank, push.round)
        if push.round == rounds.number and self._last_rank in (_ALL, rank):
            self.dense.forget_undo()
        rounds.push(rank, Push(push.table, push.slice, push.round, push.generation, payload))

    def apply(self, rank: int, optimizer: Optimizer | None, updater: Updater | None) -> Given:
        """Apply the open round of a rank, which all of its members have committed, and begin the next one.

        Returns the contributions that went in, in rank order.

        Raises:
            KVStoreError: the round cannot be applied; nothing has changed and the round is still open.
        """
        rounds = self.rounds_of(rank)
        is_lane = rounds is not self.rounds
        given = rounds.contributions()
        self.dense.forget_undo()
        active = [(r, mine) for r, mine in given if mine.commit is not None and not mine.commit.joined]
        end = self._apply(rounds.number, active, optimizer, updater, is_lane)
        self._ends[rank if is_lane else _ALL] = end._replace(is_over=not active)
        self._last_rank = rank if is_lane else _ALL
        for r, _ in given:
            self.absent.pop(r, None)
        if is_lane:
            self.lanes.advance(rank)
        return rounds.finish()

    def fail(self, rank: int, error: KVStoreError) -> list[Waiter]:
        """End the open round of a rank without effect; return whom to tell now."""
        rounds = self.rounds_of(rank)
        for r, _ in rounds.contributions():
            self.absent.pop(r, None)
        if rounds is not self.rounds:
            self.lanes.advance(rank)
        if self._last_rank in (_ALL, rank):
            self.dense.forget_undo()
        return rounds.fail(error)

    def abort(self, rank: int, number: int, error: KVStoreError, undo: bool) -> list[Waiter]:
        """A rank gives a round up: fail it if it is open, take it back if that is wanted and it was the last one."""
        rounds, whose = self.rounds_of(rank, number), self._whose(rank, number)
        if number == rounds.number:
            return self.fail(rank, error)
        is_last = number == rounds.number - 1 and rounds.was_applied(number)
        if not undo or not is_last:
            return []
        end = self._ends[whose]
        has_changed = not end.vetoes and not end.is_over
        if not has_changed or (self.dense.can_undo and self._last_rank == whose):
            if has_changed:
                self.dense.undo()
                self.version += 1  # also the way back is a change
            rounds.undo(error)
            self.undone += 1
        return []

    def fail_join(self, rank: int, number: int, error: KVStoreError) -> None:
        """A rank that waits for all to join will not see that: it takes part as before, and its joining has failed."""
        self.lanes.joined.discard(rank)
        lane = self.lanes.of(rank)
        if number == lane.number - 1:
            lane.undo(error)

    def note_read(self, rank: int) -> None:
        """The present weights are sent to a rank."""
        if self.notes_reads:
            self.delayed.note(rank)

    def begin_process(self, rank: int) -> None:
        """A process begins to stand for a rank: drop what a former one had not committed."""
        self.rounds.replace_process(rank)
        self.lanes.begin(rank)
        if not self.mode.is_sync:
            self.hyper.forget(rank)

    def end_process(self, rank: int, is_done: bool) -> None:
        """No process stands for a rank any more: drop what the last one had not committed."""
        self.rounds.replace_process(rank)
        self.lanes.leave(rank, is_done)
        if not self.mode.is_sync:
            self.hyper.forget(rank)

    def counters(self) -> Mapping[str, Any]:
        """What this table has done so far, and the ranks that its open round waits for, as plain numbers."""
        return {
            "table": self.name,
            "round": self.rounds.number,
            "version": self.version,
            "rounds_applied": self.rounds_applied,
            "keys": len(self.dense.keys),
            "keys_applied": self.keys_applied,
            "payload_mismatches": self.rounds.mismatches + self.lanes.mismatches,
            "rounds_undone": self.undone,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "joined": sorted(self.lanes.joined),
            "waiting_for": self.rounds.missing_ranks() if self.rounds.is_waiting() else [],
        }

    def _lowest(self) -> bytes:
        """The hyper-parameters of the lowest rank that has data; of the lowest, where none has."""
        return self.hyper.lowest(self.lanes.joined | self.lanes.left)

    def _whose(self, rank: int, number: int) -> int:
        """Whose rounds a rank means by a number; the first one is always that of all ranks together."""
        return _ALL if self.mode.is_sync or not number or not self.rounds.number else rank

    def _apply(
        self,
        number: int,
        given: Given,
        optimizer: Optimizer | None,
        updater: Updater | None,
        is_lane: bool,
    ) -> RoundEnd:
        """The effect of a round on the weights, and how it ends; ranks that have joined are not among the given."""
        commits = {rank: mine.commit for rank, mine in given if mine.commit is not None}
        if not commits:
            return RoundEnd(self.version, hyper=self._lowest() if is_lane else b"")
        if number == 0 or any(commit.assign for commit in commits.values()):
            self._assign(number, given, is_lane)
            return RoundEnd(self.version)
        if not self.is_initialised:
            raise KeyNotFoundError(
                f"table {self.name!r} has no values: initialising it failed; restart the job"
            )
        vetoes = tuple(rank for rank, commit in commits.items() if commit.veto)
        if vetoes:
            return RoundEnd(self.version, (), vetoes)
        hyper = self._lowest() if is_lane else self.hyper.common(commits)
        addends = [addend_of(mine, optimizer, self.absent.get(rank, frozenset())) for rank, mine in given]
        if updater is not None:
            self.dense.call_updater(addends, updater)
        elif optimizer is not None:
            self._update(addends, optimizer, hyper, given if is_lane else None)
        elif not self.mode.is_sync:
            raise ConfigurationError(
                f"{self.name!r} got a contribution in {self.mode.name} mode but has no optimizer to apply it; call "
                "set_optimizer on every worker before the first push"
            )
        else:
            self.dense.assign_sum(addends)
        keys = keys_in(addends, self.dense.keys)
        self.version += 1
        self.rounds_applied += 1
        self.keys_applied += len(keys)
        left_out = () if keys is self.dense.keys else tuple(sorted(self.dense.keys - keys))
        return RoundEnd(self.version, left_out, (), hyper)

    def _assign(self, number: int, given: Given, is_lane: bool) -> None:
        """Take over the lowest rank's values, in the first round and wherever all ranks want that."""
        rank, first = given[0]
        updating = [r for r, mine in given if mine.commit is not None and not mine.commit.assign]
        if is_lane and not first.slices:
            return  # another rank gives the values
        if number and updating:
            raise PlanMismatchError(
                f"rank {updating[0]} updates {self.name!r} in a round in which other ranks replace its values; "
                "call set_data in the same step on every worker"
            )
        # A row-sparse key has its values here alone: they may stay.
        needed = self.plan.resident_slices_of(self.dense.server) if number else self.dense.slices
        missing = [piece.index for piece in needed if piece.index not in first.slices]
        if missing:
            raise ProtocolError(
                f"rank {rank} gave table {self.name!r} values without its slices {missing[:8]}"
            )
        self.dense.assign({s: payload for s, (_, payload) in first.slices.items()})
        self.is_initialised = True
        self.version += 1
        if self.notes_reads:
            self.delayed.note_all(self.rounds.num_workers)

    def _update(self, addends: list[Addend], optimizer: Optimizer, hyper: bytes, alone: Given | None) -> None:
        """Let the optimizer apply the sum, or the contribution of one rank `alone`."""
        if not optimizer.elementwise and not self.plan.whole_keys and len(self.plan.servers) > 1:
            raise ConfigurationError(
                f"optimizer {optimizer.registered_name!r} needs whole keys, but {self.name!r} is spread over "
                f"{len(self.plan.servers)} servers; set the optimizer on every worker before the next push"
            )
        hypers: Sequence[Mapping[str, Any]]
        hypers = self.hyper.effective(optimizer, hyper, self._scheduled_rate(optimizer, addends))
        if alone is not None:
            [(rank, mine)] = alone
            if self.notes_reads and optimizer.delay_state is not None:
                self.delayed.restore(rank, optimizer.delay_state)
            if self.mode.slow_down and mine.commit is not None:
                hypers = slowed_down(hypers, self.staleness(mine.commit))
        try:
            self.dense.update(addends, optimizer, hypers)
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

    def _scheduled_rate(self, optimizer: Optimizer, addends: Sequence[Addend]) -> float | None:
        """The learning rate that the optimizer's scheduler gives for this update of the table; None without one.

        Each table counts for itself, so that neither other keys nor the number of servers matter.
        """
        if optimizer.lr_scheduler is None:
            return None
        return float(optimizer.lr_scheduler(optimizer.begin_num_update + self.dense.updates_after(addends)))


_ALL = -1
"""In place of a rank: all of them together."""
