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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from step_worker import Gloo, import_what_steps_need
from steps import LEARNING_RATE, Array, Work, mark, mark_base
from torch import Tensor
from torch.nn import Parameter

WORK = Work(16, 1 << 14, "sgd")
"""1 MiB."""
RATE, BATCH = 0.1, 32
_IN, _NOISE = 64, 0.1
_OUT = WORK.floats // _IN
"""Of a key."""
_POOL = 512
"""Samples of a worker, which come again after 16 steps."""
SLOWER = {"constant": 4.0, "random": 10.0, "turns": 4.0}
"""How many times longer a slow step computes: one worker's steps, a few steps of each, one worker's in each round."""
_SHARE = 0.05
BACKUP = "dist_sync+backup"
STORES = ("dist_sync", BACKUP, "dist_ssp", "dist_async", "gloo", "alone")


class Regression:
    """Linear regression of noisy numbers, in the samples of one rank."""

    def __init__(self, rank: int) -> None:
        truth = torch.randn(WORK.keys, _IN, _OUT, generator=torch.Generator().manual_seed(1))
        self._truth = truth / _IN**0.5
        gen = torch.Generator().manual_seed(100 + rank)
        self._x = torch.randn(_POOL, _IN, generator=gen)
        noise = torch.randn(WORK.keys, _POOL, _OUT, generator=gen)
        self._y = self._x @ self._truth + _NOISE * noise

    def gradients(self, weights: list[Parameter], number: int) -> list[Tensor]:
        """Half the gradients of the mean squared error of a batch, one of each key."""
        at = number * BATCH % _POOL
        x, y = self._x[at : at + BATCH], self._y[:, at : at + BATCH]
        return list((x.T @ (x @ self._stacked(weights) - y) / BATCH).view(WORK.keys, -1))

    def loss(self, weights: list[Parameter]) -> float:
        """The mean squared error for all samples that there could be, of independent features of variance 1."""
        away = self._stacked(weights) - self._truth
        return float(away.square().mean() * _IN) + _NOISE**2

    @staticmethod
    def _stacked(weights: list[Parameter]) -> Tensor:
        return torch.stack([one.detach().view(_IN, _OUT) for one in weights])


@dataclass(frozen=True)
class Training:
    """A worker, as its loop calls it."""

    parameters: list[Parameter]
    step: Callable[[list[Tensor]], bool]
    """Whether the gradients count."""
    is_over: Callable[[bool], bool]
    """Whether the loop ends, by what this worker wants."""
    version: Callable[[int], int]
    """How many steps of all workers are in the weights, given how many this one has made."""
    join: Callable[[], AbstractContextManager[None]]
    weights: Callable[[], Array]


@dataclass(frozen=True)
class Group:
    """How a worker is connected before it has a model."""

    rank: int
    barrier: Callable[[], object]
    start: Callable[[], Training]


def join_kvtrainer(name: str, staleness: int) -> Group:
    """A Trainer over one of the stores; workers end when they like, and join the others until those have, too."""
    kvtrainer = importlib.import_module("kvtrainer")
    store = kvtrainer.kvstore.create(name, **({"staleness": staleness} if name == "dist_ssp" else {}))

    def start() -> Training:
        parameters = [Parameter(torch.zeros(WORK.floats)) for _ in range(WORK.keys)]
        trainer = kvtrainer.Trainer(parameters, WORK.optimizer, {"learning_rate": RATE}, kvstore=store)
        together = store.num_workers if name == "dist_sync" else 1

        def step(grads: list[Tensor]) -> bool:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            trainer.step(store.num_workers)
            return True

        def weights() -> Array:
            latest = trainer.pull_weights()
            result: Array = torch.cat([latest.get(one, one).detach() for one in parameters]).numpy()
            return result

        return Training(
            parameters, step, bool, lambda made: together * trainer.version, trainer.join, weights
        )

    return Group(store.rank, store.barrier, start)


def join_with_backup(rounds: int) -> Group:
    """A Trainer whose steps leave out the slowest worker; all end after the same step, which late ones skip to."""
    kvtrainer = importlib.import_module("kvtrainer")
    control = kvtrainer.kvstore.create("dist_sync", namespace="control")
    workers = control.num_workers
    store = kvtrainer.kvstore.create("dist_sync", elastic=f"{workers - 1}..{workers}", backup_workers=1)

    def start() -> Training:
        parameters = [Parameter(torch.zeros(WORK.floats)) for _ in range(WORK.keys)]
        trainer = kvtrainer.Trainer(parameters, WORK.optimizer, {"learning_rate": RATE}, kvstore=store)
        trainer.resume()

        def step(grads: list[Tensor]) -> bool:
            before = trainer.num_left_out
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            trainer.step(workers)
            return bool(trainer.num_left_out == before)

        def weights() -> Array:
            result: Array = torch.cat([one.detach() for one in parameters]).numpy()
            return result

        return Training(
            parameters,
            step,
            lambda _: bool(trainer.round >= rounds),
            lambda _: (workers - 1) * trainer.round,
            contextlib.nullcontext,
            weights,
        )

    return Group(control.rank, control.barrier, start)


