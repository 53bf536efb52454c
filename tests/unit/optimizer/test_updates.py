"""Updates of runs and of keys: bits, padding, half precision, and state: checked, moved, shared with nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvstore_server.errors import OptimizerError, ShapeMismatchError
from kvstore_server.optimizer import Optimizer, State, apply_update, create
from kvstore_server.optimizer.base import Hyper, Values
from kvstore_server.plan import TensorSpec, make_plan
from tests.support.optimizer_slices import (
    BUILT_IN,
    SHAPES,
    Curved,
    Key,
    big_slice,
    empty,
    filled,
    make,
    numbers,
    padding,
    replace_state,
    small_slice,
    state_of,
    update_slice,
)
from tests.support.pairwise import pairwise

WHOLE = ["lamb", "lans", "lars", "groupadagrad", "torch:Muon", "torch:Adafactor"]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [*BUILT_IN, *WHOLE[:4], "rowadam", Curved])
def test_bits_do_not_depend_on_the_number_of_threads(name: Any, threads: Callable[[int], None]) -> None:
    results = []
    for count in (1, 3):
        threads(count)
        key = Key(make(name), numbers(317, 331, seed=0))
        for step in range(3):
            key.update(numbers(317, 331, seed=step + 1))
        results.append((key.weight, key.state))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["sgd", "adam", "adamax", "signum", "lamb", "lans", "groupadagrad", "rowadam", Curved]
)
def test_a_limit_beyond_all_numbers_of_the_dtype_limits_infinities_alone(name: Any) -> None:
    """torch refuses such a number; an update that breaks off would be the end of a table."""
    for grad in (numbers(3, 5, seed=1), torch.full((3, 5), -torch.inf)):
        keys = [Key(create(name), numbers(3, 5, seed=0)) for _ in range(2)]
        for key, limit in zip(keys, (1e300, torch.finfo(torch.float32).max), strict=True):
            key.update(grad, clip_gradient=limit)
        assert torch.equal(keys[0].weight.nan_to_num(), keys[1].weight.nan_to_num())


@pytest.mark.parametrize("name", [*BUILT_IN, Curved])
def test_bits_do_not_depend_on_which_neighbours_are_updated_in_the_same_run(name: Any) -> None:
    slice_, optimizer = small_slice(), make(name)
    together, apart = filled(slice_, 0), filled(slice_, 0)
    state, other = empty(slice_), empty(slice_)
    hypers = [optimizer.hyper] * len(SHAPES)
    for step in range(3):
        update_slice(optimizer, slice_, together, filled(slice_, step + 1), state, hypers)
        alone = [[i == j for j in range(len(SHAPES))] for i in range(len(SHAPES))]
        for present in alone if step else [[True] * len(SHAPES)]:
            update_slice(optimizer, slice_, apart, filled(slice_, step + 1), other, hypers, present)
    assert torch.equal(together, apart)
    assert state.steps.tolist() == other.steps.tolist() == [3] * len(SHAPES)


@pytest.mark.parametrize("name", [*BUILT_IN, Curved])
def test_bits_do_not_depend_on_where_a_key_is_cut(name: Any) -> None:
    unit, optimizer = 16, make(name)
    whole, cuts = big_slice(100 * unit), [0, 1, 2, 5, 9, 26, 57, 100]
    together, apart = filled(whole, 0), filled(whole, 0)
    state = empty(whole)
    parts = [(a * unit, big_slice((b - a) * unit)) for a, b in itertools.pairwise(cuts)]
    others = [empty(slice_) for _, slice_ in parts]
    for step in range(3):
        grad = filled(whole, step + 1)
        for (start, slice_), other in zip(parts, others, strict=True):
            at = slice(start, start + slice_.length)
            update_slice(optimizer, slice_, apart[at], grad[at].clone(), other, [optimizer.hyper])
        update_slice(optimizer, whole, together, grad, state, [optimizer.hyper])
    assert torch.equal(together, apart)


@pytest.mark.parametrize("name", [*BUILT_IN, Curved])
def test_padding_stays_zero(name: Any) -> None:
    slice_, optimizer = small_slice(), make(name)
    if "eps" in optimizer.hyper:
        optimizer = make(name, eps=0.0)
    weight, state = filled(slice_, 0), empty(slice_)
    for step in range(2):
        update_slice(
            optimizer, slice_, weight, filled(slice_, step + 1), state, [optimizer.hyper] * len(SHAPES)
        )
    assert weight.isfinite().all()
    assert not padding(slice_, weight).any()


def test_one_kernel_call_updates_all_keys_that_are_alike() -> None:
    sizes: list[int] = []

    def rounded_up(numel: int) -> int:
        return -(-numel // 64) * 64

    class Counting(Optimizer):
        def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
            sizes.append(weight.numel())

    slice_, optimizer = small_slice(), Counting()
    weight, state = filled(slice_, 0), empty(slice_)
    equal = [dict(optimizer.hyper) for _ in SHAPES]
    update_slice(optimizer, slice_, weight, filled(slice_, 1), state, equal)
    update_slice(optimizer, slice_, weight, filled(slice_, 1), state, equal, [True, True, False, True, True])
    update_slice(
        optimizer,
        slice_,
        weight,
        filled(slice_, 1),
        state,
        [{**h, "lr": 1.0 * i} for i, h in enumerate(equal)],
    )
    # Elements with their padding: all; all but those of key 2; each key that is not empty by itself.
    assert sizes == [rounded_up(n) for n in (160, 32, 80, 32, 48, 16, 64)]


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("name", "dtype", "master"), pairwise(BUILT_IN, [*HALVES, torch.float32, torch.float64], [True, False])
)
def test_every_element_moves_as_in_float64(name: str, dtype: torch.dtype, master: bool) -> None:
    # What float64 computes is compared with torch's loop and with formulas in the tests of the two families.
    numel, optimizer = 77, make(name, multi_precision=master)
    slice_, exact = (
        make_plan([TensorSpec("w", (numel,), d)], 1).slices[0] for d in (str(dtype)[6:], "float64")
    )
    weight, state = filled(slice_, 0).to(dtype), empty(slice_)
    reference, oracle = weight[: exact.length].double(), empty(exact)
    start = weight.clone()
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for step in range(5):
        grad = filled(slice_, step + 1).abs() + 0.5
        grad[numel:] = 0.0
        exact_grad = grad[: exact.length].double()
        update_slice(optimizer, slice_, weight, grad.to(compute), state, [optimizer.hyper])
        update_slice(optimizer, exact, reference, exact_grad, oracle, [optimizer.hyper])
    roundings = 1 if master and dtype in HALVES else 5
    error = (weight[:numel].double() - reference[:numel]).abs() / reference[:numel].abs().clamp(min=1)
    assert error.max() <= roundings * torch.finfo(dtype).eps
    assert (weight != start)[:numel].all()


def test_half_weights_without_a_master_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for options, mentions in ((dict(multi_precision=True), 0), ({}, 1)):
        slice_, optimizer = small_slice("bfloat16"), create("sgd", **options)
        state, weight = empty(slice_), filled(slice_, 0).bfloat16()
        for _ in range(3):
            update_slice(optimizer, slice_, weight, filled(slice_, 1), state, [optimizer.hyper] * len(SHAPES))
        assert caplog.text.count("sgd updates bfloat16 weights without multi_precision") == mentions


@pytest.mark.parametrize("name", [*BUILT_IN, Curved])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_moved_segment_by_segment_continues_to_the_bit(name: Any, dtype: str) -> None:
    slice_, optimizer = small_slice(dtype), make(name, multi_precision=True)
    weight = filled(slice_, 0).to(getattr(torch, dtype))
    state, moved = empty(slice_), empty(slice_)
    hypers = [optimizer.hyper] * len(SHAPES)
    for step in range(2):
        update_slice(optimizer, slice_, weight, filled(slice_, step + 1), state, hypers)
    other = weight.clone()
    for i in range(len(SHAPES)):
        replace_state(moved, i, state_of(state, i))
    for w, s in ((weight, state), (other, moved)):
        update_slice(optimizer, slice_, w, filled(slice_, 9), s, hypers)
    assert torch.equal(weight, other)
    assert moved.steps.tolist() == state.steps.tolist() == [3] * len(SHAPES)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: str(d)[6:])
def test_replaced_weights_win_over_the_master_and_others_keep_theirs(dtype: torch.dtype) -> None:
    slice_, optimizer = small_slice(str(dtype)[6:]), create("sgd", lr=1.0, multi_precision=True)
    weight, state = torch.ones(slice_.length, dtype=dtype), empty(slice_)
    small = torch.full((slice_.length,), 2.0**-13)
    update_slice(optimizer, slice_, weight, small.clone(), state, [optimizer.hyper] * len(SHAPES))
    weight[:30] = 7.0
    update_slice(optimizer, slice_, weight, small.clone(), state, [optimizer.hyper] * len(SHAPES))
    assert state_of(state, 0)["master"].eq(7.0 - 2.0**-13).all()  # type: ignore[union-attr]
    assert state_of(state, 4)["master"].eq(1.0 - 2.0**-12).all()  # type: ignore[union-attr]


def test_neighbours_with_different_scalars_are_not_updated_as_one() -> None:
    slice_, optimizer = small_slice("float64"), make("torch:NAdam")
    weight, state = filled(slice_, 0, torch.float64), empty(slice_)
    first = [{**optimizer.hyper, "momentum_decay": 0.1 * i} for i in range(len(SHAPES))]
    update_slice(optimizer, slice_, weight, filled(slice_, 1, torch.float64), state, first)
    before = [float(state_of(state, i)["mu_product"]) for i in (0, 2, 3, 4)]
    update_slice(
        optimizer, slice_, weight, filled(slice_, 2, torch.float64), state, [optimizer.hyper] * len(SHAPES)
    )
    after = [float(state_of(state, i)["mu_product"]) for i in (0, 2, 3, 4)]
    assert len(set(before)) == 4
    assert [b / a for a, b in zip(before, after, strict=True)] == pytest.approx([after[0] / before[0]] * 4)


@pytest.mark.parametrize(
    ("dtype", "values", "said"),
    [
        ("float32", {"exp_avg": torch.zeros(31)}, "'exp_avg'.* 31 .* 30"),
        ("float16", {"master": torch.zeros(3)}, "'master'.* 3 "),
    ],
)
def test_state_of_another_model_is_refused(dtype: str, values: dict[str, Tensor], said: str) -> None:
    state = empty(small_slice(dtype))
    with pytest.raises(ShapeMismatchError, match=said):
        replace_state(state, 0, {"step": 1, **values})
    assert state_of(state, 0) == {"step": 0.0}


@pytest.mark.parametrize("name", [*WHOLE, "adam", "torch:NAdam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_a_moved_key_continues_to_the_bit(name: str, dtype: torch.dtype) -> None:
    optimizer = make(name, multi_precision=True)
    key = Key(optimizer, numbers(3, 5, seed=99).to(dtype))
    for step in range(3):
        key.update(numbers(3, 5, seed=step))
    other = Key(optimizer, key.weight)
    other.state = key.state
    for step in range(3, 6):
        key.update(numbers(3, 5, seed=step))
        other.update(numbers(3, 5, seed=step))
    assert torch.equal(key.weight, other.weight)
    assert key.state["step"] == other.state["step"] == 6
    assert ("master" in key.state) == (dtype == torch.bfloat16)


class Keeping(Optimizer):
    """A user's optimizer that keeps what it is told to keep."""

    elementwise = False
    defaults: ClassVar[dict[str, Any]] = {"name": "kept", "what": "shape"}

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
        values = {
            "shape": torch.ones(2, 3, 4), "number": 2, "grad": grad, "view": weight.view(-1)[:2], "object": object(),
            "sparse": torch.eye(2).to_sparse(),
        }  # fmt: skip
        state[hyper["name"]] = values[hyper["what"]]


