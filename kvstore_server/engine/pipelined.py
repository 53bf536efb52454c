"""Pipelined rounds: slices are applied and answered while other slices are still on their way.

Gradients and new weights travel in opposite directions, so over a network both can travel at once. A rank may declare
its intent for a round, a commit in advance, before it sends its slices. Once all ranks have declared intents that
agree (`_begin_pipelined_round`), a slice that every rank has given, except ranks that give none, is summed, applied and
answered immediately. A slice that arrives in parts is applied as far as all ranks have given it. The last slice waits
for the commits, which end the round like any other (`finish`).

A rank that still computes gradients declares a tentative intent and may revise it; what was applied stays if it fits
the revision, too.

Until its end the round may still fail: a rank may declare or commit something else, or its process may be replaced. So
a copy of the table is kept, and `roll_back` restores it. Weights that were already sent are superseded by others of a
higher version.

Intents have no other effect. A round whose intent is lost or does not fit is applied after all commits. So is a round
that is held, vetoed or assigned, or whose optimizer may raise or needs whole keys.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.engine.memory import size_of_copy
from kvstore_server.engine.namespace import Namespace
from kvstore_server.engine.rounds import Intent, Ints, RankInputs, Waiter
from kvstore_server.engine.table import PipelinedRound, Table
from kvstore_server.errors import ConfigurationError, KVStoreError
from kvstore_server.optimizer import Optimizer
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import SENT_ALONE

_log = logging.getLogger(__name__)

MIN_PIPELINED = SENT_ALONE
"""Tables with at least this many bytes on this server are pipelined."""
_STEP = 1024
"""Parts of a slice end at multiples of this many elements: whole cache lines, and whole units of every kernel."""
_PLAIN = (
    m.DECLARES_INTENT
    | m.TENTATIVE
    | m.WANTS_WEIGHTS
    | m.WANTS_HALF
    | m.DISCARD_EAGER
    | m.MAPS_WEIGHTS
    | m.LOCATIONS_CACHED
)
"""Commit flags that allow pipelining."""


class PipelinedSlots(NamedTuple):
    """A slot, or a part of it, that is applied at once; in elements."""

    slot: int
    begin: int
    end: int
    size: int
    """Of the whole slot."""

    @property
    def is_whole(self) -> bool:
        return self.end - self.begin == self.size


def declare_intent(space: Namespace, rank: int, body: m.Contribute, waiter: Waiter) -> list[m.Outgoing]:
    """Record a rank's intent; with the last one begin to apply. Raises ProtocolError if it names unknown slices."""
    out: list[m.Outgoing] = []
    tracker = space.rounds.shared
    is_plain = space.mode.is_sync and not body.hold and not body.absent
    for commit in body.commits.tolist() if is_plain else ():
        number, round_, *_, flags = commit
        table = space.table(number)
        is_open = round_ == tracker.number(number) and not tracker.has_committed(rank, number)
        if is_open and not flags & ~_PLAIN and tracker.declare_intent(rank, commit, body, waiter):
            _check_revised_pipelined_intent(space, table, rank)
            if table.pipelined is None:
                _begin_pipelined_round(space, table)
            if table.pipelined is not None:
                out += _advance_pipelined_table(space, table, table.pipelined.left)
    return out


def _check_revised_pipelined_intent(space: Namespace, table: Table, rank: int) -> None:
    """Roll the round back unless what was applied fits a rank's revised intent, too."""
    state, intent = table.pipelined, space.rounds.shared.inputs[rank].intents[table.number]
    if state is None:
        return
    former = state.intents[rank]
    is_equal = intent == former._replace(packed=intent.packed, is_firm=intent.is_firm)
    if is_equal and _fits_pipelined_intent(table, state, former, intent.arrivals):
        state.intents = {**state.intents, rank: intent}
    else:
        roll_back(space, table)


def _fits_pipelined_intent(table: Table, state: PipelinedRound, intent: Intent, arrivals: Ints) -> bool:
    """Return whether the intent has the given marks for every slice that is applied in part or whole."""
    is_applied = np.ones(len(arrivals), np.bool_)
    is_applied[[slot - table.unit.first for slot, begin in state.left.items() if not begin]] = False
    return bool((intent.arrivals == arrivals)[is_applied].all())


