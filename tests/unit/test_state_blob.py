"""Optimizer state as bytes and back, of slices and of whole keys; bytes that are neither are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.errors import ProtocolError
from kvstore_server.optimizer import KeyState, SliceState
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.state_blob import pack_key_state, pack_state, unpack_key_state, unpack_state

SPEC = TensorSpec("w", (7, 13), "float16")
[PIECE] = make_plan([TensorSpec("a", (3,), "float32"), TensorSpec("b", (20,), "float32")], 1).slices


def key_state() -> KeyState:
    values: dict[str, Any] = {
        "exp_avg": torch.randn(7, 13, generator=torch.Generator().manual_seed(1)),
        "history": torch.arange(7.0).view(7, 1),
        "rows": torch.arange(3),
        "schedule": 0.25,
        "count": torch.tensor(3.0, dtype=torch.float64),
    }
    return KeyState(values, 5, torch.full((7, 13), 0.1))


def slice_state() -> SliceState:
    tensors = {"m": torch.arange(float(PIECE.length))}
    return SliceState(tensors, [{"schedule": 0.5}, {}], [4, 2], torch.ones(PIECE.length))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def test_a_whole_key_comes_back_with_every_entry_in_its_shape_and_dtype() -> None:
    state = key_state()
    got = unpack_key_state(SPEC, *pack_key_state(state))
    assert (got.step, got.values.keys()) == (5, state.values.keys())
    assert all(same(got.values[name], value) for name, value in state.values.items())
    assert same(got.master, state.master)


def test_a_key_that_was_never_updated_comes_back_so() -> None:
    got = unpack_key_state(SPEC, *pack_key_state(KeyState()))
    assert (got.values, got.step, got.master) == ({}, 0, None)


def test_a_key_without_elements_has_a_state() -> None:
    got = unpack_key_state(
        TensorSpec("e", (0, 4), "float32"), *pack_key_state(KeyState({"m": torch.zeros(0, 4)}, 2))
    )
    assert same(got.values["m"], torch.zeros(0, 4))


def test_a_slice_comes_back_with_the_steps_of_each_segment() -> None:
    state = slice_state()
    got = unpack_state(PIECE, *pack_state(state))
    assert (got.steps, got.scalars) == ([4, 2], [{"schedule": 0.5}, {}])
    assert same(got.tensors["m"], state.tensors["m"])
    assert same(got.master, state.master)


def test_what_comes_back_shares_no_memory_with_the_message() -> None:
    summary, data = pack_key_state(key_state())
    first, second = (unpack_key_state(SPEC, summary, data) for _ in range(2))
    average = first.values["exp_avg"]
    assert isinstance(average, Tensor)
    average.fill_(9)
    assert not same(second.values["exp_avg"], average)


def test_the_master_of_another_key_is_refused_with_both_shapes() -> None:
    with pytest.raises(
        ProtocolError, match=r"state of key 'v': its master has the shape \[7, 13\], the key has \[91\]"
    ):
        unpack_key_state(TensorSpec("v", (91,), "float16"), *pack_key_state(key_state()))


def test_the_state_of_another_slice_is_refused() -> None:
    [other] = make_plan([TensorSpec("a", (3,), "float32"), TensorSpec("b", (40,), "float32")], 1).slices
    [single] = make_plan([TensorSpec("a", (30,), "float32")], 1).slices
    with pytest.raises(
        ProtocolError, match=rf"'m' has the shape \[{PIECE.length}\], the slice {other.length}"
    ):
        unpack_state(other, *pack_state(slice_state()))
    with pytest.raises(ProtocolError, match="it has 2 segments, the slice has 1"):
        unpack_state(single, *pack_state(slice_state()))


@pytest.mark.parametrize(
    ("entry", "value", "reason"),
    [
        ("tensors", [["m", "float32", [7, 1000]]], "needs 28000 bytes"),
        ("tensors", [["m", "complex64", [1]]], "'m' is complex64"),
        ("tensors", [["m", "float32", [-1]]], r"'m' is float32\[-1\]"),
        ("tensors", [], "bytes, its tensors need 0"),
        ("tensors", 3, "not iterable"),
        ("scalars", {"a": ["text", ""]}, "is no number"),
        ("scalars", {"a": [1.0, "complex64"]}, "is no number"),
        ("step", "many", "invalid literal"),
    ],
)
def test_a_summary_that_does_not_describe_the_bytes_is_refused(entry: str, value: Any, reason: str) -> None:
    summary, data = pack_key_state(key_state())
    with pytest.raises(ProtocolError, match=f"this is no optimizer state of key 'w': .*{reason}"):
        unpack_key_state(SPEC, {**summary, entry: value}, data)


@pytest.mark.parametrize("entry", ["tensors", "scalars", "step"])
def test_a_summary_without_an_entry_is_refused(entry: str) -> None:
    summary, data = pack_key_state(key_state())
    del summary[entry]
    with pytest.raises(ProtocolError, match=entry):
        unpack_key_state(SPEC, summary, data)


@pytest.mark.parametrize("cut", [1, 100])
def test_bytes_that_end_too_early_are_refused(cut: int) -> None:
    summary, data = pack_key_state(key_state())
    with pytest.raises(ProtocolError, match="are left"):
        unpack_key_state(SPEC, summary, data[:-cut])
