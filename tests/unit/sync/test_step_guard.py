"""The guard of a step: whether weights, state and counts may hold a part of it."""

from __future__ import annotations

import logging

import pytest

from kvtrainer.errors import KVStoreError
from kvtrainer.sync.step_guard import StepGuard


def in_a_round(is_sent: bool = True) -> StepGuard:
    guard = StepGuard()
    guard.begin()
    if is_sent:
        guard.sent()
    return guard


def test_a_step_that_has_ended_is_complete() -> None:
    guard = in_a_round()
    assert guard.is_incomplete
    guard.end()
    guard.check(has_store=True, consequence="")


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_aborted_round_matters_if_it_was_sent_and_this_worker_would_miss_it(is_sent: bool) -> None:
    for is_missed in (False, True):
        guard = in_a_round(is_sent)
        guard.abort(is_missed)
        assert guard.is_incomplete == (is_sent and is_missed)


def test_an_aborted_round_that_no_worker_applies_leaves_nothing() -> None:
    guard = in_a_round()
    guard.sent(may_be_applied=False)
    guard.abort(is_missed=True)
    assert not guard.is_incomplete


def test_a_step_begins_without_the_round_of_the_last_one() -> None:
    guard = in_a_round()
    guard.begin()
    guard.abort(is_missed=True)
    assert not guard.is_incomplete


@pytest.mark.parametrize(("error", "is_incomplete"), [(ValueError, False), (KeyboardInterrupt, True)])
def test_an_error_ends_a_step_and_an_interrupt_does_not(
    error: type[BaseException], is_incomplete: bool
) -> None:
    guard = in_a_round()
    with pytest.raises(error), guard.ended_by_errors():
        raise error
    assert guard.is_incomplete == is_incomplete


def test_with_a_store_an_incomplete_step_is_refused_as_often_as_it_is_checked() -> None:
    guard = in_a_round()
    for _ in range(2):
        with pytest.raises(KVStoreError):
            guard.check(has_store=True, consequence="")


def test_without_a_store_an_incomplete_step_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = in_a_round()
    for _ in range(2):
        guard.check(has_store=False, consequence="training goes on")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "training goes on" in caplog.text
