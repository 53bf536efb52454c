"""One process of row-sparse steps, on any of the systems that know torch; started by `sparse.py`."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sparse_steps import LEARNING_RATE, PULL, Gradients, Table, run, worker_options
from step_worker import import_what_steps_need
from torch import Tensor
from torch.nn import Parameter

Step = Callable[[Tensor], object]
"""One step with a gradient, or one look at the rows that it has."""
Weights = Callable[[], Tensor]


def start_kvtrainer(table: Table, optimizer: str, store: Any, resumes: bool = False) -> tuple[Step, Weights]:
    """`Trainer.step`, with the optimizer in the store, and the table in the worker, too, unless it is for "pull"."""
    kvtrainer = importlib.import_module("kvtrainer")
    shape, rate = (table.rows, table.width), {"learning_rate": LEARNING_RATE}
    if optimizer == PULL:
        stored = kvtrainer.RowSparseParameter(shape, torch.from_numpy(table.first()))
        trainer = kvtrainer.Trainer([stored], "sgd", rate, kvstore=store)
        return (lambda grad: _pulled(stored, grad, trainer)), stored.detach
    lazy = {} if optimizer == "adagrad" else {"lazy_update": True}
    parameter = Parameter(torch.from_numpy(table.first()))
    trainer = kvtrainer.Trainer([parameter], optimizer, {**rate, **lazy}, kvstore=store)
    if resumes:
        trainer.resume()

    def step(grad: Tensor) -> None:
        parameter.grad = grad
        trainer.step(1)

    return step, parameter.detach


def _pulled(stored: Any, grad: Tensor, trainer: Any) -> Tensor:
    del trainer  # it owns the table
    with torch.no_grad():
        result: Tensor = stored.row_sparse_data(grad._indices()[0])
    return result


def start_torch(table: Table, optimizer: str, store: None = None) -> tuple[Step, Weights]:
    """torch's optimizer for sparse gradients in one process, which sends nothing; "pull": `index_select`."""
    parameter = Parameter(torch.from_numpy(table.first()))
    if optimizer == PULL:
        weight = parameter.detach()
        return (lambda grad: weight.index_select(0, grad._indices()[0])), parameter.detach
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam,
    }  # fmt: skip
    updater = kinds[optimizer]([parameter], lr=LEARNING_RATE)

    def step(grad: Tensor) -> None:
        parameter.grad = grad
        updater.step()

    return step, parameter.detach


SYSTEMS: dict[str, tuple[Callable[..., tuple[Step, Weights]], str | None]] = {
    "kvtrainer": (start_kvtrainer, "dist_sync"),
    "resuming": (functools.partial(start_kvtrainer, resumes=True), "dist_sync"),
    "local": (start_kvtrainer, "local"),
    "torch": (start_torch, None),
}
"""How to begin, and with which kvstore. Without workers, a process has the rows of all."""


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    options = worker_options(parser).parse_args()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    start, store = SYSTEMS[options.system]
    import_what_steps_need()
    rank, ranks, barrier = 0, range(options.workers), lambda: None
    made: Any = store
    if store == "dist_sync":
        made = importlib.import_module("kvtrainer").kvstore.create(store)
        rank, ranks, barrier = made.rank, range(made.rank, made.rank + 1), made.barrier

    def begin(table: Table, optimizer: str) -> tuple[Callable[[int], Tensor], Step, Callable[[], Any]]:
        step, weights = start(table, optimizer, made)
        grads = [Gradients(table, rank) for rank in ranks]
        return (lambda number: sparse_gradient(table, grads, number)), step, lambda: weights().numpy()

    run(begin, rank, barrier, options)


def sparse_gradient(table: Table, grads: Sequence[Gradients], number: int) -> Tensor:
    """A round's gradients of some workers, one behind the other, not coalesced, as a backward pass leaves them."""
    ids, values = zip(*[one.of(number) for one in grads], strict=True)
    return torch.sparse_coo_tensor(
        torch.from_numpy(np.concatenate(ids))[None],
        torch.from_numpy(np.concatenate(values)),
        (table.rows, table.width),
        check_invariants=False,
    )


if __name__ == "__main__":
    main()
