"""Small models that are trained beside others: what each rank is given, and the weights where one process ends.

The process computes every rank's gradient in turn and applies their mean, so it must end where workers together do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-3
WARM_UP = 3
_BATCHES = 8
"""Of each rank, which take turns."""
_CLASSES = 10
_SIGNS = 96


@dataclass(frozen=True)
class Model:
    """A network, and one batch of inputs and labels for it."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Tensor]
    labels: Callable[[torch.Generator], Tensor]
    batch: int

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Random batches of a rank."""
        gen = torch.Generator().manual_seed(rank + 1)
        return [(self.inputs(gen), self.labels(gen)) for _ in range(_BATCHES)]

    def network(self) -> nn.Module:
        """The network as it is everywhere at the start."""
        torch.manual_seed(0)
        return self.build()


def loss_of(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross entropy of a batch."""
    inputs, labels = batch
    return nn.functional.cross_entropy(network(inputs).flatten(0, -2), labels.flatten())


def weights_of(network: nn.Module) -> Tensor:
    """All weights, one behind the other."""
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


@functools.cache
def reference(name: str, workers: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Weights at the start and after `rounds` steps of all workers, in one process."""
    model = MODELS[name]
    network = model.network()
    start = weights_of(network)
    data = [model.batches(rank) for rank in range(workers)]
    updater = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    for number in range(rounds):
        updater.zero_grad()
        for batches in data:
            (loss_of(network, batches[number % _BATCHES]) / workers).backward()
        updater.step()
    return start, weights_of(network)


def check(name: str, workers: int, rounds: int, found: Tensor) -> None:
    """Compare weights with those of one process.

    Rounding of gradients near 0 decides on the direction in which Adam moves a weight, so single weights may differ:
    all together must be much nearer to the reference than that went.

    Raises:
        AssertionError: they are not.
    """
    start, expected = reference(name, workers, rounds)
    went, apart = torch.dist(expected, start).item(), torch.dist(found, expected).item()
    if not apart <= 0.02 * went:
        raise AssertionError(f"{name}: weights went {went:g} and ended {apart:g} from those of one process")


def _mlp() -> nn.Module:
    sizes = (1024, 2048, 4096, 512, _CLASSES)
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers[:-1], nn.Linear(*sizes[-2:]))


def _deep() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(40)]
    return nn.Sequential(*layers, nn.Linear(64, _CLASSES))


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, _CLASSES)),
    )


class _CharTransformer(nn.Module):
    """Guesses the next sign of a text, from all before it."""

    def __init__(self, width: int = 128, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.signs = nn.Embedding(_SIGNS, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, bias=False
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, _SIGNS)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        values = self.signs(text) + self.places
        for layer in self.layers:
            values = layer(values, src_mask=self.mask)
        result: Tensor = self.head(values)
        return result


def _vectors(batch: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda gen: torch.randn(batch, *shape, generator=gen)


def _numbers(below: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda gen: torch.randint(below, shape, generator=gen)


MODELS = {
    "MLP 13 M": Model(_mlp, _vectors(64, 1024), _numbers(_CLASSES, 64), 64),
    "40 layers of 64 x 64": Model(_deep, _vectors(64, 64), _numbers(_CLASSES, 64), 64),
    "small CNN": Model(_cnn, _vectors(32, 3, 32, 32), _numbers(_CLASSES, 32), 32),
    "char transformer": Model(_CharTransformer, _numbers(_SIGNS, 16, 64), _numbers(_SIGNS, 16, 64), 16),
}
