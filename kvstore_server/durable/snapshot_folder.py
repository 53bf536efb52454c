"""Snapshots of one server in a directory: written whole or not at all, checked when they are read, removed when old.

    DIR/server-0/lock                                  held by the server as long as it lives
    DIR/server-0/round-000000000050.1f0c2e5a/          a snapshot: the job's name is in the manifest
        tensors.safetensors
        manifest.json                                  facts as JSON, with a checksum of its own and of the tensors
    DIR/server-0/save-TAG.00000001c0ffee0000000000.1f0c2e5a/   what was saved by hand under a tag
    DIR/server-0/.tmp-…                                unfinished, or about to be removed; removed at the next start

A snapshot is written under a temporary name, forced to the disk (fsync), and renamed. So a directory with its final
name is complete, unless the disk has changed it, which the checksums show. The name of a job comes from peers, so it
appears only as a checksum in the path; so does a tag, which is checked before it becomes a part of one.

A server writes and removes in its own directory only. It reads in those of the others what was saved under a tag, to
continue with another number of servers than wrote it.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvstore_server import __version__
from kvstore_server.durable.background import BackgroundPublication
from kvstore_server.durable.tensor_file import write_tensors
from kvstore_server.errors import ConfigurationError, RecoveryError
from kvstore_server.failpoints import failpoint

_log = logging.getLogger(__name__)

FORMAT, VERSION = "kvstore-server snapshot", 3
_TENSORS, _MANIFEST, _LOCK = "tensors.safetensors", "manifest.json", "lock"
_TEMPORARY = ".tmp-"
_NAME = re.compile(r"round-[0-9]{12}\.[0-9a-f]{8}")
_OF_SERVER = re.compile(r"server-[0-9]{1,9}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SAVE = re.compile(r"[0-9a-f]{24}")
_MAX_MANIFEST = 64 << 20
_CHUNK = 1 << 20


def check_snapshot_tag(tag: object) -> str:
    """Return a name for a snapshot that is taken by hand. Raises ConfigurationError unless it is one."""
    if not isinstance(tag, str) or _TAG.fullmatch(tag) is None:
        raise ConfigurationError(
            f"a tag has 1 … 64 letters, digits, '.', '_' and '-', and begins with a letter or a digit, got {tag!r:.80}"
        )
    return tag


class SnapshotName(NamedTuple):
    """Identifies a snapshot of a server.

    Args:
        job: The name of the job's store.
        round: How many rounds its tables had ended.
        tag: The name under which it was taken by hand; empty if the server took it.
        save: Tells apart what was saved under the same tag one after the other; 24 hexadecimal digits, ascending.
    """

    job: str
    round: int
    tag: str = ""
    save: str = ""

    @property
    def path(self) -> str:
        checksum = zlib.crc32(self.job.encode())
        if not self.tag:
            return f"round-{self.round:012d}.{checksum:08x}"
        if _SAVE.fullmatch(self.save) is None:
            raise ConfigurationError(f"a save is named by 24 hexadecimal digits, got {self.save!r:.80}")
        return f"save-{check_snapshot_tag(self.tag)}.{self.save}.{checksum:08x}"

    def __str__(self) -> str:
        return f"{self.tag!r} of round {self.round}" if self.tag else f"the snapshot of round {self.round}"


class StoredSnapshot(NamedTuple):
    """A snapshot that is on the disk.

    Args:
        folder: Where it is.
        facts: What the server said of it, plain values.
        nbytes, checksum: The size of the file of tensors, and its checksum (crc32).
    """

    name: SnapshotName
    folder: Path
    facts: Mapping[str, Any]
    nbytes: int
    checksum: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read the tensors. Raises RecoveryError, before the first one, if the file is not as it was written."""
        path = self.folder / _TENSORS
        try:
            self._check(path)
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (it is no dict)
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise RecoveryError(f"{self.name} in {self.folder} cannot be read: {error}") from None

    def _check(self, path: Path) -> None:
        checksum, nbytes = 0, 0
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                checksum, nbytes = zlib.crc32(chunk, checksum), nbytes + len(chunk)
        if (nbytes, checksum) != (self.nbytes, self.checksum):
            raise RecoveryError(
                f"{self.name} in {self.folder} is damaged: {_TENSORS} has {nbytes} bytes with the checksum "
                f"{checksum:08x}, not {self.nbytes} with {self.checksum:08x}"
            )


