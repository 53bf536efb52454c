"""Lets the state of an engine outlive its process: what is logged when, and what a restarted server makes of it.

Numbers (weights, optimizer state) are changed in place in durable memory, under the journal. Everything else is in
images (`image`). At the end of each request that changed something, one record with the images of the namespaces
concerned is appended, and only then is anything answered; so a peer that was answered finds the same after a restart. A
process that dies earlier leaves no trace: its successor undoes what the journal has protected since that record, and
the workers send again what was lost.

The log is replaced by a shorter one when it has grown to several times the size of the state. The new one is stored
complete, before the old one is removed, and of two the one with the higher generation counts.

Invariants: a record that names memory follows the storing of its descriptor, and memory is dropped only when no record
of the current log needs it. Restoring changes nothing that would keep it from being done again.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_server.durable.fd_store import PREFIX, FdStore, FdStoreDescriptor
from kvstore_server.durable.journal import (
    OWN,
    PLAN,
    PROGRESS,
    RANGES,
    ROWS,
    SHADOW,
    Journal,
    JournalRows,
    Matrix,
    join_journal_rows,
    pack_journal_rows,
    undo_journal_plan,
    undo_journal_ranges,
    undo_journal_rows,
    unpack_journal_rows,
)
from kvstore_server.durable.log import DurableLog, LogRecord, read_log_generation, read_log_records
from kvstore_server.durable.memory import REGION, DurableMemory, DurableRegion
from kvstore_server.engine.image import (
    Image,
    apply_image,
    make_image,
    pack_image,
    register_of_image,
    restore_image_sessions,
    unpack_image,
)
from kvstore_server.engine.increments import (
    RoundIncrements,
    expand_increments,
    increments_of,
    note_increment_base,
    unpack_increments,
)
from kvstore_server.engine.membership import Sessions
from kvstore_server.engine.namespace import Namespace
from kvstore_server.engine.rounds import Mode
from kvstore_server.errors import KVStoreError, RecoveryError
from kvstore_server.failpoints import failpoint

_log = logging.getLogger(__name__)

LOG = PREFIX + "log-"
_HEAD, _MEMORY, _COMMIT, _RANGES, _ROWS, _ROWS_BEFORE, _PLAN, _ROUND = range(1, 9)
"""Kinds of records: what the server is, a region, images, what the journal protects (ranges, or rows), rows that an
earlier change has protected, what is protected by a plan, and a commit that changes an image by increments."""
_PROTECTED = {RANGES: _RANGES, ROWS: _ROWS, PLAN: _PLAN}
_CHANGE = struct.Struct("<q")
_COMMIT_HEAD = struct.Struct("<qq")
"""The journal's number, and the bytes of what it holds."""
_MIN_LOG, _GROWTH = 1 << 20, 4
"""A log is replaced when it is longer than both: bytes, and times the length of its beginning."""


def _durability_change_number(generation: int, commits: int) -> int:
    """Return what identifies a change: the log, and how many commits are before it."""
    return generation << 32 | commits


@dataclass(frozen=True)
class Head:
    """What a server is; its next process must be the same.

    Args:
        server, num_servers, capability: As in `EngineConfig`.
        run_id: As in `EngineConfig`; the next process continues under the same number.
        endpoint: The address on which it listens.
    """

    server: int
    num_servers: int
    capability: str
    run_id: int
    endpoint: str

    def check(self, server: int, num_servers: int, capability: str) -> None:
        """Raise RecoveryError unless the present process is the same server, on a CPU that computes the same bits."""
        told = {
            "--index": (self.server, server),
            "--num-servers": (self.num_servers, num_servers),
            "the CPU": (self.capability, capability),
        }
        differing = [f"{name} was {was!r} and is {now!r}" for name, (was, now) in told.items() if was != now]
        if differing:
            raise RecoveryError(
                f"what was stored is of another server: {'; '.join(differing)}. Start it as before, or without what is "
                "stored"
            )


