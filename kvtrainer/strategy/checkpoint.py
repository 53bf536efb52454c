"""Checkpoint files, and how their parts are loaded into Trainers and schedules.

A checkpoint is a dict, written by torch.save, with 'state_dict' (weights), 'optimizer', 'param_schedulers', 'ranks'
(random number states, and each rank's own optimizer states) and 'meta'. It contains tensors and plain values only, so
it can be read with `weights_only=True`: nothing in it is run as code.

- Writing is atomic (`replace_atomically`): readers see the old file or the new one, and a crash leaves the old one.
- A checksum over tensors, values and structure is stored in 'meta' and verified on reading. For files of other
  programs, or of old versions, the zip archive's CRC of each record is verified instead.
- Loading has two phases: `fit_checkpoint_states` and `pair_checkpoint_schedules` check that everything fits, and return
  what to call. Only then is anything changed, so a checkpoint that does not fit changes nothing, on any worker.
- `pack_checkpoint_tree` and `unpack_checkpoint_tree` use the same restricted format for messages between workers.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from kvstore_server import check
from kvstore_server.optimizer.trees import map_tree
from kvtrainer.errors import (
    CheckpointKeyError,
    ConfigurationError,
    KVStoreError,
    StateFileError,
    StateMismatchError,
    file_error,
)
from kvtrainer.options.loss_scaler import check_loss_scaler_state
from kvtrainer.states.atomic_file import replace_atomically
from kvtrainer.states.format import build_saved_states, checksum_of_state_file
from kvtrainer.strategy.environment import current_device
from kvtrainer.trainer.trainer import Trainer
from kvtrainer.trainer.trainer_dict import check_names

_log = logging.getLogger(__name__)

MapLocation = str | torch.device | Callable[..., Any] | None
LAST = "last_checkpoint"
"""File in the work directory with the path of the latest checkpoint."""
WEIGHTS, OPTIMIZER, SCHEDULERS, META = "state_dict", "optimizer", "param_schedulers", "meta"
RANKS = "ranks"
"""Part with an entry per rank: the states of its random number generators, and its own share of optimizer states."""
_FORMAT, _CHECKSUM = "kvtrainer_format", "kvtrainer_checksum"
"""Keys in meta: the format's number, and the checksum of everything else. One without the other means damage."""
_ARCHIVE = b"PK\x03\x04"
"""The first bytes of a torch.save file, since torch 1.6."""
_FOLDER = 0x10
"""The bit in the attributes of an archive's record that marks a folder."""
_WITH_CHECKSUM = 2
"""Number of the format with a checksum; files in the first format have neither key."""
_SCALER = "loss_scaler"
_SCHEDULES = "schedules"
"""The part of a Trainer's states that a checkpoint stores separately."""
_PLAIN = (bool, int, float, str, type(None))


def read_checkpoint(filename: str, map_location: MapLocation = "cpu") -> dict[str, Any]:
    """Read a checkpoint and verify that it is as it was written. Nothing in it is run as code.

    It is verified through its own checksum or, in files of other programs and older releases, through the CRCs that
    torch.save writes. Files from https:// addresses are kept in torch.hub's folder.

    Raises:
        ConfigurationError: The address has an unsupported scheme.
        StateFileError: The file cannot be read, was damaged or changed since it was written, or contains something
            else.
    """
    # 1. Read the file. Damaged files make torch.load raise many kinds of errors.
    where: Any = current_device() if map_location == "default" else map_location
    path = _local_checkpoint_path(filename)
    try:
        found = torch.load(path, map_location=where, weights_only=True)
    except UnpicklingError as error:
        raise StateFileError(
            f"cannot load {filename!r}: it holds more than tensors and plain values, or is damaged ({error!s:.300}). "
            "If you trust it, load it with torch.load(weights_only=False) once and save its 'state_dict' again"
        ) from error
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:300]
        text = f"cannot load {filename!r}: {reason or type(error).__name__}"
        raise file_error(StateFileError, text, error, filename) from error
    # 2. Verify the contents.
    if not isinstance(found, Mapping):
        raise StateFileError(f"cannot load {filename!r}: it holds a {type(found).__name__}, no checkpoint")
    content = dict(found)
    if not _has_checkpoint_checksum(content, filename):
        _check_checkpoint_records(path, content, filename)
    return _checkpoint_with_weights(content, filename)


