"""A worker that is also a rank of torch.distributed: checkpoints of a Trainer, from all ranks into one folder."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.support.jobs import deliver, own_place
from tests.support.workers.states_matrix import Net, train, trainer_of, weights


def run(base: Path, kind: str, by_name: bool) -> dict[str, Any]:
    folder = base / f"{kind}-{by_name}"
    net = Net()
    with trainer_of(net, kind, "dist") as trainer:
        train(net, trainer, 0, 2)
        trainer.zero_grad()
        states = get_optimizer_state_dict(net, trainer) if by_name else trainer.state_dict()
        save({"net": net.state_dict(), "trainer": states}, checkpoint_id=folder)
        train(net, trainer, 2, 2)
    again = Net()
    with trainer_of(again, kind, "dist") as other:
        content: dict[str, Any] = {"net": again.state_dict()}
        content["trainer"] = get_optimizer_state_dict(again, other) if by_name else other.state_dict()
        load(content, checkpoint_id=folder)
        if by_name:
            set_optimizer_state_dict(again, other, content["trainer"])
        else:
            other.load_state_dict(content["trainer"])
        train(again, other, 2, 2)
    return {"uninterrupted": weights(net), "resumed": weights(again)}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    rank, workers = own_place()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own use of what it has deprecated
        dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=workers)
        runs = {
            f"{kind} {by_name}": run(place, kind, by_name)
            for kind in ("adam", "lamb")
            for by_name in (False, True)
        }
        dist.destroy_process_group()
    deliver(runs)