@dataclass
class DurabilityContents:
    """What the processes before have left."""

    head: Head
    generation: int
    last: int
    """The highest number that a region ever had."""
    regions: list[DurableRegion]
    gone: Collection[int]
    """The numbers of regions of namespaces that do not exist."""
    spaces: dict[int, list[Image]]
    """Number of each namespace → its images, in order."""
    last_space: int
    finished: list[str]
    """Namespaces whose workers have all finished."""
    change: int
    """The journal's number."""
    undo: list[LogRecord]
    """What the journal has protected and not committed."""
    plans: list[bytes]
    """By which the journal may have protected more."""
    commits: int
    """How many are in the log."""
    rows_before: dict[Matrix, JournalRows]
    """As in `Journal`."""
    kept: Sequence[FdStoreDescriptor]


class _DurabilityImages:
    """The images of a namespace in a log, in order; of those that count from the same one only the last is kept."""

    def __init__(self) -> None:
        self._bases: dict[int, Image] = {}
        self._found: dict[Any, Image] = {}
        self._count = 0

    def add(self, image: Image) -> None:
        self._count += 1
        self._found[self._count] = image
        if "base" in image:
            self._bases[image["base"]] = image

    def grow(self, more: RoundIncrements) -> None:
        base = self._bases.get(more.number)
        if base is None:
            raise RecoveryError(
                f"the stored log has a round that counts from image {more.number}, which it has not"
            )
        for table, rank, states in more.clients:
            self._put(("client", table, rank), {"clients": [[table, rank, states]]})
        if more.hypers:
            self.add({"hypers": more.hypers})
        self._put(("round", more.number), expand_increments(base, more))

    def _put(self, key: Any, image: Image) -> None:
        self._found.pop(key, None)
        self._found[key] = image

    def all(self) -> list[Image]:
        return list(self._found.values())


