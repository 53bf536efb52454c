"""Rows of hash tables in files on a disk: the bits of rows in memory, and a disk that is full before it is too late."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvstore_server.durable import spill_folder
from kvstore_server.durable.spill_folder import SpilledMemory, SpillFolder
from kvstore_server.errors import ConfigurationError, OptimizerError
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import HASH_SLICES, HashTableOptions
from kvstore_server.protocol.rows import RowSet
from kvstore_server.shard.hash_table import HashTable, no_claim
from tests.support.durable import HeldDescriptors, crash_at
from tests.support.one_in import one_in
from tests.support.restarts import Job
from tests.unit.server.test_hash_table import EVERY_OPTIMIZER, optimizer_and_options, read, sorted_rows
from tests.unit.server.test_restarts import CASES, SERVER_POINTS, undisturbed

WIDTH = 2048
"""Elements of a row: so a few rows need more than the blocks that are allocated in advance."""
Made = tuple[Optimizer, dict[str, Any]]


def table_in(
    folder: SpillFolder | None, dtype: str = "float32", width: int = WIDTH, **options: Any
) -> HashTable:
    files = None if folder is None else SpilledMemory(folder)
    return HashTable("t", width, dtype, HashTableOptions(**options), room=20_000, spilled=files)


def update(table: HashTable, ids: range, made: Made, value: float = 1.0) -> None:
    """Update rows like a server: with a check before, after which the disk has blocks for all that is written."""
    rows, _ = sorted_rows(ids)
    optimizer, hyper = made
    table.check_update([rows], no_claim, optimizer, hyper)
    dtype = torch.float64 if table.dtype is torch.float64 else torch.float32
    grads = torch.full((len(rows), table.width), value, dtype=dtype)
    before = blocks_of(table)
    table.update(RowSet(torch.from_numpy(rows), grads), np.ones(len(rows), np.int64), optimizer, hyper)
    for array in table._arrays() if table._spilled is not None else ():
        for nbytes in before[array.data_ptr()]:
            assert nbytes >= array[: table.slots.end].nbytes


def blocks_of(table: HashTable) -> dict[int, list[int]]:
    """For the address of each file: the bytes for which it, and the file that protects it, have blocks."""
    files = () if table._spilled is None else table._spilled._files.values()
    return {file.arena.data.data_ptr(): [os.fstat(fd).st_blocks * 512 for fd in file.fds] for file in files}


@pytest.fixture
def folder(tmp_path: Path) -> SpillFolder:
    return SpillFolder(str(tmp_path))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the system refuse blocks with an error number; 0: it has some again."""
    allocate, number = os.posix_fallocate, 0

    def fill(error: int) -> None:
        nonlocal number
        number = error

    def posix_fallocate(fd: int, begin: int, nbytes: int) -> None:
        if number:
            raise OSError(number, os.strerror(number))
        allocate(fd, begin, nbytes)

    monkeypatch.setattr(spill_folder.os, "posix_fallocate", posix_fallocate)
    return fill


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize(
    ("dtype", "optimizer"), one_in(3, ["float32", "float64", "bfloat16"], EVERY_OPTIMIZER)
)
def test_rows_in_files_have_the_bits_of_rows_in_memory(
    dtype: str, optimizer: tuple[str, dict[str, Any]], folder: SpillFolder
) -> None:
    name, options = optimizer
    multi = {"multi_precision": True} if dtype == "bfloat16" and ":" not in name else {}
    made = optimizer_and_options(name, {**options, **multi})
    rules = {"expire_after": 4, "max_rows": 300, "width": 8}
    tables = [table_in(one, dtype, **rules) for one in (folder, None)]
    for table in tables:
        for step in range(12):
            update(table, range(70 * step, 70 * step + 130), made, 0.5 + step)
        if name != "adagrad":
            table.forget_state()
            update(table, range(60), optimizer_and_options("adagrad", {"learning_rate": 0.1}))
    spilled, plain = tables
    assert plain.stats().evicted > 100
    assert spilled.stats() == plain.stats()
    assert torch.equal(read(spilled, range(1000)), read(plain, range(1000)))
    for number in range(HASH_SLICES):
        found, expected = spilled.slice_state(number), plain.slice_state(number)
        assert found.keys() == expected.keys()
        assert all([
            torch.equal(one, two) if isinstance(two, Tensor) else one == two
            for one, two in zip(found.values(), expected.values(), strict=True)
        ])  # fmt: skip


