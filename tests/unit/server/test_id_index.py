"""The index of row numbers: beside a dictionary, while it grows, and after removals."""

from __future__ import annotations

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_server.shard.id_index import IdIndex, ids_of_rows, row_numbers

Ints = npt.NDArray[np.int64]
IDS = st.one_of(
    st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**63 - 1, -(2**63), 2**53 + 1])
)


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


@given(st.lists(IDS))
def test_row_numbers_give_the_ids_back(ids: list[int]) -> None:
    given_ids = ints(ids)
    assert ids_of_rows(row_numbers(given_ids)).tolist() == ids
    assert given_ids.tolist() == ids


def test_row_numbers_of_consecutive_ids_are_the_known_hashes_and_spread_evenly() -> None:
    # The finaliser of SplitMix64 in Python's whole numbers.
    def finalised(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    rows = row_numbers(np.arange(-1000, 100_000))
    assert rows.view(np.uint64)[:2000].tolist() == [finalised(i % 2**64) for i in range(-1000, 1000)]
    per_part = np.bincount(rows.view(np.uint64) >> np.uint64(57), minlength=128)
    assert per_part.min() > 0.85 * per_part.mean()
    assert per_part.max() < 1.15 * per_part.mean()


def test_a_lookup_copies_no_whole_column_of_slots() -> None:
    slots = np.zeros(1_000_000, [("row", np.int64), ("count", np.int64)])
    index, some = IdIndex(slots["row"]), np.arange(10)
    slots["row"][some] = row_numbers(some)
    index.insert(some)
    tracemalloc.start()
    try:
        assert index.find(row_numbers(np.arange(20))).tolist() == [*range(10), *[-1] * 10]
        index.remove(some)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_one_slot_is_enough() -> None:
    rows = np.zeros(1, np.int64)
    index = IdIndex(rows)
    for number in (5, 5 + (1 << 10), 5):  # these have the same place
        rows[0] = number
        index.insert(ints([0]))
        assert index.find(ints([number, 4, number + 1])).tolist() == [0, -1, -1]
        index.remove(ints([0]))
        assert index.find(ints([number])).tolist() == [-1]


@given(
    st.lists(st.tuples(st.booleans(), st.lists(IDS, unique=True, max_size=40)), max_size=60), st.booleans()
)
def test_it_finds_what_a_dictionary_finds(steps: list[tuple[bool, list[int]]], are_hashed: bool) -> None:
    rows = np.zeros(4096, np.int64)
    index, known, end = IdIndex(rows), dict[int, int](), 0
    seen: set[int] = set()
    for is_insertion, ids in steps:
        # Numbers that are not hashed collide often.
        numbers = row_numbers(ints(ids)).tolist() if are_hashed else ids
        seen |= set(numbers)
        if is_insertion:
            new = [number for number in numbers if number not in known]
            slots = np.arange(end, end + len(new))
            rows[slots], end = new, end + len(new)
            index.insert(slots)
            known |= dict(zip(new, slots.tolist(), strict=True))
        else:
            gone = [number for number in numbers if number in known]
            index.remove(ints([known.pop(number) for number in gone]))
        assert index.find(ints(sorted(seen))).tolist() == [known.get(number, -1) for number in sorted(seen)]


@pytest.mark.parametrize("at_once", [1, 700, 50_000])
def test_rows_that_are_not_there_are_not_found_while_it_grows(at_once: int) -> None:
    rows = row_numbers(np.arange(200_000))
    index = IdIndex(rows)
    strangers = row_numbers(np.arange(-5000, 0))
    for first in range(0, min(200_000, 3000 * at_once), at_once):
        index.insert(np.arange(first, first + at_once)[: len(rows) - first])
        assert (index.find(strangers[first % 4000 : first % 4000 + 1000]) == -1).all()


def test_it_grows_and_shrinks_with_its_rows() -> None:
    rows = row_numbers(np.arange(200_000))
    index = IdIndex(rows)
    for first in range(0, 200_000, 1000):
        index.insert(np.arange(first, first + 1000))
    assert (index.find(rows) == np.arange(200_000)).all()
    assert (index.find(row_numbers(np.arange(200_000, 300_000))) == -1).all()
    assert index.nbytes <= 22 * 200_000
    # As many come as go: it does not grow.
    for first in range(0, 200_000, 1000):
        slots = np.arange(first, first + 1000)
        index.remove(slots)
        rows[slots] = row_numbers(slots + 1_000_000)
        index.insert(slots)
    assert index.nbytes <= 22 * 200_000
    assert (index.find(row_numbers(np.arange(1_000_000, 1_200_000))) == np.arange(200_000)).all()


def test_rows_may_be_removed_and_come_again_while_it_grows() -> None:
    rows = row_numbers(np.arange(60_000))
    index = IdIndex(rows)
    for first in range(0, 50_000, 500):
        index.insert(np.arange(first, first + 500))
        gone = np.arange(first // 2, first // 2 + 100)
        index.remove(gone)
        assert (index.find(rows[gone]) == -1).all()
        index.insert(gone)
        assert (index.find(rows[: first + 500]) == np.arange(first + 500)).all()
