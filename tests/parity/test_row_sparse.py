"""MXNet's row-sparse results, exactly, and tables that train as float64 loops do, on real servers.

The numbers are those of MXNet's nightly tests (dist_sync_kvstore.py) and of runs of MXNet 2.0.0b1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer import Trainer
from kvtrainer.kvstore import DistKVStore
from tests.support.lazy_runs import GOLDEN, ORACLES, START, TOUCHED, gradient
from tests.support.sizes import FAST, sizes
from tests.support.sparse_model import CASES, Embeddings, batches
from tests.support.stores import Servers

REPEATS = 3
SMALL, BIG = (2, 3), (1200, 200)
STORES = ("dist_sync", "dist_async", "dist_ssp")
TABLE = (3_000, 24)
"""Some slices."""
STEPS = 3

Size = tuple[int, int]
KINDS = pytest.mark.parametrize("kind", ["gradient", "weight"])


@pytest.fixture(params=sizes(*FAST))
def size(request: pytest.FixtureRequest) -> Size:
    """Numbers of workers and servers."""
    workers, servers = request.param
    return workers, servers


def some_of(some: Iterable[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Give the parameters of all cases, of which `make test` runs some."""
    chosen = [*some]
    return [pytest.param(*one, marks=() if one in chosen else pytest.mark.full) for one in every]


def total(size: Size) -> int:
    return size[0] * (size[0] + 1) // 2


