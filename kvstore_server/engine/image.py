"""What a namespace's state is, as plain values: the *image* of what has changed, and its inverse.

An image contains everything that later answers depend on, except numbers that lie in durable memory, and except what
the workers send again after a restart: slices, commits of open rounds, waits. It has the parts that have changed since
the last image, in columns; later images replace what earlier ones say about the same table, session or key. A whole
image is one in which everything counts as changed. `apply_image` sets what it says in a namespace with the same tables.

The state of a table whose round is applied slice by slice is its state before that round: the journal undoes the rest.

Counters that only people read (bytes, messages, times that ranks were late) begin again with zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from operator import is_
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from torch import Tensor

from kvstore_server.commands import CommandAnswer
from kvstore_server.durable.memory import typed_durable_memory
from kvstore_server.engine.changes import ImageChanges
from kvstore_server.engine.membership import RankSession, Sessions
from kvstore_server.engine.namespace import Lineage, Namespace
from kvstore_server.engine.rounds import Ints, RoundTracker
from kvstore_server.engine.table import RoundEnd, Table
from kvstore_server.errors import KVStoreError, RecoveryError, from_wire, to_wire
from kvstore_server.optimizer.state import Entries, FlatStateEntry
from kvstore_server.optimizer.trees import decode_tree_entry, encode_tree_entry
from kvstore_server.plan import tensor_spec_from
from kvstore_server.processes import ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
from kvstore_server.shard.norms import Decision
from kvstore_server.shard.shard import Partial
from kvstore_server.shard.storage import Block, Read, Storage, Undo

Image = dict[str, Any]


def pack_image(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpack_image(data: bytes) -> Any:
    """Decode what `pack_image` has encoded; checksums have shown that it is that. Raises RecoveryError otherwise."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise RecoveryError(f"the stored log cannot be decoded: {error!r}") from None


def make_image(space: Namespace, sessions: Sessions) -> Image:
    """Return what has changed of a namespace since the last call, and begin to collect changes again."""
    changes = space.changes
    assert changes is not None
    image: Image = {}
    if changes.is_new:
        mode = space.mode
        terms = [mode.name, mode.staleness, mode.slow_down, mode.by_host]
        views = (0, 0, 0) if space.views is None else space.views.terms[1:]
        image["space"] = [space.name, space.membership.num_workers, *terms, *views]
        image["lineage"] = list(space.lineage)
    declared = [_image_declaration(space, table) for table in space.tables[changes.num_declared :]]
    if declared:
        image["declared"] = declared
    if changes.has_optimizer:
        image["optimizer"] = space.optimizer.sent()
    if changes.has_members:
        image["members"] = _image_members(space, changes.num_barriers)
        changes.num_barriers = space.membership.barrier_sequence
        image["sessions"] = _image_session_rows(sessions, changes.sessions)
    if changes.hypers:
        image["hypers"] = image_hyper_rows(space, sorted(changes.hypers))
    if changes.clients:
        image["clients"] = image_client_rows(space)
    pipelined = [n for n in sorted(space.rounds.pipelined) if _undo_of_image(space.tables[n]) is not None]
    if pipelined:
        image["pipelined"] = pipelined
    if changes.tables:
        tables = [space.tables[number] for number in sorted(changes.tables)]
        image["tables"] = _image_table_columns(space, tables)
        image["shard"] = _image_shard_columns(space, tables)
        if not space.mode.is_sync:
            image["lanes"] = _image_lanes(space, sorted(changes.tables))
    changes.num_declared = len(space.tables)
    changes.clear()
    return image


