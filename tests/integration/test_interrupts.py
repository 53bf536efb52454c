"""Real steps that Ctrl-C breaks off: all workers end with the weights of an undisturbed run, or the loop is told."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import KVStoreError, StaleGradientError
from kvtrainer.kvstore import DistKVStore
from tests.support.interrupts import Interrupt, Line, lines_of
from tests.support.stores import Servers

EVERY = [100, pytest.param(20, marks=pytest.mark.full)]
"""Of the lines of a step so many are passed over: a job takes a fifth of a second."""
SECONDS = 15.0
"""Nobody waits longer for a worker that was interrupted while it told the others that it leaves."""
STEPS = 4


def train(
    jobs: Servers, line: Line | None, options: dict[str, Any], workers: int = 2
) -> tuple[list[list[Tensor] | None], list[Line]]:
    """Make four steps; rank 0's third one is interrupted before a line, and made again, if it was not made.

    Returns the weights of each worker, or None where its loop was told; and the lines of that step.
    """
    lines: list[Line] = []

    def body(kv: DistKVStore, rank: int) -> list[Tensor] | None:
        weights = [Parameter(torch.arange(6.0).view(3, 2)), Parameter(torch.ones(4))]
        trainer = Trainer(weights, "sgd", {"lr": 0.125, "momentum": 0.5}, kv, **options)
        done = [""]

        def step(number: int) -> None:
            for parameter in weights:
                parameter.grad = None
            factors = [torch.arange(1.0, 1.0 + p.numel()).view(p.shape) + number + rank for p in weights]
            torch.stack([(p * f).sum() for p, f in zip(weights, factors, strict=True)]).sum().backward()
            done.append("backward")
            trainer.step(1)

        try:
            for number in range(STEPS):
                if rank or number != 2:
                    step(number)
                    continue
                done.clear()
                try:
                    lines.extend(dict.fromkeys(lines_of(lambda: step(2), line)))
                except Interrupt:
                    if not done:
                        step(2)
                    else:
                        with suppress(StaleGradientError):  # it had been made
                            trainer.step(1)
            trainer.close()
        except KVStoreError as error:
            trainer.__exit__(type(error), error, None)
            kv.__exit__(type(error), error, None)
            return None
        return [parameter.detach().clone() for parameter in weights]

    return jobs.results(workers, 2, body, timeout=SECONDS), lines


CASES: dict[str, dict[str, Any]] = {
    "on servers": {},
    "on workers": {"update_on_kvstore": False},
    "overlap": {"overlap": True},
    "overlap_pull": {"overlap_pull": True},
    "compression": {"compression_params": {"type": "2bit", "threshold": 0.5}},
    "both ways": {"compression_params": {"type": "int8", "pull": "int8"}},
    "overlap with compression": {"overlap": True, "compression_params": {"type": "int8"}},
}


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_two_workers_and_two_servers_is_made_once_by_both_or_the_loops_are_told(
    jobs: Servers, case: str, every: int
) -> None:
    wanted, lines = train(jobs, None, CASES[case])
    assert None not in wanted
    went_on = 0
    for line in lines[::every]:
        for found, whole in zip(train(jobs, line, CASES[case])[0], wanted, strict=True):
            went_on += found is not None
            assert whole is not None
            assert found is None or all(map(torch.equal, found, whole)), line
    assert went_on > 0


def test_weights_that_come_later_are_read_although_their_arrival_was_interrupted_anywhere(
    jobs: Servers,
) -> None:
    """A parameter that was left half a plain one called itself without an end."""
    wanted, lines = train(jobs, None, CASES["overlap_pull"], workers=1)
    ends = [line for line in lines if line[0].endswith("overlap.py")]
    assert len(ends) > 10
    outcomes = [train(jobs, line, CASES["overlap_pull"], workers=1)[0] for line in ends]
    assert [
        line
        for line, one in zip(ends, outcomes, strict=True)
        if one[0] is not None and not all(map(torch.equal, one[0], wanted[0] or ()))
    ] == []
