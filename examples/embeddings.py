"""Word vectors with row-sparse gradients, on any number of workers and parameter servers.

    kvlaunch -n 2 -s 2 -- python examples/embeddings.py
    python examples/embeddings.py                             # one process, no servers

The model guesses a word from the three before it. The text is the language reference that comes with Python. Words
are hashed to the rows of a table; a batch touches a small part of it, and only those rows travel to the servers. At
the end rank 0 compares the weights with a plain PyTorch loop, and looks at the rows that no word of the text has.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pydoc_data.topics import topics

import common
import torch
from torch import Tensor, nn

import kvtrainer

ROWS, WIDTH, CONTEXT = 20_000, 16, 3
GUESSED = 500
"""So many of the most frequent words are guessed; the others are context only."""
BATCH, STEPS, EVERY, LEARNING_RATE = 256, 200, 20, 0.1
EPSILON = 1e-3
"""So large that Adagrad does not blow the rounding error of a tiny first gradient up to a whole learning rate."""


def load() -> tuple[Tensor, Tensor]:
    """Return (rows of the words before, numbers of the words to guess): int64[n, CONTEXT] and int64[n]."""
    words = re.findall(r"[a-z]+", " ".join(topics.values()).lower())
    number = {word: at for at, (word, _) in enumerate(Counter(words).most_common(GUESSED))}
    rows = torch.tensor([zlib.crc32(word.encode()) % ROWS for word in words])
    places = [at for at in range(CONTEXT, len(words)) if words[at] in number]
    before = rows.unfold(0, CONTEXT, 1)[torch.tensor(places) - CONTEXT]
    return before, torch.tensor([number[words[at]] for at in places])


def build() -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(ROWS, WIDTH, sparse=True), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, GUESSED)
    )


def batches(count: int) -> list[Tensor]:
    """Indices of each batch, drawn the same way in every process."""
    gen = torch.Generator().manual_seed(1)
    return [torch.randint(count, (BATCH,), generator=gen) for _ in range(STEPS)]


def loss_of(net: nn.Module, before: Tensor, words: Tensor) -> float:
    """Mean loss over the whole text."""
    with torch.no_grad():
        return nn.functional.cross_entropy(net(before), words).item()


def plain(before: Tensor, words: Tensor) -> tuple[nn.Module, list[float]]:
    """The whole job in one process, with torch.optim.Adagrad; and the loss after every EVERY steps."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch.optim warns unless one decides
    net, losses = build(), []
    optimizer = torch.optim.Adagrad(net.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    for step, batch in enumerate(batches(len(words)), 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(before[batch]), words[batch]).backward()
        optimizer.step()
        if step % EVERY == 0:
            losses.append(loss_of(net, before, words))
    return net, losses


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    options = common.parser(__doc__).parse_args(argv)
    before, words = load()
    net, losses, touched = build(), [], 0.0
    adagrad = {"learning_rate": LEARNING_RATE, "epsilon": EPSILON}
    trainer = kvtrainer.Trainer(net, "adagrad", adagrad, kvstore=options.kvstore)
    for step, batch in enumerate(batches(len(words)), 1):
        mine = batch[trainer.rank :: trainer.num_workers]
        nn.functional.cross_entropy(net(before[mine]), words[mine], reduction="sum").backward()
        trainer.step(len(batch))
        touched += before[mine].unique().numel() / STEPS
        if trainer.rank == 0 and step % EVERY == 0:
            losses.append(loss_of(net, before, words))
            print(f"step {step:3}  loss {losses[-1]:.3f}")
    if trainer.rank == 0:
        print(f"a step of this worker touched {touched:.0f} of {ROWS} rows, on average")
        by_frequency, plain_losses = check(net, before, words)
        found = {"loss": losses, "plain_pytorch": plain_losses, "by_frequency": by_frequency}
        common.save(options.out, every=EVERY, touched=touched, **found)
    trainer.close()


def check(net: nn.Module, before: Tensor, words: Tensor) -> tuple[float, list[float]]:
    """Compare with guessing by frequency and plain PyTorch; return their losses."""
    reference, plain_losses = plain(before, words)
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    off = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    share = torch.bincount(words, minlength=GUESSED).double() / len(words)
    loss, by_frequency = loss_of(net, before, words), -(share * share.log()).sum().item()
    unused = torch.ones(ROWS, dtype=torch.bool)
    unused[before.unique()] = False
    first, last = build().get_parameter("0.weight")[unused], net.get_parameter("0.weight")[unused]
    print(f"loss {loss:.3f}, {by_frequency:.3f} by frequency; max |Δw| against plain PyTorch {off:.1e}")
    print(f"{len(first)} rows of no word: {'unchanged' if torch.equal(first, last) else 'changed'}")
    if loss > by_frequency - 0.5 or off > 1e-5 or not torch.equal(first, last) or not len(first):
        sys.exit("the result is not what it should be")
    print("all checks passed")
    return by_frequency, plain_losses


if __name__ == "__main__":
    main()
