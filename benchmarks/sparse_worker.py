"""One process of a row-sparse step, on any of the systems that know torch; started by `sparse.py`."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sparse_steps import BATCHES, LEARNING_RATE, PULL, Table, gradient
from step_worker import import_what_steps_need
from steps import mark
from torch import Tensor
from torch.nn import Parameter

Step = Callable[[Tensor], object]
"""One step with a gradient, or one look at the rows that it has."""
Note = Callable[[int], None]
"""Called with the rank before the table is made."""


def start_kvtrainer(table: Table, optimizer: str, note: Note, kvstore: str = "dist_sync") -> Any:
    """`Trainer.step`, with the optimizer in the store, and the table in the worker, too, unless it is for "pull"."""
    kvtrainer = importlib.import_module("kvtrainer")
    store: Any = kvtrainer.kvstore.create(kvstore) if kvstore == "dist_sync" else kvstore
    rank = getattr(store, "rank", 0)
    note(rank)
    shape, rate = (table.rows, table.width), {"learning_rate": LEARNING_RATE}
    barrier = getattr(store, "barrier", lambda: None)
    if optimizer == PULL:
        stored = kvtrainer.RowSparseParameter(shape, torch.from_numpy(table.first()))
        trainer = kvtrainer.Trainer([stored], "sgd", rate, kvstore=store)
        return rank, lambda grad: _pulled(stored, grad, trainer), barrier, stored.detach
    lazy = {} if optimizer == "adagrad" else {"lazy_update": True}
    parameter = Parameter(torch.from_numpy(table.first()))
    trainer = kvtrainer.Trainer([parameter], optimizer, {**rate, **lazy}, kvstore=store)

    def step(grad: Tensor) -> None:
        parameter.grad = grad
        trainer.step(1)

    return rank, step, barrier, parameter.detach


def _pulled(stored: Any, grad: Tensor, trainer: Any) -> Tensor:
    del trainer  # it owns the table
    with torch.no_grad():
        result: Tensor = stored.row_sparse_data(grad._indices()[0])
    return result


def start_torch(table: Table, optimizer: str, note: Note = lambda rank: None) -> Any:
    """torch's optimizer for sparse gradients in one process, which sends nothing; "pull": `index_select`."""
    note(0)
    parameter = Parameter(torch.from_numpy(table.first()))
    if optimizer == PULL:
        weight = parameter.detach()
        return 0, lambda grad: weight.index_select(0, grad._indices()[0]), lambda: None, parameter.detach
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam,
    }  # fmt: skip
    updater = kinds[optimizer]([parameter], lr=LEARNING_RATE)

    def step(grad: Tensor) -> None:
        parameter.grad = grad
        updater.step()

    return 0, step, lambda: None, parameter.detach


SYSTEMS: dict[str, tuple[Callable[..., Any], dict[str, Any], bool]] = {
    "kvtrainer": (start_kvtrainer, {}, False),
    "local": (start_kvtrainer, {"kvstore": "local"}, True),
    "torch": (start_torch, {}, True),
}
"""How to begin, with which other arguments; whether the process has the rows of all workers."""


def main() -> None:
    """Measure one case; rank 0 writes the seconds of every step, and the weights."""
    options = _options()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    table = Table(**json.loads(options.table))
    start, more, has_all = SYSTEMS[options.system]
    import_what_steps_need()
    rank, step, barrier, weights = start(
        table, options.optimizer, lambda rank: None if rank else mark(f"{options.out}.0.base"), **more
    )
    ranks = range(options.workers) if has_all else range(rank, rank + 1)
    grads = [sparse_gradient(table, ranks, number) for number in range(BATCHES)]
    seconds = []
    for number in range(table.warm_up + table.rounds):
        grad = grads[number % BATCHES].clone()
        if number == table.warm_up and not rank:
            mark(f"{options.out}.0.begin")
        barrier()
        began = time.perf_counter()
        step(grad)
        if number >= table.warm_up:
            seconds.append(time.perf_counter() - began)
    barrier()
    if not rank:
        mark(f"{options.out}.0.end")
        np.save(options.weights, weights().numpy())
        measured = {"rounds": seconds, "median": statistics.median(seconds)}
        Path(options.out).write_text(json.dumps({options.optimizer: measured}))
    barrier()


def sparse_gradient(table: Table, ranks: range, number: int) -> Tensor:
    """The gradients of some workers, one behind the other, not coalesced, as a backward pass leaves them."""
    ids, values = zip(*[gradient(table, rank, number) for rank in ranks], strict=True)
    return torch.sparse_coo_tensor(
        torch.from_numpy(np.concatenate(ids))[None],
        torch.from_numpy(np.concatenate(values)),
        (table.rows, table.width),
        check_invariants=False,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--table", required=True, help="JSON of the fields of Table")
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    parser.add_argument("--weights", required=True, help="file for the weights of rank 0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
