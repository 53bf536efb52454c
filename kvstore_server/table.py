"""One table of one namespace: its rounds, its weights and what its ranks believe, tied together.

A table takes messages of known ranks and says whom to answer; sessions, sockets and the clock are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore_server.addends import norm_to_hold
from kvstore_server.codec import Codec
from kvstore_server.consistency import SyncRounds
from kvstore_server.errors import ConfigurationError, KVStoreError, ProtocolError
from kvstore_server.modes import SYNCHRONOUS, Mode
from kvstore_server.norms import Decision, same_decision
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import Plan
from kvstore_server.protocol.buffers import payload_size
from kvstore_server.protocol.messages import Push
from kvstore_server.reduction import same_payload
from kvstore_server.row_payload import RowForm, read_payload
from kvstore_server.shard import Leases, Updater
from kvstore_server.table_values import Given, RoundEnd, TableValues, Waiter

__all__ = ["Given", "RoundEnd", "Table", "Waiter"]


class Table(TableValues):
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
        super().__init__(name, plan, server, num_workers, leases, mode)
        self.number = number
        self.rounds: SyncRounds[Waiter] = SyncRounds(num_workers, same_payload)
        """Those of all ranks together; without synchronous rounds, only the first one, which gives the first values."""
        self.undone = 0
        self.decisions_differing = 0
        """Decisions about a round that were not the one that was applied."""
        self.bytes_in = 0
        """Bytes of payload that ranks have sent, as they came: compressed, or rows alone."""
        self.bytes_out = 0
        """Bytes of weights that were handed out."""
        self._ends: dict[int, RoundEnd] = {}
        self._last_rank = -1
        """Whose contribution was applied last, where ranks contribute by themselves."""

    def rounds_of(self, rank: int, number: int = -1) -> SyncRounds[Waiter]:
        """The rounds of which a rank means that number, or its present one: those of all ranks, or its lane."""
        if self._is_sync or self._whose(rank, number) == _ALL:
            return self.rounds
        return self.lanes.of(rank, number)

    def next_round(self, rank: int) -> int:
        """The number of the round that a rank should begin with."""
        return self.rounds.number if self._whose(rank, -1) == _ALL else self.lanes.proposed(rank)

    def end_of(self, rank: int, number: int = -1) -> RoundEnd:
        """How the last round that was applied has ended, of those of which a rank means that number."""
        return self._ends[self._whose(rank, number)]

    def push(self, rank: int, push: Push, form: Codec | RowForm | None) -> None:
        """Take a provisional slice, in a form other than plain numbers if there is one, after checking that it fits."""
        if push.slice not in self.unit.slots:
            raise ProtocolError(f"slice {push.slice} of the table is not on this server")
        payload = read_payload(self.plan, self.plan.slices[push.slice], push.payload, form)
        self.bytes_in += payload_size(push.payload)
        rounds = self.rounds_of(rank, push.round)
        if push.round == rounds.number and self._last_rank in (_ALL, rank):
            self.unit.undo = None
        rounds.push(rank, Push(push.table, push.slice, push.round, push.generation, payload))

    def hold(self, rank: int, optimizer: Optimizer | None, updater: Updater | None) -> bool:
        """Sum the open round of a rank, which all of its members have committed, if a decision is wanted then.

        Returns whether that is so.

        Raises:
            PlanMismatchError: ranks disagree on it, or on hyper-parameters.
            ConfigurationError: it is not possible here.
        """
        rounds = self.rounds_of(rank)
        if not rounds.wants_decision or not self.is_initialised:
            return False
        active = _with_data(rounds.contributions())
        commits = {r: mine.commit for r, mine in active if mine.commit is not None}
        is_plain = not any(commit.hold for commit in commits.values())
        is_special = any(commit.assign or commit.veto for commit in commits.values())
        if is_plain or is_special:
            return False
        norm_type = norm_to_hold(commits)
        if optimizer is None or updater is not None or not self.mode.is_sync:
            raise ConfigurationError(
                f"a gradient of {self.name!r} cannot be checked before it is applied: that needs synchronous rounds "
                "and an optimizer of the store"
            )
        self.held = self._hold(active, optimizer, norm_type)
        return True

    def apply(
        self,
        rank: int,
        optimizer: Optimizer | None,
        updater: Updater | None,
        decision: Decision | None = None,
    ) -> Given:
        """Apply the open round of a rank, which all of its members have committed, and begin the next one.

        With a decision, the round is held. Returns the contributions that went in, in rank order.

        Raises:
            KVStoreError: the round cannot be applied; nothing has changed and the round is still open.
        """
        rounds = self.rounds_of(rank)
        is_lane = rounds is not self.rounds
        given = rounds.contributions()
        self.unit.undo = None
        active = _with_data(given)
        if decision is None:
            end = self._apply(rounds.number, active, optimizer, updater, is_lane)
        else:
            assert self.held is not None
            end = self._apply_held(self.held, decision)
            self.held = None
        self._ends[rank if is_lane else _ALL] = end if active else end._replace(is_over=True)
        self._last_rank = rank if is_lane else _ALL
        for r, _ in given:
            self.absent.pop(r, None)
        if is_lane:
            self.lanes.advance(rank)
        return rounds.finish()

    def fail(self, rank: int, error: KVStoreError) -> list[Waiter]:
        """End the open round of a rank without effect; return whom to tell now."""
        rounds = self.rounds_of(rank)
        self.held = None
        for r, _ in rounds.contributions():
            self.absent.pop(r, None)
        if rounds is not self.rounds:
            self.lanes.advance(rank)
        if self._last_rank in (_ALL, rank):
            self.unit.undo = None
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
        has_changed = not end.is_skipped and not end.is_over
        if not has_changed or (self.unit.undo is not None and self._last_rank == whose):
            if has_changed:
                self.shard.undo(self.unit)
                self.version += 1  # also the way back is a change
            rounds.undo(error)
            self.undone += 1
        return []

    def note_decision(self, number: int, decision: Decision) -> bool:
        """Whether a decision about a round that is over is the one that was applied, as it must be; counts others."""
        if number != self.rounds.number - 1 or not self.rounds.was_applied(number):
            return True
        is_same = same_decision(decision, self._ends[_ALL].decision)
        self.decisions_differing += not is_same
        return is_same

    def fail_join(self, rank: int, number: int, error: KVStoreError) -> None:
        """A rank that waits for all to join will not see that: it takes part as before, and its joining has failed."""
        self.lanes.joined.discard(rank)
        lane = self.lanes.of(rank)
        if number == lane.number - 1:
            lane.undo(error)

    def note_read(self, rank: int) -> None:
        """The present weights are sent to a rank."""
        if self.notes_reads:
            self.shard.note_read(self.unit, [rank])

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
            "keys": len(self.unit.keys),
            "keys_applied": self.keys_applied,
            "payload_mismatches": self.rounds.mismatches + self.lanes.mismatches,
            "rounds_undone": self.undone,
            "decisions_differing": self.decisions_differing,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "joined": sorted(self.lanes.joined),
            "waiting_for": self.rounds.missing_ranks() if self.rounds.is_waiting() else [],
        }

    def _whose(self, rank: int, number: int) -> int:
        """Whose rounds a rank means by a number; the first one is always that of all ranks together."""
        return _ALL if self._is_sync or not number or not self.rounds.number else rank


_ALL = -1
"""In place of a rank: all of them together."""


def _with_data(given: Given) -> Given:
    """The contributions of ranks that have not joined."""
    return [(rank, mine) for rank, mine in given if mine.commit is not None and not mine.commit.joined]
