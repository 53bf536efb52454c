"""What a script asks and tells a Trainer about the job: rank, number of workers, numbers of each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.utils.data import DistributedSampler, TensorDataset

import kvtrainer
from kvtrainer.errors import ArgumentTypeError


class Writer:
    """Keeps what is written, as a SummaryWriter would draw it."""

    def __init__(self) -> None:
        self.written: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.setdefault(tag, []).append((step, value))


def trained(steps: int, writer: Any, **options: Any) -> kvtrainer.Trainer:
    weights = Parameter(torch.zeros(4))
    trainer = kvtrainer.Trainer([weights], "sgd", {"learning_rate": 0.5}, kvstore="local", **options)
    trainer.log_to(writer)
    for step in range(steps):
        weights.grad = torch.full((4,), float(step + 1))
        trainer.report(loss=1.0 / (step + 1))
        trainer.step(1)
    return trainer


@pytest.mark.parametrize("kvstore", [None, "local", "device"])
def test_a_process_by_itself_is_the_only_worker(kvstore: str | None) -> None:
    trainer = kvtrainer.Trainer([Parameter(torch.zeros(2))], "sgd", kvstore=kvstore)
    assert (trainer.rank, trainer.num_workers) == (0, 1)


def test_a_sampler_takes_rank_and_number_of_workers() -> None:
    trainer = kvtrainer.Trainer([Parameter(torch.zeros(2))], "sgd", kvstore="local")
    data = TensorDataset(torch.arange(6))
    sampler = DistributedSampler(data, trainer.num_workers, trainer.rank, shuffle=False)
    assert list(sampler) == [0, 1, 2, 3, 4, 5]


def test_numbers_of_each_step_are_written() -> None:
    writer = Writer()
    trained(2, writer, clip_grad={"max_norm": 1.0})
    assert writer.written["train/lr"] == [(1, 0.5), (2, 0.5)]
    assert writer.written["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert writer.written["train/grad_norm"] == [(1, pytest.approx(2.0)), (2, pytest.approx(4.0))]
    assert [step for step, _ in writer.written["train/step_seconds"]] == [1, 2]


def test_what_is_not_known_is_not_written() -> None:
    writer = Writer()
    weights = Parameter(torch.zeros(4))
    trainer = kvtrainer.Trainer([weights], "sgd", kvstore=None)
    trainer.log_to(writer)
    weights.grad = torch.ones(4)
    trainer.step(1)
    assert set(writer.written) == {"train/lr", "train/step_seconds"}


def test_none_ends_the_writing() -> None:
    writer = Writer()
    trainer = trained(1, writer)
    before = {tag: list(values) for tag, values in writer.written.items()}
    trainer.log_to(None)
    trainer.param_groups[0]["params"][0].grad = torch.ones(4)
    trainer.step(1)
    assert writer.written == before


def test_what_takes_no_scalars_is_refused() -> None:
    trainer = kvtrainer.Trainer([Parameter(torch.zeros(2))], "sgd", kvstore=None)
    with pytest.raises(ArgumentTypeError):
        trainer.log_to("runs/1")


def test_tensorboard_itself_has_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="make test-frameworks installs tensorboard",
    )
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        trained(2, writer)
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/lr")] == [(1, 0.5), (2, 0.5)]
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
