"""Values of mmengine's hooks as tensors and plain values, so that checkpoints are read without running code."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

from kvtrainer.errors import ConfigurationError
from kvtrainer.strategy.checkpoint import plain_copy

_log = logging.getLogger(__name__)

_STATISTICS = ("min", "max", "current", "mean")
_MARK = "kvtrainer.mmengine"
"""The key that marks a dict which stands for another kind of value; its value says which."""


def encode(value: Any) -> Any:
    """Replace HistoryBuffers, arrays, tuples and Counters by plain dicts; others stay as they are."""
    if isinstance(value, HistoryBuffer):
        log, counts = (torch.from_numpy(np.array(one, dtype=np.float64)) for one in value.data)
        return {_MARK: "history", "log": log, "counts": counts, "max_length": value.max_length}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_MARK: "array", "values": torch.from_numpy(np.array(value)), "dtype": value.dtype.name}
    if isinstance(value, Counter):
        return {_MARK: "counter", "values": dict(value)}
    if isinstance(value, Mapping):
        return {key: encode(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return {_MARK: "tuple", "values": [encode(one) for one in value]}
    return [encode(one) for one in value] if isinstance(value, list) else value


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get(_MARK)
    if kind == "history":
        return HistoryBuffer(value["log"].numpy(), value["counts"].numpy(), value["max_length"])
    if kind == "array":
        return value["values"].numpy().astype(value["dtype"], copy=False)
    if kind == "counter":
        return Counter(value["values"])
    if kind == "tuple":
        return tuple(decode(one) for one in value["values"])
    return {key: decode(one) for key, one in value.items()}


def encode_what_can_be(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Encode the entries of a dict of remarks; leave out, with a warning, what no checkpoint can hold."""
    found = {}
    for key, one in value.items():
        encoded = encode(one)
        try:
            plain_copy({key: encoded}, where)
        except ConfigurationError as error:
            _log.warning("left out of the checkpoint: %s", error)
        else:
            found[key] = encoded
    return found


def encode_checkpoint(checkpoint: dict[str, Any]) -> None:
    """Encode what mmengine's runner and hooks put into a checkpoint, in place."""
    hub = checkpoint.get("message_hub")
    if isinstance(hub, Mapping):
        parts = {name: encode_what_can_be(part, f"message_hub[{name!r}]") for name, part in hub.items()}
        kept = set().union(*(parts.get(name, {}) for name in ("log_scalars", "runtime_info")))
        marks = {name: mark for name, mark in parts.get("resumed_keys", {}).items() if name in kept}
        checkpoint["message_hub"] = {**parts, "resumed_keys": marks}
    if isinstance(checkpoint.get("meta"), Mapping):
        checkpoint["meta"] = encode_what_can_be(checkpoint["meta"], "meta")
    checkpoint.update(
        {name: encode(one) for name, one in checkpoint.items() if name not in ("message_hub", "meta")}
    )


def mmengine_globals() -> AbstractContextManager[Any]:
    """Let torch.load(weights_only=True) also read checkpoints of mmengine itself, while the context is open.

    It allows HistoryBuffer and the numpy types that are in one, which hold numbers and run nothing. A HistoryBuffer's
    statistics are pickled as attributes of its class: of `getattr` nothing else is allowed.
    """
    multiarray: Any = (getattr(np, "_core", None) or np.core).multiarray
    numbers = [type(np.dtype(name)) for name in ("bool", "int32", "int64", "float32", "float64")]
    types = [HistoryBuffer, np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar, *numbers]
    return torch.serialization.safe_globals([*types, (_statistic_of, "builtins.getattr")])


def _statistic_of(owner: Any, name: str) -> Any:
    if owner is not HistoryBuffer or name not in _STATISTICS:
        raise pickle.UnpicklingError(f"the file asks for {name!r:.80} of {owner!r:.80}")
    return getattr(HistoryBuffer, name)
