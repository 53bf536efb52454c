"""Which flights will be late? Learned from a stream, with tables without a number of rows.

    kvlaunch -n 2 -s 2 -- python examples/stream.py
    python examples/stream.py                             # one process, no servers

Flights come in the order of their departures. Each batch is predicted before it is trained on, so every flight is
test data. Features of a flight are hashed to ids of 64 bits (stream_data.py); many have the day in them, and never come
again. Three tables have no number of rows, and different rules for rows that come and go. Two have a fixed number of
rows, and take the ids modulo that number. At the end rank 0 checks that the rows are those which the rules leave, and
compares the predictions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import common
import stream_data as data
import torch
from flights_data import auc
from torch import Tensor, nn

import kvtrainer

WIDTH, SCALE, BATCH, EVERY = 8, 0.01, 256, 20
"""Elements of a row, the deviation of their initial values, flights in a step, and steps between counts of rows."""
EPSILON = 1e-2  # so large that a tiny first gradient of a row does not move it by a whole learning rate
EXPIRE = 100  # steps without a gradient after which a row goes; a month has 107
RULES: dict[str, dict[str, int]] = {
    "keep": {},
    "expire": {"expire_after": EXPIRE},
    "admit": {"expire_after": EXPIRE, "admit_after": 2},
}
"""Options of the tables without a number of rows."""
FIXED = {"fixed_40000": 40_000, "fixed_20000": 20_000, "fixed_2000": 2_000}
"""Rows of the others: of about as many bytes and as many rows as "admit" ends with, and a tenth of these."""


class Delays(nn.Module):
    """A small network on the sum of a flight's rows; it takes ids modulo `rows`, or as they are if that is 0."""

    def __init__(self, table: nn.Module, rows: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.rows = table, rows
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.layers(self.table(ids % self.rows if self.rows else ids))
        return logits.squeeze(1)


def build() -> nn.ModuleDict:
    """A network for each table."""
    nets = nn.ModuleDict()
    for name, rules in RULES.items():
        nets[name] = Delays(kvtrainer.EmbeddingBag(WIDTH, mode="sum", scale=SCALE, **rules))
    for name, rows in FIXED.items():
        nets[name] = Delays(nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True), rows)
        nn.init.normal_(nets[name].table.weight, std=SCALE)
    return nets


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = common.parser(__doc__)
    parser.add_argument("--flights", type=int, default=400_000, help="use so many; there are 327,346")
    options = parser.parse_args(argv)
    if options.kvstore in ("dist_async", "dist_ssp"):
        parser.error(
            f"with {options.kvstore} each worker's step is a round, so rows cannot be counted; use dist_sync"
        )
    ids, late = data.load(options.flights)
    kv, nets = kvtrainer.kvstore.create(options.kvstore), build()
    trainer = kvtrainer.Trainer(nets, "adagrad", {"learning_rate": 0.1, "epsilon": EPSILON}, kvstore=kv)
    batches, scores, seen = torch.arange(len(ids)).split(BATCH), torch.zeros(len(nets), len(ids)), []
    began = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        mine = batch[kv.rank :: kv.num_workers]
        logits = torch.stack([net(ids[mine]) for net in nets.values()])
        scores[:, mine] = logits.detach()
        wanted = late[mine].expand_as(logits)
        nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="sum").backward()
        trainer.step(len(batch))
        if kv.rank == 0 and (step % EVERY == 0 or step == len(batches)):
            seen.append((step, [nets[name].table.stats()["rows"] for name in RULES]))
            print(f"step {step:4} of {len(batches)}  rows {seen[-1][1]}")
    seconds = time.perf_counter() - began
    kv.init("scores", torch.zeros_like(scores))
    kv.pushpull("scores", scores)  # the sum over workers, each of which has zeros for the flights of others
    if kv.rank == 0:
        print(f"{len(ids) / seconds:.0f} flights/s")
        pairs = zip(nets.items(), scores, strict=True)
        tables = {name: judge(name, net.table, own, late) for (name, net), own in pairs}
        common.save(options.out, rows=seen, batch=BATCH, tables=tables)
        gradients = data.gradients_of(ids, batches, kv.num_workers)
        expected = [data.count_rows(gradients, **rules) for rules in RULES.values()]
        if seen[-1][1] != expected:
            sys.exit(f"the tables have {seen[-1][1]} rows, but the rules leave {expected}")
        print("all checks passed")
    kv.barrier()
    trainer.close()
    kv.close()


def judge(name: str, table: Any, scores: Tensor, late: Tensor) -> dict[str, Any]:
    """Return the bytes of a table with its state, and the AUC of all flights, the later half, and each twelfth."""
    nbytes = table.stats()["nbytes"] if name in RULES else 2 * table.weight.nbytes
    half, twelfths = len(late) // 2, zip(scores.chunk(12), late.chunk(12), strict=True)
    whole, later = auc(scores, late), auc(scores[half:], late[half:])
    print(f"{name:11}  {nbytes / 1e6:5.2f} MB  AUC {whole:.4f}, in the second half {later:.4f}")
    return {"nbytes": nbytes, "auc": whole, "later": later, "twelfths": [auc(*part) for part in twelfths]}


if __name__ == "__main__":
    main()
