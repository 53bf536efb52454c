"""What a dense round is made of, the same for every system: workloads, the timing loop and the check of the sum.

Needs numpy alone, so it can be imported next to MXNet as well as next to torch. A system is measured by a worker
script that wraps its store in a `Store` and calls `run_worker`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

MIB = 1 << 20
LEARNING_RATE = 0.5
"""A power of two, so that every weight stays an exact float32 and the check can ask for equality."""
_PERIOD = 251


@dataclass(frozen=True)
class Workload:
    """One pushpull call, or one `Trainer.step`: `keys` float32 keys of `floats` elements each."""

    name: str
    keys: int
    floats: int
    warm_up: int
    rounds: int
    is_trainer: bool = False
    """Through a Trainer, which needs an optimizer and a job of its own: MXNet's numbers its keys from 0."""

    @property
    def mebibytes(self) -> float:
        return self.keys * self.floats * 4 / MIB


WORKLOADS = (
    Workload("100 MiB in 1 key", 1, 100 * MIB // 4, warm_up=2, rounds=5),
    Workload("100 MiB in 16 keys", 16, 100 * MIB // 4 // 16, warm_up=2, rounds=5),
    Workload("1,000 keys of 100 floats", 1000, 100, warm_up=3, rounds=12),
    Workload("1,000 keys of 1,000 floats", 1000, 1000, warm_up=3, rounds=12),
    Workload("Trainer.step, 1,000 parameters of 100 floats", 1000, 100, 3, 12, is_trainer=True),
    Workload("Trainer.step, 1,000 parameters of 1,000 floats", 1000, 1000, 3, 12, is_trainer=True),
)


class Store(Protocol):
    """One worker's view of the system under measurement: of its kvstore, or of a Trainer over that."""

    rank: int
    num_workers: int

    def set_sgd(self, learning_rate: float) -> None:
        """Let the servers apply plain SGD from now on."""

    def init(self, keys: list[int], floats: int) -> None:
        """Create keys of `floats` zeros each, which every later call concerns."""

    def write(self, values: list[Array]) -> None:
        """Put new values where a round takes them from, as a backward pass does with gradients."""

    def round(self) -> None:
        """One pushpull of all keys, or one step; returns when the results can be read."""

    def result(self, at: int) -> Array:
        """What the last round brought for the key at position `at`."""

    def barrier(self) -> None:
        """Wait for all workers."""


def run_worker(store: Store, options: argparse.Namespace) -> None:
    """Measure the workloads of `options`; rank 0 writes the seconds of every round to `options.out` as JSON.

    Raises:
        ValueError: a result is not exactly the sum (or SGD step) that it must be.
    """
    if options.optimizer == "sgd":
        store.set_sgd(LEARNING_RATE)
        store.barrier()
    measured: dict[str, Any] = {}
    first_key = 0
    for workload in pick(options.workloads):
        keys = list(range(first_key, first_key + workload.keys))
        first_key += workload.keys
        began = time.perf_counter()
        store.init(keys, workload.floats)
        store.barrier()
        setup = time.perf_counter() - began
        seconds = _time_rounds(
            store, workload, [_pattern(key, workload.floats, store.rank + 1) for key in keys]
        )
        _check(store, workload, keys, options.optimizer)
        measured[workload.name] = {"init": setup, "rounds": seconds, "median": statistics.median(seconds)}
    if store.rank == 0:
        Path(options.out).write_text(json.dumps(measured))
    store.barrier()


def worker_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what every worker script takes."""
    parser.add_argument("--optimizer", choices=("none", "sgd"), default="none")
    parser.add_argument(
        "--workloads", default="", help="positions in WORKLOADS, comma-separated; all by default"
    )
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    return parser


def pick(positions: str) -> Sequence[Workload]:
    """The workloads at comma-separated positions; all for an empty string."""
    return [WORKLOADS[int(one)] for one in positions.split(",")] if positions else WORKLOADS


def needs_trainer(positions: str) -> bool:
    """Whether a job of these workloads goes through a Trainer; `split_into_jobs` never mixes the two."""
    return any(workload.is_trainer for workload in pick(positions))


def split_into_jobs(positions: str, optimizer: str) -> list[str]:
    """The positions that share a job: all kvstore workloads; then each Trainer workload, if an optimizer runs."""
    picked = [(str(WORKLOADS.index(one)), one.is_trainer) for one in pick(positions)]
    shared = ",".join(at for at, is_trainer in picked if not is_trainer)
    alone = [at for at, is_trainer in picked if is_trainer and optimizer != "none"]
    return [shared, *alone] if shared else alone


def _time_rounds(store: Store, workload: Workload, values: list[Array]) -> list[float]:
    """Seconds from a barrier to the readable result, for each round after the warm-up."""
    seconds = []
    for number in range(workload.warm_up + workload.rounds):
        # MXNet's dist pushpull leaves the result in the pushed array too, so each round gets fresh values.
        store.write(values)
        store.barrier()
        began = time.perf_counter()
        store.round()
        if number >= workload.warm_up:
            seconds.append(time.perf_counter() - began)
    return seconds


def _pattern(key: int, floats: int, factor: float) -> Array:
    return (np.arange(floats, dtype=np.int32) + 7 * key).__mod__(_PERIOD).astype(np.float32) * np.float32(
        factor
    )


def _check(store: Store, workload: Workload, keys: list[int], optimizer: str) -> None:
    factor = store.num_workers * (store.num_workers + 1) / 2
    if optimizer == "sgd":
        factor *= -LEARNING_RATE * (workload.warm_up + workload.rounds)
    for at, key in enumerate(keys):
        if not np.array_equal(store.result(at), _pattern(key, workload.floats, factor)):
            raise ValueError(f"key {key} of {workload.name!r} does not hold {factor:g} times its pattern")
