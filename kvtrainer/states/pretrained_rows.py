"""Rows that go from a hash table in a store to a file, and rows from elsewhere that go into one.

`read_rows` reads rows from tensors, modules and files, and checks all of them. `put_rows` changes the slices of a table
that they belong to: the state of a slice is fetched, the rows are put into it as new ones, and it is stored again. Only
rows that are loaded change.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kvstore_server.optimizer import Optimizer
from kvstore_server.optimizer.apply import create_row_state
from kvstore_server.optimizer.base import StateValue
from kvstore_server.plan import HASH_SLICES, Plan, slices_of_hashes
from kvstore_server.shard.hash_table import weights_of_slice
from kvstore_server.shard.id_index import Ints, ids_of_rows, row_numbers
from kvstore_server.shard.row_values import limit_norms
from kvstore_server.shard.table_optimizer import table_optimizer
from kvtrainer.common.progress import track_progress
from kvtrainer.common.tensors import flatten_id_tensor, is_sparse_tensor, tensor_dtype_name
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    ShapeMismatchError,
    StateFileError,
    file_error,
)
from kvtrainer.states.format import OptimizerStateHolder
from kvtrainer.states.row_file import RowFile, RowTable

_PARQUET, _ARROW = b"PAR1", b"ARROW1"
"""What such files begin with."""
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NAMED = 8
"""Ids that a message names."""


class PretrainedRows(NamedTuple):
    """Rows to put into a table.

    Args:
        numbers: Their row numbers, distinct and ascending.
        places: Where the weights of each are.
        weights: (any number, dim), on the CPU; finite in the dtype of the table.
    """

    numbers: Ints
    places: Tensor
    weights: Tensor


def rows_by_slice(plan: Plan, holder: OptimizerStateHolder, key: int) -> Iterator[tuple[Ints, Tensor]]:
    """Fetch the rows of a hash table slice by slice: their ids, and their weights. Blocks."""
    slices = plan.slices_with(key)
    states = holder.get_states(slices, [0] * len(slices))
    for _ in track_progress(slices, "fetching rows"):
        state = next(states)
        [entries] = state.entries
        yield ids_of_rows(np.asarray(entries["rows"])), weights_of_slice(entries, int(state.steps[0]))


# ---------------------------------------------------------------- into a table


def put_rows(
    plan: Plan, holder: OptimizerStateHolder, key: int, rows: PretrainedRows, optimizer: Optimizer
) -> None:
    """Put rows into a hash table as new ones. Blocks.

    Raises:
        OptimizerError: A server has no memory for them. Rows of slices before that are loaded.
    """
    dtype, options = plan.specs[key].dtype, plan.specs[key].hash_table
    assert options is not None
    own, _ = table_optimizer(options, optimizer)
    bounds = slices_of_hashes(rows.numbers).searchsorted(np.arange(HASH_SLICES + 1))
    parts = list(zip(plan.slices_with(key), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    for slice_, begin, end in track_progress([part for part in parts if part[1] < part[2]], "loading rows"):
        weights = rows.weights.index_select(0, rows.places[begin:end]).to(getattr(torch, dtype))
        if options.max_norm:
            limit_norms(weights, options.max_norm)
        [state] = holder.get_states([slice_], [0])
        step, state.history = int(state.steps[0]), 0  # files from before are no bases of deltas
        state.entries = [_with_rows(state.entries[0], rows.numbers[begin:end], weights, step, own)]
        holder.put_state(slice_, state)


def _with_rows(
    state: Mapping[str, Any], numbers: Ints, weights: Tensor, step: int, optimizer: Optimizer
) -> dict[str, StateValue]:
    """Return the state of a slice, as `HashTable.slice_state` does, with these rows in it."""
    former, candidates = state["rows"].numpy(), state["candidate rows"].numpy()
    stays = torch.from_numpy(np.flatnonzero(~np.isin(former, numbers, assume_unique=True)))
    waits = torch.from_numpy(np.flatnonzero(~np.isin(candidates, numbers, assume_unique=True)))
    every = torch.cat([state["rows"].index_select(0, stays), torch.from_numpy(numbers)])
    order = every.argsort()
    own = _state_of_new_rows(state, numbers, weights, step, optimizer)
    found: dict[str, StateValue] = {}
    for name, value in state.items():
        if name == "figures":  # how many rows have come, were refused, and have gone
            found[name] = value + value.new_tensor([[len(every) - len(former), 0, 0]])
        elif name.startswith("candidate "):
            found[name] = value.index_select(0, waits)
        elif isinstance(value, Tensor) and value.dim():
            found[name] = torch.cat([value.index_select(0, stays), own[name]]).index_select(0, order)
        else:
            found[name] = value
    return found


def _state_of_new_rows(
    state: Mapping[str, Any], numbers: Ints, weights: Tensor, step: int, optimizer: Optimizer
) -> dict[str, Tensor]:
    """Return what a slice has of rows that were touched in this step of the table and have had no gradient."""
    count, wide = len(numbers), weights.float() if weights.dtype.itemsize < 4 else weights
    found = {
        "rows": torch.from_numpy(numbers),
        "touched": torch.full((count,), max(step, 1), dtype=torch.int32, device="cpu"),
        "counts": torch.zeros(count, dtype=torch.int32, device="cpu"),
        "weights": weights,
        "wide weights": wide,
        "decayed": torch.full((count, 1), state.get("decay", 0.0), dtype=torch.float64, device="cpu"),
    }
    created = create_row_state(optimizer, wide)
    for name, value in state.items():
        if name.startswith("state ") and isinstance(value, Tensor) and value.dim():
            # An entry that has come with a later update is zero before it.
            initial = created.get(name.removeprefix("state "))
            own = value.new_zeros(count, *value.shape[1:])
            found[name] = own.copy_(initial) if isinstance(initial, Tensor) else own
    return found


# ---------------------------------------------------------------- from elsewhere


def read_rows(source: Any, weights: Any, table: RowTable) -> PretrainedRows:
    """Read rows that are to go into a table; see `Embedding.load_rows`. Blocks while files are read."""
    ids, values = _read_source(source, weights, table)
    flat, shape = flatten_id_tensor(repr(table.name), ids, 0)
    values = _as_tensor(f"weights of rows of {table.name!r}", values)
    # 1. Shapes and dtypes.
    if len(shape) != 1 or values.shape != (len(flat), table.dim):
        raise ShapeMismatchError(
            f"rows of {table.name!r} have {table.dim} elements, so there must be n ids of shape [n] and weights of "
            f"shape [n, {table.dim}]; got {list(shape)} and {list(values.shape)}"
        )
    if values.dtype not in _DTYPES or is_sparse_tensor(values):
        raise ConfigurationError(
            f"weights of rows of {table.name!r} are dense and {', '.join(map(tensor_dtype_name, _DTYPES))}, got "
            f"{values.dtype} ({values.layout})"
        )
    # 2. The values of the weights.
    if values.numel() and not bool(torch.stack(values.aminmax()).to(table.dtype).isfinite().all()):
        wrong = ~values.to(table.dtype).isfinite().all(1)
        raise ConfigurationError(
            f"the rows of {table.name!r} for ids {_named(flat[wrong])} have weights that are not finite in "
            f"{table.dtype}; leave these rows out, or mend them"
        )
    # 3. The ids.
    flat, places = _without_padding(flat, values, table)
    return _in_order(flat, places, values, table)


def _without_padding(ids: Tensor, weights: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
    """Return ids without `padding_idx`, whose row is always zero, and their places."""
    is_padding = ids == table.padding_idx if table.padding_idx is not None else torch.zeros_like(ids).bool()
    if bool(weights[is_padding].any()):
        raise ConfigurationError(
            f"id {table.padding_idx} is padding_idx of {table.name!r}, whose row is always zero, but it has other "
            "weights here; leave this row out"
        )
    [places] = (~is_padding).nonzero(as_tuple=True)
    return ids[places], places


def _in_order(ids: Tensor, places: Tensor, weights: Tensor, table: RowTable) -> PretrainedRows:
    """Sort rows as tables do, and leave out those that come twice with the same weights."""
    numbers = row_numbers(ids.numpy())
    order = numbers.argsort(kind="stable")
    numbers, places = numbers[order], places[torch.from_numpy(order)]
    is_again = np.append(False, numbers[1:] == numbers[:-1])
    again = np.flatnonzero(is_again)
    if len(again):
        differs = (weights[places[again]] != weights[places[again - 1]]).any(1).numpy()
        if differs.any():
            raise ConfigurationError(
                f"of the rows of {table.name!r}, ids {_named(torch.from_numpy(ids_of_rows(numbers[again[differs]])))} "
                "come more than once, with different weights; leave all but one of each out"
            )
        numbers, places = numbers[~is_again], places[torch.from_numpy(~is_again)]
    most = table.options.max_rows
    if most and len(numbers) > most:
        raise ConfigurationError(
            f"{table.name!r} has max_rows={most}, which is less than the {len(numbers)} rows to be loaded; raise it, "
            "or leave rows out"
        )
    return PretrainedRows(numbers, places, weights)


def _named(ids: Tensor) -> str:
    return ", ".join(map(str, ids[:_NAMED].tolist())) + (", …" if len(ids) > _NAMED else "")


def _as_tensor(what: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        return torch.from_numpy(np.require(np.asarray(value), requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{what} are a tensor or an array: {error}") from None


def _read_source(source: Any, weights: Any, into: RowTable) -> tuple[Any, Any]:
    """Return ids and weights."""
    if weights is not None:
        return source, weights
    if isinstance(source, str | os.PathLike):
        source = _open_source(source)
    if isinstance(source, nn.Embedding):
        return torch.arange(source.num_embeddings, device="cpu"), source.weight
    if isinstance(source, RowFile):
        source.verify()
        return source.ids, source.weights
    if type(source).__module__.partition(".")[0] == "pyarrow" and hasattr(source, "column_names"):
        return _read_arrow_table(source, into)
    raise ArgumentTypeError(
        f"rows of {into.name!r} are loaded from ids and weights, a torch.nn.Embedding, a RowFile, a pyarrow.Table, or "
        f"the name of a file; got {type(source).__name__} without weights"
    )


def _open_source(path: str | os.PathLike[str]) -> Any:
    """Return the RowFile or the pyarrow.Table that a file has."""
    try:
        with open(path, "rb") as file:
            head = file.read(len(_ARROW))
    except OSError:
        return RowFile(path)  # raises what is wrong
    if not head.startswith((_PARQUET, _ARROW)):
        return RowFile(path)
    try:
        arrow = importlib.import_module("pyarrow")
        module = importlib.import_module(f"pyarrow.{'parquet' if head.startswith(_PARQUET) else 'feather'}")
    except ImportError:
        raise ConfigurationError(
            f"{os.fspath(path)!r} is read with pyarrow, which is not installed; pip install 'kvtrainer[arrow]'"
        ) from None
    try:
        return module.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        text = f"cannot read rows from {os.fspath(path)!r}: {error}"
        raise file_error(StateFileError, text, error, path) from error


def _read_arrow_table(table: Any, into: RowTable) -> tuple[Any, Any]:
    # 1. Which column has what.
    types, names = importlib.import_module("pyarrow.types"), table.column_names
    if len(names) != 2 or len({"id", "ids"}.intersection(names)) != 1:
        raise ConfigurationError(
            f"an Arrow table of rows for {into.name!r} has two columns, 'ids' or 'id', and one with a list of numbers "
            f"for each id; this one has {names}; select two of them"
        )
    at = 0 if names[0] in ("id", "ids") else 1
    ids, lists = table.column(at), table.column(1 - at)
    if not any([f(lists.type) for f in (types.is_list, types.is_large_list, types.is_fixed_size_list)]):
        raise ConfigurationError(
            f"the column {names[1 - at]!r} of an Arrow table of rows for {into.name!r} has lists of numbers, not "
            f"{lists.type}"
        )
    # 2. The numbers, chunk by chunk.
    chunks = lists.chunks
    if ids.null_count or lists.null_count or any([chunk.flatten().null_count for chunk in chunks]):
        raise ConfigurationError(
            f"an Arrow table of rows for {into.name!r} has no nulls, but this one has; drop these rows"
        )
    lengths = {n for chunk in chunks for n in np.unique(chunk.value_lengths().to_numpy(False)).tolist()}
    if lengths - {into.dim}:
        raise ShapeMismatchError(
            f"rows of {into.name!r} have {into.dim} elements, but lists of column {names[1 - at]!r} have "
            f"{sorted(lengths)[:_NAMED]}"
        )
    rows = [chunk.flatten().to_numpy(zero_copy_only=False).reshape(-1, into.dim) for chunk in chunks]
    return ids.to_numpy(), np.concatenate(rows) if rows else np.zeros((0, into.dim), np.float32)
