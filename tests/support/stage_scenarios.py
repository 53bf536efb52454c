"""What each worker of a job does in tests of options of the stages, over any store that sums in rounds.

A scenario gets `make`, which builds a parameter of two zeros and its Trainer over the store, and the worker's rank.
What it returns has to be equal on all workers, unless it says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtrainer import Trainer
from kvtrainer.errors import NonFiniteGradientError, PlanMismatchError

Make = Callable[..., tuple[Any, Trainer]]
Scenario = Callable[[Make, int], Any]

NORM: dict[str, Any] = {"clip_grad": {"max_norm": 1.0}}
SCALE = {"init_scale": 8.0, "growth_interval": 3}
HALVES = [lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
"""A scheduler of torch, which goes on from the present rate."""
CLOSED = [{"policy": "poly", "power": 1.0, "max_iters": 16, "by_epoch": False}]
"""A schedule in closed form."""
NUMBERS = {"learning_rate": 1.0, "momentum": 0.5}


def push(trainer: Trainer, p: Any, slope: float = 1.0) -> dict[str, Any]:
    return vars(trainer.update_params((p * slope).sum()))


def state_of(trainer: Trainer, p: Any) -> Any:
    """All that workers have in common."""
    saved = trainer.export_saved_states()
    state = {name: value.tolist() for name, value in saved.parameters["p"].state.items() if name != "step"}
    extra = {name: value for name, value in saved.extra.items() if name != "backward_passes"}
    return p.tolist(), saved.num_update, saved.groups, extra, state


def uneven(batches: tuple[int, ...], schedules: Any) -> Scenario:
    """A block that workers leave at different times, with an overflow near its end, and two steps of all."""

    def run(make: Make, rank: int) -> Any:
        p, trainer = make(amp=SCALE, schedules=schedules, **NORM)
        with trainer.join():
            for at in range(batches[rank]):
                push(trainer, p, math.inf if at == 4 else 1.0)
        after = state_of(trainer, p)
        return after, [push(trainer, p), push(trainer, p)], state_of(trainer, p)

    return run


def bad_loss_of_a_joined_worker(make: Make, rank: int) -> Any:
    """Rank 0 has a loss that is not a number, but never steps."""
    p, trainer = make(on_nonfinite="skip")
    with trainer.join():
        if rank == 0:
            trainer.backward((p * math.nan).sum())
        else:
            push(trainer, p)
    after = p.tolist()
    return after, push(trainer, p)["updated"]


def windows_after_a_block(make: Make, rank: int) -> Any:
    """Rank 1 leaves a block in the middle of a window."""
    p, trainer = make(accumulate=2)
    with trainer.join():
        for _ in range((4, 3)[rank]):
            push(trainer, p)
    after = p.tolist()
    return after, [push(trainer, p)["updated"] for _ in range(4)], p.tolist()


def one_bad_loss(make: Make, rank: int) -> Any:
    """Rank 1 finds a loss that is not a number. The first value is the worker's own: where it raised, and for what."""
    p, trainer = make(on_nonfinite="raise", schedules=HALVES, accumulate=2)
    found = []
    for at in range(6):
        try:
            push(trainer, p, math.nan if (rank, at) == (1, 2) else 1.0)
        except NonFiniteGradientError as error:
            found.append((at, str(error).startswith("Loss is NaN")))
    return found, p.tolist(), trainer.learning_rate, vars(trainer.last)


def halves_of_a_step(make: Make, rank: int) -> Any:
    """Gradients are changed between sum and update; in one step that of rank 1 is infinite. Workers update."""
    p, trainer = make(amp=8, schedules=HALVES, accumulate=2, on_nonfinite="raise", **NORM)
    results: list[Any] = []
    for at in range(6):
        trainer.backward((p * (math.inf if (rank, at) == (1, 3) else 3.0)).sum())
        trainer.allreduce_grads()
        if at % 2 and math.isfinite(p.grad.sum()):
            p.grad.mul_(0.5)
        try:
            results.append(vars(trainer.update()))
        except NonFiniteGradientError:
            results.append("raised")
    return results, state_of(trainer, p)


def gradients_by_turns(make: Make, rank: int) -> Any:
    """One worker has a gradient, and then the other; the last overflows."""
    p, trainer = make(amp=SCALE, schedules=HALVES, **NORM)
    results = []
    for at in range(4):
        if at % 2 == rank:
            trainer.backward((p * (math.inf if at == 3 else 3.0)).sum())
        results.append(vars(trainer.step(ignore_stale_grad=True)))
    return results, state_of(trainer, p)


