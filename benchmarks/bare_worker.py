"""A whole synchronous step of nothing but shared memory, the most that a host allows; started by `step_jobs.py`.

Memfds, eventfds and torch's fused optimizer: no protocol, no checks, and nobody notices a process that has died. This
process forks all workers and servers. Servers read the gradients of all workers where those put them, and update a part
of the weights each, which all workers have mapped.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
from step_worker import Parameters
from steps import LEARNING_RATE, Array, Work, run, worker_options
from torch import Tensor
from torch.nn import Parameter

_CHUNK = 1 << 16
"""Elements that are summed, and then updated while their sum is in the cache."""
_LINE = 16
Update = Callable[[int, int, Tensor], None]
"""Called with where elements begin and end in a server's part, and the sum of their gradients."""


@dataclass(frozen=True)
class Shared:
    """Memory that all processes map, and eventfds that they wait at."""

    weights: int
    gradients: Sequence[int]
    """Of each worker."""
    given: Sequence[int]
    """By server: counts the workers whose gradients are there."""
    updated: Sequence[int]
    """By worker: counts the servers whose weights are there."""


class BareStep(Parameters):
    """One worker's view of it: gradients are copied into its memory, and weights change by themselves."""

    def __init__(self, rank: int, shared: Shared, barrier: Callable[[], object]) -> None:
        super().__init__()
        self.rank, self._shared, self._barrier = rank, shared, barrier
        self._slots: list[Tensor] = []
        self._assigned: list[Tensor] = []

    def begin(self, work: Work) -> None:
        whole = mapped(self._shared.weights, work)
        if self.rank == 0:
            whole.zero_()
        self._slots = list(mapped(self._shared.gradients[self.rank], work).split(list(work.numels)))
        self.parameters = [Parameter(one) for one in whole.split(list(work.numels))]
        if work.start == "backward":
            for parameter, slot in zip(self.parameters, self._slots, strict=True):
                parameter.register_post_accumulate_grad_hook(_Keep(slot))
        self._exchange()  # the weights are there, and servers begin

    def end(self) -> None:
        super().end()
        self._slots, self._assigned = [], []

    def assign(self, grads: list[Array]) -> None:
        self._assigned = [self.tensor(grad) for grad in grads]

    def forward(self, grads: list[Array]) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        super().forward(grads)

    def step(self) -> None:
        if self._assigned:
            torch._foreach_copy_(self._slots, self._assigned)
        self._exchange()

    def barrier(self) -> None:
        self._barrier()

    def _exchange(self) -> None:
        for fd in self._shared.given:
            os.eventfd_write(fd, 1)
        _await(self._shared.updated[self.rank], len(self._shared.given))


class _Keep:
    """Copies a gradient as soon as there is one, and has `.grad` be the copy."""

    def __init__(self, slot: Tensor) -> None:
        self._slot = slot

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = self._slot.copy_(parameter.grad)


def mapped(fd: int, work: Work) -> Tensor:
    """The elements of a work in shared memory."""
    return torch.frombuffer(mmap.mmap(fd, work.nbytes), dtype=torch.float32)


def serve(rank: int, works: Sequence[Work], shared: Shared) -> None:
    """Take the steps of all works: sum and update a part of each."""
    torch.set_num_threads(1)
    workers, servers = len(shared.updated), len(shared.given)
    for work in works:
        _await(shared.given[rank], workers)
        size = sum(work.numels)
        first, end = (size * at // servers // _LINE * _LINE for at in (rank, rank + 1))
        part = slice(first, size if rank == servers - 1 else end)
        gradients = [mapped(fd, work)[part] for fd in shared.gradients]
        update = _make_update(work.optimizer, mapped(shared.weights, work)[part], workers)
        _tell(shared.updated)
        for _ in range(work.warm_up + work.rounds):
            _await(shared.given[rank], workers)
            _update_all(gradients, update)
            _tell(shared.updated)
    _await(shared.given[rank], workers)  # what the job has used is asked for before its end


def _update_all(gradients: Sequence[Tensor], update: Update) -> None:
    size, space = len(gradients[0]), torch.empty(_CHUNK)
    for start in range(0, size, _CHUNK):
        end = min(start + _CHUNK, size)
        total, *others = [one[start:end] for one in gradients]
        for other in others:
            total = torch.add(total, other, out=space[: end - start])
        update(start, end, total)


def _make_update(optimizer: str, weights: Tensor, workers: int) -> Update:
    """torch's fused kernel of an optimizer, by the mean of gradients that are given as a sum."""
    common: dict[str, Any] = {"lr": LEARNING_RATE[optimizer], "weight_decay": 0.0, "maximize": False}
    if workers > 1:
        common["grad_scale"] = torch.tensor(float(workers))
    if optimizer == "sgd":
        common |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
        return lambda start, end, grad: torch._fused_sgd_([weights[start:end]], [grad], [], **common)
    common |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}
    first, second, step = torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros(())

    def adam(start: int, end: int, grad: Tensor) -> None:
        if start == 0:
            step.add_(1)
        part = slice(start, end)
        torch._fused_adam_([weights[part]], [grad], [first[part]], [second[part]], [], [step], **common)

    return adam


def _await(fd: int, count: int) -> None:
    while count:
        count -= os.eventfd_read(fd)


def _tell(fds: Sequence[int]) -> None:
    for fd in fds:
        os.eventfd_write(fd, 1)


def _memory(nbytes: int) -> int:
    fd = os.memfd_create("kvtrainer-bare")
    os.ftruncate(fd, nbytes)
    return fd


def work_on(rank: int, shared: Shared, barrier: Callable[[], object], options: argparse.Namespace) -> None:
    """Be one worker."""
    torch.set_num_threads(1)
    run(BareStep(rank, shared, barrier), options)
    _tell(shared.given)


def main() -> None:
    """Fork workers and servers, and wait for them; end with code 1 as soon as one fails."""
    parser = worker_options(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--servers", type=int, required=True)
    options = parser.parse_args()
    works = [Work(**fields) for fields in json.loads(options.works)]
    most, workers, servers = max(work.nbytes for work in works), options.workers, options.servers
    shared = Shared(
        _memory(most),
        [_memory(most) for _ in range(workers)],
        [os.eventfd(0) for _ in range(servers)],
        [os.eventfd(0) for _ in range(workers)],
    )
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(workers).wait
    started = [
        *[context.Process(target=serve, args=(at, works, shared), daemon=True) for at in range(servers)],
        *[
            context.Process(target=work_on, args=(at, shared, barrier, options), daemon=True)
            for at in range(workers)
        ],
    ]
    for process in started:
        process.start()
    left = list(started)
    while left:
        wait([process.sentinel for process in left])
        if any(process.exitcode for process in left):
            sys.exit(1)
        left = [process for process in left if process.is_alive()]


if __name__ == "__main__":
    main()
