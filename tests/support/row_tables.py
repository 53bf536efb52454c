"""Row-sparse parameters in a Trainer of this process, and what is in their table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvstore_server.plan import Plan
from kvtrainer import RowSparseParameter, Trainer

SGD = {"learning_rate": 1.0}


class Model(nn.Module):
    """A table and a dense layer."""

    def __init__(self, shape: tuple[int, ...] = (6, 2), init: Any = 1.0) -> None:
        super().__init__()
        self.table = RowSparseParameter(shape, init)
        self.head = nn.Linear(shape[-1], 1)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.table.row_sparse_data(ids))
        return result


def alone(
    init: Any = 1.0, shape: tuple[int, ...] = (4, 1), **options: Any
) -> tuple[RowSparseParameter, Trainer]:
    """A table that nothing else trains beside."""
    table = RowSparseParameter(shape, init)
    return table, Trainer({"table": table}, "sgd", {**SGD, **options}, kvstore="local")


def column(table: RowSparseParameter) -> list[float]:
    """The first element of each row, from the store."""
    with torch.no_grad():
        return table.row_sparse_data(torch.arange(len(table)))[:, 0].tolist()


def interleaved(table: Tensor, plan: Plan, key: int) -> Tensor:
    """The rows of a table as its slices have them: one to each long slice in turn, and the last ones to a short one."""
    sizes = [slice_.used // table[0].numel() for slice_ in plan.slices_with(key)]
    longest = [size for size in sizes if size == max(sizes)]
    hands = [table[: sum(longest)][at :: len(longest)] for at in range(len(longest))]
    return torch.cat([*hands, table[sum(longest) :]])
