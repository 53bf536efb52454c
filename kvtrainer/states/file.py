"""The file of saved states: written whole or not at all, and read with a clear word on what is wrong with it."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvtrainer.errors import StateFileError, file_error
from kvtrainer.states.saved import SavedStates, check_metadata, pack, unpack

Path = str | os.PathLike[str]

_SIGNS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it"),
    (b"\x80", "a pickle, as MXNet's save_states writes it; pickles are never loaded"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
)


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
    if not os.path.isdir(folder):
        raise file_error(
            StateFileError, f"{what}: there is no directory {folder!r}; create it first", errno.ENOENT, fname
        )
    if os.path.isdir(path):
        raise _is_directory(what, fname)
    if os.path.exists(path) and not os.path.isfile(path):
        raise StateFileError(f"{what}: that is a device, a pipe or a socket; give the name of a file")
    try:
        with replacing(path) as temporary:
            mode = os.stat(temporary).st_mode
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
    if os.path.isdir(fname):
        raise _is_directory(what, fname)
    try:
        with open(fname, "rb") as file:
            head = file.read(16)
            size = os.fstat(file.fileno()).st_size
        with safe_open(fname, framework="pt") as opened:
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


def _is_directory(what: str, fname: Path) -> StateFileError:
    text = f"{what}: that is a directory; give the name of a file"
    return file_error(StateFileError, text, errno.EISDIR, fname)


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
