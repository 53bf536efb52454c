"""Counting a table's updates as a scheduler does: against a plain count of every key."""

from __future__ import annotations

import random

import torch

from kvstore_server.reduction import Addend
from kvstore_server.update_counts import UpdateCounts, left_out_by_all

KEYS = 5


def test_the_count_is_that_of_the_key_with_most_updates_whatever_is_left_out() -> None:
    chance = random.Random(3)
    counts, every = UpdateCounts(KEYS), [0] * KEYS
    for _ in range(500):
        left_out = frozenset(key for key in range(KEYS) if chance.random() < chance.choice((0.0, 0.5, 1.0)))
        every = [n + (key not in left_out) for key, n in enumerate(every)]
        assert counts.following(left_out) == max(every)
        counts.count(left_out)


def test_a_copy_counts_by_itself() -> None:
    counts = UpdateCounts(2)
    counts.count([1])
    copy = counts.copy()
    counts.count([])
    assert (copy.following([0]), copy.following([1]), counts.following([])) == (1, 2, 3)


def test_only_what_no_contribution_has_is_left_out() -> None:
    one, other, all_of_it = ({0, 2}, {2, 3}, set[int]())
    addends = [Addend({0: torch.ones(1)}, 1.0, frozenset(absent)) for absent in (one, other, all_of_it)]
    assert left_out_by_all(addends[:2]) == {2}
    assert left_out_by_all(addends) == frozenset()
