"""How long does an iteration of an embedding without a number of rows take, beside tables of a fixed size?

    python benchmarks/embeddings.py --out benchmarks/results/embeddings

1. One table. Lookup, backward pass and update of 8,192 ids, uniform or by Zipf's law (1.2), of 1 M x 64, on one thread
of one process: `kvtrainer.Embedding` that has all of these rows, `RowSparseParameter`, both with kvstore='local', and
`nn.Embedding(sparse=True)` with torch's own optimizer. They take turns in every iteration. "growth" is an iteration in
which all ids are new, from 1 M to 2 M rows: the median, and the longest beside it. "bytes a row" is what the table
takes beyond weights and optimizer state.

2. "26 tables": whole iterations of a model that guesses clicks, with tables of 16 numbers a row and as many different
ids as the features of Criteo's data have, from 3 to 10 M, drawn by Zipf's law (1.05), a batch of 2,048 samples for
each of 2 workers, and two small layers. kvtrainer with 2 servers looks the tables up as a collection and one by one in
turns, over shared memory and over TCP, also with `Trainer.prefetch`. It is compared with DistributedDataParallel over
gloo, where every worker has all tables as `nn.Embedding(sparse=True)`, up to a million rows each, in which ids are
hashed, and with one process with the batches of both workers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness
import numpy as np
import suite
import torch
from torch import Tensor

import kvtrainer

HERE = Path(__file__).resolve().parent
_TITLE = "Embeddings without a number of rows, beside fixed tables"
_SETTINGS = "one thread in each process; 26 tables: 2 workers, 2 servers"
_HASH, _FIXED, _TORCH = "Embedding", "RowSparseParameter", "torch"
_HEAD = ("optimizer", "ids", "system", "iteration ms", "beside RowSparseParameter", "beside torch")
_LEGEND = """\
Medians of all iterations of a repetition, then the median over repetitions (min to max); ratios are taken within a
repetition, below 1: faster than that. Of "growth": the median, and the longest beside the median. Of "26 tables":
iterations of 2 x 2,048 samples; below 1: faster than the collection over shared memory.
"""
_MANY = "26 tables"
_COLLECTION = "collection"
_JOBS = {
    "": "kvtrainer",
    ", TCP": "kvtrainer",
    ", prefetched": "prefetched",
    ", ddp": "ddp",
    ", 1 process": "local",
}
"""What follows the names of the systems that a job measures → the system of `embeddings_worker`."""
_OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


@dataclass(frozen=True)
class Sample:
    """The median seconds of an iteration; of growth, also the longest, and bytes of a row beyond weights and state."""

    optimizer: str
    ids: str
    system: str
    repetition: int
    seconds: float
    longest: float = 0.0
    beyond: float = 0.0


class System:
    """A table with its optimizer."""

    def __init__(self, name: str, optimizer: str, rows: int, width: int) -> None:
        self.name = name
        self._lookup: Callable[[Tensor], Tensor]
        if name == _TORCH:
            table = torch.nn.Embedding(rows, width, sparse=True)
            self.weight, self._lookup = table.weight, table
            made = _OPTIMIZERS[optimizer](table.parameters(), lr=0.01)
            self._step: Callable[[], object] = made.step
            return
        if name == _FIXED:
            self.weight = kvtrainer.RowSparseParameter((rows, width), torch.nn.init.normal_)
            self._lookup = self.weight.row_sparse_data
        else:
            self.table = kvtrainer.Embedding(width)
            self.weight, self._lookup = self.table.weight, self.table
        trainer = kvtrainer.Trainer({"t": self.weight}, optimizer, {"learning_rate": 0.01}, kvstore="local")
        self._step = lambda: trainer.step(1)

    def iterate(self, ids: Tensor, grads: Tensor) -> float:
        """Look up, go backward and update; the seconds."""
        began = time.perf_counter()
        self._lookup(ids).backward(grads)
        self._step()
        seconds = time.perf_counter() - began
        self.weight.grad = None
        return seconds


def main() -> int:
    """Run all, write what is known after every repetition, print the table; return 0."""
    options = _options()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    samples: list[Sample] = []
    for repetition in range(options.repetitions):
        for optimizer in _OPTIMIZERS:
            samples += _measure(optimizer, repetition, options)
        jobs = list(_JOBS)
        for end in jobs[repetition % len(jobs) :] + jobs[: repetition % len(jobs)]:
            samples += _measure_many(end, repetition, options)
        rows = _rows(samples)
        print("\n".join(rows), flush=True)
        if options.out:
            table = harness.Table(_TITLE, _LEGEND, _HEAD, rows)
            harness.write_table(Path(options.out), table, samples, _SETTINGS)
    return 0


def _measure(optimizer: str, repetition: int, options: argparse.Namespace) -> list[Sample]:
    rows, count, width = options.rows, options.ids, options.width
    systems = [System(name, optimizer, rows, width) for name in (_HASH, _FIXED, _TORCH)]
    grads = torch.randn(count, width, generator=torch.Generator().manual_seed(repetition))
    # 1. All rows come into the table that has none at first.
    for first in range(0, rows, count):
        ids = torch.arange(first, min(first + count, rows))
        systems[0].iterate(ids, grads[: len(ids)])
    # 2. In turns.
    found: list[Sample] = []
    draw = np.random.default_rng(repetition)
    for kind in ("uniform", "zipf"):
        times: dict[str, list[float]] = {one.name: [] for one in systems}
        for at in range(options.iterations + 3):
            drawn = (
                draw.integers(rows, size=count) if kind == "uniform" else (draw.zipf(1.2, count) - 1) % rows
            )
            ids = torch.from_numpy(drawn)
            for one in systems:
                seconds = one.iterate(ids, grads)
                times[one.name] += [seconds] if at >= 3 else []
        found += [
            Sample(optimizer, kind, name, repetition, statistics.median(own)) for name, own in times.items()
        ]
    # 3. Rows that are all new.
    grown = [
        systems[0].iterate(torch.arange(first, first + count), grads)
        for first in range(rows, 2 * rows, count)
    ]
    stats = systems[0].table.stats()
    beyond = stats["nbytes"] / stats["rows"] - 4 * width * (1 + (optimizer == "adagrad"))
    median = statistics.median(grown)
    found.append(Sample(optimizer, "growth", _HASH, repetition, median, max(grown), beyond))
    return found


def _measure_many(end: str, repetition: int, options: argparse.Namespace) -> list[Sample]:
    """Train with 26 tables in fresh processes."""
    system, workers = _JOBS[end], 2
    command = [sys.executable, str(HERE / "embeddings_worker.py"), "--system", system]
    command += ["--batch", str(options.batch), "--workers", str(workers), "--rounds", str(options.rounds)]
    if system == "ddp":
        measured = harness.run_torch_job(command, workers, options.job_timeout)
    elif system == "local":
        measured = harness.run_process(command, options.job_timeout)
    else:
        environ = {"KVSTORE_TRANSPORT": "tcp" if end == ", TCP" else "auto"}
        measured = harness.run_kvtrainer_job(command, workers, 2, options.job_timeout, environ=environ)
    return [
        Sample("adagrad", _MANY, "DDP" if system == "ddp" else way + end, repetition, values["median"])
        for way, values in measured.items()
    ]


def _rows_of_many(samples: list[Sample]) -> list[str]:
    found: dict[str, dict[int, float]] = {}
    for one in samples:
        if one.ids == _MANY:
            found.setdefault(one.system, {})[one.repetition] = one.seconds
    rows = []
    for name in sorted(found, key=lambda name: (name.partition(", ")[2], name)):
        own = found[name]
        ratios = [seconds / found[_COLLECTION][repetition] for repetition, seconds in own.items()]
        cells = ["adagrad", _MANY, name, harness.spread([1000 * one for one in own.values()])]
        cells += [f"{harness.spread(ratios)} beside the collection"]
        cells += [f"{harness.spread([1 / one for one in own.values()])} iterations/s"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _rows(samples: list[Sample]) -> list[str]:
    rows = []
    for optimizer in _OPTIMIZERS:
        for kind in ("uniform", "zipf"):
            of = {
                name: [
                    one.seconds
                    for one in samples
                    if (one.optimizer, one.ids, one.system) == (optimizer, kind, name)
                ]
                for name in (_HASH, _FIXED, _TORCH)
            }
            for name, own in of.items():
                cells = [optimizer, kind, name, harness.spread([1000 * one for one in own])]
                for other in (of[_FIXED], of[_TORCH]):
                    cells.append(harness.spread([a / b for a, b in zip(own, other, strict=True)]))
                rows.append(f"| {' | '.join(cells)} |")
        grown = [one for one in samples if (one.optimizer, one.ids) == (optimizer, "growth")]
        cells = [optimizer, "growth", _HASH, harness.spread([1000 * one.seconds for one in grown])]
        cells.append(f"longest {harness.spread([one.longest / one.seconds for one in grown])} x")
        cells.append(f"{harness.spread([one.beyond for one in grown])} bytes a row")
        rows.append(f"| {' | '.join(cells)} |")
    return rows + _rows_of_many(samples)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=suite.positive, default=1_000_000)
    parser.add_argument("--width", type=suite.positive, default=64)
    parser.add_argument("--ids", type=suite.positive, default=8192)
    parser.add_argument("--iterations", type=suite.positive, default=60)
    parser.add_argument("--repetitions", type=suite.positive, default=3)
    parser.add_argument("--batch", type=suite.positive, default=2048, help="26 tables: samples of a worker")
    parser.add_argument(
        "--rounds", type=suite.positive, default=64, help="26 tables: timed iterations of a job"
    )
    parser.add_argument(
        "--job-timeout", type=float, default=300.0, help="seconds after which a job is killed"
    )
    parser.add_argument("--out", default="", help="write OUT.json and OUT.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