class _DurabilityLogContents:
    """What the records of a log say, as far as it still holds; the arguments of `DurabilityContents`."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.known: dict[int, tuple[int, str]] = {}
        """Number of each region → its size in bytes, and its key."""
        self.images: dict[int, _DurabilityImages] = {}
        self.plans: list[bytes] = []
        self.undo: list[LogRecord] = []
        self.rows_before: dict[Matrix, JournalRows] = {}
        self.finished: list[str] = []
        self.last = self.last_space = self.change = self.commits = 0

    def add(self, record: LogRecord) -> None:
        """Take the next record. Raises RecoveryError if it is of an unknown kind, or contradicts earlier ones."""
        data = record.data
        if record.kind == _HEAD:
            *values, self.last, self.last_space = unpack_image(data)
            self.head = Head(*values)
        elif record.kind == _MEMORY:
            number, nbytes, key = unpack_image(data)
            self.known[number] = nbytes, key
        elif record.kind in (_COMMIT, _ROUND):
            self._commit(record)
        elif record.kind in (_RANGES, _ROWS):
            self.undo.append(record)
        elif record.kind == _PLAN:
            self.plans.append(data)
        elif record.kind == _ROWS_BEFORE:
            [change] = _CHANGE.unpack_from(data)
            self.rows_before |= join_journal_rows(change, [unpack_journal_rows(data[_CHANGE.size :])])
        else:
            raise RecoveryError(f"the stored log has a record of kind {record.kind}")

    def _commit(self, record: LogRecord) -> None:
        """Take a commit: what was protected before it need not be undone any more, except for what it holds."""
        self.commits += 1
        self.change, size = _COMMIT_HEAD.unpack_from(record.data)
        rows = [unpack_journal_rows(one.data) for one in self.undo if one.kind == _ROWS]
        self.rows_before |= join_journal_rows(self.change, rows)
        first = _COMMIT_HEAD.size
        if record.kind == _ROUND:
            self.undo = []
            number, more = unpack_increments(record.data[first:])
            if number not in self.images:
                raise RecoveryError(
                    f"the stored log has a round of a namespace {number} that it does not have"
                )
            self.images[number].grow(more)
            return
        self.undo = [LogRecord(_RANGES, record.data[first : first + size])]
        ended, new_images, names = unpack_image(record.data[first + size :])
        self.finished = self.finished if names is None else names
        for number, image in new_images:
            self.images.setdefault(number, _DurabilityImages()).add(image)
            self.last_space = max(self.last_space, number)
        for number in ended:
            self.images.pop(number, None)


def read_durability(kept: Sequence[FdStoreDescriptor]) -> DurabilityContents | None:
    """Read what an earlier process has left, if any. Nothing is changed.

    Raises:
        RecoveryError: It is damaged, or something is missing.
    """
    logs = {read_log_generation(one.fd): one for one in kept if one.name.startswith(LOG)}
    if not logs:
        return None
    # 1. The newest log, and what it says.
    generation, log = max(logs), _DurabilityLogContents()
    for record in read_log_records(logs[generation].fd):
        log.add(record)
    if log.head is None:
        raise RecoveryError("the stored log does not say which server it belongs to")
    # 2. The memory of what still exists.
    fds = {int(one.name.removeprefix(REGION)): one.fd for one in kept if one.name.startswith(REGION)}
    regions = []
    gone = set[int]()
    for number, (nbytes, key) in log.known.items():
        if not key.startswith(OWN) and int(key.partition(".")[0]) not in log.images:
            gone.add(number)  # of a namespace that has ended, or that no image names yet
            continue
        if number not in fds:
            raise RecoveryError(f"memory {number} of this server ({key}) is not among what was kept")
        if os.fstat(fds[number]).st_size != nbytes:
            found = os.fstat(fds[number]).st_size
            raise RecoveryError(f"memory {number} of this server ({key}) has {found} bytes, not {nbytes}")
        regions.append(DurableRegion(number, key, os.dup(fds[number])))
    spaces = {number: own.all() for number, own in log.images.items()}
    return DurabilityContents(
        log.head, generation, max([log.last, *log.known, *fds]), regions, gone, spaces, log.last_space, log.finished,
        log.change, log.undo, log.plans, log.commits, log.rows_before, kept,
    )  # fmt: skip


class Durability:
    """Writes what an engine must not lose, and restores it. Not thread-safe.

    Args:
        store: Keeps descriptors for the next process.
        stored: What an earlier process has left.
    """

    def __init__(self, store: FdStore, stored: DurabilityContents | None = None) -> None:
        self._store = store
        self._stored = stored
        self._log: DurableLog | None = None
        self._commits = 0
        """How many are in the log."""
        self._least = 0
        self.memory = DurableMemory(store, self._record_memory)
        self.journal = Journal(self.memory, self._record_protected)
        self._head: Head | None = None
        self._numbers: dict[str, int] = {}
        """Namespace → its number."""
        self._last_space = 0
        self._ended: list[int] = []
        self._dirty: set[str] = set()
        self._undone: list[tuple[int, int, int]] = []
        """(region, begin, end) of what `undo` has returned to its former contents."""
        if stored is not None:
            for region in stored.regions:
                self.memory.add(region)
            self.memory.last, self._last_space = stored.last, stored.last_space
            self.journal.number = stored.change + 1
            self.journal.rows_before = dict(stored.rows_before)

    # ---------------------------------------------------------------- what an engine does

    def begin(self, name: str, number: int | None = None) -> tuple[Journal, str, Callable[[], None]]:
        """Begin to log a namespace; return the journal, the prefix of its memory, and what marks it as changed."""
        if number is None:
            self._last_space += 1
            number = self._last_space
        self._numbers[name] = number

        def mark() -> None:
            self._dirty.add(name)

        return self.journal, str(number), mark

    def end(self, name: str) -> None:
        """Log with the next commit that a namespace has ended; its memory is given back then."""
        self._ended.append(self._numbers.pop(name))
        self._dirty.discard(name)

    def commit(
        self, namespaces: Mapping[str, Namespace], sessions: Sessions, finished: Iterable[str]
    ) -> None:
        """Log what has changed since the last commit. When this returns, it outlives the process."""
        if not (self._dirty or self._ended or self.journal.is_open):
            return
        assert self._log is not None
        failpoint("server.commit.begin")
        # A namespace that was not accepted has numbers and no images.
        dirty = [name for name in self._numbers if name in self._dirty and name in namespaces]
        self._dirty.clear()
        held = self.journal.held()
        more = None
        if len(dirty) == 1 and not held and not self._ended:
            more = increments_of(namespaces[dirty[0]])
        if more is not None:
            self._log.append(
                _ROUND, _COMMIT_HEAD.pack(self.journal.number, 0), more.packed(self._numbers[dirty[0]])
            )
        else:
            images = [[self._numbers[name], self._image(namespaces[name], sessions)] for name in dirty]
            data = pack_image([self._ended, images, list(finished) if self._ended else None])
            self._log.append(_COMMIT, _COMMIT_HEAD.pack(self.journal.number, len(held)), held, data)
        self._commits += 1
        failpoint("server.commit.logged")
        self.journal.commit(_durability_change_number(self._log.generation, self._commits))
        ended = bool(self._ended)
        self._ended.clear()
        if ended or self._log.end > max(_MIN_LOG, _GROWTH * self._least):
            try:
                self.compact(namespaces, sessions, finished)
            except RecoveryError as error:  # the supervisor is gone: go on without one
                self._least = self._log.end
                _log.warning(
                    "the log of this server's state grows, because a shorter one cannot be kept: %s", error
                )

    @staticmethod
    def _image(space: Namespace, sessions: Sessions) -> Image:
        image = make_image(space, sessions)
        note_increment_base(space, image)
        return image

    # ---------------------------------------------------------------- the log

    def start(
        self,
        head: Head,
        namespaces: Mapping[str, Namespace],
        sessions: Sessions,
        finished: Iterable[str] = (),
    ) -> None:
        """Begin a log of this process, with all that there is; from now on changes are logged."""
        self._head = head
        self.compact(namespaces, sessions, finished)
        if self._stored is not None:
            # The former log, what it does not name, and what was left behind between two steps.
            in_use = {f"{REGION}{number}" for number in self.memory.regions}
            in_use.add(f"{LOG}{self._log.generation}" if self._log else "")
            for name in {one.name for one in self._stored.kept} - in_use:
                failpoint("server.recovery.remove")
                self._store.remove(name)
            for one in self._stored.kept:
                os.close(one.fd)
            self._stored = None

    def compact(
        self, namespaces: Mapping[str, Namespace], sessions: Sessions, finished: Iterable[str]
    ) -> None:
        """Replace the log by a new one with the present state, between two commits; drop memory that nothing needs."""
        assert self._head is not None
        former = self._log
        generation = 1 + (former.generation if former else self._stored.generation if self._stored else 0)
        # 1. Write it completely.
        fd = os.memfd_create("kvstore-log", os.MFD_CLOEXEC)
        log = DurableLog(fd, generation)
        head = self._head
        values = [head.server, head.num_servers, head.capability, head.run_id, head.endpoint]
        log.append(_HEAD, pack_image([*values, self.memory.last, self._last_space]))
        kept = self._needed(namespaces)
        for number in sorted(kept):
            region = self.memory.regions[number]
            log.append(_MEMORY, pack_image([number, region.nbytes, region.key]))
        self.journal.forget_others(kept)
        for matrix, before in self.journal.rows_before.items():
            log.append(_ROWS_BEFORE, _CHANGE.pack(before.change) + pack_journal_rows(*matrix, before.ids))
        images = []
        for name, space in namespaces.items():
            assert space.changes is not None
            space.changes.note_all(space)
            space.changes.sessions.update(sessions.of_namespace(name))
            images.append([self._numbers[name], self._image(space, sessions)])
        self._dirty.clear()
        held = self.journal.held()
        data = pack_image([[], images, list(finished)])
        log.append(_COMMIT, _COMMIT_HEAD.pack(self.journal.number, len(held)), held, data)
        failpoint("server.compact.written")
        # 2. From here on it counts.
        self._store.store(f"{LOG}{generation}", fd)
        failpoint("server.compact.stored")
        self._log, self._least, self._commits = log, log.end, 1
        self.journal.begin_log(generation, _durability_change_number(generation, 1))
        if former is not None:
            self._store.remove(f"{LOG}{former.generation}")
            former.close()
        failpoint("server.compact.removed")
        self.memory.drop_others(kept)

    def erase(self) -> None:
        """Remove all that is stored, because the server ends and no other process continues with it."""
        self.memory.drop_others(())
        if self._log is not None:
            self._store.remove(f"{LOG}{self._log.generation}")
            self._log.close()
            self._log = None

    def _needed(self, namespaces: Mapping[str, Namespace]) -> set[int]:
        """Return the numbers of the regions of all namespaces, without those that state was moved out of."""
        found: set[int] = set()
        prefixes = {str(number) for number in self._numbers.values()}
        unused = set[str]()
        for space in namespaces.values():
            for block in space.shard.storage.all_blocks:
                states = block.states.tensors.values()
                used = {place.region.key for one in states if (place := self.memory.find(one)) is not None}
                prefix = f"{self._numbers[space.name]}.state.{block.number}."
                unused |= {
                    region.key for region in self.memory.regions.values()
                    if region.key.startswith(prefix) and region.key.removesuffix(SHADOW) not in used
                }  # fmt: skip
        for region in self.memory.regions.values():
            is_used = region.key.partition(".")[0] in prefixes and region.key not in unused
            if is_used or (prefixes and region.key == PROGRESS):
                found.add(region.number)
        return found

    def _record_memory(self, number: int, nbytes: int, key: str) -> None:
        if self._log is not None:  # otherwise `start` records all
            self._log.append(_MEMORY, pack_image([number, nbytes, key]))

    def _record_protected(self, what: int, data: bytes) -> None:
        if self._log is not None:
            self._log.append(_PROTECTED[what], data)

    # ---------------------------------------------------------------- after a restart

    def undo(self) -> None:
        """Return durable memory to what it was at the last commit of the earlier process."""
        assert self._stored is not None
        for record in self._stored.undo:
            undo = undo_journal_rows if record.kind == _ROWS else undo_journal_ranges
            self._undone += undo(self.memory, record.data, self._stored.gone)
        change = _durability_change_number(self._stored.generation, self._stored.commits)
        self._undone += undo_journal_plan(self.memory, change, self._stored.plans, self._stored.gone)

    @property
    def finished(self) -> list[str]:
        """The namespaces that have ended because all workers had finished, in an earlier process."""
        return [] if self._stored is None else self._stored.finished

    def restore(
        self,
        make_space: Callable[[str, int, Mode, int, tuple[int, int, int]], Namespace],
        sessions: Sessions,
        now: float,
    ) -> dict[str, Namespace]:
        """Return the namespaces that the earlier process had.

        Args:
            make_space: Makes a namespace of a name, a number of workers, a mode, a number for `begin`, and how many
                ranks begin and must be left, if members may change.
            sessions: Gets the sessions of their workers, which count as heard now.

        Raises:
            RecoveryError: What was stored contradicts itself.
        """
        assert self._stored is not None
        found: dict[str, Namespace] = {}
        for number, images in sorted(self._stored.spaces.items()):
            try:
                space = self._restore_space(number, images, make_space, sessions, now)
            except KVStoreError:
                raise
            except (LookupError, TypeError, ValueError, AssertionError) as error:
                raise RecoveryError(f"the state that was stored contradicts itself: {error!r}") from error
            found[space.name] = space
        return found

    def _restore_space(
        self,
        number: int,
        images: Sequence[Image],
        make_space: Callable[[str, int, Mode, int, tuple[int, int, int]], Namespace],
        sessions: Sessions,
        now: float,
    ) -> Namespace:
        # 1. Build it like the first time: its optimizer, then its tables in their order.
        name, num_workers, *mode, initial, least, backup = images[0]["space"]
        space = make_space(name, num_workers, Mode(*mode), number, (initial, least, backup))
        optimizer = [image["optimizer"] for image in images if "optimizer" in image]
        for rank, spec in optimizer[-1] if optimizer else ():
            space.set_optimizer(rank, spec)
        for image in images:
            for row in image.get("declared", ()):
                space.register(*register_of_image(row))
            failpoint("server.recovery.declared")
        # 2. Then set what the images say, in their order.
        for image in images:
            restore_image_sessions(sessions, image.get("sessions", ()), now)
            apply_image(space, sessions, image)
        space.claim_restored()
        failpoint("server.recovery.applied")
        # 3. A round that was applied slice by slice begins again; its weights may have been sent under this version.
        for table in images[-1].get("pipelined", ()):
            space.tables[table].version += 1
        space.shard.storage.return_moved()
        space.shard.storage.forget_former(self._undone)
        for table_ in space.tables if space.shard.tracks_changes else ():
            table_.unit.changes.begin(table_.version)
        return space