def make_common_image(space: Namespace) -> Image:
    """Return what of a whole image depends neither on processes nor on where memory is; only of synchronous rounds.

    Open rounds have left nothing in it, except options that ranks send again.
    """
    mode, tables, rounds = space.mode, space.tables, space.rounds.shared
    clients = {
        (number, rank): [(at, state) for at, state in states if at < rounds.number(number)]
        for (number, rank), states in space.client_states.items()
    }
    views = space.views
    ranks = {} if views is None else {"ranks": list(views.current.ranks) or sorted(views.former)}
    return {
        "space": [
            space.name, space.membership.num_workers, mode.name, mode.staleness, mode.slow_down, mode.by_host
        ],
        **ranks,
        "declared": [_image_declaration(space, table) for table in tables],
        "optimizer": space.optimizer.sent(),
        "hypers": image_hyper_rows(space, range(len(tables))),
        "clients": [[*key, states] for key, states in sorted(clients.items())],
        "tables": _image_table_columns(space, tables),
    }  # fmt: skip


def members_of_image(image: Image) -> Sequence[int]:
    """Return who took part in the round that was open in what `make_common_image` has returned."""
    num_workers: int = image["space"][1]
    members: Sequence[int] = image.get("ranks", range(num_workers))
    return members


def image_client_rows(space: Namespace) -> list[Any]:
    """Return (table, rank, what its successor gets) where that has changed."""
    assert space.changes is not None
    return [[*key, space.client_states.get(key, [])] for key in sorted(space.changes.clients)]


def _image_declaration(space: Namespace, table: Table) -> list[Any]:
    plan = table.plan
    form = b"" if table.deltas is None else pack_control(table.deltas.codec.spec())
    specs = [list(spec.fields) for spec in plan.specs]
    return [space.registered_by(table), table.name, specs, plan.whole_keys, plan.one_server, form]


def register_of_image(row: Sequence[Any]) -> tuple[int, m.Register]:
    """Return the rank that declared a table, and its message, from a part "declared" of an image."""
    rank, name, specs, whole_keys, one_server, form = row
    own = tuple([tensor_spec_from(spec).fields for spec in specs])
    return rank, m.Register(name, own, whole_keys, one_server=one_server, delta_encoding=form)


# ---------------------------------------------------------------- members


def _image_members(space: Namespace, first_barrier: int) -> list[Any]:
    members, rounds = space.membership, space.rounds
    return [
        {rank: session.token for rank, session in members.members.items()},
        members.departed,
        sorted(members.failed),
        sorted(members.finished),
        sorted(members.resumable),
        members.barrier_sequence,
        [[at, list(data)] for at, data in members.gathered.items() if at >= first_barrier],
        sorted(rounds.left),
        rounds.shared.num_ended,
        [[ended, text] for ended, text in space.failures],
        [] if space.views is None else space.views.export(),
    ]


def _image_session_rows(sessions: Sessions, tokens: Iterable[int]) -> list[Any]:
    rows = []
    for session, reason in sessions.named(tokens):
        hello, seen = session.hello, session.seen_at if session.has_left else 0.0
        values = [getattr(hello, one.name) for one in fields(hello)]
        terms = [list(value) if isinstance(value, tuple) else value for value in values]
        told = session.how_ended, seen, _image_command_values(session.command)
        rows.append([session.token, terms, session.peer, reason, session.has_left, *told])
    return rows


def _image_command_values(answer: CommandAnswer | None) -> list[Any]:
    if answer is None:
        return []
    if isinstance(answer.body, m.Failed):
        return [answer.number, answer.body.code, answer.body.text]
    assert isinstance(answer.body, m.Status)
    return [answer.number, "", answer.body.values["answer"]]


def _command_of_image(values: Sequence[Any]) -> CommandAnswer | None:
    if not values:
        return None
    number, code, text = values
    return CommandAnswer(number, m.Failed(code, text) if code else m.Status({"answer": text}))


def restore_image_sessions(sessions: Sessions, rows: Iterable[Sequence[Any]], now: float) -> None:
    """Open and end the sessions of an image; they count as heard now."""
    for token, terms, peer, reason, has_left, how_ended, seen, command in rows:
        values: list[Any] = [tuple(term) if isinstance(term, list) else term for term in terms]
        hello = m.Hello(*values)
        session = RankSession(token, hello, peer, now, command=_command_of_image(command))
        if has_left:
            session.state, session.seen_at, session.last_heard = ProcessState.ENDED, seen, seen
            session.how_ended, session.is_logged, session.has_left = how_ended, True, True
        sessions.restore(session, reason)


