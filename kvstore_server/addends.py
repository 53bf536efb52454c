"""From what ranks have committed to what is summed, and to which keys that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore_server.consistency import Contribution
from kvstore_server.optimizer import Optimizer
from kvstore_server.protocol.messages import Payload
from kvstore_server.reduction import Addend


def addend_of(mine: Contribution[Any], optimizer: Optimizer | None, absent: frozenset[int]) -> Addend:
    """One rank's part in the sum; without a factor of its own that of the optimizer counts."""
    assert mine.commit is not None
    scale = mine.commit.rescale
    if scale is None:
        scale = optimizer.rescale_grad if optimizer is not None else 1.0
    slices: dict[int, Payload] = {s: payload for s, (_, payload) in mine.slices.items()}
    return Addend(slices, scale, absent)


def keys_in(addends: Sequence[Addend], keys: frozenset[int]) -> frozenset[int]:
    """Those of some keys that any rank contributed to; the same object where that is all of them."""
    if any(not a.absent for a in addends):
        return keys
    return frozenset(key for key in keys if any(key not in a.absent for a in addends))


def slowed_down(hypers: Sequence[Mapping[str, Any]], staleness: int) -> Sequence[Mapping[str, Any]]:
    """The hyper-parameters of each key with the learning rate divided by the staleness, if that is above 1."""
    if staleness <= 1:
        return hypers
    # Keys with equal numbers share one mapping, by which they are updated together.
    slowed = {id(row): {**row, "lr": row["lr"] / staleness} for row in hypers}
    return [slowed[id(row)] for row in hypers]
