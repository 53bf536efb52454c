"""Snapshots of a server: when they are taken, what is in them, what damages them, and how a job goes back to one."""

from __future__ import annotations

import logging
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import kvtrainer
from kvstore_server.durable import snapshot_folder
from kvstore_server.durable.snapshot_folder import SnapshotFolder, SnapshotName, read_snapshot_folder
from kvstore_server.engine.cut import read_spaces
from kvstore_server.errors import (
    ConfigurationError,
    KVStoreError,
    PlanMismatchError,
    RecoveryError,
    ServerLostState,
)
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import Plan, TensorSpec, make_plan
from tests.support.engines import plan_of, views
from tests.support.snapshots import Immediately, SnapshotJob, SnapshotServers, plain_engines

Make = Callable[..., SnapshotServers]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Make]:
    made: list[SnapshotServers] = []

    def make(count: int = 2, every: int = 4, **more: object) -> SnapshotServers:
        made.append(SnapshotServers(tmp_path, count, every, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


SHAPES = {"a": (3000, 4), "b": (64, 80), "c": (5,)}
DENSE = plan_of(SHAPES)
CASES: dict[str, tuple[Plan, Callable[[], Optimizer], dict[int, int]]] = {
    "momentum": (DENSE, lambda: kvtrainer.optimizer.create("sgd", learning_rate=0.1, momentum=0.9), {}),
    "adam": (DENSE, lambda: kvtrainer.optimizer.create("adam", learning_rate=0.1), {}),
    "whole keys": (DENSE, lambda: kvtrainer.optimizer.create("lamb", learning_rate=0.1), {}),
    "rows": (DENSE, lambda: kvtrainer.optimizer.create("adagrad", learning_rate=0.1), {0: 7}),
    "half": (
        plan_of(SHAPES, "bfloat16"),
        lambda: kvtrainer.optimizer.create("adam", learning_rate=0.1, multi_precision=True),
        {},
    ),
    "numbers": (DENSE, lambda: kvtrainer.optimizer.create("nadam", learning_rate=0.1), {}),
}


def adam() -> Optimizer:
    return CASES["adam"][1]()


@pytest.mark.parametrize("case", CASES)
def test_a_job_goes_on_from_its_snapshot_with_the_bits_of_an_undisturbed_run(
    case: str, servers: Make
) -> None:
    plan, optimizer, rows = CASES[case]
    there = servers()
    SnapshotJob(there, plan, optimizer(), rows).train(11)
    assert there.rounds(0) == there.rounds(1) == [4, 8]
    there.lose()
    job = SnapshotJob(there, plan, optimizer(), rows)
    assert job.round == 8
    weights, state = job.train(11), job.state()

    undisturbed = SnapshotJob(plain_engines(2), plan, optimizer(), rows)
    expected = undisturbed.train(11)
    assert all(torch.equal(weights[name], one) for name, one in expected.items())
    assert state == undisturbed.state()


@pytest.mark.parametrize("most", [0, 3], ids=["fixed", "elastic"])
def test_a_job_whose_members_change_goes_on_from_a_snapshot_of_either_kind_of_job(
    most: int, servers: Make
) -> None:
    there = servers()
    SnapshotJob(there, DENSE, adam(), most=most).train(11)
    assert there.rounds(0) == there.rounds(1) == [4, 8]
    there.lose()
    job = SnapshotJob(there, DENSE, adam(), most=2)
    assert job.round == 8
    expected = SnapshotJob(plain_engines(2), DENSE, adam()).train(11)
    assert all(torch.equal(expected[name], one) for name, one in job.train(11).items())


def test_members_are_not_taken_over_by_a_job_whose_number_of_workers_is_fixed(servers: Make) -> None:
    there = servers()
    SnapshotJob(there, DENSE, adam(), most=3).train(6)
    there.lose()
    with pytest.raises(ConfigurationError, match="KVSTORE_ELASTIC"):
        SnapshotJob(there, DENSE, adam())
    there.lose()
    assert SnapshotJob(there, DENSE, adam(), most=3).round == 4


def test_a_server_that_has_lost_nothing_goes_back_with_one_that_has(servers: Make) -> None:
    there = servers()
    former = SnapshotJob(there, DENSE, adam())
    expected = former.train(11)
    there.lose(1)
    job = SnapshotJob(there, DENSE, adam())
    assert job.round == 8
    assert all(torch.equal(expected[name], one) for name, one in job.train(11).items())
    with pytest.raises(ServerLostState):
        former.train(12)


def test_servers_go_back_to_the_latest_snapshot_that_all_have(servers: Make, tmp_path: Path) -> None:
    there = servers()
    SnapshotJob(there, DENSE, adam()).train(13)
    [latest] = tmp_path.glob("server-0/round-000000000012.*")
    shutil.rmtree(latest)
    there.lose()
    assert SnapshotJob(there, DENSE, adam()).round == 8
    assert there.rounds(1) == [4, 8]  # what is later belongs to a run that was given up


def test_a_server_without_tables_of_the_job_goes_back_with_the_others(tmp_path: Path, servers: Make) -> None:
    there = servers()
    small = plan_of({"k": (4,)})
    SnapshotJob(there, small, adam()).train(6)
    assert sorted([there.rounds(0), there.rounds(1)]) == [[], [4]]
    there.lose()
    assert SnapshotJob(there, small, adam()).round == 4


def test_the_latest_three_are_kept(servers: Make) -> None:
    there = servers(1, 2)
    SnapshotJob(there, DENSE, adam()).train(11)
    there.engines[0].tick(0.0)
    assert there.rounds() == [6, 8, 10]


def test_a_directory_holds_three_times_the_state_at_most(
    servers: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, sizes = servers(1, 2), list[int]()

    def size_of(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    # A point is passed when all of a snapshot was written and it has no name yet, too.
    monkeypatch.setattr(
        snapshot_folder, "failpoint", lambda name: sizes.append(size_of(there.root / "server-0"))
    )
    SnapshotJob(there, DENSE, adam()).train(21)
    latest = max(there.root.glob("server-0/round-*"))
    assert len(sizes) > 20
    assert 2.9 * size_of(latest) < max(sizes) < 3.1 * size_of(latest)


def test_workers_that_do_not_resume_get_no_snapshots_and_the_log_says_so_once(
    servers: Make, caplog: pytest.LogCaptureFixture
) -> None:
    there = servers(1, 2)
    with caplog.at_level(logging.WARNING):
        SnapshotJob(there, DENSE, adam(), resumes=False).train(7)
    assert there.rounds() == []
    assert [record.getMessage().count("Trainer.resume()") for record in caplog.records] == [1]


def test_a_script_that_does_not_resume_is_told_so(servers: Make) -> None:
    there = servers()
    SnapshotJob(there, DENSE, adam()).train(6)
    there.lose()
    with pytest.raises(ConfigurationError, match=r"trainer\.resume\(\)"):
        SnapshotJob(there, DENSE, adam(), resumes=False)


def test_another_model_or_optimizer_than_that_of_the_snapshot_is_refused(servers: Make) -> None:
    there = servers()
    SnapshotJob(there, DENSE, adam()).train(6)
    there.lose()
    with pytest.raises(ConfigurationError, match="'adam', and this one has 'sgd'"):
        SnapshotJob(there, DENSE, CASES["momentum"][1]())
    with pytest.raises(PlanMismatchError, match="'a'"):
        SnapshotJob(there, make_plan([TensorSpec("a", (3000, 5), "float32")], 1), adam())


def test_a_process_that_only_asks_how_the_last_round_has_ended_takes_no_cut(servers: Make) -> None:
    """It may not have ended on every server."""
    there = servers()
    SnapshotJob(there, DENSE, adam()).train(8)
    job = SnapshotJob(there, DENSE, adam())
    assert (job.round, there.rounds(0), there.rounds(1)) == (8, [4], [4])
    job.train(9)
    assert there.rounds(0) == there.rounds(1) == [4, 8]


def test_a_finished_job_that_had_gone_back_leaves_nothing_to_the_next_one_of_its_name(servers: Make) -> None:
    there = servers()
    SnapshotJob(there, DENSE, adam()).train(6)
    there.lose(1)
    job = SnapshotJob(there, DENSE, adam())
    job.train(6)
    job.close()
    there.lose(1)
    SnapshotJob(there, DENSE, adam()).train(6)
    assert SnapshotJob(there, DENSE, adam()).round == 6


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_servers_than_that_of_the_snapshot_is_refused(servers: Make, count: int) -> None:
    there = servers()
    SnapshotJob(there, DENSE, adam()).train(6)
    there.close()
    others = servers(count)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=f"of 2 servers, and this job has {count}"):
            SnapshotJob(others, DENSE, adam())


def test_a_finished_job_leaves_no_snapshots(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam())
    job.train(6)
    job.close()
    assert there.rounds(0) == there.rounds(1) == []
    there.lose()
    assert SnapshotJob(there, DENSE, adam()).round == 1


def test_a_disk_that_is_full_leaves_nothing_half_written_and_training_goes_on(
    servers: Make, caplog: pytest.LogCaptureFixture
) -> None:
    there = servers(1)
    job = SnapshotJob(there, DENSE, adam())
    job.train(6)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        job.train(10)
        facts = there.engines[0].snapshots.facts()  # type: ignore[union-attr]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert there.rounds() == [4]
    assert not list(there.root.glob("server-0/.tmp-*"))
    assert "File too large" in facts["problem"]
    assert any(str(there.root / "server-0") in record.getMessage() for record in caplog.records)
    job.train(14)  # there is room again
    assert there.rounds() == [4, 12]
    assert there.engines[0].snapshots.facts()["problem"] == ""  # type: ignore[union-attr]


def test_a_slow_disk_delays_the_next_snapshot_and_not_training(servers: Make) -> None:
    pending: list[Callable[[], None]] = []

    class Slow:
        error = None

        def __init__(self, function: Callable[[], None]) -> None:
            self.is_done = False
            pending.append(self.finish)
            self._function = function

        def finish(self) -> None:
            self._function()
            self.is_done = True

        def is_over(self, seconds: float = 0.0) -> bool:
            return self.is_done

    there = servers(1, 2, run=Slow)
    job = SnapshotJob(there, DENSE, adam())
    job.train(7)
    assert len(pending) == 1
    pending[0]()  # what was copied at round 2 is not changed by the rounds since then
    [snapshot] = there.engines[0].snapshots._folder.all()  # type: ignore[union-attr]
    [space] = read_spaces(snapshot)
    expected = SnapshotJob(plain_engines(1), DENSE, adam()).train(2)
    found = torch.cat([space.slices[0, slice_.index].weights for slice_ in DENSE.slices])
    for mine, theirs in zip(views(DENSE, {"float32": found}), views(DENSE, expected), strict=True):
        assert torch.equal(mine, theirs)
    job.train(9)
    assert len(pending) == 2


def test_a_directory_serves_one_process_at_a_time(tmp_path: Path) -> None:
    first = SnapshotFolder(str(tmp_path), 0)
    with pytest.raises(ConfigurationError, match="another process uses"):
        SnapshotFolder(str(tmp_path), 0)
    SnapshotFolder(str(tmp_path), 1).close()
    first.close()
    SnapshotFolder(str(tmp_path), 0).close()


def test_what_a_process_left_half_written_is_removed_at_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / "server-0" / ".tmp-123-1"
    left.mkdir(parents=True)
    (left / "tensors.safetensors").write_bytes(b"half")
    SnapshotFolder(str(tmp_path), 0).close()
    assert not left.exists()


class FullDisk:
    """Runs nothing, as if there were no room."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: BaseException | None = OSError(28, "No space left on device")

    def is_over(self, seconds: float = 0.0) -> bool:
        return True


class Never(FullDisk):
    """Runs nothing, as if the disk had come to a halt."""

    def is_over(self, seconds: float = 0.0) -> bool:
        return False


def damage(data: bytes, draw: random.Random) -> bytes:
    """Flip a bit, cut some bytes off, or add some."""
    at = draw.randrange(len(data))
    way = draw.randrange(4)
    if way == 0:
        return data[:at]
    if way == 1:
        return data[:at] + bytes([draw.randrange(256)]) + data[at:]
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_no_damage_is_accepted_and_every_one_is_a_recovery_error(count: int, tmp_path: Path) -> None:
    folder = SnapshotFolder(str(tmp_path), 0)
    name = SnapshotName("job", 4)
    folder.write(name, {"holders": [0], "text": "x" * 300}, {"0/image": torch.arange(500, dtype=torch.uint8)})
    path = tmp_path / "server-0" / name.path
    whole = {one: (path / one).read_bytes() for one in ("manifest.json", "tensors.safetensors")}
    draw = random.Random(5)
    for _ in range(count):
        which = draw.choice(sorted(whole))
        damaged = damage(whole[which], draw)
        (path / which).write_bytes(damaged)
        with pytest.raises(RecoveryError):
            list(read_snapshot_folder(path).tensors())
        (path / which).write_bytes(whole[which])
    assert [one for one, _ in read_snapshot_folder(path).tensors()] == ["0/image"]
    folder.close()


def test_a_server_without_memory_for_a_snapshot_holds_nothing_of_it(servers: Make) -> None:
    there = servers(1)
    SnapshotJob(there, DENSE, adam()).train(6)
    there.lose()
    engine = there.engines[0]
    engine.budget._limit = 20_000
    with pytest.raises(ConfigurationError, match="--max-memory"):
        SnapshotJob(there, DENSE, adam())
    assert not any(space.tables for space in engine.namespaces.values())
    engine.budget._limit = 0
    assert SnapshotJob(there, DENSE, adam()).round == 4


def test_a_damaged_snapshot_is_put_aside_and_the_next_start_goes_back_to_the_one_before(
    servers: Make,
) -> None:
    there = servers(1)
    SnapshotJob(there, DENSE, adam()).train(10)
    [latest] = there.root.glob("server-0/round-000000000008.*")
    data = bytearray((latest / "tensors.safetensors").read_bytes())
    data[-100] ^= 1
    (latest / "tensors.safetensors").write_bytes(data)
    there.lose()
    with pytest.raises(RecoveryError, match="damaged"):
        SnapshotJob(there, DENSE, adam())
    assert SnapshotJob(there, DENSE, adam()).round == 4
    [aside] = there.root.glob("server-0/damaged-*")  # to be looked at
    assert aside.name == f"damaged-{latest.name}"


@pytest.mark.parametrize("is_full", [False, True])
def test_a_server_that_writes_slowly_or_fails_leaves_a_snapshot_that_all_have(
    is_full: bool, servers: Make
) -> None:
    there = servers(2, 2)
    job = SnapshotJob(there, DENSE, adam())
    job.train(7)
    slow = there.engines[1].snapshots
    assert slow is not None
    slow._run = FullDisk if is_full else Never
    expected = job.train(31)
    assert there.rounds(1) == [2, 4, 6]
    assert 6 in there.rounds(0)
    assert len(there.rounds(0)) <= 3
    there.lose()
    job = SnapshotJob(there, DENSE, adam())
    assert job.round == 6
    assert all(torch.equal(one, expected[name]) for name, one in job.train(31).items())


def test_a_snapshot_that_is_written_while_the_job_goes_back_does_not_appear(servers: Make) -> None:
    """It is of rounds that were given up, and the next ones have other numbers of the same name."""
    there = servers(2, 4)
    job = SnapshotJob(there, DENSE, adam())
    job.train(9)
    pending: list[Callable[[], None]] = []

    class Slow(Never):
        def __init__(self, function: Callable[[], None]) -> None:
            pending.append(function)

    snapshots = there.engines[0].snapshots
    assert snapshots is not None
    snapshots._run = Slow
    job.train(13)
    [write] = pending
    there.lose(1)
    snapshots._run = Immediately
    assert SnapshotJob(there, DENSE, adam()).round == 8
    with pytest.raises(KVStoreError, match="not needed"):
        write()
    assert there.rounds(0) == [4, 8]
    assert not list(there.root.glob("server-0/.tmp-*"))


def test_the_memory_for_copies_is_claimed_before_it_is_taken_and_returned_after_the_job(
    servers: Make,
) -> None:
    there = servers(1, 2)
    budget, snapshots = there.engines[0].budget, there.engines[0].snapshots
    assert snapshots is not None
    job = SnapshotJob(there, DENSE, adam())
    job.train(2)
    without = budget.used
    budget._limit = without + 1000
    job.train(3)
    assert snapshots._buffer.nbytes == 0
    assert budget.used == without
    assert "--max-memory" in snapshots.facts()["problem"]
    budget._limit = 0
    job.train(5)
    assert budget.used == without + snapshots._buffer.nbytes > without
    job.close()
    assert (budget.used, snapshots._buffer.nbytes) == (0, 0)


def test_a_period_in_seconds_takes_snapshots_of_the_same_rounds_on_all_servers(servers: Make) -> None:
    there = servers(2, 0, seconds=1e-9)
    SnapshotJob(there, DENSE, adam()).train(6)
    assert there.rounds(0) == there.rounds(1) == [3, 4, 5]
    there.lose()
    assert SnapshotJob(there, DENSE, adam()).round == 5


def test_without_a_period_nothing_is_taken_but_by_hand(servers: Make) -> None:
    there = servers(2, 0)
    SnapshotJob(there, DENSE, adam()).train(6)
    assert there.rounds(0) == there.rounds(1) == []


def test_tables_that_never_end_as_many_rounds_are_named_once(
    servers: Make, caplog: pytest.LogCaptureFixture
) -> None:
    there = servers(1, 2)
    first, second = (SnapshotJob(there, DENSE, adam(), number=number) for number in (1, 2))
    first.train(3)
    with caplog.at_level(logging.WARNING):
        second.train(13)
    assert there.rounds() == []
    assert [record.getMessage().count("have not ended as many rounds") for record in caplog.records] == [1]


def test_two_trainers_that_take_turns_have_snapshots(servers: Make) -> None:
    there = servers(2, 4)
    jobs = [SnapshotJob(there, DENSE, adam(), number=number) for number in (1, 2)]
    for until in range(2, 11):
        for job in jobs:
            job.train(until)
    assert there.rounds(0) == there.rounds(1) == [4, 8]
