"""Facts about a running server, for people: who is there, who is late, what waits for whom, how much was done.

Whoever reaches a server may ask for them, in no session; nothing in them lets anybody speak for a worker. They are
plain values, bounded in size, and made at most a few times a second, so that looking costs the job next to nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from kvstore_server.errors import KVStoreError, ProtocolError, describe
from kvstore_server.membership import Membership, Session
from kvstore_server.protocol.frames import unpack_control
from kvstore_server.rounds import Book

FRESH = 0.2
"""Seconds for which facts are told again as they were."""
MOST_JOBS, MOST_WORKERS, MOST_WAITS = 16, 1024, 8
"""Of how many namespaces, workers of each and waits of each facts tell."""
_ERRORS_KEPT, _ERROR_LENGTH = 8, 500
_REPORT_BYTES, _REPORT_NUMBERS = 1024, 16


class Progress:
    """What the rounds of a namespace have come to, and how long each rank had the others wait."""

    def __init__(self) -> None:
        self.rounds = 0
        """How many have ended, those that end together as one."""
        self.waited = 0.0
        """Seconds between the first and the last commit of each, summed."""
        self.late: dict[int, float] = {}
        """Rank → seconds that it committed after the first one, summed."""
        self.errors: deque[tuple[int, str]] = deque(maxlen=_ERRORS_KEPT)
        """(rounds that had ended, text) of those that failed last."""

    def end(self, book: Book, table: int, now: float) -> None:
        """Count rounds that end together, of which one is that of this table, before the book forgets them."""
        self.rounds += 1
        since = {rank: said.since for rank, given in book.given.items() if (said := given.said[table])}
        if len(since) < 2:
            return
        first = min(since.values())
        self.waited += now - first
        for rank, at in since.items():
            self.late[rank] = self.late.get(rank, 0.0) + at - first

    def fail(self, error: KVStoreError) -> None:
        """Keep the error of a round that failed, once for all that fail alike."""
        text = describe(error)[:_ERROR_LENGTH]
        if not self.errors or self.errors[-1][1] != text:
            self.errors.append((self.rounds, text))


def read_report(packed: bytes) -> Mapping[str, float]:
    """Return the numbers that a worker tells about itself, by name.

    Raises:
        ProtocolError: they are not a few finite numbers with short names.
    """
    found = unpack_control(packed) if len(packed) <= _REPORT_BYTES else None
    if (
        not isinstance(found, dict)
        or len(found) > _REPORT_NUMBERS
        or not all(isinstance(name, str) and type(number) in (int, float) for name, number in found.items())
        or not all(math.isfinite(number) and abs(number) < 2**63 for number in found.values())
    ):
        raise ProtocolError(
            f"a worker tells about itself by at most {_REPORT_NUMBERS} finite numbers in {_REPORT_BYTES} bytes"
        )
    return found


def workers_of(
    members: Membership, progress: Progress, rounds: Mapping[int, int], joined: Iterable[int], now: float
) -> list[dict[str, Any]]:
    """Describe the first ranks of a namespace.

    Args:
        rounds: rank → its round, where ranks have rounds of their own.
        joined: the ranks that have no more data.
    """
    resting = set(joined)
    told = []
    for rank in range(min(members.num_workers, MOST_WORKERS)):
        member: Session | None = members.members.get(rank)
        state = "here" if member is not None else "absent"
        if rank in members.departed:
            state = "failed" if rank in members.failed else "left"
        told.append(
            {
                "rank": rank,
                "state": state,
                "why": members.departed.get(rank, "")[:_ERROR_LENGTH],
                "address": "" if member is None else member.hello.address,
                "silence": -1.0 if member is None else now - member.last_heard,
                "late": progress.late.get(rank, 0.0),
                "joined": rank in resting,
                "round": rounds.get(rank, -1),
                "says": {} if member is None else dict(member.report),
            }
        )
    return told


def waits_of(pending: Iterable[Any], now: float) -> list[dict[str, Any]]:
    """Describe the oldest of what ranks wait for, each an engine's Pending; only the first thousand are looked at."""
    oldest = sorted(islice(pending, 1000), key=lambda one: one.since)[:MOST_WAITS]
    return [
        {"what": one.what, "seconds": now - one.since, "missing": list(one.missing[:MOST_WORKERS])}
        for one in oldest
    ]
