"""One table of a namespace: what its rounds do to its weights, and what its ranks hold.

`rounds` decides which contributions make a round and `engine` who is answered. A `Table` is called with the complete
contributions of a round and

- assigns values, or updates them with the optimizer (`apply`), or holds the sum until ranks decide about it (`hold`,
  `apply_held`);
- keeps how the last round ended (`ends`), so that a repeated commit gets the same answer;
- remembers, if the optimizer needs it, the weights that each rank last read;
- packs the rows that changed since the version that a worker has (`changed_parts`).

Invariants: `version` grows by one with every change of the weights, including an undo. A round that raises has changed
nothing, except when an update of a built-in optimizer breaks off midway: then the table is in conflict and refuses all
further use.
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
from kvstore_server.engine.agreed_options import AgreedOptions
from kvstore_server.engine.rounds import SYNCHRONOUS, Intent, Mode
from kvstore_server.errors import (
    ConfigurationError,
    KeyNotFoundError,
    KVStoreError,
    OptimizerError,
    PlanMismatchError,
    ProtocolError,
)
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import MAX_SLICE, SIZES, Ints, Plan, RowBlock, Slice, row_numel
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import (
    HeldRows,
    RowSet,
    are_hashes,
    are_row_ids,
    encode_rows,
    read_held_rows,
)
from kvstore_server.shard.deltas import Deltas
from kvstore_server.shard.norms import UNCHANGED, Decision, same_decision
from kvstore_server.shard.reduction import RankContribution
from kvstore_server.shard.shard import HeldSum, Partial, Shard, Updater
from kvstore_server.shard.storage import Rows, Undo

_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
ALL = -1
"""Stands for all ranks together where a rank is expected."""


class RankCommit(NamedTuple):
    """One rank's committed contribution to a round of a table."""

    contribution: RankContribution
    flags: int = 0
    version: int = -1
    hold: float = 0.0


class RowPart(NamedTuple):
    """What a worker is sent for one slice."""

    slot: int
    payload: Tensor
    kind: int
    """WHOLE, ROWS, VALUES or DELTA (see `messages`)."""


class _WantedRows(NamedTuple):
    """Rows of a key that a worker asks for."""

    key: int
    block: RowBlock
    ids: Ints
    held: HeldRows | None


Parts = Mapping[int, RankCommit]
"""Rank → its contribution, in rank order, without ranks that have joined."""


class RoundEnd(NamedTuple):
    """How the last applied round of a rank ended."""

    version: int
    left_out: tuple[int, ...] = ()
    """The keys on this server that no rank contributed to."""
    vetoes: tuple[int, ...] = ()
    """The ranks whose veto left the weights unchanged."""
    hyper: bytes = b""
    """The effective hyper-parameters, packed as they were sent."""
    is_over: bool = False
    """True if all ranks have joined."""
    partials: tuple[Partial, ...] = ()
    """The measurements of a held sum."""
    decision: Decision = Decision()
    """The decision about a held sum."""
    is_skipped: bool = False
    """True if nothing was changed although ranks contributed."""


@dataclass(frozen=True)
class HeldRound:
    """The open round, committed by all ranks, while its sum waits for a decision."""

    optimizer: Optimizer
    hyper: bytes
    hypers: Sequence[Mapping[str, Any]]
    sum: HeldSum


@dataclass
class PipelinedRound:
    """The open round while it is applied slice by slice: all ranks have declared what they will commit."""

    optimizer: Optimizer | None
    hyper: bytes
    hypers: Sequence[Mapping[str, Any]]
    intents: Mapping[int, Intent]
    left: dict[int, int]
    """Slots that are not fully applied → the first element that is not."""
    undo: Undo | None = None
    """The table before the first slice was applied."""


