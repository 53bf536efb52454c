"""One table of one namespace: what its rounds do to its weights, and what its ranks believe.

Which contributions make a round is the business of `rounds`, and who is answered that of `engine`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.engine.agreed import AgreedOptions
from kvstore_server.engine.rounds import SYNCHRONOUS, Announced, Mode
from kvstore_server.errors import (
    ConfigurationError,
    KeyNotFoundError,
    KVStoreError,
    OptimizerError,
    PlanMismatchError,
    ProtocolError,
)
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import SIZES, Plan, RowBlock, Slice, row_numel
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import RowSet, are_rows, encode_rows
from kvstore_server.shard.deltas import Deltas
from kvstore_server.shard.norms import UNCHANGED, Decision, same_decision
from kvstore_server.shard.reduction import RankContribution
from kvstore_server.shard.shard import HeldSum, Partial, Shard, Updater
from kvstore_server.shard.storage import Rows, Undo

_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
ALL = -1
"""In place of a rank: all of them together."""


class RankCommit(NamedTuple):
    """One rank's committed contribution to a round of a table."""

    given: RankContribution
    flags: int = 0
    version: int = -1
    hold: float = 0.0


class RowPart(NamedTuple):
    """What a worker is sent of one slice."""

    slot: int
    payload: Tensor
    kind: int
    """WHOLE, ROWS, VALUES or DELTA."""


Parts = Mapping[int, RankCommit]
"""Rank → its contribution, in rank order; ranks that have joined are not among them."""


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
    is_skipped: bool = False
    """Nothing was changed, though the ranks have contributed."""


@dataclass(frozen=True)
class HeldRound:
    """The open round that all ranks have committed while sums wait for a decision."""

    optimizer: Optimizer
    hyper: bytes
    hypers: Sequence[Mapping[str, Any]]
    sum: HeldSum


@dataclass
class Begun:
    """The open round while it is applied slice by slice: all ranks have said what they will commit."""

    optimizer: Optimizer | None
    hyper: bytes
    hypers: Sequence[Mapping[str, Any]]
    said: Mapping[int, Announced]
    left: dict[int, int]
    """Slot of which not all has been applied → its first element that has not."""
    undo: Undo | None = None
    """How the table was before the first of them."""


