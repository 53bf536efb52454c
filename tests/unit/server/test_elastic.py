"""What a server answers where the members of a job may change."""

from __future__ import annotations

from typing import Any

from kvstore_server.engine.rounds import SYNCHRONOUS
from kvstore_server.protocol import messages as m
from tests.support.engines import EngineJob

VIEW: dict[str, Any] = {"view": 0, "members": (0, 1)}


def test_a_rank_that_joins_is_told_that_the_round_before_has_failed() -> None:
    job = EngineJob(3, SYNCHRONOUS, first=False, initial_workers=2, min_workers=1)
    for rank in (0, 1):
        job.commit(rank, 0, None if rank else 1.0, **VIEW)
    job.commit(0, 1, 1.0, **VIEW)
    job.commit(2, 1, flags=m.WANTS_WEIGHTS | m.REPEATS, number=77, **VIEW)
    assert all(isinstance(body, m.Pending) for body in job.replies[2, 77])
    job.ask(1, m.Abort(0, 1, "no memory", False))
    [told] = job.tick()[2, 77]
    assert isinstance(told, m.Failed)
    assert (told.code, told.table, told.round, told.next_round) == ("RoundAbortedError", 0, 1, 2)
