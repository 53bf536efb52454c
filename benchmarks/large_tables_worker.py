"""One worker with a single embedding without a number of rows, for `large_tables.py`: what its rows cost on the wire,
and how a table of many rows grows and is saved.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from steps import Zipf

import kvtrainer

SKEW, SCALE = 1.2, 0.1
GROWN_AT_ONCE = 1 << 16
"""New ids of a step in which the table grows."""


def start(width: int, optimizer: str, **options: Any) -> tuple[kvtrainer.Embedding, kvtrainer.Trainer, Any]:
    """A table in the store of a job."""
    store = kvtrainer.kv.create("dist_sync")
    table = kvtrainer.Embedding(width, scale=SCALE, **options)
    trainer = kvtrainer.Trainer({"t": table}, optimizer, {"learning_rate": 0.05}, kvstore=store)
    return table, trainer, store


def train(
    table: kvtrainer.Embedding, trainer: kvtrainer.Trainer, ids: torch.Tensor, grads: torch.Tensor
) -> float:
    """Make a step; its seconds."""
    began = time.perf_counter()
    table(ids).backward(grads[: len(ids)])
    trainer.step(1)
    seconds = time.perf_counter() - began
    table.weight.grad = None
    return seconds


def measure_wire(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes of rows that servers send and get in a step of a worker, when all popular ids have come."""
    table, trainer, store = start(
        options.width, "adagrad", cache_rows=options.cache_rows, cache_age=options.cache_age
    )
    popular, drawn = Zipf(options.rows, SKEW), np.random.default_rng(store.rank)
    grads = torch.ones(options.ids, options.width)
    seconds, distinct, before = list[float](), 0, (0, 0)
    for number in range(options.warm_up + options.rounds):
        if number == options.warm_up:
            store.barrier()
            before = _bytes(trainer)
            store.barrier()
        ids = torch.from_numpy(popular.draw(drawn, options.ids))
        distinct += len(ids.unique()) * (number >= options.warm_up)
        seconds.append(train(table, trainer, ids, grads))
        with torch.no_grad():
            for _ in range(options.reads):
                table(torch.from_numpy(popular.draw(drawn, options.ids)))
    store.barrier()
    pulled, pushed = (after - first for after, first in zip(_bytes(trainer), before, strict=True))
    steps = options.rounds * store.num_workers
    store.barrier()
    return {
        "rank": store.rank,
        "pulled": pulled / steps,
        "pushed": pushed / steps,
        "distinct": distinct / options.rounds,
        "seconds": statistics.median(seconds[options.warm_up :]),
    }


def _bytes(trainer: kvtrainer.Trainer) -> tuple[int, int]:
    tables = [table for server in trainer.server_stats() for table in server["tables"]]
    return sum(one["bytes_out"] for one in tables), sum(one["bytes_in"] for one in tables)


def measure_growth(options: argparse.Namespace) -> dict[str, Any]:
    """Let a table grow, save it, change one row in a hundred, and save what has changed."""
    table, trainer, store = start(options.width, "adagrad")
    grads = torch.ones(GROWN_AT_ONCE, options.width)
    seconds: list[float] = []
    for first in range(0, options.rows, GROWN_AT_ONCE):
        seconds.append(train(table, trainer, torch.arange(first, first + GROWN_AT_ONCE), grads))
    late = seconds[len(seconds) // 10 :]
    stats = table.stats()
    with tempfile.TemporaryDirectory(dir=options.folder or None) as name:
        folder = Path(name)
        full = _seconds(lambda: trainer.save_states(folder / "full"))
        size = (folder / "full").stat().st_size
        raw = _seconds(lambda: _write_raw(folder / "raw", size))
        for first in range(0, options.rows // 100, GROWN_AT_ONCE):
            ids = torch.arange(first, min(first + GROWN_AT_ONCE, options.rows // 100)) * 97
            train(table, trainer, ids, grads)
        delta = _seconds(lambda: trainer.save_states(folder / "delta", base=folder / "full"))
        changed = (folder / "delta").stat().st_size
    store.barrier()
    return {
        "rank": store.rank,
        "rows": stats["rows"],
        "beyond": stats["nbytes"] / stats["rows"] / (8 * options.width) - 1,
        "seconds": statistics.median(late),
        "longest": max(late),
        "full": full,
        "raw": raw,
        "nbytes": size,
        "delta": delta,
        "share": changed / size,
    }


def _seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _write_raw(path: Path, size: int) -> None:
    block = bytes(1 << 24)
    with path.open("wb") as file:
        for first in range(0, size, len(block)):
            file.write(memoryview(block)[: min(len(block), size - first)])
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    """Measure; rank 0 writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=("wire", "growth"), required=True)
    for name in ("rows", "width", "ids", "warm-up", "rounds", "cache-rows", "cache-age", "reads"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--folder", default="")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    measured = measure_wire(options) if options.what == "wire" else measure_growth(options)
    if measured.pop("rank") == 0:
        Path(options.out).write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
