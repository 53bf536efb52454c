"""Rows of row-sparse parameters out of their store; some are asked for before they are needed.

Those are asked for between one round and the next, not with its commit: a server that has the commit of one rank still
waits for the others, and would send rows as they were before. So the answers are what a pull in the next forward pass
would get, to the bit in synchronous rounds, and no server has to hold anything back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtrainer.comm.row_pulls import RowPulls, RowsAsked
from kvtrainer.comm.tables import RemoteTable


class StoreRows:
    """Rows of the keys (by index) of a table, after this worker's own rounds, on the CPU.

    Args:
        pulls: asks servers for them.
    """

    def __init__(self, pulls: RowPulls, table: RemoteTable) -> None:
        self.are_read = False
        """They may be read where servers of this host have them."""
        self.wanted: Mapping[int, Tensor] = {}
        """Key → ids of the rows that were asked for before."""
        self._pulls, self._table = pulls, table
        self._asked: RowsAsked | None = None
        """Those that are still to come."""
        self._rows: dict[int, Tensor] = {}

    def read(self, key: int, ids: Tensor) -> Tensor | None:
        """Copy rows (any int64 ids that it has) of a key where servers have them; None where that cannot be."""
        return self._pulls.read(self._table, key, ids) if self.are_read else None

    def prefetch(self, wanted: Mapping[int, Tensor]) -> None:
        """Ask for rows (distinct, ascending ids by key), which `pull` finds until `drop`; returns at once.

        Nothing is asked for that can be read where servers have it.
        """
        self.drop()
        self.wanted = {key: ids for key, ids in wanted.items() if self.read(key, ids[:0]) is None}
        if self.wanted:
            self._asked = self._pulls.ask([(self._table, key, ids) for key, ids in self.wanted.items()])

    def pull(self, key: int, ids: Tensor) -> Tensor:
        """Copy the rows of a key with some (distinct, ascending) ids; those that were not asked for are fetched now.

        Raises:
            KVStoreError: the store did not answer what it was asked, or answered with an error; it is asked anew
                by the next call.
        """
        if key not in self.wanted:
            return self._fetch(key, ids)
        if self._asked is not None:
            asked, self._asked, wanted = self._asked, None, self.wanted
            self.wanted = {}
            self._rows = dict(zip(wanted, self._pulls.take(asked), strict=True))
            self.wanted = wanted
        have, rows = self.wanted[key], self._rows[key]
        if torch.equal(have, ids):
            return rows.clone()
        place = torch.searchsorted(have, ids).clamp_(max=max(len(have) - 1, 0))
        is_here = have[place] == ids if len(have) else torch.zeros(len(ids), dtype=torch.bool)
        found = rows.new_empty(len(ids), rows.shape[1])
        found[is_here] = rows[place[is_here]]
        if not bool(is_here.all()):
            found[~is_here] = self._fetch(key, ids[~is_here])
        return found

    def drop(self) -> None:
        """Forget rows that were asked for, because they change."""
        if self._asked is not None:
            self._pulls.drop(self._asked)
        self.wanted, self._asked, self._rows = {}, None, {}

    def _fetch(self, key: int, ids: Tensor) -> Tensor:
        [rows] = self._pulls.pull([(self._table, key, ids)])
        return rows