def _begin_pipelined_round(space: Namespace, table: Table) -> None:
    """Begin to pipeline a table's round if all ranks have declared it and the table and optimizer allow it."""
    # 1. All ranks must have declared an intent, and the table must be usable.
    tracker, number = space.rounds.shared, table.number
    intents = {r: inputs.intents[number] for r, inputs in tracker.inputs.items() if number in inputs.intents}
    is_ready = table.is_initialised and table.conflict is None and space.recording.active is None
    if len(intents) < tracker.num_members or not is_ready:
        return
    # 2. They must agree on the optimizer and hyper-parameters.
    # Hyper-parameters of the intent replace those sent before, but are not stored before the commit.
    declared = {rank: one.hyper for rank, one in intents.items() if one.hyper}
    try:
        for packed in set(declared.values()):
            table.hyper.check(packed)
        optimizer = space.optimizer.agreed()
        hyper = table.hyper.common(intents, declared)
        hypers = () if optimizer is None else table.hypers((), optimizer, hyper)
    except KVStoreError:
        return  # the commits will report it
    # 3. It must pay, and be possible: a large table, an elementwise optimizer that cannot raise, memory for a copy.
    is_long = space.rounds.slots.nbytes[table.unit.first : table.unit.end].sum() > MIN_PIPELINED
    # Rows of a hash table come and go once a round.
    is_simple = not space.shard.hash_tables and (
        optimizer is None or (optimizer.elementwise and not optimizer.may_raise)
    )
    if is_long and is_simple and _has_room_to_pipeline(space, table, optimizer):
        left = range(table.unit.first, table.unit.end)
        table.pipelined = PipelinedRound(optimizer, hyper, hypers, intents, dict.fromkeys(left, 0))
        space.rounds.pipelined.add(number)
        space.log_rounds("pipelined", tracker, [table])


def _has_room_to_pipeline(space: Namespace, table: Table, optimizer: Optimizer | None) -> bool:
    """Claim memory for the copy that is kept until the round is over; the claim is kept for later rounds."""
    if space.changes is not None:
        return True  # the journal's shadow, claimed with the table
    needed = size_of_copy(table.plan, table.unit.server, optimizer)
    try:
        space.claim(
            max(needed - table.undo_nbytes, 0), f"a copy of table {table.name!r}, to roll a round back,"
        )
    except ConfigurationError as error:
        if not table.is_tight:
            _log.warning("rounds of table %r are not applied slice by slice: %s", table.name, error)
            table.is_tight = True
        return False
    table.undo_nbytes = max(needed, table.undo_nbytes)
    return True


def advance(space: Namespace, slots: Sequence[int]) -> list[m.Outgoing]:
    """Apply and answer slices that all ranks have given, after some of these slots arrived."""
    out: list[m.Outgoing] = []
    for number in space.rounds.pipelined.intersection(space.rounds.slots.table[list(slots)].tolist()):
        out += _advance_pipelined_table(space, space.tables[number], slots)
    return out


def _advance_pipelined_table(space: Namespace, table: Table, slots: Iterable[int]) -> list[m.Outgoing]:
    """Apply what all ranks have given of these slots, except the last slice of the table."""
    state = table.pipelined
    assert state is not None
    some = sorted(state.left.keys() & slots)
    sizes = _pipelined_slot_sizes(space, some)
    levels = _pipelined_levels(space, table, some, sizes)
    ready = [
        PipelinedSlots(slot, state.left[slot], level, size)
        for slot, level, size in zip(some, levels, sizes, strict=True)
        if level > state.left[slot]
    ]
    # The last slice waits for the commits, so that the round cannot be complete before them.
    if sum([one.end == one.size for one in ready]) == len(state.left):
        ready.pop()
    if not ready or not _apply_pipelined_portions(space, table, ready):
        return []
    return _send_pipelined_weights(space, table, ready, state.intents.values())


def _pipelined_slot_sizes(space: Namespace, slots: Iterable[int]) -> list[int]:
    return [space.shard.storage.padded[slot].numel() for slot in slots]


