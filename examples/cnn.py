"""Handwritten digits with a convolutional network and GroupNorm: what a Trainer can do beside a plain step.

    python examples/cnn.py                                    # one process, no servers
    python examples/cnn.py --config examples/cnn.json         # the same options from a file, and the same weights
    python examples/cnn.py --replicas 2                       # two replicas of the network in one process
    python examples/cnn.py --amp bfloat16 --accumulate 2
    kvlaunch -n 2 -s 2 -- python examples/cnn.py              # two workers, two parameter servers
    torchrun --nproc-per-node 2 examples/cnn.py               # two workers of torch.distributed

Biases learn at twice the rate, GroupNorm is not decayed, the norm of the gradient is limited, and the learning rate
first grows and then falls along a cosine. Whatever runs the updates, they are the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def trainer_in_python(model: nn.Module, updates: int, **chosen: Any) -> kvtrainer.Trainer:
    """The Trainer with its options as arguments; the file cnn.json says the same."""
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


def trainer_from_file(path: Path, model: nn.Module, updates: int, **chosen: Any) -> kvtrainer.Trainer:
    """The Trainer that a configuration describes, in the form of MMCV or mmengine, as JSON."""
    return kvtrainer.Trainer.from_config(
        model, {**json.loads(path.read_text()), "max_iters": updates}, **chosen
    )


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    options = arguments(argv)
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.init_process_group("gloo")
    kv = kvtrainer.kvstore.create(options.kvstore)
    net = build()
    model = kvtrainer.DataParallel(net, ["cpu"] * options.replicas) if options.replicas > 1 else net
    batches = options.epochs * STEPS
    updates = math.ceil(batches / options.accumulate)
    chosen: dict[str, Any] = {"kvstore": kv, "accumulate": options.accumulate}
    if options.amp is not None:
        chosen["amp"] = {"dtype": options.amp}
    if options.config is None:
        trainer = trainer_in_python(model, updates, **chosen)
    else:
        trainer = trainer_from_file(options.config, model, updates, **chosen)
    trainer.set_progress(0, batches)  # the last update may have fewer batches
    if kv.rank == 0:
        print(trainer.describe_params())
    train(model, trainer, kv, options.epochs)
    if kv.rank == 0 and options.save is not None:
        torch.save(net.state_dict(), options.save)
    trainer.close()
    kv.close()
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.destroy_process_group()


def train(model: nn.Module, trainer: kvtrainer.Trainer, kv: Any, epochs: int) -> None:
    """The loop; each worker takes its share of every batch, and rank 0 says what became of it."""
    x, y, held_out_x, held_out_y = plain.load()
    share, began = plain.BATCH // kv.num_workers, time.perf_counter()
    for epoch in range(epochs):
        model.train()
        for batch in plain.batches(len(y), epoch):
            mine = batch[kv.rank * share :][:share]
            with trainer.context():
                if isinstance(model, kvtrainer.DataParallel):
                    loss: Any = model.forward_losses((x[mine], y[mine]), loss_of)
                else:
                    loss = loss_of(model, (x[mine], y[mine]))
            result = trainer.update_params(loss)
        if kv.rank == 0:
            print(
                f"epoch {epoch + 1:2}  lr {result.lr:.4f}  norm {result.grad_norm or math.nan:.2f}  clipped to "
                f"{result.clip_coef:.0%}  held-out accuracy {plain.accuracy(model.eval(), held_out_x, held_out_y):.2%}"
            )
    if kv.rank == 0:
        print(f"{time.perf_counter() - began:.1f} s")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    is_job = "KVSTORE_NUM_WORKERS" in os.environ
    parser.add_argument("--kvstore", default="dist_sync" if is_job else "device", help="default: %(default)s")
    parser.add_argument("--config", type=Path, help="a JSON file with the options of the Trainer")
    parser.add_argument("--replicas", type=int, default=1, help="of the network in each process")
    parser.add_argument("--amp", choices=("bfloat16", "float16"), help="compute in this precision")
    parser.add_argument("--accumulate", type=int, default=1, help="batches for one update")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save", type=Path, help="where rank 0 saves the weights at the end")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
