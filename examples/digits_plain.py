"""Handwritten digits in plain PyTorch: the data, the model and the loop that the example is compared with."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH = 64
EPOCHS = 25
LEARNING_RATE = 0.1
MOMENTUM = 0.9


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (train images, train labels, held-out images, held-out labels): 1,437 and 360 of 64 pixels each."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    return x[:1437], y[:1437], x[1437:], y[1437:]


def build() -> nn.Module:
    """A small network; the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def batches(count: int, epoch: int) -> list[Tensor]:
    """Indices of each batch of an epoch, shuffled the same way in every process; a last, smaller batch is left out."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return list(order[: count - count % BATCH].split(BATCH))


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return (net(x).argmax(1) == y).double().mean().item()


def train(epochs: int = EPOCHS) -> tuple[nn.Module, list[float]]:
    """The whole job in one process, with torch.optim.SGD: the network, and its accuracy after each epoch."""
    x, y, held_out_x, held_out_y = load()
    net, accuracies = build(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for epoch in range(epochs):
        for batch in batches(len(y), epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
        accuracies.append(accuracy(net, held_out_x, held_out_y))
    return net, accuracies
