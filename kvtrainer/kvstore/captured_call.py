"""A call of the verbs with the same keys as before: what follows from the keys is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kvtrainer.kvstore.base import Key
from kvtrainer.kvstore.values import ValueEntry

_kind_of = attrgetter("dtype", "layout", "is_cpu", "requires_grad", "shape")


class CapturedCall:
    """The entries of the keys of a call, which were all checked, and what their tensors have to be like.

    Args:
        entries: One for each key; none twice.
    """

    def __init__(self, keys: Sequence[Key], entries: Sequence[ValueEntry]) -> None:
        self._keys = list(keys)
        self.tables = [entry.table for entry in entries]
        self._dtypes = [entry.spec.dtype for entry in entries]
        self._kinds = [(entry.dtype, torch.strided, True, False, entry.spec.shape) for entry in entries]
        self._are_flat = all([len(entry.spec.shape) == 1 for entry in entries])

    def has(self, keys: Any) -> bool:
        return type(keys) is list and keys == self._keys

    def arenas(self, tensors: Any) -> Sequence[Mapping[str, Tensor]] | None:
        """Return the memory of one plain tensor for each key; None if any of them needs a look or a copy."""
        if type(tensors) not in (list, tuple):
            return None
        try:
            if list(map(_kind_of, tensors)) != self._kinds or not all(map(Tensor.is_contiguous, tensors)):
                return None
        except (AttributeError, TypeError):  # something else than tensors
            return None
        flats = tensors if self._are_flat else [one.view(-1) for one in tensors]
        return [{dtype: flat} for dtype, flat in zip(self._dtypes, flats, strict=True)]
