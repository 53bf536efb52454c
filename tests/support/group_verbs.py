"""The verbs of a store on one of several ranks of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvtrainer import kvstore, optimizer
from kvtrainer.errors import KVStoreError


def error_of(call: Callable[[], object]) -> str:
    """The class and the text of what a call raises."""
    try:
        call()
    except KVStoreError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def verbs(rank: int) -> dict[str, Any]:
    """What the verbs of a store give on this rank."""
    kv: Any = kvstore.create("device")
    out = torch.zeros(2)
    found: dict[str, Any] = {"place": [kv.rank, kv.num_workers, kv.type]}

    def pulled(key: int) -> float:
        kv.pull(key, out=out)
        return out[0].item()

    kv.init(3, torch.full((2,), rank + 5.0))
    found["init"] = pulled(3)
    kv.push(3, torch.full((2,), rank + 1.0))
    found["push"] = pulled(3)
    kv.push(3, [torch.full((2,), rank + 1.0)] * 3)
    found["replicas"] = pulled(3)
    value = torch.full((2,), rank + 1.0)
    kv.pushpull(3, value)
    found["pushpull"] = value[0].item()
    kv.broadcast(4, torch.full((2,), rank + 2.0), out)
    found["broadcast"] = out[0].item()
    kv.barrier()
    found["refused"] = [
        error_of(lambda: kv.push(8 + rank, value)),
        error_of(lambda: kv.push(3 if rank else 4, value)),
        error_of(lambda: kv.push(3, torch.zeros(2 + rank))),
        error_of(lambda: kv.init(9, torch.zeros(2 + rank))),
        error_of(lambda: kv.init(4 if rank else 10, value)),
        error_of(kv.barrier if rank else lambda: kv.push(3, value)),
        error_of(lambda: kv.set_gradient_compression({"type": "2bit"})),
    ]
    kv.set_optimizer(kvstore_optimizer(2.0))
    rows = []
    for _ in range(3):
        kv.push(4, [torch.full((2,), rank + 1.0)] * 2)
        rows.append(pulled(4))
    found["optimizer"] = rows
    kv.set_optimizer(kvstore_optimizer(2.0 + rank))
    found["optimizers"] = error_of(lambda: kv.push(4, value))
    found["rows"] = rows_of(rank)
    return found


def rows_of(rank: int) -> list[list[float]]:
    """The first column of a key after pushes of rows on every rank, of rows on one, and of rows beside dense ones."""
    kv: Any = kvstore.create("local_allreduce_device")
    kv.init("e", torch.zeros(4, 2))
    kv.set_optimizer(kvstore_optimizer(1.0))
    out, found = torch.zeros(4, 2), []

    def rows(*ids: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            torch.tensor([ids], dtype=torch.int64), torch.ones(len(ids), 2), (4, 2)
        )

    for value in (
        [rows(0, rank), rows(3)],
        rows(1, 1) if rank == 1 else rows(),
        torch.ones(4, 2) if rank else rows(2),
    ):
        kv.push("e", value)
        kv.pull("e", out=out)
        found.append(out[:, 0].tolist())
    return found


def kvstore_optimizer(rescale: float) -> Any:
    return optimizer.create("test", learning_rate=-1.0, rescale_grad=rescale)
