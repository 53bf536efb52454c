"""Row-sparse gradients and gradients in fragments: which rows, states, bits and memory an update touches."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from kvstore_server.errors import OptimizerError, ShapeMismatchError
from kvstore_server.optimizer import Optimizer, coalesce_rows, create
from kvstore_server.optimizer.rows import CACHED, GradFragments, ViewCache, aligned_fragments, sort_row_ids
from tests.support.lazy_runs import GOLDEN, START, TOUCHED, gradient
from tests.support.optimizer_slices import Key, numbers

LARS = ("lars", {"learning_rate": 0.1, "wd": 0.01, "momentum": 0.9, "lazy_update": True})
LARS_DENSE = ("lars", {"learning_rate": 0.1, "wd": 0.01})
CASES: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    **GOLDEN,
    "lazy lars": (*LARS, [0.9986687, -1.9983106, 0.49959338, 3.0001369, 1.9991889, 2.0005689]),
    "lars": (*LARS_DENSE, [0.99917614, -1.9991355, 0.49956882, 2.99999, 1.9993278, 2.0003278]),
}
LAZY = [
    (name, options)
    for name, options, _ in CASES.values()
    if options.get("lazy_update") or name in ("adagrad", "ftrl", "groupadagrad")
]
LAZY += [("sgd", {"learning_rate": 0.1}), ("nag", {"learning_rate": 0.1, "momentum": 0.0})]


each_lazy = pytest.mark.parametrize(
    ("name", "options"), LAZY, ids=["-".join([name, *options]) for name, options in LAZY]
)


def trajectory(optimizer: Optimizer) -> Tensor:
    key = Key(optimizer, torch.tensor(START))
    for step, rows in enumerate(TOUCHED):
        key.update_rows(rows, gradient(step).expand(len(rows), 2))
    assert key.state["step"] == 5
    return key.weight.reshape(-1)


def close(result: Tensor, expected: list[float]) -> bool:
    wanted = torch.tensor(expected)
    return bool(((result - wanted).abs() <= 1e-6 + 1e-6 * wanted.abs()).all())


@pytest.mark.parametrize("case", CASES)
def test_rows_end_where_mxnet_ends_by_lazy_updates_or_as_a_dense_gradient(case: str) -> None:
    name, options, expected = CASES[case]
    assert close(trajectory(create(name, **options)), expected)


def tensors(key: Key) -> dict[str, Tensor]:
    return {name: value for name, value in key.state.items() if isinstance(value, Tensor)}


@each_lazy
def test_a_row_that_is_absent_keeps_its_weights_and_its_state(name: str, options: dict[str, Any]) -> None:
    key = Key(create(name, **options), numbers(6, 5, seed=0))
    key.update_rows(range(6), numbers(6, 5, seed=1))
    before, kept = key.weight.clone(), tensors(key)
    key.update_rows([1, 4], numbers(2, 5, seed=2))
    absent = [0, 2, 3, 5]
    assert torch.equal(key.weight[absent], before[absent])
    assert not torch.equal(key.weight[[1, 4]], before[[1, 4]])
    for entry, value in kept.items():
        assert torch.equal(tensors(key)[entry][absent], value[absent])


@each_lazy
def test_a_lazy_update_of_all_rows_has_the_bits_of_a_dense_one(name: str, options: dict[str, Any]) -> None:
    lazy, dense = (Key(create(name, **options), numbers(6, 5, seed=0)) for _ in range(2))
    for step in range(3):
        lazy.update_rows(range(6), numbers(6, 5, seed=step))
        dense.update(numbers(6, 5, seed=step))
    assert torch.equal(lazy.weight, dense.weight)
    for entry, value in tensors(dense).items():
        assert torch.equal(tensors(lazy)[entry], value)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("shape", [(60,), (60, 1), (60, 2, 3), (60, 37)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plain_sgd_of_any_shape_has_the_bits_of_a_dense_update(
    shape: tuple[int, ...], dtype: torch.dtype, clip: float | None
) -> None:
    optimizer, weight = create("sgd", lr=0.1, clip_gradient=clip), numbers(*shape, seed=0).to(dtype)
    by_rows, dense, grad = Key(optimizer, weight), Key(optimizer, weight), numbers(*shape, seed=1).to(dtype)
    grad[40:] = grad[40]
    by_rows.update_rows([*range(10), *range(20, 40)], torch.cat([grad[:10], grad[20:40]]))
    by_rows.update_rows([10], grad[10:11])
    by_rows.update_rows(range(11, 20), grad[11:20])
    by_rows.update_rows(range(40, 60), grad[40].reshape(1, -1).expand(20, -1))
    dense.update(grad)
    assert torch.equal(by_rows.weight, dense.weight)


@pytest.mark.parametrize(("name", "options"), [case for case in LAZY if case[0] != "lars"])
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(name: str, options: dict[str, Any]) -> None:
    optimizer, whole = create(name, **options), numbers(7, 37, seed=0)
    together, parts = Key(optimizer, whole), (Key(optimizer, whole[:3]), Key(optimizer, whole[3:]))
    for step, rows in enumerate(([0, 1, 2, 4, 6], [1, 2, 3], [0, 2, 4, 5], [2, 3, 4, 5, 6])):
        ids, grad = torch.tensor(rows), numbers(len(rows), 37, seed=step + 1)
        together.update_rows(rows, grad)
        for here, first, part in zip((ids < 3, ids >= 3), (0, 3), parts, strict=True):
            part.update_rows((ids[here] - first).tolist(), grad[here])
    assert torch.equal(together.weight, torch.cat([part.weight for part in parts]))


@each_lazy
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_keep_a_master_of_rows(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    optimizer, start = create(name, multi_precision=True, **options), numbers(6, 5, seed=0).to(dtype)
    half, exact = Key(optimizer, start), Key(optimizer, start.double())
    for step, rows in enumerate(([0, 3], [3, 5], [1, 3])):
        half.update_rows(rows, numbers(2, 5, seed=step + 1))
        exact.update_rows(rows, numbers(2, 5, seed=step + 1).double())
    master = half.state["master"]
    assert (master.double() - exact.weight).abs().max() <= 1e-5
    assert torch.equal(half.weight, master.to(dtype))


@each_lazy
def test_rows_updated_in_blocks_have_the_bits_of_all(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gen = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(50, 33, generator=gen), [torch.arange(at, 50, 2) for at in range(3)]
    grads = [torch.randn(len(ids), 33, generator=gen) for ids in rows]
    found = []
    for cached in (1 << 18, 7 * 33):
        monkeypatch.setattr("kvstore_server.optimizer.apply.CACHED", cached)
        key = Key(create(name, **options), weight.clone())
        for ids, grad in zip(rows, grads, strict=True):
            key.update_rows(ids.tolist(), grad.clone())
        found.append(key)
    assert torch.equal(found[0].weight, found[1].weight)
    assert found[0].state["step"] == found[1].state["step"] == 3


def test_the_step_count_is_that_of_the_key_not_of_the_row() -> None:
    key = Key(create("adam", lr=0.1, epsilon=0.0, lazy_update=True), torch.zeros(2, 1, dtype=torch.float64))
    for row in (0, 0, 1):
        key.update_rows([row], torch.ones(1, 1).double())
    mean, square = 0.1 / (1 - 0.9**3), 0.001 / (1 - 0.999**3)
    assert key.weight[1].item() == pytest.approx(-0.1 * mean / square**0.5, rel=1e-9)


@each_lazy
def test_no_rows_at_all_count_as_an_update_that_changes_nothing(name: str, options: dict[str, Any]) -> None:
    before = numbers(4, 3, seed=0)
    key = Key(create(name, **options), before)
    for _ in range(2):
        key.update_rows([], torch.empty(0, 3))
    assert torch.equal(key.weight, before)
    assert key.state["step"] == 2
    key.update_rows([2], torch.ones(1, 3))
    assert not torch.equal(key.weight[2], before[2])


def test_the_state_of_a_key_with_more_dimensions_has_its_shape() -> None:
    key = Key(create("sgd", lr=1.0, momentum=0.5, lazy_update=True), torch.zeros(4, 2, 3))
    key.update_rows([3], torch.ones(1, 6))
    assert key.weight[3].tolist() == [[-1.0] * 3] * 2
    assert key.state["momentum_buffer"].shape == key.weight.shape


def test_dense_and_row_sparse_gradients_of_one_key_may_alternate() -> None:
    key = Key(create("sgd", lr=1.0, momentum=0.5, lazy_update=True), torch.zeros(2, 1, dtype=torch.float64))
    key.update(torch.ones(2, 1))
    key.update_rows([0], torch.ones(1, 1, dtype=torch.float64))
    key.update(torch.ones(2, 1))
    assert key.weight.reshape(-1).tolist() == [-1 - 1.5 - 1.75, -1 - 1.5]


class Counting(Optimizer):
    """A user's lazy optimizer whose entries are of several kinds."""

    defaults: ClassVar[dict[str, Any]] = {"wrong": False}

    def updates_rows(self, hyper: Any) -> bool:
        return True

    def create_state(self, weight: Tensor) -> dict[str, Any]:
        return {"seen": torch.ones_like(weight), "count": 0.0}

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
        state["count"] += 1.0
        state["seen"] = state["seen"] + 1.0
        late = state.get("late", torch.zeros_like(weight))
        state["late"] = torch.zeros(2) if hyper["wrong"] else late + 2.0
        weight.sub_(grad)


