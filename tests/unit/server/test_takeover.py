"""Engines: a process that takes over the rank of one that died, and what the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore_server.engine.membership import Membership
from kvstore_server.engine.rounds import SYNCHRONOUS, Mode, Waiter
from kvstore_server.processes import ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.restarts import RESTARTS
from tests.support.engines import DEAD_AFTER
from tests.support.engines import EngineJob as Job

STATE = b"cursor 7"
REJOIN = 60.0


def codes(told: Sequence[m.ReplyBody]) -> list[str]:
    return [body.code for body in told if isinstance(body, m.Failed)]


def kinds(told: Sequence[m.ReplyBody]) -> list[type]:
    return [type(body) for body in told]


def one_round(job: Job, round_: int) -> None:
    for rank in range(job.workers):
        job.commit(rank, round_, 1.0, client_state=STATE)


def resumable() -> Job:
    """Two ranks that another process can take over, after one round of both."""
    job = Job(2, SYNCHRONOUS)
    for rank in range(2):
        job.hello(rank, resumes=True)
    one_round(job, 1)
    return job


def test_a_successor_is_told_the_open_round_and_what_the_last_commit_of_its_rank_brought() -> None:
    job = Job(2, SYNCHRONOUS)
    one_round(job, 1)
    assert job.hello(1) == m.Registered(0, 0, 2, False, (STATE,))


def test_a_commit_of_the_predecessor_counts_and_the_successor_is_told_so() -> None:
    job = Job(2, SYNCHRONOUS)
    one_round(job, 1)
    job.commit(1, 2, 5.0, client_state=b"later")
    assert job.hello(1) == m.Registered(0, 0, 2, True, (STATE, b"later"))
    job.commit(0, 2, 3.0)
    assert job.total == [2.0 + 8.0]


def test_what_the_predecessor_gave_without_a_commit_is_dropped() -> None:
    job = Job(2, SYNCHRONOUS)
    job.push(1, 1, 100.0)
    job.hello(1)
    job.commit(1, 1, 2.0)
    job.commit(0, 1, 3.0)
    assert job.total == [5.0]


def test_a_successor_that_commits_the_open_round_again_gets_its_answer_in_its_own_form() -> None:
    job = Job(2, SYNCHRONOUS)
    job.commit(1, 1, 5.0, flags=m.MAPS_WEIGHTS | m.WANTS_WEIGHTS)
    job.hello(1)
    assert kinds(job.commit(1, 1, flags=m.WANTS_WEIGHTS, number=900)) == [m.Pending]
    job.commit(0, 1, 3.0)
    [weights] = [body for body in job.replies[1, 900] if isinstance(body, m.Weights)]
    assert weights.payloads[0][:8].tolist() == [8.0] * 8


def test_a_round_that_has_ended_is_answered_as_to_the_predecessor() -> None:
    job = Job(2, SYNCHRONOUS)
    one_round(job, 1)
    job.hello(1)
    assert kinds(job.commit(1, 1, flags=m.WANTS_WEIGHTS)) == [m.Weights]


def test_others_wait_for_the_successor_of_a_resumable_rank_as_long_as_the_timeout_says() -> None:
    job = resumable()
    job.commit(0, 2, 3.0, number=77, timeout=1e6)
    job.leave(1, is_clean=False)
    assert job.tick(REJOIN - 1.0, alive=(0,)) == {}
    assert codes(job.tick(2.0, alive=(0,))[0, 77]) == ["WorkerLostError"]


def test_a_rank_that_nobody_can_take_over_is_not_waited_for() -> None:
    job = Job(2, SYNCHRONOUS)
    one_round(job, 1)
    job.commit(0, 2, 3.0, number=77)
    told = job.leave(1, is_clean=False)
    assert codes(told[0, 77]) == ["WorkerLostError"]


def test_a_silent_resumable_rank_is_waited_for_beyond_the_time_after_which_it_counts_as_dead() -> None:
    job = resumable()
    job.commit(0, 2, 3.0, number=77, timeout=1e6)
    assert job.tick(DEAD_AFTER + REJOIN - 1.0, alive=(0,)) == {}
    assert codes(job.tick(2.0, alive=(0,))[0, 77]) == ["WorkerLostError"]


def test_a_successor_that_comes_in_time_completes_the_round_that_the_others_wait_in() -> None:
    job = resumable()
    job.commit(0, 2, 3.0, number=77, timeout=1e6)
    job.leave(1, is_clean=False)
    job.tick(REJOIN / 2, alive=(0,))
    job.hello(1)
    job.commit(1, 2, 4.0)
    assert kinds(job.replies[0, 77]) == [m.Done]
    assert job.total == [9.0]


def test_a_namespace_whose_workers_have_all_failed_ends_when_none_of_them_came_back() -> None:
    job = resumable()
    for rank in range(2):
        job.leave(rank, is_clean=False)
    assert list(job.engine.namespaces) == ["j"]
    job.tick(REJOIN + 1.0, alive=())
    assert list(job.engine.namespaces) == []
    assert job.engine.budget.used == 0


def test_a_process_that_is_started_again_after_all_have_finished_is_told_so() -> None:
    job = resumable()
    for rank in range(2):
        job.leave(rank, is_clean=True)
    assert codes([job.hello(0, resumes=True, restarts=1)]) == ["FencedError"]
    assert list(job.engine.namespaces) == []


def test_another_job_may_begin_where_one_has_finished() -> None:
    job = resumable()
    for rank in range(2):
        job.leave(rank, is_clean=True)
    assert job.hello(0, resumes=True) == m.Registered(0, 0, 0)


def test_a_process_that_is_started_again_after_the_others_failed_begins_as_at_first() -> None:
    job = resumable()
    for rank in range(2):
        job.leave(rank, is_clean=False)
    job.tick(REJOIN + 1.0, alive=())
    assert job.hello(0, resumes=True, restarts=1) == m.Registered(0, 0, 0)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_process_that_comes_after_its_job_has_finished_is_told_why_nobody_else_comes(restarts: int) -> None:
    """Without a number of restarts it may as well be the first process of the next job, which others join."""
    job = resumable()
    for rank in range(2):
        job.leave(rank, is_clean=True)
    answer = job.hello(1, resumes=True, restarts=restarts)
    if restarts:
        assert codes([answer]) == ["FencedError"]
        return
    [waits] = job.ask(1, m.Gather(0, 30.0, b""))
    assert isinstance(waits, m.Pending)
    assert RESTARTS in waits.why
    job.hello(0, resumes=True)
    [waits] = job.ask(1, m.Gather(0, 30.0, b""))
    assert isinstance(waits, m.Pending)
    assert RESTARTS not in waits.why


@pytest.mark.parametrize("round_", [1, 3])
def test_weights_before_another_round_than_the_open_one_are_refused(round_: int) -> None:
    job = Job(2, SYNCHRONOUS)
    one_round(job, 1)
    assert codes(job.ask(0, m.Pull((0,), 30.0, round_))) == ["WorkerLostError"]
    assert kinds(job.ask(0, m.Pull((0,), 30.0, 2))) == [m.Weights]


def test_asynchronous_contributions_keep_the_state_of_their_rank() -> None:
    job = Job(2, Mode("async"))
    job.commit(1, 1, 5.0, client_state=STATE)
    told = job.hello(1)
    assert isinstance(told, m.Registered)
    assert told.client_states == (STATE,)


def test_a_process_that_resumes_gives_all_that_this_server_has_not_although_others_are_ahead() -> None:
    # Another server may have its first push, which this one has not: it must not begin where the others are.
    job = Job(2, Mode("async"))
    for rank in range(2):
        job.hello(rank, resumes=True)
    for round_ in (1, 2, 3):
        job.commit(0, round_, 1.0)
    assert job.hello(1, resumes=True) == m.Registered(0, 0, 1)


def open_agreement(job: Job, rank: int, **more: Any) -> int:
    """Say hello in a namespace for collectives beside training; the session."""
    nonce = b"%d side" % rank
    hello = m.Hello("j/side1", rank, 2, 0, 1, "", f"h{rank}", nonce, (b"%d" % rank,), resumes=True, **more)
    [welcome] = job.ask(rank, hello)
    assert isinstance(welcome, m.Welcome)
    return welcome.session


def test_what_all_have_gathered_is_told_to_a_successor_that_comes_after_they_left() -> None:
    job = resumable()
    trainers = dict(job.sessions)
    job.sessions.update({rank: open_agreement(job, rank) for rank in range(2)})
    for rank in range(2):
        job.ask(rank, m.Gather(0, 30.0, b"given by %d" % rank))
    for rank in range(2):
        job.leave(rank, is_clean=True)
    nonce = b"of another process"
    hello = m.Hello("j/side1", 1, 2, 0, 1, "", "h1", nonce, (b"1",), resumes=True, restarts=1)
    [welcome] = job.ask(1, hello)
    assert isinstance(welcome, m.Welcome)
    job.sessions[1] = welcome.session
    assert job.ask(1, m.Gather(0, 30.0, b"anything")) == [m.Gathered((b"given by 0", b"given by 1"))]
    job.leave(1, is_clean=True)
    job.sessions = trainers
    for rank in range(2):
        job.leave(rank, is_clean=True)
    assert list(job.engine.namespaces) == []
    assert job.engine.budget.used == 0


def gather(job: Job, sequence: int, data: bytes) -> None:
    for rank in range(2):
        job.ask(rank, m.Gather(sequence, 30.0, data))


def again(job: Job, sequence: int) -> list[m.ReplyBody]:
    return list(job.ask(1, m.Gather(sequence, 30.0, b"anything")))


def test_what_was_gathered_first_and_last_is_kept_longer_than_what_came_between() -> None:
    job = Job(2, SYNCHRONOUS)
    job.hello(1, resumes=True)
    for sequence in range(20):
        gather(job, sequence, bytes([sequence]) * (256 << 10))  # 10 MiB together
    for sequence in (0, 1, 2, 18, 19):
        [answer] = again(job, sequence)
        assert isinstance(answer, m.Gathered)
        assert [part[0] for part in answer.parts] == [sequence, sequence]
    assert codes(again(job, 8)) == ["WorkerLostError"]


def test_the_memory_for_barriers_without_data_is_bounded_too() -> None:
    members = Membership("j", 1)
    for sequence in range(60_000):
        members.enter_barrier(0, m.Gather(sequence, 30.0, b"", False), Waiter(b"", 0), 0.0)
    assert len(members.gathered) < 55_000
    assert members.barrier_sequence == 60_000


def test_an_asynchronous_rank_goes_on_with_its_own_numbers_and_repeats_without_effect() -> None:
    job = Job(2, Mode("ssp", 1))
    job.hello(1, resumes=True)
    for number in (1, 2):
        job.commit(1, number, 1.0)
        job.commit(0, number, 1.0)
    for number in (3, 4):
        job.commit(0, number, 1.0)  # the others have gone on
    assert job.hello(1, resumes=True) == m.Registered(0, 0, 3)
    job.commit(1, 2, 100.0)
    job.commit(1, 3, 1.0)
    assert job.total == [7.0]


def test_a_process_that_does_not_resume_is_not_behind_the_others() -> None:
    job = Job(2, Mode("ssp", 1))
    job.commit(1, 1, 1.0)
    for number in (1, 2):
        job.commit(0, number, 1.0)
    assert job.hello(1) == m.Registered(0, 0, 3)


def test_a_process_that_was_held_up_at_its_start_does_not_replace_its_successor() -> None:
    job = resumable()
    job.hello(1, resumes=True, restarts=2)
    late = job.hello(1, resumes=True, restarts=1)
    assert isinstance(late, m.Failed)
    assert late.code == "FencedError"
    job.commit(1, 2, 2.0, client_state=STATE)
    job.commit(0, 2, 3.0, client_state=STATE)
    assert job.total == [2.0 + 5.0]


def test_a_process_that_was_started_less_often_replaces_one_that_has_died() -> None:
    job = resumable()
    job.hello(1, resumes=True, restarts=2)
    job.engine.namespaces["j"].membership.members[1].state = ProcessState.ENDED
    assert isinstance(job.hello(1, resumes=True, restarts=0), m.Registered)


def test_a_commit_that_the_server_has_lost_is_not_counted_when_it_is_asked_about() -> None:
    job = Job(2, SYNCHRONOUS)
    one_round(job, 1)
    job.hello(1, resumes=True)
    [told] = job.commit(1, 2, flags=m.WANTS_WEIGHTS | m.REPEATS)
    assert isinstance(told, m.Missing)
    job.commit(0, 2, 3.0, number=77)
    assert (0, 77) not in job.replies
    job.commit(1, 2, 4.0)
    assert job.total == [9.0]


def test_the_states_of_the_last_two_rounds_are_kept_and_of_one_round_the_latest() -> None:
    job = Job(2, SYNCHRONOUS)
    for number, state in ((1, b"first"), (2, b"second"), (3, b"third")):
        for rank in range(2):
            job.commit(rank, number, 1.0, client_state=state)
    assert job.hello(1) == m.Registered(0, 0, 4, False, (b"second", b"third"))
