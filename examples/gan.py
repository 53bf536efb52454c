"""Digits drawn by a network: a GAN, whose two Trainers share one store.

    python examples/gan.py                                    # one process, no servers
    python examples/gan.py --config examples/gan.json         # the same two Trainers from a file, the same weights
    kvlaunch -n 2 -s 2 -- python examples/gan.py              # two workers, two parameter servers
    torchrun --nproc-per-node 2 examples/gan.py               # two workers of torch.distributed
    python examples/gan.py --work-dir run --resume            # go on from the last checkpoint in run/

The generator makes an image of 8 x 8 pixels from noise and the digit that it should be; the discriminator tells such
images from real ones. They take turns, each with a Trainer of its own. A classifier that knows real digits reads the
drawn ones, and says how far they are from real ones as a whole (digits_reader.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import digits_plain as plain
import torch
from digits_reader import Reader
from gan_networks import NOISE, Gan
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import kvtrainer

BATCH = 128
EVERY = 20
"""Epochs from one checkpoint to the next."""


def make_trainers(gan: Gan, kvstore: Any, epochs: int) -> kvtrainer.TrainerDict:
    """Two Trainers on one store; the file gan.json says the same."""

    def trainer(network: nn.Module) -> kvtrainer.Trainer:
        late = kvtrainer.ParamSchedule.unbound("lr", "FlatCosine", end=epochs, start_percent=0.5, min_lr=0.0)
        adam = {"lr": 4e-3, "betas": (0.5, 0.999)}
        return kvtrainer.Trainer(network, torch.optim.Adam, adam, kvstore=kvstore, schedules=[late])

    return kvtrainer.TrainerDict(generator=trainer(gan.generator), discriminator=trainer(gan.discriminator))


def take_turns(gan: Gan, trainers: kvtrainer.TrainerDict, real: Tensor, digits: Tensor) -> None:
    """One step of the discriminator, then one of the generator."""
    loss = binary_cross_entropy_with_logits
    drawn = gan.draw(torch.randn(len(digits), NOISE), digits)
    scores, others = gan.judge(real, digits), gan.judge(drawn.detach(), digits)
    trainers["discriminator"].zero_grad()  # of what the generator's turn has left there
    trainers["discriminator"].update_params(
        loss(scores, torch.full_like(scores, 0.9)) + loss(others, torch.zeros_like(others))
    )
    scores = gan.judge(drawn, digits)
    trainers["generator"].update_params(loss(scores, torch.ones_like(scores)))


def train(strategy: kvtrainer.Strategy, gan: Gan, saved: dict[str, Any], options: argparse.Namespace) -> None:
    """Go through the data, from where a checkpoint was saved; ends the job with an error if nothing was learned."""
    x, y, _, _ = plain.load()
    trainers, share = strategy.optim_wrapper, BATCH // strategy.world_size
    assert isinstance(trainers, kvtrainer.TrainerDict)
    reader = Reader(x, NOISE)
    seen = saved.get("seen") or [[0, *reader(gan.draw)]]
    last = options.stop or options.epochs
    for epoch in range(seen[-1][0] + 1, last + 1):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(epoch))
        for batch in order[: len(y) - len(y) % BATCH].split(BATCH):
            mine = batch[strategy.rank * share :][:share]
            take_turns(gan, trainers, x[mine], y[mine])
        trainers.end_epoch()
        if epoch % EVERY == 0 or epoch == last:
            read, distance = reader(gan.draw)
            said = "epoch %d  read as asked for: %.1f %%  distance from real digits: %.2f"
            strategy.logger.info(said, epoch, 100 * read, distance)
            seen.append([epoch, read, distance])
            more = {"meta": {"epoch": epoch}, "seen": seen}
            strategy.save_checkpoint(f"{strategy.work_dir}/epoch_{epoch}.pt", extra_ckpt=more)
    if strategy.rank == 0:
        common.save(options.out, seen=seen, images=(reader.drawn[:40] * 255).int().tolist())
    if last == options.epochs and (seen[-1][1] < 0.75 or seen[-1][2] > seen[0][2] / 5):
        sys.exit("it has not learned to draw digits")


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = common.parser(__doc__)
    parser.add_argument("--config", type=Path, help="a JSON file that describes the two Trainers")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--stop", type=int, help="stop after this epoch, to go on with --resume")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--work-dir", default="work_dirs/gan", help="for checkpoints; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    randomness = {"seed": options.seed, "diff_rank_seed": True}  # so that workers draw different images
    strategy = kvtrainer.Strategy(
        options.kvstore, device="cpu", work_dir=options.work_dir, env_kwargs={"randomness": randomness}
    )
    gan = Gan()
    if options.config is None:
        parts: dict[str, Any] = {"optim_wrapper": make_trainers(gan, strategy.kvstore, options.epochs)}
    else:
        parts = json.loads(options.config.read_text())
    strategy.prepare(gan, **parts, dispatch_kwargs={"max_epochs": options.epochs})
    train(strategy, gan, strategy.load_or_resume(resume=options.resume) or {}, options)
    strategy.close()


if __name__ == "__main__":
    main()
