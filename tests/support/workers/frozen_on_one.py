"""A worker of a job in which only rank 0 trains the bias; delivers the weights after three steps."""

from __future__ import annotations

import torch

import kvtrainer
from tests.support.jobs import deliver, own_place


def train(update_on_kvstore: bool) -> list[torch.Tensor]:
    rank, _ = own_place()
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    net.bias.requires_grad_(rank == 0)
    options = {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.125}
    with (
        kvtrainer.kvstore.create("dist_sync") as kv,
        kvtrainer.Trainer(
            net.named_parameters(), "sgd", options, kvstore=kv, update_on_kvstore=update_on_kvstore
        ) as trainer,
    ):
        for step in range(3):
            net(torch.full((1, 3), float(rank + step))).sum().backward()
            trainer.step(1)
        kv.barrier()
    return [p.detach().clone() for p in net.parameters()]


if __name__ == "__main__":
    deliver({"in_store": train(True), "in_worker": train(False)})