class SnapshotFolder:
    """The directory of one server's snapshots, locked. While one thread writes, another one may do everything else.

    Args:
        root: The directory of all servers; made if it does not exist.
        server: The server's index.

    Raises:
        ConfigurationError: Another process uses it, or it cannot be written to.
    """

    def __init__(self, root: str, server: int) -> None:
        self._root = Path(root)
        self.folder = self._root / f"server-{server}"
        self._count = itertools.count(1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock: BinaryIO | None = open(self.folder / _LOCK, "ab")  # noqa: SIM115  (held until `close`)
        except OSError as error:
            raise ConfigurationError(f"--state-dir {root} cannot be used: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ConfigurationError(
                f"another process uses {self.folder}: {error}. Give each job a --state-dir of its own, and each of its "
                "servers another --index"
            ) from None
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock; idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write(
        self,
        name: SnapshotName,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        publication: BackgroundPublication | None = None,
    ) -> None:
        """Write a snapshot; it replaces one of the same name. Blocks until it is on the disk.

        Args:
            publication: Gives it its name, unless that is cancelled before.

        Raises:
            OSError: That is not possible; nothing of it is left then.
            KVStoreError: It was cancelled; nothing of it is left.
        """

        def publish() -> None:
            replaced.append(self.mark_for_deletion(name))
            os.rename(temporary, self.folder / name.path)

        replaced: list[Path | None] = []
        temporary = self._temporary()
        try:
            temporary.mkdir()
            with open(temporary / _TENSORS, "xb") as file:
                counted = _SnapshotFileWriter(file)
                write_tensors(counted, tensors, {"format": FORMAT})
                _fsync_snapshot_file(file)
            failpoint("server.snapshot.tensors")
            content = {
                "format": FORMAT,
                "version": VERSION,
                "library": __version__,
                **name._asdict(),
                "facts": facts,
                "tensors": [counted.nbytes, counted.checksum],
            }
            with open(temporary / _MANIFEST, "xb") as file:
                file.write(_encode_snapshot_manifest(content))
                _fsync_snapshot_file(file)
            _fsync_snapshot_folder(temporary)
            failpoint("server.snapshot.written")
            (publication or BackgroundPublication()).publish(publish)
            failpoint("server.snapshot.renamed")
            _fsync_snapshot_folder(self.folder)
            delete_snapshot_folders(replaced)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def mark_for_deletion(self, name: SnapshotName) -> Path | None:
        """Rename a snapshot, so that it does not count any more; return what is left to be deleted. Raises OSError."""
        aside = self._temporary()
        try:
            os.rename(self.folder / name.path, aside)
        except FileNotFoundError:
            return None
        failpoint("server.snapshot.prune")
        return aside

    def all(self) -> list[StoredSnapshot]:
        """Return the snapshots that this server took, if their manifests are whole; others are named in the log."""
        return _snapshots_in_folder(self.folder, _NAME)

    def saved(self, job: str, tag: str) -> list[StoredSnapshot]:
        """Return what all servers have saved under a tag, as far as it is in the directory of all servers."""
        return [one for folder in self._of_servers() for one in _saved_snapshots_in_folder(folder, job, tag)]

    def own_saved(self, job: str, tag: str) -> list[StoredSnapshot]:
        """Return what this server has saved under a tag."""
        return _saved_snapshots_in_folder(self.folder, job, tag)

    def tags(self, job: str) -> list[str]:
        """Return the tags under which servers have saved something of a job."""
        pattern = re.compile(rf"save-({_TAG.pattern})\.[0-9a-f]{{24}}\.{zlib.crc32(job.encode()):08x}")
        names = [path.name for folder in self._of_servers() for path in _entries_of_snapshot_folder(folder)]
        return sorted({match[1] for name in names if (match := pattern.fullmatch(name)) is not None})

    def has(self, name: SnapshotName) -> bool:
        """Return whether this server has a snapshot whose manifest is whole."""
        try:
            return read_snapshot_folder(self.folder / name.path).name == name
        except RecoveryError:
            return False

    def _of_servers(self) -> list[Path]:
        return [
            path
            for path in _entries_of_snapshot_folder(self._root)
            if _OF_SERVER.fullmatch(path.name) is not None
        ]

    def quarantine(self, snapshot: StoredSnapshot) -> None:
        """Rename a damaged snapshot, so that it is not offered again but can still be examined."""
        with suppress(OSError):
            os.rename(snapshot.folder, snapshot.folder.with_name(f"damaged-{snapshot.folder.name}"))

    def _temporary(self) -> Path:
        return self.folder / f"{_TEMPORARY}{os.getpid()}-{next(self._count)}"


def delete_snapshot_folders(folders: Iterable[Path | None]) -> None:
    """Delete what `mark_for_deletion` has renamed; takes long if it is large."""
    for folder in folders:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class _SnapshotFileWriter:
    """Passes data on to a file in chunks, and computes their checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes = self.checksum = 0

    def write(self, data: Any, /) -> None:
        view = memoryview(data)
        for at in range(0, len(view), _CHUNK):
            chunk = view[at : at + _CHUNK]
            self.checksum = zlib.crc32(chunk, self.checksum)
            self._file.write(chunk)
        self.nbytes += len(view)


def _entries_of_snapshot_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _snapshots_in_folder(folder: Path, pattern: re.Pattern[str]) -> list[StoredSnapshot]:
    found = []
    for path in _entries_of_snapshot_folder(folder):
        if pattern.fullmatch(path.name) is None:
            continue
        try:
            found.append(read_snapshot_folder(path))
        except RecoveryError as error:
            if path.exists():  # it was not just removed
                _log.error("%s; it is left out", error)
    return found


def _saved_snapshots_in_folder(folder: Path, job: str, tag: str) -> list[StoredSnapshot]:
    pattern = rf"save-{re.escape(check_snapshot_tag(tag))}\.[0-9a-f]{{24}}\.{zlib.crc32(job.encode()):08x}"
    return [one for one in _snapshots_in_folder(folder, re.compile(pattern)) if one.name[::2] == (job, tag)]


def read_snapshot_folder(folder: Path) -> StoredSnapshot:
    """Read the manifest of a snapshot. Raises RecoveryError if it is missing, damaged or of another version."""
    path = folder / _MANIFEST
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_MANIFEST + 1)
    except OSError as error:
        raise RecoveryError(f"{path} cannot be read: {error}") from None
    content = _decode_snapshot_manifest(data)
    if content is None:
        raise RecoveryError(f"{path} is damaged: its checksum does not fit")
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise RecoveryError(
            f"{path} has version {content.get('version')!r} of the format {content.get('format')!r}; this server reads "
            f"version {VERSION} of {FORMAT!r}. Use the release that wrote it ({content.get('library')!r}), or another "
            "--state-dir"
        )
    name = SnapshotName(content["job"], content["round"], content["tag"], content["save"])
    if name.path != folder.name:
        raise RecoveryError(f"{path} is the manifest of {name} of {name.job!r}, which lies in {name.path}")
    return StoredSnapshot(name, folder, content["facts"], *content["tensors"])


def _encode_snapshot_manifest(content: Mapping[str, Any]) -> bytes:
    text = _encode_manifest_json(content)
    return _encode_manifest_json({"checksum": zlib.crc32(text), "content": content})


def _decode_snapshot_manifest(data: bytes) -> Mapping[str, Any] | None:
    """Return what `_encode_snapshot_manifest` has encoded; None if the bytes are not exactly that."""
    try:
        value = json.loads(data)
        checksum, content = value["checksum"], value["content"]
        is_whole = (
            _encode_manifest_json(value) == data and zlib.crc32(_encode_manifest_json(content)) == checksum
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return content if is_whole and isinstance(content, dict) else None


def _encode_manifest_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"


def _fsync_snapshot_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _fsync_snapshot_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def latest_snapshots(snapshots: Iterable[StoredSnapshot], count: int) -> list[StoredSnapshot]:
    """Return the latest snapshots, up to a count."""
    return sorted(snapshots, key=lambda one: one.name.round)[-count:]
