"""The scheduler's state without sockets: who is told what, ranks in any order of arrival, conflicts and deadlines."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from kvstore_server.errors import ConfigurationError, ConnectTimeoutError, RoundAbortedError
from kvtrainer.rendezvous import messages as m
from kvtrainer.rendezvous.attendance import Attendance
from kvtrainer.rendezvous.table import Rendezvous, ranks_of

DEAD_AFTER = 20.0


def join(role: str, name: str, **given: object) -> m.Join:
    """A process of a job of 2 workers and 2 servers."""
    plain = m.Join(name, role, 2, 2, rank=-1, task=-1, host="a", started=0, pid=ord(name[-1]), machine="m")
    return replace(plain, **given)  # type: ignore[arg-type]


EVERYBODY = [join("worker", "w1"), join("worker", "w2"), join("server", "s1"), join("server", "s2")]


def ready(server: str) -> m.Ready:
    return m.Ready(server, f"tcp://h:{ord(server[-1])}", f"tcp://h:{1000 + ord(server[-1])}")


def rendezvous() -> Rendezvous:
    return Rendezvous(2, 2, DEAD_AFTER)


def refused(answer: m.Answer, kind: type[Exception]) -> str:
    assert isinstance(answer, m.Refused)
    error = answer.error()
    assert type(error) is kind
    return str(error)


# Everybody comes.


@pytest.mark.parametrize("order", list(itertools.permutations(EVERYBODY)))
def test_all_are_told_the_same_whatever_the_order_of_arrival(order: tuple[m.Join, ...]) -> None:
    meeting = rendezvous()
    for one in order[:-1]:
        assert isinstance(meeting.handle(one, 0.0), m.Waiting)
    meeting.handle(order[-1], 0.0)
    assert [meeting.handle(j, 0.0) for j in EVERYBODY[2:]] == [m.Assigned(0, True), m.Assigned(1, True)]
    for name in ("s2", "s1", "s2"):
        meeting.handle(ready(name), 0.0)
    tables = [meeting.handle(j, 0.0) for j in EVERYBODY]
    assert [table.rank for table in tables if isinstance(table, m.Table)] == [0, 1, 0, 1]
    for table in tables:
        assert isinstance(table, m.Table)
        assert table.servers == (ready("s1").address, ready("s2").address)
        assert table.attendance == (ready("s1").attendance, ready("s2").attendance)
    assert [table.workers for table in tables if isinstance(table, m.Table)] == [(), (), *[("w1", "w2")] * 2]
    assert meeting.workers == ("w1", "w2")


def test_workers_wait_until_every_server_says_where_it_listens() -> None:
    meeting = rendezvous()
    for one in EVERYBODY:
        meeting.handle(one, 0.0)
    meeting.handle(ready("s2"), 0.0)
    answer = meeting.handle(EVERYBODY[0], 0.0)
    assert isinstance(answer, m.Waiting)
    assert "server 0 (server on a (process 49))" in answer.missing
    assert not meeting.is_complete


def test_workers_begin_only_when_no_server_needs_the_scheduler_any_more() -> None:
    meeting = rendezvous()
    for one in EVERYBODY:
        meeting.handle(one, 0.0)
    meeting.handle(ready("s2"), 0.0)
    assert isinstance(meeting.handle(ready("s1"), 0.0), m.Table)
    assert isinstance(meeting.handle(EVERYBODY[0], 0.0), m.Waiting)
    assert isinstance(meeting.handle(ready("s2"), 0.0), m.Table)
    assert isinstance(meeting.handle(EVERYBODY[0], 0.0), m.Table)


def test_servers_learn_whether_all_are_on_one_machine() -> None:
    meeting = rendezvous()
    for one in [*EVERYBODY[:3], replace(EVERYBODY[3], machine="other")]:
        meeting.handle(one, 0.0)
    assert meeting.handle(EVERYBODY[2], 0.0) == m.Assigned(0, False)


def test_everybody_is_told_only_when_each_has_the_table() -> None:
    meeting = rendezvous()
    for one in EVERYBODY:
        meeting.handle(one, 0.0)
    for name in ("s1", "s2", "s1"):
        meeting.handle(ready(name), 0.0)
    meeting.handle(EVERYBODY[0], 0.0)
    assert not meeting.is_everybody_told()
    for one in EVERYBODY[1:]:
        meeting.handle(one, 0.0)
    assert meeting.is_everybody_told()


# Ranks.


def test_ranks_are_the_same_for_every_order_of_the_joins() -> None:
    random.seed(5)
    joins = [
        join("worker", f"w{i}", host=random.choice("ab"), started=random.randrange(4), pid=i)
        for i in range(12)
    ]
    joins[3] = replace(joins[3], rank=0)
    joins[7] = replace(joins[7], rank=11)
    expected = ranks_of(joins)
    assert sorted(expected.values()) == list(range(12))
    assert (expected["w3"], expected["w7"]) == (0, 11)
    for _ in range(200):
        random.shuffle(joins)
        assert ranks_of(joins) == expected


def test_processes_without_a_number_are_ordered_by_host_then_start_then_pid() -> None:
    joins = [
        join("worker", "w1", host="b", started=1, pid=1),
        join("worker", "w2", host="a", started=9, pid=1),
        join("worker", "w3", host="a", started=9, pid=0),
        join("worker", "w4", host="a", started=2, pid=8),
    ]
    assert ranks_of(joins) == {"w4": 0, "w3": 1, "w2": 2, "w1": 3}


def test_task_numbers_order_a_role_although_they_count_on_over_both() -> None:
    joins = [join("server", "s1", task=3, started=0), join("server", "s2", task=2, started=9)]
    assert ranks_of(joins) == {"s2": 0, "s1": 1}


# Conflicts.


@pytest.mark.parametrize(
    ("claim", "text"), [({"rank": 1}, "rank 1"), ({"task": 4}, r"task 4 \(DMLC_TASK_ID\)")]
)
def test_two_processes_that_claim_one_place_get_the_same_typed_error(
    claim: dict[str, int], text: str
) -> None:
    meeting = rendezvous()
    first, second = join("worker", "w1", **claim), join("worker", "w2", **claim)
    meeting.handle(first, 0.0)
    texts = [refused(meeting.handle(one, 0.5), ConfigurationError) for one in (second, first, EVERYBODY[2])]
    assert len(set(texts)) == 1
    with pytest.raises(ConfigurationError, match=rf"\(process 49\) and .* \(process 50\) both have {text}"):
        raise meeting.failure  # type: ignore[misc]


def test_a_worker_and_a_server_may_have_the_same_number() -> None:
    meeting = rendezvous()
    meeting.handle(join("worker", "w1", rank=0), 0.0)
    assert isinstance(meeting.handle(join("server", "s1", rank=0), 0.0), m.Waiting)


def test_a_process_that_was_started_again_takes_the_place_of_the_silent_one() -> None:
    meeting = rendezvous()
    meeting.handle(join("worker", "w1", rank=0), 0.0)
    assert isinstance(meeting.handle(join("worker", "w2", rank=0), 1.5), m.Waiting)
    assert meeting.failure is None


def test_one_process_too_many_fails_the_job_and_all_are_named() -> None:
    meeting = rendezvous()
    for name in "123":
        answer = meeting.handle(join("worker", f"w{name}"), 0.0)
    text = refused(answer, ConfigurationError)
    assert text.startswith(
        "the job has 2 workers, but there are worker on a (process 49), worker on a (process 50)"
    )


def test_a_process_of_a_job_of_another_size_is_turned_away_alone_and_named_at_the_deadline() -> None:
    meeting = rendezvous()
    text = refused(meeting.handle(join("worker", "w1", num_workers=3), 0.0), ConfigurationError)
    assert "a job of 3 workers and 2 servers, while the scheduler's has 2 and 2" in text
    assert meeting.failure is None
    assert "turned away was worker on a (process 49)" in meeting.missing()


def test_a_process_that_comes_when_all_are_there_is_refused_and_nobody_else_is() -> None:
    meeting = rendezvous()
    for one in EVERYBODY:
        meeting.handle(one, 0.0)
    assert "comes too late" in refused(meeting.handle(join("worker", "w9"), 0.0), ConfigurationError)
    assert meeting.handle(EVERYBODY[2], 0.0) == m.Assigned(0, True)


def test_one_that_gives_up_takes_all_along_and_says_why() -> None:
    meeting = rendezvous()
    meeting.handle(EVERYBODY[0], 0.0)
    meeting.handle(m.GivingUp("w1", "ValueError: no data"), 0.0)
    text = refused(meeting.handle(EVERYBODY[2], 0.0), RoundAbortedError)
    assert text == "worker on a (process 49) gave up: ValueError: no data"


def test_a_stranger_that_gives_up_changes_nothing() -> None:
    meeting = rendezvous()
    meeting.handle(m.GivingUp("x", "hm"), 0.0)
    assert meeting.failure is None


# Who is missing.


@pytest.mark.parametrize(
    ("here", "text"),
    [
        ([], "there is no server but 0 of 2 (nobody) and no worker but 0 of 2 (nobody)"),
        (EVERYBODY[1:], "there is no worker but 1 of 2 (worker on a (process 50))"),
        ([*EVERYBODY[:2], join("server", "s1", rank=1)], "there is no server 0"),
    ],
)
def test_the_deadline_names_who_is_missing(here: list[m.Join], text: str) -> None:
    meeting = rendezvous()
    for one in here:
        meeting.handle(one, 0.0)
    meeting.fail_late(30.0)
    assert isinstance(meeting.failure, ConnectTimeoutError)
    assert str(meeting.failure) == f"after 30 s {text}"


def test_one_that_fell_silent_before_all_were_there_is_missing() -> None:
    meeting = rendezvous()
    for one in EVERYBODY[:3]:
        meeting.handle(one, 0.0)
    for one in EVERYBODY[1:3]:
        meeting.handle(one, DEAD_AFTER)
    meeting.expire(DEAD_AFTER + 1)
    assert meeting.missing().endswith("no worker but 1 of 2 (worker on a (process 50))")


def test_a_long_list_of_the_missing_still_travels() -> None:
    meeting = Rendezvous(1, 200, DEAD_AFTER)
    for i in range(200):
        joined = join("server", f"s{i}", host="h" * 255, num_workers=1, num_servers=200)
        meeting.handle(joined, 0.0)
    first = join("worker", "w", num_workers=1, num_servers=200)
    answer = meeting.handle(first, 0.0)
    assert isinstance(answer, m.Waiting)
    assert m.decode_answer(m.encode(answer)) == answer


# Attendance.


def test_a_job_is_over_when_every_worker_is_done() -> None:
    attendance = Attendance(["a", "b"], DEAD_AFTER, 0.0)
    attendance.handle(m.Done("a"), 1.0)
    attendance.handle(m.Done("a"), 1.0)
    attendance.handle(m.Done("stranger"), 1.0)
    assert not attendance.is_over(2.0)
    attendance.handle(m.Done("b"), 2.0)
    assert attendance.is_over(2.0)


def test_a_job_is_over_when_the_last_worker_has_been_silent_too_long() -> None:
    attendance = Attendance(["a", "b"], DEAD_AFTER, 0.0)
    attendance.handle(m.Done("a"), 1.0)
    attendance.handle(m.Alive("b"), 5.0)
    assert not attendance.is_over(5.0 + DEAD_AFTER)
    assert attendance.is_over(5.1 + DEAD_AFTER)


def test_silence_while_one_stood_still_oneself_does_not_count() -> None:
    attendance = Attendance(["a"], DEAD_AFTER, 0.0)
    attendance.excuse_silence(100.0)
    assert not attendance.is_over(101.0)
