"""Row-sparse parameters: rows from the Trainer's store, gradients to it; copies, files, owners and misuse."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer import RowSparseParameter, Trainer
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    KVStoreError,
    RowIdError,
    RowSparseError,
    StaleGradientError,
    WeightsWrittenError,
)
from tests.support.capabilities import SumStore
from tests.support.limits import SOON
from tests.support.processes import together
from tests.support.row_tables import SGD, Model, alone, column

SHAPE = (6_000, 9)


def test_it_has_the_shape_of_the_table_and_the_memory_of_one_number() -> None:
    table = RowSparseParameter((1 << 30, 64), dtype=torch.float16)
    assert table.shape == (1 << 30, 64)
    assert table.dtype == torch.float16
    assert table.untyped_storage().nbytes() == 2
    assert isinstance(table, nn.Parameter)
    assert repr(table) == "RowSparseParameter(shape=[1073741824, 64], dtype=torch.float16, device='cpu')"


@pytest.mark.parametrize("ids", [[[1, 3], [1, 0]], [2], [[], []]])
def test_rows_come_in_the_shape_of_the_ids(ids: list[Any]) -> None:
    values = torch.rand(4, 3, 2)
    table, _trainer = alone(values, (4, 3, 2))
    asked = torch.tensor(ids, dtype=torch.int32)
    assert torch.equal(table.row_sparse_data(asked), values[asked.long()])


def test_the_gradient_is_coalesced_and_adds_up_repeated_ids_and_backward_passes() -> None:
    table, _trainer = alone()
    for ids in ([[3, 1], [3, 3]], [0, 1]):
        (table.row_sparse_data(torch.tensor(ids)) * 2).sum().backward()
    assert table.grad is not None
    grad = table.grad.coalesce()
    assert grad.indices().tolist() == [[0, 1, 3]]
    assert grad.values().flatten().tolist() == [2, 4, 6]


def test_half_precision_gradients_are_summed_in_float32() -> None:
    table = RowSparseParameter((2, 1), 0.0, dtype=torch.float16)
    _trainer = Trainer([table], "sgd", SGD)
    rows = table.row_sparse_data([0] * 9)
    (rows * torch.tensor([[2048.0]] + [[1.0]] * 8, dtype=torch.float16)).sum().backward()
    assert table.grad is not None
    assert table.grad._values().item() == 2056


def tables(dtype: torch.dtype = torch.float32) -> list[tuple[Any, Any]]:
    """Tables of zeros, with and without a number of rows, and what looks rows up."""
    fixed = RowSparseParameter((100, 2), dtype=dtype)
    unbounded = kvtrainer.Embedding(2, init="constant", scale=0.0, dtype=dtype)
    bag = kvtrainer.EmbeddingBag(2, init="constant", scale=0.0, mode="sum", padding_idx=0, dtype=dtype)
    return [
        (fixed, fixed.row_sparse_data),
        (unbounded.weight, unbounded),
        (bag.weight, lambda ids: bag(ids, torch.arange(len(ids)))),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", list(itertools.product(range(3), repeat=2)), ids=str)
def test_gradients_of_few_rows_and_none_add_up(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    for table, look_up in tables(dtype):
        trainer = Trainer([table], "sgd", SGD, kvstore="local")
        for size in sizes:
            look_up(torch.arange(5, 5 + size)).sum().backward()
        trainer.step(1, ignore_stale_grad=True)
        with torch.no_grad():
            found = look_up(torch.tensor([5, 6]))[:, 0].tolist()
        assert found == [-float(sum(size > at for size in sizes)) for at in range(2)]


def test_a_float16_table_that_is_looked_up_twice_for_one_backward_pass_is_refused_by_name() -> None:
    for table, look_up in tables(torch.float16):
        _trainer = Trainer({"t": table}, "sgd", SGD, kvstore="local")
        total = look_up(torch.tensor([5, 6])).sum() + look_up(torch.tensor([6, 7])).sum()
        with pytest.raises(RowSparseError, match="'t' was looked up twice"):
            total.backward()


@pytest.mark.parametrize("ids", [[5], [5, 6]])
def test_gradients_of_tables_share_no_memory(ids: list[int]) -> None:
    made, given = tables(), torch.tensor(ids)
    _trainer = Trainer([table for table, _ in made], "sgd", SGD, kvstore="local")
    grad = torch.full((len(ids), 2), 3.0)
    sum(look_up(given) for _, look_up in made).backward(grad)
    for table, _ in made:
        table.grad._values().mul_(0.5)
    assert all([table.grad._values().flatten().tolist() == [1.5] * (2 * len(ids)) for table, _ in made])
    assert grad.flatten().tolist() == [3.0] * (2 * len(ids))


@pytest.mark.parametrize("at", range(3))
def test_a_table_that_is_first_read_in_inference_mode_can_be_trained(at: int) -> None:
    table, look_up = tables()[at]
    dense = nn.Linear(2, 1)
    trainer = Trainer({"t": table, **dict(dense.named_parameters())}, "adagrad", SGD, kvstore="local")
    with torch.inference_mode():
        assert look_up(torch.tensor([1, 2])).tolist() == [[0.0, 0.0]] * 2
    for _ in range(2):
        dense(look_up(torch.tensor([1, 2, 3]))).sum().backward()
        trainer.step(1)
    assert bool((look_up(torch.tensor([1, 2, 3])) != 0).all())


@pytest.mark.filterwarnings("ignore::kvtrainer.errors.SparseGradientWarning")
@pytest.mark.parametrize("name", ["lamb", "lars", "adamw", "nadam", "torch:AdamW"])
def test_an_optimizer_that_knows_no_rows_sees_zeros_elsewhere(name: str) -> None:
    start = torch.rand(5, 3)
    dense = nn.Parameter(start.clone())
    table = RowSparseParameter((5, 3), start)
    trainers = [Trainer({"w": p}, name, {"learning_rate": 0.1, "wd": 0.1}) for p in (dense, table)]
    for ids in ([0, 2], [4, 4]):
        dense[ids].square().sum().backward()
        table.row_sparse_data(ids).square().sum().backward()
        for trainer in trainers:
            trainer.step(1)
    torch.testing.assert_close(table.row_sparse_data(torch.arange(5)), dense.detach())


INITS: dict[str, tuple[Any, Callable[[Tensor], bool]]] = {
    "none": (None, lambda t: not t.any()),
    "number": (2, lambda t: bool((t == 2).all())),
    "tensor": (
        torch.arange(54_000.0).view(SHAPE),
        lambda t: torch.equal(t, torch.arange(54_000.0).view(SHAPE)),
    ),
    "function": (nn.init.normal_, lambda t: 0.9 < float(t.std()) < 1.1),
}


@pytest.mark.parametrize("init", INITS)
def test_the_store_begins_with_the_initial_values(init: str) -> None:
    given, is_right = INITS[init]
    table, _trainer = alone(given, SHAPE)
    assert is_right(table.row_sparse_data(torch.arange(SHAPE[0])).detach())


def test_random_values_are_determined_where_the_parameter_is_made() -> None:
    values = []
    for extra in (0, 3):
        torch.manual_seed(5)
        table, _trainer = alone(nn.init.normal_, (40, 2))
        torch.rand(extra)  # what comes in between has no influence
        values.append(table.row_sparse_data(torch.arange(40)))
        assert torch.rand(()).item() >= 0
    assert torch.equal(*values)


@pytest.mark.parametrize("does", ["fills", "makes"])
def test_tables_filled_by_two_threads_get_the_values_of_one(does: str) -> None:
    meeting = threading.Barrier(2)

    def meet() -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(SOON)

    def fill(table: Tensor) -> None:
        nn.init.normal_(table[:20])
        meet()
        meet()
        nn.init.normal_(table[20:])

    def make() -> None:
        meet()
        RowSparseParameter((40, 2), fill)
        meet()

    tables = [RowSparseParameter((40, 2), fill) for _ in range(2)]
    meeting.abort()
    each = [table.detach() for table in tables]
    meeting.reset()
    first, second = together(tables[0].detach, tables[1].detach if does == "fills" else make)
    assert torch.equal(first, each[0])
    assert does == "makes" or torch.equal(second, each[1])


def test_set_data_replaces_the_table_that_it_names_and_no_other() -> None:
    model = Model()
    other = RowSparseParameter((2, 1), 5.0)
    trainer = Trainer([*model.named_parameters(), ("other", other)], "sgd", SGD)
    model(torch.tensor([1])).sum().backward()
    trainer.step(ignore_stale_grad=True)
    trainer.set_data({"table": torch.full((6, 2), 7.0)})
    assert column(model.table) == [7] * 6
    assert column(other) == [5, 5]
    trainer.set_data()
    assert column(model.table) == [7] * 6


def test_set_data_before_the_first_step_gives_the_first_values() -> None:
    table, trainer = alone()
    trainer.set_data({"table": torch.full((4, 1), 3.0)})
    assert column(table) == [3] * 4
    with pytest.raises(ConfigurationError, match=r"has shape \[4, 1\], its new value \[1, 4\]"):
        trainer.set_data({"table": torch.zeros(1, 4)})


def test_a_parameter_without_a_new_gradient_is_stale() -> None:
    model = Model()
    trainer = Trainer(model, "sgd", SGD)
    model(torch.tensor([1])).sum().backward()
    trainer.step(1)
    model.head(torch.ones(2)).sum().backward()
    with pytest.raises(StaleGradientError, match=r"1 of 3 .*: table"):
        trainer.step(1)
    before = column(model.table)
    trainer.step(1, ignore_stale_grad=True)
    assert column(model.table) == before


def test_multipliers_and_grad_req_count() -> None:
    table, trainer = alone()
    table.lr_mult = 0.5  # type: ignore[attr-defined]
    table.row_sparse_data([1]).sum().backward()
    trainer.step(1)
    assert column(table) == [1, 0.5, 1, 1]
    table.grad_req = "null"  # type: ignore[attr-defined]
    table.row_sparse_data([1]).sum().backward()
    trainer.step(1, ignore_stale_grad=True)
    assert column(table) == [1, 0.5, 1, 1]


def test_a_dense_gradient_that_was_assigned_has_all_rows() -> None:
    table, trainer = alone()
    table.grad = torch.full((4, 1), 0.5)
    trainer.step(1)
    assert column(table) == [0.5] * 4


def test_a_state_dict_has_the_values_in_the_store_and_loads_into_a_new_model() -> None:
    model = Model()
    trainer = Trainer(model, "sgd", SGD)
    model(torch.tensor([1, 2])).sum().backward()
    trainer.step(1)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    fresh = Model(init=0.0)
    fresh.load_state_dict(torch.load(saved))
    assert torch.equal(fresh.state_dict()["table"], model.state_dict()["table"])
    _trainer = Trainer(fresh, "sgd", SGD)
    assert column(fresh.table) == column(model.table)


def test_a_model_that_is_loaded_before_the_first_step_begins_with_those_values() -> None:
    model, other = Model(init=5.0), Model(init=7.0)
    trainer = Trainer(model, "sgd", SGD)
    model.load_state_dict(other.state_dict())
    assert column(model.table) == [7] * len(column(model.table))
    model(torch.tensor([1])).sum().backward()
    trainer.step(1)
    assert column(model.table)[0] == 7 != column(model.table)[1]


def test_a_model_that_is_loaded_while_a_store_has_its_values_is_published_by_set_data() -> None:
    model, other = Model(init=5.0), Model(init=7.0)
    trainer = Trainer(model, "sgd", SGD)
    for _ in range(2):
        model(torch.tensor([1])).sum().backward()
        trainer.step(1)
        model.load_state_dict(other.state_dict())
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(WeightsWrittenError, match="table"):
            trainer.step(1)
        # As with any other weight, what was written is what the model has.
        assert torch.equal(model.state_dict()["table"], other.state_dict()["table"])
        assert column(model.table) == column_of(other)
        trainer.set_data()
        assert column(model.table) == column_of(other)
        trainer.step(1)
        assert column(model.table)[0] == 7 != column(model.table)[1]


def test_values_of_another_shape_are_refused_and_change_nothing() -> None:
    table, _trainer = alone(3.0)
    assert column(table) == [3] * 4
    with pytest.raises(ConfigurationError, match="shape"):
        table.copy_(torch.zeros(2, 1))
    assert column(table) == [3] * 4


def column_of(model: Model) -> list[float]:
    return [float(row[0]) for row in model.state_dict()["table"]]


def test_a_model_with_a_table_can_be_copied_and_moved_before_it_has_a_trainer() -> None:
    model = Model(init=nn.init.normal_)
    twin = copy.deepcopy(model).to(torch.float64).to("cpu")
    assert twin.table.dtype == torch.float64
    assert torch.equal(twin.state_dict()["table"].float(), model.state_dict()["table"])
    trainer = Trainer(twin, "sgd", SGD)
    twin(torch.tensor([1])).sum().backward()
    trainer.step(1)
    assert twin.table.row_sparse_data([1]).dtype == torch.float64
    assert twin.to("cpu") is twin
    with pytest.raises(RowSparseError, match=r"cannot become torch\.float16 on cpu while a Trainer has it"):
        twin.half()


def test_without_a_trainer_there_are_no_rows() -> None:
    table = RowSparseParameter((3, 1))
    with pytest.raises(RowSparseError, match="no Trainer is created with it"):
        table.row_sparse_data([0])


def test_a_second_trainer_is_refused_but_takes_over_dense_parameters() -> None:
    model = Model()
    trainer = Trainer(model, "sgd", SGD)
    with pytest.raises(RowSparseError, match="'table' because it was already"):
        Trainer(model, "sgd", SGD)
    assert Trainer(model.head, "sgd", SGD) is not trainer


def test_values_of_a_trainer_that_is_gone_are_gone() -> None:
    table, trainer = alone()
    assert column(table) == [1] * 4
    del trainer
    gc.collect()
    with pytest.raises(RowSparseError, match="when no Trainer is created with it"):
        table.row_sparse_data([0])
    with pytest.raises(RowSparseError, match="were in the store of a Trainer that is gone"):
        table.detach()
    with pytest.raises(RowSparseError, match="give it new ones first"):
        Trainer([table], "sgd")
    table.copy_(torch.full((4, 1), 2.0))
    _trainer = Trainer([table], "sgd")
    assert column(table) == [2] * 4


def test_a_trainer_that_was_never_used_leaves_the_values_to_the_next_one() -> None:
    table, trainer = alone(3.0)
    del trainer
    gc.collect()
    _trainer = Trainer([table], "sgd")
    assert column(table) == [3] * 4


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"kvstore": None}, ArgumentTypeError, "cannot train row_sparse parameters without a kvstore"),
        (
            {"update_on_kvstore": False},
            ConfigurationError,
            "update_on_kvstore=False when sparse weights are present",
        ),
        ({"kvstore": SumStore()}, ConfigurationError, "'thirdparty' cannot hold row_sparse parameters"),
    ],
)
def test_a_store_that_cannot_hold_it_is_refused(options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Trainer([RowSparseParameter((2, 2))], "sgd", **options)


def test_the_environment_cannot_take_the_update_out_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    table, trainer = alone()
    table.row_sparse_data([1]).sum().backward()
    trainer.step(1)
    assert column(table) == [1, 0, 1, 1]
    with pytest.raises(ConfigurationError, match="update_on_kvstore=False"):
        trainer.allreduce_grads()


def test_it_cannot_be_added_later() -> None:
    trainer = Trainer([nn.Parameter(torch.zeros(2))], "sgd")
    with pytest.raises(ConfigurationError):
        trainer.add_param_group({"params": [RowSparseParameter((2, 2))]})


def test_a_closed_trainer_has_no_rows() -> None:
    table, trainer = alone()
    trainer.close()
    with pytest.raises(KVStoreError, match="closed"):
        table.row_sparse_data([0])


@pytest.mark.parametrize("ids", [[4], [-1, 0]])
def test_rows_that_it_does_not_have_are_named(ids: list[int]) -> None:
    table, _trainer = alone()
    with pytest.raises(RowIdError, match=str(ids[0])):
        table.row_sparse_data(ids)


READS: dict[str, Callable[[RowSparseParameter], object]] = {
    "sum": lambda t: t.sum(),
    "+": lambda t: t + 1,
    "reversed +": lambda t: torch.ones(4, 1) + t,
    "[]": lambda t: t[0],
    "embedding": lambda t: nn.functional.embedding(torch.tensor([0]), t),
    "data": lambda t: t.data,
    "T": lambda t: t.T,
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "==": lambda t: t == t,
    "mul_": lambda t: t.mul_(2),
    "stack": lambda t: torch.stack([t, t]),
    "clone": lambda t: t.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: torch.save(t, io.BytesIO()),
}


@pytest.mark.parametrize("read", READS)
def test_whatever_would_touch_its_elements_is_refused(read: str) -> None:
    table, _trainer = alone()
    with pytest.raises(RowSparseError, match=r"live in|lives? in a store|are in a store"):
        READS[read](table)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((),), "one or more whole numbers"),
        (((5, -1),), "one or more whole numbers"),
        ((-5,), "one or more whole numbers"),
        (
            ((5, 2), torch.zeros(2, 5)),
            r"of shape \[5, 2\] was given a torch.strided tensor of shape \[2, 5\]",
        ),
        (((5, 2), "normal"), "init of a RowSparseParameter"),
        (((5, 2), None, torch.int64), r"got torch\.int64"),
    ],
)
def test_wrong_arguments_are_explained(arguments: tuple[Any, ...], said: str) -> None:
    shape, init, dtype = (*arguments, None, None)[:3]
    with pytest.raises(ConfigurationError, match=said):
        RowSparseParameter(shape, init, dtype=dtype)


def test_rows_too_long_for_a_slice_are_refused_when_the_trainer_is_built() -> None:
    head = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigurationError, match="rows of 1200000 bytes are too long"):
        kvtrainer.Trainer([head, RowSparseParameter((2, 300_000))], "sgd")