class CountingWhole(Counting):
    elementwise = False


@pytest.mark.parametrize("cls", [Counting, CountingWhole])
def test_an_entry_that_update_makes_is_zero_in_the_rows_it_has_not_seen(cls: type[Optimizer]) -> None:
    key = Key(cls(), torch.zeros(3, 4))
    for rows in ([0], [0, 2]):
        key.update_rows(rows, torch.ones(len(rows), 4))
    columns = {name: value[:, 0].tolist() for name, value in tensors(key).items()}
    assert columns == {"seen": [3.0, 1.0, 2.0], "late": [4.0, 0.0, 2.0]}
    assert key.state["count"] == 2.0


@pytest.mark.parametrize("cls", [Counting, CountingWhole])
def test_an_entry_without_a_row_for_each_row_is_refused_with_its_name(cls: type[Optimizer]) -> None:
    key = Key(cls(wrong=True), torch.zeros(3, 4))
    with pytest.raises(OptimizerError, match="'late'"):
        key.update_rows([0], torch.ones(1, 4))
    assert not key.weight.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 64, 257])
def test_values_of_one_row_are_added_in_the_order_given(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 7, (501,), generator=generator)
    values = torch.randn(501, width, generator=generator, dtype=dtype)
    values *= 10.0 ** torch.randint(-20, 20, values.shape, generator=generator)
    sums: dict[int, Tensor] = {}
    for row, value in zip(ids.tolist(), values, strict=True):
        sums[row] = sums[row] + value if row in sums else value
    rows, result = coalesce_rows(ids, values, 9)
    assert rows.tolist() == sorted(sums)
    assert torch.equal(result, torch.stack([sums[row] for row in sorted(sums)]))


