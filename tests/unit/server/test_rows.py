"""Rows: their bytes, the log of those that changed, and the records of workers."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.errors import ProtocolError
from kvstore_server.optimizer import create
from kvstore_server.plan import Plan, Slice, TensorSpec, group_slices, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE, MAX_FRAME
from kvstore_server.protocol.rows import PACKED_ROWS, RowSet, decode_rows, encode_rows, split_rows
from kvstore_server.shard.storage import VERSIONS_KEPT, StoredRowChanges
from kvtrainer.client.client import Client
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.session import Calls
from kvtrainer.client.tables import RemoteTable
from tests.support.engines import client_of
from tests.support.messages import contribution


def one_slice(*shapes: tuple[int, ...], dtype: str = "float32") -> tuple[Plan, Slice]:
    plan = make_plan([TensorSpec(f"k{i}", shape, dtype) for i, shape in enumerate(shapes)], 1)
    [slice_] = plan.slices
    return plan, slice_


def as_bytes(data: Tensor) -> memoryview:
    return memoryview(bytearray(data.numpy().tobytes()))


def rows_of(num: int, total: int, width: int, dtype: str = "float32", seed: int = 0) -> RowSet:
    ids = sorted(random.Random(seed).sample(range(total), num))
    values = torch.randn(num, width, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))
    return RowSet(torch.tensor(ids, dtype=torch.int64), values)


@pytest.mark.parametrize("num", [2, 99])  # as ids, as bits
def test_ids_that_were_checked_hold_whatever_is_written_afterwards_where_they_came_from(num: int) -> None:
    plan, slice_ = one_slice((100, 3))
    rows = rows_of(num, 100, 3)
    data = as_bytes(encode_rows(plan, slice_, {0: rows}))
    back = decode_rows(plan, slice_, data)[0][0]
    assert isinstance(back, RowSet)
    data[:] = bytes(len(data))
    assert torch.equal(back.ids, rows.ids)


def test_a_slice_carries_the_numbers_of_some_keys_rows_of_others_and_nothing_of_the_rest() -> None:
    plan, slice_ = one_slice((10,), (7, 3), (5, 2), (100, 3))
    numbers, two, five = torch.arange(10.0), rows_of(2, 7, 3), rows_of(5, 5, 2)
    data = encode_rows(plan, slice_, {0: numbers, 1: two, 2: five})
    assert data.numel() < 300
    back, _ = decode_rows(plan, slice_, as_bytes(data))
    assert sorted(back) == [0, 1, 2]
    assert torch.equal(back[0], numbers)  # type: ignore[arg-type]
    assert torch.equal(back[2].values, five.values)  # type: ignore[operator]


@pytest.mark.parametrize("width", [1, 4])
def test_all_rows_of_the_largest_slice_fit_into_a_frame(width: int) -> None:
    plan = make_plan([TensorSpec("k", (1 << 22, width), "float32")], 1)
    slice_ = max(plan.slices, key=lambda one: one.used)
    count = slice_.segments[0].numel // width
    rows = RowSet(torch.arange(count), torch.zeros(count, width))
    assert encode_rows(plan, slice_, {0: rows}).numel() <= MAX_FRAME


def test_few_rows_take_few_bytes() -> None:
    plan, slice_ = one_slice((1000, 4))
    assert encode_rows(plan, slice_, {0: rows_of(3, 1000, 4)}).numel() == 88


def test_every_slice_of_a_key_gets_its_rows_and_those_without_any_an_empty_part() -> None:
    plan = make_plan([TensorSpec("k", (10_000, 10), "float32")], 3)
    ids = torch.tensor([0, 1, 4_999, 9_999])
    parts = split_rows(plan, {0: RowSet(ids, torch.arange(4.0)[:, None].expand(4, 10))})
    assert sorted(parts) == [slice_.index for slice_ in plan.slices]
    found = []
    for index, own in parts.items():
        [(position, rows)] = own.items()
        assert position == 0
        first = plan.slices[index].segments[0].key_start // 10
        found += [(int(i) + first, float(v)) for i, v in zip(rows.ids, rows.values[:, 0], strict=True)]
    assert sorted(found) == [(0, 0.0), (1, 1.0), (4_999, 2.0), (9_999, 3.0)]


def test_rows_too_long_for_a_slice_are_cut_all_the_same() -> None:
    plan = make_plan([TensorSpec("k", (3, 300_000), "float32")], 1)
    assert max(slice_.nbytes for slice_ in plan.slices) <= 1 << 20
    assert not plan.takes_rows(0)


def _head(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "ends too early"),
        (_head(0, 1), "rows of 0"),
        (_head(2, 1), "rows of 2"),
        (_head(1, 2, 0, 1, 0, 0), "2 slices from 0 on"),
        (_head(1, 0, 0, 1, 0, 0), "0 slices from 0 on"),
        (_head(1, 1), "ends too early"),
        (_head(1, 1, 1, 0, 0, 0), "names segment 1 of 1"),
        (_head(1, 1, -1, 0, 0, 0), "names segment -1"),
        (_head(1, 1, 0, 11, 0, 0), "names 11 of the 10 rows"),
        (_head(1, 1, 0, -1, 0, 0), "names -1 of the 10 rows"),
        (_head(1, 1, 0, 1, 0, 0), "ends too early"),
        (_head(1, 1, 0, 1, 0, 0, 10, 0) + bytes(16), "not distinct, ascending and below 10"),
        (_head(1, 1, 0, 1, 0, 0, -1, 0) + bytes(16), "not distinct"),
        (_head(1, 1, 0, 2, 0, 0, 3, 3) + bytes(24), "not distinct"),
        (_head(1, 1, 0, 2, 0, 0, 3, 2) + bytes(24), "not distinct"),
        (_head(1, 1, 0, 2, 1, 0) + b"\x01" + bytes(7) + bytes(24), "not distinct"),
        (_head(1, 1, 0, 0, 0, 0) + bytes(8), "32 bytes, 24 of them are named"),
        (_head(1, 2, 0, 30, 2, 0) + bytes(120), "gives 30 numbers to segment 0"),
        (_head(1, 1, 0, 29, 2, 0) + bytes(120), "gives 29 numbers to segment 0"),
        (_head(1, 1, 0, 30, 2, 0) + bytes(112), "ends too early"),
        (_head(1, 1, 0, 0, 3, 0), "form 3"),
    ],
)
def test_malformed_rows_are_a_protocol_error_that_says_what_is_wrong(data: bytes, text: str) -> None:
    plan, slice_ = one_slice((10, 3))
    with pytest.raises(ProtocolError, match=text):
        decode_rows(plan, slice_, memoryview(bytearray(data)))


def test_random_bytes_are_rows_or_a_protocol_error() -> None:
    plan, slice_ = one_slice((10, 3), (4,))
    outcomes = Counter[bool]()

    @settings(max_examples=800)
    @given(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 255]), max_size=120))
    def check(data: list[int]) -> None:
        try:
            decode_rows(plan, slice_, memoryview(bytearray(data)))
        except ProtocolError:
            outcomes[True] += 1
        else:
            outcomes[False] += 1

    check()
    assert outcomes[True] > 0.9 * outcomes.total()


SPECS = [TensorSpec("a", (40, 2), "float32"), TensorSpec("b", (30, 3), "float32")]
PLAN = make_plan(SPECS, 1)


def ids(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def started(version: int = 0) -> StoredRowChanges:
    """A log that somebody has asked."""
    changes = StoredRowChanges(group_slices([(slice_.segments[0].key, slice_) for slice_ in PLAN.slices]))
    assert changes.since(0, version, version) == {}
    return changes


def named(changes: StoredRowChanges, held: int, version: int) -> dict[int, list[int]] | None:
    rows = changes.since(0, held, version)
    return None if rows is None else {at: some.tolist() for at, some in sorted(rows.items())}


def test_what_came_before_the_first_question_is_not_known() -> None:
    changes = StoredRowChanges(group_slices([(slice_.segments[0].key, slice_) for slice_ in PLAN.slices]))
    changes.record(0, 0, ids(1))
    assert changes.since(0, 3, 4) is None
    assert changes.since(0, 4, 4) == {}


def test_many_versions_and_many_rows_are_forgotten() -> None:
    changes = started()
    for version in range(1, VERSIONS_KEPT + 20):
        changes.record(0, 0, ids(version % 2))
        changes.since(0, version - 1, version)
    last = VERSIONS_KEPT + 19
    assert named(changes, last - 100, last) == {0: [0, 1]}
    assert named(changes, 0, last) is None
    for version in range(last + 1, last + 11):
        changes.record(0, 0, torch.arange(40))
        changes.since(0, version - 1, version)
    # 170 elements: the ids of four updates of all forty rows are worth keeping, and no more.
    assert named(changes, last + 6, last + 10) == {0: list(range(40))}
    assert named(changes, last + 5, last + 10) is None


SOME_ROWS = [st.lists(st.integers(0, count - 1), unique=True, max_size=4).map(sorted) for count in (40, 30)]
UPDATES = st.tuples(*(st.one_of(rows, st.none()) for rows in SOME_ROWS), st.none() | st.integers(0, 2))
"""The rows of both keys that an update changes, None for all of a key; and who asks after it, if anybody."""


@given(st.lists(UPDATES, min_size=1, max_size=200))
def test_a_worker_that_applies_what_it_is_told_always_has_the_table(updates: list[Any]) -> None:
    table = [0] * 70
    workers = [(list(table), 0) for _ in range(3)]
    changes = started()
    for version, (*changed, asks) in enumerate(updates, 1):
        for position, (first, count) in enumerate([(0, 40), (40, 30)]):
            rows = changed[position]
            if rows is None:
                changes.record(0)
            else:
                changes.record(0, position, ids(*rows))
            for row in range(count) if rows is None else rows:
                table[first + row] = version
        if asks is not None:
            copy, held = workers[asks]
            found = changes.since(0, held, version)
            if found is None:
                copy = list(table)
            for position, some in (found or {}).items():
                for row in some.tolist():
                    copy[40 * position + row] = table[40 * position + row]
            assert copy == table
            workers[asks] = (copy, version)


WIDTH, NUM_ROWS, IN_SLICE = 8, 65_536, 8_192
SLICES = NUM_ROWS // IN_SLICE


class Job:
    """One worker with a table of zeros from which gradients are subtracted, and another table beside it."""

    def __init__(self) -> None:
        self.client: Client = client_of(1, [Engine(EngineConfig())])
        self.client.set_optimizer(create("sgd", learning_rate=1.0, lazy_update=True).spec())
        specs = [TensorSpec("w", (NUM_ROWS, WIDTH), "float32", row_sparse=True)]
        self.tables: list[RemoteTable] = self.client.register({"t": specs, "other": specs})
        assert len(self.tables[0].plan.slices) == SLICES
        for table in self.tables:
            zeros = Contribution([table], [{}], None, sources={0: lambda _, numel: torch.zeros(numel)})
            self.client.rounds.wait(self.client.rounds.start(zeros))

    def push(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Send records, (slot, bytes) each, as the first round, and commit it; raises what the server answers."""
        payloads = [(slot, torch.frombuffer(bytearray(data), dtype=torch.uint8)) for slot, data in records]
        self.client._session.call(0, contribution(payloads, 1, 0, len(records), encoding=PACKED_ROWS))

    def pull(self, ids: bytes, key: int = 0) -> None:
        self.client._session.call(0, m.PullRows(0, (key,), (ids,), (b"",), 1.0))

    def rows(self, *places: int) -> list[float]:
        """Read rows by where they lie on the server, to whose slices they are interleaved."""
        [deal] = self.tables[0].plan.rows(0).round_robins
        ids = torch.from_numpy(deal.rows(np.array(places)))
        [found] = self.client.rows.pull([(self.tables[0], 0, ids)])
        return found[:, 0].tolist()


