"""Sums of row-sparse gradients: of several that are here, or of those of all ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore_server.reduction import RowSet, compute_dtype
from kvtrainer.comm.rank_group import RankGroup


@torch.no_grad()
def sum_rows(parts: Sequence[RowSet], dtype: str) -> RowSet:
    """The sum of rows that several gave of one key: a left fold in their order, in the dtype to sum `dtype` in.

    It has the same bits on every device, because the ids of one part are distinct.
    """
    values = [part.values.to(compute_dtype(dtype)) for part in parts]
    if len(parts) == 1:
        return RowSet(parts[0].ids, values[0])
    ids = torch.unique(torch.cat([part.ids for part in parts]))
    total = values[0].new_zeros(len(ids), values[0].shape[1])
    for part, value in zip(parts, values, strict=True):
        total.index_add_(0, torch.searchsorted(ids, part.ids), value)
    return RowSet(ids, total)


@torch.no_grad()
def gather_row_sum(group: RankGroup, mine: RowSet, counts: Sequence[int], dtype: str) -> RowSet:
    """The sum of the rows of all ranks, in the order of ranks; collective.

    Args:
        mine: this rank's, of which there may be none.
        counts: how many rows every rank has; none where it is not above 0.
        dtype: of the key, which says in what the sum is computed.
    """
    compute, most = compute_dtype(dtype), max(counts)
    if most <= 0:
        return mine._replace(values=mine.values.to(compute))
    ids = mine.ids.new_zeros(most)
    values = mine.values.new_zeros(most, mine.values.shape[1], dtype=compute)
    ids[: len(mine.ids)] = mine.ids
    values[: len(mine.ids)] = mine.values
    rows = zip(group.all_gather(ids), group.all_gather(values), counts, strict=True)
    return sum_rows([RowSet(i[:count], v[:count]) for i, v, count in rows if count > 0], dtype)
