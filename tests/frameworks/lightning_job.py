"""Lightning over a kvstore, in one worker of a job; see `jobs`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import kvtrainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.integrations.lightning import LightningStrategy
from tests.frameworks.jobs import (
    BATCH,
    EPOCHS,
    Examples,
    fail_at_third,
    make_net,
    numbers,
    rank_of_process,
    run_cases,
)


class Module(L.LightningModule):
    """A module as anybody writes it, without a word of workers."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = make_net(rank_of_process()) if net is None else net
        self.mean = MeanMetric()

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, at: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, at: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)
        self.mean.update((self.net(batch[0]) - batch[1]).square())
        self.log("metric", self.mean)

    def predict_step(self, batch: Any, at: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class WithSGD(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class WithTrainer(Module):
    kvstore = "dist_sync"

    def configure_optimizers(self) -> Any:
        options = {"lr": 0.1, "momentum": 0.9}
        return kvtrainer.Trainer(self.named_parameters(), "torch:SGD", options, kvstore=self.kvstore)


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, at: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trainer_in(folder: Path, **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    given = {"logger": False, "enable_checkpointing": False, "max_epochs": EPOCHS, **options}
    return L.Trainer(
        strategy=LightningStrategy("dist_sync"), accelerator="cpu", default_root_dir=folder, **quiet, **given
    )


def loader(data: Examples, shuffle: bool = True, batch: int = BATCH) -> DataLoader[Any]:
    return DataLoader(data, batch, shuffle=shuffle)


def fitted(folder: Path, module: L.LightningModule, **options: Any) -> list[float]:
    trainer_in(folder, **options).fit(module, loader(Examples()))
    return numbers(module.net)  # type: ignore[arg-type]


def whole_run(folder: Path) -> dict[str, Any]:
    data, module, checkpoint = Examples(), Module(), ModelCheckpoint(folder / "saved", save_last=True)
    trainer = trainer_in(
        folder,
        logger=CSVLogger(folder),
        enable_checkpointing=True,
        callbacks=[checkpoint],
        num_sanity_val_steps=0,
    )
    trainer.fit(module, loader(data), loader(Examples(32), shuffle=False))
    weights, found = numbers(module.net), {n: float(v) for n, v in trainer.callback_metrics.items()}
    trainer.save_checkpoint(folder / "end.ckpt")
    state = torch.load(folder / "end.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    return {
        "weights": weights,
        "seen": data.seen,
        "metrics": found,
        "place": [trainer.global_rank, trainer.world_size],
        "optimizer": type(trainer.optimizers[0]).__name__,
        "steps": sorted({float(one["step"]) for one in state.values()}),
    }


def two_runs(folder: Path) -> list[float]:
    first = trainer_in(folder, max_epochs=1)
    first.fit(Module(), loader(Examples()))
    first.save_checkpoint(folder / "first.ckpt")
    second = Module()
    trainer_in(folder).fit(second, loader(Examples()), ckpt_path=folder / "first.ckpt")
    return numbers(second.net)


def clipped_by_norm(folder: Path) -> list[float]:
    return fitted(folder, WithSGD(), gradient_clip_val=0.3)


def clipped_by_value(folder: Path) -> list[float]:
    return fitted(folder, WithSGD(), gradient_clip_val=0.05, gradient_clip_algorithm="value")


def accumulated(folder: Path) -> list[float]:
    return fitted(folder, WithSGD(), accumulate_grad_batches=2)


def in_bfloat16(folder: Path) -> list[float]:
    return fitted(folder, WithSGD(), precision="bf16-mixed")


def with_a_trainer(folder: Path) -> list[float]:
    return fitted(folder, WithTrainer())


def by_hand(folder: Path) -> list[float]:
    return fitted(folder, ByHand())


def with_one_trainer_in_two_fits(folder: Path) -> list[float]:
    """A Trainer that the module keeps is its own: nobody closes it."""

    class Keeping(WithTrainer):
        kept: Any = None

        def configure_optimizers(self) -> Any:
            self.kept = self.kept or super().configure_optimizers()
            return self.kept

    module, trainer = Keeping(), trainer_in(folder, max_epochs=1)
    trainer.fit(module, loader(Examples()))
    trainer.fit_loop.max_epochs = EPOCHS
    trainer.fit(module, loader(Examples()))
    return numbers(module.net)


def overflowing(folder: Path) -> dict[str, Any]:
    """The gradients of worker 1 alone overflow, in the first step."""

    class Overflowing(WithSGD):
        def training_step(self, batch: Any, at: int) -> torch.Tensor:
            overflows = rank_of_process() == 1 and at == 0
            return self.loss(batch) * (1e38 if overflows else 1.0)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    module, precision = Overflowing(), MixedPrecision("16-mixed", "cpu", scaler)
    trainer_in(folder, plugins=[precision], max_steps=2, max_epochs=1).fit(module, loader(Examples()))
    return {"weights": numbers(module.net), "scale": precision.scaler.get_scale()}


def uneven(folder: Path) -> dict[str, Any]:
    data, asked = Examples(13), Examples(13)
    trainer = trainer_in(folder, max_epochs=1)
    module = Module()
    trainer.fit(module, loader(data, batch=3))
    trainer.predict(module, loader(asked, shuffle=False, batch=3))
    return {"seen": data.seen, "predicted": asked.seen}


class Buffered(WithSGD):
    """A module with buffers, which notes them when it is validated or tested."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
        self.noted: list[list[list[float]]] = []

    def note(self) -> None:
        self.noted.append([one.reshape(-1).tolist() for one in self.net.buffers()])

    on_validation_epoch_start = on_test_epoch_start = note

    def test_step(self, batch: Any, at: int) -> None:
        self.validation_step(batch, at)


def with_buffers(folder: Path) -> list[list[list[float]]]:
    """Buffers in the validation after three steps, after the fourth, and in a test, before which each worker writes."""
    module, trainer = (
        Buffered(),
        trainer_in(folder, max_epochs=1, val_check_interval=3, num_sanity_val_steps=0),
    )
    trainer.fit(module, loader(Examples()), loader(Examples(), shuffle=False))
    module.note()
    next(module.net.buffers()).add_(rank_of_process())
    trainer.test(module, loader(Examples(), shuffle=False), verbose=False)
    return module.noted


def alone_by_mistake(folder: Path) -> str:
    module = WithTrainer()
    module.kvstore = "local"
    try:
        fitted(folder, module)
    except ConfigurationError as error:
        return str(error)
    return ""


def another_limit_later(folder: Path) -> str:
    class Changing(WithSGD):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            limit = 0.5 + self.trainer.global_step
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")

    try:
        fitted(folder, Changing())
    except ConfigurationError as error:
        return str(error)
    return ""


def fails(folder: Path) -> None:
    trainer_in(folder).fit(Module(fail_at_third(make_net())), loader(Examples()))


CASES = (
    whole_run,
    two_runs,
    clipped_by_norm,
    clipped_by_value,
    accumulated,
    in_bfloat16,
    with_a_trainer,
    with_one_trainer_in_two_fits,
    by_hand,
    overflowing,
    uneven,
    with_buffers,
    alone_by_mistake,
    another_limit_later,
)

if __name__ == "__main__":
    if sys.argv[2:] == ["fails"]:
        fails(Path(sys.argv[1]))
    else:
        run_cases(CASES)