def _has_checkpoint_checksum(content: dict[str, Any], filename: str) -> bool:
    """Verify the checksum and remove it from meta. Return False if it is missing; raises if it is wrong."""
    meta = content.get(META)
    if not isinstance(meta, Mapping) or not {_FORMAT, _CHECKSUM} & set(meta):
        return False
    content[META] = rest = {name: value for name, value in meta.items() if name != _CHECKSUM}
    try:
        fits = meta.get(_CHECKSUM) == checkpoint_checksum(content)
    except (TypeError, ValueError, RuntimeError, RecursionError):  # values that we never write
        fits = False
    if not fits:
        raise StateFileError(
            f"cannot load {filename!r}: its contents do not match the checksum that was saved with them; if you "
            f"changed them, remove {_FORMAT!r} and {_CHECKSUM!r} from its 'meta', too"
        )
    del rest[_FORMAT]
    return True


def _check_checkpoint_records(path: str, content: Mapping[str, Any], filename: str) -> None:
    """Verify the CRC of each record, which torch.load does not. Raises StateFileError."""
    is_noted, damaged = False, None
    try:
        with open(path, "rb") as file:
            is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                records = archive.infolist()
                is_noted = any(record.CRC for record in records)  # torch can be told not to write CRCs
                # torch does not read a record that is marked as a folder, and returns uninitialized memory for it.
                folders = (record.filename for record in records if record.external_attr & _FOLDER)
                damaged = next(folders, None) or (archive.testzip() if is_noted else None)
    except Exception as error:  # zipfile raises many kinds of errors
        damaged = str(error)
    if damaged is not None:
        raise StateFileError(f"cannot load {filename!r}: it was damaged since it was written ({damaged})")
    meta = content.get(META)
    if not is_noted or (isinstance(meta, Mapping) and "kvtrainer" in meta):
        why = "" if is_noted else " or of its parts, so damage would not be noticed"
        _log.warning("%r has no checksum of its contents%s; save_checkpoint writes one", filename, why)


def write_checkpoint(checkpoint: Mapping[str, Any], filename: str) -> None:
    """Write plain values, as returned by `plain_checkpoint_copy`, to a file, replacing it atomically. Blocks until it
    is on the disk.

    Missing folders are created. A checksum is added to the meta. Raises StateFileError, after which an existing file is
    unchanged.
    """
    path = os.path.realpath(checkpoint_path(filename))
    meta = check.mapping("the 'meta' of a checkpoint", checkpoint.get(META, {}))
    content = {**checkpoint, META: {**meta, _FORMAT: _WITH_CHECKSUM}}
    content[META][_CHECKSUM] = checkpoint_checksum(content)
    with _name_checkpoint_in_errors(
        f"save a checkpoint to {filename!r}, and what was there before is unchanged", filename
    ):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with replace_atomically(path) as file:  # given a path, torch.save would store its name in each record
            torch.save(content, file)


