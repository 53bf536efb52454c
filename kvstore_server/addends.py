"""From what ranks have committed to what is summed, to which keys that is, and whether the sum is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore_server.consistency import Contribution
from kvstore_server.errors import PlanMismatchError
from kvstore_server.optimizer import Optimizer
from kvstore_server.protocol.messages import Commit, Payload
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
    for addend in addends:
        if not addend.absent:
            return keys
    return frozenset(key for key in keys if any(key not in a.absent for a in addends))


def slowed_down(hypers: Sequence[Mapping[str, Any]], staleness: int) -> Sequence[Mapping[str, Any]]:
    """The hyper-parameters of each key with the learning rate divided by the staleness, if that is above 1."""
    if staleness <= 1:
        return hypers
    # Keys with equal numbers share one mapping, by which they are updated together.
    slowed = {id(row): {**row, "lr": row["lr"] / staleness} if "lr" in row else row for row in hypers}
    return [slowed[id(row)] for row in hypers]


def norm_to_hold(commits: Mapping[int, Commit]) -> float:
    """The type of norm for which the commits of all ranks, given by rank, want their sum held; 0 where they do not.

    Raises:
        PlanMismatchError: ranks differ in that.
    """
    lowest = min(commits)
    wanted = commits[lowest].hold
    for rank, commit in commits.items():
        if commit.hold != wanted:
            raise PlanMismatchError(
                f"ranks disagree on what is checked of the gradient before it is applied: rank {lowest} "
                f"{_described(wanted)}, rank {rank} {_described(commit.hold)}; give clip_grad, amp and on_nonfinite "
                "the same values on every worker"
            )
    return wanted


def _described(hold: float) -> str:
    return f"wants its norm of type {hold:g}" if hold else "wants nothing to be checked"
