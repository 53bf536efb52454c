"""Saved states as one value, and as a file: written whole or not at all, and read with a clear word on what is wrong.

Everything is under the names of parameters, so nothing of it depends on a kvstore, on the number of servers or on
the order of the parameters. Numbers and names are JSON, tensors are tensors; nothing is code.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvtrainer.errors import StateFileError, file_error
from kvtrainer.progress import announced

Path = str | os.PathLike[str]

FORMAT = "kvtrainer saved states"
VERSION = "1"

_STATE, _EXTRA = "state", "extra"
"""What the name of a tensor begins with: state/<parameter>/<entry> or extra/<section>/<name>, each part quoted."""

_SIGNS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it"),
    (b"\x80", "a pickle, as MXNet's save_states writes it; pickles are never loaded"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
)


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
        row = {"name": name, **vars(parameter)}
        entries = row.pop("state")
        found = {entry: value for entry, value in entries.items() if isinstance(value, Tensor)}
        tensors |= {_name(_STATE, name, entry): tensor for entry, tensor in found.items()}
        rows.append({**row, "numbers": {n: value for n, value in entries.items() if n not in found}})
    content = {**vars(saved), "parameters": rows}
    del content["tensors"]
    try:
        text = json.dumps(content)
    except (TypeError, ValueError) as error:
        raise StateFileError(
            f"the states hold a value that is neither a tensor nor plain: {error}"
        ) from error
    tensors = {name: _storable(tensor) for name, tensor in tensors.items()}
    check = checksum(tensors, text)
    return tensors, {"format": FORMAT, "version": VERSION, "content": text, "checksum": check}


def checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    """Compute a CRC-32 over the text and every tensor with its name, dtype and shape; of all files that we write."""
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
    parameters = {row["name"]: {**row, "state": dict(row["numbers"])} for row in content["parameters"]}
    sections: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        kind, owner, name = map(unquote, full_name.split("/"))
        members = parameters[owner]["state"] if kind == _STATE else sections.setdefault(owner, {})
        members[name] = tensor
    return rebuilt({**content, "parameters": parameters, "tensors": sections})


def rebuilt(content: Mapping[str, Any]) -> SavedStates:
    """Make saved states of dicts and lists with the names of their fields; parameters are dicts by name.

    Raises KeyError, TypeError, ValueError or AttributeError if these make no sense.
    """
    parameters = {
        name: SavedParameter(
            tuple(map(int, one["shape"])), str(one["dtype"]), int(one["group"]), dict(one["state"])
        )
        for name, one in content["parameters"].items()
    }
    optimizer = dict(content["optimizer"])
    # JSON knows no tuples, and options such as `betas` are some.
    groups = [{name: _tupled(value) for name, value in group.items()} for group in content["groups"]]
    if not isinstance(optimizer["name"], str):
        raise ValueError(f"the optimizer is called {optimizer['name']!r}")
    for name, parameter in parameters.items():
        if not 0 <= parameter.group < len(groups):
            raise ValueError(f"{name!r} is in group {parameter.group} of {len(groups)}")
    tensors = {part: dict(members) for part, members in content["tensors"].items()}
    return SavedStates(
        optimizer, int(content["num_update"]), groups, parameters, dict(content["extra"]), tensors
    )


def _name(*parts: str) -> str:
    return "/".join(quote(part, safe=" ") for part in parts)


def _storable(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    # Scalars may be shared between parameters, and a file holds everything once.
    return tensor.clone() if tensor.dim() == 0 else tensor


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def write_state_file(fname: Path, saved: SavedStates) -> None:
    """Write the file, or replace the one that is there, in one stroke; blocks until it is on the disk.

    A process that dies on the way leaves the former file, and perhaps a hidden temporary one beside it.

    Raises:
        StateFileError: it cannot be written (no such directory, no permission, full disk); the former file is
            as it was and no temporary one is left.
    """
    tensors, metadata = pack(saved)
    path = os.path.realpath(fname)
    folder = os.path.dirname(path)
    what = f"cannot save states to {os.fspath(fname)!r}"
    if not os.fspath(fname):
        raise file_error(StateFileError, f"{what}: the name is empty", errno.ENOENT, fname)
    if not os.path.isdir(folder):
        raise file_error(
            StateFileError, f"{what}: there is no directory {folder!r}; create it first", errno.ENOENT, fname
        )
    _refuse_directory(what, fname)
    if os.path.exists(path) and not os.path.isfile(path):
        raise StateFileError(f"{what}: that is a device, a pipe or a socket; give the name of a file")
    try:
        with replacing(path) as temporary:
            mode = os.stat(temporary).st_mode
            with announced(f"writing {os.fspath(fname)}", sum([one.nbytes for one in tensors.values()])):
                save_file(tensors, temporary, metadata)
            os.chmod(temporary, mode)  # some releases of safetensors make a new, private file
    except (OSError, SafetensorError) as error:
        text = f"{what}: {error}. What was there before is unchanged"
        raise file_error(StateFileError, text, error, fname) from error


def read_state_file(fname: Path) -> SavedStates:
    """Read what `write_state_file` wrote.

    Raises:
        StateFileError: there is no such file, it cannot be read, is truncated, damaged or of another kind; the
            message says which.
    """
    what = f"cannot load states from {os.fspath(fname)!r}"
    _refuse_directory(what, fname)
    try:
        with open(fname, "rb") as file:
            head = file.read(16)
            size = os.fstat(file.fileno()).st_size
        with announced(f"reading {os.fspath(fname)}", size), safe_open(fname, framework="pt") as opened:
            metadata = opened.metadata() or {}
            check_metadata(metadata)
            names = list(opened.keys())
            return unpack({name: opened.get_tensor(name) for name in names}, metadata)
    except SafetensorError as error:
        raise StateFileError(f"{what}: {_kind(head, size)} ({error})") from error
    except StateFileError as error:
        raise StateFileError(f"{what}: {error}") from error
    except OSError as error:
        raise file_error(StateFileError, f"{what}: {error.strerror or error}", error, fname) from error


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Lend the name of an empty file in the directory of `path`, and put it in the place of `path` in the end."""
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, f".states-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with open(temporary, "xb"):
        pass
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync(folder)


def _refuse_directory(what: str, fname: Path) -> None:
    if os.path.isdir(fname):
        text = f"{what}: that is a directory; give the name of a file"
        raise file_error(StateFileError, text, errno.EISDIR, fname)


def _sync(path: str) -> None:
    """Wait until a file, or the list of names in a directory, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _kind(head: bytes, size: int) -> str:
    """What a file that is not in the safetensors format seems to be."""
    if not size:
        return "it is empty"
    for sign, kind in _SIGNS:
        # A length of the header may begin with any byte, but is followed by the header, which is JSON.
        if head.startswith(sign) and head[8:9] != b"{":
            return f"it is {kind}"
    if head[8:9] == b"{":
        return f"it is truncated or damaged; it has {size} bytes, and its own header does not fit them"
    return "it is no safetensors file, or its beginning is damaged"