@contextmanager
def _name_checkpoint_in_errors(what: str, filename: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise file_error(StateFileError, f"cannot {what}: {error}", error, filename) from error


def record_last_checkpoint(work_dir: str, filename: str) -> None:
    """Record in the work directory that this checkpoint is the latest. Raises StateFileError."""
    path, noted = os.path.join(os.path.realpath(work_dir), LAST), os.path.abspath(checkpoint_path(filename))
    with (
        _name_checkpoint_in_errors(f"note the latest checkpoint in {path!r}", path),
        replace_atomically(path) as file,
    ):
        file.write(noted.encode())


def find_last_checkpoint(work_dir: str) -> str | None:
    """Return the latest checkpoint of a work directory, even if that was moved since; None before the first one."""
    path = os.path.join(work_dir, LAST)
    with _name_checkpoint_in_errors(f"read in {path!r} which checkpoint is the latest", path):
        try:
            with open(path, encoding="utf-8") as file:
                noted = file.read().strip()
        except FileNotFoundError:
            return None
    if not noted or os.path.exists(noted):
        return noted or None
    # The folder was moved: look for the end of the path below it.
    parts = noted.split(os.sep)
    moved = (os.path.join(work_dir, *parts[at:]) for at in range(1, len(parts)))
    return next((name for name in moved if os.path.exists(name)), noted)


def checkpoint_path(filename: str) -> str:
    """Return the local path at which a checkpoint is written. Raises ConfigurationError for other addresses."""
    scheme, path = _split_checkpoint_address(filename)
    if scheme not in ("", "file"):
        raise ConfigurationError(f"checkpoints are written to files, not to {filename!r}; give a path")
    return path


def _split_checkpoint_address(filename: str) -> tuple[str, str]:
    """Return the scheme of an address ('' for a path), and the rest."""
    if not isinstance(filename, str | os.PathLike):
        raise ConfigurationError(f"the name of a checkpoint must be a path, got {filename!r:.80}")
    scheme, mark, rest = os.fspath(filename).partition("://")
    return (scheme, rest) if mark else ("", scheme)


def _local_checkpoint_path(filename: str) -> str:
    scheme, path = _split_checkpoint_address(filename)
    if scheme in ("", "file"):
        return path
    if scheme != "https":
        why = "is unprotected" if scheme == "http" else "is of no kind that is supported"
        raise ConfigurationError(f"{filename!r} {why}; give a path or an https:// address")
    # Different addresses may end in the same name, so the cached file has a digest of the address.
    base = os.path.basename(urlsplit(filename).path) or "checkpoint"
    mark = hashlib.sha256(filename.encode()).hexdigest()[:16]
    path = os.path.join(torch.hub.get_dir(), "checkpoints", f"{mark}-{base}")
    if not os.path.exists(path):
        with _name_checkpoint_in_errors(f"download {filename!r}", filename):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.hub.download_url_to_file(filename, path, progress=False)
    return path


def _checkpoint_with_weights(found: dict[str, Any], filename: str) -> dict[str, Any]:
    if isinstance(found.get(WEIGHTS), Mapping):
        return found
    if found and all(isinstance(value, Tensor) for value in found.values()):
        return {WEIGHTS: found}
    raise StateFileError(
        f"{filename!r} is no checkpoint: it has no {WEIGHTS!r}, but {', '.join(map(str, found))[:300] or 'nothing'}; "
        "give weights that are called otherwise to load_model_state_dict()"
    )


def require_checkpoint_part(checkpoint: Mapping[str, Any], part: str, filename: str) -> Any:
    """Return a part of a checkpoint. Raises CheckpointKeyError, with the parts that exist."""
    if part not in checkpoint:
        there = ", ".join(map(repr, checkpoint))
        raise CheckpointKeyError(f"{filename!r} has no {part!r}, only {there}; missing='warn' takes these")
    return checkpoint[part]


def plain_checkpoint_copy(value: Any, where: str) -> Any:
    """Copy into plain dicts, lists, tuples and CPU tensors, which `torch.load(weights_only=True)` can read.

    Raises ConfigurationError for anything else; `where` is the value's name in the message.
    """
    # 1. Tensors and plain values. Subclasses of tensors become plain ones.
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ConfigurationError(f"{where} is a tensor of layout {value.layout}; save it as to_dense()")
        return value.detach().to("cpu").as_subclass(Tensor)
    if type(value) in (*_PLAIN, bytes):
        return value
    # 2. Collections. Exact types: a subclass may carry state that would be lost.
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in _PLAIN:
                raise ConfigurationError(f"{where} has the key {key!r:.80}, neither a number nor text")
        copied = {key: plain_checkpoint_copy(one, f"{where}[{key!r}]") for key, one in value.items()}
        return OrderedDict(copied) if type(value) is OrderedDict else copied
    if isinstance(value, list | tuple):
        made = [plain_checkpoint_copy(one, f"{where}[{at}]") for at, one in enumerate(value)]
        return tuple(made) if type(value) is tuple else made
    raise ConfigurationError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; save "
        "tensors, numbers, text, and dicts and lists of these"
    )


def checkpoint_checksum(value: Any) -> str:
    """Return the checksum of a `plain_checkpoint_copy`, of tensors, values and structure. Raises for anything else."""
    return checksum_of_state_file(*_flatten_checkpoint(value))


def _flatten_checkpoint(value: Any) -> tuple[dict[str, Tensor], str]:
    tensors: dict[str, Tensor] = {}

    def walk(one: Any) -> Any:
        if isinstance(one, Tensor):
            name = str(len(tensors))
            tensors[name] = one
            return {"t": name}
        if isinstance(one, bytes):
            return {"b": one.hex()}
        if isinstance(one, Mapping):
            return {"d": [[key, walk(item)] for key, item in one.items()]}
        return [walk(item) for item in one] if isinstance(one, list | tuple) else one

    text = json.dumps(walk(value))
    return tensors, text


