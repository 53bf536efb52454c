"""Which backward passes end in an update, what losses are divided by, and what a Trainer makes of that."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.stages import Accumulation


def windows(counts: int, total: int | None, passes: int) -> list[tuple[int, bool]]:
    """(divisor, whether an update follows) of every pass."""
    accumulation = Accumulation(counts)
    accumulation.set_progress(0, total)
    rows = []
    for _ in range(passes):
        divisor = accumulation.divisor
        accumulation.count()
        rows.append((divisor, accumulation.is_boundary))
    return rows


@pytest.mark.parametrize(
    ("counts", "total", "expected"),
    [
        (3, None, [(3, False), (3, False), (3, True)] * 2 + [(3, False)]),
        (3, 10, [(3, False), (3, False), (3, True)] * 3 + [(1, True)]),
        (4, 6, [(4, False)] * 3 + [(4, True), (2, False), (2, True)]),
        (5, 2, [(2, False), (2, True)]),
        (1, 3, [(1, True)] * 3),
    ],
)
def test_windows_are_full_but_for_the_last_one_which_counts_in_full(
    counts: int, total: int | None, expected: list[tuple[int, bool]]
) -> None:
    assert windows(counts, total, len(expected)) == expected


def test_going_on_within_a_window_is_said(caplog: pytest.LogCaptureFixture) -> None:
    accumulation = Accumulation(4)
    with caplog.at_level(logging.WARNING):
        accumulation.set_progress(8, 20)
        assert not caplog.records
        accumulation.set_progress(6, 20)
    assert "within a window of 4: the gradients of the first 2 are not there" in caplog.text


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "2", None])
def test_counts_must_be_a_positive_int(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="accumulate must be an integer of at least 1"):
        Accumulation(given)


@pytest.mark.parametrize(("done", "total"), [(-1, None), (5, 4), (0, 0), (0.5, 4), (2, 4.5), (None, 4)])
def test_impossible_progress_is_refused(done: Any, total: Any) -> None:
    with pytest.raises(ConfigurationError):
        Accumulation(2).set_progress(done, total)


def trainer_of(p: Parameter, counts: int, in_store: bool | None = None, **options: Any) -> Trainer:
    store = "local" if in_store is not None else None
    return Trainer({"p": p}, "torch:SGD", {"lr": 1.0}, store, None, in_store, accumulate=counts, **options)


@pytest.mark.parametrize("in_store", [None, False, True])
def test_ten_passes_in_windows_of_three_make_four_updates(in_store: bool | None) -> None:
    p = Parameter(torch.zeros(()))
    trainer = trainer_of(p, 3, in_store)
    trainer.set_progress(0, 10)
    seen, updated = [], []
    for _ in range(10):
        updated.append(trainer.update_params(p * 1.0).updated)
        seen.append(p.item())
    assert seen == pytest.approx([0, 0, -1, -1, -1, -2, -2, -2, -3, -4])
    assert updated == [False, False, True, False, False, True, False, False, True, True]


def test_nothing_reaches_the_store_before_the_window_is_full() -> None:
    p = Parameter(torch.zeros(3))
    trainer = trainer_of(p, 2, in_store=True)
    trainer.update_params(p.sum())
    assert not trainer.server_stats()
    trainer.update_params(p.sum())
    assert trainer.server_stats()[0]["tables"][0]["rounds_applied"] >= 1


def test_plain_backward_is_refused_because_nobody_counts_it() -> None:
    p = Parameter(torch.zeros(()))
    trainer = trainer_of(p, 2)
    (p * 1.0).backward()
    with pytest.raises(ConfigurationError, match=r"accumulate=2 counts .* trainer.backward\(loss\)"):
        trainer.step()
    assert p.item() == 0.0


def test_saved_states_know_how_many_passes_there_were(tmp_path: Any) -> None:
    p, q = Parameter(torch.zeros(())), Parameter(torch.zeros(()))
    first, second = trainer_of(p, 2), trainer_of(q, 2)
    for _ in range(4):
        first.update_params(p * 1.0)
    first.save_states(tmp_path / "states")
    second.set_progress(0, 5)
    second.load_states(tmp_path / "states")
    assert second.update_params(q * 1.0).updated  # the fifth of five ends the last window, of one
    assert q.item() == -1.0


def test_states_from_beyond_the_last_pass_are_refused_before_anything_changes(tmp_path: Any) -> None:
    p, q = Parameter(torch.zeros(())), Parameter(torch.zeros(()))
    first, second = trainer_of(p, 2), trainer_of(q, 2)
    for _ in range(4):
        first.update_params(p * 1.0)
    first.set_learning_rate(0.5)
    first.save_states(tmp_path / "states")
    second.set_progress(0, 3)
    with pytest.raises(StateMismatchError, match="saved after 4 backward passes, this Trainer has 3 in all"):
        second.load_states(tmp_path / "states")
    assert second.learning_rate == 1.0


def test_window_that_never_got_full_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    p = Parameter(torch.zeros(()))
    with caplog.at_level(logging.WARNING), trainer_of(p, 2) as trainer:
        for _ in range(3):
            trainer.update_params(p * 1.0)
    assert "the last 1 backward passes reached no weight: 2 make an update" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), trainer_of(p, 2) as trainer:
        for _ in range(2):
            trainer.update_params(p * 1.0)
    assert not caplog.records


@pytest.mark.parametrize("nothing", [[], {}, {"losses": []}])
def test_backward_pass_of_no_loss_at_all_is_refused_and_not_counted(nothing: Any) -> None:
    p = Parameter(torch.zeros(1))
    trainer = Trainer({"p": p}, "sgd", {"learning_rate": 1.0}, None, accumulate=2)
    with pytest.raises(ConfigurationError, match="there is no loss"):
        trainer.backward(nothing)
    assert not trainer.update_params(p.sum()).updated
    assert trainer.update_params(p.sum()).updated


def test_zeroing_within_a_window_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    p = Parameter(torch.zeros(()))
    trainer = trainer_of(p, 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            trainer.update_params(p * 1.0)
        trainer.zero_grad()  # as everybody does after an update
        assert not caplog.records
        for _ in range(4):
            trainer.zero_grad()
            trainer.update_params(p * 1.0)
    assert caplog.text.count("zero_grad() drops the gradients of 1 backward passes of a window of 2") == 1
