"""Worker: what a Trainer offers beside plain steps, on servers, at both sites of the update.

Every run trains one sliced and one small parameter with gradients that are the same everywhere, and delivers what the
test needs to compute the weights by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

import kvtrainer
from kvtrainer import Trainer, amp
from kvtrainer.lr_scheduler import PolyScheduler
from tests.support.jobs import Results, deliver, own_place

SHAPES = (3,), (170, 301)


def main() -> None:
    rank, _ = own_place()
    runs: list[Callable[[int, bool], Results]] = [overflow, published, scheduled, live_numbers]
    deliver({f"{run.__name__} {in_store}": run(rank, in_store) for run in runs for in_store in (True, False)})


def overflow(rank: int, in_store: bool) -> Results:
    """Gradients of 1 in every step; in step 1 one of rank 1's, of the small parameter, is infinite."""
    parameters, trainer = _setup(in_store, {"learning_rate": 1.0, "momentum": 0.5})
    amp.init_trainer(trainer)
    weights, scales = [], []
    for step in range(4):
        for p in parameters:
            slope = math.inf if (step, rank, p.dim()) == (1, 1, 1) else 1.0
            with amp.scale_loss((p * slope).sum(), trainer) as scaled:
                scaled.backward()
        scales.append(trainer.amp_loss_scale)
        trainer.step(2)
        weights.append(_values(parameters))
    steps = [float(state["step"]) for state in trainer.state_dict()["state"].values()]
    trainer.close()
    return {"weights": weights, "scales": scales, "steps": steps, "num_update": trainer.optimizer.num_update}


def published(rank: int, in_store: bool) -> Results:
    """After a step with momentum, every rank writes its own weights and all publish them."""
    parameters, trainer = _setup(in_store, {"learning_rate": 1.0, "momentum": 0.5})
    weights = []
    _step(trainer, parameters, 2)
    with torch.no_grad():
        parameters[0].fill_(10.0 + rank)
    trainer.set_data()
    weights.append(_values(parameters))
    _step(trainer, parameters, 2)
    weights.append(_values(parameters))
    trainer.close()
    return {"weights": weights}


def scheduled(rank: int, in_store: bool) -> Results:
    """A scheduler of Gluon's for three steps, then a function, which cannot be sent, for three more."""
    moves = []
    for scheduler in (PolyScheduler(8, base_lr=8.0, pwr=1), lambda n: float(n)):
        parameters, trainer = _setup(in_store, {"lr_scheduler": scheduler})
        for _ in range(3):
            before = parameters[1][0, 0].item()
            _step(trainer, parameters, 2)
            moves.append(before - parameters[1][0, 0].item())
        trainer.close()
    return {"moves": moves}


def live_numbers(rank: int, in_store: bool) -> Results:
    """The learning rate, a multiplier and the batch size change from step to step; the last batch is smaller."""
    parameters, trainer = _setup(in_store, {"learning_rate": 1.0})
    weights = []
    _step(trainer, parameters, 2)
    weights.append(_values(parameters))
    trainer.set_learning_rate(0.0)
    _step(trainer, parameters, 2)
    weights.append(_values(parameters))
    trainer.set_learning_rate(1.0)
    parameters[0].lr_mult = 0.5  # type: ignore[attr-defined]
    _step(trainer, parameters, 2)
    weights.append(_values(parameters))
    _step(trainer, parameters, 4 if rank else 8)
    weights.append(_values(parameters))
    trainer.close()
    return {"weights": weights}


def _setup(in_store: bool, options: dict[str, Any]) -> tuple[list[Parameter], Trainer]:
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    return parameters, kvtrainer.Trainer(
        parameters, "sgd", options, kvstore="dist_sync", update_on_kvstore=in_store
    )


def _step(trainer: Trainer, parameters: list[Parameter], batch_size: int) -> None:
    for p in parameters:
        p.sum().backward()
    trainer.step(batch_size)


def _values(parameters: list[Parameter]) -> list[float]:
    """The one value of each parameter; NaN where its elements differ."""
    return [p.unique().item() if p.unique().numel() == 1 else math.nan for p in parameters]


if __name__ == "__main__":
    main()
