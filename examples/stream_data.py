"""The flights of flights_data.py as a stream of hashed ids, and how many rows the rules of a table leave of it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from datetime import date
from typing import TypeAlias

import flights_data
import torch
from torch import Tensor


def features(flight: dict[str, str]) -> dict[str, str]:
    """Sixteen features, most of them crosses, that are known before departure; those with the day never come again."""
    day = f"{flight['month']}-{flight['day']}"
    weekday = date(int(flight["year"]), int(flight["month"]), int(flight["day"])).weekday()
    carrier, number, plane = flight["carrier"], flight["carrier"] + flight["flight"], flight["tailnum"]
    origin, to, hour = flight["origin"], flight["dest"], flight["hour"]
    route = f"{carrier} {origin} {to}"
    return {
        "carrier": carrier, "number": number, "plane": plane, "origin": origin, "to": to, "hour": hour,
        "weekday": f"{weekday}", "route": route, "route, hour": f"{route} {hour}",
        "day": day, "day, origin": f"{day} {origin}", "day, to": f"{day} {to}", "day, carrier": f"{day} {carrier}",
        "day, plane": f"{day} {plane}", "day, origin, hour": f"{day} {origin} {hour}",
        "day, origin, hour, carrier": f"{day} {origin} {hour} {carrier}",
    }  # fmt: skip


@functools.cache
def id_of(feature: str) -> int:
    """A hash of 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "little", signed=True)


def load(limit: int) -> tuple[Tensor, Tensor]:
    """Flights in the order in which they should depart: ids int64[n, 16], and whether they were late, float32[n]."""
    when = ("month", "day", "sched_dep_time")
    ordered = sorted(flights_data.flights(), key=lambda flight: [int(flight[name]) for name in when])[:limit]
    ids = [[id_of(f"{name}={value}") for name, value in features(flight).items()] for flight in ordered]
    late = [float(int(flight["arr_delay"]) > flights_data.LATE) for flight in ordered]
    return torch.tensor(ids), torch.tensor(late)


Gradients: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""For each round the numbers of the ids that had gradients, and how many of each: one of a worker at most."""


def gradients_of(ids: Tensor, batches: Sequence[Tensor], workers: int) -> Gradients:
    """Number the distinct ids, and count their gradients in each round."""
    numbers, found = ids.unique(return_inverse=True)[1], []
    for batch in batches:
        of_workers = [numbers[batch[rank::workers]].unique() for rank in range(workers)]
        found.append(torch.cat(of_workers).unique(return_counts=True))
    return found


def count_rows(gradients: Gradients, expire_after: int = 1 << 31, admit_after: int = 1) -> int:
    """Count the rows that these rules leave, without a table."""
    size = 1 + max(int(numbers.max()) for numbers, _ in gradients)
    counts, last = torch.zeros(size, dtype=torch.int64), torch.full((size,), -(1 << 31))
    for now, (numbers, times) in enumerate(gradients):
        counts[numbers[now - last[numbers] > expire_after]] = 0
        counts[numbers] += times
        last[numbers] = now
    return int(((counts >= admit_after) & (len(gradients) - last <= expire_after)).sum())
