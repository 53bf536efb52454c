"""Deltas: files that have of hash tables only what has changed since another file, their base, was saved.

A delta has everything that is not a hash table in full. Of a hash table it has the rows that were updated or came since
then, complete, and the numbers of those that have gone. A base may be a delta itself, so a chain of files ends with one
that has all rows. They are in one folder. Each file has an identity, a digest of its contents, and a delta names its
base and the base's identity. A file that was merged from a chain has the identity of the delta whose place it takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server.plan import HASH_SLICES
from kvstore_server.shard.id_index import Ints
from kvtrainer.errors import ConfigurationError, StateFileError, StateMismatchError, file_error
from kvtrainer.states.format import (
    HISTORY,
    BaseFile,
    SavedParameter,
    SavedStates,
    State,
    TableMark,
    mark_of_table,
    read_state_file,
    write_state_file,
)
from kvtrainer.states.safetensors_file import Path

_ROWS, _PRESENT, _DELETED, _FIGURES = "rows", "present rows", "deleted rows", "figures"
_CANDIDATE = "candidate "
_BEGINS = ("", _CANDIDATE)
"""Begin of the names of what belongs to rows of a table, and to rows that may not come yet."""
_NUMBERS = frozenset([begin + name for begin in _BEGINS for name in (_ROWS, _DELETED)])
"""Entries that say which rows there are."""


def read_states(fname: Path) -> SavedStates:
    """Read a file of saved states; if it is a delta, its bases, too, so that the result has all rows.

    Raises:
        StateFileError: One of the files is missing, unreadable or damaged; names it.
        StateMismatchError: A base is another file than the one on which the delta was saved.
    """
    _, chain = _read_chain(fname, lambda path: read_state_file(path, takes_delta=True))
    parameters: Mapping[str, SavedParameter] = {}
    for saved in reversed(chain):
        parameters = {
            name: _merged_parameter(fname, name, parameters.get(name), one)
            for name, one in saved.parameters.items()
        }
    return replace(chain[0], parameters=dict(parameters), base=None)


def merge_states(fname: str | os.PathLike[str], into: str | os.PathLike[str]) -> None:
    """Write what a delta and its bases have together into one file, without a Trainer.

    The file is the one that `Trainer.save_states` without `base` would have written instead of the delta, except for
    its identity, which is the delta's: so deltas that were saved on the delta load with it in the delta's place, and
    `into` may be the name of the delta itself. Blocks until it is on the disk.

    Args:
        fname: What `Trainer.save_states` with a `base` has written, in one folder with its bases.
        into: Where to write; an existing file is replaced atomically.

    Raises:
        StateFileError: One of the files cannot be read, or the new one cannot be written; nothing has changed.
        StateMismatchError: A base is another file than the one on which the delta was saved.
        ConfigurationError: `into` is one of the bases.
    """
    base = BaseRows(fname)
    base.check_target(into, is_delta=False)
    write_state_file(into, read_states(fname), base.identity)


class BaseRows:
    """Which rows a file and its bases have; no more of them is read.

    Raises:
        StateFileError, StateMismatchError: As `read_states`.
    """

    def __init__(self, fname: Path) -> None:
        self.fname = os.fspath(fname)
        self._paths, chain = _read_chain(fname, lambda path: read_state_file(path, True, _NUMBERS))
        self.identity = chain[0].identity
        self._states = {name: chain[0].parameters[name].state for name in chain[0].hash_tables}
        """Table → its entries, without rows."""
        self._rows: dict[str, dict[str, Ints]] = {}
        """Table → the numbers of its rows, ascending, by the begin of their entries' names."""
        for saved in reversed(chain):
            former, self._rows = self._rows, {}
            for name in saved.hash_tables:
                state = saved.parameters[name].state
                if state:
                    self._rows[name] = _rows_after(fname, name, former.get(name), state)

    def check_target(self, fname: Path, is_delta: bool = True) -> None:
        """Raise ConfigurationError unless a file can be written there beside these."""
        path = os.path.realpath(fname)
        if path in self._paths[not is_delta :]:
            raise ConfigurationError(
                f"{os.fspath(fname)!r} cannot be written, because it is a base of what should be written, or of "
                f"{self.fname!r}; choose another name"
            )
        if is_delta and os.path.dirname(path) != os.path.dirname(self._paths[0]):
            raise ConfigurationError(
                f"a delta finds its base in its own folder, but {os.fspath(fname)!r} and the base {self.fname!r} are "
                "in different ones; save it beside the base"
            )

    def described(self) -> BaseFile:
        return BaseFile(os.path.basename(self._paths[0]), self.identity)

    def has_rows(self, name: str) -> bool:
        """Return whether a table has rows, and so all entries of its optimizer's state."""
        return name in self._rows and len(self._rows[name][""]) > 0

    def delta_of(self, name: str, state: State) -> State:
        """Return what a delta has of a hash table.

        Args:
            state: The rows that have changed since the file was saved, and the numbers of all that are there.

        Raises:
            StateMismatchError: It does not go on from this file.
        """
        found, is_fit = dict(state), True
        before, now = _forms(self._states[name]), _forms(state)
        if before != now:
            raise StateMismatchError(
                f"since {self.fname!r} was saved, other numbers are kept for each row of hash table {name!r}: "
                f"{_differences(before, now)}. This depends on weight_decay of the table and on its optimizer. Rows "
                "that have not changed would not have them in a delta; save without base"
            )
        for begin in _BEGINS:
            present, changed = found.pop(begin + _PRESENT).numpy(), state[begin + _ROWS].numpy()
            former = self._rows[name][begin]
            were_there = _are_among(former, present)
            gone = torch.from_numpy(np.flatnonzero(~were_there))
            found[begin + _DELETED] = torch.from_numpy(former).index_select(0, gone)
            num_new = len(changed) - np.count_nonzero(_are_among(former, changed))
            is_fit &= len(present) == np.count_nonzero(were_there) + num_new
        if not is_fit:
            raise self.no_delta(name)
        return found

    def no_delta(self, name: str) -> StateMismatchError:
        """Build the error that a table has changed otherwise than by updates of its rows."""
        return StateMismatchError(
            f"hash table {name!r} has changed in another way than by updates since {self.fname!r} was saved or loaded: "
            "states were loaded, the optimizer was replaced, or a server has restarted or gone back to a snapshot. So "
            "it is not known which rows differ; save without base"
        )


