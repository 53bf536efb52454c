"""How many updates a table has had, as a learning rate scheduler counts them: those of the key that has had most.

Every server of a table hears of every contribution which keys it has, also of those that lie on other servers. So all
servers count alike, and how many there are does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvstore_server.optimizer import KeyState, SliceState
from kvstore_server.plan import Slice
from kvstore_server.reduction import Addend


class UpdateCounts:
    """The updates of a table's keys since its optimizer was set.

    Args:
        num_keys: How many keys the table has on all servers together.
    """

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys
        self._most = 0
        self._behind: dict[int, int] = {}
        """By how many updates a key is behind the one with most; keys that are not are left out."""

    def following(self, left_out: Collection[int]) -> int:
        """What there will be after an update of all keys but these."""
        if not left_out:
            return self._most + 1
        leads = any(key not in left_out and key not in self._behind for key in range(self._num_keys))
        return self._most + leads

    def count(self, left_out: Collection[int]) -> None:
        """Note an update of all keys but these."""
        following = self.following(left_out)
        if left_out or self._behind:
            moved = following - self._most
            behind = {
                key: self._behind.get(key, 0) + moved - (key not in left_out) for key in range(self._num_keys)
            }
            self._behind = {key: by for key, by in behind.items() if by}
        self._most = following

    def copy(self) -> UpdateCounts:
        other = UpdateCounts(self._num_keys)
        other._most, other._behind = self._most, dict(self._behind)
        return other


def left_out_by_all(addends: Sequence[Addend]) -> frozenset[int]:
    """The keys that none of the contributions has."""
    if any(not addend.absent for addend in addends):
        return frozenset()
    return frozenset.intersection(*(addend.absent for addend in addends)) if addends else frozenset()


def following_here(
    slices: Sequence[Slice],
    states: Sequence[SliceState],
    key_states: Mapping[int, KeyState],
    left_out: Collection[int],
) -> int:
    """The most updates that a key of one server has, by its optimizer's state, after an update of all keys but these.

    State that was loaded has counts that this server has not seen itself.
    """

    def counts() -> Iterable[int]:
        for piece, state in zip(slices, states, strict=True):
            for segment, step in zip(piece.segments, state.steps, strict=True):
                yield step + (segment.key not in left_out)
        for key, whole in key_states.items():
            yield whole.step + (key not in left_out)

    return max(counts(), default=0)
