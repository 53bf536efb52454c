"""Buckets of gradients that are summed over ranks during the backward pass: which keys are in them, and where."""

from __future__ import annotations

import itertools

import pytest

from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.ranks.process_group import Buckets
from kvtrainer.sync.rank_exchange import RankBucketLayout, lay_out_rank_buckets

KB = 1 / 1024


def laid_out(
    order: list[int], sizes: list[int], dtypes: str = "", **limits: object
) -> list[RankBucketLayout]:
    """Lay out keys of so many elements; f is float32, the default, and h is float16."""
    names = {"f": "float32", "h": "float16"}
    rows = itertools.zip_longest(sizes, dtypes, fillvalue="f")
    specs = [TensorSpec(str(at), (numel,), names[dtype]) for at, (numel, dtype) in enumerate(rows)]
    return lay_out_rank_buckets(order, make_plan(specs, 1), Buckets(**limits))  # type: ignore[arg-type]


def keys(layouts: list[RankBucketLayout]) -> list[set[int]]:
    return [set(layout.keys) for layout in layouts]


def test_keys_fill_buckets_in_their_order() -> None:
    assert keys(laid_out([3, 2, 1, 0], [256] * 4, size_mb=2 * KB)) == [{3, 2}, {1, 0}]
    assert keys(laid_out([0, 3, 1, 2], [256] * 4, size_mb=2 * KB)) == [{0, 3}, {1, 2}]


def test_a_key_that_is_larger_than_a_bucket_has_one_for_itself() -> None:
    assert keys(laid_out([2, 1, 0], [256, 9000, 256], size_mb=2 * KB)) == [{2}, {1}, {0}]


def test_the_first_bucket_has_1_mb_and_others_25() -> None:
    sizes = [2**17] * 60  # half a megabyte each
    found = keys(laid_out(list(range(60)), sizes))
    assert list(map(len, found)) == [2, 50, 8]


@pytest.mark.parametrize("limits", [{"size_mb": -1}, {"size_mb": 1000.0}])
def test_a_bucket_without_a_limit_has_all_keys_of_a_dtype(limits: dict[str, float]) -> None:
    count = 1 if limits["size_mb"] == -1 else 2
    assert len(laid_out([0, 1, 2], [2**17] * 3, **limits)) == count


def test_without_coalescing_each_key_is_a_bucket() -> None:
    assert keys(laid_out([1, 0, 2], [16] * 3, coalesce=False)) == [{1}, {0}, {2}]


def test_dtypes_have_buckets_of_their_own_which_are_counted_as_they_are_summed() -> None:
    found = laid_out([0, 1, 2, 3], [256] * 4, "fhhh", size_mb=2 * KB)
    assert [(layout.dtype, set(layout.keys)) for layout in found] == [
        ("float16", {1, 2}),
        ("float32", {0}),
        ("float16", {3}),
    ]


def test_neighbours_are_one_run_of_whole_lines_and_all_runs_hold_all_keys() -> None:
    sizes = [5, 300, 17, 1000]
    plan = make_plan([TensorSpec(str(at), (numel,), "float32") for at, numel in enumerate(sizes)], 1)
    [together] = lay_out_rank_buckets([3, 1, 0, 2], plan, Buckets())
    assert len(together.runs) == 1
    [apart] = lay_out_rank_buckets([2, 0], plan, Buckets())
    for key, (begin, end) in zip(apart.keys, apart.runs, strict=True):
        assert begin == plan.key_offsets[key]
        assert end >= begin + sizes[key]
        assert (end - begin) % 16 == 0


def test_keys_without_elements_are_in_a_bucket_like_others() -> None:
    assert keys(laid_out([2, 1, 0], [16, 0, 16])) == [{0, 1, 2}]
