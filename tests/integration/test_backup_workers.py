"""Jobs with backup workers: each step takes the gradients of those that are fast enough, and has the bits of a loop
with these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import DistKVStore
from tests.integration.test_elastic import first_weights, gradient, plain_loop, sgd
from tests.support.cluster_work import train_with_pauses
from tests.support.one_in import one_in
from tests.support.processes import Process, eventually, new_name, together
from tests.support.stores import Servers, servers

STEPS = 15
HELD = {2: (3, 7), 1: (10, 12)}
"""Rank → the first step that it is late for, and the one until whose end it is."""


def adam(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, lr=0.01)


class BackupJob:
    """Three workers as threads of the test, of which each step takes two; HELD says who is late when."""

    def __init__(self, places: Sequence[Process], **options: Any) -> None:
        self.addresses, self.options = [one.address for one in places], options
        self.name = new_name()
        self.done = [threading.Event() for _ in range(STEPS)]
        self.members: list[set[int]] = [set() for _ in range(STEPS)]
        self.last: dict[int, Mapping[str, Tensor]] = {}
        self.left_out: dict[int, int] = {}
        self.rates: dict[tuple[int, int], float] = {}
        """(rank, step) → the learning rate of the step."""

    def store(self, rank: int, **options: Any) -> DistKVStore:
        more = {"num_workers": 3, "elastic": "1..3", "backup_workers": 1, "timeout": 30.0, **options}
        return DistKVStore("dist_sync", rank=rank, servers=self.addresses, namespace=self.name, **more)

    def run(self, optimizer: str, hypers: dict[str, Any]) -> None:
        for outcome in together(*[lambda rank=rank: self.live(rank, optimizer, hypers) for rank in range(3)]):
            if isinstance(outcome, BaseException):
                raise outcome

    def live(self, rank: int, optimizer: str, hypers: dict[str, Any]) -> None:
        weights = {key: torch.nn.Parameter(value) for key, value in first_weights().items()}
        store = self.store(rank)
        trainer = kvtrainer.Trainer(weights, optimizer, hypers, kvstore=store, **self.options)
        assert trainer.resume().round == trainer.round == 0
        while (step := trainer.round) < STEPS:
            first, last = HELD.get(rank, (STEPS, 0))
            if first <= step <= last:
                assert self.done[last].wait(30.0)
            assert trainer.members == (0, 1, 2)
            for key, grad in gradient({k: w.detach() for k, w in weights.items()}, rank, step).items():
                weights[key].grad = grad
            missed = trainer.num_left_out
            trainer.client_state = {"step": step}
            trainer.step()
            assert trainer.client_state == {"step": trainer.round - 1}
            if trainer.num_left_out == missed:
                assert trainer.round == step + 1
                self.members[step].add(rank)
                self.rates[rank, step] = round(float(trainer.last.lr or 0.0), 9) if trainer.last else 0.0
            assert trainer.num_left_out - missed in (0, trainer.round - step)
            for event in self.done[: trainer.round] if rank == 0 else ():
                event.set()
        assert trainer.round == STEPS
        self.last[rank] = {key: w.detach().clone() for key, w in weights.items()}
        self.left_out[rank] = trainer.num_left_out
        trainer.close()
        store.close()


@pytest.fixture(scope="module")
def on_servers() -> Iterator[Servers]:
    with servers("--spread-from", "1") as started:
        yield started


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("name", "hypers", "by_torch"),
    [("torch:SGD", {"lr": 0.1, "momentum": 0.9}, sgd), ("torch:Adam", {"lr": 0.01}, adam)],
)
def test_a_worker_that_is_late_holds_nobody_up_and_takes_part_again(
    name: str,
    hypers: dict[str, Any],
    by_torch: Any,
    transport: str,
    num_servers: int,
    on_servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", transport)
    job = BackupJob(on_servers.of(num_servers))
    job.run(name, hypers)
    assert all(len(ranks) == 2 for ranks in job.members)
    assert job.members[3:8] == [{0, 1}] * 5
    assert job.members[10:13] == [{0, 2}] * 3
    assert job.left_out == {rank: sum([rank not in one for one in job.members]) for rank in range(3)}
    expected = plain_loop([sorted(ranks) for ranks in job.members], by_torch, None)[-1]
    for weights in job.last.values():
        for key, weight in expected.items():
            assert torch.allclose(weights[key], weight, rtol=0.0, atol=1e-6)
            assert torch.equal(weights[key], job.last[0][key])


@pytest.mark.usefixtures("forked_cluster")
@pytest.mark.parametrize(("transport", "num_servers"), one_in(3, ["shm", "tcp"], [1, 2]))
def test_processes_that_are_stopped_for_a_while_take_part_again(
    transport: str, num_servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", transport)
    flags = ["--spread-from", "1"]
    pauses = {3: (3, 10), 1: (12, 15)}
    with kvtrainer.local_cluster("2..4", num_servers, server_args=flags, backup_workers=1) as cluster:
        found = cluster.run(train_with_pauses, str(tmp_path), 20, pauses)
    check_totals(found, 20)
    members = [{rank for rank, (given, _, _) in enumerate(found) if step in given} for step in range(20)]
    assert members[3:10] == [{0, 1, 2}] * 7
    assert members[12:15] == [{0, 2, 3}] * 3


def test_counts_schedules_and_limits_are_those_of_the_others_after_a_worker_was_late(
    on_servers: Servers,
) -> None:
    options = {
        "clip_grad": {"max_norm": 0.5},
        "schedules": [{"policy": "step", "step": [2, 6, 9, 13], "by_epoch": False}],
    }
    job = BackupJob(on_servers.of(2), **options)
    job.run("adam", {"learning_rate": 0.1})
    rates = [{rate for (_, at), rate in job.rates.items() if at == step} for step in range(STEPS)]
    assert rates == [{0.1}] * 2 + [{0.01}] * 4 + [{0.001}] * 3 + [{0.0001}] * 4 + [{0.00001}] * 2
    for weights in job.last.values():
        assert all(torch.equal(weight, job.last[0][key]) for key, weight in weights.items())


class Members:
    """Workers as threads, whose loops say what else they do before a step."""

    def __init__(self, places: Sequence[Process], **options: Any) -> None:
        self.addresses, self.name, self.options = [one.address for one in places], new_name(), options
        self.given: dict[int, set[int]] = {}
        """Step → the ranks whose gradients it took."""

    def train(self, rank: int, before: Callable[[int, kvtrainer.Trainer], bool] = lambda *_: True) -> Any:
        """Train as long as `before` says so; the weights at the end."""
        options = {"num_workers": 3, "elastic": "1..4", "backup_workers": 1, "timeout": 60.0, **self.options}
        store = DistKVStore("dist_sync", rank=rank, servers=self.addresses, namespace=self.name, **options)
        weights = {key: torch.nn.Parameter(value) for key, value in first_weights().items()}
        trainer = kvtrainer.Trainer(weights, "torch:SGD", {"lr": 0.1, "momentum": 0.9}, kvstore=store)
        trainer.resume()
        while (step := trainer.round) < STEPS and before(step, trainer):
            for key, grad in gradient({k: w.detach() for k, w in weights.items()}, rank, step).items():
                weights[key].grad = grad
            missed = trainer.num_left_out
            trainer.step()
            if trainer.num_left_out == missed:
                self.given.setdefault(step, set()).add(rank)
        if not trainer._pipeline.binding.is_closed:
            trainer.close()
            store.close()
        return {key: weight.detach().clone() for key, weight in weights.items()}

    def check(self, found: Sequence[Any]) -> None:
        """The weights are those of a loop with the ranks whose gradients counted."""
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
        expected = plain_loop([sorted(self.given[step]) for step in range(STEPS)], sgd, None)[-1]
        for weights in found:
            assert all(torch.equal(weights[key], weight) for key, weight in expected.items())


def test_a_worker_joins_a_job_with_backup_workers(on_servers: Servers) -> None:
    job, may_join, has_joined = Members(on_servers.of(2)), threading.Event(), threading.Event()

    def at(step: int, trainer: kvtrainer.Trainer) -> bool:
        if step >= 4:
            may_join.set()
        # The last steps wait for the one that joins, the first of them until it has asked: it joins at the end of one.
        return step < STEPS - 4 or eventually(lambda: has_joined.is_set() or has_asked(trainer))

    def has_asked(trainer: kvtrainer.Trainer) -> bool:
        views = [one["view"] for one in trainer._pipeline.binding.stats() if "view" in one]
        return any(3 in view["joining"] for view in views)

    def is_member(step: int, trainer: kvtrainer.Trainer) -> bool:
        has_joined.set()
        return trainer.members == (0, 1, 2, 3)

    def join() -> Any:
        assert may_join.wait(30.0)
        return job.train(3, is_member)

    found = together(*[lambda rank=rank: job.train(rank, at) for rank in range(3)], join)
    job.check(found)
    sizes = [len(job.given[step]) for step in range(STEPS)]
    assert set(sizes[:4]) == {2}
    assert sizes[-1] == 3


def test_a_worker_leaves_a_job_with_backup_workers(on_servers: Servers) -> None:
    job, has_left = Members(on_servers.of(2)), threading.Event()

    def leaves(step: int, trainer: kvtrainer.Trainer) -> bool:
        if step >= 5:
            trainer.leave()
            has_left.set()
        return step < 5

    def stays(step: int, trainer: kvtrainer.Trainer) -> bool:
        return step < 8 or has_left.wait(30.0)

    *found, _ = together(
        lambda: job.train(0, stays), lambda: job.train(1, stays), lambda: job.train(2, leaves)
    )
    job.check(found)
    sizes = [len(job.given[step]) for step in range(STEPS)]
    assert sizes[:4] == [2] * 4
    assert set(sizes[8:]) == {1}


def test_a_worker_that_fails_does_not_end_a_job_with_backup_workers() -> None:
    with servers("--spread-from", "1", "--rejoin-timeout", "0.3", "--dead-after", "1.0") as started:
        job = Members(started.of(2))

        def fails(step: int, trainer: kvtrainer.Trainer) -> bool:
            if step >= 5:
                trainer.__exit__(ValueError, ValueError("it fails here"), None)
            return step < 5

        def is_alone(step: int, trainer: kvtrainer.Trainer) -> bool:
            if step == STEPS - 2:
                assert eventually(lambda: 2 not in members_of(trainer))
            return True

        *found, _ = together(
            lambda: job.train(0, is_alone), lambda: job.train(1), lambda: job.train(2, fails)
        )
        job.check(found)
        sizes = [len(job.given[step]) for step in range(STEPS)]
        assert sizes[:4] == [2] * 4
        assert sizes[-1] == 1


def members_of(trainer: kvtrainer.Trainer) -> list[int]:
    [view] = [one["view"] for one in trainer._pipeline.binding.stats()[:1]]
    return list(view["members"])


def run_with_a_death(point: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Take 30 steps with 4 workers and 2 servers, one of which kills itself at a failpoint and comes back."""
    monkeypatch.setenv("KVSTORE_FAILPOINT", point)
    monkeypatch.setenv("KVSTORE_FAILPOINT_DIR", str(folder))
    with kvtrainer.local_cluster(
        "2..4", 2, server_args=["--spread-from", "1"], restart=1, backup_workers=1
    ) as cluster:
        found: list[Any] = cluster.run(train_with_pauses, str(folder), 30, {})
    assert [path.name for path in folder.iterdir()]
    return found


