"""Memory that outlives its process: the descriptor store, regions, the log, and the undo journal."""

from __future__ import annotations

import itertools
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore_server.durable.fd_store import (
    FdStoreDescriptor,
    SupervisorFdStore,
    descriptors_from_fd_store,
    fd_store_address,
)
from kvstore_server.durable.journal import (
    PLAN,
    PROGRESS,
    RANGES,
    ROWS,
    Journal,
    JournaledRanges,
    JournalPlan,
    JournalProgress,
    undo_journal_plan,
    undo_journal_ranges,
    undo_journal_rows,
)
from kvstore_server.durable.log import DurableLog, LogRecord, read_log_generation, read_log_records
from kvstore_server.durable.memory import DurableMemory, DurableRegion
from kvstore_server.errors import RecoveryError
from tests.support.durable import HeldDescriptors


class Held:
    """Memory of which a copy of what a crash leaves can be made."""

    def __init__(self) -> None:
        self.store = HeldDescriptors()
        self.records: list[tuple[int, bytes]] = []
        self.named: dict[int, str] = {}
        self.memory = DurableMemory(self.store, lambda number, _, key: self.named.update({number: key}))
        self.journal = Journal(self.memory, lambda what, data: self.records.append((what, data)))
        self.journal.begin_log(1, 1)

    def commit(self) -> None:
        self.records[:] = [
            (RANGES, self.journal.held()),
            *[(what, data) for what, data in self.records if what == PLAN],
        ]
        self.journal.commit(self.journal.change + 1)

    def undone(self) -> DurableMemory:
        """The memory of a next process, after it has undone what is not committed."""
        memory = DurableMemory(self.store, lambda *_: None)
        for name, fd in self.store.passed():
            number = int(name.rpartition("-")[2])
            memory.add(DurableRegion(number, self.named[number], fd))
        for what, data in reversed(self.records):
            if what != PLAN:
                (undo_journal_rows if what == ROWS else undo_journal_ranges)(memory, data)
        undo_journal_plan(memory, self.journal.change, [data for what, data in self.records if what == PLAN])
        return memory


@pytest.fixture
def held() -> Iterator[Held]:
    one = Held()
    yield one
    one.store.close()


# ---------------------------------------------------------------- the store


def test_only_own_descriptors_of_this_process_are_inherited() -> None:
    fd = os.memfd_create("x")
    variables = {"LISTEN_PID": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "kvstore-log-1:http", "OTHER": "1"}
    environ = dict(variables)
    assert descriptors_from_fd_store(environ, 8, fd) == []
    assert environ == {"OTHER": "1"}
    environ = dict(variables)
    assert descriptors_from_fd_store(environ, 7, fd) == [FdStoreDescriptor("kvstore-log-1", fd)]
    assert environ == {"OTHER": "1"}
    os.close(fd)


@pytest.mark.parametrize(
    ("count", "names"), [("2", "kvstore-a"), ("x", "kvstore-a"), ("1", "kvstore-a:kvstore-b")]
)
def test_variables_that_contradict_each_other_are_refused(count: str, names: str) -> None:
    with pytest.raises(RecoveryError):
        descriptors_from_fd_store({"LISTEN_PID": "7", "LISTEN_FDS": count, "LISTEN_FDNAMES": names}, 7)


def test_a_supervisor_that_keeps_no_descriptors_is_none() -> None:
    assert fd_store_address({"NOTIFY_SOCKET": "/run/x"}) is None
    assert fd_store_address({"NOTIFY_SOCKET": "/run/x", "FDSTORE": "0"}) is None
    assert fd_store_address({"FDSTORE": "9"}) is None
    assert fd_store_address({"NOTIFY_SOCKET": "@x", "FDSTORE": "9"}) == ("@x", 9)


@pytest.mark.parametrize("is_abstract", [False, True])
def test_descriptors_are_sent_with_their_names_and_waited_for(tmp_path: Path, is_abstract: bool) -> None:
    address = f"kvstore-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    supervisor.bind(f"\0{address}" if is_abstract else address)
    seen: list[tuple[str, bytes]] = []

    def read() -> None:
        for _ in range(3):
            data, fds, _, _ = socket.recv_fds(supervisor, 4096, 1)
            seen.append((data.decode(), os.pread(fds[0], 5, 0) if fds and b"FDSTORE=1" in data else b""))
            for fd in fds:
                os.close(fd)

    reader = threading.Thread(target=read)
    reader.start()
    store = SupervisorFdStore(f"@{address}" if is_abstract else address, 1)
    fd = os.memfd_create("x")
    os.write(fd, b"hello")
    store.store("kvstore-a", fd)
    assert seen == [("FDSTORE=1\nFDPOLL=0\nFDNAME=kvstore-a", b"hello"), ("BARRIER=1", b"")]
    with pytest.raises(RecoveryError, match="FDSTORE"):
        store.store("kvstore-b", fd)
    store.remove("kvstore-a")
    reader.join()
    assert seen[2:] == [("FDSTOREREMOVE=1\nFDNAME=kvstore-a", b"")]
    store.close()
    supervisor.close()
    os.close(fd)


