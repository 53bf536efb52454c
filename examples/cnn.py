"""Handwritten digits with a convolutional network and GroupNorm: what a Trainer can do beside a plain step.

    python examples/cnn.py                                    # one process, no servers
    python examples/cnn.py --config examples/cnn.json         # the same options from a file, and the same weights
    python examples/cnn.py --replicas 2 --amp bfloat16        # two replicas of the network in one process
    kvlaunch -n 2 -s 2 -- python examples/cnn.py              # two workers, two parameter servers
    torchrun --nproc-per-node 2 examples/cnn.py               # two workers of torch.distributed

Biases learn at twice the rate, GroupNorm is not decayed, the gradient is clipped, the learning rate grows and falls.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import digits_plain as plain
import torch
from torch import Tensor, nn

import kvtrainer

STEPS = 22
"""Batches in an epoch."""


def build() -> nn.Module:
    """Two convolutions before and one after a pooling, each with GroupNorm; the same weights in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for inside, outside in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.ReLU()]
    layers.insert(7, nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def make_trainer(model: nn.Module, updates: int, config: Path | None, **chosen: Any) -> kvtrainer.Trainer:
    """The Trainer as a file of MMCV's or mmengine's form describes it, or with its options as arguments."""
    if config is not None:
        return kvtrainer.Trainer.from_config(
            model, {**json.loads(config.read_text()), "max_iters": updates}, **chosen
        )
    cosine = kvtrainer.ParamSchedule.unbound(
        "lr", "CosineAnnealing", by="step", end=updates, min_lr=0.0, warmup="linear", warmup_iters=20, warmup_ratio=0.1
    )  # fmt: skip
    return kvtrainer.Trainer(
        model,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
        paramwise={"bias_lr_mult": 2.0, "norm_decay_mult": 0.0},
        clip_grad={"max_norm": 1.0},
        schedules=[cosine],
        **chosen,
    )


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = common.parser(__doc__)
    parser.add_argument("--config", type=Path, help="a JSON file with the options of the Trainer")
    parser.add_argument("--replicas", type=int, default=1, help="of the network in each process")
    parser.add_argument("--amp", choices=("bfloat16", "float16"), help="compute in this precision")
    parser.add_argument("--accumulate", type=int, default=1, help="batches for one update")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save", type=Path, help="where rank 0 saves the weights at the end")
    options = parser.parse_args(argv)
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.init_process_group("gloo")
    net = build()
    model = kvtrainer.DataParallel(net, ["cpu"] * options.replicas) if options.replicas > 1 else net
    batches = options.epochs * STEPS
    chosen = {"kvstore": options.kvstore, "accumulate": options.accumulate}
    if options.amp is not None:
        chosen["amp"] = {"dtype": options.amp}
    trainer = make_trainer(model, math.ceil(batches / options.accumulate), options.config, **chosen)
    trainer.set_progress(0, batches)  # the last update may have fewer batches
    train(model, trainer, options)
    if trainer.rank == 0 and options.save is not None:
        torch.save(net.state_dict(), options.save)
    trainer.close()
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.destroy_process_group()


def train(model: nn.Module, trainer: kvtrainer.Trainer, options: argparse.Namespace) -> None:
    """The loop; each worker takes its share of every batch, and rank 0 says what became of it."""
    x, y, held_out_x, held_out_y = plain.load()
    share, rates, accuracies = plain.BATCH // trainer.num_workers, [], []
    if trainer.rank == 0:
        print(trainer.describe_params())
    for epoch in range(options.epochs):
        model.train()
        for batch in plain.batches(len(y), epoch):
            mine = batch[trainer.rank * share :][:share]
            with trainer.context():
                if isinstance(model, kvtrainer.DataParallel):
                    loss: Any = model.forward_losses((x[mine], y[mine]), loss_of)
                else:
                    loss = loss_of(model, (x[mine], y[mine]))
            result = trainer.update_params(loss)
            rates.append(result.lr)
        accuracies.append(plain.accuracy(model.eval(), held_out_x, held_out_y))
        if trainer.rank == 0:
            print(f"epoch {epoch + 1:2}  lr {result.lr:.4f}  held-out accuracy {accuracies[-1]:.2%}")
    if trainer.rank == 0:
        common.save(options.out, lr=rates, accuracy=accuracies)


if __name__ == "__main__":
    main()
