"""The example of uneven workers: nobody runs further ahead than the store allows, and all of them learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import NEEDS_DIGITS, run_with_servers

pytestmark = NEEDS_DIGITS
STALEST = {"dist_sync": 0, "dist_ssp": 1, "dist_async": None}
"""So many updates of the other worker may come between a read of weights and their change, with a staleness of 0."""


def trained(folder: Path, *options: str) -> list[dict[str, Any]]:
    """What both workers have found, the fast one first."""
    out = folder / "found.json"
    run_with_servers("uneven", folder, "--seconds", "2", "--staleness", "0", "--out", str(out), *options)
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    "kvstore", [pytest.param(name, marks=() if name == "dist_ssp" else pytest.mark.full) for name in STALEST]
)
def test_a_fast_worker_runs_ahead_as_far_as_the_store_allows(kvstore: str, tmp_path: Path) -> None:
    fast, slow = trained(tmp_path, "--kvstore", kvstore)
    assert min(fast["steps"], slow["steps"]) > 0
    if (most := STALEST[kvstore]) is not None:
        assert max(fast["stalest"], slow["stalest"]) <= most
    assert fast["seen"][-1][1] <= fast["seen"][0][1]


@pytest.mark.full
def test_workers_that_are_slow_by_turns_all_learn(tmp_path: Path) -> None:
    first, _ = trained(tmp_path, "--kvstore", "dist_ssp", "--slow", "turns")
    assert first["seen"][-1][1] <= first["seen"][0][1]
