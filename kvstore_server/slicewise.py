"""Rounds that are applied slice by slice, while other slices of them are still on their way.

A rank may announce a commit before it gives its slices. When all ranks have announced what fits together, neighbouring
slices that all of them have given, but for ranks that give none, are summed, applied and answered at once. So on a
network new weights travel while gradients do, in the other direction. A slice that comes in parts is applied as far as
all ranks have given it. What is last waits for the commits, with which the round ends as any other.

A rank that gives slices while it still computes others announces what is to be expected, and may say otherwise later.
What was applied stays if it fits to that as well.

Until its end the round may still fail, a rank may say or commit something else, or its process be replaced by one that
does: a copy of the table is kept, and what was changed is taken back. Weights that were sent by then are superseded by
others of a higher version. Announcements have no other effect: a round of which one is lost, or does not fit, is
applied when all have committed. So is one that is held, vetoed or assigned, or whose optimizer may raise or needs whole
keys.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvstore_server.errors import ConfigurationError, KVStoreError
from kvstore_server.memory import size_of_copy
from kvstore_server.namespace import Namespace
from kvstore_server.optimizer import Optimizer
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import SENT_ALONE
from kvstore_server.rounds import Announced, Ints, Waiter
from kvstore_server.table import Begun, Portion, Table

_log = logging.getLogger(__name__)

TOGETHER = SENT_ALONE
"""Bytes of neighbouring slices that are applied together, where they are smaller than that by themselves."""
_STEP = 4096
"""Bytes of whose multiples the parts of a slice are: whole lines, in whole units of every kernel."""
_PLAIN = (
    m.ANNOUNCES | m.MAY_CHANGE | m.WANTS_WEIGHTS | m.WANTS_HALF | m.ANEW | m.MAPS_WEIGHTS | m.KNOWS_PLACES
)
"""Flags of commits to rounds that can be applied slice by slice."""


def announce(space: Namespace, rank: int, body: m.Contribute, waiter: Waiter) -> list[m.Outgoing]:
    """Note what a rank is going to commit; with the last rank's announcement, apply what has come already.

    Raises:
        ProtocolError: it names slices that are not of its table.
    """
    out: list[m.Outgoing] = []
    book = space.rounds.shared
    is_plain = space.mode.is_sync and not body.hold and not body.absent
    for commit in body.commits.tolist() if is_plain else ():
        number, round_, *_, flags = commit
        table = space.table(number)
        is_open = round_ == book.number(number) and not book.has_committed(rank, number)
        if is_open and not flags & ~_PLAIN and book.announce(rank, commit, body, waiter):
            _go_on(space, table, rank)
            if table.begun is None:
                _begin(space, table)
            if table.begun is not None:
                out += _advance(space, table, table.begun.left)
    return out


def _go_on(space: Namespace, table: Table, rank: int) -> None:
    """A rank has announced something else than before: take back what was applied, unless it fits to that, too."""
    begun, news = table.begun, space.rounds.shared.given[rank].announced[table.number]
    if begun is None:
        return
    former = begun.said[rank]
    is_alike = news == former._replace(packed=news.packed, is_firm=news.is_firm)
    if is_alike and _fits(table, begun, former, news.marks):
        begun.said = {**begun.said, rank: news}
    else:
        take_back(space, table)


def _fits(table: Table, begun: Begun, said: Announced, marks: Ints) -> bool:
    """Tell whether a rank has announced the same marks of those slices of which something was applied."""
    is_applied = np.ones(len(marks), np.bool_)
    for one in begun.left:
        if not one.begin:
            is_applied[one.slots.start - table.unit.first : one.slots.stop - table.unit.first] = False
    return bool((said.marks == marks)[is_applied].all())


def _begin(space: Namespace, table: Table) -> None:
    """Let a round be applied slice by slice, if all ranks have announced it and it may be."""
    book, number = space.rounds.shared, table.number
    said = {r: given.announced[number] for r, given in book.given.items() if number in given.announced}
    is_ready = table.is_initialised and table.conflict is None and space.recording.active is None
    if len(said) < book.num_members or not is_ready:
        return
    news = {rank: one.hyper for rank, one in said.items() if one.hyper}
    try:
        for packed in set(news.values()):
            table.hyper.check(packed)
        optimizer = space.optimizer.agreed()
        hyper = table.hyper.common(said, news)
        hypers = () if optimizer is None else table.hypers((), optimizer, hyper)
    except KVStoreError:
        return  # the commits hear of it
    nbytes = space.rounds.slots.nbytes
    left = _portions(table.unit.first, nbytes[table.unit.first : table.unit.end].tolist())
    is_long = len(left) > 1 or nbytes[table.unit.first] > TOGETHER
    is_simple = optimizer is None or (optimizer.elementwise and not optimizer.may_raise)
    if is_long and is_simple and _has_room(space, table, optimizer):
        table.begun = Begun(optimizer, hyper, hypers, said, left)
        space.rounds.begun.add(number)


def _has_room(space: Namespace, table: Table, optimizer: Optimizer | None) -> bool:
    """Claim memory for the copy that is kept until the round is over; the table has it from then on."""
    needed = size_of_copy(table.plan, table.unit.server, optimizer)
    try:
        space.claim(
            max(needed - table.undo_nbytes, 0), f"a copy of table {table.name!r}, to take a round back,"
        )
    except ConfigurationError as error:
        if not table.is_tight:
            _log.warning("rounds of table %r are not applied slice by slice: %s", table.name, error)
            table.is_tight = True
        return False
    table.undo_nbytes = max(needed, table.undo_nbytes)
    return True


def _portions(first: int, sizes: Sequence[int]) -> list[Portion]:
    """Divide slots from one on, of so many bytes, into neighbours that are applied together."""
    found, begin, nbytes = list[Portion](), first, 0
    for slot, size in enumerate(sizes, first):
        nbytes += size
        if nbytes >= TOGETHER or slot == first + len(sizes) - 1:
            found.append(Portion(range(begin, slot + 1)))
            begin, nbytes = slot + 1, 0
    return found


def advance(space: Namespace, slots: Collection[int]) -> list[m.Outgoing]:
    """Some slices have come: apply and answer those that all ranks have given now."""
    out: list[m.Outgoing] = []
    for number in space.rounds.begun.intersection(space.rounds.slots.table[list(slots)].tolist()):
        table = space.tables[number]
        assert table.begun is not None
        touched = [one for one in table.begun.left if any(slot in one.slots for slot in slots)]
        out += _advance(space, table, touched)
    return out


def _advance(space: Namespace, table: Table, touched: Sequence[Portion]) -> list[m.Outgoing]:
    """Apply of those portions what all ranks have given, but for what is last of all."""
    begun = table.begun
    assert begun is not None
    found = [_given_of(space, begun, one) for one in touched]
    ready = [one for one in found if one is not None]
    if ready == begun.left:
        ready.pop()
    if not ready or not _apply(space, table, ready):
        return []
    # Also the commit of a rank that has said only what is to be expected may be another one.
    may_go = not all([one.is_firm for one in begun.said.values()])
    return _weights(space, table, ready, begun.said.values(), may_go)


def _given_of(space: Namespace, begun: Begun, portion: Portion) -> Portion | None:
    """Return what of a portion all ranks have given; None where that is nothing."""
    slots, given = portion.slots, space.rounds.shared.given
    levels, size = list[int](), int(space.rounds.slots.nbytes[slots.start])
    first = slots.start - int(space.rounds.slots.first[space.rounds.slots.table[slots.start]])
    for rank, one in begun.said.items():
        own, marks = given[rank], one.marks[first : first + len(slots)]
        growing = own.growing.get(slots.start)
        if (own.marks[slots.start : slots.stop] == marks).all():
            levels.append(size)
        else:
            levels.append(growing.level if growing is not None and growing.mark == marks[0] else 0)
    if min(levels) == size:
        return portion
    end = min(levels) // _STEP * _STEP
    return portion._replace(end=end) if len(slots) == 1 and end > portion.begin else None


def _apply(space: Namespace, table: Table, portions: Sequence[Portion]) -> bool:
    """Apply some portions; returns False where all of them are taken back, because that is not possible."""
    begun = table.begun
    assert begun is not None
    whole = [one.slots for one in portions if not one.is_part]
    ranks = [(space.rounds.shared.given[rank], said) for rank, said in begun.said.items()]
    try:
        if begun.undo is None:
            begun.undo = table.shard.snapshot(table.unit)
        if whole:
            slots = np.concatenate([np.arange(own.start, own.stop) for own in whole])
            given = [space.contribution(own, said, slots, begun.optimizer) for own, said in ranks]
            table.shard.update_some(given, begun.optimizer, begun.hypers, table.unit)
        for one in portions:
            if one.is_part:
                place = _place(space, one)
                parts = [space.contribution_in(own, said, place, begun.optimizer) for own, said in ranks]
                table.shard.update_part(parts, begun.optimizer, begun.hypers, table.unit, *place)
    except Exception:
        _log.exception("a round of table %r is applied when all have committed", table.name)
        take_back(space, table)
        return False
    ends = {one.slots: one.end for one in portions}
    begun.left = [
        one._replace(begin=ends.get(one.slots, one.begin)) for one in begun.left if ends.get(one.slots, 1)
    ]
    return True


def _place(space: Namespace, part: Portion) -> tuple[int, int, int]:
    """The slot of a part of a slice, and where it begins and ends there, in elements."""
    [slot] = part.slots
    size = space.shard.storage.padded[slot].dtype.itemsize
    end = part.end or int(space.rounds.slots.nbytes[slot])
    return slot, part.begin // size, end // size


def _weights(
    space: Namespace, table: Table, portions: Sequence[Portion], ranks: Iterable[Announced], may_go: bool
) -> list[m.Outgoing]:
    """Send the weights of some portions, which may go again or not, to those of some ranks that want them as bytes."""
    out = list[m.Outgoing]()
    slots = [slot for one in portions if not one.is_part for slot in one.slots]
    parts = [_place(space, one) for one in portions if one.is_part]
    told = list(filter(_wants_bytes, ranks))
    for half in {bool(one.flags & m.WANTS_HALF) for one in told}:
        bodies = [space.weights_in(*part, table.version + 1, half) for part in parts]
        if slots:
            bodies.append(space.weights_of(table, slots, table.version + 1, half))
        for body in bodies if may_go else ():
            body.parts[:, 2] |= m.MAY_GO
        for one in told:
            if bool(one.flags & m.WANTS_HALF) == half:
                out += [m.Outgoing(one.waiter.peer, m.Reply(one.waiter.number, body)) for body in bodies]
    return out


def _wants_bytes(said: Announced) -> bool:
    return said.flags & (m.WANTS_WEIGHTS | m.MAPS_WEIGHTS) == m.WANTS_WEIGHTS


def finish(space: Namespace, table: Table) -> list[m.Outgoing] | None:
    """All ranks have committed: apply what is left, and answer those that have had the rest of the weights.

    None: nothing of the round is applied, because it is not as it was announced.
    """
    begun, book, number = table.begun, space.rounds.shared, table.number
    assert begun is not None
    is_as_said = begun.undo is not None and (number not in {of for of, _ in space.absent})
    for rank, one in begun.said.items():
        given = book.of(rank)
        said, flags = given.said[number], int(given.flags[number]) | m.ANNOUNCES
        is_as_said &= said is not None and said.is_plain and (said.rescale, flags) == (one.rescale, one.flags)
        is_as_said &= _fits(table, begun, one, given.marks[table.unit.first : table.unit.end])
    try:
        is_as_said &= table.hyper.common(begun.said) == begun.hyper
    except KVStoreError:
        is_as_said = False
    left = begun.left
    if not is_as_said or not _apply(space, table, left):
        take_back(space, table)
        return None
    told = []
    for rank, one in begun.said.items():
        waiters = book.of(rank).waiters
        if _wants_bytes(one) and waiters[number] == one.waiter:
            told.append(one)
            waiters[number] = None
    out = _weights(space, table, left, told, may_go=False)
    table.begun = None
    space.rounds.begun.discard(number)
    table.shard.count([table.unit])
    table.changed(begun.hyper)
    return out


def take_back(space: Namespace, table: Table) -> None:
    """Undo what has been applied of the open round of a table, if anything has: it is applied as a whole, or fails."""
    begun, table.begun = table.begun, None
    space.rounds.begun.discard(table.number)
    if begun is not None and begun.undo is not None:
        table.shard.restore(table.unit, begun.undo)
        table.version += 1  # also the way back is a change


def let_read(space: Namespace, rank: int, tables: Iterable[int]) -> None:
    """A rank wants to read tables: what it may give otherwise is taken back, or it would wait for itself."""
    for number in space.rounds.begun.intersection(tables):
        table = space.tables[number]
        assert table.begun is not None
        if not (table.begun.said[rank].is_firm or space.rounds.shared.has_committed(rank, number)):
            take_back(space, table)


def take_back_broken(space: Namespace) -> None:
    """Take back the rounds of which a rank has not committed what a former process of it has announced."""
    given = space.rounds.shared.given.values()
    for number in list(space.rounds.begun):
        if not all(one.committed[number] or number in one.announced for one in given):
            take_back(space, space.tables[number])
