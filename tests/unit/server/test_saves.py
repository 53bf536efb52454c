"""Saving and loading by hand: all servers, one round, also another number of servers; complete or not at all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch

from kvstore_server.durable.snapshot_folder import SnapshotName, check_snapshot_tag
from kvstore_server.errors import (
    ConfigurationError,
    ProtocolError,
    RecoveryError,
    ServerLostState,
    UnknownNameError,
)
from kvstore_server.protocol import messages as m
from kvtrainer.client import session
from kvtrainer.client.client import Client, LoopbackTransport
from kvtrainer.client.session import SessionOptions
from tests.support.engines import plan_of
from tests.support.snapshots import Immediately, SnapshotJob, SnapshotServers, plain_engines
from tests.unit.server.test_snapshots import CASES, DENSE, FullDisk, adam

NEVER = 1000
Make = Callable[..., SnapshotServers]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Make]:
    made: list[SnapshotServers] = []

    def make(count: int = 2, every: int = NEVER) -> SnapshotServers:
        for one in made:
            one.close()
        made.append(SnapshotServers(tmp_path, count, every))
        return made[-1]

    yield make
    for one in made:
        one.close()


def saved_under(there: SnapshotServers, tag: str) -> list[int]:
    """How many saves of a tag each server has."""
    return [len(list(there.root.glob(f"server-{at}/save-{tag}.*"))) for at in range(there.count)]


def fill_disk(there: SnapshotServers, server: int, is_full: bool = True) -> None:
    snapshots = there.engines[server].snapshots
    assert snapshots is not None
    snapshots._run = FullDisk if is_full else Immediately


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_job_goes_on_from_what_was_saved_with_the_bits_of_an_undisturbed_run(
    case: str, count: int, servers: Make
) -> None:
    plan, optimizer, rows = CASES[case]
    job = SnapshotJob(servers(), plan, optimizer(), rows)
    job.train(6)
    job.save("half")
    job.train(9)
    others = servers(count)
    job = SnapshotJob(others, plan, optimizer(), rows, tag="half")
    assert job.round == 6
    weights, state = job.train(11), job.state()
    undisturbed = SnapshotJob(plain_engines(count), plan, optimizer(), rows)
    expected = undisturbed.train(11)
    assert all(torch.equal(weights[name], one) for name, one in expected.items())
    assert state == undisturbed.state()


def test_what_another_number_of_servers_has_loaded_can_be_saved_and_loaded_again(servers: Make) -> None:
    job = SnapshotJob(servers(3), DENSE, adam())
    job.train(4)
    job.save("a")
    job = SnapshotJob(servers(1), DENSE, adam(), tag="a")
    job.train(5)
    job.save("b")
    job = SnapshotJob(servers(2), DENSE, adam(), tag="b")
    weights, state = job.train(7), job.state()
    undisturbed = SnapshotJob(plain_engines(2), DENSE, adam())
    expected = undisturbed.train(7)
    assert torch.equal(weights["float32"], expected["float32"])
    assert state == undisturbed.state()


def test_small_tables_of_one_server_are_found_by_another_number_of_them(servers: Make) -> None:
    small = plan_of({"k": (4,)})
    job = SnapshotJob(servers(3), small, adam())
    expected = job.train(4)
    job.save("a")
    job = SnapshotJob(servers(2), small, adam(), tag="a")
    assert job.round == 4
    assert torch.equal(job.weights["float32"], expected["float32"])


def test_a_job_that_loads_goes_back_although_it_has_newer_snapshots(servers: Make) -> None:
    there = servers(2, 4)
    job = SnapshotJob(there, DENSE, adam())
    job.train(6)
    job.save("half")
    job.train(11)
    job = SnapshotJob(there, DENSE, adam(), tag="half")
    assert job.round == 6
    assert there.rounds() == [4]  # what is later belongs to a run that was given up


def test_a_worker_that_has_trained_already_is_told_that_the_job_has_gone_back(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam())
    job.train(3)
    job.save("a")
    SnapshotJob(there, DENSE, adam(), tag="a")
    with pytest.raises(ServerLostState, match="has loaded 'a'"):
        job.train(4)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_job_loads_a_tag_once_so_a_worker_that_is_started_again_goes_on(
    is_lost: bool, servers: Make
) -> None:
    there = servers(2, 4)
    job = SnapshotJob(there, DENSE, adam())
    job.train(2)
    job.save("a")
    there.lose()
    SnapshotJob(there, DENSE, adam(), tag="a").train(6)
    if is_lost:
        there.lose()
    assert SnapshotJob(there, DENSE, adam(), tag="a").round == (4 if is_lost else 6)


def test_a_worker_that_calls_load_while_another_one_tells_the_servers_tells_the_rest(
    servers: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = servers(3)
    job = SnapshotJob(there, DENSE, adam())
    job.train(4)
    job.save("half")
    job.close()
    loopback = partial(LoopbackTransport, list(there.engines), time.monotonic)
    first, second = (
        Client(loopback(), SessionOptions("job", rank, 2, address=f"h:{rank}", resumes=True), time.monotonic)
        for rank in range(2)
    )
    first.connect()
    second.connect()
    interrupt = Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(session, "failpoint", interrupt)
        with pytest.raises(KeyboardInterrupt):
            first.load("half")
    assert interrupt.mock_calls == [call("worker.connect.next_return")]
    assert ["job" in one._lineages for one in there.engines] == [True, False, False]
    second.load("half")
    assert [one._lineages["job"].generation for one in there.engines] == [1, 1, 1]
    assert {one._lineages["job"].round for one in there.engines} == {4}


def test_a_server_that_is_lost_after_all_have_loaded_follows_the_others(servers: Make) -> None:
    there = servers(2, 4)
    job = SnapshotJob(there, DENSE, adam())
    job.train(6)
    job.save("a")
    job.train(9)
    SnapshotJob(there, DENSE, adam(), tag="a")
    there.lose(1)
    assert SnapshotJob(there, DENSE, adam()).round == 6


def test_the_next_save_replaces_the_one_before(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam())
    for until in (2, 3):
        job.train(until)
        job.save("last")
    assert saved_under(there, "last") == [1, 1]
    there.lose()
    assert SnapshotJob(there, DENSE, adam(), tag="last").round == 3


def test_a_save_that_one_server_could_not_write_raises_and_the_one_before_stays(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam())
    job.train(2)
    job.save("last")
    job.train(3)
    fill_disk(there, 1)
    with pytest.raises(RecoveryError, match=r"server 1 could not save .*No space left"):
        job.save("last")
    assert saved_under(there, "last") == [1, 1]
    job.train(4)  # the job goes on
    fill_disk(there, 1, False)
    job.save("last")
    there.lose()
    assert SnapshotJob(there, DENSE, adam(), tag="last").round == 4


def test_a_save_that_was_interrupted_is_not_taken_for_one(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam())
    job.train(2)
    job.save("last")
    job.train(3)
    job.save("other")
    [part] = there.root.glob("server-0/save-other.*")
    # As if the worker had died after server 0 had written, and before server 1 has.
    name = part.name.replace("other", "last").split(".")
    job.client._session.call(0, m.Snapshot("save", 3, tag="last", save=f"{2:08x}{name[1][8:]}"))
    assert saved_under(there, "last") == [2, 1]
    there.lose()
    assert SnapshotJob(there, DENSE, adam(), tag="last").round == 2


def test_a_missing_part_is_named(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam())
    job.train(2)
    job.save("a")
    [part] = there.root.glob("server-1/save-a.*")
    shutil.rmtree(part)
    there.lose()
    with pytest.raises(ConfigurationError, match=r"does not find what servers \[1\] of 2"):
        SnapshotJob(there, DENSE, adam(), tag="a")


def test_a_damaged_part_is_found_before_anything_has_changed(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam())
    job.train(2)
    job.save("a")
    [part] = there.root.glob("server-1/save-a.*/tensors.safetensors")
    data = bytearray(part.read_bytes())
    data[-100] ^= 1
    part.write_bytes(data)
    with pytest.raises(RecoveryError, match="damaged"):
        SnapshotJob(there, DENSE, adam(), tag="a")
    job.train(3)  # it was not given up


def test_an_unknown_tag_is_named_with_those_that_there_are(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam())
    job.train(2)
    job.save("best")
    with pytest.raises(UnknownNameError, match=r"there is best\. Did you mean 'best'"):
        SnapshotJob(there, DENSE, adam(), tag="bast")


@pytest.mark.parametrize("tag", ["", ".hidden", "../up", "a/b", "a\n", "ä", "x" * 65, 5, "a\0"])
def test_what_is_no_tag_never_becomes_a_path(tag: object, servers: Make) -> None:
    with pytest.raises(ConfigurationError, match="a tag has"):
        check_snapshot_tag(tag)
    there = servers(1)
    job = SnapshotJob(there, DENSE, adam())
    for action in (
        ("find", "save", "keep", "drop", "check", "restore") if isinstance(tag, str) and tag else ()
    ):
        with pytest.raises((ConfigurationError, ProtocolError)):
            job.client._session.call(0, m.Snapshot(action, 1, 1, tag=tag, save="0" * 24))  # type: ignore[arg-type]


@pytest.mark.parametrize("save", ["", "../../../../up", "0" * 23, "G" * 24])
def test_what_is_no_save_never_becomes_a_path(save: str) -> None:
    with pytest.raises(ConfigurationError, match="24 hexadecimal digits"):
        _ = SnapshotName("job", 1, "tag", save).path


def test_a_server_without_a_directory_refuses_to_save_and_to_load() -> None:
    job = SnapshotJob(plain_engines(2), DENSE, adam())
    job.train(2)
    with pytest.raises(ConfigurationError, match="no --state-dir"):
        job.save("a")
    with pytest.raises(ConfigurationError, match="no --state-dir"):
        SnapshotJob(plain_engines(2), DENSE, adam(), tag="a")


def test_workers_that_do_not_resume_cannot_save(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam(), resumes=False)
    job.train(2)
    with pytest.raises(ConfigurationError, match=r"Trainer\.resume\(\)"):
        job.save("a")
    assert saved_under(there, "a") == [0, 0]


def test_another_round_than_that_of_the_servers_cannot_be_saved(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam())
    job.train(2)
    with pytest.raises(ConfigurationError, match=r"after round 3, because its keys are after \[2\]"):
        job._store.save("a", 3)
    assert saved_under(there, "a") == [0, 0]


def test_a_finished_job_leaves_what_was_saved_and_a_later_one_may_load_it(servers: Make) -> None:
    there = servers()
    job = SnapshotJob(there, DENSE, adam())
    job.train(3)
    job.save("a")
    job.close()
    assert SnapshotJob(there, DENSE, adam(), tag="a").round == 3


def test_pruning_leaves_what_was_saved_by_hand(servers: Make) -> None:
    there = servers(1, 1)
    job = SnapshotJob(there, DENSE, adam())
    job.train(3)
    job.save("a")
    job.train(9)
    assert saved_under(there, "a") == [1]
