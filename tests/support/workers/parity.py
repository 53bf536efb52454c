"""Workers that run the parts of which each is told, one after another.

Starting a process costs more than a part does, so jobs of one size share their processes; and every part finds
servers that have served others before.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.support.jobs import Results
from tests.support.workers import (
    bits,
    closed_forms,
    dtypes,
    golden,
    half_sums,
    one_problem,
    row_sparse,
    trajectories,
)

PARTS: dict[str, Callable[[int, int], Results]] = {
    "closed_forms": closed_forms.run,
    "one_problem": one_problem.run,
    "bits": bits.run,
    "dtypes": dtypes.run,
    "golden": golden.run,
    "half_sums": half_sums.run,
    "row_sparse": row_sparse.run,
    "trajectories": trajectories.run,
}


def run(rank: int, workers: int, *parts: str) -> Results:
    return {part: PARTS[part](rank, workers) for part in parts}
