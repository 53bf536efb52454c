"""The Plan: every element of every key lies in exactly one slice, aligned, and rows of tables are interleaved."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_server.errors import ConfigurationError, PlanMismatchError
from kvstore_server.plan import (
    ALIGNMENT,
    ITEM_SIZE,
    MAX_SLICE,
    MIN_SLICE,
    Plan,
    RoundRobin,
    TensorSpec,
    check_same,
    make_plan,
)


def spec(key: str, *shape: int, dtype: str = "float32", group: int = 0) -> TensorSpec:
    return TensorSpec(key, shape, dtype, group)


SHAPES_OF_KEYS = st.lists(st.sampled_from((0, 1, 3, 17, 64, 300)), max_size=3)


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    """Keys of all dtypes: 0-d, empty, small and sliced ones."""
    kinds = st.tuples(SHAPES_OF_KEYS, st.sampled_from(list(ITEM_SIZE)), st.integers(0, 1))
    found = draw(st.lists(kinds, min_size=1, max_size=25))
    return [
        spec(f"k{at}", *shape, dtype=dtype, group=group) for at, (shape, dtype, group) in enumerate(found)
    ]


def boundaries(plan: Plan) -> list[object]:
    return [(p.index, p.dtype, p.offset, p.length, p.used, p.segments) for p in plan.slices]


def loads(plan: Plan) -> list[int]:
    return [sum(slice_.nbytes for slice_ in plan.slices_of(server)) for server in range(plan.num_servers)]


@given(models())
def test_every_element_lies_in_exactly_one_segment(specs: list[TensorSpec]) -> None:
    plan = make_plan(specs, 3)
    for key, wanted in enumerate(specs):
        parts = [(s.key_start, s.numel) for p in plan.slices for s in p.segments if s.key == key]
        assert [start for start, _ in parts] == [sum(n for _, n in parts[:i]) for i in range(len(parts))]
        assert sum(numel for _, numel in parts) == wanted.numel


@given(models())
def test_slices_tile_the_arena_of_their_dtype_on_64_byte_boundaries(specs: list[TensorSpec]) -> None:
    plan = make_plan(specs, 3)
    for dtype, size in plan.arena_sizes.items():
        slices = [slice_ for slice_ in plan.slices if slice_.dtype == dtype]
        assert [p.offset for p in slices] == [sum(q.length for q in slices[:i]) for i in range(len(slices))]
        assert sum(slice_.length for slice_ in slices) == size
        for slice_ in slices:
            starts = [slice_.offset, slice_.length, *(slice_.offset + s.start for s in slice_.segments)]
            assert all(start * ITEM_SIZE[dtype] % ALIGNMENT == 0 for start in starts)


@given(models())
def test_key_offsets_say_where_segments_lie(specs: list[TensorSpec]) -> None:
    plan = make_plan(specs, 3)
    for slice_ in plan.slices:
        for part in slice_.segments:
            assert plan.key_offsets[part.key] + part.key_start == slice_.offset + part.start


@given(models())
def test_slice_boundaries_do_not_depend_on_the_number_of_servers(specs: list[TensorSpec]) -> None:
    plans = [make_plan(specs, n) for n in (1, 2, 7)]
    assert boundaries(plans[0]) == boundaries(plans[1]) == boundaries(plans[2])


def test_a_big_key_is_cut_into_slices_of_its_own() -> None:
    plan = make_plan([spec("big", 1 << 16), spec("small", 3)], 2)
    owners = [{segment.key for segment in slice_.segments} for slice_ in plan.slices]
    assert owners == [{1}, *[{0}] * 7, {0}]


@pytest.mark.parametrize(
    ("numel", "slice_bytes"), [(1 << 12, MIN_SLICE), (1 << 20, 1 << 19), (1 << 26, MAX_SLICE)]
)
def test_slices_grow_with_the_table_between_their_bounds(numel: int, slice_bytes: int) -> None:
    assert make_plan([spec("w", numel)], 1).slices[0].nbytes == slice_bytes


def test_equal_slices_are_spread_evenly() -> None:
    plan = make_plan([spec("w", 1 << 20)], 4)
    assert len(set(loads(plan))) == 1


def test_a_model_of_many_sizes_is_balanced_within_two_percent() -> None:
    rng = random.Random(3)
    specs = [spec(f"k{i}", rng.randint(1, 300_000)) for i in range(120)]
    held = loads(make_plan(specs, 4))
    assert (max(held) - min(held)) / max(held) <= 0.02


def test_many_tables_of_one_key_do_not_all_land_on_one_server() -> None:
    servers = {make_plan([spec(f"key{i}", 5)], 4).slices[0].server for i in range(64)}
    assert servers == {0, 1, 2, 3}


def test_a_table_on_one_server_has_the_slices_of_one_that_is_spread_and_another_digest() -> None:
    spread, batch_of = make_plan(MIXED, 3), make_plan(MIXED, 3, one_server=True)
    assert boundaries(batch_of) == boundaries(spread)
    assert (len(spread.servers), len(batch_of.servers)) == (3, 1)
    assert batch_of.digest != spread.digest


def test_tables_on_one_server_do_not_all_land_on_the_same_one() -> None:
    plans = [make_plan([spec(f"key{i}", 1 << 16)], 4, one_server=True) for i in range(64)]
    assert {plan.servers for plan in plans} == {(0,), (1,), (2,), (3,)}


PLACEMENTS = st.tuples(st.integers(1, 4), st.booleans(), st.booleans())
"""The number of servers, whether keys stay whole, and whether all lies on one server."""


@given(models(), PLACEMENTS, PLACEMENTS)
def test_a_plan_laid_over_other_servers_is_the_one_that_is_made_for_them(
    specs: list[TensorSpec], former: tuple[int, bool, bool], wanted: tuple[int, bool, bool]
) -> None:
    found, expected = [
        make_plan(specs + MIXED, servers, whole, one_server=is_one)
        for servers, whole, is_one in (former, wanted)
    ]
    found = found.over(*wanted)
    assert found == expected
    assert found.digest == expected.digest


def test_the_bytes_of_keys_are_counted_without_padding() -> None:
    plan = make_plan([spec("a", 3), spec("b", 5, dtype="float64"), spec("c", 0)], 2)
    assert (plan.key_nbytes, plan.nbytes) == ((12, 40, 0), 52)


def test_equal_inputs_give_equal_plans() -> None:
    assert make_plan(MIXED, 3) == make_plan(MIXED, 3)


def test_a_table_of_nothing_but_an_empty_key_has_one_empty_slice() -> None:
    (slice_,) = make_plan([spec("none", 0)], 2).slices
    assert (slice_.used, slice_.length, len(slice_.segments)) == (0, 0, 1)


def test_a_key_of_2_to_the_33_elements_is_laid_out_exactly() -> None:
    plan = make_plan([spec("huge", 1 << 17, 1 << 16, dtype="float16"), spec("b", 1, dtype="float16")], 2)
    assert plan.arena_sizes["float16"] == (1 << 33) + 32
    assert plan.slices[-1].offset + plan.slices[-1].length == (1 << 33) + 32
    assert plan.slices[-1].segments[-1].key_start == (1 << 33) - MAX_SLICE // 2


@pytest.mark.parametrize(
    ("specs", "num_servers", "message"),
    [
        ([], 1, "at least one key"),
        ([spec("w", 2)], 0, "at least one server, got 0"),
        ([spec("w", 2), spec("w", 2)], 1, "key 'w' appears twice"),
        ([spec("w", 2, dtype="int64")], 1, "key 'w' has dtype int64; a store holds float16, "),
        ([spec("w", 2, -1)], 1, r"'w' .*\(2, -1\)"),
        ([TensorSpec("t", (), "float32", row_sparse=True)], 1, "'t' .*no rows"),
        ([TensorSpec("t", (2, 300_000), "float32", row_sparse=True)], 1, "'t' .*1200000 bytes"),
        ([TensorSpec("t", (2, 16_385), "float32", row_sparse=True)], 1, "'t' .*65540 bytes"),
    ],
)
def test_what_cannot_be_laid_out_is_named(specs: list[TensorSpec], num_servers: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_plan(specs, num_servers)


def test_the_first_difference_between_two_models_is_named() -> None:
    mine = [spec("a", 2), spec("w", 3, 4), spec("z", 1)]
    theirs = [spec("a", 2), spec("w", 3, 5, group=1), spec("y", 1)]
    with pytest.raises(PlanMismatchError) as caught:
        check_same(mine, theirs, "rank 0", "rank 2")
    assert str(caught.value) == (
        "workers have different models: key 1 is 'w' float32[3, 5] in group 1 on rank 2 but "
        "'w' float32[3, 4] in group 0 on rank 0; build the same model, in the same order, on every worker"
    )


def test_a_missing_key_is_named() -> None:
    with pytest.raises(PlanMismatchError, match=r"key 1.*rank 2.*'b'"):
        check_same([spec("a", 2), spec("b", 2)], [spec("a", 2)], "rank 0", "rank 2")


MIXED = [
    TensorSpec("small table", (10, 3), "float32", row_sparse=True),
    TensorSpec("bias", (7,), "float32"),
    TensorSpec("big table", (90_000, 5, 2), "float32", row_sparse=True),
    TensorSpec("half", (64, 64), "float16"),
    TensorSpec("half table", (3_000, 16), "float16", row_sparse=True),
    TensorSpec("weight", (700, 900), "float32"),
]


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_row_sparse_keys_lie_behind_what_workers_hold(servers: int) -> None:
    plan = make_plan(MIXED, servers)
    for spec, offset in zip(plan.specs, plan.key_offsets, strict=True):
        resident = plan.resident_sizes[spec.dtype]
        assert offset >= resident if spec.row_sparse else offset + spec.numel <= resident
    for slice_ in plan.slices:
        assert plan.is_resident(slice_) == (slice_.offset < plan.resident_sizes[slice_.dtype])
        if not plan.is_resident(slice_):
            assert len(slice_.segments) == 1


def test_what_workers_hold_is_laid_out_as_if_there_were_no_tables_of_its_size() -> None:
    alone = [TensorSpec("a", (3, 3), "float64"), TensorSpec("b", (100,), "float64")]
    plan = make_plan([*alone, TensorSpec("t", (4, 4), "float64", row_sparse=True)], 1)
    assert plan.resident_sizes == make_plan(alone, 1).arena_sizes
    assert plan.key_offsets[:2] == make_plan(alone, 1).key_offsets


def test_slices_of_a_table_hold_whole_rows() -> None:
    plan = make_plan(MIXED, 2)
    for key, spec in enumerate(MIXED):
        if spec.row_sparse:
            assert plan.takes_rows(key)
            slices = plan.slices_with(key)
            assert sum(segment.numel for slice_ in slices for segment in slice_.segments) == spec.numel
    assert len(plan.slices_with(2)) > 4


def test_resident_slices_are_those_of_each_server() -> None:
    plan = make_plan(MIXED, 3)
    found = [slice_ for server in range(3) for slice_ in plan.resident_slices_of(server)]
    assert {slice_.index for slice_ in found} == {p.index for p in plan.slices if plan.is_resident(p)}
    assert all(slice_.server == server for server in range(3) for slice_ in plan.resident_slices_of(server))


def test_workers_that_disagree_on_what_is_row_sparse_are_told() -> None:
    mine, theirs = [TensorSpec("t", (2, 2), "float32")], [TensorSpec("t", (2, 2), "float32", row_sparse=True)]
    with pytest.raises(PlanMismatchError, match=r"'t'.*float32\[2, 2\].*group 0.*rank 1"):
        check_same(mine, theirs, "rank 0", "rank 1")


@pytest.mark.parametrize("width", [16_384, 262_144])
def test_the_longest_rows_that_are_promised_fit(width: int) -> None:
    plan = make_plan([TensorSpec("t", (5, width), "float32", row_sparse=True)], 1)
    assert plan.takes_rows(0)
    assert all(slice_.nbytes <= 1 << 20 for slice_ in plan.slices)


SHAPES = ((1_000_000, 64), (1_000_000, 16), (100_000, 16), (10_000, 16), (6_000, 33), (3_000_000, 8))


def plan_over(*shapes: tuple[int, ...], servers: int, row_sparse: bool = True, **options: Any) -> Plan:
    specs = [TensorSpec(f"t{i}", shape, "float32", 0, row_sparse) for i, shape in enumerate(shapes)]
    return make_plan(specs, servers, **options)


@functools.cache
def popular(rows: int, exponent: float, draws: int) -> np.ndarray:
    """The distinct ids of a batch that is drawn by Zipf's law."""
    sums = np.cumsum(np.arange(1.0, rows + 1) ** -exponent)
    return np.unique(np.searchsorted(sums, np.random.default_rng(draws).random(draws) * sums[-1]))


