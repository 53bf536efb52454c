"""Digits drawn by a network: a GAN, whose two Trainers share one store.

    python examples/gan.py                                    # one process, no servers
    python examples/gan.py --config examples/gan.json         # the same two Trainers from a file, the same weights
    kvlaunch -n 2 -s 2 -- python examples/gan.py              # two workers, two parameter servers
    torchrun --nproc-per-node 2 examples/gan.py               # two workers of torch.distributed
    python examples/gan.py --work-dir run --resume            # go on from the last checkpoint in run/

The generator makes an image of 8 x 8 pixels from noise and the digit that it should be; the discriminator tells such
images from real ones. They take turns, each with a Trainer of its own. At the end a classifier that knows real
digits reads the drawn ones, and says how far they are from real ones as a whole (Fréchet distance of its features).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import digits_plain as plain
import torch
from torch import Tensor, nn

import kvtrainer

NOISE, BATCH = 32, 128
EVERY = 20
"""Epochs from one checkpoint to the next."""


class Generator(nn.Module):
    """Noise [n, NOISE] and digits int64[n] to images [n, 64] of 0…1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NOISE + 10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
        )  # fmt: skip

    def forward(self, noise: Tensor, digits: Tensor) -> Tensor:
        images: Tensor = self.layers(torch.cat([noise, nn.functional.one_hot(digits, 10)], 1))
        return images


class Discriminator(nn.Module):
    """Images [n, 64] and digits int64[n] to scores [n], positive for what seems real."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64 + 10, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3),
            nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1), nn.Flatten(0),
        )  # fmt: skip

    def forward(self, images: Tensor, digits: Tensor) -> Tensor:
        scores: Tensor = self.layers(torch.cat([images, nn.functional.one_hot(digits, 10)], 1))
        return scores


class Gan(nn.Module):
    """Both networks; a configuration names the optimizers after them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(), Discriminator()


def trainers_in_python(gan: Gan, kvstore: Any, epochs: int) -> kvtrainer.TrainerDict:
    """Two Trainers on one store; the file gan.json says the same."""

    def trainer(network: nn.Module) -> kvtrainer.Trainer:
        late = kvtrainer.ParamSchedule.unbound("lr", "FlatCosine", end=epochs, start_percent=0.5, min_lr=0.0)
        adam = {"lr": 4e-3, "betas": (0.5, 0.999)}
        return kvtrainer.Trainer(network, torch.optim.Adam, adam, kvstore=kvstore, schedules=[late])

    return kvtrainer.TrainerDict(generator=trainer(gan.generator), discriminator=trainer(gan.discriminator))


def take_turns(gan: Gan, trainers: kvtrainer.TrainerDict, real: Tensor, digits: Tensor) -> None:
    """One step of the discriminator, then one of the generator."""
    judge, loss = gan.discriminator, nn.functional.binary_cross_entropy_with_logits
    drawn = gan.generator(torch.randn(len(digits), NOISE), digits)
    scores, others = judge(real, digits), judge(drawn.detach(), digits)
    trainers["discriminator"].zero_grad()  # of what the generator's turn has left there
    trainers["discriminator"].update_params(
        loss(scores, torch.full_like(scores, 0.9)) + loss(others, torch.zeros_like(others))
    )
    scores = judge(drawn, digits)
    trainers["generator"].update_params(loss(scores, torch.ones_like(scores)))