def _apply_image_members(space: Namespace, sessions: Sessions, values: Sequence[Any]) -> None:
    tokens, departed, failed, finished, resumable, *barriers, left, num_ended, failures, views = values
    members, rounds = space.membership, space.rounds
    members.members = {
        rank: session for rank, token in tokens.items() if (session := sessions.known(token)) is not None
    }
    members.departed = dict(departed)
    members.failed, members.finished = set(failed), set(finished)
    members.resumable.update(resumable)  # shared by all namespaces of a job
    members.barrier_sequence, gathered = barriers
    for at, data in gathered:
        members.keep_gathered(at, tuple(data))
    rounds.left, rounds.shared.num_ended = set(left), num_ended
    space.failures.clear()
    space.failures.extend((ended, text) for ended, text in failures)
    if space.views is not None:
        space.views.restore(views)
        space.views.leaving = set(members.departed).intersection(space.views.current.ranks)
        rounds.shared.members = space.views.current.ranks
        space.count_members()


# ---------------------------------------------------------------- tables and rounds


class _DistinctImageValues:
    """Encodes objects once each, by identity: tables that ended together share what they say about it."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._known: dict[int, tuple[int, Any]] = {}

    def index(self, one: Any, encoded: Any) -> int:
        known = self._known.get(id(one))
        if known is None:
            known = self._known[id(one)] = len(self.values), one  # referenced, so that the id stays its own
            self.values.append(encoded(one))
        return known[0]


def _image_end_values(end: RoundEnd) -> list[Any]:
    partials = [list(one) for one in end.partials]
    return [
        end.version,
        end.left_out,
        end.vetoes,
        end.hyper,
        end.is_over,
        partials,
        end.decision,
        end.is_skipped,
    ]


def _round_end_of_image(values: Sequence[Any]) -> RoundEnd:
    version, left_out, vetoes, hyper, is_over, partials, decision, is_skipped = values
    measured = tuple([Partial(*one) for one in partials])
    return RoundEnd(
        version, tuple(left_out), tuple(vetoes), hyper, is_over, measured, Decision(*decision), is_skipped
    )


def image_end_rows(tables: Sequence[Table]) -> tuple[list[Any], list[Any]]:
    """Return the ends of rounds, and for each table (rank, which of them)."""
    ends = _DistinctImageValues()
    of_ends = [
        [[rank, ends.index(end, _image_end_values)] for rank, end in table.ends.items()] for table in tables
    ]
    return ends.values, of_ends


def _image_table_columns(space: Namespace, tables: Sequence[Table]) -> list[Any]:
    shared, numbers = space.rounds.shared, np.array([table.number for table in tables], np.int64)
    return [
        numbers.tobytes(),
        shared.numbers[numbers].tobytes(),
        shared.first_failed(numbers).tobytes(),
        _image_failures(shared, numbers.tolist()),
        _image_counters(tables).tobytes(),
        *image_end_rows(tables),
        {table.number: to_wire(table.conflict) for table in tables if table.conflict is not None},
    ]  # fmt: skip


COUNTERS = 7
"""How many numbers `_image_counters` has of each table, its version first."""


def _image_counters(tables: Sequence[Table]) -> Ints:
    found = [
        (t.version, t.rounds_applied, t.keys_applied, t.undone, t.decisions_differing, t.last_rank, t.is_initialised)
        for t in tables
    ]  # fmt: skip
    return np.array(found, np.int64)


def _image_failures(tracker: RoundTracker, numbers: Iterable[int]) -> list[Any]:
    found = [(number, tracker.failures(number)) for number in numbers]
    return [[number, [[at, *to_wire(error)] for at, error in one.items()]] for number, one in found if one]


def _apply_image_tables(space: Namespace, values: Sequence[Any]) -> None:
    packed, rounds, failed, failures, counters, ends, of_ends, conflicts = values
    numbers, shared = _ints_of_image(packed), space.rounds.shared
    shared.restore(numbers, _ints_of_image(rounds), _ints_of_image(failed), _errors_of_image(failures))
    known = [_round_end_of_image(one) for one in ends]
    rows = _ints_of_image(counters).reshape(len(numbers), -1).tolist()
    for number, row, own in zip(numbers.tolist(), rows, of_ends, strict=True):
        table = space.tables[number]
        table.version, table.rounds_applied, table.keys_applied, table.undone = row[:4]
        table.decisions_differing, table.last_rank, table.is_initialised = row[4], row[5], bool(row[6])
        table.ends = {whose: known[at] for whose, at in own}
        table.conflict = None
    for number, error in conflicts.items():
        space.tables[number].conflict = from_wire(*error)


def _errors_of_image(rows: Iterable[Any]) -> dict[int, dict[int, KVStoreError]]:
    return {number: {at: from_wire(code, text) for at, code, text in found} for number, found in rows}


def image_hyper_rows(space: Namespace, numbers: Iterable[int]) -> list[Any]:
    """Return the options that ranks have sent for some tables."""
    packed = _DistinctImageValues()
    rows = [
        [
            number,
            [[rank, packed.index(one, bytes)] for rank, one in space.tables[number].hyper.sent().items()],
        ]
        for number in numbers
    ]
    return [packed.values, rows]


def _apply_image_hypers(space: Namespace, values: Sequence[Any]) -> None:
    packed, rows = values
    for number, own in rows:
        space.tables[number].hyper.restore({rank: packed[at] for rank, at in own})


def _image_lanes(space: Namespace, numbers: Sequence[int]) -> list[Any]:
    rounds, some = space.rounds, np.array(numbers, np.int64)
    lanes = []
    for rank, lane in rounds.lanes.items():
        columns = (
            lane.numbers[some].tobytes(),
            lane.first_failed(some).tobytes(),
            _image_failures(lane, numbers),
        )
        lanes.append([rank, lane.num_ended, *columns])
    clocks = [rounds.clocks(number) for number in numbers]
    joined = [sorted(rounds.joined(number)) for number in numbers]
    return [some.tobytes(), sorted(rounds.lanes), lanes, clocks, joined]


def _apply_image_lanes(space: Namespace, values: Sequence[Any]) -> None:
    packed, ranks, lanes, clocks, joined = values
    numbers, rounds = _ints_of_image(packed), space.rounds
    for rank in rounds.lanes.keys() - set(ranks):
        del rounds.lanes[rank]
    for rank, num_ended, of_rank, failed, failures in lanes:
        lane = rounds.new_lane(rank)
        lane.num_ended = num_ended
        lane.restore(numbers, _ints_of_image(of_rank), _ints_of_image(failed), _errors_of_image(failures))
    for number, clock, of_table in zip(numbers.tolist(), clocks, joined, strict=True):
        rounds.clocks(number)[:] = clock
        rounds.joined(number).clear()
        rounds.joined(number).update(of_table)


# ---------------------------------------------------------------- the shard


def _undo_of_image(table: Table) -> Undo | None:
    return None if table.pipelined is None else table.pipelined.undo


class ImageSegments(NamedTuple):
    """Where some tables are in the shard."""

    tables: tuple[int, ...]
    runs: list[tuple[int, int, int]]
    """(block, first, end) of adjacent segments."""
    keys: list[tuple[int, int]]
    """(first, end) of adjacent keys."""
    slots: Ints


def _image_segments(blocks: Mapping[int, int], storage: Storage, tables: Sequence[Table]) -> ImageSegments:
    runs: list[tuple[int, int, int]] = []
    keys: list[tuple[int, int]] = []
    slots: list[int] = []
    for table in tables:
        unit = table.unit
        first, end = unit.first_key, unit.first_key + len(unit.plan.specs)
        if keys and keys[-1][1] == first:
            first = keys.pop()[0]
        keys.append((first, end))
        slots += range(unit.first, unit.end)
        for slot in storage.slots[unit.first : unit.end]:
            block, begin = blocks[id(slot.block)], slot.first
            if runs and runs[-1][0] == block and runs[-1][2] == begin:
                begin = runs.pop()[1]
            runs.append((block, begin, slot.last))
    return ImageSegments(tuple(table.number for table in tables), runs, keys, np.array(slots, np.int64))


def locate_image_segments(space: Namespace, tables: Sequence[Table]) -> ImageSegments:
    """Return where tables are in the shard; cached."""
    storage, changes = space.shard.storage, space.changes
    assert changes is not None
    blocks = {id(block): number for number, block in enumerate(storage.all_blocks)}
    key = tuple([table.number for table in tables])
    found: ImageSegments = changes.segments.get(key, _image_segments, blocks, storage, tables)
    return found


def _image_update_counts(space: Namespace, where: ImageSegments) -> tuple[list[Ints], list[Ints]]:
    """Return the update counts of keys, and of segments."""
    shard, blocks = space.shard, space.shard.storage.all_blocks
    counts = [shard.counts[first:end] for first, end in where.keys]
    return counts, [blocks[block].states.steps[first:end] for block, first, end in where.runs]


def image_numbers(
    space: Namespace, ids: Ints, tables: Sequence[Table], where: ImageSegments
) -> tuple[Ints, list[int]]:
    """Return the numbers that an image has of tables with those ids, as `COUNTERS` + 5 columns one behind the other.

    The second value is the length of each column.
    """
    shared, number = space.rounds.shared, len(tables)
    counts, steps = _image_update_counts(space, where)
    protected = space.shard.storage.protected_at[where.slots]
    parts = [
        shared.numbers[ids],
        shared.first_failed(ids),
        _image_counters(tables).T.reshape(-1),
        *counts,
        *steps,
        protected,
    ]
    lengths = [number] * (COUNTERS + 2) + [sum(map(len, counts)), sum(map(len, steps)), len(protected)]
    return np.concatenate(parts), lengths


def image_knows_tensors(storage: Storage, changes: ImageChanges) -> bool:
    """Return whether images have named all memory of the optimizer's state."""
    return all(
        [_image_knows_block(changes, number, block) for number, block in enumerate(storage.all_blocks)]
    )


