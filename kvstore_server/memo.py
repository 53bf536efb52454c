"""A cache whose size is bounded by how much its values hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sized
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
_REMEMBERED, _REMEMBERED_PER_SLOT = 256, 16
"""Numbers that a BoundedCache keeps at most, and for each slot; what is named one by one needs up to ten."""


class BoundedCache(Generic[T]):
    """Results kept in memory in proportion to the slots, whatever a peer names."""

    def __init__(self, slots: Sized) -> None:
        self._slots = slots
        self._known: dict[Hashable, T] = {}
        self._size = 0

    def get(self, key: Hashable, make: Callable[..., T], *named: Any) -> T:
        """Return `make(*named)`, made now or earlier; not to be changed.

        Args:
            key: All that the result follows from; of an array its bytes.
        """
        found = self._known.get(key)
        if found is None:
            found = make(*named)
            # A few tables can have very many slots, so what was made of them counts as well.
            size = _count_numbers(key) + _count_numbers(found)
            if self._size + size > _REMEMBERED + _REMEMBERED_PER_SLOT * len(self._slots):
                self._known.clear()
                self._size = 0
            self._known[key] = found
            self._size += size
        return found


def _count_numbers(value: Any) -> int:
    """Count, roughly, what something holds."""
    if isinstance(value, np.ndarray | bytes):
        return value.size if isinstance(value, np.ndarray) else len(value) // 8
    return sum(map(_count_numbers, value)) if isinstance(value, tuple | list | frozenset) else 1
