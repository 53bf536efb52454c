"""The two networks of the GAN, each of which is told which digit an image should be."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

NOISE = 32
"""Numbers from which an image is drawn."""


class Gan(nn.Module):
    """Both networks; a configuration names the optimizers after them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE + 10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Linear(64 + 10, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3),
            nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1), nn.Flatten(0),
        )  # fmt: skip

    def draw(self, noise: Tensor, digits: Tensor) -> Tensor:
        """Images [n, 64] of 0…1, from noise [n, NOISE] and the digits int64[n] that they should be."""
        images: Tensor = self.generator(torch.cat([noise, one_hot(digits, 10)], 1))
        return images

    def judge(self, images: Tensor, digits: Tensor) -> Tensor:
        """Scores [n] of images [n, 64] that should be these digits, positive for what seems real."""
        scores: Tensor = self.discriminator(torch.cat([images, one_hot(digits, 10)], 1))
        return scores