def record(job: Job, ids: Sequence[int], at: int = 0, slices: int = SLICES) -> bytes:
    """Rows of ones of some slices from one on, counted from there; in the form of ids."""
    slice_ = job.tables[0].plan.slices[at]
    rows = RowSet(torch.tensor(ids), torch.ones(len(ids), WIDTH))
    return encode_rows(job.tables[0].plan, slice_, {0: rows}, slices).numpy().tobytes()


def altered(data: bytes, at: int, *numbers: int) -> bytes:
    """The record with other int32 from one on: the head has 2, the segment 4, ids follow."""
    return data[: 4 * at] + struct.pack(f"<{len(numbers)}i", *numbers) + data[4 * (at + len(numbers)) :]


def test_rows_of_all_slices_of_a_key_are_one_record() -> None:
    job = Job()
    job.push([(0, record(job, [0, IN_SLICE - 1, IN_SLICE, NUM_ROWS - 1]))])
    assert job.rows(0, 1, IN_SLICE - 1, IN_SLICE, NUM_ROWS - 1) == [-1, 0, -1, -1, -1]


@pytest.mark.parametrize(
    ("at", "numbers"),
    [
        (6, (2, 1, 3)),
        (6, (1, 1, 3)),
        (6, (-1, 1, 3)),
        (6, (1, 2, NUM_ROWS)),
        (1, (SLICES + 1,)),
        (1, (0,)),
        (1, (-1,)),
        (3, (2,)),
        (3, (4,)),
        (3, (NUM_ROWS + 1,)),
        (2, (1,)),
    ],
)
def test_a_record_that_does_not_fit_its_key_is_refused_and_a_right_one_counts_after_it(
    at: int, numbers: tuple[int, ...]
) -> None:
    job = Job()
    right = record(job, [1, 2, 3])
    with pytest.raises(ProtocolError):
        job.push([(0, altered(right, at, *numbers))])
    assert job.rows(*range(8)) == [0] * 8
    job.push([(0, right)])
    assert job.rows(0, 1, 2, 3, 4) == [0, -1, -1, -1, 0]


