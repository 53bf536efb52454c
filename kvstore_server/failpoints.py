"""Failpoints: named places in the code at which a process can be made to die, stop, pause or raise, to test recovery.

KVSTORE_FAILPOINT arms some of them, separated by commas: NAME[@INDEX][:N][=ACTION]

    worker.round.committed                  the first worker process that gets there kills itself
    worker.round.committed@1:7=stop         rank 1 stops itself when it gets there for the 7th time
    server.update.begun@0:3,worker.close    several

A process counts how often it has reached a point, from 1 at its start. So a process that is started again would fire
again; with KVSTORE_FAILPOINT_DIR=DIR each entry fires once, in whichever process comes first, and leaves a file there.

`failpoint` is called where a name stands in the code. The points are armed once, by `arm_failpoints`, where a process
starts to take part in a job; until then, and without the variable, a call is a test of one global name. That is the
only state: an argument through every constructor from the command line down to one update would be more code than all
points. Points are placed where a crash leaves something half done, and each name stands in the code once.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore_server.errors import ConfigurationError, KVStoreError, did_you_mean

FAILPOINT = "KVSTORE_FAILPOINT"
FAILPOINT_DIR = "KVSTORE_FAILPOINT_DIR"

POINTS = {
    "worker.connect.hello": "before it says hello to a server",
    "worker.connect.welcome": "a server has welcomed it",
    "worker.connect.next_return": "a server has gone back to a snapshot, and others may not",
    "worker.connect.open": "all servers have welcomed it, and share memory with it if they are on its host",
    "worker.register.begin": "before it declares tables",
    "worker.register.next": "a server knows a table, and others may not",
    "worker.register.end": "all servers know the tables",
    "worker.optimizer.next": "a server knows the optimizer, and others may not",
    "worker.init.begin": "before it gives tables their first values",
    "worker.init.end": "the tables have values",
    "worker.round.begin": "before a round is sent, except for slices that went during the backward pass",
    "worker.round.eager": "before a slice is sent during the backward pass",
    "worker.round.next_slices": "all slices of a server were sent to it, and those of the next server were not",
    "worker.round.commit": "all slices of a round were sent, and no commit",
    "worker.round.next_commit": "a server was sent the commit, and the next one was not",
    "worker.round.committed": "all servers were sent the commit",
    "worker.round.held": "a server has measured its part of a sum, and the decision about it was not sent",
    "worker.round.next_decision": "a server was sent the decision about a sum, and the next one was not",
    "worker.round.answered": "a server has answered, and another one has not",
    "worker.round.write": "all servers have answered, and no new weights were written",
    "worker.round.next_write": "the weights of a server were written, and those of the next one were not",
    "worker.round.written": "all weights were written, and the round was not counted yet",
    "worker.round.end": "the round is over",
    "worker.memory.written": "what outlives it was written for the next round, and does not count yet",
    "worker.rows.asked": "rows were asked for, and have not come",
    "worker.barrier.begin": "before it comes to a barrier",
    "worker.barrier.end": "it has passed a barrier",
    "worker.join": "it has no more data, and has not said so yet",
    "worker.close": "before it leaves",
    "worker.close.next": "it has left a server, and not the next one",
    "worker.close.left": "it has left all servers, and its connections are open",
    "worker.snapshot.taken": "servers have copied their state for a snapshot, and the next round was not begun",
    "worker.save.asked": "servers were asked to save the job's state, and may not have written it",
    "worker.save.written": "all servers have written what they save, and have what was saved before under the tag, too",
    "worker.save.next_kept": "a server has removed what was saved before under the tag, and others may not",
    "worker.members.join": "before it asks to become a member of a job whose members may change",
    "worker.members.joined": "it is a member, and has no weights yet",
    "worker.members.changed": "the members of the open round have changed, and it has not committed again",
    "worker.members.leave": "before it asks the others to go on without it",
    "server.update.begin": "before it changes weights or optimizer state of a round",
    "server.update.next_chunk": "some of the weights of a round were updated, and others were not",
    "server.update.end": "the update of a round is complete, and nothing says so yet",
    "server.update.next_row_group": "some rows of a round were updated, and other keys were not",
    "server.hash_table.taken": "rows have come into a hash table, and were not updated yet",
    "server.hash_table.updated": "rows of a hash table were updated, and those that go are still there",
    "server.memory.made": "new durable memory is there, and the supervisor does not keep it yet",
    "server.memory.stored": "the supervisor keeps new memory, and the log does not name it yet",
    "server.memory.drop": "nothing refers to some memory any more, and the supervisor still keeps it",
    "server.journal.copied": "values were copied before they are changed, and nothing says so yet",
    "server.journal.recorded": "it is known that some values may be changed, and they were not",
    "server.journal.ranges_copied": "like server.journal.copied, for an update that is not like the one before it",
    "server.journal.rows_copied": "like server.journal.copied, for rows",
    "server.commit.begin": "a request was handled, and its outcome is not in the log yet",
    "server.log.unpublished": "a record was written, and does not count yet",
    "server.commit.logged": "the outcome of a request is in the log, and nothing was answered",
    "server.compact.written": "a shorter log is complete, and the supervisor does not keep it yet",
    "server.compact.stored": "the supervisor keeps the shorter log, and the longer one, too",
    "server.compact.removed": "the longer log was removed, and memory that nothing needs was not",
    "server.recovery.undone": "after a restart, some of what was being changed is as it was before",
    "server.recovery.declared": "after a restart, some of the tables are there again",
    "server.recovery.applied": "after a restart, the state of a namespace is there again",
    "server.recovery.remove": "after a restart, the new log counts, and what it does not need was not removed",
    "server.snapshot.cut": "the state was copied for a snapshot, and nothing is on the disk",
    "server.snapshot.tensors": "the tensors of a snapshot are on the disk under a temporary name, and no manifest",
    "server.snapshot.written": "a snapshot is on the disk under a temporary name",
    "server.snapshot.renamed": "a snapshot has its name, and older ones were not removed",
    "server.snapshot.prune": "an old snapshot was renamed, and is not removed yet",
    "server.snapshot.load": "before it reads a snapshot to go back to",
    "server.snapshot.restored": "it has gone back to a snapshot, and has not said so",
}
"""Name → when a process gets there; those of workers begin with "worker.", those of servers with "server."."""

PAUSE = 0.1
"""Seconds that the action "sleep" takes."""

_ENTRY = re.compile(
    r"(?P<name>[a-z_.]+)(?:@(?P<index>[0-9]{1,6}))?(?::(?P<nth>[0-9]{1,9}))?(?:=(?P<action>[a-z]+))?"
)


@dataclass(frozen=True)
class ArmedFailpoint:
    """One armed point.

    Attributes:
        index: The rank of the worker, or the index of the server; None for every process that gets there.
        nth: Which time it fires, from 1.
        action: One of ACTIONS.
    """

    name: str
    index: int | None = None
    nth: int = 1
    action: str = "kill"

    def __str__(self) -> str:
        place = "" if self.index is None else f"@{self.index}"
        return f"{self.name}{place}:{self.nth}={self.action}"


def parse_failpoints(text: str) -> list[ArmedFailpoint]:
    """Return the entries of KVSTORE_FAILPOINT. Raises ConfigurationError, with all names for one that is unknown."""
    return [_parse_failpoint(one.strip()) for one in text.split(",") if one.strip()]


def _parse_failpoint(text: str) -> ArmedFailpoint:
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"{FAILPOINT}: {text!r:.80} is not of the form NAME[@INDEX][:N][=ACTION], as in "
            "worker.round.committed@1:7=stop"
        )
    name, index, nth, action = (
        match["name"],
        match["index"],
        int(match["nth"] or 1),
        match["action"] or "kill",
    )
    if name not in POINTS:
        raise ConfigurationError(
            f"{FAILPOINT}: there is no point {name!r}{did_you_mean(name, POINTS)} Names are {', '.join(sorted(POINTS))}"
        )
    if action not in ACTIONS:
        raise ConfigurationError(
            f"{FAILPOINT}: {text!r:.80} has an unknown action; choose one of {', '.join(sorted(ACTIONS))}"
        )
    if nth < 1:
        raise ConfigurationError(f"{FAILPOINT}: {text!r:.80} counts from 1")
    return ArmedFailpoint(name, None if index is None else int(index), nth, action)


class Failpoints:
    """The armed points of one process, and how often it has reached each.

    Args:
        entries: What is armed in this process.
        once: Where each entry that fires leaves a file; one whose file is there does not fire. None: no such place.
    """

    def __init__(self, entries: list[ArmedFailpoint], once: Path | None = None) -> None:
        self._entries = entries
        self._once = once
        self._reached: Counter[str] = Counter()

    def reach(self, name: str) -> None:
        """Count that a point was reached, and do what its entries say, in their order."""
        self._reached[name] += 1
        for entry in self._entries:
            if entry.name == name and entry.nth == self._reached[name] and self._may_fire(entry):
                ACTIONS[entry.action](name)

    def _may_fire(self, entry: ArmedFailpoint) -> bool:
        if self._once is None:
            return True
        try:
            with open(self._once / str(entry), "x", encoding="ascii") as file:
                file.write(f"{os.getpid()}\n")
        except FileExistsError:
            return False
        return True


def _kill_at_failpoint(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_at_failpoint(name: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep_at_failpoint(name: str) -> None:
    time.sleep(PAUSE)


def _raise_at_failpoint(name: str) -> None:
    raise KVStoreError(f"the failpoint {name} was reached, and {FAILPOINT} says that it raises")


ACTIONS = {
    "kill": _kill_at_failpoint,
    "stop": _stop_at_failpoint,
    "sleep": _sleep_at_failpoint,
    "raise": _raise_at_failpoint,
}
"""SIGKILL or SIGSTOP to this process; a pause of PAUSE seconds, in which sockets send what they have; an error."""

_armed: Failpoints | None = None
_armed_by: tuple[str, str, str, int] | None = None
"""What `_armed` was made from, so that a second store of a process goes on counting."""


def arm_failpoints(environ: Mapping[str, str], role: str, index: int) -> None:
    """Arm the points of this process as the environment says; called where a server or a worker starts.

    Args:
        role: "worker" or "server".
        index: Its rank, or the server's index.

    Raises:
        ConfigurationError: KVSTORE_FAILPOINT names an unknown point or action, or KVSTORE_FAILPOINT_DIR no directory.
    """
    global _armed, _armed_by
    text, folder = environ.get(FAILPOINT, "").strip(), environ.get(FAILPOINT_DIR, "").strip()
    made_from = (text, folder, role, index)
    if made_from == _armed_by:
        return
    if folder and not Path(folder).is_dir():
        raise ConfigurationError(f"{FAILPOINT_DIR}: {folder!r} is not a directory")
    own = [
        one
        for one in parse_failpoints(text)
        if one.name.startswith(f"{role}.") and one.index in (None, index)
    ]
    _armed = Failpoints(own, Path(folder) if folder else None) if own else None
    _armed_by = made_from


def failpoint(name: str) -> None:
    """Do what KVSTORE_FAILPOINT says about this point. Without the variable this takes some ten nanoseconds."""
    if _armed is not None:
        _armed.reach(name)
