"""Rows of a hash table in a safetensors file, which one worker writes and processes that serve a model map.

The file has `ids` (int64, ascending) and `weights` (a row for each id). Its metadata has what the initial values of all
other ids follow from, so every id has a row. No Trainer and no server is needed to look rows up.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kvstore_server.durable.tensor_file import encode_header
from kvstore_server.plan import ITEM_SIZE, HashTableOptions, check_hash_table_options
from kvstore_server.shard.id_index import Ints, row_numbers
from kvstore_server.shard.row_values import initial_rows
from kvtrainer.common.tensors import flatten_id_tensor, tensor_dtype_name
from kvtrainer.errors import ConfigurationError, StateFileError
from kvtrainer.states.safetensors_file import Path, open_file, replace_file

FORMAT = "kvtrainer rows"
VERSION = "1"

_BLOCK = 1 << 16
"""Rows that are written at once."""
_NO_CHECKSUM = "0" * 8


class RowTable(NamedTuple):
    """A hash table without its rows."""

    name: str
    """Of its parameter in the Trainer."""
    dim: int
    dtype: torch.dtype
    options: HashTableOptions
    padding_idx: int | None

    def initial(self, ids: Ints) -> Tensor:
        """Return the initial values of rows."""
        return initial_rows(self.options, self.name, row_numbers(ids), self.dim, self.dtype)


def write_row_file(fname: Path, table: RowTable, slices: Iterable[tuple[Ints, Tensor]]) -> None:
    """Write rows in ascending order of their ids, atomically replacing an existing file. Blocks until it is on disk.

    Equal rows give equal bytes. Takes memory for the ids and for one slice at a time: the rows go to an unnamed
    temporary file in the same directory first, which takes as much disk space as the file itself.

    Args:
        slices: Distinct ids and their weights (on the CPU, contiguous), in any order.

    Raises:
        StateFileError: As `replace_file`.
    """
    folder = os.path.dirname(os.path.realpath(fname))
    with replace_file(fname, "export rows to") as file, tempfile.TemporaryFile(dir=folder) as unordered:
        # 1. Store the rows as they come, and sort their ids.
        parts = [np.zeros(0, np.int64)]
        for ids, weights in slices:
            parts.append(ids)
            unordered.write(weights.view(-1).view(torch.uint8).numpy().data)
        unordered.flush()
        found = np.concatenate(parts)
        order = found.argsort()
        sorted_ids = torch.from_numpy(found[order])
        # 2. Write them in this order. Their checksum replaces the placeholder in the header at last.
        weights = torch.empty(len(order), table.dim, dtype=table.dtype, device="meta")
        tensors = {"ids": sorted_ids, "weights": weights}
        header, _ = encode_header(tensors, _metadata(table, _NO_CHECKSUM))
        file.write(header)
        file.write(sorted_ids.numpy().data)
        checksum = zlib.crc32(sorted_ids.numpy().data)
        for block in _rows_in_order(unordered, order, table.dim * table.dtype.itemsize):
            checksum = zlib.crc32(block.data, checksum)
            file.write(block.data)
        file.seek(0)
        file.write(encode_header(tensors, _metadata(table, f"{checksum:08x}"))[0])


def _rows_in_order(file: Any, order: Ints, row_nbytes: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    if len(order):
        rows = np.memmap(file, np.uint8, "r", shape=(len(order), row_nbytes))
        for at in range(0, len(order), _BLOCK):
            yield rows[order[at : at + _BLOCK]]


def _metadata(table: RowTable, checksum: str) -> dict[str, str]:
    found = {
        "format": FORMAT,
        "version": VERSION,
        "name": table.name,
        "dim": str(table.dim),
        "init": table.options.init,
        "scale": repr(table.options.scale),
        "seed": str(table.options.seed),
        "max_norm": repr(table.options.max_norm),
        "checksum": checksum,
    }
    return found if table.padding_idx is None else {**found, "padding_idx": str(table.padding_idx)}


class RowFile:
    """The rows of a table that `Embedding.export` has written, memory-mapped: nothing is read before it is needed.

    Processes of a host share the memory. A file that is exported again under the same name replaces it for those that
    open it then; what is open stays as it was. Thread-safe.

    Args:
        path: The file.

    Raises:
        StateFileError: It is missing, unreadable, truncated, or not such a file, or its header or ids are damaged. For
            damaged weights see `verify`.

        rows = kvtrainer.RowFile("users.safetensors")
        vectors = rows.lookup(ids)
    """

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)
        with open_file(path, "read rows from") as opened:
            metadata = opened.metadata() or {}
            _check_kind(metadata, opened.keys())
            self.ids: Tensor = opened.get_tensor("ids")
            """int64, ascending; mapped."""
            self.weights: Tensor = opened.get_tensor("weights")
            """A row for each id, (number of ids, dim), in the dtype of the table; mapped. Writing to it changes neither
            the file nor what other processes see."""
            self._table = _read_table(metadata, self.weights)
            _check_rows(self._table, self.ids, self.weights)
            self._checksum = metadata.get("checksum", "")

    def __len__(self) -> int:
        """Return how many rows are in the file."""
        return len(self.ids)

    def __repr__(self) -> str:
        return f"RowFile({self._path!r}, rows={len(self)}, dim={self._table.dim}, dtype={self._table.dtype})"

    def lookup(self, ids: Any) -> Tensor:
        """Copy rows into a tensor of shape ids.shape + (dim,) on the CPU.

        An id that is not in the file has its initial value, with the bits that the table has for it; `padding_idx` has
        zeros.

        Args:
            ids: Integers of 64 bits, of any value, in any shape and on any device.

        Raises:
            ConfigurationError: An id is not an integer.
        """
        flat, shape = flatten_id_tensor(repr(self._path), ids, 0)
        wanted, table = flat.numpy(), self._table
        places = self._places(wanted)
        found = self.weights.new_empty(len(wanted), table.dim)
        if len(self):
            torch.index_select(self.weights, 0, torch.from_numpy(np.maximum(places, 0)), out=found)
        missing = np.flatnonzero(places < 0)
        if len(missing):
            found[torch.from_numpy(missing)] = table.initial(wanted[missing])
        if table.padding_idx is not None:
            found[flat == table.padding_idx] = 0
        return found.view(*shape, table.dim)

    def _places(self, wanted: Ints) -> Ints:
        """Return the row number of each id in the file; -1: it is not there."""
        own = self.ids.numpy()
        if not len(own):
            return np.full(len(wanted), -1, np.int64)
        # In ascending order, because a search begins where the one before has ended, in the cache.
        order = wanted.argsort()
        places = np.empty(len(wanted), np.int64)
        places[order] = np.minimum(own.searchsorted(wanted[order]), len(own) - 1)
        return np.where(own[places] == wanted, places, -1)

    def to_embedding(self) -> nn.Embedding:
        """Return a torch module with the file's rows, mapped and not trainable.

        `torch.searchsorted(rows.ids, ids)` returns the numbers of its rows, for ids that are in the file.
        """
        return nn.Embedding(len(self), self._table.dim, _weight=self.weights, _freeze=True)

    def verify(self) -> None:
        """Read the whole file. Raises StateFileError if it is not as it was written."""
        checksum = 0
        for tensor in (self.ids, self.weights):
            checksum = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data, checksum)
        if self._checksum != f"{checksum:08x}":
            raise StateFileError(
                f"the rows in {self._path!r} do not have the checksum that was saved with them, so they were damaged "
                "since; export them again"
            )


def lookup(file: Path, ids: Any) -> Tensor:
    """Look rows up in a file that `Embedding.export` has written; see `RowFile`, which opens it once for many calls."""
    return RowFile(file).lookup(ids)


def _check_kind(metadata: Mapping[str, str], names: Iterable[str]) -> None:
    if metadata.get("format") != FORMAT or {*names} != {"ids", "weights"}:
        raise StateFileError(
            "it is a safetensors file, but of something else: Embedding.export did not write it"
        )
    if metadata.get("version") != VERSION:
        raise StateFileError(
            f"it has version {metadata.get('version')!r} of the format, this kvtrainer reads {VERSION!r}; update "
            "kvtrainer"
        )


def _read_table(metadata: Mapping[str, str], weights: Tensor) -> RowTable:
    try:
        options = HashTableOptions(
            int(metadata["seed"]),
            metadata["init"],
            float(metadata["scale"]),
            max_norm=float(metadata["max_norm"]),
        )
        padding = metadata.get("padding_idx")
        table = RowTable(
            metadata["name"],
            int(metadata["dim"]),
            weights.dtype,
            options,
            None if padding is None else int(padding),
        )
        check_hash_table_options("its table", options, tensor_dtype_name(weights.dtype))
    except (KeyError, ValueError, ConfigurationError) as error:
        raise StateFileError(f"its description makes no sense ({type(error).__name__}: {error})") from error
    return table


def _check_rows(table: RowTable, ids: Tensor, weights: Tensor) -> None:
    is_table = ids.dtype == torch.int64 and ids.dim() == 1 and tensor_dtype_name(table.dtype) in ITEM_SIZE
    if not is_table or weights.shape != (len(ids), table.dim):
        raise StateFileError(
            f"its ids are {ids.dtype}{list(ids.shape)} and its weights {weights.dtype}{list(weights.shape)}, which is "
            f"no table of rows of {table.dim} elements"
        )
    if bool((ids[1:] <= ids[:-1]).any()):
        raise StateFileError("its ids are not ascending, so it was damaged since it was written")
