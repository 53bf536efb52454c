"""Which keys ranks contributed to, how much a late contribution counts, and whether a sum is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore_server.errors import PlanMismatchError
from kvstore_server.protocol.messages import Commit
from kvstore_server.reduction import Contribution


def keys_in(contributions: Sequence[Contribution], keys: frozenset[int]) -> frozenset[int]:
    """Those of some keys that any rank contributed to; the same object where that is all of them."""
    for given in contributions:
        if not given.absent:
            return keys
    return frozenset(key for key in keys if any(key not in a.absent for a in contributions))


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
