"""One table of one namespace: its rounds, its weights and what its ranks believe, tied together.

A table takes messages of known ranks and says whom to answer; sessions, sockets and the clock are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstore_server.codec import Codec
from kvstore_server.consistency import Contribution, SyncRounds
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
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import Plan
from kvstore_server.protocol.messages import Payload, Push
from kvstore_server.reduction import Addend, same_payload
from kvstore_server.row_payload import RowForm


class Waiter(NamedTuple):
    """The request that is answered when a round is over."""

    peer: bytes
    number: int


class Table:
    """A table and the state of its rounds on one server."""

    def __init__(
        self, number: int, name: str, plan: Plan, server: int, num_workers: int, leases: Leases | None
    ) -> None:
        self.number = number
        self.name = name
        self.plan = plan
        self.dense = DenseTable(plan, server, leases)
        self.rounds: SyncRounds[Waiter] = SyncRounds(num_workers, same_payload)
        self.hyper = HyperBelief(plan)
        self.absent: dict[int, frozenset[int]] = {}
        """What each rank leaves out of the open round."""
        self.left_out: tuple[int, ...] = ()
        """The keys here that no rank contributed to in the last round."""
        self.vetoes: tuple[int, ...] = ()
        """The ranks because of which the last round was not applied."""
        self.conflict: KVStoreError | None = None
        """Why the table cannot be used any more: ranks declared different keys, or an update broke off."""
        self.is_initialised = False
        """Whether round 0 was applied."""
        self.rounds_applied = 0
        self.keys_applied = 0
        self.undone = 0

    def push(self, rank: int, push: Push, form: Codec | RowForm | None) -> None:
        """Take a provisional slice, in a form other than plain numbers if there is one, after checking that it fits."""
        payload = self.dense.check_payload(push.slice, push.payload, form)
        if push.round == self.rounds.number:
            self.dense.forget_undo()
        self.rounds.push(rank, Push(push.table, push.slice, push.round, push.generation, payload))

    def apply(
        self, optimizer: Optimizer | None, updater: Updater | None
    ) -> list[tuple[int, Contribution[Waiter]]]:
        """Apply the open round, which every rank has committed, and begin the next one.

        Returns the contributions that went in, in rank order.

        Raises:
            KVStoreError: the round cannot be applied; nothing has changed and the round is still open.
        """
        given = self.rounds.contributions()
        commits = {rank: mine.commit for rank, mine in given if mine.commit is not None}
        self.dense.forget_undo()
        self.left_out = ()
        self.vetoes = tuple(rank for rank, commit in commits.items() if commit.veto)
        if self.rounds.number == 0 or any(commit.assign for commit in commits.values()):
            self._assign(given, [rank for rank, commit in commits.items() if not commit.assign])
        elif not self.is_initialised:
            raise KeyNotFoundError(
                f"table {self.name!r} has no values: initialising it failed; restart the job"
            )
        elif not self.vetoes:
            addends = [self._addend(rank, mine, optimizer) for rank, mine in given]
            if updater is not None:
                self.dense.call_updater(addends, updater)
            elif optimizer is not None:
                self._update(addends, optimizer)
            else:
                self.hyper.common()  # the workers apply the optimizer; their weights would part if they disagreed
                self.dense.assign_sum(addends)
            given_keys = self._keys_in(addends)
            self.left_out = (
                () if given_keys is self.dense.keys else tuple(sorted(self.dense.keys - given_keys))
            )
            self.rounds_applied += 1
            self.keys_applied += len(given_keys)
        self.absent.clear()
        return self.rounds.finish()

    def fail(self, error: KVStoreError) -> list[Waiter]:
        """End the open round without effect; return whom to tell now."""
        self.absent.clear()
        self.dense.forget_undo()
        return self.rounds.fail(error)

    def abort(self, number: int, error: KVStoreError, undo: bool) -> list[Waiter]:
        """A rank gives a round up: fail it if it is open, take it back if that is wanted and it was the last one."""
        if number == self.rounds.number:
            return self.fail(error)
        is_last = number == self.rounds.number - 1 and self.rounds.was_applied(number)
        if undo and is_last and (self.dense.can_undo or self.vetoes):
            if not self.vetoes:  # a vetoed round has changed nothing
                self.dense.undo()
            self.rounds.undo(error)
            self.undone += 1
        return []

    def counters(self) -> Mapping[str, Any]:
        """What this table has done so far, and the ranks that its open round waits for, as plain numbers."""
        return {
            "table": self.name,
            "round": self.rounds.number,
            "rounds_applied": self.rounds_applied,
            "keys": len(self.dense.keys),
            "keys_applied": self.keys_applied,
            "payload_mismatches": self.rounds.mismatches,
            "rounds_undone": self.undone,
            "waiting_for": self.rounds.missing_ranks() if self.rounds.is_waiting() else [],
        }

    def _assign(self, given: list[tuple[int, Contribution[Waiter]]], updating: list[int]) -> None:
        """Take over the lowest rank's values, in the first round and wherever all ranks want that."""
        rank, first = given[0]
        if self.rounds.number and updating:
            raise PlanMismatchError(
                f"rank {updating[0]} updates {self.name!r} in a round in which other ranks replace its values; "
                "call set_data in the same step on every worker"
            )
        missing = [piece.index for piece in self.dense.slices if piece.index not in first.slices]
        if missing:
            raise ProtocolError(
                f"rank {rank} gave table {self.name!r} values without its slices {missing[:8]}"
            )
        self.dense.assign({s: payload for s, (_, payload) in first.slices.items()})
        self.is_initialised = True
        self.vetoes = ()

    def _update(self, addends: list[Addend], optimizer: Optimizer) -> None:
        if not optimizer.elementwise and not self.plan.whole_keys and len(self.plan.servers) > 1:
            raise ConfigurationError(
                f"optimizer {optimizer.registered_name!r} needs whole keys, but {self.name!r} is spread over "
                f"{len(self.plan.servers)} servers; set the optimizer on every worker before the next push"
            )
        hypers = self._scheduled(optimizer, self.hyper.agreed(optimizer))
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

    def _scheduled(
        self, optimizer: Optimizer, hypers: list[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """With a scheduler and no numbers from the workers, the learning rate that it gives for this table's update.

        Each table counts for itself, so that neither other keys nor the number of servers matter.
        """
        if optimizer.lr_scheduler is None or self.hyper.common():
            return hypers
        rate = optimizer.lr_scheduler(optimizer.begin_num_update + self.dense.updates + 1)
        return [{**row, "lr": rate} for row in hypers]

    def _addend(self, rank: int, mine: Contribution[Waiter], optimizer: Optimizer | None) -> Addend:
        assert mine.commit is not None
        scale = mine.commit.rescale
        if scale is None:
            scale = optimizer.rescale_grad if optimizer is not None else 1.0
        slices: dict[int, Payload] = {s: payload for s, (_, payload) in mine.slices.items()}
        return Addend(slices, scale, self.absent.get(rank, _NOTHING))

    def _keys_in(self, addends: list[Addend]) -> frozenset[int]:
        if any(not a.absent for a in addends):
            return self.dense.keys
        return frozenset(key for key in self.dense.keys if any(key not in a.absent for a in addends))


_NOTHING: frozenset[int] = frozenset()
