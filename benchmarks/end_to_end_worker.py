"""One worker of training loops, on any of the systems; started by `end_to_end.py`."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from models import LEARNING_RATE, MODELS, WARM_UP, loss_of, weights_of
from step_worker import import_what_steps_need
from steps import mark_base, time_rounds
from torch import nn


@dataclass(frozen=True)
class Training:
    """A worker's network as its loop calls it, and what the loop does around it."""

    network: nn.Module
    zero_grad: Callable[[], None]
    step: Callable[[], object]


def start_kvtrainer(network: nn.Module, store: Any) -> Training:
    """`Trainer.step` over `dist_sync`, with torch's Adam on the servers; or over `device`, with it on every rank."""
    kvtrainer = importlib.import_module("kvtrainer")
    trainer = kvtrainer.Trainer(network, torch.optim.Adam, {"lr": LEARNING_RATE}, kvstore=store)
    size = getattr(store, "num_workers", 0) or dist.get_world_size()
    return Training(network, trainer.zero_grad, functools.partial(trainer.step, size))


def start_ddp(network: nn.Module, store: None) -> Training:
    """DistributedDataParallel in its best configuration, and torch's fused Adam."""
    wrapped = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True, static_graph=True)
    return replace(start_alone(network, None), network=wrapped)


def start_alone(network: nn.Module, store: None) -> Training:
    """As many processes, each of which trains by itself with torch's fused Adam."""
    updater = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, fused=True)
    return Training(network, updater.zero_grad, updater.step)


START: dict[str, tuple[Callable[[nn.Module, Any], Training], str | None]] = {
    "kvtrainer": (start_kvtrainer, "dist_sync"),
    "device": (start_kvtrainer, "device"),
    "ddp": (start_ddp, None),
    "alone": (start_alone, None),
}
"""How to begin, and with which kvstore."""


def main() -> None:
    """Train all models; rank 0 writes the seconds of every step, and the weights to WEIGHTS.0.npy, WEIGHTS.1.npy ..."""
    options = _options()
    torch.set_num_threads(1)
    import_what_steps_need()
    start, store = START[options.system]
    made: Any = store
    if store == "dist_sync":
        made = importlib.import_module("kvtrainer").kvstore.create(store)
        rank, barrier = made.rank, made.barrier
    else:
        dist.init_process_group("gloo")
        rank, barrier = dist.get_rank(), dist.barrier
    measured = {}
    for at, name in enumerate(options.models.split(",")):
        model, marks = MODELS[name], "" if rank else f"{options.out}.{at}"
        batches = model.batches(rank)
        mark_base(marks, barrier)
        training = start(model.network(), made)
        measured[name] = _train(training, batches, barrier, options.rounds, marks)
        if rank == 0:
            np.save(f"{options.weights}.{at}.npy", weights_of(training.network).numpy())
        del training  # what follows has its memory
        barrier()
    if rank == 0:
        Path(options.out).write_text(json.dumps(measured))
    barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
        os._exit(0)  # a thread of gloo that still holds an object of Python could abort the ordinary end


def _train(
    training: Training, batches: list[Any], barrier: Callable[[], object], rounds: int, marks: str
) -> dict[str, Any]:
    def prepare(number: int) -> Any:
        if number == WARM_UP:
            barrier()  # steps wait for no other but by what they exchange
        return batches[number % len(batches)]

    def step(batch: Any) -> None:
        training.zero_grad()
        loss_of(training.network, batch).backward()
        training.step()

    measured = time_rounds(prepare, step, lambda: None, WARM_UP, rounds, marks)
    barrier()
    return measured


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=START, required=True)
    parser.add_argument("--models", required=True, help="commas between them")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    parser.add_argument("--weights", required=True, help="stem of the files for the weights of rank 0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
