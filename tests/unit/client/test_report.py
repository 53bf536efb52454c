"""What a worker tells servers about itself."""

from __future__ import annotations

import math

from kvstore_server.engine.facts import read_report
from kvtrainer.client.session import Report


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_and_their_time_are_told_with_the_time_so_far() -> None:
    clock = Clock()
    report = Report(clock)
    report.steps, report.step_seconds = 2, 0.75
    clock.now += 3.0
    assert read_report(report.pack()) == {
        "seconds": 3.0,
        "steps": 2,
        "step_seconds": 0.75,
        "wait_seconds": 0.0,
    }


def test_samples_and_a_loss_go_along_where_they_are_told() -> None:
    report = Report(Clock())
    report.samples, report.loss = 64, 0.125
    told = read_report(report.pack())
    assert (told["samples"], told["loss"]) == (64, 0.125)


def test_a_loss_that_is_no_number_is_left_out() -> None:
    report = Report(Clock())
    report.loss = math.inf
    assert "loss" not in read_report(report.pack())
