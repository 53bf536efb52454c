"""The count of updates behind a learning-rate schedule, against MXNet's own bookkeeping, key by key."""

from __future__ import annotations

import random

import pytest

from kvstore_server.optimizer import create
from kvtrainer.lr_scheduler import UpdateCounter
from kvtrainer.types import Group

KEYS = 4


class PerKey:
    """MXNet's rule: a count per key, from begin_num_update; num_update is the greatest that ever was."""

    def __init__(self, begin: int) -> None:
        self.counts = [begin] * KEYS
        self.num_update = begin

    def update(self, keys: list[bool]) -> None:
        self.counts = [count + is_in for count, is_in in zip(self.counts, keys, strict=True)]
        self.num_update = max(self.num_update, *self.counts)


@pytest.mark.parametrize("seed", range(20))
def test_rate_and_count_follow_the_greatest_count_of_any_key(seed: int) -> None:
    chance = random.Random(seed)
    begin = chance.choice([0, 7])
    optimizer = create("sgd", lr_scheduler=lambda n: float(n), begin_num_update=begin)
    schedule, expected = UpdateCounter(optimizer), PerKey(begin)
    groups: list[Group] = [{"lr": 0.0}, {"lr": 0.0}]
    for _ in range(60):
        keys = [chance.random() < chance.choice([0.1, 0.5, 1.0]) for _ in range(KEYS)]
        schedule.apply(groups, keys)
        schedule.count(keys)
        expected.update(keys)
        assert optimizer.num_update == expected.num_update
        if any(keys):
            assert [group["lr"] for group in groups] == [expected.num_update] * 2
        if chance.random() < 0.1:
            updates = {key: count - begin for key, count in enumerate(expected.counts) if count > begin}
            schedule = UpdateCounter(optimizer)
            schedule.restore(updates, KEYS)
            assert optimizer.num_update == expected.num_update


def test_coming_update_of_several_workers_counts_as_one_of_the_leading_key() -> None:
    optimizer = create("sgd", lr_scheduler=lambda n: float(n))
    schedule, group = UpdateCounter(optimizer), {"lr": 0.0}
    for keys, several, alone in (([True, True], 1, 1), ([True, False], 2, 2), ([False, True], 3, 2)):
        schedule.apply([group], None)
        assert group["lr"] == several
        schedule.apply([group], keys)
        assert group["lr"] == alone
        schedule.count(keys)


def test_without_a_scheduler_rates_are_left_alone_and_updates_are_counted_all_the_same() -> None:
    optimizer = create("sgd", learning_rate=0.5)
    schedule, group = UpdateCounter(optimizer), {"lr": 0.25}
    schedule.apply([group], None)
    schedule.count([True])
    assert (group["lr"], optimizer.num_update) == (0.25, 1)
