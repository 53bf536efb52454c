"""Parameters without a number of rows: hash tables, whose rows are found by ids of 64 bits.

A `HashTableParameter` is a `RowSparseParameter` that names its rows by ids of any value. Stores know the rows by their
row numbers, which are hashes of the ids. A gradient must be a tensor with a shape, so it has *handles* instead: a
worker numbers the rows of its gradients as it meets them (`RowHandles`), and translates them when a step gathers the
gradients. Nothing else sees a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvstore_server import check
from kvstore_server.optimizer.rows import SortedRowIds, sort_row_ids
from kvstore_server.plan import (
    MAX_ROWS,
    HashTableOptions,
    TensorSpec,
    check_hash_table_options,
    hash_table_spec,
)
from kvstore_server.shard.id_index import MAX_SLOTS, IdIndex, Ints, ids_of_rows, row_numbers
from kvtrainer.common.tensors import flatten_id_tensor, tensor_dtype_name
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import ConfigurationError, RowSparseError
from kvtrainer.memory.row_sparse import (
    RowSparseOwner,
    RowSparseParameter,
    Source,
    sparse_gradient,
    sums_of_rows,
)
from kvtrainer.states.pretrained_rows import read_rows
from kvtrainer.states.row_file import RowTable
from kvtrainer.states.safetensors_file import Path

_GENERATIONS, _KEPT = 16, 1 << 20
"""How many generations of handles, and how many handles, are kept."""
_LAST = MAX_ROWS - (1 << 30)
"""From this handle on, numbering restarts from 0 with the next generation."""
_HOTTEST = 10
"""Ids that `stats` names."""


class RowHandles:
    """Numbers the rows of gradients, generation by generation; a row has another handle in each.

    A generation begins when no gradient is pending. Former ones are kept for gradients that the loop has put aside:
    at least `_GENERATIONS` of them, and as many as have `_KEPT` rows together.
    """

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        """The rows of each generation."""
        self._begins: list[int] = []
        """Its first handle."""
        self._index: IdIndex | None = None
        """Of the last one, if its rows came in several calls."""
        self._kept = self._end = 0

    def __len__(self) -> int:
        """Return how many handles are known."""
        return self._kept

    def restart(self) -> None:
        """Begin a generation, unless the last one is empty."""
        if not self._parts or not len(self._parts[-1]):
            return
        if self._end >= _LAST:  # gradients that were put aside so long ago are refused
            self._parts, self._begins, self._kept, self._end = [], [], 0, 0
        while len(self._parts) > _GENERATIONS and self._kept - len(self._parts[0]) >= _KEPT:
            self._kept -= len(self._parts.pop(0))
            del self._begins[0]
        self._begin()

    def _begin(self) -> None:
        self._parts.append(np.zeros(0, np.int64))
        self._begins.append(self._end)
        self._index = None

    def of(self, rows: Ints) -> Ints:
        """Return the handles of rows (distinct); those that have none in this generation get the next."""
        if not self._parts:
            self._begin()
        known, begin = self._parts[-1], self._begins[-1]
        if not len(known):
            found, new = np.arange(len(rows)), rows
        else:
            if self._index is None:
                self._index = IdIndex(known)
                self._index.insert(np.arange(len(known)))
            found = self._index.find(rows)
            missing = np.flatnonzero(found < 0)
            new = rows[missing]
            found[missing] = np.arange(len(known), len(known) + len(new))
        self._parts[-1] = np.concatenate([known, new])
        if self._index is not None:
            self._index.rows = self._parts[-1]
            self._index.insert(np.arange(len(known), len(self._parts[-1])))
        self._kept += len(new)
        self._end += len(new)
        return found + begin

    def rows(self, name: str, handles: Ints) -> Ints:
        """Return the rows of handles of a table. Raises RowSparseError for those of a generation that is not kept."""
        if not len(handles):
            return handles
        first = self._begins[0] if self._begins else self._end
        if handles.min() < first or handles.max() >= self._end:
            raise RowSparseError(
                f"a gradient of {name} was put aside for many steps, and its rows are not known any more; use it "
                "within some steps"
            )
        if handles.min() >= self._begins[-1]:
            return self._parts[-1][handles - self._begins[-1]]
        return np.concatenate(self._parts)[handles - first]


@uncompiled
class HashTableParameter(RowSparseParameter):
    """A table without a number of rows that is in the store of its Trainer; see `kvtrainer.Embedding`.

    Args:
        dim: Elements of a row.
        options: How rows come and go.
        dtype, device, requires_grad: As of `RowSparseParameter`.
        cache_rows, cache_age: See `kvtrainer.Embedding`.
    """

    options: HashTableOptions
    cache_rows: int
    cache_age: int
    handles: RowHandles

    def __new__(
        cls,
        dim: int,
        options: HashTableOptions,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = True,
        cache_rows: int = 0,
        cache_age: int = 0,
    ) -> HashTableParameter:
        if not check.is_integer(dim, 1):
            raise ConfigurationError(f"the rows of a hash table have 1 element or more, got dim={dim!r}")
        cache_rows = check.integer("cache_rows", cache_rows, 0, MAX_SLOTS)
        cache_age = check.integer("cache_age", cache_age, 0)
        if cache_age and not cache_rows:
            raise ConfigurationError(f"cache_age={cache_age} needs cache_rows, the number of rows to keep")
        kind = tensor_dtype_name(torch.get_default_dtype() if dtype is None else dtype)
        check_hash_table_options("this table", options, kind)
        self = super().__new__(cls, (MAX_ROWS, dim), dtype=dtype, device=device, requires_grad=requires_grad)
        assert isinstance(self, HashTableParameter)
        self.options, self.handles = options, RowHandles()
        self.cache_rows, self.cache_age = cache_rows, cache_age
        return self

    def row_sparse_data(self, row_ids: Any) -> Tensor:
        """Fetch rows as a tensor of shape row_ids.shape + (dim,), after this worker's steps. Blocks.

        Rows that are not in the table have their initial values.

        Args:
            row_ids: Integers of 64 bits, of any value and in any shape, on any device; may be empty.

        For errors see `RowSparseParameter.row_sparse_data`.
        """
        [found] = look_up([self.lookup(row_ids)])
        return found

    def lookup(self, row_ids: Any) -> RowLookup:
        """Return what `row_sparse_data` does, for `look_up`. Raises like that unless rows can be fetched."""
        owner = self._ready_owner()
        ids, shape = flatten_id_tensor(self._name(), row_ids, 0)
        ordered = sort_row_ids(row_numbers(ids.numpy()))

        def finish(rows: Tensor) -> Tensor:
            found: Tensor = _HashTableRows.apply(self, rows, ordered)  # type: ignore[no-untyped-call]
            return found.view(*shape, rows.shape[1])

        return RowLookup(owner, self, ordered.ids, finish)

    def pooled_lookup(self, row_ids: Any, starts: Tensor, weights: Tensor | None = None) -> RowLookup:
        """Return a lookup that sums rows, times their weights, of each bag of ids; otherwise like `lookup`.

        The result is (number of bags, dim), summed from left to right, half precision in float32.

        Args:
            row_ids: Of one dimension.
            starts: int64, where each bag begins, ascending.
            weights: One for each id.
        """
        owner = self._ready_owner()
        ids, _ = flatten_id_tensor(self._name(), row_ids, 0)
        ordered = sort_row_ids(row_numbers(ids.numpy()))

        def finish(rows: Tensor) -> Tensor:
            bags = _Bags(starts.to(rows.device), len(ordered.order))
            own = None if weights is None else weights.to(rows)
            found: Tensor = _PooledRows.apply(self, rows, ordered, bags, own)  # type: ignore[no-untyped-call]
            return found

        return RowLookup(owner, self, ordered.ids, finish)

    def begin_lookup(self) -> None:
        """Begin a generation of handles if no gradient is pending."""
        if self.grad is None or (self.grad.is_sparse and not self.grad._nnz()):
            self.handles.restart()

    def _read_ids(self, row_ids: Any) -> Tensor:
        """Return the row numbers of these ids: distinct, ascending, int64, on the CPU."""
        ids, _ = flatten_id_tensor(self._name(), row_ids, 0)
        return sort_row_ids(row_numbers(ids.numpy())).ids

    def spec(self, name: str, dtype: str, group: int) -> TensorSpec:
        """Return what a plan has of the table."""
        with torch._C.DisableTorchFunctionSubclass():
            return hash_table_spec(name, (int(self.shape[1]),), dtype, self.options, group)

    def rows_of(self, handles: Tensor) -> Tensor:
        """Return the row numbers of a gradient's handles, on the CPU."""
        return torch.from_numpy(self.handles.rows(self._name(), handles.cpu().numpy()))

    def detach(self) -> NoReturn:
        """Raise RowSparseError: there is no tensor of all rows."""
        raise RowSparseError(
            f"{self._name()} is a hash table, and there is no tensor of all its rows; `trainer.save_states` saves it, "
            "and in a kvtrainer.Embedding state_dict() leaves it out"
        )

    def copy_(self, source: Tensor, non_blocking: bool = False) -> NoReturn:
        """Raise RowSparseError: a hash table takes no tensor of all rows."""
        self.detach()

    def _source(self) -> Source:
        zero = torch.zeros((), dtype=self.dtype, device="cpu")
        return lambda start, numel: zero.expand(numel)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RowSparseError(
            f"{self._name()} cannot be pickled, because its rows live in a store; save them with trainer.save_states, "
            "and the module's state_dict(), which leaves them out"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> HashTableParameter:
        if self._is_placed or self._owner is not None:
            raise RowSparseError(
                f"{self._name()} cannot be copied, because its values live in the store of its Trainer; copy the model "
                "before building the Trainer"
            )
        with torch._C.DisableTorchFunctionSubclass():
            made = type(self)(
                int(self.shape[1]),
                self.options,
                dtype=self.dtype,
                device=self.device,
                requires_grad=self.requires_grad,
                cache_rows=self.cache_rows,
                cache_age=self.cache_age,
            )
        memo[id(self)] = made
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"HashTableParameter(dim={self.shape[1]}, dtype={self.dtype}, device={str(self.device)!r})"

    def _name(self) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return repr(self._label) if self._label else f"a hash table of rows of {self.shape[1]}"

    def stats(self) -> dict[str, Any]:
        """Return figures of the table, summed over servers; see `kvtrainer.Embedding.stats`."""
        name, owner = self._label, self._ready_owner()
        no_ids = torch.zeros(0, dtype=torch.int64, device="cpu")
        owner.row_sparse_pull([(self, no_ids)])  # what was loaded is there then
        found = [
            table["hash_tables"][name]
            for server in owner.server_stats()
            for table in server["tables"]
            if name in table["hash_tables"]
        ]
        names = ("rows", "admitted", "refused", "evicted", "nbytes")
        hottest = sorted(
            [tuple(one) for each in found for one in each["hottest"]], key=lambda one: (-one[1], one[0])
        )
        ids = ids_of_rows(np.array([row for row, _ in hottest], np.int64)).tolist()
        counts = [count for _, count in hottest]
        return {
            **{name: sum([one[name] for one in found]) for name in names},
            "hottest": dict(list(zip(ids, counts, strict=True))[:_HOTTEST]),
        }

    def export(self, fname: Path, padding_idx: int | None = None) -> None:
        """Write the rows to a file; see `kvtrainer.Embedding.export`."""
        self._ready_owner().export_rows(self, fname, padding_idx)

    def load_rows(self, source: Any, weights: Any, padding_idx: int | None = None) -> None:
        """Put rows into the table; see `kvtrainer.Embedding.load_rows`."""
        owner = self._ready_owner()
        with torch._C.DisableTorchFunctionSubclass():
            table = RowTable(self._label, int(self.shape[1]), self.dtype, self.options, padding_idx)
        owner.load_rows(self, lambda: read_rows(source, weights, table))

    def gradient_of_rows(self, rows: Tensor, values: Tensor) -> Tensor:
        """Return a gradient of rows (distinct row numbers), which get handles."""
        self._check_alone(values)
        handles = torch.from_numpy(self.handles.of(rows.numpy()))
        with torch._C.DisableTorchFunctionSubclass():
            shape = tuple(self.shape)
        return sparse_gradient(handles, values, shape, bool((handles[1:] > handles[:-1]).all()))


class RowLookup(NamedTuple):
    """Rows of a table that a forward pass needs, and what it makes of them."""

    owner: RowSparseOwner
    table: HashTableParameter
    rows: Tensor
    """Row numbers: distinct, ascending, int64, on the CPU."""
    finish: Callable[[Tensor], Tensor]
    """Makes the result of these rows, which are on the table's device."""


@uncompiled
def look_up(lookups: Sequence[RowLookup]) -> list[Tensor]:
    """Fetch the rows of all lookups together, and return their results. Blocks.

    For errors see `RowSparseParameter.row_sparse_data`.
    """
    # 1. The rows of all tables of a Trainer, which is nearly always the only one.
    fetched: dict[int, Tensor] = {}
    for owner in {id(one.owner): one.owner for one in lookups}.values():
        places = [at for at, one in enumerate(lookups) if one.owner is owner]
        for at in places:
            lookups[at].table.begin_lookup()
        rows = owner.row_sparse_pull([(lookups[at].table, lookups[at].rows) for at in places])
        fetched |= dict(zip(places, rows, strict=True))
    # 2. The results, with their place in the graph.
    with torch._C.DisableTorchFunctionSubclass():
        devices = [one.table.device for one in lookups]
    return [one.finish(fetched[at].to(devices[at])) for at, one in enumerate(lookups)]


@uncompiled
class _HashTableRows(torch.autograd.Function):
    """Repeats rows for all positions of their ids. The backward pass sums the gradients of each row, in this order."""

    @staticmethod
    def forward(ctx: Any, table: HashTableParameter, rows: Tensor, ids: SortedRowIds) -> Tensor:
        ctx.table, ctx.ids = table, ids
        return rows.index_select(0, ids.places().to(rows.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return a sparse gradient with distinct handles. Half precision is summed in float32 and rounded once."""
        return ctx.table.gradient_of_rows(ctx.ids.ids, sums_of_rows(ctx.ids, grad)), None, None


class _Bags(NamedTuple):
    starts: Tensor
    num_ids: int
    """Ids in all bags."""

    def of_positions(self) -> Tensor:
        """Return the bag of each position, int64."""
        ends = self.starts.new_tensor([self.num_ids])
        counts = torch.diff(self.starts, append=ends)
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


@uncompiled
class _PooledRows(torch.autograd.Function):
    """Sums rows of bags. Neither pass makes a copy of a row for each position.

    The gradient of a row is the sum of the gradients of the bags that it is in, in the order of positions: the same
    kernel, with bags in place of rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        table: HashTableParameter,
        rows: Tensor,
        ids: SortedRowIds,
        bags: _Bags,
        weights: Tensor | None,
    ) -> Tensor:
        ctx.table, ctx.ids, ctx.bags = table, ids, bags
        ctx.save_for_backward(rows, weights)
        return _sum_of_bags(rows, ids.places().to(rows.device), bags.starts, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, Tensor | None]:
        rows, weights = ctx.saved_tensors
        ids, device, bags = ctx.ids, grad.device, ctx.bags.of_positions()
        order = torch.from_numpy(ids.order).to(device)
        starts = torch.from_numpy(ids.is_first.nonzero()[0]).to(device)
        own = None if weights is None else weights.index_select(0, order)
        values = _sum_of_bags(grad, bags.index_select(0, order), starts, own)
        of_weights = None
        if weights is not None and ctx.needs_input_grad[4]:
            of_weights = (rows.index_select(0, ids.places().to(device)) * grad.index_select(0, bags)).sum(1)
        return ctx.table.gradient_of_rows(ids.ids, values), None, None, None, of_weights


def _sum_of_bags(rows: Tensor, places: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
    """Sum rows of each bag, times their weights, from left to right."""
    wide = rows.float() if rows.dtype.itemsize < 4 else rows
    if not len(wide) or not len(places):
        return rows.new_zeros(len(starts), rows.shape[1])
    found = torch.embedding_bag(
        wide.contiguous(),
        places,
        starts,
        mode=0,
        per_sample_weights=None if weights is None else weights.to(wide),
    )[0]
    return found.to(rows.dtype)


def is_hash_table(parameter: object) -> TypeGuard[HashTableParameter]:
    """Return whether this is a HashTableParameter."""
    return issubclass(type(parameter), HashTableParameter)
