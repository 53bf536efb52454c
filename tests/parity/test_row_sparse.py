"""MXNet's row-sparse results, exactly, and tables that train as float64 loops do, on real servers and workers.

The numbers are those of MXNet's nightly tests (dist_sync_kvstore.py) and of runs of MXNet 2.0.0b1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.verbs import TableKVStore
from tests.support.jobs import Job, PartOfJob, Results
from tests.support.lazy_runs import GOLDEN, ORACLES, START, TOUCHED, gradient
from tests.support.sizes import FAST, sizes

REPEATS = 3
SMALL, BIG = (2, 3), (1200, 200)
MODES = {"default": None, "store": True, "worker": False}
STORES = ("dist_sync", "dist_async", "dist_ssp")
TABLE = (3_000, 24)
"""Some slices."""
STEPS = 3


def run(rank: int, workers: int) -> Results:
    results: dict[str, Any] = {
        "few rows": few_rows(rank),
        "zeros": zeros(),
        "big": big(rank),
        "replaced": replaced(rank),
        "loaded": loaded(rank),
        "gates": {kind: {mode: gate(kind, rank, mode) for mode in MODES} for kind in KINDS},
        "trained": {kind: trained(kind, rank) for kind in ("gradient", "weight")},
    }
    for store in STORES if workers == 1 else STORES[:1]:
        results[f"golden {store}"] = {
            (kind, case): golden(kind, case, store, workers)
            for kind in ("gradient", "weight")
            for case in GOLDEN
        }
    return results


def few_rows(rank: int) -> dict[str, Any]:
    """Rank r adds (r + 1) · 2 to row r mod 2; then two rows are asked for, as floats, in two dimensions, repeated."""
    seen: dict[str, Any] = {}
    for name in ("float32", "float16"):
        dtype = getattr(torch, name)
        kv = _store("9", torch.ones(SMALL, dtype=dtype))
        _add_twice(kv)
        steps = []
        for i in range(REPEATS):
            kv.push("9", _rows(SMALL, [rank % SMALL[0]], float(rank + 1), dtype))
            ids = torch.tensor([[i % 2], [i % 2]], dtype=torch.float32)
            out = torch.full(SMALL, -1.0, dtype=dtype)
            found = kv.row_sparse_pull("9", out=out, row_ids=ids)
            steps.append((out.tolist(), found.indices().tolist(), found.values().tolist()))
        seen[name] = steps
        kv.close()
    return seen


def zeros() -> list[Any]:
    """A push of no rows on every rank; then all rows, and none."""
    seen = []
    for key, shape in (("11", SMALL), ("97", BIG)):
        kv = _store(key, torch.ones(shape))
        _add_twice(kv)
        kv.push(key, _rows(shape, [], 0.0))
        out = torch.empty(shape)
        kv.row_sparse_pull(key, out=out, row_ids=torch.arange(shape[0]))
        nothing = torch.ones(shape)
        kv.row_sparse_pull(key, out=nothing, row_ids=[])
        seen.append((out.min().item(), out.max().item(), nothing.count_nonzero().item()))
        kv.close()
    return seen


def touched_of(rank: int) -> Tensor:
    """The rows of the big key that a rank adds rank + 1 to."""
    candidates = (torch.rand(BIG[0], generator=torch.Generator().manual_seed(123)) < 0.3).nonzero().flatten()
    return candidates[:: 2 * (rank + 1)]


def asked_of(rank: int) -> Tensor:
    """The rows of the big key that a rank asks for; some repeat."""
    return torch.randint(BIG[0], (BIG[0],), generator=torch.Generator().manual_seed(rank))


def big(rank: int) -> list[tuple[Tensor, bool]]:
    """The first column of the rows that were asked for, after every push, and whether rows are all of one number."""
    kv = _store("98", torch.ones(BIG))
    _add_twice(kv)
    seen = []
    for _ in range(REPEATS):
        kv.push("98", _rows(BIG, touched_of(rank).tolist(), float(rank + 1)))
        out = torch.empty(BIG)
        kv.row_sparse_pull("98", out=out, row_ids=asked_of(rank))
        seen.append((out[:, 0].clone(), bool((out == out[:, :1]).all())))
    kv.close()
    return seen


def replaced(rank: int) -> list[Any]:
    """Without an optimizer: the sum of one row of each rank replaces it; of dense and sparse pushes, all."""
    kv = _store("w", torch.ones(4, 2))
    kv.push("w", _rows((4, 2), [1], float(rank + 1)))
    first = _pull(kv, "w", (4, 2))[:, 0].tolist()
    kv.push("w", torch.ones(4, 2) if rank == 0 else _rows((4, 2), [3, 3], 1.0))
    second = _pull(kv, "w", (4, 2))[:, 0].tolist()
    out = torch.empty(4, 2)
    kv.pushpull("w", [_rows((4, 2), [0], 1.0), _rows((4, 2), [0, 2], 1.0)], out=out)
    kv.close()
    return [first, second, out[:, 0].tolist()]


def loaded(rank: int) -> list[float]:
    """A state_dict that is loaded while the servers have the values: 3 on rank 0, others elsewhere."""
    model = nn.Module()
    model.table = kvtrainer.RowSparseParameter((2, 2))
    with kvtrainer.Trainer(model, "sgd", kvstore="dist_sync") as trainer:
        model.table.row_sparse_data([0])
        model.load_state_dict({"table": torch.full((2, 2), 3.0 + rank)})
        trainer.set_data()
        return model.table.row_sparse_data([0, 1])[:, 0].tolist()


KINDS = ("dense", "gradient", "weight")


def gate(kind: str, rank: int, mode: str) -> Any:
    """x = 1, y = (rank + 1) · x, lr 1: the weights after one step, or what refuses it."""
    ones = torch.ones(2, 10)
    weight: nn.Parameter
    if kind == "weight":
        weight = kvtrainer.RowSparseParameter((2, 10), ones)
        look_up: Callable[[], Tensor] = lambda: weight.row_sparse_data([0, 1])  # noqa: E731
    else:
        module = nn.Embedding.from_pretrained(ones.clone(), freeze=False, sparse=kind == "gradient")
        weight, look_up = module.weight, lambda: module(torch.tensor([0, 1]))
    try:
        options = {"learning_rate": 1.0}
        with kvtrainer.Trainer(
            [weight], "sgd", options, "dist_sync", update_on_kvstore=MODES[mode]
        ) as trainer:
            ((rank + 1) * look_up()).sum().backward()
            trainer.step(1)
            return sorted(set(look_up().flatten().tolist()))
    except ConfigurationError as error:
        return str(error)


def _look_up(kind: str, start: Tensor) -> tuple[nn.Parameter, Callable[[Tensor], Tensor]]:
    """A parameter with row-sparse gradients, or a row-sparse one, and how its rows are looked up."""
    if kind == "weight":
        table = kvtrainer.RowSparseParameter(tuple(start.shape), start)
        return table, table.row_sparse_data
    module = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
    return module.weight, module


def golden(kind: str, case: str, store: str, workers: int) -> list[float]:
    """MXNet's trajectory; every worker gives the same gradient, and the mean is taken."""
    name, options, _ = GOLDEN[case]
    weight, look_up = _look_up(kind, torch.tensor(START))
    with kvtrainer.Trainer([weight], name, options, store) as trainer:
        for step, touched in enumerate(TOUCHED):
            (look_up(torch.tensor(touched)) * gradient(step)).sum().backward()
            trainer.step(workers)
        found: list[float] = look_up(torch.arange(3)).flatten().tolist()
    return found


