"""How good are drawn digits? A classifier that knows real ones looks at them."""

from __future__ import annotations

from collections.abc import Callable

import digits_plain as plain
import torch
from torch import Tensor


class Reader:
    """The classifier of digits_plain.py, beside the real images that it knows."""

    def __init__(self, real: Tensor, noise: int) -> None:
        with torch.random.fork_rng():
            self._net, _ = plain.train()
        self._real = self._features(real)
        self._digits = torch.arange(len(real)) % 10
        self._noise = torch.randn(len(real), noise, generator=torch.Generator().manual_seed(0))
        self.drawn = real
        """The images that were drawn last."""

    def __call__(self, draw: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float]:
        """The share of drawn digits that are read as what they should be, and how far they are from real ones.

        Args:
            draw: Makes images of noise and digits, always the same ones.
        """
        with torch.no_grad():
            self.drawn = draw(self._noise, self._digits)
        read = plain.accuracy(self._net, self.drawn, self._digits)
        return read, frechet(self._features(self.drawn), self._real)

    def _features(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self._net[:2](images).double()


def frechet(one: Tensor, other: Tensor) -> float:
    """Fréchet distance of two tables' rows as of normal distributions: |m - n|² + tr(A + B - 2 (AB)^½)."""
    a, b = torch.cov(one.T), torch.cov(other.T)
    values, vectors = torch.linalg.eigh(a)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    common = torch.linalg.eigvalsh(root @ b @ root).clamp_min(0).sqrt().sum()
    return ((one.mean(0) - other.mean(0)).square().sum() + a.trace() + b.trace() - 2 * common).item()
