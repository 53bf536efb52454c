"""The log of changed rows: it never names less than what has changed, and forgets what would cost more to send."""

from __future__ import annotations

import random

import pytest
import torch

from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.rows import VERSIONS_KEPT, RowChanges

SPECS = [TensorSpec("a", (40, 2), "float32"), TensorSpec("b", (30, 3), "float32")]
PLAN = make_plan(SPECS, 1)
[PIECE] = PLAN.slices


def ids(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def started(version: int = 0) -> RowChanges:
    """A log that somebody has asked."""
    changes = RowChanges(PLAN.slices)
    assert changes.since(0, version, version) == {}
    return changes


def named(changes: RowChanges, held: int, version: int) -> dict[int, list[int]] | None:
    rows = changes.since(0, held, version)
    return None if rows is None else {at: some.tolist() for at, some in sorted(rows.items())}


def test_what_came_before_the_first_question_is_not_known() -> None:
    changes = RowChanges(PLAN.slices)
    changes.note(0, 0, ids(1))
    assert changes.since(0, 3, 4) is None
    assert changes.since(0, 4, 4) == {}


def test_changes_since_a_version_are_joined() -> None:
    changes = started()
    changes.note(0, 0, ids(5))
    assert named(changes, 0, 1) == {0: [5]}
    changes.note(0, 0, ids(2, 5))
    changes.note(0, 1, ids(7))
    assert named(changes, 1, 2) == {0: [2, 5], 1: [7]}
    assert named(changes, 0, 2) == {0: [2, 5], 1: [7]}
    assert named(changes, 2, 2) == {}


def test_an_update_of_no_rows_is_no_change() -> None:
    changes = started()
    changes.note(0, 0, ids())
    assert named(changes, 0, 1) == {}


def test_a_change_of_all_rows_hides_what_was_before() -> None:
    changes = started()
    changes.note(0, 0, ids(5))
    changes.note(0)
    changes.note(0, 0, ids(6))
    assert named(changes, 0, 1) is None
    changes.note(0, 1, ids(1))
    assert named(changes, 1, 2) == {1: [1]}
    assert named(changes, 0, 2) is None


def test_everything_changes_at_once_when_a_round_is_taken_back() -> None:
    changes = started()
    changes.note(0, 0, ids(5))
    assert named(changes, 0, 1) == {0: [5]}
    changes.note_all()
    assert named(changes, 1, 2) is None


def test_a_worker_that_lost_its_weights_gets_all() -> None:
    assert started().since(0, -1, 0) is None


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