def start_of_table() -> Tensor:
    return torch.rand(TABLE, generator=torch.Generator().manual_seed(1))


def batch_of(rank: int, step: int) -> Tensor:
    """Rows, some more than once; in the second step only rank 0 has any."""
    gen = torch.Generator().manual_seed(100 * step + rank)
    count = 0 if step == 1 and rank else 30
    return torch.randint(TABLE[0], (count, 2), generator=gen) // 50 * 50


def trained(kind: str, rank: int) -> dict[bool, Tensor]:
    """The table after steps on batches of each worker's own, without and with lazy_update."""
    seen = {}
    for lazy in (False, True):
        weight, look_up = _look_up(kind, start_of_table() if rank == 0 else torch.zeros(TABLE))
        options = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.1, "lazy_update": lazy}
        with kvtrainer.Trainer([weight], "sgd", options, "dist_sync") as trainer:
            for step in range(STEPS):
                if step == 0 and kind == "gradient":
                    trainer.set_data()  # the loss needs rank 0's values
                look_up(batch_of(rank, step)).square().sum().backward()
                trainer.step(1)
            seen[lazy] = look_up(torch.arange(TABLE[0])).detach()
    return seen


def _store(key: str, value: Tensor) -> TableKVStore:
    kv = kvtrainer.kvstore.create("dist_sync")
    assert isinstance(kv, TableKVStore)
    kv.init(key, value)
    return kv


