"""The status of jobs that a server reports: workers, and what ranks wait for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from kvstore_server.engine.membership import ERROR_LENGTH, Membership, RankSession
from kvstore_server.errors import ProtocolError
from kvstore_server.protocol.frames import unpack_control

FRESH = 0.2
"""Seconds for which the same status is reported again."""
MAX_JOBS, MAX_WORKERS_SHOWN, MAX_WAITS = 16, 1024, 8
"""The most namespaces, workers of each and waits of each in a status."""
_REPORT_BYTES, _REPORT_NUMBERS = 1024, 16


def read_report(packed: bytes) -> Mapping[str, float]:
    """Return the numbers that a worker reports about itself. Raises ProtocolError unless they are few and finite."""
    found = unpack_control(packed) if len(packed) <= _REPORT_BYTES else None
    if (
        not isinstance(found, dict)
        or len(found) > _REPORT_NUMBERS
        or not all(isinstance(name, str) and type(number) in (int, float) for name, number in found.items())
        or not all(math.isfinite(number) and abs(number) < 2**63 for number in found.values())
    ):
        raise ProtocolError(
            f"a worker reports about itself with at most {_REPORT_NUMBERS} finite numbers in {_REPORT_BYTES} bytes"
        )
    return found


def workers_of(
    members: Membership,
    late: Mapping[int, float],
    left_out: Mapping[int, int],
    rounds: Mapping[int, int],
    joined: Iterable[int],
    now: float,
) -> list[dict[str, Any]]:
    """Describe the first ranks.

    Args:
        late: Rank → seconds that others waited for it.
        left_out: Rank → how many rounds have ended without it.
        rounds: Rank → its round, if they are asynchronous.
    """
    resting = set(joined)
    told = []
    for rank in range(min(members.num_workers, MAX_WORKERS_SHOWN)):
        member: RankSession | None = members.members.get(rank)
        state = "here" if member is not None else "absent"
        why = members.departed.get(rank, "")
        if rank in members.departed:
            state = "failed" if rank in members.failed else "left"
        elif member is not None and member.is_dead(now):
            state, why = "failed", members.describe(rank, now)
        told.append(
            {
                "rank": rank,
                "state": state,
                "why": why[:ERROR_LENGTH],
                "address": "" if member is None else member.hello.address,
                "silence": -1.0 if member is None else now - member.last_heard,
                "late": late.get(rank, 0.0),
                "left_out": left_out.get(rank, 0),
                "joined": rank in resting,
                "round": rounds.get(rank, -1),
                "says": {} if member is None else dict(member.report),
            }
        )
    return told


def waits_of(pending: Iterable[Any], now: float) -> list[dict[str, Any]]:
    """Describe the longest waits among the first thousand, each an engine's `RankWait`."""
    oldest = sorted(islice(pending, 1000), key=lambda one: one.since)[:MAX_WAITS]
    return [
        {"what": one.what, "seconds": now - one.since, "missing": list(one.missing[:MAX_WORKERS_SHOWN])}
        for one in oldest
    ]