@pytest.mark.parametrize("num_rows", [7, 60_000, 1_000_000, 1 << 40, 1 << 62])
@pytest.mark.parametrize(("count", "runs"), [(0, 1), (1, 1), (300, 300), (4000, 4000), (4000, 3)])
def test_equal_ids_are_put_in_order_as_they_were_given(num_rows: int, count: int, runs: int) -> None:
    drawn = np.random.default_rng(0)
    given = drawn.integers(0, num_rows, count) // drawn.integers(1, 1000, count)
    given = np.concatenate([given[:0], *[np.sort(part) for part in np.array_split(given, runs)]])
    ordered = sort_row_ids(given, num_rows)
    assert ordered.order.tolist() == sorted(range(count), key=given.tolist().__getitem__)
    assert ordered.ids.tolist() == sorted(set(given.tolist()))
    assert torch.equal(ordered.ids[ordered.places()], torch.from_numpy(given))


def test_rows_that_are_distinct_and_ascending_are_not_copied() -> None:
    ids, values = torch.tensor([0, 3, 4]), torch.ones(3, 2)
    rows, result = coalesce_rows(ids, values, 5)
    assert rows is ids
    assert result is values
    assert coalesce_rows(ids[:0], values[:0], 5)[0].numel() == 0


@pytest.mark.parametrize(("ids", "match"), [([0, 5], " 5.* 5 "), ([-1, 0], " -1")])
def test_a_row_outside_the_key_is_refused(ids: list[int], match: str) -> None:
    with pytest.raises(ShapeMismatchError, match=match):
        coalesce_rows(torch.tensor(ids), torch.ones(2, 1), 5)


