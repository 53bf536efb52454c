"""Optimizer state of a store's own keys, in the file that a Trainer's states have too."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from kvstore_server.optimizer import Optimizer, States
from kvstore_server.plan import Slice
from kvtrainer.comm.client import Client
from kvtrainer.comm.tables import RemoteTable
from kvtrainer.errors import StateMismatchError
from kvtrainer.states.convert import export_states, import_states, saved_problems
from kvtrainer.states.file import SavedParameter, SavedStates, read_state_file, write_state_file

_NUMBERS = "numbers count"
"""Key of a file's extra values: whether the optimizer's numbers are taken over as well."""


def save(
    fname: str | os.PathLike[str],
    client: Client,
    tables: Sequence[RemoteTable],
    optimizer: Optimizer,
    with_numbers: bool,
) -> None:
    """Write the state of every table, each of one key; blocks while it is fetched.

    Raises:
        StateFileError: the file cannot be written; the former one is unchanged.
    """
    parameters = {}
    for table in tables:
        [spec] = table.plan.specs
        state = export_states(table.plan, _Holder(client, table)).get(0, {})
        counted = {**state, "step": int(state["step"])} if state else {}
        parameters[spec.key] = SavedParameter(spec.shape, spec.dtype, 0, counted)
    options = [dict(optimizer.plain_hyper())]
    extra = {_NUMBERS: with_numbers}
    write_state_file(fname, SavedStates(optimizer.spec(), optimizer.num_update, options, parameters, extra))


def load(
    fname: str | os.PathLike[str], client: Client, tables: Sequence[RemoteTable], optimizer: Optimizer
) -> Mapping[str, object]:
    """Replace the state of every table.

    Returns the optimizer's numbers, if they were saved to be taken over.

    Raises:
        StateFileError: the file cannot be read.
        StateMismatchError: it belongs to other keys or to another optimizer; names every difference, and nothing
            has changed.
    """
    saved = read_state_file(fname)
    specs = [table.plan.specs[0] for table in tables]
    if problems := [*saved_problems(saved, specs, optimizer, "keys", "this kvstore")]:
        raise StateMismatchError(
            f"the saved states do not fit this kvstore, which is unchanged: {'; '.join(problems)}. Load the states of "
            "the same keys and the same optimizer"
        )
    for table in tables:
        [spec] = table.plan.specs
        found = saved.parameters[spec.key].state
        states = {0: dict(found)} if found else {}
        import_states(table.plan, _Holder(client, table), states, optimizer, torch.device("cpu"))
    return saved.groups[0] if saved.extra.get(_NUMBERS) and saved.groups else {}


class _Holder:
    """The state of one table, where it lies."""

    def __init__(self, client: Client, table: RemoteTable) -> None:
        self._client, self._table = client, table

    def get_state(self, piece: Slice) -> States:
        return self._client.get_state(self._table, piece)

    def put_state(self, piece: Slice, state: States) -> None:
        self._client.put_state(self._table, piece, state)
