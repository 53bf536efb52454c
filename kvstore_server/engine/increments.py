"""Short log records for rounds that end like the one before: by how much each number of an image has grown.

After most rounds the image of a namespace differs from that of the round before in a few numbers: rounds, versions and
counters of the same tables, and the update counts of their keys, each grown by the same amount in all of them. Such a
round is logged as a `RoundIncrements`: which earlier image, and how much more. `increments_of` makes one if nothing
else has changed, `expand_increments` returns the image that it stands for.

Increments count from the image that they name, not from each other, so only the last ones of each image are needed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from kvstore_server.engine.changes import ImageChanges
from kvstore_server.engine.image import (
    COUNTERS,
    Image,
    ImageSegments,
    image_client_rows,
    image_end_rows,
    image_hyper_rows,
    image_knows_entries,
    image_knows_tensors,
    image_numbers,
    locate_image_segments,
    unpack_image,
)
from kvstore_server.engine.namespace import Namespace
from kvstore_server.engine.rounds import Ints
from kvstore_server.engine.table import ALL, RoundEnd, Table
from kvstore_server.errors import RecoveryError

_COLUMNS = COUNTERS + 5
_HEAD = struct.Struct(f"<{2 + _COLUMNS}q")


class IncrementBase(NamedTuple):
    """An image that increments can count from."""

    number: int
    tables: list[Table]
    where: ImageSegments
    ids: Ints
    """The numbers of the tables."""
    values: Ints
    """All columns of numbers, one behind the other."""
    firsts: Ints
    """Where each column begins."""
    column: Ints
    """For each value its column."""
    hyper: bytes | None
    """The options in effect for the round, if it has ended like most: with an update and without a decision."""
    tracks_changes: bool


class RoundIncrements(NamedTuple):
    """What a record says.

    Attributes:
        number: Of the image that the columns count from.
        columns: By how much each has grown.
        clients, hypers: As in an image; empty if they have not changed.
        ends: How the round has ended, as in an image; None: as in that image, with the present version.
    """

    number: int
    columns: Sequence[int]
    clients: Sequence[Any] = ()
    hypers: Sequence[Any] = ()
    ends: Sequence[Any] | None = None

    def packed(self, space: int) -> bytes:
        """Encode it, of the namespace with that number."""
        head = _HEAD.pack(space, self.number, *self.columns)
        if self.ends is None and not self.clients and not self.hypers:
            return head
        return head + bytes(msgpack.packb([self.clients, self.hypers, self.ends], use_bin_type=True))


def unpack_increments(data: bytes) -> tuple[int, RoundIncrements]:
    """Return the number of the namespace, and what `packed` has encoded. Raises RecoveryError if it is not that."""
    if len(data) < _HEAD.size:
        raise RecoveryError(f"the stored log has a record of a round of {len(data)} bytes")
    space, number, *columns = _HEAD.unpack_from(data)
    more = unpack_image(data[_HEAD.size :]) if len(data) > _HEAD.size else ()
    return space, RoundIncrements(number, columns, *more)


def note_increment_base(space: Namespace, image: Image) -> None:
    """Let later rounds of the same tables be logged as increments of an image that was just made, if they can be."""
    changes = space.changes
    assert changes is not None
    if "tables" not in image or "pipelined" in image or not space.mode.is_sync:
        return
    key = tuple(image["shard"]["numbers"])
    tables = [space.tables[number] for number in key]
    if not _can_increment_tables(space, changes, tables):
        return
    end = tables[0].ends.get(ALL)
    where, ids = locate_image_segments(space, tables), np.array(key, np.int64)
    values, lengths = image_numbers(space, ids, tables, where)
    changes.last_base += 1
    base = IncrementBase(
        changes.last_base,
        tables,
        where,
        ids,
        values,
        np.cumsum([0, *lengths[:-1]]),
        np.repeat(np.arange(len(lengths)), lengths),
        end.hyper if end is not None and _can_increment_ends(tables, end.hyper) else None,
        space.shard.tracks_changes,
    )
    changes.keep_base(key, base)
    image["base"] = base.number


def increments_of(space: Namespace) -> RoundIncrements | None:
    """Return what has changed since the last image of the same tables, and begin to collect changes again.

    None: something has changed that needs an image; nothing was done then.
    """
    changes = space.changes
    assert changes is not None
    if (
        changes.has_members
        or changes.has_optimizer
        or changes.is_new
        or changes.num_declared < len(space.tables)
    ):
        return None
    numbers = changes.tables
    base = changes.bases.get(tuple(numbers) if len(numbers) == 1 else tuple(sorted(numbers)))
    if base is None or space.rounds.pipelined or base.tracks_changes != space.shard.tracks_changes:
        return None
    # 1. Everything that is not a number must be as it was, except for how the round has ended.
    if not _can_increment_tables(space, changes, base.tables) or not image_knows_entries(space, base.where):
        return None
    # 2. All numbers of a column must have grown by the same amount.
    values, _ = image_numbers(space, base.ids, base.tables, base.where)
    grown = values - base.values
    columns = grown[base.firsts]
    if grown.tobytes() != columns[base.column].tobytes():
        return None
    clients = image_client_rows(space) if changes.clients else ()
    hypers = image_hyper_rows(space, sorted(changes.hypers)) if changes.hypers else ()
    changes.clear()
    is_usual = base.hyper is not None and _can_increment_ends(base.tables, base.hyper)
    return RoundIncrements(
        base.number, columns.tolist(), clients, hypers, None if is_usual else image_end_rows(base.tables)
    )


def expand_increments(image: Image, more: RoundIncrements) -> Image:
    """Return the image that increments of an image stand for, as far as tables and the shard are concerned."""
    ids, rounds, failed, failures, counters, ends, of_ends, conflicts = image["tables"]
    shard = image["shard"]
    by = iter(more.columns)
    new = [_add_increment(rounds, [next(by)]), _add_increment(failed, [next(by)])]
    of_counters = [next(by) for _ in range(COUNTERS)]
    if more.ends is None:  # each has the version of its table
        ends = [[version + of_counters[0], *rest] for version, *rest in ends]
    else:
        ends, of_ends = more.ends
    counted = {name: _add_increment(shard[name], [next(by)]) for name in ("counts", "steps", "protected")}
    return {
        "tables": [ids, *new, failures, _add_increment(counters, of_counters), ends, of_ends, conflicts],
        "shard": {
            "numbers": shard["numbers"], "runs": shard["runs"], "notes": shard["notes"], "deltas": [], "reads": [],
            **counted,
        },
    }  # fmt: skip


def _add_increment(data: bytes, by: Sequence[int]) -> bytes:
    return (np.frombuffer(data, np.int64).reshape(-1, len(by)) + np.array(by, np.int64)).tobytes()


def _can_increment_tables(space: Namespace, changes: ImageChanges, tables: Sequence[Table]) -> bool:
    """Return whether all that an image says of these tables, `ends` aside, are numbers, and memory that it knows."""
    storage, shared = space.shard.storage, space.rounds.shared
    if storage.moved_to or changes.steps.get(-1) or not image_knows_tensors(storage, changes):
        return False
    for table in tables:
        if (
            table.conflict is not None
            or table.deltas is not None
            or table.unit.reads
            or shared.failures(table.number)
        ):
            return False
    return True


def _can_increment_ends(tables: Sequence[Table], hyper: bytes) -> bool:
    """Return whether the last round of all tables was an update with these options."""
    for table in tables:
        if len(table.ends) != 1 or table.ends.get(ALL) != RoundEnd(table.version, hyper=hyper):
            return False
    return True
