"""One worker of a job with slow ones, on any of the systems; started by `straggler.py`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from step_worker import Gloo, import_what_steps_need
from steps import LEARNING_RATE, Array, Gradients, Work, mark
from torch.nn import Parameter

WORK = Work(16, 1 << 14, "sgd")
"""1 MiB; SGD's sums of these gradients are exact, in whatever order servers make them."""
SLOWER = {"constant": 4.0, "random": 10.0}
"""How many times longer a slow step computes: one worker's steps, or a few steps of each."""
_SHARE = 0.05
STORES = ("dist_sync", "dist_ssp", "dist_async", "gloo", "alone")


@dataclass(frozen=True)
class Training:
    """A worker, as its loop calls it."""

    rank: int
    step: Callable[[list[Array]], object]
    is_over: Callable[[bool], bool]
    """Whether the loop ends, by what this worker wants."""
    join: Callable[[], AbstractContextManager[None]]
    weights: Callable[[], Array]
    barrier: Callable[[], object]


def start_kvtrainer(name: str, staleness: int) -> Training:
    """A Trainer over one of the stores; workers end when they like, and join the others until those have, too."""
    kvtrainer = importlib.import_module("kvtrainer")
    store = kvtrainer.kvstore.create(name, **({"staleness": staleness} if name == "dist_ssp" else {}))
    parameters = [Parameter(torch.zeros(WORK.floats)) for _ in range(WORK.keys)]
    rate = {"learning_rate": LEARNING_RATE[WORK.optimizer]}
    trainer = kvtrainer.Trainer(parameters, WORK.optimizer, rate, kvstore=store)

    def step(grads: list[Array]) -> None:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = torch.from_numpy(grad)
        trainer.step(store.num_workers)

    def weights() -> Array:
        latest = trainer.pull_weights()
        result: Array = torch.cat([latest.get(one, one).detach() for one in parameters]).numpy()
        return result

    return Training(store.rank, step, bool, trainer.join, weights, store.barrier)


def start_gloo(exchanges: bool) -> Training:
    """All-reduce, and a word in each step whether it is the last; or steps that exchange nothing."""
    group = Gloo(-1)
    group.begin(WORK)

    def step(grads: list[Array]) -> None:
        group.assign(grads)
        group.step()

    def is_over(wanted: bool) -> bool:
        votes = torch.tensor([float(wanted)])
        dist.all_reduce(votes)
        return bool(votes.item() > 0)

    def nothing(*_: object) -> None:
        """Take no step."""

    rounds = (step, is_over) if exchanges else (nothing, bool)
    return Training(group.rank, *rounds, contextlib.nullcontext, group.weights, group.barrier)


def main() -> None:
    """Take steps for some time; each rank writes how many it has taken, and rank 0 the seconds and the weights."""
    options = _options()
    import_what_steps_need()
    torch.set_num_threads(1)
    if options.store.startswith("dist_"):
        training = start_kvtrainer(options.store, options.staleness)
    else:
        training = start_gloo(options.store == "gloo")
    took = _train(training, options)
    np.save(f"{options.results}.{training.rank}.npy", np.array(took))
    training.barrier()
    if training.rank == 0:
        np.save(f"{options.results}.weights.npy", training.weights())
        Path(options.out).write_text(json.dumps({options.pattern: {"rounds": took}}))
    training.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _train(training: Training, options: argparse.Namespace) -> list[float]:
    """The seconds of each step, within the time of `options`."""
    compute = _compute_seconds(options.pattern, training.rank, options.compute)
    grads = Gradients(WORK, training.rank)
    took: list[float] = []
    for name in ("base", "begin"):
        if training.rank == 0:
            mark(f"{options.out}.0.{name}")
    training.barrier()
    start = time.perf_counter()
    with training.join():
        while not training.is_over(time.perf_counter() - start > options.seconds):
            began = time.perf_counter()
            time.sleep(compute())
            training.step(grads.of(len(took)))
            took.append(time.perf_counter() - began)
    training.barrier()
    if training.rank == 0:
        mark(f"{options.out}.0.end")
    return took


def _compute_seconds(pattern: str, rank: int, seconds: float) -> Callable[[], float]:
    """How long a rank's next step computes, which a sleep stands for."""
    slow = SLOWER[pattern] * seconds
    if pattern == "constant":
        return lambda: slow if rank == 0 else seconds
    gen = np.random.Generator(np.random.PCG64(rank))
    return lambda: slow if gen.random() < _SHARE else seconds


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=STORES, required=True)
    parser.add_argument("--pattern", choices=SLOWER, required=True)
    parser.add_argument("--staleness", type=int, required=True)
    parser.add_argument("--compute", type=float, required=True, help="seconds that a step computes")
    parser.add_argument("--seconds", type=float, required=True, help="how long steps are taken")
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    parser.add_argument("--results", required=True, help="stem of the files for steps and weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
