"""The state of a scheduler: who is told what, ranks in any order of arrival, conflicts, deadlines, the end of a job."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_server.errors import (
    ConfigurationError,
    ConnectTimeoutError,
    KVStoreError,
    ProtocolError,
    RoundAbortedError,
    from_wire,
)
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import encode_frames
from kvtrainer.jobs.scheduler import REPLACED_AFTER, Scheduler, scheduled_ranks

TIMEOUT, DEAD_AFTER = 30.0, 20.0


class Job:
    """A scheduler for 2 workers and 2 servers; a process is named by its role and a digit, as "w1"."""

    def __init__(self, workers: int = 2, servers: int = 2) -> None:
        tokens = itertools.count(1)
        self.counts = (workers, servers)
        self.scheduler = Scheduler(workers, servers, TIMEOUT, DEAD_AFTER, 0.0, lambda: next(tokens))

    def process(self, name: str, **given: Any) -> m.JoinJob:
        role = {"w": "worker", "s": "server"}[name[0]]
        plain = m.JoinJob(role, *self.counts, -1, -1, host="a", started=0, pid=int(name[1:]), machine="m")
        return replace(plain, **given)

    def say(self, name: str, body: m.RequestBody, now: float = 0.0, session: int = 0) -> m.ReplyBody | None:
        peer = name.encode()
        out = self.scheduler.handle(peer, m.Request(0, session, 5, body), now)
        assert all((one.peer, one.reply.number) == (peer, 5) for one in out)
        return out[0].reply.body if out else None

    def join(self, name: str, now: float = 0.0, **given: Any) -> m.ReplyBody | None:
        return self.say(name, self.process(name, **given), now)

    def listen(self, name: str) -> m.ReplyBody | None:
        return self.say(name, m.Listening(f"tcp://h:{name[1:]}"))

    def begin(self) -> dict[str, int]:
        """Let everybody come and be told; the token of each worker."""
        for name in EVERYBODY:
            self.join(name)
        for name in ("s1", "s2", "s1"):
            self.listen(name)
        return {name: told(self.join(name))["session"] for name in ("w1", "w2")}


EVERYBODY = ("w1", "w2", "s1", "s2")


@pytest.fixture
def job() -> Job:
    return Job()


def told(answer: m.ReplyBody | None) -> dict[str, Any]:
    assert isinstance(answer, m.Status)
    return dict(answer.values)


def waits_for(answer: m.ReplyBody | None) -> str:
    assert isinstance(answer, m.Pending)
    return answer.why


def refused(answer: m.ReplyBody | None) -> KVStoreError:
    assert isinstance(answer, m.Failed)
    return from_wire(answer.code, answer.text)


# Everybody comes.


@pytest.mark.parametrize("order", list(itertools.permutations(EVERYBODY)))
def test_all_are_told_the_same_whatever_the_order_of_arrival(job: Job, order: Sequence[str]) -> None:
    for name in order:
        job.join(name)
    assert [told(job.join(name))["rank"] for name in ("s1", "s2")] == [0, 1]
    for name in ("s2", "s1", "s2"):
        answer = job.listen(name)
    assert told(answer) == {}
    places = [told(job.join(name)) for name in ("w1", "w2")]
    assert [place["rank"] for place in places] == [0, 1]
    assert [place["servers"] for place in places] == [["tcp://h:1", "tcp://h:2"]] * 2


def test_workers_begin_only_when_no_server_needs_the_scheduler_any_more(job: Job) -> None:
    for name in EVERYBODY:
        job.join(name)
    assert "server 0 (server on a (process 1))" in waits_for(job.listen("s2"))
    assert told(job.listen("s1")) == {}
    assert "server 1 (server on a (process 2))" in waits_for(job.join("w1"))
    assert told(job.listen("s2")) == {}
    assert told(job.join("w1"))["rank"] == 0


def test_servers_learn_whether_all_are_on_one_machine(job: Job) -> None:
    other = Job()
    for name in EVERYBODY:
        job.join(name)
        other.join(name, machine=name[:1])
    assert told(job.join("s1"))["is_one_machine"] is True
    assert told(other.join("s1"))["is_one_machine"] is False


# Ranks.


PLACES = st.tuples(st.sampled_from("ab"), st.integers(0, 3))


@given(st.data(), st.lists(PLACES, min_size=2, max_size=12))
def test_ranks_are_the_same_in_every_order(data: st.DataObject, places: list[tuple[str, int]]) -> None:
    job, claimed = Job(), {0: 0, len(places) - 1: len(places) - 1}
    joins = [
        job.process(f"w{at}", host=host, started=started, rank=claimed.get(at, -1))
        for at, (host, started) in enumerate(places)
    ]
    expected = dict(zip(joins, scheduled_ranks(joins), strict=True))
    assert sorted(expected.values()) == list(range(len(joins)))
    assert all(expected[joins[at]] == rank for at, rank in claimed.items())
    shuffled = data.draw(st.permutations(joins))
    assert scheduled_ranks(shuffled) == [expected[join] for join in shuffled]


@pytest.mark.parametrize(
    ("places", "ranks"),
    [([("b", 1, 1), ("a", 9, 1), ("a", 9, 0), ("a", 2, 8)], [3, 2, 1, 0]), ([("a", 0, 0)], [0])],
)
def test_processes_without_a_number_are_ordered_by_host_then_start_then_pid(
    job: Job, places: list[tuple[str, int, int]], ranks: list[int]
) -> None:
    joins = [job.process("w1", host=host, started=started, pid=pid) for host, started, pid in places]
    assert scheduled_ranks(joins) == ranks


def test_task_numbers_order_a_role_although_they_count_on_over_both(job: Job) -> None:
    assert scheduled_ranks([job.process("s1", task=3), job.process("s2", task=2, started=9)]) == [1, 0]


# Conflicts.


@pytest.mark.parametrize(("claim", "text"), [({"rank": 1}, "rank 1"), ({"task": 4}, "task 4 (DMLC_TASK_ID)")])
def test_two_claims_of_one_place_fail_the_job(job: Job, claim: dict[str, int], text: str) -> None:
    job.join("w1", **claim)
    errors = [refused(job.join(name, 0.5, **claim)) for name in ("w2", "w1", "w2")]
    errors.append(refused(job.join("s1", 0.5)))
    assert {type(error) for error in errors} == {ConfigurationError}
    assert len(set(map(str, errors))) == 1
    assert f"(process 1) and worker on a (process 2) both have {text}" in str(job.scheduler.failure)
    assert job.scheduler.is_over(0.5)
    assert job.scheduler.is_idle()


def test_a_worker_and_a_server_may_have_the_same_number(job: Job) -> None:
    job.join("w1", rank=0)
    assert waits_for(job.join("s1", rank=0)) == "there is no server 1 and no worker 1"
    assert job.scheduler.failure is None


@pytest.mark.parametrize("claim", [{"rank": 0}, {}])
def test_a_process_that_was_started_again_takes_the_place_of_the_silent_one(claim: dict[str, int]) -> None:
    job = Job(workers=1)
    job.join("w1", **claim)
    assert "no server but 0 of 2" in waits_for(job.join("w2", REPLACED_AFTER + 0.1, **claim))
    assert job.scheduler.failure is None


def test_one_process_too_many_fails_the_job_and_all_are_named(job: Job) -> None:
    job.join("w1")
    job.join("w2")
    error = refused(job.join("w3"))
    assert type(error) is ConfigurationError
    assert "has 2 workers" in str(error)
    assert all(f"(process {pid})" in str(error) for pid in (1, 2, 3))


def test_a_process_of_a_job_of_another_size_is_turned_away_alone_and_named_at_the_deadline(job: Job) -> None:
    error = refused(job.join("w1", num_workers=3))
    assert type(error) is ConfigurationError
    assert "3 workers and 2 servers, while the scheduler's has 2 and 2" in str(error)
    assert job.scheduler.failure is None
    assert "turned away was worker on a (process 1)" in job.scheduler.missing()


def test_a_process_that_comes_when_all_are_there_is_refused_and_nobody_else_is(job: Job) -> None:
    for name in EVERYBODY:
        job.join(name)
    assert "comes too late" in str(refused(job.join("w9")))
    assert told(job.join("s1"))["rank"] == 0


def test_one_that_gives_up_takes_all_along_and_says_why(job: Job) -> None:
    job.join("w1")
    assert job.say("w1", m.Leave("ValueError: no data", False)) is None
    error = refused(job.join("s1"))
    assert type(error) is RoundAbortedError
    assert str(error) == "worker on a (process 1) gave up: ValueError: no data"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (m.Listening("tcp://h:1"), ConfigurationError),
        (m.Stats(), ProtocolError),
        (m.JoinJob("king", 2, 2, -1, -1, "a", 0, 1, "m"), ProtocolError),
        (m.JoinJob("worker", 2, 2, -1, -1, "a" * 256, 0, 1, "m"), ProtocolError),
        (m.JoinJob("worker", 2, 2, 2, -1, "a", 0, 1, "m"), ConfigurationError),
    ],
)
def test_an_unknown_process_is_refused(job: Job, body: m.RequestBody, kind: type[KVStoreError]) -> None:
    before = job.scheduler.missing().partition(";")[0]
    assert type(refused(job.say("x1", body))) is kind
    assert job.say("x1", m.Leave("hm", False)) is None
    assert job.scheduler.failure is None
    assert job.scheduler.missing().partition(";")[0] == before


def test_only_a_server_of_the_job_may_say_that_it_listens(job: Job) -> None:
    for name in EVERYBODY:
        job.join(name)
    assert type(refused(job.listen("w1"))) is ProtocolError


# Who is missing.


@pytest.mark.parametrize(
    ("here", "text"),
    [
        ({}, "there is no server but 0 of 2 (nobody) and no worker but 0 of 2 (nobody)"),
        (dict.fromkeys(EVERYBODY[1:], -1), "there is no worker but 1 of 2 (worker on a (process 2))"),
        ({"w1": -1, "w2": -1, "s1": 1}, "there is no server 0"),
    ],
)
def test_the_deadline_names_who_is_missing(job: Job, here: dict[str, int], text: str) -> None:
    for name, rank in here.items():
        job.join(name, TIMEOUT, rank=rank)
    job.scheduler.tick(TIMEOUT)
    assert isinstance(job.scheduler.failure, ConnectTimeoutError)
    assert str(job.scheduler.failure) == f"after 30 s {text}"
    assert job.scheduler.is_over(TIMEOUT)
    assert job.scheduler.is_idle() is not bool(here)
    assert [type(refused(job.join(name, TIMEOUT))) for name in here] == [ConnectTimeoutError] * len(here)
    assert job.scheduler.is_idle()


def test_one_that_fell_silent_before_all_were_there_is_missing(job: Job) -> None:
    for name in EVERYBODY[:3]:
        job.join(name)
    for name in EVERYBODY[1:3]:
        job.join(name, DEAD_AFTER)
    job.scheduler.tick(DEAD_AFTER + 1)
    assert job.scheduler.missing().endswith("no worker but 1 of 2 (worker on a (process 2))")


def test_a_long_list_of_the_missing_still_travels() -> None:
    job = Job(1, 200)
    for i in range(200):
        job.join(f"s{i}", host="h" * 255)
    answer = job.join("w1")
    waits_for(answer)
    assert encode_frames(m.Reply(1, answer))


# The end.


def test_a_job_is_over_when_every_worker_has_left(job: Job) -> None:
    sessions = job.begin()
    for name in ("w1", "w1", "s1", "stranger1"):
        job.say(f"heartbeats of {name}", m.Leave("", True), 1.0, sessions.get(name, 0))
    assert not job.scheduler.is_over(2.0)
    job.say("heartbeats of w2", m.Leave("", True), 2.0, sessions["w2"])
    assert job.scheduler.is_over(2.0)
    assert job.scheduler.failure is None


def test_a_job_is_over_when_the_last_worker_has_been_silent_too_long(job: Job) -> None:
    sessions = job.begin()
    job.say("w1", m.Leave("", True), 1.0)
    assert waits_for(job.say("heartbeats of w2", m.Heartbeat(), 5.0, sessions["w2"])) == ""
    assert not job.scheduler.is_over(5.0 + DEAD_AFTER)
    assert job.scheduler.is_over(5.1 + DEAD_AFTER)


def test_silence_while_the_scheduler_stood_still_does_not_count(job: Job) -> None:
    job.begin()
    job.scheduler.reset_liveness(100.0)
    assert not job.scheduler.is_over(101.0)


def test_the_scheduler_does_not_wait_for_processes_that_are_gone_when_it_ends(job: Job) -> None:
    for name in EVERYBODY:
        job.join(name)
    job.scheduler.tick(0.0)
    assert not job.scheduler.is_idle()
    job.scheduler.tick(2.1)
    assert job.scheduler.is_idle()