def _pipelined_levels(
    space: Namespace, table: Table, slots: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    state, first = table.pipelined, table.unit.first
    assert state is not None
    levels = list(sizes)
    for rank, intent in state.intents.items():
        own, arrivals = space.rounds.shared.inputs[rank], intent.arrivals
        if len(slots) == 1:  # the common case; scalars take a tenth of the time of arrays
            [slot] = slots
            # Not complete in the declared generation; perhaps in part.
            if own.arrivals[slot] != arrivals[slot - first]:
                levels = [min(levels[0], _received_pipelined_elements(own, slot, arrivals[slot - first]))]
            continue
        some = np.array(slots, np.int64)
        for at in (own.arrivals[some] != arrivals[some - first]).nonzero()[0].tolist():
            levels[at] = min(
                levels[at], _received_pipelined_elements(own, slots[at], arrivals[slots[at] - first])
            )
    return levels


def _received_pipelined_elements(own: RankInputs, slot: int, arrival: int) -> int:
    """Return how many elements a rank has given of a slot that has not arrived completely."""
    partial = own.partial.get(slot)
    return partial.end // _STEP * _STEP if partial is not None and partial.arrival == arrival else 0


def _apply_pipelined_portions(space: Namespace, table: Table, portions: Sequence[PipelinedSlots]) -> bool:
    """Apply some portions; return False if one cannot be applied, after rolling the whole round back."""
    state = table.pipelined
    assert state is not None
    whole = np.array([one.slot for one in portions if one.is_whole], np.int64)
    try:
        # 1. Keep what the round changes. As late as possible: a round that is never applied in part needs no copy.
        if state.undo is None:
            state.undo = table.shard.hold_former(table.unit)
            space.note_tables([table.number])
        ranks = [(space.rounds.shared.inputs[rank], intent) for rank, intent in state.intents.items()]
        how = state.optimizer, state.hypers, table.unit
        # 2. Whole slots in one call, which is faster than one call each.
        if len(whole):
            contributions = [
                space.contribution(intent, state.optimizer, own.ranges(whole)) for own, intent in ranks
            ]
            table.shard.update_some(contributions, *how)
        # 3. Parts of slots one by one: only these elements have come from all ranks.
        for one in portions:
            if not one.is_whole:
                part = space.shard.storage.slots[one.slot].slice.dtype, one.begin, one.end
                at = one.slot - table.unit.first
                contributions = [
                    space.contribution(
                        intent, state.optimizer, own.part(one.slot, int(intent.arrivals[at]), *part)
                    )
                    for own, intent in ranks
                ]
                table.shard.update_part(contributions, *how, one.slot, one.begin, one.end)
    except Exception:
        _log.exception("a round of table %r is applied when all have committed", table.name)
        roll_back(space, table)
        return False
    # 4. Record how far each slot is; one that is complete is no longer listed.
    state.left |= {one.slot: one.end for one in portions}
    for one in portions:
        if one.end == one.size:
            del state.left[one.slot]
    return True


def _send_pipelined_weights(
    space: Namespace, table: Table, portions: Sequence[PipelinedSlots], ranks: Iterable[Intent]
) -> list[m.Outgoing]:
    waiting = [(one.waiter, bool(one.flags & m.WANTS_HALF)) for one in ranks if _wants_pipelined_bytes(one)]
    bodies = {
        half: _build_pipelined_weights(space, table, portions, half) for half in {half for _, half in waiting}
    }
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, bodies[half])) for waiter, half in waiting]


def _build_pipelined_weights(
    space: Namespace, table: Table, portions: Sequence[PipelinedSlots], half: bool
) -> m.Weights:
    """Build a message with portions of new weights. Parts of slots are copied, because the slot is still changing."""
    storage, version = space.shard.storage, table.version + 1
    parts, payloads = list[tuple[int, ...]](), list[Tensor]()
    for one in portions:
        weights, word = storage.padded[one.slot], one.slot
        payload = storage.half(one.slot, version) if half and one.is_whole else weights
        if not one.is_whole:
            is_wide = weights.is_floating_point() and weights.dtype.itemsize > torch.bfloat16.itemsize
            payload = weights[one.begin : one.end]
            payload = payload.to(torch.bfloat16) if half and is_wide else payload.clone()
            word |= one.end << m.PART
        kind = m.WHOLE if payload.dtype == weights.dtype else m.HALF
        parts.append((word, version, kind, payload.nbytes))
        payloads.append(payload)
        table.bytes_out += payload.nbytes
    return m.Weights(m.matrix(parts, 4), tuple(payloads), space.mode.is_sync)


