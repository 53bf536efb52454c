"""A cache whose size is bounded by the contents of its values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sized
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
_REMEMBERED, _REMEMBERED_PER_SLOT = 256, 16
"""The most numbers in a BoundedCache: a constant, and for each slot (tables named one by one need up to ten)."""


class BoundedCache(Generic[T]):
    """Caches results, in memory proportional to the number of slots whatever keys a peer makes up."""

    def __init__(self, slots: Sized) -> None:
        self._slots = slots
        self._known: dict[Hashable, T] = {}
        self._size = 0

    def get(self, key: Hashable, make: Callable[..., T], *named: Any) -> T:
        """Return `make(*named)`, computed now or earlier; it must not be changed.

        Args:
            key: Everything that the result depends on; of an array its bytes.
        """
        found = self._known.get(key)
        if found is None:
            found = make(*named)
            # A few tables can have very many slots, so count contents instead of entries.
            size = _count_cached_numbers(key) + _count_cached_numbers(found)
            if self._size + size > _REMEMBERED + _REMEMBERED_PER_SLOT * len(self._slots):
                self._known.clear()
                self._size = 0
            self._known[key] = found
            self._size += size
        return found


def _count_cached_numbers(value: Any) -> int:
    if isinstance(value, np.ndarray | bytes):
        return value.size if isinstance(value, np.ndarray) else len(value) // 8
    return sum(map(_count_cached_numbers, value)) if isinstance(value, tuple | list | frozenset) else 1
