"""Workers of uneven speed: what waiting for the slowest costs in synchronous, bounded and asynchronous rounds.

    kvlaunch -n 4 -s 1 -- python examples/uneven.py --kvstore dist_sync
    kvlaunch -n 4 -s 1 -- python examples/uneven.py --kvstore dist_ssp --staleness 8
    kvlaunch -n 4 -s 1 -- python examples/uneven.py --kvstore dist_async
    kvlaunch -n 4 -s 1 -- python examples/uneven.py --kvstore dist_ssp --slow turns

All train on handwritten digits for the same time. A batch takes `--batch-seconds`, for which a sleep stands, and four
times as long on a worker that is slow: always the last one, or by turns any of them, a batch here and there. Rank 0
looks at the held-out loss as time goes by. Each worker says how many steps it took.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import common
import digits_plain as plain
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import kvtrainer

BATCH, LEARNING_RATE = 32, 0.2
SLOWER = 4
"""Times as long as on the others takes a batch on a slow worker."""
EVERY = 0.1
"""Seconds from one look at the held-out loss to the next."""


def batches(count: int, trainer: kvtrainer.Trainer) -> Iterator[Tensor]:
    """Indices of this worker's batches, without end: its own part of the data, shuffled anew each time."""
    mine, generator = torch.arange(trainer.rank, count, trainer.num_workers), torch.Generator().manual_seed(0)
    while True:
        yield from mine[torch.randperm(len(mine), generator=generator)].split(BATCH)


def pause(seconds: float, slow: str, trainer: kvtrainer.Trainer, chance: random.Random) -> None:
    """Sleep for as long as a batch takes this worker this time."""
    last = trainer.num_workers - 1
    is_slow = trainer.rank == last if slow == "one" else chance.random() < 1 / trainer.num_workers
    time.sleep(seconds * SLOWER if is_slow else seconds)


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = common.parser(__doc__)
    parser.add_argument("--staleness", type=int, default=8, help="steps that dist_ssp lets a worker be ahead")
    parser.add_argument("--slow", choices=("one", "turns"), default="one", help="who is slow")
    parser.add_argument("--seconds", type=float, default=10.0, help="train for so long")
    parser.add_argument("--batch-seconds", type=float, default=0.02, help="a batch takes so long at least")
    options = parser.parse_args(argv)
    bound = {"staleness": options.staleness} if options.kvstore == "dist_ssp" else {}
    kv = kvtrainer.kvstore.create(options.kvstore, **bound)
    x, y, held_out_x, held_out_y = plain.load()
    net = plain.build()
    trainer = kvtrainer.Trainer(net, "sgd", {"learning_rate": LEARNING_RATE}, kvstore=kv)
    chance = random.Random(trainer.rank)
    seen: list[tuple[float, float]] = []
    steps = stalest = 0
    kv.barrier()
    began = time.monotonic()
    with trainer.join():  # whose time is over keeps the others company
        for batch in batches(len(y), trainer):
            cross_entropy(net(x[batch]), y[batch]).backward()
            pause(options.batch_seconds, options.slow, trainer, chance)
            trainer.step()
            steps, stalest = steps + 1, max(stalest, trainer.staleness)
            passed = time.monotonic() - began
            if trainer.rank == 0 and (not seen or passed > seen[-1][0] + EVERY):
                with torch.no_grad():
                    seen.append((round(passed, 3), cross_entropy(net(held_out_x), held_out_y).item()))
            if passed > options.seconds:
                break
    print(
        f"{steps} steps; at most {stalest} updates of others came between reading weights and changing them"
    )
    if trainer.rank == 0:
        print(f"held-out loss {seen[-1][1]:.3f} after {seen[-1][0]:.1f} s")
    if options.out is not None:
        path = options.out.with_suffix(f".{trainer.rank}.json")
        common.save(path, steps=steps, stalest=stalest, seen=seen)
    trainer.close()
    kv.close()


if __name__ == "__main__":
    main()
