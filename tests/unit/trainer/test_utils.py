"""Splitting a batch over devices, clipping by the global norm, averages for logs, and losses of devices."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtrainer.errors import ConfigurationError, NonFiniteNormWarning
from kvtrainer.log_buffer import LogBuffer
from kvtrainer.metrics import mean_metrics, sum_losses, total_loss
from kvtrainer.utils import clip_global_norm, split_and_load, split_data


def lengths(parts: list[Tensor], axis: int = 0) -> list[int]:
    return [part.shape[axis] for part in parts]


@pytest.mark.parametrize(
    ("size", "slices", "expected"), [(6, 3, [2, 2, 2]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (3, 3, [1, 1, 1])]
)
def test_the_first_slices_of_an_uneven_split_are_longer(size: int, slices: int, expected: list[int]) -> None:
    data = torch.arange(2 * size).reshape(size, 2)
    parts = split_data(data, slices, even_split=False)
    assert lengths(parts) == expected
    assert torch.equal(torch.cat(parts), data)


@pytest.mark.parametrize("axis", [1, -1])
def test_any_axis_can_be_split(axis: int) -> None:
    data = torch.arange(12).reshape(2, 6)
    parts = split_data(data, 3, batch_axis=axis)
    assert lengths(parts, 1) == [2, 2, 2]
    assert torch.equal(torch.cat(parts, 1), data)


def test_slices_are_views_of_the_batch() -> None:
    data = torch.zeros(4)
    split_data(data, 2)[1].fill_(1.0)
    assert data.tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((5, 2), dict(num_slice=2), r"shape \(5, 2\) cannot be evenly split into 2 slices along axis 0.*even_split"),
        ((2, 3), dict(num_slice=3), r"shape \(2, 3\) cannot be evenly split into 3 slices"),
        ((2, 3), dict(num_slice=3, even_split=False), r"shape \(2, 3\) has too few entries along axis 0 for 3 slices"),
        ((0, 3), dict(num_slice=2), r"shape \(0, 3\) has too few entries"),
        ((2, 3), dict(num_slice=2, batch_axis=2), r"shape \(2, 3\) has no batch_axis 2"),
        ((), dict(num_slice=1), r"shape \(\) has no batch_axis 0"),
        ((2, 3), dict(num_slice=0), "num_slice must be an integer of at least 1, got 0"),
        ((2, 3), dict(num_slice=1.0), r"num_slice must be an integer of at least 1, got 1\.0"),
    ],
)  # fmt: skip
def test_a_split_that_is_impossible_is_a_value_error(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        split_data(torch.zeros(shape), **options)
    assert isinstance(caught.value, ValueError)


def test_each_device_gets_its_slice() -> None:
    parts = split_and_load(torch.arange(4.0), ["cpu", torch.device("meta")])
    assert [part.device.type for part in parts] == ["cpu", "meta"]
    assert parts[0].tolist() == [0.0, 1.0]


def test_one_device_gets_the_batch_unsplit() -> None:
    (part,) = split_and_load(torch.tensor(3.0), ctx_list=["cpu"])
    assert part.item() == 3.0


@pytest.mark.parametrize("array", [np.arange(6.0)[::-1], np.arange(6, dtype=np.int16)])
def test_a_numpy_array_is_copied_and_keeps_its_dtype(array: np.ndarray) -> None:
    array.flags.writeable = False
    parts = split_and_load(array, ["cpu", "cpu"])
    parts[0].zero_()
    assert parts[1].numpy().tolist() == array[3:].tolist()
    assert parts[1].numpy().dtype == array.dtype
    assert array[:3].any()


@pytest.mark.parametrize("devices", [[], "cpu", torch.device("cpu")])
def test_devices_must_be_a_list(devices: Any) -> None:
    with pytest.raises(ConfigurationError, match="ctx_list must be a list"):
        split_and_load(torch.zeros(2), devices)


def test_a_batch_must_be_a_tensor_or_an_array() -> None:
    with pytest.raises(ConfigurationError, match="tensor or a numpy array, got a list"):
        split_and_load([1.0], ["cpu"])  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [5.1, math.inf])
def test_gradients_within_the_norm_keep_their_bits(max_norm: float) -> None:
    arrays = [torch.full((4, 4), 1.1), torch.full((3,), -0.3, dtype=torch.float16)]
    before = [array.clone() for array in arrays]
    for check in (True, False):
        clip_global_norm(arrays, max_norm, check)
        assert all(map(torch.equal, arrays, before))


@pytest.mark.parametrize("check", [True, False])
def test_random_gradients_follow_the_formula(check: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    arrays = [torch.randn(7, i + 1, generator=generator).to(dtype) for i, dtype in enumerate(dtypes)]
    exact = [array.double().numpy().copy() for array in arrays]
    norm = np.sqrt(sum((e**2).sum() for e in exact))
    assert float(clip_global_norm(arrays, 2.0, check)) == pytest.approx(norm, rel=1e-12)
    for array, e in zip(arrays, exact, strict=True):
        error = np.abs(array.double().numpy() - e * 2.0 / (norm + 1e-8))
        assert (error <= 2 * torch.finfo(array.dtype).eps * np.abs(e)).all()


def test_a_big_gradient_is_summed_exactly_enough() -> None:
    array = torch.full((700_001,), 0.1)
    expected = math.sqrt(700_001) * float(np.float32(0.1))
    assert clip_global_norm([array], math.inf) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(3e38, torch.float32), (6e4, torch.float16), (1e300, torch.float64), (1e-300, torch.float64)],
)
def test_squares_neither_overflow_nor_vanish(value: float, dtype: torch.dtype) -> None:
    arrays = [torch.full((4,), value, dtype=dtype) for _ in range(4)]
    stored = arrays[0][0].item()
    assert clip_global_norm(arrays, math.inf) == pytest.approx(4 * stored, rel=1e-12)


@pytest.mark.parametrize("values", [[math.inf, 1.0], [math.nan, 1.0], [-math.inf, math.inf]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_not_finite_stay_as_they_are_with_a_warning(
    values: list[float], dtype: torch.dtype
) -> None:
    arrays = [torch.tensor(values, dtype=dtype), torch.full((3,), 7.0, dtype=dtype)]
    with pytest.warns(NonFiniteNormWarning, match="were not clipped") as caught:
        norm = clip_global_norm(arrays, 1.0)
    assert not math.isfinite(norm)
    assert arrays[1].tolist() == [7.0, 7.0, 7.0]
    assert str(arrays[0].tolist()) == str(values)
    assert Path(caught[0].filename).name == Path(__file__).name


def test_without_the_check_the_norm_is_a_tensor_and_nothing_is_warned() -> None:
    arrays = [torch.tensor([math.inf, 1.0]), torch.full((3,), 7.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm = clip_global_norm(arrays, 1.0, check_isfinite=False)
    assert isinstance(norm, Tensor)
    assert norm.shape == ()
    assert norm.item() == math.inf
    assert arrays[1].tolist() == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("check", [True, False])
def test_a_sparse_gradient_counts_entries_of_one_row_together(check: bool) -> None:
    rows, values = torch.tensor([[1, 1, 3]]), torch.tensor([[1.0, 2.0], [2.0, 2.0], [0.0, 12.0]])
    sparse = torch.sparse_coo_tensor(rows, values, (5, 2), check_invariants=True)
    dense = torch.zeros(2)
    assert float(clip_global_norm([dense, sparse], 6.5, check)) == 13.0
    assert torch.allclose(sparse.to_dense()[1], torch.tensor([1.5, 2.0]))
    assert torch.allclose(sparse.to_dense()[3], torch.tensor([0.0, 6.0]))


def test_a_missing_gradient_is_left_out() -> None:
    array = torch.tensor([3.0, 4.0])
    assert clip_global_norm([None, array, torch.zeros(0)], 10.0) == 5.0
    assert clip_global_norm([None], 1.0) == 0.0


@pytest.mark.parametrize(
    ("arrays", "max_norm", "message"),
    [
        ([], 1.0, "at least one gradient"),
        ([torch.nn.Parameter(torch.ones(2))], 1.0, "got a Parameter"),
        ([np.ones(2)], 1.0, "needs tensors, got a ndarray"),
        ([torch.ones(2, dtype=torch.int64)], 1.0, "floating-point dtype, got one of torch.int64"),
        ([torch.ones(2)], -1.0, r"max_norm must be a number of at least 0, got -1\.0"),
        ([torch.ones(2)], math.nan, "max_norm must be a number of at least 0, got nan"),
        ([torch.ones(2)], "1", "max_norm must be a number of at least 0, got '1'"),
    ],
)
def test_arguments_that_cannot_be_clipped_are_refused(arrays: Any, max_norm: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        clip_global_norm(arrays, max_norm)


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
    with pytest.raises(ConfigurationError, match="no device"):
        mean_metrics([])


def test_total_loss_is_differentiable_and_sums_elements() -> None:
    p = torch.ones(3, requires_grad=True)
    loss = total_loss({"cls": p * 2, "box": p.sum()})
    loss.backward()  # type: ignore[no-untyped-call]
    assert p.grad is not None
    assert (loss.item(), p.grad.tolist()) == (9.0, [3, 3, 3])
    with pytest.raises(ConfigurationError, match="needs tensors"):
        total_loss({"cls": 1.0})