def test_a_record_names_no_slices_behind_those_of_its_key() -> None:
    job = Job()
    with pytest.raises(ProtocolError):
        job.push([(5, altered(record(job, [0], 5, 3), 1, 4))])
    job.push([(5, record(job, [0], 5, 3))])
    assert job.rows(0, 5 * IN_SLICE) == [0, -1]


def test_records_of_one_key_that_name_a_row_twice_fail_the_round_and_change_nothing() -> None:
    job = Job()
    with pytest.raises(ProtocolError):
        job.push([(0, record(job, [7, 9_000])), (1, record(job, [9], 1, 7))])
    assert job.rows(7, IN_SLICE + 9, 9_000) == [0, 0, 0]


@pytest.mark.parametrize(
    ("ids", "key"),
    [
        ((2, 1), 0),
        ((1, 1), 0),
        ((-1, 1), 0),
        ((1, NUM_ROWS), 0),
        ((1, 1 << 62), 0),
        ((1,), 1),
        ((1,), -1),
        (range(NUM_ROWS), 0),
    ],
)
def test_a_pull_of_rows_that_the_key_has_not_or_of_too_many_is_refused(ids: Sequence[int], key: int) -> None:
    job = Job()
    with pytest.raises(ProtocolError):
        job.pull(struct.pack(f"<{len(ids)}q", *ids), key)


