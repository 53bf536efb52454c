"""When a worker asks for snapshots, and which ones servers keep meanwhile: functions of what they say."""

from __future__ import annotations

import logging
import random

import pytest

from kvstore_server.engine.snapshots import SnapshotPeriod
from kvstore_server.errors import ProtocolError
from kvstore_server.protocol import messages as m
from kvtrainer.client.snapshot_schedule import SnapshotSchedule, read_answer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_period_in_rounds_asks_once_before_each_multiple() -> None:
    schedule = SnapshotSchedule(SnapshotPeriod(4), Clock())
    asked = []
    for number in range(13):
        for _ in range(2):
            if schedule.is_due("job", number):
                schedule.record("job", number, {0: "taken"})
                asked.append(number)
    assert asked == [4, 8, 12]


def test_a_period_in_seconds_asks_before_the_first_round_after_them() -> None:
    clock = Clock()
    schedule = SnapshotSchedule(SnapshotPeriod(0, 30.0), clock)
    asked = []
    for number in range(12):
        clock.now += 8.0
        if schedule.is_due("job", number):
            schedule.record("job", number, {0: "taken"})
            asked.append(number)
    assert asked == [3, 7, 11]  # after 32 s each


def test_another_trainer_of_the_worker_asks_if_the_first_one_came_too_early() -> None:
    schedule = SnapshotSchedule(SnapshotPeriod(4), Clock())
    schedule.record("job/trainer1", 4, {0: "uneven", 1: "taken"})
    assert not schedule.is_due("job/trainer1", 4)
    assert schedule.is_due("job/trainer2", 4)
    schedule.record("job/trainer2", 4, {0: "taken", 1: "taken"})
    assert not schedule.is_due("job/trainer1", 4)


def test_servers_without_tables_of_the_job_do_not_count() -> None:
    schedule = SnapshotSchedule(SnapshotPeriod(4), Clock())
    schedule.record("job", 4, {0: "taken", 1: "none"})
    assert schedule.kept == (4,)


def test_a_server_that_writes_slowly_is_named(caplog: pytest.LogCaptureFixture) -> None:
    schedule = SnapshotSchedule(SnapshotPeriod(4), Clock())
    with caplog.at_level(logging.WARNING):
        schedule.record("job", 8, {0: "taken", 1: "busy"})
    assert [record.args for record in caplog.records] == [(8, "1")]


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_the_newest_snapshot_that_all_have_is_kept_whatever_the_disks_do_and_whichever_worker_asks(
    seed: int, num_workers: int
) -> None:
    draw = random.Random(seed)
    schedules = [SnapshotSchedule(SnapshotPeriod(1), Clock()) for _ in range(num_workers)]
    disks: list[set[int]] = [set(), set(), set()]
    writing: list[int | None] = [None] * 3
    for number in range(1, 200):
        # Disks may end what they write, or fail.
        for at in range(3):
            outcome = draw.choice(["slow", "slow", "whole", "full"]) if writing[at] else "slow"
            if outcome == "whole":
                disks[at].add(writing[at] or 0)
            if outcome != "slow":
                writing[at] = None
        newest = max(set.intersection(*disks), default=0)
        schedule = draw.choice(schedules)
        schedule.set_common(sorted(set.intersection(*disks)))
        kept, answers = schedule.kept, {}
        for at in range(3):
            state = "busy" if writing[at] else "taken"
            answers[at] = state
            if state == "taken":
                disks[at] &= set(kept)
                writing[at] = number
            assert len(disks[at]) + (writing[at] is not None) <= 3
        assert newest <= max(set.intersection(*disks), default=0)
        schedule.record("job", number, answers)


@pytest.mark.parametrize("answer", [m.Status({}), m.Status({"state": 3}), m.Pending((), "")])
def test_an_answer_that_is_none_is_a_protocol_error(answer: m.ReplyBody) -> None:
    with pytest.raises(ProtocolError):
        read_answer(answer)
