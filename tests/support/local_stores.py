"""Local stores with keys of one shape, and what is in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtrainer.kvstore import KVStoreBase, LocalKVStore

SHAPE = (4, 4)


def local(keys: Any = (), value: float = 0.0) -> LocalKVStore:
    store = LocalKVStore()
    if keys:
        store.init(list(keys), [torch.full(SHAPE, value) for _ in keys])
    return store


def full(value: float) -> Tensor:
    return torch.full(SHAPE, float(value))


def pulled(store: KVStoreBase, key: Any, shape: tuple[int, ...] = SHAPE) -> Tensor:
    out = torch.full(shape, float("nan"))
    store.pull(key, out=out)  # type: ignore[attr-defined]
    return out