def rows(shape: Size, ids: list[int], value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    values, where = (
        torch.full((len(ids), *shape[1:]), value, dtype=dtype),
        torch.tensor([ids], dtype=torch.int64),
    )
    return torch.sparse_coo_tensor(where, values, shape, check_invariants=True)


def begin(kv: DistKVStore, key: str, value: Tensor) -> None:
    """Every push adds its sum, times 2."""
    kv.init(key, value)
    kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0, rescale_grad=2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_shared_rows_add_up_and_others_are_zero(jobs: Servers, size: Size, dtype: torch.dtype) -> None:
    """Rank r adds (r + 1) · 2 to row r mod 2; then two rows are asked for, as floats, in two dimensions, repeated."""

    def body(kv: DistKVStore, rank: int) -> list[Any]:
        begin(kv, "9", torch.ones(SMALL, dtype=dtype))
        seen = []
        for i in range(REPEATS):
            kv.push("9", rows(SMALL, [rank % SMALL[0]], float(rank + 1), dtype))
            ids = torch.tensor([[i % 2], [i % 2]], dtype=torch.float32)
            out = torch.full(SMALL, -1.0, dtype=dtype)
            found = kv.row_sparse_pull("9", out=out, row_ids=ids)
            seen.append((out.tolist(), found.indices().tolist(), found.values().tolist()))
        return seen

    expected = []
    for i in range(REPEATS):
        row = i % 2
        value = 1.0 + sum(2 * (rank + 1) * (i + 1) for rank in range(size[0]) if rank % 2 == row)
        expected.append(([[value if r == row else 0.0] * 3 for r in range(2)], [[row]], [[value] * 3]))
    assert jobs.results(*size, body) == [expected] * size[0]


@pytest.mark.parametrize("shape", [SMALL, BIG], ids=["small", "big"])
def test_a_push_of_no_rows_takes_part(jobs: Servers, size: Size, shape: Size) -> None:
    def body(kv: DistKVStore, rank: int) -> tuple[list[float], int]:
        begin(kv, "11", torch.ones(shape))
        kv.push("11", rows(shape, [], 0.0))
        out, nothing = torch.empty(shape), torch.ones(shape)
        kv.row_sparse_pull("11", out=out, row_ids=torch.arange(shape[0]))
        kv.row_sparse_pull("11", out=nothing, row_ids=[])
        return out.unique().tolist(), int(nothing.count_nonzero())

    assert jobs.results(*size, body) == [([1.0], 0)] * size[0]


def touched_of(rank: int) -> Tensor:
    """The rows of the big key that a rank adds rank + 1 to."""
    candidates = (torch.rand(BIG[0], generator=torch.Generator().manual_seed(123)) < 0.3).nonzero().flatten()
    return candidates[:: 2 * (rank + 1)]


def asked_of(rank: int) -> Tensor:
    """The rows of the big key that a rank asks for; some repeat."""
    return torch.randint(BIG[0], (BIG[0],), generator=torch.Generator().manual_seed(rank))


def test_rows_of_a_big_key_add_up_wherever_they_lie(jobs: Servers, size: Size) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        begin(kv, "98", torch.ones(BIG))
        seen = []
        for _ in range(REPEATS):
            kv.push("98", rows(BIG, touched_of(rank).tolist(), float(rank + 1)))
            seen.append(torch.empty(BIG))
            kv.row_sparse_pull("98", out=seen[-1], row_ids=asked_of(rank))
        return seen

    step = torch.zeros(BIG[0])
    for rank in range(size[0]):
        step[touched_of(rank)] += 2.0 * (rank + 1)
    for rank, seen in enumerate(jobs.results(*size, body)):
        for i, found in enumerate(seen):
            expected = torch.zeros(BIG[0])
            expected[asked_of(rank)] = (1 + step * (i + 1))[asked_of(rank)]
            assert torch.equal(found, expected.unsqueeze(1).expand(BIG)), f"rank {rank}, push {i}"


def test_without_an_optimizer_the_sum_of_rows_replaces_these_rows(jobs: Servers, size: Size) -> None:
    """The sum of one row of each rank replaces it; that of dense and sparse pushes, all."""

    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        kv.init("w", torch.ones(4, 2))
        seen, out = [], torch.empty(4, 2)
        for value in (
            rows((4, 2), [1], float(rank + 1)),
            torch.ones(4, 2) if rank == 0 else rows((4, 2), [3, 3], 1.0),
        ):
            kv.push("w", value)
            kv.pull("w", out=out)
            seen.append(out[:, 0].tolist())
        kv.pushpull("w", [rows((4, 2), [0], 1.0), rows((4, 2), [0, 2], 1.0)], out=out)
        return [*seen, out[:, 0].tolist()]

    w = size[0]
    dense = 2 * (w - 1) + 1
    expected = [[1, total(size), 1, 1], [1, 1, 1, dense], [2 * w, 1, w, dense]]
    assert jobs.results(*size, body) == [expected] * w


def test_values_that_are_loaded_become_those_of_the_first_rank_on_all(jobs: Servers, size: Size) -> None:
    """A state_dict that is loaded while the servers have the values: 3 on rank 0, others elsewhere."""

    def body(kv: DistKVStore, rank: int) -> list[float]:
        model = nn.Module()
        model.table = kvtrainer.RowSparseParameter((2, 2))
        trainer = kvtrainer.Trainer(model, "sgd", kvstore=kv)
        model.table.row_sparse_data([0])
        model.load_state_dict({"table": torch.full((2, 2), 3.0 + rank)})
        trainer.set_data()
        return model.table.row_sparse_data([0, 1])[:, 0].tolist()

    assert jobs.results(*size, body) == [[3.0, 3.0]] * size[0]


def look_up(kind: str, start: Tensor) -> tuple[nn.Parameter, Callable[[Tensor], Tensor]]:
    """A parameter with gradients that are row-sparse or not, or a row-sparse one, and how its rows are looked up."""
    if kind == "weight":
        table = kvtrainer.RowSparseParameter(tuple(start.shape), start)
        return table, table.row_sparse_data
    module = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=kind == "gradient")
    return module.weight, module


JOBS = [*((type, 1, 1) for type in STORES), ("dist_sync", 2, 3), ("dist_sync", 3, 2)]
CASES_AND_KINDS = [*itertools.product(GOLDEN, ["gradient", "weight"])]


@pytest.mark.parametrize(
    ("job", "case", "kind"),
    some_of(
        [(JOBS[at % len(JOBS)], *one) for at, one in enumerate(CASES_AND_KINDS)],
        [(job, *one) for job in JOBS for one in CASES_AND_KINDS],
    ),
)
def test_tables_follow_mxnets_runs(jobs: Servers, job: tuple[str, int, int], case: str, kind: str) -> None:
    """Every worker gives the same gradient, and the mean is taken."""
    type, workers, servers = job
    name, options, expected = GOLDEN[case]

    def body(kv: DistKVStore, rank: int) -> list[float]:
        weight, rows_of = look_up(kind, torch.tensor(START))
        trainer = kvtrainer.Trainer([weight], name, dict(options), kv)
        for step, touched in enumerate(TOUCHED):
            (rows_of(torch.tensor(touched)) * gradient(step)).sum().backward()
            trainer.step(workers)
        found: list[float] = rows_of(torch.arange(3)).flatten().tolist()
        return found

    assert jobs.results(workers, servers, body, type=type) == [pytest.approx(expected, abs=2e-6)] * workers


