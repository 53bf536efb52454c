"""Row-sparse keys in the plan: behind what workers hold, each in slices of its own, of whole rows."""

from __future__ import annotations

import pytest

from kvstore_server.errors import ConfigurationError, PlanMismatchError
from kvstore_server.plan import ITEM_SIZE, TensorSpec, check_same, make_plan

SPECS = [
    TensorSpec("small table", (10, 3), "float32", row_sparse=True),
    TensorSpec("bias", (7,), "float32"),
    TensorSpec("big table", (90_000, 5, 2), "float32", row_sparse=True),
    TensorSpec("half", (64, 64), "float16"),
    TensorSpec("half table", (3_000, 16), "float16", row_sparse=True),
    TensorSpec("weight", (700, 900), "float32"),
]


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_row_sparse_keys_lie_behind_what_workers_hold(servers: int) -> None:
    plan = make_plan(SPECS, servers)
    for spec, offset in zip(plan.specs, plan.key_offsets, strict=True):
        resident = plan.resident_sizes[spec.dtype]
        assert offset >= resident if spec.row_sparse else offset + spec.numel <= resident
    for piece in plan.slices:
        assert plan.is_resident(piece) == (piece.offset < plan.resident_sizes[piece.dtype])
        if not plan.is_resident(piece):
            assert len(piece.segments) == 1


def test_what_workers_hold_is_laid_out_as_if_there_were_no_tables_of_its_size() -> None:
    alone = [TensorSpec("a", (3, 3), "float64"), TensorSpec("b", (100,), "float64")]
    plan = make_plan([*alone, TensorSpec("t", (4, 4), "float64", row_sparse=True)], 1)
    assert plan.resident_sizes == make_plan(alone, 1).arena_sizes
    assert plan.key_offsets[:2] == make_plan(alone, 1).key_offsets


def test_slices_of_a_table_hold_whole_rows() -> None:
    plan = make_plan(SPECS, 2)
    for key, spec in enumerate(SPECS):
        if spec.row_sparse:
            assert plan.takes_rows(key)
            pieces = plan.slices_with(key)
            assert sum(segment.numel for piece in pieces for segment in piece.segments) == spec.numel
    assert len(plan.slices_with(2)) > 4


def test_resident_slices_are_those_of_each_server() -> None:
    plan = make_plan(SPECS, 3)
    found = [piece for server in range(3) for piece in plan.resident_slices_of(server)]
    assert {piece.index for piece in found} == {p.index for p in plan.slices if plan.is_resident(p)}
    assert all(piece.server == server for server in range(3) for piece in plan.resident_slices_of(server))


def test_workers_that_disagree_on_what_is_row_sparse_are_told() -> None:
    mine, theirs = [TensorSpec("t", (2, 2), "float32")], [TensorSpec("t", (2, 2), "float32", row_sparse=True)]
    with pytest.raises(PlanMismatchError, match=r"'t'.*float32\[2, 2\].*group 0.*rank 1"):
        check_same(mine, theirs, "rank 0", "rank 1")


@pytest.mark.parametrize(
    ("shape", "said"),
    [((), "no rows"), ((2, 300_000), "rows of 1200000 bytes"), ((2, 16_385), "too long")],
)
def test_a_table_without_rows_that_fit_a_slice_is_refused(shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_plan([TensorSpec("t", shape, "float32", row_sparse=True)], 1)


@pytest.mark.parametrize("width", [16_384, 262_144])
def test_the_longest_rows_that_are_promised_fit(width: int) -> None:
    plan = make_plan([TensorSpec("t", (5, width), "float32", row_sparse=True)], 1)
    assert plan.takes_rows(0)
    assert all(piece.nbytes <= 1 << 20 for piece in plan.slices)
    assert ITEM_SIZE["float32"] == 4
