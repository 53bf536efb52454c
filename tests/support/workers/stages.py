"""A rank of a torch.distributed group over gloo that plays the scenarios of the stages, with a plug-in as well."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.kvstore import create
from tests.support.jobs import deliver, own_place
from tests.support.limits import LIMIT
from tests.support.stage_scenarios import DIFFERENT, HALF, NUMBERS, SAME, different, halves_of_a_step
from tests.support.workers.allreduce import AllReduce

RANK, SIZE = own_place()


def over(store: Any) -> Any:
    def make(**options: Any) -> tuple[Any, Trainer]:
        p = Parameter(torch.zeros(2))
        return p, Trainer({"p": p}, "sgd", NUMBERS, store, None, False, **options)

    return make


def main() -> None:
    timeout = datetime.timedelta(seconds=LIMIT)
    meeting = Path(sys.argv[1]) / "meeting"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=RANK, world_size=SIZE, timeout=timeout
    )
    make = over(create("device"))
    found: dict[str, Any] = {name: scenario(make, RANK) for name, scenario in SAME.items()}
    for name, (mine, other, _) in DIFFERENT.items():
        found[name] = different(mine, other)(make, RANK)
    found[HALF] = halves_of_a_step(make, RANK)
    plugged = over(AllReduce())
    found[f"plug-in: {HALF}"] = halves_of_a_step(plugged, RANK)
    for name in ("one bad loss", "gradients by turns"):
        found[f"plug-in: {name}"] = SAME[name](plugged, RANK)
    dist.barrier()
    dist.destroy_process_group()
    deliver(found)


if __name__ == "__main__":
    main()
