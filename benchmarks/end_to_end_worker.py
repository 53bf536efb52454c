"""One worker of a training loop, on any of the systems; started by `end_to_end.py`."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from models import LEARNING_RATE, MODELS, WARM_UP, loss_of, weights_of
from step_worker import import_what_steps_need
from steps import mark
from torch import nn


@dataclass(frozen=True)
class Training:
    """A worker's network as its loop calls it, and what the loop does around it."""

    rank: int
    network: nn.Module
    zero_grad: Callable[[], None]
    step: Callable[[], object]
    barrier: Callable[[], object]


Build = Callable[[int], nn.Module]
"""Makes the network of a rank."""


def start_kvtrainer(build: Build) -> Training:
    """`Trainer.step` over `dist_sync`, with torch's Adam on the servers."""
    kvtrainer = importlib.import_module("kvtrainer")
    store = kvtrainer.kvstore.create("dist_sync")
    network = build(store.rank)
    trainer = kvtrainer.Trainer(network, torch.optim.Adam, {"lr": LEARNING_RATE}, kvstore=store)
    return Training(
        store.rank, network, trainer.zero_grad, lambda: trainer.step(store.num_workers), store.barrier
    )


def start_device(build: Build) -> Training:
    """`Trainer.step` over `device`: gradients meet on the ranks, each of which has torch's Adam."""
    dist.init_process_group("gloo")
    kvtrainer = importlib.import_module("kvtrainer")
    network = build(dist.get_rank())
    trainer = kvtrainer.Trainer(network, torch.optim.Adam, {"lr": LEARNING_RATE}, kvstore="device")
    size = dist.get_world_size()
    return Training(dist.get_rank(), network, trainer.zero_grad, lambda: trainer.step(size), dist.barrier)


def start_ddp(build: Build) -> Training:
    """DistributedDataParallel in its best configuration, and torch's fused Adam."""
    alone = start_alone(build)
    wrapped = nn.parallel.DistributedDataParallel(
        alone.network, gradient_as_bucket_view=True, static_graph=True
    )
    return replace(alone, network=wrapped)


def start_alone(build: Build) -> Training:
    """As many processes, each of which trains by itself with torch's fused Adam."""
    dist.init_process_group("gloo")
    network = build(dist.get_rank())
    updater = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, fused=True)
    return Training(dist.get_rank(), network, updater.zero_grad, updater.step, dist.barrier)


START = {"kvtrainer": start_kvtrainer, "device": start_device, "ddp": start_ddp, "alone": start_alone}


def main() -> None:
    """Train; rank 0 writes the seconds of every step, and the weights."""
    options = _options()
    torch.set_num_threads(1)
    model = MODELS[options.model]
    import_what_steps_need()

    def build(rank: int) -> nn.Module:
        _mark(rank, options.out, "base")
        return model.network()

    training = START[options.system](build)
    batches = model.batches(training.rank)
    seconds = []
    for number in range(WARM_UP + options.rounds):
        if number == WARM_UP:
            _mark(training.rank, options.out, "begin")
            training.barrier()
        began = time.perf_counter()
        training.zero_grad()
        loss_of(training.network, batches[number % len(batches)]).backward()
        training.step()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    training.barrier()
    _mark(training.rank, options.out, "end")
    if training.rank == 0:
        np.save(options.weights, weights_of(training.network).numpy())
        measured = {"rounds": seconds, "median": statistics.median(seconds)}
        Path(options.out).write_text(json.dumps({options.model: measured}))
    training.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _mark(rank: int, out: str, name: str) -> None:
    if rank == 0:
        mark(f"{out}.0.{name}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=START, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    parser.add_argument("--weights", required=True, help="file for the weights of rank 0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