def select_pending_states(
    states: Mapping[int, State], since: Mapping[int, int] | None, marks: dict[int, TableMark] | None
) -> dict[int, State]:
    """Return what `export_states` will return of these states once their holder has them."""
    found = dict(states)
    for key, state in states.items():
        if HISTORY not in state or _CANDIDATE + _ROWS not in state:
            continue  # no hash table, or not from a file
        found[key] = {name: value for name, value in state.items() if name != HISTORY}
        if marks is not None:
            marks[key] = mark_of_table(int(float(state["step"])), [state[HISTORY]] * HASH_SLICES)
        if since and key in since:
            found[key] = _select_changes(found[key], since[key])
    return found


def _select_changes(state: State, since: int) -> State:
    """Return the rows of a hash table that were touched after a step, and the numbers of all rows."""
    are_changed = {begin: state[f"{begin}touched"] > since for begin in _BEGINS}
    found = {
        name: value[are_changed[_begin_of(name)]] if _has_rows(value, name) else value
        for name, value in state.items()
    }
    return {**found, **{begin + _PRESENT: state[begin + _ROWS] for begin in _BEGINS}}


def _read_chain(fname: Path, read: Callable[[Path], SavedStates]) -> tuple[list[str], list[SavedStates]]:
    """Return the paths of a file and its bases, and what `read` returns of each."""
    paths, chain = [os.path.realpath(fname)], [read(fname)]
    while (base := chain[-1].base) is not None:
        path = _path_of_base(paths, base)
        what = f"{paths[-1]!r} has only what has changed since its base {base.name!r} was saved"
        try:
            found = read(path)
        except StateFileError as error:
            text = f"{what}, and that cannot be read: {error}"
            raise file_error(StateFileError, text, error, path) from error
        if found.identity != base.identity:
            raise StateMismatchError(
                f"{what}, but {path!r} is another file: its identity is {found.identity or None}, that of the base "
                f"{base.identity}. Put the base back into this folder, or load another file; nothing has changed"
            )
        paths.append(path)
        chain.append(found)
    return paths, chain


def _path_of_base(paths: list[str], base: BaseFile) -> str:
    folder, name = os.path.dirname(paths[-1]), base.name
    if name in ("", os.curdir, os.pardir) or os.path.basename(name) != name or "\0" in name:
        raise _damaged(
            paths[-1], f"its base is {name!r:.200}, which is not the name of a file without folders"
        )
    path = os.path.realpath(os.path.join(folder, name))
    if path in paths:
        raise _damaged(paths[-1], f"its base {name!r} is itself a delta of it")
    return path


