"""How the rows of a table that lives in a store are dealt to its slices: one to each in turn, like cards.

Ids that are asked for often are often neighbours: a vocabulary that is sorted by frequency has them all in front. Were
a slice a piece of the table, the server with the first one would have most of the work. Who has which row follows from
the slices alone, so it is the same for any number of servers.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]


class Deal(NamedTuple):
    """Which row lies where in neighbouring slices.

    Slices that are as long as the first one get their rows in turn. A shorter one at the end has the last rows.
    """

    slices: int
    """The number of those of equal length; with one or none every row lies where its number says."""
    length: int
    """Rows of each of them."""

    @property
    def is_plain(self) -> bool:
        """Whether every row lies where its number says."""
        return self.slices < 2

    def places(self, rows: Ints) -> Ints:
        """Say where rows lie, counted from the first row of the first slice."""
        if self.is_plain:
            return rows
        # row = turn * slices + hand lies at hand * length + turn, which needs no remainder.
        whole = self.slices * self.length
        dealt = rows // self.slices
        dealt *= 1 - whole
        dealt += rows * self.length
        return np.where(rows < whole, dealt, rows)

    def rows(self, places: Ints) -> Ints:
        """Say which rows lie there, see `places`."""
        return places if self.is_plain else Deal(self.length, self.slices).places(places)

    def in_order(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the places of ascending rows in ascending order, and which of the rows is at each."""
        places = self.places(rows)
        if self.is_plain:
            return places, np.arange(len(rows))
        # A slice has its rows in ascending order. So to sort by slices is enough, and numpy has that done for small
        # numbers in a sixth of the time.
        order = (places // self.length).astype(np.min_scalar_type(self.slices)).argsort(kind="stable")
        return places[order], order
