"""Snapshots of an engine's jobs: they are copied on request, written beside training, and offered after a restart.

A *cut* is the state of a job after all of its tables have ended the same number of rounds. The member with the lowest
rank asks all servers for one between two of its rounds, as often as they have told it to; no round ends without it, so
they all copy the state after the same round. For the same reason any worker can have the job saved by hand.

What training waits for is one copy in memory. A thread writes it; while it does, no other cut is taken. If it fails,
because the disk is full for example, that is logged and shown in the status, and training goes on. The request says
which of the former ones stay: a server does not know what the others have.

Cuts of a job whose workers have not called `Trainer.resume` would help nobody, and in the asynchronous modes a round
is not a state of all ranks; the log says so once.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvstore_server.budget import Budget
from kvstore_server.durable.background import BackgroundPublication, BackgroundTask, Task
from kvstore_server.durable.snapshot_folder import (
    SnapshotFolder,
    SnapshotName,
    StoredSnapshot,
    delete_snapshot_folders,
    latest_snapshots,
)
from kvstore_server.engine.cut import CutBuffer, SpaceCut, make_cut, tensors_of_cuts
from kvstore_server.engine.namespace import Namespace
from kvstore_server.errors import ConfigurationError, KVStoreError, RecoveryError, describe
from kvstore_server.failpoints import failpoint

_log = logging.getLogger(__name__)

KEPT = 3
"""How many snapshots of a job are kept at most: one that all servers have, and those that they may not have yet."""
_MAX_UNEVEN = 3
"""After this many requests in a row that came when tables had ended different numbers of rounds, the log says so."""
_LAST_WRITE = 30.0
"""Seconds that a snapshot in progress gets to be written when the server ends."""
_ATTEMPT = re.compile(r", attempt [0-9]+\Z")


def job_of(namespace: str) -> str:
    """Return the name of the job's store, under which its snapshots are found by any later attempt of it."""
    return _ATTEMPT.sub("", namespace.partition("/")[0])


class SnapshotPeriod(NamedTuple):
    """After how many rounds, or seconds, a snapshot is taken; both 0: only by hand."""

    rounds: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.rounds > 0 or self.seconds > 0


DEFAULT_PERIOD = SnapshotPeriod(50)


