"""Optimizer state as bytes and back, of slices with whole keys among them; bytes that are neither are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.errors import ProtocolError
from kvstore_server.optimizer import State, States
from kvstore_server.optimizer.state import pack_states, unpack_states
from kvstore_server.plan import TensorSpec, make_plan
from tests.support.optimizer_slices import state_of

SHAPES = {"a": (3,), "b": (7, 13), "never": (20,)}
[SLICE] = make_plan([TensorSpec(name, shape, "float16") for name, shape in SHAPES.items()], 1).slices
PARTS = [slice(s.start, s.start + s.numel) for s in SLICE.segments]


def states() -> States:
    """One segment as an elementwise optimizer keeps it, one as an optimizer of whole keys, and one without any."""
    found = States.of_slice(SLICE)
    own: dict[str, Any] = {"m": torch.arange(3.0), "schedule": 0.5}
    found.keep(0, 1, PARTS[0], State(own, 4, torch.ones(3)))
    values: dict[str, Any] = {
        "exp_avg": torch.randn(7, 13, generator=torch.Generator().manual_seed(1)),
        "history": torch.arange(7.0).view(7, 1),
        "rows": torch.arange(3),
        "none": torch.zeros(0, 4),
        "count": torch.tensor(3.0, dtype=torch.float64),
    }
    found.keep_key(1, 2, PARTS[1], State(values, 5, torch.full((7, 13), 0.1)))
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def test_every_entry_comes_back_in_its_shape_and_dtype() -> None:
    kept, got = states(), unpack_states(SLICE, *pack_states(states()))
    assert got.steps.tolist() == [4, 5, 0]
    for at in range(3):
        before, after = state_of(kept, at), state_of(got, at)
        assert before.keys() == after.keys()
        assert all(same(before[name], after[name]) for name in before)


def test_what_comes_back_shares_no_memory_with_the_message() -> None:
    summary, data = pack_states(states())
    first, second = (unpack_states(SLICE, summary, data) for _ in range(2))
    average = first.entries[1]["exp_avg"]
    assert isinstance(average, Tensor)
    average.fill_(9)
    assert not same(second.entries[1]["exp_avg"], average)


def test_the_state_of_another_slice_is_refused() -> None:
    longer = [TensorSpec(name, shape, "float16") for name, shape in {**SHAPES, "never": (90,)}.items()]
    [other] = make_plan(longer, 1).slices
    [single] = make_plan([TensorSpec("a", (30,), "float16")], 1).slices
    with pytest.raises(ProtocolError, match=rf"'m' has the shape .*{SLICE.length}.* slice {other.length}"):
        unpack_states(other, *pack_states(states()))
    with pytest.raises(ProtocolError, match="it has 3 segments, the slice has 1"):
        unpack_states(single, *pack_states(states()))


@pytest.mark.parametrize(
    ("entry", "value", "reason"),
    [
        ("tensors", [["m", "float32", [7, 1000], 1]], "needs 28000 bytes"),
        ("tensors", [["m", "complex64", [1], 1]], "'m' is complex64"),
        ("tensors", [["m", "float32", [-1], 1]], r"'m' is float32\[-1\]"),
        ("tensors", [], "bytes, its tensors need 0"),
        ("tensors", [["m", "float32", [1], 7]], "'m' has the shape"),
        ("tensors", 3, "not iterable"),
        ("entries", [{"a": ["text", ""]}, {}, {}], "is no number"),
        ("entries", [{"a": [1.0, "complex64"]}, {}, {}], "is no number"),
        ("entries", [{"lost": None}, {}, {}], "'lost'"),
        ("entries", [{"master": [1.0, ""]}, {}, {}], "master"),
        ("steps", ["many", 0, 0], "invalid literal"),
    ],
)
def test_a_summary_that_does_not_describe_the_bytes_is_refused(entry: str, value: Any, reason: str) -> None:
    summary, data = pack_states(states())
    with pytest.raises(ProtocolError, match=f"slice 0: .*{reason}"):
        unpack_states(SLICE, {**summary, entry: value}, data)


@pytest.mark.parametrize("cut", [1, 100])
def test_bytes_that_end_too_early_are_refused(cut: int) -> None:
    summary, data = pack_states(states())
    with pytest.raises(ProtocolError, match="are left"):
        unpack_states(SLICE, summary, data[:-cut])
