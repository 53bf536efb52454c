"""Handwritten digits with any number of workers and parameter servers.

    kvlaunch -n 2 -s 2 -- python examples/digits.py

Every worker takes its share of each batch; the servers sum the gradients and run the optimizer. At the end rank 0
compares the weights with a plain PyTorch loop, and the servers' counters with the number of rounds.
"""

from __future__ import annotations

import sys

import digits_plain as plain
import torch

import kvtrainer


def main() -> None:
    torch.set_num_threads(1)
    kv = kvtrainer.kvstore.create("dist_sync")
    x, y, held_out_x, held_out_y = plain.load()
    net = plain.build()
    options = {"learning_rate": plain.LEARNING_RATE, "momentum": plain.MOMENTUM}
    trainer = kvtrainer.Trainer(net.named_parameters(), "sgd", options, kvstore=kv)
    rounds = 0
    for epoch in range(plain.EPOCHS):
        total = 0.0
        for batch in plain.batches(len(y), epoch):
            mine = batch[kv.rank :: kv.num_workers]
            loss = torch.nn.functional.cross_entropy(net(x[mine]), y[mine], reduction="sum")
            loss.backward()
            trainer.step(len(batch))
            total += loss.item() / len(mine)
            rounds += 1
        if kv.rank == 0:
            held_out = plain.accuracy(net, held_out_x, held_out_y)
            print(
                f"epoch {epoch + 1:2}  loss {total * plain.BATCH / len(y):.4f}  held-out accuracy {held_out:.2%}"
            )
    if kv.rank == 0:
        check(net, trainer, plain.accuracy(net, held_out_x, held_out_y), rounds)
    kv.barrier()
    trainer.close()
    kv.close()


def check(net: torch.nn.Module, trainer: kvtrainer.Trainer, held_out: float, rounds: int) -> None:
    """Compare with plain PyTorch and with the servers' own counts; ends the job with an error if they differ."""
    pairs = zip(net.parameters(), plain.train().parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"held-out accuracy {held_out:.2%}; max |Δw| against plain PyTorch {difference:.1e}")
    applied = []
    for server in trainer.server_stats():
        [table] = server["tables"]
        applied.append(table["keys_applied"] == rounds * table["keys"] > 0)
        print(
            f"server {server['server']}: {rounds} rounds x {table['keys']} keys = {table['keys_applied']} applied"
        )
    if held_out < 0.97 or difference > 1e-5 or not all(applied):
        sys.exit("the result is not what it should be")
    print("all checks passed")


if __name__ == "__main__":
    main()