class Snapshots:
    """The snapshots of one server. Not thread-safe.

    Args:
        folder: Where they are.
        every: What workers are told.
        identity: What the facts of each snapshot say about the server, beside the job.
        budget: Memory for the copy is claimed here.
        run: Starts a function, and returns at once.
    """

    def __init__(
        self,
        folder: SnapshotFolder,
        every: SnapshotPeriod,
        identity: Mapping[str, Any],
        budget: Budget,
        run: Callable[[Callable[[], None]], Task] = BackgroundTask,
    ) -> None:
        self.every = every
        self._folder = folder
        self._identity = identity
        self._run = run
        self._buffer = CutBuffer(
            lambda nbytes: budget.claim(nbytes, "the copy from which a snapshot is written")
        )
        self._jobs: set[str] = set()
        """Those that need the buffer again."""
        self._writing: _SnapshotWriting | None = None
        self._due: dict[str, tuple[int, int]] = {}
        """Job → how many cuts were due, and the round of the last one."""
        self._uneven: Counter[str] = Counter()
        """Job → how many requests in a row came when its tables had ended different numbers of rounds."""
        self._warned: set[tuple[str, str]] = set()
        """(job, text) of the warnings that were logged."""
        self._problem = ""
        """Why the last snapshot was not written; empty if it was."""
        self._failed: tuple[SnapshotName, BaseException] | None = None
        """What was to be saved by hand the last time and was not, and why."""
        self._known: list[StoredSnapshot] = folder.all()

    # ---------------------------------------------------------------- taking them

    def cut(self, name: SnapshotName, spaces: Sequence[Namespace], kept: Collection[int]) -> str:
        """Take a cut, and begin to write it; return what has come of the request, see `read_answer` of the workers.

        Args:
            name: With the round after which all tables are, if it is taken at all.
            spaces: Those of the job that have tables here.
            kept: The rounds of the snapshots that are not removed.
        """
        self.settle()
        job, number = name.job, name.round
        # 1. Is it of use, and is there a round that all tables have ended?
        if not spaces:
            return "none"
        if (why := _why_snapshot_is_useless(spaces)) is not None:
            self._warn_once(job, f"takes no snapshots: {why}")
            return "useless"
        if _snapshot_rounds(spaces) != {number}:
            self._uneven[job] += 1
            if self._uneven[job] == _MAX_UNEVEN:
                self._warn_once(
                    job,
                    f"has no snapshot near round {number}, because its keys have not ended as many rounds at the same "
                    "time",
                )
            return "uneven"
        self._uneven.pop(job, None)
        # 2. A request that is repeated, and one that comes too early.
        count, last = self._due.get(job, (0, 0))
        if last != number:
            count += 1
            self._due[job] = count, number
        if (self._writing is not None and self._writing.name == name) or self._folder.has(name):
            return "taken"
        if self._writing is not None:
            _log.warning("no snapshot after round %d: the one before it is still being written", number)
            return "busy"
        # 3. Take it.
        return "taken" if self._take(name, spaces, count, kept) else "failed"

    def _take(
        self, name: SnapshotName, spaces: Sequence[Namespace], ordinal: int = 0, kept: Collection[int] = ()
    ) -> bool:
        """Copy the present state of a job's namespaces, and begin to write it; return whether there was memory."""
        try:
            self._jobs.add(name.job)
            cuts = make_cut(spaces, self._buffer)
        except (KVStoreError, RuntimeError, MemoryError) as error:  # torch raises RuntimeError without memory
            self._note_problem(name, error)
            return False
        failpoint("server.snapshot.cut")
        holders = sorted({s for one in spaces for table in one.tables for s in table.plan.servers})
        loaded = list(spaces[0].lineage.loaded)
        facts = {**self._identity, "ordinal": ordinal, "loaded": loaded, "holders": holders}
        own = BackgroundPublication()
        task = self._run(lambda: self._write(name, facts, cuts, kept, own))
        self._writing = _SnapshotWriting(name, task, own)
        return True

    def save(self, name: SnapshotName, spaces: Sequence[Namespace]) -> bool:
        """Save the present state of a job by hand; return whether it is on the disk. Call it again until it is.

        Args:
            name: With the round after which the caller wants to save, which none of its ranks goes beyond meanwhile.
            spaces: Those of the job that have tables here.

        Raises:
            ConfigurationError: There is no state that all servers have after that round, or nobody could load it.
            RecoveryError: It could not be written.
        """
        self.settle()
        if not spaces or self._folder.has(name):
            return True
        if self._failed is not None and self._failed[0] == name:
            (_, error), self._failed = self._failed, None
            raise RecoveryError(f"server {self._identity['server']} could not save {name}: {describe(error)}")
        if self._writing is None:
            _check_can_be_snapshot(name, spaces)
            self._take(name, spaces)
        return False

    def keep(self, name: SnapshotName) -> None:
        """Remove what this server has saved before under the same tag."""
        saved = self._folder.own_saved(name.job, name.tag)
        self._remove_in_background([one.name for one in saved if one.name.save != name.save])

    def drop(self, name: SnapshotName) -> None:
        """Remove what was saved, because another server could not save its part."""
        if self._writing is not None and self._writing.name == name:
            self._writing.publication.cancel()
        self._remove_in_background([name])

    def settle(self, seconds: float = 0.0) -> None:
        """Note the end of a snapshot that was being written; wait for it up to some seconds."""
        writing = self._writing
        if writing is None or not writing.task.is_over(seconds):
            return
        self._writing = None
        self._release_if_unused()
        if writing.publication.is_cancelled:
            return
        if writing.task.error is not None:
            self._note_problem(writing.name, writing.task.error)
            return
        _log.info("%s of %r is on the disk", writing.name, writing.name.job)
        if writing.name.tag:
            return
        self._problem = ""
        self._known = self._folder.all()

    def _write(
        self,
        name: SnapshotName,
        facts: Mapping[str, Any],
        cuts: Sequence[SpaceCut],
        kept: Collection[int],
        publication: BackgroundPublication,
    ) -> None:
        """Remove old snapshots, and write one; in the background."""
        if not name.tag:
            of_job = [one.name for one in self._folder.all() if one.name.job == name.job]
            delete_snapshot_folders(self._take_away([one for one in of_job if one.round not in kept]))
        self._folder.write(name, facts, tensors_of_cuts(cuts), publication)

    def _cancel(self, job: str) -> None:
        """Let nothing of a job appear on the disk any more that is being written now."""
        if self._writing is not None and self._writing.name.job == job:
            self._writing.publication.cancel()

    def _release_if_unused(self) -> None:
        if not self._jobs and self._writing is None:
            self._buffer.release()

    def warn_of_asynchronous(self, job: str) -> None:
        self._warn_once(job, "takes no snapshots: it is asynchronous, so a round is no state of all ranks")

    def _warn_once(self, job: str, text: str) -> None:
        if (job, text) not in self._warned:
            self._warned.add((job, text))
            _log.warning("job %r %s", job, text)

    def _note_problem(self, name: SnapshotName, error: BaseException) -> None:
        if name.tag:
            self._failed = name, error
            _log.error("%s of %r was not saved in %s: %s", name, name.job, self._folder.folder, error)
            return
        self._problem = describe(error)
        _log.error(
            "%s of %r was not written to %s: %s. Training goes on; until the next one is written, a job that is lost "
            "goes back to an earlier one. Make room there, or let the server write to it",
            name,
            name.job,
            self._folder.folder,
            error,
        )

    def _remove_in_background(self, names: Sequence[SnapshotName]) -> None:
        """Take snapshots away at once, and let a thread delete them."""
        if left := self._take_away(names):
            self._run(lambda: delete_snapshot_folders(left))

    def _take_away(self, names: Sequence[SnapshotName]) -> list[Path]:
        """Rename snapshots so that they are none any more; return what is left to be deleted."""
        left = []
        for name in names:
            try:
                renamed = self._folder.mark_for_deletion(name)
                left += [] if renamed is None else [renamed]
            except OSError as error:
                _log.error("%s of %r cannot be removed: %s", name, name.job, error)
        return left

    # ---------------------------------------------------------------- finding them

    @property
    def latest(self) -> int:
        """The round of the latest snapshot of any job; 0 if there is none."""
        return max([one.name.round for one in self._known], default=0)

    def of_job(self, job: str) -> list[StoredSnapshot]:
        """Return the snapshots of a job from which it can go on by itself, the latest last."""
        self.settle()
        return latest_snapshots([one for one in self._known if one.name.job == job], KEPT)

    def find(self, job: str, round_: int) -> StoredSnapshot:
        """Return a snapshot of a job. Raises ConfigurationError if there is none of that round."""
        for one in self.of_job(job):
            if one.name.round == round_:
                return one
        raise ConfigurationError(
            f"there is no snapshot of round {round_} of {job!r} in {self._folder.folder}"
        )

    def saved(self, job: str, tag: str) -> list[StoredSnapshot]:
        """Return what all servers have saved of a job under a tag, as far as this one can read it."""
        return self._folder.saved(job, tag)

    def tags(self, job: str) -> list[str]:
        return self._folder.tags(job)

    def quarantine(self, snapshot: StoredSnapshot) -> None:
        self._folder.quarantine(snapshot)
        self._known = self._folder.all()

    def go_back(self, job: str, round_: int) -> None:
        """Forget what was noted of a job's rounds, because it goes on from a former one; its later cuts are dropped.

        One that is being written is dropped, too, even if the disk is slow.
        """
        self._cancel(job)
        self._due.pop(job, None)
        known = self._folder.all()
        self._remove_in_background(
            [one.name for one in known if one.name.job == job and one.name.round > round_]
        )
        self._known = self._folder.all()

    def note_restored(self, job: str, ordinal: int, round_: int) -> None:
        """Note that a job goes on from a snapshot, and how many were due up to then."""
        self._due[job] = ordinal, round_

    def num_due(self, job: str, rounds: int) -> int:
        """Return how many cuts of a job were due in that many rounds since it has begun here."""
        by_rounds = max(rounds - 1, 0) // self.every.rounds if self.every.rounds else 0
        return max(self._due.get(job, (0, 0))[0], by_rounds)

    def forget(self, job: str) -> None:
        """Remove the snapshots of a job that is over, but not what was saved by hand."""
        self._cancel(job)
        self._due.pop(job, None)
        self._remove_in_background([one.name for one in self._folder.all() if one.name.job == job])
        self._known = self._folder.all()

    def end(self, job: str) -> None:
        """Return the memory for copies, if no other job needs it; this one has ended here, or goes back."""
        self._jobs.discard(job)
        self.settle()
        self._release_if_unused()

    @property
    def run(self) -> Callable[[Callable[[], None]], Task]:
        return self._run

    def facts(self) -> Mapping[str, Any]:
        """Return what a status says about the snapshots."""
        self.settle()
        latest = {one.name.job: one.name.round for one in sorted(self._known, key=lambda one: one.name.round)}
        return {
            "directory": str(self._folder.folder),
            "every": self.every.rounds,
            "seconds": self.every.seconds,
            "latest": latest,
            "is_writing": self._writing is not None,
            "problem": self._problem,
        }

    def close(self) -> None:
        """Wait for a snapshot that is being written, and release the directory."""
        self.settle(_LAST_WRITE)
        self._folder.close()


