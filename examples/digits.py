"""Handwritten digits with any number of workers and parameter servers.

    kvlaunch -n 2 -s 2 -- python examples/digits.py
    python examples/digits.py                                 # one process, no servers

Every worker takes its share of each batch; the servers sum the gradients and run the optimizer. At the end rank 0
compares the weights with a plain PyTorch loop, and the servers' counters with the number of rounds.

With `kvlaunch --restart 3` workers and servers may be killed: they come back, and the figures are the same.
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
    # A worker that comes back goes on after its last step, with what it had written down then.
    start = trainer.resume()
    known = start.client_state or {"losses": [], "accuracies": [], "total": 0.0}
    losses, accuracies, total = known["losses"], known["accuracies"], known["total"]
    num_batches = len(plain.batches(len(y), 0))
    for step in range(start.round, plain.EPOCHS * num_batches + 1):
        epoch, at = divmod(step, num_batches)
        if at == 0 and step > 0:  # an epoch is over
            losses.append(total / num_batches)
            accuracies.append(plain.accuracy(net, held_out_x, held_out_y))
            total = 0.0
            if trainer.rank == 0:
                print(f"epoch {epoch:2}  loss {losses[-1]:.4f}  held-out accuracy {accuracies[-1]:.2%}")
        if epoch == plain.EPOCHS:
            break
        batch = plain.batches(len(y), epoch)[at]
        mine = batch[trainer.rank :: trainer.num_workers]
        loss = torch.nn.functional.cross_entropy(net(x[mine]), y[mine], reduction="sum")
        loss.backward()
        total += loss.item() / len(mine)
        trainer.client_state = {"losses": losses, "accuracies": accuracies, "total": total}
        trainer.step(len(batch))  # summed over the workers, divided by this
    if trainer.rank == 0:
        beside = check(net, trainer, accuracies[-1], plain.EPOCHS * num_batches)
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
