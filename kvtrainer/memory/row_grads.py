"""Row-sparse gradients of a Trainer's parameters, as `nn.Embedding(sparse=True)` makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from kvstore_server.optimizer import coalesce_rows
from kvstore_server.plan import Plan, row_numel
from kvstore_server.reduction import RowSet
from kvtrainer.errors import ConfigurationError
from kvtrainer.memory.row_sparse import is_row_sparse


class SparseGrads:
    """Knows which parameters have had row-sparse gradients, and reads those that they have now."""

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str]) -> None:
        self._parameters = parameters
        self._names = names
        self._in_store = {i for i, p in enumerate(parameters) if is_row_sparse(p)}
        self._known: set[int] = set(self._in_store)
        """Those that had one once, or live in a store. Looking at every gradient in every step would take time."""

    def find(self, among: Sequence[bool]) -> bool:
        """Look at all gradients, because some are not dense; returns whether there is a sparse one not known yet."""
        grads = [p.grad if asked else None for p, asked in zip(self._parameters, among, strict=True)]
        found = {i for i, grad in enumerate(grads) if grad is not None and grad.layout is not torch.strided}
        is_new = not found <= self._known
        self._known |= found
        return is_new

    def present(self, among: Sequence[bool]) -> list[int]:
        """The parameters among those asked for whose gradient goes by rows now."""
        known = (i for i in sorted(self._known) if among[i])
        return [i for i in known if i in self._in_store or _is_sparse(self._parameters[i].grad)]

    @torch.no_grad()
    def rows(self, present: Iterable[int], plan: Plan) -> dict[int, RowSet]:
        """The rows of gradients, each row once: values of a row that appears several times are added in order.

        Parameters without elements have none.

        Raises:
            ConfigurationError: a gradient is sparse in another way than by rows, or its rows are too long.
        """
        return {i: self._rows(i, plan) for i in present if plan.specs[i].numel}

    def _rows(self, i: int, plan: Plan) -> RowSet:
        grad, spec = self._parameters[i].grad, plan.specs[i]
        assert grad is not None
        if grad.layout is torch.strided:
            # Of a row-sparse parameter, from elsewhere than its own backward pass: it has all rows.
            return RowSet(torch.arange(spec.shape[0]), grad.detach().reshape(spec.shape[0], row_numel(spec)))
        if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
            raise ConfigurationError(
                f"the gradient of {self._names[i]!r} has layout {grad.layout}"
                + (f" with sparse_dim {grad.sparse_dim()}" if grad.layout is torch.sparse_coo else "")
                + "; a sparse gradient must be a sparse COO tensor with sparse_dim 1, which has whole rows"
            )
        if not plan.takes_rows(i):
            raise ConfigurationError(
                f"the gradient of {self._names[i]!r} is sparse, but its rows of {row_numel(spec)} {spec.dtype} "
                "elements are longer than the 1 MiB that are updated together; build the module with sparse=False"
            )
        ids, values = grad._indices()[0], grad._values()
        if values.dtype.itemsize < 4 and len(ids) > 1:
            ids, summed = coalesce_rows(ids, values.float(), spec.shape[0])
            values = summed.to(values.dtype)
        else:
            ids, values = coalesce_rows(ids, values, spec.shape[0])
        return RowSet(ids, values.reshape(len(ids), row_numel(spec)))


def _is_sparse(grad: Tensor | None) -> bool:
    return grad is not None and grad.layout is not torch.strided
