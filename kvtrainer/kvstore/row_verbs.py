"""The verb that reads some rows of a key: which rows of which keys are wanted, and where they go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from kvstore_server.errors import ConfigurationError, KeyNotFoundError, ShapeMismatchError
from kvtrainer.comm.client import Client
from kvtrainer.comm.row_pulls import RowsWanted
from kvtrainer.kvstore.base import Key
from kvtrainer.kvstore.entries import Entry
from kvtrainer.kvstore.row_values import as_sparse, check_rows, is_ids, is_sparse, read_ids, write_rows
from kvtrainer.kvstore.values import check_fits, check_key, check_out


class RowPull(NamedTuple):
    """One set of rows of one key, and the tensors that they go to."""

    entry: Entry
    ids: Tensor
    outs: Sequence[Tensor]


def read_pulls(
    entries: Mapping[Key, Entry], key: Any, out: Any, row_ids: Any
) -> tuple[list[list[RowPull]], list[bool]]:
    """Per key: its pulls, one for each set of ids; and whether several sets were given.

    Raises:
        ConfigurationError: the arguments do not fit together, or ids are no whole numbers.
        KeyNotFoundError: a key was never initialised.
        ShapeMismatchError: a key has no rows, or an `out` is not like its key.
        RowIdError: a key has no such rows.
    """
    if row_ids is None:
        raise ConfigurationError("row_sparse_pull needs row_ids=…: the rows that are wanted")
    keys = [check_key(one) for one in key] if isinstance(key, list | tuple) else [check_key(key)]
    if not isinstance(key, list | tuple):
        outs, ids = [out], [row_ids]
    else:
        outs = _for_each(keys, out, "out") if out is not None else [None] * len(keys)
        ids = [row_ids] * len(keys) if is_ids(row_ids) else _for_each(keys, row_ids, "row_ids")
    rows = zip(keys, outs, ids, strict=True)
    return [_of_key(entries, *row) for row in rows], [not is_ids(one) for one in ids]


def pull(client: Client, pulls: Sequence[RowPull]) -> list[Tensor]:
    """Fetch all rows, write them to their `outs`, and return them as sparse tensors; blocks."""
    whole = {id(p): p for p in pulls if not p.entry.table.plan.takes_rows(0)}
    arenas = {at: p.entry.new_arena() for at, p in whole.items()}
    client.rounds.pull([(p.entry.table, arenas[at]) for at, p in whole.items()])
    wanted = [p for p in pulls if id(p) not in whole]
    fetched = client.rounds.pull_rows([RowsWanted(p.entry.table, 0, p.ids) for p in wanted])
    found = dict(zip(map(id, wanted), fetched, strict=True))
    for at, p in whole.items():
        # Its rows are too long for a slice, so that a server cannot tell them apart.
        spec = p.entry.spec
        found[at] = arenas[at][spec.dtype].view(spec.shape[0], -1)[p.ids]
    results = [as_sparse(p.entry.spec, p.ids, found[id(p)]) for p in pulls]
    for p, rows in zip(pulls, results, strict=True):
        for out in p.outs:
            write_rows(out, rows)
    return results


def without_sparse(
    pairs: Sequence[tuple[Key, list[Tensor]]], ignore_sparse: bool, warn: Callable[[Key], object]
) -> list[tuple[Key, list[Tensor]]]:
    """What a pull of whole keys writes to: as MXNet's, it leaves sparse tensors alone.

    Raises:
        ConfigurationError: there is one, and `ignore_sparse` is false.
    """
    dense = []
    for key, outs in pairs:
        kept = [one for one in outs if not is_sparse(one)]
        if len(kept) < len(outs):
            if not ignore_sparse:
                raise ConfigurationError(
                    f"out of key {key!r} is sparse, which pull does not write to; use row_sparse_pull(…, row_ids=…)"
                )
            warn(key)
        if kept:
            dense.append((key, kept))
    return dense


def _of_key(entries: Mapping[Key, Entry], key: Key, out: Any, row_ids: Any) -> list[RowPull]:
    entry = entries.get(key)
    if entry is None:
        raise KeyNotFoundError(f"key {key!r} has not been initialised; call init or broadcast first")
    if not entry.spec.shape:
        raise ShapeMismatchError(f"key {key!r} has no dimension, hence no rows; use pull")
    outs = _checked_outs(entry, key, out)
    sets = [row_ids] if is_ids(row_ids) else list(row_ids)
    found = [read_ids(key, one, entry.spec.shape[0]) for one in sets]
    if len(found) == 1:
        return [RowPull(entry, found[0], outs)]
    if out is not None and len(outs) != len(found):
        raise ConfigurationError(
            f"key {key!r} has {len(outs)} outs but {len(found)} row_ids; give one for each, or one for all"
        )
    return [RowPull(entry, ids, outs[at : at + 1]) for at, ids in enumerate(found)]


def _checked_outs(entry: Entry, key: Key, out: Any) -> list[Tensor]:
    outs = [] if out is None else list(out) if isinstance(out, list | tuple) else [out]
    for one in outs:
        if not isinstance(one, Tensor) or one.is_meta:
            raise ConfigurationError(
                f"out of key {key!r} must be a tensor or a list of tensors, got {one!r:.80}"
            )
        if is_sparse(one):
            check_rows("out", key, one)
            check_fits(entry.spec, one, any_dtype=True)
        else:
            check_out(entry.spec, one)
    return outs


def _for_each(keys: Sequence[Key], given: Any, what: str) -> list[Any]:
    if not isinstance(given, list | tuple) or len(given) != len(keys):
        got = f"{len(given)}" if isinstance(given, list | tuple) else type(given).__name__
        raise ConfigurationError(f"{len(keys)} keys need a list of {len(keys)} {what}, got {got}")
    return list(given)