@pytest.mark.usefixtures("forked_cluster")
@pytest.mark.parametrize(
    "point", one_in(3, ["server.commit.logged@1:50", "server.commit.begin@0:40", "server.commit.begin@1:61"])
)
def test_servers_that_come_back_go_on_with_those_that_count(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_with_a_death(point, tmp_path, monkeypatch)
    check_totals(found, 30)


@pytest.mark.usefixtures("forked_cluster")
def test_workers_that_are_killed_and_started_again_take_part_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_with_a_death("worker.round.committed@2:9", tmp_path, monkeypatch)
    totals = {key: found[0][2][key] for key in "abc"}
    assert [weights for _, _, weights in found] == [totals] * 4
    [total] = totals["a"]
    # Of rank 2 it is not known which steps its first process has given to.
    counts = [sum(step in given for step in range(30)) for given, _, _ in found]
    counts[2] = 90 - counts[0] - counts[1] - counts[3]
    assert total == -sum([count * 10.0**rank for rank, count in enumerate(counts)])


def check_totals(found: Sequence[tuple[list[int], int, dict[str, set[float]]]], steps: int) -> None:
    """Each step has taken three of four workers, each once, on all servers."""
    members = [{rank for rank, (given, _, _) in enumerate(found) if step in given} for step in range(steps)]
    assert all(len(ranks) == 3 for ranks in members)
    total = -sum([10.0**rank for ranks in members for rank in ranks])
    assert [weights for _, _, weights in found] == [{key: {total} for key in "abc"}] * 4
    assert sum([left_out for _, left_out, _ in found]) == steps


def test_what_all_workers_have_to_do_in_the_same_step_is_refused(on_servers: Servers) -> None:
    job = BackupJob(on_servers.of(1))

    def work(rank: int) -> None:
        store = job.store(rank, num_workers=2)
        trainer = kvtrainer.Trainer([torch.nn.Parameter(torch.zeros(2))], "sgd", kvstore=store)
        trainer.resume()
        with pytest.raises(ConfigurationError, match="set_data"):
            trainer.set_data()
        with pytest.raises(ConfigurationError, match="join"), trainer.join():
            pass
        trainer.close()
        store.close()

    assert together(lambda: work(0), lambda: work(1)) == [None, None]


@pytest.mark.parametrize(
    ("sparse", "options"),
    [
        (True, {}),
        (False, {"compression_params": {"pull": {"type": "int8"}}}),
        (False, {"update_on_kvstore": False}),
    ],
)
def test_what_cannot_follow_rounds_of_others_is_refused(
    sparse: bool, options: dict[str, Any], on_servers: Servers
) -> None:
    store = BackupJob(on_servers.of(1)).store(0, num_workers=2)
    module = torch.nn.Embedding(50, 4, sparse=sparse)
    weights = [kvtrainer.RowSparseParameter((50, 4))] if sparse else list(module.parameters())
    trainer = kvtrainer.Trainer(weights, "sgd", kvstore=store, **options)
    with pytest.raises(ConfigurationError):
        trainer.resume()
    trainer.close()
    store.close()


@pytest.mark.parametrize(
    "options",
    [
        {"elastic": None}, {"backup_workers": -1}, {"backup_workers": 3}, {"type": "dist_async"},
        {"backup_workers": "some"},
    ],
)  # fmt: skip
def test_numbers_of_backup_workers_that_cannot_be_are_refused_before_anything_is_sent(
    options: dict[str, Any],
) -> None:
    more = {"type": "dist_sync", "elastic": "1..3", "backup_workers": 1, **options}
    with pytest.raises(ConfigurationError):
        DistKVStore(rank=0, num_workers=3, servers=["tcp://127.0.0.1:1"], connect_timeout=0.1, **more)


@pytest.mark.parametrize(("workers", "number"), [(4, 1), ("2..4", 4), ("2..4", -1)])
def test_a_cluster_without_enough_workers_is_refused(workers: Any, number: int) -> None:
    with pytest.raises(ConfigurationError):
        kvtrainer.local_cluster(workers, backup_workers=number)
