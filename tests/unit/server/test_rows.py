"""Rows: as bytes, which come out as they went in or are a ProtocolError; and a log of those that have changed."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from torch import Tensor

from kvstore_server.errors import ProtocolError
from kvstore_server.plan import Plan, Slice, TensorSpec, grouped, make_plan
from kvstore_server.protocol.frames import MAX_FRAME
from kvstore_server.protocol.rows import (
    RowSet,
    decode_rows,
    encode_rows,
    split_rows,
)
from kvstore_server.shard.storage import VERSIONS_KEPT, RowChanges


def one_slice(*shapes: tuple[int, ...], dtype: str = "float32") -> tuple[Plan, Slice]:
    plan = make_plan([TensorSpec(f"k{i}", shape, dtype) for i, shape in enumerate(shapes)], 1)
    [piece] = plan.slices
    return plan, piece


def as_bytes(data: Tensor) -> memoryview:
    return memoryview(bytearray(data.numpy().tobytes()))


def rows_of(num: int, total: int, width: int, dtype: str = "float32", seed: int = 0) -> RowSet:
    ids = sorted(random.Random(seed).sample(range(total), num))
    values = torch.randn(num, width, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))
    return RowSet(torch.tensor(ids, dtype=torch.int64), values)


@pytest.mark.parametrize("num", [2, 99])  # as ids, as bits
def test_ids_that_were_checked_hold_whatever_is_written_afterwards_where_they_came_from(num: int) -> None:
    plan, piece = one_slice((100, 3))
    rows = rows_of(num, 100, 3)
    data = as_bytes(encode_rows(plan, piece, {0: rows}))
    back = decode_rows(plan, piece, data)[0][0]
    assert isinstance(back, RowSet)
    data[:] = bytes(len(data))
    assert torch.equal(back.ids, rows.ids)


def test_a_slice_carries_the_numbers_of_some_keys_rows_of_others_and_nothing_of_the_rest() -> None:
    plan, piece = one_slice((10,), (7, 3), (5, 2), (100, 3))
    numbers, two, five = torch.arange(10.0), rows_of(2, 7, 3), rows_of(5, 5, 2)
    data = encode_rows(plan, piece, {0: numbers, 1: two, 2: five})
    assert data.numel() < 300
    back, _ = decode_rows(plan, piece, as_bytes(data))
    assert sorted(back) == [0, 1, 2]
    assert torch.equal(back[0], numbers)  # type: ignore[arg-type]
    assert torch.equal(back[2].values, five.values)  # type: ignore[operator]


@pytest.mark.parametrize("width", [1, 4])
def test_all_rows_of_the_largest_slice_fit_into_a_frame(width: int) -> None:
    plan = make_plan([TensorSpec("k", (1 << 22, width), "float32")], 1)
    piece = max(plan.slices, key=lambda one: one.used)
    count = piece.segments[0].numel // width
    rows = RowSet(torch.arange(count), torch.zeros(count, width))
    assert encode_rows(plan, piece, {0: rows}).numel() <= MAX_FRAME


def test_few_rows_take_few_bytes() -> None:
    plan, piece = one_slice((1000, 4))
    assert encode_rows(plan, piece, {0: rows_of(3, 1000, 4)}).numel() == 88


def test_every_slice_of_a_key_gets_its_rows_and_those_without_any_an_empty_part() -> None:
    plan = make_plan([TensorSpec("k", (10_000, 10), "float32")], 3)
    ids = torch.tensor([0, 1, 4_999, 9_999])
    parts = split_rows(plan, {0: RowSet(ids, torch.arange(4.0)[:, None].expand(4, 10))})
    assert sorted(parts) == [piece.index for piece in plan.slices]
    found = []
    for index, own in parts.items():
        [(position, rows)] = own.items()
        assert position == 0
        first = plan.slices[index].segments[0].key_start // 10
        found += [(int(i) + first, float(v)) for i, v in zip(rows.ids, rows.values[:, 0], strict=True)]
    assert sorted(found) == [(0, 0.0), (1, 1.0), (4_999, 2.0), (9_999, 3.0)]


def test_rows_too_long_for_a_slice_are_cut_all_the_same() -> None:
    plan = make_plan([TensorSpec("k", (3, 300_000), "float32")], 1)
    assert max(piece.nbytes for piece in plan.slices) <= 1 << 20
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
    plan, piece = one_slice((10, 3))
    with pytest.raises(ProtocolError, match=text):
        decode_rows(plan, piece, memoryview(bytearray(data)))


def test_random_bytes_raise_nothing_else() -> None:
    plan, piece = one_slice((10, 3), (4,))
    rng = random.Random(0)
    refused = 0
    for _ in range(3000):
        data = bytearray(rng.choice([0, 0, 0, 1, 2, 3, 255]) for _ in range(rng.randrange(0, 120)))
        try:
            decode_rows(plan, piece, memoryview(data))
        except ProtocolError:
            refused += 1
    assert refused > 2900


SPECS = [TensorSpec("a", (40, 2), "float32"), TensorSpec("b", (30, 3), "float32")]
PLAN = make_plan(SPECS, 1)


def ids(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def started(version: int = 0) -> RowChanges:
    """A log that somebody has asked."""
    changes = RowChanges(grouped([(piece.segments[0].key, piece) for piece in PLAN.slices]))
    assert changes.since(0, version, version) == {}
    return changes


def named(changes: RowChanges, held: int, version: int) -> dict[int, list[int]] | None:
    rows = changes.since(0, held, version)
    return None if rows is None else {at: some.tolist() for at, some in sorted(rows.items())}


def test_what_came_before_the_first_question_is_not_known() -> None:
    changes = RowChanges(grouped([(piece.segments[0].key, piece) for piece in PLAN.slices]))
    changes.note(0, 0, ids(1))
    assert changes.since(0, 3, 4) is None
    assert changes.since(0, 4, 4) == {}


def test_many_versions_and_many_rows_are_forgotten() -> None:
    changes = started()
    for version in range(1, VERSIONS_KEPT + 20):
        changes.note(0, 0, ids(version % 2))
        changes.since(0, version - 1, version)
    last = VERSIONS_KEPT + 19
    assert named(changes, last - 100, last) == {0: [0, 1]}
    assert named(changes, 0, last) is None
    for version in range(last + 1, last + 11):
        changes.note(0, 0, torch.arange(40))
        changes.since(0, version - 1, version)
    # 170 elements: the ids of four updates of all forty rows are worth keeping, and no more.
    assert named(changes, last + 6, last + 10) == {0: list(range(40))}
    assert named(changes, last + 5, last + 10) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_that_applies_what_it_is_told_always_has_the_table(seed: int) -> None:
    rng = random.Random(seed)
    table = [0] * 70
    workers = [(list(table), 0) for _ in range(3)]
    changes = started()
    for version in range(1, 301):
        for position, (first, count) in enumerate([(0, 40), (40, 30)]):
            rows = sorted(rng.sample(range(count), rng.randrange(4)))
            if rng.random() < 0.05:
                rows = list(range(count))
                changes.note(0)
            else:
                changes.note(0, position, ids(*rows))
            for row in rows:
                table[first + row] = version
        if rng.random() < 0.7:
            at = rng.randrange(3)
            copy, held = workers[at]
            found = changes.since(0, held, version)
            if found is None:
                copy = list(table)
            for position, some in (found or {}).items():
                for row in some.tolist():
                    copy[40 * position + row] = table[40 * position + row]
            assert copy == table
            workers[at] = (copy, version)
