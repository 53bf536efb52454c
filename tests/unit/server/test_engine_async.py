"""Engines whose contributions count one by one: exact sums in every interleaving, and how waits end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvstore_server.engine.rounds import Mode
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import PACKED_ROWS, RowSet, encode_rows
from tests.support.engines import EngineJob as Job
from tests.support.engines import plan_of
from tests.support.messages import Done, contribution


def codes(told: Sequence[m.ReplyBody]) -> list[str]:
    return [body.code for body in told if isinstance(body, m.Failed)]


def kinds(told: Sequence[m.ReplyBody]) -> list[type]:
    return [type(body) for body in told]


def test_a_contribution_that_is_repeated_counts_once_and_a_gap_is_refused() -> None:
    job = Job(2, Mode("async"))
    for _ in range(3):
        job.commit(0, 1, 5.0)
    assert codes(job.push(0, 3, 7.0)) == ["ProtocolError"]
    assert codes(job.commit(0, 3, pushed=True)) == ["ProtocolError"]
    assert job.total == [5.0]


def test_a_contribution_without_rows_that_arrives_twice_counts_once() -> None:
    job = Job(1, Mode("async"))
    plan = plan_of({"k": (4, 2)})
    empty = RowSet(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2))
    payload = encode_rows(plan, plan.slices[0], {0: empty})
    for _ in range(2):
        assert job.ask(0, contribution([(0, payload)], 1, form=PACKED_ROWS)) == []
    assert kinds(job.commit(0, 1, pushed=True)) == [m.Done]
    assert job.total == [0.0]


def test_a_rank_reads_its_own_contribution_and_the_version_says_how_many_there_were() -> None:
    job = Job(2, Mode("async"))
    job.commit(1, 1, 2.0)
    done, weights = job.commit(0, 1, 5.0, flags=m.WANTS_WEIGHTS)
    assert done == Done((0, 1, 2))
    assert isinstance(weights, m.Weights)
    assert weights.parts[:, 1].tolist() == [2]
    assert weights.payloads[0][:8].tolist() == [7.0] * 8


def test_a_read_that_waits_in_vain_fails_at_its_deadline_and_what_was_given_stands() -> None:
    job = Job(2, Mode("ssp", 0))
    job.commit(0, 1, 1.0, flags=m.WANTS_WEIGHTS, number=77)
    job.now += 20.0
    job.commit(0, 1, pushed=True, flags=m.WANTS_WEIGHTS, number=77)  # asking again wins no time
    assert job.tick(9.0, alive=(0, 1)) == {}
    assert codes(job.tick(1.5, alive=(0, 1))[0, 77]) == ["DeadlineError"]
    assert job.total == [1.0]
    assert kinds(job.commit(0, 2, 1.0)) == [m.Done]


@pytest.mark.parametrize("how", ["silent", "left"])
def test_a_read_that_needs_a_lost_rank_fails_at_once(how: str) -> None:
    job = Job(2, Mode("ssp", 0))
    job.commit(0, 1, 1.0, flags=m.WANTS_WEIGHTS, number=77)
    told = job.leave(1, is_clean=False) if how == "left" else job.tick(21.0, alive=(0,))
    assert codes(told[0, 77]) == ["WorkerLostError"]


def test_a_join_that_fails_stays_failed_when_it_is_asked_again_and_can_be_tried_anew() -> None:
    job = Job(2, Mode("async"))
    job.commit(0, 1, flags=m.HAS_JOINED, number=77)
    [failed] = job.tick(31.0, alive=(0, 1))[0, 77]
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.round, failed.next_round) == ("DeadlineError", 1, 2)
    assert codes(job.commit(0, 1, flags=m.HAS_JOINED, number=77)) == ["DeadlineError"]
    job.commit(1, 1, flags=m.HAS_JOINED)
    assert kinds(job.commit(0, 2, flags=m.HAS_JOINED)) == [m.Pending, m.InForce, m.Done]


def test_joins_that_fail_together_name_only_who_still_has_data() -> None:
    job = Job(3, Mode("async"))
    for rank in (0, 1):
        job.commit(rank, 1, flags=m.HAS_JOINED, number=77)
    told = job.tick(31.0, alive=(0, 1, 2))
    for rank in (0, 1):
        [failed] = told[rank, 77]
        assert isinstance(failed, m.Failed)
        assert "waiting for rank 2 " in failed.text
        assert "rank 1 (" not in failed.text


def test_who_comes_late_to_a_first_round_that_failed_is_told_its_failure() -> None:
    job = Job(2, Mode("async"), first=False)
    job.push(0, 0, 1.0)
    assert job.ask(0, m.Abort(0, 0, "no values", undo=False)) == [m.Status({"applied": False})]
    [failed] = job.commit(1, 0)
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.round, failed.next_round) == ("RoundAbortedError", 0, 1)
    assert job.ask(1, m.Abort(0, 0, "it failed", undo=False)) == [m.Status({"applied": False})]
    assert codes(job.commit(1, 1, 1.0)) == ["KeyNotFoundError"]


def test_ranks_of_different_modes_are_refused_with_both_named() -> None:
    job = Job(1, Mode("ssp", 2))
    hello = m.Hello("j", 0, 1, 0, 1, "", "h", b"other", (b"0",), "async")
    [failed] = job.ask(0, hello)
    assert isinstance(failed, m.Failed)
    assert "wants mode async, the ranks before it ssp staleness=2" in failed.text


def test_weights_of_a_table_that_cannot_be_used_any_more_are_not_handed_out() -> None:
    job = Job(1, Mode("async"))
    [weights] = job.pull(0)
    assert isinstance(weights, m.Weights)
    [refused] = job.ask(0, m.Register("t", (("k", (5, 2), "float32", 0, False),), False))
    assert codes([refused]) == ["PlanMismatchError"]
    assert codes(job.pull(0)) == ["PlanMismatchError"]


@pytest.mark.parametrize(("at", "code"), [(60.0, "DeadlineError"), (20.0, "WorkerLostError")])
def test_a_barrier_ends_for_all_at_the_first_deadline_or_when_a_missing_rank_is_silent(
    at: float, code: str
) -> None:
    job = Job(3, Mode())
    for rank in range(2):
        assert kinds(job.ask(rank, m.Gather(0, 60.0 + rank), number=500 + rank)) == [m.Pending]
    for rank in (0, 1) if code == "WorkerLostError" else range(3):
        job.now = at - 1.0
        job.ask(rank, m.Heartbeat())
    job.now = at - 0.5
    assert job.engine.tick(job.now) == []
    job.now = at + 0.1
    told = {out.reply.number: out.reply.body for out in job.engine.tick(job.now)}
    assert set(told) == {500, 501}
    assert all(isinstance(body, m.Failed) and body.code == code for body in told.values())
    assert all("rank 2" in body.text for body in told.values() if isinstance(body, m.Failed))