class KeepingFlat(Keeping):
    elementwise = True


@pytest.mark.parametrize("what", ["shape", "number"])
def test_a_users_entry_may_be_a_number_or_have_any_shape(what: str) -> None:
    key = Key(Keeping(what=what), torch.ones(2))
    key.update(torch.ones(2))
    expected = torch.ones(2, 3, 4) if what == "shape" else torch.tensor(2)
    assert torch.equal(torch.as_tensor(key.state["kept"]), expected)


@pytest.mark.parametrize(
    ("cls", "name", "what", "said"),
    [
        (Keeping, "kept", "object", "object .*'kept'"),
        (Keeping, "kept", "sparse", "sparse tensor"),
        (Keeping, "step", "number", "'step'"),
        (KeepingFlat, "kept", "shape", r"\(2, 3, 4\).*'kept'"),
        (KeepingFlat, "master", "number", "'master'"),
    ],
)
def test_an_impossible_entry_is_named(cls: type[Optimizer], name: str, what: str, said: str) -> None:
    key = Key(cls(name=name, what=what), torch.ones(2))
    with pytest.raises(OptimizerError, match=said):
        key.update(torch.ones(2))
    assert (key.weight == 1).all()


@pytest.mark.parametrize("what", ["grad", "view"])
def test_an_entry_in_the_memory_of_the_gradient_or_of_the_weights_is_copied(what: str) -> None:
    optimizer, state = Keeping(what=what), State()
    weight, grad = torch.ones(4), torch.ones(4)
    apply_update(optimizer, weight, grad, state, optimizer.hyper)
    weight.zero_()
    grad.zero_()
    assert torch.as_tensor(state.values["kept"]).bool().all()


