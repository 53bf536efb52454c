"""Engines: contributions that count one by one, weights that ranks map, and the status that a server tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from kvstore_server.engine.facts import FRESH, read_report
from kvstore_server.engine.rounds import ASYNC, SSP, SYNCHRONOUS, Mode
from kvstore_server.errors import ProtocolError
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
from kvstore_server.protocol.rows import PACKED_ROWS, RowSet, encode_rows
from kvstore_server.transport.arena import Leases
from tests.support.engines import DEAD_AFTER, EngineJob, plan_of
from tests.support.engines import EngineJob as Job
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
        assert job.ask(0, contribution([(0, payload)], 1, encoding=PACKED_ROWS)) == []
    assert kinds(job.commit(0, 1, pushed=True)) == [m.Done]
    assert job.total == [0.0]


def test_a_rank_reads_its_own_contribution_and_the_version_says_how_many_there_were() -> None:
    job = Job(2, Mode("async"))
    job.commit(1, 1, 2.0)
    done, weights = job.commit(0, 1, 5.0, flags=m.WANTS_WEIGHTS)
    assert done == Done((0, 1, 2))
    assert isinstance(weights, m.Weights)
    assert weights.parts[:, m.PART_VERSION].tolist() == [2]
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


def test_a_join_that_fails_stays_failed_when_it_is_asked_again_and_can_be_retried() -> None:
    job = Job(2, Mode("async"))
    job.commit(0, 1, flags=m.HAS_JOINED, number=77)
    [failed] = job.tick(31.0, alive=(0, 1))[0, 77]
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.round, failed.next_round) == ("DeadlineError", 1, 2)
    assert codes(job.commit(0, 1, flags=m.HAS_JOINED, number=77)) == ["DeadlineError"]
    job.commit(1, 1, flags=m.HAS_JOINED)
    assert kinds(job.commit(0, 2, flags=m.HAS_JOINED)) == [m.Pending, m.EffectiveOptions, m.Done]


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


@pytest.mark.parametrize(("at", "code"), [(60.0, "DeadlineError"), (DEAD_AFTER, "WorkerLostError")])
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


MAPPED_SHAPE = (140_000,)
"""Eight slices of more than 64 KiB."""
MAPS = m.WANTS_WEIGHTS | m.MAPS_WEIGHTS
KNOWS = MAPS | m.LOCATIONS_CACHED


@pytest.fixture
def leases() -> Leases:
    """Those of a server that shares memory, whose places are addresses."""
    made = Leases()
    made.shared = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    made.location_of = torch.Tensor.data_ptr
    return made


def commit_by_both(job: Job, flags: int, round_: int = 1) -> list[list[m.ReplyBody]]:
    """Have both ranks give ones to all slices; what each is told when the round is over."""
    for rank in range(2):
        job.commit(rank, round_, 1.0, flags, number=1000 * round_)
    return [job.replies[rank, 1000 * round_] for rank in range(2)]


def test_slices_that_somebody_reads_come_as_bytes_beside_the_places_of_others(leases: Leases) -> None:
    job = Job(2, Mode("sync"), shape=MAPPED_SHAPE, leases=leases)
    [weights] = job.pull(0)
    assert isinstance(weights, m.Weights)
    leases.hold(weights.payloads[3])
    for [sent] in commit_by_both(job, MAPS):
        assert isinstance(sent, m.Weights)
        assert sent.locations[:, m.LOCATION_SLOT].tolist() == [0, 1, 2, 4, 5, 6, 7]
        assert sent.parts[:, m.PART_SLOT].tolist() == [3]
        assert set(sent.payloads[0].tolist()) == {2.0}
    assert not weights.payloads[3].any()


def test_a_rank_that_knows_all_places_is_told_of_one_slice_that_they_are_still_those(leases: Leases) -> None:
    job = Job(2, Mode("sync"), shape=MAPPED_SHAPE, leases=leases)
    commit_by_both(job, MAPS)
    for round_, flags in ((2, KNOWS), (3, KNOWS | m.WANTS_DELTA)):
        for told in commit_by_both(job, flags, round_):
            [shown] = told
            assert isinstance(shown, m.Weights)
            assert shown.locations.tolist() == [[0, round_, m.SAME_LOCATION]]
            assert not len(shown.parts)


def test_a_rank_that_knows_all_places_is_told_every_one_where_a_slice_has_moved(leases: Leases) -> None:
    job = Job(2, Mode("sync"), shape=MAPPED_SHAPE, leases=leases)
    [weights] = job.pull(0)
    assert isinstance(weights, m.Weights)
    leases.hold(weights.payloads[3])
    for [sent] in commit_by_both(job, KNOWS):
        assert isinstance(sent, m.Weights)
        assert sent.locations[:, m.LOCATION_SLOT].tolist() == [0, 1, 2, 4, 5, 6, 7]
        assert (sent.locations[:, m.LOCATION_PLACE] > 0).all()
        assert sent.parts[:, m.PART_SLOT].tolist() == [3]


def test_ranks_that_do_not_map_weights_are_sent_them_beside_those_that_do(leases: Leases) -> None:
    job = Job(2, Mode("sync"), shape=MAPPED_SHAPE, leases=leases)
    [[sent], _] = commit_by_both(job, m.WANTS_WEIGHTS)
    assert isinstance(sent, m.Weights)
    assert not len(sent.locations)


def test_ranks_whose_contributions_count_one_by_one_are_sent_weights_though_they_map_them(
    leases: Leases,
) -> None:
    job = Job(1, Mode("async"), shape=MAPPED_SHAPE, leases=leases)
    told = job.commit(0, 1, 1.0, flags=MAPS)
    assert [type(body) for body in told] == [m.Done, m.Weights]


def test_a_server_that_shares_no_memory_sends_weights() -> None:
    job = Job(2, Mode("sync"), shape=MAPPED_SHAPE)
    [[sent], _] = commit_by_both(job, MAPS)
    assert isinstance(sent, m.Weights)
    assert not len(sent.locations)


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
