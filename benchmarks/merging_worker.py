"""Merges rows with equal ids in one way, on one thread, checks the sums and times them; started by `merging.py`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import usage
from numpy.typing import NDArray
from steps import Zipf
from torch import Tensor

from kvstore_server.optimizer import coalesce_rows

WARM_UP = 5
Ids = NDArray[np.int64]
Merge = Callable[[Ids, Tensor], tuple[Ids, Tensor]]
"""Given ids and a row for each, returns distinct ids and the sum of the rows of each."""


def by_sort(rows: int) -> Merge:
    """What workers and servers do."""

    def merge(ids: Ids, values: Tensor) -> tuple[Ids, Tensor]:
        distinct, sums = coalesce_rows(torch.from_numpy(ids), values, rows)
        return distinct.numpy(), sums

    return merge


def by_table(rows: int) -> Merge:
    """A table that has a place for each row there could be, kept from call to call."""
    last = np.zeros(rows, np.int64)

    def merge(ids: Ids, values: Tensor) -> tuple[Ids, Tensor]:
        at = np.arange(len(ids))
        last[ids] = at
        chosen = last[ids]
        is_chosen = chosen == at
        places = (is_chosen.cumsum() - 1)[chosen]
        distinct = ids[is_chosen]
        return distinct, _summed(places, len(distinct), values)

    return merge


def by_dict(rows: int) -> Merge:
    """Python's own hash table."""

    def merge(ids: Ids, values: Tensor) -> tuple[Ids, Tensor]:
        place: dict[int, int] = {}
        places = np.array([place.setdefault(one, len(place)) for one in ids.tolist()])
        return np.array(list(place)), _summed(places, len(place), values)

    return merge


def copying(rows: int) -> Merge:
    """The limit of all: each row is read and written once."""
    return lambda ids, values: (ids, values.clone())


WAYS = {"sort": by_sort, "table": by_table, "dict": by_dict, "copy": copying}


def _summed(places: Ids, count: int, values: Tensor) -> Tensor:
    return values.new_zeros(count, values.shape[1]).index_add_(0, torch.from_numpy(places), values)


def draw(kind: str, rows: int, count: int, workers: int, seed: int) -> Ids:
    """Ids as a backward pass leaves them; or, of several workers, those of each distinct and in order."""
    drawn = np.random.default_rng(seed)
    given = []
    for _ in range(workers):
        ids = Zipf(rows).draw(drawn, count) if kind == "Zipf" else drawn.integers(0, rows, count)
        given.append(np.unique(ids) if workers > 1 else ids)
    return np.concatenate(given)


def main() -> None:
    """Measure one way for all kinds of ids, and write the seconds of every round to OUT."""
    options = _options()
    torch.set_num_threads(1)
    merge, measured = WAYS[options.way](options.rows), {}
    for kind in ("uniform", "Zipf"):
        for workers in (1, 2):
            seconds, cpu = _measure(merge, kind, workers, options)
            used = usage.measure([os.getpid()])
            measured[f"{kind}, {workers}"] = {
                "median": statistics.median(seconds),
                "rounds": seconds,
                "usage": {"cpu": cpu, "peak_rss": used.peak_rss, "pss": used.pss},
            }
    Path(options.out).write_text(json.dumps(measured))


def _measure(merge: Merge, kind: str, workers: int, options: argparse.Namespace) -> tuple[list[float], float]:
    """The seconds of each round, which has other ids, and those of the CPU in all of them.

    Raises:
        AssertionError: sums are wrong.
    """
    seconds, cpu, drawn = [], 0.0, np.random.default_rng(9)
    usage.forget_peaks([os.getpid()])
    for number in range(WARM_UP + options.rounds):
        ids = draw(kind, options.rows, options.ids, workers, number)
        values = torch.from_numpy(drawn.integers(-8, 9, (len(ids), options.width)).astype(np.float32))
        began, used = time.perf_counter(), time.process_time()
        distinct, sums = merge(ids, values)
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
            cpu += time.process_time() - used
        if options.way != "copy":
            _check(ids, values, distinct, sums)
    return seconds, cpu


def _check(ids: Ids, values: Tensor, distinct: Ids, sums: Tensor) -> None:
    wanted, places = np.unique(ids, return_inverse=True)
    order = np.argsort(distinct)
    np.testing.assert_array_equal(distinct[order], wanted)
    assert torch.equal(sums[torch.from_numpy(order)], _summed(places, len(wanted), values))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    for name in ("rows", "width", "ids", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
