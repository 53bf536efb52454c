"""What a measured step is made of, the same for every system: random gradients, the timing loop, marks for the harness.

Needs numpy alone, so it can be imported next to MXNet as well as next to torch. A system is measured by a worker
script that wraps it in a `Store` and calls `run`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

LEARNING_RATE = {"adam": 1e-3, "sgd": 2.0**-10, "momentum": 2.0**-10}
MOMENTUM = 0.9
"""Of "momentum", which is SGD with it."""
_SHIFT, _SHIFTS = 48, 1024
_MARK_LIMIT = 60.0
_PRIME = 7_368_787
"""Neighbours in popularity lie apart."""


@dataclass(frozen=True)
class Work:
    """Steps of `keys` float32 parameters of `floats` elements each, which begin as zeros.

    Where `model` has a name, they are of `sizes` instead.
    """

    keys: int
    floats: int
    optimizer: str = "adam"
    start: str = "step"
    """Timed from the call of step, with gradients assigned before; or from "backward"."""
    warm_up: int = 3
    rounds: int = 10
    model: str = ""
    sizes: tuple[int, ...] = ()

    @property
    def numels(self) -> Sequence[int]:
        """The elements of each parameter."""
        return self.sizes or (self.floats,) * self.keys

    @property
    def nbytes(self) -> int:
        """Of all parameters."""
        return 4 * sum(self.numels)

    @property
    def name(self) -> str:
        size = self.nbytes / 2**20
        whole = f"{size:,.0f} MiB: " if size >= 1 else ""
        since = ", from backward" if self.start == "backward" else ""
        return f"{whole}{self.model or f'{self.keys:,} x {self.floats:,} floats'}{since}"


class Gradients:
    """The gradients of one rank: random, and others in each round.

    Each round looks at another place of one random array, so none is made or copied between timed rounds. Values are
    of few bits, which makes their sum exact in every order.
    """

    def __init__(self, work: Work, rank: int) -> None:
        self._bounds = np.cumsum([0, *work.numels]).tolist()
        count = self._bounds[-1] + _SHIFT * _SHIFTS
        drawn = np.random.Generator(np.random.PCG64(rank)).integers(-512, 512, count, dtype=np.int16)
        self._all: Array = drawn.astype(np.float32) / np.float32(256)

    def flat(self, number: int) -> Array:
        """The gradients of a round, one behind the other."""
        at = number % _SHIFTS * _SHIFT
        return self._all[at : at + self._bounds[-1]]

    def of(self, number: int) -> list[Array]:
        """The gradients of a round by key."""
        flat = self.flat(number)
        return [flat[start:end] for start, end in zip(self._bounds, self._bounds[1:])]  # noqa: B905


class Zipf:
    """Ids of the rows of a table, of which few are frequent, as Zipf's law has it, and lie anywhere in the table."""

    def __init__(self, rows: int, skew: float = 1.05) -> None:
        shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -skew)
        self._rows, self._below = rows, shares / shares[-1]

    def draw(self, drawn: np.random.Generator, count: int) -> NDArray[np.int64]:
        """So many ids, some of them again and again."""
        popularity = np.minimum(np.searchsorted(self._below, drawn.random(count)), self._rows - 1)
        result: NDArray[np.int64] = popularity * _PRIME % self._rows
        return result


class Store(Protocol):
    """One worker's view of the system under measurement. A step applies the mean of all workers' gradients."""

    rank: int
    is_continuous: bool
    """What a step leaves under way goes on in the next one, so workers do not meet between steps."""

    def begin(self, work: Work) -> None:
        """Make parameters of zeros and what updates them."""

    def end(self) -> None:
        """Let them go, so that what follows has their memory."""

    def assign(self, grads: list[Array]) -> None:
        """Put gradients where a step takes them from, in place of a backward pass. Not timed."""

    def forward(self, grads: list[Array]) -> None:
        """Compute a loss that has these gradients. Not timed."""

    def backward(self) -> None:
        """Run the backward pass of that loss."""

    def step(self) -> None:
        """Exchange gradients and update the weights; return when they can be read."""

    def weights(self) -> Array:
        """All parameters, one behind the other."""

    def barrier(self) -> None:
        """Wait for all workers."""


def run(store: Store, options: argparse.Namespace, synchronize: Callable[[], object] = lambda: None) -> None:
    """Measure all work of `options`; rank 0 writes seconds to OUT, and weights to WEIGHTS.0.npy, WEIGHTS.1.npy ...

    `synchronize` waits for the device that the weights are on.
    """
    measured = {}
    for at, fields in enumerate(json.loads(options.works)):
        work = Work(**fields)
        marks = f"{options.out}.{at}" if store.rank == 0 else ""
        measured[str(at)] = _measure(store, work, marks, synchronize)
        if store.rank == 0:
            np.save(f"{options.weights}.{at}.npy", store.weights())
        store.end()
    if store.rank == 0:
        Path(options.out).write_text(json.dumps(measured))
    store.barrier()


def mark(path: str) -> None:
    """Have the harness look at the processes of the job, and wait until it has.

    Raises:
        TimeoutError: there is no harness that looks.
    """
    Path(path).touch()
    deadline = time.monotonic() + _MARK_LIMIT
    while Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody has removed {path} for {_MARK_LIMIT:g} s")
        time.sleep(0.002)


def mark_base(marks: str, barrier: Callable[[], object]) -> None:
    """Have the harness look at the job before its model is made, the same moment for every system.

    All workers are connected and have their gradients by then, and none goes on before the harness has looked: who is
    late would count for less, who is early would have made its model. What was freed is given back to the system.

    Args:
        marks: The stem of the files by which worker 0 asks; "" on others.
        barrier: Waits for all workers.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library may have no such function
        ctypes.CDLL(None).malloc_trim(0)
    barrier()
    if marks:
        mark(f"{marks}.base")
    barrier()


def worker_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what every worker script takes."""
    parser.add_argument("--works", required=True, help="JSON list of the fields of Work")
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    parser.add_argument("--weights", required=True, help="stem of the files for the weights of rank 0")
    return parser


def _measure(store: Store, work: Work, marks: str, synchronize: Callable[[], object]) -> dict[str, Any]:
    grads = Gradients(work, store.rank)
    mark_base(marks, store.barrier)
    store.begin(work)
    from_backward = work.start == "backward"
    prepare = store.forward if from_backward else store.assign

    def step(_: None) -> None:
        if from_backward:
            store.backward()
        store.step()
        synchronize()

    def meet() -> None:
        synchronize()
        if not store.is_continuous:
            store.barrier()

    return time_rounds(lambda number: prepare(grads.of(number)), step, meet, work.warm_up, work.rounds, marks)


def time_rounds(
    prepare: Callable[[int], Any],
    step: Callable[[Any], object],
    barrier: Callable[[], object],
    warm_up: int,
    rounds: int,
    marks: str = "",
) -> dict[str, Any]:
    """Measure the seconds of steps after those that only warm up.

    Args:
        prepare: Called with the number of a round, outside of its time; the step is given what it returns.
        barrier: Called before each step: it waits for all workers.
        marks: The stem of the files by which worker 0 asks the harness what the job has used.
    """
    seconds = []
    for number in range(warm_up + rounds):
        if marks and number == warm_up:
            mark(f"{marks}.begin")
        given = prepare(number)
        barrier()
        began = time.perf_counter()
        step(given)
        if number >= warm_up:
            seconds.append(time.perf_counter() - began)
    barrier()
    if marks:
        mark(f"{marks}.end")
    barrier()  # nobody lets its memory go before the harness has looked
    return {"rounds": seconds, "median": statistics.median(seconds)}