def _wants_pipelined_bytes(intent: Intent) -> bool:
    return intent.flags & (m.WANTS_WEIGHTS | m.MAPS_WEIGHTS) == m.WANTS_WEIGHTS


def finish(space: Namespace, table: Table) -> list[m.Outgoing] | None:
    """Apply the rest after all commits, and answer the ranks that already have the other weights.

    Returns None if nothing of the round stays applied, because the commits differ from the intents.
    """
    state, tracker, number = table.pipelined, space.rounds.shared, table.number
    # 1. The commits must equal the intents.
    assert state is not None
    is_as_declared = state.undo is not None and (number not in {of for of, _ in space.absent})
    for rank, one in state.intents.items():
        inputs = tracker.of(rank)
        info, flags = inputs.commit_infos[number], int(inputs.flags[number]) | m.DECLARES_INTENT
        # The commit must have the same terms and flags as the intent.
        is_as_declared &= (
            info is not None and info.is_plain and (info.rescale, flags) == (one.rescale, one.flags)
        )
        is_as_declared &= _fits_pipelined_intent(
            table, state, one, inputs.arrivals[table.unit.first : table.unit.end]
        )
    try:
        is_as_declared &= table.hyper.common(state.intents) == state.hyper
    except KVStoreError:
        is_as_declared = False
    # 2. Apply what is left.
    sizes = _pipelined_slot_sizes(space, state.left)
    left = [PipelinedSlots(*one, size, size) for one, size in zip(state.left.items(), sizes, strict=True)]
    if not is_as_declared or not _apply_pipelined_portions(space, table, left):
        roll_back(space, table)
        return None
    # 3. Answer. Ranks that received the other slices get the rest; all others are answered as in any round.
    answered = []
    for rank, one in state.intents.items():
        waiters = tracker.of(rank).waiters
        if _wants_pipelined_bytes(one) and waiters[number] == one.waiter:
            answered.append(one)
            waiters[number] = None
    out = _send_pipelined_weights(space, table, left, answered)
    table.pipelined = None
    space.rounds.pipelined.discard(number)
    table.shard.release_former(table.unit)
    table.shard.count([table.unit])
    table.changed(state.hyper)
    if state.undo is not None:
        table.shard.keep_undo(table.unit, state.undo)
    return out


def roll_back(space: Namespace, table: Table) -> None:
    """Undo what was applied of a table's open round, if anything; it is then applied as a whole, or fails."""
    state, table.pipelined = table.pipelined, None
    space.rounds.pipelined.discard(table.number)
    if state is not None and state.undo is not None:
        table.shard.restore(table.unit, state.undo)
        table.shard.release_former(table.unit)
        space.note_tables([table.number])
        table.version += 1  # a rollback is a change, too
        space.log_rounds("rolled_back", space.rounds.shared, [table])


def roll_back_for_read(space: Namespace, rank: int, tables: Iterable[int]) -> None:
    """Roll back before a read by a rank whose intent is tentative and not committed; otherwise the read deadlocks."""
    for number in space.rounds.pipelined.intersection(tables):
        table = space.tables[number]
        assert table.pipelined is not None
        if not (table.pipelined.intents[rank].is_firm or space.rounds.shared.has_committed(rank, number)):
            # It reads before it commits: nothing else would end the round.
            roll_back(space, table)


def roll_back_broken(space: Namespace) -> None:
    """Roll back rounds that depend on an intent of a replaced process that it did not commit."""
    ranks = space.rounds.shared.inputs.values()
    for number in list(space.rounds.pipelined):
        if not all(one.committed[number] or number in one.intents for one in ranks):
            roll_back(space, space.tables[number])