class Table:
    """The weights of a table on one server, with what its ranks believe and have read."""

    def __init__(
        self,
        number: int,
        name: str,
        plan: Plan,
        server: int,
        num_workers: int,
        shard: Shard,
        mode: Mode = SYNCHRONOUS,
        delta_codec: Codec | None = None,
    ) -> None:
        self.number = number
        self.name = name
        self.plan = plan
        self.mode = mode
        self.num_workers = num_workers
        self.shard = shard
        self.unit = self.shard.add(plan, server)
        self.deltas = None if delta_codec is None else Deltas(delta_codec, shard.storage, self.unit)
        """Where new weights go to workers as encoded changes: the weights that these have."""
        self.notes_reads = False
        """Whether the optimizer needs to know what each rank has read."""
        self.more_reads = 0
        """Copies of weights that are claimed for that, beyond one for each rank."""
        self.hyper = AgreedOptions(plan)
        self.conflict: KVStoreError | None = None
        """Why the table cannot be used any more: ranks declared different keys, or an update broke off."""
        self.held: HeldRound | None = None
        self.begun: Begun | None = None
        self.undo_nbytes = 0
        """Bytes that are claimed for the copy that a round which is begun needs."""
        self.is_tight = False
        """There was no room for that, which was said."""
        self.is_initialised = False
        """Whether round 0 was applied."""
        self.version = -1
        """How often the weights have changed since their first values."""
        self.rounds_applied = self.keys_applied = 0
        self.undone = 0
        self.decisions_differing = 0
        """Decisions about a round that were not the one that was applied."""
        self.bytes_in = 0
        """Bytes of payload that ranks have sent, as they came: compressed, or rows alone."""
        self.bytes_out = 0
        """Bytes of weights that were handed out."""
        self.ends: dict[int, RoundEnd] = {}
        """Rank, or ALL → how the last of its rounds ended that was applied."""
        self._last_rank = ALL
        """Whose contribution was applied last, where ranks contribute by themselves."""
        self._changed: tuple[tuple[int, int], list[RowPart]] | None = None
        """What a worker was sent last: the version that it had and the one it got, and the parts."""

    def __repr__(self) -> str:
        states = {
            "in conflict": self.conflict is not None,
            "held": self.held is not None,
            "begun": self.begun is not None,
        }
        state = ", ".join([name for name, holds in states.items() if holds]) or (
            "ready" if self.is_initialised else "not initialised"
        )
        return f"<{type(self).__name__} {self.number} {self.name!r}, version {self.version}: {state}>"

    def begin_round(self, whose: int) -> None:
        """Make the last round of a rank, or of all, final. A slice of the next one has come."""
        if self._last_rank in (ALL, whose):
            self.shard.undos.pop(self.unit, None)

    def hold(self, parts: Parts, optimizer: Optimizer | None, updater: Updater | None) -> bool:
        """Sum a round of all ranks, if a decision is wanted before it is applied. Returns whether that is so.

        Raises:
            PlanMismatchError: ranks disagree on it, or on hyper-parameters.
            ConfigurationError: it is not possible here.
        """
        if not self.is_initialised or not any(part.hold for part in parts.values()):
            return False
        if any(part.flags & (m.ASSIGNS | m.VETOES) for part in parts.values()):
            return False
        norm_type = norm_to_hold(parts)
        if optimizer is None or updater is not None or not self.mode.is_sync:
            raise ConfigurationError(
                f"a gradient of {self.name!r} cannot be checked before it is applied: that needs synchronous rounds "
                "and an optimizer of the store"
            )
        hyper = self.hyper.common(parts)
        given = [part.given for part in parts.values()]
        hypers = self.hypers(given, optimizer, hyper)
        held = self.shard.hold(given, optimizer, hypers, norm_type, self.unit)
        self.held = HeldRound(optimizer, hyper, hypers, held)
        return True

    def apply_held(self, decision: Decision) -> None:
        """Update with the sums that were kept, as was decided. Raises as `apply`."""
        assert self.held is not None
        held = self.held
        self.shard.undos.pop(self.unit, None)
        end = RoundEnd(self.version)
        if not decision.skip:
            self._update([held.sum.total], held.optimizer, held.hypers, decision)
            end = self._applied([held.sum.total], held.hyper)
        self.held = None
        end = end._replace(partials=held.sum.partials, decision=decision, is_skipped=decision.skip)
        self.ends[ALL], self._last_rank = end, ALL

    def apply(
        self,
        whose: int,
        round_: int,
        parts: Parts,
        optimizer: Optimizer | None,
        updater: Updater | None,
        joined: Collection[int],
    ) -> None:
        """Apply a round of a rank, or of ALL, which all of its members have committed.

        Args:
            parts: Of the members that have data.
            joined: The ranks whose hyper-parameters do not count.

        Raises:
            KVStoreError: the round cannot be applied; nothing has changed.
        """
        self.shard.undos.pop(self.unit, None)
        is_lane = whose != ALL
        vetoes = tuple(rank for rank, part in parts.items() if part.flags & m.VETOES)
        if not parts:
            hyper = self.hyper.lowest(joined) if is_lane else b""
            end = RoundEnd(self.version, hyper=hyper, is_over=True)
        elif not round_ or any(part.flags & m.ASSIGNS for part in parts.values()):
            self._assign(round_, parts, is_lane)
            end = RoundEnd(self.version)
        elif not self.is_initialised:
            raise KeyNotFoundError(
                f"table {self.name!r} has no values: initialising it failed; restart the job"
            )
        elif vetoes:
            end = RoundEnd(self.version, vetoes=vetoes, is_skipped=True)
        else:
            hyper = self.hyper.lowest(joined) if is_lane else self.hyper.common(parts)
            end = self._change(parts, optimizer, updater, hyper, is_lane)
        self.ends[whose], self._last_rank = end, whose

    def _change(
        self, parts: Parts, optimizer: Optimizer | None, updater: Updater | None, hyper: bytes, is_lane: bool
    ) -> RoundEnd:
        """Change the weights by the sum of some contributions."""
        given = [part.given for part in parts.values()]
        if updater is not None:
            self.shard.call_updater(self.unit, given, updater)
        elif optimizer is not None:
            hypers = self.hypers(given, optimizer, hyper)
            if is_lane:
                hypers = self._delayed(parts, optimizer, hypers)
            self._update(given, optimizer, hypers)
        elif not self.mode.is_sync:
            raise ConfigurationError(
                f"{self.name!r} got a contribution in {self.mode.name} mode but has no optimizer to apply it; call "
                "set_optimizer on every worker before the first push"
            )
        else:
            self.shard.assign_sum(given)
        return self._applied(given, hyper)

    def _assign(self, round_: int, parts: Parts, is_lane: bool) -> None:
        """Take over the lowest rank's values in the first round, or where all want that."""
        rank, first = next(iter(parts.items()))
        updating = [r for r, part in parts.items() if not part.flags & m.ASSIGNS]
        if is_lane and not first.given.runs:
            return  # another rank gives the values
        if round_ and not is_lane and len(parts) < self.num_workers:
            raise PlanMismatchError(
                f"ranks replace the values of {self.name!r} while another one has no more data; call set_data outside "
                "of the join() block"
            )
        if round_ and updating:
            raise PlanMismatchError(
                f"rank {updating[0]} updates {self.name!r} in a round in which other ranks replace its values; "
                "call set_data, or add_param_group, before the same step on every worker"
            )
        # A row-sparse key has its values here alone: they may stay.
        needed = self.plan.resident_slices_of(self.unit.server) if round_ else self.unit.slices
        here = {slot for run in first.given.runs for slot in range(run.first, run.end)}
        missing = [piece.index for piece in needed if self.unit.slots[piece.index] not in here]
        if missing:
            raise ProtocolError(
                f"rank {rank} gave table {self.name!r} values without its slices {missing[:8]}"
            )
        self.shard.assign_sum([first.given._replace(scale=1.0)])
        if self.deltas is not None:
            self.deltas.reset()
        self.is_initialised = True
        self.version += 1
        self.note_given(range(self.num_workers))

    def note_given(self, ranks: Iterable[int], others: Mapping[int, Tensor] | None = None) -> None:
        """Note that ranks compute with the present weights from now on; `others` as of `Shard.copy_read`."""
        if self.notes_reads:
            read = self.shard.copy_read(self.unit, self.version, others)
            self.unit.reads |= {rank: [read] for rank in ranks}

    def note_pulled(
        self, rank: int, has_room: Callable[[int], bool], others: Mapping[int, Tensor] | None = None
    ) -> None:
        """Note that a rank is sent the present weights, which it may only look at.

        Its next commit names the version that it has computed with: until then what it was sent before is kept as well,
        of several pulls the last two.

        Args:
            has_room: Whether there is memory for so many copies of the weights beyond one for each rank; if not, the
                former ones go.
        """
        reads = self.unit.reads
        known = reads.get(rank, [])
        if not self.notes_reads or any(one.version == self.version for one in known):
            return
        former = [*known[:1], *known[1:][-1:]]
        others_more = sum([len(own) - 1 for other, own in reads.items() if other != rank])
        if former and not has_room(others_more + len(former)):
            former = []
        everywhere = itertools.chain.from_iterable(reads.values())
        read = next((one for one in everywhere if one.version == self.version), None)
        reads[rank] = [*former, read or self.shard.copy_read(self.unit, self.version, others)]

    def hypers(
        self, given: Sequence[RankContribution], optimizer: Optimizer, hyper: bytes
    ) -> Sequence[Mapping[str, Any]]:
        """Return the numbers with which the optimizer updates each key.

        Args:
            given: The contributions to the round; none where all ranks give all keys.
            hyper: The hyper-parameters in force, as they were sent.

        Raises:
            ConfigurationError: the optimizer cannot update the table.
        """
        if not optimizer.elementwise and not self.plan.whole_keys and len(self.plan.servers) > 1:
            raise ConfigurationError(
                f"optimizer {optimizer.registered_name!r} needs whole keys, but {self.name!r} is spread over "
                f"{len(self.plan.servers)} servers; set the optimizer on every worker before the next push"
            )
        rate = None
        if optimizer.lr_scheduler is not None:
            # Each table counts for itself, so that neither other keys nor the number of servers matter.
            count = optimizer.begin_num_update + self.shard.updates_after(self.unit, given)
            rate = float(optimizer.lr_scheduler(count))
        return self.hyper.effective(optimizer, hyper, rate)

    def _delayed(
        self, parts: Parts, optimizer: Optimizer, hypers: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Make up for others' changes since a rank, contributing alone, read the weights."""
        [(rank, part)] = parts.items()
        if self.notes_reads and optimizer.delay_state is not None:
            self.shard.restore_read(self.unit, rank, part.version, optimizer.delay_state)
        staleness = self.version - part.version if part.version >= 0 else 0
        if not self.mode.slow_down or staleness <= 1:
            return hypers
        # Keys with equal numbers share one mapping, by which they are updated together.
        slowed = {id(row): {**row, "lr": row["lr"] / staleness} if "lr" in row else row for row in hypers}
        return [slowed[id(row)] for row in hypers]

    def _update(
        self,
        given: Sequence[RankContribution],
        optimizer: Optimizer,
        hypers: Sequence[Mapping[str, Any]],
        decision: Decision = UNCHANGED,
    ) -> None:
        """Let the optimizer apply the sum of what was given."""
        try:
            self.shard.update(given, optimizer, [hypers], [self.unit], decision)
        except OptimizerError:
            raise  # has been undone
        except Exception as error:
            raise self.break_off(error) from error

    def break_off(self, error: Exception) -> KVStoreError:
        """Refuse all further use: an update has failed in the middle.

        No copy is kept for the built-in optimizers, and nobody must train on as if nothing had happened.
        """
        self.conflict = KVStoreError(
            f"the update of {self.name!r} broke off with {type(error).__name__}: {error}; its weights may be half "
            "updated. Restart the job from its last saved states"
        )
        return self.conflict

    def changed(self, hyper: bytes, end: RoundEnd | None = None) -> RoundEnd:
        """Count a round of all ranks that has changed all keys of the table; returns how it ended.

        Args:
            end: How that of another table ended, which both share where it is the same.
        """
        self.shard.undos.pop(self.unit, None)
        self.version += 1
        self.rounds_applied += 1
        self.keys_applied += len(self.unit.keys)
        if self.deltas is not None:
            self.deltas.note_round(())
        if end is None or end.version != self.version or end.hyper != hyper:
            end = RoundEnd(self.version, hyper=hyper)
        self.ends[ALL], self._last_rank = end, ALL
        return end

    def _applied(self, given: Sequence[RankContribution], hyper: bytes) -> RoundEnd:
        """Count a round that has changed the weights."""
        keys = self.unit.keys
        if all(one.absent for one in given):
            first = self.unit.first_key  # a Shard numbers the keys of all of its tables
            keys = frozenset(key for key in keys if any(first + key not in one.absent for one in given))
        self.version += 1
        self.rounds_applied += 1
        self.keys_applied += len(keys)
        left_out = () if keys is self.unit.keys else tuple(sorted(self.unit.keys - keys))
        if self.deltas is not None:
            self.deltas.note_round(left_out)
        return RoundEnd(self.version, left_out, (), hyper)

    def fail(self, whose: int) -> None:
        """End the open round of a rank, or of ALL, without effect."""
        self.held = None
        self.begin_round(whose)

    def undo(self, whose: int) -> bool:
        """Take the last round of a rank, or of ALL, back; returns whether that was possible."""
        end = self.ends[whose]
        if end.is_skipped or end.is_over:
            self.undone += 1
            return True  # it has changed nothing
        if self.unit not in self.shard.undos or self._last_rank != whose:
            return False
        self.shard.undo(self.unit)
        if self.deltas is not None:
            self.deltas.reset()  # workers may have been told of a part of it
        self.version += 1  # also the way back is a change
        self.undone += 1
        return True

    def note_decision(self, decision: Decision) -> bool:
        """Tell whether a decision on the last round is that applied, as it must be; counts others."""
        is_same = same_decision(decision, self.ends[ALL].decision)
        self.decisions_differing += not is_same
        return is_same

    # ---------------------------------------------------------------- rows

    def changed_parts(self, held: int) -> list[RowPart]:
        """Return what a worker at version `held` of all its slices here must be sent.

        A stack in which nothing has changed has an empty part of kind ROWS. Most workers hold the same version, and
        are sent the same.
        """
        if self.deltas is not None:
            self._follow(self.deltas)
        versions = held, self.version
        if self._changed is not None and self._changed[0] == versions:
            return self._changed[1]
        unit, parts, packed = self.unit, list[RowPart](), set[int]()
        changed = {key: self._changed_rows(key, held) for key in unit.stacks}
        if self.deltas is not None:
            firsts = {key: unit.slots[pieces[0].index] for key, pieces in unit.stacks.items()}
            changed |= {key: None for key, first in firsts.items() if not self.deltas.has_exact(first, held)}
        for key, pieces in unit.stacks.items():
            first, rows = unit.slots[pieces[0].index], changed[key]
            if key in packed:
                continue
            if self.deltas is not None and first in self.deltas:
                slots = range(first, first + len(pieces))
                found = [(slot, *self.deltas.parts(slot, held)) for slot in slots]
                parts += [
                    RowPart(slot, own, m.DELTA if is_delta else m.WHOLE) for slot, own, is_delta in found
                ]
                continue
            keys = self._side_by_side(key, changed) if key in self.plan.run_of else [key]
            if len(keys) > 1:
                packed.update(keys)
                parts += self._pack_joined(keys, changed)
            elif rows is None:
                slots = range(first, first + len(pieces))
                parts += [RowPart(slot, self.shard.storage.padded[slot], m.WHOLE) for slot in slots]
            elif not rows:
                parts.append(RowPart(first, torch.empty(0, dtype=torch.uint8, device="cpu"), m.ROWS))
            else:
                parts += self._pack(pieces, rows)
        self._changed = versions, parts
        return parts

    def _follow(self, deltas: Deltas) -> None:
        """Bring the weights of workers to the present version; what has changed by rows goes as rows from now on."""
        for key, pieces in self.unit.stacks.items():
            own = [slot for piece in pieces if (slot := self.unit.slots[piece.index]) in deltas]
            rows = self._changed_rows(key, deltas.version) if own else None
            if rows and any(ids is not None for ids in rows.values()):  # else whole keys have changed
                deltas.leave(own, self.version)
        deltas.follow(self.version)

    def _changed_rows(self, stack: int, held: int) -> Rows | None:
        """Say which rows of a stack to send; None where the whole is not longer."""
        self.shard.notes_changes = True
        pieces, rows = self.unit.stacks[stack], self.unit.changes.since(stack, held, self.version)
        if rows and _bytes_of(self.plan, pieces, rows) >= sum([piece.nbytes for piece in pieces]):
            return None
        return rows

    def _side_by_side(self, key: int, changed: Mapping[int, Rows | None]) -> list[int]:
        """Find the stacks from one on whose rows are sent as those of one key; that one alone where they are not."""
        keys = [one for one in self.plan.joined_rows(key).keys if one in changed]
        ids = [None if (rows := changed[one]) is None else rows.get(0, _NO_IDS) for one in keys]
        return keys if all(one is not None for one in ids) and any(changed[one] for one in keys) else [key]

    def pulled_part(self, pull: m.PullRows) -> RowPart:
        """Return the values of the rows that were asked for, flat.

        Raises:
            ProtocolError: the key has no such rows here, or they are more than fit into a message.
        """
        self.shard.rows_of(self.unit, pull.key)
        block = self.plan.joined_rows(pull.key).blocks[self.unit.server]
        num_rows = int(block.starts[-1])
        if len(pull.ids) % 8 or len(pull.ids) // 8 > block.most:
            raise ProtocolError(f"a pull of rows of key {pull.key} brings {len(pull.ids)} bytes of ids")
        ids = np.frombuffer(pull.ids, "<i8")
        if not are_rows(ids, num_rows):
            raise ProtocolError(
                f"a pull names rows of key {pull.key} twice, not in ascending order, or beyond its {num_rows} here"
            )
        found = self.shard.take_rows(self.unit, pull.key, torch.from_numpy(ids.astype(np.int64)))
        return RowPart(block.pieces[0].index, found.view(-1), m.VALUES)

    def _pack(self, pieces: Sequence[Slice], rows: Rows) -> list[RowPart]:
        """Write rows of a stack that have changed, in as few parts as have room for them."""
        unit, plan = self.unit, self.plan
        first, parts = pieces[0], dict[int, RowSet | Tensor]()
        for position, ids in rows.items():
            segment = first.segments[position]
            if ids is None:
                whole = self.shard.visible(unit, first.index)
                parts[position] = whole[segment.start : segment.start + segment.numel]
            else:
                parts[position] = RowSet(ids, self.shard.rows_of(unit, segment.key).index_select(0, ids))
        only = parts.get(0)
        if len(pieces) == 1 or not isinstance(only, RowSet):
            return [RowPart(unit.slots[first.index], encode_rows(plan, first, parts), m.ROWS)]
        return self._cut(plan.rows(first.segments[0].key).blocks[unit.server], only)

    def _pack_joined(self, keys: Sequence[int], changed: Mapping[int, Rows | None]) -> list[RowPart]:
        """Write rows of stacks that lie side by side as `_pack`. The last one ends their run."""
        unit, block = self.unit, self.plan.joined_rows(keys[0]).blocks[self.unit.server]
        of_keys = []
        for key in keys:
            own = (changed[key] or {}).get(0, _NO_IDS)
            assert own is not None
            of_keys.append(own + int(block.starts[block.order[unit.stacks[key][0].index]]))
        ids = torch.cat(of_keys)
        return self._cut(block, RowSet(ids, self.shard.take_rows(unit, keys[0], ids)))

    def _cut(self, block: RowBlock, rows: RowSet) -> list[RowPart]:
        """Write rows of a block in as few parts as have room for them."""
        found = []
        for at, end, part in block.cut(rows.ids.numpy()):
            piece, some = block.pieces[at], RowSet(rows.ids[part] - int(block.starts[at]), rows.values[part])
            data = encode_rows(self.plan, piece, {0: some}, end - at)
            found.append(RowPart(self.unit.slots[piece.index], data, m.ROWS))
        return found


def norm_to_hold(parts: Parts) -> float:
    """Return the type of norm for which all ranks want their sum held; 0 where they do not.

    Raises:
        PlanMismatchError: ranks differ in that.
    """
    lowest, first = next(iter(parts.items()))
    for rank, part in parts.items():
        if part.hold != first.hold:
            raise PlanMismatchError(
                f"ranks disagree on what is checked of the gradient before it is applied: rank {lowest} "
                f"{_described(first.hold)}, rank {rank} {_described(part.hold)}; give clip_grad, amp and on_nonfinite "
                "the same values on every worker"
            )
    return first.hold


def _described(hold: float) -> str:
    return f"wants its norm of type {hold:g}" if hold else "wants nothing to be checked"


def _bytes_of(plan: Plan, pieces: Sequence[Slice], rows: Rows) -> int:
    """About as many as the rows and their ids have when they are sent."""
    total = 0
    for position, ids in rows.items():
        spec = plan.specs[pieces[0].segments[position].key]
        if ids is None:
            total += sum([piece.segments[position].numel for piece in pieces]) * SIZES[spec.dtype]
        else:
            total += len(ids) * (row_numel(spec) * SIZES[spec.dtype] + 4)
    return total