def test_ids_of_a_pull_are_whole_numbers_of_eight_bytes() -> None:
    with pytest.raises(ProtocolError):
        Job().pull(bytes(12))


@pytest.mark.parametrize("servers", [1, 3])
def test_rows_that_take_several_messages_are_those_of_one(servers: int) -> None:
    client = client_of(servers)
    client.set_optimizer(create("sgd", learning_rate=1.0, lazy_update=True).spec())
    [table] = client.register({"t": [TensorSpec("w", (4 * NUM_ROWS, WIDTH), "float32")]})
    held = {"float32": torch.zeros(4 * NUM_ROWS * WIDTH)}

    def play(values: Mapping[str, Tensor], rows: Mapping[tuple[int, int], RowSet]) -> None:
        round_ = client.rounds.start(Contribution([table], [values], [held], rows=rows, is_incremental=True))
        client.rounds.wait(round_)

    play({"float32": torch.zeros_like(held["float32"])}, {})
    wanted = torch.zeros(4 * NUM_ROWS, WIDTH)
    for step in range(2, 5):  # the first answer is whole
        ids = torch.arange(0, 4 * NUM_ROWS, step)
        play({}, {(0, 0): RowSet(ids, torch.full((len(ids), WIDTH), float(step)))})
        wanted[ids] -= step
        assert torch.equal(held["float32"].view(-1, WIDTH), wanted)
    [found] = client.rows.pull([(table, 0, torch.arange(4 * NUM_ROWS))])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_rows_of_tables_that_lie_side_by_side_come_as_one_record(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, sizes = client_of(servers), (NUM_ROWS, 40_000, 20_000)
    client.set_optimizer(create("sgd", learning_rate=1.0, lazy_update=True).spec())
    specs = [TensorSpec(f"w{rows}", (rows, WIDTH), "float32") for rows in sizes]
    [table] = client.register({"t": [*specs, TensorSpec("bias", (3,), "float32")]})
    assert table.plan.joined_rows(0).keys == (0, 1, 2)
    flat = torch.zeros(table.plan.arena_sizes["float32"])
    places = zip(table.plan.key_offsets, sizes, strict=False)
    tables = [flat[at : at + rows * WIDTH].view(rows, WIDTH) for at, rows in places]
    wanted, decoded = [torch.zeros(rows, WIDTH) for rows in sizes], list[bool]()
    drawn = torch.Generator().manual_seed(0)

    def counted(*args: Any, is_joined: bool = False) -> Any:
        decoded.append(is_joined)
        return decode_rows(*args, is_joined=is_joined)

    def play(keys: Sequence[int], dense: Sequence[int] = ()) -> dict[tuple[int, int], Tensor | None]:
        rows, grads = {}, torch.zeros_like(flat)
        for key in keys:
            ids = torch.randint(sizes[key], (50,), generator=drawn).unique()
            rows[0, key] = RowSet(ids, torch.full((len(ids), WIDTH), 1.0 + key))
            wanted[key][ids] -= 1.0 + key
        for key in dense:
            at = table.plan.key_offsets[key]
            grads[at : at + sizes[key] * WIDTH] = 1.0
            wanted[key] -= 1.0
        absent = frozenset({0, 1, 2}.difference(keys, dense))
        part = Contribution(
            [table], [{"float32": grads}], [{"float32": flat}], absent=absent, rows=rows, is_incremental=True
        )
        round_ = client.rounds.start(part)
        client.rounds.wait(round_)
        for mine, expected in zip(tables, wanted, strict=True):
            assert torch.equal(mine, expected)
        written = round_.written()
        for (_, key), of_key in rows.items():
            came = written[0, key]
            assert came is None or torch.equal(came.sort().values, of_key.ids)
        return written

    monkeypatch.setattr("kvtrainer.client.incoming_weights.decode_rows", counted)
    client.rounds.wait(client.rounds.start(Contribution([table], [{"float32": flat}], [{"float32": flat}])))
    play((0, 1, 2))
    decoded.clear()
    for keys in ((0, 1, 2), (0, 2), (1,), (2,), (0,)):
        play(keys)
        assert 0 < len(decoded) <= servers
        assert all(decoded)
        decoded.clear()
    assert play((0, 2), (1,))[0, 1] is None
    play((0, 1, 2))


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("row_sparse", [False, True])
def test_rows_of_several_tables_are_asked_for_by_one_message_to_each_server(
    servers: int, row_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, sizes = client_of(servers), (NUM_ROWS, 40_000, 20_000)
    specs = [TensorSpec(f"w{rows}", (rows, WIDTH), "float32", row_sparse=row_sparse) for rows in sizes]
    [table] = client.register(
        {"t": [*specs, TensorSpec("narrow", (30_000, 4), "float32", row_sparse=row_sparse)]}
    )
    flat = torch.randn(table.plan.arena_sizes["float32"], generator=torch.Generator().manual_seed(1))
    tables = [
        flat[at : at + spec.numel].view(spec.shape)
        for at, spec in zip(table.plan.key_offsets, table.plan.specs, strict=True)
    ]

    def source(key: int, first: int, numel: int) -> Tensor:
        """Return what lies there, row for row."""
        width, [deal] = tables[key].shape[1], table.plan.rows(key).round_robins
        return tables[key][deal.rows(np.arange(first // width, (first + numel) // width))].reshape(-1)

    sources = {key: partial(source, key) for key in range(len(tables))}
    given = Contribution([table], [{"float32": flat}], None, sources=sources if row_sparse else {})
    client.rounds.wait(client.rounds.start(given))
    asked: list[int] = []
    begin = client._session.begin

    def counted(requests: Sequence[tuple[int, m.RequestBody]]) -> Calls:
        asked.extend(server for server, _ in requests)
        return begin(requests)

    monkeypatch.setattr(client._session, "begin", counted)
    drawn = torch.Generator().manual_seed(servers)
    for keys in ((0, 1, 2), (0, 2), (1, 2), (1,), (2, 0), (0, 0), (0, 1, 2, 3)):
        ids = [torch.randint(len(tables[key]), (300,), generator=drawn).unique() for key in keys]
        found = client.rows.pull([(table, key, own) for key, own in zip(keys, ids, strict=True)])
        for key, own, rows in zip(keys, ids, found, strict=True):
            assert torch.equal(rows, tables[key][own])
        assert len(asked) == len(set(asked))
        if keys == (0, 1, 2):
            assert sorted(asked) == list(range(servers))
        asked.clear()
    none = torch.empty(0, dtype=torch.int64)
    first, second = client.rows.pull([(table, 0, none), (table, 1, torch.tensor([5]))])
    assert first.shape == (0, WIDTH)
    assert torch.equal(second, tables[1][5:6])


def test_more_rows_of_several_tables_than_one_message_holds_come_in_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = client_of(1)
    shapes = {"float16": (200_000, 1), "bfloat16": (3_000, 3), "float64": (90_000, 2)}
    specs = [TensorSpec(dtype, shape, dtype, row_sparse=True) for dtype, shape in shapes.items()]
    [table] = client.register({"t": specs})

    def source(dtype: str, first: int, numel: int) -> Tensor:
        """Return what lies there, row for row."""
        return (torch.arange(first, first + numel) % 99).to(getattr(torch, dtype))

    sources = {key: partial(source, dtype) for key, dtype in enumerate(shapes)}
    arenas = table.new_arenas()
    client.rounds.wait(client.rounds.start(Contribution([table], [arenas], None, sources=sources)))
    sizes: list[int] = []
    begin = client._session.begin

    def counted(requests: Sequence[tuple[int, m.RequestBody]]) -> Calls:
        sizes.extend(sum(map(len, body.ids)) for _, body in requests if isinstance(body, m.PullRows))
        return begin(requests)

    monkeypatch.setattr(client._session, "begin", counted)
    ids = [torch.arange(spec.shape[0]) for spec in specs]
    found = client.rows.pull([(table, key, own) for key, own in enumerate(ids)])
    for key, (spec, rows) in enumerate(zip(specs, found, strict=True)):
        [deal] = table.plan.rows(key).round_robins
        width = spec.shape[1]
        places = torch.from_numpy(deal.places(ids[key].numpy()))
        expected = (places[:, None] * width + torch.arange(width)) % 99
        assert torch.equal(rows.long(), expected)
    assert sum(sizes) == 8 * sum(map(len, ids))
    assert len(sizes) == 4
    assert max(sizes) <= MAX_FRAME


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ((), ()),
        ((0,), ()),
        ((0, 0), (struct.pack("<q", 0),)),
        ((0, 1), (struct.pack("<q", 0),) * 2),
        ((0, 0), (struct.pack("<q", 0), struct.pack("<q", NUM_ROWS))),
        ((0, 0), (struct.pack("<q", 0), bytes(7))),
        ((0,) * 12, (struct.pack(f"<{IN_SLICE}q", *range(IN_SLICE)),) * 12),
        ((0,) * (KEYS_PER_MESSAGE + 1), (b"",) * (KEYS_PER_MESSAGE + 1)),
    ],
)
def test_a_request_for_rows_of_several_keys_that_does_not_fit_is_refused(
    keys: tuple[int, ...], ids: tuple[bytes, ...]
) -> None:
    job = Job()
    with pytest.raises(ProtocolError):
        job.client._session.call(0, m.PullRows(0, keys, ids, tuple([b""] * len(ids)), 1.0))
    assert job.rows(0, NUM_ROWS - 1) == [0, 0]