def join_gloo(exchanges: bool) -> Group:
    """All-reduce, and a word in each step whether it is the last; or steps that exchange nothing."""
    group = Gloo(-1)

    def start() -> Training:
        LEARNING_RATE[WORK.optimizer] = RATE
        group.begin(WORK)

        def step(grads: list[Tensor]) -> bool:
            group.assign([grad.numpy() for grad in grads])
            group.step()
            return True

        def is_over(wanted: bool) -> bool:
            votes = torch.tensor([float(wanted)])
            dist.all_reduce(votes)
            return bool(votes.item() > 0)

        def nothing(*_: object) -> bool:
            """Take no step."""
            return True

        rounds = (step, is_over) if exchanges else (nothing, bool)
        together = dist.get_world_size() if exchanges else 0
        return Training(
            group.parameters, *rounds, lambda made: together * made, contextlib.nullcontext, group.weights
        )

    return Group(group.rank, group.barrier, start)


def main() -> None:
    """Take steps for some time; each rank writes what it has found, and rank 0 the seconds and the weights."""
    options = _options()
    import_what_steps_need()
    torch.set_num_threads(1)
    if options.store == BACKUP:
        group = join_with_backup(round(options.seconds / options.compute))
    elif options.store.startswith("dist_"):
        group = join_kvtrainer(options.store, options.staleness)
    else:
        group = join_gloo(options.store == "gloo")
    problem, measured = Regression(group.rank), {}
    for at, pattern in enumerate(options.patterns.split(",")):
        marks = "" if group.rank else f"{options.out}.{at}"
        mark_base(marks, group.barrier)
        training = group.start()
        found = _train(training, problem, group, pattern, marks, options)
        np.savez(f"{options.results}.{pattern}.{group.rank}.npz", **found)
        group.barrier()
        if group.rank == 0:
            np.save(f"{options.results}.{pattern}.weights.npy", training.weights())
            measured[pattern] = {"rounds": found["seconds"].tolist()}
        del training  # what follows has its memory
    if group.rank == 0:
        Path(options.out).write_text(json.dumps(measured))
    group.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _train(
    training: Training,
    problem: Regression,
    group: Group,
    pattern: str,
    marks: str,
    options: argparse.Namespace,
) -> dict[str, NDArray[Any]]:
    """Of each step within the time of `options` its seconds, whether it counts, and the version and loss after it; and
    all gradients that count.

    The latter as their sum, which tells what the weights should be.
    """
    compute = _compute_seconds(pattern, group.rank, options.workers, options.compute)
    seconds: list[float] = []
    counted: list[bool] = []
    versions: list[int] = []
    losses: list[float] = []
    given = torch.zeros(WORK.keys, WORK.floats, dtype=torch.float64)  # which rounds less than the weights
    if marks:
        mark(f"{marks}.begin")
    group.barrier()
    start = time.perf_counter()
    with training.join():
        while not training.is_over(time.perf_counter() - start > options.seconds):
            began, number = time.perf_counter(), len(seconds)
            grads = problem.gradients(training.parameters, number)
            time.sleep(max(began + compute(number) - time.perf_counter(), 0.0))
            gradients = torch.stack(grads)
            counted.append(training.step(grads))
            given += gradients * counted[-1]
            seconds.append(time.perf_counter() - began)
            versions.append(training.version(number + 1))
            losses.append(problem.loss(training.parameters))
    group.barrier()
    if marks:
        mark(f"{marks}.end")
    group.barrier()
    return {
        "seconds": np.array(seconds),
        "counted": np.array(counted),
        "versions": np.array(versions),
        "losses": np.array(losses),
        "given": given.view(-1).numpy(),
    }


def _compute_seconds(pattern: str, rank: int, workers: int, seconds: float) -> Callable[[int], float]:
    """How long a step of a rank computes, which a sleep stands for."""
    slow = SLOWER[pattern] * seconds
    if pattern == "constant":
        return lambda number: slow if rank == 0 else seconds
    if pattern == "turns":
        return lambda number: slow if number % workers == rank else seconds
    gen = np.random.Generator(np.random.PCG64(rank))
    return lambda number: slow if gen.random() < _SHARE else seconds


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=STORES, required=True)
    parser.add_argument("--patterns", required=True, help="commas between them")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--staleness", type=int, required=True)
    parser.add_argument("--compute", type=float, required=True, help="seconds that a step computes")
    parser.add_argument("--seconds", type=float, required=True, help="how long steps are taken")
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    parser.add_argument("--results", required=True, help="stem of the files for steps and weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
