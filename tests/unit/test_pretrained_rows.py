"""Pretrained rows in a table: where they may come from, how they are trained, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.shard.id_index import row_numbers
from kvtrainer.errors import ConfigurationError, RowSparseError, ShapeMismatchError, StateFileError

IDS = [9, -4, 2**62, 0]
ROWS = torch.arange(12.0).view(4, 3) - 5.0
ONE = [1.0, 2.0, 3.0]


def trainer_of(table: kvtrainer.Embedding, optimizer: str = "sgd", **options: Any) -> kvtrainer.Trainer:
    options = {"learning_rate": 1.0, **options}
    return kvtrainer.Trainer([("t", table.weight)], optimizer, options, kvstore="local")


def step(trainer: kvtrainer.Trainer, table: kvtrainer.Embedding, *ids: int) -> None:
    """Update rows with gradients of 1."""
    table.weight.grad = None
    table(torch.tensor(ids)).sum().backward()
    trainer.step(1)


def read(table: kvtrainer.Embedding, *ids: int) -> Tensor:
    return table(torch.tensor(ids)).detach()


def exported(path: Path) -> Path:
    table = kvtrainer.Embedding(3)
    with trainer_of(table):
        table.load_rows(IDS, ROWS)
        table.export(path)
    return path


def arrow(kind: pa.DataType, ids: str = "ids") -> pa.Table:
    """In two chunks, of which the second begins within an array."""
    lists = pa.array(ROWS.tolist(), kind)
    return pa.table({ids: pa.array(IDS), "vector": pa.chunked_array([lists[:1], lists[1:]])})


def written(path: Path, write: Callable[[pa.Table, Path], object]) -> Path:
    write(arrow(pa.list_(pa.float32())), path)
    return path


@pytest.mark.parametrize(
    "source",
    [
        lambda _: (torch.tensor(IDS), ROWS),
        lambda _: (torch.tensor(IDS), torch.nn.Parameter(ROWS.double())),
        lambda _: (np.array(IDS), ROWS.numpy()),
        lambda _: (np.array(IDS)[::-1], ROWS.numpy()[::-1]),
        lambda _: (np.broadcast_to(IDS, (4,)), np.broadcast_to(ROWS.numpy(), (4, 3))),
        lambda _: (IDS, ROWS.tolist()),
        lambda _: ([*IDS, IDS[1]], torch.cat([ROWS, ROWS[1:2]])),
        lambda path: (exported(path),),
        lambda path: (str(exported(path)),),
        lambda path: (kvtrainer.RowFile(exported(path)),),
        lambda _: (arrow(pa.list_(pa.float32())),),
        lambda _: (arrow(pa.large_list(pa.float64()), "id"),),
        lambda _: (arrow(pa.list_(pa.float32(), 3)).select([1, 0]),),
        lambda path: (written(path, pyarrow.parquet.write_table),),
        lambda path: (written(path, pyarrow.feather.write_feather),),
    ],
)
def test_rows_are_loaded_from_tensors_arrays_and_files(
    source: Callable[[Path], tuple[Any, ...]], tmp_path: Path
) -> None:
    table = kvtrainer.Embedding(3)
    with trainer_of(table):
        before = read(table, 1, 2)
        table.load_rows(*source(tmp_path / "rows"))
        assert torch.equal(read(table, *IDS), ROWS)
        assert torch.equal(read(table, 1, 2), before)
        stats = table.stats()
        assert (stats["rows"], stats["admitted"], set(stats["hottest"].values())) == (4, 4, {0})


def test_rows_of_a_module_of_torch_have_ids_from_0_on() -> None:
    table, module = kvtrainer.EmbeddingBag(3, mode="sum"), torch.nn.Embedding(5, 3)
    with trainer_of(table):
        table.load_rows(module)
        ids = torch.arange(5)
        assert torch.equal(table(ids[:, None]), module(ids))
        assert table.stats()["rows"] == 5


def test_no_rows_are_loaded_from_nothing() -> None:
    table = kvtrainer.Embedding(3)
    with trainer_of(table):
        table.load_rows([], torch.zeros(0, 3))
        table.load_rows(arrow(pa.list_(pa.float32())).slice(0, 0))
        assert table.stats()["rows"] == 0


def test_inputs_are_not_changed() -> None:
    table, ids, rows = kvtrainer.Embedding(3), torch.tensor(IDS), ROWS.clone()
    with trainer_of(table, "adagrad") as trainer:
        table.load_rows(ids, rows)
        step(trainer, table, *IDS)
        table.load_rows(ids, rows)
        step(trainer, table, *IDS)
    assert ids.tolist() == IDS
    assert torch.equal(rows, ROWS)


def test_loaded_rows_have_initial_optimizer_state_and_others_keep_theirs() -> None:
    table = kvtrainer.Embedding(3)
    with trainer_of(table, "adagrad", learning_rate=0.1) as trainer:
        table.load_rows([1, 2], [ONE, ONE])
        expected = {1: 1.0, 2: 1.0, 3: float(read(table, 3)[0, 0])}
        squares = {1: 0, 2: 0, 3: 0}
        for at in range(4):
            if at == 2:  # row 1 again, and row 4 for the first time
                table.load_rows([4, 1], [ONE, ONE])
                expected |= {1: 1.0, 4: 1.0}
                squares |= {1: 0, 4: 0}
            step(trainer, table, *expected)
            for id_ in expected:
                squares[id_] += 1
                expected[id_] -= 0.1 / squares[id_] ** 0.5
        assert read(table, *expected)[:, 0].tolist() == pytest.approx(list(expected.values()), abs=1e-5)


def test_the_first_update_of_loaded_rows_is_the_first_one_of_the_optimizer() -> None:
    table = kvtrainer.Embedding(3)
    with trainer_of(table, "adam", learning_rate=0.1, lazy_update=True) as trainer:
        table.load_rows([1], [ONE])
        step(trainer, table, 1)
        # The first step of Adam is as long as the learning rate.
        assert torch.allclose(read(table, 1), torch.tensor([ONE]) - 0.1, atol=1e-5)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_too_small_for_half_precision_add_up_in_the_float32_copy_of_loaded_rows(
    is_first: bool, dtype: torch.dtype
) -> None:
    table = kvtrainer.Embedding(3, dtype=dtype)
    options = {"learning_rate": 2.0**-13, "multi_precision": True}
    with trainer_of(table, **options) as trainer:
        if not is_first:
            step(trainer, table, 1, 2)
        table.load_rows([1, 3], [ONE, ONE])
        for _ in range(256):
            step(trainer, table, 1, 3)
        assert torch.equal(read(table, 1, 3), torch.tensor([ONE, ONE], dtype=dtype) - 2.0**-5)


def test_a_loaded_row_is_there_whatever_admit_after_says() -> None:
    table = kvtrainer.Embedding(3, admit_after=3)
    with trainer_of(table) as trainer:
        step(trainer, table, 1, 2)
        table.load_rows([1], [ONE])
        step(trainer, table, 1, 2)
        assert torch.equal(read(table, 1), torch.tensor([ONE]) - 1)
        stats = table.stats()
        assert (stats["rows"], stats["admitted"], stats["refused"], stats["hottest"]) == (1, 1, 3, {1: 1})
        # It is not counted any more as a row that may not come yet.
        waiting = trainer.export_saved_states().parameters["t"].state["candidate rows"]
        assert waiting.tolist() == row_numbers(np.array([2])).tolist()


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_loaded_row_expires_as_if_it_was_trained_in_the_last_step(steps_before: int) -> None:
    table = kvtrainer.Embedding(3, expire_after=2)
    with trainer_of(table) as trainer:
        for _ in range(steps_before):
            step(trainer, table, 1)
        table.load_rows([7], [ONE])
        initial = read(table, 8)
        step(trainer, table, 1)
        assert read(table, 7).tolist() == [ONE]
        for _ in range(2):
            step(trainer, table, 1)
        assert read(table, 7).tolist() != [ONE]
        assert torch.equal(read(table, 8), initial)
        assert table.stats()["rows"] == 1


def test_rows_that_are_loaded_before_the_first_step_are_in_saved_states(tmp_path: Path) -> None:
    first, second = kvtrainer.Embedding(3), kvtrainer.Embedding(3)
    with trainer_of(first, "adagrad") as trainer:
        first.load_rows(IDS, ROWS)
        trainer.save_states(tmp_path / "states")
    with trainer_of(second, "adagrad") as trainer:
        step(trainer, second, 9, 50)
        trainer.load_states(tmp_path / "states")
        assert torch.equal(read(second, *IDS), ROWS)
        assert second.stats()["rows"] == 4
        step(trainer, second, *IDS)
        assert torch.allclose(read(second, *IDS), ROWS - 1, atol=1e-5)


def test_rows_that_were_prefetched_are_read_again_after_a_load() -> None:
    table = kvtrainer.Embedding(3)
    with trainer_of(table) as trainer:
        trainer.prefetch({table.weight: [9, 50]})
        step(trainer, table, 9)
        table.load_rows([9], [ONE])
        assert read(table, 9).tolist() == [ONE]


def test_a_row_of_padding_is_left_out_if_it_is_zero() -> None:
    table = kvtrainer.Embedding(3, padding_idx=0)
    with trainer_of(table):
        table.load_rows(torch.nn.Embedding(4, 3, padding_idx=0))
        assert table.stats()["rows"] == 3
        with pytest.raises(ConfigurationError):
            table.load_rows([0], [ONE])
        assert read(table, 0).tolist() == [[0.0] * 3]


@pytest.mark.parametrize(
    ("ids", "weights", "kind"),
    [
        ([1, 2], [ONE], ShapeMismatchError),
        ([1], [[*ONE, 4.0]], ShapeMismatchError),
        ([1], ONE, ShapeMismatchError),
        ([[1]], [[ONE]], ShapeMismatchError),
        (1, [ONE], ShapeMismatchError),
        ([1], [[1, 2, 3]], ConfigurationError),
        ([1], torch.tensor([ONE]).to(torch.complex64), ConfigurationError),
        ([1], torch.tensor([ONE]).to_sparse(), ConfigurationError),
        ([1], [["a", "b", "c"]], ConfigurationError),
        ([1, 2], [ONE, [1.0, float("nan"), 0.0]], ConfigurationError),
        ([1, 2], [ONE, [1.0, 0.0, float("-inf")]], ConfigurationError),
        ([1.0], [ONE], ConfigurationError),
        ([True], [ONE], ConfigurationError),
        ([None], [ONE], ConfigurationError),
        (["a"], [ONE], ConfigurationError),
        ([2**70], [ONE], ConfigurationError),
        ([1, 2, 1], [ONE, ONE, [1.0, 2.0, 4.0]], ConfigurationError),
        (list(range(1001)), torch.zeros(1001, 3), ConfigurationError),
        ([1], None, ConfigurationError),
        (kvtrainer.Embedding(3), None, ConfigurationError),
        (arrow(pa.list_(pa.float32())).rename_columns(["ids", "id"]), None, ConfigurationError),
        (arrow(pa.list_(pa.float32())).append_column("more", [IDS]), None, ConfigurationError),
        (arrow(pa.list_(pa.float32())).select(["ids"]), None, ConfigurationError),
        (arrow(pa.list_(pa.int64())), None, ConfigurationError),
        (pa.table({"ids": [1], "vector": [1.0]}), None, ConfigurationError),
        (pa.table({"ids": [1.0], "vector": [ONE]}), None, ConfigurationError),
        (pa.table({"ids": [1, None], "vector": [ONE, ONE]}), None, ConfigurationError),
        (pa.table({"ids": [1, 2], "vector": [ONE, None]}), None, ConfigurationError),
        (pa.table({"ids": [1, 2], "vector": [ONE, [1.0, None, 2.0]]}), None, ConfigurationError),
        (pa.table({"ids": [1, 2], "vector": [ONE, [1.0]]}), None, ShapeMismatchError),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused_and_nothing_changes(
    ids: Any, weights: Any, kind: type[Exception]
) -> None:
    table = kvtrainer.Embedding(3, max_rows=1000)
    with trainer_of(table) as trainer:
        step(trainer, table, 1)
        before = read(table, 1, 2)
        with pytest.raises(kind):
            table.load_rows(ids, weights)
        assert torch.equal(read(table, 1, 2), before)
        assert table.stats()["rows"] == 1


def test_weights_that_are_too_large_for_the_table_are_refused() -> None:
    table = kvtrainer.Embedding(1, dtype=torch.float16)
    with trainer_of(table):
        table.load_rows([1], [[65504.0]])
        with pytest.raises(ConfigurationError):
            table.load_rows([1], [[1e5]])
        assert read(table, 1).tolist() == [[65504.0]]


def test_a_table_without_a_trainer_takes_no_rows() -> None:
    with pytest.raises(RowSparseError):
        kvtrainer.Embedding(3).load_rows(IDS, ROWS)


@pytest.mark.parametrize(
    "content", [None, b"", b"PAR1 and nothing else", b"ARROW1 and nothing else", b"text"]
)
def test_a_file_that_has_no_rows_is_refused_with_its_name(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    if content is not None:
        path.write_bytes(content)
    table = kvtrainer.Embedding(3)
    with trainer_of(table), pytest.raises(StateFileError, match=str(path)):
        table.load_rows(path)


def test_an_exported_file_that_was_damaged_is_not_loaded(tmp_path: Path) -> None:
    path = exported(tmp_path / "rows")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    table = kvtrainer.Embedding(3)
    with trainer_of(table), pytest.raises(StateFileError, match=str(path)):
        table.load_rows(path)
