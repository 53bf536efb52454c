"""A rank of a torch.distributed group over gloo that trains with clipped gradients, and with a third-party store."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.clipped_training import CASES, parameters, train
from tests.support.jobs import deliver, own_place
from tests.support.limits import LIMIT
from tests.support.workers.allreduce import AllReduce

RANK, SIZE = own_place()


def main() -> None:
    timeout = datetime.timedelta(seconds=LIMIT)
    meeting = Path(sys.argv[1]) / "meeting"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=RANK, world_size=SIZE, timeout=timeout
    )
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        for dtype in (torch.float64, torch.float32):
            for in_store in (None, True, False):
                found[f"{in_store} {name} {dtype}"] = train(
                    case, [parameters(dtype)], [RANK], kvstore="device", update_on_kvstore=in_store
                )
            found[f"plug-in {name} {dtype}"] = train(case, [parameters(dtype)], [RANK], kvstore=AllReduce())
    dist.barrier()
    dist.destroy_process_group()
    deliver(found)


if __name__ == "__main__":
    main()
