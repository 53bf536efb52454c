"""Handwritten digits on Ray: workers and parameter servers are actors, and Ray starts the job again when one is lost.

    python examples/ray_digits.py --workers 2 --servers 2 --kill-after 12

The loop is that of digits.py. After each epoch rank 0 gives Ray a checkpoint. With `--kill-after` a worker ends itself
once Ray has it, as if its host had failed; the job goes on from the checkpoint, and ends with the weights of a plain
PyTorch loop all the same. Needs `pip install 'kvtrainer[ray,examples]'`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import digits_plain as plain
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

import kvtrainer
from kvtrainer.integrations.ray import KVStoreConfig, KVTrainer


def train(config: dict[str, Any]) -> None:
    """Train in one worker, from the last checkpoint on."""
    torch.set_num_threads(1)
    x, y, held_out_x, held_out_y = plain.load()
    net, accuracies, starts = plain.build(), [], []
    sgd = {"learning_rate": plain.LEARNING_RATE, "momentum": plain.MOMENTUM}
    found = ray.train.get_checkpoint()
    if found is None:
        trainer = kvtrainer.Trainer(net.named_parameters(), "sgd", sgd, kvstore="dist_sync")
    else:
        with found.as_directory() as folder:
            weights, accuracies, starts = torch.load(Path(folder, "run.pt"), weights_only=True)
            net.load_state_dict(weights)
            trainer = kvtrainer.Trainer(net.named_parameters(), "sgd", sgd, kvstore="dist_sync")
            trainer.load_states(Path(folder, "run.states"))
    starts.append(len(accuracies))
    for epoch in range(len(accuracies), config["epochs"]):
        for batch in plain.batches(len(y), epoch):
            mine = batch[trainer.rank :: trainer.num_workers]
            torch.nn.functional.cross_entropy(net(x[mine]), y[mine], reduction="sum").backward()
            trainer.step(len(batch))  # summed over the workers, divided by this
        accuracies.append(plain.accuracy(net, held_out_x, held_out_y))
        with tempfile.TemporaryDirectory() as folder:
            if trainer.rank == 0:
                torch.save((net.state_dict(), accuracies, starts), Path(folder, "run.pt"))
                trainer.save_states(Path(folder, "run.states"))
            kept = Checkpoint.from_directory(folder) if trainer.rank == 0 else None
            ray.train.report({"epoch": epoch + 1, "accuracy": accuracies[-1]}, checkpoint=kept)
        if trainer.rank == 1 and len(starts) == 1 and epoch + 1 == config["kill_after"]:
            # Ray takes what is reported every few seconds: without the checkpoint all would begin, and end, again.
            if not ray.train.get_all_reported_checkpoints(timeout_s=60):
                raise TimeoutError("Ray has taken no checkpoint within 60 s")
            os.kill(os.getpid(), 9)
    trainer.close()


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, help="write results as JSON into this file, for plots.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=plain.EPOCHS)
    parser.add_argument("--kill-after", type=int, default=0, metavar="EPOCHS", help="default: never")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = KVTrainer(
            train,
            train_loop_config={"epochs": options.epochs, "kill_after": options.kill_after},
            backend_config=KVStoreConfig(options.servers, {"CPU": 0.5}),
            scaling_config=ScalingConfig(num_workers=options.workers, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        )
        result = job.fit()
        with result.checkpoint.as_directory() as last:
            weights, accuracies, starts = torch.load(Path(last, "run.pt"), weights_only=True)
    check(weights, accuracies, starts, options.epochs)
    common.save(options.out, accuracy=accuracies, starts=starts)


def check(weights: dict[str, torch.Tensor], accuracies: list[float], starts: list[int], epochs: int) -> None:
    """Compare with plain PyTorch; ends the program with an error if the weights differ."""
    expected, _ = plain.train(epochs)
    difference = max((weights[name] - own).abs().max().item() for name, own in expected.state_dict().items())
    begun = " and ".join(f"after epoch {one}" for one in starts)
    print(f"begun {begun}; held-out accuracy {accuracies[-1]:.2%}")
    print(f"max |Δw| against plain PyTorch {difference:.1e}")
    if difference > 1e-5:
        sys.exit("the result is not what it should be")
    print("all checks passed")


if __name__ == "__main__":
    main()
