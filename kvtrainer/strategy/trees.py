"""Nested dicts and lists of tensors and plain values: checked, summed up, and as bytes; nothing of it is code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from kvtrainer.errors import ConfigurationError
from kvtrainer.states.saved import checksum

_DICT, _TENSOR, _BYTES = "d", "t", "b"
_PLAIN = (bool, int, float, str, type(None))


def plain_copy(value: Any, where: str) -> Any:
    """A copy with plain dicts, lists and CPU tensors, which `torch.load(weights_only=True)` reads.

    Args:
        where: what to call the value in an error.

    Raises:
        ConfigurationError: there is something in it that is neither a tensor nor plain; says where.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ConfigurationError(
                f"{where} is a tensor of layout {value.layout}, which a checkpoint cannot hold; save its indices and "
                "values, or to_dense()"
            )
        return value.detach().to("cpu").as_subclass(Tensor)
    if type(value) in (*_PLAIN, bytes):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in _PLAIN:
                raise ConfigurationError(
                    f"{where} has the key {key!r:.80}, which is neither a number nor text"
                )
        return {key: plain_copy(one, f"{where}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(one, f"{where}[{at}]") for at, one in enumerate(value)]
    raise ConfigurationError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold, because it "
        "is loaded without running code; save tensors, numbers, text, and dicts and lists of these (a numpy array as "
        "torch.from_numpy(array), an object as its state_dict())"
    )


def tree_checksum(value: Any) -> str:
    """The checksum of a `plain_copy`: of its tensors and its plain values alike, and of how they hang together.

    Raises TypeError, ValueError or RecursionError if it is no such copy.
    """
    return checksum(*_taken_apart(value))


def pack_tree(value: Any) -> bytes:
    """The bytes of a `plain_copy`; `unpack_tree` gives the value back, with lists for tuples."""
    tensors, text = _taken_apart(value)
    own = {name: one.detach().to("cpu").contiguous().clone() for name, one in tensors.items()}
    # A file of safetensors holds at least one tensor in every release.
    return safetensors.torch.save({**own, "": torch.zeros(1)}, {"tree": text})


def _taken_apart(value: Any) -> tuple[dict[str, Tensor], str]:
    """The tensors by number, and all else as JSON, in which these numbers stand for them."""
    tensors: dict[str, Tensor] = {}

    def walk(one: Any) -> Any:
        if isinstance(one, Tensor):
            name = str(len(tensors))
            tensors[name] = one
            return {_TENSOR: name}
        if isinstance(one, bytes):
            return {_BYTES: one.hex()}
        if isinstance(one, Mapping):
            return {_DICT: [[key, walk(item)] for key, item in one.items()]}
        return [walk(item) for item in one] if isinstance(one, list | tuple) else one

    text = json.dumps(walk(value))
    return tensors, text


def unpack_tree(data: bytes) -> Any:
    """The value that `pack_tree` packed."""
    tensors = safetensors.torch.load(data)
    length = int.from_bytes(data[:8], "little")
    text = json.loads(data[8 : 8 + length])["__metadata__"]["tree"]

    def walk(one: Any) -> Any:
        if isinstance(one, list):
            return [walk(item) for item in one]
        if not isinstance(one, dict):
            return one
        [(kind, content)] = one.items()
        if kind == _TENSOR:
            return tensors[content]
        if kind == _BYTES:
            return bytes.fromhex(content)
        return {key: walk(item) for key, item in content}

    return walk(json.loads(text))
