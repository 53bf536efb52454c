"""accelerate, and skorch's nets that use it, over a kvstore, in one worker of a job; see `jobs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from skorch import NeuralNetRegressor
from skorch.callbacks import Checkpoint
from skorch.hf import AccelerateMixin
from torch import nn
from torch.utils.data import DataLoader

from kvtrainer.errors import ConfigurationError
from kvtrainer.integrations.accelerate import KVStoreAccelerator, join
from tests.frameworks.jobs import (
    BATCH,
    EPOCHS,
    FEATURES,
    Examples,
    make_net,
    numbers,
    rank_of_process,
    run_cases,
)

WORKERS = join("dist_sync")


class Run:
    """What a script prepares, and a loop as anybody writes it."""

    def __init__(self, examples: int = 64, **options: Any) -> None:
        self.accelerator = KVStoreAccelerator(WORKERS, **options)
        self.data = Examples(examples)
        net = make_net(rank_of_process())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        drawn = torch.Generator().manual_seed(5)
        loader = DataLoader(self.data, BATCH, shuffle=True, generator=drawn)
        self.net, self.optimizer, self.loader = self.accelerator.prepare(net, optimizer, loader)
        self.norms: list[float] = []

    def epoch(self, max_norm: float | None = None, max_value: float | None = None) -> None:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.net):
                loss = nn.functional.mse_loss(self.net(x), y)
                self.accelerator.backward(loss)
                norm = None
                if self.accelerator.sync_gradients and max_norm is not None:
                    norm = self.accelerator.clip_grad_norm_(self.net.parameters(), max_norm)
                if self.accelerator.sync_gradients and max_value is not None:
                    self.accelerator.clip_grad_value_(self.net.parameters(), max_value)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.norms += [] if norm is None else [float(norm)]

    def found(self) -> dict[str, Any]:
        return {"weights": numbers(self.net), "seen": self.data.seen, "norms": self.norms}


def trained(
    *, epochs: int = EPOCHS, limits: dict[str, float] | None = None, **options: Any
) -> dict[str, Any]:
    run = Run(**options)
    for _ in range(epochs):
        run.epoch(**(limits or {}))
    return run.found()


def whole_run(folder: Path) -> dict[str, Any]:
    return trained()


def two_runs(folder: Path) -> list[list[float]]:
    """One epoch, what it saves, and another one, in a new run and in the same one after more steps."""
    first = Run()
    first.epoch()
    first.accelerator.save_state(str(folder / "saved"))
    first.epoch()
    second = Run()
    second.accelerator.load_state(str(folder / "saved"))
    second.epoch()
    first.accelerator.load_state(str(folder / "saved"))
    loaded = numbers(first.net)
    first.epoch()
    return [numbers(second.net), loaded, numbers(first.net)]


def clipped_by_norm(folder: Path) -> dict[str, Any]:
    return trained(limits={"max_norm": 0.3})


def clipped_by_value(folder: Path) -> dict[str, Any]:
    return trained(limits={"max_value": 0.05})


def measured(folder: Path) -> dict[str, Any]:
    return trained(limits={"max_norm": float("inf")})


def accumulated(folder: Path) -> dict[str, Any]:
    return trained(gradient_accumulation_steps=2)


def in_bfloat16(folder: Path) -> dict[str, Any]:
    AcceleratorState._reset_state()  # accelerate allows one precision in a process: this is the last case
    return trained(mixed_precision="bf16")


def uneven(folder: Path) -> dict[str, Any]:
    run = Run(13)
    loader = run.accelerator.prepare(DataLoader(Examples(13), 3))
    gathered = [at for x, _ in loader for at in run.accelerator.gather_for_metrics(x[:, 0]).tolist()]
    return {"gathered": gathered, "expected": Examples(13).x[:, 0].tolist()}


def refused(folder: Path) -> list[str]:
    run, said = Run(), []
    for call in (
        lambda: run.accelerator.clip_grad_norm_(list(run.net.parameters())[:1], 1.0),
        lambda: run.accelerator.join_uneven_inputs([run.net]),
    ):
        try:
            call()
        except ConfigurationError as error:
            said.append(str(error))
    return said


class Net(AccelerateMixin, NeuralNetRegressor):
    """skorch's own class for accelerate."""


def by_skorch(folder: Path) -> dict[str, Any]:
    data, lines = Examples(), []
    net = Net(
        lambda: make_net(rank_of_process()),
        accelerator=KVStoreAccelerator(WORKERS),
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=0.1,
        batch_size=BATCH,
        max_epochs=EPOCHS,
        train_split=None,
        iterator_train__shuffle=True,
        iterator_train__generator=torch.Generator().manual_seed(5),
        callbacks=[Checkpoint(dirname=str(folder / "saved"), monitor=None, f_history=None)],
        callbacks__print_log__sink=lambda line: lines.append(line) if WORKERS.rank == 0 else None,
    )
    net.fit(data, None)
    predicted = net.predict(np.asarray(data.x)[:13])
    return {
        "weights": numbers(net.module_),
        "seen": data.seen[: EPOCHS * len(data) // 2],
        "predicted": predicted.reshape(-1).tolist(),
        "lines": len(lines),
        "features": FEATURES,
    }


CASES = (
    whole_run,
    two_runs,
    clipped_by_norm,
    clipped_by_value,
    measured,
    accumulated,
    uneven,
    refused,
    by_skorch,
    in_bfloat16,
)

if __name__ == "__main__":
    run_cases(CASES)
