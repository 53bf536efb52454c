"""Tables without a number of rows on servers: the same bits for any number of them, saved and loaded anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.errors import (
    ConfigurationError,
    KVStoreError,
    OptimizerError,
    PlanMismatchError,
    RoundAbortedError,
    ShapeMismatchError,
    StateMismatchError,
)
from kvtrainer.kvstore import DistKVStore
from kvtrainer.states.format import read_state_file
from tests.support.processes import Members, Processes, new_name, raised, together
from tests.support.stores import Servers

IDS = torch.arange(60)
"""Some of the ids that are drawn."""


class Worker:
    """A model with two tables, trained on data that depend on the step and the rank."""

    def __init__(
        self,
        store: Any,
        rank: int = 0,
        workers: int = 1,
        optimizer: str = "adagrad",
        of_table: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.rank, self.workers = rank, workers
        options |= of_table or {}
        self.table = kvtrainer.Embedding(8, **{"admit_after": 2, "expire_after": 6, **options})
        self.bags = kvtrainer.EmbeddingBag(
            8, mode="sum", max_rows=256, seed=1, max_norm=2.5, weight_decay=0.01, optimizer="rowadam",
            cache_rows=options.get("cache_rows", 0),
        )  # fmt: skip
        self.linear = torch.nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.fill_(0.1)
        named = [("table", self.table.weight), ("bags", self.bags.weight), *self.linear.named_parameters()]
        self.trainer = kvtrainer.Trainer(named, optimizer, {"learning_rate": 0.1}, kvstore=store)

    def train(self, first: int, last: int, prefetches: bool = False) -> Tensor:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * self.rank + step)
            ids = torch.randint(-(2**63), 2**63 - 1, (48,), generator=generator)
            ids = torch.where(torch.rand(48, generator=generator) < 0.7, ids % len(IDS), ids)
            found = self.table(ids) + self.bags(ids.view(12, 4)).repeat(4, 1)
            self.linear(found).square().sum().backward()
            if prefetches:
                self.trainer.prefetch({self.table.weight: IDS, self.bags.weight: IDS[:9]})
            self.trainer.step(48 * self.workers)
            for parameter in (self.table.weight, self.bags.weight, *self.linear.parameters()):
                parameter.grad = None
        return self.weights()

    @torch.no_grad()
    def weights(self) -> Tensor:
        rows = [self.table(IDS).flatten(), self.bags(IDS[:, None]).flatten()]
        return torch.cat([*rows, *[one.flatten() for one in self.linear.parameters()]])


def on_servers(
    servers: int, jobs: Servers, members: Members, work: Callable[[Worker], Any], **options: Any
) -> list[Any]:
    """What two workers return, beside so many servers."""
    started = jobs.of(servers)
    name = new_name()

    def one(rank: int) -> Any:
        worker = Worker(members.join(started, rank, 2, name), rank, 2, **options)
        with worker.trainer:
            return work(worker)

    return together(lambda: one(0), lambda: one(1))


MOMENTUM: dict[str, Any] = {
    "optimizer": "sgd", "optimizer_params": {"learning_rate": 1e-3, "momentum": 0.9}, "weight_decay": 0.01
}  # fmt: skip
"""Of a table all of whose rows move in each round."""


@pytest.mark.parametrize(("way", "options"), [("auto", {}), ("tcp", {}), ("tcp", MOMENTUM)])
def test_a_table_has_the_same_bits_on_any_number_of_servers(
    way: str,
    options: dict[str, Any],
    jobs: Servers,
    members: Members,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", way)
    found = [
        on_servers(servers, jobs, members, lambda worker: worker.train(0, 12), of_table=options)
        for servers in (1, 2, 3)
    ]
    for of_servers in found:
        assert torch.equal(of_servers[0], of_servers[1])
        assert torch.equal(of_servers[0], found[0][0])


def test_one_worker_beside_servers_has_the_bits_of_a_process_alone(jobs: Servers, members: Members) -> None:
    alone, beside = Worker("local"), Worker(members.join(jobs.of(2), 0, 1, new_name()))
    with alone.trainer, beside.trainer:
        assert torch.equal(alone.train(0, 10), beside.train(0, 10))


def test_rows_that_were_prefetched_are_those_that_are_fetched(
    jobs: Servers, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", "tcp")
    plain, ahead = (Worker(members.join(jobs.of(2), 0, 1, new_name())) for _ in range(2))
    with plain.trainer, ahead.trainer:
        assert torch.equal(plain.train(0, 8), ahead.train(0, 8, prefetches=True))


@pytest.mark.parametrize("way", ["auto", "tcp"])
@pytest.mark.parametrize("cache_rows", [20, 10_000])
def test_workers_that_keep_rows_have_the_same_bits(
    cache_rows: int, way: str, jobs: Servers, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", way)

    def work(worker: Worker) -> Tensor:
        return worker.train(0, 12, prefetches=worker.rank == 0)

    plain = on_servers(2, jobs, members, work)
    kept = on_servers(2, jobs, members, work, cache_rows=cache_rows)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], plain[0])


def test_rows_that_a_worker_keeps_are_not_those_from_before_a_load(
    jobs: Servers, members: Members, tmp_path: Path
) -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        worker.train(0, 6)
        if worker.rank == 0:
            worker.trainer.save_states(tmp_path / "states")
        found = []
        for first in (6, 9):
            worker.train(first, first + 3)
            worker.trainer.load_states(tmp_path / "states")
            found.append(worker.weights()[:-9])  # without the dense parameters, which are not loaded
        return found[0], found[1]

    for before, after in on_servers(2, jobs, members, work, cache_rows=1000, cache_age=100):
        assert torch.equal(before, after)


def test_rows_are_at_most_as_old_as_they_may_be(jobs: Servers, members: Members) -> None:
    started, name = jobs.of(2), new_name()

    def one(rank: int) -> list[bool]:
        table = kvtrainer.Embedding(8, cache_rows=100 if rank else 0, cache_age=3 if rank else 0)
        trainer = kvtrainer.Trainer(
            {"t": table}, "sgd", {"learning_rate": 1.0}, kvstore=members.join(started, rank, 2, name)
        )
        found = []
        with trainer:
            other, own = torch.tensor([5]), torch.tensor([6])
            for _ in range(9):
                table(own if rank else other).sum().backward()  # only the other one trains row 5
                trainer.step(1)
                table.weight.grad = None
                with torch.no_grad():
                    found.append(table(other).mean().item())
        return found

    fresh, kept = together(lambda: one(0), lambda: one(1))
    assert kept == [fresh[0]] * 4 + [fresh[4]] * 4 + [fresh[8]]


@pytest.mark.parametrize("options", [{}, MOMENTUM], ids=["adagrad", "momentum"])
def test_saved_tables_go_on_on_any_number_of_servers(
    options: dict[str, Any], jobs: Servers, members: Members, tmp_path: Path
) -> None:
    states = tmp_path / "states"
    first = Worker("local", of_table=options)
    with first.trainer:
        first.train(0, 8)
        first.trainer.save_states(states)
        linear = {name: value.clone() for name, value in first.linear.state_dict().items()}
        expected = first.train(8, 16)
    for servers in (0, 1, 3):
        store: Any = members.join(jobs.of(servers), 0, 1, new_name()) if servers else "local"
        worker = Worker(store, of_table=options)
        worker.linear.load_state_dict(linear)
        with worker.trainer:
            worker.trainer.load_states(states)
            assert torch.equal(worker.train(8, 16), expected)


def test_a_table_is_saved_of_which_some_servers_have_no_rows(
    jobs: Servers, members: Members, tmp_path: Path
) -> None:
    for id_ in range(4):
        states, ids, changes = tmp_path / str(id_), torch.tensor([id_]), []
        for store in (members.join(jobs.of(2), 0, 1, new_name()), "local"):
            table = kvtrainer.Embedding(4)
            options = {"learning_rate": 0.1}
            with kvtrainer.Trainer([("t", table.weight)], "adagrad", options, kvstore=store) as trainer:
                if store == "local":
                    trainer.load_states(states)
                    assert table.stats()["rows"] == 1
                for _ in range(5):
                    table(ids).sum().backward()
                    trainer.step(1)
                    table.weight.grad = None
                if store != "local":
                    trainer.save_states(states)
                before = table(ids).detach()
                table(ids).sum().backward()
                trainer.step(1)
                changes.append(float((before - table(ids)).detach().max()))
        # Adagrad's steps: the sum of squares is that of 6 and of 11 gradients.
        assert changes == pytest.approx([0.1 / 6**0.5, 0.1 / 11**0.5], rel=1e-4)


def test_a_table_of_another_width_is_not_loaded(tmp_path: Path) -> None:
    states = tmp_path / "states"
    narrow, wide = (kvtrainer.Embedding(dim) for dim in (3, 4))
    for table in (narrow, wide):
        with kvtrainer.Trainer(
            [("t", table.weight)], "sgd", {"learning_rate": 1.0}, kvstore="local"
        ) as trainer:
            table(IDS).sum().backward()
            trainer.step(1)
            if table is narrow:
                trainer.save_states(states)
                continue
            before = table(IDS)
            with pytest.raises(StateMismatchError, match=r"'t' .*of 3 elements .*of 4 elements"):
                trainer.load_states(states)
            assert torch.equal(table(IDS), before)


def test_a_table_with_other_options_is_loaded_on_no_worker(
    jobs: Servers, members: Members, tmp_path: Path
) -> None:
    first = Worker("local")
    with first.trainer:
        first.train(0, 3)
        first.trainer.save_states(tmp_path / "states")

    def work(worker: Worker) -> bool:
        before = worker.train(0, 2)
        with pytest.raises(StateMismatchError, match=r"'table' has admit_after=2 .*admit_after=1 here"):
            worker.trainer.load_states(tmp_path / "states")
        return torch.equal(worker.weights(), before)

    assert on_servers(2, jobs, members, work, admit_after=1) == [True, True]


def test_workers_with_different_rules_are_told(jobs: Servers, members: Members) -> None:
    servers, name = jobs.of(2), new_name()

    def one(rank: int) -> Any:
        worker = Worker(members.join(servers, rank, 2, name), rank, 2, expire_after=6 + rank)
        with worker.trainer:
            return worker.train(0, 1)

    texts = raised(together(lambda: one(0), lambda: one(1)), PlanMismatchError)
    assert all("expire_after=6" in text and "expire_after=7" in text for text in texts)


def test_an_optimizer_that_needs_all_rows_is_refused_on_every_worker(jobs: Servers, members: Members) -> None:
    def work(worker: Worker) -> Any:
        with pytest.raises(ConfigurationError, match=r"'bags'|'table'"):
            worker.train(0, 1)
        return True

    assert on_servers(2, jobs, members, work, optimizer="lamb") == [True, True]


def test_gradients_that_are_not_finite_are_found_before_they_reach_a_row(
    jobs: Servers, members: Members
) -> None:
    table = kvtrainer.Embedding(4)
    store: DistKVStore = members.join(jobs.of(2), 0, 1, new_name())
    with kvtrainer.Trainer(
        [("t", table.weight)], "sgd", {"learning_rate": 1.0}, kvstore=store, on_nonfinite="raise"
    ) as trainer:
        table(IDS).sum().backward()
        trainer.step(1)
        before = table(IDS)
        table.weight.grad = None
        (table(IDS)[3] * float("nan")).sum().backward()
        with pytest.raises((KVStoreError, FloatingPointError)):
            trainer.step(1)
        assert torch.equal(table(IDS), before)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_the_norm_of_all_gradients_counts_rows_of_a_table(
    max_norm: float, jobs: Servers, members: Members
) -> None:
    table, linear = kvtrainer.Embedding(4, init="constant", scale=0.5), torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(linear.weight, 1.0)
    store = members.join(jobs.of(2), 0, 1, new_name())
    named = [("t", table.weight), *linear.named_parameters()]
    clip = {"max_norm": max_norm}
    with kvtrainer.Trainer(named, "sgd", {"learning_rate": 1.0}, kvstore=store, clip_grad=clip) as trainer:
        linear(table(torch.tensor([1, 2, 2]))).sum().backward()
        trainer.step(1)
        # Rows 1 and 2 have gradients of 1 and 2, the layer's weights of 1.5.
        norm = (4 * (1.0 + 4.0 + 1.5**2)) ** 0.5
        factor = min(1.0, max_norm / norm)
        assert torch.allclose(table(torch.tensor([1])), torch.tensor(0.5 - factor), atol=1e-5)
        assert torch.allclose(table(torch.tensor([2])), torch.tensor(0.5 - 2 * factor), atol=1e-5)
        assert torch.allclose(linear.weight, torch.tensor(1.0 - 1.5 * factor), atol=1e-5)


def test_a_full_table_is_an_error_on_every_worker_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore_server.shard.hash_table.slots_that_fit", lambda _nbytes: 100)
    table = kvtrainer.Embedding(4)
    with kvtrainer.Trainer([("t", table.weight)], "sgd", {"learning_rate": 1.0}, kvstore="local") as trainer:
        table(torch.arange(90)).sum().backward()
        trainer.step(1)
        before = table(torch.arange(120))
        table.weight.grad = None
        table(torch.arange(80, 101)).sum().backward()
        with pytest.raises(OptimizerError, match="90 rows"):
            trainer.step(1)
        assert torch.equal(table(torch.arange(120)), before)


def test_figures_of_a_table_are_those_of_all_servers(jobs: Servers, members: Members) -> None:
    table = kvtrainer.Embedding(4, admit_after=2)
    store = members.join(jobs.of(3), 0, 1, new_name())
    with kvtrainer.Trainer([("t", table.weight)], "sgd", {"learning_rate": 1.0}, kvstore=store) as trainer:
        for last in (100, 60, 7):
            table(torch.arange(last) - 3).sum().backward()
            trainer.step(1)
            table.weight.grad = None
        stats = table.stats()
        assert (stats["rows"], stats["admitted"], stats["refused"], stats["evicted"]) == (60, 60, 100, 0)
        assert stats["nbytes"] > 60 * 4 * 4
        assert {id_: 3 for id_ in range(-3, 4)}.items() <= stats["hottest"].items()
        assert len(stats["hottest"]) == 10


def test_rows_beyond_the_memory_of_a_server_are_refused_with_numbers(
    processes: Processes, members: Members
) -> None:
    table = kvtrainer.Embedding(1000)
    store = members.join(processes.servers(1, "--max-memory", "8000000"), 0, 1, new_name())
    with kvtrainer.Trainer([("t", table.weight)], "sgd", {"learning_rate": 1.0}, kvstore=store) as trainer:
        table(torch.arange(1000)).sum().backward()
        trainer.step(1)
        before = table(torch.arange(3000))
        table.weight.grad = None
        table(torch.arange(500, 3000)).sum().backward()
        with pytest.raises(OptimizerError, match="--max-memory"):
            trainer.step(1)
        assert torch.equal(table(torch.arange(3000)), before)
        # Rows that are there need no room, and a few more have some.
        table.weight.grad = None
        table(torch.arange(0, 1100)).sum().backward()
        trainer.step(1)
        assert torch.allclose(table(torch.arange(1100)), before[:1100] - 1)


def test_no_worker_begins_a_step_for_which_one_of_two_servers_may_have_no_room(
    processes: Processes, jobs: Servers, members: Members, tmp_path: Path
) -> None:
    def job(servers: Any) -> list[Worker]:
        name, rules = new_name(), {"admit_after": 1, "expire_after": 0}
        return [Worker(members.join(servers, rank, 2, name), rank, 2, **rules) for rank in range(2)]

    def train(worker: Worker, step: int) -> None:
        """Each rank has 2,000 ids of its own."""
        worker.trainer.zero_grad()
        begin = 4000 * step + 2000 * worker.rank
        worker.linear(worker.table(torch.arange(begin, begin + 2000))).square().sum().backward()
        worker.trainer.step(4000, ignore_stale_grad=True)

    def on_both(workers: list[Worker], work: Callable[..., Any]) -> list[Any]:
        return together(*(lambda w=worker: work(w) for worker in workers))

    # 1. One server has little memory. Both workers notice in the same step.
    workers = job(processes.servers(2, each=[[], ["--max-memory", "4000000"]]))
    steps = 0
    while (found := on_both(workers, lambda worker, at=steps: train(worker, at))) == [None, None]:
        steps += 1
    assert steps > 1, found
    assert all(["--max-memory" in text and "server 1" in text for text in raised(found, OptimizerError)])
    # 2. All servers have ended the step before it: the states are those of a job without limits, and it goes on.
    path, linear = tmp_path / "states", workers[0].linear.state_dict()
    assert on_both(workers, lambda worker: worker.trainer.save_states(path)) == [None, None]
    ends = []
    for begin in (0, steps):
        workers = job(jobs.of(2))
        if begin:
            for worker in workers:
                worker.linear.load_state_dict(linear)
            assert on_both(workers, lambda worker: worker.trainer.load_states(path)) == [None, None]
        for step in range(begin, steps + 1):
            assert on_both(workers, lambda worker, at=step: train(worker, at)) == [None, None]
        with torch.no_grad():
            ends.append(on_both(workers, lambda worker: worker.table(torch.arange(4000 * (steps + 1)))))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][0], ends[1][1])


def test_a_table_for_which_there_are_no_addresses_is_refused_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore_server.shard.hash_table.slots_that_fit", lambda _nbytes: 1 << 58)
    table = kvtrainer.Embedding(4)
    trainer = kvtrainer.Trainer([("t", table.weight)], "sgd", {"learning_rate": 1.0}, kvstore="local")
    with trainer, pytest.raises(ConfigurationError, match="'t'"):
        table(IDS)
    monkeypatch.undo()
    other = kvtrainer.Embedding(4)
    with kvtrainer.Trainer([("t", other.weight)], "sgd", {"learning_rate": 1.0}, kvstore="local"):
        assert other(IDS).shape == (60, 4)


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_rows_go_through_a_file_to_a_job_with_other_servers_and_come_back_as_they_were(
    way: str, jobs: Servers, members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", way)

    def exported(worker: Worker) -> Tensor:
        worker.train(0, 6)
        if worker.rank == 1:  # any single one
            worker.table.export(tmp_path / "first")
        return worker.weights()[: 8 * len(IDS)].view(-1, 8)

    [rows, _] = on_servers(3, jobs, members, exported)
    assert torch.equal(kvtrainer.lookup(tmp_path / "first", IDS), rows)

    def loaded(worker: Worker) -> bool:
        worker.table.load_rows(tmp_path / "first")
        if worker.rank == 0:
            worker.table.export(tmp_path / "second")
        return torch.equal(worker.table(IDS), rows)

    assert on_servers(2, jobs, members, loaded) == [True, True]
    first, second = (kvtrainer.RowFile(tmp_path / name) for name in ("first", "second"))
    assert len(first) > 30
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.weights, second.weights)


def test_training_goes_on_from_loaded_rows_with_the_same_bits_on_any_number_of_servers(
    jobs: Servers, members: Members
) -> None:
    rows = torch.arange(8.0 * len(IDS)).view(-1, 8) / 1000

    def train(worker: Worker) -> Tensor:
        worker.table.load_rows(IDS[:20], rows[:20])
        worker.train(0, 5)
        worker.table.load_rows(IDS[10:], rows[10:])
        return worker.train(5, 10)

    alone = Worker("local")
    with alone.trainer:
        expected = train(alone)
    for servers in (1, 3):
        beside = Worker(members.join(jobs.of(servers), 0, 1, new_name()))
        with beside.trainer:
            assert torch.equal(train(beside), expected)
    both = [on_servers(servers, jobs, members, train) for servers in (1, 2)]
    for found in both:
        assert torch.equal(found[0], both[0][0])
        assert torch.equal(found[1], both[0][0])


def test_rows_that_do_not_fit_on_one_worker_are_loaded_on_none(jobs: Servers, members: Members) -> None:
    def work(worker: Worker) -> Any:
        before = worker.train(0, 3)
        kind = ShapeMismatchError if worker.rank else RoundAbortedError
        with pytest.raises(kind):
            worker.table.load_rows(IDS, torch.ones(len(IDS), 8 - worker.rank))
        return torch.equal(worker.weights(), before)

    assert on_servers(2, jobs, members, work) == [True, True]


def test_an_asynchronous_job_loads_rows_once_and_any_worker_exports_them(
    jobs: Servers, members: Members, tmp_path: Path
) -> None:
    servers, name = jobs.of(2), new_name()

    def one(rank: int) -> Any:
        table = kvtrainer.Embedding(4, init="constant", scale=0.0)
        store = members.join(servers, rank, 2, name, type="dist_async")
        with kvtrainer.Trainer(
            [("t", table.weight)], "sgd", {"learning_rate": 1.0}, kvstore=store
        ) as trainer:
            table.load_rows(IDS, torch.ones(len(IDS), 4))
            for _ in range(3):
                table.weight.grad = None
                table(IDS[:5]).sum().backward()
                trainer.step(1)
            store.barrier()
            table.export(tmp_path / str(rank))
            store.barrier()
        return kvtrainer.RowFile(tmp_path / str(rank)).weights[:, 0].tolist()

    # Each of the two workers has subtracted 1 three times.
    assert together(lambda: one(0), lambda: one(1)) == [[-5.0] * 5 + [1.0] * 55] * 2


def test_deltas_of_two_servers_load_into_any_number_of_servers(
    jobs: Servers, members: Members, tmp_path: Path
) -> None:
    names = ("first", "second", "third")

    def work(worker: Worker) -> Any:
        for step, name in enumerate(names):
            worker.train(3 * step, 3 * step + 3)
            if worker.rank == 0:
                worker.trainer.save_states(tmp_path / name, base=tmp_path / names[step - 1] if step else None)
        if worker.rank == 0:
            worker.trainer.save_states(tmp_path / "full")
        return {name: value.clone() for name, value in worker.linear.state_dict().items()}

    linear = on_servers(2, jobs, members, work)[0]
    assert (tmp_path / "third").stat().st_size < (tmp_path / "full").stat().st_size
    found = []
    for servers, name in ((0, "full"), (1, "third"), (3, "third")):
        store: Any = members.join(jobs.of(servers), 0, 1, new_name()) if servers else "local"
        worker = Worker(store)
        worker.linear.load_state_dict(linear)
        with worker.trainer:
            worker.trainer.load_states(tmp_path / name)
            again = tmp_path / f"again {servers}"
            worker.trainer.save_states(again)
            assert again.read_bytes() == (tmp_path / "full").read_bytes()
            found.append(worker.train(9, 14))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_worker_saves_deltas_on_what_it_has_saved_itself_or_all_have_loaded(
    jobs: Servers, members: Members, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"

    def work(worker: Worker) -> Any:
        worker.train(0, 4)
        if worker.rank == 0:
            worker.trainer.save_states(first)
        worker.train(4, 6)  # both have taken part, so the file is there
        if worker.rank == 1:
            with pytest.raises(StateMismatchError):
                worker.trainer.save_states(second, base=first)
            assert not second.exists()
        worker.train(6, 7)
        worker.trainer.load_states(first)
        worker.train(4, 7)
        if worker.rank == 1:
            worker.trainer.save_states(second, base=first)
            worker.trainer.save_states(tmp_path / "full")
        return worker.train(7, 8)

    on_servers(2, jobs, members, work)
    kvtrainer.merge_states(second, tmp_path / "merged")
    merged, full = (read_state_file(tmp_path / name) for name in ("merged", "full"))
    found = merged.parameters["table"].state
    assert len(found["rows"]) > 0
    for name, value in full.parameters["table"].state.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value))