def test_no_supervisor_at_the_address_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecoveryError, match="NOTIFY_SOCKET"):
        SupervisorFdStore(str(tmp_path / "nobody"), 1)


# ---------------------------------------------------------------- the log


def written(*records: tuple[int, bytes], generation: int = 3) -> int:
    """A log of these records, without the room behind its end."""
    log = DurableLog(os.memfd_create("log"), generation)
    for kind, data in records:
        log.append(kind, data[:1], data[1:])
    os.ftruncate(log.fd, log.end)
    return os.dup(log.fd)


RECORDS = [(1, b"what"), (2, b""), (7, bytes(range(256))), (2, b"last")]


def test_a_log_is_read_as_it_was_written() -> None:
    fd = written(*RECORDS)
    assert read_log_generation(fd) == 3
    assert list(read_log_records(fd)) == [LogRecord(*one) for one in RECORDS]


def test_a_log_grows_beyond_its_first_room() -> None:
    log = DurableLog(os.memfd_create("log"), 3)
    records = [LogRecord(at % 5, bytes([at]) * 5_000) for at in range(50)]
    for one in records:
        log.append(one.kind, one.data)
    assert list(read_log_records(log.fd)) == records


def test_bytes_behind_the_end_do_not_count() -> None:
    fd = written(*RECORDS)
    os.pwrite(fd, b"half a record", os.fstat(fd).st_size)
    assert list(read_log_records(fd)) == [LogRecord(*one) for one in RECORDS]


def test_every_flipped_bit_of_a_log_is_refused() -> None:
    fd = written(*RECORDS)
    whole = os.pread(fd, os.fstat(fd).st_size, 0)
    for at in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        copy = os.memfd_create("copy")
        os.write(copy, damaged)
        with pytest.raises(RecoveryError):
            list(read_log_records(copy))
        os.close(copy)


def test_every_truncated_log_is_refused() -> None:
    fd = written(*RECORDS)
    for size in range(os.fstat(fd).st_size):
        os.ftruncate(fd, os.fstat(fd).st_size)
        copy = os.memfd_create("copy")
        os.write(copy, os.pread(fd, size, 0))
        with pytest.raises(RecoveryError):
            list(read_log_records(copy))
        os.close(copy)


def test_random_damage_of_a_log_is_refused() -> None:
    rng, fd = random.Random(5), written(*[(rng_kind, bytes(40)) for rng_kind in range(1, 30)])
    whole = os.pread(fd, os.fstat(fd).st_size, 0)
    for _ in range(300):
        damaged = bytearray(whole)
        begin = rng.randrange(len(damaged))
        damaged[begin : begin + rng.randrange(1, 64)] = rng.randbytes(min(8, len(damaged) - begin))
        if damaged == whole:
            continue
        copy = os.memfd_create("copy")
        os.write(copy, damaged)
        with pytest.raises(RecoveryError):
            list(read_log_records(copy))
        os.close(copy)


def test_another_version_of_the_format_is_refused_by_name() -> None:
    fd = written(*RECORDS)
    os.pwrite(fd, struct.pack("<H", 77), 6)
    with pytest.raises(RecoveryError, match="version 77"):
        read_log_generation(fd)


# ---------------------------------------------------------------- memory


def test_a_region_is_found_by_its_key_and_by_addresses_in_it(held: Held) -> None:
    a, b = held.memory.take("a", 100), held.memory.take("b", 4096)
    assert held.memory.take("a", 100) is a
    assert held.memory.find(b.data[64:128]) == (b, 64, 128)
    assert held.memory.find(torch.zeros(4)) is None
    with pytest.raises(RecoveryError):
        held.memory.take("a", 101)


def test_dropped_regions_are_removed_from_the_store(held: Held) -> None:
    a, b = held.memory.take("a", 100), held.memory.take("b", 100)
    held.memory.drop_others([b.number])
    assert [one.name for one in held.store.fds] == [f"kvstore-memory-{b.number}"]
    assert held.memory.find(a.data[:8]) is None
    assert held.memory.take("a", 50).number > b.number


def test_memory_that_nothing_keeps_is_an_error(held: Held) -> None:
    def refuse(name: str, fd: int) -> None:
        raise RecoveryError("no")

    held.store.store = refuse  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        held.memory.take("a", 100)