def _image_knows_block(changes: ImageChanges, number: int, block: Block) -> bool:
    known, tensors = changes.tensors[number] if number < len(changes.tensors) else None, block.states.tensors
    return (
        known is not None
        and known.keys() == tensors.keys()
        and all(map(is_, known.values(), tensors.values()))
    )


def image_knows_entries(space: Namespace, where: ImageSegments) -> bool:
    """Return whether an image has named the entries of the state of all these segments."""
    assert space.changes is not None
    for block, first, end in where.runs:
        known = space.changes.entries.get(block, ())
        own = space.shard.storage.all_blocks[block].states.entries
        if not all(map(is_, own[first:end], known[first:end])):
            return False
    return True


def _image_shard_columns(space: Namespace, tables: Sequence[Table]) -> Image:
    """Return update counts, and which state each segment has; tensors of other shapes by value."""
    shard, changes = space.shard, space.changes
    assert changes is not None
    storage, kept = shard.storage, _DistinctImageValues()
    found: Image = {}
    # 1. Flat state and its memory, if there is new one.
    for number, block in enumerate(storage.all_blocks):
        if not _image_knows_block(changes, number, block):
            found.setdefault("blocks", []).append([number, _image_memory(space, block)])
            changes.tensors[number : number + 1] = [dict(block.states.tensors)]
    # 2. Update counts and segments; those of a round in progress as they were before it.
    named = [table for table in tables if _undo_of_image(table) is None]
    where = locate_image_segments(space, named)
    counts, steps = _image_update_counts(space, where)
    entries: list[list[int]] = []
    for at_block, first, end in where.runs:
        of_block = storage.all_blocks[at_block].states.entries
        _collect_image_entries(changes.entries, entries, kept, at_block, first, of_block[first:end])
    runs = list(where.runs)
    at = {id(block): number for number, block in enumerate(storage.all_blocks)}
    for table in tables if len(named) < len(tables) else ():
        undo = _undo_of_image(table)
        for number, states in enumerate(undo.states if undo is not None else (), table.unit.first):
            slot = storage.slots[number]
            runs.append((at[id(slot.block)], slot.first, slot.last))
            steps.append(states.steps)
            _collect_image_entries(changes.entries, entries, kept, runs[-1][0], slot.first, states.entries)
        if undo is not None:
            named.append(table)
            counts.append(undo.counts)
    found["numbers"] = [table.number for table in named]
    found["counts"] = np.concatenate(counts).tobytes()
    found["runs"] = runs
    found["steps"] = np.concatenate(steps).tobytes() if steps else b""
    if entries:
        found["entries"] = [kept.values, entries]
    # 3. Where the weights are, and what else belongs to them.
    slots: list[Any] = [where.slots, *(range(t.unit.first, t.unit.end) for t in named[len(where.tables) :])]
    found["protected"] = np.concatenate([storage.protected_at[one] for one in slots]).tobytes()
    moved = [[slot, where] for slot, where in _image_moved_tables(space, tables).items()]
    if moved or changes.steps.get(-1):
        changes.steps[-1] = 1
        found["moved"] = moved
    found["notes"] = shard.tracks_changes
    found["deltas"] = [[t.number, _image_deltas(t, changes.steps)] for t in tables if t.deltas is not None]
    found["reads"] = [[t.number, t.extra_reads, _image_reads(t)] for t in tables if t.unit.reads]
    return found