def pack_checkpoint_tree(value: Any) -> bytes:
    """Encode plain values and tensors for another worker.

    `unpack_checkpoint_tree` returns a `plain_checkpoint_copy` of them.
    """
    packed = io.BytesIO()
    torch.save(_copy_checkpoint_tensors(plain_checkpoint_copy(value, "what a worker tells")), packed)
    return packed.getvalue()


def _copy_checkpoint_tensors(value: Any) -> Any:
    """Copy the tensors of a `plain_checkpoint_copy`, because torch.save writes the whole storage of a view."""
    return map_tree(lambda one: one.contiguous().clone() if isinstance(one, Tensor) else one, value)


def unpack_checkpoint_tree(data: bytes) -> Any:
    """Decode the result of `pack_checkpoint_tree`; nothing in it is run as code."""
    return torch.load(io.BytesIO(data), weights_only=True)


def own_checkpoint_states(trainer: Trainer) -> dict[str, Any]:
    """Return the part of a Trainer's states that only this worker has, without schedules."""
    mine = trainer.export_own_states()
    extra = {name: value for name, value in mine.extra.items() if name != _SCHEDULES}
    return {"extra": extra, "tensors": mine.tensors}


def common_checkpoint_states(trainer: Trainer) -> dict[str, Any]:
    """Return the part of a Trainer's states that all workers share. Blocks while a store is asked."""
    saved, mine = trainer.export_saved_states(), trainer.export_own_states()
    rest = {
        "extra": {name: value for name, value in saved.extra.items() if name not in mine.extra},
        "tensors": {name: value for name, value in saved.tensors.items() if name not in mine.tensors},
    }
    return {
        "optimizer": saved.optimizer,
        "num_update": saved.num_update,
        "groups": saved.groups,
        "parameters": {n: {**vars(one), "shape": list(one.shape)} for n, one in saved.parameters.items()},
        **{part: members for part, members in rest.items() if members},
    }


def fit_checkpoint_states(
    trainer: Trainer, common: Mapping[str, Any], own: Mapping[str, Any]
) -> Callable[[], None]:
    """Check that states can be loaded into a Trainer. Return a function that loads them.

    `common` and `own` are those of `common_checkpoint_states` and `own_checkpoint_states`; `common` may also be the
    state_dict of a torch optimizer of the same kind, or of mmengine's wrapper of one. Raises StateMismatchError, with
    what differs.
    """
    # The state_dict of a torch optimizer.
    if "param_groups" in common and "state" in common:
        given, scaler = dict(common), trainer.loss_scaler
        scale = given.pop(_SCALER, None)  # saved by mmengine's AmpOptimWrapper
        trainer.check_state_dict(given)
        if scale and scaler is not None:
            check_loss_scaler_state(scaler, scale)

        def take_over() -> None:
            trainer.load_state_dict(given)
            if scale and scaler is not None:
                scaler.load_state_dict(scale)

        return take_over
    # Our own format: what is common, and what this rank has alone.
    with refuse_unreadable_checkpoint("the state of an optimizer"):
        both = {part: {**common.get(part, {}), **own.get(part, {})} for part in ("extra", "tensors")}
        saved = build_saved_states({**common, **both})
        trainer.check_saved_states(saved)
    return lambda: trainer.adopt_saved_states(saved)


def pair_checkpoint_schedules(schedules: Any, states: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    """Pair schedules with their states; both are lists, or dicts of lists by the names of several optimizers."""
    wanted: Any = Mapping if isinstance(schedules, Mapping) else list | tuple
    if not isinstance(states, wanted):
        raise StateMismatchError(f"states of schedules are a list, or lists by optimizer, got {states!r:.80}")
    if not isinstance(schedules, Mapping):
        schedules, states = {"": schedules}, {"": states}
    check_names(states, schedules)
    for name, its in schedules.items():
        if len(its) != len(states[name]):
            of = name and f" of {name}"
            raise StateMismatchError(
                f"there are {len(states[name])} states for {len(its)} schedules{of}; build the same ones"
            )
    return [row for name, its in schedules.items() for row in zip(its, states[name], strict=True)]


@contextmanager
def refuse_unreadable_checkpoint(what: str) -> Iterator[None]:
    """Run a block that reads a part of a checkpoint; unexpected contents raise StateMismatchError."""
    try:
        yield
    except KVStoreError:
        raise
    except Exception as error:  # files of other programs, or a callback, may contain anything
        raise StateMismatchError(
            f"the checkpoint does not fit: {what} cannot be read ({type(error).__name__}: {error}); nothing has changed"
        ) from error
