"""Which samples each worker trains on."""

from __future__ import annotations

import pytest

from kvtrainer.errors import ConfigurationError
from kvtrainer.utils import shard


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("members", [(0,), (0, 1, 2), (1, 5, 6, 9)])
def test_members_share_all_samples_but_the_last_few(members: tuple[int, ...], seed: int | None) -> None:
    parts = [shard(50, members, rank, seed=seed) for rank in members]
    every = [index for part in parts for index in part]
    assert {len(part) for part in parts} == {50 // len(members)}
    assert len(set(every)) == len(every)
    assert set(every) <= set(range(50))


def test_without_a_seed_the_order_is_that_of_the_data() -> None:
    assert shard(7, (2, 4), 4) == [1, 3, 5]


def test_a_seed_gives_each_epoch_an_order_that_all_workers_share() -> None:
    first, second = shard(1000, (0,), 0, seed=1, epoch=0), shard(1000, (0,), 0, seed=1, epoch=1)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert first != second
    assert first[::2] == shard(1000, (0, 1), 0, seed=1)


def test_after_a_change_of_members_nothing_comes_twice() -> None:
    used = [index for rank in (0, 1, 2) for index in shard(100, (0, 1, 2), rank, seed=4)[:10]]
    left = [index for rank in (0, 2) for index in shard(100, (0, 2), rank, seed=4, start=30)]
    assert sorted(used + left) == list(range(100))


@pytest.mark.parametrize("wrong", [{"rank": 3}, {"length": -1}, {"start": -1}, {"epoch": -1}, {"seed": -1}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        shard(**{"length": 10, "members": (0, 1), "rank": 0, **wrong})  # type: ignore[arg-type]