@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_server_has_more_than_its_share_of_popular_rows_and_a_fifth(
    shape: tuple[int, int], servers: int
) -> None:
    places = plan_over(shape, servers=servers).rows(0)
    for exponent in (1.05, 1.2):
        for draws in (2_000, 8_192):
            ids = popular(shape[0], exponent, draws)
            most = max(len(own) for _, _, own in places.by_server(ids))
            assert most <= 1.2 * len(ids) / servers


@pytest.mark.parametrize(
    "deal",
    [RoundRobin(1, 7), RoundRobin(0, 0), RoundRobin(3, 4), RoundRobin(4, 3), RoundRobin(2, 1)],
    ids=str,
)
def test_every_row_lies_in_a_place_of_its_own_and_is_found_there(deal: RoundRobin) -> None:
    rows = np.arange(20)
    places = deal.places(rows)
    assert sorted(places.tolist()) == rows.tolist()
    assert deal.rows(places).tolist() == rows.tolist()
    numbers, order = deal.in_order(rows[::2])
    assert numbers.tolist() == sorted(places[::2].tolist())
    assert deal.places(rows[::2][order]).tolist() == numbers.tolist()


def test_rows_go_to_slices_in_turn_and_the_last_ones_to_a_short_slice() -> None:
    places = RoundRobin(3, 4).places(np.arange(14))
    assert (places // 4).tolist() == [0, 1, 2] * 4 + [3, 3]
    assert places[[0, 3, 6, 9]].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{"row_sparse": False}, {"whole_keys": True}], ids=str)
def test_what_workers_hold_too_and_keys_that_stay_whole_are_not_interleaved(options: dict[str, Any]) -> None:
    ids = np.arange(0, 9_000, 7)
    places = plan_over((9_001, 16), servers=1, **options).rows(0)
    [(_, which, own)] = places.by_server(ids)
    assert (ids[which] == ids).all()
    assert (own == ids).all()
