"""Keys and values brought into pairs, and the sum of replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstore_server.plan import TensorSpec
from kvtrainer.errors import ConfigurationError, ShapeMismatchError
from kvtrainer.kvstore.replicas import merge
from kvtrainer.kvstore.values import check_key, check_keys, check_out, check_value, pair, spec_of

A, B, C = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("k", A, [("k", [A])]),
        (3, [A, B], [(3, [A, B])]),
        (["k"], [A], [("k", [A])]),
        ((1, 2), (A, [B, C]), [(1, [A]), (2, [B, C])]),
        (["k", "k"], [A, B], [("k", [A]), ("k", [B])]),
        ([], [], []),
    ],
)
def test_one_key_and_lists_of_keys_become_pairs(key: Any, value: Any, expected: list[Any]) -> None:
    pairs = pair(key, value, "value")
    assert [one for one, _ in pairs] == [one for one, _ in expected]
    for (_, got), (_, wanted) in zip(pairs, expected, strict=True):
        assert all(a is b for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (["a", "b"], A, "2 keys need a list of 2 values in out, got Tensor"),
        (["a", "b"], [A], "got 1 values"),
        ("a", [], "must be a tensor or a list of tensors"),
        ("a", [A, 1], "must be a tensor or a list of tensors"),
        ("a", torch.eye(2).to_sparse(), "out of key 'a' is sparse"),
    ],
)
def test_what_makes_no_pairs_is_refused(key: Any, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pair(key, value, "out")


@pytest.mark.parametrize("keys", [["a", 1], [7.0], [None], [True]])
def test_keys_of_a_call_are_all_int_or_all_str(keys: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"int or (a|all be) str"):
        check_keys(keys)


def test_spec_has_the_shape_and_dtype_of_the_first_value() -> None:
    assert spec_of(3, torch.zeros(2, 0, dtype=torch.bfloat16)) == TensorSpec("3", (2, 0), "bfloat16")


def test_value_fits_its_key_with_the_same_shape_and_dtype() -> None:
    spec = TensorSpec("k", (2,), "float32")
    check_value(spec, torch.zeros(2))
    for value in (torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ShapeMismatchError, match=r"'k' holds float32\[2\], got"):
            check_value(spec, value)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 3)[:, 0],
        torch.zeros(1, 2).expand(2, 2)[0],
    ],
)
def test_any_tensor_with_a_place_for_each_element_can_be_written_to(out: torch.Tensor) -> None:
    check_out(TensorSpec("k", (2,), "float32"), out)


def test_dimension_of_size_1_may_have_stride_0() -> None:
    check_out(TensorSpec("k", (1, 2), "float32"), torch.zeros(2).expand(1, 2))


@pytest.mark.parametrize("key", [2**63 - 1, -(2**63), "", "\0", "schlüssel", "鍵", "🔑", "k" * 10_000])
def test_keys_of_64_bits_and_of_any_text_are_taken(key: Any) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize("key", [2**63, -(2**63) - 1])
def test_keys_of_more_bits_are_refused(key: int) -> None:
    with pytest.raises(ConfigurationError, match="has up to 64 bits, got one of 64"):
        check_key(key)


def test_single_contiguous_value_is_not_copied_and_says_so() -> None:
    value = torch.arange(6.0).view(2, 3)
    flat, is_own = merge([value])
    assert not is_own
    assert flat.data_ptr() == value.data_ptr()
    turned, is_own = merge([value.t()])
    assert is_own
    assert turned.tolist() == [0, 3, 1, 4, 2, 5]


def test_sum_is_a_left_fold_and_leaves_the_replicas_alone() -> None:
    replicas = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    total, is_own = merge(replicas)
    assert is_own
    # In float32 1e8 + 1 is 1e8; any other order would give 1.
    assert total.tolist() == [0]
    assert [replica.item() for replica in replicas] == [1e8, 1, -1e8]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    small = torch.finfo(dtype).eps / 2
    total, _ = merge([torch.tensor([value], dtype=dtype) for value in (1.0, small, small)])
    assert total.dtype == dtype
    assert total.item() == 1 + 2 * small


def test_replicas_of_different_memory_order_are_summed_by_position() -> None:
    value = torch.arange(6.0).view(2, 3)
    total, _ = merge([value, value.t().contiguous().t()])
    assert total.tolist() == (2 * value).flatten().tolist()
