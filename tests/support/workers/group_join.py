"""A rank of a torch.distributed group over gloo that has its own number of batches."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kvtrainer import Trainer
from tests.support.jobs import deliver, own_place
from tests.support.limits import LIMIT

RANK, SIZE = own_place()
TOUCHED = (1, 3)


def uneven(in_store: bool) -> list[float]:
    """Rank r takes 2·r steps, then all take one; momentum and a rate that the last ones change by themselves."""
    weight = nn.Parameter(torch.zeros(3))
    options = {"learning_rate": 1.0, "momentum": 0.5}
    trainer = Trainer([weight], "sgd", options, update_on_kvstore=in_store)
    with trainer.join():
        for at in range(2 * RANK):
            if at == 2:
                trainer.set_learning_rate(0.25)
            (weight * (RANK + 1.0)).sum().backward()
            trainer.step(1)
    (weight * (RANK + 1.0)).sum().backward()
    trainer.step(1)
    return [*weight.unique().tolist(), trainer.learning_rate]


def uneven_rows() -> list[float]:
    """As `uneven`, with gradients of some rows, and without momentum."""
    net = nn.Embedding(5, 2, sparse=True)
    nn.init.zeros_(net.weight)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0}, update_on_kvstore=False)
    with trainer.join():
        for _ in range(RANK + 1):
            (net(torch.tensor(TOUCHED)) * (RANK + 1.0)).sum().backward()
            trainer.step(1)
    return net.weight[:, 0].tolist()


def main() -> None:
    timeout = datetime.timedelta(seconds=LIMIT)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(sys.argv[1]) / 'meeting'}",
        rank=RANK,
        world_size=SIZE,
        timeout=timeout,
    )
    found: dict[str, Any] = {f"uneven {site}": uneven(site) for site in (True, False)}
    found["rows"] = uneven_rows()
    dist.barrier()
    dist.destroy_process_group()
    deliver(found)


if __name__ == "__main__":
    main()