def test_as_many_rows_of_values_as_ids_are_needed() -> None:
    with pytest.raises(ShapeMismatchError):
        coalesce_rows(torch.tensor([0, 1]), torch.ones(3, 1), 5)


SIZES = {
    "one": [48],
    "small": [16, 32, 64],
    "several together, several alone": [CACHED // 2, CACHED // 2, 16, CACHED - 16, CACHED, 16],
    "longer than a block": [16, 2 * CACHED + 32, 16],
}


def random_fragments(sizes: list[int]) -> list[Tensor]:
    gen = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, generator=gen) for size in sizes]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    ("scale", "bound", "factor"),
    [(1.0, None, 1.0), (1 / 3, None, 1.0), (1.0, 0.5, 1.0), (1 / 3, 0.2, 1.0), (1.0, None, 0.1), (1 / 3, 0.2, 0.1)],
)  # fmt: skip
def test_each_element_is_multiplied_clipped_and_multiplied_and_meets_what_lies_beside_it(
    sizes: list[int], scale: float, bound: float | None, factor: float
) -> None:
    fragments = random_fragments(sizes)
    given = torch.cat(fragments)
    want = given * scale
    want = (want if bound is None else want.clamp(-bound, bound)) * factor
    flats = torch.arange(float(len(given))), torch.zeros(len(given))
    for tensors, (places, outs) in aligned_fragments(
        GradFragments(fragments, scale, bound), *flats, factor=factor
    ):
        for tensor, place, out in zip(tensors, places, outs, strict=True):
            assert out.tolist() == [0.0] * len(tensor)
            assert place[0] == out.storage_offset()
            out.copy_(tensor)
    assert torch.equal(flats[1], want)
    assert torch.equal(torch.cat(fragments), given)


def test_memory_that_is_cut_again_alike_gives_the_same_parts() -> None:
    cuts, flat = ViewCache(), torch.arange(48.0)
    parts = cuts.of(flat, [16, 32])
    cuts.begin()
    assert all(one is other for one, other in zip(cuts.of(flat[:], [16, 32]), parts, strict=True))
    assert [part.tolist() for part in cuts.of(flat, [32, 16])] == [list(range(32)), list(range(32, 48))]


def test_memory_that_an_update_did_not_cut_is_let_go_by_the_next_one() -> None:
    cuts, flat = ViewCache(), torch.zeros(48)
    gone = weakref.ref(flat.untyped_storage())
    cuts.of(flat, [16, 32])
    del flat
    cuts.begin()
    assert gone() is not None
    cuts.begin()
    assert gone() is None


def test_what_is_used_as_it_lies_is_not_copied() -> None:
    fragments = random_fragments(SIZES["longer than a block"])
    [(tensors, _)] = aligned_fragments(GradFragments(fragments), torch.zeros(sum(map(len, fragments))))
    assert [tensor.data_ptr() for tensor in tensors] == [one.data_ptr() for one in fragments]


def test_a_whole_gradient_is_one_piece() -> None:
    grad, flat = torch.ones(32), torch.zeros(32)
    [([tensor], [[place]])] = aligned_fragments(grad, flat)
    assert (tensor is grad, place is flat) == (True, True)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_blocks_begin_on_lines_and_stay_in_the_cache(sizes: list[int]) -> None:
    flat = torch.zeros(sum(sizes))
    for [tensor], [[place]] in aligned_fragments(GradFragments(random_fragments(sizes), 0.5), flat):
        assert 0 < len(tensor) <= CACHED
        assert place.storage_offset() % 16 == 0
