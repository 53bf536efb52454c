"""Opens safetensors files, and replaces them atomically; whatever fails is a StateFileError that names the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from kvtrainer.common.progress import print_duration
from kvtrainer.errors import KVStoreError, StateFileError, file_error
from kvtrainer.states.atomic_file import replace_atomically

Path = str | os.PathLike[str]

_SIGNS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it"),
    (b"\x80", "a pickle, as MXNet's save_states writes it; pickles are never loaded"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
)


@contextmanager
def replace_file(fname: Path, what: str, nbytes: int = 0) -> Iterator[BinaryIO]:
    """Yield a new file that atomically replaces the one called `fname`. Blocks until it is on the disk.

    If the process dies, the former file stays, perhaps with a hidden temporary file that the next save in the directory
    removes.

    Args:
        what: What cannot be done if it fails, without the name of the file, such as "save states to".
        nbytes: About how long the file will be.

    Raises:
        StateFileError: It cannot be written (missing directory, no permission, disk full). The former file is
            unchanged and no temporary file is left.
    """
    path = os.path.realpath(fname)
    folder = os.path.dirname(path)
    what = f"cannot {what} {os.fspath(fname)!r}"
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
        with replace_atomically(path) as file, print_duration(f"writing {os.fspath(fname)}", nbytes):
            yield file
    except KVStoreError:  # some are OSErrors, too
        raise
    except (OSError, ValueError) as error:
        text = f"{what}: {error}. What was there before is unchanged"
        raise file_error(StateFileError, text, error, fname) from error


@contextmanager
def open_file(fname: Path, what: str) -> Iterator[Any]:
    """Yield what safetensors' `safe_open` returns for a file.

    Args:
        what: What cannot be done if it fails, without the name of the file, such as "load states from".

    Raises:
        StateFileError: It is missing, unreadable, truncated, damaged or of another kind, or the caller has raised that.
            The message says which.
    """
    what = f"cannot {what} {os.fspath(fname)!r}"
    _refuse_directory(what, fname)
    try:
        with open(fname, "rb") as file:
            head = file.read(16)
            size = os.fstat(file.fileno()).st_size
        with print_duration(f"reading {os.fspath(fname)}", size), safe_open(fname, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise StateFileError(f"{what}: {_describe_damage(head, size)} ({error})") from error
    except StateFileError as error:
        raise StateFileError(f"{what}: {error}") from error
    except OSError as error:
        raise file_error(StateFileError, f"{what}: {error.strerror or error}", error, fname) from error


def _refuse_directory(what: str, fname: Path) -> None:
    if os.path.isdir(fname):
        text = f"{what}: that is a directory; give the name of a file"
        raise file_error(StateFileError, text, errno.EISDIR, fname)


def _describe_damage(head: bytes, size: int) -> str:
    if not size:
        return "it is empty"
    for sign, kind in _SIGNS:
        # The first eight bytes are a length and may have any value. They are followed by the header, which is JSON.
        if head.startswith(sign) and head[8:9] != b"{":
            return f"it is {kind}"
    if head[8:9] == b"{":
        return f"it is truncated or damaged; it has {size} bytes, and its own header does not fit them"
    return "it is no safetensors file, or its beginning is damaged"
