"""Counting a table's updates as a scheduler does: against a plain count of every key."""

from __future__ import annotations

import random

import pytest
import torch

from kvstore_server.optimizer import create
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.shard.reduction import RankContribution, left_out_by_all
from kvstore_server.shard.shard import Shard
from tests.support.optimizer_slices import given_to

KEYS = 5
PLAN = make_plan([TensorSpec(str(key), (4000,), "float32") for key in range(KEYS)], 2)


def contribution(shard: Shard, absent: frozenset[int]) -> RankContribution:
    unit = shard.units[-1]
    here = [p for p in unit.slices if any(s.key not in absent for s in p.segments)]
    return given_to(shard, {p.index: torch.ones(p.used) for p in here}, absent=absent)


@pytest.mark.parametrize("server", [0, 1])
def test_the_count_is_that_of_the_key_with_most_updates_on_any_server(server: int) -> None:
    chance = random.Random(3)
    shard, optimizer = Shard(), create("test")
    shard.add(PLAN, 0)
    unit, every = shard.add(PLAN, server), [0] * KEYS
    hypers = [optimizer.hyper] * KEYS
    for _ in range(100):
        left_out = frozenset(key for key in range(KEYS) if chance.random() < chance.choice((0.0, 0.5, 1.0)))
        every = [n + (key not in left_out) for key, n in enumerate(every)]
        given = [contribution(shard, left_out)]
        assert shard.updates_after(unit, given) == max(every)
        shard.update(given, optimizer, [hypers], [unit])


def test_only_what_no_contribution_has_is_left_out() -> None:
    given = [RankContribution([], 1.0, frozenset(absent)) for absent in ({0, 2}, {2, 3}, set[int]())]
    assert left_out_by_all(given[:2]) == {2}
    assert left_out_by_all(given) == frozenset()