class _SnapshotWriting(NamedTuple):
    """A snapshot that is being written."""

    name: SnapshotName
    task: Task
    publication: BackgroundPublication


def spaces_of_job(name: str, namespaces: Mapping[str, Namespace]) -> list[Namespace]:
    """Return the namespaces of the same attempt of a job that have tables, by name."""
    job = name.partition("/")[0]
    return [one for other, one in sorted(namespaces.items()) if one.tables and other.partition("/")[0] == job]


def _snapshot_rounds(spaces: Iterable[Namespace]) -> set[int]:
    """Return how many rounds the tables of namespaces have ended."""
    return {int(n) for one in spaces for n in one.rounds.shared.numbers[: len(one.tables)]}


def _check_can_be_snapshot(name: SnapshotName, spaces: Sequence[Namespace]) -> None:
    """Raise ConfigurationError if a job cannot be saved by hand now."""
    if (why := _why_snapshot_is_useless(spaces)) is not None:
        raise ConfigurationError(f"job {name.job!r} cannot be saved: {why}")
    rounds = _snapshot_rounds(spaces)
    if rounds != {name.round}:
        raise ConfigurationError(
            f"job {name.job!r} cannot be saved after round {name.round}, because its keys are after {sorted(rounds)}. "
            "Save between two steps of this worker, when all keys and Trainers of the store have made as many rounds"
        )


