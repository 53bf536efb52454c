"""Rows of tables in a store that are asked for before they are needed: the same numbers, sooner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import RowSparseParameter, Trainer
from kvtrainer.client.row_reads import RowPulls
from kvtrainer.errors import ConfigurationError, KVStoreError, RowIdError, ServerUnreachableError
from tests.support.row_tables import SGD, Model, alone, column

IDS = [torch.tensor(ids) for ids in ([1, 3], [3, 3, 0], [0, 1, 2], [2])]


def train(prefetches: bool) -> list[float]:
    torch.manual_seed(0)
    model = Model(init=torch.linspace(-1, 1, 12).view(6, 2))
    trainer = Trainer(model, "sgd", {"learning_rate": 0.01, "momentum": 0.9}, kvstore="local")
    for number, ids in enumerate(IDS * 3):
        model(ids).square().sum().backward()
        if prefetches:
            trainer.prefetch(IDS[(number + 1) % len(IDS)])
        trainer.step(1)
    return column(model.table)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids that a store is asked for, call by call."""
    calls: list[list[int]] = []
    ask = RowPulls.ask

    def count(self: RowPulls, wanted: Any) -> Any:
        calls.append([i for _, _, ids in wanted for i in ids.tolist()])
        return ask(self, wanted)

    monkeypatch.setattr(RowPulls, "ask", count)
    return calls


def test_training_gives_the_same_numbers_with_prefetched_rows() -> None:
    assert train(prefetches=True) == train(prefetches=False)


def test_rows_are_asked_for_once_after_the_step_and_no_more_in_the_forward_pass(
    asked: list[list[int]],
) -> None:
    table, trainer = alone()
    table.row_sparse_data([2]).sum().backward()
    trainer.prefetch([3, 1, 3])
    asked.clear()
    trainer.step(1)
    assert asked == [[1, 3]]
    for _ in range(2):
        assert table.row_sparse_data([[1], [3]]).shape == (2, 1, 1)
    assert len(asked) == 1


def test_rows_that_the_step_changes_come_as_it_leaves_them() -> None:
    table, trainer = alone(5.0)
    (3 * table.row_sparse_data([2])).sum().backward()
    trainer.prefetch([2])
    trainer.step(1)
    assert table.row_sparse_data([2]).item() == 2


@pytest.mark.parametrize("wanted", [[0, 1, 2, 3], [1, 2], []])
def test_rows_that_were_not_named_are_fetched_when_they_are_needed(
    wanted: list[int], asked: list[list[int]]
) -> None:
    values = torch.arange(8.0).view(4, 2)
    table, trainer = alone(values, (4, 2))
    (0 * table.row_sparse_data([0])).sum().backward()
    trainer.prefetch(wanted)
    trainer.step(1)
    asked.clear()
    assert torch.equal(table.row_sparse_data([3, 0, 1, 0]), values[[3, 0, 1, 0]])
    assert asked == ([[i for i in (0, 1, 3) if i not in wanted]] if len(wanted) < 4 else [])


def test_values_that_are_set_take_the_place_of_prefetched_ones() -> None:
    table, trainer = alone(5.0)
    (0 * table.row_sparse_data([2])).sum().backward()
    trainer.prefetch([2])
    trainer.step(1)
    table.copy_(torch.full((4, 1), 7.0))
    trainer.set_data()
    assert table.row_sparse_data([2]).item() == 7


def test_all_values_of_a_table_whose_rows_were_prefetched_are_a_new_tensor() -> None:
    table, trainer = alone(5.0)
    (0 * table.row_sparse_data([2])).sum().backward()
    trainer.prefetch([0, 1, 2, 3])
    trainer.step(1)
    table.detach().zero_()
    assert column(table) == [5.0] * 4


def test_rows_count_for_one_step_alone() -> None:
    table, trainer = alone(5.0)
    for number in range(3):
        table.row_sparse_data([2]).sum().backward()
        if not number:
            trainer.prefetch([2])
        trainer.step(1)
    assert table.row_sparse_data([2]).item() == 2


def test_an_error_of_the_store_is_raised_where_the_rows_are_used_and_the_next_use_asks_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, trainer = alone(5.0)
    (0 * table.row_sparse_data([2])).sum().backward()
    trainer.prefetch([2])
    trainer.step(1)

    def fail(*_: object) -> None:
        raise ServerUnreachableError("server 0 has not answered")

    with monkeypatch.context() as patched:
        patched.setattr(RowPulls, "take", fail)
        with pytest.raises(KVStoreError, match="server 0"):
            table.row_sparse_data([2])
    assert table.row_sparse_data([2]).item() == 5


def test_rows_that_could_not_be_asked_for_are_fetched_when_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, trainer = alone(5.0)

    def fail(*_: object) -> None:
        raise ServerUnreachableError("server 0 has not answered")

    (0 * table.row_sparse_data([2])).sum().backward()
    trainer.prefetch([2])
    with monkeypatch.context() as patched:
        patched.setattr(RowPulls, "ask", fail)
        with pytest.raises(KVStoreError, match="server 0"):
            trainer.step(1)
    assert table.row_sparse_data([2]).item() == 5


def test_several_tables_are_named_with_their_ids() -> None:
    tables = [RowSparseParameter((4, 1), value) for value in (1.0, 2.0)]
    trainer = Trainer(tables, "sgd", SGD, kvstore="local")
    for table in tables:
        table.row_sparse_data([0]).sum().backward()
    trainer.prefetch({tables[1]: [0, 3], tables[0]: [1]})
    trainer.step(1)
    assert tables[1].row_sparse_data([0, 3]).flatten().tolist() == [1, 2]
    assert tables[0].row_sparse_data([1, 0]).flatten().tolist() == [1, 0]


def test_several_tables_may_be_named_as_the_trainer_names_them() -> None:
    users, items = (RowSparseParameter((4, 1), value) for value in (1.0, 2.0))
    trainer = Trainer({"users": users, "items": items}, "sgd", SGD, kvstore="local")
    for table in (users, items):
        table.row_sparse_data([0]).sum().backward()
    trainer.prefetch({"items": [0, 3], users: [1]})
    wanted = trainer._pipeline.memory.tables.wanted
    assert {key: ids.tolist() for key, ids in wanted.items()} == {0: [0, 3], 1: [1]}  # by name
    trainer.step(1)
    assert items.row_sparse_data([0, 3]).flatten().tolist() == [1, 2]
    assert users.row_sparse_data([1, 0]).flatten().tolist() == [1, 0]


def test_wrong_rows_are_refused_at_once() -> None:
    table, trainer = alone()
    with pytest.raises(RowIdError, match="4"):
        trainer.prefetch([4])
    with pytest.raises(ConfigurationError, match="whole"):
        trainer.prefetch({table: [0.5]})
    for wrong in ({RowSparseParameter((4, 1)): [0]}, {"tabel": [0]}, {"table": [0], table: [1]}):
        with pytest.raises(
            ConfigurationError, match="each RowSparseParameter of this Trainer, or its name, once"
        ):
            trainer.prefetch(wrong)
    with pytest.raises(ConfigurationError, match="0 row-sparse parameters"):
        Trainer(nn.Linear(1, 1), "sgd", SGD).prefetch([0])