def round_that_fails(make: Make, rank: int) -> Any:
    """One worker has another learning rate; then it is put right, and the step is made again."""
    p, trainer = make(amp=SCALE, schedules=HALVES, **NORM)
    push(trainer, p)
    before = state_of(trainer, p)
    if rank == 1:
        trainer.set_learning_rate(7.0)
    with pytest.raises(PlanMismatchError):
        push(trainer, p)
    trainer.set_learning_rate(0.5)
    assert state_of(trainer, p) == before
    return vars(trainer.step()), state_of(trainer, p)


def interrupted_step(make: Make, rank: int) -> Any:
    """Rank 1 is interrupted before its round, and makes the step again while the other waits."""
    p, trainer = make(amp=SCALE, schedules=HALVES, **NORM)
    push(trainer, p)
    before = state_of(trainer, p)
    if rank == 0:
        return push(trainer, p), state_of(trainer, p)
    exchange: Any = trainer._pipeline.link.exchange
    run, exchange.run = exchange.run, _interrupted
    with pytest.raises(KeyboardInterrupt):
        push(trainer, p)
    exchange.run = run
    assert state_of(trainer, p) == before
    return vars(trainer.step()), state_of(trainer, p)


def different(mine: dict[str, Any], other: dict[str, Any]) -> Scenario:
    """Workers with different options; the text of the error, as each has it."""

    def run(make: Make, rank: int) -> str:
        p, trainer = make(**(mine, other)[rank])
        try:
            for _ in range(4):
                push(trainer, p)
        except PlanMismatchError as error:
            return str(error)
        return "nothing"

    return run


LIMITED = r"checks_finite=(True|None) on rank 0|rank . wants nothing to be checked"
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "norm": (NORM, {"clip_grad": {"max_norm": 2.0}}, "max_norm=1.0 on rank 0 and 2.0 on rank 1"),
    "norm or none": (NORM, {}, LIMITED),
    "none or value": ({}, {"clip_grad": {"type": "value", "clip_value": 1.0}}, LIMITED),
    "amp or none": ({"amp": 8}, {}, rf"{LIMITED}|loss_scale is 8.0 on rank 0 and None on rank 1"),
    "loss scale": (
        {"amp": 8},
        {"amp": SCALE | {"init_scale": 16.0}},
        "loss_scale is 8.0 on rank 0 and 16.0 on rank 1",
    ),
    "growth": ({"amp": 8}, {"amp": SCALE}, "loss_scale is 8.0 on rank 0 and 16.0 on rank 1"),
    "skip or not": ({"on_nonfinite": "skip"}, {}, LIMITED),
    "schedule or none": ({"schedules": HALVES}, {}, "lr=0.5 on rank 0 and 1.0 on rank 1"),
    "accumulate": ({"accumulate": 2}, {}, "accumulate is 2 on rank 0 and None on rank 1"),
}
"""Options of two workers that do not go together, and what the error says."""

SAME: dict[str, Scenario] = {
    "uneven, of torch": uneven((7, 2), HALVES),
    "uneven, in closed form": uneven((2, 7), CLOSED),
    "uneven, one without data": uneven((5, 0), CLOSED),
    "a bad loss of a joined worker": bad_loss_of_a_joined_worker,
    "windows after a block": windows_after_a_block,
    "one bad loss": one_bad_loss,
    "gradients by turns": gradients_by_turns,
    "a round that fails": round_that_fails,
    "an interrupted step": interrupted_step,
}

HALF = "halves of a step"
"""A scenario for workers that update."""


def check_same(name: str, first: Any, second: Any) -> None:
    """Raise AssertionError unless two workers ended alike, and as they should."""
    if name == "one bad loss":
        assert (first[0], second[0]) == ([(3, False)], [(3, True)])
        first, second = first[1:], second[1:]
        assert first[0] == [-1.0 - (0.5 + 0.5)] * 2
    assert first == second
    if name == "a bad loss of a joined worker":
        assert first == ([-0.5, -0.5], True)
    if name == "windows after a block":
        assert first[1] == [False, True, False, True]
    if name == HALF:
        ends = [one if one == "raised" else one["updated"] for one in first[0]]
        assert ends == [False, True, False, "raised", False, True]
        assert first[0][1]["grad_norm"] == pytest.approx(1.5 * math.sqrt(2.0))
    if name == "gradients by turns":
        assert [one["skipped"] for one in first[0]] == [False, False, False, True]


def _interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt
