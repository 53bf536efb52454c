"""Jobs of real frameworks: the data and the model of all of them, what a worker writes down, and how a job is run.

A job is a script with functions that take a folder and return plain values, `CASES`. Each worker runs all of them in
one process, because importing a framework takes longer than any of them, and writes down what they returned or raised.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

from tests.support.limits import LIMIT

ROOT = Path(__file__).parents[2]
FEATURES, EXAMPLES, BATCH, EPOCHS = 4, 64, 8, 2
"""A batch is that of one worker."""
WORKERS = 2

Case = Callable[[Path], Any]


class Examples(Dataset):  # type: ignore[type-arg]
    """Examples of a linear function, which notes which of them are asked for."""

    def __init__(self, count: int = EXAMPLES) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, FEATURES, generator=drawn)
        self.y = self.x.sum(1, keepdim=True)
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        self.seen.append(int(at))
        return self.x[at], self.y[at]


def make_net(rank: int = 0) -> nn.Module:
    """A small network, whose first weights are other ones on each worker, so that rank 0's have to reach all."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def fail_at_third(module: nn.Module) -> nn.Module:
    """Let a module raise an error on rank 1 when it is called for the third time."""
    calls = itertools.count(1)

    def raise_once(*_: Any) -> None:
        if next(calls) == 3 and rank_of_process() == 1:
            raise FloatingPointError("the third batch is bad")

    module.register_forward_pre_hook(raise_once)
    return module


def rank_of_process() -> int:
    return int(os.environ.get("KVSTORE_RANK", "0"))


def numbers(module: nn.Module) -> list[float]:
    """All weights of a module, which JSON keeps to the bit."""
    return [float(one) for p in module.parameters() for one in p.detach().reshape(-1)]


def union_batches(epoch: int, examples: int = EXAMPLES, workers: int = WORKERS) -> list[list[list[int]]]:
    """The batches of an epoch as DistributedSampler deals them, by step and worker."""
    interleaved = []
    for rank in range(workers):
        sampler: DistributedSampler[Any] = DistributedSampler(Examples(examples), workers, rank, shuffle=True)
        sampler.set_epoch(epoch)
        interleaved.append(list(sampler))
    return [[one[at : at + BATCH] for one in interleaved] for at in range(0, len(interleaved[0]), BATCH)]


def train_plainly(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    epochs: int = EPOCHS,
    *,
    accumulate: int = 1,
    before_step: Callable[[nn.Module], object] = lambda net: None,
    lr_factor: float = 1.0,
    epoch_batches: Callable[[int], list[list[list[int]]]] = union_batches,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """The weights of a plain torch loop in one process over the batches of all workers together."""
    net, data = make_net(), Examples()
    optimizer = make_optimizer(net)
    for epoch in range(epochs):
        for step, parts in enumerate(epoch_batches(epoch)):
            for part in parts:
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
                    loss = nn.functional.mse_loss(net(data.x[part]), data.y[part])
                (loss / accumulate / len(parts)).backward()
            if step % accumulate == accumulate - 1:
                before_step(net)
                optimizer.step()
                optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= lr_factor
    return numbers(net)


def run_cases(cases: Sequence[Case]) -> None:
    """Run cases in this worker; their results, by name, are in RANK.json of the folder that the command line names."""
    folder, found = Path(sys.argv[1]), {}
    for case in cases:
        own = folder / case.__name__
        own.mkdir(exist_ok=True)
        try:
            found[case.__name__] = {"value": case(own)}
        except Exception as error:
            found[case.__name__] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
            break  # the other workers wait for this one: no further case can come together
    (folder / f"{rank_of_process()}.json").write_text(json.dumps(found))


def launch(script: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as two workers and two servers."""
    starter = [sys.executable, "-m", "kvtrainer.jobs.kvlaunch", "-n", str(WORKERS), "-s", "2", "--"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    env = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [*starter, sys.executable, str(script), str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=2 * LIMIT, env=env, cwd=folder, check=False
    )


def assert_that_a_failed_worker_ends_the_job(script: Path, folder: Path, *arguments: str) -> None:
    """Run a script in which rank 1 raises what `fail_at_third` does: all end, it is said why, and nothing is left."""
    done = launch(script, folder, *arguments)
    assert done.returncode != 0
    assert re.search(r"^\[w1\] .*FloatingPointError: the third batch is bad$", done.stderr, re.MULTILINE)
    running = [one for one in Path("/proc").glob("[0-9]*") if _folder_of(one) == str(folder)]
    assert running == []


def _folder_of(process: Path) -> str:
    try:
        return os.readlink(process / "cwd")
    except OSError:  # it has ended meanwhile
        return ""


def need(framework: str, target: str = "test-frameworks") -> None:
    """Skip a file of tests where a framework is not installed."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}; make {target} installs it", allow_module_level=True)


class Job:
    """What the workers of a job wrote down, by rank."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.folder = folder
        self.done = launch(script, folder)
        names = [folder / f"{rank}.json" for rank in range(WORKERS)]
        assert all(one.exists() for one in names), self.done.stderr[-4000:]
        self._found = [json.loads(one.read_text()) for one in names]

    def of(self, case: str) -> list[Any]:
        """What a case returned, by rank."""
        for found in self._found:
            assert "value" in found.get(case, {}), (found.get(case), self.done.stderr[-4000:])
        return [found[case]["value"] for found in self._found]
