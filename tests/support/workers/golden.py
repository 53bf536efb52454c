"""Part of a job: plays MXNet's recorded runs; returns the weights at the end of each.

Every parameter is the recorded 2x2 one, repeated below itself, so one of them lies on all servers and must still end
at the recorded numbers. Each of W workers gives 1 / W of the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

import kvtrainer
from kvtrainer.kvstore import KVStoreBase
from tests.support.golden import GOLDEN, RESCALED, START, UPDATES, gradient
from tests.support.jobs import Results

REPEATS = {"sliced": 3500, "tall": 3, "golden": 1}
"""How often each parameter repeats the recorded one."""
SITES = (True, False)
"""Of update_on_kvstore."""


def run(rank: int, workers: int) -> Results:
    return {
        name_of(label, rescaled, in_store): play(label, rescaled, workers, "dist_sync", in_store)
        for label in GOLDEN
        for rescaled in (False, True)
        for in_store in SITES
    }


def name_of(label: str, rescaled: bool, in_store: bool) -> str:
    """Under which name a run's weights are delivered."""
    return f"{label}, {'rescaled' if rescaled else 'plain'}, {in_store}"


def play(
    label: str, rescaled: bool, workers: int, kvstore: str | KVStoreBase | None, in_store: bool | None
) -> dict[str, Tensor]:
    """The weights at the end of one run."""
    row = GOLDEN[label]
    start = torch.tensor(START)
    parameters = {key: start.repeat(times, 1).requires_grad_() for key, times in REPEATS.items()}
    options = {**row.options, **(RESCALED if rescaled else {})}
    with kvtrainer.Trainer(
        parameters, row.name, options, kvstore=kvstore, update_on_kvstore=in_store
    ) as trainer:
        for t in range(1, UPDATES + 1):
            part = torch.tensor(gradient(t)) / workers
            for key, parameter in parameters.items():
                (parameter * part.repeat(REPEATS[key], 1)).sum().backward()  # type: ignore[no-untyped-call]
            trainer.step(1)
    return {key: parameter.detach().clone() for key, parameter in parameters.items()}
