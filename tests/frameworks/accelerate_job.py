"""accelerate, and skorch's nets that use it, over a kvstore, in one worker of a job; see `jobs`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from skorch import NeuralNetRegressor
from skorch.callbacks import Callback, Checkpoint, LoadInitState
from skorch.dataset import ValidSplit
from torch import nn
from torch.utils.data import DataLoader

from kvtrainer.errors import ConfigurationError
from kvtrainer.integrations.accelerate import KVStoreAccelerator, join
from kvtrainer.integrations.skorch import KVStoreMixin
from tests.frameworks.jobs import (
    BATCH,
    EPOCHS,
    EXAMPLES,
    FEATURES,
    Examples,
    fail_at_third,
    make_net,
    numbers,
    rank_of_process,
    run_cases,
)

WORKERS = join("dist_sync")


class Run:
    """What a script prepares, and a loop as anybody writes it."""

    def __init__(
        self,
        examples: int = 64,
        prepare: Callable[[KVStoreAccelerator], object] = lambda accelerator: None,
        **options: Any,
    ) -> None:
        self.accelerator = KVStoreAccelerator(WORKERS, **options)
        prepare(self.accelerator)
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
    list(second.loader)  # the epoch that is done
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
    AcceleratorState._reset_state()  # accelerate allows one precision in a process: these are the last cases
    return trained(mixed_precision="bf16")


def in_float16(folder: Path) -> dict[str, Any]:
    """What accelerate does in float16 on a GPU, here on a CPU; worker 1 overflows in the first step."""
    AcceleratorState._reset_state()
    run, skipped, moved, kinds = Run(prepare=with_scaler, mixed_precision="fp16"), [], [], set()
    schedule = run.accelerator.prepare(
        torch.optim.lr_scheduler.LambdaLR(run.optimizer.optimizer, lambda _: 1.0)
    )
    run.net[0].register_forward_hook(lambda net, given, found: kinds.add(str(found.dtype)))
    for step, (x, y) in enumerate(run.loader):
        loss = nn.functional.mse_loss(run.net(x), y)
        run.accelerator.backward(loss * (1e38 if WORKERS.rank == 1 and step == 0 else 1.0))
        run.optimizer.step()
        schedule.step()
        run.optimizer.zero_grad()
        skipped.append(run.accelerator.optimizer_step_was_skipped)
        moved.append(schedule.scheduler.last_epoch)
    scaler = run.accelerator.scaler
    scale = scaler.get_scale()
    run.accelerator.save_state(str(folder / "saved"))
    run.accelerator.wait_for_everyone()  # the first worker writes some of it for all
    scaler.update(1.0)
    run.accelerator.load_state(str(folder / "saved"))
    scales = [scale, scaler.get_scale()]
    return {**run.found(), "skipped": skipped, "moved": moved, "scales": scales, "kinds": sorted(kinds)}


def with_scaler(accelerator: KVStoreAccelerator) -> None:
    """Let an Accelerator on a CPU train in float16, which it does by itself on GPUs alone."""
    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=2.0**8)
    accelerator.follow(WORKERS, {})


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


class Net(KVStoreMixin, NeuralNetRegressor):
    """A net as anybody writes it."""


def net_of_skorch(*callbacks: Any, make: Any = make_net, **options: Any) -> Net:
    accelerator = KVStoreAccelerator(WORKERS, mixed_precision=options.pop("mixed_precision", None))
    if accelerator.mixed_precision == "fp16":
        with_scaler(accelerator)
    given = {"max_epochs": EPOCHS, "train_split": None, "iterator_train__shuffle": True, **options}
    return Net(
        lambda: make(rank_of_process()),
        accelerator=accelerator,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=0.1,
        batch_size=BATCH,
        iterator_train__generator=torch.Generator().manual_seed(5),
        callbacks=list(callbacks),
        **given,
    )


def by_skorch(folder: Path, **options: Any) -> dict[str, Any]:
    data, lines = Examples(), []
    net = net_of_skorch(
        Checkpoint(dirname=str(folder / "saved"), monitor=None),
        callbacks__print_log__sink=lambda line: lines.append(line) if WORKERS.rank == 0 else None,
        **options,
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


def by_skorch_in_bfloat16(folder: Path) -> dict[str, Any]:
    return by_skorch(folder, mixed_precision="bf16")


def by_skorch_in_float16(folder: Path) -> dict[str, Any]:
    return by_skorch(folder, mixed_precision="fp16")


def by_skorch_resumed(folder: Path) -> dict[str, Any]:
    """One epoch, what it saves, and another one: in a new net, and in the same one after it has gone on."""
    saved = Checkpoint(dirname=str(folder / "saved"), monitor=lambda net: len(net.history) == 1)
    data, again = Examples(), Examples()
    first = net_of_skorch(saved, max_epochs=1).fit(data, None)
    second = net_of_skorch(LoadInitState(saved), max_epochs=1).fit(data, None)
    first.partial_fit(again, None)
    first.load_params(checkpoint=saved)
    loaded = numbers(first.module_)
    first.partial_fit(again, None)
    return {
        "weights": numbers(second.module_),
        "seen": data.seen,
        "loaded": loaded,
        "later": numbers(first.module_),
        "seen_later": data.seen[: EXAMPLES // 2] + again.seen[-EXAMPLES // 2 :],
        "epochs": len(second.history),
    }


def with_buffers_by_skorch(folder: Path) -> dict[str, Any]:
    """Buffers of each worker after an epoch without validation, and with it, where they are those of its beginning."""

    class Noting(Callback):  # type: ignore[misc]
        def on_epoch_end(self, net: Net, **_: Any) -> None:
            noted.append(buffers_of(net))

    def make(rank: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(FEATURES), make_net(rank))

    def buffers_of(net: Net) -> list[list[float]]:
        return [one.reshape(-1).tolist() for one in net.module_.buffers()]

    noted: list[list[list[float]]] = []
    net = net_of_skorch(make=make, max_epochs=1).fit(Examples(), None)
    split = ValidSplit(4, stratified=False)
    net_of_skorch(Noting(), make=make, max_epochs=1, train_split=split).fit(Examples(), None)
    return {"ended": buffers_of(net), "noted": noted}


def fails(framework: str) -> None:
    """Train in a framework, while a worker raises an error after two batches."""
    if framework == "skorch":
        net_of_skorch(criterion=lambda: fail_at_third(nn.MSELoss())).fit(Examples(), None)
    else:
        run = Run()
        run.net = fail_at_third(run.net)
        run.epoch()


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
    by_skorch_resumed,
    with_buffers_by_skorch,
    in_bfloat16,
    by_skorch_in_bfloat16,
    in_float16,
    by_skorch_in_float16,
)

if __name__ == "__main__":
    if sys.argv[2:]:
        fails(sys.argv[2])
    else:
        run_cases(CASES)