def _why_snapshot_is_useless(spaces: Sequence[Namespace]) -> str | None:
    """Return why no job could go on from a cut of these namespaces; None if one can."""
    for space in spaces:
        members, tables = space.membership, space.tables
        if not space.mode.is_sync:
            return f"{space.name!r} is asynchronous, so a round is not a state of all ranks"
        if space.views is not None and space.views.backup_workers:
            return "a round may end without some of its workers, so none of them can ask for a snapshot between two"
        ranks = range(members.num_workers) if space.views is None else space.views.current.ranks
        if not members.resumable.issuperset(ranks):
            return "not all of its workers have called Trainer.resume(), so they could not go on from them"
        if any(table.deltas is not None for table in tables):
            return (
                "its weights are compressed on their way to workers, and what workers have is not in a snapshot; leave "
                "'pull' out of compression_params"
            )
        if space.views is None and space.rounds.left:
            return f"its ranks {sorted(space.rounds.left)} have left"
        if (broken := next((one for one in tables if one.conflict is not None), None)) is not None:
            return f"table {broken.name!r} cannot be used any more: {broken.conflict}"
        if any(not session.hello.resumes for session in members.members.values()):
            return (
                f"it has keys of push and pull ({tables[0].name!r}), which no other process takes over; train them "
                "with a Trainer, or in a store of their own"
            )
    return None
