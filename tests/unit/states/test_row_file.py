"""Exported rows: what is in the file, lookups in it, and a clear error for whatever is wrong with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvtrainer
from kvtrainer.errors import ConfigurationError, KVStoreError, RowSparseError, StateFileError
from kvtrainer.states.row_file import write_row_file

BIG = 2**63 - 1
IDS = [5, -7, 2**53 + 1, BIG, 0, -BIG - 1]
OTHERS = [[6, 2**53], [-8, 5]]


def trained(path: Path, steps: int = 1, **options: Any) -> tuple[kvtrainer.Embedding, Tensor]:
    """Export a table of which IDS have had gradients of 1; the table as it reads then, of IDS and OTHERS."""
    table = kvtrainer.Embedding(3, **options)
    with kvtrainer.Trainer([("t", table.weight)], "sgd", {"learning_rate": 0.5}, kvstore="local") as trainer:
        for _ in range(steps):
            table(torch.tensor(IDS)).sum().backward()
            trainer.step(1)
            table.weight.grad = None
        table.export(path)
        return table, table(torch.tensor([*IDS, *OTHERS[0], *OTHERS[1]])).detach()


def test_the_public_package_reads_an_exported_file(tmp_path: Path) -> None:
    _, rows = trained(tmp_path / "rows", init="constant", scale=2.0)
    found = load_file(tmp_path / "rows")
    assert found["ids"].tolist() == sorted(IDS)
    assert torch.equal(found["weights"], torch.full((6, 3), 1.5))
    assert rows[:6].tolist() == [[1.5] * 3] * 6
    with safe_open(tmp_path / "rows", framework="pt") as opened:
        said = opened.metadata()
    assert {name: said[name] for name in ("name", "dim", "init", "scale", "seed")} == {
        "name": "t", "dim": "3", "init": "constant", "scale": "2.0", "seed": "0",
    }  # fmt: skip
    assert "padding_idx" not in said


@pytest.mark.parametrize("init", ["normal", "uniform", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_lookup_has_the_bits_of_the_table_also_for_ids_that_are_not_in_the_file(
    init: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    _, rows = trained(tmp_path / "rows", init=init, scale=0.1, seed=-3, dtype=dtype, padding_idx=6)
    file = kvtrainer.RowFile(tmp_path / "rows")
    assert (len(file), file.weights.dtype) == (6, dtype)
    assert torch.equal(file.lookup(IDS), rows[:6])
    assert torch.equal(file.lookup(torch.tensor(OTHERS)), rows[6:].view(2, 2, 3))
    assert torch.equal(kvtrainer.lookup(tmp_path / "rows", OTHERS), rows[6:].view(2, 2, 3))
    assert file.lookup(6).tolist() == [0.0] * 3
    assert file.lookup(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 3)


def test_a_file_without_rows_has_initial_values_for_all_ids(tmp_path: Path) -> None:
    _, rows = trained(tmp_path / "rows", steps=0)
    file = kvtrainer.RowFile(tmp_path / "rows")
    assert len(file) == 0
    assert torch.equal(file.lookup(IDS), rows[:6])
    file.verify()


def test_rows_that_have_expired_are_not_exported(tmp_path: Path) -> None:
    table = kvtrainer.Embedding(2, expire_after=2)
    with kvtrainer.Trainer([("t", table.weight)], "sgd", {"learning_rate": 1.0}, kvstore="local") as trainer:
        for ids in ([1, 2], [2], [3]):
            table(torch.tensor(ids)).sum().backward()
            trainer.step(1)
            table.weight.grad = None
        table.export(tmp_path / "rows")
    assert kvtrainer.RowFile(tmp_path / "rows").ids.tolist() == [2, 3]


def test_the_rows_are_mapped_and_a_write_to_them_does_not_reach_the_file(tmp_path: Path) -> None:
    trained(tmp_path / "rows")
    before = (tmp_path / "rows").read_bytes()
    file = kvtrainer.RowFile(tmp_path / "rows")
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in maps if line[-1] == str(tmp_path / "rows")]
    for tensor in (file.ids, file.weights):
        assert any(int(begin, 16) <= tensor.data_ptr() < int(end, 16) for begin, end in ranges)
    file.weights.zero_()
    assert (tmp_path / "rows").read_bytes() == before


def test_the_rows_as_a_module_of_torch(tmp_path: Path) -> None:
    trained(tmp_path / "rows")
    file = kvtrainer.RowFile(tmp_path / "rows")
    module, ids = file.to_embedding(), torch.tensor([[0, 5], [BIG, -7]])
    assert torch.equal(module(torch.searchsorted(file.ids, ids)), file.lookup(ids))
    assert not module.weight.requires_grad
    assert module.weight.data_ptr() == file.weights.data_ptr()


def test_a_process_that_serves_needs_no_trainer(tmp_path: Path) -> None:
    trained(tmp_path / "rows", init="constant", scale=4.0)
    code = (
        "import sys, kvtrainer\n"
        f"print(kvtrainer.lookup({str(tmp_path / 'rows')!r}, [5, 6])[:, 0].tolist())\n"
        "print('kvtrainer.trainer' in sys.modules, 'kvtrainer.kvstore' in sys.modules, 'zmq' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[3.5, 4.0]", "False False False"]


def test_equal_tables_give_equal_bytes_and_a_file_is_replaced(tmp_path: Path) -> None:
    trained(tmp_path / "one")
    (tmp_path / "two").write_bytes(b"former")
    trained(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["one", "two"]


def test_an_export_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    trained(tmp_path / "rows")
    before = (tmp_path / "rows").read_bytes()
    table = kvtrainer.RowFile(tmp_path / "rows")._table

    def slices() -> Any:
        yield torch.tensor([1]).numpy(), torch.ones(1, 3)
        raise KVStoreError("a server is gone")

    with pytest.raises(KVStoreError) as caught:
        write_row_file(tmp_path / "rows", table, slices())
    assert type(caught.value) is KVStoreError
    assert (tmp_path / "rows").read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["rows"]


def test_a_table_is_not_exported_to_where_there_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(StateFileError) as caught:
        trained(tmp_path / "none" / "rows")
    assert isinstance(caught.value, FileNotFoundError)


def test_a_table_without_a_trainer_has_no_rows_to_export(tmp_path: Path) -> None:
    with pytest.raises(RowSparseError):
        kvtrainer.Embedding(3).export(tmp_path / "rows")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ids", [[1.0], [True], ["a"]])
def test_an_id_that_is_no_integer_is_not_looked_up(ids: Any, tmp_path: Path) -> None:
    trained(tmp_path / "rows")
    with pytest.raises(ConfigurationError):
        kvtrainer.lookup(tmp_path / "rows", ids)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def other_tensors(**tensors: Tensor) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with safe_open(path, framework="pt") as opened:
            said = opened.metadata()
        save_file({**{name: one.clone() for name, one in load_file(path).items()}, **tensors}, path, said)

    return write


def other_metadata(**changes: str | None) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with safe_open(path, framework="pt") as opened:
            said = {**opened.metadata(), **changes}
        tensors = {name: one.clone() for name, one in load_file(path).items()}
        save_file(tensors, path, {name: value for name, value in said.items() if value is not None})

    return write


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: cut(path, 0),
        lambda path: cut(path, 7),
        lambda path: cut(path, 100),
        lambda path: cut(path, path.stat().st_size - 1),
        lambda path: torch.save(torch.ones(3), path),
        lambda path: save_file({"ids": torch.ones(3), "weights": torch.ones(3)}, path),
        other_tensors(ids=torch.tensor([5, 4, 1, 2, 3, 6])),
        other_tensors(ids=torch.tensor([1, 2, 3, 3, 4, 5])),
        other_tensors(ids=torch.arange(5)),
        other_tensors(ids=torch.arange(6, dtype=torch.int32)),
        other_tensors(weights=torch.ones(6, 4)),
        other_tensors(weights=torch.ones(18)),
        other_tensors(weights=torch.ones(6, 3, dtype=torch.int64)),
        other_tensors(weights=torch.ones(6, 3).to(torch.float8_e5m2)),
        other_tensors(more=torch.ones(1)),
        other_metadata(version="2"),
        other_metadata(format="kvtrainer saved states"),
        other_metadata(seed=None),
        other_metadata(seed="a"),
        other_metadata(init="xavier"),
        other_metadata(scale="nan"),
        other_metadata(padding_idx="none"),
    ],
)  # fmt: skip
def test_a_file_that_is_damaged_or_of_another_kind_is_refused_with_its_name(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    trained(tmp_path / "rows")
    damage(tmp_path / "rows")
    with pytest.raises(StateFileError, match=str(tmp_path / "rows")):
        kvtrainer.RowFile(tmp_path / "rows")


@pytest.mark.parametrize(("name", "kind"), [("none", FileNotFoundError), (".", IsADirectoryError)])
def test_a_file_that_cannot_be_read_is_an_error_of_the_system_too(
    name: str, kind: type[OSError], tmp_path: Path
) -> None:
    with pytest.raises(StateFileError) as caught:
        kvtrainer.RowFile(tmp_path / name)
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize("tensors", [{"weights": torch.ones(6, 3)}, {"ids": torch.arange(6)}])
def test_other_weights_or_ids_than_were_written_are_found_by_verify(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    trained(tmp_path / "rows")
    kvtrainer.RowFile(tmp_path / "rows").verify()
    other_tensors(**tensors)(tmp_path / "rows")
    with pytest.raises(StateFileError, match=str(tmp_path / "rows")):
        kvtrainer.RowFile(tmp_path / "rows").verify()
