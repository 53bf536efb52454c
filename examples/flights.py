"""Which flights will be late? A table of embeddings with row-sparse gradients, on workers and parameter servers.

    kvlaunch -n 2 -s 2 -- python examples/flights.py
    kvlaunch -n 2 -s 2 -- python examples/flights.py --table dense     # the whole table travels
    kvlaunch -n 2 -s 2 -- python examples/flights.py --table stored    # it is on the servers alone
    python examples/flights.py                                         # one process, no servers

Twelve facts known before departure are hashed to rows of one table (flights_data.py); a batch touches about 3 % of
them. Each worker reads its own part of the flights. At the end rank 0 prints how well the held-out flights are told
apart, and what went over the wire. With `kvlaunch --restart 3` workers and servers may be killed, and come back.
"""

from __future__ import annotations

import time
from typing import Any

import common
import flights_data as data
import torch
from torch import Tensor, nn

import kvtrainer

WIDTH = 16
EVERY = 20
"""Steps from one line about the loss to the next."""


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
            self.stored = kvtrainer.RowSparseParameter((data.ROWS, WIDTH), self.fill)
            self.look_up = self.stored.row_sparse_data
        else:
            self.look_up = nn.Embedding(data.ROWS, WIDTH, sparse=table == "sparse")
            self.fill(self.look_up.weight)

    @staticmethod
    def fill(weight: Tensor) -> None:
        """Small numbers, because twelve rows are added up."""
        nn.init.normal_(weight, std=0.05)

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.layers(self.look_up(rows).sum(1))
        return logits.squeeze(1)


def traffic(kv: Any, trainer: kvtrainer.Trainer) -> tuple[int, int]:
    """Bytes of payload that all servers have received and sent so far; every worker takes part."""
    kv.barrier()
    tables = [table for server in trainer.server_stats() for table in server["tables"]]
    kv.barrier()
    return sum(table["bytes_in"] for table in tables), sum(table["bytes_out"] for table in tables)


def main() -> None:
    torch.set_num_threads(1)
    parser = common.parser(__doc__)
    parser.add_argument("--table", choices=("sparse", "dense", "stored"), default="sparse", help="see Delays")
    parser.add_argument("--rows", type=int, default=400_000, help="use so many flights; there are 327,346")
    parser.add_argument("--batch", type=int, default=2048, help="flights in a step of all workers together")
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    kv = kvtrainer.kvstore.create(options.kvstore)
    rows, late, held_out_rows, held_out_late = data.load(kv.rank, kv.num_workers, options.rows)
    net = Delays(options.table)
    # Weights are copied, as between hosts, so that what travels is counted.
    trainer = kvtrainer.Trainer(net, "adagrad", {"learning_rate": options.lr}, kvstore=kv, zero_copy=False)
    share = options.batch // kv.num_workers
    # Workers have up to HELD_OUT flights more or less, but must all take the same number of steps.
    steps = (len(rows) - data.HELD_OUT) // share
    batches, began = torch.randperm(len(rows)).split(share), time.perf_counter()
    # A worker that comes back goes on after its last step, with what it had written down then.
    start = trainer.resume()
    known = start.client_state or {"losses": [], "total": 0.0, "first": [0, 0]}
    losses, total, first = known["losses"], known["total"], known["first"]
    for step in range(start.round, steps):
        if step == 1:  # before that the initial weights have travelled
            first = traffic(kv, trainer)
        batch = batches[step]
        loss = nn.functional.binary_cross_entropy_with_logits(net(rows[batch]), late[batch], reduction="sum")
        loss.backward()
        total += loss.item() / share / EVERY
        if (step + 1) % EVERY == 0:
            losses.append(total)
            total = 0.0
            if kv.rank == 0:
                print(f"step {step + 1} of {steps}  loss {losses[-1]:.3f}")
        trainer.client_state = {"losses": losses, "total": total, "first": list(first)}
        trainer.step(share * kv.num_workers)
    seconds = time.perf_counter() - began
    received, sent = ((b - a) // (steps - 1) for a, b in zip(first, traffic(kv, trainer), strict=True))
    if kv.rank == 0:
        with torch.no_grad():
            told_apart = data.auc(net(held_out_rows), held_out_late)
        print(f"AUC of {len(held_out_late)} held-out flights {told_apart:.4f}")
        print(f"{steps * share * kv.num_workers / seconds:.0f} examples/s")
        print(f"payload bytes per step: {received} to the servers, {sent} from them")
        common.save(options.out, auc=told_apart, received=received, sent=sent, every=EVERY, loss=losses)
    kv.barrier()
    trainer.close()
    kv.close()


if __name__ == "__main__":
    main()
