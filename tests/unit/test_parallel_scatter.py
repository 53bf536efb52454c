"""How a batch is split over several devices; here all of them are the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kvtrainer.errors import ConfigurationError
from kvtrainer.parallel.batch import scatter

CPU = torch.device("cpu")


class Sample(NamedTuple):
    x: torch.Tensor
    label: str


@pytest.mark.parametrize(
    ("size", "count", "lengths"),
    [
        (8, 2, [4, 4]),
        (5, 2, [3, 2]),
        (5, 4, [2, 1, 1, 1]),
        (2, 3, [1, 1, None]),
        (1, 4, [1, None, None, None]),
    ],
)
def test_parts_differ_by_one_at_most_and_say_their_shares(
    size: int, count: int, lengths: list[int | None]
) -> None:
    batch = torch.arange(size)
    parts = scatter(batch, [CPU] * count)
    assert [None if part is None else len(part) for part in parts] == lengths
    assert torch.equal(torch.cat([part for part in parts if part is not None]), batch)
    assert parts.shares == [(length or 0) / size for length in lengths]


def test_structure_is_kept_and_only_tensors_with_axes_are_split() -> None:
    batch: Any = {
        "x": [torch.arange(4), (torch.arange(8).view(4, 2),)],
        "sample": Sample(torch.arange(4) * 10, "cat"),
        "array": np.arange(4.0),
        "rate": torch.tensor(0.5),
        "flag": True,
        "nothing": None,
    }
    first, second = scatter(batch, [CPU] * 2)
    assert first["x"][0].tolist() == [0, 1]
    assert second["x"][1][0].tolist() == [[4, 5], [6, 7]]
    assert isinstance(second["x"], list)
    assert isinstance(second["x"][1], tuple)
    assert isinstance(second["sample"], Sample)
    assert (second["sample"].x.tolist(), second["sample"].label) == ([20, 30], "cat")
    assert second["array"].tolist() == [2.0, 3.0]
    assert [(part["rate"].item(), part["flag"], part["nothing"]) for part in (first, second)] == [
        (0.5, True, None)
    ] * 2


def test_batch_is_split_along_the_axis_that_is_asked_for() -> None:
    batch = torch.arange(12).view(3, 4)
    assert [part.tolist() for part in scatter(batch, [CPU] * 2, axis=1)] == [
        batch[:, :2].tolist(),
        batch[:, 2:].tolist(),
    ]
    assert torch.equal(scatter(batch, [CPU] * 2, axis=-1)[1], batch[:, 2:])
    with pytest.raises(ConfigurationError, match=r"the batch\['x'\] has shape \[3\] and no axis 1"):
        scatter({"x": torch.zeros(3)}, [CPU] * 2, axis=1)


def test_gradients_flow_back_through_the_parts() -> None:
    x = torch.ones(5, requires_grad=True)
    first, second = scatter(x, [CPU] * 2)
    (first.sum() + 3 * second.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1, 3, 3]


def test_batch_without_tensors_goes_to_every_device_whole() -> None:
    parts = scatter(["a", "b"], [CPU] * 2)
    assert list(parts) == [["a", "b"]] * 2
    assert parts.shares is None


def test_tensors_of_different_lengths_are_refused_by_name() -> None:
    batch = {"x": torch.zeros(8, 2), "anchors": torch.zeros(100)}
    with pytest.raises(
        ConfigurationError, match=r"\['x'\] has 8, the batch\['anchors'\] has 100; leave what"
    ):
        scatter(batch, [CPU] * 2)


def test_empty_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no entry along axis 0"):
        scatter(torch.zeros(0, 3), [CPU] * 2)
