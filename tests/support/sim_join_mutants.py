"""Ways in which a server can be wrong about ranks without data, and about rows; see `sim_mutants`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvstore_server import reduction
from kvstore_server.hyper import AgreedOptions
from kvstore_server.sums import Sums
from kvstore_server.table import Table
from tests.support.sim_mutants import Patch


def _hyper_of_the_joined() -> list[Patch]:
    """What a rank believed before it ran out of data must still agree."""
    common = AgreedOptions.common

    def of_all(self: Any, ranks: Any) -> bytes:
        return common(self, list(self._sent))

    return [(AgreedOptions, "common", of_all)]


def _join_without_an_end() -> list[Patch]:
    """Ranks that have joined are never told that all have."""
    end = Table._end

    def endless(self: Any, whose: int, how: Any) -> None:
        end(self, whose, how._replace(is_over=False))

    return [(Table, "_end", endless)]


def _joined_rank_still_gives() -> list[Patch]:
    """The values of a rank without data replace the weights, where it is the lowest."""
    apply = Table.apply

    def zeroing(self: Any, whose: int, round_: int, parts: Any, *args: Any) -> None:
        if round_ and 1 < len(parts) < self.num_workers:
            parts = dict(list(parts.items())[1:])
        apply(self, whose, round_, parts, *args)

    return [(Table, "apply", zeroing)]


def _rows_overwrite() -> list[Patch]:
    """Of two ranks that give the same row, the last one counts."""

    def last(ids: Tensor, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        kept = {int(row): at for at, row in enumerate(ids)}
        rows = sorted(kept)
        return torch.tensor(rows, dtype=torch.int64), values[[kept[row] for row in rows]]

    return [(reduction, "coalesce_rows", last)]


def _empty_rows_do_not_take_part() -> list[Patch]:
    """A rank that has no row of a key makes the others' sum a dense one."""
    given_as_rows = Sums.given_as_rows

    def without(self: Any, contributions: Any) -> Any:
        found = given_as_rows(self, contributions)
        return [k for k in found if all(k not in c.rows or len(c.rows[k].ids) for c in contributions)]

    return [(Sums, "given_as_rows", without)]


JOIN_MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    "hyper_of_the_joined": _hyper_of_the_joined,
    "join_without_an_end": _join_without_an_end,
    "joined_rank_still_gives": _joined_rank_still_gives,
    "rows_overwrite": _rows_overwrite,
    "empty_rows_do_not_take_part": _empty_rows_do_not_take_part,
}
