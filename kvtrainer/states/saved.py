"""Saved states as one value, and that value as named tensors and text, which is what their file holds.

Everything is under the names of parameters, so nothing of it depends on a kvstore, on the number of servers or on
the order of the parameters. Numbers and names are JSON, tensors are tensors; nothing is code.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from kvtrainer.errors import StateFileError

FORMAT = "kvtrainer saved states"
VERSION = "1"

_STATE, _EXTRA = "state", "extra"
"""What the name of a tensor begins with: state/<parameter>/<entry> or extra/<section>/<name>, each part quoted."""


@dataclass(frozen=True)
class SavedParameter:
    """What is saved of one parameter; its values are not."""

    shape: tuple[int, ...]
    dtype: str
    group: int
    """Position of its group in `SavedStates.groups`."""
    state: dict[str, Any] = field(default_factory=dict)
    """The optimizer's entries by name, tensors and numbers, 'step' among them; empty before the first update."""


@dataclass(frozen=True)
class SavedStates:
    """All that a Trainer needs, beside the weights, to go on as if never interrupted."""

    optimizer: dict[str, Any]
    """The description that `Optimizer.spec` returns."""
    num_update: int
    """The number of updates that the learning-rate scheduler has come to."""
    groups: list[dict[str, Any]]
    """The options of every parameter group."""
    parameters: dict[str, SavedParameter]
    """By name."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Plain values of other parts of the Trainer, by part."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Tensors of other parts, by part and then by a name, such as a parameter's."""


def pack(saved: SavedStates) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors by unambiguous names, and text by name: the two things that a safetensors file holds.

    Raises:
        StateFileError: a value is neither a tensor nor plain.
    """
    tensors = {
        _name(_EXTRA, section, name): tensor
        for section, members in saved.tensors.items()
        for name, tensor in members.items()
    }
    rows = []
    for name, parameter in saved.parameters.items():
        entries = parameter.state
        found = {entry: value for entry, value in entries.items() if isinstance(value, Tensor)}
        tensors |= {_name(_STATE, name, entry): tensor for entry, tensor in found.items()}
        rows.append(
            {
                "name": name,
                "shape": list(parameter.shape),
                "dtype": parameter.dtype,
                "group": parameter.group,
                "numbers": {entry: value for entry, value in entries.items() if entry not in found},
            }
        )
    content = {
        "optimizer": saved.optimizer,
        "num_update": saved.num_update,
        "groups": saved.groups,
        "parameters": rows,
        "extra": saved.extra,
    }
    try:
        text = json.dumps(content)
    except (TypeError, ValueError) as error:
        raise StateFileError(
            f"the states hold a value that is neither a tensor nor plain: {error}"
        ) from error
    tensors = {name: _storable(tensor) for name, tensor in tensors.items()}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "content": text,
        "checksum": checksum(tensors, text),
    }
    return tensors, metadata


def checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    """A CRC-32 over the text and over every tensor with its name, dtype and shape; of all files that we write."""
    value = zlib.crc32(text.encode())
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), value)
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        value = zlib.crc32(plain.view(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise StateFileError unless the text says that it belongs to saved states which this release can read."""
    if metadata.get("format") != FORMAT:
        raise StateFileError("it is a safetensors file, but of something else: save_states did not write it")
    if metadata.get("version") != VERSION:
        raise StateFileError(
            f"it has version {metadata.get('version')!r} of the format, this kvtrainer reads {VERSION!r}; update "
            "kvtrainer"
        )


def unpack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SavedStates:
    """Rebuild what `pack` packed.

    Raises:
        StateFileError: it is something else, was written by a newer release, or was damaged since.
    """
    check_metadata(metadata)
    text = metadata.get("content", "")
    if metadata.get("checksum") != checksum(tensors, text):
        raise StateFileError(
            "its contents do not have the checksum that was saved with them, so it was damaged since"
        )
    try:
        return _rebuilt(tensors, json.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise StateFileError(f"its description makes no sense ({type(error).__name__}: {error})") from error


def _rebuilt(tensors: Mapping[str, Tensor], content: Any) -> SavedStates:
    parameters = {
        row["name"]: SavedParameter(
            tuple(map(int, row["shape"])), str(row["dtype"]), int(row["group"]), dict(row["numbers"])
        )
        for row in content["parameters"]
    }
    sections: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        kind, owner, name = map(unquote, full_name.split("/"))
        members = parameters[owner].state if kind == _STATE else sections.setdefault(owner, {})
        members[name] = tensor
    optimizer = dict(content["optimizer"])
    groups = [{name: tupled(value) for name, value in group.items()} for group in content["groups"]]
    if not isinstance(optimizer["name"], str):
        raise ValueError(f"the optimizer is called {optimizer['name']!r}")
    for name, parameter in parameters.items():
        if not 0 <= parameter.group < len(groups):
            raise ValueError(f"{name!r} is in group {parameter.group} of {len(groups)}")
    return SavedStates(
        optimizer, int(content["num_update"]), groups, parameters, dict(content["extra"]), sections
    )


def _name(*parts: str) -> str:
    return "/".join(quote(part, safe=" ") for part in parts)


def _storable(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    # Scalars may be shared between parameters, and a file holds everything once.
    return tensor.clone() if tensor.dim() == 0 else tensor


def tupled(value: Any) -> Any:
    """Make tuples of lists: JSON knows no tuples, and options such as `betas` are some."""
    return tuple(map(tupled, value)) if isinstance(value, list) else value
