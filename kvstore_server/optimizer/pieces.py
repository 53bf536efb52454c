"""Gradients that lie in pieces, and are multiplied and clipped in the cache just before a kernel reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CACHED = 256 * 1024
"""Elements that are worked on at a time where they are gone over more than once, so that they stay in the cache."""


class Pieces(NamedTuple):
    """A gradient that is yet to be multiplied and clipped.

    Args:
        tensors: Flat, one after the other; each ends where a line of 64 bytes does.
        scale: The factor.
        bound: The limit of the magnitude of each element, after that; None: there is none.
    """

    tensors: Sequence[Tensor]
    scale: float = 1.0
    bound: float | None = None


Gradient = Tensor | Pieces
"""Flat, as it is used, or in pieces."""


def bound_of(limit: float, values: Tensor) -> float:
    """Return a limit of elements that their dtype can hold.

    A greater one limits infinities alone, and torch refuses it.
    """
    return min(limit, torch.finfo(values.dtype).max)


def beside(
    grad: Gradient, *flats: Tensor, factor: float = 1.0
) -> Iterator[tuple[list[Tensor], list[list[Tensor]]]]:
    """Yield the tensors of a gradient, times a factor, and the parts of each flat tensor that lie beside them.

    All come at once if the gradient is used as it lies. Otherwise it is made block by block, each in memory that the
    next one overwrites, and still in the cache when it is read.
    """
    tensors, scale, bound = grad if isinstance(grad, Pieces) else Pieces([grad])
    if scale == factor == 1.0 and bound is None:
        sizes = list(map(Tensor.numel, tensors))
        yield list(tensors), [[flat] if len(sizes) == 1 else list(torch.split(flat, sizes)) for flat in flats]
        return
    blocks = list(_blocks(tensors))
    sizes = [sum([part.numel() for part in block]) for block in blocks]
    memory = tensors[0].new_empty(max(sizes))
    early, late = (factor, 1.0) if scale == 1.0 and bound is None else (scale, factor)
    for block, size, *own in zip(blocks, sizes, *[torch.split(flat, sizes) for flat in flats], strict=True):
        made = memory[:size]
        places = [made] if len(block) == 1 else torch.split(made, [part.numel() for part in block])
        for part, place in zip(block, places, strict=True):
            torch.mul(part, early, out=place)
        if bound is not None:
            made.clamp_(-bound, bound)
        if late != 1.0:
            made.mul_(late)
        yield [made], [[part] for part in own]


def _blocks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Put together, or cut, what stays in the cache."""
    block, size = list[Tensor](), 0
    for tensor in tensors:
        for part in torch.split(tensor, CACHED) if tensor.numel() > CACHED else (tensor,):
            if block and size + part.numel() > CACHED:
                yield block
                block, size = [], 0
            block.append(part)
            size += part.numel()
    yield block
