"""Many schedules of the simulation of recovery, on several CPUs.

    python -m tests.sim.many [SCHEDULES [FIRST]]

Prints how often what happened in them, and how long they took. If some fail, it prints their seeds and the shortest
part of the first one's schedule that fails, and ends with 1.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from typing import NamedTuple

import torch

from tests.sim.recovery import CASES, play, shortest, undisturbed
from tests.sim.workers import tiny_slices

BLOCK = 50


class Played(NamedTuple):
    """What came of some schedules: how often what happened, and (seed, error) of those that failed."""

    seen: Counter[str]
    failed: list[tuple[int, str]]


def play_all(seeds: range) -> Played:
    seen, failed = Counter[str](), list[tuple[int, str]]()
    for seed in seeds:
        try:
            seen += play(seed)
        except Exception as error:
            failed.append((seed, f"{type(error).__name__}: {error}"))
    return Played(seen, failed)


def report(failed: list[tuple[int, str]]) -> str:
    """Return which schedules have failed, and the shortest part of the first one that does."""
    lines = [f"seed {seed}: {error}" for seed, error in failed]
    lines += [f"The shortest part of seed {failed[0][0]} that fails:", *map(str, shortest(failed[0][0]))]
    return "\n".join(lines)


def main(schedules: int = 10_000, first: int = 0) -> int:
    # 1. What the processes share: the jobs in which nothing happens. One thread each.
    torch.set_num_threads(1)
    with tiny_slices():
        for case in CASES:
            undisturbed(case)
    # 2. All schedules, in blocks.
    began, end = time.monotonic(), first + schedules
    blocks = [range(at, min(at + BLOCK, end)) for at in range(first, end, BLOCK)]
    seen, failed = Counter[str](), list[tuple[int, str]]()
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for played in pool.imap_unordered(play_all, blocks):
            seen += played.seen
            failed += played.failed
    # 3. What has happened.
    print(f"{schedules} schedules in {time.monotonic() - began:.0f} s")
    for what, count in sorted(seen.items()):
        print(f"{count:8d} {what}")
    if failed:
        print(report(sorted(failed)))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
