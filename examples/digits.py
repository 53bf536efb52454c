"""Handwritten digits with any number of workers and parameter servers.

    kvlaunch -n 2 -s 2 -- python examples/digits.py
    python examples/digits.py                                 # one process, no servers

Every worker takes its share of each batch; the servers sum the gradients and run the optimizer. At the end rank 0
compares the weights with a plain PyTorch loop, and the servers' counters with the number of rounds.
"""

from __future__ import annotations

import sys

import common
import digits_plain as plain
import torch

import kvtrainer


def main() -> None:
    torch.set_num_threads(1)
    options = common.parser(__doc__).parse_args()
    x, y, held_out_x, held_out_y = plain.load()
    net = plain.build()
    sgd = {"learning_rate": plain.LEARNING_RATE, "momentum": plain.MOMENTUM}
    trainer = kvtrainer.Trainer(net.named_parameters(), "sgd", sgd, kvstore=options.kvstore)
    losses, accuracies = [], []
    for epoch in range(plain.EPOCHS):
        total, batches = 0.0, plain.batches(len(y), epoch)
        for batch in batches:
            mine = batch[trainer.rank :: trainer.num_workers]
            loss = torch.nn.functional.cross_entropy(net(x[mine]), y[mine], reduction="sum")
            loss.backward()
            trainer.step(len(batch))  # summed over the workers, divided by this
            total += loss.item() / len(mine)
        losses.append(total / len(batches))
        accuracies.append(plain.accuracy(net, held_out_x, held_out_y))
        if trainer.rank == 0:
            print(f"epoch {epoch + 1:2}  loss {losses[-1]:.4f}  held-out accuracy {accuracies[-1]:.2%}")
    if trainer.rank == 0:
        beside = check(net, trainer, accuracies[-1], plain.EPOCHS * len(batches))
        common.save(options.out, loss=losses, accuracy=accuracies, plain_pytorch=beside)
    trainer.close()


def check(net: torch.nn.Module, trainer: kvtrainer.Trainer, held_out: float, rounds: int) -> list[float]:
    """Compare with plain PyTorch, whose accuracies it returns, and with the servers' counts.

    Ends the job with an error if they differ. Without servers there are no counts.
    """
    expected, accuracies = plain.train()
    pairs = zip(net.parameters(), expected.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"held-out accuracy {held_out:.2%}; max |Δw| against plain PyTorch {difference:.1e}")
    applied, servers = [], trainer.server_stats()
    for server in servers:
        for table in server["tables"]:  # on one host a model as small as this lies on one of them
            applied.append(table["keys_applied"] == rounds * table["keys"] > 0)
            counted = f"{rounds} rounds x {table['keys']} keys = {table['keys_applied']} applied"
            print(f"server {server['server']}: {counted}")
    counts_are_right = all(applied) and bool(applied) == bool(servers)
    if held_out < 0.97 or difference > 1e-5 or not counts_are_right:
        sys.exit("the result is not what it should be")
    print("all checks passed")
    return accuracies


if __name__ == "__main__":
    main()
