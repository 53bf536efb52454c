"""Real steps and verbs that Ctrl-C breaks off: all workers end as an undisturbed run does, or the loop is told."""

from __future__ import annotations

import linecache
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvtrainer import Trainer, optimizer
from kvtrainer.errors import KVStoreError, StaleGradientError
from kvtrainer.kvstore import DistKVStore
from tests.support.interrupts import Interrupt, Line, lines_of
from tests.support.limits import LIMIT
from tests.support.one_in import one_in
from tests.support.stores import Servers

EVERY = [100, pytest.param(20, marks=pytest.mark.full)]
VERBS_EVERY = 20
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


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a context that nobody has yet
@pytest.mark.parametrize("every", [400, pytest.param(20, marks=pytest.mark.full)])
def test_a_first_step_that_was_interrupted_anywhere_is_made_by_the_next_call_or_the_loop_is_told(
    jobs: Servers, every: int
) -> None:
    def first_step(at: int | None) -> tuple[list[Line], set[float]]:
        def body(kv: DistKVStore, _: int) -> tuple[list[Line], set[float]]:
            weights = [Parameter(torch.zeros(60, 50)), Parameter(torch.zeros(512, 700))]
            trainer, lines = Trainer(weights, "sgd", {"lr": 1.0}, kv), list[Line]()
            for number in range(3):
                for parameter in weights:
                    parameter.grad = torch.full_like(parameter, 10.0**number)
                with suppress(Interrupt):
                    lines += lines_of(lambda: trainer.step(1), None if number else at)
            trainer.close()
            return lines, {value for p in weights for value in p.detach().unique().tolist()}

        [found] = jobs.everybody(1, 2, body, timeout=SECONDS)
        return ([], set()) if isinstance(found, KVStoreError) else found

    lines, made = first_step(None)
    assert made == {-111.0}
    went_on = 0
    for at in range(0, len(lines), every):
        _, made = first_step(at)
        went_on += made != set()
        assert made in (set(), {-111.0}, {-110.0}), (at, made)
    assert went_on > 0


# ---------------------------------------------------------------- verbs

KEYS = ["a", "b"]


def give(kv: DistKVStore, verb: str, number: int, rank: int, out: list[Tensor]) -> None:
    """Make one of a loop's calls, with gradients of its own for each step and rank."""
    grads = [torch.arange(1.0, 41.0) * (number + 1) + rank, torch.ones(3) * (2 * number + rank)]
    if verb == "push":
        kv.push(KEYS, grads)
    elif verb == "pull":
        kv.pull(KEYS, out=out)
    elif verb == "pushpull":
        kv.pushpull(KEYS, grads, out=out)
    else:
        kv.barrier()


def exchange(
    jobs: Servers, verbs: tuple[str, ...], broken: str, line: Line | None
) -> tuple[list[list[Tensor] | None], list[Line]]:
    """Make four steps of verbs; of rank 0's third one a verb is interrupted before a line, and made again.

    Returns what each worker has in the end, or None where its loop was told; and the lines of that verb.
    """
    lines: list[Line] = []

    def body(kv: DistKVStore, rank: int) -> list[Tensor] | None:
        out = [torch.zeros(40), torch.zeros(3)]
        kv.init(KEYS, out)
        kv.set_optimizer(optimizer.create("sgd", learning_rate=0.5))
        try:
            for number in range(STEPS):
                for verb in verbs:
                    call = partial(give, kv, verb, number, rank, out)
                    if rank or number != 2 or verb != broken:
                        call()
                        continue
                    try:
                        lines.extend(dict.fromkeys(lines_of(call, line)))
                    except Interrupt:
                        call()
            kv.barrier()
        except KVStoreError as error:
            kv.__exit__(type(error), error, None)
            return None
        return [one.clone() for one in out]

    return jobs.results(2, 2, body, timeout=SECONDS), lines


@pytest.mark.parametrize(
    ("verbs", "broken"),
    one_in(
        2,
        [
            (("push", "pull"), "push"),
            (("push", "pull"), "pull"),
            (("pushpull",), "pushpull"),
            (("push", "barrier", "pull"), "barrier"),
        ],
    ),
    ids=["push", "pull", "pushpull", "barrier"],
)
def test_a_verb_that_is_repeated_after_an_interrupt_counts_once_or_the_loops_are_told(
    jobs: Servers, verbs: tuple[str, ...], broken: str
) -> None:
    wanted, lines = exchange(jobs, verbs, broken, None)
    assert None not in wanted
    went_on = 0
    for line in lines[::VERBS_EVERY]:
        for found, whole in zip(exchange(jobs, verbs, broken, line)[0], wanted, strict=True):
            went_on += found is not None
            assert whole is not None
            assert found is None or all(map(torch.equal, found, whole)), line
    assert went_on > 0


def line_with(text: str, lines: list[Line]) -> Line:
    """The last of some lines in which a text stands."""
    return [line for line in lines if text in linecache.getline(*line)][-1]


def test_a_push_that_counts_although_it_was_interrupted_is_told_of_by_the_next_one_alone(
    jobs: Servers,
) -> None:
    _, lines = exchange(jobs, ("push", "pull"), "push", None)
    line = line_with("self._given = []", lines)

    def body(kv: DistKVStore, rank: int) -> Tensor:
        kv.init("a", torch.zeros(2))
        kv.set_optimizer(optimizer.create("sgd", learning_rate=1.0))
        for number in range(3):
            if rank == 0 and number == 1:
                with pytest.raises(Interrupt):
                    lines_of(lambda: kv.push("a", torch.ones(2)), line)
                with pytest.raises(KVStoreError, match="'a'"):
                    kv.push("a", torch.full((2,), 100.0))
            else:
                kv.push("a", torch.ones(2))
        kv.pull("a", out=(out := torch.empty(2)))
        return out

    assert [one.tolist() for one in jobs.results(2, 2, body)] == [[-6.0, -6.0]] * 2


def test_an_interrupted_pull_leaves_the_push_before_it_under_way(jobs: Servers) -> None:
    """It was given up, on every worker, and only the other one was told."""
    has_come = threading.Event()

    def body(kv: DistKVStore, rank: int) -> float:
        kv.init("a", torch.zeros(1))
        if rank == 1:
            assert has_come.wait(LIMIT)
        kv.push("a", torch.ones(1))
        out = torch.empty(1)
        if rank == 0:
            with pytest.raises(Interrupt):
                lines_of(lambda: kv.pull("a", out=out), wait)
            has_come.set()
        kv.pull("a", out=out)
        return out.item()

    _, lines = exchange(jobs, ("push", "pull"), "pull", None)
    wait = line_with("got = self.transport.receive(pause)", lines)
    assert jobs.results(2, 2, body) == [2.0, 2.0]
