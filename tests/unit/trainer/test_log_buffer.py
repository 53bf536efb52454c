"""Values of an epoch and their averages; what several devices report, as one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvtrainer.errors import ConfigurationError
from kvtrainer.log_buffer import LogBuffer
from kvtrainer.metrics import mean_metrics, sum_losses, total_loss


def filled(window: int | None = None) -> LogBuffer:
    buffer = LogBuffer(window)
    for value, count in ((1.0, 1), (3.0, 3), (10.0, 4)):
        buffer.update({"loss": value}, count)
    buffer.update({"lr": 0.5})
    return buffer


def test_values_are_averaged_with_the_number_of_samples_as_weight() -> None:
    buffer = filled()
    buffer.average()
    assert buffer.output == {"loss": (1 + 9 + 40) / 8, "lr": 0.5}
    assert buffer.ready


def test_latest_n_values_are_averaged_if_that_is_asked_for() -> None:
    buffer = filled()
    buffer.average(2)
    assert buffer.output["loss"] == (9 + 40) / 7
    buffer.average(100)
    assert buffer.output["loss"] == 50 / 8


def test_values_are_kept_until_they_are_cleared() -> None:
    buffer = filled()
    buffer.average()
    buffer.clear_output()
    assert (buffer.output, buffer.ready) == ({}, False)
    assert list(buffer.val_history["loss"]) == [1, 3, 10]
    assert list(buffer.n_history["loss"]) == [1, 3, 4]
    buffer.clear()
    buffer.average()
    assert buffer.output == {}


def test_window_bounds_what_is_kept() -> None:
    buffer = filled(2)
    buffer.average()
    assert buffer.output["loss"] == (9 + 40) / 7


def test_median_is_that_of_the_latest_values_without_weights() -> None:
    buffer = filled()
    buffer.median()
    assert buffer.output["loss"] == 3
    buffer.median(2)
    assert buffer.output["loss"] == 6.5
    buffer.update({"loss": math.nan})
    buffer.median()
    assert math.isnan(buffer.output["loss"])


def test_tensors_of_one_element_are_values_and_anything_else_is_refused() -> None:
    buffer = LogBuffer()
    buffer.update({"loss": torch.tensor([2.0], requires_grad=True)})
    with pytest.raises(ConfigurationError, match="'bad' must be a number"):
        buffer.update({"loss": 1.0, "bad": torch.ones(2)})
    assert list(buffer.val_history["loss"]) == [2.0]


@pytest.mark.parametrize("count", [-1, True, "2", math.nan])
def test_number_of_samples_must_make_sense(count: object) -> None:
    with pytest.raises(ConfigurationError, match="num_samples"):
        LogBuffer().update({"loss": 1.0}, count)  # type: ignore[arg-type]


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="window"):
        LogBuffer(0)
    with pytest.raises(ConfigurationError, match="n must be"):
        filled().average(-1)


def test_samples_that_weigh_nothing_do_not_count() -> None:
    buffer = LogBuffer()
    buffer.update({"loss": math.inf}, 0)
    buffer.average()
    assert math.isnan(buffer.output["loss"])
    buffer.update({"loss": 2.0}, 3)
    buffer.average()
    assert buffer.output["loss"] == 2.0


def test_losses_of_devices_are_summed_and_metrics_averaged() -> None:
    by_device: list[dict[str, Any]] = [{"a": torch.tensor(0.25), "b": 1.0}, {"a": 0.5, "b": 3.0}]
    assert sum_losses(by_device) == {"a": 0.75, "b": 4.0}
    assert mean_metrics(by_device) == {"a": 0.375, "b": 2.0}


def test_devices_must_report_the_same_names() -> None:
    with pytest.raises(ConfigurationError, match="device 1 reports b, but the first one a"):
        sum_losses([{"a": 1.0}, {"b": 1.0}])
    with pytest.raises(ConfigurationError, match="no devices"):
        mean_metrics([])


def test_total_loss_is_differentiable_and_sums_elements() -> None:
    p = torch.ones(3, requires_grad=True)
    loss = total_loss({"cls": p * 2, "box": p.sum()})
    loss.backward()  # type: ignore[no-untyped-call]
    assert p.grad is not None
    assert (loss.item(), p.grad.tolist()) == (9.0, [3, 3, 3])
    with pytest.raises(ConfigurationError, match="needs tensors"):
        total_loss({"cls": 1.0})
