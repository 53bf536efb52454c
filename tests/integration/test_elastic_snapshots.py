"""Jobs whose members change go on from snapshots after everything is lost, with the workers that come then.

They end with the bits of a plain loop with the same members in the same steps.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.probe import probe_servers
from kvtrainer.errors import ConfigurationError, DeadlineError
from kvtrainer.kvstore import DistKVStore
from tests.integration.test_elastic import first_weights, gradient, plain_loop, sgd
from tests.support.limits import LIMIT
from tests.support.processes import Process, Processes, eventually, together

BEFORE = [(0, 1, 2)] * 2 + [(1, 2)] * 6
"""The members of each step, until everything is lost. Rank 0, which asks for snapshots, leaves when one is due."""
EVERY = 3
GOES_BACK_TO = 5
"""The first step that is lost: the newest snapshot is that of round 6, and round 0 gives the first values."""
END = 8
NAME = "job"
SGD = "torch:SGD", {"learning_rate": 0.1, "momentum": 0.9}
LIMITS = "--dead-after", "2", "--rejoin-timeout", "0.5"


def start_servers(processes: Processes, folder: Path, count: int = 2, *more: str) -> list[str]:
    flags = "--state-dir", str(folder), "--snapshot-every", str(EVERY), "--spread-from", "1", *LIMITS, *more
    return [one.address for one in processes.servers(count, *flags)]


def open_store(addresses: Sequence[str], rank: int, **options: Any) -> DistKVStore:
    more = {"num_workers": 3, "elastic": "1..4", "timeout": LIMIT, "dead_after": LIMIT, **options}
    return DistKVStore("dist_sync", rank=rank, servers=list(addresses), namespace=NAME, **more)


class Worker:
    """A worker of such a job, which takes part in steps from where the servers let it begin."""

    def __init__(self, addresses: Sequence[str], rank: int, tag: str = "", **options: Any) -> None:
        self.rank = rank
        self.weights = {key: torch.nn.Parameter(value) for key, value in first_weights().items()}
        self.store = open_store(addresses, rank, **options)
        if tag:
            self.store.load(tag)
        self.trainer = kvtrainer.Trainer(self.weights, *SGD, kvstore=self.store)
        self.start = self.trainer.resume()

    def step(self, step: int) -> None:
        given = gradient({key: one.detach() for key, one in self.weights.items()}, self.rank, step)
        for key, grad in given.items():
            self.weights[key].grad = grad
        self.trainer.client_state = {"rank": self.rank, "step": step}
        self.trainer.step()

    def train(self, end: int) -> None:
        """Make the steps up to one."""
        for step in range(self.trainer.round, end):
            self.step(step)

    def end(self) -> dict[str, Tensor]:
        """End it, as at the end of a script; its weights."""
        self.trainer.close()
        self.store.close()
        return {key: one.detach() for key, one in self.weights.items()}


def live(rank: str, folder: str, tag: str, *addresses: str) -> None:
    """Be a worker of the first job: take part in the steps of BEFORE, say so, and make one more if told to."""
    worker = Worker(addresses, int(rank))
    for step, ranks in enumerate(BEFORE):
        if worker.rank not in ranks:
            worker.trainer.leave()
            worker.end()
            return
        if step == GOES_BACK_TO - 1 and not tag:  # the disk may be slow
            assert eventually(lambda: have_snapshots(addresses))
        worker.step(step)
        if tag and worker.rank == 2 and step == GOES_BACK_TO - 1:
            worker.store.save(tag)
    print("ready", flush=True)
    sys.stdin.readline()
    worker.step(len(BEFORE))
    worker.end()


@contextmanager
def first_job(folder: Path, tag: str = "", *flags: str) -> Iterator[list[Process]]:
    """Run the first job until the steps of BEFORE are made; its workers. At the end of the block all are killed."""
    with Processes() as processes:
        addresses = start_servers(processes, folder, 2, *flags)
        module = "tests.integration.test_elastic_snapshots"
        workers = [
            processes.start([sys.executable, "-m", module, str(rank), str(folder), tag, *addresses])
            for rank in range(3)
        ]
        assert workers[0].end() == (0, "")
        for worker in workers[1:]:
            assert worker.line() == "ready"
        newest = [] if tag else [1 + GOES_BACK_TO]
        assert eventually(lambda: all(rounds_of(folder, at)[-1:] == newest for at in range(2)))
        yield workers


def have_snapshots(addresses: Sequence[str]) -> bool:
    """Whether all servers know that a snapshot is complete, and so can take another one."""
    facts = [one["snapshots"] for one in probe_servers(addresses, LIMIT) if one is not None]
    return len(facts) == len(addresses) and all(one["latest"] and not one["is_writing"] for one in facts)


def rounds_of(folder: Path, server: int) -> list[int]:
    """The rounds of the complete snapshots of a server."""
    found = (folder / f"server-{server}").glob("round-*")
    return sorted(int(path.name[len("round-") :].partition(".")[0]) for path in found)


@pytest.fixture(scope="module")
def lost_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost") / "snapshots"
    with first_job(folder):
        return folder


@pytest.fixture
def snapshots(lost_job: Path, tmp_path: Path) -> Path:
    """The directory of a job that was lost."""
    return Path(shutil.copytree(lost_job, tmp_path / "snapshots"))


def expected(members: Sequence[Sequence[int]], end: int = END) -> dict[str, Tensor]:
    """The weights of a plain loop whose members were these from the lost step on."""
    return plain_loop([*BEFORE[:GOES_BACK_TO], *members], sgd, None)[end - 1]


def go_on(addresses: Sequence[str], ranks: Sequence[int], **options: Any) -> list[Any]:
    """Run the second job with these ranks; what each has: where it began, its members there, and its weights."""

    def work(rank: int) -> tuple[Any, tuple[int, ...], dict[str, Tensor]]:
        worker = Worker(addresses, rank, **options)
        members = worker.trainer.members
        worker.train(END)
        return worker.start, members, worker.end()

    return together(*[lambda rank=rank: work(rank) for rank in ranks])


def check(found: Sequence[Any], ranks: Sequence[int], first_state_of: dict[int, int]) -> None:
    """Check that all have begun together after the snapshot, and ended with the weights of a plain loop.

    `first_state_of`: rank → that whose `client_state` it begins with.
    """
    weights = expected([ranks] * (END - GOES_BACK_TO))
    for rank, one in zip(ranks, found, strict=True):
        if isinstance(one, BaseException):
            raise one
        start, members, own = one
        assert start.round == GOES_BACK_TO
        assert start.client_state == {"rank": first_state_of[rank], "step": GOES_BACK_TO - 1}
        assert members == tuple(ranks)
        assert all(torch.equal(own[key], weights[key]) for key in weights)


COMERS = {
    "all that were members": ((1, 2), {1: 1, 2: 2}),
    "a member and a new rank": ((1, 3), {1: 1, 3: 1}),
    "one of the members": ((2,), {2: 2}),
    "only others": ((0, 3), {0: 1, 3: 1}),
}
"""Ranks that come → whose `client_state` each of them begins with."""


@pytest.mark.parametrize(
    ("ranks", "states"),
    [
        pytest.param(*one, id=name, marks=pytest.mark.full if name == "one of the members" else ())
        for name, one in COMERS.items()
    ],
)
def test_a_job_that_loses_everything_goes_on_with_the_workers_that_come(
    ranks: Sequence[int], states: dict[int, int], snapshots: Path
) -> None:
    with Processes() as processes:
        found = go_on(start_servers(processes, snapshots), ranks, elastic=f"{len(ranks)}..4")
        check(found, ranks, states)
        assert eventually(lambda: rounds_of(snapshots, 0) == rounds_of(snapshots, 1) == [])


def test_a_rank_that_comes_when_the_others_have_begun_joins_after_their_step(snapshots: Path) -> None:
    with Processes() as processes:
        addresses = start_servers(processes, snapshots)
        others = together(*[lambda rank=rank: Worker(addresses, rank, elastic="2..4") for rank in (1, 2)])

        def has_asked() -> bool:
            return any(0 in one["view"]["joining"] for one in others[0].trainer._pipeline.binding.stats())

        def wait_and_step(worker: Worker) -> None:
            assert eventually(has_asked) if worker is others[0] else True
            worker.step(GOES_BACK_TO)

        late, *_ = together(
            lambda: Worker(addresses, 0, elastic="2..4"),
            *[lambda one=one: wait_and_step(one) for one in others],
        )
        assert late.start == (GOES_BACK_TO + 1, {"rank": 1, "step": GOES_BACK_TO})
        together(*[lambda one=one: one.train(END) for one in (late, *others)])
        weights = expected([(1, 2), (0, 1, 2), (0, 1, 2)])
        for one in (late, *others):
            assert all(torch.equal(value, weights[key]) for key, value in one.end().items())


def test_a_job_that_is_lost_again_goes_back_to_what_its_present_members_have_asked_for(
    snapshots: Path,
) -> None:
    with Processes() as processes:
        addresses = start_servers(processes, snapshots, 2, "--snapshot-every", "1")
        worker = Worker(addresses, 2)
        worker.train(GOES_BACK_TO + 2)
        assert eventually(lambda: all(max(rounds_of(snapshots, at)) > GOES_BACK_TO + 1 for at in range(2)))
    newest = min(max(rounds_of(snapshots, at)) for at in range(2))
    with Processes() as processes:
        [(start, members, own)] = go_on(start_servers(processes, snapshots), (3,))
        assert (start.round, members) == (newest - 1, (3,))
        schedule = [(2,)] * (start.round - GOES_BACK_TO) + [(3,)] * (END - start.round)
        assert all(torch.equal(own[key], value) for key, value in expected(schedule).items())


def test_too_few_workers_do_not_begin(snapshots: Path) -> None:
    with Processes() as processes:
        addresses = start_servers(processes, snapshots)
        [error] = together(lambda: Worker(addresses, 1, elastic="3..4", timeout=1.0))
        assert isinstance(error, DeadlineError)
        assert "rank 2 never connected" in str(error)


def test_what_a_member_has_saved_is_loaded_by_other_members_on_other_servers(tmp_path: Path) -> None:
    with first_job(tmp_path, "half", "--snapshot-every", "0"):
        pass
    with Processes() as processes:
        addresses = start_servers(processes, tmp_path, 3, "--snapshot-every", "0")
        found = go_on(addresses, (1, 3), tag="half", elastic="2..4")
        check(found, (1, 3), {1: 1, 3: 1})


def test_a_job_that_finishes_without_a_lost_worker_leaves_no_snapshots(tmp_path: Path) -> None:
    with first_job(tmp_path) as (_, lost, last):
        lost.signal(signal.SIGKILL)
        last.go()
        assert last.end()[0] == 0
        assert eventually(lambda: rounds_of(tmp_path, 0) == rounds_of(tmp_path, 1) == [])


def test_a_job_with_a_fixed_number_of_workers_cannot_go_on_from_a_snapshot_of_members(
    snapshots: Path,
) -> None:
    with Processes() as processes:
        addresses = start_servers(processes, snapshots)
        for refused in ({"elastic": None}, {"elastic": "1..4", "backup_workers": 1}):
            with pytest.raises(ConfigurationError):
                open_store(addresses, 1, **refused)
        assert rounds_of(snapshots, 0)[-1] == 1 + GOES_BACK_TO
        check(go_on(addresses, (1, 2), elastic="2..4"), (1, 2), {1: 1, 2: 2})


if __name__ == "__main__":
    live(*sys.argv[1:])