def _add_twice(kv: TableKVStore) -> None:
    """Every push adds its sum, times 2."""
    kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0, rescale_grad=2.0))


def _pull(kv: TableKVStore, key: str, shape: tuple[int, ...]) -> Tensor:
    out = torch.empty(shape)
    kv.pull(key, out=out)
    return out


def _rows(shape: tuple[int, ...], ids: list[int], value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.full((len(ids), *shape[1:]), value, dtype=dtype)
    return torch.sparse_coo_tensor(
        torch.tensor([ids], dtype=torch.int64), values, shape, check_invariants=True
    )


SPARSE = ("gradient", "weight")


@pytest.fixture(scope="module", params=sizes(*FAST))
def job(request: pytest.FixtureRequest, part_of_job: PartOfJob) -> Job:
    return part_of_job("row_sparse", *request.param)


def total(job: Job) -> int:
    return job.workers * (job.workers + 1) // 2


def assert_everywhere(seen: list[Any], expected: Any) -> None:
    for rank, one in enumerate(seen):
        assert one == expected, f"rank {rank}"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_ranks_share_add_up_and_the_others_are_zero_in_what_is_pulled(job: Job, dtype: str) -> None:
    expected = []
    for i in range(REPEATS):
        row = i % 2
        value = 1.0 + sum(2 * (rank + 1) * (i + 1) for rank in range(job.workers) if rank % 2 == row)
        out = [[value if r == row else 0.0] * 3 for r in range(2)]
        expected.append((out, [[row]], [[value] * 3]))
    assert_everywhere([seen[dtype] for seen in job["few rows"]], expected)


def test_a_push_of_no_rows_takes_part_and_a_pull_of_none_is_zero(job: Job) -> None:
    assert_everywhere(job["zeros"], [(1.0, 1.0, 0)] * 2)


def test_rows_of_a_big_key_add_up_wherever_they_lie(job: Job) -> None:
    step = torch.zeros(BIG[0])
    for rank in range(job.workers):
        step[touched_of(rank)] += 2.0 * (rank + 1)
    for rank, seen in enumerate(job["big"]):
        for i, (column, is_even) in enumerate(seen):
            expected = torch.zeros(BIG[0])
            expected[asked_of(rank)] = (1 + step * (i + 1))[asked_of(rank)]
            assert torch.equal(column, expected), f"rank {rank}, push {i}"
            assert is_even


def test_without_an_optimizer_the_sum_of_rows_replaces_these_rows(job: Job) -> None:
    w = job.workers
    dense = 2 * (w - 1) + 1
    expected = [[1, total(job), 1, 1], [1, 1, 1, dense], [2 * w, 1, w, dense]]
    assert_everywhere(job["replaced"], expected)


def test_values_that_are_loaded_become_those_of_the_first_rank_on_all(job: Job) -> None:
    assert_everywhere(job["loaded"], [3.0, 3.0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_subtracts_the_sum_or_the_site_of_the_update_is_refused(job: Job, kind: str) -> None:
    weights = [1.0 - total(job)]
    for gates in job["gates"]:
        assert gates[kind]["default"] == gates[kind]["store"] == weights
        if kind == "dense":
            assert gates[kind]["worker"] == weights
        elif kind == "gradient":
            assert "needs update_on_kvstore=True with a dist kvstore" in gates[kind]["worker"]
        else:
            assert (
                "cannot set update_on_kvstore=False when sparse weights are present" in gates[kind]["worker"]
            )


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("case", GOLDEN)
def test_tables_follow_mxnets_trajectories(job: Job, case: str, kind: str) -> None:
    for store in STORES if job.workers == 1 else STORES[:1]:
        for seen in job[f"golden {store}"]:
            assert seen[kind, case] == pytest.approx(GOLDEN[case][2], abs=2e-6), store


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("lazy", [False, True])
def test_tables_train_as_one_process_with_all_batches_does_in_float64(
    job: Job, kind: str, lazy: bool
) -> None:
    batches = [torch.cat([batch_of(rank, step) for rank in range(job.workers)]) for step in range(STEPS)]
    expected = ORACLES[lazy](start_of_table(), batches, 0.05, 0.9, 0.1)
    found = [seen[kind][lazy] for seen in job["trained"]]
    for table in found:
        assert torch.equal(table, found[0])
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-6)