# ---------------------------------------------------------------- the journal


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=12))
def test_ranges_give_each_number_once(added: list[tuple[int, int]]) -> None:
    ranges, known = JournaledRanges(), set[int]()
    for begin, length in added:
        news = [at for first, end in ranges.add(begin, begin + length) for at in range(first, end)]
        assert news == sorted(set(range(begin, begin + length)) - known)
        known |= set(news)
        parts = ranges.parts()
        assert [at for first, end in parts for at in range(first, end)] == sorted(known)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(parts))


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("range"), st.integers(0, 60), st.integers(1, 20)),
        st.tuples(
            st.just("rows"), st.sampled_from([2, 4]), st.sets(st.integers(0, 15), min_size=1, max_size=6)
        ),
        st.tuples(st.just("plan"), st.integers(0, 60), st.integers(1, 8)),
        st.tuples(st.just("commit"), st.just(0), st.just(0)),
        st.tuples(st.just("hold"), st.integers(0, 60), st.integers(1, 20)),
        st.tuples(st.just("release"), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@given(CHANGES, st.integers(0, 2**31))
def test_what_is_not_committed_is_undone(changes: list[tuple[str, int, object]], seed: int) -> None:
    one, rng = Held(), np.random.default_rng(seed)
    plans: dict[object, JournalPlan] = {}
    numbers = one.memory.take("a", 80).data
    numbers[:] = torch.from_numpy(rng.integers(0, 256, 80, np.uint8))
    committed, held_at = numbers.clone(), None
    for what, where, more in changes:
        if what == "range" or (what == "hold" and held_at is None):
            assert isinstance(more, int)
            part = numbers[where : min(where + more, 80)]
            one.journal.protect([part])
            if what == "hold":
                one.journal.hold("owner", [part])
                held_at = slice(where, min(where + more, 80))
            part[:] = torch.from_numpy(rng.integers(0, 256, len(part), np.uint8))
        elif what == "rows":
            assert isinstance(more, set)
            rows, ids = numbers[: 16 * where].view(16, where), torch.tensor(sorted(more))
            one.journal.protect_rows(rows, ids)
            rows[ids] = torch.from_numpy(rng.integers(0, 256, (len(ids), where), np.uint8))
        elif what == "plan":
            # Three parts, of which the process may not get to the last ones.
            assert isinstance(more, int)
            parts = [numbers[at : min(at + more, 80)] for at in range(where, where + 3 * more, more)]
            plan = plans.setdefault((where, more), one.journal.plan([part] for part in parts))
            is_by_plan = one.journal.begin_plan(plan)
            for at, part in enumerate(parts[: int(rng.integers(0, 4))]):
                if is_by_plan:
                    one.journal.protect_part(plan, at)
                else:
                    one.journal.protect([part])
                part[:] = torch.from_numpy(rng.integers(0, 256, len(part), np.uint8))
        elif what == "release":
            one.journal.release("owner")
            held_at = None
        elif what == "commit":
            # What is held stays as it was before; everything else counts.
            before = None if held_at is None else committed[held_at].clone()
            committed = numbers.clone()
            if held_at is not None:
                committed[held_at] = before
            one.commit()
    undone = one.undone().regions[1].data
    # Held bytes that were released since the last commit, too, are as they were at that commit.
    assert undone.tolist() == committed.tolist()
    one.store.close()


def test_progress_counts_only_for_the_change_and_the_plan_that_it_is_of(held: Held) -> None:
    progress, numbers = JournalProgress(held.memory.take(PROGRESS, JournalProgress.NBYTES)), list[list[int]]()
    progress.begin(7, 1)
    progress.count(5)
    # What a process finds that is killed after any of the stores of the next change.
    progress.numbers = Stores(progress.numbers, numbers)  # type: ignore[assignment]
    progress.begin(8, 2)
    for stored in numbers:
        assert (stored[2] == 0 and stored[1] == 2) or stored[0] != 8
    assert numbers[-1] == [8, 2, 0]


class Stores:
    """An array that keeps what it contains after each store."""

    def __init__(self, numbers: npt.NDArray[np.int64], after: list[list[int]]) -> None:
        self._numbers, self._after = numbers, after

    def __setitem__(self, at: int, number: int) -> None:
        self._numbers[at] = number
        self._after.append(self._numbers.tolist())


def test_a_plan_that_the_log_does_not_have_is_refused(held: Held) -> None:
    numbers = held.memory.take("a", 64).data
    plan = held.journal.plan([[numbers[:32]], [numbers[32:]]])
    assert held.journal.begin_plan(plan)
    held.journal.protect_part(plan, 1)
    held.records.clear()
    with pytest.raises(RecoveryError, match="plan 1"):
        held.undone()


def test_the_shadow_keeps_the_former_values(held: Held) -> None:
    numbers = held.memory.take("a", 64).data.view(torch.float32)
    numbers[:] = 1
    held.journal.protect([numbers])
    numbers[:] = 2
    held.commit()
    former = held.journal.former(numbers[4:8])
    assert former is not None
    assert former.tolist() == [1] * 4
    assert held.journal.former(torch.zeros(3)) is None