def test_only_a_verified_optimizer_gets_its_gradient_in_pieces() -> None:
    """Pieces are cut anywhere, and an entry of the state could be a part of one."""

    class Greedy(Optimizer):
        takes_pieces = True

        def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
            weight.sub_(grad)
            state["last"] = grad

    class Verified(Greedy):
        takes_pieces, verified = True, True

    optimizer, state = Greedy(), State()
    weight, grad = torch.ones(16), torch.ones(16)
    apply_update(optimizer, weight, grad, state, optimizer.hyper)
    assert (optimizer.takes_pieces, Verified.takes_pieces) == (False, True)
    assert (weight == 0).all()
    assert (state.values["last"] == 1).all()


def test_update_sees_the_shape_the_name_and_the_number_of_the_update() -> None:
    seen: list[Any] = []

    class Looking(Optimizer):
        elementwise = False

        def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
            seen.append((weight.shape, weight.dtype, grad.shape, hyper["key"], hyper["step"], grad.max()))

    key = Key(Looking(clip_gradient=0.5, begin_num_update=10), torch.ones(2, 3).half(), "fc")
    for _ in range(2):
        key.update(torch.ones(2, 3))
    assert seen == [((2, 3), torch.float32, (2, 3), "fc", step, 0.5) for step in (11, 12)]


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: str(d)[6:])
def test_a_master_collects_updates_that_are_too_small_to_see_one_by_one(dtype: torch.dtype) -> None:
    moved = []
    for master in (True, False):
        key = Key(create("sgd", lr=1.0, multi_precision=master), torch.ones(3, dtype=dtype))
        for _ in range(64):
            key.update(torch.full((3,), 2.0**-13))
        moved.append(key.weight[0].item())
    assert moved == [1 - 2.0**-7, 1.0]
