"""Part of a job: plays the runs of `tests.support.trajectories`; returns the weights at the end of each.

`play` takes any store, so that the tests run the same in their own process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import kvtrainer
from kvtrainer.kvstore import KVStoreBase
from tests.support.jobs import Results
from tests.support.trajectories import (
    OPTIMIZERS,
    RUNS,
    STEPS,
    batch_size,
    gradients,
    multipliers,
    options_of,
    rate,
    start_weights,
)

SITES = (True, False)
"""Of update_on_kvstore."""


def run(rank: int, workers: int) -> Results:
    return {
        name_of(label, scenario, in_store): play(label, scenario, rank, "dist_sync", in_store)
        for label, scenario in RUNS
        for in_store in SITES
    }


def name_of(label: str, scenario: str, in_store: bool) -> str:
    """Under which name a run's weights are delivered."""
    return f"{label}, {scenario}, {in_store}"


def play(
    label: str, scenario: str, rank: int, kvstore: str | KVStoreBase | None, in_store: bool | None
) -> dict[str, Tensor]:
    """The weights at the end of one run, in float32."""
    parameters = {
        key: torch.from_numpy(weight).float().requires_grad_() for key, weight in start_weights().items()
    }
    options = {"learning_rate": rate(scenario, 0), **options_of(label)}
    with kvtrainer.Trainer(
        parameters, OPTIMIZERS[label].name, options, kvstore=kvstore, update_on_kvstore=in_store
    ) as trainer:
        for step in range(STEPS):
            trainer.set_learning_rate(rate(scenario, step))
            for kind, changed in multipliers(scenario, step).items():
                for key, value in changed.items():
                    setattr(parameters[key], kind, value)
            set_gradients(parameters, gradients(step, rank))
            trainer.step(batch_size(scenario, step, rank))
    return {key: parameter.detach().clone() for key, parameter in parameters.items()}


def set_gradients(parameters: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """A backward pass that gives every parameter its gradient, which its dtype must hold exactly."""
    ends = [parameter.view_as(parameter) for parameter in parameters.values()]
    grads = [torch.from_numpy(values[key]).to(end.dtype) for key, end in zip(parameters, ends, strict=True)]
    torch.autograd.backward(ends, grads)
