"""The update of a slice: runs, padding, half precision, and moving state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.errors import ShapeMismatchError
from kvstore_server.optimizer import Optimizer, create
from kvstore_server.plan import TensorSpec, make_plan
from tests.support.optimizer_slices import (
    BUILT_IN,
    SHAPES,
    Curved,
    empty,
    filled,
    make,
    padding,
    replace_state,
    small_slice,
    update_slice,
)


@pytest.mark.parametrize("name", [*BUILT_IN, Curved])
def test_padding_stays_zero(name: Any) -> None:
    piece, optimizer = small_slice(), make(name)
    if "eps" in optimizer.hyper:
        optimizer = make(name, eps=0.0)
    weight, state = filled(piece, 0), empty(piece)
    for step in range(2):
        update_slice(
            optimizer, piece, weight, filled(piece, step + 1), state, [optimizer.hyper] * len(SHAPES)
        )
    assert weight.isfinite().all()
    assert not padding(piece, weight).any()


def test_one_kernel_call_updates_all_keys_that_are_alike() -> None:
    sizes: list[int] = []

    def rounded_up(numel: int) -> int:
        return -(-numel // 64) * 64

    class Counting(Optimizer):
        def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
            sizes.append(weight.numel())

    piece, optimizer = small_slice(), Counting()
    weight, state = filled(piece, 0), empty(piece)
    equal = [dict(optimizer.hyper) for _ in SHAPES]
    update_slice(optimizer, piece, weight, filled(piece, 1), state, equal)
    update_slice(optimizer, piece, weight, filled(piece, 1), state, equal, [True, True, False, True, True])
    update_slice(
        optimizer, piece, weight, filled(piece, 1), state, [{**h, "lr": 1.0 * i} for i, h in enumerate(equal)]
    )
    # Elements with their padding: all; all but those of key 2; each key that is not empty by itself.
    assert sizes == [rounded_up(n) for n in (160, 32, 80, 32, 48, 16, 64)]


def test_absent_keys_keep_weight_state_and_step() -> None:
    piece, optimizer = small_slice(), make("sgd")
    weight, state = filled(piece, 0), empty(piece)
    hypers = [optimizer.hyper] * len(SHAPES)
    update_slice(optimizer, piece, weight, filled(piece, 1), state, hypers)
    before, kept = weight.clone(), state.state_of(2)
    present = [True, True, False, True, True]
    update_slice(optimizer, piece, weight, filled(piece, 2), state, hypers, present)
    part = slice(piece.segments[2].start, piece.segments[3].start)
    assert torch.equal(weight[part], before[part])
    assert kept.keys() == {"step", "momentum_buffer"}
    assert torch.equal(state.state_of(2)["momentum_buffer"], kept["momentum_buffer"])  # type: ignore[arg-type]
    assert state.steps.tolist() == [2, 2, 1, 2, 2]


def test_a_late_key_gets_the_bias_correction_of_its_first_step() -> None:
    # Adam's first step moves every element by lr, whatever its gradient; counted as the third it would not.
    piece, optimizer = small_slice("float64"), create("adam", lr=0.25, eps=0.0)
    weight, state = torch.zeros(piece.length, dtype=torch.float64), empty(piece)
    hypers = [optimizer.hyper] * len(SHAPES)
    for step in range(3):
        late = [True, True, True, True, step == 2]
        update_slice(optimizer, piece, weight, filled(piece, step, torch.float64), state, hypers, late)
    last = piece.segments[4]
    assert (weight[last.start :].abs() - 0.25).abs().max() < 1e-12


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("master", [True, False], ids=["master", "rounded"])
def test_every_element_moves_as_in_float64(name: str, dtype: torch.dtype, master: bool) -> None:
    # What float64 computes is compared with torch's loop and with formulas in the tests of the two families.
    numel, optimizer = 77, make(name, multi_precision=master)
    piece, exact = (
        make_plan([TensorSpec("w", (numel,), d)], 1).slices[0] for d in (str(dtype)[6:], "float64")
    )
    weight, state = filled(piece, 0).to(dtype), empty(piece)
    reference, oracle = weight[: exact.length].double(), empty(exact)
    start = weight.clone()
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for step in range(5):
        grad = filled(piece, step + 1).abs() + 0.5
        grad[numel:] = 0.0
        exact_grad = grad[: exact.length].double()
        update_slice(optimizer, piece, weight, grad.to(compute), state, [optimizer.hyper])
        update_slice(optimizer, exact, reference, exact_grad, oracle, [optimizer.hyper])
    roundings = 1 if master and dtype in HALVES else 5
    error = (weight[:numel].double() - reference[:numel]).abs() / reference[:numel].abs().clamp(min=1)
    assert error.max() <= roundings * torch.finfo(dtype).eps
    assert (weight != start)[:numel].all()


def test_half_weights_without_a_master_are_mentioned_once_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for options, mentions in ((dict(multi_precision=True), 0), ({}, 1)):
        piece, optimizer = small_slice("bfloat16"), create("sgd", **options)
        state, weight = empty(piece), filled(piece, 0).bfloat16()
        for _ in range(3):
            update_slice(optimizer, piece, weight, filled(piece, 1), state, [optimizer.hyper] * len(SHAPES))
        assert caplog.text.count("sgd updates bfloat16 weights without multi_precision") == mentions


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: str(d)[6:])
def test_a_master_collects_updates_that_are_too_small_to_see_one_by_one(dtype: torch.dtype) -> None:
    moved = []
    for master in (True, False):
        piece, optimizer = small_slice(str(dtype)[6:]), create("sgd", lr=1.0, multi_precision=master)
        weight, state = torch.ones(piece.length, dtype=dtype), empty(piece)
        for _ in range(64):
            update_slice(
                optimizer, piece, weight, torch.full((piece.length,), 2.0**-13), state, [optimizer.hyper] * 5
            )
        moved.append(weight[0].item())
    assert moved == [1 - 2.0**-7, 1.0]


@pytest.mark.parametrize("name", [*BUILT_IN, Curved])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_moved_segment_by_segment_continues_to_the_bit(name: Any, dtype: str) -> None:
    piece, optimizer = small_slice(dtype), make(name, multi_precision=True)
    weight = filled(piece, 0).to(getattr(torch, dtype))
    state, moved = empty(piece), empty(piece)
    hypers = [optimizer.hyper] * len(SHAPES)
    for step in range(2):
        update_slice(optimizer, piece, weight, filled(piece, step + 1), state, hypers)
    other = weight.clone()
    for i in range(len(SHAPES)):
        replace_state(moved, i, state.state_of(i))
    for w, s in ((weight, state), (other, moved)):
        update_slice(optimizer, piece, w, filled(piece, 9), s, hypers)
    assert torch.equal(weight, other)
    assert moved.steps.tolist() == state.steps.tolist() == [3] * len(SHAPES)


def test_a_copy_is_not_changed_by_later_updates() -> None:
    piece, optimizer = small_slice("bfloat16"), make("torch:NAdam", multi_precision=True)
    weight, state = filled(piece, 0).bfloat16(), empty(piece)
    hypers = [optimizer.hyper] * len(SHAPES)
    update_slice(optimizer, piece, weight, filled(piece, 1), state, hypers)
    copy = state.copy(0, len(SHAPES), slice(0, piece.length))
    before = state.state_of(0)
    update_slice(optimizer, piece, weight, filled(piece, 2), state, hypers)
    after = copy.state_of(0)
    assert all(torch.equal(torch.as_tensor(after[name]), torch.as_tensor(before[name])) for name in before)
    assert after.keys() == {"step", "exp_avg", "exp_avg_sq", "mu_product", "master"}


def test_a_segment_that_was_never_updated_has_only_its_step() -> None:
    piece = small_slice()
    state = empty(piece)
    assert state.state_of(0) == {"step": 0.0}


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: str(d)[6:])
def test_weights_that_were_replaced_win_over_the_master_and_the_others_keep_theirs(
    dtype: torch.dtype,
) -> None:
    piece, optimizer = small_slice(str(dtype)[6:]), create("sgd", lr=1.0, multi_precision=True)
    weight, state = torch.ones(piece.length, dtype=dtype), empty(piece)
    small = torch.full((piece.length,), 2.0**-13)
    update_slice(optimizer, piece, weight, small.clone(), state, [optimizer.hyper] * len(SHAPES))
    weight[:30] = 7.0
    update_slice(optimizer, piece, weight, small.clone(), state, [optimizer.hyper] * len(SHAPES))
    assert state.state_of(0)["master"].eq(7.0 - 2.0**-13).all()  # type: ignore[union-attr]
    assert state.state_of(4)["master"].eq(1.0 - 2.0**-12).all()  # type: ignore[union-attr]


def test_loaded_state_replaces_what_the_segment_had() -> None:
    piece, optimizer = small_slice(), make("sgd")
    weight, state = filled(piece, 0), empty(piece)
    update_slice(optimizer, piece, weight, filled(piece, 1), state, [optimizer.hyper] * len(SHAPES))
    other = state.state_of(2)
    replace_state(state, 0, {"step": 5})
    assert state.state_of(0) == {"step": 5.0}
    assert torch.equal(state.state_of(2)["momentum_buffer"], other["momentum_buffer"])  # type: ignore[arg-type]
    assert state.steps.tolist() == [5, 1, 1, 1, 1]


def test_neighbours_with_different_scalars_are_not_updated_as_one() -> None:
    piece, optimizer = small_slice("float64"), make("torch:NAdam")
    weight, state = filled(piece, 0, torch.float64), empty(piece)
    first = [{**optimizer.hyper, "momentum_decay": 0.1 * i} for i in range(len(SHAPES))]
    update_slice(optimizer, piece, weight, filled(piece, 1, torch.float64), state, first)
    before = [float(state.state_of(i)["mu_product"]) for i in (0, 2, 3, 4)]
    update_slice(
        optimizer, piece, weight, filled(piece, 2, torch.float64), state, [optimizer.hyper] * len(SHAPES)
    )
    after = [float(state.state_of(i)["mu_product"]) for i in (0, 2, 3, 4)]
    assert len(set(before)) == 4
    assert [b / a for a, b in zip(before, after, strict=True)] == pytest.approx([after[0] / before[0]] * 4)


def test_state_of_another_model_is_refused() -> None:
    piece = small_slice()
    with pytest.raises(ShapeMismatchError, match=r"'exp_avg' has 31 elements.* 30"):
        replace_state(empty(piece), 0, {"step": 1, "exp_avg": torch.zeros(31)})