def test_pages_that_memory_has_no_room_for_come_back_from_the_disk(folder: SpillFolder) -> None:
    table, made = (
        table_in(folder, init="constant", scale=0.0),
        optimizer_and_options("sgd", {"learning_rate": 1.0}),
    )
    update(table, range(500), made, 3.0)
    assert table._spilled is not None
    for file in table._spilled._files.values():
        file.arena._map.flush()
        file.arena._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(file.fds[0], 0, 0, os.POSIX_FADV_DONTNEED)
    update(table, range(250), made, 1.0)
    assert read(table, range(501))[:, ::99].unique_consecutive(dim=0)[:, 0].tolist() == [-4.0, -3.0, 0.0]


def test_files_have_no_names_and_their_blocks_are_free_when_a_table_ends(tmp_path: Path) -> None:
    table = table_in(SpillFolder(str(tmp_path)))
    update(table, range(100), optimizer_and_options("adagrad", {"learning_rate": 0.1}))
    assert os.listdir(tmp_path) == []
    assert table._spilled is not None
    descriptors = [fd for file in table._spilled._files.values() for fd in file.fds]
    nodes = [os.fstat(fd).st_ino for fd in descriptors]
    assert len(nodes) == 2
    del table
    open_now = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    assert not open_now & set(nodes)