class Table:
    """The weights of one table on one server, with what its ranks hold and have read."""

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
        # 1. What it is.
        self.number = number
        self.name = name
        self.plan = plan
        self.mode = mode
        self.num_workers = num_workers
        self.shard = shard
        self.unit = self.shard.add(plan, server)
        keys = range(self.unit.first_key, self.unit.first_key + len(plan.specs))
        self._hash_tables = [shard.hash_tables[key] for key in keys if key in shard.hash_tables]
        self.deltas = None if delta_codec is None else Deltas(delta_codec, shard.storage, self.unit)
        """If new weights are sent as encoded changes: the weights that workers have."""
        self.tracks_reads = False
        """Whether the optimizer needs to know what each rank has read."""
        self.extra_reads = 0
        """Copies of weights that are claimed for that, beyond one for each rank."""
        # 2. The state of its open round.
        self.hyper = AgreedOptions(plan)
        self.conflict: KVStoreError | None = None
        """Why the table cannot be used any more: ranks declared different keys, or an update failed midway."""
        self.held: HeldRound | None = None
        self.pipelined: PipelinedRound | None = None
        self.undo_nbytes = 0
        """Bytes claimed for the copy that a pipelined round needs."""
        self.is_tight = False
        """True once it was logged that there is no memory for that copy."""
        # 3. The state of its weights, and counters.
        self.is_initialised = False
        """True once round 0 was applied."""
        self.version = -1
        """How often the weights have changed since their first values."""
        self.rounds_applied = self.keys_applied = 0
        self.undone = 0
        self.decisions_differing = 0
        """Decisions about a round that differed from the applied one."""
        self.bytes_in = 0
        """Payload bytes received from ranks, as sent: compressed, or rows only."""
        self.bytes_out = 0
        """Bytes of weights sent."""
        self.ends: dict[int, RoundEnd] = {}
        """Rank, or ALL → how its last applied round ended."""
        self.last_rank = ALL
        """The rank whose contribution was applied last, or ALL."""
        self._changed: tuple[tuple[int, int], list[RowPart]] | None = None
        """The last changes sent: the versions (from, to) and the parts."""

    def __repr__(self) -> str:
        states = {
            "in conflict": self.conflict is not None,
            "held": self.held is not None,
            "pipelined": self.pipelined is not None,
        }
        state = ", ".join([name for name, holds in states.items() if holds]) or (
            "ready" if self.is_initialised else "not initialised"
        )
        return f"<{type(self).__name__} {self.number} {self.name!r}, version {self.version}: {state}>"

    @property
    def full(self) -> str:
        """Why a round might fail here alone, for want of room for its new rows; empty: it will not."""
        tables = self._hash_tables if self.plan.num_servers > 1 else ()
        return next((one.full for one in tables if one.full), "")

    def begin_round(self, whose: int) -> None:
        """Make the last round of a rank, or of ALL, final, because a slice of the next one has arrived."""
        if self.last_rank in (ALL, whose):
            self.shard.undos.pop(self.unit, None)

    def hold(self, parts: Parts, optimizer: Optimizer | None, updater: Updater | None) -> bool:
        """Sum a round of all ranks, if they want to decide about the sum before it is applied; return whether it is
        held.

        Raises:
            PlanMismatchError: Ranks disagree about that, or about hyper-parameters.
            ConfigurationError: Holding is not possible with this mode or optimizer.
        """
        if not self.is_initialised or not any(part.hold for part in parts.values()):
            return False
        if any(part.flags & (m.ASSIGNS | m.VETOES) for part in parts.values()):
            return False
        norm_type = table_norm_to_hold(parts)
        if optimizer is None or updater is not None or not self.mode.is_sync:
            raise ConfigurationError(
                f"a gradient of {self.name!r} cannot be checked before it is applied: that needs synchronous rounds "
                "and an optimizer that the store runs"
            )
        hyper = self.hyper.common(parts)
        contributions = [part.contribution for part in parts.values()]
        hypers = self.hypers(contributions, optimizer, hyper)
        held = self.shard.hold(contributions, optimizer, hypers, norm_type, self.unit)
        self.held = HeldRound(optimizer, hyper, hypers, held)
        return True

    def apply_held(self, decision: Decision) -> None:
        """Update with the held sum as was decided. Raises like `apply`."""
        assert self.held is not None
        held = self.held
        self.shard.undos.pop(self.unit, None)
        end = RoundEnd(self.version)
        if not decision.skip:
            self._update([held.sum.total], held.optimizer, held.hypers, decision)
            end = self._applied([held.sum.total], held.hyper)
        self.held = None
        end = end._replace(partials=held.sum.partials, decision=decision, is_skipped=decision.skip)
        self.ends[ALL], self.last_rank = end, ALL

    def apply(
        self,
        whose: int,
        round_: int,
        parts: Parts,
        optimizer: Optimizer | None,
        updater: Updater | None,
        joined: Collection[int],
    ) -> None:
        """Apply a round that all of its members have committed.

        Args:
            whose: The rank, or ALL.
            parts: The contributions of members that have data.
            joined: Ranks whose hyper-parameters do not count.

        Raises:
            KVStoreError: The round cannot be applied; nothing has changed.
        """
        self.shard.undos.pop(self.unit, None)
        is_lane = whose != ALL
        vetoes = tuple(rank for rank, part in parts.items() if part.flags & m.VETOES)
        # All members have joined: nothing changes, and all take part again.
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
        self.ends[whose], self.last_rank = end, whose

    def _change(
        self, parts: Parts, optimizer: Optimizer | None, updater: Updater | None, hyper: bytes, is_lane: bool
    ) -> RoundEnd:
        contributions = [part.contribution for part in parts.values()]
        if updater is not None:
            self.shard.call_updater(self.unit, contributions, updater)
        elif optimizer is not None:
            hypers = self.hypers(contributions, optimizer, hyper)
            if is_lane:
                hypers = self._delayed(parts, optimizer, hypers)
            self._update(contributions, optimizer, hypers)
        elif not self.mode.is_sync:
            raise ConfigurationError(
                f"{self.name!r} got a contribution in {self.mode.name} mode but has no optimizer to apply it; call "
                "set_optimizer on every worker before the first push"
            )
        else:
            self.shard.assign_sum(contributions)
        return self._applied(contributions, hyper)

    def _assign(self, round_: int, parts: Parts, is_lane: bool) -> None:
        rank, first = next(iter(parts.items()))
        updating = [r for r, part in parts.items() if not part.flags & m.ASSIGNS]
        if is_lane and not first.contribution.runs:
            return  # another rank's lane assigns the values
        if round_ and not is_lane and len(parts) < self.num_workers:
            raise PlanMismatchError(
                f"ranks replace the values of {self.name!r} while another rank has no more data; call set_data outside "
                "the join() block"
            )
        if round_ and updating:
            raise PlanMismatchError(
                f"rank {updating[0]} updates {self.name!r} in a round in which other ranks replace its values; "
                "call set_data, or add_param_group, before the same step on every worker"
            )
        # After round 0, values of row-sparse keys may be left out: only servers have them.
        needed = self.plan.resident_slices_of(self.unit.server) if round_ else self.unit.slices
        here = {slot for run in first.contribution.runs for slot in range(run.first, run.end)}
        missing = [slice_.index for slice_ in needed if self.unit.slots[slice_.index] not in here]
        if missing:
            raise ProtocolError(
                f"rank {rank} gave table {self.name!r} values without its slices {missing[:8]}"
            )
        self.shard.assign_sum([first.contribution._replace(scale=1.0)])
        if self.deltas is not None:
            self.deltas.reset()
        self.is_initialised = True
        self.version += 1
        self.reset_reads(range(self.num_workers))

    def reset_reads(self, ranks: Iterable[int], others: Mapping[int, Tensor] | None = None) -> None:
        """Let ranks compute with the current weights from now on, and drop what they read before.

        `others` as in `Shard.copy_read`. Without effect unless the optimizer needs to know what ranks have read.
        """
        if self.tracks_reads:
            read = self.shard.copy_read(self.unit, self.version, others)
            self.unit.reads |= {rank: [read] for rank in ranks}

    def record_read(
        self, rank: int, has_room: Callable[[int], bool], others: Mapping[int, Tensor] | None = None
    ) -> None:
        """Record that a rank was sent the current weights, which it may or may not compute with.

        Its next commit names the version that it computed with. Until then the weights that it had before are kept as
        well; of several pulls the last two.

        Args:
            has_room: Returns whether there is memory for this many copies of the weights beyond one for each rank; if
                not, the older ones are dropped.
        """
        reads = self.unit.reads
        known = reads.get(rank, [])
        if not self.tracks_reads or any(one.version == self.version for one in known):
            return
        former = [*known[:1], *known[1:][-1:]]
        others_more = sum([len(own) - 1 for other, own in reads.items() if other != rank])
        # Without memory the older reads are dropped; the correction is then less exact.
        if former and not has_room(others_more + len(former)):
            former = []
        everywhere = itertools.chain.from_iterable(reads.values())
        read = next((one for one in everywhere if one.version == self.version), None)
        reads[rank] = [*former, read or self.shard.copy_read(self.unit, self.version, others)]

    def hypers(
        self, contributions: Sequence[RankContribution], optimizer: Optimizer, hyper: bytes
    ) -> Sequence[Mapping[str, Any]]:
        """Return the hyper-parameters with which the optimizer updates each key.

        Args:
            contributions: The contributions to the round; empty if all ranks give all keys.
            hyper: The effective hyper-parameters, as they were sent.

        Raises:
            ConfigurationError: The optimizer cannot update the table.
        """
        if not optimizer.elementwise and not self.plan.whole_keys and len(self.plan.servers) > 1:
            raise ConfigurationError(
                f"optimizer {optimizer.registered_name!r} needs whole keys, but {self.name!r} is spread over "
                f"{len(self.plan.servers)} servers; set the optimizer on every worker before the next push"
            )
        rate = None
        if optimizer.lr_scheduler is not None:
            # Each table counts its own updates, so neither other keys nor the number of servers matter.
            count = optimizer.begin_num_update + self.shard.updates_after(self.unit, contributions)
            rate = float(optimizer.lr_scheduler(count))
        return self.hyper.effective(optimizer, hyper, rate)

    def _delayed(
        self, parts: Parts, optimizer: Optimizer, hypers: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Correct for updates of others since this rank read the weights: delay compensation, or a smaller rate."""
        [(rank, part)] = parts.items()
        if self.tracks_reads and optimizer.delay_state is not None:
            self.shard.restore_read(self.unit, rank, part.version, optimizer.delay_state)
        # How many updates were applied since the weights that the rank computed with.
        staleness = self.version - part.version if part.version >= 0 else 0
        if not self.mode.slow_down or staleness <= 1:
            return hypers
        # Keys with equal hyper-parameters share one mapping object; equal objects are updated together.
        slowed = {id(row): {**row, "lr": row["lr"] / staleness} if "lr" in row else row for row in hypers}
        return [slowed[id(row)] for row in hypers]

    def _update(
        self,
        contributions: Sequence[RankContribution],
        optimizer: Optimizer,
        hypers: Sequence[Mapping[str, Any]],
        decision: Decision = UNCHANGED,
    ) -> None:
        try:
            self.shard.update(contributions, optimizer, [hypers], [self.unit], decision)
        except OptimizerError:
            raise  # the shard has undone it
        except Exception as error:
            raise self.break_off(error) from error

    def break_off(self, error: Exception) -> KVStoreError:
        """Refuse all further use, because an update failed midway and left weights half updated."""
        # No copy is kept for built-in optimizers, so the weights cannot be restored.
        self.conflict = KVStoreError(
            f"the update of {self.name!r} failed midway with {type(error).__name__}: {error}; its weights may be half "
            "updated. Restart the job from its last saved states"
        )
        return self.conflict

    def changed(self, hyper: bytes, end: RoundEnd | None = None) -> RoundEnd:
        """Count a round of all ranks that changed every key; return how it ended (`end` itself if that is equal)."""
        self.shard.undos.pop(self.unit, None)
        self.version += 1
        self.rounds_applied += 1
        self.keys_applied += len(self.unit.keys)
        if self.deltas is not None:
            self.deltas.record_round(())
        if end is None or end.version != self.version or end.hyper != hyper:
            end = RoundEnd(self.version, hyper=hyper)
        self.ends[ALL], self.last_rank = end, ALL
        return end

    def _applied(self, contributions: Sequence[RankContribution], hyper: bytes) -> RoundEnd:
        keys = self.unit.keys
        # If any rank gave all keys, none was left out by all.
        if all(one.absent for one in contributions):
            first = self.unit.first_key  # a Shard numbers the keys of all of its tables
            keys = frozenset(
                key for key in keys if any(first + key not in one.absent for one in contributions)
            )
        self.version += 1
        self.rounds_applied += 1
        self.keys_applied += len(keys)
        left_out = () if keys is self.unit.keys else tuple(sorted(self.unit.keys - keys))
        if self.deltas is not None:
            self.deltas.record_round(left_out)
        return RoundEnd(self.version, left_out, (), hyper)

    def fail(self, whose: int) -> None:
        self.held = None
        self.begin_round(whose)

    def undo(self, whose: int) -> bool:
        """Undo the last round of a rank, or of ALL; return whether that was possible."""
        end = self.ends[whose]
        if end.is_skipped or end.is_over:
            self.undone += 1
            return True  # it changed nothing
        # Final: a slice of the next round, or another rank's contribution, has come.
        if self.unit not in self.shard.undos or self.last_rank != whose:
            return False
        self.shard.undo(self.unit)
        if self.deltas is not None:
            self.deltas.reset()  # workers may have received a part of it
        self.version += 1  # an undo is a change, too
        self.undone += 1
        return True

    def record_decision(self, decision: Decision) -> bool:
        """Return whether a decision about the last round equals the applied one; count it if not."""
        is_same = same_decision(decision, self.ends[ALL].decision)
        self.decisions_differing += not is_same
        return is_same

    # ---------------------------------------------------------------- rows

    def changed_parts(self, held: int) -> list[RowPart]:
        """Return what a worker with version `held` of all its slices must be sent; empty ROWS for unchanged keys."""
        # 1. Find the rows that changed; None stands for a whole key.
        if self.deltas is not None:
            self._follow(self.deltas)
        versions = held, self.version
        if self._changed is not None and self._changed[0] == versions:
            return self._changed[1]
        unit, parts, packed = self.unit, list[RowPart](), set[int]()
        changed = {key: self._changed_rows(key, held) for key in unit.key_slices}
        if self.deltas is not None:
            firsts = {key: unit.slots[slices[0].index] for key, slices in unit.key_slices.items()}
            changed |= {key: None for key, first in firsts.items() if not self.deltas.has_exact(first, held)}
        # 2. Pack them: encoded changes, a row group in common parts, whole slices, or rows.
        for key, slices in unit.key_slices.items():
            first, rows = unit.slots[slices[0].index], changed[key]
            if key in packed:
                continue
            if self.deltas is not None and first in self.deltas:
                slots = range(first, first + len(slices))
                found = [(slot, *self.deltas.parts(slot, held)) for slot in slots]
                parts += [
                    RowPart(slot, own, m.DELTA if is_delta else m.WHOLE) for slot, own, is_delta in found
                ]
                continue
            keys = self._changed_group(key, changed)
            if len(keys) > 1:
                packed.update(keys)
                parts += self._pack_joined(keys, changed)
            elif rows is None:
                slots = range(first, first + len(slices))
                parts += [RowPart(slot, self.shard.storage.padded[slot], m.WHOLE) for slot in slots]
            elif not rows:
                parts.append(RowPart(first, torch.empty(0, dtype=torch.uint8, device="cpu"), m.ROWS))
            else:
                parts += self._pack(slices, rows)
        # 3. Keep them for the next worker, which probably has the same version.
        self._changed = versions, parts
        return parts

    def _follow(self, deltas: Deltas) -> None:
        """Bring the copy of workers' weights up to date; keys that changed by rows are sent as rows from now on."""
        for key, slices in self.unit.key_slices.items():
            own = [slot for slice_ in slices if (slot := self.unit.slots[slice_.index]) in deltas]
            rows = self._changed_rows(key, deltas.version) if own else None
            if rows and any(ids is not None for ids in rows.values()):  # otherwise whole keys have changed
                deltas.leave(own, self.version)
        deltas.follow(self.version)

    def _changed_rows(self, key: int, held: int) -> Rows | None:
        """Return the rows of a key to send; None if sending the whole key is not longer."""
        # Recording starts with the first request for changes; it costs time in every update.
        self.shard.tracks_changes = True
        slices, rows = self.unit.key_slices[key], self.unit.changes.since(key, held, self.version)
        if rows and _table_row_bytes(self.plan, slices, rows) >= sum([slice_.nbytes for slice_ in slices]):
            return None
        return rows

    def _changed_group(self, key: int, changed: Mapping[int, Rows | None]) -> list[int]:
        """Return the keys of the row group from `key` on if all of them are sent as rows; otherwise that key alone."""
        group = self.plan.row_groups.get(key, ())
        if len(group) < 2:
            return [key]
        keys = [one for one in group[group.index(key) :] if one in changed]
        ids = [None if (rows := changed[one]) is None else rows.get(0, _NO_IDS) for one in keys]
        return keys if all(one is not None for one in ids) and any(changed[one] for one in keys) else [key]

    def pulled_part(self, pull: m.PullRows, is_former: bool = False) -> RowPart:
        """Return the values of the requested rows, flat. Raises ProtocolError unless they exist and fit a message.

        Args:
            is_former: As they were before the last round, which the caller knows to be kept.
        """
        if not pull.keys or not len(pull.keys) == len(pull.ids) == len(pull.held):
            raise ProtocolError(f"a pull of rows names {len(pull.keys)} keys and ids of {len(pull.ids)} keys")
        # 1. Check all keys before rows are copied.
        given = zip(pull.keys, pull.ids, pull.held, strict=True)
        wanted = [_WantedRows(key, *self._pulled_ids(key, ids, held)) for key, ids, held in given]
        nbytes = sum([len(one.ids) * one.block.row_nbytes for one in wanted])
        if nbytes > MAX_SLICE and sum([len(one.ids) for one in wanted]) > 1:
            raise ProtocolError(
                f"a pull of rows of {len(wanted)} keys has {nbytes} bytes of ids and values: too many for one message"
            )
        # 2. Copy their rows.
        found = [self._pulled_rows(one, is_former) for one in wanted]
        values = found[0].view(-1)
        if len(found) > 1:
            values = torch.cat([rows.view(-1).view(torch.uint8) for rows in found])
        return RowPart(wanted[0].block.slices[0].index, values, m.VALUES)

    def _pulled_ids(self, key: int, packed: bytes, held: bytes) -> tuple[RowBlock, Ints, HeldRows | None]:
        self.shard.check_rows(self.unit, key)
        block = self.plan.joined_rows(key).blocks[self.unit.server]
        if len(packed) % 8:
            raise ProtocolError(
                f"a pull of rows of key {key} has {len(packed)} bytes of ids: not whole numbers of 8 bytes"
            )
        ids = np.frombuffer(packed, "<i8").astype(np.int64)
        are_valid = (
            are_hashes(ids, block.starts[:-1]) if block.is_hashed else are_row_ids(ids, block.starts[-1])
        )
        if not are_valid:
            raise ProtocolError(
                f"a pull names rows of key {key} twice, not in ascending order, or some that are not here"
            )
        if held and not block.is_hashed:
            raise ProtocolError(f"a worker says what it has of key {key}, which is not a hash table")
        return block, ids, read_held_rows(held, len(ids))

    def _pulled_rows(self, wanted: _WantedRows, is_former: bool) -> Tensor:
        key, block, ids, held = wanted
        if block.is_hashed:
            return self.shard.pull_hash_table(self.unit, key, ids, held, is_former)
        if not is_former:
            return self.shard.take_rows(self.unit, key, torch.from_numpy(ids))
        cuts = np.searchsorted(ids, block.starts).tolist()
        parts = []
        for slice_, first, begin, end in zip(block.slices, block.starts, cuts, cuts[1:], strict=False):
            own = torch.from_numpy(ids[begin:end] - first)
            rows = self.shard.storage.former_rows(self.unit.slots[slice_.index], block.position, own)
            assert rows is not None
            parts.append(rows)
        return torch.cat(parts)

    def _pack(self, slices: Sequence[Slice], rows: Rows) -> list[RowPart]:
        unit, plan = self.unit, self.plan
        first, parts = slices[0], dict[int, RowSet | Tensor]()
        for position, ids in rows.items():
            segment = first.segments[position]
            if ids is None:
                whole = self.shard.visible(unit, first.index)
                parts[position] = whole[segment.start : segment.start + segment.numel]
            else:
                parts[position] = RowSet(ids, self.shard.rows_of(unit, segment.key).index_select(0, ids))
        only = parts.get(0)
        if len(slices) == 1 or not isinstance(only, RowSet):
            return [RowPart(unit.slots[first.index], encode_rows(plan, first, parts), m.ROWS)]
        return self._cut(plan.rows(first.segments[0].key).blocks[unit.server], only)

    def _pack_joined(self, keys: Sequence[int], changed: Mapping[int, Rows | None]) -> list[RowPart]:
        unit, block = self.unit, self.plan.joined_rows(keys[0]).blocks[self.unit.server]
        of_keys = []
        for key in keys:
            own = (changed[key] or {}).get(0, _NO_IDS)
            assert own is not None
            of_keys.append(own + int(block.starts[block.order[unit.key_slices[key][0].index]]))
        ids = torch.cat(of_keys)
        return self._cut(block, RowSet(ids, self.shard.take_rows(unit, keys[0], ids)))

    def _cut(self, block: RowBlock, rows: RowSet) -> list[RowPart]:
        found = []
        for at, end, part in block.cut(rows.ids.numpy()):
            slice_, some = block.slices[at], RowSet(rows.ids[part] - int(block.starts[at]), rows.values[part])
            data = encode_rows(self.plan, slice_, {0: some}, end - at)
            found.append(RowPart(self.unit.slots[slice_.index], data, m.ROWS))
        return found


def table_norm_to_hold(parts: Parts) -> float:
    """Return the norm type for which ranks want their sum held, or 0. Raises PlanMismatchError if they disagree."""
    lowest, first = next(iter(parts.items()))
    for rank, part in parts.items():
        if part.hold != first.hold:
            raise PlanMismatchError(
                f"ranks disagree on what is checked of the gradient before it is applied: rank {lowest} "
                f"{_describe_table_norm_check(first.hold)}, rank {rank} {_describe_table_norm_check(part.hold)}; "
                "give clip_grad, amp and on_nonfinite the same values on every worker"
            )
    return first.hold


def _describe_table_norm_check(hold: float) -> str:
    return f"wants its norm of type {hold:g}" if hold else "wants nothing to be checked"


def _table_row_bytes(plan: Plan, slices: Sequence[Slice], rows: Rows) -> int:
    total = 0
    for position, ids in rows.items():
        spec = plan.specs[slices[0].segments[position].key]
        if ids is None:
            total += sum([slice_.segments[position].numel for slice_ in slices]) * SIZES[spec.dtype]
        else:
            total += len(ids) * (row_numel(spec) * SIZES[spec.dtype] + 4)
    return total
