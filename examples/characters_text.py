"""The language reference that comes with Python, as numbers of its characters.

It differs a little from one version of Python to the next.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor

CONTEXT, BATCH = 64, 32
TEXT = "\n\n".join(topics[name] for name in sorted(topics))
LETTERS = sorted(set(TEXT))


def load() -> tuple[Tensor, Tensor]:
    """The text and the held-out rest of it, as numbers of characters."""
    number = {letter: at for at, letter in enumerate(LETTERS)}
    codes = torch.tensor([number[letter] for letter in TEXT])
    return codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]


def windows(text: Tensor, step: int) -> Tensor:
    """The batch of a step: BATCH pieces of the text of CONTEXT + 1 characters, the same ones in every process."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(CONTEXT + 1)]


def counted_bits(text: Tensor, held_out: Tensor) -> float:
    """Bits that a held-out character costs when it is guessed from how often it follows the one before in the text."""
    letters = len(LETTERS)
    counts = torch.bincount(text[:-1] * letters + text[1:], minlength=letters**2).view(letters, letters) + 0.1
    cost = -(counts / counts.sum(1, keepdim=True)).log2()
    return cost[held_out[:-1], held_out[1:]].mean().item()
