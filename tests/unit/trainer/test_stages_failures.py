"""What the stages of a Trainer remember when a step breaks off or is repeated, and windows of several passes."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvtrainer import DataParallel, RowSparseParameter, Trainer
from kvtrainer.errors import (
    AnomalousParametersError,
    ConfigurationError,
    KVStoreError,
    NonFiniteGradientError,
    StaleGradientError,
    StateMismatchError,
)
from kvtrainer.options.stages import Accumulation
from tests.support.ways_to_train import STORES


def parameter(values: list[float] | None = None) -> Any:
    return Parameter(torch.tensor(values or [0.0, 0.0]))


def trainer_of(params: Any, in_store: bool | None = None, lr: float = 1.0, **options: Any) -> Trainer:
    store = None if in_store is None else "local"
    params = {"p": params} if isinstance(params, Tensor) else params
    return Trainer(params, "torch:SGD", {"lr": lr}, store, None, in_store, **options)


def test_step_with_a_stale_gradient_can_be_repeated_with_the_scale_that_it_had() -> None:
    p, q = parameter(), parameter()
    trainer = trainer_of({"p": p, "q": q}, amp={"init_scale": 8.0, "growth_interval": 2})
    with pytest.raises(StaleGradientError):
        trainer.update_params(p.sum(), 1)
    result = trainer.step(1, ignore_stale_grad=True)
    assert (p.tolist(), q.tolist()) == ([-1.0, -1.0], [0.0, 0.0])
    assert (result.loss_scale, result.updated) == (8.0, True)
    assert trainer.update_params(p.sum()).loss_scale == 8.0
    assert trainer.amp_loss_scale == 16.0


def test_window_stays_full_when_its_step_breaks_off() -> None:
    p, q = parameter(), parameter()
    trainer = trainer_of({"p": p, "q": q}, accumulate=2)
    trainer.update_params(p.sum(), 1)
    with pytest.raises(StaleGradientError):
        trainer.update_params(3.0 * p.sum(), 1)
    trainer.step(1, ignore_stale_grad=True)
    assert p.tolist() == [-2.0, -2.0]
    assert not trainer.update_params(p.sum(), 1).updated


def test_backward_that_breaks_off_leaves_the_window_as_it_was() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyboardInterrupt

    p = parameter()
    trainer = trainer_of(p, accumulate=2, amp=4)
    trainer.update_params(p.sum())
    with pytest.raises(KeyboardInterrupt):
        trainer.backward(Breaks.apply(p).sum())  # type: ignore[no-untyped-call]
    assert trainer.update_params(p.sum()).updated
    assert p.tolist() == [-1.0, -1.0]


def test_losses_of_replicas_can_be_used_after_an_anomaly_was_found() -> None:
    model = DataParallel(nn.Linear(1, 1), ["cpu", "cpu"])
    trainer = Trainer(model, "sgd", {"learning_rate": 1.0}, "local", detect_anomalous_params="raise")
    losses = model.forward_losses(torch.ones(2, 1), lambda replica, part: (part @ replica.weight).sum())
    with pytest.raises(AnomalousParametersError, match="bias"):
        trainer.backward(losses)
    losses.backward()


@pytest.mark.parametrize("in_store", STORES)
def test_interrupted_update_leaves_the_stages(in_store: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    p = parameter()
    steps = [lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
    trainer = trainer_of(p, in_store, amp={"init_scale": 8.0, "growth_interval": 2}, schedules=steps)
    trainer.update_params(p.sum())

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer._pipeline, "_reduce" if in_store else "update_here", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.update_params(p.sum())
    monkeypatch.undo()
    assert (trainer.amp_loss_scale, trainer.learning_rate) == (8.0, 0.5)
    result = trainer.step()
    assert (result.loss_scale, result.lr) == (8.0, 0.5)
    assert p.tolist() == [-1.5, -1.5]
    assert (trainer.amp_loss_scale, trainer.learning_rate) == (16.0, 0.25)


@pytest.mark.parametrize("in_store", STORES)
def test_bad_loss_is_forgotten_with_the_gradients_that_came_of_it(in_store: bool | None) -> None:
    p = parameter()
    trainer = trainer_of(p, in_store, on_nonfinite="skip")
    trainer.backward(p.sum() * math.nan)
    trainer.zero_grad()
    assert trainer.update_params(p.sum()).updated
    assert p.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("in_store", STORES)
def test_window_with_one_bad_loss_is_skipped_as_a_whole(in_store: bool | None) -> None:
    p = parameter()
    trainer = trainer_of(p, in_store, accumulate=2, on_nonfinite="skip")
    trainer.update_params(torch.where(p > 1, p, torch.zeros(2)).sum() + math.inf)
    assert trainer.update_params(p.sum()).skipped
    assert p.tolist() == [0.0, 0.0]
    trainer.update_params(p.sum())
    assert trainer.update_params(p.sum()).updated


@pytest.mark.parametrize("in_store", STORES)
def test_parameters_without_elements_take_part(in_store: bool | None) -> None:
    p, empty = parameter(), Parameter(torch.zeros(0, 3))
    for options in ({"clip_grad": {"max_norm": 1.0}}, {"clip_grad": {"max_norm": 1.0, "norm_type": "inf"}}):
        for given in ({"p": p, "empty": empty}, {"empty": empty}):
            trainer = trainer_of(given, in_store, amp=4, **options)
            loss = sum((3.0 * one.sum() for one in given.values()), torch.zeros(()))
            assert trainer.update_params(loss, 1).updated


@pytest.mark.parametrize("in_store", STORES)
def test_frozen_parameters_do_not_count_for_the_norm(in_store: bool | None) -> None:
    p, frozen = parameter(), parameter([1.0, 1.0])
    frozen.requires_grad_(False)
    trainer = trainer_of({"p": p, "frozen": frozen}, in_store, clip_grad={"max_norm": 1.0})
    frozen.grad = torch.full((2,), 100.0)
    assert trainer.update_params(p @ torch.tensor([3.0, 4.0]), 1).grad_norm == pytest.approx(5.0)
    assert frozen.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("in_store", STORES)
def test_gradients_that_are_left_out_do_not_count_for_the_norm_or_as_infinite(in_store: bool | None) -> None:
    """Used up ones stay readable; here with an infinity in them."""
    p, q = parameter(), parameter()
    trainer = trainer_of({"p": p, "q": q}, in_store, clip_grad={"max_norm": 1.0})
    assert trainer.update_params((p + q * math.inf).sum()).skipped
    result = trainer.update_params(p @ torch.tensor([3.0, 4.0]))
    assert result.updated
    assert result.grad_norm == pytest.approx(5.0)


@pytest.mark.parametrize("in_store", STORES)
def test_sparse_rows_of_half_precision_are_limited(in_store: bool | None) -> None:
    table = nn.Embedding(9, 2, sparse=True, dtype=torch.float16)
    nn.init.zeros_(table.weight)
    trainer = trainer_of(dict(table.named_parameters()), in_store, amp=128, clip_grad={"max_norm": 1.0})
    slopes = torch.tensor([[3.0, 4.0]], dtype=torch.float16)
    result = trainer.update_params((table(torch.tensor([4])) * slopes).sum())
    assert result.grad_norm == pytest.approx(5.0)
    assert table.weight[4].tolist() == pytest.approx([-0.6, -0.8], rel=1e-3)
    assert table.weight[[0, 8]].tolist() == [[0.0, 0.0]] * 2


def test_rows_of_a_table_in_the_store_count_for_the_norm() -> None:
    w, p = RowSparseParameter((9, 1)), parameter()
    trainer = trainer_of({"w": w, "p": p}, True, clip_grad={"max_norm": 1.0})
    rows = w.row_sparse_data(torch.tensor([4]))
    result = trainer.update_params(3.0 * rows.sum() + p @ torch.tensor([0.0, 4.0]))
    assert result.grad_norm == pytest.approx(5.0)
    assert p.tolist() == pytest.approx([0.0, -0.8], rel=1e-6)
    assert w.row_sparse_data(torch.tensor([3, 4])).flatten().tolist() == pytest.approx([0.0, -0.6])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_closed_trainer_refuses_to_step(accumulate: int) -> None:
    p = parameter()
    trainer = trainer_of(p, accumulate=accumulate)
    trainer.close()
    with pytest.raises(KVStoreError, match="closed"):
        trainer.update_params(p.sum())


def test_options_that_are_taken_back_have_no_effect_any_more() -> None:
    p = parameter()
    trainer = trainer_of(p, amp=8, detect_anomalous_params="raise", accumulate=2)
    trainer.configure(amp=None, detect_anomalous_params=False, accumulate=1)
    p.sum().backward()
    assert trainer.step(1).loss_scale == 1.0
    assert p.tolist() == [-1.0, -1.0]


def test_other_options_leave_a_scale_alone_that_was_loaded(tmp_path: Path) -> None:
    p, q = parameter(), parameter()
    first, second = (trainer_of(one, amp={"init_scale": 4.0, "growth_interval": 1}) for one in (p, q))
    first.update_params(p.sum())
    first.save_states(tmp_path / "states")
    second.load_states(tmp_path / "states")
    second.configure(clip_grad={"max_norm": 100.0})
    assert second.update_params(q.sum()).loss_scale == 8.0


def test_states_from_before_the_first_pass_restart_the_windows(tmp_path: Path) -> None:
    p, q = parameter(), parameter()
    first, second = (trainer_of(one, accumulate=2) for one in (p, q))
    first.save_states(tmp_path / "states")
    second.update_params(q.sum())
    second.load_states(tmp_path / "states")
    second.zero_grad()
    assert [second.update_params(q.sum()).updated for _ in range(2)] == [False, True]


def test_progress_in_the_middle_of_a_window_begins_another() -> None:
    p = parameter()
    trainer = trainer_of(p, accumulate=2)
    trainer.update_params(p.sum())
    trainer.set_progress(4)
    with pytest.raises(ConfigurationError, match="there was none since the last step"):
        trainer.step()


@pytest.mark.parametrize("in_store", STORES)
def test_weights_that_are_set_within_a_window_keep_its_gradients(in_store: bool | None) -> None:
    p = parameter()
    trainer = trainer_of(p, in_store, accumulate=2, amp=4)
    for _ in range(2):
        trainer.update_params(p.sum())
    trainer.update_params(p.sum())
    trainer.set_data({"p": torch.tensor([5.0, 5.0])})
    assert trainer.update_params(p.sum()).updated
    assert p.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("in_store", STORES)
def test_closure_runs_once_and_its_scaled_loss_is_unscaled(in_store: bool | None) -> None:
    p = parameter()
    calls = []
    trainer = trainer_of(p, in_store, amp=64, clip_grad={"max_norm": 1.0}, accumulate=2)

    def closure() -> str:
        calls.append(1)
        trainer.backward(p @ torch.tensor([3.0, 4.0]))
        return f"call {len(calls)}"

    assert [trainer.step(closure), trainer.step(closure=closure)] == ["call 1", "call 2"]
    assert trainer.last is not None
    assert trainer.last.grad_norm == pytest.approx(5.0)
    assert p.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)


@pytest.mark.parametrize("in_store", STORES)
def test_error_of_a_step_that_was_skipped_leaves_a_trainer_that_goes_on(in_store: bool | None) -> None:
    p = parameter()
    steps = [lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
    trainer = trainer_of(p, in_store, amp=4, on_nonfinite="raise", accumulate=2, schedules=steps)
    trainer.update_params(p.sum() * math.nan)
    with pytest.raises(NonFiniteGradientError):
        trainer.update_params(p.sum())
    assert trainer.last is not None
    assert trainer.last.skipped
    assert not trainer.update_params(p.sum()).updated
    result = trainer.update_params(p.sum())
    assert (result.updated, result.lr, p.tolist()) == (True, 1.0, [-1.0, -1.0])


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
    assert "within a window of 4" in caplog.text


@pytest.mark.parametrize(("done", "total"), [(-1, None), (5, 4), (0, 0), (0.5, 4), (2, 4.5), (None, 4)])
def test_impossible_progress_is_refused(done: Any, total: Any) -> None:
    with pytest.raises(ConfigurationError):
        Accumulation(2).set_progress(done, total)


def test_nothing_reaches_the_store_before_the_window_is_full() -> None:
    p = Parameter(torch.zeros(3))
    trainer = trainer_of(p, True, accumulate=2)
    trainer.update_params(p.sum())
    assert not trainer.server_stats()
    trainer.update_params(p.sum())
    assert trainer.server_stats()[0]["tables"][0]["rounds_applied"] >= 1


def test_plain_backward_is_refused_because_it_is_not_counted() -> None:
    p = Parameter(torch.zeros(()))
    trainer = trainer_of(p, accumulate=2)
    (p * 1.0).backward()
    with pytest.raises(ConfigurationError, match=r"accumulate=2 counts .* trainer.backward\(loss\)"):
        trainer.step()
    assert p.item() == 0.0


def test_saved_states_know_how_many_passes_there_were(tmp_path: Any) -> None:
    p, q = Parameter(torch.zeros(())), Parameter(torch.zeros(()))
    first, second = trainer_of(p, accumulate=2), trainer_of(q, accumulate=2)
    for _ in range(4):
        first.update_params(p * 1.0)
    first.save_states(tmp_path / "states")
    second.set_progress(0, 5)
    second.load_states(tmp_path / "states")
    assert second.update_params(q * 1.0).updated  # the fifth of five ends the last window, of one
    assert q.item() == -1.0


def test_states_from_beyond_the_last_pass_are_refused_before_anything_changes(tmp_path: Any) -> None:
    p, q = Parameter(torch.zeros(())), Parameter(torch.zeros(()))
    first, second = trainer_of(p, accumulate=2), trainer_of(q, accumulate=2)
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
    with caplog.at_level(logging.WARNING), trainer_of(p, accumulate=2) as trainer:
        for _ in range(3):
            trainer.update_params(p * 1.0)
    assert "the last 1 backward passes" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), trainer_of(p, accumulate=2) as trainer:
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
    trainer = trainer_of(p, accumulate=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            trainer.update_params(p * 1.0)
        trainer.zero_grad()  # as everybody does after an update
        assert not caplog.records
        for _ in range(4):
            trainer.zero_grad()
            trainer.update_params(p * 1.0)
    assert caplog.text.count("zero_grad() drops the gradients of 1 backward passes of a window of 2") == 1


@pytest.mark.parametrize("in_store", [None, False, True])
def test_a_loop_may_catch_a_schedules_error(in_store: bool | None, caplog: pytest.LogCaptureFixture) -> None:
    def rate(step: int) -> float:
        if step == 2:
            raise LookupError
        return 1.0

    p = parameter()
    trainer = trainer_of(p, in_store, schedules=[lambda one: torch.optim.lr_scheduler.LambdaLR(one, rate)])
    trainer.update_params(p.sum(), 1)
    with pytest.raises(LookupError):
        trainer.update_params(p.sum(), 1)
    assert p.tolist() == [-2.0, -2.0]
    trainer.update_params(p.sum(), 1)
    assert p.tolist() == [-3.0, -3.0]
    assert caplog.records == []
