"""Waits that take long are said in the log, by whom and for whom, and ever more rarely."""

from __future__ import annotations

import logging
import re

import pytest

from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.log_limit import SlowReports
from kvstore_server.protocol import messages as m
from kvtrainer.errors import DeadlineError, ServerUnreachableError
from tests.support.engines import EngineJob
from tests.support.scripted import Scripted


def test_lines_about_one_wait_come_after_ten_seconds_and_then_ever_more_rarely() -> None:
    reports = SlowReports(10.0)
    due = [now for now in range(1, 2001) if reports.is_due(now, now)]
    assert due == [10, 20, 40, 80, 160, 320, 640, 1240, 1840]


def test_a_job_whose_every_round_is_slow_does_not_fill_its_log() -> None:
    reports = SlowReports(10.0)
    due = [now for now in range(1, 10_001) if reports.is_due(now % 15, now)]
    assert len(due) < 25


def test_a_wait_long_after_the_last_slow_one_is_reported_as_soon_as_the_first() -> None:
    reports = SlowReports(10.0)
    assert all(reports.is_due(10.0, now) for now in (10.0, 20.0, 40.0))
    assert [reports.is_due(10.0, now) for now in (1000.0, 1009.0, 1010.0)] == [True, False, True]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_server_names_the_round_and_the_ranks_that_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    job = EngineJob(3, SYNCHRONOUS)
    job.tick(1.0)
    job.commit(0, 1, 1.0)
    job.tick(9.0, alive=[1, 2])
    assert lines(caplog) == []
    job.tick(1.5, alive=[1])
    [line] = lines(caplog)
    assert re.findall(r"round 1 of 't'|rank \d \(h\d\)|[\d.]+ s", line) == [
        "round 1 of 't'", "10 s", "rank 1 (h1)", "0.0 s", "rank 2 (h2)", "1.5 s",
    ]  # fmt: skip


def test_a_server_says_of_many_waits_how_many_there_are(caplog: pytest.LogCaptureFixture) -> None:
    job = EngineJob(2, Mode("ssp", 0))
    job.commit(0, 1, 1.0)
    for number in (51, 52, 53):
        job.ask(0, m.Pull((0,), 600.0), number)
    job.tick(11.0, alive=[0, 1])
    [line] = lines(caplog)
    assert "2 more" in line
    assert "rank 1 (h1)" in line


def test_of_many_open_rounds_the_one_is_named_that_waits_longest(caplog: pytest.LogCaptureFixture) -> None:
    job = EngineJob(2, SYNCHRONOUS)
    for rank in (0, 1):
        job.ask(rank, m.Register("u", (("k", (1,), "float32", 0, False),), False))
    commits = m.matrix([(1, 0, 0, 0, -1, 0)], m.COMMIT_WORDS)
    job.ask(0, m.Contribute(m.matrix((), m.PUSH_WORDS), (), commits))
    job.tick(5.0, alive=[0, 1])
    job.commit(0, 1, 1.0)
    job.tick(6.0, alive=[0, 1])
    [line] = lines(caplog)
    assert re.findall(r"round \d of '\w'|\d+ more|[\d.]+ s:", line) == ["round 0 of 'u'", "1 more", "11 s:"]


def test_a_server_names_who_is_missing_at_a_barrier(caplog: pytest.LogCaptureFixture) -> None:
    job = EngineJob(2, SYNCHRONOUS)
    job.ask(0, m.Gather(0, 600.0))
    job.tick(11.0, alive=[0, 1])
    [line] = lines(caplog)
    assert "barrier 0" in line
    assert "rank 1 (h1)" in line


def test_a_barrier_that_is_asked_for_again_has_no_more_time_than_it_had() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    job.ask(0, m.Gather(0, 5.0), 51)
    job.tick(4.0, alive=[0, 1])
    [pending] = job.ask(0, m.Gather(0, 5.0), 51)
    assert isinstance(pending, m.Pending)
    told = job.tick(1.5, alive=[0, 1])
    [failure] = told[0, 51]
    assert isinstance(failure, m.Failed)
    assert failure.code == "DeadlineError"


def test_a_rank_that_asks_again_is_told_for_whom_it_waits() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    job.commit(0, 1, 1.0, number=51)
    job.tick(3.0, alive=[0, 1])
    [pending] = job.commit(0, 1, pushed=True, number=51)
    assert isinstance(pending, m.Pending)
    assert pending.waiting_for == (1,)
    assert "round 1 of 't'" in pending.why
    assert "rank 1 (h1)" in pending.why


def test_a_worker_says_for_whom_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    servers = Scripted(1)
    session = servers.session()
    servers.answer = lambda server, request: [m.Pending((1,), f"barrier 0 waits for rank 1, {servers.now:g}")]
    with pytest.raises(DeadlineError):
        session.call(0, m.Gather(0, 60.0), timeout=45.0)
    said = [re.findall(r"rank 0|rank 1|waited \d+ s", line) for line in lines(caplog)]
    assert said == [["rank 0", f"waited {after} s", "rank 1"] for after in (10, 20, 40)]
    assert "more" not in lines(caplog)[-1]  # only what was said since it last asked


def test_a_worker_names_the_server_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    servers = Scripted(2)
    session = servers.session(dead_after=30.0)
    servers.answer = lambda server, request: [] if server else None
    with pytest.raises(ServerUnreachableError):
        session.call(1, m.Stats())
    assert len(lines(caplog)) == 2
    assert all("server" in line for line in lines(caplog))