def _merged_parameter(
    fname: Path, name: str, former: SavedParameter | None, own: SavedParameter
) -> SavedParameter:
    if _DELETED not in own.state:
        return own
    if former is None or not former.state:
        raise _damaged(fname, f"it has changes of hash table {name!r}, whose rows its base does not have")
    if _forms(former.state) != _forms(own.state):
        raise _damaged(fname, f"the rows of hash table {name!r} have other entries than in its base")
    merged = {begin: _MergedRows(fname, name, former.state, own.state, begin) for begin in _BEGINS}
    state = {
        entry: merged[_begin_of(entry)].values(former.state[entry], value)
        if _has_rows(value, entry)
        else value
        for entry, value in own.state.items()
        if not entry.endswith(_DELETED)
    }
    return replace(own, state=state)


class _MergedRows:
    """The rows of a base, without those that have gone, and those of a delta, in the order of their numbers."""

    def __init__(self, fname: Path, name: str, former: State, own: State, begin: str) -> None:
        self._what = fname, name
        old, new, deleted = (
            _checked_rows(fname, name, state.get(begin + entry))
            for state, entry in ((former, _ROWS), (own, _ROWS), (own, _DELETED))
        )
        are_deleted, are_updated = _are_among(old, deleted), _are_among(old, new)
        if np.count_nonzero(are_deleted) != len(deleted) or (are_deleted & are_updated).any():
            raise _damaged(fname, f"rows of hash table {name!r} have gone that its base does not have")
        kept = np.flatnonzero(~(are_deleted | are_updated))
        rows = np.concatenate([old[kept], new])
        order = rows.argsort(kind="stable")
        self.numbers: Ints = rows[order]
        self._kept, self._order = torch.from_numpy(kept), torch.from_numpy(order)
        self._lengths = len(old), len(new)

    def values(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the values of the merged rows."""
        if (len(old), len(new)) != self._lengths:
            raise _not_rows(*self._what)
        return torch.cat([old.index_select(0, self._kept), new]).index_select(0, self._order)


def _checked_rows(fname: Path, name: str, rows: Any) -> Ints:
    if isinstance(rows, Tensor) and rows.dtype is torch.int64 and rows.dim() == 1:
        numbers: Ints = rows.numpy()
        if (numbers[1:] > numbers[:-1]).all():
            return numbers
    raise _not_rows(fname, name)


def _not_rows(fname: Path, name: str) -> StateFileError:
    return _damaged(fname, f"what it or one of its bases has of hash table {name!r} is not a list of rows")


def _rows_after(fname: Path, name: str, former: Mapping[str, Ints] | None, own: State) -> dict[str, Ints]:
    """Return the numbers of a table's rows after a file, by the begin of their entries' names."""
    if _DELETED not in own:
        return {begin: _checked_rows(fname, name, own.get(begin + _ROWS)) for begin in _BEGINS}
    if former is None:
        raise _damaged(fname, f"it has changes of hash table {name!r}, whose rows its base does not have")
    rows = {begin + _ROWS: torch.from_numpy(former[begin]) for begin in _BEGINS}
    return {begin: _MergedRows(fname, name, rows, own, begin).numbers for begin in _BEGINS}


def _are_among(rows: Ints, others: Ints) -> npt.NDArray[np.bool_]:
    """Return which rows are among others; both ascend."""
    found = np.zeros(len(rows), bool)
    if len(rows) < len(others):
        places = np.minimum(others.searchsorted(rows), len(others) - 1)
        found[:] = others[places] == rows
    elif len(others):
        places = np.minimum(rows.searchsorted(others), len(rows) - 1)
        found[places[rows[places] == others]] = True
    return found


def _forms(state: State) -> dict[str, Any]:
    """Return the dtype and the shape of a row of each entry that has rows."""
    return {
        name: (value.dtype, value.shape[1:])
        for name, value in state.items()
        if _has_rows(value, name) and not name.endswith((_PRESENT, _DELETED))
    }


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    added, gone = (sorted(one.keys() - other.keys()) for one, other in ((now, before), (before, now)))
    changed = sorted(name for name in now.keys() & before.keys() if now[name] != before[name])
    named = {"there are also": added, "gone are": gone, "changed have": changed}
    return ", ".join(f"{what} {', '.join(map(repr, names))}" for what, names in named.items() if names)


def _has_rows(value: object, name: str) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 0 and name != _FIGURES


def _begin_of(name: str) -> str:
    return _CANDIDATE if name.startswith(_CANDIDATE) else ""


def _damaged(fname: Path, text: str) -> StateFileError:
    return StateFileError(f"cannot load states from {os.fspath(fname)!r}: {text}, so it was damaged")