def _image_moved_tables(space: Namespace, tables: Iterable[Table]) -> dict[int, int]:
    found: dict[int, int] = {}
    for table in tables:
        undo = _undo_of_image(table)
        where = space.shard.storage.moved_to if undo is None else undo.moved_to
        for slot in range(table.unit.first, table.unit.end) if where else ():
            if slot in where:
                found[slot] = where[slot]
    return found


def _image_memory(space: Namespace, block: Block) -> dict[str, Any]:
    journal = space.shard.storage.journal
    assert journal is not None
    found = {}
    for name, tensor in block.states.tensors.items():
        place = journal.memory.find(tensor)
        assert place is not None
        found[name] = [place.region.number, str(tensor.dtype).removeprefix("torch.")]
    return found


def _collect_image_entries(
    known: dict[int, list[Entries]],
    rows: list[list[int]],
    kept: _DistinctImageValues,
    block: int,
    first: int,
    entries: Sequence[Entries],
) -> None:
    """Append [block, segment, which] for each segment whose entries are others than in the last image."""
    before = known.setdefault(block, [])
    if len(before) < first + len(entries):
        before += [{}] * (first + len(entries) - len(before))
    for at, own in enumerate(entries, first):
        if own is not before[at]:
            if own or before[at]:
                rows.append([block, at, kept.index(own, _image_entry_values)])
            before[at] = own


