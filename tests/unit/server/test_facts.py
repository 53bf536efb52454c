"""What a server says of itself to whoever asks: who is there, who is late, what waits, what failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvstore_server.engine.facts import FRESH, read_report
from kvstore_server.engine.rounds import ASYNC, SSP, SYNCHRONOUS, Mode
from kvstore_server.errors import ProtocolError
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
from tests.support.engines import EngineJob

STRANGER = b"nobody knows me"


def facts_of(job: EngineJob) -> Mapping[str, Any]:
    """Ask in no session, when what was told before is old."""
    job.now += FRESH
    [out] = job.engine.handle(STRANGER, m.Request(0, 0, 7, m.GetStatus()), job.now)
    assert (out.peer, out.reply.number) == (STRANGER, 7)
    assert isinstance(out.reply.body, m.Status)
    return out.reply.body.values


def job_in(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    [job] = facts["jobs"]
    assert isinstance(job, dict)
    return job


def test_a_rank_that_commits_later_is_late_by_the_time_between() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    for round_, delay in ((1, 3.0), (2, 0.5)):
        job.commit(0, round_, 1.0)
        job.tick(delay, alive=(0, 1))
        job.commit(1, round_, 1.0)
    found = job_in(facts_of(job))
    assert [worker["late"] for worker in found["workers"]] == pytest.approx([0.0, 3.5])
    assert found["waited"] == pytest.approx(3.5)
    assert (found["rounds"], found["updates"]) == (3, 2), "the first one gave the values"


def test_durations_of_rounds_are_counted_from_the_end_of_one_to_the_end_of_the_next() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    for round_, seconds in enumerate((4.0, 0.25, 0.25), start=1):
        job.commit(0, round_, 1.0)
        job.tick(seconds, alive=(0, 1))
        job.commit(1, round_, 1.0)
    times = job_in(facts_of(job))["round_seconds"]
    counted = dict(zip((*times["bounds"], "above"), times["counts"], strict=True))
    assert {bound: count for bound, count in counted.items() if count} == {0.25: 2, 5.0: 1}
    assert times["sum"] == 4.5


def test_the_age_of_a_job_is_the_time_since_its_first_worker_said_hello() -> None:
    job = EngineJob(1, SYNCHRONOUS)
    before = job_in(facts_of(job))["age"]
    job.now += 7.0
    assert job_in(facts_of(job))["age"] == pytest.approx(before + 7.0 + FRESH)


def test_each_contribution_is_a_round_where_they_count_one_by_one() -> None:
    job = EngineJob(2, Mode(ASYNC))
    job.commit(1, 1, 1.0)
    job.commit(1, 2, 1.0)
    found = job_in(facts_of(job))
    assert found["rounds"] == 3
    assert [worker["round"] for worker in found["workers"]] == [0, 2]
    assert [worker["late"] for worker in found["workers"]] == [0.0, 0.0]


def test_a_rank_is_late_while_others_are_too_far_ahead_of_it_to_read() -> None:
    job = EngineJob(3, Mode(SSP, 1))
    for rank, seconds in ((0, 2.0), (1, 3.0)):  # rank 0 waits for both at first
        for round_ in (1, 2):
            job.commit(rank, round_, 1.0, flags=m.WANTS_WEIGHTS, number=70 + rank)
        job.tick(seconds, alive=(0, 1, 2))
    assert [one["missing"] for one in job_in(facts_of(job))["waits"]] == [[2]] * 2
    job.commit(2, 1, 1.0)
    found = job_in(facts_of(job))
    assert found["waits"] == []
    assert [worker["late"] for worker in found["workers"]] == pytest.approx([0.0, 2.0, 5.0 + FRESH])


def test_an_open_round_waits_for_the_ranks_that_are_missing() -> None:
    job = EngineJob(3, SYNCHRONOUS)
    job.commit(0, 1, 1.0)
    job.now += 2.0
    [wait] = job_in(facts_of(job))["waits"]
    assert wait["missing"] == [1, 2]
    assert wait["seconds"] == pytest.approx(2.0 + FRESH)


def test_a_rank_that_left_and_one_that_failed_are_told_apart() -> None:
    job = EngineJob(3, SYNCHRONOUS)
    job.leave(1, is_clean=True)
    job.leave(2, is_clean=False)
    workers = job_in(facts_of(job))["workers"]
    assert [worker["state"] for worker in workers] == ["here", "left", "failed"]
    assert [worker["why"] for worker in workers] == ["", "over", "over"]
    assert [worker["silence"] < 0 for worker in workers] == [False, True, True]


def test_the_error_of_a_failed_round_is_kept_once() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    for round_ in (1, 2):
        job.commit(0, round_, 1.0)
        job.ask(1, m.Abort(0, round_, "no more electricity", undo=False))
    errors = job_in(facts_of(job))["errors"]
    assert len(errors) == 2, "they name their rounds"
    assert all("no more electricity" in error["text"] for error in errors)


def test_what_a_worker_says_of_itself_is_told_on() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    job.ask(1, m.Heartbeat(pack_control({"steps": 12, "loss": 0.5})))
    job.ask(1, m.Heartbeat())
    assert [worker["says"] for worker in job_in(facts_of(job))["workers"]] == [{}, {"steps": 12, "loss": 0.5}]


@pytest.mark.parametrize(
    "packed",
    [
        pack_control([1, 2]),
        pack_control({"steps": "many"}),
        pack_control({"loss": float("nan")}),
        pack_control({"steps": True}),
        pack_control({"n" * 1100: 1}),
        pack_control({f"n{at}": at for at in range(17)}),
        b"\xc1",
    ],
)
def test_a_report_that_is_no_few_finite_numbers_is_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_report(packed)


def test_facts_are_made_a_few_times_a_second_however_often_one_asks() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    before = facts_of(job)
    job.commit(0, 1, 1.0)
    [again] = job.engine.handle(STRANGER, m.Request(0, 0, 8, m.GetStatus()), job.now + FRESH / 2)
    assert isinstance(again.reply.body, m.Status)
    assert again.reply.body.values is before
    assert job_in(facts_of(job)) is not job_in(before)


def test_facts_hold_no_secret_of_a_session() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    told = repr(facts_of(job))
    assert not any(str(session) in told for session in job.sessions.values())
