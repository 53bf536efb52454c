"""Row-sparse gradients: MXNet's lazy trajectories, and which rows, states and bits an update leaves alone."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError, OptimizerError, ShapeMismatchError
from kvstore_server.optimizer import Optimizer, State, coalesce_rows, create, update_key, update_rows

LAZY: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.1, "wd": 0.01, "lazy_update": True}),
    ("sgd", {"lr": 0.1, "wd": 0.01, "momentum": 0.9, "lazy_update": True}),
    ("adam", {"lr": 0.01, "wd": 0.01, "lazy_update": True}),
    ("adagrad", {"lr": 0.1}),
    ("ftrl", {"lr": 0.1}),
    ("groupadagrad", {"lr": 0.1}),
    ("lars", {"lr": 0.1, "wd": 0.01, "momentum": 0.9, "lazy_update": True}),
]
# Weights after 5 updates from [[1, -2], [.5, 3], [2, 2]]; in update t the rows below get [.1 t, -.2]. From
# MXNet 2.0.0b1; a key of ftrl is row-sparse itself there.
ROWS = [[0], [0, 2], [2], [0], [1]]
GOLDEN = [
    [0.927043, -1.934066, 0.4495, 3.017, 1.946022, 2.035982],
    [0.889353, -1.876686, 0.4495, 3.017, 1.926222, 2.052182],
    [0.971854, -1.970903, 0.494545, 3.005455, 1.984036, 2.016026],
    [0.723271, -1.771554, 0.4, 3.1, 1.816795, 2.170711],
    [0.037134, -0.285389, 0.132667, 0.515833, 0.293784, 0.364757],
    [0.759836, -1.745827, 0.368694, 3.052522, 1.807419, 2.161721],
    [0.9986687, -1.9983106, 0.49959338, 3.0001369, 1.9991889, 2.0005689],
]
AS_DENSE: list[tuple[str, dict[str, Any], list[float]]] = [
    ("sgd", {"lr": 0.1, "wd": 0.01}, [0.92515, -1.93018, 0.447505, 3.00503, 1.94014, 2.02992]),
    (
        "sgd",
        {"lr": 0.1, "wd": 0.01, "momentum": 0.9},
        [0.801548, -1.785635, 0.443443, 2.980661, 1.823988, 2.096497],
    ),
    ("adam", {"lr": 0.01, "wd": 0.01}, [0.957281, -1.955397, 0.454437, 2.962366, 1.959143, 2.015812]),
    ("rmsprop", {"wd": 0.01}, [0.990982, -1.992155, 0.487782, 2.993942, 1.990686, 2.001723]),
    ("lars", {"lr": 0.1, "wd": 0.01}, [0.99917614, -1.9991355, 0.49956882, 2.99999, 1.9993278, 2.0003278]),
]


def named(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *case[1]])


def trajectory(optimizer: Optimizer) -> Tensor:
    weight, state = torch.tensor([[1.0, -2.0], [0.5, 3.0], [2.0, 2.0]]), State()
    for t, rows in enumerate(ROWS, 1):
        grad_rows = torch.tensor([[0.1 * t, -0.2]] * len(rows))
        update_rows(optimizer, weight, torch.tensor(rows), grad_rows, state, {**optimizer.hyper, "key": "w"})
    assert state.step == 5
    return weight.reshape(-1)


def close(result: Tensor, expected: list[float]) -> bool:
    wanted = torch.tensor(expected)
    return bool(((result - wanted).abs() <= 1e-6 + 1e-6 * wanted.abs()).all())


@pytest.mark.parametrize(
    ("case", "expected"), list(zip(LAZY, GOLDEN, strict=True)), ids=lambda v: str(v)[:40]
)
def test_a_lazy_update_ends_where_mxnet_ends(case: tuple[str, dict[str, Any]], expected: list[float]) -> None:
    assert close(trajectory(create(case[0], **case[1])), expected)


@pytest.mark.parametrize(("name", "options", "expected"), AS_DENSE)
def test_an_update_that_is_not_lazy_counts_the_gradient_as_dense(
    name: str, options: dict[str, Any], expected: list[float]
) -> None:
    assert close(trajectory(create(name, **options)), expected)


def test_a_dense_gradient_of_ftrl_changes_also_the_rows_where_it_is_zero() -> None:
    optimizer = create("ftrl", lr=0.1)
    weight, state = torch.tensor([[1.0, -2.0], [0.5, 3.0], [2.0, 2.0]]), State()
    for t, rows in enumerate(ROWS, 1):
        grad = torch.zeros(3, 2)
        grad[rows] = torch.tensor([0.1 * t, -0.2])
        update_key(optimizer, weight, grad, state, optimizer.hyper)
    assert close(weight.reshape(-1), [0.037134, -0.285389, -0.032667, 0.015833, -0.037883, 0.031424])


def filled(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("case", LAZY, ids=named)
def test_a_row_that_is_absent_keeps_its_weights_and_its_state(case: tuple[str, dict[str, Any]]) -> None:
    optimizer = create(case[0], **case[1])
    weight, state, rows = filled(6, 5, seed=0), State(), torch.tensor([1, 4])
    update_rows(optimizer, weight, torch.arange(6), filled(6, 5, seed=1), state, optimizer.hyper)
    before, kept = weight.clone(), copy.deepcopy(state)
    update_rows(optimizer, weight, rows, filled(2, 5, seed=2), state, optimizer.hyper)
    absent = [0, 2, 3, 5]
    assert torch.equal(weight[absent], before[absent])
    assert not torch.equal(weight[rows], before[rows])
    for name, value in kept.values.items():
        assert isinstance(value, Tensor)
        assert torch.equal(state.values[name][absent], value[absent])  # type: ignore[index]


@pytest.mark.parametrize("case", LAZY, ids=named)
def test_a_lazy_update_of_all_rows_has_the_bits_of_a_dense_one(case: tuple[str, dict[str, Any]]) -> None:
    optimizer = create(case[0], **case[1])
    lazy, dense, states = filled(6, 5, seed=0), filled(6, 5, seed=0), (State(), State())
    for step in range(3):
        update_rows(optimizer, lazy, torch.arange(6), filled(6, 5, seed=step), states[0], optimizer.hyper)
        update_key(optimizer, dense, filled(6, 5, seed=step), states[1], optimizer.hyper)
    assert torch.equal(lazy, dense)
    for name, value in states[0].values.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1].values[name]))


@pytest.mark.parametrize("case", [case for case in LAZY if case[0] != "lars"], ids=named)
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(case: tuple[str, dict[str, Any]]) -> None:
    optimizer = create(case[0], **case[1])
    together, state = filled(7, 37, seed=0), State()
    parts, states = (together[:3].clone(), together[3:].clone()), (State(), State())
    for step, rows in enumerate(([0, 1, 2, 4, 6], [1, 2, 3], [0, 2, 4, 5], [2, 3, 4, 5, 6])):
        ids, grad = torch.tensor(rows), filled(len(rows), 37, seed=step + 1)
        update_rows(optimizer, together, ids, grad.clone(), state, optimizer.hyper)
        for here, first, part, own in zip((ids < 3, ids >= 3), (0, 3), parts, states, strict=True):
            update_rows(optimizer, part, ids[here] - first, grad[here].clone(), own, optimizer.hyper)
    assert torch.equal(together, torch.cat(parts))


@pytest.mark.parametrize("case", LAZY, ids=named)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_keep_a_master_of_every_row(
    case: tuple[str, dict[str, Any]], dtype: torch.dtype
) -> None:
    name, options = case
    half, exact = filled(6, 5, seed=0, dtype=dtype), filled(6, 5, seed=0, dtype=dtype).double()
    state, other = State(), State()
    optimizer = create(name, multi_precision=True, **options)
    for step, rows in enumerate(([0, 3], [3, 5], [1, 3])):
        grad = filled(2, 5, seed=step + 1)
        update_rows(optimizer, half, torch.tensor(rows), grad.clone(), state, optimizer.hyper)
        update_rows(optimizer, exact, torch.tensor(rows), grad.double(), other, optimizer.hyper)
    assert state.master is not None
    assert (state.master.double() - exact).abs().max() <= 1e-5
    assert torch.equal(half, state.master.to(dtype))


def test_the_step_count_is_that_of_the_key_not_of_the_row() -> None:
    optimizer = create("adam", lr=0.1, epsilon=0.0, lazy_update=True)
    weight, state = torch.zeros(2, 1, dtype=torch.float64), State()
    for row in (0, 0, 1):
        update_rows(optimizer, weight, torch.tensor([row]), torch.ones(1, 1).double(), state, optimizer.hyper)
    mean, square = 0.1 / (1 - 0.9**3), 0.001 / (1 - 0.999**3)
    assert weight[1].item() == pytest.approx(-0.1 * mean / square**0.5, rel=1e-9)


def test_clipping_bounds_the_elements_of_the_rows() -> None:
    optimizer = create("sgd", lr=1.0, clip_gradient=0.5, lazy_update=True)
    weight = torch.zeros(3, 2)
    update_rows(optimizer, weight, torch.tensor([1]), torch.tensor([[2.0, -0.25]]), State(), optimizer.hyper)
    assert weight.tolist() == [[0.0, 0.0], [-0.5, 0.25], [0.0, 0.0]]


@pytest.mark.parametrize("case", LAZY, ids=named)
def test_no_rows_at_all_count_as_an_update_that_changes_nothing(case: tuple[str, dict[str, Any]]) -> None:
    optimizer = create(case[0], **case[1])
    weight, state, none = filled(4, 3, seed=0), State(), torch.empty(0, dtype=torch.int64)
    for _ in range(2):
        update_rows(optimizer, weight, none, torch.empty(0, 3), state, optimizer.hyper)
    assert torch.equal(weight, filled(4, 3, seed=0))
    assert state.step == 2
    update_rows(optimizer, weight, torch.tensor([2]), torch.ones(1, 3), state, optimizer.hyper)
    assert not torch.equal(weight[2], filled(4, 3, seed=0)[2])


def test_rows_of_a_key_with_more_dimensions_may_come_flat() -> None:
    optimizer = create("sgd", lr=1.0, momentum=0.5, lazy_update=True)
    weight, state = torch.zeros(4, 2, 3), State()
    update_rows(optimizer, weight, torch.tensor([3]), torch.ones(1, 6), state, optimizer.hyper)
    assert weight[3].tolist() == [[-1.0] * 3] * 2
    buffer = state.values["momentum_buffer"]
    assert isinstance(buffer, Tensor)
    assert buffer.shape == weight.shape


def test_adagrad_with_weight_decay_is_not_lazy() -> None:
    optimizer = create("adagrad", lr=0.1, wd=0.5)
    weight = torch.ones(2, 2)
    update_rows(optimizer, weight, torch.tensor([0]), torch.ones(1, 2), State(), optimizer.hyper)
    assert (weight[1] < 1).all()


def test_dense_and_row_sparse_gradients_of_one_key_may_alternate() -> None:
    optimizer = create("sgd", lr=1.0, momentum=0.5, lazy_update=True)
    weight, state = torch.zeros(2, 1, dtype=torch.float64), State()
    one = torch.ones(1, 1, dtype=torch.float64)
    update_key(optimizer, weight, torch.ones(2, 1).double(), state, optimizer.hyper)
    update_rows(optimizer, weight, torch.tensor([0]), one, state, optimizer.hyper)
    update_key(optimizer, weight, torch.ones(2, 1).double(), state, optimizer.hyper)
    assert weight.reshape(-1).tolist() == [-1 - 1.5 - 1.75, -1 - 1.5]


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
        state["late"] = (
            torch.zeros(2) if hyper["wrong"] else state.get("late", torch.zeros_like(weight)) + 2.0
        )
        weight.sub_(grad)


class CountingWhole(Counting):
    elementwise = False


@pytest.mark.parametrize("cls", [Counting, CountingWhole])
def test_an_entry_that_update_makes_is_zero_in_the_rows_it_has_not_seen(cls: type[Optimizer]) -> None:
    optimizer, weight, state = cls(), torch.zeros(3, 4), State()
    for rows in ([0], [0, 2]):
        update_rows(optimizer, weight, torch.tensor(rows), torch.ones(len(rows), 4), state, optimizer.hyper)
    columns = {n: v[:, 0].tolist() for n, v in state.values.items() if isinstance(v, Tensor)}
    assert columns == {"seen": [3.0, 1.0, 2.0], "late": [4.0, 0.0, 2.0]}
    assert state.values["count"] == 2.0


@pytest.mark.parametrize("cls", [Counting, CountingWhole])
def test_an_entry_without_a_row_for_each_row_is_refused_with_its_name(cls: type[Optimizer]) -> None:
    optimizer = cls(wrong=True)
    with pytest.raises(OptimizerError, match="'late'"):
        update_rows(
            optimizer, torch.zeros(3, 4), torch.tensor([0]), torch.ones(1, 4), State(), optimizer.hyper
        )


def test_groupadagrad_names_a_key_of_three_dimensions_before_anything_changes() -> None:
    optimizer, weight, state = create("groupadagrad"), torch.ones(3, 2, 2), State()
    with pytest.raises(ConfigurationError, match=r"'emb' has the shape \(3, 2, 2\)"):
        update_rows(
            optimizer, weight, torch.tensor([0]), torch.ones(1, 4), state, {**optimizer.hyper, "key": "emb"}
        )
    assert (weight == 1).all()
    assert state == State()


def test_values_of_one_row_are_added_in_the_order_given() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, values = torch.randint(0, 7, (501,), generator=generator), torch.randn(501, 3, generator=generator)
    sums: dict[int, Tensor] = {}
    for row, value in zip(ids.tolist(), values, strict=True):
        sums[row] = sums[row] + value if row in sums else value
    rows, result = coalesce_rows(ids, values, 9)
    assert rows.tolist() == sorted(sums)
    assert torch.equal(result, torch.stack([sums[row] for row in sorted(sums)]))


def test_rows_that_are_distinct_and_ascending_are_not_copied() -> None:
    ids, values = torch.tensor([0, 3, 4]), torch.ones(3, 2)
    rows, result = coalesce_rows(ids, values, 5)
    assert rows is ids
    assert result is values
    assert coalesce_rows(ids[:0], values[:0], 5)[0].numel() == 0


@pytest.mark.parametrize(("ids", "match"), [([0, 5], "has row 5.*5 rows"), ([-1, 0], "has row -1")])
def test_a_row_outside_the_key_is_refused(ids: list[int], match: str) -> None:
    with pytest.raises(ShapeMismatchError, match=match):
        coalesce_rows(torch.tensor(ids), torch.ones(2, 1), 5)


def test_as_many_rows_of_values_as_ids_are_needed() -> None:
    with pytest.raises(ShapeMismatchError, match="one row of values for each id"):
        coalesce_rows(torch.tensor([0, 1]), torch.ones(3, 1), 5)