def _image_entry_values(entries: Entries) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if value is FlatStateEntry.MEMORY:
            found[name] = None
        elif isinstance(value, Tensor):
            found[name] = ["", *_image_tensor_values(value)]
        elif type(value) is float:
            found[name] = ["float", value]
        else:
            found[name] = ["json", json.dumps(encode_tree_entry(value))]
    return found


def _entries_of_image(values: Mapping[str, Any]) -> Entries:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            found[name] = FlatStateEntry.MEMORY
        elif value[0] == "float":
            found[name] = float(value[1])
        else:
            found[name] = (
                decode_tree_entry(json.loads(value[1])) if value[0] == "json" else _tensor_of_image(value[1:])
            )
    return found


def _image_tensor_values(tensor: Tensor) -> list[Any]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]


def _tensor_of_image(values: Sequence[Any]) -> Tensor:
    dtype, shape, data = values
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)


def _image_deltas(table: Table, known: dict[int, int]) -> list[Any]:
    assert table.deltas is not None
    values, new_steps = table.deltas.values(known.get(table.number))
    known[table.number] = table.deltas.version
    rows = [
        [
            before,
            nbytes,
            [[slot, None if one is None else _image_tensor_values(one)] for slot, one in changes.items()],
        ]
        for before, changes, nbytes in new_steps
    ]
    return [*values, rows]


