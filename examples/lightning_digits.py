"""Handwritten digits with Lightning, on any number of workers and parameter servers.

    kvlaunch -n 2 -s 2 -- python examples/lightning_digits.py

The module and the loop are Lightning's own. The strategy has every worker see its part of each epoch, sends gradients
through the servers, and has one worker log. Needs `pip install 'kvtrainer[lightning]'`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import common
import digits_plain as plain
import lightning
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from kvtrainer.integrations.lightning import LightningStrategy


class Digits(lightning.LightningModule):
    """The network of digits_plain.py, and how it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain.build()
        self.accuracies: list[float] = []
        """On the held-out digits of all workers, after each epoch."""

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.net(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        x, y = batch
        right = (self.net(x).argmax(1) == y).double().mean()
        self.log("accuracy", right, sync_dist=True)  # the mean of all workers

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.accuracies.append(self.trainer.callback_metrics["accuracy"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=plain.LEARNING_RATE, momentum=plain.MOMENTUM)


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = common.parser(__doc__)
    parser.add_argument("--epochs", type=int, default=plain.EPOCHS)
    options = parser.parse_args(argv)
    strategy = LightningStrategy(options.kvstore)
    x, y, held_out_x, held_out_y = plain.load()
    share = plain.BATCH // strategy.workers.size
    training = DataLoader(TensorDataset(x, y), share, shuffle=True)
    held_out = DataLoader(TensorDataset(held_out_x, held_out_y), len(held_out_y))
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=options.epochs, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip
    module = Digits()
    trainer.fit(module, training, held_out)
    if trainer.is_global_zero:
        print(f"held-out accuracy {module.accuracies[-1]:.2%} after {options.epochs} epochs")
        common.save(options.out, accuracy=module.accuracies)
        if options.epochs == plain.EPOCHS and module.accuracies[-1] < 0.96:
            sys.exit("the result is not what it should be")


if __name__ == "__main__":
    main()
