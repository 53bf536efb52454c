"""A rank of torch.distributed that tries out what stores for such jobs do with every kind of value."""

from __future__ import annotations

import datetime
import gc
import logging
import sys
from dataclasses import astuple

import torch.distributed as dist

from tests.support.capabilities import GROUP, cases, try_out
from tests.support.jobs import deliver, own_place
from tests.support.limits import LIMIT

RANK, SIZE = own_place()


def main() -> None:
    logging.disable(logging.WARNING)
    meeting, timeout = f"file://{sys.argv[1]}/meeting", datetime.timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=meeting, rank=RANK, world_size=SIZE, timeout=timeout)
    outcomes = []
    for case in cases(GROUP):
        outcomes.append(astuple(try_out(case)))
        gc.freeze()  # beside a process group every new Trainer looks at all objects that are not frozen
    dist.barrier()
    dist.destroy_process_group()
    deliver({"outcomes": outcomes})


if __name__ == "__main__":
    main()