def _image_reads(table: Table) -> list[Any]:
    unit = table.unit
    unit.stored_copies = frozenset(one.copy for own in unit.reads.values() for one in own)
    return [[rank, [[one.version, one.copy] for one in own]] for rank, own in unit.reads.items()]


def _apply_image_shard(space: Namespace, values: Image) -> None:
    shard = space.shard
    storage, journal = shard.storage, shard.storage.journal
    assert journal is not None
    tables = [space.tables[number] for number in values["numbers"]]
    # 1. Flat state.
    for number, own in values.get("blocks", ()):
        states = storage.all_blocks[number].states
        states.tensors.clear()
        for name, (region, dtype) in own.items():
            found = journal.memory.regions.get(region)
            if found is None:
                raise RecoveryError(f"the log names memory {region}, which is not in the store")
            states.tensors[name] = typed_durable_memory(found.data, states.length, getattr(torch, dtype))
    # 2. Update counts, and the entries of segments.
    counts, at = _ints_of_image(values["counts"]), 0
    for table in tables:
        first, number = table.unit.first_key, len(table.unit.plan.specs)
        shard.counts[first : first + number] = counts[at : at + number]
        at += number
    steps, at = _ints_of_image(values["steps"]), 0
    for block, first, end in values["runs"]:
        storage.all_blocks[block].states.steps[first:end] = steps[at : at + end - first]
        at += end - first
    kept, rows = values.get("entries", ((), ()))
    known = [_entries_of_image(one) for one in kept]
    for block, segment, which in rows:
        storage.all_blocks[block].states.restore_entries(segment, known[which])
    # 3. Where the weights are, and what else belongs to them.
    slots = [slot for table in tables for slot in range(table.unit.first, table.unit.end)]
    storage.protected_at[slots] = _ints_of_image(values["protected"])
    if "moved" in values:
        for slot in slots:
            storage.moved_to.pop(slot, None)
        storage.moved_to |= dict(values["moved"])
    shard.tracks_changes |= values["notes"]
    for number, own in values["deltas"]:
        *of_deltas, steps_ = own
        new_steps = [
            (before, {slot: None if one is None else _tensor_of_image(one) for slot, one in changes}, nbytes)
            for before, nbytes, changes in steps_
        ]
        deltas = space.tables[number].deltas
        assert deltas is not None
        deltas.restore(of_deltas, new_steps)
    for number, more, reads in values["reads"]:
        unit = space.tables[number].unit
        copies: dict[tuple[int, int], Read] = {}
        for rank, own in reads:
            for version, copy in own:
                copies.setdefault((version, copy), shard.stored_read(unit, version, copy))
            unit.reads[rank] = [copies[version, copy] for version, copy in own]
        unit.stored_copies = frozenset(copy for _, copy in copies)
        space.restore_extra_reads(space.tables[number], more)


def _ints_of_image(data: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.frombuffer(data, np.int64).copy()


def apply_image(space: Namespace, sessions: Sessions, image: Image) -> None:
    """Set what an image says, in a namespace that has its tables and its optimizer."""
    if "lineage" in image:
        generation, round_, loaded, tag, save = image["lineage"]
        space.lineage = Lineage(generation, round_, tuple(loaded), tag, save)
    if "members" in image:
        _apply_image_members(space, sessions, image["members"])
    if "hypers" in image:
        _apply_image_hypers(space, image["hypers"])
    for table, rank, states in image.get("clients", ()):
        space.client_states[table, rank] = [(number, state) for number, state in states]
    if "tables" in image:
        _apply_image_tables(space, image["tables"])
    if "shard" in image:
        _apply_image_shard(space, image["shard"])
    if "lanes" in image:
        _apply_image_lanes(space, image["lanes"])