class Reader:
    """A classifier that knows real digits, and looks at drawn ones."""

    def __init__(self, real: Tensor) -> None:
        with torch.random.fork_rng():
            self._net = plain.train()
        self._real = self._features(real)
        self._digits = torch.arange(len(real)) % 10

    def __call__(self, gan: Gan) -> tuple[float, float]:
        """The share of drawn digits that are read as what they should be, and how far they are from real ones."""
        noise = torch.randn(len(self._digits), NOISE, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            drawn = gan.generator(noise, self._digits)
        return plain.accuracy(self._net, drawn, self._digits), frechet(self._features(drawn), self._real)

    def _features(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self._net[:2](images).double()


def frechet(one: Tensor, other: Tensor) -> float:
    """Fréchet distance of two tables' rows as of normal distributions: |m - n|² + tr(A + B - 2 (AB)^½)."""
    a, b = torch.cov(one.T), torch.cov(other.T)
    values, vectors = torch.linalg.eigh(a)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    common = torch.linalg.eigvalsh(root @ b @ root).clamp_min(0).sqrt().sum()
    return ((one.mean(0) - other.mean(0)).square().sum() + a.trace() + b.trace() - 2 * common).item()


def picture(gan: Gan) -> str:
    """The ten digits, drawn once each, in characters."""
    with torch.no_grad():
        drawn = gan.generator(torch.randn(10, NOISE), torch.arange(10)).view(10, 8, 8)
    rows = (drawn * 4.99).int().transpose(0, 1).tolist()
    return "\n".join("  ".join("".join(" .:*#"[ink] for ink in digit) for digit in row) for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    options = arguments(argv)
    randomness = {"seed": options.seed, "diff_rank_seed": True}  # so that workers draw different images
    strategy = kvtrainer.Strategy(
        options.kvstore,
        device="cpu",
        work_dir=options.work_dir,
        experiment_name="gan",
        env_kwargs={"randomness": randomness},
    )
    gan = Gan()
    if options.config is None:
        parts: dict[str, Any] = {"optim_wrapper": trainers_in_python(gan, strategy.kvstore, options.epochs)}
    else:
        parts = json.loads(options.config.read_text())
    strategy.prepare(gan, **parts, dispatch_kwargs={"max_epochs": options.epochs})
    train(strategy, gan, strategy.load_or_resume(resume=options.resume) or {}, options)
    strategy.close()


def train(strategy: kvtrainer.Strategy, gan: Gan, saved: dict[str, Any], options: argparse.Namespace) -> None:
    """Go through the data, from where a checkpoint was saved; ends the job with an error if nothing was learned."""
    x, y, _, _ = plain.load()
    trainers, log = strategy.optim_wrapper, strategy.logger.info
    assert isinstance(trainers, kvtrainer.TrainerDict)
    reader = Reader(x)
    untrained = saved.get("untrained", reader(gan)[1])
    first, last = saved.get("meta", {}).get("epoch", 0), options.stop or options.epochs
    share, began = BATCH // strategy.world_size, time.perf_counter()
    for epoch in range(first + 1, last + 1):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(epoch))
        for batch in order[: len(y) - len(y) % BATCH].split(BATCH):
            mine = batch[strategy.rank * share :][:share]
            take_turns(gan, trainers, x[mine], y[mine])
        trainers.end_epoch()
        if epoch % EVERY == 0 or epoch == last:
            read, distance = reader(gan)
            log(
                "epoch %d  read as asked for: %.1f %%  distance from real digits: %.2f",
                epoch,
                100 * read,
                distance,
            )
            more = {"meta": {"epoch": epoch}, "untrained": untrained}
            strategy.save_checkpoint(f"{strategy.work_dir}/epoch_{epoch}.pt", extra_ckpt=more)
    log("%.1f s\n%s", time.perf_counter() - began, picture(gan))
    if last == options.epochs:
        read, distance = reader(gan)
        log("untrained, the generator was %.2f from real digits, and now is %.2f", untrained, distance)
        if read < 0.75 or distance > untrained / 5:
            sys.exit("it has not learned to draw digits")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    is_job = "KVSTORE_NUM_WORKERS" in os.environ
    parser.add_argument("--kvstore", default="dist_sync" if is_job else "device", help="default: %(default)s")
    parser.add_argument("--config", type=Path, help="a JSON file that describes the two Trainers")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--stop", type=int, help="stop after this epoch, to go on with --resume")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument(
        "--work-dir", default="work_dirs/gan", help="for checkpoints and logs; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
