"""What a worker knows about its tables: how servers number them, which round comes next, how old its weights are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import Codec, torch_dtype
from kvstore_server.errors import KVStoreError
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol import messages as m
from kvtrainer.comm.compressor import Compressor


class RemoteTable:
    """A table as this worker sees it; its numbers are in the arrays of `Tables`."""

    def __init__(self, name: str, plan: Plan, index: int, tables: Tables) -> None:
        self.name = name
        self.plan = plan
        self.index = index
        self.compressor: Compressor | None = None
        """How this rank's contributions are compressed; None: they are not."""
        self.takes_half = False
        """Whether the weights here are those of the servers, rounded to bfloat16."""
        self.delta_codec: Codec | None = None
        """How changes of weights are encoded that come in place of weights; None: weights come."""
        self.followed: dict[int, tuple[int, Tensor]] = {}
        """Slice (by index) → the version and the weights that its next changes are added to, with padding."""
        self._tables = tables
        self._at: dict[int, int] | None = None
        """Slice → its position among those of its server, once somebody has asked."""

    def new_arenas(self) -> dict[str, Tensor]:
        """Make room for all values that are not row-sparse, as the Plan lays them out; zeros."""
        sizes = self.plan.resident_sizes
        return {dtype: torch.zeros(size, dtype=torch_dtype(dtype)) for dtype, size in sizes.items()}

    @property
    def round(self) -> int:
        """The next round."""
        return int(self._tables.round[self.index])

    @property
    def is_initialised(self) -> bool:
        """Whether a round was applied yet; the first one that is gives the initial values."""
        return bool(self._tables.is_initialised[self.index])

    @property
    def numbers(self) -> dict[int, int]:
        """Server → the table's number there."""
        return _known(self._tables.number[:, self.index])

    @property
    def versions(self) -> dict[int, int]:
        """Server → the version of its weights that this worker has."""
        return _known(self._tables.version[:, self.index])

    @property
    def staleness(self) -> int:
        """How many updates came between the weights of this worker's last contribution and that, on any server."""
        return int(self._tables.staleness[self.index])

    @property
    def broken(self) -> KVStoreError | None:
        """Why one cannot go on with the table; None while its servers agree on the last round."""
        return self._tables.broken.get(self.index)

    def stands(self, round_: int) -> bool:
        """Tell whether a round that this worker was in counts for the others, whatever became of it here."""
        return self.round > round_ and self._tables.failed.get(self.index) != round_

    def slot_of(self, piece: Slice) -> int:
        """The number of a slice on its server."""
        if self._at is None:
            self._at = {
                p.index: at
                for server in self.plan.servers
                for at, p in enumerate(self.plan.slices_of(server))
            }
        return int(self._tables.slot[piece.server, self.index]) + self._at[piece.index]

    def register(self, server: int, registered: m.Registered) -> None:
        """Note how a server numbers the table and its slices."""
        self._tables.number[server, self.index] = registered.table
        self._tables.slot[server, self.index] = registered.slot

    def go_on(self, round_: int, is_initialised: bool) -> None:
        """Begin with a round, of a table that may have values."""
        self._tables.round[self.index] = round_
        self._tables.is_initialised[self.index] = is_initialised

    def note_version(self, server: int, version: int) -> None:
        """Note of which version the weights here are that did not come from the server itself."""
        self._tables.version[server, self.index] = version

    def forget_held(self) -> None:
        """Nobody knows any more what is in the arena of items that are `kept`."""
        self._tables.held[:, self.index] = -1


class Tables:
    """What a worker knows about its tables, as arrays over their index; those of two dimensions by server, too."""

    def __init__(self, num_servers: int) -> None:
        self.all: list[RemoteTable] = []
        self.round = np.zeros(0, np.int64)
        self.staleness = np.zeros(0, np.int64)
        self.is_initialised = np.zeros(0, np.bool_)
        self.number = np.zeros((num_servers, 0), np.int64)
        """The table's number there; -1 where it has no slices."""
        self.slot = np.zeros((num_servers, 0), np.int64)
        """The number of its first slice there."""
        self.version = np.zeros((num_servers, 0), np.int64)
        """Of the weights that came last; -1 for none."""
        self.newest = np.zeros((num_servers, 0), np.int64)
        """Of the weights right after this worker's last round, or of those that came since; -1 where nobody said."""
        self.held = np.zeros((num_servers, 0), np.int64)
        """Of the weights in the arena of items that are `kept`."""
        self.broken: dict[int, KVStoreError] = {}
        self.failed: dict[int, int] = {}
        """Table (index) → its last round that did not count, as far as servers have said so."""

    def add(self, name: str, plan: Plan) -> RemoteTable:
        """Note a table that servers are yet to number."""
        table = RemoteTable(name, plan, len(self.all), self)
        self.all.append(table)
        if len(self.round) < len(self.all):
            more = max(16, len(self.round))
            self.round, self.staleness = (
                np.append(a, np.zeros(more, np.int64)) for a in (self.round, self.staleness)
            )
            self.is_initialised = np.append(self.is_initialised, np.zeros(more, np.bool_))
            none = np.full((len(self.number), more), -1)
            self.number, self.slot, self.version, self.newest, self.held = (
                np.append(a, none, axis=1)
                for a in (self.number, self.slot, self.version, self.newest, self.held)
            )
        return table


def _known(by_server: Any) -> dict[int, int]:
    return {server: number for server, number in enumerate(by_server.tolist()) if number >= 0}
