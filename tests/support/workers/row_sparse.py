"""Part of a job: MXNet's row-sparse cases, and tables that train; returns what it saw, judges nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.verbs import TableKVStore
from tests.support.jobs import Results
from tests.support.lazy_runs import GOLDEN, START, TOUCHED, gradient

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
        "refused": refused(),
        "loaded": loaded(rank),
        "gates": {kind: {mode: gate(kind, rank, mode) for mode in MODES} for kind in KINDS},
        "trained": {kind: trained(kind, rank) for kind in ("gradient", "weight")},
        "bytes": bytes_of_steps(rank),
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


def refused() -> dict[str, str]:
    """What MXNet's test calls invalid."""
    kv = _store("k", torch.ones(2, 2))
    said = {"pull": _said(lambda: kv.pull("k", out=_rows((2, 2), [0], 1.0), ignore_sparse=False))}
    kv.close()
    return said


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


def bytes_of_steps(rank: int) -> dict[tuple[str, int, int], int]:
    """(kind, rows of the table, rows that each worker touches) → bytes that servers got and sent in a later step."""
    seen = {}
    for kind in ("gradient", "weight"):
        for num_rows, touched in ((4_000, 40), (8_000, 40), (8_000, 80)):
            weight, look_up = _look_up(kind, torch.zeros(num_rows, 64))
            ids = torch.arange(touched) * (num_rows // touched) + rank
            with kvtrainer.Trainer([weight], "sgd", {"lazy_update": True}, "dist_sync") as trainer:
                counts = []
                for _ in range(3):
                    look_up(ids).sum().backward()
                    trainer.step(1)
                    counts.append(_bytes(trainer))
            seen[kind, num_rows, touched] = counts[2] - counts[1]
    return seen


def _bytes(trainer: kvtrainer.Trainer) -> int:
    """What all servers have got and sent when every worker has come here."""
    kv = trainer.kvstore
    assert isinstance(kv, TableKVStore)
    kv.barrier()
    tables = [table for one in trainer.server_stats() for table in one["tables"]]
    kv.barrier()
    return sum(int(table["bytes_in"]) + int(table["bytes_out"]) for table in tables)


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


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except (ConfigurationError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
