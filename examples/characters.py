"""A transformer that guesses the next character, trained on the language reference that comes with Python.

    kvlaunch -n 2 -s 2 -- python examples/characters.py
    python examples/characters.py --steps 1000                # one process, no servers

At the end rank 0 compares the held-out tenth of the text with guessing from how often characters follow each other,
and has the network write a few lines.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import common
import torch
from characters_text import CONTEXT, LETTERS, counted_bits, load, windows
from torch import Tensor, nn

import kvtrainer

WIDTH, STEPS = 64, 300
EVERY = 10
"""Steps from one line about the loss to the next."""


class Transformer(nn.Module):
    """Characters int64[n, length ≤ CONTEXT] to scores of the next one [n, length, letters]; no dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights in every process
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        length = letters.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.letters(letters) + self.places.weight[:length]
        scores: Tensor = self.scores(self.layers(x, mask, is_causal=True))
        return scores


def loss_of(net: nn.Module, pieces: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a character."""
    return nn.functional.cross_entropy(net(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def bits(net: nn.Module, text: Tensor) -> float:
    """Bits that a character of the text costs when the network guesses it from those before, CONTEXT at most."""
    whole = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    with torch.no_grad():
        return (
            sum(loss_of(net, part).item() * len(part) for part in whole.split(256)) / len(whole) / math.log(2)
        )


def write(net: nn.Module, length: int) -> str:
    """Characters as the network draws them, one after another."""
    codes, generator = [LETTERS.index("\n")], torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(length):
            chances = net(torch.tensor([codes[-CONTEXT:]]))[0, -1].softmax(0)
            codes.append(int(torch.multinomial(chances, 1, generator=generator)))
    return "".join(LETTERS[code] for code in codes[1:])


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(argv)
    text, held_out = load()
    net = Transformer()
    trainer = kvtrainer.Trainer(
        net, "torch:AdamW", {"lr": 3e-3}, kvstore=options.kvstore, clip_grad={"max_norm": 1.0}
    )
    # A Trainer is a torch.optim.Optimizer, so torch's schedules take it.
    schedule = torch.optim.lr_scheduler.OneCycleLR(trainer, 3e-3, options.steps, cycle_momentum=False)
    losses = []
    for step in range(options.steps):
        loss = loss_of(net, windows(text, step)[trainer.rank :: trainer.num_workers])
        loss.backward()
        trainer.step()  # without a batch size: the mean of all workers
        schedule.step()
        losses.append(loss.item() / math.log(2))
        if trainer.rank == 0 and (step + 1) % (10 * EVERY) == 0:
            print(f"step {step + 1:4}  {sum(losses[-EVERY:]) / EVERY:.3f} bits a character")
    if trainer.rank == 0:
        found, by_counts = bits(net, held_out), counted_bits(text, held_out)
        written = write(net, 300)
        print(
            f"held out: {found:.3f} bits a character, {by_counts:.3f} by counts of pairs; it writes\n{written}"
        )
        common.save(options.out, bits=losses, held_out=found, by_counts=by_counts, written=written)
        if options.steps >= STEPS and found > by_counts:
            sys.exit("it has not learned to guess")
    trainer.close()


if __name__ == "__main__":
    main()
