"""Rows that were asked for before they are needed, between one round of a Trainer and the next.

They are asked for when a round is over, not with its commit: a server that has the commit of one rank still waits for
the others, and would send rows as they were before. So the answers are what a pull in the next forward pass would get,
to the bit in synchronous rounds, and no server has to hold anything back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtrainer.comm.row_pulls import RowsAsked
from kvtrainer.sync.exchange import StoreExchange


class Prefetched:
    """Rows on their way from a store, or here.

    Args:
        wanted: Ids (distinct, ascending) of row-sparse keys, by index; they are asked for at once.
    """

    def __init__(self, exchange: StoreExchange, wanted: Mapping[int, Tensor]) -> None:
        self._exchange = exchange
        self._wanted = wanted
        self._asked: RowsAsked | None = exchange.ask_rows(wanted)
        self._rows: dict[int, Tensor] = {}

    def rows_of(self, key: int, ids: Tensor) -> Tensor:
        """Copy the rows of a key with some (distinct, ascending) ids; those that were not asked for are fetched now.

        Raises:
            KVStoreError: the store did not answer what it was asked, or answered with an error; it is asked anew
                by the next call.
        """
        if key not in self._wanted:
            return self._exchange.pull_rows(key, ids)
        if self._asked is not None:
            asked, self._asked, wanted = self._asked, None, self._wanted
            self._wanted = {}
            self._rows = dict(zip(wanted, self._exchange.take_rows(asked), strict=True))
            self._wanted = wanted
        have, rows = self._wanted[key], self._rows[key]
        if torch.equal(have, ids):
            return rows.clone()
        place = torch.searchsorted(have, ids).clamp_(max=max(len(have) - 1, 0))
        is_here = have[place] == ids if len(have) else torch.zeros(len(ids), dtype=torch.bool)
        found = rows.new_empty(len(ids), rows.shape[1])
        found[is_here] = rows[place[is_here]]
        if not bool(is_here.all()):
            found[~is_here] = self._exchange.pull_rows(key, ids[~is_here])
        return found

    def drop(self) -> None:
        """Have no use for them any more."""
        if self._asked is not None:
            self._exchange.drop_rows(self._asked)