def _is_open(fd: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_a_file_system_that_knows_no_files_without_a_name_has_no_file_left_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file, asked = os.open, []

    def refuse(path: Any, flags: int, *others: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            asked.append(path)
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return open_file(path, flags, *others, **named)

    monkeypatch.setattr(spill_folder.os, "open", refuse)
    table = table_in(SpillFolder(str(tmp_path)), init="constant", scale=0.0)
    update(table, range(100), optimizer_and_options("sgd", {"learning_rate": 1.0}))
    assert len(asked) == 2
    assert os.listdir(tmp_path) == []
    assert read(table, range(100)).unique().tolist() == [-1.0]


# ---------------------------------------------------------------- a disk that is full


@pytest.mark.parametrize(("dtype", "optimizer"), one_in(2, ["float32", "bfloat16"], EVERY_OPTIMIZER))
def test_rows_and_their_state_are_only_where_the_disk_has_blocks(
    dtype: str, optimizer: tuple[str, dict[str, Any]], folder: SpillFolder
) -> None:
    name, options = optimizer
    multi = {"multi_precision": True} if dtype == "bfloat16" and ":" not in name else {}
    made = optimizer_and_options(name, {**options, **multi})
    table = table_in(folder, dtype)
    for last in (600, 1, 1500):
        update(table, range(last), made)
    assert len(blocks_of(table)) == len(table._arrays())


def test_an_array_of_the_state_that_comes_with_other_options_has_blocks_first(folder: SpillFolder) -> None:
    table = table_in(folder)
    optimizer, hyper = optimizer_and_options("sgd", {"learning_rate": 0.1, "lazy_update": True})
    update(table, range(600), (optimizer, hyper))
    assert len(table._arrays()) == 1
    update(table, range(1), (optimizer, {**hyper, "momentum": 0.9}))
    assert len(table._arrays()) == 2


def test_an_update_without_rows_before_there_are_any_changes_nothing(folder: SpillFolder) -> None:
    table, made = table_in(folder), optimizer_and_options("adagrad", {"learning_rate": 0.1})
    update(table, range(0), made)
    assert len(table) == 0
    update(table, range(3), made)
    assert len(table) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_update_for_which_the_disk_has_no_blocks_changes_nothing(
    number: int, folder: SpillFolder, full_disk: Callable[[int], None]
) -> None:
    table, made = table_in(folder), optimizer_and_options("adagrad", {"learning_rate": 0.1})
    update(table, range(100), made)
    before, stats = read(table, range(2000)), table.stats()
    full_disk(number)
    with pytest.raises(OptimizerError) as caught:
        update(table, range(2000), made)
    assert folder.path in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert torch.equal(read(table, range(2000)), before)
    assert table.stats() == stats
    update(table, range(100), made)  # rows that are there need no blocks
    assert not torch.equal(read(table, range(100)), before[:100])
    full_disk(0)
    update(table, range(2000), made)
    assert table.stats().rows == 2000


@pytest.mark.parametrize("rows", [0, 600])
def test_the_first_update_changes_nothing_if_there_are_no_blocks_for_the_state(
    rows: int, folder: SpillFolder, full_disk: Callable[[int], None]
) -> None:
    table, made = table_in(folder), optimizer_and_options("adagrad", {"learning_rate": 0.1})
    if rows:
        update(table, range(rows), optimizer_and_options("sgd", {"learning_rate": 0.1}))
        table.forget_state()
    before = read(table, range(600))
    full_disk(errno.ENOSPC)
    with pytest.raises(OptimizerError):
        update(table, range(600), made)
    assert torch.equal(read(table, range(600)), before)
    assert not table.has_state
    full_disk(0)
    update(table, range(600), made)


def test_rows_are_not_loaded_for_which_the_disk_has_no_blocks(
    folder: SpillFolder, full_disk: Callable[[int], None]
) -> None:
    source, table = (table_in(folder) for _ in range(2))
    for one in (source, table):
        update(one, range(5000), optimizer_and_options("adagrad", {"learning_rate": 0.1}))
    update(source, range(100_000, 114_000), optimizer_and_options("adagrad", {"learning_rate": 0.1}))
    before, loaded = read(table, range(5000)), 0
    full_disk(errno.ENOSPC)
    with suppress(OptimizerError):
        for number in range(HASH_SLICES):
            table.put_slice_state(number, 2, source.slice_state(number))
            loaded += 1
    # The slice that did not fit has not changed, and neither have others.
    assert loaded < HASH_SLICES - 1
    rows = [len(table.slice_state(number)["rows"]) for number in range(HASH_SLICES)]  # type: ignore[arg-type]
    of_source = [len(source.slice_state(number)["rows"]) for number in range(HASH_SLICES)]  # type: ignore[arg-type]
    assert rows[:loaded] == of_source[:loaded]
    assert sum(rows[loaded:]) + sum(of_source[:loaded]) == table.stats().rows < 19_000
    assert torch.equal(read(table, range(5000)), before)
    full_disk(0)
    for number in range(HASH_SLICES):
        table.put_slice_state(number, 2, source.slice_state(number))
    assert table.stats().rows == 19_000
    assert torch.equal(read(table, range(100_000, 114_000)), read(source, range(100_000, 114_000)))
    update(table, range(100_000, 114_000), optimizer_and_options("adagrad", {"learning_rate": 0.1}))


def test_state_is_not_loaded_for_which_the_disk_has_no_blocks(
    folder: SpillFolder, full_disk: Callable[[int], None]
) -> None:
    source, table = (table_in(folder) for _ in range(2))
    update(source, range(600), optimizer_and_options("adagrad", {"learning_rate": 0.1}))
    update(table, range(600), optimizer_and_options("sgd", {"learning_rate": 0.1}))
    before = table.slice_state(0)
    full_disk(errno.ENOSPC)
    with pytest.raises(OptimizerError):
        table.put_slice_state(0, 1, source.slice_state(0))
    after = table.slice_state(0)
    assert after.keys() == before.keys()
    assert torch.equal(after["weights"], before["weights"])  # type: ignore[arg-type]


def test_rows_that_were_loaded_without_state_get_blocks_for_it(folder: SpillFolder) -> None:
    source, table = (table_in(folder) for _ in range(2))
    made = optimizer_and_options("adagrad", {"learning_rate": 0.1})
    update(source, range(3000), optimizer_and_options("sgd", {"learning_rate": 0.1}))
    update(table, range(10), made)
    for number in range(HASH_SLICES):
        table.put_slice_state(number, 0, source.slice_state(number))
    update(table, range(10), made)
    assert len(table._arrays()) == 2


def test_rows_that_are_there_need_no_blocks(
    folder: SpillFolder, full_disk: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_folder, "_LEAST_AHEAD", 0)
    monkeypatch.setattr(spill_folder, "_MOST_AHEAD", 0)
    table = table_in(folder, init="constant", scale=0.0)
    made = optimizer_and_options("sgd", {"learning_rate": 1.0})
    update(table, range(1000), made)
    full_disk(errno.ENOSPC)
    update(table, range(50), made)
    assert read(table, range(1000))[:, 0].tolist() == [-2.0] * 50 + [-1.0] * 950


def test_a_disk_with_too_little_room_is_not_filled_first(
    folder: SpillFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, made = table_in(folder), optimizer_and_options("sgd", {"learning_rate": 0.1})
    update(table, range(100), made)
    before = blocks_of(table)
    monkeypatch.setattr(SpillFolder, "free", 10_000_000)
    with pytest.raises(OptimizerError, match="10000000 are free"):
        update(table, range(5000), made)
    assert blocks_of(table) == before


# ---------------------------------------------------------------- the directory


@pytest.mark.parametrize("name", ["missing", "file", "/proc"])
def test_a_directory_in_which_no_file_can_be_made_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=f"--spill-dir .*{name}"):
        SpillFolder(str(tmp_path / name))


@pytest.mark.skipif(spill_folder._file_system_of("/dev/shm") != "tmpfs", reason="/dev/shm is not in memory")
def test_a_directory_in_memory_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        SpillFolder("/dev/shm")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "/dev/shm" in caplog.text


def test_a_table_has_room_for_what_fits_on_the_disk(tmp_path: Path) -> None:
    table = HashTable(
        "t", 1 << 20, "float32", HashTableOptions(), spilled=SpilledMemory(SpillFolder(str(tmp_path)))
    )
    total = shutil.disk_usage(tmp_path).total
    assert min(total, 1 << 43) // (4 << 20) in (table.room, table.room + 1)


# ---------------------------------------------------------------- durable servers


@pytest.mark.parametrize(
    ("point", "nth"),
    one_in(
        12, [one for one in SERVER_POINTS if "snapshot" not in one and "recovery" not in one], [1, 2, 4, 9]
    ),
)
def test_a_killed_server_goes_on_with_the_files_of_its_former_process(
    point: str, nth: int, folder: SpillFolder
) -> None:
    store = HeldDescriptors()
    with crash_at((point, nth)):
        job = Job(CASES["hash table"], store, spill=folder)
        job.run()
    assert job.facts() == undisturbed("hash table")
    assert Job(CASES["hash table"], store, spill=folder).facts() == undisturbed("hash table")
    on_disk = os.stat(folder.path).st_dev
    assert (
        sum([os.fstat(one.fd).st_dev == on_disk for one in store.fds]) == 4
    )  # weights, state, and their shadows
    store.close()
    assert os.listdir(folder.path) == []


def test_a_restarted_server_allocates_blocks_for_rows_and_for_what_protects_them(folder: SpillFolder) -> None:
    store = HeldDescriptors()
    Job(CASES["hash table"], store, spill=folder).run()
    job = Job(CASES["hash table"], store, spill=folder)
    [table] = job.engine.namespaces["job"].shard.hash_tables.values()
    for _ in range(2):  # rows come with their second gradient
        update(table, range(300_000), optimizer_and_options("adagrad", {"learning_rate": 0.1}))
    assert table._spilled is not None
    assert [len(file.fds) for file in table._spilled._files.values()] == [2, 2]
    assert min(map(min, blocks_of(table).values())) > 300_000 * 16
    store.close()