def batch_of(rank: int, step: int) -> Tensor:
    """Rows, some more than once; in the second step only rank 0 has any."""
    gen = torch.Generator().manual_seed(100 * step + rank)
    count = 0 if step == 1 and rank else 30
    return torch.randint(TABLE[0], (count, 2), generator=gen) // 50 * 50


@KINDS
@pytest.mark.parametrize("lazy", [False, True])
def test_tables_train_as_one_process_does(jobs: Servers, size: Size, kind: str, lazy: bool) -> None:
    start = torch.rand(TABLE, generator=torch.Generator().manual_seed(1))

    def body(kv: DistKVStore, rank: int) -> Tensor:
        weight, rows_of = look_up(kind, start if rank == 0 else torch.zeros(TABLE))
        options = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.1, "lazy_update": lazy}
        trainer = kvtrainer.Trainer([weight], "sgd", options, kv)
        if kind == "gradient":
            trainer.set_data()  # the loss needs rank 0's values
        for step in range(STEPS):
            rows_of(batch_of(rank, step)).square().sum().backward()
            trainer.step(1)
        return rows_of(torch.arange(TABLE[0])).detach()

    batches = [torch.cat([batch_of(rank, step) for rank in range(size[0])]) for step in range(STEPS)]
    first, *others = jobs.results(*size, body)
    assert all(torch.equal(first, other) for other in others)
    expected = ORACLES[lazy](start, batches, 0.05, 0.9, 0.1)
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-6)


def in_one_process(name: str) -> list[Tensor]:
    """By plain torch, or by the one Trainer that has the rows of both workers."""
    model, (kind, options) = Embeddings(), CASES[name]
    optimizer: Any
    if kind.startswith("torch:"):
        optimizer = getattr(torch.optim, kind.removeprefix("torch:"))(model.parameters(), **options)
    else:
        optimizer = Trainer(model, kind, options, kvstore=None)
    for (big_0, small_0), (big_1, small_1) in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        (model(big_0, small_0) + model(big_1, small_1)).backward()
        optimizer.step(*([] if kind.startswith("torch:") else [1]))
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("name", "servers"), [(name, 1 + 2 * (i % 2)) for i, name in enumerate(CASES)])
def test_workers_have_the_weights_of_one_process(jobs: Servers, name: str, servers: int) -> None:
    """A rank may have no rows of a table at all."""
    models = [Embeddings() for _ in range(2)]  # each seeds the random numbers of all threads

    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        model = models[rank]
        trainer = Trainer(model, *CASES[name], kv)
        for big, small in batches(rank):
            model(big, small).backward()
            trainer.step(1)
        return [p.detach().clone() for p in model.parameters()]

    first, second = jobs.results(2, servers, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for found, expected in zip(first, in_one_process(name), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("type", "workers", "servers"), [*((type, 1, 1) for type in STORES), ("dist_sync", 2, 3)]
)
def test_prefetched_rows_train_to_the_same_bits(jobs: Servers, type: str, workers: int, servers: int) -> None:
    def train(prefetches: bool) -> list[Tensor]:
        def body(kv: DistKVStore, rank: int) -> Tensor:
            table = kvtrainer.RowSparseParameter(TABLE, 1.0)
            trainer = kvtrainer.Trainer([table], "adam", {"lazy_update": True}, kv)
            for step in range(2 * STEPS):
                table.row_sparse_data(batch_of(rank, step)).square().sum().backward()
                if prefetches:
                    trainer.prefetch(batch_of(rank, step + 1))
                trainer.step(1)
            return table.row_sparse_data(torch.arange(TABLE[0])).detach()

        return jobs.results(workers, servers, body, type=type)

    for plain, prefetched in zip(train(False), train(True), strict=True):
        assert torch.equal(plain, prefetched)
