"""Row-sparse parameters: rows come from the Trainer's store and gradients go there; nothing else touches elements."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvtrainer import RowSparseParameter, Trainer
from kvtrainer.errors import (
    ConfigurationError,
    StaleGradientError,
)
from tests.support.lazy_runs import GOLDEN, START, TOUCHED, gradient
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


@pytest.mark.parametrize("case", GOLDEN)
def test_the_table_follows_mxnets_trajectory(case: str) -> None:
    name, options, expected = GOLDEN[case]
    table = RowSparseParameter((3, 2), torch.tensor(START))
    trainer = Trainer([table], name, options)
    for step, touched in enumerate(TOUCHED):
        (table.row_sparse_data(touched) * gradient(step)).sum().backward()
        trainer.step(1)
    found = table.row_sparse_data([0, 1, 2]).flatten().tolist()
    assert found == pytest.approx(expected, abs=2e-6)


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
def test_a_table_that_is_filled_while_another_thread_has_one_gets_the_values_that_it_gets_alone(
    does: str,
) -> None:
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
    with pytest.raises(
        StaleGradientError, match="1 of 3 parameters got no gradient since the last step: table"
    ):
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
